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

# Divisors of sizes that matrix units require, and that give the best tiles on an A100 and later.
_UNITS = {"tf32": (4, 32), "fp16": (8, 64), "bf16": (8, 64), "fp8": (16, 128)}


@dataclass(frozen=True, kw_only=True)
class Target:
    """A device that a run is checked for.

    Attributes:
        machine: Its facts for the plan.
        device: The vendor's specifications; None if unknown.
        is_here: Whether it is in this machine; otherwise all findings about it are predictions.
    """

    machine: MachineFacts
    device: Device | None = None
    is_here: bool = True

    @property
    def kind(self) -> str:
        """Torch's name for the device type."""
        return self.machine.device

    @property
    def is_gpu(self) -> bool:
        """Whether the host has to wait for it when reading a value."""
        return self.kind != "cpu"

    @property
    def cores(self) -> str:
        """Describe how many cores it has for its processes."""
        owner = "this machine has" if self.is_here else "a machine with this device is taken to have"
        return f"{owner} {self.machine.cores} cores"

    def has(self, precision: str) -> bool:
        """Whether it multiplies in this precision faster than in fp32."""
        if self.device is not None:
            return self.device.peak(precision) is not None
        return precision == "bf16" and self.machine.fast_bf16

    def multiples(self, precision: str) -> tuple[int, int] | None:
        """Divisors for the sizes of matrices: required, and ideal; None without a known rule."""
        if self.device is None or not self.device.title.startswith("NVIDIA") or not self.has(precision):
            return None
        return _UNITS.get(precision)

    def ridge(self, precision: str) -> float | None:
        """FLOPs per byte of memory traffic below which memory is the limit; None if unknown."""
        peak = None if self.device is None else self.device.peak(precision)
        return None if peak is None or self.device is None else ridge_point(peak, self.device.bytes_per_second)


def choose_target(name: str | None, recipe: Recipe, *, processes: int = 1) -> Target:
    """Return the named device, or the one that a run would use here.

    Args:
        name: Its short name; None for the one here.
        recipe: The run's recipe.
        processes: Number of processes on the machine, each with its own device unless that is the CPU.

    Raises:
        RecipeError: If the name is unknown, or the recipe's device is not here.
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
        memory: Memory of the device in bytes.
        largest: Largest micro-batch that would fit, in samples (possibly a few percent more); 0 if not even one.
        divisor: The largest such size that divides a process's share of the step.
        normalises: Whether the network takes statistics over a micro-batch, so that a smaller one changes training.
    """

    memory: int
    largest: int
    divisor: int
    normalises: bool


def lack_of_room(recipe: Recipe, target: Target, world: World) -> Lack | None:
    """Return what a step lacks; None if it fits, if the target is not a GPU of known memory, or if this is unknown."""
    machine, memory = target.machine, target.machine.memory_bytes
    if target.kind != "cuda" or memory is None:
        return None
    # Include evaluation, unless custom code cannot run it on fake tensors.
    for scores in (True, False):
        trial = fake_step(recipe, machine=machine, processes=world.world_size, scores=scores)
        # Whatever custom code raises, other checks report it.
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
    """A planned run: what is known before any step.

    Attributes:
        recipe: The recipe.
        plan: Its plan on the target.
        target: The device it is checked for.
        anatomy: Properties of its network; empty if that could not be observed.
        calls: Calls of the user's code in a micro-batch; empty if it could not be run.
        loaders: DataLoaders that the user's code created.
        environment: Environment variables of this process.
        sockets: NUMA nodes of this machine whose cores this process may use.
        run: Events of a run directory, if one was given.
        lack: The memory that a step lacks on the target; None if it fits, or if that is unknown.
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
        """Precision of matrix products: the plan's, or ``tf32`` for fp32 products where it is allowed."""
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
        """Return the fraction of the FLOPs of some layers."""
        total = sum(layer.flops for layer in self.layers)
        return sum(layer.flops for layer in self.layers if which(layer)) / total if total else 0.0

    @property
    def flops_per_layer(self) -> float:
        """Return the mean FLOPs of one layer's forward pass of a micro-batch."""
        total = sum(layer.flops for layer in self.layers) * self.plan.micro_batch_size
        return total / max(1, sum(layer.calls for layer in self.layers))


@dataclass(frozen=True)
class Found:
    """What a check found in a run; values other than None replace the check's defaults.

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
        """Return a copy with changes."""
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
    """Declare a check with the name of its finding, and the finding's defaults.

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
    """List some names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"
