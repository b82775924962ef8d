"""Do the replicas fit together? One batch through all of them before the first step, and nothing moves."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

import torch

from paceline.data.batch import Batch
from paceline.distributed.exact_buffers import buffers_of, put_back
from paceline.distributed.strategy import Wish
from paceline.errors import ModelError
from paceline.trainer.step import seed_forward

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
    first = next(batches, None)
    if first is None or not run.strategy.is_rehearsed:
        return batches if first is None else chain([first], batches)
    _send_through(run, first)
    # What is frozen until later, as it was in the step before: a change with the first step comes with that step.
    if run.thawing.at(max(run.progress.step - 1, 0)):
        _send_through(run, first)
    return chain([first], batches)


def _send_through(run: Run, first: Batch) -> None:
    buffers = [(*place, place[-1].clone()) for place in buffers_of(run.network)]
    run.pulse.enter("forward", samples=first.ids)
    seed_forward(run.recipe.seed, first.slice, run.device)
    with run.precision.autocast():
        loss = run.task.loss(run.strategy.model, first)
    run.pulse.enter("backward", last=True)
    run.strategy.with_vote(loss * 0, Wish, is_last=True).backward()  # type: ignore[no-untyped-call]  # torch
    unused = [name for name, p in run.network.named_parameters() if p.requires_grad and p.grad is None]
    run.optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        for module, name, buffer, before in buffers:
            put_back(module, name, buffer)
            buffer.copy_(before)
    if unused:
        raise ModelError(
            f"{len(unused)} parameter(s) took no part in the loss: {', '.join(unused[:5])}"
            f"{', …' if len(unused) > 5 else ''}; with several processes, or parallel.exact, every trainable parameter "
            "must: remove them, use them, or set requires_grad=False."
        )
