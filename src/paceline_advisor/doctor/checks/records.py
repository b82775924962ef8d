"""What do the records of a run that was made say: waiting, uneven ranks, a loss scale that fails?"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from paceline_advisor.doctor.findings import Advice, Finding
from paceline_advisor.doctor.sources import CONVNETS, GOYAL, OWN, TUNING
from paceline_advisor.doctor.subject import Subject

_WAITS = 0.1
_SKIPPED = 0.01


_QUICKER_IMAGES = (
    "data.workers=auto, packed data (paceline pack), or data.backend=dali; paceline check-data says what makes "
    "decoding slow"
)


def data_wait(subject: Subject) -> Iterator[Finding]:
    """Steps that waited for their batch."""
    found = [event["data_wait_fraction"] for event in _of(subject, "step") if event.get("data_wait_fraction")]
    if not found or (middle := statistics.median(found)) < _WAITS:
        return
    yield Finding(
        name="data_wait",
        severity="slows",
        evidence=f"half of the records have {middle:.0%} or more of the step in waiting for data",
        why="The device is idle while it waits.",
        source=TUNING,
        advice=Advice(
            words=_QUICKER_IMAGES if "data.backend" not in subject.plan.unused else "data.workers=auto or more"
        ),
        expected=f"up to {1 / (1 - middle):.2f} times as fast, as measured in the run",
        speedup=(1.0, 1 / (1 - middle)),
    )


def diverged(subject: Subject) -> Iterator[Finding]:
    """Losses, weights or metrics that are not finite, or a loss far above the first."""
    told = [
        event for event in _of(subject, "incident") if str(event.get("incident")).startswith(("nonfinite", "diverged"))
    ]
    if not told:
        return
    yield Finding(
        name="diverged",
        severity="spoils",
        evidence=f"{len(told)} time{'s' * (len(told) > 1)}; the last: {told[-1].get('message', '')}",
        why="Too large a step moves the weights to where the loss is larger, and so is the next step.",
        source=GOYAL,
        advice=Advice(
            words="a lower optimizer.lr (paceline find-lr), a longer schedule.warmup, or optimizer.clip_norm",
            keeps="training",
        ),
        expected="a loss that falls",
    )


def scaler_health(subject: Subject) -> Iterator[Finding]:
    """Steps that fp16 left out, or a scale that has fallen."""
    steps = _of(subject, "step")
    scales = [event["grad_scale"] for event in steps if event.get("grad_scale")]
    last = steps[-1] if steps else {}
    skipped = last.get("position", last.get("step", 0)) - last.get("step", 0)
    share = skipped / max(1, last.get("position", 1))
    fallen = bool(scales) and scales[-1] < 1
    if subject.plan.precision != "fp16" or not (fallen or share > _SKIPPED):
        return
    yield Finding(
        name="scaler_health",
        severity="spoils",
        evidence=f"{skipped} steps were left out ({share:.1%}), and the loss scale ended at "
        f"{scales[-1] if scales else 1:g}",
        why="Gradients overflow in fp16 faster than the scale can follow.",
        source=CONVNETS,
        advice=Advice(
            words="train.precision=bf16 where the device has it, or a lower optimizer.lr, or optimizer.clip_norm",
            keeps="training",
        ),
        expected="no step lost",
    )


def slow_rank(subject: Subject) -> Iterator[Finding]:
    """A process that the others waited for."""
    told = [event for event in _of(subject, "incident") if event.get("incident") == "slow_rank"]
    if not told:
        return
    yield Finding(
        name="slow_rank",
        severity="slows",
        evidence=f"{len(told)} times; the last: {told[-1].get('message', '')}",
        why="All processes wait for the slowest in each step: work must be spread evenly.",
        source=f"{TUNING} (load balance)",
        advice=Advice(words="look at that host; samples of like size in a batch; parallel.affinity=socket"),
        expected="as fast as the median rank",
        speedup=(1.0, 1.5),
    )


def recompilation(subject: Subject) -> Iterator[Finding]:
    """Graphs that were compiled again in the run."""
    told = [event for event in _of(subject, "incident") if event.get("incident") in ("recompile", "slow_compile")]
    if not told:
        return
    yield Finding(
        name="recompilation",
        severity="slows",
        evidence=f"{len(told)} times; the last: {told[-1].get('message', '')}",
        why="Compiling takes longer than many steps.",
        source=OWN,
        advice=Advice(words="sizes that do not change (no Python numbers that do), or model.compile=false"),
        expected="the seconds that the records tell",
        speedup=(1.0, 1.2),
    )


def _of(subject: Subject, kind: str) -> list[dict[str, Any]]:
    return [event for event in subject.run if event["event"] == kind]
