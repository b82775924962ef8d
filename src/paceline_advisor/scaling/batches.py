"""The batch law of a table: what larger batches cost until a target is reached."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import field
from pathlib import Path

from paceline.errors import RecipeError
from paceline.pages.page import Table
from paceline.pages.shown import Shown
from paceline_advisor import Json, as_json, frozen
from paceline_advisor.formulas.batch_law import BatchLaw, SweepPoint, fit_batch_law, why_no_law

_BATCHES = ("batch", "batch_size", "global_batch_size", "bs")
_UNITS = {"epochs": "epochs", "steps": "steps", "samples": "samples", "examples": "samples"}
_MOST_BYTES = 2**20
_RULE = "it needs the columns batch and epochs, steps or samples (to the target)"


@frozen
class BatchTable:
    """A table of batches with the law fitted to it.

    Attributes:
        path: The file.
        unit: What it counts until the target: ``epochs``, ``steps`` or ``samples``.
        rows: Batch and count of each run.
        law: The law, in steps; of a table of epochs, in steps times the part of an epoch that a sample is.
        asked: Batches to predict.
    """

    path: Path
    unit: str
    rows: Sequence[tuple[float, float]]
    law: BatchLaw
    asked: Sequence[int] = field(default_factory=tuple)

    def predicted(self, batch: float) -> float:
        """Return the count to the target with a batch, in the table's unit."""
        return self.law.steps(batch) if self.unit == "steps" else self.law.examples(batch)

    @property
    def fewest(self) -> float:
        """The count that the best batch needs: of steps with large batches, otherwise with small ones."""
        return (self.law.fewest_steps if self.unit == "steps" else self.law.fewest_examples).middle

    def to_json(self) -> Json:
        """Return the table and the law as JSON values."""
        law = self.law
        return dict(
            as_json(
                {
                    "path": str(self.path),
                    "unit": self.unit,
                    "critical_batch": law.critical_batch,
                    f"fewest_{self.unit}": self.fewest,
                    "spread": law.spread,
                    "worst_deviation": law.worst,
                    "rows": [
                        {"batch": batch, "given": given, "predicted": self.predicted(batch)}
                        for batch, given in self.rows
                    ],
                    "predicted": [{"batch": batch, self.unit: self.predicted(batch)} for batch in self.asked],
                }
            )
        )

    def __paceline__(self) -> Shown:
        """Show the critical batch, and the law next to the table."""
        rows = [
            (_figure(batch), _figure(given), _figure(found := self.predicted(batch)), f"{found / given - 1:+.1%}")
            for batch, given in sorted(self.rows)
        ]
        rows += [(_figure(batch), "–", _figure(self.predicted(batch)), "–") for batch in sorted(self.asked)]
        direction = "large" if self.unit == "steps" else "small"
        blocks: list[Table | str] = [
            f"  {self._knee()}",
            f"  Fewest {self.unit}, with {direction} batches: {_figure(self.fewest)}.",
            Table(columns=("batch", "given", "predicted", "error"), rows=rows, caption=f"{self.unit} to the target"),
        ]
        tested = [batch for batch, _ in self.rows]
        if outside := [_figure(each) for each in self.asked if not min(tested) <= each <= max(tested)]:
            blocks.append(
                f"  note: {', '.join(outside)} is outside of the table's batches, {_figure(min(tested))} to "
                f"{_figure(max(tested))}."
            )
        return Shown(title=f"Batch law of {self.path.name}", blocks=blocks)

    def _knee(self) -> str:
        knee = self.law.critical_batch
        if math.isinf(knee.middle):
            return f"No critical batch found: {self.unit} fit a straight law; it is above {_figure(knee.low)}."
        if knee.middle == 0:
            return f"No critical batch found: larger batches save no steps; it is below {_figure(knee.high)}."
        if math.isinf(knee.high):
            return f"Critical batch: {_figure(knee.middle)} (95 % interval: above {_figure(knee.low)})."
        return f"Critical batch: {_figure(knee.middle)} (95 % interval: {_figure(knee.low)} to {_figure(knee.high)})."


def fit_table(path: Path, asked: Sequence[int]) -> BatchTable:
    """Read a table of batches, and fit the law to it.

    Raises:
        RecipeError: If the table cannot be read, a value is not a positive number, or a law needs more rows.
    """
    unit, rows = _read(path)
    # Samples to the target are steps times the batch; the law has the same form in epochs.
    points = [SweepPoint(batch, count if unit == "steps" else count / batch) for batch, count in rows]
    if why := why_no_law(points):
        raise RecipeError(f"{path}: {why}; add rows.")
    return BatchTable(path=path, unit=unit, rows=rows, law=fit_batch_law(points), asked=tuple(asked))


def _read(path: Path) -> tuple[str, list[tuple[float, float]]]:
    try:
        if not path.is_file():
            raise RecipeError(f"--batches {path}: found no such file; give a CSV file: {_RULE}.")
        if path.stat().st_size > _MOST_BYTES:
            raise RecipeError(f"--batches {path}: the file is larger than 1 MiB; give one row per run.")
        lines = list(csv.reader(path.read_text(encoding="utf-8-sig").splitlines(), strict=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise RecipeError(f"--batches {path} cannot be read as CSV: {error}; {_RULE}.") from None
    begin = next((index for index, line in enumerate(lines) if any(cell.strip() for cell in line)), len(lines))
    header = [name.strip().lower() for name in lines[begin]] if begin < len(lines) else []
    of_batch = [index for index, name in enumerate(header) if name in _BATCHES]
    of_count = [index for index, name in enumerate(header) if name in _UNITS]
    if len(of_batch) != 1 or len(of_count) != 1:
        raise RecipeError(f"{path}: found the columns {', '.join(header) or 'none'}; {_RULE}, one of each.")
    rows = [
        (_number(path, number, line, of_batch[0], header), _number(path, number, line, of_count[0], header))
        for number, line in enumerate(lines[begin + 1 :], begin + 2)
        if any(cell.strip() for cell in line)
    ]
    return _UNITS[header[of_count[0]]], rows


def _number(path: Path, number: int, line: Sequence[str], index: int, header: Sequence[str]) -> float:
    text = line[index].strip() if index < len(line) else ""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (0 < value < 1e15):
        raise RecipeError(
            f"{path}, row {number}: {header[index]} is {text!r}, but it must be a number above 0; correct or remove it."
        )
    return value


def _figure(value: float) -> str:
    """Format three significant digits, or all of a whole number."""
    return f"{value:,.0f}" if value >= 1000 or value == int(value) else f"{value:.3g}"
