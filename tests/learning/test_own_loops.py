"""Loops of a program are judged from the same records: faults are named, and healthy loops are not blamed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.learning.networks import Perceptron, digits, shuffled
from torch import Tensor, nn

import paceline
from paceline.learning.judge import Judgement, judge_run
from paceline.records.run_directory import RunDirectory

everyday = pytest.mark.everyday


def trained(
    run_dir: Path,
    model: nn.Module | None = None,
    *,
    labels: Callable[[Tensor], Tensor] = torch.clone,
    rate: float = 1e-2,
    trains: str = "",
    scores_loss: bool = True,
) -> Judgement:
    """Train in a plain loop that drops its gradients at the end of a turn; returns the judgement.

    Args:
        run_dir: The run directory.
        model: The network.
        labels: Applied to the labels of both sets.
        rate: The learning rate.
        trains: How the names of the trained parameters begin.
        scores_loss: Whether the evaluation computes the loss.
    """
    (x, y), (held_x, held_y) = digits()
    loop = paceline.Loop(run_dir, (x, labels(y)), batch_size=50, epochs=3, overrides={"telemetry.report": False})
    network: Any = loop.prepare(model or Perceptron())
    chosen = [each for name, each in network.named_parameters() if name.startswith(trains)]
    optimizer = loop.keep(torch.optim.Adam(chosen, lr=rate))
    for _, (inputs, targets) in loop:
        loss = F.cross_entropy(network(inputs), targets)
        loss.backward()
        optimizer.step()
        network.zero_grad()
        loop.log(loss=loss)
        if loop.due("1 epoch"):
            with loop.evaluation((held_x, labels(held_y))) as scores:
                for held_inputs, held_targets in scores:
                    answers = network(held_inputs)
                    if scores_loss:
                        F.cross_entropy(answers, held_targets)
                    scores.add(correct=answers.argmax(1) == held_targets)
    return judge_run(RunDirectory(run_dir))


@everyday
def test_a_fault_is_named_in_the_last_lines_and_the_summary(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    judgement = trained(tmp_path, rate=1e-8)
    assert [each.name for each in judgement.findings][:1] == ["rate_too_low"], str(judgement)
    assert str(judgement) in " ".join(capfd.readouterr().err.split())
    assert json.loads((tmp_path / "summary.json").read_text())["details"]["learning"]["sentence"] == str(judgement)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("labels_unrelated", {"labels": shuffled}),
        ("softmax_twice", {"model": Perceptron(end=nn.Softmax(dim=1))}),
        ("rate_too_high", {"rate": 5.0, "scores_loss": False}),
    ],
)
def test_faults_are_named(name: str, fault: dict[str, Any], tmp_path: Path) -> None:
    judgement = trained(tmp_path, **fault)
    assert [each.name for each in judgement.findings][:1] == [name], str(judgement)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="whole", marks=everyday),
        pytest.param({"scores_loss": False}, id="no loss"),
        pytest.param({"trains": "head", "rate": 0.05}, id="head alone"),
    ],
)
def test_nothing_is_said_about_loops_that_learn(settings: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    judgement = trained(tmp_path, **settings)
    assert not judgement, str(judgement)
    events = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    observed = [each for each in events if each["event"] == "observation"]
    assert observed[0]["losses"]["cross_entropy"]["groups"] == 50  # those of an evaluation in the last turn are apart
    held = [each for each in observed if each["split"] == "validation"]
    assert [bool(each.get("losses")) for each in held] == [settings.get("scores_loss", True)] * 3


@everyday
def test_two_networks_that_work_against_one_another_are_not_judged(tmp_path: Path) -> None:
    loop = paceline.Loop(tmp_path, digits()[0], batch_size=50, epochs=1, overrides={"telemetry.report": False})
    pair = [loop.prepare(nn.Linear(64, 10)) for _ in range(2)]
    optimizers = [loop.keep(torch.optim.SGD(each.parameters(), lr=1e-9)) for each in pair]
    for _, (inputs, targets) in loop:
        for each, optimizer in zip(pair, optimizers, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(each(inputs), targets).backward()
            optimizer.step()
    assert not judge_run(RunDirectory(tmp_path))
