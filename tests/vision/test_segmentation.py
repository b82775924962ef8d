"""Segmentation in the one loop: losses, figures, resuming, refusals, and every way out of the weights."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from calls import output_of
from PIL import Image
from sklearn.metrics import jaccard_score
from torch import Tensor, nn

import paceline
from paceline.cli.evaluate import Evaluate, _of_one, _of_sizes
from paceline.cli.predict import Predict
from paceline.data.batch import Batch
from paceline.data.pipeline import Placement
from paceline.data.slices import SampleSlice
from paceline.errors import PacelineError
from paceline.host.world import World
from paceline.inference.export import ExportRequest, export
from paceline.inference.predict import load_predictor, open_predictor
from paceline.recipe.load import load_recipe
from paceline.recipe.model import ModelSection
from paceline.tasks.task import build_task
from paceline.trainer.evaluate_target import EvaluationReport, EvaluationRequest, SizeSweep, evaluate_target
from paceline.trainer.train import plan_only
from paceline_vision.segmentation.dataset import IGNORED, MaskDataset
from paceline_vision.segmentation.metrics import PixelConfusion
from paceline_vision.segmentation.networks import build_segmenter
from paceline_vision.segmentation.predictor import Segments
from paceline_vision.segmentation.task import Segmentation, pixel_losses
from paceline_vision.sets.masks import read_mask

Make = Callable[..., Any]
CPU = torch.device("cpu")
SHAPES = {"samples": 10, "evaluation_samples": 5, "smallest_side": 32, "largest_side": 48, "objects": 2}
TINY: dict[str, Any] = {
    "model.options": {"width": 2, "stages": 1},
    "data.detection.generated": SHAPES,
    "data.image_size": 16,
    "batch.global_size": 4,
    "batch.micro_size": 2,
    "train.duration": "5 steps",
    "train.ema": 0.9,
    "evaluate.every": "5 steps",
    "evaluate.batch_size": 2,
    "checkpoint.every": "2 steps",
    "parallel.device": "cpu",
    "parallel.threads": 1,
    "telemetry.log_every": "1 steps",
    "telemetry.trackers": [],
}


@pytest.fixture
def train(runs: Path) -> Callable[..., Any]:
    def trainer(name: str, changes: dict[str, Any] | None = None) -> Any:
        return paceline.train("shapes-segmentation", overrides=TINY | (changes or {}), run_dir=runs / name, quiet=True)

    return trainer


def made(changes: dict[str, Any] | None = None) -> Segmentation:
    task = build_task(load_recipe("shapes-segmentation", TINY | (changes or {})).recipe)
    assert isinstance(task, Segmentation)
    task.data_facts(World())
    return task


def scores(count: int = 3, classes: int = 4, side: int = 5) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(0)
    logits = torch.randn(count, classes, side, side, generator=draws, dtype=torch.float64)
    targets = torch.randint(0, classes, (count, side, side), generator=draws).to(torch.uint8)
    targets[0, :2] = IGNORED
    return logits, targets


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_is_the_mean_over_each_image_s_own_pixels(smoothing: float) -> None:
    logits, targets = scores()
    found = pixel_losses(logits, targets, dice=False, smoothing=smoothing)
    for image, labels, loss in zip(logits, targets, found, strict=True):
        known = labels != IGNORED
        pixels = image.permute(1, 2, 0)[known]
        assert loss == pytest.approx(F.cross_entropy(pixels, labels[known].long(), label_smoothing=smoothing).item())
    nothing = torch.full_like(targets, IGNORED)
    assert pixel_losses(logits, nothing, dice=False).tolist() == [0, 0, 0]
    assert pixel_losses(logits, nothing, dice=True).tolist() == [0, 0, 0]


def test_dice_is_one_less_the_mean_overlap_of_the_classes_there() -> None:
    logits, targets = scores()
    targets[1][targets[1] == 2] = 0
    found = pixel_losses(logits, targets, dice=True) - pixel_losses(logits, targets, dice=False)
    for image, labels, loss in zip(logits.softmax(dim=1).numpy(), targets.numpy(), found, strict=True):
        known, overlaps = labels != IGNORED, []
        for label in range(4):
            p, t = image[label][known], (labels == label)[known]
            if t.any():
                overlaps.append((2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1))
        assert loss.item() == pytest.approx(1 - np.mean(overlaps))
    sure = F.one_hot(targets.clamp(max=3).long(), 4).movedim(-1, 1) * 1000.0
    assert pixel_losses(sure, targets, dice=True).tolist() == pytest.approx([0, 0, 0])


class Answers(nn.Module):
    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, images: Tensor) -> Any:
        return self.answer


def of(targets: Tensor) -> Batch:
    ids = np.arange(len(targets))
    return Batch(torch.zeros(len(targets), 3, 5, 5), targets, ids, SampleSlice(
        step=0, epoch=0, logical_rank=0, ids=ids, step_weight=len(ids)
    ))  # fmt: skip


@pytest.mark.parametrize("loss", ["cross_entropy", "cross_entropy_dice"])
def test_a_step_counts_images_alike_in_any_micro_batches(loss: str) -> None:
    task, (logits, targets) = made({"train.loss": loss}), scores(4)
    whole = task.loss(Answers(logits), of(targets))
    parts = [task.loss(Answers(logits[part]), of(targets[part])) for part in (slice(2), slice(2, 4))]
    assert whole.item() == pytest.approx(torch.stack(parts).mean().item())
    assert whole.item() == pytest.approx(task.score(Answers(logits), of(targets))["loss"].mean().item())


def test_targets_are_smoothed_in_training_only() -> None:
    task, (logits, targets) = made({"train.label_smoothing": 0.2, "train.loss": "cross_entropy"}), scores()
    smoothed, plain = (pixel_losses(logits, targets, dice=False, smoothing=each) for each in (0.2, 0.0))
    assert torch.equal(task.loss(Answers(logits), of(targets)), smoothed.mean())
    assert torch.equal(task.score(Answers(logits), of(targets))["loss"], plain)


def test_an_auxiliary_answer_counts_for_two_fifths_in_training_only() -> None:
    task, (logits, targets) = made(), scores()
    aux = logits.flip(0)
    found = task.loss(Answers({"out": logits, "aux": aux}), of(targets))
    alone, other = (task.loss(Answers(each), of(targets)) for each in (logits, aux))
    assert found.item() == pytest.approx((alone + 0.4 * other).item())
    scored = task.score(Answers({"out": logits, "aux": aux}), of(targets))
    assert torch.equal(scored["loss"], task.score(Answers(logits), of(targets))["loss"])


def test_figures_are_those_of_scikit_learn_however_batches_are_shared_out() -> None:
    draws = np.random.default_rng(0)
    wanted, found = draws.integers(0, 3, (6, 4, 4)), draws.integers(0, 3, (6, 4, 4))
    wanted[1, 0] = IGNORED
    known = wanted != IGNORED
    names = ("sky", "road 2", "tree", "never")
    parts = []
    for share in ([0, 1, 2], [3], [4, 5], []):
        part = PixelConfusion(names, IGNORED)
        for each in share:
            values = {"target": torch.tensor(wanted[each]), "predicted": torch.tensor(found[each])}
            part.add(values, np.array([each]))
        parts.append(part.part())
    results = PixelConfusion(names, IGNORED).results(parts)
    expected = 100 * jaccard_score(wanted[known], found[known], average=None)
    assert [results[f"iou_{name}"] for name in ("sky", "road_2", "tree")] == pytest.approx(expected.tolist())
    assert np.isnan(results["iou_never"])
    assert results["miou"] == pytest.approx(expected.mean())
    assert results["pixel_accuracy"] == pytest.approx(100 * (wanted == found)[known].mean())
    assert PixelConfusion(names, IGNORED).results(parts[::-1]) == pytest.approx(results, nan_ok=True, abs=0, rel=0)
    assert np.isnan(PixelConfusion(names, IGNORED).results(parts[3:])["miou"])
    details = PixelConfusion(names, IGNORED).details(parts)["class_iou"]
    assert [row["iou"] for row in details] == sorted(expected)
    assert {row["class"]: row["count"] for row in details} == {
        name: int((wanted == label).sum()) for label, name in enumerate(names[:3])
    }
    assert set(PixelConfusion([f"{each}" for each in range(21)], 255).results([np.eye(21, dtype=np.int64)])) == {
        "miou",
        "pixel_accuracy",
    }


def test_a_network_that_says_the_truth_has_a_miou_of_100() -> None:
    task = made()
    (collector,) = task.collectors()
    for batch in task.open_pipeline(Placement(device=CPU)).evaluation_batches(2, World()):
        truth = F.one_hot(batch.targets.clamp(max=3).long(), 4).movedim(-1, 1).float()
        collector.add(task.score(Answers(truth), batch), batch.ids)
    assert collector.results([collector.part()])["miou"] == 100


def no_masks(data: Any) -> Any:
    """A data set of one's own that is none."""
    return {}


def constant_answer(num_classes: int) -> nn.Module:
    """A network of one's own that says one class for an image."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, num_classes))


def half_size(num_classes: int) -> nn.Module:
    """A network of one's own whose answer is smaller than the image."""
    return nn.Conv2d(3, num_classes, 2, 2)


def two_answers(num_classes: int) -> nn.Module:
    """A network of one's own that answers as torchvision's do."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out, self.aux = nn.Conv2d(3, num_classes, 1), nn.Conv2d(3, num_classes, 1)

        def forward(self, images: Tensor) -> dict[str, Tensor]:
            return {"out": self.out(images), "aux": self.aux(images)}

    return Two()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data.dataset": "digits", "data.detection": None}, "a data set of images, not of masks or boxes"),
        ({"data.dataset": "masks", "data.detection": None}, "needs data.path"),
        (
            {"train.loss": "bce"},
            "train.loss=bce is not a loss of task=segmentation; use cross_entropy or cross_entropy_d",
        ),
        ({"train.class_weights": {"disc": 2.0}}, "train.class_weights.*here each pixel has one"),
        ({"data.augment.crop": "pad", "data.augment.scale": None}, "use random_resized"),
        ({"data.augment.vertical_flip": 0.5}, "data.augment.vertical_flip.*masks follow"),
        ({"data.mix.mixup": 0.2}, "data.mix.mixup.*masks follow"),
        ({"data.mean": [0.5]}, "data.mean has 1 numbers, but images have 3 channels"),
        ({"data.validation_fraction": 0.1}, "validation_fraction"),
        (
            {"data.dataset": f"{__name__}:no_masks", "data.detection": None},
            r"opener returned dict; it must return a .*\.MaskDataset or",
        ),
        ({"data.detection.flip": 0.1}, "data.detection.flip"),
        ({"model.name": "small_unett"}, "Did you mean 'small_unet'"),
        ({"model.name": "torchvision:resnet18", "model.options": {}}, "unknown segmentation network"),
        ({"model.name": "torchvision:lraspp_mobilenet_v3_large", "model.options": {"aux_loss": True}}, "has none"),
        ({"model.options": {"widht": 8}}, "are unknown to small_unet"),
        ({"model.options": {"stages": 9}}, "needs stages from 1 to 8"),
        (
            {"model.name": f"{__name__}:constant_answer", "model.options": {}},
            r"must return logits of shape \[1, 4, 16, 16\]",
        ),
        ({"model.name": f"{__name__}:half_size", "model.options": {}}, r"returns shape \[1, 4, 8, 8\]"),
        ({"evaluate.augment": "flip"}, "no effect"),
        ({"task": "image_classification", "train.loss": "cross_entropy_dice"}, "is not a loss of task=image_class"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(changes: dict[str, Any], said: str, train: Make) -> None:
    with pytest.raises(PacelineError, match=said):
        train("refused", changes)


@pytest.mark.parametrize("name", ["deeplabv3_resnet50", "fcn_resnet50", "lraspp_mobilenet_v3_large"])
def test_torchvision_s_networks_are_built_with_their_options(name: str) -> None:
    options = {} if name.startswith("lraspp") else {"aux_loss": True}
    with torch.device("meta"):
        network = build_segmenter(ModelSection(name=f"torchvision:{name}", options=options), num_classes=7)
        found = network(torch.zeros(2, 3, 64, 64))
    assert found.keys() == {"out", *(["aux"] if options else [])}
    assert all(each.shape == (2, 7, 64, 64) for each in found.values())


def test_a_network_of_torchvision_s_is_trained(train: Make) -> None:
    asked = {"model.name": "torchvision:lraspp_mobilenet_v3_large", "model.options": {}, "train.duration": "1 steps"}
    asked |= {"data.image_size": 32, "evaluate.every": "1 steps", "train.ema": "off", "telemetry.report": False}
    metrics = train("lraspp", asked).summary.metrics
    assert np.isfinite([metrics["loss"], metrics["miou"]]).all()


class FiveBands:
    """Noise in five channels, of which the last one shows the class."""

    def __len__(self) -> int:
        return 8

    def read(self, sample: int) -> Any:
        draws = np.random.default_rng(sample)
        labels = np.kron(draws.integers(0, 2, (4, 4)), np.ones((4, 4))).astype(np.uint8)
        image = draws.integers(0, 256, (16, 16, 5), dtype=np.uint8)
        image[..., 4] = 200 * labels
        return image, labels

    def path(self, sample: int) -> str:
        return f"bands {sample}"


def five_bands(data: Any) -> MaskDataset:
    """A data set of one's own with five channels."""
    scale = {"mean": (0.5, 0.5, 0.5, 0.5, 0.4), "std": (0.3,) * 5}
    return MaskDataset(
        name="bands", train=FiveBands(), validation=FiveBands(), classes=("no", "yes"), digest="1", **scale
    )


def test_images_may_have_any_number_of_channels(train: Make, runs: Path) -> None:
    changes = {"data.dataset": f"{__name__}:five_bands", "data.detection": None, "train.duration": "30 steps"}
    result = train("bands", changes | {"optimizer.lr": 0.03, "evaluate.every": "30 steps"})
    assert result.metrics["miou"] > 90  # which the first three channels do not tell
    again = evaluate_target(EvaluationRequest(target=result.run_dir, trust_code=True))
    assert again.metrics["miou"] == result.metrics["miou"]
    Image.fromarray(np.zeros((16, 16, 3), dtype=np.uint8)).save(runs / "grey.png")
    answer = output_of(Predict, result.run_dir, runs / "grey.png", "--trust-code")
    assert "image files have 3 channels, but the network takes 5" in answer
    with pytest.raises(PacelineError, match=r"data\.std has 3 numbers, but images have 5 channels: give 5"):
        train("refused", changes | {"data.std": [0.5, 0.5, 0.5]})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "trained"
    changes = {"model.name": f"{__name__}:two_answers", "model.options": {}, "data.evaluation_size": 24}
    paceline.train("shapes-segmentation", overrides=TINY | changes, run_dir=run_dir, quiet=True)
    return run_dir


def test_the_first_batch_is_shown_under_its_masks(trained: Path) -> None:
    task = made()
    images, targets = torch.rand(2, 3, 16, 16), torch.zeros(2, 16, 16, dtype=torch.long)
    targets[0, :, :8], targets[0, 0] = 2, IGNORED
    mean, std = (torch.tensor(each)[:, None, None] for each in task.scale)
    (masked, caption), (clear, alone) = task.shown(replace(of(targets), inputs=(images - mean) / std))
    plain = (255 * images).round().to(torch.uint8)
    assert (caption, alone) == ("background, rectangle", "background")
    assert ((masked != plain[0]).any(dim=0) == (targets[0] == 2)).float().mean() > 0.95
    assert (clear.int() - plain[1].int()).abs().max() <= 1
    assert "The first training batch, as the network sees it" in (trained / "report.html").read_text()


def test_predicted_masks_are_in_the_report(trained: Path) -> None:
    found = json.loads((trained / "evaluation/figures.json").read_text())["examples"]
    assert len(found) == 2 * 4
    assert [each["caption"].split(": ")[0].split(", ")[1] for each in found[:2]] == ["labelled", "predicted"]
    assert "Drawn by the task after the last evaluation" in (trained / "report.html").read_text()


def test_each_class_s_iou_is_in_the_report(trained: Path) -> None:
    details = json.loads((trained / "evaluation/details.json").read_text())
    assert {row["class"] for row in details["class_iou"]} == {"background", "disc", "rectangle", "triangle"}
    assert "Intersection over union by class" in (trained / "report.html").read_text()


def test_each_class_s_iou_is_shown(trained: Path) -> None:
    shown = output_of(Evaluate, trained, "--per-class", "--trust-code")
    assert "pixels" in shown
    assert "precision" not in shown
    answer = json.loads(output_of(Evaluate, trained, "--per-class", "--trust-code", "--json"))
    details = json.loads((trained / "evaluation/details.json").read_text())
    assert answer["per_class"] == details["class_iou"]
    assert answer["mean"] == {"iou": pytest.approx(answer["miou"])}


def test_an_overlay_shows_the_labels_that_were_asked_for() -> None:
    labels = np.array([[0, 1, 2]], dtype=np.uint8)
    answer = Segments(Path(), ("sky", "cat"), (0.5, 0.3), classes=labels)
    overlay = answer.overlay(3, ("sky", "dog", "cat"))
    assert overlay is not None
    assert np.asarray(overlay.convert("RGBA"))[0, :, 3].tolist() == [0, 0, 140]
    assert answer.label_map(("sky", "dog", "cat")).getextrema() == (0, 2)


def test_a_class_that_is_nowhere_is_called_absent() -> None:
    figures = {"loss": 0.5, "miou": 50.0, "iou_cat": float("nan")}
    seen = {"path": "w", "weights": "ema", "samples": 1, "counts": {}, "broken": (), "seconds": 1.0}
    lines = _of_one(EvaluationReport(**seen, metrics=figures), per_class=False).__paceline__().blocks[1]
    assert (lines["miou"], lines["iou_cat"]) == ("50.00 %", "absent")
    sweep = SizeSweep(reports={8: EvaluationReport(**seen, metrics=figures)}, on="holdout", metric="miou")
    table = _of_sizes(sweep).__paceline__().blocks[1]
    assert table.rows[0][1:4] == ("0.5000", "50.00 %", "absent")


def test_it_is_evaluated_again_to_the_bit_and_its_shares_are_written(trained: Path, tmp_path: Path) -> None:
    path = tmp_path / "found.jsonl"
    again = evaluate_target(EvaluationRequest(target=trained, predictions=path, trust_code=True))
    kept = json.loads((trained / "summary.json").read_text())["metrics"]
    assert again.metrics["miou"] in kept.values()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [sum(row["shares"]) for row in rows] == pytest.approx([1] * 5)


def test_label_maps_are_written_and_read_as_masks(trained: Path, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (30, 50, 3), dtype=np.uint8)
    for name, picture in (("a", pixels), ("b", pixels[:, :20]), ("c", pixels)):
        (tmp_path / name).mkdir()
        Image.fromarray(picture).save(tmp_path / name / "one.png")
    (tmp_path / "c/one.png").write_bytes(b"no picture")
    sources = [tmp_path / name for name in "abc"]
    lines = output_of(Predict, trained, *sources, "--draw", tmp_path / "maps", "--trust-code").splitlines()
    assert re.search(r"a/one\.png +(background|disc|rectangle|triangle): [\d.]+ %.* of the pixels$", lines[0])
    assert "unreadable" in lines[2]
    first, second = (read_mask(str(tmp_path / "maps/masks" / name)) for name in ("one.png", "one-2.png"))
    # The first class is transparent; names of the others are in the corner.
    overlaid = np.asarray(Image.open(tmp_path / "maps/one.png"))[:, 40:]
    assert ((overlaid != pixels[:, 40:]).any(axis=2) == (first[:, 40:] > 0)).mean() > 0.95
    assert (first.shape, second.shape) == ((30, 50), (30, 20))
    predictor = open_predictor(trained, trust_code=True, device=CPU)
    (answer,) = predictor.answer([predictor.prepare((tmp_path / "a/one.png").read_bytes())], 10)
    assert isinstance(answer, Segments)
    assert answer.classes is not None
    assert np.array_equal(answer.classes, first)
    shares = [float((first == predictor.classes.index(label)).mean()) for label in answer.labels]
    assert shares == pytest.approx(answer.probabilities)
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) == pytest.approx(1)
    overlay = answer.overlay(25, predictor.classes)
    assert overlay is not None
    assert (overlay.size, overlay.convert("RGBA").getextrema()[3][1]) == ((25, 15), 140)
    assert replace(answer, labels=("1", "cat"), probabilities=(0.118, 0.05)).description() == (
        "class 1: 11.8 %, cat: 5.0 % of the pixels"
    )
    table = tmp_path / "shares.csv"
    assert "1 of them unreadable" in output_of(Predict, trained, *sources, "--output", table, "--trust-code")
    lines = table.read_text().splitlines()
    assert (lines[0], ",,,," in lines[-1]) == ("path,rank,label,share,error", True)
    (row,) = json.loads(output_of(Predict, trained, sources[0], "--json", "--trust-code"))
    assert (list(row), row["shares"]) == (["path", "labels", "shares", "error"], list(answer.probabilities))


@pytest.mark.parametrize("height", [24, 10])
def test_a_label_map_is_that_of_evaluation(height: int, trained: Path) -> None:
    """A picture of the size that is shown is not resized; a lower one is padded, and its padding cut off."""
    predictor: Any = open_predictor(trained, trust_code=True, device=CPU)
    task = made({"model.name": f"{__name__}:two_answers", "model.options": {}, "data.evaluation_size": 24})
    image = np.random.default_rng(0).integers(0, 256, (height, 24, 3), dtype=np.uint8)
    task.dataset = replace(task.dataset, validation=_One(image))
    (batch,) = task.open_pipeline(Placement(device=CPU)).evaluation_batches(1, World())
    scored = task.score(predictor.network, batch)["predicted"][0]
    assert np.array_equal(predictor.answer([image], 9)[0].classes, scored[:height].numpy())


class _One:
    def __init__(self, image: Any) -> None:
        self.image = image

    def __len__(self) -> int:
        return 1

    def read(self, sample: int) -> Any:
        return self.image, np.zeros(self.image.shape[:2], dtype=np.uint8)

    def path(self, sample: int) -> str:
        return "one"


@pytest.mark.parametrize(
    "form", [pytest.param("onnx", marks=pytest.mark.needs("onnx", "onnxruntime")), "torch-export", "safetensors"]
)
def test_it_is_exported(trained: Path, tmp_path: Path, form: str) -> None:
    output = tmp_path / f"model{ {'onnx': '.onnx', 'torch-export': '.pt2'}.get(form, '.safetensors') }"
    export(ExportRequest(target=trained, output=output, form=form, trust_code=True))
    images = torch.randn(3, 3, 24, 24)
    predictor: Any = open_predictor(trained, trust_code=True, device=CPU)
    with torch.no_grad():
        expected = predictor.network(images)
    assert expected.shape == (3, 4, 24, 24)
    if form == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(str(output))
        (found,) = session.run(["logits"], {"images": images.numpy()})
        assert np.allclose(found, expected.numpy(), atol=1e-5)
        with pytest.raises(PacelineError, match="is not an image classifier"):
            open_predictor(output, device=CPU)
    elif form == "torch-export":
        assert torch.allclose(torch.export.load(output).module()(images), expected, atol=1e-6)
    else:
        again: Any = open_predictor(output, trust_code=True, device=CPU)
        with torch.no_grad():
            assert torch.equal(again.network(images), expected)


def test_what_is_for_labels_of_images_refuses_it(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(PacelineError, match="labels pixels, and timm"):
        export(ExportRequest(target=trained, output=tmp_path / "hub", form="timm", trust_code=True))
    with pytest.raises(PacelineError, match="a segmentation network and does not classify images"):
        load_predictor(trained, trust_code=True)


@pytest.mark.needs("onnx", "onnxruntime")
def test_whole_numbers_are_for_labels_of_images(trained: Path, tmp_path: Path) -> None:
    request = ExportRequest(target=trained, output=tmp_path / "m.onnx", form="onnx", quantize="int8", trust_code=True)
    with pytest.raises(PacelineError, match="int8"):
        export(request)


def test_a_folder_of_masks_is_trained_on(train: Make, runs: Path) -> None:
    for split in ("train", "val"):
        for kind in ("images", "masks"):
            (runs / "set" / split / kind).mkdir(parents=True)
        for number in range(4):
            labels = np.zeros((20, 30 - number), dtype=np.uint8)
            labels[:, :10] = 1
            Image.fromarray(np.repeat(200 * labels[..., None], 3, axis=2)).save(
                runs / "set" / split / f"images/{number}.png"
            )
            Image.fromarray(labels).save(runs / "set" / split / f"masks/{number}.png")
    (runs / "set/classes.txt").write_text("left\nright\n")
    changes = {"data.dataset": "masks", "data.path": str(runs / "set"), "data.detection": None}
    (runs / "set/val/images/0.png").unlink()
    plan = plan_only(load_recipe("shapes-segmentation", TINY | changes))
    assert any("masks without an image: 1 left out" in each for each in plan.left_out)
    assert {"iou_left", "iou_right"} <= train("folder", changes).summary.metrics.keys()
    with pytest.raises(PacelineError, match="its own held-out images"):
        train("other", {**changes, "data.validation_fraction": 0.1})
    Image.new("RGB", (30, 20)).save(runs / "set/train/images/0.png")
    with pytest.raises(PacelineError, match="has changed since it started"):
        train("folder", {**changes, "train.duration": "6 steps"})
