"""The types recipe fields are made of: durations, times, `auto`, `off`, and options only some choices give effect."""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, PlainSerializer

from paceline.units import DURATION_RULE, TIME_RULE, Duration, TimeSpan

Auto = Literal["auto"]


def _no_switch(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError(f"found {value}, but it must be a number")
    return value


# Before the numbers below: a bare `yes` or `on` is a bool in YAML 1.1, and Python would take it for 1.
_Number = BeforeValidator(_no_switch)
PositiveInt = Annotated[int, Field(gt=0, strict=True)]
# A mapping's key, which JSON knows as text only.
Epoch = Annotated[int, _Number, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0, strict=True)]
PositiveFloat = Annotated[float, _Number, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, _Number, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, _Number, Field(ge=0, le=1)]
OpenFraction = Annotated[float, _Number, Field(ge=0, lt=1)]
FiniteFloat = Annotated[float, _Number, Field(allow_inf_nan=False)]
Switch = Annotated[bool, Field(strict=True)]


def _to_duration(value: object) -> Duration:
    return value if isinstance(value, Duration) else Duration.parse(value)


def _to_time(value: object) -> TimeSpan:
    return value if isinstance(value, TimeSpan) else TimeSpan.parse(value)


def _to_interval(value: object) -> Duration | TimeSpan | str:
    if isinstance(value, Duration | TimeSpan) or value == "auto":
        return value
    for kind in (TimeSpan, Duration):
        with contextlib.suppress(ValueError):
            return kind.parse(value)
    raise ValueError(f"found {value!r}, but it is auto, off, or one of two: {DURATION_RULE}; {TIME_RULE}")


def _off_to_none(value: object) -> object:
    # YAML 1.1 reads a bare `off` as False.
    return None if value is False or value == "off" else value


Length = Annotated[Duration, BeforeValidator(_to_duration), PlainSerializer(str)]
Time = Annotated[TimeSpan, BeforeValidator(_to_time), PlainSerializer(str)]
Interval = Annotated[Duration | TimeSpan | Auto, BeforeValidator(_to_interval), PlainSerializer(str)]
Off = BeforeValidator(_off_to_none)
"""Annotates an optional field whose None is written ``off`` in a recipe."""


@dataclass(frozen=True)
class Applies:
    """Marks a field that has an effect only under some values of another field of its section.

    Attributes:
        to: Name of the deciding field.
        values: Its values under which the marked field has an effect.
    """

    to: str
    values: tuple[object, ...]

    def allow(self, choice: object) -> bool:
        """Whether the marked field has an effect under a choice; code of one's own may use every field."""
        return choice in self.values or (isinstance(choice, str) and ":" in choice)


@dataclass(frozen=True)
class Names:
    """Marks a field of any text with the names that it may hold; without it they are those that other fields apply to.

    Attributes:
        values: The names, in the order they are offered in.
    """

    values: tuple[str, ...]


@dataclass(frozen=True)
class Belongs:
    """Marks a field whose value is meant for one choice of another field, and is dropped where a layer chooses anew.

    Attributes:
        to: Name of the deciding field.
    """

    to: str


# What every section is validated under: unknown keys are refused, and field docs stand below the fields.
STRICT: ConfigDict = ConfigDict(extra="forbid")


def _holds_sections(value: dict[Any, Any]) -> bool:
    # Options of the user's own are taken as they are.
    return any(map(dataclasses.is_dataclass, value.values()))


def plain(value: Any) -> Any:
    """Turn a validated value into what YAML and JSON can hold; None (an option that is off) becomes ``off``."""
    match value:
        case None:
            return "off"
        case Duration() | TimeSpan():
            return str(value)
        case tuple() | list():
            return [plain(item) for item in value]
        case dict():
            return {key: plain(item) for key, item in value.items()} if _holds_sections(value) else value
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value
