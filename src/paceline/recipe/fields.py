"""Types of recipe fields: durations, times, `auto`, `off`, and options that apply only to some choices."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, dataclass_transform

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, PlainSerializer
from pydantic.dataclasses import dataclass as checked_dataclass

from paceline.parsing.plain_yaml import AmbiguousScalar, resolve_values, to_boolean
from paceline.parsing.units import DURATION_RULE, TIME_RULE, Duration, TimeSpan
from paceline.plugins.dataset_registry import DatasetNames
from paceline.plugins.registry import Kind, built_in

T = TypeVar("T")
Auto = Literal["auto"]


def parse_integer(value: object) -> object:
    """Return the integer that ``1_000`` or ``0x1F`` stands for, and any other value unchanged.

    Raises:
        ValueError: If it is written like ``010``, which some programs read as 8.
    """
    if isinstance(value, str) and re.fullmatch("[-+]?0[0-9_]+", value):
        raise ValueError(f"found {value}, but a number has no leading zeros: some programs read it as octal")
    if isinstance(value, AmbiguousScalar):
        with contextlib.suppress(ValueError):
            return int(value, 0)
    return value


def _number(value: object) -> object:
    if isinstance(value, bool):  # Python would treat True as 1
        raise ValueError(f"found {value}, but it must be a number")
    if isinstance(value, str) and re.fullmatch(r"[-+0-9._]*((?<![0-9])_|_(?![0-9]))[-+0-9._eE]*", value):
        raise ValueError(f"found {value}, but an underscore in a number must be between digits")
    return parse_integer(value)


_Number = BeforeValidator(_number)
# No count of a run comes close to this, and values computed from it fit into 64 bits.
_MAX_INT = 10**12
PositiveInt = Annotated[int, Field(gt=0, le=_MAX_INT, strict=True), BeforeValidator(parse_integer)]
# A mapping's key, which is always a string in JSON.
Epoch = Annotated[int, _Number, Field(gt=0, le=_MAX_INT)]
NonNegativeInt = Annotated[int, Field(ge=0, le=_MAX_INT, strict=True), BeforeValidator(parse_integer)]
# Height and width of images, whose memory grows with the square.
Pixels = Annotated[PositiveInt, Field(le=16_384)]
PositiveFloat = Annotated[float, _Number, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, _Number, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, _Number, Field(ge=0, le=1)]
OpenFraction = Annotated[float, _Number, Field(ge=0, lt=1)]
FiniteFloat = Annotated[float, _Number, Field(allow_inf_nan=False)]
Switch = Annotated[bool, BeforeValidator(to_boolean), Field(strict=True)]
LocalPath = Annotated[str, AfterValidator(os.path.expanduser)]
ByClass = Literal["balanced"] | dict[str, PositiveFloat]
"""A weight for each class, by its name."""


def _named_options(value: object) -> object:
    """Resolve the values of options; refuse names that no factory has, such as ``drop_rate:0.5`` without a space."""
    options = resolve_values(value)
    for name in map(str, options) if isinstance(options, dict) else ():
        if not name.isidentifier():
            start, colon, rest = name.partition(":")
            fix = f"write '{start}: {rest}', with a space" if colon and start.isidentifier() else "correct it"
            raise ValueError(f"found the option {name!r}, but a name is letters, digits and underscores: {fix}")
    return options


Options = Annotated[dict[str, Any], BeforeValidator(_named_options)]
"""Keyword arguments of a factory, of types that only it knows."""


def _to_interval(value: object) -> Duration | TimeSpan | str:
    if isinstance(value, Duration | TimeSpan) or value == "auto":
        return value
    for kind in (TimeSpan, Duration):
        with contextlib.suppress(ValueError):
            return kind.parse(value)
    raise ValueError(f"found {value!r}, but it must be auto, off, or one of these: {DURATION_RULE}; {TIME_RULE}")


def _parsed(kind: type[Duration | TimeSpan]) -> BeforeValidator:
    return BeforeValidator(lambda value: value if isinstance(value, kind) else kind.parse(value))


Length = Annotated[Duration, _parsed(Duration), PlainSerializer(str)]
Time = Annotated[TimeSpan, _parsed(TimeSpan), PlainSerializer(str)]
Interval = Annotated[Duration | TimeSpan | Auto, BeforeValidator(_to_interval), PlainSerializer(str)]
Off = BeforeValidator(lambda value: None if value == "off" or to_boolean(value) is False else value)
"""Annotates an optional field whose None is written ``off`` in a recipe."""


@dataclass(frozen=True)
class Applies:
    """Marks a field that has an effect only under some values of another field of its section.

    Attributes:
        to: Name of the deciding field.
        values: Its values under which the marked field has an effect.
        also_off: Whether the marked field is refused under other values even if it is off (``false``).
    """

    to: str
    values: Collection[object]
    also_off: bool = True

    def allow(self, choice: object) -> bool:
        """Whether the marked field has an effect under a choice; custom code may use every field."""
        return to_boolean(choice) in self.values or (isinstance(choice, str) and ":" in choice)


@dataclass(frozen=True)
class Needs:
    """Marks a field that has no effect unless something else is on; a field may have several such marks.

    On a section it refers to the section's ``name``.

    Attributes:
        any_of: Conditions, one of which must hold: a dotted key that is not off, zero or false; `KEY!=VALUE`; or a
            condition that the plan evaluates, by its name there (``warm-up``).
        reason: What is missing, for the message; the plan fills in ``{words}``.
        also_off: Whether to report this also for a value that requests nothing (``off``, ``auto``, ``false``).
    """

    any_of: tuple[str, ...]
    reason: str
    also_off: bool = False


@dataclass(frozen=True)
class Names:
    """Marks a text field that holds a registered name.

    Attributes:
        kind: The kind in the registry.
        others: Names that are not registered.
    """

    kind: Kind
    others: tuple[str, ...] = ()

    @property
    def values(self) -> Collection[str]:
        """The built-in names, in the order in which they are suggested."""
        return DatasetNames() if self.kind == "datasets" else (*self.others, *built_in(self.kind))


@dataclass(frozen=True)
class Belongs:
    """Marks a field whose value is meant for one choice of another field, and is dropped if that changes.

    Attributes:
        to: Name of the deciding field.
    """

    to: str


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field, Field))
def section(kind: type[T]) -> type[T]:
    """Make a class a section of the recipe: unknown keys are refused, and `2019` is text where text is expected."""
    config = ConfigDict(extra="forbid", coerce_numbers_to_str=True)
    return checked_dataclass(frozen=True, kw_only=True, config=config)(kind)  # type: ignore[return-value]  # still T


def plain(value: Any) -> Any:
    """Convert a validated value to YAML and JSON types; None (an option that is off) becomes ``off``."""
    match value:
        case None:
            return "off"
        case Duration() | TimeSpan():
            return str(value)
        case tuple() | list():
            return [plain(item) for item in value]
        case dict():
            # Custom options are accepted unchanged.
            holds_sections = any(map(dataclasses.is_dataclass, value.values()))
            return {key: plain(item) for key, item in value.items()} if holds_sections else value
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value
