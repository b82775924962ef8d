"""Code of a network of one's own that does something in its training passes: sleeps, fails, or ends its process."""

from __future__ import annotations

import textwrap

_CODE = """
import os, signal, time
from pathlib import Path
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes, in_channels):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(in_channels * PIXELS, num_classes))
        self.passes = 0

    def forward(self, x):
        self.passes += self.training
        if self.training:
DOES
        return self.body(x)
"""


def network_that(does: str, *, pixels: int = 144) -> str:
    """A module with ``Net``, of which ``self.passes`` counts the training passes; ``x`` is what it is shown."""
    return _CODE.replace("PIXELS", str(pixels)).replace("DOES", textwrap.indent(does.strip("\n"), " " * 12))


# Kills its process in the N-th training pass.
DIES = 'if self.passes == int(os.environ.get("DIE_AT", -1)):\n    os.kill(os.getpid(), signal.SIGKILL)'
# What else a recipe says of such a network.
OWN = ("model.options=null", "data.workers=0")
