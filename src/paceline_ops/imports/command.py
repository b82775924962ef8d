"""Parse the command line of another trainer: its options, and the number of processes it starts."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import RecipeError
from paceline_ops.imports.table import read_yaml

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
# A pipe, a redirection, or the end of a command, as a separate word.
_SHELL = re.compile(r"\|[|&]?|&&?|;|(\d|&)?>.*|<.*")
# Processes per node, and nodes.
_COUNTS = ("--nproc_per_node", "--nproc-per-node", "--nnodes")
# The user and password in an address.
_LOGIN = re.compile(r"(?<=://)[^/\s@]*@")
_TREES = (".yaml", ".yml", ".json")


@dataclass(frozen=True)
class ConversionSource:
    """The source of a conversion.

    Attributes:
        title: Title for the recipe's header: the program and its arguments, without passwords in addresses. Text before
            the program is left out, since variables there may contain API keys.
        script: File name of the program; empty for a file of arguments.
        words: The words after it.
        tree: Content of a file of arguments, instead of words.
        processes: Number of training processes; None if not given.
    """

    title: str
    script: str = ""
    words: tuple[str, ...] = ()
    tree: Mapping[str, Any] | None = None
    processes: int | None = None


def read_source(words: Sequence[str], scripts: Sequence[str], wrappers: Sequence[str] = ()) -> ConversionSource:
    """Read a file of arguments, a file that holds a command, or a command's words.

    Args:
        words: What the user gave.
        scripts: File names of the programs whose options are known.
        wrappers: File names of programs that take a number of processes and start the first script.

    Raises:
        RecipeError: If it is none of these.
    """
    programs, found = (*scripts, *wrappers), list(words)
    if len(words) == 1:
        path = Path(words[0])
        if os.path.isfile(path):  # a command may be longer than the longest path
            try:
                tree = read_yaml(path)
                return ConversionSource(path.name, tree=tree, processes=_count(tree.get("world_size")))
            except RecipeError:
                if path.suffix in _TREES:
                    raise
            found = _only_command(path, programs)
        elif path.suffix in _TREES and " " not in words[0]:
            message = f"there is no file '{words[0]}'; give a file of arguments, or a command after --."
            raise RecipeError(message, path=words[0])
        else:
            found = _split(words[0], "the command")
    return _command(found, scripts, wrappers)


def _split(text: str, where: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError as error:
        message = f"{where} cannot be parsed as a shell command ({error}): look for an unclosed quote."
        raise RecipeError(message, value=text, rule="a shell command") from None


def _only_command(path: Path, programs: Sequence[str]) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        message = f"{path}: not readable as text: {' '.join(str(error).split())}"
        raise RecipeError(message, path=path, rule="text") from None
    lines = text.replace("\\\r\n", " ").replace("\\\n", " ").splitlines()
    commands = [words for words in (_split(line, str(path)) for line in lines) if _place(words, programs) is not None]
    if len(commands) != 1:
        raise RecipeError(
            f"{path} has {len(commands) or 'no'} commands that start {' or '.join(programs)}; give a file with one.",
            value=len(commands),
            path=path,
            rule="one command",
        )
    return commands[0]


def _place(words: Sequence[str], programs: Sequence[str]) -> int | None:
    return next((at for at, word in enumerate(words) if Path(word).name in programs), None)


def _command(words: list[str], scripts: Sequence[str], wrappers: Sequence[str]) -> ConversionSource:
    programs = (*scripts, *wrappers)
    at = _place(words, programs)
    # Output redirections, and commands after it, are not part of the training command.
    end = next((each for each in range(at or 0, len(words)) if _SHELL.fullmatch(words[each])), len(words))
    if at is None:
        while words and _ASSIGNMENT.match(words[0]):
            words, end = words[1:], end - 1
        if not words or not words[0].startswith("-"):
            found = " ".join(words)[:80]
            raise RecipeError(
                f"found '{found}', which is neither a file nor a command that starts {' or '.join(programs)}; give one "
                "of them.",
                value=found,
                rule="a file or a command",
            )
        return ConversionSource(_title(words[:end]), scripts[0], tuple(words[:end]), processes=1)
    name, title, after = Path(words[at]).name, _title(words[at:end]), words[at + 1 : end]
    if name in scripts:
        return ConversionSource(title, name, tuple(after), processes=_processes(words[:at]))
    count = _count(after[0] if after else None)
    if count is None:
        message = f"{name} is followed by a number of processes, as in `{name} 4 --model resnet50`."
        raise RecipeError(message, key=name, rule="a number of processes")
    return ConversionSource(title, scripts[0], tuple(after[1:]), processes=count)


def _title(words: Sequence[str]) -> str:
    return _LOGIN.sub("", shlex.join(words))


def _processes(words: Sequence[str]) -> int | None:
    """Return how many processes the words before a script start; None if they leave it to the machine."""
    total: int | None = 1
    for word, following in zip(words, (*words[1:], ""), strict=False):
        name, equals, value = word.partition("=")
        if name in _COUNTS and total is not None:
            count = _count(value if equals else following)
            total = None if count is None else total * count
    return total


def _count(value: object) -> int | None:
    """Parse a number of processes, or return None."""
    text = str(value)
    return int(text) if text.isascii() and text.isdigit() and int(text) > 0 else None
