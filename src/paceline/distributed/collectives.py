"""Collectives of the run's processes; with one process they do nothing.

A process that waits in one is inside torch, where Python's signal handlers do not run: if its peer never comes, or
hangs, it would ignore signals until the timeout. :class:`ExitOnSignal` lets it stop on request.
"""

from __future__ import annotations

import datetime as dt
import gc
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch.distributed import DistError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # not in __all__

from paceline.distributed.environment import LaunchEnvironment
from paceline.distributed.local_launch import report_error
from paceline.errors import LaunchError, OtherProcessError, PacelineError, StoppedError
from paceline.host.system import STOP_SIGNALS, blocked_signals
from paceline.host.world import World

# The peers may be about to arrive: then the run stops in order, after its first step.
_GRACE_SECONDS = 3.0


class ExitOnSignal:
    """Ends this process if it still waits some seconds after a stop signal; until :meth:`close`.

    Only for use while there is nothing to save. A signal without a Python handler ends the process anyway.
    """

    def __init__(self, world: World) -> None:
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        if world.world_size == 1 or threading.current_thread() is not threading.main_thread():
            return
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        previous = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        if previous != -1:  # belongs to an event loop, which needs it
            signal.set_wakeup_fd(previous)
            os.close(self._read)
            os.close(self._write)
            return
        self._thread = threading.Thread(target=self._watch, name="stop-while-waiting", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Restore the signal handlers."""
        if self._thread is None:
            return
        signal.set_wakeup_fd(-1)
        self._closed.set()
        # Closing it would not wake the reader while a child process also holds the other end.
        with suppress(BlockingIOError):
            os.write(self._write, b"\0")
        self._thread.join()
        os.close(self._write)
        os.close(self._read)
        self._thread = None

    def _watch(self) -> None:
        number = 0
        while number not in STOP_SIGNALS and not self._closed.is_set():
            number = os.read(self._read, 1)[0]
        if self._closed.wait(_GRACE_SECONDS):
            return
        name = signal.Signals(number).name
        error = StoppedError(f"stopped by {name} while waiting for the other processes; run the same command again.")
        code = report_error(error, os.environ)
        sys.stderr.flush()
        os._exit(code)


_POLL_SECONDS = 0.02


def agents_store(address: str, world: World, *, timeout: timedelta) -> Store:
    """Connect to the store of torchrun's agent and return a view of it that is private to this launch.

    Args:
        address: HOST:PORT of the store.
        world: This process's rank and the world size.
        timeout: How long to wait for the store, and for the other processes.

    Raises:
        LaunchError: If not all processes arrive before the timeout; names the missing ones.
    """
    host, _, port = address.rpartition(":")
    return launch_store(TCPStore(host, int(port), is_master=False, timeout=timeout), world, timeout=timeout)


def launch_store(store: Store, world: World, *, timeout: timedelta) -> Store:
    """Agree with the other processes of this launch on a new name, and return the store under that prefix.

    Every process publishes a token; the first answers each token with the name, and waits until all have read it. A
    dead process's token is answered too, without effect: its successor's replaces it.

    Raises:
        LaunchError: If not all processes arrive before the timeout; names the missing ones.
    """
    rendezvous = PrefixStore("paceline", store)
    name = _publish_name(rendezvous, world, timeout) if world.is_first else _receive_name(rendezvous, world, timeout)
    return PrefixStore(name, store)


def _publish_name(rendezvous: Store, world: World, timeout: timedelta) -> str:
    name, answered = secrets.token_hex(8), dict[int, bytes]()
    others = range(1, world.world_size)
    deadline = time.monotonic() + timeout.total_seconds()
    while missing := [rank for rank in others if not rendezvous.check([f"{name}/{rank}"])]:
        for rank in missing:
            if rendezvous.check([f"token/{rank}"]) and (token := rendezvous.get(f"token/{rank}")) != answered.get(rank):
                rendezvous.set(f"answer/{token.decode()}", name)
                answered[rank] = token
        if time.monotonic() > deadline:
            raise LaunchError(
                f"rank(s) {', '.join(map(str, missing[:8]))} of {world.world_size} did not arrive within "
                f"{timeout.total_seconds():.0f} s; look for their errors, and "
                f"check that their hosts can reach this one."
            )
        time.sleep(_POLL_SECONDS)
    return name


def _receive_name(rendezvous: Store, world: World, timeout: timedelta) -> str:
    token = secrets.token_hex(8)
    rendezvous.set(f"token/{world.rank}", token)
    try:
        rendezvous.wait([f"answer/{token}"], timeout)
    except DistError as error:
        raise LaunchError(
            f"rank 0 did not answer rank {world.rank} within {timeout.total_seconds():.0f} s; look for its error."
        ) from error
    name: str = rendezvous.get(f"answer/{token}").decode()
    rendezvous.set(f"{name}/{world.rank}", "here")
    return name


T = TypeVar("T")

# Bytes that one broadcast of many tensors sends at a time: they are copied for it.
_BROADCAST_BYTES = 256 * 2**20

# Groups created here; a group that the caller created stays the caller's.
_created_groups: list[object] = []


class Collectives:
    """The collectives outside the training step. Every rank must call them in the same order."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._is_single = world.world_size == 1

    def reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over processes, in place."""
        if not self._is_single:
            torch.distributed.all_reduce(tensor)
        return tensor

    def broadcast(self, value: T) -> T:
        """Return the first rank's value (any picklable object created by Paceline) on every rank."""
        if self._is_single:
            return value
        values = [value]
        torch.distributed.broadcast_object_list(values, src=0)
        return values[0]

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order, on every rank."""
        if self._is_single:
            return [value]
        values: list[Any] = [None] * self.world.world_size
        torch.distributed.all_gather_object(values, value)
        return values

    def gather_on_rank_zero(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order, on the first rank; the others receive nothing."""
        if self._is_single:
            return [value]
        values: list[Any] | None = [None] * self.world.world_size if self.world.is_first else None
        torch.distributed.gather_object(value, values, dst=0)
        return values or []

    def broadcast_tensors(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrite tensors of one device with the first rank's, packing as many as fit into each broadcast."""
        if self._is_single:
            return
        waiting: list[torch.Tensor] = []
        size = 0
        for tensor in tensors:
            waiting.append(tensor)
            size += tensor.nbytes
            if size >= _BROADCAST_BYTES:
                self._broadcast_packed(waiting)
                waiting, size = [], 0
        if waiting:
            self._broadcast_packed(waiting)

    def _broadcast_packed(self, tensors: list[torch.Tensor]) -> None:
        # Widest elements first, so that each piece of the buffer is aligned for its dtype.
        ordered = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
        with torch.no_grad():
            pieces = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in ordered]
            flat = torch.cat(pieces)
            torch.distributed.broadcast(flat, src=0)
            if self.world.is_first:
                return
            for tensor, piece in zip(ordered, torch.split(flat, [piece.numel() for piece in pieces]), strict=True):
                tensor.copy_(piece.view(tensor.dtype).view(tensor.shape))

    def on_rank_zero(self, action: Callable[[], T]) -> T:
        """Run on the first rank only; every rank receives its result or raises its error.

        An error that is not a PacelineError is raised unchanged on the first rank, and named on the others.

        Raises:
            OtherProcessError: On the others, for such an error.
        """
        outcome: tuple[T | None, PacelineError | None] = (None, None)
        if self.world.rank == 0:
            try:
                outcome = (action(), None)
            except PacelineError as error:
                outcome = (None, error)
            except Exception as error:
                self.broadcast((None, OtherProcessError(f"the first process failed: {error!r}")))
                raise
        result, failure = self.broadcast(outcome)
        if failure is not None:
            raise failure
        return result  # type: ignore[return-value]  # None only where T is None

    def on_all_ranks(self, action: Callable[[], T]) -> T:
        """Run on every rank; a PacelineError on any of them is raised on all, the lowest rank's first.

        Any other error is raised unchanged where it occurs, and named on the other ranks.

        Raises:
            OtherProcessError: On the others, for such an error.
        """
        if self._is_single:
            return action()
        failure: PacelineError | None = None
        try:
            result = action()
        except PacelineError as error:
            failure = error
        except Exception as error:
            self.gather(OtherProcessError(f"rank {self.world.rank} failed: {error!r}"))
            raise
        for each in self.gather(failure):
            if each is not None:
                raise each
        return result

    def barrier(self) -> None:
        """Wait for all ranks."""
        if not self._is_single:
            torch.distributed.barrier()


def join(
    launch: LaunchEnvironment, device: torch.device, *, timeout_seconds: float = 600, backend: str = "auto"
) -> Collectives:
    """Form the process group of this world.

    An existing group is used unchanged.

    Args:
        launch: This process's rank, the world size and the rendezvous.
        device: The device of the tensors to exchange.
        timeout_seconds: How long to wait for the others, here and in every collective.
        backend: Name of torch's back-end; ``auto``: NCCL for CUDA devices, gloo for the CPU, XCCL for XPU.

    Raises:
        LaunchError: If the processes cannot connect, or the existing group has another size.
    """
    world = launch.world
    if _is_joined():
        group_size = torch.distributed.get_world_size()
        if group_size != world.world_size:
            raise LaunchError(
                f"this process is in a process group of {group_size}, but the environment describes a world of "
                f"{world.world_size}; set RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE to what the group is."
            )
    elif world.world_size > 1:
        timeout = dt.timedelta(seconds=timeout_seconds)
        try:
            # torch prints a stack if a signal interrupts its wait.
            with closing(ExitOnSignal(world)), blocked_signals():
                # A URL, or the store of torchrun's agent.
                store = None if launch.store is None else agents_store(launch.store, world, timeout=timeout)
                torch.distributed.init_process_group(
                    torch.distributed.get_default_backend_for_device(device) if backend == "auto" else backend,
                    init_method=launch.rendezvous if store is None else None,
                    store=store,
                    rank=world.rank,
                    world_size=world.world_size,
                    timeout=timeout,
                    device_id=device if device.type == "cuda" else None,
                )
        except (RuntimeError, ValueError) as error:
            raise LaunchError(
                f"rank {world.rank} of {world.world_size} could not join the others at "
                f"{launch.store or launch.rendezvous}: "
                f"{' '.join(str(error).split())[:300]}"
            ) from error
        _created_groups.append(torch.distributed.group.WORLD)
    return Collectives(world)


def open_store(name: str) -> Store | None:
    """Return a part of the group's store, over a separate connection; None in a world of one."""
    if not _is_joined():
        return None
    # Torch has no public access to the store of a group that it formed from a URL.
    shared = torch.distributed.distributed_c10d._get_default_store()  # noqa: SLF001
    return PrefixStore(name, shared.clone())


def leave() -> None:
    """Destroy the process group if :func:`join` formed it.

    Objects that still hold it (a replica, in a reference cycle) are released first: the group's threads end with its
    last holder, and a thread that outlives the interpreter aborts the process when it touches a Python object.
    """
    if _is_joined() and torch.distributed.group.WORLD in _created_groups:
        gc.collect()
        torch.distributed.destroy_process_group()
    _created_groups.clear()


def _is_joined() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
