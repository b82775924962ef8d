"""Processes of one launch find one another in a store that earlier launches have left their traces in."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from paceline.distributed.collectives import agents_store, launch_store
from paceline.distributed.environment import read_launch
from paceline.errors import LaunchError
from paceline.host.world import World


@pytest.fixture
def server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def client(server: dist.TCPStore) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", server.port, is_master=False)


def meet(server: dist.TCPStore, ranks: list[int], size: int, seconds: float = 20) -> list[dist.Store]:
    worlds = [World(rank=rank, world_size=size, local_rank=rank, local_world_size=size) for rank in ranks]
    with ThreadPoolExecutor(len(ranks)) as pool:
        joining = [pool.submit(launch_store, client(server), w, timeout=timedelta(seconds=seconds)) for w in worlds]
        return [each.result() for each in joining]


def test_all_share_one_part(server: dist.TCPStore) -> None:
    parts = meet(server, [0, 1, 2], 3)
    parts[2].set("address", "here")
    assert [part.get("address") for part in parts] == [b"here"] * 3


def test_what_an_earlier_launch_left_is_not_seen(server: dist.TCPStore) -> None:
    for size in (3, 2, 4):
        parts = meet(server, list(range(size)), size)
        assert not any(part.check(["address"]) for part in parts)
        parts[-1].set("address", "of this launch")
        assert parts[0].get("address") == b"of this launch"


def test_a_rank_that_died_while_meeting_is_replaced(server: dist.TCPStore) -> None:
    with pytest.raises(LaunchError, match=r"rank 0 did not answer rank 1 within"):
        meet(server, [1], 3, seconds=0.5)
    parts = meet(server, [0, 1, 2], 3)
    parts[1].set("address", "new")
    assert parts[0].get("address") == b"new"


def test_the_missing_are_named(server: dist.TCPStore) -> None:
    with pytest.raises(LaunchError, match=r"rank\(s\) 1, 3 of 4 did not arrive within"):
        meet(server, [0, 2], 4, seconds=5)


def test_alone_there_is_nobody_to_wait_for(server: dist.TCPStore) -> None:
    (part,) = meet(server, [0], 1)
    part.set("a", "b")


def test_a_store_is_found_by_its_address(server: dist.TCPStore) -> None:
    part = agents_store(f"127.0.0.1:{server.port}", World(), timeout=timedelta(seconds=20))
    part.set("a", "b")
    assert part.get("a") == b"b"


AMONG_TWO = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node1.site", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(("kept", "store"), [("True", "node1.site:29500"), ("False", None)])
def test_who_keeps_a_store(kept: str, store: str | None) -> None:
    assert read_launch({**AMONG_TWO, "TORCHELASTIC_USE_AGENT_STORE": kept}).store == store
    assert read_launch(AMONG_TWO).store is None
