"""Before a run's first step: a warm-up pass, and the checks of the compiled network and of deterministic kernels.

Nothing here changes a weight, a buffer or a random state.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from itertools import chain
from typing import Any

import torch

from paceline.data.batch import Batch, rows_of
from paceline.distributed.exact import preserve_buffers
from paceline.distributed.strategy import ControlFlags, Replicas, refuse_unused
from paceline.errors import ModelError
from paceline.host.world import World
from paceline.metrics.named import NamedMetrics
from paceline.models.compiled import shape_of
from paceline.records.events import MeasurementEvent
from paceline.tasks.own_code import RefusedBroadcast, calling, check_scores, refuse_missing
from paceline.trainer.evaluate import evaluation_mode
from paceline.trainer.process_settings import restore_random_states
from paceline.trainer.run_views import ProbedRun
from paceline.trainer.step import seed_forward


def warm_up(run: ProbedRun, batches: Iterator[Batch]) -> Iterator[Batch]:
    """Send the first batch through forward, backward and reduction, and return the stream with it put back.

    DDP rebuilds its gradient buckets after its first backward pass, in the order in which gradients arrived. With three
    or more processes the buckets determine the order of summation in a ring, and so the last bits. A resumed run must
    therefore rebuild them before its first step, as the uninterrupted run had.

    Raises:
        ModelError: If parameters took no part in the loss: other processes would wait for their gradients forever.
    """
    run.heartbeat.enter("data_wait")
    claim_memory(run)
    first = next(batches, None)
    if first is None or not run.strategy.needs_warmup:
        return batches if first is None else chain([first], batches)
    send_through(run, first)
    # Parts frozen until later stay frozen as in the step before: a change due at the first step happens in that step.
    schedule = run.freeze_schedule
    if schedule is not None and schedule.at(max(run.progress.step - 1, 0)):
        send_through(run, first)
    return chain([first], batches)


def claim_memory(run: ProbedRun) -> None:
    """Send the largest micro-batch through forward and backward, if samples differ in length.

    Memory is then allocated once, not gradually as longer samples appear, and a batch that does not fit fails at once.
    All processes send the same micro-batch, whichever of them will train on it.
    """
    largest = run.geometry.costliest(run.progress.position, run.plan.total_steps)
    if largest is None:
        return
    batches = run.pipeline.train_batches(run.geometry, largest.step, largest.step + 1, World())
    [batch] = [each for each in batches if each.slice.logical_rank == largest.logical_rank]
    send_through(run, batch)


def send_through(run: ProbedRun, first: Batch) -> None:
    """Run a micro-batch forward, backward and through the reduction over processes; its gradients are dropped."""
    with preserve_buffers(run.network):
        run.heartbeat.enter("forward", samples=first.ids)
        seed_forward(run.recipe.seed, first.slice, run.device)
        loss = run.loss(run.strategy.model, first)
        run.heartbeat.enter("backward", last=True)
        torch.autograd.backward(run.strategy.with_vote(loss * 0, ControlFlags, is_last=True))
        try:
            if run.strategy.needs_warmup:
                refuse_unused(run.network, allowed=run.recipe.parallel.unused_parameters == "allow")
        finally:
            run.optimizer.zero_grad(set_to_none=True)


# fp16 loses small values; both sides of the comparison are scaled up by this factor.
FP16_SCALE = 1024.0
_ROUNDS = 5

Gradients = dict[str, torch.Tensor]


def _text(ratios: Sequence[float]) -> str:
    middle = statistics.median(ratios)
    return f"{middle:.2f} ({min(ratios):.2f} to {max(ratios):.2f}, {len(ratios)} rounds)"


class GradientProbe:
    """Runs passes of one micro-batch without changing weights, buffers, gradients or random states."""

    def __init__(self, run: ProbedRun, replicas: Replicas, batch: Batch) -> None:
        self.run = run
        self._replicas = replicas
        self.batch = batch
        self._parameters = {name: each for name, each in run.network.named_parameters() if each.requires_grad}

    @contextmanager
    def isolated(self, *, reduces: bool = False) -> Iterator[None]:
        """Restore buffers and random states to their current values afterwards, also after an error.

        Args:
            reduces: Whether backward passes inside are reduced over processes.
        """
        with (
            restore_random_states(self.run.device.type),
            preserve_buffers(self.run.network),
            ExitStack() if reduces else self._replicas.no_reduction(),
        ):
            yield

    def gradients(self, model: Callable[..., Any], *, autocast: bool = True) -> Gradients:
        """Return the gradient of this batch by parameter, without unused parameters."""
        run = self.run
        seed_forward(run.recipe.seed, self.batch.slice, run.device)
        loss = run.loss(model, self.batch) if autocast else run.task.loss(model, self.batch)
        if run.precision.scaler is not None:
            loss = loss * FP16_SCALE
        # Not backward(): nothing is accumulated, and a wrapper's hooks are not called.
        gradients = torch.autograd.grad(loss, list(self._parameters.values()), allow_unused=True)
        return {name: each for name, each in zip(self._parameters, gradients, strict=True) if each is not None}

    def compare(self, first: Callable[[], Any], second: Callable[[], Any]) -> list[float]:
        """Time two already warm functions alternately; return the seconds of the first divided by the second's."""

        def seconds(function: Callable[[], Any]) -> float:
            self.synchronize()
            start = time.perf_counter()
            function()
            self.synchronize()
            return time.perf_counter() - start

        return [seconds(first) / seconds(second) for _ in range(_ROUNDS)]

    def synchronize(self) -> None:
        """Wait until the device has finished its queued work."""
        if self.run.device.type != "cpu":
            torch.get_device_module(self.run.device).synchronize()


def check_first_batch(run: ProbedRun, batches: Iterator[Batch]) -> Iterator[Batch]:
    """Before a run's first step: run the checks that the recipe requests, and return the stream unchanged.

    Raises:
        ModelError: On every process, if the compiled network is wrong.
    """
    batches = _check_first_gradients(run, batches)
    _rehearse_evaluation(run)
    return batches


def _check_first_gradients(run: ProbedRun, batches: Iterator[Batch]) -> Iterator[Batch]:
    checks = [check_compiled] * (run.plan.compile != "off") + [measure_deterministic] * run.recipe.train.deterministic
    # A sharded network cannot be tried separately: there the cost of determinism is not measured.
    if run.progress.position or not checks or not isinstance(run.strategy, Replicas):
        return batches
    first = next(batches, None)
    if first is None:
        return batches
    run.heartbeat.enter("forward", samples=first.ids)
    for each in checks:
        start = time.perf_counter()
        measurement, failure = None, ""
        try:
            with (probe := GradientProbe(run, run.strategy, first)).isolated():
                measurement = each(probe)
        except ModelError as error:
            failure = str(error)
        for rank, rank_failure in enumerate(failures := run.collectives.gather(failure)):
            if rank_failure:
                raise ModelError(rank_failure if len(failures) == 1 else f"rank {rank}: {rank_failure}")
        if measurement is not None:
            run.recorder.write(replace(measurement, seconds=time.perf_counter() - start))
    run.recorder.flush()
    return chain([first], batches)


_CODE_ERRORS = (AttributeError, KeyError, NameError, TypeError)


def _rehearse_evaluation(run: ProbedRun) -> None:
    """Score a held-out batch, the same on every process: at the first evaluation, an epoch would be lost.

    Only with your own task, or metrics that the recipe names.

    Raises:
        ModelError: If a method of the task or of a collector fails, or returns the wrong thing.
        RecipeError: If a metric that the recipe names gives no number.
    """
    task, named, device = run.task, NamedMetrics(run.recipe.evaluate.metrics), run.device.type
    if run.progress.position or not run.plan.evaluates or not (task.is_own or named.metrics):
        return
    model = run.scored["model"] if run.strategy.is_sharded else run.network
    with restore_random_states(device), preserve_buffers(run.network), evaluation_mode([run.network]), torch.no_grad():
        batch = next(iter(run.pipeline.evaluation_batches(run.evaluator.batch_size, World())), None)
        if batch is None or not len(batch.ids):
            return
        checked = RefusedBroadcast(task, "score", batch.targets) if task.is_own else nullcontext()
        with run.precision.keeping_casts(), calling(task, "score", errors=Exception), checked:
            scores = task.score(task.evaluated(run.precision.applied_to(model)), batch)
        check_scores(task, scores, len(batch.ids))
        # A result that one batch cannot give, such as a curve of a single class, is not a mistake.
        with suppress(ArithmeticError, AssertionError, IndexError, RuntimeError, ValueError):
            results: dict[str, float] = {}
            for each in (*(task.collectors() if task.is_own else ()), named):
                with calling(each, "add", errors=Exception):
                    each.add(scores, batch.ids)
                    part = each.part()
                with calling(each, "results", errors=_CODE_ERRORS):
                    results |= each.results([part])
            for metric in task.metrics:
                if metric.is_collected and task.is_own:
                    refuse_missing(task, "collectors give", results, "the metrics have", metric.name)


def measure_deterministic(probe: GradientProbe) -> MeasurementEvent:
    """Measure the cost of deterministic kernels on the uncompiled network.

    Raises:
        ModelError: If an operation has no deterministic kernel.
    """
    run = probe.run

    def passes() -> Gradients:
        return probe.gradients(run.network)

    def nondeterministic() -> Gradients:
        """Apply the settings of a run that does not request determinism."""
        benchmark = torch.backends.cudnn.benchmark
        torch.use_deterministic_algorithms(mode=False)
        torch.backends.cudnn.benchmark = run.device.type == "cuda"
        try:
            return passes()
        finally:
            torch.backends.cudnn.benchmark = benchmark
            torch.use_deterministic_algorithms(mode=True)

    try:
        passes()
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        raise ModelError(f"train.deterministic=true: {' '.join(str(error).split())[:300]}") from error
    nondeterministic()
    cost = probe.compare(passes, nondeterministic)
    return MeasurementEvent(
        **run.progress.here,
        what="deterministic",
        message=f"train.deterministic=true: forward and backward passes take {_text(cost)} times as long as without it",
        seconds=0.0,
        metrics={"slowdown": statistics.median(cost)},
    )


# How far a parameter's gradient may be from the uncompiled one's, relative to its norm. With rounding to 16 bits or
# fewer, this multiple of the distance between the uncompiled gradient and the fp32 gradient is allowed too.
_TOLERANCE = {"fp32": 1e-3, "bf16": 1e-2, "fp16": 1e-2, "fp8": 5e-2}
_ROUNDING = 4.0
# Relative to the norm of the complete gradient: noise in a parameter whose gradient vanishes (a bias before a
# BatchNorm).
_NEGLIGIBLE = 1e-4


def check_compiled(probe: GradientProbe) -> MeasurementEvent:
    """Compare one micro-batch's gradient with and without compilation, and time both.

    Raises:
        ModelError: If they differ by more than rounding.
    """
    run = probe.run
    compiled_model = run.strategy.model
    compiled = run.compiled["model"]
    inputs = probe.batch.inputs
    if not compiled.compiles(shape_of((inputs,), {})):
        message = f"model.compile: micro-batches of {rows_of(inputs)}, such as the first one, run uncompiled"
        return MeasurementEvent(**run.progress.here, what="compile", message=message, seconds=0.0)
    gradients = probe.gradients(compiled_model)
    expected = probe.gradients(run.network)
    compiled_seconds = sum(each.seconds for each in compiled.log.graphs)
    error = _distance(probe, gradients, expected)
    speedup = probe.compare(lambda: probe.gradients(run.network), lambda: probe.gradients(compiled_model))
    if max(speedup) < 1:
        slowdown = _text([1 / each for each in speedup])
        message = f"the compiled network takes {slowdown} times as long as uncompiled here; set model.compile=false."
        run.recorder.incident("slow_compile", message)
    return MeasurementEvent(
        **run.progress.here,
        what="compile",
        message=(
            f"model.compile: compiled in {compiled_seconds:.1f} s; the gradient of the first micro-batch differs from "
            f"the uncompiled one's by {error:.1e}; forward and backward passes are {_text(speedup)} times as fast"
        ),
        seconds=0.0,
        metrics={"gradient_error": error, "speedup": statistics.median(speedup)},
    )


def _distance(probe: GradientProbe, gradients: Gradients, expected: Gradients) -> float:
    """Return the distance of two gradients relative to the norm of the second.

    Raises:
        ModelError: If any parameter's differ by more than rounding.
    """
    run = probe.run
    rounded = run.plan.precision != "fp32"
    exact = probe.gradients(run.network, autocast=False) if rounded else expected
    norm, numbers = _length(expected.values()), sum(each.numel() for each in expected.values())
    if not math.isfinite(norm):
        return math.nan  # inconclusive; the guard against non-finite losses will handle it
    worst, where, tolerance = 0.0, "", 1.0
    for name in {**expected, **gradients}:
        if name not in expected or name not in gradients:
            worst, where, tolerance = math.inf, name, 0.0
            break
        size = math.sqrt(expected[name].numel() / numbers) * norm
        allowed = _TOLERANCE[run.plan.precision] * _length([expected[name]]) + _NEGLIGIBLE * size
        allowed += _ROUNDING * _length([expected[name] - exact[name]])
        gap = _length([gradients[name] - expected[name]])
        if not gap <= allowed and not gap / allowed <= worst:
            worst, where, tolerance = gap / allowed, name, allowed / max(_length([expected[name]]), 1e-300)
    if where:
        raise ModelError(
            f"model.compile=true: the compiled network's gradient of {where} is wrong: it differs from the uncompiled "
            f"one by {worst:.1f} times what rounding explains ({tolerance:.1e} of its length); set "
            "model.compile=false, or find the fault with model.compile_backend=aot_eager."
        )
    return _length([gradients[name] - expected[name] for name in expected]) / max(norm, 1e-300)


def _length(tensors: Iterable[torch.Tensor]) -> float:
    return math.hypot(*(float(torch.linalg.vector_norm(each.float())) for each in tensors))
