"""Image predictions from ONNX files."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.durable import hash_file
from paceline.checkpoint.weights import SavedWeights
from paceline.data.batch import Normalize, Placement
from paceline.errors import CheckpointError, DataError
from paceline.parsing.files import refuse_special_inputs
from paceline.prediction.predictor import Predictor
from paceline.tasks.labelling import ImageLabeller, Outputs, Preprocessing
from paceline.tasks.trained import trained_recipe, trained_task
from paceline.tasks.views import CROPS, AveragedViews

_INPUT, OUTPUT = "images", "logits"


class OnnxPredictor(ImageLabeller):
    """An ONNX file from ``paceline export --format onnx``; its metadata describe the preprocessing.

    Args:
        session: The file: float32 [N, C, H, W] named ``images``, normalised, to ``logits``.
        saved: Its metadata.

    Raises:
        CheckpointError: If it is not such a file.
        DataError: If it does not label images.
    """

    def __init__(self, session: Any, saved: SavedWeights) -> None:
        self._session, self._saved, self._path = session, saved, saved.path
        path, data = saved.path, saved.description("data")
        outputs = Outputs.description(data)
        ranks = [len(each.shape) for each in self._session.get_outputs() if each.name == OUTPUT]
        if outputs is None or ranks not in ([], [2]):
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


def open_onnx(path: Path, device: torch.device, *, trust_code: bool) -> Predictor:
    """Open an ONNX file from ``paceline export`` that labels images or finds objects.

    Args:
        path: The file.
        device: Device; a GPU if this ONNX Runtime supports it.
        trust_code: Whether to import code named in the file's recipe.

    Raises:
        CheckpointError: If it is not such a file, or ONNX Runtime is not installed.
        DataError: If it answers no images.
    """
    if not path.is_file():
        raise CheckpointError(f"'{path}' does not exist; give an ONNX file that paceline export wrote.")
    refuse_special_inputs(path)
    session = onnx_session(path, device)
    metadata: dict[str, str] = session.get_modelmeta().custom_metadata_map
    if not {"recipe", "data"} <= metadata.keys():
        raise CheckpointError(
            f"'{path}' does not say in its metadata how to prepare images; give a file that paceline export "
            "--format onnx wrote."
        )
    saved = SavedWeights(state={}, weights="model", path=path, metadata=metadata)
    names = [each.name for each in session.get_outputs()]
    if "picture" not in saved.description("data"):
        return OnnxPredictor(session, saved)

    def run(images: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return dict(zip(names, map(torch.from_numpy, session.run(names, {_INPUT: images.numpy()})), strict=True))

    return trained_task(saved, trust_code=trust_code)(trained_recipe(saved)).exported_predictor(saved, run)


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
