"""What does unequal length cost: batches drawn at random and padded, balanced by length, and packed?

The plan's own geometry over one epoch, for eight processes: how many tokens a step has beside an equal share of all
(`tokens`), how much of what is computed is padding, how much more the busiest process of a step computes than the mean
(`imbalance`), and what comes of that: tokens over what is waited for, were every process as busy as the busiest
(`useful`). Lengths: lognormal ones, and the embedded documentation's own. *Drawn* is what a plain data loader does that
pads each process's batch to its longest sample.

Then real steps of a small GPT on documents of lognormal length, one thread, the ways in turns: tokens, padding left
out, per second of processor time, which hardly depends on what else the machine does.

    python benchmarks/token_balance.py [--rounds 3] [--steps 25]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from hardware import spread, write_result
from numpy.typing import NDArray

import paceline
from paceline.data.balance import SampleLengths
from paceline.data.batch import Batch
from paceline.data.order import StepGeometry
from paceline.host.world import World
from paceline_text.language_modeling import LanguageModeling
from paceline_text.pipeline import packed_rows, single_rows
from paceline_text.sets.documents import python_documentation

PROCESSES, CONTEXT, TYPICAL, MULTIPLE = 8, 1024, 180, 8
_WARMUP = 3
WAYS = ("drawn", "balanced", "packed")
FINE = "balanced, 4 micro-batches each"
CUTS = {"drawn": {"batch.balance": False}, "balanced": {}, "packed": {"data.text.rows": "packed"}}
RECIPE: dict[str, Any] = {
    "data.dataset": "text_folder",
    "data.text.context": 512,
    "data.text.rows": "single",
    "model.options": {"depth": 2, "width": 96, "heads": 4},
    "batch.global_size": 16,
    "batch.micro_size": 4,
    "train.precision": "fp32",
    "evaluate.every": "off",
    "checkpoint.every": "off",
    "parallel.threads": 1,
    "telemetry.trackers": [],
    "telemetry.report": False,
}


def lognormal(count: int) -> NDArray[np.int64]:
    """Lengths of documents: half are shorter than 180 tokens, one in 25 longer than the context."""
    return np.maximum(2, np.random.default_rng(0).lognormal(np.log(TYPICAL), 1.0, count)).astype(np.int64)


def of_documentation() -> NDArray[np.int64]:
    """Bytes of each of the embedded documents, with an end each."""
    return np.array([len(text.encode()) + 1 for _, text in python_documentation()], dtype=np.int64)


def geometry(variant: str, lengths: NDArray[np.int64], batch: int, context: int) -> StepGeometry:
    """The steps of one epoch."""
    table = packed_rows(lengths, context, 0) if variant == "packed" else single_rows(lengths, context)
    width = context if variant == "packed" else None
    return StepGeometry(
        seed=0,
        samples=len(table),
        global_batch_size=batch,
        logical_ranks=PROCESSES * 4 if variant == FINE else PROCESSES,
        lengths=SampleLengths(tokens=table.tokens, multiple=MULTIPLE, width=width, max_width=context),
        balanced=variant != "drawn",
    )


def epoch(steps: StepGeometry) -> dict[str, float]:
    """Figures over the whole steps of an epoch."""
    count = steps.samples // steps.global_batch_size
    loads = [load for step in range(count) if (load := steps.load(step, PROCESSES)) is not None]
    tokens = np.array([load.tokens for load in loads])
    positions = np.array([load.positions for load in loads])
    waited = np.array([load.busiest * load.processes for load in loads])
    assert steps.lengths is not None
    width = steps.lengths.width
    # A packed step's ideal has no empty place; another one's is an equal share of all.
    ideal = tokens.mean() if width is None else steps.global_batch_size * width
    return {
        "steps": count,
        "tokens_least": float(tokens.min() / ideal),
        "tokens_mean": float(tokens.mean() / ideal),
        "padding": float(1 - tokens.sum() / positions.sum()),
        "imbalance": float(waited.sum() / positions.sum()),
        "useful": float(tokens.sum() / waited.sum()),
        "shapes": len({shape for step in range(count) for shape in shapes(steps, step)}),
    }


def shapes(steps: StepGeometry, step: int) -> Iterator[tuple[int, int]]:
    """Rows and width of each micro-batch of a step."""
    assert steps.lengths is not None
    for part in steps.slices(step, World()):
        yield len(part.ids), int(steps.lengths.padded(part.ids).max())


def documents(folder: Path, count: int) -> None:
    """Files of lognormal length, cut from the embedded documentation."""
    text = "".join(text for _, text in python_documentation()).encode("ascii", "ignore")
    (folder / "train").mkdir()
    (folder / "val").mkdir()
    for number, size in enumerate(np.minimum(lognormal(count) // 2, 512).tolist()):
        begin = number * 577 % (len(text) - size)
        (folder / ("val" if number < 4 else "train") / f"{number:05}.txt").write_bytes(text[begin : begin + size])


class Timed(LanguageModeling):
    """Notes of each micro-batch its step, the processor time when it begins, and its tokens."""

    notes: ClassVar[list[tuple[int, float, int]]] = []

    def loss(self, model: Any, batch: Batch) -> torch.Tensor:
        """As ever."""
        tokens = int(self.sample_lengths().tokens[batch.ids].sum())
        self.notes.append((batch.slice.step, time.process_time(), tokens))
        return super().loss(model, batch)


def tokens_per_second(folder: Path, variant: str, run_dir: Path, steps: int) -> float:
    """Of the steps of a short run but the first ones, by processor time."""
    overrides = {**RECIPE, "data.path": str(folder), "train.duration": f"{_WARMUP + steps} steps", **CUTS[variant]}
    Timed.notes.clear()
    paceline.train("gpt-small-docs", overrides=overrides, run_dir=run_dir, task=Timed, quiet=True)
    # The rehearsal came first; of the last micro-batch only the beginning is known.
    notes = [each for each in Timed.notes[variant != "packed" :] if each[0] >= _WARMUP]
    return sum(tokens for _, _, tokens in notes[:-1]) / (notes[-1][1] - notes[0][1])


def timed(rounds: int, steps: int) -> dict[str, Any]:
    """Tokens per second each way, the ways in turns, and what each makes of the drawn one."""
    found: dict[str, list[float]] = {variant: [] for variant in WAYS}
    with tempfile.TemporaryDirectory() as scratch:
        documents(Path(scratch), 1500)
        for number in range(rounds):
            for variant in WAYS:
                run_dir = Path(scratch) / f"{variant}-{number}"
                found[variant].append(tokens_per_second(Path(scratch), variant, run_dir, steps))
                print(number, variant, f"{found[variant][-1]:,.0f} tokens a second", flush=True)
    ratios = {variant: [a / b for a, b in zip(found[variant], found["drawn"], strict=True)] for variant in WAYS}
    return {
        variant: {"tokens_per_processor_second": spread(found[variant]), "of_drawn": spread(ratios[variant])}
        for variant in WAYS
    }


def packing_seconds(count: int) -> float:
    """Processor time of packing so many documents."""
    lengths, started = lognormal(count), time.process_time()
    packed_rows(lengths, CONTEXT, 0)
    return time.process_time() - started


def main() -> None:
    """Measure and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=25)
    requested = parser.parse_args()
    cases = {
        "lognormal, 20,000 documents": (lognormal(20_000), CONTEXT),
        "the embedded documentation": (of_documentation(), 2048),
    }
    result: dict[str, Any] = {"epochs": {}, "packing_seconds_of_a_million": packing_seconds(1_000_000)}
    lines = [
        "| lengths | samples a step | way | tokens in a step, least / mean | padding | imbalance | useful | shapes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, (lengths, context) in cases.items():
        for batch in (32, 256):
            for variant in ("drawn", "balanced", FINE, "packed"):
                steps = geometry(variant, lengths, batch, context)
                if steps.samples // batch < 3:
                    continue
                each = epoch(steps)
                result["epochs"][f"{name}, {batch}, {variant}"] = each
                lines.append(
                    f"| {name} | {batch} | {variant} | {each['tokens_least']:.1%} / {each['tokens_mean']:.1%} | "
                    f"{each['padding']:.1%} | {each['imbalance']:.3f} | {each['useful']:.1%} | {each['shapes']} |"
                )
    print("\n".join(lines), flush=True)
    lines += [
        "",
        f"A million documents are packed within {result['packing_seconds_of_a_million']:.1f} s of processor time.",
        "",
    ]
    result["steps"] = timed(requested.rounds, requested.steps)
    lines += ["| way | tokens per processor second | of drawn |", "|---|---|---|"]
    for variant, each in result["steps"].items():
        rate, ratio = each["tokens_per_processor_second"], each["of_drawn"]
        lines.append(
            f"| {variant} | {rate['median']:,.0f} ({rate['minimum']:,.0f} to {rate['maximum']:,.0f}) | "
            f"{ratio['median']:.2f} ({ratio['minimum']:.2f} to {ratio['maximum']:.2f}) |"
        )
    print(write_result("token-balance", result, lines))


if __name__ == "__main__":
    main()
