"""Image labels and numbers, with the same steps for a torch network and for other programs' copies of it."""

from __future__ import annotations

import io
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.checkpoint.weights import SavedWeights, check_scale
from paceline.data.batch import Normalize, Placement
from paceline.data.image.decode import decode, upright_size
from paceline.data.image.pipeline import rectangle
from paceline.data.image.transforms import evaluation_image
from paceline.errors import CheckpointError, RecipeError, did_you_mean
from paceline.prediction.predictor import NOT_FINITE, Answer, Predictor, predict_ahead
from paceline.prediction.sources import PictureFile
from paceline.recipe.schema import Recipe
from paceline.tasks.views import CROPS, scale_for_crops


@dataclass(frozen=True)
class Prediction(Answer):
    """The prediction for one image.

    Attributes:
        numbers: For regression, predicted numbers by name instead of labels; for multi-label images, the probability of
            every class; otherwise None.
        is_multilabel: Whether images are multi-label.
    """

    numbers: Mapping[str, float] | None = None
    is_multilabel: bool = False

    def _found(self) -> str:
        if self.numbers is not None and not self.is_multilabel:
            return "  ".join(f"{name} {number:.7g}" for name, number in self.numbers.items())
        return super()._found()

    def _columns(self) -> dict[str, Any]:
        numbers: dict[str, Any] = {} if self.numbers is None else {"numbers": dict(self.numbers)}
        return super()._columns() | numbers if self.is_multilabel or not numbers else numbers


@dataclass(frozen=True)
class Preprocessing:
    """A network's image preprocessing, as in evaluation.

    Attributes:
        size: Height and width of square images, in pixels.
        channels: 1 or 3.
        crop: Centre crop size as a share of the resized side, in (0, 1].
        interpolation: Resizing filter, ``bilinear`` or ``bicubic``.
        mean: Mean of each channel, in [0, 1].
        std: Standard deviation of each channel.
        multiple: If images keep their aspect ratio, the number that divides their sides.
        always_resized: Whether images that already have the size are resized and cropped too, as in timm.
    """

    size: int
    channels: int
    crop: float
    interpolation: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    multiple: int | None = None
    always_resized: bool = False

    @classmethod
    def description(cls, data: Mapping[str, Any], where: str) -> Preprocessing:
        """Read the preprocessing from the description of the weights file ``where``.

        Raises:
            NotFiniteError: If it has a mean or a standard deviation that is not finite.
            CheckpointError: If image files cannot have its channels.
        """
        check_scale(data, where)
        if data["channels"] not in (1, 3):
            raise CheckpointError(f"{where} describes images of {data['channels']} channels; image files have 1 or 3.")
        return cls(
            size=data.get("evaluation_size", data["image_size"]),
            channels=data["channels"],
            crop=data["evaluation_crop"],
            interpolation=data.get("interpolation", "bilinear"),
            mean=tuple(data["mean"]),
            std=tuple(data["std"]),
            multiple=data.get("evaluation_multiple"),
            always_resized=bool(data.get("always_resized", False)),
        )

    def image(self, content: bytes) -> Tensor:
        """Decode a file and resize it for the network, uint8 [C, H, W].

        Raises:
            BrokenImageError: If it cannot be read.
        """
        pixels = decode(content, self.channels)
        shape = (self.size, self.size)
        if self.multiple is not None and (found := upright_size(io.BytesIO(content))) is not None:
            shape = rectangle(*found, size=self.size, multiple=self.multiple)
        return evaluation_image(pixels, shape, self.crop, self.interpolation, always=self.always_resized)


@dataclass(frozen=True)
class Outputs:
    """Meaning of a network's outputs.

    Attributes:
        names: Names of the classes or of the predicted numbers.
        mean: Mean of each number, in the user's units; empty for classes.
        std: Standard deviation of each number, likewise.
        is_in_units: Whether numbers are in the user's units already, as in exported models.
        thresholds: For multi-label images, the threshold of each class's probability.
    """

    names: tuple[str, ...]
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    is_in_units: bool = False
    thresholds: tuple[float, ...] = ()

    @classmethod
    def description(cls, data: Mapping[str, Any]) -> Outputs | None:
        """Read the outputs from a weights file's description; None if they are neither classes nor numbers."""
        if "targets" in data:
            return cls(tuple(data["targets"]), tuple(data["target_mean"]), tuple(data["target_std"]))
        if "class_names" not in data and not data.get("classes"):
            return None
        names = data.get("class_names") or map(str, range(data.get("classes", 0)))  # a count, without names
        return cls(tuple(names), thresholds=tuple(data.get("label_thresholds", ())))

    def read(self, outputs: Tensor) -> Tensor:
        """Convert outputs [N, names] to probabilities, or to numbers in the user's units."""
        if self.thresholds:
            return label_probabilities(outputs)
        if not self.mean:
            return outputs.float().softmax(dim=1)
        return rounded(outputs.cpu(), self.std) if self.is_in_units else in_units(outputs, self.mean, self.std)


class ImageLabeller(Predictor):
    """A network with the preprocessing of its evaluation.

    Attributes:
        outputs: Meaning of the network's outputs.
        shown: Preprocessing of images.
    """

    def __init__(self, outputs: Outputs, shown: Preprocessing) -> None:
        self.outputs = outputs
        self.shown = shown
        self.classes = () if outputs.mean else outputs.names
        self.number_names = outputs.names if outputs.mean or outputs.thresholds else ()
        if self.number_names:  # every label above its threshold
            self.usual_top_k = len(outputs.names)

    @abstractmethod
    def probabilities(self, images: Tensor) -> Tensor:
        """Return class probabilities, float32 [N, classes]; or the numbers, float64 [N, numbers].

        Args:
            images: Decoded and resized images, uint8 [N, C, H, W], on any device.
        """

    def set_thresholds(self, thresholds: float | Mapping[str, float]) -> None:
        """Override the run's thresholds: one probability for all classes, or one for each named class.

        Raises:
            RecipeError: If a name is not a class, or the task is not multi-label.
        """
        if not self.outputs.thresholds:
            super().set_thresholds(thresholds)
        defaults = dict(zip(self.classes, self.outputs.thresholds, strict=True))
        self.outputs = replace(self.outputs, thresholds=thresholds_of(thresholds, defaults, key="--thresholds"))

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of square images."""
        return self.shown.channels, self.shown.size, self.shown.size

    def predict(self, paths: Sequence[Path], *, top_k: int = 5, batch_size: int | None = None) -> Iterator[Answer]:
        """Yield one prediction per file, in order; an unreadable file gets an error entry."""
        pictures = (PictureFile.at(path) for path in paths)
        return predict_ahead(self, pictures, top_k=top_k, batch_size=batch_size)

    def prepare(self, content: bytes) -> Tensor:
        """Decode one image file and resize it for the network, uint8 [C, H, W].

        Raises:
            BrokenImageError: If it cannot be read.
        """
        return self.shown.image(content)

    @torch.inference_mode()
    def answer(self, prepared: Sequence[Tensor], top_k: int) -> list[Prediction]:
        """Return one prediction per image, in order, without paths; images of one shape form a batch."""
        answers: list[Prediction | None] = [None] * len(prepared)
        for shape in dict.fromkeys(image.shape for image in prepared):
            same_shape = [number for number, image in enumerate(prepared) if image.shape == shape]
            scores = self.probabilities(torch.stack([prepared[number] for number in same_shape]))
            if self.number_names:
                for number, row in zip(same_shape, scores.tolist(), strict=True):
                    is_finite = all(map(math.isfinite, row))
                    answers[number] = self._above_threshold(row) if is_finite else self.unreadable(Path(), NOT_FINITE)
                continue
            values, labels = scores.topk(min(top_k, len(self.classes)), dim=1)
            for number, probabilities, best in zip(same_shape, values.tolist(), labels.tolist(), strict=True):
                if not math.isfinite(probabilities[0]):  # one overflowing logit makes every probability NaN
                    answers[number] = self.unreadable(Path(), NOT_FINITE)
                    continue
                answers[number] = Prediction(Path(), tuple(self.classes[label] for label in best), tuple(probabilities))
        return [each for each in answers if each is not None]

    def _above_threshold(self, row: Sequence[float]) -> Prediction:
        """Return the prediction with all numbers, and the labels whose probabilities exceed their thresholds."""
        names, thresholds = self.outputs.names, self.outputs.thresholds
        given = [at for at, threshold in enumerate(thresholds) if row[at] > threshold]
        given.sort(key=lambda at: -row[at])
        return Prediction(
            Path(),
            tuple(names[at] for at in given),
            tuple(row[at] for at in given),
            numbers=dict(zip(names, row, strict=True)),
            is_multilabel=bool(thresholds),
        )

    def unreadable(self, path: Path, reason: str) -> Prediction:
        """Return the prediction of an unreadable image."""
        numbers: dict[str, float] | None = {} if self.number_names else None
        return Prediction(path, error=reason, numbers=numbers, is_multilabel=bool(self.outputs.thresholds))


class TrainedLabeller(ImageLabeller):
    """A trained network with the preprocessing of its evaluation.

    Args:
        saved: The weights; their file describes the outputs and the preprocessing.
        outputs: Meaning of the network's outputs.
        network: The network with these weights, in evaluation mode on the device.
        answers: Calls the network on normalised images, as evaluation does.
        recipe: What it was trained with.
        device: Device.

    Attributes:
        network: The network.
    """

    def __init__(
        self,
        saved: SavedWeights,
        outputs: Outputs,
        *,
        network: nn.Module,
        answers: Callable[[Tensor], Tensor],
        recipe: Recipe,
        device: torch.device,
    ) -> None:
        super().__init__(outputs, Preprocessing.description(saved.description("data"), str(saved.path)))
        self._saved, self._device, self._answers, self.network = saved, device, answers, network
        self._normalize = Normalize(self.shown.mean, self.shown.std, Placement(device=device))
        if (kind := recipe.evaluate.augment) in CROPS:
            scaled = scale_for_crops(recipe.data, self.shown.size, kind)
            self.shown = replace(self.shown, size=int(scaled.evaluation_size), crop=scaled.evaluation_crop)

    def probabilities(self, images: Tensor) -> Tensor:
        """Return class probabilities, float32 [N, classes] on the device; or the numbers, float64 [N, numbers].

        Args:
            images: Decoded and resized images, uint8 [N, C, H, W], on any device.
        """
        return self.outputs.read(self._answers(self._normalize(images.to(self._device, non_blocking=True))))


def thresholds_of(
    requested: float | Mapping[str, float], defaults: Mapping[str, float], *, key: str
) -> tuple[float, ...]:
    """Return the threshold of each class: one for all, or the default except for named classes.

    Args:
        requested: One threshold for all classes, or thresholds by class name.
        defaults: Default thresholds of all classes, in order.
        key: Recipe key or option, for the message.

    Raises:
        RecipeError: If a name is not a class.
    """
    if isinstance(requested, float):
        return (requested,) * len(defaults)
    if unknown := [name for name in requested if name not in defaults]:
        raise RecipeError(
            f"{key} names {unknown[0]!r}, which is none of the {len(defaults)} classes: correct it."
            f"{did_you_mean(unknown[0], defaults)}"
        )
    return tuple(({**defaults, **requested}).values())


def label_probabilities(logits: Tensor) -> Tensor:
    """Return the sigmoid of logits, float64 on the CPU, so that thresholds separate them exactly as logits."""
    return logits.float().cpu().double().sigmoid()


def in_units(numbers: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Convert standardised numbers [N, columns] to the user's units, :func:`rounded`, float64 on the CPU."""
    return rounded(
        numbers.cpu().double() * torch.tensor(std, dtype=torch.float64) + torch.tensor(mean, dtype=torch.float64), std
    )


def rounded(numbers: Tensor, std: Sequence[float]) -> Tensor:
    """Round numbers [N, columns] to a millionth of the standard deviation, the precision of float32."""
    decimals = (6 - math.floor(math.log10(each)) for each in std)
    return torch.stack([numbers[:, index].double().round(decimals=each) for index, each in enumerate(decimals)], dim=1)
