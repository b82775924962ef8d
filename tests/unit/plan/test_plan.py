"""The plan's numbers for one process and for 64, and what is said where they do not come out even."""

from __future__ import annotations

import dataclasses
import json
import math
from itertools import pairwise
from typing import Any

import pytest
from golden_sentences import raises
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from paceline.errors import RecipeError
from paceline.host.world import World
from paceline.plan import DataFacts, MachineFacts, Plan, TaskFacts, make
from paceline.plan.batching import default_processes
from paceline.recipe.load import differences, stored_recipe, to_tree
from paceline.recipe.schema import Recipe

CPU = MachineFacts(device="cpu", device_name="a processor", fast_bf16=False, cores=64, reasons={"fast_bf16": "no AMX"})
GPU = MachineFacts(device="cuda", device_name="a card", fast_bf16=True, cores=64, reasons={"fast_bf16": "it has"})


SIXTY_FOUR = ("batch.global_size=64",)


def recipe(*overrides: str) -> Recipe:
    return stored_recipe({"data": {"dataset": "digits"}}, "plain", overrides)


def plan(*overrides: str, world_size: int = 1, machine: MachineFacts = CPU, **facts: Any) -> Plan:
    sizes = {"train_samples": facts.pop("samples", 1000), "evaluation_samples": facts.pop("held_out", 200)}
    task = facts.pop("task", TaskFacts())
    data = DataFacts(**sizes, **facts)
    world = World(world_size=world_size, local_world_size=min(world_size, 8))
    return make(recipe(*overrides), world=world, data=data, machine=machine, task=task)


def found_in(key: str, *overrides: str, value: Any = None, **world: Any) -> None:
    """Check that a recipe is refused for one key, with its value unless the key alone is named."""
    with raises(RecipeError, key=key, value=value):
        plan(*overrides, **world)


def test_a_batch_larger_than_the_data_is_never_cut_silently() -> None:
    made = plan("batch.global_size=64", "batch.growth={1: 8, 2: 128}", samples=12)
    assert made.step_sizes == [12, 8, 12]
    reason = made.reasons["batch.global_size"]
    assert "batch.global_size=64, batch.growth.2=128" in reason
    assert "12" in reason
    assert plan("batch.global_size=12", samples=12).reasons.keys().isdisjoint({"batch.global_size"})


@pytest.mark.parametrize(
    ("key", "task"),
    [
        ("batch.balance", TaskFacts(lengths_sha256="00")),
        ("data.sampling", TaskFacts(sampling=(1.0, 2.0))),
        ("data.mixture", TaskFacts(mixture=(5, 5))),
    ],
)
def test_what_sorts_a_whole_epoch_is_refused_beyond_what_fits(key: str, task: TaskFacts) -> None:
    assert plan(*SIXTY_FOUR, samples=2**27, task=task).train_samples == 2**27
    assert plan(*SIXTY_FOUR, samples=10**10).steps_per_epoch == 10**10 // 64
    found_in(key, *SIXTY_FOUR, samples=2**27 + 1, task=task)


def test_one_process() -> None:
    made = plan("batch.global_size=64", "train.duration=3 epochs", "schedule.warmup=10%")
    assert (made.global_batch_size, made.micro_batch_size) == (64, 64)
    assert (made.accumulation_steps, made.logical_ranks) == (1, 1)
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
        *("global_batch_size", "steps_per_epoch", "last_step_samples", "total_steps", "warmup_steps"),
        *("evaluate_every_steps", "evaluation_batch_size", "checkpoint_every_steps"),
    ):
        assert getattr(alone, number) == getattr(many, number), number


def test_logical_ranks_say_the_same_the_other_way_round() -> None:
    made = plan("batch.global_size=256", "parallel.logical_ranks=32", world_size=4)
    assert (made.micro_batch_size, made.accumulation_steps, made.logical_ranks) == (8, 8, 32)
    assert made.reasons["batch.micro_size"] == "256 samples in 32 logical ranks"
    found_in("batch.micro_size", "batch.global_size=64", "parallel.logical_ranks=4", "batch.micro_size=8", value=8)
    found_in("batch.global_size", "batch.global_size=64", "parallel.logical_ranks=9", value=64)
    found_in("batch.global_size", "parallel.logical_ranks=4", value=256, world_size=8)


@pytest.mark.parametrize(("batch", "ranks"), [(64, 8), (12, 6), (63, 7), (61, 1)])
def test_an_exact_run_has_as_many_logical_ranks_in_any_world(batch: int, ranks: int) -> None:
    for world in (each for each in (1, 2, 4, 8) if ranks % each == 0):
        made = plan("parallel.exact=true", f"batch.global_size={batch}", world_size=world)
        assert (made.strategy, made.logical_ranks, made.threads_per_process) == ("exact", ranks, 1)
        assert made.accumulation_steps == ranks // world
        assert "with bit-identical results" in made.reasons["parallel.logical_ranks"]
    found_in("batch.global_size", "parallel.exact=true", f"batch.global_size={batch}", value=batch, world_size=5)
    assert plan("parallel.exact=true", "parallel.threads=4").threads_per_process == 4
    assert "parallel.bucket_cap_mb" in plan("parallel.exact=true", world_size=2).unused
    found_in("parallel.exact", "parallel.exact=true", "parallel.strategy=ddp", value=True, world_size=2)


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
    assert (made.samples_before(made.total_steps), made.epoch_of(made.total_steps - 1)) == (2 * samples, 1)


@settings(max_examples=25)
@given(batch=st.integers(1, 500), world=st.integers(2, 64))
def test_what_an_impossible_world_is_told_does_fit(batch: int, world: int) -> None:
    assume(batch % world)
    with pytest.raises(RecipeError) as caught:
        plan(f"batch.global_size={batch}", world_size=world)
    advised = str(caught.value).split("run it on ")[1].split(" processes")[0].split(", ")
    assert advised
    for size in advised:
        assert plan(f"batch.global_size={batch}", world_size=int(size)).micro_batch_size == batch // int(size)


# Overrides, number of processes, and the key and value that are refused.
IMPOSSIBLE = [
    (["batch.global_size=256"], 3, "batch.global_size", 256),
    (["batch.global_size=64", "batch.micro_size=32"], 4, "batch.global_size", 64),
    (["batch.global_size=100", "batch.micro_size=30"], 1, "batch.global_size", 100),
    (["parallel.strategy=single"], 2, "parallel.strategy", "single"),
    (["parallel.strategy=ddp"], 1, "parallel.strategy", "ddp"),
    (["train.duration=0 steps"], 1, "train.duration", "0 steps"),
    (["train.duration=10%"], 1, "train.duration", "10%"),
    (["train.duration=1e400 steps"], 1, "train.duration", "1e400 steps"),
    (["train.duration=5 steps", "schedule.warmup=6 steps"], 1, "schedule.warmup", "6 steps"),
    (["evaluate.every=0.01 epochs"], 1, "evaluate.every", "0.01 epochs"),
    (["batch.growth={2: 96}", *SIXTY_FOUR], 64, "batch.growth.2", 96),
    (["batch.growth={2: 80}", "batch.micro_size=32", *SIXTY_FOUR], 1, "batch.growth.2", 80),
    (["batch.growth={2: 96}", "parallel.logical_ranks=1", *SIXTY_FOUR], 1, "batch.growth.2", 96),
    (["batch.growth={2: 64}", *SIXTY_FOUR], 1, "batch", {"growth": {2: 64}, "global_size": 64}),
    (["batch.growth={2: 128}", "train.duration=2 epochs", *SIXTY_FOUR], 1, "batch.growth.2", 128),
    (["batch.growth={2: 4096}", "batch.global_size=1024"], 1, "batch.growth.2", 4096),
    (["batch.growth={0: 128}", *SIXTY_FOUR], 1, "batch.growth", 0),
    (["batch.growth={2: 0}", *SIXTY_FOUR], 1, "batch.growth", 0),
]


@pytest.mark.parametrize(("overrides", "world_size", "key", "value"), IMPOSSIBLE)
def test_impossible_combinations(overrides: list[str], world_size: int, key: str, value: Any) -> None:
    found_in(key, *overrides, value=value, world_size=world_size)


def test_no_training_samples() -> None:
    found_in("data.path", samples=0)


ASKED = {"train.precision": "fp32", "model.channels_last": "false", "batch.micro_size": 8, "parallel.threads": 3}


def test_every_auto_has_its_reason() -> None:
    made = plan(machine=GPU, world_size=2)
    assert made.precision == "bf16"
    assert all(made.reasons[key] for key in (*ASKED, "parallel.strategy", "evaluate.batch_size"))
    assert "fast_bf16" not in made.reasons


def test_what_was_asked_needs_no_reason() -> None:
    made = plan(*(f"{key}={value}" for key, value in ASKED.items()), "evaluate.batch_size=7")
    assert (made.precision, made.channels_last, made.threads_per_process) == ("fp32", False, 3)
    assert (made.micro_batch_size, made.evaluation_batch_size) == (8, 7)
    assert ASKED.keys().isdisjoint(made.reasons)


def test_threads_that_are_just_the_share_of_the_cores_are_called_that() -> None:
    launched = dataclasses.replace(CPU, threads=32)
    share, other = plan(world_size=2, machine=launched), plan(world_size=4, machine=launched)
    assert (share.threads_per_process, share.reasons["parallel.threads"]) == (32, "64 cores for 2 processes here")
    assert (other.threads_per_process, other.reasons["parallel.threads"]) == (32, "as OMP_NUM_THREADS says")


def test_single_samples_at_the_end_of_an_epoch_are_told() -> None:
    reason = "batch.tail"
    assert reason not in plan("batch.global_size=64", samples=66).reasons
    assert reason in plan("batch.global_size=64", samples=65).reasons
    assert reason in plan("batch.global_size=64", "batch.micro_size=16", samples=64 + 7).reasons
    assert reason not in plan("batch.global_size=64", "batch.micro_size=16", samples=64 + 8).reasons
    assert reason not in plan("batch.global_size=64", "train.duration=1 steps", samples=65).reasons


# ---------------------------------------------------------------------------------------------- unused keys

MEMORY = {"backend": "memory", "workers": 0}
IN_PROCESS = {"backend": "pytorch", "workers": 0}
WORKERS = {"backend": "pytorch", "workers": 3}


@pytest.mark.parametrize(
    ("overrides", "facts", "key", "why"),
    [
        (["data.prefetch=8"], {"description": MEMORY}, "data.prefetch", "the memory back-end"),
        (["data.workers=2"], {"description": {"backend": "synthetic"}}, "data.workers", "the synthetic back-end"),
        (["data.prefetch=8"], {"description": IN_PROCESS}, "data.prefetch", "no loader processes"),
        ([], {"reasons": {"data.validation_fraction": "val/"}}, "data.validation_fraction", "val/"),
        (["evaluate.top_k=9"], {"reasons": {"evaluate.top_k": "left out"}}, "evaluate.top_k", "left out"),
        (["optimizer.decay_norm_and_bias=true"], {}, "optimizer.decay_norm_and_bias", "weight_decay=0"),
        ([], {"world_size": 1}, "parallel.bucket_cap_mb", "one process"),
        (["evaluate.every=off", "evaluate.metric=loss"], {}, "evaluate.metric", "evaluate.every=off"),
        (["evaluate.every=off", "evaluate.batch_size=3"], {}, "evaluate.batch_size", "evaluate.every=off"),
        ([], {"held_out": 0}, "evaluate.every", "no samples are held out"),
        (["data.mix.epochs=3"], {}, "data.mix.epochs", "nothing is mixed"),
        (["data.mix.mixup=0.2"], {}, "data.mix.switch", "one kind of mixing"),
        (["data.augment.erase_scale=[0.1, 0.2]"], {}, "data.augment.erase_scale", "nothing is erased"),
        (["data.augment.jitter.probability=0.5"], {}, "data.augment.jitter.probability", "no jitter"),
        # It has an effect, or what it asks for is so anyway.
        (["data.prefetch=8"], {"description": WORKERS}, "data.prefetch", None),
        (["data.prefetch=8"], {"description": {"backend": "dali", "workers": 2}}, "data.prefetch", None),
        (["data.prefetch=8"], {}, "data.prefetch", None),  # a task of one's own tells nothing of back-ends
        (["data.workers=2"], {"description": WORKERS}, "data.workers", None),
        (["data.workers=0"], {"description": MEMORY}, "data.workers", None),  # there are none, as asked
        ([], {"description": MEMORY}, "data.workers", None),
        ([], {}, "data.validation_fraction", None),
        (["optimizer.decay_norm_and_bias=false"], {}, "optimizer.decay_norm_and_bias", None),
        (["optimizer={decay_norm_and_bias: true, weight_decay: 0.1}"], {}, "optimizer.decay_norm_and_bias", None),
        (["batch.global_size=64"], {"world_size": 2}, "parallel.bucket_cap_mb", None),
        (["evaluate.every=off"], {}, "evaluate.every", None),
        (["data.mix={mixup: 0.2, cutmix: 1.0}"], {}, "data.mix.switch", None),
        (["data.augment.erase=0.2"], {}, "data.augment.erase_scale", None),
        (["data.augment.jitter.hue=0.1"], {}, "data.augment.jitter.probability", None),
        (["evaluate.every=off"], {}, "evaluate.batch_size", None),
        (["evaluate.every=off", "train.deterministic=true"], {}, "train.deterministic", None),
        ([], {}, "evaluate.metric", None),
    ],
)
def test_a_key_without_effect_here_is_named_and_no_other(overrides: Any, facts: Any, key: str, why: str | None) -> None:
    unused = plan(*overrides, **facts).unused
    assert key not in unused if why is None else why in unused[key]


# ---------------------------------------------------------------------------------------- default processes


@pytest.mark.parametrize(
    ("overrides", "devices", "count"),
    [
        ([], 0, 1),
        ([], 1, 1),
        (["batch.global_size=64"], 8, 8),
        (["batch.global_size=64"], 6, 4),
        (["batch.global_size=64"], 3, 2),
        (["batch.global_size=96"], 7, 6),
        (["batch.global_size=64", "batch.micro_size=16"], 8, 4),
        (["batch.global_size=64", "batch.micro_size=48"], 8, 1),
        (["batch.global_size=7"], 5, 1),
        (["batch.global_size=64", "batch.growth={2: 96}"], 64, 32),
        (["parallel.strategy=single"], 8, 1),
    ],
)
def test_a_run_takes_as_many_devices_as_share_the_batch(overrides: list[str], devices: int, count: int) -> None:
    assert default_processes(recipe(*overrides), devices) == count


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


def test_reasons_of_a_task_of_ones_own_are_no_keys_of_ours() -> None:
    reasons = {"text.vocab": "a", "data.foo": "b", "data.augment.crop": "c", "data.channels": "grey"}
    assert set(plan(reasons=reasons).reasons) & set(reasons) == {"data.channels"}


# ------------------------------------------------------------------------------------- a batch that grows


GROWING = ("batch.global_size=64", "batch.growth={2: 128, 3: 256}", "train.duration=4 epochs")


def test_a_batch_that_grows() -> None:
    """1000 samples: 16 steps an epoch, and 8 and 4 of them later; everything counted in epochs follows."""
    made = plan(*GROWING, "schedule.warmup=50%", "evaluate.every=1 epochs", "checkpoint.every=2 epochs")
    found = [(p.first_epoch, p.first_step, p.global_batch_size, p.logical_ranks) for p in made.batch_phases]
    assert found == [(0, 0, 64, 1), (2, 32, 128, 2), (3, 40, 256, 4)]
    assert [p.steps_per_epoch for p in made.batch_phases] == [16, 8, 4]
    assert (made.micro_batch_size, made.total_steps, made.total_epochs, made.warmup_steps) == (64, 44, 4.0, 22)
    assert [position for position in range(1, 45) if made.is_due("evaluate", position)] == [16, 32, 40, 44]
    assert [position for position in range(1, 45) if made.is_due("checkpoint", position)] == [32, 44]
    assert [position for position in range(1, 45) if made.is_due("log", position)] == [1, 2, 5, 10, 20, 30, 40, 44]
    assert json.loads(json.dumps(made.to_tree()))["moments"] == {"evaluate": [16, 32, 40, 44], "checkpoint": [32, 44]}
    assert plan("batch.global_size=64").moments == {}


@pytest.mark.parametrize(
    ("decay", "first"), [("2 epochs", 32), ("1.5 epochs", 36), ("1000 samples", 40), ("6 steps", 38)]
)
def test_a_decay_is_counted_back_from_the_end(decay: str, first: int) -> None:
    """Of 44 steps, the last epoch has four and the one before it eight."""
    made = plan(*GROWING, *("schedule.name=trapezoid", f"schedule.decay={decay}"))
    assert made.total_steps - made.decay_steps == first
    found_in("schedule.decay", *GROWING, "schedule.name=trapezoid", "schedule.decay=5 epochs", value="5 epochs")


@pytest.mark.parametrize("period", ["1 epoch", "1000 samples"])
def test_a_period_is_no_length_of_changing_steps(period: str) -> None:
    found_in("schedule.period", *GROWING, "schedule.name=cosine", f"schedule.period={period}", value=period)
    assert plan(*GROWING, "schedule.name=cosine", "schedule.period=25%").period_steps == 11
    assert plan("batch.global_size=64", "schedule.name=cosine", f"schedule.period={period}").period_steps == 16


@pytest.mark.parametrize(("rule", "peaks"), [("none", (0.1, 0.1)), ("linear", (0.2, 0.4)), ("sqrt", (0.1414, 0.2))])
def test_the_rate_follows_the_rule_that_was_chosen_and_no_other(rule: str, peaks: tuple[float, ...]) -> None:
    scaling = () if rule == "none" else (f"optimizer.lr_scaling={rule}", "optimizer.lr_reference_batch=64")
    made = plan(*GROWING, *scaling, "optimizer.lr=0.1")
    assert made.peak_lr == pytest.approx(0.1)
    assert made.grown_peak_lrs == pytest.approx(peaks, rel=1e-3)
    reason = made.reasons["batch.growth"]
    if rule == "none":
        assert "128 samples a step from epoch 3 (step 33), peak rate stays 0.1;" in reason
    else:
        assert f"128 samples a step from epoch 3 (step 33), peak rate 0.1 becomes {made.grown_peak_lrs[0]:g};" in reason
    assert reason.endswith(f"(lr_scaling={rule})")


@settings(max_examples=100)
@given(
    first=st.integers(1, 60),
    factors=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    world=st.integers(1, 8),
    samples=st.integers(1, 3000),
    exact=st.booleans(),
)
def test_every_growing_plan_adds_up(first: int, factors: list[int], world: int, samples: int, exact: bool) -> None:
    sizes = [first, *(first * factor // 2 for factor in factors)]
    growth = {2 * index: size for index, size in enumerate(sizes) if index}
    overrides = (f"batch.global_size={first}", f"batch.growth={growth}", f"parallel.exact={str(exact).lower()}")
    pairs = list(pairwise(sizes))
    impossible = 0 in sizes or any(size == following or min(size, following) >= samples for size, following in pairs)
    if exact:  # the most logical ranks up to 8 whose micro-batches make up every size, or as many as it takes
        micros = [first // ranks for ranks in range(1, 9) if first % ranks == 0]
        fitting = [micro for micro in micros if all(size % micro == 0 for size in sizes)]
        micro = min(fitting, default=math.gcd(*sizes))
    else:
        micro = 1
    impossible = impossible or any(size // micro % world for size in sizes)
    try:
        made = plan(*overrides, "train.duration=9 epochs", world_size=world, samples=samples)
    except RecipeError:
        assert impossible
        return
    assert not impossible
    assert made.micro_batch_size == (micro if exact else math.gcd(*sizes) // world)
    for phase, size in zip(made.batch_phases, sizes, strict=True):
        assert phase.logical_ranks * made.micro_batch_size == phase.global_batch_size == size
        assert phase.logical_ranks % world == 0
    assert sum([made.step_samples(position) for position in range(made.total_steps)]) == 9 * samples
    assert made.samples_before(made.total_steps) == 9 * samples


def test_micro_batches_are_as_large_as_all_sizes_allow() -> None:
    """Three micro-batches where there were two: no process's share changes in size."""
    made = plan("batch.global_size=256", "batch.growth={1: 384}", "train.duration=2 epochs", world_size=2)
    assert (made.micro_batch_size, [p.logical_ranks for p in made.batch_phases]) == (64, [4, 6])
    assert made.reasons["batch.micro_size"] == "the largest share over 2 of all sizes that the batch has"
    exact = plan("batch.global_size=256", "batch.growth={1: 384}", "train.duration=2 epochs", "parallel.exact=true")
    assert (exact.micro_batch_size, [p.logical_ranks for p in exact.batch_phases]) == (32, [8, 12])
    assert exact.reasons["parallel.logical_ranks"].startswith("1, 2, 4 processes can share them")


def test_a_growth_is_stored_and_read_again() -> None:
    """JSON knows only text as a key."""
    requested = recipe("batch.growth={30: 128, 4: 96}", "batch.global_size=64")
    again = stored_recipe(json.loads(json.dumps(to_tree(requested))), "stored")
    assert again == requested
    assert again.batch.sizes() == {0: 64, 4: 96, 30: 128}
    assert list(differences(recipe("batch.growth={4: 96}", "batch.global_size=64"), requested)) == ["batch.growth.30"]


def test_the_reference_may_be_another_batch() -> None:
    scaling = ("optimizer.lr_scaling=linear", "optimizer.lr_reference_batch=256", "optimizer.lr=0.1")
    made = plan(*GROWING, *scaling)
    assert (made.peak_lr, made.grown_peak_lrs) == (0.025, (0.05, 0.1))
    # An epoch is less than that batch: the rate is for what a step really has.
    assert plan(*GROWING, *scaling, samples=200).grown_peak_lrs == pytest.approx((0.05, 0.1 * 200 / 256))
