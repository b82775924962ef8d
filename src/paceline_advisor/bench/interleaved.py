"""Step times of several recipes, measured in interleaved rounds, because a machine's speed drifts.

Each variant is a separate run in its own processes, opened as by ``paceline train``: the same task, data, loader
processes, optimizer and records. They take turns, one block of steps each, while the others wait; every second round is
in reverse order. A temporary slowdown of the machine affects all of them, and cancels in the ratios of a round.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, Literal

from paceline.command import Log
from paceline.distributed.local_launch import rank_variables
from paceline.errors import RecipeError
from paceline.host.machine import available_cores
from paceline.host.processes import Child, ProcessGroup, without_rank_variables
from paceline.metrics.intervals import Interval, paired_ratio
from paceline.parsing.units import Duration, TimeSpan
from paceline.plan.batching import micro_batch_size
from paceline.recipe.load import to_yaml
from paceline.recipe.running import Profile
from paceline.recipe.schema import Recipe
from paceline.telemetry.meter import WARMUP_STEPS
from paceline_advisor import Json, frozen
from paceline_advisor.apply import with_values
from paceline_advisor.launches import check_alone

Part = Literal["together", "compute", "data"]

# Longer than any measurement: the end of a run is not part of a step.
_STEPS = 10_000_000
_OPEN_SECONDS = 900.0
_BLOCK_SECONDS = 600.0
_PATIENCE = TimeSpan(60, "minutes")
_MOST_WARM_UP_STEPS = 10_000
_POLL_SECONDS = 0.2
_EXIT_SECONDS = 10.0
# The other ranks of a world notice a failure late, and then only report that one is missing.
_CAUSE_SECONDS = 1.0


@frozen
class Variant:
    """One thing to measure.

    Attributes:
        recipe: The recipe to train.
        part: ``together``: normal training. ``compute``: the first step's batches repeatedly, so that nothing waits for
            data. ``data``: only the stream of batches, which are discarded.
        processes: Number of processes that train together on this machine.
    """

    recipe: Recipe
    part: Part = "together"
    processes: int = 1


@frozen
class Round:
    """One block of steps.

    Attributes:
        steps: Optimizer steps.
        samples: Training samples they used, over all processes.
        seconds: From the start of the first step to the end of the last on the device, on the slowest process.
        phases: Mean seconds per step in each phase of the step clock, on that process.
        joules: Energy that the devices of all processes used meanwhile; None if it cannot be read.
    """

    steps: int
    samples: int
    seconds: float
    phases: Mapping[str, float]
    joules: float | None = None

    @property
    def step_seconds(self) -> float:
        """Mean seconds per step."""
        return self.seconds / self.steps


@dataclass(kw_only=True)
class Measurement:
    """Measurements of one variant.

    Attributes:
        variant: The variant.
        facts: Facts reported by its run: device, precision, batch sizes, back-end, loader processes, ...
        rounds: Its blocks, in order. The n-th of each variant belongs to the same round.
        warm_up_steps: Untimed steps before the first round and at the start of each turn.
        warm_up_seconds: Duration of the steps before the first round.
        peak_memory_bytes: Peak memory of a process on its device, or main memory on a CPU.
        trouble: Why the rounds ended early; empty if nothing went wrong.
        out_of_memory: Whether memory ran out.
        alone: Whether it was measured alone, because memory ran out next to the others.
    """

    variant: Variant
    facts: Mapping[str, Any] = field(default_factory=dict)
    rounds: list[Round] = field(default_factory=list)
    warm_up_steps: int = 0
    warm_up_seconds: float = 0.0
    peak_memory_bytes: int | None = None
    trouble: str = ""
    out_of_memory: bool = False
    alone: bool = False

    @property
    def step_seconds(self) -> list[float]:
        """Mean seconds per step, by round."""
        return [each.step_seconds for each in self.rounds]

    @property
    def samples_per_second(self) -> list[float]:
        """Samples per second over all processes, by round."""
        return [each.samples / each.seconds for each in self.rounds]

    @property
    def seconds_per_sample(self) -> list[float]:
        """Seconds per sample over all processes, by round: compared, as an epoch's last step may be smaller."""
        return [each.seconds / each.samples for each in self.rounds]

    @property
    def data_wait_fraction(self) -> float | None:
        """Fraction of the time that the slowest process waited for data, in [0, 1]; None without rounds."""
        waited = sum(each.phases["data_wait"] * each.steps for each in self.rounds)
        return waited / sum(each.seconds for each in self.rounds) if self.rounds else None

    @property
    def phases(self) -> dict[str, float]:
        """Mean seconds per step in each phase, over all rounds."""
        steps = sum(each.steps for each in self.rounds)
        names = self.rounds[0].phases if self.rounds else ()
        return {name: sum(each.phases[name] * each.steps for each in self.rounds) / steps for name in names}

    @property
    def joules_per_sample(self) -> float | None:
        """Energy of the devices per training sample; None if it cannot be read."""
        joules = [each.joules for each in self.rounds]
        if not joules or any(each is None for each in joules):
            return None
        return sum(each or 0.0 for each in joules) / sum(each.samples for each in self.rounds)

    def slower_than(self, other: Measurement) -> Interval | None:
        """Return seconds per sample relative to another variant, round by round; None if they share no round."""
        shared = min(len(self.rounds), len(other.rounds))
        if not shared or self.alone != other.alone:
            return None
        return paired_ratio(self.seconds_per_sample[:shared], other.seconds_per_sample[:shared])


def run_interleaved(
    variants: Mapping[str, Recipe | Variant],
    *,
    rounds: int = 8,
    block_seconds: float = 2.0,
    processes: int = 1,
    log: Log = lambda _: None,
) -> dict[str, Measurement]:
    """Measure interleaved variants; a failed variant is reported, and the others continue.

    Files are written only to a temporary directory, which is removed afterwards, even after a kill. Before its blocks
    each variant warms up for about as long as a block takes. Each turn starts with untimed steps that use up the
    batches that loader processes prepared while the variant waited.

    Args:
        variants: What to measure, by name; a plain recipe is trained unchanged by ``processes`` processes.
        rounds: Turns of each variant, at least 1; a useful interval needs four or more.
        block_seconds: Approximate timed duration of a turn, which is at least one step.
        processes: Number of processes of each variant given as a recipe.
        log: Receives progress messages.

    Returns:
        One entry for each variant, in the order given.

    Raises:
        LaunchError: If this process is itself one of several.
    """
    check_alone("measuring in turns")
    requested = {
        name: each if isinstance(each, Variant) else Variant(recipe=each, processes=processes)
        for name, each in variants.items()
    }
    measurements = _run_in_turns(requested, rounds, block_seconds, log)
    for name, each in measurements.items():
        if each.out_of_memory and len(requested) > 1:
            log(f"{name}: once more alone, because memory ran out with the others")
            alone = _run_in_turns({name: requested[name]}, rounds, block_seconds, log)
            measurements[name] = replace(alone[name], alone=True)
    return measurements


class MemberError(Exception):
    """A variant cannot continue.

    Attributes:
        out_of_memory: Whether memory ran out.
    """

    def __init__(self, message: str, *, out_of_memory: bool = False) -> None:
        super().__init__(message)
        self.out_of_memory = out_of_memory


class _VariantRunner:
    """One interleaved variant: its processes and their measurements.

    If it cannot be started, fails or does not respond, the reason is stored as its trouble, and its processes are
    ended.

    Args:
        variant: The variant to measure.
        scratch: A folder of all variants, which the child processes remove if this process cannot.
        index: Index among the variants.
        block_seconds: Approximate timed duration of a turn.
    """

    def __init__(self, variant: Variant, scratch: Path, index: int, block_seconds: float) -> None:
        self.measured = Measurement(variant=variant)
        self._block_seconds, self._steps = block_seconds, 1
        self._group = ProcessGroup()
        self._ranks: list[tuple[Child, Connection[Any, Any]]] = []
        self._scratch, self._folder = scratch, scratch / str(index)

    def start(self) -> None:
        """Start its processes, which open the run."""
        folder, variant = self._folder, self.measured.variant
        temporary = folder / "t"  # a short name: socket paths are limited to 108 bytes
        meeting = folder / "m"
        for each in (folder, temporary, meeting):
            each.mkdir()
        recipe = folder / "recipe.yaml"
        timed = recipe_for_timing(without_growth(variant.recipe, variant.processes))
        recipe.write_text(to_yaml(timed), encoding="utf-8")
        run_dir, scratch = str(folder / "run"), str(self._scratch)
        settings = {"recipe": str(recipe), "run_dir": run_dir, "scratch": scratch, "part": variant.part}
        program = [sys.executable, "-P", "-m", "paceline_advisor.bench.interleaved_process"]
        base, count, cores = without_rank_variables(os.environ), variant.processes, available_cores()
        for rank in range(count):
            rank_environment = rank_variables(rank, count, meeting, cores=cores) if count > 1 else {}
            environment = {**base, "TMPDIR": str(temporary), **rank_environment}
            errors = folder / f"errors-{rank}"
            connection, child_end = Pipe()
            with child_end:
                descriptor = child_end.fileno()
                try:
                    child = self._group.start(
                        [*program, json.dumps({**settings, "parent": os.getpid(), "turns": descriptor})],
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=errors,
                        stderr=errors,
                        pass_fds=(descriptor,),
                    )
                except OSError as error:
                    connection.close()
                    raise MemberError(f"a process cannot be started ({error.strerror})") from error
            self._ranks.append((child, connection))

    def guarded(self, action: Callable[[], None]) -> None:
        """Call a function unless the variant has failed."""
        if self.measured.trouble:
            return
        try:
            action()
        except (MemberError, RecipeError) as error:
            self.measured.trouble = str(error)
            self.measured.out_of_memory = isinstance(error, MemberError) and error.out_of_memory
            self.kill()

    def open(self) -> None:
        """Wait until all its processes are ready for their first step."""
        self.measured.facts = self._answers(_OPEN_SECONDS)[0]

    def warm_up(self) -> None:
        """Take the first steps, and determine how many make a block."""
        measured, steps = self.measured, 1
        while True:
            block = self._turn(0, steps)
            measured.warm_up_steps += steps
            measured.warm_up_seconds += block.seconds
            if measured.warm_up_steps > WARMUP_STEPS and measured.warm_up_seconds >= self._block_seconds:
                break
            # The first steps are slow, and say little about how many fit into a block.
            remaining = max(0.0, self._block_seconds - measured.warm_up_seconds) / block.step_seconds
            steps = (
                WARMUP_STEPS if measured.warm_up_steps == 1 else max(1, min(int(remaining) + 1, _MOST_WARM_UP_STEPS))
            )
        self._steps = max(1, round(self._block_seconds / block.step_seconds))

    def take_turn(self) -> None:
        """Take one turn."""
        facts, part = self.measured.facts, self.measured.variant.part
        # Batches that may be ready after a pause, and one to refill caches evicted by others.
        buffered = 1 if part == "compute" else int(facts["workers"] or 0) * int(facts["prefetch"]) + 1
        self.measured.rounds.append(self._turn(min(buffered, self._steps), self._steps))

    def finish(self) -> None:
        """Let its processes exit normally, and check that they do."""
        self._grant(0, 0)
        self._group.wait(_EXIT_SECONDS, after_failure=_EXIT_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End all its processes, with their loader processes."""
        self._group.kill()
        for _, turns in self._ranks:
            turns.close()
        self._ranks = []

    def _grant(self, untimed: int, steps: int) -> None:
        for _, turns in self._ranks:
            with contextlib.suppress(OSError):  # its end is detected where its answer is awaited
                turns.send({"lead": untimed, "steps": steps})

    def _turn(self, untimed: int, steps: int) -> Round:
        """Take untimed steps and then timed ones; return the measurement of the slowest process."""
        self._grant(untimed, steps)
        # A process that takes longer than this will not respond.
        answer = of_all(self._answers(_BLOCK_SECONDS + 20 * self._block_seconds))
        self.measured.peak_memory_bytes = answer.pop("peak_memory_bytes")
        return Round(**answer)

    def _answers(self, limit_seconds: float) -> list[Json]:
        answers: dict[int, Json] = {}
        deadline = time.monotonic() + limit_seconds
        while len(answers) < len(self._ranks):
            wait([turns for index, (_, turns) in enumerate(self._ranks) if index not in answers], _POLL_SECONDS)
            for index, (child, turns) in enumerate(self._ranks):
                if index in answers:
                    continue
                has_exited = child.code is not None
                answer = _answer(turns)
                if answer is not None:
                    answers[index] = answer
                if has_exited if answer is None else "failed" in answer:
                    raise self._failure(answers)
            if time.monotonic() > deadline:
                raise MemberError(f"it did not answer within {limit_seconds:.0f} s")
        return [answers[index] for index in range(len(self._ranks))]

    def _failure(self, answers_so_far: Mapping[int, Json]) -> MemberError:
        """Return the cause: out of memory first, and a process's message before its mere exit."""
        deadline = time.monotonic() + (_CAUSE_SECONDS if len(self._ranks) > 1 else 0.0)
        failures: list[Json] = [each for each in answers_so_far.values() if "failed" in each]
        while time.monotonic() < deadline:
            answers = [_answer(turns) for _, turns in self._ranks]
            failures += [each for each in answers if each is not None and "failed" in each]
            time.sleep(_POLL_SECONDS / 4)
        exited = [child for child, _ in self._ranks if child.code is not None]
        out_of_memory = [each for each in failures if each["out_of_memory"]]
        killed = [child for child in exited if (child.code or 0) < 0]
        if killed and not out_of_memory:
            return MemberError(killed[0].exit_message, out_of_memory=killed[0].code == -signal.SIGKILL)
        if reported := [*out_of_memory, *failures]:
            return MemberError(reported[0]["failed"], out_of_memory=reported[0]["out_of_memory"])
        return MemberError(exited[0].exit_message if exited else "it ended early")


def _answer(turns: Connection[Any, Any]) -> Json | None:
    """Return the message of a process, if there is one."""
    with contextlib.suppress(EOFError, OSError):
        if turns.poll():
            found: Json = turns.recv()
            return found
    return None


def _run_in_turns(
    variants: Mapping[str, Variant], rounds: int, block_seconds: float, log: Log
) -> dict[str, Measurement]:
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-b")))
        runners: dict[str, _VariantRunner] = {}
        for index, (name, variant) in enumerate(variants.items()):
            runners[name] = _VariantRunner(variant, scratch, index, block_seconds)
            stack.callback(runners[name].kill)
        for each in runners.values():
            each.guarded(each.start)
        log(f"opening {len(runners)} run{'s' * (len(runners) > 1)}")
        for each in runners.values():
            each.guarded(each.open)
        for name, each in runners.items():
            each.guarded(each.warm_up)
            measurement = each.measured
            warm_up = f"warm after {measurement.warm_up_steps} steps, {measurement.warm_up_seconds:.1f} s"
            log(f"{name}: {measurement.trouble or warm_up}")
        for number in range(rounds):
            if all(each.measured.trouble for each in runners.values()):
                break
            log(f"round {number + 1} of {rounds}")
            for each in in_order(list(runners.values()), number):
                each.guarded(each.take_turn)
        for each in runners.values():
            each.finish()
        return {name: each.measured for name, each in runners.items()}


def in_order(runners: Sequence[Any], number: int) -> Sequence[Any]:
    """Return the order of turns in a round: reversed in every second one, so that drift favours no variant."""
    return runners[:: -1 if number % 2 else 1]


def recipe_for_timing(recipe: Recipe) -> Recipe:
    """Return the recipe to measure: training only, without stopping or pausing for anything else."""
    values = {
        "train.duration": Duration(_STEPS, "steps"),
        "train.until": None,
        "evaluate.every": None,
        "evaluate.patience": None,
        "checkpoint.every": None,
        "checkpoint.keep_best": False,
        "parallel.timeout": max(recipe.parallel.timeout, _PATIENCE, key=lambda each: each.seconds),
        "telemetry.profile": Profile(),
        "telemetry.mlperf": False,
    }
    return with_values(recipe, values)


def without_growth(recipe: Recipe, processes: int) -> Recipe:
    """Return the recipe with its first batch size only, in the micro-batches that it has together with the later sizes.

    Raises:
        RecipeError: If the processes cannot share the batch.
    """
    if not recipe.batch.growth:
        return recipe
    return with_values(recipe, {"batch.micro_size": micro_batch_size(recipe, processes), "batch.growth": {}})


def of_all(answers: Sequence[Mapping[str, Any]]) -> Json:
    """Combine the measurements of a block of steps that several processes took."""
    # A step is done when the last process has finished it; without an exchange, as with `data`, their speeds differ.
    slowest = dict(max(answers, key=lambda each: float(each["seconds"])))
    peaks = [each["peak_memory_bytes"] for each in answers if each["peak_memory_bytes"] is not None]
    # Processes on one machine's CPUs read one counter; processes with a GPU each read separate ones.
    joules_by_counter = {each["energy_counter"]: each["joules"] for each in answers}
    del slowest["energy_counter"]
    known = [each for each in joules_by_counter.values() if each is not None]
    return {
        **slowest,
        "peak_memory_bytes": max(peaks, default=None),
        "joules": sum(known) if len(known) == len(joules_by_counter) else None,
    }
