"""Figures of a run that several rules of the judgement use; no torch needed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paceline.learning.evidence import LearningEvidence


def figures_of(evidence: LearningEvidence, name: str) -> list[Mapping[str, Any]]:
    """Return what a loss function was given in each observed step."""
    found = [each["losses"].get(name) for each in evidence.observations if each.get("losses")]
    return [each for each in found if each and each["kind"] != "constant"]


def is_within(figures: Mapping[str, Any], low: float, high: float) -> bool:
    """Return whether all answers lie between two numbers."""
    return figures["low"] is not None and figures["low"] >= low and figures["high"] <= high


def in_each_step(evidence: LearningEvidence, key: str) -> list[str]:
    """Return the names that each observed step has."""
    lists = [set(each.get(key) or ()) for each in evidence.full]
    return sorted(set.intersection(*lists)) if lists else []


def shortened(names: Sequence[str]) -> str:
    """Return the first two names, and how many more there are."""
    more = len(names) - 2
    return ", ".join(names[:2]) + (f" and {more} more" if more > 0 else "")


def trained_share(evidence: LearningEvidence) -> float | None:
    """Return the share of the parameters that is trained."""
    shares = [each["trained"] / each["parameters"] for each in evidence.full if each.get("parameters")]
    return max(shares, default=None)


def _late(evidence: LearningEvidence) -> list[Mapping[str, Any]]:
    return list(evidence.full[-2:])


def dead_rows(evidence: LearningEvidence) -> dict[str, float]:
    """Return parameters whose rows have no gradient late in the run, with the share of such rows."""
    late = _late(evidence)
    if len(evidence.full) < 3:
        return {}
    names = set.intersection(*({n for n, share in each["zero_rows"].items() if share >= 0.9} for each in late))
    return {name: min(each["zero_rows"][name] for each in late) for name in names}


def ignores_input(evidence: LearningEvidence) -> bool:
    """Whether only the first layer has no gradient, as if its input were always 0: a dead layer stops its successor."""
    found, outputs = dead_rows(evidence), evidence.last.get("outputs") or {}
    return (
        len(found) == 1
        and min(found.values()) == 1
        and outputs.get("between") is not None
        and outputs["between"] < 1e-6
    )


def gradients_flow(evidence: LearningEvidence) -> bool:
    """Return whether some gradient of the last observed step is not 0."""
    return any((each["gradient"] or 0) > 0 for each in evidence.last["blocks"].values())


def falls_behind(evidence: LearningEvidence) -> bool:
    """Whether the held-out score is far below the training score."""
    held, trained = evidence.held, evidence.trained
    if held is None or trained is None:
        return False
    return held.score + 3 * held.error + 0.1 < trained.score - 3 * trained.error or (
        evidence.is_at_chance and trained.is_above_chance
    )


def errors_are_uniform(evidence: LearningEvidence) -> bool:
    """Whether wrong answers are spread evenly over the other classes, as far as chance allows."""
    if len(evidence.matrix) < 3:
        return True
    excess, freedom = 0.0, 0
    for expected, count in _cells(evidence.matrix):
        excess += (count - expected) ** 2 / max(expected, 1e-9)
        freedom += 1
    freedom -= len(evidence.matrix)
    # The mean and spread of chi-squared.
    return freedom > 0 and excess < freedom + 4 * math.sqrt(2 * freedom) + 0.3 * freedom


def _cells(matrix: Sequence[Sequence[int]]) -> Iterator[tuple[float, int]]:
    """Yield the expected and the actual number of each kind of mistake."""
    columns = [sum(row[index] for row in matrix) - matrix[index][index] for index in range(len(matrix))]
    for label, row in enumerate(matrix):
        wrong = sum(row) - row[label]
        others = sum(each for index, each in enumerate(columns) if index != label)
        for index, count in enumerate(row):
            if index != label and wrong:
                yield wrong * columns[index] / max(others, 1), count


def accuracy_name(evidence: LearningEvidence) -> str | None:
    """Return the name of the accuracy in evaluation records; None if the run has another headline."""
    name = evidence.plan.get("headline", "top1_accuracy")
    return name if evidence.evaluations and str(name).endswith("accuracy") else None


def mean_of(values: Sequence[float | None]) -> float:
    """Return the mean of the known values."""
    known = [each for each in values if each is not None]
    return sum(known) / len(known) if known else 0.0
