"""Test-time augmentation: several views of an image, averaged, and each image still counted once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_sets import photo_recipe
from PIL import Image
from torch import nn
from torch.nn import functional as F

import paceline
from paceline.errors import PacelineError
from paceline.inference.predict import load_predictor
from paceline.models.small_resnet import small_resnet
from paceline.recipe.load import load_recipe
from paceline.tasks.views import AveragedViews
from paceline.trainer.evaluate_target import EvaluationRequest, evaluate_target
from paceline.trainer.train import plan_only

Make = Callable[..., Any]

VIEWS = {"flip": 2, "flip_shift": 6, "five_crop": 5, "ten_crop": 10}


def shifted_by_a_pixel(images: torch.Tensor) -> list[torch.Tensor]:
    """The images, and moved down right and up left, by indices: what comes in is the row or column beside the edge."""
    height, width = images.shape[2:]
    lower = [1, *range(height - 1)], [1, *range(width - 1)]
    upper = [*range(1, height), height - 2], [*range(1, width), width - 2]
    return [images, *(images[:, :, rows][:, :, :, columns] for rows, columns in (lower, upper))]


def by_hand(model: nn.Module, images: torch.Tensor, kind: str, side: int) -> torch.Tensor:
    """The mean of the views' probabilities, cut with indices."""
    height, width = images.shape[2:]
    if kind == "flip":
        views = [images, images.flip(-1)]
    elif kind == "flip_shift":
        views = [view for moved in shifted_by_a_pixel(images) for view in (moved, moved.flip(-1))]
        probabilities = [model(view).softmax(1) for view in views]
        return (probabilities[0] + probabilities[1]) / 4 + sum(probabilities[2:]) / 8
    else:
        top, left = round((height - side) / 2), round((width - side) / 2)
        corners = [(0, 0), (0, width - side), (height - side, 0), (height - side, width - side), (top, left)]
        views = [images[:, :, y : y + side, x : x + side] for y, x in corners]
        views += [view.flip(-1) for view in views] if kind == "ten_crop" else []
    assert len(views) == VIEWS[kind]
    return torch.stack([model(view).softmax(1) for view in views]).mean(0)


@pytest.mark.parametrize("kind", VIEWS)
@torch.no_grad()
def test_the_answer_is_the_mean_of_the_probabilities(kind: str) -> None:
    torch.manual_seed(0)
    model = small_resnet(5, 3, width=4).eval()
    images = 3 * torch.randn(6, 3, 20, 20).contiguous(memory_format=torch.channels_last)
    answer = AveragedViews(model, kind, 16)(images)
    expected = by_hand(model, images, kind, 16)
    torch.testing.assert_close(answer.exp(), expected)
    targets = torch.arange(6) % 5
    torch.testing.assert_close(F.cross_entropy(answer, targets), F.nll_loss(expected.log(), targets))


@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("kind", VIEWS)
def test_every_view_has_the_images_memory_format(kind: str, memory_format: torch.memory_format) -> None:
    seen: list[bool] = []

    def model(view: torch.Tensor) -> torch.Tensor:
        seen.append(view.is_contiguous(memory_format=memory_format))
        return view.mean(dim=(2, 3))

    AveragedViews(model, kind, 16)(torch.zeros(2, 3, 20, 20).contiguous(memory_format=memory_format))
    assert seen == [True] * VIEWS[kind]


@torch.no_grad()
def test_sure_and_impossible_answers_stay_numbers() -> None:
    """Where a class's probability is too small for a float, in all views or in one."""
    scripted = iter([torch.tensor([[200.0, 0.0]]), torch.tensor([[0.0, 200.0]]), *[torch.tensor([[200.0, 0.0]])] * 2])
    answers = AveragedViews(lambda _: next(scripted), "flip", 0)
    assert answers(torch.zeros(1, 1, 1, 1)).softmax(1).tolist() == [[0.5, 0.5]]
    assert answers(torch.zeros(1, 1, 1, 1)).tolist() == [[0.0, -200.0]]


RECIPE = photo_recipe({"backend": "pytorch"})


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("photos")
    generator = np.random.default_rng(7)
    for split in ("train", "val"):
        for name in ("first", "second"):
            (root / split / name).mkdir(parents=True)
            for number in range(10):
                coarse = generator.integers(0, 256, (4, 4, 3), dtype=np.uint8)
                image = Image.fromarray(coarse).resize((20 + 4 * (number % 3), 24), Image.Resampling.BICUBIC)
                image.save(root / split / name / f"{number}.png")
    return root


@pytest.fixture
def trained(photos: Path, runs: Path) -> Callable[..., Path]:
    """``trained("flip")`` trains with that augmentation of the evaluation."""
    recipe = runs / "photos.yaml"
    recipe.write_text(json.dumps(RECIPE))

    def train(kind: str, **overrides: Any) -> Path:
        overrides = {"data.path": str(photos), "evaluate.augment": kind, **overrides}
        return paceline.train(recipe, overrides=overrides, run_dir=runs / kind, quiet=True).run_dir

    return train


@pytest.mark.parametrize("kind", ["flip", "ten_crop"])
def test_training_evaluation_and_prediction_agree(kind: str, trained: Callable[..., Path], events: Make) -> None:
    run_dir, plain = trained(kind), trained("none")
    file = run_dir / "predictions.jsonl"
    report = evaluate_target(EvaluationRequest(target=run_dir, predictions=file))
    last = events(run_dir, "evaluation")[-1]
    assert (last["samples"], report.samples) == (20, 20)
    assert report.metrics["loss"] == last["loss"]
    assert report.metrics["loss"] != events(plain, "evaluation")[-1]["loss"]
    # Asked of weights that were trained without it, the answer is the same: it belongs to evaluation alone.
    asked = EvaluationRequest(target=plain, overrides=[f"evaluate.augment={kind}"])
    assert evaluate_target(asked).metrics["loss"] == report.metrics["loss"]
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    answers = list(load_predictor(run_dir).predict([Path(line["sample"]) for line in lines], top_k=1))
    probabilities = [answer.probabilities[0] for answer in answers]
    assert probabilities == pytest.approx([line["probability"] for line in lines], rel=1e-5)


def test_crops_are_cut_from_the_larger_picture(trained: Callable[..., Path], photos: Path) -> None:
    """Against pictures that are shown whole and then cut by hand."""
    run_dir = trained("five_crop")
    predictor = load_predictor(run_dir)
    files = sorted((photos / "val").rglob("*.png"))
    whole = load_predictor(run_dir)
    whole._answers = lambda images: by_hand(predictor.network, images, "five_crop", 16).log()
    assert whole.shown.size == round(16 / 0.875)
    ours, expected = (list(each.predict(files, top_k=2)) for each in (predictor, whole))
    assert [each.labels for each in ours] == [each.labels for each in expected]
    for mine, other in zip(ours, expected, strict=True):
        assert mine.probabilities == pytest.approx(other.probabilities, rel=1e-5)


def test_the_memory_back_end_shows_the_larger_picture_too(trained: Callable[..., Path], photos: Path) -> None:
    run_dir = trained("ten_crop")
    files = evaluate_target(EvaluationRequest(target=run_dir))
    memory = evaluate_target(EvaluationRequest(target=run_dir, overrides=["data.backend=memory", "data.workers=null"]))
    assert memory.metrics == files.metrics


def test_the_trained_weights_do_not_know_of_it(trained: Callable[..., Path]) -> None:
    digests = {json.loads((trained(kind) / "summary.json").read_text())["weights_sha256"] for kind in ("none", "flip")}
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"evaluate.augment": "ten_crop", "data.evaluation_crop": 1.0}, "all crops of 16 pixels are the centre"),
        ({"evaluate.augment": "mirror"}, r"evaluate\.augment: found 'mirror', but it must be 'none', 'flip'"),
    ],
)
def test_what_has_no_effect_is_found_by_the_plan(
    overrides: dict[str, Any], message: str, photos: Path, tmp_path: Path
) -> None:
    recipe = tmp_path / "photos.yaml"
    recipe.write_text(json.dumps(RECIPE))
    with pytest.raises(PacelineError, match=message):
        plan_only(load_recipe(recipe, {"data.path": str(photos), **overrides}))


def test_without_evaluation_it_is_for_prediction(tiny_recipe: Path) -> None:
    loaded = load_recipe(tiny_recipe, {"evaluate.augment": "flip", "evaluate.every": "off"})
    assert loaded.checked(plan_only(loaded).unused).notices == ()
    also = load_recipe(tiny_recipe, {"evaluate.top_k": 2, "evaluate.every": "off"})
    with pytest.raises(PacelineError, match=r"'evaluate\.top_k=2' has no effect: nothing is evaluated"):
        also.checked(plan_only(also).unused)
