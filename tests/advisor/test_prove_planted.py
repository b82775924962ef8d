"""Ten classic mistakes, planted one by one in task, network, pipeline or trainer: each is found by its name."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
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
from paceline.models.small_resnet import small_resnet
from paceline.optim.build import ExponentialMovingAverage as Average
from paceline.plan.epochs import Epochs
from paceline.plan.rates import LearningRate

Proof = Callable[..., dict[str, Any]]
Failed = Callable[[dict[str, Any]], set[str]]
ACCUMULATED = {"batch.micro_size": 4}


# Replacements of the trainer's own, each with one mistake


TRUE = SimpleNamespace(
    order=order.epoch_order,
    draw=memory.draw,
    inputs=memory.MemoryBackend._inputs,
    rate=LearningRate.of,
    settings=step.apply_settings,
    average=Average.update,
    update=step._update,
    add=Accumulator.add,
    slices=order.evaluation_slices,
)


def without_the_tail(samples: int, sizes: Any) -> Any:
    complete = Epochs.cut(samples, sizes)
    phases = (dataclasses.replace(each, steps_per_epoch=samples // each.global_batch_size) for each in complete.phases)
    return Epochs(samples, tuple(phases))


def scaled_rate(schedule: Any, rates: Any) -> Any:
    return dataclasses.replace(TRUE.rate(schedule, rates), peak=rates.peak_lr * rates.batch_phases[0].logical_ranks)


def doubled_rate(optimizer: Any, settings: Any) -> None:
    TRUE.settings(optimizer, dataclasses.replace(settings, learning_rate=2 * settings.learning_rate))


def average_of_each_micro_batch(self: Any, number: int) -> None:
    for _ in range(4):
        TRUE.average(self, number)


def average_before_the_step(run: Any) -> bool:
    average, run.ema = run.ema, None
    average.update(run.progress.step)
    stepped: bool = TRUE.update(run)
    run.ema = average
    return stepped


def mean_of_means(self: Accumulator, rows: Any) -> Any:
    means = [[value / row[0] for value in row[1:]] for row in rows]
    totals = [sum(column) / len(means) for column in zip(*means, strict=True)]
    named = {m.name: m.scale * total for m, total in zip(self.metrics, totals, strict=True)}
    return sum(row[0] for row in rows), named


def padded_scores(self: Accumulator, values: Any) -> None:
    TRUE.add(self, {name: torch.cat([each, each[:1].expand(8 - len(each))]) for name, each in values.items()})


def padded_slices(samples: int, batch_size: int, *given: Any) -> Iterator[Any]:
    for part in TRUE.slices(samples, batch_size, *given):
        yield dataclasses.replace(part, ids=np.resize(part.ids, batch_size))


@contextlib.contextmanager
def for_good(models: Any) -> Iterator[None]:
    for model in models:
        model.eval()
    yield


def residual() -> nn.Module:
    return small_resnet(3, 1, width=4, stages=1)


RESIDUAL = {"make_network": residual}


# What is replaced, by what, and which checks fail of which recipe; more checks may where the mistake is in many places.
TRAINERS: dict[str, tuple[Any, str, Any, set[str], dict[str, Any]]] = {
    "does not divide": (step, "_share", lambda loss, *_: loss, {"accumulation", "tail", "gradient"}, {}),
    "forgets the epoch": (order, "epoch_order", lambda seed, _, *rest: TRUE.order(seed, 0, *rest), {"order"}, {}),
    "repeats samples": (order, "epoch_order", lambda *given: TRUE.order(*given) // 2 * 2, {"order"}, {}),
    "varies without the epoch": (
        *(memory, "draw", lambda augment, seed, epoch, ids: TRUE.draw(augment, seed, 0, ids)),
        *({"samples"}, {"data.augment.crop": "pad"}),
    ),
    "weighs the tail as if it were whole": (
        *(step, "_share", lambda loss, batch, averages_over: loss * batch.weight * averages_over / 16),
        *({"tail"}, {}),
    ),
    "drops the tail": (order, "Epochs", SimpleNamespace(cut=without_the_tail), {"tail", "order"}, {}),
    "scales the rate by the micro-batches": (LearningRate, "of", scaled_rate, {"learning-rate"}, {}),
    "drops the same at every step": (step, "seed_forward", lambda *_: torch.manual_seed(0), {"dropout"}, {}),
    "does not update the average": (Average, "update", lambda self, number: None, {"moving-average"}, {}),
    "updates it for each micro-batch": (Average, "update", average_of_each_micro_batch, {"moving-average"}, {}),
    "averages the weights before the step": (step, "_update", average_before_the_step, {"moving-average"}, {}),
    "takes a mean of means": (Accumulator, "results", mean_of_means, {"metric"}, {}),
    "counts padded samples": (Accumulator, "add", padded_scores, {"metric"}, {}),
    "scores samples twice": (image_pipeline, "evaluation_slices", padded_slices, {"metric"}, {}),
    "does not go back to training": (*(evaluate, "evaluation_mode", for_good, {"training-mode"}), RESIDUAL),
}
THOROUGH: dict[str, tuple[Any, str, Any, set[str], dict[str, Any]]] = {
    "depends on the micro-batch": (
        *(memory.MemoryBackend, "_inputs", lambda self, starts, *rest: TRUE.inputs(self, starts, *rest) + len(starts)),
        *({"samples"}, {}),
    ),
    "weighs parts of a tail alike": (
        *(step, "_share", lambda loss, batch, over: loss * over / (1 if batch.weight in (16, 9) else 4)),
        *({"tail"}, {}),
    ),
    "scales the rate at the optimizer": (
        *(step, "apply_settings", doubled_rate, {"learning-rate"}),
        {"optimizer.lr_scaling": "sqrt", "optimizer.lr_reference_batch": 64},
    ),
}
MORE_FAIL = ("drops", "depends", "does not go back")
# What is said of it, where that is more than its name.
SAID = {
    "does not divide": ("accumulation", "4 times the expected gradient"),
    "forgets the epoch": ("order", "both epochs have the same order"),
    "repeats samples": ("order", "20 samples are missing and 20 are too many"),
    "weighs the tail as if it were whole": ("tail", "step 3: 0.562 times the expected gradient"),
    "drops the tail": ("tail", "step 3 took 16 samples instead of 9"),
    "scales the rate by the micro-batches": ("learning-rate", "4 times"),
    "takes a mean of means": ("metric", "sample by sample"),
    "counts padded samples": ("metric", "samples were counted"),
    "does not go back to training": ("training-mode", "step 4: the network was not in its training mode"),
}


@pytest.mark.parametrize("case", [*TRAINERS, *(pytest.param(case, marks=pytest.mark.thorough) for case in THOROUGH)])
def test_a_trainer_that(case: str, proof: Proof, failed: Failed, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, replacement, expected, requested = (TRAINERS | THOROUGH)[case]
    monkeypatch.setattr(where, name, replacement)
    networks = {key: requested[key] for key in requested if key == "make_network"}
    checks = proof(overrides={key: each for key, each in requested.items() if key not in networks}, **networks)
    assert failed(checks) >= expected
    assert failed(checks) == expected or case.startswith(MORE_FAIL)
    check, words = SAID.get(case, ("run", ""))
    assert words in checks[check].found


@pytest.mark.thorough
def test_the_same_is_found_where_one_batch_cannot_be_compared_with_its_parts(
    proof: Proof, failed: Failed, monkeypatch: pytest.MonkeyPatch, perceptron: type[nn.Module]
) -> None:
    class Noisy(perceptron):  # type: ignore[misc,valid-type]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + 0.1 * torch.randn_like(x) * self.training)

    monkeypatch.setattr(step, "_share", lambda loss, batch, averages_over: loss)
    assert failed(proof(make_network=Noisy)) == {"tail", "gradient"}


# Tasks of one's own


def test_a_task_that_divides_by_the_micro_batches_itself(proof: Proof, failed: Failed, tiny_task: Any) -> None:
    def divided(recipe: Any) -> Any:
        parts = recipe.batch.global_size // recipe.batch.micro_size
        return tiny_task(on_loss=lambda _, loss: loss / parts)(recipe)

    checks = proof(task=divided, overrides=ACCUMULATED)
    assert failed(checks) == {"accumulation", "tail"}
    assert "micro-batches, step 1: 0.25 times the expected gradient" in checks["accumulation"].found


@pytest.mark.thorough
def test_a_loss_divided_by_the_size_that_micro_batches_should_have(
    proof: Proof, failed: Failed, tiny_task: Any
) -> None:
    def make(recipe: Any) -> Any:
        return tiny_task(on_loss=lambda batch, loss: loss * len(batch.ids) / recipe.batch.micro_size)(recipe)

    assert failed(proof(task=make, overrides=ACCUMULATED)) == {"tail"}


@pytest.mark.parametrize("which", ["every score", "one score"])
def test_scores_that_are_means_of_batches(proof: Proof, failed: Failed, which: str) -> None:
    def score(model: Any, batch: Batch, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        names = values if which == "every score" else ("top1_accuracy",)
        return {**values, **{name: values[name].double().mean()[None] for name in names}}

    checks = proof(on_score=score)
    assert failed(checks) == {"metric"}
    assert which == "every score" or "top1_accuracy is" in checks["metric"].found


def test_a_task_that_looks_at_its_accuracy_and_does_not_go_back(proof: Proof, failed: Failed, tiny_task: Any) -> None:
    def make(recipe: Any) -> Any:
        task = tiny_task(make_network=residual)(recipe)
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


# Pipelines of one's own


class FirstEpoch(StepGeometry):
    """Slices of the first epoch, whatever the step."""

    def slices(self, step: int, world: Any) -> Any:
        parts = super().slices(step % self.epochs.phases[0].steps_per_epoch, world)
        return [dataclasses.replace(part, step=step) for part in parts]


def without_the_epoch(true: Any, geometry: Any, *given: Any) -> Iterator[Batch]:
    forgetful = FirstEpoch(**{each.name: getattr(geometry, each.name) for each in dataclasses.fields(geometry)})
    found: Iterator[Batch] = true(forgetful, *given)
    return found


def whole_only(true: Any, geometry: Any, *given: Any) -> Iterator[Batch]:
    size = geometry.global_batch_size // geometry.logical_ranks
    return (each for each in true(geometry, *given) if len(each.ids) == size)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("stream", "expected"), [(without_the_epoch, {"order"}), (whole_only, {"tail", "order", "run"})]
)
def test_a_pipeline_of_ones_own(proof: Proof, failed: Failed, tiny_task: Any, stream: Any, expected: set[str]) -> None:
    def make(recipe: Any) -> Any:
        task = tiny_task()(recipe)
        opened = task.open_pipeline

        def open_pipeline(placement: Any) -> Any:
            pipeline = opened(placement)
            pipeline.train_batches = partial(stream, pipeline.train_batches)
            return pipeline

        task.open_pipeline = open_pipeline
        return task

    checks = proof(task=make)
    assert failed(checks) >= expected
    if stream is whole_only:
        assert "step 3 took 0 samples instead of 9" in checks["tail"].found
        assert "StopIteration" in checks["run"].found
    else:
        assert failed(checks) == expected


# Networks of one's own


def with_part(network: nn.Module, name: str, part: Any) -> nn.Module:
    setattr(network, name, part)
    return network


# How each is made of the usual one, which checks fail, and what one of them says.
NETWORKS: dict[str, tuple[Callable[[Any], nn.Module], set[str], str]] = {
    "has a part without use": (
        lambda usual: with_part(usual(), "projection", nn.Linear(3, 3)),
        *({"parameters"}, "without a gradient: projection.weight, projection.bias"),
    ),
    "ignores the dropout it is asked for": (
        lambda usual: usual(0.0),
        *({"dropout"}, "model.options.dropout has no effect"),
    ),
    "has a probability that nothing reads": (
        lambda usual: with_part(usual(0.0), "dropout", 0.3),
        *({"dropout"}, "without effect: dropout"),
    ),
    "has its dropout in evaluation mode": (
        lambda usual: with_part(usual(), "drop", nn.Dropout(0.2).eval()),
        *({"dropout"}, "in evaluation mode: drop"),
    ),
    "comes in evaluation mode": (
        lambda usual: usual().eval(),
        *({"dropout", "training-mode"}, "step 1: the network was not"),
    ),
}


@pytest.mark.parametrize("case", NETWORKS)
def test_a_network_that(case: str, proof: Proof, failed: Failed, perceptron: type[nn.Module]) -> None:
    make, expected, words = NETWORKS[case]
    requested = {"model.options": "{dropout: 0.3}"} if "asked for" in case else {}
    checks = proof(make_network=lambda: make(perceptron), overrides=requested)
    assert failed(checks) == expected
    assert words in checks[max(expected)].found


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
