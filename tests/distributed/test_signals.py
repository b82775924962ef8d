"""Any stop signal, to anyone: all ranks stop after the same step, with one whole checkpoint, and nothing stays behind.

A chain is one run that is stopped several times, each time another way, and goes on with the same command; each time,
and in the end, it must equal a run that was never stopped.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from calls import Call
from own_networks import OWN, network_that

from paceline.records.ledger import read_ledger

pytestmark = pytest.mark.world_size(2)

TRAIN = ("train", "recipe.yaml", "--processes", "2", "--run-dir")


def to_launcher(launched: Any, number: int) -> None:
    launched.process.send_signal(number)


def to_its_group(launched: Any, number: int) -> None:
    os.killpg(launched.process.pid, number)


def to_last_rank(launched: Any, number: int) -> None:
    os.kill(launched.ranks()[-1], number)


def to_a_rank_and_its_workers(launched: Any, number: int) -> None:
    os.killpg(os.getpgid(launched.ranks()[-1]), number)


@pytest.fixture
def stop(start: Call, steps_recorded: Call, summary: Call, same_so_far: Call, studio: Path) -> Call:
    """Start, wait for a step, send a signal, and check everything that must be true of the stop."""

    def stopper(
        send: Callable[[Any, int], None],
        number: int,
        command: tuple[object, ...],
        run_dir: Path,
        *,
        after: int,
        code: int = 75,
        comparable: bool = True,
        **options: Any,
    ) -> int:
        launched = start(*command, where=studio, **options)
        launched.wait_for(lambda: steps_recorded(run_dir) >= after)
        send(launched, number)
        sent = time.monotonic()
        done = launched.wait(60)
        assert done.code == code, done.err
        assert time.monotonic() - sent < 20
        launched.seconds_until_alone(5)
        assert launched.leftovers() == []
        if code == 75:
            assert done.err == ""
            assert f"To resume: paceline resume {run_dir}" in done.out
        step = checked(run_dir)
        if comparable:
            assert same_so_far(run_dir) == step
        return step

    def checked(run_dir: Path) -> int:
        outcome = summary(run_dir)
        step = int(outcome["step"])
        assert outcome["status"] == "stopped"
        ends = {path.name: max(entry.step for entry in read_ledger(path)) for path in ledger_files(run_dir)}
        assert set(ends.values()) == {step}
        names = sorted(path.name for path in (run_dir / "checkpoints").iterdir() if path.is_dir())
        assert names[-1] == f"step-{step:08d}"
        assert not [name for name in names if name.startswith(".")]
        assert json.loads((run_dir / "checkpoints" / names[-1] / "manifest.json").read_text())["step"] == step
        events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
        assert [event["event"] for event in events[-2:]] == ["stop", "finish"]
        assert events[-1]["step"] == step
        return step

    return stopper


def ledger_files(run_dir: Path) -> list[Path]:
    return sorted((run_dir / "ledger").glob("rank-*.ids"))


OUR_LAUNCHER = (
    (to_launcher, signal.SIGTERM),
    (to_its_group, signal.SIGINT),
    (to_last_rank, signal.SIGUSR2),
    (to_a_rank_and_its_workers, signal.SIGUSR1),
)


@pytest.mark.real_processes
def test_stopped_again_and_again(
    studio: Path, stop: Call, start: Call, run: Call, steps_recorded: Call, same_so_far: Call, same_outcome: Call
) -> None:
    """By every signal and, last of all, by the death of the launcher."""
    run_dir = studio / "stopped"
    command = (*TRAIN, run_dir)
    reached = 0
    for send, number in OUR_LAUNCHER:
        step = stop(send, number, command, run_dir, after=reached + 1)
        assert reached < step < 60
        reached = step
    launched = start(*command, where=studio)
    launched.wait_for(lambda: steps_recorded(run_dir) > reached)
    launched.process.kill()
    launched.process.wait()
    launched.seconds_until_alone(60)
    # The launcher's own scratch directory is the one thing nobody is left to remove.
    assert [name for name in launched.leftovers() if not name.startswith("paceline-launch-")] == []
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "stopped"
    reached = same_so_far(run_dir)
    assert f"resumed from step-{reached:08d}" in run(*command, where=studio).ended(0).out
    same_outcome(run_dir)


@pytest.mark.real_processes
@pytest.mark.world_size(1)
def test_a_single_process_with_its_workers(
    studio: Path, stop: Call, run_here: Call, summary: Call, same_end: Call
) -> None:
    changes = ("train.duration=40 steps",)
    whole, run_dir = studio / "alone-whole", studio / "alone-stopped"
    assert run_here("train", "recipe.yaml", *changes, "--run-dir", whole).code == 0
    command = ("train", "recipe.yaml", *changes, "--run-dir", run_dir)
    reached = 0
    for send, number in ((to_launcher, signal.SIGTERM), (to_its_group, signal.SIGUSR2)):
        reached = stop(send, number, command, run_dir, after=reached + 3, comparable=False)
    assert run_here(*command).code == 0
    assert summary(run_dir)["resumes"] == 2
    same_end(run_dir, whole)


@pytest.mark.real_processes
def test_under_torchrun(
    studio: Path, stop: Call, start: Call, run: Call, steps_recorded: Call, same_outcome: Call
) -> None:
    """torchrun's own exit code tells a stop from a failure by no means; what lies in the run directory does.

    And it may be killed, as we may be.
    """
    run_dir = studio / "torchrun"
    command = ("train", "recipe.yaml", "--run-dir", run_dir)
    reached = stop(to_launcher, signal.SIGTERM, command, run_dir, after=3, code=1, torchrun=2)
    launched = start(*command, where=studio, torchrun=2)
    launched.wait_for(lambda: steps_recorded(run_dir) > reached)
    launched.process.kill()
    launched.process.wait()
    launched.seconds_until_alone(60)
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "stopped"
    run(*command, where=studio, torchrun=2).ended(0)
    same_outcome(run_dir)


SLOW = """
if self.passes == 5 and "SLOW" in os.environ:
    Path(f"asleep-{os.environ.get('RANK', 0)}").touch()
    until = time.monotonic() + 60
    while time.monotonic() < until:
        time.sleep(0.05)
"""


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.thorough)])
@pytest.mark.everyday
def test_a_second_signal_ends_at_once(
    studio: Path, tmp_path: Path, start: Call, run: Call, run_here: Call, processes: int
) -> None:
    (tmp_path / "slow.py").write_text(network_that(SLOW))
    changes = ("model.name=slow:Net", *OWN, "train.duration=6 steps")
    command = ["train", studio / "recipe.yaml", *changes, f"data.path={studio / 'photos'}", "checkpoint.every=1 steps"]
    command += ["--run-dir", "patient", "--processes", processes]
    launched = start(*command, variables={"SLOW": "1"})
    launched.wait_for(lambda: len(list(tmp_path.glob("asleep-*"))) == processes)
    launched.wait_for(lambda: any((tmp_path / "patient" / "checkpoints").glob("step-????????")))
    launched.process.send_signal(signal.SIGTERM)
    time.sleep(0.05)
    launched.process.send_signal(signal.SIGTERM)  # a terminal and a launcher may both deliver one request
    time.sleep(1.5)
    assert launched.process.poll() is None
    launched.process.send_signal(signal.SIGTERM)
    done = launched.wait(20)  # the model sleeps for a minute
    assert done.code not in (0, 75)
    assert "Traceback" not in done.err
    launched.seconds_until_alone(5)
    assert launched.leftovers() == []
    assert "resumed from step-" in run(*command).ended(0).out
    assert run_here("audit", tmp_path / "patient").code == 0


@pytest.mark.real_processes
@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.thorough), signal.SIGTERM])
def test_stopped_before_it_has_begun(studio: Path, start: Call, number: int) -> None:
    """Nothing is lost yet, so nothing need be saved; but nobody stays, and nobody complains at length."""
    run_dir = studio / f"too-early-{number}"
    launched = start(*TRAIN, run_dir, where=studio)
    # The command line is at work once it loads torch.
    launched.wait_for(
        lambda: [b"libtorch" in Path(f"/proc/{pid}/maps").read_bytes() for pid in launched.ranks()] == [True, True]
    )
    launched.process.send_signal(number)
    done = launched.wait(30)
    assert done.code != 0
    assert "Traceback" not in done.err
    launched.seconds_until_alone(5)
    assert launched.leftovers() == []


@pytest.mark.everyday
def test_a_signal_to_one_rank_stops_both(
    tmp_path: Path, patient: tuple[object, ...], start: Call, training_world: Call, summary: Call
) -> None:
    run_dir = tmp_path / "run"
    launched = start(*patient, "--processes", "2", "--run-dir", run_dir, where=tmp_path)
    launched.wait_for(lambda: training_world(run_dir) == 2)
    to_last_rank(launched, signal.SIGTERM)
    launched.wait(60).ended(75)
    step = summary(run_dir)["step"]
    assert [[*read_ledger(file)][-1].step for file in ledger_files(run_dir)] == [step] * 2


# It comes to the meeting, and then does nothing, as a process does that hangs.
HANGS = """
import time, torch
torch.distributed.init_process_group("gloo", init_method="file://MEETING", rank=1, world_size=2)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.thorough), signal.SIGTERM])
@pytest.mark.parametrize("peer", ["never comes", "hangs"])
def test_a_rank_that_waits_for_another_can_be_stopped(
    studio: Path, tmp_path: Path, start: Call, number: int, peer: str
) -> None:
    """Within seconds, not after parallel.timeout, which is ten minutes."""
    meeting = tmp_path / "meeting"
    variables = {"PACELINE_RENDEZVOUS": f"file://{meeting}", "RANK": "0", "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    launched = start("train", "recipe.yaml", "--run-dir", tmp_path / "run", where=studio, variables=variables)
    if peer == "hangs":
        start(program=HANGS.replace("MEETING", str(meeting)), variables={"GLOO_SOCKET_IFNAME": "lo"})
        launched.wait_for((tmp_path / "run").exists)
    launched.wait_for(meeting.exists)
    time.sleep(0.5)
    launched.process.send_signal(number)
    sent = time.monotonic()
    done = launched.wait(60)
    assert time.monotonic() - sent < 15
    assert done.code == 75
    assert len(done.err.splitlines()) == 1
    assert signal.Signals(number).name in done.err
    assert not list(tmp_path.rglob("recipe.yaml"))


INTERRUPTED = """
import signal
import paceline

signal.signal(signal.SIGINT, signal.SIG_IGN)  # what train restores at its end
try:
    paceline.train("recipe.yaml", overrides=OVERRIDES, run_dir="RUN", processes=2)
except paceline.PacelineError as error:
    print(f"refused {type(error).__name__}: {error}")
"""


@pytest.mark.thorough
def test_impatient_interrupts_from_python_end_it_with_one_sentence(studio: Path, tmp_path: Path, start: Call) -> None:
    (studio / "stuck.py").write_text(network_that("time.sleep(600)"))
    overrides = {"model.name": "stuck:Net", "model.options": None, "data.workers": 0}
    program = INTERRUPTED.replace("OVERRIDES", str(overrides)).replace("RUN", str(tmp_path / "run"))
    launched = start(program=program, where=studio)
    launched.wait_for((tmp_path / "run" / "recipe.yaml").exists)
    while launched.process.poll() is None:  # the first asks for a stop after the step, which never ends
        launched.process.send_signal(signal.SIGINT)
        time.sleep(0.2)
    done = launched.wait(60)
    assert (done.code, done.err) == (0, ""), done.err
    assert done.out.splitlines()[-1].startswith("refused StoppedError: stopped by SIGINT before the run could save;")
    assert "Traceback" not in done.out
    launched.seconds_until_alone()
    assert launched.leftovers() == []
