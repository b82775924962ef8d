"""The batch sampler for other loops: pure, exact over ranks, and never silently at the wrong step."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from golden_sentences import check_sentence, raises
from torch.utils.data import BatchSampler, DataLoader

from paceline.data.order import epoch_order
from paceline.errors import CheckpointError, DataError, LaunchError, PacelineError
from paceline.order import BatchOrder


def used(order: BatchOrder, batches: int) -> list[list[int]]:
    """Read and count some batches."""
    found = []
    while len(found) < batches:
        for ids in order:
            found.append(ids)
            order.step += 1
            if len(found) == batches:
                break
    return found


@pytest.mark.everyday
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("samples", [6, 64, 65, 71])
def test_each_sample_once_per_epoch_whatever_the_number_of_ranks(samples: int, world_size: int) -> None:
    orders = [BatchOrder(samples, 6, seed=3, rank=rank, world_size=world_size) for rank in range(world_size)]
    for epoch in range(2):
        ranks = [used(order, len(order)) for order in orders]
        steps = [[each for ids in step for each in ids] for step in zip(*ranks, strict=True)]
        expected = epoch_order(3, epoch, samples).tolist()
        assert [each for step in steps[:-1] for each in step] == expected[: 6 * (len(steps) - 1)]
        # Ranks without a sample of the last batch repeat one of it.
        assert list(dict.fromkeys(steps[-1])) == expected[6 * (len(steps) - 1) :]
        assert len(steps[-1]) == max(world_size, len(expected) - 6 * (len(steps) - 1))


def test_a_torch_data_loader_takes_it() -> None:
    order = BatchOrder(10, 4, seed=1, rank=0, world_size=1)
    loader = DataLoader(range(10), batch_sampler=order)
    assert isinstance(order, BatchSampler)
    assert len(loader) == 3
    assert torch.cat(list(loader)).tolist() == epoch_order(1, 0, 10).tolist()


@pytest.mark.everyday
def test_state_says_what_was_used_and_not_what_workers_have_read_ahead() -> None:
    whole = used(BatchOrder(30, 4, seed=2, rank=0, world_size=1), 24)
    order = BatchOrder(30, 4, seed=2, rank=0, world_size=1)
    states = []
    for batch in DataLoader(range(30), batch_sampler=order, num_workers=2, prefetch_factor=2):
        assert batch.tolist() == whole[order.step]
        order.step += 1
        states.append(order.state_dict())
    for state in states:
        other = BatchOrder(30, 4, seed=2, rank=0, world_size=1)
        other.load_state_dict(state)
        assert used(other, 8) == whole[state["step"] : state["step"] + 8]


def test_resume_with_another_number_of_ranks() -> None:
    alone, pair = BatchOrder(30, 4, seed=2, rank=0, world_size=1), BatchOrder(30, 4, seed=2, rank=1, world_size=2)
    used(alone, 3)
    pair.load_state_dict(alone.state_dict())
    assert used(pair, 1)[0] == used(alone, 1)[0][2:]


def test_incomplete_batch_is_dropped() -> None:
    order = BatchOrder(11, 4, seed=1, rank=0, world_size=1, drop_last=True)
    assert [len(each) for each in used(order, 5)] == [4] * 5
    assert (order.epoch, len(order)) == (2, 2)
    assert used(order, 1)[0] == epoch_order(1, 2, 11)[4:8].tolist()


def test_set_epoch_moves_forward_only() -> None:
    order = BatchOrder(12, 4, seed=1, rank=0, world_size=1)
    used(order, 1)
    order.set_epoch(0)
    assert order.step == 1
    order.set_epoch(2)
    assert order.step == 6
    assert next(iter(order)) == epoch_order(1, 2, 12)[:4].tolist()
    with pytest.raises(DataError) as caught:
        order.set_epoch(0)
    check_sentence(caught.value)
    order.set_epoch(np.int64(3))  # type: ignore[arg-type]
    other = BatchOrder(12, 4, seed=1, rank=0, world_size=1)
    other.load_state_dict(order.state_dict())
    assert other.step == 9


def test_an_epoch_that_would_be_repeated_is_refused() -> None:
    order = BatchOrder(12, 4, seed=1, rank=0, world_size=1)
    assert len(list(order)) == 3
    with pytest.raises(DataError) as caught:
        list(order)
    check_sentence(caught.value)
    order.set_epoch(0)
    assert len(list(order)) == 3


@pytest.mark.parametrize("counted", [0, 3])
def test_steps_that_are_not_counted_once_are_refused(counted: int) -> None:
    order = BatchOrder(12, 4, seed=1, rank=0, world_size=1)
    reader = iter(order)
    next(reader), next(reader)
    order.step += counted
    with pytest.raises(DataError) as caught:
        order.state_dict()
    check_sentence(caught.value)


def test_ranks_that_a_library_would_share_out_again_are_refused() -> None:
    with pytest.raises(DataError) as caught:
        _ = BatchOrder(12, 4, seed=1, rank=0, world_size=2).batch_size
    check_sentence(caught.value)
    assert BatchOrder(12, 4, seed=1, rank=0, world_size=1).batch_size == 4


@pytest.mark.parametrize(
    ("name", "value"), [("samples", 11), ("seed", 2), ("batch_size", 3), ("drop_last", True), ("step", None)]
)
def test_state_of_another_order_is_refused(name: str, value: Any) -> None:
    order = BatchOrder(12, 4, seed=1, rank=0, world_size=1)
    state = {**order.state_dict(), name: value}
    with pytest.raises(CheckpointError) as caught:
        order.load_state_dict(state)
    check_sentence(caught.value)
    assert order.step == 0


@pytest.mark.parametrize(
    ("arguments", "kind", "key"),
    [
        ({"samples": 0}, DataError, "samples"),
        ({"samples": "12"}, DataError, "samples"),
        ({"samples": 12.0}, DataError, "samples"),
        ({"batch_size": 0}, DataError, "batch_size"),
        ({"batch_size": None}, DataError, "batch_size"),
        ({"batch_size": 2, "world_size": 3}, DataError, "batch_size"),
        ({"seed": -1}, DataError, "seed"),
        ({"seed": 2**64}, DataError, "seed"),
        ({"rank": 1}, LaunchError, "rank"),
        ({"rank": "0"}, LaunchError, "rank"),
        ({"world_size": 0}, LaunchError, "world_size"),
    ],
)
def test_arguments_of_another_kind_or_range_are_refused(
    arguments: dict[str, Any], kind: type[PacelineError], key: str
) -> None:
    with raises(kind, key=key, value=arguments[key]):
        BatchOrder(**{"samples": 12, "batch_size": 4, "seed": 1, "rank": 0, "world_size": 1, **arguments})


def test_a_data_set_smaller_than_a_batch_leaves_no_order_without_it() -> None:
    with raises(DataError, key="batch_size", value=4):
        BatchOrder(3, 4, rank=0, world_size=1, drop_last=True)


def test_what_is_no_epoch_or_no_state_is_refused() -> None:
    order = BatchOrder(12, 4, seed=1, rank=0, world_size=1)
    with raises(DataError, key="epoch", value="1"):
        order.set_epoch("1")  # type: ignore[arg-type]
    with raises(CheckpointError):
        order.load_state_dict(None)  # type: ignore[arg-type]


def test_rank_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert (BatchOrder(12, 4, seed=1).rank, BatchOrder(12, 4, seed=1).world_size) == (1, 2)
    assert BatchOrder(12, 4, seed=1, rank=0).rank == 0
    with pytest.raises(LaunchError) as caught:
        BatchOrder(12, 4, seed=1, rank=2)
    check_sentence(caught.value)
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("WORLD_SIZE")
    assert BatchOrder(12, 4, seed=1).world_size == 1


def test_an_order_made_before_the_ranks_were_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    order = BatchOrder(12, 4, seed=1)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(DataError) as caught:
        list(order)
    check_sentence(caught.value)


@pytest.mark.everyday
def test_small_parts_import_little() -> None:
    heavy = ["timm", "torchvision", "plotly", "sklearn", "pydantic", "paceline.recipe", "paceline.trainer"]
    names = ["order", "checkpoints", "ledger", "scores"]
    imports = "\n".join(f"import paceline.{each}" for each in names)
    program = f"import sys\n{imports}\nprint([each for each in {heavy} if each in sys.modules])"
    found = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "[]"


def test_order_differs_between_epochs() -> None:
    order = BatchOrder(64, 64, seed=1, rank=0, world_size=1)
    assert all(first != second for first, second in pairwise(used(order, 4)))
