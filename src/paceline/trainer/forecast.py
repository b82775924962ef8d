"""Forecast the time and memory of a run, measured on its own batches before the first step.

The next micro-batches run forward and backward, as in :mod:`paceline.trainer.warmup`, and the optimizer takes a step on
a copy. Weights, buffers and random states do not change. The steps reuse the batches.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from paceline.data.batch import Batch, chosen, copied, rows_of, tensors_in
from paceline.distributed.strategy import Replicas
from paceline.optim.build import build_optimizer
from paceline.plan import Plan
from paceline.records.events import MeasurementEvent
from paceline.telemetry.memory import peak_memory_bytes
from paceline.trainer.evaluate import evaluation_mode
from paceline.trainer.run import Run
from paceline.trainer.warmup import GradientProbe
from paceline.units import counted, format_bytes, format_count, format_seconds

# A shorter run ends before a forecast is worth its passes.
_FEWEST_STEPS = 20
# Timed passes end after this many seconds, or this many passes.
_SECONDS, _PASSES = 1.0, 30
_PASSES_OF_A_RANK = 2
# A first pass that takes longer is used as the measurement itself. On a GPU the first pass searches for the fastest
# kernels, so its time means nothing.
_SLOW_SECONDS, _SLOW_SECONDS_OF_A_GPU = 5.0, 60.0
# Number of rows to try first if a complete micro-batch may take minutes.
_TRIED_ROWS = 8
# Batches read ahead are kept until their steps, and a network is copied for its optimizer, up to these sizes. At most a
# fraction of the GPU memory left after a pass is used for batches.
_HELD_BYTES, _COPIED_BYTES = 256 * 2**20, 64 * 2**20
_HELD_PART = 1 / 8
_LONG_SECONDS = 3600.0


def forecast(run: Run, batches: Iterator[Batch]) -> Iterator[Batch]:
    """Report the expected time and memory of the run, and return the stream with the batches put back.

    Runs of fewer than 20 steps and networks sharded over processes are not measured.
    """
    ahead = ReadAhead(batches)
    if event := measure(run, ahead):
        run.recorder.write(event)
        run.recorder.flush()
    return ahead.again()


def measure(run: Run, ahead: ReadAhead, *, cautious: bool = False) -> MeasurementEvent | None:
    """Measure a run in its current state; None if not worthwhile or not possible.

    Args:
        run: The opened run, with its state restored.
        ahead: The run's next batches.
        cautious: Try a few rows first, and extrapolate from these if a complete micro-batch would take long.
    """
    plan, position = run.plan, run.progress.position
    end = plan.total_steps if plan.until_step is None else plan.until_step
    steps = end - position
    if steps < _FEWEST_STEPS or not isinstance(run.strategy, Replicas) or (first := ahead.read()) is None:
        return None
    begun = time.perf_counter()
    try:
        with (probe := GradientProbe(run, run.strategy, first)).without_a_trace():
            costs = _Costs(probe, ahead)
            costs.measure(cautious=cautious)
    except Exception as error:  # noqa: BLE001  # whatever fails here, the step will tell better
        run.display.message(f"expected time: not measured ({error})")
        return None
    samples = (plan.samples_before(end) - plan.samples_before(position)) / run.world.world_size
    evaluations = _evaluations(run, end)
    seconds = samples * costs.sample * _growth(plan, position, end) + steps * costs.step
    seconds += evaluations * costs.evaluation
    work = f"{format_count(steps)} steps" + (f" and {counted(evaluations, 'evaluation')}" if evaluations else "")
    memory = "" if costs.memory is None else f", {format_bytes(costs.memory)} of memory"
    shorter = ""
    if run.device.type == "cpu" and seconds > _LONG_SECONDS:
        hour = position + max(1, int((plan.total_steps - position) * _LONG_SECONDS / seconds))
        shorter = (
            f'. That is long on a CPU: train.duration="{hour} steps" takes about an hour; a smaller model.name or '
            "data.image_size takes less time, and a GPU far less"
        )
    return MeasurementEvent(
        **run.progress.here,
        what="forecast",
        message=f"expected: about {format_seconds(seconds)} for {work}{memory}{shorter}",
        seconds=time.perf_counter() - begun,
        metrics={"expected_seconds": seconds, "expected_memory_bytes": costs.memory},
    )


class ReadAhead:
    """Batches that are read before their step, and the error that stopped reading, which is raised at its step."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        self._batches = batches
        self._taken: list[Batch] = []
        self._bytes = 0
        self.most_bytes = float(_HELD_BYTES)
        self._error: Exception | None = None

    def read(self) -> Batch | None:
        """Return the next batch; None at the end, after an error, or if more batches would take too much memory."""
        if self._error is not None or (self._taken and self._bytes * (1 + 1 / len(self._taken)) > self.most_bytes):
            return None
        try:
            batch = next(self._batches, None)
        except Exception as error:  # noqa: BLE001  # raised where its batch would have been
            self._error = error
            return None
        if batch is not None:
            self._taken.append(batch)
            self._bytes += sum(each.nbytes for each in tensors_in(batch.inputs, batch.targets))
        return batch

    def again(self) -> Iterator[Batch]:
        """Yield all batches, starting with the first one read ahead."""
        while self._taken:
            yield self._taken.pop(0)
        if self._error is not None:
            raise self._error
        yield from self._batches


@dataclass
class _Costs:
    """Cost of the parts of a run, in seconds and bytes.

    Attributes:
        sample: Forward and backward pass of one sample, including the wait for it.
        step: The optimizer's step.
        evaluation: One evaluation of every set of weights.
        memory: Peak memory; None if the device does not report it.
    """

    probe: GradientProbe
    ahead: ReadAhead
    sample: float = 0.0
    step: float = 0.0
    evaluation: float = 0.0
    memory: int | None = None
    _slow_seconds: float = _SLOW_SECONDS
    _shapes: set[tuple[Any, ...]] = field(default_factory=set)

    def measure(self, *, cautious: bool) -> None:
        """Measure all parts."""
        run = self.probe.run
        self._slow_seconds = _SLOW_SECONDS if run.device.type == "cpu" else _SLOW_SECONDS_OF_A_GPU
        extra = self._try_rows(self.probe.batch) if cautious else 0.0
        is_tried = bool(self.sample)
        if not is_tried:
            self._time_passes()
        self._time_evaluation(_TRIED_ROWS if is_tried else run.evaluator.batch_size)
        extra += self._time_optimizer()
        if (peak := peak_memory_bytes(run.device.type)) is not None:
            self.memory = round(peak + extra)

    def _try_rows(self, whole: Batch) -> float:
        """Try a few rows and half of them; if the complete micro-batch would take long, extrapolate from these.

        Returns:
            The memory of the remaining rows, in bytes, if they are not tried.
        """
        rows = rows_of(whole.inputs) or 1
        if rows <= _TRIED_ROWS or self.probe.run.compiled:
            return 0.0
        peaks, seconds = [], 0.0
        for count in (_TRIED_ROWS // 2, _TRIED_ROWS, _TRIED_ROWS):
            few = range(count)
            inputs, targets = (chosen(each, few, of=rows) for each in (whole.inputs, whole.targets))
            self.probe.batch = replace(whole, inputs=inputs, targets=targets, ids=whole.ids[:count])
            seconds = self._passed()
            peaks.append(peak_memory_bytes(self.probe.run.device.type) or 0)
        if seconds * rows / _TRIED_ROWS > self._slow_seconds:
            self.sample = seconds / _TRIED_ROWS
            return (peaks[1] - peaks[0]) * (rows - _TRIED_ROWS) / (_TRIED_ROWS - _TRIED_ROWS // 2)
        self.probe.batch = whole
        return 0.0

    def _time_passes(self) -> None:
        run = self.probe.run
        self._is_new("training", self.probe.batch)
        first = passes = [(self._passed(), len(self.probe.batch.ids))]
        if run.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(run.device)
            self.ahead.most_bytes = min(_HELD_BYTES, _HELD_PART * free)
        # Ranks whose network communicates must make the same number of passes, whatever their clocks say.
        is_alone = run.world.world_size == 1
        if passes[0][0] < self._slow_seconds or not is_alone:
            passes, begun = [], time.perf_counter()
            for _ in range(_PASSES if is_alone else _PASSES_OF_A_RANK):
                read_from = time.perf_counter()
                self.probe.batch = self.ahead.read() or self.probe.batch
                self._passed()
                now = time.perf_counter()
                of_its_kind = first if self._is_new("training", self.probe.batch) else passes
                of_its_kind.append((now - read_from, len(self.probe.batch.ids)))
                if is_alone and (now - begun > _SECONDS or run.stop.requested):
                    break
            passes = passes or first
        # Batches that loader processes had ready before the first request do not show how fast they read.
        late = passes[len(passes) // 2 :]
        self.sample = sum(seconds for seconds, _ in late) / (sum(rows for _, rows in late) or 1)

    def _passed(self) -> float:
        run = self.probe.run
        run.heartbeat.enter("forward", samples=self.probe.batch.ids)
        batch = self._set_copy()
        begun = time.perf_counter()
        self.probe.gradients(run.strategy.model)
        self.probe.settle()
        seconds = time.perf_counter() - begun
        self.probe.batch = batch
        return seconds

    def _is_new(self, use: str, batch: Batch) -> bool:
        """Whether this is the first batch with these shapes on a GPU, which then searches for the fastest kernels."""
        shapes = (use, *(each.shape for each in tensors_in(batch.inputs)))
        is_new = shapes not in self._shapes and self._slow_seconds >= _SLOW_SECONDS_OF_A_GPU
        self._shapes.add(shapes)
        return is_new

    def _set_copy(self) -> Batch:
        """Give the probe a copy, and return the batch: a loss may write into inputs that a later step uses."""
        batch = self.probe.batch
        self.probe.batch = replace(batch, inputs=copied(batch.inputs), targets=copied(batch.targets))
        return batch

    def _time_evaluation(self, batch_size: int) -> None:
        """Score the first validation batches; the time includes reading them."""
        run = self.probe.run
        if not run.plan.evaluation_samples or run.plan.evaluate_every_steps is None:
            return
        rows, seconds, begun = 0, 0.0, time.perf_counter()
        with evaluation_mode(run.models().values()), torch.no_grad():
            for number, batch in enumerate(run.pipeline.evaluation_batches(batch_size, run.world)):
                reading = time.perf_counter() - begun
                scoring = self._scored(batch)
                # The first pass does the setup for the others, and the first batch the setup for reading.
                if (self._is_new("scoring", batch) or not number) and scoring < self._slow_seconds:
                    scoring = self._scored(batch)
                if number == 1 and seconds < self._slow_seconds:
                    rows, seconds = 0, 0.0
                rows, seconds = rows + len(batch.ids), seconds + reading + scoring
                if (number and seconds > _SECONDS) or seconds > self._slow_seconds or run.world.world_size > 1:
                    break
                begun = time.perf_counter()
        self.evaluation = seconds * run.plan.evaluation_samples / run.world.world_size / (rows or 1)

    def _scored(self, batch: Batch) -> float:
        run, begun = self.probe.run, time.perf_counter()
        with run.precision.autocast():
            for model in run.scored.values():
                run.task.score(run.task.evaluated(model), batch)
        self.probe.settle()
        return time.perf_counter() - begun

    def _time_optimizer(self) -> int:
        """Take steps on a copy of a small network; for a large one their time is negligible compared with its passes.

        Returns:
            The memory still to be allocated, in bytes: a large network's optimizer state and, on a CPU, the copy from
            which a checkpoint is written.
        """
        run = self.probe.run
        parameters = sum(each.nbytes for each in run.network.parameters())
        if parameters > _COPIED_BYTES:
            defaults = run.optimizer.defaults
            state = parameters * (2 if "betas" in defaults else 1 if defaults.get("momentum") else 0)
            missing = state
        else:
            self._set_copy()
            gradients = self.probe.gradients(run.network)
            network = copy.deepcopy(run.network)
            for name, parameter in network.named_parameters():
                parameter.grad = gradients.get(name)
            optimizer = build_optimizer(network, run.recipe.optimizer, run.device)
            for _ in range(2):
                begun = time.perf_counter()
                optimizer.step()
                self.probe.settle()
                self.step = time.perf_counter() - begun
            state, missing = sum(each.nbytes for each in tensors_in(*optimizer.state.values())), 0
        weights = sum(each.nbytes for model in run.models().values() for each in tensors_in(dict(model.state_dict())))
        return missing + (weights + state) * (run.device.type == "cpu")


def _growth(plan: Plan, position: int, end: int) -> float:
    """Return the mean pixels of the training images from ``position`` to ``end``, relative to those at ``position``."""
    sizes: dict[int, int] = {int(epoch): size for epoch, size in plan.data.get("image_size_from_epoch", {0: 1}).items()}
    begins = [plan.epochs.first_step(epoch) for epoch in sizes]
    spans = zip(begins, [*begins[1:], plan.total_steps], sizes.values(), strict=True)
    pixels = [(max(0, min(last, end) - max(first, position)), size**2) for first, last, size in spans]
    now = next(size for steps, size in pixels if steps)
    return sum(steps * size for steps, size in pixels) / ((end - position) * now)


def _evaluations(run: Run, end: int) -> int:
    """Return how many evaluations are left until step ``end``."""
    plan, position = run.plan, run.progress.position
    every, moments = plan.evaluate_every_steps, plan.moments.get("evaluate")
    if every is None or not plan.evaluation_samples:
        return 0
    if moments is not None:
        return sum(position < each <= end for each in {*moments, plan.total_steps})
    return end // every - position // every + (end == plan.total_steps and end % every > 0)
