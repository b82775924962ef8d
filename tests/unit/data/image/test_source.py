"""Sources number their images from 0, name them, and are a handful of arrays however many images there are."""

from __future__ import annotations

import gc
import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from paceline.data.image.source import (
    ArraySource,
    BrokenImageError,
    FileSource,
    SubsetSource,
    as_array,
    encoded_source,
    repeated,
)


def array_source(count: int = 6) -> ArraySource:
    images = np.random.default_rng(0).integers(0, 256, (count, 4, 4, 3), dtype=np.uint8)
    return ArraySource(images, np.arange(count) % 2, "noise")


def test_array_source() -> None:
    source = array_source()
    assert len(source) == 6
    assert np.array_equal(source.read(3), source.images[3])
    assert source.path(3) == "noise[3]"
    with pytest.raises(ValueError, match="found images uint8"):
        ArraySource(source.images, np.zeros(5, dtype=np.int64), "noise")


def test_subset_numbers_anew() -> None:
    base = array_source()
    subset = SubsetSource(base, np.array([4, 1]))
    assert len(subset) == 2
    assert subset.labels.tolist() == [0, 1]
    assert subset.path(0) == "noise[4]"
    assert np.array_equal(subset.read(1), base.images[1])
    images = as_array(subset)
    assert images is not None
    assert np.array_equal(images, base.images[[4, 1]])


def test_files_with_names_beyond_ascii(tmp_path: Path) -> None:
    names = ["ü/日本.png", "a b/c'd.png"]
    for value, name in enumerate(names):
        (tmp_path / name).parent.mkdir()
        Image.new("L", (2, 2), value).save(tmp_path / name)
    source = FileSource(tmp_path, [name.encode() for name in names], np.array([0, 1]), 3)
    assert [source.path(sample) for sample in (0, 1)] == [str(tmp_path / name) for name in names]
    assert source.read(1).tolist() == [[[1] * 3] * 2] * 2
    assert as_array(source) is None
    assert as_array(SubsetSource(source, np.array([0]))) is None
    assert source.encoded(1) == (tmp_path / names[1]).read_bytes()
    (tmp_path / names[0]).unlink()
    for read in (source.read, source.encoded):
        with pytest.raises(BrokenImageError, match="no such file"):
            read(0)


def test_whoever_passes_samples_on_passes_their_files_on(tmp_path: Path) -> None:
    names = [f"{number}.png" for number in range(3)]
    for value, name in enumerate(names):
        Image.new("L", (2, 2), value).save(tmp_path / name)
    files = FileSource(tmp_path, [name.encode() for name in names], np.arange(3), 3)
    source = repeated(SubsetSource(files, np.array([2, 0])), 2)
    assert encoded_source(source) is source
    assert [source.encoded(sample) for sample in range(4)] == [files.encoded(sample) for sample in (2, 0, 2, 0)]
    in_memory = SubsetSource(array_source(), np.array([4, 1]))
    assert encoded_source(in_memory) is encoded_source(repeated(in_memory, 2)) is None


def test_names_must_match_labels(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="1 names for 2 labels"):
        FileSource(tmp_path, [b"a.png"], np.array([0, 1]), 3)


def test_a_hundred_thousand_files_are_few_objects(tmp_path: Path) -> None:
    count = 100_000
    gc.collect()
    before = len(gc.get_objects())
    source = FileSource(tmp_path, (b"class/%08d.jpg" % k for k in range(count)), np.zeros(count, np.int64), 3)
    gc.collect()
    assert len(gc.get_objects()) - before < 50
    assert len(pickle.dumps(source)) < 40 * count
    assert source.path(count - 1).endswith("class/00099999.jpg")


def test_broken_image_error_survives_a_process_border() -> None:
    error = pickle.loads(pickle.dumps(BrokenImageError("a.png", "no such file")))
    assert (error.path, error.reason, str(error)) == ("a.png", "no such file", "a.png: no such file")
