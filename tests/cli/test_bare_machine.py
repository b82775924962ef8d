"""No /proc, no folder for temporary files, little address space: a run continues, or ends with one sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

InShell = Callable[..., tuple[int, str]]


def _own_mounts(in_shell: InShell) -> None:
    if in_shell("unshare -m mount -t tmpfs none /mnt")[0] != 0:
        pytest.skip("this user may not mount anything for one process alone")


def test_a_run_needs_no_proc(tiny: tuple[str, ...], tmp_path: Path, in_shell: InShell) -> None:
    _own_mounts(in_shell)
    script = """unshare -m bash -c 'mount -t tmpfs none /proc && exec "$@"' "$0" "$@" """
    code, reported = in_shell(script, "train", "digits", *tiny, "--run-dir", "run")
    assert code == 0, reported
    assert "Traceback" not in reported  # a library of torch's may say that it misses /proc/cpuinfo


def test_without_a_folder_for_temporary_files_the_launcher_says_so(
    tiny: tuple[str, ...], tmp_path: Path, in_shell: InShell
) -> None:
    _own_mounts(in_shell)
    read_only = f"for each in /tmp /var/tmp {tmp_path}; do mount --bind -o ro $each $each; done; cd {tmp_path}"
    script = f"""TMPDIR=/no-such unshare -m bash -c '{read_only} && exec "$@"' "$0" "$@" """
    code, reported = in_shell(script, "train", "digits", *tiny, "--processes", "2", "--run-dir", "run")
    assert code == 2
    assert len(reported.splitlines()) == 1
    assert "TMPDIR" in reported


def test_too_small_an_address_space_is_named(tiny: tuple[str, ...], tmp_path: Path, in_shell: InShell) -> None:
    code, reported = in_shell('ulimit -v 1500000; exec "$@"', "train", "digits", *tiny)
    assert code == 2
    assert len(reported.splitlines()) == 1
    assert "ulimit -v" in reported


def test_a_removed_directory_is_told(tiny: tuple[str, ...], tmp_path: Path, in_shell: InShell) -> None:
    script = f'mkdir gone && cd gone && rmdir {tmp_path}/gone && exec "$@"'
    code, reported = in_shell(script, "train", "digits", *tiny)
    assert code == 2
    assert len(reported.splitlines()) == 1
    assert "current directory was removed" in reported
