"""Does every state come back exactly, and is every other one refused by name?"""

from __future__ import annotations

import enum
import json
import math
import struct
import threading
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from paceline.checkpoint.codec import TensorSpec, decode, encode, inventory
from paceline.checkpoint.tensor_file import read_tensor_file, write_tensor_file
from paceline.errors import CheckpointError

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint64,
        torch.uint32,
        torch.uint16,
        torch.uint8,
    ),
    *(torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e8m0fnu),
]


def bits(tensor: Tensor) -> bytes:
    dense = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    return dense.reshape(-1).view(torch.uint8).numpy().tobytes()


def same(left: object, right: object) -> bool:
    """Equal in type, order and bits, all the way down."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return TensorSpec.of(left) == TensorSpec.of(right) and bits(left) == bits(right)
    if type(left) is not type(right):
        return False
    if isinstance(left, dict) and isinstance(right, dict):
        return same(list(left.items()), list(right.items()))
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float) and isinstance(right, float):
        return struct.pack("d", left) == struct.pack("d", right)
    return left == right


def through_file(state: Any, directory: Path) -> Any:
    structure, flat = encode(state)
    file = directory / "state.safetensors"
    write_tensor_file(file, flat, {"note": "\ud800 ok"})
    return decode(json.loads(json.dumps(structure, allow_nan=False)), read_tensor_file(file).tensors)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    high = 2 if dtype is torch.bool else 256
    raw = torch.randint(high, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
    tensor = raw.view(dtype).squeeze(-1) if raw.numel() else torch.empty(shape, dtype=dtype)
    if draw(st.booleans()):
        tensor = tensor.permute(tuple(reversed(range(tensor.ndim))))
    if draw(st.booleans()) and tensor.ndim:
        tensor = tensor[::2]
    return tensor


keys = st.text(max_size=4) | st.integers() | st.sampled_from(["$tensor", "a.b", "__metadata__", "\ud800", ""])
leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | tensors()
states = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=80, deadline=None, database=None)
@given(state=st.dictionaries(keys, states, max_size=4))
def test_any_state_returns_exactly_through_json_and_a_real_file(
    tmp_path_factory: pytest.TempPathFactory, state: dict[object, object]
) -> None:
    assert same(state, through_file(state, tmp_path_factory.mktemp("codec")))


def test_the_keys_of_a_flat_dictionary_of_tensors_are_the_tensor_names() -> None:
    state = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).state_dict()
    structure, flat = encode(state)
    assert list(flat) == list(state)
    assert list(structure) == list(state)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads in /proc")
def test_a_thread_that_encodes_begins_no_threads_of_torch() -> None:
    # Large enough for torch to share such a copy out among threads.
    state = {"weight": torch.zeros(512, 512, 3, 3).to(memory_format=torch.channels_last)}
    before, counted = torch.get_num_threads(), []
    torch.set_num_threads(4)

    def work() -> None:
        counted.append(len(list(Path("/proc/self/task").iterdir())))
        encode(state, where="model")
        counted.append(len(list(Path("/proc/self/task").iterdir())))

    try:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    finally:
        torch.set_num_threads(before)
    assert counted[1] <= counted[0]


def test_two_paths_that_spell_the_same_name_stay_two_tensors(tmp_path: Path) -> None:
    state: dict[Any, Any] = {
        "a": {"b": torch.tensor(1)},
        "a.b": torch.tensor(2),
        0: torch.tensor(3),
        "0": torch.tensor(4),
    }
    state["__metadata__"] = torch.tensor(5)
    assert same(state, through_file(state, tmp_path))


def test_channels_last_views_transposes_and_parameters_keep_their_values(tmp_path: Path) -> None:
    image = torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last)
    base = torch.arange(6.0)
    state = {
        "image": image,
        "transposed": image.transpose(1, 3),
        "expanded": base[:1].expand(5),
        "view": base[1:3],
        "parameter": nn.Parameter(base),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        **{
            f"of {dtype}": image.to(dtype, memory_format=torch.channels_last)
            for dtype in (torch.bfloat16, torch.float64, torch.bool, torch.int8, torch.complex64, torch.complex128)
        },
        "of eight bits": image.to(torch.float8_e4m3fn).permute(3, 2, 1, 0),
        "ordered": OrderedDict(z=1, a=2),
    }
    returned = through_file(state, tmp_path)
    assert torch.equal(returned["image"], image)
    for name in [name for name in state if str(name).startswith("of torch.")]:
        assert torch.equal(returned[name], state[name]), name
    assert torch.equal(returned["of eight bits"].float(), state["of eight bits"].float())
    assert torch.equal(returned["transposed"], image.transpose(1, 3))
    assert returned["expanded"].tolist() == [0.0] * 5
    assert returned["view"].tolist() == [1.0, 2.0]
    assert not returned["parameter"].requires_grad
    assert returned["conjugate"].tolist() == [1 - 2j]
    assert list(returned["ordered"]) == ["z", "a"]


class Colour(enum.IntEnum):
    RED = 1


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (np.float64(1.0), "numpy.float64"),
        (np.int64(1), "numpy.int64"),
        (np.zeros(2), "numpy.ndarray"),
        (Path("x"), "PosixPath"),
        ({1, 2}, "builtins.set"),
        (Colour.RED, "Colour"),
        (Pair(1, 2), "Pair"),
        (torch.float32, "torch.dtype"),
        (torch.empty(2, device="meta"), "torch.Tensor"),
        (torch.eye(2).to_sparse(), "torch.Tensor"),
        (print, "builtin_function_or_method"),
    ],
)
def test_what_would_come_back_changed_is_refused_with_its_path_and_type(value: object, kind: str) -> None:
    with pytest.raises(CheckpointError, match=r"^optimizer\.groups\.0\.lr cannot be saved: ") as caught:
        encode({"groups": [{"lr": value}]}, where="optimizer")
    assert kind in str(caught.value)


@pytest.mark.parametrize("key", [True, 1.5, None, (1,)])
def test_a_key_that_json_would_change_is_refused(key: object) -> None:
    with pytest.raises(CheckpointError, match=r"^model\.inner cannot be saved: the key is of type"):
        encode({"inner": {key: 1}}, where="model")


def test_a_state_that_contains_itself_is_refused() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(CheckpointError, match="contains itself"):
        encode({"loop": loop})


@pytest.mark.parametrize(
    "structure",
    [
        {"$tensor": "absent"},
        {"$tensor": ["list"]},
        {"$unknown": 1},
        {"$float": "00"},
        {"$float": "zz"},
        {"$int": "zz"},
        {"$dict": [[1, 2, 3]]},
        {"$dict": [[[], 2]]},
        {"$tuple": 5},
        {"$tuple": [], "more": 1},
    ],
)
def test_a_structure_of_no_known_form_is_an_error_not_a_crash(structure: object) -> None:
    with pytest.raises(CheckpointError, match="not valid"):
        decode(structure, {})


def test_numbers_keep_their_bits() -> None:
    signalling = struct.unpack(">d", bytes.fromhex("7ff8000000000123"))[0]
    state = {
        "zero": -0.0,
        "tiny": 5e-324,
        "inf": -math.inf,
        "nan": signalling,
        "large": -(2**4000),
        "one": 1.0,
    }
    assert same(state, decode(json.loads(json.dumps(encode(state)[0], allow_nan=False)), {}))


def test_the_inventory_lists_dtype_and_shape_under_the_stored_names() -> None:
    state = {"w": torch.zeros(2, 3, dtype=torch.bfloat16), "n": {"step": torch.tensor(1.0)}}
    assert inventory(state) == {"w": TensorSpec("bfloat16", (2, 3)), "n.step": TensorSpec("float32", ())}
