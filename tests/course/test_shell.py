"""Commands run from notebooks: their output, their errors, and their timeout."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from paceline_course import run
from paceline_course.shell import CommandError


def test_output_is_printed_and_returned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "hello.py"
    script.write_text("import os, sys\nprint('out', os.environ['OMP_NUM_THREADS'])\nprint('err', file=sys.stderr)\n")
    assert run(f"python {script}") == "out 1\nerr\n"
    assert capsys.readouterr().out == "out 1\nerr\n"
    assert run(f"python {script}", quiet=True, env={"OMP_NUM_THREADS": "2"}) == "out 2\n"
    assert capsys.readouterr().out == ""


def test_failure_raises_an_error_with_the_last_lines() -> None:
    with pytest.raises(CommandError, match="exit code 3:\nwhy"):
        run("""python -c 'print("why"); raise SystemExit(3)'""")


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
def test_timeout_ends_all_processes(tmp_path: Path) -> None:
    """Also processes in another session, like torchrun's workers; the fixture of this folder looks for survivors."""
    script = tmp_path / "hang.py"
    script.write_text(
        "import subprocess, sys, time\n"
        f"subprocess.Popen([{sys.executable!r}, '-c', 'import time; time.sleep(100)'], start_new_session=True)\n"
        "time.sleep(100)\n"
    )
    with pytest.raises(CommandError, match="still running after 3 s and was ended"):
        run(f"python {script}", seconds=3)
