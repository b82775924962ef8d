"""Is the share of a device's peak right, said where it is known, and without a trace?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from paceline.host.devices import Device, find_device
from paceline.models.build import build_model
from paceline.recipe.load import load_recipe
from paceline.trainer import utilisation
from paceline.trainer.subject import Subject
from paceline.trainer.utilisation import Utilisation

Make = Callable[..., Any]

SENSITIVE = {
    "model.options.dropout": 0.3,
    "train.ema": 0.9,
    "batch.micro_size": 8,
    "train.duration": "8 steps",
    "telemetry.log_every": "1 steps",
}


@pytest.fixture
def known_cpu(monkeypatch: pytest.MonkeyPatch) -> Device:
    """This CPU in the table of devices, with a peak of 1 GFLOP/s."""
    device = replace(
        find_device("a100"), name="planted", title="Planted", flops_per_second=MappingProxyType({"fp32": 1e9})
    )
    monkeypatch.setattr(utilisation, "recognise", lambda _: device)
    return device


def test_utilisation_is_throughput_by_flops_over_peak() -> None:
    ours = Utilisation(device=find_device("a100"), processes=8, flops={"bf16": 24.5e9})
    assert ours.for_record(16_621)["mfu"] == pytest.approx(16_621 * 24.5e9 / (8 * 312e12))
    assert ours.for_record(None) == {"mfu": None}
    unknown = replace(ours, flops={}, why_not="reasons")
    assert unknown.for_record(16_621) == {}
    assert unknown.event({"step": 0}).message == "mfu is not recorded: reasons"


def test_each_part_is_held_against_its_own_peak() -> None:
    ours = Utilisation(device=find_device("a100"), processes=1, flops={"tf32": 156e9, "fp32": 19.5e9})
    # A millisecond in TF32 and one in fp32: at 500 samples a second it is done all the time.
    assert ours.for_record(500)["mfu"] == pytest.approx(1)
    said = ours.event({"step": 0})
    assert "tf32 156 TFLOP/s for 88.9%, fp32 19.5 TFLOP/s for 11.1%" in said.message
    assert said.metrics["peak_flops_per_second"] == pytest.approx(175.5e9 / 2e-3)


def test_a_cpus_records_are_silent(train_tiny: Make, events: Make) -> None:
    result = train_tiny("silent", SENSITIVE)
    assert result.summary.mfu is None
    assert all(each["what"] == "forecast" for each in events(result.run_dir, "measurement"))
    assert not any("mfu" in each for each in events(result.run_dir, "step"))


def test_a_known_devices_records_have_it_and_weights_are_the_same(
    known_cpu: Device, train_tiny: Make, events: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    states: list[bool] = []

    def find(subject: Subject) -> Utilisation | None:
        before = torch.get_rng_state()
        found = utilisation.find_utilisation(subject)
        states.append(torch.equal(before, torch.get_rng_state()))
        return found

    monkeypatch.setattr("paceline.trainer.build.find_utilisation", find)
    watched = train_tiny("watched", SENSITIVE)
    assert states == [True]
    said, *_ = events(watched.run_dir, "measurement")
    assert said["what"] == "flops"
    assert "Planted" in said["message"]
    flops = said["flops_per_sample"]
    assert flops == _by_hand(watched)
    records = events(watched.run_dir, "step")
    for each in records:
        rate = each["throughput_samples_per_second"]
        assert each["mfu"] == (None if rate is None else pytest.approx(rate * flops / 1e9))
    assert any(each["mfu"] is not None for each in records)
    assert watched.summary.mfu == pytest.approx(watched.summary.throughput_samples_per_second * flops / 1e9)

    monkeypatch.undo()
    alone = train_tiny("alone", SENSITIVE)
    assert alone.summary.weights_sha256 == watched.summary.weights_sha256
    assert alone.summary.ema_sha256 == watched.summary.ema_sha256


def _by_hand(result: Any) -> float:
    """Of a real step, with torch's own counter, in fp32."""
    recipe = load_recipe(str(result.run_dir / "recipe.yaml")).recipe
    network = build_model(recipe.model, num_classes=3, in_channels=1)
    with FlopCounterMode(display=False) as counted:
        network(torch.randn(8, 1, 8, 8)).sum().backward()
    return counted.get_total_flops() / 8


def test_a_network_that_needs_numbers_says_why_there_is_no_figure(
    known_cpu: Device, train_tiny: Make, events: Make
) -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.layer(x.flatten(1))
            return out * (1.0 if float(out.detach().sum()) > 0 else 2.0)

    result = train_tiny("reads", SENSITIVE, make_network=Reads)
    said, *_ = events(result.run_dir, "measurement")
    assert said["message"].startswith("mfu is not recorded: ")
    assert result.summary.status == "completed"
    assert not any("mfu" in each for each in events(result.run_dir, "step"))


def test_growing_images_have_no_figure(known_cpu: Device, train_tiny: Make, events: Make) -> None:
    changes = {"data.progressive.start_size": 4, "data.progressive.multiple": 4}
    said, *_ = events(train_tiny("growing", {**SENSITIVE, **changes}).run_dir, "measurement")
    assert said["message"] == "mfu is not recorded: data.progressive changes the size of images"


def test_a_network_that_is_kept_is_left_alone(known_cpu: Device, train_tiny: Make, events: Make) -> None:
    """Built a second time, it is the one in training."""
    kept = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    result = train_tiny("kept", SENSITIVE, make_network=lambda: kept)
    said, *_ = events(result.run_dir, "measurement")
    assert "returns the same network again" in said["message"]
    assert result.summary.status == "completed"
    assert not any(each.is_meta for each in kept.parameters())
