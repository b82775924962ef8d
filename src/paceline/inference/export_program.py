"""How does a trained network become a torch.export program, which runs without its Python code?"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import ModelError
from paceline.inference.export_onnx import first_line
from paceline.inference.exportable import Exportable

DESCRIPTION = "paceline.json"


class InBfloat16(nn.Module):
    """A network that computes in bf16 and takes and gives fp32.

    Args:
        network: Changed to bf16.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network.to(torch.bfloat16)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Whole numbers stay as they are."""
        lower = (each.to(torch.bfloat16) if each.is_floating_point() else each for each in inputs)
        logits: Tensor = self.network(*lower)
        return logits.float()


def write_program(exportable: Exportable, path: Path, metadata: Mapping[str, str]) -> float:
    """Write a network as a torch.export program, read it back and have it answer in batches of several sizes.

    Args:
        exportable: The network.
        path: The new file; its name ends in ``.pt2``.
        metadata: Kept in the file, as JSON in the extra file ``paceline.json``.

    Returns:
        The largest difference between the program's answers and the network's, in logits.

    Raises:
        ModelError: If the network cannot be traced for batches of any size, or the program answers otherwise.
    """
    shapes: Any = exportable.dynamic_shapes
    if isinstance(exportable.network, InBfloat16):
        shapes = (shapes,)  # which takes any number of inputs
    try:
        with warnings.catch_warnings():
            # What torch.export warns of are its own changes to come; what counts is compared.
            warnings.simplefilter("ignore")
            program = torch.export.export(
                exportable.network, exportable.examples(2), dynamic_shapes=shapes, strict=False
            )
            torch.export.save(program, path, extra_files={DESCRIPTION: json.dumps(dict(metadata))})
            kept = {DESCRIPTION: ""}
            # The file was written above: nothing of unknown origin is opened.
            read_back = torch.export.load(path, extra_files=kept).module()
    except OSError:
        raise
    except Exception as error:  # whatever tracing a network of any kind raises
        raise ModelError(
            f"{type(exportable.network).__name__} cannot be traced by torch.export: {first_line(error)}; use --format "
            "safetensors."
        ) from error
    assert json.loads(kept[DESCRIPTION]) == dict(metadata)

    def answers(inputs: Any) -> Tensor:
        with torch.inference_mode():
            found: Tensor = read_back(*inputs)
        return found

    return exportable.compare(answers, what="the program")
