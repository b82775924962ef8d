"""The recipe converted from another trainer's options, and a report on every option."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from paceline.errors import RecipeError
from paceline.parsing.plain_yaml import yaml_line
from paceline.recipe.load import stored_recipe
from paceline_ops.imports.command import ConversionSource
from paceline_ops.imports.table import NONE, Option, OptionTable

Outcome = Literal["mapped", "listed", "refused"]
"""`mapped`: recipe keys say the same. `listed`: no effect here. `refused`: unsupported, and would change the result."""

_SECTIONS = ("seed", "model", "data", "batch", "optimizer", "schedule", "train", "evaluate", "checkpoint", "parallel")
_FIRST = ("seed", "model.name", "data.dataset", "data.path", "optimizer.name", "schedule.name")


@dataclass(frozen=True)
class ConvertedOption:
    """A given option and its conversion."""

    option: str
    value: Any
    outcome: Outcome
    reason: str


class Conversion:
    """A recipe under construction, with a report on every option that it comes from.

    Args:
        table: The trainer's options.
        source: The source of the conversion.
        given: Values of the options that were given.
        skipped: Names of options to convert as if they had not been given.
        processes: Number of processes that share the global batch; None to take it from the source. If the source does
            not give it either, one is assumed, with a notice.

    Attributes:
        flat: The recipe's dotted keys.
        differences: Options whose effect is not identical, with the difference.
        left_out: Options that the user chose to leave out.
        notices: Assumptions.

    Raises:
        RecipeError: If the trainer has no option of a skipped name.
    """

    def __init__(
        self,
        table: OptionTable,
        source: ConversionSource,
        given: Mapping[str, Any],
        skipped: Iterable[str],
        processes: int | None,
    ) -> None:
        count = processes or source.processes
        self.title, self.processes, self.notices = source.title, count or 1, list[str]()
        if count is None:
            self.notices.append(
                "the number of processes is not known; one is assumed. With more, the global batch is larger or each "
                "process has fewer passes, and the learning rate may follow the batch: give --processes N."
            )
        self._options = table.options
        skipped_keys = set()
        for name in skipped:
            option = table.find(name)
            if option is None:
                message = f"--skip {name}: {table.program} has no such option."
                raise RecipeError(message, key="--skip", value=name, rule="a known option")
            skipped_keys.add(option.key)
        self.given = {key: value for key, value in given.items() if key not in skipped_keys}
        self.left_out = tuple(self._options[key].display_name for key in given if key in skipped_keys)
        self._values = {key: option.default for key, option in self._options.items()} | self.given
        self.flat: dict[str, Any] = {}
        self._origins: dict[str, str] = {}
        self._outcomes: dict[str, tuple[Outcome, str]] = {}
        self.differences: dict[tuple[str, str], None] = {}

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def convert(
        self,
        conversions: Mapping[str, Callable[[Conversion, Any], Any]],
        network_settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Convert every option whose row in the table specifies a conversion, in row order.

        Args:
            conversions: Functions named by the table's `conversion`. They take this draft and an option's value, and
                return the recipe's value, or keys with values. They refuse a value with a ``ValueError`` that gives the
                reason.
            network_settings: Values named by its `network_default`: the network's own settings.
        """
        for option in self._options.values():
            value, note = self[option.key], option.note
            is_changed = value != option.default and value not in NONE
            converts = {"key": True, "if_changed": is_changed, "if_given": option.key in self.given}
            if not converts.get(option.fate) or self._unused_reason(option):
                continue
            if option.network_default and value in NONE:
                value, note = (network_settings or {})[option.network_default], "of the network's own settings"
            try:
                value = option.map_value(value)
                if option.conversion:
                    value = conversions[option.conversion](self, value)
            except ValueError as error:
                self.refuse(option.key, str(error))
                continue
            keys = value if isinstance(value, dict) else dict.fromkeys(option.target.split(), value)
            for dotted, each in {**keys, **option.also}.items():
                self.put(dotted, each, *filter(self.given.get, option.sources.split()), option.key, note=note)
            if option.differs:
                self.differ(option.key, option.differs)

    def _unused_reason(self, option: Option) -> str:
        """Return why an option has no effect with the others, or an empty string."""

        def is_met(condition: str) -> bool:
            key, equals, value = condition.partition("=")
            current = self.flat.get(key) if "." in key else self[key]
            return str(current) == value if equals else bool(current)

        def format_condition(condition: str) -> str:
            key, _, value = condition.partition("=")
            return f"{self._options[key].display_name} {value}".strip() if key in self._options else condition

        for conditions in option.needs.split():
            if not any(map(is_met, conditions.split("|"))):
                return f"needs {' or '.join(map(format_condition, conditions.split('|')))}"
        return next((f"with {format_condition(each)}" for each in option.unless.split() if is_met(each)), "")

    def put(self, dotted: str, value: Any, *sources: str, note: str = "") -> None:
        """Set a key of the recipe.

        Args:
            dotted: The key.
            value: Its value.
            sources: Keys of the options it comes from.
            note: Comment to write in the file next to their values.
        """
        self.flat[dotted] = value
        origin = " ".join(dict.fromkeys(map(self._describe_option, sources)))
        # A comment ends at the end of its line.
        self._origins[dotted] = " ".join("; ".join(filter(None, (origin, note))).split())
        for key in sources:
            outcome, reason = self._outcomes.get(key, ("mapped", ""))
            if outcome == "mapped" and dotted not in reason.split(", "):
                self._outcomes[key] = ("mapped", f"{reason}, {dotted}" if reason else dotted)

    def put_ending(self, end: str, warmup: str, source: str) -> None:
        """End a run that is still warming up: its duration is the warm-up, and `train.until` is its end."""
        self.notices.append(
            f"the run ends after {end}, while it warms up for {warmup}, and never reaches its peak rate: "
            f"train.duration is the whole warm-up, and train.until={end} ends it"
        )
        self.put("train.until", end, "epochs", note="the run ends during its warm-up")
        self.put("train.duration", warmup, source)

    def differ(self, key: str, difference: str) -> None:
        """Record a difference from an option's original effect."""
        self.differences[self._options[key].display_name, difference] = None

    def refuse(self, key: str, reason: str) -> None:
        """Record that an option would change the result and is unsupported."""
        self._outcomes[key] = ("refused", reason)

    def finish(self) -> Conversion:
        """Add a notice if the data are still unspecified, and validate the result as a recipe.

        Raises:
            RecipeError: If it is not a valid recipe.
        """
        if "data.path" not in self.flat and self.flat.get("data.dataset") != "synthetic":
            self.notices.append("the folder of the images is not given: add data.path")
        if not self.refused:
            stored_recipe(self.tree, "the converted options")
        return self

    @property
    def tree(self) -> dict[str, Any]:
        """Return the recipe's sections."""

        def order(dotted: str) -> tuple[int, bool]:
            section = dotted.partition(".")[0]
            return _SECTIONS.index(section) if section in _SECTIONS else len(_SECTIONS), dotted not in _FIRST

        tree: dict[str, Any] = {}
        for dotted in sorted(self.flat, key=order):
            *path, name = dotted.split(".")
            inner = tree
            for part in path:
                inner = inner.setdefault(part, {})
            inner[name] = self.flat[dotted]
        return tree

    @property
    def entries(self) -> tuple[ConvertedOption, ...]:
        """Return every given option, once."""
        return tuple(
            ConvertedOption(self._options[key].display_name, self[key], *self._fate(self._options[key]))
            for key in self.given
        )

    def _fate(self, option: Option) -> tuple[Outcome, str]:
        if option.key in self._outcomes:
            return self._outcomes[option.key]
        if option.fate == "no_effect":
            return "listed", option.target
        if self[option.key] == option.default:
            return "listed", "its default value"
        unused = self._unused_reason(option)
        if option.fate == "unsupported" and not unused:
            return "refused", option.target
        return "listed", f"no effect: {unused}" if unused else "no effect with the others"

    @property
    def refused(self) -> tuple[ConvertedOption, ...]:
        """Return the unsupported options that would change the result."""
        return tuple(each for each in self.entries if each.outcome == "refused")

    def _describe_option(self, key: str) -> str:
        option, value = self._options[key], self[key]
        if key in self.given:
            return option.display_name if value is True else f"{option.display_name} {shown_value(value)}"
        return "default" if value in NONE else f"{option.display_name} {shown_value(value)} (default)"

    def to_json(self) -> dict[str, Any]:
        """Return the complete report."""
        entries: dict[str, list[dict[str, Any]]] = {outcome: [] for outcome in get_args(Outcome)}
        for each in self.entries:
            entries[each.outcome].append({"option": each.option, "value": each.value, "says": each.reason})
        return {
            "source": self.title,
            "processes": self.processes,
            "recipe": self.tree,
            "origins": self._origins,
            **entries,
            "differences": [{"option": option, "says": says} for option, says in self.differences],
            "left_out": list(self.left_out),
            "notices": self.notices,
        }

    def to_yaml(self) -> str:
        """Return the recipe as a file: every value with its source."""
        head = [f"Converted from: {' '.join(self.title.split())}", f"Processes: {self.processes}", ""]
        head += [f"Differs: {option}: {says}" for option, says in self.differences]
        head += [f"Left out: {name}" for name in self.left_out]
        head += [f"Note: {each}" for each in self.notices]
        wrapped = [part for line in head for part in textwrap.wrap(line, 116, subsequent_indent="  ") or [""]]
        return "\n".join([*(f"# {line}".rstrip() for line in wrapped), *self._rows(self.tree, "")]) + "\n"

    def _rows(self, tree: Mapping[str, Any], path: str) -> Iterable[str]:
        indent = "  " * path.count(".")
        for key, value in tree.items():
            if isinstance(value, dict) and value:
                yield f"{indent}{key}:"
                yield from self._rows(value, f"{path}{key}.")
            else:
                row, origin = f"{indent}{key}: {yaml_line(value)}", self._origins.get(f"{path}{key}", "")
                yield f"{row:<34}  # {origin}" if origin else row


def shown_value(value: Any) -> str:
    """Format a value as a user would type it."""
    if isinstance(value, list | tuple):
        return " ".join(str(each) for each in value)
    if isinstance(value, dict):
        return " ".join(f"{key}={each}" for key, each in value.items())
    return "none" if value in NONE else str(value).lower() if isinstance(value, bool) else str(value)


def refusal(conversion: Conversion) -> RecipeError:
    """Return the error for unsupported options."""
    names = " ".join(f"--skip {each.option.lstrip('-')}" for each in conversion.refused)
    return RecipeError(
        "unsupported options that would change the result:",
        *(f"  {each.option} {shown_value(each.value)}: {each.reason}" for each in conversion.refused),
        f"Remove them, or convert without them: {names}",
        key=conversion.refused[0].option,
        value=conversion.refused[0].value,
        rule="supported",
    )
