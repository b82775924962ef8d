"""The plan's numbers for one process and for 64, and what is said where they do not come out even."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from paceline.errors import RecipeError
from paceline.recipe.load import stored_recipe
from paceline.recipe.plan import DataFacts, MachineFacts, Plan, make_plan

CPU = MachineFacts(device="cpu", device_name="a processor", fast_bf16=False, cores=64, reasons={"fast_bf16": "no AMX"})
GPU = MachineFacts(device="cuda", device_name="a card", fast_bf16=True, cores=64, reasons={"fast_bf16": "it has"})


def plan(
    *overrides: str, world_size: int = 1, samples: int = 1000, held_out: int = 200, machine: MachineFacts = CPU
) -> Plan:
    recipe = stored_recipe({"data": {"dataset": "digits"}}, "plain", overrides)
    data = DataFacts(train_samples=samples, evaluation_samples=held_out)
    return make_plan(recipe, data, machine, world_size=world_size, local_world_size=min(world_size, 8))


def refusal(*overrides: str, **world: Any) -> str:
    with pytest.raises(RecipeError) as caught:
        plan(*overrides, **world)
    return str(caught.value)


def test_one_process() -> None:
    made = plan("batch.global_size=64", "train.duration=3 epochs", "schedule.warmup=10%")
    assert (made.global_batch_size, made.micro_batch_size, made.accumulation_steps, made.logical_ranks) == (
        64,
        64,
        1,
        1,
    )
    assert (made.steps_per_epoch, made.last_step_samples) == (16, 40)
    assert (made.total_steps, made.total_epochs, made.warmup_steps) == (48, 3.0, 5)
    assert (made.strategy, made.precision, made.channels_last) == ("single", "fp32", True)
    assert (made.evaluate_every_steps, made.checkpoint_every_steps, made.log_every_steps) == (16, 16, 10)
    assert made.threads_per_process == 64


def test_sixty_four_processes_see_the_same_steps() -> None:
    alone, many = plan("batch.global_size=128"), plan("batch.global_size=128", world_size=64)
    assert (many.micro_batch_size, many.accumulation_steps, many.logical_ranks) == (2, 1, 64)
    assert (many.strategy, many.threads_per_process) == ("ddp", 8)
    for number in (
        "global_batch_size",
        "steps_per_epoch",
        "last_step_samples",
        "total_steps",
        "warmup_steps",
        "evaluate_every_steps",
        "evaluation_batch_size",
        "checkpoint_every_steps",
    ):
        assert getattr(alone, number) == getattr(many, number), number


def test_a_given_micro_batch_is_accumulated() -> None:
    made = plan("batch.global_size=256", "batch.micro_size=8", world_size=4)
    assert (made.micro_batch_size, made.accumulation_steps, made.logical_ranks) == (8, 8, 32)


@settings(max_examples=100)
@given(batch=st.integers(1, 300), micro=st.integers(1, 300), world=st.integers(1, 64), samples=st.integers(1, 5000))
def test_every_plan_adds_up(batch: int, micro: int, world: int, samples: int) -> None:
    overrides = (f"batch.global_size={batch}", f"batch.micro_size={micro}", "train.duration=2 epochs")
    try:
        made = plan(*overrides, world_size=world, samples=samples)
    except RecipeError:
        assert batch % (micro * world) != 0
        return
    assert made.micro_batch_size * made.accumulation_steps * world == batch
    assert made.logical_ranks == made.accumulation_steps * world
    assert 1 <= made.last_step_samples <= batch
    sizes = [made.step_samples(position) for position in range(made.total_steps)]
    assert sum(sizes) == 2 * samples
    for position in range(0, made.total_steps, max(1, made.total_steps // 7)):
        assert made.samples_before(position) == sum(sizes[:position])
        assert made.epoch_of(position) == position // made.steps_per_epoch


@settings(max_examples=25)
@given(batch=st.integers(1, 500), world=st.integers(2, 64))
def test_what_an_impossible_world_is_told_does_fit(batch: int, world: int) -> None:
    assume(batch % world)
    message = refusal(f"batch.global_size={batch}", world_size=world)
    advised = message.split("run it on ")[1].split(" processes")[0].split(", ")
    assert advised
    for size in advised:
        assert plan(f"batch.global_size={batch}", world_size=int(size)).micro_batch_size == batch // int(size)


# Overrides, number of processes, and what is said.
IMPOSSIBLE = [
    (
        ["batch.global_size=256"],
        3,
        """batch.global_size=256 over 3 processes gives 85.3333 samples each, which is not whole; the global batch is
        never changed silently, so run it on 1, 2, 4, 8, 16, 32, 64, 128, 256 processes or change batch.global_size.""",
    ),
    (
        ["batch.global_size=64", "batch.micro_size=32"],
        4,
        """batch.global_size=64 over 4 processes gives 16 samples each, which batch.micro_size=32 does not divide; the
        global batch is never changed silently, so run it on 1, 2 processes or change batch.global_size.""",
    ),
    (
        ["batch.global_size=100", "batch.micro_size=30"],
        1,
        """batch.global_size=100 is not a multiple of batch.micro_size=30; choose a micro_size that divides it, for
        example 25.""",
    ),
    (["parallel.strategy=single"], 2, "parallel.strategy=single with 2 processes; use ddp, auto, or one process."),
    (
        ["parallel.strategy=ddp"],
        1,
        "parallel.strategy=ddp has no effect with one process; use auto, or --processes 2 or more.",
    ),
    (["train.duration=0 steps"], 1, "train.duration='0 steps' comes to no step at all; give at least '1 steps'."),
    (
        ["train.duration=10%"],
        1,
        """train.duration: found '10%', but the run's own length cannot be a percentage; give epochs, steps or
        samples.""",
    ),
    (
        ["train.duration=5 steps", "schedule.warmup=6 steps"],
        1,
        "schedule.warmup='6 steps' is 6 steps, longer than the run's 5; shorten it, or lengthen train.duration.",
    ),
    (
        ["train.duration=5 steps", "schedule.name=step", "schedule.milestones=[3 steps, 9 steps]"],
        1,
        "schedule.milestones='9 steps' is 9 steps, longer than the run's 5; shorten it, or lengthen train.duration.",
    ),
    (
        ["evaluate.every=0.01 epochs"],
        1,
        "evaluate.every='0.01 epochs' comes to less than one step; give at least '1 steps'.",
    ),
    (
        ["checkpoint.every=0 steps"],
        1,
        "checkpoint.every='0 steps' comes to less than one step; give at least '1 steps'.",
    ),
    (["telemetry.log_every=0%"], 1, "telemetry.log_every='0%' comes to less than one step; give at least '1 steps'."),
]


@pytest.mark.parametrize(("overrides", "world_size", "said"), IMPOSSIBLE)
def test_impossible_combinations(overrides: list[str], world_size: int, said: str) -> None:
    assert refusal(*overrides, world_size=world_size) == " ".join(said.split())


def test_no_training_samples() -> None:
    assert refusal(samples=0).startswith("there are no training samples")


def test_intervals_may_be_off() -> None:
    made = plan("evaluate.every=off", "checkpoint.every=off")
    assert made.evaluate_every_steps is None
    assert made.checkpoint_every_steps is None


def test_a_duration_beyond_all_numbers_is_refused() -> None:
    assert "train.duration" in refusal("train.duration=1e400 steps")


def test_every_auto_has_its_reason() -> None:
    made = plan(machine=GPU, world_size=2)
    assert made.precision == "bf16"
    for key in (
        "train.precision",
        "model.channels_last",
        "batch.micro_size",
        "parallel.strategy",
        "parallel.threads",
        "evaluate.batch_size",
    ):
        assert made.reasons[key], key
    assert "fast_bf16" not in made.reasons


def test_what_was_asked_needs_no_reason() -> None:
    made = plan(
        "train.precision=fp32",
        "model.channels_last=false",
        "batch.micro_size=8",
        "parallel.threads=3",
        "evaluate.batch_size=7",
    )
    assert (made.precision, made.channels_last, made.threads_per_process, made.evaluation_batch_size) == (
        "fp32",
        False,
        3,
        7,
    )
    assert not {"train.precision", "model.channels_last", "batch.micro_size", "parallel.threads"} & set(made.reasons)


def test_there_is_always_a_thread() -> None:
    few = MachineFacts(device="cpu", device_name="small", fast_bf16=False, cores=2)
    assert plan("batch.global_size=64", world_size=64, machine=few).threads_per_process == 1


def test_the_evaluation_batch_knows_nothing_of_the_world() -> None:
    sizes = {plan("batch.global_size=512", world_size=world).evaluation_batch_size for world in (1, 2, 64)}
    assert sizes == {256}
    assert plan("batch.global_size=16").evaluation_batch_size == 16


def test_a_plan_is_json() -> None:
    tree = plan("schedule.name=step", "schedule.milestones=[1 epoch]").to_tree()
    assert json.loads(json.dumps(tree))["milestone_steps"] == [4]
