"""Which options does NVIDIA's image classification trainer have, and what becomes of each here?

Names and defaults are those of DeepLearningExamples, PyTorch/Classification/ConvNets. What is said of each is what
docs/guide/from-nvidia-convnets.md says: a test holds the two together.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from paceline.recipe.imports.options import Kind, Option, Place, Table, options


class Row(NamedTuple):
    """One option.

    Attributes:
        file: Which of its files reads it.
        place: What becomes of it.
        names: As it is typed; separated by blanks.
        kind: What follows it.
        default: Its value where it is not given.
        here: What says the same here, or why nothing does.
    """

    file: str
    place: Place
    names: str
    kind: Kind
    default: Any
    here: str


_ROWS: tuple[tuple[str, Place, str, Kind, Any, str], ...] = (
    ("main.py", "mapped", "data", "text", None, "`data.path`"),
    (
        "main.py",
        "mapped",
        "--data-backend",
        "text",
        "dali-cpu",
        (
            "`data.backend`: `pytorch`, `memory`, `synthetic`; `dali-gpu` and `dali-cpu` are `dali` "
            "with `data.decode_on=gpu` and `cpu`"
        ),
    ),
    ("main.py", "mapped", "--interpolation", "text", "bilinear", "`data.interpolation`"),
    ("main.py", "mapped", "-j --workers", "int", 5, "`data.workers`"),
    ("main.py", "mapped", "--prefetch", "int", 2, "`data.prefetch`"),
    ("main.py", "mapped", "--epochs", "int", 90, "`train.duration`"),
    ("main.py", "mapped", "--run-epochs", "int", -1, "`train.until`, `--until`"),
    ("main.py", "mapped", "--early-stopping-patience", "int", -1, "`evaluate.patience`"),
    ("main.py", "mapped", "--image-size", "int", None, "`data.image_size`, `data.evaluation_size`"),
    ("main.py", "mapped", "-b --batch-size", "int", 256, "`batch.micro_size`: samples per forward pass and process"),
    (
        "main.py",
        "mapped",
        "--optimizer-batch-size",
        "int",
        -1,
        "`batch.global_size`: samples per optimizer step, over all processes",
    ),
    ("main.py", "mapped", "--lr --learning-rate", "float", 0.1, "`optimizer.lr`"),
    (
        "main.py",
        "mapped",
        "--lr-schedule",
        "text",
        "step",
        "`schedule.name`: `step`, `linear`, `cosine`, `exponential` and more",
    ),
    ("main.py", "mapped", "--end-lr", "float", 0.0, "`schedule.end_lr`"),
    ("main.py", "mapped", "--warmup", "int", 0, "`schedule.warmup`"),
    ("main.py", "mapped", "--label-smoothing", "float", 0.0, "`train.label_smoothing`"),
    ("main.py", "mapped", "--mixup", "float", 0.0, "`data.mix.mixup`"),
    ("main.py", "mapped", "--optimizer", "text", "sgd", "`optimizer.name`: `sgd`, `rmsprop` and more"),
    ("main.py", "mapped", "--momentum", "float", 0.9, "`optimizer.momentum`"),
    ("main.py", "mapped", "--weight-decay --wd", "float", 0.0001, "`optimizer.weight_decay`"),
    ("main.py", "mapped", "--bn-weight-decay", "switch", False, "`optimizer.decay_norm_and_bias`"),
    ("main.py", "mapped", "--rmsprop-alpha", "float", 0.9, "`optimizer.alpha`"),
    ("main.py", "mapped", "--rmsprop-eps", "float", 0.001, "`optimizer.eps`"),
    ("main.py", "mapped", "--nesterov", "switch", False, "`optimizer.nesterov`"),
    ("main.py", "mapped", "--print-freq -p", "int", 10, "`telemetry.log_every`"),
    (
        "main.py",
        "refused",
        "--resume",
        "text",
        None,
        "the same command in the same `--run-dir`; `--resume` for another checkpoint",
    ),
    (
        "main.py",
        "mapped",
        "--static-loss-scale",
        "float",
        1.0,
        (
            "`train.grad_scaler`: with `growth_interval` longer than the run, `init_scale` stays until "
            "a gradient overflows"
        ),
    ),
    (
        "main.py",
        "mapped",
        "--prof",
        "int",
        -1,
        "`telemetry.profile.steps` profiles some steps and goes on; `train.until` ends a run after some",
    ),
    ("main.py", "mapped", "--amp", "switch", False, "`train.precision=fp16`, or `bf16`, which needs no scale"),
    ("main.py", "mapped", "--seed", "int", None, "`seed`"),
    ("main.py", "mapped", "--gather-checkpoints", "int", 0, "`checkpoint.keep`"),
    (
        "main.py",
        "listed",
        "--raport-file",
        "text",
        "experiment_raport.json",
        "`summary.json` and `events.jsonl` in the run directory",
    ),
    ("main.py", "refused", "--evaluate", "switch", False, "the command `paceline evaluate`"),
    ("main.py", "mapped", "--training-only", "switch", False, "`evaluate.every=off`"),
    (
        "main.py",
        "mapped",
        "--no-checkpoints",
        "switch",
        False,
        "`checkpoint.every=off checkpoint.keep_best=false` saves at the end, and when asked to stop, alone",
    ),
    ("main.py", "listed", "--jit", "text", "no", "torch's scripting is deprecated; `model.compile`"),
    (
        "main.py",
        "listed",
        "--checkpoint-filename",
        "text",
        "checkpoint.pth.tar",
        "checkpoints have their step's name, in the run directory",
    ),
    ("main.py", "listed", "--workspace", "text", "./", "`--run-dir`"),
    ("main.py", "mapped", "--memory-format", "text", "nchw", "`model.channels_last`"),
    ("main.py", "mapped", "--use-ema", "float", None, "`train.ema`"),
    ("main.py", "mapped", "--augmentation", "text", None, "`data.augment.policy=autoaugment`"),
    (
        "main.py",
        "mapped",
        "--gpu-affinity",
        "text",
        "none",
        (
            "`parallel.affinity`: `socket`, `single` (socket_single), `single_unique` "
            "(socket_single_unique), `interleaved` and `contiguous` (socket_unique_…)"
        ),
    ),
    ("main.py", "mapped", "--topk", "int", 5, "`evaluate.top_k`"),
    ("main.py", "mapped", "--arch -a", "text", "resnet50", "`model.name`"),
    ("resnet.py", "listed", "--num_classes", "int", 1000, "from the data"),
    (
        "resnet.py",
        "mapped",
        "--last_bn_0_init",
        "text",
        None,
        "`model.options={zero_init_last: true}` for timm's ResNets",
    ),
    ("resnet.py", "refused", "--conv_init", "text", None, "the network's own; another one through a factory of yours"),
    ("resnet.py", "listed", "--trt", "text", None, "for export to TensorRT; not a matter of training"),
    ("resnet.py", "listed", "--fused_se", "text", None, "a kernel of its own; `model.compile` fuses what can be fused"),
    ("efficientnet.py", "listed", "--num_classes", "int", 1000, "from the data"),
    ("efficientnet.py", "refused", "--conv_init", "text", None, "the network's own"),
    (
        "efficientnet.py",
        "mapped",
        "--bn_momentum",
        "float",
        None,
        "`model.options={bn_momentum: 0.01}` for timm's EfficientNets",
    ),
    ("efficientnet.py", "mapped", "--bn_epsilon", "float", None, "`model.options={bn_eps: 0.001}`"),
    (
        "efficientnet.py",
        "mapped",
        "--survival_prob",
        "float",
        None,
        "`model.options={drop_path_rate: 0.2}`: one minus it",
    ),
    ("efficientnet.py", "mapped", "--dropout", "float", None, "`model.options={drop_rate: 0.2}`"),
    ("efficientnet.py", "listed", "--trt", "text", None, "for export to TensorRT; not a matter of training"),
    ("model.py", "mapped", "--pretrained-from-file", "text", None, "`model.initialize_from`"),
    ("model.py", "mapped", "--pretrained", "switch", False, "`model.pretrained`"),
    ("launch.py", "listed", "--cfg_file", "text", None, "a recipe file: `paceline train FILE`"),
    ("launch.py", "mapped", "--model", "text", None, "a shipped recipe's name"),
    (
        "launch.py",
        "mapped",
        "--mode",
        "text",
        None,
        'overrides: `evaluate.every=off checkpoint.every=off train.duration="100 steps"` for a benchmark',
    ),
    ("launch.py", "mapped", "--precision", "text", None, "`train.precision`"),
    ("launch.py", "listed", "--platform", "text", None, "`auto` asks the machine"),
    ("multiproc.py", "mapped", "--nnodes", "int", None, "`torchrun --nnodes`, or `paceline launch torchrun --nodes`"),
    ("multiproc.py", "listed", "--node_rank", "int", None, "torchrun's rendezvous gives it out"),
    ("multiproc.py", "mapped", "--nproc_per_node", "int", None, "`--processes`, or torchrun's"),
    ("multiproc.py", "listed", "--master_addr", "text", None, "torchrun's rendezvous"),
    ("multiproc.py", "listed", "--master_port", "int", None, "torchrun's rendezvous"),
    ("multiproc.py", "listed", "training_script", "text", None, "`paceline train`"),
    ("multiproc.py", "listed", "training_script_args", "texts", None, "`RECIPE` and overrides"),
    ("classify.py", "listed", "--image-size", "text", None, "as in evaluation; it stands in the weights' file"),
    ("classify.py", "listed", "--arch -a", "text", None, "stands in the weights' file"),
    ("classify.py", "listed", "--precision", "text", None, "`paceline predict` computes in fp32"),
    ("classify.py", "listed", "--cpu", "switch", None, "it computes on the CPU"),
    ("classify.py", "listed", "--image", "text", None, "files and folders: `paceline predict RUN FILE`"),
    ("quant_main.py", "refused", "--arch -a", "text", None, "quantisation-aware training: not yet"),
    ("quant_main.py", "refused", "--skip-calibration", "text", None, "not yet"),
)
ROWS = tuple(Row(*row) for row in _ROWS)

# Of older versions; command lines that have them are still about.
_OLDER = options("listed", (("-c --model-config", "text", None, "how convolutions begin is the network's own here"),))
_TRAINING = ("main.py", "resnet.py", "efficientnet.py", "model.py")


def _table(*files: str) -> tuple[Option, ...]:
    found: dict[str, Option] = {}
    for row in ROWS:
        if row.file in files:
            plain = row.here.replace("`", "")
            for option in options(row.place, ((row.names, row.kind, row.default, plain),)):
                found.setdefault(option.key, option)
    return tuple(found.values())


MAIN = Table("NVIDIA's main.py", (*_table(*_TRAINING), *_OLDER))
LAUNCH = Table("NVIDIA's launch.py", (*_table("launch.py", *_TRAINING), *_OLDER))
