"""Time of collectives among more devices.

All times of collectives follow the alpha-beta model: a message of n bytes takes ``latency_seconds + n /
bytes_per_second``, and every device sends and receives at the same time. ``devices`` is p below, ``message_bytes`` n.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from paceline_advisor import frozen
from paceline_advisor.clusters import Link


def ring_all_reduce_seconds(
    message_bytes: float, devices: int, bytes_per_second: float, latency_seconds: float = 0
) -> float:
    """Seconds of a ring all-reduce: 2 (p - 1) messages of n / p bytes, one after the other.

    Source:
        Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, JPDC 69(2), 2009.
    """
    return 2 * (devices - 1) * (latency_seconds + message_bytes / devices / bytes_per_second)


def halving_doubling_all_reduce_seconds(
    message_bytes: float, devices: int, bytes_per_second: float, latency_seconds: float = 0
) -> float:
    """Seconds of an all-reduce by recursive halving and doubling.

    If p is not a power of two, each device beyond it first sends its message to another device, and receives the sum
    from it at the end.

    Source:
        Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH, IJHPCA 19(1),
        2005, section 4.5; used by Goyal et al., arXiv:1706.02677, section 4.
    """
    rounds = int(math.log2(devices))
    within = 1 << rounds
    seconds = 2 * rounds * latency_seconds + 2 * (within - 1) / within * message_bytes / bytes_per_second
    if within < devices:
        seconds += 2 * (latency_seconds + message_bytes / bytes_per_second)
    return seconds


def tree_all_reduce_seconds(
    message_bytes: float, devices: int, bytes_per_second: float, latency_seconds: float = 0
) -> float:
    """Seconds of an all-reduce along two trees at once, each of which pipelines one half of the message.

    Source:
        Sanders, Speck and Träff, Two-tree algorithms for full bandwidth broadcast, reduction and scan, Parallel
        Computing 35(12), 2009; NCCL's double binary trees (NVIDIA developer blog, 2019).
    """
    if devices == 1:
        return 0.0
    return 2 * (math.ceil(math.log2(devices)) * latency_seconds + message_bytes / bytes_per_second)


def all_gather_seconds(
    message_bytes: float, devices: int, bytes_per_second: float, latency_seconds: float = 0
) -> float:
    """Seconds of a ring all-gather of n bytes in total, n / p from each device; a reduce-scatter takes as long.

    Source:
        Thakur, Rabenseifner and Gropp, IJHPCA 19(1), 2005, section 4.1.
    """
    return (devices - 1) * (latency_seconds + message_bytes / devices / bytes_per_second)


_AllReduce = Callable[[float, int, float, float], float]
ALL_REDUCES: Mapping[str, _AllReduce] = MappingProxyType(
    {
        "ring": ring_all_reduce_seconds,
        "tree": tree_all_reduce_seconds,
        "halving-doubling": halving_doubling_all_reduce_seconds,
    }
)


@frozen
class Fabric:
    """Devices in nodes of equal size, and the links between them.

    Attributes:
        devices: Number of devices.
        per_node: Devices per node.
        within: Link of each device to the others of its node.
        network: Link of a node to the other nodes, which its devices share.
        algorithm: One of :data:`ALL_REDUCES`; None for whichever is fastest for a message, as NCCL chooses.
    """

    devices: int
    per_node: int
    within: Link
    network: Link
    algorithm: str | None = None

    @property
    def nodes(self) -> int:
        """Number of nodes; the last one may be partly filled."""
        return -(-self.devices // self.per_node)

    def all_reduce_seconds(self, message_bytes: float) -> float:
        """Return the seconds of an all-reduce of a message of this size.

        Between nodes, each device reduces its part of the node's sum with the corresponding devices of the other nodes;
        the devices of a node share its network.

        Source:
            Goyal et al., arXiv:1706.02677, section 4; NCCL's documentation.
        """
        if self.devices == 1:
            return 0.0
        local = min(self.devices, self.per_node)
        if self.nodes == 1:
            return self._fastest(message_bytes, local, self.within)
        inside = 2 * _gather_seconds(message_bytes, local, self.within)
        return inside + self._fastest(message_bytes / local, self.nodes, self._network_share(local))

    def all_gather_seconds(self, message_bytes: float) -> float:
        """Return the seconds of an all-gather of this many bytes in total; a reduce-scatter takes as long."""
        if self.devices == 1:
            return 0.0
        local = min(self.devices, self.per_node)
        inside = _gather_seconds(message_bytes, local, self.within)
        if self.nodes == 1:
            return inside
        return _gather_seconds(message_bytes / local, self.nodes, self._network_share(local)) + inside

    def _network_share(self, local: int) -> Link:
        return replace(self.network, bytes_per_second=self.network.bytes_per_second / local)

    def _fastest(self, message_bytes: float, devices: int, link: Link) -> float:
        chosen = ALL_REDUCES.values() if self.algorithm is None else [ALL_REDUCES[self.algorithm]]
        return min(each(message_bytes, devices, link.bytes_per_second, link.latency_seconds) for each in chosen)


def _gather_seconds(message_bytes: float, devices: int, link: Link) -> float:
    return all_gather_seconds(message_bytes, devices, link.bytes_per_second, link.latency_seconds)
