"""Evaluation scores each sample once, believes no tied or undefined answer, and leaves the models as they were."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_networks import Linear, held_out_inputs
from torch import nn

import paceline
from paceline.host.world import World
from paceline.metrics.accumulator import Accumulator, Metric
from paceline.tasks.image_classification import ImageClassification
from paceline.trainer.evaluate_target import EvaluationRequest, evaluate_target
from paceline.trainer.step_stats import Progress

Make = Callable[..., Any]

CPU = torch.device("cpu")


# ------------------------------------------------------------------------------------------- exactness


@pytest.mark.parametrize("samples", [1, 7, 21, 1000])
def test_any_number_of_processes_finds_the_same(samples: int, opened: Make, evaluator: Make) -> None:
    task, pipeline = opened(evaluation_images=samples, classes=7)
    model = Linear(7).eval()
    targets = torch.from_numpy(task.dataset.validation.labels)
    with torch.no_grad():
        logits = model(held_out_inputs(task))
    expected = {
        "loss": nn.functional.cross_entropy(logits.double(), targets).item(),
        "top1_accuracy": 100 * (logits.argmax(1) == targets).double().mean().item(),
        "top5_accuracy": 100 * (logits.topk(5).indices == targets[:, None]).any(1).double().mean().item(),
    }
    whole = evaluator(task, pipeline)({"model": model})
    assert whole.samples == samples
    assert whole.results["model"] == pytest.approx(expected, rel=1e-5)
    for world_size in (1, 2, 3, 8):
        rows = []
        for rank in range(world_size):
            part = Accumulator(task.metrics, CPU)
            for batch in pipeline.evaluation_batches(16, World(rank=rank, world_size=world_size)):
                with torch.no_grad():
                    part.add(task.score(model, batch))
            rows += part.rows()
        assert part.results(rows) == (samples, whole.results["model"])


def predicted(evaluator: Make, task: Any, pipeline: Any, model: nn.Module) -> list[float]:
    found: list[float] = []
    evaluator(task, pipeline)({"model": model}, lambda _, __, values: found.extend(values["probability"].tolist()))
    return found


def test_predicting_what_was_scored_takes_no_second_forward_pass(opened: Make, evaluator: Make) -> None:
    task, pipeline = opened(evaluation_images=40)
    model = Linear(3)
    observed = predicted(evaluator, task, pipeline, model)
    assert model.passes == 3  # batches of 16
    expected = model(held_out_inputs(task)).softmax(dim=1).max(dim=1).values
    assert observed == pytest.approx(expected.tolist(), rel=1e-5)


def test_an_answer_that_scoring_has_written_into_is_not_used_for_predicting(opened: Make, evaluator: Make) -> None:
    def spoil(model: Any, batch: Any, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        assert model.layers is not None  # a score may use more of the network than its answer
        model(batch.inputs).zero_()
        return values

    task, pipeline = opened(on_score=spoil)
    expected, plain = opened()
    assert predicted(evaluator, task, pipeline, Linear(3)) == predicted(evaluator, expected, plain, Linear(3))


def test_every_set_of_weights_is_scored_on_its_own(opened: Make, evaluator: Make) -> None:
    task, pipeline = opened()
    first, second = Linear(3), Linear(3)
    nn.init.zeros_(second.layers[1].weight)
    together = evaluator(task, pipeline)({"model": first, "ema": second}).results
    assert together["model"] == evaluator(task, pipeline)({"x": first}).results["x"]
    assert together["ema"] == evaluator(task, pipeline)({"x": second}).results["x"]
    assert together["model"] != together["ema"]


def test_the_training_loss_is_smoothed_and_the_evaluations_is_not(opened: Make, evaluator: Make) -> None:
    model = Linear(3)
    plain, smooth = opened(), opened({"train.label_smoothing": 0.5})
    assert evaluator(*smooth)({"m": model}).results == evaluator(*plain)({"m": model}).results
    batch = next(plain[1].evaluation_batches(8, World()))
    assert smooth[0].loss(model, batch).item() != pytest.approx(plain[0].loss(model, batch).item())


def test_a_run_records_what_it_found(train_tiny: Make, events: Make) -> None:
    result = train_tiny("run", {"train.ema": 0.5, "evaluate.every": "3 steps"})
    found = events(result.run_dir, "evaluation")
    assert [(event["step"], event["weights"]) for event in found] == [
        (step, weights) for step in (3, 6, 8) for weights in ("model", "ema")
    ]
    for event in found:
        assert (event["split"], event["samples"]) == ("validation", 21)
        assert 0 <= event["top1_accuracy"] <= 100
        # There are three classes: whatever is said, the answer is among the top five.
        assert "top5_accuracy" not in event
    assert result.metrics["top1_accuracy"] == found[-1]["top1_accuracy"]
    assert result.metrics["last"]["model"]["loss"] == found[-2]["loss"]


@pytest.mark.parametrize("invalid", [math.inf, math.nan])
@pytest.mark.parametrize("is_higher", [True, False])
def test_a_metric_that_is_not_finite_is_never_the_best(invalid: float, is_higher: bool) -> None:
    progress, metric = Progress(), Metric(name="ratio", higher_is_better=is_higher)
    progress.take_results({"model": {"ratio": invalid}}, metric)
    assert (progress.best, progress.evaluations_since_best) == ({}, 0)  # nothing to stop early on
    progress.take_results({"model": {"ratio": 0.5}, "ema": {"ratio": invalid}}, metric)
    progress.take_results({"model": {"ratio": invalid}}, metric)
    assert (progress.best["value"], progress.evaluations_since_best) == (0.5, 1)


def test_without_held_out_samples_there_is_no_evaluation(train_tiny: Make, events: Make) -> None:
    result = train_tiny("run", evaluation_images=0)
    assert result.status == "completed"
    assert not events(result.run_dir, "evaluation")
    assert result.metrics == {}


# ------------------------------------------------------------------------------------ undefined answers


class Fixed(nn.Module):
    """Answers the same to everything."""

    def __init__(self, logits: list[float]) -> None:
        super().__init__()
        self.logits = torch.tensor(logits)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.logits.expand(len(x), -1)


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("logits", "right", "among_two"),
    [
        ([NAN, NAN, NAN, NAN], [], []),
        ([0, 0, 0, 0], [0], [0, 1]),
        ([5, 5, 5, 5], [0], [0, 1]),
        ([1, 2, 2, 0], [1], [1, 2]),
        ([3, NAN, 1, 0], [], [0]),
        ([NAN, NAN, 1, 0], [], []),
        ([INF, 0, 1, 2], [0], [0, 3]),
        ([INF, INF, 1, 2], [0], [0, 1]),
        ([-INF, -INF, -INF, -INF], [0], [0, 1]),
        ([0, 1, 2, 3], [3], [2, 3]),
    ],
)
def test_what_counts_as_an_answer(
    logits: list[float], right: list[int], among_two: list[int], opened: Make, evaluator: Make
) -> None:
    """Of four classes with five samples each: ties go to the lower index, and what is no number is never right."""
    task, pipeline = opened({"evaluate.top_k": 2}, classes=4, evaluation_images=20)
    found = evaluator(task, pipeline)({"model": Fixed(logits)}).results["model"]
    assert found["top1_accuracy"] == 25.0 * len(right)
    assert found["top2_accuracy"] == 25.0 * len(among_two)


# ---------------------------------------------------------------------------------------- modes restored


def half_frozen() -> nn.Module:
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten(), nn.Linear(144, 3))
    network[1].eval()
    return network


def modes(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


def test_each_module_gets_its_own_mode_back(opened: Make, evaluator: Make) -> None:
    task, pipeline = opened()
    model = half_frozen()
    before, seen = modes(model), []
    task.on_score = lambda m, *_: seen.append(any(modes(m)))
    evaluator(task, pipeline)({"model": model})
    assert modes(model) == before == [True, True, False, True, True, True]
    assert seen == [False, False]


def test_also_after_an_error(opened: Make, evaluator: Make) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("a metric of one's own is wrong")

    task, pipeline = opened()
    task.on_score = fail
    first, second = half_frozen(), half_frozen().eval()
    before = modes(first), modes(second)
    with pytest.raises(RuntimeError, match="of one's own"):
        evaluator(task, pipeline)({"model": first, "ema": second})
    assert (modes(first), modes(second)) == before
    assert torch.is_grad_enabled()


def test_a_frozen_batchnorm_stays_frozen_through_a_run(train_tiny: Make, weights: Make) -> None:
    made: list[nn.Module] = []
    result = train_tiny(
        "run",
        {"evaluate.every": "1 steps", "train.ema": 0.9},
        make_network=lambda: made.append(half_frozen()) or made[-1],
    )
    assert modes(made[-1]) == modes(half_frozen())
    for which in ("model", "ema"):
        saved = weights(result, which)
        assert saved["1.num_batches_tracked"].item() == 0
        assert torch.equal(saved["1.running_mean"], torch.zeros(4))
        assert torch.equal(saved["1.running_var"], torch.ones(4))


def test_evaluation_leaves_gradients_and_buffers_alone(opened: Make, evaluator: Make) -> None:
    task, pipeline = opened()
    model = half_frozen()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    evaluator(task, pipeline, precision="bf16")({"model": model})
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(torch.equal(parameter.grad, torch.ones_like(parameter)) for parameter in model.parameters())


def test_predictions_are_observed_for_each_batch(opened: Make, evaluator: Make) -> None:
    task, pipeline = opened()
    seen: dict[int, int] = {}

    def observe(which: str, batch: Any, values: dict[str, torch.Tensor]) -> None:
        assert which == "model"
        assert set(values) == {"prediction", "probability", "target"}
        assert ((values["probability"] > 0) & (values["probability"] <= 1)).all()
        seen.update(zip(batch.ids.tolist(), values["target"].tolist(), strict=True))

    evaluator(task, pipeline)({"model": Linear(3)}, observe)
    assert seen == dict(enumerate(task.dataset.validation.labels.tolist()))


def test_an_image_size_that_is_asked_for_is_the_evaluations_too(tmp_path: Path) -> None:
    overrides = ["train.duration=3 steps", "model.options={width: 4, stages: 1}", "telemetry.trackers=[]"]
    paceline.train("digits", overrides=[*overrides, "parallel.device=cpu"], run_dir=tmp_path / "run", quiet=True)

    def loss(*asked: str) -> float:
        request = EvaluationRequest(target=tmp_path / "run", overrides=[*asked, "parallel.threads=1"])
        return float(evaluate_target(request).metrics["loss"])

    assert loss("data.image_size=12") == loss("data.image_size=12", "data.evaluation_size=12") != loss()
    assert loss("data.evaluation_size=12") == loss("data.image_size=12")


def test_saved_weights_are_multiplied_as_they_were_in_training(
    tiny_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"train.float32_matmul": "highest", "train.duration": "1 steps"}
    run_dir = paceline.train(tiny_recipe, overrides=asked, run_dir=tmp_path, quiet=True).run_dir
    seen: list[bool] = []
    score = ImageClassification.score

    def noted(*arguments: Any) -> Any:
        seen.append(torch.backends.cudnn.allow_tf32)
        return score(*arguments)

    monkeypatch.setattr(ImageClassification, "score", noted)
    assert torch.backends.cudnn.allow_tf32
    evaluate_target(EvaluationRequest(target=run_dir))
    assert set(seen) == {False}
    assert torch.backends.cudnn.allow_tf32
    seen.clear()
    evaluate_target(EvaluationRequest(target=run_dir, overrides=["train.float32_matmul=auto"]))
    assert set(seen) == {True}


class _Spread:
    """Collects every score, and gives their spread: a metric that no sums give."""

    def __init__(self) -> None:
        self.found: list[tuple[list[int], torch.Tensor]] = []

    def add(self, values: Any, ids: Any) -> None:
        self.found.append((ids.tolist(), values["loss"]))

    def part(self) -> Any:
        return [
            (sample, value) for ids, values in self.found for sample, value in zip(ids, values.tolist(), strict=True)
        ]

    def results(self, parts: Any) -> dict[str, float]:
        values = [value for _, value in sorted(pair for part in parts for pair in part)]
        return {"spread": max(values) - min(values), "scored": float(len(values))}


def test_a_collector_sees_each_sample_once_for_each_set_of_weights(opened: Make, evaluator: Make) -> None:
    task, pipeline = opened(classes=4, evaluation_images=21)
    task.metrics = (*task.metrics, Metric(name="spread", is_collected=True))
    task.collectors = lambda: (_Spread(),)
    found = evaluator(task, pipeline)({"model": Linear(4), "ema": Linear(4)})
    assert found.results["model"]["scored"] == found.results["ema"]["scored"] == 21
    assert found.results["model"]["spread"] > 0
    assert {"loss", "top1_accuracy", "spread", "scored"} <= found.results["model"].keys()
