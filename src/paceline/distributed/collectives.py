"""How do the processes of a run agree? A few verbs that are the identity in a world of one."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from paceline.distributed.environment import Launch
from paceline.errors import LaunchError, PacelineError
from paceline.world import World

T = TypeVar("T")


class Collectives:
    """The collectives outside the training step. Every rank must call them in the same order."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._alone = world.world_size == 1

    def reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over processes, in place."""
        if not self._alone:
            torch.distributed.all_reduce(tensor)
        return tensor

    def broadcast(self, value: T) -> T:
        """Give every rank the first rank's value (any picklable object of our own making)."""
        if self._alone:
            return value
        box = [value]
        torch.distributed.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, value: T) -> list[T]:
        """Give every rank the values of all ranks, in rank order."""
        if self._alone:
            return [value]
        values: list[Any] = [None] * self.world.world_size
        torch.distributed.all_gather_object(values, value)
        return values

    def broadcast_tensors(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrite tensors with the first rank's."""
        if not self._alone:
            for tensor in tensors:
                torch.distributed.broadcast(tensor, src=0)

    def on_first(self, action: Callable[[], T]) -> T:
        """Run on the first rank alone; its result, or its error, reaches every rank alike.

        An error without a message for the user is raised as it is on the first rank, and named on the others.
        """
        outcome: tuple[T | None, PacelineError | None] = (None, None)
        if self.world.is_first:
            try:
                outcome = (action(), None)
            except PacelineError as error:
                outcome = (None, error)
            except Exception as error:
                self.broadcast((None, LaunchError(f"the first process failed: {error!r}")))
                raise
        result, failure = self.broadcast(outcome)
        if failure is not None:
            raise failure
        return result  # type: ignore[return-value]  # None only where T is None

    def barrier(self) -> None:
        """Wait for all ranks."""
        if not self._alone:
            torch.distributed.barrier()


def join(launch: Launch, device: torch.device, *, timeout_seconds: float = 1800) -> Collectives:
    """Form the process group of this world: NCCL for CUDA devices, gloo for the CPU, XCCL for XPU.

    Raises:
        LaunchError: If the processes do not find one another.
    """
    world = launch.world
    if world.world_size > 1 and not torch.distributed.is_initialized():
        try:
            torch.distributed.init_process_group(
                torch.distributed.get_default_backend_for_device(device),
                init_method=launch.rendezvous,
                rank=world.rank,
                world_size=world.world_size,
                timeout=dt.timedelta(seconds=timeout_seconds),
                device_id=device if device.type == "cuda" else None,
            )
        except (RuntimeError, ValueError) as error:
            raise LaunchError(
                f"rank {world.rank} of {world.world_size} could not join the others at {launch.rendezvous}: "
                f"{' '.join(str(error).split())[:300]}"
            ) from error
    return Collectives(world)


def leave() -> None:
    """Dissolve the process group, if there is one."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
