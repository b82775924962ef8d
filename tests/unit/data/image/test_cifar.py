"""CIFAR-10 in every published form, and a pickle that would run code."""

from __future__ import annotations

import gzip
import io
import pickle
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest

from paceline.data.image.cifar import find_cifar_archive, read_cifar10
from paceline.errors import DataError

NAMES = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
Part = tuple[np.ndarray, list[int]]


def parts() -> dict[str, Part]:
    """Small batches: uint8 [n, 3072], channel after channel, and labels."""
    generator = np.random.default_rng(0)
    counts = (3, 2, 4, 1, 2, 5)
    return {
        name: (generator.integers(0, 256, (count, 3072), dtype=np.uint8), generator.integers(0, 10, count).tolist())
        for name, count in zip(NAMES, counts, strict=True)
    }


def python2_pickle(pixels: np.ndarray, labels: list[int]) -> bytes:
    """Write what Python 2 wrote in 2009: protocol 2, byte strings without a type of their own."""

    def text(value: bytes) -> bytes:
        if len(value) < 256:
            return pickle.SHORT_BINSTRING + bytes([len(value)]) + value
        return pickle.BINSTRING + struct.pack("<i", len(value)) + value

    def number(value: int) -> bytes:
        return pickle.BININT + struct.pack("<i", value)

    def name(module: bytes, attribute: bytes) -> bytes:
        return pickle.GLOBAL + module + b"\n" + attribute + b"\n"

    def items(values: list[bytes]) -> bytes:
        return pickle.EMPTY_LIST + pickle.MARK + b"".join(values) + pickle.APPENDS

    empty = name(b"numpy.core.multiarray", b"_reconstruct")
    empty += pickle.MARK + name(b"numpy", b"ndarray") + number(0) + pickle.TUPLE1 + text(b"b") + pickle.TUPLE
    empty += pickle.REDUCE
    dtype = name(b"numpy", b"dtype") + pickle.MARK + text(b"u1") + number(0) + number(1) + pickle.TUPLE + pickle.REDUCE
    dtype += pickle.MARK + number(3) + text(b"|") + pickle.NONE * 3 + number(-1) + number(-1) + number(0)
    dtype += pickle.TUPLE + pickle.BUILD
    state = pickle.MARK + number(1) + number(len(pixels)) + number(3072) + pickle.TUPLE2 + dtype
    state += pickle.NEWFALSE + text(pixels.tobytes()) + pickle.TUPLE
    array = empty + state + pickle.BUILD
    fields = {
        b"data": array,
        b"labels": items([number(label) for label in labels]),
        b"batch_label": text(b"training batch 1 of 5"),
        b"filenames": items([text(b"leptodactylus_pentadactylus_s_000004.png")] * len(labels)),
    }
    body = b"".join(text(key) + value for key, value in fields.items())
    return pickle.PROTO + b"\x02" + pickle.EMPTY_DICT + pickle.MARK + body + pickle.SETITEMS + pickle.STOP


def binary(pixels: np.ndarray, labels: list[int]) -> bytes:
    return np.concatenate([np.array(labels, dtype=np.uint8)[:, None], pixels], axis=1).tobytes()


def python3_pickle(pixels: np.ndarray, labels: list[int]) -> bytes:
    return pickle.dumps({b"data": pixels, b"labels": labels, b"batch_label": b"x"}, protocol=2)


WRITERS = {"bin": binary, "py": python2_pickle, "py3": python3_pickle}


def write(folder: Path, version: str, content: dict[str, Part] | None = None) -> Path:
    archive = folder / f"cifar-10-batches-{version[:3].rstrip('3')}"
    archive.mkdir()
    for name, part in (content or parts()).items():
        (archive / (name + (".bin" if version == "bin" else ""))).write_bytes(WRITERS[version](*part))
    (archive / "readme.html").write_text("<html/>")
    return archive


def pack(archive: Path) -> Path:
    path = archive.parent / "cifar-10.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        tar.add(archive, arcname=archive.name)
    return path


def check(archive: Path | None) -> None:
    assert archive is not None
    content = parts()
    train, test = read_cifar10(archive)
    for source, names in ((train, NAMES[:5]), (test, NAMES[5:])):
        planes = np.concatenate([content[name][0] for name in names]).reshape(-1, 3, 32, 32)
        assert np.array_equal(source.images, planes.transpose(0, 2, 3, 1))
        assert source.labels.tolist() == [label for name in names for label in content[name][1]]
    assert test.path(0) == "cifar10 test[0]"


@pytest.mark.parametrize("version", WRITERS)
def test_every_published_form(tmp_path: Path, version: str) -> None:
    archive = write(tmp_path, version)
    check(find_cifar_archive(tmp_path))
    check(find_cifar_archive(archive))
    check(find_cifar_archive(pack(archive)))


def test_an_image_folder_is_no_archive(tmp_path: Path) -> None:
    assert find_cifar_archive(tmp_path) is None


@pytest.mark.parametrize("version", ["bin", "py"])
def test_a_missing_batch_is_named(tmp_path: Path, version: str) -> None:
    content = parts()
    del content["data_batch_3"]
    with pytest.raises(DataError, match=r"lacks data_batch_3(\.bin)?, but"):
        read_cifar10(write(tmp_path, version, content))


class Trap:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


def test_loading_never_runs_code(tmp_path: Path) -> None:
    archive = write(tmp_path, "py")
    sprung = tmp_path / "sprung"
    traps = {
        "touch": pickle.dumps({b"data": Trap(sprung), b"labels": []}, protocol=2),
        "system": b"cos\nsystem\n(S'touch " + str(sprung).encode() + b"'\ntR.",
        "eval": b"c__builtin__\neval\n(S'open(\"" + str(sprung).encode() + b'", "w")\'\ntR.',
        "dotted": b"\x80\x04\x8c\x05numpy\x8c\x0endarray.tofile\x93.",
        "memory": b"cnumpy\nndarray\n((I999999999999\ntR.",
        "dtype": b"cnumpy\ndtype\n(S'O'\ntR.",
    }
    for trap in traps.values():
        (archive / "data_batch_2").write_bytes(trap)
        with pytest.raises(DataError, match="data_batch_2' is no batch of CIFAR-10"):
            read_cifar10(archive)
    assert not sprung.exists()


def test_damage_is_named(tmp_path: Path) -> None:
    pixels, _ = parts()["data_batch_1"]
    damaged = {
        "bin": [b"", binary(pixels, [1, 2, 3])[:-1], binary(pixels, [1, 2, 10])],
        "py": [b"", b"\x80\x02}", pickle.dumps({b"data": pixels, b"labels": [1]}, protocol=2), pickle.dumps([], 2)],
    }
    for version, contents in damaged.items():
        archive = write(tmp_path, version)
        for content in contents:
            (archive / ("data_batch_1" + (".bin" if version == "bin" else ""))).write_bytes(content)
            with pytest.raises(DataError, match="is no batch of CIFAR-10"):
                read_cifar10(archive)


def test_damaged_archives_are_named(tmp_path: Path) -> None:
    path = pack(write(tmp_path, "bin"))
    whole = path.read_bytes()
    for content in (b"", b"text", whole[: len(whole) // 2], gzip.compress(b"text")):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"cannot be read as a \.tar\.gz|lacks data_batch"):
            read_cifar10(path)


def test_an_archive_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "evil.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for name in (*NAMES, "../../outside"):
            member = tarfile.TarInfo(f"../{name}.bin")
            content = binary(*parts()[NAMES[0]])
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    before = sorted(tmp_path.parent.rglob("*"))
    read_cifar10(path)
    assert sorted(tmp_path.parent.rglob("*")) == before
