"""No command imports what a downloaded run or weights file names; only `train` runs the recipe it is given."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from calls import Call, command_names
from PIL import Image
from run_directories import newest_weights, rewrite_weights

from paceline.cli.commands import command_of
from paceline.recipe.schema import CODE_KEYS, TRAINING_CODE_KEYS

MODULE = """
from pathlib import Path
from torch import nn
Path("ran").touch()

def make(*arguments, num_classes, in_channels):
    return nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * in_channels, num_classes))
"""
# What stands for a run, a recipe, or weights among the arguments of commands; those with none of these open none.
TAKES_RUN = {"recipe", "target", "targets", "source", "run", "run_dir", "runs", "a", "b"}
TAKES_NONE = {"overrides", "sources", "destination", "pattern", "name", "arguments", "action", "shell", "number", "key"}
GIVEN = {"sample": "a-file.jpg"}  # before a run
TAKES_NONE |= {"folder", "file", "trainer"}  # of labs, whose notebooks are one's own
TAKES_NONE |= {"program"}  # of conform, which is there to run it
REQUIRED = {
    "--batch-sizes": "32",
    "--to": "top1_accuracy=90",
    "--world-sizes": "1,2",
    "--format": "safetensors",
    "--output": "written.safetensors",
    "--run-dir": "new",
    "--image": "python",
    "--volume-claim": "claim",
    "--mount": "/",
    "--deadline": "8h",
    "--search": "search.yaml",
    "--at": "2",
}
MORE = {
    "plan": ("--deadline", "8h"),
    "train": ("--plan-only",),
    "predict": ("picture.png",),
    "serve": ("--host", "256.256.256.256"),  # what it may open it opens, and ends before it listens
}


def _leaves(command: click.Command, *words: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    if not isinstance(command, click.Group):
        yield words, command
        return
    for name, each in command.commands.items():
        yield from _leaves(each, *words, name)


def _commands() -> list[tuple[tuple[str, ...], click.Command]]:
    return [leaf for name in command_names() for leaf in _leaves(command_of(name), name)]


def _takes_run(command: click.Command) -> bool:
    names = {each.name for each in command.params if isinstance(each, click.Argument)}
    assert names <= TAKES_RUN | TAKES_NONE | GIVEN.keys(), f"say what {names} of {command.name} are"
    return bool(names & TAKES_RUN)


OPENING = [(words, command) for words, command in _commands() if _takes_run(command)]
OPENING += [((*words, "--inference"), command) for words, command in OPENING if words == ("bench", "recipe")]


def _words(words: tuple[str, ...], command: click.Command, target: str) -> list[str]:
    filled = [*words]
    for each in command.params:
        if isinstance(each, click.Argument):
            filled += [target] if each.name in TAKES_RUN else [GIVEN[each.name]] if each.name in GIVEN else []
        elif each.required:
            filled += [each.opts[0]] if getattr(each, "is_flag", False) else [each.opts[0], REQUIRED[each.opts[0]]]
    return [*filled, *MORE.get(words[-1], ())]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a module that leaves a mark when it is imported, and no trace of it afterwards."""
    (tmp_path / "naming.py").write_text(MODULE)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("naming", None)


def _downloaded(here: Path, finished: Path, key: str, **model: Any) -> None:
    """A run, and a weights file, whose recipe names code under a key, or such a model."""
    section, _, name = key.rpartition(".")
    shutil.copytree(finished, here / "run")
    path = here / "run" / "recipe.yaml"
    recipe = yaml.safe_load(path.read_text())
    (recipe[section] if section else recipe)[name] = (
        {"own": {"name": "naming:make"}} if key == "evaluate.metrics" else "naming:make"
    )
    recipe["model"].pop("options", None)
    recipe["model"] |= model
    path.write_text(yaml.safe_dump(recipe))
    rewrite_weights(newest_weights(here / "run"), here / "weights.safetensors", recipe=recipe)


# The objects of `fit` are refused in a recipe of another task: tests/fit has them.
FIRST_KEY, *OTHER_KEYS = (key for key in CODE_KEYS if key != "objects")


@pytest.mark.parametrize(
    "key", [FIRST_KEY, "train.loss", *(pytest.param(each, marks=pytest.mark.thorough) for each in OTHER_KEYS)]
)
@pytest.mark.everyday
def test_no_command_imports_what_a_run_names(paceline_here: Call, here: Path, finished: Path, key: str) -> None:
    _downloaded(here, finished, key)
    Image.new("L", (8, 8)).save(here / "picture.png")
    refused = set()
    for words, command in OPENING:
        for each in ("run", "run/recipe.yaml", "weights.safetensors"):
            target = each
            if words[0] == "landscape" or words[-1] == "--inference":
                target = "weights.safetensors"  # of a run they measure for long
            (here / "written.safetensors").unlink(missing_ok=True)
            done = paceline_here(*_words(words, command, target))
            assert not (here / "ran").exists(), (words, target)
            assert "Traceback" not in done.err, (words, target, done.err)
            if "--trust-code" in done.err and f"{key}=naming:make" in done.err:
                assert done.code == 2
                refused.add((words[0], target))
    recipes = {"train", "launch", "estimate", "find-lr", "find-batch", "doctor", "roofline", "bench", "noise-scale"}
    recipes |= {"sweep-batch", "tune", "scale", "plan", "check-data", "review", "prove", "drill"}
    assert {(name, each) for name in recipes for each in ("run", "run/recipe.yaml")} <= refused
    # To answer, the data are not opened and nothing is scored, nor is the task that made the samples where the network
    # is only timed; and what only training imports is not refused where nothing is trained.
    predicting = set() if key in ("data.dataset", "evaluate.metrics") else {"predict", "bench"}
    weights = {"evaluate", "landscape"} | predicting
    weights = weights if key in CODE_KEYS else set()
    assert {(name, "weights.safetensors") for name in weights} <= refused


def test_the_base_of_a_stored_recipe_is_as_foreign(paceline_here: Call, here: Path) -> None:
    (here / "run" / "sub").mkdir(parents=True)
    (here / "run" / "recipe.yaml").write_text("base: sub/x.yaml\ndata: {dataset: digits}\n")
    (here / "run" / "sub" / "x.yaml").write_text("optimizer: {name: 'naming:make'}\n")
    paceline_here("estimate", "run").refused("optimizer.name=naming:make")
    assert not (here / "ran").exists()


@pytest.mark.parametrize("where", ["folder", "base", "home", "checkpoint"])
def test_wherever_the_recipe_lies(paceline_here: Call, here: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with nothing but a recipe, a run that one's own recipe is based on, a recipe inside a checkpoint."""
    folder = here / "run"
    folder.mkdir()
    (folder / "recipe.yaml").write_text("model: {name: 'naming:make'}\ndata: {dataset: digits}\n")
    base = "~/run" if where == "home" else "run"
    (here / "mine.yaml").write_text(f"base: {base}\ntrain: {{duration: 1 steps}}\n")
    monkeypatch.setenv("HOME", str(here))
    if where == "checkpoint":
        (folder / "manifest.json").touch()
        (folder / "recipe.yaml").rename(folder / "other.yaml")
    source = {"folder": "run", "base": "mine.yaml", "home": "mine.yaml", "checkpoint": "run/other.yaml"}[where]
    paceline_here("estimate", source).refused("model.name=naming:make")
    assert not (here / "ran").exists()
    for key in TRAINING_CODE_KEYS:
        tree: dict[str, Any] = {"data": {"dataset": "digits"}}
        *sections, name = key.split(".")
        inner = tree
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = "naming:make"
        (folder / ("other.yaml" if where == "checkpoint" else "recipe.yaml")).write_text(yaml.safe_dump(tree))
        paceline_here("estimate", source).refused(f"{key}=naming:make")
        assert not (here / "ran").exists()
    # What an override names is the user's own.
    assert paceline_here("train", source, "--plan-only", f"{key}=none").code == 0


def test_code_that_is_trusted_or_trained_is_run(paceline_here: Call, here: Path, tiny: tuple[str, ...]) -> None:
    (here / "mine.yaml").write_text("model: {name: 'naming:make'}\ndata: {dataset: digits}\n")
    overrides = [each for each in tiny if not each.startswith("model")]
    assert paceline_here("train", "mine.yaml", "--plan-only").code == 0  # one's own
    assert paceline_here("train", "mine.yaml", *overrides, "--run-dir", "run").code == 0
    assert paceline_here("train", "run", "--plan-only").code == 2
    assert paceline_here("train", "run", "--plan-only", "--trust-code").code == 0
    assert paceline_here("train", "run", "--plan-only").code == 2  # trusted once
    for _ in range(2):  # a run repeated from its record, and resumed by the same command
        done = paceline_here("train", "run/recipe.yaml", "--run-dir", "again").ended(0)
    assert "complete" in done.out


@pytest.mark.parametrize(
    ("model", "option"),
    [
        ("resnet18", "checkpoint_path"),
        ("resnet18", "pretrained_cfg"),
        ("resnet18", "pretrained_cfg_overlay"),
        ("resnet18", "cache_dir"),
        ("torchvision:resnet18", "weights"),
        ("torchvision:fasterrcnn_resnet50_fpn", "weights_backbone"),
        ("transformers:gpt2", "attn_implementation"),
    ],
)
def test_options_that_open_files_are_refused(
    paceline_here: Call, here: Path, finished: Path, model: str, option: str
) -> None:
    """Of a weights file, of a run, and of one's own: nothing is looked for, and the way to do it is named."""
    path = here / "evil.pth"  # which is not there
    _downloaded(here, finished, "model.name", name=model, options={option: str(path)})
    weights = here / "weights.safetensors"
    Image.new("L", (8, 8)).save(here / "picture.png")
    for words in (
        ("predict", weights, "picture.png"),
        ("evaluate", weights, "--trust-code"),
        ("estimate", "run"),
        ("train", "digits", f"model.name={model}", f"model.options.{option}={path}", "--plan-only"),
    ):
        paceline_here(*words).refused(option, "model.initialize_from")
