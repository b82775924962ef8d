"""Faults that a drill injects, and the required reaction to each."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from paceline.checkpoint.store import CheckpointStore, checkpoint_name
from paceline.files import is_ignored
from paceline.recipe.load import load_recipe
from paceline.records.events import truncate_after
from paceline.records.reader import read_plan
from paceline.records.run_directory import RunDirectory
from paceline.world import STOP_SIGNALS
from paceline_advisor.drill.ground import Again, Disturbed, Ground, SkippedError, audit_objections, resumes
from paceline_advisor.launches import Launch, last_step, said

_FAILED, _REFUSED, _STOPPED = 1, 2, 75
_SILENT_SECONDS = 3.0
_SLOW_SECONDS = 4.0
_PATIENCE = "20 seconds"
_BUSY_SECONDS = 2.0
_YEAR_SECONDS = 365 * 86_400

Strike = Callable[[Launch, Path], None]


@dataclass(frozen=True)
class Fault:
    """One way in which a run is disturbed.

    Attributes:
        name: Its name for ``--only``.
        does: What it does, in one line.
        perform: Disturbs a run of that name and recovers it; raises SkippedError if it cannot.
    """

    name: str
    does: str
    perform: Callable[[Ground, str], Disturbed]


def _need_several(ground: Ground, why: str) -> None:
    if ground.processes == 1:
        raise SkippedError(f"{why}: give --processes 2 or more")


def _undisturbed(ground: Ground, name: str) -> Disturbed:
    run_dir = ground.scratch / name
    ground.train_undisturbed(run_dir)
    return Disturbed(run_dir=run_dir, step=ground.steps, exit_code=0, message="", steps_again=0)


# ---------------------------------------------------------------------------------------------- deaths


def _kill_rank(rank: int, launch: Launch, _: Path) -> None:
    launch.send(signal.SIGKILL, [launch.ranks()[rank]])


def _killed(strike: Strike, ground: Ground, name: str) -> Disturbed:
    found = ground.disturb(name, strike)
    _expect(found, _FAILED, -signal.SIGKILL)
    ground.recover(found)
    return found


def _kill_launcher(ground: Ground, name: str) -> Disturbed:
    _need_several(ground, "one process has no launcher")
    return _killed(lambda launch, _: launch.process.kill(), ground, name)


def _kill_worker(ground: Ground, name: str) -> Disturbed:
    def strike(launch: Launch, _: Path) -> None:
        workers = launch.workers()
        if not workers:
            raise SkippedError("this recipe starts no loader processes here")
        launch.send(signal.SIGKILL, workers[:1])

    return _killed(strike, ground, name)


def _kill_in_save(ground: Ground, name: str) -> Disturbed:
    """The time window is short: a kill that comes too late is retried once."""

    def strike(launch: Launch, run_dir: Path) -> None:
        launch.wait_until(lambda: _being_saved(run_dir))
        launch.kill()

    for attempt in range(5):
        with contextlib.suppress(SkippedError):
            found = ground.disturb(f"{name}-{attempt}", strike)
            if _being_saved(found.run_dir):
                ground.recover(found)
                if _being_saved(found.run_dir):
                    found.objections.append("the remains of the killed save are still there")
                return found
    raise SkippedError("no kill hit a save: saves are too short here; give more --steps or a larger model")


def _being_saved(run_dir: Path) -> bool:
    try:
        return any(name.startswith(".saving-") for name in os.listdir(run_dir / "checkpoints"))
    except FileNotFoundError:
        return False


# ---------------------------------------------------------------------------------------------- stops


def _signal_rank(number: signal.Signals, launch: Launch, _: Path) -> None:
    launch.send(number, launch.ranks()[-1:])


def _signal_all(number: signal.Signals, launch: Launch, _: Path) -> None:
    launch.send(number, launch.family())


def _stopped(strike: Strike, ground: Ground, name: str) -> Disturbed:
    found = ground.disturb(name, strike)
    _expect(found, _STOPPED)
    path, _ = CheckpointStore(found.run_dir / "checkpoints").newest_complete()
    newest = 0 if path is None else int(path.name.removeprefix("step-"))
    if newest != found.step:
        found.objections.append(f"stopped after step {found.step}, but its newest whole checkpoint is of step {newest}")
    ground.recover(found)
    return found


# ---------------------------------------------------------------------------------------------- pauses


def _lived(strike: Strike, ground: Ground, name: str) -> Disturbed:
    """A disturbance that the run must survive by itself."""
    times: list[float] = []
    steps: list[int] = []

    def timed(launch: Launch, run_dir: Path) -> None:
        strike(launch, run_dir)
        steps.append(last_step(run_dir))
        times.append(time.monotonic())
        launch.wait_until(lambda: last_step(run_dir) > steps[-1])
        times.append(time.monotonic())

    found = ground.disturb(name, timed, survives=True)
    _expect(found, 0)
    found.step, found.steps_again = steps[-1], 0
    found.seconds_to_recover = times[-1] - times[-2]
    return found


def _hang(launch: Launch, _: Path) -> None:
    rank = launch.ranks()[-1:]
    launch.send(signal.SIGSTOP, rank)
    time.sleep(_SILENT_SECONDS)
    launch.send(signal.SIGCONT, rank)


def _stopped_for_good(ground: Ground, name: str) -> Disturbed:
    _need_several(ground, "nobody waits for the only process")

    def strike(launch: Launch, _: Path) -> None:
        launch.send(signal.SIGSTOP, launch.ranks()[-1:])

    found = ground.disturb(name, strike, again=Again(overrides=(f"parallel.timeout={_PATIENCE}",)))
    _expect(found, _FAILED, words=[f"for rank {ground.processes - 1} on "])
    ground.recover(found)
    return found


def _slow(launch: Launch, _: Path) -> None:
    rank = launch.ranks()[-1:]
    end = time.monotonic() + _SLOW_SECONDS
    while time.monotonic() < end and launch.process.poll() is None:
        launch.send(signal.SIGSTOP, rank)
        time.sleep(0.2)
        launch.send(signal.SIGCONT, rank)
        time.sleep(0.002)


# ---------------------------------------------------------------------------------------------- disks


def _disk_full(ground: Ground, name: str) -> Disturbed:
    size = 64 * 2**20 + 6 * sum(path.stat().st_size for path in ground.undisturbed.rglob("*") if path.is_file())

    def make(run_dir: Path) -> None:
        run_dir.mkdir()
        cleanup.enter_context(_mounted(["-t", "tmpfs", "-o", f"size={size}", "paceline-drill"], run_dir))

    def fill(_: Launch, run_dir: Path) -> None:
        with contextlib.suppress(OSError), (run_dir / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(2**20))
        with contextlib.suppress(OSError), (run_dir / "rest").open("wb", buffering=0) as file:
            while True:
                file.write(b"\0")

    with contextlib.ExitStack() as cleanup:
        found = ground.disturb(name, fill, make=make)
        _expect(found, _FAILED, words=["No space left"])
        for each in ("filler", "rest"):
            (found.run_dir / each).unlink(missing_ok=True)
        ground.recover(found)
        # The mount disappears; files to be compared remain.
        kept = found.run_dir.with_name(f"{name}-kept")
        shutil.copytree(found.run_dir, kept)
        found.run_dir = kept
    return found


def _file_limit(ground: Ground, name: str) -> Disturbed:
    def strike(launch: Launch, _: Path) -> None:
        pid = launch.ranks()[0]
        hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, hard))

    found = ground.disturb(name, strike)
    _expect(found, _FAILED, words=["File too large"])
    ground.recover(found)
    return found


def _read_only(ground: Ground, name: str) -> Disturbed:
    cleanup = contextlib.ExitStack()

    def strike(_: Launch, run_dir: Path) -> None:
        folder = run_dir / "checkpoints"
        if os.geteuid():
            folder.chmod(0o555)
            cleanup.callback(folder.chmod, 0o755)
            return
        # Root may write regardless of file modes.
        cleanup.enter_context(_mounted(["--bind", str(folder)], folder))
        _mount(["-o", "remount,bind,ro", str(folder)], busy_seconds=_BUSY_SECONDS)

    with cleanup:
        found = ground.disturb(name, strike)
    _expect(found, _FAILED, words=["Permission denied" if os.geteuid() else "Read-only file system"])
    ground.recover(found)
    return found


def _moved(ground: Ground, name: str) -> Disturbed:
    moved: list[Path] = []

    def strike(_: Launch, run_dir: Path) -> None:
        moved.append(run_dir.rename(run_dir.with_name(f"{run_dir.name}-moved")))

    found = ground.disturb(name, strike)
    _expect(found, _FAILED, words=["was moved"])
    if found.run_dir.exists():
        found.objections.append("something was written to the old path")
    found.run_dir, found.step = moved[-1], last_step(moved[-1])
    ground.recover(found)
    return found


@contextlib.contextmanager
def _mounted(arguments: list[str], where: Path) -> Iterator[None]:
    _mount([*arguments, str(where)])
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(where)], check=False, capture_output=True)


def _mount(arguments: list[str], *, busy_seconds: float = 0.0) -> None:
    """Mount; retry for a while if a file in it is being written."""
    if shutil.which("mount") is None:
        raise SkippedError("there is no mount command here")
    end = time.monotonic() + busy_seconds
    while True:
        done = subprocess.run(["mount", *arguments], check=False, capture_output=True, text=True)
        if "busy" not in done.stderr or time.monotonic() > end:
            break
    if done.returncode:
        raise SkippedError(f"nothing can be mounted here: {' '.join(done.stderr.split())}")


# ---------------------------------------------------------------------------------------------- spoilt files


def _spoilt(spoil: Callable[[Path], None], ground: Ground, name: str) -> Disturbed:
    """Corrupt the largest file of the newest checkpoint, which must be set aside."""
    found = ground.killed(name)
    steps = CheckpointStore(found.run_dir / "checkpoints").steps()
    if len(steps) < 2:
        raise SkippedError("the killed run had no two checkpoints yet; give more --steps")
    newest = found.run_dir / "checkpoints" / checkpoint_name(steps[-1])
    spoil(max((path for path in newest.iterdir() if path.is_file()), key=lambda path: path.stat().st_size))
    ground.recover(found)
    if not list(newest.parent.glob(f"{newest.name}.damaged*")):
        found.objections.append(f"{newest.name} was damaged, but not set aside")
    return found


def _cut_in_half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def _lose_manifest(file: Path) -> None:
    file.with_name("manifest.json").unlink()


def _no_checkpoints(ground: Ground, name: str) -> Disturbed:
    """Check that starting over, which would lose everything, is refused and leaves the records unchanged."""
    found = ground.killed(name)
    checkpoints, events = found.run_dir / "checkpoints", found.run_dir / "events.jsonl"
    before = events.read_bytes()
    away = checkpoints.rename(found.run_dir.with_name(f"{name}-away"))
    _refused(ground, found, "checkpoints")
    if events.read_bytes() != before:
        found.objections.append("its events were changed")
    away.rename(checkpoints)
    ground.recover(found)
    return found


def _foreign(ground: Ground, name: str) -> Disturbed:
    found = ground.killed(name)
    foreign = CheckpointStore(ground.undisturbed / "checkpoints").path(ground.steps)
    copy = Path(shutil.copytree(foreign, found.run_dir / "checkpoints" / foreign.name))
    ground.recover(found)
    if not list(copy.parent.glob(f"{copy.name}.foreign*")):
        found.objections.append(f"{copy.name} belongs to another run, but was not set aside")
    return found


def _cut_events(ground: Ground, name: str) -> Disturbed:
    """Check that the run continues without the lost records and reports it; everything else must be there."""
    found = ground.killed(name)
    events = found.run_dir / "events.jsonl"
    whole = events.read_bytes()
    half = whole[: whole.rfind(b"\n", 0, len(whole) // 2) + 1]
    events.write_bytes(half)
    ground.recover(found)
    added, resumed_at = events.read_bytes().removeprefix(half), resumes(found.run_dir)
    if b'"missing_records"' not in added or not audit_objections(found.run_dir):
        found.objections.append("records are missing, but no incident or no audit failure reports it")
    events.write_bytes(whole)
    truncate_after(events, resumed_at[-1])
    with events.open("ab") as file:
        file.write(added)
    return found


def _torn(where: str, ground: Ground, name: str) -> Disturbed:
    found = ground.killed(name)
    path = found.run_dir / where
    if path.is_dir():
        path = max(path.iterdir(), key=lambda each: each.stat().st_size)
        part = path.read_bytes()[:20]  # less than a record's header
    else:
        line = path.read_bytes().rstrip(b"\n").rpartition(b"\n")[2]
        part = line[: len(line) // 2]
    with path.open("ab") as file:
        file.write(part)
    ground.recover(found)
    return found


# ---------------------------------------------------------------------------------------------- images


def _with_images(spoil: Callable[[Path], None], says: Sequence[str], ground: Ground, name: str) -> Disturbed:
    """Check that changed images are refused, and leave no trace in the run."""
    data = load_recipe(ground.recipe, ground.overrides).recipe.data
    if data.dataset != "image_folder" or data.path is None:
        raise SkippedError("this recipe reads no folder of images")
    folder = ground.scratch / f"{name}-images"
    for path in _copy_of_a_class(Path(data.path), folder):
        spoil(path)
    found = ground.killed(name)
    again = Again(overrides=(f"data.path={folder}", "data.max_broken=0"))
    _refused(ground, found, *says, again=again)
    ground.recover(found)
    return found


def _copy_of_a_class(images: Path, target: Path) -> list[Path]:
    """Create a folder of links to the images, with copies for its last training class; returns the copies."""
    source = images
    target.mkdir()
    for name in ("train", None) if (images / "train").is_dir() else (None,):
        entries = sorted(each for each in source.iterdir() if not is_ignored(each.name))
        copied = source / name if name else max(each for each in entries if each.is_dir())
        for entry in entries:
            if entry != copied:
                (target / entry.name).symlink_to(entry)
        source, target = copied, target / copied.name
        target.mkdir()
    return [Path(shutil.copyfile(path, target / path.name)) for path in sorted(source.iterdir())]


def _blank(image: Path) -> None:
    image.write_bytes(bytes(image.stat().st_size))


# ---------------------------------------------------------------------------------------------- otherwise again

# The real clock is shared by the machine and never changed: only the run's own Python sees another time.
_EARLIER = f"""
import time
_now = time.time
time.time = lambda: _now() - {_YEAR_SECONDS}
"""


def _clock_jump(ground: Ground, name: str) -> Disturbed:
    found = ground.killed(name)
    future = time.time() + _YEAR_SECONDS
    for path in found.run_dir.rglob("*"):
        os.utime(path, (future, future))
    patch = ground.scratch / f"{name}-clock"
    patch.mkdir()
    (patch / "sitecustomize.py").write_text(_EARLIER)
    searched = os.pathsep.join(part for part in (str(patch), os.environ.get("PYTHONPATH", "")) if part)
    ground.recover(found, Again(variables={"PYTHONPATH": searched, "TZ": "Pacific/Kiritimati"}))
    return found


def _fewer(ground: Ground, name: str) -> Disturbed:
    _need_several(ground, "there cannot be fewer than one process")
    found = ground.killed(name)
    ground.recover(found, Again(processes=1))
    return found


def _more(ground: Ground, name: str) -> Disturbed:
    _need_several(ground, "the run is not exact, so its results depend on the number of processes")
    plan, processes = read_plan(RunDirectory(ground.undisturbed)), 2 * ground.processes
    parts = math.gcd(*(int(phase["logical_ranks"]) for phase in plan["batch_phases"]))
    if parts % processes:
        raise SkippedError(f"{processes} processes cannot share the run's {parts} logical ranks")
    found = ground.killed(name)
    ground.recover(found, Again(processes=processes))
    return found


def _refused(ground: Ground, found: Disturbed, *says: str, again: Again | None = None) -> None:
    """Start the run again, which must be refused."""
    with ground.begin(found.run_dir, again) as launch:
        found.exit_code, found.message = launch.wait(), said(launch)
    found.step = last_step(found.run_dir)
    _expect(found, _REFUSED, words=says)


def _expect(found: Disturbed, *codes: int, words: Sequence[str] = ()) -> None:
    """Add an objection if the disturbed launch had another exit code, or its message contains none of some words."""
    if found.exit_code not in codes:
        wanted = " or ".join(str(code) for code in codes)
        found.objections.append(f"exit code {found.exit_code}, but it should be {wanted}")
    if words and not any(each in found.message for each in words):
        found.objections.append(f"its message contains none of {', '.join(map(repr, words))}")


def all_faults(processes: int) -> list[Fault]:
    """The fault matrix for a number of processes, in order of execution."""
    faults: list[tuple[str, str, Callable[[Ground, str], Disturbed]]] = [
        ("nothing", "the same run again: its result must be bit-identical", _undisturbed)
    ]
    faults += [
        (f"kill-rank-{rank}", f"SIGKILL to rank {rank}", partial(_killed, partial(_kill_rank, rank)))
        for rank in range(processes)
    ]
    faults += [
        ("kill-all", "SIGKILL to all processes at once", partial(_killed, lambda launch, _: launch.kill())),
        ("kill-launcher", "SIGKILL to the process that started the ranks", _kill_launcher),
        ("kill-worker", "SIGKILL to a loader process", _kill_worker),
        ("kill-in-save", "SIGKILL to all while a checkpoint is being written", _kill_in_save),
    ]
    for number in STOP_SIGNALS:
        rank_only, group = partial(_signal_rank, number), partial(_signal_all, number)
        faults.append((f"{number.name}-rank", f"{number.name} to the last rank", partial(_stopped, rank_only)))
        faults.append((f"{number.name}-group", f"{number.name} to every process of the run", partial(_stopped, group)))
    cut, blank = ("has changed", "cannot be opened"), ("have changed", "cannot be opened")
    halves = "resumes with a class of truncated images, then with intact ones"
    zeros = "resumes with a class of all-zero image files and data.max_broken=0, then with intact ones"
    faults += [
        ("hung-rank", f"SIGSTOP to the last rank, SIGCONT after {_SILENT_SECONDS:.0f} s", partial(_lived, _hang)),
        ("stopped-rank", "SIGSTOP to the last rank, without SIGCONT", _stopped_for_good),
        ("slow-rank", f"SIGSTOP and SIGCONT in turn, for {_SLOW_SECONDS:.0f} s", partial(_lived, _slow)),
        ("disk-full", "the file system of the run is filled up (a small tmpfs; needs root)", _disk_full),
        ("file-limit", "the first rank may not write files larger than 4 KiB (RLIMIT_FSIZE)", _file_limit),
        ("read-only", "the checkpoints directory becomes read-only", _read_only),
        ("moved-directory", "the run directory is renamed while the run trains", _moved),
        ("torn-checkpoint", "the newest checkpoint's largest file is truncated", partial(_spoilt, _cut_in_half)),
        ("flipped-bit", "one bit of the newest checkpoint's largest file is flipped", partial(_spoilt, _flip)),
        ("lost-file", "the newest checkpoint's largest file is deleted", partial(_spoilt, Path.unlink)),
        ("lost-manifest", "the newest checkpoint's manifest is deleted", partial(_spoilt, _lose_manifest)),
        ("no-checkpoints", "the checkpoints are missing at one restart, and back at the next", _no_checkpoints),
        ("foreign-checkpoint", "another run's last checkpoint is copied to the killed run's", _foreign),
        ("cut-events", "the second half of events.jsonl is deleted", _cut_events),
        ("torn-events", "half a line at the end of events.jsonl", partial(_torn, "events.jsonl")),
        ("torn-ledger", "half a record at the end of a ledger", partial(_torn, "ledger")),
        ("half-images", halves, partial(_with_images, _cut_in_half, cut)),
        ("broken-images", zeros, partial(_with_images, _blank, blank)),
        ("clock-jump", "resumes a year earlier, in another time zone, with files from the future", _clock_jump),
        ("fewer-processes", "SIGKILL to all, then one process resumes", _fewer),
        ("more-processes", "SIGKILL to all, then twice as many resume", _more),
    ]
    return [Fault(*each) for each in faults]
