"""Functions of the commands' names, such as :func:`paceline.evaluate`, derived from the commands' dataclasses.

A function takes what the command takes: arguments by position, options by name. What it is given becomes the words of
the command line, so that both refuse the same mistakes; it returns what the command prints with `--json`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import operator
import os
import re
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import Parameter, Signature
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import click

from paceline.cli.derive import WORDS, click_command, computed, declared, parts_of, ranks_to_start, write_output
from paceline.cli.predict import write_answers
from paceline.errors import PacelineError, RecipeError, TrainingError, did_you_mean, without_frames
from paceline.host.processes import without_rank_variables
from paceline.pages.page import Page
from paceline.pages.shown import page_of
from paceline.parsing.files import SkippedItems
from paceline.plugins.loading import loading
from paceline.recipe.load import Overrides, override_lines
from paceline.records.run_directory import encode_json

_MOST_SHOWN = 6
_JSON = "CommandResult: The command's JSON, whose keys are attributes."
_PLAIN = (bool, dict, float, int, str)
_ABOUT = {
    "overrides": 'Changes of a recipe\'s keys: ``{"train.duration": "3 epochs"}`` or ``["train.duration=3 epochs"]``.',
    "recipe": "A shipped recipe's name, the path of a YAML file or a run directory.",
    "sources": "Paths, pictures of Pillow or arrays of uint8 [height, width, channels]; texts for a language model.",
}


@dataclass(frozen=True, repr=False)
class CommandResult:
    """What a command found; each key of its document is an attribute.

    Attributes:
        document: What `--json` prints.
        command: The command's name in Python.
        passed: Whether the command's exit code is 0.
        problem: A sentence that says why not, if there is one.
        page: The page that the command can write, if there is one.
    """

    document: Mapping[str, Any]
    command: str
    passed: bool = True
    problem: str = ""
    page: Page | None = field(default=None, compare=False)

    def to_json(self) -> Mapping[str, Any]:
        """Return the document."""
        return self.document

    def __getattr__(self, name: str) -> Any:
        document = vars(self).get("document", {})
        if name in document:
            return document[name]
        raise AttributeError(f"this result has no {name!r}.{did_you_mean(name, document)}")

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.document})

    def __repr__(self) -> str:
        found = self.document.items()
        plain = [(name, each) for name, each in found if isinstance(each, int | float | str) and each != ""]
        shown = [f"{name}={_short(each)}" for name, each in plain[:_MOST_SHOWN]]
        shown += ["passed=False"] * (not self.passed and "passed" not in self.document)
        return f"{self.command}({', '.join(shown)}{', …' * (len(plain) > _MOST_SHOWN)})"

    def _repr_html_(self) -> str | None:
        return None if self.page is None else self.page._repr_html_()


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else repr(value)


# ------------------------------------------------------------------------------------------- from a command


def function_of(kind: type[Any]) -> Callable[..., Any]:
    """Return the function of a command that is declared as a dataclass."""
    command = click_command(kind)
    name = _title(kind)
    call, returned = _OWN.get(name, (_computed, _JSON))
    returns = _returns(call)
    hints = get_type_hints(kind, include_extras=True)
    options = {_name(each): each for each in command.params if _is_taken(each)}
    parameters = [
        Parameter(
            key,
            Parameter.KEYWORD_ONLY if isinstance(each, click.Option) else Parameter.POSITIONAL_OR_KEYWORD,
            default=Parameter.empty if each.required else _default(each),
            annotation=_annotation(str(each.name), hints),
        )
        for key, each in options.items()
    ]
    signature = Signature(parameters, return_annotation=returns)

    def function(*args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{name}(): {error}") from None
        with _in_python(command), command.make_context(command.name, _words(options, given)) as context:
            values = {key: each for key, each in context.params.items() if key != "as_json"}
            return call(kind, values, given)

    function.__name__ = function.__qualname__ = name
    function.__module__ = "paceline"
    function.__doc__ = _docstring(kind, options, returned)
    function.__annotations__ = {each.name: each.annotation for each in parameters} | {"return": returns}
    vars(function)["__signature__"] = signature
    return without_frames(function)


def _is_taken(parameter: click.Parameter) -> bool:
    return parameter.name != "as_json" and not getattr(parameter, "hidden", False)


def _name(parameter: click.Parameter) -> str:
    """Return an option's name in Python, which may differ from the field's."""
    return parameter.opts[0].removeprefix("--").replace("-", "_")


def _default(parameter: click.Parameter) -> Any:
    if parameter.nargs == -1 or parameter.multiple:
        return ()
    is_flag = isinstance(parameter, click.Option) and parameter.is_flag
    return False if is_flag else parameter.get_default(click.Context(click.Command(None)), call=True)


def _annotation(name: str, hints: Mapping[str, Any]) -> Any:
    """Return the type of an argument: of a path also the text, and of what is parsed from a text, that."""
    if name not in hints:  # trust_code, where a recipe is named
        return bool
    if name == "overrides":
        return Overrides
    if name == "sources":
        return Any
    kind, _, shape = parts_of(hints[name])
    if get_origin(kind) is tuple:
        item = _widened(get_args(kind)[0])
        return item | Sequence[item]  # type: ignore[valid-type]  # a type made at run time
    members: Sequence[Any] = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    if kind is str and (shape.recipe or shape.path):
        members = (Path,)
    members = sorted((*members, *((str,) if shape.parse is not None else ())), key=lambda each: each is NoneType)
    return functools.reduce(operator.or_, map(_widened, members))


def _widened(kind: Any) -> Any:
    if kind is Path:
        return str | Path
    return kind if kind in (*_PLAIN, NoneType) or get_origin(kind) in (Literal, dict) else str


def _docstring(kind: type[Any], options: Mapping[str, click.Parameter], returned: str) -> str:
    """Return the command's text, with its options as arguments."""
    lines = [inspect.cleandoc(kind.__doc__ or "").partition("\nExamples:\n")[0].rstrip(), "", "Args:"]
    for key, each in options.items():
        about = (
            _ABOUT.get(key) or getattr(each, "help", None) or f"{each.make_metavar(_NO_CONTEXT).strip('[].')} above."
        )
        lines.append(textwrap.fill(f"{key}: {about}", 112, initial_indent="    ", subsequent_indent="        "))
    lines += ["", "Returns:", f"    {returned}", "", "Raises:", "    PacelineError: For what the command refuses."]
    text = _without_dashes("\n".join(lines), options.values())
    return re.sub(r"Exits with 1|Exit code 1", "``passed`` is false", text) + "\n"


_NO_CONTEXT = click.Context(click.Command(None))


def _without_dashes(text: str, parameters: Any) -> str:
    """Return a text in which options are named as arguments."""
    names = {each.opts[0]: _name(each) + "=True" * getattr(each, "is_flag", False) for each in parameters}
    return re.sub(r"(?<![\w-])--[a-z][a-z-]*", lambda match: names.get(match[0], match[0]), text)


@contextlib.contextmanager
def _in_python(command: click.Command) -> Iterator[None]:
    """Word the command's errors for a caller in Python."""
    try:
        yield
    except click.ClickException as error:
        raise RecipeError(_without_dashes(error.format_message(), command.params)) from None
    except PacelineError as error:
        error.args = tuple(_without_dashes(str(each), command.params) for each in error.args)
        raise


def _words(options: Mapping[str, click.Parameter], given: Mapping[str, Any]) -> list[str]:
    """Return the words of the command line that mean the same."""
    words: list[str] = []
    arguments: list[str] = []
    for key, value in given.items():
        parameter = options[key]
        is_flag = isinstance(parameter, click.Option) and parameter.is_flag
        if value is None or (is_flag and value is False):
            continue
        if key == "overrides":
            texts: Sequence[str] = override_lines(value)
        else:
            texts = [_text(each) for each in _listed(value)]
        option = parameter.opts[0]
        if isinstance(parameter, click.Argument):
            arguments += texts
        elif is_flag:
            if value is not True:
                raise RecipeError(f"{key}={value!r} is not True or False.", key=key, value=value)
            words.append(option)
        elif parameter.multiple:
            words += [f"{option}={each}" for each in texts]
        elif texts:
            words.append(f"{option}={','.join(texts)}")
    return [*words, "--", *arguments]


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return json.dumps(value)
    value = getattr(value, "run_dir", value)  # a result stands for its run
    plain = isinstance(value, str | int | float | os.PathLike)
    return str(value) if plain else type(value).__name__  # a picture or an array, which is not read from the words


# ------------------------------------------------------------------------------------------- what is called


def _computed(kind: type[Any], values: Mapping[str, Any], _: Mapping[str, Any]) -> CommandResult:
    """Run a command here, or in the processes that it requests."""
    command = declared(kind, values)
    ranks = ranks_to_start(command, values)
    if ranks is not None and ranks.count > 1:
        return _in_processes(f"--processes={ranks.count}")
    result = computed(command)
    write_output(command, result)
    shown = result.__paceline__()
    return CommandResult(
        document=json.loads(encode_json(result.to_json())),
        command=_title(kind),
        passed=shown.ok is True,
        problem="" if shown.ok is True else str(shown.ok),
        page=page_of(shown) if shown.title else None,
    )


def _title(kind: type[Any]) -> str:
    return str(kind.__paceline_command__).replace("-", "_")


def _in_processes(*options: str) -> CommandResult:
    """Run the command of the current context as a process, with further options, and read what it prints.

    Raises:
        PacelineError: As they do.
    """
    context = click.get_current_context()
    words = [each for each in context.meta[WORDS] if not (options and each.startswith("--processes="))]
    name = str(context.info_name)
    environment = {**without_rank_variables(os.environ), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "paceline", name, "--json", *options, *words],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    problem = done.stderr.strip().rpartition("paceline: ")[2]
    if not done.stdout:
        raise (RecipeError if done.returncode == RecipeError.exit_code else TrainingError)(problem)
    return CommandResult(
        document=json.loads(done.stdout),
        command=name.replace("-", "_"),
        passed=done.returncode == 0,
        problem="" if done.returncode == 0 else problem,
    )


def _page_of_runs(kind: type[Any], values: Mapping[str, Any], _: Mapping[str, Any]) -> Path | CommandResult:
    """Write the page or bundle of `paceline report`, and return its path."""
    result = _computed(kind, values, {})
    return result if values["timing"] else Path(result.bundle if values["bundle"] else result.report)


def _resumed(kind: type[Any], values: Mapping[str, Any], _: Mapping[str, Any]) -> Any:
    """Continue a run as `paceline resume` does, and return what :func:`paceline.train` returns."""
    with loading():
        from paceline.trainer.result import TrainResult
        from paceline.training import train

    with declared(kind, values).continued() as command:
        if command.max_restarts:
            _in_processes()
            return TrainResult.of(command.run_dir)
        until = () if command.until is None else (f"train.until={command.until}",)
        overrides = (*command.overrides, *until)
        return train(command.recipe, overrides=overrides, run_dir=command.run_dir, processes=command.processes or 1)


def _predicted(
    kind: type[Any], values: Mapping[str, Any], given: Mapping[str, Any]
) -> list[dict[str, Any]] | CommandResult:
    """Answer the inputs of `paceline predict`, which may be in memory."""
    with loading():
        from paceline.prediction.inputs import pictures_in, prompts_in, rows_of
        from paceline.prediction.sources import picture_from_standard_input

    command = declared(kind, values)
    predictor = command.opened(looks_for_files=False)
    inputs = _listed(given.get("sources", ()))
    prompts = [command.prompt] if command.prompt is not None else prompts_in(predictor, inputs)
    if prompts:
        return rows_of(predictor.reply(command.asked(each)) for each in prompts)
    skipped = SkippedItems()
    pictures = [picture_from_standard_input()] if command.stdin_image else pictures_in(predictor, inputs, skipped)
    with contextlib.closing(command.answers(predictor, pictures)) as answers:
        if command.output is None:
            found: list[dict[str, Any]] | CommandResult = rows_of(answers)
        else:
            document = write_answers(command.output, predictor, answers, lambda _: None)
            found = CommandResult(document=document, command="predict", passed=not document["unreadable"])
    for sentence in skipped.summaries():
        warnings.warn(sentence, stacklevel=4)
    return found


def _returns(call: Callable[..., Any]) -> Any:
    """Return the type of a result."""
    if call is not _resumed:
        return get_type_hints(call)["return"]
    with loading():
        from paceline.trainer.result import TrainResult
    return TrainResult


_OWN: dict[str, tuple[Callable[..., Any], str]] = {
    "predict": (_predicted, "A row for each input, as the command's JSON; with ``output``, what it says of the file."),
    "report": (
        _page_of_runs,
        "Path: The page or bundle; with ``timing``, the command's JSON, whose keys are attributes.",
    ),
    "resume": (_resumed, "TrainResult: What :func:`train` returns."),
}
