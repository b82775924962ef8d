"""In which files does a checkpoint lie, and in which order are they written?

For each component ``NAME.json`` (structure and plain values) and, if it has tensors, ``NAME.safetensors``, or a folder
``NAME`` where each process holds a part of them; the manifest, which lists them all, comes last.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.checkpoint import codec, manifest
from paceline.checkpoint.codec import Part, TensorSpec
from paceline.checkpoint.durable import FileFacts, write_file
from paceline.checkpoint.manifest import ComponentEntry, Manifest
from paceline.checkpoint.parts import write_parts
from paceline.checkpoint.shares import Files, Together, gather_notes, leave_note
from paceline.checkpoint.tensor_file import write_tensor_file
from paceline.errors import CheckpointError
from paceline.records.run_directory import sync_directory


@dataclass(frozen=True)
class Contents:
    """What goes into one checkpoint, already in the form in which it is written.

    Attributes:
        step: Optimizer steps done.
        facts: For the manifest.
        components: Structure and tensors by component name.
    """

    step: int
    facts: Mapping[str, Any]
    components: Mapping[str, tuple[Any, dict[str, Tensor | Part]]]

    @classmethod
    def of(cls, step: int, components: Mapping[str, Mapping[str, Any]], facts: Mapping[str, Any]) -> Contents:
        """Encode everything, so that what cannot be saved is found before anything is written.

        Raises:
            CheckpointError: Naming the component, or the path of the object, that cannot be saved.
        """
        manifest.check_component_names(components)
        if codec.inventory(dict(facts), where="facts"):
            raise CheckpointError("the facts of a checkpoint hold a tensor; put it into a component.")
        encoded = {name: codec.encode(dict(state), where=name) for name, state in components.items()}
        return cls(step, facts, encoded)


def write_checkpoint(
    directory: Path, contents: Contents, file_metadata: Mapping[str, str], together: Together | None = None
) -> int:
    """Write all files into an empty directory and flush them; return their size in bytes.

    Args:
        directory: Where to.
        contents: The first process's.
        file_metadata: Further entries of each safetensors header.
        together: The other processes, if they hold parts: what they write there is waited for.

    Raises:
        OSError: If the disk refuses.
        CheckpointError: If another process could not write.
    """
    header = _header(contents, file_metadata)
    written: Files = {}
    for name, (structure, tensors) in contents.components.items():
        files: dict[str, FileFacts] = {}
        whole = {key: each for key, each in tensors.items() if isinstance(each, Tensor)}
        if len(whole) < len(tensors):
            files |= write_parts(directory, name, tensors, {**header, "component": name}, rank=0)
        elif whole:
            file = directory / f"{name}.safetensors"
            files[file.name] = write_tensor_file(file, whole, {**header, "component": name})
        file = directory / f"{name}.json"
        files[file.name] = write_file(file, [json.dumps(structure, allow_nan=False).encode("ascii")])
        written[name] = files
    for name, files in (gather_notes(together) if together else {}).items():
        written[name] |= files
    entries = {
        name: ComponentEntry(written[name], {key: TensorSpec.of(each) for key, each in tensors.items()})
        for name, (_, tensors) in contents.components.items()
    }
    listed = Manifest(step=contents.step, facts=contents.facts, components=entries)
    facts = write_file(directory / manifest.FILE_NAME, [manifest.to_bytes(listed)])
    sync_directory(directory)
    return listed.size_bytes + facts.size_bytes


def write_share(contents: Contents, file_metadata: Mapping[str, str], together: Together) -> None:
    """On a process other than the first: write its parts, and a note for the first.

    Raises:
        OSError: If the disk refuses; the first process is told, if that can be.
    """
    header, files = _header(contents, file_metadata), Files()
    try:
        for name, (_, tensors) in contents.components.items():
            if any(isinstance(each, Part) for each in tensors.values()):
                named = {**header, "component": name}
                files[name] = write_parts(together.room, name, tensors, named, rank=together.rank)
    except OSError as error:
        leave_note(together, {}, error=error.strerror or str(error))
        raise
    leave_note(together, files)


def _header(contents: Contents, file_metadata: Mapping[str, str]) -> dict[str, str]:
    return {**_as_strings(contents.facts), **file_metadata, "step": str(contents.step), "format": "pt"}


def _as_strings(facts: Mapping[str, Any]) -> dict[str, str]:
    return {
        key: value if isinstance(value, str) else json.dumps(codec.encode(value)[0]) for key, value in facts.items()
    }
