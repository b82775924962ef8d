"""Evidence for the checks: the runs, and the numerical properties of the network."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from paceline.optim.classes import has_sparse_gradients
from torch import Tensor, nn

from paceline.data.batch import Batch
from paceline.errors import RecipeError
from paceline.plan import Plan
from paceline.recipe.schema import Recipe
from paceline_advisor.prove.evidence import PlainLoop, difference, dropouts, make_deterministic, norms
from paceline_advisor.prove.recorder import ObservedRun, copies_of, rows_of
from paceline_advisor.prove.runs import Runner, Sizes, shortened

# Allowed difference of gradients, relative to the largest value: typical, and maximum. Another order of summation
# differs by about 1e-15 in float64 and 1e-7 in float32, more in deep networks; an error differs by more than 1e-3.
_LIMITS = {True: (1e-12, 1e-6), False: (1e-5, 1e-3)}
_TIMES_THE_NOISE = 100


@dataclass(frozen=True, kw_only=True)
class NumericsProbe:
    """Properties of a network that its proof depends on.

    Attributes:
        double: Whether it computes in float64.
        limit: Allowed difference of gradients, relative to the largest value.
        numbers: Its precision, in words.
        norms: Names of the BatchNorm layers that normalise by their micro-batch.
        dropouts: Names of the modules with random dropout.
        statistics: Fixed statistics for the norms, by buffer name.
        incomparable: Why the gradient of a batch may differ from that of its micro-batches, even without dropout and
            with fixed statistics; empty if they must agree.
    """

    double: bool
    limit: float
    numbers: str
    norms: tuple[str, ...]
    dropouts: tuple[str, ...]
    statistics: Mapping[str, Tensor] = field(default_factory=dict)
    incomparable: str = ""

    @property
    def is_deterministic(self) -> bool:
        """Whether the network needs no changes to be deterministic."""
        return not self.norms and not self.dropouts

    @property
    def alter(self) -> Callable[[nn.Module], None] | None:
        """Return a function that makes such a network deterministic; None if no change is needed."""
        return None if self.is_deterministic else lambda network: make_deterministic(network, self.statistics)


def probe_numerics(runner: Runner) -> NumericsProbe:
    """Examine a recipe's network by a few forward and backward passes.

    Raises:
        RecipeError: If its gradients are sparse.
    """
    recipe = shortened(runner.recipe, runner.sizes, micro_batch=runner.sizes.global_batch)
    double, numbers, typical_limit, largest_limit = _precision(runner)
    runner = replace(runner, double=double)
    with contextlib.closing(PlainLoop(recipe, runner.config("look"))) as plain:
        if has_sparse_gradients(plain.network):
            raise RecipeError(
                "prove compares gradients number by number, and sparse ones are not supported yet; prove the recipe "
                "with dense ones (model.options={sparse: false}), which give the same result."
            )
        norm_layers, dropout_modules, batch = norms(plain.network), dropouts(plain.network), plain.first_batch()
        probe = NumericsProbe(
            double=double,
            limit=typical_limit,
            numbers=numbers,
            norms=tuple(norm_layers),
            dropouts=tuple(dict.fromkeys(each.name for each in dropout_modules)),
            statistics=plain.statistics(batch) if norm_layers else {},
        )
        for each in dropout_modules:
            each.set(0.0)
        noise = _noise(plain, batch)
    with contextlib.closing(PlainLoop(recipe, runner.config("look-at-rest"), probe.alter)) as plain:
        probe = replace(probe, incomparable=_uncomparable(plain, runner.sizes.micro_batch, largest_limit))
        noise = max(noise, 0.0 if probe.incomparable else _noise(plain, plain.first_batch()))
    return replace(probe, limit=min(max(typical_limit, _TIMES_THE_NOISE * noise), largest_limit))


def _precision(runner: Runner) -> tuple[bool, str, float, float]:
    """Return whether the network computes in float64, its precision in words, and the typical and maximum limits."""
    recipe = shortened(runner.recipe, runner.sizes, micro_batch=runner.sizes.micro_batch)
    config = replace(runner.config("look-at-numbers"), double=True)
    try:
        with contextlib.closing(PlainLoop(recipe, config)) as plain:
            loss = plain.loss(plain.first_batch())
            loss.backward()  # type: ignore[no-untyped-call]  # torch
    except (RuntimeError, TypeError, ValueError):
        return False, "float32 (its code does not take float64)", *_LIMITS[False]
    if loss.dtype == torch.float64:
        return True, "float64", *_LIMITS[True]
    return True, f"float64, but the loss in {str(loss.dtype).removeprefix('torch.')}", *_LIMITS[False]


def _noise(plain: PlainLoop, batch: Batch) -> float:
    """Return the relative change of the gradient if the batch's samples are reversed; 0 if it is not finite."""
    tensors = copies_of(plain.network)
    forward = dict(plain.gradients(tensors, [[batch]]))
    backward = plain.gradients(tensors, [[rows_of(batch, range(len(batch.ids))[::-1])]])
    noise = difference(backward, forward).relative
    return noise if math.isfinite(noise) else 0.0


def _uncomparable(plain: PlainLoop, micro_batch: int, limit: float) -> str:
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
        probe: Properties of the network.
        one_batch: A run with one batch per step, the network deterministic.
        micro_batched: A run with micro-batches, the network deterministic.
        unchanged: A run with micro-batches, the network unchanged.
        distributed: The run ``unchanged`` in several processes; None if it was not possible.
        why_alone: Why it was not possible; otherwise empty.
        plain_one_batch: The plain loop for one batch, the network deterministic.
        plain: The plain loop for micro-batches, the network unchanged.
    """

    recipe: Recipe
    plans: dict[int, Plan]
    sizes: Sizes
    probe: NumericsProbe
    one_batch: ObservedRun
    micro_batched: ObservedRun
    unchanged: ObservedRun
    distributed: ObservedRun | None
    why_alone: str
    plain_one_batch: PlainLoop
    plain: PlainLoop

    @property
    def runs(self) -> list[ObservedRun]:
        """Every run, without duplicates."""
        others = [run for run in self.unchanged_runs if run is not self.micro_batched]
        return [self.one_batch, self.micro_batched, *others]

    @property
    def unchanged_runs(self) -> list[ObservedRun]:
        """The runs with the unchanged network."""
        return [self.unchanged, *([] if self.distributed is None else [self.distributed])]
