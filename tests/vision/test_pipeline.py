"""Images and their label maps are shown alike, whoever reads them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from paceline.data.batch import Normalize, Placement
from paceline.data.image.decode import BrokenImageError
from paceline.data.order import StepGeometry
from paceline.host.world import World
from paceline.recipe.data import Augment, GeneratedBoxes
from paceline_vision.detection.dataset import BoxDataset, DetectedObjects
from paceline_vision.segmentation.dataset import IGNORED, MaskDataset, from_objects
from paceline_vision.segmentation.pipeline import MaskPipeline, MaskView, fitted_size
from paceline_vision.sets.shapes import open_shapes

CPU = Placement(device=torch.device("cpu"))
CROPPED = Augment(crop="random_resized", scale=(0.2, 1), flip=0.5)
GREY = 50  # of a pixel for each class


class Blocks:
    """Pictures of squares of 40 pixels, each of one class, which is its grey divided by 50."""

    def __init__(self, count: int = 8, broken: tuple[int, ...] = ()) -> None:
        self.count, self.broken = count, broken

    def __len__(self) -> int:
        return self.count

    def read(self, sample: int) -> Any:
        if sample in self.broken:
            raise BrokenImageError(self.path(sample), "torn")
        draws = np.random.default_rng(sample)
        labels = np.kron(draws.integers(0, 5, (2, 2 + sample % 3)), np.ones((40, 40))).astype(np.uint8)
        return np.repeat((GREY * labels)[..., None], 3, axis=2), labels

    def path(self, sample: int) -> str:
        return f"blocks {sample}"


def batches(
    source: Any, augment: Augment | None = CROPPED, *, threads: int = 0, world: World | None = None, parts: int = 2,
    epoch: int = 0, training: bool = True,
) -> list[Any]:  # fmt: skip
    data = MaskDataset(name="blocks", train=source, validation=source, classes=tuple("abcde"), digest="")
    view = MaskView(size=48, augment=augment, seed=1, mean=(0.5, 0.5, 0.5), interpolation="bilinear")
    as_pixels = Normalize((0.0,) * 3, (1 / 255,) * 3, CPU)
    pipeline = MaskPipeline(data, {True: view, False: view}, as_pixels, placement=CPU, threads=threads)
    if not training:
        return list(pipeline.evaluation_batches(3, world or World()))
    geometry = StepGeometry(seed=1, samples=len(source), global_batch_size=len(source), logical_ranks=parts)
    return list(pipeline.train_batches(geometry, epoch, epoch + 1, world or World()))


def by_number(found: list[Any]) -> dict[int, Any]:
    return {n: (i, t) for each in found for n, i, t in zip(each.ids.tolist(), each.inputs, each.targets, strict=True)}


@pytest.mark.parametrize("augment", [CROPPED, Augment(flip=0.5), None])
def test_a_label_map_moves_with_its_image(augment: Augment | None) -> None:
    seen = 0
    for image, labels in by_number(batches(Blocks(), augment)).values():
        assert image.shape == (3, 48, 48)
        assert labels.dtype == torch.uint8
        shown = labels != IGNORED
        # Inside a square both agree; at its edges pixels are mixed.
        near = (image[0] / GREY - labels.float()).abs() < 0.05
        assert near[shown].float().mean() > 0.8
        padding = image[:, ~shown]
        assert torch.allclose(padding, torch.full_like(padding, 128))
        seen += int((~shown).any())
    assert seen == (0 if augment is CROPPED else 5)  # three pictures of eight are squares


def test_edges_are_in_the_middle_between_two_pixels() -> None:
    class Halves(Blocks):
        def read(self, sample: int) -> Any:
            labels = np.zeros((80, 80), dtype=np.uint8)
            labels[:, 40:] = 1
            return np.repeat((200 * labels)[..., None], 3, axis=2), labels

    for image, labels in by_number(batches(Halves(), CROPPED)).values():
        assert torch.equal((image[0] > 100).to(torch.uint8), labels)


def test_what_is_drawn_depends_on_seed_epoch_and_number_alone() -> None:
    whole = by_number(batches(Blocks(), parts=1))
    parts: dict[int, Any] = {}
    for rank in range(2):
        found = batches(Blocks(), threads=2, parts=4, world=World(rank=rank, world_size=2))
        assert not parts.keys() & by_number(found).keys()
        parts |= by_number(found)
    assert whole.keys() == parts.keys()
    assert all(torch.equal(a, b) for n in whole for a, b in zip(whole[n], parts[n], strict=True))
    later = by_number(batches(Blocks(), epoch=1))
    assert not any(torch.equal(whole[n][0], later[n][0]) for n in whole)


def test_broken_samples_are_left_out_and_a_batch_of_them_is_blank() -> None:
    (one, other) = batches(Blocks(4, broken=(1,)))
    assert sorted([*one.ids.tolist(), *other.ids.tolist()]) == [0, 2, 3]
    assert [(each.id, each.reason) for each in (*one.broken, *other.broken)] == [(1, "torn")]
    (batch,) = batches(Blocks(2, broken=(0, 1)), parts=1)
    assert (batch.weight, batch.inputs.shape, batch.targets.shape) == (0, (1, 3, 48, 48), (1, 48, 48))


def test_evaluation_shows_each_image_once_and_whole() -> None:
    found = by_number(batches(Blocks(), None, training=False))
    assert sorted(found) == list(range(8))
    assert all(len(set(labels.unique().tolist()) - {IGNORED}) > 1 for _, labels in found.values())
    assert fitted_size(80, 120, 48) == (32, 48)
    assert fitted_size(1, 1000, 48) == (1, 48)


def test_objects_become_label_maps() -> None:
    found = from_objects(open_shapes(GeneratedBoxes(samples=4, evaluation_samples=2)))
    assert found.classes == ("background", "disc", "rectangle", "triangle")
    boxes = open_shapes(GeneratedBoxes(samples=4, evaluation_samples=2)).train
    for sample in range(4):
        image, labels = found.train.read(sample)
        assert image.shape[:2] == labels.shape == tuple(boxes.sizes[sample])
        objects = boxes.objects(sample, masks=True)
        assert objects.masks is not None
        for label, mask in zip(objects.labels, objects.masks, strict=True):
            assert (labels[mask > 0] == label + 1).all()
        assert (labels[objects.masks.max(axis=0) == 0] == 0).all()


def test_where_classes_overlap_nothing_is_learned() -> None:
    class Two:
        sizes = np.array([[2, 3]])

        def __len__(self) -> int:
            return 1

        def read(self, sample: int) -> Any:
            return np.zeros((2, 3 + sample, 3), dtype=np.uint8)

        def objects(self, sample: int, *, masks: bool) -> DetectedObjects:
            drawn = np.array([[[1, 1, 0]] * 2, [[0, 1, 1]] * 2, [[1, 1, 0]] * 2], dtype=np.uint8)
            return DetectedObjects(
                boxes=np.zeros((3, 4)), labels=np.array([0, 4, 0]), crowd=np.zeros(3, dtype=bool), masks=drawn
            )

        def path(self, sample: int) -> str:
            return f"two {sample}"

    found = from_objects(BoxDataset(name="x", train=Two(), validation=Two(), classes=tuple("abcde"), digest=""))
    assert found.train.read(0)[1].tolist() == [[1, IGNORED, 5]] * 2
