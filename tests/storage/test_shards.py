"""Shards in object storage: each file is fetched once, copies make room for others, and training resumes there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import StorageError
from paceline.reports.audit import audit_run
from paceline.shards import Shards

ADDRESS = "s3://bucket/{}"
SOURCES = Path(__file__).parents[2] / "src"
PROGRAM = """
import os, sys, torch, paceline
from paceline.shards import Shards

lines = Shards(sys.argv[1], decode=lambda line: torch.tensor([float(line["number"])]), window=2)
loop = paceline.Loop("run", lines, batch_size=4, epochs=2, workers=int(sys.argv[2]), checkpoint_every="2 steps")
model = loop.prepare(torch.nn.Linear(1, 1))
optimizer = loop.keep(torch.optim.SGD(model.parameters(), 1e-4))
for step, numbers in loop:
    model(numbers).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if str(step) == os.environ.get("KILLED_AT"):
        os.kill(os.getpid(), 9)
"""


def fill(put: Any, folder: str, files: int = 8, lines: int = 5) -> str:
    for file in range(files):
        content = "".join(f"{json.dumps({'number': file * lines + line})}\n" for line in range(lines))
        put(f"{folder}/{file:02}.jsonl", content.encode())
    return ADDRESS.format(folder)


def fetched(s3: Any, folder: str) -> list[str]:
    return [
        path.rpartition("/")[2].partition("?")[0]
        for method, path in s3.log
        if method == "GET" and f"{folder}/0" in path
    ]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Room for about three of the files."""
    monkeypatch.setenv("PACELINE_CACHE_GB", "3e-7")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "indexes"))


@pytest.mark.usefixtures("small")
def test_the_index_takes_a_request_a_file_and_copies_make_room(s3: Any, put: Any, tmp_path: Path) -> None:
    address = fill(put, "counted")
    shards = Shards(address, window=2)
    assert len(shards) == 40
    assert sorted(fetched(s3, "counted")) == [f"{file:02}.jsonl" for file in range(8)]
    assert [shards[number]["number"] for number in (39, 0, 20)] == [39, 0, 20]
    copies = [each for each in (tmp_path / "cache" / "files").iterdir() if each.suffix == ".jsonl"]
    assert sum(each.stat().st_size for each in copies) <= 300
    s3.log.clear()
    assert len(Shards(address)) == 40  # counted once
    assert fetched(s3, "counted") == []


@pytest.mark.usefixtures("small")
def test_what_a_killed_process_reserved_is_free_again(s3: Any, put: Any, tmp_path: Path) -> None:
    address = fill(put, "reserved", 2)
    files = tmp_path / "cache" / "files"
    files.mkdir(parents=True)
    (files / ".room-x-00.jsonl").write_bytes(b"\0" * 299)
    assert len(Shards(address)) == 10
    assert not (files / ".room-x-00.jsonl").exists()


@pytest.mark.usefixtures("small")
def test_a_file_larger_than_the_room_and_a_missing_one_are_named(s3: Any, put: Any) -> None:
    with pytest.raises(StorageError, match=r"large/00\.jsonl takes 1.* raise PACELINE_CACHE_GB"):
        Shards(fill(put, "large", 1, 100))
    with pytest.raises(StorageError, match="there is nothing at s3://bucket/nowhere"):
        Shards(ADDRESS.format("nowhere"))


@pytest.mark.usefixtures("small")
@pytest.mark.thorough
@pytest.mark.parametrize("workers", [0, 2])
def test_killed_beside_a_small_cache_and_a_failing_store_training_resumes(
    workers: int, s3: Any, put: Any, tmp_path: Path
) -> None:
    address = fill(put, f"trained-{workers}")
    s3.share, s3.only, s3.fates = 0.2, "GET", ("refused", "dropped", "halved")
    (tmp_path / "mine.py").write_text(PROGRAM)
    summaries = []
    for folder, kills in (("undisturbed", ()), ("killed", ("7", "15"))):
        (tmp_path / folder).mkdir()
        for killed_at in (*kills, "never"):
            done = subprocess.run(
                [sys.executable, str(tmp_path / "mine.py"), address, str(workers)],
                cwd=tmp_path / folder,
                env={**os.environ, "PYTHONPATH": str(SOURCES), "KILLED_AT": killed_at},
                stderr=subprocess.PIPE,
                text=True,
                timeout=200,
                check=False,
            )
            assert done.returncode == (0 if killed_at == "never" else -9), done.stderr
        summaries.append(json.loads((tmp_path / folder / "run" / "summary.json").read_text()))
        assert audit_run(tmp_path / folder / "run").passed
    assert s3.failed > 0
    assert summaries[0]["weights_sha256"] == summaries[1]["weights_sha256"]
    assert summaries[1]["resumes"] >= 1
