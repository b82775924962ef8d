"""Who computes which point? Each is computed whole by one process, so that no number of them changes a bit of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.distributed.collectives import Collectives
from paceline_advisor.landscape.surface import Work


def share_out(work: Sequence[Work], collectives: Collectives) -> list[Any]:
    """What each piece of work gives, in order; a collective.

    An error for the user in one process is raised in all of them.

    Args:
        work: The same list on every process; process r does every world-size-th piece, from the r-th on.
        collectives: The processes.
    """
    world = collectives.world
    mine = collectives.on_all(lambda: [each() for each in work[world.rank :: world.world_size]])
    parts = collectives.gather(mine)
    return [parts[number % world.world_size][number // world.world_size] for number in range(len(work))]
