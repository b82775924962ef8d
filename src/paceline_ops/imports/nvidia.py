"""Recipes from command lines of NVIDIA's ConvNets trainer, and from the presets of its launch.py.

The presets' numbers are those of configs.yml in DeepLearningExamples. A platform's settings of loader processes and
cores are left out: they depend on the machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from paceline.errors import RecipeError, did_you_mean
from paceline.parsing.units import counted
from paceline_ops.imports.command import ConversionSource, read_source
from paceline_ops.imports.draft import Conversion
from paceline_ops.imports.table import OptionTable

_PRESET_KEYS = ("model", "platform", "precision", "mode")
MAIN = OptionTable("NVIDIA's main.py", "nvidia.yaml", excluded=("cfg_file", *_PRESET_KEYS))
LAUNCH = OptionTable("NVIDIA's launch.py", "nvidia.yaml")
PRESETS = yaml.safe_load(Path(__file__).with_name("nvidia_presets.yaml").read_text(encoding="utf-8"))
_OF_PLATFORM = ("workers", "prefetch", "gpu_affinity", "save_checkpoints")
_OTHER_SCRIPTS = {
    "classify.py": "labels images: use `paceline predict`",
    "quant_main.py": "trains for quantised numbers, which is unsupported",
}
_PADDING = 32  # pixels cropped by evaluation
_DECAY_EPOCHS = (30, 60, 80)  # epochs between steps of main.py's `step` schedule


def read_nvidia(words: Sequence[str]) -> tuple[ConversionSource, OptionTable, dict[str, Any]]:
    """Read what the user gave: a file with a command, or a command.

    Returns:
        The source, the options of its program, and their values, including a preset's.

    Raises:
        RecipeError: If it is neither, starts another of their programs, or has options that the program does not know.
    """
    source = read_source(words, ("main.py", "launch.py", *_OTHER_SCRIPTS))
    if source.script in _OTHER_SCRIPTS:
        message = f"{source.script} {_OTHER_SCRIPTS[source.script]}; main.py and launch.py train."
        raise RecipeError(message, value=source.script, rule="main.py or launch.py")
    if source.tree is not None:
        message = f"{source.title} has no command; give one that starts main.py or launch.py."
        raise RecipeError(message, value=source.title, rule="main.py or launch.py")
    if source.script != "launch.py" and not any(word.partition("=")[0] == "--platform" for word in source.words):
        return source, MAIN, MAIN.read_words(source.words)
    given = LAUNCH.read_words(source.words)
    missing = [f"--{key}" for key in _PRESET_KEYS if key not in given]
    if missing:
        message = f"launch.py needs {' and '.join(missing)} too, to find its preset."
        raise RecipeError(message, key=missing[0], rule="given")
    return source, LAUNCH, MAIN.read_tree(preset(*(given[key] for key in _PRESET_KEYS)), _OF_PLATFORM) | given


def preset(name: str, platform: str, precision: str, mode: str) -> dict[str, Any]:
    """Return the options that launch.py sets for a model on a platform, by key.

    Raises:
        RecipeError: If there is no such preset; names the existing ones.
    """
    model, later = _named("model", name, PRESETS["models"]), _named("mode", mode, PRESETS["modes"])
    micro, batch = _named("precision", precision, _named("platform", platform, PRESETS["sizes"][model["sizes"]]))
    by_batch = PRESETS["rates"].get(batch, {}) if model["family"] == "resnet" else {}
    return {
        "arch": name,
        "batch_size": micro,
        "optimizer_batch_size": batch,
        **PRESETS["families"][model["family"]],
        **by_batch,
        **model.get("options", {}),
        **PRESETS["precisions"][precision],
        **later,
    }


def _named(option: str, name: str, presets: Mapping[str, Any]) -> Any:
    if name not in presets:
        hint = did_you_mean(name, presets)
        message = f"there is no preset for --{option} {name} here.{hint} It is {', '.join(presets)}."
        raise RecipeError(message, key=f"--{option}", value=name, rule="a known name")
    return presets[name]


def convert_nvidia(
    source: ConversionSource,
    table: OptionTable,
    given: Mapping[str, Any],
    *,
    processes: int | None,
    skipped: Iterable[str],
) -> Conversion:
    """Convert the options to a recipe.

    Args:
        source: The source of the conversion.
        table: The options of its program.
        given: Their values.
        processes: Number of processes; overrides the command's.
        skipped: Names of options to leave out.

    Raises:
        RecipeError: If the converted options are not a valid recipe.
    """
    draft = Conversion(table, source, given, skipped, processes)
    draft.convert(_CONVERSIONS)
    if draft["data_backend"] != "synthetic":
        draft.put("data.dataset", "image_folder", *(["data"] if draft["data"] else []))
    size = draft.flat.setdefault("data.image_size", 224)
    crop = float(f"{size / (size + _PADDING):.16g}")
    draft.put("data.evaluation_crop", crop, note=f"{size} of {size + _PADDING} pixels")
    draft.put("data.augment.crop", "random_resized", note="as its loaders do")
    draft.put("data.augment.flip", 0.5, note="as its loaders do")
    if not draft["bn_weight_decay"]:
        draft.differ("bn_weight_decay", "biases do not decay; in main.py, those outside of norms do")
    if draft["warmup"] > draft["epochs"]:
        draft.put_ending(draft.flat["train.duration"], draft.flat["schedule.warmup"], "warmup")
    if table is LAUNCH and draft["precision"] == "TF32":
        draft.differ("precision", "set train.float32_matmul=high to multiply fp32 numbers in TF32, where a GPU can")
    return draft.finish()


def _accumulation_steps(draft: Conversion) -> int:
    """Return a process's micro-batches per step."""
    return max(1, int(draft["optimizer_batch_size"] // (draft["batch_size"] * draft.processes)))


def _batch(draft: Conversion, batch_size: int) -> Any:
    micro, share = draft["batch_size"], counted(draft.processes, "process")
    total = micro * draft.processes * _accumulation_steps(draft)
    if 0 <= batch_size < total:
        raise ValueError(f"smaller than {share} of {micro} samples")
    if 0 < batch_size != total:
        draft.differ("optimizer_batch_size", f"{share} of {micro} samples make {total} in whole passes, as in main.py")
    draft.put("batch.global_size", total, "optimizer_batch_size", "batch_size", note=share)
    return {}


def _schedule(draft: Conversion, name: str) -> Any:
    milestones = [f"{milestone} epochs" for milestone in _DECAY_EPOCHS if milestone < draft["epochs"]]
    if name != "step":
        return name
    if milestones:
        return {"schedule.name": name, "schedule.milestones": milestones, "schedule.gamma": 0.1}
    draft.put("schedule.name", "constant", "lr_schedule", note="the run ends before the first fall")
    return {}


def _average(draft: Conversion, decay: float) -> Any:
    passes = _accumulation_steps(draft)
    note = f"per step: main.py averages after each of {passes} passes" if passes > 1 else ""
    draft.put("train.ema", float(f"{decay**passes:.12g}"), "use_ema", note=note)
    return {}


_CONVERSIONS: dict[str, Callable[[Conversion, Any], Any]] = {
    "epochs": lambda _, value: f"{value} epoch{'s' * (value != 1)}",
    "steps": lambda draft, value: f"{max(1, round(value / _accumulation_steps(draft)))} steps",
    "complement": lambda _, value: float(f"{1 - value:.10g}"),
    "batch": _batch,
    "schedule": _schedule,
    "average": _average,
    "run_epochs": lambda _, value: f"{value} epochs" if value > 0 else {},
    "profiled": lambda draft, value: f"{math.ceil(value / _accumulation_steps(draft))} steps" if value > 0 else {},
}
