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

SOURCES = Path(__file__).parents[2] / "src"


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Path]:
    """A folder with a run, a recipe and a folder of pictures."""
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "recipe.yaml").touch()
    (tmp_path / "my.yaml").touch()
    (tmp_path / "photos").mkdir()
    (tmp_path / "loop").symlink_to("loop")
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
    "paceline train m": {"maskrcnn_resnet50_fpn_coco", "my.yaml"},
    "paceline report ": {"runs/mine", "runs/", "photos/"},
    "paceline train digits --run-dir runs/": {"runs/mine"},
    "paceline train digits schedule.warmup_s": {"schedule.warmup_shape="},
    "paceline train digits train.duration='2 steps' optimizer.lr_s": {"optimizer.lr_scaling="},
    "paceline train digits model.channels_last=": {
        f"model.channels_last={value}" for value in ("auto", "true", "false")
    },
    "paceline train digits data.dataset=ima": {"data.dataset=image_folder"},
    "paceline train digits optimizer.name=la": {"optimizer.name=lamb", "optimizer.name=lars"},
    "paceline train image_folder data.path=ph": {"data.path=photos/"},
}


def test_bash(here: Path) -> None:
    """Bash breaks words at ``=`` and replaces what comes after it; so that is what it must be given."""
    requested = "\n".join(
        f"COMP_LINE={shlex.quote(line)} COMP_POINT={len(line)}; _paceline_completion paceline 2>/dev/null; "
        "printf '%s\\n' \"${COMPREPLY[@]}\"; echo =="
        for line in TYPED
    )
    bash = shutil.which("bash")
    assert bash is not None
    out = call(bash, "--norc", "-c", f'eval "$(paceline completion bash)"\n{requested}', cwd=here)
    answers = [set(lines.split("\n")) - {""} for lines in re.split(r"^==\n", out, flags=re.MULTILINE)[:-1]]
    for (line, expected), given in zip(TYPED.items(), answers, strict=True):
        after = line.split()[-1].rpartition("=")[1] if not line.endswith(" ") else ""
        assert given == {item.rpartition("=")[2] if after else item for item in expected}, line


def test_fish(here: Path) -> None:
    fish = shutil.which("fish")
    if fish is None:
        pytest.skip("needs fish")
    requested = "; ".join(f"complete -C {shlex.quote(line)}; echo ==" for line in TYPED)
    out = call(fish, "--no-config", "-c", f"paceline completion fish | source; {requested}", cwd=here)
    for (line, expected), given in zip(TYPED.items(), re.split(r"^==\n", out, flags=re.MULTILINE), strict=False):
        assert {item.split("\t")[0] for item in given.splitlines()} == expected, line


def test_zsh(here: Path) -> None:
    """What zsh is told: what follows a key is no new word, and descriptions stand beside names."""
    zsh = shutil.which("zsh")
    script = call("paceline", "completion", "zsh", cwd=here)
    assert "compadd -U -S ''" in script
    requested = {
        "COMP_WORDS": "paceline train digits schedule.warmup_s",
        "COMP_CWORD": "3",
        "_PACELINE_COMPLETE": "zsh_complete",
    }
    assert call("paceline", cwd=here, **requested) == "plain\nschedule.warmup_shape=\n_\n"
    requested |= {"COMP_WORDS": "paceline train dig", "COMP_CWORD": "2"}
    assert call("paceline", cwd=here, **requested).startswith("plain\ndigits\nHandwritten digits")
    if zsh is None:
        pytest.skip("needs zsh, to see that it reads the script")
    (here / "_paceline").write_text(script)
    call(zsh, "-f", "-n", "_paceline", cwd=here)


def test_a_shell_waits_for_no_torch(here: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "paceline"],
        cwd=here,
        env={
            **os.environ,
            "PYTHONPATH": str(SOURCES),
            "_PACELINE_COMPLETE": "bash_complete",
            "COMP_WORDS": "paceline train digits optimizer.",
        },
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert "optimizer.lr=" in done.stdout
    assert not re.search(r"\| +torch$", done.stderr, flags=re.MULTILINE)
