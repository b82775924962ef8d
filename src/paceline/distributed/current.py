"""The world that a script finds itself in, whoever has started its processes and formed their group."""

from __future__ import annotations

import os

import torch

from paceline.distributed.collectives import Collectives
from paceline.distributed.environment import read_launch
from paceline.errors import LaunchError
from paceline.host.world import World
from paceline.parsing.arguments import whole


def current_world(rank: int | None = None, world_size: int | None = None) -> World:
    """Return the given world; what is not given comes from the process group, else from the environment, else is alone.

    Raises:
        LaunchError: If there is no such rank, or only one of RANK and WORLD_SIZE is set.
    """
    if rank is None or world_size is None:
        if is_joined():
            found = World(rank=torch.distributed.get_rank(), world_size=torch.distributed.get_world_size())
        else:
            found = read_launch(os.environ).world
        rank = found.rank if rank is None else rank
        world_size = found.world_size if world_size is None else world_size
    world_size = whole("world_size", world_size, 1, error=LaunchError)
    if whole("rank", rank, error=LaunchError) >= world_size:
        rule = f"a rank from 0 to {world_size - 1}"
        message = f"rank={rank} is not one of {world_size} rank(s): give {rule}."
        raise LaunchError(message, key="rank", value=rank, rule=rule)
    return World(rank=rank, world_size=world_size)


def current_collectives() -> Collectives:
    """Return the collectives of the process group; alone, they do nothing.

    Raises:
        LaunchError: If the environment names several ranks that have not formed a group.
    """
    world = current_world()
    if world.world_size > 1 and not is_joined():
        raise LaunchError(
            f"this is rank {world.rank} of {world.world_size}, which have not formed a process group: call "
            "torch.distributed.init_process_group first."
        )
    return Collectives(world)


def is_joined() -> bool:
    """Whether this process is in a process group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()
