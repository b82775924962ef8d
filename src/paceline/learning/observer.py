"""What a few steps show of a network: gradients, updates, modes, statistics. Nothing is changed.

The figures stay on the device until they are asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from paceline.learning.losses import LossWatcher, described, without_watcher

_MOST_BLOCKS = 24
_SAMPLED = 256
_LAST_STEPS = 8
_NAMED = 4
_SMALL = 1e-30


def is_observed(step: int, total_steps: int) -> bool:
    """Whether a step, counted from 0, is observed in full: the 1st, 2nd, 4th, 8th, … and the last."""
    return (step + 1) & step == 0 or step + 1 == total_steps


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
        self._first: Tensor | None = None
        self._before: Tensor | None = None
        self._handles: list[Any] = []
        self._watcher = LossWatcher()
        self._is_forward = False
        self._gradients: Tensor | None = None
        self._zero_rows: Tensor | None = None
        self._seen: dict[str, Any] = {}

    def begin(self) -> None:
        """Begin to observe a step in full."""
        self._before = self._sampled()
        self._first = self._before if self._first is None else self._first
        self._seen = {"calls": [], "evaluating": [], "dropout": [], "statistics": {}}
        if self._hooked:
            self._hook()

    @contextmanager
    def around_forward(self, model: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
        """Observe a micro-batch's loss; the context's value is the network to call in it."""

        self._seen.get("calls", []).append([])
        with self._watcher:
            self._is_forward = True
            try:
                yield without_watcher(model)
            finally:
                self._is_forward = False

    def after_backward(self) -> None:
        """Keep the gradients of a step, after its last backward pass."""
        if self._before is None:
            return
        gradients = [_local(each.grad) for _, each in self._named if each.grad is not None]
        if gradients:
            norms = torch._foreach_norm(gradients)  # noqa: SLF001  # as torch's own clip_grad_norm_; one call for all
            self._gradients = torch.stack([each.float() for each in norms])
            matrices = [each for each in gradients if each.ndim > 1 and each.numel()]
            if matrices:
                self._zero_rows = torch.stack(
                    [(each.flatten(1).abs().amax(dim=1) == 0).float().mean() for each in matrices]
                )
        self._seen["has_gradient"] = [each.grad is not None for _, each in self._named]

    def end(self) -> dict[str, Any]:
        """End a step, after its update, and return what was observed; waits for the device."""
        for each in self._handles:
            each.remove()
        self._handles = []
        losses = described(self._watcher.drain())
        found: dict[str, Any] = {"losses": losses} if losses else {}
        if self._before is None:
            return found
        before, self._before = self._before, None
        found |= self._moves(before, self._sampled())
        found |= self._modes()
        self._gradients = self._zero_rows = None
        self._seen = {}
        return found

    def _sampled(self) -> Tensor:
        """Return a few values of each parameter, on the host."""
        samples = [_some(_local(each.detach())) for _, each in self._named]
        return torch.cat([each.float() for each in samples]).cpu() if samples else torch.zeros(0)

    def _moves(self, before: Tensor, after: Tensor) -> dict[str, Any]:
        assert self._first is not None
        sizes = [min(_local(each).numel(), _SAMPLED) for _, each in self._named]
        parts = [torch.split(each.double(), sizes) for each in (self._first, before, after)]
        norms = iter([] if self._gradients is None else self._gradients.tolist())
        rows = iter([] if self._zero_rows is None else self._zero_rows.tolist())
        has_gradient = self._seen.get("has_gradient", [False] * len(self._named))
        blocks: dict[str, list[float]] = {}
        dead: dict[str, float] = {}
        for index, (name, each) in enumerate(self._named):
            norm = next(norms, 0.0) if has_gradient[index] else 0.0
            local = _local(each)
            if has_gradient[index] and local.ndim > 1 and local.numel():
                share = next(rows, 0.0)
                if share:
                    dead[name] = share
            if not each.requires_grad or not sizes[index]:
                continue
            first, old, new = (part[index] for part in parts)
            weight = local.numel() / sizes[index]
            sums = blocks.setdefault(self._blocks[index], [0.0, 0.0, 0.0, 0.0, 0.0])
            sums[0] += norm * norm
            sums[1] += weight * float((old * old).sum())
            sums[2] += weight * float(((new - old) ** 2).sum())
            sums[3] += weight * float(((new - first) ** 2).sum())
            sums[4] += local.numel()
        trained = sum(each.numel() for _, each in self._named if each.requires_grad)
        every = sum(each.numel() for _, each in self._named)
        idle = [
            name for (name, each), has in zip(self._named, has_gradient, strict=True) if each.requires_grad and not has
        ]
        return {
            "blocks": {
                name: {
                    "gradient": _short(math.sqrt(sums[0])),
                    "weight": _short(math.sqrt(sums[1])),
                    "update": _short(math.sqrt(sums[2] / max(sums[1], _SMALL))),
                    "moved": _short(math.sqrt(sums[3] / max(sums[1], _SMALL))),
                    "parameters": round(sums[4]),
                }
                for name, sums in blocks.items()
            },
            "trained": trained,
            "parameters": every,
            "without_gradient": idle[:_NAMED],
            "zero_rows": {name: _short(dead[name]) for name in sorted(dead, key=lambda each: -dead[each])[:_NAMED]},
        }

    def _modes(self) -> dict[str, Any]:
        seen = self._seen
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
            found["statistics"] = {
                "name": worst,
                "shift": _short(figures[worst][0]),
                "ratio": _short(figures[worst][1]),
            }
        for name in ("inputs", "outputs"):
            if name in seen:
                keys = ("mean", "std", "low", "high", "between")
                found[name] = dict(zip(keys, map(_short, seen[name].tolist()), strict=True))
        return found

    # Hooks

    def _hook(self) -> None:
        network = self._network
        self._handles.append(network.register_forward_pre_hook(self._note_call, with_kwargs=True))
        self._handles.append(network.register_forward_hook(self._note_output))
        for name, each in network.named_modules():
            if isinstance(each, _BatchNorm):
                self._handles.append(each.register_forward_pre_hook(partial(self._note_norm, name)))
            elif isinstance(each, _DropoutNd):
                self._handles.append(each.register_forward_pre_hook(partial(self._note_dropout, name)))

    def _note_call(self, _: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not self._is_forward:
            return
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        key = tuple((each.data_ptr(), each._version, each.shape) for each in tensors)  # noqa: SLF001  # torch's own
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
    """Return the mean, spread, extremes, and the spread between samples at one place, averaged over places."""
    values = tensor.detach().float()
    low, high = values.aminmax()
    between = values.std(dim=0).mean() if len(values) > 1 else torch.full((), math.nan, device=values.device)
    return torch.stack((values.mean(), values.std(), low, high, between))


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
