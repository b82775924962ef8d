"""Entities in IOB2 tags: ``B-PER`` begins one of the type PER, ``I-PER`` continues it, ``O`` is outside.

As in conlleval and by default in seqeval, an ``I-`` tag without a ``B-`` of its type before it begins an entity.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.metrics.accumulator import Metric

ENTITY_METRICS = tuple(
    Metric(name=f"entity_{name}", scale=100.0, higher_is_better=True, of=of, per=per)
    for name, of, per in (
        ("f1", "hits_twice", "both_entities"),
        ("precision", "hits", "found_entities"),
        ("recall", "hits", "true_entities"),
    )
)
"""Micro-averages over entities in percent; undefined (NaN) without any entity to divide by."""


class Spans(NamedTuple):
    """Entities in tags [N, T].

    Attributes:
        begins: Whether an entity begins at a position, bool [N, T].
        types: Type of the entity at each position, int64 [N, T]; 0 if there is none.
        ends: Where the entity that begins at a position ends (excluded), int64 [N, T].
    """

    begins: Tensor
    types: Tensor
    ends: Tensor


class Iob2:
    """Finds entities in numbered tags. Nothing waits for the device.

    Args:
        classes: Names of the tags.

    Attributes:
        types: Names of the entity types, which are numbered from 1.
    """

    def __init__(self, classes: Sequence[str]) -> None:
        names = [name.partition("-") for name in classes]
        self.types = tuple(sorted({kind for prefix, _, kind in names if prefix != "O"}))
        # The last number means that there is no tag.
        self._type = torch.tensor([0 if tag == "O" else 1 + self.types.index(kind) for tag, _, kind in names] + [0])
        self._is_b = torch.tensor([tag == "B" for tag, _, _ in names] + [False])

    @staticmethod
    def matches(classes: Sequence[str]) -> bool:
        """Whether all tags are IOB2's, and one of them is of an entity."""
        return all(re.fullmatch("O|[BI](-.*)?", name) for name in classes) and set(classes) != {"O"}

    def spans(self, tags: Tensor) -> Spans:
        """Return the entities in tags, int64 [N, T]; -1 where there is no tag."""
        types, is_b = (each.to(tags.device, non_blocking=True)[tags] for each in (self._type, self._is_b))
        before = torch.cat([torch.zeros_like(types[:, :1]), types[:, :-1]], dim=1)
        begins = (types > 0) & (is_b | (types != before))
        width = tags.shape[1]
        places = torch.arange(width, device=tags.device).expand_as(tags)
        stops = torch.where((types > 0) & ~begins, width, places)  # where no entity goes on
        after = torch.cat([stops[:, 1:], torch.full_like(stops[:, :1], width)], dim=1)
        return Spans(begins, types, after.flip(1).cummin(dim=1).values.flip(1))

    def counts(self, found: Tensor, true: Tensor) -> dict[str, Tensor]:
        """Return the sums of :data:`ENTITY_METRICS` for each sample, int64 [N].

        An entity is found if its first word, its last and its type are right.

        Args:
            found: Predicted tags, int64 [N, T].
            true: True tags, int64 [N, T]; negative at positions that are left out, as if they were not there.
        """
        order = (true < 0).byte().argsort(dim=1, stable=True)
        true = true.gather(1, order).clamp(min=-1)
        found = torch.where(true < 0, -1, found.gather(1, order))
        one, other = self.spans(found), self.spans(true)
        hits = one.begins & other.begins & (one.types == other.types) & (one.ends == other.ends)
        sums = {"hits": hits, "found_entities": one.begins, "true_entities": other.begins}
        counts = {name: each.sum(dim=1) for name, each in sums.items()}
        both = counts["found_entities"] + counts["true_entities"]
        return {**counts, "hits_twice": 2 * counts["hits"], "both_entities": both}


def entities_in(tags: Tensor, classes: Sequence[str]) -> tuple[tuple[str, int, int], ...]:
    """Return type, begin and end (excluded) of each entity in the tags of one text, int64 [T]; none unless IOB2."""
    if not Iob2.matches(classes):
        return ()
    iob2 = Iob2(classes)
    begins, types, ends = (each[0].tolist() for each in iob2.spans(tags[None]))
    return tuple((iob2.types[types[at] - 1], at, ends[at]) for at, is_first in enumerate(begins) if is_first)
