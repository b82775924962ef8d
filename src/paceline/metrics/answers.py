"""What did a network answer to samples of one label each, and what was right?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

MOST_CLASSES = 1000
_DENSE_CLASSES = 100

Triples = list[tuple[int, int, int]]
"""(label, predicted class, samples), ascending; a predicted class of -1 is no answer."""


@dataclass(frozen=True, kw_only=True)
class Answers:
    """The answers to one batch, on its device.

    Attributes:
        label: Right classes, int64 [N].
        predicted: Classes answered, int64 [N]; -1 where the scores are no numbers.
        probability: Of the class answered, float32 [N].
        label_probability: Of the right class, float32 [N].
        classes: How many there are.
    """

    label: Tensor
    predicted: Tensor
    probability: Tensor
    label_probability: Tensor
    classes: int

    @classmethod
    def of(cls, logits: Tensor, label: Tensor) -> Answers:
        """Read scores [N, classes]: of equal ones the first class is the answer, as top-1 accuracy counts."""
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
    """Which classes are taken for which; stays on the device until it is asked for."""

    def __init__(self) -> None:
        self.classes = 0
        self._pairs: list[Tensor] = []

    def add(self, answers: Answers) -> None:
        """Add one batch. No host-device synchronisation."""
        self.classes = answers.classes
        self._pairs.append(torch.stack([answers.label, answers.predicted]).to(torch.int32))

    def triples(self) -> Triples:
        """The counts; waits for the device."""
        if not self._pairs:
            return []
        pairs, counts = np.unique(torch.cat(self._pairs, dim=1).cpu().numpy(), axis=1, return_counts=True)
        return [(int(a), int(b), int(n)) for a, b, n in zip(*pairs, counts, strict=True)]


def merged(parts: Iterable[Triples]) -> Triples:
    """The counts of all processes together."""
    total: Counter[tuple[int, int]] = Counter()
    for part in parts:
        for label, predicted, count in part:
            total[label, predicted] += count
    return [(label, predicted, count) for (label, predicted), count in sorted(total.items())]


def confusion_document(triples: Triples, names: Sequence[str]) -> dict[str, Any]:
    """A confusion matrix as it is written: rows are labels, columns what was answered.

    Up to 100 classes as ``matrix``; beyond, where most of it is zero, as ``triples`` of label, answer and count.
    """
    answered = [each for each in triples if each[1] >= 0]
    found: dict[str, Any] = {
        "classes": list(names),
        "samples": sum(count for *_, count in triples),
        "unanswered": sum(count for _, predicted, count in triples if predicted < 0),
    }
    if len(names) > _DENSE_CLASSES:
        return {**found, "triples": [list(each) for each in answered]}
    matrix = [[0] * len(names) for _ in names]
    for label, predicted, count in answered:
        matrix[label][predicted] = count
    return {**found, "matrix": matrix}
