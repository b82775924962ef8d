"""Under which names do trackers show the numbers of an event?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NOT_SCALARS = frozenset({"event", "step", "position", "time", "epoch", "samples", "split", "weights"})


def scalars(event: Mapping[str, Any]) -> dict[str, float]:
    """A step's numbers as ``train/<name>``, an evaluation's as ``evaluation/<weights>/<name>``; nothing of others."""
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
    """A nested mapping by dotted keys; lists and empty mappings stay as they are."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{path}{key}.") if isinstance(value, Mapping) and value else {f"{path}{key}": value}
    return found
