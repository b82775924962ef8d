"""Forecast the time and memory of a run, measured on its own batches before the first step.

The next micro-batches run forward and backward, as in :mod:`paceline.trainer.warmup`; a copy of the network takes an
optimizer step. Weights, buffers and random states do not change. The steps reuse the batches. The forecast of a short
run is its second step, multiplied.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from paceline.data.batch import Batch, ReadAhead, copied, rows_of, select_rows, tensors_in
from paceline.distributed.strategy import Replicas
from paceline.optim.build import Clipping, ExponentialMovingAverage
from paceline.parsing.units import counted, format_bytes, format_count, format_seconds_range
from paceline.plan import Plan
from paceline.plan.strategy import exact_gradient_count, optimizer_state_numbers
from paceline.records.events import MeasurementEvent
from paceline.telemetry.clock import peak_memory_bytes
from paceline.trainer.evaluate import evaluation_mode
from paceline.trainer.expected_memory import ExpectedMemory
from paceline.trainer.run_views import ProbedRun
from paceline.trainer.warmup import GradientProbe, send_through

# A shorter run ends before a forecast is worth its passes; one with fewer than the second number ends before its second
# step says anything.
_MIN_STEPS, _MIN_STEPS_TIMED = 20, 4
# Timed passes end after this many seconds, or this many passes. Loader processes and GPU runs read batches ahead: their
# real speed shows only once the batches that were ready are used up.
_SECONDS, _SECONDS_READ_AHEAD, _PASSES = 0.3, 1.0, 30
# A first pass that takes longer is used as the measurement itself. On a GPU the first pass searches for the fastest
# kernels, so its time means nothing.
_SLOW_SECONDS, _SLOW_SECONDS_CUDA = 5.0, 60.0
# Number of rows to try first if a complete micro-batch may take minutes.
_TRIED_ROWS = 8
# Batches read ahead take at most this fraction of the free memory of a GPU.
_MAX_HELD_FRACTION = 1 / 8
# Largest network to copy for its optimizer.
_MAX_COPIED_BYTES, _MAX_COPIED_BYTES_CUDA = 256 * 2**20, 64 * 2**20
# Copying, hashing and writing a checkpoint on the cores that train (benchmarks/checkpoint.py).
_SAVE_SECONDS_PER_BYTE = 1.0e-9
# What else a process on a CPU uses after the forecast: for records, checkpoints, evaluations and the report
# (benchmarks/expected_memory.py).
_LATER_BYTES = 32 * 2**20
# Importing a tracker's library competes with the first steps for the interpreter.
_TRACKER_SECONDS = 0.3
# After the last step: the summary and the end of the process; the report; the end of a group of processes.
_CLOSING_SECONDS, _REPORT_SECONDS, _GROUP_SECONDS = 0.15, 0.2, 0.5
# Half the width of the range that holds four of five runs, as a fraction: of the steps if their passes take equally
# long, of the steps of a run that takes no passes, and of what comes after the last step.
_UNCERTAINTY, _UNCERTAINTY_TIMED, _UNCERTAINTY_OF_CLOSING = 0.2, 0.3, 0.4
# On a CPU, steps take longer than their passes, which share the cores with records, log lines and the heartbeat
# (benchmarks/forecast.py).
_BESIDE = 1.05
# A sample is scored in about this fraction of the time that it takes to train on.
_SCORING_SHARE = 1 / 3
_LONG_SECONDS = 3600.0


def forecast(run: ProbedRun, batches: Iterator[Batch]) -> Iterator[Batch]:
    """Report the expected time and memory of the run, and return the stream with the batches put back.

    Runs of fewer than 20 steps and networks sharded over processes take no passes: their time is reported after two
    steps. A resumed run uses the time of its latest steps if 20 or more ran on as many processes, with the same
    micro-batch and device.
    """
    ahead = ReadAhead(batches)
    # All processes measure, or none; only some of them may have another device than before.
    comparable_steps = min(run.collectives.gather(run.clock.totals.comparable_steps))
    if event := _extrapolate(run) if comparable_steps >= _MIN_STEPS else measure(run, ahead):
        _record(run, event)
        return ahead.replay()
    return _timed(run, ahead.replay())


def _record(run: ProbedRun, event: MeasurementEvent) -> None:
    run.recorder.write(event)
    run.recorder.flush()


def _timed(run: ProbedRun, batches: Iterator[Batch]) -> Iterator[Batch]:
    """Yield the batches, and report the expected time once the second step is done."""
    plan, first, times = run.plan, run.progress.position, list[float]()
    steps = plan.end - first - 2
    if steps + 2 < _MIN_STEPS_TIMED:
        yield from batches
        return
    for batch in batches:
        # The first step is slower than all others.
        if len(times) < 2 and run.progress.position > first + len(times):
            times.append(run.clock.totals.train_seconds)
            if len(times) == 2:
                here, evaluations = run.progress.position, _times_due(plan, "evaluate", run.progress.position, plan.end)
                sample = (times[1] - times[0]) / (plan.samples_before(here) - plan.samples_before(here - 1))
                samples: float = plan.samples_before(plan.end) - plan.samples_before(here)
                samples += evaluations * plan.evaluation_samples * len(run.scored) * _SCORING_SHARE
                work = f"the {format_count(steps)} steps left" + _evaluations_in_words(evaluations)
                _record(run, _expected(run, samples * sample, _UNCERTAINTY_TIMED, f"for {work}"))
        yield batch


def _extrapolate(run: ProbedRun) -> MeasurementEvent | None:
    plan, position, totals = run.plan, run.progress.position, run.clock.totals
    end = plan.end
    if (steps := end - position) < _MIN_STEPS:
        return None
    measured_from = position - totals.comparable_steps
    samples, measured = (
        (plan.samples_before(last) - plan.samples_before(first)) * _mean_pixels(plan, first, last)
        for first, last in ((position, end), (measured_from, position))
    )
    seconds = totals.comparable_seconds * samples / measured
    evaluations = _times_due(plan, "evaluate", position, end)
    more = f", plus {counted(evaluations, 'evaluation')}" if evaluations else ""
    work = f"for {format_count(steps)} steps at the speed so far{more}"
    return _expected(run, seconds, _UNCERTAINTY, work)


def _expected(
    run: ProbedRun,
    seconds: float,
    uncertainty: float,
    work: str,
    *,
    took: float = 0.0,
    memory: Mapping[str, float | None] | None = None,
) -> MeasurementEvent:
    """Return the record of the expected time until the command ends.

    Args:
        run: The run.
        seconds: Expected time until its last step has ended.
        uncertainty: Relative uncertainty of these seconds.
        work: What takes the time, in words.
        took: Duration of the measurement, in seconds.
        memory: Figures of the expected memory, in bytes; None if unknown.
    """
    closing = _CLOSING_SECONDS + _REPORT_SECONDS * run.recipe.telemetry.report
    closing += _GROUP_SECONDS * (run.world.world_size > 1)
    off = math.hypot(uncertainty * seconds, _UNCERTAINTY_OF_CLOSING * closing)
    middle = seconds + closing
    # As a factor in both directions: a run may take twice as long, but not a negative time.
    low, high = middle**2 / (middle + off), middle + off
    return MeasurementEvent(
        **run.progress.here,
        what="forecast",
        message=f"expected: {format_seconds_range(low, high)} {work}",
        seconds=took,
        metrics={
            "expected_seconds": middle,
            "expected_seconds_low": low,
            "expected_seconds_high": high,
            **(memory or {"expected_memory_bytes": None}),
        },
    )


def _evaluations_in_words(evaluations: int) -> str:
    return f" and {counted(evaluations, 'evaluation')}" if evaluations else ""


def measure(run: ProbedRun, ahead: ReadAhead, *, cautious: bool = False) -> MeasurementEvent | None:
    """Measure a run in its current state; None if not worthwhile or not possible.

    Args:
        run: The opened run, with its state restored.
        ahead: The run's next batches.
        cautious: Try a few rows first, and extrapolate from these if a complete micro-batch would take long.
    """
    plan, position = run.plan, run.progress.position
    end = plan.end
    steps = end - position
    if steps < (1 if cautious else _MIN_STEPS) or not isinstance(run.strategy, Replicas):
        return None
    if (first := ahead.read()) is None:
        return None
    start = time.perf_counter()
    costs, failed = _Costs(GradientProbe(run, run.strategy, first), ahead), False
    try:
        with costs.probe.isolated(reduces=run.world.world_size > 1):
            costs.measure(cautious=cautious)
    except Exception as error:
        # The other processes wait for this one's gradients; a step of this one would mix with their passes.
        if costs.is_reducing:
            raise
        # Whatever else fails here, the step will tell better.
        run.display.message(f"expected time: not measured ({error})")
        failed = True
    shared = ExpectedMemory.of_run(run, None if failed else costs.memory) if run.device.type == "cpu" else None
    if failed:
        return None
    samples = (plan.samples_before(end) - plan.samples_before(position)) / run.world.world_size
    samples *= _mean_pixels(plan, position, end) / _mean_pixels(plan, position, position + 1)
    evaluations = _times_due(plan, "evaluate", position, end)
    seconds = samples * costs.sample + steps * costs.step
    seconds += evaluations * costs.evaluation + _times_due(plan, "checkpoint", position, end) * costs.save
    seconds *= _BESIDE if run.device.type == "cpu" else 1
    seconds += len(run.recipe.telemetry.trackers) * _TRACKER_SECONDS
    work = f"for {format_count(steps)} steps{_evaluations_in_words(evaluations)}"
    memory = "" if costs.memory is None else f", {format_bytes(costs.memory)} of memory"
    if shared is not None:
        memory = f", {shared.in_words(' of memory')}"
    shorter = ""
    if run.device.type == "cpu" and seconds > _LONG_SECONDS:
        hour = position + max(1, int(steps * _LONG_SECONDS / seconds))
        shorter = (
            f'. That is long on a CPU: train.duration="{hour} steps" takes about an hour; a smaller model.name or '
            "data.image_size takes less time, and a GPU far less"
        )
    off, took = math.hypot(_UNCERTAINTY, costs.spread / 2), time.perf_counter() - start
    known = {"expected_memory_bytes": costs.memory} | ({} if shared is None else shared.to_record())
    return _expected(run, seconds, off, work + memory + shorter, took=took, memory=known)


@dataclass
class _Costs:
    """Cost of the parts of a run, in seconds and bytes.

    Attributes:
        sample: Forward and backward pass of one sample, including the wait for it and the reduction over processes.
        spread: Standard deviation of that between passes, as a fraction.
        step: Clipping, the optimizer's step and the update of the average.
        evaluation: One evaluation of every set of weights.
        save: Writing a checkpoint, if it takes time from training.
        memory: Peak memory; None if the device does not report it.
        is_reducing: Whether passes that the other processes take part in have begun and not ended.
    """

    probe: GradientProbe
    ahead: ReadAhead
    sample: float = 0.0
    spread: float = 0.0
    step: float = 0.0
    evaluation: float = 0.0
    save: float = 0.0
    memory: int | None = None
    is_reducing: bool = False
    _seconds: float = _SECONDS
    _slow_seconds: float = _SLOW_SECONDS
    _shapes: set[tuple[Any, ...]] = field(default_factory=set)

    def measure(self, *, cautious: bool) -> None:
        """Measure all parts."""
        run = self.probe.run
        is_on_cpu = run.device.type == "cpu"
        self._slow_seconds = _SLOW_SECONDS if is_on_cpu else _SLOW_SECONDS_CUDA
        self._seconds = _SECONDS if is_on_cpu and not run.plan.data.get("workers") else _SECONDS_READ_AHEAD
        extra = self._try_rows(self.probe.batch) if cautious else 0.0
        is_tried = bool(self.sample)
        if not is_tried:
            self._time_passes()
        self._time_evaluation(_TRIED_ROWS if is_tried else run.evaluator.batch_size)
        peak = peak_memory_bytes(run.device.type)
        extra += self._time_step()
        if run.plan.strategy == "exact":  # one gradient exists from the start, and the passes hold another
            trained = sum(each.nbytes for each in run.network.parameters() if each.requires_grad)
            extra += trained * (exact_gradient_count(run.plan.logical_ranks, run.world.world_size) - 2)
        if run.device.type in ("cuda", "xpu"):  # the step on a copy is not part of the run
            torch.get_device_module(run.device).reset_peak_memory_stats()
        if peak is not None:
            self.memory = round(peak + extra)

    def _try_rows(self, batch: Batch) -> float:
        """Try a few rows and half of them; if the complete micro-batch would take long, extrapolate from these.

        Returns:
            The memory of the remaining rows, in bytes, if they are not tried.
        """
        rows = rows_of(batch.inputs) or 1
        if rows <= _TRIED_ROWS or self.probe.run.compiled:
            return 0.0
        peaks = []
        for count in (_TRIED_ROWS // 2, _TRIED_ROWS, _TRIED_ROWS):
            rows_tried = range(count)
            inputs, targets = (select_rows(each, rows_tried, size=rows) for each in (batch.inputs, batch.targets))
            self.probe.batch = replace(batch, inputs=inputs, targets=targets, ids=batch.ids[:count])
            seconds = self._pass_seconds()
            peaks.append(peak_memory_bytes(self.probe.run.device.type) or 0)
        if seconds * rows / _TRIED_ROWS > self._slow_seconds:
            self.sample = seconds / _TRIED_ROWS
            return (peaks[1] - peaks[0]) * (rows - _TRIED_ROWS) / (_TRIED_ROWS - _TRIED_ROWS // 2)
        self.probe.batch = batch
        return 0.0

    def _time_passes(self) -> None:
        run = self.probe.run
        self.is_reducing = run.world.world_size > 1
        self._is_new("training", self.probe.batch)
        first = passes = [(self._pass_seconds(), len(self.probe.batch.ids))]
        if run.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(run.device)
            self.ahead.max_bytes = min(self.ahead.max_bytes, _MAX_HELD_FRACTION * free)
        # Processes wait for one another in a pass, so all make the same number of passes.
        longest = max(run.collectives.gather(passes[0][0]))
        is_alone = run.world.world_size == 1
        if longest < self._slow_seconds:
            passes, start = [], time.perf_counter()
            for _ in range(_PASSES if is_alone else min(_PASSES, 2 + int(self._seconds / max(longest, 1e-3)))):
                read_from = time.perf_counter()
                self.probe.batch = self.ahead.read() or self.probe.batch
                self._pass_seconds()
                now = time.perf_counter()
                group = first if self._is_new("training", self.probe.batch) else passes
                group.append((now - read_from, len(self.probe.batch.ids)))
                if is_alone and (now - start > self._seconds or run.stop.requested):
                    break
            passes = passes or first
        # Batches that loader processes had ready before the first request do not show how fast they read.
        later = passes[len(passes) // 2 :]
        self.sample = sum(seconds for seconds, _ in later) / (sum(rows for _, rows in later) or 1)
        rates = [seconds / rows for seconds, rows in later if rows]
        self.spread = statistics.pstdev(rates) / (statistics.mean(rates) or 1) if rates else 0.0
        self.is_reducing = False

    def _pass_seconds(self) -> float:
        run = self.probe.run
        run.heartbeat.enter("forward", samples=self.probe.batch.ids)
        batch = self._copy_probe_batch()
        start = time.perf_counter()
        if run.world.world_size > 1:
            send_through(run, self.probe.batch)
        else:
            self.probe.gradients(run.strategy.model)
        self.probe.synchronize()
        seconds = time.perf_counter() - start
        self.probe.batch = batch
        return seconds

    def _is_new(self, use: str, batch: Batch) -> bool:
        """Whether this is the first batch with these shapes on a GPU, which then searches for the fastest kernels."""
        shapes = (use, *(each.shape for each in tensors_in(batch.inputs)))
        is_new = shapes not in self._shapes and self._slow_seconds >= _SLOW_SECONDS_CUDA
        self._shapes.add(shapes)
        return is_new

    def _copy_probe_batch(self) -> Batch:
        """Give the probe a copy, and return the batch: a loss may write into inputs that a later step uses."""
        batch = self.probe.batch
        self.probe.batch = replace(batch, inputs=copied(batch.inputs), targets=copied(batch.targets))
        return batch

    def _time_evaluation(self, batch_size: int) -> None:
        """Score the first validation batches; the time includes reading them."""
        run = self.probe.run
        if not run.plan.evaluates:
            return
        timings: list[tuple[float, float, int]] = []
        spent, start = 0.0, time.perf_counter()
        with evaluation_mode(run.models().values()), torch.no_grad():
            for number, batch in enumerate(run.pipeline.evaluation_batches(batch_size, run.world)):
                reading = time.perf_counter() - start
                scoring = self._scoring_seconds(batch)
                # The first pass does the setup for the others.
                if (self._is_new("scoring", batch) or not number) and scoring < self._slow_seconds:
                    scoring = self._scoring_seconds(batch)
                timings.append((reading, scoring, len(batch.ids)))
                spent += reading + scoring
                if (number and spent > self._seconds) or spent > self._slow_seconds or run.world.world_size > 1:
                    break
                start = time.perf_counter()
        if not timings:
            return
        # Each evaluation waits once for the setup of reading, before its first batch.
        setup, *_ = timings[0]
        reading, scoring, rows = map(sum, zip(*(timings[1:] or timings), strict=True))
        setup = max(0.0, setup - reading / (rows or 1) * timings[0][2])
        self.evaluation = setup + (reading + scoring) * run.plan.evaluation_samples / run.world.world_size / (rows or 1)

    def _scoring_seconds(self, batch: Batch) -> float:
        run, start = self.probe.run, time.perf_counter()
        for model in run.scored.values():
            with run.precision.keeping_casts():
                run.task.score(run.task.evaluated(run.precision.applied_to(model)), batch)
        self.probe.synchronize()
        return time.perf_counter() - start

    def _time_step(self) -> int:
        """Take steps on a copy of the network.

        Returns:
            The memory still to be allocated, in bytes: the optimizer's state and, on a CPU, the copy from which a
            checkpoint is written.
        """
        run, on_cpu = self.probe.run, self.probe.run.device.type == "cpu"
        parameters = sum(each.nbytes for each in run.network.parameters())
        if parameters > (_MAX_COPIED_BYTES if on_cpu else _MAX_COPIED_BYTES_CUDA):
            # Its step is short compared with its passes; its state is what the plan assumes.
            state = parameters * optimizer_state_numbers(run.recipe.optimizer)
        else:
            state = self._time_copied_step()
        weights = sum(each.nbytes for model in run.models().values() for each in tensors_in(dict(model.state_dict())))
        if not on_cpu:
            return state
        self.save = (weights + state) * _SAVE_SECONDS_PER_BYTE
        return weights + 2 * state + _LATER_BYTES

    def _time_copied_step(self) -> int:
        run = self.probe.run
        self._copy_probe_batch()
        gradients = self.probe.gradients(run.network)
        network = copy.deepcopy(run.network)
        optimizer = run.task.build_optimizer(network, run.recipe.optimizer, run.device)
        clipping = Clipping(network, run.recipe.optimizer)
        average = None if run.ema is None else ExponentialMovingAverage(network, run.ema.decay)
        for _ in range(2):
            for name, parameter in network.named_parameters():
                parameter.grad = gradients.get(name)
            start = time.perf_counter()
            clipping(measure=False)
            optimizer.step()
            if average is not None:
                average.update(run.progress.step)
            self.probe.synchronize()
            self.step = time.perf_counter() - start
        return sum(each.nbytes for each in tensors_in(*optimizer.state.values()))


def _mean_pixels(plan: Plan, first: int, last: int) -> float:
    """Return the mean pixels of the training images from step ``first`` to ``last``, in a unit of this run."""
    sizes: dict[int, int] = {int(epoch): size for epoch, size in plan.data.get("image_size_from_epoch", {0: 1}).items()}
    starts = [plan.epochs.first_step(epoch) for epoch in sizes]
    spans = zip(starts, [*starts[1:], plan.total_steps], sizes.values(), strict=True)
    return sum(max(0, min(end, last) - max(start, first)) * size**2 for start, end, size in spans) / (last - first)


def _times_due(plan: Plan, occasion: Literal["evaluate", "checkpoint"], position: int, end: int) -> int:
    """Return how often something is due after step ``position`` until step ``end``; 0 if it is due by time."""
    every = plan.evaluate_every_steps if occasion == "evaluate" else plan.checkpoint_every_steps
    if every is None or (occasion == "evaluate" and not plan.evaluation_samples):
        return 0
    if (moments := plan.moments.get(occasion)) is not None:
        return sum(position < each <= end for each in {*moments, plan.total_steps})
    return end // every - position // every + (end == plan.total_steps and end % every > 0)
