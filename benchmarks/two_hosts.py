"""When a host dies or cannot be reached, how soon does the other go on, and both once it is back?

The two hosts, and a third for torchrun's store, are network namespaces of this machine
(``tests/distributed/hosts.py``), with one file system in common; torchrun, gloo, the sockets and the signals are real.
On each of the two runs one process of a recipe whose network is small, with a checkpoint every 20 steps,
``parallel.timeout=20 seconds`` and torchrun's shortest waits. Told are seconds from what was done to a host until the
first step after it, by the run's own records, or until processes have ended. It takes Linux and root.

    python benchmarks/two_hosts.py [--rounds 3] [--only NAME ...] [--outage 200] [--dry-run]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hardware import facts, spread, write_result
from resume import LIMIT, Launch, events_of

_PATH = Path(__file__).parents[1] / "tests" / "distributed" / "hosts.py"
_module = importlib.util.spec_from_file_location("paceline_hosts", _PATH)
assert _module is not None
assert _module.loader is not None
hosts = importlib.util.module_from_spec(_module)
sys.modules[_module.name] = hosts
_module.loader.exec_module(hosts)

PORT = 29500
RECIPE: dict[str, Any] = {
    "model": {"name": "small_resnet"},
    "data": {"dataset": "synthetic", "image_size": 32},
    "batch": {"global_size": 64},
    "optimizer": {"lr": 0.01},
    "train": {"duration": "100000 steps", "precision": "fp32"},
    "evaluate": {"every": "off"},
    "checkpoint": {"every": "20 steps"},
    "parallel": {"device": "cpu", "threads": 1, "timeout": "20 seconds"},
    "telemetry": {"log_every": "1 steps", "trackers": []},
}
# Who is gone is missed after three seconds; six is the least that a host which starts anew can keep to.
_WAITS = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=6"
_KEEPER = f"""
import time
from torch.distributed import TCPStore
store = TCPStore("store", {PORT}, is_master=True, wait_for_workers=False)
time.sleep(86400)
"""


class TwoHosts:
    """A run that is trained by two hosts.

    Args:
        store: The host that keeps torchrun's store.
        nodes: How many hosts torchrun asks for, as it wants them written.
    """

    def __init__(self, folder: Path, network: Any, *, store: str, nodes: str) -> None:
        self.folder, self.network, self.run = folder, network, folder / "run"
        self._options = (
            f"--nnodes={nodes}",
            "--nproc-per-node=1",
            "--max-restarts=20",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={store}:{PORT}",
            f"--rdzv-conf={_WAITS}",
        )
        self._keeper: subprocess.Popen[bytes] | None = None
        self.launched: dict[str, Launch] = {}
        (folder / "recipe.yaml").write_text(json.dumps(RECIPE))
        self._store = network.hosts[store] if store == "store" else None

    def __enter__(self) -> TwoHosts:
        """Start both, and wait until they have trained and saved."""
        try:
            if (store := self._store) is not None:
                self._keeper = subprocess.Popen([*store.before, sys.executable, "-c", _KEEPER])
                _until(lambda: hosts.answers(store, PORT))
            self.start("host1")
            self.start("host2")
            self.seconds_to(2, after=0.0)
            _until(lambda: any((self.run / "checkpoints").glob("step-*")))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End all."""
        for each in self.launched.values():
            each.end()
        if self._keeper is not None:
            self._keeper.kill()
            self._keeper.wait()

    def start(self, name: str) -> float:
        """Give the command on a host; when that was."""
        started = time.time()
        self.launched[name] = Launch(
            self.folder,
            self.run,
            torchrun=self._options,
            before=self.network.hosts[name].before,
            variables={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"},
        )
        return started

    def kill(self, name: str) -> float:
        """Let a host lose its power; when that was."""
        started = time.time()
        self.launched[name].end()
        return started

    def cut(self, name: str) -> float:
        """Take a host off the network; when that was."""
        started = time.time()
        self.network.cut(self.network.hosts[name])
        return started

    def join(self, name: str) -> float:
        """Bring it back; when that was."""
        started = time.time()
        self.network.join(self.network.hosts[name])
        return started

    def seconds_to(self, size: int, *, after: float) -> float:
        """Wait for the first step that so many processes made in a world that began after a moment."""
        found: list[float] = []

        def has_trained() -> bool:
            found[:] = _first_steps(events_of(self.run), size, after)
            return bool(found)

        _until(has_trained)
        return found[0] - after

    def seconds_to_no_process(self, *, after: float) -> float:
        """Wait until no host has a process that trains."""
        _until(lambda: not any("RANK" in each for one in self.launched.values() for each in one.family().values()))
        return time.time() - after

    def seconds_to_end(self, name: str, *, after: float) -> float:
        """Wait until torchrun has ended on a host."""
        self.launched[name].wait()
        return time.time() - after


def _first_steps(events: Sequence[Mapping[str, Any]], size: int, after: float) -> list[float]:
    """When the first step was made after each start of so many processes since a moment."""
    found, is_wanted = [], False
    for event in events:
        if event["event"] == "start":
            is_wanted = event["world_size"] == size and event["time"] >= after
        elif event["event"] == "step" and is_wanted:
            found.append(event["time"])
            is_wanted = False
    return found


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{LIMIT:.0f} s went by before what was waited for")
        time.sleep(0.05)


def _dies(run: TwoHosts, lost: str) -> dict[str, float]:
    gone = run.kill(lost)
    found = {"other_alone": run.seconds_to(1, after=gone)}
    return found | {"both_again": run.seconds_to(2, after=run.start(lost))}


def _is_cut_off(run: TwoHosts, lost: str) -> dict[str, float]:
    gone = run.cut(lost)
    found = {"other_alone": run.seconds_to(1, after=gone)}
    return found | {"both_again": run.seconds_to(2, after=run.join(lost))}


def _dies_and_is_waited_for(run: TwoHosts, lost: str) -> dict[str, float]:
    run.seconds_to_no_process(after=run.kill(lost))
    return {"both_again": run.seconds_to(2, after=run.start(lost))}


def _is_cut_off_and_waited_for(run: TwoHosts, lost: str) -> dict[str, float]:
    found = {"no_process_trains": run.seconds_to_no_process(after=run.cut(lost))}
    return found | {"both_again": run.seconds_to(2, after=run.join(lost))}


def _dies_with_the_store(run: TwoHosts, lost: str) -> dict[str, float]:
    return {"other_has_ended": run.seconds_to_end("host2" if lost == "host1" else "host1", after=run.kill(lost))}


Case = tuple[str, str, str, Callable[[TwoHosts, str], dict[str, float]]]
# By name: who keeps the store, how many hosts are asked for, who is lost, and how.
CASES: dict[str, Case] = {
    "dies": ("host1", "1:2", "host2", _dies),
    "dies, both asked for": ("host1", "2", "host2", _dies_and_is_waited_for),
    "cut off": ("host1", "1:2", "host2", _is_cut_off),
    "cut off, both asked for": ("host1", "2", "host2", _is_cut_off_and_waited_for),
    "host of the store dies": ("host1", "1:2", "host1", _dies_with_the_store),
    "first host dies, store elsewhere": ("store", "1:2", "host1", _dies),
    "first host cut off, store elsewhere": ("store", "1:2", "host1", _is_cut_off),
}


@contextmanager
def _made(store: str, nodes: str) -> Iterator[TwoHosts]:
    with (
        tempfile.TemporaryDirectory(prefix="two-hosts-") as folder,
        hosts.network("host1", "host2", "store") as network,
        TwoHosts(Path(folder), network, store=store, nodes=nodes) as run,
    ):
        yield run


def outage(seconds: float) -> dict[str, Any]:
    """Whether torchrun of a host that is cut off is still there after so long."""
    with _made("host1", "1:2") as run:
        run.cut("host2")
        time.sleep(seconds)
        return {"seconds": seconds, "is_still_there": run.launched["host2"].process.poll() is None}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the result files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=list(CASES), metavar="NAME", help=", ".join(CASES))
    parser.add_argument("--outage", type=float, default=200.0, help="seconds of the one long cut; 0 for none")
    parser.add_argument("--dry-run", action="store_true", help="print, write no result files")
    options = parser.parse_args(arguments)
    if (reason := hosts.why_not()) is not None:
        sys.exit(f"no hosts can be made here: {reason}")
    known = facts()
    found: dict[str, list[dict[str, float]]] = {name: [] for name in options.only or CASES}
    for number in range(1, options.rounds + 1):
        for name, rounds in found.items():
            store, nodes, lost, lose = CASES[name]
            with _made(store, nodes) as run:
                rounds.append(lose(run, lost))
            print(number, name, {key: round(value, 1) for key, value in rounds[-1].items()}, flush=True)
    cases = {name: {key: spread([each[key] for each in rounds]) for key in rounds[0]} for name, rounds in found.items()}
    lines = [
        f"{name}: {key.replace('_', ' ')} after {each['median']:.1f} s ({each['minimum']:.1f} to "
        f"{each['maximum']:.1f}, n = {each['runs']})."
        for name, case in cases.items()
        for key, each in case.items()
    ]
    result: dict[str, Any] = {"cases": cases, "recipe": RECIPE}
    if options.outage:
        result["outage"] = outage(options.outage)
        is_there = "still there" if result["outage"]["is_still_there"] else "gone"
        lines.append(f"torchrun of a host without a link was {is_there} after {options.outage:g} s.")
    print("\n".join(lines))
    if not options.dry_run:
        print(write_result("two-hosts", result, lines, known))


if __name__ == "__main__":
    main()
