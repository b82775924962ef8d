"""The fault drill: each fault is tried on a short run of the recipe on this machine."""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Literal

from paceline.command import Log
from paceline.errors import PacelineError, RecipeError, TrainingError, did_you_mean
from paceline.pages.page import Table
from paceline.pages.shown import Shown
from paceline.recipe.load import OWN_LOOP
from paceline.records.reader import read_summary
from paceline.records.run_directory import RunDirectory
from paceline_advisor import Json, frozen, picked
from paceline_advisor.commands import Drill
from paceline_advisor.drill.context import DrillContext, SkippedError
from paceline_advisor.drill.faults import Perform, all_faults
from paceline_advisor.launches import OverdueError, check_can_watch

SHORTEST = 20
_FIRST_LIMIT_SECONDS = 3600.0
_SHORTEST_LIMIT_SECONDS = 180.0

Result = Literal["pass", "FAIL", "skipped"]


@frozen
class FaultTrial:
    """The outcome of one fault.

    Attributes:
        fault: Its name.
        does: What it does.
        result: ``pass``, ``FAIL`` or ``skipped``.
        reason: Why it failed or was skipped.
        exit_code: Of the disturbed launch; None if it was skipped.
        message: What the disturbed launch said.
        step: The run's step when it was disturbed.
        steps_again: Steps that were repeated.
        seconds_to_recover: Time from running the same command again until the run reached that step again.
        lost: Differences from the undisturbed run at the end.
    """

    fault: str
    does: str
    result: Result
    reason: str = ""
    exit_code: int | None = None
    message: str = ""
    step: int | None = None
    steps_again: int | None = None
    seconds_to_recover: float | None = None
    lost: tuple[str, ...] = ()

    def row(self) -> tuple[object, ...]:
        """Return the fault's line in the table."""
        if self.exit_code is None:
            return (self.fault, self.result, "", "", "", "", "")
        seconds = "" if self.seconds_to_recover is None else f"{self.seconds_to_recover:.1f} s"
        repeated = "" if self.steps_again is None else self.steps_again
        lost = ", ".join(self.lost) or "nothing"
        return (self.fault, self.result, self.exit_code, repeated, seconds, lost, self.message[:100])


@frozen
class DrillReport:
    """The whole fault matrix."""

    recipe: str
    overrides: tuple[str, ...]
    processes: int
    steps: int
    weights_sha256: str
    seconds: float
    scratch: Path | None
    trials: tuple[FaultTrial, ...]

    @property
    def passed(self) -> bool:
        """Whether no fault failed."""
        return all(trial.result != "FAIL" for trial in self.trials)

    def to_json(self) -> Json:
        """The report as one JSON object."""
        return {"passed": self.passed, **asdict(self)}

    def __paceline__(self) -> Shown:
        """Show each fault with its result, and why it failed or was skipped."""
        table = Table(
            columns=("fault", "result", "exit", "steps again", "recovered in", "lost", "what it said"),
            rows=[trial.row() for trial in self.trials],
        )
        count = {kind: sum(trial.result == kind for trial in self.trials) for kind in ("pass", "FAIL", "skipped")}
        total = (
            f"{count['pass']} passed, {count['FAIL']} failed, {count['skipped']} skipped: {self.steps} steps, "
            f"{self.processes} process{'es' if self.processes > 1 else ''}, {self.seconds:.0f} s."
        )
        reasons = [f"{trial.fault} {trial.result}: {trial.reason}" for trial in self.trials if trial.reason]
        kept = [] if self.scratch is None else [f"The runs are in {self.scratch}"]
        return Shown(title=f"Drill of {self.recipe}", blocks=[table, *reasons, total, *kept], ok=self.passed or "")


def drill(options: Drill, log: Log) -> DrillReport:
    """Train undisturbed, then once with each fault, and compare.

    Args:
        options: The command's options.
        log: Receives progress lines.

    Raises:
        PacelineError: If the recipe is wrong, a fault is unknown, or the undisturbed run fails.
    """
    check_can_watch("a drill")
    faults = all_faults(options.processes)
    for name in options.only:
        if name not in faults:
            raise RecipeError(
                f"--only: there is no fault '{name}'.{did_you_mean(name, faults)} Faults: {', '.join(faults)}."
            )
    start_time = time.perf_counter()
    scratch = Path(tempfile.mkdtemp(prefix="paceline-drill-"))
    with ExitStack() as stack:
        if not options.keep:
            stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        context = DrillContext(
            **picked(options, "recipe", "processes", "steps"),
            overrides=(*options.overrides, *shortened(options)),
            every=max(2, options.steps // 10),
            scratch=scratch,
            limit_seconds=_FIRST_LIMIT_SECONDS,
        )
        context.check()
        log(f"training {options.steps} steps undisturbed in {scratch}")
        context.train_undisturbed(context.undisturbed)
        longest = max(_SHORTEST_LIMIT_SECONDS, 10 * (time.perf_counter() - start_time))
        context = replace(context, limit_seconds=longest)
        summary = read_summary(RunDirectory(context.undisturbed))
        if summary.step != options.steps:
            raise TrainingError(
                f"the undisturbed run ended after {summary.step} of {options.steps} steps; see evaluate.patience."
            )
        chosen = {name: fault for name, fault in faults.items() if not options.only or name in options.only}
        return DrillReport(
            **picked(context, "recipe", "overrides", "processes", "steps"),
            weights_sha256=summary.weights_sha256 or "",
            trials=tuple(_try_all(context, chosen, log)),
            seconds=time.perf_counter() - start_time,
            scratch=scratch if options.keep else None,
        )


def shortened(options: Drill) -> tuple[str, ...]:
    """Return overrides for a short run of a recipe that uses every feature whose state could be lost.

    Raises:
        RecipeError: If the recipe cannot be read, or the run would be too short to be disturbed.
    """
    if options.steps < SHORTEST:
        raise RecipeError(f"--steps={options.steps}: a drill needs at least {SHORTEST} steps.")
    recipe = options.load().recipe
    if recipe.task == OWN_LOOP:
        raise RecipeError(
            f"'{options.recipe}' is the run of a program with paceline.Loop, which chooses its directory and length "
            "itself, so that a drill cannot repeat it; end the program with kill -9, run it again, and compare "
            "weights_sha256 in summary.json with an undisturbed run.",
            key="task",
            value=OWN_LOOP,
            path=options.recipe,
        )
    short = [
        f"train.duration={options.steps} steps",
        "train.until=null",
        f"checkpoint.every={max(2, options.steps // 10)} steps",
        f"checkpoint.keep={max(3, recipe.checkpoint.keep)}",
        "telemetry.log_every=1 steps",
        "telemetry.trackers=[]",
        "checkpoint.mirror=null",
    ]
    if recipe.evaluate.every is not None:
        short.append(f"evaluate.every={math.ceil(options.steps / 4)} steps")
    if recipe.schedule.warmup.unit != "percent" and recipe.schedule.warmup.value > 0:
        short.append(f"schedule.warmup={math.ceil(options.steps / 10)} steps")
    if options.processes > 1 and not recipe.parallel.exact:
        short.append("parallel.exact=true")
    return tuple(short)


def _try_all(context: DrillContext, faults: Mapping[str, tuple[str, Perform]], log: Log) -> Iterator[FaultTrial]:
    repeats = True
    for name, (does, perform) in faults.items():
        trial = partial(FaultTrial, fault=name, does=does)
        try:
            if not repeats:
                raise SkippedError("the run is not repeatable even without faults, so a comparison would mean nothing")
            faulted = perform(context, name)
            lost = context.lost(faulted.run_dir)
            reasons = [*faulted.objections, *([f"lost: {', '.join(lost)}"] if lost else [])]
            outcome = trial(
                result="FAIL" if reasons else "pass",
                reason="; ".join(reasons),
                **picked(faulted, "exit_code", "message", "step", "steps_again", "seconds_to_recover"),
                lost=tuple(lost),
            )
        except SkippedError as skipped:
            outcome = trial(result="skipped", reason=str(skipped))
        except (OverdueError, PacelineError) as error:
            outcome = trial(result="FAIL", reason=str(error))
        repeats = repeats and not (name == "nothing" and outcome.result == "FAIL")
        log(f"{name}: {outcome.result}{f' ({outcome.reason})' if outcome.reason else ''}")
        yield outcome
