"""Subsets, classes and splits are functions of names and labels, whatever the kind of data set, and last."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_sentences import raises
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from paceline.data.image.dataset import stratified_order
from paceline.data.image.datasets import ImageDataset, open_dataset
from paceline.data.image.mapped import ByteRanges, MappedBytes, MappedSource
from paceline.data.image.source import NameArray, SampleSource, hashed_names, sample_names
from paceline.errors import DataError, RecipeError
from paceline.recipe.data import Data
from paceline_data.packing.origins import open_origin

CLASSES = {"ant": 12, "bee": 30, "cow": 7}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, (name, count) in enumerate(CLASSES.items()):
        (tmp_path / "set" / name).mkdir(parents=True)
        for index in range(count):
            pixels = np.full((8, 8, 3), (number, index, 0), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "set" / name / f"{index:02}.png")
    return tmp_path / "set"


def add(folder: Path, name: str) -> None:
    Image.fromarray(np.full((8, 8, 3), 99, dtype=np.uint8)).save(folder / name)


def opened(folder: Path, **keys: Any) -> ImageDataset:
    return open_dataset(Data(dataset="image_folder", path=str(folder), **keys))


def names(source: SampleSource) -> set[str]:
    return {name.decode() for name in sample_names(source)}


def counts(source: SampleSource, classes: int) -> list[int]:
    found: list[int] = np.bincount(source.labels, minlength=classes).tolist()
    return found


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.data())
def test_any_first_part_holds_each_class_alike(labels: list[int], data: st.DataObject) -> None:
    array = np.array(labels)
    order = stratified_order(array, hashed_names([b"%d" % number for number in range(len(labels))], b"x"))
    assert sorted(order.tolist()) == list(range(len(labels)))
    present = len(set(labels))
    wanted = data.draw(st.integers(present, len(labels)))
    found = np.bincount(array[order[:wanted]], minlength=5)
    assert ((found > 0) == (np.bincount(array, minlength=5) > 0)).all()
    if wanted >= 2 * present:  # beyond the first of each, no class has more than its share by more than one
        exact = np.bincount(array, minlength=5) * wanted / len(labels)
        assert (found - exact < 2).all()


def test_subsets_are_nested_and_leave_the_held_out_alone(folder: Path) -> None:
    whole = opened(folder)
    digests, smaller = {whole.digest}, set[str]()
    for part, expected in ((3, 3), ("50%", 20), (30, 30)):
        found = opened(folder, subset=part)
        assert len(found.train) == expected
        assert all(counts(found.train, 3))
        assert smaller < names(found.train) < names(whole.train)
        assert names(found.validation) == names(whole.validation)
        assert found.selection == {"subset": expected}
        assert found.reasons["subset"] == f"{expected} of 40 training images, of each class alike, always the same"
        smaller = names(found.train)
        digests.add(found.digest)
    assert len(digests) == 4
    assert counts(opened(folder, subset="50%").train, 3) == [5, 12, 3]
    assert np.array_equal(opened(folder, subset=3).train.read(1)[0, 0, :1], [1])


def test_a_subset_hardly_changes_with_the_data(folder: Path) -> None:
    before = names(opened(folder, subset=20, validation_fraction=0).train)
    add(folder, "bee/055.png")
    assert len(before - names(opened(folder, subset=20, validation_fraction=0).train)) <= 1


def test_classes_are_taken_by_name_or_number(folder: Path) -> None:
    whole = opened(folder, holdout_fraction=0.2)
    for asked in (("cow", "ant"), (0, 2), ("ant", 2)):
        found = opened(folder, only_classes=asked, holdout_fraction=0.2)
        assert found.classes == ("ant", "cow")
        assert found.holdout is not None
        assert whole.holdout is not None
        for part, all_of_it in (
            (found.train, whole.train),
            (found.validation, whole.validation),
            (found.holdout, whole.holdout),
        ):
            assert names(part) == {name for name in names(all_of_it) if not name.startswith("bee")}
            assert all(
                part.path(sample).split("/")[-2] == found.classes[part.labels[sample]] for sample in range(len(part))
            )
    assert found.selection == {"only_classes": ["ant", "cow"]}
    assert found.reasons["only_classes"] == "2 of 3 classes: ant, cow"
    assert found.digest != whole.digest


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"subset": 2}, "data.subset=2 is 2 of 40 images, which leaves some of the 3 classes empty: take at least 3"),
        ({"subset": "1%"}, "data.subset=1% is 0 of 40 images"),
        ({"subset": 41}, "data.subset=41, but there are 40 images"),
        ({"only_classes": ("ant", "bea")}, "names 'bea', but the data has the 3 classes ant, bee, cow: .*'bee'"),
        ({"only_classes": (0, 3)}, "names 3, but the data has the 3 classes"),
        ({"only_classes": ("ant", 0)}, "names the class 'ant' twice"),
        ({"only_classes": ("ant",)}, "names one class, but a classifier needs at least two"),
        ({"only_classes": ()}, "names no class"),
        ({"holdout_fraction": 0.9, "only_classes": (0, 1), "subset": 30}, "data.subset=30, but there are"),
    ],
)
def test_what_leaves_nothing_is_refused(folder: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        opened(folder, **keys)


def test_classes_without_held_out_images_are_refused(folder: Path, tmp_path: Path) -> None:
    rows = [f"set/{name}/00.png,{name},train" for name in CLASSES] + ["set/bee/01.png,bee,val"]
    (tmp_path / "t.csv").write_text("\n".join(["path,label,split", *rows]))
    with raises(RecipeError, key="data.only_classes", value="['ant', 'cow']"):
        open_dataset(Data(dataset="csv", path=str(tmp_path / "t.csv"), only_classes=("ant", "cow")))


def test_the_digits_have_subsets_too() -> None:
    found = open_dataset(Data(dataset="digits", subset=50, only_classes=("3", 5), holdout_fraction=0.1))
    assert (len(found.train), found.classes, counts(found.train, 2)) == (50, ("3", "5"), [25, 25])
    assert found.digest != open_dataset(Data(dataset="digits")).digest


def insert_first(folder: Path) -> None:
    add(folder, "bee/-1.png")


def rename_a_class(folder: Path) -> None:
    for index in (3, 4, 5):
        (folder / "ant" / f"{index:02}.png").rename(folder / "ant" / f"zz{index}.png")


def add_a_class(folder: Path) -> None:
    (folder / "aaa").mkdir()
    for index in range(5):
        add(folder, f"aaa/{index}.png")


@pytest.mark.parametrize(("change", "moved"), [(insert_first, 1), (rename_a_class, 0), (add_a_class, 0)])
def test_a_split_by_name_moves_at_most_one_image(folder: Path, change: Callable[[Path], None], moved: int) -> None:
    before = opened(folder, split_by="name", holdout_fraction=0.2)
    assert counts(before.validation, 3) == [2, 6, 1]
    change(folder)
    after = opened(folder, split_by="name", holdout_fraction=0.2)
    old = names(before.train) | names(before.validation) | names(before.holdout or before.train)
    bees = {name for name in old if name.startswith("bee")}
    assert len((names(before.validation) ^ names(after.validation)) & bees) <= moved
    assert len((names(before.train) ^ names(after.train)) & bees) <= 2 * moved
    if change is not rename_a_class:
        ants = {name for name in old if name.startswith(("ant", "cow"))}
        assert names(before.validation) & ants == names(after.validation) & ants


def test_by_order_is_as_it_was(folder: Path) -> None:
    """Runs that began before there was a choice go on: same images, same digest."""
    assert sorted(names(opened(folder).validation)) == [
        *("ant/02.png", "ant/09.png", "bee/08.png", "bee/09.png"),
        *("bee/12.png", "bee/20.png", "bee/23.png", "bee/25.png", "cow/01.png"),
    ]
    by_name = opened(folder, split_by="name")
    assert by_name.digest != opened(folder).digest
    assert "drawn by the images' names (data.split_by)" in by_name.reasons["validation"]


def test_a_split_file_keeps_every_image_where_it_is(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "kept" / "photos.split"
    with pytest.raises(DataError, match=r"there is no folder '.*kept' for the split file .*: create it, or correct"):
        opened(folder, saved_split=str(file))
    file.parent.mkdir()
    before = opened(folder, saved_split=str(file))
    assert "keeps it from now on, written now: " in before.reasons["validation"]
    (tmp_path / "plain").write_text("")
    assert file.stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert names(before.validation) == names(opened(folder).validation)
    content = file.read_bytes()
    assert opened(folder, saved_split=str(file)).digest == before.digest
    insert_first(folder)
    add_a_class(folder)
    (folder / "cow" / "06.png").unlink()
    after = opened(folder, saved_split=str(file))
    assert file.read_bytes() == content
    assert names(before.validation) - {"cow/06.png"} <= names(after.validation)
    assert not names(before.train) & names(after.validation)
    told = after.reasons["validation"]
    assert "photos.split' keeps it: " in told
    assert "6 that it does not list are placed by their names; 1 that it lists are gone" in told
    assert after.selection["split_file_sha256"] == before.selection["split_file_sha256"]


@pytest.mark.parametrize(("gone", "side"), [("validation", "held-out"), ("train", "training")])
def test_a_split_whose_one_side_has_gone_is_refused(folder: Path, tmp_path: Path, gone: str, side: str) -> None:
    file = tmp_path / "a.split"
    for name in names(getattr(opened(folder, saved_split=str(file)), gone)):
        (folder / name).unlink()
    with pytest.raises(DataError, match=rf"is a {side} one in the split file .*: restore the images, or"):
        opened(folder, saved_split=str(file))


def test_split_files_that_do_not_fit_are_refused(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.split"
    opened(folder, saved_split=str(file))
    with pytest.raises(RecipeError, match=r"validation_fraction=0.5, but the split file .* was written with 0.2"):
        opened(folder, saved_split=str(file), validation_fraction=0.5)
    with pytest.raises(DataError, match=r"lists none of the 1,797 images, such as 'digits\[0\]'"):
        open_dataset(Data(dataset="digits", saved_split=str(file)))
    file.write_bytes(file.read_bytes().replace(b"validation\tant", b"train\tant", 1))
    with pytest.raises(DataError, match="has been changed since it was written"):
        opened(folder, saved_split=str(file))
    file.write_text("train\tx\n")
    with raises(DataError, path="a.split"):
        opened(folder, saved_split=str(file))
    for place in ("/proc/self/a.split", str(tmp_path / ("x" * 300))):
        with pytest.raises(DataError, match="cannot be written"):
            opened(folder, saved_split=place)


def test_a_split_file_that_cannot_be_finished_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    before, limits = sorted(tmp_path.iterdir()), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(DataError, match="cannot be written"):
            opened(folder, saved_split=str(tmp_path / "a.split"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(tmp_path.iterdir()) == before


def test_names_of_any_bytes_survive_a_split_file(folder: Path, tmp_path: Path) -> None:
    for name in ("new\nline.png", "back\\slash\\n.png", "tab\t.png"):
        add(folder, f"ant/{name}")
    file = tmp_path / "odd.split"
    before = opened(folder, saved_split=str(file))
    after = opened(folder, saved_split=str(file))
    assert names(before.validation) == names(after.validation)
    assert "does not know" not in after.reasons["validation"]


def test_what_has_a_split_of_its_own_has_no_other(folder: Path) -> None:
    (folder.parent / "own").mkdir()
    folder.rename(folder.parent / "own" / "train")
    for name in CLASSES:
        (folder.parent / "own" / "val" / name).mkdir(parents=True)
        add(folder.parent / "own" / "val" / name, "x.png")
    found = opened(folder.parent / "own", split_by="name")
    assert found.reasons["split_by"] == found.reasons["saved_split"] == "the data has its own split, the folder val/"
    assert len(found.validation) == 3


def test_names_that_are_shared_are_told_apart(folder: Path) -> None:
    class Same:
        labels = np.zeros(3, dtype=np.int64)

        def __len__(self) -> int:
            return 3

        def read(self, sample: int) -> Any:
            raise NotImplementedError

        def path(self, sample: int) -> str:
            return "same"

    assert sample_names(Same()) == [b"same", b"same#2", b"same#3"]


def test_names_within_files_do_not_depend_on_the_locale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsdecode", lambda name: name.decode("latin-1"))
    zero = np.zeros(1, dtype=np.int64)
    content = MappedBytes([], ByteRanges(file=zero, begin=zero, length=zero))
    assert sample_names(MappedSource(content, zero, 3, NameArray.of(["é.jpg"]))) == ["é.jpg".encode()]


def test_a_part_of_a_source_is_packed_with_its_names(folder: Path) -> None:
    whole = open_origin(str(folder))
    part = open_origin(str(folder), None, Data(only_classes=("bee", "cow"), subset=10))
    source = part.splits["train"]
    assert (part.classes, part.total, counts(source, 2)) == (("bee", "cow"), 10, [8, 2])
    assert part.origin.digest != whole.origin.digest
    for sample in range(10):
        name = part.name(source, sample)
        assert source.path(sample).endswith(name)
        assert name.split("/")[0] == part.classes[source.labels[sample]]
    with pytest.raises(RecipeError, match="--subset=2 is 2 of 49 images"):
        open_origin(str(folder), None, Data(subset=2))
    with pytest.raises(RecipeError, match="--only-classes names 'be'"):
        open_origin(str(folder), None, Data(only_classes=("be", "cow")))
