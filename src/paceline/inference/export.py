"""Export a run's weights to a file or folder that other programs, such as timm and ONNX Runtime, can open."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.durable import size_of
from paceline.checkpoint.format import write_tensor_file
from paceline.checkpoint.state import WRAPPERS, strip_wrapper_prefix
from paceline.checkpoint.weights import (
    ROUNDED,
    SavedWeights,
    check_finite,
    check_target,
    check_tensors,
    read_weights,
)
from paceline.errors import CheckpointError, PacelineError, RecipeError
from paceline.inference.atomic_output import check_output, put_in_place
from paceline.inference.export_onnx import QuantizationResult, calibration_images, need_onnx, quantised, write_onnx
from paceline.inference.formats import ONNX, formats
from paceline.inference.program import InBfloat16, preprocessing, write_program
from paceline.parsing.plain_text import load_json
from paceline.recipe.load import Overrides, set_by
from paceline.recipe.schema import refuse_foreign_code
from paceline.tasks.exportable import Exportable
from paceline.tasks.trained import TaskMaker, open_exportable


@dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """What to export.

    Attributes:
        target: A run directory, a checkpoint directory, a safetensors file or a hub folder.
        output: New file or folder.
        form: Name of a format.
        weights: ``auto``, ``model`` or ``ema``.
        best: In a run directory, take the best checkpoint instead of the newest.
        quantize: ``int8``, ``bf16`` or None.
        overrides: Changes to the run's ``data`` section, for ``int8``, which calibrates on some of its images, and for
            detectors, which are compared on some.
        trust_code: Whether to import code named in the weights' recipe.
        task: Makes the task, instead of the one that the recipe names.
    """

    target: Path
    output: Path
    form: str = "safetensors"
    weights: str = "auto"
    best: bool = False
    quantize: str | None = None
    overrides: Overrides = ()
    trust_code: bool = False
    task: TaskMaker | None = None

    def opened(self, saved: SavedWeights) -> Exportable:
        """Return the network of the weights with its inputs."""
        data = () if self.quantize == "int8" else self.overrides
        if "detects" in saved.description("data"):  # it is compared on the data, which their code may read
            recipe = saved.recipe(data)
            refuse_foreign_code(saved.description("recipe"), recipe, str(saved.path), trusted=self.trust_code)
        return open_exportable(saved, trust_code=self.trust_code, target=self.form, task=self.task, overrides=data)


@dataclass(frozen=True, kw_only=True)
class Exported:
    """Result of an export.

    Attributes:
        saved: The weights before rounding.
        size_bytes: Size of the file, or of all files in the folder.
        largest_difference: Largest difference between the exported model's output and the network's, in logits; None
            for a safetensors file, which holds the tensors themselves.
        trial: For int8: accuracy on held-out images before and after.
    """

    saved: SavedWeights
    size_bytes: int
    largest_difference: float | None = None
    trial: QuantizationResult | None = None


def export(request: ExportRequest) -> Exported:
    """Export one set of weights in an interchange format, on the CPU.

    Shards are combined, and low-rank adapters are merged into the network's weights. The exported model is compared
    with the network before the file is put in place.

    Raises:
        PacelineError: If there are no such weights, the format cannot hold them, or the output exists or cannot be
            written; nothing is written in that case.
    """
    _check(request)
    saved = read_weights(request.target, request.weights, best=request.best)
    _refuse_overrides(request, saved)
    check_finite(saved)
    with put_in_place(request.output) as path:
        compared = formats()[request.form](request, saved, path)
        size = size_of(path) if path.is_dir() else path.stat().st_size
    if isinstance(compared, QuantizationResult):
        return Exported(saved=saved, size_bytes=size, trial=compared)
    return Exported(saved=saved, size_bytes=size, largest_difference=compared)


def _check(request: ExportRequest) -> None:
    check_target(request.target)
    known = formats()
    ending = known[request.form].ending
    if ending and request.output.suffix != ending:
        raise CheckpointError(
            f"--output={request.output}: the file name must end in {ending}; change it.", path=request.output
        )
    if not ending and request.output.suffix and request.output.suffix in {each.ending for each in known.values()}:
        raise CheckpointError(
            f"--output={request.output}: a folder's name does not end in {request.output.suffix}; change it, or "
            "--format.",
            path=request.output,
        )
    if request.quantize is not None and request.quantize not in known[request.form].rounds_to:
        able = ", ".join(name for name, each in known.items() if request.quantize in each.rounds_to)
        raise PacelineError(
            f"--quantize {request.quantize} is for --format {able}, not {request.form}; choose one of them, or leave "
            "it out."
        )
    check_output(request.output)
    if known[request.form].reader == ONNX.reader:
        need_onnx()


def _refuse_overrides(request: ExportRequest, saved: SavedWeights) -> None:
    """Refuse overrides that have no effect."""
    if not request.overrides:
        return
    if other := [key for key in set_by(request.overrides) if not key.startswith("data.")]:
        raise RecipeError(f"override '{other[0]}' has no effect: only data.* selects the images.")
    compares = formats()[request.form].reader and "detects" in saved.description("data")
    if request.quantize != "int8" and not compares:
        raise PacelineError(
            f"overrides have no effect here (found {', '.join(map(str, request.overrides))}): they select the data for "
            "--quantize int8, and for the comparison of a detector; leave them out."
        )


# A path, transformers:FOLDER, or s3://BUCKET/PATH.
_PLACE = re.compile(r"(\w*:(?://)?|)((?:~\w*|\.\.?)?/.+|(?<=://).+)", re.DOTALL)


def file_metadata(saved: SavedWeights, request: ExportRequest) -> dict[str, str]:
    """Build a file's metadata: the metadata of the weights file without paths, and which weights these are."""
    metadata = {key: value for key, value in saved.metadata.items() if key != ROUNDED}
    if "recipe" in metadata:
        metadata["recipe"] = json.dumps(without_paths(load_json(metadata["recipe"])))
    rounded = {ROUNDED: request.quantize} if request.quantize is not None else {}
    return {**metadata, "weights": saved.weights, **rounded}


def without_paths(value: Any) -> Any:
    """Return JSON values with the last name of each path and address: where they are is private.

    A path begins with ``/``, ``./``, ``../`` or ``~``; others could be names. Names of repositories on the Hugging Face
    hub stay whole, and tokenizers, without which the weights are of no use. Nothing is removed: a recipe stays valid.
    """
    if isinstance(value, Mapping):
        return {key: each if key == "tokenizer" else without_paths(each) for key, each in value.items()}
    if isinstance(value, list):
        return [without_paths(each) for each in value]
    if not isinstance(value, str) or value.startswith("hf://"):
        return value
    kind, place = found.groups() if (found := _PLACE.fullmatch(value)) else ("", "")
    return kind + PurePath(place).name if place else value


def write_safetensors(request: ExportRequest, saved: SavedWeights, path: Path) -> None:
    """Write the tensors themselves."""
    state: Mapping[str, Tensor] = saved.plain if request.quantize is None else rounded(saved)
    # Without a wrapper's prefix; unchanged if the network cannot be built.
    if any(all(name.startswith(each) for name in state) for each in WRAPPERS):
        with contextlib.suppress(PacelineError):
            network = request.opened(saved).network
            state = strip_wrapper_prefix(network.state_dict(), state)[0]
    write_tensors(path, state, file_metadata(saved, request))


def write_tensors(path: Path, state: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write tensors with their metadata as a safetensors file."""
    tensors = {key: tensor.contiguous() for key, tensor in state.items()}
    write_tensor_file(path, tensors, {**metadata, "format": "pt"})


def rounded(saved: SavedWeights) -> Mapping[str, Tensor]:
    """Round matrices and filters to bf16; norms, biases and statistics are small and stay in fp32."""
    rounded = {
        key: tensor.to(torch.bfloat16) if tensor.dtype == torch.float32 and tensor.ndim > 1 else tensor
        for key, tensor in saved.plain.items()
    }
    check_tensors(rounded, f"{saved.path} in bf16")
    return rounded


def write_onnx_file(request: ExportRequest, saved: SavedWeights, path: Path) -> float | QuantizationResult:
    """Write a file for ONNX Runtime, and compare; quantise it if that was requested."""
    exportable = request.opened(saved)
    metadata = _described(exportable, request)
    if request.quantize is None:
        return write_onnx(exportable.in_units, path, metadata)
    images = calibration_images(saved, request.overrides, trust_code=request.trust_code)
    float_path = path.with_name(f"{path.stem}-fp32{path.suffix}")
    try:
        write_onnx(exportable, float_path, metadata)
        return quantised(float_path, path, images, metadata)
    finally:
        float_path.unlink(missing_ok=True)


def write_torch_export(request: ExportRequest, saved: SavedWeights, path: Path) -> float:
    """Write a program of torch.export, and compare."""
    exportable = request.opened(saved)
    if request.quantize is not None:
        if len(exportable.output_names) > 1:
            raise PacelineError(
                f"--quantize {request.quantize} is for networks of one output, and this one returns "
                f"{', '.join(exportable.output_names)}; leave it out."
            )
        exportable = replace(exportable, network=InBfloat16(exportable.network).eval())
    return write_program(exportable.in_units, path, _described(exportable, request))


def _described(exportable: Exportable, request: ExportRequest) -> dict[str, str]:
    """Describe an exported model in its metadata, including the preprocessing in words."""
    description = preprocessing(exportable.saved, exportable.inputs)
    return {**file_metadata(exportable.saved, request), "preprocessing": description}
