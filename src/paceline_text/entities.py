"""Precision, recall and F1 of named entities, from integer counts: exact for any number of processes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from paceline.metrics.accumulator import Metric

IOB2 = re.compile("O|[BI](-.*)?")
ENTITY_METRICS = tuple(
    Metric(name=name, scale=100.0, higher_is_better=True, is_collected=True)
    for name in ("entity_f1", "entity_precision", "entity_recall")
)


class EntityScores:
    """Counts entities by type; implements :class:`paceline.metrics.accumulator.DetailedCollector`.

    Args:
        kinds: The types' names.
    """

    def __init__(self, kinds: Sequence[str]) -> None:
        self._kinds, self._counts = tuple(kinds), list[torch.Tensor]()

    def add(self, values: Mapping[str, Any], ids: NDArray[np.int64]) -> None:
        """Add ``entities``, int64 [N, types, 3]: those found with the right words and type, all found, and all true."""
        self._counts.append(values["entities"].sum(dim=0))

    def part(self) -> NDArray[np.int64]:
        """Return the counts, int64 [types, 3]; waits for the device."""
        counts = self._counts or [torch.zeros(len(self._kinds), 3, dtype=torch.int64)]
        return torch.stack(counts).sum(dim=0).cpu().numpy()

    def results(self, parts: Sequence[NDArray[np.int64]]) -> dict[str, float]:
        """Compute the metrics over all types in percent, as seqeval's micro averages; F1 without entities is NaN."""
        scores = _scores(*np.sum(parts, axis=(0, 1)).tolist())
        if not np.sum(parts):
            scores["f1"] = math.nan
        return {metric.name: scores[metric.name.removeprefix("entity_")] for metric in ENTITY_METRICS}

    def details(self, parts: Sequence[NDArray[np.int64]]) -> dict[str, Any]:
        """Return the scores of each type in percent and its number of true entities, lowest F1 first."""
        counts = zip(self._kinds, np.sum(parts, axis=0).tolist(), strict=True)
        rows = [{"class": kind, "count": each[2], **_scores(*each)} for kind, each in counts if any(each)]
        return {"entity_scores": sorted(rows, key=lambda row: (row["f1"], row["class"]))}


def _scores(right: int, found: int, true: int) -> dict[str, float]:
    """Return precision, recall and F1 in percent; 0 / 0 counts as 0."""
    pairs = {"precision": (right, found), "recall": (right, true), "f1": (2 * right, found + true)}
    return {name: 100 * part / total if total else 0.0 for name, (part, total) in pairs.items()}


def entity_types(tags: Sequence[str]) -> torch.Tensor | None:
    """Return the type of entity of each tag, int64 [tags + 1]; None unless all tags are IOB2's.

    Types are numbered from 1, and negative for ``B-``; 0 is for ``O``, and for no tag, which comes last.
    """
    if set(tags) == {"O"} or not all(map(IOB2.fullmatch, tags)):
        return None
    kinds, signs = entity_names(tags), {"O": 0, "B": -1, "I": 1}
    numbers = [0 if tag == "O" else 1 + kinds.index(tag[2:] or "_") for tag in tags]
    return torch.tensor([*(signs[tag[0]] * number for tag, number in zip(tags, numbers, strict=True)), 0])


def entity_names(tags: Sequence[str]) -> list[str]:
    """Return the names of the types of entities in IOB2 tags, sorted; ``_`` for tags without a name, as in seqeval."""
    return sorted({tag[2:] or "_" for tag in tags if tag != "O"})


def entities_in(tags: torch.Tensor, types: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find entities in tags, int64 [N, T], -1 for none; nothing waits for the device.

    Returns:
        Whether an entity begins at a position, its type, and where it ends (excluded), all [N, T].
    """
    signed = types.to(tags.device, non_blocking=True)[tags]
    kinds, width = signed.abs(), tags.shape[1]
    begins = (signed < 0) | ((kinds > 0) & (kinds != F.pad(kinds, (1, -1))))
    # Positions that continue no entity; an entity ends at the next of them.
    stops = torch.where((kinds > 0) & ~begins, width, torch.arange(width, device=tags.device))
    return begins, kinds, F.pad(stops, (-1, 1), value=width).flip(1).cummin(dim=1).values.flip(1)


def entity_counts(found: torch.Tensor, true: torch.Tensor, types: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the entities of each type that are found with the right words, all found, and all true ones.

    Args:
        found: Predicted tags, int64 [N, T].
        true: True tags, int64 [N, T]; positions with -100 count as absent.
        types: What :func:`entity_types` returned.

    Returns:
        ``entities``, int64 [N, types, 3].
    """
    order = (true < 0).byte().argsort(dim=1, stable=True)
    true = true.gather(1, order).clamp(min=-1)
    found = found.gather(1, order).masked_fill(true < 0, -1)
    (begins, kinds, ends), (wanted, right_kinds, right_ends) = (entities_in(each, types) for each in (found, true))
    hits = begins & wanted & (kinds == right_kinds) & (ends == right_ends)
    numbers = torch.arange(1, 1 + int(types.abs().max()), device=kinds.device)
    counted = ((hits, kinds), (begins, kinds), (wanted, right_kinds))
    by_type = [(each & (of == numbers[:, None, None])).sum(dim=2).T for each, of in counted]
    return {"entities": torch.stack(by_type, dim=2)}
