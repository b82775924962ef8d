"""How does a command line of NVIDIA's ConvNets trainer, or a preset of its launch.py, become a recipe?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import RecipeError
from paceline.recipe.imports.command import Source, read_source
from paceline.recipe.imports.draft import Conversion, Draft, check_skipped
from paceline.recipe.imports.nvidia_options import LAUNCH, MAIN
from paceline.recipe.imports.nvidia_presets import own_preset, preset
from paceline.recipe.imports.options import Given, Table

_TRAINING = ("main.py", "launch.py")
_OTHERS = {
    "classify.py": "labels images: `paceline predict`",
    "quant_main.py": "trains for quantised numbers, which is not here",
}
_ARCHITECTURES = {
    "resnet50": "resnet50",
    "resnext101-32x4d": "resnext101_32x4d",
    "se-resnext101-32x4d": "seresnext101_32x4d",
    "efficientnet-b0": "efficientnet_b0",
    "efficientnet-b4": "efficientnet_b4",
}
# The parts of a block that are dropped at random, and dropout, of its EfficientNets.
_DROPOUT, _SURVIVAL = {"b0": 0.2, "b4": 0.4}, {"b0": 1.0, "b4": 0.8}
_SIZES = {"efficientnet-b0": 224, "efficientnet-b4": 380}
_PADDING = 32  # pixels that evaluation cuts off
_FALLS = (30, 60, 80)
_GROWTH_INTERVAL = 100
_ASKED = ("model", "platform", "precision", "mode")
_AFFINITIES = {
    "none": "none",
    "socket": "socket",
    "socket_single": "single",
    "socket_single_unique": "single_unique",
    "socket_unique_interleaved": "interleaved",
    "socket_unique_contiguous": "contiguous",
}


@dataclass(frozen=True)
class NvidiaCommand:
    """A command, read.

    Attributes:
        source: Where it came from.
        table: The options that its program has.
        given: Their values, a preset's among them.
    """

    source: Source
    table: Table
    given: Given


def read_nvidia(words: Sequence[str]) -> NvidiaCommand:
    """Read what the user gave: a file with a command, or a command.

    Raises:
        RecipeError: If it is neither, starts another of their programs, or has what the program does not know.
    """
    source = read_source(words, (*_TRAINING, *_OTHERS))
    if source.script in _OTHERS:
        raise RecipeError(f"{source.script} {_OTHERS[source.script]}; main.py and launch.py train.")
    if source.tree is not None:
        raise RecipeError(
            f"{source.title} has no command; NVIDIA's trainer is started by one, of main.py or launch.py."
        )
    table = LAUNCH if source.script == "launch.py" or _asks_for_preset(source.words) else MAIN
    given = table.read_words(source.words)
    if table is LAUNCH:
        given = _with_preset(source, given)
    return NvidiaCommand(source, table, given)


def _asks_for_preset(words: Sequence[str]) -> bool:
    return any(word.partition("=")[0] == "--platform" for word in words)


def _with_preset(source: Source, given: Given) -> Given:
    missing = [f"--{key}" for key in _ASKED if given.values[key] is None]
    if missing:
        raise RecipeError(f"launch.py needs {' and '.join(missing)} too, to find its preset.")
    asked = [str(given.values[key]) for key in ("model", "platform", "precision", "mode")]
    file = given.values["cfg_file"]
    found = preset(*asked) if file is None else own_preset(Path(file), *asked)
    below = MAIN.read_tree(found, _OF_PLATFORM)
    return LAUNCH.read_words(source.words, {key: below.values[key] for key in below.given})


_OF_PLATFORM = ("workers", "prefetch", "gpu_affinity", "save_checkpoints")


def convert_nvidia(command: NvidiaCommand, *, processes: int | None = None, skipped: Iterable[str] = ()) -> Conversion:
    """Convert what was read.

    Args:
        command: The command.
        processes: How many processes train, where the command does not say so, or in its place.
        skipped: Names of options to leave out.

    Raises:
        RecipeError: If what the options come to is no recipe.
    """
    draft = Draft(command.table, command.given, check_skipped(command.table, skipped))
    draft.check_least({"batch_size": 1, "epochs": 1, "warmup": 0, "print_freq": 1})
    count = processes or command.source.processes
    if count is None:
        draft.assume_one_process("the global batch is larger, or has fewer passes a process")
    count = count or 1
    if command.table is LAUNCH:
        for key in ("model", "mode", "precision", "platform"):
            draft.use(key, "chooses the preset")
    if draft["seed"] is not None:
        draft.put("seed", draft["seed"], "seed")
    _put_model(draft)
    micro_batches = _put_batch(draft, count)
    _put_data(draft)
    _put_optimizer(draft)
    _put_schedule(draft)
    _put_training(draft, micro_batches)
    _put_evaluation(draft, micro_batches)
    if command.table is LAUNCH and draft["precision"] == "TF32":
        draft.nearly(
            "precision", "train.float32_matmul=high multiplies fp32 numbers in TF32; it is refused where none is"
        )
    return draft.finish(command.source.title, count)


def _put_model(draft: Draft) -> None:
    arch = draft["arch"]
    name = _ARCHITECTURES.get(arch)
    if name is None:
        draft.refuse("arch", f"timm has no such network; it is {', '.join(_ARCHITECTURES)}")
        name = "resnet50"
    draft.put("model.name", name, "arch")
    if name.startswith("efficientnet"):
        _put_efficientnet(draft, arch.rpartition("-")[2])
    else:
        zero = str(draft["last_bn_0_init"] or False).lower() == "true"
        draft.option("last_bn_0_init", "zero_init_last", zero)
    draft.nearly("arch", "the network is timm's: convolutions and the classifier begin with its first weights")
    if draft["pretrained"]:
        draft.switch("model.pretrained", "pretrained")
        draft.nearly("pretrained", "timm's weights, and not NVIDIA's")
    if draft["pretrained_from_file"]:
        draft.put("model.initialize_from", draft["pretrained_from_file"], "pretrained_from_file")
        says = "a safetensors file, a run or a checkpoint of Paceline's: no file is opened that could run code"
        draft.nearly("pretrained_from_file", says)
    if draft["conv_init"] == "fan_in":
        draft.idle("conv_init", "the network's own first weights are nearly those")
    draft.put_given("model.channels_last", draft["memory_format"] == "nhwc", "memory_format")


def _put_efficientnet(draft: Draft, size: str) -> None:
    dropout = _DROPOUT[size] if draft["dropout"] is None else draft["dropout"]
    survival = _SURVIVAL[size] if draft["survival_prob"] is None else draft["survival_prob"]
    draft.option("dropout", "drop_rate", dropout)
    draft.option("survival_prob", "drop_path_rate", float(f"{1 - survival:.10g}"), note="one minus it")
    draft.option("bn_momentum", "bn_momentum", 0.01 if draft["bn_momentum"] is None else draft["bn_momentum"])
    draft.option("bn_epsilon", "bn_eps", 1e-3 if draft["bn_epsilon"] is None else draft["bn_epsilon"])


def _put_batch(draft: Draft, processes: int) -> int:
    """Returns the micro-batches of a process in a step."""
    micro, asked = draft["batch_size"], draft["optimizer_batch_size"]
    together = micro * processes
    share = f"{processes} process{'es' * (processes > 1)}"
    micro_batches = 1 if asked < 0 else asked // together
    if micro_batches < 1:
        draft.refuse("optimizer_batch_size", f"{share} of {micro} samples are more; it cannot be reached")
        micro_batches = 1
    total = together * micro_batches
    if asked > 0 and total != asked:
        draft.nearly("optimizer_batch_size", f"{share} of {micro} samples make {total}, in whole passes, there as here")
    draft.put("batch.global_size", total, "optimizer_batch_size", "batch_size", note=share)
    draft.put("batch.micro_size", micro, "batch_size")
    return micro_batches


def _put_data(draft: Draft) -> None:
    size = draft["image_size"] or _SIZES.get(draft["arch"], 224)
    if draft["data_backend"] == "synthetic":
        draft.put("data.dataset", "synthetic", "data_backend")
        draft.idle("data", "nothing is read")
    else:
        draft.put("data.dataset", "image_folder", *(["data"] if draft["data"] else []))
        if draft["data"]:
            draft.put("data.path", draft["data"], "data")
        else:
            draft.notices.append("it is not said where the images are: add data.path")
        _put_backend(draft)
    draft.put_given("data.workers", draft["workers"], "workers")
    draft.put_given("data.prefetch", draft["prefetch"], "prefetch")
    draft.put("data.image_size", size, "image_size")
    draft.put(
        "data.evaluation_crop", float(f"{size / (size + _PADDING):.16g}"), note=f"{size} of {size + _PADDING} pixels"
    )
    if draft["interpolation"] in ("bilinear", "bicubic"):
        draft.put("data.interpolation", draft["interpolation"], "interpolation")
    else:
        draft.refuse("interpolation", "images are resized bilinear or bicubic here")
    draft.put("data.augment.crop", "random_resized", note="as its loaders do")
    draft.put("data.augment.flip", 0.5, note="as its loaders do")
    if draft["augmentation"] == "autoaugment":
        draft.put("data.augment.policy", "autoaugment", "augmentation")
        draft.put("data.augment.learned_on", "imagenet", "augmentation")
    if draft["mixup"]:
        draft.put("data.mix.mixup", draft["mixup"], "mixup")
    draft.idle("mixup", "0 is off")


def _put_backend(draft: Draft) -> None:
    kind, _, place = str(draft["data_backend"]).partition("-")
    if kind not in ("pytorch", "dali"):
        draft.refuse("data_backend", "it is pytorch, dali-gpu, dali-cpu or synthetic")
    elif kind == "pytorch":
        draft.use("data_backend", "data.backend=auto, which is pytorch for files of images")
    elif draft.is_given("data_backend"):
        draft.put("data.backend", "dali", "data_backend")
        draft.put("data.decode_on", place, "data_backend")


def _put_optimizer(draft: Draft) -> None:
    name = draft["optimizer"]
    if name not in ("sgd", "rmsprop"):
        draft.refuse("optimizer", "it is sgd or rmsprop")
        name = "sgd"
    draft.put("optimizer.name", name, "optimizer")
    draft.put("optimizer.lr", draft["lr"], "lr")
    draft.put("optimizer.momentum", draft["momentum"], "momentum")
    if name == "sgd":
        draft.switch("optimizer.nesterov", "nesterov", on=draft["nesterov"])
        draft.idle("rmsprop_alpha", "the optimizer is sgd")
        draft.idle("rmsprop_eps", "the optimizer is sgd")
    else:
        draft.put("optimizer.alpha", draft["rmsprop_alpha"], "rmsprop_alpha")
        draft.put("optimizer.eps", draft["rmsprop_eps"], "rmsprop_eps")
        draft.idle("nesterov", "the optimizer is rmsprop")
    draft.put("optimizer.weight_decay", draft["weight_decay"], "weight_decay")
    draft.switch("optimizer.decay_norm_and_bias", "bn_weight_decay", on=draft["bn_weight_decay"])
    if not draft["bn_weight_decay"]:
        draft.nearly("bn_weight_decay", "biases do not decay either here; there, those outside of norms do")


def _put_schedule(draft: Draft) -> None:
    name, warmup = draft["lr_schedule"], draft["warmup"]
    if name not in ("step", "linear", "cosine"):
        draft.refuse("lr_schedule", "it is step, linear or cosine")
        name = "cosine"
    draft.put("schedule.name", name, "lr_schedule")
    if name == "step":
        falls = [f"{fall} epochs" for fall in _FALLS if fall < draft["epochs"]]
        if falls:
            draft.put("schedule.milestones", falls, "lr_schedule", note="as main.py has them")
            draft.put("schedule.gamma", 0.1, "lr_schedule")
        else:
            draft.put("schedule.name", "constant", "lr_schedule", note="the run ends before the first fall")
    if name == "cosine":
        draft.put("schedule.end_lr", draft["end_lr"], "end_lr")
    draft.idle("end_lr", "only --lr-schedule cosine looks at it")
    if warmup:
        draft.put("schedule.warmup", f"{warmup} epochs", "warmup")
    draft.idle("warmup", "there is none")
    draft.nearly("lr_schedule", "the rate moves with every step here; there, with every epoch")


def _put_training(draft: Draft, micro_batches: int) -> None:
    draft.put("train.duration", f"{draft['epochs']} epochs", "epochs")
    if draft["warmup"] > draft["epochs"]:
        draft.end_in_warmup(f"{draft['epochs']} epochs", f"{draft['warmup']} epochs")
        draft.put("train.until", f"{draft['epochs']} epochs", "epochs", note="the run ends while it warms up")
        draft.put("train.duration", f"{draft['warmup']} epochs", "warmup")
    if draft["amp"]:
        draft.put("train.precision", "fp16", "amp")
        draft.put("train.grad_scaler.init_scale", draft["static_loss_scale"], "static_loss_scale")
        draft.put("train.grad_scaler.growth_interval", _GROWTH_INTERVAL, note="as main.py has it")
    else:
        draft.put("train.precision", "fp32", "amp")
        draft.idle("static_loss_scale", "said for --amp")
    draft.put("train.label_smoothing", draft["label_smoothing"], "label_smoothing")
    if draft["use_ema"] is not None:
        decay = float(f"{draft['use_ema'] ** micro_batches:.12g}")
        note = f"of a step: there it is taken after each of {micro_batches} passes" if micro_batches > 1 else ""
        draft.put("train.ema", decay, "use_ema", note=note)
    if draft["prof"] > 0:
        steps = math.ceil(draft["prof"] / micro_batches)
        draft.put("train.until", f"{steps} steps", "prof")
        draft.idle("run_epochs", "--prof ends the run before")
    elif draft["run_epochs"] > 0:
        draft.put("train.until", f"{draft['run_epochs']} epochs", "run_epochs")
    for key in ("prof", "run_epochs"):
        draft.idle(key, "below 1 is off")


def _put_evaluation(draft: Draft, micro_batches: int) -> None:
    if draft["training_only"]:
        draft.put("evaluate.every", "off", "training_only")
    else:
        draft.put("evaluate.every", "1 epoch", note="as main.py does")
        draft.put_given("evaluate.top_k", draft["topk"], "topk")
        if draft["early_stopping_patience"] > 0:
            draft.put("evaluate.patience", draft["early_stopping_patience"], "early_stopping_patience")
    draft.idle("early_stopping_patience", "nothing is evaluated, or it is below 1")
    if draft["no_checkpoints"]:
        draft.put("checkpoint.every", "off", "no_checkpoints")
        draft.switch("checkpoint.keep_best", "no_checkpoints", on=False)
    else:
        draft.put("checkpoint.every", "1 epoch", note="as main.py does")
        if draft["gather_checkpoints"] > 0:
            draft.put("checkpoint.keep", draft["gather_checkpoints"], "gather_checkpoints")
    steps = max(1, round(draft["print_freq"] / micro_batches))
    draft.put_given("telemetry.log_every", f"{steps} steps", "print_freq")
    _put_affinity(draft)


def _put_affinity(draft: Draft) -> None:
    asked: Any = _AFFINITIES.get(draft["gpu_affinity"])
    if asked is None:
        draft.refuse("gpu_affinity", f"it is {', '.join(_AFFINITIES)}")
    else:
        draft.put_given("parallel.affinity", asked, "gpu_affinity")
