"""Weights at an address are opened as those of a path are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file

import paceline
from paceline.cli.export import command as export
from paceline.errors import StorageError

SMALL = {"model.options.width": 4, "model.options.stages": 1, "train.duration": "3 steps", "parallel.device": "cpu"}


def test_weights_at_an_address_are_those_of_the_file(s3: Any, put: Any, tmp_path: Path) -> None:
    paceline.train("digits", overrides=SMALL, run_dir=tmp_path / "run")
    file, again = tmp_path / "weights.safetensors", tmp_path / "again.safetensors"
    CliRunner().invoke(export, [str(tmp_path / "run"), "--output", str(file)], catch_exceptions=False)
    put("models/weights.safetensors", file.read_bytes())
    where = "s3://bucket/models/weights.safetensors"
    done = CliRunner().invoke(export, [where, "--output", str(again)], catch_exceptions=False)
    assert done.exit_code == 0
    before, after = load_file(file), load_file(again)
    assert {name: each.tolist() for name, each in after.items()} == {
        name: each.tolist() for name, each in before.items()
    }
    with pytest.raises(StorageError, match="there is nothing at s3://bucket/models/none"):
        CliRunner().invoke(export, ["s3://bucket/models/none", "--output", str(again)], catch_exceptions=False)
