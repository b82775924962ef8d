"""How do gradients travel as products of two thin matrices, so that what is lost in one step is made up for later?

PowerSGD (Vogels, Karimireddy, Jaggi 2019): each weight's gradient, as a matrix M, is sent as P and Q with few columns,
found by one step of power iteration from the last step's Q. What M loses, each process adds to its own next gradient.
torch has a hook for it, whose memory hangs on DDP's buckets, and which cannot take filters whose channels come last;
here it hangs on parameters, by name, so that it can be saved and restored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # torch leaves it out of __all__
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from paceline.distributed.collectives import Collectives
from paceline.distributed.strategy import NoStopwatch, Stopwatch

# A matrix is sent as P and Q if they have at most half as many numbers.
_WORTHWHILE = 2


class PowerSgd:
    """A communication hook of DDP, and the component of a checkpoint that remembers for it.

    The collectives of a bucket are waited for inside the hook, one after the other: their order must be the same on all
    processes, and where they end is left to threads.

    Args:
        network: The bare network.
        collectives: The processes.
        rank: Columns of P and Q.
        start_step: Steps whose gradients are sent whole, since they are the ones that change most.

    Attributes:
        stopwatch: Told of the waiting inside the hook.
    """

    def __init__(self, network: nn.Module, collectives: Collectives, *, rank: int, start_step: int) -> None:
        self._collectives = collectives
        self._rank = rank
        self._start = start_step
        self._names = {id(parameter): name for name, parameter in network.named_parameters()}
        self.stopwatch: Stopwatch = NoStopwatch()
        self._steps = 0
        self._is_training = False
        self._factors: dict[str, Tensor] = {}
        self._errors: dict[str, Tensor] = {}
        self._gathered: list[Mapping[str, Tensor]] = []

    def begin_step(self) -> None:
        """From here on gradients are a step's, and not those of a rehearsal."""
        self._is_training = True

    def end_step(self) -> None:
        """The step's gradients were sent."""
        self._steps += 1

    def hook(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Make a bucket's gradients their mean over the processes, or what P and Q keep of it."""
        if not self._is_training or self._steps < self._start:
            return default_hooks.allreduce_hook(None, bucket)  # type: ignore[arg-type]  # None: all processes
        with torch.no_grad():
            self._reduce(bucket)
        done: torch.futures.Future[Tensor] = torch.futures.Future(
            devices=[] if bucket.buffer().device.type == "cpu" else [bucket.buffer().device]
        )
        done.set_result(bucket.buffer())
        return done

    def gather(self) -> None:
        """Collect every process's errors on the first one, for :meth:`state_dict`; a collective."""
        self._gathered = self._collectives.gather_on_first({name: each.cpu() for name, each in self._errors.items()})

    def state_dict(self) -> dict[str, Any]:
        """The steps seen, the last Q of each parameter, and everyone's errors, if they have just been gathered."""
        everyones = {str(rank): dict(errors) for rank, errors in enumerate(self._gathered) if errors}
        self._gathered = []  # as large as the network, for each process
        return {"steps": self._steps, "factors": dict(self._factors), "errors": everyones}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take this process's errors; in another world, everyone's mean, which is what a mean gradient lacks."""
        self._steps, self._factors = int(state["steps"]), dict(state["factors"])
        errors, world = state["errors"], self._collectives.world
        if len(errors) == world.world_size:
            self._errors = dict(errors[str(world.rank)])
        elif errors:
            self._errors = {
                name: torch.stack([one[name] for one in errors.values()]).mean(dim=0)
                for name in next(iter(errors.values()))
            }

    def _reduce(self, bucket: GradBucket) -> None:
        whole: list[Tensor] = []
        matrices: list[tuple[str, Tensor, Tensor]] = []
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            name = self._names.get(id(parameter))
            if name is None or not self._is_worthwhile(gradient):
                whole.append(gradient)
                continue
            matrix = gradient.reshape(gradient.shape[0], -1).clone()
            if name in self._errors:
                matrix += self._errors[name].to(matrix.device)
            matrices.append((name, gradient, matrix))
        self._mean(whole)
        if matrices:
            self._compress(matrices)

    def _compress(self, matrices: list[tuple[str, Tensor, Tensor]]) -> None:
        left = [matrix @ self._factor(name, matrix) for name, _, matrix in matrices]
        self._mean(left)
        left = [torch.linalg.qr(each).Q for each in left]
        right = [matrix.T @ each for (_, _, matrix), each in zip(matrices, left, strict=True)]
        self._mean(right)
        for (name, gradient, matrix), p, q in zip(matrices, left, right, strict=True):
            kept = p @ q.T
            self._factors[name], self._errors[name] = q, matrix - kept
            gradient.copy_(kept.view(gradient.shape))

    def _mean(self, tensors: list[Tensor]) -> None:
        """Make tensors the mean over all processes, in place, in one collective."""
        if not tensors:
            return
        flat = torch.cat([each.reshape(-1) for each in tensors])
        flat.div_(self._collectives.world.world_size)
        with self.stopwatch.span("communication"):
            self._collectives.reduce_sum(flat)
        for each, mean in zip(tensors, torch.split(flat, [one.numel() for one in tensors]), strict=True):
            each.copy_(mean.view(each.shape))

    def _factor(self, name: str, matrix: Tensor) -> Tensor:
        """The last step's Q; at first, and if the rank has changed, a random one that is the same everywhere."""
        shape = (matrix.shape[1], min(self._rank, *matrix.shape))
        known = self._factors.get(name)
        if known is not None and known.shape == shape:
            return known.to(matrix.device)
        generator = torch.Generator().manual_seed(0)
        return torch.randn(shape, generator=generator).to(matrix)

    def _is_worthwhile(self, gradient: Tensor) -> bool:
        if gradient.dim() < 2:
            return False
        rows, columns = gradient.shape[0], math.prod(gradient.shape[1:])
        return (rows + columns) * min(self._rank, rows, columns) * _WORTHWHILE <= rows * columns
