"""What is slow in a run is found again in its records: each planted sleep in its own phase, and no time is lost."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline.recipe.load import load_recipe
from paceline.records.reader import read_events
from paceline.report.attribution import Attribution, attribute_run
from paceline.telemetry.display import SilentDisplay
from paceline.telemetry.meter import PHASES, WARMUP_STEPS
from paceline.trainer.train import Options, train_recipe

STEPS = 10
SLEEPS = {
    "data_wait": 0.024,
    "h2d": 0.016,
    "forward": 0.028,
    "backward": 0.032,
    "optimizer": 0.02,
    "ema": 0.018,
    "logging": 0.022,
    "host": 0.026,
}
PLANTED = {
    "data.backend": "pytorch",
    "data.workers": 0,
    "train.ema": 0.9,
    "train.duration": f"{STEPS} steps",
    "telemetry.log_every": "1 steps",
    "evaluate.every": "off",
    "checkpoint.every": "off",
    "checkpoint.keep_best": False,
}


class Sleeper(SilentDisplay):
    """Sleeps where it is told to, and knows for how long: a busy machine wakes late, which is no error of the clock.

    As the run's display it also knows which step it is, and when each has ended by a clock of its own.
    """

    def __init__(self, *phases: str, times: float = 1.0) -> None:
        self.phases = phases
        self.times = times
        self.step = 1
        self.slept: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        self.ended: list[float] = []

    def sleep(self, phase: str, share: float = 1.0) -> None:
        if phase in self.phases and self.step > WARMUP_STEPS:
            begun = time.perf_counter()
            time.sleep(SLEEPS[phase] * share * self.times)
            self.slept[phase][self.step] += time.perf_counter() - begun

    def advance(self, step: int) -> None:
        self.ended.append(time.perf_counter())
        self.step = step
        self.sleep("host")

    def record(self, event: Any) -> None:
        if event["event"] == "step":
            self.sleep("logging")
            self.step += 1


class Slow(torch.autograd.Function):
    """Sleeps in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sleeper: Sleeper) -> torch.Tensor:
        ctx.sleeper = sleeper
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.sleeper.sleep("backward")
        return gradients[0], None


class Network(nn.Module):
    sleeper: Sleeper

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return self.body(x)
        type(self).sleeper.sleep("forward")
        return Slow.apply(self.body(x), type(self).sleeper)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        if not self.training:  # the average, each time it is moved, twice
            type(self).sleeper.sleep("ema", 0.5)
        return super().named_buffers(*args, **kwargs)


class SlowSource:
    """A source that takes its time over the first image of a batch."""

    def __init__(self, source: Any, sleeper: Sleeper) -> None:
        self._source, self._sleeper = source, sleeper
        self.labels = source.labels

    def __len__(self) -> int:
        return len(self._source)

    def read(self, sample: int) -> Any:
        if self._sleeper.step not in self._sleeper.slept["data_wait"]:
            self._sleeper.sleep("data_wait")
        return self._source.read(sample)

    def path(self, sample: int) -> str:
        return self._source.path(sample)


def train(sleeper: Sleeper, runs: Path, tiny_recipe: Path, tiny_task: Callable[..., Any]) -> Path:
    """Train with every planted place in it; those that the sleeper is not told of do nothing."""
    Network.sleeper = sleeper

    def make(recipe: Any) -> Any:
        task = tiny_task(make_network=Network, train_images=160)(recipe)
        task.dataset = replace(task.dataset, train=SlowSource(task.dataset.train, sleeper))
        opened = task.open_pipeline

        def open_pipeline(placement: Any) -> Any:
            pipeline = opened(placement)
            normalize = pipeline._normalize

            def slowly(images: torch.Tensor) -> torch.Tensor:
                sleeper.sleep("h2d")
                return normalize(images)

            pipeline._normalize = slowly
            return pipeline

        task.open_pipeline = open_pipeline
        return task

    hook = register_optimizer_step_pre_hook(lambda *_: sleeper.sleep("optimizer"))
    threads = torch.get_num_threads()
    try:
        run = train_recipe(load_recipe(tiny_recipe, PLANTED), Options(run_dir=runs / "run", display=sleeper, task=make))
    finally:
        hook.remove()
        torch.set_num_threads(threads)
    return run.run_dir


@pytest.fixture(scope="module")
def slow(
    tmp_path_factory: pytest.TempPathFactory, tiny_recipe: Path, tiny_task: Callable[..., Any]
) -> tuple[Sleeper, Attribution]:
    """A run that sleeps everywhere."""
    sleeper = Sleeper(*SLEEPS)
    return sleeper, attribute_run(train(sleeper, tmp_path_factory.mktemp("runs"), tiny_recipe, tiny_task))


@pytest.mark.parametrize("phase", SLEEPS)
def test_a_planted_sleep_is_found_in_its_phase(phase: str, slow: tuple[Sleeper, Attribution]) -> None:
    sleeper, found = slow
    records = {each["step"]: each for each in read_events(found.run_dir / "events.jsonl", kinds=("step",))}
    late = phase in ("logging", "host")  # what happens after a step delays the next one
    pairs = [
        (records[step + late][f"{phase}_seconds"], sleeper.slept[phase][step])
        for step in range(WARMUP_STEPS + 1, STEPS + 1 - late)
    ]
    assert all(measured >= slept >= SLEEPS[phase] for measured, slept in pairs)
    # What the tiny network does there by itself comes on top, a fraction of a millisecond. A busy machine holds steps
    # up in the midst of it, perhaps most, but not every one; another phase's sleep would be in all.
    beyond = min(measured - slept for measured, slept in pairs)
    assert beyond < 0.05 * SLEEPS[phase] + 5e-4


def test_the_phases_add_up_to_the_time_that_another_clock_has_measured(slow: tuple[Sleeper, Attribution]) -> None:
    sleeper, found = slow
    assert found.steps == found.records == STEPS - WARMUP_STEPS
    assert sum(each.seconds for each in found.phases) == pytest.approx(found.step_seconds, rel=1e-6)
    # Of each step, what its record says over what the other clock does. The two are read one after the other: a busy
    # machine may come between them, and does not in most steps.
    events = [each["step_seconds"] for each in read_events(found.run_dir / "events.jsonl", kinds=("step",))]
    walls = [later - earlier for earlier, later in pairwise(sleeper.ended)]
    ratios = [told / wall for told, wall in zip(events[1:], walls, strict=True)][WARMUP_STEPS:]
    assert statistics.median(ratios) == pytest.approx(1, abs=0.02)
    assert found.step_seconds == pytest.approx(statistics.fmean(events[WARMUP_STEPS:]), rel=1e-6)
    assert [each.name for each in found.phases] == list(PHASES)
    assert found.rest_seconds == 0


def test_a_step_that_is_slow_everywhere_is_bound_by_nothing_but_its_largest_part(
    slow: tuple[Sleeper, Attribution],
) -> None:
    _, found = slow
    assert found.bottleneck is not None
    assert found.bottleneck.startswith(("host: ", "data: ", "logging: "))


@pytest.mark.parametrize(
    ("phase", "said"),
    [("data_wait", "data: "), ("h2d", "data: "), ("optimizer", "optimizer: "), ("ema", "moving average: "),
     ("logging", "logging: "), ("host", "host: "), ("forward", "computing: "), ("backward", "computing: ")],
)  # fmt: skip
@pytest.mark.thorough
def test_what_is_slow_is_named(
    phase: str, said: str, runs: Path, tiny_recipe: Path, tiny_task: Callable[..., Any]
) -> None:
    # So long that what a busy machine adds to the other phases is no share worth naming.
    found = attribute_run(train(Sleeper(phase, times=6.0), runs, tiny_recipe, tiny_task))
    assert found.bottleneck is not None
    assert found.bottleneck.startswith(said)


def test_the_summary_has_the_shares(train_tiny: Callable[..., Any]) -> None:
    summary = train_tiny("run", {"evaluate.every": "off"}).summary
    assert set(summary.phase_fractions) == set(PHASES)
    assert sum(summary.phase_fractions.values()) == pytest.approx(1)
    assert summary.phase_fractions["data_wait"] == summary.data_wait_fraction
    assert summary.phase_fractions["communication"] == 0
