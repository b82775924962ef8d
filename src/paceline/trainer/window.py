"""What has been used up and lost since the last step record?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.data.batch import Batch, BrokenSample
from paceline.distributed.collectives import Collectives
from paceline.records.ledger import LedgerWriter
from paceline.trainer.noise import NoiseMeter


@dataclass(frozen=True)
class Drained:
    """What all processes have since the last record.

    Attributes:
        loss: Mean training loss; None if every step was skipped.
        broken: Newly broken samples.
        seconds: What each process measured, by rank.
    """

    loss: float | None
    broken: list[BrokenSample]
    seconds: list[list[float]]


class Window:
    """Losses since the last step record, on this rank; a checkpoint component, so that no record changes by a resume.

    Losses stay on the device as they are until a record is due, and are then added up one after the other in
    float64: the sum does not depend on where a checkpoint fell.

    Args:
        collectives: The processes.
        ledger: Where the numbers of the samples go.
        device: Where losses are.
        noise: What measures the gradients' noise, whose numbers travel with the losses; None for none.

    Attributes:
        grad_norm: Gradient norm of the latest step, where it was measured.
        first_loss: Loss of the run's first micro-batch on the first rank, or of its first step where that is summed up
            over the processes.
        last_loss: Training loss of the latest step record.
        worst_loss: The largest of them.
    """

    def __init__(
        self, collectives: Collectives, ledger: LedgerWriter, device: torch.device, noise: NoiseMeter | None = None
    ) -> None:
        self._noise = noise
        self._collectives = collectives
        self._ledger = ledger
        self._device = device
        self._sum = 0.0
        self._samples = 0
        self._pending: list[tuple[torch.Tensor, int]] = []
        self._settled = 0
        self._combined: list[torch.Tensor] = []
        self._gathered: list[list[Any]] = []
        self.grad_norm: torch.Tensor | None = None
        self.first_loss: float | None = None
        self.last_loss: float | None = None
        self.worst_loss = 0.0
        self.new_broken: list[BrokenSample] = []
        self.broken_ids: set[int] = set()

    def add(self, loss: torch.Tensor, batch: Batch) -> None:
        """Take note of one micro-batch: its loss (left on the device) and the samples it used up."""
        self._pending.append((loss.detach(), batch.weight))
        if batch.slice.phantom:
            return
        piece, broken = batch.slice, [each.id for each in batch.broken]
        if broken:
            self.new_broken += [each for each in batch.broken if each.id not in self.broken_ids]
            self.broken_ids.update(broken)
        self._ledger.append(step=piece.step + 1, epoch=piece.epoch, ids=batch.ids, broken=broken)

    def end_step(self, *, stepped: bool, combined: torch.Tensor | None = None) -> None:
        """Close the step; the loss of one that was skipped, which may be no number, does not count.

        Args:
            stepped: False if the optimizer did not move.
            combined: Losses and samples over all processes, [2], if they are known: the first one writes them down.
        """
        if not stepped or combined is not None:
            del self._pending[self._settled :]
        if stepped and combined is not None and self._collectives.world.is_first:
            self._combined.append(combined)
        self._settled = len(self._pending)
        if self._noise is not None:
            self._noise.end_step(self.grad_norm, stepped=stepped)

    def drain(self, seconds: Sequence[float] = ()) -> Drained:
        """Bring together what all processes have since the last record; waits for the device.

        Args:
            seconds: What this process measured, as many numbers as every other.
        """
        self._add_up()
        dtype = torch.float32 if self._device.type == "mps" else torch.float64
        own = [*seconds, *([] if self._noise is None else self._noise.take())]
        world, width = self._collectives.world, len(own)
        # Zero in the others' places: so one sum is a gathering too.
        measured = [0.0] * (world.rank * width) + own + [0.0] * ((world.world_size - world.rank - 1) * width)
        sums = torch.tensor(
            [self._sum, self._samples, len(self.new_broken), *measured], dtype=dtype, device=self._device
        )
        total, samples, broken, *measured = self._collectives.reduce_sum(sums).tolist()
        self._sum, self._samples = 0.0, 0
        # Within one window two ranks may meet the same sample, in two epochs: it is one incident.
        parts = self._collectives.gather(self.new_broken) if broken else []
        found = [each for _, each in sorted({each.id: each for part in parts for each in part}.items())]
        self.new_broken = []
        self.broken_ids.update(each.id for each in found)
        everyones = [measured[rank * width : (rank + 1) * width] for rank in range(world.world_size)]
        if self._noise is not None:
            self._noise.fold([each[len(seconds) :] for each in everyones])
        told = [each[: len(seconds)] for each in everyones]
        if samples:
            self.last_loss = total / samples
            self.worst_loss = max(self.worst_loss, self.last_loss)
        return Drained(total / samples if samples else None, found, told)

    def gather(self) -> None:
        """Collect every rank's sums for :meth:`state_dict`; a collective."""
        self._add_up()
        mine = (self._sum, self._samples, [vars(each) for each in self.new_broken], sorted(self.broken_ids))
        self._gathered = [list(each) for each in self._collectives.gather(mine)]
        if self._noise is not None:
            self._noise.gather(self._collectives)

    def state_dict(self) -> dict[str, Any]:
        """Every rank's sums, as they were last gathered."""
        noise = {} if self._noise is None or not self._noise.has_measured else {"noise": self._noise.state_dict()}
        return {"ranks": self._gathered, "losses": [self.first_loss, self.last_loss, self.worst_loss], **noise}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take this rank's sums; in another world the first rank takes them all."""
        world, ranks = self._collectives.world, state["ranks"]
        if len(ranks) == world.world_size:
            mine = [ranks[world.rank]]
        else:
            mine = ranks if world.is_first else []
        self._sum = float(sum(each[0] for each in mine))
        self._samples = sum(each[1] for each in mine)
        self.new_broken = [BrokenSample(**broken) for each in mine for broken in each[2]]
        self.broken_ids = {sample for each in ranks for sample in each[3]}
        self.first_loss, self.last_loss, self.worst_loss = state.get("losses", (None, None, 0.0))
        if self._noise is not None and "noise" in state:
            self._noise.load_state_dict(state["noise"])

    def _add_up(self) -> None:
        if self._combined:
            for losses, samples in torch.stack(self._combined).tolist():
                if self.first_loss is None and samples:
                    self.first_loss = losses / samples
                self._sum += losses
                self._samples += round(samples)
            self._combined = []
        if not self._pending:
            return
        values = torch.stack([loss for loss, _ in self._pending]).tolist()
        for value, (_, weight) in zip(values, self._pending, strict=True):
            # A weight of zero is a phantom's: its loss may be anything.
            if self.first_loss is None and weight:
                self.first_loss = value
            self._sum += value * weight if weight else 0.0
            self._samples += weight
        self._pending, self._settled = [], 0
