"""scripts/release dates, builds, writes notes and tags; and refuses what must not be released."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import paceline

ROOT = Path(__file__).parents[2]
VERSION = paceline.__version__
RUN = f"tests/golden/releases/{VERSION}/digits/environment.json"
COPIED = ("scripts/release", "src/paceline/version.py", "SECURITY.md", "tests/golden/public.txt", RUN)
WHEELS = (
    "import sys; from pathlib import Path; Path(sys.argv[1]).mkdir(); Path(sys.argv[1], 'a.whl').write_text('wheel')"
)
Call = Callable[..., str]


@pytest.fixture
def git(tmp_path: Path) -> Call:
    """Call git in a repository that may be released."""
    for name in COPIED:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    written = (ROOT / "pyproject.toml").read_text().replace("repository.invalid", "git.example.org/paceline")
    (tmp_path / "pyproject.toml").write_text(written)
    (tmp_path / "SECURITY.md").write_text("Report to security@example.org.\n")
    (tmp_path / "scripts" / "wheels").write_text(WHEELS)
    (tmp_path / ".gitignore").write_text("/dist/\n")
    changes = f"# Changelog\n\n## [{VERSION}] - unreleased\n\n### Added\n- New.\n\n## [0.0.1] - 2026-01-01\n\n- Old.\n"
    (tmp_path / "CHANGELOG.md").write_text(changes)

    def call(*words: str) -> str:
        own = ("git", "-c", "user.name=a", "-c", "user.email=a@example.org", *words)
        return subprocess.run(own, cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    call("init", "--quiet")
    for key in ("user.name", "user.email"):
        call("config", key, "a@example.org")
    call("add", ".")
    call("commit", "--quiet", "--message", "All")
    return call


def release(folder: Path, *words: str) -> tuple[int, str]:
    done = subprocess.run(
        (sys.executable, folder / "scripts" / "release", *words),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return done.returncode, done.stdout + done.stderr


def test_a_release_is_dated_described_and_tagged_only_if_asked(git: Call, tmp_path: Path) -> None:
    assert release(tmp_path, "--check") == (0, "")
    assert release(tmp_path)[0] == 0
    assert git("tag") == ""
    assert release(tmp_path, "--tag")[0] == 0
    assert git("log", "--format=%s").splitlines() == [f"Release {VERSION}", "All"]
    assert "unreleased" not in git("show", f"v{VERSION}:CHANGELOG.md")
    kept = git("show", f"v{VERSION}:tests/golden/releases/{VERSION}/public.txt")
    assert kept == (ROOT / "tests" / "golden" / "public.txt").read_text()
    notes = (tmp_path / "dist" / "notes.md").read_text()
    assert f"{hashlib.sha256(b'wheel').hexdigest()}  a.whl" in notes
    assert ("- New." in notes, "- Old." in notes) == (True, False)
    assert git("tag", "--format=%(contents)").rstrip() == notes.rstrip()
    assert release(tmp_path, "--check") == (0, "")
    assert "is released once" in release(tmp_path)[1]
    git("commit", "--quiet", "--allow-empty", "--message", "More")
    assert "raise the version" in release(tmp_path, "--check")[1]


@pytest.mark.parametrize(
    ("file", "before", "after", "said"),
    [
        ("new.txt", "", "x", "not committed"),
        ("src/paceline/version.py", VERSION, "9.9.9", "another version"),
        ("CHANGELOG.md", f"[{VERSION}]", "[9.9.9]", "does not begin"),
        (RUN, f'"paceline": "{VERSION}"', '"paceline": "9.9.9"', "no run"),
        ("pyproject.toml", "git.example.org/paceline", "repository.invalid", "a placeholder"),
        ("SECURITY.md", "Report", "(replace this line with an address)", "a placeholder"),
    ],
)
def test_what_is_not_ready_is_not_released(
    file: str, before: str, after: str, said: str, git: Call, tmp_path: Path
) -> None:
    path = tmp_path / file
    path.write_text((path.read_text() if path.exists() else "").replace(before, after))
    if said != "not committed":
        git("commit", "--quiet", "--all", "--message", "Change")
    commit = git("rev-parse", "HEAD")
    code, text = release(tmp_path, "--tag")
    assert (code, git("tag"), git("rev-parse", "HEAD")) == (1, "", commit)
    assert said in text
    assert len(text.splitlines()) <= 2
