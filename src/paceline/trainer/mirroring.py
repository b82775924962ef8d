"""Copy a run's checkpoints to an address while it trains.

A thread of the first process copies the newest whole checkpoint. Training never waits for it: while the address fails,
newer checkpoints replace those that wait, and the failure is reported with the next record.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.checkpoint.mirror import Mirror, Sendable, TakenError
from paceline.checkpoint.store import CheckpointStore
from paceline.errors import CheckpointError, RunDirectoryError, StorageError, TrainingError, UnreadableError
from paceline.recipe.running import Checkpoint
from paceline.records.events import IncidentEvent
from paceline.records.ledger import ledger_files
from paceline.records.run_directory import RunDirectory
from paceline.storage.addresses import without_secrets
from paceline.storage.remote import Retries, describe
from paceline.units import format_seconds

if TYPE_CHECKING:
    from paceline.trainer.run import Run

# How long one request is retried before its failure is reported, and the pause before the whole copy is retried.
REQUEST_PATIENCE_SECONDS = 15.0
_PAUSE_SECONDS = 5.0
# Do not wait long for a request that is not answered; nothing is lost with it.
_AT_CLOSE_SECONDS = 2.0


@dataclass(frozen=True)
class News:
    """Something to report about the copying."""

    incident: str
    message: str


class Mirroring:
    """Copies checkpoints of one run to an address, in a thread of its own.

    Args:
        open_mirror: Opens the copy, as soon as the address can be reached.
        root: The run directory.
        checkpoint: What the recipe asks for.
    """

    def __init__(self, open_mirror: Callable[[Retries], Mirror], root: Path, checkpoint: Checkpoint) -> None:
        assert checkpoint.mirror is not None
        self._open, self._root, self._address = open_mirror, root, checkpoint.mirror
        self._keep, self._patience = checkpoint.keep, checkpoint.mirror_patience
        self._retries = Retries(patience_seconds=REQUEST_PATIENCE_SECONDS, told=self._hiccup)
        self._changed = threading.Condition()
        self._waiting: dict[int, Sendable] = {}
        self._under_way: int | None = None
        self._news: list[News] = []
        self._hiccups, self._last_hiccup = 0, ""
        self._mirror: Mirror | None = None
        self._failing_since: float | None = None
        self._patient_since: float | None = None
        self._failure = ""
        self._stands_still = ""
        self._is_closed = False
        # Nothing is lost with it that a next launch would not send.
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
        self._thread.start()

    @property
    def needed(self) -> list[int]:
        """Steps whose checkpoints on this host must not be deleted yet."""
        with self._changed:
            return [*self._waiting, *([] if self._under_way is None else [self._under_way])]

    @property
    def has_failed(self) -> bool:
        """Whether copying has failed for longer than the recipe allows."""
        with self._changed:
            since, mirror = self._patient_since, self._mirror
            if self._patience is None or since is None or self._is_idle():
                return False
        # A large upload that was restarted and makes progress may take longer than the address may fail.
        since = max(since, since if mirror is None else mirror.moved_at)
        return time.monotonic() - since > self._patience.seconds

    @property
    def is_failing(self) -> bool:
        """Whether the last try to copy has failed."""
        return self._failing_since is not None

    @property
    def lacks(self) -> str:
        """Why the newest checkpoint is not there; empty if it is."""
        with self._changed:
            if self._stands_still:
                return self._stands_still
            if self._is_idle():
                return self._failure
            return self._failure or "it was still being copied"

    def offer(self, what: Sendable) -> None:
        """Queue a whole checkpoint to be copied; of those queued before, only the best one is kept. Never waits."""
        with self._changed:
            if self._patient_since is not None and self._is_idle():
                # The checkpoint that could not be copied is gone: since then nothing was tried, so nothing has failed.
                self._patient_since = time.monotonic()
            if self._failing_since is None:
                self._failure = ""  # it was about an older one
            best = what.best.step if what.best is not None else None
            self._waiting = {step: each for step, each in self._waiting.items() if step == best and step < what.step}
            self._waiting[what.step] = what
            self._changed.notify_all()

    def is_over(self, *, within_seconds: float) -> bool:
        """Wait at most so long; return whether nothing is left to be copied, or nothing more will be."""
        with self._changed:
            return self._changed.wait_for(self._is_idle, within_seconds)

    def _is_idle(self) -> bool:
        return bool(self._stands_still) or (not self._waiting and self._under_way is None)

    def news(self) -> list[News]:
        """Return what has happened since the last call."""
        with self._changed:
            news, self._news = self._news, []
            if self._hiccups:
                many = f"{self._hiccups} request{'s' * (self._hiccups > 1)}"
                news.append(
                    News("mirror_retries", f"{many} to {self._address} failed and then worked: {self._last_hiccup}")
                )
            self._hiccups = 0
            return news

    def close(self) -> None:
        """Give up what is still under way; the next launch sends it."""
        self._retries.given_up.set()
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(_AT_CLOSE_SECONDS)

    def _hiccup(self, line: str) -> None:
        with self._changed:
            self._hiccups += 1
            self._last_hiccup = line

    def _work(self) -> None:
        while (what := self._next()) is not None:
            try:
                self._mirror = self._mirror or self._open(self._retries)
                self._mirror.send(what, self._root)
                self._mirror.prune(keep=self._keep)
            except UnreadableError as error:
                self._failed(what, str(error))
                self._retries.given_up.wait(_PAUSE_SECONDS)
            except CheckpointError as error:
                self._done(why_not=str(error))  # it went, or was replaced: a newer one waits, or will
            except (TakenError, RunDirectoryError) as error:
                self._stand_still(str(error))
                return
            except Exception as error:  # noqa: BLE001  # whatever it is must not end the thread unheard
                self._failed(what, str(error) if isinstance(error, StorageError) else describe(error))
                self._retries.given_up.wait(_PAUSE_SECONDS)
            else:
                self._worked()
                self._done()

    def _next(self) -> Sendable | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            if self._is_closed:
                return None
            step = min(self._waiting)
            self._under_way = step
            return self._waiting.pop(step)

    def _done(self, *, why_not: str = "") -> None:
        with self._changed:
            self._under_way, self._failure = None, why_not
            self._changed.notify_all()

    def _failed(self, what: Sendable, reason: str) -> None:
        with self._changed:
            self._failure = reason
            if self._failing_since is None:
                self._failing_since = self._patient_since = time.monotonic()
                message = f"checkpoints are not copied for now, and training goes on: {reason}"
                self._news.append(News("mirror", message))
            newer = [each for step, each in self._waiting.items() if step > what.step]
            if not newer or any(each.best is not None and each.best.step == what.step for each in newer):
                self._waiting.setdefault(what.step, what)
            self._under_way = None
            self._changed.notify_all()

    def _worked(self) -> None:
        with self._changed:
            if self._failing_since is not None:
                seconds = format_seconds(time.monotonic() - self._failing_since)
                self._news.append(
                    News("mirror_back", f"checkpoints are copied to {self._address} again, after {seconds}")
                )
            self._failing_since = self._patient_since = None

    def _stand_still(self, reason: str) -> None:
        with self._changed:
            self._stands_still, self._under_way = reason, None
            self._waiting.clear()
            self._news.append(News("mirror", reason))
            self._changed.notify_all()


def sendable_records(directory: RunDirectory) -> tuple[Mapping[str, int], tuple[str, ...]]:
    """Return the flushed records of the present state: growing ones with their sizes, and small ones."""
    growing = [directory.events, *ledger_files(directory.ledger)]
    small = (directory.recipe, directory.identity, directory.plan, directory.environment, directory.sample_lengths)
    sizes = {str(each.relative_to(directory.root)): each.stat().st_size for each in growing if each.is_file()}
    return sizes, tuple(each.name for each in small if each.is_file())


def report_mirror(run: Run) -> None:
    """Record what has happened to the copying."""
    if run.mirroring is None:
        return
    for each in run.mirroring.news():
        message = without_secrets(each.message)
        run.recorder.write(IncidentEvent(**run.progress.here, incident=each.incident, message=message))


def finish_mirroring(run: Run) -> None:
    """Wait for what is still to be copied, as long as the recipe allows; a collective.

    Raises:
        TrainingError: On every process, if copying has failed for longer than the recipe allows.
    """
    if run.recipe.checkpoint.mirror is None:
        return
    patience = min(run.recipe.parallel.timeout.seconds / 10, 2.0)
    deadline = time.monotonic() + run.recipe.checkpoint.mirror_wait.seconds
    while not run.collectives.on_first(lambda: _is_over(run, patience) or time.monotonic() > deadline):
        run.pulse.tick()
    run.collectives.on_first(lambda: _conclude(run))


def _is_over(run: Run, within_seconds: float) -> bool:
    mirroring = run.mirroring
    return mirroring is None or mirroring.has_failed or mirroring.is_over(within_seconds=within_seconds)


def _conclude(run: Run) -> None:
    mirroring = run.mirroring
    if mirroring is None:
        return
    report_mirror(run)
    if mirroring.has_failed:
        raise TrainingError(
            f"checkpoints could not be copied to {run.recipe.checkpoint.mirror} for longer than "
            f"checkpoint.mirror_patience={run.recipe.checkpoint.mirror_patience}; the run is saved in "
            f"'{run.directory.root}': mend the address and run the same command again."
        )
    if lacking := mirroring.lacks:
        message = (
            f"the newest checkpoint is in '{run.directory.root}', and not at {run.recipe.checkpoint.mirror}: {lacking}"
        )
        run.recorder.write(IncidentEvent(**run.progress.here, incident="mirror_behind", message=message))
        run.display.message(message)
        return
    best = [run.progress.best["step"]] if run.progress.best and run.recipe.checkpoint.keep_best else []
    with contextlib.suppress(CheckpointError):
        CheckpointStore(run.directory.checkpoints).prune(keep=run.recipe.checkpoint.keep, protect=best)
