"""Detection in the one loop: resuming, order, exact evaluation, refusals; with a real detector of 20,000 parameters."""

from __future__ import annotations

import copy
import io
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.models.detection import roi_heads, transform

from paceline.cli.main import run as command
from paceline.data.batch import Batch
from paceline.data.image.decode import BrokenImageError
from paceline.data.order import StepGeometry
from paceline.data.pipeline import Placement
from paceline.errors import ModelError, PacelineError
from paceline.host.world import World
from paceline.inference.predict import open_predictor
from paceline.recipe.load import load_recipe
from paceline.tasks.facts import geometry_of
from paceline.tasks.task import build_task
from paceline.trainer.evaluate_target import EvaluationRequest, evaluate_target
from paceline.trainer.fake_batch import batch_maker
from paceline.trainer.subject import Subject
from paceline.trainer.train import plan_only
from paceline_advisor.memory.batch_trial import TrialConfig, TrialTask
from paceline_advisor.scaling.network import describe
from paceline_vision.detection import predictor as detection
from paceline_vision.detection.predictor import DetectionPredictor
from paceline_vision.detection.task import Detection

TINY = """
task: detection
model: {name: small_maskrcnn, options: {width: 8, levels: 2, channels: 8, box_detections_per_img: 5}}
data:
  dataset: shapes
  detection:
    short_sides: [32, 40]
    long_side: 64
    generated: {samples: 10, evaluation_samples: 5, smallest_side: 32, largest_side: 48, objects: 2}
batch: {global_size: 4, micro_size: 2}
optimizer: {name: adamw, lr: 0.003}
train: {duration: 5 steps, precision: fp32, ema: 0.9}
evaluate: {every: 5 steps, batch_size: 2}
checkpoint: {every: 2 steps}
parallel: {device: cpu, threads: 1}
telemetry: {log_every: 1 steps, trackers: [], report: off}
"""
Make = Callable[..., Any]


@pytest.fixture
def recipe(runs: Path) -> Path:
    path = runs / "boxes.yaml"
    path.write_text(TINY)
    return path


@pytest.fixture
def task(recipe: Path) -> Make:
    def maker(overrides: dict[str, Any] | None = None) -> Detection:
        made = build_task(load_recipe(recipe, overrides or {}).recipe)
        assert isinstance(made, Detection)
        made.data_facts(World())
        return made

    return maker


def batches(
    task: Detection, *, training: bool, step: int = 0, parts: int = 2, world: World | None = None
) -> list[Batch]:
    pipeline = task.open_pipeline(Placement(device=torch.device("cpu")))
    world = world or World()
    if not training:
        return list(pipeline.evaluation_batches(2, world))
    geometry = StepGeometry(seed=0, samples=10, global_batch_size=4, logical_ranks=parts, sort_key=task.sample_keys())
    found = list(pipeline.train_batches(geometry, step, step + 1, world))
    pipeline.close()
    return found


def test_a_batch_is_shown_with_its_boxes_and_masks(task: Make) -> None:
    made = task()
    batch = batches(made, training=True)[0]
    for (picture, caption), image, target in zip(made.shown(batch), batch.inputs, batch.targets, strict=True):
        plain = (255 * image).round().to(torch.uint8)
        assert (picture.dtype, picture.shape) == (torch.uint8, plain.shape)
        changed = (picture != plain).any(dim=0)
        assert changed[target["masks"].any(dim=0).bool()].float().mean() > 0.9
        left, top, right, bottom = (
            target["boxes"].amin(0)[:2].int().tolist() + target["boxes"].amax(0)[2:].int().tolist()
        )
        outside = torch.ones_like(changed)
        outside[top : bottom + 1, left : right + 1] = False
        assert not (changed & outside).any()
        assert set(caption.split(", ")) == {made.dataset.classes[each - 1] for each in target["labels"].tolist()}


def test_what_is_found_is_written_for_each_picture(train: Make, runs: Path) -> None:
    train("run", {"model.options": {"width": 8, "levels": 2, "channels": 8, "box_score_thresh": 0.0}})
    path = runs / "found.jsonl"
    evaluate_target(EvaluationRequest(target=runs / "run", predictions=path))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["id"] for line in lines] == list(range(5))
    assert all(len(line["boxes"]) == len(line["scores"]) == len(line["labels"]) > 0 for line in lines)
    assert all(len(box) == 4 for line in lines for box in line["boxes"])
    assert all(0 <= label < 3 for line in lines for label in line["labels"])


def test_observers_and_threads_change_nothing(train: Make) -> None:
    alone = train("alone", {"evaluate.every": "off", "checkpoint.every": "off"}).summary.weights_sha256
    watched = train("watched", {"evaluate.every": "1 steps", "data.workers": 2}).summary.weights_sha256
    assert watched == alone


def test_what_a_sample_looks_like_depends_on_nothing_but_seed_epoch_and_number(task: Make) -> None:
    made = task()
    whole = {int(number): image for batch in batches(made, training=True, parts=1) for number, image in each(batch)}
    parts: dict[int, torch.Tensor] = {}
    for rank in range(2):
        for batch in batches(task({"data.workers": 2}), training=True, parts=4, world=World(rank=rank, world_size=2)):
            parts |= {int(number): image for number, image in each(batch)}
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[number], parts[number]) for number in whole)


def each(batch: Batch) -> Iterator[tuple[int, torch.Tensor]]:
    return zip(batch.ids.tolist(), batch.inputs, strict=True)


def test_boxes_and_masks_move_with_their_picture(task: Make) -> None:
    made, seen = task({"data.detection.flip": 0.5}), set()
    for step in range(2):
        for batch in batches(made, training=True, step=step):
            for number, image, target in zip(batch.ids.tolist(), batch.inputs, batch.targets, strict=True):
                native = made.dataset.train.sizes[number]
                assert min(image.shape[1:]) in (32, 40)
                seen.add((min(image.shape[1:]), image.shape[1] / native[0]))
                assert target["masks"].shape[1:] == image.shape[1:]
                for (left, top, right, bottom), mask in zip(target["boxes"].tolist(), target["masks"], strict=True):
                    rows, columns = mask.nonzero().T
                    edges = (int(columns.min()), int(rows.min()), int(columns.max()) + 1, int(rows.max()) + 1)
                    assert np.allclose(edges, (left, top, right, bottom), atol=1.5)
    assert len(seen) > 2


def test_a_step_s_samples_are_sorted_by_shape_and_no_other_ones(task: Make) -> None:
    sizes = task().dataset.train.sizes
    grouped, plain = (task({"data.detection.like_shapes": asked}) for asked in (True, False))
    for step in range(2):
        ratios, used = [], []
        for made in (grouped, plain):
            found = np.concatenate([batch.ids for batch in batches(made, training=True, step=step)])
            used.append(sorted(found.tolist()))
            ratios.append((sizes[found, 1] / sizes[found, 0]).tolist())
        assert used[0] == used[1]
        assert ratios[0] == sorted(ratios[0])
    assert plain.sample_keys() is None


def test_a_loss_of_a_held_out_picture_is_its_own_and_disturbs_nothing(task: Make) -> None:
    made = task()
    torch.manual_seed(0)
    network = made.build_model().eval()
    (first, *_) = batches(made, training=False)
    before, state = torch.get_rng_state(), copy.deepcopy(network.state_dict())
    with torch.no_grad():
        both = made.score(network, first)["loss"]
        alone = [made.score(network, one(first, index))["loss"][0] for index in range(2)]
    assert torch.equal(both, torch.stack(alone))
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(module.training for module in network.modules())
    assert all(torch.equal(value, state[name]) for name, value in network.state_dict().items())


def test_what_is_found_does_not_depend_on_the_company(task: Make) -> None:
    made = task({"model.options": {"width": 8, "levels": 2, "channels": 8, "box_score_thresh": 0.0}})
    torch.manual_seed(0)
    network = made.build_model().eval()
    (first, *_) = batches(made, training=False)
    assert first.inputs[0].shape != first.inputs[1].shape
    with torch.no_grad():
        both, written = made.score(network, first)["found"], made.predict(network, first)
        for index, found in enumerate(both):
            (alone,) = made.score(network, one(first, index))["found"]
            assert len(found["boxes"]) > 0
            assert all(torch.equal(found[name], alone[name]) for name in alone)
            assert torch.equal(written["boxes"][index], alone["boxes"])


def one(batch: Batch, index: int) -> Batch:
    return Batch(
        batch.inputs[index : index + 1], batch.targets[index : index + 1], batch.ids[index : index + 1], batch.slice
    )


def test_a_network_that_says_the_truth_has_a_map_of_100(task: Make) -> None:
    made = task()

    class Oracle(torch.nn.Module):
        def forward(self, images: Any, targets: Any = None) -> Any:
            if self.training:
                return {"loss": torch.zeros(())}
            found = self.truth.pop(0)
            return [{**found, "scores": torch.ones(len(found["labels"])), "masks": found["masks"][:, None].float()}]

    oracle, (collector,) = Oracle().eval(), made.collectors()
    for batch in batches(made, training=False):
        oracle.truth = list(batch.targets)
        collector.add(made.score(oracle, batch), batch.ids)
    assert collector.results([collector.part()]) == {
        name: pytest.approx(100) for name in ("box_map", "box_map50", "mask_map", "mask_map50")
    }


@pytest.fixture
def coco(runs: Path) -> Path:
    """Four pictures a split, of two sizes; the second file is no image."""
    noise = np.random.default_rng(0)
    for split in ("train", "val"):
        folder = runs / "coco" / split
        folder.mkdir(parents=True)
        images, boxes = [], []
        for number in range(4):
            height, width = (40, 56) if number % 2 else (56, 40)
            Image.fromarray(noise.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(folder / f"{number}.png")
            images.append({"id": number, "file_name": f"{number}.png", "height": height, "width": width})
            boxes.append({"image_id": number, "category_id": 3, "bbox": [4, 6, 20, 16], "iscrowd": 0})
        (folder / "1.png").write_bytes(b"no picture")
        tree = {"images": images, "annotations": boxes, "categories": [{"id": 3, "name": "noise"}]}
        (folder / "annotations.json").write_text(json.dumps(tree))
    return runs / "coco"


WITH_BOXES = {"model.name": "small_fasterrcnn", "data.dataset": "coco", "data.detection.generated": None}


def test_coco_s_files_are_trained_on_and_a_broken_one_is_left_out(train: Make, coco: Path) -> None:
    asked = {"data.path": str(coco), "data.workers": 1, "model.name": "small_retinanet", "batch.micro_size": "auto"}
    asked |= {"model.options": {"width": 8, "levels": 2, "channels": 8}, "train.duration": "3 steps"}
    asked |= {"batch.global_size": 1, "data.max_broken": 4, "evaluate.every": "3 steps", "data.dataset": "coco"}
    done = train("files", asked)
    assert "box_map" in done.summary.metrics
    assert "mask_map" not in done.summary.metrics
    with pytest.raises(PacelineError, match=r"1\.png"):
        train("strict", {**asked, "data.max_broken": 0, "train.duration": "4 steps"})


def test_average_precision_is_not_reported_without_held_out_objects(task: Make, coco: Path, runs: Path) -> None:
    shutil.copytree(coco, runs / "unscored")
    file = runs / "unscored" / "val" / "annotations.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "annotations": []}))
    made = task({**WITH_BOXES, "data.path": str(runs / "unscored")})
    assert ([each.name for each in made.metrics], made.collectors()) == (["loss"], ())
    assert "box_map, box_map50: undefined" in " ".join(made.data_facts(World()).left_out)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"data.dataset": "digits"}, "a data set of images, not of boxes"),
        ({"data.dataset": "coco"}, "needs data.path"),
        ({"model.name": "small_maskrcn"}, "Did you mean"),
        ({"model.name": "torchvision:keypointrcnn_resnet50_fpn", "model.options": {}}, "unknown detector"),
        ({"model.name": "torchvision:ssdlite320_mobilenet_v3_large", "model.options": {}}, "short_sides must be off"),
        ({"model.options": {"min_size": 30}}, "data.detection.short_sides"),
        ({"model.options": {"widht": 8}}, "is unknown to"),
        ({"model.options": {"width": 12}}, "multiple of 8"),
        ({"model.pretrained": True}, "no published weights"),
        ({"data.detection.masks": False}, "says masks"),
        ({"data.detection.short_sides": [80]}, "long_side"),
        ({"train.label_smoothing": 0.1}, "its own losses"),
        ({"data.image_size": 64}, "data.detection"),
        ({"evaluate.augment": "flip"}, "no effect"),
        ({"parallel.strategy": "fsdp"}, "does not work with task=detection"),
        ({"data.detection.short_sides": "off", "data.detection.long_side": 70}, "pictures keep their size"),
        ({"model.compile": True}, "model.compile=true has no effect with task=detection"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(overrides: dict[str, Any], said: str, train: Make) -> None:
    with pytest.raises(PacelineError, match=said):
        train("refused", overrides)


def test_torchvision_s_detectors_are_built_with_their_options(task: Make) -> None:
    options = {"box_detections_per_img": 7, "rpn_post_nms_top_n_train": 20}
    name = "torchvision:fasterrcnn_mobilenet_v3_large_320_fpn"
    made = task({"model.name": name, "model.options": options, "data.detection.masks": False})
    network = made.build_model()
    assert network.roi_heads.detections_per_img == 7
    (batch, *_) = batches(made, training=True)
    assert torch.isfinite(made.loss(network.train(), batch))
    assert network.eval()([torch.zeros(3, 50, 70)])[0]["boxes"].shape[1] == 4


def test_an_ssd_starts_from_the_backbone_that_fits_its_preprocessing(
    task: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pixels are scaled to 0 to 255, as the weights converted from Caffe expect, and no newer ones."""
    asked: list[str] = []

    def refuse(url: str, **_: Any) -> None:
        asked.append(url)
        raise OSError("no network")

    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", refuse)
    sizes = {"data.detection.short_sides": "off", "data.detection.long_side": None, "model.options": {}}
    with pytest.raises(ModelError, match="no network"):
        task({"model.name": "torchvision:ssd300_vgg16", "model.pretrained": True, **sizes}).build_model()
    assert "vgg16_features" in asked[0]


@pytest.mark.parametrize("name", ["small_maskrcnn", "small_retinanet"])
def test_how_a_detector_scales_is_found_out_without_memory(task: Make, name: str) -> None:
    made = task({"model.name": name, "model.options": {"width": 8, "levels": 2, "channels": 8}})
    found = describe(made.recipe)
    assert found.numbers.every == sum(each.numel() for each in made.build_model().parameters())
    assert not found.notices


def test_the_scales_of_a_network_without_memory_are_those_of_any(task: Make) -> None:
    made = task()
    with torch.device("meta"):
        without: Any = made.build_model()
    usual: Any = made.build_model()
    assert without.roi_heads.box_roi_pool.scales == usual.roi_heads.box_roi_pool.scales == [0.25, 0.125]


def test_copies_with_what_was_found_do_not_overwrite_one_another(train: Make, coco: Path, runs: Path) -> None:
    run = train("run", {"train.duration": "2 steps"}).run_dir
    drawing = ["predict", str(run), str(coco / "train"), str(coco / "val"), "--draw"]
    assert command([*drawing, str(coco / "train")]) == 2, "nothing is overwritten"
    assert command([*drawing, str(runs / "found")]) == 1  # 1.png is no image
    found = {each.name for each in (runs / "found").iterdir()}
    assert found == {"0.png", "2.png", "3.png", "0-2.png", "2-2.png", "3-2.png"}


def test_detections_are_in_the_report(task: Make) -> None:
    made = task()
    network = made.build_model().eval()
    found = made.figures(network)
    assert [caption.split(", ")[1].split(":")[0] for _, caption in found[:2]] == ["labelled", "detected"]
    assert len(found) == 2 * min(4, len(made.dataset.validation))
    picture = found[0][0]
    assert (picture.dtype, picture.shape[0]) == (torch.uint8, 3)
    assert not torch.equal(picture, torch.from_numpy(made.dataset.validation.read(0).transpose(2, 0, 1).copy()))


def test_each_class_s_average_precision_is_shown(train: Make, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"width": 8, "levels": 2, "channels": 8, "box_score_thresh": 0.0}
    run = train("run", {"model.options": options, "telemetry.report": True}).run_dir
    assert "Average precision by class" in (run / "report.html").read_text()
    assert command(["evaluate", str(run), "--per-class", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    rows = json.loads((run / "evaluation/details.json").read_text())["class_ap"]
    assert answer["per_class"] == rows
    assert {row["class"] for row in rows} <= {"disc", "rectangle", "triangle"}
    means = {"average_precision": answer["box_map"], "mask_average_precision": answer["mask_map"]}
    assert answer["mean"] == pytest.approx(means)
    assert command(["evaluate", str(run), "--per-class"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (titles,) = (line for line in lines if "AP of masks" in line)
    assert titles.split()[:3] == ["class", "boxes", "AP"]


def test_masks_are_pasted_one_by_one_where_they_are_drawn(train: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred of them, at the size of a large picture, take gigabytes; and by default none is left out."""
    kept = {"box_detections_per_img": 150, "box_score_thresh": 0.0, "box_nms_thresh": 1.0, "rpn_nms_thresh": 1.0}
    options = {"width": 8, "levels": 2, "channels": 8, "rpn_post_nms_top_n_test": 150, **kept}
    run = train("run", {"train.duration": "2 steps", "model.options": options}).run_dir
    picture = np.random.default_rng(0).integers(0, 256, (70, 90, 3), dtype=np.uint8)
    predictor = open_predictor(run, device=torch.device("cpu"))
    assert isinstance(predictor, DetectionPredictor)
    monkeypatch.setattr(detection, "_MIN_SCORE", 0.0)
    sizes: list[tuple[int, ...]] = []

    def noted(masks: torch.Tensor, boxes: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
        pasted: torch.Tensor = paste(masks, boxes, size)
        sizes.append(tuple(pasted.shape))
        return pasted

    paste = roi_heads.paste_masks_in_image
    for module in (roi_heads, transform):
        monkeypatch.setattr(module, "paste_masks_in_image", noted)
    (answer,) = predictor.answer([picture], predictor.usual_top_k)
    found = len(answer.labels)
    assert not sizes
    assert found == 150
    answer.drawn(picture, predictor.classes)
    assert sizes == [(1, 1, 70, 90)] * found


def test_very_long_pictures_are_shown_or_refused(train: Make) -> None:
    def answered(run: Path, width: int, height: int) -> Any:
        content = io.BytesIO()
        Image.new("L", (width, height), 99).save(content, "PNG")
        predictor = open_predictor(run, device=torch.device("cpu"))
        return predictor.answer([predictor.prepare(content.getvalue())], 100)[0]

    resized = train("resized", {"train.duration": "2 steps"}).run_dir
    assert answered(resized, 10_000, 1).error is None
    assert answered(resized, 1, 10_000).error is None
    fixed = train("fixed", {"train.duration": "2 steps", "data.detection.short_sides": "off"}).run_dir
    assert answered(fixed, 100, 1).error is None
    with pytest.raises(BrokenImageError, match="40000000x"):
        answered(fixed, 40_000_000, 1)


def test_masks_are_drawn_where_the_network_itself_would_paste_them(task: Make) -> None:
    network: Any = task().build_model().eval()
    picture = torch.rand(3, 70, 90, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        (whole,) = network([picture])
        network.transform.pastes_masks = False
        (small,) = network([picture])
    assert len(whole["masks"]) > 1
    assert small["masks"].shape == (len(whole["masks"]), 1, 28, 28)
    assert torch.equal(small["boxes"], whole["boxes"])
    assert torch.equal(roi_heads.paste_masks_in_image(small["masks"], small["boxes"], (70, 90)), whole["masks"])


def padded(images: list[torch.Tensor]) -> int:
    return max(image.shape[1] for image in images) * max(image.shape[2] for image in images)


def test_memory_is_claimed_with_the_largest_pictures(task: Make) -> None:
    """A tall and a wide picture in one micro-batch take more than two of the largest."""
    made = task({"batch.global_size": 10, "batch.micro_size": 5, "data.detection.like_shapes": False})
    plan = Subject.open(made.recipe, World(), "plan", task=made).plan
    geometry = geometry_of(made.recipe, plan, made)
    largest = geometry.costliest(0, 1)
    assert largest is not None
    parts = made.open_pipeline(Placement(device=torch.device("cpu"))).train_batches(geometry, 0, 1, World())
    shown = {part.slice.logical_rank: padded(part.inputs) for part in parts}
    assert largest.positions == 5 * max(shown.values())
    assert shown[largest.logical_rank] == max(shown.values())
    stand_in = batch_maker(made, plan, Placement(device=torch.device("cpu")))(5)
    assert padded(stand_in.inputs) == max(shown.values())
    pairs = zip(stand_in.inputs, stand_in.targets, strict=True)
    assert all(target["masks"].shape[1:] == image.shape[1:] for image, target in pairs)


def test_trials_of_memory_show_the_largest_pictures(task: Make) -> None:
    made = task()
    trial = TrialTask(made, TrialConfig(task="", samples=4, evaluation_samples=2, memory=None))
    pipeline = trial.open_pipeline(Placement(device=torch.device("cpu")))
    geometry = StepGeometry(seed=0, samples=4, global_batch_size=4, logical_ranks=1)
    (tried,) = pipeline.train_batches(geometry, 0, 1, World())
    # Padded to one another: as tall as the tallest, as wide as the widest.
    epoch = [part for step in range(3) for part in batches(made, training=True, step=step, parts=1)]
    assert sorted(len(part.ids) for part in epoch) == [2, 4, 4]
    largest = max(epoch, key=lambda part: len(part.ids) * padded(part.inputs))
    assert padded(tried.inputs[:2]) == padded(largest.inputs)
    (scored,) = pipeline.evaluation_batches(2, World())
    assert scored.inputs[0].shape[1:].numel() == made.dataset.validation.sizes.prod(axis=1).max()


def test_plans_say_what_is_measured(recipe: Path) -> None:
    plan = plan_only(load_recipe(recipe), world_size=2)
    better = dict.fromkeys(("box_map", "box_map50", "mask_map", "mask_map50"), True)
    assert plan.higher_is_better == {"loss": False, **better}
    assert plan.data["classes"] == 3
