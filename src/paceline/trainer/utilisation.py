"""How much of its device's arithmetic does a run use: the FLOPs of its network, counted once, beside the peak?

Only where the device is one whose peak is known, and where all of a step's products can be counted. It is done on fake
copies before the first step, on the process that writes the records; the steps know nothing of it.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from paceline.devices import Device, recognise
from paceline.distributed.device import describe_machine
from paceline.errors import ModelError
from paceline.formulas.roofline import utilisation
from paceline.recipe.plan import Plan
from paceline.records.events import MeasurementEvent
from paceline.tasks.image_classification import ImageClassification
from paceline.trainer.preparation import Prepared, without_initial_weights


@dataclass(frozen=True, kw_only=True)
class Utilisation:
    """What a run's throughput is held against.

    Attributes:
        device: The device of each process.
        processes: How many there are.
        precision: The peak that is meant: that of the products' inputs.
        flops_per_sample: Of the model's forward and backward pass; None if they could not be counted.
        why_not: Then, why.
        seconds: What finding out took.
    """

    device: Device
    processes: int
    precision: str
    flops_per_sample: float | None
    why_not: str = ""
    seconds: float = 0.0

    @property
    def peak(self) -> float:
        """Dense peak of one device, in FLOP/s."""
        return self.device.flops_per_second[self.precision]

    def mfu(self, samples_per_second: float | None) -> float | None:
        """Model FLOPs utilisation at a throughput over all processes, in [0, 1]; None without either."""
        if samples_per_second is None or self.flops_per_sample is None:
            return None
        return utilisation(self.flops_per_sample * samples_per_second, 1.0, self.peak, self.processes)

    def for_record(self, samples_per_second: float | None) -> dict[str, float | None]:
        """What a step record says of it; nothing if it is not known."""
        return {} if self.flops_per_sample is None else {"mfu": self.mfu(samples_per_second)}

    def event(self, here: dict[str, Any]) -> MeasurementEvent:
        """What is said of it at the run's start."""
        of_device = f"the dense {self.precision} peak of {self.device.title}, {self.peak / 1e12:,.4g} TFLOP/s"
        if self.flops_per_sample is None:
            message, metrics = f"mfu is not recorded: {self.why_not}", {}
        else:
            message = f"mfu: {self.flops_per_sample / 1e9:.4g} GFLOP per sample, forward and backward, of {of_device}"
            metrics = {"flops_per_sample": self.flops_per_sample, "peak_flops_per_second": self.peak}
        return MeasurementEvent(**here, what="flops", message=message, seconds=self.seconds, metrics=metrics)


def find_utilisation(prepared: Prepared) -> Utilisation | None:
    """Count the FLOPs of a run's network, if its device is known; None where it is not.

    Nothing that goes wrong here ends the run, nothing is computed, and neither network nor random states are touched.
    """
    device = recognise(prepared.plan.device_name)
    precision = None if device is None else peak_of(prepared.plan, device)
    if device is None or precision is None:
        return None
    begun = time.perf_counter()
    flops, why_not = None, _why_not(prepared)
    if not why_not:
        try:
            flops = _flops_per_sample(prepared)
        except Exception as error:  # noqa: BLE001  # whatever a network of one's own does not do without numbers
            why_not = " ".join(str(error).split())[:300] or type(error).__name__
    return Utilisation(
        device=device,
        processes=prepared.plan.world_size,
        precision=precision,
        flops_per_sample=flops,
        why_not=why_not,
        seconds=time.perf_counter() - begun,
    )


def peak_of(plan: Plan, device: Device) -> str | None:
    """The peak that a run's products could reach there at best; None if the device has no units for them.

    In fp32, torch multiplies in TF32 where it is told to, and convolutions unless told not to.
    """
    if plan.precision != "fp32":
        return plan.precision if device.peak(plan.precision) else None
    return "tf32" if plan.float32_matmul != "highest" and device.peak("tf32") else "fp32"


def _why_not(prepared: Prepared) -> str:
    """What makes the FLOPs of a sample another number from one step to the next, or not to be had without data."""
    task, recipe = prepared.task, prepared.recipe
    if not isinstance(task, ImageClassification) or type(task).open_pipeline is not ImageClassification.open_pipeline:
        return "the task has a pipeline of its own, whose batches are not known without reading them"
    if recipe.data.progressive.start_size is not None:
        return "data.progressive changes the size of images"
    if prepared.plan.unfreeze_steps:
        return "model.unfreeze changes which weights are trained"
    if recipe.distillation.teacher is not None:
        return "distillation.teacher computes beside the model"
    return ""


def _flops_per_sample(prepared: Prepared) -> float:
    # Only where it is used: torch's fake tensors take their time to import.
    from paceline.models.flops import WorkCounter
    from paceline.trainer.fake_run import fake_run

    plan = prepared.plan
    machine = describe_machine(prepared.device, processes=plan.local_world_size)
    # A copy, so that what the task keeps of the network that it builds stays that of the run.
    task = copy.copy(prepared.task)
    task.recipe = without_initial_weights(task.recipe)
    task.build_model = partial(_built_anew, task.build_model, prepared.network)  # type: ignore[method-assign]  # of the copy
    with fake_run(prepared.recipe, task, processes=plan.world_size, machine=machine) as step:
        with WorkCounter(step.network) as counter:
            step.backward(step.forward())
        found = counter.found
        if found.uncounted:
            names = ", ".join(each.operator for each in found.uncounted[:3])
            raise ModelError(f"the arithmetic of {names} is not known")
        return found.model_flops / step.micro_batch


def _built_anew(build: Callable[[], nn.Module], training: nn.Module) -> nn.Module:
    """A second network, whose numbers may be taken away.

    Raises:
        ModelError: If a task or factory keeps its network: it is the one in training.
    """
    network = build()
    if {id(each) for each in training.modules()} & {id(each) for each in network.modules()}:
        raise ModelError("the network is kept by what builds it, so that there is no second one to count on")
    return network
