"""Layers of a network, as one forward and backward pass shows them, on fake tensors or a few real samples."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
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


@dataclass(kw_only=True)
class Seen:
    """What hooks have noted of one forward pass.

    Attributes:
        layers: By name, in the order of their first call.
        biased: Layers with a bias whose output goes straight into a BatchNorm that normalises it, with that norm.
        order: Modules with parameters of their own, in the order of their first call.
        not_channels_last: Convolutions that were given images in another layout.
    """

    layers: dict[str, Layer] = field(default_factory=dict)
    biased: dict[str, str] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    not_channels_last: list[str] = field(default_factory=list)


@contextmanager
def watching_layers(network: nn.Module, samples: int) -> Iterator[Seen]:
    """Note what a network's modules do in the forward passes inside.

    Args:
        network: It is left without a trace: the hooks go again.
        samples: In the batch that it will be given.
    """
    seen = Seen()
    # Outputs are held until the end: a tensor that is gone would lend its id to another.
    outputs: dict[int, tuple[str, Tensor]] = {}
    handles = []

    def hear(name: str, module: nn.Module) -> None:
        def before(_: nn.Module, arguments: tuple[Any, ...]) -> None:
            given = arguments[0] if arguments and isinstance(arguments[0], Tensor) else None
            _note_order(seen, name, module)
            if given is None:
                return
            if isinstance(module, _BatchNorm) and module.training and id(given) in outputs:
                seen.biased[outputs[id(given)][0]] = name
            if isinstance(module, nn.Conv2d) and not given.is_contiguous(memory_format=torch.channels_last):
                seen.not_channels_last.append(name)

        def after(_: nn.Module, arguments: tuple[Any, ...], result: Any) -> None:
            is_biased = isinstance(module, (nn.Linear, _ConvNd)) and module.bias is not None
            if is_biased and isinstance(result, Tensor):
                outputs[id(result)] = (name, result)
            _note(seen, name, _measured(name, module, arguments, result, samples))

        handles.append(module.register_forward_pre_hook(before))
        handles.append(module.register_forward_hook(after))

    for name, module in network.named_modules():
        hear(name, module)
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def with_flops(layers: Iterable[Layer], found: StepWork, samples: int) -> tuple[Layer, ...]:
    """The layers with what a counter found in their forward passes, of which each call is one, also a second time.

    Args:
        layers: As hooks saw them.
        found: The same step, counted.
        samples: In its batch.
    """
    flops: Counter[str] = Counter()
    for work in found.works:
        if work.phase in ("forward", "recompute"):
            flops[work.layer] += work.flops
    return tuple(replace(each, flops=flops[each.name] / samples) for each in layers)


def class_places(network: nn.Module, names: Iterable[str]) -> tuple[Place, ...]:
    """Where the classes that hold these modules begin, most modules first."""
    holders = Counter(_holder(network, name) for name in names)
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


def _holder(network: nn.Module, name: str) -> type[nn.Module]:
    """The class whose code has made a module: that of the nearest one around it that is no mere list."""
    while name:
        name = name.rpartition(".")[0]
        kind = type(network.get_submodule(name))
        if kind not in (nn.Sequential, nn.ModuleList, nn.ModuleDict):
            return kind
    return type(network)


def _note_order(seen: Seen, name: str, module: nn.Module) -> None:
    if name not in seen.order and any(True for _ in module.parameters(recurse=False)):
        seen.order.append(name)


def _note(seen: Seen, name: str, layer: Layer | None) -> None:
    if layer is None:
        return
    if name in seen.layers:
        old = seen.layers[name]
        layer = Layer(**{**vars(layer), "calls": old.calls + 1})
    seen.layers[name] = layer


def _measured(name: str, module: nn.Module, arguments: tuple[Any, ...], result: Any, samples: int) -> Layer | None:
    given = next((each for each in arguments if isinstance(each, Tensor)), None)
    if given is None:
        return None
    made = result[0] if isinstance(result, tuple) else result
    if not isinstance(made, Tensor):
        return None
    sizes = {"name": name, "read": given.numel() / samples, "written": made.numel() / samples}
    if isinstance(module, nn.Linear):
        return Layer(
            kind="linear",
            inputs=module.in_features,
            outputs=module.out_features,
            rows=made.numel() / module.out_features / samples,
            weights=module.weight.numel(),
            shape=f"{module.in_features}→{module.out_features}",
            **sizes,  # type: ignore[arg-type]  # the name is text, the others are numbers
        )
    if isinstance(module, _ConvNd):
        return _convolution(module, given, made, sizes, samples)
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return _recurrent(module, given, sizes, samples)
    return None


def _convolution(module: _ConvNd, given: Tensor, made: Tensor, sizes: dict[str, Any], samples: int) -> Layer:
    transposed = isinstance(module, _ConvTransposeNd)
    pixels = (given if transposed else made).shape[2:]
    kernel = "x".join(map(str, module.kernel_size))
    groups = f", {module.groups} groups" if module.groups > 1 else ""
    return Layer(
        kind="convolution",
        inputs=module.in_channels,
        outputs=module.out_channels,
        groups=module.groups,
        rows=prod(pixels),
        weights=module.weight.numel(),
        stride=min(module.stride),
        shape=f"{module.in_channels}→{module.out_channels}, {kernel}{groups}",
        **sizes,
    )


def _recurrent(module: nn.RNNBase | nn.RNNCellBase, given: Tensor, sizes: dict[str, Any], samples: int) -> Layer:
    return Layer(
        kind="recurrent" if isinstance(module, nn.RNNBase) else "recurrent cell",
        inputs=module.input_size,
        outputs=module.hidden_size,
        rows=given.numel() / module.input_size / samples,
        weights=sum(each.numel() for each in module.parameters()),
        shape=f"{module.input_size}→{module.hidden_size} hidden",
        **sizes,
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
