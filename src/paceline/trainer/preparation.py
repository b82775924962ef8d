"""Prepare a run before its processes meet: task, plan, network, batches.

Every mistake in a recipe is found here, on every process alike, before a process group forms and before the run
directory is touched.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from paceline.checkpoint.state import adapt_weights, check_inventory
from paceline.checkpoint.weights import read_weights
from paceline.data.class_balance import ClassDraws, counts_by_ratio, describe_weights
from paceline.data.image.pipeline import LARGEST_RATIO
from paceline.data.order import StepGeometry
from paceline.data.pipeline import Pipeline, Placement
from paceline.data.preflight import Findings, Loading, check_machine
from paceline.distributed.affinity import CoreAssignment, bind, choose_cores
from paceline.distributed.device import (
    check_communication,
    choose_device,
    describe_machine,
    reserve_deterministic_workspace,
)
from paceline.distributed.sharding import check_sharded
from paceline.errors import CheckpointError, DataError, ModelError, PacelineError, RecipeError, did_you_mean
from paceline.metrics.accumulator import Metric
from paceline.models.adapters import describe_adapters
from paceline.models.build import parameter_count, to_memory_format
from paceline.models.compiled import check_backend
from paceline.models.deferred import InitialValues, NotDeferrableError, build_deferred
from paceline.models.fp8 import convert_to_fp8, fp8_layers
from paceline.models.transfer import adapt, load_fitting, trained_spans, with_shared, zero_classifier
from paceline.optim.embedding_optim import check_tables
from paceline.optim.parameter_groups import describe_groups
from paceline.plan import DataFacts, MachineFacts, NetworkFacts, ParameterNumbers, Plan, TaskFacts, make
from paceline.plan.compute import without_bf16
from paceline.recipe.model import Model
from paceline.recipe.schema import Recipe
from paceline.records.events import EvaluationEvent
from paceline.records.reader import read_plan, read_recipe
from paceline.records.run_directory import RunDirectory
from paceline.storage.cache import local_path
from paceline.tasks.own_code import check_metrics, refused, unused_by_own_loss
from paceline.tasks.task import Task, check_supported, task_name
from paceline.telemetry.trackers import check_trackers
from paceline.trainer.precision import set_float32_matmul
from paceline.units import format_count
from paceline.world import World


def find_host_limits(
    data: Mapping[str, Any], recipe: Recipe, processes: int, *, scored: int, trained: int = 0
) -> Findings:
    """Compare the needs of loader processes with this machine.

    Args:
        data: Facts of the data; there are no findings for tasks that do not describe how they load samples.
        recipe: The run's recipe.
        processes: Processes on this machine.
        scored: Images of an evaluation batch.
        trained: Images of a training batch.
    """
    names = ("workers", "channels", "image_size", "evaluation_size")
    sizes = {name: data[name] for name in names if isinstance(data.get(name), int)}
    # DALI's workers are threads, and in-memory data has no workers.
    if data.get("backend") != "pytorch" or len(sizes) < len(names):
        return Findings()
    ratio = LARGEST_RATIO if "evaluation_shapes" in data else 1
    return check_machine(
        Loading(
            processes=processes,
            workers=sizes["workers"],
            prefetch=recipe.data.prefetch,
            train_batch_bytes=trained * sizes["channels"] * sizes["image_size"] ** 2,
            evaluation_batch_bytes=scored * sizes["channels"] * sizes["evaluation_size"] ** 2 * ratio,
        )
    )


def find_plan_limits(plan: Plan, recipe: Recipe) -> Findings:
    """Do the same for a run."""
    scored = plan.evaluation_batch_size if plan.evaluates else 0
    return find_host_limits(plan.data, recipe, plan.local_world_size, trained=plan.micro_batch_size, scored=scored)


# For one process: four terabytes of weights, more than any device holds.
_MOST_PARAMETERS = 10**12
# Mean share of the products from which depthwise convolutions slow bf16 down on CPUs.
_DEPTHWISE_SHARE = 0.03


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A run that is ready to start, on this process."""

    recipe: Recipe
    plan: Plan
    task: Task
    world: World
    device: torch.device
    network: nn.Module
    pipeline: Pipeline
    geometry: StepGeometry
    cores: CoreAssignment | None = None
    notices: tuple[str, ...] = ()
    first_values: InitialValues | None = None
    """Values for a network without values, which is sharded over processes; None for a complete one."""


def prepare(recipe: Recipe, task: Task, world: World) -> Prepared:
    """Resolve device and plan, build the network and open the data.

    Raises:
        PacelineError: For every mistake that can be detected before training.
    """
    if recipe.train.deterministic or recipe.parallel.exact:
        reserve_deterministic_workspace()
    # A task may have a default loss other than the recipe's.
    recipe = replace(recipe, train=replace(recipe.train, loss=task.recipe.train.loss))
    device = choose_device(recipe.parallel.device, world)
    check_communication(recipe.parallel.backend, device)
    check_trackers(recipe.telemetry.trackers)
    cores = choose_cores(recipe.parallel.affinity, world, device, os.environ)
    make_plan = planner(recipe, task, describe_machine(device, cores, processes=world.local_world_size), world)
    plan = make_plan()
    limits = find_plan_limits(plan, recipe)
    if limits.refusal:
        raise DataError(limits.refusal)
    bind(cores)  # before loader processes and threads are started, which inherit it
    torch.set_num_threads(plan.threads_per_process)
    if recipe.train.deterministic or (recipe.parallel.exact and device.type != "cpu"):
        # Only when requested: the call imports torch's compiler, which takes seconds.
        torch.use_deterministic_algorithms(mode=True)
    elif device.type == "cuda":
        # Let cuDNN measure which of its kernels is fastest for these shapes, as every reference trainer does.
        torch.backends.cudnn.benchmark = True
    set_float32_matmul(plan.float32_matmul)
    placement = Placement(device=device, channels_last=plan.channels_last)
    pipeline = task.open_pipeline(placement)
    if not hasattr(pipeline, "train_batches"):
        raise refused(task, "open_pipeline returned", pipeline, "a pipeline, such as SimplePipeline")
    with contextlib.ExitStack() as undo:
        undo.callback(pipeline.close)
        pipeline.start(training=True, evaluation=plan.evaluates)
        network, notices, first_values = _build(recipe, task, placement, make_plan)
        if plan.precision == "fp8":
            network = convert_to_fp8(network)
        task.prepare_training(placement)
        plan = plan_network(make_plan, network, recipe)
        reported = {"batch.global_size", "data.classes", "data.copies"} & plan.reasons.keys() - plan.unused.keys()
        of_data = (plan.reasons[key] for key in sorted(reported))
        prepared = Prepared(
            recipe=recipe,
            plan=plan,
            task=task,
            world=world,
            device=device,
            network=network,
            pipeline=pipeline,
            geometry=geometry_of(recipe, plan, task),
            cores=cores,
            notices=(*plan.left_out, *of_data, *limits.warnings, *notices, *([] if cores is None else [cores.reason])),
            first_values=first_values,
        )
        check_single_samples(plan, prepared.geometry, task, network, pipeline)
        undo.pop_all()
    return prepared


def geometry_of(recipe: Recipe, plan: Plan, task: Task) -> StepGeometry:
    """Return which samples each step of a run uses, and their weights.

    Raises:
        DataError: If a sample has weight zero: a step of such samples would have no mean loss.
    """
    classes, weights = task.sample_classes(), task.sample_weights()
    if weights is not None and len(weights) and int(weights.min()) < 1:
        raise DataError(
            f"training sample {int(weights.argmin())} counts for {int(weights.min())} {task.unit} "
            f"({task_name(task)}.sample_weights), and a step of such samples would have no mean loss; leave them out."
        )
    return StepGeometry(
        seed=recipe.seed,
        samples=plan.train_samples,
        global_batch_size=plan.global_batch_size,
        logical_ranks=plan.logical_ranks,
        repeats=recipe.data.augment.repeats,
        growth=tuple((p.first_epoch, p.global_batch_size, p.logical_ranks) for p in plan.batch_phases[1:]),
        in_step=plan.strategy == "fsdp",
        weights=weights,
        lengths=task.sample_lengths(),
        balanced=recipe.batch.balance,
        sort_key=task.sample_keys(),
        sizes=task.sample_sizes(),
        class_weights=np.array(plan.class_weights)[classes] if plan.class_weights else None,
        draws=draws_of(task),
    )


Planner = Callable[..., Plan]
"""What makes plans of one recipe: without arguments before the network is known, then with its ``network`` facts."""


def planner(recipe: Recipe, task: Task, machine: MachineFacts, world: World) -> Planner:
    """Get a task's facts and return a function that makes plans with them, so that the data are opened once.

    Raises:
        PacelineError: If the data cannot be used, or the task does not measure what the recipe asks for.
    """
    check_supported(task)
    if task.is_own:
        machine = without_bf16(machine, f"{task_name(task)} is your own code, computed as written unless you set bf16")
    data = task.data_facts(world)
    if not isinstance(data, DataFacts):
        raise refused(task, "data_facts returned", data, "a paceline.plan.DataFacts")
    for name in ("train_samples", "evaluation_samples"):
        if not isinstance(number := getattr(data, name), SupportsIndex):
            raise refused(task, f"data_facts().{name} is", number, "a whole number")
    # The class is part of the run's identity: weights of one task cannot be used for another.
    data = replace(data, description={"task": task_name(task), **data.description})
    classes, data = _class_facts(task, data)
    check_metrics(task)
    _check_metric_names(task)
    best_metric(task)
    lengths = task.sample_lengths()
    is_balanced = recipe.batch.balance and recipe.data.augment.repeats == 1 and "classes_sha256" not in classes
    facts = TaskFacts(
        higher_is_better={metric.name: metric.higher_is_better for metric in task.measured},
        headline=headline_of(task).name,
        sample_name=task.unit if task.sample_weights() is None else "samples",
        weight_unit=task.unit,
        **classes,
        lengths_sha256=lengths.sha256 if is_balanced and lengths is not None and lengths.is_ragged else None,
    )
    return partial(make, recipe, world=world, data=data, machine=machine, task=facts)


def _class_facts(task: Task, data: DataFacts) -> tuple[dict[str, Any], DataFacts]:
    """Return the plan's facts of a task's classes and of the data, with a notice about class weights."""
    labels = task.sample_classes()
    unused = unused_by_own_loss(task)
    reasons: dict[str, str] = {}
    facts: dict[str, Any] = {}
    for key, name in (("train.class_weights", "class_weights"), ("data.sampling", "sampling")):
        if labels is None:
            unused[key] = f"the task {task_name(task)} names no class of its samples"
        elif key not in unused and (weights := task.weights_by_class(key)):
            facts[name] = weights
            reasons[key] = describe_weights(weights, labels, task.description()["class_names"])
    if {"class_weights", "sampling"} <= facts.keys():
        both = "data.sampling and train.class_weights both correct for rare classes, so these count twice; use one"
        data = replace(data, left_out=(*data.left_out, both))
    if draws := draws_of(task):
        facts |= {"classes_sha256": draws.sha256, "mixture": draws.counts}
        if draws.counts:
            each = zip(task.recipe.data.mixture, draws.counts, np.bincount(draws.classes).tolist(), strict=True)
            reasons["data.mixture"] = "per epoch " + ", ".join(
                f"{format_count(count)} samples of {name!r} ({format_count(size)} images)" for name, count, size in each
            )
        else:
            reasons["data.sampling"] = f"drawn with replacement, {reasons['data.sampling']}"
    return facts, replace(data, unused={**unused, **data.unused}, reasons={**data.reasons, **reasons})


def draws_of(task: Task) -> ClassDraws | None:
    """Return how a task's samples are drawn, if not each once; repeats of an image count as one.

    Raises:
        RecipeError: If the recipe draws them both by class and by data set, or a set has no share of an epoch.
    """
    classes, sets, data = task.sample_classes(), task.sample_sets(), task.recipe.data
    weights = task.weights_by_class("data.sampling")
    if sets is not None and not data.mixture:
        raise RecipeError(f"task={task.recipe.task} has sample_sets(), but data.mixture names no ratios; give them.")
    if sets is not None:
        if weights:
            raise RecipeError(
                "data.sampling draws samples by class, but data.dataset=mixture draws them by data set; leave it out: "
                "train.class_weights can weigh classes in the loss."
            )
        sets = sets[: len(sets) // data.augment.repeats]
        return ClassDraws(classes=sets, counts=counts_by_ratio(data.mixture, sets))
    if classes is None or not weights:
        return None
    return ClassDraws(classes=classes[: len(classes) // data.augment.repeats], weights=weights)


def plan_run(recipe: Recipe, task: Task, machine: MachineFacts, world: World) -> Plan:
    """Return the plan of a recipe on its data, before its network is known."""
    return planner(recipe, task, machine, world)()


def headline_of(task: Task) -> Metric:
    """Return the main metric; a custom task may lack the one that its parent names."""
    return next((metric for metric in task.metrics if metric.name == task.headline), task.metrics[0])


def _check_metric_names(task: Task) -> None:
    """Refuse metrics that the task cannot compute scores for, or whose names clash with others in records."""
    own, metrics = {metric.name for metric in task.metrics}, task.recipe.evaluate.metrics
    recorded = {each.name for each in fields(EvaluationEvent)} | {"event", "last", "best", "input_mean", "input_std"}
    if clash := sorted(own & recorded):
        raise RecipeError(f"{task_name(task)}.metrics has the name '{clash[0]}', which records use; choose another.")
    if metrics and not task.gives_scores:
        raise RecipeError(
            f"evaluate.metrics needs logits, which task={task.recipe.task} does not give; leave it out, or override "
            "collectors() in a task of yours."
        )
    for name in metrics:
        if not name.isidentifier() or name in own | recorded:
            raise RecipeError(
                f"evaluate.metrics has the name '{name}', but a name is letters, digits and underscores, and not one "
                f"that records use: {', '.join(sorted(own | recorded))}."
            )


def best_metric(task: Task) -> Metric:
    """Return the metric that decides which evaluation is best.

    Raises:
        RecipeError: If the task does not measure the requested one.
    """
    requested = task.recipe.evaluate.metric
    return headline_of(task) if requested == "auto" else find_metric(task, requested, f"evaluate.metric={requested}")


def find_metric(task: Task, name: str, setting: str) -> Metric:
    """Return a task's metric of this name, once the task knows its data (:meth:`Task.data_facts`).

    Args:
        task: The run's task.
        name: Name of the metric.
        setting: The setting that requests it, for the message.

    Raises:
        RecipeError: If the task has no such metric.
    """
    metrics = {metric.name: metric for metric in task.measured}
    if name not in metrics:
        raise RecipeError(
            f"{setting} is not a metric of this task; choose one of: {', '.join(metrics)}.{did_you_mean(name, metrics)}"
        )
    return metrics[name]


def without_initial_weights(recipe: Recipe) -> Recipe:
    """Return the recipe without initial weights, for weights that come from elsewhere, such as a checkpoint."""
    return replace(recipe, model=replace(recipe.model, pretrained=False, initialize_from=None))


def resumed_recipe(recipe: Recipe, run_dir: Path | None) -> Recipe:
    """Return the recipe to build a resumed run's network with: without initial weights, and with its first config.

    The folder or the repository that the config came from may have changed since.
    """
    recipe = without_initial_weights(recipe)
    if run_dir is None or not ((run := RunDirectory(run_dir)).exists() and run.plan.is_file()):
        return recipe
    stored, config = read_recipe(run).get("model", {}), read_plan(run).get("network_config")
    if config is None or (stored.get("name"), stored.get("options", {})) != (recipe.model.name, recipe.model.options):
        return recipe
    return replace(recipe, model=replace(recipe.model, options=config))


def without_mirror(recipe: Recipe) -> Recipe:
    """Return the recipe for a trial run, without a mirror."""
    return replace(recipe, checkpoint=replace(recipe.checkpoint, mirror=None))


def _build(
    recipe: Recipe, task: Task, placement: Placement, make_plan: Planner
) -> tuple[nn.Module, tuple[str, ...], InitialValues | None]:
    """Return the network, and notices: complete or, if it will be sharded, without values."""
    plan = make_plan()
    # A plan made before the network is known may turn out to shard the weights. On a CPU processes share the host's
    # memory, and `auto` uses replicas unless they are very large.
    may_shard = plan.strategy == "ddp" and recipe.parallel.strategy == "auto" and plan.device == "cuda"
    if plan.strategy != "fsdp" and not may_shard:
        return *build_network(recipe, task, placement), None
    notices: tuple[str, ...] = ()
    try:
        network, first_values = build_without_values(recipe, task, plan)
        if make_plan(network=NetworkFacts(parameters=count_parameters(network))).strategy == "fsdp":
            return network, (), first_values
    except NotDeferrableError as error:
        if plan.strategy == "fsdp":
            notices = (f"every process built the whole network before sharding: {error}",)
    network, network_notices = build_network(recipe, task, placement)
    return network, (*notices, *network_notices), None


def build_shapes(recipe: Recipe, task: Task, *, channels_last: bool) -> nn.Module:
    """Return the network that a run would train, with frozen parts, adapters and recomputed blocks, but without values.

    Raises:
        PacelineError: If the recipe names no network, or one that cannot be built.
    """
    try:
        with torch.device("meta"):
            network = _build_adapted(recipe, task)
    except PacelineError:
        raise
    except (RuntimeError, NotImplementedError, ValueError, TypeError, AttributeError):
        # The constructor reads the values it has drawn. Use real ones then, which briefly takes as much memory as the
        # weights.
        network = _build_adapted(recipe, task)
    return to_memory_format(network.to("meta"), channels_last=channels_last)


def _build_adapted(recipe: Recipe, task: Task) -> nn.Module:
    network = task.build_model()
    adapt(network, recipe.model)
    return network


def build_without_values(recipe: Recipe, task: Task, plan: Plan) -> tuple[nn.Module, InitialValues]:
    """Return the network as every process will have it, but without values, and the function that supplies them.

    Its initial values are bit-identical to those of the complete network with the same seed.

    Raises:
        NotDeferrableError: If it has to be built with values; states why.
        PacelineError: For a mistake in the recipe.
    """
    for key in ("initialize_from", "pretrained"):
        if getattr(recipe.model, key):
            raise NotDeferrableError(f"model.{key} loads all of it at once")
    if plan.precision == "fp8":
        raise NotDeferrableError("train.precision=fp8 changes its layers")

    torch.manual_seed(recipe.seed)
    network, first_values = build_deferred(partial(_build_adapted, task.recipe, task))
    if any(isinstance(each, _NormBase) for each in network.modules()):
        raise NotDeferrableError("it has BatchNorm, which is tested on the whole network")
    if task.begins_from_data(network):
        raise NotDeferrableError("some initial weights are computed from the training data")
    with torch.device("meta"):
        task.check_network(network)
    return network, first_values


def count_parameters(network: nn.Module) -> ParameterNumbers:
    """Return the number of parameters."""
    return ParameterNumbers(sum(each.numel() for each in network.parameters()), parameter_count(network))


def build_network(recipe: Recipe, task: Task, placement: Placement) -> tuple[nn.Module, tuple[str, ...]]:
    """Return the network with its initial weights on the device, the same on every rank, and notices about them."""
    torch.manual_seed(recipe.seed)
    network = task.build_model()
    if not isinstance(network, nn.Module):
        raise refused(task, "build_model returned", network, "a torch.nn.Module")
    task.check_network(network)
    task.first_weights(network)
    model = task.recipe.model
    notices = load_initial_weights(network, model)
    adapt(network, model)
    if model.adapters.rank is not None:
        notices.append(describe_adapters(network))
    return place(network, placement), tuple(notices)


def load_initial_weights(network: nn.Module, model: Model) -> list[str]:
    """Load the weights of ``model.initialize_from``, if set; returns notices about them.

    Raises:
        PacelineError: If they are missing, unreadable or do not fit.
    """
    if model.initialize_from is None:
        return []
    saved = read_weights(Path(local_path(model.initialize_from, key="model.initialize_from")))
    state_on_disk, changed = adapt_weights(network.state_dict(), saved.plain)
    state = with_shared(network, state_on_disk)
    notices = [f"model.initialize_from: {saved.path}: {each}" for each in changed]
    if model.initialize_partly:
        zero_classifier(network)
        return [*notices, load_fitting(network, state, source=str(saved.path))]
    try:
        check_inventory(network.state_dict(), state, where="model.initialize_from")
    except CheckpointError as error:
        raise CheckpointError(f"{error} Or load only what fits with model.initialize_partly=true.") from None
    network.load_state_dict(state)
    return notices


def place(network: nn.Module, placement: Placement) -> nn.Module:
    """Move a network to the device and give its filters the batches' memory format."""
    return to_memory_format(network.to(placement.device), channels_last=placement.channels_last)


def plan_network(make_plan: Planner, network: nn.Module, recipe: Recipe) -> Plan:
    """Return the plan of a run whose network is known.

    Raises:
        ModelError: If the network cannot be trained as the recipe asks.
        RecipeError: If its state is to be sharded over processes, and the rest of the recipe does not support that.
    """
    check_backend(recipe.model)
    plan_so_far = make_plan()
    first, last = trained_spans(network, recipe.model, plan_so_far.unfreeze_steps, plan_so_far.freeze_after_steps)
    if parameter_count(network) == 0:
        raise ModelError(f"model.name={recipe.model.name} has no parameter that can be trained (requires_grad).")
    trained = {name for name, each in network.named_parameters() if each.requires_grad}
    if trained.issubset(first):
        raise ModelError(
            "model.frozen leaves nothing to train until model.unfreeze applies; exclude some parameters with '!'."
        )
    if trained.issubset(last):
        raise ModelError("model.freeze_after leaves nothing to train until the end; name fewer parameters.")
    synced = [name for name, module in network.named_modules() if isinstance(module, nn.SyncBatchNorm)]
    if recipe.parallel.exact and synced:
        raise ModelError(
            f"model.name={recipe.model.name} has SyncBatchNorm ({', '.join(synced[:3])}{', …' * (len(synced) > 3)}), "
            "whose statistics are sums over the processes in an order that depends on their number; parallel.exact "
            "needs BatchNorm, which here normalises each logical rank by itself."
        )
    numbers = count_parameters(network)
    if numbers.every > _MOST_PARAMETERS * plan_so_far.world_size:
        raise ModelError(
            f"model.name={recipe.model.name} has {numbers.every:.3g} parameters with model.options="
            f"{recipe.model.options}, more than {plan_so_far.world_size} device(s) can hold; make it smaller."
        )
    plan = make_plan(
        network=NetworkFacts(
            parameters=numbers,
            groups=describe_groups(network, recipe.optimizer, first, last),
            fp8_layers=fp8_layers(network, name=recipe.model.name) if plan_so_far.precision == "fp8" else (),
            is_depthwise=_is_depthwise(network),
            config=getattr(network, "config_keys", None),
        )
    )
    check_tables(network, recipe, strategy=plan.strategy, device=plan.device)
    if plan.strategy == "fsdp":
        check_sharded(network, recipe.parallel)
    return plan


def _is_depthwise(network: nn.Module) -> bool:
    """Whether fp32 is faster than bf16 on CPUs (measured by benchmarks/precision_families.py).

    That depends on the share of depthwise convolutions in all products: they take kernel² products per value, and a 1×1
    convolution takes one per channel.
    """
    modules = list(network.modules())
    wide = [each for each in modules if isinstance(each, nn.Conv2d) and max(each.kernel_size) > 1]
    depthwise = [each for each in wide if each.groups == each.in_channels > 1]
    shares = [1 / (1 + each.in_channels / each.weight[0].numel()) for each in depthwise]
    is_mostly = 2 * len(depthwise) >= len(wide) and sum(shares) > _DEPTHWISE_SHARE * len(shares)
    return is_mostly and any(isinstance(each, nn.BatchNorm2d) for each in modules)


def check_single_samples(
    plan: Plan, geometry: StepGeometry, task: Task, network: nn.Module, pipeline: Pipeline | None = None
) -> None:
    """Check before training that BatchNorm accepts a single sample, if some micro-batch will have just one.

    Args:
        plan: The run's plan.
        geometry: Its steps.
        task: Its task.
        network: Its network, with values.
        pipeline: The run's pipeline; without one, another is opened on the CPU for the sample.

    Raises:
        RecipeError: If it does not.
    """
    normalised = any(isinstance(each, _NormBase) for each in network.modules())
    if not normalised or geometry.smallest_part(plan.total_steps) > 1:
        return
    with contextlib.ExitStack() as opened:
        if pipeline is None:
            pipeline = task.open_pipeline(Placement(device=torch.device("cpu")))
            opened.callback(pipeline.close)
            pipeline.start(training=True, evaluation=False)
        # The run's first sample alone, as in training: augmented, and of the first size.
        alone = replace(geometry, global_batch_size=1, logical_ranks=1, growth=(), repeats=1, balanced=False)
        [sample] = pipeline.train_batches(alone, 0, 1, World())
    if not len(sample.ids):  # it could not be read
        return
    trial = copy.deepcopy(network)
    try:
        with torch.no_grad():
            task.loss(trial, sample)
    except ValueError as error:
        # An epoch's last step has the smallest micro-batches, if any step does.
        epochs = plan.epochs
        steps = [(epochs.last_step_samples(p), p.logical_ranks) for p in epochs.finished_phases(plan.total_steps)]
        steps += [(phase.global_batch_size, phase.logical_ranks) for phase in epochs.phases]
        samples, ranks = min(steps, key=lambda step: step[0] // step[1])
        raise RecipeError(
            f"a step of {samples} sample(s) in {ranks} micro-batch(es) brings a micro-batch of one sample, and this "
            f"model cannot train on a single one ({error}); choose another batch.global_size or batch.micro_size, or "
            "larger images."
        ) from None
