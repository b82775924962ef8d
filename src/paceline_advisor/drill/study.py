"""The fault drill: each fault is tried on a short run of the recipe on this machine."""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from paceline.errors import PacelineError, RecipeError, TrainingError, did_you_mean
from paceline.pages.page import Table
from paceline.pages.shown import Shown
from paceline.recipe.load import load_recipe
from paceline.records.reader import read_summary
from paceline.records.run_directory import RunDirectory
from paceline_advisor.commands import Drill
from paceline_advisor.drill.faults import Fault, all_faults
from paceline_advisor.drill.ground import Ground, SkippedError
from paceline_advisor.launches import OverdueError, check_can_watch

SHORTEST = 20
_FIRST_LIMIT_SECONDS = 3600.0
_SHORTEST_LIMIT_SECONDS = 180.0

Result = Literal["pass", "FAIL", "skipped"]


@dataclass(frozen=True, kw_only=True)
class Trial:
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
        again = "" if self.steps_again is None else self.steps_again
        lost = ", ".join(self.lost) or "nothing"
        return (self.fault, self.result, self.exit_code, again, seconds, lost, self.message[:100])


@dataclass(frozen=True, kw_only=True)
class DrillReport:
    """The whole fault matrix."""

    recipe: str
    overrides: tuple[str, ...]
    processes: int
    steps: int
    weights_sha256: str
    seconds: float
    scratch: Path | None
    trials: tuple[Trial, ...]

    @property
    def passed(self) -> bool:
        """Whether no fault failed."""
        return all(trial.result != "FAIL" for trial in self.trials)

    def to_json(self) -> dict[str, Any]:
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


def drill(asked: Drill, tell: Callable[[str], None]) -> DrillReport:
    """Train undisturbed, then once with each fault, and compare.

    Args:
        asked: The command's options.
        tell: Receives progress lines.

    Raises:
        PacelineError: If the recipe is wrong, a fault is unknown, or the undisturbed run fails.
    """
    check_can_watch()
    faults = {fault.name: fault for fault in all_faults(asked.processes)}
    for name in asked.only:
        if name not in faults:
            raise RecipeError(
                f"--only: there is no fault '{name}'.{did_you_mean(name, faults)} Faults: {', '.join(faults)}."
            )
    begun = time.perf_counter()
    scratch = Path(tempfile.mkdtemp(prefix="paceline-drill-"))
    with ExitStack() as held:
        if not asked.keep:
            held.callback(shutil.rmtree, scratch, ignore_errors=True)
        ground = Ground(
            recipe=asked.recipe,
            overrides=(*asked.overrides, *shortened(asked)),
            processes=asked.processes,
            steps=asked.steps,
            every=max(2, asked.steps // 10),
            scratch=scratch,
            limit_seconds=_FIRST_LIMIT_SECONDS,
        )
        ground.check()
        tell(f"training {asked.steps} steps undisturbed in {scratch}")
        ground.train_undisturbed(ground.undisturbed)
        longest = max(_SHORTEST_LIMIT_SECONDS, 10 * (time.perf_counter() - begun))
        ground = replace(ground, limit_seconds=longest)
        summary = read_summary(RunDirectory(ground.undisturbed))
        if summary.step != asked.steps:
            raise TrainingError(
                f"the undisturbed run ended after {summary.step} of {asked.steps} steps; see evaluate.patience."
            )
        chosen = [fault for fault in faults.values() if not asked.only or fault.name in asked.only]
        return DrillReport(
            recipe=asked.recipe,
            overrides=ground.overrides,
            processes=asked.processes,
            steps=asked.steps,
            weights_sha256=summary.weights_sha256 or "",
            trials=tuple(_try_all(ground, chosen, tell)),
            seconds=time.perf_counter() - begun,
            scratch=scratch if asked.keep else None,
        )


def shortened(asked: Drill) -> tuple[str, ...]:
    """Return overrides for a short run of a recipe that uses every feature whose state could be lost.

    Raises:
        RecipeError: If the recipe cannot be read, or the run would be too short to be disturbed.
    """
    if asked.steps < SHORTEST:
        raise RecipeError(f"--steps={asked.steps}: a drill needs at least {SHORTEST} steps.")
    recipe = load_recipe(asked.recipe, asked.overrides).recipe
    short = [
        f"train.duration={asked.steps} steps",
        f"checkpoint.every={max(2, asked.steps // 10)} steps",
        f"checkpoint.keep={max(3, recipe.checkpoint.keep)}",
        "telemetry.log_every=1 steps",
        "telemetry.trackers=[]",
        "checkpoint.mirror=null",
    ]
    if recipe.evaluate.every is not None:
        short.append(f"evaluate.every={math.ceil(asked.steps / 4)} steps")
    if recipe.schedule.warmup.unit != "percent" and recipe.schedule.warmup.value > 0:
        short.append(f"schedule.warmup={math.ceil(asked.steps / 10)} steps")
    if asked.processes > 1 and not recipe.parallel.exact:
        short.append("parallel.exact=true")
    return tuple(short)


def _try_all(ground: Ground, faults: Sequence[Fault], tell: Callable[[str], None]) -> Iterator[Trial]:
    repeats = True
    for fault in faults:
        trial = partial(Trial, fault=fault.name, does=fault.does)
        try:
            if not repeats:
                raise SkippedError("the run is not repeatable even without faults, so a comparison would mean nothing")
            found = fault.perform(ground, fault.name)
            lost = ground.lost(found.run_dir)
            reasons = [*found.objections, *([f"lost: {', '.join(lost)}"] if lost else [])]
            tried = trial(
                result="FAIL" if reasons else "pass",
                reason="; ".join(reasons),
                exit_code=found.exit_code,
                message=found.message,
                step=found.step,
                steps_again=found.steps_again,
                seconds_to_recover=found.seconds_to_recover,
                lost=tuple(lost),
            )
        except SkippedError as skipped:
            tried = trial(result="skipped", reason=str(skipped))
        except (OverdueError, PacelineError) as error:
            tried = trial(result="FAIL", reason=str(error))
        repeats = repeats and not (fault.name == "nothing" and tried.result == "FAIL")
        tell(f"{fault.name}: {tried.result}{f' ({tried.reason})' if tried.reason else ''}")
        yield tried
