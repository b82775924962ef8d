"""Score held-out samples in a program's own loop: each once, with sums that do not depend on the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import nn

from paceline.data.batch import Batch
from paceline.distributed.collectives import Collectives
from paceline.errors import LoopError
from paceline.loop.kept import Replica
from paceline.metrics.accumulator import Accumulator, Metric
from paceline.parsing.arguments import tensor
from paceline.records.events import EvaluationEvent

# Names in the records of an evaluation, and in the summary.
_RESERVED = {each.name for each in fields(EvaluationEvent)} | {"event", "last", "best"}


@dataclass(kw_only=True)
class Scores:
    """The batches of this rank, and the values that the program gives for their samples.

    Attributes:
        results: The mean of each value over all samples, by name; empty until the evaluation has ended.
    """

    batches: Iterator[Batch]
    samples: int
    device: torch.device
    collectives: Collectives
    move: Callable[[Any], Any]
    results: dict[str, float] = field(default_factory=dict)
    _sums: dict[str, Accumulator] = field(default_factory=dict)
    _batch: Batch | None = None
    _given: set[str] = field(default_factory=set)

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's batches, on the device."""
        for batch in self.batches:
            self._batch = batch
            self._given.clear()
            yield self.move(batch.inputs)
        self._batch = None

    def add(self, **values: Any) -> None:
        """Add one value for each sample of the current batch; does not wait for the device.

        Args:
            values: By name: a tensor, array or list of one number or truth value for each sample.

        Raises:
            LoopError: If there are more or fewer values than samples, or there is no batch.
        """
        if self._batch is None:
            raise LoopError("scores.add belongs inside `for batch in scores`; move it there.")
        count = len(self._batch.ids)
        for name, given in values.items():
            if name in _RESERVED or not name.isidentifier():
                raise LoopError(f"scores.add({name}=…): evaluation records use that name; choose another.", key=name)
            value = tensor(name, given, self.device, error=LoopError).reshape(-1)
            if len(value) != count or name in self._given:
                found = "a second time" if name in self._given else f"{len(value)} value(s)"
                raise LoopError(
                    f"scores.add({name}=…) was given {found} for a batch of {count} samples; give one value a sample, "
                    "once (a loss with reduction='none').",
                    key=name,
                    value=len(value),
                )
            self._given.add(name)
            self._sums.setdefault(name, Accumulator((Metric(name=name),), self.device)).add({name: value})

    def finish(self, best: str | None) -> None:
        """Combine the values of all ranks; a collective.

        Args:
            best: The value that tells which evaluation is the best.

        Raises:
            LoopError: If some sample has no value, or all have no such value.
        """
        parts = self.collectives.gather({name: each.rows() for name, each in self._sums.items()})
        for name in dict.fromkeys(name for part in parts for name in part):
            total = Accumulator((Metric(name=name),), self.device)
            count, results = total.results([row for part in parts for row in part.get(name, [])])
            if count != self.samples:
                raise LoopError(
                    f"the evaluation has {name} of {count} of {self.samples} samples; call scores.add for every batch.",
                    key=name,
                    value=count,
                )
            self.results |= results
        if not self.results:
            raise LoopError("the evaluation has no values; call scores.add(name=…) for every batch.")
        if best is not None and best not in self.results:
            message = f"the evaluation has no {best}, which tells the best one; it has {', '.join(self.results)}."
            raise LoopError(message, key=best)


@contextmanager
def without_exchange(replicas: list[Replica]) -> Iterator[None]:
    """Let replicas be called by some ranks only: they send no buffers."""
    before = [each.require_forward_param_sync for each in replicas]
    for each in replicas:
        each.require_forward_param_sync = False
    try:
        yield
    finally:
        for each, value in zip(replicas, before, strict=True):
            each.require_forward_param_sync = value


@contextmanager
def modes_restored(modules: Mapping[str, nn.Module], replicas: list[Replica]) -> Iterator[None]:
    """Evaluate without gradients, in evaluation mode; restores the mode of every module."""
    from paceline.trainer.evaluate import evaluation_mode

    with ExitStack() as around:
        around.enter_context(evaluation_mode([*modules.values(), *replicas]))
        around.enter_context(without_exchange(replicas))
        around.enter_context(torch.no_grad())
        yield
