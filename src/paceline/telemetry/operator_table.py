"""Which operators took the time of the steps that were profiled? A page to read before opening the trace."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]  # it is not in torch's list of exports

from paceline.telemetry.meter import PHASES
from paceline.units import format_bytes

AROUND_THE_STEP = "around the step"
# They lie inside others, and are none of the whole.
_INSIDE_OTHERS = frozenset({"h2d", "communication"})
_OPERATORS, _SHAPES = 30, 15
_HEAD = """# {title}

Where the time went, in milliseconds over all of them. *Self* is an operator's own time, without that of the operators
it calls. Profiling makes every operator a little slower, small ones most.
"""


@dataclass(frozen=True)
class _Columns:
    """Which columns there are."""

    device: bool
    memory: bool
    shapes: bool = False


def operator_table(profile: torch.profiler.profile, title: str, *, memory: bool) -> str:
    """The profile as a Markdown page: the step's phases, the operators that took longest, and their shapes.

    Args:
        profile: One that has ended.
        title: What was profiled.
        memory: Whether it recorded allocations.
    """
    averages: list[Any] = [each for each in profile.key_averages() if each.device_type == DeviceType.CPU]
    phases = {each.key: each for each in averages if each.key in (*PHASES, AROUND_THE_STEP)}
    operators = [each for each in averages if _is_operator(each.key)]
    columns = _Columns(device=any(each.self_device_time_total for each in operators), memory=memory)
    by_shape: list[Any] = [
        each
        for each in profile.key_averages(group_by_input_shape=True)
        if each.device_type == DeviceType.CPU and _is_operator(each.key)
    ]
    parts = [
        _HEAD.format(title=title),
        "## Phases\n",
        _phases(phases),
        "\n## Operators\n",
        _operators(operators, _OPERATORS, columns),
        "\n## Operators by the shapes they are given\n",
        _operators(by_shape, _SHAPES, _Columns(columns.device, columns.memory, shapes=True)),
    ]
    return "\n".join(parts) + "\n"


def _is_operator(key: str) -> bool:
    """Whether an entry is no range of the clock's, nor of the profiler's own."""
    return key not in PHASES and key != AROUND_THE_STEP and not key.startswith(("step ", "[memory]"))


def _phases(phases: dict[str, Any]) -> str:
    names = [name for name in (*PHASES, AROUND_THE_STEP) if name in phases]
    whole = sum(phases[name].cpu_time_total for name in names if name not in _INSIDE_OTHERS) or 1
    rows = [
        (name, str(phases[name].count), _ms(phases[name].cpu_time_total), _share(phases[name].cpu_time_total, whole))
        for name in names
    ]
    return _table(("phase", "times", "ms on the host", "share"), rows)


def _operators(operators: Sequence[Any], count: int, columns: _Columns) -> str:
    def own(each: Any) -> float:
        return float(each.self_device_time_total if columns.device else each.self_cpu_time_total)

    whole = sum(map(own, operators)) or 1
    longest = sorted(operators, key=own, reverse=True)[:count]
    head = [
        "operator",
        *(["shapes"] if columns.shapes else []),
        "calls",
        *(["self ms, device"] if columns.device else []),
        "self ms, host",
        "share",
        *(["allocated"] if columns.memory else []),
    ]
    rows = [
        [
            f"`{each.key}`",
            *([_shapes(each.input_shapes)] if columns.shapes else []),
            str(each.count),
            *([_ms(each.self_device_time_total)] if columns.device else []),
            _ms(each.self_cpu_time_total),
            _share(own(each), whole),
            *([_allocated(each, columns)] if columns.memory else []),
        ]
        for each in longest
    ]
    return _table(head, rows)


def _allocated(each: Any, columns: _Columns) -> str:
    count = each.self_device_memory_usage if columns.device else each.self_cpu_memory_usage
    return f"{'-' * (count < 0)}{format_bytes(abs(count))}"


def _shapes(shapes: Iterable[Sequence[int]] | None) -> str:
    known = ["x".join(map(str, shape)) for shape in shapes or () if shape]
    return ", ".join(known) if known else "-"


def _ms(microseconds: float) -> str:
    return f"{microseconds / 1e3:.2f}"


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
