"""A batch that grows, against a plain PyTorch loop that counts it out: the same samples, rates and bits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from calls import Call
from paceline.reports.audit import audit_run, used_samples
from torch import nn

from paceline.data.order import epoch_order
from paceline.errors import PacelineError
from paceline.models.small_resnet import small_resnet

SEED, SAMPLES, MICRO = 3, 52, 16
SIZES = {0: 16, 1: 32, 2: 48, 3: 16}
GROWTH = {
    "seed": SEED,
    "batch.growth": {1: 32, 2: 48, 3: 16},
    "train.duration": "4 epochs",
    "telemetry.log_every": "1 steps",
}


def steps() -> Iterator[tuple[int, np.ndarray]]:
    """(epoch, samples) of each step."""
    for epoch in range(4):
        order = epoch_order(SEED, epoch, SAMPLES).copy()
        for begin in range(0, SAMPLES, SIZES[epoch]):
            yield epoch, order[begin : begin + SIZES[epoch]]


def rate(rule: str, epoch: int) -> float:
    ratio = SIZES[epoch] / 16
    return {"none": 0.05, "linear": 0.05 * ratio, "sqrt": 0.05 * ratio**0.5}[rule]


def scaling(rule: str) -> dict[str, Any]:
    return {} if rule == "none" else {"optimizer.lr_scaling": rule, "optimizer.lr_reference_batch": 16}


@pytest.mark.parametrize("rule", ["none", "linear", "sqrt"])
@pytest.mark.everyday
def test_the_same_bits_as_a_plain_loop(
    rule: str, train_tiny: Call, tiny_task: Call, weights: Call, events: Call
) -> None:
    result = train_tiny("run", {**GROWTH, **scaling(rule)})
    source = tiny_task()(None).dataset.train
    pixels = torch.from_numpy(source.images.transpose(0, 3, 1, 2).copy()).float()
    inputs = pixels * torch.tensor(1 / (255 * 0.25)) + torch.tensor(-0.4 / 0.25)
    targets = torch.from_numpy(source.labels)
    torch.manual_seed(SEED)
    model = small_resnet(3, 1, width=4, stages=1, depth=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    used = 0
    for record, (epoch, ids) in zip(events(result.run_dir, "step"), steps(), strict=True):
        optimizer.param_groups[0]["lr"] = rate(rule, epoch)
        optimizer.zero_grad()
        # As many micro-batches as the whole step has, as equal as they can be.
        for part in np.array_split(ids, SIZES[epoch] // MICRO):
            (F.cross_entropy(model(inputs[part]), targets[part]) * (len(part) / len(ids))).backward()
        optimizer.step()
        used += len(ids)
        assert (record["epoch"], record["samples"]) == (epoch + 1, used)
        assert record["lr"] == pytest.approx(rate(rule, epoch), rel=1e-12)
    ours = weights(result)
    for key, value in model.state_dict().items():
        assert torch.equal(ours[key], value), key


def test_the_ledger_holds_the_slices_of_the_order(train_tiny: Call) -> None:
    result = train_tiny("run", GROWTH)
    entries = list(used_samples(result.run_dir, 0))
    for number, (epoch, ids) in enumerate(steps(), 1):
        parts = [entry for entry in entries if entry.step == number]
        assert [sample for part in parts for sample in part.ids.tolist()] == ids.tolist()
        assert {part.epoch for part in parts} == {epoch}
    assert audit_run(result.run_dir).passed
    assert result.summary.ledger.epochs_complete == 4


def test_the_audit_sees_steps_of_another_size(train_tiny: Call) -> None:
    run_dir: Path = train_tiny("run", GROWTH).run_dir
    plan = json.loads((run_dir / "plan.json").read_text())
    plan["batch_phases"][1]["global_batch_size"] = 26
    (run_dir / "plan.json").write_text(json.dumps(plan))
    assert any("step 5" in each for each in audit_run(run_dir).objections)


def test_what_is_done_every_epoch_is_done_at_its_end(train_tiny: Call, events: Call) -> None:
    often = {"evaluate.every": "1 epochs", "checkpoint.every": "2 epochs", "checkpoint.keep_best": False}
    result = train_tiny("run", {**GROWTH, **often})
    evaluations = [(event["step"], event["epoch"]) for event in events(result.run_dir, "evaluation")]
    assert evaluations == [(4, 1), (6, 2), (8, 3), (12, 4)]
    assert [event["step"] for event in events(result.run_dir, "checkpoint")] == [6, 12]


def test_another_growth_is_another_run(train_tiny: Call) -> None:
    train_tiny("run", {**GROWTH, "train.until": "1 epochs"})
    with pytest.raises(PacelineError, match=r"another recipe: .*batch\.growth\.2 was 48 and is now 32"):
        train_tiny("run", {**GROWTH, "batch.growth": {1: 48, 2: 32, 3: 16}})


def flat_with_batchnorm() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


def test_a_tail_of_single_samples_is_found_in_every_size(train_tiny: Call, tiny_task: Call) -> None:
    """35 samples in steps of 16 end with three; in steps of 32 with three over two micro-batches, one of one sample."""
    task = tiny_task(train_images=35, make_network=flat_with_batchnorm)
    assert train_tiny("even", {"train.duration": "2 epochs"}, task=task).status == "completed"
    with pytest.raises(PacelineError, match=r"step of 3 sample\(s\) in 2 micro-batch\(es\)"):
        train_tiny("odd", {"train.duration": "2 epochs", "batch.growth": {1: 32}}, task=task)
    # Where that epoch is not finished, there is no such step.
    assert train_tiny("cut", {"train.duration": "4 steps", "batch.growth": {1: 32}}, task=task).status == "completed"


def test_a_run_in_its_second_size_knows_which_epochs_are_over(train_tiny: Call) -> None:
    """One step of all samples, and then two of four: one epoch is over, and the next one lacks nothing yet."""
    sizes = {"batch.global_size": 64, "batch.growth": {1: 16}, "train.duration": "3 epochs", "train.until": "3 steps"}
    result = train_tiny("run", sizes)
    facts = result.summary.ledger
    assert (facts.epochs_complete, facts.missing, facts.duplicates) == (1, 0, 0)
    assert (result.summary.epoch, result.summary.samples) == (2, 52 + 32)
    assert audit_run(result.run_dir).passed
