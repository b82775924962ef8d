"""Layers of a network, as one forward and backward pass shows them, on fake tensors or a few real samples."""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from paceline.data.batch import Batch, tensors_in
from paceline.models.flops import StepWork, WorkCounter
from paceline.models.roofline import intensity
from paceline_advisor.doctor.findings import Place

BYTES = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 2}
"""Of a number, as products read it."""

Kind = Literal["linear", "convolution", "recurrent", "recurrent cell"]


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A module that multiplies matrices, in one forward pass.

    Attributes:
        name: In the network.
        kind: What it is.
        inputs: Features or channels that go in.
        outputs: Features or channels that come out; of a recurrent layer, its hidden size.
        groups: Of a convolution.
        rows: Outputs of each channel for one sample: 1 for a classifier, pixels for a convolution.
        read: Numbers that go in, for one sample.
        written: Numbers that come out, for one sample.
        weights: Numbers of its weight.
        stride: Of a convolution, the smallest.
        calls: Times it was called.
        shape: Its sizes, for people.
        flops: Floating-point operations of one sample's forward pass, in all calls: a product and a sum are two.
    """

    name: str
    kind: Kind
    inputs: int
    outputs: int
    groups: int = 1
    rows: float
    read: float
    written: float
    weights: int
    stride: int = 1
    calls: int = 1
    shape: str = ""
    flops: float = 0.0

    @property
    def is_depthwise(self) -> bool:
        """Whether each channel is filtered by itself."""
        return self.groups > 1 and self.groups == self.inputs

    def intensity(self, samples: int, bytes_each: int) -> float:
        """FLOPs for each byte that must be read or written, for a batch: twice the products over the numbers moved."""
        moved = (self.read + self.written) * samples * self.calls + self.weights
        return intensity(self.flops * samples, moved * bytes_each)


def class_places(network: nn.Module, names: Iterable[str]) -> tuple[Place, ...]:
    """Where the classes that made these modules begin, most modules first: those of the nearest around, but lists."""
    holders: Counter[type[nn.Module]] = Counter()
    for name in names:
        kind: type[nn.Module] = nn.Sequential
        while name and kind in (nn.Sequential, nn.ModuleList, nn.ModuleDict):
            name = name.rpartition(".")[0]  # noqa: PLW2901  # up to the class that is no mere list
            kind = type(network.get_submodule(name))
        holders[kind] += 1
    found = []
    for kind, count in holders.most_common():
        if kind.__module__.startswith("torch."):
            continue  # a list of layers as the whole network: no class of anybody's has made it
        try:
            place = (inspect.getsourcefile(kind) or "", inspect.getsourcelines(kind)[1])
        except (OSError, TypeError):
            continue  # made by a program, or in a terminal
        found.append(Place(*place, f"class {kind.__name__}", count))
    return tuple(found)


def _measured(name: str, module: nn.Module, arguments: tuple[Any, ...], result: Any, samples: int) -> Layer | None:
    given = next((each for each in arguments if isinstance(each, Tensor)), None)
    made = next(iter(result), None) if isinstance(result, tuple) else result
    if given is None or not isinstance(made, Tensor):
        return None
    own: dict[str, Any]
    if isinstance(module, nn.Linear):
        inputs, outputs, more = module.in_features, module.out_features, ""
        own = {"kind": "linear", "rows": made.numel() / outputs / samples, "weights": module.weight.numel()}
    elif isinstance(module, _ConvNd):
        inputs, outputs = module.in_channels, module.out_channels
        groups = f", {module.groups} groups" if module.groups > 1 else ""
        more = f", {'x'.join(map(str, module.kernel_size))}{groups}"
        pixels = (given if isinstance(module, _ConvTransposeNd) else made).shape[2:]
        own = {"kind": "convolution", "rows": prod(pixels), "weights": module.weight.numel()}
        own |= {"groups": module.groups, "stride": min(module.stride)}
    elif isinstance(module, nn.RNNBase | nn.RNNCellBase):
        inputs, outputs, more = module.input_size, module.hidden_size, " hidden"
        own = {"kind": "recurrent" if isinstance(module, nn.RNNBase) else "recurrent cell"}
        own |= {"rows": given.numel() / inputs / samples, "weights": sum(each.numel() for each in module.parameters())}
    else:
        return None
    return Layer(
        name=name,
        inputs=inputs,
        outputs=outputs,
        read=given.numel() / samples,
        written=made.numel() / samples,
        shape=f"{inputs}→{outputs}{more}",
        **own,
    )


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


def _forward_flops(found: StepWork) -> Counter[str]:
    flops: Counter[str] = Counter()
    for work in found.works:
        if work.phase in ("forward", "recompute"):  # each call is one, also a second time
            flops[work.layer] += work.flops
    return flops


def look_at(network: nn.Module, batch: Batch, step: Callable[[], None]) -> Anatomy:
    """Watch a network in a step.

    Args:
        network: It has no gradients yet, and is left with those of the step, and without a trace of the hooks.
        batch: What the step takes.
        step: Forward and backward.
    """
    samples = max(1, len(batch.ids))
    layers: dict[str, Layer] = {}
    biased: dict[str, str] = {}
    order: dict[str, None] = {}
    not_channels_last: dict[str, None] = {}
    # Outputs are held until the end: a tensor that is gone would lend its id to another.
    outputs: dict[int, tuple[str, Tensor]] = {}

    def before(name: str, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        if any(True for _ in module.parameters(recurse=False)):
            order[name] = None
        given = arguments[0] if arguments else None
        if not isinstance(given, Tensor):
            return
        if isinstance(module, _BatchNorm) and module.training and id(given) in outputs:
            biased[outputs[id(given)][0]] = name
        if isinstance(module, nn.Conv2d) and not given.is_contiguous(memory_format=torch.channels_last):
            not_channels_last[name] = None

    def after(name: str, module: nn.Module, arguments: tuple[Any, ...], result: Any) -> None:
        if isinstance(module, nn.Linear | _ConvNd) and module.bias is not None and isinstance(result, Tensor):
            outputs[id(result)] = (name, result)
        if (layer := _measured(name, module, arguments, result, samples)) is not None:
            calls = layers[name].calls + 1 if name in layers else 1
            layers[name] = replace(layer, calls=calls)

    with contextlib.ExitStack() as hooks:
        for name, module in network.named_modules():
            hooks.enter_context(module.register_forward_pre_hook(partial(before, name)))
            hooks.enter_context(module.register_forward_hook(partial(after, name)))
        with WorkCounter(network) as counter:
            step()
    flops = _forward_flops(counter.found)
    named = {name: each for name, each in network.named_parameters() if each.requires_grad}
    laid_out = any(
        each.ndim == 4 and each.is_contiguous(memory_format=torch.channels_last) for each in tensors_in(batch.inputs)
    )
    return Anatomy(
        layers=tuple(replace(each, flops=flops[each.name] / samples) for each in layers.values()),
        biased=biased,
        holders=class_places(network, biased),
        unused=tuple(name for name, each in named.items() if each.grad is None),
        parameters=tuple(named),
        order=tuple(order),
        parallel=tuple(name for name, each in network.named_modules() if isinstance(each, nn.DataParallel)),
        not_channels_last=tuple(not_channels_last) if laid_out else (),
    )
