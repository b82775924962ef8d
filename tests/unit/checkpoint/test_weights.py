"""Whose weights are read, and is only what is read verified?"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.checkpoint.store import CheckpointStore
from paceline.checkpoint.tensor_file import write_tensor_file
from paceline.checkpoint.weights import read_weights
from paceline.errors import CheckpointError


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    for step in (10, 20, 30):
        states = {"model": {"w": torch.full((3,), float(step))}, "optimizer": {"m": torch.ones(1000)}}
        store.save(step, states, {}, file_metadata={"data": "{}"})
    return store


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def step_read(target: Path) -> float:
    return float(read_weights(target).state["w"][0])


def test_a_run_a_folder_of_checkpoints_a_checkpoint_and_a_file_are_all_found(store: CheckpointStore) -> None:
    newest = store.path(30)
    for target in (store.directory.parent, store.directory, newest, newest / "model.safetensors"):
        saved = read_weights(target)
        assert (saved.path, saved.weights) == (newest / "model.safetensors", "model")
        assert saved.described("data") == {}
        assert torch.equal(saved.state["w"], torch.full((3,), 30.0))
    assert step_read(store.path(10)) == 10


def test_the_newest_whose_weights_are_whole_is_taken(store: CheckpointStore) -> None:
    flip_a_byte(store.path(30) / "model.safetensors")
    (store.path(20) / "manifest.json").write_text("")
    assert step_read(store.directory.parent) == 10
    with pytest.raises(CheckpointError, match=r"step-00000030 is not .*: model\.safetensors: its SHA-256 is"):
        read_weights(store.path(30))
    flip_a_byte(store.path(10) / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"No checkpoint in .* is whole: .*step-00000030"):
        read_weights(store.directory)


def test_what_is_not_read_is_not_verified(store: CheckpointStore) -> None:
    flip_a_byte(store.path(30) / "optimizer.safetensors")
    assert step_read(store.directory.parent) == 30
    assert step_read(store.path(30)) == 30


def test_weights_that_no_checkpoint_holds_are_refused_by_name(store: CheckpointStore) -> None:
    for target in (store.directory.parent, store.path(30)):
        with pytest.raises(CheckpointError, match=r"step-00000030 holds no 'ema' weights; it holds model, optimizer"):
            read_weights(target, "ema")


def test_a_lone_file_says_which_weights_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "mine.safetensors"
    write_tensor_file(path, {"w": torch.ones(3)}, {"weights": "ema"})
    assert read_weights(path).weights == read_weights(path, "ema").weights == "ema"
    with pytest.raises(CheckpointError, match=r"mine.safetensors holds the 'ema' weights alone, not 'model'"):
        read_weights(path, "model")


def test_the_best_checkpoint_is_verified_like_any_other(store: CheckpointStore) -> None:
    store.write_best(20, "loss", 1.0)
    assert float(read_weights(store.directory.parent, best=True).state["w"][0]) == 20
    flip_a_byte(store.path(20) / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"step-00000020 is not .*its SHA-256 is"):
        read_weights(store.directory.parent, best=True)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("absent", r"there is no run directory '.*absent'; give a run directory, a checkpoint directory"),
        ("absent.safetensors", r"there is no file '.*absent.safetensors'; give a run directory"),
        ("run/checkpoints/step-00000099", r"there is no checkpoint '.*step-00000099'; give a run directory"),
        ("empty", r"'.*empty' holds no run \(no recipe.yaml\); give a run directory"),
        ("begun", r"'.*begun' holds no checkpoint \(yet\); give a run that has saved one"),
        ("begun/checkpoints", r"'.*checkpoints' holds no checkpoint \(yet\); give a run that has saved one"),
    ],
)
def test_what_does_not_exist_is_refused(tmp_path: Path, target: str, said: str) -> None:
    for name in ("empty", "begun"):
        (tmp_path / name).mkdir()
    (tmp_path / "begun" / "recipe.yaml").write_text("")
    (tmp_path / "begun" / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match=said):
        read_weights(tmp_path / target)
