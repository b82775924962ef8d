"""A fixed order of addition, so that a sum is the same for any number of processes.

The parts are the leaves of a binary tree whose shape depends only on their number: node ``(level, place)`` covers the
leaves ``[place * 2**level, (place + 1) * 2**level)``. Floating-point addition is commutative but not associative;
adding along a fixed tree gives the same result wherever each addition happens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Node(NamedTuple):
    """A node of the tree; level 0 holds the leaves."""

    level: int
    position: int

    @property
    def first_leaf(self) -> int:
        """The leftmost leaf below this node."""
        return self.position << self.level


class PartialSums(Generic[T]):
    """Adds leaves in order as they arrive, and keeps as few partial sums as the tree allows.

    Of ``n`` consecutive leaves at most ``2 * log2(n)`` partial sums are held; if they begin at a multiple of a power
    of two not below ``n``, at most ``log2(n) + 1``.

    Args:
        add: Returns the sum of two values, left and right; it may overwrite the left one.
    """

    def __init__(self, add: Callable[[T, T], T]) -> None:
        self._add = add
        self._pending: list[tuple[Node, T]] = []

    def push(self, leaf: int, value: T) -> list[T]:
        """Add a leaf; returns the values that were added to others and can be reused."""
        free: list[T] = []
        self._pending.append((Node(0, leaf), value))
        while len(self._pending) > 1 and _are_siblings(self._pending[-2][0], self._pending[-1][0]):
            node, right = self._pending.pop()
            _, left = self._pending.pop()
            self._pending.append((Node(node.level + 1, node.position >> 1), self._add(left, right)))
            free.append(right)
        return free

    def take(self) -> dict[Node, T]:
        """Return the partial sums, from left to right, and clear them."""
        sums, self._pending = dict(self._pending), []
        return sums


def _are_siblings(left: Node, right: Node) -> bool:
    return left.level == right.level and left.position % 2 == 0 and right.position == left.position + 1


@lru_cache(maxsize=64)
def nodes_of(first: int, last: int) -> tuple[Node, ...]:
    """Return the nodes of the partial sums left after pushing the leaves ``first`` to ``last`` (excluded)."""
    sums: PartialSums[None] = PartialSums(lambda left, right: None)
    for leaf in range(first, last):
        sums.push(leaf, None)
    return tuple(sums.take())


def total(values: Mapping[Node, T], add: Callable[[T, T], T], *, leaves: int) -> T:
    """Add partial sums that together cover the leaves 0 to ``leaves`` (excluded).

    Raises:
        KeyError: If they do not cover them.
    """
    top = Node((leaves - 1).bit_length(), 0)

    def value(node: Node) -> T | None:
        if node in values:
            return values[node]
        if node.first_leaf >= leaves:
            return None
        if node.level == 0:
            raise KeyError(node)
        left = value(Node(node.level - 1, 2 * node.position))
        right = value(Node(node.level - 1, 2 * node.position + 1))
        # A node without leaves on its right equals its left child: nothing is added.
        return left if right is None or left is None else add(left, right)

    root = value(top)
    assert root is not None
    return root
