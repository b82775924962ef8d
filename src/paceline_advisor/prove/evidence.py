"""Evidence for the checks: the runs, reference gradients and metrics, and the numerical properties of the network.

The reference is a plain loop over the task's loss and scores. It shares with the trainer the data, the network and the
task, their preparation before the first step, the order of samples, and the documented key of a forward pass's random
numbers. It does not share steps, strategies, accumulators or averages.
"""

from __future__ import annotations

import contextlib
import math
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.data.batch import Batch, copied, joined_along_samples
from paceline.data.random_draws import derive_seed
from paceline.errors import RecipeError
from paceline.host.world import World
from paceline.optim.classes import has_sparse_gradients
from paceline.plan import Plan
from paceline.recipe.schema import Recipe
from paceline.tasks.task import build_task
from paceline.trainer.evaluate import evaluation_mode
from paceline.trainer.subject import Subject
from paceline_advisor import frozen
from paceline_advisor.prove.recorder import (
    ObservedRun,
    RecorderConfig,
    RecordingTask,
    copies_of,
    nan_as_infinite,
    rows_of,
    tensors_of,
)
from paceline_advisor.prove.runs import Runner, Sizes, shortened


@dataclass(frozen=True)
class Dropout:
    """A random dropout in a network.

    Attributes:
        name: The module's name in the network.
        module: The module.
        attribute: Name of the attribute with the probability.
        probability: Its value.
    """

    name: str
    module: nn.Module
    attribute: str
    probability: float

    @property
    def is_layer(self) -> bool:
        """Whether dropout is the module's only purpose."""
        return _is_layer(self.module)

    @property
    def title(self) -> str:
        """Its name in messages."""
        return self.name if self.is_layer else f"{self.name}.{self.attribute}".lstrip(".")

    def is_around(self, name: str) -> bool:
        """Whether the module with this name is inside this one."""
        return not self.name or name.startswith(f"{self.name}.")

    def set(self, probability: float) -> None:
        """Set another probability."""
        setattr(self.module, self.attribute, probability)


def dropouts(network: nn.Module) -> list[Dropout]:
    """Return the network's dropouts with a probability strictly between 0 and 1: modules, and attributes of modules."""
    return [
        Dropout(name, module, attribute, value)
        for name, module in network.named_modules()
        for attribute, value in vars(module).items()
        if isinstance(value, float) and 0 < value < 1
        if "drop" in attribute or (_is_layer(module) and attribute in ("p", "rate", "prob", "probability"))
    ]


def _is_layer(module: nn.Module) -> bool:
    kind = type(module).__name__.lower()
    return ("drop" in kind or "stochastic" in kind) and not any(True for _ in module.parameters())


def norms(network: nn.Module) -> dict[str, nn.Module]:
    """Return the BatchNorm layers that normalise by the statistics of their micro-batch, by name."""
    return {
        name: module for name, module in network.named_modules() if isinstance(module, _BatchNorm) and module.training
    }


def make_deterministic(network: nn.Module, statistics: Mapping[str, Tensor]) -> None:
    """Turn off dropouts, and make BatchNorm normalise by fixed statistics.

    Args:
        network: The network to change.
        statistics: Buffers by name, to load first.
    """
    for each in dropouts(network):
        each.set(0.0)
    buffers = dict(network.named_buffers())
    for name, value in statistics.items():
        buffers[name].copy_(value)
    for module in norms(network).values():
        module.eval()
        # Replace the module's own method, so that copies of the network are deterministic too.
        module.train = types.MethodType(lambda itself, *_, **__: itself, module)  # type: ignore[method-assign]


Gradients = Mapping[str, Tensor | None]


@dataclass(frozen=True)
class Difference:
    """The difference of two gradients.

    Attributes:
        relative: The largest absolute difference of two values, relative to the largest absolute expected value.
        ratio: The factor by which the expected gradient comes closest to the actual one.
        where: The parameter with the largest difference.
    """

    relative: float
    ratio: float
    where: str


def difference(actual: Gradients, expected: Gradients) -> Difference:
    """Return the difference of a gradient from another one; a parameter without a gradient counts as zeros."""
    largest, where, largest_gap, product, square = 0.0, "", 0.0, 0.0, 0.0
    for name, target in expected.items():
        gradient = actual.get(name)
        value = torch.zeros(1, dtype=torch.float64) if gradient is None else gradient.double()
        reference = torch.zeros_like(value) if target is None else target.double()
        largest = max(largest, reference.abs().max().item())
        product += (value * reference).sum().item()
        square += (reference * reference).sum().item()
        gap = nan_as_infinite((value - reference).abs().max().item())
        if gap > largest_gap:
            largest_gap, where = gap, name
    relative = nan_as_infinite(largest_gap / largest) if largest else largest_gap
    return Difference(relative, product / square if square else 1.0, where)


class PlainLoop:
    """A recipe's task and network without the trainer.

    Attributes:
        network: The network, with its initial weights.
    """

    def __init__(
        self, recipe: Recipe, config: RecorderConfig, alter: Callable[[nn.Module], None] | None = None
    ) -> None:
        recorder = RecordingTask(build_task(recipe), config, alter)
        self._recipe = recipe
        self._subject = Subject.open(recipe, World(), "network", task=recorder)
        self._task = recorder.task
        self.network = self._subject.network

    def close(self) -> None:
        """Release the data."""
        self._subject.close()

    def first_batch(self) -> Batch:
        """Return the first micro-batch of a run."""
        return next(iter(self._subject.pipeline.train_batches(self._subject.geometry, 0, 1, World())))

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load weights and buffers, by name."""
        with torch.no_grad():
            for name, tensor in tensors_of(self.network).items():
                tensor.copy_(tensors[name])

    def loss(self, batch: Batch, seed: int | None = None) -> Tensor:
        """Return the task's loss of a batch, with random numbers keyed by the batch's position or by ``seed``."""
        position = batch.slice
        position_seed = derive_seed(self._recipe.seed, position.step, position.logical_rank)
        torch.manual_seed(position_seed if seed is None else seed)
        # A copy: a network may write into its inputs.
        copy = replace(batch, inputs=copied(batch.inputs), targets=copied(batch.targets))
        return self._task.loss(self.network, copy)

    def gradients(self, tensors: Mapping[str, Tensor], groups: Sequence[Sequence[Batch]]) -> Gradients:
        """Return the gradient of the mean loss over the samples of all batches, clipped as the recipe says.

        The mean is weighted by the samples' weights.

        Args:
            tensors: Weights and buffers by name.
            groups: Micro-batches; each group starts with these buffers, and its batches update them.
        """
        # Total weight of the samples, including unreadable ones.
        total = sum(
            len(batch.ids) + len(batch.broken) if batch.slice.weight is None else batch.slice.weight
            for group in groups
            for batch in group
        )
        self.network.zero_grad(set_to_none=True)
        for group in groups:
            self.load(tensors)
            for batch in group:
                weighted_loss = self.loss(batch) * (batch.weight / total)
                weighted_loss.backward()  # type: ignore[no-untyped-call]  # torch
        optimizer, parameters = self._recipe.optimizer, list(self.network.parameters())
        if optimizer.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, optimizer.clip_norm)
        if optimizer.clip_value is not None:
            torch.nn.utils.clip_grad_value_(parameters, optimizer.clip_value)
        return {name: each.grad for name, each in self.network.named_parameters() if each.requires_grad}

    def metrics(self, state: Mapping[str, Tensor]) -> dict[str, float]:
        """Return each metric of saved weights over the held-out samples, scored one by one."""
        self.network.load_state_dict(state)
        with evaluation_mode([self.network]), torch.no_grad():
            batches = self._subject.pipeline.evaluation_batches(1, World())
            model = self._task.evaluated(self.network)
            scores = [(self._task.score(model, batch), batch.ids) for batch in batches if len(batch.ids)]

        def total(name: str | None) -> float:
            return sum(1.0 if name is None else each[name].double().sum().item() for each, _ in scores)

        found: dict[str, float] = {}
        for collector in self._task.collectors():
            for each, ids in scores:
                collector.add(each, ids)
            found |= collector.results([collector.part()])
        means = (metric for metric in self._task.metrics if not metric.is_collected)
        return found | {each.name: each.scale * total(each.summed) / total(each.per) for each in means}

    def statistics(self, batch: Batch) -> dict[str, Tensor]:
        """Return the running statistics that BatchNorm has after one batch alone, by buffer name."""
        found = norms(self.network)
        for module in found.values():
            module.momentum = 1.0  # type: ignore[assignment]  # a number of BatchNorm's
        with torch.no_grad():
            self.loss(batch)
        return {
            f"{name}.{key}" if name else key: each.clone()
            for name, module in found.items()
            for key, each in module.named_buffers(recurse=False)
        }

    def answers(self, batch: Batch) -> Tensor | None:
        """Return the network's output in the loss of a batch; None if it is not a tensor with a row per sample."""
        outputs: list[object] = []
        hook = self.network.register_forward_hook(lambda *hook_arguments: outputs.append(hook_arguments[2]))
        with torch.no_grad():
            self.loss(batch)
        hook.remove()
        answer = outputs[-1] if outputs else None
        return answer if isinstance(answer, Tensor) and len(answer) == len(batch.ids) else None

    def perturb(self) -> None:
        """Perturb every weight at random: values that start at zero would hide the layers before them."""
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.network.parameters():
                if parameter.is_floating_point():
                    noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                    parameter.add_((0.1 * noise).to(parameter.dtype))


def joined(batches: Sequence[Batch]) -> Batch:
    """Combine micro-batches into one batch."""
    first = batches[0]
    weights = [batch.slice.weight for batch in batches]
    weight = None if first.slice.weight is None else sum(each or 0 for each in weights)
    place = replace(first.slice, logical_rank=0, is_last=True, weight=weight)
    return replace(
        first,
        inputs=joined_along_samples([batch.inputs for batch in batches]),
        targets=joined_along_samples([batch.targets for batch in batches]),
        ids=np.concatenate([batch.ids for batch in batches]),
        broken=tuple(each for batch in batches for each in batch.broken),
        slice=place,
    )


def parts_of(batches: Mapping[tuple[int, int], Batch], step: int) -> list[Batch]:
    """Return the micro-batches of a step, in logical order."""
    return [batches[key] for key in sorted(batches) if key[0] == step and not batches[key].slice.phantom]


# Allowed difference of gradients, relative to the largest value: typical, and maximum. Another order of summation
# differs by about 1e-15 in float64 and 1e-7 in float32, more in deep networks; an error differs by more than 1e-3.
_LIMITS = {True: (1e-12, 1e-6), False: (1e-5, 1e-3)}
_TIMES_THE_NOISE = 100


@frozen
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


@frozen
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
