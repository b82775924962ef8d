"""The best number of loader processes for a model on this machine, measured once and cached.

The trainer measures it (``trainer/feeding.py``); this module stores the result for planning.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.data.image.decode import describe_decoder
from paceline.host.machine import available_cores, cache_folder, cpu_name
from paceline.host.world import World
from paceline.parsing.files import remember as write_down
from paceline.parsing.plain_text import load_json
from paceline.recipe.load import to_tree
from paceline.recipe.schema import Recipe

# Fewer processes count as equally good within this margin, since each of them takes memory.
_AS_GOOD = 0.98
_FAILURE_SECONDS = 600.0


@dataclass(frozen=True)
class FeedRates:
    """A measurement.

    Attributes:
        rates: Training throughput in images per second, by number of loader processes.
        alone: Images per second of the model without waiting for data.
    """

    rates: dict[int, float]
    alone: float

    @property
    def best(self) -> int:
        """The smallest number of processes within the margin of the best rate."""
        most = max(self.rates.values())
        return min(workers for workers, rate in self.rates.items() if rate >= _AS_GOOD * most)

    def __str__(self) -> str:
        table = ", ".join(f"{workers}: {rate:,.0f}" for workers, rate in sorted(self.rates.items()))
        return f"measured here in images per second: {table}; the model alone: {self.alone:,.0f}"


def remembered(recipe: Recipe, world: World) -> FeedRates | None:
    """Return the measurement for such runs; None if there is none, it failed, or several processes train."""
    return _read(_path(recipe))[0] if world.world_size == 1 else None


def needs_measuring(recipe: Recipe) -> bool:
    """Whether to measure: nothing is cached, no recent attempt failed, and the result could be stored."""
    path = _path(recipe)
    cached, failed_at = _read(path)
    if cached is not None or time.time() - failed_at <= _FAILURE_SECONDS:
        return False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            return True
    except OSError:
        return False


def remember(recipe: Recipe, rates: FeedRates | None, *, reason: str = "") -> None:
    """Cache a measurement or the reason why it failed; does nothing if the cache is not writable."""
    path = _path(recipe)
    tree = {"rates": rates.rates, "alone": rates.alone} if rates is not None else {"failed": reason}
    write_down(path, json.dumps({**tree, "time": time.time()}).encode())


def _path(recipe: Recipe) -> Path:
    """Return the cache file for runs with the same data, preprocessing, model and machine."""
    data = {key: value for key, value in to_tree(recipe)["data"].items() if key != "mix"}
    if data.get("path") is not None:
        data["path"] = str(Path(data["path"]).expanduser().absolute())
    same = {
        "task": recipe.task,
        "data": data,
        "model": to_tree(recipe)["model"],
        "batch": to_tree(recipe)["batch"],
        "precision": recipe.train.precision,
        "device": recipe.parallel.device,
        "threads": [recipe.parallel.threads, os.environ.get("OMP_NUM_THREADS")],
        "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "machine": [cpu_name(), available_cores()],
        "software": [torch.__version__, describe_decoder()],
    }
    digest = hashlib.sha256(json.dumps(same, sort_keys=True, default=str).encode()).hexdigest()
    return cache_folder() / "feeding" / f"{digest[:32]}.json"


def _read(path: Path) -> tuple[FeedRates | None, float]:
    """Read a cached measurement and the time of a failure; None and 0 if the file is missing or damaged."""
    try:
        tree = load_json(path.read_text(encoding="utf-8"))
        if "failed" in tree:
            return None, float(tree["time"])
        rates = {int(workers): float(rate) for workers, rate in tree["rates"].items()}
        return FeedRates(rates, float(tree["alone"])) if rates else None, 0.0
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None, 0.0
