"""The numbers of an event under the names that trackers show, and the note of how far a tracker has got."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.records.reader import read_json
from paceline.records.run_directory import encode_json

_NOT_SCALARS = frozenset({"event", "step", "position", "time", "epoch", "samples", "split", "weights"})


def scalars(event: Mapping[str, Any]) -> dict[str, float]:
    """Return a step's numbers as ``train/<name>``, an evaluation's as ``evaluation/<weights>/<name>``, else nothing."""
    match event["event"]:
        case "step":
            prefix = "train"
        case "evaluation":
            prefix = f"evaluation/{event['weights']}"
        case _:
            return {}
    return {
        f"{prefix}/{name}": value
        for name, value in event.items()
        if name not in _NOT_SCALARS and isinstance(value, int | float)
    }


def flat(tree: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return a nested mapping by dotted keys; lists and empty mappings stay as they are."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{path}{key}.") if isinstance(value, Mapping) and value else {f"{path}{key}": value}
    return found


def save_note(directory: Path, content: Mapping[str, Any]) -> None:
    """Write ``paceline.json``, what a tracker has logged so far; in one move, but without waiting for the disk."""
    new = directory / ".paceline.json.new"
    new.write_text(encode_json(content), encoding="utf-8")
    new.replace(directory / "paceline.json")


def read_note(directory: Path) -> dict[str, Any]:
    """Return what ``paceline.json`` holds; empty before the first one is written."""
    path = directory / "paceline.json"
    return read_json(path) if path.is_file() else {}
