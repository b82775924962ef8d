"""Inputs and outputs of a trained network, for other programs."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.checkpoint.weights import SavedWeights
from paceline.errors import ModelError, NotFiniteError, RecipeError
from paceline.inference.clicks import ClickPredictor
from paceline.inference.labelling import Outputs
from paceline.inference.predict import Predictor
from paceline.inference.segmentation import SegmentationPredictor
from paceline.inference.text import TextLabeller, TextPredictor
from paceline.inference.trained import trained_task

TOLERANCE = 1e-4  # relative to the largest output; tolerance for other fp32 arithmetic
_MEAN_OVER_STD = 10_000.0  # above it, fp32 keeps fewer than three digits of the numbers' variation

# By keys of the weights' description.
_NOT_ONE_LABEL = {
    "targets": "predicts numbers",
    "label_thresholds": "gives an image any number of labels",
    "labels_pixels": "labels pixels",
}
_CPU = torch.device("cpu")
_TRIED = (1, 2, 5)


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
        network: Takes the inputs in order, returns one tensor of ``logits``.
        inputs: Its inputs.
        longest: The maximum size of each dynamic dimension that has one.
        saved: Its weights and their description.
        kind: Kind of data: ``images``, ``pixels``, ``tokens`` or ``clicks``.
        outputs: Meaning of the outputs, for images.
    """

    network: nn.Module
    inputs: tuple[Input, ...]
    longest: dict[str, int]
    saved: SavedWeights
    kind: str
    outputs: Outputs | None = None

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

    def compare(self, other: Any, *, what: str, tolerance: float = TOLERANCE) -> float:
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
        return largest


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


def open_exportable(saved: SavedWeights, *, trust_code: bool, target: str) -> Exportable:
    """Build the network of saved weights, and describe its inputs.

    Args:
        saved: The weights.
        trust_code: Whether to import code named in their recipe.
        target: Requested format, for the message.

    Raises:
        PacelineError: If the network's inputs are unknown.
    """
    data = saved.description("data")
    if "detects" in data:
        raise RecipeError(
            f"{saved.path} holds a detector: it takes pictures of any size and returns any number of boxes, which "
            f"--format {target} cannot express; use --format safetensors."
        )
    if target == "timm" and (what := next((said for key, said in _NOT_ONE_LABEL.items() if key in data), None)):
        raise RecipeError(
            f"{saved.path} {what}, and timm's folders are for one label; use --format safetensors, onnx or "
            "torch-export."
        )
    longest: dict[str, int] = {}
    outputs = None
    if "labels_pixels" in data:
        pixels = SegmentationPredictor(saved, _CPU, trust_code=trust_code)
        kind, network = "pixels", pixels.network
        description = (
            f"{'RGB' if pixels.channels == 3 else 'all channels'}, float32: resize the longer side to {pixels.size} "
            f"pixels ({data['interpolation']}, antialiased) and pad at the right and below; {_normalised(data)}"
        )
        inputs = [Input("images", ("batch", pixels.channels, pixels.size, pixels.size), None, description)]
    elif "tokenizer" in data:
        is_classifier = "class_names" in data
        open_network = TextLabeller if is_classifier else TextPredictor
        kind, network = "tokens", open_network(saved, _CPU, trust_code=trust_code).network
        vocabulary, longest["length"] = int(data["vocabulary"]), int(data["context"])
        description = f"token ids in [0, {vocabulary}), int64, at most {longest['length']} in a row"
        inputs = [Input("tokens", ("batch", "length"), (vocabulary,), description)]
        inputs += [Input("mask", ("batch", "length"), (2,), "1 for tokens, 0 for padding, int64")] * is_classifier
    elif "table_rows" in data:
        kind, network = "clicks", ClickPredictor(saved, _CPU, trust_code=trust_code).network
        rows, numbers = tuple(int(each) for each in data["table_rows"]), int(data["dense_features"])
        inputs = [
            Input("dense", ("batch", numbers), None, "numbers as the network was trained on them, float32"),
            Input("categories", ("batch", len(rows)), rows, "a row of each table, int64"),
        ]
    elif "class_names" in data or "targets" in data:
        labeller = Predictor(saved, _CPU, trained_task(saved, trust_code=trust_code))
        kind, network, outputs = "images", labeller.network, labeller.outputs
        # Single-view, even if the run was evaluated with several views.
        side = int(data.get("evaluation_size", data["image_size"]))
        inputs = [Input("images", ("batch", int(data["channels"]), side, side), None, "normalised images, float32")]
    else:
        raise RecipeError(
            f"{saved.path} does not say what its network's inputs are (task {data.get('task')}); --format {target} "
            "is for images, text and clicks; use --format safetensors."
        )
    # Exported parameters need no gradients.
    network.requires_grad_(requires_grad=False)
    return Exportable(
        network=network.eval(), inputs=tuple(inputs), longest=longest, saved=saved, kind=kind, outputs=outputs
    )


def _normalised(data: Mapping[str, Any]) -> str:
    mean, std = (", ".join(f"{each:g}" for each in data[key]) for key in ("mean", "std"))
    return f"(value / 255 - mean) / std with mean {mean} and std {std}"


def preprocessing(saved: SavedWeights, inputs: Sequence[Input]) -> str:
    """Describe in words how to preprocess a sample for a network."""
    data = saved.description("data")
    taken = "; ".join(f"{each.name}: {each.description}, [{', '.join(map(str, each.sizes))}]" for each in inputs)
    if "evaluation_crop" not in data:
        return taken
    size, crop = int(data.get("evaluation_size", data["image_size"])), float(data["evaluation_crop"])
    colours = "one grey channel" if data["channels"] == 1 else "RGB"
    unless = "" if data.get("always_resized") else f"if the image is not {size}x{size} already, "
    return (
        f"{taken}. Decode to {colours}; {unless}resize its shorter side to "
        f"{round(size / crop)} pixels ({data.get('interpolation', 'bilinear')}, antialiased) and keep the centre "
        f"{size}x{size}; {_normalised(data)}; channels first."
    )


DESCRIPTION = "paceline.json"


class InBfloat16(nn.Module):
    """Wraps a network to compute in bf16, with fp32 inputs and outputs.

    Args:
        network: The network; converted to bf16 in place.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network.to(torch.bfloat16)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Run the network; integer inputs are unchanged."""
        lower = (each.to(torch.bfloat16) if each.is_floating_point() else each for each in inputs)
        logits: Tensor = self.network(*lower)
        return logits.float()


def write_program(exportable: Exportable, path: Path, metadata: Mapping[str, str]) -> float:
    """Write a network as a torch.export program, read it back, and compare it at several batch sizes.

    Args:
        exportable: The network.
        path: The new file; its name ends in ``.pt2``.
        metadata: Stored in the file, as JSON in the extra file ``paceline.json``.

    Returns:
        The largest difference between the program's output and the network's, in logits.

    Raises:
        ModelError: If the network cannot be traced for batches of any size, or the program's results differ.
    """
    shapes: Any = exportable.dynamic_shapes
    if isinstance(exportable.network, InBfloat16):
        shapes = (shapes,)  # accepts any number of inputs
    try:
        with warnings.catch_warnings():
            # torch.export warns about its own deprecations; the result is verified.
            warnings.simplefilter("ignore")
            program = torch.export.export(
                exportable.network, exportable.examples(2), dynamic_shapes=shapes, strict=False
            )
            torch.export.save(program, path, extra_files={DESCRIPTION: json.dumps(dict(metadata))})
            extra_files = {DESCRIPTION: ""}
            # Safe to load: this function has just written the file.
            read_back = torch.export.load(path, extra_files=extra_files).module()
    except OSError:
        raise
    except Exception as error:  # tracing an arbitrary network may raise anything
        raise ModelError(
            f"{type(exportable.network).__name__} cannot be traced by torch.export: {first_line(error)}; use --format "
            "safetensors."
        ) from error
    assert json.loads(extra_files[DESCRIPTION]) == dict(metadata)
    return exportable.compare(read_back, what="the program")


def first_line(error: BaseException) -> str:
    """Return the first informative line of an error, shortened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200] if lines else 'no reason given'}"
