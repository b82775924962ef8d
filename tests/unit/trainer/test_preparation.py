"""A network that cannot be trained as the recipe asks is refused before the run has a directory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from paceline.errors import DataError, ModelError, RecipeError, TrainingError
from paceline.host.world import World
from paceline.metrics.accumulator import Metric
from paceline.plan import MachineFacts
from paceline.recipe.load import load_recipe
from paceline.tasks.image_classification import ImageClassification
from paceline.tasks.task import build_task
from paceline.trainer.subject import Subject

Make = Callable[..., Any]

STAGES = {"task": "data", "plan": "plan", "shapes": "shapes", "network": "network"}


@pytest.mark.parametrize("upto", STAGES)
def test_no_more_is_open_than_was_asked_for(upto: Any) -> None:
    with Subject.open(load_recipe("digits").recipe, World(), upto) as subject:
        known = [stage for stage, name in STAGES.items() if hasattr(subject, name)]
        assert known == [stage for stage in STAGES if stage == upto or (stage in ("task", "plan") and upto != "task")]
        assert (subject.plan.parameters is None) == (upto == "plan") if upto != "task" else not known[1:]
        with pytest.raises(AttributeError):
            subject.collectives  # noqa: B018


@pytest.mark.parametrize("fails", [False, True])
def test_loader_processes_end_with_the_subject(monkeypatch: pytest.MonkeyPatch, *, fails: bool) -> None:
    closed, task = [], build_task(load_recipe("digits").recipe)
    real = task.open_pipeline

    def open_pipeline(placement: Any) -> Any:
        pipeline = real(placement)
        monkeypatch.setattr(pipeline, "close", lambda: closed.append(pipeline))
        return pipeline

    monkeypatch.setattr(task, "open_pipeline", open_pipeline)
    if fails:
        monkeypatch.setattr(task, "build_model", lambda: None)
        with pytest.raises(ModelError, match="build_model returned"):
            Subject.open(task.recipe, World(), "network", task=task)
    else:
        Subject.open(task.recipe, World(), "network", task=task).close()
    assert len(closed) == 1


def test_a_plan_for_more_processes_is_that_of_a_run_of_theirs() -> None:
    recipe, two = load_recipe("digits").recipe, World(world_size=2, local_world_size=2)
    subject = Subject.open(recipe, World(), "shapes")
    expected = Subject.open(recipe, two, "shapes", machine=subject.machine).plan
    assert subject.plan_for(two) == expected != subject.plan


def refused(train_tiny: Make, task: Any, runs: Path, overrides: dict[str, Any]) -> str:
    with pytest.raises((ModelError, RecipeError)) as caught:
        train_tiny("refused", overrides, task=task)
    assert not (runs / "refused").exists()
    return str(caught.value)


def test_a_network_without_anything_to_train(train_tiny: Make, tiny_task: Make, runs: Path) -> None:
    task = tiny_task(make_network=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 3)).requires_grad_(False))
    assert "no parameter that can be trained" in refused(train_tiny, task, runs, {})


def test_a_sample_that_counts_for_nothing(train_tiny: Make, tiny_task: Make, runs: Path) -> None:
    made = tiny_task()

    def weighted(recipe: Any) -> Any:
        task = made(recipe)
        task.sample_weights = lambda: np.array([2, 1, 0, *[1] * (len(task.dataset.train) - 3)])
        return task

    with pytest.raises(DataError, match=r"training sample 2 counts for 0 images .*leave them out"):
        train_tiny("refused", {}, task=weighted)
    assert not (runs / "refused").exists()


def test_a_metric_with_a_name_that_records_use(train_tiny: Make, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageClassification, "metrics", (Metric(name="samples", of="loss"),))
    assert "metrics has the name 'samples', which records use" in refused(train_tiny, None, runs, {})


def test_an_exact_run_whose_norms_add_up_over_the_processes(train_tiny: Make, tiny_task: Make, runs: Path) -> None:
    def network() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 3, 8), nn.SyncBatchNorm(3), nn.Flatten())

    message = refused(train_tiny, tiny_task(make_network=network), runs, {"parallel.exact": True})
    assert "has SyncBatchNorm (1), whose statistics are sums over the processes" in message


def pooled() -> nn.Module:
    """A network whose BatchNorm sees one number of each channel in an image of the tiny task."""
    layers = (nn.AvgPool2d(8), nn.BatchNorm2d(1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1, 3))
    return nn.Sequential(*layers)


@pytest.mark.parametrize(
    ("more", "overrides"),
    [
        ({"train_images": 49}, {"data.evaluation_size": 16}),  # 4 numbers of each channel in evaluation
        ({"train_images": 49, "evaluation_images": 0}, {"evaluate.every": "off"}),
        ({"train_images": 49}, {"train.duration": "4 steps"}),
        ({"train_images": 50}, {"batch.micro_size": 8, "train.duration": "4 steps"}),
        ({}, {"batch.micro_size": 1, "train.duration": "2 steps"}),
        ({}, {"batch.global_size": 1, "train.duration": "2 steps"}),
    ],
    ids=["evaluated larger", "nothing held out", "tail", "accumulated tail", "accumulated", "of one"],
)
def test_a_micro_batch_of_one_is_found_before_training(
    train_tiny: Make, tiny_task: Make, runs: Path, more: dict[str, Any], overrides: dict[str, Any]
) -> None:
    message = refused(train_tiny, tiny_task(make_network=pooled, **more), runs, overrides)
    assert "brings a micro-batch of one sample, and this model cannot train on a single one" in message


class NormalisedByHand(nn.Module):
    """Batch normalisation without a module of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(64, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(nn.functional.batch_norm(self.hidden(x.flatten(1)), None, None, training=True))


def test_a_micro_batch_of_one_that_only_training_finds(train_tiny: Make) -> None:
    overrides = {"batch.micro_size": 1, "train.duration": "2 steps", "evaluate.every": "off"}
    with pytest.raises(TrainingError, match=r"^step 1 has a micro-batch of one sample.*batch\.micro_size\.$"):
        train_tiny("failed", overrides, make_network=NormalisedByHand)


class Volumes(nn.Module):
    """Filters of three, two and one axis: torch has channels-last for those of two."""

    def __init__(self) -> None:
        super().__init__()
        self.volumes, self.images, self.lines = nn.Conv3d(1, 4, (1, 3, 3)), nn.Conv2d(4, 4, 3), nn.Conv1d(4, 4, 3)
        self.back = nn.ConvTranspose3d(4, 2, (1, 2, 2))
        self.head = nn.Linear(2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.images(self.volumes(x.unsqueeze(2)).squeeze(2))
        x = self.lines(x.flatten(2)).unsqueeze(-1).unsqueeze(-1)
        return self.head(self.back(x).relu().mean((2, 3, 4)))


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_convolutions_that_would_overrun_stay_as_they_are(*, compiled: bool) -> None:
    if not Path("/lib/x86_64-linux-gnu/libc_malloc_debug.so.0").exists():
        pytest.skip("glibc's checks of the heap are not here")
    code = """
import sys
import torch
from torch import nn
from paceline.models.build import to_memory_format
from paceline.models.compiled import CompiledNetwork, CompileLog
from paceline.recipe.model import ModelSection
compiled = "compiled" in sys.argv
for narrow in (3, 8) if compiled else (1, 3, 8, 15):
    stem = nn.Conv2d(narrow, narrow, 3, padding=1)
    branch = to_memory_format(nn.Sequential(stem, nn.Conv2d(narrow, 48, 1, stride=2)), channels_last=True)
    if compiled:
        given = {"train_sizes": [32], "evaluation_sizes": [], "log": CompileLog()}
        branch = CompiledNetwork(branch, ModelSection(name="net", compile=True), **given)
    for _ in range(3):
        # As batches are stored; with one channel, torch takes these strides for those of both formats.
        images = torch.rand(32, 96, 96, narrow).permute(0, 3, 1, 2)
        (branch(images) + (0 if compiled else branch[1](images))).square().mean().backward()
        held = [torch.rand(size) for size in range(1, 300)]
assert stem.weight.is_contiguous(memory_format=torch.channels_last)
"""
    environment = {**os.environ, "LD_PRELOAD": "libc_malloc_debug.so.0", "MALLOC_CHECK_": "3"}
    words = [sys.executable, "-c", code, *["compiled"] * compiled]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("asked", ["auto", True])
def test_filters_of_volumes_stay_as_they_are(train_tiny: Make, asked: object) -> None:
    made: list[Volumes] = []
    result = train_tiny(
        "run",
        {"model.channels_last": asked, "train.duration": "2 steps", "train.ema": 0.9},
        make_network=lambda: made.append(Volumes()) or made[-1],
    )
    assert result.status == "completed"
    assert made[-1].images.weight.is_contiguous(memory_format=torch.channels_last)
    assert made[-1].volumes.weight.is_contiguous()


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("mobilenetv3_small_050", "fp32"),
        ("tf_efficientnet_lite0", "fp32"),
        ("convnext_atto", "bf16"),  # depthwise, without BatchNorm
        ("tf_efficientnetv2_b0", "bf16"),  # they have many channels
        ("mobilenetv4_conv_small", "fp32"),
        ("mobilevit_xxs", "fp32"),
        ("resnet18", "bf16"),
    ],
)
def test_depthwise_networks_are_trained_in_fp32_on_cpus(name: str, precision: str) -> None:
    loaded = load_recipe(
        "digits", [f"model.name={name}", "model.options=null", "data.image_size=32", "train.precision=auto"]
    )
    reasons = {"fast_bf16": "the processor has bf16 products (amx_bf16)"}
    machines = [
        MachineFacts(device=device, device_name="", fast_bf16=True, cores=2, reasons=reasons)
        for device in ("cpu", "cuda")
    ]
    plans = [Subject.open(loaded.recipe, World(), "shapes", machine=each).plan for each in machines]
    assert [each.precision for each in plans] == [precision, "bf16"]
    assert ("depthwise" in plans[0].reasons["train.precision"]) == (precision == "fp32")
