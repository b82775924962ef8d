"""Shells finish what is typed: asked through the real shells, where they are there."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fork_server
import pytest
from calls import Call

SOURCES = Path(__file__).parents[2] / "src"


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Path]:
    """A folder where shells find the command."""
    (tmp_path / ".bin").mkdir()
    with fork_server.commands_for_shells(tmp_path / ".bin", {"paceline": ["-m", "paceline"]}):
        yield tmp_path


def call(*command: str, cwd: Path, **environment: str) -> str:
    path = f"{cwd / '.bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(SOURCES), "HOME": str(cwd), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


TYPED = {
    "paceline find": {"find-lr", "find-batch"},
    "paceline train dig": {"digits"},
    "paceline noise-scale dig": {"digits"},
    "paceline train digits --run": {"--run-dir"},
    "paceline train digits schedule.warmup_s": {"schedule.warmup_shape="},
}


def test_bash(here: Path) -> None:
    requested = "\n".join(
        f"COMP_WORDS=({line}); COMP_CWORD=$(({len(shlex.split(line))} - 1)); COMPREPLY=(); "
        "_paceline_completion paceline 2>/dev/null; printf '%s\\n' \"${COMPREPLY[@]}\"; echo =="
        for line in TYPED
    )
    bash = shutil.which("bash")
    assert bash is not None
    out = call(bash, "--norc", "-c", f'eval "$(paceline completion bash)"\n{requested}', cwd=here)
    answers = [set(lines.split("\n")) - {""} for lines in re.split(r"^==\n", out, flags=re.MULTILINE)[:-1]]
    assert dict(zip(TYPED, answers, strict=True)) == TYPED


@pytest.mark.parametrize(("shell", "without_a_space"), [("bash", "compopt -o nospace"), ("zsh", "compadd -U -S ''")])
def test_no_space_follows_a_key(shell: str, without_a_space: str, paceline_here: Call) -> None:
    assert without_a_space in paceline_here("completion", shell).out


def test_zsh_and_fish_are_given_values_and_descriptions(here: Path) -> None:
    for shell, typed, expected in (
        ("zsh", "dig", "plain\ndigits\nHandwritten digits"),
        ("zsh", "digits optimizer.name=lam", "plain\noptimizer.name=lamb\n_\n"),
        ("fish", "digits model.channels_last=t", "plain,model.channels_last=true\n"),
    ):
        requested = {"COMP_WORDS": f"paceline train {typed}", "_PACELINE_COMPLETE": f"{shell}_complete"}
        requested["COMP_CWORD"] = str(len(typed.split()) + 1) if shell == "zsh" else typed.split()[-1]
        assert expected in call("paceline", cwd=here, **requested)


def test_a_shell_waits_for_no_torch(here: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "paceline"],
        cwd=here,
        env={
            **os.environ,
            "PYTHONPATH": str(SOURCES),
            "_PACELINE_COMPLETE": "bash_complete",
            "COMP_WORDS": "paceline train digits optimizer.",
            "COMP_CWORD": "3",
        },
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert "optimizer.lr=" in done.stdout
    assert not re.search(r"\| +torch$", done.stderr, flags=re.MULTILINE)
