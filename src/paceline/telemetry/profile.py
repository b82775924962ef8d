"""Profile of a few steps, operator by operator.

The step clock itself takes the profile: it is wrapped in another clock that names the timed ranges. The loop is unaware
of it, and a run without a profile uses the plain clock. Profiling draws no random numbers and changes no tensors, so
the weights are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, cast, final

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]  # it is not in torch's list of exports

from paceline.parsing.units import format_bytes
from paceline.telemetry.clock import StepClock
from paceline.telemetry.meter import PHASES, Load, Totals


class Tool(Protocol):
    """Interface of a profiling tool."""

    def warm_up(self) -> None:
        """Warm up for one step."""

    def begin(self) -> None:
        """Start recording."""

    def end(self) -> None:
        """Stop recording. On a GPU this waits for the device."""

    def range(self, name: str) -> AbstractContextManager[Any, Any]:
        """Name a range of the recording."""

    def write(self, folder: Path, title: str) -> None:
        """Write the recording to a folder."""


@final
class TorchTool:
    """torch.profiler: a trace for Perfetto or Chrome, and a table.

    Args:
        device_type: Device type of the network.
        rank: Rank of this process, for file names.
        memory: Whether to record allocations.
    """

    def __init__(self, device_type: str, rank: int, *, memory: bool) -> None:
        activity = torch.profiler.ProfilerActivity
        devices = {"cuda": [activity.CUDA], "xpu": [activity.XPU]}.get(device_type, [])
        self._rank = rank
        self._memory = memory
        self._profile = torch.profiler.profile(
            activities=[activity.CPU, *devices],
            record_shapes=True,
            profile_memory=memory,
            acc_events=True,  # one cycle is recorded; otherwise torch warns that more would be lost
        )

    def warm_up(self) -> None:
        """Start tracing the device; records of this step are discarded."""
        self._profile.prepare_trace()

    def begin(self) -> None:
        """Start recording."""
        self._profile.start_trace()

    def end(self) -> None:
        """Stop recording."""
        self._profile.stop_trace()

    def range(self, name: str) -> AbstractContextManager[Any, Any]:
        """Mark a range of that name in the trace."""
        return torch.profiler.record_function(name)

    def write(self, folder: Path, title: str) -> None:
        """Write ``trace-rank0.json.gz`` and ``operators-rank0.md``."""
        folder.parent.mkdir(exist_ok=True)
        folder.mkdir(exist_ok=True)
        table = operator_table(self._profile, title, memory=self._memory)
        (folder / f"operators-rank{self._rank}.md").write_text(table, encoding="utf-8")
        # Write atomically; the file name's extension requests compression.
        hidden = folder / f".trace-rank{self._rank}.json.gz"
        self._profile.export_chrome_trace(str(hidden))
        hidden.replace(folder / f"trace-rank{self._rank}.json.gz")


@final
class NsightTool:
    """NVTX ranges, and the start and stop that ``nsys profile -c cudaProfilerApi`` waits for."""

    def warm_up(self) -> None:
        """Do nothing: nsys runs from the start."""

    def begin(self) -> None:
        """Start nsys's recording."""
        torch.cuda.synchronize()
        torch.cuda.profiler.start()  # type: ignore[no-untyped-call]  # torch

    def end(self) -> None:
        """Stop nsys's recording, once the device has finished the steps."""
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]  # torch

    def range(self, name: str) -> AbstractContextManager[Any, Any]:
        """Mark an NVTX range."""
        return torch.cuda.nvtx.range(name)

    def write(self, folder: Path, title: str) -> None:
        """Do nothing: nsys writes its own report."""


@dataclass(frozen=True, kw_only=True)
class ProfileResult:
    """The outcome of a profile.

    Attributes:
        first: The first recorded step, from 1.
        last: The last recorded step.
        problem: Why there is no profile; empty if there is one.
    """

    first: int
    last: int
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class ProfileWindow:
    """Which steps to profile, and the callbacks.

    Attributes:
        first: The first global batch, from 0.
        end: The one after the last.
        position: Returns how many global batches are used up.
        folder: Returns the folder for a profile that starts after that many.
        report: Called with the outcome, once.
    """

    first: int
    end: int
    position: Callable[[], int]
    folder: Callable[[int], Path]
    report: Callable[[ProfileResult], None]


@contextmanager
def _nested(tool_range: AbstractContextManager[Any, Any], span: AbstractContextManager[None, None]) -> Iterator[None]:
    """Nests a span of the clock in a range of the tool."""
    with tool_range, span:
        yield


@final
class ProfilingClock(StepClock):
    """A step clock that lets a tool record some of its steps; everything else is delegated to the wrapped clock.

    The step before the first is the tool's warm-up. A run that resumes inside the window profiles the rest of it,
    except for the warm-up step.
    """

    def __init__(self, clock: StepClock, tool: Tool, window: ProfileWindow) -> None:
        self._clock = clock
        self._tool = tool
        self._window = window
        self._first = window.first
        self._state: Literal["waiting", "warm", "recording", "over"] = "waiting"
        self._step = ExitStack()

    def start(self) -> None:
        """Start the first step here."""
        position = self._window.position()
        self._first = max(self._first, position + 1)
        if self._first >= self._window.end:
            self._skip(position)
        self._advance(position)
        self._clock.start()

    def span(self, phase: str) -> AbstractContextManager[None, None]:
        """Count the time inside as a phase of this step."""
        return self._in_range(phase, self._clock.span(phase))

    def switch(self, phase: str) -> None:
        """Switch to another phase; the trace has no range for it."""
        self._clock.switch(phase)

    def set_phase(self, index: int) -> int:
        """Switch the active phase."""
        return self._clock.set_phase(index)

    def paused(self) -> AbstractContextManager[None, None]:
        """Exclude the time inside from the step."""
        return self._in_range(AROUND_THE_STEP, self._clock.paused())

    def end_step(self, samples: int, load: Load | None = None) -> None:
        """Close the step and start the next; the tool's own time in between belongs to neither."""
        self._step.close()
        self._clock.end_step(samples, load)
        position = self._window.position()
        if self._state != "over" and position in (self._first - 1, self._first, self._window.end):
            with self._clock.paused():
                self._advance(position)
        if self._state == "recording":
            self._step.enter_context(self._tool.range(f"step {position + 1}"))

    def drain(self) -> dict[str, float | None]:
        """Return the wrapped clock's values."""
        return self._clock.drain()

    @property
    def totals(self) -> Totals:
        """Delegate to the clock."""
        return self._clock.totals

    def state_dict(self) -> dict[str, Any]:
        """Delegate to the clock."""
        return self._clock.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Delegate to the clock."""
        self._clock.load_state_dict(state)

    def close(self) -> None:
        """Abort a profile without writing it: the run ended before its last step."""
        if self._state in ("warm", "recording"):
            problem = "the run ended before the last of them"
            try:
                self._step.close()
                if self._state == "warm":
                    self._tool.begin()  # torch's profiler cannot end before it has begun
                self._tool.end()
            except RuntimeError as error:
                # A failed device fails here again; the error that ended the run must be reported instead.
                problem = f"{problem}, and the profiler could not be stopped ({error})"
            self._finish(problem)

    def _flush(self) -> None:
        """Delegate to the clock."""

    def _skip(self, position: int) -> None:
        """Whether the window has passed already; an earlier launch may have profiled it, or its rest."""
        if any(self._window.folder(first).exists() for first in range(self._window.first, self._window.end)):
            self._state = "over"
        else:
            self._finish(f"they are before this launch, which begins with step {position + 1}")

    def _advance(self, position: int) -> None:
        match self._state:
            case "waiting" if position == self._first - 1:
                self._tool.warm_up()
                self._state = "warm"
            case "warm" if position == self._first:
                self._tool.begin()
                self._state = "recording"
            case "recording" if position == self._window.end:
                self._tool.end()
                self._write()

    def _write(self) -> None:
        title = f"Steps {self._first + 1} to {self._window.end}"
        try:
            self._tool.write(self._window.folder(self._first), title)
        except (OSError, RuntimeError) as error:
            self._finish(f"the profile could not be written ({error})")
        else:
            self._finish(None)

    def _finish(self, problem: str | None) -> None:
        self._state = "over"
        first = self._window.first if self._first >= self._window.end else self._first
        self._window.report(ProfileResult(first=first + 1, last=self._window.end, problem=problem))

    def _in_range(self, name: str, span: AbstractContextManager[None, None]) -> AbstractContextManager[None, None]:
        if self._state != "recording":
            return span
        # Errors are not suppressed there, although the type of a generator's context allows for it.
        return cast("AbstractContextManager[None, None]", _nested(self._tool.range(name), span))


AROUND_THE_STEP = "around the step"
# They are nested in others, and not part of the sum.
_NESTED_PHASES = frozenset({"h2d", "communication"})
_OPERATORS, _SHAPES = 30, 15
_HEAD = """# {title}

Where the time went, in milliseconds over all of them. *Self* is an operator's own time, without that of the operators
it calls. Profiling makes every operator a little slower, small ones most.
"""


def operator_table(profile: torch.profiler.profile, title: str, *, memory: bool) -> str:
    """Return the profile as a Markdown page: the step's phases, the operators that took longest, and their shapes.

    Args:
        profile: A finished profile.
        title: Title of the page.
        memory: Whether it recorded allocations.
    """
    averages: list[Any] = [each for each in profile.key_averages() if each.device_type == DeviceType.CPU]
    phases = {each.key: each for each in averages if each.key in (*PHASES, AROUND_THE_STEP)}
    operators = [each for each in averages if _is_operator(each.key)]
    device = any(each.self_device_time_total for each in operators)
    by_shape: list[Any] = [
        each
        for each in profile.key_averages(group_by_input_shape=True)
        if each.device_type == DeviceType.CPU and _is_operator(each.key)
    ]
    parts = [
        _HEAD.format(title=title),
        "## Phases\n",
        _phases(phases),
        "\n## Operators\n",
        _operators(operators, _OPERATORS, device=device, memory=memory),
        "\n## Operators by input shapes\n",
        _operators(by_shape, _SHAPES, device=device, memory=memory, shapes=True),
    ]
    return "\n".join(parts) + "\n"


def _is_operator(key: str) -> bool:
    """Whether an entry is an operator, not a range of the clock or of the profiler."""
    return key not in PHASES and key != AROUND_THE_STEP and not key.startswith(("step ", "[memory]"))


def _phases(phases: dict[str, Any]) -> str:
    names = [name for name in (*PHASES, AROUND_THE_STEP) if name in phases]
    total = sum(phases[name].cpu_time_total for name in names if name not in _NESTED_PHASES) or 1
    rows = [
        (name, str(phases[name].count), _ms(phases[name].cpu_time_total), _share(phases[name].cpu_time_total, total))
        for name in names
    ]
    return _table(("phase", "times", "ms on the host", "share"), rows)


def _operators(operators: Sequence[Any], count: int, *, device: bool, memory: bool, shapes: bool = False) -> str:
    def self_time(each: Any) -> float:
        return float(each.self_device_time_total if device else each.self_cpu_time_total)

    def allocated(each: Any) -> str:
        size = each.self_device_memory_usage if device else each.self_cpu_memory_usage
        return f"{'-' * (size < 0)}{format_bytes(abs(size))}"

    total = sum(map(self_time, operators)) or 1
    columns: tuple[tuple[str, Callable[[Any], str], bool], ...] = (
        ("operator", lambda each: f"`{each.key}`", True),
        ("shapes", lambda each: _shapes(each.input_shapes), shapes),
        ("calls", lambda each: str(each.count), True),
        ("self ms, device", lambda each: _ms(each.self_device_time_total), device),
        ("self ms, host", lambda each: _ms(each.self_cpu_time_total), True),
        ("share", lambda each: _share(self_time(each), total), True),
        ("allocated", allocated, memory),
    )
    selected = [(title, text) for title, text, is_shown in columns if is_shown]
    longest = sorted(operators, key=self_time, reverse=True)[:count]
    return _table([title for title, _ in selected], [[text(each) for _, text in selected] for each in longest])


def _shapes(shapes: Iterable[Sequence[int]] | None) -> str:
    sizes = ["x".join(map(str, shape)) for shape in shapes or () if shape]
    return ", ".join(sizes) if sizes else "-"


def _ms(microseconds: float) -> str:
    return f"{microseconds / 1e3:.2f}"


def _share(part: float, total: float) -> str:
    return f"{100 * part / total:.1f} %"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *rows])
