"""What does a network of timm's say of the images it is made for?"""

from __future__ import annotations

from typing import Any

from paceline.recipe.imports.timm import InputSettings


def published_settings(name: str) -> InputSettings | None:
    """timm's settings for a network's images, as with its default weights; None if it has none of that name.

    Args:
        name: As timm's train.py takes it, with or without the name of weights: ``resnet50``, ``resnet50.a1_in1k``.
    """
    import timm

    if not timm.is_model(name.partition(".")[0]):
        return None
    usual = InputSettings()
    try:
        found: Any = timm.get_pretrained_cfg(name, allow_unregistered=True)
    except RuntimeError:  # it has no weights of that name
        return None
    if found is None:
        return usual
    size = (found.input_size or (3, usual.image_size, usual.image_size))[-1]
    return InputSettings(
        image_size=int(size),
        interpolation=str(found.interpolation or usual.interpolation),
        crop=float(found.crop_pct or usual.crop),
        mean=tuple(map(float, found.mean or usual.mean)),
        std=tuple(map(float, found.std or usual.std)),
    )
