"""Which process hangs, where, and since when, while all the others wait for it?

A process that waits in a collective knows only that it waits. So each process says every now and then, through the
store in which the group was formed, where it is. One that has not got any further for a while listens to the others;
and when nobody has, the one behind the others, or the one that is not heard of any more, is the one they wait for.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from torch.distributed import Store  # type: ignore[attr-defined]  # not in __all__

from paceline.distributed.local_launch import report_error
from paceline.errors import PacelineError, TrainingError
from paceline.units import format_seconds
from paceline.world import World

# Shares of the time that a collective may take: before it is over, so that the first word is not "timed out".
_OVERDUE, _LISTENING, _SILENT, _INTERVAL = 0.9, 0.4, 0.3, 0.025
_LONGEST_INTERVAL_SECONDS = 10.0
_LAST = 1_000_000
_NAMED = 8


class Pulse:
    """Where this process is: plain attributes that the loop writes and a thread reads; no locks, and next to no cost.

    Attributes:
        step: The step it is in, counted from 1.
        phase: The part of it.
        order: Which part; comparable between processes at the same step.
        ticks: Grows with everything that is got done.
    """

    __slots__ = ("order", "phase", "step", "ticks")

    def __init__(self) -> None:
        self.step, self.phase, self.order, self.ticks = 0, "start", 0, 0

    def begin_step(self, step: int) -> None:
        """A new step begins."""
        self.step, self.order = step, 0

    def enter(self, phase: str, *, last: bool = False) -> None:
        """Go on to another part.

        Args:
            phase: Its name.
            last: Whether it is the last one before processes meet; they may have come there by unequal ways.
        """
        self.phase = phase
        self.order = _LAST if last else self.order + 1
        self.ticks += 1

    def tick(self) -> None:
        """Something was got done within a part."""
        self.ticks += 1


@dataclass(frozen=True, kw_only=True)
class Sighting:
    """What a process said of itself.

    Attributes:
        serial: Grows each time; 0 if it has not said anything.
        seconds: Since when it was there.
    """

    rank: int
    host: str = "an unknown host"
    serial: int = 0
    step: int = 0
    phase: str = "start"
    order: int = 0
    ticks: int = -1
    seconds: float = 0.0

    @property
    def place(self) -> tuple[int, int]:
        """How far it is, for comparison."""
        return self.step, self.order

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}, in {self.phase} of step {self.step}"


@dataclass
class _Watched:
    """What is known of a process here, by this process's own clock."""

    last: Sighting
    heard_at: float
    ticked_at: float


def diagnose(sightings: Sequence[Sighting], silent: dict[int, float]) -> list[Sighting]:
    """The processes that the others wait for; empty if all are at the same place.

    Args:
        sightings: The last of each process, by rank.
        silent: Seconds for which some of them have not been heard of, by rank.
    """
    if silent:
        return [each for each in sightings if each.rank in silent]
    furthest_behind = min(each.place for each in sightings)
    behind = [each for each in sightings if each.place == furthest_behind]
    return behind if len(behind) < len(sightings) else []


class Watchdog:
    """A thread that ends this process, with a message that names the culprit, when the processes stand still.

    Args:
        pulse: Where this process is.
        world: Its place among the others.
        store: Where processes leave messages for one another; None in a world of one.
        timeout_seconds: How long they may wait for one another.
    """

    def __init__(self, pulse: Pulse, world: World, store: Store | None, *, timeout_seconds: float) -> None:
        self.pulse = pulse
        self._world = world
        self._store = store
        self._timeout = timeout_seconds
        self._interval = min(_LONGEST_INTERVAL_SECONDS, _INTERVAL * timeout_seconds)
        self._host = socket.gethostname()
        self._main = threading.get_ident()
        self._stopped = threading.Event()
        now = time.monotonic()
        self._known = [_Watched(Sighting(rank=rank), now, now) for rank in range(world.world_size)]
        self._serial = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch while training goes on; an error that is no message for the user gets a note of where it came up."""
        thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        now = time.monotonic()
        for each in self._known:
            each.heard_at = each.ticked_at = now
        if self._store is not None:
            thread.start()
        try:
            yield
        except Exception as error:
            if not isinstance(error, PacelineError):
                error.add_note(self._note())
            raise
        finally:
            self._stopped.set()
            if thread.is_alive():
                thread.join(self._interval)

    def _watch(self) -> None:
        assert self._store is not None
        try:
            while not self._stopped.wait(self._interval):
                self._say(self._store)
                if self._seconds_here() > _LISTENING * self._timeout:
                    self._listen(self._store)
                    if self._store.check(["alarm"]) or self._is_overdue():
                        self._end(self._store)
            self.pulse.enter("the end")
            self._say(self._store)
        except RuntimeError:
            # The store went with the process that kept it; the collectives fail by themselves.
            return

    def _seconds_here(self) -> float:
        """For how long this process has not got any further."""
        return time.monotonic() - self._known[self._world.rank].ticked_at

    def _say(self, store: Store) -> None:
        pulse, now, me = self.pulse, time.monotonic(), self._known[self._world.rank]
        if pulse.ticks != me.last.ticks:
            me.ticked_at = now
        self._serial += 1
        me.heard_at = now
        me.last = Sighting(
            rank=self._world.rank,
            host=self._host,
            serial=self._serial,
            step=pulse.step,
            phase=pulse.phase,
            order=pulse.order,
            ticks=pulse.ticks,
            seconds=self._seconds_here(),
        )
        store.set(f"pulse/{self._world.rank}", json.dumps(asdict(me.last)))

    def _listen(self, store: Store) -> None:
        for rank, known in enumerate(self._known):
            key = f"pulse/{rank}"
            if rank == self._world.rank or not store.check([key]):
                continue
            new, now = Sighting(**json.loads(store.get(key))), time.monotonic()
            if new.serial != known.last.serial:
                known.heard_at, known.ticked_at = now, now - new.seconds
            known.last = new

    def _silent(self) -> dict[int, float]:
        now = time.monotonic()
        return {
            rank: now - known.heard_at
            for rank, known in enumerate(self._known)
            if now - known.heard_at > _SILENT * self._timeout and known.last.phase != "the end"
        }

    def _is_overdue(self) -> bool:
        """Whether nobody has got any further for too long, and nothing explains it."""
        last = max(known.ticked_at for known in self._known)
        if time.monotonic() - last < _OVERDUE * self._timeout:
            return False
        silent = self._silent()
        sightings = [known.last for known in self._known]
        waited_for = diagnose(sightings, silent)
        if silent or not waited_for:
            # All at the same place before the first step is done: compiling takes its time.
            return bool(silent) or sightings[0].step > 1
        # Checkpoints are written by one process, and take what the disk takes.
        return any(each.phase != "save" for each in waited_for)

    def _end(self, store: Store) -> None:
        """Tell why, on every process alike, and end this one."""
        is_first = store.add("alarm", 1) == 1
        store.set(f"stack/{self._world.rank}", self._stack())
        sys.stderr.write(f"paceline: {self._known[self._world.rank].last}; all its threads:\n")
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        if is_first:
            store.set("verdict", self._verdict(store))
        patience = time.monotonic() + max(5.0, 4 * self._interval)
        while not store.check(["verdict"]) and time.monotonic() < patience:
            time.sleep(0.05)
        verdict = store.get("verdict").decode() if store.check(["verdict"]) else self._verdict(store)
        report_error(TrainingError(verdict), os.environ)
        sys.stderr.flush()
        os._exit(TrainingError.exit_code)  # the main thread may wait for ever, and nothing would wake it

    def _verdict(self, store: Store) -> str:
        silent = self._silent()
        sightings = [known.last for known in self._known]
        culprits = diagnose(sightings, silent)
        lines = [f"no process has got any further for {format_seconds(_OVERDUE * self._timeout)}."]
        for each in culprits[:_NAMED]:
            if each.rank in silent:
                gone = format_seconds(silent[each.rank])
                lines.append(
                    f"{each}, has not been heard of for {gone}: it was stopped, is gone, or cannot be reached."
                )
                continue
            lines.append(f"{each} for {format_seconds(each.seconds)}; the others wait for it. It is here:")
            lines.append(self._stack_of(store, each.rank))
        if len(culprits) > _NAMED:
            lines.append(f"So do {len(culprits) - _NAMED} more.")
        if not culprits:
            lines.append(f"All are in {sightings[0].phase} of step {sightings[0].step}; {sightings[0]} is here:")
            lines.append(self._stack_of(store, 0))
        lines.append(f"(parallel.timeout is {format_seconds(self._timeout)}.)")
        return "\n".join(lines)

    def _stack_of(self, store: Store, rank: int) -> str:
        """What a process's main thread was doing, once it has heard of the alarm."""
        patience = time.monotonic() + 3 * self._interval + 1.0
        while not store.check([f"stack/{rank}"]):
            if time.monotonic() > patience:
                return "  (it does not say where)"
            time.sleep(0.05)
        return store.get(f"stack/{rank}").decode().rstrip()

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._main)  # noqa: SLF001  # documented, whatever its name says
        return "".join(traceback.format_stack(frame)) if frame is not None else ""

    def _note(self) -> str:
        pulse = self.pulse
        return f"(rank {self._world.rank} on {self._host}, in {pulse.phase} of step {pulse.step})"
