"""The subject of checks: recipe, plan, device, memory, network; and the declaration of a check."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import wraps
from types import MappingProxyType
from typing import Any

from paceline.errors import RecipeError
from paceline.host.devices import Device
from paceline.learning.judge import Judgement
from paceline.plan import MachineFacts, Plan
from paceline.recipe.schema import Recipe
from paceline_advisor import Json, frozen
from paceline_advisor.doctor.anatomy import Anatomy, Layer
from paceline_advisor.doctor.behaviour import Calls, Loader
from paceline_advisor.doctor.findings import TUNING, Advice, CodeLine, Finding, Keeps, Severity
from paceline_advisor.memory.job import machine_for
from paceline_advisor.memory.largest import MemoryShortage

# Divisors of sizes that matrix units require, and that give the best tiles on an A100 and later.
_UNITS = {"tf32": (4, 32), "fp16": (8, 64), "bf16": (8, 64), "fp8": (16, 128)}


@frozen
class TargetDevice:
    """A device that a run is checked for.

    Attributes:
        machine: Its facts for the plan.
        device: The vendor's specifications; None if unknown.
        is_here: Whether it is in this machine; if not, everything about it is predicted.
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
        """Describe how many cores its machine has, as part of a sentence."""
        owner = "this machine has" if self.is_here else "a machine with this device is taken to have"
        return f"{owner} {self.machine.cores} cores"

    def has(self, precision: str) -> bool:
        """Whether it has fast matrix products in this precision."""
        if self.device is not None:
            return self.device.peak(precision) is not None
        return precision == "bf16" and self.machine.fast_bf16

    def multiples(self, precision: str) -> tuple[int, int] | None:
        """Return numbers that should divide the sizes of matrices: required, and ideal; None if no rule is known."""
        if self.device is None or not self.device.title.startswith("NVIDIA") or not self.has(precision):
            return None
        return _UNITS.get(precision)


def choose_target(name: str | None, recipe: Recipe, *, processes: int = 1) -> TargetDevice:
    """Return the named device, or the one that a run would use here.

    Args:
        name: Its short name; None for the one here.
        recipe: The run's recipe.
        processes: Number of processes on the machine, each with its own device unless that is the CPU.

    Raises:
        RecipeError: If the name is unknown, or the recipe's device is not here.
    """
    try:
        machine, device = machine_for(name, recipe, processes)
    except RecipeError as error:
        if name is None:
            raise
        raise RecipeError(f"{error} Or cpu, for this machine's processor.") from None
    return TargetDevice(machine=machine, device=device, is_here=name is None or device is None)


@frozen
class CheckedRun:
    """Everything that the checks know about a run.

    Attributes:
        recipe: The recipe.
        plan: Its plan on the target.
        target: The device it is checked for.
        anatomy: Properties of its network; empty if it could not be observed.
        calls: Calls of the user's code in a micro-batch; empty if it could not be run.
        loaders: DataLoaders that the user's code created.
        environment: Environment variables of this process.
        run: Recorded events, if the recipe is a run directory.
        learning: Whether that run learned.
        shortage: The memory that a step lacks on the target; None if it fits, or if that is unknown.
    """

    recipe: Recipe
    plan: Plan
    target: TargetDevice
    anatomy: Anatomy
    calls: Calls
    loaders: tuple[Loader, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    run: tuple[Json, ...] = ()
    learning: Judgement = field(default_factory=Judgement)
    shortage: MemoryShortage | None = None

    @property
    def products(self) -> str:
        """Precision of matrix products: the plan's, or ``tf32`` for fp32 products where it is allowed."""
        if self.plan.precision != "fp32":
            return self.plan.precision
        setting = self.plan.float32_matmul
        # Torch's own default: TF32 for convolutions.
        is_tf32 = setting in ("high", "medium") or (setting == "default" and self.convolutional)
        return "tf32" if is_tf32 and self.target.has("tf32") else "fp32"

    @property
    def convolutional(self) -> bool:
        """Whether most of the network's work is convolutions."""
        return self.share(lambda layer: layer.kind == "convolution") > 0.5

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The network's matrix products."""
        return self.anatomy.layers

    def share(self, matches: Callable[[Layer], bool]) -> float:
        """Return the fraction of the network's FLOPs that is in some layers."""
        total = sum(layer.flops for layer in self.layers)
        return sum(layer.flops for layer in self.layers if matches(layer)) / total if total else 0.0


@dataclass(frozen=True)
class CheckResult:
    """What a check found in a run; values other than None replace the check's defaults.

    Attributes:
        evidence: The value found, in a sentence.
        more_why: Text that is appended to the reason.

    The others are attributes of :class:`~paceline_advisor.doctor.findings.Finding` and of its advice.
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
    places: tuple[CodeLine, ...] = ()
    layers: tuple[str, ...] = ()

    def updated(self, **changes: Any) -> CheckResult:
        """Return a copy with changes."""
        return replace(self, **changes)


Found = CheckResult | None
"""What a check found in a run, if anything."""
Inspect = Callable[[CheckedRun], Found | Iterable[CheckResult]]
Check = Callable[[CheckedRun], list[Finding]]
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
) -> Callable[[Inspect], Check]:
    """Declare a check. The function's name becomes the finding's name, and the arguments are the finding's defaults.

    ``others`` are ``keeps``, ``speedup`` and ``predicted``. See :class:`~paceline_advisor.doctor.findings.Finding`.
    """
    defaults = dict(why=why, advice=advice, expected=expected, severity=severity, overrides=overrides, **others)

    def declare(inspect: Inspect) -> Check:
        @wraps(inspect)
        def findings(subject: CheckedRun) -> list[Finding]:
            outcome = inspect(subject)
            results = [] if outcome is None else [outcome] if isinstance(outcome, CheckResult) else outcome
            return [_finding({"name": inspect.__name__, **defaults}, source, each) for each in results]

        CHECKS.append(findings)
        return findings

    return declare


def _finding(defaults: Json, source: str, result: CheckResult) -> Finding:
    data = defaults | {key: value for key, value in vars(result).items() if value is not None}
    advice = Advice(words=data.pop("advice"), overrides=dict(data.pop("overrides")), keeps=data.pop("keeps", "same"))
    data["why"] += data.pop("more_why")
    return Finding(source=source, advice=advice, **data)
