"""Every recipe that ships loads, and comes to a plan for one process and for 64."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

import paceline
from paceline.inference.predict import load_predictor
from paceline.recipe.load import SHIPPED, load_recipe, shipped_recipes, stored_recipe, to_tree, to_yaml
from paceline.trainer.train import plan_only

# Made for ImageNet, or photos like its.
BRIEFLY, THOROUGH = ("fine_tune", "resnet50_torchvision"), pytest.mark.thorough
NEEDS_PATH = ("image_folder", "cifar10", "criteo", "coco")
PUBLISHED = [name for name in shipped_recipes() if load_recipe(name).recipe.data.dataset == "image_folder"]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image folder that stands for whatever data a recipe needs: two classes, both splits."""
    root = tmp_path_factory.mktemp("photos")
    noise = np.random.default_rng(0).integers(0, 256, (8, 32, 32, 3), dtype=np.uint8)
    for split in ("train", "val"):
        for label in ("cat", "dog"):
            folder = root / split / label
            folder.mkdir(parents=True)
            for number in range(4):
                Image.fromarray(noise[number]).save(folder / f"{number}.png")
        clicks = "".join("\t".join(["1", *("7" * 13), *("a" * 26)]) + "\n" for _ in range(2000))
        (root / split / "clicks.tsv").write_text(clicks)  # in Criteo's format
    # The same pictures with a box around each, as COCO has them.
    boxes = {"categories": [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}], "images": [], "annotations": []}
    for number in range(4):
        boxes["images"].append({"id": number, "file_name": f"cat/{number}.png", "height": 32, "width": 32})
        entry = {"image_id": number, "category_id": 1, "bbox": [2, 2, 16, 20], "segmentation": [[2, 2, 18, 2, 18, 22]]}
        boxes["annotations"].append(entry)
    for split in ("train", "val"):
        (root / split / "annotations.json").write_text(json.dumps(boxes))
    return root


def test_there_are_recipes_and_they_lie_by_task() -> None:
    assert "digits" in shipped_recipes()
    for path in shipped_recipes().values():
        assert path.parent.parent == SHIPPED
        assert load_recipe(path).recipe.task == path.parent.name


@pytest.mark.parametrize("world_size", [1, 2, 64])
@pytest.mark.parametrize("name", shipped_recipes())
def test_it_plans_every_auto_has_its_reason_and_no_key_is_in_vain(name: str, world_size: int, photos: Path) -> None:
    recipe = load_recipe(name).recipe
    overrides: dict[str, object] = {"data.path": str(photos)} if recipe.data.dataset in NEEDS_PATH else {}
    micro = 1 if recipe.batch.micro_size == "auto" else recipe.batch.micro_size
    if world_size == 64 and recipe.batch.global_size % (micro * world_size):
        # Written for fewer processes; on 64 the batch is for its user to choose.
        overrides["batch.global_size"] = micro * world_size
    loaded = load_recipe(name, overrides)
    plan = plan_only(loaded, world_size=world_size, on_other_machine=True)  # whose published weights are not here
    assert plan.world_size == world_size
    assert plan.micro_batch_size * plan.logical_ranks == plan.global_batch_size
    assert 0 <= plan.warmup_steps < plan.total_steps
    assert (plan.learning_rates[0].step, plan.learning_rates[-1].step) == (0, plan.total_steps - 1)
    assert all(point.learning_rate >= 0 for point in plan.learning_rates)
    sections = {name: keys for name, keys in to_tree(loaded.recipe).items() if isinstance(keys, dict)}
    left_open = {f"{name}.{key}" for name, keys in sections.items() for key in keys if keys[key] == "auto"}
    assert left_open <= plan.reasons.keys()
    assert loaded.checked(plan.unused).notices == ()


@pytest.mark.parametrize("name", shipped_recipes())
def test_it_is_written_and_read_back_and_its_head_says_what_it_is(name: str) -> None:
    loaded = load_recipe(name)
    assert not loaded.notices
    assert stored_recipe(yaml.safe_load(to_yaml(loaded.recipe)), name) == loaded.recipe
    head = shipped_recipes()[name].read_text().splitlines()[0]
    assert head.startswith("# ")
    assert len(head) > 20


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in BRIEFLY else THOROUGH) for name in PUBLISHED])
def test_it_takes_some_steps(name: str, photos: Path, tmp_path: Path) -> None:
    recipe = load_recipe(name).recipe
    overrides: dict[str, object] = {
        "data": {"path": str(photos), "workers": 0},
        "batch": {"global_size": 4, "micro_size": "auto"},
        "schedule": {"warmup": "0 steps", "warmup_from": None},
        "optimizer.lr": 1e-4,
        "train.duration": "2 steps",
        "model.pretrained": False,
        "parallel.device": "cpu",
        "telemetry.trackers": [],
    }
    if recipe.data.progressive.start_size is not None:
        overrides["data.progressive"] = {"start_size": 32, "begin": 0, "end": 1}
    if recipe.schedule.milestones:
        overrides["schedule.milestones"] = ["1 step"]
    if not recipe.model.name.startswith("deit"):  # whose positions are as many as 224 pixels need
        overrides |= {"data.image_size": 64, "data.evaluation_size": 72}
    done = paceline.train(name, overrides=overrides, run_dir=tmp_path / "run", quiet=True)
    assert done.summary.step == 2
    assert done.summary.metrics["loss"] < 20
    (picture,) = load_predictor(tmp_path / "run").predict([photos / "val" / "cat" / "0.png"])
    assert set(picture.labels) == {"cat", "dog"}


@pytest.mark.parametrize("name", [name for name in shipped_recipes() if "_ffcv_" in name])
def test_ffcv_s_are_evaluated_as_they_were_published(name: str) -> None:
    assert load_recipe(name).recipe.evaluate.augment == "flip"
