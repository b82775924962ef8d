"""Does a run of two processes outlive a disk that refuses, or a death, at any operation of a save beside training?

The store's own operations, each of them, are refused in the unit tests; here each kind of operation on each kind of
file is, in whole runs, which are then gone on with.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

SOURCES = Path(__file__).parents[2] / "src"
PROGRAM = Path(__file__).with_name("disk_runs.py")

pytestmark = [pytest.mark.thorough, pytest.mark.world_size(2), pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def trials() -> list[dict[str, Any]]:
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    variables = {"PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="disk-runs-", dir=base) as directory:
        done = subprocess.run(
            [sys.executable, str(PROGRAM), directory],
            capture_output=True,
            text=True,
            timeout=850,
            check=False,
            env={**os.environ, **variables},
        )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def test_every_kind_of_operation_is_tried(trials: list[dict[str, Any]]) -> None:
    operations = {(trial["where"], trial["rank"], trial["struck"].split()[0]) for trial in trials}
    of_the_writer = {"mkdir", "create", "write", "fsync", "open", "rename", "read", "unlink", "rmdir"}
    assert {name for where, _, name in operations if where == "writer"} == of_the_writer
    assert {(rank, name) for where, rank, name in operations if where == "records"} == {(0, "fsync"), (1, "fsync")}
    assert {trial["fault"] for trial in trials} == {"ENOSPC", "EACCES", "EIO", "SIGKILL"}


def test_a_whole_checkpoint_is_found_whatever_happened(trials: list[dict[str, Any]]) -> None:
    for trial in trials:
        assert trial["damaged"] == [], trial
        # The records of the first save are flushed before there is any checkpoint.
        begins = trial["where"] == "records" and trial["newest"] is None
        went_on = trial["codes"] == [0, 0] and trial["newest"] == "step-00000008"
        assert begins or went_on or trial["newest"] in ("step-00000003", "step-00000006"), trial
        if trial["newest"] == "step-00000003":
            assert "step-00000003" in trial["names"], trial


def test_a_refusal_ends_every_rank_with_the_reason(trials: list[dict[str, Any]]) -> None:
    refused = [trial for trial in trials if trial["fault"] != "SIGKILL"]
    assert refused
    for trial in refused:
        operation = trial["struck"].split()[0]
        # Only what removes the superseded, or looks at it, may fail without harm to the run.
        if trial["codes"] == [0, 0]:
            assert operation in ("rename", "read", "open", "unlink", "rmdir"), trial
            assert trial["newest"] != "step-00000003", trial
            continue
        assert trial["codes"] == [1, 1], trial
        reason = {"ENOSPC": "No space left", "EACCES": "Permission denied", "EIO": "Input/output error"}[trial["fault"]]
        assert reason in trial["said"][trial["rank"]], trial
        if trial["where"] == "writer":
            assert all(reason in said for said in trial["said"]), trial


def test_a_death_ends_the_other_rank_too(trials: list[dict[str, Any]]) -> None:
    killed = [trial for trial in trials if trial["fault"] == "SIGKILL"]
    assert killed
    for trial in killed:
        assert trial["codes"][trial["rank"]] == -9, trial
        assert trial["codes"][1 - trial["rank"]] != 0, trial


def test_the_same_command_again_ends_as_if_nothing_had_happened(trials: list[dict[str, Any]]) -> None:
    for trial in trials:
        assert trial["same"], trial
        assert not [name for name in trial["left"] if name.startswith(".")], trial
