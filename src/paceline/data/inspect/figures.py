"""Classes, sizes, brightness and what decoding costs: the numbers about a set of images."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.data.image.source import Ids
from paceline.data.inspect.gather import Gathered
from paceline.data.inspect.subject import Subject

# Processor time to decode an image, in milliseconds: where one bar of the histogram ends and the next begins.
EDGES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
_SLOWEST = 5


def class_counts(subject: Subject) -> dict[str, NDArray[np.int64]]:
    """Samples of each class, by split."""
    count = len(subject.dataset.classes)
    return {name: np.bincount(source.labels, minlength=count) for name, source in subject.splits.items()}


def class_figures(subject: Subject) -> dict[str, Any]:
    """How many samples each class has, and how unlike these are."""
    counts = class_counts(subject)
    train = counts["train"]
    smallest = int(train.min(initial=0)) if len(train) == 0 else int(train.min())
    largest = int(train.max(initial=0))
    return {
        "count": len(subject.dataset.classes),
        "smallest_train": smallest,
        "largest_train": largest,
        "imbalance": largest / smallest if smallest else None,
        "samples": {
            name: {split: int(each[index]) for split, each in counts.items()}
            for index, name in enumerate(subject.dataset.classes)
        },
    }


def size_figures(gathered: Gathered, read: Ids) -> dict[str, Any]:
    """Heights, widths, pixels and bytes of the images that can be read."""
    rows = gathered.rows[read]
    pixels = rows["height"].astype(np.int64) * rows["width"]
    measured = {"height": rows["height"], "width": rows["width"], "pixels": pixels, "file_bytes": rows["file_bytes"]}
    return {name: _quantiles(values) for name, values in measured.items()} if len(rows) else {}


def cost_figures(gathered: Gathered, read: Ids) -> dict[str, Any]:
    """What decoding costs: processor time per image, its histogram, the slowest files, and images/s of one core."""
    milliseconds = 1000.0 * gathered.rows["seconds"][read].astype(np.float64)
    if len(read) == 0:
        return {}
    counts = np.histogram(milliseconds, bins=[0.0, *EDGES, np.inf])[0]
    slowest = read[np.argsort(-milliseconds, kind="stable")[:_SLOWEST]]
    return {
        "cpu_ms_per_image": _quantiles(milliseconds),
        "images_per_second_per_core": 1000.0 / float(milliseconds.mean()),
        "histogram": [
            {"from_ms": low, "to_ms": high, "images": int(count)}
            for low, high, count in zip((0.0, *EDGES), (*EDGES, None), counts, strict=True)
        ],
        "slowest": [_slow(gathered, position) for position in slowest.tolist()],
    }


def _slow(gathered: Gathered, position: int) -> dict[str, Any]:
    row = gathered.rows[position]
    return {
        "path": gathered.samples.path(int(gathered.numbers[position])),
        "cpu_ms": 1000.0 * float(row["seconds"]),
        "width": int(row["width"]),
        "height": int(row["height"]),
        "file_bytes": int(row["file_bytes"]),
    }


def pixel_figures(subject: Subject, gathered: Gathered, read: Ids) -> dict[str, Any]:
    """Mean and deviation of each channel in [0, 1] over the training images, beside those that a run subtracts."""
    in_train = gathered.samples.split_of[gathered.numbers[read]] == 0
    rows = gathered.rows[read[in_train]]
    if len(rows) == 0:
        return {}
    channels = subject.dataset.channels
    mean = rows["mean"].astype(np.float64).mean(axis=0)[:channels]
    square = rows["square"].astype(np.float64).mean(axis=0)[:channels]
    return {
        "mean": mean.tolist(),
        "std": np.sqrt(np.maximum(square - mean**2, 0.0)).tolist(),
        "run_mean": list(subject.dataset.mean),
        "run_std": list(subject.dataset.std),
    }


def _quantiles(values: NDArray[Any]) -> dict[str, float]:
    low, middle, high = np.quantile(values, (0.05, 0.5, 0.95))
    return {
        "minimum": float(values.min()),
        "p5": float(low),
        "median": float(middle),
        "p95": float(high),
        "maximum": float(values.max()),
        "mean": float(values.mean(dtype=np.float64)),
    }
