"""Names of other trainers, answered with ours; only messages use them.

They are those of timm, torchvision's references, Lightning, Hugging Face's Trainer and fastai. Words that end a key
of a recipe need no entry.
"""

from __future__ import annotations

_KEYS_BY_OURS = {
    "train.duration": ("epochs", "max_epochs", "num_epochs", "num_train_epochs", "n_epoch", "n_epochs", "max_steps"),
    "train.precision": ("amp", "amp_dtype", "dtype", "fp16", "bf16", "mixed_precision"),
    "train.loss": ("loss_fn", "loss_func", "criterion"),
    "train.label_smoothing": ("smoothing", "label_smoothing_factor"),
    "train.class_weights": ("class_weight",),
    "train.ema": ("model_ema", "model_ema_decay", "ema_decay"),
    "batch.global_size": ("batch_size", "bs", "b", "train_batch_size"),
    "batch.micro_size": (
        "accum",
        "grad_accum_steps",
        "accumulate_grad_batches",
        "gradient_accumulation_steps",
        "micro_batch_size",
        "per_device_train_batch_size",
    ),
    "batch.balance": ("group_by_length",),
    "data.path": ("data_dir", "data_path", "root"),
    "data.image_size": ("img_size", "input_size", "resolution"),
    "data.workers": ("num_workers", "dataloader_num_workers", "j"),
    "data.backend": ("loader",),
    "data.subset": ("limit_train_batches", "overfit_batches"),
    "data.validation_fraction": ("valid_pct", "validation_split", "val_split"),
    "data.augment.flip": ("hflip",),
    "data.evaluation_size": ("val_resize_size", "val_crop_size", "test_input_size"),
    "data.evaluation_crop": ("crop_pct",),
    "model.name": ("arch", "architecture", "net"),
    "model.options": ("model_kwargs",),
    "model.initialize_from": ("initial_checkpoint", "weights", "checkpoint_path", "finetune"),
    "model.compile": ("torchcompile", "torch_compile"),
    "model.activation_checkpointing": ("gradient_checkpointing",),
    "optimizer.name": ("opt", "opt_func", "optim"),
    "optimizer.lr": ("learning_rate", "lr_max"),
    "optimizer.betas": ("adam_beta1", "adam_beta2"),
    "optimizer.eps": ("adam_epsilon",),
    "optimizer.weight_decay": ("wd",),
    "optimizer.clip_norm": ("clip_grad", "clip_grad_norm", "gradient_clip_val", "max_grad_norm"),
    "schedule.name": ("sched", "scheduler", "lr_scheduler", "lr_scheduler_type"),
    "schedule.warmup": ("warmup_epochs", "warmup_ratio", "warmup_steps"),
    "schedule.end_lr": ("min_lr", "eta_min"),
    "schedule.milestones": ("decay_milestones", "lr_step_size"),
    "schedule.gamma": ("decay_rate", "lr_gamma"),
    "evaluate.augment": ("tta", "test_time_augmentation"),
    "evaluate.every": ("val_interval", "check_val_every_n_epoch", "val_check_interval", "eval_steps", "eval_strategy"),
    "evaluate.patience": ("early_stop", "early_stopping", "early_stopping_patience", "earlystopping"),
    "evaluate.metric": ("eval_metric", "metric_for_best_model", "monitor"),
    "evaluate.batch_size": ("validation_batch_size", "val_batch_size", "per_device_eval_batch_size"),
    "checkpoint.every": ("save_steps", "save_strategy"),
    "checkpoint.keep": ("checkpoint_hist", "save_top_k", "save_total_limit"),
    "parallel.device": ("accelerator", "no_cuda", "use_cpu"),
    "parallel.strategy": ("fsdp", "deepspeed"),
    "telemetry.log_every": ("log_interval", "log_every_n_steps", "logging_steps", "print_freq"),
    "telemetry.trackers": ("log_wandb", "logger", "report_to"),
}
_WAYS = {
    "the number of processes is --processes (in Python, processes=), or torchrun's": (
        "devices",
        "gpus",
        "nproc_per_node",
        "num_nodes",
        "num_processes",
    ),
    "the run directory is --run-dir (in Python, run_dir=)": ("default_root_dir", "output_dir"),
    "the same command in the same run directory resumes": ("ckpt_path", "resume_from_checkpoint"),
    "evaluate, predict and export use the best evaluation with --best": ("load_best_model_at_end", "restore_best"),
    "callbacks are an argument of paceline.train": ("callbacks", "cbs"),
}
_METHODS_BY_OURS = {
    "loss": ("training_step", "compute_loss"),
    "score": ("validation_step", "test_step", "compute_metrics"),
    "predict": ("predict_step",),
    "build_model": ("forward",),
    "build_optimizer (or the recipe's optimizer and schedule)": ("configure_optimizers", "create_optimizer"),
    "open_pipeline": ("train_dataloader", "val_dataloader", "test_dataloader", "get_train_dataloader"),
    "data_facts": ("prepare_data",),
    "on_step_end or on_evaluation of an object in callbacks=": (
        "after_batch",
        "after_epoch",
        "on_train_batch_end",
        "on_train_epoch_end",
        "on_validation_epoch_end",
        "validation_epoch_end",
    ),
}
_KEYS, _WAY, METHODS = (
    {word: ours for ours, words in table.items() for word in words}
    for table in (_KEYS_BY_OURS, _WAYS, _METHODS_BY_OURS)
)


def our_key(word: str) -> str | None:
    """Return Paceline's dotted key for another trainer's option (``epochs``, ``batch-size``), or None."""
    return _KEYS.get(_plain(word))


def our_way(word: str) -> str:
    """Return what to use for another trainer's option that no key of a recipe stands for, or an empty string."""
    return _WAY.get(_plain(word), "")


def _plain(word: str) -> str:
    return word.strip("-").replace("-", "_").lower()
