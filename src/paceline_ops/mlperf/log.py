"""A run's log in MLPerf's format. It is not an MLPerf result.

The log is derived from the run directory when the run ends, not written during it: events survive a kill and a resume
without gaps or repeats, and so does the log. Its clock is never stopped: it starts with the launch, since a run reads
its data before it builds its network, and keeps running while a killed run waits to be resumed.

Source: mlcommons/logging, mllog (the lines), compliance_checker/training_4.0.0 (the required lines).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import RecipeError, RunDirectoryError
from paceline.parsing.files import refuse_special_outputs
from paceline.plan.epochs import BatchPhase, Epochs
from paceline.recipe.load import stored_recipe
from paceline.recipe.schema import Recipe
from paceline.records.reader import read_events, read_plan, read_recipe
from paceline.records.run_directory import RunDirectory, write_text
from paceline_ops.mlperf.rules import NOT_A_RESULT, check_mlperf

TOKEN = ":::MLLOG "
RULESET = "4.0.0"
_README = f"""`result_0.txt` is {NOT_A_RESULT}: nobody has reviewed it, and only MLCommons publishes results.

It is derived from this run's events.jsonl, plan.json and recipe.yaml, and rewritten whenever the run ends. Its
lines are those of MLPerf Training {RULESET}'s resnet. Its clock starts with the launch and stops with the first
evaluation that reached telemetry.submission.target_accuracy; what came after is not in it. A line states what the run
did, not that the rules allow it. To check the lines:

    python -m mlperf_logging.compliance_checker --usage training --ruleset {RULESET} result_0.txt
"""


@dataclass(frozen=True, kw_only=True)
class _Facts:
    """A run, as read from its directory."""

    recipe: Recipe
    plan: Mapping[str, Any]
    epochs: Epochs
    events: Sequence[Mapping[str, Any]]

    def epochs_between(self, first: int, last: int) -> int | float:
        """Return the epochs from one position to another; integers if complete."""
        epochs = round(self.epochs.length(last) - self.epochs.length(first), 6)
        return int(epochs) if epochs == int(epochs) else epochs

    def epoch_at(self, position: int) -> int | float:
        """Return the epochs of this many global batches."""
        return self.epochs_between(0, position)

    def of_kind(self, kind: str) -> list[Mapping[str, Any]]:
        return [event for event in self.events if event["event"] == kind]


class _Lines:
    """Collects the lines of a log."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def event(self, seconds: float, key: str, value: Any, **metadata: Any) -> None:
        self._add(seconds, "POINT_IN_TIME", key, value, metadata)

    def start(self, seconds: float, key: str, **metadata: Any) -> None:
        self._add(seconds, "INTERVAL_START", key, None, metadata)

    def stop(self, seconds: float, key: str, **metadata: Any) -> None:
        self._add(seconds, "INTERVAL_END", key, None, metadata)

    def _add(self, seconds: float, kind: str, key: str, value: Any, metadata: Mapping[str, Any]) -> None:
        line = {"namespace": "", "time_ms": round(1000 * seconds), "event_type": kind, "key": key, "value": value}
        self.lines.append(TOKEN + json.dumps({**line, "metadata": dict(metadata)}))


def write_mlperf_log(directory: RunDirectory, overrides: Sequence[str] = (), output: Path | None = None) -> Path:
    """Write the log of a run that has ended.

    Args:
        directory: The run directory.
        overrides: Changes to its recipe: ``telemetry.submission.KEY=VALUE``.
        output: The file; None is ``mlperf/result_0.txt`` in the run directory, with a page next to it.

    Returns:
        The path of the file.

    Raises:
        RunDirectoryError: If the run has not ended, or the file cannot be written.
        RecipeError: If a key is missing, or the division does not allow the recipe.
    """
    text = "".join(f"{line}\n" for line in mlperf_log(directory, overrides))
    path = directory.root / MlperfLog.files[0] if output is None else output
    refuse_special_outputs(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunDirectoryError(f"Cannot make '{path.parent}': {error.strerror}.") from error
    if output is None:
        write_text(path.with_name("README.md"), _README)
    write_text(path, text)
    return path


class MlperfLog:
    """The log as a run with ``telemetry.mlperf`` writes it; implements :class:`paceline.plan.run_logs.RunLog`."""

    title = "the log in MLPerf's format"
    files = ("mlperf/result_0.txt",)
    check = staticmethod(check_mlperf)
    write = staticmethod(write_mlperf_log)

    def wanted(self, recipe: Recipe) -> bool:
        """Whether `telemetry.mlperf` is set."""
        return recipe.telemetry.mlperf


def mlperf_log(directory: RunDirectory, overrides: Sequence[str] = ()) -> list[str]:
    """Return the lines of a run's log; see :func:`write_mlperf_log`."""
    run = _read(directory, overrides)
    # A run that was stopped, resumed and then killed also has an end event, which is obsolete.
    finish = next((event for event in reversed(run.events) if event["event"] != "evaluation"), None)
    if finish is None or finish["event"] != "finish":
        raise RunDirectoryError(
            f"the run in '{directory.root}' has not ended, and its MLPerf log is written at its end; let it finish, or "
            "resume it if it was killed."
        )
    start = run.of_kind("start")[0]
    began = float(start["time"]) - float(start.get("opening_seconds", 0.0))
    log = _Lines()
    _hyperparameters(log, run, began)
    _training(log, run, began, finish)
    return [f"# {NOT_A_RESULT[0].upper()}{NOT_A_RESULT[1:]}. Written by Paceline {start['version']}.", *log.lines]


def _read(directory: RunDirectory, overrides: Sequence[str]) -> _Facts:
    if invalid := [each for each in overrides if not each.startswith("telemetry.submission.")]:
        raise RecipeError(
            f"found '{invalid[0]}', but for a finished run only telemetry.submission keys can be changed."
        )
    recipe = stored_recipe(read_recipe(directory), str(directory.recipe), ["telemetry.mlperf=true", *overrides])
    plan = read_plan(directory)
    check_mlperf(recipe, evaluation_samples=plan["evaluation_samples"], peak_lr=plan["peak_lr"])
    return _Facts(
        recipe=recipe,
        plan=plan,
        epochs=Epochs(plan["train_samples"], tuple(BatchPhase(**each) for each in plan["batch_phases"])),
        events=list(read_events(directory.events, kinds=("start", "resume", "evaluation", "finish"))),
    )


def _hyperparameters(log: _Lines, run: _Facts, seconds: float) -> None:
    """Add submitter, benchmark and settings: everything before the clock starts."""
    submission, plan = run.recipe.telemetry.submission, run.plan
    log.event(seconds, "cache_clear", submission.cache_cleared)
    log.start(seconds, "init_start")
    for key in ("org", "platform", "division", "status"):
        log.event(seconds, f"submission_{key}", getattr(submission, key))
    log.event(seconds, "submission_benchmark", "resnet")
    log.event(seconds, "seed", run.recipe.seed)
    log.event(seconds, "global_batch_size", plan["global_batch_size"])
    log.event(seconds, "gradient_accumulation_steps", plan["accumulation_steps"])
    log.event(seconds, "train_samples", plan["train_samples"])
    log.event(seconds, "eval_samples", plan["evaluation_samples"])
    log.event(seconds, "model_bn_span", run.recipe.model.ghost_batch_norm or plan["micro_batch_size"])
    for key, value in _optimizer(run):
        log.event(seconds, key, value)
    log.stop(seconds, "init_stop")


def _optimizer(run: _Facts) -> Iterator[tuple[str, Any]]:
    optimizer, schedule, plan = run.recipe.optimizer, run.recipe.schedule, run.plan
    yield "opt_name", optimizer.name
    prefix = f"{optimizer.name}_opt" if optimizer.name in ("sgd", "lars") else "opt"
    warmup = run.epoch_at(plan["warmup_steps"])
    yield f"{prefix}_base_learning_rate", plan["peak_lr"]
    yield f"{prefix}_end_learning_rate", schedule.end_lr
    if schedule.name == "polynomial":
        yield f"{prefix}_learning_rate_decay_poly_power", schedule.power
        yield f"{prefix}_learning_rate_decay_steps", plan["total_steps"] - plan["warmup_steps"]
    yield f"{prefix}_weight_decay", optimizer.weight_decay
    if optimizer.has("momentum"):
        yield f"{prefix}_momentum", optimizer.momentum
    yield (
        "lars_opt_learning_rate_warmup_epochs" if optimizer.name == "lars" else "opt_learning_rate_warmup_epochs",
        warmup,
    )
    if optimizer.name == "lars":
        yield "lars_epsilon", optimizer.denominator_eps


def _training(log: _Lines, run: _Facts, began: float, finish: Mapping[str, Any]) -> None:
    """Add blocks of training, each up to its evaluation, and the end of the run."""
    target = run.recipe.telemetry.submission.target_accuracy
    log.start(began, "run_start")
    position, start, reached = 0, began, False
    for evaluation in _headline(run):
        current = _position(evaluation)
        ended = float(evaluation["time"])
        started = ended - float(evaluation["seconds"])
        _block(log, run, (position, start), (current, started))
        progress = {"epoch_num": run.epoch_at(current), "samples_count": run.epochs.samples_before(current)}
        log.start(started, "eval_start", **progress)
        log.event(ended, "eval_accuracy", evaluation["top1_accuracy"] / 100, **progress)
        log.stop(ended, "eval_stop", **progress)
        position, start = current, ended
        if reached := evaluation["top1_accuracy"] >= target:
            break
    if not reached:
        last = _position(finish)
        _block(log, run, (position, start), (last, float(finish["time"])))
        position, start = last, float(finish["time"])
    log.stop(
        start,
        "run_stop",
        status="success" if reached else "aborted",
        epoch_num=run.epoch_at(position),
        samples_count=run.epochs.samples_before(position),
        resumes=max((event["resumes"] for event in run.of_kind("resume")), default=0),
    )


def _block(log: _Lines, run: _Facts, first: tuple[int, float], last: tuple[int, float]) -> None:
    """Add training from one (position, second) to another, if there was any."""
    if last[0] == first[0]:
        return
    number = math.floor(run.epoch_at(first[0])) + 1
    count = run.epochs_between(first[0], last[0])
    samples = run.epochs.samples_before(first[0])
    log.start(first[1], "block_start", first_epoch_num=number, epoch_count=count, samples_count=samples)
    log.stop(last[1], "block_stop", first_epoch_num=number, samples_count=run.epochs.samples_before(last[0]))


def _headline(run: _Facts) -> list[Mapping[str, Any]]:
    """Return one evaluation per position: of the moving average if there is one."""
    weights = "model" if run.recipe.train.ema is None else "ema"
    return [event for event in run.of_kind("evaluation") if event["weights"] == weights]


def _position(event: Mapping[str, Any]) -> int:
    return int(event.get("position", event["step"]))
