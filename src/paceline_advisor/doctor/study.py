"""The doctor: run every check of a recipe that needs no training run, and order the findings.

Then their changes: whether they can be planned, their measured gains, and the recipe with them applied.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.text import Text

from paceline.command import Log
from paceline.errors import PacelineError, RecipeError, RunDirectoryError, TrainingError
from paceline.host.world import World
from paceline.learning.judge import Judgement, judge_run
from paceline.pages.shown import Shown
from paceline.parsing.units import format_seconds
from paceline.plan import MachineFacts, Plan
from paceline.plugins.references import load_reference
from paceline.recipe.layers import format_override, set_keys
from paceline.recipe.load import LoadedRecipe, shipped_recipes, stored_recipe, to_tree, to_yaml
from paceline.recipe.schema import Recipe, named_code
from paceline.records.reader import read_for_report
from paceline.records.run_directory import RunDirectory
from paceline.trainer.fake_batch import with_placeholder_data
from paceline.trainer.fake_step import fake_step
from paceline.trainer.subject import Subject
from paceline_advisor import Json, as_json, frozen, picked
from paceline_advisor.apply import write_new
from paceline_advisor.bench.interleaved import Measurement, run_interleaved
from paceline_advisor.commands import Doctor
from paceline_advisor.doctor.anatomy import Anatomy, observe_network
from paceline_advisor.doctor.behaviour import Calls, behave, preserved_state, watching_loaders
from paceline_advisor.doctor.checked_run import CHECKS, CheckedRun, TargetDevice, choose_target
from paceline_advisor.doctor.checks import code, compute, training  # noqa: F401  # which declare the checks
from paceline_advisor.doctor.findings import Finding, Gain, ranked
from paceline_advisor.memory.largest import memory_shortage

_COLOURS = {"breaks": "bold red", "slows": "yellow", "spoils": "magenta", "notice": "cyan"}
_KEPT = {"same": "", "rounding": " [rounds differently]", "training": " [changes the training]"}
_MOST_PLACES = 5


@frozen
class Improved:
    """The outcome of writing an improved recipe.

    Attributes:
        path: The requested file; None if no file was requested.
        met: The findings whose change was applied; if there are none, nothing was written.
        left_out: Reasons by finding, for findings whose change was not applied.
        lines: Changes of the recipe: ``- key=before`` and ``+ key=now``.
        why_not: Why nothing was written; otherwise empty.
    """

    path: Path | None = None
    met: tuple[Finding, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    lines: tuple[str, ...] = ()
    why_not: str = ""

    def describe(self) -> Iterator[str]:
        """Yield the outcome as lines of text."""
        if self.path is None:
            return
        yield from (f"not changed: {name}: {why}" for name, why in self.left_out.items())
        if not self.met:
            yield f"{self.path} was not written: {self.why_not}"
            return
        yield f"{self.path}: the recipe with {', '.join(each.name for each in self.met)} changed:"
        yield from (f"  {line}" for line in self.lines)


@frozen
class Diagnosis:
    """Result of the doctor.

    Attributes:
        recipe: The recipe as given on the command line.
        overrides: The overrides as given on the command line.
        device: The device it was checked for.
        is_here: Whether that device is in this machine.
        precision: Precision of the run.
        global_batch: Samples of a step.
        processes: Number of processes that share it.
        findings: The findings, worst first.
        checks: Number of checks.
        check_seconds: Time taken by the checks only.
        seconds: Total time.
        unseen: Reasons by subject, for what could not be checked.
        loaded: The loaded recipe.
        machine: The device's facts for a plan.
        improved: The outcome of writing the improved recipe.
    """

    recipe: str
    overrides: tuple[str, ...]
    device: str
    is_here: bool
    precision: str
    global_batch: int
    processes: int
    findings: tuple[Finding, ...]
    checks: int
    check_seconds: float
    seconds: float
    unseen: dict[str, str]
    loaded: LoadedRecipe
    machine: MachineFacts
    improved: Improved = Improved()

    @property
    def is_healthy(self) -> bool:
        """Whether each finding may be intended, or its change had no measured gain."""
        return not any(finding.counts for finding in self.findings)

    def to_json(self) -> Json:
        """The diagnosis as one JSON object."""
        tree = {key: value for key, value in vars(self).items() if key not in ("loaded", "machine", "improved")}
        improved = self.improved
        applied = {
            "applied": [each.name for each in improved.met],
            "left_out": improved.left_out,
            "changes": improved.lines,
        }
        return {"healthy": self.is_healthy, **as_json(tree), **applied}

    def __paceline__(self) -> Shown:
        """Show each finding with its evidence, reason, change and gain."""
        count = sum(finding.counts for finding in self.findings)
        others = len(self.findings) - count
        total = f"{count} finding{'s' * (count > 1)}" if count else "no bottleneck found"
        total += f", {others} informational or without gain" if others else ""
        total += f": {self.checks} checks in {format_seconds(self.seconds)}."
        return Shown(
            title=f"{self.recipe} on {self.device}{'' if self.is_here else ' (not here: predictions)'}",
            subtitle=f"{self.precision}, {self.global_batch} samples a step"
            f"{f' on {self.processes} processes' if self.processes > 1 else ''}",
            blocks=[
                *(Text.from_markup(line) for finding in self.findings for line in _shown(finding)),
                *(f"not checked: {what}: {why}" for what, why in self.unseen.items()),
                total,
                *self.improved.describe(),
            ],
            ok=self.is_healthy or "",
        )


def _shown(finding: Finding) -> Iterator[str]:
    """Yield the lines of a finding, in rich's markup."""
    name = f"[{_COLOURS[finding.severity]}]{finding.severity:<6}[/]  [bold]{finding.name}[/]"
    yield f"{name}: {escape(finding.evidence)}"
    # Evidence already names the first places.
    for place in [each for each in finding.places[:_MOST_PLACES] if str(each) not in finding.evidence]:
        yield escape(f"        at {place}")
    yield escape(f"        {finding.why} ({finding.source})")
    yield escape(f"        change: {finding.advice.words}{_KEPT[finding.advice.keeps]}")
    if finding.gain is None:
        # Findings about sizes already say that they are predictions.
        label = "" if finding.expected.startswith("predicted: ") else "expected, not measured: "
        yield escape(f"        {label}{finding.expected}")
    else:
        label = "measured: " if finding.gain.is_certain else ""  # no gain already says that it was measured
        yield escape(f"        {label}{finding.gain}; expected: {finding.expected}")


def examine(options: Doctor, log: Log) -> Diagnosis:
    """Run every check in :data:`~paceline_advisor.doctor.checked_run.CHECKS`.

    Nothing is trained or written, and the state of this process is unchanged afterwards.

    Args:
        options: The command's options.
        log: Receives progress lines.

    Raises:
        PacelineError: If the recipe cannot be planned for that device.
    """
    start_time = time.perf_counter()
    loaded = options.load()
    recipe, assumed = with_placeholder_data(loaded.recipe)
    unseen = {} if assumed is None else {"data": assumed}
    events = RunDirectory(Path(options.recipe)).events
    is_run = options.recipe not in shipped_recipes()  # such a name means the recipe, whatever is here
    learning = Judgement()
    if is_run and events.exists():
        with contextlib.suppress(RunDirectoryError):
            learning = judge_run(RunDirectory(Path(options.recipe)))
    # By default, the fewest processes that the recipe's strategy is for.
    count = options.processes or (2 if recipe.parallel.strategy in ("ddp", "fsdp") else 1)
    world = World(world_size=count, local_world_size=count)
    target = choose_target(options.device, recipe, processes=world.world_size)
    with preserved_state(), watching_loaders() as loaders:
        # Before a network is built on fake tensors: torch confuses process settings that are changed inside.
        for name in named_code(recipe):
            with contextlib.suppress(PacelineError):  # reported where it is needed
                load_reference(name, PacelineError)
        try:
            plan, anatomy, why = _anatomy(recipe, target, world, log)
        except PacelineError as error:
            if learning:  # of objects or a loop that only their program has
                error.args = (f"{learning} Nothing else of this run can be examined: {error}",)
            raise
        shortage = memory_shortage(recipe, target.machine, world.world_size) if anatomy is not None else None
        log("looking at the code")
        observed, calls, trouble = _behaviour(recipe, plan)
        environment = dict(os.environ)  # with settings changed by custom code
    if anatomy is None and observed is None:
        unseen["network"] = why
    if trouble:
        unseen["code"] = trouble
    subject = CheckedRun(
        recipe=loaded.recipe,
        plan=plan,
        target=target,
        anatomy=anatomy or observed or Anatomy(),
        calls=calls,
        loaders=tuple(dict.fromkeys(loaders)),
        environment=environment,
        run=tuple(read_for_report(events)[0]) if is_run and events.exists() else (),
        learning=learning,
        shortage=shortage,
    )
    looked = time.perf_counter()
    findings = ranked(finding for check in CHECKS for finding in check(subject))
    end_time = time.perf_counter()
    return Diagnosis(
        **picked(options, "recipe", "overrides"),
        device=target.machine.device_name,
        is_here=target.is_here,
        precision=plan.precision,
        global_batch=plan.step_sizes[0],
        processes=world.world_size,
        findings=findings,
        checks=len(CHECKS),
        check_seconds=end_time - looked,
        seconds=end_time - start_time,
        unseen=unseen,
        loaded=loaded,
        machine=target.machine,
    )


def _anatomy(recipe: Recipe, target: TargetDevice, world: World, log: Log) -> tuple[Plan, Anatomy | None, str]:
    """Return the plan, and the network as observed on fake tensors, or why it could not be observed so."""
    plan: Plan | None = None
    try:
        with fake_step(recipe, machine=target.machine, processes=world.world_size) as step:
            plan = step.plan
            log("looking at the network")  # not before the recipe and its data have been validated
            return plan, observe_network(step.network, step.batch, lambda: step.backward(step.forward())), ""
    except PacelineError as error:
        if plan is None:
            # A mistake in the recipe is raised again here.
            plan = Subject.open(recipe, world, "plan", machine=target.machine).plan
        return plan, None, str(error)


def _behaviour(recipe: Recipe, plan: Plan) -> tuple[Anatomy | None, Calls, str]:
    try:
        return *behave(recipe, channels_last=plan.channels_last), ""
    except PacelineError as error:
        return None, Calls(), str(error)
    except Exception as error:  # noqa: BLE001  # the user's code may raise anything; the other checks still apply
        return None, Calls(), f"a micro-batch of a few samples failed ({type(error).__name__}: {error})"


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
        worlds = [World(world_size=each, local_world_size=each) for each in processes]
        try:
            recipe = with_placeholder_data(changed(self._recipe, overrides))[0]
            with preserved_state():
                subject = Subject.open(recipe, worlds[0], "shapes", machine=self._machine)
                for world in worlds[1:]:
                    subject.plan_for(world)
        except PacelineError as error:
            return str(error)
        unused = subject.plan.unused
        idle = next((key for key in overrides if key in unused), None)
        return "" if idle is None else f"{idle} would have no effect: {unused[idle]}"


_NOW = "now"
# Interleaved measurements do not evaluate, so they cannot show a gain there. A single process cannot show a gain of
# several processes.
_NOT_TIMED = frozenset({"evaluation_often"})
_OF_SEVERAL_PROCESSES = frozenset({"unused_parameter_search"})


def diagnose(options: Doctor, log: Log) -> Diagnosis:
    """Examine a recipe or a run; optionally measure each change and write the improved recipe.

    Raises:
        PacelineError: If the recipe cannot be planned for that device, if the file cannot be written, or if
            ``--measure`` names a device other than this machine's.
        TrainingError: If the unchanged recipe cannot be measured.
    """
    if options.measure and options.device is not None:
        if not runs_here(options.device, options.load().recipe):
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


def measure(diagnosis: Diagnosis, log: Log, *, rounds: int = 8, block_seconds: float = 2.0) -> Diagnosis:
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
    overrides: Json = {}
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
