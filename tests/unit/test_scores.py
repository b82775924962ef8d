"""Scores over ranks: each sample once, and correctly rounded sums."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from golden_sentences import check_sentence, raises

from paceline.errors import DataError
from paceline.scores import ExactMean, collect


@pytest.mark.everyday
def test_mean_does_not_depend_on_batches_or_order() -> None:
    values = torch.tensor([1e16, 1.0, -1e16, 3.0], dtype=torch.float64)
    for cut in range(5):
        mean = ExactMean()
        for part in (slice(cut, 4), slice(cut)):
            mean.add(values[part], torch.arange(4)[part])
        assert (mean.result(), mean.samples) == (1.0, 4)


def test_sample_of_a_padded_batch_counts_once() -> None:
    mean = ExactMean()
    mean.add(torch.tensor([True, False, True]), torch.tensor([0, 1, 2]))
    mean.add(torch.tensor([True, True]), torch.tensor([2, 0]))
    assert (mean.result(), mean.samples) == (2 / 3, 3)


def test_mean_without_samples_is_nan() -> None:
    assert math.isnan(ExactMean().result())


def test_values_are_collected_in_order_of_ids() -> None:
    scores, targets = collect(
        torch.tensor([5, 3, 5]), torch.tensor([[1.0], [2.0], [9.0]], dtype=torch.bfloat16), torch.tensor([7, 8, 9])
    )
    assert (scores.dtype, scores.tolist(), targets.tolist()) == (torch.bfloat16, [[2.0], [1.0]], [8, 7])


@pytest.mark.parametrize(
    "arguments",
    [
        (torch.tensor([0.0]), torch.tensor([1.0])),
        (torch.tensor([0, 1]), torch.tensor([1.0])),
        (torch.tensor([-1]), torch.tensor([1.0])),
        (torch.tensor([True]), torch.tensor([1.0])),
        (torch.tensor([0, 1]), torch.tensor(1.0)),
    ],
)
def test_wrong_ids_are_refused(arguments: tuple[torch.Tensor, torch.Tensor]) -> None:
    with pytest.raises(DataError) as caught:
        collect(*arguments)
    check_sentence(caught.value)


@pytest.mark.parametrize(
    ("values", "ids", "key"),
    [
        (torch.zeros(2, 3), torch.arange(2), "values"),
        ([1.0], [0, 1], "values"),
        (1.0, 1, "values"),
        ("ab", [0, 1], "values"),
        (None, [0], "values"),
        ([1.0], "a", "ids"),
        ([1j], [0], "values"),
    ],
)
def test_values_without_one_id_each_are_refused(values: Any, ids: Any, key: str) -> None:
    with raises(DataError, key=key):
        ExactMean().add(values, ids)


def test_lists_are_taken_too() -> None:
    mean = ExactMean()
    mean.add([1.0, 3.0], [0, 1])
    assert mean.result() == 2.0
