"""`paceline seen` and `record`: which steps used a sample, and what a model was trained on."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.calls import Call

import paceline
from paceline.reports.audit import used_samples

PICTURES = 10
RECIPE = """
model: {name: small_resnet, options: {width: 4, stages: 2}}
data: {dataset: image_folder, path: photos, image_size: 16}
batch: {global_size: 4}
train: {duration: 8 steps, ema: off}
evaluate: {every: off}
checkpoint: {every: 1 step, keep: 20}
"""


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two classes of random pictures in the current directory, and a recipe."""
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(PICTURES):
            pixels = random.integers(0, 255, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{number}.png")
    (tmp_path / "small.yaml").write_text(RECIPE)
    return tmp_path / "photos"


@pytest.fixture
def run(photos: Path) -> Path:
    return paceline.train("small.yaml", run_dir="run", quiet=True).run_dir


def uses(run: Path, sample: int) -> list[int]:
    return [entry.step for entry in used_samples(run, 0) if sample in entry.ids]


def seen(call: Call, sample: object, *runs: Path) -> Any:
    return call("seen", sample, *runs, "--json").ended(0).document["runs"]


def test_a_file_its_end_a_copy_and_its_number_give_the_same_steps(paceline_here: Call, photos: Path, run: Path) -> None:
    number = int(next(iter(used_samples(run, 0))).ids[0])
    (by_number,) = seen(paceline_here, number, run)
    assert by_number["steps"] == uses(run, number)
    first = by_number["steps"][0]
    assert by_number["used_checkpoints"] == [step for step in range(1, 9) if step >= first]
    assert by_number["clean_checkpoints"] == [step for step in range(1, 9) if step < first]
    names = [each for each in sorted(photos.rglob("*.png")) if not seen(paceline_here, each, run)[0]["is_held_out"]]
    name = names[number]  # samples are numbered in the order of their names
    shutil.copy(name, "elsewhere.png")
    for given in (name, name.relative_to(photos.parent), f"{name.parent.name}/{name.name}", "elsewhere.png"):
        (found,) = seen(paceline_here, given, run)
        assert found["name"] == str(name)
        assert {**found, "name": ""} == by_number


def test_held_out_and_strange_samples(paceline_here: Call, photos: Path, run: Path) -> None:
    answers = [seen(paceline_here, each, run)[0] for each in sorted(photos.rglob("*.png"))]
    held_out = [each for each in answers if each["is_held_out"]]
    assert len(held_out) == 4
    assert all(each["sample_id"] is None and not each["steps"] for each in held_out)
    assert all(len(each["clean_checkpoints"]) == 8 for each in held_out)
    paceline_here("seen", "unknown.png", run).refused("no sample of", "'unknown.png'")
    paceline_here("seen", "3.png", run).refused("2 samples of", "cat/3.png", "dog/3.png")
    paceline_here("seen", "16", run).refused("samples 0 to 15")


def test_changed_data_are_no_answer_and_numbers_are(paceline_here: Call, photos: Path, run: Path) -> None:
    shutil.copy(photos / "cat" / "1.png", photos / "cat" / "new.png")
    answer = paceline_here("seen", "cat/1.png", run).ended(3)
    assert "have changed since it was trained" in answer.out
    assert seen(paceline_here, 1, run)[0]["steps"] == uses(run, 1)


def test_samples_of_two_processes_draws_and_forks(paceline_here: Call, photos: Path) -> None:
    paceline.train("small.yaml", overrides={"data.sampling": "balanced"}, run_dir="drawn", quiet=True)
    assert seen(paceline_here, 3, Path("drawn"))[0]["steps"] == uses(Path("drawn"), 3)
    paceline_here("fork", "drawn", "--at", 4, "--run-dir", "forked").ended(0)
    before, after = seen(paceline_here, 3, Path("drawn"), Path("forked"))
    assert before["steps"] == after["steps"]
    assert json.loads(paceline_here("record", "forked", "--json").ended(0).out)["parent"]["step"] == 4


def test_a_record_says_what_a_model_was_trained_on(paceline_here: Call, photos: Path, run: Path) -> None:
    (photos / "LICENSE.txt").write_text("Free\nfor <b>all</b>")
    (photos / "README.md").write_text("---\nlicense: cc-by-4.0\n---\nPictures.")
    document = paceline_here("record", run, "--output", "record.html", "--json").ended(0).document
    summary = json.loads((run / "summary.json").read_text())
    assert document["weights_sha256"] == summary["weights_sha256"]
    assert document["data"]["classes"] == {"cat": 8, "dog": 8}
    assert document["data"]["licences"] == {"LICENSE.txt": "Free for <b>all</b>", "README.md": "cc-by-4.0"}
    assert document["ledger"]["passed"]
    assert document["environment"]["versions"]["torch"]
    expected = hashlib.sha256()
    for entry in used_samples(run, 0):
        expected.update(np.array([entry.step, *sorted(entry.ids)], dtype="<i8").tobytes())
    assert document["ledger"]["sha256"] == expected.hexdigest()
    page = Path("record.html").read_text()
    assert "<b>all</b>" not in page
    assert "cc-by-4.0" in page
    shutil.move(photos, "moved")
    document = paceline_here("record", run, "--json").ended(0).document
    assert "cannot be opened here" in document["unknown"][0]
    assert document["data"]["train_samples"] == 16


def test_a_run_that_has_not_ended_has_a_record_too(paceline_here: Call, run: Path) -> None:
    whole = paceline_here("record", run, "--json").ended(0).document["ledger"]["sha256"]
    (run / "summary.json").unlink()
    document = paceline_here("record", run, "--json").ended(0).document
    assert document["ledger"] == {"sha256": whole}
    assert [each.partition(":")[0] for each in document["unknown"]] == [
        "whether the ledger is whole",
        "status and digest of the weights",
    ]
