"""What is kept of an evaluation is what was scored: each sample once, at any number of processes, in no other pass."""

from __future__ import annotations

import base64
import copy
import io
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_networks import Linear, held_out_inputs
from torch import nn

from paceline.distributed.collectives import Collectives
from paceline.host.world import World
from paceline.metrics.answers import Answers, Confusion
from paceline.metrics.confusion import confusion_document
from paceline.records.run_directory import RunDirectory
from paceline.trainer.evaluate import AnswerCollector, KeepOptions, write_artifacts
from paceline.trainer.evaluate_target import EvaluationRequest, evaluate_target

Make = Callable[..., Any]

CPU = torch.device("cpu")


def test_the_matrix_counts_what_was_scored(opened: Make, evaluator: Make) -> None:
    task, pipeline = opened(evaluation_images=101, classes=7)
    model = Linear(7)
    found = evaluator(task, pipeline, keep=KeepOptions(weights="model", examples=24))({"model": model})
    assert model.passes == 7  # batches of 16: what is kept takes no pass of its own
    confusion = found.artifacts.confusion
    assert confusion is not None
    matrix = np.array(confusion["matrix"])
    assert matrix.sum() == confusion["samples"] == found.samples == 101
    assert (matrix.sum(axis=1) == np.bincount(task.dataset.validation.labels, minlength=7)).all()
    assert found.results["model"]["top1_accuracy"] == pytest.approx(100 * np.trace(matrix) / 101, abs=1e-12)
    with torch.no_grad():
        probability, predicted = (each.numpy() for each in model(held_out_inputs(task)).softmax(1).max(1))
    bins = np.minimum((10 * probability).astype(int), 9)
    right = predicted == task.dataset.validation.labels
    assert len(confusion["reliability"]) == 10
    for at, told in enumerate(confusion["reliability"]):
        inside = bins == at
        assert (told["samples"], told["right"]) == (inside.sum(), right[inside].sum())
        mean = pytest.approx(probability[inside].mean(), abs=2e-6) if inside.any() else None
        assert told["probability"] == mean


class AlwaysAlike(nn.Module):
    """Answers the same to everything, so that all mistakes are equally confident."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tensor([0.0, 1.0, 2.0, 0.0, 0.0, 0.0, 0.0]).repeat(len(x), 1)


@pytest.mark.parametrize("samples", [1, 7, 45, 101])
@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize(("network", "count"), [(lambda: Linear(7), 9), (AlwaysAlike, 60)])
def test_any_number_of_processes_keeps_the_same(
    samples: int, world_size: int, network: Callable[[], nn.Module], count: int, opened: Make, evaluator: Make
) -> None:
    task, pipeline = opened(evaluation_images=samples, classes=7)
    model, keep = network().eval(), KeepOptions(weights="model", examples=count)
    alone = evaluator(task, pipeline, keep=keep)({"model": model}).artifacts
    passing = []
    for rank in range(world_size):
        passing.append(AnswerCollector(task, keep))
        for batch in pipeline.evaluation_batches(16, World(rank=rank, world_size=world_size)):
            with torch.no_grad():
                passing[-1].add(model, batch)
    parts = [each.part() for each in passing]

    class AllInOne(Collectives):
        """Gathers what each rank, asked in turn, would have brought."""

        def gather_on_rank_zero(self, value: Any) -> list[Any]:
            brought.append(value)
            return brought

    brought: list[Any] = []
    for rank in reversed(range(world_size)):
        world = World(rank=rank, world_size=world_size)
        kept = passing[rank].combine(parts, AllInOne(world), pipeline)
    assert kept == alone
    assert kept.examples is not None
    assert len(kept.examples["examples"]) == min(count, samples)


def test_examples_are_the_most_confident_mistakes_and_a_few_right_answers(opened: Make, evaluator: Make) -> None:
    task, pipeline = opened(evaluation_images=300, classes=3)
    model = Linear(3)
    found = evaluator(task, pipeline, keep=KeepOptions(weights="model", examples=12))(
        {"model": model}
    ).artifacts.examples
    assert found is not None
    images, labels = task.dataset.validation.images, task.dataset.validation.labels
    with torch.no_grad():
        logits = model(held_out_inputs(task))
    probability, predicted = logits.softmax(1).max(1)
    wrong = [int(i) for i in (-probability).argsort(stable=True) if predicted[i] != labels[i]]
    shown = found["examples"]
    assert [each["sample"] for each in shown[:8]] == wrong[:8]
    assert all(each["label"] == each["predicted"] for each in shown[8:])
    assert len({each["sample"] for each in shown}) == 12
    for each in shown:
        number = each["sample"]
        assert (each["label"], each["predicted"]) == (labels[number], int(predicted[number]))
        assert each["probability"] == pytest.approx(float(probability[number]), rel=1e-5)
        own = float(logits[number].softmax(0)[labels[number]])
        assert each["label_probability"] == pytest.approx(own, rel=1e-5)
        # From the very tensor that the network was shown, and still the picture of the file.
        assert (pixels_of(each) == images[number][:, :, 0]).all()


def pixels_of(example: dict[str, Any]) -> Any:
    head, _, content = example["image"].partition(",")
    assert head == "data:image/png;base64"
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(content))))


def test_answers_that_are_no_numbers_are_counted_apart() -> None:
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor([[0, 1, 2], [nan, 1, 2], [nan, nan, nan], [inf, 1, 2], [5, 5, 5]])
    confusion = Confusion()
    confusion.add(Answers.of(logits, torch.tensor([2, 2, 0, 0, 1])))
    triples, reliability = confusion.counts()
    found = confusion_document(triples, [reliability], "abc")
    assert found["matrix"] == [[1, 0, 0], [1, 0, 0], [0, 0, 1]]
    assert (found["samples"], found["unanswered"]) == (5, 2)
    told = [each for each in found["reliability"] if each["samples"]]
    third, most = float(torch.tensor(1 / 3)), float(torch.tensor([0.0, 1, 2]).softmax(0)[2])
    # The infinite score has no probability, and counts as 0.
    assert [(each["samples"], each["right"]) for each in told] == [(1, 1), (1, 0), (1, 1)]
    assert [each["probability"] for each in told] == pytest.approx([0, third, most], abs=1e-6)


def test_many_classes_are_written_as_triples() -> None:
    names = [str(each) for each in range(101)]
    assert confusion_document([(0, 100, 3), (7, 7, 2)], [], names)["triples"] == [[0, 100, 3], [7, 7, 2]]
    assert "triples" not in confusion_document([(0, 1, 3)], [], names[:100])


# ------------------------------------------------------------------------------------------------ in a run


def told(run_dir: Path, name: str) -> dict[str, Any]:
    return dict(json.loads((run_dir / "evaluation" / f"{name}.json").read_text()))


def test_a_run_keeps_its_last_evaluation_of_the_average(train_tiny: Make, events: Make) -> None:
    result = train_tiny("run", {"train.ema": 0.5, "evaluate.every": "3 steps"})
    last = events(result.run_dir, "evaluation")[-1]
    confusion, examples = told(result.run_dir, "confusion"), told(result.run_dir, "examples")
    for each in (confusion, examples):
        assert (each["step"], each["weights"], each["split"]) == (8, "ema", "validation")
        assert each["classes"] == ["0", "1", "2"]
    assert confusion["samples"] == last["samples"] == 21
    right = sum(confusion["matrix"][label][label] for label in range(3))
    assert last["top1_accuracy"] == pytest.approx(100 * right / 21)
    assert len(examples["examples"]) == 21


def test_without_examples_nothing_is_kept_and_the_weights_are_the_same(train_tiny: Make) -> None:
    kept = train_tiny("kept", {"evaluate.every": "1 steps"})
    plain = train_tiny("plain", {"evaluate.every": "1 steps", "evaluate.keep_examples": 0})
    assert (kept.run_dir / "evaluation").is_dir()
    assert not (plain.run_dir / "evaluation").exists()
    assert kept.summary.weights_sha256 == plain.summary.weights_sha256


def test_a_run_that_goes_back_forgets_what_came_later(train_tiny: Make) -> None:
    first = train_tiny("run", {"checkpoint.keep": 9})
    before = told(first.run_dir, "confusion"), told(first.run_dir, "examples")
    assert before[0]["step"] == 8
    checkpoint = first.run_dir / "checkpoints" / "step-00000004"
    gone = {"train.until": "5 steps", "checkpoint.keep": 9}
    assert train_tiny("run", gone, resume=str(checkpoint)).status == "stopped"
    assert list((first.run_dir / "evaluation").iterdir()) == []
    train_tiny("run", {"checkpoint.keep": 9})
    assert (told(first.run_dir, "confusion"), told(first.run_dir, "examples")) == before


@pytest.mark.parametrize("how", ["raises", "asks again"])
def test_a_task_whose_answers_fail_is_told_once_and_trains_on(
    how: str, train_tiny: Make, tiny_task: Make, events: Make
) -> None:
    def fails(recipe: Any) -> Any:
        task = tiny_task()(recipe)

        def answers(model: Any, batch: Any) -> Any:
            if how == "raises":
                raise RuntimeError("no classes here")
            return model(batch.inputs * 2)

        task.answers = answers
        return task

    plain = train_tiny("plain", {"evaluate.every": "2 steps"})
    result = train_tiny("run", {"evaluate.every": "2 steps"}, task=fails)
    assert result.summary.weights_sha256 == plain.summary.weights_sha256
    (incident,) = events(result.run_dir, "incident")
    assert incident["incident"] == "not_kept"
    assert ("no classes here" if how == "raises" else "calls the network differently") in incident["message"]
    assert not (result.run_dir / "evaluation").exists()


class _Odd:
    """Tasks that look at their network and their data in ways that nobody foresaw."""

    @staticmethod
    def copies_the_network(task: Any) -> None:
        task.score = lambda model, batch, score=task.score: score(copy.deepcopy(model).train(mode=False), batch)

    @staticmethod
    def asks_whether_it_is_one(task: Any) -> None:
        def score(model: Any, batch: Any, plain: Any = task.score) -> Any:
            if not isinstance(model, nn.Module):
                raise TypeError("this is no network")
            return plain(model, batch)

        task.score = score

    @staticmethod
    def pictures_of_numbers(task: Any) -> None:
        task.pictures = lambda inputs: inputs

    @staticmethod
    def too_few_names(task: Any) -> None:
        described = task.description()
        task.description = lambda: described | {"class_names": ["zero", "one"]}

    @staticmethod
    def details_that_fail(task: Any) -> None:
        def fails(parts: Any) -> Any:
            raise RuntimeError("nothing to say")

        quiet = {"add": lambda values, ids: None, "part": lambda: None, "results": lambda parts: {}}
        task.collectors = lambda: (SimpleNamespace(**quiet, details=fails),)


@pytest.mark.parametrize(
    ("odd", "method"),
    [
        (_Odd.copies_the_network, "score"),
        (_Odd.asks_whether_it_is_one, "score"),
        (_Odd.pictures_of_numbers, "pictures"),
        (_Odd.too_few_names, "description"),
        (_Odd.details_that_fail, "SimpleNamespace.details failed with RuntimeError: nothing to say"),
    ],
)
def test_what_is_odd_is_scored_as_ever_and_told_once(
    odd: Callable[[Any], None], method: str, train_tiny: Make, tiny_task: Make, events: Any
) -> None:
    def made(recipe: Any) -> Any:
        task = tiny_task()(recipe)
        odd(task)
        return task

    plain = train_tiny("plain")
    result = train_tiny("run", task=made)
    assert result.summary.weights_sha256 == plain.summary.weights_sha256
    assert result.metrics == plain.metrics
    (incident,) = events(result.run_dir, "incident")
    assert incident["incident"] == "not_kept"
    assert method in incident["message"]


def test_names_that_are_no_text_are_kept_as_text(opened: Make, tmp_path: Path, evaluator: Make) -> None:
    task, pipeline = opened()
    pipeline.sample_name = lambda sample, *, training: f"caf\udce9-{sample}.png"
    kept = evaluator(task, pipeline, keep=KeepOptions(weights="model", examples=2))({"model": Linear(3)}).artifacts
    assert kept.failure == ""
    write_artifacts(RunDirectory(tmp_path), kept, {"step": 1})
    assert {each["name"].split("-")[0] for each in told(tmp_path, "examples")["examples"]} == {"caf\\udce9"}


def test_a_directory_that_cannot_be_written_does_not_end_the_run(train_tiny: Make, runs: Path, events: Make) -> None:
    (runs / "run").mkdir()
    (train_tiny("run", {"train.until": "2 steps"}).run_dir / "evaluation").write_text("in the way")
    result = train_tiny("run")
    assert result.status == "completed"
    assert [each["incident"] for each in events(result.run_dir, "incident")] == ["not_kept"]


def test_evaluating_saved_weights_gives_the_same_matrix(train_tiny: Make, tiny_recipe: Path, runs: Path) -> None:
    import paceline

    result = paceline.train(tiny_recipe, overrides={"train.duration": "2 steps"}, run_dir=runs / "run", quiet=True)
    report = evaluate_target(EvaluationRequest(target=result.run_dir))
    kept = told(result.run_dir, "confusion")
    assert report.confusion == {key: kept[key] for key in ("classes", "samples", "unanswered", "reliability", "matrix")}
