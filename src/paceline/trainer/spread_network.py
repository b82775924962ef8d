"""Can a network that is spread over processes be built, or planned, without any of them holding all of it?"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from paceline.models.build import parameter_count
from paceline.models.deferred import FirstValues, NotDeferrableError, build_deferred
from paceline.models.transfer import adapt
from paceline.recipe.plan import Plan
from paceline.recipe.schema import Recipe
from paceline.recipe.strategy import ParameterNumbers
from paceline.tasks.task import Task
from paceline.trainer.fake_network import build_shapes, random_states_kept

# Parameters of the largest network that is built whole to be planned: four hundred megabytes.
_TRIED = 100_000_000


def may_be_spread(recipe: Recipe, plan: Plan) -> bool:
    """Whether a plan that knows no network yet may come to weights that are spread over processes."""
    is_open = plan.strategy == "ddp" and recipe.parallel.strategy == "auto"
    # Elsewhere processes share the host's memory, and `auto` takes replicas unless they are very large.
    return plan.strategy == "fsdp" or (is_open and plan.device == "cuda")


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
    with random_states_kept():
        shapes = build_shapes(recipe, task, channels_last=False)
    if sum(each.numel() for each in shapes.parameters()) > _TRIED:
        return shapes
    network = task.build_model()
    task.check_network(network)
    begin(network)
    adapt(network, recipe.model)
    return network
