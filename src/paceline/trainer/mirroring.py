"""How are a run's checkpoints copied to an address while it trains, and how does it begin from such a copy?

A thread of the first process copies the newest whole checkpoint. Training never waits for it: while the address fails,
newer checkpoints take the place of those that wait, and what happened is told with the next record.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.checkpoint.fetched import fetch_newest
from paceline.checkpoint.mirror import Commit, Mirror, Sendable, TakenError, read_commits
from paceline.checkpoint.restore import Choice
from paceline.checkpoint.store import CheckpointStore, step_of
from paceline.distributed.collectives import Collectives
from paceline.errors import CheckpointError, RunDirectoryError, StorageError, TrainingError
from paceline.recipe.running import Checkpoint
from paceline.recipe.schema import Recipe
from paceline.records.events import IncidentEvent
from paceline.records.ledger import ledger_files
from paceline.records.run_directory import RunDirectory, write_json
from paceline.storage.addresses import without_secrets
from paceline.storage.remote import Remote
from paceline.storage.retries import Retries, describe
from paceline.units import format_seconds

if TYPE_CHECKING:
    from paceline.trainer.opening import Opening
    from paceline.trainer.run import Run

_WORD = "mirror.json"
_README = b"Checkpoints of a Paceline run, copied while it trained; see docs/guide/object-storage.md.\n"
# How long one request is tried again before its failure is told, and the pause before the next try of all.
_REQUEST_PATIENCE_SECONDS = 15.0
_PAUSE_SECONDS = 5.0
_AFTER_FAILURE_SECONDS = 5.0


@dataclass(frozen=True)
class News:
    """What is to be told of the copying."""

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
        self._retries = Retries(patience_seconds=_REQUEST_PATIENCE_SECONDS, told=self._hiccup)
        self._changed = threading.Condition()
        self._waiting: dict[int, Sendable] = {}
        self._under_way: int | None = None
        self._news: list[News] = []
        self._hiccups, self._last_hiccup = 0, ""
        self._failing_since: float | None = None
        self._stands_still = ""
        self._is_closed = False
        # Nothing is lost with it that a next launch would not send.
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
        self._thread.start()

    @property
    def needed(self) -> list[int]:
        """Steps whose checkpoints on this host are not to be deleted yet."""
        with self._changed:
            return [*self._waiting, *([] if self._under_way is None else [self._under_way])]

    @property
    def has_failed(self) -> bool:
        """Whether copying has failed for longer than the recipe bears."""
        since = self._failing_since
        return self._patience is not None and since is not None and time.monotonic() - since > self._patience.seconds

    @property
    def lacks(self) -> str:
        """Why the newest checkpoint is not there; empty if it is."""
        with self._changed:
            if self._stands_still:
                return self._stands_still
            return "" if not self._waiting and self._under_way is None else "it was still being copied"

    def offer(self, what: Sendable) -> None:
        """Have a whole checkpoint copied next; of those that wait, only the best one is kept beside it. Never waits."""
        with self._changed:
            best = what.best.step if what.best is not None else None
            self._waiting = {step: each for step, each in self._waiting.items() if step == best and step < what.step}
            self._waiting[what.step] = what
            self._changed.notify_all()

    def is_over(self, *, within_seconds: float) -> bool:
        """Whether nothing is left to be copied, or nothing will be, at the latest after so long."""
        with self._changed:
            return self._changed.wait_for(self._is_idle, within_seconds)

    def _is_idle(self) -> bool:
        return bool(self._stands_still) or (not self._waiting and self._under_way is None)

    def news(self) -> list[News]:
        """What has happened since this was asked last."""
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
        """Give up what is still under way; a next launch goes on with it."""
        self._retries.given_up.set()
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(_AFTER_FAILURE_SECONDS)

    def _hiccup(self, line: str) -> None:
        with self._changed:
            self._hiccups += 1
            self._last_hiccup = line

    def _work(self) -> None:
        mirror = None
        while (what := self._next()) is not None:
            try:
                mirror = mirror or self._open(self._retries)
                mirror.send(what, self._root)
                mirror.prune(keep=self._keep)
            except CheckpointError:
                self._done()  # it went, or was replaced: a newer one waits, or will
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

    def _done(self) -> None:
        with self._changed:
            self._under_way = None
            self._changed.notify_all()

    def _failed(self, what: Sendable, reason: str) -> None:
        with self._changed:
            if self._failing_since is None:
                self._failing_since = time.monotonic()
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
            self._failing_since = None

    def _stand_still(self, reason: str) -> None:
        with self._changed:
            self._stands_still, self._under_way = reason, None
            self._waiting.clear()
            self._news.append(News("mirror", reason))
            self._changed.notify_all()


def holds_copy(recipe: Recipe) -> bool:
    """Whether there is something to go on from at the recipe's address.

    Raises:
        StorageError: If the address cannot be read.
    """
    if recipe.checkpoint.mirror is None:
        return False
    remote = Remote(recipe.checkpoint.mirror, Retries(patience_seconds=_REQUEST_PATIENCE_SECONDS))
    return bool(remote.listed("commits"))


def fill_from_mirror(
    directory: RunDirectory, recipe: Recipe, resume: str, collectives: Collectives, say: Callable[[str], None]
) -> tuple[str, ...]:
    """Fill the run directory from the address where that is further, before the run is opened; a collective.

    Returns:
        What the user should know.

    Raises:
        StorageError: If the address cannot be read and there is nothing here to go on from either.
        RunDirectoryError: If the copy is another run's.
    """
    if recipe.checkpoint.mirror is None:
        return ()
    address, first = recipe.checkpoint.mirror, collectives.world.is_first
    with ThreadPoolExecutor(1, thread_name_prefix="fetch") as pool:
        # Many short waits, since a collective may not take longer than parallel.timeout, but a large checkpoint may.
        task = pool.submit(_fill, directory, address, resume, say) if first else None
        patience = recipe.parallel.timeout.seconds / 10
        while not collectives.on_first(lambda: task is None or bool(wait_for([task], patience).done)):
            pass
        return collectives.on_first(lambda: () if task is None else task.result())


def _fill(directory: RunDirectory, address: str, resume: str, say: Callable[[str], None]) -> tuple[str, ...]:
    newest, _ = CheckpointStore(directory.checkpoints).newest_whole()
    try:
        remote = Remote(address, Retries(patience_seconds=_REQUEST_PATIENCE_SECONDS))
        commits, damaged = read_commits(remote)
        if not commits:
            # Whether anything can be written there is to be known before anything is trained.
            remote.write("README", _README)
    except StorageError as error:
        if newest is None:
            raise
        return (f"the run goes on from '{directory.root}' alone: {error}",)
    _check_ours(commits, directory, address)
    if commits and resume == "never":
        raise RunDirectoryError(
            f"checkpoint.mirror={address} holds a copy of a run already and --resume=never was asked; choose another "
            "address, or leave --resume out to go on with it."
        )
    if commits and resume != "auto" and (step := step_of(Path(resume))) is not None:
        # A run that goes back on request must not go on from its later copies, whenever it is killed.
        Mirror(remote, commits[0].run, commits).discard_after(step)
    if not commits or resume != "auto":
        return tuple(damaged)
    write_json(directory.root / _WORD, {"run": commits[0].run})
    beyond = -1 if newest is None else step_of(newest) or 0
    fetched = fetch_newest(remote, commits, directory.root, beyond=beyond, say=say)
    gone_on = () if fetched is None else (f"the run goes on from its copy at {address}, of step {fetched.step}",)
    return (*damaged, *gone_on)


def _check_ours(commits: Sequence[Commit], directory: RunDirectory, address: str) -> None:
    """Refuse the copy of another run.

    Raises:
        RunDirectoryError: If it is one.
    """
    word = _word(directory)
    if commits and (commits[0].run != word if word is not None else not _is_free(directory)):
        raise RunDirectoryError(
            f"checkpoint.mirror={address} holds a copy of another run than '{directory.root}'; choose another address, "
            "or another --run-dir to go on from that copy."
        )


def _word(directory: RunDirectory) -> str | None:
    try:
        word = json.loads((directory.root / _WORD).read_text(encoding="utf-8"))["run"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return word if isinstance(word, str) else None


def _is_free(directory: RunDirectory) -> bool:
    """Whether nothing was trained here."""
    used = any(path.stat().st_size for path in ledger_files(directory.ledger))
    return not used and not CheckpointStore(directory.checkpoints).steps()


@contextlib.contextmanager
def mirroring_beside(
    directory: RunDirectory, recipe: Recipe, opening: Opening, collectives: Collectives
) -> Iterator[Mirroring | None]:
    """Copy the run's checkpoints on the first process, as long as this is entered; a collective.

    Args:
        directory: The run's, opened: its records are cut back.
        recipe: The run's.
        opening: How it begins.
        collectives: All processes.
    """
    begun: list[Mirroring] = []
    if recipe.checkpoint.mirror is not None and not opening.completed:
        collectives.on_first(lambda: begun.append(_begin(directory, recipe, opening.choice)))
    try:
        yield begun[0] if begun else None
    finally:
        for each in begun:
            each.close()


def _begin(directory: RunDirectory, recipe: Recipe, choice: Choice) -> Mirroring:
    """Begin to copy, first of all what is not there yet."""
    address = recipe.checkpoint.mirror
    assert address is not None
    word = _word(directory)
    if word is None:
        write_json(directory.root / _WORD, {"run": (word := secrets.token_hex(8))})
    run = word

    def open_mirror(retries: Retries) -> Mirror:
        remote = Remote(address, retries)
        commits, _ = read_commits(remote)
        _check_ours(commits, directory, address)
        mirror = Mirror(remote, run, commits)
        if choice.path is not None:
            mirror.discard_after(choice.step)
        return mirror

    mirroring = Mirroring(open_mirror, directory.root, recipe.checkpoint)
    if choice.path is not None:
        best = CheckpointStore(directory.checkpoints).read_best()
        growing, small = sendable_records(directory)
        mirroring.offer(Sendable(step=choice.step, path=choice.path, growing=growing, small=small, best=best))
    return mirroring


def sendable_records(directory: RunDirectory) -> tuple[Mapping[str, int], tuple[str, ...]]:
    """The records that belong to the state of this moment, once they are flushed: by name, and how long they are."""
    growing = [directory.events, *ledger_files(directory.ledger)]
    small = (directory.recipe, directory.plan, directory.environment, directory.sample_lengths)
    sizes = {str(each.relative_to(directory.root)): each.stat().st_size for each in growing if each.is_file()}
    return sizes, tuple(each.name for each in small if each.is_file())


def report_mirror(run: Run) -> None:
    """Record what is to be told of the copying."""
    if run.mirroring is None:
        return
    for each in run.mirroring.news():
        message = without_secrets(each.message)
        run.recorder.write(IncidentEvent(**run.progress.here, incident=each.incident, message=message))


def finish_mirroring(run: Run) -> None:
    """Wait for what is still to be copied, for as long as the recipe says; a collective.

    Raises:
        TrainingError: On every process, if copying has failed for longer than the recipe bears.
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
