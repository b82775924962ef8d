"""Proposed changes: whether they can be planned, what each gains when measured, and the recipe with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.command import Log
from paceline.errors import PacelineError, RecipeError, TrainingError
from paceline.recipe.layers import set_keys, spelled
from paceline.recipe.load import load_recipe, stored_recipe, to_tree, to_yaml
from paceline.recipe.schema import Recipe
from paceline.tasks.task import build_task
from paceline.trainer.fake_batch import with_stand_in_data
from paceline.trainer.preparation import build_shapes, plan_network, planner, without_initial_weights
from paceline.world import World
from paceline_advisor.apply import write_new
from paceline_advisor.bench.interleaved import Measured, run_bursts
from paceline_advisor.commands import Doctor
from paceline_advisor.doctor.behaviour import untouched
from paceline_advisor.doctor.findings import Finding, Gain, ranked
from paceline_advisor.doctor.study import Diagnosis, Improved, examine
from paceline_advisor.doctor.subject import choose_target

# What a strategy refuses, it refuses with several processes only, and a recipe is written for more than one machine.
_SEVERAL = (2, 4, 8)


def changed(recipe: Recipe, overrides: Mapping[str, Any]) -> Recipe:
    """A recipe with overrides on top.

    Raises:
        RecipeError: If they do not go together.
    """
    return stored_recipe(to_tree(recipe), "the improved recipe", overrides)


class Plans:
    """Plans of an examined recipe with changes.

    They are made for the device that it was examined for, with as many processes, and with each number of several with
    which the recipe can be planned as it is.
    """

    def __init__(self, diagnosis: Diagnosis) -> None:
        self._recipe, self._machine, here = diagnosis.loaded.recipe, diagnosis.machine, diagnosis.processes
        # What is said of the recipe as it is too is no reason against a change.
        self._as_it_is = self._refusal({}, [here])
        self._processes = [here, *(each for each in _SEVERAL if each != here and not self._refusal({}, [each]))]

    def refusal(self, overrides: Mapping[str, Any]) -> str:
        """Why a plan refuses the recipe with these changes, or ignores one of them; empty if it accepts them."""
        found = self._refusal(overrides, self._processes)
        return "" if found == self._as_it_is else found

    def _refusal(self, overrides: Mapping[str, Any], processes: Sequence[int]) -> str:
        plans, shapes = [], None
        try:
            recipe = without_initial_weights(with_stand_in_data(changed(self._recipe, overrides))[0])
            with untouched():
                for count in processes:
                    task, world = build_task(recipe), World(world_size=count, local_world_size=count)
                    make_plan = planner(recipe, task, self._machine, world)
                    shapes = shapes or build_shapes(recipe, task, channels_last=make_plan().channels_last)
                    plans.append(plan_network(make_plan, shapes, recipe))
        except PacelineError as error:
            return str(error)
        unused = plans[0].unused
        idle = next((key for key in overrides if key in unused), None)
        return "" if idle is None else f"{idle} would have no effect: {unused[idle]}"


_NOW = "now"
# Bursts do not evaluate: a gain there would be none, and say nothing. Nor would one of several processes in one.
_NOT_IN_BURSTS = frozenset({"evaluation_often"})
_OF_SEVERAL = frozenset({"unused_parameter_search", "affinity"})


def diagnose(asked: Doctor, log: Log) -> Diagnosis:
    """Examine a recipe or a run, and as asked measure each change and write the recipe with those to make.

    Raises:
        PacelineError: If the recipe cannot be planned for that device, or the file cannot be written.
    """
    if asked.measure and asked.device is not None:
        if not runs_here(asked.device, load_recipe(asked.recipe, asked.overrides).recipe):
            raise RecipeError(
                f"--measure measures on this machine's device, not on '{asked.device}'; leave one of them out."
            )
        asked = replace(asked, device=None)  # the run as it would be here
    diagnosis = examine(asked, log)
    if asked.measure:
        diagnosis = measure(diagnosis, log, rounds=asked.rounds)
    if asked.apply is None:
        return diagnosis
    return replace(diagnosis, improved=write_improved(asked.apply, diagnosis, measured=asked.measure))


def runs_here(device: str, recipe: Recipe) -> bool:
    """Whether a named device is the one that a run would take."""
    here, named = choose_target(None, recipe), choose_target(device, recipe)
    return (here.machine.device, here.device) == (named.machine.device, named.device)


def measure(
    diagnosis: Diagnosis, tell: Callable[[str], None], *, rounds: int = 8, block_seconds: float = 2.0
) -> Diagnosis:
    """Measure every finding's change of the recipe, each by itself, and order the findings by what they gained.

    Args:
        diagnosis: What was found.
        tell: Receives progress messages.
        rounds: Turns of each variant.
        block_seconds: About how long a turn is.

    Raises:
        TrainingError: If the recipe cannot be run here as it is.
    """
    left_out = _NOT_IN_BURSTS if diagnosis.processes > 1 else _NOT_IN_BURSTS | _OF_SEVERAL
    changes = {each.name: each.advice.overrides for each in diagnosis.findings if each.name not in left_out}
    variants: dict[str, Recipe] = {_NOW: diagnosis.loaded.recipe}
    plans = Plans(diagnosis)
    for name, overrides in changes.items():
        if not overrides:
            continue
        if refusal := plans.refusal(overrides):
            tell(f"{name}: not measured: {refusal}")
        else:
            variants[name] = changed(diagnosis.loaded.recipe, overrides)
    if len(variants) == 1 or not diagnosis.is_here:
        return diagnosis
    found = run_bursts(variants, rounds=rounds, block_seconds=block_seconds, processes=diagnosis.processes, say=tell)
    now = found.pop(_NOW)
    if now.trouble:
        raise TrainingError(f"the unchanged run could not be measured: {now.trouble}")
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


def write_improved(path: Path, diagnosis: Diagnosis, *, measured: bool) -> Improved:
    """Write the recipe with every change that trains the same thing and that its plan takes, beside those before it.

    Args:
        path: A new file; nothing is written if nothing is to be changed.
        diagnosis: What was found.
        measured: Whether only changes are made that were measured to gain.

    Raises:
        RecipeError: If the file cannot be written.
    """
    plans = Plans(diagnosis)
    met: list[Finding] = []
    overrides: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for finding in worthwhile(diagnosis.findings, measured=measured):
        asked = finding.advice.overrides
        if other := next((key for key, value in asked.items() if overrides.get(key, value) != value), None):
            left_out[finding.name] = f"{other} is already changed to {overrides[other]}"
        elif why := plans.refusal(overrides | dict(asked)):
            left_out[finding.name] = why
        else:
            met.append(finding)
            overrides |= asked
    if not met:
        why = "no change was measured to gain" if measured else "there is no change to make"
        return Improved(path=path, left_out=left_out, why_not=why)
    before = diagnosis.loaded.recipe
    after = changed(before, overrides)
    head = [f"# {diagnosis.loaded.name}, with what `paceline doctor` proposed:"]
    for each in met:
        said = " ".join(f"{key}={'off' if value is None else value}" for key, value in each.advice.overrides.items())
        kept = "the same training" if each.advice.keeps == "same" else "the same training except for rounding"
        head.append(f"#   {said}  ({each.name}; {kept}; {each.gain or 'not measured'})")
    write_new(path, "\n".join(head) + "\n" + to_yaml(after))
    keys = dict.fromkeys([*set_keys(to_tree(before)), *set_keys(to_tree(after))])
    pairs = [(spelled(before, key), spelled(after, key)) for key in keys]
    lines = [line for old, new in pairs if old != new for line in (f"- {old}", f"+ {new}")]
    return Improved(path=path, met=tuple(met), left_out=left_out, lines=tuple(lines))
