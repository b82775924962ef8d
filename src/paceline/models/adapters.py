"""How does a network get low-rank adapters, and what of it is trained then?

Beside a layer's weight W, which stays as it is, two small matrices A and B are trained: the layer computes with
W + alpha / rank * B A. B begins at zero, so that the network begins as it was. The layers are peft's, which is
imported where it is used.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

from torch import nn

from paceline.errors import ModelError
from paceline.recipe.adapters import Adapters

_NAMED = 4


def add_adapters(network: nn.Module, adapters: Adapters) -> None:
    """Put adapters beside the layers that the recipe names, in place.

    Raises:
        ModelError: If a pattern matches no layer that can have them, or peft is missing or refuses.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ModelError(
            f"model.adapters.rank={adapters.rank} needs peft ({error}); install it with: "
            "pip install 'paceline[adapters]'."
        ) from error
    alpha: Any = adapters.alpha  # peft says whole numbers, and takes all
    config: Any = LoraConfig(
        r=adapters.rank or 0,
        lora_alpha=alpha,
        target_modules=_targets(network, adapters),
        lora_dropout=adapters.dropout,
        bias="none",
    )
    learning = [each for each in network.parameters() if each.requires_grad]
    try:
        inject_adapter_in_model(config, network)
    except (ValueError, NotImplementedError) as error:  # peft's, for layers that it does not know
        raise ModelError(f"model.adapters: peft cannot put them into this network ({error}).") from error
    for parameter in learning:  # what is frozen is decided in one place, and peft has frozen everything
        parameter.requires_grad = True


def trained_beside(network: nn.Module) -> tuple[str, ...]:
    """What of a network with adapters stays as it is, as patterns of ``model.frozen``."""
    return ("*", "!*.lora_A.*", "!*.lora_B.*", f"!{classifier_name(network)}.*")


def classifier_name(network: nn.Module) -> str:
    """The network's last layer: what it says is its classifier, as timm's do, or its last linear one.

    Raises:
        ModelError: If it has neither.
    """
    said: object = getattr(network, "get_classifier", lambda: None)()
    names = [name for name, module in network.named_modules() if name and module is said and _has_parameters(module)]
    names = names or [name for name, module in network.named_modules() if name and isinstance(module, nn.Linear)]
    if not names:
        raise ModelError("model.adapters: this network has no linear classifier that could be trained beside them.")
    return str(names[-1])


def _has_parameters(module: object) -> bool:
    return isinstance(module, nn.Module) and next(module.parameters(), None) is not None


def described(network: nn.Module) -> str:
    """How much of a network with adapters is trained, in one sentence."""
    parameters = list(network.named_parameters())
    layers = sum(".lora_A." in name for name, _ in parameters)
    trained = sum(each.numel() for _, each in parameters if each.requires_grad)
    whole = sum(each.numel() for name, each in parameters if ".lora_" not in name)
    return (
        f"model.adapters: {layers} layers have adapters; with the classifier {trained:,} numbers are trained, "
        f"{100 * trained / whole:.1f} % of the network's {whole:,}"
    )


def _targets(network: nn.Module, adapters: Adapters) -> list[str]:
    able = list(_layers(network))
    found: dict[str, None] = {}
    for pattern in adapters.targets:
        matched = fnmatch.filter(able, pattern)
        if not matched:
            raise ModelError(
                f"model.adapters.targets: no layer that can have adapters matches '{pattern}'. The last ones are "
                f"{', '.join(able[-_NAMED:]) or 'none'}; the classifier is trained whole, and neither grouped "
                "convolutions nor layers inside torch's MultiheadAttention can have them."
            )
        found |= dict.fromkeys(matched)
    return list(found)


def _layers(network: nn.Module) -> Mapping[str, nn.Module]:
    head = classifier_name(network)
    # Its own forward pass takes the weights of its layers and never calls them.
    inside = [f"{name}." for name, module in network.named_modules() if isinstance(module, nn.MultiheadAttention)]
    return {
        name: module
        for name, module in network.named_modules()
        if (isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.groups == 1))
        and name
        and name != head
        and not name.startswith(tuple(inside))
    }
