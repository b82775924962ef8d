"""Step times of several recipes, measured in turns, as the speed of a machine drifts.

Each variant is a run of its own in processes of its own, opened as ``paceline train`` opens it: the same task, data,
loader processes, optimizer and records. They take turns, a block of steps each, while the others wait; every second
round in the other order. What slows the machine for a while slows all of them, and cancels in the ratios of a round.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from paceline.metrics.intervals import Interval, paired_ratio, rate_interval
from paceline.recipe.load import to_yaml
from paceline.recipe.running import Profile
from paceline.recipe.schema import Recipe
from paceline.telemetry.meter import WARMUP_STEPS
from paceline.units import Duration, TimeSpan
from paceline_advisor.bench.interleaved_members import Member, MemberError
from paceline_advisor.launches import check_alone

Part = Literal["together", "compute", "data"]
PARTS: tuple[Part, ...] = ("together", "compute", "data")

# Longer than anyone measures: the end of a run is no part of a step.
_STEPS = 10_000_000
_OPEN_SECONDS = 900.0
_BLOCK_SECONDS = 600.0
_PATIENCE = TimeSpan(60, "minutes")
_MOST_WARM_STEPS = 10_000


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

    @property
    def samples_per_second(self) -> float:
        """Over all processes."""
        return self.samples / self.seconds


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
        out_of_memory: Whether that was for want of memory.
        alone: Whether it was measured by itself, as with the others there was not enough memory.
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
        return [each.samples_per_second for each in self.rounds]

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

    def throughput(self, *, confidence: float = 0.95) -> Interval | None:
        """Training samples per second, with its interval; None without rounds."""
        return rate_interval(self.seconds_per_sample, confidence=confidence) if self.rounds else None

    def slower_than(self, other: Measured, *, confidence: float = 0.95) -> Interval | None:
        """Seconds per sample over the other's, round by round; None if they share no round."""
        shared = min(len(self.rounds), len(other.rounds))
        if not shared or self.alone != other.alone:
            return None
        return paired_ratio(self.seconds_per_sample[:shared], other.seconds_per_sample[:shared], confidence=confidence)


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
        variants: What to measure, by name; a recipe alone is trained as it is by ``processes`` processes.
        rounds: Turns of each variant, at least 1; four or more for an interval that says something.
        block_seconds: About how long a turn is timed; a turn is one step at least.
        processes: Of each variant that is given as a recipe.
        say: Told what goes on.

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
            say(f"{name}: once more by itself, as with the others there was not enough memory")
            alone = _in_turns({name: asked[name]}, rounds, block_seconds, say)
            found[name] = replace(alone[name], alone=True)
    return found


class _Player:
    """One variant that takes turns."""

    def __init__(self, variant: Variant, scratch: Path, index: int, block_seconds: float) -> None:
        self.measured = Measured(variant=variant)
        self._block_seconds, self._steps = block_seconds, 1
        self._member: Member | None = None
        folder = scratch / str(index)
        folder.mkdir()
        recipe = folder / "recipe.yaml"
        recipe.write_text(to_yaml(for_bursts(variant.recipe)), encoding="utf-8")

        def start() -> None:
            self._member = Member(recipe, variant.part, processes=variant.processes, folder=folder, scratch=scratch)

        self.attempt(start)

    @property
    def member(self) -> Member:
        """Its processes, which were started."""
        assert self._member is not None
        return self._member

    def attempt(self, act: Callable[[], None]) -> None:
        """Do something unless the variant has failed; a failure is noted, and ends its processes."""
        if self.measured.trouble:
            return
        try:
            act()
        except MemberError as error:
            self.measured.trouble, self.measured.out_of_memory = str(error), error.out_of_memory
            self.kill()

    def kill(self) -> None:
        """End its processes, if there are any."""
        if self._member is not None:
            self._member.kill()

    def leave(self) -> None:
        """Let its processes end in order."""
        if self._member is not None:
            self._member.leave()

    def open(self) -> None:
        """Wait for its run."""
        self.measured.facts = self.member.opened(limit_seconds=_OPEN_SECONDS)

    def warm_up(self) -> None:
        """Take the first steps, and find out how many make a block."""
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

    def _turn(self, lead: int, steps: int) -> Round:
        # What takes longer than this does not come back.
        limit = _BLOCK_SECONDS + 20 * self._block_seconds
        answer = self.member.turn(lead=lead, steps=steps, limit_seconds=limit)
        self.measured.peak_memory_bytes = answer.pop("peak_memory_bytes")
        return Round(**answer)


def _in_turns(
    variants: Mapping[str, Variant], rounds: int, block_seconds: float, say: Callable[[str], None]
) -> dict[str, Measured]:
    with ExitStack() as held:
        scratch = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="paceline-b")))
        players: dict[str, _Player] = {}
        for index, (name, variant) in enumerate(variants.items()):
            players[name] = _Player(variant, scratch, index, block_seconds)
            held.callback(players[name].kill)
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
            # The last ones first in every second, so that a drift favours nobody.
            for each in list(players.values())[:: -1 if number % 2 else 1]:
                each.attempt(each.play)
        for each in players.values():
            each.leave()
        return {name: each.measured for name, each in players.items()}


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
