"""Faults that keep a run from learning, each planted in a run that learns without it: which is named first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.learning.networks import Perceptron, Pixels, Sequences, digits, partly_wrong, sentences, shuffled
from torch import Tensor, nn

import paceline
from paceline.errors import TrainingError
from paceline.learning.judge import Judgement, judge_run
from paceline.records.run_directory import RunDirectory

QUIET = {"parallel.device": "cpu", "parallel.threads": 1, "telemetry.report": False, "telemetry.trackers": []}
Plant = Callable[["Runner"], None]
FAULTS: list[Any] = []


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


class Runner:
    """Trains in a directory."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    def fit(self, model: Any = None, train: Any = None, held_out: Any = None, **given: Any) -> None:
        """Train a network on digits."""
        arguments: dict[str, Any] = {"loss": F.cross_entropy, "epochs": 4, "batch_size": 32, "seed": 1} | given
        arguments["overrides"] = QUIET | arguments.get("overrides", {})
        paceline.fit(
            model or Perceptron(),
            train or digits()[0],
            held_out or digits()[1],
            run_dir=self.run_dir,
            **arguments,
            quiet=True,
        )

    def recipe(self, name: str, **overrides: Any) -> None:
        """Train a recipe; a name's double underscores are dots."""
        values = {key.replace("__", "."): value for key, value in overrides.items()}
        paceline.train(name, overrides=QUIET | values, run_dir=self.run_dir, quiet=True)

    @property
    def judgement(self) -> Judgement:
        """What the run's records say."""
        return judge_run(RunDirectory(self.run_dir))


def fault(name: str, *marks: Any) -> Callable[[Plant], Plant]:
    """Register a fault, with the finding that names it."""

    def register(plant: Plant) -> Plant:
        FAULTS.append(pytest.param(plant, name, id=plant.__name__, marks=marks))
        return plant

    return register


def numbers(*, scale: float = 1.0, offset: float = 0.0) -> Any:
    """Inputs, and a number for each that follows from them; training and held-out samples."""
    direction = torch.linspace(-1, 1, 64) / 8
    return [(x, (scale * (x @ direction) + offset)[:, None]) for x, _ in digits()]


def answers() -> Any:
    """Inputs, and for each whether it shows a 3."""
    return [(x, (y == 3).float()[:, None]) for x, y in digits()]


everyday = pytest.mark.everyday


# Labels


@fault("labels_unrelated", everyday)
def shuffled_labels(run: Runner) -> None:
    (x, y), (held_x, held_y) = digits()
    run.fit(train=(x, shuffled(y)), held_out=(held_x, shuffled(held_y)))


@fault("labels_unrelated")
def memorised_labels(run: Runner) -> None:
    x, y = digits()[0]
    run.fit(train=(x, shuffled(y)), epochs=15)


@fault("labels_unrelated")
def shuffled_numbers(run: Runner) -> None:
    train, held_out = [(x, shuffled(y)) for x, y in numbers()]
    run.fit(Perceptron(1), train, held_out, loss=F.mse_loss)


@fault("labels_unrelated")
def shuffled_answers(run: Runner) -> None:
    train, held_out = [(x, shuffled(y)) for x, y in answers()]
    run.fit(Perceptron(1), train, held_out, loss=F.binary_cross_entropy_with_logits)


@fault("labels_partly_wrong")
def two_fifths_wrong(run: Runner) -> None:
    (x, y), (held_x, held_y) = digits()
    run.fit(train=(x, partly_wrong(y, 0.4)), held_out=(held_x, partly_wrong(held_y, 0.4, 3)), epochs=8)


@fault("labels_partly_wrong")
def a_third_wrong(run: Runner) -> None:
    (x, y), (held_x, held_y) = digits()
    run.fit(None, (x, partly_wrong(y, 0.3)), (held_x, partly_wrong(held_y, 0.3, 3)), epochs=8)


@fault("classes_permuted")
def other_class_order(run: Runner) -> None:
    x, y = digits()[1]
    run.fit(held_out=(x, (y + 3) % 10))


@fault("classes_permuted")
def reversed_class_order(run: Runner) -> None:
    x, y = digits()[1]
    run.fit(Pixels(), held_out=(x, 9 - y))


# Learning rates


@fault("rate_too_low", everyday)
def low_rate(run: Runner) -> None:
    run.fit(overrides={"optimizer.lr": 1e-7})


@fault("rate_too_low")
def low_rate_of_adam(run: Runner) -> None:
    run.fit(optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-9))


@fault("rate_too_low")
def low_rate_of_numbers(run: Runner) -> None:
    train, held_out = numbers()
    run.fit(Perceptron(1), train, held_out, loss=F.mse_loss, overrides={"optimizer.lr": 1e-8})


@fault("rate_too_low")
def low_rate_of_the_recipe(run: Runner) -> None:
    run.recipe("digits", train__duration="2 epochs", optimizer__lr=1e-7)


@fault("rate_too_low")
def low_rate_of_clicks(run: Runner) -> None:
    run.recipe("dlrm-synthetic", train__duration="100 steps", optimizer__lr=1e-9)


@fault("rate_too_low")
def low_rate_of_several_labels(run: Runner) -> None:
    run.recipe("figures", train__duration="60 steps", optimizer__lr=1e-9)


@fault("rate_too_low")
def low_rate_of_masks(run: Runner) -> None:
    run.recipe("shapes-segmentation", train__duration="60 steps", optimizer__lr=1e-9)


@fault("rate_too_low")
def low_rate_of_sequences(run: Runner) -> None:
    train, held_out = sentences()
    run.fit(Sequences(256), train, held_out, overrides={"optimizer.lr": 1e-9})


@fault("rate_too_low")
def low_rate_of_boxes(run: Runner) -> None:
    run.recipe("shapes-maskrcnn", train__duration="8 steps", optimizer__lr=1e-9, telemetry__log_every="1 steps")


@fault("rate_too_low")
def low_rate_of_texts(run: Runner) -> None:
    run.recipe("docs-topics", train__duration="30 steps", optimizer__lr=1e-9)


@fault("rate_too_low")
def low_rate_of_a_language_model(run: Runner) -> None:
    run.recipe("gpt-small-docs", train__duration="30 steps", optimizer__lr=1e-9)


@fault("rate_too_high")
def high_rate(run: Runner) -> None:
    run.fit(Perceptron(normed=False), overrides={"optimizer.lr": 30.0})


@fault("rate_too_high")
def high_rate_of_adam(run: Runner) -> None:
    run.fit(optimizer=lambda parameters: torch.optim.Adam(parameters, 3.0))


@fault("rate_too_high")
def high_rate_of_the_recipe(run: Runner) -> None:
    with pytest.raises(TrainingError):
        run.recipe("digits", train__duration="4 epochs", optimizer__lr=100.0)


@fault("rate_too_high")
def high_rate_of_masks(run: Runner) -> None:
    run.recipe("shapes-segmentation", train__duration="60 steps", optimizer__lr=100.0)


@fault("rate_too_high")
def high_rate_of_clicks(run: Runner) -> None:
    run.recipe("dlrm-synthetic", train__duration="100 steps", optimizer__lr=1000.0)


@fault("rate_too_high")
def high_rate_of_numbers(run: Runner) -> None:
    train, held_out = numbers()
    run.fit(Perceptron(1), train, held_out, loss=F.l1_loss, overrides={"optimizer.lr": 100.0})


@fault("rate_too_high")
def high_rate_of_sequences(run: Runner) -> None:
    train, held_out = sentences()
    run.fit(Sequences(256), train, held_out, optimizer=lambda parameters: torch.optim.Adam(parameters, 3.0))


# Losses


@fault("softmax_twice", everyday)
def softmax_twice(run: Runner) -> None:
    run.fit(Perceptron(end=nn.Softmax(dim=1)))


@fault("softmax_twice")
def softmax_twice_in_a_slow_run(run: Runner) -> None:
    run.fit(Perceptron(end=nn.Softmax(dim=1)), overrides={"optimizer.lr": 0.001})


@fault("softmax_twice")
def sigmoid_twice(run: Runner) -> None:
    train, held_out = answers()
    run.fit(Perceptron(1, end=torch.sigmoid), train, held_out, loss=F.binary_cross_entropy_with_logits)


@fault("not_log_probabilities")
def no_logarithm(run: Runner) -> None:
    run.fit(loss=F.nll_loss)


@fault("answers_limited")
def numbers_behind_a_relu(run: Runner) -> None:
    train, held_out = numbers(scale=2)
    run.fit(Perceptron(1, end=F.relu), train, held_out, loss=F.mse_loss)


@fault("answers_limited")
def numbers_behind_a_tanh(run: Runner) -> None:
    train, held_out = numbers(scale=16)
    run.fit(Perceptron(1, end=torch.tanh), train, held_out, loss=F.mse_loss)


@fault("answers_limited")
def numbers_behind_a_sigmoid(run: Runner) -> None:
    train, held_out = numbers(scale=2)
    run.fit(Perceptron(1, end=torch.sigmoid), train, held_out, loss=F.mse_loss)


@fault("zero_gradients", everyday)
def loss_of_the_chosen_class(run: Runner) -> None:
    run.fit(loss=lambda outputs, targets: F.mse_loss(0 * outputs.sum(1) + outputs.argmax(1), targets.float()))


@fault("loss_ignores_targets", everyday)
def loss_without_targets(run: Runner) -> None:
    run.fit(loss=lambda outputs, _: outputs.square().mean())


@fault("loss_rises", everyday)
def negated_loss(run: Runner) -> None:
    run.fit(loss=lambda outputs, targets: -F.cross_entropy(outputs, targets))


@fault("loss_rises")
def maximised_loss(run: Runner) -> None:
    run.fit(optimizer=lambda parameters: torch.optim.SGD(parameters, 0.01, maximize=True))


def _squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


@fault("labels_unrelated")
def shuffled_numbers_of_an_own_loss(run: Runner) -> None:
    train, held_out = [(x, shuffled(y)) for x, y in numbers()]
    run.fit(Perceptron(1), train, held_out, loss=_squared_error)


@fault("rate_too_low")
def low_rate_of_an_own_loss(run: Runner) -> None:
    train, held_out = numbers()
    run.fit(Perceptron(1), train, held_out, loss=_squared_error, overrides={"optimizer.lr": 1e-8})


@fault("called_twice")
def called_twice(run: Runner) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        assert model(x).argmax(1).shape == y.shape
        return F.cross_entropy(model(x), y)

    run.fit(Pixels(), loss=loss)


# Modes, frozen and unused parts


class _InEvaluation(Pixels):
    def forward(self, x: Tensor) -> Tensor:
        self.norm.eval()
        self.other_norm.eval()
        return super().forward(x)


@fault("evaluation_mode")
def norm_left_in_evaluation(run: Runner) -> None:
    run.fit(_InEvaluation())


class _WithoutDropout(Perceptron):
    def forward(self, x: Tensor) -> Tensor:
        self.drop.eval()
        return super().forward(x)


@fault("evaluation_mode")
def dropout_left_in_evaluation(run: Runner) -> None:
    run.fit(_WithoutDropout(dropout=0.3))


@fault("frozen_at_random")
def frozen_body(run: Runner) -> None:
    run.recipe("digits", train__duration="4 epochs", model__frozen=["stem.*", "stages.*"])


class _Detached(Perceptron):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            hidden = F.relu(self.norm(self.first(x)))
        answer: Tensor = self.head(F.relu(self.second(hidden)))
        return answer


@fault("without_gradient")
def detached_layer(run: Runner) -> None:
    run.fit(_Detached(), overrides={"parallel.unused_parameters": "allow"})


@fault("never_updated")
def optimizer_of_the_head_alone(run: Runner) -> None:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        groups = [{"params": parameters[-2:], "lr": 0.1}, {"params": parameters[:-2], "lr": 0.0}]
        return torch.optim.SGD(groups, lr=0.1)

    run.fit(optimizer=optimizer)


class _Biases(Perceptron):
    def __init__(self) -> None:
        super().__init__(normed=False)
        for name, each in self.named_parameters():
            each.requires_grad = name.endswith("bias")


@fault("frozen_at_random")
def biases_alone_are_trained(run: Runner) -> None:
    run.fit(_Biases())


class _Zeros(Perceptron):
    def __init__(self) -> None:
        super().__init__(normed=False)
        for each in self.parameters():
            nn.init.zeros_(each)


@fault("zero_weights", everyday)
def network_of_zeros(run: Runner) -> None:
    run.fit(_Zeros())


@fault("clipped")
def clipped_to_nothing(run: Runner) -> None:
    run.recipe("digits", train__duration="4 epochs", optimizer__clip_norm=1e-6)


@fault("weight_decay")
def large_decay_of_the_recipe(run: Runner) -> None:
    run.recipe("digits", train__duration="3 epochs", optimizer__weight_decay=10)


@fault("weight_decay")
def large_decay_of_an_own_optimizer(run: Runner) -> None:
    run.fit(optimizer=lambda parameters: torch.optim.SGD(parameters, 0.05, weight_decay=10))


@fault("dropout")
def high_dropout(run: Runner) -> None:
    run.fit(Perceptron(dropout=0.95))


# Inputs and targets


@fault("input_scale")
def large_inputs(run: Runner) -> None:
    train, held_out = [(1000 * x + 5000, y) for x, y in digits()]
    run.fit(Perceptron(normed=False), train, held_out)


@fault("input_scale")
def tiny_inputs(run: Runner) -> None:
    train, held_out = [(1e-4 * x, y) for x, y in digits()]
    run.fit(Perceptron(normed=False), train, held_out)


@fault("inputs_differ", everyday)
def held_out_inputs_not_normalised(run: Runner) -> None:
    x, y = digits()[1]
    run.fit(held_out=(40 * x + 128, y))


@fault("inputs_differ")
def training_inputs_not_normalised(run: Runner) -> None:
    x, y = digits()[0]
    run.fit(Pixels(), (6 * x + 4, y))


@fault("constant_inputs")
def the_same_input(run: Runner) -> None:
    train, held_out = [(torch.ones_like(x), y) for x, y in digits()]
    run.fit(train=train, held_out=held_out)


@fault("classes_disjoint", everyday)
def other_classes_held_out(run: Runner) -> None:
    (x, y), (held_x, held_y) = digits()
    run.fit(train=(x[y < 5], y[y < 5]), held_out=(held_x[held_y >= 5], held_y[held_y >= 5]))


@fault("constant_targets", everyday)
def one_class(run: Runner) -> None:
    run.fit(None, *[(x, torch.full_like(y, 3)) for x, y in digits()])


@fault("constant_targets")
def no_answer_is_true(run: Runner) -> None:
    train, held_out = [(x, torch.zeros_like(y)) for x, y in answers()]
    run.fit(Perceptron(1), train, held_out, loss=F.binary_cross_entropy_with_logits)


@fault("target_scale")
def large_targets_that_are_followed_slowly(run: Runner) -> None:
    train, held_out = numbers(scale=10_000)
    run.fit(Perceptron(1), train, held_out, loss=F.mse_loss)


@fault("target_scale")
def large_targets(run: Runner) -> None:
    train, held_out = numbers(scale=2000, offset=5000)
    run.fit(Perceptron(1, normed=False), train, held_out, loss=F.l1_loss)


# Networks


class _Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Sigmoid()) for _ in range(14)))
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.head(self.layers(x))
        return answer


@fault("vanishing")
def deep_network_of_sigmoids(run: Runner) -> None:
    run.fit(_Deep())


class _Dead(Perceptron):
    def __init__(self) -> None:
        super().__init__(normed=False)
        nn.init.constant_(self.second.bias, -100.0)


@fault("dead_units")
def dead_layer(run: Runner) -> None:
    run.fit(_Dead())


class _Ignoring(Perceptron):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(0 * x)


@fault("data_leak")
def held_out_samples_in_training(run: Runner) -> None:
    (x, y), (held_x, held_y) = digits()
    run.fit(None, (torch.cat([x, held_x[:80]]), torch.cat([y, held_y[:80]])))


@fault("data_leak", everyday)
def trained_and_scored_on_the_same(run: Runner) -> None:
    run.fit(None, digits()[0], digits()[0])


@fault("data_leak")
def the_same_sentences(run: Runner) -> None:
    train, held_out = sentences()
    run.fit(Sequences(256), tuple(map(torch.cat, zip(train, held_out, strict=True))), held_out)


@fault("constant_answers")
def input_not_used(run: Runner) -> None:
    run.fit(_Ignoring(normed=False))


@pytest.mark.parametrize(("plant", "name"), FAULTS)
def test_a_planted_fault_is_named_first(plant: Plant, name: str, tmp_path: Path) -> None:
    run = Runner(tmp_path / "run")
    plant(run)
    judgement = run.judgement
    assert [each.name for each in judgement.findings][:1] == [name], str(judgement)
    assert judgement.findings[0].evidence in str(judgement)
    assert judgement.findings[0].fix in str(judgement)
    assert str(judgement).count("by guessing") <= 1
