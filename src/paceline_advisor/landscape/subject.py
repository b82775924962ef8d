"""What is the loss of a network where its weights are others?

The weights of a network are one flat vector here, in the order of its named parameters. Everything is computed in the
numbers the weights are kept in, float32 mostly, on samples that are the same at every point; dropout is off.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.data.batch import Batch
from paceline.errors import PacelineError
from paceline.metrics.accumulator import Accumulator
from paceline.tasks.task import Task

BatchNormUse = Literal["recomputed", "stored"]
Split = Literal["train", "validation"]


class Subject:
    """A network that belongs to the study alone, with the samples it is tried on.

    Args:
        task: Says what the loss and the accuracies of a batch are.
        network: The network, on its device; its weights are moved about.
        samples: Batches of each split, on the device.
        batch_norm: Where BatchNorm's statistics come from: ``recomputed`` from each batch, as in training, or
            ``stored`` with the weights, as in evaluation.
    """

    def __init__(
        self,
        task: Task,
        network: nn.Module,
        samples: Mapping[Split, Sequence[Batch]],
        *,
        batch_norm: BatchNormUse = "recomputed",
    ) -> None:
        if task.metrics[0].is_collected:
            raise PacelineError(
                f"the first metric of the task {type(task).__name__}, {task.metrics[0].name}, is collected and no "
                "mean, and a landscape is that of a loss; put the loss first among its metrics."
            )
        self.task = task
        self.network = network.eval().requires_grad_(requires_grad=True)
        self.batch_norm = batch_norm
        self._samples = {split: tuple(batches) for split, batches in samples.items()}
        self._numbers: dict[Split, float] = {}
        self._named = dict(network.named_parameters())
        self._parameters = list(self._named.values())
        self._statistics = [each for each in network.buffers() if each.is_floating_point()]
        norms = [each for each in network.modules() if isinstance(each, _BatchNorm)]
        # One without statistics of its own normalises by the batch anyway; one over processes cannot be alone.
        self._norms = [each for each in norms if each.track_running_stats and not isinstance(each, nn.SyncBatchNorm)]
        self.device = self._parameters[0].device

    @property
    def has_batch_norm(self) -> bool:
        """Whether it makes a difference where the statistics come from."""
        return bool(self._norms)

    @property
    def size(self) -> int:
        """Numbers among the weights."""
        return sum(each.numel() for each in self._parameters)

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """The shape of each parameter, in the order of the vector."""
        return {name: each.shape for name, each in self._named.items()}

    def count(self, split: Split) -> int:
        """Samples of a split."""
        return sum(len(batch.ids) for batch in self._samples[split])

    def here(self) -> Tensor:
        """A copy of the weights, [size]."""
        return _flat([each.detach() for each in self._parameters])

    def statistics(self) -> Tensor:
        """A copy of all floating-point buffers (BatchNorm's statistics), one flat vector."""
        return _flat(self._statistics) if self._statistics else torch.empty(0, device=self.device)

    @torch.no_grad()
    def move_to(self, point: Tensor, statistics: Tensor | None = None) -> None:
        """Give the network the weights at a point, and other statistics if there are some."""
        _unflatten(point, self._parameters)
        if statistics is not None:
            _unflatten(statistics, self._statistics)

    def measure(self, point: Tensor, on: Split, *, batch_norm: BatchNormUse | None = None) -> dict[str, float]:
        """Every metric of the task at a point, over all samples of a split; not finite where the loss is not.

        Args:
            point: The weights, [size].
            on: The split.
            batch_norm: Where statistics come from, if not as everywhere else.
        """
        self.move_to(point)
        sums, collectors = Accumulator(self.task.metrics, self.device), self.task.collectors()
        with self._norms_in(batch_norm or self.batch_norm), torch.no_grad():
            for batch in self._samples[on]:
                scores = self.task.score(self.network, batch)
                sums.add(scores)
                for each in collectors:
                    each.add(scores, batch.ids)
        found = sums.results(sums.rows())[1]
        for each in collectors:
            found |= each.results([each.part()])
        return found

    def loss_and_gradient(self, point: Tensor, on: Split) -> tuple[float, Tensor]:
        """The mean loss over a split at a point, and its gradient there, [size]."""
        self.move_to(point)
        total, gradient = 0.0, torch.zeros_like(point)
        with self._norms_in(self.batch_norm):
            for share in self._losses(on):
                gradient += _flat(torch.autograd.grad(share, self._parameters, materialize_grads=True))
                total += share.item()
        return total, gradient

    def curvature(self, point: Tensor, on: Split) -> Callable[[Tensor], Tensor]:
        """What multiplies a vector, [size], by the Hessian of the mean loss at a point."""

        def apply(vector: Tensor) -> Tensor:
            self.move_to(point)
            product = torch.zeros_like(point)
            # Attention's fast kernels have no second derivative.
            with self._norms_in(self.batch_norm), sdpa_kernel(SDPBackend.MATH), _saying_what_has_no_derivative():
                for share in self._losses(on):
                    product += self._product(share, vector)
            return product

        return apply

    def _product(self, loss: Tensor, vector: Tensor) -> Tensor:
        gradients = torch.autograd.grad(loss, self._parameters, create_graph=True, materialize_grads=True)
        along = torch.zeros((), dtype=vector.dtype, device=self.device)
        begin = 0
        for each in gradients:
            part = vector[begin : begin + each.numel()].view(each.shape)
            along = along + (each * part).sum()
            begin += each.numel()
        if not along.requires_grad:  # the loss is a line
            return torch.zeros_like(vector)
        return _flat(torch.autograd.grad(along, self._parameters, materialize_grads=True))

    def _losses(self, on: Split) -> Iterator[Tensor]:
        """Each batch's share of the mean loss over the split."""
        metric, number = self.task.metrics[0], self._number(on)
        name = metric.summed
        exact = torch.float32 if self.device.type == "mps" else torch.float64
        for batch in self._samples[on]:
            share = metric.scale * self.task.score(self.network, batch)[name].to(exact).sum() / number
            if not share.requires_grad:
                raise PacelineError(
                    f"the task {type(self.task).__name__} gives a {name} without a gradient when it scores, so that "
                    "neither sharpness nor curvature can be computed; leave --measure sharpness and curvature out."
                )
            yield share

    def _number(self, on: Split) -> float:
        """What the loss of a split is divided by: its samples, or what the task's metric says, tokens say."""
        per = self.task.metrics[0].per
        if per is None:
            return self.count(on)
        if on not in self._numbers:
            with torch.no_grad():
                scores = (self.task.score(self.network, batch) for batch in self._samples[on])
                self._numbers[on] = sum(float(each[per].sum()) for each in scores)
        return self._numbers[on]

    @contextlib.contextmanager
    def _norms_in(self, use: BatchNormUse) -> Iterator[None]:
        for norm in self._norms:
            # With these two, a batch is normalised by its own statistics and leaves no trace in the stored ones.
            norm.training, norm.track_running_stats = use == "recomputed", use == "stored"
        try:
            yield
        finally:
            for norm in self._norms:
                norm.training, norm.track_running_stats = False, True


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([each.reshape(-1) for each in tensors])


def _unflatten(vector: Tensor, into: Sequence[Tensor]) -> None:
    begin = 0
    for each in into:
        each.copy_(vector[begin : begin + each.numel()].view(each.shape))
        begin += each.numel()


class NoSecondDerivativeError(PacelineError):
    """A loss whose curvature cannot be computed."""


@contextlib.contextmanager
def _saying_what_has_no_derivative() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        if "derivative" not in str(error) and "double backward" not in str(error):
            raise
        said: Any = " ".join(str(error).split())[:200]
        raise NoSecondDerivativeError(
            f"the loss of this network has no second derivative ({said}), so that its curvature cannot be computed; "
            "leave curvature out of --measure."
        ) from error
