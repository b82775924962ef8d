"""Recipes from command lines of NVIDIA's ConvNets trainer, and from the presets of its launch.py.

The presets' numbers are those of configs.yml in DeepLearningExamples. What a platform says of loader processes and
cores is left out: that depends on the machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from paceline.errors import RecipeError, did_you_mean
from paceline.recipe.imports.command import Source, read_source
from paceline.recipe.imports.draft import Conversion, processes_text
from paceline.recipe.imports.table import Table

_PRESET_KEYS = ("model", "platform", "precision", "mode")
MAIN = Table("NVIDIA's main.py", "nvidia.yaml", without=("cfg_file", *_PRESET_KEYS))
LAUNCH = Table("NVIDIA's launch.py", "nvidia.yaml")
PRESETS = yaml.safe_load(Path(__file__).with_name("nvidia_presets.yaml").read_text(encoding="utf-8"))
_OF_PLATFORM = ("workers", "prefetch", "gpu_affinity", "save_checkpoints")
_OTHERS = {
    "classify.py": "labels images: use `paceline predict`",
    "quant_main.py": "trains for quantised numbers, which is unsupported",
}
_PADDING = 32  # pixels that evaluation cuts off
_FALLS = (30, 60, 80)  # epochs of main.py's `step`


def read_nvidia(words: Sequence[str]) -> tuple[Source, Table, dict[str, Any]]:
    """Read what the user gave: a file with a command, or a command.

    Returns:
        Where it came from, the options that its program has, and their values, a preset's among them.

    Raises:
        RecipeError: If it is neither, starts another of their programs, or has what the program does not know.
    """
    source = read_source(words, ("main.py", "launch.py", *_OTHERS))
    if source.script in _OTHERS:
        raise RecipeError(f"{source.script} {_OTHERS[source.script]}; main.py and launch.py train.")
    if source.tree is not None:
        raise RecipeError(f"{source.title} has no command; give one that starts main.py or launch.py.")
    if source.script != "launch.py" and not any(word.partition("=")[0] == "--platform" for word in source.words):
        return source, MAIN, MAIN.read_words(source.words)
    given = LAUNCH.read_words(source.words)
    missing = [f"--{key}" for key in _PRESET_KEYS if key not in given]
    if missing:
        raise RecipeError(f"launch.py needs {' and '.join(missing)} too, to find its preset.")
    found = preset(*(given[key] for key in _PRESET_KEYS))
    return source, LAUNCH, MAIN.read_tree(found, _OF_PLATFORM) | given


def preset(name: str, platform: str, precision: str, mode: str) -> dict[str, Any]:
    """The options that launch.py sets for a model on a platform, by their keys.

    Raises:
        RecipeError: If there is no such preset; names those that there are.
    """
    model, later = _named("model", name, PRESETS["models"]), _named("mode", mode, PRESETS["modes"])
    sizes = _named("precision", precision, _named("platform", platform, PRESETS["sizes"][model["sizes"]]))
    micro, batch = sizes
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
        raise RecipeError(f"there is no preset for --{option} {name} here.{hint} It is {', '.join(presets)}.")
    return presets[name]


def convert_nvidia(
    source: Source, table: Table, given: Mapping[str, Any], *, processes: int | None, skipped: Iterable[str]
) -> Conversion:
    """Convert what was read.

    Args:
        source: Where it came from.
        table: The options of its program.
        given: Their values.
        processes: Number of processes, where the command does not say, or in its place.
        skipped: Names of options to leave out.

    Raises:
        RecipeError: If the converted options are not a valid recipe.
    """
    more = "the global batch is larger, or has fewer passes a process"
    draft = Conversion(table, source.title, given, skipped, processes=processes or source.processes, more=more)
    micro_batches = _put_batch(draft)
    draft.convert(
        {
            "epochs": lambda value: f"{value} epoch{'s' * (value != 1)}",
            "steps": lambda value: f"{max(1, round(value / micro_batches))} steps",
            "complement": lambda value: float(f"{1 - value:.10g}"),
        }
    )
    if draft["data_backend"] != "synthetic":
        draft.put("data.dataset", "image_folder", *(["data"] if draft["data"] else []))
        if not draft["data"]:
            draft.notices.append("the folder of the images is not given: add data.path")
    size = draft.flat.setdefault("data.image_size", 224)
    crop = float(f"{size / (size + _PADDING):.16g}")
    draft.put("data.evaluation_crop", crop, note=f"{size} of {size + _PADDING} pixels")
    draft.put("data.augment.crop", "random_resized", note="as its loaders do")
    draft.put("data.augment.flip", 0.5, note="as its loaders do")
    _put_training(draft, micro_batches)
    if table is LAUNCH and draft["precision"] == "TF32":
        draft.differ("precision", "set train.float32_matmul=high to multiply fp32 numbers in TF32, where a GPU can")
    return draft.finish()


def _put_batch(draft: Conversion) -> int:
    """Set the global batch; returns the micro-batches of a process in a step."""
    micro, asked, processes = draft["batch_size"], draft["optimizer_batch_size"], draft.processes
    share = processes_text(processes)
    micro_batches = 1 if asked < 0 else asked // (micro * processes)
    if micro_batches < 1:
        draft.refuse("optimizer_batch_size", f"smaller than {share} of {micro} samples")
        micro_batches = 1
    total = micro * processes * micro_batches
    if asked > 0 and total != asked:
        draft.differ("optimizer_batch_size", f"{share} of {micro} samples make {total} in whole passes, as in main.py")
    draft.put("batch.global_size", total, "optimizer_batch_size", "batch_size", note=share)
    return micro_batches


def _put_training(draft: Conversion, micro_batches: int) -> None:
    if not draft["bn_weight_decay"]:
        draft.differ("bn_weight_decay", "biases do not decay; in main.py, those outside of norms do")
    falls = [f"{fall} epochs" for fall in _FALLS if fall < draft["epochs"]]
    if draft["lr_schedule"] == "step" and falls:
        draft.put("schedule.milestones", falls, "lr_schedule", note="as in main.py")
        draft.put("schedule.gamma", 0.1, "lr_schedule")
    elif draft["lr_schedule"] == "step":
        draft.put("schedule.name", "constant", "lr_schedule", note="the run ends before the first fall")
    if draft["warmup"] > draft["epochs"]:
        draft.put_ending(draft.flat["train.duration"], draft.flat["schedule.warmup"], "warmup")
    if draft["use_ema"] is not None:
        decay = float(f"{draft['use_ema'] ** micro_batches:.12g}")
        note = f"per step: main.py averages after each of {micro_batches} passes" if micro_batches > 1 else ""
        draft.put("train.ema", decay, "use_ema", note=note)
    if draft["prof"] > 0:
        draft.put("train.until", f"{math.ceil(draft['prof'] / micro_batches)} steps", "prof")
    elif draft["run_epochs"] > 0:
        draft.put("train.until", f"{draft['run_epochs']} epochs", "run_epochs")
