"""Weights of runs, checkpoints and lone files, our own and foreign ones."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_sentences import raises
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save, save_file
from torch import nn

from paceline.checkpoint.format import read_tensors, write_tensor_file
from paceline.checkpoint.state import adapt_weights
from paceline.checkpoint.store import Best, CheckpointStore
from paceline.checkpoint.weights import check_scale, checked_description, load_trained, read_weights
from paceline.errors import CheckpointError, NotFiniteError
from paceline.records.reader import Summary
from paceline.records.run_directory import RunDirectory, write_json


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
        assert saved.description("data") == {}
        assert torch.equal(saved.state["w"], torch.full((3,), 30.0))
    assert step_read(store.path(10)) == 10


def test_the_newest_whose_weights_are_whole_is_taken(store: CheckpointStore) -> None:
    flip_a_byte(store.path(30) / "model.safetensors")
    (store.path(20) / "manifest.json").write_text("")
    assert step_read(store.directory.parent) == 10
    with raises(CheckpointError, path="run/checkpoints/step-00000030"):
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
        with raises(CheckpointError, path="run/checkpoints/step-00000030"):
            read_weights(target, "ema")


def test_a_lone_file_says_which_weights_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "mine.safetensors"
    write_tensor_file(path, {"w": torch.ones(3)}, {"weights": "ema"})
    assert read_weights(path).weights == read_weights(path, "ema").weights == "ema"
    with raises(CheckpointError, path="mine.safetensors"):
        read_weights(path, "model")


def test_the_best_checkpoint_is_verified_like_any_other(store: CheckpointStore) -> None:
    store.write_best(Best(20, "loss", 1.0))
    assert float(read_weights(store.directory.parent, best=True).state["w"][0]) == 20
    flip_a_byte(store.path(20) / "model.safetensors")
    with raises(CheckpointError, path="run/checkpoints/step-00000020"):
        read_weights(store.directory.parent, best=True)
    shutil.rmtree(store.path(20))
    with pytest.raises(CheckpointError, match=r"best\.json names step-00000020, which is gone; leave out --best"):
        read_weights(store.directory.parent, best=True)


@pytest.mark.parametrize("status", ["completed", "stopped", "failed", None])
@pytest.mark.parametrize("is_copy", [False, True])
def test_weights_of_another_step_than_the_records_name(
    store: CheckpointStore, caplog: pytest.LogCaptureFixture, status: str | None, is_copy: bool
) -> None:
    run = RunDirectory(store.directory.parent)
    outcome: dict[str, Any] = {each.name: None if "None" in str(each.type) else 1 for each in fields(Summary)}
    write_json(
        run.summary, outcome | {"status": status, "step": 40, "metrics": {}, "details": {}, "phase_fractions": {}}
    )
    if status is None:  # killed; the summary of an earlier launch is damaged
        run.events.write_text('{"event": "checkpoint", "step": 40}\n')
    target = store.directory if is_copy else run.root
    if status in ("completed", "stopped"):
        with pytest.raises(
            CheckpointError, match=r"end at step 40, but these weights are of step 30.*or give .*-00000030"
        ):
            read_weights(target)
    else:
        assert step_read(target) == 30
        assert "end at step 40, but these weights are of step 30" in caplog.text
    caplog.clear()
    store.save(40, {"model": {"w": torch.full((3,), 40.0)}}, {})
    assert (step_read(target), caplog.text) == (40, "")


def test_weights_of_another_run_are_not_taken(store: CheckpointStore) -> None:
    write_json(store.directory.parent / "run.json", {"id": "ours", "has_checkpoint": True})
    store.save(50, {"model": {"w": torch.full((3,), 50.0)}}, {"run": "theirs"})
    assert step_read(store.directory.parent) == 30
    assert step_read(store.path(50)) == 50


@pytest.mark.parametrize(
    "target",
    ["absent", "absent.safetensors", "run/checkpoints/step-00000099", "empty", "begun", "begun/checkpoints"],
)
def test_what_does_not_exist_is_refused(tmp_path: Path, target: str) -> None:
    for name in ("empty", "begun"):
        (tmp_path / name).mkdir()
    (tmp_path / "begun" / "recipe.yaml").write_text("")
    (tmp_path / "begun" / "checkpoints").mkdir()
    with raises(CheckpointError, path=tmp_path / target):
        read_weights(tmp_path / target)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"ab" * 32 + b"\nsize 46807446\n"


def small_network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "model.", "backbone.", "module._orig_mod.", "a.b.c."])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_prefixes_and_half_precision_fit(tmp_path: Path, prefix: str, dtype: torch.dtype) -> None:
    state = {
        prefix + name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in small_network().state_dict().items()
    }
    save_file(state, tmp_path / "w.safetensors")
    taken = small_network()
    load_trained(taken, read_weights(tmp_path / "w.safetensors"))
    for name, tensor in taken.state_dict().items():
        assert torch.equal(tensor, state[prefix + name].to(tensor.dtype))
        assert tensor.dtype == small_network().state_dict()[name].dtype


def test_a_prefix_of_some_names_is_left_alone(tmp_path: Path) -> None:
    state = {f"module.{name}": tensor for name, tensor in small_network().state_dict().items()} | {
        "more": torch.ones(1)
    }
    save_file(state, tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError):
        load_trained(small_network(), read_weights(tmp_path / "w.safetensors"))
    taken, changes = adapt_weights(small_network().state_dict(), state)  # what fits may still be taken
    assert taken.keys() - {"more"} == small_network().state_dict().keys()
    assert changes == ("the names' prefix 'module.' was left out",)


def test_a_missing_and_an_extra_tensor_are_both_named(tmp_path: Path) -> None:
    first, *others = small_network().state_dict()
    state = {name: small_network().state_dict()[name] for name in others} | {"more": torch.ones(1)}
    save_file(state, tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError, match=rf"'{first}' is absent .* also holds 'more', float32 \[1\]"):
        load_trained(small_network(), read_weights(tmp_path / "w.safetensors"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (POINTER, "git lfs pull"),
        (b"<!DOCTYPE html><html></html>", "HTML"),
        (b"\x1f\x8b\x08" + bytes(40), "gzip"),
        (b"PK\x03\x04" + bytes(40), "pickle"),
        (b"\x80\x02" + bytes(40), "pickle"),
        (b"", "0 bytes"),
    ],
)
def test_what_is_no_weights_file_is_called_by_its_name(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        read_weights(path)


@pytest.mark.parametrize(
    "text",
    [
        *("", "no JSON", "[]", "null", "[" * 100_000, '{"a": ' + "9" * 5000 + "}"),
        *('{"class_names": 5}', '{"mean": ["a"]}', '{"std": 1}'),
        *('{"evaluation_size": -1}', '{"evaluation_size": 1000000000}', '{"image_size": true}', '{"channels": "3"}'),
    ],
)
def test_metadata_that_is_not_ours_is_one_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "w.safetensors"
    save_file({"w": torch.ones(1)}, path, {"data": text})
    saved = read_weights(path)  # the weights themselves need none of it
    with raises(CheckpointError, path="w.safetensors") as caught:
        saved.description("data")
    assert len(str(caught.value)) < 500


def test_numbers_too_large_to_compute_with_are_refused() -> None:
    with pytest.raises(NotFiniteError, match=r"mean .* must be finite"):
        check_scale({"mean": [10**400]}, "w")


ENDS = {"A": "lora_A.default.weight", "B": "lora_B.default.weight", "W": "base_layer.weight", "V": "weight"}
UNFIT = {"A": [(2, 4), (1, 3), (3,), ()], "B": [(3, 2), (2,), (), (4, 2, 1, 1)], "W": [(3,), ()], "V": [(4, 3)]}
CHANGES: list[Any] = [*({k: each} for k in UNFIT for each in UNFIT[k]), {"A": None}, {"A": (3, 3), "B": (4, 3)}]


@pytest.mark.parametrize(("changes", "alpha"), [*((each, 4) for each in CHANGES), ({}, 10**400), ({}, float("nan"))])
def test_adapters_that_do_not_fit_are_refused(tmp_path: Path, changes: Any, alpha: float) -> None:
    shapes = {"A": (2, 3), "B": (4, 2), "W": (4, 3)} | changes
    state = {f"body.{ENDS[each]}": torch.ones(shape) for each, shape in shapes.items() if shape is not None}
    recipe = json.dumps({"model": {"adapters": {"rank": 2, "alpha": alpha}}})
    save_file(state, tmp_path / "w.safetensors", {"recipe": recipe})
    with pytest.raises(CheckpointError, match=r"the adapters of 'body' do not fit|alpha=.* must be finite"):
        assert read_weights(tmp_path / "w.safetensors").plain


@given(
    st.text()
    | st.recursive(st.none() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=5).map(json.dumps)
)
def test_no_metadata_fails_otherwise(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert isinstance(checked_description("data", text), dict)


@given(st.data())
def test_no_damaged_header_fails_otherwise(data: st.DataObject) -> None:
    """Truncated, overwritten or made longer: the tensors, or a ValueError."""
    content = bytearray(save({"a": torch.ones(2), "b": torch.ones(3)}, {"data": "{}"}))
    at = data.draw(st.integers(0, len(content) - 1))
    content[at : at + data.draw(st.integers(0, 8))] = data.draw(st.binary(max_size=8))
    with tempfile.NamedTemporaryFile() as file, contextlib.suppress(ValueError):
        Path(file.name).write_bytes(content)
        read_tensors(Path(file.name))
