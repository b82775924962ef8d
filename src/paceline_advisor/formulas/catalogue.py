"""The catalogue of formulas, and their computation from typed arguments.

A public function of :func:`modules` is available by name if its docstring names its source, and if its arguments are
plain numbers or words. So is each row of the tables in ``published.md``. A new one needs no registration.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import math
import pkgutil
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from functools import cache
from importlib import resources
from operator import attrgetter
from statistics import fmean
from types import ModuleType
from typing import Any, Literal

import paceline_advisor.formulas
from paceline.command import Log
from paceline.errors import PacelineError, did_you_mean
from paceline.metrics import critical_batch
from paceline.models import roofline
from paceline.pages.shown import Shown
from paceline_advisor import Json, frozen, picked
from paceline_advisor.commands import Formulas

_SOURCE = "Source:"
_ROW = re.compile(r"\| `(\w+)(\(.*?\))` \| `(.*?)` \| (.*?) \| (.*) \|")
_COUNT_NAMES = (
    "batch global_batch_size micro_batch_size micro_batch accumulation_steps reference_batch small_batch large_batch "
    "devices processes nodes devices_per_node machines tensor_parallel multiprocessors tiles_at_once tile_m tile_n "
    "kernel stride dilation groups"
)
# Arguments with these names are counts of at least one, in every formula.
_COUNTS = frozenset(_COUNT_NAMES.split())
_AMOUNT_NAMES = "parameters tokens samples epochs layers heads hidden sequence vocabulary flops states m n k"
# Amounts, which may be zero but not negative.
_AMOUNTS = frozenset(_AMOUNT_NAMES.split())
_UNITS_OF_AMOUNTS = ("bytes", "bytes_moved", "bytes_per_element", "seconds", "per_second", "minutes", "price_per_hour")
_SWITCH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


@frozen
class Formula:
    """One formula: a function with its description.

    Attributes:
        name: The function's name.
        topic: Name of its module, without the package.
        summary: First paragraph of its docstring: the quantity that it computes.
        source: The publication that it is taken from.
        needs: Required arguments.
        defaults: Defaults of the other arguments.
        function: The function itself.
    """

    name: str
    topic: str
    summary: str
    source: str
    needs: tuple[str, ...]
    defaults: Mapping[str, Any]
    function: Callable[..., Any]

    def describe(self) -> Json:
        """Return everything but the function, as JSON values."""
        return {"formula": self.name, **picked(self, "topic", "summary", "source", "needs", "defaults")}

    def compute(self, typed: Sequence[str]) -> tuple[Json, Any]:
        """Return the arguments used and the value.

        Args:
            typed: ``name=value`` words; several values of one argument are separated by commas.

        Raises:
            PacelineError: If an argument is missing, unknown or of the wrong kind, or if the formula is undefined for
                them.
        """
        given = self._read(typed)
        missing = [name for name in self.needs if name not in given]
        if missing:
            raise PacelineError(
                f"{self.name} needs {_listed(missing)}: paceline formulas {self.name} "
                f"{' '.join(f'{name}=…' for name in self.needs)}"
            )
        arguments = {name: given.get(name, self.defaults.get(name)) for name in (*self.needs, *self.defaults)}
        try:
            value = self.function(**arguments)
        except (ValueError, ZeroDivisionError, OverflowError) as error:
            raise PacelineError(f"{self.name} has no value for {_spelled(arguments)}: {error}.") from None
        if isinstance(value, float) and not math.isfinite(value):
            raise PacelineError(f"{self.name} has no value for {_spelled(arguments)}: the result is too large.")
        if is_dataclass(value) and not isinstance(value, type):
            return arguments, asdict(value)
        return arguments, list(value) if isinstance(value, tuple) else value

    def _read(self, typed: Sequence[str]) -> Json:
        hints = typing.get_type_hints(self.function)
        known = (*self.needs, *self.defaults)
        given: Json = {}
        for word in typed:
            name, equals, text = word.partition("=")
            if not equals:
                shown = " ".join(f"{each}=…" for each in known)
                raise PacelineError(f"'{word}': arguments are written NAME=VALUE, here {shown}.")
            if name not in known:
                raise PacelineError(
                    f"{self.name} has no argument '{name}'.{did_you_mean(name, known)} It takes {_listed(known)}."
                )
            if name in given:
                raise PacelineError(f"{name} is given twice; leave one out.")
            given[name] = _value(name, text, hints[name])
        return given


@dataclass(frozen=True)
class LookedUp:
    """The output of `paceline formulas`.

    Attributes:
        known: All formulas, or the one named.
        used: The arguments of the computed formula; None if none was computed.
        value: Its value.
    """

    known: tuple[Formula, ...]
    used: Mapping[str, Any] | None = None
    value: Any = None

    def to_json(self) -> Mapping[str, Any] | Sequence[Any]:
        """Return a list of all formulas, or the named one, with its value if it was computed."""
        if len(self.known) > 1:
            return [each.describe() for each in self.known]
        computed = {} if self.used is None else {"arguments": self.used, "value": self.value}
        return {**self.known[0].describe(), **computed}

    def __paceline__(self) -> Shown:
        """Show all formulas by topic, or the description or value of one."""
        first = self.known[0]
        if self.used is not None:
            given = ", ".join(f"{key}={_written(each)}" for key, each in self.used.items())
            return Shown(title=f"{first.name}({given})", blocks=[f"  = {_written(self.value)}"])
        if len(self.known) == 1:
            needs: Json = dict.fromkeys(first.needs, "must be given")
            defaults = {key: f"{_written(value)} by default" for key, value in first.defaults.items()}
            return Shown(title=first.summary, blocks=["", {**needs, **defaults}, f"\nSource: {first.source}"])
        lines = []
        for topic, members in itertools.groupby(self.known, key=attrgetter("topic")):
            lines.append(f"\n{topic}")
            for each in members:
                lines += [f"  {each.name}", f"      {each.summary}", f"      [{each.source}]"]
        return Shown(title="Formulas, by topic", blocks=lines)


def look_up(options: Formulas, _: Log) -> LookedUp:
    """List all formulas, describe one, or compute it.

    Raises:
        PacelineError: If there is no such formula, or it is undefined for the arguments.
    """
    if options.name is None:
        return LookedUp(tuple(formulas().values()))
    formula = find_formula(options.name)
    if formula.needs and not options.arguments:
        return LookedUp((formula,))
    return LookedUp((formula,), *formula.compute(options.arguments))


def _written(value: Any) -> str:
    match value:
        case bool() | str():
            return str(value).lower()
        case float():
            # An interval may be unbounded at one end.
            return f"{value:.6g}" if not 1e15 <= abs(value) < math.inf or value != int(value) else f"{value:.6e}"
        case list() | tuple():
            return f"({', '.join(map(_written, value))})"
        case dict():
            return ", ".join(f"{key} {_written(each)}" for key, each in value.items())
    return str(value)


def formulas() -> dict[str, Formula]:
    """Return all formulas by name: by topic and, of a topic, those of its module before those of its table."""
    found = [each for module in modules() for each in _formulas_of(module)]
    return {each.name: each for each in sorted([*found, *published()], key=attrgetter("topic"))}


def modules() -> list[ModuleType]:
    """Return the modules with formulas; two of them are in the ``paceline`` package, which needs them for training."""
    here = paceline_advisor.formulas
    topics = [each.name for each in pkgutil.iter_modules(here.__path__) if each.name != "catalogue"]
    return [critical_batch, roofline, *(importlib.import_module(f"{here.__name__}.{topic}") for topic in topics)]


@cache
def published() -> tuple[Formula, ...]:
    """Return the formulas of the tables. A value may use ``math``, ``fmean`` and all other formulas."""
    words = {"Literal": Literal, "Sequence": Sequence, "fmean": fmean}
    space = {**vars(math), **words, **{name: each for m in modules() for name, each in vars(m).items()}}
    found, topic = [], ""
    text = resources.files(paceline_advisor.formulas).joinpath("published.md").read_text(encoding="utf-8")
    for line in text.splitlines():
        if line.startswith("## "):
            topic = line[3:]
        if row := _ROW.fullmatch(line):
            name, arguments, value, summary, source = (cell.replace(r"\|", "|") for cell in row.groups())
            exec(f"def {name}{arguments}: return {value}", space)  # the table belongs to this package
            found.append(_formula(space[name], topic, summary, source))
    return tuple(found)


def find_formula(name: str) -> Formula:
    """Return the formula of this name, also written with dashes, or as ``topic.name``.

    Raises:
        PacelineError: If there is no such formula.
    """
    known = formulas()
    topic, _, plain = name.replace("-", "_").rpartition(".")
    found = known.get(plain)
    if found is None or topic not in ("", found.topic):
        raise PacelineError(
            f"there is no formula '{name}'.{did_you_mean(plain, known)} See `paceline formulas` for all of them."
        )
    return found


def _formulas_of(module: ModuleType) -> list[Formula]:
    found = []
    for name, function in vars(module).items():
        if name.startswith("_") or not inspect.isfunction(function) or function.__module__ != module.__name__:
            continue
        text = inspect.getdoc(function) or ""
        hints = {key: hint for key, hint in typing.get_type_hints(function).items() if key != "return"}
        if _SOURCE in text and all(map(_is_plain, hints.values())):
            summary, source = text.split("\n\n", 1)[0], text.partition(_SOURCE)[2]
            topic = module.__name__.rpartition(".")[2]
            found.append(_formula(function, topic, " ".join(summary.split()), " ".join(source.split())))
    return found


def _formula(function: Callable[..., Any], topic: str, summary: str, source: str) -> Formula:
    parameters = inspect.signature(function).parameters.values()
    defaults = {each.name: each.default for each in parameters if each.default is not inspect.Parameter.empty}
    return Formula(
        name=function.__name__,
        topic=topic,
        summary=summary,
        source=source,
        needs=tuple(each.name for each in parameters if each.name not in defaults),
        defaults=defaults,
        function=function,
    )


def _is_plain(hint: Any) -> bool:
    kind = typing.get_origin(hint)
    if kind is Sequence:
        return typing.get_args(hint)[0] in (int, float)
    return hint in (int, float, bool, str) or kind is Literal


def _value(name: str, text: str, hint: Any) -> Any:
    """Parse a value of one kind.

    Raises:
        PacelineError: If it is not of that kind.
    """
    if typing.get_origin(hint) is Sequence:
        kind = typing.get_args(hint)[0]
        return tuple(_number(name, each, kind) for each in text.split(",") if each.strip())
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        if text not in choices:
            raise PacelineError(f"{name}={text}: give {_listed(choices, 'or')}.{did_you_mean(text, choices)}")
        return text
    if hint is bool:
        if text.lower() not in _SWITCH:
            raise PacelineError(f"{name}={text}: give true or false.")
        return _SWITCH[text.lower()]
    return text if hint is str else _number(name, text, hint)


def _number(name: str, text: str, kind: type) -> int | float:
    """Parse a number.

    Raises:
        PacelineError: If it is not a number, not finite, or not allowed for an argument of this name.
    """
    wanted = "number" if kind is float else "whole number"
    try:
        value = float(text.replace("_", ""))
    except ValueError:
        raise PacelineError(f"{name}={text}: '{text}' is not a number; give a {wanted}.") from None
    if not math.isfinite(value):
        raise PacelineError(f"{name}={text}: '{text}' is not a finite number; give a {wanted}.")
    if name in _COUNTS and value < 1:
        raise PacelineError(f"{name}={text}: give a {wanted} of at least 1.")
    if value < 0 and (name in _AMOUNTS or name.endswith(_UNITS_OF_AMOUNTS)):
        raise PacelineError(f"{name}={text}: give a {wanted} of at least 0.")
    if kind is float:
        return value
    if value != int(value):
        raise PacelineError(f"{name}={text}: give a whole number.")
    return int(value)


def _listed(names: Sequence[str], word: str = "and") -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} {word} {names[-1]}"


def _spelled(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in arguments.items())
