"""Build every part of a prepared run: optimizer, parallel strategy, records, components."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from paceline.checkpoint.publish import BackgroundWriter, Cadence, Publisher, job_end_time
from paceline.checkpoint.state import Component, OptimizerComponent, Registry
from paceline.checkpoint.store import CheckpointStore
from paceline.data.order import evaluation_rounds
from paceline.distributed.collectives import Collectives, open_store
from paceline.distributed.data_parallel import DataParallel
from paceline.distributed.exact import ExactDataParallel
from paceline.distributed.strategy import Heartbeat, Replicas, SingleProcess, Strategy
from paceline.distributed.watchdog import Watchdog, WatchdogContext
from paceline.learning.observer import NetworkObserver
from paceline.models.compiled import CompiledNetwork, CompileLog
from paceline.models.precision import Precision
from paceline.models.transfer import FreezeSchedule, trained_spans
from paceline.optim.build import Clipping, ExponentialMovingAverage
from paceline.plan import Plan
from paceline.recipe.load import recipe_digest, to_tree
from paceline.recipe.running import Parallel
from paceline.recipe.schema import Recipe
from paceline.records.events import EventWriter, ProfileEvent
from paceline.records.ledger import LedgerWriter, ledger_path
from paceline.records.reader import read_environment
from paceline.records.run_directory import json_value
from paceline.telemetry.clock import StepClock, build_step_clock
from paceline.telemetry.profile import NsightTool, ProfileResult, ProfileWindow, ProfilingClock, TorchTool
from paceline.telemetry.trackers import TrackerFacts, build_trackers
from paceline.trainer.evaluate import Evaluator, KeepOptions
from paceline.trainer.forecast import forecast
from paceline.trainer.listeners import TRACE_VARIABLE, Listener
from paceline.trainer.noise import NoiseListener, NoiseMeter, linear_rule_warning
from paceline.trainer.nonfinite import NonFiniteGuard
from paceline.trainer.observing import LearningListener
from paceline.trainer.recorder import Recorder
from paceline.trainer.run import Run
from paceline.trainer.run_records import keep_first_batch
from paceline.trainer.step_stats import Progress, Window
from paceline.trainer.subject import Subject
from paceline.trainer.utilisation import find_utilisation
from paceline.version import __version__

# Values of the plan; earlier steps with others do not tell how long a resumed run will take.
_SPEED_DEPENDS_ON = (
    *("world_size", "local_world_size", "micro_batch_size", "strategy", "precision"),
    *("device_name", "threads_per_process", "compile", "channels_last"),
)


def build_run(subject: Subject) -> Run:
    """Build every part of a run on this process."""
    recipe, plan, device, network = subject.recipe, subject.plan, subject.device, subject.network
    if subject.first_values is None:
        # Custom code may have drawn different weights on another process.
        subject.collectives.broadcast_tensors([*(each.data for each in network.parameters()), *network.buffers()])
    ema = None if recipe.train.ema is None else ExponentialMovingAverage(network, recipe.train.ema)
    compiled = _compiled(recipe, plan, {"model": network} | ({} if ema is None else {"ema": ema.module}))
    strategy = build_strategy(
        *(plan, network, compiled.get("model", network), subject.collectives, device),
        parallel=recipe.parallel,
        average=None if ema is None else ema.module,
        value_of=subject.first_values,
    )
    scored = {"model": strategy.eval_model} | ({} if ema is None else {"ema": compiled.get("ema", ema.module)})
    precision = Precision(plan.precision, device, recipe.train.grad_scaler, is_sharded=strategy.is_sharded)
    optimizer = subject.task.build_optimizer(network, recipe.optimizer, device)
    schedules = subject.task.build_schedules(recipe, plan, optimizer)
    heartbeat, progress = Heartbeat(), Progress(begun=subject.started)
    ledger = LedgerWriter(ledger_path(subject.directory.ledger, subject.world.rank))
    noise = NoiseMeter(network, plan, precision, strategy.loss_divisor) if plan.noise_scale_every_steps else None
    run = Run(
        recipe=recipe,
        identity=subject.decision.identity,
        plan=plan,
        world=subject.world,
        device=device,
        collectives=subject.collectives,
        directory=subject.directory,
        task=subject.task,
        pipeline=subject.pipeline,
        network=network,
        scored=scored,
        compiled=compiled,
        strategy=strategy,
        optimizer=optimizer,
        schedules=schedules,
        clipping=Clipping(network, recipe.optimizer),
        geometry=subject.geometry,
        precision=precision,
        guard=NonFiniteGuard(recipe.train, optimizer, network, device, active=precision.scaler is None),
        freeze_schedule=_freeze_schedule(strategy, subject),
        ema=ema,
        evaluator=_evaluator(subject, precision, heartbeat),
        progress=progress,
        window=Window(subject.collectives, ledger, device, noise, subject.task.pop_logged_values),
        clock=build_step_clock(device.type),
        heartbeat=heartbeat,
        watchdog=_watchdog(heartbeat, subject),
        recorder=build_recorder(subject, ledger, progress),
        display=subject.display,
        callbacks=subject.options.callbacks,
        stop=subject.stop,
        components=Registry(),
        writer=BackgroundWriter(),
        publisher=build_publisher(subject, {"recipe_sha256": recipe_digest(recipe)}, _describe_weights(subject)),
        mirroring=subject.mirroring,
        utilisation=find_utilisation(subject) if subject.world.is_first else None,
    )
    chosen = [recipe.data.workers, recipe.data.prefetch, recipe.model.activation_checkpointing]
    run.clock.measures_under({name: getattr(plan, name) for name in _SPEED_DEPENDS_ON} | {"recipe": chosen})
    _register(run)
    # After _register: a checkpoint holds the clock itself, not the profile around it.
    run.clock = with_profile(run)
    run.previews += [partial(keep_first_batch, run), partial(forecast, run)]
    run.listeners += _listeners(run, noise)
    _trace(run)
    run.strategy.timed_by(run.clock)
    if run.timed_pipeline is not None:
        run.timed_pipeline.timed_by(partial(run.clock.span, "h2d"))
    return run


def _describe_weights(subject: Subject) -> dict[str, str]:
    """Return the metadata that a weights file needs so that it can be evaluated and used without its run."""
    plan = subject.plan
    return {
        "recipe": json.dumps(to_tree(subject.recipe)),
        "data": json.dumps({**plan.data, **subject.task.description()}, default=json_value),
        "precision": plan.precision,
        **({} if plan.network_config is None else {"network_config": json.dumps(plan.network_config)}),
    }


def build_publisher(subject: Subject, facts: Mapping[str, str], file_metadata: Mapping[str, str]) -> Publisher:
    """Return the publisher of a run's checkpoints.

    Args:
        subject: The opened run.
        facts: More facts for each manifest.
        file_metadata: More metadata for each weights file.
    """
    recipe, directory = subject.recipe, subject.directory
    return Publisher(
        store=CheckpointStore(directory.checkpoints),
        directory=directory,
        recipe=recipe,
        facts={"version": __version__, "run": subject.decision.identity, **facts},
        file_metadata={"paceline": "1", **file_metadata},
        cadence=Cadence(recipe.checkpoint, end_time=job_end_time(os.environ)),
        patience_seconds=recipe.parallel.timeout.seconds,
        needed=tuple if subject.mirroring is None else subject.mirroring.needed,
        subscribers=() if subject.mirroring is None else (subject.mirroring.submit,),
    )


def _listeners(run: Run, noise: NoiseMeter | None) -> list[Listener]:
    learning: list[Listener] = []
    if run.world.is_first:
        observer = NetworkObserver(run.network, hooked=run.plan.compile == "off")
        learning = [LearningListener(observer, run.progress, run.plan.total_steps)]
    if noise is None:
        return learning

    def warn() -> str | None:
        return linear_rule_warning(noise, run.recipe.optimizer, run.plan, run.geometry, **run.progress.here)

    return [*learning, NoiseListener(noise, partial(run.due, "noise_scale", ahead=1), warn)]


def _trace(run: Run) -> None:
    """Note what each step computes, if a study asks for that."""
    if (setting := os.environ.get(TRACE_VARIABLE)) is not None:
        from paceline.trainer.tracing import StepTracer  # ordinary runs do not need it

        name_of = partial(run.pipeline.sample_name, training=True)
        tracer = StepTracer(run, run.network, [run.optimizer], name_of, setting)
        run.listeners.append(tracer)
        run.callbacks = replace(run.callbacks, observers=(*run.callbacks.observers, tracer))


def _freeze_schedule(strategy: Strategy, subject: Subject) -> FreezeSchedule | None:
    model, plan, network = subject.recipe.model, subject.plan, subject.network
    # A plan that shards weights has already refused model.unfreeze and model.freeze_after (plan/strategy.py).
    if not (plan.unfreeze_steps or plan.freeze_after_steps) or not isinstance(strategy, Replicas):
        return None
    first, last = trained_spans(network, model, plan.unfreeze_steps, plan.freeze_after_steps)
    return FreezeSchedule(network, first, last, changed=strategy.update_trainable)


def _watchdog(heartbeat: Heartbeat, subject: Subject) -> Watchdog:
    pipeline = subject.pipeline
    # Custom pipelines need not know what they read.
    reading = getattr(pipeline, "reading", lambda **_: "")
    return Watchdog(
        heartbeat,
        subject.world,
        open_store("watchdog"),
        timeout_seconds=subject.recipe.parallel.timeout.seconds,
        context=WatchdogContext(
            reading=lambda training: str(reading(training=training)),
            name_of=lambda sample: pipeline.sample_name(sample, training=True),
        ),
    )


def _evaluator(subject: Subject, precision: Precision, heartbeat: Heartbeat) -> Evaluator:
    plan, world = subject.plan, subject.world
    # Custom pipelines split the evaluation as the guide describes.
    default_rounds = partial(evaluation_rounds, plan.evaluation_samples)
    weights = "model" if subject.recipe.train.ema is None else "ema"  # as in summary.json
    examples = subject.recipe.evaluate.keep_examples
    rounds = getattr(subject.pipeline, "evaluation_rounds", default_rounds)(plan.evaluation_batch_size, world)
    return Evaluator(
        task=subject.task,
        pipeline=subject.pipeline,
        precision=precision,
        collectives=subject.collectives,
        device=subject.device,
        batch_size=plan.evaluation_batch_size,
        heartbeat=heartbeat,
        rounds=rounds if plan.strategy == "fsdp" else None,
        keep=KeepOptions(weights=weights, examples=examples) if examples else KeepOptions(),
    )


def _compiled(recipe: Recipe, plan: Plan, networks: Mapping[str, nn.Module]) -> dict[str, CompiledNetwork]:
    """Return the compiled functions to call in place of the networks; empty if nothing is compiled."""
    if plan.compile == "off":
        return {}
    log = CompileLog()
    return {
        name: CompiledNetwork(
            network,
            recipe.model,
            train_sizes=plan.compiled_train_sizes,
            evaluation_sizes=plan.compiled_evaluation_sizes,
            log=log,
            deterministic=recipe.train.deterministic or recipe.parallel.exact,
        )
        for name, network in networks.items()
    }


def build_recorder(subject: Subject, ledger: LedgerWriter, progress: Progress) -> Recorder:
    """Return what writes the records; other ranks than the first only have a ledger."""
    recipe, directory = subject.recipe, subject.directory
    if not subject.world.is_first:
        return Recorder(None, ledger, [], subject.display, progress)
    facts = TrackerFacts(
        name=directory.root.resolve().name,
        recipe=to_tree(recipe),
        environment=read_environment(directory),
        start_step=subject.decision.choice.step,
    )
    trackers = build_trackers(recipe.telemetry.trackers, directory.root, facts)
    return Recorder(EventWriter(directory.events), ledger, trackers, subject.display, progress)


def _register(run: Run) -> None:
    """Collect everything that changes during a run; the rest is a pure function of the recipe and the step.

    Of what is not sharded, rank 0's state is saved. Checkpoints without a new component cannot be loaded any more.
    """
    components: dict[str, Component] = {**run.models(), "optimizer": OptimizerComponent(run.optimizer)}
    if run.strategy.is_sharded:
        # Imported only where used: torch's distributed tensors are slow to import.
        from paceline.checkpoint.sharded_state import ShardedModel, ShardedOptimizer

        components = {name: ShardedModel(network) for name, network in run.models().items()}
        components["optimizer"] = ShardedOptimizer(run.optimizer)
    if run.precision.scaler is not None:
        components["scaler"] = run.precision.scaler
    components |= {"progress": run.progress, "window": run.window, "clock": run.clock}
    for name, component in components.items():
        run.components.add(name, component)


def with_profile(run: Run) -> StepClock:
    """Return the run's clock, wrapped in a profiler if one is requested for this process."""
    profile, steps = run.recipe.telemetry.profile, run.plan.profile_steps
    if steps is None or (profile.ranks == "first" and not run.world.is_first):
        return run.clock
    tool = NsightTool() if profile.tool == "nsys" else TorchTool(run.device.type, run.world.rank, memory=profile.memory)

    def report(profiled: ProfileResult) -> None:
        span = f"steps {profiled.first} to {profiled.last}"
        if profiled.problem is not None:
            message = f"{span} were not profiled: {profiled.problem}."
            run.recorder.incident("profile", message)
            run.display.message(message)
            return
        folder = None if profile.tool == "nsys" else run.directory.profile(profiled.first - 1)
        run.recorder.write(
            ProfileEvent(
                **run.progress.here,
                first_step=profiled.first,
                last_step=profiled.last,
                tool=profile.tool,
                folder=None if folder is None else str(folder.relative_to(run.directory.root)),
            )
        )
        run.display.message(f"{span} were profiled: {'see the report of nsys' if folder is None else f'see {folder}'}")

    assignment = ProfileWindow(
        first=steps[0],
        end=steps[1],
        position=lambda: run.progress.position,
        folder=run.directory.profile,
        report=report,
    )
    return ProfilingClock(run.clock, tool, assignment)


def build_strategy(
    plan: Plan,
    network: nn.Module,
    forward_fn: Callable[..., Any],
    collectives: Collectives,
    device: torch.device,
    *,
    parallel: Parallel,
    average: nn.Module | None = None,
    value_of: Callable[[str], torch.Tensor] | None = None,
) -> Strategy:
    """Build the strategy the plan chose.

    Args:
        plan: Names the strategy.
        network: The bare network, with the same weights and buffers on every process.
        forward_fn: The callable that a step uses: the network, compiled if requested.
        collectives: The processes.
        device: The network's device.
        parallel: How gradients are reduced and weights are sharded.
        average: The average of the network's weights, if there is one.
        value_of: The initial values, by name, of a network without values; None for one that has them.
    """
    if plan.strategy == "exact":
        return ExactDataParallel(network, forward_fn, collectives)
    if plan.strategy == "ddp":
        return DataParallel(network, forward_fn, collectives, device, parallel=parallel)
    if plan.strategy == "fsdp":
        # Imported only where used: it is slow to import.
        from paceline.distributed.fully_sharded import FullySharded

        return FullySharded(network, forward_fn, average, collectives, device, parallel=parallel, value_of=value_of)
    return SingleProcess(forward_fn, network, allows_unused=parallel.unused_parameters == "allow")
