"""What becomes of each option of another trainer, and the recipe that comes of it all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from paceline.errors import RecipeError
from paceline.recipe.imports.options import Given, Option, Place, Table
from paceline.recipe.load import stored_recipe


@dataclass(frozen=True)
class Entry:
    """One option that was given, and what became of it."""

    option: str
    value: Any
    place: Place
    says: str


@dataclass(frozen=True)
class Difference:
    """Where the recipe does nearly what an option asks for, and what is not the same."""

    option: str
    says: str


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """A recipe, and an account of every option that it comes from.

    Attributes:
        title: What was converted.
        processes: Over how many processes the global batch is taken.
        tree: The recipe's sections.
        origins: Where each dotted key's value came from.
        entries: Every option that was given, once.
        differences: What is not quite the same.
        left_out: Options that the user had left out.
        notices: What was assumed.
    """

    title: str
    processes: int
    tree: Mapping[str, Any]
    origins: Mapping[str, str]
    entries: tuple[Entry, ...]
    differences: tuple[Difference, ...]
    left_out: tuple[str, ...]
    notices: tuple[str, ...]

    @property
    def refused(self) -> tuple[Entry, ...]:
        """What would change the result and is not here."""
        return tuple(each for each in self.entries if each.place == "refused")

    def to_json(self) -> dict[str, Any]:
        """The whole account."""
        places: tuple[Place, ...] = ("mapped", "listed", "refused")
        shown: dict[str, Any] = {
            place: [{"option": e.option, "value": e.value, "says": e.says} for e in self.entries if e.place == place]
            for place in places
        }
        return {
            "source": self.title,
            "processes": self.processes,
            "recipe": self.tree,
            "origins": dict(self.origins),
            **shown,
            "differences": [{"option": each.option, "says": each.says} for each in self.differences],
            "left_out": list(self.left_out),
            "notices": list(self.notices),
        }

    def to_yaml(self) -> str:
        """The recipe as a file: every value with where it came from."""
        head = [f"Converted from: {' '.join(self.title.split())}", f"Processes: {self.processes}", ""]
        head += [f"Nearly: {each.option}: {each.says}" for each in self.differences]
        head += [f"Left out: {name}" for name in self.left_out]
        head += [f"Note: {each}" for each in self.notices]
        lines = [f"# {line}".rstrip() for line in _wrapped(head)]
        return "\n".join([*lines, *_rows(self.tree, self.origins, "")]) + "\n"


class Draft:
    """A recipe in the making, from the options that were given.

    Args:
        table: The trainer's options.
        given: Their values.
        skipped: Keys of options to treat as if they had not been given.
    """

    def __init__(self, table: Table, given: Given, skipped: Iterable[str] = ()) -> None:
        self._options = table.by_key()
        self._skipped = tuple(key for key in given.given if key in set(skipped))
        own = {key: self._options[key].default for key in self._skipped}
        self._values = {**given.values, **own}
        self._given = tuple(key for key in given.given if key not in self._skipped)
        self._flat: dict[str, Any] = {}
        self._origins: dict[str, str] = {}
        self._became: dict[str, tuple[Place, str]] = {}
        self._differences: dict[tuple[str, str], Difference] = {}
        self.notices: list[str] = []

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def is_given(self, key: str) -> bool:
        """Whether an option was given."""
        return key in self._given

    def assume_one_process(self, otherwise: str) -> None:
        """Say that the number of processes is not known, and what depends on it."""
        self.notices.append(
            f"it is not said how many processes train: one is assumed. With more of them {otherwise}: "
            "give --processes N."
        )

    def check_least(self, least: Mapping[str, int]) -> None:
        """See whether the numbers that others are worked out from are large enough.

        Raises:
            RecipeError: Naming the first that is not.
        """
        for key, lowest in least.items():
            if self._values[key] is None or self._values[key] < lowest:
                shown = f"{self._options[key].shown} {shown_value(self._values[key])}"
                raise RecipeError(f"found {shown}, but it is at least {lowest}.")

    def put(self, dotted: str, value: Any, *sources: str, note: str = "") -> None:
        """Set a key of the recipe from the options named.

        Args:
            dotted: The key.
            value: Its value.
            sources: The options' keys it comes from.
            note: What to say beside it, in place of their values.
        """
        self._flat[dotted] = value
        said = [self._said(key) for key in sources]
        origin = "; ".join(part for part in (" ".join(dict.fromkeys(said)), note) if part)
        self._origins[dotted] = " ".join(origin.split())  # it becomes a comment, which ends with its line
        for key in sources:
            place, says = self._became.get(key, ("mapped", ""))
            if place == "mapped" and dotted not in says.split(", "):
                self._became[key] = ("mapped", f"{says}, {dotted}" if says else dotted)

    def end_in_warmup(self, end: str, warmup: str) -> None:
        """Tell of a run that ends before its peak rate, and how the recipe says so."""
        self.notices.append(
            f"the run ends after {end}, while it warms up for {warmup}, and never reaches its peak rate: "
            f"train.duration is the whole warm-up, and train.until={end} ends it"
        )

    def switch(self, dotted: str, *sources: str, on: bool = True, note: str = "") -> None:
        """Turn a key of the recipe on or off."""
        self.put(dotted, on, *sources, note=note)

    def so_far(self, dotted: str) -> Any:
        """The value that a key has been set to."""
        return self._flat[dotted]

    def put_given(self, dotted: str, value: Any, source: str, note: str = "") -> None:
        """The same, if the option was given: for what changes speed, place or records, and no result."""
        if self.is_given(source):
            self.put(dotted, value, source, note=note)

    def option(self, key: str, name: str, value: Any, note: str = "") -> None:
        """Hand a keyword to the network's factory."""
        self.put("model.options", {**self._flat.get("model.options", {}), name: value}, key, note=note)
        kept = self._origins.pop("model.options")
        self._origins[f"model.options.{name}"] = kept

    def nearly(self, key: str, says: str) -> None:
        """Say what is not the same as an option asks for."""
        shown = self._options[key].shown
        self._differences[shown, says] = Difference(shown, says)

    def use(self, key: str, says: str) -> None:
        """Say where an option went that no key of its own stands for."""
        self._became.setdefault(key, ("mapped", says))

    def idle(self, key: str, says: str) -> None:
        """Say that an option has no effect beside the others."""
        self._became.setdefault(key, ("listed", f"without effect: {says}"))

    def refuse(self, key: str, says: str) -> None:
        """Say that an option would change the result, and that nothing here does it."""
        self._became[key] = ("refused", says)

    def finish(self, title: str, processes: int) -> Conversion:
        """The recipe and the account.

        Raises:
            RecipeError: If what was put together is no recipe.
        """
        tree = _nested(self._flat)
        entries = tuple(self._entry(key) for key in self._given)
        if not any(entry.place == "refused" for entry in entries):
            stored_recipe(tree, "what the options come to")
        return Conversion(
            title=title,
            processes=processes,
            tree=tree,
            origins=self._origins,
            entries=entries,
            differences=tuple(self._differences.values()),
            left_out=tuple(self._options[key].shown for key in self._skipped),
            notices=tuple(self.notices),
        )

    def _entry(self, key: str) -> Entry:
        option = self._options[key]
        usual = (option.place, option.says)
        if option.place == "mapped":
            usual = ("listed", "without effect beside the others")
        elif self._values[key] == option.default:
            usual = ("listed", "its default, which is how it is here")
        place, says = self._became.get(key, usual)
        return Entry(option.shown, self._values[key], place, says)

    def _said(self, key: str) -> str:
        option, value = self._options[key], self._values[key]
        if self.is_given(key):
            return option.shown if value is True else f"{option.shown} {shown_value(value)}"
        return "default" if value in (None, "", {}) else f"{option.shown} {shown_value(value)} (default)"


def shown_value(value: Any) -> str:
    """A value as one would type it."""
    if isinstance(value, list | tuple):
        return " ".join(str(each) for each in value)
    if isinstance(value, dict):
        return " ".join(f"{key}={each}" for key, each in value.items())
    return "none" if value in (None, "") else str(value).lower() if isinstance(value, bool) else str(value)


def refusal(conversion: Conversion) -> RecipeError:
    """What to say of options that are refused."""
    lines = [f"  {each.option} {shown_value(each.value)}: {each.says}" for each in conversion.refused]
    names = " ".join(f"--skip {each.option.lstrip('-')}" for each in conversion.refused)
    return RecipeError(
        "these options change the result, and nothing here does what they do:",
        *lines,
        f"Take them out, or convert without them: {names}",
    )


def check_skipped(table: Table, names: Iterable[str]) -> list[str]:
    """Keys of the options that the user wants left out.

    Raises:
        RecipeError: If the trainer has no such option.
    """
    keys = []
    for name in names:
        option: Option | None = table.find(name)
        if option is None:
            raise RecipeError(f"--skip {name}: {table.program} has no such option.")
        keys.append(option.key)
    return keys


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    order = ("seed", "model", "data", "batch", "optimizer", "schedule", "train", "evaluate", "checkpoint", "parallel")
    first = {name: at for at, name in enumerate(order)}
    tree: dict[str, Any] = {}
    for dotted in sorted(flat, key=lambda dotted: first.get(dotted.partition(".")[0], len(order))):
        *path, name = dotted.split(".")
        inner = tree
        for part in path:
            inner = inner.setdefault(part, {})
        inner[name] = flat[dotted]
    return tree


def _rows(tree: Mapping[str, Any], origins: Mapping[str, str], path: str) -> list[str]:
    rows: list[str] = []
    indent = "  " * path.count(".")
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            rows += [f"{indent}{key}:", *_rows(value, origins, f"{path}{key}.")]
            continue
        origin = origins.get(f"{path}{key}", "")
        row = f"{indent}{key}: {_scalar(value)}"
        rows.append(f"{row:<34}  # {origin}" if origin else row)
    return rows


def _scalar(value: Any) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...").strip()


def _wrapped(lines: Iterable[str], width: int = 116) -> list[str]:
    import textwrap

    return [part for line in lines for part in (textwrap.wrap(line, width, subsequent_indent="  ") or [""])]
