"""What the code's layout promises and no import shows."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"
FILES = [
    each for each in SRC.rglob("*.py") if "tasks" not in each.relative_to(SRC).parts and "notebooks" not in each.parts
]


def asks_for_a_kind_of_task(tree: ast.AST) -> list[int]:
    """Return the lines of ``isinstance(task, …)``, also of an attribute ``task``."""
    calls = [each for each in ast.walk(tree) if isinstance(each, ast.Call) and len(each.args) == 2]
    return [
        call.lineno
        for call in calls
        if isinstance(call.func, ast.Name)
        and call.func.id == "isinstance"
        and (getattr(call.args[0], "id", "") == "task" or getattr(call.args[0], "attr", "") == "task")
        and getattr(call.args[1], "id", "") not in ("str", "Task", "type")
    ]


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        ("isinstance(task, ImageTask)", [1]),
        ("isinstance(self.task, (A, B))", [1]),
        ("isinstance(task, Task) or isinstance(task, str)", []),
        ("isinstance(task, type)", []),
        ("type(task)", []),
    ],
)
def test_the_search_itself(code: str, lines: list[int]) -> None:
    assert asks_for_a_kind_of_task(ast.parse(code)) == lines


def test_a_task_is_asked_and_never_recognised() -> None:
    found = {str(each.relative_to(SRC)): asks_for_a_kind_of_task(ast.parse(each.read_bytes())) for each in FILES}
    assert len(found) > 300
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_the_core_names_no_other_package() -> None:
    others = [each.parent.name for each in SRC.glob("paceline_*/__init__.py")]
    assert len(others) > 3
    files = [each for each in (SRC / "paceline").rglob("*") if each.suffix in (".py", ".yaml", ".js", ".html")]
    found = [(each, name) for each in files for name in others if name in each.read_text(encoding="utf-8")]
    assert found == [], "an entry point leads to what a string would name"


def floor_problems(page: str, layers: list[set[str]]) -> list[str]:
    """Return how a page's table of floors differs from the layers that imports are held to, both from the top."""
    problems, left = [], [*layers]
    for row in re.findall(r"^\| (\d+ \|.*?) \|", page, re.MULTILINE):
        named, found = re.findall(r"`(\w+)`", row), set[str]()
        while left and left[0] & {*named}:
            found |= left.pop(0)
        is_whole = found == {*named} or ("other single modules" in row and found > {*named})
        places = {name: at for at, names in enumerate(layers) for name in names}
        pairs = re.findall(r"`(\w+)`, above (?=`(\w+)`)", row)
        if not is_whole or not all(places[upper] < places[lower] for upper, lower in pairs):
            problems.append(row)
    return problems + [" | ".join(sorted(each)) for each in left]


def test_the_page_of_floors_is_what_imports_are_held_to() -> None:
    root = SRC.parent
    contracts = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (texts,) = [each["layers"] for each in contracts if each["type"] == "layers" and each.get("exhaustive")]
    layers = [{*re.findall(r"\w+", each)} for each in texts if not each.startswith("(")]
    page = (root / "CONTRIBUTING.md").read_text()
    assert floor_problems(page, layers) == []
    assert floor_problems(page, [{"new"}, *layers]) != []
    assert floor_problems(page, layers[1:]) != []
    assert floor_problems(page, [*layers[:3], layers[4], layers[3], *layers[5:]]) != [], "tasks are above prediction"


# Names that others read: why two classes may share one.
SHARED_NAMES = {
    "Answers": "a schema of the service's /openapi.json, and what a task's `answers` returns (docs/guide/own-code.md)",
}
LESSONS = SRC / "paceline_course" / "notebooks"  # a learner's own code, which nothing imports


def test_a_class_name_has_one_meaning() -> None:
    modules: dict[str, set[str]] = {}
    for each in SRC.rglob("*.py"):
        code = "" if each.is_relative_to(LESSONS) else each.read_text(encoding="utf-8")
        for name in re.findall(r"^class (\w+)", code, re.MULTILINE):
            modules.setdefault(name, set()).add(str(each.relative_to(SRC)))
    assert len(modules) > 700
    assert {name: found for name, found in modules.items() if len(found) > 1 and name not in SHARED_NAMES} == {}
