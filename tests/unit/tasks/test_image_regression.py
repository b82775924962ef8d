"""Numbers of images: read from tables with care, learned, and said in the user's units by every way out."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from calls import output_of
from image_sets import image_table
from PIL import Image

import paceline
from paceline.checkpoint.weights import read_weights
from paceline.cli.predict import Predict
from paceline.data.batch import Batch
from paceline.data.image.datasets import open_dataset
from paceline.data.image.sets.synthetic import draw_discs
from paceline.data.slices import SampleSlice
from paceline.errors import DataError, ModelError, PacelineError, RecipeError
from paceline.host.world import World
from paceline.inference.export import ExportRequest, export
from paceline.inference.predict import open_predictor
from paceline.recipe.data import Data
from paceline.recipe.load import load_recipe
from paceline.tasks.exportable import Exportable
from paceline.tasks.image_regression import ImageRegression
from paceline.tasks.labelling import in_units
from paceline.tasks.task import build_task
from paceline.tasks.trained import open_exportable
from paceline.trainer.evaluate_target import EvaluationRequest, evaluate_target
from paceline.trainer.subject import Subject

CPU = torch.device("cpu")
HEADER = "image,age,weight kg"
SHORT = {
    "train.duration": "2 epochs",
    "train.ema": "off",
    "data.samples": 64,
    "data.target_columns": ["radius", "y"],
    "batch.global_size": 16,
    "model.options": {"channels": 2},
    "parallel.device": "cpu",
    "telemetry.trackers": [],
}


def test_every_value_of_a_table_is_checked_and_all_problems_are_told_at_once(tmp_path: Path) -> None:
    good = ["1,2.5", " -3e2 ,.5", "4.,+6"]
    bad = ["abc,1", ",1", "nan,1", "1,inf", "1e999,1", "1_000,1", "3 5,x"]
    path = image_table(tmp_path, [*good, *bad], HEADER)
    keys: dict[str, Any] = {"dataset": "csv", "path": str(path), "target_columns": ("age", "weight kg")}
    with pytest.raises(DataError) as refused:
        open_dataset(Data(**keys))
    said = str(refused.value)
    assert f"line 5 of {str(path)!r} has 'abc' in the column 'age', but a target is a finite number" in said
    assert "6 more: line 6 of" in said
    assert "has '' in the column 'age'" in said
    found = open_dataset(Data(**keys, on_bad="skip", validation_fraction=0))
    assert found.train.labels.tolist() == [[1, 2.5], [-300, 0.5], [4, 6]]
    assert (found.classes, found.selection["rows_left_out"]) == (("age", "weight kg"), len(bad))


@pytest.mark.parametrize("kind", ["bytes", "path"])
def test_parquet_tables_are_checked_alike(tmp_path: Path, kind: str) -> None:
    image_table(tmp_path, ["1,1"] * 3, HEADER)
    images = [(tmp_path / f"{place}.png").read_bytes() if kind == "bytes" else f"{place}.png" for place in range(3)]

    def opened(ages: list[Any]) -> Any:
        pa.parquet.write_table(pa.table({"image": images, "age": ages}), tmp_path / "t.parquet")
        path = str(tmp_path / "t.parquet")
        return open_dataset(Data(dataset="parquet", path=path, target_columns=("age",), validation_fraction=0))

    assert opened([1, 2, 4]).train.labels.tolist() == [[1], [2], [4]]
    with pytest.raises(DataError, match=r"row 1 .* has None in the column 'age'.* \(and 1 more: row 2 "):
        opened([1.0, None, float("inf")])


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"data.target_columns": ["radios"]}, r"'radios'.*Did you mean 'radius'"),
        ({"data.mix.cutmix": 1.0}, "data.mix.cutmix=1 .*use data.mix.mixup"),
        ({"train.loss": "cross_entropy"}, "train.loss=cross_entropy is not a loss of task=image_regression; use mse"),
        ({"data.target_std": [1.0]}, "data.target_std has 1 numbers, but 2 columns"),
        ({"task": "image_classification"}, "train.loss=huber is not a loss of task=image_classification"),
        (
            {"task": "image_classification", "train.loss": "bce"},
            "data.target_columns has no effect .* task=image_regression",
        ),
        ({"data.dataset": "digits", "data.target_columns": None, "data.samples": None}, "learns numbers"),
        ({"data.only_classes": ["x", "y"], "data.dataset": "discs"}, "only_classes"),
    ],
)
def test_what_it_does_not_do_is_refused(change: dict[str, Any], error: str) -> None:
    with pytest.raises(PacelineError, match=error):
        build_task(load_recipe("discs", {**SHORT, **change}).recipe).data_facts(World())


def test_a_column_of_one_number_is_refused(tmp_path: Path) -> None:
    path = image_table(tmp_path, ["1,2"] * 5, HEADER)
    keys = {"data.dataset": "csv", "data.path": str(path), "data.target_columns": ["age"]}
    recipe = load_recipe("discs", {**keys, "data.samples": None}).recipe
    with pytest.raises(DataError, match="'age' has the same number"):
        build_task(recipe).data_facts(World())


def test_a_recipe_for_classes_becomes_one_for_numbers(tmp_path: Path) -> None:
    path = image_table(tmp_path, [f"{place},{place % 3}" for place in range(10)], HEADER)
    (tmp_path / "ages.yaml").write_text(
        f"base: image_folder\ntask: image_regression\ndata: {{dataset: csv, path: {path}, target_columns: age}}\n"
        "train: {loss: mse, label_smoothing: 0}\nmodel: {name: small_resnet, options: null}\n"
    )
    recipe = load_recipe(str(tmp_path / "ages.yaml")).recipe
    task = build_task(recipe)
    assert isinstance(task, ImageRegression)
    plan = Subject.open(recipe, World(), "plan", task=task).plan
    assert (plan.data["targets"], plan.headline, len(task.dataset.validation)) == (["age"], "mae", 2)
    assert [metric.name for metric in task.metrics] == ["loss", "mae", "rmse", "r2"]
    smoothed = load_recipe(str(tmp_path / "ages.yaml"), {"train.label_smoothing": 0.1}).recipe
    assert "train.label_smoothing" in Subject.open(smoothed, World(), "plan").plan.unused


def test_targets_are_standardised_by_the_training_images() -> None:
    task = build_task(load_recipe("discs", {**SHORT, "data.samples": 100}).recipe)
    assert isinstance(task, ImageRegression)
    facts = task.data_facts(World())
    raw = draw_discs(0, 110)[1][:, [2, 1]]
    assert facts.description["target_mean"] == pytest.approx(raw[:100].mean(axis=0), rel=1e-12)
    assert facts.description["target_std"] == pytest.approx(raw[:100].std(axis=0), rel=1e-12)
    held_out = torch.from_numpy(task.dataset.validation.labels)
    back = in_units(held_out, task.dataset.target_mean, task.dataset.target_std)
    assert back.numpy() == pytest.approx(raw[100:], abs=2e-6)


@pytest.mark.parametrize("loss", ["mse", "l1", "huber"])
def test_losses_are_torchs_and_scores_are_the_losses_of_each_image(loss: str) -> None:
    task = build_task(load_recipe("discs", {**SHORT, "train.loss": loss}).recipe)
    answers, targets = torch.randn(5, 2) * 3, torch.randn(5, 2)
    part = SampleSlice(step=0, epoch=0, logical_rank=0, ids=np.arange(5), step_weight=5)
    batch = Batch(answers, targets, np.arange(5), part)
    wanted = {"mse": torch.nn.MSELoss, "l1": torch.nn.L1Loss, "huber": torch.nn.HuberLoss}[loss]()(answers, targets)
    assert task.loss(lambda inputs: inputs, batch) == wanted
    assert task.score(lambda inputs: inputs, batch)["loss"].mean() == pytest.approx(float(wanted), rel=1e-6)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two epochs."""
    run = tmp_path_factory.mktemp("discs") / "run"
    paceline.train("discs", overrides=SHORT, run_dir=run, quiet=True)
    return run


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The held-out discs as files."""
    folder = tmp_path_factory.mktemp("pictures")
    for place, image in enumerate(draw_discs(64, 6)[0]):
        Image.fromarray(image[:, :, 0]).save(folder / f"{place}.png")
    return folder


def test_the_first_batch_is_shown_with_its_numbers(trained: Path) -> None:
    data = json.loads((trained / "plan.json").read_text())["data"]
    for each in json.loads((trained / "first_batch.json").read_text())["examples"]:
        names, numbers = zip(*(told.rsplit(" ", 1) for told in each["caption"].split(", ")), strict=True)
        assert list(names) == data["targets"]
        scaled = (np.array(numbers, dtype=float) - data["target_mean"]) / data["target_std"]
        assert np.abs(scaled).max() < 5


def test_evaluation_is_in_the_users_units_and_repeats(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "answers.csv"
    report = evaluate_target(EvaluationRequest(target=trained, predictions=out))
    last = json.loads((trained / "summary.json").read_text())["metrics"]
    assert report.metrics["mae"] in last.values()
    rows = list(csv.DictReader(out.read_text().splitlines()))
    errors = [
        [abs(float(row[f"predicted_{name}"]) - float(row[f"target_{name}"])) for row in rows]
        for name in ("radius", "y")
    ]
    assert report.metrics["mae_y"] == pytest.approx(np.mean(errors[1]), abs=1e-5)
    assert report.metrics["mae"] == pytest.approx(np.mean(errors), abs=1e-5)
    assert [float(row["target_radius"]) for row in rows] == pytest.approx(draw_discs(64, 6)[1][:, 2], abs=2e-6)
    with pytest.raises(DataError, match=r"learned radius, y, and data\.target_columns names radius"):
        evaluate_target(EvaluationRequest(target=trained, overrides=("data.target_columns=[radius]",)))


@pytest.mark.needs("onnx", "onnxruntime")
def test_predictions_are_those_of_evaluation_as_are_those_of_an_onnx_file(
    trained: Path, pictures: Path, tmp_path: Path
) -> None:
    evaluated = tmp_path / "evaluated.jsonl"
    evaluate_target(EvaluationRequest(target=trained, predictions=evaluated))
    lines = [json.loads(line) for line in evaluated.read_text().splitlines()]
    wanted = [[line["predicted_radius"], line["predicted_y"]] for line in lines]
    export(ExportRequest(target=trained, output=tmp_path / "m.onnx", form="onnx"))
    files = sorted(pictures.iterdir())
    for target in (trained, tmp_path / "m.onnx"):
        predictor = open_predictor(target, device=CPU)
        answers = predictor.answer([predictor.prepare(path.read_bytes()) for path in files], 1)
        numbers = [list(each.row()["numbers"].values()) for each in answers]
        assert np.array(numbers) == pytest.approx(np.array(wanted), abs=2e-5)
        assert answers[0].description().startswith("radius ")
    (pictures / "broken.png").write_bytes(b"no picture")
    assert "1 of them unreadable" in output_of(Predict, trained, pictures, "--output", tmp_path / "out.csv")
    rows = list(csv.DictReader((tmp_path / "out.csv").read_text().splitlines()))
    assert list(rows[0]) == ["path", "radius", "y", "error"]
    assert [float(row["y"]) for row in rows[:6]] == pytest.approx([each[1] for each in wanted], abs=2e-5)
    assert (rows[6]["y"], bool(rows[6]["error"])) == ("", True)
    assert "--top-k" in output_of(Predict, trained, files[0], "--top-k", "2", code=2)


def test_a_hub_folder_of_timms_is_refused(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="predicts numbers"):
        export(ExportRequest(target=trained, output=tmp_path / "hub", form="timm"))


def test_what_is_exported_is_compared_in_standard_deviations(trained: Path) -> None:
    exportable = open_exportable(read_weights(trained), trust_code=False, target="onnx")

    def in_units_of(mean: float, std: float) -> Exportable:
        assert exportable.outputs is not None
        return replace(exportable, outputs=replace(exportable.outputs, mean=(mean, 0.0), std=(std, 1.0))).in_units

    for mean, std in ((0.005, 1e-6), (1.7e9, 1e7)):  # a small unit, and a mean that takes up most digits
        found = in_units_of(mean, std)
        assert found.compare(found.network, what="itself") == 0
        answers = {}
        for batch in (1, 2, 5):
            inputs = found.examples(batch, seed=batch)
            answers[batch] = found.network(*inputs).detach() + torch.tensor([0.01 * std, 0])
        with pytest.raises(ModelError, match=r"differs from the network by up to 0\.0"):
            found.compare(lambda images, answers=answers: answers[len(images)], what="another")
    with pytest.raises(
        ModelError, match=r"'radius' has a mean of 1e\+09 and varies by 1, which float32 outputs cannot represent"
    ):
        in_units_of(1e9, 1.0)
