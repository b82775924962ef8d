"""What is there to say about a run under way, and in which words? Shared by all displays."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.recipe.phases import Epochs
from paceline.records.reader import NO_METRICS
from paceline.units import format_count, format_metric, format_seconds, metric_title

_ACCURACY = re.compile(r"^top(\d+)_accuracy$")
_WORTH_TELLING = 0.05


@dataclass
class RunProgress:
    """Where the run is, what its last log record said, and how long it will take.

    Attributes:
        total_steps: Steps of the whole run.
        step: Steps done.
        cut: How its steps are cut from epochs.
        unit: What a sample is called: ``images``.
        record: The last step event.
    """

    total_steps: int
    step: int
    cut: Epochs
    unit: str
    record: Mapping[str, Any] = field(default_factory=dict)
    _pace_from: tuple[int, float] | None = None

    def advance(self, step: int) -> None:
        """Note that a step is done. The first one sets the pace's beginning: it is slower than all others."""
        self.step = step
        if self._pace_from is None:
            self._pace_from = (step, time.perf_counter())

    @property
    def epochs(self) -> int:
        """Epochs of the whole run, a last partial one included."""
        return self.cut.place(max(self.total_steps - 1, 0))[0] + 1

    @property
    def epoch(self) -> int:
        """Epoch of the last step, counted from 1."""
        return self.cut.place(max(self.step - 1, 0))[0] + 1

    @property
    def step_in_epoch(self) -> int:
        """Steps done in that epoch."""
        return self.step - self.cut.first_step(self.epoch - 1)

    @property
    def steps_in_epoch(self) -> int:
        """Steps of that epoch: the run's last one may be cut short."""
        first = self.cut.first_step(self.epoch - 1)
        return min(self.cut.first_step(self.epoch), self.total_steps) - first

    @property
    def seconds_left(self) -> float | None:
        """Time to the end at the pace so far, evaluations and saves included; None if there is no telling."""
        if self._pace_from is None or not self._pace_from[0] < self.step < self.total_steps:
            return None
        first_step, since = self._pace_from
        seconds_per_step = (time.perf_counter() - since) / (self.step - first_step)
        return seconds_per_step * (self.total_steps - self.step)

    @property
    def time_left(self) -> str:
        """The time left in words, or an empty string where it is not known."""
        seconds = self.seconds_left
        return "" if seconds is None else f"{format_seconds(seconds)} left"

    def take_figures(self) -> str:
        """The last log record in words, once: told again beside a later step it would mislead."""
        figures, self.record = self.figures, {}
        return figures

    @property
    def figures(self) -> str:
        """The last log record in words; what it does not know is left out."""
        return figures(self.record, self.unit)

    @property
    def place(self) -> str:
        """Epoch and step in words."""
        return f"epoch {self.epoch}/{self.epochs}  step {self.step}/{self.total_steps}"

    @property
    def line(self) -> str:
        """Everything in one line."""
        return "  ".join(part for part in (self.place, self.figures, self.time_left) if part)


def figures(record: Mapping[str, Any], unit: str) -> str:
    """A log record in words; what it does not know is left out."""
    parts = []
    if record.get("loss") is not None:
        parts.append(f"training loss {record['loss']:.4g}")
    elif "loss" in record:
        parts.append("training loss not finite")
    if record.get("lr") is not None:
        parts.append(f"lr {record['lr']:.3g}")
    if record.get("throughput_samples_per_second") is not None:
        parts.append(f"{format_count(record['throughput_samples_per_second'])} {unit}/s")
    if record.get("throughput_tokens_per_second") is not None:
        parts.append(f"{format_count(record['throughput_tokens_per_second'])} tokens/s")
    if record.get("mfu") is not None:
        parts.append(f"MFU {record['mfu']:.1%}")
    if record.get("data_wait_fraction") is not None:
        parts.append(f"data wait {record['data_wait_fraction']:.0%}")
    waits, step = record.get("communication_seconds"), record.get("step_seconds")
    if waits and step and waits >= _WORTH_TELLING * step:
        parts.append(f"communication {waits / step:.0%}")
    return "  ".join(parts)


def describe(event: Mapping[str, Any]) -> str | None:
    """Return the line a person should see for an event, or None where there is nothing to tell."""
    match event["event"]:
        case "evaluation":
            return _evaluation(event)
        case "incident":
            return f"step {event['step']}  {event['incident'].replace('_', ' ')}: {event['message']}"
        case "measurement":
            return f"{event['message']} (measured in {event['seconds']:.1f} s)"
        case "resume":
            return f"resumed from {event['checkpoint']}"
        case "stop":
            return f"step {event['step']}  stopped: {event['reason']}"
        case _:
            return None  # steps are shown as progress; saving, starting and finishing go without saying


def _evaluation(event: Mapping[str, Any]) -> str:
    """Word an evaluation: ``epoch 2  step 90  validation (ema): loss 0.31  top-1 91.23 %``."""
    shown = []
    for name, value in event.items():
        if name in NO_METRICS or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        accuracy = _ACCURACY.match(name)
        title = f"top-{accuracy[1]}" if accuracy else metric_title(name)
        shown.append(f"{title} {format_metric(name, value)}")
    place = f"epoch {event['epoch']}  step {event['step']}" if "epoch" in event else f"step {event['step']}"
    return f"{place}  {event['split']} ({event['weights']}): {'  '.join(shown) or 'no finite figure'}"
