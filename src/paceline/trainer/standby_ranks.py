"""Ranks that cannot share the global batch stand by.

Where nodes come and go, as many processes train as can share the batch evenly. The others wait until torchrun starts
all again because a node has gone or come.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from paceline.distributed.environment import Launch
from paceline.errors import RunDirectoryError
from paceline.plan.batching import usable_processes
from paceline.recipe.schema import Recipe
from paceline.records.reader import Summary, read_summary
from paceline.records.run_directory import RunDirectory
from paceline.world import World


def without_standby_ranks(launch: Launch, recipe: Recipe) -> Launch | None:
    """The launch of those that train; None if this process is not among them.

    A launch whose size is fixed stays as it is: the plan refuses one that does not fit.
    """
    world = launch.world
    usable = usable_processes(recipe, 1, world.world_size)
    if not launch.changes_size or not usable or usable[0] == world.world_size:
        return launch
    size = usable[0]
    if world.rank >= size:
        return None
    # torchrun numbers the processes of a machine one after another.
    first_here = world.rank - world.local_rank
    trained = World(
        rank=world.rank,
        local_rank=world.local_rank,
        world_size=size,
        local_world_size=min(world.local_world_size, size - first_here),
    )
    return replace(launch, world=trained)


def elastic_notices(launch: Launch, training: Launch) -> tuple[str, ...]:
    """What the user should know of a launch whose hosts come and go, or come back."""
    notices = []
    came, size = launch.world.world_size, training.world.world_size
    if came != size:
        notices.append(
            f"{size} of {came} processes train: no more of them can share the global batch evenly; the others wait"
        )
    several_hosts = launch.world.local_world_size < launch.world.world_size
    if launch.store is not None and (launch.changes_size or (launch.comes_again is not None and several_hosts)):
        # Seen with torch 2.14: a host that joins later waits for an address that only the first round was told.
        notices.append(
            f"with {launch.comes_again} set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 where torchrun is started: otherwise "
            "hosts that join later, or again, do not find the others"
        )
    return tuple(notices)


def wait_for_training(run_dir: Path, *, poll_seconds: float = 1, patience_seconds: float = 60) -> Summary:
    """On a standby rank: wait until the run is complete. A signal ends it as any program.

    Args:
        run_dir: The directory that all hosts share.
        poll_seconds: How often to look.
        patience_seconds: A summary that was there before, and stays so long, is not an earlier launch's: nothing is
            left to do. One that is to be trained longer loses its summary before.
    """
    directory = RunDirectory(run_dir)
    begun = time.monotonic()
    earlier = _completed(directory)
    while True:
        found = _completed(directory)
        if found is None:
            earlier = None
        elif found != earlier or time.monotonic() - begun > patience_seconds:
            return found
        time.sleep(poll_seconds)


def _completed(directory: RunDirectory) -> Summary | None:
    try:
        summary = read_summary(directory)
    except RunDirectoryError:  # not there, or seen by this host while it was replaced
        return None
    return summary if summary.status == "completed" else None
