"""Expected time and memory are measured before the first step, and the measuring leaves no trace."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from paceline.data.batch import Batch, ReadAhead
from paceline.telemetry.clock import build_step_clock
from paceline.trainer import forecast as module

Make = Callable[..., Any]

LONG = {"train.duration": "48 steps", "batch.micro_size": 8, "evaluate.every": "10 steps", "data.workers": 0}
SENSITIVE = {"model.options.dropout": 0.3, "data.augment.flip": 0.5, "train.ema": 0.9, "optimizer.momentum": 0.9}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The only clock of a forecast; whoever works moves it on."""
    found = SimpleNamespace(now=0.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: found.now))
    for constant in ("_SAVE_SECONDS_PER_BYTE", "_CLOSING_SECONDS", "_REPORT_SECONDS"):
        monkeypatch.setattr(module, constant, 0.0)
    return found


@pytest.fixture
def timed_task(clock: SimpleNamespace, tiny_task: Make) -> Make:
    """``timed_task(0.5)``: training a sample takes so many seconds of the clock, and scoring it half of that."""

    def take(seconds: float) -> Any:
        def lose(batch: Batch, loss: Any) -> None:
            clock.now += seconds * len(batch.ids)

        def score(_: Any, batch: Batch, scores: dict[str, Any]) -> None:
            clock.now += seconds / 2 * len(batch.ids)

        return tiny_task(on_loss=lose, on_score=score)

    return take


def forecast_of(found: list[dict[str, Any]]) -> dict[str, Any]:
    (event,) = [each for each in found if each["what"] == "forecast"]
    return event


@pytest.mark.parametrize("ema", ["off", 0.9])
def test_it_counts_samples_steps_and_evaluations(timed_task: Make, train_tiny: Make, events: Make, ema: Any) -> None:
    result = train_tiny("run", LONG | {"train.ema": ema}, task=timed_task(0.01))
    expected = forecast_of(events(result.run_dir, "measurement"))
    samples, evaluations = events(result.run_dir, "step")[-1]["samples"], 5 * 21 * (1 if ema == "off" else 2)
    assert expected["expected_seconds"] == pytest.approx(module._BESIDE * (0.01 * samples + 0.005 * evaluations))
    # What the process held before counts in both, and hides the copy for a checkpoint that is still to come.
    assert 0.5 < expected["expected_memory_bytes"] / result.summary.peak_memory_bytes < 1.5
    low, high = expected["expected_seconds_low"], expected["expected_seconds_high"]
    assert low < expected["expected_seconds"] < high < 1.5 * low
    assert expected["message"].startswith(f"expected: {low:.1f} to {high:.1f} s for 48 steps and 5 evaluations, ")


def test_it_counts_what_comes_after_the_last_step(
    timed_task: Make, train_tiny: Make, events: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {}
    for closing in (0.0, 5.0):
        task = timed_task(0.01)  # resets what closing takes
        monkeypatch.setattr(module, "_CLOSING_SECONDS", closing)
        found[closing] = forecast_of(events(train_tiny(f"run-{closing}", LONG, task=task).run_dir, "measurement"))
    without, counted = found[0.0], found[5.0]
    assert counted["expected_seconds"] == pytest.approx(without["expected_seconds"] + 5)
    assert counted["expected_seconds_low"] > without["expected_seconds_low"] + 2


def test_passes_that_differ_widen_the_range(clock: SimpleNamespace, train_tiny: Make, events: Make) -> None:
    seen: list[int] = []

    def width(swing: float) -> float:
        def lose(batch: Batch, _: Any) -> None:
            seen.append(1)
            clock.now += 0.01 * len(batch.ids) * (1 + swing * (-1) ** len(seen))

        expected = forecast_of(events(train_tiny(f"run-{swing}", LONG, on_loss=lose).run_dir, "measurement"))
        return float(expected["expected_seconds_high"] / expected["expected_seconds_low"])

    assert width(0.9) > 1.5 * width(0.0)


def test_it_counts_saves(timed_task: Make, train_tiny: Make, events: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {}
    for number, every in enumerate(("off", "24 steps", "12 steps")):
        task = timed_task(0.01)  # resets what a byte takes
        monkeypatch.setattr(module, "_SAVE_SECONDS_PER_BYTE", 1e-3)
        run = train_tiny(f"run-{number}", LONG | {"checkpoint.every": every, "evaluate.every": "off"}, task=task)
        seconds[every] = forecast_of(events(run.run_dir, "measurement"))["expected_seconds"]
    two, four = (seconds[every] - seconds["off"] for every in ("24 steps", "12 steps"))
    assert 1 < two == pytest.approx(four / 2)


def test_what_a_gpu_sets_up_for_a_new_shape_is_not_counted(
    clock: SimpleNamespace, train_tiny: Make, events: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = set()

    def take(kind: str, batch: Batch) -> None:
        clock.now += 0.01 if (kind, len(batch.ids)) in seen else 8.0
        seen.add((kind, len(batch.ids)))

    monkeypatch.setattr(module, "_SLOW_SECONDS", module._SLOW_SECONDS_CUDA)
    result = train_tiny(
        "run",
        LONG | {"train.ema": "off"},
        on_loss=lambda batch, _: take("loss", batch),
        on_score=lambda _, batch, __: take("score", batch),
    )
    assert len(seen) == 4, "the last batches of an epoch and of an evaluation are smaller"
    assert forecast_of(events(result.run_dir, "measurement"))["expected_seconds"] < 2


@pytest.mark.everyday
def test_a_resumed_run_counts_what_is_left(timed_task: Make, train_tiny: Make, events: Make) -> None:
    asked = LONG | {"train.ema": "off"}
    before = train_tiny("run", asked | {"train.until": "24 steps"}, task=timed_task(0.01)).summary
    first, second = events(train_tiny("run", asked, task=timed_task(0.01)).run_dir, "measurement")
    assert "24 steps and 2 evaluations" in first["message"]
    assert second["step"] == 24
    assert "24 steps at the speed so far, plus 3 evaluations" in second["message"]
    assert second["expected_seconds"] == pytest.approx(6 * 52 / before.throughput_samples_per_second)


def test_a_resumed_run_with_another_micro_batch_is_measured_anew(
    timed_task: Make, train_tiny: Make, events: Make
) -> None:
    """Its earlier speed says nothing, until there are steps enough at the new one."""
    asked = LONG | {"train.duration": "96 steps", "train.ema": "off", "evaluate.every": "off"}
    begun = train_tiny("run", asked | {"train.until": "24 steps"}, task=timed_task(0.01)).summary
    changed = asked | {"batch.micro_size": 16}
    before = train_tiny("run", changed | {"train.until": "48 steps"}, task=timed_task(0.03)).summary
    after = train_tiny("run", changed | {"train.until": "72 steps"}, task=timed_task(0.03))
    first, anew, resumed = events(after.run_dir, "measurement")
    assert "speed so far" not in first["message"] + anew["message"]
    assert anew["expected_seconds"] == pytest.approx(3 * first["expected_seconds"])
    assert "speed so far" in resumed["message"]
    rated = 6 * 52 - 3 * 16  # samples of a launch, without the first three steps
    seconds = 2 * rated / before.throughput_samples_per_second - rated / begun.throughput_samples_per_second
    assert resumed["expected_seconds"] == pytest.approx(6 * 52 * seconds / rated)


@pytest.mark.parametrize(
    ("growing", "times"),
    [
        # 52 samples an epoch: 8 epochs are over, and in each of the 12 to come each sample is used once more.
        ({"batch.growth": {8: 32}, "train.duration": "56 steps"}, 12 / 8),
        # Epochs of four steps: two of 4x4 pixels and six of 8x8, and then six of 8x8.
        ({"data.progressive": {"start_size": 4, "multiple": 4, "end": 3}, "train.duration": "56 steps"}, 6 / 6.5),
    ],
)
def test_the_speed_so_far_is_of_samples_and_pixels(
    train_tiny: Make, events: Make, growing: dict[str, Any], times: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(build_step_clock.__kwdefaults__, "warmup_steps", 0)
    asked = LONG | {"evaluate.every": "off"} | growing
    for constant in ("_CLOSING_SECONDS", "_REPORT_SECONDS"):
        monkeypatch.setattr(module, constant, 0.0)
    before = train_tiny("run", asked | {"train.until": "32 steps"}).summary
    resumed = events(train_tiny("run", asked).run_dir, "measurement")[-1]
    assert "speed so far" in resumed["message"]
    assert resumed["expected_seconds"] == pytest.approx(times * before.train_seconds)


def test_a_resumed_run_takes_no_passes_before_its_first_step(train_tiny: Make) -> None:
    """But one that was killed within its first steps does: these are too few to extrapolate from."""
    losses: list[int] = []

    def trained(until: str) -> int:
        before = len(losses)
        train_tiny(
            "run",
            LONG | {"train.duration": "60 steps", "train.until": until},
            on_loss=lambda batch, _: losses.append(len(batch.ids)),
        )
        return len(losses) - before

    assert trained("10 steps") == 10 * 2
    assert trained("29 steps") == 19 * 2
    assert trained("49 steps") == 20 * 2


@pytest.mark.parametrize(("resumes", "growing"), [(False, {}), (True, {}), (False, {"batch.growth": {1: 32}})])
def test_a_short_run_is_timed_by_its_second_step(
    clock: SimpleNamespace,
    train_tiny: Make,
    events: Make,
    monkeypatch: pytest.MonkeyPatch,
    growing: dict[str, Any],
    *,
    resumes: bool,
) -> None:
    """It takes no passes, and its slow first step counts for nothing."""
    monkeypatch.setattr("paceline.telemetry.clock.time", module.time)
    passes: list[int] = []

    def lose(batch: Batch, _: Any) -> None:
        passes.append(len(batch.ids))
        clock.now += 9.0 if len(passes) <= 2 else 0.01 * len(batch.ids)

    asked = LONG | {"train.duration": "10 steps", "train.ema": "off", "evaluate.every": "5 steps"} | growing
    if resumes:
        train_tiny("run", asked | {"train.until": "3 steps"})
    expected = events(train_tiny("run", asked, on_loss=lose).run_dir, "measurement")[-1]
    steps, evaluations = (5, 1) if resumes else (8, 2)
    assert expected["step"] == 10 - steps
    assert f"for the {steps} steps left and {evaluations} evaluation" in expected["message"]
    assert expected["expected_seconds"] == pytest.approx(0.01 * (sum(passes[4:]) + evaluations * 21 / 3), rel=0.01)


def test_a_run_of_three_steps_is_not_timed(train_tiny: Make, events: Make) -> None:
    assert not events(train_tiny("run", LONG | {"train.duration": "3 steps"}).run_dir, "measurement")


@pytest.mark.everyday
def test_measuring_leaves_no_trace(train_tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(name: str) -> Any:
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002  # a user's loss may draw from this old generator
        draw = np.random.rand
        return train_tiny(name, LONG | SENSITIVE, on_loss=lambda _, loss: loss * draw() * random.random())

    measured = trained("measured")
    monkeypatch.setattr("paceline.trainer.build.forecast", lambda _, batches: batches)
    plain = trained("plain")
    assert measured.summary.weights_sha256 == plain.summary.weights_sha256
    assert measured.summary.ema_sha256 == plain.summary.ema_sha256
    assert measured.summary.metrics == plain.summary.metrics


def test_a_loss_may_write_into_its_inputs(tiny_task: Make, train_tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def task(recipe: Any) -> Any:
        made = tiny_task()(recipe)
        loss = made.loss

        def halved(model: Any, batch: Batch) -> Any:
            batch.inputs.mul_(0.5)
            return loss(model, batch)

        made.loss = halved
        return made

    measured = train_tiny("measured", LONG, task=task)
    monkeypatch.setattr("paceline.trainer.build.forecast", lambda _, batches: batches)
    assert train_tiny("plain", LONG, task=task).summary.weights_sha256 == measured.summary.weights_sha256


def test_more_than_an_hour_on_a_cpu_names_a_shorter_run(timed_task: Make, train_tiny: Make, events: Make) -> None:
    asked = LONG | {"train.ema": "off", "evaluate.every": "off", "train.duration": "480 steps"}
    result = train_tiny("run", asked | {"train.until": "24 steps"}, task=timed_task(20.0))
    message = forecast_of(events(result.run_dir, "measurement"))["message"]
    assert 'train.duration="13 steps"' in message  # 6,240 s for 24


def test_what_stops_the_reading_is_raised_at_its_step() -> None:
    def batches() -> Iterator[Any]:
        yield from (SimpleNamespace(inputs=(), targets=()) for _ in range(3))
        raise ConnectionError("gone")

    ahead = ReadAhead(batches())
    assert [ahead.read() is None for _ in range(5)] == [False] * 3 + [True] * 2
    again = ahead.replay()
    assert len([next(again) for _ in range(3)]) == 3
    with pytest.raises(ConnectionError, match="gone"):
        next(again)


def test_no_more_is_read_ahead_than_there_is_room_for() -> None:
    ahead = ReadAhead(iter([SimpleNamespace(inputs=torch.zeros(100), targets=()) for _ in range(5)]))
    ahead.max_bytes = 1000.0
    assert [ahead.read() is None for _ in range(4)] == [False, False, True, True]


def test_what_fails_while_measuring_is_left_to_the_step(train_tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("paceline.trainer.forecast.Clipping", fail)
    assert train_tiny("run", LONG).status == "completed"
