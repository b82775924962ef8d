"""The recipe schema, section by section."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from paceline.recipe.data import Data
from paceline.recipe.fields import STRICT, Applies, Names, parse_integer
from paceline.recipe.model import Model
from paceline.recipe.running import Checkpoint, Evaluate, Parallel, Telemetry
from paceline.recipe.training import Batch, Distillation, Optimizer, Schedule, Train


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Recipe:
    """All settings of a run. Sections have the names of the rooms that act on them."""

    task: Annotated[str, Names("tasks")] = "image_classification"
    """`image_classification`, `image_multilabel` (any number of labels), `image_regression` (numbers), `distillation`
    (classes, with a teacher), `language_modeling`, `text_classification`, `token_classification` (a tag for each word),
    `recommendation`, `detection`, `segmentation` (classes of pixels), a name that an installed package registers, or
    your own `package.module:factory`."""
    seed: Annotated[int, Field(ge=0, lt=2**63, strict=True), BeforeValidator(parse_integer)] = 0
    """Seed of the initial weights, the sample order, augmentation and dropout."""
    model: Model = Model()
    data: Data = Data()
    batch: Batch = Batch()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    train: Train = Train()
    distillation: Annotated[Distillation, Applies("task", ("distillation",))] = Distillation()
    evaluate: Evaluate = Evaluate()
    checkpoint: Checkpoint = Checkpoint()
    parallel: Parallel = Parallel()
    telemetry: Telemetry = Telemetry()

    def without_initial_weights(self) -> Recipe:
        """Return the recipe for weights that come from elsewhere, such as a checkpoint."""
        return replace(self, model=replace(self.model, pretrained=False, initialize_from=None))

    def without_mirror(self) -> Recipe:
        """Return the recipe for a trial run."""
        return replace(self, checkpoint=replace(self.checkpoint, mirror=None))
