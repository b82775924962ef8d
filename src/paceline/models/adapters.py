"""Low-rank adapters, and which parts of an adapted network are trained.

A layer's weight W is frozen, and two small matrices A and B are trained: the layer computes with W + alpha / rank * B
A. B is initialised to zero, so the network starts unchanged. The layers come from peft, which is imported on use.
"""

from __future__ import annotations

import fnmatch
import sys
import warnings
from collections import Counter
from typing import Any

import torch
from torch import nn

from paceline.classifier import classifier_layers
from paceline.errors import ModelError
from paceline.recipe.model import Adapters

_NAMED = 4


class PartlyNew(nn.Module):
    """Inherited by, or mixed into, a network of which more than the last layer may be new."""

    def new_layers(self) -> list[str]:
        """Return the names of the layers that get no adapters, since published weights may lack them."""
        raise NotImplementedError  # not abstract: mixed into classes of networks, whose metaclass is another


def add_adapters(network: nn.Module, adapters: Adapters) -> None:
    """Add adapters to the layers named in the recipe, in place.

    Raises:
        ModelError: If a pattern matches no supported layer, or peft is missing or raises an error.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ModelError(
            f"model.adapters.rank={adapters.rank} needs peft ({error}); install it with: "
            "pip install 'paceline[adapters]'."
        ) from error
    alpha: Any = adapters.alpha  # peft's annotation says int, but it accepts any number
    config: Any = LoraConfig(
        r=adapters.rank or 0,
        lora_alpha=alpha,
        target_modules=_targets(network, adapters),
        lora_dropout=adapters.dropout,
        bias="none",
    )
    learning = [each for each in network.parameters() if each.requires_grad]
    transposed = [name for name in config.target_modules if _is_transposed(network.get_submodule(name))]
    try:
        with warnings.catch_warnings():
            # peft corrects this for these layers itself, and warns about each.
            warnings.filterwarnings("ignore", message="fan_in_fan_out")
            inject_adapter_in_model(config, network)
    except (ValueError, NotImplementedError) as error:  # used by peft for layers that it does not recognise
        raise ModelError(f"model.adapters: peft cannot put them into this network ({error}).") from error
    for name in transposed:  # so that saved weights record how to merge them
        network.get_submodule(name).register_buffer("lora_transposed", torch.ones((), dtype=torch.int64))
    for parameter in learning:  # freezing is decided in one place, and peft has frozen all parameters
        parameter.requires_grad = True


def trained_with_adapters(network: nn.Module) -> tuple[str, ...]:
    """Return the patterns of ``model.frozen`` for the untrained part of a network with adapters.

    A weight shared with the classifier, such as token embeddings, is frozen too.
    """
    heads = tuple(f"{each}." for each in head_names(network))
    uses = Counter(id(each) for _, each in network.named_parameters(remove_duplicate=False))
    unshared = [
        f"!{name}" for name, each in network.named_parameters() if name.startswith(heads) and uses[id(each)] == 1
    ]
    return ("*", "!*.lora_A.*", "!*.lora_B.*", *unshared)


def trained_layers(network: nn.Module) -> list[str]:
    """Return the names of the layers that are trained in full with adapters; none if the last one is shared."""
    uses = Counter(id(each) for _, each in network.named_parameters(remove_duplicate=False))
    heads = head_names(network)
    return [name for name in heads if all(uses[id(each)] == 1 for each in network.get_submodule(name).parameters())]


def head_names(network: nn.Module) -> list[str]:
    """Return the names of the layers that get no adapters: the last one, or all that may be new.

    Raises:
        ModelError: If there are none.
    """
    names = classifier_layers(network)
    if not names:
        raise ModelError("model.adapters: this network has no linear classifier to train with them.")
    return network.new_layers() if isinstance(network, PartlyNew) else names[-1:]


def _is_transposed(module: nn.Module) -> bool:
    """Whether the weight of a linear layer is [in, out], as in the GPT-2 of Transformers."""
    library = sys.modules.get("transformers.pytorch_utils")
    return library is not None and isinstance(module, library.Conv1D)


def describe_adapters(network: nn.Module) -> str:
    """Describe the trained share of a network with adapters in one sentence."""
    parameters = list(network.named_parameters())
    layers = sum(".lora_A." in name for name, _ in parameters)
    trained = sum(each.numel() for _, each in parameters if each.requires_grad)
    total = sum(each.numel() for name, each in parameters if ".lora_" not in name)
    has_own = any(each.requires_grad and ".lora_" not in name for name, each in parameters)
    extra = "with the classifier" if has_own else "with the tied output layer frozen,"
    return (
        f"model.adapters: {layers} layers have adapters; {extra} {trained:,} numbers are trained, "
        f"{100 * trained / total:.1f} % of the network's {total:,}"
    )


def _targets(network: nn.Module, adapters: Adapters) -> list[str]:
    """Return the names of the layers that get adapters, in the order of the patterns."""
    heads = head_names(network)
    # Its forward pass uses the weights of these layers without calling them.
    inside = tuple(f"{name}." for name, module in network.named_modules() if isinstance(module, nn.MultiheadAttention))
    able = [
        name
        for name, module in network.named_modules()
        if name not in ("", *heads)
        and not name.startswith(inside)
        and (
            isinstance(module, nn.Linear)
            or (isinstance(module, nn.Conv2d) and module.groups == 1)
            or _is_transposed(module)
        )
    ]
    targets: dict[str, None] = {}
    for pattern in adapters.targets:
        matched = [*fnmatch.filter(able, pattern), *fnmatch.filter(able, f"*.{pattern}")]
        if not matched:
            raise ModelError(
                f"model.adapters.targets: no layer that can have adapters matches '{pattern}'. The last ones are "
                f"{', '.join(able[-_NAMED:]) or 'none'}; the classifier is trained in full, and neither grouped "
                "convolutions nor layers inside torch's MultiheadAttention can have them."
            )
        targets |= dict.fromkeys(matched)
    return list(targets)
