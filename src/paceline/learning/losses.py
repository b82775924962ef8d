"""What the loss functions of a step or an evaluation are given, in sums.

A loss and its targets tell what the best answer would be that ignores the input: the majority class, the mean. The sums
stay on the device until they are asked for, and those of several processes add up.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.overrides import _get_current_function_mode as _innermost_mode

_OF_CLASSES = frozenset({"cross_entropy", "nll_loss"})
_OF_ANSWERS = frozenset({"binary_cross_entropy_with_logits", "binary_cross_entropy"})
_OF_NUMBERS = frozenset({"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"})
# Of a loss that calls none of these: it may be on any scale.
_OWN_CLASSES, _OWN_NUMBERS = "own_classes", "own_numbers"
_MOST_COLUMNS = 64
BINS = 10
# Above this, the probabilities of all classes would take as much memory as the network's answer.
_MOST_CLASSES = 1000
_MOST_PARTS, _FEW_NUMBERS = 16, 1 << 12

_CLASS_SUMS = ("labels", "right", "groups", "right_right", "right_labels", "labels_labels")
_NUMBER_SUMS = ("values", "target", "target_target", "answer", "answer_answer", "answer_target")


@dataclass(kw_only=True)
class _Sums:
    """Sums of the calls of one loss function.

    Attributes:
        width: Classes, or columns of numbers.
        sums: For classes [6 + 2 * BINS], for numbers [6, width]; float64 on the host.
        counts: Labels of each class [width].
        low: The smallest answer; ``high``, the largest; ``off_one``, how far the sum over a row's classes, or of their
            exponentials, is from 1.
        target_low: The smallest target, of numbers; ``target_high``, the largest.
        smoothing: Label smoothing, where the function was given one.
    """

    width: int
    sums: NDArray[np.float64]
    counts: NDArray[np.float64]
    low: float = math.inf
    high: float = -math.inf
    off_one: float = -math.inf
    target_low: float = math.inf
    target_high: float = -math.inf
    loss: NDArray[np.float64] = field(default_factory=lambda: np.zeros(2))
    smoothing: float = 0.0

    def plus(self, other: _Sums) -> _Sums:
        """Return these sums with those of another batch or process."""
        return replace(
            self,
            sums=self.sums + other.sums,
            counts=self.counts + other.counts,
            loss=self.loss + other.loss,
            low=min(self.low, other.low),
            high=max(self.high, other.high),
            off_one=max(self.off_one, other.off_one),
            target_low=min(self.target_low, other.target_low),
            target_high=max(self.target_high, other.target_high),
        )


Parts = dict[str, _Sums]
"""Sums by name of the loss function."""
Pending = dict[tuple[str, int, float], dict[str, Tensor]]
"""Sums by name of the function, width and label smoothing; ``range`` holds maxima, of the negative where low."""


class Hook:
    """A module's hook that does nothing in a copy of the module, or in one that is pickled."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *values: Any) -> None:
        """Make the call."""
        self._call(*values)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return a function of the standard library that takes anything and does nothing."""
        return getattr, (contextlib.nullcontext(), "__exit__")


class LossWatcher(TorchFunctionMode):
    """Keeps sums of what loss functions are given while it is active; the calls run unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self._pending: Pending = {}
        self._seen: list[tuple[str, weakref.ref[Tensor], weakref.ref[Tensor]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a call, and keep the sums of a loss function."""
        given = kwargs or {}
        result = func(*args, **given)
        name = getattr(func, "__name__", "")
        if name in _OF_CLASSES or name in _OF_ANSWERS or name in _OF_NUMBERS:
            # What it cannot understand says nothing about the run.
            with contextlib.suppress(Exception):
                options = {**given, "weight": args[2]} if len(args) > 2 else given
                self._note(name, result, *_pair(args, given), options)
        return result

    def note_own(self, answer: Any, target: Any) -> None:
        """Keep the sums of what a loss was given that calls no known function; without effect after one that does."""
        if self._seen or not isinstance(answer, Tensor) or not isinstance(target, Tensor):
            return
        has_classes = not target.is_floating_point() and answer.ndim > 1 and answer.shape[1] > 1
        if has_classes and target.shape != answer.shape[:1] + answer.shape[2:]:
            return
        with contextlib.suppress(Exception):
            unknown = torch.full((), math.nan, device=answer.device)
            self._note(_OWN_CLASSES if has_classes else _OWN_NUMBERS, unknown, answer, target, {})

    def _note(self, name: str, loss: Tensor, answer: Tensor, target: Tensor, options: Mapping[str, Any]) -> None:
        if any(each == name and one() is answer and other() is target for each, one, other in self._seen):
            return  # the loss of each sample, after their mean
        self._seen.append((name, weakref.ref(answer), weakref.ref(target)))
        with torch.no_grad(), torch.autocast(answer.device.type, enabled=False):
            self._take(name, loss.detach(), answer.detach(), target.detach(), options)

    def _take(self, name: str, loss: Tensor, answer: Tensor, target: Tensor, options: Mapping[str, Any]) -> None:
        is_of_classes = name in _OF_CLASSES or name == _OWN_CLASSES
        if is_of_classes:
            width, sums = _of_classes(name, answer, target, options)
        else:
            width, sums = _of_numbers(answer, target)
            is_weighted = options.get("weight") is not None or options.get("pos_weight") is not None
            loss = loss * math.nan if is_weighted else loss  # not to be compared with a guess
        reduction = options.get("reduction", "mean")
        count = sums["counts"].sum() if is_of_classes else sums["sums"][0].sum()
        total = loss.double().sum() * (count if reduction == "mean" else 1)
        sums["loss"] = torch.stack((total, count.to(total.dtype)))
        key = name, width, float(options.get("label_smoothing", 0.0))
        if (before := self._pending.get(key)) is not None:  # an evaluation may have any number of batches
            sums = {
                each: (torch.maximum if each == "range" else torch.add)(before[each], value)
                for each, value in sums.items()
            }
        self._pending[key] = sums

    def take(self) -> Pending:
        """Return what was seen since the last time, still on the device."""
        pending, self._pending = self._pending, {}
        return pending

    @contextmanager
    def around(self, network: Callable[..., Any]) -> Iterator[None]:
        """Context that watches, but not a module's own calls: they would be slower.

        The watcher leaves torch's stack of modes meanwhile. Switching modes off would change tensors of other classes
        too, and either would compile a compiled network again.
        """
        self._seen.clear()
        if not isinstance(network, nn.Module):
            with self:
                yield
            return
        paused: list[bool] = []

        def pause(*_: Any) -> None:
            paused.append(_innermost_mode() is self)  # type: ignore[no-untyped-call]  # torch has no types here
            if paused[-1]:
                self.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch has no types here

        def resume(*_: Any) -> None:
            if paused and paused.pop():
                self.__enter__()  # type: ignore[no-untyped-call]  # torch has no types here

        hooks = (
            network.register_forward_pre_hook(Hook(pause)),
            network.register_forward_hook(Hook(resume), always_call=True),
        )
        try:
            with self:
                yield
        finally:
            for each in hooks:
                each.remove()

    def drain(self) -> Parts:
        """Return this process's sums since the last time; waits for the device."""
        return sums_of(self.take())


def note_own(answer: Any, target: Any) -> None:
    """Show the active watcher, if there is one, what a loss of the user was given."""
    watcher = _innermost_mode()  # type: ignore[no-untyped-call]  # torch has no types here
    if isinstance(watcher, LossWatcher):
        watcher.note_own(answer, target)


def sums_of(pending: Pending) -> Parts:
    """Return what :meth:`LossWatcher.take` returned as sums on the host; waits for the device."""
    parts = []
    for (name, width, smoothing), tensors in pending.items():
        values = {key: each.cpu().numpy() for key, each in tensors.items()}
        below, high, off_one, *targets = values.pop("range").tolist()
        target_below, target_high = targets or (-math.inf, -math.inf)
        found = _Sums(
            width=width,
            low=-below,
            high=high,
            off_one=off_one,
            target_low=-target_below,
            target_high=target_high,
            smoothing=smoothing,
            **values,
        )
        parts.append({name: found})
    return merged(parts)


def merged(parts: Sequence[Parts]) -> Parts:
    """Return the sums of several processes or steps together."""
    whole: Parts = {}
    for name, each in (found for part in parts for found in part.items()):
        if name not in whole:
            whole[name] = each
        elif whole[name].width == each.width:
            whole[name] = whole[name].plus(each)
    return whole


def _pair(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    return (args[0] if args else kwargs["input"]), (args[1] if len(args) > 1 else kwargs["target"])


def _of_classes(name: str, answer: Tensor, target: Tensor, options: Mapping[str, Any]) -> tuple[int, dict[str, Tensor]]:
    classes = answer.shape[1] if answer.ndim > 1 else answer.shape[0]
    rows = answer.movedim(1, -1) if answer.ndim > 1 else answer[None]
    if target.is_floating_point():  # a distribution over the classes
        shares = (target.movedim(1, -1) if target.ndim > 1 else target[None]).reshape(-1, classes).double()
        target, counts = shares.argmax(dim=-1).reshape(rows.shape[:-1]), shares.sum(dim=0)
        valid = torch.ones_like(target, dtype=torch.bool)
    else:
        target = target.reshape(rows.shape[:-1])
        valid = (target != int(options.get("ignore_index", -100))) & (target >= 0) & (target < classes)
        counts = torch.zeros(classes, dtype=torch.float64, device=answer.device)
        kept = torch.where(valid, target, 0).reshape(-1)
        counts.scatter_add_(0, kept, valid.reshape(-1).double())
    right = (rows.argmax(dim=-1) == target) & valid
    weighted = [valid.double(), right.double()]
    if (weight := options.get("weight")) is not None:  # a guess and the answers count as much as in the loss
        counts = counts * weight.double()
        weighted = [each * weight.double()[target.clamp(0, classes - 1)] for each in weighted]
    per_group = [each.reshape(len(rows), -1).sum(dim=1) for each in weighted]
    labels, hits = per_group
    used = (labels > 0).sum().double()
    bins = torch.zeros(2 * BINS, dtype=torch.float64, device=answer.device)
    off_one = torch.zeros((), dtype=torch.float64, device=answer.device)
    for part in _parts(rows):
        logs = rows[part].float()
        sums = logs.sum(dim=-1)
        if classes <= _MOST_CLASSES:
            logs = logs if name == "nll_loss" else logs.log_softmax(dim=-1)
            place = (logs.amax(dim=-1).exp() * BINS).long().clamp(0, BINS - 1).reshape(-1)
            bins.scatter_add_(0, place, valid[part].reshape(-1).double())
            bins.scatter_add_(0, place + BINS, right[part].reshape(-1).double())
            if name == "nll_loss":
                sums = logs.exp().sum(dim=-1)
        off_one = torch.maximum(off_one, (sums - 1).abs().amax().double())
    low, high = rows.aminmax()
    values = (labels.sum(), hits.sum(), used, (hits * hits).sum(), (hits * labels).sum(), (labels * labels).sum())
    return classes, {
        "sums": torch.cat((torch.stack(values), bins)),
        "counts": counts,
        "range": torch.stack((-low.double(), high.double(), off_one)),
    }


def _of_numbers(answer: Tensor, target: Tensor) -> tuple[int, dict[str, Tensor]]:
    if answer.shape != target.shape:
        raise ValueError("they are broadcast")
    width = answer.shape[1] if answer.ndim == 2 and answer.shape[1] <= _MOST_COLUMNS else 1
    rows = answer.reshape(-1, width), target.reshape(-1, width)
    sums = torch.zeros((6, width), dtype=torch.float64, device=answer.device)
    for part in _parts(rows[0]):
        found, wanted = (each[part].double() for each in rows)
        values = (torch.ones_like(found), wanted, wanted * wanted, found, found * found, found * wanted)
        sums += torch.stack([each.sum(dim=0) for each in values])
    (low, high), (target_low, target_high) = answer.aminmax(), target.aminmax()
    limits = -low.double(), high.double(), torch.zeros_like(low).double(), -target_low.double(), target_high.double()
    return width, {
        "sums": sums,
        "counts": torch.full((width,), float(len(answer)), dtype=torch.float64, device=answer.device),
        "range": torch.stack(limits),
    }


def _parts(rows: Tensor) -> Iterator[slice]:
    """Yield parts of many rows, so that a copy of one needs much less memory than the loss itself."""
    count = len(rows)
    size = -(-count // max(1, min(_MOST_PARTS, count, rows.numel() // _FEW_NUMBERS)))
    for begin in range(0, count, max(size, 1)):
        yield slice(begin, begin + size)


def described(parts: Parts) -> dict[str, dict[str, Any]]:
    """Return what the sums say, as plain numbers for a record."""
    return {
        name: _classes(name, each) if name in _OF_CLASSES or name == _OWN_CLASSES else _numbers(name, each)
        for name, each in parts.items()
    }


def _classes(name: str, each: _Sums) -> dict[str, Any]:
    labels, right, groups, right_right, right_labels, labels_labels = each.sums[: len(_CLASS_SUMS)].tolist()
    bins = each.sums[len(_CLASS_SUMS) :].reshape(2, BINS)
    total = each.counts.sum()
    if not labels or not total or (name == _OWN_CLASSES and not each.counts[-1]):
        return {}  # numbers of classes below those of the answers: these may be no scores
    shares = each.counts[each.counts > 0] / total
    # Miller and Madow's correction: few labels look less spread out than they are.
    entropy = float(-(shares * np.log(shares)).sum()) + (len(shares) - 1) / (2 * total)
    if each.smoothing:
        smoothed = (1 - each.smoothing) * each.counts / total + each.smoothing / each.width
        entropy = float(-(smoothed * np.log(smoothed)).sum())
    accuracy = right / labels
    spread = right_right - 2 * accuracy * right_labels + accuracy * accuracy * labels_labels
    return {
        "kind": "classes",
        "classes": each.width,
        "labels": round(labels),
        "groups": round(groups),
        "prior": _short(min(entropy, math.log(each.width))),
        "majority": _short(float(shares.max())),
        "accuracy": _short(accuracy),
        "accuracy_error": _short(math.sqrt(max(spread, 0.0)) / labels),
        "loss": _short(_mean(each)),
        "low": _short(each.low),
        "high": _short(each.high),
        "off_one": _short(each.off_one),
        "confidence": [[round(count), round(hits)] for count, hits in bins.T.tolist()],
    }


def _numbers(name: str, each: _Sums) -> dict[str, Any]:
    count, target, target_target, answer, answer_answer, answer_target = each.sums
    count = np.maximum(count, 1)
    mean, found = target / count, answer / count
    variance, spread = target_target / count - mean**2, answer_answer / count - found**2
    covariance = answer_target / count - mean * found
    usable = variance > 1e-12 * np.maximum(mean**2, 1e-30)
    if not usable.any():
        return {"kind": "constant", "groups": round(float(each.counts[0])), "target_mean": _short(float(mean.mean()))}
    scale = np.sqrt(np.maximum(variance * spread, 1e-300))
    error = target_target - 2 * answer_target + answer_answer
    correlation, is_own = (covariance / scale)[usable], name == _OWN_NUMBERS
    return {
        "kind": "answers" if name in _OF_ANSWERS else "numbers",
        "columns": each.width,
        "values": round(float(count.sum())),
        "groups": round(float(each.counts[0])),
        # An own loss may want answers that fall as the target rises, on another scale.
        "correlation": _short(float((np.abs(correlation) if is_own else correlation).mean())),
        "r2": None if is_own else _short(float((1 - error / count / np.maximum(variance, 1e-300))[usable].mean())),
        "target_mean": _short(float(mean.mean())),
        "target_std": _short(float(np.sqrt(np.maximum(variance, 0)).mean())),
        "answer_mean": _short(float(found.mean())),
        "answer_std": _short(float(np.sqrt(np.maximum(spread, 0)).mean())),
        "prior": _short(_binary_entropy(mean)) if name in _OF_ANSWERS else None,
        "loss": _short(_mean(each)),
        "low": _short(each.low),
        "high": _short(each.high),
        "target_low": _short(each.target_low),
        "target_high": _short(each.target_high),
    }


def _binary_entropy(shares: NDArray[np.float64]) -> float:
    p = np.clip(shares, 1e-12, 1 - 1e-12)
    return float((-p * np.log(p) - (1 - p) * np.log(1 - p)).mean())


def _mean(each: _Sums) -> float:
    return float(each.loss[0] / max(each.loss[1], 1))


def _short(value: float) -> float | None:
    """Return a number with six digits; the last bits depend on how the samples were divided among processes."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
