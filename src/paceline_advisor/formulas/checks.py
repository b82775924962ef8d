"""Does a published table contradict itself?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline_advisor.formulas.scaling import speedup

TOLERANCE = 0.05


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a table of throughputs.

    Attributes:
        setting: What is the same in the lines that are compared: model, machine.
        precision: In which numbers was computed.
        devices: On how many devices.
        rate: Samples per second.
        printed_scaling: Speed-up over one device that is printed beside it.
        printed_speedup: Speed-up over ``baseline_precision`` that is printed beside it.
        baseline_precision: See there.
    """

    setting: str
    precision: str
    devices: int
    rate: float
    printed_scaling: float | None = None
    printed_speedup: float | None = None
    baseline_precision: str | None = None


@dataclass(frozen=True)
class Finding:
    """What is wrong with a line of a table.

    Attributes:
        row: The line.
        what: ``scaling`` or ``speedup`` (a printed ratio that the table's own rates contradict), or ``superlinear``.
        printed: The ratio that is printed; for ``superlinear`` the number of devices.
        computed: The ratio of the rates.
    """

    row: Row
    what: str
    printed: float
    computed: float


def contradicts(printed: float, rate: float, baseline_rate: float, tolerance: float = TOLERANCE) -> bool:
    """Whether a printed speed-up differs by more than ``tolerance`` from that of its own figures.

    Source:
        Arithmetic; NVIDIA, DeepLearningExamples, MxNet/Classification/RN50v1.5/README.md prints 2.18 for
        3410.52 / 1055.78.
    """
    return abs(speedup(rate, baseline_rate) / printed - 1) > tolerance


def is_superlinear(rate: float, single_rate: float, devices: int, tolerance: float = TOLERANCE) -> bool:
    """Whether devices are said to be faster together than each by itself, by more than ``tolerance``.

    Source:
        Arithmetic; NVIDIA, DeepLearningExamples, PyTorch/Classification/ConvNets/efficientnet/README.md has 36 and 641
        images/s for 1 and 8 GPUs.
    """
    return speedup(rate, single_rate) > devices * (1 + tolerance)


def inconsistencies(rows: Sequence[Row], tolerance: float = TOLERANCE) -> tuple[Finding, ...]:
    """All lines of a table that its own figures contradict.

    Source:
        The two checks above, for each line.
    """
    rates = {(each.setting, each.precision, each.devices): each.rate for each in rows}
    return tuple(found for row in rows for found in _of_row(row, rates, tolerance))


def _of_row(row: Row, rates: dict[tuple[str, str, int], float], tolerance: float) -> Iterable[Finding]:
    single = rates.get((row.setting, row.precision, 1))
    if single is not None and row.devices > 1:
        if is_superlinear(row.rate, single, row.devices, tolerance):
            yield Finding(row, "superlinear", row.devices, speedup(row.rate, single))
        if row.printed_scaling and contradicts(row.printed_scaling, row.rate, single, tolerance):
            yield Finding(row, "scaling", row.printed_scaling, speedup(row.rate, single))
    baseline = rates.get((row.setting, row.baseline_precision or "", row.devices))
    if row.printed_speedup and baseline and contradicts(row.printed_speedup, row.rate, baseline, tolerance):
        yield Finding(row, "speedup", row.printed_speedup, speedup(row.rate, baseline))
