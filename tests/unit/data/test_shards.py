"""Data sets in many files: every format by row, counted once, and what is damaged is named."""

from __future__ import annotations

import io
import json
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paceline
from paceline.data.shards import formats, index
from paceline.errors import DataError, RunDirectoryError, StorageError
from paceline.shards import Shards
from paceline.storage import file_cache

SAMPLES = [{"text": f"line {number} é", "label": number} for number in range(7)]


def write_lines(path: Path, samples: list[dict[str, Any]]) -> None:
    path.write_bytes(b"\n".join(json.dumps(each).encode() for each in samples) + b"\r\n\n")


def write_tar(path: Path, samples: list[dict[str, Any]]) -> None:
    with tarfile.open(path, "w") as archive:
        for number, sample in enumerate(samples):
            for ending, value in sample.items():
                content = str(value).encode()
                member = tarfile.TarInfo(f"in/{number:04}.{ending}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


def write_parquet(path: Path, samples: list[dict[str, Any]]) -> None:
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    pyarrow.parquet.write_table(arrow.Table.from_pylist(samples), path, row_group_size=2)


def write_mds(path: Path, samples: list[dict[str, Any]]) -> None:
    """As MosaicML's writer does: counts and offsets, then for each sample the free sizes and the bytes."""
    rows = []
    for sample in samples:
        text = sample["text"].encode()
        rows.append(np.uint32(len(text)).tobytes() + np.int64(sample["label"]).tobytes() + text)
    begin = 4 * (len(rows) + 2)
    offsets = np.cumsum([begin, *map(len, rows)]).astype("<u4")
    path.write_bytes(np.uint32(len(rows)).tobytes() + offsets.tobytes() + b"".join(rows))
    known = path.with_name("index.json")
    listed = json.loads(known.read_text())["shards"] if known.exists() else []
    shard = {
        "column_names": ["label", "text"],
        "column_encodings": ["int", "str"],
        "column_sizes": [8, None],
        "raw_data": {"basename": path.name},
    }
    known.write_text(json.dumps({"shards": [*listed, shard]}))


WRITERS: dict[str, Callable[[Path, list[dict[str, Any]]], None]] = {
    "jsonl": write_lines,
    "tar": write_tar,
    "parquet": write_parquet,
    "mds": write_mds,
}


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


pytestmark = pytest.mark.usefixtures("cache")


@pytest.mark.parametrize("ending", WRITERS)
def test_each_row_of_each_format(ending: str, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for number, part in enumerate((SAMPLES[:3], SAMPLES[3:4], SAMPLES[4:])):
        WRITERS[ending](folder / f"{number}.{ending}", part)
    shards = pickle.loads(pickle.dumps(Shards(folder, window=1)))
    read = [shards[number] for number in (6, 0, 3, -1, 5, 1, 2, 4)]
    wanted: list[Any] = [SAMPLES[number] for number in (6, 0, 3, 6, 5, 1, 2, 4)]
    if ending == "tar":
        key = dict(zip(range(7), (0, 1, 2, 0, 0, 1, 2), strict=True))
        wanted = [
            {"__key__": f"in/{key[each['label']]:04}", **{name: str(value).encode() for name, value in each.items()}}
            for each in wanted
        ]
    assert read == wanted
    assert len(shards) == 7
    assert shards.shard_sizes.sizes.tolist() == [3, 1, 3]
    with pytest.raises(IndexError):
        shards[7]


def test_decode_pattern_list_and_other_files(tmp_path: Path) -> None:
    for name in ("a-0.jsonl", "a-1.jsonl", "b.jsonl"):
        write_lines(tmp_path / name, SAMPLES[:2])
    (tmp_path / "notes.txt").touch()
    assert len(Shards(str(tmp_path / "a-*.jsonl"))) == 4
    assert len(Shards([tmp_path / "b.jsonl"])) == len(Shards((tmp_path / "b.jsonl",))) == 2
    assert len(Shards(str(tmp_path.parent / "**" / tmp_path.name / "a-*.jsonl"))) == 4
    whole = Shards(tmp_path, decode=lambda sample: sample["label"], window=2)
    assert [whole[number] for number in range(6)] == [0, 1, 0, 1, 0, 1]
    assert whole.left_out == ("files that are not shards: 1 left out ('notes.txt')",)
    assert repr(whole) == "Shards(3 files, 6 samples, mixed within windows of 2 files (66.7% of an epoch))"


def test_counts_are_kept_until_a_file_changes_also_after_a_torn_line(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / f"{number}.jsonl" for number in range(3)]
    for path in paths:
        write_lines(path, SAMPLES[:2])
    assert len(Shards(tmp_path)) == 6
    opened: list[str] = []
    monkeypatch.setattr(index, "open_shard", lambda _, name: opened.append(name) or SAMPLES)
    assert len(Shards(tmp_path)) == 6
    assert opened == []
    (memory,) = cache.rglob("shards-*.jsonl")
    whole = memory.read_bytes()
    memory.write_bytes(whole[: whole.rindex(b"[", 0, -1) + 9])  # killed while the last count was written
    write_lines(paths[0], SAMPLES[:3])
    Shards(tmp_path)
    assert "0.jsonl" in opened
    assert len(opened) == 2
    opened.clear()
    write_lines(tmp_path / "more.jsonl", SAMPLES[:1])
    memory.write_bytes(memory.read_bytes() + b"\xff\n")
    Shards(tmp_path)
    assert opened == ["more.jsonl"]


@pytest.mark.parametrize(
    ("ending", "content", "said"),
    [
        ("tar", b"", "it is empty"),
        ("tar", b"\x1f\x8b" + b"0" * 600, "is compressed with gzip"),
        ("tar", b"x" * 2000, "cannot be read as a .tar"),
        ("jsonl", b"", "cannot be read"),
        ("jsonl", b"\x1f\x8b" + b"\n" * 60, "is compressed, or an archive"),
        ("jsonl", b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer"),
        ("mds", b"\xff" * 40, "is damaged \\(it claims 4,294,967,295 samples\\)"),
        ("mds", b"\x01", "cannot be read"),
        ("parquet", b"PAR1", "cannot be read"),
    ],
)
def test_damaged_shards_are_named_or_left_out(ending: str, content: bytes, said: str, tmp_path: Path) -> None:
    if ending == "parquet":
        pytest.importorskip("pyarrow")
    WRITERS[ending](tmp_path / f"good.{ending}", SAMPLES)
    WRITERS[ending](tmp_path / f"bad.{ending}", SAMPLES[:1])
    (tmp_path / f"bad.{ending}").write_bytes(content)
    with pytest.raises(DataError, match=said) as failed:
        Shards(tmp_path)
    assert f"bad.{ending}" in str(failed.value)
    rest = Shards(tmp_path, skip_damaged=True)
    assert len(rest) == 7
    assert f"bad.{ending}" in rest.left_out[0]


def test_a_damaged_line_and_a_changed_file_are_named_when_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n\n{"a": \n{"a": 3}')
    shards = Shards(tmp_path)
    assert [shards[0], shards[2]] == [{"a": 1}, {"a": 3}]
    with pytest.raises(DataError, match=r"a.jsonl' cannot be read in line 3"):
        shards[1]
    shards = Shards(tmp_path)
    path.write_text('{"a": 1}')
    with pytest.raises(DataError, match="has changed since the data set was opened"):
        shards[0]


@pytest.mark.parametrize("given", ["nowhere", "empty", []])
def test_no_shards_are_an_error(given: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"has no files that end in \.jsonl"):
        Shards(given if given == [] else tmp_path / given)


def test_columns_that_need_code_to_read_are_refused(tmp_path: Path) -> None:
    write_mds(tmp_path / "a.mds", SAMPLES)
    known = json.loads((tmp_path / "index.json").read_text())
    known["shards"][0]["column_encodings"][1] = "pkl"
    (tmp_path / "index.json").write_text(json.dumps(known))
    with pytest.raises(DataError, match="column 'text' of kind 'pkl'; write it as one of bytes"):
        Shards(tmp_path)


def test_the_index_of_a_folder_of_mds_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        write_mds(tmp_path / f"{number}.mds", SAMPLES[:2])
    reads: list[bytes] = []
    monkeypatch.setattr(formats, "load_json", lambda text: reads.append(text) or json.loads(text))
    monkeypatch.setattr(index, "_THREADS", 1)
    assert len(Shards(tmp_path)) == 10
    assert len(reads) == 1


def test_a_window_that_is_none_is_refused_before_anything_is_counted(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="window is 0; give a whole number from 1"):
        Shards(tmp_path / "nowhere", window=0)


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of a folder."""
    pytest.importorskip("fsspec")
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "copies"))
    (tmp_path / "stored").mkdir()
    return f"file://{tmp_path / 'stored'}"


def test_using_a_copy_of_a_tar_does_not_index_it_again(stored: str, tmp_path: Path, cache: Path) -> None:
    write_tar(tmp_path / "stored" / "a.tar", SAMPLES)
    for _ in range(3):
        assert Shards(stored)[6]["text"] == b"line 6 \xc3\xa9"
    assert len([*cache.rglob("tar-*.npz")]) == 1


def test_the_address_of_a_single_file_is_read_and_the_hub_refused(stored: str, tmp_path: Path) -> None:
    write_lines(tmp_path / "stored" / "a.jsonl", SAMPLES)
    assert Shards(f"{stored}/a.jsonl").names == ["a.jsonl"]
    with pytest.raises(StorageError, match="hf://datasets/a/b cannot be read file by file"):
        Shards("hf://datasets/a/b")


def test_a_copy_that_another_process_deletes_is_fetched_again(
    stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lines(tmp_path / "stored" / "a.jsonl", SAMPLES)
    shards, touch, deleted = Shards(stored), file_cache.os.utime, list[Path]()

    def delete_first(path: Path) -> None:
        if not deleted:
            deleted.append(path)
            path.unlink()
        touch(path)

    monkeypatch.setattr(file_cache.os, "utime", delete_first)
    assert shards[0] == SAMPLES[0]
    assert len(deleted) == 1


def test_a_file_that_never_fits_deletes_no_copies(stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE_GB", "1e-6")
    write_lines(tmp_path / "stored" / "a.jsonl", SAMPLES[:1])
    Shards(stored)
    copies = [*(tmp_path / "copies" / "files").glob("*.jsonl")]
    write_lines(tmp_path / "stored" / "b.jsonl", SAMPLES * 20)
    with pytest.raises(StorageError, match=r"b\.jsonl takes .* raise PACELINE_CACHE_GB"):
        Shards(stored)
    assert [each.exists() for each in copies] == [True]


def test_a_run_says_how_its_shards_differ(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for number in range(3):
        write_lines(tmp_path / "data" / f"{number}.jsonl", SAMPLES)

    def train(window: int) -> None:
        lines = Shards(tmp_path / "data", decode=lambda line: line["label"], window=window)
        for _ in paceline.Loop(tmp_path / "run", lines, batch_size=21, epochs=2, overrides={"telemetry.trackers": []}):
            pass

    train(2)
    with pytest.raises(
        RunDirectoryError, match=r"shards 3 files, window 2, sizes .*here it is 3 files, window 1, sizes"
    ):
        train(1)
