"""What is recorded of the numbers that a network is given to score?"""

from __future__ import annotations

import pytest
import torch

from paceline.trainer.evaluate import InputStatistics, mean_and_std


def _of(*batches: object) -> list[tuple[float, ...]]:
    found = InputStatistics()
    for each in batches:
        found.add(each)
    return found.rows()


def test_mean_and_spread_are_those_of_all_numbers_however_they_are_shared_out() -> None:
    images = 3 + 2 * torch.randn(50, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    whole = mean_and_std([_of(images)])
    assert whole["input_mean"] == pytest.approx(float(images.mean()), abs=1e-5)
    assert whole["input_std"] == pytest.approx(float(images.std(correction=0)), abs=1e-5)
    assert mean_and_std([_of(images[:7], images[7:20]), [], _of(images[20:])]) == whole
    last = images.contiguous(memory_format=torch.channels_last)
    assert mean_and_std([_of(last)]) == pytest.approx(whole, abs=2e-6)


def test_of_structures_the_floating_point_numbers_count() -> None:
    pictures = [torch.zeros(3, 2, 2), torch.ones(3, 2, 2)]
    tokens = torch.full((4, 5), 1000)
    assert mean_and_std([_of({"pictures": pictures, "tokens": tokens})]) == {"input_mean": 0.5, "input_std": 0.5}
    assert mean_and_std([_of(tokens)]) == {}
    assert mean_and_std([]) == {}
    assert mean_and_std([_of(torch.tensor([1.0, 3.0]), torch.tensor(2.0))])["input_mean"] == 2.0


def test_numbers_in_half_precision_are_added_up_in_full() -> None:
    assert mean_and_std([_of(torch.full((4096, 64), 0.5, dtype=torch.bfloat16))]) == {
        "input_mean": 0.5,
        "input_std": 0.0,
    }


def test_whatever_a_network_of_ones_own_is_given_an_evaluation_goes_on() -> None:
    double = torch.tensor([[1.0, 3.0]], dtype=torch.float64)
    assert mean_and_std([_of(double)]) == {"input_mean": 2.0, "input_std": 1.0}
    assert mean_and_std([_of({"a": double, "b": torch.eye(3).to_sparse()})]) == {"input_mean": 2.0, "input_std": 1.0}
    infinite = torch.tensor([[float("inf"), 1.0], [-float("inf"), 1.0]])
    assert mean_and_std([_of(infinite), _of(double)]) == {}
