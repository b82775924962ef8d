"""What holds the steps of a run back? One sentence with what to change, or none where the evidence is not clear."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

# So many records must agree: of three in four, the share must be as large as this.
_LEAST_RECORDS = 3
_CLEAR = {
    "data_wait": 0.10,
    "h2d": 0.10,
    "communication": 0.10,
    "optimizer": 0.30,
    "ema": 0.10,
    "logging": 0.05,
    "host": 0.15,
}
_COMPUTING = 0.75
# A device that is no further behind the host than this part of a step waits for the host.
_NO_LAG = 0.1


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What the records say.

    Attributes:
        shares: Of each phase, its share of the step in each record, in [0, 1]; no numbers where it was not told.
        lags: In each record, how far the device was behind the host, in steps; no numbers on a CPU.
        slow: A process that the others wait for: its rank, the phase in which it is slow, how many times as long it
            takes, the rank that waits longest, and the share of a step that it waits.
        plan: The run's.
    """

    shares: Mapping[str, Sequence[float]]
    lags: Sequence[float]
    slow: tuple[int, str, float, int, float] | None
    plan: Mapping[str, Any]


def find_bottleneck(evidence: Evidence) -> str | None:
    """Say what a step is bound by: what a process is waited for, else the largest avoidable share, else computing."""
    if max(len(shares) for shares in evidence.shares.values()) < _LEAST_RECORDS:
        return None
    if evidence.slow is not None and evidence.slow[-1] >= _CLEAR["communication"]:
        rank, phase, factor, waiting, share = evidence.slow
        return (
            f"communication: {share:.0%} of a step of rank {waiting} is spent waiting for rank {rank}, which takes "
            f"{factor:.1f} times as long as the others for its own part, most of it in {phase}."
        )
    clear = {phase: _typical(evidence, phase) for phase in _CLEAR if _at_least(evidence, phase) >= _CLEAR[phase]}
    if clear:
        worst = max(clear, key=lambda phase: clear[phase])
        return f"{_SENTENCES[worst](evidence.plan).format(share=clear[worst])}"
    computing = _typical(evidence, "forward") + _typical(evidence, "backward")
    if len(evidence.lags) >= _LEAST_RECORDS and quantiles(evidence.lags)[2] < _NO_LAG:
        return (
            "launching: the device is done with its work before the host has launched more; use a larger "
            "batch.micro_size, or model.compile=true."
        )
    # Where communication cannot be told from them, waiting may be a part of the passes.
    is_told = bool(evidence.shares["communication"]) or evidence.plan.get("strategy") == "single"
    if computing >= _COMPUTING and is_told:
        return f"computing: forward and backward passes take {computing:.0%} of a step; little else is left to gain."
    return None


def _at_least(evidence: Evidence, phase: str) -> float:
    """The share that three in four records reach."""
    shares = evidence.shares[phase]
    return quantiles(shares)[0] if len(shares) >= _LEAST_RECORDS else 0.0


def _typical(evidence: Evidence, phase: str) -> float:
    return median(evidence.shares[phase]) if evidence.shares[phase] else 0.0


def _data(plan: Mapping[str, Any]) -> str:
    data = plan.get("data", {})
    if data.get("backend") is None:
        advice = (
            "the task's own pipeline makes them (its open_pipeline): let it read ahead, in processes beside this one"
        )
    elif data["backend"] in ("pytorch", "dali"):
        advice = f"use more than data.workers={data.get('workers')}, or packed data (paceline pack)"
    else:
        advice = "vary images less, or let loader processes do it: data.backend=pytorch with data.workers"
    return "data: {share:.0%} of a step waits for batches; " + advice + "."


def _h2d(plan: Mapping[str, Any]) -> str:
    if plan.get("device") == "cpu":
        return "data: {share:.0%} of a step is spent on normalising and mixing batches; use a smaller data.image_size."
    return (
        "data: {share:.0%} of a step waits for its batch to be brought to the device; use a smaller data.image_size, "
        "or see that nothing else takes the bus."
    )


def _communication(plan: Mapping[str, Any]) -> str:
    advice = "use more samples per process and step (batch.global_size)"
    if plan.get("strategy") == "ddp":
        advice += ", or send less (parallel.gradient_compression)"
    return "communication: {share:.0%} of a step waits for the exchange of gradients; " + advice + "."


_SENTENCES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "data_wait": _data,
    "h2d": _h2d,
    "communication": _communication,
    "optimizer": lambda _: (
        "optimizer: {share:.0%} of a step goes into clipping and the update; use a larger batch.global_size, so that "
        "there are fewer of them."
    ),
    "ema": lambda _: "moving average: it takes {share:.0%} of a step; use a larger batch.global_size.",
    "logging": lambda _: (
        "logging: {share:.0%} of a step goes into records; use a larger telemetry.log_every, or fewer "
        "telemetry.trackers."
    ),
    "host": lambda _: (
        "host: {share:.0%} of a step is spent in Python between its phases; use a larger batch.micro_size, so that "
        "there are fewer steps."
    ),
}
