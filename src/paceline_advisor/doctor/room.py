"""Does the run's step fit into the memory of the GPU it is judged for? The answer is that of ``paceline estimate``."""

from __future__ import annotations

import os
from dataclasses import dataclass

from torch import nn

from paceline.recipe.schema import Recipe
from paceline.trainer.fake_step import fake_step
from paceline.world import World
from paceline_advisor.doctor.target import Target
from paceline_advisor.memory.job import Job
from paceline_advisor.memory.settings import allocator_settings
from paceline_advisor.memory.trace import trace_steps, without_collection

_OVER_THE_BATCH = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass(frozen=True, kw_only=True)
class Lack:
    """A step that does not fit.

    Attributes:
        memory: Bytes that the device has.
        largest: Samples of a micro-batch that would fit, some more per cent might; 0 if not even one.
        divisor: The most of these that divide a process's share of the step.
        normalises: Whether the network takes statistics over a micro-batch, so that a smaller one trains otherwise.
    """

    memory: int
    largest: int
    divisor: int
    normalises: bool


def lack_of_room(recipe: Recipe, target: Target, world: World) -> Lack | None:
    """What a step lacks; None where it fits, the target is no GPU of known memory, or nothing could be found out."""
    memory = target.machine.memory_bytes
    if target.kind != "cuda" or memory is None:
        return None
    # With the evaluation, unless code of the user's own cannot do that on tensors without content.
    for scores in (True, False):
        try:
            return _lack(recipe, target, world, memory, scores=scores)
        except Exception:  # noqa: BLE001  # whatever code of the user's own raises: other looks tell of it
            continue
    return None


def _lack(recipe: Recipe, target: Target, world: World, memory: int, *, scores: bool) -> Lack | None:
    with (
        without_collection(),
        fake_step(recipe, machine=target.machine, processes=world.world_size, scores=scores) as step,
    ):
        allocator, _ = allocator_settings(os.environ)
        job = Job(step, trace_steps(step), target.machine, ways=max(2, world.world_size), allocator=allocator)
        if job.fits(job.plan.micro_batch_size, memory):
            return None
        largest = job.largest(memory, roughly=True)
        return Lack(
            memory=memory,
            largest=largest,
            divisor=next((each for each in range(min(largest, job.share), 0, -1) if job.share % each == 0), 0),
            normalises=any(isinstance(each, _OVER_THE_BATCH) for each in step.network.modules()),
        )
