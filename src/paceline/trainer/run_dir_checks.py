"""Decide whether a run directory is new, resumable or complete, and choose the checkpoint to resume from."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from paceline.checkpoint.format import read_header
from paceline.checkpoint.manifest import check_sizes, read_manifest
from paceline.checkpoint.store import (
    BEST_FILE_NAME,
    CheckpointStore,
    DamagedCheckpoint,
    ResumePoint,
    choose_resume_point,
    step_of,
)
from paceline.data.order import StepGeometry
from paceline.data.shard_order import describe_shards
from paceline.distributed.collectives import Collectives
from paceline.errors import CheckpointError, LaunchError, PacelineError, RunDirectoryError, VersionError
from paceline.host.world import World
from paceline.parsing.files import free_name, is_ignored
from paceline.parsing.plain_text import load_json
from paceline.plan import Plan
from paceline.plan.run_logs import log_files
from paceline.plugins.references import is_same_class
from paceline.recipe.load import differences, stored_recipe, to_yaml
from paceline.recipe.schema import Recipe
from paceline.records import reader
from paceline.records.environment import capture_environment
from paceline.records.events import for_display, truncate_after
from paceline.records.ledger import (
    PositionEntry,
    digest_of,
    ledger_files,
    read_ledger,
    truncate_ledgers,
    write_lengths,
)
from paceline.records.run_directory import (
    Identity,
    RunDirectory,
    file_error,
    file_operation,
    sync_directory,
    write_identity,
    write_json,
    write_text,
)
from paceline.tasks.task import Task, task_name
from paceline.telemetry.trackers import TRACKERS
from paceline.trainer.run_lock import lock_owner, read_if_present


def check_visible(root: Path, collectives: Collectives, *, patience_seconds: float) -> None:
    """Check that all processes see the same directory: the first one writes a token that all read.

    A network file system may take time to show files that another host has created.

    Raises:
        LaunchError: On every process, naming the first that does not see it.
        RunDirectoryError: On every process, if the first cannot write there.
    """
    if collectives.world.world_size == 1:
        return
    mark = root / ".lock"

    def write() -> str:
        word = lock_owner()
        with file_operation("write", mark):
            mark.write_text(word)
        return word

    written = collectives.on_rank_zero(write)
    deadline = time.monotonic() + patience_seconds
    while not (is_visible := read_if_present(mark) == written) and time.monotonic() < deadline:
        time.sleep(0.1)
    ranks = collectives.gather((is_visible, platform.node()))
    blind = [rank for rank, (sees, _) in enumerate(ranks) if not sees]
    if blind:
        raise LaunchError(
            f"rank 0 on {ranks[0][1]} writes to '{root}', but rank {blind[0]} on {ranks[blind[0]][1]} sees "
            "another directory or none there; name a --run-dir on a file system that all hosts share."
        )


# Keys that may differ between a run and its continuation: none of them changes which samples a step sees.
_CHANGEABLE_KEYS = (
    *("task", "objects"),  # the task's class is compared, and the data's digest
    *("train.duration", "train.until", "train.precision", "train.nonfinite", "train.max_nonfinite"),
    *("evaluate.", "checkpoint.", "verify.", "telemetry.", "parallel.", "batch.micro_size", "distillation.teacher"),
    *("data.path", "data.workers", "data.prefetch", "data.max_broken"),
    *("model.channels_last", "model.compile", "model.activation_checkpointing"),
)
_MAX_NAMED = 4


def fixed_differences(old: Recipe, new: Recipe) -> str:
    """Name the differing keys that prevent one recipe from continuing the run of another; empty if there are none."""
    changed = {key: values for key, values in differences(old, new).items() if not key.startswith(_CHANGEABLE_KEYS)}
    return "; ".join(f"{key} was {old} and is now {new}" for key, (old, new) in list(changed.items())[:_MAX_NAMED])


def foreign_checkpoints(directory: RunDirectory, recipe: Recipe) -> list[DamagedCheckpoint]:
    """Find the checkpoints that belong to another run: by its identity, or by the recipe that their weights carry.

    Damaged checkpoints are left out.

    Args:
        directory: The run directory.
        recipe: The run's recipe.

    Raises:
        RunDirectoryError: If nothing decides to which run they belong.
    """
    identity, store = reader.read_identity(directory), CheckpointStore(directory.checkpoints)
    manifests, foreign = {}, []
    for step in store.steps():
        with contextlib.suppress(CheckpointError):
            manifests[step] = check_sizes(store.path(step))
    # Without run.json, the checkpoints and records vote on whose run it is.
    votes = Counter(str(run_id) for each in manifests.values() if (run_id := each.facts.get("run")))
    if identity is None and votes:
        votes.update(reader.recorded_runs(directory))
        (run, count), *others = votes.most_common()
        if others and others[0][1] == count:
            raise RunDirectoryError(
                f"'{directory.root}' has no readable run.json, and its checkpoints and records belong to different "
                f"runs: {run} and {others[0][0]}. Restore run.json from a copy, or move the other run's files away.",
                path=directory.root,
            )
        identity = Identity(run)
    for step, manifest in manifests.items():
        path, run_id = store.path(step), manifest.facts.get("run")
        if identity and run_id and run_id != identity.id:
            foreign.append(DamagedCheckpoint(path, step, f"its run is {run_id}, and this one {identity.id}"))
            continue
        model = manifest.components.get("model")
        if model is None or not model.tensor_files:
            continue
        # Damage is detected later, and a recipe of another version that cannot be read does not count as a different
        # one.
        with contextlib.suppress(OSError, ValueError, KeyError, PacelineError):
            recipe_tree = load_json(read_header(path / model.tensor_files[0])[1]["recipe"])
            if changed := fixed_differences(stored_recipe(recipe_tree, str(path)), recipe):
                foreign.append(DamagedCheckpoint(path, step, changed))
    return foreign


def _is_foreign_ledger(path: Path, geometry: StepGeometry) -> bool:
    """Whether a rank's first record is not of the run's order."""
    entry = next(read_ledger(path), None)
    if isinstance(entry, PositionEntry):
        ids = geometry.ids_at(entry.epoch, entry.first, entry.first + entry.samples)
        return digest_of(ids) != entry.digest
    if entry is None:
        return False
    step_ids = [each.ids for each in geometry.slices(entry.step - 1, World())]
    return not np.isin(entry.ids, np.concatenate(step_ids)).all()


def prepare_resume(directory: RunDirectory, requested: Path | None, request: ResumeRequest) -> ResumePoint:
    """On the first rank: choose the checkpoint to resume from, and cut the records back to it.

    Nothing is changed before the checkpoint is found, or it is certain that none was ever complete.

    Raises:
        CheckpointError: If there were checkpoints and none of the run's is complete, or the requested one is not.
        RunDirectoryError: If the run is already beyond its requested end.
    """
    store, foreign = CheckpointStore(directory.checkpoints), foreign_checkpoints(directory, request.recipe)
    choice = choose_resume_point(store, requested=requested, foreign=[each.step for each in foreign])
    _check_choice(directory, choice, foreign)
    facts = {} if choice.path is None else read_manifest(choice.path).facts
    for name in ("position", "samples") if choice.path else ():
        if type(facts.get(name)) is not int:
            raise CheckpointError(f"{choice.path} says {name!r} is {facts.get(name)!r}, expected a whole number.")
    position = facts["position"] if facts else -1
    if position > request.plan.total_steps:
        raise RunDirectoryError(
            f"the run in '{directory.root}' is at step {position}, beyond the {request.plan.total_steps} steps of "
            "train.duration; give a longer one, or go back: resume from one of its checkpoints."
        )
    lost = list[str]()
    if choice.path is not None:
        lost += reader.wrong_records(directory, facts.get("run"), until=position, resumed=choice.path.name)
    ledgers = [each for each in ledger_files(directory.ledger) if _is_foreign_ledger(each, request.geometry)]
    # First, since it changes nothing if a ledger cannot be read.
    samples = truncate_ledgers(directory.ledger, max(position, 0), exclude=ledgers)
    for path in ledgers:
        path.rename(free_name(path.with_name(f"{path.name}.foreign")))
    unusable = [("damaged", "damaged", each) for each in choice.damaged]
    unusable += [("foreign", "of another run", each) for each in foreign]
    for kind, _, each in unusable:
        store.set_aside(each, kind)
    if choice.path is not None:
        store.discard_after(choice.step)
    truncate_after(directory.events, position)
    if facts and samples != facts["samples"]:
        lost.append(f"the ledger holds {samples} samples, and {facts['samples']} were used by then")
    reader.delete_evaluations_after(directory, position)
    incidents = [
        (f"{kind}_checkpoint", f"checkpoint {each.path.name} is {description} and was set aside: {each.reason}")
        for kind, description, each in unusable
    ]
    incidents += [
        ("foreign_ledger", f"ledger/{each.name} is of another run and was set aside: its samples are not of the order")
        for each in ledgers
    ]
    incidents += [("missing_records", f"records before step {choice.step} are lost or wrong: {each}") for each in lost]
    return replace(choice, incidents=tuple(incidents))


def _check_choice(directory: RunDirectory, choice: ResumePoint, foreign: list[DamagedCheckpoint]) -> None:
    """Refuse to start over silently, and to resume from another run's checkpoint."""
    if choice.path is None and choice.damaged:  # only the user may decide to start over
        raise CheckpointError(
            f"no checkpoint in {directory.checkpoints} is intact: {choice.damaged[0].reason} To start again, use "
            "another run directory."
        )
    for each in reversed(foreign):
        if choice.path is None or each.step == choice.step:
            raise CheckpointError(
                f"{each.path} is a checkpoint of another run than '{directory.root}': {each.reason}. Put the run's "
                "own checkpoints back, or train in another run directory.",
                path=each.path,
            )
    if choice.path is None:
        _check_none_missing(directory)


def _check_none_missing(directory: RunDirectory) -> None:
    if records := records_of_progress(directory):
        raise CheckpointError(
            f"records in '{directory.root}' ({', '.join(records)}) say that the run has advanced, but "
            f"{directory.checkpoints} holds none of its checkpoints; nothing was changed. Bring them back (is their "
            "disk mounted?), or begin again in another run directory.",
            path=directory.root,
        )


def records_of_progress(directory: RunDirectory) -> list[str]:
    """Name the records that say that a checkpoint was once complete, so that the run must not start over by itself.

    Any record counts, since the others may be lost. Without ``run.json``, which is written before the first step, any
    trace of a step counts.

    Raises:
        RunDirectoryError: If a record is damaged or cannot be read.
    """
    events, identity = directory.events, reader.read_identity(directory)
    if identity is None:
        traces = [directory.identity, directory.summary, events, directory.first_batch, *directory.evaluation_files]
        traces += ledger_files(directory.ledger)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            traces += [each for each in directory.checkpoints.iterdir() if not is_ignored(each.name)]
        return [each.name for each in traces if each.exists() and each.stat().st_size]
    found = [*reader.read_events(events, kinds={"checkpoint", "resume", "finish"})] if events.exists() else []
    # An event of a single checkpoint does not count: it is written before the checkpoint. Each save waits for the
    # previous one, and a run that does not fail ends after its last save.
    is_saved = sum(event["event"] == "checkpoint" for event in found) > 1
    is_saved |= any(event["event"] == "resume" or event.get("status") in reader.ENDED for event in found)
    return [directory.identity.name] * identity.has_checkpoint + [events.name] * is_saved


# Plan values that must not change at a resume: numerics and samples depend on them.
_FIXED_PLAN_VALUES = {
    "precision": "train.precision",
    "channels_last": "model.channels_last",
    "train_samples": "data.path",
    "steps_per_epoch": "batch.global_size",
    # Otherwise a longer run would freeze again parts that it already trains.
    "lengths_sha256": "the samples' lengths, which batch.balance uses",
    "classes_sha256": "the samples' classes or sets, which data.sampling or data.mixture uses",
    "unfreeze_steps": "model.unfreeze, whose percentages are of train.duration",
    "freeze_after_steps": "model.freeze_after, whose percentages are of train.duration",
}

# Facts about its data that must not change, with the message if they have.
_FIXED_DATA = {
    "task": "the run in {where} trains the task {before}, not {now}; use the same task (from Python: "
    "paceline.train(run_dir=…, task=…), if it was given there)",
    "digest": "the data of the run in {where} has changed since it started: other files, names or sizes; restore them",
    "content_digest": "images of the run in {where} have changed since it started, under the same names and sizes "
    "({pixels}): restore them",
    "shards": "the run in {where} was started with other shards ({before}) than these ({now}); give the same",
    "teacher": "the run in {where} started with another teacher than {teacher} is now; give distillation.teacher the "
    "same weights, preferably a checkpoint file",
}

# Facts that an exact run must also keep: its bits depend on them.
_FIXED_IF_EXACT = {
    "strategy": "parallel.exact",
    "logical_ranks": "parallel.logical_ranks",
    "threads_per_process": "parallel.threads",
    "compile": "model.compile",
}

# These affect the bits only where the CPU computes.
_ON_CPU_ONLY = ("threads_per_process",)

# Plan values that may change at a resume, with a notice: rounding then differs.
_NUMERICS = {
    "logical_ranks": "micro-batches per step",
    "world_size": "processes",
    "device": "device",
    "threads_per_process": "threads per process",
    "compile": "compiled",
}


@dataclass(frozen=True, kw_only=True)
class ResumeRequest:
    """The user's request.

    Attributes:
        recipe: The resolved recipe.
        plan: Its plan in this world.
        resume: ``auto``, ``never``, or the path of a checkpoint of this run.
        device_facts: The trainer's facts about the device, for environment.json.
        geometry: Its order of samples.
    """

    recipe: Recipe
    plan: Plan
    resume: str
    device_facts: dict[str, Any]
    geometry: StepGeometry


@dataclass(frozen=True, kw_only=True)
class ResumeDecision:
    """How the run starts.

    Attributes:
        choice: The checkpoint to resume from, if any.
        identity: The run's identity, which its checkpoints carry; empty if it is completed.
        completed: True if there is nothing left to do.
        resumes: How often the run was resumed before.
        notices: Notices for the user.
    """

    choice: ResumePoint
    identity: str = ""
    completed: bool = False
    resumes: int = 0
    notices: tuple[str, ...] = ()


def open_directory(directory: RunDirectory, request: ResumeRequest) -> ResumeDecision:
    """On the first rank: check the directory, write the request, and choose where to start.

    Raises:
        RunDirectoryError: If the directory holds something else, or a run that this recipe does not continue.
        CheckpointError: If there are, or were, checkpoints but none is complete.
    """
    try:
        return _open(directory, request)
    except OSError as error:
        raise file_error("use", Path(error.filename or directory.root), error) from error


def _open(directory: RunDirectory, request: ResumeRequest) -> ResumeDecision:
    for output in _outputs(directory):
        _damage_of(directory, output)  # a file that cannot be read now, or is of another version, is not touched
    if not has_trained(directory):
        return _start_new(directory, request)
    check_same_run(directory, request)
    notices = _notices(directory, reader.read_plan_to_resume(directory), request)
    requested = None if request.resume in ("auto", "never") else Path(request.resume)
    if requested and (requested.parent.resolve() != directory.checkpoints.resolve() or step_of(requested) is None):
        raise RunDirectoryError(
            f"resume={request.resume} is not a checkpoint of the run in '{directory.root}'; give one of its "
            "checkpoints/step-*, or start a new run from its weights with model.initialize_from."
        )
    if request.resume == "never" and CheckpointStore(directory.checkpoints).steps():
        raise RunDirectoryError(
            f"'{directory.root}' holds a run already, but resume=never was given; choose another run directory, or "
            "leave resume out to continue it.",
            path=directory.root,
        )
    check_links(directory)
    if requested is None and _is_complete(directory, request):
        if not CheckpointStore(directory.checkpoints).steps():
            _check_none_missing(directory)
        reader.check_objects(directory, request.plan.data, request.recipe.objects)
        return ResumeDecision(choice=ResumePoint(None, 0), completed=True)
    resumes = 0
    if directory.events.exists():  # before the records are cut back
        resumed = reader.read_events(directory.events, kinds={"resume"})
        resumes = max((for_display(event, directory.events).get("resumes", 0) for event in resumed), default=0)
    choice = prepare_resume(directory, requested, request)
    return _save(directory, request, ResumeDecision(choice=choice, notices=notices, resumes=resumes))


def _save(directory: RunDirectory, request: ResumeRequest, decision: ResumeDecision, *outdated: Path) -> ResumeDecision:
    """Write the request, and remove files that no longer apply."""
    aside = tuple(_set_damaged_aside(directory))
    # The outcome of an earlier launch is outdated: only a launch that ends writes a new one.
    for each in (directory.summary, *log_files(directory), *outdated):
        with contextlib.suppress(NotADirectoryError):  # reported by the code that would write there
            each.unlink(missing_ok=True)
    # run.json may be lost, and a kill may come between a checkpoint and its entry there.
    own, path = reader.read_identity(directory), decision.choice.path
    if own is None:
        stored = None if path is None else read_manifest(path).facts.get("run")
        own = Identity(stored) if isinstance(stored, str) else Identity.new()
    write_identity(directory, replace(own, has_checkpoint=path is not None))
    geometry = request.geometry
    if geometry.lengths is not None and request.plan.lengths_sha256 is not None:
        write_lengths(directory.sample_lengths, geometry.lengths.tokens)
    if geometry.draws is not None:
        write_lengths(directory.sample_classes, geometry.draws.classes)
    if geometry.shards is not None:
        write_lengths(directory.shard_sizes, geometry.shards.sizes)
    write_json(directory.plan, request.plan.to_tree())
    write_json(directory.environment, capture_environment(request.device_facts))
    # Last of the files, since a directory counts as a run's as soon as its recipe is there; before it, a directory with
    # other names than those of _OWN_FILES could not be used again after an error.
    write_text(directory.recipe, to_yaml(request.recipe))
    for folder in (directory.checkpoints, directory.ledger):
        folder.mkdir(exist_ok=True)
    sync_directory(directory.root)
    choice = replace(decision.choice, incidents=(*decision.choice.incidents, *aside))
    return replace(decision, choice=choice, identity=own.id)


def check_links(directory: RunDirectory) -> None:
    """Refuse dangling links: the disk they point to may come back, so their targets must not be created again.

    Raises:
        RunDirectoryError: Naming the first.
    """
    for path in (directory.checkpoints, directory.ledger, directory.events):
        if path.is_symlink() and not path.exists():
            raise RunDirectoryError(
                f"'{path}' is a link to '{os.readlink(path)}', which does not exist; nothing was changed. Mount its "
                "disk, or correct the link.",
                path=path,
            )


def _outputs(directory: RunDirectory) -> tuple[Path, ...]:
    own = directory.summary, directory.environment, directory.identity, directory.checkpoints / BEST_FILE_NAME
    return *own, *log_files(directory)


def _set_damaged_aside(directory: RunDirectory) -> Iterator[tuple[str, str]]:
    """Rename unreadable outputs that no run depends on; yields an incident for each."""
    for path in _outputs(directory):
        if (problem := _damage_of(directory, path)) is None:
            continue
        path.rename(target := free_name(path.with_name(f"{path.name}.damaged")))
        yield "damaged_output", f"{path.name} was set aside as {target.name}: {problem}"


def _damage_of(directory: RunDirectory, path: Path) -> str | None:
    """Return why a file cannot be read as the format its name implies; None if it can, or does not exist."""
    if not path.exists():
        return None
    if not path.is_file():
        return "it is not a file"
    try:
        if path == directory.summary:
            reader.read_summary(directory)
        elif path.suffix == ".json":
            reader.read_json(path)
        if path == directory.identity and reader.read_identity(directory) is None:
            return "it lacks 'id' or 'has_checkpoint'"
    except RunDirectoryError as error:
        if isinstance(error, VersionError) or isinstance(error.__cause__, OSError):
            raise  # neither another version nor a disk error is damage
        return str(error)
    return None


# Files that a launch killed early, or a batch job, may have left before there was a run.
_OWN_FILES = (
    *("plan.json", "environment.json", "mirror.json", "run.json", ".lock"),
    *("sample_lengths.npy", "sample_classes.npy", "shard_sizes.npy"),
)
_OWN_PREFIXES = (".writable-", ".plan", ".environment", ".sample_", ".shard_", ".recipe", ".mirror", ".run", "slurm-")


def _start_new(directory: RunDirectory, request: ResumeRequest) -> ResumeDecision:
    root = directory.root
    check_links(directory)
    names = [entry.name for entry in root.iterdir()]
    if not directory.exists() and (records := records_of_progress(directory)):
        raise RunDirectoryError(
            f"'{root}' holds records of a run ({', '.join(records)}), but no recipe.yaml; restore it from a copy, or "
            "choose another directory.",
            path=root,
        )
    if not directory.exists() and any(name not in _OWN_FILES and not name.startswith(_OWN_PREFIXES) for name in names):
        message = f"'{root}' is not empty and holds no Paceline run (no recipe.yaml); choose a new or empty directory."
        raise RunDirectoryError(message, path=root)
    if request.resume not in ("auto", "never"):
        other_run = Path(request.resume).parent.parent
        suggestion = f" Did you mean the run in {other_run}?" if RunDirectory(other_run).exists() else ""
        raise RunDirectoryError(f"resume={request.resume}: there is no run in '{root}' to resume.{suggestion}")
    outdated = (directory.events, directory.first_batch, *directory.evaluation_files, *map(directory.tracked, TRACKERS))
    return _save(directory, request, ResumeDecision(choice=ResumePoint(None, 0)), *outdated)


def never_trained(directory: RunDirectory) -> bool:
    """Whether no step was ever taken, so that nothing here needs to be kept."""
    used = any(path.stat().st_size for path in ledger_files(directory.ledger))
    return not used and not CheckpointStore(directory.checkpoints).steps() and not records_of_progress(directory)


def has_trained(directory: RunDirectory) -> bool:
    """Whether a run has begun here, and taken a step."""
    return directory.exists() and not never_trained(directory)


def check_same_task(run_dir: Path | None, task: Task) -> None:
    """Check before the data are opened that a run, if one has begun here, trains this task.

    Raises:
        RunDirectoryError: If it trains another one.
    """
    if run_dir is None or not has_trained(directory := RunDirectory(run_dir)):
        return
    before, now = reader.read_plan_to_resume(directory)["data"].get("task"), task_name(task)
    if not is_same_class(str(before), now):
        raise RunDirectoryError(_FIXED_DATA["task"].format(where=f"'{run_dir}'", before=before, now=now) + ".")


def check_same_run(directory: RunDirectory, request: ResumeRequest, *, address: str | None = None) -> None:
    """Check that a request continues a run.

    Args:
        directory: Holds the run's recipe and plan.
        request: The request.
        address: The address that the files were copied from; None for the run's own directory.

    Raises:
        RunDirectoryError: If the request does not continue the run.
    """
    where = f"'{directory.root}'" if address is None else address
    elsewhere = "in another run directory" if address is None else "at another address (checkpoint.mirror)"
    stored = stored_recipe(reader.read_recipe(directory), str(directory.recipe))
    if changed := fixed_differences(stored, request.recipe):
        what, advice = "a copy of a run", f"Start {elsewhere}."
        if address is None:
            again = f"paceline train {directory.recipe} --run-dir {directory.root}"
            what, advice = "a run", f"Choose another run directory, or repeat its own recipe: {again}"
        raise RunDirectoryError(f"{where} holds {what} of another recipe: {changed}. {advice}", path=directory.root)
    plan = reader.read_plan_to_resume(directory)
    fixed = _FIXED_PLAN_VALUES | (_FIXED_IF_EXACT if plan["strategy"] == "exact" else {})
    for number, key in fixed.items():
        if number in _ON_CPU_ONLY and request.plan.device != "cpu":
            continue
        # A key that the run's plan lacks is newer than the run.
        new = getattr(request.plan, number)
        old = plan.get(number, new)
        if old != new:
            problem = f"has {number}={old}, but here it would be {new}; it can only resume with the same value"
            raise RunDirectoryError(f"the run in {where} {problem} (see {key}).", key=key, value=new)
    old_config, new_config = plan.get("network_config") or {}, request.plan.network_config or {}
    changed_keys = sorted(
        key
        for key in old_config.keys() | new_config.keys()
        if key != "_commit_hash" and old_config.get(key) != new_config.get(key)  # another commit may have the same
    )
    if changed_keys:
        raise RunDirectoryError(
            f"the run in {where} started with another config.json of model.name={request.recipe.model.name}: "
            f"{', '.join(changed_keys[:_MAX_NAMED])} changed since. Put the former back, or start {elsewhere}."
        )
    old_facts, new_facts = plan["data"], request.plan.data
    for key, message in _FIXED_DATA.items():
        # Very large data sets have no digest of their content.
        is_known = key != "content_digest" or (key in old_facts and key in new_facts)
        old_fact, new_fact = old_facts.get(key), new_facts.get(key)
        is_moved = key == "task" and is_same_class(str(old_fact), str(new_fact))
        if is_known and old_fact != new_fact and not is_moved:
            before, now = map(describe_shards, (old_fact, new_fact)) if key == "shards" else (old_fact, new_fact)
            problem = message.format(
                where=where,
                before=before,
                now=now,
                pixels=request.plan.reasons.get("data.content_digest", "other pixels"),
                teacher=request.recipe.distillation.teacher,
            )
            raise RunDirectoryError(f"{problem}, or start {elsewhere}.", key=key, value=new_fact)


_NUMERICS_DIFFER = "the same samples, but not the same bits"
_NUMERICS_MAY_DIFFER = "the same samples, but perhaps not the same bits"


def _notices(directory: RunDirectory, plan: Mapping[str, Any], request: ResumeRequest) -> tuple[str, ...]:
    """Return notices about permitted changes."""
    notices = []
    current, mix = request.plan, request.recipe.data.mix

    def compare(name: str, old_value: Any, new_value: Any, effect: str = _NUMERICS_DIFFER) -> None:
        if old_value != new_value:
            notices.append(f"{name}: {old_value} before, {new_value} now: {effect}")

    for number, name in _NUMERICS.items():
        is_kept = number == "world_size" and plan["strategy"] == "exact"
        if not is_kept and (number not in _ON_CPU_ONLY or current.device == "cpu"):
            is_mixed = number == "logical_ranks" and (mix.mixup > 0 or mix.cutmix > 0)
            effect = "the same samples, differently mixed, but not the same bits" if is_mixed else _NUMERICS_DIFFER
            value = getattr(current, number)
            compare(name, plan.get(number, value), value, effect)
    notices += reader.changed_objects(directory, current.data, request.recipe.objects).values()
    torch_now = request.device_facts["torch"]
    with contextlib.suppress(RunDirectoryError):
        compare("torch", reader.read_environment(directory).get("torch", torch_now), torch_now, _NUMERICS_MAY_DIFFER)
    if current.strategy == "exact" != plan["strategy"]:
        compare("parallel.exact", "off", "on")
    elif "fsdp" in (plan["strategy"], current.strategy):
        compare("strategy", plan["strategy"], current.strategy, _NUMERICS_MAY_DIFFER)
    recipe = stored_recipe(reader.read_recipe(directory), str(directory.recipe))
    old_compression, new_compression = (each.parallel.gradient_compression for each in (recipe, request.recipe))
    compare("gradients are sent as", old_compression, new_compression)
    effect = "the learning rate follows the new length"
    compare("length", f"{plan['total_steps']} steps", f"{current.total_steps} steps", effect)
    return tuple(notices)


def _is_complete(directory: RunDirectory, request: ResumeRequest) -> bool:
    if not directory.summary.is_file() or _damage_of(directory, directory.summary) is not None:
        return False
    summary, identity = reader.read_summary(directory), reader.read_identity(directory)
    if not summary.is_of(identity.id if identity else None):
        return False
    if summary.status != "completed" or request.plan.total_steps > reader.read_plan_to_resume(directory)["total_steps"]:
        return False
    if summary.details.get("ending") != "patience":
        return True
    patience = stored_recipe(reader.read_recipe(directory), str(directory.recipe)).evaluate.patience
    return patience == request.recipe.evaluate.patience
