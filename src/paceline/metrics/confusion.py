"""Confusion matrix, per-class scores and reliability of an evaluation: counting, writing and reading.

Does not import torch, because reports read these files without it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MOST_CLASSES = 1000
BINS = 10
_DENSE_CLASSES = 100

Triples = list[tuple[int, int, int]]
"""(label, predicted class, samples), ascending; predicted class -1 means no valid prediction."""

Reliability = list[list[int]]
"""[10, 3]: for each tenth of probability, the number of predictions, how many are correct, and the sum of their
probabilities in millionths. Integers, so that the sum does not depend on how samples were distributed."""


def merge_counts(parts: Iterable[Triples]) -> Triples:
    """Return the counts of all processes combined."""
    total: Counter[tuple[int, int]] = Counter()
    for part in parts:
        for label, predicted, count in part:
            total[label, predicted] += count
    return [(label, predicted, count) for (label, predicted), count in sorted(total.items())]


def confusion_document(triples: Triples, parts: Iterable[Reliability], names: Sequence[str]) -> dict[str, Any]:
    """Build the confusion matrix document: rows are labels, columns are predictions.

    For up to 100 classes stored as ``matrix``; for more, where most entries are zero, as ``triples`` of label,
    prediction and count.

    Args:
        triples: The counts of all processes combined.
        parts: The reliability of each process.
        names: The classes' names.
    """
    answered = [each for each in triples if each[1] >= 0]
    bins = [[sum(column) for column in zip(*rows, strict=True)] for rows in zip(*parts, strict=True)]
    document: dict[str, Any] = {
        "classes": list(names),
        "samples": sum(count for *_, count in triples),
        "unanswered": sum(count for _, predicted, count in triples if predicted < 0),
        "reliability": [
            {"samples": count, "right": right, "probability": round(total / count / 1e6, 6) if count else None}
            for count, right, total in bins
        ],
    }
    if len(names) > _DENSE_CLASSES:
        return {**document, "triples": [list(each) for each in answered]}
    matrix = [[0] * len(names) for _ in names]
    for label, predicted, count in answered:
        matrix[label][predicted] = count
    return {**document, "matrix": matrix}


def matrix_of(confusion: Mapping[str, Any]) -> list[list[int]]:
    """Return the full matrix of a document from :func:`confusion_document`.

    Raises:
        ValueError: If the matrix does not have a row and a column for each class.
    """
    size = len(confusion["classes"])
    matrix: list[list[int]] = confusion.get("matrix") or [[0] * size for _ in range(size)]
    for label, predicted, count in confusion.get("triples", ()):
        matrix[label][predicted] = count
    if [len(row) for row in matrix] != [size] * size:
        raise ValueError(f"a confusion matrix of {size} classes has {size} rows and columns")
    return matrix


def scores_by_class(confusion: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return precision, recall and F1 in percent and the sample count of each class, lowest F1 first.

    As in scikit-learn, 0 / 0 counts as 0, and classes with neither samples nor predictions are left out.

    Args:
        confusion: A document from :func:`confusion_document`.
    """
    matrix = matrix_of(confusion)
    scores = []
    for index, (name, row, column) in enumerate(
        zip(confusion["classes"], matrix, zip(*matrix, strict=True), strict=True)
    ):
        right, samples, predicted = row[index], sum(row), sum(column)
        if samples or predicted:
            precision, recall = 100 * right / max(predicted, 1), 100 * right / max(samples, 1)
            f1 = 200 * right / (predicted + samples)
            scores.append({"class": name, "count": samples, "precision": precision, "recall": recall, "f1": f1})
    return sorted(scores, key=lambda each: (each["f1"], each["recall"]))
