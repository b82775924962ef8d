"""What is compiled, in which numbers, and what is refused because this machine has no use for it."""

from __future__ import annotations

import pytest
from golden_sentences import raises
from hypothesis import given
from hypothesis import strategies as st

from paceline.data.order import StepGeometry, evaluation_slices
from paceline.errors import RecipeError
from paceline.host.world import World
from paceline.plan import DataFacts, MachineFacts, Plan, make
from paceline.plan.compute import evaluation_sizes, training_sizes
from paceline.recipe.load import stored_recipe

NO_FP8 = "it needs a CUDA device of compute capability 8.9 or more, and this run is on cpu"
CPU = MachineFacts(
    device="cpu",
    device_name="a processor",
    fast_bf16=False,
    cores=4,
    lacks={"fp8": NO_FP8, "tf32": "cpu has no TF32 products", "bf16_products": "the processor has no bf16 products"},
)
GPU = MachineFacts(device="cuda", device_name="a card", fast_bf16=True, cores=4)
COMPILE = "model.compile=true"


def plan(*overrides: str, machine: MachineFacts = CPU, world_size: int = 1, samples: int = 1000) -> Plan:
    recipe = stored_recipe({"data": {"dataset": "digits"}, "batch": {"global_size": 64}}, "plain", overrides)
    data = DataFacts(train_samples=samples, evaluation_samples=300)
    return make(recipe, world=World(world_size=world_size, local_world_size=world_size), data=data, machine=machine)


def refusal(override: str, *more: str, machine: MachineFacts = CPU) -> RecipeError:
    """The error about the first override, whose sentence is in the golden file."""
    key, _, value = override.partition("=")
    with raises(RecipeError, key=key, value=value) as caught:
        plan(override, *more, machine=machine)
    return caught.value


@given(
    samples=st.integers(1, 300),
    parts=st.integers(1, 8),
    size=st.integers(1, 8),
    held_out=st.integers(0, 100),
    batch=st.integers(1, 40),
    world=st.sampled_from([1, 2, 4]),
)
def test_sizes_are_those_that_the_order_deals_out(
    samples: int, parts: int, size: int, held_out: int, batch: int, world: int
) -> None:
    ranks = parts * world
    geometry = StepGeometry(seed=0, samples=samples, global_batch_size=ranks * size, logical_ranks=ranks)
    worlds = [World(rank=rank, local_rank=rank, world_size=world, local_world_size=world) for rank in range(world)]
    dealt = [
        len(each.ids)
        for one in worlds
        for each in geometry.stream(0, geometry.epochs.phases[0].steps_per_epoch, one)
        if not each.phantom
    ]
    assert sorted(training_sizes(samples, ranks * size, ranks).elements()) == sorted(dealt)
    scored = [len(each.ids) for one in worlds for each in evaluation_slices(held_out, batch, one)]
    assert sorted(evaluation_sizes(held_out, batch).elements()) == sorted(scored)


def test_nothing_is_compiled_unasked() -> None:
    made = plan()
    assert (made.compile, made.compiled_train_sizes, made.compiled_evaluation_sizes) == ("off", (), ())


def test_full_batches_and_frequent_small_ones_are_compiled() -> None:
    # An epoch has 15 steps of 64 and one of 40, which is one in 16; and 300 are scored as 4 of 64 and one of 44.
    made = plan(COMPILE)
    assert made.compile == "inductor, default"
    assert (made.compiled_train_sizes, made.compiled_evaluation_sizes) == ((64, 40), (64, 44))
    assert plan(COMPILE, samples=64 * 25 + 1).compiled_train_sizes == (64,)
    assert plan(COMPILE, "evaluate.every=off").compiled_evaluation_sizes == ()


def test_cuda_graphs_are_recorded_where_they_are_safe() -> None:
    made = plan(COMPILE, "model.compile_mode=reduce-overhead", machine=GPU, world_size=2)
    assert made.compile == "inductor, reduce-overhead"


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
@pytest.mark.parametrize(
    ("overrides", "machine"),
    [
        ((), CPU),
        (("batch.micro_size=16",), GPU),
        (("data.progressive.start_size=4",), GPU),
        (("parallel.exact=true", "parallel.logical_ranks=1"), GPU),
    ],
)
def test_cuda_graphs_are_refused_where_they_are_not(
    mode: str, overrides: tuple[str, ...], machine: MachineFacts
) -> None:
    message = str(refusal(f"model.compile_mode={mode}", COMPILE, *overrides, machine=machine))
    # The one mode that records none still has all the rest.
    plan(COMPILE, f"model.compile_mode={message.rpartition('use model.compile_mode=')[2].split()[0].strip('.,')}")


def test_kernels_chosen_by_the_clock_are_refused_where_sums_must_repeat() -> None:
    refusal("model.compile_mode=max-autotune-no-cudagraphs", COMPILE, "train.deterministic=true")


def test_a_mode_without_compiling_has_no_effect() -> None:
    assert refusal("model.compile_mode=max-autotune").rule == "with effect"


def test_fp32_products_are_torch_s_own_unless_asked() -> None:
    assert plan().float32_matmul == "default"
    assert "TF32 for convolutions" in plan(machine=GPU).reasons["train.float32_matmul"]
    assert plan("train.float32_matmul=high", machine=GPU).float32_matmul == "high"
    assert plan("train.float32_matmul=highest").float32_matmul == "highest"


@pytest.mark.parametrize("requested", ["high", "medium"])
def test_products_that_this_machine_does_not_have_are_refused(requested: str) -> None:
    refusal(f"train.float32_matmul={requested}")


def test_fp8_is_refused_with_the_reason() -> None:
    refusal("train.precision=fp8")
    assert plan("train.precision=fp8", machine=GPU).precision == "fp8"
