"""Which options does another trainer have, and what do the words after its name set them to?"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from paceline.errors import RecipeError, did_you_mean

Kind = Literal["switch", "int", "float", "text", "ints", "floats", "texts", "pairs", "text or none"]
"""How many words follow an option, and what they are: `pairs` are KEY=VALUE, `text or none` may have none."""

Place = Literal["mapped", "listed", "refused"]
"""`mapped`: keys of a recipe say the same. `listed`: it has no equivalent and needs none. `refused`: it would change
the result, and nothing here does that."""

_SEVERAL: tuple[Kind, ...] = ("ints", "floats", "texts", "pairs")
_IN_FILES: dict[str, tuple[str, tuple[type, ...]]] = {
    "switch": ("true or false", (bool,)),
    "int": ("a whole number", (int, float)),
    "float": ("a number", (int, float)),
    "text": ("text", (str,)),
    "text or none": ("text", (str,)),
    "pair": ("names with values", (dict,)),
}
_NUMBER = re.compile(r"-(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?$")
_UNSAID = "$"  # begins what a shell would fill in


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option of another trainer.

    Attributes:
        names: As it is typed, with its dashes; a positional argument has none.
        kind: What follows it.
        default: Its value where it is not given.
        place: What becomes of it where it is given.
        says: Of a mapped one our keys, else why it has none; a sentence's part.
        bare: Its value where it is given without one.
    """

    names: tuple[str, ...]
    kind: Kind
    default: Any
    place: Place
    says: str
    bare: Any = None

    @property
    def shown(self) -> str:
        """Its longest-known name."""
        return next((name for name in self.names if name.startswith("--")), self.names[0])

    @property
    def key(self) -> str:
        """What it is called in a file of arguments."""
        return self.shown.lstrip("-").replace("-", "_")


def options(place: Place, rows: Iterable[tuple[str, Kind, Any, str]]) -> tuple[Option, ...]:
    """Rows of a table as options; names are separated by blanks."""
    return tuple(
        Option(names=tuple(names.split()), kind=kind, default=default, place=place, says=says)
        for names, kind, default, says in rows
    )


@dataclass(frozen=True)
class Given:
    """What a command or a file of arguments sets.

    Attributes:
        values: Every option's value by its key, defaults included.
        given: The keys that were set, in their order.
    """

    values: Mapping[str, Any]
    given: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """All options of a trainer.

    Attributes:
        program: Its name, for messages.
        options: Its options.
    """

    program: str
    options: tuple[Option, ...]

    def by_key(self) -> dict[str, Option]:
        """Every option by what it is called in a file of arguments."""
        return {option.key: option for option in self.options}

    def find(self, name: str) -> Option | None:
        """The option of a name, with or without its dashes, or None."""
        spelled = name.lstrip("-").replace("-", "_")
        for option in self.options:
            if any(spelled == known.lstrip("-").replace("-", "_") for known in option.names):
                return option
        return None

    def read_words(self, words: Sequence[str], defaults: Mapping[str, Any] | None = None) -> Given:
        """Read a command's words after the program's name, as argparse does: also `--name=value`, `-b128`, beginnings.

        Args:
            words: The words.
            defaults: Values of a file of arguments, or of a preset, that the words are laid over.

        Raises:
            RecipeError: Naming every word that is no option, or the first value that does not fit.
        """
        found: dict[str, Any] = {}
        unknown: list[str] = []
        positionals = [option for option in self.options if not option.shown.startswith("-")]
        rest = list(words)
        while rest:
            word = rest.pop(0)
            if word == "--":
                continue
            if not word.startswith("-") or _NUMBER.match(word):
                if not positionals:
                    unknown.append(word)
                    continue
                option = positionals.pop(0)
                found[option.key] = self._value(option, [word])
                continue
            named = self._named(word)
            if named is None:
                unknown.append(word)
                while rest and not rest[0].startswith("-"):  # its values, whatever they are
                    rest.pop(0)
                continue
            option, attached = named
            found[option.key] = self._value(option, _taken(option, attached, rest))
        if unknown:
            raise RecipeError(self._unknown(unknown))
        return self._given(found, defaults)

    def read_tree(self, tree: Mapping[str, Any], ignored: Iterable[str] = ()) -> Given:
        """Read a file of arguments: those count as given that are not the default.

        Args:
            tree: Keys and values.
            ignored: Keys that trainers write into such files and that are no options.

        Raises:
            RecipeError: Naming every key that is no option.
        """
        known = {str(key): self.find(str(key)) for key in tree if str(key) not in set(ignored)}
        unknown = [key for key, option in known.items() if option is None]
        if unknown:
            raise RecipeError(self._unknown(unknown))
        found = {option.key: tree[key] for key, option in known.items() if option is not None}
        by_key = self.by_key()
        checked = {key: self._checked(by_key[key], value) for key, value in found.items()}
        differing = {key: value for key, value in checked.items() if not _same(value, by_key[key].default)}
        return self._given(differing, None)

    def _given(self, found: Mapping[str, Any], defaults: Mapping[str, Any] | None) -> Given:
        below = dict(defaults or {})
        own = {option.key: option.default for option in self.options}
        return Given(own | below | dict(found), tuple(dict.fromkeys([*below, *found])))

    def _named(self, word: str) -> tuple[Option, str | None] | None:
        """The option that a word names, and the value that is attached to it."""
        name, equals, value = word.partition("=")
        exact = self._exactly(name)
        if exact is not None:
            return exact, value if equals else None
        if not word.startswith("--"):
            short = self._exactly(word[:2])
            return None if short is None else (short, word[2:].removeprefix("="))
        beginning = {
            option.key: option for option in self.options for each in option.names if each.startswith(name) and name[2:]
        }
        if len(beginning) != 1:
            return None
        return next(iter(beginning.values())), value if equals else None

    def _exactly(self, name: str) -> Option | None:
        return next((option for option in self.options if name in option.names and name.startswith("-")), None)

    def _unknown(self, words: Sequence[str]) -> str:
        names = [name for option in self.options for name in option.names]
        some = "; ".join(f"'{word}'{_unless_empty(did_you_mean(word, names))}" for word in words)
        if any(_UNSAID in word for word in words):
            return (
                f"found {some}, but what a shell fills in is not known here: write the command out, with numbers in "
                "the place of variables."
            )
        many = len(words) > 1
        return (
            f"{self.program} has no {'options' if many else 'option'} {some}: take {'them' if many else 'it'} out, or "
            "say what of ours it is in the recipe by hand."
        )

    def _value(self, option: Option, words: list[str]) -> Any:
        if option.kind == "switch":
            return True
        if option.kind == "text or none" and not words:
            return option.bare
        if not words:
            raise RecipeError(f"{option.shown} of {self.program} is given without a value; give it one.")
        if option.place != "listed" and any(_UNSAID in word for word in words):
            raise RecipeError(
                f"found {option.shown} {' '.join(words)}, but what a shell fills in is not known here: write its value."
            )
        if option.kind == "pairs":
            return dict(_pair(option, word) for word in words)
        read = [self._one(option, word) for word in words]
        return read if option.kind in _SEVERAL else read[0]

    def _one(self, option: Option, word: str) -> Any:
        base = option.kind.removesuffix("s")
        if base not in ("int", "float"):
            return word
        try:
            number = float(word)
        except ValueError:
            number = math.nan
        if not math.isfinite(number) or (base == "int" and not number.is_integer()):
            what = "a whole number" if base == "int" else "a number"
            raise RecipeError(f"found {option.shown} {word}, but {self.program} takes {what} there.")
        return int(number) if base == "int" else number

    def _checked(self, option: Option, value: Any) -> Any:
        """A value of a file, as its option has it."""
        if value is None and (option.default in (None, "") or option.kind in _SEVERAL):
            return {} if option.kind == "pairs" else [] if option.default else option.default
        wanted, kinds = _IN_FILES[option.kind.removesuffix("s") if option.kind in _SEVERAL else option.kind]
        several = list(value) if option.kind in _SEVERAL and isinstance(value, list | tuple) else [value]
        if any(not isinstance(each, kinds) or (isinstance(each, bool) and bool not in kinds) for each in several):
            raise RecipeError(f"found {option.key}: {value!r}, but {self.program} takes {wanted} there.")
        if option.kind in ("switch", "text", "text or none", "pairs"):
            return value
        read = [self._one(option, str(each)) for each in several]
        return read if option.kind in _SEVERAL else read[0]


def _taken(option: Option, attached: str | None, rest: list[str]) -> list[str]:
    """The words that belong to an option; they are taken off those that follow."""
    if attached is not None:
        return [attached]
    if option.kind == "switch":
        return []
    taken: list[str] = []
    while rest and (not rest[0].startswith("-") or rest[0] == "-" or _NUMBER.match(rest[0])):
        taken.append(rest.pop(0))
        if option.kind not in _SEVERAL:
            break
    return taken


def _pair(option: Option, word: str) -> tuple[str, Any]:
    key, equals, text = word.partition("=")
    if not equals or not key:
        raise RecipeError(f"found {option.shown} {word}, but it takes KEY=VALUE.")
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return key, text
    return key, list(value) if isinstance(value, tuple) else value


def _same(value: Any, default: Any) -> bool:
    as_list = [list(each) if isinstance(each, tuple) else each for each in (value, default)]
    empty: tuple[object, ...] = (None, "", [], {})
    return bool(as_list[0] == as_list[1]) or (as_list[0] in empty and as_list[1] in empty)


def _unless_empty(hint: str) -> str:
    return f" ({hint.strip()})" if hint.strip() else ""
