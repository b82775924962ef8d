"""Single-label predictions: counts for the confusion matrix, and a few samples to inspect.

The samples are chosen on the device; the choice is the same for any number of processes.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from paceline.metrics.confusion import BINS, Reliability, Triples


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Predictions for one batch, on its device.

    Attributes:
        label: True classes, int64 [N].
        predicted: Predicted classes, int64 [N]; -1 where the scores are NaN.
        probability: Probability of the predicted class, float32 [N].
        label_probability: Probability of the true class, float32 [N].
        classes: Number of classes.
    """

    label: Tensor
    predicted: Tensor
    probability: Tensor
    label_probability: Tensor
    classes: int

    @classmethod
    def of(cls, logits: Tensor, label: Tensor) -> Answers:
        """Compute predictions from scores [N, classes]; ties go to the first class, as in top-1 accuracy."""
        logits = logits.float()
        probabilities = logits.softmax(dim=1)
        best = logits.argmax(dim=1)
        return cls(
            label=label,
            predicted=torch.where(logits.isnan().any(dim=1), torch.full_like(best, -1), best),
            probability=probabilities.gather(1, best[:, None])[:, 0],
            label_probability=probabilities.gather(1, label[:, None])[:, 0],
            classes=logits.shape[1],
        )


class Confusion:
    """Counts of confusions and confidences; they stay on the device until read."""

    def __init__(self) -> None:
        self.classes = 0
        self._answers: list[Tensor] = []

    def add(self, answers: Answers) -> None:
        """Add one batch. No host-device synchronisation."""
        self.classes = answers.classes
        columns = (answers.label, answers.predicted, (1e6 * answers.probability.nan_to_num(0.0)).round())
        self._answers.append(torch.stack([each.to(torch.int32) for each in columns]))

    def counts(self) -> tuple[Triples, Reliability]:
        """Return counts by label and prediction, and by probability; waits for the device."""
        if not self._answers:
            return [], [[0] * 3] * BINS
        cells = torch.cat(self._answers, dim=1).cpu().numpy().astype(np.int64)
        pairs, counts = np.unique(cells[:2], axis=1, return_counts=True)
        label, predicted, millionths = cells[:, cells[1] >= 0]
        bins = np.minimum(millionths * BINS // 1_000_000, BINS - 1)
        sums = [np.bincount(bins, each, BINS) for each in (np.ones_like(bins), label == predicted, millionths)]
        triples = [(int(a), int(b), int(n)) for a, b, n in zip(*pairs, counts, strict=True)]
        return triples, np.stack(sums, axis=1).astype(np.int64).tolist()


THUMBNAIL_PIXELS = 96
_SIZE = ("height", "width")
HOW_CHOSEN = (
    "Two thirds are mistakes, the most confident ones; the rest are right answers, drawn by their numbers. Where there "
    "are fewer of one kind, there are more of the other."
)

Pictures = Callable[[Tensor], Tensor | None]
"""Converts network inputs, [N, ...], to uint8 [N, C, H, W]; returns None if they are not pictures."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A candidate sample for display.

    Attributes:
        sample: Its number.
        score: Ranks candidates of its kind; higher is better.
        is_mistake: Whether the prediction is wrong.
    """

    sample: int
    score: float
    is_mistake: bool
    label: int
    predicted: int
    probability: float
    label_probability: float


def choose(candidates: Iterable[Candidate], count: int) -> list[Candidate]:
    """Choose from the candidates of all processes, mistakes first."""
    # Ties go to the lower number.
    ranked = sorted(candidates, key=lambda each: (-each.score, each.sample))
    errors, correct = [each for each in ranked if each.is_mistake], [each for each in ranked if not each.is_mistake]
    mistakes = min(len(errors), max(count - count // 3, count - len(correct)))
    return [*errors[:mistakes], *correct[: count - mistakes]]


class Examples:
    """Keeps the best candidates of a pass over the samples, pictures included, on the device.

    Args:
        count: Maximum number shown.
        pictures: Converts network inputs to pictures.
    """

    def __init__(self, count: int, pictures: Pictures) -> None:
        self._pictures = pictures
        self._kinds = {True: _TopCandidates(count), False: _TopCandidates(count)}

    def add(self, ids: NDArray[np.int64], draws: NDArray[np.float64], inputs: object, answers: Answers) -> None:
        """Add one batch. No host-device synchronisation.

        Args:
            ids: Sample numbers, [N].
            draws: A number in [0, 1) per sample, which ranks correct predictions, [N].
            inputs: Network inputs; pictures are made of a tensor, [N, ...].
            answers: Predictions.
        """
        device = answers.label.device
        samples = torch.tensor(ids).to(device, non_blocking=True)
        random_keys = torch.tensor(draws, dtype=torch.float32).to(device, non_blocking=True)
        is_wrong = answers.predicted != answers.label
        nobody = torch.full_like(random_keys, -1.0)
        columns = {
            "sample": samples,
            "label": answers.label,
            "predicted": answers.predicted,
            "probability": answers.probability,
            "label_probability": answers.label_probability,
        }

        def shown(chosen: Tensor) -> Tensor | None:
            pictures = self._pictures(inputs[chosen]) if isinstance(inputs, Tensor) else None
            return None if pictures is None else thumbnails(pictures)

        for is_mistake, best in self._kinds.items():
            goodness = answers.probability.nan_to_num(0.0) if is_mistake else random_keys
            best.add({"score": torch.where(is_wrong == is_mistake, goodness, nobody), **columns}, shown)

    def candidates(self) -> list[Candidate]:
        """Return this process's candidates; waits for the device."""
        return [
            Candidate(is_mistake=is_mistake, **{name: column[row] for name, column in columns.items()})
            for is_mistake, best in self._kinds.items()
            for columns in [{name: each.tolist() for name, each in best.columns.items() if name not in _SIZE}]
            for row in range(len(columns.get("score", ())))
            if columns["score"][row] >= 0
        ]

    def picture(self, candidate: Candidate) -> NDArray[np.uint8] | None:
        """Return the thumbnail of one of this process's candidates, uint8 [H, W, C]; None if there is no picture."""
        return self._kinds[candidate.is_mistake].picture(candidate.sample)


class _TopCandidates:
    """The samples with the highest scores."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.columns: dict[str, Tensor] = {}
        self._pictures: Tensor | None = None

    def add(self, columns: dict[str, Tensor], pictures: Callable[[Tensor], Tensor | None]) -> None:
        chosen = self._may_qualify(columns["score"], _order(columns)[: self._count])
        if chosen.numel() == 0 and self.columns:
            return
        selected = {name: column[chosen] for name, column in columns.items()}
        thumbnails = pictures(chosen)
        if thumbnails is not None:
            selected |= {
                "height": torch.full_like(selected["sample"], thumbnails.shape[2]),
                "width": torch.full_like(selected["sample"], thumbnails.shape[3]),
            }
        if self.columns:
            selected = {name: torch.cat([self.columns[name], column]) for name, column in selected.items()}
            if thumbnails is None or self._pictures is None:
                thumbnails = None
            else:  # of varying sizes; smaller ones are aligned at the upper left
                pair = (self._pictures, thumbnails)
                height, width = (max(each.shape[axis] for each in pair) for axis in (2, 3))
                padded = [F.pad(each, (0, width - each.shape[3], 0, height - each.shape[2])) for each in pair]
                thumbnails = torch.cat(padded)
        chosen = _order(selected)[: self._count]
        self.columns = {name: column[chosen] for name, column in selected.items()}
        self._pictures = None if thumbnails is None else thumbnails[chosen]

    def _may_qualify(self, score: Tensor, chosen: Tensor) -> Tensor:
        """Select samples that may be among the best, if that needs no device wait; so it filters only on a CPU."""
        if score.device.type != "cpu" or not self.columns:
            return chosen
        scores = self.columns["score"]
        threshold = float(scores[-1]) if len(scores) == self._count else 0.0
        return chosen[score[chosen] >= max(threshold, 0.0)]

    def picture(self, sample: int) -> NDArray[np.uint8] | None:
        if self._pictures is None:
            return None
        row = self.columns["sample"].tolist().index(sample)
        height, width = int(self.columns["height"][row]), int(self.columns["width"][row])
        pixels: NDArray[np.uint8] = self._pictures[row, :, :height, :width].permute(1, 2, 0).cpu().numpy()
        return pixels


def _order(columns: dict[str, Tensor]) -> Tensor:
    """Order by descending score; ties go to the lower number."""
    by_number = columns["sample"].argsort(stable=True)
    return by_number[columns["score"][by_number].argsort(descending=True, stable=True)]


def thumbnails(pictures: Tensor) -> Tensor:
    """Shrink pictures, uint8 [N, C, H, W], to thumbnails: no side longer than 96 pixels."""
    height, width = pictures.shape[2:]
    if max(height, width) <= THUMBNAIL_PIXELS:
        return pictures
    shrink = THUMBNAIL_PIXELS / max(height, width)
    size = (max(1, round(height * shrink)), max(1, round(width * shrink)))
    small = F.interpolate(pictures.float(), size=size, mode="bilinear", antialias=True)
    return small.round_().clamp_(0, 255).to(torch.uint8)


def as_png(pixels: NDArray[np.uint8]) -> str:
    """Encode a picture [H, W, C] as a data URL; uses the first 3 channels, or the first one if there are fewer."""
    image, file = pixels[:, :, :3] if pixels.shape[2] >= 3 else pixels[:, :, 0], io.BytesIO()
    Image.fromarray(np.ascontiguousarray(image)).save(file, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
