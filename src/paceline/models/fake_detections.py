"""Detections for detectors whose tensors have shapes and no numbers: as many as training would find.

What torchvision's detectors compute depends on what they find: which anchors lie on an object, which proposals are
kept. They are run as they are, and only what asks for numbers is answered: with as many as they take where there is
enough to be found, which is what their own settings say. So a step's tensors are as many and as large as in training.

- The proposal network keeps ``post_nms_top_n`` proposals of each picture, and its loss is of ``batch_size_per_image``
  anchors, ``positive_fraction`` of them on objects.
- The heads learn from ``box_batch_size_per_image`` proposals of a picture, ``box_positive_fraction`` of them on
  objects, and masks from the latter. Half of them are pooled from the finest level of the pyramid, half of the rest
  from the next, and so on, as far as boxes of a level are no larger than the picture.
- RetinaNet and FCOS learn a box from so many anchors for each object (:data:`ANCHORS_OF_AN_OBJECT`: as many as the
  former has on the data set `shapes`), and classes from all.
- In evaluation, ``box_detections_per_img`` objects are found in each picture.

A network's own parts, its backbone or heads say, get no answers: what they compute must not depend on numbers.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

Count = Callable[[Tensor], int]
"""How many elements of a mask, or rows of boxes, count as found."""

ANCHORS_OF_AN_OBJECT = 20
_OWN_PARTS = {
    "network": ("backbone", "head"),
    "rpn": ("head", "anchor_generator"),
    "roi_heads": ("box_head", "box_predictor", "mask_head", "mask_predictor"),
}

_aten = torch.ops.aten


def all_of(found: Tensor) -> int:
    """Everything counts."""
    return len(found)


class FakeDetections(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch gives its modes no types
    """Answers operators that ask for numbers, by the rule of the moment; where there is none, not at all."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives its modes no types
        self._rules: list[Count | None] = [all_of]

    @contextlib.contextmanager
    def by(self, rule: Count | None) -> Iterator[None]:
        """Answer by another rule."""
        self._rules.append(rule)
        try:
            yield
        finally:
            self._rules.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Do an operator, or answer in its place."""
        count, answer = self._rules[-1], _ANSWERS.get(func.name())
        if count is None or answer is None:
            return func(*args, **(kwargs or {}))
        return answer(count, func, args)


def _places(count: Count, _: Any, args: tuple[Any, ...]) -> Tensor:
    return torch.empty((count(args[0]), args[0].ndim), dtype=torch.int64, device=args[0].device)


def _chosen(count: Count, func: Any, args: tuple[Any, ...]) -> Tensor:
    """Indexing, and writing where an index says, where masks become places, as in torch itself."""
    places: list[Tensor | None] = []
    for index in args[1]:
        is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
        places += _places(count, func, (index,)).unbind(1) if is_mask else [index]
    found: Tensor = func(args[0], places, *args[2:])
    return found


def _number(_: Count, __: Any, args: tuple[Any, ...]) -> float | int | bool:
    if args[0].dtype == torch.bool:
        return False  # no box is wrong
    return 1.0 if args[0].is_floating_point() else 1


_ANSWERS: dict[str, Callable[[Count, Any, tuple[Any, ...]], Any]] = {
    "aten::nonzero": _places,
    "aten::nonzero_numpy": lambda *asked: list(_places(*asked).unbind(1)),
    "aten::index.Tensor": _chosen,
    "aten::index_put": _chosen,
    "aten::index_put_": _chosen,
    "aten::_index_put_impl_": _chosen,
    # Of overlapping boxes all: how many stay is cut to a setting's number afterwards.
    "torchvision::nms": lambda _, __, args: torch.empty(len(args[0]), dtype=torch.int64, device=args[0].device),
    "aten::_unique2": lambda _, __, args: tuple(args[0].new_empty(size) for size in (1, 0, 0)),
    "aten::_local_scalar_dense": _number,
}


def fake_detections(*networks: nn.Module) -> FakeDetections | None:
    """Let detectors run where tensors have no numbers, in what is returned; None if they are none of torchvision's.

    The networks are changed for good, and are not to be trained any more.
    """
    if "torchvision.models.detection" not in sys.modules:
        return None
    from torchvision.models.detection import FCOS, RetinaNet
    from torchvision.models.detection.generalized_rcnn import GeneralizedRCNN

    if not all(isinstance(each, GeneralizedRCNN | RetinaNet | FCOS) for each in networks):
        return None
    fakes = FakeDetections()
    for network in networks:
        _settle(network, fakes)
    return fakes


def _settle(network: Any, fakes: FakeDetections) -> None:
    from torchvision.ops import MultiScaleRoIAlign

    ask = partial(_ask, fakes)
    for name, parts in _OWN_PARTS.items():
        owner = network if name == "network" else getattr(network, name, None)
        for part in (getattr(owner, each, None) for each in parts):
            if part is not None:
                ask(part, "forward", lambda *_: None)
    for module in network.modules():
        if isinstance(module, MultiScaleRoIAlign):
            ask(module, "forward", lambda _, __, shapes, pool=module: _by_level(pool, shapes))
    if hasattr(network, "rpn"):
        _settle_proposals(network.rpn, ask)
        _settle_heads(network.roi_heads, ask)
    else:
        _settle_one_stage(network, ask)
    network.transform.postprocess = partial(_answered, network.transform)


def _ask(fakes: FakeDetections, owner: Any, name: str, rule: Callable[..., Count | None]) -> None:
    """Have a method answered by the rule that its arguments give."""
    method = getattr(owner, name)

    @wraps(method)
    def answered(*args: Any, **kwargs: Any) -> Any:
        with fakes.by(rule(*args)):
            return method(*args, **kwargs)

    setattr(owner, name, answered)


class _Sampler:
    """Torchvision's choice of anchors or proposals to learn from: so many on objects, all others beside them."""

    def __init__(self, fakes: FakeDetections, inner: Any) -> None:
        self._fakes, self._inner = fakes, inner
        self.positives = int(inner.batch_size_per_image * inner.positive_fraction)

    def __call__(self, labels: list[Tensor]) -> Any:
        counts = (each for one in labels for each in self.counts(len(one)))
        with self._fakes.by(lambda _: next(counts)):
            return self._inner(labels)

    def counts(self, there: int) -> tuple[int, int]:
        """How many are on an object, and how many are not, of so many."""
        positives = min(self.positives, there // 2)
        return positives, there - positives

    def chosen(self, there: int) -> tuple[int, int]:
        """The same of those that are learned from."""
        positives, others = self.counts(there)
        return positives, min(others, self._inner.batch_size_per_image - positives)


def _settle_proposals(rpn: Any, ask: Any) -> None:
    sampler = rpn.fg_bg_sampler = _Sampler(ask.args[0], rpn.fg_bg_sampler)

    def in_loss(*args: Any) -> Count:
        positives, others = sampler.chosen(len(args[2][0]))
        counts = iter((len(args[2]) * positives, len(args[2]) * others))
        return lambda _: next(counts)

    ask(rpn, "filter_proposals", lambda *_: all_of)
    ask(rpn, "assign_targets_to_anchors", lambda *_: all_of)  # for each object the anchor that fits best
    ask(rpn, "compute_loss", in_loss)


def _settle_heads(heads: Any, ask: Any) -> None:
    sampler = heads.fg_bg_sampler = _Sampler(ask.args[0], heads.fg_bg_sampler)

    def positives(*_: Any) -> Count:
        inner = heads.fg_bg_sampler
        return lambda labels: len(labels) * inner.positives // max(1, sum(inner.chosen(10**9)))

    ask(heads, "forward", positives)
    ask(heads, "subsample", lambda *_: lambda labels: sum(sampler.chosen(len(labels))))
    # Each proposal is of one class, and of those the best remain.
    ask(
        heads,
        "postprocess_detections",
        lambda logits, *_: lambda found: min(len(found), max(len(logits), heads.detections_per_img)),
    )


def _settle_one_stage(network: Any, ask: Any) -> None:
    """RetinaNet's and FCOS's losses, and what they find."""
    ask(network, "compute_loss", lambda *_: all_of)
    for owner in (network.head, getattr(network.head, "regression_head", None)):
        if hasattr(owner, "compute_loss"):
            ask(owner, "compute_loss", lambda targets, *_: _foreground(targets))
    classes = getattr(network.head, "classification_head", None)
    if hasattr(classes, "compute_loss"):
        # RetinaNet leaves out anchors between its two thresholds alone, and those are few.
        ask(classes, "compute_loss", lambda *_: all_of)
    ask(network, "postprocess_detections", lambda *_: lambda found: min(len(found), network.topk_candidates))


def _foreground(targets: list[dict[str, Tensor]]) -> Count:
    objects = sum(len(each["boxes"]) for each in targets)
    of_all = False

    def count(found: Tensor) -> int:
        nonlocal of_all
        if of_all and found.ndim == 1:  # of the boxes that were chosen all overlap with their objects
            return len(found)
        if found.ndim == 2:  # FCOS asks for all pictures at once
            of_all = True
            return min(found.numel(), ANCHORS_OF_AN_OBJECT * objects)
        return min(len(found), ANCHORS_OF_AN_OBJECT * max(1, objects // len(targets)))

    return count


def _by_level(pool: Any, shapes: list[tuple[int, int]]) -> Count:
    """Of a mask for each level: half of all, half of the rest, …; none for larger boxes than the picture."""
    levels = pool.map_levels
    largest = max(max(shape) for shape in shapes)
    last = math.floor(levels.lvl0 + math.log2(largest / levels.s0) + levels.eps)
    reached = min(max(last, levels.k_min), levels.k_max) - levels.k_min + 1
    counts: list[Iterator[int]] = []

    def count(mask: Tensor) -> int:
        if not counts:
            counts.append(_halves(len(mask), reached))
        return next(counts[0])

    return count


def _halves(whole: int, parts: int) -> Iterator[int]:
    """Half of it, half of the rest, …, all that is left; and then nothing."""
    for _ in range(parts - 1):
        yield -(-whole // 2)
        whole //= 2
    yield whole
    while True:
        yield 0


def _answered(transform: Any, found: list[dict[str, Tensor]], shown: Any, original: Any) -> list[dict[str, Tensor]]:
    """What is found, in pixels of the picture: masks are drawn one by one, each as large as it."""
    from torchvision.models.detection.transform import resize_boxes

    if transform.training:
        return found
    # Nothing is found where a held-out picture's loss is asked for.
    for each, shape, size in zip(found, shown, original, strict=False):
        each["boxes"] = resize_boxes(each["boxes"], shape, size)
        if "masks" in each:
            drawn = [mask.new_zeros(size) for mask in each["masks"]]
            each["masks"] = torch.stack(drawn)[:, None] if drawn else each["masks"].new_zeros((0, 1, *size))
    return found
