"""The gradient noise scale of a run: the estimates of its own micro-batches, at no pass and no bit of the weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from golden_sentences import raises
from torch import nn

from paceline.checkpoint.manifest import read_components
from paceline.data.batch import Batch
from paceline.errors import RecipeError
from paceline.metrics.gradient_noise import NoiseAverages, estimate
from paceline.recipe.load import load_recipe
from paceline.trainer.noise import HALF_LIFE
from paceline.trainer.train import plan_only

Make = Callable[..., Any]

# One epoch of 52 samples: three steps of 16, and a last one of 4 whose micro-batches are of 1.
PARTS = {"batch.micro_size": 4, "telemetry.noise_scale": "1 steps", "telemetry.log_every": "1 steps"}
QUIET = {"evaluate.every": "off", "checkpoint.every": "off", "train.duration": "4 steps"}
# Of each sample.
GRADIENTS = torch.tensor(np.random.default_rng(5).normal(0.5, 1.0, (52, 5)), dtype=torch.float32)


class Linear(nn.Module):
    """Its loss is linear in its weights, so that a sample's gradient is known and stays what it is."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(3))
        self.second = nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.first.sum() + self.second.sum()).expand(len(x), 3)


@pytest.fixture
def known(train_tiny: Make) -> Make:
    """``known("a", {...})`` trains where gradients are known: the result, and each micro-batch's samples by step."""

    def train(name: str, overrides: dict[str, Any], spoiled: tuple[int, ...] = ()) -> tuple[Any, list[list[Any]]]:
        made: list[Linear] = []
        seen: dict[int, dict[int, Any]] = {}

        def network() -> Linear:
            made.append(Linear())
            return made[-1]

        def on_loss(batch: Batch, _: torch.Tensor) -> torch.Tensor:
            # By logical rank: a rehearsal shows the first one twice.
            seen.setdefault(batch.slice.step, {})[batch.slice.logical_rank] = ids = batch.ids.copy()
            loss = (GRADIENTS[ids] @ torch.cat([made[-1].first, made[-1].second])).mean()
            return loss * float("nan") if batch.slice.step in spoiled else loss

        result = train_tiny(name, {**QUIET, **PARTS, **overrides}, make_network=network, on_loss=on_loss)
        return result, [list(seen[step].values()) for step in sorted(seen)]

    return train


def expected(steps: list[list[Any]], *, first_only: bool) -> NoiseAverages:
    averages = NoiseAverages(half_life=HALF_LIFE)
    for parts in steps:
        whole = GRADIENTS[np.concatenate(parts)].mean(0).square().sum().item()
        some = parts[:1] if first_only else parts
        samples = [len(ids) for ids in some]
        squares = [GRADIENTS[ids].mean(0).square().sum().item() for ids in some]
        small = sum(n * square for n, square in zip(samples, squares, strict=True)) / sum(samples)
        found = estimate(sum(samples) / len(samples), small, sum(map(len, parts)), whole)
        assert found is not None
        averages.add(found)
    return averages


@pytest.mark.parametrize("exact", [False, True], ids=["accumulated", "exact"])
@pytest.mark.parametrize("clipped", [{}, {"optimizer.clip_norm": 0.01}], ids=["free", "clipped"])
def test_records_hold_the_estimates_of_the_runs_own_micro_batches(
    known: Make, events: Make, exact: bool, clipped: dict[str, Any]
) -> None:
    result, steps = known("a", {"parallel.exact": exact, **clipped})
    for count, event in enumerate(events(result.run_dir, "step"), start=1):
        ours = expected(steps[:count], first_only=not exact)
        assert event["gradient_variance"] == pytest.approx(ours.mean_variance, rel=1e-4)
        assert event["gradient_square"] == pytest.approx(ours.mean_square, rel=1e-4)
        found = ours.noise_scale()
        assert event["noise_scale"] == (None if found is None else pytest.approx(found.middle, rel=1e-3))


def test_the_scale_of_the_loss_is_taken_out(known: Make, events: Make) -> None:
    fp16 = {"train.precision": "fp16", "train.grad_scaler.init_scale": 4096.0}
    scaled, plain = (events(known(name, more)[0].run_dir, "step") for name, more in (("a", fp16), ("b", {})))
    for one, other in zip(scaled, plain, strict=True):
        assert one["gradient_square"] == pytest.approx(other["gradient_square"], rel=1e-2)
        assert one["gradient_variance"] == pytest.approx(other["gradient_variance"], rel=1e-2)


def test_a_step_that_is_left_out_counts_for_nothing(known: Make, events: Make) -> None:
    result, steps = known("a", {"train.nonfinite": "skip"}, spoiled=(1,))
    last = events(result.run_dir, "step")[-1]
    ours = expected([steps[0], *steps[2:]], first_only=True)
    assert last["gradient_variance"] == pytest.approx(ours.mean_variance, rel=1e-4)


def test_measuring_changes_no_weight(train_tiny: Make) -> None:
    sensitive = {
        **QUIET,
        "train.duration": "8 steps",
        "model.options.dropout": 0.3,
        "train.ema": 0.9,
        "batch.micro_size": 8,
        "optimizer.clip_norm": 1.0,
    }
    alone = train_tiny("alone", sensitive)
    watched = train_tiny("watched", {**sensitive, "telemetry.noise_scale": "1 steps"})
    assert watched.summary.weights_sha256 == alone.summary.weights_sha256
    assert watched.summary.ema_sha256 == alone.summary.ema_sha256


def test_a_resumed_run_records_the_same(train_tiny: Make, course: Make) -> None:
    """Also where the checkpoint falls between two records."""
    asked = {**PARTS, "telemetry.log_every": "3 steps", "checkpoint.every": "4 steps", "train.duration": "9 steps"}
    whole = train_tiny("whole", asked)
    train_tiny("parts", {**asked, "train.until": "4 steps"})
    parts = train_tiny("parts", asked)
    assert course(parts.run_dir) == course(whole.run_dir)
    assert parts.summary.weights_sha256 == whole.summary.weights_sha256


def test_it_may_be_turned_on_and_off_at_a_resume(train_tiny: Make, events: Make) -> None:
    plain = {"batch.micro_size": 4, "checkpoint.every": "2 steps", "checkpoint.keep": 3, "train.duration": "6 steps"}
    for until, noise in (("2 steps", "off"), ("4 steps", "1 steps"), ("6 steps", "off")):
        result = train_tiny("run", {**plain, "train.until": until, "telemetry.noise_scale": noise})
    assert [event["step"] for event in events(result.run_dir, "step") if "noise_scale" in event] == [4]
    before, measured, kept = (
        read_components(result.run_dir / f"checkpoints/step-{step:08d}", ["window"])["window"].get("noise")
        for step in (2, 4, 6)
    )
    assert before is None
    assert measured["averages"] == kept["averages"]


@pytest.mark.parametrize(("overrides", "world_size"), [({}, 1), ({"parallel.strategy": "fsdp"}, 2)])
def test_what_cannot_be_measured_is_refused(tiny_recipe: Path, overrides: dict[str, Any], world_size: int) -> None:
    loaded = load_recipe(tiny_recipe, {**overrides, "telemetry.noise_scale": "1 steps"})
    with raises(RecipeError, key="telemetry.noise_scale", value="1 step"):
        plan_only(loaded, world_size=world_size)
    plan_only(load_recipe(tiny_recipe, {"telemetry.noise_scale": "1 steps"}), world_size=2)


LINEAR = {"optimizer.lr_scaling": "linear", "optimizer.lr_reference_batch": 2, "optimizer.lr": 1e-4}


@pytest.mark.parametrize(("spread", "warns"), [(0.1, True), (30.0, False)], ids=["little noise", "much noise"])
def test_a_linear_rule_beyond_the_noise_is_told_once(
    known: Make, events: Make, monkeypatch: pytest.MonkeyPatch, spread: float, warns: bool
) -> None:
    mean = GRADIENTS.mean(0)
    monkeypatch.setitem(globals(), "GRADIENTS", mean + spread * (GRADIENTS - mean))
    result, _ = known("a", {**LINEAR, "train.duration": "60 steps"})
    told = [each for each in events(result.run_dir, "incident") if each["incident"] == "linear_lr_rule"]
    assert len(told) == warns
    if warns:
        assert "by 8 for a batch of 16" in told[0]["message"]
        assert told[0]["step"] >= 20
