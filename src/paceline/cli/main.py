"""The command line: find the subcommand, load only that one, and turn errors into one sentence and an exit code."""

from __future__ import annotations

import atexit
import contextlib
import errno
import gc
import io
import itertools
import os
import select
import sys
import threading
from typing import Any

import click
from click.shell_completion import CompletionItem

from paceline.cli.commands import ALIASES, OPEN_GROUPS, command_of, listing, reference_of
from paceline.cli.output import EXIT_CODE, echo
from paceline.cli.streams import discard_output, final_exit_code, wrap_streams
from paceline.errors import PacelineError, did_you_mean
from paceline.host.system import address_space_limit
from paceline.parsing.units import format_bytes
from paceline.plugins.extras import missing_library
from paceline.plugins.loading import loading
from paceline.plugins.registry import INCOMPLETE, built_in
from paceline.version import __version__

_EVERYTHING = "paceline.everything"


class _LazyGroup(click.Group):
    """Imports a subcommand's module only when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for commands in listing(others=True).values() for name in commands]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name == "help":
            return _help
        if reference_of(cmd_name) is None:
            return None
        with loading():
            return command_of(cmd_name)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        lines = [each for commands in listing().values() for each in commands.items()]
        return [CompletionItem(name, help=line) for name, line in lines if name.startswith(incomplete)]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        args = [*ALIASES.get(args[0], args[:1]), *args[1:]]
        if args[0] != "help" and reference_of(args[0]) is None:
            names = self.list_commands(ctx)
            message = f"there is no command '{args[0]}'.{did_you_mean(args[0], names)} Commands: {', '.join(names)}."
            raise click.UsageError(message + f" {INCOMPLETE}." * (not built_in("commands")), ctx)
        return super().resolve_command(ctx, args)

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        try:
            return super().make_context(*args, **kwargs)
        except BrokenPipeError:  # `paceline --help | true`
            discard_output(sys.stdout)
            raise click.exceptions.Exit from None

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:  # for which click would return exit code 1, without a message
            poller = select.poll()
            poller.register(sys.stdout.fileno(), 0)
            if not any(events & (select.POLLERR | select.POLLHUP) for _, events in poller.poll(0)):
                raise RuntimeError("a process that this one wrote to is gone") from error
            # The reader of standard output has closed it (`| head`): nothing more can be printed.
            discard_output(sys.stdout)
            return int(ctx.meta.get(EXIT_CODE, 0))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        everything = ctx.meta.get(_EVERYTHING, False)
        groups = {heading: commands for heading, commands in listing(others=everything).items() if commands}
        for heading, commands in groups.items():
            if everything or heading in OPEN_GROUPS:
                with formatter.section(heading):
                    formatter.write_dl(list(commands.items()))
        if not everything:
            with formatter.section("Further commands, explained by `paceline help all`"):
                formatter.write_dl(
                    [(name, ", ".join(commands)) for name, commands in groups.items() if name not in OPEN_GROUPS]
                )


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="paceline")
def cli() -> None:
    """Train neural networks with PyTorch, on one CPU or many GPUs, from one recipe.

    Start with `paceline train digits`, or with your own images: `paceline train photos/`. Every command explains
    itself with --help.
    """


@click.command("help", context_settings={"ignore_unknown_options": True})
@click.argument("name", required=False, metavar="[all|COMMAND]")
@click.pass_context
def _help(context: click.Context, name: str | None) -> None:
    """Show the commands in their groups, all of them with `all`, or the help of one."""
    parent = context.parent
    assert parent is not None
    if name in (None, "all"):
        parent.meta[_EVERYTHING] = name == "all"
        echo(parent.get_help())
        return
    _, command, _ = cli.resolve_command(parent, [str(name)])
    assert command is not None
    with click.Context(command, info_name=command.name, parent=parent) as explained:
        echo(explained.get_help())


def main() -> None:
    """Run the command line and exit."""
    wrap_streams()
    code = final_exit_code(run(sys.argv[1:]))
    if (trackers := sys.modules.get("paceline.telemetry.async_tracker")) is not None:
        trackers.limit_exit(code)
    _end(code)


def _end(code: int) -> None:
    """End as an interpreter does: wait for threads, call the functions registered with atexit, write open files.

    Destructors of CUDA's libraries are left out where CUDA is not in use. They read so much of their
    files that this would be the peak memory of a small run on a CPU.
    """
    if (cuda := sys.modules.get("torch.cuda")) is None or cuda.is_initialized():
        sys.exit(code)
    threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001  # there is no public name
    atexit._run_exitfuncs()  # noqa: SLF001  # there is no public name
    for each in gc.get_objects():
        if issubclass(type(each), io.IOBase):
            with contextlib.suppress(Exception):  # closed, or read only
                each.flush()
    os._exit(final_exit_code(code))


def run(arguments: list[str]) -> int:
    """Run the command line and return its exit code: 0 done, 1 failed, 2 usage error, 75 stopped."""
    from paceline.distributed.local_launch import end_torchrun, follow_launcher, is_permanent_error, report_error

    follow_launcher(os.environ)
    try:
        os.getcwd()  # importing torch in a removed directory ends the process
        code = cli.main(arguments, prog_name="paceline", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        echo(error.format_message())
        return error.exit_code
    except click.ClickException as error:
        context = error.ctx if isinstance(error, click.UsageError) else None
        hint = f" See `{context.command_path} --help`." if context is not None else ""
        echo(f"paceline: {_recipe_key_hint(error, arguments) or error.format_message()}{hint}", err=True)
        end_torchrun(os.environ)
        return error.exit_code
    except click.Abort:
        return 130
    except Exception as error:  # noqa: BLE001  # the last place that can tell the user, or the launcher
        message = missing_library(error) or _machine_limit(error)
        code = report_error(PacelineError(message) if message else error, os.environ)
        if is_permanent_error(error):
            end_torchrun(os.environ)
    return code if isinstance(code, int) else 0


def _machine_limit(error: Exception) -> str:
    """Return a sentence for an error caused by this machine or a limit on this process; empty for any other error."""
    if isinstance(error, FileNotFoundError) and "temporary directory" in str(error):
        return f"{error.strerror}; set TMPDIR to a writable folder."
    if isinstance(error, FileNotFoundError) and error.filename is None and error.errno == errno.ENOENT:  # getcwd()
        return "the current directory was removed; change to one that exists."
    if getattr(error, "errno", None) in (errno.ENAMETOOLONG, errno.ELOOP) or "Symlink loop" in str(error):
        return f"{error}; give another path."
    if isinstance(error, OSError) and str(error.filename).startswith("/dev/shm/"):
        return f"/dev/shm, which processes share memory in: {error.strerror}; mount it writable, with more space."
    limit = address_space_limit()
    symptoms = ("failed to map segment", "can't allocate memory", "can't start new thread")
    if limit is not None and (isinstance(error, MemoryError) or any(symptom in str(error) for symptom in symptoms)):
        return (
            f"this process may use {format_bytes(limit)} of address space (ulimit -v), which is not enough ({error}); "
            "raise the limit."
        )
    is_fork = isinstance(error, BlockingIOError) and error.filename is None
    if is_fork or (isinstance(error, RuntimeError) and str(error) == "can't start new thread"):
        return f"{error}: raise the limit of processes and threads (ulimit -u, or the container's), or of memory."
    return ""


def _recipe_key_hint(error: click.ClickException, arguments: list[str]) -> str | None:
    """Return the reply to `--lr 0.1` where a recipe is changed: other trainers have options, recipes have keys."""
    if not isinstance(error, click.NoSuchOption) or error.ctx is None:
        return None
    if not any(parameter.name == "overrides" for parameter in error.ctx.command.params):
        return None
    from paceline.recipe.layers import format_override, keys_for
    from paceline.recipe.other_trainers import our_way
    from paceline.recipe.schema import Recipe

    if way := our_way(error.option_name):
        return f"No such option '{error.option_name}': {way}."
    value = _value_typed(error.option_name, arguments)
    examples = [f"{key}={value}" if value else format_override(Recipe(), key) for key in keys_for(error.option_name)]
    if not examples:
        return None
    return f"No such option '{error.option_name}': recipes are changed by KEY=VALUE, here {' or '.join(examples)}."


def _value_typed(option: str, arguments: list[str]) -> str:
    """Return the value given to an option, as `--lr 0.1` or `--lr=0.1`; empty without one."""
    words = [part for word in arguments for part in (word.split("=", 1) if word.startswith(f"{option}=") else [word])]
    value = next((following for word, following in itertools.pairwise(words) if word == option), "")
    if value.startswith("-"):
        return ""
    # A recipe's value has a unit: `--epochs 3` is "3 epochs".
    unit = next((unit for unit in ("epochs", "steps") if unit in option), "")
    return f'"{value} {unit}"' if unit and value.isdigit() else value
