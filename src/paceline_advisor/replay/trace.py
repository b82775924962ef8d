"""What each step of a run computed, as noted while it was computed again, and where two runs differ in it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from paceline_advisor import Json, frozen, named

Trace = dict[int, list[Json]]
"""The notes of each process, by position; see ``paceline/trainer/tracing.py``."""


@frozen
class Where:
    """The first difference within a step.

    Attributes:
        phase: ``data``, ``forward``, ``backward`` or ``update``; ``evaluation`` or ``records`` outside of a step.
        module: The module's name; empty for the network itself and for what is outside of it.
        tensor: The tensor's name, or what else differs.
        samples: Names of samples that differ, for ``data``.
    """

    phase: str
    module: str = ""
    tensor: str
    samples: tuple[str, ...] = ()

    def to_json(self) -> Json:
        """Return it as one JSON object."""
        return {"phase": self.phase, "module": self.module, "tensor": self.tensor}

    def __str__(self) -> str:
        of_module = f"{self.module}: " if self.module else ""
        samples = f" ({named(self.samples)})" if self.samples else ""
        return f"in {self.phase}, {of_module}{self.tensor}{samples}"


def read_trace(folder: Path) -> Trace:
    """Return the notes that all processes of a run have written to a folder."""
    found: Trace = {}
    for path in sorted(folder.glob("rank-*.jsonl"), key=lambda each: int(each.stem.removeprefix("rank-"))):
        for line in path.read_text(encoding="utf-8").splitlines():
            note = json.loads(line)
            found.setdefault(note["position"], []).append(note)
    return found


def first_other_step(first: Trace, second: Trace) -> int | None:
    """Return the first position at which two runs differ."""
    return next((each for each in sorted(first.keys() & second.keys()) if find(first[each], second[each])), None)


def find(first: Sequence[Json], second: Sequence[Json]) -> Where | None:
    """Return the first difference of a step, from the notes of all processes of each run."""
    names, others = ({s[0]: s[1] for each in notes for s in each["samples"]} for notes in (first, second))
    if names.keys() != others.keys():
        only = [names.get(each, others.get(each, "")) for each in sorted(names.keys() ^ others.keys())]
        return Where(phase="data", tensor="samples", samples=tuple(only))
    pairs: Iterable[Any]
    parts, other_parts = ([_parts(each) for each in notes] for notes in (first, second))
    if parts == other_parts:
        for place, what in ((2, "input"), (3, "target")):
            contents, other = (_contents(notes, place) for notes in (first, second))
            if changed := [each for each in contents if contents[each] != other[each]]:
                return Where(phase="data", tensor=what, samples=tuple(names[each] for each in changed))
        pairs = (
            pair
            for one, another in zip(first, second, strict=True)
            for pair in zip_longest(one["notes"], another["notes"])
        )
    else:  # processes or micro-batches share the step in another way
        pairs = zip_longest(*([each for each in notes[0]["notes"] if each[0] == "update"] for notes in (first, second)))
    for one, another in pairs:
        if one != another:
            phase, module, tensor, _ = one or another
            return Where(phase=phase, module=module, tensor=tensor)
    return None


def _parts(notes: Json) -> int:
    return sum(each[2] == "loss" for each in notes["notes"])


def _contents(notes: Sequence[Json], place: int) -> dict[int, list[str]]:
    """Return the digests of each sample's input or target; a sample may be used several times in a step."""
    found: dict[int, list[str]] = {}
    for sample in (sample for each in notes for sample in each["samples"]):
        found.setdefault(sample[0], []).append(sample[place])
    return found


def other_settings(first: Sequence[Json], second: Sequence[Json]) -> Iterator[str]:
    """Yield the optimizer's settings that differ in a step."""
    for number, (one, another) in enumerate(zip(first[0]["settings"], second[0]["settings"], strict=False)):
        for key in one.keys() & another.keys():
            if one[key] != another[key]:
                yield f"{key} of parameter group {number} is {one[key]} and {another[key]}"
