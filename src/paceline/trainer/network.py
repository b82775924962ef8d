"""Build the network of a run: its shapes, or its initial weights on the device, and its facts for the plan."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from paceline.checkpoint.state import adapt_weights, check_inventory
from paceline.checkpoint.weights import read_weights
from paceline.data.pipeline import Placement
from paceline.errors import CheckpointError, ModelError, PacelineError
from paceline.models.adapters import describe_adapters
from paceline.models.build import parameter_count, to_memory_format
from paceline.models.compiled import check_backend
from paceline.models.deferred import InitialValues, NotDeferrableError, build_deferred
from paceline.models.precision import fp8_layers
from paceline.models.transfer import adapt, load_fitting, trained_spans, with_shared, zero_classifier
from paceline.optim.parameter_groups import describe_groups
from paceline.plan import NetworkFacts, ParameterNumbers, Plan
from paceline.recipe.model import ModelSection
from paceline.recipe.schema import Recipe
from paceline.storage.cache import local_path
from paceline.tasks.own_code import refused
from paceline.tasks.task import Task

# For one process: four terabytes of weights, more than any device holds.
_MOST_PARAMETERS = 10**12
# Mean share of the products from which depthwise convolutions slow bf16 down on CPUs.
_DEPTHWISE_SHARE = 0.03


def build_shapes(recipe: Recipe, task: Task, *, channels_last: bool) -> nn.Module:
    """Return the network that a run would train, with frozen parts, adapters and recomputed blocks, but without values.

    Raises:
        PacelineError: If the recipe names no network, or one that cannot be built.
    """
    try:
        with torch.device("meta"):
            network = _build_adapted(recipe, task)
    except PacelineError:
        raise
    except (RuntimeError, NotImplementedError, ValueError, TypeError, AttributeError):
        # The constructor reads the values it has drawn. Use real ones then, which briefly takes as much memory as the
        # weights.
        network = _build_adapted(recipe, task)
    return to_memory_format(network.to("meta"), channels_last=channels_last)


def _build_adapted(recipe: Recipe, task: Task) -> nn.Module:
    network = task.build_model()
    adapt(network, recipe.model)
    return network


def build_without_values(recipe: Recipe, task: Task, plan: Plan) -> tuple[nn.Module, InitialValues]:
    """Return the network as every process will have it, but without values, and the function that supplies them.

    Its initial values are bit-identical to those of the complete network with the same seed.

    Raises:
        NotDeferrableError: If it has to be built with values; states why.
        PacelineError: For a mistake in the recipe.
    """
    for key in ("initialize_from", "pretrained"):
        if getattr(recipe.model, key):
            raise NotDeferrableError(f"model.{key} loads all of it at once")
    if plan.precision == "fp8":
        raise NotDeferrableError("train.precision=fp8 changes its layers")

    torch.manual_seed(recipe.seed)
    network, first_values = build_deferred(partial(_build_adapted, task.recipe, task))
    if any(isinstance(each, _NormBase) for each in network.modules()):
        raise NotDeferrableError("it has BatchNorm, which is tested on the whole network")
    if task.begins_from_data(network):
        raise NotDeferrableError("some initial weights are computed from the training data")
    with torch.device("meta"):
        task.check_network(network)
    return network, first_values


def count_parameters(network: nn.Module) -> ParameterNumbers:
    """Return the number of parameters."""
    return ParameterNumbers(sum(each.numel() for each in network.parameters()), parameter_count(network))


def build_network(recipe: Recipe, task: Task, placement: Placement) -> tuple[nn.Module, tuple[str, ...]]:
    """Return the network with its initial weights on the device, the same on every rank, and notices about them."""
    torch.manual_seed(recipe.seed)
    network = task.build_model()
    if not isinstance(network, nn.Module):
        raise refused(task, "build_model returned", network, "a torch.nn.Module")
    task.check_network(network)
    task.first_weights(network)
    model = task.recipe.model
    notices = load_initial_weights(network, model)
    adapt(network, model)
    if model.adapters.rank is not None:
        notices.append(describe_adapters(network))
    return place(network, placement), tuple(notices)


def load_initial_weights(network: nn.Module, model: ModelSection) -> list[str]:
    """Load the weights of ``model.initialize_from``, if set; returns notices about them.

    Raises:
        PacelineError: If they are missing, unreadable or do not fit.
    """
    if model.initialize_from is None:
        return []
    saved = read_weights(Path(local_path(model.initialize_from, key="model.initialize_from")))
    state_on_disk, changed = adapt_weights(network.state_dict(), saved.plain)
    state = with_shared(network, state_on_disk)
    notices = [f"model.initialize_from: {saved.path}: {each}" for each in changed]
    if model.initialize_partly:
        zero_classifier(network)
        return [*notices, load_fitting(network, state, source=str(saved.path))]
    try:
        check_inventory(network.state_dict(), state, where="model.initialize_from")
    except CheckpointError as error:
        raise CheckpointError(f"{error} Or load only what fits with model.initialize_partly=true.") from None
    network.load_state_dict(state)
    return notices


def place(network: nn.Module, placement: Placement) -> nn.Module:
    """Move a network to the device and give its filters the batches' memory format."""
    return to_memory_format(network.to(placement.device), channels_last=placement.channels_last)


def describe_network(network: nn.Module, recipe: Recipe, plan: Plan) -> NetworkFacts:
    """Return the facts of a network for the plan, given the one made without them.

    Raises:
        ModelError: If the network cannot be trained as the recipe asks.
    """
    if recipe.model.compile:
        check_backend(recipe.model)
    first, last = trained_spans(network, recipe.model, plan.unfreeze_steps, plan.freeze_after_steps)
    if parameter_count(network) == 0:
        raise ModelError(f"model.name={recipe.model.name} has no parameter that can be trained (requires_grad).")
    trained = {name for name, each in network.named_parameters() if each.requires_grad}
    if trained.issubset(first):
        raise ModelError(
            "model.frozen leaves nothing to train until model.unfreeze applies; exclude some parameters with '!'."
        )
    if trained.issubset(last):
        raise ModelError("model.freeze_after leaves nothing to train until the end; name fewer parameters.")
    synced = [name for name, module in network.named_modules() if isinstance(module, nn.SyncBatchNorm)]
    if recipe.parallel.exact and synced:
        raise ModelError(
            f"model.name={recipe.model.name} has SyncBatchNorm ({', '.join(synced[:3])}{', …' * (len(synced) > 3)}), "
            "whose statistics are sums over the processes in an order that depends on their number; parallel.exact "
            "needs BatchNorm, which here normalises each logical rank by itself."
        )
    numbers = count_parameters(network)
    if numbers.every > _MOST_PARAMETERS * plan.world_size:
        raise ModelError(
            f"model.name={recipe.model.name} has {numbers.every:.3g} parameters with model.options="
            f"{recipe.model.options}, more than {plan.world_size} device(s) can hold; make it smaller."
        )
    return NetworkFacts(
        parameters=numbers,
        groups=describe_groups(network, recipe.optimizer, first, last),
        fp8_layers=fp8_layers(network, name=recipe.model.name) if plan.precision == "fp8" else (),
        is_depthwise=_is_depthwise(network),
        config=getattr(network, "config_keys", None),
    )


def _is_depthwise(network: nn.Module) -> bool:
    """Whether fp32 is faster than bf16 on CPUs (measured by benchmarks/precision_families.py).

    That depends on the share of depthwise convolutions in all products: they take kernel² products per value, and a 1×1
    convolution takes one per channel.
    """
    modules = list(network.modules())
    wide = [each for each in modules if isinstance(each, nn.Conv2d) and max(each.kernel_size) > 1]
    depthwise = [each for each in wide if each.groups == each.in_channels > 1]
    shares = [1 / (1 + each.in_channels / each.weight[0].numel()) for each in depthwise]
    is_mostly = 2 * len(depthwise) >= len(wide) and sum(shares) > _DEPTHWISE_SHARE * len(shares)
    return is_mostly and any(isinstance(each, nn.BatchNorm2d) for each in modules)
