"""`paceline rewind` and `paceline fork`: back to a checkpoint of a run, or a new run from one.

Both make a complete run directory under another name first, and put it in place with a single rename: whenever that is
interrupted, there is the directory before or the one after.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shlex
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from paceline.checkpoint.format import TensorSpec
from paceline.checkpoint.manifest import read_components
from paceline.checkpoint.manifest import verify as verify_checkpoint
from paceline.checkpoint.store import CheckpointStore
from paceline.command import Log
from paceline.errors import CheckpointError, RecipeError, RunDirectoryError
from paceline.host.world import World
from paceline.pages.shown import Document, Shown
from paceline.parsing.files import free_name
from paceline.plan.run_logs import log_files
from paceline.recipe.load import OWN_LOOP, load_recipe, recipe_digest, set_by, to_tree, to_yaml
from paceline.recipe.schema import Recipe
from paceline.recipe.training import Optimizer
from paceline.records.environment import in_folder_of
from paceline.records.reader import read_environment, read_events, read_identity, read_recipe
from paceline.records.run_directory import (
    Identity,
    RunDirectory,
    encode_json,
    existing_run,
    file_operation,
    sync_directory,
    write_bytes,
    write_identity,
    write_text,
)
from paceline.tasks.facts import geometry_of
from paceline.trainer.run_dir_checks import ResumeRequest, check_same_run
from paceline.trainer.run_lock import RunLock
from paceline.trainer.subject import Subject
from paceline_advisor import Json
from paceline_advisor.commands import Rewind
from paceline_advisor.replay.points import Point, copy_as_of, link_tree, sync_tree

ASIDE = ".set-aside"
_EXCHANGE, _AT_CWD = 2, -100

# With another value of these, it would not be the same samples, or the state would not fit.
_FIXED = {
    "seed": "the order of samples and every draw depend on it",
    "task": "the state belongs to another task",
    "optimizer.name": "the optimizer's state belongs to another one",
}


def rewind(options: Rewind, log: Log) -> Document:
    """Set aside what comes after a checkpoint, so that the run resumes from there.

    Raises:
        PacelineError: If there is no such checkpoint, or the directory cannot be exchanged; nothing was changed then.
    """
    run = existing_run(options.run.resolve())
    with _held(run):
        point = _checkpoint(run, options.to)
        newest = max(CheckpointStore(run.checkpoints).steps())
        if (read_recipe(run).get("checkpoint") or {}).get("mirror") not in (None, "off"):
            raise RunDirectoryError(
                f"'{run.root}' is copied to checkpoint.mirror, from where a resume would bring the later checkpoints "
                f"back; fork it instead: {_fork_command(run, point.step)}.",
                path=run.root,
            )
        log(f"setting aside what comes after step {point.step}")
        name = free_name(run.root / ASIDE / f"step-{newest:08d}").name
        with _beside(run.root) as made_at:
            steps = [step for step in CheckpointStore(run.checkpoints).steps() if step <= point.step]
            made = copy_as_of(run, point, made_at, steps=steps, place=link_tree, rest=link_tree)
            for path in log_files(made):
                path.unlink(missing_ok=True)
            aside = made.root / ASIDE
            if (run.root / ASIDE).is_dir():
                link_tree(run.root / ASIDE, aside)
            aside.mkdir(exist_ok=True)
            _keep_all(run.root, aside / name)
            sync_tree(made_at)
            _exchange(made_at, run.root)
    kept = run.root / ASIDE / name
    root, away = run.root, f"{run.root}.rewound"
    here, there, inside = (shlex.quote(str(each)) for each in (root, away, f"{away}/{ASIDE}/{name}"))
    back = f"mv {here} {there} && mv {inside} {here}"
    document = {"run": str(run.root), "step": point.step, "set_aside": str(kept), "bring_back": back}
    lines = [
        f"The run in {run.root} is at step {point.step} again.",
        f"What came after, up to step {newest}, is in {kept}, a complete run directory.",
        f"To bring it back: {back}",
        f"To train on: paceline resume {here}",
    ]
    return Document(document=document, shown=Shown(blocks=lines))


def fork(source: Path, target: Path, step: int, overrides: Sequence[str]) -> None:
    """Make the directory of a new run that begins at a checkpoint; does nothing if this fork is there already.

    Args:
        source: The run.
        target: The directory to make.
        step: Step of the checkpoint.
        overrides: Changes of the recipe.

    Raises:
        PacelineError: If there is no such checkpoint, or the changed recipe does not fit it; nothing is left then.
    """
    run = existing_run(source.resolve())
    parent = read_identity(run)
    if parent is None:
        raise RunDirectoryError(f"'{run.identity}' is missing or damaged; restore it from a copy.", path=run.root)
    origin = {"run_id": parent.id, "step": step}
    if target.exists() and any(target.iterdir() if target.is_dir() else [target]):
        own = read_identity(RunDirectory(target))
        if own is None or own.parent != origin:
            raise RunDirectoryError(f"'{target}' exists and is not this fork; choose another --run-dir.", path=target)
        return
    point = _checkpoint(run, step)
    loaded = load_recipe(run.root, overrides)
    for key in set_by(overrides):
        if key in _FIXED:
            raise RecipeError(f"{key} cannot change in a fork: {_FIXED[key]}; train a new run instead.", key=key)
    recipe, identity = loaded.recipe, Identity.new()
    identity = replace(identity, has_checkpoint=True, parent=origin)
    if "checkpoint.mirror" not in set_by(overrides):
        recipe = recipe.without_mirror()
    settings = _check_fits(run, point, recipe)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _beside(target) as made_at:
        made = copy_as_of(run, point, made_at, steps=(), place=link_tree)
        _resave(point, made, recipe, identity.id, settings)
        CheckpointStore(made.checkpoints).name_best(point.best())
        events = read_events(made.events) if made.events.is_file() else ()
        lines = [each | ({"run": identity.id} if "run" in each else {}) for each in events]
        write_bytes(made.events, b"".join(encode_json(each).encode() + b"\n" for each in lines))
        write_text(made.recipe, to_yaml(recipe))
        write_identity(made, identity)
        sync_tree(made_at)
        with file_operation("create", target, noun="run directory"):
            os.rename(made_at, target)
            sync_directory(target.parent)


def _resave(point: Point, made: RunDirectory, recipe: Recipe, run_id: str, settings: Sequence[Json]) -> None:
    """Save a checkpoint once more, as one of the fork: with its identity, recipe and settings of parameter groups."""
    assert point.path is not None  # _checkpoint returns no other
    facts = {**point.facts, "run": run_id}
    if "recipe_sha256" in facts:
        facts["recipe_sha256"] = recipe_digest(recipe)
    header = {key: value for key, value in point.header().items() if key not in {*facts, "component", "step", "format"}}
    if "recipe" in header:
        header["recipe"] = encode_json(to_tree(recipe))
    states = read_components(point.path)
    for group, changed in zip(states.get("optimizer", {}).get("param_groups", ()), settings, strict=False):
        group.update(changed)
    CheckpointStore(made.checkpoints).save(point.step, states, facts, file_metadata=header)


def _check_fits(run: RunDirectory, point: Point, recipe: Recipe) -> Sequence[Json]:
    """Check that a recipe trains the same samples, and a network of the checkpoint's shapes.

    Returns:
        The settings of each of the optimizer's parameter groups that the recipe changes: a checkpoint holds them too.

    Raises:
        PacelineError: If it does not.
    """
    count = int(point.facts.get("world_size", 1))
    with in_folder_of(read_environment(run)):
        subject = Subject.open(recipe, World(world_size=count, local_world_size=count), "shapes")
    with subject:
        geometry = geometry_of(subject.recipe, subject.plan, subject.task)
        stored = load_recipe(run.root).recipe
        request = ResumeRequest(recipe=stored, plan=subject.plan, resume="auto", device_facts={}, geometry=geometry)
        check_same_run(run, request)
        entry = None if point.manifest is None else point.manifest.components.get("model")
        shapes = {name: TensorSpec.of(each) for name, each in subject.shapes.state_dict().items()}
        saved = dict(entry.tensors) if entry is not None else shapes
        for name in sorted(shapes.keys() | saved.keys()):
            if shapes.get(name) != saved.get(name):
                raise RecipeError(
                    f"the network of this recipe does not fit the checkpoint: {name} is {shapes.get(name, 'missing')} "
                    f"and was {saved.get(name, 'missing')}; change no key that changes the network."
                )
        has_average = point.manifest is not None and "ema" in point.manifest.components
        if has_average != (recipe.train.ema is not None):
            raise RecipeError(
                f"train.ema cannot be switched {'off' if has_average else 'on'} in a fork: the checkpoint has "
                f"{'a' if has_average else 'no'} moving average.",
                key="train.ema",
            )
        if subject.task.has_own_optimizer:
            return ()
        before, after = (_groups(subject, each.optimizer) for each in (stored, recipe))
        saved_groups = point.state("optimizer").get("param_groups", ())
        sizes = [[len(each["params"]) for each in groups] for groups in (saved_groups, before, after)]
        if before != after and not sizes[0] == sizes[1] == sizes[2]:
            raise RecipeError(
                "the optimizer's parameter groups of this recipe do not fit the checkpoint; change no key that frees, "
                "freezes or groups parameters.",
                key="optimizer",
            )
        pairs = zip(before, after, strict=True) if len(before) == len(after) else ()
        return [{key: each for key, each in new.items() if old.get(key) != each} for old, new in pairs]


def _groups(subject: Subject, optimizer: Optimizer) -> list[Json]:
    """Return the parameter groups of an optimizer, as a checkpoint holds them."""
    built = subject.task.build_optimizer(subject.shapes, optimizer, torch.device("meta"))
    groups: list[Json] = built.state_dict().get("param_groups", [])
    return groups


# The directory


@contextlib.contextmanager
def _held(run: RunDirectory) -> Iterator[None]:
    lock = RunLock(run)
    try:
        yield
    finally:
        lock.release()


def _checkpoint(run: RunDirectory, step: int) -> Point:
    """Return the run's checkpoint of a step, every byte of which is checked.

    Raises:
        RunDirectoryError: If there is none.
    """
    if read_recipe(run).get("task") == OWN_LOOP:
        raise RunDirectoryError(f"'{run.root}' is the run of a program with paceline.Loop: run that again.")
    store = CheckpointStore(run.checkpoints)
    if step not in store.steps():
        steps = ", ".join(map(str, store.steps())) or "none"
        raise RunDirectoryError(
            f"'{run.root}' has no checkpoint of step {step}; choose one of its steps: {steps}.", path=run.root
        )
    point = Point.of(store.path(step))
    verify_checkpoint(store.path(step))
    owner, identity = point.facts.get("run"), read_identity(run)
    if identity is not None and owner not in (None, identity.id):
        raise CheckpointError(f"{point.path} is a checkpoint of another run, {owner}.", path=point.path)
    return point


@contextlib.contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """Context with the path of a directory to make next to another; removes it, and what earlier ones left, after."""
    prefix = f".{path.name}.making-"
    for each in path.parent.glob(f"{prefix}*"):
        shutil.rmtree(each, ignore_errors=True)
    made = path.parent / f"{prefix}{secrets.token_hex(4)}"
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _keep_all(root: Path, kept: Path) -> None:
    """Give every file of a run directory a second name in another folder."""
    kept.mkdir()
    for each in sorted(root.iterdir()):
        if each.name not in (ASIDE, ".lock"):
            link_tree(each, kept / each.name)


def _exchange(made: Path, run: Path) -> None:
    """Exchange two directories in one step, so that there is always a complete one under the run's name.

    Raises:
        RunDirectoryError: If this system cannot do that; nothing was changed.
    """
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    code = -1 if call is None else call(_AT_CWD, os.fsencode(made), _AT_CWD, os.fsencode(run), _EXCHANGE)
    if code:
        reason = os.strerror(ctypes.get_errno()) if call is not None else "only Linux has the call"
        raise RunDirectoryError(
            f"'{run}' cannot be exchanged for its state at that step in one move ({reason}); nothing was changed. Fork "
            "the run instead.",
            path=run,
        )
    sync_directory(run.parent)


def _fork_command(run: RunDirectory, step: int) -> str:
    return f"paceline fork {shlex.quote(str(run.root))} --at {step} --run-dir NEW"
