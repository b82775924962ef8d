"""What of a run directory is held against others: its curves, and what could explain that they differ?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import RunDirectoryError
from paceline.insight.bands.curves import Curve, curves_of
from paceline.insight.report.reading import flattened
from paceline.records.reader import read_events, read_plan, read_recipe
from paceline.records.run_directory import RunDirectory

# What changes bits, or only speed, and is no reason for a run to look different from another.
_NEUTRAL = (
    *("seed", "telemetry.", "checkpoint.", "data.path", "data.backend", "data.workers", "data.prefetch"),
    *("parallel.device", "parallel.strategy", "parallel.shard_", "parallel.reshard_after_forward"),
    *("parallel.exact", "parallel.logical_ranks", "parallel.bucket_cap_mb", "parallel.static_graph"),
    *("parallel.unused_parameters", "parallel.threads", "parallel.affinity", "parallel.timeout"),
    *("model.channels_last", "model.compile", "model.activation_checkpointing", "batch.balance"),
    *("train.precision", "train.float32_matmul", "train.deterministic", "train.until"),
    *("evaluate.every", "evaluate.batch_size", "evaluate.keep_examples", "evaluate.patience", "evaluate.metric"),
)
# What makes it another training, of which the curves say nothing.
_FOREIGN = (
    *("model.", "data.dataset", "data.subset", "data.only_classes", "data.samples", "data.validation_fraction"),
    *("data.split", "data.holdout_fraction", "data.text.", "batch.", "train.duration", "distillation."),
)
SIZES = ("total_steps", "train_samples", "evaluation_samples")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a run is of.

    Attributes:
        path: Its directory.
        name: What its recipe is called, by the name or file that it was started with.
        recipe: What was asked, by dotted key, without what changes no curve.
        sizes: Steps and samples that were planned.
        headline: The metric that one looks at first.
        log_every: How often it writes a record.
        seed: Its seed.
        version: Paceline's.
    """

    path: Path
    name: str
    recipe: Mapping[str, Any]
    sizes: Mapping[str, int]
    headline: str
    log_every: Any
    seed: Any
    version: str


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """A run in few numbers.

    Attributes:
        asked: What it is of.
        curves: Its curves.
        is_complete: Whether it has come to its end.
    """

    asked: Asked
    curves: Sequence[Curve]
    is_complete: bool


def read_asked(path: Path) -> Asked:
    """Read what a run is of, without its events but the first.

    Raises:
        RunDirectoryError: If it holds no run that has begun to train.
    """
    directory = RunDirectory(path)
    recipe, plan = flattened(read_recipe(directory)), read_plan(directory)
    starts = read_events(directory.events, kinds=("start",)) if directory.events.is_file() else iter(())
    start = next(starts, None)
    if start is None:
        raise RunDirectoryError(f"'{path}' has not begun to train: there is nothing to compare yet.")
    return Asked(
        path=path,
        name=str(start["recipe"]),
        recipe={key: value for key, value in recipe.items() if not key.startswith(_NEUTRAL)},
        sizes={key: int(plan.get(key) or 0) for key in SIZES},
        headline=str(plan.get("headline", "loss")),
        log_every=recipe.get("telemetry.log_every"),
        seed=recipe.get("seed"),
        version=str(start["version"]),
    )


def read_compared(asked: Asked) -> ComparedRun:
    """Read a run's events.

    Raises:
        RunDirectoryError: If they cannot be read.
    """
    events = list(read_events(RunDirectory(asked.path).events))
    total = asked.sizes["total_steps"]
    return ComparedRun(
        asked=asked,
        curves=curves_of(events, total, asked.headline),
        is_complete=max(int(each["step"]) for each in events) >= total,
    )


def differing_keys(theirs: Mapping[str, Any], recipe: Mapping[str, Any]) -> list[str]:
    """The keys in which a recipe differs; what recipes did not have yet when the band was made is none."""
    return [key for key, value in theirs.items() if recipe.get(key) != value]


def differing_sizes(theirs: Mapping[str, int], asked: Asked) -> list[str]:
    """Which numbers of steps and samples are others."""
    return [key for key, size in theirs.items() if asked.sizes[key] != size]


def is_foreign(key: str) -> bool:
    """Whether a difference in this key makes it another training."""
    return key.startswith(_FOREIGN)
