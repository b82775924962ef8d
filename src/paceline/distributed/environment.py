"""Read this process's rank and world from the environment: of torchrun, mpirun, Slurm, Paceline's launcher."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from paceline.errors import LaunchError
from paceline.host.world import World

RENDEZVOUS_VARIABLE = "PACELINE_RENDEZVOUS"
RESTARTS_VARIABLE = "PACELINE_RESTARTS"


@dataclass(frozen=True)
class LaunchEnvironment:
    """A world and its rendezvous.

    Attributes:
        world: This process's rank and the world size.
        rendezvous: URL for torch.distributed's ``init_method``.
        source: Who started the processes: ``alone``, ``torchrun``, ``mpirun``, ``slurm`` or ``paceline``.
        store: HOST:PORT of the store that torchrun's agent keeps for its workers, if any. It outlives them.
        restarts: How often the processes were restarted so far.
        restart_setting: The torchrun setting, as written, that allows it to restart the processes; None without one.
    """

    world: World
    rendezvous: str
    source: str
    store: str | None = None
    restarts: int = 0
    restart_setting: str | None = None

    @property
    def changes_size(self) -> bool:
        """Whether nodes may join or leave, so that the world size may change at the next start."""
        return self.restart_setting is not None and self.restart_setting.startswith("--nnodes")


def read_launch(environ: Mapping[str, str]) -> LaunchEnvironment:
    """Find the world from environment variables.

    Raises:
        LaunchError: If the variables contradict one another or are incomplete.
    """
    is_single = environ.get("WORLD_SIZE", "1") == "1" and environ.get("RANK", "0") == "0"
    if "RANK" in environ and "WORLD_SIZE" in environ:
        world_size = _number(environ, "WORLD_SIZE")
        local_world_size = _number(environ, "LOCAL_WORLD_SIZE", world_size)
        world = _world(_number(environ, "RANK"), _number(environ, "LOCAL_RANK", 0), world_size, local_world_size)
        if (rendezvous := environ.get(RENDEZVOUS_VARIABLE)) is not None:
            return LaunchEnvironment(world, rendezvous, "paceline", restarts=_number(environ, RESTARTS_VARIABLE, 0))
        restarts = _number(environ, "TORCHELASTIC_RESTART_COUNT", 0)
        has_store = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        store = f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}" if has_store else None
        return LaunchEnvironment(world, "env://", "torchrun", store, restarts, _restart_setting(environ))
    if not is_single:
        missing, present = ("WORLD_SIZE", "RANK") if "RANK" in environ else ("RANK", "WORLD_SIZE")
        raise LaunchError(
            f"environment variable {present} is {environ[present]} but {missing} is not set; start the processes with "
            f"torchrun or --processes, or unset {present}."
        )
    if _number(environ, "OMPI_COMM_WORLD_SIZE", 1) > 1:  # first, since mpirun may run within a job of Slurm
        return LaunchEnvironment(_mpi_world(environ), _mpi_rendezvous(environ), "mpirun")
    if _number(environ, "SLURM_NTASKS", 1) > 1 and "SLURM_PROCID" in environ and "SLURM_STEP_ID" in environ:
        port = _number(environ, "MASTER_PORT", 20_000 + _number(environ, "SLURM_JOB_ID", 0) % 20_000)
        return LaunchEnvironment(_slurm_world(environ), f"tcp://{_slurm_host(environ)}:{port}", "slurm")
    return LaunchEnvironment(World(), "", "alone")


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name, None if default is None else str(default))
    if text is None or not text.strip().isdigit():
        raise LaunchError(
            f"environment variable {name} is {text!r}, but it must be a whole number; start with torchrun."
        )
    return int(text)


def _world(rank: int, local_rank: int, world_size: int, local_world_size: int) -> World:
    try:
        return World(rank=rank, local_rank=local_rank, world_size=world_size, local_world_size=local_world_size)
    except ValueError as error:
        raise LaunchError(f"the environment variables do not describe a valid world: {error}.") from None


def _restart_setting(environ: Mapping[str, str]) -> str | None:
    if "TORCHELASTIC_RUN_ID" not in environ:
        return None
    # torchrun does not tell its workers the range of nodes; it is on the command line of their parent, torchrun itself.
    nodes = _option(Path(f"/proc/{os.getppid()}/cmdline"), "--nnodes") or environ.get("PET_NNODES", "")
    if ":" in nodes:
        return f"--nnodes={nodes}"
    restarts = _number(environ, "TORCHELASTIC_MAX_RESTARTS", 0)
    return f"--max-restarts={restarts}" if restarts else None


def _option(command_line: Path, name: str) -> str | None:
    """Return the value of an option on a process's command line; None if it is missing or unreadable."""
    try:
        arguments = command_line.read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return None
    for argument, following in pairwise(arguments):
        option, sign, value = argument.partition("=")
        if option == name:
            return value if sign else following
    return None


def _mpi_world(environ: Mapping[str, str]) -> World:
    names = ("RANK", "LOCAL_RANK", "SIZE", "LOCAL_SIZE")
    return _world(*(_number(environ, f"OMPI_COMM_WORLD_{name}") for name in names))


def _mpi_rendezvous(environ: Mapping[str, str]) -> str:
    is_local = environ["OMPI_COMM_WORLD_LOCAL_SIZE"] == environ["OMPI_COMM_WORLD_SIZE"]
    if "MASTER_ADDR" not in environ and not is_local:
        raise LaunchError(
            "mpirun has started processes on several machines and MASTER_ADDR is not set; give it the first machine's "
            "name: mpirun -x MASTER_ADDR=HOST."
        )
    # A number that the processes of one mpirun share, and those of another do not.
    job = zlib.crc32(environ.get("PMIX_NAMESPACE", "").encode())
    port = _number(environ, "MASTER_PORT", 20_000 + job % 12_000)
    return f"tcp://{environ.get('MASTER_ADDR', '127.0.0.1')}:{port}"


def _slurm_world(environ: Mapping[str, str]) -> World:
    # SLURM_STEP_TASKS_PER_NODE looks like "4(x2),3": tasks on each node; this node's is found by its index.
    layout = environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE", "1"))
    per_node: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", layout):
        per_node += [int(count)] * int(times or 1)
    node = _number(environ, "SLURM_NODEID", 0)
    return _world(
        _number(environ, "SLURM_PROCID"),
        _number(environ, "SLURM_LOCALID", 0),
        _number(environ, "SLURM_NTASKS"),
        per_node[node] if node < len(per_node) else 1,
    )


def _slurm_host(environ: Mapping[str, str]) -> str:
    if "MASTER_ADDR" in environ:
        return environ["MASTER_ADDR"]
    if "SLURM_SRUN_COMM_HOST" in environ and _number(environ, "SLURM_NNODES", 1) == 1:
        return "127.0.0.1"
    nodes = environ.get("SLURM_STEP_NODELIST", environ.get("SLURM_NODELIST", ""))
    # "node[003-005,9].site,other" -> "node003.site": the first name of Slurm's compressed host list.
    first = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^\[,]*))?", nodes)
    if first is None:
        raise LaunchError(
            "Slurm names no nodes (SLURM_STEP_NODELIST is empty); set MASTER_ADDR to the first node's name."
        )
    return first[1] + (first[2] or "") + (first[3] or "")
