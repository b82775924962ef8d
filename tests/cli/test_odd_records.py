"""Is a run directory whose records are named pipes refused, and never waited for?"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from calls import Call


@pytest.mark.parametrize(
    ("name", "audit_code"), [("plan.json", 2), ("events.jsonl", 1), ("ledger/rank-00000.ids", 1), ("recipe.yaml", 2)]
)
def test_a_named_pipe_as_a_record_is_refused(
    paceline: Call, finished: Path, tmp_path: Path, name: str, audit_code: int
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    (run / name).unlink()
    os.mkfifo(run / name)
    done = paceline("audit", run, timeout=60)
    assert (done.code, "is a named pipe" in done.out + done.err) == (audit_code, True), done.err
    if name != "recipe.yaml":
        done = paceline("train", run / "recipe.yaml", "--run-dir", run, "train.duration=8 steps", timeout=60)
        assert (done.code, "is a named pipe" in done.err) == (2, True), done.err
        assert "Traceback" not in done.err
    assert paceline("report", run, timeout=60).code in (0, 2)


def test_a_named_pipe_as_a_manifest_is_refused(paceline: Call, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "packed.json")
    paceline("pack", tmp_path, "--verify", timeout=60).refused("is a named pipe")


@pytest.mark.parametrize(
    "override",
    [
        *(f"{key}={code}" for key in ("task", "data.dataset") for code in ("os:system", "os:listdir", "math:pi")),
        *(f"{key}={code}" for key in ("optimizer.name", "train.loss") for code in ("os:system", "math:pi")),
        *(f"schedule.name={code}" for code in ("os:system", "os:listdir", "math:pi")),
    ],
)
def test_named_code_of_another_kind_is_refused_in_a_sentence(
    paceline_here: Call, tiny: tuple[str, ...], override: str
) -> None:
    key, _, code = override.partition("=")
    rest = [each for each in tiny if not each.startswith(key.split(".")[0])]
    paceline_here("train", "digits", *rest, override).refused(code)
