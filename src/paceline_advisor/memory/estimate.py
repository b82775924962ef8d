"""Estimate the memory of a run by cause, on this machine or another device, and ways to reduce it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace

from paceline.cli.options import choose_processes
from paceline.command import Log
from paceline.errors import PacelineError, RecipeError
from paceline.host.devices import DEVICES
from paceline.pages.page import Table
from paceline.pages.shown import Shown
from paceline.parsing.units import format_bytes, format_count
from paceline.plan import MachineFacts, Plan
from paceline.plan.strategy import check_sharding
from paceline.plan.strategy import choose_automatically as weighed
from paceline.recipe.load import LoadedRecipe
from paceline.recipe.schema import Recipe
from paceline.trainer.expected_memory import ExpectedMemory, forecast_apart
from paceline.trainer.fake_batch import with_placeholder_data
from paceline.trainer.fake_step import FakeStep
from paceline_advisor import Json, as_json, frozen, picked
from paceline_advisor.apply import with_values
from paceline_advisor.commands import Estimate
from paceline_advisor.memory.allocator import AllocatorSettings
from paceline_advisor.memory.job import MOST, Peak, SimulatedRun, allocator_settings, machine_for, predicted
from paceline_advisor.memory.largest import largest_confirmed
from paceline_advisor.memory.trace import EVALUATION, Steps, trace_step, trace_steps


@frozen
class Saving:
    """A change of the recipe and its memory.

    Attributes:
        change: The change, as an override or in words.
        needed: Bytes that the device must have with it; None if it is incompatible with the recipe.
        saved: Bytes saved; negative if it needs more.
        why_not: Why it is incompatible; otherwise empty.
    """

    change: str
    needed: int | None
    saved: int = 0
    why_not: str = ""

    def row(self) -> tuple[str, str, str]:
        """Return the change, the memory needed with it, and the memory saved."""
        if self.needed is None:
            return self.change, "-", self.why_not
        saves = format_bytes(self.saved) if self.saved >= 0 else f"nothing: {format_bytes(-self.saved)} more"
        return self.change, format_bytes(self.needed), saves


def savings(
    recipe: Recipe, machine: MachineFacts, processes: int, job: SimulatedRun, current: int, log: Log
) -> Iterator[Saving]:
    """Try the cheapest changes one at a time, with a fake step each.

    Args:
        recipe: The recipe.
        machine: The machine.
        processes: Processes of the run.
        job: A process of the unchanged run.
        current: Bytes that the device must have without changes.
        log: Receives each change.
    """
    changes = {}
    if job.plan.precision == "fp32" and "bf16_products" not in machine.lacks:
        changes["train.precision"] = ["bf16"]
    if recipe.model.activation_checkpointing is None and not recipe.model.compile:
        changes["model.activation_checkpointing"] = ["selective", "full"]
    for key, value in ((key, value) for key, values in changes.items() for value in values):
        change, changed = f"{key}={value}", with_values(recipe, {key: value})
        log(f"trying {change}")
        try:
            with predicted(
                changed, machine, processes, shards=job.shards, allocator=job.allocator, trace=_only_its_own
            ) as changed_job:
                changed_job.outside = job.outside
                needed = changed_job.least(changed_job.step.micro_batch, machine.memory_bytes)
        except PacelineError as error:
            yield Saving(change=change, needed=None, why_not=str(error))
            continue
        yield Saving(change=change, needed=needed, saved=current - needed)


def _only_its_own(step: FakeStep) -> Steps:
    """Run a step at its own size; a single sample is not run, as a network may behave differently with it."""
    if step.micro_batch == 1:
        return trace_steps(step)
    trace = trace_step(step)
    return Steps(trace, trace, lambda _: trace)


@frozen
class ChosenStrategy:
    """The parallel strategy of a run.

    Attributes:
        strategy: ``ddp`` or ``fsdp``: the choice of ``parallel.strategy=auto``.
        processes: The number of processes that it applies to.
        reason: The reason, in the words of the run's plan, and what fits with it.
    """

    strategy: str
    processes: int
    reason: str


def weigh(job: SimulatedRun, memory: int | None, processes: int) -> ChosenStrategy:
    """Return the strategy of a run, ``ddp`` or ``fsdp``, by the plan's rule, and what fits with it.

    Args:
        job: The run's process.
        memory: Bytes of each device; None if unknown.
        processes: Processes of the run, or an assumed number if it has one process.
    """
    strategy, reason = weighed(job.recipe, job.numbers, processes, memory)
    reason = reason.removeprefix(f"{processes} processes; ")
    if memory is None:
        reason = "the device's memory is unknown; replicas are faster"
    else:
        reason = f"{reason}; {_outcome(job, memory, processes, strategy)}"
    return ChosenStrategy(strategy=strategy, processes=processes, reason=reason)


def _outcome(job: SimulatedRun, memory: int, processes: int, strategy: str) -> str:
    """Describe what fits with a strategy."""
    if strategy == "fsdp":
        try:
            check_sharding(job.recipe, processes)
        except RecipeError as error:
            return f"but {str(error).rstrip('.')}"
    size = max(1, min(job.plan.micro_batch_size, job.share * job.plan.world_size // processes))
    if job.fits(size, memory, strategy):
        left = memory - job.least(size, memory, strategy)
        remaining = f", {format_bytes(left)} left" if left > 0 else ""
        return f"micro-batches of {size} samples fit{remaining}"
    most = job.largest(memory, strategy)
    if most:
        return f"micro-batches of {size} samples do not fit, but {most} do"
    if strategy == "ddp" and job.fits(1, memory, "fsdp"):
        return "not even one sample fits with a replica, but one fits with parallel.strategy=fsdp"
    return "not even one sample fits"


# If the plan has a single process, sharding is described for this many processes.
SUPPOSED = 8
_HALVINGS, _DOUBLINGS = 3, 2


@frozen
class MicroBatchMemory:
    """Memory of a micro-batch of another size.

    Attributes:
        micro_batch: Its size in samples.
        needed: Total bytes that a process uses on a device with enough memory.
        least: Bytes that the device must have; PyTorch returns cached memory before an allocation fails.
        fits: Whether that fits on the device; None if its memory is unknown.
    """

    micro_batch: int
    needed: int
    least: int
    fits: bool | None


@frozen
class FittingMicroBatch:
    """The largest micro-batch that fits on a device.

    Attributes:
        device: Its name.
        memory: Its memory in bytes.
        largest: Samples that fit; on devices other than the requested one, a few percent more may fit. 0 if not even
            one sample fits; None if the device lacks the precision.
    """

    device: str
    memory: int
    largest: int | None


@frozen
class MemoryEstimate:
    """Memory of a run per process.

    Attributes:
        recipe: Name of the recipe.
        plan: The run's plan on the requested device.
        asked_precision: The recipe's precision; the plan has the resolved one.
        device: Name of the device.
        memory: Its memory for a process in bytes; None if unknown.
        outside: Bytes of it that are not used for tensors: on a GPU, an allowance for the driver and libraries; on a
            CPU the rest of a process that was measured, None if none was.
        measured: What a run on a CPU is measured to use; None elsewhere, and if it was not measured.
        peak: The peak over the run's steps and its evaluation.
        allocator: Options of PyTorch's allocator.
        needed: Total bytes that a process uses on a device with enough memory; None if only its tensors are known.
        least: Bytes that the device must have; PyTorch returns cached memory before an allocation fails.
        fits: Whether that fits on the device; None if either is unknown.
        sizes: Memory for several micro-batch sizes, including the plan's.
        largest: Largest micro-batch that fits on the device, in samples, up to the largest that is tried; None if its
            memory is unknown.
        micro_size: Largest micro-batch that fits and divides the process's share of a step; None if none is known.
        verified: Peak bytes of tensors in the first step that was run to check ``largest``, relative to the
            extrapolation from two other steps; None if no step was run.
        devices: Largest micro-batches on known devices.
        savings: Ways to save memory.
        verdict: The choice between DDP and FSDP.
        notices: Assumptions.
        seconds: Duration of the estimate.
    """

    recipe: str
    plan: Plan
    asked_precision: str
    device: str
    memory: int | None
    outside: int | None
    measured: ExpectedMemory | None
    peak: Peak
    allocator: AllocatorSettings
    needed: int | None
    least: int | None
    fits: bool | None
    sizes: tuple[MicroBatchMemory, ...]
    largest: int | None
    micro_size: int | None
    verified: float | None
    devices: tuple[FittingMicroBatch, ...]
    savings: tuple[Saving, ...]
    verdict: ChosenStrategy
    notices: tuple[str, ...]
    seconds: float

    @property
    def left(self) -> int | None:
        """Bytes of the device that are left; negative if it does not fit, and None if either is unknown."""
        return None if self.memory is None or self.least is None else self.memory - self.least

    def to_json(self) -> Json:
        """Return the estimate as one JSON object."""
        plan = self.plan
        document = {
            **picked(self, "recipe", "device", "fits", "peak", "allocator", "sizes", "micro_size", "verified"),
            **picked(self, "devices", "savings", "verdict", "notices", "seconds"),
            **picked(plan, "strategy", "precision", "accumulation_steps"),
            "memory_bytes": self.memory,
            "processes": plan.world_size,
            "micro_batch": plan.micro_batch_size,
            "needed_bytes": self.needed,
            "least_bytes": self.least,
            "left_bytes": self.left,
            "outside_bytes": self.outside,
            "total_bytes": None if self.measured is None else self.measured.together,
            "evaluation_batch": plan.evaluation_batch_size if EVALUATION in self.peak.parts else None,
            "largest_micro_batch": self.largest,
        }
        return dict(as_json(document))

    def __paceline__(self) -> Shown:
        """Show the step and its peak, other sizes and devices, savings and the verdict."""
        plan, peak = self.plan, self.peak
        causes = sorted(peak.causes.items(), key=lambda each: -each[1])
        reserved_column = ("with caching",) if peak.reserved is not None else ()
        blocks: list[Table | Mapping[str, str] | str] = [
            self._subject(),
            Table(
                columns=("cause", "memory", "share"),
                rows=[(cause, format_bytes(size), f"{100 * size / peak.allocated:.1f} %") for cause, size in causes],
                caption="Peak by cause",
            ),
        ]
        if peak.largest:
            rows: list[tuple[str, ...]] = [(layer or "(outside)", format_bytes(size)) for layer, size in peak.largest]
            caption = "Layers with the largest activations"
            blocks.append(Table(columns=("layer", "memory"), rows=rows, caption=caption))
        rows = []
        for size in self.sizes:
            fits = "" if size.fits is None else "fits" if size.fits else "does not fit"
            needed = (format_bytes(size.needed),) if reserved_column else ()
            rows.append((format_count(size.micro_batch), format_bytes(size.least), *needed, fits))
        blocks.append(
            Table(
                columns=("samples", "tensors" if self.least is None else "minimum", *reserved_column, ""),
                rows=rows,
                caption="By micro-batch",
            )
        )
        blocks += ["", self._largest()]
        if self.devices:
            rows = [(each.device, format_bytes(each.memory), self._samples(each)) for each in self.devices]
            caption = f"Largest micro-batch on known GPUs, in {plan.precision}"
            blocks.append(Table(columns=("device", "memory", "samples"), rows=rows, caption=caption))
            blocks.append("(a few per cent more may fit on GPUs other than the requested one)")
        if self.savings:
            rows = [each.row() for each in self.savings]
            micro_batches = f"micro-batches of {format_count(plan.micro_batch_size)} on each process"
            blocks.append(
                Table(
                    columns=("change", "needs", "saves"), rows=rows, caption=f"Ways to save memory, in {micro_batches}"
                )
            )
        verdict = self.verdict
        blocks.append(f"\nOn {verdict.processes} processes: {verdict.strategy}, since {verdict.reason}.")
        blocks += [f"note: {notice}" for notice in self.notices]
        return Shown(
            title=f"Memory of a training step of {self.recipe} on {self.device}",
            blocks=blocks,
            ok=self.fits is not False or "",
        )

    def _subject(self) -> dict[str, str]:
        """Describe the estimated step and its memory."""
        plan, peak = self.plan, self.peak
        parts = f", {plan.accumulation_steps} to a step" if plan.accumulation_steps > 1 else ""
        at = f" in {peak.layer}" if peak.layer else ""
        moment = f"in the {peak.phase or 'first moment'}{at} ({peak.operation.split('.')[0]})"
        lines = {}
        if self.memory is not None and self.left is not None and not self.fits:
            fix = f"; batch.micro_size={self.micro_size} does" if self.micro_size else ""
            short = format_bytes(-self.left)
            lines["device memory"] = f"{format_bytes(self.memory)}: it does not fit, {short} short{fix}"
        lines |= {
            "step": f"{plan.strategy}, {plan.world_size} process{'es' * (plan.world_size > 1)}, micro-batches of "
            f"{format_count(plan.micro_batch_size)}{parts}, {plan.precision}",
            "peak allocated": f"{format_bytes(peak.allocated)}, {moment}",
        }
        if EVALUATION in peak.parts:
            batches = f"evaluation, batches of {format_count(plan.evaluation_batch_size)}"
            names = {"step": "a step", EVALUATION: batches}
            lines["by phase"] = ", ".join(
                f"{format_bytes(peak.parts[part])} ({name})" for part, name in names.items() if part in peak.parts
            )
        if peak.reserved is not None:
            lines["peak reserved"] = f"{format_bytes(peak.reserved)} (by PyTorch's caching allocator)"
        if self.outside is None or self.needed is None or self.least is None:
            return lines
        kind = "the rest of a process" if plan.device == "cpu" else "driver and libraries, an allowance"
        lines["overhead"] = f"{format_bytes(self.outside)} ({kind})"
        lines["total"] = format_bytes(self.needed) if self.measured is None else self.measured.in_words()
        if peak.reserved is not None:
            lines["minimum"] = f"{format_bytes(self.least)} (after PyTorch frees cached memory)"
        if self.memory is not None and self.left is not None and self.fits:
            if self.needed <= self.memory:
                verdict = f"it fits, {format_bytes(self.left)} left"
            else:
                more = format_bytes(self.needed - self.memory)
                verdict = f"it fits, once PyTorch frees cached memory ({more} or more)"
            lines["device memory"] = f"{format_bytes(self.memory)}: {verdict}"
        return lines

    def _largest(self) -> dict[str, str]:
        if self.largest is None:
            return {}
        if self.largest == 0:
            return {"largest micro-batch": "none: not even one sample fits"}
        lines = {"largest micro-batch": f"{_count(self.largest)} samples"}
        if self.verified is not None:
            lines["extrapolation error"] = f"{100 * (self.verified - 1):+.2f} %, checked by a step"
        if self.micro_size is not None and not self.fits:
            parts = self.plan.global_batch_size // (self.micro_size * self.plan.world_size)
            lines["recommended"] = (
                f"batch.micro_size={self.micro_size}: {parts} micro-batches to a step; the global batch of "
                f"{format_count(self.plan.global_batch_size)} and the learning rate stay"
            )
        return lines

    def _samples(self, fit: FittingMicroBatch) -> str:
        if fit.largest is None:
            # The precision that train.precision=auto uses there.
            instead = "" if self.asked_precision == "auto" else "with train.precision=auto "
            return f"lacks this precision; {instead}a run there takes fp32: --device {fit.device}"
        return _count(fit.largest) if fit.largest else "none"


def _count(largest: int) -> str:
    return format_count(largest) if largest < MOST else f"at least {format_count(MOST)}"


def estimate(options: Estimate, log: Log) -> MemoryEstimate:
    """Estimate the memory of a run's steps and of its evaluation, for `paceline estimate`.

    Raises:
        PacelineError: If the recipe cannot be planned, or its network needs real values.
    """
    loaded = options.load()
    processes = 1
    if options.processes is not None or options.device is None:
        processes = choose_processes(options.processes, loaded.recipe).count
    return estimate_memory(
        loaded, options.device, processes, expandable=options.expandable_segments, log=log, measures=True
    )


def estimate_memory(
    loaded: LoadedRecipe,
    device: str | None = None,
    processes: int = 1,
    *,
    expandable: bool = False,
    measures: bool = False,
    log: Log = lambda _: None,
) -> MemoryEstimate:
    """Estimate the memory of a run's steps and of its evaluation; nothing is trained.

    Args:
        loaded: The recipe.
        device: A name of ``paceline.host.devices``, or ``cpu``; None for the device that a run here would use.
        processes: Processes of the run.
        expandable: Use expandable segments in PyTorch's allocator, whatever ``PYTORCH_ALLOC_CONF`` says.
        measures: Start the run's processes if it is a run on this CPU, to measure all of their memory.
        log: Receives what is being done.

    Raises:
        PacelineError: If the recipe cannot be planned, or its network needs real values.
    """
    start_time = time.perf_counter()
    recipe, assumed = with_placeholder_data(loaded.recipe)
    machine, _ = machine_for(device, recipe, processes)
    shards = processes if processes > 1 else SUPPOSED
    allocator, ignored = allocator_settings(os.environ if machine.device == "cuda" else {}, expandable=expandable)
    log("running steps and an evaluation on fake tensors")
    with predicted(recipe, machine, processes, shards=shards, allocator=allocator) as job:
        steps, current = job.steps, job.plan.micro_batch_size
        measured, unmeasured = None, ""
        if machine.device == "cpu":
            if measures and not assumed:
                measured, unmeasured = measure_run(recipe, processes, log)
            job.measured(None if measured is None else measured.each)
        is_total = machine.device != "cpu" or measured is not None
        memory = machine.memory_bytes if is_total else None
        log("looking for the largest micro-batch")
        largest, verified = (None, None) if memory is None else largest_confirmed(job, memory)
        # Inside: a network whose memory is not linear in the batch size is run at each of these sizes.
        # Sizes around the requested one, each twice the previous.
        sizes = sorted({max(1, current * 2**power // 2**_HALVINGS) for power in range(_HALVINGS + _DOUBLINGS + 1)})
        sizes = [each for each in sizes if each == current or not steps.refuses(each)]

        def at(micro_batch: int) -> MicroBatchMemory:
            return MicroBatchMemory(
                micro_batch=micro_batch,
                needed=job.needed(micro_batch),
                least=job.least(micro_batch, memory),
                fits=None if memory is None else job.fits(micro_batch, memory),
            )

        here = at(current)
        found = MemoryEstimate(
            recipe=loaded.name,
            plan=job.plan,
            asked_precision=recipe.train.precision,
            device=machine.device_name,
            memory=memory,
            outside=job.outside if is_total else None,
            measured=measured,
            peak=job.peak(current),
            allocator=allocator,
            needed=here.needed if is_total else None,
            least=here.least if is_total else None,
            fits=here.fits,
            sizes=tuple(at(each) for each in sizes if each <= max(current, job.most)),
            largest=largest,
            micro_size=job.divisor(largest) if largest else None,
            verified=verified,
            devices=tuple(_fits(job, machine, largest)) if machine.device == "cuda" else (),
            savings=tuple(_sharding(job, memory, here.least)),
            verdict=weigh(job, memory, shards),
            notices=tuple(each for each in (assumed, unmeasured, *ignored, *_notices(job)) if each),
            seconds=0.0,
        )
    others = savings(recipe, machine, processes, job, here.least, log)
    return replace(found, savings=(*found.savings, *others), seconds=time.perf_counter() - start_time)


def _sharding(job: SimulatedRun, memory: int | None, least: int) -> Iterator[Saving]:
    """Yield what sharded weights save, unless they are sharded."""
    # If samples are processed one by one, sharded weights would be gathered for each of them.
    if job.plan.strategy != "fsdp" and not job.steps.is_scaled:
        needed = job.least(job.plan.micro_batch_size, memory, "fsdp")
        change = f"parallel.strategy=fsdp over {job.shards} processes"
        yield Saving(change=change, needed=needed, saved=least - needed)


def measure_run(recipe: Recipe, processes: int, log: Log) -> tuple[ExpectedMemory | None, str]:
    """Measure what a run on this CPU uses; returns nothing, and why, if that is impossible."""
    try:
        return ExpectedMemory.from_record(forecast_apart(recipe, processes, log), processes), ""
    except PacelineError as error:
        return None, f"only the memory of tensors is known; that of the whole process was not measured: {error}"


def _fits(job: SimulatedRun, machine: MachineFacts, largest: int | None) -> Iterator[FittingMicroBatch]:
    """Yield what fits on each known device; for the requested device, this is ``largest``."""
    for device in DEVICES.values():
        if job.plan.precision != "fp32" and device.peak(job.plan.precision) is None:
            most = None
        elif (device.title, device.memory_bytes) == (machine.device_name, machine.memory_bytes):
            most = largest
        else:
            most = job.largest(device.memory_bytes, roughly=True)
        yield FittingMicroBatch(device=device.name, memory=device.memory_bytes, largest=most)


def _notices(job: SimulatedRun) -> Iterator[str]:
    plan, steps = job.plan, job.steps
    if steps.is_scaled:
        yield (
            "detections are assumed: the maximum of proposals and objects that its settings allow, also for the loss"
        )
    elif steps.goes_one_by_one:
        yield (
            f"the network processes its samples one by one, so each size was tried separately: no more than "
            f"{job.most}, a process's share of a step, were looked for"
        )
    if why := steps(max(2, plan.micro_batch_size)).why_unscored:
        yield f"evaluation is not in the estimate: {why}"
    if plan.compile != "off":
        yield (
            f"model.compile=true ({plan.compile}): estimated as uncompiled; a compiled network keeps less, and the "
            "estimate omits memory of CUDA graphs or tuning"
        )
    if "tables" in plan.data:
        yield f"{plan.data['tables']}; their gradient is taken as dense"
    if plan.precision == "fp8":
        yield "train.precision=fp8: estimated as bf16, which keeps as much or more"
    if plan.data.get("backend") == "dali":
        yield "data.backend=dali: the estimate omits its GPU memory for decoding"
    if plan.unfreeze_steps:
        yield "model.unfreeze: estimated with all parameters trained that are trained in the end"
    if plan.freeze_after_steps:
        yield "model.freeze_after: estimated with all parameters trained that are trained at the start"
