"""What is a network made of, as one forward and backward pass shows it: on fake tensors, or on a few real samples?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from paceline.data.batch import Batch, tensors_in
from paceline.models.flops import WorkCounter
from paceline_advisor.doctor.findings import Place
from paceline_advisor.doctor.layers import Layer, class_places, watching_layers, with_flops


@dataclass(frozen=True, kw_only=True)
class Anatomy:
    """A network, as far as the checks need to know it.

    Attributes:
        layers: Its matrix products, in the order of their first call.
        biased: Layers whose bias a BatchNorm takes away again, with the norm that does.
        holders: The classes that these are made in.
        unused: Parameters that are to be trained and took no part in the loss.
        parameters: Names of all parameters that are to be trained, in the order of their construction.
        order: Modules with parameters, in the order of execution.
        parallel: Modules that spread it over devices themselves.
        not_channels_last: Convolutions that were given another layout, although the batch was channels-last.
    """

    layers: tuple[Layer, ...] = ()
    biased: dict[str, str] = field(default_factory=dict)
    holders: tuple[Place, ...] = ()
    unused: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    order: tuple[str, ...] = ()
    parallel: tuple[str, ...] = ()
    not_channels_last: tuple[str, ...] = ()


def look_at(network: nn.Module, batch: Batch, step: Callable[[], None]) -> Anatomy:
    """Watch a network in a step.

    Args:
        network: It has no gradients yet, and is left with those of the step.
        batch: What the step takes.
        step: Forward and backward.
    """
    samples = max(1, len(batch.ids))
    with watching_layers(network, samples) as seen, WorkCounter(network) as counter:
        step()
    named = {name: each for name, each in network.named_parameters() if each.requires_grad}
    laid_out = any(
        each.ndim == 4 and each.is_contiguous(memory_format=torch.channels_last) for each in tensors_in(batch.inputs)
    )
    return Anatomy(
        layers=with_flops(seen.layers.values(), counter.found, samples),
        biased=seen.biased,
        holders=class_places(network, seen.biased),
        unused=tuple(name for name, each in named.items() if each.grad is None),
        parameters=tuple(named),
        order=tuple(seen.order),
        parallel=tuple(name for name, each in network.named_modules() if isinstance(each, nn.DataParallel)),
        not_channels_last=tuple(dict.fromkeys(seen.not_channels_last)) if laid_out else (),
    )
