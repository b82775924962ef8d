"""A finding: what is wrong, where, why, what to change, and what the change is worth."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from paceline_advisor import frozen

Severity = Literal["breaks", "slows", "spoils", "notice"]
"""``breaks``: the run fails, on this device or with several processes. ``slows``: steps take longer than needed.
``spoils``: the run may learn less than it could. ``notice``: this may be intended, but has a cost."""
Keeps = Literal["same", "rounding", "training"]


@dataclass(frozen=True)
class CodeLine:
    """A line of code.

    Attributes:
        file: Its file.
        line: Its number.
        what: What happens there.
        count: How often, in one micro-batch.
    """

    file: str
    line: int
    what: str
    count: int = 1

    def __str__(self) -> str:
        times = "" if self.count == 1 else f", {self.count} times"
        here = Path(self.file)
        shown = here.relative_to(Path.cwd()) if here.is_relative_to(Path.cwd()) else here
        return f"{shown}:{self.line} ({self.what}{times})"


@frozen
class Advice:
    """What to change.

    Attributes:
        words: The change, in words.
        overrides: The same as recipe values by dotted key; empty if no recipe key makes the change.
        keeps: What the change does to the training: nothing (``same``), it only rounds differently (``rounding``), or
            it changes the training (``training``).
    """

    words: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    keeps: Keeps = "same"


@frozen
class Gain:
    """Measured gain of a change: samples per second with it, relative to without.

    Attributes:
        middle: The ratio.
        low: Lower end of the 95 % prediction interval for another such measurement.
        high: Upper end of that interval.
        rounds: Number of interleaved measurements with and without the change.
    """

    middle: float
    low: float
    high: float
    rounds: int

    @property
    def is_certain(self) -> bool:
        """Whether the interval is entirely above 1."""
        return self.low > 1

    def __str__(self) -> str:
        figures = f"{self.middle:.3f} ({self.low:.3f} to {self.high:.3f}, {self.rounds} rounds)"
        return f"{figures} times as fast" if self.is_certain else f"no gain measured: {figures}"


@frozen
class Finding:
    """A finding about a run.

    Attributes:
        name: Its name, also in the guide.
        severity: How bad it is.
        evidence: The value found, in a sentence.
        why: Why this is a problem, in a sentence.
        source: The publication or page that says so.
        advice: What to change.
        expected: Expected gain by rule of thumb, in words.
        speedup: The same as a range of factors, which orders the findings.
        places: Lines of code.
        layers: Modules of the network.
        predicted: Whether it applies to a device that is not present.
        gain: The measured gain, if any.
    """

    name: str
    severity: Severity
    evidence: str
    why: str
    source: str
    advice: Advice
    expected: str
    speedup: tuple[float, float] = (1.0, 1.0)
    places: tuple[CodeLine, ...] = ()
    layers: tuple[str, ...] = ()
    predicted: bool = False
    gain: Gain | None = None

    @property
    def counts(self) -> bool:
        """Whether a run with it is unhealthy: it is neither possibly intended, nor measured to cost nothing."""
        if self.severity == "slows" and self.gain is not None:
            return self.gain.is_certain
        return self.severity != "notice"


def ranked(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return findings, worst first.

    Those that break a run come first, then those with a measured gain, the largest first. Unmeasured findings follow,
    by severity and expected speedup. Findings whose change had no measured gain are last.
    """

    def rank(finding: Finding) -> tuple[float, ...]:
        expected = finding.speedup[0] * finding.speedup[1]
        if finding.severity == "breaks":
            return (0, -expected)
        if finding.gain is None:
            return (2, get_args(Severity).index(finding.severity), -expected)
        return (1 if finding.gain.is_certain else 3, -finding.gain.middle)

    return tuple(sorted(findings, key=rank))


TUNING = "PyTorch, Performance Tuning Guide"
LINEAR = "NVIDIA, Linear/Fully-Connected Layers User's Guide"
CONVOLUTION = "NVIDIA, Convolutional Layers User's Guide"
RECURRENT = "NVIDIA, Recurrent Layers User's Guide"
CONVNETS = "NVIDIA, DeepLearningExamples, PyTorch/Classification/ConvNets"
DDP = "PyTorch, DistributedDataParallel; Li et al. 2020"
GOYAL = "Goyal et al. 2017, Accurate, Large Minibatch SGD"
KRIZHEVSKY = "Krizhevsky 2014, One weird trick; Malladi et al. 2022, On the SDEs and Scaling Rules"
CUDA_MODES = "PyTorch, CUDA semantics and environment variables"
AMP = "PyTorch, Automatic Mixed Precision; NVIDIA, Train With Mixed Precision"
OWN = "Paceline, docs/guide/doctor.md"
