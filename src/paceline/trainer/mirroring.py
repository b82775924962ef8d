"""Mirror a run to an address (``checkpoint.mirror``): restore the run directory from the copy, and keep it up to date.

The first process reads the copy once the processes have joined, before the run directory is opened. During training a
thread copies the newest complete checkpoint. Training never waits for it: while the address fails, newer checkpoints
replace queued ones, and the failure is reported with the next record.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from paceline.checkpoint.mirror import (
    Commit,
    CommitListing,
    Mirror,
    MirrorConflictError,
    commit_chain,
    fetch_newest,
    list_commits,
)
from paceline.checkpoint.publish import LocalCheckpoint
from paceline.checkpoint.store import CheckpointStore, ResumePoint, step_of
from paceline.distributed.collectives import Collectives
from paceline.errors import CheckpointError, LaunchError, RunDirectoryError, StorageError, UnreadableError
from paceline.host.world import World
from paceline.parsing.plain_text import load_json
from paceline.parsing.units import counted, format_seconds
from paceline.recipe.running import Checkpoint
from paceline.recipe.schema import Recipe
from paceline.records.ledger import ledger_files
from paceline.records.run_directory import RunDirectory, write_json
from paceline.storage.addresses import redact_secrets
from paceline.storage.remote import Remote, Retries, describe, run_in_thread
from paceline.trainer.recorder import Recorder
from paceline.trainer.run_dir_checks import (
    ResumeDecision,
    ResumeRequest,
    check_links,
    check_same_run,
    foreign_checkpoints,
    never_trained,
)

T = TypeVar("T")

Say = Callable[[str], None]

# How long one request is retried before its failure is reported, and the pause before the complete copy is retried.
REQUEST_PATIENCE_SECONDS = 15.0
_PAUSE_SECONDS = 5.0
# Do not wait long for an unanswered request; nothing is lost by abandoning it.
_AT_CLOSE_SECONDS = 2.0


class Mirroring:
    """Copies the checkpoints of one run to an address, in a separate thread.

    Args:
        open_mirror: Opens the copy as soon as the address can be reached.
        root: The run directory.
        checkpoint: The recipe's checkpoint section.
    """

    def __init__(self, open_mirror: Callable[[Retries], Mirror], root: Path, checkpoint: Checkpoint) -> None:
        assert checkpoint.mirror is not None
        self._open, self._root, self._address = open_mirror, root, checkpoint.mirror
        self._keep, self._patience = checkpoint.keep, checkpoint.mirror_patience
        self._retried: list[str] = []
        self._retries = Retries(patience_seconds=REQUEST_PATIENCE_SECONDS, log=self._retried.append)
        self._changed = threading.Condition()
        self._waiting: dict[int, LocalCheckpoint] = {}
        self._sending: int | None = None
        self._news: list[tuple[str, str]] = []
        self._mirror: Mirror | None = None
        self._failing_since: float | None = None
        self._patient_since: float | None = None
        self._failure = ""
        self._stopped_reason = ""
        self._is_closed = False
        # Nothing is lost: the next launch sends it again.
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
        self._thread.start()

    def needed(self) -> list[int]:
        """Return the steps whose checkpoints on this host must not be deleted yet."""
        with self._changed:
            return [*self._waiting, *([] if self._sending is None else [self._sending])]

    @property
    def has_failed(self) -> bool:
        """Whether copying has failed for longer than the recipe allows."""
        with self._changed:
            since, mirror = self._patient_since, self._mirror
            if self._patience is None or since is None or self._is_idle():
                return False
        # A large upload that was restarted and makes progress may take longer than the recipe allows for failures.
        since = max(since, since if mirror is None else mirror.last_progress_at)
        return time.monotonic() - since > self._patience.seconds

    @property
    def is_failing(self) -> bool:
        """Whether the last attempt to copy failed."""
        return self._failing_since is not None

    @property
    def problem(self) -> str:
        """Why the newest checkpoint is not at the address; empty if it is."""
        with self._changed:
            if self._stopped_reason:
                return self._stopped_reason
            return self._failure if self._is_idle() else self._failure or "it was still being copied"

    def submit(self, item: LocalCheckpoint) -> None:
        """Queue a complete checkpoint to be copied; of those already queued only the best one is kept. Never waits."""
        with self._changed:
            if self._patient_since is not None and self._is_idle():
                # The checkpoint that could not be copied is gone, and nothing was tried since, so nothing has failed.
                self._patient_since = time.monotonic()
            if self._failing_since is None:
                self._failure = ""  # it was about an older one
            best = item.best.step if item.best is not None else None
            self._waiting = {step: each for step, each in self._waiting.items() if step == best and step < item.step}
            self._waiting[item.step] = item
            self._changed.notify_all()

    def is_over(self, *, within_seconds: float) -> bool:
        """Wait up to a timeout; return whether copying is finished or abandoned."""
        with self._changed:
            return self._changed.wait_for(self._is_idle, within_seconds)

    def _is_idle(self) -> bool:
        return bool(self._stopped_reason) or (not self._waiting and self._sending is None)

    def take_incidents(self) -> list[tuple[str, str]]:
        """Return incidents since the last call: kinds and messages."""
        with self._changed:
            news, self._news = self._news, []
            if retried := [self._retried.pop() for _ in range(len(self._retried))]:
                message = (
                    f"{counted(len(retried), 'request')} to {self._address} failed and then succeeded: {retried[0]}"
                )
                news.append(("mirror_retries", message))
            return news

    def report(self, recorder: Recorder) -> None:
        """Record the incidents since the last call."""
        for incident, message in self.take_incidents():
            recorder.incident(incident, redact_secrets(message))

    def close(self) -> None:
        """Abandon uploads in progress; the next launch sends them."""
        self._retries.cancelled.set()
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(_AT_CLOSE_SECONDS)

    def _work(self) -> None:
        while (item := self._next()) is not None:
            try:
                self._mirror = self._mirror or self._open(self._retries)
                self._mirror.send(item, self._root)
                self._mirror.prune(keep=self._keep)
            except UnreadableError as error:
                self._failed(item, str(error))
                self._retries.cancelled.wait(_PAUSE_SECONDS)
            except CheckpointError as error:
                self._done(why_not=str(error))  # it was deleted or replaced: a newer one is queued, or will be
            except (MirrorConflictError, RunDirectoryError) as error:
                with self._changed:
                    self._stopped_reason, self._sending = str(error), None
                    self._waiting.clear()
                    self._news.append(("mirror", str(error)))
                    self._changed.notify_all()
                return
            except Exception as error:  # noqa: BLE001  # whatever it is must not end the thread unheard
                self._failed(item, str(error) if isinstance(error, StorageError) else describe(error))
                self._retries.cancelled.wait(_PAUSE_SECONDS)
            else:
                with self._changed:
                    if self._failing_since is not None:
                        seconds = format_seconds(time.monotonic() - self._failing_since)
                        message = f"checkpoints are copied to {self._address} again, after {seconds}"
                        self._news.append(("mirror_back", message))
                    self._failing_since = self._patient_since = None
                self._done()

    def _next(self) -> LocalCheckpoint | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            if self._is_closed:
                return None
            self._sending = min(self._waiting)
            return self._waiting.pop(self._sending)

    def _done(self, *, why_not: str = "") -> None:
        with self._changed:
            self._sending, self._failure = None, why_not
            self._changed.notify_all()

    def _failed(self, item: LocalCheckpoint, reason: str) -> None:
        with self._changed:
            self._failure = reason
            if self._failing_since is None:
                self._failing_since = self._patient_since = time.monotonic()
                message = f"checkpoints are not copied for now, and training continues: {reason}"
                self._news.append(("mirror", message))
            newer = [each for step, each in self._waiting.items() if step > item.step]
            if not newer or any(each.best is not None and each.best.step == item.step for each in newer):
                self._waiting.setdefault(item.step, item)
            self._sending = None
            self._changed.notify_all()


def sendable_records(directory: RunDirectory) -> tuple[Mapping[str, int], tuple[str, ...]]:
    """Return the flushed records of the current state: growing ones with their sizes, and small ones."""
    growing = [directory.events, *ledger_files(directory.ledger)]
    fixed = (directory.recipe, directory.identity, directory.plan, directory.environment)
    small = (*fixed, directory.sample_lengths, directory.sample_classes, directory.shard_sizes)
    sizes = {str(each.relative_to(directory.root)): each.stat().st_size for each in growing if each.is_file()}
    return sizes, tuple(each.name for each in small if each.is_file())


_COPIED_RUN = "mirror.json"
_README = b"Checkpoints of a Paceline run, copied while it trained; see docs/guide/object-storage.md.\n"


@dataclass(frozen=True)
class MirrorState:
    """State of the copy that the first process found before the run was opened.

    Attributes:
        notices: Notices for the user.
        names: The commits that were read; if the run does not resume from one of them, that is deliberate.
    """

    notices: tuple[str, ...] = ()
    names: frozenset[str] = field(default_factory=frozenset)


def will_resume(recipe: Recipe, run_dir: Path | None, world: World) -> bool:
    """Whether there is a checkpoint to resume from, here or at the address; called before the processes have joined.

    Raises:
        PacelineError: If the address cannot be read, and this is the only process.
    """
    if run_dir is not None and CheckpointStore(run_dir / "checkpoints").steps():
        return True
    if recipe.checkpoint.mirror is None or (world.world_size > 1 and not _has_initial_weights(recipe)):
        # With several processes, this only needs to know whether the initial weights can be left out.
        return False
    try:
        return bool(list_commits(_remote(recipe.checkpoint.mirror)).commits)
    except (StorageError, CheckpointError):
        if world.world_size == 1:
            raise
        # The error is reported after the processes have joined: otherwise the others would wait for this one.
        return False


def check_all_resume(expected: bool, recipe: Recipe, collectives: Collectives) -> None:
    """Check that either all processes or none left out the initial weights; a collective.

    Raises:
        LaunchError: On every process, if they differ.
    """
    if recipe.checkpoint.mirror is None or not _has_initial_weights(recipe):
        return
    answers = collectives.gather(expected)
    if len(set(answers)) > 1:
        others = ", ".join(str(rank) for rank, answer in enumerate(answers) if answer != answers[0])
        raise LaunchError(
            f"rank 0 found {'a copy' if answers[0] else 'no copy'} at checkpoint.mirror={recipe.checkpoint.mirror}, "
            f"but others (rank {others}) did not: for a run that starts with model.pretrained or "
            "model.initialize_from, every host needs the address's library and credentials; provide them, and try "
            "again."
        )


def check_resumed(expected: bool, recipe: Recipe, decision: ResumeDecision) -> None:
    """Check that a network without its initial weights is not trained from scratch.

    Raises:
        CheckpointError: If it would be.
    """
    if expected and _has_initial_weights(recipe) and decision.choice.path is None and not decision.completed:
        raise CheckpointError(
            "a checkpoint existed when the network was built, so its initial weights were not loaded, but now there is "
            "none to resume from; check the run directory's checkpoints, then run the same command again."
        )


def _has_initial_weights(recipe: Recipe) -> bool:
    return recipe.without_initial_weights() != recipe


def _remote(address: str, retries: Retries | None = None) -> Remote:
    return Remote(address, retries or Retries(patience_seconds=REQUEST_PATIENCE_SECONDS))


def restore_from_mirror(
    directory: RunDirectory, request: ResumeRequest, collectives: Collectives, say: Say
) -> MirrorState:
    """Download newer files from the address into the run directory, before the run is opened; a collective.

    Raises:
        StorageError: If the address cannot be read and there is no local checkpoint to resume from.
        RunDirectoryError: If the copy belongs to another run.
    """
    address = request.recipe.checkpoint.mirror
    if address is None:
        return MirrorState()
    return on_first_without_timeout(
        collectives, request.recipe, partial(look, directory, address, request, say), name="fetch"
    )


def on_first_without_timeout(collectives: Collectives, recipe: Recipe, call: Callable[[], T], *, name: str) -> T:
    """Run a call on the first rank that may take longer than ``parallel.timeout``, such as reading a large checkpoint.

    The others wait in many short collectives, since a single one may not take that long. Collective: every rank
    receives the result or the error.

    Args:
        collectives: The run's collectives.
        recipe: Its ``parallel.timeout`` limits how long processes wait for one another.
        call: Runs in a thread if there are several processes.
        name: Name of the thread.
    """
    if collectives.world.world_size == 1:
        return call()
    task = run_in_thread(call, name=name) if collectives.world.is_first else None
    patience = recipe.parallel.timeout.seconds / 10
    while not collectives.on_rank_zero(lambda: task is None or bool(wait_for([task], patience).done)):
        pass
    return collectives.on_rank_zero(call if task is None else task.result)


def look(directory: RunDirectory, address: str, request: ResumeRequest, say: Say) -> MirrorState:
    """Read the commits at the address, and fetch the checkpoint to resume from; on the first process.

    Raises:
        StorageError: If the address cannot be read or has no complete checkpoint, and there is no local one either.
        RunDirectoryError: If the copy belongs to another run, or must not be resumed.
    """
    check_links(directory)
    foreign = [each.step for each in foreign_checkpoints(directory, request.recipe)]
    newest, _ = CheckpointStore(directory.checkpoints).newest_complete(exclude=foreign)
    try:
        remote = _remote(address)
        found = list_commits(remote)
        if not found.names:
            # Check that the address is writable before any training.
            remote.write("README", _README)
    except StorageError as error:
        if newest is None:
            raise
        return MirrorState((f"the run resumes from '{directory.root}' alone: {error}",))
    _check_ours(found, directory, address)
    if not found.commits:
        if found.damaged and (newest is None or _copied_run(directory) is None):
            raise StorageError(
                f"all commits at {address} are damaged: {found.damaged[0]}. Existing files there are not overwritten; "
                "start again with another address."
            )
        return MirrorState(found.damaged, found.names)
    if request.resume == "never":
        raise RunDirectoryError(
            f"checkpoint.mirror={address} holds a copy of a run already, but resume=never was given; choose another "
            "address, or leave resume out to continue it."
        )

    def accept(folder: Path) -> None:
        copy = RunDirectory(folder)
        if copy.plan.is_file() and copy.recipe.is_file():
            check_same_run(copy, request, address=address)
        # Before the records and checkpoints that it claims.
        if _copied_run(directory) is None:
            write_json(directory.root / _COPIED_RUN, {"run": found.commits[0].run})

    fetched = fetch_newest(
        remote,
        _wanted(found, directory, address, request.resume),
        directory.root,
        after_step=-1 if newest is None else step_of(newest) or 0,
        log=say,
        accept=accept,
    )
    gone_on = () if fetched is None else (f"the run resumes from its copy at {address}, of step {fetched.step}",)
    return MirrorState((*found.damaged, *gone_on), found.names)


def _wanted(found: CommitListing, directory: RunDirectory, address: str, resume: str) -> tuple[Commit, ...]:
    """Return the candidate commits; with ``--resume CHECKPOINT``, only if there is no local checkpoint.

    Raises:
        RunDirectoryError: If the requested checkpoint is not there.
    """
    if resume == "auto":
        return found.commits
    path = Path(resume)
    step = step_of(path)
    if step is None or path.parent.resolve() != directory.checkpoints.resolve() or not never_trained(directory):
        return ()
    wanted = tuple(each for each in found.commits if each.step == step)
    if not wanted:
        steps = ", ".join(str(each) for each in sorted({each.step for each in found.commits}))
        raise RunDirectoryError(
            f"resume={resume}: there is no run in '{directory.root}', and the copies at {address} are of other steps "
            f"({steps}); give one of those, or leave resume out."
        )
    return wanted


def _check_ours(found: CommitListing, directory: RunDirectory, address: str) -> None:
    """Refuse the copy of another run.

    Raises:
        RunDirectoryError: If the copy belongs to another run.
    """
    run = _copied_run(directory)
    if found.commits and (found.commits[0].run != run if run is not None else not never_trained(directory)):
        raise RunDirectoryError(
            f"checkpoint.mirror={address} holds a copy of another run than '{directory.root}'; choose another address, "
            "or another run directory to resume from that copy."
        )


def _copied_run(directory: RunDirectory) -> str | None:
    """Return the identity under which the run in a directory is copied; None if it never was."""
    try:
        run = load_json((directory.root / _COPIED_RUN).read_text(encoding="utf-8"))["run"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return run if isinstance(run, str) else None


@contextlib.contextmanager
def mirror_checkpoints(
    directory: RunDirectory,
    request: ResumeRequest,
    decision: ResumeDecision,
    mirror_state: MirrorState,
    collectives: Collectives,
    say: Say,
) -> Iterator[Mirroring | None]:
    """Context in which the first process copies the run's checkpoints; a collective.

    Args:
        directory: The opened run directory, with its records cut back.
        request: The user's request.
        decision: How the run starts.
        mirror_state: What was found at the address.
        collectives: All processes.
        say: Receives notices for the user.
    """
    recipe = request.recipe
    if recipe.checkpoint.mirror is None:
        yield None
        return
    choice: ResumePoint | None = decision.choice
    if decision.completed:
        store = CheckpointStore(directory.checkpoints)
        newest = on_first_without_timeout(collectives, recipe, lambda: store.newest_complete()[0], name="verify")
        choice = None if newest is None else ResumePoint(newest, step_of(newest) or 0)
    first = choice
    mirroring = collectives.on_all_ranks(
        lambda: _begin(directory, request, first, mirror_state) if first and collectives.world.is_first else None
    )
    try:
        if decision.completed:  # its last checkpoint may not be there yet
            wait_until_copied(mirroring, recipe, collectives, lambda each: each.is_failing)
            if mirroring is not None and mirroring.problem:
                say(f"the newest checkpoint of this run is not at {recipe.checkpoint.mirror}: {mirroring.problem}")
        yield None if decision.completed else mirroring
    finally:
        if mirroring is not None:
            mirroring.close()


def _begin(
    directory: RunDirectory, request: ResumeRequest, choice: ResumePoint, mirror_state: MirrorState
) -> Mirroring:
    """Start copying, beginning with the chosen checkpoint if it is not there yet."""
    address = request.recipe.checkpoint.mirror
    assert address is not None
    run = _copied_run(directory) or secrets.token_hex(8)
    if _copied_run(directory) is None:
        write_json(directory.root / _COPIED_RUN, {"run": run})

    def open_mirror(retries: Retries) -> Mirror:
        remote = _remote(address, retries)
        found = list_commits(remote)
        _check_ours(found, directory, address)
        further = [each.step for each in commit_chain(found.commits) if each.step > choice.step]
        new = {each.name for each in found.commits if each.step in further} - mirror_state.names
        if request.resume == "auto" and new:  # not read before, so that this run may resume from it
            raise MirrorConflictError(
                f"{address} holds a copy of step {further[0]}, which this launch could not see when it started at step "
                f"{choice.step}: it uploads nothing there. Stop it and run the same command again to resume from that "
                f"copy."
            )
        return Mirror(remote, run, found)

    mirroring = Mirroring(open_mirror, directory.root, request.recipe.checkpoint)
    if choice.path is not None:
        best = CheckpointStore(directory.checkpoints).read_best()
        growing, small = sendable_records(directory)
        mirroring.submit(LocalCheckpoint(step=choice.step, path=choice.path, growing=growing, small=small, best=best))
    return mirroring


def wait_until_copied(
    mirroring: Mirroring | None,
    recipe: Recipe,
    collectives: Collectives,
    has_ended: Callable[[Mirroring], bool],
    tick: Callable[[], object] = lambda: None,
) -> None:
    """Wait until everything is copied, at most ``checkpoint.mirror_wait``; a collective.

    Args:
        mirroring: The copying thread, on the first process.
        recipe: The run's recipe.
        collectives: All processes.
        has_ended: Whether the run has ended, so that no more checkpoints follow.
        tick: Called repeatedly while waiting.
    """
    patience = min(recipe.parallel.timeout.seconds / 10, 0.5)
    deadline = time.monotonic() + recipe.checkpoint.mirror_wait.seconds

    def is_over() -> bool:
        is_copied = mirroring is None or mirroring.is_over(within_seconds=patience) or has_ended(mirroring)
        return is_copied or time.monotonic() > deadline

    while not collectives.on_rank_zero(is_over):
        tick()
