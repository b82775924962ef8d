"""The largest micro-batch that fits on a device: one answer for every command that needs it."""

from __future__ import annotations

import contextlib

from torch import nn

from paceline.plan import MachineFacts
from paceline.recipe.schema import Recipe
from paceline_advisor import frozen
from paceline_advisor.memory.job import SimulatedRun, peak_of, predicted

# If each size has to be run, sizes between two that differ by less than this fraction are skipped.
_ROUGHLY = 16
_OVER_THE_BATCH = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def largest_confirmed(job: SimulatedRun, memory: int) -> tuple[int, float | None]:
    """Return the largest micro-batch that fits, checked by running its step.

    Returns:
        The size in samples, and the ratio of the peak bytes of the first step that was run to their extrapolation; None
        instead of the ratio if no step was run.
    """
    steps, tried = job.steps, job.largest(memory)
    if not tried:
        return 0, None
    computed = peak_of(steps(tried), caching=False).allocated
    is_as_expected = steps.confirm(tried)
    verified = peak_of(steps(tried), caching=False).allocated / computed
    if is_as_expected:
        return tried, verified
    # Its memory is not linear: sizes that fit are found by running them.
    low, high = 0, tried + 1
    while high - low > max(1, low // _ROUGHLY):
        job.forget()
        low, high = (tried, high) if job.fits(tried, memory) else (low, tried)
        tried = (low + high) // 2
        steps.confirm(tried)
    steps.confirm(max(low, 1))
    job.forget()
    return low, verified


@frozen
class MemoryShortage:
    """A step that does not fit.

    Attributes:
        memory: Memory of the device in bytes.
        largest: Largest micro-batch that fits, in samples. 0 if not even one sample fits.
        divisor: Largest size up to ``largest`` that divides a process's share of the step; 0 if ``largest`` is 0.
        normalises: Whether the network has BatchNorm, so that a smaller micro-batch changes the training.
    """

    memory: int
    largest: int
    divisor: int
    normalises: bool

    @property
    def consequence(self) -> str:
        """What ``divisor`` does to the training, in words."""
        return "normalises over smaller batches" if self.normalises else "gives the same step by accumulation"


def memory_shortage(recipe: Recipe, machine: MachineFacts, processes: int) -> MemoryShortage | None:
    """Return the memory that a step lacks; None if it fits, or if this is unknown.

    It is known for CUDA devices of known memory, if the step can run on fake tensors.
    """
    if machine.device != "cuda" or (memory := machine.memory_bytes) is None:
        return None
    # Include evaluation, unless custom code cannot run it on fake tensors.
    for scores in (True, False):
        # Whatever custom code raises, other checks report it.
        with contextlib.suppress(Exception), predicted(recipe, machine, processes, scores=scores) as job:
            if job.fits(job.plan.micro_batch_size, memory):
                return None
            largest, _ = largest_confirmed(job, memory)
            return MemoryShortage(
                memory=memory,
                largest=largest,
                divisor=job.divisor(largest),
                normalises=any(isinstance(each, _OVER_THE_BATCH) for each in job.step.network.modules()),
            )
    return None
