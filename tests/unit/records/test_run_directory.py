"""A run directory's files are whole or absent, and its errors say what to change."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from paceline.errors import RunDirectoryError
from paceline.records.run_directory import RunDirectory, default_run_directory, existing_run, write_json


def test_create_makes_parents_and_leaves_nothing_behind(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "runs" / "mine")
    run.create()
    run.create()
    assert list(run.root.iterdir()) == []
    assert not run.exists()
    run.recipe.write_text("task: x\n", encoding="utf-8")
    assert run.exists()


def test_where_no_run_is_found_the_reason_is_told(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "mine")
    run.create()
    run.recipe.write_text("task: x\n", encoding="utf-8")
    assert existing_run(run.root) == run
    (tmp_path / "empty").mkdir()
    requested = "; give the directory of a started run, its --run-dir."
    for path, message in (
        (tmp_path / "absent", f"there is no run directory '{tmp_path / 'absent'}'{requested}"),
        (tmp_path / "empty", f"'{tmp_path / 'empty'}' holds no run (no recipe.yaml){requested}"),
        (run.recipe, f"'{run.recipe}' holds no run (it is a file){requested} Did you mean {run.root}?"),
        (run.plan, f"there is no run directory '{run.plan}'{requested} Did you mean {run.root}?"),
    ):
        with pytest.raises(RunDirectoryError) as caught:
            existing_run(path)
        assert str(caught.value) == message


@pytest.mark.parametrize("below", ["file", "file/deeper"])
def test_create_below_a_file_is_one_clear_sentence(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(RunDirectoryError, match=r"Cannot use the run directory '.*file.*A part of the path is a file"):
        RunDirectory(tmp_path / below).create()


def test_create_where_one_may_not_write(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    program = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from paceline.records.run_directory import RunDirectory\n"
        "if os.getuid() == 0: os.setuid(65534)\n"
        "RunDirectory(Path(sys.argv[1])).create()\n"
    )
    for path in (tmp_path, tmp_path / "new"):
        done = subprocess.run(
            [sys.executable, "-c", program, str(path)],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert "RunDirectoryError: Cannot use the run directory" in done.stderr
        assert "Permission denied. Give yourself permission for it, or choose another directory." in done.stderr
    tmp_path.chmod(0o755)


def test_default_directories_are_never_shared(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: default_run_directory("my recipes/résumé 1.yaml", parent=tmp_path), range(16)))
    assert len(set(made)) == 16
    assert all(path.is_dir() and path.name.startswith("r-sum-1-20") for path in made)


def test_default_directory_below_a_file(tmp_path: Path) -> None:
    file = tmp_path / "runs"
    file.write_text("", encoding="utf-8")
    with pytest.raises(RunDirectoryError, match="Cannot create the run directory"):
        default_run_directory("digits", parent=file)


def test_json_is_strict(tmp_path: Path) -> None:
    path = tmp_path / "document.json"
    nested = {
        "deep": [np.float32("inf"), (1.5, math.nan)],
        "path": tmp_path,
        "np": np.int64(3),
        "list": np.arange(2),
    }
    write_json(path, {"loss": math.nan, "nested": nested, "yes": True})

    def refuse(word: str) -> None:
        raise AssertionError(word)

    assert json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse) == {
        "loss": None,
        "nested": {"deep": [None, [1.5, None]], "path": str(tmp_path), "np": 3, "list": [0, 1]},
        "yes": True,
    }


def test_what_is_no_json_is_refused_before_the_old_file_is_touched(tmp_path: Path) -> None:
    path = tmp_path / "document.json"
    write_json(path, {"old": 1})
    with pytest.raises(TypeError, match="set cannot be stored"):
        write_json(path, {"new": {1, 2}})
    assert json.loads(path.read_text(encoding="utf-8")) == {"old": 1}
    assert [one.name for one in tmp_path.iterdir()] == ["document.json"]


def test_full_disk_is_told(tmp_path: Path) -> None:
    (tmp_path / f".document.json.{os.getpid()}.tmp").symlink_to("/dev/full")
    with pytest.raises(RunDirectoryError, match=r"Cannot write the file .*: No space left on device. The disk is full"):
        write_json(tmp_path / "document.json", {"new": 1})
    assert list(tmp_path.iterdir()) == []


def test_a_reader_never_sees_a_part_even_when_the_writer_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "document.json"
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from paceline.records.run_directory import write_json\n"
        "count = 0\n"
        "while True:\n"
        "    count += 1\n"
        "    write_json(Path(sys.argv[1]), {'count': count, 'rest': [count] * 20_000})\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(path)]) as writer:
        seen = set()
        while len(seen) < 20:
            assert writer.poll() is None
            if path.exists():
                document = json.loads(path.read_text(encoding="utf-8"))
                assert document["rest"] == [document["count"]] * 20_000
                seen.add(document["count"])
        writer.send_signal(signal.SIGKILL)
    json.loads(path.read_text(encoding="utf-8"))
