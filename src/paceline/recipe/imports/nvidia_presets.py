"""What do the presets of NVIDIA's launch.py come to?

The numbers are those of configs.yml in DeepLearningExamples, PyTorch/Classification/ConvNets. What a platform says of
loader processes and cores is left out: that is a matter of the machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from paceline.errors import RecipeError, did_you_mean
from paceline.plain_yaml import BoundedLoader

_RESNET = {
    "label_smoothing": 0.1,
    "mixup": 0.2,
    "lr_schedule": "cosine",
    "momentum": 0.875,
    "warmup": 8,
    "epochs": 250,
    "data_backend": "pytorch",
    "image_size": 224,
    "interpolation": "bilinear",
}
_EFFICIENTNET = {
    "optimizer": "rmsprop",
    "rmsprop_alpha": 0.9,
    "rmsprop_eps": 0.01,
    "print_freq": 100,
    "label_smoothing": 0.1,
    "mixup": 0.2,
    "lr_schedule": "cosine",
    "momentum": 0.9,
    "warmup": 16,
    "epochs": 400,
    "data_backend": "pytorch",
    "augmentation": "autoaugment",
    "interpolation": "bicubic",
    "optimizer_batch_size": 4096,
}
_OF_B0 = {"lr": 0.08, "weight_decay": 1e-5, "image_size": 224}
_OF_B4 = {"lr": 0.16, "weight_decay": 5e-6, "image_size": 380}
# Samples per step: learning rate and weight decay of the residual networks.
_BY_BATCH = {896: (0.896, 2**-14), 1024: (1.024, 2**-14), 2048: (2.048, 2**-15), 4096: (4.096, 2**-15)}
_V100, _V100_SMALL, _V100_LARGE = "DGX1V", "DGX1V-16G", "DGX1V-32G"
_VOLTA = (_V100, _V100_SMALL, _V100_LARGE)

# Network, platforms, precision: samples per process and forward pass, and per step.
_SIZES: tuple[tuple[str, tuple[str, ...], str, int, int], ...] = (
    ("resnet50", _VOLTA, "AMP", 256, 2048),
    ("resnet50", _VOLTA, "FP32", 112, 896),
    ("resnet50", ("DGX2V",), "AMP", 256, 4096),
    ("resnet50", ("DGX2V",), "FP32", 256, 4096),
    ("resnet50", ("DGXA100",), "AMP", 256, 2048),
    ("resnet50", ("DGXA100",), "TF32", 256, 2048),
    ("resnet50", ("T4",), "AMP", 256, 2048),
    ("resnet50", ("T4",), "FP32", 128, 2048),
    ("resnext101-32x4d", (*_VOLTA, "T4"), "AMP", 128, 1024),
    ("resnext101-32x4d", (*_VOLTA, "T4"), "FP32", 64, 1024),
    ("resnext101-32x4d", ("DGXA100",), "AMP", 128, 1024),
    ("resnext101-32x4d", ("DGXA100",), "TF32", 128, 1024),
    ("se-resnext101-32x4d", _VOLTA, "AMP", 112, 896),
    ("se-resnext101-32x4d", _VOLTA, "FP32", 64, 1024),
    ("se-resnext101-32x4d", ("DGXA100", "T4"), "AMP", 128, 1024),
    ("se-resnext101-32x4d", ("DGXA100",), "TF32", 128, 1024),
    ("se-resnext101-32x4d", ("T4",), "FP32", 64, 1024),
    ("b0", ("T4", _V100_SMALL), "AMP", 128, 4096),
    ("b0", ("T4", _V100_SMALL), "FP32", 64, 4096),
    ("b0", (_V100_LARGE, "DGXA100"), "AMP", 256, 4096),
    ("b0", (_V100_LARGE,), "FP32", 128, 4096),
    ("b0", ("DGXA100",), "TF32", 256, 4096),
    ("b4", ("T4", _V100_SMALL), "AMP", 32, 4096),
    ("b4", ("T4", _V100_SMALL), "FP32", 16, 4096),
    ("b4", (_V100_LARGE,), "AMP", 64, 4096),
    ("b4", (_V100_LARGE,), "FP32", 32, 4096),
    ("b4", ("DGXA100",), "AMP", 128, 4096),
    ("b4", ("DGXA100",), "TF32", 64, 4096),
)
_PRECISION: dict[str, dict[str, Any]] = {"AMP": {"static_loss_scale": 128.0, "amp": True}, "FP32": {}, "TF32": {}}
_BENCHMARK = {"print_freq": 1, "epochs": 3, "training_only": True, "no_checkpoints": True}
_SCORING = {"epochs": 1, "evaluate": True, "no_checkpoints": True}
_MODES: dict[str, dict[str, Any]] = {
    "benchmark_training": _BENCHMARK,
    "benchmark_training_short": {**_BENCHMARK, "epochs": 1, "data_backend": "synthetic", "prof": 100},
    "benchmark_inference": {**_SCORING, "print_freq": 1},
    "convergence": {"print_freq": 20},
    "evaluate": {**_SCORING, "print_freq": 20},
}
MODELS = (
    "resnet50",
    "resnext101-32x4d",
    "se-resnext101-32x4d",
    *(f"efficientnet-{kind}{size}" for kind in ("", "widese-", "quant-") for size in ("b0", "b4")),
)
MODES = tuple(_MODES)


def platforms(model: str) -> list[tuple[str, str]]:
    """The platforms and precisions that a model has presets for."""
    sized = model.rpartition("-")[2] if model.startswith("efficientnet") else model
    return [(place, precision) for name, places, precision, _, _ in _SIZES if name == sized for place in places]


def preset(model: str, platform: str, precision: str, mode: str) -> dict[str, Any]:
    """The options that launch.py sets for a model on a platform, by their keys.

    Raises:
        RecipeError: If there is no such preset; names those that there are.
    """
    if model not in MODELS:
        raise RecipeError(f"there are no presets of --model {model}.{did_you_mean(model, MODELS)} {', '.join(MODELS)}.")
    if mode not in _MODES:
        raise RecipeError(f"there is no --mode {mode}.{did_you_mean(mode, _MODES)} It is {', '.join(_MODES)}.")
    there = platforms(model)
    if (platform, precision) not in there:
        known = ", ".join(f"{place} {bits}" for place, bits in there)
        raise RecipeError(f"--model {model} has no preset for --platform {platform} --precision {precision}: {known}.")
    is_residual = not model.startswith("efficientnet")
    sized = model if is_residual else model.rpartition("-")[2]
    size, batch = next(
        (size, batch)
        for name, places, bits, size, batch in _SIZES
        if name == sized and platform in places and bits == precision
    )
    found: dict[str, Any] = {**_PRECISION[precision], "arch": model, "batch_size": size}
    if is_residual:
        rate, decay = _BY_BATCH[batch]
        found |= {**_RESNET, "optimizer_batch_size": batch, "lr": rate, "weight_decay": decay}
    else:
        found |= {**_EFFICIENTNET, **(_OF_B0 if sized == "b0" else _OF_B4)}
    if precision == "AMP":
        found["memory_format"] = "nhwc"
    return found | _MODES[mode]


def own_preset(path: Path, model: str, platform: str, precision: str, mode: str) -> dict[str, Any]:
    """The same from a file laid out as configs.yml is.

    Raises:
        RecipeError: If it is not readable, or has no such preset.
    """
    try:
        tree: Mapping[str, Any] = yaml.load(path.read_text(encoding="utf-8"), Loader=BoundedLoader)
        parts = [tree["precision"][precision], tree["models"][model][platform][precision], tree["mode"][mode]]
        found = {key: value for part in parts for key, value in part.items()}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RecipeError(f"--cfg_file {path}: not readable as YAML: {' '.join(str(error).split())[:200]}") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise RecipeError(
            f"--cfg_file {path} has no preset of --model {model} --platform {platform} --precision {precision} "
            f"--mode {mode}: {error} is missing."
        ) from None
    saves = found.pop("save_checkpoints", True)
    return found | ({} if saves else {"no_checkpoints": True})
