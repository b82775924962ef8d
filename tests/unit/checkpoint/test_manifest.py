"""Every kind of damage is found, and the file and the rule are named."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from golden_sentences import raises

from paceline.checkpoint.manifest import read_components, verify
from paceline.checkpoint.store import CheckpointStore
from paceline.errors import CheckpointError, VersionError

SCALAR = {"dtype": "int8", "shape": []}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    components = {
        "model": {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)},
        "counters": {"step": 3},
    }
    return CheckpointStore(tmp_path / "checkpoints").save(3, components, {"world_size": 1})


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest and give it a valid digest again, as someone with a purpose would."""
    content = json.loads((path / "manifest.json").read_text())
    del content["digest"]
    change(content)
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    content["digest"] = hashlib.sha256(canonical.encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(content))


def is_blank(before: bytes, after: bytes) -> bool:
    """Say whether two JSON texts differ in nothing but the kind of their blanks."""
    try:
        return bool(json.loads(before) == json.loads(after))
    except ValueError:
        return False


def relist(path: Path, name: str) -> None:
    """List a changed file with its new size and digest."""
    content = (path / name).read_bytes()
    facts = {"size_bytes": len(content), "blake3": blake3(content).hexdigest()}
    component = name.split(".", maxsplit=1)[0]
    rewrite(path, lambda manifest: manifest["components"][component]["files"].update({name: facts}))


def test_a_whole_checkpoint_verifies(checkpoint: Path) -> None:
    manifest = verify(checkpoint)
    assert manifest.step == 3
    assert dict(manifest.facts) == {"world_size": 1}
    assert list(manifest.components) == ["model", "counters"]


@pytest.mark.parametrize("name", ["manifest.json", "model.json", "model.safetensors", "counters.json"])
class TestEachFile:
    def test_missing(self, checkpoint: Path, name: str) -> None:
        (checkpoint / name).unlink()
        with pytest.raises(CheckpointError, match=f"{name} is missing"):
            verify(checkpoint)
        with pytest.raises(CheckpointError, match=f"{name} is missing"):
            read_components(checkpoint)

    def test_truncated_at_every_length(self, checkpoint: Path, name: str) -> None:
        content = (checkpoint / name).read_bytes()
        for length in range(0, len(content), max(1, len(content) // 50)):
            (checkpoint / name).write_bytes(content[:length])
            with pytest.raises(CheckpointError, match=name):
                verify(checkpoint)
            with pytest.raises(CheckpointError, match=name):
                read_components(checkpoint)

    def test_one_flipped_bit(self, checkpoint: Path, name: str) -> None:
        content = (checkpoint / name).read_bytes()
        whole = verify(checkpoint)
        bits = range(8 * len(content))
        for bit in random.Random(1).sample(bits, min(100, len(bits))):
            damaged = bytearray(content)
            damaged[bit // 8] ^= 1 << bit % 8
            (checkpoint / name).write_bytes(damaged)
            if name == "manifest.json" and is_blank(content, damaged):
                assert verify(checkpoint) == whole
                continue
            for read in (verify, read_components):
                with pytest.raises(CheckpointError, match=name):
                    read(checkpoint)

    def test_longer(self, checkpoint: Path, name: str) -> None:
        with open(checkpoint / name, "ab") as file:
            file.write(b"\0")
        with pytest.raises(CheckpointError, match=name):
            verify(checkpoint)

    def test_not_a_regular_file(self, checkpoint: Path, name: str) -> None:
        (checkpoint / name).unlink()
        os.mkfifo(checkpoint / name)
        with pytest.raises(CheckpointError, match=f"{name}.*not a regular file"):
            verify(checkpoint)

    def test_a_pickle_in_its_place(self, checkpoint: Path, name: str, tmp_path: Path) -> None:
        mark = tmp_path / "executed"
        torch.save({"x": _Exploit(mark)}, checkpoint / name)
        with pytest.raises(CheckpointError, match=name):
            verify(checkpoint)
        with pytest.raises(CheckpointError, match=name):
            read_components(checkpoint)
        if name != "manifest.json":
            relist(checkpoint, name)
            with pytest.raises(CheckpointError, match=name):
                read_components(checkpoint)
        assert not mark.exists()


class _Exploit:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.mark}",)


def _rename_file(new: str) -> Callable[[dict[str, Any]], None]:
    def change(manifest: dict[str, Any]) -> None:
        files = manifest["components"]["counters"]["files"]
        files[new] = files.pop("counters.json")

    return change


@pytest.mark.parametrize("name", ["../outside.json", "/etc/hostname", "model.json", "sub/counters.json", ""])
def test_a_manifest_cannot_name_a_file_elsewhere(checkpoint: Path, name: str) -> None:
    rewrite(checkpoint, _rename_file(name))
    with raises(CheckpointError, path="checkpoints/step-00000003"):
        verify(checkpoint)


def test_another_format_version_is_not_damage(checkpoint: Path) -> None:
    rewrite(checkpoint, lambda manifest: manifest.update(format_version=3))
    manifest = checkpoint / "manifest.json"
    with raises(VersionError, value=3, path="checkpoints/step-00000003/manifest.json"):
        CheckpointStore(checkpoint.parent).newest_complete()
    rewrite(checkpoint, lambda manifest: manifest.update(format_version=2))
    manifest.write_text(manifest.read_text().replace('"format_version": 2', '"format_version": 3'))
    with raises(CheckpointError, path="checkpoints/step-00000003"):  # one flipped bit
        verify(checkpoint)


@pytest.mark.parametrize("name", ["../x", "/etc/x", "manifest", "a/b", "."])
def test_a_manifest_cannot_name_a_component_elsewhere(checkpoint: Path, name: str) -> None:
    def change(manifest: dict[str, Any]) -> None:
        entry = manifest["components"]["counters"]
        entry["files"] = {f"{name}.json": next(iter(entry["files"].values()))}
        manifest["components"][name] = manifest["components"].pop("counters")

    rewrite(checkpoint, change)
    with raises(CheckpointError, path="checkpoints/step-00000003"):
        verify(checkpoint)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda m: m.update(format_version=True), "format version is True"),
        (lambda m: m.pop("format_version"), "format version is None"),
        (lambda m: m.update(step="3"), "entry 'step' is '3'"),
        (lambda m: m.update(step=-3), "negative"),
        (lambda m: m.pop("facts"), "'facts'"),
        (lambda m: m.update(facts={"$tuple": []}), "facts are not an object"),
        (lambda m: m.update(components=[]), "'components'"),
        (lambda m: m["components"].update(counters=None), "'tensors'"),
        (lambda m: m["components"]["model"]["tensors"]["w"].update(shape=[-1]), "where a shape is expected"),
        (lambda m: m["components"]["model"]["tensors"]["w"].update(shape=[2**70]), "where a shape is expected"),
        (lambda m: m["components"]["model"]["tensors"]["w"].update(shape=[2**40, 2**40]), "have fewer bytes than"),
        (lambda m: m["components"]["model"]["tensors"]["w"].update(dtype=1), "'dtype'"),
        (
            lambda m: m["components"]["model"]["files"]["model.json"].update(blake3="x"),
            "expected 64 hexadecimal digits",
        ),
        (lambda m: m["components"]["model"].update(tensors={}), "lists the files"),
        (lambda m: m["components"]["counters"]["tensors"].update(x={"dtype": "int8", "shape": []}), "lists the files"),
    ],
)
def test_a_manifest_of_another_form_is_refused(
    checkpoint: Path, change: Callable[[dict[str, Any]], None], rule: str
) -> None:
    rewrite(checkpoint, change)
    with pytest.raises(CheckpointError, match=rule) as caught:
        verify(checkpoint)
    assert "manifest.json" in str(caught.value)


@pytest.mark.parametrize(
    "text", ["", "null", "[]", "7", "{", "[" * 100_000, "\x00" * 40, '{"step": ' + "9" * 9999 + "}"]
)
def test_garbage_in_the_place_of_the_manifest(checkpoint: Path, text: str) -> None:
    (checkpoint / "manifest.json").write_text(text)
    with raises(CheckpointError, path="checkpoints/step-00000003"):
        verify(checkpoint)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda t: t["w"].update(shape=[3, 2]), r"'w' is float32 \[2, 3\], but .* float32 \[3, 2\]"),
        (lambda t: t["b"].update(dtype="float16"), r"'b' is bfloat16 \[2\], but .* float16 \[2\]"),
        (lambda t: t.pop("b"), r"'b' is bfloat16 \[2\], but the manifest lists none"),
        (lambda t: t.update(x=SCALAR), r"'x' is absent, but .* int8 \[\]"),
    ],
)
def test_an_inventory_that_differs_from_the_file_is_found(
    checkpoint: Path, change: Callable[[dict[str, Any]], None], rule: str
) -> None:
    rewrite(checkpoint, lambda manifest: change(manifest["components"]["model"]["tensors"]))
    for read in (verify, read_components):
        with pytest.raises(CheckpointError, match=rule):
            read(checkpoint)


def test_a_listed_file_with_an_unknown_dtype_is_refused(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"F32"', b'"F31"'))
    relist(checkpoint, file.name)
    with raises(CheckpointError, path="checkpoints/step-00000003"):
        verify(checkpoint)
    with raises(CheckpointError, path="checkpoints/step-00000003"):
        read_components(checkpoint, ("model",))["model"]


def test_a_listed_structure_that_does_not_fit_is_refused(checkpoint: Path) -> None:
    for text in ('{"w": {"$tensor": "gone"}}', "[]", "{"):
        (checkpoint / "model.json").write_text(text)
        relist(checkpoint, "model.json")
        with raises(CheckpointError, path="checkpoints/step-00000003"):
            read_components(checkpoint, ("model",))["model"]


def test_what_is_no_directory_is_said_to_be_none(tmp_path: Path) -> None:
    with raises(CheckpointError, path="absent"):
        verify(tmp_path / "absent")
    (tmp_path / "old.pt").write_bytes(pickle.dumps({"a": 1}))
    with raises(CheckpointError, path="old.pt"):
        verify(tmp_path / "old.pt")
    with raises(CheckpointError, path=tmp_path):
        verify(tmp_path)
