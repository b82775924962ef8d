"""Does the gradient noise scale foretell the batch beyond which a larger one costs samples, as a sweep measures it?

The digits with plain SGD at a constant rate (momentum and a schedule are no part of the theory), to 90 % top-1. The
sweep: seven batch sizes, five rates each, three seeds, each batch at its best rate, and the law fitted to the runs. The
prediction: a run with a batch of 64 at its best rate keeps its weights every four steps until it is there, and the
noise scale is measured at each of them (``paceline noise-scale RUN``). The paper's figure is the average over the
training up to the target; the one at its end stands beside it, and so does what the run itself recorded on the way.

    python benchmarks/critical_batch.py [--seeds 3] [--output DIR] [--dry-run]
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from hardware import write_result as write_figures

from paceline.metrics.intervals import Interval
from paceline.pages.shown import write_result
from paceline.parsing.units import Duration
from paceline.recipe.load import load_recipe
from paceline.records.reader import read_events
from paceline.trainer.train import Options, train_recipe
from paceline_advisor.bench.target import MetricTarget
from paceline_advisor.commands import NoiseScale, SweepBatch
from paceline_advisor.tuning.batch_sweep import COLUMNS, RuleResult, Swept, knee_in_words, sweep_batch, table_rows
from paceline_advisor.tuning.noise_scale import NoiseReport, measure_noise

OVERRIDES = (
    "model.options.width=8",
    "model.options.stages=1",
    "optimizer.momentum=0",
    "optimizer.nesterov=false",
    "optimizer.lr=1.0",
    "schedule.name=constant",
    "schedule.warmup=0 steps",
    "train.ema=off",
    "train.label_smoothing=0",
    "evaluate.every=4 steps",
    "evaluate.batch_size=359",
)
BATCHES = (8, 16, 32, 64, 128, 256, 512)
OWN_BATCH = 64
TARGET = MetricTarget("top1_accuracy", 90)
WITHIN = 3.0


def swept(seeds: int, output: Path) -> Swept:
    """Run the sweep; the same call resumes it."""
    command = SweepBatch(
        recipe="digits",
        overrides=OVERRIDES,
        to=f"{TARGET.metric}={TARGET.value}",
        batch_sizes=BATCHES,
        lr_rules=("tuned", "sqrt", "linear"),
        seeds=seeds,
        longest=Duration(60, "epochs"),
        output=output,
    )
    report = sweep_batch(command, lambda line: print(line, flush=True))
    write_result(output, "sweep-batch", report)
    return report


def noise_during_training(rate: float, steps: int, folder: Path) -> tuple[NoiseReport, list[dict[str, Any]]]:
    """The noise scale at the weights of a run to the target, and what the run recorded itself."""
    changes = {
        "optimizer.lr": rate,
        "batch.micro_size": OWN_BATCH // 4,
        "train.duration": f"{steps} steps",
        "checkpoint.every": "4 steps",
        "checkpoint.keep": 10_000,
        "telemetry.noise_scale": "1 steps",
        "telemetry.log_every": "4 steps",
        "telemetry.trackers": [],
    }
    overrides = [*OVERRIDES, *(f"{key}={value}" for key, value in changes.items())]
    train_recipe(load_recipe("digits", overrides), Options(run_dir=folder))
    measured = measure_noise(NoiseScale(target=str(folder), steps=50), lambda line: print(line, flush=True))
    return measured, list(read_events(folder / "events.jsonl", kinds={"step"}))


def compared(knee: Interval, predicted: float) -> dict[str, Any]:
    """A prediction beside the measurement."""
    ratio = predicted / knee.middle
    return {"noise_scale": predicted, "over_knee": ratio, "within": 1 / WITHIN <= ratio <= WITHIN}


def table(result: RuleResult) -> list[str]:
    """The batches of a rule as Markdown."""
    rows = [COLUMNS, ("---",) * len(COLUMNS), *table_rows(result)]
    return [f"| {' | '.join(row)} |" for row in rows]


def plot(result: RuleResult, path: Path) -> None:
    """Draw samples to the target by batch: median, least and most of the runs, and the fitted law."""
    figure, axes = plt.subplots(figsize=(6.5, 4))
    sizes = [row.batch for row in result.rows]
    runs = []
    for row in result.rows:
        reached = [each for each in result.points if each.reached and each.batch == row.samples_per_step]
        runs.append(sorted(each.steps * each.batch for each in reached) or [math.nan])
    middles = [statistics.median(each) for each in runs]
    ends = [[middle - each[0], each[-1] - middle] for middle, each in zip(middles, runs, strict=True)]
    axes.errorbar(sizes, middles, yerr=list(zip(*ends, strict=True)), fmt="o", capsize=3, label="runs: median, range")
    if result.law is not None:
        axes.plot(sizes, [result.law.examples(row.samples_per_step) for row in result.rows], label="law")
    axes.set(xscale="log", xlabel="batch size", ylabel="samples to the target", ylim=(0, None))
    axes.set_xticks(sizes, [str(size) for size in sizes], minor=False)
    axes.legend()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure both, and write the result files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="where finished runs are kept, to go on from")
    parser.add_argument("--dry-run", action="store_true", help="print, write no result files")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="critical-") as scratch:
        output = options.output or Path(scratch) / "sweep"
        output.mkdir(parents=True, exist_ok=True)
        report = swept(options.seeds, output)
        tuned = report.rules[0]
        own = next(row for row in tuned.rows if row.batch == OWN_BATCH)
        assert tuned.law is not None
        assert own.steps is not None
        noise, recorded = noise_during_training(own.lr, round(own.steps.middle), Path(scratch) / "run")
    knee = tuned.law.critical_batch
    course = [(each.step, found.middle) for each in noise.points if (found := each.averages.noise_scale()) is not None]
    average = statistics.fmean(value for _, value in course)
    on_the_way = [each["noise_scale"] for each in recorded if each["noise_scale"] is not None]
    found = {
        "knee": knee.to_json(),
        "average over the training": compared(knee, average),
        "at the target": compared(knee, course[-1][1]),
        "recorded by the run, at the target": compared(knee, on_the_way[-1]),
        "course": course,
        "recorded": [(each["step"], each["noise_scale"]) for each in recorded],
        "sweep": report.to_json(),
    }
    lines = [
        f"Digits, plain SGD at a constant rate, to {TARGET.metric}={TARGET.value:g}.",
        "Each batch at the best of five rates.",
        f"{options.seeds} runs each.",
        "",
        *table(tuned),
        "",
        *(f"- {each.rule}: {knee_in_words(each)}" for each in report.rules),
        "",
        "| noise scale | samples | over the knee | within a factor of 3 |",
        "| --- | --- | --- | --- |",
    ]
    for name in ("average over the training", "at the target", "recorded by the run, at the target"):
        each = found[name]
        says = "yes" if each["within"] else "no"
        lines.append(f"| {name} | {each['noise_scale']:.0f} | {each['over_knee']:.2f} | {says} |")
    print("\n".join(lines))
    if not options.dry_run:
        path = write_figures("critical-batch", found, lines)
        plot(tuned, path.with_suffix(".svg"))
        print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
