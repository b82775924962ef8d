"""May the optimizer move on what this step has computed? A loss that is no number must not reach the weights."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paceline.data.batch import Batch
from paceline.data.slices import SampleIds
from paceline.distributed.exact_buffers import buffers_of, put_back
from paceline.distributed.strategy import VOTE_LAG, VoteReader
from paceline.errors import TrainingError
from paceline.recipe.training import Train
from paceline.records.events import IncidentEvent

if TYPE_CHECKING:
    from paceline.trainer.run import Run

_REMEDY = "lower optimizer.lr, lengthen schedule.warmup, or set optimizer.clip_norm"


@dataclass(frozen=True)
class Culprit:
    """A micro-batch whose loss was no number.

    Attributes:
        rank: The process that had it.
        loss: What the loss was.
        samples: The samples inside.
    """

    rank: int
    loss: float
    samples: tuple[int, ...]


class NonFiniteGuard:
    """Holds the optimizer back from a step in which any process's loss, or the norm it clips by, is not finite.

    The processes agree without a collective of its own: the flag rides on the reduction of the gradient. On a CPU it is
    read before the update. On a GPU that is to stop, the host reads it late and does not wait; meanwhile the fused
    optimizers leave such an update out by themselves. fp16 is left to its loss scaling.

    Args:
        train: What to do.
        optimizer: What is held back.
        network: Its buffers are put back when a step is left out: BatchNorm's statistics would not recover.
        device: Where the losses are.
        active: False where the loss scaling of fp16 decides.
        late: What reads the flag late, if not one made for the device.
    """

    def __init__(
        self,
        train: Train,
        optimizer: torch.optim.Optimizer,
        network: nn.Module,
        device: torch.device,
        *,
        active: bool,
        late: VoteReader | None = None,
    ) -> None:
        self.skips = active and train.nonfinite == "skip"
        self._active = active
        self._most = train.max_nonfinite
        self._optimizer = optimizer
        self._on_host = device.type == "cpu"
        self._waits = self._on_host or self.skips
        self._late = late or VoteReader(device)
        self._found = False
        self._clean, self._spoiled = torch.zeros(()), torch.ones(())
        self._places = list(buffers_of(network)) if self.skips else []
        self._buffers = [tensor for *_, tensor in self._places]
        self._before = [torch.empty_like(each) for each in self._buffers]
        self._losses: deque[list[tuple[torch.Tensor, SampleIds]]] = deque(maxlen=VOTE_LAG + 1)

    def begin_step(self) -> None:
        """Remember what a step that is left out must not have changed."""
        self._found = False
        self._losses.append([])
        if self._buffers:
            self._hold_buffers()
            torch._foreach_copy_(self._before, self._buffers)

    def mark(self, loss: torch.Tensor, batch: Batch) -> torch.Tensor | None:
        """1 for a micro-batch whose loss is no number, else 0: on the loss's device, which is not waited for."""
        # Without samples, since all were broken, a loss is a mean over nothing, of which nothing reaches the gradient.
        if not self._active or not len(batch.ids):
            return None
        loss = loss.detach()
        self._losses[-1].append((loss, batch.ids))
        return self._marked(loss)

    def allows_step(self, found: torch.Tensor, clip_norm: torch.Tensor | None) -> bool:
        """Whether the optimizer is to be called.

        Args:
            found: The marks of all processes added up, as the reduction gave them.
            clip_norm: The norm by which the gradient was clipped; the same on all processes.
        """
        if not self._active:
            return True
        if clip_norm is not None:
            found = torch.maximum(found.float(), self._marked(clip_norm))
        if self._waits:
            self._found = found.item() > 0
            if self._found and self._buffers:
                self._hold_buffers()
                torch._foreach_copy_(self._buffers, self._before)
            return not self._found
        if all(group.get("fused") for group in self._optimizer.param_groups):
            # torch's fused kernels read it on the device, as they do for the loss scaling that it was made for.
            self._optimizer.found_inf = (found > 0).float()  # type: ignore[attr-defined]
        self._late.cast(found)
        return True

    def report(self, run: Run) -> None:
        """Once the step is counted: write down what was found, and end the run if it is not to go on; all alike.

        Raises:
            TrainingError: If the run is to stop, or too many steps were left out.
        """
        late = self._active and not self._waits and any(self._late.agreed())
        if not self._found and not late:
            return
        lag = VOTE_LAG if late else 0
        culprits = [each for part in run.collectives.gather(self._culprits(run, lag)) for each in part]
        progress = run.progress
        if self._found:
            progress.nonfinite += 1
        what = _in_words(culprits, run.world.world_size)
        # A step is named as it would have been counted.
        place = f"at step {progress.position - lag - progress.skipped + self._found}"
        run.recorder.write(
            IncidentEvent(
                **progress.here,
                incident="nonfinite_loss" if culprits else "nonfinite_gradient",
                message=f"{what} {place}; {'the weights were not moved' if self._found else 'the run ends'}.",
                details=_details(culprits),
            )
        )
        run.recorder.flush()
        if not self.skips:
            raise TrainingError(f"{what} {place}; {_REMEDY}, or leave such steps out with train.nonfinite=skip.")
        if progress.nonfinite > self._most:
            raise TrainingError(
                f"{what} {place}, and {progress.nonfinite} steps were not taken for such a reason, more than "
                f"train.max_nonfinite={self._most}; {_REMEDY}."
            )

    def _hold_buffers(self) -> None:
        """Bring back the tensors that hold the buffers, where a forward pass has put others in their place."""
        for place in self._places:
            put_back(*place)

    def _marked(self, value: torch.Tensor) -> torch.Tensor:
        if self._on_host:
            return self._clean if math.isfinite(value.item()) else self._spoiled
        # Infinity times zero is no number either; two kernels, and no branch.
        return (value * 0).float().nan_to_num(1.0)

    def _culprits(self, run: Run, lag: int) -> list[Culprit]:
        """This process's micro-batches without a loss that is a number, so many steps ago."""
        if len(self._losses) <= lag:
            return []
        held = [(loss.item(), ids) for loss, ids in self._losses[-1 - lag]]
        return [Culprit(run.world.rank, loss, tuple(ids.tolist())) for loss, ids in held if not math.isfinite(loss)]


def check_weights(network: nn.Module, step: int) -> None:
    """Refuse to save weights that are no numbers: a gradient may have been none although its loss was one.

    Raises:
        TrainingError: With what to change.
    """
    # Of weights that are spread over processes, each looks at its own.
    mine = (each.to_local() if hasattr(each, "to_local") else each for each in network.parameters())
    weights = [each.detach() for each in mine if each.is_floating_point()]
    if weights and not torch.isfinite(nn.utils.get_total_norm(weights)):
        raise TrainingError(f"the weights became infinite or no numbers by step {step}; {_REMEDY}.")


def _in_words(culprits: Iterable[Culprit], world_size: int) -> str:
    first = next(iter(culprits), None)
    if first is None:
        return "the norm of the gradient became infinite or no number"
    return f"the training loss became {first.loss}" + (f" on rank {first.rank}" if world_size > 1 else "")


def _details(culprits: list[Culprit]) -> Mapping[str, Any]:
    """Where to look: the processes, and the samples of their micro-batches."""
    if not culprits:
        return {}
    ranks = sorted({each.rank for each in culprits})
    return {"ranks": ranks, "samples": sorted({sample for each in culprits for sample in each.samples})}
