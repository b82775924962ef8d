"""On what did this run happen: versions, machine, revision, command line?

Environment variables are not recorded: they hold passwords and tokens.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_PACKAGES = (
    "paceline",
    "torch",
    "torchvision",
    "timm",
    "numpy",
    "pillow",
    "pydantic",
    "safetensors",
    "scikit-learn",
    "tensorboard",
    "nvidia-nccl-cu13",
    "nvidia-cudnn-cu13",
    "triton",
)
_GIT_LIMIT_SECONDS = 2.0


def capture_environment(torch_facts: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Describe this process's environment, as written to ``environment.json``; takes some milliseconds.

    Args:
        torch_facts: What only torch knows (devices, CUDA version, ...); this room does not load it.
    """
    return {
        "time": time.time(),
        "command": shlex.join(sys.argv),
        "directory": str(Path.cwd()),
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": package_versions(),
        "cpu": cpu_facts(),
        "memory_bytes": memory_bytes(),
        "git": git_facts(Path.cwd()),
        **(torch_facts or {}),
    }


def package_versions() -> dict[str, str]:
    """Return the versions of the installed packages a result may depend on."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def cpu_facts() -> dict[str, Any]:
    """Return the processor's name, its cores, and how many of them this process may use."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"model": _cpu_model(), "cores": os.cpu_count(), "usable_cores": usable}


def _cpu_model() -> str:
    """Return the processor's marketing name where the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "Model"):
                return value.strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def memory_bytes() -> int | None:
    """Return the machine's main memory, or None where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def git_facts(directory: Path) -> dict[str, Any] | None:
    """Return the revision checked out and whether tracked files differ from it; None outside a repository."""
    revision = _git(directory, "rev-parse", "HEAD")
    if revision is None:
        return None
    changes = _git(directory, "status", "--porcelain", "--untracked-files=no")
    return {"revision": revision, "dirty": None if changes is None else bool(changes)}


def _git(directory: Path, *arguments: str) -> str | None:
    """Run git without letting it write, ask or take long; None if it is absent, fails or is slow."""
    command = ("git", "--no-optional-locks", "-C", str(directory), *arguments)
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_GIT_LIMIT_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
