"""Build a network on torch's ``meta`` device, without memory for its weights.

Fake tensors need it, the plan of a very large network, and processes that each hold a shard (FSDP).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from paceline.errors import PacelineError
from paceline.models.build import lay_out, parameter_count
from paceline.models.deferred import FirstValues, NotDeferrableError, build_deferred
from paceline.models.transfer import adapt
from paceline.plan import ParameterNumbers, Plan
from paceline.recipe.schema import Recipe
from paceline.tasks.task import Task
from paceline.trainer.process_settings import restore_random_states


def build_shapes(recipe: Recipe, task: Task, *, channels_last: bool) -> nn.Module:
    """The network that a run would train, with its frozen parts, adapters and recomputed blocks; no numbers in it.

    Raises:
        PacelineError: If the recipe names none, or one that cannot be built.
    """
    try:
        with torch.device("meta"):
            network = _built(recipe, task)
    except PacelineError:
        raise
    except (RuntimeError, NotImplementedError, ValueError, TypeError, AttributeError):
        # A constructor that looks at the numbers it has drawn. Real ones then: as much memory as the weights, for a
        # moment.
        network = _built(recipe, task)
    return lay_out(network.to("meta"), channels_last=channels_last)


def _built(recipe: Recipe, task: Task) -> nn.Module:
    network = task.build_model()
    adapt(network, recipe.model)
    return network


class _OwnStatistics(_BatchNorm):
    """SyncBatchNorm of one process: it exchanges a few numbers for each channel, and otherwise does the same."""

    def _check_input_dim(self, _: Tensor) -> None:
        """Any shape: whoever built the network knew."""


def unsynced(network: nn.Module) -> None:
    """Let SyncBatchNorm run where there is no GPU, which it asks for."""
    synced: list[nn.Module] = [each for each in network.modules() if isinstance(each, nn.SyncBatchNorm)]
    for module in synced:
        module.__class__ = _OwnStatistics


class Faker:
    """Makes fake tensors of others, one for each: what is shared stays shared.

    A network is built on ``meta`` first: many constructors read a number out of a tensor, which a fake one refuses.

    Args:
        mode: Whose they are.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._made: dict[int, tuple[Tensor, Tensor]] = {}

    def network(self, network: nn.Module) -> None:
        """Put a fake tensor in the place of each parameter, buffer, and tensor that is an attribute."""
        for module in network.modules():
            for held in (module._parameters, module._buffers, vars(module)):  # noqa: SLF001  # `setattr` asks for real ones
                held |= {name: self.tensor(each) for name, each in held.items() if isinstance(each, Tensor)}
            for name, held in vars(module).items():
                if isinstance(held, list) and held and all(isinstance(each, Tensor) for each in held):
                    vars(module)[name] = [self.tensor(each) for each in held]

    def tensor(self, tensor: Tensor) -> Tensor:
        """The fake one: same shape, strides, dtype; a parameter for a parameter."""
        if isinstance(tensor, FakeTensor):
            return tensor
        # The original is kept too, or another could get its id.
        if id(tensor) not in self._made:
            self._made[id(tensor)] = (tensor, self._make(tensor))
        return self._made[id(tensor)][1]

    def _make(self, tensor: Tensor) -> Tensor:
        with self._mode:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        if not isinstance(tensor, nn.Parameter):
            return fake.requires_grad_(tensor.requires_grad)
        parameter = nn.Parameter(fake, requires_grad=tensor.requires_grad)
        for name, value in vars(tensor).items():
            setattr(parameter, name, value)
        return parameter


# Parameters of the largest network that is built whole to be planned: four hundred megabytes.
_TRIED = 100_000_000


def numbers_of(network: nn.Module) -> ParameterNumbers:
    """How many parameters it has."""
    return ParameterNumbers(sum(each.numel() for each in network.parameters()), parameter_count(network))


def build_without_numbers(recipe: Recipe, task: Task, plan: Plan) -> tuple[nn.Module, FirstValues]:
    """The network as every process will have it, but without numbers, and what gives them to it.

    Its first values are those of the whole network with the same seed, to the bit.

    Raises:
        NotDeferrableError: If it has to be built whole; says why.
        PacelineError: For a mistake in the recipe.
    """
    if recipe.model.initialize_from is not None:
        raise NotDeferrableError("model.initialize_from gives all of it at once")
    if recipe.model.pretrained:
        raise NotDeferrableError("model.pretrained gives all of it at once")
    if plan.precision == "fp8":
        raise NotDeferrableError("train.precision=fp8 changes its layers")

    def build() -> nn.Module:
        network = task.build_model()
        adapt(network, task.recipe.model)
        return network

    torch.manual_seed(recipe.seed)
    network, first_values = build_deferred(build)
    if any(isinstance(each, _NormBase) for each in network.modules()):
        raise NotDeferrableError("it has BatchNorm, which is tried out whole")
    if task.begins_from_data(network):
        raise NotDeferrableError("some of its first weights are made of the training data")
    with torch.device("meta"):
        task.check_network(network)
    return network, first_values


def network_to_plan(recipe: Recipe, task: Task, begin: Callable[[nn.Module], object]) -> nn.Module:
    """A run's network for its plan, tried out as a run's is; a very large one without numbers, and not tried out.

    Args:
        recipe: The run's.
        task: The run's.
        begin: Gives a network that is tried out the weights that the run begins with.

    Raises:
        PacelineError: For a mistake in the recipe.
    """
    with restore_random_states("cpu"):
        shapes = build_shapes(recipe, task, channels_last=False)
    if sum(each.numel() for each in shapes.parameters()) > _TRIED:
        return shapes
    network = task.build_model()
    task.check_network(network)
    begin(network)
    adapt(network, recipe.model)
    return network
