"""Several labels of an image: read from tables with care, learned, and given above a threshold by every way out."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
import torch.nn.functional as F
from calls import output_of
from golden_sentences import raises
from image_sets import image_table
from PIL import Image

import paceline
from paceline.cli.evaluate import Evaluate
from paceline.cli.predict import Predict
from paceline.data.batch import Batch
from paceline.data.image.datasets import open_dataset
from paceline.data.image.selection import keep_known_classes
from paceline.data.image.sets.synthetic import draw_figures
from paceline.data.slices import SampleSlice
from paceline.errors import DataError, PacelineError, RecipeError
from paceline.host.world import World
from paceline.inference.export import ExportRequest, export
from paceline.inference.predict import open_predictor
from paceline.recipe.data import Data
from paceline.recipe.load import load_recipe
from paceline.tasks.image_multilabel import AsymmetricLoss, ImageMultilabel
from paceline.tasks.labelling import ImageLabeller, Outputs
from paceline.tasks.task import build_task
from paceline.trainer.evaluate_target import EvaluationRequest, evaluate_target
from paceline.trainer.fake_batch import with_placeholder_data
from paceline.trainer.train import plan_only
from paceline_ops.serving.app import _shown

CPU = torch.device("cpu")
FIGURES = ["circle", "square", "triangle"]
SHORT = {
    "train.duration": "2 epochs",
    "train.ema": "off",
    "data.samples": 64,
    "data.mix.mixup": 0.2,
    "batch.global_size": 16,
    "model.options": {"channels": 2},
    "parallel.device": "cpu",
    "telemetry.trackers": [],
    "evaluate.thresholds": {"circle": 0.45, "square": 0.4},
}


def opened(path: Path, kind: str = "csv", **keys: Any) -> Any:
    data = Data(**{"dataset": kind, "path": str(path), "validation_fraction": 0, **keys})
    return open_dataset(data, several_labels=True)


def test_columns_of_flags_hold_0_or_1_and_all_others_are_told_at_once(tmp_path: Path) -> None:
    bad = ["2,1", ",0", "0.5,1", "yes,1", "-1,1", "nan,1"]
    path = image_table(tmp_path, ["1,0", " 0 ,1.0", "False,0", *bad], "image,cat,dog")
    keys: dict[str, Any] = {"target_columns": ("cat", "dog")}
    with pytest.raises(DataError) as refused:
        opened(path, **keys)
    said = str(refused.value)
    assert f"line 5 of {str(path)!r} has '2' in the column 'cat', but a label is 0 or 1: correct it" in said
    assert "5 more: line 6 of" in said
    found = opened(path, **keys, on_bad="skip")
    assert found.train.labels.tolist() == [[1, 0], [0, 1], [0, 0]]
    assert (found.classes, found.selection["rows_left_out"]) == (("cat", "dog"), len(bad))


def test_a_cell_of_names_has_any_number_of_them(tmp_path: Path) -> None:
    rows = ["dog,train", "cat;dog,train", " big dog ; cat;,train", ",train"]
    found = opened(image_table(tmp_path, [*rows, "dog;dog,train"], "image,label,split"))
    assert found.classes == ("big dog", "cat", "dog")
    assert found.train.labels.tolist() == [[0, 0, 1], [0, 1, 1], [1, 1, 0], [0, 0, 0], [0, 0, 1]]
    assert opened(image_table(tmp_path, [*rows, "cat,val"], "image,label,split")).validation.labels.tolist() == [
        [0, 1, 0]
    ]
    with raises(DataError, path="table.csv"):
        opened(image_table(tmp_path, [*rows, "cow,val"], "image,label,split"))
    with raises(DataError, path="table.csv"):
        opened(image_table(tmp_path, [",train", ";,train"], "image,label,split"))


@pytest.mark.parametrize(
    "cells",
    [
        ["['cat']", "['cat', 'dog']", "[]", "['dog']"],
        ['["cat"]', '["cat","dog"]', "[ ]", '["dog"]'],
        ["('cat',)", "{'dog', 'cat'}", "{}", '["dog"]'],
        ["['cat']", "['cat' 'dog']", "[]", " ['dog'] "],  # numpy's
    ],
)
def test_a_cell_shows_a_list_in_another_notation(tmp_path: Path, cells: list[str]) -> None:
    quoted = ['"{}",train'.format(cell.replace('"', '""')) for cell in cells]
    found = opened(image_table(tmp_path, quoted, "image,label,split"))
    assert found.classes == ("cat", "dog")
    assert found.train.labels.tolist() == [[1, 0], [1, 1], [0, 0], [0, 1]]


@pytest.mark.parametrize(
    ("cells", "quoted"),
    [
        (["cat", "dog", "cat|dog", ""], "each name like 'cat|dog' (1 of 3) is taken for one class"),
        (["cat", "dog", "cat, dog", ""], "each name like 'cat, dog' (1 of 3) is taken for one class"),
        (["cat", "dog", "cat/dog", ""], "each name like 'cat/dog' (1 of 3) is taken for one class"),
        (["cat", "dog", "dog & cat", ""], "each name like 'dog & cat' (1 of 3) is taken for one class"),
        (["cat", "dog", "cat\tdog", ""], "each name like 'cat\\tdog' (1 of 3) is taken for one class"),
        (["a|b", "b|c", "a|c"], "each name like 'a|b' (3 of 3) is taken for one class: separate several labels"),
        (["{a,b}", "{b}", "{c}"], "each name like '{a,b}' (3 of 3) is taken for one class"),
        (["clear primary", "primary haze", "clear", "haze", "haze clear", "primary"], "each name like 'clear primary'"),
        (["tench, Tinca tinca", "hot dog", "a (b)", "AC/DC"], ""),
    ],
)
def test_names_that_join_others_are_told(tmp_path: Path, cells: list[str], quoted: str) -> None:
    path = image_table(tmp_path, [f'"{cell}",train' for cell in cells], "image,label,split")
    said = opened(path).reasons.get("classes", "")
    assert said.startswith(quoted)
    assert bool(said) == bool(quoted)


def test_metrics_that_held_out_images_leave_undefined_are_not_reported(tmp_path: Path) -> None:
    path = image_table(tmp_path, ["cat,train", "dog,train", ",val", ",val"], "image,label,split")
    keys: dict[str, Any] = {"data.dataset": "csv", "data.path": str(path), "data.samples": None, "data.image_size": 32}
    keys |= {"evaluate.thresholds": 0.5}
    keys |= {"train.duration": "2 steps", "batch.global_size": 2, "evaluate.every": "1 steps"}
    result = paceline.train("figures", overrides={**SHORT, **keys}, run_dir=tmp_path / "run", quiet=True)
    assert (result.metrics["best"]["metric"], "map" in result.metrics) == ("loss", False)
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert "map, macro_f1, micro_f1: undefined and not reported, since no held-out image has" in json.dumps(plan)
    with pytest.raises(RecipeError, match=r"evaluate\.metric=map is not a metric of this task; choose one of: loss"):
        plan_only(load_recipe("figures", {**SHORT, **keys, "evaluate.metric": "map"}))


@pytest.mark.parametrize("kind", ["bytes", "path"])
def test_parquet_tables_are_read_alike(tmp_path: Path, kind: str) -> None:
    image_table(tmp_path, ["1"] * 3, "image,label")
    images = [(tmp_path / f"{place}.png").read_bytes() if kind == "bytes" else f"{place}.png" for place in range(3)]

    def read(column: str, cells: list[Any], **keys: Any) -> Any:
        pa.parquet.write_table(pa.table({"image": images, column: cells}), tmp_path / "t.parquet")
        return opened(tmp_path / "t.parquet", "parquet", **keys)

    assert read("cat", [True, False, True], target_columns=("cat",)).train.labels.tolist() == [[1], [0], [1]]
    for cells in (["b;a", None, "a"], [["b", "a"], [], ["a"]]):
        assert read("labels", cells).train.labels.tolist() == [[1, 1], [0, 0], [1, 0]]
    with pytest.raises(DataError, match=r"row 1 .* has 3 in the column 'cat', but a label is 0 or 1"):
        read("cat", [1, 3, 0], target_columns=("cat",))
    with pytest.raises(DataError, match=r"row 2 .* has the label 0\.5, but labels are whole numbers from 0"):
        read("labels", [[], [], [0.5]])


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"data.mix.cutmix": 1.0}, "data.mix.cutmix=1 .*use data.mix.mixup"),
        ({"train.loss": "cross_entropy"}, "train.loss=cross_entropy is not a loss of task=image_multilabel; use bce"),
        ({"train.loss": "focal"}, "train.loss=focal is not a loss of task=image_multilabel"),
        ({"task": "image_classification"}, "figures has any number of labels per image: use task=image_multilabel"),
        ({"data.dataset": "digits", "data.samples": None}, "data.dataset=digits has one for each"),
        ({"evaluate.thresholds": {"sqare": 0.5}}, "names 'sqare', .*Did you mean 'square'"),
        ({"evaluate.thresholds": 1}, "evaluate.thresholds: found 1, but it must be less than 1"),
        ({"train.loss": "asl", "train.loss_options": {"clip": 1}}, "found clip=1, but it must be a number from 0 to"),
        (
            {"train.label_smoothing": 0.1},
            "train.label_smoothing=.* has no effect: .* assigns any number of labels",
        ),
        (
            {"train.class_weights": "balanced"},
            "train.class_weights=.* has no effect: .* assigns any number of labels",
        ),
        ({"data.sampling": "balanced"}, "data.sampling=.* has no effect"),
        ({"evaluate.augment": "flip"}, "evaluate.augment=flip has no effect"),
        ({"evaluate.top_k": 3}, "evaluate.top_k=.* has no effect: .* assigns any number of labels"),
    ],
)
def test_what_it_does_not_do_is_refused(change: dict[str, Any], error: str) -> None:
    with pytest.raises(PacelineError, match=error):
        paceline.train("figures", overrides={**SHORT, **change})


def test_some_of_the_classes_keep_their_columns_of_the_weights(tmp_path: Path) -> None:
    found = opened(image_table(tmp_path, ["a;c", "c", "a", ""], "image,label"))
    known = keep_known_classes(found, ("x", "c", "b", "a"))
    assert known.train.labels.tolist() == [[0, 1, 0, 1], [0, 1, 0, 0], [0, 0, 0, 1], [0, 0, 0, 0]]
    assert known.left_out == ("2 of the 4 classes of the weights have no images: x, b",)


def test_thresholds_are_of_this_task_only(trained: Path) -> None:
    with raises(RecipeError, key="evaluate.thresholds", rule="with effect"):
        paceline.train("digits", overrides={"evaluate.thresholds": 0.3})
    report = evaluate_target(EvaluationRequest(target=trained, overrides=("evaluate.thresholds=0.999",)))
    assert (report.metrics["macro_f1"], [each["threshold"] for each in report.per_class]) == (0, [0.999] * 3)


def test_a_recipe_for_classes_becomes_one_for_labels(tmp_path: Path) -> None:
    path = image_table(tmp_path, [f"{'a;b' if place % 2 else 'a'}" for place in range(10)], "image,label")
    (tmp_path / "tags.yaml").write_text(
        f"base: image_folder\ntask: image_multilabel\ndata: {{dataset: csv, path: {path}}}\n"
    )
    loaded = load_recipe(str(tmp_path / "tags.yaml"))
    assert loaded.recipe.train.loss == "bce"
    assert with_placeholder_data(replace(loaded.recipe, data=replace(loaded.recipe.data, path=None)))[1] is None
    task = build_task(loaded.recipe)
    facts = task.data_facts(World())
    assert (facts.description["classes"], facts.description["label_thresholds"]) == (2, [0.5, 0.5])
    assert "train.label_smoothing" in facts.unused
    answers, targets = torch.randn(4, 2), torch.ones(4, 2)
    wanted = F.binary_cross_entropy_with_logits(answers, targets)
    assert task.loss(lambda inputs: inputs, batch_of(answers, targets)) == wanted


def test_classes_without_images_are_told(tmp_path: Path) -> None:
    path = image_table(tmp_path, ["1,0,0,train", "1,1,0,train", "1,0,0,val"], "image,a,b,c,split")
    keys = {"data.dataset": "csv", "data.path": str(path), "data.samples": None}

    def told(columns: list[str]) -> str:
        recipe = load_recipe("figures", {**keys, "data.target_columns": columns}).recipe
        return build_task(recipe).data_facts(World()).reasons["data.classes"]

    assert told(["a", "b", "c"]) == "1 of 3 classes have no image to train on"
    assert told(["a", "b"]) == "1 of 2 classes have no held-out image; map and macro_f1 skip them"


def batch_of(answers: torch.Tensor, targets: torch.Tensor) -> Batch:
    ids = np.arange(len(answers))
    return Batch(answers, targets, ids, SampleSlice(step=0, epoch=0, logical_rank=0, ids=ids, step_weight=len(ids)))


def by_hand(x: float, t: float, negative: float, positive: float, clip: float) -> float:
    """The asymmetric loss of one question, as the paper writes it."""
    p = 1 / (1 + math.exp(-x))
    q = max(p - clip, 0)
    return -(t * (1 - p) ** positive * math.log(p) + (1 - t) * q**negative * math.log(1 - q))


@pytest.mark.parametrize(("loss", "options"), [("bce", {}), ("asl", {}), ("asl", {"gamma_negative": 0.5, "clip": 0})])
def test_losses_are_torchs_and_the_papers(loss: str, options: dict[str, float]) -> None:
    task = build_task(
        load_recipe("figures", {**SHORT, "train.loss": loss, "train.loss_options": options or None}).recipe
    )
    answers, targets = torch.randn(5, 3) * 3, torch.tensor([[0, 1, 0.3]] * 5)
    usual = {"gamma_negative": 4.0, "gamma_positive": 1.0, "clip": 0.05, **options}
    hand = [
        [by_hand(x, t, *usual.values()) for x, t in zip(row, said, strict=True)]
        for row, said in zip(answers.tolist(), targets.tolist(), strict=True)
    ]
    wanted = float(F.binary_cross_entropy_with_logits(answers, targets)) if loss == "bce" else float(np.mean(hand))
    whole = task.loss(lambda inputs: inputs, batch_of(answers, targets))
    assert float(whole) == pytest.approx(wanted, rel=1e-6)
    parts = [float(task.loss(lambda inputs: inputs, batch_of(answers[at], targets[at]))) for at in ([0, 1, 2], [3, 4])]
    assert (3 * parts[0] + 2 * parts[1]) / 5 == pytest.approx(float(whole), rel=1e-6)


def test_the_asymmetric_loss_has_gradients_at_the_ends() -> None:
    far = torch.tensor([[-200.0, 200.0, 0.0, -3.0]], requires_grad=True)
    for options in ({}, {"gamma_negative": 0.5, "gamma_positive": 0.5, "clip": 0}, {"gamma_negative": 0, "clip": 0.3}):
        for targets in (torch.zeros(1, 4), torch.ones(1, 4)):
            (gradient,) = torch.autograd.grad(AsymmetricLoss(**options)(far, targets).sum(), far)
            assert gradient.isfinite().all()
    plain = AsymmetricLoss(0, 0, 0)(far, torch.tensor([[0.0, 1, 0.2, 1]]))
    assert plain == F.binary_cross_entropy_with_logits(far, torch.tensor([[0.0, 1, 0.2, 1]]))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two epochs."""
    run = tmp_path_factory.mktemp("figures") / "run"
    paceline.train("figures", overrides=SHORT, run_dir=run, quiet=True)
    return run


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The held-out figures as files."""
    folder = tmp_path_factory.mktemp("pictures")
    for place, image in enumerate(draw_figures(64, 6)[0]):
        Image.fromarray(image[:, :, 0]).save(folder / f"{place}.png")
    return folder


def test_the_first_batch_is_shown_with_its_labels(trained: Path) -> None:
    captions = [each["caption"] for each in json.loads((trained / "first_batch.json").read_text())["examples"]]
    assert {told.split(" ")[0] for caption in captions for told in caption.split(", ")} <= {*FIGURES, ""}
    assert any(", " in caption for caption in captions)


@pytest.fixture(scope="module")
def evaluated(trained: Path) -> tuple[Any, list[set[str]]]:
    """The probabilities that evaluation gives the first held-out figures, [6, 3], and their labels."""
    file = trained.parent / "evaluated.jsonl"
    evaluate_target(EvaluationRequest(target=trained, predictions=file))
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [[line[f"target_{name}"] for name in FIGURES] for line in lines] == draw_figures(64, 6)[1].tolist()
    labels = [{name for name in FIGURES if line[f"predicted_{name}"]} for line in lines]
    return np.array([[line[f"probability_{name}"] for name in FIGURES] for line in lines]), labels


def answers_of(target: Path, pictures: Path, wanted: tuple[Any, list[set[str]]]) -> list[Any]:
    """What is predicted of the figures, which is what evaluation says."""
    predictor = open_predictor(target, device=CPU)
    files = sorted(pictures.glob("?.png"))
    answers = predictor.answer([predictor.prepare(path.read_bytes()) for path in files], 1)
    rows = [each.row() for each in answers]
    assert np.array([list(row["numbers"].values()) for row in rows]) == pytest.approx(wanted[0], abs=1e-5)
    assert [set(row["labels"]) for row in rows] == wanted[1]
    assert all(list(row["probabilities"]) == sorted(row["probabilities"], reverse=True) for row in rows)
    return list(answers)


def test_predictions_are_those_of_evaluation(trained: Path, pictures: Path, evaluated: Any, tmp_path: Path) -> None:
    probabilities, given = evaluated
    assert given == [{FIGURES[at] for at in np.flatnonzero(row > [0.45, 0.4, 0.5])} for row in probabilities]
    assert any(given)
    answers = answers_of(trained, pictures, evaluated)
    assert [each.description() == "no label" for each in answers] == [not each for each in given]
    served = _shown("0.png", answers[0], 9, open_predictor(trained, device=torch.device("cpu")))
    assert (set(served.labels), served.numbers) == (given[0], answers[0].numbers)
    (pictures / "broken.png").write_bytes(b"no picture")
    assert "1 of them unreadable" in output_of(Predict, trained, pictures, "--output", tmp_path / "out.csv")
    lines = list(csv.DictReader((tmp_path / "out.csv").read_text().splitlines()))
    assert list(lines[0]) == ["path", "labels", *FIGURES, "error"]
    assert [{*row["labels"].split(";")} - {""} for row in lines[:6]] == given
    assert (lines[6]["labels"], lines[6]["circle"], bool(lines[6]["error"])) == ("", "", True)
    output_of(Predict, trained, pictures / "0.png", "--output", tmp_path / "out.parquet")
    (row,) = pa.parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert (set(row["labels"]), list(row["numbers"])) == (given[0], FIGURES)
    assert "--top-k" in output_of(Predict, trained, pictures / "0.png", "--top-k", "2", code=2)


def test_by_default_no_label_is_left_out() -> None:
    class Labeller(ImageLabeller):
        probabilities: Any = None

    shown: Any = None
    assert Labeller(Outputs(tuple("abcde"), thresholds=(0.5,) * 5), shown).usual_top_k == 5


def test_thresholds_may_be_others(trained: Path, pictures: Path) -> None:
    def labels(thresholds: str) -> list[str]:
        (row,) = json.loads(output_of(Predict, trained, pictures / "0.png", "--thresholds", thresholds, "--json"))
        return sorted(row["labels"])

    assert (labels("0.000001"), labels("0.999999")) == (FIGURES, [])
    assert "square" in labels("{square: 0.000001}")
    predictor: Any = open_predictor(trained, device=CPU)
    predictor.set_thresholds({"square": 0.1})
    assert predictor.outputs.thresholds == (0.45, 0.1, 0.5)
    for thresholds, said in (("{sqare: 0.1}", "Did you mean 'square'"), ("2", "must be less than 1")):
        with pytest.raises(PacelineError, match=said):
            output_of(Predict, trained, pictures / "0.png", "--thresholds", thresholds)


def test_a_subclass_has_the_loss_of_labels(tmp_path: Path) -> None:
    class Mine(ImageMultilabel):
        pass

    plain = {"task": None, "train.loss": None, "evaluate.thresholds": None}
    overrides = {**SHORT, **plain, "train.ema": None, "train.duration": "1 steps", "evaluate.every": "off"}
    result = paceline.train("figures", overrides=overrides, run_dir=tmp_path / "run", task=Mine, quiet=True)
    assert load_recipe(result.run_dir / "recipe.yaml").recipe.train.loss == "bce"


@pytest.mark.needs("onnx", "onnxruntime")
@pytest.mark.thorough
def test_an_onnx_file_says_what_the_network_does(trained: Path, pictures: Path, evaluated: Any, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="needs onnxruntime")
    export(ExportRequest(target=trained, output=tmp_path / "m.onnx", form="onnx"))
    answers_of(tmp_path / "m.onnx", pictures, evaluated)


def test_evaluation_repeats_and_shows_each_class(trained: Path) -> None:
    report = evaluate_target(EvaluationRequest(target=trained))
    kept = json.loads((trained / "summary.json").read_text())["metrics"]
    assert {name: kept[name] for name in ("loss", "map", "macro_f1", "micro_f1")} == report.metrics
    details = json.loads((trained / "evaluation" / "details.json").read_text())
    assert details["label_scores"] == list(report.per_class)
    assert "best threshold" in output_of(Evaluate, trained, "--per-class")
    answer = json.loads(output_of(Evaluate, trained, "--per-class", "--json"))
    assert [each["class"] for each in answer["per_class"]] == [each["class"] for each in report.per_class]
    assert answer["mean"]["average_precision"] == pytest.approx(report.metrics["map"])
    page = (trained / "report.html").read_text()
    assert "Precision and recall by class" in page
    assert "Thresholds: the best are fitted to these samples" in page


def test_a_hub_folder_of_timms_is_refused(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="any number of labels"):
        export(ExportRequest(target=trained, output=tmp_path / "hub", form="timm"))


def test_figures_are_a_function_of_their_number() -> None:
    images, labels = draw_figures(0, 40)
    again = draw_figures(13, 5)
    assert np.array_equal(again[0], images[13:18])
    assert np.array_equal(again[1], labels[13:18])
    assert {*map(tuple, labels.astype(int).tolist())} >= {(0, 0, 0), (1, 1, 1), (1, 0, 0), (0, 1, 1)}
    light = (images > 128).sum(axis=(1, 2, 3))
    assert (light[labels.sum(axis=1) == 0] == 0).all()
    assert (light[labels.sum(axis=1) > 0] > 30).all()
    assert isinstance(build_task(load_recipe("figures").recipe), ImageMultilabel)
