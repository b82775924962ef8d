"""Which strategy the memory of a replica leads to, and what does not work with weights that are spread."""

from __future__ import annotations

from typing import Any

import pytest
from golden_sentences import raises

from paceline.errors import RecipeError
from paceline.host.world import World
from paceline.plan import DataFacts, MachineFacts, NetworkFacts, ParameterNumbers, Plan, make
from paceline.plan.strategy import replica_bytes
from paceline.recipe.load import load_recipe
from paceline.recipe.schema import Recipe

GIB = 2**30
BILLION = ParameterNumbers(every=10**9, trained=10**9)


def recipe(*overrides: str) -> Recipe:
    return load_recipe("digits", overrides).recipe


def plan(requested: Recipe, numbers: ParameterNumbers | None = None, *, world_size: int = 8, **more: Any) -> Plan:
    memory = more.get("memory_bytes", 80 * GIB)
    machine = MachineFacts(device="cuda", device_name="", fast_bf16=True, cores=8, memory_bytes=memory)
    facts = DataFacts(train_samples=1438, evaluation_samples=359)
    world = World(world_size=world_size, local_world_size=min(8, world_size))
    network = None if numbers is None else NetworkFacts(parameters=numbers)
    return make(requested, world=world, data=facts, machine=machine, network=network)


@pytest.mark.parametrize(
    ("overrides", "bytes_per_parameter"),
    [
        (["optimizer.momentum=0.9"], 12),  # weight, gradient, momentum
        (["optimizer.momentum=0", "optimizer.nesterov=false"], 8),
        (["optimizer.name=adamw"], 16),
        (["optimizer.name=adamw", "train.ema=0.999"], 20),
        (["optimizer.name=lion"], 12),
        (["optimizer.name=rmsprop", "optimizer.momentum=0.9"], 16),
        (["optimizer.name=adafactor"], 8),
        (["optimizer.name=torch.optim:Adagrad"], 16),  # of another package: assumed to keep what Adam does
    ],
)
def test_what_a_replica_takes(overrides: list[str], bytes_per_parameter: int) -> None:
    assert replica_bytes(recipe("train.ema=off", *overrides), BILLION) == bytes_per_parameter * 10**9


def test_frozen_parameters_have_no_gradient_and_no_state() -> None:
    frozen = ParameterNumbers(every=10**9, trained=10**6)
    assert replica_bytes(recipe("train.ema=off", "optimizer.name=adamw"), frozen) == 4 * 10**9 + 12 * 10**6


def test_a_replica_that_fits_is_kept_whole() -> None:
    made = plan(recipe("train.ema=off", "optimizer.name=adamw"), BILLION)
    assert (made.strategy, made.parameters) == ("ddp", 10**9)
    assert "take 14.9 GiB of the 80 GiB that a process has" in made.reasons["parallel.strategy"]


def test_a_replica_that_leaves_no_room_is_spread() -> None:
    large = ParameterNumbers(every=7 * 10**9, trained=7 * 10**9)
    made = plan(recipe("train.ema=off", "optimizer.name=adamw"), large)
    assert made.strategy == "fsdp"
    assert "take 104 GiB, more than 70% of the 80 GiB" in made.reasons["parallel.strategy"]
    assert "sharded over the processes it is 13 GiB each" in made.reasons["parallel.strategy"]
    assert "parallel.bucket_cap_mb" in made.unused
    assert "parallel.shard_size" not in made.unused


@pytest.mark.parametrize("change", [{"world_size": 1}, {"memory_bytes": None}])
def test_where_there_is_nothing_to_weigh(change: dict[str, Any]) -> None:
    made = plan(recipe("train.ema=off"), ParameterNumbers(10**11, 10**11), **change)
    assert made.strategy == ("single" if change.get("world_size") == 1 else "ddp")


def test_what_was_asked_for_stays() -> None:
    for strategy in ("ddp", "fsdp"):
        requested = recipe(f"parallel.strategy={strategy}")
        assert plan(requested, ParameterNumbers(10**11, 10**11)).strategy == strategy


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["parallel.shard_size=3"], "parallel.shard_size"),
        (["parallel.shard_size=1"], "parallel.shard_size"),
        (["optimizer.name=adafactor"], "optimizer.name"),
        (["optimizer.name=muon"], "optimizer.name"),
        (["optimizer.clip_adaptive=0.01"], "optimizer.clip_adaptive"),
        (["train.precision=fp16"], "train.precision"),
        (["parallel.unused_parameters=allow"], "parallel.unused_parameters"),
        (["model.compile=true"], "model.compile"),
        (['model.frozen=["stem.*"]', 'model.unfreeze={"stem.*": "1 epochs"}'], "model.unfreeze"),
        (['model.freeze_after={"stem.*": "1 epochs"}'], "model.freeze_after"),
        (["optimizer.name=muon", "optimizer.rest=sgd"], "optimizer.name"),
        (["parallel.gather_dtype=bf16", "train.precision=fp32"], "parallel.gather_dtype"),
    ],
)
def test_what_does_not_go_with_it_is_refused(overrides: list[str], key: str) -> None:
    with raises(RecipeError, key=key):
        plan(recipe("parallel.strategy=fsdp", *overrides))
    large = ParameterNumbers(10**11, 10**11)
    requested = recipe(*overrides)
    with raises(RecipeError, key=key):
        plan(requested, large)


def test_one_process_has_nobody_to_share_with() -> None:
    with raises(RecipeError, key="parallel.strategy", value="fsdp"):
        plan(recipe("parallel.strategy=fsdp"), world_size=1)


def test_keys_of_what_is_not_done() -> None:
    made = plan(recipe("parallel.shard_size=2"), BILLION)
    assert made.unused["parallel.shard_size"] == "parallel.strategy=auto chose ddp, which shards nothing"
    assert "parallel.bucket_cap_mb" not in made.unused
    spread = recipe("parallel.strategy=fsdp", "parallel.bucket_cap_mb=50")
    assert plan(spread, BILLION).unused["parallel.bucket_cap_mb"] == "fsdp has no buckets"
