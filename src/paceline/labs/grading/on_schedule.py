"""Criteria: does the learning rate suit the global batch, and do steps come fast enough?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.labs.grading.findings import Finding, Runs, with_processes
from paceline.labs.grading.runs import Run

BASE_BATCH = 32  # the batch that the base learning rate suits
_RELATIVE = 1e-3
_SHARE_OF_PACE = 0.5
_NOISE = 1.5


@dataclass(frozen=True)
class Schedule:
    """What the runs were asked for.

    Attributes:
        base_lr: Learning rate for a batch of 32.
        warmup: Steps until the full learning rate.
    """

    base_lr: float
    warmup: int

    def peak(self, batch: int) -> float:
        """Return the learning rate that suits a batch."""
        return self.base_lr * batch / BASE_BATCH


def scaled(runs: Runs, schedule: Schedule) -> Finding:
    """Is the learning rate proportional to the global batch, whatever the number of processes?"""

    def check(run: Run) -> Finding:
        expected = schedule.peak(run.batch)
        found = _peak(run, schedule)
        if abs(found - expected) > _RELATIVE * expected:
            return Finding(
                f"After the warm-up {with_processes(run)} the learning rate is {found:.4g}; for a global batch of "
                f"{run.batch} it is {schedule.base_lr:g} x {run.batch} / {BASE_BATCH} = {expected:.4g}.",
                seen={"learning rate": found, "expected": expected},
            )
        return Finding(seen={"learning rate": found})

    return runs.on_several(check)


def warmup(runs: Runs, schedule: Schedule) -> Finding:
    """Does the learning rate rise evenly over the first steps? Compared with what it rises to, right or not."""

    def check(run: Run) -> Finding:
        peak = _peak(run, schedule)
        for step in range(min(schedule.warmup, run.steps)):
            expected = (step + 1) / schedule.warmup
            found = run.ranks[0].steps[step].learning_rate / max(peak, 1e-12)
            if abs(found - expected) > 0.01:
                return Finding(
                    f"At step {step} {with_processes(run)} the learning rate is {found:.0%} of the full one; "
                    f"a linear warm-up of {schedule.warmup} steps has {expected:.0%}."
                )
        return Finding()

    return runs.on_several(check)


def throughput(runs: Runs) -> Finding:
    """Do steps come at least half as fast as those of a bare loop? Not judged on a machine too noisy to tell."""
    found = runs.complete("batchnorm", "pace-before", "pace-after")
    if "batchnorm" not in found:
        return Finding("This could not be seen: the run of the network with BatchNorm did not come to its end.")
    if len(found) < 3:
        return Finding(note="The bare loop could not be measured, so throughput was not judged.")
    return judge_pace(*(_step_seconds(found[name]) for name in ("batchnorm", "pace-before", "pace-after")))


def judge_pace(program: float, before: float, after: float) -> Finding:
    """Compare the median time of a step with those of the bare loop, run before and after, all in seconds."""
    seen = {"step seconds": program, "bare loop, before": before, "bare loop, after": after}
    share = (before + after) / 2 / program
    if share >= _SHARE_OF_PACE:
        return Finding(seen={**seen, "share": share})
    if max(before, after) > _NOISE * min(before, after):
        return Finding(note="The machine was too busy to compare throughputs, so this was not judged.", seen=seen)
    return Finding(
        f"A step takes {1000 * program:.1f} ms, and {500 * (before + after):.1f} ms in a bare loop: "
        f"{share:.0%} of its throughput, where {_SHARE_OF_PACE:.0%} are asked for.",
        seen={**seen, "share": share},
    )


def _peak(run: Run, schedule: Schedule) -> float:
    """Return the learning rate after the warm-up; every rank should have the same."""
    rates = [rank.steps[min(schedule.warmup + 1, run.steps - 1)].learning_rate for rank in run.ranks]
    return max(rates, key=lambda rate: abs(rate - schedule.peak(run.batch)))


def _step_seconds(run: Run) -> float:
    times = np.array([step.seconds for step in run.ranks[0].steps])
    return float(np.median(np.diff(times))) if len(times) > 1 else float("inf")
