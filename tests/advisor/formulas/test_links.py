"""Messages among devices in nodes: by which algorithm, over which links."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline_advisor.clusters import Link
from paceline_advisor.formulas.catalogue import find_formula
from paceline_advisor.formulas.scaling import (
    Fabric,
    halving_doubling_all_reduce_seconds,
    ring_all_reduce_seconds,
)

NODE = Fabric(
    devices=8,
    per_node=8,
    within=Link(100e9, 5e-6),
    network=Link(25e9, 10e-6),
)


def test_one_device_sends_nothing() -> None:
    alone = replace(NODE, devices=1)
    assert alone.all_reduce_seconds(1e9) == 0
    assert alone.all_gather_seconds(1e9) == 0


def test_a_large_message_takes_the_bandwidth_optimum() -> None:
    # 2 (p - 1) / p of the message passes each device's link.
    assert NODE.all_reduce_seconds(1e9) == pytest.approx(2 * 7 / 8 * 1e9 / 100e9, rel=0.01)
    assert NODE.all_gather_seconds(1e9) == pytest.approx(7 / 8 * 1e9 / 100e9, rel=0.01)


def test_a_small_message_takes_the_algorithm_with_fewest_hops() -> None:
    expected = halving_doubling_all_reduce_seconds(64, 8, 100e9, 5e-6)
    assert NODE.all_reduce_seconds(64) == pytest.approx(expected)
    assert replace(NODE, algorithm="ring").all_reduce_seconds(64) == ring_all_reduce_seconds(64, 8, 100e9, 5e-6)
    assert replace(NODE, algorithm="ring").all_reduce_seconds(64) > expected


def test_nodes_share_their_network_among_their_devices() -> None:
    four = replace(NODE, devices=32, algorithm="ring")
    # Within 100 GB/s and between nodes 25 GB/s for all eight devices of a node; latencies differ, and are left out.
    four = replace(
        four, within=replace(four.within, latency_seconds=0), network=replace(four.network, latency_seconds=0)
    )
    assert four.nodes == 4
    expected = find_formula("two_level_all_reduce_seconds").function(1e9, 8, 4, 100e9, 25e9)
    assert four.all_reduce_seconds(1e9) == pytest.approx(expected)
    # Each node's network carries 2 (m - 1) / m of the whole message.
    assert expected == pytest.approx(2 * 7 / 8 * 1e9 / 100e9 + 2 * 3 / 4 * 1e9 / 25e9)
    assert four.all_gather_seconds(1e9) == pytest.approx(expected / 2)


def test_a_node_that_is_not_full_counts_as_one() -> None:
    assert replace(NODE, devices=9).nodes == 2
