"""What happens in the steps of a range test? The run's own, with a rate that rises, until the loss diverges."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from paceline.data.loaders.pytorch import worker_deaths_told
from paceline.errors import TrainingError
from paceline.optim.schedules import Courses
from paceline.trainer.run import Run
from paceline.trainer.step import train_step
from paceline.trainer.warmup import check_first_batch, warm_up
from paceline_advisor.formulas.lr_range import smoothed
from paceline_advisor.tuning.lr_range.sweep import MOST_SKIPPED, Sweep

Ending = Literal["highest", "diverged", "not_finite", "signal"]
_TOLD = 10


@dataclass(kw_only=True)
class Taken:
    """The steps of a range test.

    Attributes:
        rates: Learning rate of each.
        losses: Mean loss over the global batch of each, before its update; all finite.
        skipped: Steps that fp16 left out, and took with the next batch.
        ending: Why there are no more.
    """

    rates: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    skipped: int = 0
    ending: Ending = "highest"


def take_steps(run: Run, sweep: Sweep, say: Callable[[str], None]) -> Taken:
    """Take the steps of a range test; a collective. Every process sees the same losses, and ends at the same step."""
    # Momentum and weight decay stay what the optimizer was built with, and so what the recipe's first step has.
    run.courses = Courses(learning_rate=sweep.course())
    taken = Taken()
    with run.watchdog.watching(), worker_deaths_told():
        batches = check_first_batch(run, warm_up(run, run.train_batches()))
        run.clock.start()
        ending: Ending | None = None
        while ending is None:
            rate = run.courses.at(run.progress.step).learning_rate
            stepped = train_step(run, batches)
            run.progress.advance(stepped=stepped)
            run.pulse.enter("record")
            # The host waits for the device in each step: the next one depends on the loss.
            drained = run.window.drain()
            run.recorder.report_broken(run, drained.broken)
            loss = drained.loss
            run.clock.end_step(run.plan.step_samples(run.progress.position - 1), run.load)
            run.clock.drain()
            if loss is not None and math.isfinite(loss):
                taken.rates.append(rate)
                taken.losses.append(loss)
            ending = _ending(run, sweep, taken, loss)
            if loss is not None and len(taken.losses) % max(1, sweep.steps // _TOLD) == 0:
                say(f"step {len(taken.losses)} of {sweep.steps}: rate {rate:.3g}, loss {loss:.4g}")
    taken.ending, taken.skipped = ending, run.progress.skipped
    return taken


def _ending(run: Run, sweep: Sweep, taken: Taken, loss: float | None) -> Ending | None:
    """Why the test ends here, if it does; the same on all processes, as all know the same losses."""
    # First of all, since it is a collective on some devices: each process asks as often as the others.
    if run.strategy.agreed(run.wish()).stop:
        return "signal"
    if loss is None and run.precision.scaler is not None:
        # fp16 tries the rate again at a lower scale, but not for ever.
        return "not_finite" if run.progress.skipped >= MOST_SKIPPED else None
    if loss is None or not math.isfinite(loss):
        return "not_finite"
    average = smoothed(taken.losses, sweep.smoothing)
    if average[-1] > sweep.divergence * min(average):
        return "diverged"
    return "highest" if len(taken.losses) >= sweep.steps else None


def check_any(taken: Taken) -> None:
    """Refuse a test in which no step had a loss.

    Raises:
        TrainingError: Naming the recipe's likely faults.
    """
    if not taken.losses:
        raise TrainingError(
            "the loss of the very first step is no number, before any rate has had an effect: look at the data, the "
            "network and the precision (train.precision)."
        )
