"""A process's place is a value, and an impossible one cannot be made."""

from __future__ import annotations

import dataclasses

import pytest

from paceline.host.world import World


def test_alone_by_default_and_only_rank_zero_is_first() -> None:
    assert World() == World(rank=0, local_rank=0, world_size=1, local_world_size=1)
    places = [World(rank=rank, world_size=4) for rank in range(4)]
    assert [place.is_first for place in places] == [True, False, False, False]
    # First of its machine, but not of the run.
    assert not World(rank=4, local_rank=0, world_size=8, local_world_size=4).is_first


IMPOSSIBLE = [{"rank": 1}, {"rank": -1}, {"rank": 4, "world_size": 4}, {"world_size": 0}]
IMPOSSIBLE += [{"rank": 1, "world_size": 4, "local_world_size": 2, "local_rank": 2}]
IMPOSSIBLE += [{"world_size": 2, "local_world_size": 3}]


@pytest.mark.parametrize("place", IMPOSSIBLE)
def test_an_impossible_place_is_refused(place: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"\d"):
        World(**place)


def test_a_place_does_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        World().rank = 1  # type: ignore[misc]
