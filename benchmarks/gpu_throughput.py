"""Measure training throughput on a GPU against hand-written loops for the same network and batch size.

Both train in one process and take turns, a block of steps each (A B A B …); the device is waited for at the end of a
block, so that each block has its own work in it. Paceline runs as it always does: step records, TensorBoard, ledger and
clock on, its own order of samples. The loops are the short ones that a person would tune for these networks: data held
on the device, bf16 autocast, channels last or flash attention, fused optimizer, gradients set to None, no waiting for
the device within a block. With ``--compile`` both networks are compiled, each by ``torch.compile``'s defaults.

    python benchmarks/gpu_throughput.py [resnet50] [gpt-124m] [digits] [--blocks 10] [--compile] [--dry-run]

``--tiny`` rehearses it with small networks, without a GPU too.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from hardware import spread, write_result
from overhead import TakingTurns

from paceline.data.image.datasets import open_dataset
from paceline.models.build import build_model
from paceline.recipe.load import LoadedRecipe, load_recipe
from paceline.trainer.train import Options, train_recipe
from paceline_text.models import build_language_model
from paceline_text.sets.documents import open_text

COMMON = {
    "schedule.name": "constant",
    "schedule.warmup": "0 steps",
    "train.precision": "bf16",
    "evaluate.every": "off",
    "checkpoint.every": "off",
    "checkpoint.keep_best": False,
    "telemetry.report": False,
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Recipe, overrides, steps of a block.
IMAGES = {"optimizer": None, "optimizer.name": "sgd", "optimizer.momentum": 0.9}
WORK: dict[str, tuple[str, dict[str, Any], int]] = {
    "resnet50": ("synthetic", {**IMAGES, "batch.global_size": 256, "data.samples": 4096, "optimizer.lr": 0.1}, 20),
    "digits": (
        "digits",
        {
            **IMAGES,
            "optimizer.lr": 0.05,
            "batch.global_size": 64,
            "data.augment": None,
            "train.ema": None,
            "train.label_smoothing": 0.0,
        },
        200,
    ),
    "gpt-124m": (
        "gpt-124m",
        {
            "data.dataset": "docs",
            "data.validation_fraction": 0.1,
            "batch": None,
            "batch.global_size": 16,
            "optimizer.weight_decay": 0.1,
        },
        20,
    ),
}

TINY: dict[str, dict[str, Any]] = {
    "resnet50": {"batch.global_size": 4, "data.samples": 32, "data.image_size": 32},
    "digits": {},
    "gpt-124m": {"model.options.depth": 1, "model.options.width": 48, "batch.global_size": 1, "data.text.context": 32},
}


def image_steps(loaded: LoadedRecipe, compiled: bool) -> Callable[[int], None]:
    """The loop by hand on images that the device holds."""
    recipe = loaded.recipe
    data, batch = open_dataset(recipe.data), recipe.batch.global_size
    images = torch.stack([torch.as_tensor(np.asarray(data.train.read(each))) for each in range(len(data.train))])
    images = images.reshape(len(images), *images.shape[1:3], -1).to(DEVICE).permute(0, 3, 1, 2)
    labels = torch.as_tensor(data.train.labels).to(DEVICE)
    mean, std = (torch.tensor(each, device=DEVICE).view(-1, 1, 1) * 255 for each in (data.mean, data.std))
    model = build_model(recipe.model, num_classes=len(data.classes), in_channels=data.channels)
    model = model.to(DEVICE, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=float(recipe.optimizer.lr), momentum=0.9, fused=True)
    network = torch.compile(model) if compiled else model

    def run(steps: int) -> None:
        for _ in range(steps):
            ids = torch.randint(len(images), (batch,), device=DEVICE)
            x = images[ids].float().sub_(mean).div_(std).contiguous(memory_format=torch.channels_last)
            with torch.autocast(DEVICE, torch.bfloat16):
                loss = F.cross_entropy(network(x), labels[ids])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return run


def text_steps(loaded: LoadedRecipe, compiled: bool) -> Callable[[int], None]:
    """The loop by hand on tokens that the device holds."""
    recipe = loaded.recipe
    data, batch, context = open_text(recipe.data), recipe.batch.global_size, recipe.data.text.context
    corpus = data.train
    ids = np.concatenate([corpus.read(each, 0, int(size)) for each, size in enumerate(corpus.lengths)])
    tokens = torch.from_numpy(ids.astype(np.int64)).to(DEVICE)
    model = build_language_model(recipe.model, vocabulary=data.tokenizer.vocabulary, context=context).to(DEVICE)
    groups = [
        {"params": [each for each in model.parameters() if each.ndim >= 2], "weight_decay": 0.1},
        {"params": [each for each in model.parameters() if each.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=True)
    network = torch.compile(model) if compiled else model
    offsets = torch.arange(context, device=DEVICE)

    def run(steps: int) -> None:
        for _ in range(steps):
            places = torch.randint(len(tokens) - context - 1, (batch, 1), device=DEVICE) + offsets
            with torch.autocast(DEVICE, torch.bfloat16):
                logits = network(tokens[places])
                loss = F.cross_entropy(logits.view(-1, logits.shape[-1]), tokens[places + 1].view(-1))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return run


def measure(name: str, blocks: int, *, compiled: bool, tiny: bool) -> dict[str, Any]:
    """Paceline's throughput over the loop's, block by block."""
    base, overrides, steps = WORK[name]
    if tiny:
        overrides, steps = {**overrides, **TINY[name]}, 2
    duration = {"parallel.device": DEVICE, "train.duration": f"{(blocks + 2) * steps} steps", "model.compile": compiled}
    loaded = load_recipe(base, {**COMMON, **overrides, **duration})
    by_hand = (text_steps if name.startswith("gpt") else image_steps)(loaded, compiled)
    by_hand(5)  # warms up, and compiles
    turns = TakingTurns(by_hand, steps)
    with tempfile.TemporaryDirectory() as scratch:
        train_recipe(loaded, Options(run_dir=Path(scratch) / "run", display=turns))
    own, raw = turns.own_seconds[1:], turns.raw_seconds[1:-1]  # the first block of either warms up
    each_step = loaded.recipe.batch.global_size * (loaded.recipe.data.text.context if name.startswith("gpt") else 1)
    return {
        "network": name,
        "compiled": compiled,
        "batch_size": loaded.recipe.batch.global_size,
        "steps_per_block": steps,
        "counted_in": "tokens" if name.startswith("gpt") else "images",
        "ratio": spread([b / a for a, b in zip(own, raw, strict=False)]),
        "paceline_per_second": spread([steps * each_step / seconds for seconds in own]),
        "by_hand_per_second": spread([steps * each_step / seconds for seconds in raw]),
        "paceline_milliseconds_per_step": spread([1000 * seconds / steps for seconds in own]),
    }


def summary_of_run(row: dict[str, Any]) -> str:
    """The result for people."""
    ratio = row["ratio"]
    compiled = ", compiled" if row["compiled"] else ""
    return (
        f"- {row['network']}{compiled}, batch {row['batch_size']}: {row['paceline_per_second']['median']:,.0f} "
        f"{row['counted_in']}/s, {ratio['median']:.3f} times the loop by hand ({ratio['minimum']:.3f} to "
        f"{ratio['maximum']:.3f} over {ratio['runs']} pairs of blocks of {row['steps_per_block']} steps; the loop "
        f"{row['by_hand_per_second']['median']:,.0f})."
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the result files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", metavar="|".join(WORK))
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--compile", action="store_true", help="compile both networks")
    parser.add_argument("--tiny", action="store_true", help="rehearse: small networks, no result files")
    parser.add_argument("--dry-run", action="store_true", help="print, write no result files")
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    for name in options.networks or WORK:
        rows.append(measure(name, options.blocks, compiled=options.compile, tiny=options.tiny))
        print(summary_of_run(rows[-1]), flush=True)
        if not (options.dry_run or options.tiny):
            claim = f"gpu-throughput{'-compiled' * options.compile}"
            print(write_result(claim, {"measurements": rows}, [summary_of_run(each) for each in rows]))
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
