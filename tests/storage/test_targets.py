"""Weights at an address are opened as those of a path are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import paceline
from paceline.checkpoint.weights import read_weights
from paceline.cli.derive import click_command
from paceline.cli.export import Export
from paceline.errors import StorageError

EXPORT = click_command(Export)
SMALL = {"model.options.width": 4, "model.options.stages": 1, "train.duration": "3 steps", "parallel.device": "cpu"}


def test_weights_at_an_address_are_those_of_the_file(s3: Any, put: Any, tmp_path: Path) -> None:
    paceline.train("digits", overrides=SMALL, run_dir=tmp_path / "run")
    file, here, again = (tmp_path / f"{name}.safetensors" for name in ("weights", "here", "again"))
    CliRunner().invoke(EXPORT, [str(tmp_path / "run"), "--output", str(file)], catch_exceptions=False)
    put("models/weights.safetensors", file.read_bytes())
    where = "s3://bucket/models/weights.safetensors"
    CliRunner().invoke(EXPORT, [str(file), "--output", str(here)], catch_exceptions=False)
    done = CliRunner().invoke(EXPORT, [where, "--output", str(again)], catch_exceptions=False)
    assert done.exit_code == 0
    # The order of what stands in the files' metadata is the library's, and another each time.
    one, other = read_weights(here), read_weights(again)
    assert other.metadata == one.metadata
    assert other.state.keys() == one.state.keys()
    assert all(torch.equal(other.state[name], tensor) for name, tensor in one.state.items())
    with pytest.raises(StorageError, match="there is nothing at s3://bucket/models/none"):
        CliRunner().invoke(
            click_command(Export), ["s3://bucket/models/none", "--output", str(again)], catch_exceptions=False
        )
