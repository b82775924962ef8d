"""The manifest of a checkpoint, and the verified reading of the files that it lists.

The manifest is the last file written. It lists every other file with size and digest and every tensor with dtype and
shape, and ends with a digest of itself, so that one flipped bit anywhere in a checkpoint is found.

Everything is checked before use: the manifest against its own digest, every file against its size and digest, every
tensor against the inventory. Reading a component checks the same bytes that it then uses.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from paceline.checkpoint.durable import FileFacts, hash_file, is_disk_failure, read_regular_file, with_retries
from paceline.checkpoint.format import (
    MAX_DIMENSIONS,
    SIZE_LIMIT_BYTES,
    ChunkOf,
    TensorFile,
    TensorSpec,
    assemble,
    check_cover,
    decode,
    encode,
    pickle_hint,
    read_chunks,
    read_header,
    read_tensors,
)
from paceline.errors import CheckpointError, UnreadableError, VersionError, did_you_mean
from paceline.parsing.plain_text import load_json

MANIFEST = "manifest.json"
_VERSION = 2
_COMPONENT = re.compile(r"(?!manifest$)[A-Za-z][A-Za-z0-9_-]*")
_PART = re.compile(r"/part-\d{5}\.safetensors")

T = TypeVar("T")


@dataclass(frozen=True)
class ComponentEntry:
    """The files of one component by name, and its tensors by stored name."""

    files: Mapping[str, FileFacts]
    tensors: Mapping[str, TensorSpec]

    @property
    def tensor_files(self) -> list[str]:
        """The files that contain the tensors: one, or one for each process that wrote a part."""
        return sorted(name for name in self.files if name.endswith(".safetensors"))


@dataclass(frozen=True)
class Manifest:
    """The contents of one checkpoint.

    Attributes:
        step: Optimizer steps done when it was taken.
        facts: The saver's facts about the run (world size, digest of the recipe, ...).
        components: In the order they were registered.
    """

    step: int
    facts: Mapping[str, Any]
    components: Mapping[str, ComponentEntry]

    def to_bytes(self) -> bytes:
        """Write the manifest as JSON with its own digest."""
        content = {
            "format_version": _VERSION,
            "step": self.step,
            "facts": encode(dict(self.facts), where="facts")[0],
            "components": {
                name: {
                    "files": {file: facts.to_json() for file, facts in entry.files.items()},
                    "tensors": {
                        key: {"dtype": spec.dtype, "shape": list(spec.shape)} for key, spec in entry.tensors.items()
                    },
                }
                for name, entry in self.components.items()
            },
        }
        return json.dumps({**content, "digest": _digest(content)}, indent=1).encode("ascii")


def check_component_names(names: Iterable[str]) -> None:
    """Refuse a name that could not be a file name, or that would overwrite the manifest.

    Raises:
        CheckpointError: Naming the component.
    """
    for name in names:
        if not _COMPONENT.fullmatch(name):
            raise CheckpointError(
                f"{name!r} is not a valid component name: use letters, digits, '_' and '-', "
                "beginning with a letter, and not 'manifest'."
            )


def parse_manifest(path: Path) -> Manifest:
    """Read the manifest of a checkpoint directory and check it against its own digest.

    Raises:
        OSError: If it cannot be read.
        VersionError: If another version of Paceline wrote it.
        ValueError: Naming the broken rule.
    """
    file = path / MANIFEST
    if with_retries(os.stat)(file).st_size > SIZE_LIMIT_BYTES:
        raise ValueError(f"it is larger than {SIZE_LIMIT_BYTES} bytes")
    try:
        content = load_json(read_regular_file(file))
    except ValueError as error:
        raise ValueError("it is not JSON") from error
    check_stamp(content, file, _VERSION, _digest)
    entries = _field(content, "components", dict)
    for name in entries:
        if not _COMPONENT.fullmatch(name):
            raise ValueError(f"it names a component {name!r}, which is not allowed")
    facts = decode(_field(content, "facts", dict), {})
    if not isinstance(facts, dict):
        raise ValueError("its facts are not an object")
    components = {name: _component(name, entry) for name, entry in entries.items()}
    if (step := _field(content, "step", int)) < 0:
        raise ValueError(f"its 'step' is {step}, which is negative")
    return Manifest(step, facts, components)


def check_stamp(content: Any, name: object, expected: int, digest_of: Callable[[Any], str]) -> None:
    """Check the format version of a JSON document, and its own digest, which is removed.

    Raises:
        VersionError: If another version wrote it.
        ValueError: If it is damaged.
    """
    if not isinstance(content, dict):
        raise ValueError("it is not a JSON object")
    version, digest = content.get("format_version"), content.pop("digest", None)
    if version != expected:
        # A flipped bit in the version is damage: the digest still matches that of the expected one.
        if type(version) is int and digest != digest_of({**content, "format_version": expected}):
            raise VersionError.of(name, version)
        raise ValueError(f"its format version is {version!r}")
    if digest != digest_of(content):
        raise ValueError("its content does not match its own digest")


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode("ascii")).hexdigest()


def _component(name: str, entry: Any) -> ComponentEntry:
    tensors, files = {}, {}
    for key, value in _field(entry, "tensors", dict).items():
        shape = _field(value, "shape", list)
        if len(shape) > MAX_DIMENSIONS or not all(type(size) is int and 0 <= size < 2**63 for size in shape):
            raise ValueError(f"it holds {shape!r} where a shape is expected")
        tensors[key] = TensorSpec(_field(value, "dtype", str), tuple(shape))
    for key, value in _field(entry, "files", dict).items():
        files[key] = FileFacts.from_json(value if isinstance(value, dict) else {})
    if sum(math.prod(spec.shape) for spec in tensors.values()) > sum(each.size_bytes for each in files.values()):
        raise ValueError(f"its files have fewer bytes than {name!r} has numbers")
    # Comparing with the only allowed names, rather than searching for '..', rules out paths outside the directory.
    parts = {key for key in files if key.startswith(name) and _PART.fullmatch(key, len(name))}
    expected = {f"{name}.json"} | ((parts or {f"{name}.safetensors"}) if tensors else set())
    if files.keys() != expected:
        raise ValueError(f"it lists the files {sorted(files)} for {name!r}, expected {sorted(expected)}")
    return ComponentEntry(files, tensors)


def _field(value: Any, key: str, kind: type[T]) -> T:
    entry = value.get(key) if isinstance(value, dict) else None
    if type(entry) is not kind:
        raise ValueError(f"its entry {key!r} is {entry!r}, expected {kind.__name__}")
    return entry


def read_manifest(path: Path) -> Manifest:
    """Read a checkpoint's manifest; only the manifest itself is checked.

    Raises:
        CheckpointError: If it is not a checkpoint, or the manifest is missing, damaged or of another version.
        UnreadableError: If it cannot be read now; every function here may raise this.
    """
    with _naming(path, MANIFEST):
        try:
            # Not Path.is_dir, which may treat a disk error as "no".
            is_folder = path.is_symlink() or stat.S_ISDIR(with_retries(os.stat)(path).st_mode)
        except FileNotFoundError:
            is_folder = False
        if is_folder:
            return parse_manifest(path)
        exists, start = path.exists(), b""
        if path.is_file():
            with open(path, "rb") as file:
                start = file.read(8)
    if not exists:
        raise CheckpointError(
            f"{path} does not exist; give a checkpoint directory, such as RUN/checkpoints/step-00000120.", path=path
        )
    raise CheckpointError(
        f"{path} is a file, but a checkpoint is a directory with a {MANIFEST}{pickle_hint(start, path.name)}.",
        path=path,
    )


def check_sizes(path: Path) -> Manifest:
    """Check what can be checked without reading the values: the manifest, and each file's presence and size.

    Raises:
        CheckpointError: Naming the file and the broken rule.
    """
    manifest = read_manifest(path)
    for entry in manifest.components.values():
        for name, facts in entry.files.items():
            with _naming(path, name):
                status = with_retries(os.stat)(path / name)
                if not stat.S_ISREG(status.st_mode):
                    raise ValueError("it is not a regular file")
                _compare(replace(facts, size_bytes=status.st_size), facts)
    return manifest


def verify(path: Path) -> Manifest:
    """Check every byte of a checkpoint; memory use does not depend on its size.

    Raises:
        CheckpointError: Naming the file and the broken rule.
    """
    manifest = check_sizes(path)
    for component, entry in manifest.components.items():
        headers = []
        for name, facts in entry.files.items():
            with _naming(path, name):
                _compare(hash_file(path / name), facts)
        for name in entry.tensor_files:
            with _naming(path, name):
                headers.append(read_header(path / name))
        with _naming(path, entry.tensor_files[0] if len(entry.tensor_files) == 1 else component):
            check_cover(entry.tensors, headers)
    return manifest


def read_components(
    path: Path, names: Collection[str] | None = None, *, chunks: Mapping[str, ChunkOf] | None = None
) -> dict[str, dict[str, Any]]:
    """Read several components' states (default: all), and check their files.

    Args:
        path: The checkpoint.
        names: The components.
        chunks: The requested part of each tensor, by component. Only that part is read, so digests are not compared;
            use :func:`verify` for that.

    Returns:
        The states as they were saved, by name; tensors are on the CPU and share no memory with one another.

    Raises:
        CheckpointError: If the checkpoint lacks a component, or a file is damaged.
    """
    manifest = read_manifest(path)
    entries = {name: _entry(path, manifest, name) for name in (manifest.components if names is None else names)}
    states = {}
    for name, entry in entries.items():
        tensors: dict[str, Tensor] = {}
        if entry.tensors and chunks and name in chunks:
            with _naming(path, name):
                tensors = read_chunks([path / file for file in entry.tensor_files], entry.tensors, chunks[name])
        elif entry.tensors:
            tensors = _read_tensors(path, name, entry).tensors
        file = f"{name}.json"
        with _naming(path, file):
            text = read_regular_file(path / file)
            _compare(FileFacts.of(text), entry.files[file])
            try:
                structure = load_json(text)
            except ValueError as error:
                raise ValueError("it is not JSON") from error
            states[name] = decode(structure, tensors)
            if not isinstance(states[name], dict):
                raise ValueError("it does not hold a dictionary")
    return states


def read_weights_file(path: Path, name: str) -> TensorFile:
    """Read one component's tensors and its file's metadata, checking the bytes that are returned.

    Raises:
        CheckpointError: If the checkpoint lacks the component, or the file is damaged.
    """
    entry = _entry(path, read_manifest(path), name)
    if not entry.tensors:
        raise CheckpointError(f"{path} holds no tensors in its component {name!r}.")
    return _read_tensors(path, name, entry)


def _entry(path: Path, manifest: Manifest, name: str) -> ComponentEntry:
    if name not in manifest.components:
        raise CheckpointError(
            f"{path} holds no component {name!r}; it holds "
            f"{', '.join(manifest.components) or 'none'}.{did_you_mean(name, manifest.components)}",
            path=path,
        )
    return manifest.components[name]


def _read_tensors(path: Path, name: str, entry: ComponentEntry) -> TensorFile:
    metadata: dict[str, str] = {}

    def files() -> Iterator[TensorFile]:
        for file in entry.tensor_files:
            with _naming(path, file):
                content, found = read_tensors(path / file)
                _compare(found, entry.files[file])
            metadata.update(content.metadata)
            yield content

    with _naming(path, entry.tensor_files[0] if len(entry.tensor_files) == 1 else name):
        return TensorFile(assemble(entry.tensors, files()), metadata)


def _compare(found: FileFacts, expected: FileFacts) -> None:
    if found.size_bytes != expected.size_bytes:
        raise ValueError(f"it has {found.size_bytes} bytes, but the manifest lists {expected.size_bytes}")
    if found != expected:
        raise ValueError(f"its digest is {found.digest[:12]}…, but the manifest lists {expected.digest[:12]}…")


class _DamagedError(CheckpointError):
    """An error message that already names the checkpoint and the file."""


@contextmanager
def _naming(path: Path, name: str) -> Iterator[None]:
    """Add the checkpoint and the file to an error's message."""
    try:
        yield
    except FileNotFoundError as error:
        for each in (path, path / name):
            if each.is_symlink() and not each.exists():
                raise UnreadableError(
                    f"{each} is a link to {os.readlink(each)}, which does not exist; mount its disk, or remove the "
                    "link.",
                    path=each,
                ) from error
        raise _DamagedError(f"{path} is not a whole checkpoint: {name} is missing.", path=path) from error
    except OSError as error:
        reason = error.strerror or str(error)
        if is_disk_failure(error):
            raise UnreadableError(
                f"{path / name} cannot be read: {reason} ({errno.errorcode.get(error.errno or 0, 'unknown error')}). "
                "The checkpoint may be intact and was left alone; check the disk, then run the same command again.",
                path=path / name,
            ) from error
        raise _DamagedError(f"{path} is not a whole checkpoint: {name} cannot be read: {reason}.", path=path) from error
    except (UnreadableError, _DamagedError):
        raise
    except (ValueError, CheckpointError) as error:
        raise _DamagedError(f"{path} is not a whole checkpoint: {name}: {error}.", path=path) from error
