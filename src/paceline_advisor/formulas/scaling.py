"""What do more devices bring, and what does adding up their gradients cost?

All-reduce times are the alpha-beta model's: a message of n bytes takes ``latency_seconds + n / bytes_per_second``, and
every device sends and receives at once.
"""

from __future__ import annotations

import math


def speedup(rate: float, baseline_rate: float) -> float:
    """How many times as fast: samples per second beside those of another device, number of devices or precision.

    Source:
        By definition; NVIDIA's Deep Learning Examples print it as "weak scaling" and "speedup".
    """
    return rate / baseline_rate


def time_speedup(baseline_seconds: float, seconds: float) -> float:
    """How many times as fast, by the times of the same work.

    Source:
        By definition.
    """
    return baseline_seconds / seconds


def time_saved(baseline_seconds: float, seconds: float) -> float:
    """Share of the time that is saved, in [0, 1].

    Source:
        By definition.
    """
    return (baseline_seconds - seconds) / baseline_seconds


def efficiency(rate: float, single_rate: float, devices: int) -> float:
    """Share of linear scaling that is reached: speed-up over number of devices.

    Source:
        Goyal et al., Accurate, large minibatch SGD, arXiv:1706.02677, section 5.5.
    """
    return rate / (single_rate * devices)


def efficiency_of_step_growth(growth: float) -> float:
    """Efficiency if a step with more devices, each with as many samples, takes ``growth`` times as long.

    Source:
        Goyal et al., Accurate, large minibatch SGD, arXiv:1706.02677, section 5.5 (12 % longer: about 90 %).
    """
    return 1 / growth


def amdahl_speedup(devices: float, serial_fraction: float) -> float:
    """Speed-up of fixed work of which a fraction cannot be shared out.

    Source:
        Amdahl, Validity of the single processor approach, AFIPS 1967.
    """
    return 1 / (serial_fraction + (1 - serial_fraction) / devices)


def gustafson_speedup(devices: float, serial_fraction: float) -> float:
    """Speed-up of work that grows with the number of devices, as with a fixed batch on each.

    Source:
        Gustafson, Reevaluating Amdahl's law, CACM 31(5), 1988.
    """
    return devices - serial_fraction * (devices - 1)


def ring_all_reduce_seconds(
    message_bytes: float, devices: int, bytes_per_second: float, latency_seconds: float = 0
) -> float:
    """Time to add up a message along a ring: 2 (p - 1) messages of n / p bytes.

    Source:
        Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, JPDC 69(2), 2009.
    """
    return 2 * (devices - 1) * (latency_seconds + message_bytes / devices / bytes_per_second)


def halving_doubling_all_reduce_seconds(
    message_bytes: float, devices: int, bytes_per_second: float, latency_seconds: float = 0
) -> float:
    """Time to add up a message by recursive halving and doubling.

    Devices beyond a power of two hand their message to another one first, and get the sum from it at the end.

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
    """Time to add up a message along two trees at once, each for half of it, in pieces that follow one another.

    Source:
        Sanders, Speck and Träff, Two-tree algorithms for full bandwidth broadcast, reduction and scan, Parallel
        Computing 35(12), 2009; NCCL's double binary trees (NVIDIA developer blog, 2019).
    """
    if devices == 1:
        return 0.0
    return 2 * (math.ceil(math.log2(devices)) * latency_seconds + message_bytes / bytes_per_second)


def reduce_broadcast_seconds(
    message_bytes: float, devices: int, bytes_per_second: float, latency_seconds: float = 0
) -> float:
    """Time to add up a message along one binomial tree and send the sum back along it, whole at each level.

    Source:
        Thakur, Rabenseifner and Gropp, IJHPCA 19(1), 2005, sections 4.1 and 4.4.
    """
    return 2 * math.ceil(math.log2(devices)) * (latency_seconds + message_bytes / bytes_per_second)


def all_gather_seconds(
    message_bytes: float, devices: int, bytes_per_second: float, latency_seconds: float = 0
) -> float:
    """Time until each device has a message of which each had a part, along a ring; a reduce-scatter takes as long.

    Source:
        Thakur, Rabenseifner and Gropp, IJHPCA 19(1), 2005, section 4.1.
    """
    return (devices - 1) * (latency_seconds + message_bytes / devices / bytes_per_second)


def two_level_all_reduce_seconds(
    message_bytes: float,
    devices_per_node: int,
    nodes: int,
    node_bytes_per_second: float,
    network_bytes_per_second: float,
    latency_seconds: float = 0,
) -> float:
    """Time to add up a message within nodes, then between them, then to share it within nodes again.

    Each device passes its part of the sum to its like on the other nodes; ``network_bytes_per_second`` is a node's,
    shared by its devices.

    Source:
        Goyal et al., Accurate, large minibatch SGD, arXiv:1706.02677, section 4; NCCL's documentation.
    """
    within = 2 * all_gather_seconds(message_bytes, devices_per_node, node_bytes_per_second, latency_seconds)
    part, share = message_bytes / devices_per_node, network_bytes_per_second / devices_per_node
    return within + ring_all_reduce_seconds(part, nodes, share, latency_seconds)


def bus_bytes_per_second(message_bytes: float, seconds: float, devices: int) -> float:
    """Rate of the links that an all-reduce's time stands for, comparable over numbers of devices.

    Source:
        NVIDIA, nccl-tests, doc/PERFORMANCE.md, "AllReduce".
    """
    return message_bytes / seconds * 2 * (devices - 1) / devices


def all_reduce_bytes_per_second_needed(gradient_bytes: float, backward_seconds: float) -> float:
    """Network rate that hides an all-reduce behind a backward pass: twice the gradients in its time.

    Source:
        Goyal et al., Accurate, large minibatch SGD, arXiv:1706.02677, section 4 (100 MB in 125 ms: 1600 MB/s).
    """
    return 2 * gradient_bytes / backward_seconds
