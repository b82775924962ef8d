"""Recipes from command lines of timm's train.py.

What train.py does where an option is not given counts as well: its defaults are not ours, so the recipe states them.
What changes speed, place or records only is stated where it was given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.recipe.imports.command import Source, read_source
from paceline.recipe.imports.draft import Conversion, processes_text
from paceline.recipe.imports.table import NONE, Table, read_yaml

TIMM = Table("timm's train.py", "timm.yaml")
# What args.yaml files hold beside options: what train.py worked out and kept there.
WRITTEN_BESIDE = ("distributed", "world_size", "rank", "prefetcher", "gpu", "opt_args", "local-rank", "cuda")
_INTERPOLATIONS = ("bilinear", "bicubic")
_DATASETS = {"": "image_folder", "image_folder": "image_folder", "folder": "image_folder", "cifar10": "cifar10"}
_DATASETS |= {"hfds": "huggingface", "wds": "webdataset"}
_WITH_MOMENTUM = ("sgd", "rmsprop", "lars", "muon")
_OPT_KWARGS = {"trust_coeff": "trust_coefficient"} | {name: name for name in ("alpha", "nesterov", "eps", "betas")}
_OWN_CLIP = 1.0  # timm's LAMB clips the whole gradient to this norm by itself
_LONGEST = 20  # cycles of a schedule, and the factor on the length of each
_MILESTONES = 1000  # falls of a schedule


@dataclass(frozen=True)
class InputSettings:
    """What a network of timm's says of its images, which train.py goes by; by default what it does without.

    Attributes:
        image_size: Height and width in pixels.
        interpolation: How images are resized.
        crop: Share of the side that evaluation keeps.
        mean: Per-channel mean.
        std: Per-channel standard deviation.
    """

    image_size: int = 224
    interpolation: str = "bicubic"
    crop: float = 0.875
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)


def read_timm(words: Sequence[str]) -> tuple[Source, dict[str, Any]]:
    """Read what the user gave: a file of arguments, a file with a command, or a command.

    Raises:
        RecipeError: If it is none of these, or has what train.py does not know.
    """
    scripts = ("train.py", "legacy_train.py")
    source = read_source(words, scripts, ("distributed_train.sh", "legacy_distributed_train.sh"))
    if source.tree is not None:
        return source, TIMM.read_tree(source.tree, WRITTEN_BESIDE)
    given = TIMM.read_words(source.words)
    below = TIMM.read_tree(read_yaml(Path(given["config"]), "--config"), WRITTEN_BESIDE) if given.get("config") else {}
    return source, below | given


def convert_timm(
    source: Source,
    given: Mapping[str, Any],
    settings: InputSettings,
    *,
    processes: int | None = None,
    skipped: Iterable[str] = (),
) -> Conversion:
    """Convert what was read.

    Args:
        source: Where it came from.
        given: The options.
        settings: What the network says of its images.
        processes: Number of processes, where the source does not say, or in its place.
        skipped: Names of options to leave out.

    Raises:
        RecipeError: If the converted options are not a valid recipe.
    """
    more = "the global batch, and with --lr-base the learning rate, are larger"
    draft = Conversion(TIMM, source.title, given, skipped, processes=processes or source.processes, more=more)
    if not draft["interpolation"] and settings.interpolation not in _INTERPOLATIONS:
        draft.differ("interpolation", f"bicubic instead of {settings.interpolation}")
        settings = replace(settings, interpolation="bicubic")
    conversions: dict[str, Callable[[Any], Any]] = {
        "epochs": lambda value: _epochs(draft, value),
        "steps": lambda value: f"{max(1, round(value / draft['grad_accum_steps']))} steps",
        "channels": lambda value: list(value) * (3 if len(value) == 1 else 1),
    }
    draft.convert(conversions, vars(settings) | {"mean": list(settings.mean), "std": list(settings.std)})
    batch = draft["batch_size"] * draft.processes * draft["grad_accum_steps"]
    draft.put("batch.global_size", batch, "batch_size", "grad_accum_steps", note=processes_text(draft.processes))
    for name, value in draft["model_kwargs"].items():
        draft.put(f"model.options.{name}", value, "model_kwargs")
    _put_source(draft)
    if draft["input_size"]:
        channels, *sides = draft["input_size"]
        if channels not in (1, 3) or len(sides) != 2 or sides[0] != sides[1]:
            draft.refuse("input_size", "images have 1 or 3 channels and are square: the same number twice")
        else:
            draft.put("data.channels", channels, "input_size")
            draft.put("data.image_size", sides[0], "input_size")
    if draft["no_aug"]:
        if (crop := draft["crop_pct"] or settings.crop) != 1:
            draft.differ("no_aug", f"training images are cropped to {crop:g} of their side, as in evaluation")
    else:
        _put_augmentation(draft)
    _put_mixing(draft)
    _put_optimizer(draft, batch)
    _put_schedule(draft)
    _put_training(draft)
    return draft.finish()


def _epochs(draft: Conversion, count: float) -> str:
    """A number of train.py's epochs, each of which shows part of the samples `--aug-repeats` times, in epochs here."""
    number = count / _repeats(draft)
    return f"{number:.10g} epoch{'s' * (number != 1)}"


def _repeats(draft: Conversion) -> int:
    return max(1, int(draft["aug_repeats"]))


def _put_source(draft: Conversion) -> None:
    kind, _, name = str(draft["dataset"] or "").partition("/")
    ours = _DATASETS.get((name if kind == "torch" else kind).lower())
    draft.put("data.dataset", ours or "image_folder", *(["dataset"] if draft["dataset"] else []))
    path_key = "data_dir" if draft["data_dir"] else "data"
    path = draft[path_key]
    if ours is None:
        draft.refuse("dataset", "use image_folder, cifar10, webdataset, huggingface or your own data set")
    elif ours == "huggingface":
        draft.differ("dataset", "data.path must hold it, as `save_to_disk` writes it or as parquet")
        path = path or name
        if draft["target_key"]:
            draft.put("data.label_column", draft["target_key"], "target_key")
    if path:
        draft.put("data.path", path, path_key)
    else:
        draft.notices.append("the folder of the images is not given: add data.path")
    if draft.given.get("val_split") == "validation":
        draft.differ("val_split", "rename the folder PATH/validation to PATH/val")
    if draft["val_split"]:
        draft.put("evaluate.every", _epochs(draft, draft["val_interval"]), "val_interval")
    repeats = draft["aug_repeats"]
    if repeats and repeats != int(repeats):
        draft.refuse("aug_repeats", "data.augment.repeats is a whole number")
    if _repeats(draft) > 1:
        how = "an epoch shows this many views of every sample: lengths in epochs are divided by it"
        draft.put("data.augment.repeats", _repeats(draft), "aug_repeats", note=how)


def _put_augmentation(draft: Conversion) -> None:
    ours = draft.flat.get("data.interpolation")
    training = draft["train_interpolation"] or ours
    if training == ours:
        draft.put("data.interpolation", ours, "interpolation", "train_interpolation")
    elif training in (*_INTERPOLATIONS, "random"):
        how = "drawn for each image" if training == "random" else training
        draft.differ("train_interpolation", f"training images are resized {ours} too; in train.py, {how}")
    else:
        draft.refuse("train_interpolation", "images are resized bilinear or bicubic")
    strengths = list(draft["color_jitter"] or [])
    if draft["aa"]:
        draft.put("data.augment.policy", "timm", "aa")
        draft.put("data.augment.policy_options", {"config": str(draft["aa"])}, "aa")
    elif len(strengths) not in (0, 1, 3, 4):
        draft.refuse("color_jitter", "it is one strength, or those of brightness, contrast, saturation and hue")
    elif any(strengths):
        strengths *= 3 if len(strengths) == 1 else 1
        for name, strength in zip(("brightness", "contrast", "saturation", "hue"), strengths, strict=False):
            draft.put(f"data.augment.jitter.{name}", strength, "color_jitter")
        if draft["color_jitter_prob"] is not None:
            draft.put("data.augment.jitter.probability", draft["color_jitter_prob"], "color_jitter_prob")
    if draft["reprob"]:
        draft.put("data.augment.erase", draft["reprob"], "reprob")
        draft.put("data.augment.erase_scale", [0.02, 1 / 3], note="as timm erases")
        draft.put("data.augment.erase_ratio", [0.3, 10 / 3], note="as timm erases")
        draft.put("data.augment.erase_with", {"rand": "color", "pixel": "noise"}.get(draft["remode"], "mean"), "remode")
        draft.put("data.augment.erase_count", draft["recount"], "recount")


def _put_mixing(draft: Conversion) -> None:
    is_mixed = draft["mixup"] > 0 or draft["cutmix"] > 0
    if is_mixed:
        last, repeats = draft["mixup_off_epoch"], _repeats(draft)
        if last and last % repeats:
            draft.refuse("mixup_off_epoch", f"data.mix.epochs is whole, and an epoch here is {repeats} of train.py's")
        elif last and last < draft["epochs"]:
            draft.put("data.mix.epochs", last // repeats, "mixup_off_epoch")
    # train.py looks at --bce-loss only where targets are mixed or smoothed.
    is_bce = draft["bce_loss"] and (is_mixed or draft["smoothing"])
    draft.put("train.loss", "bce" if is_bce else "cross_entropy", "bce_loss")
    if is_bce and draft["bce_target_thresh"] is not None:
        draft.put("train.target_threshold", draft["bce_target_thresh"], "bce_target_thresh")


def _put_optimizer(draft: Conversion, batch: int) -> None:
    rule = draft.flat.get("optimizer.name", "")
    if str(draft["opt"]).lower() == "adam" and draft["weight_decay"]:
        draft.refuse("opt", "adam decays through its gradient; supported: adamw, or adam without --weight-decay")
    if draft["lr"]:
        draft.put("optimizer.lr", draft["lr"], "lr")
    else:
        ratio = batch / draft["lr_base_size"]
        by_root = any(part in str(draft["opt"]).lower() for part in ("ada", "lamb"))
        if draft["lr_base_scale"] == "sqrt" or (not draft["lr_base_scale"] and by_root):
            ratio **= 0.5
        rate = float(f"{draft['lr_base'] * ratio:.12g}")
        sources = ("lr_base", "lr_base_size", "lr_base_scale")
        draft.put("optimizer.lr", rate, *sources, note=f"for {batch} samples a step")
    draft.put("optimizer.decay_norm_and_bias", value=False, note="as train.py leaves out biases and norms")
    if rule in _WITH_MOMENTUM:
        draft.put("optimizer.momentum", draft["momentum"], "momentum")
    for key in ("eps", "betas"):
        value = draft[f"opt_{key}"]
        if value not in NONE and f"optimizer.{key}" not in draft.flat:
            draft.refuse(f"opt_{key}", f"{rule or draft['opt']} has no {key}")
        elif value not in NONE:
            draft.put(f"optimizer.{key}", value, f"opt_{key}")
    own_clip = _OWN_CLIP if rule == "lamb" else None
    for name, value in draft["opt_kwargs"].items():
        if name == "max_grad_norm":
            own_clip = value if rule == "lamb" else None
        else:
            draft.put(f"optimizer.{_OPT_KWARGS.get(name, f'options.{name}')}", value, "opt_kwargs")
    _put_clipping(draft, own_clip)


def _put_clipping(draft: Conversion, own: float | None) -> None:
    """Clip as --clip-grad says, and as timm's LAMB does by itself: to a norm of ``own``."""
    asked, mode = draft["clip_grad"], draft["clip_mode"]
    if not asked:
        if own:
            sources = ["opt_kwargs"] if own != _OWN_CLIP else []
            draft.put("optimizer.clip_norm", own, *sources, note="of timm's LAMB")
        return
    key = {"norm": "clip_norm", "value": "clip_value", "agc": "clip_adaptive"}.get(mode)
    if key is None:
        draft.refuse("clip_mode", "supported: norm, value, agc")
        return
    if own and mode != "norm":
        draft.differ("clip_mode", f"timm's LAMB also clips the whole gradient to a norm of {own:g}")
    draft.put(f"optimizer.{key}", min(asked, own) if own and mode == "norm" else asked, "clip_grad", "clip_mode")


def _put_schedule(draft: Conversion) -> None:
    name = str(draft["sched"]).lower()
    if name in ("step", "multistep"):
        _put_falls(draft, name)
    elif name in ("", "none"):
        draft.put("train.duration", _epochs(draft, draft["epochs"]), "epochs")
    else:
        _put_cycles(draft)
    _put_warmup(draft)


def _put_warmup(draft: Conversion) -> None:
    length, first, peak = draft["warmup_epochs"], draft["warmup_lr"], draft.flat["optimizer.lr"]
    if not length:
        return
    draft.put("schedule.warmup", _epochs(draft, length), "warmup_epochs")
    if not draft["warmup_prefix"] and length > draft["epochs"]:
        draft.put_ending(draft.flat["train.duration"], draft.flat["schedule.warmup"], "warmup_epochs")
    if first > peak:
        key = "warmup_lr" if "warmup_lr" in draft.given else "warmup_epochs"
        draft.refuse(key, f"{first:g} is above the peak {peak:g}")
    else:
        draft.put("schedule.warmup_from", float(f"{first / peak:.12g}"), "warmup_lr", note=f"of the peak {peak:g}")
    if not draft["sched_on_updates"]:
        draft.differ("sched_on_updates", "the rate moves with every step here; in train.py, at the end of each epoch")


def _put_cycles(draft: Conversion) -> None:
    """The run's length, and the restarts of a cosine."""
    cycles, factor, length = draft["lr_cycle_limit"], draft["lr_cycle_mul"], draft["epochs"]
    warmup = draft["warmup_epochs"]
    sources, lasts = ["epochs"], length
    if cycles > 1:
        if draft["lr_cycle_decay"] != 1:
            draft.refuse("lr_cycle_limit", f"each cycle's peak falls by {draft['lr_cycle_decay']:g} (--lr-cycle-decay)")
        elif str(draft["sched"]).lower() == "poly":
            draft.refuse("lr_cycle_limit", "a polynomial has no restarts")
        elif not (1 <= factor <= _LONGEST and cycles <= _LONGEST):
            draft.refuse("lr_cycle_limit", f"cycles and the factor on their length are at most {_LONGEST}")
        else:
            lasts = int(length * cycles) if factor == 1 else int(length * (factor**cycles - 1) / (factor - 1))
        sources += ["lr_cycle_limit", "lr_cycle_mul", "lr_cycle_decay"]
        draft.put("schedule.period", _epochs(draft, length), "epochs")
        draft.put("schedule.period_factor", factor, "lr_cycle_mul")
    if draft["warmup_prefix"] and warmup:
        lasts += warmup
        sources += ["warmup_prefix", "warmup_epochs"]
    elif warmup:
        done = min(warmup / length, 1.0)
        draft.differ("warmup_prefix", f"the fall begins at the peak; in train.py, {done:.2%} of it is over by then")
    draft.put("train.duration", _epochs(draft, lasts), *sources)


def _put_falls(draft: Conversion, name: str) -> None:
    """The falls of `step`, a period apart, or of `multistep`, at milestones."""
    warmup = draft["warmup_epochs"]
    begin = warmup if draft["warmup_prefix"] else 0
    lasts = draft["epochs"] + begin
    draft.put("train.duration", _epochs(draft, lasts), "epochs", *(["warmup_prefix"] if begin else []))
    every, by_step = draft["decay_epochs"], draft["sched_on_updates"]
    if name == "step" and every <= 0:
        draft.refuse("decay_epochs", "a period is above 0")
        return
    if name == "step" and (begin or not warmup) and (by_step or float(every).is_integer()):
        draft.put("schedule.period", _epochs(draft, every), "decay_epochs")
        draft.put("schedule.gamma", draft["decay_rate"], "decay_rate")
        return
    if name == "step":
        # train.py counts its falls from the start, and moves the rate where an epoch ends.
        source, note = "decay_epochs", "where each fall is in effect, counted from the start"
        ends = [begin + every * number for number in range(1, min(_MILESTONES, math.floor(lasts / every)) + 1)]
        falls = ends if by_step else [math.ceil(end - 1e-9) for end in ends]
    else:
        # timm's falls come one epoch, or one update, before the milestone.
        source, note = "decay_milestones", "" if by_step else "timm falls an epoch before"
        falls = [begin + end - (not by_step) for end in draft["decay_milestones"]]
    within = [_epochs(draft, fall) for fall in falls if 0 < fall < lasts]
    if not within and name == "multistep":
        draft.put("schedule.name", "constant", "sched", note="no milestone is reached")
        return
    draft.put("schedule.milestones", within, source, note=note)
    draft.put("schedule.gamma", draft["decay_rate"], "decay_rate")


def _put_training(draft: Conversion) -> None:
    if draft.flat.get("train.precision") == "fp32":
        draft.differ("amp", "train.py multiplies fp32 numbers in TF32 on GPUs; train.float32_matmul=high does so here")
    if draft.processes > 1 and draft["dist_bn"] != "broadcast":
        draft.differ("dist_bn", "the first process's BatchNorm statistics are evaluated and saved, not their mean")
