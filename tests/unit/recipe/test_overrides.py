"""Overrides replace one another, and what files say, also in mappings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from golden_sentences import check_sentence

from paceline.errors import RecipeError
from paceline.recipe.load import differences, load_recipe, stored_recipe, to_yaml

FC, CLASSIFIER = {"fc.*": {"lr_factor": 10}}, {"classifier": {"lr_factor": 3}}
NONE, THREE = "optimizer.groups=null", "optimizer.groups={classifier: {lr_factor: 3}}"
DOTTED = "optimizer.groups.classifier.lr_factor=3"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([THREE], FC | CLASSIFIER),
        ([NONE, THREE], CLASSIFIER),
        ([THREE, NONE], {}),
        ([NONE, DOTTED], CLASSIFIER),
        (["optimizer.groups={a: {lr_factor: 2}}", THREE], FC | CLASSIFIER),
        ([NONE, "optimizer.groups={a: {}}", "optimizer={groups: {classifier: {lr_factor: 3}}}"], CLASSIFIER),
        ([NONE, "optimizer.groups={classifier: {lr_factor: 9}}", DOTTED], CLASSIFIER),
        (["optimizer=null", THREE], CLASSIFIER),
        (["optimizer={lr: 1}", "optimizer={nesterov: true}"], FC),
    ],
)
def test_a_later_override_replaces_an_earlier_one(tmp_path: Path, overrides: list[str], expected: Any) -> None:
    file, again = tmp_path / "mine.yaml", tmp_path / "again.yaml"
    file.write_text('optimizer: {groups: {"fc.*": {lr_factor: 10}}}\n')
    recipe = load_recipe(file, overrides).recipe
    found = [(name, {"lr_factor": each.lr_factor}) for name, each in recipe.optimizer.groups.items()]
    assert found == list(expected.items())
    again.write_text(to_yaml(recipe))
    assert load_recipe(again).recipe == recipe


def test_options_given_whole_and_then_one_by_one() -> None:
    below = {"model": {"options": {"stages": 2}}}
    message = ["model.options={a: 1, b: {c: 1}}", "model.options.b.d=2", "model.options.stages=null"]
    assert stored_recipe(below, "plain", message).model.options == {"a": 1, "b": {"c": 1, "d": 2}}
    assert stored_recipe(below, "plain", [*message, "model.options={a: 4}"]).model.options == {"stages": 2, "a": 4}


@pytest.mark.parametrize(
    ("message", "meant"),
    [
        ("optimizer.name=AdamW", "adamw"),
        ("optimizer.name=NAdamW", "nadamw"),
        ("optimizer.name=Mine.Optim:ADAM", "Mine.Optim:ADAM"),
        ("schedule.name=One_Cycle", "one_cycle"),
        ("data.dataset=CIFAR10", "cifar10"),
        ("train.precision=BF16", "bf16"),
        ("model.name=ResNet50", "ResNet50"),  # of timm's names, some differ in nothing else
    ],
)
def test_choices_may_be_written_in_any_case(tmp_path: Path, message: str, meant: str) -> None:
    key, _, value = message.partition("=")
    section, name = key.split(".")
    rest = ", warmup: 3%" * (value == "One_Cycle")
    (tmp_path / "mine.yaml").write_text(f"{section}: {{{name}: '{value}'{rest}}}\n")
    for recipe in (stored_recipe({}, "plain", [message]), load_recipe(tmp_path / "mine.yaml").recipe):
        assert getattr(getattr(recipe, section), name) == meant


def test_the_case_of_a_choice_is_no_other_choice() -> None:
    below = {"optimizer": {"name": "adamw", "betas": [0.8, 0.9]}}
    assert stored_recipe(below, "plain", ["optimizer.name=AdamW"]).optimizer.betas == (0.8, 0.9)
    with pytest.raises(RecipeError) as caught:
        stored_recipe({}, "plain", ["optimizer.lr_scaling=Liner"])
    check_sentence(caught.value)
    assert (caught.value.key, caught.value.value) == ("optimizer.lr_scaling", "Liner")


def test_a_run_of_fine_tune_that_names_the_classifier_of_resnet_goes_on() -> None:
    old = load_recipe("fine_tune", [NONE, 'optimizer.groups={"fc.*": {lr_factor: 10}}']).recipe
    assert "fc.*" in old.optimizer.groups
    assert differences(old, load_recipe("fine_tune").recipe) == {}
    assert list(differences(old, load_recipe("fine_tune", [THREE]).recipe)) == ["optimizer.groups.classifier.lr_factor"]
