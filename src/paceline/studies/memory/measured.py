"""What does a real step take? The measurement that stands beside an estimate.

On a GPU it is what PyTorch's allocator counts; on a CPU the sum of what torch's own allocator reports to its profiler,
block by block: also what kernels take inside, which an estimate does not see.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from paceline.data.batch import Batch
from paceline.data.pipeline import Placement
from paceline.distributed.device import describe_machine
from paceline.models.ema import ExponentialMovingAverage
from paceline.optim.build import build_optimizer
from paceline.optim.clipping import Clipping
from paceline.recipe.plan import Plan
from paceline.recipe.schema import Recipe
from paceline.tasks.build import build_task
from paceline.tasks.task import Task
from paceline.trainer.fake_batch import batch_maker
from paceline.trainer.fake_network import random_states_kept
from paceline.trainer.precision import Precision
from paceline.trainer.preparation import build_network, plan_run, without_initial_weights
from paceline.world import World

_MARK = "paceline measured step"


def measured_peak(recipe: Recipe, micro_batch: int, device: torch.device) -> int:
    """Bytes of tensors and workspace at the peak of a process's second step, on a batch that is there.

    The step is the trainer's, of one process, and of one micro-batch.

    Raises:
        PacelineError: If the recipe cannot be planned.
    """
    recipe = without_initial_weights(recipe)
    with random_states_kept():
        task = build_task(recipe)
        plan = plan_run(recipe, task, describe_machine(device), World())
        if device.type == "cuda":
            return _on_cuda(recipe, task, plan, device, micro_batch)
        return _on_cpu(recipe, task, plan, micro_batch)


def _on_cuda(recipe: Recipe, task: Task, plan: Plan, device: torch.device, micro_batch: int) -> int:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    step = _RealStep(recipe, task, plan, device, micro_batch)
    step()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _on_cpu(recipe: Recipe, task: Task, plan: Plan, micro_batch: int) -> int:
    from torch.profiler import ProfilerActivity, profile, record_function

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        step = _RealStep(recipe, task, plan, torch.device("cpu"), micro_batch)
        step()
        with record_function(_MARK):
            step()
    return _peak_within(watched, _MARK)


def _peak_within(watched: Any, mark: str) -> int:
    """The most that was in use while something went on, of all that was taken since the profiler began."""
    events = watched.profiler.kineto_results.events()
    begun, ended = next((each.start_ns(), each.end_ns()) for each in events if each.name() == mark)
    changes = sorted((each.start_ns(), each.nbytes()) for each in events if each.name() == "[memory]")
    total = most = 0
    for moment, change in changes:
        total += change
        if begun <= moment <= ended:
            most = max(most, total)
    return most


class _RealStep:
    """The trainer's step, without the run around it."""

    def __init__(self, recipe: Recipe, task: Task, plan: Plan, device: torch.device, micro_batch: int) -> None:
        placement = Placement(device=device, channels_last=plan.channels_last)
        self._task = task
        self._network: nn.Module = build_network(recipe, task, placement)[0]
        task.prepare_training(placement)
        decay = recipe.train.ema
        self._ema = None if decay is None else ExponentialMovingAverage(self._network, decay)
        self._precision = Precision(plan.precision, device, recipe.train.grad_scaler)
        self._optimizer = build_optimizer(self._network, recipe.optimizer, device)
        self._clipping = Clipping(self._network, recipe.optimizer)
        self._batch = _filled(batch_maker(task, plan, placement)(micro_batch), device)

    def __call__(self) -> None:
        with self._precision.autocast():
            loss = self._task.loss(self._network, self._batch)
        self._precision.backward(loss)
        del loss
        self._precision.unscale(self._optimizer)
        self._clipping(measure=True)
        self._precision.step(self._optimizer)
        self._optimizer.zero_grad(set_to_none=True)
        if self._ema is not None:
            self._ema.update(0)


def _filled(batch: Batch, device: torch.device) -> Batch:
    inputs, targets = batch.inputs.to(device), batch.targets.to(device)
    if inputs.is_floating_point():
        inputs.normal_()
    return replace(batch, inputs=inputs, targets=targets.zero_())
