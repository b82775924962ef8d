"""SIGKILL at random moments, the run directory gone each time, and nobody can tell: the copy is enough."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import fork_server
import pytest

from paceline.checkpoint.mirror import list_commits
from paceline.storage.remote import Remote

PROGRAM = Path(__file__).with_name("object_runs.py")


def begin(folder: Path, variables: dict[str, str], **requested: Any) -> subprocess.Popen[str]:
    folder.mkdir()
    usual = {"seed": 1, "kills": 2, "ranks": 1, "steps": 60, "overrides": []}
    return fork_server.Popen(
        [sys.executable, str(PROGRAM), str(folder), json.dumps(usual | requested)],
        env={**os.environ, **variables, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def outcome(program: subprocess.Popen[str], s3: Any, folder: Path) -> dict[str, Any]:
    deadline = time.monotonic() + 200
    while program.poll() is None and time.monotonic() < deadline:
        # In one move: the program reads it at any time.
        commits = sum(method == "PUT" and "/commits/" in path for method, path in list(s3.log))
        (folder / "commits.new").write_text(str(commits))
        (folder / "commits.new").replace(folder / "commits")
        time.sleep(0.02)
    if program.poll() is None:
        # With the launches that it has forked.
        os.killpg(program.pid, signal.SIGKILL)
    _, err = program.communicate()
    assert program.returncode == 0, err[-3000:]
    found: dict[str, Any] = json.loads((folder / "outcome.json").read_text())
    return found


def started_again(s3: Any) -> None:
    """The server is away for a while, after the first commit."""
    s3.wait_for("PUT /bucket/killed/commits/", seconds=120)
    s3.down()
    time.sleep(3)
    s3.up()


def check_same(found: dict[str, Any]) -> None:
    assert found["mine"] == found["theirs"]
    # Each step recorded once, and none left out.
    assert found["positions"] == sorted(set(found["positions"]))
    assert len(found["positions"]) == len([e for e in found["theirs"]["records"] if e["event"] == "step"])


def check_tidy(address: str, keep: int = 2) -> None:
    """What lies at the address is whole, and nothing else lies there."""
    remote = Remote(address)
    found = list_commits(remote)
    commits, damaged = found.commits, found.damaged
    assert not damaged
    assert 1 <= len(commits) <= keep + 1
    there = {**remote.list_files("checkpoints"), **remote.list_files("records")}
    for commit in commits:
        assert commit.pieces <= there.keys()
        for piece in commit.files.values():
            assert there[piece.name].size_bytes == piece.facts.size_bytes


@pytest.mark.slow
def test_killed_while_requests_fail_and_the_server_is_started_again(
    s3: Any, variables: dict[str, str], tmp_path: Path, secret: str
) -> None:
    s3.share = 0.05
    program = begin(tmp_path / "runs", variables, kills=2, mirror="s3://bucket/killed", seed=5)
    server = threading.Thread(target=started_again, args=(s3,))
    server.start()
    found = outcome(program, s3, tmp_path / "runs")
    server.join()
    check_same(found)
    assert any(found["begun_at"][1:]), "no launch that was killed had gone on from a copy"
    assert found["resumes"]
    assert s3.failed > 3
    s3.share = 0.0
    check_tidy("s3://bucket/killed")
    assert secret not in found["said"]
    for path in (tmp_path / "runs").rglob("*"):
        assert not path.is_file() or secret.encode() not in path.read_bytes(), path


@pytest.mark.slow
def test_parts_of_several_processes(s3: Any, variables: dict[str, str], tmp_path: Path) -> None:
    overrides = ["parallel.strategy=fsdp", "train.ema=off"]
    requested = {"mirror": "s3://bucket/parts", "ranks": 2, "kills": 1, "steps": 20, "overrides": overrides}
    found = outcome(begin(tmp_path / "runs", variables, **requested), s3, tmp_path / "runs")
    check_same(found)
    assert found["resumes"], "the last launch went on from no copy"
    commits = list_commits(Remote("s3://bucket/parts")).commits
    assert any("/" in name for name in commits[0].files), "no component lies in parts"
    assert "ledger/rank-00001.ids" in commits[0].records
