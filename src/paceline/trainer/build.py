"""Build every part of a prepared run: optimizer, strategy, records, components."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from paceline.checkpoint.background import BackgroundWriter, Cadence, job_ends_at
from paceline.checkpoint.state import Component, OptimizerComponent, Registry
from paceline.data.order import evaluation_rounds
from paceline.distributed.build import build_strategy
from paceline.distributed.collectives import Collectives, open_store
from paceline.distributed.strategy import Replicas, Strategy
from paceline.distributed.watchdog import Heartbeat, Watchdog, WatchdogContext
from paceline.models.compiled import CompiledNetwork, CompileLog
from paceline.models.ema import ExponentialMovingAverage
from paceline.models.transfer import FreezeSchedule, first_steps, last_steps
from paceline.optim.build import Clipping, build_optimizer, build_schedules
from paceline.plan import Plan
from paceline.recipe.load import recipe_digest, to_tree
from paceline.recipe.schema import Recipe
from paceline.records.events import EventWriter, ProfileEvent
from paceline.records.ledger import LedgerWriter, ledger_path
from paceline.records.reader import read_environment
from paceline.records.run_directory import RunDirectory
from paceline.tasks.task import Task
from paceline.telemetry.clock import StepClock, build_step_clock
from paceline.telemetry.display import Display
from paceline.telemetry.profile import Assignment, NsightTool, Profiled, ProfilingClock, TorchTool
from paceline.telemetry.trackers import TrackerFacts, build_trackers
from paceline.trainer.callbacks import Callbacks
from paceline.trainer.evaluate import Evaluator, Keep
from paceline.trainer.mirroring import Mirroring
from paceline.trainer.noise import NoiseMeter
from paceline.trainer.nonfinite import NonFiniteGuard
from paceline.trainer.precision import Precision
from paceline.trainer.preparation import Prepared
from paceline.trainer.process_settings import StopRequest
from paceline.trainer.recorder import Recorder
from paceline.trainer.run import Run
from paceline.trainer.run_dir_checks import RunLock
from paceline.trainer.step_stats import Progress, Window, find_utilisation


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where a prepared run takes place."""

    prepared: Prepared
    collectives: Collectives
    directory: RunDirectory
    display: Display
    stop: StopRequest
    callbacks: Callbacks = field(default_factory=Callbacks)
    mirroring: Mirroring | None = None
    lock: RunLock | None = None
    identity: str = ""
    start_step: int = 0
    started: float = 0.0


def build_run(setting: Setting) -> Run:
    """Build every part of a run on this process."""
    prepared = setting.prepared
    recipe, plan, device, network = prepared.recipe, prepared.plan, prepared.device, prepared.network
    if prepared.first_values is None:
        # Code of the user's own may have drawn other weights on another process.
        setting.collectives.broadcast_tensors([*(each.data for each in network.parameters()), *network.buffers()])
    ema = None if recipe.train.ema is None else ExponentialMovingAverage(network, recipe.train.ema)
    compiled = _Compiler(recipe, plan)
    strategy = build_strategy(
        *(plan, network, compiled("model", network), setting.collectives, device),
        parallel=recipe.parallel,
        average=None if ema is None else ema.module,
        value_of=prepared.first_values,
    )
    scored = {"model": strategy.scored} | ({} if ema is None else {"ema": compiled("ema", ema.module)})
    precision = Precision(plan.precision, device, recipe.train.grad_scaler)
    optimizer = build_optimizer(network, recipe.optimizer, device)
    heartbeat = Heartbeat()
    progress = Progress(begun=setting.started)
    ledger = LedgerWriter(ledger_path(setting.directory.ledger, prepared.world.rank))
    noise = NoiseMeter(network, plan, precision, strategy.averages_over)
    run = Run(
        recipe=recipe,
        recipe_sha256=recipe_digest(recipe),
        identity=setting.identity,
        plan=plan,
        world=prepared.world,
        device=device,
        collectives=setting.collectives,
        directory=setting.directory,
        task=prepared.task,
        pipeline=prepared.pipeline,
        network=network,
        scored=scored,
        compiled=compiled.networks,
        strategy=strategy,
        optimizer=optimizer,
        schedules=build_schedules(recipe, plan),
        clipping=Clipping(network, recipe.optimizer),
        geometry=prepared.geometry,
        precision=precision,
        guard=NonFiniteGuard(recipe.train, optimizer, network, device, active=precision.scaler is None),
        freeze_schedule=_freeze_schedule(strategy, prepared),
        ema=ema,
        evaluator=_evaluator(setting, precision, heartbeat),
        progress=progress,
        window=Window(setting.collectives, ledger, device, noise, prepared.task.take_logged),
        noise=noise,
        clock=build_step_clock(device.type),
        heartbeat=heartbeat,
        watchdog=_watchdog(heartbeat, prepared),
        recorder=_recorder(setting, ledger, progress),
        display=setting.display,
        callbacks=setting.callbacks,
        stop=setting.stop,
        components=Registry(),
        writer=BackgroundWriter(),
        cadence=Cadence(recipe.checkpoint, ends_at=job_ends_at(os.environ)),
        file_metadata=file_metadata(recipe, plan, prepared.task),
        mirroring=setting.mirroring,
        utilisation=find_utilisation(prepared) if prepared.world.is_first else None,
    )
    _register(run)
    run.clock = with_profile(run)
    run.strategy.timed_by(run.clock)
    if run.timed_pipeline is not None:
        run.timed_pipeline.timed_by(partial(run.clock.span, "h2d"))
    return run


def _freeze_schedule(strategy: Strategy, prepared: Prepared) -> FreezeSchedule:
    network = prepared.network
    if not isinstance(strategy, Replicas):
        # A plan that spreads weights has refused model.unfreeze and model.freeze_after (plan/strategy.py).
        return FreezeSchedule(network, {}, {}, changed=lambda: None)
    model, plan = prepared.recipe.model, prepared.plan
    late, passing = (
        first_steps(network, model, plan.unfreeze_steps),
        last_steps(network, model, plan.freeze_after_steps),
    )
    return FreezeSchedule(network, late, passing, changed=strategy.gradients_changed)


def _watchdog(heartbeat: Heartbeat, prepared: Prepared) -> Watchdog:
    pipeline = prepared.pipeline
    # Pipelines of the user's own need not know what they read.
    reading = getattr(pipeline, "reading", lambda **_: "")
    return Watchdog(
        heartbeat,
        prepared.world,
        open_store("watchdog"),
        timeout_seconds=prepared.recipe.parallel.timeout.seconds,
        context=WatchdogContext(
            reading=lambda training: str(reading(training=training)),
            name_of=lambda sample: pipeline.sample_name(sample, training=True),
        ),
    )


def _evaluator(setting: Setting, precision: Precision, heartbeat: Heartbeat) -> Evaluator:
    prepared = setting.prepared
    plan, world = prepared.plan, prepared.world
    # Pipelines of the user's own cut the evaluation as the guide says.
    usual = partial(evaluation_rounds, plan.evaluation_samples)
    rounds = getattr(prepared.pipeline, "evaluation_rounds", usual)(plan.evaluation_batch_size, world)
    return Evaluator(
        task=prepared.task,
        pipeline=prepared.pipeline,
        precision=precision,
        collectives=setting.collectives,
        device=prepared.device,
        batch_size=plan.evaluation_batch_size,
        heartbeat=heartbeat,
        rounds=rounds if plan.strategy == "fsdp" else None,
        keep=_keep(prepared.recipe),
    )


def _keep(recipe: Recipe) -> Keep:
    """Whose answers are kept, and how many examples: the average's where there is one, as in summary.json."""
    examples = recipe.evaluate.keep_examples
    return Keep(weights="model" if recipe.train.ema is None else "ema", examples=examples) if examples else Keep()


def file_metadata(recipe: Recipe, plan: Plan, task: Task) -> Mapping[str, str]:
    """What a lone weights file must say so that it can be evaluated and used."""
    return {
        "paceline": "1",
        "recipe": json.dumps(to_tree(recipe)),
        "data": json.dumps({**plan.data, **task.description()}),
        "precision": plan.precision,
    }


class _Compiler:
    """Compiles sets of weights, if asked to.

    Attributes:
        networks: Those that were, by the name of their weights.
    """

    def __init__(self, recipe: Recipe, plan: Plan) -> None:
        self.networks: dict[str, CompiledNetwork] = {}
        self._model, self._plan = recipe.model, plan
        self._repeats = recipe.train.deterministic or recipe.parallel.exact
        self._log = CompileLog() if plan.compile != "off" else None

    def __call__(self, name: str, network: nn.Module) -> nn.Module:
        """What is to be called instead of a network."""
        if self._log is None:
            return network
        self.networks[name] = CompiledNetwork(
            network,
            self._model,
            train_sizes=self._plan.compiled_train_sizes,
            evaluation_sizes=self._plan.compiled_evaluation_sizes,
            log=self._log,
            deterministic=self._repeats,
        )
        return self.networks[name]


def _recorder(setting: Setting, ledger: LedgerWriter, progress: Progress) -> Recorder:
    if not setting.prepared.world.is_first:
        return Recorder(None, ledger, [], setting.display, progress)
    recipe, directory = setting.prepared.recipe, setting.directory
    facts = TrackerFacts(
        name=directory.root.resolve().name,
        recipe=to_tree(recipe),
        environment=read_environment(directory),
        start_step=setting.start_step,
    )
    trackers = build_trackers(recipe.telemetry.trackers, directory.root, facts)
    return Recorder(EventWriter(setting.directory.events), ledger, trackers, setting.display, progress)


def _component_makers(run: Run) -> tuple[Callable[[nn.Module], Component], Callable[[Any], Component]]:
    if not run.strategy.is_sharded:
        return (lambda network: network), OptimizerComponent
    # Only where it is used: torch's distributed tensors take their time to import.
    from paceline.checkpoint.sharded_state import ShardedModel, ShardedOptimizer

    return ShardedModel, ShardedOptimizer


def _register(run: Run) -> None:
    """Name everything that changes; what is not here is a pure function of the recipe and the step."""
    as_model, as_optimizer = _component_makers(run)
    for name, network in run.models().items():
        run.components.add(name, as_model(network))
    run.components.add("optimizer", as_optimizer(run.optimizer))
    if run.precision.scaler is not None:
        run.components.add("scaler", run.precision.scaler)
    run.components.add("progress", run.progress)
    run.components.add("window", run.window)
    run.components.add("clock", run.clock)


def with_profile(run: Run) -> StepClock:
    """The run's clock, with a profile around it if one is asked for on this process."""
    asked, steps = run.recipe.telemetry.profile, run.plan.profile_steps
    if steps is None or (asked.ranks == "first" and not run.world.is_first):
        return run.clock
    tool = NsightTool() if asked.tool == "nsys" else TorchTool(run.device.type, run.world.rank, memory=asked.memory)
    assignment = Assignment(
        first=steps[0],
        end=steps[1],
        position=lambda: run.progress.position,
        folder=run.directory.profile,
        report=lambda profiled: _report(run, profiled),
    )
    return ProfilingClock(run.clock, tool, assignment)


def _report(run: Run, profiled: Profiled) -> None:
    which = f"steps {profiled.first} to {profiled.last}"
    if profiled.problem is not None:
        message = f"{which} were not profiled: {profiled.problem}."
        run.recorder.incident("profile", message)
        run.display.message(message)
        return
    tool = run.recipe.telemetry.profile.tool
    folder = None if tool == "nsys" else run.directory.profile(profiled.first - 1)
    place = None if folder is None else str(folder.relative_to(run.directory.root))
    run.recorder.write(
        ProfileEvent(**run.progress.here, first_step=profiled.first, last_step=profiled.last, tool=tool, folder=place)
    )
    run.display.message(f"{which} were profiled: {'see the report of nsys' if folder is None else f'see {folder}'}")
