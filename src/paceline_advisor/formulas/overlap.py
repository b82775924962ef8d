"""How much of a step's communication is hidden behind its computing?

One stream of messages beside one of computing, as DDP and FSDP have them: a message starts when what it carries is
ready and the one before it has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

FIRST_BUCKET_BYTES = 2**20
"""DDP's first bucket is small, so that sending begins early (torch.distributed._DEFAULT_FIRST_BUCKET_BYTES)."""
BUCKET_CAP_MB = 25
"""What DDP's other buckets hold unless told otherwise, in MiB (``bucket_cap_mb``)."""


@dataclass(frozen=True)
class Gradient:
    """What a backward pass produces at some time.

    Attributes:
        size_bytes: Of the gradient, as it is sent.
        ready: Share of the backward pass that is over by then, in (0, 1].
    """

    size_bytes: float
    ready: float


@dataclass(frozen=True)
class Unit:
    """What FSDP gathers at once: one block's weights.

    Attributes:
        weight_bytes: Of its weights, as they are gathered.
        gradient_bytes: Of their gradients, as they are reduced.
        share: Its share of a pass's computing.
    """

    weight_bytes: float
    gradient_bytes: float
    share: float


@dataclass(frozen=True)
class Timeline:
    """What communication adds to a step.

    Attributes:
        busy_seconds: Time in which messages were under way.
        exposed_seconds: Time in which computing had to wait for them.
        stretched_seconds: Time by which computing took longer while they were under way.
    """

    busy_seconds: float
    exposed_seconds: float
    stretched_seconds: float


def buckets(gradients: Sequence[Gradient], cap_bytes: float, first_bytes: float = FIRST_BUCKET_BYTES) -> list[Gradient]:
    """What DDP sends at once: gradients in the order of their arrival, closed as soon as they reach the cap.

    Source:
        torch, torch/csrc/distributed/c10d/reducer.cpp (compute_bucket_assignment_by_size); Li et al., PyTorch
        Distributed, VLDB 2020, section 3.2.3.
    """
    found: list[Gradient] = []
    size, limit = 0.0, min(first_bytes, cap_bytes)
    for gradient in gradients:
        size += gradient.size_bytes
        if size >= limit:
            found.append(Gradient(size, gradient.ready))
            size, limit = 0.0, cap_bytes
    if size:
        found.append(Gradient(size, gradients[-1].ready))
    return found


class _Streams:
    """A clock with computing and messages side by side.

    Args:
        taken: Share of the device's computing that messages under way take from it, in [0, 1).
    """

    def __init__(self, taken: float) -> None:
        self.now = self.stretched = self.exposed = self.busy = self.sent = 0.0
        self._rate = max(1 - taken, 1e-3)

    def compute(self, seconds: float) -> None:
        slow = min(seconds, max(0.0, self.sent - self.now) * self._rate)
        more = slow / self._rate - slow
        self.now += seconds + more
        self.stretched += more

    def send(self, seconds: float) -> float:
        """Queue a message that is ready now; when it will have arrived."""
        self.sent = max(self.now, self.sent) + seconds
        self.busy += seconds
        return self.sent

    def wait(self, until: float) -> None:
        self.exposed += max(0.0, until - self.now)
        self.now = max(self.now, until)

    @property
    def timeline(self) -> Timeline:
        return Timeline(self.busy, self.exposed, self.stretched)


def reduce_behind(
    messages: Sequence[Gradient], backward_seconds: float, seconds_of: Callable[[float], float], taken: float = 0.0
) -> Timeline:
    """DDP: each bucket is reduced while the rest of the backward pass goes on.

    Args:
        messages: The buckets, in order.
        backward_seconds: Of the pass without communication.
        seconds_of: What a message of so many bytes takes.
        taken: Share of the device's computing that a message under way takes, in [0, 1).

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


@dataclass(frozen=True, kw_only=True)
class Passes:
    """What FSDP's messages hide behind.

    Attributes:
        forward_seconds: Of the pass without communication.
        backward_seconds: Likewise.
        regathered: Whether weights are let go after the forward pass and gathered anew for the backward one.
    """

    forward_seconds: float
    backward_seconds: float
    regathered: bool = True


def gather_around(
    units: Sequence[Unit], passes: Passes, seconds_of: Callable[[float], float], taken: float = 0.0
) -> Timeline:
    """FSDP: weights are gathered one block ahead, gradients scattered one block behind.

    Args:
        units: The blocks in the order of the forward pass.
        passes: How long the passes take.
        seconds_of: What gathering, or reducing and scattering, so many bytes takes.
        taken: Share of the device's computing that a message under way takes, in [0, 1).

    Source:
        Zhao et al., PyTorch FSDP, VLDB 2023, sections 3.3 and 4.
    """
    streams = _Streams(taken)
    _gathered_pass(streams, list(units), passes.forward_seconds, seconds_of, scatter=False, gather=True)
    backwards = list(reversed(units))
    _gathered_pass(streams, backwards, passes.backward_seconds, seconds_of, scatter=True, gather=passes.regathered)
    streams.wait(streams.sent)
    return streams.timeline


def _gathered_pass(
    streams: _Streams,
    units: list[Unit],
    seconds: float,
    seconds_of: Callable[[float], float],
    *,
    scatter: bool,
    gather: bool,
) -> None:
    arrived = streams.send(seconds_of(units[0].weight_bytes)) if gather else streams.now
    for unit, following in zip(units, [*units[1:], None], strict=True):
        streams.wait(arrived)
        if gather and following is not None:
            arrived = streams.send(seconds_of(following.weight_bytes))
        streams.compute(unit.share * seconds)
        if scatter:
            streams.send(seconds_of(unit.gradient_bytes))
