"""Export as a torch.export program, and how samples are prepared for exported networks."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from paceline.checkpoint.weights import SavedWeights
from paceline.errors import ModelError
from paceline.tasks.exportable import Exportable, Input, normalisation


def preprocessing(saved: SavedWeights, inputs: Sequence[Input]) -> str:
    """Describe in words how to preprocess a sample for a network."""
    data = saved.description("data")
    taken = "; ".join(f"{each.name}: {each.description}, [{', '.join(map(str, each.sizes))}]" for each in inputs)
    if "evaluation_crop" not in data:
        return taken
    size, crop = int(data.get("evaluation_size", data["image_size"])), float(data["evaluation_crop"])
    colours = "one grey channel" if data["channels"] == 1 else "RGB"
    unless = "" if data.get("always_resized") else f"if the image is not {size}x{size} already, "
    return (
        f"{taken}. Decode to {colours}; {unless}resize its shorter side to "
        f"{round(size / crop)} pixels ({data.get('interpolation', 'bilinear')}, antialiased) and keep the centre "
        f"{size}x{size}; {normalisation(data)}; channels first."
    )


DESCRIPTION = "paceline.json"


class InBfloat16(nn.Module):
    """Wraps a network to compute in bf16, with fp32 inputs and outputs.

    Args:
        network: The network; converted to bf16 in place.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network.to(torch.bfloat16)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Run the network; integer inputs are unchanged."""
        lower = (each.to(torch.bfloat16) if each.is_floating_point() else each for each in inputs)
        logits: Tensor = self.network(*lower)
        return logits.float()


def write_program(exportable: Exportable, path: Path, metadata: Mapping[str, str]) -> float:
    """Write a network as a torch.export program, read it back, and compare it at several batch sizes.

    Args:
        exportable: The network.
        path: The new file; its name ends in ``.pt2``.
        metadata: Stored in the file, as JSON in the extra file ``paceline.json``.

    Returns:
        The largest difference between the program's output and the network's, in logits.

    Raises:
        ModelError: If the network cannot be traced for batches of any size, or the program's results differ.
    """
    shapes: Any = exportable.dynamic_shapes
    if isinstance(exportable.network, InBfloat16):
        shapes = (shapes,)  # accepts any number of inputs
    try:
        with warnings.catch_warnings():
            # torch.export warns about its own deprecations; the result is verified.
            warnings.simplefilter("ignore")
            program = torch.export.export(
                exportable.network, exportable.examples(2), dynamic_shapes=shapes, strict=False
            )
            for module in program.graph_module.modules():
                for node in module.graph.nodes if isinstance(module, GraphModule) else ():
                    node.meta.pop("stack_trace", None)  # has paths of this machine's source code
            torch.export.save(program, path, extra_files={DESCRIPTION: json.dumps(dict(metadata))})
            extra_files = {DESCRIPTION: ""}
            # Safe to load: this function has just written the file.
            read_back = torch.export.load(path, extra_files=extra_files).module()
    except OSError:
        raise
    except Exception as error:  # tracing an arbitrary network may raise anything
        raise ModelError(
            f"{type(exportable.network).__name__} cannot be traced by torch.export: {first_line(error)}; use --format "
            "safetensors."
        ) from error
    assert json.loads(extra_files[DESCRIPTION]) == dict(metadata)
    return exportable.compare(read_back, what="the program")


def first_line(error: BaseException) -> str:
    """Return the first informative line of an error, shortened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200] if lines else 'no reason given'}"
