"""Faults that a drill injects, and the required reaction to each."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from paceline.checkpoint.store import CheckpointStore, checkpoint_name
from paceline.host.system import STOP_SIGNALS
from paceline.parsing.files import is_ignored
from paceline.parsing.plain_yaml import yaml_line
from paceline.recipe.load import load_recipe
from paceline.records.events import truncate_after
from paceline.records.reader import read_plan
from paceline.records.run_directory import RunDirectory
from paceline_advisor.drill.context import (
    DrillContext,
    FaultedRun,
    RestartOptions,
    SkippedError,
    audit_problems,
    resumes,
)
from paceline_advisor.launches import CommandProcess, last_step, said

_FAILED, _REFUSED, _STOPPED = 1, 2, 75
_SILENT_SECONDS = 3.0
_SLOW_SECONDS = 4.0
_PATIENCE = "20 seconds"
_BUSY_SECONDS = 2.0
_YEAR_SECONDS = 365 * 86_400
_LAST = slice(-1, None)  # of the ranks

Inject = Callable[[CommandProcess, Path], None]
Perform = Callable[[DrillContext, str], FaultedRun]
"""Disturbs a run of that name and recovers it; raises SkippedError if it cannot."""


def _need_several(context: DrillContext, why: str) -> None:
    if context.processes == 1:
        raise SkippedError(f"{why}: give --processes 2 or more")


def _without_fault(context: DrillContext, name: str) -> FaultedRun:
    run_dir = context.scratch / name
    context.train_undisturbed(run_dir)
    return FaultedRun(run_dir=run_dir, step=context.steps, exit_code=0, message="", steps_again=0)


# ---------------------------------------------------------------------------------------------- deaths


def _signal_ranks(number: signal.Signals, ranks: slice, launch: CommandProcess, _: Path) -> None:
    launch.send(number, launch.ranks()[ranks])


def _recovered(
    inject: Inject,
    context: DrillContext,
    name: str,
    codes: Sequence[int] = (_FAILED, -signal.SIGKILL),
    words: Sequence[str] = (),
    **options: Any,
) -> FaultedRun:
    """Disturb a run, which must end with one of these exit codes and words, and recover it."""
    faulted = context.disturb(name, inject, **options)
    _expect(faulted, *codes, words=words)
    context.recover(faulted)
    return faulted


def _kill_launcher(context: DrillContext, name: str) -> FaultedRun:
    _need_several(context, "one process has no launcher")
    return _recovered(lambda launch, _: launch.process.kill(), context, name)


def _kill_worker(context: DrillContext, name: str) -> FaultedRun:
    def inject(launch: CommandProcess, _: Path) -> None:
        workers = launch.workers()
        if not workers:
            raise SkippedError("this recipe starts no loader processes here")
        launch.send(signal.SIGKILL, workers[:1])

    return _recovered(inject, context, name)


def _kill_in_save(context: DrillContext, name: str) -> FaultedRun:
    """The time window is short: a kill that comes too late is retried once."""

    def inject(launch: CommandProcess, run_dir: Path) -> None:
        launch.wait_until(lambda: _being_saved(run_dir))
        launch.kill()

    for attempt in range(5):
        with contextlib.suppress(SkippedError):
            faulted = context.disturb(f"{name}-{attempt}", inject)
            if _being_saved(faulted.run_dir):
                context.recover(faulted)
                if _being_saved(faulted.run_dir):
                    faulted.objections.append("the remains of the killed save are still there")
                return faulted
    raise SkippedError("no kill hit a save: saves are too short here; give more --steps or a larger model")


def _being_saved(run_dir: Path) -> bool:
    try:
        return any(name.startswith(".saving-") for name in os.listdir(run_dir / "checkpoints"))
    except FileNotFoundError:
        return False


# ---------------------------------------------------------------------------------------------- stops


def _stopped(inject: Inject, context: DrillContext, name: str) -> FaultedRun:
    faulted = context.disturb(name, inject)
    _expect(faulted, _STOPPED)
    path, _ = CheckpointStore(faulted.run_dir / "checkpoints").newest_complete()
    newest = 0 if path is None else int(path.name.removeprefix("step-"))
    if newest != faulted.step:
        faulted.objections.append(
            f"stopped after step {faulted.step}, but its newest whole checkpoint is of step {newest}"
        )
    context.recover(faulted)
    return faulted


# ---------------------------------------------------------------------------------------------- pauses


def _survived(inject: Inject, context: DrillContext, name: str) -> FaultedRun:
    """A disturbance that the run must survive by itself."""
    times: list[float] = []
    steps: list[int] = []

    def timed(launch: CommandProcess, run_dir: Path) -> None:
        inject(launch, run_dir)
        steps.append(last_step(run_dir))
        times.append(time.monotonic())
        launch.wait_until(lambda: last_step(run_dir) > steps[-1])
        times.append(time.monotonic())

    faulted = context.disturb(name, timed, survives=True)
    _expect(faulted, 0)
    faulted.step, faulted.steps_again = steps[-1], 0
    faulted.seconds_to_recover = times[-1] - times[-2]
    return faulted


def _hang(launch: CommandProcess, _: Path) -> None:
    rank = launch.ranks()[-1:]
    launch.send(signal.SIGSTOP, rank)
    time.sleep(_SILENT_SECONDS)
    launch.send(signal.SIGCONT, rank)


def _stopped_to_completion(context: DrillContext, name: str) -> FaultedRun:
    _need_several(context, "nobody waits for the only process")
    restart = RestartOptions(overrides=(f"parallel.timeout={_PATIENCE}",))
    words = [f"for rank {context.processes - 1} on "]
    return _recovered(partial(_signal_ranks, signal.SIGSTOP, _LAST), context, name, [_FAILED], words, restart=restart)


def _slow(launch: CommandProcess, _: Path) -> None:
    rank = launch.ranks()[-1:]
    end = time.monotonic() + _SLOW_SECONDS
    while time.monotonic() < end and launch.process.poll() is None:
        launch.send(signal.SIGSTOP, rank)
        time.sleep(0.2)
        launch.send(signal.SIGCONT, rank)
        time.sleep(0.002)


# ---------------------------------------------------------------------------------------------- disks


def _disk_full(context: DrillContext, name: str) -> FaultedRun:
    size = 64 * 2**20 + 6 * sum(path.stat().st_size for path in context.undisturbed.rglob("*") if path.is_file())

    def make(run_dir: Path) -> None:
        run_dir.mkdir()
        cleanup.enter_context(_mounted(["-t", "tmpfs", "-o", f"size={size}", "paceline-drill"], run_dir))

    def fill(_: CommandProcess, run_dir: Path) -> None:
        with contextlib.suppress(OSError), (run_dir / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(2**20))
        with contextlib.suppress(OSError), (run_dir / "rest").open("wb", buffering=0) as file:
            while True:
                file.write(b"\0")

    with contextlib.ExitStack() as cleanup:
        faulted = context.disturb(name, fill, make=make)
        _expect(faulted, _FAILED, words=["No space left"])
        for each in ("filler", "rest"):
            (faulted.run_dir / each).unlink(missing_ok=True)
        context.recover(faulted)
        # The mount disappears; files to be compared remain.
        kept = faulted.run_dir.with_name(f"{name}-kept")
        shutil.copytree(faulted.run_dir, kept)
        faulted.run_dir = kept
    return faulted


def _file_limit(context: DrillContext, name: str) -> FaultedRun:
    def inject(launch: CommandProcess, _: Path) -> None:
        import resource  # not on Windows, where a drill says so

        pid = launch.ranks()[0]
        hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, hard))

    return _recovered(inject, context, name, [_FAILED], ["File too large"])


def _read_only(context: DrillContext, name: str) -> FaultedRun:
    cleanup = contextlib.ExitStack()

    def inject(_: CommandProcess, run_dir: Path) -> None:
        folder = run_dir / "checkpoints"
        if os.geteuid():
            folder.chmod(0o555)
            cleanup.callback(folder.chmod, 0o755)
            return
        # Root may write regardless of file modes.
        cleanup.enter_context(_mounted(["--bind", str(folder)], folder))
        _mount(["-o", "remount,bind,ro", str(folder)], busy_seconds=_BUSY_SECONDS)

    with cleanup:
        faulted = context.disturb(name, inject)
    _expect(faulted, _FAILED, words=["Permission denied" if os.geteuid() else "Read-only file system"])
    context.recover(faulted)
    return faulted


def _moved(context: DrillContext, name: str) -> FaultedRun:
    moved: list[Path] = []

    def inject(_: CommandProcess, run_dir: Path) -> None:
        moved.append(run_dir.rename(run_dir.with_name(f"{run_dir.name}-moved")))

    faulted = context.disturb(name, inject)
    _expect(faulted, _FAILED, words=["was moved"])
    if faulted.run_dir.exists():
        faulted.objections.append("something was written to the old path")
    faulted.run_dir, faulted.step = moved[-1], last_step(moved[-1])
    context.recover(faulted)
    return faulted


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
        process = subprocess.run(["mount", *arguments], check=False, capture_output=True, text=True)
        if "busy" not in process.stderr or time.monotonic() > end:
            break
    if process.returncode:
        raise SkippedError(f"nothing can be mounted here: {' '.join(process.stderr.split())}")


# ---------------------------------------------------------------------------------------------- spoilt files


def _corrupted(corrupt: Callable[[Path], None], context: DrillContext, name: str) -> FaultedRun:
    """Corrupt the largest file of the newest checkpoint, which must be set aside."""
    faulted = context.killed(name)
    steps = CheckpointStore(faulted.run_dir / "checkpoints").steps()
    if len(steps) < 2:
        raise SkippedError("the killed run had no two checkpoints yet; give more --steps")
    newest = faulted.run_dir / "checkpoints" / checkpoint_name(steps[-1])
    corrupt(max((path for path in newest.iterdir() if path.is_file()), key=lambda path: path.stat().st_size))
    context.recover(faulted)
    if not list(newest.parent.glob(f"{newest.name}.damaged*")):
        faulted.objections.append(f"{newest.name} was damaged, but not set aside")
    return faulted


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


def _refused_unchanged(spoil: Callable[[Path], None], expected: str, context: DrillContext, name: str) -> FaultedRun:
    """Check that a spoilt directory is refused, since the run would lose steps, and that no file is changed."""
    faulted = context.killed(name)
    intact = Path(shutil.copytree(faulted.run_dir, faulted.run_dir.with_name(f"{name}-intact"), symlinks=True))
    spoil(faulted.run_dir)
    before = _contents(faulted.run_dir)
    _refused(context, faulted, expected)
    if _contents(faulted.run_dir) != before:
        faulted.objections.append("its files were changed")
    shutil.rmtree(faulted.run_dir)
    intact.rename(faulted.run_dir)
    faulted.step = last_step(faulted.run_dir)
    context.recover(faulted)
    return faulted


def _contents(run_dir: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file() and path.name != ".lock"}


def _lose(names: Sequence[str], run_dir: Path) -> None:
    for name in names:
        (run_dir / name).rename(run_dir.with_name(f"{run_dir.name}-{name}"))


def _newer_format(run_dir: Path) -> None:
    manifest = max(run_dir.glob("checkpoints/step-*/manifest.json"))
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format_version": 1_000, "digest": ""}))


def _older_weights(context: DrillContext, name: str) -> FaultedRun:
    """Check that a finished run without its last checkpoint gives no weights under its name."""
    run_dir = Path(shutil.copytree(context.undisturbed, context.scratch / name))
    *older, newest = CheckpointStore(run_dir / "checkpoints").steps()
    if not older:
        raise SkippedError("the run has no two checkpoints; give more --steps")
    shutil.rmtree(run_dir / "checkpoints" / checkpoint_name(newest))
    arguments = ["export", str(run_dir), "--format", "safetensors", "--output", f"{run_dir}.safetensors"]
    with CommandProcess(arguments, run_dir.with_name(f"{name}-export"), limit_seconds=context.limit_seconds) as launch:
        faulted = FaultedRun(run_dir=run_dir, step=newest, exit_code=launch.wait(), message=said(launch), steps_again=0)
        faulted.seconds_to_recover = time.monotonic() - launch.begun
    _expect(faulted, _REFUSED, words=[f"step {newest}"])
    return faulted


def _foreign(context: DrillContext, name: str) -> FaultedRun:
    faulted = context.killed(name)
    foreign = CheckpointStore(context.undisturbed / "checkpoints").path(context.steps)
    copy = Path(shutil.copytree(foreign, faulted.run_dir / "checkpoints" / foreign.name))
    context.recover(faulted)
    if not list(copy.parent.glob(f"{copy.name}.foreign*")):
        faulted.objections.append(f"{copy.name} belongs to another run, but was not set aside")
    return faulted


def _cut_events(cut: Callable[[list[bytes]], list[bytes]], context: DrillContext, name: str) -> FaultedRun:
    """Check that the run continues without the lost records and reports it; everything else must be there."""
    faulted = context.killed(name)
    events = faulted.run_dir / "events.jsonl"
    content = events.read_bytes()
    events.write_bytes(b"".join(cut(content.splitlines(keepends=True))))
    context.recover(faulted)
    resumed_at, log = resumes(faulted.run_dir), events.read_bytes()
    incident = log.find(b'"missing_records"')  # in the first line that the resumed launch wrote
    added = log[log.rfind(b"\n", 0, incident) + 1 :] if incident >= 0 else b""
    if not added or not audit_problems(faulted.run_dir):
        faulted.objections.append("records are missing, but no incident or no audit failure reports it")
    if resumed_at:  # else there is an objection already
        events.write_bytes(content)
        truncate_after(events, resumed_at[-1])
        with events.open("ab") as file:
            file.write(added)
    return faulted


def _first_half(lines: list[bytes]) -> list[bytes]:
    return lines[: len(lines) // 2]


def _without_middle(lines: list[bytes]) -> list[bytes]:
    middle = range(len(lines) // 3, len(lines) // 2)
    return [line for at, line in enumerate(lines) if at not in middle or b'"event": "step"' not in line]


def _torn(where: str, context: DrillContext, name: str) -> FaultedRun:
    faulted = context.killed(name)
    path = faulted.run_dir / where
    if path.is_dir():
        path = max(path.iterdir(), key=lambda each: each.stat().st_size)
        part = path.read_bytes()[:20]  # less than a record's header
    else:
        line = path.read_bytes().rstrip(b"\n").rpartition(b"\n")[2]
        part = line[: len(line) // 2]
    with path.open("ab") as file:
        file.write(part)
    context.recover(faulted)
    return faulted


# ---------------------------------------------------------------------------------------------- images


def _with_images(
    corrupt: Callable[[Path], None], expected_words: Sequence[str], context: DrillContext, name: str
) -> FaultedRun:
    """Check that changed images are refused, and leave no trace in the run."""
    data = load_recipe(context.recipe, context.overrides).recipe.data
    if data.dataset != "image_folder" or data.path is None:
        raise SkippedError("this recipe reads no folder of images")
    folder = context.scratch / f"{name}-images"
    for path in _copy_of_a_class(Path(data.path), folder):
        corrupt(path)
    faulted = context.killed(name)
    restart = RestartOptions(overrides=(f"data.path={yaml_line(str(folder))}", "data.max_broken=0"))
    _refused(context, faulted, *expected_words, restart=restart)
    context.recover(faulted)
    return faulted


def _copy_of_a_class(source: Path, target: Path) -> list[Path]:
    """Create a folder of links to the images, with copies for its last training class; returns the copies."""
    target.mkdir()
    for name in ("train", None) if (source / "train").is_dir() else (None,):
        entries = sorted(each for each in source.iterdir() if not is_ignored(each.name))
        copied = source / name if name else max(each for each in entries if each.is_dir())
        for entry in entries:
            if entry != copied:
                (target / entry.name).symlink_to(entry)
        source, target = copied, target / copied.name
        target.mkdir()
    return [Path(shutil.copyfile(path, target / path.name)) for path in sorted(source.iterdir()) if path.is_file()]


def _zeroed(image: Path) -> None:
    image.write_bytes(bytes(image.stat().st_size))


# ---------------------------------------------------------------------------------------------- otherwise again

# The real clock is shared by the machine and never changed: only the run's own Python sees another time.
_EARLIER = f"""
import time
_now = time.time
time.time = lambda: _now() - {_YEAR_SECONDS}
"""


def _clock_jump(context: DrillContext, name: str) -> FaultedRun:
    faulted = context.killed(name)
    future = time.time() + _YEAR_SECONDS
    for path in faulted.run_dir.rglob("*"):
        os.utime(path, (future, future))
    patch = context.scratch / f"{name}-clock"
    patch.mkdir()
    (patch / "sitecustomize.py").write_text(_EARLIER)
    searched = os.pathsep.join(part for part in (str(patch), os.environ.get("PYTHONPATH", "")) if part)
    context.recover(faulted, RestartOptions(variables={"PYTHONPATH": searched, "TZ": "Pacific/Kiritimati"}))
    return faulted


def _fewer_processes(context: DrillContext, name: str) -> FaultedRun:
    _need_several(context, "there cannot be fewer than one process")
    faulted = context.killed(name)
    context.recover(faulted, RestartOptions(processes=1))
    return faulted


def _more_processes(context: DrillContext, name: str) -> FaultedRun:
    _need_several(context, "the run is not exact, so its results depend on the number of processes")
    plan, processes = read_plan(RunDirectory(context.undisturbed)), 2 * context.processes
    parts = math.gcd(*(int(phase["logical_ranks"]) for phase in plan["batch_phases"]))
    if parts % processes:
        raise SkippedError(f"{processes} processes cannot share the run's {parts} logical ranks")
    faulted = context.killed(name)
    context.recover(faulted, RestartOptions(processes=processes))
    return faulted


def _refused(
    context: DrillContext, faulted: FaultedRun, *expected_words: str, restart: RestartOptions | None = None
) -> None:
    """Start the run again, which must be refused."""
    with context.begin(faulted.run_dir, restart) as launch:
        faulted.exit_code, faulted.message = launch.wait(), said(launch)
    faulted.step = last_step(faulted.run_dir)
    _expect(faulted, _REFUSED, words=expected_words)


def _expect(faulted: FaultedRun, *codes: int, words: Sequence[str] = ()) -> None:
    """Add an objection if the disturbed launch had another exit code, or its message contains none of some words."""
    if faulted.exit_code not in codes:
        expected = " or ".join(str(code) for code in codes)
        faulted.objections.append(f"exit code {faulted.exit_code}, but it should be {expected}")
    if words and not any(each in faulted.message for each in words):
        faulted.objections.append(f"its message contains none of {', '.join(map(repr, words))}")


def all_faults(processes: int) -> dict[str, tuple[str, Perform]]:
    """The fault matrix by name, in order of execution: what each fault does, in one line, and how."""
    faults: list[tuple[str, str, Perform]] = [
        ("nothing", "the same run again: its result must be bit-identical", _without_fault)
    ]
    for rank in range(processes):
        kill = partial(_signal_ranks, signal.SIGKILL, slice(rank, rank + 1))
        faults.append((f"kill-rank-{rank}", f"SIGKILL to rank {rank}", partial(_recovered, kill)))
    faults += [
        ("kill-all", "SIGKILL to all processes at once", partial(_recovered, lambda launch, _: launch.kill())),
        ("kill-launcher", "SIGKILL to the process that started the ranks", _kill_launcher),
        ("kill-worker", "SIGKILL to a loader process", _kill_worker),
        ("kill-in-save", "SIGKILL to all while a checkpoint is being written", _kill_in_save),
    ]
    for number in STOP_SIGNALS:
        rank_only = partial(_signal_ranks, number, _LAST)

        def group(launch: CommandProcess, _: Path, number: signal.Signals = number) -> None:
            launch.send(number, launch.family())

        faults.append((f"{number.name}-rank", f"{number.name} to the last rank", partial(_stopped, rank_only)))
        faults.append((f"{number.name}-group", f"{number.name} to every process of the run", partial(_stopped, group)))
    cut, blank = ("has changed", "cannot be opened"), ("have changed", "cannot be opened")
    halves = "resumes with a class of truncated images, then with intact ones"
    zeros = "resumes with a class of all-zero image files and data.max_broken=0, then with intact ones"
    no_checkpoints = partial(_refused_unchanged, partial(_lose, ["checkpoints"]), "checkpoints")
    only_ledger = partial(_refused_unchanged, partial(_lose, ["checkpoints", "events.jsonl", "run.json"]), ".ids")
    newer_format = partial(_refused_unchanged, _newer_format, "format version")
    faults += [
        ("hung-rank", f"SIGSTOP to the last rank, SIGCONT after {_SILENT_SECONDS:.0f} s", partial(_survived, _hang)),
        ("stopped-rank", "SIGSTOP to the last rank, without SIGCONT", _stopped_to_completion),
        ("slow-rank", f"SIGSTOP and SIGCONT in turn, for {_SLOW_SECONDS:.0f} s", partial(_survived, _slow)),
        ("disk-full", "the file system of the run is filled up (a small tmpfs; needs root)", _disk_full),
        ("file-limit", "the first rank may not write files larger than 4 KiB (RLIMIT_FSIZE)", _file_limit),
        ("read-only", "the checkpoints directory becomes read-only", _read_only),
        ("moved-directory", "the run directory is renamed while the run trains", _moved),
        ("torn-checkpoint", "the newest checkpoint's largest file is truncated", partial(_corrupted, _cut_in_half)),
        ("flipped-bit", "one bit of the newest checkpoint's largest file is flipped", partial(_corrupted, _flip)),
        ("lost-file", "the newest checkpoint's largest file is deleted", partial(_corrupted, Path.unlink)),
        ("lost-manifest", "the newest checkpoint's manifest is deleted", partial(_corrupted, _lose_manifest)),
        ("no-checkpoints", "the checkpoints are missing at one restart, and back at the next", no_checkpoints),
        ("only-ledger", "only the ledger is left of the records at one restart, and all at the next", only_ledger),
        ("newer-format", "the newest checkpoint is of a newer format at one restart", newer_format),
        ("older-weights", "a finished run without its last checkpoint is exported", _older_weights),
        ("foreign-checkpoint", "another run's last checkpoint is copied to the killed run's", _foreign),
        ("cut-events", "the second half of events.jsonl is deleted", partial(_cut_events, _first_half)),
        ("events-gap", "step records in the middle of events.jsonl are deleted", partial(_cut_events, _without_middle)),
        ("torn-events", "half a line at the end of events.jsonl", partial(_torn, "events.jsonl")),
        ("torn-ledger", "half a record at the end of a ledger", partial(_torn, "ledger")),
        ("half-images", halves, partial(_with_images, _cut_in_half, cut)),
        ("broken-images", zeros, partial(_with_images, _zeroed, blank)),
        ("clock-jump", "resumes a year earlier, in another time zone, with files from the future", _clock_jump),
        ("fewer-processes", "SIGKILL to all, then one process resumes", _fewer_processes),
        ("more-processes", "SIGKILL to all, then twice as many resume", _more_processes),
    ]
    return {name: (does, perform) for name, does, perform in faults}
