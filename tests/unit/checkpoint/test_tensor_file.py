"""Can others read our safetensors files, can we read theirs, and is everything else refused?"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from paceline.checkpoint.tensor_file import read_tensor_file, write_tensor_file
from paceline.checkpoint.weights import read_weights
from paceline.errors import CheckpointError


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
    assert (facts.size_bytes, facts.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    assert int.from_bytes(content[:8], "little") % 8 == 0


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
        (b"", b"", 1 << 62, "more than the limit"),
        (b"", b"", 100_000_001, "more than the limit"),
        (b"{}", b"", 3, "claims 3 bytes, but the file has 10"),
        (b"{x}", b"", None, "not JSON"),
        (b"[" * 100_000, b"", None, "not JSON"),
        (b"\xff\xfe{}", b"", None, "not JSON"),
        ([], b"", None, "not a JSON object"),
        ({"a": {**ENTRY, "dtype": "F31"}}, b"12345678", None, "does not describe"),
        ({"a": {**ENTRY, "shape": [3]}}, b"12345678", None, "does not describe"),
        ({"a": {**ENTRY, "shape": [1 << 62, 1 << 62]}}, b"12345678", None, "does not describe"),
        ({"a": {**ENTRY, "data_offsets": [8, 16]}}, b"12345678", None, "does not describe"),
        ({"a": {**ENTRY, "data_offsets": [0, 800]}}, b"12345678", None, "does not describe"),
        ({"a": ENTRY}, b"1234567", None, "does not describe"),
        ({"a": ENTRY}, b"123456789", None, "does not describe"),
        ({"a": ENTRY, "__metadata__": {"x": 1}}, b"12345678", None, "does not describe|not a JSON object"),
        ({"a": ENTRY, "__metadata__": {"raw_dtypes": '{"a": "save"}'}}, b"12345678", None, "unknown dtype"),
        ({"a": ENTRY, "__metadata__": {"raw_dtypes": '{"b": "int8"}'}}, b"12345678", None, "which it lacks"),
        ({"a": ENTRY, "__metadata__": {"raw_dtypes": '{"a": "int8"}'}}, b"12345678", None, "do not fit"),
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
    with pytest.raises(CheckpointError, match=r"absent: No such file or directory \(ENOENT\)"):
        read_tensor_file(tmp_path / "absent")
    (tmp_path / "short").write_bytes(b"123")
    with pytest.raises(CheckpointError, match="has 3 bytes, too few"):
        read_tensor_file(tmp_path / "short")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_tensor_file(tmp_path / "pipe")


def test_programs_are_told_from_pickles(tmp_path: Path) -> None:
    for name in ("mine.pt2", "mine.onnx"):
        (tmp_path / name).write_bytes(b"PK\x03\x04")
        with pytest.raises(CheckpointError, match=r"a program of torch.export or ONNX .*: give the run"):
            read_weights(tmp_path / name)
