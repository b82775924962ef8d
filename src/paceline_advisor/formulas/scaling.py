"""Benefit and cost of more devices: speed-up, communication, hours, price, learning rates; checks of published tables.

All times of collectives follow the alpha-beta model: a message of n bytes takes ``latency_seconds + n /
bytes_per_second``, and every device sends and receives at the same time. ``devices`` is p below, ``message_bytes`` n.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType


def speedup(rate: float, baseline_rate: float) -> float:
    """Speed-up as a ratio of throughputs: with another device, number of devices or precision, over the baseline.

    Source:
        By definition; NVIDIA's Deep Learning Examples print it as "weak scaling" and "speedup".
    """
    return rate / baseline_rate


def time_speedup(baseline_seconds: float, seconds: float) -> float:
    """Speed-up as a ratio of the times for the same work: baseline over new.

    Source:
        By definition.
    """
    return baseline_seconds / seconds


def time_saved(baseline_seconds: float, seconds: float) -> float:
    """Fraction of the baseline's time that is saved; negative if it takes longer.

    Source:
        By definition.
    """
    return (baseline_seconds - seconds) / baseline_seconds


def efficiency(rate: float, single_rate: float, devices: int) -> float:
    """Scaling efficiency: the speed-up over one device divided by the number of devices; 1 is linear scaling.

    Source:
        Goyal et al., Accurate, large minibatch SGD, arXiv:1706.02677, section 5.5.
    """
    return rate / (single_rate * devices)


def efficiency_of_step_growth(growth: float) -> float:
    """Scaling efficiency if a step takes ``growth`` times as long with more devices, at the same samples per device.

    Source:
        Goyal et al., Accurate, large minibatch SGD, arXiv:1706.02677, section 5.5 (12 % longer: about 90 %).
    """
    return 1 / growth


def amdahl_speedup(devices: float, serial_fraction: float) -> float:
    """Speed-up of work of a fixed size, of which ``serial_fraction`` cannot be parallelised.

    Source:
        Amdahl, Validity of the single processor approach, AFIPS 1967.
    """
    return 1 / (serial_fraction + (1 - serial_fraction) / devices)


def gustafson_speedup(devices: float, serial_fraction: float) -> float:
    """Speed-up of work that grows with the number of devices, as with a fixed batch per device.

    Source:
        Gustafson, Reevaluating Amdahl's law, CACM 31(5), 1988.
    """
    return devices - serial_fraction * (devices - 1)


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


def reduce_broadcast_seconds(
    message_bytes: float, devices: int, bytes_per_second: float, latency_seconds: float = 0
) -> float:
    """Seconds of a reduce and a broadcast along one binomial tree, with the whole message at each level.

    Source:
        Thakur, Rabenseifner and Gropp, IJHPCA 19(1), 2005, sections 4.1 and 4.4.
    """
    return 2 * math.ceil(math.log2(devices)) * (latency_seconds + message_bytes / bytes_per_second)


def all_gather_seconds(
    message_bytes: float, devices: int, bytes_per_second: float, latency_seconds: float = 0
) -> float:
    """Seconds of a ring all-gather of n bytes in total, n / p from each device; a reduce-scatter takes as long.

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
    """Seconds of a two-level all-reduce: reduce-scatter within nodes, all-reduce between them, all-gather within nodes.

    Between nodes, each device reduces its part of the message with the corresponding devices of the other nodes.
    ``network_bytes_per_second`` is the bandwidth of a node, which its devices share.

    Source:
        Goyal et al., Accurate, large minibatch SGD, arXiv:1706.02677, section 4; NCCL's documentation.
    """
    within = 2 * all_gather_seconds(message_bytes, devices_per_node, node_bytes_per_second, latency_seconds)
    part, share = message_bytes / devices_per_node, network_bytes_per_second / devices_per_node
    return within + ring_all_reduce_seconds(part, nodes, share, latency_seconds)


def bus_bytes_per_second(message_bytes: float, seconds: float, devices: int) -> float:
    """Bus bandwidth of a measured all-reduce in bytes per second: n / time · 2 (p - 1) / p, comparable for every p.

    Source:
        NVIDIA, nccl-tests, doc/PERFORMANCE.md, "AllReduce".
    """
    return message_bytes / seconds * 2 * (devices - 1) / devices


def all_reduce_bytes_per_second_needed(gradient_bytes: float, backward_seconds: float) -> float:
    """Bandwidth in bytes per second that hides an all-reduce behind a backward pass: twice the gradients in its time.

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
    """Devices in nodes of equal size, and the links between them.

    Attributes:
        devices: Number of devices.
        per_node: Devices per node.
        within_bytes_per_second: Bandwidth of each device to the others of its node.
        within_latency_seconds: Latency of a message within a node.
        network_bytes_per_second: Bandwidth of a node to the other nodes, which its devices share.
        network_latency_seconds: Latency of a message between nodes.
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
            return self._fastest(message_bytes, local, self.within_bytes_per_second, self.within_latency_seconds)
        inside = 2 * self._within(message_bytes, local)
        rate = self.network_bytes_per_second / local
        return inside + self._fastest(message_bytes / local, self.nodes, rate, self.network_latency_seconds)

    def all_gather_seconds(self, message_bytes: float) -> float:
        """Return the seconds of an all-gather of this many bytes in total; a reduce-scatter takes as long."""
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
    """Whether a published speed-up differs from the ratio of its own rates by a relative error above ``tolerance``.

    Source:
        Arithmetic; NVIDIA, DeepLearningExamples, MxNet/Classification/RN50v1.5/README.md prints 2.18 for
        3410.52 / 1055.78.
    """
    return abs(speedup(rate, baseline_rate) / printed - 1) > tolerance


def is_superlinear(rate: float, single_rate: float, devices: int, tolerance: float = TOLERANCE) -> bool:
    """Whether a published speed-up exceeds the number of devices by a fraction above ``tolerance``.

    Source:
        Arithmetic; NVIDIA, DeepLearningExamples, PyTorch/Classification/ConvNets/efficientnet/README.md has 36 and 641
        images/s for 1 and 8 GPUs.
    """
    return speedup(rate, single_rate) > devices * (1 + tolerance)


IMAGENET_TRAIN, IMAGENET_VALIDATION = 1_281_167, 50_000


def steps(samples: int, batch: int, epochs: float, *, drop_last: bool = True) -> int:
    """Number of optimizer steps of a training run; with ``drop_last``, an incomplete last batch of an epoch is dropped.

    Source:
        cifar10-airbench, airbench94_muon.py (8 epochs of 50,000 in batches of 2,000: 200).
    """
    per_epoch = samples // batch if drop_last else math.ceil(samples / batch)
    return math.ceil(epochs * per_epoch)


def training_hours(samples_per_second: float, epochs: float = 90, samples: int = IMAGENET_TRAIN) -> float:
    """Training time in hours: samples × epochs over the samples per second.

    Source:
        By definition; NVIDIA, DeepLearningExamples, PyTorch/Classification/ConvNets, "Training performance".
    """
    return samples * epochs / samples_per_second / 3600


def nvidia_printed_hours(
    samples_per_second: float, epochs: int = 90, train: int = IMAGENET_TRAIN, validation: int = IMAGENET_VALIDATION
) -> int:
    """Training time as in NVIDIA's tables, in whole hours rounded up: training and validation at the same throughput.

    Source:
        NVIDIA, DeepLearningExamples, PyTorch/Classification/ConvNets/resnet50v1.5/README.md, "~ h for 90 epochs".
    """
    return math.ceil(training_hours(samples_per_second, epochs, train + validation))


def minutes(seconds: float) -> float:
    """Minutes for a number of seconds.

    Source:
        By definition.
    """
    return seconds / 60


def cost(seconds: float, price_per_hour: float, machines: float = 1) -> float:
    """Cost of renting machines for a time, in the currency of the hourly price.

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
    """Minutes of a training run with progressive resizing: epochs with growing images.

    Args:
        first_seconds: Seconds of the first epoch, which is slower: it reads the data and selects kernels.
        epoch_seconds: Seconds of an epoch at each image size.
        epochs: Number of epochs at each image size, without the first epoch.
        switch_seconds: Seconds of a change of size.
        final_seconds: Seconds of the last evaluation.

    Raises:
        ValueError: If ``epoch_seconds`` and ``epochs`` differ in length.

    Source:
        libffcv/ffcv-imagenet, README.md and assets/agg.csv (ResNet-50, 88 epochs: 77.2 minutes).
    """
    if len(epoch_seconds) != len(epochs):
        raise ValueError(f"epoch_seconds has {len(epoch_seconds)} values and epochs {len(epochs)}; give one per size")
    within = sum(count * each for count, each in zip(epochs, epoch_seconds, strict=True))
    return (first_seconds + within + switch_seconds * (len(epochs) - 1) + final_seconds) / 60


def dawnbench_seconds(total_seconds: float, validation_seconds: float, preparation_seconds: float) -> float:
    """Seconds by DAWNBench's rules: the total without validation, plus the preparation of the data.

    Source:
        davidcpage/cifar10-fast, README.md (79 - 7 + 2 = 74 s).
    """
    return total_seconds - validation_seconds + preparation_seconds


def checkpoint_overhead(stall_seconds: float, interval_seconds: float) -> float:
    """Fraction of the run time lost to checkpoints that stall training once per interval, in [0, 1).

    Source:
        Mohan et al., CheckFreq, FAST 2021 (kept below 3.5 %).
    """
    return stall_seconds / (interval_seconds + stall_seconds)


def checkpoint_interval_seconds(save_seconds: float, seconds_between_failures: float) -> float:
    """Optimal seconds between checkpoints: √(2 · seconds of a save · mean seconds between failures).

    Source:
        Young, A first order approximation to the optimum checkpoint interval, CACM 17(9), 1974.
    """
    return math.sqrt(2 * save_seconds * seconds_between_failures)


def olympic_mean(values: Sequence[float], dropped: int = 1) -> float:
    """Mean without the ``dropped`` smallest and the ``dropped`` largest values, in the unit of the values.

    Raises:
        ValueError: If no value remains.

    Source:
        MLCommons, training_policies, training_rules.adoc, "Benchmark results".
    """
    kept = sorted(values)[dropped : len(values) - dropped]
    if not kept:
        raise ValueError(f"{len(values)} values: none remains without the {dropped} smallest and {dropped} largest")
    return sum(kept) / len(kept)


def reference_convergence_ratio(reference_epochs: Sequence[float], epochs: float) -> float:
    """Ratio of the reference runs' epochs (Olympic mean) to a submission's; above 1, the submission converged faster.

    Source:
        MLCommons, mlperf_logging/rcp_checker (reference convergence points).
    """
    return olympic_mean(reference_epochs) / epochs


def images_per_second(epochs: float, minutes: float, images: int = IMAGENET_TRAIN, devices: int = 1) -> float:
    """Lower bound of the throughput in images per second and device: all epochs over the whole run time.

    Source:
        MLCommons, training results: epochs and run times of a submission's logs.
    """
    return epochs * images / (minutes * 60) / devices


def linear_rate(batch: float, reference_rate: float = 0.1, reference_batch: float = 256) -> float:
    """Learning rate by the linear rule, in proportion to the batch; Goyal et al. use 0.1 for a batch of 256.

    Source:
        Goyal et al., Accurate, large minibatch SGD, arXiv:1706.02677, section 2.1.
    """
    return reference_rate * batch / reference_batch


def square_root_rate(batch: float, reference_rate: float = 0.1, reference_batch: float = 256) -> float:
    """Learning rate by the square-root rule, in proportion to the root of the batch; for adaptive optimizers.

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
    """Learning rate during a linear warm-up: it rises by the same amount at every step until the peak.

    Source:
        Goyal et al., arXiv:1706.02677, section 2.2 (from η to kη over 5 epochs).
    """
    return peak_rate if step >= warmup_steps else first_rate + (peak_rate - first_rate) * step / warmup_steps


def nvidia_warmup(epoch: int, warmup_epochs: int, peak_rate: float) -> float:
    """Learning rate in NVIDIA's warm-up: peak · (epoch + 1) / warm-up epochs, with epochs counted from 0.

    Source:
        NVIDIA, DeepLearningExamples, PyTorch/Classification/ConvNets/image_classification/optimizers.py.
    """
    return peak_rate * min(1.0, (epoch + 1) / warmup_epochs)


def step_rate(epoch: float, first_rate: float, factor: float = 0.1, first: int = 30, second: int = 60) -> float:
    """Learning rate of a step schedule: times ``factor`` at epoch ``first``, at ``second``, and 20 epochs after that.

    Source:
        Goyal et al., arXiv:1706.02677, section 5.1.
    """
    return first_rate * factor ** sum(epoch >= each for each in (first, second, second + 20))


def cosine_rate(step: float, total_steps: float, peak_rate: float, last_rate: float = 0) -> float:
    """Learning rate of a cosine schedule at a step, from the peak to ``last_rate``.

    Source:
        Loshchilov and Hutter, SGDR, arXiv:1608.03983, equation 5.
    """
    return last_rate + (peak_rate - last_rate) * (1 + math.cos(math.pi * step / total_steps)) / 2


def effective_rate(learning_rate: float, momentum: float) -> float:
    """Effective learning rate of SGD with momentum over many steps: lr / (1 - m).

    Source:
        Smith et al., Don't decay the learning rate, increase the batch size, arXiv:1711.00489, section 4.
    """
    return learning_rate / (1 - momentum)
