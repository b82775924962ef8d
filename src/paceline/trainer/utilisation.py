"""Model FLOPs utilisation: count the FLOPs of a run's network, and relate its throughput to the device's peak."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from paceline.errors import ModelError
from paceline.host.devices import Device, recognise
from paceline.models.ceilings import Ceilings, ceilings_of
from paceline.models.roofline import utilisation
from paceline.records.events import MeasurementEvent
from paceline.trainer.subject import Subject


@dataclass(frozen=True, kw_only=True)
class Utilisation:
    """Reference for a run's model FLOPs utilisation.

    Attributes:
        device: The device of each process.
        processes: How many there are.
        flops: FLOPs of the model's forward and backward pass of a sample, by the precision whose peak applies. Empty if
            they could not be counted.
        why_not: The reason, if they could not be counted.
        seconds: Time spent counting.
    """

    device: Device
    processes: int
    flops: Mapping[str, float]
    why_not: str = ""
    seconds: float = 0.0

    @property
    def flops_per_sample(self) -> float:
        """Total FLOPs of a sample; 0 if they could not be counted."""
        return sum(self.flops.values())

    @property
    def peak(self) -> float:
        """Peak of one device in FLOP/s, with each part at its own dense peak."""
        peak_of = Ceilings(self.device, "none").peak
        return self.flops_per_sample / sum(each / peak_of(name) for name, each in self.flops.items())

    def for_record(self, samples_per_second: float | None) -> dict[str, float | None]:
        """Model FLOPs utilisation at a throughput over all processes, in [0, 1]; empty if FLOPs are not known."""
        if not self.flops_per_sample:
            return {}
        if samples_per_second is None:
            return {"mfu": None}
        return {"mfu": utilisation(self.flops_per_sample * samples_per_second, 1.0, self.peak, self.processes)}

    def event(self, position: dict[str, Any]) -> MeasurementEvent:
        """The record at the run's start."""
        message, metrics = f"mfu is not recorded: {self.why_not}", {}
        if total := self.flops_per_sample:
            peak_of, title = Ceilings(self.device, "none").peak, self.device.title
            rates = {name: f"{peak_of(name) / 1e12:,.4g} TFLOP/s" for name in self.flops}
            peaks = "".join(f"the dense {name} peak of {title}, {rate}" for name, rate in rates.items())
            if len(rates) > 1:
                parts = [f"{name} {rate} for {self.flops[name] / total:.1%}" for name, rate in rates.items()]
                peaks = f"the dense peaks of {title}, each for what is computed in it: {', '.join(parts)}"
            message = f"mfu: {total / 1e9:.4g} GFLOP per sample, forward and backward, of {peaks}"
            metrics = {"flops_per_sample": total, "peak_flops_per_second": self.peak}
        return MeasurementEvent(**position, what="flops", message=message, seconds=self.seconds, metrics=metrics)


def find_utilisation(subject: Subject) -> Utilisation | None:
    """Count the FLOPs of a run's network, if its device is known; None where it is not.

    Errors here do not end the run. Nothing is computed, and neither network nor random states change.
    """
    plan = subject.plan
    device = recognise(plan.device_name)
    if device is None or (plan.precision != "fp32" and device.peak(plan.precision) is None):
        return None
    start = time.perf_counter()
    flops: dict[str, float] = {}
    why_not = "no matrix products were found"
    try:
        _check_countable(subject)
        flops = _flops_per_sample(subject, device)
    except Exception as error:  # noqa: BLE001  # your network may need real values, and fail in any way
        why_not = " ".join(str(error).split())[:300] or type(error).__name__
    return Utilisation(
        device=device, processes=plan.world_size, flops=flops, why_not=why_not, seconds=time.perf_counter() - start
    )


def _check_countable(subject: Subject) -> None:
    """Check that the FLOPs of a sample are the same in every step and can be counted without data.

    Raises:
        ModelError: If they are not.
    """
    task, recipe, plan = subject.task, subject.recipe, subject.plan
    if not task.has_known_shapes:
        raise ModelError("the task has its own pipeline, whose batches are unknown until they are read")
    for applies, reason in (
        (recipe.data.progressive.start_size is not None, "data.progressive changes the size of images"),
        (plan.unfreeze_steps, "model.unfreeze changes which weights are trained"),
        (plan.freeze_after_steps, "model.freeze_after changes which weights are trained"),
        (recipe.distillation.teacher is not None, "distillation.teacher computes in addition to the model"),
    ):
        if applies:
            raise ModelError(reason)


def _flops_per_sample(subject: Subject, device: Device) -> dict[str, float]:
    # Imported only where used: torch's fake tensors are slow to import.
    from paceline.models.flops import WorkCounter
    from paceline.trainer.fake_step import fake_step

    # A copy, so that the task keeps its reference to the run's network.
    task = copy.copy(subject.task)
    task.recipe = task.recipe.without_initial_weights()
    build = task.build_model

    def rebuild_network() -> nn.Module:
        """Build a second network, whose values may be discarded."""
        network = build()
        if not {*subject.network.modules()}.isdisjoint(network.modules()):
            raise ModelError("the factory returns the same network again, so there is no copy to count on")
        return network

    task.build_model = rebuild_network  # type: ignore[method-assign]  # of the copy
    with fake_step(subject.recipe, task, processes=subject.world.world_size, machine=subject.machine) as step:
        with WorkCounter(step.network) as counter:
            step.backward(step.forward())
        work = counter.work
        if work.uncounted:
            names = ", ".join(each.operator for each in work.uncounted[:3])
            raise ModelError(f"the FLOPs of {names} are unknown")
        ceilings = ceilings_of(subject.plan, device, work)
        by_precision = ceilings.flops_by_precision(work.model_works)
        for name in by_precision:
            ceilings.peak(name)  # a network may choose dtypes that the device has no units for
        return {name: each / step.micro_batch for name, each in by_precision.items()}
