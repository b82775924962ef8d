"""Write docs/performance.md from the result files of compare.py.

With --check it writes nothing, and says if the page differs.

python benchmarks/peers/publish.py [--check]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "performance.md"
ORDER = ("loop-64", "loop-4", "folder-64", "folder-160", "memory", "ddp-2", "evaluation", "checkpoint")
ON_GPU = ("gpu-resident", "gpu-folder")
_NAMES = {
    "loop-64": "small network, batch 64", "loop-4": "small network, batch 4", "folder-64": "JPEG files, 64 pixels",
    "folder-160": "JPEG files, 160 pixels", "memory": "images in memory", "ddp-2": "two processes",
    "evaluation": "evaluation", "checkpoint": "checkpoints",
}  # fmt: skip
US = "paceline"
# What is written as 1.00 is not called less.
_ROUNDED = 0.005
CONTENDERS = ("raw", "raw-tuned", "torchvision", "timm", "accelerate", "lightning", "fastai", "composer")
_INTRODUCTION = """\
# Performance compared with other trainers

<!-- Written by benchmarks/peers/publish.py from benchmarks/results/peers-*.json; change those. -->

Each trainer runs the same training: network, images, batch, precision, threads, update rule. Each program follows its
library's documentation (timm: its parts in the order of its training script; fastai: torch's loader, autocast and DDP
within its `Learner`). Programs take turns in a random order per round; ratios are within a round, and figures are
medians over rounds. Progress bars, TensorBoard and reports are off.

JPEG files are 8,000 crops of scikit-learn's two photographs, 400 by 300 pixels and more. All other images are random
numbers; [the CIFAR-10 speed run](cifar10-speedrun.md) compares accuracy.

Paceline keeps freed memory ([decision 69](decisions/0069-start-up-and-memory.md)). It decodes
only the visible part of a JPEG file, and augments images in memory by batches. The others use torchvision's transforms
per image, in one loader process for images in memory.

"By hand, tuned" also keeps freed memory (`MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=4611686018427387904`) and sets
DDP's options, as Paceline does; compare loop overhead with this column. [Measured](measured.md#training) has forty
pairs.

Measured on {cpu}, {cores} shared cores, PyTorch {torch} (Composer 0.32.1: 2.7.0), Python {python}, {date}.
{gpu} Two cores say little about many.

## Ratios to Paceline

Time or memory of each trainer divided by Paceline's, median of the rounds. Below 1, in **bold**, the other is better.
*Italics*: the rounds disagree. A cost that was negative in a round has no ratio.
"""
_AHEAD = """\
Trainers ahead in the median, with minimum, maximum and rounds won: ratios, or figures where one was 0 or less."""
_ROUNDS = """\
Medians of the rounds. Each round, load and revision: `benchmarks/results/peers-*`. What each measures:"""
_NO_GPU = "**Nothing here was measured on a GPU.**"
_WITH_GPU = "GPU figures are [below](#on-a-gpu)."
_GPU = """\
## On a GPU

Measured on {device} with {cores} cores, PyTorch {torch}, Python {python}, {date}. ResNet-50 in bf16, channels last,
compiled by all but the first, the loop of a tutorial; "by hand, tuned" adds the fused optimizer and cuDNN's autotuner.
"One batch" stays on the GPU, as in timm's benchmark; Paceline copies and normalizes it from main memory in each step.
"Packed" reads images reduced to at most 400 pixels, as its guide advises for slow processors.
"""
_AFTERWARDS = """\
## Measure it yourself

```console
.venv/bin/python benchmarks/peers/compare.py --help                    # lists workloads and contenders
.venv/bin/python benchmarks/peers/compare.py loop-4 --peers raw timm   # compares these, only prints
.venv/bin/python benchmarks/peers/compare.py all --rounds 5            # hours; with a GPU, its workloads
.venv/bin/python benchmarks/peers/publish.py                           # rewrites this page
```

The first call creates each contender's environment in the user's cache.
"""
_WHY = {
    "peak_mebibytes": """\
Paceline keeps freed memory for the next step, as the tuned loop does; the rest is libraries and records.""",
    "first_step_seconds": """\
Paceline first checks recipe and data, plans, and measures expected time ([decision
69](decisions/0069-start-up-and-memory.md)).""",
    "resumed_first_step_seconds": """\
Paceline also verifies every byte of the checkpoint.""",
    "saving_step_milliseconds": """\
[Decision 69](decisions/0069-start-up-and-memory.md) explains the cost of a save.""",
    "standstill_milliseconds": """\
Paceline copies the state, and the writing thread shares two cores with the next steps.""",
    "pause_milliseconds": """\
Paceline and the loops by hand also flush to disk, so that a power cut cannot lose the checkpoint ([decision
5](decisions/0005-checkpoints.md)).""",
}


@dataclass(frozen=True)
class Row:
    """One figure of one workload; ``costs`` are each contender's time or memory over ours: (median, least, most)."""

    key: str
    workload: str
    title: str
    unit: str
    costs: Mapping[str, tuple[float, float, float]]
    labels: Mapping[str, str]
    failed: Mapping[str, str]


def times_ours(rounds: Mapping[str, Sequence[Mapping[str, float]]], key: str) -> dict[str, list[float]]:
    """By contender: its figure over ours round by round; none if anybody's was nothing, or less, in some round."""
    values = {name: [each[key] for each in those] for name, those in rounds.items()}
    if min(map(min, values.values())) <= 0:
        return {}
    return {name: [one / own for one, own in zip(those, values[US], strict=True)] for name, those in values.items()}


def rows(results: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """All figures, in the order of the page."""
    found = []
    for workload in (name for name in (*ORDER, *ON_GPU) if name in results):
        result = results[workload]
        for key, figure in result["figures"].items():
            costs = {}
            for name, each in times_ours(result["rounds"], key).items():
                # Where more is better, the time it takes is one over it.
                taken = [1 / ratio for ratio in each] if figure["more_is_better"] else each
                costs[name] = (statistics.median(taken), min(taken), max(taken))
            if not costs:
                continue
            labels = {name: each["title"] for name, each in figure["contenders"].items()}
            found.append(Row(key, workload, result["title"], figure["title"], costs, labels, result["failed"]))
    return found


def newest() -> dict[str, dict[str, Any]]:
    """The newest result file of each workload."""
    found = {}
    for workload in (*ORDER, *ON_GPU):
        files = [(json.loads(path.read_text()), path.name) for path in RESULTS.glob(f"peers-{workload}_*.json")]
        if not files:
            continue
        found[workload], name = max(files, key=lambda each: (each[0]["facts"]["date"], each[1]))
        if US not in found[workload]["rounds"]:
            sys.exit(f"{name} has no figures of Paceline, beside which all others are told: measure again")
    return found


def page(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The page in Markdown."""
    here, there = ({name: results[name] for name in names if name in results} for names in (ORDER, ON_GPU))
    table = rows(here)
    gpu = _WITH_GPU if there else _NO_GPU
    lines = [*_INTRODUCTION.format(**_facts(here), gpu=gpu).splitlines(), "", *_ratios(table), ""]
    lines += ["## Where another is ahead", "", _AHEAD, "", *ahead(here), ""]
    lines += ["## In figures", "", *_in_figures(here)]
    if there:
        table = rows(there)
        lines += [*_GPU.format(**_facts(there)).splitlines(), "", *_ratios(table), ""]
        lines += ["Where another is ahead:", "", *ahead(there), "", *_in_figures(there)]
    return "\n".join([*lines, _AFTERWARDS])


def _ratios(table: Sequence[Row]) -> list[str]:
    """Each contender's time or memory over ours."""
    labels = _labels(table)
    others = [name for name in labels if name != US]
    lines = [f"| | {' | '.join(labels[name] for name in others)} |", "|---|" + "---|" * len(others)]
    for row in table:
        cells = " | ".join(_cell(row, name) for name in others)
        lines.append(f"| {_NAMES.get(row.workload, row.title)}: {_plain(row.unit)} | {cells} |")
    return lines


def _labels(table: Sequence[Row]) -> dict[str, str]:
    every = (*CONTENDERS, "paceline-packed", "paceline-dali", US)
    return {name: row.labels[name] for name in every for row in table if name in row.costs}


def ahead(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A line for each figure at which somebody takes less than we do; those without a ratio last."""
    table, lines = {(row.workload, row.key): row for row in rows(results)}, []
    for has_ratio in (True, False):
        for workload, result in results.items():
            for key, figure in result["figures"].items():
                row = table.get((workload, key))
                if (row is not None) != has_ratio or not (who := _quicker(result, key, row)):
                    continue
                ours = "" if has_ratio else f"Paceline {_spread(figure['contenders'][US]['values'])}."
                lines.append(_line(_NAMES.get(workload, result["title"]), figure["title"], who, key, ours))
    return lines or ["Nobody."]


def _quicker(result: Mapping[str, Any], key: str, row: Row | None) -> list[str]:
    """Who takes less, most of all first, and in how many rounds; our own other ways are not asked."""
    figure, found = result["figures"][key], []
    for name, each in figure["contenders"].items():
        if name.startswith(US):
            continue
        pairs = _rounds(result, key, name)
        # What may be about nothing, or less, has no ratio; but it has a difference within each round.
        margin = row.costs[name][0] - 1 if row else statistics.median(other - own for other, own in pairs)
        if margin < (-_ROUNDED if row else 0):
            cost = "{:.2f} ({:.2f} to {:.2f})".format(*row.costs[name]) if row else _spread(each["values"])
            rounds = f"{sum(other < own for other, own in pairs)} of {len(pairs)}"
            found.append((margin, f"{each['title']} {cost}, in {rounds}"))
    return [text for _, text in sorted(found)]


def _rounds(result: Mapping[str, Any], key: str, name: str) -> list[tuple[float, float]]:
    """Somebody's figure and ours in each round, the smaller the better."""
    sign = -1 if result["figures"][key]["more_is_better"] else 1
    rounds = result["rounds"]
    return [(sign * other[key], sign * own[key]) for other, own in zip(rounds[name], rounds[US], strict=True)]


def _line(title: str, unit: str, who: Sequence[str], key: str, more: str) -> str:
    return " ".join(filter(None, (f"- **{title}, {_plain(unit)}**: {'; '.join(who)}.", more, _WHY.get(key))))


def _spread(values: Mapping[str, float]) -> str:
    return f"{values['median']:.0f} ({values['minimum']:.0f} to {values['maximum']:.0f})"


def _facts(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What all were measured on, and until when; machines may differ: only a workload's own rounds are compared."""
    every = [result["facts"] for result in results.values()]
    for key in ("cores", "torch", "python", "device"):
        if len({each[key] for each in every}) > 1:
            sys.exit(f"the result files differ in {key}: measure them on machines that are alike")
    cpus = " and ".join(dict.fromkeys(each["cpu"] for each in every))
    dates = sorted({each["date"] for each in every})
    return {**every[0], "cpu": cpus, "date": " to ".join(dict.fromkeys((dates[0], dates[-1])))}


def _plain(unit: str) -> str:
    return "time for the same images" if unit.startswith("images/s") else unit


def _cell(row: Row, name: str) -> str:
    if name not in row.costs:
        return "failed" if name in row.failed else "—"
    middle, least, most = row.costs[name]
    marks = "**" * (round(middle, 2) < 1) + "*" * (least < 1 < most)
    return f"{marks}{middle:.2f}{marks}"


def _in_figures(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the table of medians, what failed, and where each round is."""
    titles = {name: each["title"] for result in results.values() for name, each in _contenders(result).items()}
    names = [US, *(name for name in titles if name != US)]
    lines = [f"| | {' | '.join(titles[name] for name in names)} |", "|---|" + "---|" * len(names)]
    for workload, result in results.items():
        for figure in result["figures"].values():
            values = {name: each["values"]["median"] for name, each in figure["contenders"].items()}
            cells = " | ".join(_number(values[name]) if name in values else "—" for name in names)
            lines.append(f"| {_NAMES.get(workload, result['title'])}: {figure['title']} | {cells} |")
    lines.append("")
    for workload, result in results.items():
        for name, why in result["failed"].items():
            lines += [f"{name} failed at {workload}: {why.splitlines()[0]}", ""]
    lines += [_ROUNDS, ""]
    return [*lines, *(f"- {_NAMES[name]}: {each['title']}" for name, each in results.items() if name in _NAMES), ""]


def _contenders(result: Mapping[str, Any]) -> Mapping[str, Any]:
    return next(iter(result["figures"].values()))["contenders"]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def main() -> None:
    """Write, or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if something would change")
    options = parser.parse_args()
    results = newest()
    if not results and options.check and not PAGE.exists():
        return
    if not results:
        sys.exit("benchmarks/results holds no peers-*.json yet: run benchmarks/peers/compare.py first")
    if not options.check:
        PAGE.write_text(page(results))
        print(PAGE.relative_to(ROOT))
    elif not PAGE.exists() or PAGE.read_text() != page(results):
        sys.exit(f"{PAGE.relative_to(ROOT)} is not what the result files say: run benchmarks/peers/publish.py")


if __name__ == "__main__":
    main()
