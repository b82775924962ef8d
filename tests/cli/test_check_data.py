"""`paceline check-data` as a user calls it: a report or one document, and an exit code that says how it came out."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from calls import Call
from PIL import Image

from paceline_data.inspect.look import SEVERITIES

SOURCES = Path(__file__).parents[2] / "src"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two classes of fourteen pictures, in which nothing is wrong."""
    draws = np.random.default_rng(0)
    for label in ("cat", "dog"):
        (tmp_path / "photos" / label).mkdir(parents=True)
        for number in range(14):
            spots = draws.integers(0, 256, (8, 8, 3), dtype=np.uint8)
            image = Image.fromarray(spots).resize((80, 72), Image.Resampling.BICUBIC)
            image.save(tmp_path / "photos" / label / f"{number:02}.jpg", quality=90)
    return tmp_path / "photos"


def test_a_clean_folder_passes(paceline_here: Call, photos: Path) -> None:
    done = paceline_here("check-data", "photos")
    assert (done.code, done.err) == (0, "")
    first, *_, last, following = done.out.splitlines()
    assert first == "photos: image_folder, 2 classes, 22 train, 6 validation"
    assert last.startswith("passed: nothing found; ")
    assert "one core decodes" in done.out
    assert following == "Next: paceline train photos"
    assert "wrong ones are not looked for without a run: train, then `paceline check-data RUN`" in done.out
    for name in ("2024", "photos #2", "[red]: cats"):  # with a meaning in YAML
        photos = photos.rename(photos.with_name(name))
        assert paceline_here("check-data", name).ended(0).out.startswith(f"{name}: image_folder, 2 classes, 22 train")


def test_what_breaks_a_run_is_named_with_what_to_do(paceline_here: Call, photos: Path) -> None:
    cut = photos / "dog" / "03.jpg"
    cut.write_bytes(cut.read_bytes()[:-400])
    for number in range(7):
        (photos / "cat" / f"empty-[red]{number}\n.jpg").touch()
    done = paceline_here("check-data", "photos").ended(1)
    assert "breaks  1 truncated: it ends before its last pixel; copy or download it again, or remove it" in done.out
    assert "        dog/03.jpg (image file is truncated" in done.out
    assert "breaks  7 empty file: it has no content" in done.out
    assert "        cat/empty-[red]0\\n.jpg" in done.out
    assert "… and 2 more (--json names them)" in done.out
    assert "failed: 8 breaks; " in done.out


def rows(line: str) -> int:
    """Of a terminal of 80 columns."""
    return max(1, -(-len(line) // 80))


def test_what_is_wrong_and_the_verdict_are_on_the_last_screen(paceline_here: Call, photos: Path) -> None:
    for number in range(9):
        Image.new("RGB", (80, 72), (20 * number, 9, 9)).save(photos / "cat" / f"flat{number}.png")
        (photos / "cat" / f"empty{number}.jpg").touch()
        (photos / "dog" / f"words{number}.jpg").write_text("words")
        (photos / "dog" / f"film{number}.mp4").touch()
    (photos / "bird").mkdir()
    (photos / "cat" / "of-a-dog.jpg").write_bytes((photos / "dog" / "01.jpg").read_bytes())
    done = paceline_here("check-data", "photos", "data.image_size=1024").ended(1)
    lines = done.out.splitlines()
    first_bad = next(number for number, line in enumerate(lines) if line.startswith(("breaks", "spoils")))
    assert {line[:6] for line in lines[:first_bad]} >= {"notice"}
    assert sum(map(rows, lines[first_bad:])) < 24
    assert [line.split(":")[0] for line in lines[first_bad:] if line[:6] in ("breaks", "spoils")][-1][:6] == "breaks"
    assert lines[-2].startswith("failed: ")
    assert lines[-1] == "Next: paceline check-data photos data.image_size=1024 --quarantine photos-aside"
    assert any("more names are left out; --verbose shows more" in line for line in lines)
    whole = paceline_here("check-data", "photos", "data.image_size=1024", "--verbose").ended(1).out
    assert "slowest: " in whole
    assert "slowest: " not in done.out
    assert len(whole.splitlines()) > len(lines)


def test_an_empty_folder_is_not_a_class(paceline_here: Call, photos: Path) -> None:
    for number in range(1, 13):
        (photos / "dog" / f"{number:02}.jpg").unlink()
    for number in range(20):
        Image.new("RGB", (80, 72), (9 * number, 9, 200)).save(photos / "cat" / f"more{number}.png")
    (photos / "bird").mkdir()
    done = paceline_here("check-data", "photos", "data.validation_fraction=0").ended(1)
    assert done.out.startswith("photos: image_folder, 2 classes, ")
    assert "notice  1 small class" in done.out
    assert "        dog (2 images)" in done.out
    assert "bird (0 images)" not in done.out
    assert "        cat (34 images)" in done.out


@pytest.mark.parametrize(
    ("options", "following"),
    [
        ((), "check-data photos --quarantine photos-aside"),
        (("--quarantine", "aside"), "review photos"),
    ],
)
def test_what_comes_next_fits_what_was_found(
    options: tuple[str, ...], following: str, paceline_here: Call, photos: Path
) -> None:
    (photos / "cat" / "empty.jpg").touch()
    (photos / "dog" / "of-a-cat.jpg").write_bytes((photos / "cat" / "03.jpg").read_bytes())
    done = paceline_here("check-data", "photos", *options).ended(1)
    assert done.out.splitlines()[-1] == f"Next: paceline {following}"
    if options:
        assert "empty file: it has no content; moved away" in done.out
        assert "cat/empty.jpg" not in done.out


def test_what_only_costs_or_is_odd_passes(paceline_here: Call, photos: Path) -> None:
    original = photos / "cat" / "00.jpg"
    with Image.open(original) as image:
        image.save(photos / "cat" / "scans.jpg", progressive=True, quality=91)
    done = paceline_here("check-data", "photos", "data.validation_fraction=0").ended(0)
    assert "costs   1 progressive: " in done.out


def test_a_copy_in_the_other_split_fails(paceline_here: Call, photos: Path) -> None:
    for split in ("train", "val"):
        (photos.parent / "both" / split).mkdir(parents=True)
        for label in ("cat", "dog"):
            (photos.parent / "both" / split / label).symlink_to(photos / label)
    done = paceline_here("check-data", "both").ended(1)
    assert "spoils  28 leak: it is in another split too" in done.out
    assert "        val/cat/00.jpg (one file, by a link) = train/cat/00.jpg" in done.out


KEYS = {
    *("source", "dataset", "path", "passed", "found", "splits", "validation", "findings"),
    *("classes", "sizes", "pixels", "cost", "workers", "seconds"),
}


def test_the_document(paceline_here: Call, photos: Path) -> None:
    (photos / "cat" / "empty.jpg").touch()
    found = paceline_here("check-data", "photos", "--json", "--workers", "1", "--limit", "29").ended(1).document
    assert set(found) == KEYS
    assert (found["source"], found["dataset"], found["path"]) == ("photos", "image_folder", str(photos))
    assert found["passed"] is False
    assert found["found"] == {"breaks": 1, "spoils": 0, "costs": 0, "notice": 0}
    assert list(found["found"]) == list(SEVERITIES)
    assert found["splits"]["train"] == {"samples": 23, "checked": 23, "broken": 1}
    (finding,) = found["findings"]
    assert set(finding) == {"kind", "severity", "count", "means", "advice", "entries"}
    assert finding["entries"] == [
        {"name": str(photos / "cat" / "empty.jpg"), "split": "train", "detail": "", "other": None}
    ]
    assert set(found["classes"]) == {"count", "smallest_train", "largest_train", "imbalance", "samples"}
    assert found["classes"]["samples"]["cat"] == {"train": 12, "validation": 3}
    figures = {"minimum", "p5", "median", "p95", "maximum", "mean"}
    assert {name: set(each) for name, each in found["sizes"].items()} == dict.fromkeys(
        ("height", "width", "pixels", "file_bytes"), figures
    )
    assert found["sizes"]["width"]["median"] == 80
    assert set(found["pixels"]) == {"mean", "std", "run_mean", "run_std"}
    assert set(found["cost"]) == {"cpu_ms_per_image", "images_per_second_per_core", "histogram", "slowest"}
    assert sum(bar["images"] for bar in found["cost"]["histogram"]) == 28
    assert set(found["cost"]["slowest"][0]) == {"path", "cpu_ms", "width", "height", "file_bytes"}


def test_a_run_s_labels_are_checked_too(paceline_here: Call, photos: Path, tmp_path: Path) -> None:
    recipe = ("image_folder", "data.path=photos", "model.name=small_resnet", "data.image_size=16", "data.workers=0")
    short = ("train.duration=2 steps", "batch.global_size=4", "telemetry.trackers=[]", "telemetry.report=false")
    paceline_here("train", *recipe, *short, "data.validation_fraction=0.8", "--run-dir", "run").ended(0)
    done = paceline_here("check-data", "run", "--json", "--output", "out").ended(0)
    labels = done.document["labels"]
    assert set(labels) == {"run", "folds", "checked", "agreement", "findable", "not_checked", "entries"}
    assert labels["checked"] == {}  # after two steps
    assert labels["not_checked"].startswith("training samples are checked with --folds 5; the network predicts 50 %")
    assert json.loads((tmp_path / "out" / "check-data.json").read_text()) == done.document
    assert (
        "% of the validation labels, too few to judge them: it would find about "
        in paceline_here("check-data", "run").ended(0).out
    )
    paceline_here("check-data", "photos", "--folds", "3").refused("is not a run directory; train first")


def test_the_copy_of_an_address_is_checked_and_stays_whole(paceline_here: Call, photos: Path, tmp_path: Path) -> None:
    (photos / "cat" / "empty.jpg").touch()
    (tmp_path / "there.yaml").write_text(f"base: image_folder\ndata: {{path: 'file://{photos}'}}\n")
    done = paceline_here("check-data", "there.yaml").ended(1)
    assert "breaks  1 empty file" in done.out
    assert "        cat/empty.jpg" in done.out
    paceline_here("check-data", "there.yaml", "--quarantine", "aside").refused("moves files out of a folder")


def test_what_was_moved_is_said_where_something_else_is_wrong(paceline_here: Call, photos: Path) -> None:
    (photos / "cat" / "empty.jpg").touch()
    (photos / "dog" / "of-a-cat.jpg").write_bytes((photos / "cat" / "03.jpg").read_bytes())
    done = paceline_here("check-data", "photos", "--quarantine", "aside").ended(1)
    assert done.out.splitlines()[-2].startswith("failed: 1 breaks, moved away, 1 spoils")


SLOW = """
import time
from paceline.data.image.datasets import ImageDataset
from paceline.data.image.sets.digits import CLASSES, read_digits


class Slow:
    def __init__(self):
        self.base = read_digits()
        self.labels = self.base.labels

    def __len__(self):
        return len(self.labels)

    def path(self, sample):
        return self.base.path(sample)

    def read(self, sample):
        if sample == 0:
            print("reading", flush=True)
        time.sleep(0.2)
        return self.base.read(sample)


def slow(data):
    source = Slow()
    return ImageDataset(
        name="slow", train=source, validation=source, classes=CLASSES, channels=1, image_size=8, mean=(0.5,), std=(0.5,)
    )
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_it_can_be_interrupted(tmp_path: Path, number: signal.Signals, code: int) -> None:
    (tmp_path / "slow_images.py").write_text(SLOW)
    command = ("-m", "paceline", "check-data", "image_folder", "data.dataset=slow_images:slow")
    with subprocess.Popen(
        [sys.executable, *command],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": f"{SOURCES}:{tmp_path}"},
    ) as process:
        try:
            assert process.stderr is not None
            assert process.stderr.readline() == "reading\n"  # on standard error: the document has the other to itself
            os.killpg(process.pid, number)
            out, err = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == code
    assert "Traceback" not in out + err
    # Nobody of its group is left.
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def test_progress_is_shown_on_a_terminal_and_the_document_stays_whole(photos: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "paceline", "check-data", "photos", "--json"]
    environment = os.environ | {"PYTHONPATH": str(SOURCES), "TERM": "xterm"}
    done = subprocess.run(
        command, cwd=photos.parent, stdout=subprocess.PIPE, stderr=theirs, env=environment, check=False, timeout=300
    )
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert "looking at images" in shown
    assert "28/28" in shown
    assert json.loads(done.stdout)["passed"] is True


def test_a_packed_set_is_checked_as_its_folder(paceline_here: Call, photos: Path) -> None:
    pytest.importorskip("pyarrow")
    (photos / "cat" / "copy.jpg").write_bytes((photos / "dog" / "03.jpg").read_bytes())
    assert paceline_here("pack", "photos", "packed").code == 0
    done = paceline_here("check-data", "packed", "--json")
    found = done.document
    assert done.code == 1
    assert {each["kind"] for each in found["findings"] if each["severity"] == "spoils"} == {"contradiction"}
