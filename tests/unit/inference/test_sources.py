"""Which pictures do files, patterns, archives and standard input mean, and what in an archive is refused?"""

from __future__ import annotations

import gzip
import io
import os
import tarfile
import zipfile
from pathlib import Path

import pytest
from golden_sentences import raises

from paceline.data.image.decode import BrokenImageError
from paceline.errors import DataError
from paceline.parsing.files import SkippedItems
from paceline.prediction import sources
from paceline.prediction.sources import PictureFile, members, pictures_of

FILES = {"b/1.png": b"one", "a/2.JPG": b"two" * 400, "notes.txt": b"no picture", "c/3.jpeg": b"", "zz.png": b"z" * 512}
PICTURES = ["b/1.png", "a/2.JPG", "c/3.jpeg", "zz.png"]


def written_zip(path: Path, files: dict[str, bytes], **options: int) -> Path:
    with zipfile.ZipFile(path, "w", **options) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def written_tar(path: Path, files: dict[str, bytes], kind: int = tarfile.GNU_FORMAT) -> Path:
    with tarfile.open(path, "w:gz" if path.name.endswith("gz") else "w", format=kind) as archive:
        archive.add(path.parent, "folder", recursive=False)
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return path


def read(picture: PictureFile) -> bytes | str:
    try:
        return picture.read()
    except BrokenImageError as error:
        return error.reason


@pytest.mark.parametrize("name", ["x.zip", "x.tar", "x.tar.gz", "x.tgz"])
def test_archives_are_read_in_their_order(tmp_path: Path, name: str) -> None:
    write = written_zip if name.endswith("zip") else written_tar
    archive = write(tmp_path / name, FILES)
    found = list(members(archive, SkippedItems()))
    assert [str(each.path.relative_to(archive)) for each in found] == PICTURES
    # Read late and in another order, as threads do.
    assert [read(each) for each in reversed(found)] == [FILES[each] for each in reversed(PICTURES)]
    assert sorted(tmp_path.iterdir()) == [archive]


@pytest.mark.parametrize("kind", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
def test_long_and_foreign_names_in_tars(tmp_path: Path, kind: int) -> None:
    long = "d" * 90 + "/" + "n" * 90 + ".png"
    files = {long: b"1"} | ({} if kind == tarfile.USTAR_FORMAT else {"größe/ñ.png": b"2"})
    archive = written_tar(tmp_path / "x.tar", files, kind)
    assert {str(each.path.relative_to(archive)): read(each) for each in members(archive, SkippedItems())} == files


def test_names_that_lead_out_are_refused(tmp_path: Path) -> None:
    hostile = dict.fromkeys(("../../etc/a.png", "/etc/b.png", "ok/../../c.png", "..\\d.png", "\x1b[2Je.png"), b"5")
    for archive in (written_zip(tmp_path / "x.zip", hostile), written_tar(tmp_path / "x.tar", hostile)):
        found = list(members(archive, SkippedItems()))
        assert [read(each) for each in found] == ["its name leads out of the archive"] * 4 + [b"5"]
        assert all(str(each.path).isprintable() for each in found)


@pytest.mark.parametrize("name", ["x.zip", "x.tar", "x.tar.gz"])
def test_others_are_counted_and_hidden_ones_ignored(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "EXTENSIONS", ("png", "jpg", "jpeg"))
    hidden = dict.fromkeys((".h.png", "__MACOSX/._b.png", "a/.ipynb_checkpoints/1.png", "a/Thumbs.db"), b"x")
    other = {"a/7.5_cm.heic": b"x", "README": b"x"}
    write = written_zip if name.endswith("zip") else written_tar
    archive, left_out = write(tmp_path / name, FILES | hidden | other), SkippedItems()
    assert [str(each.path.relative_to(archive)) for each in members(archive, left_out)] == PICTURES
    other, photos = sorted(left_out.summaries(), key=lambda told: "heic" in told)
    assert "2 left out" in other
    assert all(each in other for each in ("notes.txt", "README"))
    assert "1 left out" in photos


def test_links_in_tars_are_counted(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("1.png"))
        for number, kind in enumerate((tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE)):
            entry = tarfile.TarInfo(f"{number}-{'n' * 150}.png")
            entry.type, entry.linkname = kind, "l" * 150
            archive.addfile(entry)
    left_out = SkippedItems()
    assert len(list(members(tmp_path / "x.tar", left_out))) == 1
    (told,) = left_out.summaries()
    assert told.startswith("links and special files in archives: 4 left out (")
    assert "0-n" in told


def test_a_folder_is_searched_as_a_run_searches_one(tmp_path: Path) -> None:
    folder, elsewhere, left_out = tmp_path / "ask", tmp_path / "elsewhere", SkippedItems()
    for path in (folder / "x.png", folder / "d.png" / "7.5_cm.PNG", elsewhere / "y.jpg"):
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(b"x")
    for ignored in (".ipynb_checkpoints/x.png", "._z.png", "__MACOSX/a.png", "desktop.ini"):
        (folder / ignored).parent.mkdir(exist_ok=True)
        (folder / ignored).write_bytes(b"x")
    (folder / "linked").symlink_to(elsewhere)
    (elsewhere / "back").symlink_to(folder)
    (folder / "gone.png").symlink_to("nowhere")
    os.mkfifo(folder / "pipe.png")
    (folder / "movie.mp4").write_bytes(b"x")
    found = {str(each.path.relative_to(folder)): read(each) for each in pictures_of([folder], left_out)}
    assert found == {
        "d.png/7.5_cm.PNG": b"x",
        "gone.png": "no such file",
        "linked/y.jpg": b"x",
        "pipe.png": "it is a named pipe, not a file",
        "x.png": b"x",
    }
    told = " ".join(left_out.summaries())
    assert "linked/back" in told
    assert "movie.mp4" in told
    with raises(DataError, path="ask/pipe.png"):
        pictures_of([folder / "pipe.png"], left_out)


def test_members_are_no_larger_than_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "LARGEST_FILE_BYTES", 1000)
    files = {"small.png": b"s" * 1000, "large.png": bytes(1001), "last.png": b"l"}
    expected = [files["small.png"], "1,001 bytes; at most 1,000 are read", b"l"]
    deflated = {"compression": zipfile.ZIP_DEFLATED}
    assert [
        read(each) for each in members(written_zip(tmp_path / "x.zip", files, **deflated), SkippedItems())
    ] == expected
    assert [read(each) for each in members(written_tar(tmp_path / "x.tar.gz", files), SkippedItems())] == expected
    # A header that lies: the content is longer than it says.
    content = (tmp_path / "x.zip").read_bytes().replace((1001).to_bytes(4, "little"), (999).to_bytes(4, "little"))
    (tmp_path / "x.zip").write_bytes(content)
    assert "cannot be read from its archive" in str(read(list(members(tmp_path / "x.zip", SkippedItems()))[1]))


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE])
def test_a_name_cannot_fill_the_memory(tmp_path: Path, kind: bytes) -> None:
    """A header that only names the next member, by a name of 70,000 bytes; of 70 GB it would be no other."""

    def member(name: str, content: bytes, kind: bytes = tarfile.REGTYPE) -> bytes:
        entry = tarfile.TarInfo(name)
        entry.type, entry.size = kind, len(content)
        return entry.tobuf(tarfile.GNU_FORMAT) + content + bytes(-len(content) % 512)

    named = member("././@LongLink", b"n" * 70_000, kind)
    with gzip.open(tmp_path / "x.tar.gz", "wb") as file:
        file.write(member("1.png", b"1") + named + member("2.png", b"2") + bytes(1024))
    found = list(members(tmp_path / "x.tar.gz", SkippedItems()))
    assert read(found[0]) == b"1"
    assert "a name of 70,000 bytes" in str(read(found[1]))
    assert len(found) == 2


def test_holes_cannot_fill_the_memory(tmp_path: Path) -> None:
    """A file with holes, whose headers may name any number of them."""
    entry = tarfile.TarInfo("2.png")
    entry.type, entry.pax_headers = tarfile.GNUTYPE_SPARSE, {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}
    for kind in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        archive = written_tar(tmp_path / "x.tar", {"1.png": b"1"})
        with tarfile.open(archive, "a", format=kind) as tar:
            tar.addfile(entry)
        entry.type = tarfile.REGTYPE
        first, second = members(archive, SkippedItems())
        assert (read(first), "a file with holes" in str(read(second))) == (b"1", True)


@pytest.mark.parametrize("cut", [100, 700, 1000])
def test_what_comes_before_the_damage_is_read(tmp_path: Path, cut: int) -> None:
    archive = written_tar(tmp_path / "x.tar", {"1.png": b"1" * 512, "2.png": b"2" * 512})
    archive.write_bytes(archive.read_bytes()[: 512 + 1024 + cut])
    found = [read(each) for each in members(archive, SkippedItems())]
    assert found[0] == b"1" * 512
    assert "the archive is damaged" in str(found[1])


@pytest.mark.parametrize("name", ["x.zip", "x.tar", "x.tar.gz"])
def test_what_is_no_archive(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"this is no archive at all" * 100)
    with pytest.raises(DataError, match="cannot be read as a"):
        list(members(tmp_path / name, SkippedItems()))


def test_patterns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a/1.png", "a/b/2.jpg", "a/b/notes.txt", "a/[odd].png"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(b"x")
    written_zip(tmp_path / "a" / "x.zip", {"3.png": b"3"})

    def names(*sources: str) -> list[str]:
        return [str(each.path) for each in pictures_of([Path(source) for source in sources], SkippedItems())]

    assert names("a/**/*.jpg", "a/*.png") == ["a/b/2.jpg", "a/1.png", "a/[odd].png"]
    assert names("a/**") == ["a/1.png", "a/[odd].png", "a/b/2.jpg", "a/x.zip/3.png"]
    assert names("a/[odd].png") == ["a/[odd].png"]  # a file that is called so
    assert names("a/x.zip", "a") == ["a/x.zip/3.png", "a/1.png", "a/[odd].png", "a/b/2.jpg"]
    with pytest.raises(DataError, match="matches no image"):
        names("a/b/*.txt")


def test_all_sources_are_looked_at_first(tmp_path: Path) -> None:
    (tmp_path / "1.png").write_bytes(b"x")
    with raises(DataError, path="nowhere"):
        pictures_of([tmp_path / "1.png", tmp_path / "nowhere"], SkippedItems())


def test_paths_from_standard_input_are_asked_for_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "1.png").write_bytes(b"x")

    class Lines:
        asked = 0

        @property
        def buffer(self) -> Lines:
            return self

        def __iter__(self) -> Lines:
            return self

        def __next__(self) -> bytes:
            self.asked += 1
            return [f"{tmp_path}/1.png\n".encode(), b"\n", b"no such file.png\n"][self.asked % 3 - 1]

    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\n\n")))
    with pytest.raises(DataError, match=r"standard input \(-\) has no path; give"):
        pictures_of([Path("-")], SkippedItems())
    lines = Lines()
    monkeypatch.setattr("sys.stdin", lines)
    found = iter(pictures_of([Path("-")], SkippedItems()))
    assert read(next(found)) == b"x"
    assert lines.asked == 1  # of lines without end
    assert read(next(found)) == "no such file"
