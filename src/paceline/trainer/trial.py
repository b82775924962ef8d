"""What is found out on a run's own network before its first step, and how does that leave no trace there?"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from paceline.data.batch import Batch
from paceline.distributed.exact import buffers_kept
from paceline.distributed.strategy import Replicas
from paceline.errors import ModelError
from paceline.records.events import MeasurementEvent
from paceline.trainer.compile_trial import try_compiled
from paceline.trainer.step import seed_forward

if TYPE_CHECKING:
    from paceline.trainer.run import Run

# fp16 loses small numbers; by this much they are raised, in both of what is compared.
FP16_SCALE = 1024.0
_ROUNDS = 5

Gradients = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Comparison:
    """How long one thing takes beside another, measured in turns.

    Attributes:
        ratios: Seconds of the first over seconds of the second, round by round.
    """

    ratios: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle one."""
        return statistics.median(self.ratios)

    def inverse(self) -> Comparison:
        """The second beside the first."""
        return Comparison(tuple(1 / each for each in self.ratios))

    def __str__(self) -> str:
        return f"{self.median:.2f} ({min(self.ratios):.2f} to {max(self.ratios):.2f}, {len(self.ratios)} rounds)"


class Trial:
    """Forward and backward passes of one micro-batch that move nothing: no weight, buffer, gradient or random state."""

    def __init__(self, run: Run, replicas: Replicas, batch: Batch) -> None:
        self.run = run
        self._replicas = replicas
        self.batch = batch
        self._named = {name: each for name, each in run.network.named_parameters() if each.requires_grad}

    @contextmanager
    def without_a_trace(self) -> Iterator[None]:
        """Put buffers and random states back to where they are now, also after an error."""
        with _random_states_kept(self.run.device), buffers_kept(self.run.network), self._replicas.aside():
            yield

    def gradients(self, model: Callable[..., Any], *, autocast: bool = True) -> Gradients:
        """The gradient of this batch, by parameter; those that take no part are left out."""
        run = self.run
        seed_forward(run.recipe.seed, self.batch.slice, run.device)
        with run.precision.autocast() if autocast else ExitStack():
            loss = run.task.loss(model, self.batch)
        if run.precision.scaler is not None:
            loss = loss * FP16_SCALE
        # Not backward(): nothing is added to anything, and no hook of a wrapper's hears of it.
        found = torch.autograd.grad(loss, list(self._named.values()), allow_unused=True)
        return {name: each for name, each in zip(self._named, found, strict=True) if each is not None}

    def compare(self, first: Callable[[], Any], second: Callable[[], Any]) -> Comparison:
        """Time two things in turns, both of which have been done before."""
        return Comparison(tuple(self._seconds(first) / self._seconds(second) for _ in range(_ROUNDS)))

    def _seconds(self, act: Callable[[], Any]) -> float:
        self._settle()
        begun = time.perf_counter()
        act()
        self._settle()
        return time.perf_counter() - begun

    def _settle(self) -> None:
        if self.run.device.type != "cpu":
            torch.get_device_module(self.run.device).synchronize()


def try_out(run: Run, batches: Iterator[Batch]) -> Iterator[Batch]:
    """Before a run's very first step: see what the recipe asks to be seen, and return the stream untouched.

    Raises:
        ModelError: On every process, if what is compiled is not what was written.
    """
    asked = [try_compiled] * (run.plan.compile != "off") + [try_deterministic] * run.recipe.train.deterministic
    # A network that is spread over processes cannot be tried by itself: what determinism costs there is not measured.
    if run.progress.position or not asked or not isinstance(run.strategy, Replicas):
        return batches
    first = next(batches, None)
    if first is None:
        return batches
    run.pulse.enter("forward", samples=first.ids)
    for each in asked:
        begun = time.perf_counter()
        found, failure = None, ""
        try:
            with (trial := Trial(run, run.strategy, first)).without_a_trace():
                found = each(trial)
        except ModelError as error:
            failure = str(error)
        _agree(run, failure)
        if found is not None:
            run.recorder.write(replace(found, seconds=time.perf_counter() - begun))
    run.recorder.flush()
    return chain([first], batches)


def try_deterministic(trial: Trial) -> MeasurementEvent:
    """Measure what deterministic kernels cost, on the network as it is uncompiled.

    Raises:
        ModelError: If an operation has none.
    """
    run = trial.run

    def passes() -> Gradients:
        return trial.gradients(run.network)

    def freely() -> Gradients:
        with _any_kernels(run.device):
            return passes()

    try:
        passes()
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        raise ModelError(f"train.deterministic=true: {' '.join(str(error).split())[:300]}") from error
    freely()
    cost = trial.compare(passes, freely)
    return MeasurementEvent(
        **run.progress.here,
        what="deterministic",
        message=f"train.deterministic=true: forward and backward passes take {cost} times as long as without it",
        seconds=0.0,
        metrics={"slowdown": cost.median},
    )


@contextmanager
def _any_kernels(device: torch.device) -> Iterator[None]:
    """As a run computes that does not ask for determinism."""
    benchmark = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(mode=False)
    torch.backends.cudnn.benchmark = device.type == "cuda"
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = benchmark
        torch.use_deterministic_algorithms(mode=True)


@contextmanager
def _random_states_kept(device: torch.device) -> Iterator[None]:
    if device.type == "cpu":
        with torch.random.fork_rng(devices=[]):
            yield
    else:
        index = [device.index or 0]
        with torch.random.fork_rng(devices=index, device_type=device.type):
            yield


def _agree(run: Run, failure: str) -> None:
    """Fail on every process if one does; a collective."""
    failures: Mapping[int, str] = dict(enumerate(run.collectives.gather(failure)))
    for rank, each in failures.items():
        if each:
            raise ModelError(each if len(failures) == 1 else f"rank {rank}: {each}")
