"""What lies in a run directory."""

from __future__ import annotations

import hashlib
from pathlib import Path


def fingerprint(folder: Path) -> dict[str, str]:
    """Every file of a folder with its content's digest."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def saved_steps(run_dir: Path) -> list[int]:
    """The steps of its checkpoints."""
    return sorted(int(path.name.removeprefix("step-")) for path in (run_dir / "checkpoints").glob("step-*"))
