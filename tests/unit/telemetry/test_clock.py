"""The clock recovers known delays, leaves out what is not training, costs little, and survives a restart."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import pytest

from paceline.telemetry import clock as clock_module
from paceline.telemetry.clock import EventStepClock, HostStepClock, Meter, StepClock, build_step_clock, event_type
from paceline.telemetry.meter import PHASES

DELAYS = {
    "data_wait": 0.004,
    "h2d": 0.003,
    "forward": 0.008,
    "backward": 0.012,
    "communication": 0.005,
    "optimizer": 0.002,
    "ema": 0.001,
    "logging": 0.003,
    "host": 0.002,
}


class HostEvent:
    """An event of a device whose work is done when the call returns: the host itself."""

    waits = 0

    def __init__(self) -> None:
        self.moment = 0.0

    def record(self) -> None:
        self.moment = vars(clock_module)["time"].perf_counter()

    def synchronize(self) -> None:
        type(self).waits += 1

    def elapsed_time(self, end_event: Any) -> float:
        return float(end_event.moment - self.moment) * 1e3


def clocks(warmup_steps: int) -> list[StepClock]:
    return [HostStepClock(warmup_steps=warmup_steps), EventStepClock(HostEvent, warmup_steps=warmup_steps)]


def check_one_step(clock: StepClock, simulated_time: Any, step: Callable[[], None]) -> None:
    """What passes in a step is found in its phases, and nothing elsewhere."""
    clock.start()
    step()
    clock.end_step(samples=1)
    timings = clock.drain()
    assert {phase: timings[f"{phase}_seconds"] for phase in PHASES} == pytest.approx(
        {phase: simulated_time.passed[phase] for phase in PHASES}
    )
    assert timings["step_seconds"] == pytest.approx(sum(simulated_time.passed.values()))


@pytest.mark.parametrize("kind", [0, 1], ids=["host", "events"])
def test_known_delays_are_recovered(kind: int, simulated_time: Any) -> None:
    def step() -> None:
        for phase, seconds in DELAYS.items():
            with nullcontext() if phase == "host" else clock.span(phase):
                simulated_time.pass_in(phase, seconds)

    clock = clocks(warmup_steps=0)[kind]
    check_one_step(clock, simulated_time, step)
    assert set(simulated_time.passed) == set(PHASES)


@pytest.mark.parametrize("kind", [0, 1], ids=["host", "events"])
def test_real_time_is_measured(kind: int) -> None:
    clock = clocks(warmup_steps=0)[kind]
    outer = time.perf_counter()
    clock.start()
    inner = time.perf_counter()
    with clock.span("forward"):
        time.sleep(0.01)
    slept = time.perf_counter() - inner
    clock.end_step(samples=1)
    assert 0.01 <= (clock.drain()["forward_seconds"] or 0) <= slept
    assert slept <= clock.totals.train_seconds <= time.perf_counter() - outer


@pytest.mark.parametrize("kind", [0, 1], ids=["host", "events"])
def test_only_training_counts_and_warm_up_in_no_rate(kind: int, simulated_time: Any) -> None:
    clock = clocks(warmup_steps=2)[kind]
    simulated_time.pass_in("building; no training", 0.02)
    clock.start()
    for step in range(12):
        for phase, seconds in DELAYS.items():
            with nullcontext() if phase == "host" else clock.span(phase):
                simulated_time.pass_in(phase, seconds * (5 if step < 2 else 1))  # the first steps are slow
        clock.end_step(samples=32)
        if step % 4 == 3:
            with clock.paused():
                simulated_time.pass_in("evaluation", 0.1)
    timings, step_seconds = clock.drain(), sum(DELAYS.values())
    assert {phase: timings[f"{phase}_seconds"] for phase in PHASES} == pytest.approx(DELAYS)
    assert timings["step_seconds"] == pytest.approx(step_seconds)
    assert timings["throughput_samples_per_second"] == pytest.approx(32 / step_seconds)
    assert timings["data_wait_fraction"] == pytest.approx(DELAYS["data_wait"] / step_seconds)
    totals = clock.totals
    assert totals.steps == 12
    assert sum(totals.phase_fractions.values()) == pytest.approx(1)
    assert totals.train_seconds == pytest.approx((10 + 2 * 5) * step_seconds)
    assert totals.throughput_samples_per_second == timings["throughput_samples_per_second"]


@pytest.mark.parametrize("kind", [0, 1], ids=["host", "events"])
def test_a_phase_may_come_several_times_in_a_step(kind: int, simulated_time: Any) -> None:
    def step() -> None:
        for _ in range(3):
            with clock.span("forward"):
                simulated_time.pass_in("forward", 0.003)
            with clock.span("backward"):
                simulated_time.pass_in("backward", 0.001)

    clock = clocks(warmup_steps=0)[kind]
    check_one_step(clock, simulated_time, step)
    with pytest.raises(KeyError):
        clock.span("lunch")


@pytest.mark.parametrize("kind", [0, 1], ids=["host", "events"])
def test_a_phase_within_another_takes_its_time_out_of_it(kind: int, simulated_time: Any) -> None:
    def step() -> None:
        with clock.span("data_wait"):
            simulated_time.pass_in("data_wait", 0.006)
            with clock.span("h2d"):
                simulated_time.pass_in("h2d", 0.004)
            simulated_time.pass_in("data_wait", 0.002)
        with suppress(ArithmeticError), clock.span("backward"):
            simulated_time.pass_in("backward", 0.005)
            clock.switch("communication")
            simulated_time.pass_in("communication", 0.007)
            raise ArithmeticError
        simulated_time.pass_in("host", 0.003)

    clock = clocks(warmup_steps=0)[kind]
    clock.switch("communication")  # a rehearsal before the first step
    check_one_step(clock, simulated_time, step)
    with pytest.raises(KeyError):
        clock.switch("lunch")


def test_beside_the_device_s_time_there_is_the_host_s(simulated_time: Any) -> None:
    """An event that comes late, as where the device has much to do: the host was there before."""

    class LateEvent(HostEvent):
        def record(self) -> None:
            self.moment = 3 * simulated_time.now

        def synchronize(self) -> None:
            simulated_time.pass_in("waiting", 0.02)

    clock = EventStepClock(LateEvent, warmup_steps=0)
    clock.start()
    for _ in range(2):
        with clock.span("forward"):
            simulated_time.pass_in("forward", 0.03)
        clock.end_step(samples=1)
    timings = clock.drain()
    assert timings["launch_forward_seconds"] == pytest.approx(0.03)
    assert timings["forward_seconds"] == pytest.approx(0.09)
    assert timings["device_lag_seconds"] == pytest.approx(0.02)
    clock.end_step(samples=1)
    assert clock.totals.steps == 3  # a checkpoint waits too; the record after it has nothing to wait for
    assert clock.drain()["device_lag_seconds"] is not None
    assert set(clock.drain().values()) == {None}


@pytest.mark.parametrize("kind", [0, 1], ids=["host", "events"])
def test_warm_up_gives_times_but_no_rates(kind: int) -> None:
    clock = clocks(warmup_steps=3)[kind]
    assert set(clock.drain().values()) == {None}
    clock.start()
    for _ in range(2):
        time.sleep(0.002)
        clock.end_step(samples=8)
    timings = clock.drain()
    assert timings["step_seconds"] is not None
    assert timings["step_seconds"] >= 0.002
    assert timings["throughput_samples_per_second"] is None
    assert timings["data_wait_fraction"] is None
    for _ in range(2):
        time.sleep(0.002)
        clock.end_step(samples=8)
    assert clock.drain()["throughput_samples_per_second"] is not None  # of the fourth step alone
    assert set(clock.drain().values()) == {None}


@pytest.mark.parametrize("kind", [0, 1], ids=["host", "events"])
def test_the_clock_survives_a_restart(kind: int) -> None:
    before = clocks(warmup_steps=1)[kind]
    before.start()
    for _ in range(3):
        before.end_step(samples=10)
    state = before.state_dict()
    after = clocks(warmup_steps=1)[kind]
    after.load_state_dict(state)
    assert after.totals == before.totals
    after.start()
    for _ in range(3):
        time.sleep(0.001)
        after.end_step(samples=10)
    assert after.totals.steps == 6
    assert after.totals.train_seconds >= before.totals.train_seconds + 0.003
    assert after.state_dict()["rated_steps"] == 4  # each process warms up


def test_the_device_is_waited_for_only_when_a_record_is_due() -> None:
    HostEvent.waits = 0
    clock = EventStepClock(HostEvent)
    clock.start()
    for _ in range(50):
        with clock.span("forward"), clock.paused():
            pass
        clock.end_step(samples=1)
    assert HostEvent.waits == 0
    clock.drain()
    assert HostEvent.waits == 1


def test_events_are_used_again() -> None:
    made = []

    def make() -> HostEvent:
        made.append(HostEvent())
        return made[-1]

    clock = EventStepClock(make)
    clock.start()
    for _ in range(20):
        for _ in range(10):
            for phase in PHASES:
                with clock.span(phase):
                    pass
            clock.end_step(samples=1)
        clock.drain()
    assert len(made) <= 10 * (2 * len(PHASES) + 1) + 1


def test_a_span_costs_a_few_microseconds_at_most() -> None:
    clock = build_step_clock("cpu")
    assert isinstance(clock, HostStepClock)
    clock.start()
    costs = []
    for _ in range(20):
        started = time.perf_counter()
        for _ in range(1000):
            with clock.span("forward"):
                pass
        costs.append((time.perf_counter() - started) / 1000)
    # Half of one here; benchmarks/step_clock.py measures it. A slow machine is no reason to fail, a lock would be one.
    assert min(costs) < 6e-6


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mps"])
def test_a_device_that_returns_before_it_is_done_is_timed_by_its_own_events(kind: str) -> None:
    assert isinstance(build_step_clock(kind), EventStepClock)
    events = event_type(kind)
    assert kind in events.__module__
    assert all(callable(getattr(events, name)) for name in ("record", "synchronize", "elapsed_time"))


def test_rates_are_sums_divided_once() -> None:
    meter = Meter(warmup_steps=0)
    meter.add_step(100, 1.0, (0.5, 0, 0, 0))
    meter.add_step(10, 3.0, (0.0, 0, 0, 0))  # the tail of an epoch
    timings = meter.drain()
    assert timings["throughput_samples_per_second"] == 110 / 4
    assert timings["data_wait_fraction"] == 0.5 / 4
    assert timings["step_seconds"] == 2.0


# ---------------------------------------------------------------------------------------------------- tokens


@dataclass(frozen=True)
class Shared:
    """What a step has its processes compute."""

    tokens: int
    positions: int
    busiest: int
    processes: int = 2


@pytest.mark.parametrize("kind", [0, 1], ids=["host", "events"])
def test_tokens_are_counted_by_step_and_warm_up_is_in_no_rate(kind: int) -> None:
    clock = clocks(warmup_steps=1)[kind]
    clock.start()
    for load in (Shared(900, 1000, 1000), Shared(60, 100, 50), Shared(120, 300, 200)):
        clock.end_step(4, load)
    timings = clock.drain()
    assert timings["padding_fraction"] == pytest.approx(1 - 180 / 400)
    assert timings["token_imbalance"] == pytest.approx((50 + 200) * 2 / 400)
    samples, tokens = timings["throughput_samples_per_second"], timings["throughput_tokens_per_second"]
    assert samples is not None
    assert tokens == pytest.approx(samples / 8 * 180)
    after = clocks(warmup_steps=0)[kind]
    after.load_state_dict(clock.state_dict())
    rate = clock.totals.throughput_tokens_per_second
    assert rate is not None
    assert after.totals.throughput_tokens_per_second == pytest.approx(rate)


def test_without_tokens_nothing_is_said_of_them() -> None:
    clock = clocks(warmup_steps=0)[0]
    clock.start()
    clock.end_step(4)
    assert not [key for key in clock.drain() if "token" in key or "padding" in key]
    assert clock.totals.throughput_tokens_per_second is None
