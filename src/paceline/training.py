"""Training from Python: :func:`paceline.train`, the same code path as the command, including the report."""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import io
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from signal import Signals
from typing import IO, Any

from paceline.checkpoint.store import step_of
from paceline.distributed.environment import read_launch
from paceline.errors import RecipeError, StoppedError, TrainingError, without_frames
from paceline.host.processes import ProcessGroup, received_signals, without_rank_variables
from paceline.host.system import STOP_SIGNALS
from paceline.plugins.references import is_reference, trusting_code
from paceline.recipe.load import LoadedRecipe, Overrides, is_data, load_recipe, override_pairs, to_yaml
from paceline.records.reader import beyond_until
from paceline.records.run_directory import RunDirectory, default_run_directory, existing_run
from paceline.reports.html.page import report_at_the_end
from paceline.telemetry.display import BAR, BAR_VARIABLE, bar_of_cell, choose_display
from paceline.trainer.carried import CARRIED_VARIABLE, Carried
from paceline.trainer.listeners import Callbacks
from paceline.trainer.process_settings import restore_random_states, restore_torch_settings
from paceline.trainer.programs import recorded_program, requested_replay
from paceline.trainer.result import TrainResult
from paceline.trainer.run_dir_checks import has_trained
from paceline.trainer.subject import Options, TaskMaker
from paceline.trainer.train import train_recipe


@without_frames
def train(
    recipe: str | Path | None = None,
    *,
    overrides: Overrides = (),
    run_dir: str | Path | None = None,
    resume: str = "auto",
    task: TaskMaker | None = None,
    callbacks: Sequence[object] = (),
    processes: int = 1,
    quiet: bool = False,
) -> TrainResult:
    """Train a recipe, or resume the run in ``run_dir``.

    It joins the world of torchrun or Slurm, or else trains in this process. Signal handlers, the generators of Python,
    NumPy and torch, and torch's number of threads and settings of determinism and precision are restored afterwards.

    Args:
        recipe: A shipped recipe's name, the path of a YAML file, or your images: a folder of class folders or a table.
            By default, that of the run in ``run_dir``; for a new run of a custom task, all keys have their defaults.
        overrides: ``{"train.duration": "3 epochs"}`` or ``["train.duration=3 epochs"]``.
        run_dir: The run directory; by default a new one under ``runs/``.
        resume: ``auto``, ``never``, or the path of one of the run's checkpoints.
        task: A :class:`paceline.Task` subclass, or any function from a recipe to a task, instead of the one
            the recipe names.
        callbacks: Objects with any of ``on_step_end(step)``, ``on_evaluation(step, results)`` and
            ``on_checkpoint(step)``, called on every rank; a true return value stops the run.
        processes: Number of ranks to train in, on this machine. More than one run as separate processes, as with
            ``paceline train --processes``; the task and the callbacks are sent to them.
        quiet: Show no progress.

    Raises:
        PacelineError: For every mistake in the recipe, the data or the directory.
    """
    _check_arguments(processes=processes, run_dir=run_dir, resume=resume, callbacks=callbacks)
    if processes > 1 and read_launch(os.environ).world.world_size > 1:
        raise RecipeError(f"processes={processes}: this process is one of several already; leave processes out.")
    directory = None if run_dir is None else Path(os.path.expanduser(run_dir))
    if recipe is None and task is None and directory is None:
        raise RecipeError(
            "neither a recipe nor a task was given; name a recipe, for example paceline.train('digits'), or the "
            "run_dir of a run to continue."
        )
    if (replay := requested_replay(directory)) is not None:
        directory, overrides = replay[0], {**dict(override_pairs(overrides)), **replay[1]}
    run = None
    if recipe is None and directory is not None and (task is None or has_trained(RunDirectory(directory))):
        run = existing_run(directory, "that of a run to continue, or name a recipe")
        recipe = run.root
    options = Options(
        run_dir=directory,
        resume=os.path.expanduser(resume),
        display=None if quiet else choose_display(sys.stdout),
        task=task,
        callbacks=Callbacks(callbacks or ()),
        report=report_at_the_end,
    )
    with trusting_code():  # training a recipe runs the code it names
        if recipe is not None and is_data(recipe):
            from paceline.trainer.first_recipe import recipe_for_data

            log = (lambda line: None) if quiet else print
            recipe, overrides = recipe_for_data(str(recipe), overrides, options.run_dir, log)
        loaded = load_recipe(recipe, overrides)
    if recipe is None and inspect.isclass(task):
        loaded = replace(loaded, name=task.__name__)
    if run is not None and loaded.origins.get("train.until") != "override" and beyond_until(run):
        loaded = replace(loaded, recipe=replace(loaded.recipe, train=replace(loaded.recipe.train, until=None)))
    result = _train(loaded, options, processes, quiet=quiet)
    if replay is not None:
        raise SystemExit(0)
    if processes == 1 and result.learning and not quiet:
        with contextlib.suppress(OSError, ValueError, AttributeError):  # standard error may be full, closed or missing
            sys.stderr.write(f"paceline: warning: {result.learning}\n")
    return result


def _is_path(run_dir: Any) -> bool:
    if not isinstance(run_dir, str | os.PathLike):
        return run_dir is None
    name = os.fsencode(run_dir)
    return b"\0" not in name and all(len(each) < 256 for each in name.split(b"/"))


def _check_arguments(*, processes: Any, run_dir: Any, resume: Any, callbacks: Any) -> None:
    """Refuse arguments of the wrong kind.

    Raises:
        RecipeError: Naming the first.
    """
    is_checkpoint = isinstance(resume, str | os.PathLike) and (
        os.sep in str(resume) or resume in ("auto", "never") or step_of(Path(resume)) is not None
    )
    wrong: tuple[tuple[str, Any, bool, str], ...] = (
        ("processes", processes, type(processes) is int and processes > 0, "a whole number from 1"),
        ("run_dir", run_dir, _is_path(run_dir), "a path with names up to 255 bytes"),
        ("resume", resume, is_checkpoint, "'auto', 'never' or the path of a checkpoint, RUN/checkpoints/step-…"),
        ("callbacks", callbacks, callbacks is None or isinstance(callbacks, Sequence), "a list of objects"),
    )
    for key, value, is_right, rule in wrong:
        if not is_right:
            raise RecipeError(f"{key} is {value!r}; give {rule}.", key=key, value=value, rule=rule)


def _train(loaded: LoadedRecipe, options: Options, processes: int, *, quiet: bool) -> TrainResult:
    task, objects = options.task, loaded.recipe.objects.values()
    by_name = task is None or (objects and all(map(is_reference, objects)))  # what commands can import
    with contextlib.nullcontext() if by_name else recorded_program(read_launch(os.environ)):
        if processes > 1:
            return _train_in_processes(loaded, options, processes, quiet=quiet)
        with restore_torch_settings(), restore_random_states(None):
            return replace(train_recipe(loaded, options), make_task=task)


def _train_in_processes(loaded: LoadedRecipe, options: Options, processes: int, *, quiet: bool) -> TrainResult:
    """Train with ``paceline train --processes``, forward its output, and read the result from the run directory.

    The processes get the loaded recipe and its overrides once more, since they refuse those without effect, and the
    callbacks. A task in a module is named in the recipe, another one is carried.

    Raises:
        RecipeError: If something cannot be carried, or for a mistake that they found.
        StoppedError: If signals ended the run before it could save.
        TrainingError: If the run failed.
    """
    task, overrides = options.task, loaded.overrides
    name = f"{getattr(task, '__module__', '')}:{getattr(task, '__qualname__', '')}"
    if re.fullmatch(r"(?!__main__:)[\w.]+:\w+", name):
        task, overrides = None, (*overrides, f"task={name}")
    for notice in () if quiet else loaded.notices:
        sys.stdout.write(f"{notice}\n")
    directory = RunDirectory(options.run_dir or default_run_directory(loaded.name))
    earlier = directory.summary.read_bytes() if directory.summary.is_file() else b""
    is_main = threading.current_thread() is threading.main_thread()
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-")))
        signals = stack.enter_context(received_signals(STOP_SIGNALS)) if is_main else []
        group = stack.enter_context(ProcessGroup(success_codes=(0, StoppedError.exit_code), signals=signals))
        path = scratch / f"{loaded.name}.yaml"
        path.write_text(to_yaml(loaded.recipe), encoding="utf-8")
        environment = {**without_rank_variables(os.environ), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        if (show := bar_of_cell()) is not None:
            environment[BAR_VARIABLE] = "1"
        if task is not None or options.callbacks.observers:
            environment[CARRIED_VARIABLE] = str(scratch / "carried")
            Carried(task=task, callbacks=options.callbacks).write(scratch / "carried")
        arguments = [str(path), *overrides, "--processes", str(processes), "--run-dir", str(directory.root)]
        child = group.start(
            [sys.executable, "-P", "-m", "paceline", "train", *arguments, "--resume", options.resume],
            env=environment,
            stdout=subprocess.DEVNULL if quiet else subprocess.PIPE,
            stderr=scratch / "errors",
        )
        # In the cell's context, where its output is shown below it.
        call = partial(contextvars.copy_context().run, _forward_output, child.process.stdout, show)
        reader = threading.Thread(target=call, daemon=True)
        reader.start()
        group.wait()
        reader.join()
        stderr = (scratch / "errors").read_text(encoding="utf-8", errors="replace")
        if signals and (child.code not in group.success_codes or not directory.summary.is_file()):
            raise StoppedError(
                f"stopped by {Signals(signals[-1]).name} before the run could save; call train again with "
                f"run_dir='{directory.root}' to resume from its last checkpoint."
            )
        if child.code not in group.success_codes:
            failure = RecipeError if child.code == RecipeError.exit_code else TrainingError
            raise failure(stderr.strip().removeprefix("paceline: ") or child.exit_message)
        sys.stderr.write(stderr)  # warnings
    was_complete = directory.summary.read_bytes() == earlier
    return replace(TrainResult.of(directory.root), was_complete=was_complete, make_task=options.task)


def _forward_output(stream: IO[bytes] | None, show: Callable[[str], None] | None) -> None:
    """Print lines as they arrive, and show the bar: in a notebook, output that a process writes itself is not shown."""
    if stream is not None:
        with io.TextIOWrapper(stream, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                text, is_bar, page = line.partition(BAR)
                sys.stdout.write(text)
                if is_bar and show is not None:
                    show(page)
