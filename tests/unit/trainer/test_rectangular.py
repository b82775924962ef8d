"""Evaluation at each image's own aspect ratio: the same answers as one image at a time, at any number of processes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from golden_sentences import raises
from image_sets import photo_recipe
from PIL import Image
from torch import nn

import paceline
from paceline.data.image.decode import decode
from paceline.data.image.transforms import evaluation_image
from paceline.data.pipeline import Placement
from paceline.errors import PacelineError
from paceline.host.world import World
from paceline.inference.predict import load_predictor
from paceline.metrics.accumulator import Accumulator
from paceline.models.small_resnet import small_resnet
from paceline.recipe.load import load_recipe, stored_recipe
from paceline.tasks.image_classification import ImageClassification
from paceline.trainer.evaluate_target import EvaluationRequest, evaluate_target
from paceline.trainer.train import plan_only

Make = Callable[..., Any]

CPU = torch.device("cpu")
SIDES = [(20, 20), (20, 30), (30, 20), (16, 40), (40, 16), (21, 25), (20, 90)]
# Of an image of 16 pixels, in steps of 8.
EXPECTED = {(20, 20): (16, 16), (20, 30): (16, 24), (30, 20): (24, 16), (16, 40): (16, 32), (40, 16): (32, 16)}
EXPECTED |= {(21, 25): (16, 16), (20, 90): (16, 32)}
RECIPE = photo_recipe({"channels": 3, "evaluation_shape": "rectangular", "evaluation_multiple": 8})


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures of many shapes, every third one stored lying on its side, and one that is broken."""
    root = tmp_path_factory.mktemp("photos")
    generator = np.random.default_rng(5)
    for split, count in (("train", 8), ("val", 22)):
        for name in ("first", "second"):
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                height, width = SIDES[number % len(SIDES)]
                coarse = generator.integers(0, 256, (3, 4, 3), dtype=np.uint8)
                upright = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
                exif = Image.Exif()
                if number % 3 == 0:
                    exif[0x0112] = 6  # to be turned clockwise when it is shown
                    upright = upright.transpose(Image.Transpose.ROTATE_90)
                upright.save(root / split / name / f"{number:02}.jpg", exif=exif)
    return root


@pytest.fixture
def opened(photos: Path) -> Make:
    """Open the pictures as the trainer does: facts first, then the pipeline, then its workers if there are any."""

    def make(overrides: Any = ()) -> Any:
        task = ImageClassification(stored_recipe(RECIPE, "here", [f"data.path={photos}", *overrides]))
        facts = task.data_facts(World())
        pipeline = task.open_pipeline(Placement(device=CPU))
        pipeline.start(training=False, evaluation=True)
        return task, pipeline, facts

    return make


def shown(pipeline: Any, batch_size: int, world: World | None = None) -> Iterator[tuple[int, torch.Tensor]]:
    for batch in pipeline.evaluation_batches(batch_size, world or World()):
        assert batch.slice.shape == tuple(batch.inputs.shape[2:])
        yield from zip(batch.ids.tolist(), batch.inputs, strict=True)


class Answers(nn.Module):
    """Convolutions alone, in float64: kernels whose bits do not depend on the number of images."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        layers = (nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.layers = nn.Sequential(*layers).double().eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answers: torch.Tensor = self.layers(x.double())
        return answers


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_show_what_single_images_show(workers: int, opened: Make) -> None:
    """Pixels, shapes and predictions bit for bit; logits too where the kernels do not depend on the batch."""
    _, pipeline, _ = opened([f"data.workers={workers}"])
    exact, usual = Answers(), small_resnet(4, 3, width=4).eval()
    singles = dict(shown(pipeline, 1))
    assert sorted(singles) == list(range(44))
    with torch.no_grad():
        for batch_size in (5, 64):
            for batch in pipeline.evaluation_batches(batch_size, World()):
                alone = [singles[sample] for sample in batch.ids.tolist()]
                assert torch.equal(batch.inputs, torch.stack(alone))
                assert torch.equal(exact(batch.inputs), torch.cat([exact(each[None]) for each in alone]))
                together = usual(batch.inputs)
                apart = torch.cat([usual(each[None]) for each in alone])
                torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-6)
                assert torch.equal(together.argmax(1), apart.argmax(1))
    pipeline.close()


def test_each_image_is_shown_at_its_own_shape(opened: Make) -> None:
    """Against the pictures themselves, decoded one by one, whatever they lie beside in a batch."""
    task, pipeline, facts = opened()
    mean, std = (torch.tensor(value).view(3, 1, 1) for value in (task.dataset.mean, task.dataset.std))
    counts: dict[str, int] = {}
    for sample, found in shown(pipeline, 64):
        image = decode(task.dataset.validation.path(sample), 3)
        shape = EXPECTED[image.shape[0], image.shape[1]]
        counts[f"{shape[0]}x{shape[1]}"] = counts.get(f"{shape[0]}x{shape[1]}", 0) + 1
        pixels = evaluation_image(image, shape, 0.875)
        torch.testing.assert_close(found, (pixels / 255 - mean) / std, rtol=1e-5, atol=1e-6)
    assert facts.description["evaluation_shapes"] == counts
    assert len(counts) == 5


def test_any_number_of_processes_finds_the_same(opened: Make) -> None:
    task, pipeline, _ = opened()
    model = small_resnet(2, 3, width=4).eval()
    found = []
    for world_size in (1, 2, 3, 8):
        rows = []
        for rank in range(world_size):
            part = Accumulator(task.metrics, CPU)
            for batch in pipeline.evaluation_batches(5, World(rank=rank, world_size=world_size)):
                with torch.no_grad():
                    part.add(task.score(model, batch))
            rows += part.rows()
        found.append(part.results(rows))
    assert found == found[:1] * 4
    assert found[0][0] == 44


@pytest.fixture
def trained(photos: Path, runs: Path) -> Path:
    recipe = runs / "photos.yaml"
    recipe.write_text(json.dumps(RECIPE))
    overrides = {"data.path": str(photos), "train.duration": "8 steps"}
    return paceline.train(recipe, overrides=overrides, run_dir=runs / "run", quiet=True).run_dir


def test_training_evaluation_and_prediction_agree(trained: Path, photos: Path, events: Make) -> None:
    file = trained.parent / "predictions.jsonl"
    report = evaluate_target(EvaluationRequest(target=trained, predictions=file))
    assert (report.samples, report.metrics["loss"]) == (44, events(trained, "evaluation")[-1]["loss"])
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    # Batches were sorted by shape, and the lines are not.
    assert [line["id"] for line in lines] == list(range(44))
    predictor = load_predictor(trained)
    answers = list(predictor.predict([Path(line["sample"]) for line in lines], top_k=1))
    assert [answer.path for answer in answers] == [Path(line["sample"]) for line in lines]
    assert [answer.labels[0] for answer in answers] == [predictor.classes[line["prediction"]] for line in lines]
    probabilities = [answer.probabilities[0] for answer in answers]
    assert probabilities == pytest.approx([line["probability"] for line in lines], rel=1e-5)
    square = evaluate_target(EvaluationRequest(target=trained, overrides=["data.evaluation_shape=square"]))
    assert square.metrics["loss"] != report.metrics["loss"]


def test_a_broken_picture_is_left_out_of_its_batch(photos: Path, tmp_path: Path, opened: Make) -> None:
    for split in ("train", "val"):
        for name in ("first", "second"):
            (tmp_path / split / name).mkdir(parents=True)
            for path in (photos / split / name).iterdir():
                (tmp_path / split / name / path.name).write_bytes(path.read_bytes())
    (tmp_path / "val" / "first" / "01.jpg").write_bytes(b"torn")
    _, pipeline, _ = opened([f"data.path={tmp_path}", "data.max_broken=1"])
    batches = list(pipeline.evaluation_batches(5, World()))
    assert [each.path for batch in batches for each in batch.broken] == [str(tmp_path / "val" / "first" / "01.jpg")]
    assert sum(len(batch.ids) for batch in batches) == 43


# --------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"data.backend": "memory"}, r"evaluation_shape=rectangular .* memory back-end .* data\.backend=pytorch"),
        (
            {"model.name": "vit_tiny_patch16_224", "model.options": None, "data.image_size": 224},
            r"model\.name=vit_tiny_patch16_224\) does not take images of 224x\d+ pixels .*dynamic_img_size: true",
        ),
        (
            {"model.name": "torchvision:vit_b_32", "model.options": None, "data.image_size": 224},
            r"does not take images of 224x\d+ pixels .*timm's with model\.options=\{dynamic_img_size: true\}",
        ),
        (
            {"evaluate.augment": "five_crop"},
            r"evaluate\.augment=five_crop cuts its crops from a square, and data\.evaluation_shape=rectangular",
        ),
    ],
)
def test_what_cannot_be_done_is_found_by_the_plan(
    overrides: dict[str, Any], message: str, photos: Path, tmp_path: Path
) -> None:
    recipe = tmp_path / "photos.yaml"
    recipe.write_text(json.dumps(RECIPE))
    with pytest.raises(PacelineError, match=message):
        plan_only(load_recipe(recipe, {"data.path": str(photos), **overrides}))


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({}, "every held-out image becomes a square"),
        ({"data.dataset": "image_folder", "data.validation_fraction": 0, "data.channels": 3}, "no images are held out"),
    ],
)
def test_pictures_are_predicted_at_their_shape_whatever_is_held_out(
    asked: dict[str, Any], why: str, photos: Path, tiny_recipe: Path, runs: Path
) -> None:
    if asked:
        asked = {**asked, "data.path": str(photos / "train"), "data.image_size": 16, "batch.global_size": 8}
    shape = {"data.evaluation_shape": "rectangular", "data.evaluation_multiple": 8, "train.duration": "2 steps"}
    plan = plan_only(load_recipe(tiny_recipe, {**asked, **shape}))
    assert "data.evaluation_shape" not in plan.unused
    assert plan.reasons["data.evaluation_shape"] == why
    predictor = load_predictor(
        paceline.train(tiny_recipe, overrides={**asked, **shape}, run_dir=runs / "run", quiet=True).run_dir
    )
    wide = photos / "val" / "first" / "06.jpg"
    with Image.open(wide) as stored:
        assert max(stored.size) == 90
    height, width = predictor.shown.image(wide.read_bytes()).shape[1:]
    assert max(height, width) == 2 * min(height, width)


def test_crops_are_refused_beside_it_where_all_images_are_square(tiny_recipe: Path) -> None:
    asked = {"data.evaluation_shape": "rectangular", "evaluate.augment": "five_crop", "data.evaluation_crop": 0.8}
    with pytest.raises(PacelineError, match=r"five_crop cuts its crops from a square"):
        plan_only(load_recipe(tiny_recipe, asked))


def test_noise_has_one_shape(tiny_recipe: Path) -> None:
    noise = load_recipe(tiny_recipe, {"data.evaluation_shape": "rectangular", "data.dataset": "synthetic"})
    with raises(PacelineError, key="data.evaluation_shape", value="rectangular"):
        plan_only(noise)


def test_evaluation_refuses_it_where_all_images_are_square(train_tiny: Make, runs: Path) -> None:
    run_dir = paceline.train(
        "digits",
        overrides={"train.duration": "1 steps", "parallel.device": "cpu", "telemetry.trackers": []},
        run_dir=runs / "digits",
        quiet=True,
    ).run_dir
    request = EvaluationRequest(target=run_dir, overrides=["data.evaluation_shape=rectangular"])
    with raises(PacelineError, key="data.evaluation_shape", rule="with effect"):
        evaluate_target(request)


def test_a_network_of_ones_own_is_tried_too(train_tiny: Make) -> None:
    """Before training, not at the first evaluation."""
    with pytest.raises(PacelineError, match=r"the network Sequential .* 12 pixels .* global average pooling"):
        train_tiny(
            "run", {"data.evaluation_size": 12}, make_network=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
        )


def test_a_transformer_that_interpolates_its_positions_is_taken(photos: Path, tmp_path: Path) -> None:
    options = {"depth": 1, "img_size": 32, "dynamic_img_size": True}
    recipe = tmp_path / "photos.yaml"
    recipe.write_text(json.dumps({**RECIPE, "model": {"name": "vit_tiny_patch16_224", "options": options}}))
    changes = {"data.image_size": 32, "data.evaluation_multiple": 16, "data.path": str(photos)}
    assert plan_only(load_recipe(recipe, changes)).data["evaluation_shapes"]["32x48"] > 0
