"""How does a network begin from another one's weights, and which of its parameters stay as they are?"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from paceline.errors import ModelError
from paceline.models.recompute import recompute_blocks
from paceline.recipe.model import Model

_NAMED = 4


def load_fitting(network: nn.Module, state: Mapping[str, Tensor], *, source: str) -> str:
    """Take the tensors whose names, shapes and dtypes fit, and leave the others as they are.

    Returns:
        What was taken and what was not, in one sentence.

    Raises:
        ModelError: If none fits.
    """
    own = network.state_dict()
    fitting = {
        name: tensor
        for name, tensor in state.items()
        if name in own and tensor.shape == own[name].shape and tensor.dtype == own[name].dtype
    }
    if not any(name in fitting for name, _ in network.named_parameters()):
        raise ModelError(
            f"model.initialize_from: no parameter of {source} fits this network; its names are like "
            f"{_some(list(state))}, and the network's like {_some(list(own))}."
        )
    network.load_state_dict(fitting, strict=False)
    said = f"model.initialize_from: {len(fitting)} of {len(own)} tensors come from {source}"
    if left := [name for name in own if name not in fitting]:
        said += f"; {_some(left)} begin anew"
    if unused := [name for name in state if name not in fitting]:
        said += f"; {_some(unused)} of it are not used"
    return said


def adapt(network: nn.Module, model: Model) -> None:
    """Make of a network what a recipe wants trained.

    Raises:
        ModelError: If it has no such parameters, or cannot do what is asked.
    """
    freeze(network, model.frozen)
    if model.activation_checkpointing is not None:
        recompute_blocks(network, model.activation_checkpointing, name=model.name, compiled=model.compile)


def freeze(network: nn.Module, patterns: Sequence[str]) -> None:
    """Keep parameters from being trained, and the statistics of norms whose parameters all are.

    Args:
        network: The network, whose norms with nothing to train go into evaluation mode.
        patterns: Shell patterns of names. A later one wins; one that begins with ``!`` takes back.

    Raises:
        ModelError: If a pattern matches nothing.
    """
    if not patterns:
        return
    frozen: dict[str, bool] = {name: False for name, _ in network.named_parameters()}
    for pattern in patterns:
        matched = fnmatch.filter(frozen, pattern.removeprefix("!"))
        if not matched:
            raise ModelError(
                f"model.frozen: no parameter's name matches '{pattern}'. The last ones are "
                f"{', '.join(list(frozen)[-_NAMED:])}; a pattern may have * and ?."
            )
        frozen |= dict.fromkeys(matched, not pattern.startswith("!"))
    for name, parameter in network.named_parameters():
        if frozen[name]:
            parameter.requires_grad = False
    for module in network.modules():
        own = list(module.parameters())
        if isinstance(module, _NormBase) and own and not any(each.requires_grad for each in own):
            module.eval()


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
