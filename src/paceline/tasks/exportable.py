"""Trained networks with their inputs, for other programs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from paceline.checkpoint.weights import SavedWeights
from paceline.data.batch import Nested
from paceline.errors import ModelError, NotFiniteError
from paceline.tasks.labelling import Outputs

TOLERANCE = 1e-4  # relative to the largest output; tolerance for other fp32 arithmetic
_MEAN_OVER_STD = 10_000.0  # above it, fp32 keeps fewer than three digits of the numbers' variation
_TRIED = (1, 2, 5)


class OutputDifference(float):
    """The largest difference between the outputs of an exported model and of its network.

    Attributes:
        where: What it is of, as the end of a sentence.
    """

    where: str

    def __new__(cls, largest: float, where: str = "in the logits") -> OutputDifference:
        """Return the number with its words."""
        difference = super().__new__(cls, largest)
        difference.where = where
        return difference


@dataclass(frozen=True)
class Input:
    """One input tensor of a network.

    Attributes:
        name: Its name.
        sizes: Its dimensions: a number, or the name of a dynamic dimension. The first is ``batch``.
        below: Exclusive upper bound of integers (of each column, if there are several); None for floats.
        description: A description for people.
    """

    name: str
    sizes: tuple[int | str, ...]
    below: tuple[int, ...] | None
    description: str

    def example(self, changing: dict[str, int], seed: int = 0) -> Tensor:
        """Return random values, float32 or int64, with these sizes for the dynamic dimensions."""
        draws = torch.Generator().manual_seed(seed)
        shape = [changing[size] if isinstance(size, str) else size for size in self.sizes]
        if self.below is None:
            return torch.randn(shape, generator=draws)
        return (torch.rand(shape, generator=draws, dtype=torch.float64) * torch.tensor(self.below)).long()


@dataclass(frozen=True, kw_only=True)
class Exportable:
    """A trained network in evaluation mode on the CPU.

    Attributes:
        network: Takes the inputs in order, returns the outputs.
        inputs: Its inputs.
        longest: The maximum size of each dynamic dimension that has one.
        saved: Its weights and their description.
        outputs: Meaning of the outputs, if it labels images or predicts numbers of them.
        output_names: Names of the outputs; by default one tensor.
    """

    network: nn.Module
    inputs: tuple[Input, ...]
    longest: dict[str, int]
    saved: SavedWeights
    outputs: Outputs | None = None
    output_names: tuple[str, ...] = ("logits",)

    @property
    def in_units(self) -> Exportable:
        """Return a copy that outputs the user's units instead of standardised numbers, for formats that compute.

        Raises:
            ModelError: If a standard deviation is too small relative to its mean for float32, the dtype of exported
                outputs.
        """
        if self.outputs is None or not self.outputs.mean:
            return self
        for name, mean, std in zip(self.outputs.names, self.outputs.mean, self.outputs.std, strict=True):
            if abs(mean) > _MEAN_OVER_STD * std:
                raise ModelError(
                    f"{name!r} has a mean of {mean:g} and varies by {std:g}, which float32 outputs cannot represent; "
                    "use --format safetensors, or subtract the mean before training."
                )
        return replace(self, network=_InUnits(self.network, self.outputs).eval())

    def examples(self, batch: int, seed: int = 0) -> tuple[Tensor, ...]:
        """Return random inputs; larger batches get slightly smaller other dimensions."""
        changing = {name: max(2, largest - batch) for name, largest in self.longest.items()} | {"batch": batch}
        return tuple(each.example(changing, seed) for each in self.inputs)

    @property
    def dynamic_shapes(self) -> tuple[dict[int, Any], ...]:
        """Return the dynamic dimensions in torch.export's form."""
        named = {
            name: torch.export.Dim(name, max=self.longest.get(name))
            for name in dict.fromkeys(size for each in self.inputs for size in each.sizes if isinstance(size, str))
        }
        return tuple(
            {place: named[size] for place, size in enumerate(each.sizes) if isinstance(size, str)}
            for each in self.inputs
        )

    def compare(self, other: Any, *, what: str, tolerance: float = TOLERANCE) -> OutputDifference:
        """Compare an exported model with its network at several batch sizes.

        Args:
            other: Takes the inputs in order, returns float32 logits.
            what: Its name, for the message.
            tolerance: Largest difference, in units of the largest answer if that is above 1.

        Returns:
            The largest difference, in logits; for regression, in standard deviations.

        Raises:
            ModelError: If it exceeds the tolerance.
            NotFiniteError: If the network overflows.
        """
        largest, units = 0.0, self.network if isinstance(self.network, _InUnits) else None
        for batch in _TRIED:
            inputs = self.examples(batch, seed=batch)
            with torch.inference_mode():
                expected, outputs = self.network(*inputs).float(), other(*inputs)
            if not bool(expected.isfinite().all()):
                raise NotFiniteError(
                    f"the network's outputs for a batch of {batch} are not finite numbers, though its weights are; "
                    "nothing was written."
                )
            if outputs.shape != expected.shape or not bool(torch.isfinite(outputs).all()):
                raise ModelError(
                    f"for a batch of {batch}, {what} returns the shape {tuple(outputs.shape)} or NaN, and the network "
                    f"{tuple(expected.shape)}; nothing was written."
                )
            rounding = 0.0
            if units is not None:  # so that neither a small unit hides a difference nor a large mean creates one
                rounding = float((torch.finfo(torch.float32).eps * expected.abs() / units.scale).max())
                expected, outputs = ((each - units.shift) / units.scale for each in (expected, outputs))
            difference = float((outputs - expected).abs().max())
            if difference > tolerance * max(1.0, float(expected.abs().max())) + rounding:
                raise ModelError(
                    f"{what} differs from the network by up to {difference:.2g} (largest output "
                    f"{float(expected.abs().max()):.2g}); nothing was written. Use --format safetensors."
                )
            largest = max(largest, difference)
        return OutputDifference(largest)


class _InUnits(nn.Module):
    """Wraps a network of standardised numbers to output the user's units."""

    scale: Tensor
    shift: Tensor

    def __init__(self, network: nn.Module, outputs: Outputs) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("scale", torch.tensor(outputs.std))
        self.register_buffer("shift", torch.tensor(outputs.mean))

    def forward(self, images: Tensor) -> Tensor:
        """Map images to numbers, float32 [N, numbers]."""
        numbers: Tensor = self.network(images)
        return numbers * self.scale + self.shift


def normalisation(data: Mapping[str, Any]) -> str:
    """Return the formula by which pixels are normalised, from a description of trained weights."""
    mean, std = (", ".join(f"{each:g}" for each in data[key]) for key in ("mean", "std"))
    return f"(value / 255 - mean) / std with mean {mean} and std {std}"


def inputs_of(network: nn.Module, inputs: Nested, target: str) -> tuple[Input, ...]:
    """Describe a batch's tensors in the order of the arguments of the network's ``forward``.

    Args:
        network: The network.
        inputs: A tensor, several in order, or several by name.
        target: Requested format, for the message.

    Raises:
        ModelError: If an exported network could not take them.
    """
    names = list(inspect.signature(network.forward).parameters)
    listed = inputs if isinstance(inputs, tuple | list) else [inputs]
    given = inputs if isinstance(inputs, dict) else dict(zip(names, listed, strict=False))
    found = {name: given[name] for name in names[: len(given)] if isinstance(given.get(name), Tensor)}
    wrong = [name for name, each in found.items() if each.dtype not in (torch.float32, torch.int64)]
    if wrong or len(found) != (len(given) if isinstance(inputs, dict) else len(listed)):
        raise ModelError(
            f"the format {target} holds networks whose forward takes tensors of float32 or int64 in order, but forward "
            f"takes {', '.join(names)}, and the samples have {', '.join(map(str, wrong or given))} otherwise; use "
            "safetensors.",
            key="format",
            value=target,
        )
    return tuple(
        Input(
            name,
            ("batch", *each.shape[1:]),
            None if each.is_floating_point() else (int(each.max()) + 1,),
            f"as in training, {str(each.dtype).removeprefix('torch.')}",
        )
        for name, each in found.items()
    )
