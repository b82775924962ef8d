"""Tasks: data, network, loss, metrics and predictions; and what a task or data set of your own needs, at one place.

Names are loaded on first use, as those of the package ``paceline``.
"""

from __future__ import annotations

import importlib
from typing import Any

HOMES = {
    "Answers": "paceline.metrics.answers",
    "ArraySource": "paceline.data.image.source",
    "Batch": "paceline.data.batch",
    "BrokenImageError": "paceline.data.image.decode",
    "Collector": "paceline.metrics.accumulator",
    "Data": "paceline.recipe.data",
    "DataFacts": "paceline.plan",
    "DatasetRequest": "paceline.data.image.dataset",
    "FileSource": "paceline.data.image.source",
    "ImageDataset": "paceline.data.image.datasets",
    "Metric": "paceline.metrics.accumulator",
    "Model": "paceline.tasks.task",
    "Pipeline": "paceline.data.pipeline",
    "Placement": "paceline.data.pipeline",
    "Probe": "paceline.data.image.dataset",
    "SampleSlice": "paceline.data.slices",
    "SimplePipeline": "paceline.data.pipeline",
    "StoredImages": "paceline.data.image.dataset",
    "Task": "paceline.tasks.task",
    "all_but": "paceline.recipe.unused",
    "dataset": "paceline.plugins.dataset_registry",
    "epoch_order": "paceline.data.order",
    "in_splits": "paceline.data.image.dataset",
    "read_digits": "paceline.data.image.sets.digits",
    "read_weights": "paceline.checkpoint.weights",
    "reading_threads": "paceline.data.pipeline",
    "uniforms": "paceline.data.random_draws",
}

__all__ = list(HOMES)


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'paceline.tasks' has no attribute '{name}'")
    value = globals()[name] = getattr(importlib.import_module(HOMES[name]), name)
    return value
