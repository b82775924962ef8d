"""A slice is read to the same bits however its files are decoded, and large ones smaller within a stated tolerance."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import interpolate

from paceline.data.batch import Batch
from paceline.data.image import decode as jpeg
from paceline.data.image.decode import LazyImage
from paceline.data.image.source import (
    ArraySource,
    EncodedSource,
    FileSource,
    SampleSource,
    SubsetSource,
    encoded_source,
    repeated,
)
from paceline.data.image.transforms import Box, View, draw, random_resized_box, resized_part, shrinkage, snapped
from paceline.data.loaders.pytorch import SliceReader
from paceline.data.slices import SampleSlice
from paceline.recipe.data import Augment

CROP = Augment(crop="random_resized", flip=0.5)


def photo(height: int, width: int, seed: int) -> Image.Image:
    """Blobs and edges with a little noise, as photographs have them."""
    generator = np.random.default_rng(seed)
    small = generator.integers(0, 256, (height // 24 + 2, width // 24 + 2, 3), dtype=np.uint8)
    blobs = np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    return Image.fromarray((blobs + generator.normal(0, 5, blobs.shape)).clip(0, 255).astype(np.uint8))


def folder(root: Path, sizes: list[tuple[int, int]], **options: object) -> FileSource:
    names = []
    for number, size in enumerate(sizes):
        names.append(b"%03d.jpg" % number)
        photo(*size, seed=number).save(root / f"{number:03d}.jpg", quality=90, **options)
    return FileSource(root, names, np.arange(len(sizes), dtype=np.int64), 3)


def batch(source: SampleSource, augment: Augment | None, size: int = 32, epoch: int = 0) -> Batch:
    view = View(image_size=size, channels=3, augment=augment, seed=7)
    ids = np.arange(len(source))
    made = SliceReader(source, view)[SampleSlice(step=0, epoch=epoch, logical_rank=0, ids=ids, step_weight=len(ids))]
    assert isinstance(made, Batch)
    return made


@pytest.fixture
def several(tmp_path: Path) -> FileSource:
    return folder(tmp_path, [(60 + 7 * k, 150 - 6 * k) for k in range(12)])


def test_a_crop_is_pillows_picture_cut_and_resized(several: FileSource) -> None:
    draws = draw(CROP, 7, 0, np.arange(len(several)))
    assert draws.attempts is not None
    made = batch(several, CROP).inputs
    for sample in range(len(several)):
        whole = np.asarray(Image.open(several.path(sample)))
        top, left, height, width = random_resized_box(
            draws.attempts[sample], (whole.shape[0], whole.shape[1]), CROP.scale, CROP.ratio
        )
        part = torch.from_numpy(whole[top : top + height, left : left + width].copy()).permute(2, 0, 1)
        expected = interpolate(part[None], size=(32, 32), mode="bilinear", antialias=True)[0]
        assert torch.equal(made[sample], expected.flip(-1) if draws.flip[sample] else expected)


@pytest.mark.parametrize("augment", [CROP, None, Augment(flip=0.5), Augment(crop="pad", flip=0.5)], ids=str)
def test_without_the_compiled_decoder_bits_are_the_same(
    several: FileSource, augment: Augment | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_it = batch(several, augment)
    monkeypatch.setattr(jpeg, "_REGION", None)
    assert torch.equal(batch(several, augment).inputs, with_it.inputs)


@pytest.mark.parametrize("augment", [CROP, None, Augment(flip=0.5)], ids=str)
def test_batches_lie_as_images_do(several: FileSource, augment: Augment | None) -> None:
    assert batch(several, augment).inputs.is_contiguous(memory_format=torch.channels_last)


def decoded_whole(*_: object) -> None:
    raise AssertionError("a file was decoded whole")


def test_files_under_other_sources_are_decoded_in_part_too(
    several: FileSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = repeated(SubsetSource(several, np.array([5, 2, 9])), 2)
    expected = batch(layers, CROP).inputs
    monkeypatch.setattr(FileSource, "read", decoded_whole)
    assert torch.equal(batch(layers, CROP).inputs, expected)
    files = encoded_source(layers)
    assert files is not None
    assert bytes(files.encoded(4)) == Path(several.path(2)).read_bytes()


def test_a_source_that_decodes_in_its_own_way_is_let(several: FileSource) -> None:
    class Inverted(FileSource):
        def read(self, sample: int) -> np.ndarray:
            return 255 - super().read(sample)

    inverted = Inverted(Path(several.path(0)).parent, [b"%03d.jpg" % k for k in range(12)], several.labels, 3)
    assert encoded_source(inverted) is None
    assert encoded_source(SubsetSource(inverted, np.arange(3))) is None
    assert encoded_source(several) is several
    assert torch.equal(batch(inverted, None, 60).inputs[0, :, 0, 0], 255 - batch(several, None, 60).inputs[0, :, 0, 0])


def test_images_in_memory_have_no_files() -> None:
    images = np.random.default_rng(0).integers(0, 256, (6, 40, 50, 3), dtype=np.uint8)
    source = ArraySource(images.copy(), np.arange(6), "noise")
    assert encoded_source(source) is None
    assert encoded_source(SubsetSource(source, np.arange(3))) is None
    assert not isinstance(source, EncodedSource)
    batch(source, CROP)
    batch(source, Augment(flip=1.0), 40)
    assert np.array_equal(source.images, images)  # nothing was flipped in place


def test_broken_files_are_left_out(several: FileSource) -> None:
    whole = batch(several, CROP).inputs
    content = Path(several.path(3)).read_bytes()
    # Cut below any crop's last row, or above: both are broken files.
    for keep in (len(content) - 2, len(content) // 2):
        Path(several.path(3)).write_bytes(content[:keep])
        made = batch(several, CROP)
        assert [each.id for each in made.broken] == [3]
        assert made.broken[0].path == several.path(3)
        assert torch.equal(made.inputs, whole[[k for k in range(12) if k != 3]])


@pytest.mark.parametrize(("side", "expected"), [(127, 1), (128, 2), (255, 2), (256, 4), (511, 4), (512, 8), (5000, 8)])
def test_how_much_smaller_a_crop_is_decoded(side: int, expected: int) -> None:
    assert shrinkage(Box(0, 0, side, 9999), 32) == shrinkage(Box(0, 0, 9999, side), 32) == expected


def test_edges_move_by_a_quarter_of_an_output_pixel_at_most() -> None:
    generator = np.random.default_rng(0)
    for _ in range(3000):
        size = tuple(generator.integers(130, 1500, 2).tolist())
        top, left = (int(generator.integers(0, side - 128)) for side in size)
        box = Box(top, left, *(int(generator.integers(128, s - a + 1)) for s, a in zip(size, (top, left), strict=True)))
        step = shrinkage(box, 32)
        moved = snapped(box, step)
        assert all(each % step == 0 for each in moved)
        assert min(moved.height, moved.width) >= step
        assert moved.top + moved.height < size[0] + step
        assert moved.left + moved.width < size[1] + step
        for near, far, was_near, was_far in (
            (moved.top, moved.top + moved.height, box.top, box.top + box.height),
            (moved.left, moved.left + moved.width, box.left, box.left + box.width),
        ):
            pixel = (was_far - was_near) / 32
            assert abs(near - was_near) <= pixel / 4
            assert abs(far - was_far) <= pixel / 4


@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:0"])
@pytest.mark.parametrize("channels", [1, 3])
def test_shrinking_is_within_tolerance(tmp_path: Path, subsampling: str, channels: int) -> None:
    source = folder(tmp_path, [(700, 901), (1203, 800), (304, 296)], subsampling=subsampling)
    for sample, step in ((0, 2), (0, 8), (1, 4), (2, 2)):
        picture = LazyImage(source.encoded(sample), channels)
        box = snapped(Box(3, 5, picture.size[0] - 40, picture.size[1] - 30), step)
        size = min(box.height, box.width) // (2 * step)
        assert shrinkage(box, size) == step
        smaller, full = (resized_part(picture.part(box, each), size).int() for each in (step, 1))
        difference = (smaller - full).abs().float()
        assert 0 < difference.max() <= 16
        assert difference.mean() < 1.5
        assert difference.quantile(0.999) <= 8


def test_what_is_shrunk_is_the_snapped_box(tmp_path: Path) -> None:
    source = folder(tmp_path, [(700 + 31 * k, 901 - 17 * k) for k in range(6)])
    draws = draw(CROP, 7, 0, np.arange(6))
    assert draws.attempts is not None
    moved = 0
    for sample, image in enumerate(batch(source, CROP).inputs):
        picture = LazyImage(source.encoded(sample), 3)
        box = random_resized_box(draws.attempts[sample], picture.size, CROP.scale, CROP.ratio)
        step = shrinkage(box, 32)
        assert step > 1
        moved += snapped(box, step) != Box(*(edge // step * step for edge in box))
        expected = resized_part(picture.part(snapped(box, step), step), 32)
        assert torch.equal(image, expected.flip(-1) if draws.flip[sample] else expected)
    assert moved  # rounding the edges down would have been something else


def test_shrinking_is_the_same_for_all_decoders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = folder(tmp_path, [(700, 901), (1203, 800), (301, 299), (64, 48)])
    shrunk = batch(source, CROP).inputs
    full = batch(source, Augment(crop="random_resized", flip=0.5, shrink_on_load=False)).inputs
    assert [bool((one != other).any()) for one, other in zip(shrunk, full, strict=True)] == [True, True, True, False]
    monkeypatch.setattr(jpeg, "_REGION", None)
    assert torch.equal(batch(source, CROP).inputs, shrunk)
    assert torch.equal(batch(source, Augment(crop="random_resized", flip=0.5, shrink_on_load=False)).inputs, full)


def test_evaluation_decodes_in_full(tmp_path: Path) -> None:
    source = folder(tmp_path, [(700, 901)])
    whole = torch.from_numpy(np.asarray(Image.open(source.path(0))).copy()).permute(2, 0, 1)
    resized = interpolate(whole[None], size=(37, 47), mode="bilinear", antialias=True)[0]
    assert torch.equal(batch(source, None).inputs[0], resized[:, 2:34, 8:40])
