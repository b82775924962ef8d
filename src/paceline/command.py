"""Commands as dataclasses: the fields are the options; :mod:`paceline.cli.derive` turns them into click commands.

A command is declared once::

    @command("noise-scale", runs="mypackage.noise_scale:measure_noise", group="Study")
    @dataclass(frozen=True, kw_only=True)
    class NoiseScale:
        '''Measure the gradient noise scale of a recipe, or of a run at each of its checkpoints.'''

        target: RecipeOrRun
        overrides: Overrides = ()
        steps: Annotated[int, Ge(2), "Batches at each set of weights."] = 50

``runs`` names the function that is called with the dataclass and a :data:`Log`, and returns a
:class:`~paceline.pages.shown.Result`. It is imported only when the command is called. Without ``runs``, the dataclass
itself has such a method ``run(log)``, or a method ``stream(as_json=...)`` that prints results as they arrive and
returns the exit code.

A field without a default is an argument, any other an option. The annotation gives its type: ``bool`` is a flag,
``Literal`` a choice, ``tuple[T, ...]`` a comma-separated list, ``Path`` a local path. Strings in ``Annotated`` are the
help; ``Ge``, ``Gt``, ``Le`` and ``Lt`` are the range; :class:`Shape` adds what the type cannot express. Incompatible
options are refused in ``__post_init__``, before anything is written or started.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from annotated_types import Ge

Log = Callable[[str], None]
_T = TypeVar("_T")


@dataclass(frozen=True)
class Shape:
    """What a field's type does not define about its option.

    Attributes:
        metavar: Placeholder in the help.
        name: Long option, if it is not the field's name.
        hidden: Whether to leave it out of the help.
        required: An option, although it has no default.
        repeatable: A list whose option is repeated for each entry, instead of comma-separated.
        parse: Reads the text; a ``ValueError`` becomes the usage error.
        choices: Returns the texts it may be, each with a phrase for the help, or an empty one.
        path: Meaning of a string or path: ``local``, on this machine, where ``~`` is the home directory; ``file`` or
            ``folder``, if it exists; ``weights``, which may be an address to download from.
        argument: An argument, although it is a list or has a default; a list takes all remaining words.
        recipe: Whether it names a recipe to read; the command then has the option ``--trust-code`` too.
        only: The field of the option or argument that this one belongs to: without it, it is refused as having no
            effect.
        without: Fields of options with which it has no effect and is refused.
    """

    metavar: str | None = None
    name: str | None = None
    hidden: bool = False
    required: bool = False
    argument: bool = False
    repeatable: bool = False
    parse: Callable[[str], Any] | None = None
    choices: Callable[[], Mapping[str, str]] | None = None
    path: Literal["local", "file", "folder", "weights"] | None = None
    recipe: bool = False
    only: str | None = None
    without: tuple[str, ...] = ()


# Fields that many commands share.
RecipeName = Annotated[str, Shape(metavar="RECIPE", recipe=True)]
RecipeOrRun = Annotated[str, Shape(metavar="RECIPE|RUN", recipe=True)]
Overrides = Annotated[tuple[str, ...], Shape(metavar="[KEY=VALUE]...", argument=True)]


Runs = Annotated[tuple[str, ...], Shape(metavar="RUN... [KEY=VALUE]...", argument=True, path="local", recipe=True)]
Target = Annotated[Path, Shape(path="weights")]  # a run directory, a checkpoint, a safetensors file or a hub folder

Weights = Annotated[
    Literal["auto", "model", "ema"], "Which set of weights; auto takes the moving average where there is one."
]
Best = Annotated[bool, "Use the best checkpoint of a run directory instead of the newest."]
TrustCode = Annotated[bool, "Let the recipe inside a run or a weights file import code (package.module:factory)."]
Processes = Annotated[
    int | None,
    Ge(1),
    Shape(metavar="N"),
    "Start N ranks on this machine (default: one per GPU, 1 on a CPU). Run it alone, not under torchrun or srun.",
]
JoinedProcesses = Annotated[
    int | None,
    Ge(1),
    Shape(metavar="N"),
    "Start N ranks on this machine (default: one per GPU, 1 on a CPU). Leave it out under torchrun or Slurm.",
]
Scratch = Annotated[Path | None, Shape(hidden=True)]  # a directory that all ranks share, made by the launcher
Output = Annotated[Path | None, Shape(metavar="DIR"), "Write the result there as JSON and as a page (HTML)."]


def command(
    name: str,
    *,
    runs: str | None = None,
    files: tuple[str, ...] = (),
    commands: tuple[type[Any], ...] = (),
    group: str = "",
    place: int = sys.maxsize,
) -> Callable[[_T], _T]:
    """Declare a dataclass as a command; or a click command, or a function that returns one.

    The first line of its docstring, or the short help of a click command, is its line in `paceline --help`.

    Args:
        name: The words after ``paceline``.
        runs: The function that implements it, as ``module:function``; None for the dataclass's method ``run``.
        files: Files it writes into ``output``, if not ``NAME.json`` and ``NAME.html``; its result then has
            ``write(folder)``.
        commands: Subcommands of a group; the class then has only the docstring.
        group: The heading it is listed under, if an entry point refers to it; by default, that of other packages.
        place: Its position under the heading, from 0; by default, after the commands with a position.
    """

    def declare(kind: Any) -> Any:
        kind.__paceline_command__ = name
        kind.__paceline_runs__ = runs
        kind.__paceline_commands__ = commands
        kind.__paceline_group__ = group
        kind.__paceline_place__ = place
        kind.__paceline_files__ = files or (f"{name}.json", f"{name}.html")
        return kind

    return declare
