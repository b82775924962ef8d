"""SSDs in the detection task against torchvision's own training step: the same pictures, losses and weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import Call
from torchvision.models import get_model

import paceline
from paceline.data.batch import Batch
from paceline.data.order import StepGeometry
from paceline.data.pipeline import Placement
from paceline.host.world import World
from paceline.recipe.load import load_recipe
from paceline_vision.detection.task import Detection

SEED, STEPS, BATCH, RATE = 3, 3, 2, 1e-4  # as in the recipe
RECIPE = """
task: detection
seed: 3
model: {name: MODEL, channels_last: false}
data:
  dataset: shapes
  detection:
    short_sides: off
    flip: 0.0
    generated: {samples: 6, evaluation_samples: 2, smallest_side: 120, largest_side: 200}
batch: {global_size: 2}
optimizer: {name: sgd, lr: 0.0001, momentum: 0.9}
schedule: {name: constant}
train: {duration: 3 steps, precision: fp32}
evaluate: {every: 3 steps, batch_size: 1}
parallel: {device: cpu, threads: 1}
telemetry: {log_every: 1 steps, trackers: [], report: off}
"""

pytestmark = pytest.mark.thorough


@pytest.fixture(params=["torchvision:ssd300_vgg16", "torchvision:ssdlite320_mobilenet_v3_large"])
def recipe(request: pytest.FixtureRequest, runs: Path) -> Path:
    path = runs / "ssd.yaml"
    path.write_text(RECIPE.replace("MODEL", f'"{request.param}"'))
    return path


def opened(recipe: Path) -> tuple[Detection, list[Batch], list[Batch]]:
    """The task with the batches of its steps and of an evaluation."""
    task = Detection(load_recipe(recipe, {}).recipe)
    samples = task.data_facts(World()).train_samples
    pipeline = task.open_pipeline(Placement(device=torch.device("cpu")))
    geometry = StepGeometry(
        seed=SEED, samples=samples, global_batch_size=BATCH, logical_ranks=1, sort_key=task.sample_keys()
    )
    steps = list(pipeline.train_batches(geometry, 0, STEPS, World()))
    return task, steps, list(pipeline.evaluation_batches(1, World()))


def references(task: Detection) -> Any:
    """torchvision's network with its own preprocessing, initialised as the task initialises its."""
    torch.manual_seed(SEED)
    name = task.recipe.model.name.removeprefix("torchvision:")
    return get_model(name, weights=None, weights_backbone=None, num_classes=4)


def reference_losses(network: Any, batch: Batch) -> dict[str, torch.Tensor]:
    targets = [{name: each[name] for name in ("boxes", "labels")} for each in batch.targets]
    losses: dict[str, torch.Tensor] = network(batch.inputs, targets)
    return losses


def test_each_term_of_the_loss_and_each_detection_is_torchvision_s(recipe: Path) -> None:
    task, steps, held_out = opened(recipe)
    torch.manual_seed(SEED)
    ours, reference = task.build_model().train(), references(task).train()
    with torch.no_grad():
        expected = reference_losses(reference, steps[0])
        found = ours(steps[0].inputs, steps[0].targets)
        total = task.loss(ours, steps[0])
    assert sorted(found) == sorted(expected) == ["bbox_regression", "classification"]
    for name in expected:
        assert found[name].item() == pytest.approx(expected[name].item(), rel=1e-5)
    assert total.item() == pytest.approx(sum(each.item() for each in expected.values()), rel=1e-5)
    ours.load_state_dict(reference.state_dict())
    with torch.no_grad():
        answers, detections = task.score(ours.eval(), held_out[0])["found"], reference.eval()(held_out[0].inputs)
    assert len(detections[0]["scores"]) > 0
    assert all(torch.equal(answers[0][name], each) for name, each in detections[0].items())


def test_a_run_is_torchvision_s_loop(recipe: Path, runs: Path, weights: Call) -> None:
    result = paceline.train(recipe, run_dir=runs / "run", quiet=True)
    events = [json.loads(line) for line in (result.run_dir / "events.jsonl").read_text().splitlines()]
    found = [each["loss"] for each in events if each["event"] == "step"]
    task, steps, _ = opened(recipe)
    network = references(task).train()
    optimizer = torch.optim.SGD(network.parameters(), lr=RATE, momentum=0.9)
    expected = []
    for batch in steps:
        loss = sum(reference_losses(network, batch).values(), start=torch.zeros(()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert len(found) == STEPS
    assert found == pytest.approx(expected, rel=1e-5)
    trained = weights(result)
    for name, each in network.state_dict().items():
        torch.testing.assert_close(trained[name], each, rtol=1e-5, atol=1e-6)
