"""What does ``manifest.json`` say, and what must it satisfy to be believed?

The manifest is the last file written. It lists every other file with size and SHA-256, every tensor with
dtype and shape, and ends with a digest of itself, so that one flipped bit anywhere in a checkpoint is found.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from paceline.checkpoint import codec
from paceline.checkpoint.codec import TensorSpec
from paceline.checkpoint.durable import FileFacts, patient
from paceline.checkpoint.parts import is_part_file
from paceline.checkpoint.tensor_file import read_regular_file
from paceline.errors import CheckpointError
from paceline.plain_json import load_json

FILE_NAME = "manifest.json"
FORMAT_VERSION = 1
_SIZE_LIMIT_BYTES = 100_000_000
_DIGEST = re.compile(r"[0-9a-f]{64}")
_COMPONENT = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")

T = TypeVar("T")


@dataclass(frozen=True)
class ComponentEntry:
    """The files of one component by name, and its tensors by stored name."""

    files: Mapping[str, FileFacts]
    tensors: Mapping[str, TensorSpec]

    @property
    def tensor_files(self) -> list[str]:
        """The files with the tensors: one, or those of the processes that each wrote a part."""
        return sorted(name for name in self.files if name.endswith(".safetensors"))

    @property
    def is_in_parts(self) -> bool:
        """Whether several files hold parts of the same tensors."""
        return any("/" in name for name in self.files)


@dataclass(frozen=True)
class Manifest:
    """What one checkpoint holds.

    Attributes:
        step: Optimizer steps done when it was taken.
        facts: What the saver said about the run (world size, digest of the recipe, ...).
        components: In the order they were registered.
    """

    step: int
    facts: Mapping[str, Any]
    components: Mapping[str, ComponentEntry]

    @property
    def size_bytes(self) -> int:
        """Sum of the component files; the manifest itself is not counted."""
        return sum(file.size_bytes for entry in self.components.values() for file in entry.files.values())


def check_component_names(names: Iterable[str]) -> None:
    """Refuse a name that could not be a file name, or that would overwrite the manifest.

    Raises:
        CheckpointError: Naming the component.
    """
    for name in names:
        if not _COMPONENT.fullmatch(name) or f"{name}.json" == FILE_NAME:
            raise CheckpointError(
                f"{name!r} cannot name a component: use letters, digits, '_' and '-', "
                "beginning with a letter, and not 'manifest'."
            )


def to_bytes(manifest: Manifest) -> bytes:
    """Write the manifest as JSON with its own digest."""
    content = {
        "format_version": FORMAT_VERSION,
        "step": manifest.step,
        "facts": codec.encode(dict(manifest.facts), where="facts")[0],
        "components": {name: _component_json(entry) for name, entry in manifest.components.items()},
    }
    return json.dumps({**content, "digest": _digest(content)}, indent=1).encode("ascii")


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of a checkpoint directory and check it against its own digest.

    Raises:
        OSError: If it cannot be read.
        ValueError: Naming the rule that is broken.
    """
    file = path / FILE_NAME
    if patient(os.stat)(file).st_size > _SIZE_LIMIT_BYTES:
        raise ValueError(f"it is larger than {_SIZE_LIMIT_BYTES} bytes")
    try:
        content = load_json(read_regular_file(file))
    except ValueError as error:
        raise ValueError("it is not JSON") from error
    if not isinstance(content, dict):
        raise ValueError("it is not a JSON object")
    version = content.get("format_version")
    if version != FORMAT_VERSION or isinstance(version, bool):
        raise ValueError(f"its format version is {version!r}, but this version of Paceline reads {FORMAT_VERSION}")
    if content.pop("digest", None) != _digest(content):
        raise ValueError("its content does not match its own digest")
    return _manifest(content)


def _component_json(entry: ComponentEntry) -> dict[str, Any]:
    return {
        "files": {name: {"size_bytes": file.size_bytes, "sha256": file.sha256} for name, file in entry.files.items()},
        "tensors": {name: {"dtype": spec.dtype, "shape": list(spec.shape)} for name, spec in entry.tensors.items()},
    }


def _digest(content: Mapping[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def _manifest(content: Mapping[str, Any]) -> Manifest:
    components = {}
    for name, entry in _field(content, "components", dict).items():
        if not _COMPONENT.fullmatch(name) or f"{name}.json" == FILE_NAME:
            raise ValueError(f"it names a component {name!r}, which is not allowed")
        components[name] = _component(name, entry)
    facts = codec.decode(_field(content, "facts", dict), {})
    if not isinstance(facts, dict):
        raise ValueError("its facts are not an object")
    return Manifest(step=_count(content, "step"), facts=facts, components=components)


def _component(name: str, entry: Any) -> ComponentEntry:
    tensors = {key: _tensor(value) for key, value in _field(entry, "tensors", dict).items()}
    files = {key: _file(value) for key, value in _field(entry, "files", dict).items()}
    # Comparing with the only allowed names, not searching for '..', leaves no way out of the directory.
    parts = {key for key in files if is_part_file(key, name)} if tensors else set()
    expected = {f"{name}.json"} | (parts or ({f"{name}.safetensors"} if tensors else set()))
    if files.keys() != expected:
        raise ValueError(f"it lists the files {sorted(files)} for {name!r}, expected {sorted(expected)}")
    return ComponentEntry(files, tensors)


def _file(value: Any) -> FileFacts:
    digest = _field(value, "sha256", str)
    if not _DIGEST.fullmatch(digest):
        raise ValueError(f"it holds {digest!r} where a SHA-256 should be")
    return FileFacts(_count(value, "size_bytes"), digest)


def _tensor(value: Any) -> TensorSpec:
    shape = _field(value, "shape", list)
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"it holds {shape!r} where a shape should be")
    return TensorSpec(_field(value, "dtype", str), tuple(shape))


def _count(value: Any, key: str) -> int:
    number = _field(value, key, int)
    if number < 0:
        raise ValueError(f"its {key!r} is {number}, which is negative")
    return number


def _field(value: Any, key: str, kind: type[T]) -> T:
    found = value.get(key) if isinstance(value, dict) else None
    if type(found) is not kind:
        raise ValueError(f"its entry {key!r} is {found!r}, expected {kind.__name__}")
    return found
