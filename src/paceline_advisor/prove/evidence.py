"""Evidence for the checks: the runs, and the numerical properties of the network."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from paceline.data.batch import Batch
from paceline.errors import RecipeError
from paceline.optim.embedding_optim import has_sparse_gradients
from paceline.plan import Plan
from paceline.recipe.schema import Recipe
from paceline_advisor.prove.notes import Observed, copies_of, rows_of
from paceline_advisor.prove.reference import Plain, difference, dropouts, norms, put_to_rest
from paceline_advisor.prove.runs import Runner, Sizes, shortened

# Allowed difference of gradients, relative to the largest value: typical, and maximum. Another order of summation
# differs by about 1e-15 in float64 and 1e-7 in float32, more in deep networks; an error differs by more than 1e-3.
_LIMITS = {True: (1e-12, 1e-6), False: (1e-5, 1e-3)}
_TIMES_THE_NOISE = 100


@dataclass(frozen=True, kw_only=True)
class Nature:
    """Properties of a network that its proof depends on.

    Attributes:
        double: Whether it computes in float64.
        limit: Allowed difference of gradients, relative to the largest value.
        numbers: Its precision, in words.
        norms: Names of the BatchNorm layers that normalise by their micro-batch.
        dropouts: Names of the modules with random dropout.
        statistics: Fixed statistics for the norms, by buffer name.
        uncomparable: Why the gradient of a batch may differ from that of its micro-batches, even without dropout and
            with fixed statistics; empty if they must agree.
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
        """Whether the network needs no changes to be deterministic."""
        return not self.norms and not self.dropouts

    @property
    def rest(self) -> Callable[[nn.Module], None] | None:
        """Return a function that makes such a network deterministic; None if no change is needed."""
        return None if self.is_at_rest else lambda network: put_to_rest(network, self.statistics)


def look(runner: Runner) -> Nature:
    """Examine a recipe's network by a few forward and backward passes.

    Raises:
        RecipeError: If its gradients are sparse.
    """
    whole = shortened(runner.recipe, runner.sizes, micro_batch=runner.sizes.global_batch)
    double, numbers, usual, most = _numbers(runner)
    runner = replace(runner, double=double)
    with contextlib.closing(Plain(whole, runner.orders("look"))) as plain:
        if has_sparse_gradients(plain.network):
            raise RecipeError(
                "prove compares gradients number by number, and sparse ones are not supported yet; prove the recipe "
                "with dense ones (model.options={sparse: false}), which give the same result."
            )
        normed, dropped, batch = norms(plain.network), dropouts(plain.network), plain.first_batch()
        nature = Nature(
            double=double,
            limit=usual,
            numbers=numbers,
            norms=tuple(normed),
            dropouts=tuple(dict.fromkeys(each.name for each in dropped)),
            statistics=plain.statistics(batch) if normed else {},
        )
        for each in dropped:
            each.set(0.0)
        noise = _noise(plain, batch)
    with contextlib.closing(Plain(whole, runner.orders("look-at-rest"), nature.rest)) as plain:
        nature = replace(nature, uncomparable=_uncomparable(plain, runner.sizes.micro_batch, most))
        noise = max(noise, 0.0 if nature.uncomparable else _noise(plain, plain.first_batch()))
    return replace(nature, limit=min(max(usual, _TIMES_THE_NOISE * noise), most))


def _numbers(runner: Runner) -> tuple[bool, str, float, float]:
    """Return whether the network computes in float64, its precision in words, and the typical and maximum limits."""
    recipe = shortened(runner.recipe, runner.sizes, micro_batch=runner.sizes.micro_batch)
    orders = replace(runner.orders("look-at-numbers"), double=True)
    try:
        with contextlib.closing(Plain(recipe, orders)) as plain:
            loss = plain.loss(plain.first_batch())
            loss.backward()  # type: ignore[no-untyped-call]  # torch
    except (RuntimeError, TypeError, ValueError):
        return False, "float32 (its code does not take float64)", *_LIMITS[False]
    if loss.dtype == torch.float64:
        return True, "float64", *_LIMITS[True]
    return True, f"float64, but the loss in {str(loss.dtype).removeprefix('torch.')}", *_LIMITS[False]


def _noise(plain: Plain, batch: Batch) -> float:
    """Return the relative change of the gradient if the batch's samples are reversed; 0 if it is not finite."""
    tensors = copies_of(plain.network)
    forward = dict(plain.gradients(tensors, [[batch]]))
    backward = plain.gradients(tensors, [[rows_of(batch, range(len(batch.ids))[::-1])]])
    noise = difference(backward, forward).relative
    return noise if math.isfinite(noise) else 0.0


def _uncomparable(plain: Plain, micro_batch: int, limit: float) -> str:
    batch, tensors = plain.first_batch(), copies_of(plain.network)

    def loss(seed: int) -> float:
        plain.load(tensors)
        with torch.no_grad():
            return plain.loss(batch, seed).item()

    if len({loss(seed) for seed in range(3)}) > 1:
        return "the network or the loss draws random numbers that cannot be switched off"
    with torch.no_grad():
        if plain.loss(batch, 0).item() != loss(0):
            return "the loss depends on state from earlier micro-batches"
    alone = plain.answers(rows_of(batch, range(min(micro_batch, len(batch.ids)))))
    together = plain.answers(batch)
    if alone is None or together is None:
        return ""
    gap = (alone - together[:micro_batch]).abs().max() / together.abs().max().clamp_min(1e-30)
    return "" if gap <= limit else "the network's output for a sample depends on the others in its micro-batch"


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The runs of a recipe, and the plain loops they are compared with.

    Attributes:
        recipe: The user's recipe.
        plans: Its plans, not shortened, by number of processes.
        sizes: Sizes of the short runs.
        nature: Properties of the network.
        whole: A run with one batch per step, the network deterministic.
        parts: A run with micro-batches, the network deterministic.
        asked: A run with micro-batches, the network unchanged.
        several: The run ``asked`` in several processes; None if it was not possible.
        alone: Why it was not possible; otherwise empty.
        plain_whole: The plain loop for one batch, the network deterministic.
        plain: The plain loop for micro-batches, the network unchanged.
    """

    recipe: Recipe
    plans: dict[int, Plan]
    sizes: Sizes
    nature: Nature
    whole: Observed
    parts: Observed
    asked: Observed
    several: Observed | None
    alone: str
    plain_whole: Plain
    plain: Plain

    @property
    def runs(self) -> list[Observed]:
        """Every run, without duplicates."""
        found = [self.whole, self.parts, *([] if self.asked is self.parts else [self.asked])]
        return found + ([] if self.several is None else [self.several])

    @property
    def as_asked(self) -> list[Observed]:
        """The runs with the unchanged network."""
        return [self.asked, *([] if self.several is None else [self.several])]
