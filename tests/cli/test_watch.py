"""`paceline watch` beside a real run in another process: on a terminal, in a pipe, and after a kill."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fork_server
from calls import Call

SOURCES = Path(__file__).parents[2] / "src"


# A machine with other work may take a minute to start a killed run again.
PATIENT = "import sys\nfrom paceline.cli.main import main\nfrom paceline_ops.watch import screen\n"
PATIENT += "screen.GONE_SECONDS = 600.0\nsys.exit(main())"


def start(*arguments: object, cwd: Path, **options: Any) -> subprocess.Popen[Any]:
    environment = {**os.environ, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1", "TERM": "xterm", "COLUMNS": "120"}
    program = ["-c", PATIENT] if arguments[0] == "watch" else ["-m", "paceline"]
    command = [sys.executable, *program, *map(str, arguments)]
    return fork_server.Popen(command, cwd=cwd, env=environment, **options)


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[Any], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)


def read_all(terminal: int, process: subprocess.Popen[Any], until: str = "", seconds: float = 120) -> str:
    """What is written to a terminal until the process ends, or says something."""
    message, deadline = b"", time.monotonic() + seconds
    while time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.2)[0]:
            try:
                message += os.read(terminal, 65536)
            except OSError:  # the other side has closed it
                break
        elif process.poll() is not None:
            break
        if until and until.encode() in message:
            break
    return message.decode(errors="replace")


def test_lines_in_a_pipe_follow_a_run_through_a_kill_to_its_end(tmp_path: Path, tiny: tuple[str, ...]) -> None:
    requested = [*tiny, "train.duration=600 steps", "checkpoint.every=40 steps", "telemetry.log_every=10 steps"]
    requested += ["evaluate.every=100 steps", "evaluate.keep_examples=0"]
    run, events = tmp_path / "run", tmp_path / "run" / "events.jsonl"
    words = ["train", "digits", *requested, "--run-dir", "run"]
    training = start(*words, cwd=tmp_path, stdout=subprocess.DEVNULL)
    wait_for((run / "recipe.yaml").exists, training)
    watching = start("watch", "run", "--interval", "0.1", cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: events.is_file() and b'"step": 80,' in events.read_bytes(), training)
        wait_for(lambda: any((run / "checkpoints").glob("step-*")), training)
        training.send_signal(signal.SIGKILL)
        training.wait()
        training = start(*words, cwd=tmp_path, stdout=subprocess.DEVNULL)
        out, _ = watching.communicate(timeout=200)
        assert training.wait(timeout=60) == 0
    finally:
        watching.kill()
        training.kill()
    assert watching.returncode == 0
    lines = out.splitlines()
    reported = [json.loads(line) for line in events.read_text().splitlines()]
    places = [f"step {each['step']}/600 " for each in reported if each["event"] == "step"]
    assert [place for place in places if not any(place in line for line in lines)] == []
    assert any("resumed from step-" in line for line in lines)
    assert lines[-1] == "run: completed, step 600/600"


def test_a_terminal_shows_curves_and_is_left_with_ctrl_c(tmp_path: Path, tiny: tuple[str, ...]) -> None:
    requested = [*tiny, "train.duration=100000 steps", "evaluate.every=50 steps", "evaluate.keep_examples=0"]
    training = start("train", "digits", *requested, "--run-dir", "run", cwd=tmp_path, stdout=subprocess.DEVNULL)
    ours, theirs = pty.openpty()
    try:
        wait_for(lambda: b'"evaluation"' in _content(tmp_path / "run" / "events.jsonl"), training)
        watching = start(
            *("watch", "run", "--interval", "0.1"),
            cwd=tmp_path,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        message = read_all(ours, watching, until="top-1 %")
        for each in ("running", "training loss", "top-1 accuracy", "/100000", " left", "forward", "a step"):
            assert each in message, each
        assert any("\u2801" <= letter <= "\u28ff" for letter in message)
        os.killpg(watching.pid, signal.SIGINT)
        rest = read_all(ours, watching)
        assert watching.wait(timeout=120) == 0
        assert "Traceback" not in message + rest
        assert training.poll() is None  # and goes on
    finally:
        training.kill()
        training.wait()
        os.close(ours)


def _content(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def test_how_it_stands_as_one_document(paceline_here: Call, finished: Path) -> None:
    (one, other) = paceline_here("watch", finished, finished, "--json").document["runs"]
    assert one == {**other, "seconds_since_last_event": one["seconds_since_last_event"]}
    assert (one["status"], one["step"], one["total_steps"]) == ("completed", 6, 6)
    assert one["last_evaluations"].keys() == {"model", "ema"}
    assert abs(sum(one["phases"].values()) - 1) < 0.05


def test_several_runs_that_are_over_are_told_and_left(paceline_here: Call, finished: Path) -> None:
    done = paceline_here("watch", finished, finished).ended(0)
    assert done.out.count(f"{finished}: completed, step 6/6") == 2


def test_a_directory_without_a_run_is_one_sentence(paceline_here: Call, finished: Path) -> None:
    for wrong, message in ((finished / "nowhere", "there is no run"), (finished / "checkpoints", "holds no run")):
        paceline_here("watch", wrong).refused(message, f"Did you mean {finished}?")
