"""Training time until a metric is reached, with its uncertainty and cost.

Complete runs, one after the other, each with a different seed, until the first evaluation that meets the target. The
seconds are those of the run's step clock: every training step from the first, including warm-up, waiting for data and
compilation within a step, but not opening the run, evaluations and saving. The wall clock from the start of training,
which includes those, is reported too.
"""

from __future__ import annotations

import math
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.command import Log
from paceline.distributed.local_launch import LAUNCHER_VARIABLE
from paceline.errors import RecipeError, TrainingError
from paceline.host.world import World
from paceline.metrics.intervals import TimeToEvent, time_to_event
from paceline.recipe.load import LoadedRecipe, to_yaml
from paceline.recipe.schema import Recipe
from paceline.records.reader import read_events, read_plan
from paceline.records.run_directory import RunDirectory
from paceline.tasks.facts import find_metric
from paceline.trainer.subject import Subject
from paceline_advisor import Json, picked
from paceline_advisor.commands import Bench
from paceline_advisor.launches import CommandProcess, check_can_watch, said

_HOUR = 3600.0
_LOOK_SECONDS = 0.2


@dataclass(frozen=True)
class MetricTarget:
    """A metric and its target value; the task says whether higher or lower is better."""

    metric: str
    value: float
    less_is_better: bool = False

    @classmethod
    def parse(cls, text: str) -> MetricTarget:
        """Parse ``top1_accuracy=94``.

        Raises:
            RecipeError: If it does not have this form.
        """
        match = re.fullmatch(r"([A-Za-z_]\w*)=([-+.\deE]+)", text.strip())
        try:
            if match and math.isfinite(float(match[2])):
                return cls(match[1], float(match[2]))
        except ValueError:
            pass
        raise RecipeError(f"--to {text}: a target must be METRIC=VALUE, for example top1_accuracy=94.")

    def of(self, recipe: Recipe) -> MetricTarget:
        """Return the target with the direction of the metric in the recipe's task; some tasks open the data for it.

        Raises:
            PacelineError: If it never evaluates, its task has no such metric, no run can reach the target, or its data
                cannot be opened.
        """
        if recipe.evaluate.every is None:
            raise RecipeError(
                "evaluate.every=off: a run that is never evaluated reaches no target; give it an interval."
            )
        task = Subject.open(recipe, World(), "task").task
        found = find_metric(task, self.metric, f"--to {self.metric}={self.value:g}: {self.metric}")
        if found.scale == 100 and not 0 <= self.value <= 100:
            raise RecipeError(f"--to {self.metric}={self.value:g}: {self.metric} is in percent; give 0 to 100.")
        return replace(self, less_is_better=not found.higher_is_better)

    def is_met(self, value: float | None) -> bool:
        """Whether a value meets the target; nan, which is recorded as none, does not."""
        return value == self.value or self.is_better(value, self.value)

    def is_better(self, value: float | None, reference: float | None) -> bool:
        """Whether a value is better than another; any number is better than none."""
        if value is None or reference is None:
            return value is not None
        return value < reference if self.less_is_better else value > reference


@dataclass(kw_only=True)
class TargetRun:
    """One run.

    Attributes:
        seed: The run's ``seed``.
        reached: Whether it met the target.
        train_seconds: Training time until then, or until its end.
        wall_seconds: From the start of training until then.
        evaluations: (epoch, training seconds, metrics) of the best weights in each evaluation.
        plan: The run's plan, if it was evaluated.
        trouble: Why it failed; empty if it did not.
    """

    seed: int
    reached: bool = False
    train_seconds: float = 0.0
    wall_seconds: float = 0.0
    evaluations: list[Json] = field(default_factory=list)
    plan: Mapping[str, Any] = field(default_factory=dict)
    trouble: str = ""


def run_to_target(options: Bench, log: Log) -> tuple[LoadedRecipe, list[Json]]:
    """Train until the target of ``bench --to`` is met, once for each seed; return the recipe, and the result's row.

    Raises:
        PacelineError: If the recipe is invalid, never evaluates, or lacks the metric.
        TrainingError: If no run succeeded.
    """
    target = MetricTarget.parse(options.to or "")
    check_can_watch("bench --to")
    loaded = options.load()
    target = target.of(loaded.recipe)
    runs: list[TargetRun] = []
    for index in range(options.runs):
        run = one_run(target, replace(loaded.recipe, seed=loaded.recipe.seed + index), processes=options.processes)
        runs.append(run)
        seconds = f"{run.train_seconds:.1f} s"
        outcome = f"{seconds} to the target" if run.reached else f"target missed after {seconds}"
        log(f"run {index + 1} of {options.runs}: {run.trouble or f'{outcome} (seed {run.seed})'}")
        if index == 0 and run.trouble:
            raise TrainingError(f"the first run failed: {run.trouble}")
    return loaded, [summarise_runs(runs, target, options.price_per_hour)]


def one_run(target: MetricTarget, recipe: Recipe, *, processes: int = 1) -> TargetRun:
    """Train until the target is met, in separate processes and a temporary directory."""
    run = TargetRun(seed=recipe.seed)
    with tempfile.TemporaryDirectory(prefix="paceline-b") as scratch:
        path, run_dir = Path(scratch) / "recipe.yaml", Path(scratch) / "run"
        path.write_text(to_yaml(recipe.without_mirror()), encoding="utf-8")
        words = [str(path), "train.until=null", "--processes", str(processes)]
        train(words, run, run_dir, target, until=lambda: run.reached or bool(run.trouble))
        if run.evaluations:
            run.plan = read_plan(RunDirectory(run_dir))
    return run


def train(
    words: Sequence[str], run: TargetRun, run_dir: Path, target: MetricTarget, *, until: Callable[[], bool]
) -> bool:
    """Train with ``paceline train WORDS``, to the end or until a condition holds.

    The run is stopped, with a checkpoint, if the condition holds, or if this process is interrupted or killed.

    Args:
        words: Recipe, overrides and options.
        run: Receives what the run records, and why it failed.
        run_dir: The run's directory.
        target: The metric to follow.
        until: The condition, asked after each look at the records.

    Returns:
        Whether the condition held.
    """
    is_over = False
    # It contains sockets of loader processes, whose paths must be short.
    with tempfile.TemporaryDirectory(prefix="paceline-t") as scratch:
        arguments, followed = ["train", *words, "--run-dir", str(run_dir)], {LAUNCHER_VARIABLE: str(os.getpid())}
        with CommandProcess(arguments, Path(scratch) / "launch", limit_seconds=math.inf, variables=followed) as launch:
            try:
                while launch.process.poll() is None and not is_over:
                    started = time.perf_counter()
                    follow(run, run_dir, target)
                    is_over = until()
                    # Records grow: looking at them takes at most a twentieth of a core.
                    time.sleep(0 if is_over else max(_LOOK_SECONDS, 20 * (time.perf_counter() - started)))
            finally:
                launch.stop()
            code, why = launch.process.wait(), said(launch)
    follow(run, run_dir, target)
    if not (run.reached or run.trouble):
        run.trouble = (why or f"exit code {code}") if code else "" if run.evaluations else "it was never evaluated"
    return is_over


def follow(run: TargetRun, run_dir: Path, target: MetricTarget) -> None:
    """Read new events of the run; those after the target are ignored."""
    events = run_dir / "events.jsonl"
    if not events.is_file() or run.reached:
        return
    start_time = 0.0
    evaluations: dict[int, Json] = {}
    for event in read_events(events, kinds={"start", "evaluation"}):
        if event["event"] == "start":
            start_time = start_time or event["time"]
            continue
        if target.metric not in event:
            clocks = [name for name in event if name == "time" or name.endswith("seconds")]
            available = [name for name, value in event.items() if isinstance(value, float) and name not in clocks]
            run.trouble = f"--to {target.metric}: not measured; there is {', '.join(available)}"
            return
        run.train_seconds, run.wall_seconds = event["train_seconds"], event["time"] - start_time
        # Of two sets of weights, use the better one.
        before = evaluations.get(event["step"])
        if before is None or target.is_better(event[target.metric], before[target.metric]):
            evaluations[event["step"]] = event
        if target.is_met(event[target.metric]):
            run.reached = True
            break
    run.evaluations = list(evaluations.values())


def summarise_runs(runs: Sequence[TargetRun], target: MetricTarget, price: float | None = None) -> Json:
    """Return a result row for runs."""
    # A failed run counts as one observed for that long, and as long as any other if it made no progress: leaving it out
    # would reward failures.
    reached = [run.reached for run in runs]

    def time_of(seconds: Sequence[float]) -> TimeToEvent:
        longest = max(seconds) or 1.0  # none reached the target, so the times do not matter
        return time_to_event([each or longest for each in seconds], reached)

    trained = time_of([run.train_seconds for run in runs])
    wall = time_of([run.wall_seconds for run in runs])
    missed = len(runs) - sum(reached)
    cost = None
    if price is not None:
        seconds = wall.median.to_json()
        cost = {**seconds, **{key: seconds[key] / _HOUR * price for key in ("middle", "low", "high")}}
    trouble = next((run.trouble for run in runs if run.trouble), "")
    return {
        "metric": target.metric,
        "target": target.value,
        "runs": len(runs),
        "reached": sum(reached),
        "reached_share": trained.reached.to_json(),
        "median_seconds": trained.median.to_json(),
        "median_wall_seconds": wall.median.to_json(),
        "seconds_with_restarts": trained.restarting,
        "curve": [list(each) for each in trained.curve],
        "price_per_hour": price,
        "cost": cost,
        "cost_with_restarts": None if price is None else wall.restarting / _HOUR * price,
        "each": [
            {**picked(run, "seed", "reached", "train_seconds", "wall_seconds"), "trouble": run.trouble or None}
            for run in runs
        ],
        "trouble": trouble or (f"{missed} of {len(runs)} missed the target" if missed else None),
        # Comparing times requires that all runs reached the target.
        "times": [] if missed else [[run.train_seconds for run in runs]],
        "mean_seconds": None if missed else statistics.fmean(run.train_seconds for run in runs),
    }
