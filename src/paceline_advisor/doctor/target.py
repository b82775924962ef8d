"""For which device is a run judged: the one that is here, or another that is named?"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.devices import Device, find_device, recognise
from paceline.distributed.device import choose_device, describe_machine
from paceline.errors import RecipeError
from paceline.models.roofline import ridge_point
from paceline.recipe.plan import MachineFacts
from paceline.recipe.schema import Recipe
from paceline.trainer.fake_step import machine_with
from paceline.world import World

# What sizes must divide by for matrix units to take them as they are, and for the best tiles of an A100 and later.
_UNITS = {"tf32": (4, 32), "fp16": (8, 64), "bf16": (8, 64), "fp8": (16, 128)}


@dataclass(frozen=True, kw_only=True)
class Target:
    """A device that a run is judged for.

    Attributes:
        machine: What the plan must know of it.
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
