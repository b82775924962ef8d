"""Where a step lies in epochs of changing batch sizes, against counting it out step by step."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.parsing.units import Duration
from paceline.plan.epochs import Epochs

Sizes = list[tuple[int, int, int]]


@st.composite
def growths(draw: Any) -> tuple[int, Sizes]:
    """Samples per epoch, and up to three later sizes; larger ones, smaller ones, and larger than the data."""
    epochs = [0, *itertools.accumulate(draw(st.lists(st.integers(1, 4), max_size=3)))]
    sizes = draw(st.lists(st.integers(1, 70), min_size=len(epochs), max_size=len(epochs)))
    return draw(st.integers(1, 60)), [(epoch, size, 1) for epoch, size in zip(epochs, sizes, strict=True)]


def counted_out(samples: int, sizes: Sizes, epochs: int) -> list[tuple[int, int, int]]:
    """(epoch, step within it, samples) of each step, by taking samples away until an epoch has none left."""
    steps = []
    for epoch in range(epochs):
        size = [size for first, size, _ in sizes if first <= epoch][-1]
        left, within = samples, 0
        while left > 0:
            steps.append((epoch, within, min(size, left)))
            left, within = left - size, within + 1
    return steps


@given(growths())
def test_each_step_lies_where_counting_finds_it(drawn: tuple[int, Sizes]) -> None:
    samples, sizes = drawn
    epochs = Epochs.cut(samples, sizes)
    expected = counted_out(samples, sizes, 16)
    used = 0
    for step, (epoch, within, size) in enumerate(expected):
        assert epochs.locate(step) == (epoch, within)
        assert epochs.step_samples(step) == size
        assert epochs.samples_before(step) == used
        assert epochs.first_step(epoch) == step - within
        assert epochs.completed(step) == epoch
        in_epoch = sum(each == epoch for each, _, _ in expected)
        assert epochs.length(step) == pytest.approx(epoch + within / in_epoch)
        assert epochs.phase_at(step) == epochs.phase_of_epoch(epoch)
        used += size
    assert used == 16 * samples


@given(growths())
def test_the_last_step_of_each_phase(drawn: tuple[int, Sizes]) -> None:
    samples, sizes = drawn
    epochs, steps = Epochs.cut(samples, sizes), counted_out(samples, sizes, 16)
    for phase in epochs.phases:
        of_epoch = [size for epoch, _, size in steps if epoch == phase.first_epoch]
        assert (phase.steps_per_epoch, epochs.last_step_samples(phase)) == (len(of_epoch), of_epoch[-1])
        whole = phase.first_step + phase.steps_per_epoch
        assert phase in epochs.finished_phases(whole)
        assert phase not in epochs.finished_phases(whole - 1)


@given(growths(), st.integers(0, 60), st.sampled_from(["epochs", "samples", "steps"]))
def test_a_length_is_as_many_steps_as_it_takes(drawn: tuple[int, Sizes], quarter: int, unit: Any) -> None:
    samples, sizes = drawn
    epochs, steps = Epochs.cut(samples, sizes), counted_out(samples, sizes, 16)
    if unit == "steps":
        assert epochs.steps_in(Duration(quarter, "steps"), None) == quarter
    elif unit == "samples":
        expected = quarter * samples // 4
        used = itertools.accumulate((size for _, _, size in steps), initial=0)
        assert epochs.steps_in(Duration(expected, "samples"), None) == next(
            count for count, done in enumerate(used) if done >= expected
        )
    else:
        whole, part = divmod(Fraction(quarter, 4), 1)
        before = sum(epoch < whole for epoch, _, _ in steps)
        within = sum(epoch == whole for epoch, _, _ in steps)
        found = epochs.steps_in(Duration(quarter / 4, "epochs"), None)
        assert abs(found - (before + part * within)) <= Fraction(1, 2)


@given(growths(), st.integers(0, 40), st.integers(1, 40), st.sampled_from(["epochs", "samples", "steps"]))
def test_a_length_at_the_end_is_the_last_steps_that_have_it(
    drawn: tuple[int, Sizes], at: int, of: int, unit: Any
) -> None:
    """Counted back step by step: as many whole epochs, or as few steps as have so many samples."""
    samples, sizes = drawn
    epochs, steps = Epochs.cut(samples, sizes), counted_out(samples, sizes, 16)
    total = sum(epoch < 12 for epoch, _, _ in steps)
    last = steps[:total]
    if unit == "steps":
        assert epochs.steps_at_end(Duration(at, "steps"), total) == at
    elif unit == "samples":
        expected = at * 12 * samples // of
        used = list(itertools.accumulate((size for _, _, size in reversed(last)), initial=0))
        found = epochs.steps_at_end(Duration(expected, "samples"), total)
        enough = [count for count, done in enumerate(used) if done >= expected]
        if len(sizes) > 1:  # of one size, whole steps are counted, as a length from the start is
            assert found == enough[0] if enough else found > total
    else:
        found = epochs.steps_at_end(Duration(at, "epochs"), total)
        assert found == sum(epoch >= 12 - at for epoch, _, _ in last) if at <= 12 else found > total


@given(growths(), st.integers(1, 5))
def test_every_so_many_epochs_is_at_their_ends(drawn: tuple[int, Sizes], every: int) -> None:
    samples, sizes = drawn
    epochs, steps = Epochs.cut(samples, sizes), counted_out(samples, sizes, 16)
    found = epochs.due_steps(Duration(every, "epochs"), len(steps))
    if len(sizes) == 1:
        assert found == ()
        return
    ends = [count for count, (epoch, _, _) in enumerate(steps[1:], 1) if epoch > steps[count - 1][0]] + [len(steps)]
    assert found == tuple(ends[every - 1 :: every])
    assert epochs.due_steps(Duration(every, "steps"), len(steps)) == ()


def test_parts_of_epochs_follow_their_size() -> None:
    """Twice an epoch: every two steps of four, then every step of two."""
    epochs = Epochs.cut(16, [(0, 4, 1), (2, 8, 2)])
    assert epochs.due_steps(Duration(0.5, "epochs"), 12) == (2, 4, 6, 8, 9, 10, 11, 12)
    assert Epochs.cut(20, [(0, 4, 1)]).due_steps(Duration(0.5, "epochs"), 15) == (2, 5, 8, 10, 12, 15)
    assert Epochs.cut(20, [(0, 4, 1)]).due_steps(Duration(10, "percent"), 15) == (2, 3, 4, 6, 8, 9, 10, 12, 14, 15)
    # 24, 48 and 72 of them: one and a half, three, and four and a half epochs.
    assert epochs.due_steps(Duration(24, "samples"), 14) == (6, 10, 13)
