"""What are a run's curves, in few numbers that can be held against another run's?

A run is cut into six windows, short ones first, where a missing warm-up shows. Of each the curves keep one number:
means of what step records say, and the last evaluation. So it matters little how often a run writes and evaluates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from paceline.units import metric_title, metric_unit

Event = Mapping[str, Any]
Values = tuple[float | None, ...]

WINDOWS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1.0)
"""Where windows end, as shares of a run's steps."""

Scale = Literal["log", "logit", "linear", "set"]
"""On which scale seeds are taken to scatter evenly; ``set`` is what no seed decides, such as the learning rate."""
SCALES: tuple[str, ...] = get_args(Scale)

# Before, what networks with BatchNorm and moving averages score is nearly chance, and scatters wildly.
_FIRST_EVALUATED = 2
# Of so much of a window the step records must tell, and of so many steps at most, in lengths of the window: records
# that reach far beyond it say little of it.
_ENOUGH, _AT_MOST = 0.5, 1.5


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One number for each window.

    Attributes:
        name: What it is called: ``held-out loss, ema weights``.
        scale: On which scale it is compared.
        values: None where the run has no number, or is not so far.
        samples: Out of how many held-out samples an accuracy is; 0 for what is none.
    """

    name: str
    scale: Scale
    values: Values
    samples: int = 0


@dataclass(frozen=True)
class _Stretch:
    """What one step record tells of: the steps after ``first`` up to ``last``."""

    first: int
    last: int
    record: Event

    def shared(self, begin: int, end: int) -> int:
        return min(self.last, end) - max(self.first, begin)


def windows_of(total_steps: int) -> list[tuple[int, int]]:
    """Each window's steps: those after the first number, up to the second."""
    ends = [max(1, round(share * total_steps)) for share in WINDOWS]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def curves_of(events: Iterable[Event], total_steps: int, headline: str) -> list[Curve]:
    """The curves of a run, over or under way.

    Args:
        events: All of its events, in order.
        total_steps: How many steps it is to have.
        headline: The metric that one looks at first, which is compared beside the loss.
    """
    known = list(events)
    records = [each for each in known if each["event"] == "step"]
    evaluations = [each for each in known if each["event"] == "evaluation"]
    windows = windows_of(total_steps)
    stretches = [
        _Stretch(before["step"] if before else 0, record["step"], record)
        for before, record in zip([None, *records], records, strict=False)
    ]
    return [
        _stepwise("training loss", stretches, windows, "loss", _mean),
        _stepwise("gradient norm", stretches, windows, "grad_norm", _geometric_mean),
        Curve(name="learning rate", scale="set", values=tuple(_rate_after(records, *window) for window in windows)),
        *_evaluated(evaluations, windows, dict.fromkeys(("loss", headline))),
        *_shown(evaluations, windows),
    ]


def _stepwise(
    name: str,
    stretches: Sequence[_Stretch],
    windows: Sequence[tuple[int, int]],
    key: str,
    mean: Callable[[Sequence[tuple[int, float]]], float | None],
) -> Curve:
    values: list[float | None] = []
    for begin, end in windows:
        parts = [(each.shared(begin, end), each.record.get(key)) for each in stretches]
        told = [(steps, float(value)) for steps, value in parts if steps > 0 and value is not None]
        is_over = bool(stretches) and stretches[-1].last >= end
        enough = sum(steps for steps, _ in told) >= _ENOUGH * (end - begin)
        reached = sum(each.last - each.first for each in stretches if each.shared(begin, end) > 0)
        is_fine = reached <= _AT_MOST * (end - begin)
        values.append(mean(told) if is_over and is_fine and told and enough else None)
    return Curve(name=name, scale="log", values=tuple(values))


def _mean(parts: Sequence[tuple[int, float]]) -> float:
    return math.fsum(steps * value for steps, value in parts) / sum(steps for steps, _ in parts)


def _geometric_mean(parts: Sequence[tuple[int, float]]) -> float | None:
    if any(value <= 0 for _, value in parts):
        return None
    return math.exp(_mean([(steps, math.log(value)) for steps, value in parts]))


def _rate_after(records: Sequence[Event], begin: int, step: int) -> float | None:
    """The rate after the last step of a window, between those that are recorded; None if these lie far apart."""
    before: Event | None = None
    for record in records:
        if record["step"] >= step:
            if record["step"] == step or before is None:
                return float(record["lr"]) if record["step"] == step else None
            apart = record["step"] - before["step"]
            if apart > _AT_MOST * (step - begin):
                return None
            part = (step - before["step"]) / apart
            return float(before["lr"] + part * (record["lr"] - before["lr"]))
        before = record
    return None


def _evaluated(
    evaluations: Sequence[Event], windows: Sequence[tuple[int, int]], metrics: Iterable[str]
) -> Iterator[Curve]:
    for metric in metrics:
        for weights in ("model", "ema"):
            found = [each for each in evaluations if each["weights"] == weights and each.get(metric) is not None]
            if not found:
                continue
            is_share = bool(metric_unit(metric))
            title = "held-out loss" if metric == "loss" else metric_title(metric)
            late = [_last_in(found, window, metric) for window in windows[_FIRST_EVALUATED:]]
            values = (*[None] * _FIRST_EVALUATED, *late)
            positive = all(value is None or value > 0 for value in values)
            yield Curve(
                name=f"{title}, {weights} weights",
                scale="logit" if is_share else "log" if positive else "linear",
                values=values,
                samples=int(found[-1]["samples"]) if is_share else 0,
            )


def _shown(evaluations: Sequence[Event], windows: Sequence[tuple[int, int]]) -> Iterator[Curve]:
    """What the network was given to score."""
    for key, name in (("input_mean", "mean of the inputs"), ("input_std", "spread of the inputs")):
        found = [each for each in evaluations if each.get(key) is not None]
        if found:
            yield Curve(name=name, scale="set", values=tuple(_last_in(found, window, key) for window in windows))


def _last_in(evaluations: Sequence[Event], window: tuple[int, int], key: str) -> float | None:
    inside = [each for each in evaluations if window[0] < each["step"] <= window[1]]
    return float(inside[-1][key]) if inside else None
