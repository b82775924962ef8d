"""Two hosts with a network between them: links are cut, hosts die and come back, and the run ends with the same bits.

The hosts are network namespaces of this machine (``hosts.py``), with one file system in common; torchrun, gloo and the
sockets between them are real. Every run is exact, so that it must end like one that a single process trains alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import hosts
import pytest
from calls import Call

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.world_size(2)]

PORT = 29500
# How long processes wait for one another: a host that cannot be reached is given up after it.
TIMEOUT_SECONDS = 20
# Who is gone is missed after three seconds; a host that waits looks every second whether a round is open.
KEEP_ALIVE = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=6"
KEEPER = f"""
import time
from torch.distributed import TCPStore
store = TCPStore("store", {PORT}, is_master=True, wait_for_workers=False)
time.sleep(86400)
"""
# Within which torchrun ends once its store is gone; its own patience with a store that does not answer is a minute.
STORE_SECONDS = 90
# For a busy machine. What the guide says of seconds was seen on an idle one.
PATIENCE_SECONDS = 200


class TwoHosts:
    """A run that two hosts train, and what becomes of it."""

    def __init__(self, network: Any, run_dir: Path, start: Call, train: tuple[object, ...]) -> None:
        self.network, self.run_dir = network, run_dir
        self._start, self._train = start, (*train, f"parallel.timeout={TIMEOUT_SECONDS} seconds", "--run-dir", run_dir)
        self._seen = 0

    def start(self, name: str, *, nodes: str = "1:2", store: str = "host1", extra: tuple[str, ...] = ()) -> Any:
        """The one command that is the same on every host."""
        meeting = ("--rdzv-backend=c10d", f"--rdzv-endpoint={store}:{PORT}", f"--rdzv-conf={KEEP_ALIVE}")
        options = (f"--nnodes={nodes}", "--nproc-per-node=1", "--max-restarts=20", *meeting)
        # Or torchrun's own store is shared, whose address only the hosts of the first round are told.
        variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        before = self.network.hosts[name].before
        return self._start(*self._train, *extra, torchrun=options, variables=variables, before=before)

    def keep_store(self) -> Any:
        """A store that outlives both hosts."""
        keeper = self._start(before=self.network.hosts["store"].before, program=KEEPER)
        keeper.wait_for(lambda: hosts.answers(self.network.hosts["store"], PORT))
        return keeper

    def wait_until_trained_by(self, size: int, launched: Any) -> None:
        """Wait until, since the last time that was asked, the run was started and went on with so many processes."""
        launched.wait_for(lambda: self._is_trained_by(size), PATIENCE_SECONDS)
        self._seen = len(self._events("start"))

    def wait_for_checkpoint(self, launched: Any) -> None:
        """Wait for a checkpoint, which a start goes on from: without one it begins anew."""
        launched.wait_for(lambda: any((self.run_dir / "checkpoints").glob("step-*")), PATIENCE_SECONDS)

    def hurry(self) -> None:
        """Let training run to its end as fast as it can."""
        (self.run_dir.parent / "fast").touch()

    def _is_trained_by(self, size: int) -> bool:
        starts = self._events("start")
        if len(starts) <= self._seen or starts[-1]["world_size"] != size:
            return False
        events = self._events("start", "step")
        return bool(events) and events[-1]["event"] == "step"

    def _events(self, *kinds: str) -> list[dict[str, Any]]:
        lines: list[bytes] = []
        with suppress(FileNotFoundError):
            lines = (self.run_dir / "events.jsonl").read_bytes().split(b"\n")[:-1]
        return [event for event in map(json.loads, lines) if event["event"] in kinds]


@pytest.fixture
def two_hosts(patient: tuple[object, ...], tmp_path: Path, start: Call) -> Iterator[TwoHosts]:
    if (reason := hosts.why_not()) is not None:
        pytest.skip(f"no hosts can be made here: {reason}")
    with hosts.network("host1", "host2", "store") as made:
        yield TwoHosts(made, tmp_path / "run", start, patient)


@pytest.fixture
def ends_like_one(
    studio: Path, patient: tuple[object, ...], tmp_path: Path, run: Call, same_end: Call, audited: Call
) -> Call:
    """Assert that a run came to what one process alone comes to, which is trained once."""
    whole = studio / "patient-alone"
    if not (whole / "summary.json").exists():
        (tmp_path / "fast").touch()
        run(*patient, "--run-dir", whole).ended(0)
        (tmp_path / "fast").unlink()

    def compare(run_dir: Path) -> None:
        same_end(run_dir, whole)
        audited(run_dir)

    return compare


def end_well(*launches: Any) -> None:
    """Wait until all of a run's hosts have ended, and see that nothing is left there."""
    for each in launches:
        each.wait(PATIENCE_SECONDS).ended(0)
        each.seconds_until_alone()


def test_two_hosts_come_to_the_bits_of_one(two_hosts: TwoHosts, ends_like_one: Call) -> None:
    """Names that the hosts find one another by are all that torchrun and gloo need."""
    two_hosts.hurry()
    end_well(two_hosts.start("host1", nodes="2"), two_hosts.start("host2", nodes="2"))
    ends_like_one(two_hosts.run_dir)


@pytest.mark.parametrize(
    ("nodes", "store", "lost"),
    [
        pytest.param("1:2", "store", "host1", id="the-first-rank-is-cut-off"),
        pytest.param("2", "host1", "host2", id="both-wait"),
    ],
)
def test_a_link_that_is_cut_costs_some_steps(
    two_hosts: TwoHosts, ends_like_one: Call, nodes: str, store: str, lost: str
) -> None:
    """No packet says that it is cut: it is noticed by waiting, on both sides."""
    if store == "store":
        two_hosts.keep_store()
    launched = {name: two_hosts.start(name, nodes=nodes, store=store) for name in ("host1", "host2")}
    kept = launched["host1" if lost == "host2" else "host2"]
    two_hosts.wait_until_trained_by(2, kept)
    two_hosts.wait_for_checkpoint(kept)
    two_hosts.network.cut(two_hosts.network.hosts[lost])
    if nodes == "2":
        # torchrun of the host that is cut off says nothing of it: it waits for the store.
        kept.wait_for(lambda: not any(each.workers() for each in launched.values()), PATIENCE_SECONDS)
    else:
        two_hosts.wait_until_trained_by(1, kept)
    two_hosts.network.join(two_hosts.network.hosts[lost])
    two_hosts.wait_until_trained_by(2, kept)
    two_hosts.hurry()
    end_well(*launched.values())
    ends_like_one(two_hosts.run_dir)


def test_a_host_that_dies_may_come_back(two_hosts: TwoHosts, ends_like_one: Call) -> None:
    first, second = two_hosts.start("host1"), two_hosts.start("host2")
    two_hosts.wait_until_trained_by(2, first)
    two_hosts.wait_for_checkpoint(first)
    second.kill()
    two_hosts.wait_until_trained_by(1, first)
    second = two_hosts.start("host2")
    two_hosts.wait_until_trained_by(2, first)
    two_hosts.hurry()
    end_well(first, second)
    ends_like_one(two_hosts.run_dir)


def test_all_end_with_the_host_of_the_store_and_the_same_commands_go_on(
    two_hosts: TwoHosts, ends_like_one: Call
) -> None:
    first, second = two_hosts.start("host1"), two_hosts.start("host2")
    two_hosts.wait_until_trained_by(2, first)
    two_hosts.wait_for_checkpoint(first)
    first.kill()
    done = second.wait(STORE_SECONDS)
    second.seconds_until_alone()
    assert done.code == 1
    assert "The connection to the C10d store has failed" in done.err
    first, second = two_hosts.start("host1"), two_hosts.start("host2")
    two_hosts.wait_until_trained_by(2, first)
    two_hosts.hurry()
    end_well(first, second)
    ends_like_one(two_hosts.run_dir)


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        pytest.param(
            ("batch.global_size=15", "batch.micro_size=auto", "parallel.logical_ranks=3"),
            "so run it on 1, 3 processes or change batch.global_size",
            id="size",
        ),
        pytest.param(("data.path=nowhere",), "nowhere", id="data"),
        pytest.param(("--run-dri", "run"), "No such option", id="option"),
    ],
)
def test_a_mistake_is_told_once_on_each_host(two_hosts: TwoHosts, mistake: tuple[str, ...], said: str) -> None:
    """torchrun alone would meet it again twenty times."""
    launched = [two_hosts.start(name, nodes="2", extra=mistake) for name in ("host1", "host2")]
    for each in launched:
        done = each.wait(PATIENCE_SECONDS)
        assert done.code == 1  # torchrun's own, whatever its processes end with
        told = [line for line in done.err.splitlines() if line.startswith("paceline: ")]
        assert len(told) == 1, done.err
        assert said in told[0]
        each.seconds_until_alone()
    assert not two_hosts.run_dir.exists()
