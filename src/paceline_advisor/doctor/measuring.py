"""What is each proposed change worth, measured on the user's own job? Runs with and without it take turns."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from paceline.errors import TrainingError
from paceline.recipe.schema import Recipe
from paceline_advisor.bench.interleaved import Measured, run_bursts
from paceline_advisor.doctor.changes import Plans, changed
from paceline_advisor.doctor.findings import Finding, Gain, ranked
from paceline_advisor.doctor.study import Diagnosis

_NOW = "now"
# Bursts do not evaluate: a gain there would be none, and say nothing. Nor would one of several processes in one.
_NOT_IN_BURSTS = frozenset({"evaluation_often"})
_OF_SEVERAL = frozenset({"unused_parameter_search", "affinity"})


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How long is measured.

    Attributes:
        rounds: Turns of each variant.
        block_seconds: About how long a turn is.
    """

    rounds: int = 8
    block_seconds: float = 2.0


def measure(diagnosis: Diagnosis, pace: Pace, tell: Callable[[str], None]) -> Diagnosis:
    """Measure every finding's change of the recipe, each by itself, and order the findings by what they gained.

    Args:
        diagnosis: What was found.
        pace: How long to measure.
        tell: Is told what happens.

    Raises:
        TrainingError: If the recipe cannot be run here as it is.
    """
    left_out = _NOT_IN_BURSTS if diagnosis.processes > 1 else _NOT_IN_BURSTS | _OF_SEVERAL
    changes = {each.name: each.advice.overrides for each in diagnosis.findings if each.name not in left_out}
    variants: dict[str, Recipe] = {_NOW: diagnosis.loaded.recipe}
    plans = Plans(diagnosis)
    for name, overrides in changes.items():
        if overrides and not (refusal := plans.refusal(overrides)):
            variants[name] = changed(diagnosis.loaded.recipe, overrides)
        elif overrides:
            tell(f"{name}: not measured: {refusal}")
    if len(variants) == 1 or not diagnosis.is_here:
        return diagnosis
    found = run_bursts(
        variants, rounds=pace.rounds, block_seconds=pace.block_seconds, processes=diagnosis.processes, say=tell
    )
    now = found.pop(_NOW)
    if now.trouble:
        raise TrainingError(f"the run as it is could not be measured: {now.trouble}")
    gains: dict[str, Gain] = {}
    for name, each in found.items():
        if each.trouble:
            tell(f"{name}: not measured: {each.trouble}")
        elif (gain := gain_of(now, each)) is not None:
            gains[name] = gain
    findings = ranked(replace(each, gain=gains.get(each.name)) for each in diagnosis.findings)
    return replace(diagnosis, findings=findings)


def gain_of(now: Measured, changed: Measured) -> Gain | None:
    """Samples per second with a change over those without; None if the two share no round.

    The interval is that of another measurement of as many rounds: it varies as this one did, so that their difference
    has twice the variance that this one's mean has (on the scale of logarithms, as of ratios).
    """
    ratio = now.slower_than(changed)
    if ratio is None:
        return None
    low, high = ((each / ratio.middle) ** math.sqrt(2) * ratio.middle for each in (ratio.low, ratio.high))
    return Gain(middle=ratio.middle, low=low, high=high, rounds=ratio.count)


def worthwhile(findings: tuple[Finding, ...], *, measured: bool) -> tuple[Finding, ...]:
    """The findings whose change of the recipe trains the same thing; of measured ones, those that are sure to gain."""
    return tuple(
        each
        for each in findings
        if each.advice.overrides
        and each.advice.keeps != "training"
        and (not measured or (each.gain is not None and each.gain.is_certain))
    )
