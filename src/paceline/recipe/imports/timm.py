"""How does a command line of timm's train.py become a recipe?

What train.py does where an option is not given counts as much as what is given: its defaults are not ours, so the
recipe states them. What changes speed, place or records alone is stated only where it was given.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from paceline.errors import RecipeError
from paceline.plain_yaml import BoundedLoader
from paceline.recipe.imports.command import Source, read_source
from paceline.recipe.imports.draft import Conversion, Draft, check_skipped
from paceline.recipe.imports.options import Given
from paceline.recipe.imports.timm_data import put_data
from paceline.recipe.imports.timm_options import TIMM, WRITTEN_BESIDE
from paceline.recipe.imports.timm_rates import put_optimizer, put_schedule

SCRIPTS = ("train.py", "legacy_train.py")
WRAPPERS = ("distributed_train.sh", "legacy_distributed_train.sh")
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_DEVICES = ("cpu", "cuda", "mps", "xpu")
_METRICS = {"top1": "top1_accuracy", "top5": "top5_accuracy", "loss": "loss"}


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
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD


def read_timm(words: Sequence[str]) -> tuple[Source, Given]:
    """Read what the user gave: a file of arguments, a file with a command, or a command.

    Raises:
        RecipeError: If it is none of these, or has what train.py does not know.
    """
    source = read_source(words, SCRIPTS, WRAPPERS)
    if source.tree is not None:
        return source, TIMM.read_tree(source.tree, WRITTEN_BESIDE)
    given = TIMM.read_words(source.words)
    if not given.values["config"]:
        return source, given
    below = TIMM.read_tree(_arguments(Path(given.values["config"])), WRITTEN_BESIDE)
    return source, TIMM.read_words(source.words, {key: below.values[key] for key in below.given})


def convert_timm(
    source: Source,
    given: Given,
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
        processes: How many processes train, where the source does not say so, or in its place.
        skipped: Names of options to leave out.

    Raises:
        RecipeError: If what the options come to is no recipe.
    """
    draft = Draft(TIMM, given, check_skipped(TIMM, skipped))
    count = processes or source.processes
    if count is None:
        draft.assume_one_process("the global batch, and with --lr-base the learning rate, are larger")
    count = count or 1
    draft.check_least({"batch_size": 1, "grad_accum_steps": 1, "epochs": 1, "lr_base_size": 1, "warmup_epochs": 0})
    batch = draft["batch_size"] * count * draft["grad_accum_steps"]
    draft.put("seed", draft["seed"], "seed")
    _put_model(draft)
    put_data(draft, settings)
    draft.put("batch.global_size", batch, "batch_size", "grad_accum_steps", note=f"{count} process{'es' * (count > 1)}")
    draft.put("batch.micro_size", draft["batch_size"], "batch_size")
    put_optimizer(draft, batch)
    put_schedule(draft)
    _put_training(draft, count)
    _put_running(draft)
    return draft.finish(source.title, count)


def _arguments(path: Path) -> Mapping[str, Any]:
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), Loader=BoundedLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RecipeError(f"--config {path}: not readable as YAML: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(tree, dict):
        raise RecipeError(f"--config {path}: found no names with values in it.")
    return tree


def _put_model(draft: Draft) -> None:
    draft.put("model.name", draft["model"], "model")
    if draft["pretrained"]:
        draft.switch("model.pretrained", "pretrained")
    _put_first_weights(draft)
    # train.py hands this over in any case, and a few networks have another default.
    draft.option("drop", "drop_rate", draft["drop"])
    names = {"drop_path": "drop_path_rate", "drop_block": "drop_block_rate", "gp": "global_pool"}
    names |= {"bn_momentum": "bn_momentum", "bn_eps": "bn_eps"}
    for key, name in names.items():
        if draft[key] is not None:
            draft.option(key, name, draft[key])
    if draft["drop_connect"] is not None:
        _put_drop_connect(draft)
    if draft["bn_tf"]:
        draft.option("bn_tf", "bn_momentum", 0.01)
        draft.option("bn_tf", "bn_eps", 1e-3)
    for name, value in (draft["model_kwargs"] or {}).items():
        draft.option("model_kwargs", name, value)
    if draft["channels_last"]:
        draft.switch("model.channels_last", "channels_last")
    if draft["grad_checkpointing"]:
        draft.put("model.activation_checkpointing", "full", "grad_checkpointing")
    _put_compile(draft)


def _put_first_weights(draft: Draft) -> None:
    for key in ("initial_checkpoint", "pretrained_path"):
        if draft[key]:
            draft.put("model.initialize_from", draft[key], key)
            draft.nearly(
                key, "a safetensors file, a run or a checkpoint of Paceline's: no file is opened that could run code"
            )
    if draft["pretrained_path"]:
        draft.switch("model.initialize_partly", "pretrained_path")


def _put_drop_connect(draft: Draft) -> None:
    if draft["drop_path"] is not None:
        draft.idle("drop_connect", "--drop-path says it")
        return
    draft.option("drop_connect", "drop_path_rate", draft["drop_connect"])
    draft.nearly("drop_connect", "the old name of --drop-path; train.py of today does nothing with it")


def _put_compile(draft: Draft) -> None:
    if draft["torchcompile"]:
        draft.switch("model.compile", "torchcompile")
        draft.put("model.compile_backend", draft["torchcompile"], "torchcompile")
        if draft["torchcompile_mode"]:
            draft.put("model.compile_mode", draft["torchcompile_mode"], "torchcompile_mode")
    else:
        draft.idle("torchcompile_mode", "said for --torchcompile")


def _put_training(draft: Draft, processes: int) -> None:
    amp = next((key for key in ("amp", "native_amp", "apex_amp") if draft[key]), None)
    if amp is None:
        draft.put("train.precision", "fp32", "amp")
        draft.idle("amp_dtype", "said for --amp")
        draft.nearly(
            "amp", "train.py multiplies fp32 numbers in TF32 where a GPU can; train.float32_matmul=high does so here"
        )
    elif draft["amp_dtype"] in ("float16", "bfloat16"):
        draft.put("train.precision", "fp16" if draft["amp_dtype"] == "float16" else "bf16", amp, "amp_dtype")
    else:
        draft.refuse("amp_dtype", "it is float16 or bfloat16")
    if draft["model_ema"]:
        draft.put("train.ema", draft["model_ema_decay"], "model_ema", "model_ema_decay")
        draft.nearly("model_ema", "the average here follows faster at first, by (1 + t) / (10 + t) after t steps")
        if draft["model_ema_warmup"]:
            draft.put("train.ema", draft["model_ema_decay"], "model_ema", "model_ema_decay", "model_ema_warmup")
    else:
        draft.idle("model_ema_decay", "said for --model-ema")
        draft.idle("model_ema_warmup", "said for --model-ema")
    if processes > 1 and draft["dist_bn"] != "broadcast":
        says = "BatchNorm's statistics are those of the first process when they are scored or saved, and no mean"
        draft.nearly("dist_bn", says)
    draft.use("dist_bn", "BatchNorm's statistics are those of the first process when they are scored or saved")


def _put_running(draft: Draft) -> None:
    steps = max(1, round(draft["log_interval"] / draft["grad_accum_steps"]))
    draft.put_given("telemetry.log_every", f"{steps} steps", "log_interval")
    if draft["log_wandb"]:
        draft.put("telemetry.trackers", ["tensorboard", "wandb"], "log_wandb")
    draft.put_given("data.workers", draft["workers"], "workers")
    draft.put_given("evaluate.batch_size", draft["validation_batch_size"], "validation_batch_size")
    draft.put_given("checkpoint.keep", draft["checkpoint_hist"], "checkpoint_hist", note="the newest, and the best")
    if draft["recovery_interval"]:
        steps = max(1, round(draft["recovery_interval"] / draft["grad_accum_steps"]))
        draft.put("checkpoint.every", f"{steps} steps", "recovery_interval")
    _put_device(draft)
    _put_metric(draft)


def _put_device(draft: Draft) -> None:
    device = str(draft["device"]).partition(":")[0]
    if device not in _DEVICES:
        draft.refuse("device", f"it is {', '.join(_DEVICES)}")
    elif device == "cuda":
        # Its default, also in the files of those who train elsewhere.
        draft.use("device", "parallel.device=auto, which takes a GPU where there is one")
    else:
        draft.put("parallel.device", device, "device")


def _put_metric(draft: Draft) -> None:
    metric = _METRICS.get(draft["eval_metric"])
    if metric is None:
        draft.refuse("eval_metric", f"it is {', '.join(_METRICS)}")
    elif draft["val_split"]:
        draft.put_given("evaluate.metric", metric, "eval_metric")
