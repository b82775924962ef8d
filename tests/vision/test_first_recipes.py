"""Folders of annotated pictures name a recipe: `paceline train FOLDER`."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np
import pytest
from annotated_folders import ONE_SET, cvat_coco, drawn, label_studio_yolo
from PIL import Image

from paceline.errors import RecipeError
from paceline.recipe.load import load_recipe
from paceline.trainer.first_recipe import FirstRecipe, choose_recipe
from paceline_data.inspect.check import check_data


def values(choice: FirstRecipe) -> dict[str, str]:
    return {each.partition("=")[0]: each.partition("=")[2] for each in choice.overrides}


@pytest.fixture
def masks(tmp_path: Path) -> Path:
    """Squares of white in masks of black, as most drawing programs save them."""
    for number in range(10):
        mask = np.zeros((48, 64), dtype=np.uint8)
        mask[8:20, 2 * number : 2 * number + 16] = 255
        for kind, pixels in (("images", np.stack([mask // 2] * 3, axis=2)), ("masks", mask)):
            (tmp_path / "squares" / kind).mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(tmp_path / "squares" / kind / f"{number}.png")
    return tmp_path / "squares"


@pytest.mark.parametrize("form", ["cvat_coco", "label_studio_yolo", "labelme", "label_studio", "cvat", "voc"])
def test_a_folder_of_boxes_is_for_a_detector(tmp_path: Path, form: str) -> None:
    name, write = ONE_SET[form]
    write(tmp_path / "parts", drawn(range(12)))
    choice = choose_recipe(str(tmp_path / "parts"), ["train.duration=2 epochs"])
    chosen = values(choice)
    assert (choice.recipe, chosen["data.dataset"], chosen["model.name"]) == (
        "shapes-maskrcnn",
        name,
        "small_fasterrcnn",
    )
    assert chosen["data.detection.short_sides"] == "off"
    assert "with boxes to train on" in choice.reasons[0]
    assert load_recipe(choice.recipe, choice.overrides).recipe.task == "detection"


def test_outlines_are_for_a_detector_of_masks_or_for_segmentation(tmp_path: Path) -> None:
    pytest.importorskip("pycocotools")
    label_studio_yolo(tmp_path / "parts", drawn(range(12), polygons=True))
    assert values(choose_recipe(str(tmp_path / "parts"), []))["model.name"] == "small_maskrcnn"
    choice = choose_recipe(str(tmp_path / "parts"), ["task=segmentation", "data.image_size=32"])
    recipe = load_recipe(choice.recipe, choice.overrides).recipe
    assert (recipe.task, recipe.model.name, recipe.data.image_size) == ("segmentation", "small_unet", 32)


def test_masks_of_black_and_white_are_for_segmentation(masks: Path) -> None:
    choice = choose_recipe(str(masks), ["model.options={width: 8}"])
    recipe = load_recipe(choice.recipe, choice.overrides).recipe
    assert (recipe.task, recipe.data.mask_values, recipe.data.image_size) == ("segmentation", (0, 255), 64)
    assert recipe.model.options == {"width": 8}
    assert any("data.mask_values=[0, 255]" in each for each in choice.reasons)
    assert check_data(str(masks), (), workers=1, limit=None).splits["train"]["checked"] == 8


def test_large_pictures_are_shown_smaller_on_a_cpu(tmp_path: Path) -> None:
    cvat_coco(tmp_path / "parts", drawn(range(4)))
    file = tmp_path / "parts/annotations/instances_default.json"
    file.write_text(file.read_text().replace('"width": 64, "height": 48', '"width": 1280, "height": 960'))
    chosen = values(choose_recipe(str(tmp_path / "parts"), []))
    assert (chosen["data.detection.short_sides"], chosen["data.detection.long_side"]) == ("[240]", "320")


def test_another_task_or_data_set_is_refused(tmp_path: Path) -> None:
    cvat_coco(tmp_path / "parts", drawn(range(4)))
    for override in ("task=image_classification", "data.dataset=yolo", "data.path=elsewhere"):
        with pytest.raises(RecipeError, match=override.partition("=")[0]):
            choose_recipe(str(tmp_path / "parts"), [override])


def test_a_folder_that_may_be_two_data_sets_says_so(tmp_path: Path) -> None:
    cvat_coco(tmp_path / "parts", drawn(range(6)))
    label_studio_yolo(tmp_path / "parts", drawn(range(6)))
    choice = choose_recipe(str(tmp_path / "parts"), [])
    assert values(choice)["data.dataset"] == "coco"
    assert "it may also be data.dataset=yolo" in choice.reasons
    assert shlex.join(choice.overrides)
