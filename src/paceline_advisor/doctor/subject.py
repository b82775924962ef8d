"""The subject of checks: recipe, plan, device, memory, network; and the declaration of a check."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import wraps
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from paceline.devices import Device, find_device, recognise
from paceline.distributed.device import choose_device, describe_machine
from paceline.errors import RecipeError
from paceline.models.roofline import ridge_point
from paceline.plan import MachineFacts, Plan
from paceline.recipe.schema import Recipe
from paceline.trainer.fake_step import fake_step, machine_with
from paceline.world import World
from paceline_advisor.doctor.anatomy import Anatomy, Layer
from paceline_advisor.doctor.behaviour import Calls, Loader
from paceline_advisor.doctor.findings import TUNING, Advice, Finding, Keeps, Place, Severity
from paceline_advisor.memory.job import Job, allocator_settings
from paceline_advisor.memory.trace import trace_steps, without_collection

# What sizes must divide by for matrix units to take them as they are, and for the best tiles of an A100 and later.
_UNITS = {"tf32": (4, 32), "fp16": (8, 64), "bf16": (8, 64), "fp8": (16, 128)}


@dataclass(frozen=True, kw_only=True)
class Target:
    """A device that a run is judged for.

    Attributes:
        machine: Its facts for the plan.
        device: Its maker's figures; None where there are none.
        is_here: Whether it is in this machine; else all that is said of it is a prediction.
    """

    machine: MachineFacts
    device: Device | None = None
    is_here: bool = True

    @property
    def kind(self) -> str:
        """Torch's word for it."""
        return self.machine.device

    @property
    def is_gpu(self) -> bool:
        """Whether the host waits for it when it asks for a value."""
        return self.kind != "cpu"

    @property
    def cores(self) -> str:
        """How many cores it has for its processes, in words."""
        owner = "this machine has" if self.is_here else "a machine with this device is taken to have"
        return f"{owner} {self.machine.cores} cores"

    def has(self, precision: str) -> bool:
        """Whether it multiplies such numbers faster than fp32."""
        if self.device is not None:
            return self.device.peak(precision) is not None
        return precision == "bf16" and self.machine.fast_bf16

    def multiples(self, precision: str) -> tuple[int, int] | None:
        """What sizes of matrices should divide by: at least, and ideally; None where no such rule is known."""
        if self.device is None or not self.device.title.startswith("NVIDIA") or not self.has(precision):
            return None
        return _UNITS.get(precision)

    def ridge(self, precision: str) -> float | None:
        """FLOPs for each byte of memory traffic below which memory is the limit; None if it is not known."""
        peak = None if self.device is None else self.device.peak(precision)
        return None if peak is None or self.device is None else ridge_point(peak, self.device.bytes_per_second)


def choose_target(name: str | None, recipe: Recipe, *, processes: int = 1) -> Target:
    """The device named, or the one that a run would take here.

    Args:
        name: Its short name; None for the one here.
        recipe: The run's.
        processes: How many share the machine, each with such a device of its own unless that is the CPU.

    Raises:
        RecipeError: If there is none of this name, or the recipe's is not here.
    """
    if name is None:
        found = choose_device(recipe.parallel.device, World())
        known = recognise(torch.cuda.get_device_name(found)) if found.type == "cuda" else None
        return Target(machine=describe_machine(found, processes=processes), device=known)
    if name.lower() == "cpu":
        return Target(machine=describe_machine(torch.device("cpu"), processes=processes))
    try:
        device = find_device(name)
    except RecipeError as error:
        raise RecipeError(f"{error} Or cpu, for this machine's processor.") from None
    return Target(machine=machine_with(device, processes=processes), device=device, is_here=False)


_OVER_THE_BATCH = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass(frozen=True, kw_only=True)
class Lack:
    """A step that does not fit.

    Attributes:
        memory: Bytes that the device has.
        largest: Samples of a micro-batch that would fit, some more per cent might; 0 if not even one.
        divisor: The most of these that divide a process's share of the step.
        normalises: Whether the network takes statistics over a micro-batch, so that a smaller one trains otherwise.
    """

    memory: int
    largest: int
    divisor: int
    normalises: bool


def lack_of_room(recipe: Recipe, target: Target, world: World) -> Lack | None:
    """What a step lacks; None where it fits, the target is no GPU of known memory, or nothing could be found out."""
    machine, memory = target.machine, target.machine.memory_bytes
    if target.kind != "cuda" or memory is None:
        return None
    # With the evaluation, unless code of the user's own cannot do that on tensors without content.
    for scores in (True, False):
        trial = fake_step(recipe, machine=machine, processes=world.world_size, scores=scores)
        # Whatever code of the user's own raises, other looks tell of it.
        with contextlib.suppress(Exception), without_collection(), trial as step:
            allocator, _ = allocator_settings(os.environ)
            job = Job(step, trace_steps(step), machine, ways=max(2, world.world_size), allocator=allocator)
            if job.fits(job.plan.micro_batch_size, memory):
                return None
            largest = job.largest(memory, roughly=True)
            return Lack(
                memory=memory,
                largest=largest,
                divisor=job.divisor(largest),
                normalises=any(isinstance(each, _OVER_THE_BATCH) for each in step.network.modules()),
            )
    return None


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A run that could be, as far as it is known without running it.

    Attributes:
        recipe: What was asked.
        plan: What that comes to on the target.
        target: Which device it is judged for.
        anatomy: What its network is made of; empty where that could not be seen.
        calls: What the user's code did in a micro-batch; empty where none could be had.
        loaders: DataLoaders that the user's code made.
        environment: Environment variables of this process.
        sockets: NUMA nodes of this machine whose cores this process may use.
        run: Events of a run directory, where one was named.
        lack: The memory that a step lacks on the target; None if it fits, or that is not known.
    """

    recipe: Recipe
    plan: Plan
    target: Target
    anatomy: Anatomy
    calls: Calls
    loaders: tuple[Loader, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    sockets: int = 1
    run: tuple[dict[str, Any], ...] = ()
    lack: Lack | None = None

    @property
    def products(self) -> str:
        """In which numbers matrices are multiplied: the plan's, and of fp32 ones ``tf32`` where it is allowed."""
        if self.plan.precision != "fp32":
            return self.plan.precision
        asked = self.plan.float32_matmul
        # Torch's own default: TF32 for convolutions.
        is_tf32 = asked in ("high", "medium") or (asked == "default" and self.convolutional)
        return "tf32" if is_tf32 and self.target.has("tf32") else "fp32"

    @property
    def convolutional(self) -> bool:
        """Whether most of the network's work is convolutions."""
        return self.share(lambda layer: layer.kind == "convolution") > 0.5

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The network's matrix products."""
        return self.anatomy.layers

    def share(self, which: Callable[[Layer], bool]) -> float:
        """What share of the FLOPs some layers have."""
        total = sum(layer.flops for layer in self.layers)
        return sum(layer.flops for layer in self.layers if which(layer)) / total if total else 0.0

    @property
    def flops_per_layer(self) -> float:
        """FLOPs of one layer's forward pass of a micro-batch, on average."""
        total = sum(layer.flops for layer in self.layers) * self.plan.micro_batch_size
        return total / max(1, sum(layer.calls for layer in self.layers))


@dataclass(frozen=True)
class Found:
    """What a check has found in a run; what is not None is said in place of the check's own.

    Attributes:
        evidence: The value found, in a sentence.
        more_why: Follows the reason.
    """

    evidence: str
    _: KW_ONLY
    name: str | None = None
    severity: Severity | None = None
    why: str | None = None
    more_why: str = ""
    advice: str | None = None
    overrides: Mapping[str, Any] | None = None
    keeps: Keeps | None = None
    expected: str | None = None
    speedup: tuple[float, float] | None = None
    predicted: bool | None = None
    places: tuple[Place, ...] = ()
    layers: tuple[str, ...] = ()

    def but(self, **changes: Any) -> Found:
        """Return it with changes."""
        return replace(self, **changes)


Check = Callable[[Subject], list[Finding]]
CHECKS: list[Check] = []


def check(
    *,
    why: str = "",
    advice: str = "",
    expected: str = "",
    severity: Severity = "slows",
    source: str = TUNING,
    overrides: Mapping[str, Any] = MappingProxyType({}),
    **others: Any,
) -> Callable[[Callable[[Subject], Found | Iterable[Found] | None]], Check]:
    """Declare a check: its name is the finding's, and the rest is what a finding says unless it is given otherwise.

    ``others`` are ``keeps``, ``speedup`` and ``predicted``. See :class:`~paceline_advisor.doctor.findings.Finding`.
    """
    says = dict(why=why, advice=advice, expected=expected, severity=severity, overrides=overrides, **others)

    def declare(look: Callable[[Subject], Found | Iterable[Found] | None]) -> Check:
        @wraps(look)
        def findings(subject: Subject) -> list[Finding]:
            found = look(subject)
            each_of_them = [] if found is None else [found] if isinstance(found, Found) else found
            return [_finding({"name": look.__name__, **says}, source, each) for each in each_of_them]

        CHECKS.append(findings)
        return findings

    return declare


def _finding(says: dict[str, Any], source: str, found: Found) -> Finding:
    told = says | {key: value for key, value in vars(found).items() if value is not None}
    advice = Advice(words=told.pop("advice"), overrides=dict(told.pop("overrides")), keeps=told.pop("keeps", "same"))
    told["why"] += told.pop("more_why")
    return Finding(source=source, advice=advice, **told)


def named(names: tuple[str, ...] | list[str], most: int = 4) -> str:
    """Some names and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"
