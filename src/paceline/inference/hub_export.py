"""How does a trained network become a folder that ``timm.create_model`` opens from the disk?"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.hub_folder import CONFIG, UNNAMED, WEIGHTS
from paceline.errors import ModelError
from paceline.inference.exportable import Exportable
from paceline.inference.model_card import CARD, model_card

# What a user who goes on from the folder needs of timm's own description of an architecture.
_KEPT = ("first_conv", "classifier", "fixed_input_size", "min_input_size")


def write_hub_folder(
    exportable: Exportable, folder: Path, *, run: Path, write_weights: Callable[[Path], None]
) -> float:
    """Write a hub folder, open it with timm and compare.

    Args:
        exportable: The network.
        folder: The new folder.
        run: Where the weights come from, for the model card.
        write_weights: Writes the safetensors file.

    Returns:
        The largest difference between timm's answers and the network's, in logits.

    Raises:
        ModelError: If timm has no such network, or it answers otherwise.
    """
    name = timm_name(exportable)
    folder.mkdir()
    (folder / CONFIG).write_text(json.dumps(hub_config(exportable, name), indent=2) + "\n", encoding="utf-8")
    write_weights(folder / WEIGHTS)
    difference = exportable.compare(_from_folder(folder), what="timm")
    card = model_card(exportable.saved, name, weights_file=folder / WEIGHTS, run=run)
    (folder / CARD).write_text(card, encoding="utf-8")
    return difference


def timm_name(exportable: Exportable) -> str:
    """timm's name of the network.

    Raises:
        ModelError: If timm cannot build it.
    """
    import timm

    name = str(exportable.saved.described("recipe").get("model", {}).get("name", "small_resnet"))
    is_timms = type(exportable.network).__module__.startswith("timm.") and timm.is_model(name.partition(".")[0])
    if exportable.kind != "images" or not is_timms:
        raise ModelError(
            f"model.name={name} is none of timm's networks, so that timm.create_model could not open a hub folder of "
            "it; use --format safetensors, onnx or torch-export."
        )
    return name.partition(".")[0]


def hub_config(exportable: Exportable, name: str) -> dict[str, Any]:
    """What ``config.json`` says, as timm reads it: the network, its classes and how images are shown to it."""
    network: Any = exportable.network
    data, recipe = exportable.saved.described("data"), exportable.saved.described("recipe")
    known = dict(network.pretrained_cfg)
    side, shown_side, channels = int(data["image_size"]), _shown_side(data), int(data["channels"])
    config = {key: known[key] for key in _KEPT if known.get(key) is not None}
    config |= {
        "input_size": [channels, side, side],
        "crop_pct": crop_share(data, side),
        "crop_mode": "center",
        "interpolation": data.get("interpolation", "bilinear"),
        "mean": list(data["mean"]),
        "std": list(data["std"]),
        "num_classes": len(data["class_names"]),
        "pool_size": None,
        "custom_load": False,
    }
    if shown_side != side:
        config |= {"test_input_size": [channels, shown_side, shown_side], "test_crop_pct": crop_share(data, shown_side)}
    options = dict(recipe.get("model", {}).get("options", {}))
    if known.get("fixed_input_size") and "img_size" not in options:
        # Else timm would build the network for the size of the images.
        options["img_size"] = list(network.patch_embed.img_size) if hasattr(network, "patch_embed") else side
    return {
        "architecture": name,
        "num_classes": len(data["class_names"]),
        "num_features": int(network.num_features),
        **({} if data.get(UNNAMED) else {"label_names": list(data["class_names"])}),
        **({"model_args": options} if options else {}),
        "pretrained_cfg": config,
    }


def crop_share(data: dict[str, Any], side: int) -> float:
    """The ``crop_pct`` with which timm, which rounds down, resizes images as evaluation did.

    An image that has the size already is shown as it is, so that data of one size, as the digits are, are not cropped.
    """
    if data.get("native_size") == [side, side]:
        return 1.0
    crop = float(data["evaluation_crop"])
    resized = round(side / crop)
    return crop if math.floor(side / crop) == resized else side / (resized + 0.25)


def _shown_side(data: dict[str, Any]) -> int:
    return int(data.get("evaluation_size", data["image_size"]))


def _from_folder(folder: Path) -> Callable[[tuple[Tensor, ...]], Tensor]:
    import timm

    try:
        network: Any = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    except Exception as error:  # whatever a factory of any kind raises
        raise ModelError(f"timm.create_model does not open what was written: {error}; nothing was kept.") from error

    def answers(inputs: tuple[Tensor, ...]) -> Tensor:
        with torch.inference_mode():
            found: Tensor = network(*inputs)
        return found

    return answers
