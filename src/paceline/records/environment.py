"""Environment of a run: versions, machine, revision, command line.

Environment variables are not recorded: they may contain passwords and tokens.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import platform
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.host.machine import available_cores, cpu_name, memory_bytes
from paceline.host.world import COMMAND_VARIABLE
from paceline.plugins.references import is_ours

_PACKAGES = (
    "paceline",
    "torch",
    "torchvision",
    "timm",
    "numpy",
    "pillow",
    "pydantic",
    "peft",
    "safetensors",
    "scikit-learn",
    "simplejpeg",
    "tensorboard",
    "nvidia-nccl-cu13",
    "nvidia-cudnn-cu13",
    "nvidia-dali-cuda120",
    "nvidia-dali-cuda130",
    "triton",
    "torchao",
)
_GIT_LIMIT_SECONDS = 2.0


def capture_environment(torch_facts: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Describe this process's environment, as written to ``environment.json``; takes some milliseconds.

    Args:
        torch_facts: What only torch knows (devices, CUDA version, ...); this room does not load it.
    """
    return {
        "time": time.time(),
        "command": os.environ.get(COMMAND_VARIABLE) or shlex.join(sys.argv),
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
    return {name: version for name in _PACKAGES if (version := _version(name)) is not None}


@functools.cache
def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_facts() -> dict[str, Any]:
    """Return the processor's name, its cores, and how many of them this process may use."""
    return {"model": cpu_name(), "cores": os.cpu_count(), "usable_cores": available_cores()}


def code_digests(references: Iterable[str], program: str | None = None) -> dict[str, str]:
    """Return a digest of each imported source file that holds code of yours, by its module.

    Args:
        references: Names of modules, or of objects in them; those of Paceline itself are left out.
        program: A program that trains the run. It and the modules next to it are named by their files' paths there.
    """
    loaded = {name: each for name, each in [*sys.modules.items()] if not (is_ours(name) or name == "__main__")}
    places = {name: getattr(each, "__file__", None) for name, each in loaded.items()}
    files = {name: Path(path) for each in references if (path := places.get(name := each.partition(":")[0]))}
    if program is not None:
        folder = Path(program).parent
        installed = sys.stdlib_module_names  # Python itself may be below the program's folder, too
        paths = (path for name, path in places.items() if path and name.partition(".")[0] not in installed)
        own = {Path(program), *map(Path, paths)}
        near = (path for path in sorted(own) if path.is_relative_to(folder) and "site-packages" not in path.parts)
        files |= {str(path.relative_to(folder)): path for path in near}
    return {name: file_digest(path) for name, path in files.items() if path.is_file()}


def file_digest(path: Path) -> str:
    """Return the digest of a source file, as recorded."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


@contextlib.contextmanager
def in_folder_of(environment: Mapping[str, Any]) -> Iterator[None]:
    """Context in the folder that the run was started in, if it exists: relative paths of its data begin there."""
    folder = folder_of(environment)
    with contextlib.nullcontext() if folder is None else contextlib.chdir(folder):
        yield


def folder_of(environment: Mapping[str, Any]) -> Path | None:
    """Return the folder that the run was started in; None if it does not exist."""
    folder = Path(str(environment.get("directory", "")))
    return folder if folder.is_absolute() and folder.is_dir() else None


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
        result = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",  # names of files may be in any encoding
            timeout=_GIT_LIMIT_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()
