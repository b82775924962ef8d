"""A renamed recipe key keeps its old name: in files, overrides, run directories and checkpoints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from golden_sentences import check_sentence

from paceline.errors import RecipeError
from paceline.recipe.layers import RENAMED
from paceline.recipe.load import differences, load_recipe, stored_recipe, to_yaml


@pytest.mark.parametrize(
    ("old", "new", "also"),
    [
        ("data.split_file=a.split", "data.saved_split=a.split", ["data.dataset=image_folder"]),
        ("data.augment.learned_on=svhn", "data.augment.policy_dataset=svhn", ["data.augment.policy=autoaugment"]),
        ("data.boxes.flip=0.25", "data.detection.flip=0.25", ["data.dataset=shapes", "task=detection"]),
        ("data.clicks.zipf=2", "data.recommendation.zipf=2", ["data.dataset=synthetic_clicks", "task=recommendation"]),
    ],
)
def test_a_renamed_key_keeps_its_old_name(old: str, new: str, also: list[str], tmp_path: Path) -> None:
    by_old, by_new = (load_recipe("digits", ["data=null", "data.dataset=digits", *also, each]) for each in (old, new))
    assert by_old.recipe == by_new.recipe
    assert differences(by_old.recipe, by_new.recipe) == {}
    assert by_old.origins == by_new.origins
    notices = [line for line in by_old.notices if line not in by_new.notices]
    assert len(notices) == 1
    assert "is now called" in notices[0]
    text = to_yaml(by_new.recipe)
    for was, now in RENAMED.items():
        text = re.sub(rf"^( +){now.rpartition('.')[2]}:", rf"\1{was.rpartition('.')[2]}:", text, flags=re.MULTILINE)
    file = tmp_path / "old.yaml"
    file.write_text(text)
    assert load_recipe(file).recipe == by_new.recipe
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text(text)
    assert load_recipe(tmp_path / "run").notices == ()
    assert stored_recipe(yaml.safe_load(text), "a checkpoint") == by_new.recipe


def test_a_key_under_its_old_and_new_name_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "both.yaml"
    file.write_text("data: {dataset: shapes, boxes: {flip: 0}, detection: {flip: 1}}\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(file)
    check_sentence(caught.value)
    assert (caught.value.key, caught.value.rule) == ("data.boxes", "under one name")


def test_a_new_name_stays_in_its_section() -> None:
    for old, new in RENAMED.items():
        assert old.rpartition(".")[0] == new.rpartition(".")[0]
