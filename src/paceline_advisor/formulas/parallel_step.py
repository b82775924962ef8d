"""Time of a step on several devices, given the time of one.

The step of one device is measured, or a lower bound. The cost of additional devices is computed here, separately for
each cause:

* *communication* that does not overlap with computing, and the slowdown of computing where it does;
* *sharing* of the host, power and memory among the devices of a node;
* *host* work for each parameter tensor while the device waits for it;
* *update*: the optimizer's update, which more devices repeat after fewer passes;
* *waiting* for the slowest device of the step;
* *data*: a node's CPU cores supply a limited number of samples per second;
* *launching*: a host launches a limited number of kernels per second, however small they are;
* *cores*: processes without accelerators share the machine's cores.

The constants below are the same for every network, machine and size. Those of :class:`Calibration` are fitted to
published rates of several GPUs. docs/decisions/0039 says where each comes from, and how close the predictions are for
families of tables that were left out of the fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Literal, get_args

from paceline_advisor import frozen
from paceline_advisor.formulas.scaling import Fabric

FIRST_BUCKET_BYTES = 2**20
"""DDP's first bucket is small, so that sending starts early (torch.distributed._DEFAULT_FIRST_BUCKET_BYTES)."""
BUCKET_CAP_MB = 25
"""Default size of DDP's other buckets in MiB (``bucket_cap_mb``)."""


@dataclass(frozen=True)
class Gradient:
    """A message of a backward pass, with the time at which it is ready.

    Attributes:
        size_bytes: Size of the gradient in the dtype in which it is sent.
        ready: Fraction of the backward pass that is done when it is ready, in (0, 1].
    """

    size_bytes: float
    ready: float


@dataclass(frozen=True)
class Unit:
    """A unit that FSDP gathers at once: one block's weights.

    Attributes:
        weight_bytes: Size of its weights, as they are gathered.
        gradient_bytes: Size of their gradients, as they are reduced.
        share: Its fraction of a pass's computation.
    """

    weight_bytes: float
    gradient_bytes: float
    share: float


@dataclass(frozen=True)
class Timeline:
    """Time that communication adds to a step.

    Attributes:
        busy_seconds: Time in which messages were in flight.
        exposed_seconds: Time in which computing had to wait for them.
        stretched_seconds: Time by which computing slowed down while they were in flight.
    """

    busy_seconds: float
    exposed_seconds: float
    stretched_seconds: float


def buckets(gradients: Sequence[Gradient], cap_bytes: float, first_bytes: float = FIRST_BUCKET_BYTES) -> list[Gradient]:
    """Return DDP's buckets: gradients in the order in which they become ready, up to the first that reaches the cap.

    Source:
        torch, torch/csrc/distributed/c10d/reducer.cpp (compute_bucket_assignment_by_size); Li et al., PyTorch
        Distributed, VLDB 2020, section 3.2.3.
    """
    merged: list[Gradient] = []
    size, limit = 0.0, min(first_bytes, cap_bytes)
    for gradient in gradients:
        size += gradient.size_bytes
        if size >= limit:
            merged.append(Gradient(size, gradient.ready))
            size, limit = 0.0, cap_bytes
    if size:
        merged.append(Gradient(size, gradients[-1].ready))
    return merged


class _Streams:
    """A clock for overlapping computation and messages.

    Args:
        taken: Fraction of the device's compute that messages in flight use, in [0, 1).
    """

    def __init__(self, taken: float) -> None:
        self.now = self.slowed = self.exposed = self.busy = self.sent = 0.0
        self._rate = max(1 - taken, 1e-3)

    def compute(self, seconds: float) -> None:
        slow = min(seconds, max(0.0, self.sent - self.now) * self._rate)
        more = slow / self._rate - slow
        self.now += seconds + more
        self.slowed += more

    def send(self, seconds: float) -> float:
        """Queue a message that is ready now; return when it will have arrived."""
        self.sent = max(self.now, self.sent) + seconds
        self.busy += seconds
        return self.sent

    def wait(self, until: float) -> None:
        self.exposed += max(0.0, until - self.now)
        self.now = max(self.now, until)

    @property
    def timeline(self) -> Timeline:
        return Timeline(self.busy, self.exposed, self.slowed)


def reduce_behind(
    messages: Sequence[Gradient], backward_seconds: float, seconds_of: Callable[[float], float], taken: float = 0.0
) -> Timeline:
    """Return the timeline of DDP: each bucket is reduced while the rest of the backward pass continues.

    Args:
        messages: The buckets, in order.
        backward_seconds: Duration of the backward pass without communication.
        seconds_of: Returns the time of a message, given its bytes.
        taken: Fraction of the device's compute that a message in flight uses, in [0, 1).

    Source:
        Li et al., PyTorch Distributed, VLDB 2020, section 3.2.3.
    """
    streams, done = _Streams(taken), 0.0
    for message in messages:
        streams.compute(message.ready * backward_seconds - done)
        done = message.ready * backward_seconds
        streams.send(seconds_of(message.size_bytes))
    streams.compute(max(0.0, backward_seconds - done))
    streams.wait(streams.sent)
    return streams.timeline


def gather_around(
    units: Sequence[Unit],
    forward_seconds: float,
    backward_seconds: float,
    seconds_of: Callable[[float], float],
    *,
    taken: float = 0.0,
    regathered: bool = True,
) -> Timeline:
    """Return the timeline of FSDP: weights are gathered one block ahead, gradients scattered one block behind.

    Args:
        units: The blocks in the order of the forward pass.
        forward_seconds: Duration of the forward pass without communication.
        backward_seconds: Duration of the backward pass without communication.
        seconds_of: Returns the time to gather, or to reduce and scatter, a number of bytes.
        taken: Fraction of the device's compute that a message in flight uses, in [0, 1).
        regathered: Whether weights are freed after the forward pass and gathered again for the backward pass.

    Source:
        Zhao et al., PyTorch FSDP, VLDB 2023, sections 3.3 and 4.
    """
    streams = _Streams(taken)
    for order, seconds, is_backward in ((units, forward_seconds, False), (units[::-1], backward_seconds, True)):
        gathers = regathered or not is_backward
        arrived = streams.send(seconds_of(order[0].weight_bytes)) if gathers else streams.now
        for unit, following in zip(order, [*order[1:], None], strict=True):
            streams.wait(arrived)
            if gathers and following is not None:
                arrived = streams.send(seconds_of(following.weight_bytes))
            streams.compute(unit.share * seconds)
            if is_backward:
                streams.send(seconds_of(unit.gradient_bytes))
    streams.wait(streams.sent)
    return streams.timeline


Cause = Literal["computing", "communication", "sharing", "host", "update", "waiting", "data", "launching", "cores"]
CAUSES = get_args(Cause)
Strategy = Literal["ddp", "fsdp"]
Compiled = Literal["no", "fused", "graphs"]
_GRAPHS = 2  # one forward and one backward

BACKWARD_SHARE = 2 / 3
"""Fraction of a step's computing: for each product of the forward pass, the backward pass has two, for the gradients of
inputs and of weights."""
UNITS_OF_A_COLLECTIVE = 16
"""Multiprocessors that a collective's kernel occupies while it runs: one for each of NCCL's channels, about sixteen by
default (NCCL documentation, NCCL_MAX_CTAS)."""
UNKNOWN_UNITS = 100
"""Assumed multiprocessors of an unknown device."""
UNKNOWN_CORES = 8
"""Assumed CPU cores for each device of an unknown node."""
KERNEL_SECONDS = 4e-6
"""Host time in seconds to launch one kernel: the driver takes 1 to 3 microseconds, and the kernel starts after about 5
(Dalek, arXiv:2508.10481)."""
HOST_SECONDS = 10e-6 + 3 * KERNEL_SECONDS
"""Host seconds that DDP adds for one parameter tensor: its hooks, and three copies (into the bucket, out of it, of a
buffer). The device waits for them whenever the host has waited for the device before. Hooks and copies are measured
without a GPU (benchmarks/ddp_host.py); launching a copy takes :data:`KERNEL_SECONDS`."""
OWN_HOST_SECONDS = 5e-6 + KERNEL_SECONDS
"""The same for networks as Paceline wraps them: gradients are views of the buckets, and buffers are not sent."""
LAUNCH_SECONDS = 200e-6
"""Host time in seconds to launch the forward, backward and update kernels of one parameter tensor and the operations
around it, uncompiled: about twenty launches of ten microseconds."""
SPREAD = 0.01
"""Standard deviation of one device's step, as a fraction of the step, if it was not measured."""


@frozen
class Calibration:
    """Costs of several devices that no datasheet gives, fitted to published rates.

    The defaults are fitted to all families of tables except one that its input pipeline limits (benchmarks/scaling.py).
    They do not apply to processes that compute on CPU cores.

    Attributes:
        bytes_per_second: Rate at which a device moves gradients through its own memory while they are reduced.
        sharing: Slowdown of a step of several devices, as a fraction of the step for each device per core of a node.
        host: Fraction of the host's work per tensor for which the device waits.
        update_bytes: Bytes of device memory that an optimizer's update moves per parameter.
        low: 5 % quantile of the logarithm of the real over the predicted step, as a multiple of
            :attr:`StepPrediction.doubt`.
        high: 95 % quantile.
    """

    bytes_per_second: float = 40e9
    sharing: float = 0.343
    host: float = 0.288
    update_bytes: float = 106.0
    low: float = -0.675
    high: float = 1.41


CALIBRATION = Calibration()
LEAST_DOUBT = 0.05
"""Part of :attr:`StepPrediction.doubt` that does not depend on the step."""


@frozen
class Launches:
    """Kernels that a host launches for one forward and backward pass.

    Attributes:
        eager: Kernels without compilation; 0 if unknown.
        products: Matrix products among the forward and backward kernels; a compiler keeps each a separate kernel.
    """

    eager: int = 0
    products: int = 0

    def share(self, compiled: Compiled) -> float:
        """Return the fraction of the launch time that remains with compilation, in [0, 1].

        At best, a compiler fuses everything between two products into one kernel. A recorded graph of a pass is
        launched as a whole. If the number of kernels is unknown, the fraction is 1.
        """
        if compiled == "no" or not self.eager:
            return 1.0
        left = 2 * self.products if compiled == "fused" else _GRAPHS
        return min(1.0, left / self.eager)


@frozen
class Network:
    """The properties of a network that determine how it scales.

    Attributes:
        gradients: Gradients of its parameter tensors in the order in which a backward pass produces them, as they are
            sent.
        units: Its blocks in the order of the forward pass, for FSDP.
    """

    gradients: tuple[Gradient, ...]
    units: tuple[Unit, ...]

    @property
    def tensors(self) -> int:
        """Number of trained parameter tensors."""
        return len(self.gradients)


@frozen
class OneDevice:
    """The measurement of one device.

    Attributes:
        seconds: Duration of one step of ``samples`` samples.
        samples: Samples in that step.
        uncertainty: Relative error of ``seconds``, in both directions.
        spread: Standard deviation of a step, as a fraction of it.
        is_bound: Whether ``seconds`` is a lower bound instead of a measurement.
        passes: Passes of the measured step, each as long as ``seconds`` on average.
    """

    seconds: float
    samples: int
    uncertainty: float = 0.0
    spread: float = SPREAD
    is_bound: bool = False
    passes: int = 1


@frozen
class Host:
    """Host properties.

    Attributes:
        waits: How often the host waits for the device in a step.
        seconds_per_tensor: Additional host time of DDP per parameter tensor and wait.
        seconds_per_step: Additional host time of each step of several devices.
        seconds_per_sample: Time of one core to read and augment a sample; 0 if samples are prepared beforehand.
        loaders_per_device: Loader processes of each device; None for as many as there are cores.
        cores_per_device: Physical cores for each device; None if unknown.
        shares_cores: Whether the processes compute on these cores, without accelerators.
        threads: Threads of each process that computes on cores.
    """

    waits: int = 0
    seconds_per_tensor: float = HOST_SECONDS
    seconds_per_step: float = 0.0
    seconds_per_sample: float = 0.0
    loaders_per_device: int | None = None
    cores_per_device: float | None = None
    shares_cores: bool = False
    threads: int = 1

    def devices_per_core(self, devices: int, per_node: int) -> float:
        """Return how many of the devices in use share a core of their node."""
        return min(devices, per_node) / ((self.cores_per_device or UNKNOWN_CORES) * per_node)

    def supply_per_second(self, devices: int, per_node: int) -> float | None:
        """Return the samples per second that the loaders of all nodes supply; None without a limit."""
        if not self.seconds_per_sample or self.cores_per_device is None:
            return None
        local = min(devices, per_node)
        cores = self.cores_per_device * per_node
        loaders = cores if self.loaders_per_device is None else min(cores, self.loaders_per_device * local)
        return loaders / self.seconds_per_sample * devices / local


@frozen
class ParallelConfig:
    """How the devices divide a step.

    Attributes:
        strategy: ``ddp`` or ``fsdp``.
        micro_batch: Samples of one pass on one device.
        passes: Passes of each device in a step; gradients are reduced in the last one, or with ``fsdp`` in each.
        bucket_bytes: Size of DDP's buckets.
        units_per_device: Multiprocessors of a device; None if unknown.
        regathered: Whether FSDP gathers weights again for the backward pass.
        taken: Fraction of compute that a message in flight uses; None to derive it from the multiprocessors.
        launched: Fraction of the launch time that remains with compilation, in [0, 1].
        parameters: Trained parameters of which each device updates its copy.
        memory_bytes_per_second: Peak rate of a device's memory; None if unknown.
    """

    strategy: Strategy
    micro_batch: int
    passes: int = 1
    bucket_bytes: float = BUCKET_CAP_MB * 2**20
    units_per_device: int | None = None
    regathered: bool = True
    taken: float | None = None
    launched: float = 1.0
    parameters: float = 0.0
    memory_bytes_per_second: float | None = None


@frozen
class StepPrediction:
    """A step of several devices.

    Attributes:
        devices: Their number.
        samples: Samples in the step.
        seconds: Duration of the step.
        low_seconds: Lower end of the 90 % range.
        high_seconds: Upper end of the 90 % range.
        parts: Seconds by cause; their sum is ``seconds``.
        limit: The largest cause other than computing; ``computing`` if no other cause exceeds 1 % of the step.
        single_rate: Samples per second of one device, from its measurement or bound.
    """

    devices: int
    samples: int
    seconds: float
    low_seconds: float
    high_seconds: float
    parts: dict[Cause, float]
    limit: Cause
    single_rate: float

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.samples / self.seconds

    @property
    def ends(self) -> tuple[float, float]:
        """Samples per second at the two ends of the range, the lower one first."""
        return self.samples / self.high_seconds, self.samples / self.low_seconds

    @property
    def efficiency(self) -> float:
        """Rate relative to that many single devices."""
        return self.rate / (self.single_rate * self.devices)

    @property
    def doubt(self) -> float:
        """Scale of the prediction's error: it grows with the part of the step that is predicted instead of measured."""
        return LEAST_DOUBT + 1 - self.parts["computing"] / self.seconds

    def factor_for(self, rate: float) -> float:
        """Return the factor of the costs of several devices with which this step has a measured rate; at least 0."""
        alone = self.parts["computing"] + self.parts["launching"]
        return max(0.0, (self.samples / rate - alone) / max(self.seconds - alone, 1e-12))


def slowest_of(devices: int) -> float:
    """Expected time of the slowest of several devices, in standard deviations above the mean.

    Source:
        Blom, Statistical estimates and transformed beta-variables, 1958: the (n - 3/8) / (n + 1/4) quantile.
    """
    return NormalDist().inv_cdf((devices - 0.375) / (devices + 0.25))


def predict(
    network: Network,
    one: OneDevice,
    fabric: Fabric,
    host: Host,
    config: ParallelConfig,
    *,
    calibration: Calibration = CALIBRATION,
    factor: float = 1.0,
) -> StepPrediction:
    """Predict the step of ``fabric.devices`` devices.

    Args:
        network: The network.
        one: The measurement of one device.
        fabric: The devices and their links.
        host: The host.
        config: How the devices divide a step.
        calibration: Fitted costs.
        factor: By how much the costs of several devices are larger than these, where a step of several was measured.
    """
    parts = _step(network, one, fabric, host, config, calibration)
    added: dict[Cause, float] = {cause: each for cause, each in parts.items() if cause != "computing"}
    if fabric.devices > 1:
        added = {cause: each if cause == "launching" else each * factor for cause, each in added.items()}
    seconds = parts["computing"] + sum(added.values())
    dominant = max(added, key=lambda cause: added[cause])
    found = StepPrediction(
        devices=fabric.devices,
        samples=config.micro_batch * config.passes * fabric.devices,
        seconds=seconds,
        low_seconds=seconds / (1 + one.uncertainty),
        high_seconds=seconds * (1 + one.uncertainty),
        parts={"computing": parts["computing"], **added},
        limit=dominant if added[dominant] > seconds / 100 else "computing",
        single_rate=one.samples / one.seconds,
    )
    if fabric.devices == 1:
        return found
    # The range never goes below the time that the device needs at least.
    floor = one.seconds * config.micro_batch / one.samples * config.passes if one.is_bound else 0.0
    return replace(
        found,
        low_seconds=max(floor, found.low_seconds * math.exp(found.doubt * calibration.low)),
        high_seconds=found.high_seconds * math.exp(found.doubt * calibration.high),
    )


def _computing(network: Network, one: OneDevice, host: Host, config: ParallelConfig) -> tuple[float, float]:
    """Return the seconds of one pass on one device, and how many of them the device waits for kernel launches."""
    seconds = one.seconds * config.micro_batch / one.samples
    if host.shares_cores or (one.samples == config.micro_batch and not one.is_bound):
        return seconds, 0.0  # it is part of the measurement
    floor = LAUNCH_SECONDS * network.tensors * config.launched
    return max(seconds, floor), max(0.0, floor - seconds)


def _step(
    network: Network, one: OneDevice, fabric: Fabric, host: Host, config: ParallelConfig, calibration: Calibration
) -> dict[Cause, float]:
    devices = fabric.devices
    single, launching = _computing(network, one, host, config)
    pass_seconds, crowded = single, 0.0
    if host.shares_cores and host.cores_per_device is not None:
        # With more threads than cores, threads wait for one another.
        local = min(devices, fabric.per_node)
        crowded = single * max(0.0, local * host.threads / (host.cores_per_device * fabric.per_node) - 1)
    parts: dict[Cause, float] = dict.fromkeys(CAUSES, 0.0)
    parts["computing"] = (pass_seconds - launching) * config.passes
    parts["launching"] = launching * config.passes
    parts["cores"] = crowded * config.passes
    if devices > 1:
        tensor_share = 1.0
        if not host.shares_cores:
            tensor_share = calibration.host
            crowding = host.devices_per_core(devices, fabric.per_node)
            parts["sharing"] = calibration.sharing * crowding * pass_seconds * config.passes
            parts["update"] = _update(one, config, calibration)
            # A byte crosses the link and the device's own memory, one after the other.
            rate = 1 / (1 / fabric.within.bytes_per_second + 1 / calibration.bytes_per_second)
            fabric = replace(fabric, within=replace(fabric.within, bytes_per_second=rate))
        timeline = _timeline(network, fabric, config, pass_seconds + crowded)
        parts["communication"] = timeline.exposed_seconds + timeline.stretched_seconds
        parts["host"] = network.tensors * host.seconds_per_tensor * host.waits * tensor_share + host.seconds_per_step
        noise = one.spread * (pass_seconds + crowded) * config.passes**0.5
        parts["waiting"] = noise * slowest_of(devices)
    supply = host.supply_per_second(devices, fabric.per_node)
    if supply is not None and devices > 1:
        needed = config.micro_batch * config.passes * devices / supply
        parts["data"] = max(0.0, needed - sum(parts.values()))
    return parts


def _update(one: OneDevice, config: ParallelConfig, calibration: Calibration) -> float:
    """Return how much longer a step's update takes than is part of as many of the measured passes."""
    if config.memory_bytes_per_second is None:
        return 0.0
    seconds = config.parameters * calibration.update_bytes / config.memory_bytes_per_second
    return seconds * max(0.0, 1 - config.passes / one.passes)


def _timeline(network: Network, fabric: Fabric, config: ParallelConfig, pass_seconds: float) -> Timeline:
    taken = config.taken
    if taken is None:
        taken = UNITS_OF_A_COLLECTIVE / (config.units_per_device or UNKNOWN_UNITS)
    backward = pass_seconds * BACKWARD_SHARE
    if config.strategy == "ddp":
        return reduce_behind(
            buckets(network.gradients, config.bucket_bytes), backward, fabric.all_reduce_seconds, taken
        )
    one = gather_around(
        network.units,
        pass_seconds - backward,
        backward,
        fabric.all_gather_seconds,
        taken=taken,
        regathered=config.regathered,
    )
    times = config.passes
    return Timeline(one.busy_seconds * times, one.exposed_seconds * times, one.stretched_seconds * times)
