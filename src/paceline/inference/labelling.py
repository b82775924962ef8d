"""Image labels, with the same steps for a torch network and for ONNX Runtime."""

from __future__ import annotations

import hashlib
import importlib
import io
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.durable import hash_file
from paceline.checkpoint.weights import SavedWeights, check_scale
from paceline.data.image.decode import decode, upright_size
from paceline.data.image.pipeline import rectangle
from paceline.data.image.transforms import evaluation_image
from paceline.data.pipeline import Normalize, Placement
from paceline.errors import CheckpointError, DataError
from paceline.files import refuse_special_inputs
from paceline.inference.answers import BATCH, NOT_FINITE, Answer, ImagePredictor, predict_ahead
from paceline.inference.sources import PictureFile
from paceline.tasks.image_classification import CROPS, AveragedViews
from paceline.tasks.image_multilabel import label_probabilities, thresholds_of
from paceline.tasks.image_regression import in_units, rounded


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
        """
        check_scale(data, where)
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

    def image(self, content: bytes) -> torch.Tensor:
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

    def read(self, outputs: torch.Tensor) -> torch.Tensor:
        """Convert outputs [N, names] to probabilities, or to numbers in the user's units."""
        if self.thresholds:
            return label_probabilities(outputs)
        if not self.mean:
            return outputs.float().softmax(dim=1)
        return rounded(outputs.cpu(), self.std) if self.is_in_units else in_units(outputs, self.mean, self.std)


class ImageLabeller(ImagePredictor):
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
    def probabilities(self, images: torch.Tensor) -> torch.Tensor:
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

    def predict(self, paths: Sequence[Path], *, top_k: int = 5, batch_size: int = BATCH) -> Iterator[Answer]:
        """Yield one prediction per file, in order; an unreadable file gets an error entry."""
        pictures = (PictureFile.at(path) for path in paths)
        return predict_ahead(self, pictures, top_k=top_k, batch_size=batch_size)

    def prepare(self, content: bytes) -> torch.Tensor:
        """Decode one image file and resize it for the network, uint8 [C, H, W].

        Raises:
            BrokenImageError: If it cannot be read.
        """
        return self.shown.image(content)

    @torch.inference_mode()
    def answer(self, prepared: Sequence[torch.Tensor], top_k: int) -> list[Prediction]:
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


_INPUT, OUTPUT = "images", "logits"


class OnnxPredictor(ImageLabeller):
    """An ONNX file from ``paceline export --format onnx``; its metadata describe the preprocessing.

    Args:
        path: The file: float32 [N, C, H, W] named ``images``, normalised, to ``logits``.
        device: Device; a GPU if this ONNX Runtime supports it.

    Raises:
        CheckpointError: If it is not such a file, or ONNX Runtime is not installed.
        DataError: If it does not label images.
    """

    def __init__(self, path: Path, device: torch.device) -> None:
        if not path.is_file():
            raise CheckpointError(f"'{path}' does not exist; give an ONNX file that paceline export wrote.")
        refuse_special_inputs(path)
        self._path = path
        self._session = onnx_session(path, device)
        metadata: dict[str, str] = self._session.get_modelmeta().custom_metadata_map
        if not {"recipe", "data"} <= metadata.keys():
            raise CheckpointError(
                f"'{path}' does not say in its metadata how to prepare images; give a file that paceline export "
                "--format onnx wrote."
            )
        self._saved = SavedWeights(state={}, weights="model", path=path, metadata=metadata)
        data = self._saved.description("data")
        outputs = Outputs.description(data)
        if outputs is None or "detects" in data or "labels_pixels" in data:
            raise DataError(f"'{path}' is not an image classifier, so it cannot label images.")
        super().__init__(replace(outputs, is_in_units=True), Preprocessing.description(data, str(path)))
        self._check()
        self._answers = self._views()
        # Normalised on the CPU, where ONNX Runtime expects its inputs.
        self._normalize = Normalize(self.shown.mean, self.shown.std, Placement(device=torch.device("cpu")))

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the file."""
        return hash_file(self._path, hashlib.sha256).digest

    def probabilities(self, images: torch.Tensor) -> torch.Tensor:
        """Return class probabilities, float32 [N, classes] on the CPU; or the numbers, float64 [N, numbers].

        Args:
            images: Decoded and resized images, uint8 [N, C, H, W], on any device.
        """
        return self.outputs.read(self._answers(self._normalize(images.cpu())))

    def _logits(self, images: torch.Tensor) -> torch.Tensor:
        (logits,) = self._session.run([OUTPUT], {_INPUT: images.contiguous().numpy()})
        return torch.from_numpy(logits)

    def _views(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the network, or a wrapper that averages several views of each image, as in its evaluation."""
        kind = self._saved.description("recipe").get("evaluate", {}).get("augment", "none")
        if kind in CROPS:
            raise CheckpointError(
                f"'{self._path}' was evaluated with evaluate.augment={kind}, and its network takes whole images only; "
                "predict with the run, or with a safetensors file."
            )
        return self._logits if kind == "none" else AveragedViews(self._logits, kind, self.shown.size)

    def _check(self) -> None:
        """Check that its inputs and outputs are as expected."""
        inputs = {each.name: (each.type, list(each.shape)) for each in self._session.get_inputs()}
        outputs = [each.name for each in self._session.get_outputs()]
        kind, shape = inputs.get(_INPUT, ("", []))
        fits = kind == "tensor(float)" and len(shape) == 4 and len(inputs) == 1 and not isinstance(shape[0], int)
        suffix = " in their own shapes" if self.shown.multiple is not None else ""
        squares = [self.shown.size if isinstance(side, int) else side for side in shape[2:]]
        if fits and (squares != shape[2:] or (isinstance(shape[2], int) and suffix)):
            raise CheckpointError(
                f"'{self._path}' takes images of {shape[2]}x{shape[3]} pixels only, and they are to be shown at "
                f"{self.shown.size} pixels{suffix}; predict with the run."
            )
        if not fits or OUTPUT not in outputs:
            raise CheckpointError(
                f"'{self._path}' must take float32 [N, C, H, W] named {_INPUT}, of any N, and return {OUTPUT}; it "
                f"takes {inputs} and returns {outputs}. Write it with paceline export --format onnx."
            )


def onnx_session(path: Path, device: torch.device) -> Any:
    """Open an ONNX file in ONNX Runtime, on a GPU if possible.

    Raises:
        CheckpointError: If it cannot be opened, or ONNX Runtime is not installed.
    """
    try:
        onnxruntime = importlib.import_module("onnxruntime")  # published without types
    except ImportError as error:
        raise CheckpointError(
            f"'{path}' needs ONNX Runtime, which is not installed; pip install 'paceline[onnx]'."
        ) from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # its warnings are not actionable
    usable = onnxruntime.get_available_providers()
    requested = ["CUDAExecutionProvider"] if device.type == "cuda" else []
    providers = [*(each for each in requested if each in usable), "CPUExecutionProvider"]
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=providers)
    except Exception as error:  # its errors share no base class
        raise CheckpointError(f"'{path}' cannot be opened by ONNX Runtime: {error}.") from error
