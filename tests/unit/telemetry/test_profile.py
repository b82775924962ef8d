"""A profile of some steps changes nothing, names what the clock times, and is where its event says."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import RecipeError
from paceline.telemetry.clock import build_step_clock
from paceline.telemetry.profile import ProfileResult, ProfileWindow, ProfilingClock

# Dropout, BatchNorm, augmentation, average: whatever an observer could disturb.
SENSITIVE = {
    "model.options.dropout": 0.3,
    "data.augment.crop": "pad",
    "data.augment.flip": 0.5,
    "train.ema": 0.9,
    "train.precision": "bf16",
    "batch.micro_size": 8,
}
NO_SAVES = {"checkpoint.every": "off", "checkpoint.keep_best": False}
PROFILED = {"telemetry.profile.steps": 3, "telemetry.profile.after": "2 steps"}


def trace_of(run_dir: Path, step: int) -> list[dict[str, Any]]:
    path = run_dir / "profile" / f"step-{step:08d}" / "trace-rank0.json.gz"
    with gzip.open(path, "rt") as file:
        return json.load(file)["traceEvents"]


def ranges(trace: list[dict[str, Any]]) -> list[str]:
    """The clock's and the profiler's ranges, in the order in which they begin."""
    found = [each for each in trace if each.get("cat") == "user_annotation"]
    return [each["name"] for each in sorted(found, key=lambda each: each["ts"])]


@pytest.mark.parametrize("memory", [False, True])
def test_profiling_changes_no_weight(memory: bool, train_tiny: Callable[..., Any]) -> None:
    alone = train_tiny("alone", SENSITIVE)
    watched = train_tiny("watched", {**SENSITIVE, **PROFILED, "telemetry.profile.memory": memory})
    assert (watched.run_dir / "profile" / "step-00000002").is_dir()
    assert watched.summary.weights_sha256 == alone.summary.weights_sha256
    assert watched.summary.ema_sha256 == alone.summary.ema_sha256


def test_the_trace_has_the_steps_asked_for_and_their_phases(train_tiny: Any, events: Any) -> None:
    run = train_tiny("run", {**PROFILED, "evaluate.every": "4 steps", **NO_SAVES})
    named = ranges(trace_of(run.run_dir, 2))
    assert [name for name in named if name.startswith("step ")] == ["step 3", "step 4", "step 5"]
    phases = [name for name in named if name in ("data_wait", "forward", "backward", "optimizer", "around the step")]
    step = ["data_wait", "forward", "backward", "optimizer"]
    assert phases == [*step, *step, "around the step", *step]
    (event,) = events(run.run_dir, "profile")
    assert (event["step"], event["first_step"], event["last_step"]) == (5, 3, 5)
    assert (event["tool"], event["folder"]) == ("torch", "profile/step-00000002")


def test_operators_lie_inside_the_phases(train_tiny: Any) -> None:
    trace = trace_of(train_tiny("run", {**PROFILED, "evaluate.every": "off"}).run_dir, 2)
    forward = [each for each in trace if each.get("name") == "forward"]
    convolutions = [each for each in trace if each.get("name") == "aten::conv2d"]
    assert len(forward) == 3
    assert convolutions
    for each in convolutions:
        assert any(phase["ts"] <= each["ts"] <= phase["ts"] + phase["dur"] for phase in forward)


def test_the_table_says_where_the_time_went(train_tiny: Any) -> None:
    run = train_tiny("run", {**PROFILED, "telemetry.profile.memory": True})
    table = (run.run_dir / "profile" / "step-00000002" / "operators-rank0.md").read_text()
    assert table.startswith("# Steps 3 to 5\n")
    _, phases, operators, shaped = re.split(r"\n## .*\n", table)
    assert re.search(r"\| forward \| 3 \| [\d.]+ \| [\d.]+ % \|", phases)
    shares = [float(each) for each in re.findall(r"([\d.]+) % \|", operators)]
    assert len(shares) == 30
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) <= 100.5
    assert "| `aten::addmm` |" in operators or "| `aten::convolution_backward` |" in operators
    assert re.search(r"\| `[\w:]+` \| \d+x\d+", shaped)
    assert "| `forward` |" not in operators
    assert "KiB" in operators


def test_a_run_that_goes_on_inside_profiles_the_rest(train_tiny: Any, events: Any) -> None:
    wide = {"telemetry.profile.steps": 5, "telemetry.profile.after": "2 steps"}
    stopped = train_tiny("run", {**wide, "train.until": "4 steps"})
    assert not (stopped.run_dir / "profile").exists()
    (incident,) = events(stopped.run_dir, "incident")
    assert incident["message"] == "steps 3 to 7 were not profiled: the run ended before the last of them."
    done = train_tiny("run", wide)
    assert [name for name in ranges(trace_of(done.run_dir, 5)) if name.startswith("step ")] == ["step 6", "step 7"]
    assert done.summary.weights_sha256 == train_tiny("whole").summary.weights_sha256


def test_a_run_that_goes_on_behind_the_steps_says_so(train_tiny: Any, events: Any) -> None:
    train_tiny("run", {"train.until": "6 steps"})
    done = train_tiny("run", PROFILED)
    assert not (done.run_dir / "profile").exists()
    messages = [each["message"] for each in events(done.run_dir, "incident")]
    assert messages == ["steps 3 to 5 were not profiled: they are before this launch, which begins with step 7."]


@pytest.mark.parametrize("stop", ["2 steps", "6 steps"])
def test_of_steps_that_an_earlier_launch_has_profiled_nothing_is_said(stop: str, train_tiny: Any, events: Any) -> None:
    """All of them, or those that were left of them."""
    for until in (stop, "7 steps"):
        train_tiny("run", {**PROFILED, "train.until": until})
    done = train_tiny("run", PROFILED)
    assert len(events(done.run_dir, "profile")) == 1
    assert all("launch" not in each["message"] for each in events(done.run_dir, "incident"))


def test_a_place_that_cannot_be_written_does_not_end_the_run(train_tiny: Any, runs: Path, events: Any) -> None:
    train_tiny("run", {"train.until": "1 steps"})
    (runs / "run" / "profile").write_text("in the way")
    (incident,) = events(train_tiny("run", PROFILED).run_dir, "incident")
    assert incident["incident"] == "profile"
    assert "could not be written" in incident["message"]


@pytest.mark.parametrize(
    ("requested", "message"),
    [
        ({"telemetry.profile.after": "0 steps"}, "no warm-up step"),
        ({"telemetry.profile.after": "6 steps"}, "steps 7 to 9, beyond the run's 8"),
        ({"telemetry.profile.tool": "nsys"}, "this run is on cpu; use telemetry.profile.tool=torch"),
        ({"telemetry.profile.steps": "off", "telemetry.profile.memory": True}, "nothing is profiled"),
    ],
)
def test_what_cannot_be_profiled_is_refused(
    requested: dict[str, Any], message: str, train_tiny: Any, runs: Path
) -> None:
    with pytest.raises(RecipeError, match=message):
        train_tiny("run", {**PROFILED, **requested})
    assert not (runs / "run").exists()


class Diary:
    """A tool that notes what it is told; what a GPU's tool would be told is the same."""

    def __init__(self, *, takes_time: Callable[[], None] = lambda: None, device_fails: bool = False) -> None:
        self.lines: list[str] = []
        self.takes_time = takes_time
        self.device_fails = device_fails

    def warm_up(self) -> None:
        self.takes_time()
        self.lines.append("warm up")

    def begin(self) -> None:
        self.takes_time()
        self.lines.append("begin")

    def end(self) -> None:
        self.takes_time()
        self.lines.append("end")
        if self.device_fails:
            raise RuntimeError("an illegal memory access was encountered")

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        self.lines.append(f"<{name}>")
        yield
        self.lines.append(f"</{name}>")

    def write(self, folder: Path, title: str) -> None:
        self.takes_time()
        self.lines.append(title)


def watched_by(tool: Diary, steps: int, done: list[ProfileResult], *, fails: bool = False) -> ProfilingClock:
    """A clock over so many steps, of which the third and the fourth are to be profiled; then the run may fail."""
    assignment = ProfileWindow(first=2, end=4, position=lambda: len(taken), folder=lambda _: Path(), report=done.append)
    clock, taken = ProfilingClock(build_step_clock("cpu"), tool, assignment), list[int]()
    clock.start()
    with closing(clock):
        for step in range(steps):
            with clock.span("forward"):
                taken.append(step)
            clock.end_step(samples=1)
        if fails:
            raise ZeroDivisionError
    return clock


def test_a_tool_is_told_of_the_window_and_of_nothing_else() -> None:
    tool, done = Diary(), list[ProfileResult]()
    clock = watched_by(tool, 6, done)
    step = ["<forward>", "</forward>"]
    assert tool.lines == [
        *("warm up", "begin"),
        *("<step 3>", *step, "</step 3>"),
        *("<step 4>", *step, "</step 4>"),
        *("end", "Steps 3 to 4"),
    ]
    assert done == [ProfileResult(first=3, last=4)]
    assert clock.totals.steps == 6


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_run_that_ends_inside_ends_the_tool(steps: int) -> None:
    tool, done = Diary(), list[ProfileResult]()
    watched_by(tool, steps, done)
    assert tool.lines.count("begin") == tool.lines.count("end") == 1
    assert tool.lines[-1] == "end"
    assert tool.lines.count("<step 3>") == tool.lines.count("</step 3>") == (steps > 1)
    assert [each.problem for each in done] == ["the run ended before the last of them"]


def test_a_device_that_fails_does_not_hide_what_it_ended_the_run_with() -> None:
    done = list[ProfileResult]()
    with pytest.raises(ZeroDivisionError):
        watched_by(Diary(device_fails=True), 3, done, fails=True)
    [message] = done
    assert message.problem is not None
    assert message.problem.endswith("(an illegal memory access was encountered)")


def test_the_time_of_the_tool_is_in_no_step(simulated_time: Any) -> None:
    tool = Diary(takes_time=lambda: simulated_time.pass_in("tool", 1.0))
    assert watched_by(tool, 6, []).totals.train_seconds == 0
    assert simulated_time.passed["tool"] == 4
