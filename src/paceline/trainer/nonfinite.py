"""Keep non-finite values out of the weights, the checkpoints and the result of a run."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from paceline.data.batch import Batch
from paceline.data.slices import SampleIds
from paceline.distributed.collectives import Collectives
from paceline.distributed.exact import buffers_of, restore_tensor
from paceline.distributed.strategy import VOTE_LAG, FlagReader
from paceline.errors import TrainingError
from paceline.recipe.load import OWN_LOOP
from paceline.recipe.training import TrainSection
from paceline.tasks.task import Task
from paceline.trainer.recorder import Recorder
from paceline.trainer.step_stats import Results

if TYPE_CHECKING:
    from paceline.trainer.run_views import RecordedRun
    from paceline.trainer.saved_run import SavedRun

_REMEDY = "lower optimizer.lr, lengthen schedule.warmup, or set optimizer.clip_norm"
_OWN_REMEDY = "lower your optimizer's learning rate, or clip the gradients (torch.nn.utils.clip_grad_norm_)"

# How large a multiple of the first loss is more than a fluctuation, and below what fraction of it something was
# learned.
_DIVERGED_FACTOR = 10
_LEARNED = 0.9


class NonFiniteLoss(NamedTuple):
    """A micro-batch with a non-finite loss.

    Attributes:
        rank: The process that computed it.
        loss: The loss value.
        samples: Its samples.
    """

    rank: int
    loss: float
    samples: tuple[int, ...]


class NonFiniteGuard:
    """Skips the optimizer step if any process's loss, or the clipping norm, is not finite.

    The processes agree without an extra collective: the flag travels with the gradient reduction. On a CPU it is read
    before the update. On a GPU the host reads it late, without waiting; meanwhile the fused optimizers skip such an
    update by themselves. fp16 relies on its loss scaling instead.

    Args:
        train: The recipe's training section, which says what to do.
        optimizer: The optimizer whose step is skipped.
        network: Its buffers are restored when a step is skipped: BatchNorm's statistics would not recover.
        device: Where the losses are.
        active: False where the loss scaling of fp16 decides.
        reader: Reader of the delayed flag; by default one for the device.
    """

    def __init__(
        self,
        train: TrainSection,
        optimizer: torch.optim.Optimizer,
        network: nn.Module,
        device: torch.device,
        *,
        active: bool,
        reader: FlagReader | None = None,
    ) -> None:
        self.skips = active and train.nonfinite == "skip"
        self._active = active
        self._max_skipped = train.max_nonfinite
        self._optimizer = optimizer
        self._on_host = device.type == "cpu"
        self._waits = self._on_host or self.skips
        self._reader = reader or FlagReader(device)
        self._found = False
        self._finite_flag, self._nonfinite_flag = torch.zeros(()), torch.ones(())
        self._buffer_slots = list(buffers_of(network)) if self.skips or not active else []
        self._buffers = [tensor for *_, tensor in self._buffer_slots]
        self._saved_buffers = [torch.empty_like(each) for each in self._buffers]
        self._losses: deque[list[tuple[torch.Tensor, SampleIds]]] = deque(maxlen=VOTE_LAG + 1)

    def begin_step(self) -> None:
        """Save the state that a skipped step must not change."""
        self._found = False
        self._losses.append([])
        if self._buffers:
            self._restore_buffers()
            torch._foreach_copy_(self._saved_buffers, self._buffers)

    def mark(self, loss: torch.Tensor, batch: Batch) -> torch.Tensor | None:
        """Return 1 for a micro-batch whose loss is not finite, else 0; on the loss's device, without waiting for it."""
        # If all samples were unreadable, the loss is a mean over nothing and contributes nothing to the gradient.
        if not self._active or not len(batch.ids):
            return None
        loss = loss.detach()
        self._losses[-1].append((loss, batch.ids))
        return self._flag(loss)

    def allows_step(self, nonfinite: torch.Tensor, clip_norm: torch.Tensor | None) -> bool:
        """Whether to call the optimizer.

        Args:
            nonfinite: The sum of all processes' marks, from the reduction.
            clip_norm: The norm by which the gradient was clipped; the same on all processes.
        """
        if not self._active:
            return True
        if clip_norm is not None:
            nonfinite = torch.maximum(nonfinite.float(), self._flag(clip_norm))
        if self._waits:
            self._found = nonfinite.item() > 0
            return not self._found
        if all(group.get("fused") for group in self._optimizer.param_groups):
            # torch's fused kernels read it on the device, as they do for loss scaling, for which it was made.
            self._optimizer.found_inf = (nonfinite > 0).float()  # type: ignore[attr-defined]
        self._reader.push(nonfinite)
        return True

    def undo(self) -> None:
        """Restore the state from before the step, after it was skipped."""
        if self._buffers:
            self._restore_buffers()
            torch._foreach_copy_(self._buffers, self._saved_buffers)

    def report(self, collectives: Collectives, recorder: Recorder, last_good: str) -> None:
        """After the step is counted, record what was found, and end the run if it must stop; the same on every process.

        Args:
            collectives: All processes.
            recorder: Records it, and knows the run's position.
            last_good: Names the newest checkpoint, in a sentence.

        Raises:
            TrainingError: If the run is to stop, or too many steps were skipped.
        """
        is_late = self._active and not self._waits and any(self._reader.agreed())
        if not self._found and not is_late:
            return
        lag = VOTE_LAG if is_late else 0
        losses = self._losses[-1 - lag] if len(self._losses) > lag else []
        local_losses = [(loss.item(), tuple(ids.tolist())) for loss, ids in losses]
        rank = collectives.world.rank
        local = [NonFiniteLoss(rank, loss, samples) for loss, samples in local_losses if not math.isfinite(loss)]
        nonfinite = [each for part in collectives.gather(local) for each in part]
        progress = recorder.progress
        if self._found:
            progress.nonfinite += 1
        cause, details = "the gradient norm became infinite or NaN", {}
        if nonfinite:  # where to look: the processes, and the samples of their micro-batches
            cause = f"the training loss became {nonfinite[0].loss}"
            cause += f" on rank {nonfinite[0].rank}" * (collectives.world.world_size > 1)
            samples = sorted({sample for each in nonfinite for sample in each.samples})
            details = {"ranks": sorted({each.rank for each in nonfinite}), "samples": samples}
        # Name the step by the number it would have had.
        where = f"at step {progress.position - lag - progress.skipped + self._found}"
        recorder.incident(
            "nonfinite_loss" if nonfinite else "nonfinite_gradient",
            f"{cause} {where}; {'the weights were not moved' if self._found else 'the run ends'}.",
            details,
        )
        recorder.flush()
        if not self.skips:
            raise TrainingError(
                f"{cause} {where}; {_REMEDY}, or skip such steps with train.nonfinite=skip. {last_good}",
                value=details.get("samples"),
            )
        if progress.nonfinite > self._max_skipped:
            raise TrainingError(
                f"{cause} {where}, and {progress.nonfinite} steps were skipped for such a reason, more than "
                f"train.max_nonfinite={self._max_skipped}; {_REMEDY}. {last_good}",
                value=details.get("samples"),
            )

    def _restore_buffers(self) -> None:
        """Restore the tensors that hold the buffers, where a forward pass has replaced them."""
        for slot in self._buffer_slots:
            restore_tensor(*slot)

    def _flag(self, value: torch.Tensor) -> torch.Tensor:
        if self._on_host:
            return self._finite_flag if math.isfinite(value.item()) else self._nonfinite_flag
        # Infinity times zero is nan too; this takes two kernels and no branch.
        return (value * 0).float().nan_to_num(1.0)


def check_loss(loss: float | None, run: SavedRun | RecordedRun) -> None:
    """Refuse to continue from a non-finite training loss.

    Args:
        loss: The loss; None if every step was skipped.
        run: Records the failure.

    Raises:
        TrainingError: With what to change.
    """
    if loss is not None and not math.isfinite(loss):
        raise _failure("nonfinite_loss", f"the training loss became {loss} by step {run.progress.step}", run)


def check_state(run: SavedRun) -> None:
    """Refuse to save weights or statistics that are not finite: a finite loss does not rule them out.

    A gradient may be infinite where its loss is not, and the statistics of BatchNorm, which only evaluation uses, may
    overflow before the loss does.

    Raises:
        TrainingError: With what to change.
    """
    for weights, network in run.models().items():
        # With sharded weights, each process checks its own shard, which may be empty.
        named = ((name, getattr(p, "to_local", lambda p=p: p)().detach()) for name, p in network.named_parameters())
        # Other buffers may validly hold infinity: masks, the ends of ranges.
        stats = ((name, b) for name, b in network.named_buffers() if name.rpartition(".")[2].startswith("running_"))
        for kind, state in (("the weight", named), ("the statistic", stats)):
            tensors = {name: each for name, each in state if each.is_floating_point() and each.numel()}
            if tensors and not math.isfinite(nn.utils.get_total_norm(list(tensors.values()), math.inf)):
                first = next(key for key, each in tensors.items() if not torch.isfinite(each).all())
                cause = f"{kind} '{first}'{' of the moving average' * (weights == 'ema')}"
                cause = f"{cause} became infinite or nan by step {run.progress.step}"
                raise _failure("nonfinite_weights", cause, run)


def check_results(task: Task | None, results: Results, recorder: Recorder) -> None:
    """Record the first of the latest evaluations whose metrics are all non-finite; the run may recover."""
    wrong = _wrong_metrics(task, results)
    progress = recorder.progress
    if wrong and progress.nonfinite_since is None:
        recorder.incident("nonfinite_metric", f"{wrong}; the run fails if its last evaluation is not finite either.")
    if not wrong or progress.nonfinite_since is None:
        progress.nonfinite_since = progress.step if wrong else None


def check_outcome(task: Task | None, run: SavedRun) -> None:
    """Refuse to mark a run as completed if its last evaluation is not finite, or if its weights never changed.

    Raises:
        TrainingError: With what to change.
    """
    progress = run.progress
    if wrong := _wrong_metrics(task, progress.last):
        first = progress.step if progress.nonfinite_since is None else progress.nonfinite_since
        # A loop need not log its loss.
        although = "" if run.window.last_loss is None else ", although the training loss is finite"
        raise _failure("nonfinite_metric", f"{wrong} since the evaluation at step {first}{although}", run)
    if progress.skipped and not progress.step:
        cause = f"none of the {progress.skipped} steps changed the weights: their losses or gradients were not finite"
        raise _failure("nonfinite_gradient", cause, run)


def divergence(run: SavedRun) -> str:
    """Warn of finite losses far above the first; empty if there are none."""
    first, last, worst = run.window.first_loss, run.window.last_loss, run.window.worst_loss
    if first is None or last is None:
        return ""
    # A loss below one nat has not diverged, however small the first loss was.
    limit = _DIVERGED_FACTOR * max(first, 1.0)
    rose = f", rose to {worst:.4g}" if worst > first else ""
    message = f"the run diverged: its training loss began at {first:.4g}{rose} and ended at {last:.4g}"
    if last > limit or (worst > limit and last > _LEARNED * first):
        return f"{message}; {_remedy(run)}."
    held_out = {name: each.get("loss", first) for name, each in run.progress.last.items()}
    ended = next((f"{loss:.4g} ({name} weights)" for name, loss in held_out.items() if loss > limit), "")
    return f"{message}, but the held-out loss is {ended}; {_remedy(run)}." if ended else ""


def _remedy(run: SavedRun | RecordedRun) -> str:
    return _OWN_REMEDY if run.recipe.task == OWN_LOOP else _REMEDY


def _failure(incident: str, cause: str, run: SavedRun | RecordedRun) -> TrainingError:
    """Record the error that ends the run, and return it to be raised."""
    run.recorder.incident(incident, f"{cause}; the run ends.")
    run.recorder.flush()
    return TrainingError(f"{cause}; {_remedy(run)}. {run.last_good}")


def _wrong_metrics(task: Task | None, results: Results) -> str:
    """Name what is not finite."""
    return " and ".join(
        f"the held-out {name.replace('_', ' ')} ({weights} weights) is {values[name]}"
        for weights, values in results.items()
        for name in not_finite(task, values)
    )


def not_finite(task: Task | None, metrics: Mapping[str, float]) -> tuple[str, ...]:
    """Return the names of the metrics that are infinite or nan.

    A collected metric may be nan, which means that it is undefined: the area under a curve of one class only.
    """
    collected = {metric.name for metric in task.measured if metric.is_collected} if task else set()
    return tuple(
        name for name, value in metrics.items() if math.isinf(value) or (math.isnan(value) and name not in collected)
    )
