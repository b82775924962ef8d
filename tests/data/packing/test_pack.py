"""A packed dataset has the images of its source, the same bytes however it was made, and is whole or is none."""

from __future__ import annotations

import gc
import io
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from golden_sentences import raises
from image_sets import files, opened_set, packed
from PIL import Image

from paceline.data.image.decode import decode
from paceline.data.image.sets.packed import MANIFEST, open_packed, read_manifest
from paceline.data.image.source import EncodedSource, SampleSource, as_array
from paceline.errors import DataError
from paceline.recipe.data import Data
from paceline_data.packing.pack import verify

pytest.importorskip("pyarrow")

SOURCES = Path(__file__).parents[4] / "src"
Run = Callable[..., subprocess.CompletedProcess[str]]


def splits(root: Path, channels: int | None = None) -> tuple[SampleSource, SampleSource]:
    opened = opened_set("packed", root, channels=channels, validation_fraction=0.25)
    return opened.train, opened.validation


def test_originals_are_the_files(photos: Path, tmp_path: Path) -> None:
    packed(photos, tmp_path / "dest")
    folder = opened_set("image_folder", photos, channels=None, validation_fraction=0)
    opened = opened_set("packed", tmp_path / "dest", channels=None, validation_fraction=0)
    assert opened.statistics is None
    assert (opened.classes, opened.channels, opened.split) == (("cat", "dog"), 3, "the folder val/")
    for ours, theirs in ((opened.train, folder.train), (opened.validation, folder.validation)):
        assert isinstance(ours, EncodedSource)
        assert ours.labels.tolist() == theirs.labels.tolist()
        for sample in range(len(theirs)):
            path = Path(theirs.path(sample))
            assert bytes(ours.encoded(sample)) == path.read_bytes()
            assert ours.path(sample).startswith(f"{path.relative_to(photos)} in {tmp_path / 'dest'}/")
            assert np.array_equal(ours.read(sample), theirs.read(sample))
            assert ours.size(sample) == theirs.size(sample) == ours.read(sample).shape[:2]  # type: ignore[attr-defined]


def test_a_source_without_a_split_is_split_as_its_folder_is(make_photos: Callable[..., Path], tmp_path: Path) -> None:
    root = make_photos(tmp_path / "photos", splits=("",))
    packed(root, tmp_path / "dest")
    folder = opened_set("image_folder", root, channels=None, validation_fraction=0.25)
    for ours, theirs in zip(splits(tmp_path / "dest"), (folder.train, folder.validation), strict=True):
        assert len(ours) == len(theirs) > 0
        names = [ours.path(sample).partition(" in ")[0] for sample in range(len(ours))]
        assert names == [str(Path(theirs.path(sample)).relative_to(root)) for sample in range(len(theirs))]


@pytest.mark.parametrize("options", [{}, {"mode": "jpeg", "max_side": 30}, {"mode": "raw", "max_side": 30}])
def test_processes_and_sizes_of_shards_change_no_byte(photos: Path, tmp_path: Path, options: dict[str, object]) -> None:
    digests = set()
    for shard_bytes in (1500, None):
        found = []
        for workers in (1, 3):
            root = tmp_path / f"{workers}-{shard_bytes}"
            packed(photos, root, workers=workers, shard_bytes=shard_bytes, **options)
            found.append(files(root))
        assert found[0] == found[1]
        assert (len(found[0]) > 8) == (shard_bytes is not None)
        digests.add(read_manifest(tmp_path / f"1-{shard_bytes}").digest)
    assert len(digests) == 1


def test_jpegs_are_made_smaller_and_nothing_else(photos: Path, tmp_path: Path) -> None:
    packed(photos, tmp_path / "dest", mode="jpeg", max_side=30, quality=95)
    originals, smaller = (
        opened_set("image_folder", photos, channels=None, validation_fraction=0).train,
        splits(tmp_path / "dest")[0],
    )
    assert isinstance(smaller, EncodedSource)
    greys = 0
    for sample in range(len(originals)):
        before, after = originals.read(sample), smaller.read(sample)
        longest = max(before.shape[:2])
        wanted = [max(1, round(side * min(1, 30 / longest))) for side in before.shape[:2]]
        assert list(after.shape[:2]) == wanted
        assert longest <= 30 or max(after.shape[:2]) == 30
        # In brightness: colour is kept at half the resolution, and these have colours of their own in every pixel.
        expected = Image.fromarray(before).resize((wanted[1], wanted[0]), Image.Resampling.LANCZOS).convert("L")
        assert np.abs(np.asarray(expected, dtype=float) - np.asarray(Image.fromarray(after).convert("L"))).mean() < 4
        with Image.open(io.BytesIO(bytes(smaller.encoded(sample)))) as file:
            assert file.format == "JPEG"
            greys += file.mode == "L"
    assert greys == 2


def test_raw_images_are_the_decoded_ones(photos: Path, tmp_path: Path) -> None:
    packed(photos, tmp_path / "dest", mode="raw")
    originals = opened_set("image_folder", photos, channels=None, validation_fraction=0).train
    for channels in (None, 1):
        stored = splits(tmp_path / "dest", channels)[0]
        assert not isinstance(stored, EncodedSource)
        for sample in range(len(originals)):
            wanted = decode(Path(originals.path(sample)), channels or 3)
            assert np.array_equal(stored.read(sample), wanted)
        assert as_array(stored) is None  # they differ in size


def test_raw_squares_are_read_at_once(photos: Path, tmp_path: Path) -> None:
    packed(photos, tmp_path / "dest", mode="raw", size=16)
    assert read_manifest(tmp_path / "dest").native_size == (16, 16)
    train, validation = splits(tmp_path / "dest")
    images = as_array(train)
    assert images is not None
    assert images.shape == (12, 16, 16, 3)
    assert all(np.array_equal(images[sample], train.read(sample)) for sample in range(12))
    assert as_array(validation) is not None


def test_the_digest_is_of_the_images(photos: Path, tmp_path: Path) -> None:
    first = packed(photos, tmp_path / "first")[0].digest
    path = photos / "val" / "dog" / "003.jpg"
    content = path.read_bytes()
    path.write_bytes(content[:-40] + bytes([content[-40] ^ 1]) + content[-39:])
    assert packed(photos, tmp_path / "second")[0].digest != first
    path.write_bytes(content)
    assert packed(photos, tmp_path / "third")[0].digest == first


def test_opening_reads_no_image(photos: Path, tmp_path: Path) -> None:
    packed(photos, tmp_path / "dest")
    for path in (tmp_path / "dest").glob("*-*.arrow"):
        path.write_bytes(bytes(path.stat().st_size))
    train, _ = splits(tmp_path / "dest")
    assert len(train) == 12
    assert train.path(0).startswith("train/cat/000.jpg in ")


def test_arrow_and_its_tools_read_it(photos: Path, tmp_path: Path) -> None:
    import pyarrow as pa

    root = tmp_path / "dest"
    packed(photos, root, shard_bytes=1500)
    index = pa.ipc.open_file(root / "index.arrow").read_all()
    assert index.num_rows == 24
    train, _ = splits(root)
    assert isinstance(train, EncodedSource)
    sample = 0
    for path in sorted(root.glob("train-*.arrow")):
        for row in pa.ipc.open_file(path).read_all().to_pylist():
            assert row["image"]["bytes"] == train.encoded(sample)
            assert (row["image"]["path"], row["label"]) == (index["name"][sample].as_py(), train.labels[sample])
            assert (row["height"], row["width"]) == train.size(sample)  # type: ignore[attr-defined]
            sample += 1
    assert sample == 12
    assert index["split"].to_pylist() == ["train"] * 12 + ["validation"] * 12


READ_WITHOUT_ARROW = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in ('pyarrow', 'datasets'):
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
from paceline.data.image.dataset import DatasetRequest
from paceline.data.image.sets.packed import packed_images
from paceline.recipe.data import Data
opened = packed_images(DatasetRequest(data=Data(dataset="packed", path=sys.argv[1], validation_fraction=0)))
print(sum(int(opened.train.read(sample).sum()) for sample in range(len(opened.train))))
assert 'torch' not in sys.modules
"""


def test_reading_needs_no_arrow(photos: Path, tmp_path: Path) -> None:
    packed(photos, tmp_path / "dest")
    done = subprocess.run(
        [sys.executable, "-c", READ_WITHOUT_ARROW, str(tmp_path / "dest")],
        env={"PYTHONPATH": str(SOURCES)},
        capture_output=True,
        text=True,
        check=False,
    )
    train, _ = splits(tmp_path / "dest")
    assert done.stdout.strip() == str(sum(int(train.read(sample).sum()) for sample in range(12))), done.stderr


def test_a_second_time_nothing_is_done(photos: Path, tmp_path: Path) -> None:
    first, found = packed(photos, tmp_path / "dest")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "dest").iterdir()}
    assert (found, packed(photos, tmp_path / "dest")) == (0, (first, 24))
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "dest").iterdir()}
    with raises(DataError, path="dest"):
        packed(photos, tmp_path / "dest", mode="raw")
    (photos / "train" / "cat" / "new.jpg").write_bytes((photos / "train" / "cat" / "001.jpg").read_bytes())
    with raises(DataError, path="dest"):
        packed(photos, tmp_path / "dest")


@pytest.mark.parametrize("mode", ["original", "jpeg", "raw"])
def test_broken_images_are_named_or_left_out(
    photos: Path, tmp_path: Path, break_some: Callable[[], None], mode: str
) -> None:
    break_some()
    with pytest.raises(DataError, match=r"2 image\(s\) of .* be read: train/cat/001.jpg \(.*val/dog/002"):
        packed(photos, tmp_path / "dest", mode=mode)
    assert not (tmp_path / "dest" / MANIFEST).exists()
    manifest, found = packed(photos, tmp_path / "dest", mode=mode, skip_broken=True)
    assert found == 24  # nothing is read a second time
    assert manifest.samples == {"train": 11, "validation": 11}
    assert [(each.split, each.name) for each in manifest.left_out] == [
        ("train", "train/cat/001.jpg"),
        ("validation", "val/dog/002.jpg"),
    ]
    train, validation = splits(tmp_path / "dest")
    names = [train.path(sample).partition(" ")[0] for sample in range(len(train))]
    assert names[:2] == ["train/cat/000.jpg", "train/cat/002.jpg"]
    assert train.labels.tolist() == [0] * 5 + [1] * 6
    assert all(("/cat/" in name) == (label == 0) for name, label in zip(names, train.labels, strict=True))
    for source in (train, validation):
        for sample in range(len(source)):
            source.read(sample)


def test_a_flipped_byte_is_named_wherever_it_is(photos: Path, tmp_path: Path) -> None:
    root = tmp_path / "dest"
    packed(photos, root, shard_bytes=8000)
    nothing = lambda done, total: None  # noqa: E731
    assert verify(root, 2, nothing) == []
    index = open_packed(root).index
    draws = np.random.default_rng(0)
    for path in sorted(root.iterdir()):
        content = path.read_bytes()
        for position in [*draws.integers(0, len(content), 12).tolist(), len(content) - 1]:
            path.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
            if path.name == MANIFEST:
                with raises(DataError, path="dest/packed.json"):
                    verify(root, 2, nothing)
            else:
                damage = verify(root, 2, nothing)
                assert len(damage) == 1
                assert str(path) in damage[0]
                shard = (
                    [facts.name for facts in read_manifest(root).shards].index(path.name) if "-" in path.name else -1
                )
                hit = [
                    index.name.text(row)
                    for row in range(len(index))
                    if index.ranges.file[row] == shard
                    and 0 <= position - index.ranges.begin[row] < index.ranges.length[row]
                ]
                assert all(name in damage[0] for name in hit)
                assert hit or "of its" not in damage[0] or "but none of its" in damage[0]
        path.write_bytes(content)
    assert verify(root, 1, nothing) == []


def test_a_file_of_another_size_is_refused_when_it_is_opened(photos: Path, tmp_path: Path) -> None:
    root = tmp_path / "dest"
    packed(photos, root)
    shard = root / "train-00000.arrow"
    content = shard.read_bytes()
    shard.write_bytes(content[:-10])
    with pytest.raises(DataError, match=rf"00000.arrow' has {len(content) - 10} bytes instead of {len(content)}"):
        open_packed(root)
    shard.unlink()
    with raises(DataError, path="dest/train-00000.arrow"):
        open_packed(root)


@pytest.mark.parametrize("column", ["label", "shard", "offset", "length"])
def test_an_index_of_what_is_not_there_is_refused(photos: Path, tmp_path: Path, column: str) -> None:
    root = tmp_path / "dest"
    packed(photos, root)
    manifest = read_manifest(root)
    path, place = root / manifest.index.name, manifest.columns[column]
    content = bytearray(path.read_bytes())
    content[place.offset + np.dtype(place.dtype).itemsize - 1] ^= 0x40  # the highest byte of the first number
    path.write_bytes(content)
    with raises(DataError, path="dest/index.arrow"):
        open_packed(root)


def test_a_shard_that_changes_later_is_a_broken_image(photos: Path, tmp_path: Path) -> None:
    from paceline.data.image.decode import BrokenImageError

    root = tmp_path / "dest"
    packed(photos, root)
    train, _ = splits(root)
    shard = root / "train-00000.arrow"
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(BrokenImageError, match=r"train/cat/000.jpg in .*: it has changed since the run started"):
        train.read(0)


def test_a_packed_dataset_can_be_packed_again(photos: Path, tmp_path: Path) -> None:
    packed(photos, tmp_path / "originals")
    packed(tmp_path / "originals", tmp_path / "again", mode="raw", size=16)
    packed(photos, tmp_path / "at once", mode="raw", size=16)
    again, at_once = (read_manifest(tmp_path / name) for name in ("again", "at once"))
    assert again.digest == at_once.digest
    assert again == replace(at_once, origin=again.origin)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_side": 10}, "--max-side 10 has no effect with --mode original: leave it out, or use --mode jpeg or raw"),
        ({"mode": "raw", "quality": 10}, "--quality 10 has no effect with --mode raw: .* use --mode jpeg"),
        ({"mode": "jpeg", "size": 10}, "--size 10 has no effect with --mode jpeg: .* use --mode raw"),
        ({"mode": "raw", "size": 10, "max_side": 20}, "give one of them"),
        ({"part": Data(label_column="x")}, "--label-column has no effect with --kind image_folder"),
    ],
)
def test_options_without_effect_are_refused(
    photos: Path, tmp_path: Path, options: dict[str, object], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        packed(photos, tmp_path / "dest", **options)
    assert not (tmp_path / "dest").exists()


def test_destinations_that_hold_something_else_are_refused(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for destination, message in (
        (photos / "packed", "is inside SOURCE"),
        (photos, "is inside SOURCE"),
        (tmp_path / "full", "is not empty and is not a packed dataset"),
        (tmp_path / "full" / "file", "is a file: choose a directory"),
    ):
        with pytest.raises(DataError, match=message):
            packed(photos, destination)
    packed(photos, tmp_path / "dest")
    (tmp_path / "dest" / MANIFEST).unlink()
    with raises(DataError, path="dest"):
        open_packed(tmp_path / "dest")
    with raises(DataError, path="nowhere"):
        open_packed(tmp_path / "nowhere")


def test_the_beginning_of_another_is_refused(photos: Path, tmp_path: Path, break_some: Callable[[], None]) -> None:
    break_some()
    with pytest.raises(DataError, match="cannot be read"):
        packed(photos, tmp_path / "dest")
    with raises(DataError, path="dest"):
        packed(photos, tmp_path / "dest", mode="raw", size=8, shard_bytes=200)
    (photos / "train" / "cat" / "001.jpg").unlink()
    with raises(DataError, path="dest"):
        packed(photos, tmp_path / "dest")


def test_names_that_are_no_text_are_written_out(photos: Path, tmp_path: Path) -> None:
    odd = os.fsencode(photos / "train" / "cat") + b"/\xff.jpg"
    os.rename(photos / "train" / "cat" / "001.jpg", odd)
    packed(photos, tmp_path / "dest")
    train, _ = splits(tmp_path / "dest")
    assert "train/cat/\\xff.jpg in " in {train.path(sample)[: len("train/cat/\\xff.jpg in ")] for sample in range(12)}


def test_the_command(photos: Path, tmp_path: Path, run_pack: Run, run_pack_here: Run) -> None:
    done = run_pack(photos, tmp_path / "dest", "--verify", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["samples"] == {"train": 12, "validation": 12}
    assert (document["kind"], document["mode"], document["verified"]) == ("image_folder", "original", True)
    assert "image_folder (found), 12 train and 12 validation images of 2 classes" in done.stderr

    shard = tmp_path / "dest" / "train-00000.arrow"
    content = bytearray(shard.read_bytes())
    content[int(open_packed(tmp_path / "dest").index.ranges.begin[3]) + 5] ^= 1
    shard.write_bytes(bytes(content))
    done = run_pack_here(tmp_path / "dest", "--verify")
    assert done.returncode == 1
    assert "train-00000.arrow is damaged: 1 of its 12 images (train/cat/003.jpg)" in done.stdout

    done = run_pack_here(photos)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Missing argument 'DEST'" in done.stderr
    done = run_pack_here(tmp_path / "dest", "--verify", "--shard-size", "5")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--shard-size has no effect here: it needs DEST" in done.stderr
    done = run_pack_here(tmp_path / "nothing", tmp_path / "dest")
    assert done.returncode == 2
    assert done.stderr.startswith("paceline: there is no ")


def test_a_source_is_a_handful_of_objects(make_photos: Callable[..., Path], tmp_path: Path) -> None:
    """Loader processes share it: whatever is read of a Python object is a page that is copied."""

    def objects(root: Path) -> int:
        gc.collect()
        gc.disable()  # what others have left behind is not to go meanwhile
        try:
            before = len(gc.get_objects())
            train, validation = splits(root)
            found = len(gc.get_objects()) - before
        finally:
            gc.enable()
        assert len(train) > len(validation) > 0
        return found

    counts = []
    for count in (4, 40):
        source = make_photos(tmp_path / f"photos-{count}", count=count, splits=("",))
        packed(source, tmp_path / f"dest-{count}")
        objects(tmp_path / f"dest-{count}")
        gc.collect()
        counts.append(objects(tmp_path / f"dest-{count}"))
    assert counts[0] == pytest.approx(counts[1], abs=4)


def test_a_source_can_be_handed_to_another_process(photos: Path, tmp_path: Path) -> None:
    for mode in ("original", "raw"):
        packed(photos, tmp_path / mode, mode=mode)
        train, validation = splits(tmp_path / mode)
        for source in (train, validation):
            copy = pickle.loads(pickle.dumps(source))
            assert [copy.path(sample) for sample in range(12)] == [source.path(sample) for sample in range(12)]
            assert all(np.array_equal(copy.read(sample), source.read(sample)) for sample in range(12))


def test_more_files_than_may_be_open_are_read(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.data.image import mapped

    packed(photos, tmp_path / "dest", shard_bytes=1)
    train, _ = splits(tmp_path / "dest")
    assert len(list((tmp_path / "dest").glob("train-*.arrow"))) == 12
    before = len(os.listdir("/proc/self/fd"))
    few = lru_cache(maxsize=3)(mapped._mapped.__wrapped__)
    monkeypatch.setattr(mapped, "_mapped", few)
    order = np.random.default_rng(0).integers(0, 12, 200).tolist()
    kept = [train.read(sample) for sample in order]
    assert few.cache_info().misses > 20
    assert len(os.listdir("/proc/self/fd")) <= before + 3
    monkeypatch.undo()
    assert all(np.array_equal(image, train.read(sample)) for image, sample in zip(kept, order, strict=True))
