"""Sections Recipe and Environment: settings and machines of each run, differences first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paceline.pages.page import Block, Marked, Table, Text
from paceline.report.html.runs import RunRecord, flattened
from paceline.units import format_bytes


def recipe(runs: Sequence[RunRecord]) -> Iterator[Block]:
    """The recipe's keys, those that differ first."""
    yield from _side_by_side(runs, [run.recipe for run in runs], "recipe", folded=len(runs) > 1)
    reasons = [(key, str(why)) for run in runs[:1] for key, why in run.plan.get("reasons", {}).items()]
    if reasons and len(runs) == 1:
        yield Table(columns=("key", "reason"), rows=reasons, caption="Why each auto is what it is", folded=True)


def environment(runs: Sequence[RunRecord]) -> Iterator[Block]:
    """Machines and versions, those that differ first."""
    yield from _side_by_side(runs, [_environment(run) for run in runs], "environment", folded=True)


def _environment(run: RunRecord) -> dict[str, Any]:
    told = flattened(run.environment)
    told.pop("time", None)
    return {
        key: format_bytes(value) if key.endswith("memory_bytes") and value else value for key, value in told.items()
    }


def _side_by_side(
    runs: Sequence[RunRecord], trees: Sequence[Mapping[str, Any]], what: str, *, folded: bool
) -> Iterator[Block]:
    keys = list(dict.fromkeys(key for tree in trees for key in tree))
    if not keys:
        yield Text(f"No {what} is recorded.")
        return
    columns = ("key", *(run.name if len(runs) > 1 else "value" for run in runs))
    differing = [key for key in keys if len({repr(tree.get(key)) for tree in trees}) > 1]
    if len(runs) > 1:
        if differing:
            rows = [(key, *_values(trees, key, differs=True)) for key in differing]
            yield Table(columns=columns, rows=rows, caption=f"Where the {what}s differ")
        else:
            yield Text(f"The {what}s are the same.")
    rows = [(key, *_values(trees, key, differs=key in differing)) for key in keys]
    yield Table(columns=columns, rows=rows, caption=f"The whole {what}", folded=folded)


def _values(trees: Sequence[Mapping[str, Any]], key: str, *, differs: bool) -> Iterator[str]:
    """A value of each; what differs from the first is marked."""
    values = [_written(tree[key]) if key in tree else "–" for tree in trees]
    yield from (Marked(value) if differs and value != values[0] else value for value in values)


def _written(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case list():
            return ", ".join(map(_written, value)) or "none"
        case _:
            return str(value)
