"""Training over a network whose rate is known, predicted and measured.

Each process is on a host of its own (``hosts.py``): a network namespace whose interface lets only so many bytes a
second out (``tc``). What is predicted comes from one process alone, the rate that was set, and what the same messages
cost the processor where nothing holds them back.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.host.machine import available_cores
from paceline.parsing.units import Duration
from paceline.recipe.load import load_recipe, to_yaml
from paceline.recipe.schema import Recipe
from paceline.recipe.training import BatchSection
from paceline_advisor.bench.interleaved import recipe_for_timing
from paceline_advisor.clusters import Cluster, Link
from paceline_advisor.formulas.parallel_step import Host, ParallelConfig, StepPrediction, predict
from paceline_advisor.scaling.network import describe
from paceline_advisor.scaling.room import Share, measure, probe
from paceline_advisor.scaling.study import fabric_of

sys.path.append(str(Path(__file__).parent))
import hosts

SOURCES = Path(__file__).parents[2] / "src"
# Of Ethernet's frames, what is left to the messages in them: 1448 of 1514 bytes.
PAYLOAD = 1448 / 1514
LATENCY_SECONDS = 1e-4
PORT = 29500
LIMIT_SECONDS = 240
WARM_STEPS = 5
# A network of 7.8 million numbers for small images: 31 MB of gradients, which take a while on a slow link.
OVERRIDES = ("model.options={width: 64, stages: 3}", "parallel.device=cpu", "parallel.threads=1", "train.ema=off")


@dataclass(frozen=True)
class Compared:
    """A step, predicted and measured."""

    processes: int
    megabits: float
    prediction: StepPrediction
    measured_seconds: float

    @property
    def error(self) -> float:
        """Of the predicted step, relative to the measured one."""
        return self.prediction.seconds / self.measured_seconds - 1


def shaping(megabits: float) -> tuple[tuple[str, ...], ...]:
    """Ways to say it to ``tc``; which of them there are depends on the kernel."""
    return (
        ("netem", "rate", f"{megabits:g}mbit", "limit", "100000"),
        ("tbf", "rate", f"{megabits:g}mbit", "burst", "128kb", "latency", "2000ms"),
    )


def shape(host: Any, megabits: float) -> str:
    """Slow down what leaves a host; returns which way was found, empty if none."""
    for words in shaping(megabits):
        command = [*host.before, "tc", "qdisc", "replace", "dev", "e0", "root", *words]
        if subprocess.run(command, capture_output=True, check=False, timeout=30).returncode == 0:
            return words[0]
    return ""


def why_not() -> str | None:
    """What keeps links from being shaped here; None if nothing does."""
    if (reason := hosts.why_not()) is not None:
        return str(reason)
    with hosts.network("one") as made:
        host = made.hosts["one"]
        return None if shape(host, 100) else "tc has no way to limit a rate here: neither netem nor tbf"


def recipe_of(batch: int) -> Recipe:
    """What is trained: digits, with a network that has something to send."""
    return replace(load_recipe("digits", OVERRIDES).recipe, batch=BatchSection(global_size=batch))


def compare(
    sizes: Sequence[int], megabits: float, folder: Path, *, batch: int = 16, steps: int = 20, rounds: int = 3
) -> list[Compared]:
    """Predict, then measure, so many processes that share a batch over links of a rate; one alone is no test of it."""
    recipe = recipe_of(batch)
    shares = {size: Share(size, batch // size, 1) for size in sizes}
    alone, _ = measure(recipe, shares, {}, dict.fromkeys(sizes, 1), rounds, lambda _: None)
    found = []
    for size in sizes:
        prediction = predicted(recipe, shares[size], alone[size], megabits)
        seconds = measured(recipe, size, megabits, folder / str(size), steps=steps)
        found.append(Compared(size, megabits, prediction, seconds))
    return found


def predicted(recipe: Recipe, share: Share, one: Any, megabits: float) -> StepPrediction:
    """By what one process takes and what the link lets through."""
    size = share.devices
    rate = megabits * 1e6 / 8 * PAYLOAD
    cluster = Cluster(
        name="shaped",
        title="namespaces",
        device=None,
        devices_per_node=1,
        within=Link(1e12, 0),
        network=Link(rate, LATENCY_SECONDS),
        cores_per_device=available_cores() / size,
        shares_cores=True,
    )
    taken = min(1.0, rate / probe(size).bytes_per_second)
    host = Host(waits=1, cores_per_device=cluster.cores_per_device, shares_cores=True, threads=1)
    way = ParallelConfig(strategy="ddp", micro_batch=share.micro_batch, taken=taken)
    return predict(describe(recipe).network, one, fabric_of(cluster, size), host, way)


def measured(recipe: Recipe, size: int, megabits: float, folder: Path, *, steps: int) -> float:
    """Median seconds of a step of so many processes, each on a host of its own."""
    folder.mkdir()
    short = recipe_for_timing(recipe)
    short = replace(
        short,
        train=replace(short.train, duration=Duration(steps, "steps")),
        telemetry=replace(short.telemetry, log_every=Duration(1, "steps"), trackers=()),
    )
    (folder / "recipe.yaml").write_text(to_yaml(short))
    names = [f"host{rank}" for rank in range(size)]
    with hosts.network(*names) as made:
        for host in made.hosts.values():
            if not shape(host, megabits):
                raise PacelineError("tc cannot limit a rate here")
        ranks = [
            _start(host, rank, size, made.hosts[names[0]].address, folder)
            for rank, host in enumerate(made.hosts.values())
        ]
        _wait(ranks, folder)
    lines = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
    seconds = [line["step_seconds"] for line in lines if line["event"] == "step"]
    return statistics.median(seconds[WARM_STEPS:])


def _start(host: Any, rank: int, size: int, master: str, folder: Path) -> subprocess.Popen[bytes]:
    world = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    meeting = {"MASTER_ADDR": master, "MASTER_PORT": PORT, "GLOO_SOCKET_IFNAME": "e0", "OMP_NUM_THREADS": 1}
    environment = os.environ | {name: str(value) for name, value in (world | meeting).items()}
    words = ["-m", "paceline", "train", str(folder / "recipe.yaml"), "--run-dir", str(folder / "run")]
    with (folder / f"rank{rank}.txt").open("wb") as said:
        return subprocess.Popen(
            [*host.before, sys.executable, *words],
            env=environment | {"PYTHONPATH": str(SOURCES)},
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
        )


def all_reduce_seconds(size: int, megabits: float, message_bytes: int, folder: Path) -> float:
    """Median seconds of a sum over so many processes, each on a host of its own."""
    folder.mkdir()
    names = [f"host{rank}" for rank in range(size)]
    words = [sys.executable, "-m", "paceline_advisor.scaling.link_probe", str(folder), str(size), str(message_bytes)]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "e0", "PYTHONPATH": str(SOURCES)}
    with hosts.network(*names) as made:
        for host in made.hosts.values():
            assert shape(host, megabits)
        ranks = [
            subprocess.Popen([*made.hosts[name].before, *words, str(rank)], env=environment)
            for rank, name in enumerate(names)
        ]
        _ended(ranks)
    return float(json.loads((folder / "answer.json").read_text())["large"])


def _ended(ranks: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    try:
        return [rank.wait(LIMIT_SECONDS) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def _wait(ranks: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
    if any(codes := _ended(ranks)):
        raise PacelineError(f"exit codes {codes}: {(folder / 'rank0.txt').read_text()[-800:]}")
