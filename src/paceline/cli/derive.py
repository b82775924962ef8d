"""click commands derived from the dataclasses that :mod:`paceline.command` declares."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import pkgutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import click
from annotated_types import Ge, Gt, Le, Lt

from paceline.cli.derive import overrides, recipes
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
from paceline.command import JoinedProcesses, Output, Shape, TrustCode
from paceline.command import Processes as OwnProcesses
from paceline.errors import PacelineError
from paceline.pages.shown import Result, Shown, write_result
from paceline.recipe.load import load_recipe
from paceline.records.run_directory import make_folder
from paceline.units import Duration

# An option `--output` of this shape is the folder that the result is written to; with any other, the command handles
# it.
(_FOLDER,) = (each for each in get_args(Output) if isinstance(each, Shape))


class _Command(click.Command):
    """A command that stores the words it was called with, for the ranks it starts."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_WORDS] = list(args)
        return super().parse_args(ctx, args)


_WORDS = "paceline.words"
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

    if any(_parts(annotation)[2].recipe for annotation in annotations.values()):
        parameters.append(click.Option(["--trust-code"], expose_value=False, **TRUST_CODE))
    command = click.command(kind.__paceline_command__, cls=_Command, help=help_text)(json_option(call))
    command.params[:0] = parameters
    return command


def _parameter(name: str, annotation: Any, default: Any) -> click.Parameter:
    """Derive an argument or option from a field."""
    if annotation == TrustCode:
        return click.Option(["--trust-code"], **TRUST_CODE)
    kind, extras, shape = _parts(annotation)
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


def _parts(annotation: Any) -> tuple[Any, Sequence[Any], Shape]:
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
        int: click.IntRange(**bounds),
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
    hints = get_type_hints(kind, include_extras=True)
    command = kind(**values)
    _refuse_unused(hints, values)
    if hasattr(command, "stream"):
        return int(command.stream(as_json=as_json))
    output: Path | None = values["output"] if _FOLDER in get_args(hints.get("output")) else None
    if output is not None and is_first_process():
        make_folder(output, *kind.__paceline_files__)
    if hints.get("processes") in (OwnProcesses, JoinedProcesses) and (code := _launched(command, values)) is not None:
        return code
    run = kind.run if kind.__paceline_runs__ is None else pkgutil.resolve_name(kind.__paceline_runs__)
    with exit_on_signals(), contextlib.redirect_stdout(sys.stderr):  # custom code may print
        result: Result = run(command, lambda line: echo(line, err=True) if is_first_process() else None)
    shown = result.__paceline__()
    code = store_verdict(passed=shown.ok is True)
    if is_first_process():
        _show(kind, result, shown, output, as_json=as_json)
    if isinstance(shown.ok, PacelineError):
        raise shown.ok
    return code


def _show(kind: type[Any], result: Result, shown: Shown, output: Path | None, *, as_json: bool) -> None:
    """Print a result, and write it to the requested path."""
    if shown.ok and isinstance(shown.ok, str):
        echo(f"paceline: {shown.ok}", err=True)
    written: list[Path] = []
    if output is not None:
        write = getattr(result, "write", None) or functools.partial(
            write_result, name=kind.__paceline_command__, result=result
        )
        written = write(output)
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
        shape = _parts(annotation)[2]
        if shape.only is not None and values[shape.only] in _NOT_GIVEN:
            main = next(each for each in context.command.params if each.name == shape.only)
            reason = f"it needs {main.make_metavar(context).strip('[]')}"
            refuse_unused(
                context, name, f"it is used only with {main.opts[0]}" if isinstance(main, click.Option) else reason
            )
        for other in shape.without:
            if values[other] not in _NOT_GIVEN:
                refuse_unused(context, name, f"it does not apply with --{other.replace('_', '-')}")


def _launched(command: Any, values: dict[str, Any]) -> int | None:
    """Start the ranks that a command requests, and return their exit code; None if this process does the work."""
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
    argv: list[str] = context.meta[_WORDS]
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
