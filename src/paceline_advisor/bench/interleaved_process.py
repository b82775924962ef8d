"""One process of a variant: opens the run as training does, and takes steps on request.

``python -m paceline_advisor.bench.interleaved_process SETTINGS-AS-JSON``. Each message on its connection grants some
steps, and is answered with their measurement. The process ends when granted none. The settings are:

* ``recipe``, ``run_dir``: the recipe file and the run directory;
* ``part``: ``together``, ``compute`` or ``data``;
* ``parent``, ``turns``: the process that grants turns, and the file descriptor of the connection to it;
* ``scratch``: the folder to remove if the parent has died.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from paceline.data.batch import Batch
from paceline.data.image.feed_rates import remembered
from paceline.data.order import StepGeometry
from paceline.errors import PacelineError
from paceline.host.world import World
from paceline.recipe.load import load_recipe
from paceline.telemetry.clock import peak_memory_bytes
from paceline.telemetry.display import Display
from paceline.trainer.loop import fit
from paceline.trainer.run_views import ProbedRun
from paceline.trainer.step import micro_batches
from paceline.trainer.subject import Options
from paceline.trainer.train import opened_run
from paceline_advisor import Json, picked
from paceline_advisor.bench.energy import EnergyCounter
from paceline_advisor.forwarding import PassesOn

_LOOK_SECONDS = 0.2
_TRIES = 50


class _Finished(BaseException):
    """The parent grants no more turns; not an Exception, so that nothing catches it as one."""


class _TurnClock(Display):
    """Replaces the progress display: it is called after each step, and so can time blocks and wait for turns."""

    def __init__(self, run: ProbedRun, turns: Connection[Any, Any], *, repeats_first: bool) -> None:
        self._run, self._turns = run, turns
        self._repeats_first = repeats_first
        self._energy = EnergyCounter(run.device)
        self._untimed = self._steps = 0
        self._start_time = 0.0
        self._position = 0
        self._phases: dict[str, float] = {}
        self._joules: float | None = None

    def wait(self) -> None:
        """Wait for the next turn."""
        try:
            granted = self._turns.recv()
        except (EOFError, OSError):
            # The parent is gone: the thread that watches it removes everything, and ends this process.
            threading.Event().wait()
        self._untimed, self._steps = granted["lead"], granted["steps"]
        if not self._steps:
            raise _Finished
        if not self._untimed:
            self._start_block()

    def advance(self, step: int) -> None:
        """Count a step; at the end of the turn, report the result and wait for the next turn."""
        if self._untimed:
            self._untimed -= 1
            if not self._untimed:
                # Time for settling and for the energy counter does not belong to the first step.
                with self._run.clock.paused():
                    self._start_block()
            return
        self._steps -= 1
        if not self._steps:
            # The run's clock continues with the next turn.
            with self._run.clock.paused():
                self._turns.send(self._measured())
                self.wait()

    def _start_block(self) -> None:
        self._synchronise()
        self._position = self._run.progress.position
        self._phases = self._phase_seconds()
        self._joules = self._energy.joules()
        self._start_time = time.perf_counter()

    def _measured(self) -> Json:
        self._synchronise()
        seconds = time.perf_counter() - self._start_time
        joules = self._energy.joules()
        run, plan = self._run, self._run.plan
        steps = run.progress.position - self._position
        full_steps = steps * plan.step_samples(0)
        samples = plan.samples_before(run.progress.position) - plan.samples_before(self._position)
        return {
            "steps": steps,
            "samples": full_steps if self._repeats_first else samples,
            "seconds": seconds,
            "phases": {name: (now - self._phases[name]) / steps for name, now in self._phase_seconds().items()},
            "joules": None if joules is None or self._joules is None else joules - self._joules,
            "energy_counter": self._energy.identity,
            "peak_memory_bytes": peak_memory_bytes(run.device.type),
        }

    def opened(self) -> None:
        """Report that the run is open, with its facts."""
        plan = self._run.plan
        self._turns.send(
            {
                **picked(plan, "device", "device_name", "precision", "micro_batch_size", "threads_per_process"),
                **picked(plan, "parameters", "channels_last", "compile"),
                "backend": plan.data.get("backend"),
                "workers": plan.data.get("workers", 0),
                "workers_asked": self._run.recipe.data.workers,
                "workers_reason": plan.reasons.get("data.workers", ""),
                "workers_measured": remembered(self._run.recipe, self._run.world) is not None,
                "prefetch": self._run.recipe.data.prefetch,
                "energy_of": self._energy.of,
                "no_energy": self._energy.unavailable_reason,
            }
        )

    def _phase_seconds(self) -> dict[str, float]:
        """Return the time in each phase since the first steps, which the clock excludes as warm-up."""
        return dict(self._run.clock.state_dict()["rated_phase_seconds"])

    def _synchronise(self) -> None:
        if self._run.device.type != "cpu":
            torch.get_device_module(self._run.device).synchronize()


class _TurnPipeline(PassesOn):
    """The run's pipeline, which waits for the first turn; for ``compute`` it repeats the first step's batches forever.

    Args:
        pipeline: The run's pipeline.
        turns: Grants turns.
        repeats_first: Whether to repeat the first step's batches.
    """

    def __init__(self, pipeline: Any, turns: _TurnClock, *, repeats_first: bool) -> None:
        super().__init__(pipeline)
        self._turns, self._repeats_first = turns, repeats_first

    def train_batches(self, geometry: StepGeometry, first: int, last: int, world: World) -> Iterator[Batch]:
        """The micro-batches for the loop."""
        self._turns.wait()
        stream = self._inner.train_batches(geometry, first, last, world)
        if not self._repeats_first:
            yield from stream
            return
        batches: list[Batch] = []
        while not batches or not batches[-1].slice.is_last:
            batches.append(next(stream))
        step = first
        while True:
            for batch in batches:
                yield replace(batch, slice=replace(batch.slice, step=step))
            step += 1


def _exit_with(parent: int, scratch: Path) -> None:
    """End with the parent, even if it is killed, and remove its files if it cannot."""
    while os.getppid() == parent:
        time.sleep(_LOOK_SECONDS)
    _remove_folder(scratch)
    os._exit(1)


def _remove_folder(scratch: Path) -> None:
    """Remove a folder that this process, or another one about to exit, may still write to."""
    for _ in range(_TRIES):
        shutil.rmtree(scratch, ignore_errors=True)
        if not scratch.exists():
            return
        time.sleep(_LOOK_SECONDS)


def _take_turns(settings: Json, connection: Connection[Any, Any]) -> None:
    repeats_first = settings["part"] == "compute"
    with opened_run(load_recipe(settings["recipe"]), Options(run_dir=Path(settings["run_dir"]))) as run:
        # Only now: a process forked next to a thread inherits its locks.
        threading.Thread(target=_exit_with, args=(settings["parent"], Path(settings["scratch"])), daemon=True).start()
        turns = _TurnClock(run, connection, repeats_first=repeats_first)
        run.pipeline = _TurnPipeline(run.pipeline, turns, repeats_first=repeats_first)
        run.display = turns
        turns.opened()
        if settings["part"] != "data":
            # Batches read ahead would look free.
            run.previews.clear()
            fit(run)
            return
        # Only the stream of batches, which are discarded.
        batches = run.train_batches()
        run.clock.start()
        while True:
            for _ in micro_batches(run, batches):
                pass
            run.progress.advance(stepped=True)
            run.clock.end_step(run.plan.step_samples(run.progress.position - 1), run.load)
            run.display.advance(run.progress.step)


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    message = str(error).lower()
    return isinstance(error, RuntimeError) and ("out of memory" in message or "can't allocate memory" in message)


def _message(error: BaseException) -> str:
    if isinstance(error, PacelineError):
        return str(error)
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'it gives no reason'}"


def main(argv: list[str]) -> int:
    """Take turns until there are no more; returns the exit code."""
    settings = json.loads(argv[0])
    connection = Connection(settings["turns"])
    try:
        _take_turns(settings, connection)
    except _Finished:
        return 0
    except Exception as error:  # noqa: BLE001  # whatever it is, the parent reports it of this variant
        if os.getppid() != settings["parent"]:
            _remove_folder(Path(settings["scratch"]))
            return 1
        connection.send({"failed": _message(error), "out_of_memory": _is_out_of_memory(error)})
        return 1
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    # Loaders and process groups may end at any time; there is nothing left worth waiting for.
    os._exit(code)
