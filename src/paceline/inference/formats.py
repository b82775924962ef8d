"""Formats of `paceline export`: Paceline's own, and those of installed packages.

Another package adds one through Python entry points::

    [project.entry-points."paceline.formats"]
    gguf = "mypackage.formats:GGUF"

`--help` reads what is declared here and there, so these modules import neither torch nor other large libraries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from paceline.plugins.registry import load_all


@dataclass(frozen=True, kw_only=True)
class Format:
    """A format in which weights can be written.

    Attributes:
        writer: The function that writes it, as ``module:function``. It is called with the
            :class:`paceline.inference.export.ExportRequest`, the weights and the path of a new file or folder. It
            returns the largest difference between the outputs of the exported model and of the network, or None if it
            compares none.
        ending: How its files end; empty for a folder.
        reader: What the exported model was compared in, as the subject of a sentence.
        rounds_to: Dtypes to which it can round weights.
        phrase: Its description in the help, if any.
        advice: Printed after the export, if any.
    """

    writer: str
    ending: str = ""
    reader: str = ""
    rounds_to: tuple[str, ...] = ()
    phrase: str = ""
    advice: str = ""

    def __call__(self, *arguments: Any) -> Any:
        """Call the writer."""
        return resolve_name(self.writer)(*arguments)


SAFETENSORS = Format(writer="paceline.inference.export:write_safetensors", ending=".safetensors", rounds_to=("bf16",))
ONNX = Format(
    writer="paceline.inference.export:write_onnx_file",
    ending=".onnx",
    reader="ONNX Runtime",
    rounds_to=("int8",),
    phrase="one file, checked in ONNX Runtime (extra onnx)",
)
PROGRAM = Format(
    writer="paceline.inference.export:write_torch_export",
    ending=".pt2",
    reader="the program, read back,",
    rounds_to=("bf16",),
    phrase="a .pt2 program",
)


def formats() -> Mapping[str, Format]:
    """Return all formats by name: those of other packages, and then the trainer's own."""
    return {name: each for name, each in load_all("formats").items() if isinstance(each, Format)}
