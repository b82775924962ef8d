"""Compare two benchmark results or runs, and detect whether B is slower than A beyond chance and a tolerance.

It is a regression gate and fails only on evidence. Over all rows together it fails for two equal candidates in at most
5 % of cases (``1 - confidence``), by a one-sided Welch test on the logarithms of times with a Bonferroni correction per
row. If both have several launches, the launches are the samples: times vary more between processes than within one.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from paceline.errors import RunDirectoryError
from paceline.metrics.intervals import Interval, part_means, unpaired_ratio
from paceline.parsing.files import refuse_special_inputs
from paceline.parsing.plain_text import load_json
from paceline.records.events import for_display
from paceline.records.reader import read_environment, read_events, read_recipe
from paceline.records.run_directory import RunDirectory
from paceline.reports.html.runs import flattened
from paceline_advisor import Json, as_json, frozen

Verdict = Literal["slower", "no slower", "faster", "not enough evidence", "not comparable"]

FORMAT = 1
FILE = "benchmark.json"
# Keys that identify a measurement; all others are results or environment.
_NAMED_BY = {
    "throughput": ("device", "precision", "backend", "batch_size", "part", "processes"),
    "latency": ("device", "precision", "scenario", "batch_size"),
    "time_to_target": ("metric", "target"),
}
_MOST_SHOWN = 5
_OF_ENVIRONMENT = ("cpu", "platform", "python", "versions", "device_name", "torch", "cuda")


@frozen
class ComparedMeasurement:
    """One common measurement.

    Attributes:
        name: The measurement's name.
        slower: Time of B over time of A, so that 1.05 is 5 % slower; None if they cannot be compared.
        verdict: ``no slower``: shown to be within the tolerance; ``not enough evidence``: neither shown.
        note: Explanation, if needed.
    """

    name: str
    slower: Interval | None
    verdict: Verdict
    note: str = ""


@frozen
class Comparison:
    """Two results side by side.

    Attributes:
        lines: One for each measurement in either result.
        tolerance: Share by which B may be slower.
        confidence: Confidence over all lines together.
        differences: Differences between the two machines, by name: (A, B).
        notes: Further notes.
    """

    lines: tuple[ComparedMeasurement, ...]
    tolerance: float
    confidence: float
    differences: Mapping[str, tuple[Any, Any]]
    notes: tuple[str, ...]

    @property
    def regressed(self) -> bool:
        """Whether any measurement is slower."""
        return any(line.verdict == "slower" for line in self.lines)

    @property
    def undecided(self) -> bool:
        """Whether any measurement lacks evidence."""
        return any(line.verdict == "not enough evidence" for line in self.lines)

    def to_json(self) -> Json:
        """Return the comparison as one JSON object."""
        return {**as_json(vars(self)), "regressed": self.regressed, "undecided": self.undecided}


# Lists of seconds, one per launch; or why nothing was measured.
_Measured = list[list[float]] | str


@dataclass(frozen=True)
class _Side:
    """One side of the comparison."""

    kind: str
    measured: Mapping[str, _Measured]
    environment: Mapping[str, Any]
    recipe: Mapping[str, Any]


def compare(a: Path, b: Path, *, tolerance: float = 0.05, confidence: float = 0.95) -> Comparison:
    """Compare two benchmark results or two run directories.

    Args:
        a: The baseline. b: The candidate.
        tolerance: Share by which B may be slower.
        confidence: Probability that two equal results pass, over all lines together.

    Raises:
        RunDirectoryError: If one is neither, or they are of different kinds.
    """
    baseline, candidate = _read(a), _read(b)
    if baseline.kind != candidate.kind:
        raise RunDirectoryError(
            f"'{a}' is of kind {baseline.kind} and '{b}' of kind {candidate.kind}; compare two of the same kind."
        )
    sides = (baseline.measured, candidate.measured)
    shared = [name for name in baseline.measured if all(isinstance(side.get(name), list) for side in sides)]
    if not shared:
        raise RunDirectoryError(f"'{a}' and '{b}' have no measurement in common.")
    # One-sided, since only a slower B fails the gate.
    line_confidence = 1 - 2 * (1 - confidence) / len(shared)
    names = dict.fromkeys([*shared, *baseline.measured, *candidate.measured])
    lines = [
        _line(name, baseline.measured.get(name), candidate.measured.get(name), tolerance, line_confidence)
        for name in names
    ]
    launches = min(len(side[name]) for side in sides for name in shared)
    notes = []
    if launches < 2 and baseline.kind != "time_to_target":
        notes.append(
            "one of the two was measured in a single launch: the intervals omit variation between launches, and only "
            "the tolerance covers it"
        )
    machines = [
        {key: side.environment[key] for key in _OF_ENVIRONMENT if side.environment.get(key) is not None}
        for side in (baseline, candidate)
    ]
    recipes = _differences(baseline.recipe, candidate.recipe)
    if recipes:
        notes.append(f"A and B are not of the same recipe: {', '.join(list(recipes)[:_MOST_SHOWN])} differ")
    return Comparison(
        lines=tuple(lines),
        tolerance=tolerance,
        confidence=confidence,
        differences=_differences(*machines) | recipes,
        notes=tuple(notes),
    )


def _line(
    name: str, a: _Measured | None, b: _Measured | None, tolerance: float, confidence: float
) -> ComparedMeasurement:
    if not isinstance(a, list) or not isinstance(b, list):
        note = "measured in B only" if a is None else "measured in A only"
        for label, measured in (("B", b), ("A", a)):
            note = f"{label}: {measured}" if isinstance(measured, str) else note
        return ComparedMeasurement(name=name, slower=None, verdict="not comparable", note=note)
    if len(a) > 1 and len(b) > 1:
        times = [[math.exp(statistics.fmean(map(math.log, launch))) for launch in each] for each in (a, b)]
    else:
        times = [[value for launch in each for value in launch] for each in (a, b)]
    ratio = unpaired_ratio(times[1], times[0], confidence=max(confidence, 1e-9))
    verdict: Verdict = "no slower" if ratio.high <= 1 + tolerance else "not enough evidence"
    if ratio.low > 1 + tolerance:
        verdict = "slower"
    elif ratio.high < 1:
        verdict = "faster"
    return ComparedMeasurement(name=name, slower=ratio, verdict=verdict)


def _read(path: Path) -> _Side:
    """Read a run, or a result from a file or its folder.

    Raises:
        RunDirectoryError: If it is missing, or is neither.
    """
    if path.is_dir() and RunDirectory(path).exists():
        return _run(RunDirectory(path))
    file = path / FILE if path.is_dir() else path
    refuse_special_inputs(file)
    try:
        document = load_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunDirectoryError(
            f"'{path}' holds no benchmark result ({FILE}); give what `paceline bench RECIPE --output` wrote."
        ) from None
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"'{file}' cannot be read as a benchmark result: {error}.") from error
    if not isinstance(document, dict) or document.get("kind") not in _NAMED_BY or document.get("format") != FORMAT:
        raise RunDirectoryError(
            f"'{file}' is not a benchmark result that this version can read (kind and format); measure it again."
        )
    kind, measured = str(document["kind"]), dict[str, _Measured]()
    try:
        for row in document["rows"]:
            times = [[float(value) for value in launch] for launch in row["times"] if launch]
            # Words that are the same in every result.
            name = ", ".join(f"{key}={row[key]}" for key in _NAMED_BY[kind] if row.get(key) is not None)
            measured[name] = times or row.get("trouble") or "nothing was measured"
    except (KeyError, TypeError, ValueError) as error:
        raise RunDirectoryError(
            f"'{path}' is not a complete benchmark result ({error!r}); measure it again."
        ) from error
    return _Side(kind, measured, document.get("environment", {}), {"recipe": document.get("recipe", {})})


def _run(run: RunDirectory) -> _Side:
    records = (for_display(event, run.events) for event in read_events(run.events, kinds={"step"}))
    seconds = [1 / rate for event in records if (rate := event.get("throughput_samples_per_second")) and rate > 0]
    if len(seconds) < 2:
        raise RunDirectoryError(
            f"the run in '{run.root}' has {len(seconds)} step record(s) with a throughput; at least two are needed."
        )
    measured: dict[str, _Measured] = {"seconds per sample in training": [part_means(seconds)]}
    return _Side("run", measured, read_environment(run), {"recipe": read_recipe(run)})


def _differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the entries in which two trees differ."""
    one, other = flattened(a), flattened(b)
    return {
        name: (one.get(name), other.get(name))
        for name in dict.fromkeys([*one, *other])
        if json.dumps(one.get(name)) != json.dumps(other.get(name))
    }
