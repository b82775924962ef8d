"""Open what a recipe describes, stage by stage: task, plan, network, run.

Every mistake in a recipe is found before the network stage ends, on every process alike: before a process group forms
and before the run directory is touched. Commands and studies open as many stages as they need::

    plan = Subject.open(recipe, world, "plan").plan
"""

from __future__ import annotations

import contextlib
import copy
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from paceline.data.image.pipeline import LARGEST_RATIO
from paceline.data.pipeline import Pipeline, Placement
from paceline.data.preflight import Findings, Loading, check_machine
from paceline.distributed.collectives import ExitOnSignal, join, leave
from paceline.distributed.device import (
    CoreAssignment,
    bind,
    check_communication,
    choose_cores,
    choose_device,
    describe_machine,
    reserve_deterministic_workspace,
    restore_affinity,
)
from paceline.distributed.environment import LaunchEnvironment, read_launch
from paceline.distributed.sharding import check_sharded
from paceline.errors import DataError, LaunchError, RecipeError
from paceline.host.world import World
from paceline.models.deferred import InitialValues, NotDeferrableError
from paceline.models.precision import convert_to_fp8, set_float32_matmul
from paceline.optim.classes import check_tables
from paceline.plan import MachineFacts, NetworkFacts, Plan, make
from paceline.plan.compute import resolve_channels_last, without_bf16
from paceline.plugins.loading import loading
from paceline.recipe.load import LoadedRecipe, recipe_digest
from paceline.recipe.schema import Recipe, named_code
from paceline.records.environment import code_digests
from paceline.records.reader import read_plan, read_recipe
from paceline.records.run_directory import RunDirectory, default_run_directory
from paceline.tasks.facts import geometry_of, read_facts
from paceline.tasks.own_code import refused
from paceline.tasks.task import Task, build_task, task_name
from paceline.telemetry.trackers import check_trackers
from paceline.trainer import network as networks
from paceline.trainer.listeners import Callbacks
from paceline.trainer.process_settings import StopRequest, keep_freed_memory, restore_random_states
from paceline.trainer.programs import EARLIER_RUNS_VARIABLE, PROGRAM_VARIABLE
from paceline.version import __version__

if TYPE_CHECKING:  # what only a run needs is imported when one is opened
    from paceline.telemetry.display import Display

TaskMaker = Callable[[Recipe], Task]
Reporter = Callable[[RunDirectory], object]
Stage = Literal["device", "task", "plan", "shapes", "network", "run"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Training options that are not in the recipe.

    Attributes:
        run_dir: The run directory; None makes a new one under ``runs/``.
        resume: ``auto``, ``never`` or the path of a checkpoint.
        display: Where progress is shown.
        task: Makes the task, instead of the one the recipe names.
        callbacks: Observers of the run.
        report: Writes the report of a run that has ended, if the recipe asks for one; called on the first process when
            its records are complete.
        before_plan: Called when the task of a new run that the recipe names is known, and before its data are opened.
    """

    run_dir: Path | None = None
    resume: str = "auto"
    display: Display | None = None
    task: TaskMaker | None = None
    callbacks: Callbacks = field(default_factory=Callbacks)
    report: Reporter | None = None
    before_plan: Callable[[Subject], None] | None = None


class Subject(contextlib.ExitStack[bool | None]):
    """A recipe on this process, opened up to a stage; the attributes of later stages do not exist.

    Attributes:
        recipe: The recipe, with the loss of its task.
        world: This process among those of the run.
        task: Its task, which knows its data (not for ``device``, like the next one).
        data: Facts of its data.
        machine: Facts of the machine (for ``device``, and from ``plan`` on, like the next one).
        device: The device of this process, unless the facts of a machine were given.
        placement: Where and how scored batches and the network lie in memory (``device`` only).
        cores: The cores reserved for this process, if any.
        plan: Every derived number; from ``shapes`` on with the facts of the network.
        limits: What the plan needs and this host does not have.
        shapes: The network without values (``shapes`` only).
        network: The network with its initial weights, on the device (from ``network`` on, like the next four).
        first_values: Values for a network without values, which is sharded over processes; None for a complete one.
        pipeline: The run's batches, with started loader processes.
        geometry: Which samples each step uses.
        notices: Sentences for the user.
        loaded: The recipe and its origin (``run`` only, like all that follow).
        options: Settings of the run.
        stop: Whether the user asked to stop.
        display: Where progress is shown.
        collectives: The processes of the run.
        directory: The run directory.
        lock: Keeps other runs out of it; None on other processes than the first.
        decision: Where the run starts.
        mirroring: Copies checkpoints to an address; None if the recipe names none.
        started: When opening began (``time.perf_counter``).
    """

    directory: RunDirectory

    def __init__(self, recipe: Recipe, world: World) -> None:
        super().__init__()
        self.recipe, self.world, self.started = recipe, world, time.perf_counter()
        self.cores: CoreAssignment | None = None
        self.first_values: InitialValues | None = None

    @classmethod
    def open(
        cls,
        recipe: Recipe | LoadedRecipe,
        world: World,
        upto: Stage,
        *,
        task: Task | None = None,
        machine: MachineFacts | None = None,
        as_run: bool = False,
        options: Options | None = None,
    ) -> Self:
        """Open a recipe up to a stage; as a context, close afterwards what was opened. ``run`` is collective.

        Args:
            recipe: The recipe; for a ``run`` with its origin.
            world: This process among those of the run.
            upto: ``device`` only chooses the device; ``task`` opens the data; ``plan`` derives every number; ``shapes``
                builds the network without values; ``network`` prepares all that this process needs; ``run`` joins the
                processes in their directory.
            task: The task, if not the one that the recipe names.
            machine: The machine to plan for, if not this one.
            as_run: Whether ``plan`` and ``shapes`` assign cores, and check back-end, trackers and host, as a run does.
            options: Settings of a ``run``.

        Raises:
            PacelineError: For every mistake that these stages can find.
        """
        loaded = recipe if isinstance(recipe, LoadedRecipe) else LoadedRecipe(recipe, name="")
        subject = cls(loaded.recipe, world)
        with contextlib.ExitStack() as undo:
            undo.push(subject)
            if upto == "device":
                subject._use_device()
            elif upto == "run":
                subject._open_task_of_run(loaded, options or Options())
            else:
                named = subject.recipe.without_initial_weights() if upto == "shapes" else subject.recipe
                subject._use(build_task(named) if task is None else task)
            if upto == "task":
                subject.data, _ = read_facts(subject.task, subject.recipe, world)
            elif upto != "device":
                with loading() if upto == "run" else contextlib.nullcontext():
                    subject._make_plan(machine, as_run=as_run, trains=upto in ("network", "run"))
                    if upto == "shapes":
                        subject._build_shapes()
                    elif upto != "plan":
                        subject._prepare()
            if upto == "run":
                subject._join(read_launch(os.environ))
            undo.pop_all()
        return subject

    # Task

    def _use(self, task: Task) -> None:
        self.task = task
        # A task may have a default loss other than the recipe's.
        self.recipe = replace(self.recipe, train=replace(self.recipe.train, loss=task.recipe.train.loss))

    def _open_task_of_run(self, loaded: LoadedRecipe, options: Options) -> None:
        from paceline.telemetry.display import Display
        from paceline.trainer import mirroring, run_dir_checks

        self.loaded, self.options = loaded, options
        self.display = options.display if options.display and self.world.is_first else Display()
        self.resumes = mirroring.will_resume(self.recipe, options.run_dir, self.world)
        with loading():
            recipe = resumed_recipe(self.recipe, options.run_dir) if self.resumes else self.recipe
            self._use(build_task(recipe, options.task))
        run_dir_checks.check_same_task(options.run_dir, self.task)
        self.stop = self.enter_context(StopRequest())
        self.enter_context(restore_affinity())
        if options.before_plan is not None and options.task is None and not self.resumes:
            options.before_plan(self)

    # Plan

    def _use_device(self, *, as_run: bool = False) -> MachineFacts:
        recipe, world = self.recipe, self.world
        self.device = choose_device(recipe.parallel.device, world)
        if as_run:
            check_communication(recipe.parallel.backend, self.device)
            # Not by a file: it may be the run's own, which has all keys.
            origins = self.loaded.origins if "loaded" in vars(self) else {}
            check_trackers(recipe.telemetry.trackers, are_asked_for=origins.get("telemetry.trackers") == "override")
            self.cores = choose_cores(recipe.parallel.affinity, world, self.device, os.environ)
        self.machine = describe_machine(self.device, self.cores, processes=world.local_world_size)
        self.placement = Placement(device=self.device, channels_last=resolve_channels_last(recipe, self.machine))
        return self.machine

    def _make_plan(self, machine: MachineFacts | None, *, as_run: bool, trains: bool) -> None:
        recipe, world, task = self.recipe, self.world, self.task
        if trains and (recipe.train.deterministic or recipe.parallel.exact):
            reserve_deterministic_workspace()
        self.machine = machine = machine or self._use_device(as_run=as_run or trains)
        if task.is_own:
            reason = f"{task_name(task)} is your own code, computed as written unless you set bf16"
            machine = without_bf16(machine, reason)
        self.data, facts = read_facts(task, recipe, world)
        self._make = partial(make, recipe, world=world, data=self.data, machine=machine, task=facts)
        self.plan = self._make()
        if as_run or trains:
            scored = self.plan.evaluation_batch_size if self.plan.evaluates else 0
            counts = {"trained": self.plan.micro_batch_size, "scored": scored}
            self.limits = find_host_limits(self.plan.data, recipe, world.local_world_size, **counts)
            # One of many processes that were only planned may be meant for another machine.
            if self.limits.refusal and (trains or world.local_world_size == 1):
                raise DataError(self.limits.refusal)

    def plan_for(self, world: World) -> Plan:
        """Return the plan of another world, with the facts of the network if its shapes are known."""
        other = type(self).open(self.recipe, world, "plan", task=self.task, machine=self.machine)
        return other.plan_network(self.shapes) if hasattr(self, "shapes") else other.plan

    def plan_network(self, network: nn.Module, notes: Mapping[str, str] = MappingProxyType({})) -> Plan:
        """Return the plan of a run that trains a network.

        Args:
            network: The network.
            notes: Additional reasons, by the key that they explain.

        Raises:
            ModelError: If the network cannot be trained as the recipe asks.
            RecipeError: If its state is to be sharded over processes, and the rest of the recipe does not support that.
        """
        plan = self._make(network=networks.describe_network(network, self.recipe, self.plan), notes=notes)
        own = self.task.has_own_optimizer
        check_tables(network, self.recipe, strategy=plan.strategy, device=plan.device, has_own_optimizer=own)
        if plan.strategy == "fsdp":
            check_sharded(network, self.recipe.parallel)
        return plan

    # Network

    def _build_shapes(self) -> None:
        with restore_random_states("cpu"):
            self.shapes = networks.build_shapes(self.recipe, self.task, channels_last=self.plan.channels_last)
        self.plan = self.plan_network(self.shapes)

    def _prepare(self) -> None:
        recipe, plan, task = self.recipe, self.plan, self.task
        bind(self.cores)  # before loader processes and threads are started, which inherit it
        torch.set_num_threads(plan.threads_per_process)
        if recipe.train.deterministic or (recipe.parallel.exact and self.device.type != "cpu"):
            # Only when requested: the call imports torch's compiler, which takes seconds.
            torch.use_deterministic_algorithms(mode=True)
        elif self.device.type == "cuda":
            # Let cuDNN measure which of its kernels is fastest for these shapes, as every reference trainer does.
            torch.backends.cudnn.benchmark = True
        set_float32_matmul(plan.float32_matmul)
        placement = Placement(device=self.device, channels_last=plan.channels_last)
        self.pipeline = task.open_pipeline(placement)
        if not hasattr(self.pipeline, "train_batches"):
            raise refused(task, "open_pipeline returned", self.pipeline, "a pipeline, such as SimplePipeline")
        self.callback(self.pipeline.close)
        self.pipeline.start(training=True, evaluation=plan.evaluates)
        self.network, notices = self._build_network(placement)
        if plan.precision == "fp8":
            self.network = convert_to_fp8(self.network)
        task.prepare_training(placement)
        self.plan = plan = self.plan_network(self.network)
        reported = {"batch.global_size", "data.classes", "data.copies"} & plan.reasons.keys() - plan.unused.keys()
        of_data = (plan.reasons[key] for key in sorted(reported))
        of_cores = [] if self.cores is None else [self.cores.reason]
        self.notices = (*plan.left_out, *of_data, *self.limits.warnings, *notices, *of_cores)
        self.geometry = geometry_of(recipe, plan, task)
        self.check_single_samples(self.network, self.pipeline)

    def _build_network(self, placement: Placement) -> tuple[nn.Module, tuple[str, ...]]:
        """Return the network, and notices: complete or, if it will be sharded, without values."""
        recipe, plan, task = self.recipe, self.plan, self.task
        # A plan made before the network is known may turn out to shard the weights. On a CPU processes share the host's
        # memory, and `auto` uses replicas unless they are very large.
        may_shard = plan.strategy == "ddp" and recipe.parallel.strategy == "auto" and plan.device == "cuda"
        if plan.strategy != "fsdp" and not may_shard:
            return networks.build_network(recipe, task, placement)
        notices: tuple[str, ...] = ()
        try:
            network, first_values = networks.build_without_values(recipe, task, plan)
            if self._make(network=NetworkFacts(parameters=networks.count_parameters(network))).strategy == "fsdp":
                self.first_values = first_values
                return network, ()
        except NotDeferrableError as error:
            if plan.strategy == "fsdp":
                notices = (f"every process built the whole network before sharding: {error}",)
        network, network_notices = networks.build_network(recipe, task, placement)
        return network, (*notices, *network_notices)

    def check_single_samples(self, network: nn.Module, pipeline: Pipeline | None = None) -> None:
        """Check before training that BatchNorm accepts a single sample, if some micro-batch will have just one.

        Args:
            network: The network, with values.
            pipeline: The run's pipeline; without one, another is opened on the CPU for the sample.

        Raises:
            RecipeError: If it does not.
        """
        normalised = any(isinstance(each, _NormBase) for each in network.modules())
        if not normalised or self.geometry.smallest_part(self.plan.total_steps) > 1:
            return
        with contextlib.ExitStack() as opened:
            if pipeline is None:
                pipeline = self.task.open_pipeline(Placement(device=torch.device("cpu")))
                opened.callback(pipeline.close)
                pipeline.start(training=True, evaluation=False)
            # The run's first sample alone, as in training: augmented, and of the first size.
            alone = replace(self.geometry, global_batch_size=1, logical_ranks=1, growth=(), repeats=1, balanced=False)
            [sample] = pipeline.train_batches(alone, 0, 1, World())
        if not len(sample.ids):  # it could not be read
            return
        trial = copy.deepcopy(network)
        try:
            with torch.no_grad():
                self.task.loss(trial, sample)
        except ValueError as error:
            # An epoch's last step has the smallest micro-batches, if any step does.
            plan, epochs = self.plan, self.plan.epochs
            steps = [(epochs.last_step_samples(p), p.logical_ranks) for p in epochs.finished_phases(plan.total_steps)]
            steps += [(phase.global_batch_size, phase.logical_ranks) for phase in epochs.phases]
            samples, ranks = min(steps, key=lambda step: step[0] // step[1])
            raise RecipeError(
                f"a step of {samples} sample(s) in {ranks} micro-batch(es) brings a micro-batch of one sample, and "
                f"this model cannot train on a single one ({error}); choose another batch.global_size or "
                "batch.micro_size, or larger images."
            ) from None

    # Run

    def _join(self, launch: LaunchEnvironment) -> None:
        """Join the run's processes and open its directory; a collective."""
        from paceline.trainer import mirroring
        from paceline.trainer.run_dir_checks import ResumeRequest, open_directory

        recipe, parallel = self.recipe, self.recipe.parallel
        self.loaded = self.loaded.checked(self.plan.unused)
        self.enter_context(keep_freed_memory(self.device))

        # All processes together: the same run, in the same directory.
        self.collectives = join(
            *(replace(launch, world=self.world), self.device),
            timeout_seconds=parallel.timeout.seconds,
            backend=parallel.backend,
        )
        # Not after an error: destroying the group may wait for peers, and the error must be reported first.
        self.push(lambda error, *_: None if error else self._leave())
        waiting = self.enter_context(contextlib.closing(ExitOnSignal(self.world)))
        self._take_directory()
        self._check_agreement()
        mirroring.check_all_resume(self.resumes, recipe, self.collectives)

        # The first process: where the run starts, from the copy at an address or from local files.
        program = os.environ.get(PROGRAM_VARIABLE)
        request = ResumeRequest(
            recipe=recipe,
            plan=self.plan,
            resume=self.options.resume,
            device_facts={
                "torch": torch.__version__,
                "device": str(self.device),
                "affinity": None if self.cores is None else self.cores.reason,
                "cuda": torch.version.cuda,
                "cpu_capability": torch.backends.cpu.get_cpu_capability(),
                # A program with its own loop has no task.
                "code": code_digests(
                    (*named_code(recipe), *([type(self.task).__module__] if "task" in vars(self) else [])), program
                ),
                "program": program,
                **({} if program is None else {"earlier_runs": int(os.environ.get(EARLIER_RUNS_VARIABLE, "0"))}),
                "float32_matmul": torch.get_float32_matmul_precision(),
                "cudnn_tf32": torch.backends.cudnn.allow_tf32,
                "world_size": self.world.world_size,
                "launched_by": launch.source,
            },
            geometry=self.geometry,
        )
        common = self.collectives, self.display.message
        mirror_state = mirroring.restore_from_mirror(self.directory, request, *common)
        decision = mirroring.on_first_without_timeout(
            self.collectives, recipe, partial(open_directory, self.directory, request), name="open"
        )
        mirroring.check_resumed(self.resumes, recipe, decision)
        self.decision = replace(decision, notices=(*mirror_state.notices, *decision.notices))
        if not self.decision.completed:
            # The first process keeps the directory open, so that a run whose directory is moved still writes to it.
            directory = self.directory
            self.directory = self.collectives.on_all_ranks(
                lambda: self.enter_context(directory.hold_open()) if self.world.is_first else directory
            )
        self.mirroring = self.enter_context(
            mirroring.mirror_checkpoints(self.directory, request, self.decision, mirror_state, *common)
        )
        waiting.close()

    def _leave(self) -> None:
        leave()

    def _take_directory(self) -> None:
        """Open the run directory, created if needed; the first rank holds it, and removes an unused new one."""
        from paceline.trainer.run_dir_checks import check_visible
        from paceline.trainer.run_lock import RunLock

        options, name = self.options, self.loaded.name
        self.lock: RunLock | None = None

        def take() -> Path:
            is_new = options.run_dir is None or not options.run_dir.exists()
            directory = RunDirectory(options.run_dir or default_run_directory(name))
            directory.create()
            self.lock = RunLock(directory, is_new=is_new)
            self.callback(self.lock.release)
            return directory.root

        root = self.collectives.on_rank_zero(take)
        check_visible(root, self.collectives, patience_seconds=min(60, self.recipe.parallel.timeout.seconds / 2))
        self.directory = RunDirectory(root)

    def _check_agreement(self) -> None:
        """Check before anything is written that all processes are about to do the same.

        Raises:
            LaunchError: On every process, naming the first thing that differs.
        """
        machine_keys = ("device_name", "device_memory_bytes", "reasons", "threads_per_process")
        plan = {key: value for key, value in self.plan.to_tree().items() if key not in machine_keys}
        local = {"paceline": __version__, "torch": torch.__version__, "recipe": recipe_digest(self.recipe), **plan}
        plans = self.collectives.gather(local)
        for key, value in plans[0].items():
            for rank, other in enumerate(plans):
                if other[key] != value:
                    raise LaunchError(
                        f"rank 0 has {key}={value}, but rank {rank} has {other[key]}; all processes need the same "
                        "recipe, data, software and kind of device."
                    )


def resumed_recipe(recipe: Recipe, run_dir: Path | None) -> Recipe:
    """Return the recipe to build a resumed run's network with: without initial weights, and with its first config.

    The folder or the repository that the config came from may have changed since.
    """
    recipe = recipe.without_initial_weights()
    if run_dir is None or not ((run := RunDirectory(run_dir)).exists() and run.plan.is_file()):
        return recipe
    stored, config = read_recipe(run).get("model", {}), read_plan(run).get("network_config")
    if config is None or (stored.get("name"), stored.get("options", {})) != (recipe.model.name, recipe.model.options):
        return recipe
    return replace(recipe, model=replace(recipe.model, options=config))


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
    # Only this back-end has loader processes.
    if data.get("backend") != "pytorch" or len(sizes) < len(names) or not sizes["workers"]:
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
