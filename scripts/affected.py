#!/usr/bin/env python3
"""Print the test files whose imports, direct or not, reach changed files of ``src``, the nearest first.

    scripts/affected.py src/paceline/data/order.py …

Imports count wherever they stand, inside functions too, and so do modules that a string names, such as
``"paceline.cli.train:Train"``. What only type checkers import does not count. First come tests named like a changed
file and those of its room; the others reach it over ever more imports.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections import deque
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENTRY_POINTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
PACKAGES = {path.name for path in (ROOT / "src").glob("paceline*") if (path / "__init__.py").is_file()}
NAMED = re.compile(r"paceline(?:_\w+)?(?:\.\w+)+")
SIBLING = re.compile(r"^\.(\w+):\w+$")  # the end of f"{PACKAGE}.module:Name"


@cache
def _file_of(module: str) -> Path | None:
    place = ROOT / "src" / module.replace(".", "/")
    if not f"{module}.".startswith(("paceline.", "paceline_")):
        place = ROOT / "tests" / module  # such as calls.py
    return next((file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()), None)


def _names(node: ast.AST, package: str) -> Iterator[str]:
    """Yield the names that may be modules, in imports and in strings below a node of a file of a package."""
    for_types = node if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test) else None
    if isinstance(node, ast.Import):
        yield from (each.name for each in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield from (name for each in node.names for name in (node.module, f"{node.module}.{each.name}"))
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
        yield from (
            name for each in ENTRY_POINTS.get(f"paceline.{node.value}", {}).values() for name in NAMED.findall(each)
        )
        yield from NAMED.findall(node.value)
        yield from (f"{package}.{name}" for name in SIBLING.findall(node.value))
    for child in for_types.orelse if for_types else ast.iter_child_nodes(node):
        yield from _names(child, package)


@cache
def imports(file: Path) -> frozenset[Path]:
    """Return the files that a file imports or names, of our own packages and of the tests."""
    package = ".".join(file.parent.relative_to(ROOT).parts[1:])
    names = _names(ast.parse(file.read_text()), package)
    return frozenset(found for name in names if (found := _file_of(name)) is not None)


def distances(test: Path) -> dict[Path, int]:
    """Return every file that a test reaches, with the number of imports to it."""
    local = test.with_name("conftest.py")
    begin = {test, local} if local.is_file() and local.parent != ROOT / "tests" else {test}
    found, queue = dict.fromkeys(begin, 0), deque(begin)
    while queue:
        file = queue.popleft()
        for each in imports(file) - found.keys():
            found[each] = found[file] + 1
            queue.append(each)
    return found


def affected(changed: set[Path]) -> list[Path]:
    """Return the test files that reach a changed file: first those named like one, then those of its room."""
    names, rooms = {f"test_{file.stem}.py" for file in changed}, {file.parent.name for file in changed}
    order = []
    for test in sorted((ROOT / "tests").rglob("test_*.py")):
        reached = distances(test)
        if near := [reached[file] for file in changed if file in reached]:
            likeness = (test.name not in names, test.parent.name not in rooms)
            order.append((*likeness, min(near), len(reached), test))
    return [test for *_, test in sorted(order)]


if __name__ == "__main__":
    for test in affected({ROOT / name for name in sys.argv[1:]}):
        print(test.relative_to(ROOT))
