"""What a process waits for the others is told apart from what it computes, and telling changes no bit."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import pytest

PROGRAM = """
import gc, json, os, time
import torch
from torch import nn
from paceline.distributed.collectives import Collectives, join
from paceline.distributed.data_parallel import DataParallel
from paceline.distributed.environment import read_launch
from paceline.distributed.exact import ExactDataParallel
from paceline.distributed.strategy import MicroBatch, ControlFlags
from paceline.recipe.running import Parallel
from paceline.telemetry.clock import HostStepClock

CPU = torch.device("cpu")
launch = read_launch(os.environ)
collectives = join(launch, CPU)
rank, answer = launch.world.rank, {}
STEPS, SLEEP = 5, 0.2
slept = 0.0

def sleep():
    global slept
    begun = time.perf_counter()
    time.sleep(SLEEP)
    slept += time.perf_counter() - begun

class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        sleep()
        return gradient

def train(strategy, network, *, late, timed=True, parts=1):
    # Rank 1 is late in that part of each step.
    global slept
    slept, clock, arrived, ended = 0.0, HostStepClock(warmup_steps=0), [], []
    if timed:
        strategy.timed_by(clock)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    is_exact = isinstance(strategy, ExactDataParallel)
    # Of the gradients that a process computes, the first layer's comes last.
    last = []
    hook = network[0].weight.register_post_accumulate_grad_hook(lambda _: last.append(time.monotonic()))
    for step in range(-1, STEPS):
        if step == 0:
            slept = 0.0
            torch.distributed.barrier()
            clock.start()
        for part in range(parts):
            is_last = part == parts - 1
            place = MicroBatch(2 * part + rank, 8 * parts, 4, is_last=is_last, logical_ranks=2 * parts)
            x = torch.linspace(0, 1 + step + part + rank, 32).reshape(4, 8)
            with strategy.micro_batch(place):
                with clock.span("forward"):
                    if late == "forward" and rank == 1:
                        sleep()
                    loss = strategy.model(x).square().mean()
                with clock.span("backward"):
                    if late == "backward" and rank == 1:
                        loss = Slow.apply(loss)
                    share = loss * strategy.loss_divisor / 2 / parts
                    strategy.with_vote(share, ControlFlags, is_last=is_last).backward()
        if not is_exact:
            arrived, ended = [*arrived, last[-1]], [*ended, time.monotonic()]
        with clock.span("optimizer"):
            if is_exact:
                arrived.append(time.monotonic())
            strategy.combine()
            if is_exact:
                ended.append(time.monotonic())
            optimizer.step()
            optimizer.zero_grad()
        clock.end_step(samples=8)
    hook.remove()
    means = clock.drain()
    return {
        "seconds": {name: means[f"{name}_seconds"] for name in ("forward", "backward", "communication", "optimizer")},
        "step": means["step_seconds"],
        "slept": slept / STEPS,
        "arrived": arrived[1:],
        "ended": ended[1:],
        "weights": [each.sum().item() for each in network.parameters()],
    }

def build(kind):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    if kind == "exact":
        return ExactDataParallel(network, network, collectives), network
    return DataParallel(network, network, collectives, CPU, parallel=Parallel()), network

answer["untimed"] = train(*build("ddp"), late="", timed=False)
answer["ddp"] = train(*build("ddp"), late="")
answer["forward"] = train(*build("ddp"), late="forward")
answer["backward"] = train(*build("ddp"), late="backward")
answer["parts"] = train(*build("ddp"), late="forward", parts=2)
answer["exact"] = train(*build("exact"), late="backward")
exchange = torch.distributed.all_to_all_single
def slowed(*arguments):
    sleep()
    return exchange(*arguments)
torch.distributed.all_to_all_single = slowed
answer["slow link"] = train(*build("exact"), late="")
gc.collect()
torch.distributed.destroy_process_group()
print(json.dumps(answer), flush=True)
os._exit(0)  # threads of a group that something still holds would abort the interpreter's own end
"""


@pytest.fixture(scope="module")
def results(on_two_ranks: Callable[..., list[dict[str, Any]]], tmp_path_factory: pytest.TempPathFactory) -> Any:
    return on_two_ranks(["-c", PROGRAM], tmp_path_factory.mktemp("both"))


def waited(mine: Any, others: Any) -> float:
    """Seconds per step between this process's arrival and the other's, by a clock that both share."""
    gaps = [max(0.0, late - early) for early, late in zip(mine["arrived"], others["arrived"], strict=True)]
    return statistics.fmean(gaps)


def exposed(mine: Any) -> float:
    """Seconds per step between this process's arrival and its going on."""
    return statistics.fmean(end - begin for begin, end in zip(mine["arrived"], mine["ended"], strict=True))


@pytest.mark.parametrize("case", ["forward", "backward", "parts", "exact"])
def test_waiting_for_a_late_process_is_communication(case: str, results: Any) -> None:
    first, second = (each[case] for each in results)
    planted = second["slept"]
    assert planted >= 0.2
    # On a busy machine either may be late for other reasons too; what is waited for is known from the arrivals.
    assert waited(first, second) > 0.5 * planted
    for mine, others in ((first, second), (second, first)):
        # A busy machine holds a process up between its last gradient and the clock's switch, now and then.
        assert mine["seconds"]["communication"] >= 0.8 * waited(mine, others) - 5e-3
        # Between the last gradient and its going on a process also does other things.
        assert mine["seconds"]["communication"] <= 1.05 * exposed(mine) + 5e-3
        # What is left is Python between the phases.
        assert 0.7 * mine["step"] < sum(mine["seconds"].values()) <= 1.001 * mine["step"]
    late = "backward" if case in ("backward", "exact") else "forward"
    assert second["seconds"][late] >= 0.99 * planted
    assert first["seconds"]["backward"] + first["seconds"]["optimizer"] < 0.9 * planted


def test_a_slow_link_is_communication_on_both(results: Any) -> None:
    for each in results:
        case = each["slow link"]
        assert case["seconds"]["communication"] >= case["slept"] >= 0.2
        assert case["seconds"]["communication"] <= 1.05 * exposed(case) + 5e-3


def test_telling_changes_no_bit(results: Any) -> None:
    for each in results:
        same = {case: each[case]["weights"] for case in ("untimed", "ddp", "forward", "backward")}
        assert all(weights == results[0]["untimed"]["weights"] for weights in same.values())
    assert results[0]["untimed"]["seconds"]["communication"] == 0
    assert results[0]["ddp"]["seconds"]["communication"] > 0
