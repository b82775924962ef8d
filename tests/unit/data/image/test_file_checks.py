"""Files that cannot be opened are found from their heads and ends, once for as long as they do not change."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from paceline.data import disk_cache
from paceline.data.image import file_checks
from paceline.data.image.decode import BrokenImageError, decode
from paceline.data.image.file_checks import broken_files, head_fault
from paceline.data.image.source import FileSource


def encoded(file_format: str, size: tuple[int, int] = (40, 30)) -> bytes:
    noise = np.random.default_rng(0).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, file_format)
    return buffer.getvalue()


JPEG, PNG, WEBP = (encoded(each) for each in ("JPEG", "PNG", "WEBP"))
WHOLE = {
    "jpeg": JPEG,
    "png": PNG,
    "webp": WEBP,
    "gif": encoded("GIF"),
    "bmp": encoded("BMP"),
    "tiff": encoded("TIFF"),
    "jpeg with something behind its end": JPEG + bytes(100),
}
BROKEN = {
    "empty": (b"", "an empty file"),
    "words": (b"these are words", "not an image"),
    "page": (b"<!DOCTYPE html><html>404</html>", "a web page"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
    "half a jpeg": (JPEG[: len(JPEG) // 2], "truncated"),
    "almost all of a jpeg": (JPEG[:-2], "truncated"),
    "half a png": (PNG[: len(PNG) // 2], "truncated"),
    "half a webp": (WEBP[: len(WEBP) // 2], ""),
    "huge": (encoded("PPM").replace(b"40 30", b"40000 3000"), "at most"),
}


@pytest.mark.parametrize("content", WHOLE.values(), ids=WHOLE)
def test_nothing_is_wrong_with_a_whole_file(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.jpg").write_bytes(content)
    assert head_fault(str(tmp_path / "x.jpg")) == ""


@pytest.mark.parametrize(("content", "said"), BROKEN.values(), ids=BROKEN)
def test_what_cannot_be_opened_is_found_and_cannot_be_read(content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "x.jpg").write_bytes(content)
    found = head_fault(str(tmp_path / "x.jpg"))
    assert found
    assert said in found
    with pytest.raises(BrokenImageError):
        decode(tmp_path / "x.jpg", 3)


def test_a_link_that_leads_nowhere_is_not_a_failing_disk(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, target in (("circle.jpg", "circle.jpg"), ("in-a-file.jpg", "file/x.jpg"), ("gone.jpg", "nowhere.jpg")):
        (tmp_path / name).symlink_to(target)
        assert head_fault(str(tmp_path / name)).startswith("it cannot be read: ")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FileSource:
    """Eight files, of which the third is broken, so old that what is found may be remembered."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(file_checks, "MIN_CACHED_SECONDS", 0.0)
    monkeypatch.setattr(disk_cache, "TOO_FRESH_NS", -(10**12))
    (tmp_path / "set").mkdir()
    for number in range(8):
        (tmp_path / "set" / f"{number}.png").write_bytes(b"words" if number == 2 else PNG)
    names = [f"{number}.png".encode() for number in range(8)]
    return FileSource(tmp_path / "set", names, np.zeros(8, dtype=np.int64), 3)


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are tried."""
    names: list[str] = []
    real: Callable[[str], str] = file_checks.head_fault

    def noting(path: str) -> str:
        names.append(Path(path).name)
        return real(path)

    monkeypatch.setattr(file_checks, "head_fault", noting)
    return names


def test_what_was_found_is_remembered_until_a_file_changes(source: FileSource, tried: list[str]) -> None:
    first = broken_files(source)
    assert list(first) == [2]
    assert len(tried) == 8
    assert broken_files(source) == first
    assert len(tried) == 8
    Path(source.path(5)).write_bytes(PNG[:-30])
    assert list(broken_files(source)) == [2, 5]
    Path(source.path(2)).write_bytes(PNG)
    assert list(broken_files(source)) == [5]
    (memory,) = (Path(source.path(0)).parents[1] / "cache" / "paceline" / "heads").iterdir()
    for torn in (b"", b"{}", b'{"state": 1}', memory.read_bytes()[:-9]):
        memory.write_bytes(torn)
        assert list(broken_files(source)) == [5]


def test_what_changed_just_now_or_cannot_be_read_is_not_remembered(
    source: FileSource, tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_cache, "TOO_FRESH_NS", 10**12)
    broken_files(source)
    assert list(broken_files(source)) == [2]
    assert len(tried) == 16
    monkeypatch.setattr(disk_cache, "TOO_FRESH_NS", -(10**12))
    Path(source.path(7)).unlink()
    assert "cannot be read" in broken_files(source)[7]
    assert broken_files(source).keys() == {2, 7}
    assert len(tried) == 32


def test_of_a_large_set_some_are_tried(source: FileSource, tried: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_checks, "MAX_TRIED", 4)
    assert broken_files(source) == {}
    assert sorted(tried) == ["1.png", "3.png", "5.png", "7.png"]
