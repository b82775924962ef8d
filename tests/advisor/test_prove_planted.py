"""Ten classic mistakes, planted one by one in task, network, pipeline or trainer: each is found by its name."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import paceline.data.image.pipeline as image_pipeline
import paceline.data.loaders.memory as memory
import paceline.data.order as order
import paceline.trainer.evaluate as evaluate
import paceline.trainer.step as step
from paceline.data.batch import Batch
from paceline.data.order import StepGeometry
from paceline.metrics.accumulator import Accumulator
from paceline.models.ema import ExponentialMovingAverage
from paceline.models.small_resnet import small_resnet
from paceline.plan.epochs import Epochs
from paceline.plan.rates import LearningRate

Proof = Callable[..., dict[str, Any]]
Failed = Callable[[dict[str, Any]], set[str]]
ACCUMULATED = {"batch.micro_size": 4}


# 1: the loss is not divided, or twice


def test_a_task_that_divides_by_the_micro_batches_itself(proof: Proof, failed: Failed, tiny_task: Any) -> None:
    def divided(recipe: Any) -> Any:
        parts = recipe.batch.global_size // recipe.batch.micro_size
        return tiny_task(on_loss=lambda _, loss: loss / parts)(recipe)

    checks = proof(task=divided, overrides=ACCUMULATED)
    assert failed(checks) == {"accumulation", "tail"}
    assert "micro-batches, step 1: 0.25 times the gradient wanted" in checks["accumulation"].found


@pytest.mark.thorough
def test_a_loss_that_adds_up_where_the_mean_is_meant(proof: Proof, failed: Failed) -> None:
    checks = proof(on_loss=lambda batch, loss: loss * len(batch.ids))
    assert failed(checks) == {"accumulation", "tail"}
    assert "0.25 times the gradient wanted" in checks["accumulation"].found


def test_a_trainer_that_does_not_divide(proof: Proof, failed: Failed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "_share", lambda loss, batch, averages_over: loss)
    checks = proof()
    assert failed(checks) == {"accumulation", "tail", "gradient"}
    assert "4 times the gradient wanted" in checks["accumulation"].found


@pytest.mark.thorough
def test_the_same_is_found_where_one_batch_cannot_be_compared_with_its_parts(
    proof: Proof, failed: Failed, monkeypatch: pytest.MonkeyPatch, perceptron: type[nn.Module]
) -> None:
    class Noisy(perceptron):  # type: ignore[misc,valid-type]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + 0.1 * torch.randn_like(x) * self.training)

    monkeypatch.setattr(step, "_share", lambda loss, batch, averages_over: loss)
    assert failed(proof(make_network=Noisy)) == {"tail", "gradient"}


# 2: every epoch in the same order


def test_an_order_without_the_epoch(proof: Proof, failed: Failed, monkeypatch: pytest.MonkeyPatch) -> None:
    true = order.epoch_order
    monkeypatch.setattr(order, "epoch_order", lambda seed, epoch, *rest: true(seed, 0, *rest))
    checks = proof()
    assert failed(checks) == {"order"}
    assert "both epochs have the same order" in checks["order"].found


class FirstEpoch(StepGeometry):
    """Slices of the first epoch, whatever the step."""

    def slices(self, step: int, world: Any) -> Any:
        parts = super().slices(step % self.epochs.phases[0].steps_per_epoch, world)
        return [dataclasses.replace(part, step=step) for part in parts]


class EpochIgnored:
    """A pipeline of one's own that forgets the epoch."""

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline

    def train_batches(self, geometry: Any, first: int, last: int, world: Any) -> Iterator[Batch]:
        forgetful = FirstEpoch(**{each.name: getattr(geometry, each.name) for each in dataclasses.fields(geometry)})
        found: Iterator[Batch] = self._pipeline.train_batches(forgetful, first, last, world)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipeline, name)


@pytest.mark.thorough
def test_a_pipeline_without_the_epoch(proof: Proof, failed: Failed, tiny_task: Any) -> None:
    def make(recipe: Any) -> Any:
        task = tiny_task()(recipe)
        opened = task.open_pipeline
        task.open_pipeline = lambda placement: EpochIgnored(opened(placement))
        return task

    assert failed(proof(task=make)) == {"order"}


def test_an_order_that_repeats_samples(proof: Proof, failed: Failed, monkeypatch: pytest.MonkeyPatch) -> None:
    true = order.epoch_order
    monkeypatch.setattr(order, "epoch_order", lambda *given: true(*given) // 2 * 2)
    checks = proof()
    assert failed(checks) == {"order"}
    assert "20 samples are missing and 20 are too many" in checks["order"].found


def test_variation_without_the_epoch(proof: Proof, failed: Failed, monkeypatch: pytest.MonkeyPatch) -> None:
    true = memory.draw
    monkeypatch.setattr(memory, "draw", lambda augment, seed, epoch, ids: true(augment, seed, 0, ids))
    checks = proof(overrides={"data.augment.crop": "pad"})
    assert failed(checks) == {"samples"}


@pytest.mark.thorough
def test_variation_that_depends_on_the_micro_batch(
    proof: Proof, failed: Failed, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = memory.MemoryBackend._inputs

    def shifted(self: Any, starts: torch.Tensor, *rest: Any) -> torch.Tensor:
        return true(self, starts, *rest) + len(starts)

    monkeypatch.setattr(memory.MemoryBackend, "_inputs", shifted)
    assert failed(proof()) >= {"samples"}


# 4: the tail of an epoch


def test_a_tail_weighed_as_if_it_were_whole(proof: Proof, failed: Failed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "_share", lambda loss, batch, averages_over: loss * batch.weight * averages_over / 16)
    checks = proof()
    assert failed(checks) == {"tail"}
    assert "step 3: 0.562 times the gradient wanted" in checks["tail"].found


@pytest.mark.thorough
def test_parts_of_a_tail_weighed_alike(proof: Proof, failed: Failed, monkeypatch: pytest.MonkeyPatch) -> None:
    def share(loss: torch.Tensor, batch: Batch, averages_over: int) -> torch.Tensor:
        return loss * averages_over / (1 if batch.weight in (16, 9) else 4)

    monkeypatch.setattr(step, "_share", share)
    assert failed(proof()) == {"tail"}


def test_a_tail_that_is_dropped(proof: Proof, failed: Failed, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(samples: int, sizes: Any) -> Any:
        whole = Epochs.cut(samples, sizes)
        phases = (dataclasses.replace(each, steps_per_epoch=samples // each.global_batch_size) for each in whole.phases)
        return Epochs(samples, tuple(phases))

    monkeypatch.setattr(order, "Epochs", SimpleNamespace(cut=cut))
    checks = proof()
    assert failed(checks) >= {"tail", "order"}
    assert "step 3 took 16 samples instead of 9" in checks["tail"].found


class WholeOnly:
    """A pipeline of one's own that gives no micro-batch that is smaller than the others."""

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline

    def train_batches(self, geometry: Any, *given: Any) -> Iterator[Batch]:
        size = geometry.global_batch_size // geometry.logical_ranks
        return (each for each in self._pipeline.train_batches(geometry, *given) if len(each.ids) == size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipeline, name)


@pytest.mark.thorough
def test_a_pipeline_that_drops_the_tail(proof: Proof, failed: Failed, tiny_task: Any) -> None:
    def make(recipe: Any) -> Any:
        task = tiny_task()(recipe)
        opened = task.open_pipeline
        task.open_pipeline = lambda placement: WholeOnly(opened(placement))
        return task

    checks = proof(task=make)
    assert failed(checks) >= {"tail", "order", "run"}
    assert "step 3 took 0 samples instead of 9" in checks["tail"].found
    assert "StopIteration" in checks["run"].found


@pytest.mark.thorough
def test_a_loss_divided_by_the_size_that_micro_batches_should_have(
    proof: Proof, failed: Failed, tiny_task: Any
) -> None:
    def make(recipe: Any) -> Any:
        return tiny_task(on_loss=lambda batch, loss: loss * len(batch.ids) / recipe.batch.micro_size)(recipe)

    assert failed(proof(task=make, overrides=ACCUMULATED)) == {"tail"}


# 5: the learning rate is scaled twice


def test_a_rate_scaled_by_the_micro_batches(proof: Proof, failed: Failed, monkeypatch: pytest.MonkeyPatch) -> None:
    true = LearningRate.of
    monkeypatch.setattr(
        LearningRate,
        "of",
        lambda schedule, rates: dataclasses.replace(
            true(schedule, rates), peak=rates.peak_lr * rates.batch_phases[0].logical_ranks
        ),
    )
    checks = proof()
    assert failed(checks) == {"learning-rate"}
    assert checks["learning-rate"].difference == pytest.approx(3)


@pytest.mark.thorough
def test_a_rate_scaled_at_the_optimizer(proof: Proof, failed: Failed, monkeypatch: pytest.MonkeyPatch) -> None:
    true = step.apply_settings

    def doubled(optimizer: Any, settings: Any) -> None:
        true(optimizer, dataclasses.replace(settings, learning_rate=2 * settings.learning_rate))

    monkeypatch.setattr(step, "apply_settings", doubled)
    scaled = {"optimizer.lr_scaling": "sqrt", "optimizer.lr_reference_batch": 64}
    assert failed(proof(overrides=scaled)) == {"learning-rate"}


# 6: a parameter without use


def test_an_unused_parameter_is_named(proof: Proof, failed: Failed, perceptron: type[nn.Module]) -> None:
    class Forgetful(perceptron):  # type: ignore[misc,valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.projection = nn.Linear(3, 3)

    checks = proof(make_network=Forgetful)
    assert failed(checks) == {"parameters"}
    assert checks["parameters"].found == "without a gradient: projection.weight, projection.bias"
    assert checks["parameters"].difference == 2


# 7: dropout is off


def test_a_dropout_that_is_never_called(proof: Proof, failed: Failed, perceptron: type[nn.Module]) -> None:
    class Dry(perceptron):  # type: ignore[misc,valid-type]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            answer: torch.Tensor = self.head(F.dropout(self.hidden(x.flatten(1)), 0.2, training=False))
            return answer

        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.Identity()

    checks = proof(make_network=Dry)
    assert failed(checks) == {"dropout"}
    assert checks["dropout"].found == "without effect: drop"


def test_a_network_that_ignores_the_dropout_it_is_asked_for(
    proof: Proof, failed: Failed, tiny_task: Any, perceptron: type[nn.Module]
) -> None:
    asked = {"model.options": "{dropout: 0.3}"}
    checks = proof(make_network=lambda: perceptron(0.0), overrides=asked)
    assert failed(checks) == {"dropout"}
    assert "model.options.dropout has no effect" in checks["dropout"].found


@pytest.mark.thorough
def test_a_probability_that_nothing_reads(proof: Proof, failed: Failed, perceptron: type[nn.Module]) -> None:
    class Dry(perceptron):  # type: ignore[misc,valid-type]
        def __init__(self) -> None:
            super().__init__(0.0)
            self.dropout = 0.3

    checks = proof(make_network=Dry)
    assert failed(checks) == {"dropout"}
    assert checks["dropout"].found == "without effect: dropout"


@pytest.mark.thorough
def test_a_dropout_in_evaluation_mode(proof: Proof, failed: Failed, perceptron: type[nn.Module]) -> None:
    def network() -> nn.Module:
        made = perceptron()
        made.get_submodule("drop").eval()
        return made

    checks = proof(make_network=network)
    assert failed(checks) == {"dropout"}
    assert "in evaluation mode: drop" in checks["dropout"].found


def test_a_dropout_that_drops_the_same_at_every_step(
    proof: Proof, failed: Failed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "seed_forward", lambda *_: torch.manual_seed(0))
    assert failed(proof()) >= {"dropout"}


# 8: the moving average is stale


def test_an_average_that_is_not_updated(proof: Proof, failed: Failed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ExponentialMovingAverage, "update", lambda self, number: None)
    assert failed(proof()) == {"moving-average"}


def test_an_average_updated_for_each_micro_batch(proof: Proof, failed: Failed, monkeypatch: pytest.MonkeyPatch) -> None:
    true = ExponentialMovingAverage.update

    def often(self: Any, number: int) -> None:
        for _ in range(4):
            true(self, number)

    monkeypatch.setattr(ExponentialMovingAverage, "update", often)
    assert failed(proof()) == {"moving-average"}


def test_an_average_of_the_weights_before_the_step(
    proof: Proof, failed: Failed, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = step._update

    def early(run: Any) -> bool:
        average, run.ema = run.ema, None
        average.update(run.progress.step)
        stepped = true(run)
        run.ema = average
        return stepped

    monkeypatch.setattr(step, "_update", early)
    assert failed(proof()) == {"moving-average"}


# 9: the metric is reduced wrongly


def test_scores_that_are_means_of_batches(proof: Proof, failed: Failed) -> None:
    checks = proof(on_score=lambda model, batch, values: {k: v.double().mean()[None] for k, v in values.items()})
    assert failed(checks) == {"metric"}


def test_one_score_that_is_the_mean_of_a_batch(proof: Proof, failed: Failed) -> None:
    def score(model: Any, batch: Batch, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {**values, "top1_accuracy": values["top1_accuracy"].double().mean()[None]}

    checks = proof(on_score=score)
    assert failed(checks) == {"metric"}
    assert "top1_accuracy is" in checks["metric"].found


def test_a_mean_of_means_in_the_trainer(proof: Proof, failed: Failed, monkeypatch: pytest.MonkeyPatch) -> None:
    def results(self: Accumulator, rows: Any) -> Any:
        means = [[value / row[0] for value in row[1:]] for row in rows]
        totals = [sum(column) / len(means) for column in zip(*means, strict=True)]
        named = {m.name: m.scale * total for m, total in zip(self.metrics, totals, strict=True)}
        return sum(row[0] for row in rows), named

    monkeypatch.setattr(Accumulator, "results", results)
    checks = proof()
    assert failed(checks) == {"metric"}
    assert "sample by sample" in checks["metric"].found


def test_padded_samples_that_are_counted(proof: Proof, failed: Failed, monkeypatch: pytest.MonkeyPatch) -> None:
    true = Accumulator.add

    def padded(self: Accumulator, values: Any) -> None:
        true(self, {name: torch.cat([each, each[:1].expand(8 - len(each))]) for name, each in values.items()})

    monkeypatch.setattr(Accumulator, "add", padded)
    checks = proof()
    assert failed(checks) == {"metric"}
    assert "samples were counted" in checks["metric"].found


def test_samples_that_are_scored_twice(proof: Proof, failed: Failed, monkeypatch: pytest.MonkeyPatch) -> None:
    true = order.evaluation_slices

    def padded(samples: int, batch_size: int, *given: Any) -> Iterator[Any]:
        for part in true(samples, batch_size, *given):
            yield dataclasses.replace(part, ids=np.resize(part.ids, batch_size))

    monkeypatch.setattr(image_pipeline, "evaluation_slices", padded)
    assert failed(proof()) == {"metric"}


# 10: evaluation mode is left on


def test_an_evaluation_that_does_not_go_back(proof: Proof, failed: Failed, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def for_good(models: Any) -> Iterator[None]:
        for model in models:
            model.eval()
        yield

    monkeypatch.setattr(evaluate, "evaluation_mode", for_good)
    checks = proof(make_network=lambda: small_resnet(3, 1, width=4, stages=1))
    assert failed(checks) >= {"training-mode"}
    assert "step 4: the network was not in its training mode" in checks["training-mode"].found


def test_a_task_that_looks_at_its_accuracy_and_does_not_go_back(proof: Proof, failed: Failed, tiny_task: Any) -> None:
    def make(recipe: Any) -> Any:
        task = tiny_task(make_network=lambda: small_resnet(3, 1, width=4, stages=1))(recipe)
        true = task.loss

        def loss(model: Any, batch: Batch) -> torch.Tensor:
            value: torch.Tensor = true(model, batch)
            with torch.no_grad():
                task.score(model.eval(), batch)
            return value

        task.loss = loss
        return task

    checks = proof(task=make)
    assert failed(checks) >= {"training-mode"}
    assert "step 1: the network was not" in checks["training-mode"].found


def test_a_factory_that_gives_a_network_in_evaluation_mode(
    proof: Proof, failed: Failed, perceptron: type[nn.Module]
) -> None:
    checks = proof(make_network=lambda: perceptron().eval())
    assert failed(checks) == {"training-mode", "dropout"}
    assert "step 1: the network was not" in checks["training-mode"].found
