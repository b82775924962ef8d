"""Where do the processes of this launch meet, and not those of an earlier one that used the same store?

torchrun's store outlives its workers: after a restart the addresses of the dead are still in it, and a process that
reads one waits for a peer that is gone. The processes of a launch therefore first agree on a name that is new, and
keep everything else under it.
"""

from __future__ import annotations

import secrets
import time
from datetime import timedelta

from torch.distributed import DistError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # not in __all__

from paceline.errors import LaunchError
from paceline.world import World

_POLL_SECONDS = 0.02


def agents_store(address: str, world: World, *, timeout: timedelta) -> Store:
    """Connect to the store that torchrun's agent keeps and return the part of it that is this launch's alone.

    Args:
        address: HOST:PORT of the store.
        world: This process's place.
        timeout: How long to wait for the store, and for the other processes.

    Raises:
        LaunchError: If not all processes come before the timeout; names those that did not.
    """
    host, _, port = address.rpartition(":")
    return fresh_part(TCPStore(host, int(port), is_master=False, timeout=timeout), world, timeout=timeout)


def fresh_part(store: Store, world: World, *, timeout: timedelta) -> Store:
    """Agree with the other processes of this launch on a new name, and return what the store keeps under it.

    Every process shows a token; the first answers each token with the name, and waits until all have read it. A
    token left by a process that is gone is answered too, in vain: its successor's replaces it.

    Raises:
        LaunchError: If not all processes come before the timeout; names those that did not.
    """
    meeting = PrefixStore("paceline", store)
    name = _name_launch(meeting, world, timeout) if world.is_first else _learn_name(meeting, world, timeout)
    return PrefixStore(name, store)


def _name_launch(meeting: Store, world: World, timeout: timedelta) -> str:
    name, answered = secrets.token_hex(8), dict[int, bytes]()
    others = range(1, world.world_size)
    deadline = time.monotonic() + timeout.total_seconds()
    while missing := [rank for rank in others if not meeting.check([f"{name}/{rank}"])]:
        for rank in missing:
            if meeting.check([f"token/{rank}"]) and (token := meeting.get(f"token/{rank}")) != answered.get(rank):
                meeting.set(f"answer/{token.decode()}", name)
                answered[rank] = token
        if time.monotonic() > deadline:
            raise LaunchError(
                f"rank(s) {', '.join(map(str, missing[:8]))} of {world.world_size} did not come within "
                f"{timeout.total_seconds():.0f} s; look for their errors, and whether their hosts reach this one."
            )
        time.sleep(_POLL_SECONDS)
    return name


def _learn_name(meeting: Store, world: World, timeout: timedelta) -> str:
    token = secrets.token_hex(8)
    meeting.set(f"token/{world.rank}", token)
    try:
        meeting.wait([f"answer/{token}"], timeout)
    except DistError as error:
        raise LaunchError(
            f"rank 0 did not answer rank {world.rank} within {timeout.total_seconds():.0f} s; look for its error."
        ) from error
    name: str = meeting.get(f"answer/{token}").decode()
    meeting.set(f"{name}/{world.rank}", "here")
    return name
