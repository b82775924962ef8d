#!/usr/bin/env python3
"""Plant each bug of tests/planted in a copy of the sources, and find out which everyday tests fail.

    scripts/planted.py [NAME…] [--tests FILE…] [--files 12] [--write]

A patch begins with what the bug does and which promise it breaks (docs/decisions/0074). First comes the test file that
RESULT.md names; then those chosen by `scripts/affected.py`: the three nearest, those that stand for promises, and
others, until a test fails or --files have been run. --write puts the outcome into RESULT.md.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path

from affected import affected

ROOT = Path(__file__).parents[1]
HERE = ROOT / "tests" / "planted"

COPIED = ("src", "tests", "scripts")
LINKED = (
    "benchmarks",
    "docs",
    "examples",
    "pyproject.toml",
    "constraints.txt",
    "README.md",
    "CONTRIBUTING.md",
)
LEFT_OUT = ("gpu", "slurm", "browser", "rehearsal", "labs", "golden", "planted")
AT_ONCE = 3
HEADER = "| bug | breaks | caught by |\n|---|---|---|\n"


def described(patch: Path) -> tuple[str, str, set[Path]]:
    """Return what a bug does, the promises it breaks, and the files it changes."""
    says, breaks, *rest = patch.read_text().splitlines()
    files = {ROOT / line.removeprefix("+++ b/") for line in rest if line.startswith("+++ ")}
    return says, breaks.removeprefix("Breaks ").rstrip("."), files


def failing(copy: Path, files: list[str]) -> list[str]:
    """Return the everyday tests that fail in some files, at most two."""
    import pytest
    import torchvision  # noqa: F401  # so that each run has it, and torch

    output = copy / "output"
    if (child := os.fork()) == 0:
        try:
            written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(written, 1)
            os.dup2(written, 2)
            os.chdir(copy)
            os.environ.update(PYTHONPATH=str(copy / "src"), OMP_NUM_THREADS="1")
            sys.path[:0] = [str(copy / "src")]
            options = ["-m", "not thorough", "-q", "--maxfail=2", "-p", "no:cacheprovider", "-o", "timeout=300"]
            pytest.main([*options, *files])
            sys.stdout.flush()
        except BaseException:  # noqa: BLE001  # it must not reach the code of the parent
            traceback.print_exc()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    return re.findall(r"^(?:FAILED|ERROR) ([^[\s]+)", output.read_text(), re.MULTILINE)


def nearest(changed: set[Path]) -> Iterator[str]:
    """Yield the test files that reach changed files: the nearest, those that stand for promises, and the others."""
    reached = [each for each in affected(changed) if each.relative_to(ROOT).parts[1] not in LEFT_OUT]
    promises = [each for each in reached if "mark.everyday" in each.read_text()]
    for each in dict.fromkeys([*reached[:AT_ONCE], *promises, *reached]):
        yield str(each.relative_to(ROOT))


def try_one(copy: Path, patch: Path, asked: list[str], most: int) -> list[str]:
    """Plant one bug, run tests, and remove it again."""
    tests = asked or list(nearest(described(patch)[2]))[:most]
    subprocess.run(["git", "apply", str(patch)], cwd=copy, check=True)
    try:
        for first in range(0, len(tests), AT_ONCE):
            if found := failing(copy, tests[first : first + AT_ONCE]):
                return found
    finally:
        subprocess.run(["git", "apply", "--reverse", str(patch)], cwd=copy, check=True)
    return []


def main() -> int:
    """Run the command line; 1 if more than one bug in forty is not caught."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--tests", nargs="+", default=[])
    parser.add_argument("--files", type=int, default=12)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    patches = [each for each in sorted(HERE.glob("*.patch")) if not options.names or each.stem in options.names]
    result = HERE / "RESULT.md"
    rows = dict(re.findall(r"^\| ([\w-]+) (\|.*\|)$", result.read_text(), re.MULTILINE)) if result.exists() else {}
    missed = 0
    copy = Path(tempfile.mkdtemp(prefix="planted-"))
    try:
        for name in COPIED:
            shutil.copytree(ROOT / name, copy / name)
        for name in LINKED:
            (copy / name).symlink_to(ROOT / name)
        for patch in patches:
            known = re.findall(r"`([^:`]+)::", rows.get(patch.stem, ""))[:1]
            found = try_one(copy, patch, options.tests or [f"tests/{each}" for each in known], options.files)
            if known and not found and not options.tests:
                found = try_one(copy, patch, [], options.files)
            missed += not found
            print(f"{patch.stem}: {', '.join(found) or 'NOT CAUGHT'}", flush=True)
            tests = ", ".join(f"`{each.removeprefix('tests/')}`" for each in dict.fromkeys(found)) or "**nothing**"
            rows[patch.stem] = f"| {described(patch)[1]} | {tests} |"
            if options.write:
                text = HEADER + "".join(f"| {name} {rows[name]}\n" for name in sorted(rows.keys() - {"bug"}))
                result.write_text(text)
    finally:
        shutil.rmtree(copy)
    return int(missed * 40 > len(patches))


if __name__ == "__main__":
    sys.exit(main())
