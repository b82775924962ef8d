"""Is this checkpoint whole, and what does it hold?

Nothing is believed before it is checked: the manifest against its own digest, every file against its size and
SHA-256, every tensor against the inventory. Reading a component checks the very bytes it then uses.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.checkpoint import codec, manifest, parts, tensor_file
from paceline.checkpoint.codec import TensorSpec
from paceline.checkpoint.durable import FileFacts, hash_file, is_refusal, patient
from paceline.checkpoint.manifest import ComponentEntry, Manifest
from paceline.checkpoint.parts import ChunkOf
from paceline.errors import CheckpointError, UnreadableError, did_you_mean
from paceline.plain_json import load_json

_MARGIN = 3  # differing tensors named in a message before it says how many more there are


def read_manifest(path: Path) -> Manifest:
    """Read what a checkpoint says it holds; only the manifest itself is checked.

    Raises:
        CheckpointError: If it is no checkpoint, or the manifest is missing, damaged or of another version.
        UnreadableError: If it cannot be read now, as from every function here.
    """
    path = Path(path)
    with _naming(path, manifest.FILE_NAME):
        try:
            # Not Path.is_dir, which may take an error of the disk for an answer.
            is_folder = path.is_symlink() or stat.S_ISDIR(patient(os.stat)(path).st_mode)
        except FileNotFoundError:
            is_folder = False
        if is_folder:
            return manifest.read_manifest(path)
        hint = _not_a_directory(path)
    raise CheckpointError(hint)


def verify(path: Path) -> Manifest:
    """Check every byte of a checkpoint; memory use does not depend on its size.

    Raises:
        CheckpointError: Naming the file and the rule it breaks.
    """
    path = Path(path)
    found = check_sizes(path)
    for entry in found.components.values():
        for name, facts in entry.files.items():
            with _naming(path, name):
                _compare_digest(hash_file(path / name).sha256, facts)
        _check_tensors(path, entry)
    return found


def _check_tensors(path: Path, entry: ComponentEntry) -> None:
    headers = []
    for name in entry.tensor_files:
        with _naming(path, name):
            headers.append(tensor_file.read_header(path / name))
    with _naming(path, " and ".join(entry.tensor_files[:2])):
        if entry.is_in_parts:
            parts.check_cover(entry.tensors, headers)
        else:
            for inventory, _ in headers:
                _compare_inventory(inventory, entry.tensors)


def check_sizes(path: Path) -> Manifest:
    """Check what can be checked without reading the values: the manifest, and each file's presence and size.

    Raises:
        CheckpointError: Naming the file and the rule it breaks.
    """
    path = Path(path)
    found = read_manifest(path)
    for entry in found.components.values():
        for name, facts in entry.files.items():
            with _naming(path, name):
                status = patient(os.stat)(path / name)
                if not stat.S_ISREG(status.st_mode):
                    raise ValueError("it is not a regular file")
                _compare_size(status.st_size, facts)
    return found


def read_component(path: Path, name: str) -> dict[str, Any]:
    """Read one component's state, checking its files on the way.

    Returns:
        The state as it was saved; tensors are on the CPU and share no memory with one another.

    Raises:
        CheckpointError: If the checkpoint lacks the component, or its files are damaged.
    """
    return read_components(path, (name,))[name]


def read_components(
    path: Path, names: Collection[str] | None = None, *, chunks: Mapping[str, ChunkOf] | None = None
) -> dict[str, dict[str, Any]]:
    """Read several components' states (default: all), checking their files on the way.

    Args:
        path: The checkpoint.
        names: The components.
        chunks: Which part of each tensor is wanted, by component; no more of these is read, and so their digests
            are not compared: :func:`verify` does that.

    Raises:
        CheckpointError: If the checkpoint lacks a component, or a file is damaged.
    """
    path = Path(path)
    found = read_manifest(path)
    wanted = list(found.components) if names is None else list(names)
    entries = {name: _entry(path, found, name) for name in wanted}
    wanted_parts = chunks or {}
    return {name: _read_state(path, name, entry, wanted_parts.get(name)) for name, entry in entries.items()}


def read_weights_file(path: Path, name: str) -> tensor_file.TensorFile:
    """Read one component's tensors and what their file says of itself, checking these very bytes and no other file's.

    Raises:
        CheckpointError: If the checkpoint lacks the component, or the file is damaged.
    """
    path = Path(path)
    entry = _entry(path, read_manifest(path), name)
    if not entry.tensors:
        raise CheckpointError(f"{path} holds no tensors in its component {name!r}.")
    return _read_tensors(path, name, entry)


def _entry(path: Path, found: Manifest, name: str) -> ComponentEntry:
    if name not in found.components:
        raise CheckpointError(
            f"{path} holds no component {name!r}; it holds {', '.join(found.components) or 'none'}."
            f"{did_you_mean(name, found.components)}"
        )
    return found.components[name]


def _read_tensors(path: Path, name: str, entry: ComponentEntry) -> tensor_file.TensorFile:
    if entry.is_in_parts:
        return _assemble(path, name, entry)
    file = f"{name}.safetensors"
    content = _read_checked(path, file, entry.files[file])
    with _naming(path, file):
        parsed = tensor_file.parse_tensor_file(content)
        _compare_inventory({key: TensorSpec.of(tensor) for key, tensor in parsed.tensors.items()}, entry.tensors)
    return parsed


def _assemble(path: Path, name: str, entry: ComponentEntry) -> tensor_file.TensorFile:
    metadata: dict[str, str] = {}

    def files() -> Iterator[tensor_file.TensorFile]:
        for file in entry.tensor_files:
            content = tensor_file.parse_tensor_file(_read_checked(path, file, entry.files[file]))
            metadata.update(content.metadata)
            yield content

    with _naming(path, name):
        return tensor_file.TensorFile(parts.assemble(entry.tensors, files()), metadata)


def _read_state(path: Path, name: str, entry: ComponentEntry, chunk_of: ChunkOf | None) -> dict[str, Any]:
    tensors: dict[str, Tensor] = {}
    if entry.tensors and chunk_of is not None:
        with _naming(path, name):
            tensors = parts.read_chunks([path / file for file in entry.tensor_files], entry.tensors, chunk_of)
    elif entry.tensors:
        tensors = _read_tensors(path, name, entry).tensors
    file = f"{name}.json"
    text = _read_checked(path, file, entry.files[file])
    with _naming(path, file):
        state = codec.decode(_parse_json(text), tensors)
        if not isinstance(state, dict):
            raise ValueError("it does not hold a dictionary")
    return state


def _parse_json(text: bytes) -> Any:
    try:
        return load_json(text)
    except ValueError as error:
        raise ValueError("it is not JSON") from error


def _read_checked(path: Path, name: str, facts: FileFacts) -> bytes:
    with _naming(path, name):
        content = tensor_file.read_regular_file(path / name)
        _compare_size(len(content), facts)
        _compare_digest(hashlib.sha256(content).hexdigest(), facts)
        return content


def _compare_size(found: int, expected: FileFacts) -> None:
    if found != expected.size_bytes:
        raise ValueError(f"it has {found} bytes, but the manifest lists {expected.size_bytes}")


def _compare_digest(found: str, expected: FileFacts) -> None:
    if found != expected.sha256:
        raise ValueError(f"its SHA-256 is {found[:12]}…, but the manifest lists {expected.sha256[:12]}…")


def _compare_inventory(found: Mapping[str, TensorSpec], expected: Mapping[str, TensorSpec]) -> None:
    differing = [name for name in sorted(found.keys() | expected.keys()) if found.get(name) != expected.get(name)]
    if differing:
        listed = "; ".join(
            f"{name!r} is {found.get(name, 'absent')}, but the manifest lists {expected.get(name, 'none')}"
            for name in differing[:_MARGIN]
        )
        more = f" (and {len(differing) - _MARGIN} more)" if len(differing) > _MARGIN else ""
        raise ValueError(f"its inventory differs: {listed}{more}")


@contextmanager
def _naming(path: Path, name: str) -> Iterator[None]:
    """Say which checkpoint and which of its files an error is about."""
    try:
        yield
    except FileNotFoundError as error:
        for each in (path, path / name):
            if each.is_symlink() and not each.exists():
                raise UnreadableError(
                    f"{each} is a link to {os.readlink(each)}, which is not there; mount its disk, or remove the link."
                ) from error
        raise CheckpointError(f"{path} is not a whole checkpoint: {name} is missing.") from error
    except OSError as error:
        reason = error.strerror or str(error)
        if is_refusal(error):
            raise UnreadableError(
                f"{path / name} cannot be read: {reason} ({errno.errorcode.get(error.errno or 0, 'unknown error')}). "
                "The checkpoint may be whole and was left alone; check the disk, then run the same command again."
            ) from error
        raise CheckpointError(f"{path} is not a whole checkpoint: {name} cannot be read: {reason}.") from error
    except UnreadableError:
        raise
    except (ValueError, CheckpointError) as error:
        raise CheckpointError(f"{path} is not a whole checkpoint: {name}: {error}.") from error


def _not_a_directory(path: Path) -> str:
    if not path.exists():
        return f"{path} does not exist; give a checkpoint directory, such as RUN/checkpoints/step-00000120."
    with open(path, "rb") as file:
        hint = tensor_file.pickle_hint(file.read(8), path.name)
    return f"{path} is a file, but a checkpoint is a directory with a {manifest.FILE_NAME}{hint}."
