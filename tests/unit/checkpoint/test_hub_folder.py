"""Folders in timm's layout: what their config.json says, and what is not taken from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_sentences import raises
from safetensors.torch import save_file

from paceline.checkpoint.store import CheckpointStore
from paceline.checkpoint.weights import read_weights
from paceline.errors import CheckpointError

SHOWN = {"input_size": [3, 32, 32], "crop_pct": 0.9, "interpolation": "bicubic", "mean": [0.5] * 3, "std": [0.2] * 3}
CONFIG = {"architecture": "resnet18", "num_classes": 2, "label_names": ["cat", "dog"], "pretrained_cfg": SHOWN}


def folder(path: Path, config: Any = CONFIG, metadata: dict[str, str] | None = None) -> Path:
    path.mkdir()
    (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    save_file({"w": torch.ones(2)}, path / "model.safetensors", metadata)
    return path


def described(path: Path, config: Any = CONFIG) -> tuple[Any, Any]:
    saved = read_weights(folder(path, config))
    return saved.description("data"), saved.description("recipe")


def test_what_a_config_says(tmp_path: Path) -> None:
    data, recipe = described(tmp_path / "hub")
    assert recipe["model"] == {"name": "resnet18"}
    assert (data["classes"], data["class_names"]) == (2, ["cat", "dog"])
    assert (data["image_size"], data["channels"], data["interpolation"]) == (32, 3, "bicubic")
    assert (data["mean"], data["std"]) == ([0.5] * 3, [0.2] * 3)
    assert round(32 / data["evaluation_crop"]) == 35  # timm rounds 35.6 down


def test_ours_speak_for_themselves(tmp_path: Path) -> None:
    path = folder(tmp_path / "hub", metadata={"recipe": '{"task": "mine"}', "weights": "ema"})
    saved = read_weights(path)
    assert saved.description("recipe") == {"task": "mine"}
    assert saved.weights == "ema"


def test_a_run_with_a_file_of_that_name_is_a_run(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    store.save(1, {"model": {"w": torch.zeros(2)}}, {}, file_metadata={"recipe": "{}"})
    (tmp_path / "run" / "config.json").write_text("{}")
    assert float(read_weights(tmp_path / "run").state["w"][0]) == 0


def test_older_and_sparse_folders(tmp_path: Path) -> None:
    flat, _ = described(tmp_path / "flat", {**SHOWN, "architecture": "resnet18", "labels": ["a"] * 1000})
    assert (flat["image_size"], flat["classes"], len(flat["class_names"])) == (32, 1000, 1000)
    bare, _ = described(tmp_path / "bare", {"architecture": "resnet18"})
    assert (bare["image_size"], bare["evaluation_crop"], bare["interpolation"]) == (224, 0.875, "bicubic")
    assert bare["class_names_unknown"]
    numbered, _ = described(tmp_path / "numbered", {**CONFIG, "label_names": {"1": "dog", "0": "cat"}})
    assert numbered["class_names"] == ["cat", "dog"]


def test_a_network_built_for_a_size(tmp_path: Path) -> None:
    fixed = {**CONFIG, "model_args": {"in_chans": 1, "num_classes": 2, "drop_rate": None}}
    fixed["pretrained_cfg"] = {**SHOWN, "fixed_input_size": True, "mean": [0.5], "std": [0.2]}
    data, recipe = described(tmp_path / "hub", fixed)
    assert recipe["model"]["options"] == {"img_size": 32}
    assert data["channels"] == 1


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("crop_mode", "squash", "crop_mode is 'squash'"),
        ("interpolation", "lanczos", "interpolation is 'lanczos'"),
        ("input_size", [3, 32, 64], "32x64"),
        ("mean", [0.5], "mean and std have 1 and 3"),
        ("crop_pct", 1.2, "crop_pct is 1.2"),
        ("crop_pct", 1e-9, "crop_pct is 1e-09"),
        ("input_size", [3, 100_000, 100_000], "at most 8192 pixels a side"),
    ],
)
def test_what_cannot_be_shown_is_said_where_it_is_needed(tmp_path: Path, key: str, value: Any, message: str) -> None:
    path = folder(tmp_path / "hub", {**CONFIG, "pretrained_cfg": {**SHOWN, key: value}})
    saved = read_weights(path)  # the weights alone may be begun from
    assert saved.state.keys() == {"w"}
    with pytest.raises(CheckpointError, match=message):
        saved.description("data")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "not readable as JSON"),
        ("[1]", "names no timm architecture"),
        ({"architectures": ["BertModel"]}, "names no timm architecture"),
        ({"architecture": "os:system"}, "names no timm architecture"),
        *(({**CONFIG, "pretrained_cfg": entry}, "not in timm's format") for entry in (3, {"input_size": [3]})),
        ({**CONFIG, "model_args": [1]}, "not in timm's format"),
        (
            {**CONFIG, "model_args": {"checkpoint_path": "evil.pth"}},
            "has checkpoint_path, which is not a network argument",
        ),
        ({**CONFIG, "model_args": {"pretrained_cfg_overlay": {"url": "x"}}}, "has pretrained_cfg_overlay"),
        ({**CONFIG, "model_args": {"global_pool": ""}}, "global_pool off"),
        *(
            ({**CONFIG, "label_names": names}, "not one string")
            for names in (["cat"], [None, "a"], ["\ud800", "a"], {"1": "a"})
        ),
        ({**CONFIG, "num_classes": 10**30}, "no tensor of model.safetensors has as many rows"),
    ],
)
def test_folders_of_others_are_refused(tmp_path: Path, config: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_weights(folder(tmp_path / "hub", config))


def test_a_pickle_is_never_opened(tmp_path: Path) -> None:
    path = folder(tmp_path / "hub")
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with raises(CheckpointError, path="hub"):
        read_weights(path)
    (path / "pytorch_model.bin").unlink()
    with raises(CheckpointError, path="hub"):
        read_weights(path)
