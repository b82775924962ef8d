"""What does the result of a benchmark look like on disk, and which of two results' rows belong together?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import RunDirectoryError
from paceline.plain_json import load_json

FORMAT = 1
FILE = "benchmark.json"
KINDS = ("throughput", "latency", "time_to_target")
# What says which thing was measured; everything else says how fast it was, or on what.
_NAMED_BY = {
    "throughput": ("device", "precision", "backend", "batch_size", "part", "processes"),
    "latency": ("device", "precision", "scenario", "batch_size"),
    "time_to_target": ("metric", "target"),
}


def read_result(path: Path) -> dict[str, Any]:
    """Read a result, or the one in a folder.

    Raises:
        RunDirectoryError: If it is missing or is no result of a benchmark.
    """
    file = path / FILE if path.is_dir() else path
    try:
        document = load_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunDirectoryError(
            f"'{path}' holds no result of a benchmark ({FILE}); give what `paceline bench RECIPE --output` wrote."
        ) from None
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"'{file}' cannot be read as the result of a benchmark: {error}.") from error
    if not isinstance(document, dict) or document.get("kind") not in KINDS or document.get("format") != FORMAT:
        raise RunDirectoryError(
            f"'{file}' is no result of a benchmark that this version reads (kind and format); measure it anew."
        )
    return document


def name_of_row(kind: str, row: Mapping[str, Any]) -> str:
    """What a row was measured of, in words that are the same in every result."""
    return ", ".join(f"{key}={row[key]}" for key in _NAMED_BY[kind] if row.get(key) is not None)
