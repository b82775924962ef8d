"""Choose a recipe for a folder or file of images, from the data and this machine; other tasks choose for their own.

The choice is a shipped recipe and overrides, so that everything can be read, changed and typed by hand.
"""

from __future__ import annotations

import hashlib
import os
import pkgutil
import shlex
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from paceline.data.image.datasets import open_dataset
from paceline.data.image.source import FileSource, SampleSource, leaf_sources
from paceline.distributed.device import choose_device
from paceline.distributed.environment import read_launch
from paceline.errors import RecipeError
from paceline.host.machine import available_cores
from paceline.host.world import World
from paceline.models.build import why_no_weights
from paceline.parsing.plain_yaml import yaml_line
from paceline.parsing.units import format_count
from paceline.plugins.dataset_registry import annotated_at, detect_dataset
from paceline.recipe.load import Overrides, load_recipe, set_by
from paceline.records.reader import beyond_until
from paceline.records.run_directory import RunDirectory

_UNEQUAL = 5  # how many times as many images as another class has
_MOST_COMPARED = 100_000  # images whose sizes are compared before each run, in about a second
_SMALLEST = 96  # pixels at which a network trained at 224 still recognises objects


@dataclass(frozen=True, kw_only=True)
class _Preset:
    """A network for a kind of machine, and how long to train it.

    Attributes:
        model: ``model.name``.
        options: Overrides that go with it.
        size: Largest image size in pixels. With published weights, smaller images are enlarged to 96.
        images: Total number of images to train on; fewer images mean more epochs.
        epochs: Minimum and maximum number of epochs.
    """

    model: str
    options: tuple[str, ...] = ()
    size: int
    images: int
    epochs: tuple[int, int]


# By whether published weights are available and whether there is a GPU.
_PRESETS = {
    (True, True): _Preset(model="resnet50", size=224, images=60_000, epochs=(5, 30)),
    (True, False): _Preset(model="resnet18", size=128, images=12_000, epochs=(5, 20)),
    (False, True): _Preset(model="resnet18", size=128, images=200_000, epochs=(30, 100)),
    (False, False): _Preset(
        model="small_resnet", options=("model.options={width: 16, stages: 3}",), size=64, images=40_000, epochs=(10, 60)
    ),
}


@dataclass(frozen=True, kw_only=True)
class FirstRecipe:
    """The chosen recipe.

    Attributes:
        recipe: A shipped recipe.
        overrides: Its changes, followed by the user's, which take precedence.
        reasons: Each choice with the reason, for people.
    """

    recipe: str
    overrides: tuple[str, ...]
    reasons: tuple[str, ...]


def recipe_for_data(
    source: str, overrides: Overrides, run_dir: Path | None, report: Callable[[str], object]
) -> tuple[str, tuple[str, ...]]:
    """Return the recipe and overrides for data given in place of a recipe; an existing run keeps its own.

    Args:
        source: A folder or file of images.
        overrides: The user's overrides.
        run_dir: The run directory, if one was named.
        report: Given each choice with its reason.

    Raises:
        PacelineError: As :func:`choose_recipe`.
    """
    if isinstance(overrides, Mapping):
        values = {key: value.item() if isinstance(value, np.generic) else value for key, value in overrides.items()}
        overrides = [
            f"{key}={yaml_line(str(value) if isinstance(value, Path) else value)}" for key, value in values.items()
        ]
    if run_dir is not None and (run_dir / "recipe.yaml").is_file():
        trained_on = load_recipe(run_dir).recipe.data.path
        if trained_on == str(Path(source).expanduser().absolute()):
            return str(run_dir), (*beyond_until(RunDirectory(run_dir)), *overrides)
    choice = choose_recipe(source, overrides)
    if read_launch(os.environ).world.is_first:
        for line in choice.reasons:
            report(f"{source}: {line}")
        report(f"The same by name: paceline train {shlex.join([choice.recipe, *choice.overrides])}\n")
    return choice.recipe, choice.overrides


def choose_recipe(source: str, overrides: Sequence[str]) -> FirstRecipe:
    """Choose a recipe for the images at a path.

    Args:
        source: A folder or file of images.
        overrides: The user's overrides. Settings given there are not chosen.

    Raises:
        PacelineError: If there are no images that could be trained on, or an override is wrong.
    """
    path = Path(source).expanduser()
    if annotated := annotated_at(path):
        found: FirstRecipe = pkgutil.resolve_name(annotated[0].first_recipe)(annotated[0].name, source, overrides)
        others = [f"it may also be data.dataset={each.name}" for each in annotated[1:]]
        return replace(found, reasons=(*found.reasons, *others))
    kind = detect_dataset(source)
    # A custom task or network determines its own needs.
    given = set(set_by(overrides))
    data_keys = [f"data.dataset={kind}"] * (kind != "image_folder") + [f"data.path={yaml_line(str(path))}"]
    if clash := given & {"task", "data.path", "data.dataset", "data.target_columns"}:
        raise RecipeError(
            f"{source} is data, for which Paceline chooses a recipe, but {sorted(clash)[0]} asks for another; name a "
            f"recipe instead, for example `paceline train image_folder {shlex.join(data_keys)}`.",
            path=source,
        )
    tried = load_recipe("image_folder", [*data_keys, "data.image_size=auto", *overrides]).recipe
    images = open_dataset(tried.data)
    device = choose_device(tried.parallel.device, World())
    count, on_gpu = len(images.train), device.type != "cpu"
    machine = f"a {device.type} device" if on_gpu else f"{format_count(available_cores())} CPU cores"
    held_out, classes = format_count(len(images.validation)), format_count(len(images.classes))
    reasons = [f"{format_count(count)} images to train on and {held_out} held out, of {classes} classes; {machine}"]
    counts = np.bincount(images.train.labels, minlength=len(images.classes))
    nonempty = np.flatnonzero(counts)
    major, minor = int(counts.argmax()), int(nonempty[counts[nonempty].argmin()])
    is_uneven = counts[major] > _UNEQUAL * counts[minor]
    if is_uneven and not given & {"data.sampling", "train.class_weights"}:
        reasons.append(
            f"data.sampling=balanced: {images.classes[major]!r} has {format_count(int(counts[major]))} images and "
            f"{images.classes[minor]!r} {format_count(int(counts[minor]))}, so all classes are drawn equally often "
            "(data.sampling=uniform: each image once per epoch)"
        )
        data_keys.append("data.sampling=balanced")
    reasons += _copies_in_two_classes((images.train, images.validation), images.classes)
    is_network_given = bool(given & {"model.name", "model.pretrained", "model.initialize_from"})
    if is_network_given:
        pretrained, missing = tried.model.pretrained or tried.model.initialize_from is not None, ""
    else:
        missing = why_no_weights(_PRESETS[True, on_gpu].model)
        pretrained = not missing
    preset = _PRESETS[pretrained, on_gpu]
    if not is_network_given:
        reasons.append(
            f"{preset.model}: pretrained on ImageNet, a far better start than random weights"
            if pretrained
            else f"{preset.model}, from scratch: {missing}"
        )
    values = _preset_values(preset, count, images.image_size, pretrained=pretrained)
    if "model.initialize_from" in given:
        values |= {"model.pretrained": "null", "model.initialize_partly": "true"}
    chosen = tuple(f"{key}={value}" for key, value in values.items() if key not in given)
    smaller = f"smaller images are enlarged to {_SMALLEST} for pretrained weights" if pretrained else "none is enlarged"
    images_in_all = f"about {format_count(preset.images)} images in all"
    for key, reason in (
        ("data.image_size", f"at most {preset.size} for this network and machine; {smaller}"),
        ("train.duration", f"{images_in_all}, in {preset.epochs[0]} to {preset.epochs[1]} epochs"),
    ):
        if key not in given:
            reasons.append(f"{key}={values[key]}: {reason}")
    options = tuple(each for each in preset.options if "model.name" not in given and "model.options" not in given)
    return FirstRecipe(
        recipe="fine_tune" if pretrained else "image_folder",
        overrides=(*data_keys, *chosen, *options, *overrides),
        reasons=tuple(reasons),
    )


def _copies_in_two_classes(sources: Sequence[SampleSource], classes: Sequence[str]) -> list[str]:
    """Say which files have the same content and different labels; only files of the same size are read."""
    if sum(map(len, sources)) > _MOST_COMPARED:
        return []
    leaves = [leaf_sources(each, np.arange(len(each))) for each in sources]
    if not all(len(parts) == 1 and isinstance(parts[0][0], FileSource) for parts in leaves):
        return []
    files = [path for ((part, ids),) in leaves for path in part.files(ids)]
    labels = np.concatenate([each.labels for each in sources]).tolist()
    groups: list[Sequence[int]] = [range(len(files))]
    with suppress(OSError):  # a run names what it cannot read
        for key in (os.path.getsize, _digest):
            found = defaultdict[Any, list[int]](list)
            for number, group in enumerate(groups):
                for each in group:
                    found[number, key(files[each])].append(each)
            groups = [group for group in found.values() if len({labels[each] for each in group}) > 1]
        if groups:
            one, *others = groups[0]
            other = next(each for each in others if labels[each] != labels[one])
            count = "1 image is" if len(groups) == 1 else f"{format_count(len(groups))} images are"
            named = " = ".join(f"{files[each]} ({classes[labels[each]]})" for each in (one, other))
            return [f"{count} in two classes, so one label is wrong: {named}; `paceline check-data` lists all"]
    return []


def _digest(path: str) -> bytes:
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _preset_values(preset: _Preset, count: int, native: int, *, pretrained: bool) -> dict[str, Any]:
    """Return the overrides of a preset for this number of images."""
    min_epochs, max_epochs = preset.epochs
    epochs = min(max_epochs, max(min_epochs, round(preset.images / max(count, 1))))
    batch = 64 if count >= 2_000 else 32 if count >= 256 else 16
    steps = max(1, epochs * count // batch)
    values: dict[str, Any] = {
        "model.name": preset.model,
        "data.image_size": min(preset.size, max(native, _SMALLEST if pretrained else 32)),
        "batch.global_size": batch,
        "train.duration": f"{epochs} epochs",
        # The moving average covers about a twentieth of the run.
        "train.ema": round(min(0.999, max(0.8, 1 - 20 / steps)), 3),
    }
    if not pretrained:
        values["optimizer.lr"] = 0.1 * batch / 64
    return values
