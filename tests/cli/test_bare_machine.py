"""No /proc, no folder for temporary files, little address space: a run continues, or ends with one sentence."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "src"


def _in_shell(script: str, *arguments: str, folder: Path) -> tuple[int, str]:
    """Exit code and standard error of a script, whose ``"$@"`` is ``paceline ARGUMENTS``."""
    done = subprocess.run(
        ["bash", "-c", script, "bash", sys.executable, "-m", "paceline", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"},
    )
    return done.returncode, done.stderr


def _own_mounts(folder: Path) -> None:
    if _in_shell("unshare -m mount -t tmpfs none /mnt", folder=folder)[0] != 0:
        pytest.skip("this user may not mount anything for one process alone")


def test_a_run_needs_no_proc(tiny: tuple[str, ...], tmp_path: Path) -> None:
    _own_mounts(tmp_path)
    script = """unshare -m bash -c 'mount -t tmpfs none /proc && exec "$@"' "$0" "$@" """
    code, told = _in_shell(script, "train", "digits", *tiny, "--run-dir", "run", folder=tmp_path)
    assert code == 0, told
    assert "Traceback" not in told  # a library of torch's may say that it misses /proc/cpuinfo


def test_without_a_folder_for_temporary_files_the_launcher_says_so(tiny: tuple[str, ...], tmp_path: Path) -> None:
    _own_mounts(tmp_path)
    read_only = f"for each in /tmp /var/tmp {tmp_path}; do mount --bind -o ro $each $each; done; cd {tmp_path}"
    script = f"""TMPDIR=/no-such unshare -m bash -c '{read_only} && exec "$@"' "$0" "$@" """
    code, told = _in_shell(script, "train", "digits", *tiny, "--processes", "2", "--run-dir", "run", folder=tmp_path)
    assert code == 2
    assert len(told.splitlines()) == 1
    assert "TMPDIR" in told


def test_too_small_an_address_space_is_named(tiny: tuple[str, ...], tmp_path: Path) -> None:
    code, told = _in_shell('ulimit -v 1500000; exec "$@"', "train", "digits", *tiny, folder=tmp_path)
    assert code == 2
    assert len(told.splitlines()) == 1
    assert "ulimit -v" in told
