"""Other names of recipe keys: Paceline's former names, and those of other trainers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.errors import RecipeError

RENAMED = {
    "data.split_file": "data.saved_split",
    "data.augment.learned_on": "data.augment.policy_dataset",
    "data.boxes": "data.detection",
    "data.clicks": "data.recommendation",
}
"""Old dotted key or section: the new one, within the same section; the old one works until version 1.0."""

# Only for messages: these are not accepted in a recipe. The names are those of timm, torchvision's references and
# Lightning; words that end a Paceline key need no entry.
_FOREIGN = {
    "train.duration": ("epochs", "max_epochs", "num_epochs", "max_steps"),
    "batch.global_size": ("batch_size", "bs", "b", "train_batch_size"),
    "batch.micro_size": ("accum", "grad_accum_steps", "accumulate_grad_batches", "micro_batch_size"),
    "data.path": ("data_dir", "data_path", "root"),
    "data.image_size": ("img_size", "input_size", "resolution"),
    "data.workers": ("num_workers", "j"),
    "data.backend": ("loader",),
    "data.augment.flip": ("hflip",),
    "model.name": ("arch", "architecture", "net"),
    "model.options": ("model_kwargs",),
    "model.initialize_from": ("initial_checkpoint", "weights", "checkpoint_path", "finetune"),
    "model.compile": ("torchcompile",),
    "optimizer.name": ("opt", "optim"),
    "optimizer.lr": ("learning_rate",),
    "optimizer.weight_decay": ("wd",),
    "optimizer.clip_norm": ("clip_grad", "gradient_clip_val", "max_grad_norm"),
    "schedule.name": ("sched", "scheduler", "lr_scheduler"),
    "schedule.warmup": ("warmup_epochs", "warmup_steps"),
    "schedule.end_lr": ("min_lr", "eta_min"),
    "schedule.milestones": ("decay_milestones", "lr_step_size"),
    "schedule.gamma": ("decay_rate", "lr_gamma"),
    "train.precision": ("amp", "amp_dtype", "dtype", "fp16", "bf16"),
    "train.label_smoothing": ("smoothing",),
    "train.class_weights": ("class_weight",),
    "train.ema": ("model_ema", "model_ema_decay", "ema_decay"),
    "evaluate.augment": ("tta", "test_time_augmentation"),
    "data.evaluation_size": ("val_resize_size", "val_crop_size", "test_input_size"),
    "data.evaluation_crop": ("crop_pct",),
    "evaluate.every": ("val_interval", "check_val_every_n_epoch"),
    "evaluate.metric": ("eval_metric", "monitor"),
    "evaluate.batch_size": ("validation_batch_size", "val_batch_size"),
    "checkpoint.keep": ("checkpoint_hist", "save_top_k"),
    "telemetry.log_every": ("log_interval", "log_every_n_steps", "print_freq"),
    "telemetry.trackers": ("log_wandb", "logger"),
}
_KEYS = {word: key for key, words in _FOREIGN.items() for word in words}


def our_key(word: str) -> str | None:
    """Return Paceline's dotted key for another trainer's option (``epochs``, ``batch-size``), or None."""
    return _KEYS.get(word.strip("-").replace("-", "_").lower())


def with_new_names(tree: Mapping[str, Any], notices: list[str] | None = None, path: str = "") -> dict[str, Any]:
    """Return a copy of a layer in which every key has its current name.

    Args:
        tree: Sections and keys, nested.
        notices: Receives one sentence for each old name.
        path: Path of the tree within the recipe, with a trailing dot.

    Raises:
        RecipeError: If a key is given under both names.
    """
    renamed: dict[str, Any] = {}
    for key, value in tree.items():
        dotted = f"{path}{key}"
        new = RENAMED.get(dotted, dotted)
        name = key if new == dotted else new.rpartition(".")[2]
        if name != key and name in tree:
            raise RecipeError(
                f"found '{dotted}' and '{new}', the old and the new name of the same key; remove '{dotted}'.",
                key=dotted,
                value=value,
                rule="under one name",
            )
        if name != key and notices is not None:
            notices.append(f"{dotted} is now called {new}; the old name works until version 1.0")
        holds_renamed = isinstance(value, Mapping) and any(old.startswith(f"{new}.") for old in RENAMED)
        renamed[name] = with_new_names(value, notices, f"{new}.") if holds_renamed else value
    return renamed
