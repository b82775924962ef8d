"""What would a change of the recipe save of a step's memory?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from paceline.errors import PacelineError
from paceline.recipe.plan import MachineFacts
from paceline.recipe.schema import Recipe
from paceline.trainer.fake_step import FakeStep, fake_step
from paceline_advisor.memory.job import Job
from paceline_advisor.memory.trace import trace_step, trace_steps


@dataclass(frozen=True, kw_only=True)
class Saving:
    """One change.

    Attributes:
        change: As an override or in words.
        needed: Bytes that its device must have with it; None if it does not go with the recipe.
        saved: Bytes less than now.
        why_not: Why it does not go.
    """

    change: str
    needed: int | None
    saved: int = 0
    why_not: str = ""


def savings(recipe: Recipe, machine: MachineFacts, processes: int, job: Job, now: int) -> Iterator[Saving]:
    """Try the changes that cost least, one at a time, by a fake step each.

    Args:
        recipe: What was asked.
        machine: What it runs on.
        processes: Of the run.
        job: Its process as it is.
        now: Bytes that its device must have as it is.
    """
    for change, changed in _changes(recipe, job.plan.precision, machine):
        try:
            with fake_step(changed, processes=processes, machine=machine, scores=True) as step:
                needed = _needed(step, machine, job)
        except PacelineError as error:
            yield Saving(change=change, needed=None, why_not=str(error))
            continue
        yield Saving(change=change, needed=needed, saved=now - needed)


def _needed(step: FakeStep, machine: MachineFacts, job: Job) -> int:
    now, memory = step.micro_batch, machine.memory_bytes
    if now == 1:  # not done: a network may do otherwise, or refuse, where there is but one sample
        return Job(step, trace_steps(step), machine, ways=job.ways, allocator=job.allocator).least(now, memory)
    trace = trace_step(step)
    return Job(step, lambda _: trace, machine, ways=job.ways, allocator=job.allocator).least(now, memory)


def _changes(recipe: Recipe, precision: str, machine: MachineFacts) -> Iterator[tuple[str, Recipe]]:
    if precision == "fp32" and "bf16_products" not in machine.lacks:
        yield "train.precision=bf16", replace(recipe, train=replace(recipe.train, precision="bf16"))
    if recipe.model.activation_checkpointing is None and not recipe.model.compile:
        for how in ("selective", "full"):
            model = replace(recipe.model, activation_checkpointing=how)
            yield f"model.activation_checkpointing={how}", replace(recipe, model=model)
