"""Measured memory of a real step, which tests and benchmarks compare with the estimate.

On a GPU it is what PyTorch's allocator counts; on a CPU the sum of what torch's own allocator reports to its profiler,
block by block, with what kernels take inside.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paceline.data.batch import Batch, mapped
from paceline.data.pipeline import Placement
from paceline.distributed.device import describe_machine
from paceline.host.world import World
from paceline.models.precision import Precision
from paceline.optim.build import Clipping, ExponentialMovingAverage, build_optimizer
from paceline.plan import Plan
from paceline.recipe.schema import Recipe
from paceline.tasks.task import Task
from paceline.trainer.fake_batch import batch_maker, evaluation_batch_maker, fixed_batch, largest_micro_batch
from paceline.trainer.network import build_network
from paceline.trainer.process_settings import restore_random_states
from paceline.trainer.subject import Subject
from paceline_advisor.memory.trace import EVALUATION, FIRST, STEP
from paceline_vision.detection.task import Detection

_MARK = "paceline measured "


def measured_peak(recipe: Recipe, micro_batch: int, device: torch.device) -> int:
    """Bytes of tensors and workspace at the peak of a process's second step, on a batch that is there.

    The step is the trainer's, of one process, and of one micro-batch.

    Raises:
        PacelineError: If the recipe cannot be planned.
    """
    return measured_peaks(recipe, micro_batch, device)[STEP]


def measured_peaks(recipe: Recipe, micro_batch: int, device: torch.device) -> dict[str, int]:
    """The same of the first step too, and of an evaluation of one batch if there is any, by the name of the part.

    Raises:
        PacelineError: If the recipe cannot be planned.
    """
    recipe = recipe.without_initial_weights()
    with restore_random_states("cpu"):
        subject = Subject.open(recipe, World(), "plan", machine=describe_machine(device))
        task, plan = subject.task, subject.plan
        if device.type == "cuda":
            return _on_cuda(recipe, task, plan, device, micro_batch)
        return _on_cpu(recipe, task, plan, micro_batch)


def _on_cuda(recipe: Recipe, task: Task, plan: Plan, device: torch.device, micro_batch: int) -> dict[str, int]:
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # noqa: SLF001  # an earlier step's is no part of what was there before
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    step = _RealStep(recipe, task, plan, device, micro_batch)
    found = {}
    for name, do in step.parts():
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        do()
        torch.cuda.synchronize(device)
        found[name] = torch.cuda.max_memory_allocated(device) - before
    return found


def _on_cpu(recipe: Recipe, task: Task, plan: Plan, micro_batch: int) -> dict[str, int]:
    from torch.profiler import ProfilerActivity, profile, record_function

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        step = _RealStep(recipe, task, plan, torch.device("cpu"), micro_batch)
        parts = step.parts()
        for name, do in parts:
            with record_function(_MARK + name):
                do()
    return {name: _peak_within(watched, _MARK + name) for name, _ in parts}


def _peak_within(watched: Any, mark: str) -> int:
    """The most that was in use while something went on, of all that was taken since the profiler began."""
    events = watched.profiler.kineto_results.events()
    started, ended = next((each.start_ns(), each.end_ns()) for each in events if each.name() == mark)
    changes = sorted((each.start_ns(), each.nbytes()) for each in events if each.name() == "[memory]")
    total = most = 0
    for moment, change in changes:
        total += change
        if started <= moment <= ended:
            most = max(most, total)
    return most


class _RealStep:
    """The trainer's step and evaluation, without the run around them."""

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
        self._batch = _batch_of(task, plan, placement, micro_batch)
        self._device = device
        self._is_scored = plan.evaluate_every_steps is not None and plan.evaluation_samples > 0
        if self._is_scored:
            count = min(plan.evaluation_batch_size, plan.evaluation_samples)
            self._make_scored = partial(_scored_of, task, plan, placement, count)

    def parts(self) -> list[tuple[str, Callable[[], None]]]:
        """What is to be measured, in a run's order."""
        return [(FIRST, self.step), (STEP, self.step), *([(EVALUATION, self.evaluate)] if self._is_scored else [])]

    def evaluate(self) -> None:
        """Score one batch with each set of weights."""
        batch = self._make_scored()
        networks = [self._network, *([] if self._ema is None else [self._ema.module])]
        with torch.no_grad():
            for network in networks:
                network.eval()
                with self._precision.keeping_casts():
                    self._task.score(self._task.evaluated(self._precision.applied_to(network)), batch)
        self._network.train()

    def step(self) -> None:
        """Train on the batch."""
        with self._precision.keeping_casts():
            loss = self._task.loss(self._precision.applied_to(self._network), self._batch)
        self._precision.backward(loss)
        del loss
        self._precision.unscale(self._optimizer)
        self._clipping(measure=True)
        self._precision.step(self._optimizer)
        self._optimizer.zero_grad(set_to_none=True)
        if self._ema is not None:
            self._ema.update(0)


def _batch_of(task: Task, plan: Plan, placement: Placement, count: int) -> Batch:
    """A micro-batch as an estimate has it; of pictures with objects real ones, since it matters what is in them."""
    if not isinstance(task, Detection):
        return _filled(batch_maker(task, plan, placement)(count), placement.device)
    with contextlib.closing(task.open_pipeline(placement)) as pipeline:
        ids = largest_micro_batch(task, count, plan.global_batch_size)
        assert ids is not None
        geometry = fixed_batch(task.recipe.seed, ids)
        return next(iter(pipeline.train_batches(geometry, 0, 1, World())))


def _scored_of(task: Task, plan: Plan, placement: Placement, count: int) -> Batch:
    """The same for a batch that is scored."""
    if not isinstance(task, Detection):
        return _filled(evaluation_batch_maker(task, plan, placement)(count), placement.device)
    with contextlib.closing(task.open_pipeline(placement)) as pipeline:
        return next(iter(pipeline.evaluation_batches(count, World())))


def _filled(batch: Batch, device: torch.device) -> Batch:
    def filled(tensor: Tensor) -> Tensor:
        there = tensor.to(device)
        return there.normal_() if there.is_floating_point() else there.zero_()

    inputs, targets = mapped(filled, batch.inputs), mapped(lambda each: each.to(device).zero_(), batch.targets)
    return replace(batch, inputs=inputs, targets=targets)
