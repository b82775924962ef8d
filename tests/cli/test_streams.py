"""Standard streams that are closed, full or gone: a run continues, and a command that only prints says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import fork_server
import pytest

SOURCES = Path(__file__).parents[2] / "src"
InShell = Callable[..., tuple[int, str]]


@pytest.mark.parametrize("arguments", ["recipes", "--help", "recipes --json"])
@pytest.mark.parametrize(("streams", "why"), [(">/dev/full", "No space left"), (">&-", "Bad file descriptor")])
def test_a_command_that_cannot_print_fails_with_one_sentence(
    arguments: str, streams: str, why: str, in_shell: InShell
) -> None:
    code, reported = in_shell(f'set -o pipefail; "$@" {streams}', *arguments.split())
    assert code == 1
    assert len(reported.splitlines()) == 1
    assert "standard output" in reported
    assert why in reported


@pytest.mark.parametrize(
    ("arguments", "streams", "code"),
    [
        ("recipes", ">&- 2>&-", 1),
        ("recipes", ">/dev/full 2>/dev/full", 1),
        ("recipes", "2>&1 | true", 0),
        ("--help", "| true", 0),
        ("no-such", "2>/dev/full", 2),
        ("no-such", "2>&-", 2),
    ],
)
def test_the_exit_code_is_right_where_nothing_can_be_said(
    arguments: str, streams: str, code: int, in_shell: InShell
) -> None:
    assert in_shell(f'set -o pipefail; "$@" {streams}', *arguments.split()) == (code, "")


@pytest.mark.everyday
def test_a_run_ends_as_if_its_streams_were_there(tiny: tuple[str, ...], tmp_path: Path, in_shell: InShell) -> None:
    assert in_shell('"$@" <&- >&- 2>&-', *("train", "digits", *tiny, "--run-dir", "run")) == (0, "")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "completed"


@pytest.mark.parametrize("more", [("--json",), ()])
def test_a_run_that_cannot_print_ends_as_if_it_could(
    more: tuple[str, ...], tiny: tuple[str, ...], tmp_path: Path
) -> None:
    """Of two forms, the second has nobody to read its standard error either."""
    words = ("train", "digits", *tiny, "train.until=2 steps", "--run-dir", "run")
    reader, writer = os.pipe()
    if not more:
        os.close(reader)
    with Path("/dev/full").open("w") as full:
        process = fork_server.Popen(
            [sys.executable, "-m", "paceline", *words, *more],
            cwd=tmp_path,
            stdout=full,
            stderr=writer,
            env={**os.environ, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"},
        )
    os.close(writer)
    if more:
        with os.fdopen(reader) as errors:
            assert "Traceback" not in errors.read()
    assert process.wait(timeout=200) == 75
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "stopped"


def test_an_encoding_without_a_character_shows_its_number(in_shell: InShell, tmp_path: Path) -> None:
    code, error = in_shell('PYTHONIOENCODING=latin-1 "$@" > shown', "explain", "data.workers")
    assert (code, error) == (0, "")
    assert "\\u2264 1024" in (tmp_path / "shown").read_text(encoding="latin-1")


def test_nor_do_several_ranks_need_streams(tiny: tuple[str, ...], tmp_path: Path, in_shell: InShell) -> None:
    command = ("train", "digits", *tiny, "--processes", "2", "--run-dir", "run")
    assert in_shell('"$@" >&- 2>/dev/full', *command) == (0, "")
    assert (tmp_path / "run" / "summary.json").is_file()


def test_a_closed_stream_shares_its_number_with_no_file(tmp_path: Path) -> None:
    """What writes to number 1 or 2, as C libraries do, would otherwise write into a file of the run."""
    program = "import os; from paceline.cli.streams import wrap_streams; wrap_streams(); os._exit(os.open('file', 65))"
    done = subprocess.run(
        ["bash", "-c", f'exec "{sys.executable}" -c "{program}" <&- >&- 2>&-'],
        cwd=tmp_path,
        check=False,
        env={**os.environ, "PYTHONPATH": str(SOURCES)},
    )
    assert done.returncode > 2
