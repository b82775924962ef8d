"""Exported detectors find the same objects as the network; networks that cannot be exported are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import paceline
from paceline.checkpoint.weights import SavedWeights
from paceline.errors import PacelineError
from paceline.inference.export import Exported, ExportRequest, export
from paceline.inference.predict import open_predictor
from paceline.recipe.load import load_recipe
from paceline.tasks.task import build_task
from paceline_vision.detection.exported import ExportableDetector, exportable_detector
from paceline_vision.detection.predictor import Detections
from paceline_vision.detection.task import Detection

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {"width": 8, "levels": 2, "channels": 8}
RECIPE = """
task: detection
model: {name: small_maskrcnn, options: {width: 8, levels: 2, channels: 8, box_detections_per_img: 5}}
data:
  dataset: shapes
  detection:
    short_sides: [32, 40]
    long_side: 64
    generated: {samples: 10, evaluation_samples: 5, smallest_side: 32, largest_side: 48, objects: 2}
batch: {global_size: 4}
optimizer: {name: adamw, lr: 0.003}
train: {duration: 5 steps, precision: fp32, ema: off}
parallel: {device: cpu, threads: 1}
telemetry: {trackers: [], report: off}
"""
Make = Callable[..., ExportableDetector]


@pytest.fixture
def detector(tmp_path: Path) -> Make:
    """A network of random weights, far from equal ones, that finds many objects."""
    (tmp_path / "boxes.yaml").write_text(RECIPE)

    def made(name: str, **options: Any) -> ExportableDetector:
        changes: dict[str, Any] = {"model.name": name, "model.options": options}
        task = build_task(load_recipe(tmp_path / "boxes.yaml", changes).recipe)
        assert isinstance(task, Detection)
        torch.manual_seed(0)
        network = task.build_model().eval()
        with torch.no_grad():
            for each in network.parameters():
                each.add_(torch.randn_like(each), alpha=0.1)
        described = {"data": json.dumps(task.description()), "recipe": "{}"}
        saved = SavedWeights(state={}, weights="model", path=Path("a"), metadata=described)
        return exportable_detector(saved, network, task.dataset)

    return made


@pytest.mark.parametrize(
    ("name", "threshold"),
    [
        ("small_fasterrcnn", "box_score_thresh"),
        ("small_maskrcnn", "box_score_thresh"),
        ("small_retinanet", "score_thresh"),
    ],
)
@pytest.mark.parametrize("score", [0.0, 0.01])
def test_steps_of_a_fixed_number_find_what_torchvision_s_find(
    detector: Make, name: str, threshold: str, score: float
) -> None:
    # More than there are: the rest must change nothing.
    many = {} if "retina" in name else {"rpn_post_nms_top_n_test": 400, "box_detections_per_img": 100}
    exportable, counts = detector(name, **SMALL, **many, **{threshold: score}), set[int]()
    for picture in exportable.pictures:
        with torch.inference_mode():
            expected, found = exportable.plain(picture), exportable.network(picture)
        assert len(expected[0]) == len(found[0])
        # The masks of more boxes are computed at once, which may round otherwise.
        assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(expected, found, strict=True))
        counts.add(len(found[0]))
    assert max(counts) > 0
    assert len(exportable.output_names) == len(expected) == (4 if "mask" in name else 3)


def test_a_network_that_finds_nothing_is_like_itself(detector: Make) -> None:
    exportable = detector("small_fasterrcnn", **SMALL, box_score_thresh=1.0)
    with torch.inference_mode():
        boxes, labels, scores = exportable.network(exportable.pictures[0])
    assert (boxes.shape, labels.shape, scores.shape) == ((0, 4), (0,), (0,))
    with pytest.raises(PacelineError, match="finds nothing in 5 held-out pictures, so nothing can be compared"):
        exportable.compare(exportable.network, what="the program")


def test_a_difference_is_refused(detector: Make) -> None:
    exportable = detector("small_fasterrcnn", **SMALL, box_score_thresh=0.1)

    def changed(change: Callable[..., Any]) -> Callable[[torch.Tensor], Any]:
        return lambda picture: change(*exportable.network(picture))

    assert exportable.compare(changed(lambda *found: [each.flip(0) for each in found]), what="the program") == 0
    for change in (
        lambda boxes, labels, scores: (boxes + 0.1, labels, scores),
        lambda boxes, labels, scores: (boxes, 1 - labels, scores),
        lambda boxes, labels, scores: (boxes, labels, scores - 0.01),
        lambda boxes, labels, scores: (boxes[1:], labels[1:], scores[1:]),
        lambda *found: [torch.cat([each[:1], each]) for each in found],
        lambda boxes, labels, scores: (boxes, labels),
    ):
        with pytest.raises(PacelineError, match="in held-out picture 1 of 5, the program finds other objects"):
            exportable.compare(changed(change), what="the program")


def test_other_detectors_are_refused(detector: Make) -> None:
    saved = detector("small_fasterrcnn", **SMALL).saved
    with pytest.raises(PacelineError, match="a holds a Identity; of detectors, Faster R-CNN, Mask R-CNN and RetinaNet"):
        exportable_detector(saved, torch.nn.Identity(), None)  # type: ignore[arg-type]  # refused before


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose network finds objects everywhere."""
    root = tmp_path_factory.mktemp("boxes")
    (root / "boxes.yaml").write_text(RECIPE)
    options = {**SMALL, "box_score_thresh": 0.0, "box_detections_per_img": 5}
    paceline.train(root / "boxes.yaml", overrides={"model.options": options}, run_dir=root / "run", quiet=True)
    return root / "run"


def exported(run: Path, output: Path, form: str, **options: Any) -> Exported:
    return export(ExportRequest(target=run, output=output, form=form, **options))


@pytest.mark.thorough
def test_a_program_finds_what_the_network_finds(run: Path, tmp_path: Path) -> None:
    done = exported(run, tmp_path / "a.pt2", "torch-export")
    assert done.largest_difference is not None
    assert done.largest_difference < 1e-5
    extra = {"paceline.json": ""}
    program = torch.export.load(tmp_path / "a.pt2", extra_files=extra).module()
    said = json.loads(extra["paceline.json"])
    data = json.loads(said["data"])
    assert data["class_names"] == ["disc", "rectangle", "triangle"]
    assert (data["picture"]["height"], data["picture"]["short_side"]) == (64, 40)
    assert "scale its shorter side to 40 pixels and its longer to 64 at most" in said["preprocessing"]
    boxes, labels, scores, masks = program(torch.zeros(1, 3, 64, 64))
    assert len(boxes) == len(labels) == len(scores) == len(masks)
    assert masks.shape[1:] == (28, 28)


@pytest.mark.thorough
@pytest.mark.needs("onnx", "onnxruntime")
def test_an_onnx_file_finds_what_the_run_finds(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline_vision.detection.predictor._MIN_SCORE", 0.0)
    exported(run, tmp_path / "a.onnx", "onnx")
    ours, theirs = (open_predictor(each, device=CPU) for each in (run, tmp_path / "a.onnx"))
    assert ours.classes == theirs.classes
    # As large as the file's pictures, so that neither is padded.
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    prepared = theirs.prepare((tmp_path / "a.png").read_bytes())
    (found,) = theirs.answer([prepared], theirs.usual_top_k)
    assert isinstance(found, Detections)
    assert found.masks is not None
    assert found.masks.shape == (len(found.labels), 1, 28, 28)
    assert np.array(found.boxes).max() <= 64
    drawn = found.drawn(prepared, theirs.classes)
    assert drawn.size == (64, 64)
    assert theirs.digest != ours.digest


@pytest.mark.parametrize(
    ("form", "options", "said"),
    [
        ("timm", {}, "holds a detector, which --format timm cannot express; use --format onnx, torch-export or"),
        ("torch-export", {"quantize": "bf16"}, "--quantize bf16 is for networks of one output, and this one returns"),
        (
            "torch-export",
            {"overrides": ["data.dataset=coco", "data.path=/nowhere", "data.detection.generated=null"]},
            "compared on held-out pictures, which cannot be read: data.path=/nowhere is not a folder",
        ),
        ("torch-export", {"overrides": ["model.name=x"]}, "override 'model.name' has no effect"),
        ("safetensors", {"overrides": ["data.path=x"]}, "overrides have no effect here"),
    ],
)
def test_what_cannot_be_exported_is_refused(
    run: Path, tmp_path: Path, form: str, options: dict[str, Any], said: str
) -> None:
    output = tmp_path / {"timm": "hub", "safetensors": "a.safetensors"}.get(form, "a.pt2")
    with pytest.raises(PacelineError, match=said):
        exported(run, output, form, **options)
    assert not list(tmp_path.iterdir())
