"""What a recipe's keys mean, read from the schema's source: for `paceline explain` and the recipe reference."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.dataset_registry import DatasetsUsing
from paceline.optimizers import taking
from paceline.recipe.fields import plain

# The schema's own annotations are read as they stand; only Python's words are translated here.
WORDS = {"str": "text", "int": "whole number", "float": "number", "bool": "`true` or `false`"}
WORDS |= {"Duration": "duration", "TimeSpan": "time"}
SIGNS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
# Validators that say something about the value; all others only prepare it.
VALIDATORS = {"_each_once": "each once", "_ascending": "the smaller first"}


@dataclass(frozen=True, kw_only=True)
class Key:
    """A key of a recipe in words.

    Attributes:
        key: Its dotted name.
        section: The class of the section that it holds; empty if it holds a value.
        value: Which values it takes.
        default: Its default, as a recipe says it.
        used_with: The values of other keys with which it has an effect; empty if it always has one.
        meaning: What it is for.
    """

    key: str
    section: str = ""
    value: str = ""
    default: str = ""
    used_with: str
    meaning: str


@dataclass
class Entry:
    """One field: its annotation, default and the sentence under it."""

    name: str
    annotation: ast.expr
    default: ast.expr | None
    meaning: str


@dataclass
class Schema:
    """What the sources define: sections by class name, and names for types."""

    sections: dict[str, ast.ClassDef] = field(default_factory=dict)
    aliases: dict[str, ast.expr] = field(default_factory=dict)

    @classmethod
    def read(cls) -> Schema:
        """Collect the frozen sections and the type names of all files."""
        schema = cls()
        for path in sorted(Path(__file__).parent.glob("*.py")):
            for node in ast.parse(path.read_text(encoding="utf-8"), filename=str(path)).body:
                if isinstance(node, ast.ClassDef) and any("STRICT" in ast.unparse(d) for d in node.decorator_list):
                    schema.sections[node.name] = node
                elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    schema.aliases[node.targets[0].id] = node.value
        return schema

    def summary(self, section: str) -> str:
        """Return the first line of what a section says of itself."""
        return (ast.get_docstring(self.sections[section]) or "").splitlines()[0]

    def keys(self, section: str, path: str = "") -> Iterator[Key]:
        """Yield the keys of a section that stands at a path (``data.augment.``), in order."""
        for entry in self.entries(self.sections[section]):
            name, kind = f"{path}{entry.name}", entry.annotation
            used_with = self.applies(kind, path)
            base = kind.slice.elts[0] if used_with and isinstance(kind, ast.Subscript) else kind  # type: ignore[attr-defined]  # a tuple
            if isinstance(base, ast.Name) and base.id in self.sections:
                yield Key(
                    key=name, section=base.id, used_with=used_with, meaning=entry.meaning or self.summary(base.id)
                )
                continue
            if not entry.meaning:
                raise ValueError(f"{section}.{entry.name} has no text under it; say what it means.")
            value, default = self.words(kind), _default(entry.default)
            yield Key(key=name, value=value, default=default, used_with=used_with, meaning=entry.meaning)

    def entries(self, section: ast.ClassDef) -> Iterator[Entry]:
        """Yield a section's keys in order, with the text under each."""
        for node, after in zip(section.body, [*section.body[1:], None], strict=True):
            if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
                continue
            yield Entry(node.target.id, node.annotation, node.value, _text(after))

    def words(self, kind: ast.expr) -> str:
        """Say in words which values an annotation admits."""
        match kind:
            case ast.Name(id=name) if name in WORDS:
                return WORDS[name]
            case ast.Name(id=name) if name in self.aliases:
                return self.words(self.aliases[name])
            case ast.BinOp(left=left, right=right):
                return " or ".join(part for part in (self.words(left), self.words(right)) if part)
            case ast.Constant(value=None):
                return ""
            case ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[base, *notes])):
                return self._annotated(base, notes)
            case ast.Subscript(value=ast.Name(id="Literal"), slice=values):
                options = values.elts if isinstance(values, ast.Tuple) else [values]
                return _either([f"`{_constant(option)}`" for option in options])
            case ast.Subscript(value=ast.Name(id="tuple"), slice=ast.Tuple(elts=[item, ast.Constant(value=end)])):
                assert end is ...
                return f"list of: {self.words(item)}"
            case ast.Subscript(value=ast.Name(id="tuple"), slice=ast.Tuple(elts=items)):
                return f"list of {len(items)}: {self.words(items[0])}"
            case ast.Subscript(value=ast.Name(id="dict"), slice=ast.Tuple(elts=[_, item])):
                return f"mapping{self._keys(item)}"
        raise ValueError(f"there are no words for the type {ast.unparse(kind)}: add some to {__file__}.")

    def _keys(self, item: ast.expr) -> str:
        if not isinstance(item, ast.Name) or item.id not in self.sections:
            return ""
        entries = self.entries(self.sections[item.id])
        return f" to: {', '.join(f'`{entry.name}` ({self.words(entry.annotation)})' for entry in entries)}"

    def _annotated(self, base: ast.expr, notes: list[ast.expr]) -> str:
        said = self.words(base)
        for note in notes:
            match note:
                case ast.Name(id="Off"):
                    said += " or `off`"
                case ast.Call(func=ast.Name(id="Field"), keywords=bounds):
                    # A bound with a name is beyond what anyone would set.
                    signs = [
                        f"{SIGNS[bound.arg]} {ast.unparse(bound.value).replace(' ** ', '^')}"
                        for bound in bounds
                        if bound.arg in SIGNS and not isinstance(bound.value, ast.Name)
                    ]
                    more = " and ".join(signs)
                    said += f"{' and' if said[-1].isdigit() and more else ''} {more}".rstrip()
                case ast.Call(func=ast.Name(id="AfterValidator"), args=[ast.Name(id=name)]):
                    said += f", {VALIDATORS[name]}"
        return said

    def _resolved(self, node: ast.expr) -> ast.expr:
        return self.aliases.get(node.id, node) if isinstance(node, ast.Name) else node

    def applies(self, kind: ast.expr, path: str) -> str:
        """Say under which other key's values this one has an effect, and which other keys it needs."""
        found: list[str] = []
        if isinstance(kind, ast.Subscript) and isinstance(kind.slice, ast.Tuple):
            for note in map(self._resolved, kind.slice.elts):
                if isinstance(note, ast.Call) and ast.unparse(note.func) == "Needs":
                    keys = [key for key in ast.literal_eval(note.args[0]) if "." in key]
                    found += [" or ".join(f"`{key.replace('!=', '` other than `')}`" for key in keys)] if keys else []
                if isinstance(note, ast.Call) and ast.unparse(note.func) == "Applies":
                    to, values = (_values(self._resolved(argument)) for argument in note.args[:2])
                    more = "".join(f" or {keyword.arg.replace('_', ' ')}" for keyword in note.keywords if keyword.arg)
                    named = [f"`{str(plain(value)).lower()}`" for value in values]
                    found.append(f"`{path}{to}` = {_either(named)}{more}")
        return "; ".join(found)


def _values(node: ast.expr) -> Any:
    """Read a literal, or the names of the data sets or optimizers that use a key."""
    match node:
        case ast.Call(func=ast.Name(id="DatasetsUsing"), args=names):
            return tuple(DatasetsUsing(*map(ast.literal_eval, names)))
        case ast.Call(func=ast.Name(id="taking"), args=[key]):
            return taking(ast.literal_eval(key))
    return ast.literal_eval(node)


def _text(node: ast.stmt | None) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return " ".join(node.value.value.split())
    return ""


def _either(options: list[str]) -> str:
    return options[0] if len(options) == 1 else f"{', '.join(options[:-1])} or {options[-1]}"


def _constant(node: ast.expr) -> str:
    value = ast.literal_eval(node)
    return str(value).lower() if isinstance(value, bool) else "off" if value is None else str(value)


def _default(node: ast.expr | None) -> str:
    """Write a default as a recipe would say it."""
    match node:
        case None:
            return ""
        case ast.Constant():
            return ast.unparse(node) if isinstance(node.value, float) else _constant(node)
        case ast.Call(func=ast.Name(id="Duration" | "TimeSpan"), args=[amount, ast.Constant(value=str(unit))]):
            number = ast.unparse(amount)
            if unit == "percent":
                return f"{number}%"
            return f"{number} {unit.removesuffix('s') if number == '1' else unit}"
        case ast.Tuple(elts=items):
            return f"[{', '.join(_default(item) for item in items)}]"
        case ast.Call(func=ast.Name(id="Field")):
            return "{}"
    return ast.unparse(node)
