"""Compute a stretch of a run again, with the trainer, the recipe and the processes that the run had."""

from __future__ import annotations

import json
import math
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import torch

from paceline.checkpoint.manifest import verify as verify_checkpoint
from paceline.checkpoint.store import CheckpointStore, checkpoint_name
from paceline.command import Log
from paceline.errors import CheckpointError, LaunchError, RunDirectoryError
from paceline.parsing.units import Duration, format_seconds
from paceline.plugins.references import is_code_trusted
from paceline.recipe.load import OWN_LOOP, differences, load_recipe, to_yaml
from paceline.recipe.running import Profile
from paceline.records.environment import file_digest, folder_of
from paceline.records.reader import read_environment, read_events, read_identity, read_json, read_recipe
from paceline.records.run_directory import RunDirectory
from paceline.trainer.listeners import TRACE_VARIABLE
from paceline.trainer.programs import REPLAY_VARIABLE
from paceline.trainer.run_dir_checks import fixed_differences
from paceline_advisor import Json, frozen
from paceline_advisor.apply import with_values
from paceline_advisor.launches import CommandProcess, last_step, said
from paceline_advisor.replay.compare import (
    FirstDifference,
    FoundDifference,
    Tolerance,
    compare_ledgers,
    compare_outcomes,
    compare_records,
    compare_states,
    first_state_difference,
)
from paceline_advisor.replay.points import Point, Stretch, copy_as_of
from paceline_advisor.replay.trace import Trace, read_trace

_POLL_SECONDS = 0.1
_STOPPED = 75
_CAPABILITIES = ("DEFAULT", "AVX2", "AVX512")
# Facts of the plan about the data that a run which is computed again must share.
_SAME_DATA = {"task": "task", "digest": "data", "content_digest": "data's content", "teacher": "teacher"}
_SAME_DATA |= {"contents": "samples", "objects": "objects"}  # of a program

# What only writes for people: none of it changes a number. What is logged and when does, so it stays.
_QUIET: Mapping[str, Any] = {
    "checkpoint.every": None,
    "telemetry.trackers": (),
    "telemetry.mlperf": False,
    "telemetry.report": False,
    "telemetry.profile": Profile(),
}

Progress = Callable[[int], None]
"""Told how many global batches of a stretch are done."""


class NotReplayedError(Exception):
    """A stretch could not be computed again here; the message says why."""


@frozen
class StretchOutcome:
    """A stretch that was computed again.

    Attributes:
        stretch: The stretch.
        difference: The first difference; None if there is none.
        tolerance: The tolerance that was used, since bits differ; None if they do not, or must not.
        unknown: Why it could not be computed again; empty if it was.
        seconds: How long it took.
    """

    stretch: Stretch
    difference: FirstDifference | None = None
    tolerance: Tolerance | None = None
    unknown: str = ""
    seconds: float = 0.0

    def to_json(self) -> Json:
        """Return it as one JSON object; ``equal`` is null if it could not be computed again."""
        ends = {"from": self.stretch.begin.step, "to": self.stretch.end.step}
        return {**ends, "equal": None if self.unknown else self.difference is None}


@frozen
class Engine:
    """Computes stretches of one run again.

    Attributes:
        run: The run.
        folder: The folder that it was started in, if it exists.
        tolerance: The largest relative difference of a tensor; 0 to measure it, None for equal bits.
        capability: The processor's vector instructions that torch used, if other than here.
        program: The command of the user's program that trains it; None for a recipe that says all.
    """

    run: RunDirectory
    folder: Path | None
    tolerance: float | None = None
    capability: str | None = None
    program: Sequence[str] | None = None

    @classmethod
    def of(cls, run: RunDirectory, tolerance: float | None = None) -> Self:
        """Return the engine for a run.

        Raises:
            NotReplayedError: If its program cannot be run again as it was.
        """
        environment = read_environment(run)
        return cls(
            run=run,
            folder=folder_of(environment),
            tolerance=tolerance,
            capability=environment.get("cpu_capability"),
            program=_program(run, environment),
        )

    def replay(self, stretch: Stretch, progress: Progress) -> StretchOutcome:
        """Compute a stretch again in a temporary directory, and compare it."""
        started = time.perf_counter()
        with _scratch() as scratch:
            try:
                for point in (stretch.begin, stretch.end):
                    if point.path is not None:
                        verify_checkpoint(point.path)
                again = self._train(stretch, scratch, progress)
                difference, tolerance = self._compare(stretch, again, scratch)
            except (NotReplayedError, LaunchError) as error:
                return StretchOutcome(stretch=stretch, unknown=str(error), seconds=time.perf_counter() - started)
            except (CheckpointError, RunDirectoryError) as error:
                difference, tolerance = _whole(stretch, "files", str(error)), None
        seconds = time.perf_counter() - started
        return StretchOutcome(stretch=stretch, difference=difference, tolerance=tolerance, seconds=seconds)

    def _check_same(self, again: RunDirectory, stretch: Stretch) -> None:
        """Check that what was computed again had the run's data, processes and, of a program, its objects and recipe.

        Raises:
            NotReplayedError: If not.
        """
        trained = max(CheckpointStore(again.checkpoints).steps(), default=0) > stretch.begin.step
        if self.program is not None and not trained:
            raise NotReplayedError(f"{stretch} cannot be computed again here: its program ended without training")
        before, now = ({**plan.pop("data", {}), **plan} for plan in map(read_json, (self.run.plan, again.plan)))
        if self.program is not None:
            count = stretch.end.facts.get("world_size", before["world_size"])
            if now["world_size"] != count:
                raise NotReplayedError(
                    f"{stretch} cannot be computed again here: it had {count} processes, and its program starts "
                    f"{now['world_size']}"
                )
            if changed := fixed_differences(stretch.end.recipe(self.run), load_recipe(again.root).recipe):
                raise NotReplayedError(
                    f"{stretch} cannot be computed again here: its program trains another recipe: {changed}"
                )
        for key, name in _SAME_DATA.items():
            if key in before and before[key] != now.get(key):
                was = f"its {name} was {before[key]}, and here it would be {now.get(key)}"
                raise NotReplayedError(f"{stretch} cannot be computed again here: {was}")

    def trace(self, stretch: Stretch, progress: Progress, detailed: range) -> tuple[Trace, str]:
        """Compute a stretch again, and note digests of what each step computes.

        Args:
            stretch: The stretch; its end need not have a checkpoint.
            progress: Told how many global batches are done.
            detailed: The positions to note in detail.

        Returns:
            The notes, and how what the run recorded differs from what was computed; empty if it does not.

        Raises:
            NotReplayedError: If it cannot be computed again here.
        """
        with _scratch() as scratch:
            setting = json.dumps([str(scratch), detailed.start, detailed.stop - 1])
            again = self._train(stretch, scratch, progress, {TRACE_VARIABLE: setting})
            records = compare_records(self.run, again, stretch.begin.position, stretch.end.position, None, shared=True)
            made, saved = (
                each / checkpoint_name(stretch.end.step) for each in (again.checkpoints, self.run.checkpoints)
            )
            state = first_state_difference(saved, made) if saved.is_dir() and made.is_dir() else None
            found = records or state
            return read_trace(scratch), found.cause if found else ""

    # Train

    def _train(
        self, stretch: Stretch, scratch: Path, progress: Progress, variables: Mapping[str, str] = MappingProxyType({})
    ) -> RunDirectory:
        own, recipe = stretch.end.recipe(self.run), with_values(stretch.end.recipe(self.run).without_mirror(), _QUIET)
        plan, conditions = read_json(self.run.plan), stretch.end.state("clock").get("conditions", {})
        threads = conditions.get("threads_per_process") or plan.get("threads_per_process")
        if threads and plan.get("device") == "cpu":
            recipe = with_values(recipe, {"parallel.threads": threads})
            variables = {**variables, **({"OMP_NUM_THREADS": str(threads)} if self.program else {})}
        if self.capability is not None and _can_limit(self.capability):
            variables = {"ATEN_CPU_CAPABILITY": self.capability.lower(), **variables}
        begin, again = stretch.begin, RunDirectory(scratch / "run")
        if begin.path is not None:
            copy_as_of(self.run, begin, again.root, steps=[begin.step], place=_symlink)
        launches = list(self._launches(stretch))
        for number, (world_size, total, end) in enumerate(launches):
            changed: dict[str, Any] = {"train.until": Duration(end, "steps") if end < total else None}
            if total != launches[-1][1]:  # the run was made longer later, and the checkpoint has the later recipe
                changed["train.duration"] = Duration(total, "steps")
            source = scratch / "recipe.yaml"
            source.write_text(to_yaml(with_values(recipe, changed)), encoding="utf-8")
            if begin.path is not None:
                shutil.copyfile(source, again.recipe)
            command = ["train", str(source), "--run-dir", str(again.root), "--processes", str(world_size)]
            log, options = scratch / f"launch-{number}", dict[str, Any](folder=self.folder, variables=variables)
            if self.program is not None:
                keys = {key: new for key, (_, new) in differences(own, with_values(recipe, changed)).items()}
                setting = json.dumps([getattr(read_identity(self.run), "id", ""), str(again.root), keys])
                options["variables"] = {**variables, REPLAY_VARIABLE: setting}
                command, options["program"] = [], self.program
            with CommandProcess(command, log, limit_seconds=math.inf, **options) as launch:
                while launch.process.poll() is None:
                    time.sleep(_POLL_SECONDS)
                    progress(max(0, last_step(again.root) - stretch.begin.step))
                code = launch.wait()
            if code not in (0, _STOPPED):
                why = said(launch) or launch.err.strip().rpartition("\n")[2] or f"exit code {code}"
                raise NotReplayedError(f"{stretch} cannot be computed again here: {why}")
        self._check_same(again, stretch)
        return again

    def _launches(self, stretch: Stretch) -> Iterator[tuple[int, int, int]]:
        """Yield the launches of the run that took these steps: processes, length of the run, and last position."""
        begin, end = stretch.begin.position, stretch.end.position
        total = int(read_json(self.run.plan).get("total_steps", end))
        saved = stretch.end.facts.get("world_size")
        launches = list[tuple[Any, ...]]()  # first position, processes, length
        for event in read_events(self.run.events, kinds=("start",)) if self.run.events.is_file() else ():
            launch: Any = tuple(event.get(key) for key in ("position", "world_size", "total_steps"))
            if all(type(each) is int for each in launch) and min(launch[1:]) > 0:
                launches = [*(each for each in launches if each[0] < launch[0]), launch]
        firsts = [each for each in launches if each[0] < end]
        if not firsts or firsts[0][0] > begin or (type(saved) is int and firsts[-1][1] != saved):
            yield int(saved or 1), total, end
            return
        for (first, world_size, length), after in zip(firsts, [*firsts[1:], (end, 0, 0)], strict=True):
            if after[0] > max(first, begin):
                yield world_size, max(length, after[0]), after[0]

    # Compare

    def _compare(
        self, stretch: Stretch, again: RunDirectory, scratch: Path
    ) -> tuple[FirstDifference | None, Tolerance | None]:
        found = self._first_difference(stretch, again, None)
        if found is None or self.tolerance is None:
            return found, None
        tolerance = Tolerance(largest=self.tolerance) if self.tolerance else self._measured(stretch, again, scratch)
        return self._first_difference(stretch, again, tolerance), tolerance

    def _measured(self, stretch: Stretch, again: RunDirectory, scratch: Path) -> Tolerance:
        """Compute a stretch once more with narrower vectors, which round otherwise."""
        end = CheckpointStore(again.checkpoints).steps()[-1:]
        if not end or read_json(self.run.plan).get("device") != "cpu":
            return Tolerance.chosen(stretch.batches)
        is_wide = torch.backends.cpu.get_cpu_capability() == _CAPABILITIES[-1]
        aten, onednn = ("avx2", "AVX2") if is_wide else ("default", "SSE41")
        (scratch / "narrow").mkdir()
        variables = {"ATEN_CPU_CAPABILITY": aten, "ONEDNN_MAX_CPU_ISA": onednn}
        narrow = self._train(stretch, scratch / "narrow", lambda _: None, variables)
        return Tolerance.measured(*(each.checkpoints / checkpoint_name(end[0]) for each in (again, narrow)))

    def _first_difference(
        self, stretch: Stretch, again: RunDirectory, tolerance: Tolerance | None
    ) -> FirstDifference | None:
        begin, end, recorded = stretch.begin, stretch.end, stretch.end.path
        assert recorded is not None  # only the start of a run has none
        newest = CheckpointStore(again.checkpoints).steps()[-1:]
        made = again.checkpoints / checkpoint_name(newest[0] if newest else end.step)
        if newest and Point.of(made).position != end.position:
            return _whole(stretch, "progress", f"{stretch}: computed again, the run ends after step {newest[0]}")
        state = next(compare_states(recorded, made, tolerance), None)
        record = compare_records(self.run, again, begin.position, end.position, tolerance)
        ledger = compare_ledgers(self.run, again, begin.position, end.position)
        at = partial_difference(stretch)
        if ledger is not None and (record is None or ledger[0] <= record.step):
            return at(ledger[0], FoundDifference(component="ledger", tensor="", cause=ledger[1]))
        if record is not None and state is None:
            only = "; the state is equal, so only the record differs"
            return at(record.step, FoundDifference(component="records", tensor=record.name, cause=record.cause + only))
        if state is not None:
            if record is None or record.step > end.step:
                return at(end.step, state)
            return at(record.step, replace(state, cause=f"{record.cause}; after it, {state.cause}"))
        return self._other_files(stretch, again) if tolerance is None else None

    def _other_files(self, stretch: Stretch, again: RunDirectory) -> FirstDifference | None:
        """Compare the outcome and the best evaluation, if this is the run's last stretch."""
        end, at = stretch.end, partial_difference(stretch)
        if end.step != max(CheckpointStore(self.run.checkpoints).steps()):
            return None
        best = CheckpointStore(self.run.checkpoints).read_best()
        if best is not None and best != end.best():
            cause = f"best.json says {best}, and the run's best evaluation is {end.best()}"
            return at(end.step, FoundDifference(component="best", tensor="best.json", cause=cause))
        if not self.run.summary.is_file():
            return None
        summary, new = read_json(self.run.summary), read_json(again.summary)
        if summary.get("status") == "failed" or summary.get("step") != end.step:
            return None
        if found := compare_outcomes(summary, new):
            return at(end.step, FoundDifference(component="summary", tensor=found[0], cause=found[1]))
        return None


def _program(run: RunDirectory, environment: Json) -> list[str] | None:
    """Return the command of the program that trains a run, whose files are as they were; None for a recipe.

    Raises:
        NotReplayedError: If it cannot be run again.
    """
    file, command = environment.get("program"), environment.get("command", "")
    if file is None and read_recipe(run).get("task") != OWN_LOOP:
        return None
    code = {Path(file or "").parent / name: digest for name, digest in environment.get("code", {}).items()}
    if file is None or Path(file) not in code or folder_of(environment) is None:
        raise NotReplayedError(
            "its objects, its task or paceline.Loop were given in Python, and not by a program whose file and folder "
            "are here to be run again"
        )
    for path, digest in code.items():
        if (path.suffix == ".py" or path == Path(file)) and (not path.is_file() or file_digest(path) != digest):
            raise NotReplayedError(f"the program has changed since it trained the run: {path}")
    if environment.get("earlier_runs"):  # it would compute that one, once the directory is gone that tells
        raise NotReplayedError("its program trains another run first; give each run its own program")
    words = shlex.split(command)
    if not any(_names(word, folder_of(environment), Path(file)) for word in words):
        raise NotReplayedError(f"the recorded command does not start the recorded program {file}: {command}")
    if not is_code_trusted():
        raise NotReplayedError(f"only a program of yours can repeat the steps, {command}; add --trust-code to run it")
    return words


def _names(word: str, folder: Path | None, program: Path) -> bool:
    """Whether a word of a command is a program's path, or its module after ``-m``."""
    module = program.parent if program.name == "__main__.py" else program.with_suffix("")
    is_module = word.isidentifier() or all(part.isidentifier() for part in word.split("."))
    return Path(folder or "", word) == program or (
        is_module and module.parts[-1 - word.count(".") :] == (*word.split("."),)
    )


def partial_difference(stretch: Stretch) -> Callable[[int, FoundDifference], FirstDifference]:
    """Return a function that makes a difference in a stretch from a step and what was found."""

    def make(step: int, found: FoundDifference) -> FirstDifference:
        return FirstDifference(
            begin=stretch.begin.step,
            end=stretch.end.step,
            step=step,
            component=found.component,
            tensor=found.tensor or None,
            index=found.index,
            ulps=found.ulps,
            cause=found.cause,
        )

    return make


def _whole(stretch: Stretch, component: str, cause: str) -> FirstDifference:
    return FirstDifference(begin=stretch.begin.step, end=stretch.end.step, step=None, component=component, cause=cause)


def _can_limit(capability: str) -> bool:
    """Whether torch can be limited here to a processor's vector instructions; without a check it would crash."""
    here = torch.backends.cpu.get_cpu_capability()
    return capability in _CAPABILITIES[:-1] and here in _CAPABILITIES[_CAPABILITIES.index(capability) + 1 :]


def _symlink(source: Path, target: Path) -> None:
    target.symlink_to(source.resolve())


@contextmanager
def _scratch() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="paceline-verify-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def progress_bar(total: int, log: Log) -> Iterator[Callable[[int, str], None]]:
    """Show how many of all steps are done, with the time left: a bar on a terminal, otherwise a line a stretch.

    Gives a function of the steps done, and of a sentence about a stretch that has ended.
    """
    started = time.perf_counter()

    def left(done: int) -> str:
        spent = time.perf_counter() - started
        return f", about {format_seconds(spent * (total - done) / done)} left" if 0 < done < total else ""

    if not sys.stderr.isatty():
        yield lambda done, said: log(f"{said}{left(done)}") if said else None
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("steps", total=total)

        def show(done: int, said: str) -> None:
            bars.update(task, completed=done)
            if said:
                bars.console.print(said, markup=False)

        yield show
