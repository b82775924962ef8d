"""The learning rate of every step is what torch's schedulers and the written formulas say."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from paceline.optim.schedules import LearningRate
from paceline.recipe.load import stored_recipe
from paceline.recipe.plan import DataFacts, MachineFacts, make_plan

PEAK, END = 0.8, 0.003


def rate(
    name: str, total: int, warmup: int = 0, *, milestones: tuple[int, ...] = (), gamma: float = 0.1
) -> LearningRate:
    return LearningRate(
        name=name, peak=PEAK, end=END, gamma=gamma, total_steps=total, warmup_steps=warmup, milestones=milestones
    )


def of_torch(make: object, steps: int) -> list[float]:
    """What a torch scheduler gives at each of its steps, from a plain optimizer at the peak."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler = make(optimizer)  # type: ignore[operator]
    values = []
    for _ in range(steps):
        values.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return values


@pytest.mark.parametrize("total", [1, 2, 10, 97])
def test_cosine(total: int) -> None:
    expected = of_torch(lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=total, eta_min=END), total)
    assert [rate("cosine", total)(step) for step in range(total)] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("total", [1, 2, 10, 97])
def test_linear(total: int) -> None:
    made = lambda o: lr_scheduler.LinearLR(o, start_factor=1, end_factor=END / PEAK, total_iters=total)  # noqa: E731
    assert [rate("linear", total)(step) for step in range(total)] == pytest.approx(of_torch(made, total), rel=1e-12)


def test_step() -> None:
    milestones = (3, 10, 11)
    expected = of_torch(lambda o: lr_scheduler.MultiStepLR(o, milestones=list(milestones), gamma=0.3), 20)
    schedule = rate("step", 20, milestones=milestones, gamma=0.3)
    assert [schedule(step) for step in range(20)] == pytest.approx(expected, rel=1e-12)


def test_constant() -> None:
    assert {rate("constant", 9)(step) for step in range(9)} == {PEAK}


@pytest.mark.parametrize("warmup", [1, 2, 5, 30])
def test_warmup(warmup: int) -> None:
    made = lambda o: lr_scheduler.LinearLR(o, start_factor=1 / warmup, end_factor=1, total_iters=warmup - 1)  # noqa: E731
    expected = of_torch(made, warmup) if warmup > 1 else [PEAK]
    for name in ("constant", "cosine", "linear", "step"):
        schedule = rate(name, 30, warmup)
        assert [schedule(step) for step in range(warmup)] == pytest.approx(expected, rel=1e-12)


@given(st.sampled_from(["constant", "cosine", "linear"]), st.integers(1, 400), st.integers(0, 400), st.integers(0, 500))
def test_by_the_book(name: str, total: int, warmup: int, step: int) -> None:
    warmup = min(warmup, total)
    if step < warmup:
        expected = PEAK * (step + 1) / warmup
    else:
        x = min((step - warmup) / max(total - warmup, 1), 1.0)
        expected = {
            "constant": PEAK,
            "linear": PEAK * (1 - x) + END * x,
            "cosine": END + (PEAK - END) * 0.5 * (1 + math.cos(math.pi * x)),
        }[name]
    assert rate(name, total, warmup)(step) == pytest.approx(expected, rel=1e-12)


@given(st.sampled_from(["constant", "cosine", "linear"]), st.integers(1, 300), st.integers(0, 300))
def test_it_rises_to_the_peak_and_never_rises_again(name: str, total: int, warmup: int) -> None:
    warmup = min(warmup, total)
    values = [rate(name, total, warmup)(step) for step in range(total + 5)]
    assert max(values) == pytest.approx(PEAK, rel=1e-15)
    assert all(before < after for before, after in pairwise(values[:warmup]))
    assert all(before >= after for before, after in pairwise(values[warmup:]))
    assert min(values) >= 0
    if warmup < total and name != "constant":
        assert values[total] == values[-1] == pytest.approx(END)


def test_the_plan_names_each_phase() -> None:
    points = rate("step", 100, 5, milestones=(30, 60)).phases()
    assert [(point.step, point.phase) for point in points] == [
        (0, "warmup"),
        (5, "step from the peak"),
        (30, "milestone"),
        (60, "milestone"),
        (99, "last step"),
    ]
    schedule = rate("step", 100, 5, milestones=(30, 60))
    assert all(point.learning_rate == schedule(point.step) for point in points)


@pytest.mark.parametrize("warmup", [0, 1, 3])
def test_phases_of_the_shortest_runs(warmup: int) -> None:
    points = rate("cosine", max(warmup, 1), warmup).phases()
    assert points[-1].step == max(warmup, 1) - 1


def test_a_recipe_and_its_plan_make_the_schedule() -> None:
    overrides = {
        "batch.global_size": 10,
        "train.duration": "20 epochs",
        "schedule.name": "step",
        "schedule.warmup": "5 epochs",
        "schedule.milestones": ["10 epochs", "75%"],
        "schedule.gamma": 0.5,
        "optimizer.lr": 0.4,
    }
    recipe = stored_recipe({}, "plain", overrides)
    machine = MachineFacts(device="cpu", device_name="", fast_bf16=False, cores=1)
    facts = DataFacts(train_samples=20, evaluation_samples=0)
    plan = make_plan(recipe, facts, machine, world_size=1, local_world_size=1)
    schedule = LearningRate.of(recipe.optimizer, recipe.schedule, plan)
    assert [schedule(step) for step in (0, 9, 10, 19, 20, 29, 30, 39)] == pytest.approx(
        [0.04, 0.4, 0.4, 0.4, 0.2, 0.2, 0.1, 0.1]
    )
