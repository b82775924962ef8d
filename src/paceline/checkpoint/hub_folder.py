"""What does a folder in timm's and the Hugging Face hub's layout say of the weights that lie in it?

Such a folder holds ``config.json``, ``model.safetensors`` and often a ``README.md``. Ours have our own description in
the safetensors file besides; of timm's, ``config.json`` is all there is.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.checkpoint.durable import reporting_disk_errors
from paceline.checkpoint.tensor_file import read_header, read_regular_file
from paceline.errors import CheckpointError
from paceline.plain_json import load_json
from paceline.recipe.model import OPENING_OPTIONS

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
UNNAMED = "class_names_unknown"
"""Entry of the description of data: the classes have numbers only, which stand in place of their names."""

_LARGEST_CONFIG_BYTES = 50_000_000
_ARCHITECTURE = re.compile(r"[A-Za-z0-9_]+")  # never package.module:factory, which would be code to import
_PICKLES = ("*.bin", "*.pth", "*.pt", "*.tar", "*.ckpt")
_INTERPOLATIONS = ("bilinear", "bicubic")
# What timm takes where a folder is silent (timm.data.resolve_data_config).
_MEAN, _STD, _CROP = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), 0.875
# A network is built for the classes and channels at hand; these would say so twice.
_SIZES = ("num_classes", "in_chans")
# Of timm.create_model itself, not of a network: they open other files, or say once more what the folder says.
_NOT_OPTIONS = frozenset(
    {"model_name", "scriptable", "exportable", "no_jit", "features_only", "out_indices"} | OPENING_OPTIONS
)
# More than any published network has; beyond it the weights themselves must have as many.
_MANY_CLASSES = 100_000
_LONGEST_SIDE = 8192
_SMALLEST_CROP = 0.1


@dataclass(frozen=True, kw_only=True)
class HubFolder:
    """What ``config.json`` says, as timm reads it.

    Attributes:
        architecture: timm's name of the network.
        classes: Width of its output.
        labels: Their names; empty if the folder does not say.
        mean: Per-channel mean subtracted from pixels in [0, 1].
        std: Per-channel standard deviation they are divided by.
        crop: Share of the resized image's side that the centre crop keeps, in (0, 1]. timm rounds the resized side
            down; this is the share that leads to the same side.
        interpolation: How images are resized.
        image_size: Height and width that the network sees, in pixels.
        channels: Of its images.
        weights_file: The safetensors file.
        options: More arguments of the network's factory (``model_args``).
        refusal: Why images cannot be shown here as timm shows them; empty if they can.
    """

    architecture: str
    classes: int
    labels: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop: float
    interpolation: str
    image_size: int
    channels: int
    weights_file: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    refusal: str = ""

    @property
    def metadata(self) -> dict[str, str]:
        """The same in the words of our own files, for weights that come without: ``recipe`` and ``data`` as JSON."""
        shown = {"image_size": self.image_size, "channels": self.channels, "mean": self.mean, "std": self.std}
        crop = {"evaluation_crop": self.crop, "interpolation": self.interpolation}
        recipe = {
            "task": "image_classification",
            "model": {"name": self.architecture, **({"options": dict(self.options)} if self.options else {})},
            "data": {**shown, **crop},
        }
        data: dict[str, Any] = {
            "dataset": "unknown",
            "digest": "",
            "classes": self.classes,
            "class_names": self.labels or tuple(map(str, range(self.classes))),
            "evaluation_size": self.image_size,
            "always_resized": True,  # also an image of the right size, which is shown as it is to networks of ours
            **({} if self.labels else {UNNAMED: True}),
            **shown,
            **crop,
        }
        if self.refusal:
            return {"refusal": self.refusal}
        # timm computes in fp32 unless told otherwise.
        described = {"recipe": json.dumps(recipe), "data": json.dumps(data)}
        return {**described, "precision": "fp32", "shown_by": "timm"}


def is_hub_folder(path: Path) -> bool:
    """Whether a path is a folder with a ``config.json`` that is neither a checkpoint nor a run's."""
    is_ours = (path / "manifest.json").exists() or (path / "checkpoints").is_dir()
    return (path / CONFIG).is_file() and not is_ours


def hub_weights_file(path: Path) -> Path:
    """The safetensors file of a hub folder.

    Raises:
        CheckpointError: If it has none; pickles are never opened.
    """
    if (path / WEIGHTS).is_file():
        return path / WEIGHTS
    others = sorted(path.glob("*.safetensors"))
    if len(others) == 1:
        return others[0]
    if (path / f"{WEIGHTS}.index.json").exists():
        raise CheckpointError(
            f"'{path}' holds its weights in {len(others)} shards, which are not read; write one file: load them with "
            "the library they come from, and save_pretrained(..., max_shard_size='1TB')."
        )
    if others:
        raise CheckpointError(
            f"'{path}' holds {len(others)} safetensors files and no {WEIGHTS}; give the file itself, or one file's "
            "folder."
        )
    if pickles := [each for pattern in _PICKLES for each in sorted(path.glob(pattern))]:
        raise CheckpointError(
            f"'{path}' holds its weights as {pickles[0].name} only, a pickle (torch.save), which can run code and is "
            "never opened here; write the folder again with timm.models.save_for_hf(..., safe_serialization=True)."
        )
    raise CheckpointError(f"'{path}' has a {CONFIG} but no {WEIGHTS}; give a whole folder.")


def read_hub_folder(path: Path) -> HubFolder:
    """Read what a hub folder says of its network and of how images are shown to it.

    Raises:
        CheckpointError: If it is not such a folder, or says nothing usable.
    """
    file = path / CONFIG
    if not file.is_file():
        raise CheckpointError(f"'{path}' is no hub folder: it holds no {CONFIG}.")
    weights_file = hub_weights_file(path)
    config = _read_config(file)
    shown = config.get("pretrained_cfg", config)  # older folders have everything on one level
    try:
        return _understood(config, shown, weights_file)
    except (TypeError, ValueError, KeyError, AttributeError, IndexError, OverflowError, ZeroDivisionError) as error:
        raise CheckpointError(f"{file} is not as timm writes it: {type(error).__name__}: {error}.") from error


def _read_config(file: Path) -> dict[str, Any]:
    with reporting_disk_errors("read", file):
        if file.stat().st_size > _LARGEST_CONFIG_BYTES:
            raise CheckpointError(f"{file} has {file.stat().st_size} bytes, far more than a {CONFIG} needs.")
        content = read_regular_file(file)
    try:
        config = load_json(content)
    except ValueError as error:
        raise CheckpointError(f"{file} is not readable as JSON: {error}.") from error
    architecture = config.get("architecture") if isinstance(config, dict) else None
    if not isinstance(architecture, str) or not _ARCHITECTURE.fullmatch(architecture):
        raise CheckpointError(
            f"{file} names no timm architecture (found {architecture!r}); of hub folders, those of timm's layout are "
            "read, as paceline export --format timm and timm.models.save_for_hf write them."
        )
    return dict(config)


def _understood(config: Mapping[str, Any], shown: Mapping[str, Any], weights_file: Path) -> HubFolder:
    options = {key: value for key, value in (config.get("model_args") or {}).items() if value is not None}
    _check_options(options)
    channels, height, width = (int(side) for side in shown.get("input_size") or (3, 224, 224))
    channels = int(options.get("in_chans", channels))
    classes = int(config.get("num_classes", shown.get("num_classes", 1000)))
    if classes > _MANY_CLASSES and classes > _largest_side(weights_file):
        raise ValueError(f"num_classes is {classes}, and no tensor of {weights_file.name} has as many rows")
    fixed = shown.get("fixed_input_size", False) and not options.get("dynamic_img_size")
    if fixed and options.get("strict_img_size", True):
        # timm builds such a network for the size of the images, unless told of another one.
        options.setdefault("img_size", [height, width] if height != width else height)
    mean, std = (tuple(map(float, shown.get(key) or usual)) for key, usual in (("mean", _MEAN), ("std", _STD)))
    crop = float(shown.get("crop_pct") or _CROP)
    interpolation = str(shown.get("interpolation") or "bicubic")
    refusal = _refusal(shown, (channels, height, width), classes, (mean, std), crop, interpolation)
    return HubFolder(
        architecture=config["architecture"],
        classes=classes,
        labels=_labels(config, shown, classes),
        mean=mean,
        std=std,
        crop=height / math.floor(height / crop) if not refusal else crop,
        interpolation=interpolation,
        image_size=height,
        channels=channels,
        weights_file=weights_file,
        options={key: value for key, value in options.items() if key not in _SIZES},
        refusal=refusal,
    )


def _check_options(options: Mapping[str, Any]) -> None:
    if wrong := sorted(_NOT_OPTIONS & options.keys()):
        raise ValueError(f"model_args has {wrong[0]}, which is no argument of a network")
    if "global_pool" in options and not options["global_pool"]:
        raise ValueError("model_args switches global_pool off, and then the network does not label images")


def _largest_side(weights_file: Path) -> int:
    specs, _ = read_header(weights_file)
    return max((side for spec in specs.values() for side in spec.shape), default=0)


def _refusal(
    shown: Mapping[str, Any],
    size: tuple[int, int, int],
    classes: int,
    normalised: tuple[tuple[float, ...], ...],
    crop: float,
    interpolation: str,
) -> str:
    channels, height, width = size
    mode = shown.get("crop_mode") or "center"
    reasons = {
        f"its network has {classes} classes": classes < 1,
        f"its images are {height}x{width}, and only squares are shown here": height != width or height < 1,
        f"its images are {height}x{width}, and at most {_LONGEST_SIDE} pixels a side are shown here": height
        > _LONGEST_SIDE,
        f"its images have {channels} channels, and 1 or 3 are read here": channels not in (1, 3),
        f"mean and std have {' and '.join(str(len(each)) for each in normalised)} numbers, not {channels}": any(
            len(each) != channels for each in normalised
        ),
        f"crop_mode is {mode!r}, and only 'center' is had here": mode != "center",
        f"crop_pct is {crop}, and from {_SMALLEST_CROP} to 1, the whole image, is had here": not _SMALLEST_CROP
        <= crop
        <= 1,
        f"interpolation is {interpolation!r}, and {' and '.join(_INTERPOLATIONS)} are had here": interpolation
        not in _INTERPOLATIONS,
    }
    return "; ".join(reason for reason, applies in reasons.items() if applies)


def _labels(config: Mapping[str, Any], shown: Mapping[str, Any], classes: int) -> tuple[str, ...]:
    """Names in the order of the outputs; nothing unless there is one for each."""
    named = config.get("label_names") or config.get("labels") or shown.get("label_names") or ()
    if isinstance(named, Mapping):
        by_number = {int(key): str(name) for key, name in named.items()}
        named = [by_number[number] for number in range(classes) if number in by_number]
    names = tuple(str(name) for name in named)
    return names if len(names) == classes else ()
