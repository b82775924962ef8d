"""Durations and sizes with units, and human-readable numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

DurationUnit = Literal["epochs", "steps", "samples", "percent"]

_DURATION = re.compile(r"^\s*([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*(epochs?|steps?|samples?|%|percent)\s*$")
DURATION_RULE = "a duration is a number with a unit: '3 epochs', '500 steps', '100000 samples' or '10%'"

# Steps, samples or epochs; a sum of this many seconds is valid for every clock and timeout.
_LONGEST, _LONGEST_SECONDS = 1e15, 1e9

TimeUnit = Literal["seconds", "minutes", "hours", "days"]

_TIME = re.compile(r"^\s*([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*(seconds?|secs?|s|minutes?|mins?|m|hours?|h|days?|d)\s*$")
_SECONDS: dict[TimeUnit, float] = {"seconds": 1, "minutes": 60, "hours": 3600, "days": 86400}

_PREFIXES = (
    ("P", 1e15),
    ("T", 1e12),
    ("G", 1e9),
    ("M", 1e6),
    ("k", 1e3),
    ("", 1.0),
    ("m", 1e-3),
    ("µ", 1e-6),
    ("n", 1e-9),
)
TIME_RULE = "a time is a number above zero with a unit: '90 seconds', '10 minutes' or '2 hours' (or s, m, h, d)"


@dataclass(frozen=True)
class Duration:
    """A duration of training with its unit; :meth:`to_steps` converts it to whole steps."""

    value: float
    unit: DurationUnit

    @classmethod
    def parse(cls, text: object) -> Duration:
        """Parse ``'3 epochs'``, ``'500 steps'``, ``'100000 samples'`` or ``'10%'``.

        Raises:
            ValueError: If the unit is missing or unknown, or the text is not a duration.
        """
        match = _DURATION.match(text) if isinstance(text, str) else None
        if match is None:
            raise ValueError(f"found {text!r}, but {DURATION_RULE}")
        value = float(match[1])
        if value > _LONGEST:
            raise ValueError(f"found {text!r}, but no run is longer than {_LONGEST:g} of anything")
        return cls(
            value, next(unit for unit in get_args(DurationUnit) if unit.startswith(match[2].replace("%", "percent")))
        )

    def to_steps(self, *, samples_per_epoch: int, global_batch_size: int, total_steps: int | None = None) -> int:
        """Convert to a whole number of optimizer steps: rounded to nearest; for samples, enough to use them all.

        An epoch has ``ceil(samples_per_epoch / global_batch_size)`` steps, the last one smaller.

        Raises:
            ValueError: If a percentage is used before the run's total is known.
        """
        steps_per_epoch = math.ceil(samples_per_epoch / global_batch_size)
        match self.unit:
            case "steps":
                steps = self.value
            case "epochs":
                steps = self.value * steps_per_epoch
            case "samples":
                epochs, rest = divmod(self.value, samples_per_epoch)
                steps = epochs * steps_per_epoch + math.ceil(rest / global_batch_size)
            case "percent":
                if total_steps is None:
                    raise ValueError(f"found '{self}', but the run's own length cannot be a percentage")
                steps = self.value / 100 * total_steps
        return round(steps)

    def __str__(self) -> str:
        return f"{_number(self.value)}%" if self.unit == "percent" else _with_unit(self.value, self.unit)


@dataclass(frozen=True)
class TimeSpan:
    """A wall-clock time with its unit."""

    value: float
    unit: TimeUnit

    @classmethod
    def parse(cls, text: object) -> TimeSpan:
        """Parse ``'90 seconds'``, ``'10 minutes'`` or ``'2 hours'``.

        Raises:
            ValueError: If the unit is missing or unknown, the text is not a time, or the time is zero.
        """
        match = _TIME.match(text) if isinstance(text, str) else None
        span = (
            None if match is None else cls(float(match[1]), next(unit for unit in _SECONDS if unit[0] == match[2][0]))
        )
        if span is None or not 0 < span.seconds <= _LONGEST_SECONDS:
            longest = "" if span is None else f", and at most {_LONGEST_SECONDS:g} seconds"
            raise ValueError(f"found {text!r}, but {TIME_RULE}{longest}")
        return span

    @property
    def seconds(self) -> float:
        """The time in seconds."""
        return self.value * _SECONDS[self.unit]

    def __str__(self) -> str:
        return _with_unit(self.value, self.unit)


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(value)


def _with_unit(value: float, unit: str) -> str:
    return f"{_number(value)} {unit.removesuffix('s') if value == 1 else unit}"


def format_seconds(seconds: float) -> str:
    """Format a time span: ``0.42 s``, ``12.3 s``, ``4 min 05 s``, ``3 h 20 min``."""
    if seconds < 0.995:
        return f"{seconds:.2f} s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, remainder = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {remainder:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def format_seconds_range(low: float, high: float) -> str:
    """Format a range of time spans: ``9.8 to 12.3 s``, ``55.0 s to 1 min 08 s``."""
    first, last = format_seconds(low), format_seconds(high)
    if first == last:
        return first
    return (
        f"{first.removesuffix(' s')} to {last}" if "min" not in last and last.endswith(" s") else f"{first} to {last}"
    )


def format_bytes(count: float) -> str:
    """Format a size in binary units: ``512 B``, ``1.5 KiB``, ``147 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        digits = 0 if unit == "B" or abs(count) >= 99.95 else 1
        if round(abs(count), digits) < 1024 or unit == "GiB":
            return f"{count:.{digits}f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def format_si(value: float, unit: str) -> str:
    """Format an amount with three digits and a decimal prefix: ``934 MFLOP``, ``43.8 MB``, ``16.5 ms``."""
    prefix, scale = next((each for each in _PREFIXES if abs(float(f"{value:.3g}")) >= each[1]), ("", 1.0))
    amount = value / scale
    digits = 2 if abs(amount) < 9.995 else 1 if abs(amount) < 99.95 else 0
    return f"{amount:,.{digits}f} {prefix}{unit}"


def parse_bytes(text: str) -> int:
    """Parse ``4GiB``, ``512 MiB`` or ``16 GB`` (powers of 1024, and of 1000 without the i).

    Raises:
        ValueError: If the unit is missing or unknown, or the size is zero.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT])(i?)B\s*", text, flags=re.IGNORECASE)
    if match is None or not float(match[1]):
        raise ValueError(f"found {text!r}, but a size needs a unit: 512MiB, 4GiB or 16GB")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** ("KMGT".index(match[2].upper()) + 1))


def metric_title(name: str) -> str:
    """Return a metric's display name: ``top-1 accuracy``, ``bits per byte``, ``box mAP50``, ``macro F1``, ``MAE x``."""
    title = re.sub(r"\bmap(\d*)$", r"mAP\1", re.sub(r"^top(\d+)", r"top-\1", name).replace("_", " "))
    title = re.sub(r"^(mae|rmse|r2)\b", lambda error: error[0].upper(), title)
    return re.sub(r" f1$", " F1", re.sub(r"^(m?)iou\b", r"\1IoU", title))


def metric_unit(name: str) -> str:
    """Return the unit of a metric by its name: ``%`` for accuracies, IoU, mean average precision and F1."""
    is_error = re.match(r"(mae|rmse|r2)_", name)  # belongs to a column of numbers, which may have any name
    is_share = re.search(
        r"_accuracy$|(^|_)(map\d*|(macro|micro|entity)_f1|entity_(precision|recall))$|^m?iou(_|$)", name
    )
    return "%" if is_share and not is_error else ""


def format_metric(name: str, value: float) -> str:
    """Format a metric's value: ``91.23 %`` for percentages, else four digits; ``undefined`` for NaN."""
    if math.isnan(value):
        return "undefined"
    # Metrics of clicks have this name in percent; one's own metric of the name is a share.
    is_percentage = metric_unit(name) or (name == "accuracy" and value > 1)
    return f"{value:.2f} %" if is_percentage else f"{value:.4g}"


def format_count(count: float) -> str:
    """Format a count with thousands separators, ``1,281,167``, and a small rate with two digits, ``0.66``."""
    return f"{count:,.0f}" if count >= 10 or count == int(count) else f"{count:.2g}"


def first_of(names: Sequence[str], most: int = 6) -> str:
    """Return the first few names, and an ellipsis for the others."""
    return ", ".join(names[:most]) + ", …" * (len(names) > most)


def counted(count: int, noun: str) -> str:
    """Format a count with its noun: ``1 process``, ``2 processes``."""
    suffix = "" if count == 1 else "es" if noun.endswith(("s", "ch")) else "s"
    return f"{format_count(count)} {noun}{suffix}"
