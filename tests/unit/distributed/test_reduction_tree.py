"""The tree: one result for any split of the leaves, few partial sums, and no leaf lost or added twice."""

from __future__ import annotations

from functools import reduce

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.distributed.reduction_tree import Node, PartialSums, nodes_of, total


def add(left: np.float32, right: np.float32) -> np.float32:
    return np.float32(left + right)


def split_sum(values: list[np.float32], cuts: list[int]) -> np.float32:
    """Sum with the leaves held in parts, as processes hold them."""
    held: dict[Node, np.float32] = {}
    for first, last in zip([0, *cuts], [*cuts, len(values)], strict=True):
        sums = PartialSums(add)
        for leaf in range(first, last):
            sums.push(leaf, values[leaf])
        held |= sums.take()
    return total(held, add, leaves=len(values))


@given(st.integers(1, 70), st.data())
def test_any_split_gives_the_same_bits(leaves: int, data: st.DataObject) -> None:
    values = list(np.random.default_rng(leaves).normal(size=leaves).astype(np.float32))
    cuts = sorted(data.draw(st.lists(st.integers(0, leaves), max_size=8)))
    assert split_sum(values, cuts).tobytes() == split_sum(values, []).tobytes()


def test_the_tree_is_not_the_sequence() -> None:
    values = list(np.random.default_rng(0).normal(size=48).astype(np.float32))
    assert split_sum(values, []) != reduce(add, values)


@given(st.integers(0, 100), st.integers(1, 100))
def test_every_leaf_counts_once(first: int, count: int) -> None:
    covered = [
        leaf
        for node in nodes_of(first, first + count)
        for leaf in range(node.first_leaf, node.first_leaf + (1 << node.level))
    ]
    assert covered == list(range(first, first + count))


@pytest.mark.parametrize("count", [1, 2, 8, 64])
def test_aligned_leaves_leave_one_sum(count: int) -> None:
    assert len(nodes_of(5 * count, 6 * count)) == 1


@given(st.integers(0, 1000), st.integers(1, 1000))
def test_few_sums_are_held_at_any_moment(first: int, count: int) -> None:
    sums: PartialSums[int] = PartialSums(lambda left, right: left + right)
    most = 0
    for leaf in range(first, first + count):
        sums.push(leaf, 1)
        most = max(most, len(sums._pending))
    assert most <= 2 * max(1, count.bit_length())
    assert sum(sums.take().values()) == count


def test_what_was_added_is_handed_back() -> None:
    sums = PartialSums(lambda left, right: left + right)
    assert [sums.push(leaf, value) for leaf, value in enumerate(["a", "b", "c", "d"])] == [[], ["b"], [], ["d", "cd"]]
    assert sums.take() == {Node(2, 0): "abcd"}
    assert sums.take() == {}


def test_a_missing_leaf_is_an_error() -> None:
    with pytest.raises(KeyError):
        total({Node(0, 0): 1, Node(0, 2): 1}, lambda left, right: left + right, leaves=3)
