"""Choose the checkpoint to resume from, and check that it belongs to the run and that the records reach it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from paceline.checkpoint.format import Manifest, read_header
from paceline.checkpoint.store import CheckpointStore, Choice, DamagedCheckpoint, choose, read_manifest, step_of
from paceline.errors import CheckpointError, PacelineError, RunDirectoryError
from paceline.plain_json import load_json
from paceline.recipe.load import differences, stored_recipe
from paceline.recipe.schema import Recipe
from paceline.records.events import truncate_after
from paceline.records.ledger import truncate_ledgers
from paceline.records.reader import (
    Identity,
    forget_evaluations_after,
    had_checkpoint,
    read_events,
    read_identity,
    write_identity,
)
from paceline.records.run_directory import RunDirectory

# What may differ between a run and its continuation: none of it changes which samples a step sees.
_FREE = ("train.duration", "train.until", "evaluate.", "checkpoint.", "telemetry.", "parallel.", "batch.micro_size")
_FREE_DATA = (
    "data.path",
    "data.workers",
    "data.prefetch",
    "data.max_broken",
    "train.precision",
    "train.nonfinite",
    "train.max_nonfinite",
    "model.channels_last",
    "model.compile",
    "model.compile_mode",
    "model.compile_backend",
    "model.activation_checkpointing",
    "distillation.teacher",
)
_NAMED = 4


def fixed_differences(old: Recipe, new: Recipe) -> str:
    """Name the keys that differ and must not for one recipe to continue the run of another; empty if none does."""
    changed = {
        key: values
        for key, values in differences(old, new).items()
        if not key.startswith(_FREE) and key not in _FREE_DATA
    }
    return "; ".join(f"{key} was {old} and is now {new}" for key, (old, new) in list(changed.items())[:_NAMED])


def foreign_checkpoints(directory: RunDirectory, recipe: Recipe) -> list[DamagedCheckpoint]:
    """Find the checkpoints that belong to another run: by its identity, or by the recipe that their weights carry.

    Damaged checkpoints are not among them, and those of earlier versions have no identity.

    Args:
        directory: The run's.
        recipe: The run's.
    """
    own, store = read_identity(directory), CheckpointStore(directory.checkpoints)
    found = []
    for step in store.steps():
        path = store.path(step)
        try:
            manifest = read_manifest(path)
        except CheckpointError:
            continue
        theirs = manifest.facts.get("run")
        if own and theirs and theirs != own.id:
            found.append(DamagedCheckpoint(path, step, f"its run is {theirs}, and this one {own.id}"))
        elif changed := _recipe_differences(path, manifest, recipe):
            found.append(DamagedCheckpoint(path, step, changed))
    return found


def _recipe_differences(path: Path, manifest: Manifest, recipe: Recipe) -> str:
    model = manifest.components.get("model")
    if model is None or not model.tensor_files:
        return ""
    try:
        stored = load_json(read_header(path / model.tensor_files[0])[1]["recipe"])
        return fixed_differences(stored_recipe(stored, str(path)), recipe)
    except (OSError, ValueError, KeyError, PacelineError):
        return ""  # damaged, which is found out later, or of a version whose recipe cannot be read


def prepare_resume(directory: RunDirectory, wanted: Path | None, recipe: Recipe, total_steps: int) -> Choice:
    """On the first rank: choose the checkpoint to go on from, and cut the records back to it.

    Nothing is changed before the checkpoint is found, or none was ever whole.

    Raises:
        CheckpointError: If there were checkpoints and none of the run's is whole, or the one asked for is not.
        RunDirectoryError: If the run has gone further than it is asked to go.
    """
    store, foreign = CheckpointStore(directory.checkpoints), foreign_checkpoints(directory, recipe)
    choice = choose(store, wanted=wanted, foreign=[each.step or 0 for each in foreign])
    _check_choice(directory, choice, foreign)
    facts = {} if choice.path is None else read_manifest(choice.path).facts
    position = int(facts["position"]) if facts else -1
    if position > total_steps:
        raise RunDirectoryError(
            f"the run in '{directory.root}' stands at step {position}, beyond the {total_steps} steps of "
            "train.duration; give a longer one, or go back with --resume and one of its checkpoints."
        )
    lost = list(_lost_events(directory, choice))
    for damaged in choice.damaged:
        store.set_aside(damaged)
    for each in foreign:
        store.set_aside(each, "foreign")
    if choice.path is not None:
        store.discard_after(choice.step)
    truncate_after(directory.events, position)
    samples = truncate_ledgers(directory.ledger, max(position, 0))
    if samples < facts.get("samples", 0):
        lost.append(f"the ledger has {samples} of the {facts['samples']} samples used by then")
    forget_evaluations_after(directory, position)
    unusable = [("damaged_checkpoint", "damaged", each) for each in choice.damaged]
    unusable += [("foreign_checkpoint", "of another run", each) for each in foreign]
    incidents = [
        (kind, f"checkpoint {each.path.name} is {what} and was set aside: {each.reason}")
        for kind, what, each in unusable
    ]
    incidents += [("missing_records", f"records before step {choice.step} are missing: {each}") for each in lost]
    return replace(choice, incidents=tuple(incidents))


def _check_choice(directory: RunDirectory, choice: Choice, foreign: list[DamagedCheckpoint]) -> None:
    """Refuse to begin again by itself, and to go on from another run's checkpoint."""
    if choice.lost_everything:
        raise CheckpointError(
            f"no checkpoint in {directory.checkpoints} is whole: {choice.damaged[0].reason} "
            "To begin again, start in another run directory."
        )
    for each in reversed(foreign):
        if choice.path is None or each.step == choice.step:
            raise CheckpointError(
                f"{each.path} is a checkpoint of another run than '{directory.root}': {each.reason}. Put the run's own "
                "checkpoints back, or train in another --run-dir."
            )
    if choice.path is None and had_checkpoint(directory):
        raise CheckpointError(
            f"the records of '{directory.root}' say that checkpoints were saved, but {directory.checkpoints} holds "
            "none; nothing was changed. Bring them back (is their disk mounted?), or begin again in another --run-dir."
        )


def _lost_events(directory: RunDirectory, choice: Choice) -> Iterator[str]:
    """Say what the events lack: that of a checkpoint is on the disk before the checkpoint is."""
    if choice.path is None:
        return
    events = read_events(directory.events) if directory.events.exists() else ()
    last = 0
    for event in events:
        if event["event"] == "checkpoint" and step_of(Path(str(event.get("checkpoint")))) == choice.step:
            return
        last = event["step"]
    yield f"{directory.events.name} ends at step {last}" if directory.events.exists() else "there is no events.jsonl"


def settle_identity(directory: RunDirectory, choice: Choice) -> str:
    """Write to ``run.json`` what is known by now, and return the run's identity.

    A run of an earlier version has no such file, and a kill may come between a checkpoint and its note there.

    Args:
        directory: The run's.
        choice: The checkpoint that it goes on from.
    """
    own, stored = read_identity(directory), None
    if own is None and choice.path is not None:
        stored = read_manifest(choice.path).facts.get("run")
    own = own or (Identity(stored) if isinstance(stored, str) else Identity.new())
    write_identity(directory, replace(own, has_checkpoint=choice.path is not None))
    return own.id
