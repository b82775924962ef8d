"""How long does each part of a step take, at what cost, and without making the device wait?

On the host a span is two readings of ``perf_counter``: about 0.4 µs with its ``with`` statement. On an
accelerator it is two events recorded into the stream and read when a log record is due, so that nothing
synchronises in between. There ``data_wait`` is the time the stream stood still while the host waited for
data, which is what data cost: a host that waits while the device still works costs nothing.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, final

from paceline.telemetry.meter import PHASES, Meter, Totals

WARMUP_STEPS = 3

ErrorType = type[BaseException] | None


class StepClock(abc.ABC):
    """Measures steps and their phases.

    ``start`` goes right before the loop and ``end_step`` at the end of each step; the time between is the
    step's, but for what lies in ``paused``::

        with clock.span("forward"):
            ...
        clock.end_step(samples=global_batch)
    """

    def __init__(self, *, warmup_steps: int = WARMUP_STEPS) -> None:
        self._meter = Meter(warmup_steps=warmup_steps)

    @abc.abstractmethod
    def start(self) -> None:
        """Begin the first step here: what came before is no training."""

    @abc.abstractmethod
    def span(self, phase: str) -> AbstractContextManager[None, None]:
        """Count the time inside as a phase of this step; may be entered several times per step, never nested.

        Raises:
            KeyError: If the phase is not one of ``PHASES``.
        """

    @abc.abstractmethod
    def paused(self) -> AbstractContextManager[None, None]:
        """Leave the time inside out of the step: evaluation, saving."""

    @abc.abstractmethod
    def end_step(self, samples: int) -> None:
        """Close the step, which used this many samples over all ranks, and begin the next."""

    @abc.abstractmethod
    def _settle(self) -> None:
        """Bring all closed steps into the meter. On a GPU this waits for the last step: a synchronisation."""

    def drain(self) -> dict[str, float | None]:
        """Return the mean seconds per step and the rates since the last call; see :meth:`Meter.drain`.

        Call it where a log record is due: on a GPU it waits for the device.
        """
        self._settle()
        return self._meter.drain()

    @property
    def totals(self) -> Totals:
        """What the run comes to over all its launches; waits for the device, as :meth:`drain` does."""
        self._settle()
        return self._meter.totals

    def state_dict(self) -> dict[str, Any]:
        """Return what must survive a restart; waits for the device, as :meth:`drain` does."""
        self._settle()
        return self._meter.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self._meter.load_state_dict(state)

    def close(self) -> None:  # noqa: B027  # most clocks hold nothing
        """Measure no more: the run is over, or it failed."""


def build_step_clock(device_type: str, *, warmup_steps: int = WARMUP_STEPS) -> StepClock:
    """Return the clock for a device type: the CPU gets the host's time, all others events of their own."""
    if device_type == "cpu":
        return HostStepClock(warmup_steps=warmup_steps)
    make: Any = event_type(device_type)  # carries no types
    return EventStepClock(lambda: make(enable_timing=True), warmup_steps=warmup_steps)


class _HostSpan:
    """Adds up the time spent inside it. A class, because a generator would cost five times as much."""

    __slots__ = ("_begun", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        self._begun = 0.0

    def __enter__(self) -> None:
        self._begun = time.perf_counter()

    def __exit__(self, kind: ErrorType, error: BaseException | None, trace: TracebackType | None) -> None:
        self.seconds += time.perf_counter() - self._begun


@final
class HostStepClock(StepClock):
    """Reads the host's clock; right wherever operations are done when they return."""

    def __init__(self, *, warmup_steps: int = WARMUP_STEPS) -> None:
        super().__init__(warmup_steps=warmup_steps)
        self._spans = {phase: _HostSpan() for phase in PHASES}
        self._pause = _HostSpan()
        self._step_begun = time.perf_counter()

    def start(self) -> None:
        """Begin the first step here."""
        for span in (*self._spans.values(), self._pause):
            span.seconds = 0.0
        self._step_begun = time.perf_counter()

    def span(self, phase: str) -> AbstractContextManager[None, None]:
        """Count the time inside as a phase of this step."""
        return self._spans[phase]

    def paused(self) -> AbstractContextManager[None, None]:
        """Leave the time inside out of the step."""
        return self._pause

    def end_step(self, samples: int) -> None:
        """Close the step and begin the next."""
        now = time.perf_counter()
        phases = [span.seconds for span in self._spans.values()]
        self._meter.add_step(samples, now - self._step_begun - self._pause.seconds, phases)
        for span in self._spans.values():
            span.seconds = 0.0
        self._pause.seconds = 0.0
        self._step_begun = now

    def _settle(self) -> None:
        """Nothing is outstanding on the host."""


class TimingEvent(Protocol):
    """What is used of ``torch.cuda.Event`` and its like."""

    def record(self) -> None:
        """Note the moment the stream comes to this point."""

    def synchronize(self) -> None:
        """Wait until the stream has come to this point."""

    def elapsed_time(self, end_event: Any) -> float:
        """Return the milliseconds to a later event."""


def event_type(device_type: str) -> type:
    """The class of a device's events.

    Raises:
        KeyError: If the device has none that could measure time.
    """
    import torch

    return {"cuda": torch.cuda.Event, "xpu": torch.xpu.Event, "mps": torch.mps.event.Event}[device_type]


@dataclass
class _OpenStep:
    """A step in events, not yet read."""

    begun: TimingEvent
    spans: list[tuple[int, TimingEvent, TimingEvent]]  # (index of the phase, or _PAUSE; begin; end)
    ended: TimingEvent | None = None
    samples: int = 0


_PAUSE = -1


class _EventSpan:
    """Records an event where it begins and where it ends."""

    __slots__ = ("_begun", "_clock", "_index")

    def __init__(self, clock: EventStepClock, index: int) -> None:
        self._clock = clock
        self._index = index
        self._begun: TimingEvent | None = None

    def __enter__(self) -> None:
        self._begun = self._clock.record_event()

    def __exit__(self, kind: ErrorType, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._begun is not None
        self._clock.close_span(self._index, self._begun, self._clock.record_event())


@final
class EventStepClock(StepClock):
    """Records events into the current stream and reads them when asked.

    Args:
        make_event: Makes an event with timing enabled.
        warmup_steps: Steps of this process left out of every rate.
    """

    def __init__(self, make_event: Callable[[], TimingEvent], *, warmup_steps: int = WARMUP_STEPS) -> None:
        super().__init__(warmup_steps=warmup_steps)
        self._make_event = make_event
        self._spans = {phase: _EventSpan(self, index) for index, phase in enumerate(PHASES)}
        self._pause = _EventSpan(self, _PAUSE)
        self._free: list[TimingEvent] = []
        self._closed: list[_OpenStep] = []
        self._open: _OpenStep | None = None

    def start(self) -> None:
        """Begin the first step here."""
        self._open = _OpenStep(self.record_event(), [])

    def span(self, phase: str) -> AbstractContextManager[None, None]:
        """Count the stream's time inside as a phase of this step."""
        return self._spans[phase]

    def paused(self) -> AbstractContextManager[None, None]:
        """Leave the stream's time inside out of the step."""
        return self._pause

    def end_step(self, samples: int) -> None:
        """Close the step and begin the next."""
        ended = self.record_event()
        if self._open is not None:
            self._open.ended = ended
            self._open.samples = samples
            self._closed.append(self._open)
        self._open = _OpenStep(ended, [])

    def record_event(self) -> TimingEvent:
        """Record an event, one already read if there is one: making them is what costs."""
        event = self._free.pop() if self._free else self._make_event()
        event.record()
        return event

    def close_span(self, index: int, begun: TimingEvent, ended: TimingEvent) -> None:
        """Note a span of the step under way."""
        if self._open is not None:
            self._open.spans.append((index, begun, ended))

    def _settle(self) -> None:
        """Read the events of all closed steps."""
        if not self._closed:
            return
        last = self._closed[-1].ended
        assert last is not None
        last.synchronize()  # the one wait for the device, where a log record or a checkpoint is due
        for step in self._closed:
            self._read(step)
        self._closed.clear()

    def _read(self, step: _OpenStep) -> None:
        """Bring one step into the meter and give its events back."""
        assert step.ended is not None
        phases = [0.0] * len(PHASES)
        seconds = step.begun.elapsed_time(step.ended) / 1e3
        for index, begun, ended in step.spans:
            span_seconds = begun.elapsed_time(ended) / 1e3
            if index == _PAUSE:
                seconds -= span_seconds
            else:
                phases[index] += span_seconds
            self._free += (begun, ended)
        self._free.append(step.begun)  # step.ended begins the next step
        self._meter.add_step(step.samples, seconds, phases)
