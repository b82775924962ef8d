"""Sums and counts come out the same however the samples are cut into batches and shared among processes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.metrics.accumulator import Accumulator, Metric

CPU = torch.device("cpu")
METRICS = (Metric(name="loss"), Metric(name="top1_accuracy", scale=100.0, higher_is_better=True))


def filled(losses: torch.Tensor, correct: torch.Tensor, sizes: list[int]) -> Accumulator:
    made = Accumulator(METRICS, CPU)
    for loss, right in zip(losses.split(sizes), correct.split(sizes), strict=True):
        made.add({"loss": loss, "top1_accuracy": right})
    return made


def cut(total: int, pieces: list[int]) -> list[int]:
    sizes = []
    for piece in pieces:
        sizes.append(min(piece, total - sum(sizes)))
    return [*sizes, total - sum(sizes)]


@given(st.lists(st.integers(0, 40), max_size=12), st.integers(1, 200), st.integers(1, 8))
def test_batches_and_processes_are_invisible(pieces: list[int], samples: int, world_size: int) -> None:
    torch.manual_seed(samples)
    losses, correct = torch.randn(samples) * 10, torch.rand(samples) < 0.3
    whole = Accumulator(METRICS, CPU)
    whole.add({"loss": losses, "top1_accuracy": correct})
    count, expected = whole.results(whole.rows())

    parts = filled(losses, correct, cut(samples, pieces))
    assert parts.results(parts.rows())[0] == count == samples

    # Batches are the same for any number of processes; whose they are, and in which order they come, is not.
    rows = parts.rows()
    shared = [row for rank in range(world_size) for row in rows[rank::world_size]]
    assert parts.results(shared) == parts.results(rows)
    count, values = parts.results(rows)
    assert count == samples
    assert values["top1_accuracy"] == expected["top1_accuracy"] == 100 * int(correct.sum()) / samples
    assert values["loss"] == pytest.approx(expected["loss"], rel=1e-12, abs=1e-12)


def test_small_values_are_not_lost_in_a_large_sum() -> None:
    made = Accumulator(METRICS, CPU)
    for _ in range(1000):
        made.add({"loss": torch.full((1000,), 1e-3), "top1_accuracy": torch.ones(1000, dtype=torch.bool)})
    made.add({"loss": torch.tensor([2.0**26]), "top1_accuracy": torch.ones(1, dtype=torch.bool)})
    made.add({"loss": torch.tensor([1.0]), "top1_accuracy": torch.ones(1, dtype=torch.bool)})
    count, values = made.results(made.rows())
    assert count == 1_000_002
    assert values["loss"] * count == pytest.approx(2**26 + 1000 + 1, rel=1e-9)
    assert values["top1_accuracy"] == 100.0


def test_low_precision_values_are_summed_in_float64() -> None:
    made = Accumulator((METRICS[0],), CPU)
    made.add({"loss": torch.full((5000,), 1.0, dtype=torch.bfloat16)})  # whose sums stop at 256
    assert made.results(made.rows()) == (5000, {"loss": 1.0})


def test_no_samples_are_no_number() -> None:
    made = Accumulator(METRICS, CPU)
    count, values = made.results(made.rows())
    assert count == 0
    assert all(math.isnan(value) for value in values.values())


def test_infinities_of_both_signs_are_no_number() -> None:
    made = filled(torch.tensor([math.inf, -math.inf]), torch.tensor([True, False]), [1, 1])
    assert math.isnan(made.results(made.rows())[1]["loss"])


def test_a_loss_that_is_no_number_shows() -> None:
    made = filled(torch.tensor([1.0, float("nan")]), torch.tensor([True, False]), [2])
    values = made.results(made.rows())[1]
    assert math.isnan(values["loss"])
    assert values["top1_accuracy"] == 50.0


def test_a_metric_may_divide_by_another_sum_than_the_samples() -> None:
    """Nats per token: of samples of 1 and 9 tokens, no mean of means."""
    per_token = (Metric(name="loss", per="tokens"), Metric(name="bits", of="loss", per="tokens", scale=1 / math.log(2)))
    values = {"loss": torch.tensor([2.0, 9.0]), "tokens": torch.tensor([1, 9])}
    made = Accumulator((*per_token, Metric(name="area", is_collected=True)), CPU)
    made.add(values)
    assert made.results(made.rows()) == (2, {"loss": 1.1, "bits": pytest.approx(1.1 / math.log(2))})
    halves = Accumulator(per_token, CPU)
    for half in range(2):
        halves.add({name: each[half : half + 1] for name, each in values.items()})
    assert halves.results(halves.rows())[1]["loss"] == 1.1


def test_a_mean_over_nothing_is_no_number() -> None:
    made = Accumulator((Metric(name="loss", per="tokens"),), CPU)
    made.add({"loss": torch.zeros(2), "tokens": torch.zeros(2)})
    assert math.isnan(made.results(made.rows())[1]["loss"])
