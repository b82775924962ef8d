"""Processes die and are started again, by torchrun or by our own launcher: the run goes on, and loses nothing.

Every run here is exact, so that whatever became of its processes it must end with the bits of an undisturbed one.
"""

from __future__ import annotations

import json
import os
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from calls import Call
from own_networks import OWN, network_that

pytestmark = pytest.mark.world_size(2)

EXACT = ("train", "recipe.yaml", "parallel.exact=true")
TWO_AND_THREE_RESTARTS = ("--standalone", "--nproc-per-node=2", "--max-restarts=3")


@pytest.fixture
def ends_undisturbed(studio: Path, run_here: Call, same_end: Call, audited: Call) -> Call:
    """Assert that an exact run came to what one process alone comes to, which is trained once."""
    whole = studio / "elastic-alone"
    if not (whole / "summary.json").exists():
        run_here(*EXACT, "--run-dir", whole).ended(0)

    def compare(run_dir: Path) -> None:
        same_end(run_dir, whole)
        audited(run_dir)

    return compare


@pytest.fixture
def kill_rank(steps_recorded: Call, records: Call) -> Call:
    """``kill_rank(launched, run_dir, 1)``: SIGKILL rank 1 once the run has gone some steps further than it had been."""
    reached: dict[Path, int] = {}
    killed: Counter[Path] = Counter()

    def kill(launched: Any, run_dir: Path, rank: int) -> None:
        # Steps recorded just before the last kill landed are not yet a run that goes on.
        launched.wait_for(lambda: not killed[run_dir] or len(records(run_dir, "resume")) >= killed[run_dir])
        launched.wait_for(lambda: steps_recorded(run_dir) >= reached.get(run_dir, 0) + 5)
        launched.wait_for(lambda: any((run_dir / "checkpoints").glob("step-*")))
        launched.wait_for(lambda: len(launched.ranks()) > rank)
        reached[run_dir] = steps_recorded(run_dir)
        os.kill(launched.ranks()[rank], signal.SIGKILL)
        killed[run_dir] += 1

    return kill


@pytest.mark.slow
def test_torchrun_starts_killed_workers_again(
    studio: Path, start: Call, kill_rank: Call, ends_undisturbed: Call, summary: Call
) -> None:
    run_dir = studio / "torchrun-killed"
    launched = start(*EXACT, "--run-dir", run_dir, where=studio, torchrun=TWO_AND_THREE_RESTARTS)
    for rank in (1, 0):
        kill_rank(launched, run_dir, rank)
    launched.wait().ended(0)
    assert summary(run_dir)["resumes"] == 2
    ends_undisturbed(run_dir)
    launched.seconds_until_alone()


@pytest.mark.parametrize(
    "option",
    [
        ("--max-restarts=1",),
        ("--nnodes=1:2", "--max-restarts=0"),
        ("--nnodes", "1:1", "--max-restarts", "0"),
    ],
)
def test_without_a_run_directory_nothing_that_may_be_started_again_begins(
    studio: Path, start: Call, option: tuple[str, ...], tmp_path: Path
) -> None:
    """Or every start would begin another run."""
    rendezvous = (
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0",
        "--local-addr=127.0.0.1",
        "--rdzv-conf=timeout=5,last_call_timeout=1",
    )
    command = ("train", studio / "recipe.yaml", f"data.path={studio / 'photos'}")
    launched = start(*command, torchrun=(*rendezvous, "--nproc-per-node=1", *option))
    done = launched.wait().ended(1)
    assert "and may start these processes again" in done.err
    assert "name a directory with --run-dir" in done.err
    assert not (tmp_path / "runs").exists()
    launched.seconds_until_alone()


def restarts_told(run_dir: Path) -> list[dict[str, Any]]:
    """What a run's events say of its restarts."""
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return [event for event in events if event.get("incident") == "restart"]


@pytest.mark.slow
def test_our_launcher_starts_a_killed_rank_again(
    studio: Path, start: Call, kill_rank: Call, ends_undisturbed: Call, summary: Call
) -> None:
    run_dir = studio / "restarted"
    launched = start(*EXACT, "--processes", 2, "--max-restarts", 3, "--run-dir", run_dir, where=studio)
    kill_rank(launched, run_dir, 1)
    done = launched.wait().ended(0)
    told = [line for line in done.err.splitlines() if "; restart " in line]
    assert [line.partition("; ")[2] for line in told] == ["restart 1 of 3, with 2 ranks"]
    assert "paceline: rank 1 was ended by SIGKILL" in done.err
    assert restarts_told(run_dir)[-1]["message"].endswith("1 time so far")
    assert summary(run_dir)["resumes"] == 1
    ends_undisturbed(run_dir)
    launched.seconds_until_alone()
    assert launched.leftovers() == []


@pytest.mark.slow
@pytest.mark.world_size(4)
@pytest.mark.real_processes
def test_fewer_ranks_go_on_and_all_are_tried_again(
    studio: Path, start: Call, kill_rank: Call, ends_undisturbed: Call
) -> None:
    run_dir = studio / "shrunk"
    # Eight logical ranks are no three processes' to share, so that two go on.
    command = (*EXACT, "--processes", "1:3", "--max-restarts", 5, "--run-dir", run_dir)
    launched = start(*command, where=studio)
    kill_rank(launched, run_dir, 1)
    kill_rank(launched, run_dir, 0)
    done = launched.wait().ended(0)
    assert "2 of 3 processes are started: more cannot share the global batch evenly" in done.out
    assert "restart 1 of 5, with 1 rank\n" in done.err
    assert "restart 2 of 5, with 2 ranks\n" in done.err
    assert restarts_told(run_dir)[-1]["message"].endswith("2 times so far")
    assert json.loads((run_dir / "plan.json").read_text())["world_size"] == 2
    ends_undisturbed(run_dir)


CRASHES = 'if self.passes >= 25 and os.environ["RANK"] == "0":\n    raise ZeroDivisionError("too many")'
# Too short for a forecast, whose passes, as many as fit into its time, would count too.
CRASHING = (
    "model.name=crashes:Net",
    *OWN,
    "checkpoint.every=50 steps",
    "evaluate.every=off",
    "train.duration=18 steps",
)


def test_a_failure_that_comes_again_is_reported(studio: Path, start: Call, tmp_path: Path) -> None:
    """A fault of the program comes again at the same step: more of the same would not help."""
    (tmp_path / "crashes.py").write_text(network_that(CRASHES))
    command = ("train", studio / "recipe.yaml", f"data.path={studio / 'photos'}", *CRASHING, "--run-dir", "crashing")
    done = start(*command, "--processes", 2, "--max-restarts", 9).wait()
    assert done.code == 1
    assert done.err.count("ZeroDivisionError: too many") >= 2, done.err
    assert done.err.count("; restart ") == 1
    assert "without progress since, and is not restarted" in done.err.splitlines()[-1]


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.thorough)])
@pytest.mark.everyday
def test_who_asks_for_an_end_is_given_one(studio: Path, start: Call, steps_recorded: Call, number: int) -> None:
    run_dir = studio / f"asked-{number}"
    launched = start(*EXACT, "--processes", 2, "--max-restarts", 3, "--run-dir", run_dir, where=studio)
    launched.wait_for(lambda: steps_recorded(run_dir) >= 3)
    launched.process.send_signal(number)
    assert "restart" not in launched.wait().ended(75).err


def test_a_mistake_is_not_tried_again(studio: Path, start: Call, tmp_path: Path) -> None:
    command = ("train", "recipe.yaml", "data.path=nowhere", "--processes", 2, "--max-restarts", 3)
    done = start(*command, "--run-dir", tmp_path / "run", where=studio).wait()
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "nowhere" in done.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--max-restarts", 1, "--processes", 2), "requires --run-dir"),
        (
            ("--max-restarts", 1, "--processes", 2, "--run-dir", "run", "--resume", "never"),
            "--resume never is for one start, and --max-restarts 1 may start the ranks again",
        ),
        (("--processes", "1:2", "--run-dir", "run"), "add --max-restarts, or give one number"),
        (("--processes", "2:1", "--max-restarts", 1, "--run-dir", "run"), "'2:1' is not a number of ranks"),
        (("--processes", "0"), "'0' is not a number of ranks"),
        pytest.param(
            ("--processes", "3:3", "--max-restarts", 1, "--run-dir", "run"),
            "run it on 1, 2, 4 processes",  # as three processes say
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_options_that_do_not_fit(studio: Path, run_here: Call, options: tuple[object, ...], said: str) -> None:
    run_here(*EXACT, *options).refused(said)
    assert not (studio / "run").exists()


# Whoever is gone is missed after three seconds; a node that waits looks every second whether a round is open.
KEEP_ALIVE = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=6"


@pytest.mark.slow
@pytest.mark.world_size(3)
def test_nodes_come_and_go(
    patient: tuple[object, ...],
    training_world: Call,
    tmp_path: Path,
    start: Call,
    run: Call,
    summary: Call,
    same_end: Call,
) -> None:
    """One, two, three of which one waits, since eight parts are not three's to share, two again, and the end."""
    whole, run_dir = tmp_path / "whole", tmp_path / "elastic"
    (tmp_path / "fast").touch()
    assert run(*patient, "--run-dir", whole).code == 0
    (tmp_path / "fast").unlink()

    # Below the ports that a socket gets which asks for any: it is bound only once torch has loaded.
    endpoint = f"127.0.0.1:{random.SystemRandom().randrange(20_000, 32_000)}"

    def node(*, is_host: bool) -> Any:
        conf = f"--rdzv-conf=is_host={int(is_host)},{KEEP_ALIVE}"
        options = ("--nnodes=1:3", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--local-addr=127.0.0.1", conf)
        options = (*options, "--nproc-per-node=1", "--max-restarts=5")
        # Or torchrun's own store is shared, whose address only the nodes of the first round are told.
        unshared = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        return start(*patient, "--run-dir", run_dir, torchrun=options, variables=unshared)

    first = node(is_host=True)
    first.wait_for(lambda: training_world(run_dir) == 1)
    second = node(is_host=False)
    first.wait_for(lambda: training_world(run_dir) == 2)
    third = node(is_host=False)
    first.wait_for(lambda: "2 of 3 processes train" in first.log() + second.log() + third.log())
    first.wait_for(lambda: training_world(run_dir) == 2)
    second.kill()
    (tmp_path / "fast").touch()
    for each in (first, third):
        each.wait().ended(0)
    same_end(run_dir, whole)
    assert summary(run_dir)["resumes"] >= 2


@pytest.mark.thorough
@pytest.mark.parametrize("is_copied", [False, True])
def test_a_run_directory_that_not_all_see_is_refused(
    studio: Path, start: Call, tmp_path: Path, is_copied: bool
) -> None:
    """Two hosts without a file system in common are two directories of one name, even if one is a copy of the other."""
    command = ("train", studio / "recipe.yaml", f"data.path={studio / 'photos'}", "parallel.timeout=20 seconds")
    hosts = []
    for rank in ("0", "1"):
        host = tmp_path / f"host-{rank}"
        host.mkdir()
        if is_copied:
            (host / "run").mkdir()
            (host / "run" / ".lock").write_text("0123456789abcdef")
        meeting = {"PACELINE_RENDEZVOUS": f"file://{tmp_path}/meeting", "RANK": rank, "WORLD_SIZE": "2"}
        variables = meeting | {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
        hosts.append(start(*command, "--run-dir", "run", where=host, variables=variables))
    for each in hosts:
        done = each.wait().ended(2)
        assert "rank 0 on " in done.err
        assert "name a --run-dir on a file system that all hosts share" in done.err
    assert not list(tmp_path.rglob("recipe.yaml"))


def test_who_does_not_come_is_not_waited_for_longer_than_asked(studio: Path, start: Call, tmp_path: Path) -> None:
    meeting = {"PACELINE_RENDEZVOUS": f"file://{tmp_path}/meeting", "RANK": "0", "WORLD_SIZE": "2"}
    command = ("train", "recipe.yaml", "parallel.timeout=2 seconds", "--run-dir", tmp_path / "run")
    done = start(*command, where=studio, variables=meeting).wait(250).ended(2)
    assert "rank 0 of 2 could not join the others" in done.err
