"""Measure the noise of a run's gradients from its own micro-batches.

Each step has its gradient at two batch sizes: the part of each micro-batch or process, and the whole. The noise scale
needs only the norms of both, so it takes no extra pass. The norms stay on the device until a record is due, and are
then gathered together with other values. Gradients are never modified.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import nn

from paceline.data.batch import Batch
from paceline.data.order import StepGeometry
from paceline.distributed.collectives import Collectives
from paceline.metrics.gradient_noise import NoiseAverages, estimate, rate_ratio
from paceline.models.precision import Precision
from paceline.plan import Plan
from paceline.recipe.training import Optimizer
from paceline.trainer.listeners import Listener

# In measured steps: long enough to average estimates that scatter widely, short enough to see the noise grow.
HALF_LIFE = 50
# Measured steps required before drawing a conclusion.
MIN_ESTIMATES = 20


@dataclass
class _Step:
    """This process's data of a measured step.

    Attributes:
        planned: Samples of the step over all processes, over which its gradient is averaged.
        entries: Number of squared norms that each process contributes.
        used: Samples of this process that count; fewer if some could not be read.
        norm: Norm of the complete gradient.
        parts: For each micro-batch, its samples and the norm of its gradient.
    """

    planned: int = 0
    entries: int = 0
    used: int = 0
    norm: torch.Tensor = field(default_factory=lambda: torch.zeros(()))
    parts: list[tuple[int, torch.Tensor]] = field(default_factory=list)


class NoiseMeter:
    """Measures some steps' gradient noise; part of the step statistics in a checkpoint.

    Exact runs record the norm of every logical rank, so that the result does not depend on the number of processes.
    Otherwise each process records that of its first micro-batch. If this is also its last, DDP replaces the gradient by
    that of the global batch before the backward pass ends; so each parameter's gradient is measured in a hook, before
    DDP reduces it.

    Args:
        network: The network whose gradients are measured.
        plan: Says how processes cooperate.
        precision: May have scaled the loss.
        averages_over: The divisor that the reduction applies to its sum.
    """

    def __init__(self, network: nn.Module, plan: Plan, precision: Precision, averages_over: int) -> None:
        self._parameters = list(network.parameters())
        self._every_part = plan.strategy == "exact"
        self._reduces = plan.strategy == "ddp"
        self._world_size = plan.world_size
        self._precision = precision
        self._averages_over = averages_over
        self._open: _Step | None = None
        self._pending: list[_Step] = []
        self.averages = NoiseAverages(half_life=HALF_LIFE)
        self.has_warned = False

    def begin_step(self, *, is_due: bool) -> None:
        """Start a step; it is measured if due."""
        self._open = _Step() if is_due else None

    @property
    def is_measuring(self) -> bool:
        """Whether this step is measured."""
        return self._open is not None

    def measure_backward(self, batch: Batch) -> AbstractContextManager[None]:
        """Context around the backward pass of a micro-batch."""
        step = self._open
        if step is None:
            return nullcontext()
        step.planned = batch.slice.step_weight
        step.entries = batch.slice.logical_ranks // self._world_size if self._every_part else 1
        step.used += batch.weight
        if not batch.weight or (step.parts and not self._every_part):
            return nullcontext()
        return self._measured(step, batch)

    @contextmanager
    def _measured(self, step: _Step, batch: Batch) -> Iterator[None]:
        norms: dict[int, torch.Tensor] = {}
        handles = []

        def note(index: int, parameter: torch.Tensor) -> None:
            if parameter.grad is not None:
                norms[index] = torch.linalg.vector_norm(parameter.grad)

        # The gradient as this process computes it: these hooks run before DDP's.
        is_hooked = self._reduces and batch.slice.is_last
        for index, each in enumerate(self._parameters if is_hooked else ()):
            register: Any = each.register_post_accumulate_grad_hook  # torch has no type annotations for it
            handles += [register(partial(note, index))] if each.requires_grad else []
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        gradient_norms = [norms[index] for index in sorted(norms)]
        if not is_hooked:
            # In an exact run a micro-batch's own gradient, otherwise the first micro-batch's share of the step's
            # gradient.
            gradient_norms = [torch.linalg.vector_norm(each.grad) for each in self._parameters if each.grad is not None]
        # The loss was multiplied by this factor (trainer/step.py), and perhaps by fp16's scale.
        share = batch.weight * self._averages_over / batch.slice.step_weight
        norm = torch.linalg.vector_norm(torch.stack(gradient_norms)).float()
        step.parts.append((batch.weight, self._precision.unscaled(norm) / share))

    def end_step(self, norm: torch.Tensor | None, *, stepped: bool) -> None:
        """Close the step.

        Args:
            norm: The norm of the complete gradient before clipping.
            stepped: False if the optimizer step was skipped because gradients were not finite.
        """
        step, self._open = self._open, None
        if step is None or norm is None or not stepped:
            return
        step.norm = norm.detach().float()
        self._pending.append(step)

    def pop_measurements(self) -> list[float]:
        """Return new measurements of this process, equally many on each; waits for the device."""
        pending, self._pending = self._pending, []
        norms = [each for step in pending for each in (step.norm, *(norm for _, norm in step.parts))]
        if not norms:
            return []
        values = iter(torch.stack(norms).tolist())
        measurements: list[float] = []
        for step in pending:
            measurements += [step.planned, step.entries, step.used, next(values)]
            pairs = [number for weight, _ in step.parts for number in (weight, next(values))]
            measurements += pairs + [0.0] * (2 * step.entries - len(pairs))
        return measurements

    def average(self, measurements: Sequence[Sequence[float]]) -> None:
        """Average the measurements of all processes; the result is the same on each."""
        rows = [iter(each) for each in measurements]
        while (row := [list(islice(each, 4)) for each in rows])[0]:
            planned, entries, _, step_norm = row[0]
            parts = [list(islice(each, round(2 * entries))) for each in rows]
            used = sum(each[2] for each in row)
            pairs = [(each[i], each[i + 1]) for each in parts for i in range(0, len(each), 2) if each[i]]
            weight = math.fsum(samples for samples, _ in pairs)
            if weight and used:
                # fsum: the sum has the same bits on whichever process holds a part. A mean over the planned samples is
                # smaller than one over the samples that could be read.
                square = math.fsum(samples * norm * norm for samples, norm in pairs) / weight
                if estimated := estimate(weight / len(pairs), square, used, (step_norm * planned / used) ** 2):
                    self.averages.add(estimated)

    def gather(self, collectives: Collectives) -> None:
        """Average pending measurements before the state is saved; a collective."""
        if self._pending:
            self.average(collectives.gather(self.pop_measurements()))

    def for_record(self) -> dict[str, float | None]:
        """Return its entries in a step record."""
        scale = self.averages.noise_scale()
        return {
            "noise_scale": None if scale is None else scale.middle,
            "noise_scale_low": None if scale is None else scale.low,
            "noise_scale_high": None if scale is None or math.isinf(scale.high) else scale.high,
            "gradient_variance": self.averages.mean_variance,
            "gradient_square": self.averages.mean_square,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the averages, the same on every process."""
        return {"averages": self.averages.to_json(), "has_warned": self.has_warned}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore saved averages."""
        self.averages.load(state["averages"])
        self.has_warned = bool(state["has_warned"])


class NoiseListener(Listener):
    """Measures the steps that are due.

    Args:
        meter: Measures them.
        is_due: Whether the step that starts is to be measured.
        warn: Returns a warning about the learning rate, once per run.
    """

    def __init__(self, meter: NoiseMeter, is_due: Callable[[], bool], warn: Callable[[], str | None]) -> None:
        self._meter, self._is_due, self._warn = meter, is_due, warn

    def begin_step(self) -> None:
        """Start a step."""
        self._meter.begin_step(is_due=self._is_due())

    @property
    def needs_norm(self) -> bool:
        """Whether this step is measured."""
        return self._meter.is_measuring

    def around_backward(self, batch: Batch) -> AbstractContextManager[None]:
        """Measure the gradient of a micro-batch."""
        return self._meter.measure_backward(batch)

    def for_record(self) -> Mapping[str, float | None]:
        """Return the noise scale so far."""
        return self._meter.for_record()

    def incidents(self) -> Mapping[str, str]:
        """Return the warning, if it is new."""
        return {"linear_lr_rule": warning} if (warning := self._warn()) else {}


def mean_weight(geometry: StepGeometry) -> float:
    """Return the mean weight of a sample of a run: the noise scale is in that unit."""
    weights = geometry.weights
    return 1.0 if weights is None else float(weights.mean())


def linear_rule_warning(
    noise: NoiseMeter, optimizer: Optimizer, plan: Plan, geometry: StepGeometry, *, step: int, position: int
) -> str | None:
    """Warn once per run if a learning rate scaled with the batch exceeds what the gradient noise supports.

    It does not warn before the warm-up ends: the noise scale is smallest at the beginning, which is why runs warm up.

    Args:
        noise: The measured noise.
        optimizer: The recipe's optimizer section.
        plan: The run's plan.
        geometry: The weights of the samples.
        step: Optimizer steps taken.
        position: Global batches used up.
    """
    if optimizer.lr_scaling != "linear" or optimizer.lr_reference_batch is None or noise.has_warned:
        return None
    batch = plan.epochs.phase_at(position - 1).global_batch_size
    scale = noise.averages.noise_scale()
    is_known = scale is not None and scale.count >= MIN_ESTIMATES and step > plan.warmup_steps
    each = mean_weight(geometry)
    if scale is None or not is_known or batch <= max(scale.high / each, optimizer.lr_reference_batch):
        return None
    noise.has_warned = True
    ratio = batch / optimizer.lr_reference_batch
    best = rate_ratio(scale.middle / each, batch, optimizer.lr_reference_batch)
    unit = "samples" if geometry.weights is None else plan.weight_unit
    return (
        f"optimizer.lr_scaling=linear has multiplied the learning rate by {ratio:.3g} for a batch of {batch}, but the "
        f"noise scale of the gradients is {scale.middle:.3g} {unit} ({scale.low:.3g} to {scale.high:.3g}), and the "
        "best rate grows linearly with the batch only far below it. By eps_max / (1 + B_noise / B) it would be "
        f"{best:.3g} times; use optimizer.lr_scaling=sqrt, a smaller batch, or a rate found by a range test."
    )
