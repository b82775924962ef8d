"""How well are the rates of several GPUs predicted from one's? Published tables, row by row.

python benchmarks/scaling.py
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from hardware import write_result
from scaling_tables import CONVNETS, GOYAL_EFFICIENCY, GOYAL_STEP_SECONDS, LATER, SEEN, SHAPES, UNSEEN, Published

from paceline.host.devices import find_device
from paceline.recipe.load import load_recipe
from paceline_advisor.clusters import CLUSTERS
from paceline_advisor.formulas.parallel_step import (
    HOST_SECONDS,
    Gradient,
    Host,
    Network,
    OneDevice,
    ParallelConfig,
    StepPrediction,
    Unit,
    predict,
)
from paceline_advisor.scaling.network import describe
from paceline_advisor.scaling.study import LOOPS, fabric_of

# How often a step's host waits for its device, in fp32 and with a loss scaler: read in the loops, not fitted. Eager
# PyTorch waits for the loss or a synchronize in each step, and once more for the scaler; TensorFlow's session hands
# back the loss; MXNet's engine and Paddle's static graph wait for nothing.
WAITS = {"PyTorch": (1, 2), "TensorFlow": (1, 1), "MXNet": (0, 0), "Paddle": (0, 0)}
# What two constants are changed to, to see how much hangs on them.
HOSTS = (10e-6, 15e-6, 22e-6, 30e-6, 40e-6, 50e-6)
DECODINGS = (1.5e-3, 2.65e-3, 4e-3, 4.8e-3, 6e-3)
DECODES = ("PyTorch ConvNets", "PyTorch EfficientNet", "TensorFlow 2 EfficientNet")


@cache
def network_of(name: str) -> Network:
    """The network of a recipe, or one of as many equal tensors."""
    if name not in SHAPES:
        return describe(load_recipe(name).recipe, samples=1).network
    tensors, parameters = SHAPES[name].tensors, SHAPES[name].parameters
    size = parameters * 4 / tensors
    return Network(
        gradients=tuple(Gradient(size, (index + 1) / tensors) for index in range(tensors)),
        units=(Unit(parameters * 4, parameters * 4, 1.0),),
    )


def host_of(row: Published) -> Host:
    """What the loop of a table asks of its host."""
    waits = WAITS[row.table.split()[0]][row.precision == "fp16"]
    loop = LOOPS["nvidia-convnets"]
    decodes = row.table in DECODES
    cluster = CLUSTERS[row.cluster]
    return Host(
        waits=waits,
        seconds_per_sample=loop.seconds_per_sample if decodes else 0.0,
        loaders_per_device=loop.loaders_per_device[row.cluster] if row.table.startswith("PyTorch") else None,
        cores_per_device=cluster.cores_per_device,
    )


def predicted(row: Published, **changed: float) -> StepPrediction:
    """What is predicted of a row by one GPU's rate and the cluster's datasheet, with constants changed if asked for."""
    cluster = CLUSTERS[row.cluster]
    device = None if cluster.device is None else find_device(cluster.device).multiprocessors
    variant = ParallelConfig(strategy="ddp", micro_batch=row.batch, passes=row.passes, units_per_device=device)
    one = OneDevice(seconds=row.batch / row.one, samples=row.batch)
    host = host_of(row)
    if host.seconds_per_sample == 0:
        changed.pop("seconds_per_sample", None)
    return predict(network_of(row.network), one, fabric_of(cluster, row.gpus), replace(host, **changed), variant)


def compared_row(row: Published) -> dict[str, Any]:
    """A row with what is predicted of it."""
    found = predicted(row)
    low, high = found.samples / found.high_seconds, found.samples / found.low_seconds
    return {
        **vars(row),
        "predicted": found.rate,
        "error": found.rate / row.rate - 1,
        "range": [low, high],
        "in_range": low <= row.rate <= high,
        "limit": found.limit,
        "published_efficiency": row.rate / row.one / row.gpus,
    }


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean absolute and largest error, and how many lie in their range."""
    errors = [abs(row["error"]) for row in rows]
    linear = [abs(row["one"] * row["gpus"] / row["rate"] - 1) for row in rows]
    return {
        "rows": len(rows),
        "mean_absolute_error": statistics.mean(errors),
        "largest_error": max(errors),
        "in_range": sum(row["in_range"] for row in rows),
        "mean_absolute_error_of_linear_scaling": statistics.mean(linear),
    }


def errors(rows: Sequence[Published], **changed: float) -> list[float]:
    """How far rows are missed, relative to what was published."""
    return [abs(predicted(row, **changed).rate / row.rate - 1) for row in rows]


def sensitivity() -> list[dict[str, float]]:
    """Mean and largest error on the eighteen rows, if two constants were others."""
    return [
        {"host_seconds": host, "decoding_seconds": decoding, "mean": statistics.mean(found), "largest": max(found)}
        for host in HOSTS
        for decoding in DECODINGS
        if (found := errors(CONVNETS, seconds_per_tensor=host, seconds_per_sample=decoding))
    ]


def fitted_elsewhere() -> list[dict[str, Any]]:
    """Each network by constants that were fitted to the two others: what looking at eight GPUs would be worth."""
    found = []
    for network in dict.fromkeys(row.network for row in CONVNETS):
        own = [row for row in CONVNETS if row.network == network]
        others = [row for row in CONVNETS if row.network != network]
        host, decoding = min(
            ((host, decoding) for host in HOSTS for decoding in DECODINGS),
            key=lambda each: statistics.mean(errors(others, seconds_per_tensor=each[0], seconds_per_sample=each[1])),
        )
        missed = errors(own, seconds_per_tensor=host, seconds_per_sample=decoding)
        chosen = {"host_seconds": host, "decoding_seconds": decoding}
        found.append({"network": network, **chosen, "mean": statistics.mean(missed), "largest": max(missed)})
    return found


def goyal() -> list[dict[str, float]]:
    """Efficiency beside one server of 8 GPUs, predicted and published."""
    cluster, network = CLUSTERS["big-basin"], network_of("resnet50")
    one = OneDevice(seconds=GOYAL_STEP_SECONDS, samples=32)
    variant = ParallelConfig(strategy="ddp", micro_batch=32)

    def step(gpus: int) -> float:
        return predict(network, one, fabric_of(cluster, gpus), Host(), variant).seconds

    return [
        {"gpus": gpus, "predicted": step(8) / step(gpus), "published": published}
        for gpus, published in GOYAL_EFFICIENCY.items()
    ]


def main() -> None:
    """Judge every table, and write the result."""
    groups = {"convnets": CONVNETS, "seen": SEEN, "unseen": UNSEEN, "later": LATER}
    result: dict[str, Any] = {"host_seconds": HOST_SECONDS}
    lines = ["Predicted from one GPU's published rate and the cluster's datasheet, against the published rate.", ""]
    for name, rows in groups.items():
        found = [compared_row(row) for row in rows]
        result[name] = {**summary(found), "each": found}
        lines += [f"## {name}", "", *_summary_lines(found), "", *_row_lines(found), ""]
    result |= {"sensitivity": sensitivity(), "fitted_elsewhere": fitted_elsewhere(), "goyal": goyal()}
    lines += ["## The eighteen rows of the convnets, if two constants were others", ""]
    lines += ["| host work per tensor | decoding | mean error | largest |", "|---|---|---|---|"]
    lines += [
        f"| {each['host_seconds'] * 1e6:.0f} µs | {each['decoding_seconds'] * 1e3:.1f} ms | {each['mean']:.1%} | "
        f"{each['largest']:.1%} |"
        for each in result["sensitivity"]
    ]
    lines += ["", "## Each of their networks, by these constants fitted to the two others", ""]
    lines += [
        f"- {each['network']}: {each['host_seconds'] * 1e6:.0f} µs and {each['decoding_seconds'] * 1e3:.1f} ms: mean "
        f"error {each['mean']:.1%}, largest {each['largest']:.1%}"
        for each in result["fitted_elsewhere"]
    ]
    lines.append("")
    lines += ["## Goyal et al. 2017, beside 8 GPUs", ""]
    lines += [
        f"- {each['gpus']} GPUs: predicted {each['predicted']:.3f}, published {each['published']:.2f}"
        for each in result["goyal"]
    ]
    print("\n".join(lines))
    print(write_result("scaling-published", result, lines))


def _summary_lines(found: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        "| table | rows | mean error | largest | in range | linear scaling's mean error |",
        "|---|---|---|---|---|---|",
    ]
    for table in [*dict.fromkeys(row["table"] for row in found), "all"]:
        each = summary([row for row in found if table in ("all", row["table"])])
        lines.append(
            f"| {table} | {each['rows']} | {each['mean_absolute_error']:.1%} | {each['largest_error']:.1%} | "
            f"{each['in_range']} | {each['mean_absolute_error_of_linear_scaling']:.1%} |"
        )
    return lines


def _row_lines(found: Sequence[dict[str, Any]]) -> list[str]:
    lines = ["| table | network | cluster | numbers | batch | GPUs | published | predicted | error | limit |"]
    lines.append("|---|---|---|---|---|---|---|---|---|---|")
    lines += [
        f"| {row['table']} | {row['network']} | {row['cluster']} | {row['precision']} | {row['batch']} x "
        f"{row['passes']} | {row['gpus']} | {row['rate']:,.0f} | {row['predicted']:,.0f} | {row['error']:+.1%} | "
        f"{row['limit']} |"
        for row in found
    ]
    return lines


if __name__ == "__main__":
    main()
