"""`paceline verify`: whether a run follows from its recipe and data, by computing stretches of it again."""

from __future__ import annotations

import contextlib
import math
import random
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from rich.text import Text

from paceline.command import Log
from paceline.errors import PacelineError, RecipeError, RunDirectoryError
from paceline.host.world import World
from paceline.pages.page import Table
from paceline.pages.shown import Shown
from paceline.parsing.units import counted
from paceline.plugins.references import is_same_class
from paceline.recipe.load import load_recipe
from paceline.records.environment import capture_environment, in_folder_of
from paceline.records.reader import (
    read_environment,
    read_identity,
    read_plan_to_resume,
    read_summary,
    wrong_records,
)
from paceline.records.run_directory import RunDirectory, existing_run
from paceline.reports.audit import audit_run
from paceline.tasks.facts import geometry_of
from paceline.tasks.task import task_name
from paceline.trainer.run_dir_checks import ResumeRequest, check_same_run, fixed_differences
from paceline.trainer.run_lock import RunLock
from paceline.trainer.subject import Subject
from paceline_advisor import Json, frozen, named
from paceline_advisor.commands import Verify
from paceline_advisor.launches import check_can_watch
from paceline_advisor.replay.causes import changed_files, other_environment
from paceline_advisor.replay.compare import FirstDifference
from paceline_advisor.replay.engine import Engine, NotReplayedError, StretchOutcome, progress_bar
from paceline_advisor.replay.points import Stretch, points_of, stretches_of

Verdict = Literal["equal", "different", "unknown"]

_DRAWN = 3
_FAKED = 0.1
_SURE = 0.05
_DATA_KEYS = ("digest", "content_digest")
_MOST_NAMED = 5


class CannotTellError(PacelineError):
    """A run cannot be verified here."""

    exit_code = 3


@frozen
class VerifyReport:
    """Result of a verification.

    Attributes:
        run: The run directory.
        verdict: ``equal``, ``different`` or ``unknown``.
        seed: Seed of the draw of stretches.
        total: Number of stretches that the run has.
        outcomes: The stretches that were computed again.
        differences: What differs, the earliest first.
        unlike: What is other here than where the run was trained, and may change bits.
        confidence: What the sample proves, in a sentence.
        unknown: Why nothing can be told; empty otherwise.
        seconds: Duration.
    """

    run: Path
    verdict: Verdict
    seed: int
    total: int
    outcomes: tuple[StretchOutcome, ...] = ()
    differences: tuple[FirstDifference, ...] = ()
    unlike: tuple[str, ...] = ()
    confidence: str
    unknown: str = ""
    seconds: float

    @property
    def promise(self) -> str:
        """What was compared; empty if nothing was computed again."""
        if all(each.unknown for each in self.outcomes):
            return ""
        here = "the processor's kind, threads and versions are those of the run"
        if self.unlike:
            here = f"not all is as it was: {named(self.unlike)}"
        if self.tolerance is None:
            return f"every bit was compared: {here}"
        smallest = " to ".join(f"{each:.1e}" for each in sorted({*self.tolerance}))
        found = f"the smallest change of a tensor that would be found is {smallest} of its norm"
        return f"compared within a tolerance, and {found}: {here}"

    @property
    def tolerance(self) -> tuple[float, float] | None:
        """The smallest and largest tolerance that was used; None if all bits are equal, or were compared."""
        used = [each.tolerance for each in self.outcomes if each.tolerance is not None]
        return (min(each.least for each in used), max(each.largest for each in used)) if used else None

    def to_json(self) -> Json:
        """Return the report as one JSON object."""
        return {
            "run": str(self.run),
            "verdict": self.verdict,
            "segments": [each.to_json() for each in self.outcomes],
            "first_difference": self.differences[0].to_json() if self.differences else None,
            "differences": [each.to_json() for each in self.differences],
            "confidence": self.confidence,
            "promise": self.promise,
            "unlike": list(self.unlike),
            "tolerance": self.tolerance,
            "reason": self.unknown,
            "stretches": self.total,
            "seed": self.seed,
            "seconds": self.seconds,
        }

    def __paceline__(self) -> Shown:
        """Show each stretch, the first difference, and what this proves."""
        rows = [(str(each.stretch), _word(each), f"{each.seconds:.1f} s") for each in self.outcomes]
        blocks: list[Any] = [Table(columns=("stretch", "computed again", "took"), rows=rows)] if rows else []
        colours = {"equal": "green", "different": "bold red", "unknown": "yellow"}
        verdict = Text.from_markup(f"[{colours[self.verdict]}]{self.verdict}[/]")
        blocks.append(verdict.append(f": {self.confidence}"))
        for each in self.differences[:_MOST_NAMED]:
            where = "the run" if each.end is None else f"steps {each.begin} to {each.end}"
            first = "" if each.step is None else f", first at step {each.step}"
            blocks.append(f"different in {where}{first}: {each.cause}")
        blocks += [f"promise: {self.promise}."] * bool(self.promise)
        blocks.append("It shows that the run follows from what it claims, not that nobody chose the claim afterwards.")
        ok: bool | str | PacelineError = self.verdict == "equal" or ""
        if self.verdict == "unknown":
            ok = CannotTellError(f"cannot tell here: {self.unknown}")
        return Shown(title=f"Verification of {self.run}", blocks=blocks, ok=ok)


def _word(outcome: StretchOutcome) -> str:
    if outcome.unknown:
        return "not possible here"
    if outcome.difference is not None:
        return "different"
    return "equal" if outcome.tolerance is None else "equal within the tolerance"


def verify(options: Verify, log: Log) -> VerifyReport:
    """Compute stretches of a run again and compare them.

    Raises:
        PacelineError: If there is no such run, it is being trained, it names code that the user does not trust, or the
            stretches asked for do not exist.
    """
    check_can_watch("verify")
    run, started = existing_run(options.run.absolute()), time.perf_counter()
    seed = secrets.randbelow(2**31) if options.seed is None else options.seed
    report = VerifyReport(run=options.run, verdict="unknown", seed=seed, total=0, confidence="", seconds=0.0)
    with held(run):
        try:
            report = _verify(run, options, report, log)
        except CannotTellError as error:
            reason = str(error)
            report = replace(report, unknown=reason, confidence="nothing was computed again")
    return replace(report, seconds=time.perf_counter() - started)


@contextlib.contextmanager
def held(run: RunDirectory) -> Iterator[None]:
    """Keep a run from being trained meanwhile, where its directory may be written to."""
    lock: RunLock | None = None
    try:
        lock = RunLock(run)
    except RunDirectoryError as error:
        if not isinstance(error.__cause__, OSError):
            raise
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def _verify(run: RunDirectory, options: Verify, report: VerifyReport, log: Log) -> VerifyReport:
    load_recipe(run.root)  # refuses code that the run names, unless the user trusts it
    environment = read_environment(run)
    identity = read_identity(run)
    parent = None if identity is None else identity.parent
    points, damaged = points_of(run, begin=int(parent["step"]) if parent else 0)
    stretches = stretches_of(points)
    if not stretches:
        raise CannotTellError("the run keeps no checkpoint that a stretch of steps could end at.")
    chosen = _choose(stretches, options, report.seed)
    unlike = tuple(_unlike(environment))
    differences = [
        FirstDifference(begin=None, end=None, step=step, component="checkpoint", cause=reason)
        for step, reason in damaged.items()
    ]
    differences += _wrong_files(run, stretches)
    report = replace(report, total=len(stretches), unlike=unlike)
    try:
        engine = Engine.of(run, options.tolerance or (0.0 if unlike else None))
        if engine.program is None and not any(each.component == "recipe" for each in differences):
            differences += _other_data(run, chosen[-1], environment)
    except (NotReplayedError, CannotTellError) as error:
        if not differences:
            raise CannotTellError(f"{str(error).rstrip('.')}.") from error
        confidence = f"nothing was computed again: {error}"
        return replace(report, verdict="different", differences=_in_order(differences), confidence=confidence)
    if any(each.component in ("recipe", "plan", "data") for each in differences):
        confidence = "nothing was computed again, since what it would be computed from is not what the run had"
        return replace(report, verdict="different", differences=_in_order(differences), confidence=confidence)
    outcomes = _replay(engine, stretches, chosen, log)
    changed = _since_start(run, environment)
    for each in (outcome.difference for outcome in outcomes):
        if each is not None:
            differences.append(replace(each, cause=f"{each.cause}{changed}") if each.component != "best" else each)
    judged = _judged(report, outcomes, _in_order(differences), is_strict=not unlike or options.tolerance is not None)
    if judged.verdict == "equal" and options.step is not None:
        follow = f"{len(outcomes)} of {counted(len(stretches), 'stretch')} follow from recipe, data and seed"
        judged = replace(judged, confidence=f"{follow}; the others were not drawn, and nothing is said of them")
    return judged


def _judged(
    report: VerifyReport,
    outcomes: tuple[StretchOutcome, ...],
    differences: tuple[FirstDifference, ...],
    *,
    is_strict: bool,
) -> VerifyReport:
    unknown = next((each.unknown for each in outcomes if each.unknown), "")
    state = ("model", "ema", "optimizer", "records")
    verdict: Verdict = "unknown" if unknown else "equal"
    if differences:
        verdict = "different"
        if not is_strict and all(each.component in state for each in differences):
            verdict = "unknown"
            unknown = (
                "numbers differ by more than the tolerance, and so may those of an honest run, since not all is as it "
                f"was ({named(report.unlike)}); verify it where it was trained, or give a --tolerance."
            )
    checked = sum(not each.unknown for each in outcomes)
    return replace(
        report,
        verdict=verdict,
        outcomes=outcomes,
        differences=differences,
        unknown=unknown,
        confidence=_confidence(report.total, checked, is_equal=verdict == "equal"),
    )


def _in_order(differences: Sequence[FirstDifference]) -> tuple[FirstDifference, ...]:
    return tuple(sorted(differences, key=lambda each: -1 if each.step is None else each.step))


# Which stretches


def _choose(stretches: Sequence[Stretch], options: Verify, seed: int) -> list[Stretch]:
    if options.all:
        return list(stretches)
    if options.step is not None:
        first, last = options.step.start, options.step.stop
        found = [each for each in stretches if each.begin.step < last and each.end.step > first]
        if not found:
            known = f"{stretches[0].begin.step} to {stretches[-1].end.step}"
            raise RecipeError(f"--step {first}:{last}: the run has steps {known}.", key="step", value=options.step)
        return found
    *others, last_one = stretches
    drawn = random.Random(seed).sample(others, min(options.segments or _DRAWN, len(others)))
    return sorted([*drawn, last_one], key=lambda each: each.end.step)


def _confidence(total: int, checked: int, *, is_equal: bool) -> str:
    stretches = counted(total, "stretch")
    if not is_equal:
        return f"{checked} of {stretches} {'was' if checked == 1 else 'were'} computed again"
    if checked >= total:
        return f"all {stretches} between checkpoints follow from recipe, data and seed"
    # The last is always computed again, so that only the others can be faked with a hope.
    others, drawn = total - 1, checked - 1
    faked = math.ceil(_FAKED * others)

    def passes(count: int) -> float:
        return math.comb(others - faked, count) / math.comb(others, count)

    needed = next(count for count in range(others + 1) if passes(count) <= _SURE)
    return (
        f"{checked} of {stretches} follow from recipe, data and seed; whoever faked {100 * _FAKED:.0f} % of them would "
        f"pass with probability {passes(drawn):.2f} ({needed} drawn for {100 * (1 - _SURE):.0f} %)"
    )


def _replay(
    engine: Engine, stretches: Sequence[Stretch], chosen: Sequence[Stretch], log: Log
) -> tuple[StretchOutcome, ...]:
    """Compute the chosen stretches again; before the first that differs, also earlier ones, to find where it begins."""
    results: dict[int, StretchOutcome] = {}
    done = 0
    with progress_bar(sum(each.batches for each in chosen), log) as show:

        def check(index: int) -> bool:
            nonlocal done
            stretch = stretches[index]
            outcome = engine.replay(stretch, lambda batches: show(done + batches, ""))
            results[index], done = outcome, done + stretch.batches
            show(done, f"{stretch}: {_word(outcome)} ({outcome.seconds:.1f} s)")
            return outcome.difference is None

        for stretch in chosen:
            check(stretches.index(stretch))
        unequal = [index for index, each in sorted(results.items()) if each.difference is not None]
        first = unequal[0] if unequal else 0
        # What is wrong everywhere is wrong from the start; otherwise the stretches before tell where it begins.
        if first > 0 and 0 not in results and not check(0):
            first = 0
        while first > 0 and first - 1 not in results and not check(first - 1):
            first -= 1
    return tuple(each for _, each in sorted(results.items()))


# What can be told without computing


def _wrong_files(run: RunDirectory, stretches: Sequence[Stretch]) -> Iterator[FirstDifference]:
    """Yield what checkpoints, recipe, ledger and events say that does not fit together."""
    identity = read_identity(run)
    recipe = load_recipe(run.root).recipe
    for point in (each.end for each in stretches):
        owner = point.facts.get("run")
        at = partial(FirstDifference, begin=None, end=None, step=point.step)
        if identity is not None and owner not in (None, identity.id):
            cause = f"checkpoint {point.path and point.path.name} is of the run {owner}, and this is {identity.id}"
            yield at(component="checkpoint", cause=cause)
        if changed := fixed_differences(point.recipe(run), recipe):
            cause = f"recipe.yaml is not that of the checkpoint of step {point.step}: {changed}"
            yield at(component="recipe", tensor=changed.partition(" ")[0], cause=cause)
    sentences: list[str] = []
    with contextlib.suppress(RunDirectoryError):
        if read_summary(run).status != "failed":
            sentences = list(audit_run(run.root).objections)
    if not sentences:
        try:
            sentences = list(wrong_records(run, None if identity is None else identity.id))
        except RunDirectoryError as error:
            sentences = [str(error)]
    for sentence in sentences[:_MOST_NAMED]:
        found = re.search(r"(after )?step (\d+)", sentence)
        step = None if found is None else int(found[2]) + bool(found[1])
        inside = next((each for each in stretches if step and each.begin.step < step <= each.end.step), None)
        yield FirstDifference(
            begin=None if inside is None else inside.begin.step,
            end=None if inside is None else inside.end.step,
            step=step,
            component="records" if "events.jsonl" in sentence else "ledger",
            cause=sentence.rstrip("."),
        )


def _other_data(run: RunDirectory, stretch: Stretch, environment: Mapping[str, Any]) -> Iterator[FirstDifference]:
    """Open recipe and data as the run would, and compare them with its plan.

    Raises:
        CannotTellError: If they cannot be opened here.
    """
    recipe = stretch.end.recipe(run)
    count = int(stretch.end.facts.get("world_size", 1))
    try:
        with in_folder_of(environment):
            subject = Subject.open(recipe, World(world_size=count, local_world_size=count), "shapes")
    except PacelineError as error:
        raise CannotTellError(f"its recipe cannot be opened here: {error}") from error
    with subject:
        before, now = read_plan_to_resume(run)["data"].get("task"), task_name(subject.task)
        if not is_same_class(str(before), now):
            raise CannotTellError(f"its task, {before}, was given in Python, and the recipe names {now}.")
        geometry = geometry_of(subject.recipe, subject.plan, subject.task)
        request = ResumeRequest(
            recipe=subject.recipe, plan=subject.plan, resume="auto", device_facts={}, geometry=geometry
        )
        try:
            check_same_run(run, request)
        except RunDirectoryError as error:
            component = "data" if error.key in _DATA_KEYS else "plan" if error.key else "recipe"
            cause = re.split(r"[;:] restore|; it can only| Start | Choose ", str(error))[0].rstrip(".")
            cause += _since_start(run, environment) if component == "data" else ""
            begin, end = stretch.begin.step, stretch.end.step
            yield FirstDifference(
                begin=begin, end=end, step=None, component=component, tensor=error.key or None, cause=cause
            )


def _since_start(run: RunDirectory, environment: Mapping[str, Any]) -> str:
    names = changed_files(run, environment)
    return f"; files written since the run started: {named(names, _MOST_NAMED)}" if names else ""


def _unlike(environment: Mapping[str, Any]) -> Iterator[str]:
    """Yield what may change bits and is other here than in the run's environment."""
    facts = {"torch": torch.__version__, "cuda": torch.version.cuda}
    here = capture_environment({**facts, "cpu_capability": torch.backends.cpu.get_cpu_capability()})
    for name, old, new in other_environment(environment, here):
        yield f"{name} was {old} and is {new} here"
