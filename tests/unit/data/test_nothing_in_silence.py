"""Of every source, what is used and what is reported as left out is what is there, whatever the names and links."""

from __future__ import annotations

import io
import os
import random
import re
import tarfile
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from image_sets import opened_set

from paceline.data.image.dataset import Problems
from paceline.parsing.files import SkippedItems
from paceline.prediction.sources import members, pictures_of
from paceline.recipe.data import Data
from paceline_text.sets.documents import open_text

STEMS = ("a", "b", "7.5_cm", "v1.2.3", "UPPER", "a b", "ünï", os.fsdecode(b"caf\xe9"))
OTHERS = ("avif", "md", "mp4", "txt.gz", "d")
SYSTEM = ("Thumbs.db", "desktop.ini", ".DS_Store", "DESKTOP.INI")
FOLDERS = ("", "sub", "sub.d", "sub/deep", "x.png")
IGNORED_FOLDERS = (".ipynb_checkpoints", "__MACOSX", "sub/.hidden")


@dataclass
class Tree:
    """Names of files, as sources are to see them."""

    used: set[str]
    others: set[str]
    ignored: set[str]

    @property
    def names(self) -> list[str]:
        return sorted(self.used | self.others | self.ignored)


def drawn(seed: int, *endings: str) -> Tree:
    """Some names of each sort; those to be used have these endings, in either case."""
    draw = random.Random(seed)
    good = [*endings, *(ending.upper() for ending in endings)]

    def names(endings: Iterable[str], lead: str = "") -> set[str]:
        choices = list(endings)
        named = (f"{draw.choice(FOLDERS)}/{lead}{draw.choice(STEMS)}" for _ in range(draw.randrange(2, 9)))
        return {f"{name}.{draw.choice(choices)}".removeprefix("/") for name in named}

    hidden = names(good, ".") | names(good, "._") | {f"{draw.choice(FOLDERS)}/{name}".strip("/") for name in SYSTEM}
    hidden |= {f"{folder}/a.{good[0]}" for folder in IGNORED_FOLDERS}
    return Tree(names(good) | {f"first.{endings[0]}"}, names(OTHERS) | {"README"}, hidden)


def written(root: Path, tree: Tree, content: bytes = b"x") -> Path:
    for name in tree.names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    (root / "empty").mkdir()
    return root


def with_links(root: Path, tree: Tree, elsewhere: Tree) -> Tree:
    """The same with another tree linked into it, and three links that are not to be followed."""
    written(root.with_name("elsewhere"), elsewhere)
    (root / "linked").symlink_to(root.with_name("elsewhere"))
    (root / "circle").symlink_to(root)
    (root / "linked" / "back").symlink_to(root.parent)
    (root.with_name("elsewhere") / "inner").mkdir(exist_ok=True)
    (root / "a-part").symlink_to(root.with_name("elsewhere") / "inner")
    moved = Tree(*({f"linked/{name}" for name in names} for names in (elsewhere.used, elsewhere.others, set[str]())))
    return Tree(
        tree.used | moved.used, tree.others | moved.others | {"circle", "linked/back", "linked/inner"}, tree.ignored
    )


def count(told: Sequence[str]) -> int:
    """How much was reported."""
    counts = [number for each in told for number in re.findall(r": ([\d,]+) left out \(", each)]
    assert len(counts) == len(told)
    return sum(int(number.replace(",", "")) for number in counts)


def escaped(names: Iterable[str]) -> set[str]:
    return {name.encode("utf-8", "backslashreplace").decode() for name in names}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


seeds = pytest.mark.parametrize("seed", range(8))


@seeds
def test_text_folders(tmp_path: Path, seed: int) -> None:
    tree = drawn(seed, "txt")
    written(tmp_path / "texts", tree)
    tree = with_links(tmp_path / "texts", tree, drawn(seed + 100, "txt"))
    found = open_text(Data(dataset="text_folder", path=str(tmp_path / "texts"), validation_fraction=0.1))
    parts = (found.train, found.validation)
    assert {each.name(index) for each in parts for index in range(len(each.lengths))} == escaped(tree.used)
    assert count(found.left_out) == len(tree.others)


@seeds
def test_folders_to_predict(tmp_path: Path, seed: int) -> None:
    tree = drawn(seed, "png", "jpeg")
    written(tmp_path / "ask", tree)
    tree = with_links(tmp_path / "ask", tree, drawn(seed + 100, "tif"))
    left_out = SkippedItems()
    found = [each.path for each in pictures_of([tmp_path / "ask"], left_out)]
    assert {os.path.relpath(path, tmp_path / "ask") for path in found} == tree.used
    assert count(left_out.summaries()) == len(tree.others)


def tar(path: Path, names: Iterable[str], special: Iterable[str] = ()) -> Path:
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as archive:
        for name in names:
            entry = tarfile.TarInfo(name)
            entry.size = 1
            archive.addfile(entry, io.BytesIO(b"1" if name.lower().endswith("5.cls") else b"0"))
        for number, name in enumerate(special):
            entry = tarfile.TarInfo(name)
            entry.type = (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE)[number % 3]
            archive.addfile(entry)
    return path


@seeds
def test_archives_to_predict(tmp_path: Path, seed: int) -> None:
    tree, special = drawn(seed, "png", "webp"), ("link.png", "hard.txt", "pipe.png")
    left_out = SkippedItems()
    assert len(list(members(tar(tmp_path / "x.tar", tree.names, special), left_out))) == len(tree.used)
    assert count(left_out.summaries()) == len(tree.others) + len(special)
    left_out = SkippedItems()
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        for name in escaped(tree.names):
            archive.writestr(name, b"x")
    assert len(list(members(tmp_path / "x.zip", left_out))) == len(tree.used)
    assert count(left_out.summaries()) == len(tree.others)


@seeds
def test_samples_in_tars(tmp_path: Path, seed: int) -> None:
    tree = drawn(seed, "png")
    samples = [(f"s/{number}.PNG", f"s/{number}.cls") for number in range(12)]
    names = [name for pair in samples for name in pair]
    special = ("link.png", "hard.cls", "._hidden.png")
    # What a sample of these names lacks is a label; in ``d/`` its name ends at the dot.
    dotted = [f"d/{name.replace('/', '-')}.5_cm.png" for name in sorted(tree.used)]
    other = [f"o/{name}" for name in sorted(tree.others)]
    path = tar(tmp_path / "x.tar", [*names, *dotted, *other, *sorted(tree.ignored)], special)
    found = opened_set("webdataset", path, channels=3, validation_fraction=0)
    assert len(found.train) == len(samples)
    assert count(found.left_out) == len(dotted) + len(other) + 2
    (tmp_path / "tars" / ".hidden").mkdir(parents=True)
    for name in ("0.TAR", "linked.tar", ".hidden/9.tar", "._9.tar"):
        (tmp_path / "tars" / name).symlink_to(tmp_path / "x.tar")
    (tmp_path / "tars" / "x.tar.gz").touch()
    again = opened_set("webdataset", tmp_path / "tars", channels=3, validation_fraction=0)
    assert (len(again.train), count(again.left_out)) == (2 * len(samples), 2 * count(found.left_out) + 1)


@seeds
def test_tables(tmp_path: Path, seed: int) -> None:
    tree = drawn(seed, "parquet")
    buffer = io.BytesIO()
    pq.write_table(pa.table({"image": [b"x", b"y"], "label": [0, 1]}), buffer)
    written(tmp_path / "tables", tree, buffer.getvalue())
    found = opened_set("parquet", tmp_path / "tables", channels=3, validation_fraction=0)
    assert len(found.train) == 2 * len(tree.used)
    assert count(found.left_out) == len(tree.others)


@seeds
def test_image_folders(tmp_path: Path, seed: int) -> None:
    """What a run would refuse is told here in a sentence each."""
    tree, draw = drawn(seed, "png", "gif"), random.Random(seed)
    flat = Tree(
        *(
            {f"{draw.choice(('cat', 'dog'))}/{name.rpartition('/')[2]}" for name in sorted(names)}
            for names in (
                tree.used,
                tree.others,
                {name for name in tree.ignored if not name.startswith(IGNORED_FOLDERS)},
            )
        )
    )
    flat.ignored |= {f"{folder}/a.png" for folder in IGNORED_FOLDERS[:2]}
    written(tmp_path / "images", flat)
    (tmp_path / "images" / "linked").symlink_to(written(tmp_path / "elsewhere", Tree({"1.png"}, {"2.mp4"}, {".3.png"})))
    (tmp_path / "images" / "beside.txt").touch()
    problems = Problems()
    keys: Any = {"channels": 3, "validation_fraction": 0.5, "tries_files": False}
    found = opened_set("image_folder", tmp_path / "images", problems=problems, **keys)
    assert len(found.train) + len(found.validation) == len(flat.used) + 1
    assert sum(each.kind == "other_files" for each in problems.bad) == len(flat.others) + 1
    assert [each for each in problems.bad if each.path.endswith("/empty")]
    assert count(found.left_out) == 1


@seeds
def test_rows_of_tables_of_paths(tmp_path: Path, seed: int) -> None:
    tree, draw = drawn(seed, "png"), random.Random(seed)
    written(tmp_path / "images", Tree(tree.used, set(), set()))
    names = [name for name in tree.used if name == name.encode("utf-8", "replace").decode()]
    rows = [f"images/{name}" for name in names] + ["images/gone.png", "images", "images/empty", "", "http://a/b.png"]
    rows += [draw.choice(rows[: len(names)]) for _ in range(3)]
    lines = "".join(f'"{row}",{"cat" if number % 2 else "dog"}\n' for number, row in enumerate(rows))
    (tmp_path / "x.csv").write_text("image,label\n" + lines, encoding="utf-8-sig")
    problems = Problems()
    if len(names) < 2:
        pytest.skip("this seed draws fewer than two names in UTF-8, and so one class")
    found = opened_set(
        "csv", tmp_path / "x.csv", channels=3, validation_fraction=0, problems=problems, tries_files=False
    )
    assert len(found.train) == len(names)
    assert len(found.train) + problems.count == len(rows)
