"""Disturbed runs of a drill, their recovery, and the comparison with the undisturbed run."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from paceline.errors import PacelineError, TrainingError
from paceline.records.reader import read_events, read_json, strip_timings
from paceline.records.run_directory import RunDirectory
from paceline_advisor import Json, frozen
from paceline_advisor.launches import CommandProcess, OverdueError, last_step, said

_COMPARED = ("status", "step", "epoch", "samples", "weights_sha256", "ema_sha256", "metrics", "ledger")
_ATTEMPTS = 3
# Ranks whose launcher is gone end after their step; a save and an evaluation may be in progress.
_ALONE_SECONDS = 60.0


class SkippedError(Exception):
    """This fault cannot be injected here; the message says why."""


@frozen
class RestartOptions:
    """How the run is started again; by default as before."""

    processes: int | None = None
    overrides: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(kw_only=True)
class FaultedRun:
    """What a fault did to a run.

    Attributes:
        run_dir: The run.
        step: The last recorded step when it ended, or when it was disturbed if it continued.
        exit_code: Exit code of the disturbed launch; negative after a signal.
        message: Its message, in one line.
        objections: The problems found.
        seconds_to_recover: Time until it reached ``step`` again; None before.
        steps_again: Steps that were repeated; None before.
    """

    run_dir: Path
    step: int
    exit_code: int
    message: str
    objections: list[str] = field(default_factory=list)
    seconds_to_recover: float | None = None
    steps_again: int | None = None


@frozen
class DrillContext:
    """Settings for disturbed runs of one recipe.

    Attributes:
        recipe: The argument of ``paceline train``.
        overrides: Its overrides, including those that shorten the run.
        processes: Ranks of each launch.
        steps: Length of the run.
        every: Steps between two checkpoints.
        scratch: Folder for all files.
        limit_seconds: Time limit of a launch.
    """

    recipe: str
    overrides: tuple[str, ...]
    processes: int
    steps: int
    every: int
    scratch: Path
    limit_seconds: float

    @property
    def undisturbed(self) -> Path:
        """The undisturbed run."""
        return self.scratch / "undisturbed"

    def begin(self, run_dir: Path, restart: RestartOptions | None = None) -> CommandProcess:
        """Start the command; in the same directory, it is identical each time."""
        restart = restart or RestartOptions()
        processes = restart.processes or self.processes
        arguments = ["train", self.recipe, *self.overrides, *restart.overrides, "--run-dir", str(run_dir)]
        arguments += ["--processes", str(processes)]
        log = run_dir.with_name(f"{run_dir.name}-{time.monotonic_ns()}")
        return CommandProcess(arguments, log, limit_seconds=self.limit_seconds, variables=restart.variables)

    def check(self) -> None:
        """Plan the run, so that a mistake in the recipe or its data is reported before anything is trained.

        Raises:
            PacelineError: If the plan is refused, as the run would be.
        """
        # In a separate process: a plan may occupy a device that the runs need exclusively.
        arguments = ["train", self.recipe, *self.overrides, "--processes", str(self.processes), "--plan-only"]
        with CommandProcess(arguments, self.scratch / "plan", limit_seconds=self.limit_seconds) as launch:
            try:
                code = launch.wait()
            except OverdueError as error:
                raise TrainingError(f"{error}; it was only being planned.") from None
            if code == PacelineError.exit_code:
                raise PacelineError(said(launch))
            if code:
                raise TrainingError(f"the run cannot be planned (exit code {code}): {said(launch)}")

    def train_undisturbed(self, run_dir: Path) -> None:
        """Train undisturbed.

        Raises:
            PacelineError: If the run is refused; there is then nothing to compare with.
            TrainingError: If it fails.
        """
        with self.begin(run_dir) as launch:
            try:
                code = launch.wait()
            except OverdueError as error:
                raise TrainingError(f"{error}; it was not disturbed. A drill needs a shorter run: --steps.") from None
            if code:
                kind = PacelineError if code == PacelineError.exit_code else TrainingError
                raise kind(f"the run fails without a fault (exit code {code}): {said(launch)}")

    def disturb(
        self,
        name: str,
        inject: Callable[[CommandProcess, Path], None],
        *,
        at: float = 1 / 3,
        make: Callable[[Path], None] = Path.mkdir,
        survives: bool = False,
        restart: RestartOptions | None = None,
    ) -> FaultedRun:
        """Start a run, inject the fault at a given progress, and wait for all its processes to end.

        Args:
            name: Name of the run.
            inject: Injects the fault; it may wait for another condition.
            at: Time of the fault, as a fraction of the steps.
            make: Creates the run directory.
            survives: Whether the run continues to its end, so that its end does not show when the fault occurred.
            restart: How it is started, if not as usual.

        Raises:
            SkippedError: If the run ended too early several times.
        """
        for attempt in range(_ATTEMPTS):
            run_dir = self.scratch / (name if not attempt else f"{name}-{attempt + 1}")
            make(run_dir)
            with self.begin(run_dir, restart) as launch:
                was_reached = launch.wait_until(lambda: last_step(run_dir) >= at * self.steps)  # noqa: B023
                was_reached = was_reached and launch.process.poll() is None
                if was_reached:
                    inject(launch, run_dir)
                injected_at = last_step(run_dir)
                code = launch.wait()
                left_running = launch.wait_alone(_ALONE_SECONDS)
                # A signal takes effect a few steps later; one too close to the end shows nothing.
                if was_reached and (code or survives or injected_at <= self.steps - max(4, self.every)):
                    newest = FaultedRun(run_dir=run_dir, step=last_step(run_dir), exit_code=code, message=said(launch))
                    if left_running:
                        newest.objections.append(f"{left_running} processes were left running")
                    return newest
                if code:
                    raise TrainingError(f"the run failed before the fault (exit code {code}): {said(launch)}")
        raise SkippedError(f"the run ended before the fault, {_ATTEMPTS} times; give more --steps")

    def killed(self, name: str) -> FaultedRun:
        """Return a copy of a run that was killed after two thirds of its steps, to be corrupted."""
        source = self.scratch / "killed"
        if not source.exists():
            self.disturb("killed-first", lambda launch, _: launch.kill(), at=2 / 3)
            newest = max(self.scratch.glob("killed-first*/events.jsonl"), key=lambda path: path.stat().st_mtime)
            shutil.copytree(newest.parent, source, symlinks=True)
        run_dir = self.scratch / name
        shutil.copytree(source, run_dir, symlinks=True)
        return FaultedRun(
            run_dir=run_dir, step=last_step(run_dir), exit_code=-signal.SIGKILL, message="ended by SIGKILL"
        )

    def recover(self, newest: FaultedRun, restart: RestartOptions | None = None) -> None:
        """Run the same command again, to the end; record how long it took and what was repeated."""
        before = resumes(newest.run_dir)
        with self.begin(newest.run_dir, restart) as launch:
            launch.wait_until(lambda: len(resumes(newest.run_dir)) > len(before))
            launch.wait_until(lambda: last_step(newest.run_dir) >= newest.step)
            newest.seconds_to_recover = time.monotonic() - launch.begun
            code = launch.wait()
            if code:
                newest.objections.append(f"the same command again ended with exit code {code}: {said(launch)}")
        after = resumes(newest.run_dir)
        newest.steps_again = max(0, newest.step - (after[-1] if len(after) > len(before) else 0))

    def lost(self, run_dir: Path) -> list[str]:
        """Return differences of a recovered run from the undisturbed one; empty if there are none."""
        expected = RunDirectory(self.undisturbed)
        newest = RunDirectory(run_dir)
        if not newest.summary.is_file():
            return ["summary.json"]
        expected_summary, summary = read_json(expected.summary), read_json(newest.summary)
        lost = [key for key in _COMPARED if summary[key] != expected_summary[key]]
        lost += [
            f"{kind} records"
            for kind in ("step", "evaluation")
            if _records(newest.events, kind) != _records(expected.events, kind)
        ]
        return lost + audit_problems(run_dir)


def resumes(run_dir: Path) -> list[int]:
    """Return the steps that a run resumed from, in order."""
    events = run_dir / "events.jsonl"
    if not events.exists():
        return []
    return [int(event["step"]) for event in read_events(events, kinds={"resume"})]


def _records(events: Path, kind: str) -> list[Json]:
    return [strip_timings(event) for event in read_events(events, kinds={kind})]


def audit_problems(run_dir: Path) -> list[str]:
    """Return the audit's objections, from the command that a user would run."""
    command = [sys.executable, "-P", "-m", "paceline", "audit", str(run_dir), "--json"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode not in (0, 1) or not process.stdout:
        return [f"audit: {process.stderr.strip()}"]
    return [f"audit: {objection}" for objection in json.loads(process.stdout)["objections"]]
