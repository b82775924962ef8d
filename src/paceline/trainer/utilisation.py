"""How much of its device's arithmetic does a run use: the FLOPs of its network, counted once, beside the peak?

Only where the device is one whose peak is known, and where all of a step's products can be counted. It is done on fake
copies before the first step, on the process that writes the records; the steps know nothing of it.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from paceline.devices import Device, recognise
from paceline.distributed.device import describe_machine
from paceline.errors import ModelError
from paceline.models.ceilings import Ceilings, ceilings_of
from paceline.models.roofline import utilisation
from paceline.records.events import MeasurementEvent
from paceline.tasks.image_classification import ImageClassification
from paceline.trainer.preparation import Prepared, without_initial_weights


@dataclass(frozen=True, kw_only=True)
class Utilisation:
    """What a run's throughput is held against.

    Attributes:
        device: The device of each process.
        processes: How many there are.
        flops: Of the model's forward and backward pass of a sample, by the peak that is meant: the precision in which
            they are computed. Empty if they could not be counted.
        why_not: Then, why.
        seconds: What finding out took.
    """

    device: Device
    processes: int
    flops: Mapping[str, float]
    why_not: str = ""
    seconds: float = 0.0

    @property
    def flops_per_sample(self) -> float | None:
        """All of them; None if they could not be counted."""
        return sum(self.flops.values()) or None

    @property
    def peak(self) -> float | None:
        """What one device could reach at best, in FLOP/s: each part at its own dense peak; None without a count."""
        whole = self.flops_per_sample
        ceilings = Ceilings(self.device, "none")
        return None if whole is None else whole / sum(each / ceilings.peak(name) for name, each in self.flops.items())

    def mfu(self, samples_per_second: float | None) -> float | None:
        """Model FLOPs utilisation at a throughput over all processes, in [0, 1]; None without either."""
        whole, peak = self.flops_per_sample, self.peak
        if samples_per_second is None or whole is None or peak is None:
            return None
        return utilisation(whole * samples_per_second, 1.0, peak, self.processes)

    def for_record(self, samples_per_second: float | None) -> dict[str, float | None]:
        """What a step record says of it; nothing if it is not known."""
        return {} if self.flops_per_sample is None else {"mfu": self.mfu(samples_per_second)}

    def event(self, here: dict[str, Any]) -> MeasurementEvent:
        """What is said of it at the run's start."""
        whole, peak = self.flops_per_sample, self.peak
        if whole is None or peak is None:
            message, metrics = f"mfu is not recorded: {self.why_not}", {}
        else:
            message = f"mfu: {whole / 1e9:.4g} GFLOP per sample, forward and backward, of {self._of_peaks(whole)}"
            metrics = {"flops_per_sample": whole, "peak_flops_per_second": peak}
        return MeasurementEvent(**here, what="flops", message=message, seconds=self.seconds, metrics=metrics)

    def _of_peaks(self, whole: float) -> str:
        ceilings = Ceilings(self.device, "none")
        rates = {name: f"{ceilings.peak(name) / 1e12:,.4g} TFLOP/s" for name in self.flops}
        if len(rates) == 1:
            ((name, rate),) = rates.items()
            return f"the dense {name} peak of {self.device.title}, {rate}"
        parts = [f"{name} {rate} for {self.flops[name] / whole:.1%}" for name, rate in rates.items()]
        return f"the dense peaks of {self.device.title}, each for what is computed in it: {', '.join(parts)}"


def find_utilisation(prepared: Prepared) -> Utilisation | None:
    """Count the FLOPs of a run's network, if its device is known; None where it is not.

    Nothing that goes wrong here ends the run, nothing is computed, and neither network nor random states are touched.
    """
    plan = prepared.plan
    device = recognise(plan.device_name)
    if device is None or (plan.precision != "fp32" and device.peak(plan.precision) is None):
        return None
    begun = time.perf_counter()
    flops: dict[str, float] = {}
    why_not = _why_not(prepared)
    if not why_not:
        try:
            flops = _flops_of_a_sample(prepared, device)
        except Exception as error:  # noqa: BLE001  # whatever a network of one's own does not do without numbers
            why_not = " ".join(str(error).split())[:300] or type(error).__name__
    return Utilisation(
        device=device,
        processes=plan.world_size,
        flops=flops,
        why_not=why_not or "nothing of it is a product",
        seconds=time.perf_counter() - begun,
    )


def _why_not(prepared: Prepared) -> str:
    """What makes the FLOPs of a sample another number from one step to the next, or not to be had without data."""
    task, recipe = prepared.task, prepared.recipe
    if not isinstance(task, ImageClassification) or type(task).open_pipeline is not ImageClassification.open_pipeline:
        return "the task has a pipeline of its own, whose batches are not known without reading them"
    if recipe.data.progressive.start_size is not None:
        return "data.progressive changes the size of images"
    for key, turns in (("unfreeze", prepared.plan.unfreeze_steps), ("freeze_after", prepared.plan.freeze_after_steps)):
        if turns:
            return f"model.{key} changes which weights are trained"
    if recipe.distillation.teacher is not None:
        return "distillation.teacher computes beside the model"
    return ""


def _flops_of_a_sample(prepared: Prepared, device: Device) -> dict[str, float]:
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
        ceilings = ceilings_of(plan, device, found)
        by_precision = ceilings.flops_by_precision(found.model_works)
        for name in by_precision:
            ceilings.peak(name)  # a network may choose numbers that the device has no units for
        return {name: each / step.micro_batch for name, each in by_precision.items()}


def _built_anew(build: Callable[[], nn.Module], training: nn.Module) -> nn.Module:
    """A second network, whose numbers may be taken away.

    Raises:
        ModelError: If a task or factory keeps its network: it is the one in training.
    """
    network = build()
    if {id(each) for each in training.modules()} & {id(each) for each in network.modules()}:
        raise ModelError("the network is kept by what builds it, so that there is no second one to count on")
    return network
