"""Code of a network of one's own, for the tests of the doctor: its layers, and its forward pass."""

from __future__ import annotations

import textwrap

_CODE = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        {layers}

    def forward(self, x):
{forward}
"""


def network_of(forward: str, *layers: str) -> str:
    """``network_of("return self.head(x)", "head = nn.Linear(8, num_classes)")``: the code of a module with ``Net``."""
    made = "\n        ".join(f"self.{layer}" for layer in layers)
    return _CODE.format(layers=made, forward=textwrap.indent(forward, " " * 8))


_TWO_CONVOLUTIONS = (
    "conv = nn.Conv2d(3, 64, 3)",
    "second = nn.Conv2d(64, 128, 3)",
    "head = nn.Linear(128, num_classes)",
)
RELAID = network_of("return self.head(self.second(self.conv(x).contiguous()).mean((2, 3)))", *_TWO_CONVOLUTIONS)
CELLS = network_of(
    "state = x.new_zeros(len(x), 256)\n"
    "for row in x[:, :, :3].transpose(1, 2).flatten(2).unbind(1):\n    state = self.cell(row, state)\n"
    "return self.head(state)",
    *("cell = nn.GRUCell(96, 256)", "head = nn.Linear(256, num_classes)"),
)
