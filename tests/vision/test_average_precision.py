"""Mean average precision: by hand where it is easy, and against the published program where it is not."""

from __future__ import annotations

import contextlib
import io
import math
from typing import Any

import numpy as np
import pytest
import torch

from paceline_vision.detection.average_precision import AveragePrecision, ImageDetections

SIDE = 48
NAMES = ("disc", "rectangle", "triangle")


def picture(
    boxes: list[list[float]],
    scores: list[float],
    truth: list[list[float]],
    *,
    labels: list[int] | None = None,
    wanted: list[int] | None = None,
    crowd: list[bool] | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    found = {
        "boxes": torch.tensor(boxes).reshape(-1, 4),
        "scores": torch.tensor(scores),
        "labels": torch.tensor(labels or [1] * len(boxes), dtype=torch.int64),
    }
    there = {
        "boxes": torch.tensor(truth).reshape(-1, 4),
        "labels": torch.tensor(wanted or [1] * len(truth), dtype=torch.int64),
        "crowd": torch.tensor(crowd or [False] * len(truth), dtype=torch.bool),
    }
    return found, there


def collected(*pictures: tuple[dict[str, Any], dict[str, Any]], kinds: tuple[str, ...] = ("box",)) -> AveragePrecision:
    made = AveragePrecision(NAMES, kinds)
    found, truth = [list(each) for each in zip(*pictures, strict=True)]
    made.add({"found": found, "truth": truth}, np.arange(len(pictures)))
    return made


def figures(made: AveragePrecision) -> dict[str, float]:
    return made.results([made.part()])


A, B = [0, 0, 10, 10], [20, 20, 30, 30]


@pytest.mark.parametrize(
    ("pictures", "expected"),
    [
        ([picture([A], [0.9], [A])], 100),
        # 0.5, 0.55 and 0.6, of ten thresholds: of 10 x 10 pixels six rows are covered, by a box that has no others.
        ([picture([[0, 0, 10, 6]], [0.9], [A])], 30),
        # A surer false alarm.
        ([picture([[30, 30, 40, 40], A], [0.9, 0.8], [A])], 50),
        # Half of the objects: 51 of 101 steps of recall.
        ([picture([A], [0.9], [A, B])], 100 * 51 / 101),
        # An object is found once: right, wrong, right, of three objects: a precision of 1 to a third, then of 2/3.
        ([picture([A, A], [0.9, 0.8], [A, B]), picture([B], [0.7], [B])], 100 * (34 + 33 * 2 / 3) / 101),
        # What is found in a crowd is neither right nor wrong.
        ([picture([[20, 20, 25, 25], A], [0.9, 0.8], [A, [15, 15, 40, 40]], crowd=[False, True])], 100),
        # A class without objects does not count, and none at all is no number.
        ([picture([A, A], [0.9, 0.9], [A], labels=[1, 2])], 100),
        ([picture([A], [0.9], [])], math.nan),
    ],
)
def test_figures_by_hand(pictures: list[tuple[dict[str, Any], dict[str, Any]]], expected: float) -> None:
    assert figures(collected(*pictures))["box_map"] == pytest.approx(expected, nan_ok=True)


def test_each_class_with_objects_has_its_own() -> None:
    made = collected(
        picture([A], [0.9], [A, B, B], labels=[1], wanted=[1, 3, 3], crowd=[False, False, True]),
        picture([A], [0.9], [A], labels=[2], wanted=[2], crowd=[True]),
    )
    mean = figures(made)["box_map"]
    rows = made.details([made.part()])["class_ap"]
    assert rows == [
        {"class": "triangle", "count": 1, "average_precision": 0.0},
        {"class": "disc", "count": 1, "average_precision": pytest.approx(100)},
    ]
    assert np.mean([row["average_precision"] for row in rows]) == pytest.approx(mean)


def drawn(seed: int, pictures: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Pictures of up to 6 objects of 3 classes, some of them crowds, and answers near them or anywhere."""
    rng = np.random.default_rng(seed)

    def boxes(count: int) -> np.ndarray[Any, Any]:
        corners = rng.integers(0, SIDE - 12, (count, 2))
        return np.concatenate([corners, corners + rng.integers(6, 12, (count, 2))], axis=1).astype(np.float32)

    made = []
    for _ in range(pictures):
        truth = boxes(int(rng.integers(0, 7)))
        near = np.clip(truth.repeat(2, axis=0) + rng.integers(-2, 3, (2 * len(truth), 4)), 0, SIDE)
        near = near[(near[:, 2:] > near[:, :2]).all(axis=1)]
        found = np.concatenate([near, boxes(4)])
        labels = rng.integers(1, 4, len(truth))
        own = np.concatenate([labels.repeat(2)[: len(near)], rng.integers(1, 4, 4)])
        # Few different scores: ties are broken as the published program does.
        scores = rng.integers(1, 20, len(found)) / 20
        answer, there = picture(
            found.tolist(),
            scores.tolist(),
            truth.tolist(),
            labels=own.tolist(),
            wanted=labels.tolist(),
            crowd=(rng.random(len(truth)) < 0.2).tolist(),
        )
        answer["masks"], there["masks"] = (masks_in(each["boxes"], rng) for each in (answer, there))
        made.append((answer, there))
    return made


def masks_in(boxes: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    masks = torch.zeros(len(boxes), SIDE, SIDE, dtype=torch.bool)
    for mask, (left, top, right, bottom) in zip(masks, boxes.int().tolist(), strict=True):
        mask[top:bottom, left:right] = torch.from_numpy(rng.random((bottom - top, right - left)) < 0.97)
    return masks


def by_the_published_program(
    pictures: list[tuple[dict[str, Any], dict[str, Any]]], kind: str
) -> tuple[list[float], list[float]]:
    """Return the means over classes, over thresholds and at 0.5; and the mean over thresholds of each class."""
    coco, evaluation = pytest.importorskip("pycocotools.coco"), pytest.importorskip("pycocotools.cocoeval")
    encode = pytest.importorskip("pycocotools.mask").encode

    def entries(side: int) -> list[dict[str, Any]]:
        rows = []
        for number, both in enumerate(pictures):
            each = both[side]
            for index, (left, top, right, bottom) in enumerate(each["boxes"].tolist()):
                mask = np.asfortranarray(each["masks"][index].numpy().astype(np.uint8))
                row = {
                    "id": len(rows) + 1,
                    "image_id": number,
                    "category_id": int(each["labels"][index]),
                    "bbox": [left, top, right - left, bottom - top],
                    "area": (right - left) * (bottom - top),
                    "segmentation": encode(mask),
                    "iscrowd": int(each["crowd"][index]) if side else 0,
                }
                rows.append(row if side else {**row, "score": float(each["scores"][index])})
        return rows

    with contextlib.redirect_stdout(io.StringIO()):
        truth, found = coco.COCO(), coco.COCO()
        shared = {
            "images": [{"id": number, "height": SIDE, "width": SIDE} for number in range(len(pictures))],
            "categories": [{"id": label, "name": str(label)} for label in (1, 2, 3)],
        }
        for each, side in ((truth, 1), (found, 0)):
            each.dataset = {**shared, "annotations": entries(side)}
            each.createIndex()
        scored = evaluation.COCOeval(truth, found, {"box": "bbox", "mask": "segm"}[kind])
        scored.evaluate()
        scored.accumulate()
        scored.summarize()
    # Of thresholds, recall levels, classes, sizes of objects and numbers of detections.
    by_class = 100 * scored.eval["precision"][:, :, :, 0, -1].mean(axis=(0, 1))
    return [100 * float(each) for each in scored.stats[:2]], by_class.tolist()


@pytest.mark.parametrize("kind", ["box", "mask"])
def test_as_the_published_program(kind: str) -> None:
    pictures = drawn(seed=1, pictures=60)
    collector = collected(*pictures, kinds=("box", "mask"))
    made, (expected, by_class) = figures(collector), by_the_published_program(pictures, kind)
    assert 4 < expected[0] < 95
    assert [made[f"{kind}_map"], made[f"{kind}_map50"]] == pytest.approx(expected, abs=1e-9)
    rows = collector.details([collector.part()])["class_ap"]
    key = {"box": "average_precision", "mask": "mask_average_precision"}[kind]
    assert {row["class"]: row[key] for row in rows} == pytest.approx(dict(zip(NAMES, by_class, strict=True)), abs=1e-9)


def test_neither_the_parts_nor_their_order_change_a_bit() -> None:
    whole = collected(*drawn(seed=2, pictures=20), kinds=("box", "mask"))
    parts: list[list[ImageDetections]] = [whole.part()[index::3] for index in range(3)]
    assert whole.results([parts[2], parts[0], parts[1]]) == figures(whole)
