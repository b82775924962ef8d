"""What lies in a run directory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def fingerprint(folder: Path) -> dict[str, str]:
    """Every file of a folder with its content's digest."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def saved_steps(run_dir: Path) -> list[int]:
    """The steps of its checkpoints."""
    return sorted(int(path.name.removeprefix("step-")) for path in (run_dir / "checkpoints").glob("step-*"))


def newest_weights(run_dir: Path) -> Path:
    """The weights file of its newest checkpoint."""
    return max((run_dir / "checkpoints").glob("step-*")) / "model.safetensors"


def rewrite_weights(
    source: Path, target: Path, tensors: Callable[[dict[str, Any]], dict[str, Any]] = dict, **described: Any
) -> Path:
    """Write a weights file once more, with other tensors or descriptions: a whole text, or keys to change in one."""
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    with safe_open(source, "pt") as file:
        metadata = dict(file.metadata())
    for key, change in described.items():
        metadata[key] = change if isinstance(change, str) else json.dumps(json.loads(metadata[key]) | change)
    save_file({name: each.contiguous() for name, each in tensors(load_file(source)).items()}, target, metadata)
    return target
