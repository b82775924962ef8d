"""Write language models, and text and token classifiers, for Transformers and peft."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.format import write_tensor_file
from paceline.checkpoint.hub_folder import CONFIG, WEIGHTS
from paceline.checkpoint.weights import ADAPTER_PARTS, SavedWeights
from paceline.errors import ModelError, RecipeError
from paceline.inference.export import ExportRequest, file_metadata, without_paths, write_tensors
from paceline.models.adapters import trained_layers
from paceline.tasks.exportable import Exportable
from paceline.tasks.trained import open_exportable
from paceline_text.tokenizer import HuggingFaceTokenizer, Tokenizer, tokenizer_from
from paceline_text.transformers_models import LanguageModel, SequenceClassifier

_ADAPTERS = "adapter_model.safetensors"


def write_transformers(request: ExportRequest, saved: SavedWeights, folder: Path) -> float:
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
    write_tensors(folder / WEIGHTS, saved.plain, file_metadata(saved, request))
    try:
        loaded = kind.from_pretrained(folder, local_files_only=True, use_safetensors=True).eval()
    except Exception as error:  # its checks may raise anything
        raise ModelError(f"Transformers cannot open the written folder ({error}); nothing was kept.") from error
    return exportable.compare(_called_with_names(loaded), what="Transformers")


def write_peft(request: ExportRequest, saved: SavedWeights, folder: Path) -> float:
    """Write the low-rank adapters, and the trained classifier, for ``PeftModel.from_pretrained``, and compare.

    Raises:
        RecipeError: If the run trained no adapters.
        ModelError: If the network is not one of Transformers, or the results differ.
    """
    exportable = open_exportable(saved, trust_code=request.trust_code, target="peft")
    network = _plain(exportable)
    layers = sorted(name.removesuffix(ADAPTER_PARTS[0]) for name in saved.state if name.endswith(ADAPTER_PARTS[0]))
    if not layers:
        raise RecipeError(
            f"{saved.path} has no low-rank adapters (model.adapters); use --format transformers.", path=saved.path
        )
    from peft import LoraConfig, PeftModel

    model, heads = saved.description("recipe")["model"], trained_layers(exportable.network)
    config, commit = model["adapters"], model.get("options", {}).get("_commit_hash")
    base_name = without_paths(model["name"]).removeprefix("transformers:")
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
            f"model.name={name} is not a network of Transformers; use --format safetensors, onnx or torch-export.",
            key="model.name",
            value=name,
        )
    copied = copy.deepcopy(network)
    copied.__class__ = type(network).__bases__[1]
    return copied


def _called_with_names(network: Any) -> Callable[..., Tensor]:
    return lambda tokens, mask=None: network(input_ids=tokens, attention_mask=mask).logits
