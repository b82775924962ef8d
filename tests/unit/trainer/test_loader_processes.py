"""Loader processes are forked before a run has threads whose locks they could inherit."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import fork_server

# The network is the first thing built after the workers: whatever is forked later is counted.
NETWORK = """
import os

import torch
from torch import nn

forked = []


def build(num_classes, in_channels):
    os.register_at_fork(before=lambda: forked.append("a fork"))
    return nn.Sequential(nn.Flatten(), nn.Linear(in_channels * 64, num_classes))
"""

RUN = """
import sys

import counted
import paceline

paceline.train("image_folder", run_dir=sys.argv[1], overrides={
    "data.path": sys.argv[2], "data.image_size": 8, "data.workers": 2, "data.backend": "pytorch",
    "data.augment": None, "model.name": "counted:build", "model.options": None, "batch.global_size": 4,
    "schedule.warmup": "0 steps", "train.duration": "2 epochs",
})
print("forks after the network was built:", len(counted.forked))
"""


def test_nothing_is_forked_once_the_network_is_built(tmp_path: Path, make_photos: Callable[..., Path]) -> None:
    (tmp_path / "counted.py").write_text(NETWORK)
    make_photos(tmp_path / "photos", train=4, val=4, side=8)
    arguments = [sys.executable, "-c", RUN, str(tmp_path / "run"), str(tmp_path / "photos")]
    done = fork_server.run(arguments, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "forks after the network was built: 0" in done.stdout
