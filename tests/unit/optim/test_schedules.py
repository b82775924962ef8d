"""The learning rate of every step is what torch's schedulers and the written formulas say."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from timm.scheduler.step_lr import StepLRScheduler
from torch.optim import lr_scheduler as lr

from paceline.errors import RecipeError
from paceline.host.world import World
from paceline.optim.build import apply_settings, build_optimizer, build_schedules
from paceline.plan import DataFacts, MachineFacts, Plan, make
from paceline.plan.rates import LearningRate
from paceline.recipe.load import stored_recipe
from paceline.recipe.schema import Recipe

PEAK, END = 0.8, 0.003


def rate(name: str, total: int, warmup: int = 0, **more: Any) -> LearningRate:
    asked = {"name": name, "peak": PEAK, "end": END, "total_steps": total, "warmup_steps": warmup, **more}
    return LearningRate(**asked)


def of_torch(kind: type[Any], steps: int, **options: Any) -> list[float]:
    """What a torch scheduler gives at each of its steps, from a plain optimizer at the peak."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler = kind(optimizer, **options)
    values = []
    for _ in range(steps):
        values.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return values


def planned(overrides: dict[str, Any], samples: int = 20) -> tuple[Recipe, Plan]:
    recipe = stored_recipe({}, "plain", {"batch.global_size": 10, "train.duration": "9 steps", **overrides})
    machine = MachineFacts(device="cpu", device_name="", fast_bf16=False, cores=1)
    facts = DataFacts(train_samples=samples, evaluation_samples=0)
    return recipe, make(recipe, world=World(), data=facts, machine=machine)


# Formulas and torch's recursions round differently; a step or a phase more or less would be seen.
CLOSE = 1e-7


def like(ours: LearningRate, kind: type[Any], steps: int = 200, **options: Any) -> tuple[LearningRate, list[float]]:
    return ours, of_torch(kind, steps, **options)


OF_TORCH: dict[str, Callable[[], tuple[LearningRate, list[float]]]] = {
    "cosine 1": lambda: like(rate("cosine", 1), lr.CosineAnnealingLR, 1, T_max=1, eta_min=END),
    "cosine 2": lambda: like(rate("cosine", 2), lr.CosineAnnealingLR, 2, T_max=2, eta_min=END),
    "cosine": lambda: like(rate("cosine", 97), lr.CosineAnnealingLR, 97, T_max=97, eta_min=END),
    "linear 1": lambda: like(rate("linear", 1), lr.LinearLR, 1, start_factor=1, end_factor=END / PEAK, total_iters=1),
    "linear": lambda: like(rate("linear", 97), lr.LinearLR, 97, start_factor=1, end_factor=END / PEAK, total_iters=97),
    "milestones": lambda: like(
        rate("step", 20, milestones=(3, 10, 11), gamma=0.3), lr.MultiStepLR, 20, milestones=[3, 10, 11], gamma=0.3
    ),
    "steps": lambda: like(rate("step", 200, period=30, gamma=0.3), lr.StepLR, step_size=30, gamma=0.3),
    "root": lambda: like(rate("polynomial", 200, end=0.0, power=0.5), lr.PolynomialLR, total_iters=200, power=0.5),
    "square": lambda: like(rate("polynomial", 200, end=0.0, power=2.0), lr.PolynomialLR, total_iters=200, power=2.0),
    "exponential": lambda: like(rate("exponential", 200, gamma=0.97, period=1), lr.ExponentialLR, gamma=0.97),
    "restarts": lambda: like(rate("cosine", 200, period=30), lr.CosineAnnealingWarmRestarts, T_0=30, eta_min=END),
    "longer and longer restarts": lambda: like(
        rate("cosine", 200, period=7, period_factor=3.0), lr.CosineAnnealingWarmRestarts, T_0=7, T_mult=3, eta_min=END
    ),
    "cycles": lambda: like(
        rate("cyclic", 200, 15, first=END, period=30),
        lr.CyclicLR,
        base_lr=END,
        max_lr=PEAK,
        step_size_up=15,
        cycle_momentum=False,
    ),
    "one restart": lambda: like(rate("cosine", 200, period=200), lr.CosineAnnealingWarmRestarts, T_0=200, eta_min=END),
    "warmup 2": lambda: like(rate("cosine", 99, 2), lr.LinearLR, 2, start_factor=1 / 2, total_iters=1),
    "warmup": lambda: like(rate("cosine", 99, 30), lr.LinearLR, 30, start_factor=1 / 30, total_iters=29),
    "warmup from a share": lambda: like(
        rate("constant", 200, 30, first=0.01 * PEAK), lr.LinearLR, start_factor=0.01, total_iters=30
    ),
    "constant warmup": lambda: like(
        rate("constant", 200, 30, first=0.1 * PEAK, warmup_shape="constant"), lr.ConstantLR, factor=0.1, total_iters=30
    ),
}


@pytest.mark.parametrize("name", OF_TORCH)
def test_torchs_schedulers_give_the_same(name: str) -> None:
    ours, theirs = OF_TORCH[name]()
    assert values_of(ours, len(theirs)) == pytest.approx(theirs, rel=CLOSE)


def test_the_plan_names_each_phase() -> None:
    points = rate("step", 100, 5, milestones=(30, 60)).phases()
    assert {point.step: point.phase for point in points} == (
        {0: "warmup", 5: "step from the peak", 30: "milestone", 60: "milestone", 99: "last step"}
    )
    schedule = rate("step", 100, 5, milestones=(30, 60))
    assert all(point.learning_rate == schedule(point.step) for point in points)


def test_a_recipe_and_its_plan_make_the_schedule() -> None:
    steps = {"name": "step", "warmup": "5 epochs", "milestones": ["10 epochs", "75%"], "gamma": 0.5}
    recipe, plan = planned({"train.duration": "20 epochs", "schedule": steps, "optimizer.lr": 0.4})
    schedule = LearningRate.of(recipe.schedule, plan)
    found = [schedule(step) for step in (0, 9, 10, 19, 20, 29, 30, 39)]
    assert found == pytest.approx([0.04, 0.4, 0.4, 0.4, 0.2, 0.2, 0.1, 0.1])


def values_of(schedule: LearningRate, steps: int = 200) -> list[float]:
    return [schedule(step) for step in range(steps)]


def test_exponential_to_an_end() -> None:
    ours = rate("exponential", 120, 20)
    assert [ours(step) for step in (20, 70, 120)] == pytest.approx([PEAK, math.sqrt(PEAK * END), END])
    smooth = rate("exponential", 200, gamma=0.97, period=10)
    assert [smooth(step) for step in (0, 10, 15)] == pytest.approx([PEAK, PEAK * 0.97, PEAK * 0.97**1.5])


@given(st.integers(2, 50), st.floats(1.0, 4.0), st.integers(1, 2000))
def test_no_restart_is_missed(period: int, factor: float, total: int) -> None:
    ours = rate("cosine", total, period=period, period_factor=factor)
    values = values_of(ours, total)
    assert all(END <= value <= PEAK for value in values)
    told = [point.step for point in ours.phases() if point.phase == "next period"]
    assert told == [step for step in range(1, total - 1) if values[step] > values[step - 1]][: len(told)]


@pytest.mark.parametrize("anneal", ["cosine", "linear"])
@pytest.mark.parametrize("rise", [0.3, 0.45])
def test_one_cycle_with_momentum(anneal: str, rise: float) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK, momentum=0.95)
    shape = {"cosine": "cos"}.get(anneal, anneal)
    theirs = lr.OneCycleLR(optimizer, PEAK, 200, pct_start=rise, anneal_strategy=shape, final_div_factor=1e3)
    expected = []
    for _ in range(200):
        expected.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
        optimizer.step()
        theirs.step() if len(expected) < 200 else None
    cycle = {"name": "one_cycle", "warmup": f"{round(rise * 100)}%", "anneal": anneal, "end_lr": PEAK / 25e3}
    cycle["momentum"] = {"name": "opposite", "end": 0.85}
    optimizer = {"lr": PEAK, "momentum": 0.95}
    recipe, plan = planned({"train.duration": "200 steps", "optimizer": optimizer, "schedule": cycle})
    schedules = build_schedules(recipe, plan)
    found = [schedules.at(step) for step in range(200)]
    assert [each.learning_rate for each in found] == pytest.approx([value for value, _ in expected], rel=CLOSE)
    assert [each.momentum for each in found] == pytest.approx([momentum for _, momentum in expected], rel=CLOSE)


@pytest.mark.parametrize("anneal", ["linear", "cosine", "sqrt"])
def test_trapezoid(anneal: str) -> None:
    ours = rate("trapezoid", 200, 20, decay_steps=50, anneal=anneal)
    for step in range(20, 151):
        assert ours(step) == PEAK
    for step in range(150, 201):
        x = (step - 150) / 50
        share = {"linear": 1 - x, "cosine": (1 + math.cos(math.pi * x)) / 2, "sqrt": 1 - math.sqrt(x)}[anneal]
        assert ours(step) == pytest.approx(END + (PEAK - END) * share, rel=1e-12)
    assert (150, "decay") in [(point.step, point.phase) for point in ours.phases()]


def test_exponential_warmup() -> None:
    ours = rate("constant", 200, 30, first=0.01 * PEAK, warmup_shape="exponential")
    theirs = [0.01 * value for value in of_torch(lr.ExponentialLR, 31, gamma=100 ** (1 / 30))]
    assert values_of(ours, 31) == pytest.approx(theirs, rel=CLOSE)


@pytest.mark.parametrize(
    ("rule", "batch", "peak"), [("none", 1024, 0.1), ("linear", 1024, 0.4), ("linear", 64, 0.025), ("sqrt", 1024, 0.2)]
)
def test_scaling_rules(rule: str, batch: int, peak: float) -> None:
    overrides: dict[str, Any] = {"batch.global_size": batch, "optimizer.lr": 0.1, "train.duration": "9 steps"}
    if rule != "none":
        overrides |= {"optimizer.lr_scaling": rule, "optimizer.lr_reference_batch": 256}
    recipe, plan = planned(overrides, samples=4096)
    assert plan.peak_lr == pytest.approx(peak)
    assert LearningRate.of(recipe.schedule, plan)(0) == pytest.approx(peak)
    told = plan.reasons.get("optimizer.lr", "")
    assert ("0.1 for a batch of 256" in told and f"{peak:g} for {batch}" in told) == (rule != "none")


def test_gradual_warmup_begins_at_the_rate_before_scaling() -> None:
    """Goyal et al. 2017, section 2.2: from eta to k * eta."""
    overrides = {
        "batch.global_size": 1024,
        "optimizer": {"lr": 0.1, "lr_scaling": "linear", "lr_reference_batch": 256},
        "train.duration": "90 steps",
        "schedule": {"name": "constant", "warmup": "10 steps", "warmup_from": "unscaled"},
    }
    recipe, plan = planned(overrides, samples=4096)
    ours = LearningRate.of(recipe.schedule, plan)
    assert [ours(step) for step in (0, 5, 10)] == pytest.approx([0.1, 0.25, 0.4])


@pytest.mark.parametrize("name", ["sgd", "adamw", "rmsprop", "lamb", "lion", "muon"])
def test_momentum_and_weight_decay_move(name: str) -> None:
    moving = {"momentum": {"name": "linear", "end": 0.5}, "weight_decay": {"name": "cosine", "end": 0.4}}
    overrides = {"optimizer": {"name": name, "weight_decay": 0.04}, "schedule": moving}
    recipe, plan = planned({"train.duration": "100 steps", **overrides})
    optimizer = build_optimizer(torch.nn.Linear(3, 3), recipe.optimizer, torch.device("cpu"))
    apply_settings(optimizer, build_schedules(recipe, plan).at(25))
    decayed, free = optimizer.param_groups
    # As Caron et al. 2021 raise it: end + (start - end) * (1 + cos(pi * t / T)) / 2.
    assert decayed["weight_decay"] == pytest.approx(0.4 + (0.04 - 0.4) * (1 + math.cos(math.pi / 4)) / 2)
    assert free["weight_decay"] == 0
    for group in (decayed, free):
        momentum = group["momentum"] if name in ("sgd", "rmsprop", "muon") else group["betas"][0]
        assert momentum == pytest.approx(0.9 + (0.5 - 0.9) * 0.25)


MISTAKES = {
    "without milestones or period": {"schedule.name": "step"},
    "takes one of them": {"schedule.name": "step", "schedule.milestones": ["3 steps"], "schedule.period": "2 steps"},
    "name=cyclic without period": {"schedule.name": "cyclic"},
    "neither period nor end_lr": {"schedule.name": "exponential"},
    "set it, for example to '30%'": {"schedule.name": "one_cycle"},
    "longer than the run's": {"schedule.name": "trapezoid", "schedule.warmup": "60%", "schedule.decay": "80%"},
    "must begin above 0": {"schedule.warmup": "3 steps", "schedule.warmup_shape": "exponential"},
    "without lr_reference_batch": {"optimizer.lr_scaling": "linear"},
    "optimizer.lr_scaling=none": {"schedule.warmup": "3 steps", "schedule.warmup_from": "unscaled"},
    "less than one step": {"schedule.period": "0 steps"},
    "which is 0": {"schedule.weight_decay": {"name": "linear", "end": 0.1}},
    "a momentum is below 1": {"schedule.momentum": {"name": "linear", "end": 1.5}},
    "longer than the run's 9": {"train.until": "10 steps"},
    "Nesterov momentum must be above 0": {"optimizer.momentum": 0, "optimizer.nesterov": True},
    "clipped in only one way": {"optimizer.clip_norm": 1, "optimizer.clip_value": 1},
    "only name=one_cycle": {"schedule.momentum.name": "opposite"},
}


@pytest.mark.parametrize("said", MISTAKES)
def test_mistakes(said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        planned(MISTAKES[said])
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_a_warmup_has_is_unused_without_one() -> None:
    _, plan = planned({"schedule.warmup_from": 0.5})
    assert plan.unused["schedule.warmup_from"] == "there is no warm-up (schedule.warmup)"


def test_a_course_without_momentum_is_told_and_left_out() -> None:
    overrides = {"optimizer.name": "adafactor", "schedule.momentum": {"name": "linear", "end": 0.5}}
    recipe, plan = planned(overrides)
    assert plan.unused["schedule.momentum.name"] == "adafactor has no momentum"
    optimizer = build_optimizer(torch.nn.Linear(3, 3), recipe.optimizer, torch.device("cpu"))
    apply_settings(optimizer, build_schedules(recipe, plan).at(3))


def test_noise_is_drawn_for_each_epoch_as_by_timm() -> None:
    overrides = {
        "optimizer.lr": PEAK,
        "schedule": {"name": "constant", "noise": {"std": 0.5, "limit": 0.4, "begin": "15%", "end": "150 epochs"}},
        "train.duration": "200 epochs",
    }
    recipe, plan = planned(overrides, samples=25)  # three steps an epoch
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    theirs = StepLRScheduler(optimizer, decay_t=1000, noise_range_t=[30, 150], noise_pct=0.4, noise_std=0.5)
    schedules, ours, timms = build_schedules(recipe, plan), [], []
    for epoch in range(200):
        theirs.step(epoch)
        timms.append(optimizer.param_groups[0]["lr"])
        (rate,) = {schedules.at(0, step).learning_rate for step in range(3 * epoch, 3 * epoch + 3)}
        ours.append(rate)
    assert [rate == PEAK for rate in ours] == [rate == PEAK for rate in timms]
    for rates in (ours, timms):
        assert max(abs(rate / PEAK - 1) for rate in rates) < 0.4
        assert statistics.stdev(rate / PEAK for rate in rates[30:150]) == pytest.approx(0.22, abs=0.04)
    again, _ = planned({"seed": 1, **overrides}, samples=25)
    assert build_schedules(again, planned({"seed": 1, **overrides}, samples=25)[1]).at(0, 100) != schedules.at(0, 100)
    assert {point.step: point.phase for point in plan.learning_rates}[90] == "noise begins"


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "polynomial", "trapezoid", "one_cycle"])
def test_a_batch_that_grows_lifts_the_peak_and_not_the_end(name: str) -> None:
    """As two schedules, of which the second one's is used from a global batch on."""
    common: dict[str, Any] = {"name": name, "total_steps": 40, "end": 0.01, "warmup_steps": 5, "decay_steps": 10}
    small, large = LearningRate(peak=0.1, **common), LearningRate(peak=0.3, **common)
    growing = LearningRate(peak=0.1, growth=((20, 0.2), (30, 0.3)), **common)
    assert [growing(step) for step in range(20)] == [small(step) for step in range(20)]
    assert [growing(step) for step in range(30, 40)] == [large(step) for step in range(30, 40)]
    assert small(25) < growing(25) < large(25)
    # Steps that were skipped used up their batch: the size is the position's, the schedule the step's.
    assert growing(28, 31) == large(28)
    assert growing(28, 28) == growing(28)
    points = {point.step: point.learning_rate for point in growing.phases()}
    assert (points[20], points[30]) == (growing(20), large(30))
