"""Your own task: computed as written, checked before the first step, and resumed from Python."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from golden_sentences import raises
from torch import Tensor, nn

import paceline
from paceline.checkpoint.weights import read_weights
from paceline.data.pipeline import Pipeline, Placement, SimplePipeline
from paceline.data.shard_order import ShardSizes
from paceline.distributed.local_launch import report_error
from paceline.errors import ModelError, PacelineError, RecipeError, RunDirectoryError
from paceline.host.world import World
from paceline.metrics.accumulator import Metric
from paceline.models.precision import in_float32
from paceline.plan import DataFacts, MachineFacts
from paceline.recipe.load import load_recipe
from paceline.recipe.unused import all_but
from paceline.records.run_directory import RunDirectory
from paceline.reports.audit import audit_run
from paceline.tasks.image_classification import ImageClassification
from paceline.trainer.subject import Subject
from paceline.trainer.train import TrainResult

X = torch.randn(48, 6, generator=torch.Generator().manual_seed(0))
Y = 290 + X @ torch.linspace(-0.25, 0.25, 6)
SHORT = {
    "train.duration": "3 steps",
    "batch.global_size": 16,
    "optimizer.lr": 0.01,
    "evaluate.every": "1 steps",
    "parallel.device": "cpu",
    "parallel.threads": 1,
    "telemetry.report": False,
    "telemetry.trackers": [],
}


class Net(nn.Module):
    """A norm and dropout, which a pass could disturb; the answer is about 290."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(0.1), nn.Linear(6, 1))
        nn.init.constant_(self.layers[2].bias, 290.0)
        self.shape: Callable[[Tensor], Any] = lambda answer: answer

    def forward(self, x: Tensor) -> Any:
        return self.shape(self.layers(x).flatten())


class Kelvin(paceline.Task):
    metrics: Any = (Metric(name="loss"), Metric(name="mae", of="error"))
    headline = "mae"

    def data_facts(self, world: World) -> Any:
        return DataFacts(train_samples=32, evaluation_samples=16, unused=all_but([], "made here"))

    def open_pipeline(self, placement: Placement) -> Pipeline:
        return SimplePipeline(self.read, evaluation_samples=16, placement=placement)

    def read(self, part: Any, training: bool) -> tuple[Tensor, Tensor]:
        ids = torch.tensor(part.ids) + (0 if training else 32)
        return X[ids], Y[ids]

    def build_model(self) -> Any:
        return Net()

    def loss(self, model: Any, batch: Any) -> Any:
        return F.mse_loss(model(batch.inputs), batch.targets)

    def score(self, model: Any, batch: Any) -> Any:
        error = model(batch.inputs) - batch.targets
        return {"loss": error.square(), "error": error.abs()}


def run(task: Any, run_dir: Path, **changes: Any) -> TrainResult:
    overrides = SHORT | {key.replace("__", "."): value for key, value in changes.items()}
    return paceline.train(task=task, overrides=overrides, run_dir=run_dir, quiet=True)


# --------------------------------------------------------------------------------------------------------------- shards


class InFiles(Kelvin):
    files = (20, 12)

    def sample_shards(self) -> ShardSizes:
        return ShardSizes(sizes=np.array(self.files), window=1)


class TooMany(InFiles):
    files = (20, 13)


class Drawn(InFiles):
    def data_facts(self, world: World) -> DataFacts:
        return DataFacts(train_samples=32, evaluation_samples=16, unused=all_but(["data.sampling"], "made here"))

    def description(self) -> dict[str, Any]:
        return {"class_names": ["a", "b"]}

    def sample_classes(self) -> Any:
        return np.arange(32) % 2


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (TooMany, r"TooMany\.sample_shards\(\) has 33 samples, and data_facts\(\) 32; give both the same"),
        (
            Drawn,
            "data.sampling and data.mixture draw samples in any order, but .*Drawn reads them a few files at a time",
        ),
    ],
)
def test_shards_that_would_change_what_is_asked_are_refused(task: Any, said: str) -> None:
    recipe = load_recipe("digits", {"data.sampling": "balanced"} if task is Drawn else {}).recipe
    with pytest.raises(PacelineError, match=said):
        Subject.open(recipe, World(), "plan", task=task(recipe), machine=machine())


def test_shards_of_your_own_task_are_read_a_few_at_a_time(runs: Path) -> None:
    result = run(InFiles, runs / "files")
    assert RunDirectory(result.run_dir).shard_sizes.is_file()
    assert audit_run(result.run_dir).passed


# ------------------------------------------------------------------------------------------------------------ precision


def machine() -> MachineFacts:
    return MachineFacts(device="cpu", device_name="CPU", fast_bf16=True, cores=2, reasons={"fast_bf16": "it has AMX"})


def test_auto_is_fp32_for_your_own_task_and_says_why() -> None:
    assert not ImageClassification.is_own
    for task, precision in ((Kelvin, "fp32"), (ImageClassification, "bf16")):
        recipe = load_recipe("digits", {"train.precision": "auto"}).recipe
        plan = Subject.open(recipe, World(), "plan", task=task(recipe), machine=machine()).plan
        assert plan.precision == precision
        assert ("Kelvin is your own code" in plan.reasons["train.precision"]) == (precision == "fp32")
    recipe = load_recipe("digits", {"train.precision": "bf16"}).recipe
    assert Subject.open(recipe, World(), "plan", task=Kelvin(recipe), machine=machine()).plan.precision == "bf16"


class Pair(NamedTuple):
    first: Tensor
    count: int


@dataclass(frozen=True)
class Output:
    first: Tensor
    rest: dict[str, Any]


def test_what_a_network_returns_is_converted_in_any_structure() -> None:
    half, ids = torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.int64)
    double = torch.ones(2, dtype=torch.float64)
    found = in_float32([half, (ids, double), {"a": [half.half()]}, Pair(half, 3), Output(half, {"b": (half,)}), None])
    assert isinstance(found[3], Pair)
    dtypes = [found[0], *found[1], found[2]["a"][0], found[3].first, found[4].first, found[4].rest["b"][0]]
    single = torch.float32
    assert [each.dtype for each in dtypes] == [single, torch.int64, torch.float64, single, single, single, single]


@pytest.mark.thorough
def test_outputs_of_transformers_are_converted() -> None:
    from transformers.modeling_outputs import SequenceClassifierOutput

    half = torch.ones(2, dtype=torch.bfloat16)
    output = in_float32(SequenceClassifierOutput(logits=half, hidden_states=(half,)))
    assert (output.logits.dtype, output["hidden_states"][0].dtype) == (torch.float32, torch.float32)


def test_only_the_forward_pass_is_under_autocast(runs: Path) -> None:
    seen: set[tuple[str, Any]] = set()

    class Watched(Kelvin):
        def build_model(self) -> Any:
            network = Net()
            network.shape = lambda answer: seen.add(("network", answer.dtype)) or Output(answer, {})  # type: ignore[func-returns-value]
            return network

        def note(self, where: str, model: Any, batch: Any) -> Tensor:
            answer: Tensor = model(batch.inputs).first
            seen.add((where, (answer.dtype, torch.is_autocast_enabled("cpu"), (answer[:, None] @ X[:1, :1]).dtype)))
            return answer

        def loss(self, model: Any, batch: Any) -> Tensor:
            return F.mse_loss(self.note("loss", model, batch), batch.targets)

        def score(self, model: Any, batch: Any) -> dict[str, Tensor]:
            error = self.note("score", model, batch) - batch.targets
            return {"loss": error.square(), "error": error.abs()}

        def figures(self, model: Any) -> list[Any]:
            assert model(X[:2]).first.dtype == torch.float32
            return []

    result = run(Watched, runs / "run", train__precision="bf16")
    plain = (torch.float32, False, torch.float32)
    assert seen - {("network", torch.bfloat16)} == {("loss", plain), ("score", plain)}
    network = Net()
    network.load_state_dict(read_weights(result.run_dir, "model").state)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        answer = network.eval()(X[32:])
    assert result.metrics["mae"] == pytest.approx((answer.float() - Y[32:]).abs().mean().item(), rel=1e-6)


# ------------------------------------------------------------------------------------------------------------- mistakes


class Collects:
    def __init__(self, key: str = "error", name: str = "worst") -> None:
        self.key, self.name, self.found = key, name, [0.0]

    def add(self, values: Any, ids: Any) -> None:
        self.found += values[self.key].tolist()

    def part(self) -> float:
        return max(self.found)

    def results(self, parts: Any) -> dict[str, float]:
        return {self.name: max(parts)}


WORST = (Metric(name="loss"), Metric(name="worst", is_collected=True))
COLLECTS = {"metrics": WORST, "headline": "loss"}
MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "a loss in a tuple": (
        {"loss": lambda *_: (torch.zeros(()), 1)},
        r"Mine\.loss returned a value of type tuple, but it must be the micro-batch's mean loss",
    ),
    "a loss of each sample": ({"loss": lambda _, m, b: m(b.inputs)}, r"loss returned a tensor of shape \[16\]"),
    "a loss without a gradient": (
        {"loss": lambda _, m, b: m(b.inputs).detach().mean()},
        "but it must be one with a gradient",
    ),
    "scores in a tuple": ({"score": lambda _, m, b: (m(b.inputs),)}, r"score returned .* tuple, but it must be a dict"),
    "another key": (
        {"score": lambda _, m, b: {"loss": m(b.inputs), "eror": m(b.inputs)}},
        r"Mine\.score returned 'loss', 'eror', but the metrics need 'error'; correct one\. Did you mean 'eror'\?",
    ),
    "a mean": (
        {"score": lambda _, m, b: {"loss": m(b.inputs), "error": m(b.inputs).mean()}},
        r"Mine\.score\['error'\] is a tensor of shape \[\] .* a tensor of 16 numbers here",
    ),
    "a list": ({"score": lambda _, m, b: {"loss": m(b.inputs).tolist(), "error": 1}}, r"score\['loss'\] is .* list"),
    "an error in score": (
        {"score": lambda _, m, b: m.fc(b.inputs)},
        r"Mine\.score failed with AttributeError: .*'fc' \(test_own_code\.py, line \d+\); correct it",
    ),
    "a collector's key": (
        COLLECTS | {"collectors": lambda _: (Collects("eror"),)},
        r"Collects\.add failed with KeyError",
    ),
    "a collector's name": (
        COLLECTS | {"collectors": lambda _: (Collects(name="wrost"),)},
        r"collectors give 'wrost', but the metrics have 'worst'; correct one\. Did you mean 'wrost'",
    ),
    "metrics that are not a tuple": ({"metrics": Metric(name="loss")}, r"Mine\.metrics is a value of type Metric"),
    "a headline": (
        {"headline": "mea"},
        r"metrics are 'loss', 'mae', but its headline is 'mea'; .* mean 'mae'",
    ),
    "no facts": (
        {"data_facts": lambda *_: 32},
        r"data_facts returned a value of type int, .* a paceline\.plan\.DataFacts",
    ),
    "a number of samples": (
        {"data_facts": lambda *_: DataFacts(train_samples=32.0, evaluation_samples=16)},  # type: ignore[arg-type]
        r"data_facts\(\)\.train_samples is a value of type float, .* a whole number",
    ),
    "no pipeline": ({"open_pipeline": lambda *_: None}, r"open_pipeline returned .* NoneType, .* a pipeline"),
    "no pair": ({"read": lambda *_: X}, r"read returned a Tensor, but must return inputs and targets"),
    "three parts": ({"read": lambda *_: (X, X, X)}, r"read returned 3 parts"),
    "a metric twice": ({"metrics": (Metric(name="loss"),) * 2, "headline": "loss"}, r"metrics has two .* 'loss'"),
    "several numbers per sample": (
        {"score": lambda _, m, b: {"loss": m(b.inputs), "error": b.inputs}},
        r"score\['error'\] is a tensor of shape \[16, \d+\]",
    ),
    "targets spread in the loss": (
        {"loss": lambda _, m, b: (m(b.inputs)[:, None].exp().log() - b.targets).square().mean()},
        r"Mine\.loss: sub of an answer and the targets, of shapes \[16, 1\] and \[16\], would compare each sample with",
    ),
    "targets spread in torch's loss": (
        {"loss": lambda _, m, b: F.l1_loss(m(b.inputs)[:, None], b.targets)},
        r"Mine\.loss: l1_loss of an answer",
    ),
    "targets spread in the score": (
        {"score": lambda _, m, b: {"error": (b.targets - m(b.inputs)[:, None]).abs().mean(1), "loss": b.targets}},
        r"Mine\.score: sub of an answer and the targets, of shapes \[16\] and \[16, 1\]",
    ),
    "no network": ({"build_model": lambda _: None}, r"build_model returned .* NoneType, .* a torch\.nn\.Module"),
    "another trainer's method": (
        {"training_step": lambda *_: 0},
        r"Mine\.training_step is never called: here it is loss\. Move or rename it\.",
    ),
    "another trainer's option": (
        {"loss": lambda task, *_: task.log("a", 1.0, prog_bar=True)},
        r"log\('a'\) takes a name and a value, and no prog_bar",
    ),
    "an __init__": ({"__init__": lambda *_: None}, r"must call super\(\).__init__\(recipe\)"),
}


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.everyday
def test_a_mistake_is_one_sentence_before_the_first_step(name: str, runs: Path) -> None:
    body, said = MISTAKES[name]
    task = type("Mine", (Kelvin,), body)
    with pytest.raises(PacelineError, match=said) as caught:
        run(task, runs / "run")
    assert isinstance(caught.value, ModelError | RecipeError)
    assert not [each for each in (runs / "run").glob("checkpoints/*") if each.is_dir()]
    assert "\n" not in str(caught.value)


def test_a_method_that_your_code_calls_may_have_any_name(runs: Path) -> None:
    def loss(task: Any, model: Any, batch: Any) -> Tensor:
        losses: list[Tensor] = [task.forward(model, each) for each in [batch]]
        return losses[0]

    own = {"forward": lambda _, model, batch: F.mse_loss(model(batch.inputs), batch.targets), "loss": loss}
    assert run(type("Mine", (Kelvin,), own), runs / "run").status == "completed"


def test_a_module_of_another_trainer_is_answered(runs: Path) -> None:
    module = type("Lit", (paceline.Task,), {"training_step": lambda *_: 0, "train_dataloader": lambda _: []})
    with pytest.raises(RecipeError, match=r"'Lit' lacks .*; training_step is loss here; train_dataloader is open_pipe"):
        run(module, runs / "run")
    with pytest.raises(RecipeError, match=r"'Net' is a network, not a paceline\.Task; paceline\.fit trains it\."):
        run(Net, runs / "run")


def test_the_log_names_your_class_and_network(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paceline.train(task=Kelvin, overrides=SHORT, run_dir=runs / "run")
    said = capsys.readouterr().out
    assert f"Kelvin in {runs / 'run'}\n" in said
    assert ", Net with 19 parameters\n" in said


def test_the_log_counts_all_parameters_and_those_that_are_trained(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Frozen(Kelvin):
        def build_model(self) -> nn.Module:
            network = Net()
            network.layers[0].requires_grad_(requires_grad=False)
            return network

    paceline.train(task=Frozen, overrides=SHORT, run_dir=runs / "run")
    assert ", Net with 19 parameters, 7 of them trained\n" in capsys.readouterr().out


def test_targets_may_be_compared_with_one_another(runs: Path) -> None:
    def ranks(_: Any, model: Any, batch: Any) -> Tensor:
        answer, y = model(batch.inputs), batch.targets
        gaps = (answer[:, None] - answer) - (y[:, None] - y)
        return gaps.square().mean() + (answer @ y[:, None]).mean() * 0

    assert run(type("Ranks", (Kelvin,), {"loss": ranks}), runs / "run").status == "completed"


def test_an_error_in_the_loss_is_one_sentence_and_its_traceback(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def late(task: Any, model: Any, batch: Any) -> Any:
        return F.mse_loss(model(batch.inputs), batch.targets) + (0 if batch.slice.step < 1 else {}["wieght"])

    with pytest.raises(KeyError, match="wieght") as caught:
        run(type("Mine", (Kelvin,), {"loss": late}), runs / "run")
    assert report_error(caught.value, {}) == 1
    first, *rest = capsys.readouterr().err.splitlines()
    found = r"paceline: Mine\.loss failed with KeyError: 'wieght' \(test_own_code\.py, line \d+\) "
    assert re.match(found + r"\(in forward of step 2, with sample \d+ .*\)$", first), first
    assert rest[0].startswith("Traceback")
    assert any('{}["wieght"]' in line for line in rest)


def smoothed(task: Any, model: Any, batch: Any) -> Tensor:
    smoothing = task.recipe.train.label_smoothing
    return F.cross_entropy(model(batch.inputs), batch.targets, label_smoothing=smoothing)


def test_keys_of_the_loss_that_your_own_does_not_read_are_told() -> None:
    class Plain(ImageClassification):
        def loss(self, model: Any, batch: Any) -> Tensor:
            return F.cross_entropy(model(batch.inputs), batch.targets)

    class Reads(Plain):
        def loss(self, model: Any, batch: Any) -> Tensor:
            smoothing = self.recipe.train.label_smoothing
            return F.cross_entropy(model(batch.inputs), batch.targets, label_smoothing=smoothing)

    class Hands(Plain):
        def loss(self, model: Any, batch: Any) -> Tensor:
            return smoothed(self, model, batch)

    class Computes(Plain):
        @property
        def smoothing(self) -> float:
            return self.recipe.train.label_smoothing

    class Calls(ImageClassification):
        def loss(self, model: Any, batch: Any) -> Tensor:
            return ImageClassification.loss(self, model, batch) * 2

    class Gives(Plain):
        def __init__(self, recipe: Any) -> None:
            super().__init__(recipe)
            self.train = vars(recipe)["train"]

    class Adds(ImageClassification):
        def loss(self, model: Any, batch: Any) -> Tensor:
            return super().loss(model, batch) * 2

    weights = {"train.class_weights": {"3": 2.0}, "train.label_smoothing": 0.1}
    for task, keys in (
        (Plain, weights.keys()),
        *((each, ()) for each in (Reads, Hands, Computes, Calls, Gives, Adds, ImageClassification)),
    ):
        recipe = load_recipe("digits", weights).recipe
        plan = Subject.open(recipe, World(), "plan", task=task(recipe), machine=machine()).plan
        assert {key for key, why in plan.unused.items() if key in weights and "loss is your own" in why} == {*keys}
        assert bool(plan.class_weights) == (task is not Plain)
    overrides = {"train.label_smoothing": 0.2, "train.duration": "1 steps"}
    with raises(RecipeError, key="train.label_smoothing", rule="with effect"):
        paceline.train("digits", task=Plain, overrides=overrides, quiet=True)


def test_a_missing_method_is_named(runs: Path) -> None:
    class Incomplete(paceline.Task):
        def loss(self, model: Any, batch: Any) -> Tensor:
            return torch.zeros(())

    with pytest.raises(RecipeError, match=r"'Incomplete' lacks the method\(s\) build_model, data_facts, open_p"):
        run(Incomplete, runs / "run")


def test_the_trial_changes_nothing_and_a_result_that_needs_all_samples_is_no_mistake(runs: Path) -> None:
    class Late(Collects):
        def results(self, parts: Any) -> dict[str, float]:
            if not trials.append(len(trials)) and len(trials) == 1:  # type: ignore[func-returns-value]
                raise ValueError("only one class present")
            return super().results(parts)

    trials: list[int] = []
    draws = type(
        "Draws", (Kelvin,), {"score": lambda self, m, b: (torch.rand(3), random.random(), Kelvin.score(self, m, b))[2]}
    )
    late = type("Late", (Kelvin,), {**COLLECTS, "collectors": lambda _: (Late(),)})
    plain = run(Kelvin, runs / "plain", evaluate__every="off").summary.weights_sha256
    assert run(draws, runs / "draws", evaluate__every="3 steps").summary.weights_sha256 == plain
    assert run(late, runs / "late").summary.weights_sha256 == plain
    assert len(trials) == 4


# --------------------------------------------------------------------------------------------------------------- resume


def test_a_run_goes_on_with_its_task_alone(runs: Path) -> None:
    whole = run(Kelvin, runs / "whole", train__duration="6 steps")
    first = run(Kelvin, runs / "run", train__duration="6 steps", train__until="2 steps")
    assert (first.status, first.summary.step) == ("stopped", 2)
    with pytest.raises(RunDirectoryError, match=r"trains the task .*:Kelvin, not .*ImageClassification; .*task="):
        paceline.train(run_dir=runs / "run", quiet=True)
    other = type("Other", (Kelvin,), {})
    with pytest.raises(RunDirectoryError, match=r"trains the task .*:Kelvin, not .*Other"):
        paceline.train(run_dir=runs / "run", task=other, quiet=True)
    until = paceline.train(run_dir=runs / "run", task=Kelvin, overrides={"train.until": "4 steps"}, quiet=True)
    assert until.summary.step == 4
    done = paceline.train(run_dir=runs / "run", task=Kelvin, quiet=True)
    assert done.summary.weights_sha256 == whole.summary.weights_sha256
    assert audit_run(runs / "run").passed
