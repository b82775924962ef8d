"""Latency and throughput of a trained network.

A query is a batch of decoded images in main memory. The time from there to the probabilities in main memory includes
the copy to the device, normalisation, the forward pass and the copy back. It excludes reading and decoding files.

The scenarios are those of MLPerf Inference, but not under its rules, which require at least ten minutes of each.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import torch

from paceline.checkpoint.hub_folder import is_hub_folder
from paceline.checkpoint.weights import read_weights
from paceline.command import Log
from paceline.data.batch import Normalize, Placement
from paceline.errors import PacelineError, RecipeError
from paceline.host.world import World
from paceline.inference.predict import load_predictor
from paceline.metrics.intervals import part_means, quantile, rate_interval
from paceline.plan.compute import resolve_precision
from paceline.plugins.references import is_code_trusted
from paceline.recipe.schema import Recipe
from paceline.trainer.network import build_network
from paceline.trainer.subject import Subject
from paceline_advisor import Json, frozen
from paceline_advisor.apply import with_values
from paceline_advisor.bench.energy import EnergyCounter
from paceline_advisor.commands import Bench

_WARM_QUERIES = 10
_WARM_SECONDS = 0.5
# The 99th percentile of fewer queries is their maximum.
_MIN_QUERIES = 100
# A slow network may answer fewer: its time limit is this multiple of the usual time.
_PATIENCE = 5
_PARTS = 10
_MULTI_STREAM = 8
_PERCENTS = (50, 90, 95, 99)
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)

Answer = Callable[[torch.Tensor], torch.Tensor]


@frozen
class _MeasuredNetwork:
    """A network that answers queries on one device.

    Attributes:
        answer: Probabilities of uint8 images, on the device.
        shape: Shape of an image: channels, height, width.
    """

    answer: Answer
    shape: tuple[int, int, int]
    device: torch.device
    precision: str

    def query(self, images: torch.Tensor) -> None:
        """Run a query, and wait for the answer."""
        self.send(images).cpu()

    def send(self, images: torch.Tensor) -> torch.Tensor:
        """Run a query without waiting, if the device is asynchronous."""
        dtype = _AUTOCAST.get(self.precision)
        autocast = contextlib.nullcontext() if dtype is None else torch.autocast(self.device.type, dtype=dtype)
        with torch.inference_mode(), autocast:
            return self.answer(images)

    def images(self, count: int) -> torch.Tensor:
        """Return random images: a network takes the same time for any input."""
        batch = torch.randint(
            0, 256, (count, *self.shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
        )
        return batch.pin_memory() if self.device.type == "cuda" else batch


def measure_latency(options: Bench, log: Log) -> tuple[str, Recipe, list[Json]]:
    """Measure latencies and throughput; return the name of the target, its recipe, and one row per measurement.

    Raises:
        PacelineError: If the target cannot be used.
    """
    target = Path(options.recipe)
    is_saved = target.exists() and (
        target.suffix == ".safetensors"
        or (target / "manifest.json").exists()
        or is_hub_folder(target)
        or any((target / "checkpoints").glob("step-*"))
    )
    if is_saved:
        if options.overrides:
            raise RecipeError(f"overrides change recipes, but '{target}' holds saved weights; leave them out.")
        saved = read_weights(target, options.weights)
        name, recipe = f"{target} ({saved.weights})", saved.recipe()
    else:
        loaded = options.load()
        name, recipe = loaded.name, loaded.recipe
    rows: list[Json] = []
    for device_name, precision in product(
        options.devices or (recipe.parallel.device,), options.precisions or (recipe.train.precision,)
    ):
        try:
            if precision not in ("auto", "fp32", *_AUTOCAST):
                raise RecipeError(f"{precision}: inference is measured in fp32, bf16 or fp16.")
            opened = Subject.open(with_values(recipe, {"parallel.device": device_name}), World(), "device")
            device = opened.device
            # Resolve auto as training does.
            resolved = resolve_precision(Recipe(), opened.machine) if precision == "auto" else precision
            if is_saved:
                predictor = load_predictor(target, weights=options.weights, trust_code=is_code_trusted(), device=device)
                answer: Answer = predictor.probabilities
                shape = predictor.shape
            else:
                answer, shape = _untrained(recipe, opened.placement)
        except PacelineError as error:
            if options.devices or options.precisions:
                rows.append(_row(device_name, precision, "batch", None) | {"trouble": str(error)})
                continue
            raise
        rows += _scenarios(
            _MeasuredNetwork(answer=answer, shape=shape, device=device, precision=resolved), options, log
        )
    return name, recipe, rows


def _untrained(recipe: Recipe, placement: Placement) -> tuple[Answer, tuple[int, int, int]]:
    """Return a recipe's network with its initial weights, whose values do not affect the timing."""
    subject = Subject.open(recipe, World(), "task")
    task, facts = subject.task, subject.data.description
    missing = [key for key in ("channels", "evaluation_size", "mean", "std") if key not in facts]
    if missing:
        raise RecipeError(
            f"task={recipe.task} gives no {missing[0]} for its data; bench --inference measures image networks."
        )
    network = build_network(recipe, task, placement)[0].eval()
    answers = task.evaluated(network)
    normalize = Normalize(tuple(facts["mean"]), tuple(facts["std"]), placement)

    def answer(images: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = answers(normalize(images.to(placement.device, non_blocking=True))).float().softmax(dim=1)
        return found

    size = int(facts["evaluation_size"])
    return answer, (int(facts["channels"]), size, size)


def _scenarios(subject: _MeasuredNetwork, options: Bench, log: Log) -> Iterator[Json]:
    fastest, best_size = 0.0, 0
    for size in options.batch_sizes or BATCH_SIZES:
        log(f"{subject.device.type} {subject.precision}: queries of {size}")
        row = _measured(subject, "batch", size, options.seconds)
        yield row
        rate = row["samples_per_second"]
        if rate is not None and rate["middle"] > fastest:
            fastest, best_size = rate["middle"], size
    log(f"{subject.device.type} {subject.precision}: single stream, multi stream, offline")
    yield _measured(subject, "single stream", 1, options.seconds)
    yield _measured(subject, "multi stream", _MULTI_STREAM, options.seconds)
    if best_size:
        yield _measured(subject, "offline", best_size, options.seconds)


def _measured(subject: _MeasuredNetwork, scenario: str, size: int, seconds: float) -> Json:
    on_gpu = subject.device.type == "cuda"
    row = _row(subject.device.type, subject.precision, scenario, size)
    try:
        images = subject.images(size)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(subject.device)
        _queries(subject, images, _WARM_QUERIES, _WARM_SECONDS)
        energy = EnergyCounter(subject.device)
        before = energy.joules()
        if scenario == "offline":
            times, each = _offline(subject, images, seconds)
        else:
            times, each = _queries(subject, images, _MIN_QUERIES, seconds), 1
        after = energy.joules()
    except (RuntimeError, MemoryError) as error:
        if on_gpu:
            torch.cuda.empty_cache()
        reason = str(error).strip().splitlines() or [type(error).__name__]
        return row | {"trouble": reason[0]}
    # Consecutive queries are correlated: the interval is computed from means over parts.
    means = [part / size for part in part_means(times)]
    row |= {"samples_per_second": rate_interval(means).to_json(), "times": [means], "queries": len(times)}
    if scenario != "offline":
        percents = {f"p{percent}": quantile(times, percent / 100) for percent in _PERCENTS}
        row["latency_seconds"] = {"mean": statistics.fmean(times), **percents}
    row["peak_memory_bytes"] = torch.cuda.max_memory_allocated(subject.device) if on_gpu else None
    used = None if before is None or after is None else after - before
    row["joules_per_sample"] = None if used is None else used / (len(times) * each * size)
    row["no_energy"] = energy.unavailable_reason or None
    return row


def _row(device: str, precision: str, scenario: str, size: int | None) -> Json:
    return {
        "device": device,
        "precision": precision,
        "scenario": scenario,
        "batch_size": size,
        "trouble": None,
        "samples_per_second": None,
        "times": [],
    }


def _queries(subject: _MeasuredNetwork, images: torch.Tensor, fewest: int, seconds: float) -> list[float]:
    """Return the seconds of consecutive queries, for a given time and, unless that takes far longer, number."""
    times: list[float] = []
    start_time = last = time.perf_counter()
    while (
        len(times) < 2
        or last - start_time < seconds
        or (len(times) < fewest and last - start_time < _PATIENCE * seconds)
    ):
        subject.query(images)
        now = time.perf_counter()
        times.append(now - last)
        last = now
    return times


def _offline(subject: _MeasuredNetwork, images: torch.Tensor, seconds: float) -> tuple[list[float], int]:
    """Return the mean seconds per batch of each part, if all batches are available from the start.

    Also returns the number of batches in a part.
    """
    start_time = time.perf_counter()
    subject.query(images)
    batches = max(2, round(seconds / _PARTS / (time.perf_counter() - start_time)))
    times = []
    for _ in range(_PARTS):
        start_time = time.perf_counter()
        # Answers are fetched once at the end, so that the device never waits for the host in between.
        kept = [subject.send(images) for _ in range(batches)]
        torch.stack(kept).cpu()
        times.append((time.perf_counter() - start_time) / batches)
    return times, batches
