"""What trackers have in common: an event's values by name, a recipe as flat keys, and what a tracker has logged."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.records.reader import read_json
from paceline.records.run_directory import encode_json

_NOT_SCALARS = frozenset({"event", "step", "position", "time", "epoch", "samples", "split", "weights"})


def scalars(event: Mapping[str, Any]) -> dict[str, float]:
    """Return a step's values as ``train/<name>``, an evaluation's as ``evaluation/<weights>/<name>``, else nothing."""
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


def flatten(tree: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return a nested mapping with dotted keys; lists and empty mappings are unchanged."""
    flattened: dict[str, Any] = {}
    for key, value in tree.items():
        flattened |= (
            flatten(value, f"{path}{key}.") if isinstance(value, Mapping) and value else {f"{path}{key}": value}
        )
    return flattened


def save_tracker_state(directory: Path, content: Mapping[str, Any]) -> None:
    """Write ``paceline.json``, the state of what a tracker has logged; atomic, but without waiting for the disk."""
    new = directory / ".paceline.json.new"
    new.write_text(encode_json(content), encoding="utf-8")
    new.replace(directory / "paceline.json")


def read_tracker_state(directory: Path) -> dict[str, Any]:
    """Return the content of ``paceline.json``; empty before it is first written."""
    path = directory / "paceline.json"
    return read_json(path) if path.is_file() else {}
