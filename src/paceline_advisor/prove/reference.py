"""Reference gradients and metrics, computed without the trainer.

This is a plain loop over the task's loss and scores. It shares with the trainer the data, the network and the task,
their preparation before the first step, the order of samples, and the documented key of a forward pass's random
numbers. It does not share steps, strategies, accumulators or averages.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.data.batch import Batch, copied, joined_along_samples
from paceline.data.random_draws import derive_seed
from paceline.recipe.schema import Recipe
from paceline.tasks.task import build_task
from paceline.trainer.evaluate import evaluation_mode
from paceline.trainer.subject import Subject
from paceline.world import World
from paceline_advisor.prove.recorder import Recorder, RecorderConfig, nan_as_infinite, tensors_of


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
        recorder = Recorder(build_task(recipe), config, alter)
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
