"""Recipes from command lines of timm's train.py.

Options that are not given count too: train.py's defaults differ from Paceline's, so the recipe states them. Options
that only affect speed, paths or records are stated only if given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.parsing.units import counted
from paceline_ops.imports.command import ConversionSource, read_source
from paceline_ops.imports.draft import Conversion
from paceline_ops.imports.table import OptionTable, read_yaml

TIMM = OptionTable("timm's train.py", "timm.yaml")
# Entries of args.yaml files other than options: values that train.py derived and stored there.
WRITTEN_BESIDE = ("distributed", "world_size", "rank", "prefetcher", "gpu", "opt_args", "local-rank", "cuda")
_INTERPOLATIONS = ("bilinear", "bicubic")
_DATASETS = {
    "": "image_folder",
    "image_folder": "image_folder",
    "folder": "image_folder",
    "cifar10": "cifar10",
    "hfds": "huggingface",
    "wds": "webdataset",
}
_OPT_KWARGS = {"trust_coeff": "trust_coefficient"} | {name: name for name in ("alpha", "nesterov", "eps", "betas")}
_CLIPS = {"norm": "clip_norm", "value": "clip_value", "agc": "clip_adaptive"}
_OWN_CLIP = 1.0  # timm's LAMB clips the complete gradient to this norm by itself
_MAX_CYCLES = 20  # cycles of a schedule, and the factor on each cycle's length
_MILESTONES = 1000  # decay steps of a schedule


@dataclass(frozen=True)
class InputSettings:
    """Image settings of a timm network, which train.py uses; the defaults apply without them.

    Attributes:
        image_size: Height and width in pixels.
        interpolation: How images are resized.
        crop: Fraction of the side that evaluation keeps.
        mean: Per-channel mean.
        std: Per-channel standard deviation.
    """

    image_size: int = 224
    interpolation: str = "bicubic"
    crop: float = 0.875
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)


def read_timm(words: Sequence[str]) -> tuple[ConversionSource, dict[str, Any]]:
    """Read what the user gave: a file of arguments, a file with a command, or a command.

    Raises:
        RecipeError: If it is none of these, or has options that train.py does not know.
    """
    scripts = ("train.py", "legacy_train.py")
    source = read_source(words, scripts, ("distributed_train.sh", "legacy_distributed_train.sh"))
    if source.tree is not None:
        return source, TIMM.read_tree(source.tree, WRITTEN_BESIDE)
    given = TIMM.read_words(source.words)
    below = TIMM.read_tree(read_yaml(Path(given["config"]), "--config"), WRITTEN_BESIDE) if given.get("config") else {}
    return source, below | given


def convert_timm(
    source: ConversionSource,
    given: Mapping[str, Any],
    settings: InputSettings,
    *,
    processes: int | None = None,
    skipped: Iterable[str] = (),
) -> Conversion:
    """Convert the options to a recipe.

    Args:
        source: The source of the conversion.
        given: The options.
        settings: The network's image settings.
        processes: Number of processes; overrides the source's.
        skipped: Names of options to leave out.

    Raises:
        RecipeError: If the converted options are not a valid recipe.
    """
    draft = Conversion(TIMM, source, given, skipped, processes)
    if not draft["interpolation"] and settings.interpolation not in _INTERPOLATIONS:
        draft.differ("interpolation", f"bicubic instead of {settings.interpolation}")
        settings = replace(settings, interpolation="bicubic")
    draft.convert(_CONVERSIONS, vars(settings) | {"mean": list(settings.mean), "std": list(settings.std)})
    draft.put("optimizer.decay_norm_and_bias", value=False, note="as train.py leaves out biases and norms")
    if draft["no_aug"] and (crop := draft.flat["data.evaluation_crop"]) != 1:
        draft.differ("no_aug", f"training images are cropped to {crop:g} of their side, as in evaluation")
    if draft.flat.get("train.precision") == "fp32":
        draft.differ("amp", "train.py multiplies fp32 numbers in TF32 on GPUs; train.float32_matmul=high does so here")
    if draft.processes > 1 and draft["dist_bn"] != "broadcast":
        draft.differ("dist_bn", "the first process's BatchNorm statistics are evaluated and saved, not their mean")
    return draft.finish()


def _epochs(draft: Conversion, count: float) -> str:
    """Convert train.py's epochs, each of which shows part of the samples `--aug-repeats` times, to Paceline's."""
    number = count / max(1, int(draft["aug_repeats"]))
    return f"{number:.10g} epoch{'s' * (number != 1)}"


def _dataset(draft: Conversion, value: str) -> Any:
    kind, _, name = value.partition("/")
    dataset = _DATASETS.get((name if kind == "torch" else kind).lower())
    if dataset is None:
        raise ValueError("use image_folder, cifar10, webdataset, huggingface or your own data set")
    if dataset == "huggingface":
        draft.differ("dataset", "data.path must hold it, as `save_to_disk` writes it or as parquet")
    return {"data.dataset": dataset} | ({"data.path": name} if dataset == "huggingface" and name else {})


def _image(draft: Conversion, size: Sequence[int]) -> Any:
    channels, *sides = size
    if channels not in (1, 3) or len(sides) != 2 or sides[0] != sides[1]:
        raise ValueError("images have 1 or 3 channels and are square: the same number twice")
    return {"data.channels": channels, "data.image_size": sides[0]}


def _batch(draft: Conversion, passes: int) -> Any:
    batch = draft["batch_size"] * draft.processes * passes
    draft.put("batch.global_size", batch, "batch_size", "grad_accum_steps", note=counted(draft.processes, "process"))
    return {}


def _repeats(draft: Conversion, value: float) -> Any:
    if value != int(value):
        raise ValueError("data.augment.repeats is a whole number")
    return int(value) if value > 1 else {}


def _resizing(draft: Conversion, training: str) -> Any:
    interpolation = draft.flat.get("data.interpolation")
    if training not in ("", interpolation):
        method = "drawn for each image" if training == "random" else training
        draft.differ("train_interpolation", f"training images are resized {interpolation} too; in train.py, {method}")
        return {}
    return interpolation


def _jitter(draft: Conversion, value: Sequence[float]) -> Any:
    if len(value) not in (0, 1, 3, 4):
        raise ValueError("it is one strength, or those of brightness, contrast, saturation and hue")
    strengths = list(value) * (3 if len(value) == 1 else 1)
    names = [f"data.augment.jitter.{name}" for name in ("brightness", "contrast", "saturation", "hue")]
    return dict(zip(names, strengths, strict=False)) if any(strengths) else {}


def _mixed_epochs(draft: Conversion, last: int) -> Any:
    repeats = draft.flat.get("data.augment.repeats", 1)
    if last % repeats:
        raise ValueError(f"data.mix.epochs is whole, and an epoch here is {repeats} of train.py's")
    return last // repeats if last < draft["epochs"] else {}


def _loss(draft: Conversion, is_enabled: bool) -> str:
    # train.py applies --bce-loss only if targets are mixed or smoothed.
    is_soft = draft["mixup"] > 0 or draft["cutmix"] > 0 or draft["smoothing"]
    return "bce" if is_enabled and is_soft else "cross_entropy"


def _optimizer(draft: Conversion, ours: dict[str, Any]) -> dict[str, Any]:
    if str(draft["opt"]).lower() == "adam" and draft["weight_decay"]:
        raise ValueError("adam decays through its gradient; supported: adamw, or adam without --weight-decay")
    return ours


def _rate(draft: Conversion, value: float | None) -> Any:
    if value:
        return value
    batch, scale = draft.flat["batch.global_size"], draft["lr_base_scale"]
    by_root = scale == "sqrt" or (not scale and any(part in str(draft["opt"]).lower() for part in ("ada", "lamb")))
    ratio = batch / draft["lr_base_size"]
    rate = float(f"{draft['lr_base'] * (ratio**0.5 if by_root else ratio):.12g}")
    draft.put("optimizer.lr", rate, *("lr_base", "lr_base_size", "lr_base_scale"), note=f"for {batch} samples a step")
    return {}


def _eps(draft: Conversion, value: float) -> float:
    if "optimizer.eps" not in draft.flat:
        raise ValueError(
            f"optimizer.name={draft.flat.get('optimizer.name', draft['opt'])} has no other eps than its own"
        )
    return value


def _clip(draft: Conversion, value: float | None) -> Any:
    is_lamb, mode = draft.flat.get("optimizer.name") == "lamb", draft["clip_mode"]
    own_limit = draft["opt_kwargs"].get("max_grad_norm", _OWN_CLIP) if is_lamb else None
    if not value:
        if own_limit:
            sources = ["opt_kwargs"] if own_limit != _OWN_CLIP else []
            draft.put("optimizer.clip_norm", own_limit, *sources, note="of timm's LAMB")
        return {}
    if own_limit and mode != "norm":
        draft.differ("clip_mode", f"timm's LAMB also clips the whole gradient to a norm of {own_limit:g}")
    limit = min(value, own_limit) if own_limit and mode == "norm" else value
    return {f"optimizer.{_CLIPS.get(mode, 'clip_norm')}": limit}


def _first_rate(draft: Conversion, first: float) -> Any:
    peak = draft.flat["optimizer.lr"]
    if first <= peak:
        return float(f"{first / peak:.12g}")
    # Neither may be given.
    option = next((key for key in ("warmup_lr", "warmup_epochs", "lr") if key in draft.given), "lr_base")
    draft.refuse(option, f"the warm-up begins at {first:g}, above the peak {peak:g}")
    return {}


def _cycles(draft: Conversion, count: int) -> Any:
    factor, decay = draft["lr_cycle_mul"], draft["lr_cycle_decay"]
    if count <= 1:
        return {}
    if decay != 1:
        raise ValueError(f"each cycle's peak falls by {decay:g} (--lr-cycle-decay)")
    if draft.flat["schedule.name"] == "polynomial":
        raise ValueError("a polynomial has no restarts")
    if not (1 <= factor <= _MAX_CYCLES and count <= _MAX_CYCLES):
        raise ValueError(f"cycles and the factor on their length are at most {_MAX_CYCLES}")
    return {"schedule.period": _epochs(draft, draft["epochs"]), "schedule.period_factor": factor}


def _noise(draft: Conversion, value: Sequence[float] | None) -> Any:
    start, end, *more = [*(value or [1.0]), 1.0]
    if more[1:] or not 0 <= start <= end:
        raise ValueError("it is the fraction of the epochs where noise begins, and the fraction where it ends")
    if start >= 1:
        return {}
    if draft["sched_on_updates"]:
        draft.differ("lr_noise", "the noise changes with each epoch here; in train.py, with each update")
    end_keys = {"schedule.noise.end": _epochs(draft, end * draft["epochs"])} if end < 1 else {}
    return {
        "schedule.noise.begin": _epochs(draft, start * draft["epochs"]),
        **end_keys,
        "schedule.noise.std": draft["lr_noise_std"],
        "schedule.noise.limit": draft["lr_noise_pct"],
    }


def _duration(draft: Conversion, length: int) -> Any:
    """Return the run's length, with its cycles and a warm-up before them, and the milestones of step schedules."""
    is_step, epochs = draft.flat.get("schedule.name") == "step", length
    warmup = draft["warmup_epochs"] if "schedule.warmup" in draft.flat else 0
    sources = ["epochs"]
    if factor := draft.flat.get("schedule.period_factor"):
        cycles = draft["lr_cycle_limit"]
        epochs = int(length * cycles) if factor == 1 else int(length * (factor**cycles - 1) / (factor - 1))
        sources += ["lr_cycle_limit", "lr_cycle_mul", "lr_cycle_decay"]
    start = warmup if draft["warmup_prefix"] else 0
    if start:
        sources += ["warmup_prefix", "warmup_epochs"]
    elif warmup and not is_step:
        progress = min(warmup / length, 1.0)
        draft.differ("warmup_prefix", f"the fall begins at the peak; in train.py, {progress:.2%} of it is over by then")
    draft.put("train.duration", _epochs(draft, epochs + start), *sources)
    if is_step:
        _put_milestones(draft, start, epochs + start)
    if not draft["sched_on_updates"] and (warmup or draft.flat.get("schedule.name") in ("cosine", "polynomial")):
        draft.differ("sched_on_updates", "the rate moves with every step here; in train.py, at the end of each epoch")
    if warmup > epochs + start:
        draft.put_ending(draft.flat["train.duration"], draft.flat["schedule.warmup"], "warmup_epochs")
    return {}


def _put_milestones(draft: Conversion, start: int, length: int) -> None:
    """Return the decay milestones of `step`, one per period, or of `multistep`; all after ``start`` epochs."""
    period, by_step = draft["decay_epochs"], draft["sched_on_updates"]
    if str(draft["sched"]).lower() == "multistep":
        # timm decays one epoch, or one update, before the milestone.
        source, note = "decay_milestones", "" if by_step else "timm falls an epoch before"
        milestones = [start + end - (not by_step) for end in draft["decay_milestones"]]
    elif period <= 0:
        draft.refuse("decay_epochs", "a period is above 0")
        return
    elif (start or "schedule.warmup" not in draft.flat) and (by_step or float(period).is_integer()):
        draft.put("schedule.period", _epochs(draft, period), "decay_epochs")
        return
    else:
        # train.py counts milestones from the start, and changes the rate at the end of an epoch.
        source, note = "decay_epochs", "where each fall is in effect, counted from the start"
        ends = [start + period * number for number in range(1, min(_MILESTONES, math.floor(length / period)) + 1)]
        milestones = ends if by_step else [math.ceil(end - 1e-9) for end in ends]
    if inside := [_epochs(draft, milestone) for milestone in milestones if 0 < milestone < length]:
        draft.put("schedule.milestones", inside, source, note=note)
        return
    draft.put("schedule.name", "constant", "sched", note="the run ends before the first fall")
    del draft.flat["schedule.gamma"]


_CONVERSIONS: dict[str, Callable[[Conversion, Any], Any]] = {
    "epochs": _epochs,
    "steps": lambda draft, value: f"{max(1, round(value / draft['grad_accum_steps']))} steps",
    "channels": lambda _, value: list(value) * (3 if len(value) == 1 else 1),
    "dataset": _dataset,
    "image": _image,
    "batch": _batch,
    "model_options": lambda _, value: {f"model.options.{name}": each for name, each in value.items()},
    "repeats": _repeats,
    "resizing": _resizing,
    "jitter": _jitter,
    "policy": lambda _, value: {"data.augment.policy": "timm", "data.augment.policy_options": {"config": str(value)}},
    "mixed_epochs": _mixed_epochs,
    "loss": _loss,
    "optimizer": _optimizer,
    "optimizer_options": lambda _, value: {
        f"optimizer.{_OPT_KWARGS.get(name, f'options.{name}')}": each
        for name, each in value.items()
        if name != "max_grad_norm"
    },
    "eps": _eps,
    "rate": _rate,
    "clip": _clip,
    "warmup": lambda draft, value: _epochs(draft, value) if value else {},
    "first_rate": _first_rate,
    "decay": lambda draft, value: {
        "schedule.power" if draft.flat["schedule.name"] == "polynomial" else "schedule.gamma": value
    },
    "cycles": _cycles,
    "noise": _noise,
    "duration": _duration,
}
