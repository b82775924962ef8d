"""Knowledge distillation: image classification that also learns from a teacher's outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.checkpoint.weights import SavedWeights, load_trained, read_weights, weights_sha256
from paceline.data.batch import Batch
from paceline.data.pipeline import Placement
from paceline.errors import DataError, RecipeError
from paceline.host.world import World
from paceline.models.build import build_model, check_accepts, to_memory_format
from paceline.models.precision import Autocast
from paceline.parsing.plain_text import one_form
from paceline.plan import DataFacts
from paceline.plugins.references import is_reference
from paceline.recipe.schema import Recipe
from paceline.storage.cache import local_path
from paceline.tasks.image_classification import ImageClassification
from paceline.tasks.task import Model


class Distillation(ImageClassification):
    """Image classification with a teacher that sees exactly the student's images.

    The teacher is used only in training: it is not part of the network, its checkpoints or its evaluation.
    """

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self._teacher: Callable[[Tensor], Tensor] | None = None

    def prepare_training(self, placement: Placement) -> None:
        """Load the teacher.

        Raises:
            PacelineError: If it does not exist, has other classes, or does not take images of the training sizes.
        """
        super().prepare_training(placement)
        saved = self._saved
        if saved is None:
            raise RecipeError(
                "task=distillation needs a teacher: set distillation.teacher to a run directory, a checkpoint or a "
                "safetensors file of trained weights."
            )
        network = self._build_teacher(saved).to(placement.device).eval().requires_grad_(requires_grad=False)
        own_scale = (torch.tensor(self.dataset.mean), torch.tensor(self.dataset.std))
        network = to_memory_format(network, channels_last=placement.channels_last)
        self._teacher = _with_teacher_scale(network, own_scale, saved)

    def data_facts(self, world: World) -> DataFacts:
        """Return the dataset's facts and the teacher's identity: a resumed run must have the same teacher."""
        facts = super().data_facts(world)
        if self._saved is None:
            return facts
        return replace(facts, description={**facts.description, "teacher": weights_sha256(self._saved.plain)})

    @cached_property
    def _saved(self) -> SavedWeights | None:
        """Load the teacher's weights."""
        source = self.recipe.distillation.teacher
        return None if source is None else read_weights(Path(local_path(source, key="distillation.teacher")))

    def loss(self, model: Model, batch: Batch) -> Tensor:
        """Combine the recipe's loss on the labels with the teacher's."""
        config = self.recipe.distillation
        assert self._teacher is not None  # prepare_training has run
        logits = model(batch.inputs)
        with torch.no_grad():
            teacher = model.applied_to(self._teacher) if isinstance(model, Autocast) else self._teacher
            teacher_logits = teacher(batch.inputs)
        if config.kind == "hard":
            losses, scale = F.cross_entropy(logits, teacher_logits.argmax(dim=1), reduction="none"), 1.0
        else:
            losses, scale = _divergences(logits, teacher_logits, config.temperature), config.temperature**2
        taught = scale * self._loss.mean(losses, batch.targets, batch.slice.mean_class_weight)
        labelled = self._loss(logits, batch.targets, batch.slice.mean_class_weight)
        return (1 - config.weight) * labelled + config.weight * taught

    def _build_teacher(self, saved: SavedWeights) -> nn.Module:
        data, where = saved.description("data"), str(saved.path)
        classes = tuple(data.get("class_names", ()))
        names = tuple(one_form(self.dataset.classes, classes).values())
        if classes != names or data.get("channels") != self.dataset.channels:
            raise DataError(
                f"distillation.teacher: the weights in {where} have {len(classes)} classes and images of "
                f"{data.get('channels')} channels, but the data has {len(self.dataset.classes)} classes and "
                f"{self.dataset.channels} channels; a teacher must have the same classes, with the same names."
            )
        model = saved.recipe().model
        if is_reference(model.name) and model.name != self.recipe.model.name:
            raise RecipeError(
                f"distillation.teacher: {where} names code to import, model.name={model.name}; opening a file never "
                "runs code. Give a teacher with a published model, or with the student's own."
            )
        config = replace(model, pretrained=False, initialize_from=None)
        network = build_model(config, num_classes=len(classes), in_channels=self.dataset.channels)
        load_trained(network, saved)
        for side in sorted(self._training_sides):
            check_accepts(network, side, channels=self.dataset.channels, name=f"{model.name}, distillation.teacher")
        return network


def _with_teacher_scale(
    network: nn.Module, student: tuple[Tensor, Tensor], saved: SavedWeights
) -> Callable[[Tensor], Tensor]:
    """Wrap a teacher to normalise images as in its own training, whatever the student's normalisation."""
    (mean, std), data = student, saved.description("data")
    own_mean, own_std = torch.tensor(data["mean"]), torch.tensor(data["std"])
    if torch.equal(mean, own_mean) and torch.equal(std, own_std):
        return network
    device = next(network.parameters()).device
    scale = (std / own_std).view(1, -1, 1, 1).to(device)
    shift = ((mean - own_mean) / own_std).view(1, -1, 1, 1).to(device)
    return lambda images: network(images * scale + shift)


def _divergences(logits: Tensor, teacher_logits: Tensor, temperature: float) -> Tensor:
    """Return each sample's Kullback-Leibler divergence from the teacher's softened probabilities, [N]."""
    teacher = F.log_softmax(teacher_logits.float() / temperature, dim=1)
    student = F.log_softmax(logits.float() / temperature, dim=1)
    return F.kl_div(student, teacher, reduction="none", log_target=True).sum(dim=1)
