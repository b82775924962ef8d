"""Criteria: does the learning rate suit the global batch, and do steps come fast enough?"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline_course.grading.findings import Finding, Runs, with_processes
from paceline_course.grading.runs import Run

BASE_BATCH = 32  # the batch that the base learning rate suits
_RELATIVE = 1e-3
_SHARE_OF_PACE = 0.5
# Measured twice, the same loop's pace differs by that much even on a quiet machine.
_LEAST_NOISE = 1.25
# Runs that are made only where the first measurement was too slow, for that may be somebody else's doing.
AGAIN = ("batchnorm-2", "batchnorm-3")


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
        for step in range(min(schedule.warmup + 1, run.steps - 1), run.steps):
            for rank, member in enumerate(run.ranks):
                later = member.steps[step].learning_rate
                if abs(found - expected) <= _RELATIVE * expected < abs(later - expected):
                    return Finding(
                        f"At step {step} {with_processes(run)} the learning rate of rank {rank} is {later:.4g}; "
                        f"after the warm-up it stays {expected:.4g}.",
                        seen={"learning rate": later, "expected": expected},
                    )
        if not abs(found - expected) <= _RELATIVE * expected:
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
    programs = runs.complete("batchnorm", *AGAIN)
    if "batchnorm" not in programs:
        return Finding("This could not be seen: the run of the network with BatchNorm was not trained to its end.")
    loops = runs.complete("pace-before", "pace-after")
    if len(loops) < 2:
        return Finding(note="The bare loop could not be measured, so throughput was not judged.")
    times = [[_step_seconds(run) for run in found.values()] for found in (programs, loops)]
    return judge_pace(times[0], times[1], crowding=os.getloadavg()[0] / (os.cpu_count() or 1))


def judge_pace(programs: Sequence[float], loops: Sequence[float], *, crowding: float = 0.0) -> Finding:
    """Compare the times of a step of a program with those of the bare loop, in seconds, each measured once or more.

    Args:
        programs: Of the program; the best counts.
        loops: Of the bare loop; their mean counts.
        crowding: How many processes there are for each core, which the other may have been spared by chance.
    """
    program, loop = min(programs), sum(loops) / len(loops)
    share, noise = loop / program, max(max(loops) / min(loops), crowding, _LEAST_NOISE)
    seen = {"step seconds": list(programs), "bare loop": list(loops), "share": share}
    if share >= _SHARE_OF_PACE:
        return Finding(seen=seen)
    if share * noise >= _SHARE_OF_PACE:
        return Finding(
            note="The machine was too busy to tell these throughputs apart, so this was not judged.", seen=seen
        )
    return Finding(
        f"A step takes {1000 * program:.1f} ms, and {1000 * loop:.1f} ms in a bare loop: "
        f"{share:.0%} of its throughput, where {_SHARE_OF_PACE:.0%} are asked for.",
        seen=seen,
    )


def _peak(run: Run, schedule: Schedule) -> float:
    """Return the learning rate after the warm-up; every rank should have the same."""
    rates = [rank.steps[min(schedule.warmup + 1, run.steps - 1)].learning_rate for rank in run.ranks]
    return max(rates, key=lambda rate: abs(rate - schedule.peak(run.batch)))


def _step_seconds(run: Run) -> float:
    """Return what the faster quarter of steps stay below: another program's turn on the processor delays the others."""
    times = np.array([step.seconds for step in run.ranks[0].steps])
    return float(np.quantile(np.diff(times), 0.25)) if len(times) > 1 else float("inf")
