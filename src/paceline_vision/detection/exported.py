"""Detectors as other programs run them: one prepared picture of a fixed size in, the objects found in it out.

torchvision's detectors select boxes step by step, and each step returns as many as it finds, which no exporter can
follow (pytorch/vision, issues 9321 and 9462). Here the same steps return a fixed number: a box that is not selected has
no size or a score of 0, and only the last step removes it.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torchvision.models.detection import RetinaNet
from torchvision.models.detection.generalized_rcnn import GeneralizedRCNN
from torchvision.models.detection.image_list import ImageList
from torchvision.ops import boxes as box_ops

from paceline.checkpoint.weights import SavedWeights
from paceline.data.image.pillow_pixels import Pixels
from paceline.data.slices import evenly_spaced
from paceline.errors import DataError, ModelError
from paceline.tasks.exportable import Exportable, Input, OutputDifference, normalisation
from paceline_vision.detection.dataset import BoxDataset, read_fitting
from paceline_vision.detection.pipeline import as_tensor

FORMATS = ("onnx", "torch-export")
_COMPARED = 16  # held-out pictures
_SCORES, _PIXELS = 1e-3, 0.05  # largest differences
_EMPTY = 1e-2  # pixels; torchvision removes smaller detections


@dataclass(frozen=True, kw_only=True)
class Canvas:
    """How a picture is prepared: shrunk or enlarged as in evaluation, normalised, and padded to a fixed size.

    Attributes:
        height: The height in pixels.
        width: The width in pixels.
        short_side: The shorter side of the picture; None: its own.
        long_side: The most pixels of the longer side; None without `short_side`.
        mean: Mean of each channel, in [0, 1].
        std: Standard deviation of each channel.
    """

    height: int
    width: int
    short_side: int | None
    long_side: int | None
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def size_of(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width to which a picture is resized."""
        scale = 1.0
        if self.short_side is not None and self.long_side is not None:
            scale = min(self.short_side / min(height, width), self.long_side / max(height, width))
        scale = min(scale, self.height / height, self.width / width)
        return max(1, int(height * scale)), max(1, int(width * scale))

    def prepared(self, pixels: Pixels) -> Tensor:
        """Return a picture, uint8 [H, W, 3], as the network takes it, float32 [1, 3, height, width]."""
        mean, std = (torch.tensor(each)[:, None, None] for each in (self.mean, self.std))
        image, size = (as_tensor(pixels).float().div_(255) - mean) / std, self.size_of(*pixels.shape[:2])
        if size != pixels.shape[:2]:
            image = functional.interpolate(image[None], size, mode="bilinear", align_corners=False)[0]
        return functional.pad(image, (0, self.width - size[1], 0, self.height - size[0]))[None].contiguous()

    def in_picture(self, boxes: Tensor, height: int, width: int) -> Tensor:
        """Return boxes in the pixels of a picture instead of the prepared one."""
        rows, columns = self.size_of(height, width)
        scale = torch.tensor([width / columns, height / rows] * 2)
        return torch.minimum((boxes * scale).clamp(min=0), torch.tensor([width, height] * 2))


class _Prepared(nn.Module):
    """Stands for the transform of a detector whose pictures are prepared."""

    def forward(self, images: list[Tensor], targets: Any = None) -> tuple[ImageList, Any]:
        height, width = images[0].shape[-2:]
        return ImageList(torch.stack(images), [(height, width)]), targets

    def postprocess(self, result: list[dict[str, Tensor]], *_: Any) -> list[dict[str, Tensor]]:
        return result


class _Anchors(nn.Module):
    """Stands for the anchors' generator: for pictures of one size they are always the same."""

    anchors: Tensor

    def __init__(self, anchors: Tensor) -> None:
        super().__init__()
        self.register_buffer("anchors", anchors)

    def forward(self, *_: Any) -> list[Tensor]:
        return [self.anchors]


class PreparedDetector(nn.Module):
    """Finds objects in one prepared picture, float32 [1, 3, H, W].

    Returns boxes [N, 4] in its pixels, classes [N] from 0, scores [N], and from Mask R-CNN masks [N, M, M], each the
    content of its box.

    Args:
        network: torchvision's Faster R-CNN, Mask R-CNN or RetinaNet, or a network of its parts.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network: Any = copy.deepcopy(network)
        self.network.transform = _Prepared()

    def of_fixed_size(self, height: int, width: int) -> PreparedDetector:
        """Return a copy for pictures of one size, whose steps return fixed numbers of boxes."""
        fixed = copy.deepcopy(self)
        network = fixed.network
        has_proposals = isinstance(network, GeneralizedRCNN)
        owner = network.rpn if has_proposals else network
        with torch.no_grad():
            images = torch.zeros(1, 3, height, width)
            features = network.backbone(images)
            levels = [features] if isinstance(features, Tensor) else list(features.values())
            owner.anchor_generator = _Anchors(owner.anchor_generator(ImageList(images, [(height, width)]), levels)[0])
        if has_proposals:
            network.rpn.filter_proposals = partial(_proposals, network.rpn)
            network.roi_heads.postprocess_detections = partial(_of_proposals, network.roi_heads)
        else:
            network.postprocess_detections = partial(_of_anchors, network)
        return fixed

    def cutoff(self, scores: Tensor) -> float:
        """Return the score below which nothing is returned: the lowest one if the network keeps no more."""
        owner = self.network.roi_heads if isinstance(self.network, GeneralizedRCNN) else self.network
        return float(scores.min()) if len(scores) == owner.detections_per_img else float(owner.score_thresh)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Return what is found, with scores above the network's threshold."""
        (found,) = self.network([images[0]])
        places = (found["scores"] > 0).nonzero()[:, 0]
        boxes, labels, scores = (found[name][places] for name in ("boxes", "labels", "scores"))
        masks = (found["masks"][places][:, 0],) if "masks" in found else ()
        return (boxes, labels - 1, scores, *masks)


def _proposals(
    rpn: Any, proposals: Tensor, objectness: Tensor, sizes: list[tuple[int, int]], anchors: list[int]
) -> tuple[list[Tensor], list[Tensor]]:
    """Select proposals as ``RegionProposalNetwork.filter_proposals``; those beyond the selected ones have no size."""
    tops = [
        each.topk(min(rpn.pre_nms_top_n(), len(each))).indices for each in torch.split(objectness.flatten(), anchors)
    ]
    firsts = [sum(anchors[:level]) for level in range(len(anchors))]
    top = torch.cat([each + first for each, first in zip(tops, firsts, strict=True)])
    levels = torch.cat([torch.full_like(each, level) for level, each in enumerate(tops)])
    boxes, scores = box_ops.clip_boxes_to_image(proposals[0][top], sizes[0]), objectness.flatten()[top].sigmoid()
    is_valid = _at_least(boxes, rpn.min_size) & (scores >= rpn.score_thresh)
    places, is_kept = _kept(boxes, scores, levels, is_valid, rpn.nms_thresh, rpn.post_nms_top_n())
    return [boxes[places] * is_kept[:, None]], [scores[places]]


def _of_proposals(
    heads: Any, logits: Tensor, regression: Tensor, proposals: list[Tensor], sizes: list[tuple[int, int]]
) -> tuple[list[Tensor], ...]:
    """Select detections as ``RoIHeads.postprocess_detections``; those beyond the selected ones have a score of 0."""
    scores = logits.softmax(dim=-1)[:, 1:]
    labels = torch.arange(1, logits.shape[1]).expand_as(scores).reshape(-1)
    boxes = heads.box_coder.decode(regression, proposals)[:, 1:].reshape(-1, 4)
    boxes, scores = box_ops.clip_boxes_to_image(boxes, sizes[0]), scores.reshape(-1)
    is_valid = (scores > heads.score_thresh) & _at_least(boxes, _EMPTY)
    places, is_kept = _kept(boxes, scores, labels, is_valid, heads.nms_thresh, heads.detections_per_img)
    return [boxes[places]], [scores[places] * is_kept], [labels[places]]


def _of_anchors(
    network: Any, outputs: dict[str, list[Tensor]], anchors: list[list[Tensor]], sizes: list[tuple[int, int]]
) -> list[dict[str, Tensor]]:
    """Select detections as ``RetinaNet.postprocess_detections``; those beyond the selected ones have a score of 0."""
    levels = []
    for regression, logits, near in zip(outputs["bbox_regression"], outputs["cls_logits"], anchors[0], strict=True):
        scores = logits[0].sigmoid().flatten()
        top, classes = scores.topk(min(network.topk_candidates, len(scores))), logits.shape[-1]
        rows = top.indices // classes
        levels.append((network.box_coder.decode_single(regression[0][rows], near[rows]), top, top.indices % classes))
    boxes = box_ops.clip_boxes_to_image(torch.cat([boxes for boxes, _, _ in levels]), sizes[0])
    scores, labels = torch.cat([top.values for _, top, _ in levels]), torch.cat([each for _, _, each in levels])
    places, is_kept = _kept(
        boxes, scores, labels, scores > network.score_thresh, network.nms_thresh, network.detections_per_img
    )
    return [{"boxes": boxes[places], "scores": scores[places] * is_kept, "labels": labels[places]}]


def _at_least(boxes: Tensor, side: float) -> Tensor:
    """Return which boxes have no shorter side."""
    return (boxes[:, 2:] - boxes[:, :2] >= side).all(dim=1)


def _kept(
    boxes: Tensor, scores: Tensor, groups: Tensor, is_valid: Tensor, overlap: float, most: int
) -> tuple[Tensor, Tensor]:
    """Suppress overlapping valid boxes of one group.

    Returns:
        The places of ``most`` boxes by descending score, and which of them are kept.
    """
    candidates = is_valid.nonzero()[:, 0]
    chosen = boxes[candidates]
    # As in torchvision, boxes of other groups are moved so far that they do not overlap.
    step = torch.cat([chosen.flatten(), boxes.new_zeros(1)]).max() + 1
    moved = chosen + (groups[candidates].to(boxes) * step)[:, None]
    kept = candidates[box_ops.nms(moved, scores[candidates], overlap)]
    ranks = torch.full_like(scores, -1.0).index_put((kept,), scores[kept])
    top = ranks.topk(min(most, len(ranks)))
    return top.indices, top.values >= 0


@dataclass(frozen=True, kw_only=True)
class ExportableDetector(Exportable):
    """A detector of prepared pictures.

    Attributes:
        plain: The network with torchvision's own steps.
        pictures: Held-out pictures, prepared.
    """

    plain: PreparedDetector
    pictures: tuple[Tensor, ...]

    def compare(self, other: Any, *, what: str, tolerance: float = _SCORES) -> OutputDifference:
        """Compare what is found in the held-out pictures; raises ModelError if it differs."""
        worst, count = (0.0, 0.0), 0
        for number, picture in enumerate(self.pictures):
            with torch.inference_mode():
                expected, found = self.plain(picture), other(picture)
            differences = _differences(expected, found, tolerance, self.plain.cutoff(expected[2]))
            if differences is None:
                raise ModelError(
                    f"in held-out picture {number + 1} of {len(self.pictures)}, {what} finds other objects than the "
                    f"network (boxes may differ by {_PIXELS} pixels, scores by {tolerance}); nothing was written. Use "
                    "--format safetensors."
                )
            worst, count = (max(worst[0], differences[0]), max(worst[1], differences[1])), count + len(expected[0])
        if not count:
            raise ModelError(
                f"the network finds nothing in {len(self.pictures)} held-out pictures, so nothing can be compared: "
                "train longer, or use --format safetensors."
            )
        _, _, height, width = self.inputs[0].sizes
        return OutputDifference(
            worst[0],
            f"in the scores and {worst[1]:.1e} pixels in the boxes of {count:,} detections in {len(self.pictures)} "
            f"held-out pictures, fitted into {width}x{height} pixels",
        )


def _differences(
    expected: Sequence[Tensor], found: Sequence[Tensor], tolerance: float, cutoff: float
) -> tuple[float, float] | None:
    """Return the largest differences of scores and boxes; None if one has a detection that the other has not.

    Those whose score is within the tolerance of the cutoff may be in only one of them.
    """
    if len(found) != len(expected):
        return None
    (boxes, labels, scores, *masks), (other_boxes, other_labels, other_scores, *other_masks) = expected, found
    is_free, worst = torch.ones(len(other_boxes), dtype=torch.bool), (0.0, 0.0)
    for row, score in enumerate(scores):  # in any order, since scores may be nearly equal
        pixels, likeness = (other_boxes - boxes[row]).abs().amax(dim=1), (other_scores - score).abs()
        fits = is_free & (other_labels == labels[row]) & (pixels <= _PIXELS) & (likeness <= tolerance)
        for mask, others in zip(masks, other_masks, strict=True):
            fits &= (others - mask[row]).abs().amax(dim=(1, 2)) <= tolerance
        if bool(fits.any()):
            index = int(fits.nonzero()[0])
            is_free[index] = False
            worst = max(worst[0], float(likeness[index])), max(worst[1], float(pixels[index]))
        elif score > cutoff + tolerance:
            return None
    return None if bool((other_scores[is_free] > cutoff + tolerance).any()) else worst


def exportable_detector(saved: SavedWeights, network: Any, dataset: BoxDataset) -> ExportableDetector:
    """Return a detector with its input, as large as the data's pictures are shown.

    Args:
        saved: Its weights.
        network: The network with them.
        dataset: The data that it was trained on.

    Raises:
        ModelError: If it is another kind of detector.
        DataError: If no picture is held out, or the classes are others.
    """
    if not isinstance(network, GeneralizedRCNN | RetinaNet) or network.transform.networks_size is not None:
        raise ModelError(
            f"{saved.path} holds a {type(network).__name__}; of detectors, Faster R-CNN, Mask R-CNN and RetinaNet can "
            "be exported, if they keep the shape of pictures: use --format safetensors.",
            path=saved.path,
        )
    held_out, data = dataset.validation, saved.description("data")
    if list(dataset.classes) != data["class_names"]:
        raise DataError(f"the data's classes differ from those of {saved.path}; use the run's data (data.path=FOLDER).")
    transform: Any = network.transform
    keeps = transform.is_fixed
    canvas = Canvas(
        height=1 << 30,
        width=1 << 30,
        short_side=None if keeps else transform.min_size[-1],
        long_side=None if keeps else transform.max_size,
        mean=tuple(transform.image_mean),
        std=tuple(transform.image_std),
    )
    sizes = np.concatenate([dataset.train.sizes, held_out.sizes])
    largest = np.array([canvas.size_of(*size) for size in np.unique(sizes, axis=0).tolist()]).max(axis=0)
    height, width = (math.ceil(side / transform.size_divisible) * transform.size_divisible for side in largest)
    canvas = replace(canvas, height=height, width=width)
    shown = evenly_spaced(len(held_out), _COMPARED)
    if not len(shown):
        raise DataError("a detector's export is compared on held-out pictures, and the data has none; give other data.")
    pictures = tuple(canvas.prepared(read_fitting(held_out, int(each))) for each in shown)
    scaled = f"scale its shorter side to {canvas.short_side} pixels and its longer to {canvas.long_side} at most; "
    description = (
        f"one picture, RGB, float32: {'' if keeps else scaled}shrink it to fit (bilinear, not antialiased); "
        f"{normalisation(vars(canvas))}; pad with zeros at the right and below. Boxes are in pixels of this input"
    )
    plain = PreparedDetector(network).eval()
    names = ("boxes", "labels", "scores", "masks")
    return ExportableDetector(
        network=plain.of_fixed_size(height, width).eval(),
        inputs=(Input("images", (1, 3, height, width), None, description),),
        longest={},
        saved=replace(saved, metadata={**saved.metadata, "data": json.dumps({**data, "picture": vars(canvas)})}),
        output_names=names if "mask" in data["detects"] else names[:3],
        plain=plain,
        pictures=pictures,
    )
