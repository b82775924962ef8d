"""Does a run look like others of its recipe, and if it does not: where, by how much, and what does it do otherwise?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.insight.bands.band import Band, BandCurve, read_band, shipped_band, shipped_bands
from paceline.insight.bands.curves import Curve, windows_of
from paceline.insight.bands.run import (
    Asked,
    ComparedRun,
    differing_keys,
    differing_sizes,
    is_foreign,
    read_asked,
    read_compared,
)

_TOLD_KEYS = 4


@dataclass(frozen=True, kw_only=True)
class Departure:
    """A point at which a run is outside its band.

    Attributes:
        curve: Which curve.
        first_step: First step of the window that the number is of.
        last_step: Its last step.
        value: The run's.
        low: The band's lower limit.
        high: Its upper limit.
        excess: How far the value is from the band's middle, in half widths; more than 1.
    """

    curve: str
    first_step: int
    last_step: int
    value: float
    low: float
    high: float
    excess: float


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How a run compares with its band.

    Attributes:
        run: The run directory.
        band: What the band is of; empty if there is none for this run.
        runs: How many runs that is made of.
        points: How many of the run's numbers were compared.
        departures: Those outside, in order of steps.
        differences: Keys, and sizes of the data, in which the run differs from those.
        why_not: Why nothing was compared; empty if something was.
    """

    run: Path
    band: str = ""
    runs: int = 0
    points: int = 0
    departures: tuple[Departure, ...] = ()
    differences: tuple[str, ...] = ()
    why_not: str = ""

    def to_json(self) -> dict[str, Any]:
        """As one JSON object."""
        return {**asdict(self), "left": bool(self.departures)}

    @property
    def note(self) -> str:
        """One line for a run that left its band; else empty."""
        if not self.departures:
            return ""
        first, count = self.departures[0], len(self.departures)
        more = f" ({count} of {self.points} points are outside)" if count > 1 else ""
        return f"left the band of {self.runs} runs of {self.band}: {first_in_words(first)}{more}. {self._why()}"

    def _why(self) -> str:
        if not self.differences:
            return f"The recipe is theirs; `paceline band check {self.run}` shows each point."
        told = ", ".join(self.differences[:_TOLD_KEYS])
        rest = len(self.differences) - _TOLD_KEYS
        verb = "differs" if len(self.differences) == 1 else "differ"
        return f"{told}{f' and {rest} more' * (rest > 0)} {verb} from the recipe whose band this is."


def first_in_words(departure: Departure) -> str:
    """``the training loss is 0.61 in steps 24 to 46, and 0.55 to 0.57 there``."""
    each = departure
    return (
        f"{each.curve} is {each.value:.4g} in steps {each.first_step} to {each.last_step}, theirs {each.low:.4g} to "
        f"{each.high:.4g}"
    )


def check_run(path: Path, band: Path | None = None) -> Verdict:
    """Hold a run against a band, by default the one that is shipped with its recipe.

    Raises:
        RunDirectoryError: If there is no such run, or the band cannot be read.
    """
    asked = read_asked(path)
    if band is not None:
        return judge(read_compared(asked), read_band(band))
    fitting = _shipped_for(asked)
    # Most runs have none, and their events, which may be many, are not read.
    if fitting is None:
        return Verdict(run=path, why_not=f"no band is shipped for '{asked.name}'; --band FILE names one of your own")
    keys = differing_keys(fitting.recipe, asked.recipe)
    sizes = differing_sizes(fitting.sizes, asked)
    if foreign := [key for key in keys if is_foreign(key)] or sizes:
        why = f"{', '.join(foreign[:_TOLD_KEYS])} differ{'s' * (len(foreign) == 1)}: it is another training"
        return Verdict(run=path, differences=(*keys, *sizes), why_not=why)
    return judge(read_compared(asked), fitting)


def _shipped_for(asked: Asked) -> Band | None:
    path = shipped_band(asked.name)
    if path is not None:
        return read_band(path)
    # A run that is repeated from its own recipe.yaml has lost the name.
    bands = map(read_band, shipped_bands().values())
    return next((band for band in bands if not differing_keys(band.recipe, asked.recipe)), None)


def judge(run: ComparedRun, band: Band) -> Verdict:
    """Hold a run against a band, whatever they differ in."""
    asked = run.asked
    theirs = {each.name: each for each in band.curves}
    windows = windows_of(asked.sizes["total_steps"])
    points = 0
    departures: list[Departure] = []
    for curve in run.curves:
        # Of single steps: more or fewer records scatter otherwise.
        if curve.name not in theirs or (curve.name == "gradient norm" and asked.log_every != band.log_every):
            continue
        told, left = _compare(curve, theirs[curve.name], band.limit, windows)
        points += told
        departures += left
    differences = differing_keys(band.recipe, asked.recipe) + differing_sizes(band.sizes, asked)
    return Verdict(
        run=asked.path,
        band=band.name,
        runs=band.count,
        points=points,
        departures=tuple(sorted(departures, key=lambda each: (each.last_step, -each.excess))),
        differences=tuple(differences),
        why_not="" if points else "it is too early to tell: no window of steps is over",
    )


def _compare(
    curve: Curve, theirs: BandCurve, limit: float, windows: Sequence[tuple[int, int]]
) -> tuple[int, list[Departure]]:
    points = 0
    left: list[Departure] = []
    for at, (low, high) in zip(theirs.windows, theirs.between(limit), strict=True):
        value = curve.values[at]
        if value is None:
            continue
        points += 1
        if not low <= value <= high:
            half = (high - low) / 2
            excess = abs(value - (low + high) / 2) / half if half else float("inf")
            begin, end = windows[at]
            left.append(
                Departure(
                    curve=curve.name,
                    first_step=begin + 1,
                    last_step=end,
                    value=value,
                    low=low,
                    high=high,
                    excess=excess,
                )
            )
    return points, left


def note_at_the_end(run: Path) -> str:
    """What a run that has just ended has to be told; empty, as nearly always, if there is nothing to say.

    A file that cannot be read is no reason to spoil the end of a run.
    """
    try:
        return check_run(run).note
    except Exception:  # noqa: BLE001  # whatever lies in the files, the run has ended well
        return ""


def limits_of(band: Band) -> Mapping[str, Sequence[tuple[int, float, float]]]:
    """By curve the window, the lower and the upper limit of each point."""
    return {
        each.name: [(at, *sides) for at, sides in zip(each.windows, each.between(band.limit), strict=True)]
        for each in band.curves
    }
