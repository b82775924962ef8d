"""Benefit and cost of more devices: speed-up, messages, hours, price, learning rates; checks of published tables.

All-reduce times are the alpha-beta model's: a message of n bytes takes ``latency_seconds + n / bytes_per_second``, and
every device sends and receives at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType


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
        devices: Number of devices.
        per_node: Devices per node; all of them for a single node.
        within_bytes_per_second: Bandwidth between a node's devices, for each.
        within_latency_seconds: Latency of one message.
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
        """Number of nodes; the last one may be partly filled."""
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


TOLERANCE = 0.05


def contradicts(printed: float, rate: float, baseline_rate: float, tolerance: float = TOLERANCE) -> bool:
    """Whether a printed speed-up differs by more than ``tolerance`` from that of its own figures.

    Source:
        Arithmetic; NVIDIA, DeepLearningExamples, MxNet/Classification/RN50v1.5/README.md prints 2.18 for
        3410.52 / 1055.78.
    """
    return abs(speedup(rate, baseline_rate) / printed - 1) > tolerance


def is_superlinear(rate: float, single_rate: float, devices: int, tolerance: float = TOLERANCE) -> bool:
    """Whether devices are said to be faster together than each by itself, by more than ``tolerance``.

    Source:
        Arithmetic; NVIDIA, DeepLearningExamples, PyTorch/Classification/ConvNets/efficientnet/README.md has 36 and 641
        images/s for 1 and 8 GPUs.
    """
    return speedup(rate, single_rate) > devices * (1 + tolerance)


IMAGENET_TRAIN, IMAGENET_VALIDATION = 1_281_167, 50_000


def steps(samples: int, batch: int, epochs: float, *, drop_last: bool = True) -> int:
    """Optimizer steps of a training; with ``drop_last``, an epoch's last batch is used only if it is full.

    Source:
        cifar10-airbench, airbench94_muon.py (8 epochs of 50,000 in batches of 2,000: 200).
    """
    per_epoch = samples // batch if drop_last else math.ceil(samples / batch)
    return math.ceil(epochs * per_epoch)


def training_hours(samples_per_second: float, epochs: float = 90, samples: int = IMAGENET_TRAIN) -> float:
    """Hours of so many epochs at a throughput.

    Source:
        By definition; NVIDIA, DeepLearningExamples, PyTorch/Classification/ConvNets, "Training performance".
    """
    return samples * epochs / samples_per_second / 3600


def nvidia_printed_hours(
    samples_per_second: float, epochs: int = 90, train: int = IMAGENET_TRAIN, validation: int = IMAGENET_VALIDATION
) -> int:
    """Hours as NVIDIA's tables print them: training and validation at the same throughput, rounded up.

    Source:
        NVIDIA, DeepLearningExamples, PyTorch/Classification/ConvNets/resnet50v1.5/README.md, "~ h for 90 epochs".
    """
    return math.ceil(training_hours(samples_per_second, epochs, train + validation))


def minutes(seconds: float) -> float:
    """Seconds in minutes.

    Source:
        By definition.
    """
    return seconds / 60


def cost(seconds: float, price_per_hour: float, machines: float = 1) -> float:
    """Price of so many machines for so long.

    Source:
        DAWNBench, "Training cost"; stanford-futuredata/dawn-bench-entries.
    """
    return seconds / 3600 * price_per_hour * machines


def progressive_resizing_minutes(
    first_seconds: float,
    epoch_seconds: Sequence[float],
    epochs: Sequence[float],
    switch_seconds: float,
    final_seconds: float,
) -> float:
    """Minutes of a training whose images grow.

    Args:
        first_seconds: Time of the first epoch, which is slower: data is read, kernels are chosen.
        epoch_seconds: Time of an epoch at each size.
        epochs: Epochs at each size, without the first.
        switch_seconds: Time of a change of size.
        final_seconds: Time of the last evaluation.

    Raises:
        ValueError: If not every size has its epochs and their time.

    Source:
        libffcv/ffcv-imagenet, README.md and assets/agg.csv (ResNet-50, 88 epochs: 77.2 minutes).
    """
    if len(epoch_seconds) != len(epochs):
        raise ValueError(f"epoch_seconds has {len(epoch_seconds)} values and epochs {len(epochs)}: give one for a size")
    within = sum(count * each for count, each in zip(epochs, epoch_seconds, strict=True))
    return (first_seconds + within + switch_seconds * (len(epochs) - 1) + final_seconds) / 60


def dawnbench_seconds(total_seconds: float, validation_seconds: float, preparation_seconds: float) -> float:
    """Time by DAWNBench's rules: without validation, with preparing the data.

    Source:
        davidcpage/cifar10-fast, README.md (79 - 7 + 2 = 74 s).
    """
    return total_seconds - validation_seconds + preparation_seconds


def checkpoint_overhead(stall_seconds: float, interval_seconds: float) -> float:
    """Share of the time that checkpoints take which stall training once per interval, in [0, 1).

    Source:
        Mohan et al., CheckFreq, FAST 2021 (kept below 3.5 %).
    """
    return stall_seconds / (interval_seconds + stall_seconds)


def checkpoint_interval_seconds(save_seconds: float, seconds_between_failures: float) -> float:
    """Time between checkpoints that loses least: √(2 · save · between failures).

    Source:
        Young, A first order approximation to the optimum checkpoint interval, CACM 17(9), 1974.
    """
    return math.sqrt(2 * save_seconds * seconds_between_failures)


def olympic_mean(values: Sequence[float], dropped: int = 1) -> float:
    """Mean without the best and the worst.

    Raises:
        ValueError: If nothing is left.

    Source:
        MLCommons, training_policies, training_rules.adoc, "Benchmark results".
    """
    kept = sorted(values)[dropped : len(values) - dropped]
    if not kept:
        raise ValueError(f"{len(values)} values, of which the best {dropped} and the worst {dropped} are dropped")
    return sum(kept) / len(kept)


def reference_convergence_ratio(reference_epochs: Sequence[float], epochs: float) -> float:
    """Epochs of the reference's runs beside a submission's; above 1, the submission converged faster than allowed for.

    Source:
        MLCommons, mlperf_logging/rcp_checker (reference convergence points).
    """
    return olympic_mean(reference_epochs) / epochs


def images_per_second(epochs: float, minutes: float, images: int = IMAGENET_TRAIN, devices: int = 1) -> float:
    """Least throughput that a time to a number of epochs stands for, all that happens between included.

    Source:
        MLCommons, training results: epochs and run times of a submission's logs.
    """
    return epochs * images / (minutes * 60) / devices


def linear_rate(batch: float, reference_rate: float = 0.1, reference_batch: float = 256) -> float:
    """Learning rate in proportion to the batch; Goyal et al. begin from 0.1 for 256.

    Source:
        Goyal et al., Accurate, large minibatch SGD, arXiv:1706.02677, section 2.1.
    """
    return reference_rate * batch / reference_batch


def square_root_rate(batch: float, reference_rate: float = 0.1, reference_batch: float = 256) -> float:
    """Learning rate that grows with the square root of the batch, as adaptive optimizers want it.

    Source:
        Krizhevsky, One weird trick for parallelizing convolutional neural networks, arXiv:1404.5997, section 5; Malladi
        et al., On the SDEs and scaling rules for adaptive gradient algorithms, arXiv:2205.10287.
    """
    return reference_rate * math.sqrt(batch / reference_batch)


def nvidia_rate(batch: float) -> float:
    """Learning rate of NVIDIA's ConvNets: 0.256 for a batch of 256, in proportion.

    Source:
        NVIDIA, DeepLearningExamples, PyTorch/Classification/ConvNets/resnet50v1.5/README.md, "Default configuration".
    """
    return linear_rate(batch, 0.256)


def nvidia_weight_decay(power: int = 15) -> float:
    """Weight decay of NVIDIA's ResNet-50, 2^-15; ResNeXt and SE-ResNeXt have 2^-14.

    Source:
        NVIDIA, DeepLearningExamples, PyTorch/Classification/ConvNets/resnet50v1.5/README.md, "Default configuration".
    """
    return 2.0**-power


def gradual_warmup(step: float, warmup_steps: float, peak_rate: float, first_rate: float = 0) -> float:
    """Learning rate that rises by the same amount at every step until the peak.

    Source:
        Goyal et al., arXiv:1706.02677, section 2.2 (from η to kη over 5 epochs).
    """
    return peak_rate if step >= warmup_steps else first_rate + (peak_rate - first_rate) * step / warmup_steps


def nvidia_warmup(epoch: int, warmup_epochs: int, peak_rate: float) -> float:
    """Learning rate of an epoch, from 0, of NVIDIA's warm-up: the first has peak / warm-up epochs.

    Source:
        NVIDIA, DeepLearningExamples, PyTorch/Classification/ConvNets/image_classification/optimizers.py.
    """
    return peak_rate * min(1.0, (epoch + 1) / warmup_epochs)


def step_rate(epoch: float, first_rate: float, factor: float = 0.1, first: int = 30, second: int = 60) -> float:
    """Learning rate that is divided by ten at two epochs and once more 20 epochs after the second (30, 60, 80).

    Source:
        Goyal et al., arXiv:1706.02677, section 5.1.
    """
    return first_rate * factor ** sum(epoch >= each for each in (first, second, second + 20))


def cosine_rate(step: float, total_steps: float, peak_rate: float, last_rate: float = 0) -> float:
    """Learning rate that falls as half a cosine.

    Source:
        Loshchilov and Hutter, SGDR, arXiv:1608.03983, equation 5.
    """
    return last_rate + (peak_rate - last_rate) * (1 + math.cos(math.pi * step / total_steps)) / 2


def effective_rate(learning_rate: float, momentum: float) -> float:
    """Learning rate that momentum comes to over many steps: lr / (1 - m).

    Source:
        Smith et al., Don't decay the learning rate, increase the batch size, arXiv:1711.00489, section 4.
    """
    return learning_rate / (1 - momentum)
