"""A number of GPUs for a deadline or a budget."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest

from paceline.errors import RecipeError
from paceline.host.machine import cpu_quota
from paceline.parsing.units import TimeSpan
from paceline.recipe.load import load_recipe
from paceline_advisor.memory.estimate import MemoryEstimate, estimate_memory
from paceline_advisor.scaling.commands import PlanTraining
from paceline_advisor.scaling.planning import TrainingPlan, _sizes, plan_training

LrRule = Literal["none", "linear", "sqrt"]
RULES: tuple[LrRule, ...] = ("none", "linear", "sqrt")


def _hours(value: float | None) -> TimeSpan | None:
    return None if value is None else TimeSpan(value, "hours")


@cache
def _plan(
    *,
    deadline: float | None = None,
    budget: float | None = None,
    batch: int | None = None,
    rule: LrRule = "none",
    price: float | None = 2.0,
    shared: bool = True,
    samples: int | None = None,
) -> TrainingPlan:
    requested = PlanTraining(
        recipe="digits",
        overrides=("model.options={width: 4, stages: 1}", "parallel.threads=auto"),
        cluster="dgx-a100",
        throughput=1,
        one_gpu_batch=64,
        batch_per_gpu=batch,
        price_per_gpu_hour=price,
        shared_node=shared,
        cpu_ms_per_sample=0.0,
        samples=samples,
        deadline=_hours(deadline),
        budget=budget,
        most_gpus=32,
        lr_rule=rule,
    )
    return plan_training(requested, print)


def test_a_deadline_takes_the_fewest_of_the_gpus_that_are_paid_for_alone() -> None:
    # 16 epochs of 1,438 images at one a second: 6.39 hours on one GPU.
    plan = _plan(deadline=2.0)
    assert plan.chosen is not None
    assert plan.chosen.gpus == 4
    assert plan.chosen.high_hours <= 2.0
    assert next(each for each in plan.choices if each.gpus == 2).high_hours > 2.0
    # The recipe's batch and rate stay.
    assert (plan.chosen.row.prediction.samples, plan.chosen.learning_rate) == (64, 0.2)


def test_of_the_sizes_that_meet_a_deadline_the_cheapest_is_taken() -> None:
    # A whole node is paid for: all eight of its GPUs cost less than four.
    for price in (2.0, None):
        plan = _plan(deadline=2.0, shared=False, price=price)
        assert plan.chosen is not None
        assert plan.chosen.gpus == 8
        assert f"1 node; {'cheapest' if price else 'fewest device hours'} for the deadline" in str(plan.__paceline__())
        assert plan.chosen.high_gpu_hours == min(each.high_gpu_hours for each in plan.choices if each.high_hours <= 2)
        assert list(plan.faster) == [16, 32]
        needed = r"at worst \$[\d.]+, more" if price else "more device hours"
        assert all(re.fullmatch(f"{needed} than the deadline needs", why) for why in plan.faster.values())


def test_a_deadline_that_is_met_only_if_all_goes_well_is_not() -> None:
    four = next(each for each in _plan(deadline=2.0).choices if each.gpus == 4)
    assert four.row.hours is not None
    chosen = _plan(deadline=(four.row.hours + four.high_hours) / 2).chosen
    assert chosen is not None
    assert chosen.gpus == 8


def test_one_gpu_has_a_range_too() -> None:
    one = _plan(budget=14.0).choices[0]
    assert one.gpus == 1
    assert one.row.hours is not None
    assert 1.05 < one.high_hours / one.row.hours < 1.2


def test_a_budget_takes_the_fastest_that_it_pays_for() -> None:
    plan = _plan(budget=14.0)
    assert plan.chosen is not None
    assert plan.chosen.high_cost is not None
    assert plan.chosen.high_cost <= 14
    dearer = [each for each in plan.choices if each.gpus > plan.chosen.gpus]
    assert all(each.high_cost is not None and each.high_cost > 14 for each in dearer)
    assert list(plan.faster) == [each.gpus for each in dearer]
    assert all(why.startswith("at worst $") and why.endswith("over --budget 14") for why in plan.faster.values())


def test_whole_nodes_are_paid_for() -> None:
    whole, shared = _plan(budget=20.0, shared=False), _plan(budget=20.0)
    assert [each.row.paid for each in whole.choices] == [8, 8, 8, 8, 16, 32]
    for one, other in zip(whole.choices, shared.choices, strict=True):
        assert one.row.hours is not None
        assert one.row.cost is not None
        assert one.row.cost == pytest.approx(one.row.hours * one.row.paid * 2.0)
        assert one.high_cost == pytest.approx(one.high_hours * one.row.paid * 2.0)
        assert other.row.cost == pytest.approx(one.row.cost * other.gpus / one.row.paid)
    # One GPU is too dear where eight are paid for.
    assert [each.gpus for each in whole.choices if each.excess(_requested(20.0)) > 1] == [1, 2, 4]
    assert any("whole nodes of 8 GPUs" in each for each in whole.report.notices)
    assert not any("whole nodes" in each for each in shared.report.notices)


def _requested(budget: float) -> PlanTraining:
    return PlanTraining(recipe="digits", budget=budget)


def test_what_cannot_be_is_said_with_the_nearest() -> None:
    plan = _plan(deadline=0.001)
    assert plan.chosen is None
    assert plan.nearest.gpus == 32


def test_a_batch_is_at_most_the_data() -> None:
    plan = _plan(deadline=100.0, batch=1000, rule="linear")
    assert {each.gpus: (each.row.batch, each.to_json()["global_batch"]) for each in plan.choices[:2]} == {
        1: (1000, 1000),
        2: (1438, 1438),
    }
    assert [each.learning_rate for each in plan.choices[1:]] == pytest.approx([0.2 * 1438 / 64] * 5)
    scaling = ("batch.global_size=4096", "optimizer.lr_scaling=linear", "optimizer.lr_reference_batch=719")
    requested = PlanTraining(
        recipe="digits", overrides=scaling, cluster="dgx-a100", throughput=1, deadline=_hours(100.0)
    )
    cut = plan_training(replace(requested, most_gpus=1, cpu_ms_per_sample=0.0), print)
    assert (cut.recipe_batch, cut.recipe_lr, cut.nearest.learning_rate) == (1438, *[pytest.approx(0.4)] * 2)
    assert "instead of" not in str(cut.__paceline__())


def test_a_batch_that_grows_follows_the_rule_that_was_asked_for() -> None:
    linear, root = _plan(deadline=1.0, batch=64, rule="linear"), _plan(deadline=1.0, batch=64, rule="sqrt")
    assert linear.chosen is not None
    assert root.chosen is not None
    factor = linear.chosen.row.prediction.samples / 64
    assert factor == linear.chosen.gpus
    assert linear.chosen.learning_rate == pytest.approx(0.2 * factor)
    assert root.chosen.learning_rate == pytest.approx(0.2 * factor**0.5)
    assert (linear.recipe_batch, linear.recipe_lr) == (64, 0.2)


def test_a_batch_that_grows_without_a_rule_is_told() -> None:
    plan = _plan(deadline=1.0, batch=64)
    assert plan.chosen is not None
    assert "the learning rate stays 0.2" in plan.chosen.warning


def test_large_batches_are_warned_of() -> None:
    plan = _plan(deadline=9999.0, batch=1024, rule="linear", samples=1_281_167)
    warned = {each.gpus: each.warning for each in plan.choices}
    assert warned[8] == ""
    assert "lost accuracy" in warned[16] or "critical" in warned[16]
    assert "critical" in warned[32]


def test_no_more_gpus_are_planned_than_there_are(tmp_path: Path) -> None:
    link = "{gigabytes_per_second: 10, latency_microseconds: 10}"
    path = tmp_path / "mine.yaml"
    path.write_text(f"gpus_per_node: 4\nwithin: {link}\nnetwork: {link}\nmost_gpus: 8\n")
    requested = PlanTraining(recipe="digits", cluster=str(path), throughput=1, one_gpu_batch=64, deadline=_hours(0.001))
    assert [each.gpus for each in plan_training(requested, print).choices] == [1, 2, 4, 8]


@pytest.mark.parametrize(
    ("requested", "message"),
    [
        ({}, "give --deadline"),
        ({"deadline": 1.0, "rule": "linear"}, "--batch-per-gpu"),
        ({"budget": 5.0, "price": None}, "give --price-per-gpu-hour"),
    ],
)
def test_what_does_not_fit_together_is_refused(requested: dict[str, object], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        _plan(**requested)  # type: ignore[arg-type]  # of several kinds, case by case


# 46 MB of activations for a sample: 256 of them fit into a T4, and 512 do not.
LARGE = (
    *("model.name=small_resnet", "model.options={width: 32, stages: 2}", "data.image_size=160"),
    *("train.precision=fp32", "batch.global_size=1024"),
)


def _plan_on(cluster: str, *overrides: str, **more: Any) -> TrainingPlan:
    requested = PlanTraining(
        recipe="synthetic",
        overrides=(*LARGE, *overrides),
        cluster=cluster,
        cpu_ms_per_sample=0.0,
        price_per_gpu_hour=1.0,
        deadline=_hours(100.0),
        most_gpus=4,
        **more,
    )
    return plan_training(requested, print)


@pytest.fixture
def t4s(tmp_path: Path) -> str:
    link = "{gigabytes_per_second: 10, latency_microseconds: 10}"
    (tmp_path / "t4s.yaml").write_text(f"device: t4\ngpus_per_node: 4\nwithin: {link}\nnetwork: {link}\n")
    return str(tmp_path / "t4s.yaml")


def _estimated(gpus: int, micro: int) -> MemoryEstimate:
    return estimate_memory(load_recipe("synthetic", [*LARGE, f"batch.micro_size={micro}"]), "t4", gpus)


def test_nothing_is_planned_that_estimate_says_does_not_fit(t4s: str) -> None:
    plan = _plan_on(t4s, throughput=1000, one_gpu_batch=1024)
    assert {each.gpus: (each.row.passes, each.has_room) for each in plan.choices} == {
        1: (4, True),
        2: (2, True),
        4: (1, True),
    }
    assert {choice.row.prediction.samples for choice in plan.choices} == {1024}  # the step stays what it was
    for choice in (plan.choices[0], plan.choices[-1]):
        reported = _estimated(choice.gpus, 256)
        assert (reported.fits, reported.plan.strategy) == (True, choice.row.strategy)
        assert choice.room is not None
        assert choice.room.needed == reported.least
    assert "1024 samples do not fit" in plan.choices[0].to_json()["memory_reason"]
    # What was planned before memory was looked at.
    assert _estimated(2, 512).fits is False


def test_what_fits_no_device_is_not_chosen(t4s: str) -> None:
    # 1.2 billion numbers: neither a replica nor half of its state fits into 15 GiB.
    overrides = ("model.options={width: 8192, stages: 1}", "data.image_size=32", "batch.global_size=4")
    plan = _plan_on(t4s, *overrides, throughput=1000, one_gpu_batch=1)
    assert not plan.choices[0].has_room
    assert "not even one sample fits" in plan.choices[0].to_json()["memory_reason"]
    assert plan.chosen is None or (plan.chosen.has_room and plan.chosen.row.strategy == "fsdp")


@pytest.mark.thorough
def test_a_bound_decides_nothing(t4s: str) -> None:
    plan = _plan_on(t4s)
    assert plan.report.is_bound
    assert plan.chosen is None
    assert plan.nearest.gpus == 4  # a whole node costs the same
    assert _plan_on(t4s, throughput=1000, one_gpu_batch=64).chosen is not None


def test_devices_of_unknown_memory_are_told_of() -> None:
    plan = _plan_on("ethernet-10g", throughput=1000, one_gpu_batch=64)
    assert all(each.room is None and each.has_room for each in plan.choices)
    assert any("memory is unknown" in each for each in plan.report.notices)


@pytest.mark.thorough
def test_a_recipe_that_scales_its_rate_by_itself_is_planned_with_the_scaled_one() -> None:
    scaling = ("optimizer.lr=0.1", "optimizer.lr_scaling=linear", "optimizer.lr_reference_batch=16")
    requested = PlanTraining(
        recipe="digits",
        overrides=("model.options={width: 4, stages: 1}", *scaling),
        cluster="dgx-a100",
        throughput=1,
        one_gpu_batch=64,
        batch_per_gpu=16,
        cpu_ms_per_sample=0.0,
        deadline=_hours(9),
        most_gpus=2,
    )
    plans = [plan_training(replace(requested, lr_rule=rule), print) for rule in RULES]
    # The recipe's batch is 64, four times its reference.
    assert [each.recipe_lr for each in plans] == pytest.approx([0.4] * 3)
    rates = [[choice.learning_rate for choice in each.choices] for each in plans]
    assert rates[0] == pytest.approx([0.1, 0.2])
    assert rates[1] == pytest.approx([0.1, 0.2])
    assert rates[2] == pytest.approx([0.4 / 4**0.5, 0.4 / 2**0.5])
    assert "learning rate stays" not in plans[0].choices[0].warning


@pytest.mark.skipif(cpu_quota() is not None, reason="a CPU quota limits the cores whatever the faked number is")
def test_as_many_processes_are_planned_here_as_their_link_is_measured_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)), raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)  # which the recipe does not use
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a GPU")
    recipe = load_recipe("digits", ("parallel.device=cpu",)).recipe
    assert _sizes(recipe, PlanTraining(recipe="digits", deadline=_hours(1))) == (1, 2, 4, 8, 16)
