"""What a person sees: plain lines in a file, live bars on a terminal, and a step that costs nothing."""

from __future__ import annotations

import errno
import io
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from paceline.plan.epochs import Epochs
from paceline.records.events import EvaluationEvent, IncidentEvent, ResumeEvent, StepEvent, StopEvent
from paceline.telemetry.display import Display, LiveDisplay, PlainDisplay, RunProgress, choose_display, figures


def start(display: Display) -> None:
    progress = RunProgress(100, 0, Epochs.cut(40, [(0, 1, 1)]), "images")
    display.start(progress, title="digits", lines=["a plan"])


STEP = StepEvent(
    step=20,
    epoch=1,
    samples=640,
    loss=0.51234,
    lr=0.05,
    timings={"throughput_samples_per_second": 12345.6, "data_wait_fraction": 0.031},
).to_json()
EVALUATION = EvaluationEvent(
    step=40,
    epoch=1,
    split="validation",
    weights="ema",
    samples=360,
    seconds=0.1,
    metrics={"loss": 0.3, "top1_accuracy": 97.222, "top5_accuracy": 100.0},
).to_json()


def test_an_evaluation_without_a_finite_figure_says_so() -> None:
    stream = io.StringIO()
    display = PlainDisplay(stream, interval_seconds=60)
    start(display)
    display.record(EVALUATION | {"loss": None, "top1_accuracy": None, "top5_accuracy": None})
    display.close()
    assert "epoch 1/3  held-out: no finite figure" in stream.getvalue()


def test_plain_lines_per_interval_and_per_evaluation(simulated_time: Any) -> None:
    stream = io.StringIO()
    display = PlainDisplay(stream, interval_seconds=10)
    start(display)
    for step in range(1, 21):
        display.advance(step)
        simulated_time.now += 0.4
    display.record(STEP)
    simulated_time.now += 2
    display.advance(21)
    display.advance(22)
    display.record(EVALUATION)
    display.close()
    title, plan, progress, evaluation = stream.getvalue().splitlines()
    assert (title, plan) == ("digits", "a plan")
    assert re.fullmatch(
        r"epoch 1/3  step 21/100  training loss 0\.5123  lr 0\.05  12,346 images/s  data wait 3%  \d.* left", progress
    )
    assert re.fullmatch(
        r"epoch 1/3  loss 0\.5123 \(held-out 0\.3\)  top-1 97\.22 %  12,346 images/s  \d.* left", evaluation
    )


def test_both_sets_of_weights_stand_in_one_line() -> None:
    stream = io.StringIO()
    display = PlainDisplay(stream)
    progress = RunProgress(100, 0, Epochs.cut(40, [(0, 1, 1)]), "images", headline="top5_accuracy", has_ema=True)
    display.start(progress, title="digits")
    model = EVALUATION | {"weights": "model", "step": 50, "position": 50, "top5_accuracy": 91.0}
    for _ in range(2):
        display.record(model)
        display.record(EVALUATION | {"step": 50, "position": 50})
    line = "epoch 2/3  step 50  held-out loss 0.3  top-5 91.00 % (ema 100.00 %)"
    assert stream.getvalue().splitlines()[1:] == [line] * 2


def test_no_line_is_wide(simulated_time: Any) -> None:
    stream = io.StringIO()
    display = PlainDisplay(stream, interval_seconds=10)
    start(display)
    display.record(STEP | {"throughput_tokens_per_second": 123456.7, "mfu": 0.123, "loss": 123456.7})
    display.advance(1)
    simulated_time.now += 3600
    display.advance(2)
    display.record(EVALUATION | {"step": 39, "position": 39, "loss": 12345.6})
    display.message("a sentence " * 30)
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= 100
    assert "".join(lines).count("sentence") == 30


def test_the_time_left_is_as_expected_before_steps_tell(simulated_time: Any) -> None:
    progress = RunProgress(1000, 0, Epochs.cut(40, [(0, 1, 1)]), "samples")
    assert progress.handle({"event": "measurement", "message": "expected", "seconds": 1, "expected_seconds": 90.0})
    simulated_time.now += 30
    assert progress.seconds_left == pytest.approx(60)
    progress.advance(1)
    simulated_time.now += 2
    progress.advance(2)
    assert progress.seconds_left == pytest.approx(998 * 2)


def test_a_long_preparation_is_told_now_and_then(simulated_time: Any) -> None:
    stream = io.StringIO()
    display = PlainDisplay(stream, interval_seconds=10)
    start(display)
    simulated_time.now += 9
    display.status("reading images: 256 of 60000")
    simulated_time.now += 1
    display.status("reading images: 512 of 60000")
    display.status("reading images: 768 of 60000")
    simulated_time.now += 11
    display.status("")
    assert stream.getvalue().splitlines()[2:] == ["reading images: 512 of 60000"]


def test_a_long_preparation_stands_where_the_figures_will_be() -> None:
    display = LiveDisplay(io.StringIO())
    start(display)

    def drawn() -> str:
        console = Console(file=io.StringIO(), width=200)
        with console.capture() as capture:
            console.print(display._render())
        return capture.get()

    display.record(STEP)
    display.status("reading images: 256 of 60000")
    assert "reading images: 256 of 60000" in drawn()
    display.status("")
    assert "reading images" not in drawn()
    assert "data wait 3%" in drawn()
    display.close()


def test_what_went_wrong_is_shown_and_what_goes_without_saying_is_not() -> None:
    stream = io.StringIO()
    display = PlainDisplay(stream)
    display.record(ResumeEvent(step=20, checkpoint="step-00000020", resumes=1, world_size=2).to_json())
    display.record(IncidentEvent(step=21, incident="broken_sample", message="a.png is cut short").to_json())
    display.record({"event": "checkpoint", "step": 30})
    display.record(StopEvent(step=31, reason="SIGTERM").to_json())
    assert stream.getvalue().splitlines() == [
        "resumed from step-00000020",
        "step 21  broken sample: a.png is cut short",
        "step 31  stopped: SIGTERM",
    ]


def test_a_loss_that_is_not_finite_is_said_to_be() -> None:
    progress = RunProgress(10, 0, Epochs.cut(5, [(0, 1, 1)]), "samples", {**STEP, "loss": None})
    assert progress.figures.startswith("training loss not finite  lr 0.05")


@pytest.mark.parametrize(
    ("step", "place"), [(0, (1, 0, 40)), (1, (1, 1, 40)), (40, (1, 40, 40)), (41, (2, 1, 40)), (100, (3, 20, 20))]
)
def test_place_in_the_run(step: int, place: tuple[int, int, int]) -> None:
    progress = RunProgress(100, step, Epochs.cut(40, [(0, 1, 1)]), "samples")
    assert progress.epochs == 3
    assert (progress.epoch, progress.step_in_epoch, progress.steps_in_epoch) == place


def test_time_left_is_told_from_the_steps_of_this_process(simulated_time: Any) -> None:
    progress = RunProgress(1000, 900, Epochs.cut(40, [(0, 1, 1)]), "samples")
    assert progress.time_left == ""
    simulated_time.now += 500
    progress.advance(901)
    assert progress.seconds_left is None
    simulated_time.now += 50
    progress.advance(911)
    assert progress.seconds_left == pytest.approx(89 * 5)


@pytest.mark.parametrize("name", ["silent", "plain", "live"])
def test_a_step_without_drawing_costs_little(name: str) -> None:
    displays: dict[str, Display] = {
        "silent": Display(),
        "plain": PlainDisplay(io.StringIO()),
        "live": LiveDisplay(io.StringIO()),
    }
    display = displays[name]
    start(display)
    cost = cost_of(display.advance)
    display.close()
    display.close()
    # Two to four times as much here; drawing would be a thousand times.
    assert cost < 25 * cost_of(Display().advance)


def cost_of(advance: Callable[[int], None]) -> float:
    """Seconds of the processor per call, where that is least."""
    costs = []
    for _ in range(20):
        started = time.thread_time()
        for _ in range(500):
            advance(7)
        costs.append((time.thread_time() - started) / 500)
    return min(costs)


def test_a_pipe_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(choose_display(io.StringIO()), PlainDisplay)
    leader, follower = pty.openpty()
    with os.fdopen(follower, "w") as terminal:
        monkeypatch.setenv("TERM", "xterm")
        assert isinstance(choose_display(terminal), LiveDisplay)
        monkeypatch.setenv("TERM", "dumb")
        assert isinstance(choose_display(terminal), PlainDisplay)
    os.close(leader)


class FullDisk(io.StringIO):
    def flush(self) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_display_that_cannot_be_written_is_told_of_once(capsys: pytest.CaptureFixture[str]) -> None:
    stream = FullDisk()
    display = choose_display(stream)
    start(display)
    for step in range(3):
        display.advance(step)
    display.record(EVALUATION)
    display.status("reading")
    display.message("more")
    display.close()
    assert capsys.readouterr().err == (
        "paceline: progress is no longer shown (No space left on device); the run continues.\n"
    )
    assert stream.getvalue() == "digits\n"
    open_stream = io.StringIO()
    display = choose_display(open_stream)
    open_stream.close()
    # A logger in place of standard output may have no more than these.
    simple: Any = SimpleNamespace(write=print, flush=print, isatty=lambda: False)
    for each in (display, choose_display(open_stream), choose_display(simple)):
        each.message("more")
    assert capsys.readouterr().err.count("is no longer shown (I/O operation on closed file)") == 1


@pytest.mark.parametrize(("encoding", "shown"), [("utf-8", "é \\udce9"), ("ascii", "\\xe9 \\udce9")])
@pytest.mark.parametrize("kind", [PlainDisplay, LiveDisplay])
def test_what_an_encoding_lacks_is_shown_as_an_escape(kind: type[Any], encoding: str, shown: str) -> None:
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, encoding=encoding)
    kind(stream).message("é \udce9")
    stream.flush()
    assert written.getvalue().decode(encoding) == f"{shown}\n"


LIVE = """
import sys, time
from paceline.plan.epochs import Epochs
from paceline.telemetry.display import choose_display
from paceline.telemetry.display import RunProgress
display = choose_display(sys.stdout)
progress = RunProgress(30, 10, Epochs.cut(10, [(0, 1, 1)]), "samples")
display.start(progress, title="digits", lines=["a plan [of two]"])
for step in range(11, 31):
    time.sleep(0.02)
    display.record({"event": "step", "step": step, "loss": 1 / step, "lr": 0.05, "data_wait_fraction": 0.5})
    display.advance(step)
    if step % 10 == 0:
        event = {"event": "evaluation", "step": step, "split": "test", "weights": "model", "loss": 0.25}
        display.record(event)
display.close()
"""


def test_a_terminal_that_is_lost_under_live_bars_is_told_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Terminal(io.StringIO):
        is_gone = False

        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> int:
            if self.is_gone:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().write(text)

    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    display = choose_display(terminal)
    start(display)
    terminal.is_gone = True
    for text in ("unseen", "unseen too"):
        display.message(text)
    display.close()
    assert capsys.readouterr().err.count("progress is no longer shown (Input/output error)") == 1


def test_live_bars_on_a_real_terminal() -> None:
    leader, follower = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"}
    started = time.monotonic()
    with subprocess.Popen([sys.executable, "-c", LIVE], stdout=follower, stderr=follower, env=environment) as process:
        os.close(follower)
        output = b""
        while chunk := _read(leader):
            output += chunk
        assert process.wait(timeout=60) == 0
    seconds = time.monotonic() - started
    os.close(leader)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.decode())
    assert "digits\r\n" in text
    assert "a plan [of two]" in text
    assert text.count("epoch 2/3  loss 0.05 (test 0.25)") == 1
    assert text.count("epoch 3/3  loss 0.03333 (test 0.25)") == 1
    last = text[text.rindex("epoch 3/3") :]
    assert "10/10" in last
    assert "30/30" in last
    assert "training loss 0.03333  lr 0.05  data wait 50%" in last
    # Drawn at most four times a second, and at each evaluation: not at every step.
    assert text.count("epoch") < max(12, 4 * seconds + 6)


def _read(leader: int) -> bytes:
    try:
        return os.read(leader, 65536)
    except OSError:  # how Linux says that the other side has closed
        return b""


def test_a_loop_of_your_own_may_log_no_loss() -> None:
    logged = {"loss": None, "lr": 0.1, "logged": ["loss_d", "loss_g"], "loss_d": 1.25, "loss_g": None}
    assert figures(logged, "samples") == "loss_d 1.25  lr 0.1"
    assert figures({"loss": None, "lr": 0.1}, "samples") == "training loss not finite  lr 0.1"
