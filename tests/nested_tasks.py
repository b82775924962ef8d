"""Two tasks that are no images: ragged sequences in dicts, and lists of tensors of unequal shapes.

Named in recipes as ``nested_tasks:Sequences`` and ``nested_tasks:Boxes``; this folder must then be importable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

import paceline
from paceline.data.batch import Batch
from paceline.data.pipeline import Pipeline, Placement, SimplePipeline
from paceline.data.random_draws import uniforms
from paceline.data.slices import SampleSlice, SampleWeights
from paceline.host.world import World
from paceline.metrics.accumulator import Collector, Metric
from paceline.plan import DataFacts
from paceline.recipe.unused import all_but
from paceline.tasks.task import Model

RECIPES = {
    name: {
        "task": f"nested_tasks:{name}",
        "data": {"dataset": "of its own"},
        "batch": {"global_size": 8, "micro_size": 4},
        "optimizer": {"name": "adamw", "lr": 0.02},
        "schedule": {"name": "constant"},
        "train": {"duration": "30 steps", "precision": "fp32"},
        "evaluate": {"every": "10 steps", "batch_size": 4},
        "checkpoint": {"every": "10 steps", "keep": 2},
        "parallel": {"device": "cpu", "threads": 1},
        "telemetry": {"log_every": "5 steps", "trackers": []},
    }
    for name in ("Sequences", "Boxes")
}

VOCABULARY = 12
_SAMPLES = {True: 60, False: 18}
_WHY = "this task makes its own data"


def _draws(training: bool, ids: NDArray[np.int64], count: int) -> NDArray[np.float64]:
    return uniforms(1 if training else 2, 0, ids, count)


class _Median:
    """A collector: the median of something over all samples, which no sums give."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._values: list[Tensor] = []

    def add(self, values: Mapping[str, Any], ids: NDArray[np.int64]) -> None:
        self._values.append(values[f"{self._name}_of_sample"].float())

    def part(self) -> list[float]:
        found: list[float] = torch.cat(self._values).tolist() if self._values else []
        return found

    def results(self, parts: Sequence[Any]) -> dict[str, float]:
        return {self._name: float(np.median([each for part in parts for each in part]))}


class _Own(paceline.Task):
    """What both have in common: data that a function makes."""

    def data_facts(self, world: World) -> DataFacts:
        return DataFacts(
            train_samples=_SAMPLES[True],
            evaluation_samples=_SAMPLES[False],
            # A task may describe its data as it likes: here one NumPy number for all channels.
            description={"dataset": type(self).__name__, "digest": "1", "mean": np.float32(0.5)},
            unused=all_but(["data.dataset"], _WHY),
        )

    def open_pipeline(self, placement: Placement) -> Pipeline:
        return SimplePipeline(self.read, evaluation_samples=_SAMPLES[False], placement=placement)

    def read(self, part: SampleSlice, training: bool) -> tuple[Any, Any]:
        raise NotImplementedError


class NextToken(nn.Module):
    """An embedding, dropout and a linear layer."""

    def __init__(self, dropout: float = 0.1, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Tokens [N, T] and which of them count, bool [N, T], to logits [N, T, VOCABULARY]."""
        hidden = self.embedding(tokens) * mask[..., None]
        logits: Tensor = self.head(self.dropout(hidden))
        return logits


class Sequences(_Own):
    """Which token follows? Ragged sequences, padded; a sample counts for its tokens."""

    headline = "accuracy"
    unit = "tokens"
    metrics = (
        Metric(name="loss", of="nats", per="tokens"),
        Metric(name="accuracy", of="right", per="tokens", scale=100.0, higher_is_better=True),
        Metric(name="median_loss", is_collected=True),
    )

    def sample_weights(self) -> SampleWeights | None:
        return self.lengths(True, np.arange(_SAMPLES[True]))

    def build_model(self) -> nn.Module:
        return NextToken(**self.recipe.model.options)

    def loss(self, model: Model, batch: Batch) -> Tensor:
        logits = model(batch.inputs["tokens"], batch.inputs["mask"])
        return F.cross_entropy(logits.flatten(0, 1), batch.targets["next"].flatten(), ignore_index=-100)

    def score(self, model: Model, batch: Batch) -> dict[str, Any]:
        logits = model(batch.inputs["tokens"], batch.inputs["mask"])
        logits = logits if logits.dtype == torch.float64 else logits.float()
        expected = batch.targets["next"]
        counts = expected >= 0
        nats = F.cross_entropy(logits.transpose(1, 2), expected, ignore_index=-100, reduction="none").sum(dim=1)
        tokens = counts.sum(dim=1)
        return {
            "nats": nats,
            "tokens": tokens,
            "right": ((logits.argmax(dim=2) == expected) & counts).sum(dim=1),
            "median_loss_of_sample": nats / tokens,
        }

    def collectors(self) -> tuple[Collector, ...]:
        return (_Median("median_loss"),)

    def predict(self, model: Model, batch: Batch) -> dict[str, Tensor]:
        logits = model(batch.inputs["tokens"], batch.inputs["mask"])
        last = batch.inputs["mask"].sum(dim=1) - 1
        return {"last": logits.argmax(dim=2)[torch.arange(len(last)), last]}

    @staticmethod
    def lengths(training: bool, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        return (2 + 9 * _draws(training, ids, 1)[:, 0] ** 2).astype(np.int64)

    def read(self, part: SampleSlice, training: bool) -> tuple[Any, Any]:
        lengths = self.lengths(training, part.ids)
        longest = int(lengths.max(initial=1))
        tokens = np.zeros((len(part.ids), longest + 1), np.int64)
        draws = _draws(training, part.ids, 3 + longest)
        tokens[:, 0] = draws[:, 1] * VOCABULARY
        for place in range(longest):
            step = (tokens[:, place] * 5 + 3) % VOCABULARY
            noise = (draws[:, 2 + place] * VOCABULARY * 3).astype(np.int64)
            tokens[:, place + 1] = np.where(noise < VOCABULARY, noise, step)
        mask = np.arange(longest) < lengths[:, None]
        expected = np.where(mask, tokens[:, 1:], -100)
        inputs = {"tokens": torch.from_numpy(tokens[:, :-1] * mask), "mask": torch.from_numpy(mask)}
        return inputs, {"next": torch.from_numpy(expected), "lengths": torch.from_numpy(lengths)}


class Boxer(nn.Module):
    """Pictures of unequal shapes, one after the other, to one box each."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.filters = nn.Conv2d(3, width, kernel_size=3, padding=1)
        self.head = nn.Linear(width, 4)

    def forward(self, pictures: list[Tensor]) -> list[Tensor]:
        """Pictures [3, H, W] to boxes [4]."""
        return [self.head(self.filters(each[None]).relu().mean(dim=(2, 3)))[0] for each in pictures]


class Boxes(_Own):
    """Where lies the bright patch? Pictures in a list, targets in a list of dicts, as detectors have them."""

    headline = "median_error"
    metrics = (Metric(name="loss"), Metric(name="median_error", is_collected=True))

    def build_model(self) -> nn.Module:
        return Boxer(**self.recipe.model.options)

    def loss(self, model: Model, batch: Batch) -> Tensor:
        return self._errors(model, batch).mean()

    def score(self, model: Model, batch: Batch) -> dict[str, Any]:
        errors = self._errors(model, batch)
        return {"loss": errors, "median_error_of_sample": errors}

    def collectors(self) -> tuple[Collector, ...]:
        return (_Median("median_error"),)

    @staticmethod
    def _errors(model: Model, batch: Batch) -> Tensor:
        pairs = zip(model(batch.inputs), batch.targets, strict=True)
        return torch.stack([(found - each["boxes"][0]).square().mean() for found, each in pairs])

    def read(self, part: SampleSlice, training: bool) -> tuple[Any, Any]:
        pictures, targets = [], []
        for draw in _draws(training, part.ids, 4):
            height, width = 6 + int(draw[0] * 5), 6 + int(draw[1] * 5)
            top, left = int(draw[2] * (height - 2)), int(draw[3] * (width - 2))
            picture = torch.zeros(3, height, width)
            picture[:, top : top + 2, left : left + 2] = 1.0
            box = torch.tensor([[left / width, top / height, (left + 2) / width, (top + 2) / height]])
            pictures.append(picture)
            targets.append({"boxes": box, "labels": torch.ones(1, dtype=torch.int64)})
        return pictures, targets
