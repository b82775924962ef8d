"""Preprocessing settings that timm publishes with its weights."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def published_settings(name: str) -> dict[str, Any] | None:
    """Return timm's preprocessing settings of a network with its default weights, as ``InputSettings`` names them.

    Args:
        name: Name as in timm's train.py, with or without a weights tag: ``resnet50``, ``resnet50.a1_in1k``.

    Returns:
        None if timm does not have the network, or no such weights of it.
    """
    import timm

    if not timm.is_model(name.partition(".")[0]):
        return None
    try:
        pretrained_config: Any = timm.get_pretrained_cfg(name, allow_unregistered=True)
    except RuntimeError:  # no weights of that name
        return None
    data: Any = import_module("timm.data")  # its type stubs do not export what the module exports
    settings = data.resolve_data_config(
        {}, pretrained_cfg={} if pretrained_config is None else pretrained_config.to_dict()
    )
    return {
        "image_size": int(settings["input_size"][-1]),
        "interpolation": str(settings["interpolation"]),
        "crop": float(settings["crop_pct"]),
        "mean": tuple(map(float, settings["mean"])),
        "std": tuple(map(float, settings["std"])),
    }
