"""Whatever a batch is made of, each of its tensors is reached, and the structure stays."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch

from paceline.data.batch import Batch, Placement, joined_along_samples, mapped, rows_of, tensors_in, to_device
from paceline.data.slices import SampleSlice


class Pair(NamedTuple):
    first: torch.Tensor
    second: list[torch.Tensor]


def nested(start: int = 0) -> dict[str, object]:
    return {
        "plain": torch.arange(start, start + 2),
        "pair": Pair(torch.full((2, 3), start), [torch.tensor([start]), torch.tensor([start, start])]),
        "tuple": (torch.zeros(2), "a name"),
    }


def test_every_tensor_is_reached_and_the_structure_stays() -> None:
    before = nested(1)
    after = mapped(lambda tensor: tensor + 1, before)
    assert [each.tolist() for each in tensors_in(after)] == [(each + 1).tolist() for each in tensors_in(before)]
    assert len(list(tensors_in(before))) == 5
    assert isinstance(after["pair"], Pair)
    assert after["tuple"][1] == "a name"
    assert rows_of(before) == 2
    assert rows_of({"list": [torch.zeros(3, 4), torch.zeros(3, 5)]}) == 2  # one for each sample
    assert rows_of(("no tensor",)) is None


def test_parts_are_put_together_along_their_samples() -> None:
    joined = joined_along_samples([nested(0), nested(5)])
    assert joined["plain"].tolist() == [0, 1, 5, 6]
    assert joined["pair"].first.shape == (4, 3)
    # A list has an entry for each sample: they follow one another, whatever their shapes.
    assert [each.tolist() for each in joined["pair"].second] == [[0], [0, 0], [5], [5, 5]]
    assert joined["tuple"][0].shape == (4,)


@pytest.mark.parametrize("broken", [False, True])
def test_nested_batches_reach_the_device(*, broken: bool) -> None:
    """Where no sample could be read, a blank one stands in for all, in every tensor."""
    ids = np.arange(0 if broken else 2)
    piece = SampleSlice(step=0, epoch=0, logical_rank=0, ids=np.arange(2), step_weight=2)
    inputs = {"tokens": torch.ones(len(ids), 4, dtype=torch.int64), "more": (torch.ones(len(ids)),)}
    batch = Batch(inputs, torch.ones(len(ids), 4), ids, piece)
    placement = Placement(device=torch.device("cpu"))
    (moved,) = to_device(iter([batch]), lambda each: mapped(lambda tensor: tensor * 3, each), placement)
    assert moved.inputs["tokens"].tolist() == ([[0] * 4] if broken else [[3] * 4] * 2)
    assert moved.inputs["more"][0].shape == moved.targets.shape[:1]
    assert moved.weight == len(ids)
