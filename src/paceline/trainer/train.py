"""Train one run from beginning to end: the function behind ``paceline train`` and :func:`paceline.train`."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from paceline.checkpoint.weights import check_target
from paceline.data.batch import ReadAhead
from paceline.data.pipeline import Placement
from paceline.distributed.environment import LaunchEnvironment, read_launch
from paceline.errors import CheckpointError, LaunchError, PacelineError, RunDirectoryError, TrainingError
from paceline.host.world import World
from paceline.learning.judge import judge_run
from paceline.models.transfer import adapt
from paceline.parsing.units import counted, format_count
from paceline.plan import Plan
from paceline.plan.batching import usable_processes
from paceline.plan.run_logs import run_logs
from paceline.plugins.references import is_ours
from paceline.recipe.load import LoadedRecipe
from paceline.recipe.schema import Recipe
from paceline.records.events import FinishEvent, StartEvent, Status, StopEvent
from paceline.records.reader import Summary, read_summary
from paceline.records.run_directory import RunDirectory, write_json
from paceline.storage.addresses import is_address
from paceline.tasks.facts import geometry_of
from paceline.tasks.task import build_task
from paceline.telemetry.display import RunProgress
from paceline.trainer import mirroring
from paceline.trainer.build import build_run
from paceline.trainer.fake_batch import with_stand_in
from paceline.trainer.feeding import measure_feeding
from paceline.trainer.forecast import measure
from paceline.trainer.loop import fit
from paceline.trainer.network import load_initial_weights
from paceline.trainer.nonfinite import check_outcome, divergence
from paceline.trainer.result import TrainResult
from paceline.trainer.run import Run
from paceline.trainer.run_lock import RunLock
from paceline.trainer.run_records import digests, summarise
from paceline.trainer.saved_run import SavedRun
from paceline.trainer.saving import finish_mirroring, restore
from paceline.trainer.subject import Options, Reporter, Subject, resumed_recipe
from paceline.version import __version__

_PATIENCE_SECONDS = 5.0
# Parameters of the largest network that is built with values for planning: four hundred megabytes.
_MAX_BUILT = 100_000_000


def plan_only(
    loaded: LoadedRecipe, *, world_size: int | None = None, run_dir: Path | None = None, on_other_machine: bool = False
) -> Plan:
    """Return the plan of a recipe, for this world or a world of any size, without training.

    Args:
        loaded: The recipe.
        world_size: Processes of the run; None for this world's size.
        run_dir: The run directory: a resumed run needs no initial weights.
        on_other_machine: Whether the run will start on another machine: its weights and libraries may be missing here.

    Raises:
        PacelineError: For the mistakes that training would find before it starts, including a network's name or
            options.
    """
    recipe, assumed = with_stand_in(loaded.recipe, planned=True)
    world = World(world_size=world_size, local_world_size=world_size) if world_size else read_launch(os.environ).world
    task = build_task(resumed_recipe(recipe, run_dir))
    # The run then needs its initial weights, which must be here or within reach.
    begins = not (on_other_machine or mirroring.will_resume(recipe, run_dir, World()))
    source = recipe.model.initialize_from if begins else None
    if source is not None and not is_address(source):
        check_target(Path(source))
    if on_other_machine:  # where its trackers are
        recipe = replace(recipe, telemetry=replace(recipe.telemetry, trackers=()))
    subject = Subject.open(recipe, world, "shapes", task=task, as_run=True)
    notes = {} if assumed is None else {"data.path": assumed}
    if problems := [each for each in (subject.limits.refusal, *subject.limits.warnings) if each]:
        notes["this machine"] = " ".join(problems)
    network = subject.shapes
    is_built = sum(each.numel() for each in network.parameters()) <= _MAX_BUILT
    if is_built:  # a larger one is planned without values
        if begins and recipe.model.pretrained and not task.check_published(recipe.model):
            task.recipe = replace(task.recipe, model=recipe.model)
        network = task.build_model()
        task.check_network(network)
        load_initial_weights(network, replace(recipe.model, initialize_from=source))
        adapt(network, recipe.model)
    task.prepare_training(Placement(device=torch.device("cpu")))
    subject.plan = subject.plan_network(network, notes)
    task.build_optimizer(network, recipe.optimizer, torch.device("cpu"))
    if assumed is None:
        subject.geometry = geometry_of(subject.recipe, subject.plan, task)
        if is_built and not on_other_machine:
            subject.check_single_samples(network)
    return subject.plan


def forecast_only(loaded: LoadedRecipe, options: Options) -> None:
    """Write the record of a run's forecast into a new run directory, and end. Collective.

    Raises:
        PacelineError: For every mistake in the recipe or the data.
    """
    with opened_run(loaded, replace(options, resume="never", before_plan=measure_feeding)) as run:
        # Ranks make the same passes only if none tries a few rows first.
        if event := measure(run, ReadAhead(run.train_batches()), cautious=run.world.world_size == 1):
            run.recorder.write(event)
            run.recorder.flush()


def train_recipe(loaded: LoadedRecipe, options: Options) -> TrainResult:
    """Train, or resume training, and return when the run is completed or stopped.

    Raises:
        PacelineError: For every mistake in the recipe, the data or the directory, before training starts.
        TrainingError: If the run fails.
    """
    recipe, full_launch = loaded.recipe, read_launch(os.environ)
    _check_restarts(full_launch, options)
    launch = without_standby_ranks(full_launch, recipe)
    if launch is None:
        assert options.run_dir is not None  # checked by _check_restarts
        return TrainResult(status="completed", run_dir=options.run_dir, summary=wait_for_training(options.run_dir))
    loaded = replace(loaded, notices=(*loaded.notices, *elastic_notices(full_launch, launch)))
    with Subject.open(loaded, launch.world, "run", options=replace(options, before_plan=measure_feeding)) as subject:
        if subject.decision.completed:
            summary = subject.collectives.on_rank_zero(lambda: read_summary(subject.directory))
            return TrainResult(status="completed", run_dir=subject.directory.root, summary=summary, was_complete=True)
        return _run(subject)


@contextlib.contextmanager
def opened_run(loaded: LoadedRecipe, options: Options) -> Iterator[Run]:
    """Open a run as training does, before its first step, for a study that runs its steps and keeps nothing.

    Collective: every rank must call this.

    Raises:
        PacelineError: For every mistake in the recipe, the data or the directory.
    """
    loaded = replace(loaded, recipe=loaded.recipe.without_mirror())
    with Subject.open(loaded, read_launch(os.environ).world, "run", options=options) as subject:
        run = build_run(subject)
        with contextlib.closing(run.recorder), contextlib.closing(run.writer):
            restore(run, subject.decision.choice, resumes=subject.decision.resumes)
            _load_data(run)
            yield run


def _check_restarts(launch: LaunchEnvironment, options: Options) -> None:
    """Check that processes that may be restarted will find their earlier progress.

    Raises:
        LaunchError: If they would not, because every start would choose a new run directory, or start over.
    """
    if launch.restart_setting is None:
        return
    risk = ""
    if options.resume != "auto":
        risk = (
            f"and each time they would apply --resume {options.resume}; run it with --max-restarts=0 and a "
            "fixed --nnodes first, and from then on without --resume."
        )
    elif options.run_dir is None:
        risk = "but they would start a new run each time; name a directory with --run-dir."
    if risk:
        raise LaunchError(
            f"torchrun was started with {launch.restart_setting} and may start these processes again, {risk}"
        )


def _run(subject: Subject) -> TrainResult:
    decision, report = subject.decision, subject.options.report
    with contextlib.closing(subject.display):
        run = build_run(subject)
        try:
            restore(run, decision.choice, resumes=decision.resumes)
            _log_start(run, subject)
            _load_data(run)
            result = _train_to_end(run)
        except BaseException as error:
            record_failure(run, error, subject, lambda: digests(run))
            raise
        run.writer.close()
        run.recorder.close()
        write_pages(run, report)
        return result


def record_failure(
    run: SavedRun, error: BaseException, subject: Subject, digest: Callable[[], Mapping[str, str]]
) -> None:
    """Wait for a save in progress, and write the records of a run that an error ends."""
    _wait_for_save(run, error, subject.lock)
    # The current error matters more than a repeated one from a failing disk.
    with contextlib.suppress(Exception):
        if run.world.is_first:
            message = str(error) if isinstance(error, PacelineError) else f"{type(error).__name__}: {error}"
            run.recorder.flush()
            # Processes that would have to contribute their shards of the weights may be gone.
            write_summary(run, "failed", "error", {} if run.is_sharded else digest(), message=message)
    with contextlib.suppress(Exception):
        run.recorder.close()
    write_pages(run, subject.options.report)


def _wait_for_save(run: SavedRun, error: BaseException, lock: RunLock | None) -> None:
    """Wait for a save of the last good state that is in progress when an error ends the run."""
    save = run.writer.pending
    if save is not None and not run.writer.is_over(within_seconds=_PATIENCE_SECONDS):
        # A slow disk must not delay the error; the save continues, and the interpreter waits for it at exit.
        run.writer.cancelled.set()
        if lock is not None:
            lock.hold_until(save)
        return
    try:
        run.writer.wait()
    except Exception as lost:  # noqa: BLE001  # whatever it is, the error under way came first
        if lost is not error:
            error.add_note(f"(the checkpoint under way was not written either: {lost})")
    if run.mirroring is not None:
        run.mirroring.is_over(within_seconds=_PATIENCE_SECONDS)


def _train_to_end(run: Run) -> TrainResult:
    try:
        with contextlib.closing(run.clock):
            ending = fit(run)
        finish_mirroring(run)
        reasons = {
            "signal": run.stop.signal_name or run.callbacks.stopped_by or "another process was asked",
            "patience": "no better evaluation",
            "until": f"train.until={run.recipe.train.until}",
        }
        if ending in reasons:
            run.recorder.write(StopEvent(**run.progress.here, reason=reasons[ending]))
        status: Status = "stopped" if ending in ("signal", "until") else "completed"
        if status == "completed":
            check_outcome(run.task, run)
            if warning := divergence(run):
                run.recorder.incident("diverged", warning)
        summary = record_end(run, status, ending, lambda: digests(run))
        return TrainResult(status=status, run_dir=run.directory.root, summary=summary)
    except ValueError as error:
        # The plan cannot foresee it if the other samples are unreadable, or if a module normalises by itself.
        if "more than 1 value per channel" in str(error):
            raise TrainingError(
                f"step {run.progress.step + 1} has a micro-batch of one sample, which batch normalisation cannot train "
                f"on ({error}); choose another batch.global_size or batch.micro_size."
            ) from None
        raise
    except (RunDirectoryError, CheckpointError) as error:
        # The request was valid and then the disk failed: the run failed, not the request.
        raise TrainingError(str(error), path=error.path) from error


def record_end(run: SavedRun, status: Status, ending: str, digest: Callable[[], Mapping[str, str]]) -> Summary:
    """Write the records of a run that is completed or stopped; a collective."""
    run.recorder.flush(durable=True)
    run.collectives.on_rank_zero(run.directory.check_in_place)
    run.collectives.barrier()
    sha256 = digest() if run.is_sharded or run.world.is_first else {}
    return run.collectives.on_rank_zero(lambda: write_summary(run, status, ending, sha256))


def record_start(run: SavedRun, name: str) -> None:
    """Write the record that a run's launch begins with."""
    plan = run.plan
    run.recorder.write(
        StartEvent(
            **run.progress.here,
            recipe=name,
            world_size=plan.world_size,
            total_steps=plan.total_steps,
            version=__version__,
            details={
                "run": run.identity,
                "opening_seconds": run.progress.launch_seconds,
                "log_every": None if "log" in plan.moments else plan.log_every_steps,
            },
        )
    )


def _log_start(run: Run, subject: Subject) -> None:
    plan, loaded = run.plan, subject.loaded
    record_start(run, loaded.name)
    if run.utilisation is not None:
        run.recorder.write(run.utilisation.event(run.progress.here))
    if restarts := read_launch(os.environ).restarts:
        run.recorder.incident("restart", f"the processes died and were restarted, {counted(restarts, 'time')} so far")
    for notice in (*loaded.notices, *subject.notices, *subject.decision.notices):
        run.display.message(notice)
    device = f"{plan.device_name}, {counted(plan.world_size, 'process')}, {plan.precision}"
    every, trained = sum(each.numel() for each in run.network.parameters()), plan.parameters or 0
    device += f", {_network_name(run)} with {format_count(every)} parameters"
    device += f", {format_count(trained)} of them trained" * (trained != every)
    data = f"{format_count(plan.train_samples)} training and {format_count(plan.evaluation_samples)} held-out samples, "
    data += f"{format_count(plan.total_steps)} steps of {' then '.join(map(format_count, plan.step_sizes))} "
    data += f"({plan.total_epochs:.4g} epochs)"
    source = Path(os.path.abspath(loaded.recipe.data.path or loaded.name)).name  # also of '.' and of an address
    run.display.start(
        RunProgress(
            plan.total_steps,
            run.progress.step,
            plan.epochs,
            plan.sample_name,
            headline=run.best_metric().name,
            has_ema=run.ema is not None,
        ),
        title=f"{loaded.name}{f' on {source}' * (source != loaded.name)} in {run.directory.root}",
        lines=(device, data),
    )


def _network_name(run: Run) -> str:
    """Return the network's name in the recipe, or its class where your code builds it."""
    if "model.name" in run.plan.unused or not is_ours(type(run.task).build_model.__module__):
        return type(run.network).__name__
    return re.split("[:/]", run.recipe.model.name.rstrip("/"))[-1]


def _load_data(run: Run) -> None:
    name = run.plan.sample_name
    run.pipeline.load(lambda done, total: run.display.status(f"reading {name}: {done} of {total}"))
    run.display.status("")


def write_summary(run: SavedRun, status: Status, ending: str, sha256: Mapping[str, str], **details: str) -> Summary:
    """On the first rank: write the run's last record, then ``summary.json``."""
    summary = summarise(run, status, ending, sha256)
    run.recorder.write(
        FinishEvent(
            **run.progress.here,
            status=status,
            train_seconds=summary.train_seconds,
            total_seconds=summary.total_seconds,
            details=details,
        )
    )
    run.recorder.flush()
    run.directory.check_in_place()
    with contextlib.suppress(RunDirectoryError):  # records that cannot be read do not change how a run ended
        if judgement := judge_run(run.directory, str(summary.details.get("warning", ""))):
            summary = replace(summary, details={**summary.details, "learning": judgement.to_json()})
    write_json(run.directory.summary, summary.to_json())
    return summary


def write_pages(run: SavedRun, report: Reporter | None) -> None:
    """Write the report and the logs in other formats, if the recipe requests them.

    Errors in them do not change how the run ended.
    """
    if not run.world.is_first:
        return
    try:
        run.directory.check_in_place()
    except RunDirectoryError:
        return  # already reported; nothing is written under the old name
    for description, write in (
        *((log.title, log.write) for log in run_logs() if log.wanted(run.recipe)),
        ("the report", report if run.recipe.telemetry.report else None),
    ):
        try:
            if write is not None:
                write(run.directory)
        except Exception as error:  # noqa: BLE001  # a page to look at is not worth a run
            with contextlib.suppress(Exception):
                run.display.message(f"note: {description} could not be written: {error}")


# Ranks that cannot share the global batch stand by. With elastic nodes, as many processes train as can share the batch
# evenly. The others wait until torchrun restarts all because a node has left or joined.


def without_standby_ranks(launch: LaunchEnvironment, recipe: Recipe) -> LaunchEnvironment | None:
    """Return the launch of the training processes; None if this process is not one of them.

    A launch of fixed size is unchanged: the plan refuses one that does not fit.
    """
    world = launch.world
    usable = usable_processes(recipe, 1, world.world_size)
    if not launch.changes_size or not usable or usable[0] == world.world_size:
        return launch
    size = usable[0]
    if world.rank >= size:
        return None
    # torchrun numbers the processes of a machine consecutively.
    first_here = world.rank - world.local_rank
    trained = World(
        rank=world.rank,
        local_rank=world.local_rank,
        world_size=size,
        local_world_size=min(world.local_world_size, size - first_here),
    )
    return replace(launch, world=trained)


def elastic_notices(launch: LaunchEnvironment, training: LaunchEnvironment) -> tuple[str, ...]:
    """Return notices about a launch whose hosts may leave, join or return."""
    notices = []
    came, size = launch.world.world_size, training.world.world_size
    if came != size:
        notices.append(f"{size} of {came} processes train: more cannot share the global batch evenly; the others wait")
    several_hosts = launch.world.local_world_size < launch.world.world_size
    if launch.store is not None and (launch.changes_size or (launch.restart_setting is not None and several_hosts)):
        # Seen with torch 2.14: a host that joins later waits for an address that was published only in the first round.
        notices.append(
            f"with {launch.restart_setting} set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun: otherwise hosts "
            "that join later, or again, do not find the others"
        )
    return tuple(notices)


def wait_for_training(run_dir: Path, *, poll_seconds: float = 1, patience_seconds: float = 60) -> Summary:
    """On a standby rank: wait until the run is complete. A signal ends it like any program.

    Args:
        run_dir: The directory that all hosts share.
        poll_seconds: How often to look.
        patience_seconds: A summary that stays unchanged for this long is final: extending a run deletes it first.
    """
    directory = RunDirectory(run_dir)
    start = time.monotonic()
    earlier = _completed(directory)
    while True:
        summary = _completed(directory)
        if summary is None:
            earlier = None
        elif summary != earlier or time.monotonic() - start > patience_seconds:
            return summary
        time.sleep(poll_seconds)


def _completed(directory: RunDirectory) -> Summary | None:
    try:
        summary = read_summary(directory)
    except RunDirectoryError:  # missing, or read while it was being replaced
        return None
    return summary if summary.status == "completed" else None
