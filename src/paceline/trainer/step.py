"""One optimizer step."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from paceline.data.batch import Batch
from paceline.data.random_draws import derive_seed
from paceline.data.slices import SampleSlice
from paceline.distributed.strategy import MicroBatch
from paceline.optim.build import apply_settings
from paceline.trainer.run import Run


def train_step(run: Run, batches: Iterator[Batch]) -> bool:
    """Train on one global batch; False if the step was skipped: fp16 gradients overflowed, or a loss was not finite."""
    run.begin_step()
    apply_settings(run.optimizer, run.schedules.at(run.progress.step, run.progress.position))
    for batch in micro_batches(run, batches):
        is_last = batch.slice.is_last
        with run.strategy.micro_batch(_micro_batch(batch)):
            with run.span("forward", samples=batch.ids):
                seed_forward(run.recipe.seed, batch.slice, run.device)
                loss = run.loss(run.strategy.model, batch)
            with run.span("backward", synchronizes=is_last, samples=batch.ids):
                share = _share(loss, batch, run.strategy.loss_divisor)
                mark = run.guard.mark(loss, batch)
                # Control flags and the non-finite mark are reduced with the gradients, so agreeing needs no extra
                # collective.
                loss_with_votes = run.strategy.with_vote(share, run.control_flags, is_last=is_last, nonfinite=mark)
                run.backward(loss_with_votes, batch)
        run.window.add(loss, batch)
    with run.span("optimizer"):
        combined = run.strategy.combine()
        stepped = _update(run)
    if stepped and run.ema is not None:
        with run.span("ema"):
            run.ema.update(run.progress.step)
    run.window.end_step(stepped=stepped, combined=combined)
    return stepped


def micro_batches(run: Run, batches: Iterator[Batch]) -> Iterator[Batch]:
    """Return this rank's micro-batches of the next step; waiting for them counts as data wait."""
    while True:
        with run.span("data_wait"):
            batch = next(batches)
        yield batch
        if batch.slice.is_last:
            return


def _micro_batch(batch: Batch) -> MicroBatch:
    # A copy, since `distributed` does not import `data`.
    at = batch.slice
    return MicroBatch(at.logical_rank, at.step_weight, batch.weight, at.is_last, at.logical_ranks, at.step_samples)


def _share(loss: torch.Tensor, batch: Batch, averages_over: int) -> torch.Tensor:
    # A mean over the micro-batch becomes its share of the mean over the step's samples or tokens.
    factor = batch.weight * averages_over / batch.slice.step_weight
    return loss if factor == 1 else loss * factor


def seed_forward(seed: int, part: SampleSlice, device: torch.device) -> None:
    """Key dropout by (seed, step, logical rank): there is no random state to save or for observers to disturb."""
    forward_seed = derive_seed(seed, part.step, part.logical_rank)
    torch.default_generator.manual_seed(forward_seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(forward_seed)


def _update(run: Run) -> bool:
    run.precision.unscale(run.optimizer)
    run.window.grad_norm = run.clipping(measure=run.needs_norm)
    clip_norm = run.window.grad_norm if run.clipping.uses_norm else None
    stepped = run.guard.allows_step(run.strategy.nonfinite(), clip_norm) and run.precision.step(run.optimizer)
    run.optimizer.zero_grad(set_to_none=True)
    if not stepped:
        run.guard.undo()
    return stepped
