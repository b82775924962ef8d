"""The recipe schema, section by section, and the code that a recipe names.

A recipe in a run, checkpoint or hub folder, or in a weights file, was written by whoever created that. The code it
names is imported only if the user trusts it; the recipe that a user trains is trusted.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from paceline.errors import RecipeError
from paceline.plugins.references import is_code_trusted, is_reference
from paceline.recipe.data import Data
from paceline.recipe.fields import Applies, Names, parse_integer, section
from paceline.recipe.model import ModelSection
from paceline.recipe.running import Checkpoint, EvaluateSection, Parallel, Telemetry, VerifySection
from paceline.recipe.training import BatchSection, DistillationSection, Optimizer, Schedule, TrainSection


@section
class Recipe:
    """All settings of a run. Sections have the names of the rooms that act on them."""

    task: Annotated[str, Names("tasks")] = "image_classification"
    """`image_classification`, `image_multilabel` (any number of labels), `image_regression` (numbers), `distillation`
    (classes, with a teacher), `language_modeling`, `text_classification`, `token_classification` (a tag for each word),
    `recommendation`, `detection`, `segmentation` (classes of pixels), a name that an installed package registers, or
    your own `package.module:factory`. `own_loop` marks a run of `paceline.Loop`."""
    seed: Annotated[int, Field(ge=0, lt=2**63, strict=True), BeforeValidator(parse_integer)] = 0
    """Seed of the initial weights, the sample order, augmentation and dropout."""
    model: ModelSection = ModelSection()
    data: Data = Data()
    batch: BatchSection = BatchSection()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    train: TrainSection = TrainSection()
    distillation: Annotated[DistillationSection, Applies("task", ("distillation",))] = DistillationSection()
    evaluate: EvaluateSection = EvaluateSection()
    checkpoint: Checkpoint = Checkpoint()
    verify: VerifySection = VerifySection()
    parallel: Parallel = Parallel()
    telemetry: Telemetry = Telemetry()
    objects: Annotated[dict[str, str], Applies("task", ("fit",))] = Field(default_factory=dict)
    """What `paceline.fit` was given, by argument: `package.module:name` where it can be imported again."""

    def without_initial_weights(self) -> Recipe:
        """Return the recipe for weights that come from elsewhere, such as a checkpoint."""
        return replace(self, model=replace(self.model, pretrained=False, initialize_from=None))

    def without_mirror(self) -> Recipe:
        """Return the recipe for a trial run."""
        return replace(self, checkpoint=replace(self.checkpoint, mirror=None))


CODE_KEYS = ("task", "model.name", "data.dataset", "evaluate.metrics", "objects")
"""The keys that take ``package.module:name``."""
TRAINING_CODE_KEYS = ("optimizer.name", "schedule.name", "train.loss", "data.augment.policy")
"""Those of them that only training imports."""

# Their metrics compute, and nothing else; other modules of torchmetrics load models.
_TORCHMETRICS = ("torchmetrics.classification", "torchmetrics.regression")
_RECORDS = ("plan.json", "environment.json", "events.jsonl", "summary.json", "manifest.json")
_RECIPE_SIBLINGS = ("checkpoints", "config.json", "model.safetensors")


def named_code(recipe: Recipe) -> list[str]:
    """Return a recipe's references to custom code."""
    used = (attrgetter(key)(recipe) for key in (*CODE_KEYS, *TRAINING_CODE_KEYS))
    return [name for value in used for name in _names(value) if _is_code(name)]


def _is_code(name: str) -> bool:
    return is_reference(name) and name.partition(":")[0] not in _TORCHMETRICS


def _names(value: Any) -> list[str]:
    """Return the names that a key holds: its own, or those of a mapping of factories with options."""
    if isinstance(value, Mapping):
        inner = (each.get("name") if isinstance(each, Mapping) else each for each in value.values())
        return [name for each in inner for name in _names(each)]
    return [value] if isinstance(value, str) else []


def is_stored(path: Path, source: str | Path) -> bool:
    """Whether a recipe file is part of a run, checkpoint or hub folder, or of one named by its folder."""
    if path.parent == Path(os.path.expanduser(source)):
        return True
    siblings = _RECORDS + _RECIPE_SIBLINGS * (path.name == "recipe.yaml")
    return any((path.parent / name).exists() for name in siblings)


def refuse_foreign_code(
    tree: Mapping[str, Any], recipe: Recipe, where: str, *, trusted: bool, keys: tuple[str, ...] = CODE_KEYS
) -> None:
    """Refuse code that a stored recipe names, unless the user trusts it or an override names something else.

    Args:
        tree: The recipe as it was stored.
        recipe: The recipe with the user's overrides.
        where: The file, for the message.
        trusted: Whether the user allowed the file to name code.
        keys: The keys that will be used.

    Raises:
        RecipeError: Naming the key and what it would import.
    """
    if trusted or is_code_trusted():
        return
    for key in keys:
        stored: Any = tree
        for name in key.split("."):
            stored = stored.get(name) if isinstance(stored, Mapping) else None
        used = _names(attrgetter(key)(recipe))
        if code := next((each for each in _names(stored) if _is_code(each) and each in used), ""):
            raise RecipeError(
                f"{where} names code to import, {key}={code}; opening a file never runs code unless you allow it: "
                "add --trust-code if you know where it comes from.",
                key=key,
                value=code,
                path=where,
                rule="no code",
            )
