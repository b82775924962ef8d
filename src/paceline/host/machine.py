"""The machine that a process runs on: cores and memory it may use, and the processor's name."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_PROCESS_GROUPS = Path("/proc/self/cgroup")


def available_cores() -> int:
    """Count the cores this process may use, by its affinity and, on Linux, its cpusets and CPU quota."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(affinity, int(cpu_quota() or affinity)))


def busy_message(load: float | None = None) -> str:
    """Return a sentence if other processes keep all of this machine's cores busy; else an empty string.

    Args:
        load: Threads that ran or waited to run, averaged over the last minute; by default read from the system.
    """
    if load is None:
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    cores = available_cores()
    if load <= cores:
        return ""
    return (
        f"the machine was busy before anything was measured: a load of {load:.1f} on {cores} core{'s' * (cores != 1)}; "
        "measure again when it is idle"
    )


def memory_bytes() -> int | None:
    """Return the main memory that this process may use, of the machine or its control group; None if unknown."""
    try:
        installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
    limit = memory_limit()
    return installed if limit is None else min(installed, limit)


def cpu_quota(groups: Path = _CGROUPS, process_groups: Path = _PROCESS_GROUPS) -> float | None:
    """Return the CPU quota of this process's control groups and their parents, in cores; None without a limit.

    A container with `--cpus=2` sees all cores of its host, and is throttled whenever it uses more than two.
    """
    quotas = []
    for folder in _cgroup_folders("cpu", groups, process_groups):
        quota = _read_fields(folder / "cpu.max")  # version 2: quota and period, in microseconds
        quota = quota or _read_fields(folder / "cpu.cfs_quota_us") + _read_fields(folder / "cpu.cfs_period_us")
        if len(quota) == 2 and quota[0].isdigit() and int(quota[1]) > 0:
            quotas.append(int(quota[0]) / int(quota[1]))
    return min(quotas, default=None)


def memory_limit(groups: Path = _CGROUPS, process_groups: Path = _PROCESS_GROUPS) -> int | None:
    """Return the memory limit of this process's control groups in bytes; None without a limit."""
    limits = [
        int(field)
        for folder in _cgroup_folders("memory", groups, process_groups)
        for name in ("memory.max", "memory.limit_in_bytes")
        for field in _read_fields(folder / name)
        if field.isdigit()
    ]
    return min(limits, default=None)


def cpu_name() -> str:
    """Return the processor's name, if the system reports it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "Model"):
                return value.strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def cache_folder() -> Path:
    """Return the cache folder for recomputable results (XDG Base Directory Specification); it may not exist."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(root) if Path(root).is_absolute() else Path.home() / ".cache") / "paceline"
    except RuntimeError:  # a user without a home directory: no temporary folder can be trusted
        return Path(os.devnull) / "paceline"


def _cgroup_folders(controller: str, groups: Path, process_groups: Path) -> Iterator[Path]:
    """Yield the folders of this process's control group and its parents, of version 1 or 2."""
    try:
        lines = process_groups.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return  # not Linux
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = groups / controllers if controllers else groups
        inner = root / path.lstrip("/")
        # In a container the path may be the host's, and missing: the root is then the container's.
        yield from (folder for folder in (inner, *inner.parents) if folder == root or root in folder.parents)


def _read_fields(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").split()
    except OSError:
        return []
