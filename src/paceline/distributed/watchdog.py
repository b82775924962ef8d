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

from torch.distributed import Store  # type: ignore[attr-defined]  # not in __all__

from paceline.distributed.local_launch import report_error
from paceline.distributed.strategy import Heartbeat
from paceline.errors import LostWorkerError, OneProcessError, PacelineError, TrainingError
from paceline.host.world import World
from paceline.parsing.units import format_seconds


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """A process's own report.

    Attributes:
        serial: Grows with each report; 0 before the first.
        seconds: How long it has been there.
        is_done: Whether it has finished its part of the run.
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
    is_done: bool = False
    failure: str = ""

    @property
    def progress(self) -> tuple[int, int]:
        """Its progress, as a comparable value."""
        return self.step, self.order

    @property
    def location(self) -> str:
        """Its position in words."""
        return f"{self.phase} of step {self.step}" if self.step else f"{self.phase} before the first step"

    @property
    def name(self) -> str:
        """Its name in words."""
        return f"rank {self.rank} on {self.host}"

    def __str__(self) -> str:
        return f"{self.name}, in {self.location}"


def diagnose(reports: Sequence[RankStatus], silent: Mapping[int, float]) -> list[RankStatus]:
    """Return the processes that the others wait for; empty if all are at the same position.

    Args:
        reports: The last report of each process, by rank.
        silent: Seconds since the last report of silent processes, by rank.
    """
    if failed := [each for each in reports if each.failure]:
        return failed
    if silent:
        return [each for each in reports if each.rank in silent]
    slowest = min(each.progress for each in reports)
    culprits = [each for each in reports if each.progress == slowest]
    return culprits if len(culprits) < len(reports) else []


# Fractions of the collective timeout: shorter, so that the first message is not "timed out".
_OVERDUE, _LISTENING, _SILENT, _INTERVAL = 0.9, 0.4, 0.3, 0.025
_MAX_INTERVAL_SECONDS = 10.0
# All at the same position, and for the first time: compiling a network takes time.
_FIRST_FACTOR = 6
_FINAL_REPORT_SECONDS = 2.0
_MAX_LISTED = 8
_READING_PHASES = ("data_wait", "evaluate")


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
class _PeerState:
    """What this process knows of another one, timed by this process's clock."""

    last: RankStatus
    reported_at: float
    progressed_at: float


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
        self._interval = min(_MAX_INTERVAL_SECONDS, _INTERVAL * timeout_seconds)
        self._host = socket.gethostname()
        self._main = threading.get_ident()
        self._stopped, self._ending = threading.Event(), threading.Event()
        now = time.monotonic()
        self._peers = [_PeerState(RankStatus(rank=rank), now, now) for rank in range(world.world_size)]
        self._serial = 0
        self._failure = ""
        self._last_wakeup = now
        # Since when the thread has waited for the store to answer; None if it is not waiting.
        self._request_started_at: float | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch during training; add a note with the position to an error of this process alone."""
        thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._last_wakeup = time.monotonic()
        for each in self._peers:
            each.reported_at = each.progressed_at = self._last_wakeup
        if self._store is not None:
            thread.start()
        try:
            yield
        except Exception as error:
            if not isinstance(error, PacelineError) or isinstance(error, OneProcessError):
                self._failure = f"{type(error).__name__}: {error}".strip().splitlines()[0]
                self._stop(thread)
                lost = isinstance(error, LostWorkerError)
                if not lost or len(self._peers) > 1:
                    error.add_note(self._note("" if lost else self._current_samples()))
            raise
        finally:
            self._stop(thread)

    def _stop(self, thread: threading.Thread) -> None:
        """Let the thread send its final report; if it is about to end this process, let it."""
        self._stopped.set()
        if thread.is_alive():
            thread.join(None if self._ending.is_set() else _FINAL_REPORT_SECONDS)

    def _watch(self) -> None:
        assert self._store is not None
        try:
            self._publish(self._store)  # immediately: a process that soon stops reporting already has a name then
            while not self._stopped.wait(self._interval):
                self._discount_suspension()
                self._request_started_at = time.monotonic()
                self._publish(self._store)
                if self._stalled_seconds() > _LISTENING * self._timeout:
                    self._read_reports(self._store)
                    if self._store.check(["alarm"]) or self._is_overdue():
                        self._end(self._store)
                self._request_started_at = None
            self._publish(self._store)
            if self._failure:
                self._read_reports(self._store)
        except RuntimeError:
            # The store ended with the process that hosted it; the collectives fail by themselves.
            return

    def _discount_suspension(self) -> None:
        """Exclude the time for which this process itself was suspended from all durations."""
        now = time.monotonic()
        suspended = now - self._last_wakeup - self._interval
        self._last_wakeup = now
        if suspended > _SILENT * self._timeout:
            for each in self._peers:
                each.reported_at, each.progressed_at = (
                    min(now, each.reported_at + suspended),
                    min(now, each.progressed_at + suspended),
                )

    def _stalled_seconds(self) -> float:
        """Return for how long this process has made no progress."""
        return time.monotonic() - self._peers[self._world.rank].progressed_at

    def _publish(self, store: Store) -> None:
        heartbeat, now, me = self.heartbeat, time.monotonic(), self._peers[self._world.rank]
        if heartbeat.ticks != me.last.ticks:
            me.progressed_at = now
        self._serial += 1
        me.reported_at = now
        me.last = RankStatus(
            rank=self._world.rank,
            host=self._host,
            serial=self._serial,
            step=heartbeat.step,
            phase=heartbeat.phase,
            order=heartbeat.order,
            ticks=heartbeat.ticks,
            is_new=heartbeat.is_new,
            seconds=self._stalled_seconds(),
            is_done=self._stopped.is_set(),
            failure=self._failure,
        )
        store.set(f"pulse/{self._world.rank}", json.dumps(asdict(me.last)))

    def _read_reports(self, store: Store) -> None:
        for rank, peer in enumerate(self._peers):
            key = f"pulse/{rank}"
            if rank == self._world.rank or not store.check([key]):
                continue
            new, now = RankStatus(**json.loads(store.get(key))), time.monotonic()
            if new.serial != peer.last.serial:
                peer.reported_at, peer.progressed_at = now, now - new.seconds
            peer.last = new

    def _silent(self) -> dict[int, float]:
        now = time.monotonic()
        return {
            rank: now - peer.reported_at
            for rank, peer in enumerate(self._peers)
            if now - peer.reported_at > _SILENT * self._timeout and not peer.last.is_done
        }

    def _is_overdue(self) -> bool:
        """Whether no process has made progress for too long, without an explanation."""
        silent = self._silent()
        # The age of a silent process's last report, when it was first read, is unknown.
        last = max(peer.progressed_at for rank, peer in enumerate(self._peers) if rank not in silent)
        seconds = time.monotonic() - last
        if seconds < _OVERDUE * self._timeout:
            return False
        reports = [peer.last for peer in self._peers]
        is_start = not diagnose(reports, silent) and all(each.is_new for each in reports)
        return not is_start or seconds > _FIRST_FACTOR * self._timeout

    def _end(self, store: Store) -> None:
        """Report the reason, identically on every process, and end this one."""
        self._ending.set()
        is_first = store.add("alarm", 1) == 1
        store.set(f"stack/{self._world.rank}", self._stack())
        if is_first:
            store.set("verdict", self._verdict(store))
        deadline = time.monotonic() + max(5.0, 4 * self._interval)
        while not store.check(["verdict"]) and time.monotonic() < deadline:
            time.sleep(0.05)
        verdict = store.get("verdict").decode() if store.check(["verdict"]) else self._verdict(store)
        self._wait_for_acknowledgements(store)
        report_error(TrainingError(verdict), os.environ)
        if self._world.rank in [each.rank for each in self._culprits()]:
            sys.stderr.write(f"paceline: {self._peers[self._world.rank].last}; all its threads:\n")
            sys.stderr.flush()
            faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        sys.stderr.flush()
        os._exit(TrainingError.exit_code)  # the main thread may wait forever, and nothing would wake it

    def _wait_for_acknowledgements(self, store: Store) -> None:
        """Delay the exit: it breaks connections and may end the store, and others would report that instead."""
        deadline = time.monotonic() + 3 * self._interval + 1.0
        expected = sum(not peer.last.is_done for peer in self._peers) - len(self._silent())
        store.add("told", 1)
        while store.add("told", 0) < expected and time.monotonic() < deadline:
            time.sleep(0.05)

    def _culprits(self) -> Sequence[RankStatus]:
        """Return the processes to name: those that the others wait for, or all."""
        reports = [peer.last for peer in self._peers]
        return diagnose(reports, self._silent()) or reports

    def _verdict(self, store: Store) -> str:
        silent, culprits = self._silent(), self._culprits()
        lines = [f"no process has made progress for {format_seconds(_OVERDUE * self._timeout)}:"]
        for each in culprits[:_MAX_LISTED]:
            if each.failure:
                lines.append(f"{each}, has failed: {each.failure}")
            elif each.rank in silent:
                silence = format_seconds(silent[each.rank])
                lines.append(
                    f"{each.name}, last seen in {each.location}, has not reported for {silence}: it was stopped, has "
                    "died, cannot be reached, or runs code that blocks all other threads."
                )
            else:
                lines.append(f"{each}, for {format_seconds(each.seconds)}. It is here:")
                lines.append(self._stack_of(store, each.rank))
        limit = f"(parallel.timeout is {format_seconds(self._timeout)})"
        if len(culprits) < self._world.world_size:
            names = ", ".join(each.name for each in culprits[:_MAX_LISTED])
            more = f" and {len(culprits) - _MAX_LISTED} more" if len(culprits) > _MAX_LISTED else ""
            # The true position of a silent process is unknown, but the position where the others wait for it is known.
            waiting = next(peer.last for peer in self._peers if peer.last not in culprits)
            where = (
                f"in {waiting.location}, for {names}{more}"
                if silent
                else f"for {names}{more}, in {culprits[0].location}"
            )
            lines.append(f"The others wait {where} {limit}.")
        else:
            lines.append(f"All are stuck in {culprits[0].location} {limit}.")
        return "\n".join(lines)

    def _stack_of(self, store: Store, rank: int) -> str:
        """Describe what a process's main thread was doing, once it has read the alarm."""
        deadline = time.monotonic() + 3 * self._interval + 1.0
        while not store.check([f"stack/{rank}"]):
            if time.monotonic() > deadline:
                return "  (place unknown)"
            time.sleep(0.05)
        return store.get(f"stack/{rank}").decode().rstrip()

    def _stack(self) -> str:
        """Describe where the main thread is and what it is processing."""
        frame = sys._current_frames().get(self._main)  # noqa: SLF001  # documented, whatever its name says
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        return f"{stack}{self._current_samples(reading=True)}"

    def _note(self, samples: str) -> str:
        """Describe where an error occurred, what was being processed, and what is known of the others."""
        me = self._peers[self._world.rank].last
        heartbeat = self.heartbeat
        position = RankStatus(rank=self._world.rank, host=self._host, step=heartbeat.step, phase=heartbeat.phase)
        lines = [f"({position}{samples})" if len(self._peers) > 1 else f"(in {position.location}{samples})"]
        for peer in self._peers:
            each = peer.last
            # A process that waited in vain has read the others' reports; one that failed by itself has not.
            if each.rank == me.rank or not each.serial:
                continue
            if each.failure:
                lines.append(f"({each}, had failed: {each.failure})")
            elif self._stalled_seconds() > _LISTENING * self._timeout:
                since = time.monotonic() - peer.progressed_at
                lines.append(f"({each}, had made progress {format_seconds(since)} before)")
        started_at = self._request_started_at
        if started_at is not None and time.monotonic() - started_at > _LISTENING * self._timeout:
            silence = format_seconds(time.monotonic() - started_at)
            lines.append(
                f"(the store, which rank 0 may keep, has not answered for {silence}: that rank was stopped, has died, "
                "or cannot be reached)"
            )
        return "\n".join(lines)

    def _current_samples(self, *, reading: bool = False) -> str:
        """Return the samples that the main thread is computing with, or waits for; empty if unknown."""
        heartbeat = self.heartbeat
        if len(heartbeat.samples):
            names = ", ".join(self._context.name_of(int(each)) for each in heartbeat.samples[:_MAX_LISTED])
            more = f" and {len(heartbeat.samples) - _MAX_LISTED} more" if len(heartbeat.samples) > _MAX_LISTED else ""
            return f", with {names}{more}" if not reading else f"  with {names}{more}\n"
        if (
            reading
            and heartbeat.phase in _READING_PHASES
            and (description := self._context.reading(heartbeat.phase == "data_wait"))
        ):
            return f"  waiting to be read: {description}\n"
        return ""
