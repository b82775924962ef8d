"""Weights, descriptions and run files that came from elsewhere: each command refuses them in one sentence."""

from __future__ import annotations

import json
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from calls import Call
from run_directories import newest_weights, rewrite_weights
from safetensors.torch import load_file, save_file

DEEP, LONG = "[" * 100_000, '{"a": ' + "9" * 5000 + "}"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "ab" * 32 + "\nsize 46807446\n"
DATA = (
    *({"class_names": 5}, {"mean": ["a"]}, {"std": [0]}, {"std": [float("inf")]}, {"evaluation_size": 10**9}),
    *({"channels": None}, {"evaluation_crop": 0}, {"evaluation_multiple": 0}, {"interpolation": "x"}, {"task": 5}),
    *({"native_size": 5}, {"mean": [0.1, 0.2]}),
)
RECIPE = ({"task": 5}, {"model": None}, {"model": 5}, {"optimizer": 5}, {"evaluate": ["a"]}, {"optimizer": None})
NESTED = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{key}: &{key} [{', '.join([f'*{below}'] * 9)}]\n" for below, key in zip("abcdefgh", "bcdefghi", strict=True)
)


def is_refused(done: Any, *named: str) -> None:
    assert done.code in (1, 2), done
    assert "Traceback" not in done.err, done.err
    assert 0 < len(done.err) < 1000
    assert all(each in done.err for each in named), done.err


@pytest.fixture
def weights(finished: Path, tmp_path: Path) -> Call:
    """A safetensors file with the network of the finished run, and a description of its own."""
    return partial(rewrite_weights, newest_weights(finished), tmp_path / "w.safetensors")


@pytest.mark.parametrize("change", [*DATA, "", "no JSON", "[]", "null", DEEP, LONG], ids=lambda each: str(each)[:30])
def test_descriptions_of_data(paceline_here: Call, weights: Call, write_images: Call, change: Any) -> None:
    path, began = weights(data=change), time.monotonic()
    is_refused(paceline_here("predict", path, write_images(Path("images"), 1)), str(path))
    is_refused(paceline_here("export", path, "--format", "torch-export", "--output", "w.pt2"))
    assert not Path("w.pt2").exists()
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("change", [*RECIPE, "[]", "null", "no JSON", DEEP, LONG], ids=lambda each: str(each)[:30])
def test_recipes_of_weights(
    paceline_here: Call, weights: Call, write_images: Call, tiny: tuple[str, ...], change: Any
) -> None:
    path = weights(recipe=change)
    is_told = isinstance(change, str) or None not in change.values()  # null takes a section away
    for command in (["predict", path, write_images(Path("images"), 1)], ["evaluate", path]):
        done = paceline_here(*command)
        if is_told:
            is_refused(done)
        assert "Traceback" not in done.err
    done = paceline_here("train", "digits", *tiny, f"model.initialize_from={path}", "--plan-only")
    assert "Traceback" not in done.err


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod."])
def test_prefixes_and_half_precision(
    paceline_here: Call, weights: Call, write_images: Call, caplog: Any, prefix: str
) -> None:
    def renamed_halves(state: dict[str, Any]) -> dict[str, Any]:
        return {prefix + name: each.half() if each.is_floating_point() else each for name, each in state.items()}

    path, images = weights(renamed_halves), write_images(Path("images"), 1)
    for command in (
        ("predict", path, images),
        ("evaluate", path),
        ("export", path, "--format", "torch-export", "--output", "w.pt2"),
        ("export", path, "--output", "plain.safetensors"),
    ):
        caplog.clear()
        paceline_here(*command).ended(0)
        assert f"'{prefix}'" in caplog.text  # which stands on standard error where pytest does not catch it
        assert "float16" in caplog.text
    assert load_file("plain.safetensors").keys() == load_file(weights()).keys()


def test_shards_are_named(paceline_here: Call, weights: Call, write_images: Call, tmp_path: Path) -> None:
    images = write_images(tmp_path / "images", 1)
    (tmp_path / "hub").mkdir()
    for number in (1, 2):
        shutil.copy(weights(), tmp_path / f"hub/model-0000{number}-of-00002.safetensors")
    (tmp_path / "hub/config.json").write_text('{"architecture": "resnet18"}')
    index = tmp_path / "hub/model.safetensors.index.json"
    index.write_text("{}")
    is_refused(paceline_here("predict", "hub", images), "2 shards")
    is_refused(paceline_here("predict", index, images), "shards")


@pytest.mark.parametrize("name", ["w.onnx", "w.safetensors", "folder/0.png"])
def test_lfs_pointers(paceline_here: Call, weights: Call, write_images: Call, tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    images = write_images(tmp_path / "images", 1)
    given = weights() if name.endswith("png") else tmp_path / name
    (tmp_path / name).write_text(POINTER)
    done = paceline_here("predict", given, "folder" if name.endswith("png") else images)
    assert done.code in (1, 2)
    assert "git lfs pull" in done.out + done.err


@pytest.mark.parametrize(
    "change",
    [
        *("", "no JSON", "[]", "null", DEEP, LONG),
        *({"num_classes": "x"}, {"num_classes": 10**9}, {"label_names": 5}, {"std": [float("nan")] * 3}),
        *({"input_size": 5}, {"input_size": [3, -1, -1]}, {"model_args": 5}, {"pretrained_cfg": 5}),
    ],
    ids=lambda each: str(each)[:30],
)
def test_configurations_of_hub_folders(paceline_here: Call, weights: Call, write_images: Call, change: Any) -> None:
    folder = Path("hub")
    folder.mkdir()
    save_file(load_file(weights()), folder / "model.safetensors")  # without a description of ours
    good = {"architecture": "test_resnet", "num_classes": 3, "input_size": [3, 32, 32]}
    (folder / "config.json").write_text(change if isinstance(change, str) else json.dumps({**good, **change}))
    is_refused(paceline_here("predict", folder, write_images(Path("images"), 1)), str(folder))


@pytest.mark.parametrize("content", ["", "[]", "null", DEEP, NESTED, "seed: x", "{}"], ids=lambda each: each[:9])
def test_recipes_of_runs(paceline_here: Call, finished: Path, content: str) -> None:
    shutil.copytree(finished, "run")
    Path("run/recipe.yaml").write_text(content)
    began = time.monotonic()
    is_refused(paceline_here("audit", "run"), "recipe.yaml")
    assert paceline_here("report", "run").code in (0, 1, 2)
    assert time.monotonic() - began < 20


def test_a_stored_recipe_keeps_its_values(finished: Path, tmp_path: Path) -> None:
    from paceline.records.reader import read_recipe
    from paceline.records.run_directory import RunDirectory

    (tmp_path / "recipe.yaml").write_text(text := "a: 1e-3\nb: 010\nc: on\nd: 1.0e-3\ne: '010'\nf: ~\ng: [1, 2.5]\n")
    assert read_recipe(RunDirectory(tmp_path)) == yaml.safe_load(text)
    assert read_recipe(RunDirectory(finished)) == yaml.safe_load((finished / "recipe.yaml").read_text())
