"""Do the replicas fit together, and batches into memory? Some go through before the first step, and nothing moves."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

import torch

from paceline.data.batch import Batch
from paceline.distributed.exact import buffers_kept
from paceline.distributed.strategy import Wish, refuse_unused
from paceline.trainer.step import seed_forward
from paceline.world import World

if TYPE_CHECKING:
    from paceline.trainer.run import Run


def rehearse(run: Run, batches: Iterator[Batch]) -> Iterator[Batch]:
    """Send the first batch through forward, backward and reduction, and return the stream with it in front again.

    DDP packs its gradient buckets anew after its first backward pass, in the order in which gradients arrived. With
    three or more processes the packing decides in which order a ring adds up, and so the last bits: a resumed run
    must have done it before its first step, as the uninterrupted one had.

    Raises:
        ModelError: If parameters took no part in the loss: other processes would wait for their gradients for ever.
    """
    run.pulse.enter("data_wait")
    claim_memory(run)
    first = next(batches, None)
    if first is None or not run.strategy.is_rehearsed:
        return batches if first is None else chain([first], batches)
    _send_through(run, first)
    # What is frozen until later, as it was in the step before: a change with the first step comes with that step.
    if run.thawing.at(max(run.progress.step - 1, 0)):
        _send_through(run, first)
    return chain([first], batches)


def claim_memory(run: Run) -> None:
    """Send the largest micro-batch through forward and backward, where samples are of unequal length.

    Memory is then claimed once, and not bit by bit as longer samples turn up; and what is too large fails at once. All
    processes send the same one, whoever's it will be.
    """
    largest = run.geometry.costliest(run.progress.position, run.plan.total_steps)
    if largest is None:
        return
    batches = run.pipeline.train_batches(run.geometry, largest.step, largest.step + 1, World())
    [batch] = [each for each in batches if each.slice.logical_rank == largest.logical_rank]
    _send_through(run, batch)


def _send_through(run: Run, first: Batch) -> None:
    with buffers_kept(run.network):
        run.pulse.enter("forward", samples=first.ids)
        seed_forward(run.recipe.seed, first.slice, run.device)
        with run.precision.autocast():
            loss = run.task.loss(run.strategy.model, first)
        run.pulse.enter("backward", last=True)
        torch.autograd.backward(run.strategy.with_vote(loss * 0, Wish, is_last=True))
        try:
            if run.strategy.is_rehearsed:
                refuse_unused(run.network, allowed=run.recipe.parallel.unused_parameters == "allow")
        finally:
            run.optimizer.zero_grad(set_to_none=True)
