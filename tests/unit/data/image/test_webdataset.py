"""Images in tars are read where they lie, with the labels beside them; what is no such tar is refused by name."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest
from golden_sentences import raises
from image_sets import opened_set
from PIL import Image

from paceline.data.image import tar_index
from paceline.data.image.dataset import StoredImages
from paceline.data.image.datasets import open_dataset
from paceline.data.image.decode import BrokenImageError, decode
from paceline.data.image.mapped import MappedFile
from paceline.data.image.sets.webdataset import expand
from paceline.data.image.source import EncodedSource, SubsetSource
from paceline.data.image.tar_index import index_tar
from paceline.errors import DataError
from paceline.recipe.data import Data

Member = tuple[str, bytes]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def jpeg(value: int, mode: str = "RGB") -> bytes:
    out = io.BytesIO()
    draws = np.random.default_rng(value).integers(0, 256, (10 + value % 7, 12, 3), dtype=np.uint8)
    Image.fromarray(draws).convert(mode).save(out, "JPEG")
    return out.getvalue()


def write_tar(path: Path, members: Iterable[Member], form: int = tarfile.GNU_FORMAT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=form) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def samples(numbers: Sequence[int], classes: int = 2, mode: str = "RGB") -> list[Member]:
    members = []
    for number in numbers:
        members += [(f"{number:06}.jpg", jpeg(number, mode)), (f"{number:06}.cls", str(number % classes).encode())]
    return members


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_are_found_as_the_standard_library_finds_them(tmp_path: Path, form: int) -> None:
    long = "deep/" * 15 + "x" * 60 + ".jpg"
    names = ["a.jpg", "./b/c.cls", long if form != tarfile.USTAR_FORMAT else "d" * 60 + "/" + "e" * 90, "empty.txt"]
    names += ["日本/ü.jpg"] if form != tarfile.USTAR_FORMAT else []
    path = write_tar(tmp_path / "x.tar", [(name, os.urandom(300 * k)) for k, name in enumerate(reversed(names))], form)
    with tarfile.open(path, "a", format=form) as tar:
        folder = tarfile.TarInfo("folder")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        link = tarfile.TarInfo("link.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "a.jpg"
        tar.addfile(link)
        last = tarfile.TarInfo("last")
        last.size = 5
        tar.addfile(last, io.BytesIO(b"12345"))
    index = index_tar(MappedFile.at(path))
    with tarfile.open(path) as tar:
        wanted = [(member.name, member.offset_data, member.size) for member in tar if member.isreg()]
    count = len(wanted)
    found = [(index.names.text(k).removeprefix("./"), int(index.begin[k]), int(index.length[k])) for k in range(count)]
    assert found == [(name.removeprefix("./"), begin, length) for name, begin, length in wanted]
    assert len(index.names) == len(wanted) == len(names) + 1


def test_an_index_is_remembered_until_the_tar_changes(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tar(tmp_path / "x.tar", samples(range(4)))
    first = index_tar(MappedFile.at(path))
    assert len(list(cache.rglob("*.npz"))) == 1
    scans = []
    scan = tar_index._scan
    monkeypatch.setattr(tar_index, "_scan", lambda file: scans.append(file) or scan(file))
    again = index_tar(MappedFile.at(path))
    assert scans == []
    assert (again.begin == first.begin).all()
    assert again.names[3] == first.names[3]
    for damaged in cache.rglob("*.npz"):
        damaged.write_bytes(damaged.read_bytes()[:50])
    assert len(index_tar(MappedFile.at(path)).names) == 8
    write_tar(path, samples(range(3)))
    assert len(index_tar(MappedFile.at(path)).names) == 6
    assert len(scans) == 2


def test_where_nothing_can_be_remembered_it_is_read_anyway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert len(index_tar(MappedFile.at(write_tar(tmp_path / "x.tar", samples(range(4))))).names) == 8


def test_a_name_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    """Or half of the samples would be missed without a word."""
    path = write_tar(tmp_path / "x.tar", [*samples(range(4)), *samples(range(2))])
    with raises(DataError, path="x.tar"):
        opened_set("webdataset", path, channels=None, validation_fraction=0.5)


def test_names_that_differ_in_their_case_alone_are_one_samples(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", [*samples(range(4)), ("000003.JPG", jpeg(3))])
    with raises(DataError, path="x.tar"):
        opened_set("webdataset", path, channels=None, validation_fraction=0.5)


def test_samples_of_a_pattern(tmp_path: Path) -> None:
    write_tar(tmp_path / "t-000.tar", samples(range(8)))
    write_tar(tmp_path / "t-001.tar", samples(range(8, 13)))
    for pattern in ("t-{000..001}.tar", "t-*.tar", "t-00{0,1}.tar"):
        opened = opened_set("webdataset", tmp_path / pattern, channels=None, validation_fraction=0)
        train = opened.train
        assert isinstance(train, EncodedSource)
        assert (opened.classes, opened.is_split_off, opened.channels) == (("0", "1"), True, 3)
        assert train.labels.tolist() == [number % 2 for number in range(13)]
        for number in range(13):
            assert bytes(train.encoded(number)) == jpeg(number)
            assert np.array_equal(train.read(number), decode(jpeg(number), 3))
            assert train.size(number) == decode(jpeg(number), 3).shape[:2]  # type: ignore[attr-defined]
        assert train.path(9) == f"000009.jpg in {tmp_path / 't-001.tar'}"
    for pattern, what in (("{t-*,t-001}.tar", "a tar twice"), ("t-{001..000}.tar", "no tar")):
        with pytest.raises(DataError, match=f"names {what}: correct the pattern"):
            opened_set("webdataset", tmp_path / pattern, channels=None)


def test_a_name_that_looks_like_a_pattern_is_a_name(tmp_path: Path) -> None:
    for name in ("photos [old]/x.tar", "x[1].tar", "{a,b}.tar"):
        path = write_tar(tmp_path / name, samples(range(4)))
        assert len(opened_set("webdataset", path, channels=None, validation_fraction=0).train) == 4


def test_patterns() -> None:
    assert expand("a-{08..11}.tar") == ["a-08.tar", "a-09.tar", "a-10.tar", "a-11.tar"]
    assert expand("{a,b}/{0..1}") == ["a/0", "a/1", "b/0", "b/1"]
    assert expand("plain.tar") == ["plain.tar"]


def test_a_folder_of_splits(tmp_path: Path) -> None:
    write_tar(tmp_path / "imagenet-train-000.tar", samples(range(6)))
    write_tar(tmp_path / "imagenet-validation-000.tar", samples(range(6, 10)))
    write_tar(tmp_path / "imagenet-test-000.tar", samples([11]))
    opened = opened_set("webdataset", tmp_path, channels=None, validation_fraction=0.2)
    assert (len(opened.train), len(opened.validation)) == (6, 4)
    assert opened.split == "the validation tars; those of test are not read"
    write_tar(tmp_path / "odd.tar", samples([12]))
    with raises(DataError, path=tmp_path):
        opened_set("webdataset", tmp_path, channels=None, validation_fraction=0.2)


def test_without_splits_a_part_is_held_out(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", samples(range(20), mode="L"))
    dataset = open_dataset(Data(dataset="webdataset", path=str(tmp_path)))
    assert (dataset.channels, len(dataset.train), len(dataset.validation)) == (1, 16, 4)
    assert isinstance(dataset.train, SubsetSource)
    assert dataset.reasons["validation"].startswith("20% of each class")
    other = open_dataset(Data(dataset="webdataset", path=str(tmp_path), channels=3))
    assert other.train.read(0).shape[-1] == 3
    assert other.digest == dataset.digest
    write_tar(tmp_path / "a.tar", samples(range(1, 21), mode="L"))
    assert open_dataset(Data(dataset="webdataset", path=str(tmp_path))).digest != dataset.digest


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("1.jpg", b"x")], r"'1\.jpg in .*' has no label"),
        ([("1.jpg", b"x"), ("1.json", b"{")], r"its \.json cannot be read"),
        ([("1.jpg", b"x"), ("1.json", b'{"label": -1}')], r"has the label -1, but labels are numbers from 0 to"),
        ([("1.jpg", b"x"), ("1.png", b"x"), ("1.cls", b"0")], "has 2 images, but one is expected"),
        ([("1.txt", b"x"), ("1.cls", b"0")], "holds no images: expected members like"),
        ([("1.jpg", b"x"), ("1.cls", b"0")], "has one class, '0'"),
        (
            [("1.jpg", b"x"), ("1.json", b'{"label": 0}'), ("2.jpg", b"x"), ("2.cls", b"cat")],
            "use one kind for all",
        ),
    ],
)
def test_what_is_wrong_with_the_samples_is_told(tmp_path: Path, members: list[Member], message: str) -> None:
    with pytest.raises(DataError, match=message):
        opened_set("webdataset", write_tar(tmp_path / "x.tar", members), channels=3, validation_fraction=0)


def opened_tar(path: Path) -> StoredImages:
    return opened_set("webdataset", path, channels=3, validation_fraction=0)


def test_members_that_are_not_read_are_reported(tmp_path: Path) -> None:
    dotted = [(name.replace("0.", ".5_cm."), content) for name, content in samples([10, 20])]
    hidden = [(name, b"x") for name in ("__MACOSX/._1.jpg", "a/.ipynb_checkpoints/1.jpg", ".DS_Store", "b/Thumbs.db")]
    other = [("7.avif", b"x"), ("7.cls", b"0"), ("000001.json", b"{}"), ("UPPER.JPG", jpeg(8)), ("UPPER.CLS", b"0")]
    path = write_tar(tmp_path / "x.tar", [*samples(range(4)), *dotted, *hidden, *other])
    with tarfile.open(path, "a") as tar:
        for name, kind in (
            ("link.jpg", tarfile.SYMTYPE),
            ("hard.jpg", tarfile.LNKTYPE),
            ("pipe.jpg", tarfile.FIFOTYPE),
        ):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = kind, "000000.jpg"
            tar.addfile(entry)
    for _ in range(2):  # the second time from what is remembered
        found = opened_tar(path)
        assert len(found.train) == 5
        dots, others, links = sorted(found.left_out, key=lambda each: each.split()[0] != "images")
        assert ": 2 left out (" in dots
        assert "dot" in dots
        assert "00001.5_cm.jpg" in dots
        assert ": 5 left out (" in others
        assert all(each in others for each in ("1 .avif", "3 .cls", "'00001.5_cm.cls'"))
        assert links.startswith("links and special files in tars: 3 left out ('link.jpg', 'hard.jpg', 'pipe.jpg')")
    with pytest.raises(DataError, match=r"holds no images.*a dot in their names.*'00001\.5_cm\.jpg'"):
        opened_tar(write_tar(tmp_path / "dots.tar", dotted))


def test_what_is_ignored_changes_no_digest(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "tars" / "x.tar", samples(range(4)))
    before = opened_tar(path).digest
    write_tar(path, [*samples(range(4)), ("__MACOSX/._000000.jpg", b"x"), ("9.txt", b"x")])
    write_tar(tmp_path / "tars" / ".y.tar", samples(range(9)))
    (tmp_path / "tars" / "README.md").touch()
    found = opened_tar(tmp_path / "tars")
    assert found.digest == before
    assert "README.md" in found.left_out[0]
    os.mkfifo(tmp_path / "tars" / "pipe.tar")
    with raises(DataError, path="tars/pipe.tar"):
        opened_tar(tmp_path / "tars")


def test_what_is_no_tar_is_told(tmp_path: Path) -> None:
    content = write_tar(tmp_path / "x.tar", samples(range(4))).read_bytes()
    second = content.index(b"000000.cls")
    for name, damaged, message in (
        ("short", content[:700], "extends beyond the end"),
        ("shorter", content[: content.index(b"000000.cls") + 9], "it is truncated"),
        ("flipped", content[:100] + b"\1" + content[101:], "bad checksum"),
        ("later", content[:second] + b"\1" + content[second + 1 :], f"at byte {second} is not a member header"),
        ("empty", b"", "it is empty"),
        ("tiny", b"abc", "truncated header"),
        ("packed", b"\x1f\x8b" + content, "is compressed with gzip"),
    ):
        (tmp_path / f"{name}.tar").write_bytes(damaged)
        with pytest.raises(DataError, match=message):
            opened_set("webdataset", tmp_path / f"{name}.tar", channels=3, validation_fraction=0)
    for pattern in ("nothing.tar", "no-{0..1}.tar", "no*.tar"):
        with pytest.raises(DataError, match="which does not exist: correct the path"):
            opened_set("webdataset", tmp_path / pattern, channels=3, validation_fraction=0)
    (tmp_path / "bare").mkdir()
    with raises(DataError, path="bare"):
        opened_set("webdataset", tmp_path / "bare", channels=3, validation_fraction=0)


def test_a_broken_image_is_named(tmp_path: Path) -> None:
    members = [*samples(range(3)), ("bad.jpg", b"no image"), ("bad.cls", b"1")]
    train = opened_set("webdataset", write_tar(tmp_path / "x.tar", members), channels=3, validation_fraction=0).train
    with pytest.raises(BrokenImageError, match=r"^bad\.jpg in .*x\.tar: not an image"):
        train.read(3)
