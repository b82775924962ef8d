"""Whatever is planted in a folder of images is found by its name, and in a clean folder nothing is."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw

from paceline.data.image.dataset import ImageDataset
from paceline.data.image.decode import NEEDS_HEIF
from paceline.data.image.sets import image_folder
from paceline.data.image.source import EXTENSIONS, ArraySource
from paceline.errors import DataError, RecipeError
from paceline.plugins import dataset_registry
from paceline.recipe.schema import Recipe
from paceline_data.inspect.check import DataReport, check_data
from paceline_data.inspect.look import KINDS, is_truncated


def check(source: Path | str, *overrides: str, workers: int = 2, limit: int | None = None) -> DataReport:
    return check_data(str(source), overrides, workers=workers, limit=limit)


def named(report: DataReport) -> dict[str, set[str]]:
    return {finding.kind.name: {entry.name for entry in finding.entries} for finding in report.findings}


def snapshot(root: Path) -> dict[str, tuple[Any, ...]]:
    found = {}
    for path in sorted(root.rglob("*")):
        about = path.lstat()
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        found[str(path)] = (about.st_mode, about.st_size, about.st_mtime_ns, about.st_ctime_ns, content)
    return found


def test_nothing_is_found_in_a_clean_folder(clean: Path) -> None:
    path = sorted((clean / "train" / "cat").iterdir())[0]
    image = Image.new("RGB", (200, 200), (90, 140, 180))  # a plain background
    image.paste(Image.open(path).resize((60, 60)), (70, 20))
    image.save(path)
    report = check(clean)
    assert report.findings == ()
    assert report.passed
    assert report.splits == {
        "train": {"samples": 24, "checked": 24, "broken": 0},
        "validation": {"samples": 6, "checked": 6, "broken": 0},
    }


@pytest.fixture(autouse=True)
def without_heic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_folder, "EXTENSIONS", tuple(each for each in EXTENSIONS if each != "heic"))


@pytest.mark.skipif(find_spec("pillow_heif") is not None, reason="with pillow_heif, a HEIC file is opened")
def test_every_planted_defect_is_found_by_its_name(bad: tuple[Path, dict[str, set[str]]]) -> None:
    root, planted = bad
    before = snapshot(root)
    report = check(root)
    found = named(report)
    assert {kind: found.get(kind) for kind in planted} == planted
    (sentence,) = found["layout"]
    assert "val' lacks the classes 'eel'" in sentence
    for kind, *names in (
        ("other_file", "train/cat/notes.txt"),
        ("heic_image", "train/cat/phone.heic"),
        ("special_file", "train/cat/pipe.jpg"),
        ("nested_folder", "train/cat/more"),
        ("empty_folder", "train/gnu", "val/gnu"),
        ("unread_folder", "extra"),
    ):
        assert found[kind] == {str(root / name) for name in names}
    assert found["unread"] == {str(root / "README.md")}
    assert found["small_class"] == {"eel", "fox"}  # gnu is empty, and no class
    assert found["no_held_out"] == {"eel"}
    assert found["imbalance"] == {"dog", "eel"}
    never = {"not_permitted", "unreadable", "reader_died", "colour_among_grey", "alike_names", "listed_names"}
    never |= {"implausible", "unlabelled"}
    assert set(KINDS) - set(found) == never
    assert not report.passed
    assert snapshot(root) == before


def test_what_a_copy_is_a_copy_of_is_said(bad: tuple[Path, dict[str, set[str]]]) -> None:
    root, planted = bad
    report = check(root)
    of = {entry.name: entry.other for finding in report.findings for entry in finding.entries if entry.other}
    assert of[str(root / "val/cat/seen.jpg")] == str(root / "train/cat/03.jpg")
    assert of[str(root / "test/dog/seen.jpg")] == str(root / "train/dog/04.jpg")
    assert of[str(root / "val/dog/small.jpg")] == str(root / "train/dog/01.jpg")
    assert of[str(root / "train/dog/copy.jpg")] == str(root / "train/dog/00.jpg")
    assert of[str(root / "train/fox/dog.jpg")] == str(root / "train/dog/02.jpg")
    (link,) = planted["broken_link"]
    details = {entry.name: entry.detail for finding in report.findings for entry in finding.entries}
    assert details[link] == "to nowhere.jpg"
    assert details[str(root / "train/cat/pointer.jpg")].startswith("a Git LFS pointer")
    assert details[str(root / "train/cat/phone.jpg")] in (NEEDS_HEIF, "a heic file (HEIC, AVIF or a video)")
    assert details[str(root / "train/dog/other.jpg")] == "PNG content"


def test_a_run_breaks_on_exactly_what_is_called_broken(
    clean: Path,
    plant_broken: Callable[[], dict[str, set[str]]],
    train_tiny: Callable[..., Any],
    events: Callable[..., Any],
) -> None:
    import paceline

    planted = set().union(*plant_broken().values())
    report = check(clean)
    called = {entry.name for each in report.findings if each.kind.severity == "breaks" for entry in each.entries}
    assert called == planted
    broken = sum(split["broken"] for split in report.splits.values())
    overrides = {
        "data.dataset": "image_folder",
        "data.path": str(clean),
        "data.image_size": 16,
        "data.workers": 0,
        "data.max_broken": broken,
        "train.duration": "2 epochs",
        "evaluate.every": "1 epochs",
    }
    result = train_tiny("run", overrides, task=paceline.ImageClassification)
    assert {event["path"] for event in events(result.run_dir, "incident")} == called
    with pytest.raises(DataError, match=r"could not be read"):
        train_tiny("less", {**overrides, "data.max_broken": broken - 1}, task=paceline.ImageClassification)


def test_a_folder_without_splits_is_split_as_a_run_splits_it(clean: Path) -> None:
    """A copy within a folder leaks where one of the two is held out."""
    folder = clean / "train"
    originals = sorted((folder / "cat").iterdir())
    for number, original in enumerate(originals):
        (folder / "cat" / f"copy{number:02}.jpg").write_bytes(original.read_bytes())
    report = check(folder, "data.validation_fraction=0.25")
    assert report.splits["validation"]["samples"] == 9
    counts = {finding.kind.name: finding.count for finding in report.findings}
    assert counts["leak"] + counts["duplicate"] == len(originals)
    assert counts["leak"] > 0


def test_a_recipe_s_own_data_are_checked(clean: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"data: {{dataset: image_folder, path: {clean}, image_size: 400, holdout_fraction: 0.25}}\n")
    report = check(recipe)
    assert {name: split["samples"] for name, split in report.splits.items()} == {
        "train": 18,
        "validation": 6,
        "holdout": 6,
    }
    assert {finding.kind.name: finding.count for finding in report.findings} == {"tiny": 30, "small_class": 2}


@pytest.mark.parametrize(
    ("task", "columns", "learned", "samples"),
    [
        ("image_multilabel", "", "labels", {"cat": 3, "dog": 2}),
        ("image_multilabel", "target_columns: [age, one], ", "labels", {"age": 2, "one": 4}),
        ("image_regression", "target_columns: [age], ", "numbers", {}),
    ],
)
def test_images_of_several_labels_or_numbers_are_checked(
    tmp_path: Path, task: str, columns: str, learned: str, samples: dict[str, int]
) -> None:
    draws = np.random.default_rng(0)
    for number in range(4):
        Image.fromarray(draws.integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(tmp_path / f"{number}.png")
    rows = ["path,label,age,one", "0.png,cat;dog,0,1", "1.png,cat,1,1", "2.png,cat;dog,0,1", "3.png,,1,1"]
    (tmp_path / "t.csv").write_text("\n".join([*rows, ""]))
    (tmp_path / "r.yaml").write_text(
        f"task: {task}\ntrain: {{label_smoothing: 0}}\n"
        f"data: {{dataset: csv, path: {tmp_path}/t.csv, {columns}validation_fraction: 0}}\n"
    )
    report = check(tmp_path / "r.yaml")
    assert (report.learned, report.classes["count"]) == (learned, max(1, len(samples)))
    assert {name: each["train"] for name, each in report.classes["samples"].items()} == samples
    assert report.splits["train"] == {"samples": 4, "checked": 4, "broken": 0}


def test_data_in_memory_are_checked() -> None:
    report = check("digits")
    assert (report.dataset, report.splits["train"]["samples"], report.cost) == ("digits", 1438, {})
    assert report.passed
    mean, used = report.pixels["mean"], report.pixels["run_mean"]
    assert mean == pytest.approx(used, abs=0.01)


def test_an_archive_is_checked(tmp_path: Path) -> None:
    """Copies in CIFAR-10's test images, as they are in the one that is published."""
    pixels = np.random.default_rng(0).integers(0, 256, (6, 20, 3072), dtype=np.uint8)
    pixels[5, 3] = pixels[2, 7]
    for number, batch in enumerate(pixels):
        name = f"data_batch_{number + 1}.bin" if number < 5 else "test_batch.bin"
        labels = (np.arange(20, dtype=np.uint8) % 10)[:, None]
        (tmp_path / name).write_bytes(np.concatenate([labels, batch], axis=1).tobytes())
    report = check(tmp_path)
    assert {finding.kind.name: finding.count for finding in report.findings} == {"leak": 1, "contradiction": 1}
    (entry,) = report.findings[0].entries
    assert (entry.name, entry.other) == ("cifar10 test[3]", "cifar10 train[47]")
    assert report.cost == {}


@pytest.mark.parametrize(
    ("source", "overrides", "error", "said"),
    [
        ("digits", ("optimizer.lr=1",), RecipeError, "override 'optimizer.lr' has no effect"),
        ("digits", ("data.augment.flip=0.5",), RecipeError, "override 'data.augment.flip' has no effect"),
        (__file__, (), DataError, "is not a folder or archive of images"),
        ("docs-topics", (), DataError, "`paceline train docs-topics --plan-only` reads the data and reports what"),
        ("image_folder", (), DataError, "needs data.path"),
        ("image_folder", ("data.path=nowhere",), DataError, "has no 'nowhere'"),
    ],
)
def test_what_cannot_be_checked_is_refused(
    source: str, overrides: tuple[str, ...], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=re.escape(said)):
        check(source, *overrides)


def test_a_task_of_one_s_own_whose_data_are_no_images_is_told(tmp_path: Path) -> None:
    recipe = tmp_path / "own.yaml"
    recipe.write_text("task: mine:Boxes\ndata: {dataset: shapes}\n")
    with pytest.raises(DataError, match=r"task=mine:Boxes may read its data itself.*data.dataset=shapes"):
        check(recipe)


def test_a_data_set_of_another_kind_says_what_its_pictures_are(tmp_path: Path) -> None:
    tiles = np.random.default_rng(0).integers(0, 256, (8, 40, 40, 3), dtype=np.uint8)
    tiles[7] = tiles[0]
    labels = np.eye(2, dtype=np.float32)[np.arange(8) % 2]
    about: dict[str, Any] = {"channels": 3, "image_size": 40, "mean": (0.5,) * 3, "std": (0.5,) * 3}

    def pictures(recipe: Recipe) -> tuple[ImageDataset, tuple[str, ...]]:
        train, validation = (ArraySource(tiles[part], labels[part], "tile") for part in (slice(6), slice(6, 8)))
        dataset = ImageDataset(
            name=recipe.data.dataset, train=train, validation=validation, classes=("nose", "tail"), **about
        )
        return dataset, ("3 of 9 points are beyond their picture",)

    recipe = tmp_path / "own.yaml"
    recipe.write_text("task: mine:Keypoints\ndata: {dataset: points}\n")
    register = dataset_registry.dataset("points", kind="keypoints", pictures=pictures)
    try:
        register(lambda data: None)
        found = check(recipe)
    finally:
        del dataset_registry._entries["points", "keypoints"]
    named = {each.kind.name: {entry.name for entry in each.entries} for each in found.findings}
    assert named["implausible"] == {"3 of 9 points are beyond their picture"}
    assert "leak" in named
    assert found.splits["train"]["samples"] == 6


def test_a_limit_looks_at_a_spread_of_images(clean: Path) -> None:
    report = check(clean, limit=10)
    assert {name: split["checked"] for name, split in report.splits.items()} == {"train": 8, "validation": 2}


def test_the_number_of_processes_changes_nothing(bad: tuple[Path, dict[str, set[str]]]) -> None:
    one, three = check(bad[0], workers=1), check(bad[0], workers=3)
    assert one.findings == three.findings
    assert (one.classes, one.sizes, one.pixels) == (three.classes, three.sizes, three.pixels)


OWN = """
import os, signal
import numpy as np
from paceline.data.image.datasets import ImageDataset


class Source:
    labels = np.arange(200) % 2

    def __len__(self):
        return 200

    def path(self, sample):
        return f"own[{sample}]"

    def read(self, sample):
        if sample in (37, 70, 71):
            os.kill(os.getpid(), signal.SIGKILL)
        if sample == 99:
            raise RuntimeError("no such picture")
        return np.random.default_rng(sample).integers(0, 256, (40, 40, 3), dtype=np.uint8)


def own(data):
    return ImageDataset(
        name="own", train=Source(), validation=Source(), classes=("a", "b"), channels=3, image_size=40,
        mean=(0.5,) * 3, std=(0.5,) * 3,
    )
"""


def test_an_image_that_ends_its_reader_is_found_and_the_others_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_images.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    report = check("image_folder", "data.dataset=own_images:own")
    found = named(report)
    assert found["reader_died"] == {"own[37]", "own[70]", "own[71]"}
    assert found["unreadable"] == {"own[99]"}
    assert report.splits["train"]["broken"] == 4
    # The two splits are the same images.
    (leak,) = [finding for finding in report.findings if finding.kind.name == "leak"]
    assert leak.count == 196


def test_grey_images_seen_in_grey(tmp_path: Path) -> None:
    for label in ("cat", "dog"):
        (tmp_path / label).mkdir()
        for number in range(14):
            draws = np.random.default_rng([number, len(os.listdir(tmp_path))])
            pixels = draws.integers(0, 256, (64, 64), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / label / f"{number:02}.png")
    assert check(tmp_path).findings == ()
    Image.new("RGB", (64, 64), "red").save(tmp_path / "cat" / "red.png")
    found = named(check(tmp_path, "data.channels=1"))
    assert found == {"colour_among_grey": {str(tmp_path / "cat" / "red.png")}}


def test_names_that_are_no_text_are_reported(clean: Path) -> None:
    name = os.fsencode(clean / "train" / "cat") + b"/\xff[bold]\n.jpg"
    with open(name, "wb"):
        pass
    (finding,) = check(clean).findings
    assert finding.kind.name == "empty_file"
    assert os.fsencode(finding.entries[0].name) == name


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become someone who may not read a file")
def test_a_file_that_may_not_be_read(clean: Path) -> None:
    closed = clean / "train" / "cat" / "00.jpg"
    closed.chmod(0)
    for folder in (clean, *clean.parents):
        if os.access(folder, os.W_OK) and str(folder).startswith(("/tmp/", "/dev/shm/", str(clean))):
            folder.chmod(0o755)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setuid(65534)
            code = 0 if named(check(clean)) == {"not_permitted": {str(closed)}} else 3
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_what_lies_behind_the_end_of_a_jpeg_is_no_defect(clean: Path) -> None:
    """Phones put films and depth maps there; and EXIF data may hold a small JPEG with an end of its own."""
    for number in range(3):
        path = clean / "train" / "cat" / f"{number:02}.jpg"
        path.write_bytes(path.read_bytes() + b"a film \xff\xda of \xff\xd8 bytes")
    assert check(clean).findings == ()
    whole = (clean / "train" / "cat" / "05.jpg").read_bytes()
    with_thumbnail = b"\xff\xd8\xff\xe1\x00\x0aExif\xff\xd9\x00\x00" + whole[2:]
    assert not is_truncated(with_thumbnail)
    assert is_truncated(with_thumbnail[:-2] + bytes(100))


@pytest.mark.parametrize("colour", [(0, 0, 0), (255, 255, 255), (250, 252, 249)])
def test_a_margin_is_no_defect(clean: Path, colour: tuple[int, int, int]) -> None:
    path = clean / "train" / "cat" / "00.jpg"
    with Image.open(path) as image:
        image.paste(colour, (0, 60, *image.size))
        image.save(path.with_name("margin.png"))
    assert check(clean).findings == ()


def test_pictures_of_one_colour_are_no_copies_of_one_another(clean: Path) -> None:
    """They all look the same; only the same file counts."""
    for split, shade in (("train", 100), ("val", 101)):
        Image.new("RGB", (96, 80), (shade, 30, 60)).save(clean / split / "cat" / "flat.png")
    assert check(clean).findings == ()


def test_pictures_on_one_backdrop_are_no_leaks_but_their_copies_are(clean: Path) -> None:
    """Every picture has the same wide vignette; one held-out picture is a smaller copy."""
    down, right = np.mgrid[:80, :96]
    outside = np.clip(np.hypot(right / 96 - 0.5, down / 80 - 0.5) * 4 - 0.3, 0, 1)[..., None]
    for path in sorted(clean.rglob("*.jpg")):
        shown = np.asarray(Image.open(path), dtype=np.float64) * (1 - outside) + 250 * outside
        Image.fromarray(shown.astype(np.uint8)).save(path, quality=90)
    copy = clean / "val" / "cat" / "02.jpg"
    Image.open(clean / "train" / "dog" / "07.jpg").resize((72, 60)).save(copy, quality=60)
    (finding,) = check(clean).findings
    assert finding.kind.name == "near_leak"
    assert [(each.name, each.other) for each in finding.entries] == [(str(copy), str(clean / "train/dog/07.jpg"))]


def framed(shown: Image.Image) -> Image.Image:
    """The picture in a wide frame of coloured squares."""
    frame = np.random.default_rng(0).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    page = Image.fromarray(frame).resize((96, 80), Image.Resampling.NEAREST)
    page.paste(shown.resize((48, 40)), (24, 20))
    return page


def on_plain_page(shown: Image.Image) -> Image.Image:
    """The picture, small on a plain page."""
    page = Image.new("RGB", (96, 80), (240, 240, 240))
    page.paste(shown.resize((30, 24)), (33, 28))
    return page


def marked(shown: Image.Image) -> Image.Image:
    """The picture under a logo."""
    shown = shown.copy()
    shown.paste((20, 20, 160), (50, 60, 96, 80))
    return shown


def screen(shown: Image.Image) -> Image.Image:
    """A window with a menu, and lines of text that the picture determines."""
    page = Image.new("RGB", (320, 240), "white")
    draw = ImageDraw.Draw(page)
    draw.rectangle((0, 0, 320, 24), fill=(40, 60, 120))
    draw.rectangle((0, 24, 70, 240), fill=(225, 225, 230))
    letters = np.random.default_rng(np.asarray(shown).reshape(-1)[:500]).choice(list("aeioumnrst   "), (12, 34))
    for line in range(12):
        draw.text((6, 32 + 16 * line), f"Item {line}", fill="black")
        draw.text((80, 32 + 16 * line), "".join(letters[line]), fill="black")
    return page


@pytest.mark.parametrize("change", [framed, on_plain_page, marked, screen])
def test_a_shared_frame_or_layout_is_no_leak_but_small_copies_are(
    clean: Path, change: Callable[[Image.Image], Image.Image]
) -> None:
    for path in sorted(clean.rglob("*.jpg")):
        change(Image.open(path)).save(path, quality=92)
    assert "near_leak" not in named(check(clean))
    copies = {
        clean / "val" / path.parent.name / f"again-{path.name}": path for path in (clean / "train").rglob("*.jpg")
    }
    for copy, path in copies.items():
        with Image.open(path) as image:
            image.resize((40 * image.width // image.height, 40)).save(copy, quality=80)
    (finding,) = (each for each in check(clean).findings if each.kind.name == "near_leak")
    assert {Path(each.name): Path(each.other or "") for each in finding.entries} == copies
