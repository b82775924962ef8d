"""Gradient noise scale at given weights (McCandlish et al. 2018).

The weights are fixed: initial ones, or those of each of a run's checkpoints. Each step's batch is split into
micro-batches whose gradients are computed one by one and then averaged over all ranks. All checkpoints of a run see the
same batches, so that only the weights differ.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from paceline.checkpoint.store import CheckpointStore
from paceline.checkpoint.weights import read_weights
from paceline.command import Log
from paceline.data.batch import Batch
from paceline.distributed.environment import read_launch
from paceline.distributed.strategy import Replicas
from paceline.errors import CheckpointError, RecipeError, RunDirectoryError, UnreadableError
from paceline.metrics.critical_batch import examples_ratio, steps_ratio
from paceline.metrics.gradient_noise import (
    DECADE,
    NoiseAverages,
    NoiseEstimate,
    critical_range,
    estimate,
    linear_rate_excess,
)
from paceline.pages.page import Chart, Table, Text
from paceline.pages.shown import Shown
from paceline.plan.batching import fixed_logical_ranks, with_nearest_ghost_size
from paceline.recipe.load import load_recipe, shipped_recipes
from paceline.recipe.schema import Recipe
from paceline.records.run_directory import RunDirectory
from paceline.trainer.noise import mean_weight
from paceline.trainer.run_views import ProbedRun
from paceline.trainer.step import micro_batches
from paceline.trainer.subject import Options, resumed_recipe
from paceline.trainer.train import opened_run
from paceline.trainer.warmup import FP16_SCALE, GradientProbe
from paceline_advisor import Json, as_json, frozen, picked
from paceline_advisor.apply import SILENT, with_values
from paceline_advisor.commands import NoiseScale
from paceline_advisor.traces import error_bars, trace

# Default number of micro-batches per step: each additional one helps less.
_PARTS = 4
# With fewer samples, BatchNorm's statistics are too noisy.
_FEW = 8


@frozen
class NoisePoint:
    """The measurement at one set of weights.

    Attributes:
        step: Step of the checkpoint; 0 for initial weights.
        averages: Averages of the batches' estimates.
        steps: Number of measured batches.
    """

    step: int
    averages: NoiseAverages
    steps: int

    @property
    def is_wide(self) -> bool:
        """Whether the critical batch's range spans a decade or more."""
        found = self.averages.noise_scale()
        return found is None or (ends := critical_range(found))[1] >= DECADE * ends[0]

    @property
    def steps_needed(self) -> int | None:
        """Batches to measure for a range narrower than a decade; None if it is, or if they cannot be told."""
        needed = self.averages.needed_for_a_decade() if self.is_wide else None
        return None if needed is None else max(needed, self.steps + 1)

    def to_json(self) -> Json:
        """Return the point as one JSON object."""
        found = self.averages.noise_scale()
        low, high = (None, None) if found is None else critical_range(found)
        return {
            "steps_needed": self.steps_needed,
            "step": self.step,
            "steps_measured": self.steps,
            "noise_scale": found,
            "critical_batch": {"low": low, "high": high},
            "gradient_variance": self.averages.mean_variance,
            "gradient_square": self.averages.mean_square,
        }


@frozen
class NoiseReport:
    """The whole result.

    Attributes:
        name: Name of the recipe or run.
        global_batch_size: The recipe's global batch size in samples.
        micro_batch_size: Samples of a micro-batch.
        processes: Number of processes.
        points: The points, by step.
        batch_weight: Mean weight of a batch, in ``unit``; its number of samples, if each has weight 1.
        unit: Unit of the noise scale: ``samples``, or the unit of their weights, such as ``tokens``.
    """

    name: str
    global_batch_size: int
    micro_batch_size: int
    processes: int
    points: Sequence[NoisePoint]
    batch_weight: float
    unit: str = "samples"

    def costs(self) -> dict[str, float] | None:
        """Return the cost of the recipe's batch relative to the minimum, by the last point; None if unknown."""
        found = self.points[-1].averages.noise_scale()
        if found is None:
            return None
        batch = self.batch_weight
        return {
            "steps_ratio": steps_ratio(found.middle, batch),
            "examples_ratio": examples_ratio(found.middle, batch),
            "linear_rate_excess": linear_rate_excess(found.middle, batch),
        }

    def to_json(self) -> Json:
        """Return the result as one JSON object."""
        return {**as_json(vars(self)), "costs": self.costs()}

    def __paceline__(self) -> Shown:
        """Return the table of all points, and a chart over training."""
        measured = [(each.step, found) for each in self.points if (found := each.averages.noise_scale()) is not None]

        def span(low: float, high: float) -> str:
            return f"{_figure(low)} to {_figure(high)}" if math.isfinite(high) else f"above {_figure(low)}"

        rows = [
            (step, _figure(found.middle), span(found.low, found.high), span(*critical_range(found)))
            for step, found in measured
        ]
        unmeasured = len(self.points) - len(measured)
        hidden = f"At {unmeasured} of {len(self.points)} points the noise hides the gradient."
        wide = [each.steps_needed for each in self.points if each.is_wide and each.averages.noise_scale() is not None]
        advice = f"The range spans a decade or more at {len(wide)} of {len(self.points)} points; "
        if needed := [each for each in wide if each is not None]:
            advice += f"--steps {max(needed)} should make it narrower."
        else:
            advice += "give more --steps."
        costs = {}
        if (ratios := self.costs()) is not None:
            costs = {
                f"at {_figure(self.batch_weight)} {self.unit}": f"{ratios['steps_ratio']:.3g} times the fewest steps, "
                f"{ratios['examples_ratio']:.3g} times the fewest {self.unit}",
                "with linear lr scaling": f"{ratios['linear_rate_excess']:.3g} times the rate that the noise allows",
            }
        chart = Chart(
            title=f"Gradient noise scale, in {self.unit}",
            traces=[
                trace(
                    "lines+markers",
                    "noise scale",
                    [(step, found.middle) for step, found in measured],
                    # A bar that ends at its point would suggest that nothing larger is possible.
                    marker={"symbol": ["circle" if math.isfinite(found.high) else "arrow-up" for _, found in measured]},
                    error_y=error_bars((found.low, found.middle, found.high) for _, found in measured),
                ),
                trace("lines", "the recipe's batch", [(each.step, self.batch_weight) for each in self.points]),
            ],
            layout={"xaxis": {"title": "step"}, "yaxis": {"title": self.unit, "type": "log"}},
            description="The noise scale over training with its 95 % interval, and the recipe's batch. An upward arrow "
            "is an interval without an upper end.",
        )
        return Shown(
            title="Gradient noise scale",
            subtitle=f"{self.name}, batches of {self.global_batch_size} in micro-batches of {self.micro_batch_size}",
            blocks=[
                Table(
                    columns=("step", "noise scale", "95 % interval", "critical batch"),
                    rows=rows,
                    caption=f"Measured, in {self.unit}",
                ),
                *([hidden] if unmeasured else []),
                *([advice] if wide else []),
                *([costs] if costs else []),
                "Critical batch: 0.125 to 0.75 times the interval, as published; `paceline sweep-batch` measures it.",
            ],
            on_page=[
                chart,
                Text(
                    "The noise scale is the variance of one sample's gradient over the squared length of the true one "
                    "(McCandlish et al. 2018). Up to batches of about that size, a larger batch saves steps nearly in "
                    "proportion; far above, it only costs more samples."
                ),
            ],
            ok=bool(measured) or "no noise scale was found at any of the weights; give more --steps.",
        )


def _figure(value: float) -> str:
    """Format three significant digits."""
    return f"{float(f'{value:.3g}'):,.10g}"


def measure_noise(options: NoiseScale, log: Log) -> NoiseReport:
    """Measure the noise scale; collective: every rank must call this.

    Raises:
        PacelineError: For mistakes in the recipe or the data, if weights are sharded, or if no checkpoint is left.
    """
    loaded = load_recipe(options.target, options.overrides)
    # A shipped name means the recipe, whatever is here.
    directory = RunDirectory(Path(options.target))
    store = CheckpointStore(directory.checkpoints)
    is_run = options.target not in shipped_recipes() and directory.exists()
    if is_run and not store.steps():
        raise RunDirectoryError(
            f"the run in '{options.target}' holds no checkpoint at which to measure the noise; wait for "
            f"one, or give {directory.recipe} to measure it at fresh weights."
        )
    checkpoints = [(step, store.path(step)) for step in store.steps()] if is_run else []
    recipe = _into_micro_batches(loaded.recipe, read_launch(os.environ).world.world_size)
    if checkpoints:
        recipe = resumed_recipe(recipe, directory.root)
    scratch = (
        tempfile.TemporaryDirectory(prefix="paceline-noise-")
        if options.scratch is None
        else nullcontext(options.scratch)
    )
    points = []
    with (
        scratch as folder,
        opened_run(
            replace(loaded, recipe=with_values(recipe, SILENT), origins={}), Options(run_dir=Path(folder) / "run")
        ) as run,
    ):
        if not isinstance(run.strategy, Replicas):
            raise RecipeError(
                "the noise scale is measured on whole gradients, and here the weights are sharded (fsdp); measure "
                "it with parallel.strategy=ddp, or with one process."
            )
        plan = run.plan
        steps = min(options.steps, plan.total_steps)
        # For images the unit is samples.
        unit = "samples" if run.task.sample_weights() is None else run.task.unit
        for step in _loaded(run, checkpoints, log):
            batches = run.train_batches()
            estimates = [_of_step(run, run.strategy, list(micro_batches(run, batches))) for _ in range(steps)]
            averages = NoiseAverages.of(each for each in estimates if each is not None)
            points.append(NoisePoint(step=step, averages=averages, steps=steps))
            log(in_words(points[-1], unit))
        if not points:
            raise CheckpointError(f"no checkpoint of '{options.target}' could be measured: see above; give its recipe.")
        batch_weight = plan.global_batch_size * mean_weight(run.geometry)
    return NoiseReport(
        name=loaded.name,
        **picked(plan, "global_batch_size", "micro_batch_size"),
        processes=plan.world_size,
        points=points,
        batch_weight=batch_weight,
        unit=unit,
    )


def in_words(point: NoisePoint, unit: str = "samples") -> str:
    """Format a point as one line."""
    found = point.averages.noise_scale()
    if found is None:
        return (
            f"step {point.step}: the gradient cannot be separated from noise in {point.steps} batches; give more "
            f"--steps"
        )
    high = f"{found.high:.3g}" if math.isfinite(found.high) else "unbounded"
    return f"step {point.step}: noise scale {found.middle:.3g} {unit} ({found.low:.3g} to {high})"


def _loaded(run: ProbedRun, checkpoints: Sequence[tuple[int, Path]], log: Log) -> Iterator[int]:
    """Load the weights of each checkpoint and yield its step; 0 without checkpoints, for initial weights.

    Those that are gone or damaged are left out. Collective: every rank must call this.
    """
    if not checkpoints:
        yield 0
    for step, path in checkpoints:
        try:
            saved = run.collectives.on_all_ranks(partial(read_weights, path, "model"))
        except UnreadableError:
            raise
        except CheckpointError as error:  # a run that still trains removes old checkpoints
            log(f"step {step}: left out: {error}")
            continue
        run.network.load_state_dict(saved.state)
        yield step


def _into_micro_batches(recipe: Recipe, processes: int) -> Recipe:
    """Return the recipe with at least two micro-batches per step, without growth; sizes that it sets are kept.

    Raises:
        RecipeError: If its batch cannot be split.
    """
    recipe = with_values(recipe, {"batch.growth": {}})
    batch = recipe.batch.global_size
    open_ = recipe.batch.micro_size == "auto" and recipe.parallel.logical_ranks == "auto"
    if not open_ and fixed_logical_ranks(recipe) == 1:
        key = "parallel.logical_ranks" if recipe.batch.micro_size == "auto" else "batch.micro_size"
        raise RecipeError(
            f"{key} makes one micro-batch of a step's {batch} samples, but measuring the noise needs two or more; give "
            f"{key}=auto, which splits the batch."
        )
    if not open_ or batch % processes:
        return recipe
    counts = [count for count in range(max(2, processes), batch + 1) if batch % count == 0 and count % processes == 0]
    if not counts:
        raise RecipeError(f"batch.global_size={batch} cannot be split into micro-batches to compare; use a larger one.")
    large = [count for count in counts if batch // count >= _FEW]
    count = min(large or counts[:1], key=lambda count: abs(count - max(_PARTS, processes)))
    micro = batch // count
    model = with_nearest_ghost_size(recipe.model, micro)
    return with_values(recipe, {"model": model, "batch.micro_size": micro})


def _of_step(run: ProbedRun, strategy: Replicas, batches: Sequence[Batch]) -> NoiseEstimate | None:
    parts: list[tuple[int, float]] = []
    trained = [(name, each) for name, each in run.network.named_parameters() if each.requires_grad]
    total = [torch.zeros_like(each) for _, each in trained]
    for batch in batches:
        if not batch.weight:
            continue
        probe = GradientProbe(run, strategy, batch)
        with probe.isolated():
            found = probe.gradients(run.network)
        gradients = [found[name] if name in found else torch.zeros_like(each) for name, each in trained]
        torch._foreach_add_(total, gradients, alpha=batch.weight)
        parts.append((batch.weight, _square(gradients)))
    everyones = [each for part in run.collectives.gather(parts) for each in part]
    samples = sum(weight for weight, _ in everyones)
    if not samples:
        return None
    for each in total:
        run.collectives.reduce_sum(each)
    # fp16's gradients were scaled by this factor to avoid underflow.
    scale = FP16_SCALE**2 if run.precision.scaler is not None else 1.0
    small = math.fsum(weight * square for weight, square in everyones) / samples
    return estimate(samples / len(everyones), small / scale, samples, _square(total) / samples**2 / scale)


def _square(tensors: Sequence[torch.Tensor]) -> float:
    return float(torch.nn.utils.get_total_norm(tensors)) ** 2
