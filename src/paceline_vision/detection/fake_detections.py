"""Fake detections for detectors on tensors without data, in the numbers that training would produce.

What torchvision's detectors compute depends on data: which anchors match an object, which proposals are kept. They run
unchanged, and only data-dependent operators are replaced. These return the maximum counts of the detector's settings,
so a step's tensors have the number and sizes of training.

- The proposal network keeps ``post_nms_top_n`` proposals of each picture, and its loss uses ``batch_size_per_image``
  anchors, ``positive_fraction`` of them on objects.
- The heads train on ``box_batch_size_per_image`` proposals per picture, ``box_positive_fraction`` of them on objects;
  masks train on the latter. Half of them are pooled from the finest pyramid level, half of the rest from the next, and
  so on, for levels whose boxes fit into the picture.
- RetinaNet, FCOS and SSD train boxes on :data:`ANCHORS_OF_AN_OBJECT` anchors per object (measured for RetinaNet on the
  data set `shapes`), and classes on all anchors.
- In evaluation, ``box_detections_per_img`` objects are found in each picture.

Other components, such as custom backbones or heads, get no replacements: their computation must not depend on data.
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
"""Number of mask elements, or rows of boxes, that count as found."""

ANCHORS_OF_AN_OBJECT = 20
_OWN_PARTS = {
    "network": ("backbone", "head"),
    "rpn": ("head", "anchor_generator"),
    "roi_heads": ("box_head", "box_predictor", "mask_head", "mask_predictor"),
}

_aten = torch.ops.aten


def all_of(found: Tensor) -> int:
    """Count everything."""
    return len(found)


class FakeDetections(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch gives its modes no types
    """Replaces data-dependent operators by the current rule; without a rule they fail."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives its modes no types
        self._rules: list[Count | None] = [all_of]

    @contextlib.contextmanager
    def by(self, rule: Count | None) -> Iterator[None]:
        """Use another rule within this context."""
        self._rules.append(rule)
        try:
            yield
        finally:
            self._rules.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run an operator or its replacement."""
        count, answer = self._rules[-1], _ANSWERS.get(func.name())
        if count is None or answer is None:
            return func(*args, **(kwargs or {}))
        return answer(count, func, args)


def _places(count: Count, _: Any, args: tuple[Any, ...]) -> Tensor:
    return torch.empty((count(args[0]), args[0].ndim), dtype=torch.int64, device=args[0].device)


def _chosen(count: Count, func: Any, args: tuple[Any, ...]) -> Tensor:
    """Index, and write by index, with masks converted to positions, as in torch."""
    places: list[Tensor | None] = []
    for index in args[1]:
        is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
        places += _places(count, func, (index,)).unbind(1) if is_mask else [index]
    found: Tensor = func(args[0], places, *args[2:])
    return found


def _number(_: Count, __: Any, args: tuple[Any, ...]) -> float | int | bool:
    if args[0].dtype == torch.bool:
        return False  # no box is invalid
    return 1.0 if args[0].is_floating_point() else 1


_ANSWERS: dict[str, Callable[[Count, Any, tuple[Any, ...]], Any]] = {
    "aten::nonzero": _places,
    "aten::nonzero_numpy": lambda *asked: list(_places(*asked).unbind(1)),
    "aten::index.Tensor": _chosen,
    "aten::index_put": _chosen,
    "aten::index_put_": _chosen,
    "aten::_index_put_impl_": _chosen,
    # Keep all overlapping boxes: a setting limits their number afterwards.
    "torchvision::nms": lambda _, __, args: torch.empty(len(args[0]), dtype=torch.int64, device=args[0].device),
    "aten::_unique2": lambda _, __, args: tuple(args[0].new_empty(size) for size in (1, 0, 0)),
    "aten::_local_scalar_dense": _number,
}


def fake_detections(*networks: nn.Module) -> FakeDetections | None:
    """Return a context in which detectors run on tensors without data; None if none is torchvision's.

    The networks are changed permanently and must not be trained afterwards.
    """
    if "torchvision.models.detection" not in sys.modules:
        return None
    from torchvision.models.detection import FCOS, RetinaNet
    from torchvision.models.detection.generalized_rcnn import GeneralizedRCNN
    from torchvision.models.detection.ssd import SSD

    if not all(isinstance(each, GeneralizedRCNN | RetinaNet | FCOS | SSD) for each in networks):
        return None
    fakes = FakeDetections()
    for network in networks:
        _patch(network, fakes)
    return fakes


def _patch(network: Any, fakes: FakeDetections) -> None:
    from torchvision.ops import MultiScaleRoIAlign

    ask = partial(_replace_count, fakes)
    for name, parts in _OWN_PARTS.items():
        owner = network if name == "network" else getattr(network, name, None)
        for part in (getattr(owner, each, None) for each in parts):
            if part is not None:
                ask(part, "forward", lambda *_: None)
    for module in network.modules():
        if isinstance(module, MultiScaleRoIAlign):
            ask(module, "forward", lambda _, __, shapes, pool=module: _by_level(pool, shapes))
    if hasattr(network, "rpn"):
        _patch_proposals(network.rpn, ask)
        _patch_heads(network.roi_heads, ask)
    else:
        _patch_one_stage(network, ask)
    network.transform.postprocess = partial(_answered, network.transform)


def _replace_count(fakes: FakeDetections, owner: Any, name: str, rule: Callable[..., Count | None]) -> None:
    """Run a method under the rule that its arguments define."""
    method = getattr(owner, name)

    @wraps(method)
    def answered(*args: Any, **kwargs: Any) -> Any:
        with fakes.by(rule(*args)):
            return method(*args, **kwargs)

    setattr(owner, name, answered)


class _Sampler:
    """torchvision's sampling of anchors or proposals for training: a number on objects, the rest off objects."""

    def __init__(self, fakes: FakeDetections, inner: Any) -> None:
        self._fakes, self._inner = fakes, inner
        self.positives = int(inner.batch_size_per_image * inner.positive_fraction)

    def __call__(self, labels: list[Tensor]) -> Any:
        counts = (each for one in labels for each in self.counts(len(one)))
        with self._fakes.by(lambda _: next(counts)):
            return self._inner(labels)

    def counts(self, total: int) -> tuple[int, int]:
        """Return how many of a number of candidates are on an object and how many are not."""
        positives = min(self.positives, total // 2)
        return positives, total - positives

    def chosen(self, total: int) -> tuple[int, int]:
        """The same for the sampled ones."""
        positives, negatives = self.counts(total)
        return positives, min(negatives, self._inner.batch_size_per_image - positives)


def _patch_proposals(rpn: Any, ask: Any) -> None:
    sampler = rpn.fg_bg_sampler = _Sampler(ask.args[0], rpn.fg_bg_sampler)

    def in_loss(*args: Any) -> Count:
        positives, others = sampler.chosen(len(args[2][0]))
        counts = iter((len(args[2]) * positives, len(args[2]) * others))
        return lambda _: next(counts)

    ask(rpn, "filter_proposals", lambda *_: all_of)
    ask(rpn, "assign_targets_to_anchors", lambda *_: all_of)  # the best-matching anchor of each object
    ask(rpn, "compute_loss", in_loss)


def _patch_heads(heads: Any, ask: Any) -> None:
    sampler = heads.fg_bg_sampler = _Sampler(ask.args[0], heads.fg_bg_sampler)

    def positives(*_: Any) -> Count:
        inner = heads.fg_bg_sampler
        return lambda labels: len(labels) * inner.positives // max(1, sum(inner.chosen(10**9)))

    ask(heads, "forward", positives)
    ask(heads, "subsample", lambda *_: lambda labels: sum(sampler.chosen(len(labels))))
    # Each proposal has one class, and the best ones are kept.
    ask(
        heads,
        "postprocess_detections",
        lambda logits, *_: lambda found: min(len(found), max(len(logits), heads.detections_per_img)),
    )


def _patch_one_stage(network: Any, ask: Any) -> None:
    """Losses and detections of RetinaNet, FCOS and SSD, whose loss is not its head's."""
    is_ssd = not hasattr(network.head, "compute_loss")
    ask(network, "compute_loss", lambda targets, *_: _foreground(targets) if is_ssd else all_of)
    for owner in (network.head, getattr(network.head, "regression_head", None)):
        if hasattr(owner, "compute_loss"):
            ask(owner, "compute_loss", lambda targets, *_: _foreground(targets))
    classes = getattr(network.head, "classification_head", None)
    if hasattr(classes, "compute_loss"):
        # RetinaNet ignores only anchors between its two thresholds, which are few.
        ask(classes, "compute_loss", lambda *_: all_of)
    ask(network, "postprocess_detections", lambda *_: lambda found: min(len(found), network.topk_candidates))


def _foreground(targets: list[dict[str, Tensor]]) -> Count:
    objects = sum(len(each["boxes"]) for each in targets)
    of_all = False

    def count(found: Tensor) -> int:
        nonlocal of_all
        if of_all and found.ndim == 1:  # all chosen boxes overlap with their objects
            return len(found)
        if found.ndim == 2:  # FCOS selects for all pictures at once
            of_all = True
            return min(found.numel(), ANCHORS_OF_AN_OBJECT * objects)
        return min(len(found), ANCHORS_OF_AN_OBJECT * max(1, objects // len(targets)))

    return count


def _by_level(pool: Any, shapes: list[tuple[int, int]]) -> Count:
    """Return a mask per level: half of all, half of the rest, …; none for boxes larger than the picture."""
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
    """Return half, half of the rest, …, then all that remains, then zeros."""
    for _ in range(parts - 1):
        yield -(-whole // 2)
        whole //= 2
    yield whole
    while True:
        yield 0


def _answered(transform: Any, found: list[dict[str, Tensor]], shown: Any, original: Any) -> list[dict[str, Tensor]]:
    """Return the detections in the picture's pixels; masks are pasted one at a time at the picture's size."""
    from torchvision.models.detection.transform import resize_boxes

    if transform.training:
        return found
    # No detections when a held-out picture's loss is computed.
    for each, shape, size in zip(found, shown, original, strict=False):
        each["boxes"] = resize_boxes(each["boxes"], shape, size)
        if "masks" in each:
            drawn = [mask.new_zeros(size) for mask in each["masks"]]
            each["masks"] = torch.stack(drawn)[:, None] if drawn else each["masks"].new_zeros((0, 1, *size))
    return found
