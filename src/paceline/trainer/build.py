"""How does a plan become a run: network, optimizer, components, each built once and in this order?"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.checkpoint.components import OptimizerComponent, Registry, check_inventory
from paceline.checkpoint.weights import read_weights
from paceline.data.order import StepGeometry
from paceline.data.pipeline import Pipeline, Placement
from paceline.distributed.collectives import Collectives
from paceline.distributed.strategy import build_strategy
from paceline.errors import RecipeError, did_you_mean
from paceline.models.build import parameter_count
from paceline.models.ema import ExponentialMovingAverage
from paceline.optim.build import build_optimizer
from paceline.optim.schedules import LearningRate
from paceline.recipe.load import recipe_digest, to_tree
from paceline.recipe.plan import MachineFacts, Plan, make_plan
from paceline.recipe.schema import Recipe
from paceline.records.ledger import LedgerWriter, ledger_path
from paceline.records.run_directory import RunDirectory
from paceline.records.writer import EventWriter
from paceline.references import is_reference, load_reference
from paceline.tasks.image_classification import ImageClassification
from paceline.tasks.task import Task
from paceline.telemetry.clock import build_step_clock
from paceline.telemetry.display import Display
from paceline.telemetry.trackers import build_trackers
from paceline.trainer.evaluate import Evaluator
from paceline.trainer.precision import Precision
from paceline.trainer.progress import Progress
from paceline.trainer.recorder import Recorder
from paceline.trainer.run import Run
from paceline.trainer.signals import StopRequest
from paceline.trainer.window import Window
from paceline.world import World

TASKS = {"image_classification": ImageClassification}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where a run takes place: what is known before anything is built."""

    recipe: Recipe
    plan: Plan
    task: Task
    world: World
    device: torch.device
    collectives: Collectives
    directory: RunDirectory
    display: Display
    stop: StopRequest
    start_step: int = 0
    started: float = 0.0

    @property
    def placement(self) -> Placement:
        """Where the network and its batches go."""
        return Placement(device=self.device, channels_last=self.plan.channels_last)


def build_task(recipe: Recipe) -> Task:
    """Make the task a recipe names.

    Raises:
        RecipeError: If there is none of that name, or the reference does not give a task.
    """
    if recipe.task in TASKS:
        return TASKS[recipe.task](recipe)
    if not is_reference(recipe.task):
        raise RecipeError(
            f"unknown task '{recipe.task}'.{did_you_mean(recipe.task, TASKS)} Tasks: {', '.join(TASKS)}, or "
            "package.module:factory of your own."
        )
    task = load_reference(recipe.task, RecipeError)(recipe)
    if not isinstance(task, Task):
        raise RecipeError(f"task '{recipe.task}' gave a {type(task).__name__}, which is no paceline.Task.")
    return task


def plan_run(recipe: Recipe, task: Task, machine: MachineFacts, world: World) -> Plan:
    """The plan of a recipe on its data, with the learning rate at each phase boundary."""
    facts = task.data_facts(world)
    plan = make_plan(recipe, facts, machine, world_size=world.world_size, local_world_size=world.local_world_size)
    names = [metric.name for metric in task.metrics]
    if recipe.evaluate.metric not in names:
        raise RecipeError(
            f"evaluate.metric={recipe.evaluate.metric} is not measured; choose one of: {', '.join(names)}."
        )
    return replace(plan, learning_rates=LearningRate.of(recipe.optimizer, recipe.schedule, plan).phases())


def build_network(setting: Setting) -> nn.Module:
    """The network with its first weights, on the device, the same on every rank."""
    recipe = setting.recipe
    torch.manual_seed(recipe.seed)
    network = setting.task.build_model()
    if recipe.model.initialize_from is not None:
        saved = read_weights(Path(recipe.model.initialize_from))
        check_inventory(network.state_dict(), saved.state, where="model.initialize_from")
        network.load_state_dict(saved.state)
    return place(network, setting.placement)


def place(network: nn.Module, placement: Placement) -> nn.Module:
    """Move a network to the device and give its filters the batches' memory format."""
    memory_format = torch.channels_last if placement.channels_last else torch.contiguous_format
    return network.to(device=placement.device, memory_format=memory_format)  # type: ignore[call-overload,no-any-return]  # torch's stub lacks it


def build_run(setting: Setting) -> Run:
    """Build every part of a run on this process."""
    recipe, plan, device = setting.recipe, setting.plan, setting.device
    network = build_network(setting)
    ema = None if recipe.train.ema is None else ExponentialMovingAverage(network, recipe.train.ema)
    called = _compiled(network, recipe)
    scored = {"model": called} | ({} if ema is None else {"ema": _compiled(ema.module, recipe)})
    pipeline = setting.task.open_pipeline(setting.placement)
    precision = Precision(plan.precision, device, recipe.train.grad_scaler)
    geometry = StepGeometry(
        seed=recipe.seed,
        samples=plan.train_samples,
        global_batch_size=plan.global_batch_size,
        logical_ranks=plan.logical_ranks,
    )
    _check_tail(setting, network, pipeline, geometry)
    optimizer = build_optimizer(network, recipe.optimizer, device)
    # From here on nothing is refused, and files may be opened.
    ledger = LedgerWriter(ledger_path(setting.directory.ledger, setting.world.rank))
    run = Run(
        recipe=recipe,
        recipe_sha256=recipe_digest(recipe),
        plan=replace(plan, parameters=parameter_count(network)),
        world=setting.world,
        device=device,
        collectives=setting.collectives,
        directory=setting.directory,
        task=setting.task,
        pipeline=pipeline,
        network=network,
        scored=scored,
        strategy=build_strategy(
            plan.strategy, called, setting.collectives, device, bucket_cap_mb=recipe.parallel.bucket_cap_mb
        ),
        optimizer=optimizer,
        learning_rate=LearningRate.of(recipe.optimizer, recipe.schedule, plan),
        geometry=geometry,
        precision=precision,
        ema=ema,
        evaluator=build_evaluator(setting, pipeline, precision),
        progress=Progress(begun=setting.started),
        window=Window(setting.collectives, ledger, device),
        clock=build_step_clock(device.type),
        recorder=_recorder(setting, ledger),
        display=setting.display,
        stop=setting.stop,
        components=Registry(),
        file_metadata=file_metadata(recipe, plan, setting.task),
    )
    _register(run)
    return run


def build_evaluator(setting: Setting, pipeline: Pipeline, precision: Precision) -> Evaluator:
    """What scores weights in this setting."""
    return Evaluator(
        task=setting.task,
        pipeline=pipeline,
        precision=precision,
        collectives=setting.collectives,
        device=setting.device,
        batch_size=setting.plan.evaluation_batch_size,
    )


def file_metadata(recipe: Recipe, plan: Plan, task: Task) -> Mapping[str, str]:
    """What a lone weights file must say so that it can be evaluated and used."""
    return {
        "paceline": "1",
        "recipe": json.dumps(to_tree(recipe)),
        "data": json.dumps({**plan.data, **task.description()}),
        "precision": plan.precision,
    }


def _compiled(network: nn.Module, recipe: Recipe) -> Any:
    return torch.compile(network) if recipe.model.compile else network


def _recorder(setting: Setting, ledger: LedgerWriter) -> Recorder:
    if not setting.world.is_first:
        return Recorder(None, ledger, [], setting.display)
    trackers = build_trackers(setting.recipe.telemetry.trackers, setting.directory.root, start_step=setting.start_step)
    return Recorder(EventWriter(setting.directory.events), ledger, trackers, setting.display)


def _register(run: Run) -> None:
    """Name everything that changes; what is not here is a pure function of the recipe and the step."""
    run.components.add("model", run.network)
    if run.ema is not None:
        run.components.add("ema", run.ema.module)
    run.components.add("optimizer", OptimizerComponent(run.optimizer))
    if run.precision.scaler is not None:
        run.components.add("scaler", run.precision.scaler)
    run.components.add("progress", run.progress)
    run.components.add("window", run.window)
    run.components.add("clock", run.clock)


def _check_tail(setting: Setting, network: nn.Module, pipeline: Pipeline, geometry: StepGeometry) -> None:
    """Find out before training whether BatchNorm can take a single sample, if an epoch's last batch will bring one."""
    plan = setting.plan
    normalised = any(isinstance(m, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)) for m in network.modules())
    reached = plan.total_steps >= plan.steps_per_epoch and plan.evaluation_samples > 0
    if not normalised or not reached or geometry.smallest_part() > 1:
        return
    sample = next(iter(pipeline.evaluation_batches(1, World())))
    trial = copy.deepcopy(network).train()
    try:
        with torch.no_grad():
            setting.task.loss(trial, sample)
    except ValueError as error:
        raise RecipeError(
            f"an epoch's last batch has {plan.last_step_samples} sample(s) over {plan.logical_ranks} micro-batch(es), "
            f"and this model cannot train on a single one ({error}); choose another batch.global_size."
        ) from None
