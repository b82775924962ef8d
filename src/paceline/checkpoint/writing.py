"""In which files does a checkpoint lie, and in which order are they written?

For each component ``NAME.json`` (structure and plain values) and, if it has tensors, ``NAME.safetensors``;
the manifest, which lists them all, comes last.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.checkpoint import codec, manifest
from paceline.checkpoint.codec import TensorSpec
from paceline.checkpoint.durable import write_file
from paceline.checkpoint.manifest import ComponentEntry, Manifest
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
    components: Mapping[str, tuple[Any, dict[str, Tensor]]]

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


def write_checkpoint(directory: Path, contents: Contents, file_metadata: Mapping[str, str]) -> int:
    """Write all files into a new directory and flush them; return their size in bytes.

    Raises:
        OSError: If the directory exists, or the disk refuses.
    """
    header = {**_as_strings(contents.facts), **file_metadata, "step": str(contents.step), "format": "pt"}
    os.mkdir(directory)
    entries = {}
    for name, (structure, tensors) in contents.components.items():
        files = {}
        if tensors:
            file = directory / f"{name}.safetensors"
            files[file.name] = write_tensor_file(file, tensors, {**header, "component": name})
        file = directory / f"{name}.json"
        files[file.name] = write_file(file, [json.dumps(structure, allow_nan=False).encode("ascii")])
        entries[name] = ComponentEntry(files, {key: TensorSpec.of(tensor) for key, tensor in tensors.items()})
    listed = Manifest(step=contents.step, facts=contents.facts, components=entries)
    written = write_file(directory / manifest.FILE_NAME, [manifest.to_bytes(listed)])
    sync_directory(directory)
    return listed.size_bytes + written.size_bytes


def _as_strings(facts: Mapping[str, Any]) -> dict[str, str]:
    return {
        key: value if isinstance(value, str) else json.dumps(codec.encode(value)[0]) for key, value in facts.items()
    }
