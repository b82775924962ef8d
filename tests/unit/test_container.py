"""The container recipe copies only files of the build context, pins its libraries, and runs without root.

It cannot be built in a test: that takes a container engine, and a download of PyTorch.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def instructions() -> list[tuple[str, str]]:
    """Instructions with their arguments, continued lines joined, comments left out."""
    text = (ROOT / "Containerfile").read_text(encoding="utf-8")
    lines = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ").splitlines()
    return [(words[0], words[1]) for line in lines if len(words := line.split(None, 1)) == 2]


def copied_from_here() -> set[str]:
    """Files and folders of this repository that some COPY takes."""
    copies = (argument for name, argument in instructions() if name == "COPY" and "--from" not in argument)
    return {source for argument in copies for source in argument.split()[:-1]}


def test_what_is_copied_is_here_and_is_sent_to_the_builder() -> None:
    ignore = (ROOT / ".containerignore").read_text(encoding="utf-8").splitlines()
    assert "*" in ignore
    sent = {line.removeprefix("!") for line in ignore if line.startswith("!")}
    assert copied_from_here() == sent
    assert [source for source in sent if not (ROOT / source).exists()] == []
    assert (ROOT / ".dockerignore").resolve() == ROOT / ".containerignore"


def test_everything_that_a_build_reads_is_copied() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    manifest = (ROOT / "MANIFEST.in").read_text(encoding="utf-8")
    named = {"README.md", *project["project"]["license-files"]}  # setup.py reads the first
    named |= {each for line in re.findall(r"^include (.*)", manifest, re.MULTILINE) for each in line.split()}
    folders = project["tool"]["setuptools"]["packages"]["find"]["where"]
    assert {"pyproject.toml", "setup.py", "MANIFEST.in", *folders, *named} == copied_from_here()


def test_libraries_are_pinned_and_the_command_runs_as_a_user() -> None:
    text = instructions()
    installs = [argument for name, argument in text if name == "RUN" and "pip install" in argument]
    assert all("-c constraints.txt" in argument or "--no-deps" in argument for argument in installs)
    assert installs[0].endswith("rm -rf build src"), "a later build would take the empty package from there"
    assert [argument for name, argument in text if name == "USER"][-1].isdigit()
    assert ("ENTRYPOINT", '["paceline"]') in text, "as a list: a shell between would keep signals to itself"
    assert sum(name == "FROM" for name, _ in text) == 2, "what compiles is not in what runs"
