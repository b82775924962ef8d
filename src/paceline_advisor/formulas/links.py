"""How long do a step's messages take between these devices, over which links and by which algorithm?

Plain numbers; the algorithms themselves stand in :mod:`paceline_advisor.formulas.scaling`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from paceline_advisor.formulas.scaling import (
    all_gather_seconds,
    halving_doubling_all_reduce_seconds,
    ring_all_reduce_seconds,
    tree_all_reduce_seconds,
)

_AllReduce = Callable[[float, int, float, float], float]
ALL_REDUCES: Mapping[str, _AllReduce] = MappingProxyType(
    {
        "ring": ring_all_reduce_seconds,
        "tree": tree_all_reduce_seconds,
        "halving-doubling": halving_doubling_all_reduce_seconds,
    }
)


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """Devices in nodes, every node with as many.

    Attributes:
        devices: All of them.
        per_node: Those of one node; all of them if there is one node.
        within_bytes_per_second: Between a node's devices, for each.
        within_latency_seconds: Of one message there.
        network_bytes_per_second: Between nodes, for a whole node.
        network_latency_seconds: Of one message there.
        algorithm: One of :data:`ALL_REDUCES`; None for whichever is fastest for a message, as NCCL chooses.
    """

    devices: int
    per_node: int
    within_bytes_per_second: float
    within_latency_seconds: float
    network_bytes_per_second: float
    network_latency_seconds: float
    algorithm: str | None = None

    @property
    def nodes(self) -> int:
        """Number of nodes, the last one perhaps not full."""
        return -(-self.devices // self.per_node)

    def all_reduce_seconds(self, message_bytes: float) -> float:
        """Time until every device has the sum of a message of this size.

        Between nodes, each device passes its part of the node's sum to its like on the others; the node's network is
        shared by its devices.

        Source:
            Goyal et al., arXiv:1706.02677, section 4; NCCL's documentation.
        """
        if self.devices == 1:
            return 0.0
        local = min(self.devices, self.per_node)
        if self.nodes == 1:
            return self._fastest(message_bytes, local, self.within_bytes_per_second, self.within_latency_seconds)
        inside = 2 * self._within(message_bytes, local)
        rate = self.network_bytes_per_second / local
        return inside + self._fastest(message_bytes / local, self.nodes, rate, self.network_latency_seconds)

    def all_gather_seconds(self, message_bytes: float) -> float:
        """Time until every device has a message of which each had its part; a reduce-scatter takes as long."""
        if self.devices == 1:
            return 0.0
        local = min(self.devices, self.per_node)
        if self.nodes == 1:
            return self._within(message_bytes, local)
        rate = self.network_bytes_per_second / local
        between = all_gather_seconds(message_bytes / local, self.nodes, rate, self.network_latency_seconds)
        return between + self._within(message_bytes, local)

    def _within(self, message_bytes: float, devices: int) -> float:
        return all_gather_seconds(message_bytes, devices, self.within_bytes_per_second, self.within_latency_seconds)

    def _fastest(self, message_bytes: float, devices: int, rate: float, latency: float) -> float:
        chosen = ALL_REDUCES if self.algorithm is None else {self.algorithm: ALL_REDUCES[self.algorithm]}
        return min(each(message_bytes, devices, rate, latency) for each in chosen.values())
