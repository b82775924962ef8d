"""Parse YAML from untrusted files: within limits, and with scalars kept as written."""

from __future__ import annotations

import contextlib
import math
import re
from typing import Any

import yaml

_MAX_CHARACTERS = 1_000_000
MAX_DEPTH = 50
_MAX_VALUES = 100_000
_MAX_DIGITS = 100

_CORE = "tag:yaml.org,2002:"
_AS_WRITTEN = "!as-written"
_READ_BY_VALUE = {f"{_CORE}{kind}" for kind in ("int", "float", "bool")}
_ALLOWED = _READ_BY_VALUE | {f"{_CORE}{kind}" for kind in ("str", "null", "seq", "map")} | {None, "!"}
_INTEGER = re.compile(r"0|-?[1-9][0-9]*")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|0o[0-7]+")
_TWO_READINGS = re.compile(r"[-+]?(0[0-9_]+|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?|\.(nan|NaN|NAN))")
_SWITCHES = {"on": True, "yes": True, "true": True, "off": False, "no": False, "false": False}


class AmbiguousScalar(str):
    """An unquoted scalar that programs read differently, such as ``1e3``, ``010`` or ``off``; its field decides."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)

    def resolve(self) -> object:
        """Return a value without a field that gives its type: a switch, a number or text.

        Raises:
            ValueError: If programs read it as different numbers.
        """
        if to_boolean(self) is not self:
            return to_boolean(self)
        if _TWO_READINGS.fullmatch(self):
            raise ValueError(f"found {self}, which YAML parsers read differently; write a plain number, or '{self}'")
        with contextlib.suppress(ValueError):
            return int(self, 0)
        try:
            number = float(self.lower().replace(".inf", "inf"))
        except ValueError:
            return str(self)
        if math.isinf(number) and "inf" not in self.lower():
            raise ValueError(f"found {self}, which is too large for a number")
        return number


def to_boolean(value: object) -> object:
    """Return the boolean that ``on``, ``off``, ``yes`` or ``no`` stands for, and any other value unchanged."""
    return _SWITCHES.get(value.lower(), value) if isinstance(value, AmbiguousScalar) else value


class BoundedLoader(yaml.SafeLoader):
    """YAML with limited nesting, numbers and aliases, with unique keys and without custom tags."""

    def __init__(self, text: str) -> None:
        if len(text) > _MAX_CHARACTERS:
            raise yaml.YAMLError(f"found {len(text):,} characters; {_MAX_CHARACTERS:,} is the limit.")
        super().__init__(text)
        self._depth = 0
        self._sizes: dict[yaml.Node, tuple[int, int]] = {}

    def check_printable(self, data: str) -> None:
        """Allow the bytes of file names that are not UTF-8, as Python writes them."""
        super().check_printable(re.sub("[\udc80-\udcff]", "", data))

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a node, and measure its size with aliases expanded."""
        event = self.peek_event()  # type: ignore[no-untyped-call]  # PyYAML's stub
        if getattr(event, "tag", None) not in _ALLOWED:
            raise _marked_error(f"the tag '{event.tag.replace(_CORE, '!!')}' is not supported; remove it", event)
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _marked_error(f"values are nested more than {MAX_DEPTH} deep", event)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if isinstance(event, yaml.AliasEvent):
            if node not in self._sizes:
                raise _marked_error(f"the alias '*{event.anchor}' contains itself", event)
            return node
        assert node is not None
        children: list[Any] = node.value if isinstance(node, yaml.CollectionNode) else []
        parts = [self._sizes[item[1] if isinstance(item, tuple) else item] for item in children]
        size, depth = 1 + sum(part[0] for part in parts), 1 + max((part[1] for part in parts), default=0)
        if size > _MAX_VALUES or depth > MAX_DEPTH:
            limit = f"{_MAX_VALUES:,} values" if size > _MAX_VALUES else f"{MAX_DEPTH} levels"
            raise _marked_error(f"there are more than {limit} after aliases are expanded", event)
        self._sizes[node] = size, depth
        return node

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        """Compose a scalar; ``!!float 1e-3`` is ``1e-3``."""
        event = self.peek_event()  # type: ignore[no-untyped-call]  # PyYAML's stub
        if event.tag in _READ_BY_VALUE:
            event.tag, event.implicit = None, (True, False)
        node = super().compose_scalar_node(anchor)
        if node.tag not in (f"{_CORE}str", f"{_CORE}null") and len(node.value) > _MAX_DIGITS:
            raise _marked_error(f"found a number of {len(node.value):,} digits; {_MAX_DIGITS} is the limit", event)
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Compose a mapping whose keys are names."""
        node = super().compose_mapping_node(anchor)
        names: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _marked_error("found a list or mapping as a key, but a key is a name", key)
            if key.value in names:
                raise _marked_error(f"key '{key.value}' appears twice; keep one", key)
            names.add(key.value)
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Expand the merge keys (``<<``) of a mapping."""
        for key, value in node.value:
            merged = value.value if isinstance(value, yaml.SequenceNode) else [value]
            if key.tag == f"{_CORE}merge" and not all(isinstance(each, yaml.MappingNode) for each in merged):
                raise _marked_error("'<<' merges a mapping, or a list of mappings", value)
        super().flatten_mapping(node)


class PlainLoader(BoundedLoader):
    """YAML in which a scalar is an integer, true, false or null only if every program agrees.

    Numbers of other forms and switches are :class:`AmbiguousScalar`, and everything else is text. Keys are text as
    written.
    """

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: tuple[bool, bool]) -> str:
        """Return the tag of a node without one."""
        tag: str = super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]  # PyYAML's stub
        if kind is not yaml.ScalarNode or not implicit[0] or tag in (f"{_CORE}null", f"{_CORE}merge"):
            return tag
        if _INTEGER.fullmatch(value) or value.lower() in ("true", "false"):
            return tag
        return _AS_WRITTEN if tag != f"{_CORE}str" or _FLOAT.fullmatch(value) else tag

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Compose a mapping whose keys are text, as written."""
        node = super().compose_mapping_node(anchor)
        node.value = [(self._name(key), value) for key, value in node.value]
        return node

    def _name(self, key: yaml.ScalarNode) -> yaml.ScalarNode:
        if key.tag in (f"{_CORE}str", f"{_CORE}merge"):
            return key
        # Options may have numbers as keys; see `settled`.
        tag = _AS_WRITTEN if key.tag == f"{_CORE}int" else f"{_CORE}str"
        return yaml.ScalarNode(tag, key.value, key.start_mark, key.end_mark)


PlainLoader.add_constructor(_AS_WRITTEN, lambda _, node: AmbiguousScalar(node.value))


class PlainDumper(yaml.SafeDumper):
    """Writes YAML that :class:`PlainLoader` and any other program read alike: ambiguous text is quoted."""

    def analyze_scalar(self, scalar: str) -> Any:
        """Return the possible styles of a text; characters that are line breaks only in YAML 1.1 must be escaped."""
        analysis: Any = super().analyze_scalar(scalar)
        analysis.allow_single_quoted &= not re.search("[\x85\u2028\u2029]", scalar)
        return analysis


PlainDumper.add_implicit_resolver(f"{_CORE}float", re.compile(f"(?:{_FLOAT.pattern})$"), list("-+.0123456789"))


def _marked_error(problem: str, node: Any) -> yaml.MarkedYAMLError:
    """Return what is wrong with an event or a node."""
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


def load_plain(text: str) -> Any:
    """Read YAML with scalars as they were written.

    Raises:
        yaml.YAMLError: If it is not YAML, or exceeds the limits.
    """
    return yaml.load(text, Loader=PlainLoader)  # a SafeLoader


def load_whole(text: str) -> Any:
    """Read YAML as :func:`load_plain` does, but refuse comments, which it would drop.

    Raises:
        yaml.YAMLError: As :func:`load_plain`, or if there is a comment.
    """
    value = load_plain(text)
    scalars = [each for each in yaml.scan(text, BoundedLoader) if isinstance(each, yaml.ScalarToken)]
    for sign in re.finditer(r"(?<!\S)#", text):
        if not any(each.start_mark.index <= sign.start() < each.end_mark.index for each in scalars):
            raise yaml.YAMLError(
                "'#' at the start or after a space begins a comment, which would be dropped; put the value in quotes."
            )
    return value


def yaml_line(value: Any) -> str:
    """Return a value as YAML on one line."""
    text: str = yaml.dump(value, Dumper=PlainDumper, default_flow_style=True, width=10**6, allow_unicode=True)
    return text.removesuffix("...\n").rstrip("\n")


def resolve_values(value: Any) -> Any:
    """Return a value with every :class:`AmbiguousScalar` in it settled.

    Raises:
        ValueError: If one is ambiguous.
    """
    match value:
        case dict():
            return {
                int(key) if isinstance(key, AmbiguousScalar) else key: resolve_values(item)
                for key, item in value.items()
            }
        case list():
            return [resolve_values(item) for item in value]
        case AmbiguousScalar():
            return value.resolve()
    return value
