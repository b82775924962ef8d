"""Can a network that is spread over processes be built without any of them holding all of it?"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from paceline.models.deferred import FirstValues, NotDeferrableError, build_deferred
from paceline.models.transfer import adapt
from paceline.recipe.plan import Plan
from paceline.recipe.schema import Recipe
from paceline.tasks.task import Task


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
    with torch.device("meta"):
        task.check_network(network)
    return network, first_values
