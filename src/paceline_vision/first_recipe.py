"""Choose a recipe for a folder of pictures with boxes or masks, from the data and this machine."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from paceline.data.image.decode import upright_size
from paceline.data.slices import evenly_spaced
from paceline.distributed.device import choose_device
from paceline.errors import DataError, ModelError, RecipeError
from paceline.host.machine import available_cores
from paceline.host.world import World
from paceline.models.build import check_published
from paceline.parsing.plain_yaml import yaml_line
from paceline.parsing.units import format_count
from paceline.plugins.dataset_registry import open_registered
from paceline.recipe.load import load_recipe, set_by
from paceline.recipe.model import ModelSection
from paceline.recipe.schema import Recipe
from paceline.trainer.first_recipe import FirstRecipe
from paceline_vision.detection.dataset import BoxDataset
from paceline_vision.segmentation.dataset import MaskDataset, from_objects

_LONGEST = {False: 320, True: 1333}  # pixels of a detector's pictures, by whether published weights are used
_PICTURES = 8_000  # to train on in all; fewer pictures mean more epochs
_EPOCHS = (8, 80)
_LOOKED_AT = 32  # pictures whose size is read
_SEGMENTED = {False: 192, True: 512}  # largest image_size, by whether published weights are used
_PUBLISHED = {"detection": "torchvision:fasterrcnn_resnet50_fpn", "segmentation": "torchvision:deeplabv3_resnet50"}


def choose_detector(name: str, source: str, overrides: Sequence[str]) -> FirstRecipe:
    """Choose a recipe for pictures with boxes; with ``task=segmentation`` among the overrides, for their outlines.

    Args:
        name: The data set.
        source: Its folder.
        overrides: The user's overrides. Settings given there are not chosen.

    Raises:
        PacelineError: If the pictures cannot be trained on, or an override is wrong.
    """
    recipe, keys = _recipe("shapes-maskrcnn", name, source, ["model.name=small_fasterrcnn", *overrides])
    if recipe.task == "segmentation":
        return choose_segmenter(name, source, overrides)
    data = replace(recipe.data, detection=replace(recipe.data.detection, masks=False))
    found = open_registered(name, {"boxes": BoxDataset}, data)
    given = set(set_by(overrides))
    has_masks = found.is_outlined and find_spec("pycocotools") is not None
    what = "boxes and outlines" if has_masks else "boxes"
    reasons = [_counts(found, recipe, f"with {what}")]
    published, why = _published("detection", recipe, given)
    kind = "maskrcnn" if has_masks else "fasterrcnn"
    long_side = int(found.train.sizes.max())
    values: dict[str, Any] = {"model.name": f"torchvision:{kind}_resnet50_fpn" if published else f"small_{kind}"}
    reasons.append(f"{values['model.name']}: {why}" if "model.name" not in given else "the network that you name")
    longest = _LONGEST[published]
    if published:
        values |= {"schedule.milestones": "[62%, 85%]"} | _duration(len(found.train))
    else:
        shrink, size = min(1.0, longest / long_side), "keep their size"
        values["data.detection.short_sides"] = "off"
        if shrink < 1:
            short = max(32, round(shrink * float(np.median(found.train.sizes.min(axis=1)))))
            values |= {"data.detection.short_sides": f"[{short}]", "data.detection.long_side": longest}
            size = f"are shown with {longest} at most, to train on this machine"
        values |= {"model.options": _anchors(found, shrink), "parallel.threads": "auto"} | _duration(len(found.train))
        reasons.append(f"pictures of up to {long_side} pixels {size}")
    reasons.append(_reason_of_duration(values, given))
    base = f"{kind}_resnet50_fpn_coco" if published else "shapes-maskrcnn"
    return _choice(base, keys, values, given, overrides, reasons)


def choose_segmenter(name: str, source: str, overrides: Sequence[str]) -> FirstRecipe:
    """Choose a recipe for images with masks. The arguments and errors are those of :func:`choose_detector`."""
    recipe, keys = _recipe("shapes-segmentation", name, source, overrides)
    given = set(set_by(overrides))
    data, reasons, values = recipe.data, list[str](), dict[str, Any]()
    try:
        found = _masks(name, data)
    except DataError as error:
        if error.key != "data.mask_values" or "data.mask_values" in given:
            raise
        values["data.mask_values"] = list(error.value)  # type: ignore[call-overload]  # an error's value has no type; here it is a list
        found = _masks(name, replace(data, mask_values=tuple(values["data.mask_values"])))
        reasons.append(f"data.mask_values={values['data.mask_values']}: the masks hold only 0 and 255")
    published, why = _published("segmentation", recipe, given)
    paths = [found.train.path(int(each)) for each in evenly_spaced(len(found.train), _LOOKED_AT)]
    sides = [max(size) for size in map(upright_size, paths) if size is not None]
    size = min(_SEGMENTED[published], max(32, int(np.median(sides or [_SEGMENTED[published]]))))
    values["model.name"] = _PUBLISHED["segmentation"] if published else "small_unet"
    values["model.options"] = "{aux_loss: true}" if published else "{width: 16, stages: 4}"
    if published:
        values |= {"model.pretrained": "true", "optimizer.lr": 0.001}
    values |= {"data.image_size": size, "evaluate.batch_size": 8, "parallel.threads": "auto"}
    values |= _duration(len(found.train))
    reasons.insert(0, _counts(found, recipe, "with masks"))
    reasons.append(f"{values['model.name']}: {why}" if "model.name" not in given else "the network that you name")
    reasons.append(f"data.image_size={size}: at most {_SEGMENTED[published]} for this network and machine")
    reasons.append(_reason_of_duration(values, given))
    return _choice("shapes-segmentation", keys, values, given, overrides, reasons)


def _recipe(base: str, name: str, source: str, overrides: Sequence[str]) -> tuple[Recipe, list[str]]:
    """Return a shipped recipe with this data, and the overrides that name it.

    Raises:
        RecipeError: If the user's overrides ask for other data or another task.
    """
    keys = [f"data.dataset={name}", f"data.path={yaml_line(str(Path(source).expanduser()))}"]
    values = {each.partition("=")[0]: each.partition("=")[2] for each in overrides}
    other_task = values.get("task") not in (None, "detection", "segmentation")
    if clash := {"data.path", "data.dataset"} & values.keys() | ({"task"} if other_task else set()):
        raise RecipeError(
            f"{source} is data, for which Paceline chooses a recipe, but {sorted(clash)[0]} asks for another; name a "
            f"recipe instead, for example `paceline train {base} {shlex.join(keys)}`.",
            path=source,
        )
    return load_recipe(base, [*keys, *overrides]).recipe, keys


def _masks(name: str, data: Any) -> MaskDataset:
    data = replace(data, detection=replace(data.detection, masks=True, keep_empty=True))
    kinds: dict[str, type[MaskDataset | BoxDataset]] = {"masks": MaskDataset, "boxes": BoxDataset}
    opened = open_registered(name, kinds, data)
    return from_objects(opened) if isinstance(opened, BoxDataset) else opened


def _counts(found: BoxDataset | MaskDataset, recipe: Recipe, what: str) -> str:
    device = choose_device(recipe.parallel.device, World())
    machine = f"a {device.type} device" if device.type != "cpu" else f"{format_count(available_cores())} CPU cores"
    counts = (format_count(len(each)) for each in (found.train, found.validation))
    train, held_out = counts
    return f"{train} pictures {what} to train on and {held_out} held out, of {len(found.classes)} classes; {machine}"


def _published(task: str, recipe: Recipe, given: set[str]) -> tuple[bool, str]:
    """Return whether to start from published weights, and the reason."""
    if given & {"model.name", "model.pretrained", "model.initialize_from"}:
        return False, "from scratch"
    if choose_device(recipe.parallel.device, World()).type == "cpu":
        return False, "from scratch, small enough for a CPU"
    try:
        check_published(ModelSection(name=_PUBLISHED[task], pretrained=True))
    except ModelError as error:
        return False, f"from scratch: {error}"
    return True, "its backbone pretrained on ImageNet, a far better start than random weights"


def _anchors(found: BoxDataset, shrink: float) -> str:
    """Return options of a small detector whose anchors are as large as the objects."""
    some = evenly_spaced(len(found.train), 1000)
    boxes = np.concatenate([found.train.objects(int(each), masks=False).boxes for each in some])
    sides = shrink * np.sqrt(np.clip(boxes[:, 2:] - boxes[:, :2], 1, None).prod(axis=1))
    small, large = np.percentile(sides, [10, 90]) if len(sides) else (12.0, 48.0)
    smallest = int(np.clip(small, 8, 32))
    levels = int(np.clip(np.ceil(np.log2(max(large, smallest) / smallest)) + 1, 3, 5))
    return f"{{smallest: {smallest}, levels: {levels}}}"


def _duration(count: int) -> dict[str, str]:
    epochs = min(_EPOCHS[1], max(_EPOCHS[0], round(_PICTURES / max(count, 1))))
    return {"train.duration": f"{epochs} epochs", "evaluate.every": f"{max(1, epochs // 10)} epochs"}


def _reason_of_duration(values: dict[str, Any], given: set[str]) -> str:
    if "train.duration" in given:
        return "train.duration: as you give it"
    return (
        f"train.duration={values['train.duration']}: about {format_count(_PICTURES)} pictures in all, in {_EPOCHS[0]} "
        f"to {_EPOCHS[1]} epochs"
    )


def _choice(
    base: str,
    keys: Sequence[str],
    values: dict[str, Any],
    given: set[str],
    overrides: Sequence[str],
    reasons: Sequence[str],
) -> FirstRecipe:
    """Return the choice, without what the user gives, and without options of a network that the user names."""
    options = {"model.options"} if "model.name" in given else set()
    chosen = tuple(f"{key}={value}" for key, value in values.items() if key not in given | options)
    return FirstRecipe(recipe=base, overrides=(*keys, *chosen, *overrides), reasons=tuple(reasons))
