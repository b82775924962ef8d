"""The user's task in one small micro-batch, watched on the CPU on a copy that is thrown away."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from torch.backends import cudnn

from paceline.data.batch import Batch, tensors_in
from paceline.distributed.affinity import affinity_restored
from paceline.recipe.data import Data
from paceline.recipe.running import Checkpoint, Telemetry
from paceline.recipe.schedule import Schedule
from paceline.recipe.schema import Recipe
from paceline.recipe.training import Batch as BatchSection
from paceline.tasks.image_classification import ImageClassification
from paceline.tasks.task import Task, build_task
from paceline.trainer.preparation import Prepared, prepare
from paceline.trainer.process_settings import restore_globals
from paceline.units import Duration
from paceline.world import World
from paceline_advisor.doctor.anatomy import Anatomy, look_at
from paceline_advisor.doctor.calls import Calls, CallWatcher, find_call, find_setting, own_files
from paceline_advisor.doctor.findings import Place
from paceline_advisor.prove.runs import bare


@contextlib.contextmanager
def untouched() -> Iterator[None]:
    """Put back, at the end, every state of the process that a look into a task may change.

    Inside, cuDNN is set as a run on a GPU sets it, so that it shows when code of the user's own sets it otherwise.
    """
    with contextlib.ExitStack() as held:
        held.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # of code that is only looked at
        held.enter_context(restore_globals())
        held.enter_context(torch.enable_grad())
        held.enter_context(affinity_restored())
        cudnn.benchmark, cudnn.enabled, cudnn.deterministic = True, True, False
        yield


# BatchNorm needs more than one; odd, so that no size of the network is taken for that of the batch.
_SAMPLES = 3
# Pixels of pictures with objects: what code does with them does not hang on how large they are shown, and a full
# step of a large detector takes minutes on a CPU.
_SHORT_SIDE, _LONG_SIDE = 128, 256
_AUTOTUNE = {"cudnn.benchmark": False, "cudnn.enabled": False, "cudnn.deterministic": True}


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    """What the user's code did in one micro-batch.

    Attributes:
        calls: What it asked of torch.
        states: Settings of torch that it left otherwise than they were, and where.
        has_gradient_in_evaluation: Whether scores came with a graph for gradients.
    """

    calls: Calls = field(default_factory=Calls)
    states: dict[str, Place | None] = field(default_factory=dict)
    has_gradient_in_evaluation: bool = False


def behave(recipe: Recipe, *, channels_last: bool) -> tuple[Anatomy, Behaviour]:
    """Send a few samples of the recipe's own data through its own task, forward and backward, and look.

    To be called within :func:`~paceline_advisor.doctor.behaviour.untouched`.

    Raises:
        PacelineError: If the recipe cannot be run.
    """
    task = build_task(small(recipe, channels_last=channels_last))
    if isinstance(task, ImageClassification) and type(task).open_pipeline is ImageClassification.open_pipeline:
        # Paceline's own loader processes are nothing to look at; those of the user's are.
        reads_files = recipe.data.backend in ("auto", "pytorch")
        task = build_task(replace(task.recipe, data=replace(task.recipe.data, workers=0 if reads_files else "auto")))
    prepared = prepare(task.recipe, task, World())
    with contextlib.closing(prepared.pipeline):
        stream = prepared.pipeline.train_batches(prepared.geometry, 0, 1, World())
        return _look(prepared, next(iter(stream)))


def small(recipe: Recipe, *, channels_last: bool) -> Recipe:
    """The recipe for one small micro-batch on the CPU."""
    left = bare(recipe)
    return replace(
        left,
        model=replace(left.model, channels_last=channels_last, activation_checkpointing=None),
        data=_shown_small(left.data),
        batch=BatchSection(global_size=_SAMPLES),
        schedule=Schedule(name="constant"),
        train=replace(left.train, duration=Duration(1, "steps"), ema=None),
        evaluate=replace(left.evaluate, every=None),
        checkpoint=Checkpoint(every=None, keep_best=False),
        parallel=replace(left.parallel, exact=False, logical_ranks="auto", unused_parameters="allow"),
        telemetry=Telemetry(log_every=Duration(1, "steps"), trackers=()),
    )


def _shown_small(data: Data) -> Data:
    sides = data.detection.short_sides
    if sides is None:
        return data
    shorter = tuple(sorted({min(each, _SHORT_SIDE) for each in sides}))
    return replace(
        data,
        detection=replace(data.detection, short_sides=shorter, long_side=min(data.detection.long_side, _LONG_SIDE)),
    )


def _look(prepared: Prepared, batch: Batch) -> tuple[Anatomy, Behaviour]:
    network, task = prepared.network.train(), prepared.task
    watcher = CallWatcher(
        [*network.parameters(), *network.buffers(), *tensors_in(batch.inputs, batch.targets)],
        samples=max(1, len(batch.ids)),
    )

    def step() -> None:
        with watcher:
            # Not loss.backward(): within a watched call, the code of gradients would not be seen.
            torch.autograd.backward([task.loss(network, batch)])

    with watcher:
        task.loss(network, batch)
    watcher.begin_anew()  # what is made once and kept is no fault
    anatomy = look_at(network, batch, step)
    network.zero_grad(set_to_none=True)
    has_gradient = _scores_with_gradient(task, network, batch)
    files = own_files(prepared.recipe, task, network)
    calls = watcher.calls
    if torch.is_anomaly_enabled():
        calls.debugging.setdefault("anomaly", None)
    if "anomaly" in calls.debugging:
        names = ("set_detect_anomaly", "detect_anomaly")
        calls.debugging["anomaly"] = find_call(files, names) or calls.debugging["anomaly"]
    return anatomy, Behaviour(calls=calls, states=_states(files), has_gradient_in_evaluation=has_gradient)


def _states(files: list[str]) -> dict[str, Place | None]:
    """The settings of cuDNN that are not as :func:`~paceline_advisor.doctor.behaviour.untouched` set them."""
    return {
        f"torch.backends.{name}={value}": find_setting(files, name)
        for name, value in _AUTOTUNE.items()
        if getattr(cudnn, name.partition(".")[2]) is value
    }


@torch.no_grad()
def _scores_with_gradient(task: Task, network: nn.Module, batch: Batch) -> bool:
    """Whether a task turns gradients on where the trainer has turned them off."""
    network.eval()
    try:
        scores = task.score(task.evaluated(network), batch)
    except Exception:  # noqa: BLE001  # the batch is one of training, whose targets may be mixed: not every task scores it
        return False
    finally:
        network.train()
    return any(each.requires_grad for each in tensors_in(scores))
