"""What the launcher and its ranks do when one of them goes: real processes, with short graces."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.distributed.local_launch import read_errors, report_error
from paceline.errors import DataError, OtherProcessError

SOURCE = str(Path(paceline.__file__).parents[1])

# Ranks that do as they are told, in place of `python -m paceline`: RANKS has one expression for each.
LAUNCHER = """
import os, signal, subprocess, sys, tempfile, time
from paceline.distributed import local_launch

local_launch._GRACE_AFTER_FAILURE_SECONDS = float(os.environ["AFTER_FAILURE"])
local_launch._GRACE_AFTER_END_SECONDS = float(os.environ["AFTER_END"])
tempfile.tempdir = os.environ["SCRATCH"]
sys.executable = os.environ["STAND_IN"]
sys.exit(local_launch.launch_local(["train"], 2, cores=2))
"""
STAND_IN = """\
#!{python}
import os, signal, sys, time
rank = int(os.environ["RANK"])
exec(os.environ[f"DOES_{{rank}}"])
"""
FOR_EVER = "time.sleep(60)"


@pytest.fixture
def launch(tmp_path: Path) -> Callable[..., Any]:
    """``launch("sys.exit(0)", "time.sleep(60)")`` starts a launcher whose ranks do these things."""
    stand_in, scratch = tmp_path / "stand-in", tmp_path / "scratch"
    stand_in.write_text(STAND_IN.format(python=sys.executable))
    stand_in.chmod(0o755)
    scratch.mkdir()

    def start(first: str, second: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", LAUNCHER],
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={
                "PYTHONPATH": SOURCE,
                "SCRATCH": str(scratch),
                "STAND_IN": str(stand_in),
                "AFTER_FAILURE": "60",
                "AFTER_END": "60",
                "DOES_0": first,
                "DOES_1": second,
                **environment,
            },
        )

    return start


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=30)
    return process.returncode, out, err


@pytest.mark.parametrize("code", [0, 75])
def test_a_rank_that_stays_long_after_another_has_ended_well_is_ended(launch: Callable[..., Any], code: int) -> None:
    started = time.monotonic()
    result, _, err = ended(launch(f"sys.exit({code})", FOR_EVER, AFTER_END="0.5"))
    assert result == 1
    assert "rank 1 was still running" in err
    assert time.monotonic() - started < 20


def test_ranks_that_end_well_one_after_another_are_left_in_peace(launch: Callable[..., Any]) -> None:
    """The short grace is for failures: whoever writes the summary is not cut short."""
    assert ended(launch("time.sleep(1)", "sys.exit(0)", AFTER_FAILURE="0.2")) == (0, "", "")


def test_a_rank_that_stays_after_another_has_failed_is_ended_sooner(launch: Callable[..., Any]) -> None:
    result, _, err = ended(launch("sys.exit(3)", FOR_EVER, AFTER_FAILURE="0.2"))
    assert result == 1
    assert err == "paceline: rank 0 ended with exit code 3 and no message\n"


# A launcher in which something happens right after its first rank was started.
AFTER_THE_FIRST = """
import os, signal, subprocess, sys, tempfile
from paceline.distributed import local_launch

tempfile.tempdir = sys.argv[1]
started, popen = [], subprocess.Popen
def start(*arguments, **options):
    if started:
        {event}
    started.append(popen([sys.executable, "-c", "import time; time.sleep(60)"]))
    return started[-1]
subprocess.Popen = start
try:
    code = local_launch.launch_local(["train"], 2, cores=2)
except BlockingIOError:
    code = "refused"
print(code, [process.poll() for process in started])
"""


def after_the_first(event: str, scratch: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", AFTER_THE_FIRST.format(event=event), str(scratch)],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
        env={"PYTHONPATH": SOURCE},
    )
    assert list(scratch.iterdir()) == []
    return done.stdout.strip()


def test_a_signal_while_ranks_are_started_is_passed_on_and_leaves_nothing_behind(tmp_path: Path) -> None:
    ended_by = -signal.SIGUSR1
    assert after_the_first("os.kill(os.getpid(), signal.SIGUSR1)", tmp_path) == f"1 [{ended_by}, {ended_by}]"


def test_ranks_are_ended_if_a_later_one_cannot_be_started(tmp_path: Path) -> None:
    """Not more processes than the system allows: those that were started must not stay."""
    refusal = 'raise BlockingIOError("no more processes")'
    assert after_the_first(refusal, tmp_path) == f"refused [{-signal.SIGKILL}]"


def test_ranks_of_one_machine_talk_over_its_loopback_unless_told_otherwise(launch: Callable[..., Any]) -> None:
    say = "print(os.environ['GLOO_SOCKET_IFNAME'])"
    assert ended(launch(say, "pass"))[1] in ("lo\n", "lo0\n")
    assert ended(launch(say, "pass", GLOO_SOCKET_IFNAME="eth7"))[1] == "eth7\n"


def test_a_rank_that_cannot_stop_ends_some_time_after_its_launcher() -> None:
    rank = """
        import os, signal, sys, time
        from paceline.distributed.local_launch import follow_launcher
        signal.signal(signal.SIGTERM, lambda *_: print("asked", flush=True))
        os.environ["PACELINE_LAUNCHER_PID"] = str(os.getppid())
        follow_launcher(os.environ, grace_seconds=0.5)
        print("listening", flush=True)
        while True:
            time.sleep(1)
    """
    launcher = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1]]).stdout; input()"
    process = subprocess.Popen(
        [sys.executable, "-c", launcher, textwrap.dedent(rank)],
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"PYTHONPATH": SOURCE},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        assert process.stdout.readline() == "listening\n"
        process.kill()
        process.wait()
        # The rank holds the other end of the pipe: it ends when the rank does.
        assert process.stdout.read() == "asked\n"


SLURM = {
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "2",
}


@pytest.mark.parametrize(
    ("environ", "prefix"),
    [
        ({}, ""),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, "rank 1: "),
        ({**SLURM, "SLURM_STEP_NODELIST": "node1"}, "rank 1: "),
        ({"RANK": "one", "WORLD_SIZE": "2"}, ""),
        ({"WORLD_SIZE": "2"}, ""),
    ],
    ids=["alone", "torchrun", "slurm", "no number", "no rank"],
)
def test_an_error_is_told_with_its_rank_whoever_started_it(
    environ: dict[str, str], prefix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report_error(DataError("no such data"), environ) == 2
    assert capsys.readouterr().err == f"paceline: {prefix}no such data\n"


def test_the_launcher_is_told_which_rank_failed(tmp_path: Path) -> None:
    environ = {"RANK": "1", "WORLD_SIZE": "2", "PACELINE_ERROR_DIRECTORY": str(tmp_path)}
    assert report_error(DataError("no such data"), {**os.environ, **environ}) == 2
    assert json.loads((tmp_path / "rank-1.json").read_text())["message"] == "no such data"


def test_an_error_is_told_though_it_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / ".rank-1").mkdir()
    environ = {"RANK": "1", "WORLD_SIZE": "2", "PACELINE_ERROR_DIRECTORY": str(tmp_path)}
    assert report_error(DataError("no such data"), environ) == 2
    assert capsys.readouterr().err == "paceline: rank 1: no such data\n"


def test_the_cause_comes_before_its_echo_and_is_told_without_its_notes(tmp_path: Path) -> None:
    environ = {**os.environ, "WORLD_SIZE": "2", "PACELINE_ERROR_DIRECTORY": str(tmp_path)}
    assert report_error(OtherProcessError("the first process failed"), {**environ, "RANK": "1"}) == 1
    error = RuntimeError("lost\nin space")
    error.add_note("(after 3.2 s)")
    assert report_error(error, {**environ, "RANK": "0"}) == 1
    cause, echo = read_errors(tmp_path)
    assert (cause.rank, cause.summary, cause.is_echo) == (0, "RuntimeError: lost", False)
    assert "(after 3.2 s)" in cause.message
    assert (echo.rank, echo.summary) == (1, "the first process failed")


@pytest.mark.real_processes
def test_ranks_do_not_import_from_the_current_directory(tmp_path: Path) -> None:
    """A file there may have the name of a library: real ranks, as `python -m` is what searches the directory first."""
    for name in ("click", "rich", "paceline"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the current directory')")
    launch = "import sys; from paceline.distributed.local_launch import launch_local as launch; "
    launch += "sys.exit(launch(['--version'], 2, cores=2))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", launch],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": SOURCE},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.count(f"version {paceline.__version__}")) == (0, 2), done.stderr
