"""How fast does Paceline train a small GPT, beside a hand-written loop of the very same model?

The loop is written the way nanoGPT's is: tokens in one array, rows cut from it at random places, forward, backward,
clip, step. Model, batch, precision and optimizer are the recipe's. Both train in one process and take turns, a block
of steps each (A B A B …), so that a machine whose speed drifts slows both alike. Paceline runs as it always does: step
records, ledger and clock on, rows in its own order.

    python benchmarks/gpt_throughput.py [--blocks 12] [--steps 5] [--threads 2]
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

from paceline.recipe.load import LoadedRecipe, load_recipe
from paceline.trainer.train import Options, train_recipe
from paceline_text.models import build_language_model
from paceline_text.sets.documents import open_text

LR, BETAS, DECAY, CLIP = 1e-3, (0.9, 0.99), 0.1, 1.0


def loaded_recipe(steps: int, threads: int) -> LoadedRecipe:
    """The shipped GPT with AdamW, as the plain loop has it, for so many steps."""
    return load_recipe(
        "gpt-small-docs",
        {
            "optimizer": {"name": "adamw", "lr": LR, "betas": list(BETAS), "weight_decay": DECAY, "clip_norm": CLIP},
            "schedule.name": "constant",
            "schedule.warmup": "0 steps",
            "train.precision": "bf16",
            "train.duration": f"{steps} steps",
            "evaluate.every": "off",
            "checkpoint.every": "off",
            "telemetry.trackers": [],
            "telemetry.report": False,
            "parallel.device": "cpu",
            "parallel.threads": threads,
        },
    )


def plain_steps(loaded: LoadedRecipe) -> Callable[[int], None]:
    """The hand-written loop."""
    recipe = loaded.recipe
    data, batch, context = open_text(recipe.data), recipe.batch.global_size, recipe.data.text.context
    corpus = data.train
    ids = np.concatenate([corpus.read(each, 0, int(size)) for each, size in enumerate(corpus.lengths)])
    torch.manual_seed(0)
    model = build_language_model(recipe.model, vocabulary=data.tokenizer.vocabulary, context=context)
    decayed = [each for each in model.parameters() if each.ndim >= 2]
    others = [each for each in model.parameters() if each.ndim < 2]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS)

    def run(steps: int) -> None:
        for _ in range(steps):
            places = torch.randint(len(ids) - context - 1, (batch,))
            x = torch.stack([torch.from_numpy(ids[i : i + context]) for i in places])
            y = torch.stack([torch.from_numpy(ids[i + 1 : i + 1 + context]) for i in places])
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(x)
            loss = F.cross_entropy(logits.float().view(-1, logits.shape[-1]), y.view(-1))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return run


def measure(blocks: int, steps: int, threads: int) -> dict[str, Any]:
    """Paceline's throughput over the plain loop's, block by block."""
    torch.set_num_threads(threads)
    loaded = loaded_recipe((blocks + 2) * steps, threads)
    turns = TakingTurns(plain_steps(loaded), steps)
    with tempfile.TemporaryDirectory() as scratch:
        train_recipe(loaded, Options(run_dir=Path(scratch) / "run", display=turns))
    # The first block of either warms up.
    own, plain = turns.own_seconds[1:], turns.raw_seconds[1:-1]
    tokens = steps * loaded.recipe.batch.global_size * loaded.recipe.data.text.context
    return {
        "steps_per_block": steps,
        "threads": threads,
        "ratio": spread([b / a for a, b in zip(own, plain, strict=False)]),
        "paceline_tokens_per_second": spread([tokens / each for each in own]),
        "plain_tokens_per_second": spread([tokens / each for each in plain]),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the result files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dry-run", action="store_true", help="print, write no result files")
    options = parser.parse_args(arguments)
    row = measure(options.blocks, options.steps, options.threads)
    ratio = row["ratio"]
    line = (
        f"Paceline trains {ratio['median']:.3f} times as many tokens per second as the hand-written loop (median of "
        f"{ratio['runs']} pairs of blocks of {row['steps_per_block']} steps; {ratio['minimum']:.3f} to "
        f"{ratio['maximum']:.3f}; the loop {row['plain_tokens_per_second']['median']:,.0f} tokens/s on "
        f"{row['threads']} threads)."
    )
    print(line)
    if not options.dry_run:
        print(write_result("gpt-throughput", row, [line]))


if __name__ == "__main__":
    main()
