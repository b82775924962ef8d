"""Where in the user's files is something called? For what leaves a state behind, and no call to be seen."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

from torch import nn

from paceline.recipe.named_code import named_code
from paceline.recipe.schema import Recipe
from paceline.tasks.task import Task
from paceline_advisor.doctor.calls import OURS, TORCH
from paceline_advisor.doctor.findings import Place


def own_files(recipe: Recipe, task: Task, network: nn.Module | None) -> list[str]:
    """The files of the user's code: those that the recipe names, and those of its task's and network's classes."""
    modules = {reference.partition(":")[0] for reference in named_code(recipe)}
    kinds = [*type(task).__mro__, *({type(each) for each in network.modules()} if network is not None else ())]
    modules |= {kind.__module__ for kind in kinds}
    files = {_file(name) for name in modules}
    return sorted(
        file for file in files if file and not file.startswith((*OURS, TORCH)) and "site-packages" not in file
    )


def find_call(files: Collection[str], names: Collection[str]) -> Place | None:
    """The first line on which one of these functions or classes is called or entered, by its last name."""
    return next((place for file in files for place in _calls(file, names)), None)


def find_setting(files: Collection[str], ending: str) -> Place | None:
    """The first line that assigns to something whose name ends so."""
    for file in files:
        for node in ast.walk(_tree(file)):
            targets = node.targets if isinstance(node, ast.Assign) else []
            if any(ast.unparse(target).endswith(ending) for target in targets):
                assert isinstance(node, ast.Assign)
                return Place(file, node.lineno, ast.unparse(node))
    return None


def _calls(file: str, names: Collection[str]) -> Iterator[Place]:
    calls = (node for node in ast.walk(_tree(file)) if isinstance(node, ast.Call))
    for node in sorted(calls, key=lambda each: each.lineno):
        called = ast.unparse(node.func)
        if called.rpartition(".")[2] in names:
            yield Place(file, node.lineno, called)


def _tree(file: str) -> ast.Module:
    try:
        return ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return ast.Module(body=[], type_ignores=[])


def _file(module: str) -> str:
    found = sys.modules.get(module)
    try:
        return "" if found is None else inspect.getsourcefile(found) or ""
    except TypeError:
        return ""  # built in, or made by a program
