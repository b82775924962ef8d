"""Proposed changes: whether they can be planned, their measured gains, and the recipe with them applied."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.command import Log
from paceline.errors import PacelineError, RecipeError, TrainingError
from paceline.recipe.layers import format_override, set_keys
from paceline.recipe.load import load_recipe, stored_recipe, to_tree, to_yaml
from paceline.recipe.schema import Recipe
from paceline.tasks.task import build_task
from paceline.trainer.fake_batch import with_placeholder_data
from paceline.trainer.preparation import build_shapes, plan_network, planner, without_initial_weights
from paceline.world import World
from paceline_advisor.apply import write_new
from paceline_advisor.bench.interleaved import Measurement, run_interleaved
from paceline_advisor.commands import Doctor
from paceline_advisor.doctor.behaviour import preserved_state
from paceline_advisor.doctor.findings import Finding, Gain, ranked
from paceline_advisor.doctor.study import Diagnosis, Improved, examine
from paceline_advisor.doctor.subject import choose_target

# Some errors of a strategy occur only with several processes, and a recipe may be used on more than one machine.
_SEVERAL = (2, 4, 8)


def changed(recipe: Recipe, overrides: Mapping[str, Any]) -> Recipe:
    """Return a recipe with overrides applied.

    Raises:
        RecipeError: If they are incompatible.
    """
    return stored_recipe(to_tree(recipe), "the improved recipe", overrides)


class Plans:
    """Plans of an examined recipe with changes.

    They are made for the examined device and number of processes, and also for 2, 4 and 8 processes if the unchanged
    recipe can be planned for them.
    """

    def __init__(self, diagnosis: Diagnosis) -> None:
        self._recipe, self._machine, here = diagnosis.loaded.recipe, diagnosis.machine, diagnosis.processes
        # Objections that also apply to the unchanged recipe do not count against a change.
        self._unchanged = self._refusal({}, [here])
        self._processes = [here, *(each for each in _SEVERAL if each != here and not self._refusal({}, [each]))]

    def refusal(self, overrides: Mapping[str, Any]) -> str:
        """Return why a plan refuses the recipe with these changes, or ignores one of them; empty if it accepts them."""
        found = self._refusal(overrides, self._processes)
        return "" if found == self._unchanged else found

    def _refusal(self, overrides: Mapping[str, Any], processes: Sequence[int]) -> str:
        plans, shapes = [], None
        try:
            recipe = without_initial_weights(with_placeholder_data(changed(self._recipe, overrides))[0])
            with preserved_state():
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
# Interleaved measurements do not evaluate, so they cannot show a gain there. A single process cannot show a gain of
# several processes.
_NOT_TIMED = frozenset({"evaluation_often"})
_OF_SEVERAL_PROCESSES = frozenset({"unused_parameter_search", "affinity"})


def diagnose(options: Doctor, log: Log) -> Diagnosis:
    """Examine a recipe or a run; optionally measure each change and write the improved recipe.

    Raises:
        PacelineError: If the recipe cannot be planned for that device, if the file cannot be written, or if
            ``--measure`` names a device other than this machine's.
        TrainingError: If the unchanged recipe cannot be measured.
    """
    if options.measure and options.device is not None:
        if not runs_here(options.device, load_recipe(options.recipe, options.overrides).recipe):
            raise RecipeError(
                f"--measure measures on this machine's device, not on '{options.device}'; leave one of them out."
            )
        options = replace(options, device=None)  # the run as it would be on this machine
    diagnosis = examine(options, log)
    if options.measure:
        diagnosis = measure(diagnosis, log, rounds=options.rounds)
    if options.apply is None:
        return diagnosis
    return replace(diagnosis, improved=write_improved(options.apply, diagnosis, measured=options.measure))


def runs_here(device: str, recipe: Recipe) -> bool:
    """Whether a named device is the one that a run would use."""
    here, named = choose_target(None, recipe), choose_target(device, recipe)
    return (here.machine.device, here.device) == (named.machine.device, named.device)


def measure(
    diagnosis: Diagnosis, log: Callable[[str], None], *, rounds: int = 8, block_seconds: float = 2.0
) -> Diagnosis:
    """Measure every finding's change of the recipe separately, and order the findings by measured gain.

    Changes that a plan refuses are not measured, and nothing is measured for a device that is not in this machine.

    Args:
        diagnosis: The diagnosis.
        log: Receives progress messages.
        rounds: Measurements of each variant, interleaved with the others.
        block_seconds: Approximate duration of a measurement.

    Raises:
        TrainingError: If the unchanged recipe cannot be measured here.
    """
    not_timed = _NOT_TIMED if diagnosis.processes > 1 else _NOT_TIMED | _OF_SEVERAL_PROCESSES
    changes = {each.name: each.advice.overrides for each in diagnosis.findings if each.name not in not_timed}
    variants: dict[str, Recipe] = {_NOW: diagnosis.loaded.recipe}
    plans = Plans(diagnosis)
    for name, overrides in changes.items():
        if not overrides:
            continue
        if refusal := plans.refusal(overrides):
            log(f"{name}: not measured: {refusal}")
        else:
            variants[name] = changed(diagnosis.loaded.recipe, overrides)
    if len(variants) == 1 or not diagnosis.is_here:
        return diagnosis
    found = run_interleaved(
        variants, rounds=rounds, block_seconds=block_seconds, processes=diagnosis.processes, log=log
    )
    baseline = found.pop(_NOW)
    if baseline.trouble:
        raise TrainingError(f"the unchanged run could not be measured: {baseline.trouble}")
    gains: dict[str, Gain] = {}
    for name, each in found.items():
        if each.trouble:
            log(f"{name}: not measured: {each.trouble}")
        elif (gain := gain_of(baseline, each)) is not None:
            gains[name] = gain
    findings = ranked(replace(each, gain=gains.get(each.name)) for each in diagnosis.findings)
    return replace(diagnosis, findings=findings)


def gain_of(baseline: Measurement, changed: Measurement) -> Gain | None:
    """Return samples per second with a change relative to without; None if the two share no round.

    The interval predicts another measurement with the same number of rounds. Both measurements vary equally, so the
    difference of their logarithms has twice the variance of the logarithm of one.
    """
    ratio = baseline.slower_than(changed)
    if ratio is None:
        return None
    low, high = ((each / ratio.middle) ** math.sqrt(2) * ratio.middle for each in (ratio.low, ratio.high))
    return Gain(middle=ratio.middle, low=low, high=high, rounds=ratio.count)


def worthwhile(findings: tuple[Finding, ...], *, measured: bool) -> tuple[Finding, ...]:
    """Return findings with a recipe change that keeps the training the same, at most with other rounding.

    If ``measured``, only those with a certain gain.
    """
    return tuple(
        each
        for each in findings
        if each.advice.overrides
        and each.advice.keeps != "training"
        and (not measured or (each.gain is not None and each.gain.is_certain))
    )


def write_improved(path: Path, diagnosis: Diagnosis, *, measured: bool) -> Improved:
    """Write the recipe with every change that its plans accept and that at most rounds differently.

    Args:
        path: A new file. Nothing is written if no change applies.
        diagnosis: The diagnosis.
        measured: Whether to apply only changes with a measured gain.

    Raises:
        RecipeError: If the file cannot be written.
    """
    plans = Plans(diagnosis)
    applied: list[Finding] = []
    overrides: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for finding in worthwhile(diagnosis.findings, measured=measured):
        requested = finding.advice.overrides
        if other := next((key for key, value in requested.items() if overrides.get(key, value) != value), None):
            left_out[finding.name] = f"{other} is already changed to {overrides[other]}"
        elif why := plans.refusal(overrides | dict(requested)):
            left_out[finding.name] = why
        else:
            applied.append(finding)
            overrides |= requested
    if not applied:
        why = "no change had a measured gain" if measured else "there is no change to make"
        return Improved(path=path, left_out=left_out, why_not=why)
    before = diagnosis.loaded.recipe
    after = changed(before, overrides)
    head = [f"# {diagnosis.loaded.name}, with what `paceline doctor` proposed:"]
    for each in applied:
        changes = " ".join(f"{key}={'off' if value is None else value}" for key, value in each.advice.overrides.items())
        effect = "the same training" if each.advice.keeps == "same" else "the same training except for rounding"
        head.append(f"#   {changes}  ({each.name}; {effect}; {each.gain or 'not measured'})")
    write_new(path, "\n".join(head) + "\n" + to_yaml(after))
    keys = dict.fromkeys([*set_keys(to_tree(before)), *set_keys(to_tree(after))])
    pairs = [(format_override(before, key), format_override(after, key)) for key in keys]
    lines = [line for old, new in pairs if old != new for line in (f"- {old}", f"+ {new}")]
    return Improved(path=path, met=tuple(applied), left_out=left_out, lines=tuple(lines))
