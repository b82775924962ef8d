"""A time that passes only where a test lets it, so that no busy machine disturbs what clocks and displays say of it."""

from __future__ import annotations

from collections import defaultdict

import pytest

from paceline.telemetry import clock, display


class SimulatedTime:
    """Stands in for the module ``time``.

    Attributes:
        now: Seconds.
        passed: Seconds, by what they passed in.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.passed: defaultdict[str, float] = defaultdict(float)

    def perf_counter(self) -> float:
        return self.now

    def pass_in(self, what: str, seconds: float) -> None:
        self.now += seconds
        self.passed[what] += seconds


@pytest.fixture
def simulated_time(monkeypatch: pytest.MonkeyPatch) -> SimulatedTime:
    """What the step clock and the displays read instead of the time."""
    simulated = SimulatedTime()
    for module in (clock, display):
        monkeypatch.setattr(module, "time", simulated)
    return simulated
