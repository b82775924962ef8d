"""The step clock: time of each part of a step, measured without waiting for the device.

Exactly one phase of the step is active at any time, so the phases of a step add up to it. On the host a change of phase
reads ``perf_counter`` once: a span changes it twice, which costs about half a microsecond. On an
accelerator it is an event recorded into the stream and read when a log record is due, so that nothing synchronises in
between. There ``data_wait`` is the time the stream was idle while the host waited for data, which is the true cost of
data: a host that waits while the device still works costs nothing.

There are three clocks: *training* (time in steps), *pause* (evaluation, saving; never counted here) and the *program*
(the whole process; measured by the trainer). The first steps of every process are slow for reasons that occur only
once: compilation, memory pools, cold workers. They count as training time, but not in any rate.

The peak memory of this process is read here, too.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, final

from paceline.host.system import peak_memory
from paceline.telemetry.meter import HOST, PHASES, WARMUP_STEPS, Load, LoadSums, StepSums, Totals

_PAUSE = len(PHASES)
_INDEX = {phase: index for index, phase in enumerate(PHASES)}

ErrorType = type[BaseException] | None


class Meter:
    """Adds up steps for the next log record and for the whole run.

    Args:
        warmup_steps: Steps of this process to exclude from every rate.

    Attributes:
        conditions: What the speed of a step depends on, such as the number of processes. A state restored later keeps
            its time, but its speed compares only if it was measured under the same.
    """

    def __init__(self, *, warmup_steps: int) -> None:
        self.conditions: dict[str, Any] = {}
        self._incomparable = (0, 0.0)  # steps and seconds of warm-ups, and under other conditions
        self._warmup_left = warmup_steps
        self._warmup = StepSums()  # since the last log record, like _window
        self._window = StepSums()
        self._rated = StepSums()
        self._train_seconds = 0.0
        self._steps = 0

    def add_step(self, samples: int, seconds: float, phase_seconds: Sequence[float], load: Load | None = None) -> None:
        """Add one step; ``phase_seconds`` in the order of ``PHASES``."""
        self._train_seconds += seconds
        self._steps += 1
        if self._warmup_left > 0:
            self._warmup_left -= 1
            self._incomparable = (self._incomparable[0] + 1, self._incomparable[1] + seconds)
            self._warmup.add(samples, seconds, phase_seconds, load)
        else:
            self._window.add(samples, seconds, phase_seconds, load)
            self._rated.add(samples, seconds, phase_seconds, load)

    def drain(self) -> dict[str, float | None]:
        """Return the means since the last call, and reset.

        Warm-up steps are left out unless there were no others; then the times per step are those of the warm-up, and
        the rates are None. Without any step all values are None.
        """
        window = self._window
        timings = (window if window.steps else self._warmup).means()
        timings["data_wait_fraction"] = window.data_wait_fraction
        timings["throughput_samples_per_second"] = window.throughput
        # Only if samples have tokens: other records are unchanged.
        if figures := (window if window.steps else self._warmup).load.figures():
            timings |= {"throughput_tokens_per_second": window.token_throughput, **figures}
        self._window, self._warmup = StepSums(), StepSums()
        return timings

    @property
    def totals(self) -> Totals:
        """Return totals of the whole run."""
        rated = self._rated
        return Totals(
            *(self._train_seconds, self._steps, rated.throughput, rated.data_wait_fraction, rated.phase_fractions),
            throughput_tokens_per_second=rated.token_throughput,
            comparable_steps=self._steps - self._incomparable[0],
            comparable_seconds=self._train_seconds - self._incomparable[1],
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a restart: the run's sums, not the current log record."""
        return {
            "train_seconds": self._train_seconds,
            "steps": self._steps,
            "conditions": self.conditions,
            "incomparable": self._incomparable,
            "rated_steps": self._rated.steps,
            "rated_samples": self._rated.samples,
            "rated_seconds": self._rated.seconds,
            "rated_phase_seconds": dict(zip(PHASES, self._rated.phase_seconds, strict=True)),
            **({"rated_tokens": self._rated.load.tokens} if self._rated.load.tokens else {}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore saved sums; this process has its own warm-up."""
        phases = state["rated_phase_seconds"]
        self._train_seconds = state["train_seconds"]
        self._steps = state["steps"]
        is_comparable = state.get("conditions") == self.conditions
        self._incomparable = state["incomparable"] if is_comparable else (self._steps, self._train_seconds)
        self._rated = StepSums(
            state["rated_steps"],
            state["rated_samples"],
            state["rated_seconds"],
            [phases[name] for name in PHASES],
            LoadSums(tokens=state.get("rated_tokens", 0)),
        )


class StepClock(abc.ABC):
    """Measures steps and their phases.

    Call ``start`` right before the loop and ``end_step`` at the end of each step. The time between belongs to the step,
    except for time in ``paused``; time outside of all spans is the phase ``host``::

        with clock.span("forward"):
            ...
        clock.end_step(samples=global_batch)
    """

    def __init__(self, *, warmup_steps: int = WARMUP_STEPS) -> None:
        self._meter = Meter(warmup_steps=warmup_steps)
        self._spans = {phase: _Span(self, index) for phase, index in _INDEX.items()}
        self._pause = _Span(self, _PAUSE)

    @abc.abstractmethod
    def start(self) -> None:
        """Start the first step here: earlier time is not training."""

    def span(self, phase: str) -> AbstractContextManager[None, None]:
        """Count the time inside as a phase of this step; may be entered several times per step.

        A nested span is excluded from the enclosing one. A span may not be nested in itself or in a pause.

        Raises:
            KeyError: If the phase is not one of ``PHASES``.
        """
        return self._spans[phase]

    def switch(self, phase: str) -> None:
        """Switch to another phase from here to the end of the enclosing span.

        Raises:
            KeyError: If the phase is not one of ``PHASES``.
        """
        self.set_phase(_INDEX[phase])

    def paused(self) -> AbstractContextManager[None, None]:
        """Exclude the time inside from the step: evaluation, saving."""
        return self._pause

    @abc.abstractmethod
    def set_phase(self, index: int) -> int:
        """Switch the active phase, by its index in ``PHASES``; returns the previous one."""

    @abc.abstractmethod
    def end_step(self, samples: int, load: Load | None = None) -> None:
        """Close the step, which used this many samples over all ranks, and start the next."""

    @abc.abstractmethod
    def _flush(self) -> None:
        """Add all closed steps to the meter. On a GPU this waits for the last step: a synchronisation."""

    def drain(self) -> dict[str, float | None]:
        """Return the mean seconds per step and the rates since the last call; see :meth:`Meter.drain`.

        Call this when a log record is due: on a GPU it waits for the device.
        """
        self._flush()
        return self._meter.drain()

    @property
    def totals(self) -> Totals:
        """Return totals of the run over all its launches; waits for the device, as :meth:`drain` does."""
        self._flush()
        return self._meter.totals

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save for a restart; waits for the device, as :meth:`drain` does."""
        self._flush()
        return self._meter.state_dict()

    def measures_under(self, conditions: dict[str, Any]) -> None:
        """Set what the speed of a step depends on (:class:`Meter`); call this before a state is restored."""
        self._meter.conditions = conditions

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state."""
        self._meter.load_state_dict(state)

    def close(self) -> None:  # noqa: B027  # most clocks hold nothing
        """Stop measuring: the run has ended or failed."""


class _Span:
    """Switches to a phase inside, and back afterwards. A class, since a generator would cost five times as much."""

    __slots__ = ("_around", "_clock", "_index")

    def __init__(self, clock: StepClock, index: int) -> None:
        self._clock = clock
        self._index = index
        self._around = HOST

    def __enter__(self) -> None:
        self._around = self._clock.set_phase(self._index)

    def __exit__(self, kind: ErrorType, error: BaseException | None, trace: TracebackType | None) -> None:
        self._clock.set_phase(self._around)


def build_step_clock(device_type: str, *, warmup_steps: int = WARMUP_STEPS) -> StepClock:
    """Return the clock for a device type: host time for the CPU, events for all others."""
    if device_type == "cpu":
        return HostStepClock(warmup_steps=warmup_steps)
    import torch

    make: Any = event_type(device_type)  # has no type annotations
    stream = getattr(torch.get_device_module(device_type), "current_stream", None)
    return EventStepClock(lambda: make(enable_timing=True), stream, warmup_steps=warmup_steps)


@final
class HostStepClock(StepClock):
    """Reads the host's clock; correct if operations are done when they return."""

    def __init__(self, *, warmup_steps: int = WARMUP_STEPS) -> None:
        super().__init__(warmup_steps=warmup_steps)
        self._phase = HOST
        self._seconds = [0.0] * (_PAUSE + 1)
        self._since = time.perf_counter()

    def start(self) -> None:
        """Start the first step here."""
        self._phase = HOST
        self._seconds = [0.0] * (_PAUSE + 1)
        self._since = time.perf_counter()

    def set_phase(self, index: int) -> int:
        """Switch the active phase."""
        now, previous = time.perf_counter(), self._phase
        self._seconds[previous] += now - self._since
        self._phase, self._since = index, now
        return previous

    def end_step(self, samples: int, load: Load | None = None) -> None:
        """Close the step and start the next."""
        self.set_phase(self._phase)
        phases = self._seconds[:_PAUSE]
        self._meter.add_step(samples, sum(phases), phases, load)
        self._seconds = [0.0] * (_PAUSE + 1)

    def _flush(self) -> None:
        """Do nothing: no measurement is pending on the host."""


class TimingEvent(Protocol):
    """The methods that are used of ``torch.cuda.Event`` and similar classes."""

    def record(self, *stream: Any) -> None:
        """Record the moment at which the stream, by default the current one, reaches this point."""

    def synchronize(self) -> None:
        """Wait until the stream has reached this point."""

    def elapsed_time(self, end_event: Any) -> float:
        """Return the milliseconds to a later event."""


def event_type(device_type: str) -> type:
    """Return the class of a device's events.

    Raises:
        KeyError: If the device has no events that measure time.
    """
    import torch

    return {"cuda": torch.cuda.Event, "xpu": torch.xpu.Event, "mps": torch.mps.event.Event}[device_type]


@dataclass
class _OpenStep:
    """A step in events, not yet read."""

    marks: list[tuple[int, TimingEvent]]  # (index of the phase that starts there, the moment)
    samples: int = 0
    load: Load | None = None


@final
class EventStepClock(StepClock):
    """Records events into the current stream and reads them on request.

    It reads the host's clock too, so that records can distinguish a busy stream from one that waits for the host: if a
    phase takes the host as long as the stream, the host is the bottleneck.

    Args:
        make_event: Creates an event with timing enabled.
        current_stream: Returns the stream that the steps use. It is called once: an event that looks up the stream
            takes the host several times as long. None if events take no stream.
        warmup_steps: Steps of this process left out of every rate.
    """

    def __init__(
        self,
        make_event: Callable[[], TimingEvent],
        current_stream: Callable[[], Any] | None = None,
        *,
        warmup_steps: int = WARMUP_STEPS,
    ) -> None:
        super().__init__(warmup_steps=warmup_steps)
        self._make_event = make_event
        self._current_stream = current_stream
        self._stream: tuple[Any, ...] = ()
        self._host = HostStepClock(warmup_steps=warmup_steps)
        self._free: list[TimingEvent] = []
        self._lag: float | None = None
        self._closed: list[_OpenStep] = []
        self._open: _OpenStep | None = None

    def start(self) -> None:
        """Start the first step here."""
        self._host.start()
        self._stream = () if self._current_stream is None else (self._current_stream(),)
        self._open = _OpenStep([(HOST, self._record_event())])

    def set_phase(self, index: int) -> int:
        """Switch the active phase. The host's phase applies to the stream too, which reaches it later."""
        if self._open is not None:
            self._open.marks.append((index, self._record_event()))
        return self._host.set_phase(index)

    def end_step(self, samples: int, load: Load | None = None) -> None:
        """Close the step and start the next."""
        phase, ended = self._host.set_phase(HOST), self._record_event()
        self._host.end_step(samples)
        if self._open is not None:
            self._open.marks.append((phase, ended))
            self._open.samples, self._open.load = samples, load
            self._closed.append(self._open)
        self._open = _OpenStep([(HOST, ended)])

    def drain(self) -> dict[str, float | None]:
        """Return the values of every clock, plus the host's timings.

        ``launch_<phase>_seconds`` are the phases on the host's clock. ``device_lag_seconds`` is how far the device was
        behind the host at this moment: if that is close to zero, the device waits for the host.
        """
        timings, host = super().drain(), self._host.drain()
        lag, self._lag = self._lag, None
        launches = {f"launch_{phase}_seconds": host[f"{phase}_seconds"] for phase in PHASES}
        return timings | launches | {"device_lag_seconds": lag}

    def _record_event(self) -> TimingEvent:
        """Record an event, reusing one that was read if possible: creating them is expensive."""
        event = self._free.pop() if self._free else self._make_event()
        event.record(*self._stream)
        return event

    def _flush(self) -> None:
        """Read the events of all closed steps."""
        if not self._closed:
            return
        _, last = self._closed[-1].marks[-1]
        started = time.perf_counter()
        last.synchronize()  # the only wait for the device, when a log record or a checkpoint is due
        self._lag = time.perf_counter() - started
        for step in self._closed:
            self._read(step)
        self._closed.clear()

    def _read(self, step: _OpenStep) -> None:
        """Add one step to the meter and release its events for reuse."""
        seconds = [0.0] * (_PAUSE + 1)
        for (index, started), (_, ended) in pairwise(step.marks):
            seconds[index] += started.elapsed_time(ended) / 1e3
            self._free.append(started)  # the last one starts the next step
        self._meter.add_step(step.samples, sum(seconds[:_PAUSE]), seconds[:_PAUSE], step.load)


def peak_memory_bytes(device_type: str) -> int | None:
    """Return the peak memory of this process on the current device; reads counters without synchronising.

    On a CPU that is resident memory. None if the device's allocator does not record a peak, as for Metal.
    """
    import torch

    match device_type:
        case "cpu":
            return peak_resident_bytes()
        case "cuda":
            return torch.cuda.max_memory_allocated()
        case "xpu":
            return int(torch.xpu.max_memory_allocated())
    return None


def peak_resident_bytes() -> int:
    """Return the peak main memory of this process, without its children."""
    return peak_resident_of("self") or peak_memory()


def peak_resident_of(process: int | str) -> int:
    """Return the peak main memory of another process; 0 if it has ended or is unknown."""
    return _read_proc_status(process).get("VmHWM", 0)


def peak_private_of(process: int | str) -> int:
    """Return the same without pages of files, mostly libraries: how many are resident varies on its own."""
    status = _read_proc_status(process)
    return max(0, status.get("VmHWM", 0) - status.get("RssFile", 0))


def private_bytes() -> int:
    """Return the current main memory of this process, without pages of files; its peak if unknown."""
    status = _read_proc_status("self")
    return status["VmRSS"] - status.get("RssFile", 0) if "VmRSS" in status else peak_resident_bytes()


def resident_bytes() -> int:
    """Return the current main memory of this process; its peak if unknown."""
    return _read_proc_status("self").get("VmRSS", 0) or peak_resident_bytes()


def family_bytes(ancestor: int) -> int:
    """Return the current main memory of a process and its descendants; 0 if unknown. Shared pages count once (PSS)."""
    found, pids = 0, [ancestor]
    for pid in pids:  # which grows
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            with suppress(OSError):
                pids += map(int, children.read_text(encoding="ascii").split())
        found += proportional_bytes(pid)
    return found


def proportional_bytes(process: int) -> int:
    """Return the current main memory of a process, with its part of shared pages (PSS); 0 if unknown."""
    return _read_proc_status(process, "smaps_rollup").get("Pss", 0)


def _read_proc_status(process: int | str, file: str = "status") -> dict[str, int]:
    """Return Linux's memory values of a process, in bytes; empty if the process is gone, or on another system."""
    try:
        lines = Path(f"/proc/{process}/{file}").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return {}
    fields = [line.split() for line in lines if line.endswith(" kB")]
    return {name.removesuffix(":"): int(count) * 1024 for name, count, _ in fields}
