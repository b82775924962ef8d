"""What a few steps show of a network: gradients, updates, modes, statistics. Nothing is changed.

The figures stay on the device until they are asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from paceline.learning.losses import Hook, LossWatcher, described, sums_of

_MOST_BLOCKS = 24
_SAMPLED = 256
_FEW_SAMPLES = 32
_LAST_STEPS = 8
_MOST_NORMS = 6
_NAMED = 4
_SMALL = 1e-30


def is_observed(step: int, total_steps: int) -> bool:
    """Whether a step, counted from 0, is observed in full: the 1st, 4th, 16th, 64th, … and the last."""
    number = step + 1
    return (number & step == 0 and number.bit_length() % 2 == 1) or number == total_steps


def has_loss_observed(step: int, total_steps: int) -> bool:
    """Whether the loss of a step, counted from 0, is observed: also those of the last eight."""
    return is_observed(step, total_steps) or step + _LAST_STEPS >= total_steps


class NetworkObserver:
    """Observes single steps of one process.

    Args:
        network: The bare network.
        hooked: Whether modules may be observed; a compiled network would be compiled again.
    """

    def __init__(self, network: nn.Module, *, hooked: bool) -> None:
        self._network, self._hooked = network, hooked
        self._named = list(network.named_parameters())
        self._blocks = _block_names([name for name, _ in self._named])
        self._embeddings = {
            f"{name}.weight"
            for name, each in network.named_modules()
            if isinstance(each, nn.Embedding | nn.EmbeddingBag)
        }
        self._first: Tensor | None = None
        self._before: Tensor | None = None
        self._handles: list[Any] = []
        self._watcher = LossWatcher()
        self._is_forward = self._compares = False
        self._seen: dict[str, Any] = {}

    def begin(self, *, statistics: bool) -> None:
        """Begin to observe a step in full.

        Args:
            statistics: Whether to compare BatchNorm's statistics, which follow only after some steps.
        """
        self._compares = statistics
        self._before = self._sampled()
        if self._first is None or self._first.shape != self._before.shape:  # a program may change a parameter's shape
            self._first = self._before
        self._seen = {"calls": [], "evaluating": [], "dropout": [], "statistics": {}}
        if self._hooked:
            self._hook()

    @contextmanager
    def around_forward(self, model: Callable[..., Any]) -> Iterator[None]:
        """Observe a micro-batch's loss.

        Args:
            model: The module that a step calls: the network, or what wraps or compiles it.
        """
        self._seen.get("calls", []).append([])
        self._is_forward = True
        try:
            with self._watcher.around(model):
                yield
        finally:
            self._is_forward = False

    def after_backward(self) -> None:
        """Keep the gradients of a step, after its last backward pass."""
        if self._before is None:
            return
        gradients = {name: _local(each.grad) for name, each in self._named if each.grad is not None}
        if gradients:
            norms = torch._foreach_norm(list(gradients.values()))  # noqa: SLF001  # one kernel for all; nothing public does it
            self._seen["gradients"] = torch.stack(norms).float()
        # Rows of an embedding that no token has used have no gradient either.
        matrices = [
            name
            for name, each in gradients.items()
            if each.ndim > 1 and each.numel() and name not in self._embeddings and each.layout is torch.strided
        ]
        if matrices:
            largest = [torch.linalg.vector_norm(gradients[name].flatten(1), dim=1) for name in matrices]
            self._seen["zero_rows"] = matrices, torch.stack([(each == 0).float().mean() for each in largest])
        self._seen["has_gradient"] = [each.grad is not None for _, each in self._named]

    def end(self) -> Callable[[], dict[str, Any]]:
        """End a step, after its update; returns a function that waits for the device and returns what was observed."""
        for each in self._handles:
            each.remove()
        before, self._before, self._handles = self._before, None, []
        seen, self._seen = self._seen, {}
        seen |= {"losses": self._watcher.take(), "before": before, "after": None if before is None else self._sampled()}
        return partial(self._found, seen)

    def _found(self, seen: Mapping[str, Any]) -> dict[str, Any]:
        losses = described(sums_of(seen["losses"]))
        found: dict[str, Any] = {"losses": losses} if losses else {}
        return found if seen["before"] is None else found | self._moves(seen) | _modes(seen)

    def _sampled(self) -> Tensor:
        """Return a few values of each parameter."""
        samples = [_some(_local(each.detach())) for _, each in self._named]
        return torch.cat([each.float() for each in samples]) if samples else torch.zeros(0)

    def _moves(self, seen: Mapping[str, Any]) -> dict[str, Any]:
        assert self._first is not None
        values = (self._first, seen["before"], seen["after"])
        first, before, after = (each.cpu().numpy().astype(np.float64) for each in values)
        counts = np.array([_local(each).numel() for _, each in self._named])
        sizes = np.minimum(counts, _SAMPLED)
        if {sizes.sum()} != {each.size for each in (first, before, after)}:  # its shape has changed
            return {}
        # Of each parameter: its weights, their update, and how far they are from the first; squared, summed, scaled up.
        squares = np.stack((before**2, (after - before) ** 2, (after - first) ** 2))
        used, begins = sizes > 0, np.cumsum(sizes) - sizes
        sums, has_moved = np.zeros((3, len(counts))), np.zeros(len(counts))
        if used.any():
            sums[:, used] = np.add.reduceat(squares, begins[used], axis=1) * (counts / np.maximum(sizes, 1))[used]
            has_moved[used] = np.logical_or.reduceat(after != first, begins[used])
        has_gradient = seen.get("has_gradient", [False] * len(self._named))
        norms = iter(seen["gradients"].tolist() if "gradients" in seen else [])
        unknown = 0.0 if "has_gradient" in seen else math.nan  # no optimizer took a step
        gradients = [next(norms, 0.0) if has else unknown for has in has_gradient]
        blocks: dict[str, NDArray[np.float64]] = {}
        for index, (_, each) in enumerate(self._named):
            if each.requires_grad and sizes[index]:
                row = np.array([gradients[index] ** 2, *(sums[:, index]), counts[index], has_moved[index]])
                block = self._blocks[index]
                blocks[block] = blocks[block] + row if block in blocks else row
        named = list(zip(self._named, counts.tolist(), has_gradient, strict=True))
        idle = [name for (name, each), _, has in named if each.requires_grad and not has and "has_gradient" in seen]
        return {
            "blocks": {name: _block(row.tolist()) for name, row in blocks.items()},
            "trained": sum(count for (_, each), count, _ in named if each.requires_grad),
            "parameters": int(counts.sum()),
            "without_gradient": idle[:_NAMED],
            "zero_rows": _dead_rows(seen),
        }

    # Hooks

    def _hook(self) -> None:
        network = self._network
        self._handles.append(network.register_forward_pre_hook(Hook(self._note_call), with_kwargs=True))
        self._handles.append(network.register_forward_hook(Hook(self._note_output)))
        for name, each in network.named_modules():
            if isinstance(each, _BatchNorm):
                self._handles.append(each.register_forward_pre_hook(Hook(partial(self._note_norm, name))))
            elif isinstance(each, _DropoutNd):
                self._handles.append(each.register_forward_pre_hook(Hook(partial(self._note_dropout, name))))

    def _note_call(self, _: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not self._is_forward:
            return
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        key = tuple((each.data_ptr(), each._version, each.shape) for each in tensors)  # noqa: SLF001  # no public count of writes
        self._seen["calls"][-1].append(key)
        if "inputs" not in self._seen and tensors and tensors[0].is_floating_point():
            with suppress(Exception), torch.no_grad():
                self._seen["inputs"] = _figures(tensors[0])

    def _note_output(self, _: nn.Module, __: Any, output: Any) -> None:
        if self._is_forward and "outputs" not in self._seen and isinstance(output, Tensor):
            with suppress(Exception), torch.no_grad():
                self._seen["outputs"] = _figures(output)

    def _note_norm(self, name: str, module: _BatchNorm, args: tuple[Any, ...]) -> None:
        if not self._is_forward or module.running_mean is None or module.running_var is None:
            return
        if not module.training:
            if any(each.requires_grad for each in module.parameters()):
                self._seen["evaluating"].append(name)
            return
        if not self._compares or len(self._seen["statistics"]) >= _MOST_NORMS:
            return
        with suppress(Exception), torch.no_grad():
            values = args[0].detach().float()
            dims = [dim for dim in range(values.ndim) if dim != 1]
            variance, mean = torch.var_mean(values, dim=dims)
            scale = (module.running_var + module.eps).sqrt()
            shift = ((mean - module.running_mean).abs() / scale).median()
            ratio = ((variance + module.eps) / (module.running_var + module.eps)).log().median()
            self._seen["statistics"][name] = torch.stack((shift, ratio))

    def _note_dropout(self, name: str, module: _DropoutNd, _: tuple[Any, ...]) -> None:
        if not self._is_forward:
            return
        if module.training:
            self._seen["dropout"].append(float(module.p))
        elif module.p:
            self._seen["evaluating"].append(name)


def _dead_rows(seen: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the parameters with the largest shares of rows whose gradient is 0."""
    names, shares = seen.get("zero_rows", ([], torch.zeros(0)))
    found = {name: share for name, share in zip(names, shares.tolist(), strict=True) if share}
    return {name: _short(found[name]) for name in sorted(found, key=lambda name: -found[name])[:_NAMED]}


def _modes(seen: Mapping[str, Any]) -> dict[str, Any]:
    """Return how modules were called, and with what."""
    calls = [len(each) for each in seen["calls"]]
    same = [len(each) - len(set(each)) for each in seen["calls"]]
    found: dict[str, Any] = {
        "calls": max(calls, default=0),
        "same_calls": max(same, default=0),
        "evaluating": sorted(set(seen["evaluating"]))[:_NAMED],
        "dropout": max(seen["dropout"], default=0.0),
    }
    if statistics := seen["statistics"]:
        figures = {name: each.tolist() for name, each in statistics.items()}
        worst = max(figures, key=lambda name: figures[name][0] + abs(figures[name][1]))
        found["statistics"] = {"name": worst, "shift": _short(figures[worst][0]), "ratio": _short(figures[worst][1])}
    for name in ("inputs", "outputs"):
        if name in seen:
            keys = ("mean", "std", "low", "high", "between")
            found[name] = dict(zip(keys, map(_short, seen[name].tolist()), strict=True))
    return found


def _local(tensor: Tensor) -> Tensor:
    """Return a sharded tensor's part on this process."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _some(tensor: Tensor) -> Tensor:
    """Return a few values, evenly spread; of a dense tensor in the order of its memory, so that none is copied."""
    count = tensor.numel()
    taken = min(count, _SAMPLED)
    if count <= _SAMPLED or not tensor.is_contiguous():
        return tensor.reshape(-1)[:: max(count // max(taken, 1), 1)][:taken]
    return tensor.view(-1)[:: count // taken][:taken]


def _figures(tensor: Tensor) -> Tensor:
    """Return the mean, spread, extremes, and the spread between samples at one place, averaged over places.

    A few places of a few samples stand for all.
    """
    values = tensor.detach()[:_FEW_SAMPLES].flatten(1) if tensor.ndim > 1 else tensor.detach()[:_SAMPLED, None]
    values = values[:, :: max(values.shape[1] // _SAMPLED, 1)].float()
    low, high = values.aminmax()
    unknown = torch.full((), math.nan, device=values.device)  # of one sample, or one number
    between = values.std(dim=0).mean() if len(values) > 1 else unknown
    return torch.stack((values.mean(), values.std() if values.numel() > 1 else unknown, low, high, between))


def _block(row: list[float]) -> dict[str, float | int | None]:
    """Return a block's entry in a record, from sums over its parameters."""
    gradient, weight, update, distance, count, has_moved = row
    base = weight if weight > _SMALL else math.nan  # nothing can be said relative to 0
    moved = math.sqrt(max(distance, 0) / base) if math.isfinite(distance) else math.nan
    return {
        "gradient": _short(math.sqrt(gradient)) if math.isfinite(gradient) else None,
        "weight": _short(math.sqrt(weight)) if math.isfinite(weight) else None,
        "update": _short(math.sqrt(max(update, 0) / base)) if math.isfinite(update) else None,
        "moved": _short(moved) if has_moved else 0.0,
        "parameters": round(count),
    }


def _block_names(names: Sequence[str]) -> list[str]:
    """Return the part of the network that each parameter is counted in: no more than 24."""
    chosen = ["network"] * len(names)
    for depth in range(1, 6):
        blocks = [".".join(name.split(".")[:-1][:depth]) or name for name in names]
        if len(set(blocks)) > _MOST_BLOCKS:
            break
        chosen = blocks
    return chosen


def _short(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None
