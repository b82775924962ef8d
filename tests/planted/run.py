"""Plant each bug of this folder in a copy of the sources, and find out which everyday tests fail.

    tests/planted/run.py [NAME…] [--tests FILE…] [--files 12] [--write]

A patch begins with what the bug does and which promise it breaks (docs/decisions/0074). Tests are chosen by
`scripts/affected.py`: the three nearest files, those that stand for promises, then others, until one fails or --files
have been run. --write puts the outcome into RESULT.md.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
from affected import affected  # noqa: E402

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


def failing(copy: Path, files: list[Path]) -> list[str]:
    """Return the everyday tests that fail in some files, at most two."""
    options = ["-m", "not thorough", "-q", "--maxfail=2", "-p", "no:cacheprovider", "-o", "timeout=200"]
    environment = os.environ | {"PYTHONPATH": str(copy / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *(str(each.relative_to(ROOT)) for each in files)],
        cwd=copy,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return re.findall(r"^(?:FAILED|ERROR) ([^[\s]+)", done.stdout, re.MULTILINE)


def try_one(copy: Path, patch: Path, asked: list[Path], most: int) -> list[str]:
    """Plant one bug, run tests, and remove it again."""
    changed = described(patch)[2]
    reached = [each for each in affected(changed) if each.relative_to(ROOT).parts[1] not in LEFT_OUT]
    promises = [each for each in reached if "mark.everyday" in each.read_text()]
    tests = asked or list(dict.fromkeys([*reached[:AT_ONCE], *promises, *reached]))[:most]
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
    parser.add_argument("--tests", nargs="+", type=Path, default=[])
    parser.add_argument("--files", type=int, default=12)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    patches = [each for each in sorted(HERE.glob("*.patch")) if not options.names or each.stem in options.names]
    result = HERE / "RESULT.md"
    rows = dict(re.findall(r"^\| ([\w-]+) (\|.*\|)$", result.read_text(), re.MULTILINE)) if result.exists() else {}
    missed = 0
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        copy = Path(folder)
        for name in COPIED:
            shutil.copytree(ROOT / name, copy / name)
        for name in LINKED:
            (copy / name).symlink_to(ROOT / name)
        for patch in patches:
            found = try_one(copy, patch, [ROOT / each for each in options.tests], options.files)
            missed += not found
            print(f"{patch.stem}: {', '.join(found) or 'NOT CAUGHT'}", flush=True)
            tests = ", ".join(f"`{each.removeprefix('tests/')}`" for each in found[:1]) or "**nothing**"
            rows[patch.stem] = f"| {described(patch)[1]} | {tests}{f' and {len(found) - 1} more' * (len(found) > 1)} |"
            if options.write:
                text = HEADER + "".join(f"| {name} {rows[name]}\n" for name in sorted(rows.keys() - {"bug"}))
                result.write_text(text)
    return int(missed * 40 > len(patches))


if __name__ == "__main__":
    sys.exit(main())
