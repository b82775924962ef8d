"""Labels that were moved are found by networks that did not learn them; others are left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_sentences import raises
from image_sets import photo_recipe
from numpy.typing import NDArray
from PIL import Image
from tiny_text import reviews, write_lines

import paceline
from paceline.errors import RecipeError
from paceline.recipe.load import load_recipe
from paceline.tasks.task import build_task
from paceline_data.check_data import CheckData, _lines
from paceline_data.inspect.label_noise import estimate_noise, folds_of
from paceline_data.inspect.wrong_labels import WrongLabel, WrongLabels, _without, find_wrong_labels
from paceline_data.reviewing.find import MISTAKE, WRONG_LABEL, find_doubts, in_a_child

CLASSES = ("across", "down", "plain")


def predictions(seed: int, moved: float) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.bool_]]:
    """Scores of 2,000 samples in five classes, of which some are hard; labels; and which of these were moved."""
    draws = np.random.default_rng(seed)
    scores = draws.normal(0, 1, (2000, 5)) + 5 * np.eye(5)[draws.integers(0, 5, 2000)] * draws.random((2000, 1))
    chances = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    labels = (chances.cumsum(axis=1) < draws.random((2000, 1))).sum(axis=1)
    scores = 4 * scores  # what is sure in truth
    labels = np.where(draws.random(2000) < 0.9, scores.argmax(axis=1), labels)
    is_moved = draws.random(2000) < moved
    labels = np.where(is_moved, (labels + draws.integers(1, 5, 2000)) % 5, labels)
    return scores.astype(np.float32), labels, is_moved


def test_labels_of_texts_are_not_reviewed_as_files() -> None:
    row = {"id": 1, "sample": "rows.jsonl, line 2", "given": "a", "suggested": "b", "score": 0.9, "probability": 0.9}
    shares: Any = {"checked": {"validation": 20}, "agreement": {"validation": 0.9}, "findable": {"validation": 0.5}}
    labels = WrongLabels(run="run", found=(WrongLabel(split="validation", **row),), pictures={}, **shares)
    said = " ".join(map(str, _lines(None, labels, verbose=False, following="")))
    assert "look at them with --output DIR" in said
    assert "review" not in said


@pytest.mark.parametrize("sharpness", [0.1, 1.0, 6.0])
def test_a_network_may_be_as_sure_as_it_likes(sharpness: float) -> None:
    scores, labels, moved = predictions(0, 0.05)
    found = estimate_noise(np.float32(sharpness) * scores, labels)
    likely = found.wrong > 0.5
    assert likely[moved].mean() > 0.7
    assert found.wrong[moved].mean() > 10 * found.wrong[~moved].mean()
    assert abs(found.rate - estimate_noise(scores, labels).rate) <= 0.01
    assert ((found.likely != labels) & (found.probability >= 0)).all()


def test_the_share_of_moved_labels_is_estimated() -> None:
    draws = np.random.default_rng(0)
    truth = draws.integers(0, 4, 3000)
    scores = (6 * np.eye(4)[truth] + draws.normal(0, 1, (3000, 4))).astype(np.float32)
    for share in (0.0, 0.03, 0.2):
        moved = draws.random(3000) < share
        labels = np.where(moved, (truth + draws.integers(1, 4, 3000)) % 4, truth)
        found = estimate_noise(scores, labels)
        assert found.rate == pytest.approx(share, abs=0.015)
        assert ((found.wrong > 0.5) == moved).mean() > 0.99
        assert (found.likely[moved] == truth[moved]).mean() > 0.98 if moved.any() else True


@pytest.mark.parametrize("moved", [0.02, 0.1])
@pytest.mark.parametrize("noise", [0.5, 1.5, 4.0])
def test_the_share_that_is_found_is_told(moved: float, noise: float) -> None:
    draws = np.random.default_rng(1)
    truth = draws.integers(0, 4, 4000)
    scores = 4 * np.eye(4)[truth] + noise * draws.normal(0, 1, (4000, 4))
    is_moved = draws.random(4000) < moved
    labels = np.where(is_moved, (truth + draws.integers(1, 4, 4000)) % 4, truth)
    found = estimate_noise(scores.astype(np.float32), labels)
    assert found.findable == pytest.approx((found.wrong[is_moved] >= 0.8).mean(), abs=0.12)
    assert (found.findable > 0.9) == (noise < 1)
    assert (found.findable < 0.4) == (noise > 2)


def test_folds_hold_all_copies_of_a_sample_and_each_class_alike() -> None:
    labels = np.repeat(np.arange(3), (50, 30, 6))
    groups = np.arange(86)
    groups[[7, 60, 85]] = 3  # in other classes too
    uniform = np.random.default_rng(0).random(86)
    folds = folds_of(groups, labels, 5, uniform)
    assert len(set(folds[groups == 3])) == 1
    counts = np.array(
        [np.bincount(folds[(labels == each) & (groups == np.arange(86))], minlength=5) for each in range(3)]
    )
    assert (np.ptp(counts, axis=1) <= 1).all()
    assert (folds == folds_of(groups, labels, 5, uniform)).all()
    assert (folds != folds_of(groups, labels, 5, uniform[::-1])).any()


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, set[str]]:
    """Grey pictures with stripes across, down, or none, and the paths of those in a wrong folder."""
    root, moved, draws = tmp_path_factory.mktemp("stripes") / "photos", set(), np.random.default_rng(0)
    for number in range(210):
        stripes = number % 3
        pixels = draws.integers(0, 60, (16, 16), dtype=np.uint8)
        pixels[(np.s_[::2], np.s_[:, ::2], np.s_[:0])[stripes]] += 180
        is_moved = number % 19 == 5
        path = root / CLASSES[(stripes + is_moved) % 3] / f"{number:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
        moved |= {str(path)} if is_moved else set()
    return root, moved


def trained(run: Path, data: dict[str, Any]) -> Path:
    """A short run."""
    tree = photo_recipe(
        {**data, "augment": {"crop": "none", "flip": 0.0}},
        train={"duration": "80 steps", "precision": "fp32"},
        optimizer={"lr": 0.1},
        batch={"global_size": 16},
        telemetry={"trackers": [], "report": False},
    )
    paceline.train("image_folder", overrides=flat(tree), run_dir=run, quiet=True)
    return run


def flat(tree: dict[str, Any], path: str = "") -> dict[str, Any]:
    """The overrides of a recipe's tree; options of a model stay together."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{path}{key}.") if isinstance(value, dict) and key != "options" else {path + key: value}
    return found


@pytest.fixture(scope="module")
def run(photos: tuple[Path, set[str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the pictures."""
    return trained(tmp_path_factory.mktemp("stripes") / "run", {"path": str(photos[0])})


def test_a_review_shows_wrong_labels_and_mistakes(run: Path, photos: tuple[Path, set[str]]) -> None:
    found = in_a_child(lambda: find_doubts(str(run), (), folds=None, folder=None, progress=_silent, log=_silent))
    assert found.root == photos[0]
    labels = find_wrong_labels(run)
    by_kind = {kind: [each for each in found.doubts if each.kind == kind] for kind in (WRONG_LABEL, MISTAKE)}
    for kind, expected in ((WRONG_LABEL, labels.found), (MISTAKE, labels.mistakes)):
        assert [str(found.root / each.file) for each in by_kind[kind]] == [each.sample for each in expected]
        assert [each.suggested for each in by_kind[kind]] == [each.suggested for each in expected]
    reported = {each["name"] for each in paceline.training.TrainResult.of(run).mistakes(every=True)}
    answered = {each.sample for each in labels.mistakes}
    assert answered <= reported <= answered | {each.sample for each in labels.found}


def _silent(*_: object) -> None:
    pass


def test_moved_pictures_are_found_in_folds_and_shown(run: Path, photos: tuple[Path, set[str]], tmp_path: Path) -> None:
    lines: list[str] = []
    result = CheckData(source=str(run), folds=2, output=tmp_path / "out").run(lines.append)
    labels: dict[str, Any] = dict(result.to_json())["labels"]  # type: ignore[call-overload]  # the document is a mapping
    named = {each["sample"] for each in labels["entries"]}
    assert len(named & photos[1]) >= 0.6 * len(photos[1])
    assert len(named - photos[1]) <= 1
    assert sum(labels["checked"].values()) == 210
    assert labels["not_checked"] == ""
    for each in labels["entries"]:
        assert each["given"] == Path(each["sample"]).parent.name != each["suggested"]
    assert [each["score"] for each in labels["entries"]] == sorted(
        (each["score"] for each in labels["entries"]), reverse=True
    )
    shown = result.__paceline__()
    assert shown.ok is True
    lines_shown = "\n".join(map(str, shown.blocks))
    for split in ("validation", "train"):
        assert f"{labels['checked'][split]} of {split} checked: the network predicts" in lines_shown
        assert labels["findable"][split] > 0.5
    assert len(shown.on_page[0].pictures) == len(named)  # type: ignore[attr-defined]  # a gallery
    assert all(each.data.startswith("data:image/png") for each in shown.on_page[0].pictures)  # type: ignore[attr-defined]  # a gallery
    assert sum("training on" in each for each in lines) == 2
    assert sorted(each.name for each in (tmp_path / "out" / "folds").iterdir()) == [f"fold-{n}-of-2" for n in range(2)]


def test_without_folds_training_samples_are_not_checked(run: Path) -> None:
    found = find_wrong_labels(run)
    assert set(found.checked) == {"validation"}, found.not_checked
    assert found.not_checked == "training samples are checked with --folds 5"
    assert {each.split for each in found.found} <= {"validation"}


def test_a_fold_is_predicted_by_a_network_that_has_not_seen_it(run: Path) -> None:
    recipe = load_recipe(run).recipe
    whole, part = build_task(recipe).dataset, _without(np.array([3, 9, 40]), recipe).dataset  # type: ignore[attr-defined]  # images have one
    left = [whole.train.path(each) for each in (3, 9, 40)]
    assert [part.validation.path(each) for each in range(3)] == left
    paths = {part.train.path(each) for each in range(len(part.train))}
    assert len(paths) == len(whole.train) - 3
    assert paths.isdisjoint(left)
    assert part.digest != whole.digest


MOVED_ROWS = {7, 30, 51, 88}


@pytest.fixture(scope="module")
def text_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on lines of text, of which four have the wrong label."""
    folder, rows = tmp_path_factory.mktemp("lines"), reviews(120)
    for row in MOVED_ROWS:
        rows[row]["label"] = {"animal": "other", "other": "animal"}[rows[row]["label"]]
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        "task: text_classification\nmodel: {name: bert, options: {depth: 1, width: 16, heads: 2}}\n"
        f"data: {{dataset: text_table, path: {write_lines(folder / 'rows.jsonl', rows)}, text: {{rows: single}}}}\n"
        "batch: {global_size: 16}\noptimizer: {name: adamw, lr: 0.02}\ntrain: {duration: 60 steps, precision: fp32}\n"
        "parallel: {device: cpu, threads: 1}\ntelemetry: {trackers: [], report: off}\n"
    )
    paceline.train(recipe, run_dir=folder / "run", quiet=True)
    return folder / "run"


def test_rows_of_text_are_found(text_run: Path) -> None:
    found: WrongLabels = find_wrong_labels(text_run, folds=2)
    named = {each.sample.partition(" of ")[0] for each in found.found}
    assert sum(found.checked.values()) == 120
    assert len(named & {f"row {each + 1}" for each in MOVED_ROWS}) >= 3
    assert len(named) <= 12
    assert found.pictures == {}


def test_what_has_several_labels_is_not_looked_at(tmp_path: Path) -> None:
    overrides = {"train.duration": "2 steps", "telemetry.trackers": [], "telemetry.report": False, "data.samples": 40}
    paceline.train("figures", overrides=overrides, run_dir=tmp_path / "run", quiet=True)
    found = find_wrong_labels(tmp_path / "run", folds=2)
    assert not found.checked
    assert found.not_checked == "each image or text needs one class, and task=image_multilabel learns something else"


def test_data_that_changed_are_not_judged(run: Path, photos: tuple[Path, set[str]], tmp_path: Path) -> None:
    (copy := tmp_path / "photos").mkdir()
    for label in CLASSES:
        (copy / label).mkdir()
        for path in sorted((photos[0] / label).iterdir())[1:]:
            (copy / label / path.name).write_bytes(path.read_bytes())
    assert find_wrong_labels(run, [f"data.path={copy}"]).not_checked.startswith("the data have changed since the run")


@pytest.mark.parametrize("classes", [2, 3, 10])
@pytest.mark.parametrize("count", [40, 400])
def test_predictions_by_chance_judge_nothing(classes: int, count: int) -> None:
    draws = np.random.default_rng(0)
    scores = draws.normal(0, 1, (count, classes)).astype(np.float32)
    assert estimate_noise(scores, draws.integers(0, classes, count)).findable < 0.05


def test_options_that_do_nothing_with_a_run_are_refused(run: Path, text_run: Path) -> None:
    with raises(RecipeError, key="--quarantine", value=Path("aside")):
        CheckData(source=str(run), quarantine=Path("aside")).run(print)
    with raises(RecipeError, key="--workers", value=2):
        CheckData(source=str(text_run), workers=2, limit=5).run(print)


def test_folds_need_a_run() -> None:
    with raises(RecipeError, key="--folds", value=3):
        CheckData(source="photos", folds=3).run(print)
