"""click commands derived from the dataclasses that :mod:`paceline.command` declares, and their shell completion."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import pkgutil
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import click
from annotated_types import Ge, Gt, Le, Lt
from click.shell_completion import CompletionItem, get_completion_class

from paceline.cli.options import (
    TRUST_CODE,
    FiniteRange,
    LocalPath,
    Processes,
    WeightsPath,
    choose_processes,
    is_first_process,
    is_launched_rank,
    json_option,
    launch,
    refuse_unused,
)
from paceline.cli.output import echo, open_console, print_json, print_pairs, print_table, store_verdict
from paceline.cli.streams import exit_on_signals
from paceline.command import JoinedProcesses, Log, Output, Shape, TrustCode, command
from paceline.command import Processes as OwnProcesses
from paceline.errors import PacelineError
from paceline.pages.shown import Document, Result, Shown, write_result
from paceline.parsing.units import Duration
from paceline.recipe.load import load_recipe
from paceline.records.run_directory import make_folder

VARIABLE = "_PACELINE_COMPLETE"
# click's scripts add a space after each word; a key's value follows without one.
_SPACES = {
    "bash": ("COMPREPLY+=($value)", "COMPREPLY+=($value); [[ $value == *= ]] && compopt -o nospace"),
    "zsh": ("compadd -U", "compadd -U -S ''"),
    "fish": ("", ""),  # adds none after `=`
}


@command("completion")
@dataclass(frozen=True, kw_only=True)
class Completion:
    """Print the script that makes SHELL complete commands, options, recipes, keys, values and paths.

    Examples:
      echo 'eval "$(paceline completion bash)"' >> ~/.bashrc
      paceline completion zsh > "${fpath[1]}/_paceline"
      paceline completion fish > ~/.config/fish/completions/paceline.fish
    """

    shell: Literal["bash", "zsh", "fish"]

    def run(self, _: Log) -> Result:
        """Return the completion script."""
        kind = get_completion_class(self.shell)
        assert kind is not None
        script = kind(click.get_current_context().find_root().command, {}, "paceline", VARIABLE).source()
        script = script.replace(*_SPACES[self.shell])
        return Document(document={"shell": self.shell, "script": script}, shown=Shown(blocks=[script.rstrip("\n")]))


def recipes(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Suggest paths and shipped recipes."""
    from paceline.recipe.load import shipped_recipes

    found = [CompletionItem(incomplete, type="file")]
    for name, path in shipped_recipes().items():
        if name.startswith(incomplete):
            with path.open(encoding="utf-8") as file:
                found.append(CompletionItem(name, help=file.readline().removeprefix("#").strip()))
    return found


def overrides(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Suggest keys of a recipe and, after a key, its values if there are few."""
    from paceline.recipe.schema import Recipe

    key, typed, _value = incomplete.partition("=")
    kinds = dict(_keys(Recipe, ""))
    words = [f"{key}={value}" for value in _values(kinds.get(key))] if typed else [f"{name}=" for name in kinds]
    return [CompletionItem(word) for word in words if word.startswith(incomplete)]


def _keys(section: type[Any], path: str) -> Iterator[tuple[str, Any]]:
    """Return dotted keys with their annotations."""
    from paceline.recipe.layers import field_types, named_choices, subsection

    for name, kind in field_types(section).items():
        inner = subsection(section, name)
        if inner is None:
            yield f"{path}{name}", named_choices(section, name) or kind
        else:
            yield from _keys(inner, f"{path}{name}.")


def _values(kind: Any) -> Iterator[str]:
    """Return the values that an annotation lists."""
    if isinstance(kind, Collection):  # known values of a key that accepts any text
        yield from (str(each) for each in kind if ":" not in str(each))
    elif kind is bool:
        yield from ("true", "false")
    elif get_origin(kind) is Literal:
        yield from map(str, get_args(kind))
    elif get_origin(kind) is Annotated:
        yield from _values(get_args(kind)[0])
    elif get_origin(kind) in (Union, UnionType):
        for part in get_args(kind):
            yield from ["off"] if part is type(None) else _values(part)


# An option `--output` of this shape is the folder that the result is written to; with any other, the command handles
# it.
(_FOLDER,) = (each for each in get_args(Output) if isinstance(each, Shape))


class _Command(click.Command):
    """A command that stores the words it was called with, for the ranks it starts."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[WORDS] = list(args)
        return super().parse_args(ctx, args)


WORDS = "paceline.words"
_WIDTH = 120  # columns, for rich's tables in a file
_NOT_GIVEN = (None, False, ())  # the text given is empty


def click_command(kind: type[Any]) -> click.Command:
    """Derive the click command of a declared dataclass, or the group of several."""
    # click preserves the lines of a paragraph after \b.
    help_text = inspect.cleandoc(kind.__doc__ or "").replace("Examples:\n", "\b\nExamples:\n")
    if kind.__paceline_commands__:
        inner = {each.__paceline_command__: click_command(each) for each in kind.__paceline_commands__}
        return click.Group(kind.__paceline_command__, help=help_text, commands=inner)
    annotations = get_type_hints(kind, include_extras=True)
    parameters: list[click.Parameter] = [
        _parameter(each.name, annotations[each.name], MISSING if each.default is MISSING else each.default)
        for each in fields(kind)
    ]
    # Arguments in the order of the fields, then options in theirs.
    parameters.sort(key=lambda each: isinstance(each, click.Option))

    def call(as_json: bool, **values: Any) -> int:
        return _run(kind, values, as_json=as_json)

    if any(parts_of(annotation)[2].recipe for annotation in annotations.values()):
        parameters.append(click.Option(["--trust-code"], expose_value=False, **TRUST_CODE))
    command = click.command(kind.__paceline_command__, cls=_Command, help=help_text)(json_option(call))
    command.params[:0] = parameters
    return command


def _parameter(name: str, annotation: Any, default: Any) -> click.Parameter:
    """Derive an argument or option from a field."""
    if annotation == TrustCode:
        return click.Option(["--trust-code"], **TRUST_CODE)
    kind, extras, shape = parts_of(annotation)
    help_text = " ".join(each for each in extras if isinstance(each, str))
    if choices := {} if shape.choices is None else shape.choices():
        help_text = "; ".join(f"{name}: {phrase}" for name, phrase in choices.items() if phrase) + "."
    if get_origin(kind) in (Union, UnionType):
        kind = next(each for each in get_args(kind) if each is not NoneType)
    is_list = get_origin(kind) is tuple
    item_type = get_args(kind)[0] if is_list else kind
    click_type = click.Choice([*choices]) if choices else _click_type(item_type, extras, shape)
    if shape.argument or (default is MISSING and not shape.required):
        arity: dict[str, Any] = {"nargs": -1} if is_list else {} if default is MISSING else {"default": default}
        if name == "overrides" or (shape.recipe and kind is str):
            arity["shell_complete"] = overrides if name == "overrides" else recipes
        return click.Argument([name], type=click_type, metavar=shape.metavar, required=default is MISSING, **arity)
    option = shape.name or f"--{name.replace('_', '-')}"
    if kind is bool:
        return click.Option([option, name], is_flag=True, required=shape.required, help=help_text, hidden=shape.hidden)
    is_shown = default not in (MISSING, None, (), "")
    return click.Option(
        [option, name],
        type=_CommaList(click_type) if is_list and not shape.repeatable else click_type,
        multiple=shape.repeatable,
        show_default=",".join(map(str, default)) if is_list and is_shown else is_shown,
        **({"required": True} if default is MISSING else {"default": default}),
        metavar=shape.metavar or {int: "N", float: "X"}.get(item_type),
        help=help_text,
        hidden=shape.hidden,
    )


def parts_of(annotation: Any) -> tuple[Any, Sequence[Any], Shape]:
    """Return an annotation's type, its other metadata, and its shape; the last shape wins."""
    kind, *extras = get_args(annotation) if get_origin(annotation) is Annotated else (annotation,)
    return kind, extras, next((each for each in reversed(extras) if isinstance(each, Shape)), Shape())


def _click_type(kind: Any, extras: Sequence[Any], shape: Shape) -> click.ParamType[Any]:
    bounds: dict[str, Any] = {}
    for each in extras:
        match each:
            case Ge(ge):
                bounds["min"] = ge
            case Gt(gt):
                bounds |= {"min": gt, "min_open": True}
            case Le(le):
                bounds["max"] = le
            case Lt(lt):
                bounds |= {"max": lt, "max_open": True}
    if shape.parse is not None:
        return _Parsed(shape.parse)
    if get_origin(kind) is Literal:
        return click.Choice([str(each) for each in get_args(kind)])
    if kind is Duration:
        return _Parsed(Duration.parse)
    if shape.path is not None:
        checks = {"file": {"dir_okay": False}, "folder": {"file_okay": False}}.get(shape.path, {})
        return WeightsPath() if shape.path == "weights" else LocalPath(kind, **checks)
    known: dict[Any, click.ParamType[Any]] = {
        int: click.IntRange(**bounds) if bounds else click.INT,
        float: FiniteRange(**bounds),
        Path: LocalPath(),
        str: click.STRING,
        bool: click.BOOL,
    }
    return known[kind]


class _Parsed(click.ParamType[Any]):
    """A value that a function parses from the text, with the function's error message."""

    name = "text"

    def __init__(self, parse: Callable[[str], Any]) -> None:
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._parse(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(f"{str(error).rstrip('.')}.", param, ctx)


class _CommaList(click.ParamType[Any]):
    """Comma-separated values without repeats."""

    name = "list"

    def __init__(self, item_type: click.ParamType[Any]) -> None:
        self._item_type = item_type

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        if not isinstance(value, str):
            return tuple(value)
        converted = tuple(self._item_type.convert(word.strip(), param, ctx) for word in value.split(","))
        if repeated := [each for each in converted if converted.count(each) > 1]:
            self.fail(f"{value!r} names {repeated[0]} twice; name each once.", param, ctx)
        return converted


def _run(kind: type[Any], values: dict[str, Any], *, as_json: bool) -> int:
    """Run a command, in as many ranks as it requests, and show its result."""
    command = declared(kind, values)
    if hasattr(command, "stream"):
        return int(command.stream(as_json=as_json))
    if (code := _launched(command, values)) is not None:
        return code
    with exit_on_signals(), contextlib.redirect_stdout(sys.stderr):  # custom code may print
        result = computed(command)
    shown = result.__paceline__()
    code = store_verdict(passed=shown.ok is True)
    if is_first_process():
        _show(result, shown, write_output(command, result), as_json=as_json)
    if isinstance(shown.ok, PacelineError):
        raise shown.ok
    return code


def declared(kind: type[Any], values: Mapping[str, Any]) -> Any:
    """Return a command's dataclass with the values of its options, in the context of its click command.

    Raises:
        PacelineError: If options do not go together, or the folder of its output cannot be made.
        click.UsageError: If one has no effect.
    """
    command = kind(**values)
    _refuse_unused(get_type_hints(kind, include_extras=True), values)
    if (output := _output_folder(command)) is not None and is_first_process():
        make_folder(output, *kind.__paceline_files__)
    return command


def computed(command: Any) -> Result:
    """Run a command in this process."""
    name = command.__paceline_runs__
    run = type(command).run if name is None else pkgutil.resolve_name(name)
    result: Result = run(command, lambda line: echo(line, err=True) if is_first_process() else None)
    return result


def _output_folder(command: Any) -> Path | None:
    """Return the folder that a command's result is written to."""
    is_folder = _FOLDER in get_args(get_type_hints(type(command), include_extras=True).get("output"))
    output: Path | None = command.output if is_folder else None
    return output


def write_output(command: Any, result: Result) -> list[Path]:
    """Write a result into the folder that was requested, if any, and return the files."""
    if (output := _output_folder(command)) is None:
        return []
    name = command.__paceline_command__
    write = getattr(result, "write", None) or functools.partial(write_result, name=name, result=result)
    written: list[Path] = write(output)
    return written


def _show(result: Result, shown: Shown, written: Sequence[Path], *, as_json: bool) -> None:
    """Print a result."""
    if shown.ok and isinstance(shown.ok, str):
        echo(f"paceline: {shown.ok}", err=True)
    if as_json:
        print_json(result.to_json())
        return
    _print(shown)
    for path in written:
        echo(f"written: {path}")


def _refuse_unused(hints: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Refuse options that were given and have no effect together with, or without, another one."""
    context = click.get_current_context()
    for name, annotation in hints.items():
        shape = parts_of(annotation)[2]
        if shape.only is not None and values[shape.only] in _NOT_GIVEN:
            main = next(each for each in context.command.params if each.name == shape.only)
            reason = f"it needs {main.make_metavar(context).strip('[]')}"
            refuse_unused(
                context, name, f"it is used only with {main.opts[0]}" if isinstance(main, click.Option) else reason
            )
        for other in shape.without:
            if values[other] not in _NOT_GIVEN:
                refuse_unused(context, name, f"it does not apply with --{other.replace('_', '-')}")


def ranks_to_start(command: Any, values: Mapping[str, Any]) -> Processes | None:
    """Return the ranks that a command requests; None if this process does the work."""
    if get_type_hints(type(command), include_extras=True).get("processes") not in (OwnProcesses, JoinedProcesses):
        return None
    context = click.get_current_context()
    if is_launched_rank(values["processes"]):
        if "scratch" in values and values["scratch"] is None:
            raise click.UsageError(f"{context.info_name} starts its ranks itself: run it alone, with --processes N.")
        return None
    target = values.get("target") or values.get("recipe")
    if hasattr(command, "usable_gpus"):
        count = Processes(command.processes or max(1, command.usable_gpus()))
    elif target:
        count = choose_processes(values["processes"], load_recipe(target, values["overrides"]).recipe)
    else:
        count = Processes(values["processes"] or 1)
    if count.notice:
        echo(f"note: {count.notice}", err=True)
    return count


def _launched(command: Any, values: dict[str, Any]) -> int | None:
    """Start the ranks that a command requests, and return their exit code; None if this process does the work."""
    if (count := ranks_to_start(command, values)) is None:
        return None
    context = click.get_current_context()
    argv: list[str] = context.meta[WORDS]
    arguments = [
        word
        for previous, word in itertools.pairwise(["", *argv])
        if "--processes" not in (previous, word) and not word.startswith("--processes=")
    ]
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        scratch = ["--scratch", folder] if "scratch" in values else []
        return launch(count, [str(context.info_name), *scratch, *arguments])


def _print(shown: Shown) -> None:
    """Print texts, tables and pairs; charts and folded tables are only in the page."""
    from rich.text import Text as RichText

    from paceline.pages.page import Block, Table, Text

    if shown.title:
        echo(shown.title + (f": {shown.subtitle}" if shown.subtitle else ""))
    for number, block in enumerate(shown.blocks):
        match block:
            case str():
                echo(block)
            case Table(folded=False):
                if shown.title or number:
                    echo(f"\n{block.caption}" if block.caption else "")
                print_table(
                    tuple(block.columns), (tuple(row) for row in block.rows), indent="  " if shown.title else ""
                )
            case Text():
                echo("\n".join(f"  {paragraph}" for paragraph in block.paragraphs))
            case Mapping():
                print_pairs(block)
            case Block():
                pass
            case _:
                console = open_console(soft_wrap=isinstance(block, RichText))
                console.width = console.width if console.is_terminal else max(console.width, _WIDTH)
                console.print(block)
