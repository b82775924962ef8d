"""Does the compiled network compute what the network does, and is it faster?"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from paceline.data.batch import rows_of
from paceline.errors import ModelError
from paceline.models.compiled import shape_of
from paceline.records.events import IncidentEvent, MeasurementEvent

if TYPE_CHECKING:
    from paceline.trainer.trial import Gradients, Trial

# How far a parameter's gradient may be from the uncompiled one's, in shares of its length. Where numbers are rounded
# to 16 bits or fewer, so many times the distance between the uncompiled gradient and the one in fp32 is allowed too.
_TOLERANCE = {"fp32": 1e-3, "bf16": 1e-2, "fp16": 1e-2, "fp8": 5e-2}
_ROUNDING = 4.0
# Of the whole gradient's length: what is noise in a parameter whose gradient vanishes (a bias before a BatchNorm).
_NEGLIGIBLE = 1e-4


def try_compiled(trial: Trial) -> MeasurementEvent:
    """Compare one micro-batch's gradient, compiled and not, and time both.

    Raises:
        ModelError: If they differ by more than rounding.
    """
    run = trial.run
    called = run.strategy.model
    compiled = run.compiled["model"]
    inputs = trial.batch.inputs
    if not compiled.compiles(shape_of((inputs,), {})):
        message = f"model.compile: micro-batches of {rows_of(inputs)}, as the first one, run uncompiled"
        return MeasurementEvent(**run.progress.here, what="compile", message=message, seconds=0.0)
    found = trial.gradients(called)
    expected = trial.gradients(run.network)
    compiled_seconds = sum(each.seconds for each in compiled.log.graphs)
    error = _distance(trial, found, expected)
    speedup = trial.compare(lambda: trial.gradients(run.network), lambda: trial.gradients(called))
    if max(speedup.ratios) < 1:
        longer = speedup.inverse()
        message = f"the compiled network takes {longer} times as long as uncompiled here; set model.compile=false."
        run.recorder.write(IncidentEvent(**run.progress.here, incident="slow_compile", message=message))
    return MeasurementEvent(
        **run.progress.here,
        what="compile",
        message=(
            f"model.compile: compiled in {compiled_seconds:.1f} s; the gradient of the first micro-batch differs from "
            f"the uncompiled one's by {error:.1e}; forward and backward passes are {speedup} times as fast"
        ),
        seconds=0.0,
        metrics={"gradient_error": error, "speedup": speedup.median},
    )


def _distance(trial: Trial, found: Gradients, expected: Gradients) -> float:
    """Distance of two gradients over the length of the second.

    Raises:
        ModelError: If any parameter's differ by more than rounding.
    """
    run = trial.run
    rounded = run.plan.precision != "fp32"
    exact = trial.gradients(run.network, autocast=False) if rounded else expected
    whole, numbers = _length(expected.values()), sum(each.numel() for each in expected.values())
    if not math.isfinite(whole):
        return math.nan  # nothing can be said of it; the guard against losses that are no numbers will
    worst, at, allowed_there = 0.0, "", 1.0
    for name in {**expected, **found}:
        if name not in expected or name not in found:
            worst, at, allowed_there = math.inf, name, 0.0
            break
        size = math.sqrt(expected[name].numel() / numbers) * whole
        allowed = _TOLERANCE[run.plan.precision] * _length([expected[name]]) + _NEGLIGIBLE * size
        allowed += _ROUNDING * _length([expected[name] - exact[name]])
        off = _length([found[name] - expected[name]])
        if not off <= allowed and not off / allowed <= worst:
            worst, at, allowed_there = off / allowed, name, allowed / max(_length([expected[name]]), 1e-300)
    if at:
        raise ModelError(
            f"model.compile=true: the compiled network's gradient of {at} is not the network's own: it is "
            f"{worst:.1f} times as far from it as rounding explains ({allowed_there:.1e} of its length); set "
            "model.compile=false, or find the fault with model.compile_backend=aot_eager."
        )
    return _length([found[name] - expected[name] for name in expected]) / max(whole, 1e-300)


def _length(tensors: Iterable[torch.Tensor]) -> float:
    return math.hypot(*(float(torch.linalg.vector_norm(each.float())) for each in tensors))
