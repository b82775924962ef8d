"""What is slow in a run is found again in its records: each planted delay in its own phase, and no time is lost.

The step clock reads a simulated time that only planted delays advance, so a busy machine changes nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from paceline.reports.attribution import Attribution, attribute_run
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline.recipe.load import load_recipe
from paceline.records.reader import read_events
from paceline.telemetry import clock
from paceline.telemetry.display import Display
from paceline.telemetry.meter import PHASES, WARMUP_STEPS
from paceline.trainer.train import Options, train_recipe

Make = Callable[..., Any]

STEPS = 10
DELAYS = {
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


class Delays(Display):
    """Advances the simulated time in the phases it is given.

    As the run's display it also knows which step it is, and when each has ended.
    """

    def __init__(self, *phases: str) -> None:
        self.phases = phases
        self.step = 1
        self.now = 0.0
        self.planted: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        self.ended: list[float] = []

    def perf_counter(self) -> float:
        """What the step clock reads instead of ``time.perf_counter``."""
        return self.now

    def plant(self, phase: str, share: float = 1.0) -> None:
        if phase in self.phases and self.step > WARMUP_STEPS:
            self.now += DELAYS[phase] * share
            self.planted[phase][self.step] += DELAYS[phase] * share

    def advance(self, step: int) -> None:
        self.ended.append(self.now)
        self.step = step
        self.plant("host")

    def record(self, event: Any) -> None:
        if event["event"] == "step":
            self.plant("logging")
            self.step += 1


class Slow(torch.autograd.Function):
    """Takes its time in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, delays: Delays) -> torch.Tensor:
        ctx.delays = delays
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.delays.plant("backward")
        return gradients[0], None


class Network(nn.Module):
    delays: Delays

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return self.body(x)
        type(self).delays.plant("forward")
        return Slow.apply(self.body(x), type(self).delays)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        if not self.training:  # the average, each time it is moved, twice
            type(self).delays.plant("ema", 0.5)
        return super().named_buffers(*args, **kwargs)


class SlowSource:
    """A source that takes its time over the first image of a batch."""

    def __init__(self, source: Any, delays: Delays) -> None:
        self._source, self._delays = source, delays
        self.labels = source.labels

    def __len__(self) -> int:
        return len(self._source)

    def read(self, sample: int) -> Any:
        if self._delays.step not in self._delays.planted["data_wait"]:
            self._delays.plant("data_wait")
        return self._source.read(sample)

    def path(self, sample: int) -> str:
        return self._source.path(sample)


def train(delays: Delays, runs: Path, tiny_recipe: Path, tiny_task: Make) -> Path:
    """Train with every planted place in it; a phase that ``delays`` is not given takes no time."""
    Network.delays = delays

    def make(recipe: Any) -> Any:
        task = tiny_task(make_network=Network, train_images=160)(recipe)
        task.dataset = replace(task.dataset, train=SlowSource(task.dataset.train, delays))
        opened = task.open_pipeline

        def open_pipeline(placement: Any) -> Any:
            pipeline = opened(placement)
            normalize = pipeline._normalize

            def slowly(images: torch.Tensor) -> torch.Tensor:
                delays.plant("h2d")
                return normalize(images)

            pipeline._normalize = slowly
            return pipeline

        task.open_pipeline = open_pipeline
        return task

    hook = register_optimizer_step_pre_hook(lambda *_: delays.plant("optimizer"))
    threads = torch.get_num_threads()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(clock, "time", delays)
            options = Options(run_dir=runs / "run", display=delays, task=make)
            run = train_recipe(load_recipe(tiny_recipe, PLANTED), options)
    finally:
        hook.remove()
        torch.set_num_threads(threads)
    return run.run_dir


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory, tiny_recipe: Path, tiny_task: Make) -> tuple[Delays, Attribution]:
    """A run that is slow everywhere."""
    delays = Delays(*DELAYS)
    return delays, attribute_run(train(delays, tmp_path_factory.mktemp("runs"), tiny_recipe, tiny_task))


@pytest.mark.parametrize("phase", DELAYS)
def test_a_planted_delay_is_found_in_its_phase(phase: str, slow: tuple[Delays, Attribution]) -> None:
    delays, found = slow
    records = {each["step"]: each for each in read_events(found.run_dir / "events.jsonl", kinds=("step",))}
    late = phase in ("logging", "host")  # what happens after a step delays the next one
    planted = {step + late: seconds for step, seconds in delays.planted[phase].items() if step + late <= STEPS}
    assert list(planted) == list(range(WARMUP_STEPS + 1 + late, STEPS + 1))
    assert {step: records[step][f"{phase}_seconds"] for step in planted} == pytest.approx(planted)
    assert list(planted.values()) == pytest.approx([DELAYS[phase]] * len(planted))


def test_the_phases_add_up_to_all_the_time_that_has_passed(slow: tuple[Delays, Attribution]) -> None:
    delays, found = slow
    assert found.steps == found.records == STEPS - WARMUP_STEPS
    assert sum(each.seconds for each in found.phases) == pytest.approx(found.step_seconds)
    seconds = [each["step_seconds"] for each in read_events(found.run_dir / "events.jsonl", kinds=("step",))]
    assert seconds[1:] == pytest.approx([later - earlier for earlier, later in pairwise(delays.ended)])
    assert found.step_seconds == pytest.approx(sum(seconds[WARMUP_STEPS:]) / found.steps)
    assert [each.name for each in found.phases] == list(PHASES)


def test_a_step_that_is_slow_everywhere_is_bound_by_its_data(slow: tuple[Delays, Attribution]) -> None:
    _, found = slow
    assert found.bottleneck is not None
    assert found.bottleneck.startswith("data: ")


@pytest.mark.parametrize(
    ("phase", "said"),
    [("data_wait", "data: "), ("h2d", "data: "), ("optimizer", "optimizer: "), ("ema", "moving average: "),
     ("logging", "logging: "), ("host", "host: "), ("forward", "computing: "), ("backward", "computing: ")],
)  # fmt: skip
def test_what_is_slow_is_named(phase: str, said: str, runs: Path, tiny_recipe: Path, tiny_task: Make) -> None:
    found = attribute_run(train(Delays(phase), runs, tiny_recipe, tiny_task))
    assert found.bottleneck is not None
    assert found.bottleneck.startswith(said)


def test_the_summary_has_the_shares(train_tiny: Make) -> None:
    summary = train_tiny("run", {"evaluate.every": "off"}).summary
    assert set(summary.phase_fractions) == set(PHASES)
    assert sum(summary.phase_fractions.values()) == pytest.approx(1)
    assert summary.phase_fractions["data_wait"] == summary.data_wait_fraction
    assert summary.phase_fractions["communication"] == 0
