"""ONNX export, verified against the network in ONNX Runtime."""

from __future__ import annotations

import importlib
import itertools
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.checkpoint.weights import SavedWeights
from paceline.data.batch import Normalize, Placement
from paceline.data.image.decode import BrokenImageError
from paceline.data.image.source import SampleSource
from paceline.data.image.transforms import evaluation_image
from paceline.errors import DataError, ModelError, PacelineError, RecipeError
from paceline.inference.onnx_predictor import onnx_session
from paceline.inference.program import first_line
from paceline.parsing.plain_text import one_form
from paceline.recipe.load import Overrides
from paceline.recipe.schema import refuse_foreign_code
from paceline.tasks.exportable import Exportable
from paceline.tasks.trained import trained_task

_LARGEST_BYTES = 1_900_000_000  # protobuf's limit is 2 GiB for a single file
_LIBRARIES = ("onnx", "onnxruntime", "onnxscript")


def need_onnx() -> None:
    """Check that the libraries are installed.

    Raises:
        PacelineError: If one is missing; names the extra.
    """
    for name in _LIBRARIES:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise PacelineError(
                f"--format onnx needs {name} ({error}); install it with: pip install 'paceline[onnx]'."
            ) from error


def write_onnx(exportable: Exportable, path: Path, metadata: Mapping[str, str]) -> float:
    """Write a network as one ONNX file, and compare ONNX Runtime's output at several batch sizes.

    Args:
        exportable: The network.
        path: The new file.
        metadata: Stored in the file (``metadata_props``).

    Returns:
        The largest difference between ONNX Runtime's output and the network's, in logits.

    Raises:
        ModelError: If the network cannot be expressed in ONNX operators, or ONNX Runtime's results differ.
    """
    network = exportable.network
    size = sum(each.nbytes for each in itertools.chain(network.parameters(), network.buffers()))
    if size > _LARGEST_BYTES:
        raise ModelError(
            f"the network has {size / 2**30:.1f} GiB of weights, and an ONNX file holds at most 2; use --format "
            "safetensors or torch-export."
        )
    try:
        with quiet():
            program = torch.onnx.export(
                network,
                exportable.examples(2),
                dynamo=True,
                dynamic_shapes=exportable.dynamic_shapes,
                input_names=[each.name for each in exportable.inputs],
                output_names=list(exportable.output_names),
                verbose=False,
            )
    except Exception as error:  # tracing an arbitrary network may raise anything
        raise ModelError(
            f"{type(network).__name__} cannot be written as ONNX: {first_line(error)}; use --format safetensors or "
            "torch-export."
        ) from error
    assert program is not None  # the file layout of dynamo=True
    _save(program.model_proto, path, metadata)
    return exportable.compare(OnnxSession(path), what="ONNX Runtime")


def _save(model: Any, path: Path, metadata: Mapping[str, str]) -> None:
    """Write an ONNX model with its metadata replaced; those of its nodes have paths of this machine's source code."""
    import onnx

    for each in (model, *model.graph.node, *(node for function in model.functions for node in function.node)):
        del each.metadata_props[:]
    onnx.helper.set_model_props(model, dict(metadata))
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, path)


class OnnxSession:
    """Runs an ONNX file on the CPU.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._session = onnx_session(path, torch.device("cpu"))
        self._names = [each.name for each in self._session.get_inputs()]

    def __call__(self, *inputs: Tensor) -> Any:
        """Return the output, or a tuple of several."""
        feeds = {name: each.numpy() for name, each in zip(self._names, inputs, strict=True)}
        outputs = tuple(map(torch.from_numpy, self._session.run(None, feeds)))
        return outputs[0] if len(outputs) == 1 else outputs


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the exporter and the quantiser: they warn about their own deprecations, and the result is verified."""
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)


CALIBRATION_IMAGES = 512
HELD_OUT_IMAGES = 2000
_BATCH = 32


@dataclass(frozen=True, kw_only=True)
class QuantizationResult:
    """The accuracy cost of quantisation.

    Attributes:
        images: Held-out images on which both networks were evaluated; 0 if there are none.
        before: Top-1 accuracy in fp32, in percent; None without images.
        after: Top-1 accuracy in int8, in percent.
        calibration_images: Training images used to calibrate activation ranges.
    """

    images: int
    before: float | None
    after: float | None
    calibration_images: int


@dataclass(frozen=True, kw_only=True)
class SampleImages:
    """Some images of a data set, preprocessed as in evaluation.

    Attributes:
        calibration: Training images, uint8 [N, C, H, W].
        held_out: Held-out images, uint8 [M, C, H, W].
        labels: Labels of the held-out images, int64 [M].
        normalize: Converts them to the network's input.
    """

    calibration: Tensor
    held_out: Tensor
    labels: Tensor
    normalize: Normalize

    def batches(self, images: Tensor) -> Iterator[Tensor]:
        """Yield normalised images, float32 [32 or fewer, C, H, W]."""
        for part in torch.split(images, _BATCH):
            yield self.normalize(part).contiguous()


def calibration_images(saved: SavedWeights, overrides: Overrides, *, trust_code: bool) -> SampleImages:
    """Read some images of the weights' training data.

    Args:
        saved: The weights.
        overrides: Changes to the recipe's ``data`` section, such as the data's current path.
        trust_code: Whether to import code named in the weights' recipe.

    Raises:
        PacelineError: If they are not images, or not at the recipe's path.
    """
    data, where = saved.description("data"), str(saved.path)
    recipe = saved.recipe(overrides)
    refuse_foreign_code(saved.description("recipe"), recipe, where, trusted=trust_code)
    statistics: dict[str, Any] = {key: tuple(data[key]) for key in ("mean", "std") if key in data}
    statistics |= {key: data[key] for key in ("image_size", "channels") if key in data}
    task = trained_task(saved, trust_code=trust_code)(replace(recipe, data=replace(recipe.data, **statistics)))
    try:
        dataset = task.labelled_images()
    except PacelineError as error:
        raise DataError(f"--quantize int8 needs images of the run: {error} Set data.path=FOLDER.") from error
    if dataset is None:
        raise RecipeError(f"--quantize int8 is for image classification; {where} has task={recipe.task}.")
    if list(one_form(dataset.classes, data["class_names"]).values()) != data["class_names"]:
        raise DataError(f"--quantize int8: the data's classes differ from those of {where}; use the run's data.")
    size, crop = int(data.get("evaluation_size", data["image_size"])), float(data["evaluation_crop"])

    def shown(source: SampleSource, limit: int) -> tuple[Tensor, list[int]]:
        ids = np.unique(np.linspace(0, max(0, len(source) - 1), min(limit, len(source))).astype(int)).tolist()
        try:
            pixels = [source.read(each) for each in ids]
        except BrokenImageError as error:
            raise DataError(f"--quantize int8 reads images of the run: {error}; restore it, or remove it.") from None
        always = bool(data.get("always_resized"))
        images = [evaluation_image(each, size, crop, recipe.data.interpolation, always=always) for each in pixels]
        return torch.stack(images) if images else torch.empty((0, dataset.channels, size, size), dtype=torch.uint8), ids

    held_out, ids = shown(dataset.validation, HELD_OUT_IMAGES)
    return SampleImages(
        calibration=shown(dataset.train, CALIBRATION_IMAGES)[0],
        held_out=held_out,
        labels=torch.as_tensor(dataset.validation.labels[ids]),
        normalize=Normalize(dataset.mean, dataset.std, Placement(device=torch.device("cpu"))),
    )


def quantised(float_path: Path, path: Path, images: SampleImages, metadata: Mapping[str, str]) -> QuantizationResult:
    """Write an ONNX network in int8, and compare it with the fp32 network on held-out images.

    Args:
        float_path: The network in fp32; a second file is written next to it meanwhile.
        path: The new file.
        images: Images for calibration and comparison.
        metadata: Stored in the file.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    batches = ({"images": each.numpy()} for each in images.batches(images.calibration))
    prepared = float_path.with_name(f"{float_path.stem}-prepared{float_path.suffix}")
    try:
        with quiet():
            quant_pre_process(float_path, prepared, skip_symbolic_shape=True)
            # Its other defaults are QDQ format and min-max ranges: see decision 56.
            quantize_static(
                prepared,
                path,
                SimpleNamespace(get_next=partial(next, batches, None)),  # as ONNX Runtime requires
                per_channel=True,
                activation_type=QuantType.QUInt8,
                weight_type=QuantType.QInt8,
            )
    finally:
        prepared.unlink(missing_ok=True)
    _save(onnx.load(path), path, metadata)

    def accuracy(file: Path) -> float:
        network = OnnxSession(file)
        predictions = torch.cat([network(batch).argmax(dim=1) for batch in images.batches(images.held_out)])
        return 100 * float((predictions == images.labels).double().mean())

    count = len(images.labels)
    before, after = (accuracy(float_path), accuracy(path)) if count else (None, None)
    return QuantizationResult(images=count, before=before, after=after, calibration_images=len(images.calibration))
