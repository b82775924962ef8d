"""Folders in the layout of timm and the Hugging Face hub: ``config.json``, ``model.safetensors``, a ``README.md``.

Folders written by Paceline also have its description in the safetensors file; timm's have only ``config.json``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.checkpoint.durable import read_regular_file, reporting_disk_errors
from paceline.checkpoint.format import read_header
from paceline.errors import CheckpointError
from paceline.parsing.plain_text import load_json, utf8
from paceline.recipe.model import OPENING_OPTIONS

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
UNNAMED = "class_names_unknown"
"""Entry of the description of data: the classes have numbers only, which are used as their names."""

_MAX_CONFIG_BYTES = 50_000_000
_ARCHITECTURE = re.compile(r"[A-Za-z0-9_]+")  # never package.module:factory, which would import code
_PICKLES = ("*.bin", "*.pth", "*.pt", "*.tar", "*.ckpt")
_INTERPOLATIONS = ("bilinear", "bicubic")
# timm's defaults for values missing from a folder (timm.data.resolve_data_config).
_MEAN, _STD, _CROP = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), 0.875
# Options of timm.create_model itself, not of a network: they open other files, or repeat what the folder says.
_NOT_OPTIONS = frozenset(
    {"model_name", "scriptable", "exportable", "no_jit", "features_only", "out_indices"} | OPENING_OPTIONS
)
# More classes than any published network has; above it, the weights themselves must have as many.
_MANY_CLASSES = 100_000
_MAX_SIDE = 8192
_MIN_CROP = 0.1


def is_hub_folder(path: Path) -> bool:
    """Whether a path is a folder with a ``config.json`` that is neither a checkpoint nor a run's."""
    is_paceline = (path / "manifest.json").exists() or (path / "checkpoints").is_dir()
    return (path / CONFIG).is_file() and not is_paceline


def hub_weights_file(path: Path) -> Path:
    """Return the safetensors file of a hub folder.

    Raises:
        CheckpointError: If it has none; pickles are never opened.
    """
    if (path / WEIGHTS).is_file():
        return path / WEIGHTS
    files = sorted(path.glob("*.safetensors"))
    if len(files) == 1:
        return files[0]
    if (path / f"{WEIGHTS}.index.json").exists():
        raise CheckpointError(
            f"'{path}' holds its weights in {len(files)} shards, which are not supported; write a single file: "
            f"load them with "
            "the library they come from, and save_pretrained(..., max_shard_size='1TB')."
        )
    if files:
        raise CheckpointError(
            f"'{path}' holds {len(files)} safetensors files and no {WEIGHTS}; give one of these files, or a folder "
            "with one."
        )
    if pickles := [each for pattern in _PICKLES for each in sorted(path.glob(pattern))]:
        raise CheckpointError(
            f"'{path}' holds its weights as {pickles[0].name} only, a pickle (torch.save), which can run code and is "
            "never opened here; write the folder again with timm.models.save_for_hf(..., safe_serialization=True).",
            path=path,
        )
    raise CheckpointError(f"'{path}' has a {CONFIG} but no {WEIGHTS}; give a complete folder.", path=path)


def hub_metadata(path: Path) -> dict[str, str]:
    """Describe the weights of a hub folder from its ``config.json``, in the same form as Paceline's own files.

    Returns:
        ``recipe`` and ``data`` as JSON, and more; or ``refusal``, the reason why images cannot be preprocessed as in
        timm.

    Raises:
        CheckpointError: If it is not such a folder, or has no usable description.
    """
    file, weights_file = path / CONFIG, hub_weights_file(path)
    with reporting_disk_errors("read", file):
        if file.stat().st_size > _MAX_CONFIG_BYTES:
            raise CheckpointError(f"{file} has {file.stat().st_size} bytes, far more than a {CONFIG} needs.")
        content = read_regular_file(file)
    try:
        config = load_json(content)
    except ValueError as error:
        raise CheckpointError(f"{file} is not readable as JSON: {error}.", path=file) from error
    architecture = config.get("architecture") if isinstance(config, dict) else None
    if not isinstance(architecture, str) or not _ARCHITECTURE.fullmatch(architecture):
        raise CheckpointError(
            f"{file} names no timm architecture (found {architecture!r}); only hub folders in timm's layout can be "
            "read, as written by paceline export --format timm and timm.models.save_for_hf.",
            path=file,
        )
    try:
        return _describe(config, weights_file)
    except (TypeError, ValueError, KeyError, AttributeError, IndexError, OverflowError, ZeroDivisionError) as error:
        raise CheckpointError(f"{file} is not in timm's format: {type(error).__name__}: {error}.", path=file) from error


def _describe(config: Mapping[str, Any], weights_file: Path) -> dict[str, str]:
    pretrained = config.get("pretrained_cfg", config)  # older folders have everything at the top level
    options = _options(config, pretrained)
    channels, height, width = (int(side) for side in pretrained.get("input_size") or (3, 224, 224))
    # A network is built for the given classes and channels; these options would repeat them.
    channels = int(options.pop("in_chans", channels))
    options.pop("num_classes", None)
    classes = int(config.get("num_classes", pretrained.get("num_classes", 1000)))
    if classes > _MANY_CLASSES:
        specs, _ = read_header(weights_file)
        if classes > max((side for spec in specs.values() for side in spec.shape), default=0):
            raise ValueError(f"num_classes is {classes}, and no tensor of {weights_file.name} has as many rows")
    mean, std = (list(map(float, pretrained.get(key) or default)) for key, default in (("mean", _MEAN), ("std", _STD)))
    crop, mode = float(pretrained.get("crop_pct") or _CROP), pretrained.get("crop_mode") or "center"
    interpolation = str(pretrained.get("interpolation") or "bicubic")
    labels = _labels(config, pretrained, classes)
    lengths = f"{len(mean)} and {len(std)}"
    reasons = (
        (classes < 1, f"its network has {classes} classes"),
        (height != width or height < 1, f"its images are {height}x{width}, and only square images are supported"),
        (
            height > _MAX_SIDE,
            f"its images are {height}x{width}, and at most {_MAX_SIDE} pixels a side are supported",
        ),
        (channels not in (1, 3), f"its images have {channels} channels, and only 1 or 3 are supported"),
        ((len(mean), len(std)) != (channels,) * 2, f"mean and std have {lengths} numbers, not {channels}"),
        (mode != "center", f"crop_mode is {mode!r}, and only 'center' is supported"),
        (not _MIN_CROP <= crop <= 1, f"crop_pct is {crop}, and it must be from {_MIN_CROP} to 1"),
        (
            interpolation not in _INTERPOLATIONS,
            f"interpolation is {interpolation!r}, and {' and '.join(_INTERPOLATIONS)} are supported",
        ),
    )
    if refusal := "; ".join(reason for applies, reason in reasons if applies):
        return {"refusal": refusal}
    # timm rounds the size of the resized image down; this fraction results in the same size.
    same_crop = height / math.floor(height / crop)
    images = {"image_size": height, "channels": channels, "mean": mean, "std": std}
    images |= {"evaluation_crop": same_crop, "interpolation": interpolation}
    model = {"name": config["architecture"], **({"options": options} if options else {})}
    data = {
        "dataset": "unknown",
        "digest": "",
        "classes": classes,
        "class_names": labels or [str(number) for number in range(classes)],
        "evaluation_size": height,
        "always_resized": True,  # timm also resizes images of the right size; Paceline's networks do not
        **({} if labels else {UNNAMED: True}),
        **images,
    }
    recipe = {"task": "image_classification", "model": model, "data": images}
    # timm computes in fp32 by default.
    return {"recipe": json.dumps(recipe), "data": json.dumps(data), "precision": "fp32", "shown_by": "timm"}


def _options(config: Mapping[str, Any], pretrained: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the network's factory (``model_args``), without those that would open other files."""
    options = {key: value for key, value in (config.get("model_args") or {}).items() if value is not None}
    if wrong := sorted(_NOT_OPTIONS & options.keys()):
        raise ValueError(f"model_args has {wrong[0]}, which is not a network argument")
    if "global_pool" in options and not options["global_pool"]:
        raise ValueError("model_args turns global_pool off, and without it the network does not classify images")
    is_fixed = pretrained.get("fixed_input_size", False) and not options.get("dynamic_img_size")
    if is_fixed and options.get("strict_img_size", True):
        # timm builds such a network for the size of the images by default.
        _, height, width = (int(side) for side in pretrained.get("input_size") or (3, 224, 224))
        options.setdefault("img_size", [height, width] if height != width else height)
    return options


def _labels(config: Mapping[str, Any], pretrained: Mapping[str, Any], classes: int) -> list[str]:
    """Return class names in the order of the outputs; empty if there are none.

    Raises:
        ValueError: If they are not one string per output.
    """
    labels = config.get("label_names") or config.get("labels") or pretrained.get("label_names") or ()
    if isinstance(labels, Mapping):
        by_number = {int(key): name for key, name in labels.items()}
        labels = [by_number[number] for number in range(classes) if number in by_number]
    if labels and (len(labels) != classes or not all(isinstance(name, str) and utf8(name) == name for name in labels)):
        raise ValueError(f"its class names are not one string for each of {classes} classes: {str(labels)[:80]!r}")
    return list(labels)
