"""Class weights and draws by class, whatever the number of processes, micro-batches, logical ranks and workers."""

from __future__ import annotations

import importlib
import json
import math
import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from calls import Call
from sklearn.utils.class_weight import compute_class_weight

import paceline
from paceline.checkpoint.weights import read_weights
from paceline.data.order import epoch_order
from paceline.data.pipeline import Placement
from paceline.errors import RecipeError
from paceline.host.world import World
from paceline.recipe.load import load_recipe
from paceline.records.ledger import LedgerWriter
from paceline.reports.audit import audit_run, used_samples
from paceline.tasks.facts import geometry_of
from paceline.tasks.task import build_task
from paceline.trainer.subject import Subject

# 61 images of three classes, 44, 12 and 5; the network and its inputs are in float64.
TASK = """
import numpy as np
import torch
from paceline.data.image.datasets import ImageDataset
from paceline.data.image.source import ArraySource
from paceline.tasks.image_classification import ImageClassification

LABELS = np.repeat([0, 1, 2], [44, 12, 5])

def opened(data):
    pixels = np.random.default_rng(0).integers(0, 256, (61, 4, 4, 1)).astype(np.uint8)
    source = ArraySource(pixels, LABELS, "unequal")
    return ImageDataset(name="unequal", train=source, validation=source, classes=("dog", "cat", "07"), channels=1,
        image_size=4, native_size=(4, 4), digest="unequal", mean=(0.5,), std=(0.25,))

class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(16, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)
        ).double()

    def forward(self, images):
        return self.layers(images.double())

class Double(ImageClassification):
    def build_model(self):
        return Network()
"""
# Seven steps of 8 and one of 5 for eight micro-batches.
RECIPE = """
seed: 3
task: unequal:Double
data: {dataset: 'unequal:opened'}
batch: {global_size: 8, micro_size: 1}
optimizer: {name: sgd, lr: 0.5, momentum: 0.0, weight_decay: 0.0}
schedule: {name: constant}
train: {duration: 12 steps, precision: fp32, label_smoothing: 0.1, class_weights: balanced}
evaluate: {every: off}
checkpoint: {every: off}
parallel: {device: cpu, threads: 1}
telemetry: {log_every: 1 steps, trackers: [], report: off}
"""
MIXED = {"data.mix.mixup": 0.5, "data.mix.cutmix": 1.0, "train.loss": "bce"}
COUNTS = np.array([44, 12, 5])


@pytest.fixture
def ground(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "unequal.py").write_text(TASK)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return read_weights(run_dir, "model").state


def furthest(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert mine.keys() == theirs.keys()
    return max((mine[name] - theirs[name]).abs().max().item() for name in mine)


def train(ground: Path, name: str, **overrides: Any) -> Path:
    done = paceline.train(ground / "recipe.yaml", overrides=overrides, run_dir=ground / name, quiet=True)
    assert done.status == "completed"
    assert audit_run(ground / name).passed
    return ground / name


Criterion = Callable[[torch.Tensor, torch.Tensor], Any]


def focal(*class_weights: float, gamma: float = 2.0) -> Criterion:
    """The focal loss of Lin et al. (2017) of the whole batch, smoothed; each sample is weighted by its class."""
    own = torch.tensor(class_weights, dtype=torch.float64)

    def criterion(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        p = logits.softmax(dim=1)
        shares = 0.9 * F.one_hot(labels, 3).double() + 0.1 / 3
        each = -(shares * (1 - p) ** gamma * p.log()).sum(dim=1)
        return (own[labels] * each).sum() / own[labels].sum()

    return criterion


def cross_entropy(*class_weights: float) -> Criterion:
    return focal(*class_weights, gamma=0.0)


def plain_loop(criterion: Criterion) -> dict[str, torch.Tensor]:
    """What everybody writes."""
    unequal: Any = importlib.import_module("unequal")
    source = unequal.opened(None).train
    torch.manual_seed(3)
    network = unequal.Network()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.5)
    for step in range(12):
        ids = epoch_order(3, step // 8, 61)[step % 8 * 8 :][:8]
        pixels = torch.from_numpy(source.images[ids].transpose(0, 3, 1, 2).copy()).float()
        inputs = pixels * torch.tensor(1 / (255 * 0.25)).float() + torch.tensor(-0.5 / 0.25).float()
        optimizer.zero_grad()
        criterion(network(inputs), torch.from_numpy(source.labels[ids])).backward()
        optimizer.step()
    state: dict[str, torch.Tensor] = network.state_dict()
    return state


BALANCED = tuple((61 / 3 / COUNTS).tolist())


@pytest.mark.parametrize(
    ("loss", "asked", "criterion"),
    [
        ("cross_entropy", {"cat": 4, "07": 0.5}, cross_entropy(1.0, 4.0, 0.5)),
        ("focal", "balanced", focal(*BALANCED)),
    ],
)
@pytest.mark.everyday
def test_the_loss_is_the_weighted_mean_over_the_global_batch(
    loss: str, asked: Any, criterion: Criterion, ground: Path
) -> None:
    reference = plain_loop(criterion)
    for micro in (8, 2, 1):
        weighted = {"batch.micro_size": micro, "train.loss": loss, "train.class_weights": asked}
        assert furthest(weights(train(ground, f"micro-{micro}", **weighted)), reference) <= 1e-12
    assert furthest(weights(train(ground, "without", **{"train.class_weights": {"dog": 3}})), reference) > 0.01


def test_two_processes_compute_what_one_does(ground: Path, train_in_ranks: Call) -> None:
    cases: dict[str, dict[str, Any]] = {
        "plain": {},
        "exact": {"parallel.exact": True},
        "mixed": MIXED,
        "focal": {"train.loss": "focal"},
        "exact-focal": {"train.loss": "focal", "parallel.exact": True},
    }
    alone = train_in_ranks(ground, RECIPE, 1, *cases.items())
    for name in cases:
        (ground / name).rename(ground / f"{name}-alone")
    together = train_in_ranks(ground, RECIPE, 2, *cases.items(), ("fsdp", {"parallel.strategy": "fsdp"}))
    for name in ("exact", "exact-focal"):
        assert together[name] == alone[name], "the same bits, with any number of processes"
    reference, of_focal = plain_loop(cross_entropy(*BALANCED)), plain_loop(focal(*BALANCED))
    for name, other in (("plain", reference), ("exact", reference), ("fsdp", reference), ("focal", of_focal)):
        assert furthest(weights(ground / name), other) <= 1e-12, name
    assert furthest(weights(ground / "mixed"), weights(ground / "mixed-alone")) <= 1e-12
    assert all(audit_run(ground / name).passed for name in together)


def test_balanced_is_scikit_learns() -> None:
    labels = np.repeat([0, 1, 2], COUNTS)
    assert pytest.approx(compute_class_weight("balanced", classes=np.arange(3), y=labels)) == BALANCED
    assert math.isclose((COUNTS * BALANCED).sum(), 61)


def test_what_cannot_be_weighted_is_refused(ground: Path, run_here: Call) -> None:
    with pytest.raises(RecipeError, match=r"train\.class_weights names 'cats', .* Did you mean 'cat'"):
        train(ground, "run", **{"train.class_weights": {"cats": 2}})
    with pytest.raises(RecipeError, match="greater than 0"):
        train(ground, "run", **{"train.class_weights": {"cat": 0}})
    with pytest.raises(RecipeError, match="must be 'balanced' or a mapping"):
        train(ground, "run", **{"train.class_weights": "balance"})
    done = run_here("train", "dlrm-synthetic", "train.class_weights=balanced", "--plan-only")
    assert done.code == 2
    assert "'train.class_weights=balanced' has no effect" in done.err
    done = run_here("train", ground / "recipe.yaml", "--plan-only").ended(0)
    assert "train.class_weights     0.462 for 'dog' (44 samples) to 4.07 for '07' (5 samples)" in done.out


# ------------------------------------------------------------------------------------------------------ draws by class

DRAWN: dict[str, Any] = {
    "data.sampling": "balanced",
    "train.class_weights": "off",
    "data.augment.crop": "pad",
    "data.augment.padding": 1,
    "data.augment.erase": 0.5,
    "telemetry.log_every": "1 steps",
}


def test_draws_are_the_same_with_any_number_of_workers_and_after_a_stop(ground: Path) -> None:
    whole = train(ground, "whole", **DRAWN)
    ledger = (whole / "ledger" / "rank-00000.ids").read_bytes()
    facts = json.loads((whole / "summary.json").read_text())["ledger"]
    assert (facts["epochs_complete"], facts["duplicates"], facts["missing"]) == (1, 0, 0)
    for workers in (0, 1, 3):
        again = train(ground, f"workers-{workers}", **DRAWN, **{"data.backend": "pytorch", "data.workers": workers})
        assert furthest(weights(again), weights(whole)) == 0
        assert (again / "ledger" / "rank-00000.ids").read_bytes() == ledger
    for until in ("3 steps", "8 steps", "off"):
        paceline.train(
            ground / "recipe.yaml", overrides={**DRAWN, "train.until": until}, run_dir=ground / "stopped", quiet=True
        )
    assert furthest(weights(ground / "stopped"), weights(whole)) == 0
    assert (ground / "stopped" / "ledger" / "rank-00000.ids").read_bytes() == ledger


def test_the_audit_proves_the_draws(ground: Path) -> None:
    run_dir = train(ground, "run", **DRAWN)
    assert "each of 61 draws (data.sampling" in str(audit_run(run_dir).__paceline__().blocks[-1])
    path = run_dir / "ledger" / "rank-00000.ids"
    content, entries = path.read_bytes(), list(used_samples(run_dir, 0))
    swapped = [entries[0].ids.copy(), entries[1].ids.copy()]
    assert not np.array_equal(swapped[0], swapped[1])
    for name, ids, wanted in (
        ("exchanged", [swapped[1], swapped[0]], "out of order"),
        ("twice", [swapped[0], swapped[0], swapped[1]], "beyond the recipe's draws"),
        ("never", [swapped[1]], r"draw\(s\) were never used"),
    ):
        path.write_bytes(b"")
        with closing(LedgerWriter(path)) as writer:
            for each, entry in zip(ids, (entries[0], entries[1], entries[1]), strict=False):
                writer.append(step=entry.step, epoch=entry.epoch, ids=each)
            for entry in entries[2:]:
                writer.append(step=entry.step, epoch=entry.epoch, ids=entry.ids)
        found = audit_run(run_dir)
        assert not found.passed, name
        assert re.search(wanted, " ".join(found.objections)), name
    path.write_bytes(content)
    (run_dir / "sample_classes.npy").unlink()
    assert "sample_classes.npy" in audit_run(run_dir).objections[-1]


def test_each_draw_of_an_image_is_varied_anew(ground: Path) -> None:
    for backend in ({"data.backend": "memory"}, {"data.backend": "pytorch", "data.workers": 0}):
        loaded = load_recipe(ground / "recipe.yaml", {**DRAWN, **backend}).recipe
        task = build_task(loaded)
        plan = Subject.open(loaded, World(), "plan", task=task).plan
        with closing(task.open_pipeline(Placement(device=torch.device("cpu")))) as pipeline:
            pipeline.start(training=True, evaluation=False)
            batches = list(pipeline.train_batches(geometry_of(loaded, plan, task), 0, 8, World()))
        shown: dict[int, set[bytes]] = {}
        for batch in batches:
            for sample, image in zip(batch.ids.tolist(), batch.inputs, strict=True):
                shown.setdefault(sample, set()).add(image.numpy().tobytes())
        rare = [len(shown[sample]) for sample in range(56, 61)]
        assert sum(rare) > 15, "of 20 draws of five images few are alike by chance"


def test_two_processes_draw_what_one_does(ground: Path, train_in_ranks: Call) -> None:
    cases = {"plain": DRAWN, "exact": {**DRAWN, "parallel.exact": True}}
    alone = train_in_ranks(ground, RECIPE, 1, *cases.items())
    for name in cases:
        (ground / name).rename(ground / f"{name}-alone")
    assert train_in_ranks(ground, RECIPE, 2, *cases.items())["exact"] == alone["exact"]
    assert furthest(weights(ground / "plain"), weights(ground / "plain-alone")) <= 1e-12
    assert all(audit_run(ground / name).passed for name in cases)


def test_what_cannot_be_drawn_is_refused(ground: Path, run_here: Call) -> None:
    with pytest.raises(RecipeError, match=r"data\.sampling names 'dgo', .* Did you mean 'dog'"):
        train(ground, "run", **{"data.sampling": {"dgo": 2}})
    done = run_here("train", "dlrm-synthetic", "data.sampling=balanced", "--plan-only")
    assert (done.code, "'data.sampling=balanced' has no effect" in done.err) == (2, True)
    done = run_here("train", ground / "recipe.yaml", "data.sampling.cat=3", "--plan-only").ended(0)
    assert "drawn with replacement, 1 for 'dog' (44 samples) to 3 for 'cat' (12 samples)" in done.out
