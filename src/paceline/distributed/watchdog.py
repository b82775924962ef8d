"""Find the process that hangs while others wait for it, and report where and since when.

A process that waits in a collective does not know for whom. So each process regularly reports its position through the
group's store. A process without progress reads the others' reports; if none progresses, the one behind the others, or
the one that stopped reporting, is the culprit.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray
from torch.distributed import Store  # type: ignore[attr-defined]  # not in __all__

from paceline.distributed.local_launch import report_error
from paceline.errors import LostWorkerError, OneProcessError, PacelineError, TrainingError
from paceline.units import format_seconds
from paceline.world import World

Ids = NDArray[np.int64]

NO_SAMPLES: Ids = np.empty(0, dtype=np.int64)
_LAST = 1_000_000


class Heartbeat:
    """Position of this process: plain attributes that the loop writes and a thread reads, without locks.

    Attributes:
        step: The current step, counted from 1; 0 before the first.
        phase: The current phase of the step.
        order: Index of the phase; comparable between processes at the same step.
        ticks: Grows with any progress.
        is_new: Whether this is the first time in this phase; networks are compiled then.
        samples: The samples being processed.
    """

    __slots__ = ("_entered", "is_new", "order", "phase", "samples", "step", "ticks")

    def __init__(self) -> None:
        self.step, self.phase, self.order, self.ticks, self.is_new = 0, "start", 0, 0, True
        self.samples: Ids = NO_SAMPLES
        self._entered: set[str] = set()

    def begin_step(self, step: int) -> None:
        """Start a new step."""
        self.step, self.order = step, 0

    def enter(self, phase: str, *, last: bool = False, samples: Ids = NO_SAMPLES) -> None:
        """Start another phase.

        Args:
            phase: Its name.
            last: Whether it is the last one before processes synchronise; they may have reached it by different paths.
            samples: The samples being processed in it.
        """
        self.phase, self.samples = phase, samples
        self.order = _LAST if last else self.order + 1
        self.is_new = phase not in self._entered
        if self.is_new:
            self._entered.add(phase)
        self.ticks += 1

    def tick(self) -> None:
        """Report progress within a phase."""
        self.ticks += 1


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """A process's own report.

    Attributes:
        serial: Grows with each report; 0 before the first.
        seconds: How long it has been there.
        is_over: Whether it has finished its part of the run.
        failure: The error that it ended with.
    """

    rank: int
    host: str = "an unknown host"
    serial: int = 0
    step: int = 0
    phase: str = "start"
    order: int = 0
    ticks: int = -1
    is_new: bool = True
    seconds: float = 0.0
    is_over: bool = False
    failure: str = ""

    @property
    def place(self) -> tuple[int, int]:
        """Its progress, as a comparable value."""
        return self.step, self.order

    @property
    def where(self) -> str:
        """Its position in words."""
        return f"{self.phase} of step {self.step}" if self.step else f"{self.phase} before the first step"

    @property
    def who(self) -> str:
        """Its name in words."""
        return f"rank {self.rank} on {self.host}"

    def __str__(self) -> str:
        return f"{self.who}, in {self.where}"


def diagnose(sightings: Sequence[RankStatus], silent: Mapping[int, float]) -> list[RankStatus]:
    """Return the processes that the others wait for; empty if all are at the same position.

    Args:
        sightings: The last report of each process, by rank.
        silent: Seconds since the last report of silent processes, by rank.
    """
    if failed := [each for each in sightings if each.failure]:
        return failed
    if silent:
        return [each for each in sightings if each.rank in silent]
    furthest_behind = min(each.place for each in sightings)
    behind = [each for each in sightings if each.place == furthest_behind]
    return behind if len(behind) < len(sightings) else []


# Fractions of the collective timeout: shorter, so that the first message is not "timed out".
_OVERDUE, _LISTENING, _SILENT, _INTERVAL = 0.9, 0.4, 0.3, 0.025
_LONGEST_INTERVAL_SECONDS = 10.0
# All at the same position, and for the first time: compiling a network takes time.
_FIRST = 6
_FAREWELL_SECONDS = 2.0
_NAMED = 8
_READS = ("data_wait", "evaluate")


@dataclass(frozen=True, kw_only=True)
class WatchdogContext:
    """A process's current work, in words; read only when something is wrong.

    Attributes:
        reading: Describes what its loaders are reading or read last, for training or not.
        name_of: Returns a training sample's file, or its data set and index.
    """

    reading: Callable[[bool], str] = lambda _: ""
    name_of: Callable[[int], str] = str


@dataclass
class _Watched:
    """What this process knows of another one, timed by this process's clock."""

    last: RankStatus
    heard_at: float
    ticked_at: float


class Watchdog:
    """A thread that ends this process, with a message that names the culprit, when no process makes progress.

    Args:
        heartbeat: This process's position.
        world: Its rank and the world size.
        store: The store through which processes exchange reports; None in a world of one.
        timeout_seconds: How long processes may wait for one another.
        context: Describes its current work.
    """

    def __init__(
        self,
        heartbeat: Heartbeat,
        world: World,
        store: Store | None,
        *,
        timeout_seconds: float,
        context: WatchdogContext | None = None,
    ) -> None:
        self.heartbeat = heartbeat
        self._world = world
        self._store = store
        self._timeout = timeout_seconds
        self._context = context or WatchdogContext()
        self._interval = min(_LONGEST_INTERVAL_SECONDS, _INTERVAL * timeout_seconds)
        self._host = socket.gethostname()
        self._main = threading.get_ident()
        self._stopped, self._ending = threading.Event(), threading.Event()
        now = time.monotonic()
        self._known = [_Watched(RankStatus(rank=rank), now, now) for rank in range(world.world_size)]
        self._serial = 0
        self._failure = ""
        self._woken_at = now
        # Since when the thread has waited for the store to answer; None if it is not waiting.
        self._asked_at: float | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch during training; add a note with the position to an error of this process alone."""
        thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._woken_at = time.monotonic()
        for each in self._known:
            each.heard_at = each.ticked_at = self._woken_at
        if self._store is not None:
            thread.start()
        try:
            yield
        except Exception as error:
            if not isinstance(error, PacelineError) or isinstance(error, OneProcessError):
                self._failure = f"{type(error).__name__}: {error}".strip().splitlines()[0]
                self._leave(thread)
                lost = isinstance(error, LostWorkerError)
                if not lost or len(self._known) > 1:
                    error.add_note(self._note("" if lost else self._in_hand()))
            raise
        finally:
            self._leave(thread)

    def _leave(self, thread: threading.Thread) -> None:
        """Let the thread send its final report; if it is about to end this process, let it."""
        self._stopped.set()
        if thread.is_alive():
            thread.join(None if self._ending.is_set() else _FAREWELL_SECONDS)

    def _watch(self) -> None:
        assert self._store is not None
        try:
            self._say(self._store)  # immediately: a process that soon stops reporting already has a name then
            while not self._stopped.wait(self._interval):
                self._forgive_absence()
                self._asked_at = time.monotonic()
                self._say(self._store)
                if self._seconds_here() > _LISTENING * self._timeout:
                    self._listen(self._store)
                    if self._store.check(["alarm"]) or self._is_overdue():
                        self._end(self._store)
                self._asked_at = None
            self._say(self._store)
            if self._failure:
                self._listen(self._store)
        except RuntimeError:
            # The store ended with the process that hosted it; the collectives fail by themselves.
            return

    def _forgive_absence(self) -> None:
        """Exclude the time for which this process itself was suspended from all durations."""
        now = time.monotonic()
        absent = now - self._woken_at - self._interval
        self._woken_at = now
        if absent > _SILENT * self._timeout:
            for each in self._known:
                each.heard_at, each.ticked_at = min(now, each.heard_at + absent), min(now, each.ticked_at + absent)

    def _seconds_here(self) -> float:
        """Return for how long this process has made no progress."""
        return time.monotonic() - self._known[self._world.rank].ticked_at

    def _say(self, store: Store) -> None:
        heartbeat, now, me = self.heartbeat, time.monotonic(), self._known[self._world.rank]
        if heartbeat.ticks != me.last.ticks:
            me.ticked_at = now
        self._serial += 1
        me.heard_at = now
        me.last = RankStatus(
            rank=self._world.rank,
            host=self._host,
            serial=self._serial,
            step=heartbeat.step,
            phase=heartbeat.phase,
            order=heartbeat.order,
            ticks=heartbeat.ticks,
            is_new=heartbeat.is_new,
            seconds=self._seconds_here(),
            is_over=self._stopped.is_set(),
            failure=self._failure,
        )
        store.set(f"pulse/{self._world.rank}", json.dumps(asdict(me.last)))

    def _listen(self, store: Store) -> None:
        for rank, known in enumerate(self._known):
            key = f"pulse/{rank}"
            if rank == self._world.rank or not store.check([key]):
                continue
            new, now = RankStatus(**json.loads(store.get(key))), time.monotonic()
            if new.serial != known.last.serial:
                known.heard_at, known.ticked_at = now, now - new.seconds
            known.last = new

    def _silent(self) -> dict[int, float]:
        now = time.monotonic()
        return {
            rank: now - known.heard_at
            for rank, known in enumerate(self._known)
            if now - known.heard_at > _SILENT * self._timeout and not known.last.is_over
        }

    def _is_overdue(self) -> bool:
        """Whether no process has made progress for too long, without an explanation."""
        silent = self._silent()
        # The age of a silent process's last report, when it was first read, is unknown.
        last = max(known.ticked_at for rank, known in enumerate(self._known) if rank not in silent)
        seconds = time.monotonic() - last
        if seconds < _OVERDUE * self._timeout:
            return False
        sightings = [known.last for known in self._known]
        is_start = not diagnose(sightings, silent) and all(each.is_new for each in sightings)
        return not is_start or seconds > _FIRST * self._timeout

    def _end(self, store: Store) -> None:
        """Report the reason, identically on every process, and end this one."""
        self._ending.set()
        is_first = store.add("alarm", 1) == 1
        store.set(f"stack/{self._world.rank}", self._stack())
        if is_first:
            store.set("verdict", self._verdict(store))
        patience = time.monotonic() + max(5.0, 4 * self._interval)
        while not store.check(["verdict"]) and time.monotonic() < patience:
            time.sleep(0.05)
        verdict = store.get("verdict").decode() if store.check(["verdict"]) else self._verdict(store)
        self._wait_for_all_to_know(store)
        report_error(TrainingError(verdict), os.environ)
        if self._world.rank in [each.rank for each in self._waited_for()]:
            sys.stderr.write(f"paceline: {self._known[self._world.rank].last}; all its threads:\n")
            sys.stderr.flush()
            faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        sys.stderr.flush()
        os._exit(TrainingError.exit_code)  # the main thread may wait forever, and nothing would wake it

    def _wait_for_all_to_know(self, store: Store) -> None:
        """Delay the exit: it breaks connections and may end the store, and others would report that instead."""
        patience = time.monotonic() + 3 * self._interval + 1.0
        there = sum(not known.last.is_over for known in self._known) - len(self._silent())
        store.add("told", 1)
        while store.add("told", 0) < there and time.monotonic() < patience:
            time.sleep(0.05)

    def _waited_for(self) -> Sequence[RankStatus]:
        """Return the processes to name: those that the others wait for, or all."""
        sightings = [known.last for known in self._known]
        return diagnose(sightings, self._silent()) or sightings

    def _verdict(self, store: Store) -> str:
        silent, named = self._silent(), self._waited_for()
        lines = [f"no process has made progress for {format_seconds(_OVERDUE * self._timeout)}:"]
        for each in named[:_NAMED]:
            if each.failure:
                lines.append(f"{each}, has failed: {each.failure}")
            elif each.rank in silent:
                gone = format_seconds(silent[each.rank])
                lines.append(
                    f"{each.who}, last seen in {each.where}, has not reported for {gone}: it was stopped, has died, "
                    "cannot be reached, or runs code that blocks all other threads."
                )
            else:
                lines.append(f"{each}, for {format_seconds(each.seconds)}. It is here:")
                lines.append(self._stack_of(store, each.rank))
        limit = f"(parallel.timeout is {format_seconds(self._timeout)})"
        if len(named) < self._world.world_size:
            who = ", ".join(each.who for each in named[:_NAMED])
            more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
            # The true position of a silent process is unknown, but the position where the others wait for it is known.
            waiting = next(known.last for known in self._known if known.last not in named)
            where = f"in {waiting.where}, for {who}{more}" if silent else f"for {who}{more}, in {named[0].where}"
            lines.append(f"The others wait {where} {limit}.")
        else:
            lines.append(f"All are stuck in {named[0].where} {limit}.")
        return "\n".join(lines)

    def _stack_of(self, store: Store, rank: int) -> str:
        """Describe what a process's main thread was doing, once it has read the alarm."""
        patience = time.monotonic() + 3 * self._interval + 1.0
        while not store.check([f"stack/{rank}"]):
            if time.monotonic() > patience:
                return "  (place unknown)"
            time.sleep(0.05)
        return store.get(f"stack/{rank}").decode().rstrip()

    def _stack(self) -> str:
        """Describe where the main thread is and what it is processing."""
        frame = sys._current_frames().get(self._main)  # noqa: SLF001  # documented, whatever its name says
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        return f"{stack}{self._in_hand(reading=True)}"

    def _note(self, in_hand: str) -> str:
        """Describe where an error occurred, what was being processed, and what is known of the others."""
        me = self._known[self._world.rank].last
        heartbeat = self.heartbeat
        here = RankStatus(rank=self._world.rank, host=self._host, step=heartbeat.step, phase=heartbeat.phase)
        lines = [f"({here}{in_hand})" if len(self._known) > 1 else f"(in {here.where}{in_hand})"]
        for known in self._known:
            each = known.last
            # A process that waited in vain has read the others' reports; one that failed by itself has not.
            if each.rank == me.rank or not each.serial:
                continue
            if each.failure:
                lines.append(f"({each}, had failed: {each.failure})")
            elif self._seconds_here() > _LISTENING * self._timeout:
                since = time.monotonic() - known.ticked_at
                lines.append(f"({each}, had made progress {format_seconds(since)} before)")
        asked_at = self._asked_at
        if asked_at is not None and time.monotonic() - asked_at > _LISTENING * self._timeout:
            silence = format_seconds(time.monotonic() - asked_at)
            lines.append(
                f"(the store, which rank 0 may keep, has not answered for {silence}: that rank was stopped, has died, "
                "or cannot be reached)"
            )
        return "\n".join(lines)

    def _in_hand(self, *, reading: bool = False) -> str:
        """Return the samples that the main thread is computing with, or waits for; empty if unknown."""
        heartbeat = self.heartbeat
        if len(heartbeat.samples):
            names = ", ".join(self._context.name_of(int(each)) for each in heartbeat.samples[:_NAMED])
            more = f" and {len(heartbeat.samples) - _NAMED} more" if len(heartbeat.samples) > _NAMED else ""
            return f", with {names}{more}" if not reading else f"  with {names}{more}\n"
        if reading and heartbeat.phase in _READS and (said := self._context.reading(heartbeat.phase == "data_wait")):
            return f"  waiting to be read: {said}\n"
        return ""
