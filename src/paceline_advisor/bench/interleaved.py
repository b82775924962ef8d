"""Step times of several recipes, measured in interleaved rounds, because a machine's speed drifts.

Each variant is a separate run in its own processes, opened as by ``paceline train``: the same task, data,
loader processes, optimizer and records. They take turns, a block of steps each, while the others wait; every second
round in the other order. What slows the machine for a while slows all of them, and cancels in the ratios of a round.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, Literal, TypeVar

from paceline.distributed.local_launch import rank_variables
from paceline.machine import available_cores
from paceline.metrics.intervals import Interval, paired_ratio
from paceline.processes import Child, ProcessGroup, without_rank
from paceline.recipe.load import to_yaml
from paceline.recipe.running import Profile
from paceline.recipe.schema import Recipe
from paceline.telemetry.meter import WARMUP_STEPS
from paceline.units import Duration, TimeSpan
from paceline_advisor.bench.interleaved_process import Orders, command_line
from paceline_advisor.launches import check_alone

T = TypeVar("T")
Part = Literal["together", "compute", "data"]
PARTS: tuple[Part, ...] = ("together", "compute", "data")

# Longer than anyone measures: the end of a run is no part of a step.
_STEPS = 10_000_000
_OPEN_SECONDS = 900.0
_BLOCK_SECONDS = 600.0
_PATIENCE = TimeSpan(60, "minutes")
_MOST_WARM_STEPS = 10_000
_LOOK_SECONDS = 0.2
_LEAVE_SECONDS = 10.0
# The others of a world learn late that one has failed, and say then only that they miss it.
_CAUSE_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One thing to measure.

    Attributes:
        recipe: What is trained.
        part: ``together``: training as it is. ``compute``: the first step's batches again and again, so that nothing
            waits for data. ``data``: the stream of batches, with nothing done with them.
        processes: How many train together on this machine.
    """

    recipe: Recipe
    part: Part = "together"
    processes: int = 1


@dataclass(frozen=True, kw_only=True)
class Round:
    """One block of steps.

    Attributes:
        steps: Optimizer steps.
        samples: Training samples they used, over all processes.
        seconds: From the first one's begin to the last one's end on the device, on the process that took longest.
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
class Measured:
    """What was measured of one variant.

    Attributes:
        variant: What it was.
        facts: What its run said of itself: device, precision, batch sizes, back-end, loader processes, ...
        rounds: Its blocks, in order. The n-th of each variant belongs to the same round.
        warm_up_steps: Steps before the first round, and those that begin each turn; none of them is timed.
        warm_up_seconds: How long those before the first round took.
        peak_memory_bytes: The most that a process held on its device, or of main memory on a CPU, at any time.
        trouble: Why there are no more rounds; empty if nothing went wrong.
        out_of_memory: Whether memory ran out.
        alone: Whether it was measured alone, because memory ran out with the others.
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
        """Over all processes, by round."""
        return [each.samples / each.seconds for each in self.rounds]

    @property
    def seconds_per_sample(self) -> list[float]:
        """Likewise: what is compared, as an epoch's last step may be smaller than the others."""
        return [each.seconds / each.samples for each in self.rounds]

    @property
    def data_wait_fraction(self) -> float | None:
        """Share of the time that the slowest process waited for data, in [0, 1]; None without rounds."""
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
        """Energy of the devices for each training sample; None if it cannot be read."""
        used = [each.joules for each in self.rounds]
        if not used or any(each is None for each in used):
            return None
        return sum(each or 0.0 for each in used) / sum(each.samples for each in self.rounds)

    def slower_than(self, other: Measured) -> Interval | None:
        """Seconds per sample over the other's, round by round; None if they share no round."""
        shared = min(len(self.rounds), len(other.rounds))
        if not shared or self.alone != other.alone:
            return None
        return paired_ratio(self.seconds_per_sample[:shared], other.seconds_per_sample[:shared])


def run_bursts(
    variants: Mapping[str, Recipe | Variant],
    *,
    rounds: int = 8,
    block_seconds: float = 2.0,
    processes: int = 1,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Measured]:
    """Measure variants that take turns; a variant that fails is reported, and the others go on.

    Nothing is written but in a temporary directory, which is gone afterwards, also after a kill. Before its blocks each
    variant warms up for about as long as a block takes. Each turn begins with untimed steps that use up what loader
    processes made ready while the variant waited.

    Args:
        variants: What to measure, by name; a plain recipe is trained unchanged by ``processes`` processes.
        rounds: Turns of each variant, at least 1; four or more for an interval that says something.
        block_seconds: About how long a turn is timed; a turn is one step at least.
        processes: Of each variant that is given as a recipe.
        say: Receives progress messages.

    Returns:
        One entry for each variant, in the order given.

    Raises:
        LaunchError: If this process is itself one of several.
    """
    check_alone("measuring in turns")
    asked = {
        name: each if isinstance(each, Variant) else Variant(recipe=each, processes=processes)
        for name, each in variants.items()
    }
    found = _in_turns(asked, rounds, block_seconds, say)
    for name, each in found.items():
        if each.out_of_memory and len(asked) > 1:
            say(f"{name}: once more alone, because memory ran out with the others")
            alone = _in_turns({name: asked[name]}, rounds, block_seconds, say)
            found[name] = replace(alone[name], alone=True)
    return found


class MemberError(Exception):
    """A variant cannot continue.

    Attributes:
        out_of_memory: Whether memory ran out.
    """

    def __init__(self, message: str, *, out_of_memory: bool = False) -> None:
        super().__init__(message)
        self.out_of_memory = out_of_memory


class _Player:
    """One variant that takes turns: its processes, and what they measured.

    What cannot be started, fails or gives no answer is noted as its trouble, and its processes are ended.

    Args:
        variant: What is measured.
        scratch: A folder of all variants, to be removed if this process cannot do it any more.
        index: Among the variants.
        block_seconds: About how long a turn is timed.
    """

    def __init__(self, variant: Variant, scratch: Path, index: int, block_seconds: float) -> None:
        self.measured = Measured(variant=variant)
        self._block_seconds, self._steps = block_seconds, 1
        self._group = ProcessGroup()
        self._ranks: list[tuple[Child, Connection[Any, Any]]] = []
        self._scratch, self._folder = scratch, scratch / str(index)

    def start(self) -> None:
        """Start its processes, which open the run."""
        folder, variant = self._folder, self.measured.variant
        temporary = folder / "t"  # a short name: sockets of loader processes lie in it, whose paths have 108 bytes
        meeting = folder / "m"
        for each in (folder, temporary, meeting):
            each.mkdir()
        recipe = folder / "recipe.yaml"
        recipe.write_text(to_yaml(for_bursts(variant.recipe)), encoding="utf-8")
        run_dir, scratch = str(folder / "run"), str(self._scratch)
        orders = partial(
            Orders, recipe=str(recipe), run_dir=run_dir, scratch=scratch, part=variant.part, parent=os.getpid()
        )
        ours, count, cores = without_rank(os.environ), variant.processes, available_cores()
        for rank in range(count):
            of_rank = rank_variables(rank, count, meeting, cores=cores) if count > 1 else {}
            environment = {**ours, "TMPDIR": str(temporary), **of_rank}
            errors = folder / f"errors-{rank}"
            mine, theirs = Pipe()
            with theirs:
                number = theirs.fileno()
                try:
                    child = self._group.start(
                        command_line(orders(turns=number)),
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=errors,
                        stderr=errors,
                        pass_fds=(number,),
                    )
                except OSError as error:
                    mine.close()
                    raise MemberError(f"a process cannot be started ({error.strerror})") from error
            self._ranks.append((child, mine))

    def attempt(self, act: Callable[[], None]) -> None:
        """Do something unless the variant has failed."""
        if self.measured.trouble:
            return
        try:
            act()
        except MemberError as error:
            self.measured.trouble, self.measured.out_of_memory = str(error), error.out_of_memory
            self.kill()

    def open(self) -> None:
        """Wait until all its processes stand before their first step."""
        self.measured.facts = self._answers(_OPEN_SECONDS)[0]

    def warm_up(self) -> None:
        """Take the first steps, and find how many make a block."""
        measured, steps = self.measured, 1
        while True:
            block = self._turn(0, steps)
            measured.warm_up_steps += steps
            measured.warm_up_seconds += block.seconds
            if measured.warm_up_steps > WARMUP_STEPS and measured.warm_up_seconds >= self._block_seconds:
                break
            # The first steps are slow, and say little of how many there is time for.
            left = max(0.0, self._block_seconds - measured.warm_up_seconds) / block.step_seconds
            steps = WARMUP_STEPS if measured.warm_up_steps == 1 else max(1, min(int(left) + 1, _MOST_WARM_STEPS))
        self._steps = max(1, round(self._block_seconds / block.step_seconds))

    def play(self) -> None:
        """Take one turn."""
        facts, part = self.measured.facts, self.measured.variant.part
        # Batches that may lie ready after a pause, and one for caches that others have filled.
        held = 1 if part == "compute" else int(facts["workers"] or 0) * int(facts["prefetch"]) + 1
        self.measured.rounds.append(self._turn(min(held, self._steps), self._steps))

    def leave(self) -> None:
        """Let its processes exit normally, and check that they do."""
        self._grant(0, 0)
        self._group.wait(_LEAVE_SECONDS, after_failure=_LEAVE_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End all its processes, with their loader processes."""
        self._group.kill()
        for _, turns in self._ranks:
            turns.close()
        self._ranks = []

    def _grant(self, lead: int, steps: int) -> None:
        for _, turns in self._ranks:
            with contextlib.suppress(OSError):  # its end is told where its answer is waited for
                turns.send({"lead": lead, "steps": steps})

    def _turn(self, lead: int, steps: int) -> Round:
        """Take steps that are not timed, and then some that are; return what the slowest process measured."""
        self._grant(lead, steps)
        # What takes longer than this does not come back.
        answer = of_all(self._answers(_BLOCK_SECONDS + 20 * self._block_seconds))
        self.measured.peak_memory_bytes = answer.pop("peak_memory_bytes")
        return Round(**answer)

    def _answers(self, limit_seconds: float) -> list[dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + limit_seconds
        while len(found) < len(self._ranks):
            wait([turns for index, (_, turns) in enumerate(self._ranks) if index not in found], _LOOK_SECONDS)
            for index, (child, turns) in enumerate(self._ranks):
                if index in found:
                    continue
                ended = child.code is not None
                answer = _answer(turns)
                if answer is not None:
                    found[index] = answer
                if ended if answer is None else "failed" in answer:
                    raise self._failure(found)
            if time.monotonic() > deadline:
                raise MemberError(f"it did not answer within {limit_seconds:.0f} s")
        return [found[index] for index in range(len(self._ranks))]

    def _failure(self, found: Mapping[int, dict[str, Any]]) -> MemberError:
        """The cause: want of memory before anything else, and what a process says before its mere end."""
        deadline = time.monotonic() + (_CAUSE_SECONDS if len(self._ranks) > 1 else 0.0)
        said: list[dict[str, Any]] = [each for each in found.values() if "failed" in each]
        while time.monotonic() < deadline:
            answers = [_answer(turns) for _, turns in self._ranks]
            said += [each for each in answers if each is not None and "failed" in each]
            time.sleep(_LOOK_SECONDS / 4)
        ended = [child for child, _ in self._ranks if child.code is not None]
        short = [each for each in said if each["out_of_memory"]]
        killed = [child for child in ended if (child.code or 0) < 0]
        if killed and not short:
            return MemberError(killed[0].ending, out_of_memory=killed[0].code == -signal.SIGKILL)
        if told := [*short, *said]:
            return MemberError(told[0]["failed"], out_of_memory=told[0]["out_of_memory"])
        return MemberError(ended[0].ending if ended else "it ended early")


def _answer(turns: Connection[Any, Any]) -> dict[str, Any] | None:
    """What a process says, if it has said something."""
    with contextlib.suppress(EOFError, OSError):
        if turns.poll():
            found: dict[str, Any] = turns.recv()
            return found
    return None


def _in_turns(
    variants: Mapping[str, Variant], rounds: int, block_seconds: float, say: Callable[[str], None]
) -> dict[str, Measured]:
    with ExitStack() as held:
        scratch = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="paceline-b")))
        players: dict[str, _Player] = {}
        for index, (name, variant) in enumerate(variants.items()):
            players[name] = _Player(variant, scratch, index, block_seconds)
            held.callback(players[name].kill)
        for each in players.values():
            each.attempt(each.start)
        say(f"opening {len(players)} run{'s' * (len(players) > 1)}")
        for each in players.values():
            each.attempt(each.open)
        for name, each in players.items():
            each.attempt(each.warm_up)
            found = each.measured
            warm = f"warm after {found.warm_up_steps} steps, {found.warm_up_seconds:.1f} s"
            say(f"{name}: {found.trouble or warm}")
        for number in range(rounds):
            if all(each.measured.trouble for each in players.values()):
                break
            say(f"round {number + 1} of {rounds}")
            for each in in_order(list(players.values()), number):
                each.attempt(each.play)
        for each in players.values():
            each.leave()
        return {name: each.measured for name, each in players.items()}


def in_order(players: Sequence[T], number: int) -> Sequence[T]:
    """Return the order of turns in a round: reversed in every second one, so that drift favours no variant."""
    return players if number % 2 == 0 else players[::-1]


def for_bursts(recipe: Recipe) -> Recipe:
    """The recipe as it is measured: training alone, which neither ends nor stops for anything else."""
    timeout = recipe.parallel.timeout
    return replace(
        recipe,
        train=replace(recipe.train, duration=Duration(_STEPS, "steps"), until=None),
        evaluate=replace(recipe.evaluate, every=None, patience=None),
        checkpoint=replace(recipe.checkpoint, every=None, keep_best=False),
        parallel=replace(recipe.parallel, timeout=max(timeout, _PATIENCE, key=lambda each: each.seconds)),
        telemetry=replace(recipe.telemetry, profile=Profile(), mlperf=False),
    )


def of_all(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One answer for a block of steps that several processes took, each of which measured itself."""
    # A step is done when the last one has done it; where nothing is exchanged, as with `data`, they are not as fast.
    found = dict(max(answers, key=lambda each: float(each["seconds"])))
    peaks = [each["peak_memory_bytes"] for each in answers if each["peak_memory_bytes"] is not None]
    # Processes on one machine's processors read one counter; those with a GPU each, as many.
    used = {each["energy_counter"]: each["joules"] for each in answers}
    del found["energy_counter"]
    known = [each for each in used.values() if each is not None]
    return {
        **found,
        "peak_memory_bytes": max(peaks, default=None),
        "joules": sum(known) if len(known) == len(used) else None,
    }
