"""What `paceline.fit` finds out about a loss and its samples: whether it is a mean, and which sample is wrong."""

from __future__ import annotations

import hashlib
import math
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.data.batch import Batch, mapped, select_rows, tensors_in
from paceline.data.objects.keyed import KeyedReader, kept_generators
from paceline.data.objects.purity import bytes_of
from paceline.data.objects.samples import Samples
from paceline.data.slices import SampleWeights, micro_batch
from paceline.errors import RunDirectoryError, TrainingError
from paceline.records.reader import read_plan, read_recipe
from paceline.records.run_directory import RunDirectory
from paceline.tasks.given_objects import Objects

_CHUNK = 256
_SECONDS = 5.0
_NOT_FINITE = re.compile(r"\b(nan|inf|infinite)\b", re.IGNORECASE)
_OTHER_DATA = re.compile("the data of (.*) has changed since .* restore them")
_IGNORED = -100  # torch's default of ignore_index


def is_mean(loss: Callable[[Any, Batch], Tensor], network: nn.Module, batch: Batch, weights: SampleWeights) -> bool:
    """Whether a batch's loss is the weighted mean of its samples' losses, computed on random outputs.

    A loss with class weights or ignored targets is not, nor is a sum. Random outputs cost no passes of the network, and
    differ where those of a new network may all be alike. True if it cannot be told: the loss draws random numbers, or
    needs more of the network than its outputs.
    """
    count, found = len(batch.ids), list[Any]()
    network.register_forward_hook(lambda _, __, outputs: found.append(outputs))
    with kept_generators(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            loss(network, _rows(batch, [0, 1]))
            [outputs] = found
            draws = torch.Generator().manual_seed(0)
            outputs = mapped(lambda each: _random(each, count, draws), outputs)

            def loss_of(rows: list[int], seed: int = 0) -> float:
                torch.manual_seed(seed)
                return float(loss(lambda *_, **__: select_rows(outputs, rows, size=count), _rows(batch, rows)))

            everything = list(range(count))
            whole = loss_of(everything)
            if not math.isfinite(whole) or loss_of(everything, seed=1) != whole:
                return True
            mean = float(np.average([loss_of([row]) for row in everything], weights=weights))
        except Exception:  # noqa: BLE001  # a user's loss may fail on single samples in any way
            return True
    return math.isclose(whole, mean, rel_tol=1e-4, abs_tol=1e-6)


def _random(output: Tensor, count: int, draws: torch.Generator) -> Tensor:
    """Return probabilities, which are valid logits too, instead of the outputs for two samples."""
    if not output.is_floating_point() or not output.ndim or len(output) != 2:
        return output
    return torch.rand((count, *output.shape[1:]), generator=draws).to(output.dtype)


def _rows(batch: Batch, rows: list[int]) -> Batch:
    inputs, targets = (select_rows(each, rows, size=len(batch.ids)) for each in (batch.inputs, batch.targets))
    return Batch(inputs, targets, batch.ids[rows], batch.slice)


def has_class_weights(loss: Any) -> bool:
    """Whether a loss of torch divides by the weights of a batch's classes."""
    return isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) and loss.weight is not None


def wrong_class(outputs: Any, batch: Batch, samples: Samples) -> str:
    """Name the first sample whose target is not a class of the outputs, as the end of a sentence, if there is one."""
    targets = batch.targets
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor) or outputs.device.type != "cpu":
        return ""
    is_classes = not targets.is_floating_point() and outputs.shape[:1] + outputs.shape[2:] == targets.shape
    if not is_classes or outputs.ndim < 2 or len(targets) != len(batch.ids):
        return ""
    classes, flat = outputs.shape[1], targets.flatten(1) if targets.ndim > 1 else targets[:, None]
    wrong = ((flat < 0) & (flat != _IGNORED)) | (flat >= classes)
    for row in wrong.any(dim=1).nonzero().flatten()[:1].tolist():
        target = int(flat[row][wrong[row]][0])
        return f"; {samples.path(int(batch.ids[row]))} has the target {target}, and the outputs have {classes} classes"
    return ""


@contextmanager
def naming_samples(objects: Objects) -> Iterator[None]:
    """Name the first sample with infinite or nan numbers in an error about such a loss."""
    try:
        yield
    except TrainingError as error:
        text = str(error)
        samples = objects.held_out if "held-out" in text else objects.train_set
        if samples is None or not _NOT_FINITE.search(text):
            raise
        ids = error.value if isinstance(error.value, list) else range(len(samples))
        if (wrong := first_not_finite(samples, ids)) is not None:
            found = f"{samples.path(wrong)} holds nan or infinity; if it should not, correct it, or leave it out."
            error.args = (f"{text.rstrip()} {found}",)
        raise


@contextmanager
def naming_changes(objects: Objects, run_dir: str | Path | None) -> Iterator[None]:
    """Say in an error about other data than a run's which of the data sets differs, and in what."""
    try:
        yield
    except RunDirectoryError as error:
        if error.key != "digest" or run_dir is None:
            raise
        run = RunDirectory(Path(run_dir))
        was, seed = read_plan(run)["data"], int(read_recipe(run).get("seed", 0))
        old, new = (str(each or "").split("-") for each in (was.get("digest"), error.value))
        found = {}
        for place, samples in enumerate(filter(None, (objects.train_set, objects.held_out))):
            if old[place : place + 1] != new[place : place + 1]:
                found[samples.role] = _change(samples, was, seed)
        if objects.held_out is None and len(old) > 1:
            found["held_out"] = f"{was['samples'][1]} samples then, none now"
        changed = " and ".join(f"{role} ({what})" for role, what in found.items())
        error.args = (_OTHER_DATA.sub(rf"\1 had another {changed}; give it again", str(error)),)
        error.key = next(iter(found), error.key)
        raise


def _change(samples: Samples, was: Mapping[str, Any], seed: int) -> str:
    """Return in what samples differ from those that a run's plan describes."""
    counts = dict(zip(("train_set", "held_out"), was["samples"], strict=False))
    if counts.get(samples.role) != len(samples):
        return f"{counts.get(samples.role, 0)} samples then, {len(samples)} now"
    old, new = was.get("contents", {}).get(samples.role, {}), contents_of(samples, seed)
    different = next((each for each in new if old.get(each) != new[each]), None)
    return "other content" if different is None else f"other content, such as that of {samples.path(int(different))}"


def contents_of(samples: Samples, seed: int) -> dict[str, str]:
    """Return digests of the first, middle and last sample of the first epoch, by index."""
    reader = KeyedReader(samples, seed=seed, training=samples.role == "train_set")
    with kept_generators():
        chosen = sorted({0, len(samples) // 2, len(samples) - 1})
        return {str(each): hashlib.sha256(bytes_of(reader.read(each, 0))).hexdigest() for each in chosen}


def first_not_finite(samples: Samples, ids: Sequence[int]) -> int | None:
    """Return the first sample that holds nan or infinity, among those that can be read within a few seconds."""
    reader = KeyedReader(samples, seed=0, training=False)

    def is_finite(part: Any) -> bool:
        read = reader[micro_batch(part)]
        numbers = tensors_in(read.inputs) if isinstance(read, Batch) else iter(())
        return all(bool(each.isfinite().all()) for each in numbers)

    size = 1 if samples.columns is None else _CHUNK  # one by one, where each may be slow to read
    end = time.monotonic() + _SECONDS
    for first in range(0, len(ids), size):
        part = np.array(ids[first : first + size], dtype=np.int64)
        if not is_finite(part):
            return next((int(each) for each in part if not is_finite(each[None])), None)
        if time.monotonic() > end:
            break
    return None
