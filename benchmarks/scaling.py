"""Predict published rates of several GPUs from one GPU's, each family of tables by constants fitted to the others.

python benchmarks/scaling.py
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from hardware import write_result
from numpy.typing import NDArray
from scaling_tables import (
    CONVNETS,
    GOYAL_EFFICIENCY,
    GOYAL_STEP_SECONDS,
    LATER,
    SEEN,
    SHAPES,
    UNSEEN,
    WIDE,
    Published,
)
from scipy.optimize import minimize

from paceline.host.devices import find_device
from paceline.recipe.load import load_recipe
from paceline_advisor.clusters import CLUSTERS
from paceline_advisor.formulas.parallel_step import (
    Calibration,
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

Floats = NDArray[np.float64]

# How often a step's host waits for its device, in fp32 and with a loss scaler: read in the loops, not fitted. Eager
# PyTorch waits for the loss or a synchronize in each step, and once more for the scaler; TensorFlow's session hands
# back the loss, and its loss scaler's condition is evaluated on the host; MXNet's engine and Paddle's static graph wait
# for nothing.
WAITS = {"PyTorch": (1, 2), "TensorFlow": (1, 2), "MXNet": (0, 0), "Paddle": (0, 0)}
DECODES = ("PyTorch ConvNets", "PyTorch EfficientNet", "TensorFlow 2 EfficientNet")
# Loops that decode and augment COCO's images on the host, with tf.data or Pillow; SSD300's uses DALI.
PREPARES_COCO = (
    *("PyTorch EfficientDet-D0", "PyTorch Mask R-CNN", "TensorFlow SSD320"),
    *("TensorFlow 2 EfficientDet-D0", "TensorFlow 2 Mask R-CNN"),
)
# Its rates on eight GPUs hardly depend on precision and batch: its input pipeline limits it, at an unpublished cost.
REFUSED = "TensorFlow 2 Mask R-CNN"
TARGET = 0.12
TARGETS = ("GNMT", "BioBERT", "SSD320", "U-Net", "WaveGlow", "EfficientDet")
MEMORY_RATES = (20e9, 30e9, 40e9, 60e9, 80e9, 120e9)
# Errors far below this count by their square, those far above by their size.
SOFT = 0.05


@dataclass(frozen=True)
class Fitted:
    """Constants fitted to some families.

    Attributes:
        calibration: Constants of the product.
        horovod_seconds: Time that Horovod's cycles add to each step of TensorFlow; the product has no such loop.
        coco_seconds: Time by which a step is longer for each sample of COCO that one core of a node prepares.
    """

    calibration: Calibration
    horovod_seconds: float
    coco_seconds: float


def _calibration(rate: float, sharing: float, host: float, update: float) -> Calibration:
    return Calibration(bytes_per_second=rate, sharing=sharing, host=host, update_bytes=update)


def family_of(row: Published) -> str:
    """Tables of one loop and network are one family, whatever the length of its sequences."""
    return row.table.split(",")[0]


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
    return Host(
        waits=waits,
        seconds_per_sample=loop.seconds_per_sample if row.table in DECODES else 0.0,
        loaders_per_device=loop.loaders_per_device[row.cluster] if row.table.startswith("PyTorch") else None,
        cores_per_device=CLUSTERS[row.cluster].cores_per_device,
    )


def loop_units(row: Published) -> tuple[float, float]:
    """Return how often a step has Horovod's cycles, and how many of COCO's samples each core of a node prepares."""
    samples = row.batch * row.passes * (family_of(row) in PREPARES_COCO)
    crowding = host_of(row).devices_per_core(row.gpus, CLUSTERS[row.cluster].devices_per_node)
    return float(row.table.startswith("TensorFlow")), samples * crowding


def predicted(row: Published, by: Fitted, factor: float = 1.0) -> StepPrediction:
    """What is predicted of a row by one GPU's rate and the cluster's datasheet."""
    cluster, network = CLUSTERS[row.cluster], network_of(row.network)
    device = None if cluster.device is None else find_device(cluster.device)
    config = ParallelConfig(
        strategy="ddp",
        micro_batch=row.batch,
        passes=row.passes,
        units_per_device=None if device is None else device.multiprocessors,
        parameters=sum(each.size_bytes for each in network.gradients) / 4,
        memory_bytes_per_second=None if device is None else device.bytes_per_second,
    )
    one = OneDevice(seconds=row.batch / row.one, samples=row.batch, passes=row.one_passes)
    horovod, coco = loop_units(row)
    host = replace(host_of(row), seconds_per_step=by.horovod_seconds * horovod + by.coco_seconds * coco)
    fabric = fabric_of(cluster, row.gpus)
    return predict(network, one, fabric, host, config, calibration=by.calibration, factor=factor)


class Fit:
    """The rows' costs per unit of each constant, in seconds; every family weighs the same."""

    def __init__(self, rows: Sequence[Published]) -> None:
        self.rows = rows
        self.families = np.array([family_of(row) for row in rows])
        self.weights = np.array([1 / (self.families == each).sum() for each in self.families])
        self.seconds = np.array([row.batch * row.passes * row.gpus / row.rate for row in rows])
        units = {
            rate: [predicted(row, Fitted(_calibration(rate, 1.0, 1.0, 1.0), 0.0, 0.0)).parts for row in rows]
            for rate in MEMORY_RATES
        }
        some = units[MEMORY_RATES[0]]
        self._fixed = {
            rate: np.array([each["computing"] + each["communication"] + each["waiting"] for each in parts])
            for rate, parts in units.items()
        }
        causes = [[each[cause] for each in some] for cause in ("sharing", "host", "update")]
        self._costs = np.stack([*causes, *zip(*map(loop_units, rows), strict=True)]).T
        supplies = [host_of(row).supply_per_second(row.gpus, CLUSTERS[row.cluster].devices_per_node) for row in rows]
        self._needed = np.array(
            [
                0.0 if supply is None else row.batch * row.passes * row.gpus / supply
                for row, supply in zip(rows, supplies, strict=True)
            ]
        )

    def of(self, used: NDArray[np.bool_]) -> Fitted:
        """Fit the constants to some rows."""

        def cost(logarithms: Floats, fixed: Floats) -> float:
            step = np.maximum(fixed + self._costs @ np.exp(logarithms), self._needed)[used]
            errors = np.log(step / self.seconds[used])
            return float((self.weights[used] * np.sqrt(errors**2 + SOFT**2)).sum())

        starts = np.log([0.3, 0.5, 100.0, 0.005, 0.01])
        bounds = [(start - 7, start + 3) for start in starts]
        found = {
            rate: minimize(cost, starts, (fixed,), method="L-BFGS-B", bounds=bounds)
            for rate, fixed in self._fixed.items()
        }
        rate = min(found, key=lambda each: float(found[each].fun))
        sharing, host, update, *of_loops = np.exp(found[rate].x).tolist()
        return Fitted(_calibration(rate, sharing, host, update), *of_loops)

    def quantiles(self, scores: Floats, used: NDArray[np.bool_]) -> tuple[float, float]:
        """Return the 5 and 95 % quantiles of some rows' scores."""
        order = np.argsort(scores[used])
        reached = np.cumsum(self.weights[used][order]) / self.weights[used].sum()
        low, high = (float(scores[used][order][int(np.searchsorted(reached, each))]) for each in (0.05, 0.95))
        return low, high


def left_out(fit: Fit) -> tuple[list[Fitted], Fitted]:
    """Return the constants for each row, fitted without its family and with a range from the other families."""
    names = list(dict.fromkeys(fit.families.tolist()))
    usable = fit.families != REFUSED
    by = {name: fit.of(usable & (fit.families != name)) for name in names}
    found = [predicted(row, by[name]) for row, name in zip(fit.rows, fit.families.tolist(), strict=True)]
    scores = np.array(
        [math.log(real / each.seconds) / each.doubt for real, each in zip(fit.seconds.tolist(), found, strict=True)]
    )

    def ranged(fitted: Fitted, used: NDArray[np.bool_]) -> Fitted:
        low, high = fit.quantiles(scores, used)
        return replace(fitted, calibration=replace(fitted.calibration, low=low, high=high))

    by = {name: ranged(fitted, usable & (fit.families != name)) for name, fitted in by.items()}
    return [by[name] for name in fit.families.tolist()], ranged(fit.of(usable), usable)


def compared_row(row: Published, found: StepPrediction) -> dict[str, Any]:
    """A row with what is predicted of it."""
    low, high = found.ends
    return {
        **asdict(row),
        "family": family_of(row),
        "predicted": found.rate,
        "error": found.rate / row.rate - 1,
        "range": [low, high],
        "in_range": low <= row.rate <= high,
        "limit": found.limit,
        "published_efficiency": row.rate / row.one / row.gpus,
    }


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Errors of some rows, and how many lie in their range."""
    errors = [row["error"] for row in rows]
    return {
        "rows": len(rows),
        "mean_absolute_error": statistics.mean(map(abs, errors)),
        "mean_signed_error": statistics.mean(errors),
        "largest_error": max(map(abs, errors)),
        "in_range": sum(row["in_range"] for row in rows),
        "share_in_range": statistics.mean(row["in_range"] for row in rows),
        "mean_absolute_error_of_linear_scaling": statistics.mean(
            abs(row["one"] * row["gpus"] / row["rate"] - 1) for row in rows
        ),
    }


def with_some_measured(rows: Sequence[Published], constants: Sequence[Fitted]) -> list[dict[str, Any]]:
    """Rows of more GPUs, predicted with the published rate of the fewest several GPUs of the same series."""
    series: dict[tuple[object, ...], list[int]] = {}
    for index, row in enumerate(rows):
        key = (row.table, row.network, row.cluster, row.precision, row.batch, row.one)
        series.setdefault(key, []).append(index)
    found = []
    for indices in series.values():
        fewest, *others = sorted(indices, key=lambda index: rows[index].gpus)
        factor = predicted(rows[fewest], constants[fewest]).factor_for(rows[fewest].rate)
        found += [compared_row(rows[each], predicted(rows[each], constants[each], factor)) for each in others]
    return found


def goyal(by: Fitted) -> list[dict[str, float]]:
    """Efficiency relative to one server of 8 GPUs, predicted and published."""
    cluster, network = CLUSTERS["big-basin"], network_of("resnet50")
    one = OneDevice(seconds=GOYAL_STEP_SECONDS, samples=32)
    variant = ParallelConfig(strategy="ddp", micro_batch=32)

    def step(gpus: int) -> float:
        return predict(network, one, fabric_of(cluster, gpus), Host(), variant, calibration=by.calibration).seconds

    return [
        {"gpus": gpus, "predicted": step(8) / step(gpus), "published": published}
        for gpus, published in GOYAL_EFFICIENCY.items()
    ]


def main() -> None:
    """Judge every family, and write the result."""
    fit = Fit([*CONVNETS, *SEEN, *UNSEEN, *LATER, *WIDE])
    constants, fitted = left_out(fit)
    each = [compared_row(row, predicted(row, by)) for row, by in zip(fit.rows, constants, strict=True)]
    kept = [row for row in each if row["family"] != REFUSED]
    families = [
        {"family": name, **summary([row for row in each if row["family"] == name])}
        for name in sorted({row["family"] for row in each})
    ]
    more = [row for row in with_some_measured(fit.rows, constants) if row["family"] != REFUSED]
    before = [row for row in kept if any(_same(row, other) for other in more)]
    result: dict[str, Any] = {
        "fitted": asdict(fitted),
        "all": summary(kept),
        "families_in_range": statistics.mean(one["share_in_range"] for one in families if one["family"] != REFUSED),
        "refused": REFUSED,
        "families": families,
        "with_some_measured": {"alone": summary(before), "calibrated": summary(more), "each": more},
        "goyal": goyal(fitted),
        "each": each,
    }
    lines = _lines(result)
    print("\n".join(lines))
    print(write_result("scaling-published", result, lines))


def _same(row: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(row[key] == other[key] for key in ("table", "network", "cluster", "precision", "batch", "one", "gpus"))


def _lines(result: dict[str, Any]) -> list[str]:
    every, more = result["all"], result["with_some_measured"]
    linear = every["mean_absolute_error_of_linear_scaling"]
    lines = [
        "Predicted from one GPU's published rate and the cluster's datasheet; constants and range from other families.",
        "",
        f"All but {REFUSED}: {_words(every)}.",
        "",
        f"Linear scaling: mean error {linear:.1%}. Mean share of a family in range: {result['families_in_range']:.1%}.",
        "",
        f"With one rate of several GPUs given: {_words(more['calibrated'])}; without it {_words(more['alone'])}.",
        "",
        f"Fitted to all: {result['fitted']}",
        "",
        "| family | rows | mean error | signed | largest | in range | linear scaling | at most 12 % |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in result["families"]:
        aimed = any(each in one["family"] for each in TARGETS)
        met = ("yes" if one["mean_absolute_error"] <= TARGET else "no") if aimed else ""
        shares = ("mean_absolute_error", "mean_signed_error", "largest_error")
        mean, signed, largest = (one[each] for each in shares)
        lines.append(
            f"| {one['family']} | {one['rows']} | {mean:.1%} | {signed:+.1%} | {largest:.1%} | {one['in_range']} | "
            f"{one['mean_absolute_error_of_linear_scaling']:.1%} | {met} |"
        )
    lines += [
        "",
        "| table | network | cluster | numbers | batch | GPUs | published | predicted | range | error | limit |",
    ]
    lines.append("|---|---|---|---|---|---|---|---|---|---|---|")
    lines += [
        f"| {row['table']} | {row['network']} | {row['cluster']} | {row['precision']} | {row['batch']} x "
        f"{row['passes']} | {row['gpus']} | {row['rate']:,.0f} | {row['predicted']:,.0f} | "
        f"{row['range'][0]:,.0f} to {row['range'][1]:,.0f} | {row['error']:+.1%} | {row['limit']} |"
        for row in result["each"]
    ]
    lines += ["", "## Goyal et al. 2017, relative to 8 GPUs", ""]
    lines += [
        f"- {each['gpus']} GPUs: predicted {each['predicted']:.3f}, published {each['published']:.2f}"
        for each in result["goyal"]
    ]
    return lines


def _words(found: dict[str, Any]) -> str:
    mean, signed = found["mean_absolute_error"], found["mean_signed_error"]
    inside = f"{found['in_range']} in range ({found['share_in_range']:.1%})"
    return f"{found['rows']} rows, mean error {mean:.1%}, signed {signed:+.1%}, {inside}"


if __name__ == "__main__":
    main()
