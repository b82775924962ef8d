"""Choose the device and the CPU cores of this process, and describe what the device supports.

A GPU is attached to one socket's memory (its NUMA node). A process on another socket reaches it over the link between
the sockets, and a process that moves between cores loses its caches. The choice of cores is a function of the machine's
layout, the mode and the process's local rank; loader processes and threads inherit it.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from paceline.errors import RecipeError, setting_error
from paceline.host.machine import available_cores, cpu_name, memory_bytes
from paceline.host.world import World
from paceline.plan import MachineFacts

_SYS = Path("/sys")
_THREADS = Path("/proc/self/task")

Core = tuple[int, ...]
"""A physical core: the numbers of its logical CPUs."""


@dataclass(frozen=True)
class Topology:
    """The part of the machine this process may use.

    Attributes:
        nodes: The physical cores of each NUMA node, in the order of their first logical CPU.
    """

    nodes: Mapping[int, tuple[Core, ...]]

    @property
    def cores(self) -> tuple[Core, ...]:
        """All cores."""
        return tuple(sorted(core for cores in self.nodes.values() for core in cores))


@dataclass(frozen=True)
class CoreAssignment:
    """The cores of one process.

    Attributes:
        cpus: Logical CPUs it may run on.
        threads: Number of physical cores reserved for it, or its share of cores shared with others; at least one.
        reason: The reason, in words.
    """

    cpus: frozenset[int]
    threads: int
    reason: str


def read_topology(allowed: frozenset[int], sys: Path = _SYS) -> Topology:
    """Return the cores that hold the allowed CPUs, by NUMA node; all on node 0 if the system does not report nodes.

    Args:
        allowed: Logical CPUs that this process may use: a container or a batch system may restrict them.
        sys: Linux's directory that describes the machine.
    """
    nodes: dict[int, tuple[Core, ...]] = {}
    seen: frozenset[int] = frozenset()
    for path in (sys / "devices/system/node").glob("node[0-9]*"):
        cpus = parse_cpus(_read(path / "cpulist")) & allowed
        if cpus:
            nodes[int(path.name.removeprefix("node"))] = _cores(cpus, sys)
            seen |= cpus
    if rest := allowed - seen:
        nodes[0] = tuple(sorted((*nodes.get(0, ()), *_cores(rest, sys))))
    return Topology(dict(sorted(nodes.items())))


def _cores(cpus: frozenset[int], sys: Path) -> tuple[Core, ...]:
    cores = set()
    for cpu in cpus:
        siblings = parse_cpus(_read(sys / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"))
        cores.add(tuple(sorted((siblings & cpus) | {cpu})))
    return tuple(sorted(cores))


def node_of_device(bus: str, sys: Path = _SYS) -> int | None:
    """Return the NUMA node of a PCI device such as ``0000:17:00.0``; None if the system does not report it."""
    text = _read(sys / "bus/pci/devices" / bus.lower() / "numa_node").strip()
    return int(text) if text.isdigit() else None  # it is -1 if there is only one node, or none is known


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def parse_cpus(text: str) -> frozenset[int]:
    """Parse Linux's CPU list format, such as ``0-3,8``."""
    cpus: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def format_cpus(cpus: frozenset[int]) -> str:
    """Format CPUs as Linux does: ``0-3,8``."""
    runs = [[cpu for _, cpu in run] for _, run in groupby(enumerate(sorted(cpus)), lambda item: item[1] - item[0])]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def assign_cores(mode: str, topology: Topology, local_rank: int, device_nodes: Sequence[int | None]) -> CoreAssignment:
    """Choose the cores of one process.

    Args:
        mode: ``socket``: all near its device; ``single``: the first of those; ``single_unique``: one of those, unique
            to the process; ``interleaved``, ``contiguous``: an equal, exclusive share of those.
        topology: The cores that may be used.
        local_rank: The process's rank on this machine.
        device_nodes: For each process on this machine, the NUMA node of its device; None without one.

    Raises:
        RecipeError: If there are not enough cores.
    """
    nearby = _nearby_cores(topology, device_nodes)
    candidates = nearby[local_rank]
    sharing = [rank for rank, cores in enumerate(nearby) if cores == candidates]
    position = sharing.index(local_rank)
    per_process = min(len(cores) // nearby.count(cores) for cores in nearby)
    if mode in ("single_unique", "interleaved", "contiguous") and per_process == 0:
        raise setting_error(
            "parallel.affinity",
            mode,
            f"gives each process its own core, and there are {len(candidates)} near {len(sharing)} of them; use "
            "parallel.affinity=socket, or fewer processes.",
        )
    chosen = {
        "socket": candidates,
        "single": candidates[:1],
        "single_unique": candidates[position : position + 1],
        "interleaved": candidates[: per_process * len(sharing)][position :: len(sharing)],
        "contiguous": candidates[position * per_process : (position + 1) * per_process],
    }[mode]
    cpus = frozenset(cpu for core in chosen for cpu in core)
    shared = max(1, len(candidates) // len(sharing)) if mode == "socket" else len(chosen)
    nodes = [str(node) for node, cores in topology.nodes.items() if set(cores) & set(chosen)]
    where = f"NUMA node{'s' * (len(nodes) > 1)} {' and '.join(nodes)}"
    on = f"CPU{'s' * (len(cpus) > 1)} {format_cpus(cpus)} of {where}"
    return CoreAssignment(cpus, shared, f"process {local_rank} here runs on {on} ({mode})")


def _nearby_cores(topology: Topology, device_nodes: Sequence[int | None]) -> list[tuple[Core, ...]]:
    """Return the cores near each process of this machine; any two processes have identical or disjoint sets."""
    count = len(device_nodes)
    if all(node is None for node in device_nodes):  # no devices, or a machine that does not report nodes: equal parts
        nodes = list(topology.nodes.values())
        parts = [nodes[_part(rank, count, len(nodes))] for rank in range(count)]
        nearby = [tuple(sorted(core for node in part for core in node)) for part in parts]
    else:
        nearby = [topology.nodes.get(-1 if node is None else node, topology.cores) for node in device_nodes]
    return nearby if all(a == b or not set(a) & set(b) for a in nearby for b in nearby) else [topology.cores] * count


def _part(rank: int, count: int, nodes: int) -> slice:
    """Return the nodes of a process: at least one, in order; several if there are fewer processes than nodes."""
    first = rank * nodes // count
    return slice(first, max(first + 1, (rank + 1) * nodes // count))


def choose_cores(mode: str, world: World, device: torch.device, environ: Mapping[str, str]) -> CoreAssignment | None:
    """Return the cores that ``parallel.affinity`` assigns to this process; None if it leaves them to the system.

    Raises:
        RecipeError: If there are no cores to assign, or the launcher has already assigned them.
    """
    if mode == "none":
        return None
    if not hasattr(os, "sched_setaffinity"):
        raise setting_error("parallel.affinity", mode, "needs Linux; use parallel.affinity=none.")
    bound = environ.get("SLURM_CPU_BIND_TYPE", "none")
    if "SLURM_STEP_ID" in environ and not bound.startswith("none") and world.local_world_size > 1:
        raise RecipeError(
            f"parallel.affinity={mode}: Slurm has already bound each task to cores (SLURM_CPU_BIND_TYPE={bound}); "
            "use parallel.affinity=none, or start the tasks with srun --cpu-bind=none."
        )
    topology = read_topology(frozenset(os.sched_getaffinity(0)))
    return assign_cores(mode, topology, world.local_rank, _device_nodes(world, device, mode))


def _device_nodes(world: World, device: torch.device, mode: str) -> list[int | None]:
    """Return the NUMA node of each local process's device; for GPUs, as :func:`choose_device` assigns them."""
    if device.type != "cuda":
        return [None] * world.local_world_size
    visible = torch.cuda.device_count()
    if visible < world.local_world_size:
        raise setting_error(
            "parallel.affinity",
            mode,
            f"needs to see the devices of all {world.local_world_size} processes here, and this one sees {visible}; "
            "let every task see all (srun --gpu-bind=none), or use parallel.affinity=none.",
        )
    return [node_of_device(_bus(index)) for index in range(world.local_world_size)]


def _bus(index: int) -> str:
    facts: Any = torch.cuda.get_device_properties(index)  # torch's stub lacks the PCI numbers
    return f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"


def bind(cores: CoreAssignment | None) -> None:
    """Pin all threads of this process to these CPUs; new threads and child processes inherit it."""
    if cores is not None:
        _set(lambda _: cores.cpus)


@contextmanager
def restore_affinity() -> Iterator[None]:
    """Restore each thread's CPU affinity afterwards; threads started meanwhile get this thread's earlier one."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    previous, own = dict[int, set[int]](), os.sched_getaffinity(0)
    for thread in _threads():
        with suppress(ProcessLookupError):  # it has ended meanwhile
            previous[thread] = os.sched_getaffinity(thread)
    try:
        yield
    finally:
        if os.sched_getaffinity(0) != own:
            _set(lambda thread: previous.get(thread, own))


def _set(cpus: Callable[[int], frozenset[int] | set[int]]) -> None:
    for thread in _threads():
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(thread, cpus(thread))


def _threads() -> list[int]:
    try:
        return [int(path.name) for path in _THREADS.iterdir()]
    except OSError:  # no /proc is mounted here: only this thread
        return [0]


def available_devices() -> dict[str, str]:
    """Device types, with the reason why each is or is not available."""
    cuda = (
        f"{torch.cuda.device_count()} device(s)" if torch.cuda.is_available() else "no CUDA or ROCm device is visible"
    )
    xpu = "available (not tested)" if torch.xpu.is_available() else "no Intel GPU is visible"
    mps = "available (not tested)" if torch.backends.mps.is_available() else "this is not a Mac with Metal"
    return {"cpu": "available", "cuda": cuda, "mps": mps, "xpu": xpu}


def is_available(device_type: str) -> bool:
    """Whether torch can use this type of device now."""
    checks: dict[str, Callable[[], bool]] = {
        "cpu": lambda: True,
        "cuda": torch.cuda.is_available,
        "mps": torch.backends.mps.is_available,
        "xpu": torch.xpu.is_available,
    }
    return device_type in checks and checks[device_type]()


def choose_device(requested: str, world: World) -> torch.device:
    """Resolve ``parallel.device`` for this process; GPUs are assigned by local rank.

    Raises:
        RecipeError: If the requested device is not available.
    """
    # Metal has no collectives: several processes on a Mac train on its CPU.
    choices = ("cuda", "xpu", "mps", "cpu") if world.world_size == 1 else ("cuda", "xpu", "cpu")
    if requested == "mps" and world.world_size > 1:
        raise setting_error("parallel.device", "mps", "works with one process only; use one, or parallel.device=cpu.")
    kind = requested if requested != "auto" else next(k for k in choices if is_available(k))
    if not is_available(kind):
        raise RecipeError(
            f"parallel.device={kind}: {available_devices()[kind]}; use parallel.device=auto or one of: "
            f"{', '.join(k for k in ('cpu', 'cuda', 'mps', 'xpu') if is_available(k))}."
        )
    if kind in ("cuda", "xpu"):
        module = getattr(torch, kind)
        index = device_index(world, module.device_count(), bound_by_slurm="SLURM_STEP_ID" in os.environ)
        module.set_device(index)
        return torch.device(kind, index)
    return torch.device(kind)


def device_index(world: World, visible: int, *, bound_by_slurm: bool) -> int:
    """Return the index of this process's device: its local rank, or the only device that Slurm shows the task.

    Raises:
        RecipeError: If there are fewer devices than processes on this machine.
    """
    if bound_by_slurm and visible == 1:
        return 0
    if world.local_rank >= visible:
        raise RecipeError(
            f"process {world.local_rank} on this machine has no device for itself: there are {visible}; start at most "
            "that many processes, or use parallel.device=cpu."
        )
    return world.local_rank


# Devices whose tensors each back-end of torch.distributed exchanges.
_BACKENDS = {"gloo": ("cpu", "cuda"), "nccl": ("cuda",), "ucc": ("cpu", "cuda"), "xccl": ("xpu",)}


def check_communication(requested: str, device: torch.device) -> None:
    """Check that ``parallel.backend`` is available for this device.

    Raises:
        RecipeError: If it is not; names those that are.
    """
    if requested == "auto":
        return
    available = [
        name
        for name, devices in _BACKENDS.items()
        if device.type in devices and torch.distributed.is_backend_available(name)
    ]
    if requested not in available:
        raise RecipeError(
            f"parallel.backend={requested}: torch {torch.__version__} on this machine has {' and '.join(available)} "
            f"for {device.type}; use one of them, or parallel.backend=auto."
        )


def reserve_deterministic_workspace() -> None:
    """Make cuBLAS deterministic; this works only before the process first uses a CUDA device.

    A workspace setting of the user's is kept.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def describe_machine(
    device: torch.device, assignment: CoreAssignment | None = None, *, processes: int = 1
) -> MachineFacts:
    """Return the device facts the plan needs; the same on every rank of a uniform cluster, except for ``assignment``.

    Args:
        device: This process's device.
        assignment: The cores reserved for this process, if any.
        processes: Number of processes on this machine, which share its host memory.
    """
    fast_bf16, reason = _fast_bf16(device)
    threads = os.environ.get("OMP_NUM_THREADS", "")
    reasons = (
        {"fast_bf16": reason} if assignment is None else {"fast_bf16": reason, "parallel.affinity": assignment.reason}
    )
    return MachineFacts(
        device=device.type,
        device_name=_device_name(device),
        fast_bf16=fast_bf16,
        cores=available_cores(),
        threads=int(threads) if threads.isdigit() and int(threads) > 0 else None,
        assigned_cores=None if assignment is None else assignment.threads,
        memory_bytes=_memory_bytes(device, processes),
        lacks=_lacks(device, no_bf16_reason="" if fast_bf16 else reason),
        reasons=reasons,
    )


def _memory_bytes(device: torch.device, processes: int) -> int | None:
    if device.type == "cpu":
        total = memory_bytes()
        return None if total is None else total // processes
    if device.type in ("cuda", "xpu"):
        return int(torch.get_device_module(device).get_device_properties(device).total_memory)
    return None


def _lacks(device: torch.device, *, no_bf16_reason: str) -> dict[str, str]:
    """Return what this device cannot do, with the reasons."""
    lacks = {"bf16_products": no_bf16_reason} if no_bf16_reason else {}
    if device.type != "cuda":
        lacks["fp8"] = f"it needs a CUDA device of compute capability 8.9 or more, and this run is on {device.type}"
        if device.type != "xpu":
            lacks["tf32"] = f"{device.type} has no TF32 products"
        return lacks
    major, minor = torch.cuda.get_device_capability(device)
    capability = f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}"
    if (major, minor) < (8, 0):
        lacks["tf32"] = f"{capability}, and TF32 products come with 8.0"
    if (major, minor) < (8, 9):
        lacks["fp8"] = f"{capability}, and fp8 products come with 8.9"
    elif importlib.util.find_spec("torchao") is None:
        lacks["fp8"] = "the package torchao is not installed (pip install 'paceline[fp8]')"
    return lacks


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        return cpu_name()
    return f"{torch.xpu.get_device_name(device) if device.type == 'xpu' else 'Metal'} (not tested)"


def _fast_bf16(device: torch.device) -> tuple[bool, str]:
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
        return fast, f"{torch.cuda.get_device_name(device)} {'has' if fast else 'has no'} bf16 matrix units"
    if device.type == "xpu":
        return True, "Intel GPUs have bf16 matrix units"
    if device.type == "cpu":
        cpuinfo = Path("/proc/cpuinfo")
        lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
        flags = next((line for line in lines if line.startswith("flags")), "")
        if names := sorted({"amx_bf16", "avx512_bf16"}.intersection(flags.split())):
            return True, f"the processor has bf16 products ({names[0]})"
        return False, "the processor has no bf16 products"
    return False, f"bf16 on {device.type} has not been measured"
