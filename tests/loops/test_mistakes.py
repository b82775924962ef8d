"""What a loop cannot do is one sentence, and what it cannot see it says once."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import paceline
from paceline.checkpoint.manifest import read_components
from paceline.errors import DataError, LoopError, PacelineError, RunDirectoryError
from paceline.reports.audit import audit_run

POINTS = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
QUIET = {"telemetry.trackers": [], "telemetry.report": False}


class Points(torch.utils.data.Dataset[Any]):
    """Points with noise, which is drawn when they are read."""

    def __init__(self, points: torch.Tensor = POINTS) -> None:
        self.points = points

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.points[index] + 0.1 * torch.randn(4) + random.random() + float(np.random.random())


class Counting(Points):
    """Points that differ each time that they are read."""

    read = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read += 1
        return self.points[index] + self.read


Make = Callable[..., paceline.Loop]


@pytest.fixture
def make(runs: Path) -> Iterator[Make]:
    """Make loops, and release their directories."""
    made: list[paceline.Loop] = []

    def loop(data: Any = None, *, run: str = "run", **options: Any) -> paceline.Loop:
        settings: dict[str, Any] = {"batch_size": 8, "epochs": 2, "device": "cpu", "overrides": QUIET} | options
        made.append(paceline.Loop(runs / run, Points() if data is None else data, **settings))
        return made[-1]

    yield loop
    for each in made:
        each._subject.close()


def prepared(loop: paceline.Loop) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = loop.prepare(nn.Linear(4, 1))
    return model, loop.keep(torch.optim.SGD(model.parameters(), 0.01))


def train(loop: paceline.Loop, until: int | None = None, *, before: bool = False) -> nn.Module:
    model, optimizer = prepared(loop)
    for step, batch in loop:
        if before and step == until:
            break
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loop.log(loss=loss)
        if step == until:
            break
    return model


def summary_of(runs: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((runs / "run" / "summary.json").read_text())
    return found


def incidents(runs: Path) -> dict[str, str]:
    lines = map(json.loads, (runs / "run" / "events.jsonl").read_text().splitlines())
    return {each["incident"]: each["message"] for each in lines if each["event"] == "incident"}


def test_arguments_that_cannot_be_used(make: Make, runs: Path) -> None:
    with pytest.raises(LoopError, match="batch_size=64 is above the 40 samples"):
        make(batch_size=64)
    with pytest.raises(DataError, match="dataset is empty"):
        make([])
    with pytest.raises(LoopError, match=r"found optimizer\.lr, which your own loop decides"):
        make(overrides={"optimizer.lr": 1})
    with pytest.raises(PacelineError, match=r"checkpoint\.every"):
        make(checkpoint_every="often")
    assert not list(runs.glob("run/*"))


def test_calls_in_the_wrong_place(make: Make) -> None:
    loop = make()
    model, optimizer = prepared(loop)
    with pytest.raises(LoopError, match="log belongs in the body"):
        loop.log(loss=1.0)
    with pytest.raises(LoopError, match="evaluation belongs in the body"):
        loop.evaluation(Points())
    with pytest.raises(LoopError, match="the same Linear twice"):
        loop.prepare(model)
    with pytest.raises(LoopError, match="state_dict"):
        loop.keep(3)
    with pytest.raises(LoopError, match="prepare takes modules, found a SGD"):
        loop.prepare(optimizer)
    for _ in loop:
        with pytest.raises(LoopError, match="prepare comes before the loop"):
            loop.prepare(nn.Linear(1, 1))
        with pytest.raises(LoopError, match="step records use that name"):
            loop.log(epoch=1)
        with pytest.raises(LoopError, match="one number, found a tensor of shape"):
            loop.log(weights=torch.zeros(3))
        with pytest.raises(LoopError, match="a duration is a number with a unit"):
            loop.due("often")
        with pytest.raises(DataError, match="held_out is empty"):
            loop.evaluation([])
        with loop.evaluation(Points()) as scores:
            with pytest.raises(LoopError, match=r"scores\.add belongs inside"):
                scores.add(error=torch.zeros(8))
            with pytest.raises(LoopError, match="cannot begin inside another"):
                loop.evaluation(Points())
            for batch in scores:
                with pytest.raises(LoopError, match=r"was given 1 value\(s\) for a batch of 8 samples"):
                    scores.add(error=model(batch).mean())
                scores.add(error=model(batch))
        with pytest.raises(LoopError, match="error of 8 of 40 samples"), loop.evaluation(Points()) as scores:
            scores.add(error=torch.zeros(len(next(iter(scores)))))
    with pytest.raises(LoopError, match="a loop runs once"):
        iter(loop)


def test_another_start_in_the_directory(make: Make, runs: Path) -> None:
    loop = make()
    with pytest.raises(RunDirectoryError, match="another process is training"):
        make()
    train(loop, until=7)
    for options, found in (
        ({"seed": 1}, "has seed 0, and here it is 1"),
        ({"batch_size": 4}, "has batch_size 8, and here it is 4"),
        ({"data": Points(POINTS[:39])}, "has data set of length 40, and here it is 39"),
        ({"data": Points(POINTS + 1)}, "started with another data set"),
    ):
        with pytest.raises(RunDirectoryError, match=found):
            make(**options)
    train(make())
    assert summary_of(runs)["status"] == "completed"
    assert audit_run(runs / "run").passed


def test_the_directory_of_another_kind_of_run(make: Make, train_tiny: Any, runs: Path) -> None:
    train_tiny("other")
    with pytest.raises(RunDirectoryError, match=r"not of paceline\.Loop"):
        make(run="other")


@pytest.mark.parametrize(("before", "steps"), [(True, 6), (False, 7)])
def test_a_body_that_breaks_out_is_told_and_goes_on(before: bool, steps: int, make: Make, runs: Path) -> None:
    train(make(), until=7, before=before)
    stopped = summary_of(runs)
    assert (stopped["status"], stopped["step"]) == ("stopped", steps)
    assert "with break or return" in incidents(runs)["left_loop"]
    train(make())
    train(make(run="whole"))
    whole = json.loads((runs / "whole" / "summary.json").read_text())
    assert summary_of(runs)["weights_sha256"] == whole["weights_sha256"]
    assert audit_run(runs / "run").passed


def test_an_error_in_the_body_leaves_the_state_before_it(make: Make, runs: Path) -> None:
    loop = make(checkpoint_every="2 steps")
    prepared(loop)

    def body() -> None:
        for step, _ in loop:
            if step == 6:
                raise KeyError("body")

    with pytest.raises(KeyError):
        body()
    failed = summary_of(runs)
    assert (failed["status"], failed["step"]) == ("failed", 5)
    assert "left_loop" not in incidents(runs)
    assert sorted(each.name for each in (runs / "run" / "checkpoints").glob("step-*")) == [
        "step-00000002",
        "step-00000004",
    ]


def test_a_complete_loop_has_no_turns_and_the_final_weights(make: Make) -> None:
    final = train(make()).state_dict()
    again, _ = prepared(loop := make())
    assert list(loop) == []
    assert all(torch.equal(each, final[name]) for name, each in again.state_dict().items())


def test_what_changes_without_being_kept_is_named_once(make: Make, runs: Path) -> None:
    loop = make(checkpoint_every="2 steps")
    model, frozen = loop.prepare(nn.Linear(4, 1)), nn.Linear(4, 1)
    forgotten = torch.optim.Adam(model.parameters())
    inner = nn.Sequential(nn.BatchNorm1d(4))
    for _, batch in loop:
        forgotten.zero_grad()
        (model(inner(batch)) - frozen(batch)).square().mean().backward()
        forgotten.step()
    message = incidents(runs)["unkept"]
    assert sorted(message.partition(" changed")[0].split(", ")) == ["Adam", "Sequential"]


def test_an_impure_data_set_is_named(make: Make, runs: Path) -> None:
    train(make(Counting()))
    assert "dataset[0] differs each time that it is read" in incidents(runs)["impure_data"]


def test_a_save_waits_for_gradients_that_are_not_applied(make: Make, runs: Path) -> None:
    loop = make(checkpoint_every="1 steps", overrides={**QUIET, "checkpoint.keep": 20})
    model, other = loop.prepare(nn.Linear(4, 1), nn.Bilinear(4, 4, 1))
    every_third = loop.keep(torch.optim.SGD(model.parameters(), 0.01))
    first = loop.keep(torch.optim.SGD(other.parameters(), 0.01))
    for step, batch in loop:
        model(batch).square().mean().backward()
        if step % 3 == 0:
            every_third.step()
            every_third.zero_grad(set_to_none=False)
        if step == 1:  # its gradients stay where they are, and are used
            other(batch, batch).mean().backward()
            first.step()
    saved = sorted(int(each.name[5:]) for each in (runs / "run" / "checkpoints").glob("step-*"))
    assert saved == [3, 6, 9, 10]


def test_draws_depend_on_seed_and_step_alone(make: Make) -> None:
    def draws(loop: paceline.Loop, noise: int) -> list[tuple[float, ...]]:
        prepared(loop)
        drawn: list[tuple[float, ...]] = []
        for _, batch in loop:
            drawn.append((float(torch.rand(())), random.random(), float(np.random.random()), float(batch.sum())))
            torch.rand(noise)
        return drawn

    first = draws(make(run="a"), 1)
    assert first == draws(make(run="b", workers=2), 7)
    assert first != draws(make(run="c", seed=1), 1)
    assert len({each for row in first for each in row}) == 4 * len(first)


def test_the_digest_is_over_all_modules_by_name(make: Make, runs: Path) -> None:
    import hashlib

    loop = make()
    loop.prepare(nn.Linear(4, 2), nn.BatchNorm1d(3))
    for _ in loop:
        pass
    (newest,) = sorted((runs / "run" / "checkpoints").glob("step-*"))[-1:]
    digest, components = hashlib.sha256(), read_components(newest)
    for name in ("BatchNorm1d", "Linear"):
        for key, value in sorted(components[name].items()):
            digest.update(key.encode() + value.numpy().tobytes())
    assert summary_of(runs)["weights_sha256"] == digest.hexdigest()
