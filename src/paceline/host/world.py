"""The rank of this process and the size of the world.

Rank and world size are passed as this value, not queried from a process group, so that order, plans and pipelines for
64 ranks can be tested in one process.
"""

from __future__ import annotations

from dataclasses import dataclass

# The command line that a user typed, for the ranks that it starts, which record it.
COMMAND_VARIABLE = "PACELINE_COMMAND"


@dataclass(frozen=True, kw_only=True)
class World:
    """The rank of one process among all processes of a run.

    Attributes:
        rank: Index among all processes, in [0, world_size).
        local_rank: Index among the processes on this machine; selects the GPU.
        world_size: Number of processes over all machines.
        local_world_size: Number of processes on this machine; they share its cores.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is outside a world of {self.world_size}")
        if not 0 <= self.local_rank < self.local_world_size:
            raise ValueError(f"local rank {self.local_rank} is outside a machine of {self.local_world_size} processes")
        if self.local_world_size > self.world_size:
            raise ValueError(f"{self.local_world_size} processes on this machine, but {self.world_size} in all")

    @property
    def is_first(self) -> bool:
        """Whether this is the one process that writes records, checkpoints and progress."""
        return self.rank == 0
