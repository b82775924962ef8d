"""The command line of another trainer: its options, and the number of processes it starts."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import RecipeError
from paceline.recipe.imports.table import read_yaml

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
# A pipe, a redirection, or an end of a command, where it is a word of its own.
_SHELL = re.compile(r"\|[|&]?|&&?|;|(\d|&)?>.*|<.*")
# Processes of a node, and nodes.
_COUNTS = ("--nproc_per_node", "--nproc-per-node", "--nnodes")
# Of an address: who asks, and with which password.
_LOGIN = re.compile(r"(?<=://)[^/\s@]*@")
_TREES = (".yaml", ".yml", ".json")


@dataclass(frozen=True)
class Source:
    """The source of a conversion.

    Attributes:
        title: What to call it, for the recipe's head: its program and what follows, without passwords in addresses.
            What stands before the program is left out: variables there are where keys of other services are given.
        script: The program that is started, its file's name; empty for a file of arguments.
        words: The words after it.
        tree: A file of arguments, in place of words.
        processes: How many processes train; None where it is not said.
    """

    title: str
    script: str = ""
    words: tuple[str, ...] = ()
    tree: Mapping[str, Any] | None = None
    processes: int | None = None


def read_source(words: Sequence[str], scripts: Sequence[str], wrappers: Sequence[str] = ()) -> Source:
    """Read a file of arguments, a file that holds a command, or a command's words.

    Args:
        words: What the user gave.
        scripts: File names of the programs whose options are known.
        wrappers: File names of programs that take a number of processes and start the first script.

    Raises:
        RecipeError: If it is none of these.
    """
    programs = (*scripts, *wrappers)
    if len(words) > 1:
        return _command(list(words), scripts, wrappers)
    path = Path(words[0])
    if path.is_file():
        try:
            tree = read_yaml(path)
        except RecipeError:
            if path.suffix in _TREES:
                raise
            return _command(_alone(_only_command(path, programs), programs), scripts, wrappers)
        return Source(path.name, tree=tree, processes=_count(tree.get("world_size")))
    if path.suffix in _TREES and " " not in words[0]:
        raise RecipeError(f"there is no file '{words[0]}'; give a file of arguments, or a command after --.")
    return _command(_alone(_split(words[0], "the command"), programs), scripts, wrappers)


def _split(text: str, where: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError as error:
        raise RecipeError(
            f"{where} cannot be parsed as a shell command ({error}): look for an unclosed quote."
        ) from None


def _alone(words: list[str], programs: Sequence[str]) -> list[str]:
    """The words of a shell's line up to what its output is sent to, or what runs after it: none of that trains."""
    begin = _place(words, programs) or 0
    end = next((at for at in range(begin, len(words)) if _SHELL.fullmatch(words[at])), len(words))
    return words[:end]


def _only_command(path: Path, programs: Sequence[str]) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: not readable as text: {' '.join(str(error).split())}") from None
    lines = text.replace("\\\r\n", " ").replace("\\\n", " ").splitlines()
    commands = [words for words in (_split(line, str(path)) for line in lines) if _place(words, programs) is not None]
    if len(commands) != 1:
        raise RecipeError(
            f"{path} has {len(commands) or 'no'} commands that start {' or '.join(programs)}; give a file with one."
        )
    return commands[0]


def _place(words: Sequence[str], programs: Sequence[str]) -> int | None:
    return next((at for at, word in enumerate(words) if Path(word).name in programs), None)


def _command(words: list[str], scripts: Sequence[str], wrappers: Sequence[str]) -> Source:
    while words and _ASSIGNMENT.match(words[0]):
        words = words[1:]
    wrapped = _place(words, wrappers)
    if wrapped is not None:
        count = _count(words[wrapped + 1] if len(words) > wrapped + 1 else None)
        if count is None:
            name = Path(words[wrapped]).name
            raise RecipeError(f"{name} is followed by a number of processes, as in `{name} 4 --model resnet50`.")
        return Source(_title(words[wrapped:]), scripts[0], tuple(words[wrapped + 2 :]), processes=count)
    at = _place(words, scripts)
    if at is not None:
        name, count = Path(words[at]).name, _processes(words[:at])
        return Source(_title(words[at:]), name, tuple(words[at + 1 :]), processes=count)
    if words and words[0].startswith("-"):
        return Source(_title(words), scripts[0], tuple(words), processes=1)
    raise RecipeError(
        f"found '{' '.join(words)[:80]}', which is neither a file nor a command that starts "
        f"{' or '.join((*scripts, *wrappers))}; give one of them."
    )


def _title(words: Sequence[str]) -> str:
    return _LOGIN.sub("", shlex.join(words))


def _processes(words: Sequence[str]) -> int | None:
    """How many processes the words before a script start; None where they ask the machine."""
    total: int | None = 1
    for word, following in zip(words, (*words[1:], ""), strict=False):
        name, equals, value = word.partition("=")
        if name in _COUNTS and total is not None:
            count = _count(value if equals else following)
            total = None if count is None else total * count
    return total


def _count(said: object) -> int | None:
    """A number of processes, or None."""
    text = str(said)
    return int(text) if text.isascii() and text.isdigit() and int(text) > 0 else None
