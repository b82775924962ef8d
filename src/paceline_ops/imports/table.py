"""Options of another trainer: a table of them, and parsers for command words and files of arguments.

A table is a YAML file, `NAMES: {KIND: DEFAULT, ...}` for each option. One of these says how it is converted:

    key: KEYS         the recipe's KEYS get its value, or its default
    if_changed: KEYS  the same, if its value is not the default
    if_given: KEYS    the same, if it was given: changes speed, place or records, but no result
    rule: KEYS        converted with another option; KEYS is for the reader
    no_effect: WHY    has no equivalent and needs none
    unsupported: WHY  would change the result, and nothing here does that

Further fields: `values` maps its values to Paceline's, to several keys with values, or to nothing; other values are
unsupported, for the reason `instead`. `conversion` names a function of the importer that returns the same, and
`network_default` names the importer's value for an option without a value. `sources` lists other options that its keys
also come from, if given; `also` lists additional keys that it sets; `note` is for the recipe's reader. `needs` and
`unless` are conditions, without or with which it has no effect, on other options or on the keys of the rows above:
`amp`, `schedule.name=step`, alternatives with `|`, several with blanks. `differs` describes what is not identical,
`least` is the smallest allowed number, `bare` its value if given without one.
"""

from __future__ import annotations

import argparse
import ast
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args

import yaml

from paceline.errors import RecipeError, did_you_mean
from paceline.parsing.files import refuse_special_inputs
from paceline.parsing.plain_yaml import BoundedLoader

Fate = Literal["key", "if_changed", "if_given", "rule", "no_effect", "unsupported"]
_SEVERAL = ("ints", "floats", "texts", "pairs")
NONE: tuple[object, ...] = (None, "", [], {})
"""Values of an option that has none."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """One row of a table: see the module's docstring.

    Attributes:
        names: As typed, with dashes; a positional argument has none.
        kind: switch, int, float, text, text_or_bare, or several of them: ints, floats, texts, pairs (KEY=VALUE).
        default: Value if it is not given.
        fate: How it is converted.
        target: The recipe's key, or the reason.
    """

    names: tuple[str, ...]
    kind: str
    default: Any
    fate: Fate
    target: str
    values: Mapping[Any, Any] | None = None
    instead: str = ""
    sources: str = ""
    also: Mapping[str, Any] = field(default_factory=dict)
    conversion: str = ""
    network_default: str = ""
    note: str = ""
    differs: str = ""
    needs: str = ""
    unless: str = ""
    least: float = -math.inf
    bare: str | None = None

    @property
    def display_name(self) -> str:
        """Its first long name."""
        return next((name for name in self.names if name.startswith("--")), self.names[0])

    @property
    def key(self) -> str:
        """Its name in a file of arguments."""
        return _plain(self.display_name)

    @property
    def is_positional(self) -> bool:
        """Whether it is positional, without a name."""
        return not self.display_name.startswith("-")

    def map_value(self, value: Any) -> Any:
        """Return the entry of `values`, if there are any, for a value; case and underscores are ignored in texts.

        Raises:
            ValueError: If there is no entry.
        """
        if self.values is None:
            return value
        normalized = value.lower().replace("_", "") if isinstance(value, str) else value
        for key in (value, normalized):
            if key in self.values:
                return self.values[key]
        raise ValueError(self.instead or f"supported: {', '.join(str(each) for each in self.values if each)}")

    def read(self, word: str) -> Any:
        """Parse the value of one word.

        Raises:
            argparse.ArgumentTypeError: If it does not have the option's kind.
        """
        if "$" in word and self.fate != "no_effect":
            raise argparse.ArgumentTypeError(f"found {word}, but shell variables are not known here; write the value")
        base = self.kind.removesuffix("s")
        if base == "pair":
            return _pair(word)
        if base not in ("int", "float"):
            return word
        try:
            number = float(word)
        except ValueError:
            number = math.nan
        if not math.isfinite(number) or (base == "int" and not number.is_integer()):
            rule = "a whole number" if base == "int" else "a number"
            raise argparse.ArgumentTypeError(f"found {word}, but it takes {rule}")
        if number < self.least:
            raise argparse.ArgumentTypeError(f"found {word}, but it must be at least {self.least}")
        return int(number) if base == "int" else number


class _Parser(argparse.ArgumentParser):
    """An argparse parser that raises errors, without a usage message or an exit."""

    def error(self, message: str) -> NoReturn:
        key = getattr(sys.exception(), "argument_name", None)
        raise RecipeError(f"{self.prog}: {message.removeprefix('argument ')}.", key=key)


class OptionTable:
    """The options of a program.

    Args:
        program: Its name, for messages.
        file: The table's file, in this folder unless it is an absolute path.
        excluded: Keys of options to leave out.
    """

    def __init__(self, program: str, file: str | Path, excluded: Iterable[str] = ()) -> None:
        self.program = program
        rows = yaml.safe_load((Path(__file__).parent / file).read_text(encoding="utf-8"))
        options = (_option(names, row) for names, row in rows.items())
        self.options = {option.key: option for option in options if option.key not in set(excluded)}
        self._keys = {_plain(name): option.key for option in self.options.values() for name in option.names}

    def find(self, name: str) -> Option | None:
        """Return the option of a name, with or without its dashes, or None."""
        key = self._keys.get(_plain(name))
        return None if key is None else self.options[key]

    def read_words(self, words: Sequence[str]) -> dict[str, Any]:
        """Return the options set by the words of a command, by key; parsed with argparse.

        Raises:
            RecipeError: Naming every word that is not an option, or the first value that does not fit.
        """
        # With an explicit usage, argparse does not build one from all the options.
        parser = _Parser(prog=self.program, usage="", add_help=False, argument_default=argparse.SUPPRESS)
        for option in self.options.values():
            settings: dict[str, Any] = {"nargs": "*" if option.kind in _SEVERAL else None, "type": option.read}
            if option.kind == "switch":
                settings = {"action": "store_true"}
            elif option.kind == "text_or_bare":
                settings |= {"nargs": "?", "const": option.bare}
            if option.is_positional:
                parser.add_argument(option.key, nargs="?", type=option.read)
            else:
                parser.add_argument(*option.names, dest=option.key, **settings)
        namespace, extra = parser.parse_known_intermixed_args(list(words))
        self._refuse([word for word in extra if word.startswith("-")] or extra)
        given = {
            key: dict(each) if self.options[key].kind == "pairs" else each for key, each in vars(namespace).items()
        }
        return dict(sorted(given.items(), key=lambda item: not self.options[item[0]].is_positional))

    def read_tree(self, tree: Mapping[str, Any], ignored: Iterable[str] = ()) -> dict[str, Any]:
        """Return the options that a file of arguments sets to values other than their default, by key.

        Args:
            tree: Keys and values.
            ignored: Keys that trainers write into such files and that are not options.

        Raises:
            RecipeError: Naming every key that is not an option, or the first value that does not fit.
        """
        options = {key: self.find(key) for key in map(str, tree) if key not in set(ignored)}
        self._refuse([key for key, option in options.items() if option is None])
        pairs = [(option, tree[key]) for key, option in options.items() if option is not None]
        pairs.sort(key=lambda pair: pair[0].kind in _SEVERAL)  # otherwise it would consume a positional argument
        given = self.read_words([word for option, value in pairs for word in _as_words(option, value)])
        defaults = {key: self.options[key].default for key in given}
        return {
            key: value
            for key, value in given.items()
            if value != defaults[key] and not (value in NONE and defaults[key] in NONE)
        }

    def _refuse(self, words: Sequence[str]) -> None:
        """Refuse words that are not options."""
        if not words:
            return
        names = [name for option in self.options.values() for name in option.names]
        hints = [did_you_mean(word, names).strip() for word in words]
        listed = "; ".join(
            f"'{word}' ({hint})" if hint else f"'{word}'" for word, hint in zip(words, hints, strict=True)
        )
        if any("$" in word for word in words):
            message = f"found {listed}, but shell variables are not known here; write the command with values."
            raise RecipeError(message, value=words[0], rule="values")
        raise RecipeError(
            f"{self.program} has no {'options' if len(words) > 1 else 'option'} {listed}; remove it, and set our "
            "equivalent in the recipe.",
            key=words[0],
            rule="a known option",
        )


def read_yaml(path: Path, option: str = "") -> Mapping[str, Any]:
    """Read a file of names and values that an option names.

    Raises:
        RecipeError: If it is not such a file.
    """
    refuse_special_inputs(path)
    source = f"{option} {path}".strip()
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), Loader=BoundedLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        message = f"{source}: not readable as YAML: {' '.join(str(error).split())[:200]}"
        raise RecipeError(message, path=path, rule="YAML") from None
    if not isinstance(tree, dict):
        message = f"{source}: found no NAME: VALUE lines, but a file of arguments has one per line."
        raise RecipeError(message, path=path, rule="NAME: VALUE lines")
    return tree


def _option(names: str, row: Mapping[str, Any]) -> Option:
    fields = dict(row)
    kind = next(iter(fields))
    fate = next(name for name in get_args(Fate) if name in fields)
    default, target = fields.pop(kind), str(fields.pop(fate))
    return Option(names=tuple(names.split()), kind=kind, default=default, fate=fate, target=target, **fields)


def _plain(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def _pair(word: str) -> tuple[str, Any]:
    key, equals, text = word.partition("=")
    if not equals or not key.isidentifier():
        raise argparse.ArgumentTypeError(f"found {word}, but it takes KEY=VALUE")
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return key, text
    return key, list(value) if isinstance(value, tuple) else value


def _as_words(option: Option, value: Any) -> list[str]:
    """Format a value of a file of arguments as a user would type it."""
    if option.kind == "switch":
        if not isinstance(value, bool):
            raise _wrong(option, value, "true or false")
        return [option.display_name] if value else []
    if option.kind in _SEVERAL:
        pairs = [f"{key}={each!r}" for key, each in value.items()] if isinstance(value, dict) else None
        several = value if isinstance(value, list | tuple) else [] if value is None else [value]
        return [option.display_name, *(pairs if pairs is not None else map(str, several))]
    if value is None and option.default not in NONE:
        raise _wrong(option, value, "a value")
    if isinstance(value, dict | list):
        raise _wrong(option, value, "one value")
    return [] if value is None else [str(value) if option.is_positional else f"{option.display_name}={value}"]


def _wrong(option: Option, value: Any, rule: str) -> RecipeError:
    found = "null" if value is None else repr(value)
    return RecipeError(f"found {option.key}: {found}, but it takes {rule}.", key=option.key, value=value, rule=rule)
