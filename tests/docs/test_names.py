"""What the pages name exists: links, commands, options, recipe keys, messages, files, functions, record keys."""

from __future__ import annotations

import ast
import dataclasses
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest
from calls import command_names

from paceline.cli.commands import command_of
from paceline.optimizers import RULES
from paceline.plan import Plan
from paceline.recipe import layers
from paceline.recipe.schema import Recipe
from paceline.records import events
from paceline.records.reader import LedgerFacts, Summary

ROOT = Path(__file__).parents[2]
COURSE = ROOT / "src" / "paceline_course" / "notebooks"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *COURSE.rglob("*.md"), *COURSE.glob("*.py")])
SOURCES = sorted(path for path in (ROOT / "src").rglob("*.py") if "notebooks" not in path.parts)
COMMANDS = command_names()
OF_PAGES = pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))

_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"`([^`]+)`")
_KEY = re.compile(rf"^({'|'.join(layers.field_types(Recipe))})\.([a-z_]+(?:\.[a-z_]+)*)(?==|$)")
_PATH = re.compile(r"(?:src|tests|benchmarks|scripts|examples|docs)/[\w./*-]*")
_FILES = ("py", "json", "jsonl", "yaml", "safetensors")


def codes(text: str) -> set[str]:
    """Everything in single backticks."""
    return set(_CODE.findall(text))


def anchors(path: Path) -> set[str]:
    """The places in a page a link can lead to, named as GitHub names them, or by the page itself."""
    text = path.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    named = {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
    return named | set(re.findall(r'<a id="([^"]+)">', text))


@OF_PAGES
def test_links_lead_somewhere(path: Path, page: Callable[[Path], Any]) -> None:
    for link in _LINK.findall(page(path).prose):
        if link.startswith(("http://", "https://")):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), f"{path}: {link}"
        if anchor:
            assert anchor in anchors(target), f"{path}: {link}"


def test_named_paths_exist(page: Callable[[Path], Any]) -> None:
    docs = ROOT / "docs"
    for path in (ROOT / "README.md", docs / "measured.md", docs / "tour.md", *(docs / "decisions").glob("*.md")):
        for code in filter(_PATH.fullmatch, codes(page(path).prose)):
            assert any(ROOT.glob(code.rstrip("/"))), f"{path}: {code}"


def test_every_decision_is_listed_once(page: Callable[[Path], Any]) -> None:
    folder = ROOT / "docs" / "decisions"
    listed = [link for link in _LINK.findall(page(folder / "README.md").prose) if link.startswith("0")]
    assert listed == sorted(path.name for path in folder.glob("0*.md"))
    assert len(listed) <= 25


def python_strings(page: Any) -> Iterator[str]:
    """Every string in the Python of a page, with X for what is filled in."""
    for block in page.blocks:
        for node in ast.walk(ast.parse(block.text)) if block.language == "python" else ():
            if isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "X" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def written_commands(page: Any) -> Iterator[list[str]]:
    """Every ``paceline …`` of a page, in blocks and in the text, as words."""
    shown = [code for code in {*codes(page.prose), *python_strings(page)} if code.startswith("paceline ")]
    for block in page.blocks:
        if block.language in ("console", "bash"):
            shown += [command.text.partition(" #")[0] for command in block.commands]
    for text in shown:
        for part in re.split(r"[|;&]|\$\(|\bdo\b|\buntil\b|<", text):
            closed = part.count('"') % 2 == part.count("'") % 2 == 0
            words = shlex.split(part.strip(), posix=True) if closed else []
            if "paceline" in words[:1] or words[:3] == ["python", "-m", "paceline"]:
                yield words[words.index("paceline") + 1 :]


@OF_PAGES
def test_commands_and_options_exist(path: Path, page: Callable[[Path], Any]) -> None:
    for words in written_commands(page(path)):
        if not words or words[0].startswith("-"):
            assert set(words) <= {"--help", "-h", "--version"}, words
            continue
        if words[0] == "help":
            assert set(words[1:]) <= {*COMMANDS, "all"}, words
            continue
        assert words[0] in COMMANDS, f"{path}: paceline {' '.join(words)}"
        options = options_of(words[0])
        own = words[1 : words.index("--")] if "--" in words else words[1:]  # what comes after it is another program's
        for word in own:
            if word.startswith("--"):
                assert word.partition("=")[0] in options, f"{path}: paceline {' '.join(words)}"


@cache
def options_of(name: str) -> set[str]:
    command = command_of(name)
    commands = [command, *(command.commands.values() if isinstance(command, click.Group) else ())]
    parameters = [each for one in commands for each in one.params if isinstance(each, click.Option)]
    return {*[option for parameter in parameters for option in parameter.opts], "--help"}


@OF_PAGES
def test_recipe_keys_exist(path: Path, page: Callable[[Path], Any]) -> None:
    taken = page(path)
    words = {word for command in written_commands(taken) for word in command if "=" in word}
    words |= {word for text in python_strings(taken) for word in text.split()}
    for code in codes(taken.prose) | words:
        match = _KEY.match(code)
        if match is None or match[2].rpartition(".")[2] in _FILES:
            continue
        section: type[Any] | None = Recipe
        for part in (match[1], *match[2].split(".")):
            if section is None:
                assert match[0].startswith("model.options."), f"{path}: {code}"
                break
            assert part in layers.field_types(section), f"{path}: {code}"
            section = layers.subsection(section, part)


@cache
def sentences() -> tuple[str, ...]:
    """Every text the program can say, with … for what is filled in."""
    found = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return tuple(found)


@OF_PAGES
def test_quoted_messages_are_said(path: Path, page: Callable[[Path], Any]) -> None:
    for message in page(path).messages:
        wanted = re.compile(".*".join([re.escape(part) for part in message.split("…")]), re.DOTALL)
        assert any(wanted.search(sentence) for sentence in sentences()), f"{path}: nothing says '{message}'"


@cache
def defined_in(path: Path) -> frozenset[str]:
    """Names of functions, classes, methods, attributes and constants of a file; methods also as ``Class.method``."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return frozenset(found)


def source(file: str) -> Path:
    """A file of the trainer, or of the package that its name begins with."""
    return ROOT / "src" / (file if file.startswith("paceline_") else f"paceline/{file}")


@pytest.mark.parametrize("page_name", ["tour.md", "glossary.md"])
def test_the_code_has_what_tour_and_glossary_point_to(page_name: str, page: Callable[[Path], Any]) -> None:
    text = page(ROOT / "docs" / page_name).prose
    for file in re.findall(r"`([\w/]+\.py)`", text):
        assert source(file).is_file(), file
    for file, names in re.findall(r"`([\w/]+\.py)`: ((?:`[\w.]+`(?:, | and )?)+)", text):
        for name in codes(names) - {code for code in codes(names) if code.endswith(".py")}:
            assert name in defined_in(source(file)), f"{file}: {name}"


def test_every_name_in_the_tour_exists(page: Callable[[Path], Any]) -> None:
    everything = frozenset().union(*(defined_in(path) for path in SOURCES))
    text = re.sub(r"\| .*", "", page(ROOT / "docs" / "tour.md").prose)
    names = {code for code in codes(text) if re.fullmatch(r"_?[A-Za-z]\w*(\.\w+)?", code) and not code.endswith(_FILES)}
    ordinary = {"auto", "paceline", "digits"}
    assert {name for name in names - ordinary if name not in everything} == set()


def test_the_run_directory_page_has_every_key(page: Callable[[Path], Any]) -> None:
    prose = page(ROOT / "docs" / "run-directory.md").prose
    said = codes(prose)
    for kind, heading in ((Plan, "## plan.json"), (Summary, "## summary.json")):
        part = prose.partition(f"\n{heading}\n")[2].partition("\n## ")[0]
        missing = {one.name for one in dataclasses.fields(kind)} - codes(part)
        assert not missing, f"{heading}: {sorted(missing)}"
    kinds: list[Any] = [LedgerFacts, *events.Event.__subclasses__()]
    flattened = {"metrics", "inputs", "timings", "details"}
    for kind in kinds:
        keys = {one.name for one in dataclasses.fields(kind)}
        missing = keys - said - (flattened if issubclass(kind, events.Event) else set())
        assert not missing, f"{kind.__name__}: {sorted(missing)}"
    assert {each.kind for each in events.Event.__subclasses__()} <= said | {"step", "evaluation"}


def test_every_built_in_optimizer_is_explained() -> None:
    text = (ROOT / "docs" / "recipes.md").read_text()
    assert [name for name in RULES if f"| `optimizer.name={name}` |" not in text] == []


def test_the_recipe_reference_is_what_the_schema_says() -> None:
    words = [sys.executable, str(ROOT / "scripts" / "reference"), "--check"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["", "help all", *COMMANDS])
def test_every_command_explains_itself(name: str) -> None:
    words = ["-X", "importtime", "-m", "paceline", *name.split(), *["--help"] * (name != "help all")]
    own = {"PYTHONPATH": str(ROOT / "src"), "COLUMNS": "200", "XDG_CACHE_HOME": os.environ["XDG_CACHE_HOME"]}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, timeout=60, env=own)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"Usage: paceline {name.removeprefix('help all')}".rstrip())
    assert not re.search(r"\| +torch$", done.stderr, flags=re.MULTILINE), "help should not load torch"
    if not name:
        assert all(command in done.stdout for command in COMMANDS)
