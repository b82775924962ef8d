"""Export a run's weights to a file or folder that other programs, such as Transformers and peft, can open."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.durable import size_of
from paceline.checkpoint.format import write_tensor_file
from paceline.checkpoint.hub_folder import CONFIG, WEIGHTS
from paceline.checkpoint.state import WRAPPERS, strip_wrapper_prefix
from paceline.checkpoint.weights import (
    ADAPTER_PARTS,
    ROUNDED,
    SavedWeights,
    check_finite,
    check_target,
    check_tensors,
    read_weights,
)
from paceline.data.text.tokenizer import HuggingFaceTokenizer, Tokenizer, tokenizer_from
from paceline.errors import CheckpointError, ModelError, PacelineError, RecipeError
from paceline.inference.atomic_output import check_output, put_in_place
from paceline.inference.export_onnx import QuantizationResult, calibration_images, need_onnx, quantised, write_onnx
from paceline.inference.hub_export import write_hub_folder
from paceline.inference.program import InBfloat16, preprocessing, write_program
from paceline.inference.trained import open_exportable
from paceline.models.adapters import trained_layers
from paceline.models.transformers_models import LanguageModel, SequenceClassifier
from paceline.recipe.load import Overrides
from paceline.tasks.exportable import Exportable

_ADAPTERS = "adapter_model.safetensors"


FORMATS = {
    "timm": "",
    "transformers": "",
    "peft": "",
    "safetensors": ".safetensors",
    "onnx": ".onnx",
    "torch-export": ".pt2",
}
"""The formats with their file extensions; a hub folder has none."""
QUANTIZED = {"int8": ("onnx",), "bf16": ("timm", "safetensors", "torch-export")}
"""Dtypes to which weights can be rounded, with the formats that support them."""


@dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """What to export.

    Attributes:
        target: A run directory, a checkpoint directory, a safetensors file or a hub folder.
        output: New file or folder.
        form: One of ``FORMATS``.
        weights: ``auto``, ``model`` or ``ema``.
        best: In a run directory, take the best checkpoint instead of the newest.
        quantize: ``int8``, ``bf16`` or None.
        overrides: Changes to the run's ``data`` section, for ``int8``, which calibrates on some of its images.
        trust_code: Whether to import code named in the weights' recipe.
    """

    target: Path
    output: Path
    form: str = "safetensors"
    weights: str = "auto"
    best: bool = False
    quantize: str | None = None
    overrides: Overrides = ()
    trust_code: bool = False


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
    check_finite(saved)
    writers: Mapping[str, Callable[[ExportRequest, SavedWeights, Path], float | QuantizationResult | None]] = {
        "safetensors": _safetensors,
        "timm": _timm,
        "transformers": _transformers,
        "peft": _peft,
        "onnx": _onnx,
        "torch-export": _program,
    }
    with put_in_place(request.output) as path:
        compared = writers[request.form](request, saved, path)
        size = size_of(path) if path.is_dir() else path.stat().st_size
    if isinstance(compared, QuantizationResult):
        return Exported(saved=saved, size_bytes=size, trial=compared)
    return Exported(saved=saved, size_bytes=size, largest_difference=compared)


def _check(request: ExportRequest) -> None:
    check_target(request.target)
    ending = FORMATS[request.form]
    if ending and request.output.suffix != ending:
        raise CheckpointError(f"--output={request.output}: the file name must end in {ending}; change it.")
    if not ending and request.output.suffix in FORMATS.values() and request.output.suffix:
        raise CheckpointError(
            f"--output={request.output}: a hub folder's name does not end in {request.output.suffix}; change it, or "
            "--format."
        )
    if request.quantize is not None and request.form not in QUANTIZED[request.quantize]:
        raise PacelineError(
            f"--quantize {request.quantize} is for --format {', '.join(QUANTIZED[request.quantize])}, not "
            f"{request.form}; choose one of them, or leave it out."
        )
    if request.overrides and request.quantize != "int8":
        raise PacelineError(
            f"overrides have no effect here (found {', '.join(map(str, request.overrides))}): they select the data for "
            "--quantize int8; leave them out."
        )
    check_output(request.output)
    if request.form == "onnx":
        need_onnx()


def _metadata(saved: SavedWeights, request: ExportRequest) -> dict[str, str]:
    """Build a file's metadata: the metadata of the weights file, and which weights these are."""
    metadata = {key: value for key, value in saved.metadata.items() if key != ROUNDED}
    rounded = {ROUNDED: request.quantize} if request.quantize is not None else {}
    return {**metadata, "weights": saved.weights, **rounded}


def _safetensors(request: ExportRequest, saved: SavedWeights, path: Path) -> None:
    state: Mapping[str, Tensor] = saved.plain if request.quantize is None else _rounded(saved)
    # Without a wrapper's prefix; unchanged if the network cannot be built.
    if any(all(name.startswith(each) for name in state) for each in WRAPPERS):
        with contextlib.suppress(PacelineError):
            network = open_exportable(saved, trust_code=request.trust_code, target="safetensors").network
            state = strip_wrapper_prefix(network.state_dict(), state)[0]
    _write_tensors(path, state, _metadata(saved, request))


def _write_tensors(path: Path, state: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    tensors = {key: tensor.contiguous() for key, tensor in state.items()}
    write_tensor_file(path, tensors, {**metadata, "format": "pt"})


def _rounded(saved: SavedWeights) -> Mapping[str, Tensor]:
    """Round matrices and filters to bf16; norms, biases and statistics are small and stay in fp32."""
    rounded = {
        key: tensor.to(torch.bfloat16) if tensor.dtype == torch.float32 and tensor.ndim > 1 else tensor
        for key, tensor in saved.plain.items()
    }
    check_tensors(rounded, f"{saved.path} in bf16")
    return rounded


def _timm(request: ExportRequest, saved: SavedWeights, path: Path) -> float:
    saved.description("recipe")
    state: Mapping[str, Tensor] = saved.plain
    shown = saved
    if request.quantize is not None:
        state = _rounded(saved)
        # timm loads fp32, so its outputs are those of the rounded weights.
        read = {key: each.float() if each.dtype == torch.bfloat16 else each for key, each in state.items()}
        shown = replace(saved, state=read, metadata={**saved.metadata, ROUNDED: "bf16"})
    exportable = open_exportable(shown, trust_code=request.trust_code, target="timm")
    # Under the names that timm expects.
    renamed = strip_wrapper_prefix(exportable.network.state_dict(), state)[0]
    write_weights = partial(_write_tensors, state=renamed, metadata=_metadata(saved, request))
    return write_hub_folder(exportable, path, run=request.target, write_weights=write_weights)


def _transformers(request: ExportRequest, saved: SavedWeights, folder: Path) -> float:
    """Write a folder for ``AutoModelFor….from_pretrained`` and ``AutoTokenizer``, load it, and compare.

    Raises:
        ModelError: If the network is not one of Transformers, or the results differ.
    """
    exportable = open_exportable(saved, trust_code=request.trust_code, target="transformers")
    network = _plain(exportable)
    kind: Any = type(network)
    network.config.architectures, network.config.dtype = [kind.__name__], torch.float32
    names = exportable.saved.description("data").get("class_names")
    if names is not None:
        network.config.id2label = dict(enumerate(names))
        network.config.label2id = {name: number for number, name in enumerate(names)}
    folder.mkdir()
    tokenizer = _write_tokenizer(exportable, folder)
    if isinstance(tokenizer, HuggingFaceTokenizer) and exportable.saved.description("data").get("messages", False):
        network.config.eos_token_id = sorted(tokenizer.answer_ends)
    network.config.to_json_file(folder / CONFIG)
    _write_tensors(folder / WEIGHTS, saved.plain, _metadata(saved, request))
    try:
        loaded = kind.from_pretrained(folder, local_files_only=True, use_safetensors=True).eval()
    except Exception as error:  # its checks may raise anything
        raise ModelError(f"Transformers cannot open the written folder ({error}); nothing was kept.") from error
    return exportable.compare(_called_with_names(loaded), what="Transformers")


def _peft(request: ExportRequest, saved: SavedWeights, folder: Path) -> float:
    """Write the low-rank adapters, and the trained classifier, for ``PeftModel.from_pretrained``, and compare.

    Raises:
        RecipeError: If the run trained no adapters.
        ModelError: If the network is not one of Transformers, or the results differ.
    """
    exportable = open_exportable(saved, trust_code=request.trust_code, target="peft")
    network = _plain(exportable)
    layers = sorted(name.removesuffix(ADAPTER_PARTS[0]) for name in saved.state if name.endswith(ADAPTER_PARTS[0]))
    if not layers:
        raise RecipeError(f"{saved.path} has no low-rank adapters (model.adapters); use --format transformers.")
    from peft import LoraConfig, PeftModel

    model, heads = saved.description("recipe")["model"], trained_layers(exportable.network)
    config, commit = model["adapters"], model.get("options", {}).get("_commit_hash")
    base_name = model["name"].removeprefix("transformers:")
    prefixes = (*(f"{layer}.lora_" for layer in layers), *(f"{head}." for head in heads))
    tensors = {
        f"base_model.model.{name.replace('.default.', '.')}": each.contiguous()
        for name, each in saved.state.items()
        if name.startswith(prefixes) and not name.endswith(ADAPTER_PARTS[2])
    }
    folder.mkdir()
    LoraConfig(
        r=config["rank"],
        lora_alpha=config["alpha"],
        target_modules=layers,
        lora_dropout=config.get("dropout", 0.0),
        fan_in_fan_out=any(f"{layer}{ADAPTER_PARTS[2]}" in saved.state for layer in layers),
        modules_to_save=heads or None,
        task_type={"classes": "SEQ_CLS", "tags": "TOKEN_CLS"}.get(str(exportable.network.objective), "CAUSAL_LM"),
        base_model_name_or_path=base_name.partition("@")[0] if commit else base_name,
        revision=commit,
    ).save_pretrained(str(folder))
    write_tensor_file(folder / _ADAPTERS, tensors, {"format": "pt"})
    _write_tokenizer(exportable, folder)
    base = {name.replace(".base_layer.", "."): each for name, each in saved.state.items() if ".lora_" not in name}
    network.load_state_dict(base)
    with warnings.catch_warnings():
        # About its own use of Transformers.
        warnings.simplefilter("ignore", FutureWarning)
        loaded = PeftModel.from_pretrained(network, str(folder)).eval()
    return exportable.compare(_called_with_names(loaded), what="peft")


def _write_tokenizer(exportable: Exportable, folder: Path) -> Tokenizer:
    tokenizer = tokenizer_from(exportable.saved.description("data")["tokenizer"], str(exportable.saved.path))
    if isinstance(tokenizer, HuggingFaceTokenizer):
        tokenizer.write(folder, exportable.longest["length"])
    return tokenizer


def _plain(exportable: Exportable) -> Any:
    """Return a copy of the network with the library's own class."""
    network: Any = exportable.network
    if not isinstance(network, LanguageModel | SequenceClassifier):
        name = exportable.saved.description("recipe").get("model", {}).get("name")
        raise ModelError(
            f"model.name={name} is not a network of Transformers; use --format safetensors, onnx or torch-export."
        )
    copied = copy.deepcopy(network)
    copied.__class__ = type(network).__bases__[1]
    return copied


def _called_with_names(network: Any) -> Callable[..., Tensor]:
    return lambda tokens, mask=None: network(input_ids=tokens, attention_mask=mask).logits


def _onnx(request: ExportRequest, saved: SavedWeights, path: Path) -> float | QuantizationResult:
    exportable = open_exportable(saved, trust_code=request.trust_code, target="onnx")
    metadata = _described(exportable, request)
    if request.quantize is None:
        return write_onnx(exportable.in_units, path, metadata)
    images = calibration_images(saved, request.overrides, trust_code=request.trust_code)
    if exportable.kind != "images":
        raise RecipeError("--quantize int8 is for networks that classify images.")
    float_path = path.with_name(f"{path.stem}-fp32{path.suffix}")
    try:
        write_onnx(exportable, float_path, metadata)
        return quantised(float_path, path, images, metadata)
    finally:
        float_path.unlink(missing_ok=True)


def _program(request: ExportRequest, saved: SavedWeights, path: Path) -> float:
    exportable = open_exportable(saved, trust_code=request.trust_code, target="torch-export")
    if request.quantize is not None:
        exportable = replace(exportable, network=InBfloat16(exportable.network).eval())
    return write_program(exportable.in_units, path, _described(exportable, request))


def _described(exportable: Exportable, request: ExportRequest) -> dict[str, str]:
    """Describe an exported model in its metadata, including the preprocessing in words."""
    description = preprocessing(exportable.saved, exportable.inputs)
    return {**_metadata(exportable.saved, request), "preprocessing": description}
