"""The DALI back-end shows the same samples, boxes and flips as the others, and leaves nothing behind."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from paceline.data.batch import Batch
from paceline.data.image.source import FileSource, SampleSource, SubsetSource, repeated
from paceline.data.image.transforms import View
from paceline.data.loaders.pytorch import PytorchBackend
from paceline.data.slices import SampleSlice
from paceline.errors import DataError, TrainingError
from paceline.recipe.data import Augment, Progressive
from paceline_ops.dali.backend import DaliBackend, DaliGraph, define
from paceline_ops.dali.choice import import_problem

pytestmark = pytest.mark.skipif(bool(import_problem()), reason=f"needs DALI: {import_problem()}")

Slices = Callable[..., list[SampleSlice]]
Shuffled = Callable[[int, int], list[SampleSlice]]
Same = Callable[[Batch, Batch], bool]

RESIZED = Augment(crop="random_resized", flip=0.5)
VIEWS = {
    "evaluation": None,
    "flip": Augment(flip=0.5),
    "pad": Augment(crop="pad", padding=9, padding_mode="reflect", flip=0.5),
    "random_resized": RESIZED,
}
OF_VIEWS = pytest.mark.parametrize("augment", VIEWS.values(), ids=VIEWS.keys())

# Grey levels, of 0 … 255. DALI filters in other steps than torch, which is one level at most where it is bilinear.
# Where DALI decodes a part of a file, colours at the part's edge miss their neighbours beyond it.
LARGEST_MEAN = 0.3
LARGEST_SHARE_OVER_ONE = 0.005
LARGEST = {"whole": 1, "part": 24, "bicubic": 24}


def view(augment: Augment | None, size: int = 48, channels: int = 3, interpolation: str = "bilinear") -> View:
    mean = (0.2, 0.4, 0.6)[:channels]
    return View(image_size=size, channels=channels, augment=augment, seed=3, mean=mean, interpolation=interpolation)


def maps(root: Path, sizes: Iterable[tuple[int, int]], channels: int = 3) -> FileSource:
    """JPEG files of (width, height) in which a pixel's colour tells where it lies: red across, green down."""
    names = []
    for number, (width, height) in enumerate(sizes):
        across, down = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
        pixels = np.stack([across, down, np.full_like(down, 8 * (number % 32))], axis=-1)
        names.append(f"{number:03d}.jpg".encode())
        Image.fromarray(pixels.astype(np.uint8)).save(root / names[-1].decode(), quality=95, subsampling=0)
    return FileSource(root, names, np.arange(len(names), dtype=np.int64) % 3, channels)


@pytest.fixture
def charts(tmp_path: Path) -> FileSource:
    """Twenty-four maps, wide, tall and square."""
    return maps(tmp_path, [(90 + 7 * k, 260 - 6 * k) for k in range(24)])


def dali(source: SampleSource, pieces: Iterable[SampleSlice], the_view: View, threads: int = 2) -> list[Batch]:
    with closing(DaliBackend(source, the_view, threads=threads)) as backend:  # type: ignore[arg-type]
        return list(backend.batches(iter(pieces)))


def pytorch(source: SampleSource, pieces: Iterable[SampleSlice], the_view: View) -> list[Batch]:
    with closing(PytorchBackend(source, the_view, workers=0)) as backend:
        return list(backend.batches(iter(pieces)))


def agree(first: list[Batch], second: list[Batch], largest: int = LARGEST["part"]) -> bool:
    """Whether two back-ends' pixels are within tolerance, when all else is equal."""
    apart = []
    for one, other in zip(first, second, strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        assert one.targets.tolist() == other.targets.tolist()
        assert one.slice.step == other.slice.step
        assert one.broken == other.broken
        assert one.inputs.dtype == other.inputs.dtype == torch.uint8
        assert one.inputs.shape == other.inputs.shape
        apart.append((one.inputs.int() - other.inputs.int()).abs().flatten())
    levels = torch.cat(apart).double()
    mean, over_one = levels.mean(), (levels > 1).double().mean()
    print(f"largest {levels.max():.0f}, mean {mean:.3f}, over one level {over_one:.5f}")
    return bool(levels.max() <= largest and mean <= LARGEST_MEAN and over_one <= LARGEST_SHARE_OVER_ONE)


@OF_VIEWS
def test_shows_what_pytorch_shows(charts: FileSource, augment: Augment | None, shuffled: Shuffled) -> None:
    pieces = shuffled(24, 5)
    assert agree(dali(charts, pieces, view(augment)), pytorch(charts, pieces, view(augment)), LARGEST["whole"])


def test_another_box_or_flip_would_be_seen(charts: FileSource, slices: Slices) -> None:
    """What the test before holds, it holds: a box moved by one pixel, or a flip too many, is out of tolerance."""
    (one,) = pytorch(charts, slices(range(24)), view(None))
    assert not agree([one], [replace(one, inputs=one.inputs.roll(1, dims=-1))])
    flipped = one.inputs.clone()
    flipped[3] = flipped[3].flip(-1)
    assert not agree([one], [replace(one, inputs=flipped)])


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("augment", [None, RESIZED], ids=["evaluation", "random_resized"])
def test_photographs_are_within_the_stated_tolerance(
    tmp_path: Path, augment: Augment | None, interpolation: str, slices: Slices
) -> None:
    source = photographs(tmp_path, 16)
    the_view = view(augment, 224, interpolation=interpolation)
    largest = LARGEST["bicubic" if interpolation == "bicubic" else "whole" if augment is None else "part"]
    assert agree(dali(source, slices(range(16)), the_view), pytorch(source, slices(range(16)), the_view), largest)


@pytest.mark.parametrize("size", [48, 24])
def test_pictures_that_shrink_on_load_show_the_same_part(tmp_path: Path, size: int, slices: Slices) -> None:
    """Their pixels are further apart than others', as DALI decodes them in full; a box that was not moved is seen."""
    source, shown = photographs(tmp_path, 64), view(RESIZED, size)
    (one,), (other,) = dali(source, slices(range(64)), shown), pytorch(source, slices(range(64)), shown)
    apart = (one.inputs.int() - other.inputs.int()).abs().double().mean((1, 2, 3))
    assert apart.mean() < 0.8  # 1.2 and more if boxes are not moved
    assert apart.max() < 1.6  # and 3 and more


def photographs(root: Path, count: int, channels: int = 3) -> FileSource:
    """Parts of scikit-learn's two photographs as JPEG files of 4:2:0."""
    from sklearn.datasets import load_sample_images

    generator = np.random.default_rng(0)
    photos = load_sample_images().images
    names = []
    for number in range(count):
        photo = photos[number % 2]
        top, left = generator.integers(0, 52), generator.integers(0, 140)
        names.append(f"{number}.jpg".encode())
        part = np.ascontiguousarray(photo[top : top + 375, left : left + 500])
        Image.fromarray(part).save(root / names[-1].decode(), quality=90)
    return FileSource(root, names, np.arange(count, dtype=np.int64) % 2, channels)


@pytest.mark.parametrize("augment", [None, RESIZED], ids=["evaluation", "random_resized"])
def test_grey_is_what_pillow_calls_grey(tmp_path: Path, augment: Augment | None, slices: Slices) -> None:
    source = photographs(tmp_path, 6, channels=1)
    Image.open(source.path(0)).convert("L").save(source.path(0))
    the_view = view(augment, 224, channels=1)
    assert agree(dali(source, slices(range(6)), the_view), pytorch(source, slices(range(6)), the_view))


def test_shapes_may_change_from_slice_to_slice(charts: FileSource, slices: Slices) -> None:
    shown = [(48, 80), (48, 48), (64, 48), (48, 80)]
    each = zip(slices([1, 2], [3], [4, 5, 6], [7]), shown, strict=True)
    pieces = [replace(piece, shape=shape) for piece, shape in each]
    batches = dali(charts, pieces, view(None))
    assert [tuple(batch.inputs.shape[2:]) for batch in batches] == shown
    assert agree(batches, pytorch(charts, pieces, view(None)))


@pytest.mark.parametrize("augment", [VIEWS["pad"], RESIZED], ids=["pad", "random_resized"])
def test_growing_images_change_no_order_and_no_draw(charts: FileSource, augment: Augment, slices: Slices) -> None:
    growing = replace(view(augment), progressive=Progressive(start_size=24, end=2, multiple=12))
    pieces = [each for epoch in range(4) for each in slices([5, 3], [9, 1], epoch=epoch)]
    grown = dali(charts, pieces, growing)
    assert [batch.inputs.shape[-1] for batch in grown] == [24, 24, 36, 36, 48, 48, 48, 48]
    assert agree(grown, pytorch(charts, pieces, growing))


def test_repeats_and_subsets_are_read_from_their_base(charts: FileSource, slices: Slices) -> None:
    source = repeated(SubsetSource(charts, np.array([4, 9, 2])), 2)
    pieces = slices([0, 3], [5, 1])
    batches = dali(source, pieces, view(RESIZED))
    assert agree(batches, pytorch(source, pieces, view(RESIZED)))
    assert not torch.equal(batches[0].inputs[0], batches[0].inputs[1])


@OF_VIEWS
def test_neither_company_nor_threads_change_a_bit(
    charts: FileSource, augment: Augment | None, slices: Slices, same: Same
) -> None:
    whole = dali(charts, slices(range(24)), view(augment), threads=1)
    assert same(whole[0], dali(charts, slices(range(24)), view(augment), threads=3)[0])
    apart = dali(charts, slices(*([sample] for sample in range(24))), view(augment))
    assert torch.equal(torch.cat([batch.inputs for batch in apart]), whole[0].inputs)
    uneven = dali(charts, slices([1], [2, 3, 4], [5], [6, 7]), view(augment))
    assert [len(batch.inputs) for batch in uneven] == [1, 3, 1, 2]


def damage(source: FileSource) -> None:
    """Make of sample n what the back-ends must judge alike; those from 8 on stay whole."""
    paths = [Path(source.path(sample)) for sample in range(8)]
    paths[0].write_bytes(paths[0].read_bytes()[:-300])
    paths[1].write_bytes(b"")
    paths[2].unlink()
    paths[3].write_bytes(b"no image at all")
    Image.open(paths[4]).convert("CMYK").save(paths[4], format="JPEG")
    Image.open(paths[5]).save(paths[5], format="PNG")
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.open(paths[6]).save(paths[6], format="JPEG", exif=exif, quality=95)
    paths[7].write_bytes(paths[7].read_bytes() + b"behind the end")


@OF_VIEWS
def test_damaged_and_unusual_files_are_judged_as_elsewhere(
    charts: FileSource, augment: Augment | None, shuffled: Shuffled
) -> None:
    damage(charts)
    pieces = shuffled(24, 7)
    batches = dali(charts, pieces, view(augment))
    assert sorted(sample.id for batch in batches for sample in batch.broken) == [0, 1, 2, 3]
    assert agree(batches, pytorch(charts, pieces, view(augment)))


def damage_at_random(content: bytes, draw: np.random.Generator, way: int) -> bytes:
    """Part of a JPEG file's scans or of its head spoiled, its end left alone."""
    spoiled = bytearray(content)
    scan, end = content.index(b"\xff\xda") + 12, len(content) - 2
    at = int(draw.integers(scan, end - 4))
    match way:
        case 0:
            spoiled[at] = int(draw.integers(0, 256))
        case 1:
            del spoiled[at : int(draw.integers(at, end))]
        case 2:
            spoiled[at : min(at + 300, end)] = bytes(min(300, end - at))
        case 3:
            spoiled[int(draw.integers(2, scan))] = int(draw.integers(0, 256))
        case _:
            spoiled[at : at + 2] = bytes([0xFF, int(draw.integers(1, 256))])
    return bytes(spoiled)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(1, 6))])
def test_damage_at_random_is_judged_as_elsewhere(tmp_path: Path, seed: int, slices: Slices) -> None:
    source = photographs(tmp_path, 40)
    draw = np.random.default_rng(seed)
    for sample in range(40):
        path = Path(source.path(sample))
        Image.open(path).resize((160, 120)).save(path, quality=85, progressive=sample % 3 == 0)
        path.write_bytes(damage_at_random(path.read_bytes(), draw, sample % 5))
    pieces = slices(range(20), range(20, 40))
    batches = dali(source, pieces, view(None))
    assert agree(batches, pytorch(source, pieces, view(None)), LARGEST["whole"])
    assert 0 < sum(len(batch.broken) for batch in batches) < 30


def test_all_broken_is_an_empty_batch(charts: FileSource, slices: Slices) -> None:
    damage(charts)
    empty, whole = dali(charts, slices([3, 1], [8]), view(RESIZED))
    assert empty.inputs.shape == (0, 3, 48, 48)
    assert [sample.id for sample in empty.broken] == [3, 1]
    assert whole.ids.tolist() == [8]


class NoSuchMarker(FileSource):
    """Hands DALI a file that it cannot decode as sample 3, though Pillow can."""

    def __init__(self, base: FileSource) -> None:
        self.__dict__ = dict(base.__dict__)

    def encoded(self, sample: int) -> bytes:
        content = bytearray(super().encoded(sample))
        if sample == 3:  # a table of Huffman's codes with more codes than there can be
            at = content.index(b"\xff\xc4")
            content[at + 5 : at + 21] = b"\xff" * 16
        return bytes(content)


def test_a_file_that_dali_refuses_spoils_no_other(charts: FileSource, slices: Slices, same: Same) -> None:
    pieces = slices([1, 2], [4, 3, 5], [6, 7, 8, 9], [10])
    batches = dali(NoSuchMarker(charts), pieces, view(RESIZED))
    assert agree(batches, pytorch(charts, pieces, view(RESIZED)))
    usual = dali(charts, pieces, view(RESIZED))
    assert all(same(batches[k], usual[k]) for k in (0, 2, 3))
    assert torch.equal(batches[1].inputs[[0, 2]], usual[1].inputs[[0, 2]])


@pytest.mark.parametrize("ahead", [1, 2, 4])
def test_a_file_is_refused_while_nobody_looks(charts: FileSource, slices: Slices, ahead: int) -> None:
    """DALI has met the file, and given up, before the batches ahead of it are taken and more is asked of it."""
    pieces = slices([1], [2], [4], [3], [5], [3, 6], [7, 8])
    backend = DaliBackend(NoSuchMarker(charts), view(RESIZED), threads=1, prefetch=ahead)
    batches = []
    for batch in backend.batches(iter(pieces)):
        time.sleep(0.05)
        batches.append(batch)
    backend.close()
    assert agree(batches, pytorch(charts, pieces, view(RESIZED)))


class Faulty(FileSource):
    """Fails on sample 3 with a defect of its own."""

    def __init__(self, base: FileSource) -> None:
        self.__dict__ = dict(base.__dict__)

    def encoded(self, sample: int) -> bytes:
        if sample == 3:
            raise KeyError("colour")
        return super().encoded(sample)

    def read(self, sample: int) -> NDArray[np.uint8]:
        raise AssertionError(sample)


def test_a_defect_names_the_file(charts: FileSource, slices: Slices) -> None:
    with pytest.raises(TrainingError) as caught:
        dali(Faulty(charts), slices([0, 1], [2, 3]), view(None))
    assert str(caught.value) == f"Reading sample 3 ({charts.path(3)}) failed: KeyError: 'colour'"


def test_a_left_stream_is_forgotten(charts: FileSource, shuffled: Shuffled, same: Same) -> None:
    with closing(DaliBackend(charts, view(RESIZED), threads=2)) as backend:
        pieces = shuffled(24, 4)
        stream = backend.batches(iter(pieces * 100))
        first = next(stream)
        for _ in range(2):
            again = list(backend.batches(iter(pieces)))
            assert [batch.slice.step for batch in again] == list(range(6))
            assert same(first, again[0])
        assert next(stream, None) is None
        assert "sample" in backend.reading()


def test_batches_stay_as_they_are(charts: FileSource, shuffled: Shuffled) -> None:
    """Their memory is not DALI's to use again while they are held."""
    backend = DaliBackend(charts, view(RESIZED), threads=2)
    kept, copies = [], []
    for batch in backend.batches(iter(shuffled(24, 2) * 5)):
        kept.append(batch.inputs)
        copies.append(batch.inputs.clone())
    backend.close()
    assert all(torch.equal(one, other) for one, other in zip(kept, copies, strict=True))


def threads_of_this_process() -> int:
    return len(os.listdir("/proc/self/task"))


def test_no_thread_is_left(charts: FileSource, shuffled: Shuffled) -> None:
    dali(charts, shuffled(24, 8), view(RESIZED))
    before = threads_of_this_process()
    backend = DaliBackend(charts, view(RESIZED), threads=3)
    assert len(list(backend.batches(iter(shuffled(24, 8))))) == 3
    assert threads_of_this_process() > before
    backend.close()
    deadline = time.monotonic() + 60
    while threads_of_this_process() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threads_of_this_process() <= before


@pytest.mark.parametrize("channels", [1, 3])
def test_the_graph_for_a_gpu_has_operators_that_exist(channels: int) -> None:
    """As far as a machine without a GPU can tell: DALI checks names and types of all arguments."""
    settings: dict[str, Any] = {"threads": 4, "ahead": 2, "device": torch.device("cuda")}
    settings["view"] = view(None, channels=channels)
    written = define(64, **settings).serialize()
    assert b"mixed" in written
    assert b"hw_decoder_load" in written
    if not torch.cuda.is_available():
        with pytest.raises(DataError, match=r"DALI cannot decode on cuda \(.*\): use data\.decode_on=cpu"):
            DaliGraph(64, **settings)


def test_random_state_is_left_alone(charts: FileSource, shuffled: Shuffled) -> None:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002
    dali(charts, shuffled(24, 8), view(RESIZED))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.array_equal(np.random.get_state()[1], before[2])  # noqa: NPY002
