"""What does an exported network say about images, computed by ONNX Runtime without the code that built it?"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.durable import hash_file
from paceline.checkpoint.weights import SavedWeights
from paceline.data.pipeline import Normalize, Placement
from paceline.errors import CheckpointError, DataError
from paceline.files import refuse_odd_kinds
from paceline.inference.labelling import ImageLabeller, Shown, class_names
from paceline.tasks.averaging import CROPS, AveragedViews

_INPUT, _OUTPUT = "images", "logits"


class OnnxPredictor(ImageLabeller):
    """An ONNX file as ``paceline export --format onnx`` writes it; its metadata say how images are shown to it.

    Args:
        path: The file: float32 [N, C, H, W] named ``images``, normalised, to ``logits``.
        device: Where to compute; on a GPU if this ONNX Runtime can.

    Raises:
        CheckpointError: If it is no such file, or ONNX Runtime is not installed.
        DataError: If it labels no images.
    """

    def __init__(self, path: Path, device: torch.device) -> None:
        if not path.is_file():
            raise CheckpointError(f"'{path}' does not exist; give an ONNX file that paceline export wrote.")
        refuse_odd_kinds(path)
        self._path = path
        self._session = _session(path, device)
        metadata: dict[str, str] = self._session.get_modelmeta().custom_metadata_map
        if not {"recipe", "data"} <= metadata.keys():
            raise CheckpointError(
                f"'{path}' does not say in its metadata how images are shown to it; give a file that paceline export "
                "--format onnx wrote."
            )
        self._saved = SavedWeights(state={}, weights="model", path=path, metadata=metadata)
        data = self._saved.described("data")
        names = class_names(data)
        if names is None or "detects" in data:
            raise DataError(f"'{path}' labels no images, so it cannot predict them.")
        self.classes = names
        self.shown = Shown.described(data, str(path))
        self._check()
        self._answers = self._views()
        # Normalised on the CPU: ONNX Runtime takes its inputs from there.
        self._normalize = Normalize(self.shown.mean, self.shown.std, Placement(device=torch.device("cpu")))

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the file."""
        return hash_file(self._path).sha256

    def probabilities(self, images: torch.Tensor) -> torch.Tensor:
        """The probabilities of the classes, float32 [N, classes] on the CPU.

        Args:
            images: Decoded and of the size that is shown, uint8 [N, C, H, W], anywhere.
        """
        batch = self._normalize(images.cpu())
        answers: torch.Tensor = self._answers(batch).float().softmax(dim=1)
        return answers

    def _logits(self, images: torch.Tensor) -> torch.Tensor:
        (logits,) = self._session.run([_OUTPUT], {_INPUT: images.contiguous().numpy()})
        return torch.from_numpy(logits)

    def _views(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """The network, or what averages several views of an image, as in its evaluation."""
        kind = self._saved.described("recipe").get("evaluate", {}).get("augment", "none")
        if kind in CROPS:
            raise CheckpointError(
                f"'{self._path}' was evaluated with evaluate.augment={kind}, and its network takes whole images only; "
                "predict with the run, or with a safetensors file."
            )
        return self._logits if kind == "none" else AveragedViews(self._logits, kind, self.shown.size)

    def _check(self) -> None:
        """See that it is asked and answers as expected."""
        inputs = {each.name: (each.type, list(each.shape)) for each in self._session.get_inputs()}
        outputs = [each.name for each in self._session.get_outputs()]
        kind, shape = inputs.get(_INPUT, ("", []))
        fits = kind == "tensor(float)" and len(shape) == 4 and len(inputs) == 1 and not isinstance(shape[0], int)
        own = " in their own shapes" if self.shown.multiple is not None else ""
        squares = [self.shown.size if isinstance(side, int) else side for side in shape[2:]]
        if fits and (squares != shape[2:] or (isinstance(shape[2], int) and own)):
            raise CheckpointError(
                f"'{self._path}' takes images of {shape[2]}x{shape[3]} pixels only, and they are to be shown at "
                f"{self.shown.size} pixels{own}; predict with the run."
            )
        if not fits or _OUTPUT not in outputs:
            raise CheckpointError(
                f"'{self._path}' must take float32 [N, C, H, W] named {_INPUT}, of any N, and answer with {_OUTPUT}; "
                f"it takes {inputs} and answers with {outputs}. Write it with paceline export --format onnx."
            )


def _session(path: Path, device: torch.device) -> Any:
    try:
        onnxruntime = importlib.import_module("onnxruntime")  # published without types
    except ImportError as error:
        raise CheckpointError(
            f"'{path}' needs ONNX Runtime, which is not installed; pip install 'paceline[onnx]'."
        ) from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # it warns of what a reader cannot change
    usable = onnxruntime.get_available_providers()
    wanted = ["CUDAExecutionProvider"] if device.type == "cuda" else []
    providers = [*(each for each in wanted if each in usable), "CPUExecutionProvider"]
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=providers)
    except Exception as error:  # its errors have no common kind
        raise CheckpointError(f"'{path}' cannot be opened by ONNX Runtime: {error}.") from error
