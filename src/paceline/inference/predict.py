"""Open trained weights for prediction."""

from __future__ import annotations

from pathlib import Path

import torch

from paceline.checkpoint.weights import read_weights
from paceline.errors import CheckpointError, DataError
from paceline.inference.onnx_predictor import open_onnx
from paceline.prediction.predictor import Predictor
from paceline.tasks.labelling import TrainedLabeller
from paceline.tasks.own_code import refused
from paceline.tasks.trained import TaskMaker, trained_recipe, trained_task


def load_predictor(
    target: Path,
    *,
    weights: str = "auto",
    best: bool = False,
    trust_code: bool = False,
    device: torch.device | None = None,
    task: TaskMaker | None = None,
) -> TrainedLabeller:
    """Load weights that label images from a run directory, a checkpoint or a safetensors file.

    Args:
        target: Path of the weights.
        weights: ``auto`` (the moving average if there is one), ``model`` or ``ema``.
        best: In a run directory, take the best checkpoint instead of the newest.
        trust_code: Whether to import code named in the weights' recipe.
        device: Device; the CPU by default.
        task: Creates the task, instead of the one named in the weights.

    Raises:
        PacelineError: If the target is not usable.
    """
    saved = read_weights(target, weights, best=best)
    make = task or trained_task(saved, trust_code=trust_code)
    predictor = make(trained_recipe(saved)).predictor(saved, device or torch.device("cpu"))
    if not isinstance(predictor, TrainedLabeller):
        raise DataError(
            f"{saved.path} holds {predictor.holds} and does not classify images; use paceline predict.", path=saved.path
        )
    return predictor


def open_predictor(
    target: Path, *, weights: str = "auto", best: bool = False, trust_code: bool = False, device: torch.device
) -> Predictor:
    """Load weights of any task that predicts files or prompts; arguments as for :func:`load_predictor`.

    The target may also be an ONNX file from ``paceline export --format onnx``.
    """
    if target.suffix == ".onnx":
        if weights != "auto" or best:
            raise CheckpointError(
                f"'{target}' holds one set of weights: --weights and --best have no effect; leave them out."
            )
        return open_onnx(target, device, trust_code=trust_code)
    saved = read_weights(target, weights, best=best)
    task = trained_task(saved, trust_code=trust_code)(trained_recipe(saved))
    predictor = task.predictor(saved, device)
    if not isinstance(predictor, Predictor):
        raise refused(task, "predictor returned", predictor, "a Predictor of paceline.prediction.predictor")
    return predictor
