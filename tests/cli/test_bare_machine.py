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
    assert (code, len(reported.splitlines()), "TMPDIR" in reported) == (2, 1, True), reported


MISSING = {
    "ulimit -v": 'ulimit -v 1500000; exec "$@"',
    "current directory was removed": 'mkdir gone && cd gone && rmdir ../gone && exec "$@"',
}


@pytest.mark.parametrize("named", MISSING)
def test_what_is_missing_is_named(tiny: tuple[str, ...], in_shell: InShell, named: str) -> None:
    code, reported = in_shell(MISSING[named], "train", "digits", *tiny)
    assert (code, len(reported.splitlines()), named in reported) == (2, 1, True), reported
