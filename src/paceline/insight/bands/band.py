"""Between which limits do the curves of runs lie that differ by their seed, and how is that kept in a file?"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import RunDirectoryError
from paceline.insight.bands.curves import SCALES, WINDOWS, Scale
from paceline.insight.bands.run import SIZES, Asked, ComparedRun, differing_keys, read_asked, read_compared
from paceline.insight.bands.statistic import Array, from_scale, half_widths, least_spread, limit_of, to_scale
from paceline.recipe.load import shipped_recipes
from paceline.recipe.renamed import with_new_names
from paceline.records.reader import read_environment, read_json
from paceline.records.run_directory import RunDirectory, write_text

FEWEST = 5
_FORMAT = 1
_DIGITS = 4
# What no seed decides may differ by this share of its largest value: how records are cut, and how machines add up.
_SET_SHARE = 0.05
_SET_LEAST = 0.05


@dataclass(frozen=True, kw_only=True)
class BandCurve:
    """A curve of all runs.

    Attributes:
        name: What it is called.
        scale: On which scale runs are compared.
        samples: Out of how many held-out samples an accuracy is.
        windows: Of which windows there is a number, counted from 0.
        runs: Each run's numbers.
    """

    name: str
    scale: Scale
    samples: int
    windows: tuple[int, ...]
    runs: tuple[tuple[float, ...], ...]

    @cached_property
    def scaled(self) -> Array:
        """Runs by windows, on the scale."""
        return to_scale(self.scale, np.asarray(self.runs, dtype=np.float64), self.samples)

    @cached_property
    def least(self) -> Array:
        """The spread that there is at least."""
        return least_spread(self.scale, self.scaled, self.samples)

    def between(self, limit: float) -> list[tuple[float, float]]:
        """Lower and upper limit at each window, in the curve's own unit."""
        if self.scale == "set":
            lowest, highest = self._set_limits()
            return list(zip(lowest.tolist(), highest.tolist(), strict=True))
        middle, half = self.scaled.mean(axis=0), half_widths(self.scaled, self.least, limit, len(self.runs))
        lows, highs = ((middle + sign * half).tolist() for sign in (-1, 1))
        return [
            (from_scale(self.scale, low, self.samples), from_scale(self.scale, high, self.samples))
            for low, high in zip(lows, highs, strict=True)
        ]

    def _set_limits(self) -> tuple[Array, Array]:
        runs = np.asarray(self.runs)
        slack = max(_SET_SHARE * float(np.abs(runs).max()), _SET_LEAST * (not self.name.startswith("learning")))
        spread = runs.max(axis=0) - runs.min(axis=0)
        return runs.min(axis=0) - slack - spread, runs.max(axis=0) + slack + spread


@dataclass(frozen=True, kw_only=True)
class Band:
    """What runs of a recipe look like.

    Attributes:
        name: The recipe's.
        curves: All runs' curves.
        recipe: What they asked for, by dotted key, without what changes no curve.
        sizes: Steps and samples of the first of them.
        log_every: How often they wrote records.
        made_with: Versions, date, seeds and command.
    """

    name: str
    curves: tuple[BandCurve, ...]
    recipe: Mapping[str, Any]
    sizes: Mapping[str, int]
    log_every: Any
    made_with: Mapping[str, Any]

    @property
    def count(self) -> int:
        """How many runs it is made of."""
        return len(self.curves[0].runs)

    @cached_property
    def limit(self) -> float:
        """By how many standard errors of prediction a run may deviate at any point."""
        drawn = [each for each in self.curves if each.scale != "set"]
        scaled = np.concatenate([each.scaled for each in drawn], axis=1)
        return float(limit_of(scaled, np.concatenate([each.least for each in drawn])))

    def without(self, run: int) -> Band:
        """The band of all runs but one."""
        curves = (
            dataclasses.replace(each, runs=tuple(one for at, one in enumerate(each.runs) if at != run))
            for each in self.curves
        )
        return dataclasses.replace(self, curves=tuple(curves))

    def is_left_by(self, run: Mapping[str, Sequence[float]]) -> bool:
        """Whether numbers, by curve in the order of the curve's own, are outside anywhere."""
        return any(
            not low <= value <= high
            for each in self.curves
            for value, (low, high) in zip(run[each.name], each.between(self.limit), strict=True)
        )

    @cached_property
    def outsiders(self) -> tuple[int, ...]:
        """Which of its own runs would leave the band of all others; none where those would be too few for one."""
        if self.count <= FEWEST:
            return ()
        whole = ({each.name: each.runs[run] for each in self.curves} for run in range(self.count))
        return tuple(run for run, curves in enumerate(whole) if self.without(run).is_left_by(curves))

    def to_json(self) -> dict[str, Any]:
        """As it is kept."""
        return {
            "band": _FORMAT,
            "recipe_name": self.name,
            "made_with": dict(self.made_with),
            "sizes": dict(self.sizes),
            "log_every": self.log_every,
            "recipe": dict(self.recipe),
            "window_ends": list(WINDOWS),
            "curves": [
                {
                    "name": each.name,
                    "scale": each.scale,
                    "samples": each.samples,
                    "windows": list(each.windows),
                    "runs": [list(run) for run in each.runs],
                }
                for each in self.curves
            ],
        }


def make_band(paths: Sequence[Path], name: str = "") -> Band:
    """Make a band of completed runs of one recipe.

    Args:
        paths: Their directories.
        name: What to call it; by default as the first run's recipe is called.

    Raises:
        RunDirectoryError: If there are too few, or they are not alike.
    """
    runs = [read_compared(read_asked(path)) for path in paths]
    if len(runs) < FEWEST:
        raise RunDirectoryError(f"found {len(runs)} runs, and a band takes {FEWEST} or more: train further seeds.")
    first = runs[0].asked
    for run in runs:
        _check_alike(first, run)
    seeds = [(run.asked.seed, *run.asked.sizes.values()) for run in runs]
    if twice := next((run.asked for run in runs if seeds.count((run.asked.seed, *run.asked.sizes.values())) > 1), None):
        raise RunDirectoryError(
            f"seed {twice.seed} was used by more than one of the runs, '{twice.path}' for one, and the same seed says "
            "nothing of others; give each a seed of its own (seed=N)."
        )
    curves = tuple(kept for each in runs[0].curves if (kept := _together(each.name, runs)) is not None)
    if all(each.scale == "set" for each in curves):
        raise RunDirectoryError(f"'{first.path}' and the others have no curve in common: they recorded too little.")
    return Band(
        name=name or first.name,
        curves=curves,
        recipe=first.recipe,
        sizes=first.sizes,
        log_every=first.log_every,
        made_with=_made_with([run.asked for run in runs]),
    )


def _check_alike(first: Asked, run: ComparedRun) -> None:
    if not run.is_complete:
        raise RunDirectoryError(f"'{run.asked.path}' has not come to its end; a band is made of completed runs.")
    if keys := differing_keys(first.recipe, run.asked.recipe):
        raise RunDirectoryError(
            f"'{run.asked.path}' differs from '{first.path}' in {', '.join(keys[:5])}; a band is made of runs that "
            "differ by their seed."
        )


def _together(name: str, runs: Sequence[ComparedRun]) -> BandCurve | None:
    """One curve of all runs, at the windows in which all have a number."""
    found = [next((each for each in run.curves if each.name == name), None) for run in runs]
    curves = [each for each in found if each is not None]
    if len(curves) < len(runs):
        return None
    windows = [at for at in range(len(WINDOWS)) if all(each.values[at] is not None for each in curves)]
    if not windows:
        return None
    numbers = tuple(tuple(_rounded(each.values[at]) for at in windows) for each in curves)
    return BandCurve(name=name, scale=curves[0].scale, samples=curves[0].samples, windows=tuple(windows), runs=numbers)


def _rounded(value: float | None) -> float:
    assert value is not None  # only windows in which all have a number are kept
    return float(f"{value:.{_DIGITS}g}")


def _made_with(runs: Sequence[Asked]) -> dict[str, Any]:
    first = runs[0]
    environment = read_environment(RunDirectory(first.path))
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "paceline": first.version,
        "python": environment.get("python"),
        "torch": environment.get("versions", {}).get("torch"),
        "device": environment.get("device"),
        "command": f"paceline train {first.name} seed=N",
        "recipe_sha256": recipe_sha256(first.recipe),
        "seeds": [run.seed for run in runs],
    }


def recipe_sha256(recipe: Mapping[str, Any]) -> str:
    """Digest of what was asked, without what changes no curve."""
    return hashlib.sha256(json.dumps(dict(recipe), sort_keys=True).encode()).hexdigest()


def read_band(path: Path) -> Band:
    """Read a file of ``paceline band make``, or one that is shipped.

    Raises:
        RunDirectoryError: If it cannot be read, or is no band.
    """
    document = read_json(path)
    try:
        if document["band"] != _FORMAT or document["window_ends"] != list(WINDOWS):
            raise RunDirectoryError(
                f"'{path}' is a band of format {document['band']} and this Paceline reads format {_FORMAT}: make it "
                "anew with `paceline band make`."
            )
        return Band(
            name=str(document["recipe_name"]),
            curves=tuple(map(_curve, document["curves"])),
            recipe=with_new_names(document["recipe"]),
            sizes={key: int(document["sizes"][key]) for key in SIZES},
            log_every=document["log_every"],
            made_with=document["made_with"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise RunDirectoryError(
            f"'{path}' is no band ({type(error).__name__}: {error}); `paceline band make RUN… -o FILE` writes one."
        ) from error


def write_band(band: Band, path: Path) -> None:
    """Keep a band in a file, a line for each run's curve.

    Raises:
        RunDirectoryError: If it cannot be written.
    """
    text = json.dumps(band.to_json(), indent=1)
    # A number to a line would be taller than it tells.
    text = re.sub(r"\[[-0-9eE.,\s]*\]", lambda found: re.sub(r"\s+", "", found[0]).replace(",", ", "), text)
    write_text(path, text + "\n")


def _curve(document: Mapping[str, Any]) -> BandCurve:
    if document["scale"] not in SCALES:
        raise ValueError(f"scale {document['scale']!r}")
    runs = tuple(tuple(float(value) for value in run) for run in document["runs"])
    if len(runs) < FEWEST or any(len(run) != len(document["windows"]) for run in runs):
        raise ValueError(f"{document['name']} has {len(runs)} runs, or not a number for each window")
    if not all(math.isfinite(value) for run in runs for value in run):
        raise ValueError(f"{document['name']} holds something that is no number")
    return BandCurve(
        name=str(document["name"]),
        scale=document["scale"],
        samples=int(document["samples"]),
        windows=tuple(int(at) for at in document["windows"]),
        runs=runs,
    )


def shipped_band(name: str) -> Path | None:
    """The file of a shipped recipe's band; None if there is none."""
    recipe = shipped_recipes().get(name)
    path = None if recipe is None else recipe.with_suffix(".band.json")
    return path if path is not None and path.is_file() else None


def shipped_bands() -> dict[str, Path]:
    """The files of all shipped bands, by the recipe's name."""
    found = {name: recipe.with_suffix(".band.json") for name, recipe in shipped_recipes().items()}
    return {name: path for name, path in found.items() if path.is_file()}
