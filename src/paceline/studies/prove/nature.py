"""What is the user's network like? That decides in which numbers it can be proved, and what can be compared."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from paceline.studies.prove.network import dropouts, norms, put_to_rest
from paceline.studies.prove.reference import Plain
from paceline.studies.prove.runs import Runner, shortened

# Of the largest number. A sum in another order differs by some 1e-15 and some 1e-7; a bug by more than 1e-3.
LIMIT_DOUBLE = 1e-12
LIMIT_SINGLE = 1e-5


@dataclass(frozen=True, kw_only=True)
class Nature:
    """A network, as far as its proof depends on it.

    Attributes:
        double: Whether it computes in float64.
        limit: How far gradients may differ.
        numbers: In which numbers it computes, in words.
        norms: BatchNorm layers that normalise by their micro-batch.
        dropouts: Where it drops something at random.
        statistics: Fixed statistics for the norms.
        uncomparable: Why one batch is not the sum of its parts, even at rest; empty if it must be.
    """

    double: bool
    limit: float
    numbers: str
    norms: tuple[str, ...]
    dropouts: tuple[str, ...]
    statistics: Mapping[str, Tensor] = field(default_factory=dict)
    uncomparable: str = ""

    @property
    def is_at_rest(self) -> bool:
        """Whether there is nothing to put to rest."""
        return not self.norms and not self.dropouts

    def rest(self) -> Callable[[nn.Module], None]:
        """What puts such a network to rest."""
        return lambda network: put_to_rest(network, self.statistics)


def look(runner: Runner) -> Nature:
    """Find out what a recipe's network is like, by a few forward and backward passes."""
    whole = shortened(runner.recipe, runner.sizes, micro_batch=runner.sizes.global_batch)
    double, numbers, limit = _numbers(runner)
    runner = replace(runner, double=double)
    with contextlib.closing(Plain(whole, runner.orders("look"))) as plain:
        normed, dropped = norms(plain.network), dropouts(plain.network)
        nature = Nature(
            double=double,
            limit=limit,
            numbers=numbers,
            norms=tuple(normed),
            dropouts=tuple(dict.fromkeys(each.name for each in dropped)),
            statistics=plain.statistics(plain.first_batch()) if normed else {},
        )
    with contextlib.closing(Plain(whole, runner.orders("look-at-rest"), nature.rest())) as plain:
        return replace(nature, uncomparable=_uncomparable(plain, runner.sizes.micro_batch, limit))


def _numbers(runner: Runner) -> tuple[bool, str, float]:
    """Whether the loss can be had in float64, in words, and how far sums in another order may differ."""
    recipe = shortened(runner.recipe, runner.sizes, micro_batch=runner.sizes.micro_batch)
    orders = replace(runner.orders("look-at-numbers"), double=True)
    try:
        with contextlib.closing(Plain(recipe, orders)) as plain:
            loss = plain.loss(plain.first_batch())
            loss.backward()  # type: ignore[no-untyped-call]  # torch
    except (RuntimeError, TypeError, ValueError):
        return False, "float32 (its code does not take float64)", LIMIT_SINGLE
    if loss.dtype == torch.float64:
        return True, "float64", LIMIT_DOUBLE
    return True, f"float64, but the loss in {str(loss.dtype).removeprefix('torch.')}", LIMIT_SINGLE


def _uncomparable(plain: Plain, micro_batch: int, limit: float) -> str:
    batch = plain.first_batch()
    with torch.no_grad():
        draws = {plain.loss(batch, seed).item() for seed in range(3)}
    if len(draws) > 1:
        return "the network or the loss draws random numbers that cannot be switched off"
    part = replace(batch, inputs=batch.inputs[:micro_batch], targets=batch.targets[:micro_batch])
    alone = plain.answers(replace(part, ids=batch.ids[:micro_batch]))
    together = plain.answers(batch)
    if alone is None or together is None:
        return ""
    gap = (alone - together[:micro_batch]).abs().max() / together.abs().max().clamp_min(1e-30)
    return "" if gap <= limit else "the network's answer to a sample depends on the others in its micro-batch"
