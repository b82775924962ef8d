#!/usr/bin/env python3
"""A Slurm of two nodes on this one machine, in a temporary directory, for as long as a command runs in it.

    tests/slurm/cluster.py sinfo                    # the partitions low and high
    tests/slurm/cluster.py bash                     # a shell in which sbatch, squeue, scancel, ... work

Nothing is installed, and nothing of a Slurm that may be here is touched: munged, slurmctld and two slurmd are started
with their own keys, sockets, ports and directories, and ended by their process numbers. On Debian and Ubuntu the
programs come with the packages slurm-wlm and munge (tests/slurm/setup).

There is no accounting, there are no control groups and no GPUs. The partition ``high`` preempts ``low``: a job in
``low`` gets the signal it asked for (``--signal``), or SIGTERM if it asked for none, and is requeued if it is still
there when GraceTime is over.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "squeue", "sinfo")
# Debian keeps daemons where an ordinary user's PATH does not look.
_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin", "/sbin"])
# Names that are addresses of this machine: the tasks of a job find one another by them.
_NODES = ("127.0.0.1", "127.0.0.2")
_START_SECONDS = 60.0
_STOP_SECONDS = 15.0

# KillWait: from the TERM of a scancel to its KILL. cred_expire: a requeued job waits for longer than that.
_CONFIGURATION = """
ClusterName=paceline-test
SlurmctldHost=localhost(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket,cred_expire=5
CredType=cred/munge
SlurmctldPort={controller_port}
SlurmctldPidFile={root}/slurmctld.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdPidFile={root}/slurmd-%n.pid
SlurmdLogFile={root}/slurmd-%n.log
SlurmdSpoolDir={root}/spool-%n
StateSaveLocation={root}/state
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=5,bf_interval=5,batch_sched_delay=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters={controller_parameters}
ReturnToService=2
SlurmdTimeout=60
MessageTimeout=60
BatchStartTimeout=60
KillWait={kill_wait}
InactiveLimit=0
{nodes}
PartitionName=low Nodes=ALL OverSubscribe=EXCLUSIVE Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime={grace}
PartitionName=high Nodes=ALL OverSubscribe=EXCLUSIVE MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF
"""


class ClusterError(Exception):
    """Slurm did not start."""


def missing_programs() -> list[str]:
    """What would have to be installed."""
    return [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]


@dataclass(frozen=True)
class Cluster:
    """A Slurm that runs.

    Attributes:
        root: Its directory: configuration, keys, sockets, logs, state.
        environment: What a process must have in its environment to speak to it.
    """

    root: Path
    environment: dict[str, str]

    def call(self, *command: str, check: bool = True) -> str:
        """Run a command of Slurm's and return what it printed."""
        done = subprocess.run(
            command, env={**os.environ, **self.environment}, capture_output=True, text=True, timeout=90, check=False
        )
        if check and done.returncode:
            raise ClusterError(f"{' '.join(command)}: {done.stdout}{done.stderr}")
        return done.stdout


@contextlib.contextmanager
def cluster(
    *, send_user_signal: bool = True, grace_seconds: int = 120, kill_wait_seconds: int = 90
) -> Iterator[Cluster]:
    """Start a Slurm, and end it and everything in it afterwards.

    Args:
        send_user_signal: Whether a preempted job gets the signal of its ``--signal`` instead of SIGTERM.
        grace_seconds: What a preempted job is given.
        kill_wait_seconds: What a cancelled job is given.
    """
    # Not in pytest's directory: a socket's path may have 107 characters.
    root = Path(tempfile.mkdtemp(prefix="paceline-slurm-"))
    root.chmod(0o755)  # munged insists that others may look for its socket
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        values = {
            "send_user_signal": send_user_signal,
            "grace": grace_seconds,
            "kill_wait": kill_wait_seconds,
        }
        environment = _configure(root, values)
        running = Cluster(root, environment)
        _start_munge(root, daemons)
        _start(root, environment, daemons, "slurmctld", "-D")
        for node in _NODES:
            _start(root, environment, daemons, "slurmd", "-D", "-N", node)
        _wait_for_nodes(running, daemons)
        yield running
        _end_jobs(running)
    finally:
        _end(daemons)
        shutil.rmtree(root, ignore_errors=True)


def _configure(root: Path, values: dict[str, object]) -> dict[str, str]:
    for name in ("state", *(f"spool-{node}" for node in _NODES)):
        (root / name).mkdir()
    cores = os.cpu_count() or 1
    ports = _free_ports(1 + len(_NODES))
    # Nothing binds tasks to cores, so both nodes may have all of them.
    nodes = "\n".join(
        f"NodeName={node} NodeHostname={node} NodeAddr=127.0.0.1 Port={port} CPUs={max(cores, 2)} RealMemory=1000"
        for node, port in zip(_NODES, ports[1:], strict=True)
    )
    text = _CONFIGURATION.format(
        user=getpass.getuser(),
        root=root,
        controller_port=ports[0],
        nodes=nodes,
        controller_parameters="preempt_send_user_signal" if values["send_user_signal"] else "",
        grace=values["grace"],
        kill_wait=values["kill_wait"],
    ).replace("SlurmctldParameters=\n", "")
    # What is written of a node counts, whatever the machine has.
    text += "SlurmdParameters=config_overrides\n"
    (root / "slurm.conf").write_text(text)
    return {"SLURM_CONF": str(root / "slurm.conf"), "PATH": _PATH}


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _start_munge(root: Path, daemons: list[subprocess.Popen[bytes]]) -> None:
    key = root / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    files = [f"--{name}={root}/munge.{name.removesuffix('-file')}" for name in ("pid-file", "log-file", "seed-file")]
    options = [f"--key-file={key}", f"--socket={root}/munge.socket", *files]
    _start(root, {}, daemons, "munged", "--foreground", "--force", *options)
    _wait_until((root / "munge.socket").exists, daemons, root)


def _start(
    root: Path, environment: dict[str, str], daemons: list[subprocess.Popen[bytes]], name: str, *options: str
) -> None:
    program = shutil.which(name, path=_PATH)
    if program is None:
        raise ClusterError(f"there is no {name}; tests/slurm/setup installs it")
    with (root / f"{name}.out").open("ab") as out:
        # A session of its own: Ctrl-C is for the command, and what it leaves is ended in order.
        daemons.append(
            subprocess.Popen(
                [program, *options],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        )


def _wait_for_nodes(running: Cluster, daemons: Sequence[subprocess.Popen[bytes]]) -> None:
    def idle() -> bool:
        return running.call("sinfo", "-h", "-p", "low", "-t", "idle", "-o", "%D", check=False).strip() == "2"

    _wait_until(idle, daemons, running.root)


def _wait_until(condition: Callable[[], bool], daemons: Sequence[subprocess.Popen[bytes]], root: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not condition():
        ended = [str(each.args) for each in daemons if each.poll() is not None]
        if ended or time.monotonic() > deadline:
            logs = "\n".join(
                f"{path.name}: {path.read_text(errors='replace')[-2000:]}"
                for path in sorted([*root.glob("*.out"), *root.glob("*.log")])
            )
            raise ClusterError(f"Slurm did not start; ended: {ended}\n{logs}")
        time.sleep(0.2)


def _end_jobs(running: Cluster) -> None:
    """Jobs first: without a slurmd nobody would end their processes."""
    running.call("scancel", "--signal=KILL", "--full", "--user", getpass.getuser(), check=False)
    running.call("scancel", "--user", getpass.getuser(), check=False)
    deadline = time.monotonic() + _STOP_SECONDS
    while running.call("squeue", "-h", check=False).strip() and time.monotonic() < deadline:
        time.sleep(0.2)


def _end(daemons: Sequence[subprocess.Popen[bytes]]) -> None:
    for daemon in reversed(daemons):
        daemon.terminate()
    for daemon in daemons:
        try:
            daemon.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()


def main() -> int:
    """Run the command line's words in a cluster."""
    if missing := missing_programs():
        print(f"not here: {', '.join(missing)} (tests/slurm/setup installs them)", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with cluster() as running:
        command = sys.argv[1:] or ["sinfo"]
        return subprocess.run(command, env={**os.environ, **running.environment}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
