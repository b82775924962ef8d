"""States return exactly from JSON and safetensors files, and everything else is refused by name."""

from __future__ import annotations

import enum
import json
import math
import os
import pickle
import struct
import subprocess
import sys
import threading
import zipfile
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blake3 import blake3
from golden_sentences import raises
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from paceline.checkpoint.durable import FileFacts
from paceline.checkpoint.format import TensorSpec, decode, encode, inventory, read_tensor_file, write_tensor_file
from paceline.checkpoint.store import CheckpointStore
from paceline.checkpoint.weights import read_weights
from paceline.errors import CheckpointError

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
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
    state = {"zero": -0.0, "tiny": 5e-324, "inf": -math.inf, "nan": signalling, "large": -(2**4000), "one": 1.0}
    assert same(state, decode(json.loads(json.dumps(encode(state)[0], allow_nan=False)), {}))


def test_the_inventory_lists_dtype_and_shape_under_the_stored_names() -> None:
    state = {"w": torch.zeros(2, 3, dtype=torch.bfloat16), "n": {"step": torch.tensor(1.0)}}
    assert inventory(state) == {"w": TensorSpec("bfloat16", (2, 3)), "n.step": TensorSpec("float32", ())}


class Exploit:
    """Runs a command when unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.mark}",)


def raw_file(path: Path, header: object, values: bytes = b"", *, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + values)
    return path


def test_the_safetensors_library_reads_our_files(tmp_path: Path) -> None:
    tensors = {
        "b": torch.randn(3, 4),
        "a": torch.randn(5).to(torch.bfloat16),
        "flag": torch.tensor(True),
        "none": torch.empty(0, 3),
        "": torch.arange(3),
    }
    file = tmp_path / "x.safetensors"
    facts = write_tensor_file(file, tensors, {"format": "pt", "recipe": '{"a": "ü"}'})
    loaded = load_file(file)
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[key], value) for key, value in tensors.items())
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt", "recipe": '{"a": "ü"}'}
    content = file.read_bytes()
    assert facts == FileFacts(len(content), blake3(content).hexdigest())
    assert int.from_bytes(content[:8], "little") % 8 == 0


def test_the_file_does_not_depend_on_the_memory_layout(tmp_path: Path) -> None:
    strided = {
        "channels_last": torch.randn(8, 5, 3, 3).to(memory_format=torch.channels_last),
        "bfloat16": torch.randn(4, 6).to(torch.bfloat16).T,
        "complex": torch.randn(4, 6, dtype=torch.complex128).T,
        "bool": (torch.rand(6, 4) > 0.5).T,
        "float8": torch.randn(6, 4).to(torch.float8_e5m2).T,
        "step": torch.arange(12)[::3],
        "expanded": torch.ones(1).expand(3),
        "contiguous": torch.randn(2, 2),
    }
    assert not any(each.is_contiguous() for name, each in strided.items() if name != "contiguous")
    facts = write_tensor_file(tmp_path / "strided", strided, {})
    contiguous = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in strided.items()}
    assert facts == write_tensor_file(tmp_path / "contiguous", contiguous, {})
    assert (tmp_path / "strided").read_bytes() == (tmp_path / "contiguous").read_bytes()
    assert all(same(tensor, strided[name]) for name, tensor in read_tensor_file(tmp_path / "strided").tensors.items())


def test_equal_states_give_equal_files_whatever_their_order(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(3), "b": torch.zeros(2, dtype=torch.int64), "c": torch.zeros(3)}
    write_tensor_file(tmp_path / "1", tensors, {})
    write_tensor_file(tmp_path / "2", dict(reversed(tensors.items())), {})
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()


def test_files_of_the_safetensors_library_are_read(tmp_path: Path) -> None:
    tensors = {"w": torch.randn(4, 2, dtype=torch.float16), "n": torch.arange(3)}
    save_file(tensors, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    file = read_tensor_file(tmp_path / "theirs.safetensors")
    assert file.metadata == {"format": "pt"}
    assert all(torch.equal(file.tensors[key], value) for key, value in tensors.items())


def test_a_load_needs_no_second_copy(tmp_path: Path) -> None:
    """A separate process reads it, and its memory limit is little more than the state."""
    state = {"a": torch.rand(10_000_000), "b": torch.rand(10_000_000).to(torch.float8_e4m3fnuz)}
    saved = CheckpointStore(tmp_path).save(1, {"model": state}, {})
    script = """
import resource, sys
from pathlib import Path
from paceline.checkpoint.manifest import read_components

used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData")) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (used + 60_000_000,) * 2)
read_components(Path(sys.argv[1]))
"""
    subprocess.run([sys.executable, "-c", script, saved], timeout=100, check=True)


@pytest.mark.parametrize("blanks", range(4))
def test_tensors_that_another_program_did_not_align_are_read(tmp_path: Path, blanks: int) -> None:
    header = json.dumps({"__metadata__": None, "a": ENTRY}).encode() + b" " * blanks
    (tensor,) = read_tensor_file(raw_file(tmp_path / "odd", header, struct.pack("<2f", 1.5, -2.0))).tensors.values()
    assert tensor.tolist() == [1.5, -2.0]
    assert tensor.data_ptr() % 4 == 0


def test_an_existing_file_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("mine")
    with pytest.raises(FileExistsError):
        write_tensor_file(tmp_path / "x", {"a": torch.ones(1)}, {})
    assert (tmp_path / "x").read_text() == "mine"


def test_pickles_are_refused_and_never_run(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    (tmp_path / "bare.pt").write_bytes(pickle.dumps(Exploit(mark)))
    torch.save({"model": Exploit(mark)}, tmp_path / "zip.pt")
    assert zipfile.is_zipfile(tmp_path / "zip.pt")
    torch.save({"w": torch.ones(2)}, tmp_path / "honest.pt", _use_new_zipfile_serialization=False)
    for name in ("bare.pt", "zip.pt", "honest.pt"):
        with pytest.raises(CheckpointError, match=r"looks like a pickle.*never opened: convert it"):
            read_tensor_file(tmp_path / name)
    assert not mark.exists()


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "values", "length", "rule"),
    [
        (b"", b"", 100_000_001, "more than the limit"),
        (b"{}", b"", 3, "claims 3 bytes, but the file has 10"),
        (b"{x}", b"", None, "not JSON"),
        (b"[" * 100_000, b"", None, "not JSON"),
        (b"\xff\xfe{}", b"", None, "not JSON"),
        ([], b"", None, "not a JSON object"),
        ({"a": {**ENTRY, "dtype": "float32"}}, b"12345678", None, "does not describe"),
        ({"a": {**ENTRY, "dtype": ["F32"]}}, b"12345678", None, "does not describe"),
        ({"a": {**ENTRY, "shape": [10**4000] * 1000}}, b"12345678", None, "does not describe"),
        ({"a": {**ENTRY, "shape": [2**62] * 1_000_000}}, b"12345678", None, "does not describe"),
        ({"a": {**ENTRY, "shape": [3]}}, b"12345678", None, "does not describe"),
        ({"a": {"dtype": "F64", "shape": {}, "data_offsets": [0, 8]}}, b"12345678", None, "does not describe"),
        ({"a": {**ENTRY, "shape": [0, 2**62, 2**62], "data_offsets": [0, 0]}}, b"", None, "does not describe"),
        ({"a": {**ENTRY, "data_offsets": [8, 16]}}, b"12345678", None, "does not describe"),
        ({"a": {**ENTRY, "data_offsets": [0, 800]}}, b"12345678", None, "does not describe"),
        ({"a": ENTRY}, b"1234567", None, "does not describe"),
        ({"a": ENTRY}, b"123456789", None, "does not describe"),
        ({"a": ENTRY, "__metadata__": {"x": 1}}, b"12345678", None, "does not describe|not a JSON object"),
        ({"a": ENTRY, "__metadata__": {"raw_dtypes": '{"a": "save"}'}}, b"12345678", None, "unknown dtype"),
        ({"a": ENTRY, "__metadata__": {"raw_dtypes": '{"b": "int8"}'}}, b"12345678", None, "but has no such tensor"),
        ({"a": ENTRY, "__metadata__": {"raw_dtypes": '{"a": "int8"}'}}, b"12345678", None, "do not match"),
        ({"a": ENTRY, "__metadata__": {"raw_dtypes": "[]"}}, b"12345678", None, "raw dtypes"),
        ({"a": ENTRY, "__metadata__": {"raw_dtypes": "{"}}, b"12345678", None, "raw dtypes"),
    ],
)
def test_a_header_that_does_not_fit_its_file_is_refused(
    tmp_path: Path, header: object, values: bytes, length: int | None, rule: str
) -> None:
    file = raw_file(tmp_path / "bad.safetensors", header, values, length=length)
    with pytest.raises(CheckpointError, match=rule) as caught:
        read_tensor_file(file)
    assert "bad.safetensors is not a whole safetensors file" in str(caught.value)


def test_a_missing_file_a_short_file_and_a_pipe_are_named(tmp_path: Path) -> None:
    with raises(CheckpointError, path="absent"):
        read_tensor_file(tmp_path / "absent")
    (tmp_path / "short").write_bytes(b"123")
    with raises(CheckpointError, path="short"):
        read_tensor_file(tmp_path / "short")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(CheckpointError, match=rf"^Cannot read {path}: it is not a regular file \(EISDIR\). Give"):
            read_tensor_file(path)


def test_programs_are_told_from_pickles(tmp_path: Path) -> None:
    for name in ("mine.pt2", "mine.onnx"):
        (tmp_path / name).write_bytes(b"PK\x03\x04")
        with pytest.raises(CheckpointError, match=r"a torch.export or ONNX .*: give the run"):
            read_weights(tmp_path / name)


def test_a_file_of_very_many_tensors_is_refused_before_they_are_read(tmp_path: Path) -> None:
    entry = '"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    header = f"{{{','.join(entry % number for number in range(2**18 + 1))}}}".encode()
    (tmp_path / "w.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with raises(CheckpointError, path="w.safetensors"):
        read_tensor_file(tmp_path / "w.safetensors")
