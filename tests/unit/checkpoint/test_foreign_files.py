"""Weights files that others wrote: prefixes, half precision, what is no weights file, metadata that is not ours."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save, save_file
from torch import nn

from paceline.checkpoint.tensor_file import parse_tensor_file
from paceline.checkpoint.trained import load_trained
from paceline.checkpoint.weights import checked_description, read_weights
from paceline.errors import CheckpointError

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"ab" * 32 + b"\nsize 46807446\n"


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "model.", "_orig_mod.module.", "module._orig_mod."])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_prefixes_and_half_precision_fit(tmp_path: Path, prefix: str, dtype: torch.dtype) -> None:
    state = {
        prefix + name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in network().state_dict().items()
    }
    save_file(state, tmp_path / "w.safetensors")
    taken = network()
    load_trained(taken, read_weights(tmp_path / "w.safetensors"))
    for name, tensor in taken.state_dict().items():
        assert torch.equal(tensor, state[prefix + name].to(tensor.dtype))
        assert tensor.dtype == network().state_dict()[name].dtype


def test_a_prefix_of_some_names_is_left_alone(tmp_path: Path) -> None:
    state = {f"module.{name}": tensor for name, tensor in network().state_dict().items()} | {"more": torch.ones(1)}
    save_file(state, tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError):
        load_trained(network(), read_weights(tmp_path / "w.safetensors"))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (POINTER, "git lfs pull"),
        (b"<!DOCTYPE html><html></html>", "HTML"),
        (b"<html><body>404</body></html>", "HTML"),
        (b"\x1f\x8b\x08" + bytes(40), "gzip"),
        (b"PK\x03\x04" + bytes(40), "pickle"),
        (b"\x80\x02" + bytes(40), "pickle"),
        (b"", "0 bytes"),
    ],
)
def test_what_is_no_weights_file_is_called_by_its_name(tmp_path: Path, content: bytes, told: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=told):
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
    with pytest.raises(CheckpointError, match="'data'") as caught:
        saved.described("data")
    assert len(str(caught.value)) < 500


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
    with contextlib.suppress(ValueError):
        parse_tensor_file(bytes(content))
