"""Recommendation in the loop that trains images: plan, runs, resume, predictions, and the tools around them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_sentences import raises
from sklearn.metrics import log_loss, roc_auc_score

import paceline
from paceline.cli.main import run as command
from paceline.errors import PacelineError, RecipeError
from paceline.recipe.load import load_recipe
from paceline.trainer.fake_step import fake_step
from paceline.trainer.train import plan_only
from paceline_advisor.memory.estimate import estimate_memory
from paceline_recsys.sets.synthetic import open_clicks

Make = Callable[..., Any]

TINY = """
task: recommendation
model: {name: dlrm, options: {embedding: 4, bottom: [8], top: [8]}}
data:
  dataset: synthetic_clicks
  samples: 150
  recommendation: {dense_features: 3, categories: 4, max_rows: 30, evaluation_samples: 70}
batch: {global_size: 16}
optimizer: {name: adamw, lr: 0.01, tables: rowwise_adagrad}
schedule: {name: cosine}
train: {duration: 22 steps, precision: fp32}
evaluate: {every: 11 steps, batch_size: 16}
checkpoint: {every: 5 steps, keep: 9}
parallel: {device: cpu, threads: 1}
telemetry: {log_every: 4 steps, trackers: [], report: off}
"""
SPARSE = {"model.options": {"embedding": 4, "bottom": [8], "top": [8], "sparse": True}}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "clicks.yaml"
    path.write_text(TINY)
    return path


def test_what_the_plan_says(recipe: Path) -> None:
    plan = plan_only(load_recipe(recipe))
    assert plan.data["tables"].endswith("of optimizer state; each process holds all of them")
    assert "4 tables of 75 rows in all x 4 numbers x 4 bytes" in plan.data["tables"]
    assert 0.6 < plan.data["best_possible_auc"] < 1
    assert plan.reasons["data.path"] == "not used: generated samples are not in a file"
    assert plan.reasons["evaluate.metric"] == "auc: the task's own choice"


@pytest.mark.parametrize(
    "override",
    [
        "data.image_size=32",
        "data.augment.flip=0.5",
        "data.mix.mixup=0.2",
        "train.label_smoothing=0.1",
        "evaluate.top_k=3",
        "data.max_broken=3",
        "data.recommendation.cache=here",
    ],
)
def test_keys_without_effect_are_refused(recipe: Path, override: str) -> None:
    loaded = load_recipe(recipe, [override])
    with raises(RecipeError, rule="with effect"):
        loaded.checked(plan_only(loaded).unused)


def own_clicks(data: Any) -> Any:
    """Clicks of one's own."""
    return replace(open_clicks(replace(data, dataset="synthetic_clicks", path=None)), name="mine")


def test_a_data_set_of_one_s_own_may_have_a_path(recipe: Path, tmp_path: Path) -> None:
    loaded = load_recipe(recipe, [f"data.dataset={__name__}:own_clicks", f"data.path={tmp_path}"])
    loaded.checked(plan_only(loaded).unused)


def test_sections_go_with_their_data(recipe: Path) -> None:
    with raises(PacelineError, rule="with effect"):
        load_recipe("digits", ["data.recommendation.rank=3"])
    with pytest.raises(PacelineError, match="not of clicks; known are criteo, synthetic_clicks"):
        plan_only(load_recipe(recipe, ["data.dataset=digits"]))


@pytest.mark.parametrize(
    "overrides",
    [
        {**SPARSE, "optimizer.tables": "sparse_adam", "train.ema": 0.9},
        {**SPARSE, "optimizer": {"name": "sgd", "lr": 0.01, "momentum": 0.0, "tables": "same"}, "batch.micro_size": 8},
    ],
)
def test_resuming_gives_the_same_bits(train: Make, course: Callable[[Path], Any], overrides: dict[str, Any]) -> None:
    whole = train("whole", overrides)
    train("parts", {**overrides, "train.until": "7 steps"})
    train("parts", {**overrides, "train.until": "15 steps"})
    resumed = train("parts", overrides)
    assert resumed.summary.weights_sha256 == whole.summary.weights_sha256
    assert resumed.summary.metrics == whole.summary.metrics
    assert course(resumed.run_dir) == course(whole.run_dir)
    assert command(["audit", str(resumed.run_dir)]) == 0


def test_sparse_gradients_train_as_dense_ones(train: Make) -> None:
    dense, sparse = train("dense").metrics, train("sparse", SPARSE).metrics
    assert sparse["loss"] == pytest.approx(dense["loss"], rel=1e-4)
    assert sparse["auc"] == pytest.approx(dense["auc"], abs=5e-3)


def test_predictions_and_figures_agree(train: Make, tmp_path: Path, capsys: Any) -> None:
    trained = train("run")
    predictions = tmp_path / "predictions.jsonl"
    assert command(["evaluate", str(trained.run_dir), "--predictions", str(predictions)]) == 0
    rows = [json.loads(line) for line in predictions.read_text().splitlines()]
    probability, target = (np.array([row[key] for row in rows]) for key in ("probability", "target"))
    assert len(rows) == 70
    found = trained.metrics
    assert found["auc"] == pytest.approx(roc_auc_score(target, probability), abs=1e-12)
    assert found["loss"] == pytest.approx(log_loss(target, probability), rel=1e-5)
    assert found["accuracy"] == pytest.approx(100 * ((probability > 0.5) == target).mean())
    entropy = log_loss(target, np.full(70, target.mean()))
    assert found["normalized_entropy"] == pytest.approx(found["loss"] / entropy, rel=1e-5)


def test_one_class_only_has_no_area(train: Make) -> None:
    done = train("one", {"data.recommendation.evaluation_samples": 1, "train.duration": "4 steps"})
    assert done.status == "completed"
    plan = json.loads((done.run_dir / "plan.json").read_text())
    assert "auc and normalized_entropy are undefined: all held-out samples" in " ".join(plan["left_out"])
    assert done.metrics["best"] == {}
    assert math.isnan(done.metrics["auc"])
    assert math.isfinite(done.metrics["loss"])


def test_exact_runs_and_their_refusals(train: Make) -> None:
    exact = {"parallel.exact": True, "batch.micro_size": 4, "train.duration": "6 steps"}
    assert train("exact", exact).status == "completed"
    with pytest.raises(RecipeError, match=r"parallel\.exact=true does not support sparse gradients"):
        train("sparse", {**exact, **SPARSE})


def test_the_memory_of_a_step_is_estimated(recipe: Path) -> None:
    dense = estimate_memory(load_recipe(recipe), device="cpu")
    assert any("each process holds all of them" in each for each in dense.notices)
    assert dense.peak.causes["weights"] > 75 * 4 * 4
    refused = pytest.raises(PacelineError, match="depends on values")
    with refused, fake_step(load_recipe(recipe, {**SPARSE, "optimizer.tables": "sparse_adam"}).recipe):
        pass


def test_the_doctor_looks_at_it(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["doctor", str(recipe), "--json"]) in (0, 1)
    found = json.loads(capsys.readouterr().out)
    assert not [each for each in found["findings"] if each.get("severity") == "breaks"]


def test_its_landscape_goes_without_a_curvature_unless_that_is_asked_for(
    train: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = train("run", {"train.duration": "4 steps"})
    asked = ["landscape", str(trained.run_dir), "--samples", "16", "--json"]
    assert command([*asked, "--points", "3", "--grid", "3", "--products", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert any("no curvature" in note for note in found["notes"])
    assert found["runs"][0]["curve"]
    assert found["runs"][0]["sharpness"]
    assert command([*asked, "--measure", "curvature"]) == 2


def test_predict_says_what_evaluation_said(train: Make, tmp_path: Path, capsys: Any) -> None:
    trained = train("run")
    predictions, lines = tmp_path / "predictions.jsonl", tmp_path / "lines.jsonl"
    assert command(["evaluate", str(trained.run_dir), "--predictions", str(predictions)]) == 0
    said = [json.loads(line) for line in predictions.read_text().splitlines()]
    samples = open_clicks(load_recipe(trained.run_dir).recipe.data).validation.read(np.arange(5))
    pairs = zip(samples.dense.tolist(), samples.categories.tolist(), strict=True)
    good = [json.dumps({"dense": dense, "categories": categories}) for dense, categories in pairs]
    bad = [
        "{}",
        json.dumps({"dense": [1], "categories": [0] * 4}),
        json.dumps({"dense": [1] * 3, "categories": [99] * 4}),
        "[" * 100_000,
        json.dumps({"dense": [10**400] * 3, "categories": [0] * 4}),
        json.dumps({"dense": [math.nan] * 3, "categories": [0] * 4}),
    ]
    lines.write_text("\n".join([*good, *bad]))
    capsys.readouterr()
    assert command(["predict", str(trained.run_dir), str(lines), "--json"]) == 1  # some lines are wrong
    found = json.loads(capsys.readouterr().out)
    by_id = {each["id"]: each["probability"] for each in said}
    assert [each["probability"] for each in found[:5]] == pytest.approx(
        [by_id[number] for number in range(5)], rel=1e-5
    )
    assert [each["line"] for each in found if each["error"]] == [6, 7, 8, 9, 10, 11]
    assert "must have 3 numbers and 4 categories" in found[6]["error"]
    assert command(["predict", str(trained.run_dir), str(lines.rename(tmp_path / "LINES.JSONL")), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)[0]["probability"] == found[0]["probability"]
    lines = tmp_path / "LINES.JSONL"
    assert command(["predict", str(trained.run_dir), str(lines.rename(tmp_path / "lines.tsv"))]) == 2
    assert command(["predict", str(trained.run_dir)]) == 2
    assert ".jsonl" in capsys.readouterr().err
    assert command(["predict", str(trained.run_dir), str(tmp_path / "none.tsv")]) == 2
    assert "files of lines" in capsys.readouterr().err


def test_lines_of_criteos_format_are_trained_on_and_predicted(train: Make, tmp_path: Path, capsys: Any) -> None:
    text = ["\t".join([str(n % 2), *(["3"] * 13), *[f"{n % 2:x}", *([""] * 25)]]) for n in range(60)]
    path = tmp_path / "clicks.tsv"
    path.write_text("\n".join(text))
    data = {"dataset": "criteo", "path": str(path), "clicks": {"max_rows": 2000}, "samples": None}
    done = train("criteo", {"data": data, "train.duration": "40 steps", "optimizer.lr": 0.05})
    assert done.metrics["auc"] == 1.0  # the first category tells
    (tmp_path / "new.txt").write_text("\n".join([text[0], text[1], text[1].partition("\t")[2], "nothing"]))
    capsys.readouterr()
    assert command(["predict", str(done.run_dir), str(tmp_path / "new.txt"), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found[0]["probability"] < 0.5 < found[1]["probability"]
    assert found[2]["probability"] == pytest.approx(found[1]["probability"])  # without a label
    assert "found 1 fields" in found[3]["error"]
    # Of other data, which have more values and so would have larger tables, categories are those of the weights.
    (tmp_path / "other.tsv").write_text("\n".join([f"{each}{n:x}" for n, each in enumerate(text * 3)]))
    assert command(["evaluate", str(done.run_dir), f"data.path={tmp_path / 'other.tsv'}", "--json"]) == 0


def test_lines_that_were_left_out_are_told(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = ["\t".join([str(n % 2), *(["3"] * 13), *([""] * 26)]) for n in range(60)]
    (tmp_path / "clicks.tsv").write_text("\n".join(["wrong", *text, "as well"]))
    data = {"dataset": "criteo", "path": str(tmp_path / "clicks.tsv"), "max_broken": 2, "samples": None, "clicks": None}
    paceline.train(recipe, overrides={"data": data, "train.duration": "1 steps"}, run_dir=tmp_path / "run")
    printed = capsys.readouterr()
    told = f"wrong lines: 2 left out ('line 1 of {tmp_path}/clicks.tsv', 'line 62 of {tmp_path}/clicks.tsv')"
    assert told in " ".join((printed.out + printed.err).split())  # a pipe's lines are folded
    assert command(["evaluate", str(tmp_path / "run")]) == 0
    assert f"note: {told}" in capsys.readouterr().out
    assert command(["audit", str(tmp_path / "run")]) == 0
    assert "left out: 2 lines, which gave no sample" in capsys.readouterr().out


def test_sparse_gradients_are_not_proved(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [f"{key}={json.dumps(value)}" for key, value in SPARSE.items()]
    assert command(["prove", str(recipe), *overrides]) == 2
    assert "number by number" in capsys.readouterr().err
