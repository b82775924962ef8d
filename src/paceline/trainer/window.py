"""What has been used up and lost since the last step record?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from paceline.data.batch import Batch, BrokenSample
from paceline.distributed.collectives import Collectives
from paceline.errors import TrainingError
from paceline.records.ledger import LedgerWriter


class Window:
    """Sums since the last step record, on this rank; a checkpoint component, so that no record changes by a resume.

    Attributes:
        grad_norm: Gradient norm of the latest step, where it was measured.
    """

    def __init__(self, collectives: Collectives, ledger: LedgerWriter, device: torch.device) -> None:
        self._collectives = collectives
        self._ledger = ledger
        # float64 where the device has it: sums over a long window stay exact to float32's precision.
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self._loss = torch.zeros((), dtype=dtype, device=device)
        self._samples = 0
        self._step_loss = torch.zeros_like(self._loss)
        self._step_samples = 0
        self._gathered: list[list[Any]] = []
        self.grad_norm: torch.Tensor | None = None
        self.new_broken: list[BrokenSample] = []
        self.broken_ids: set[int] = set()

    def add(self, loss: torch.Tensor, batch: Batch) -> None:
        """Take note of one micro-batch: its loss (left on the device) and the samples it used up."""
        self._step_loss.add_(loss.detach(), alpha=batch.weight)
        self._step_samples += batch.weight
        if batch.broken and not batch.slice.phantom:
            self.new_broken += [each for each in batch.broken if each.id not in self.broken_ids]
            self.broken_ids.update(each.id for each in batch.broken)
        if not batch.slice.phantom:
            piece = batch.slice
            broken = [each.id for each in batch.broken]
            self._ledger.append(step=piece.step + 1, epoch=piece.epoch, ids=batch.ids, broken=broken)

    def end_step(self, *, stepped: bool) -> None:
        """Close the step; the loss of one that fp16 skipped, which may be no number, does not count."""
        if stepped:
            self._loss.add_(self._step_loss)
            self._samples += self._step_samples
        self._step_loss.zero_()
        self._step_samples = 0

    def drain(self) -> tuple[float | None, list[BrokenSample]]:
        """Mean loss since the last record and newly broken samples, over all processes; waits for the device.

        The loss is None if every step was skipped.
        """
        sums = torch.stack(
            [self._loss, self._loss.new_tensor(self._samples), self._loss.new_tensor(len(self.new_broken))]
        )
        total, samples, broken = self._collectives.reduce_sum(sums).tolist()
        self._loss.zero_()
        self._samples = 0
        # Within one window two ranks may meet the same sample, in two epochs: it is one incident.
        parts = self._collectives.gather(self.new_broken) if broken else []
        found = list({each.id: each for part in parts for each in part}.values())
        self.new_broken = []
        self.broken_ids.update(each.id for each in found)
        return total / samples if samples else None, found

    def gather(self) -> None:
        """Collect every rank's sums for :meth:`state_dict`; a collective."""
        mine = (
            float(self._loss),
            self._samples,
            [vars(each) for each in self.new_broken],
            sorted(self.broken_ids),
        )
        self._gathered = [list(each) for each in self._collectives.gather(mine)]

    def state_dict(self) -> dict[str, Any]:
        """Every rank's sums, as they were last gathered."""
        return {"ranks": self._gathered}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take this rank's sums; in another world the first rank takes them all."""
        world, ranks = self._collectives.world, state["ranks"]
        if len(ranks) == world.world_size:
            mine = [ranks[world.rank]]
        else:
            mine = ranks if world.is_first else []
        self._loss.fill_(sum(each[0] for each in mine))
        self._samples = sum(each[1] for each in mine)
        self.new_broken = [BrokenSample(**broken) for each in mine for broken in each[2]]
        self.broken_ids = {sample for each in ranks for sample in each[3]}


def check_finite(loss: float | None, step: int) -> None:
    """Refuse to go on from a training loss that is no number.

    Raises:
        TrainingError: With what to change.
    """
    if loss is not None and not math.isfinite(loss):
        raise TrainingError(
            f"the training loss became {loss} by step {step}; lower optimizer.lr, lengthen schedule.warmup, or set "
            "optimizer.clip_norm."
        )
