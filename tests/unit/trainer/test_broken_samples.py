"""An image that cannot be read stops the run by its name, or is left out and reported once, also over a resume."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from paceline.reports.audit import audit_run

import paceline
from paceline.data.batch import Batch
from paceline.data.image.pipeline import ImagePipeline
from paceline.errors import DataError, RunDirectoryError
from paceline.trainer.evaluate_target import EvaluationRequest, evaluate_target

Make = Callable[..., Any]

PER_CLASS = 12


@pytest.fixture
def photos(tmp_path: Path, make_photos: Make) -> Path:
    return make_photos(tmp_path / "photos", train=PER_CLASS, val=PER_CLASS, side=8)


def spoil(*files: Path) -> list[str]:
    """Damage files inside, between a head and an end that are whole, so that reading them finds it and no check."""
    for file in files:
        content = file.read_bytes()
        file.write_bytes(content[:48] + bytes(12) + content[60:])
    return sorted(map(str, files))


@pytest.fixture
def train_photos(tiny_recipe: Path, photos: Path, runs: Path, train_tiny: Any) -> Make:
    def train(name: str, overrides: dict[str, Any], *, on_loss: Any = None) -> Any:
        class Watched(paceline.ImageClassification):
            def loss(self, model: Any, batch: Batch) -> Any:
                if on_loss is not None:
                    on_loss(batch)
                return super().loss(model, batch)

        given = {
            "data.dataset": "image_folder",
            "data.path": str(photos),
            **({"data.workers": 0} if overrides.get("data.backend") == "pytorch" else {}),
            "batch.global_size": 8,
            "telemetry.log_every": "2 steps",
            "evaluate.every": "off",
            "train.duration": "9 steps",
            **overrides,
        }
        return paceline.train(tiny_recipe, overrides=given, run_dir=runs / name, task=Watched, quiet=True)

    return train


BACKENDS = pytest.mark.parametrize("backend", ["memory", "pytorch"])


@BACKENDS
def test_by_default_the_run_stops_and_names_the_file(
    backend: str, train_photos: Make, photos: Path, runs: Path, events: Make
) -> None:
    (broken,) = spoil(photos / "train/dog/05.png")
    with pytest.raises(DataError) as caught:
        train_photos("run", {"data.backend": backend})
    message = str(caught.value)
    assert message.startswith(f"'{broken}' could not be read: ")
    assert (
        "1 broken sample(s) so far, and data.max_broken=0; the same command with data.max_broken=1 continues" in message
    )
    (finish,) = events(runs / "run", "finish")
    assert (finish["status"], finish["message"]) == ("failed", message)
    (incident,) = events(runs / "run", "incident")
    assert (incident["incident"], incident["path"], incident["split"]) == ("broken_sample", broken, "train")


@BACKENDS
def test_asked_to_it_leaves_them_out_and_says_so_once(
    backend: str, train_photos: Make, photos: Path, events: Make
) -> None:
    broken = spoil(photos / "train/dog/05.png", photos / "train/cat/01.png", photos / "train/cat/02.png")
    result = train_photos("run", {"data.backend": backend, "data.max_broken": 3})
    found = events(result.run_dir, "incident")
    assert sorted(event["path"] for event in found) == broken
    assert all("could not be read" in event["message"] and "was left out" in event["message"] for event in found)
    ledger = result.summary.ledger
    assert (ledger.epochs_complete, ledger.duplicates, ledger.missing, ledger.broken) == (3, 0, 0, 9)
    assert audit_run(result.run_dir).passed


def test_a_failing_disk_ends_a_run_that_skips_too(train_photos: Make, photos: Path) -> None:
    away = photos.with_name("away")

    def fail(batch: Batch) -> None:
        if batch.slice.step == 4:
            (photos / "train").rename(away)

    asked = {
        "data.on_bad": "skip",
        "data.backend": "pytorch",
        "checkpoint.every": "1 steps",
        "telemetry.log_every": "1 steps",
    }
    with pytest.raises(DataError, match=r"1\d broken sample\(s\) so far, and data\.on_bad=skip leaves out 10"):
        train_photos("run", asked, on_loss=fail)
    away.rename(photos / "train")
    result = train_photos("run", asked)  # what was left out of saved steps stays left out
    assert (result.status, audit_run(result.run_dir).passed) == ("completed", True)


@BACKENDS
def test_the_same_over_any_resume(backend: str, train_photos: Make, photos: Path, course: Make) -> None:
    spoil(photos / "train/dog/05.png", photos / "train/cat/01.png", photos / "val/cat/03.png")
    overrides = {"data.backend": backend, "data.max_broken": 3, "evaluate.every": "2 steps", "batch.micro_size": 2}
    whole = train_photos("whole", overrides)
    assert sum(event["event"] == "incident" for event in course(whole.run_dir)) == 3
    # Before all of them have been met, and after; what remembers them is the same for each back-end.
    for step in (1, 5) if backend == "memory" else (5,):

        def stop(batch: Batch, step: int = step) -> None:
            if batch.slice.step == step - 1 and batch.slice.is_last:
                os.kill(os.getpid(), signal.SIGTERM)

        name = f"stopped-{step}"
        assert train_photos(name, overrides, on_loss=stop).status == "stopped"
        pieces = train_photos(name, overrides)
        assert course(pieces.run_dir) == course(whole.run_dir)
        assert pieces.summary.weights_sha256 == whole.summary.weights_sha256
        assert pieces.summary.ledger == whole.summary.ledger


def test_back_ends_leave_out_the_same(train_photos: Make, photos: Path, course: Make) -> None:
    spoil(photos / "train/dog/05.png", photos / "val/cat/01.png")
    overrides = {"data.max_broken": 2, "evaluate.every": "3 steps", "data.augment.flip": 0.5}
    result = train_photos("run", {**overrides, "data.backend": "pytorch"})
    other = train_photos("other", {**overrides, "data.backend": "memory"})
    assert result.summary.weights_sha256 == other.summary.weights_sha256
    assert course(result.run_dir) == course(other.run_dir)


@BACKENDS
def test_a_micro_batch_of_broken_images_alone_changes_nothing(
    backend: str, train_photos: Make, photos: Path, events: Make
) -> None:
    """With one image per micro-batch, a broken one leaves its forward pass without a sample."""
    spoil(photos / "train/dog/05.png")
    overrides = {"data.backend": backend, "data.max_broken": 1, "telemetry.log_every": "1 steps", "batch.micro_size": 1}
    result = train_photos("run", {**overrides, "model.options.width": 2})
    assert result.summary.ledger.broken == 3
    assert all(event["loss"] is not None and event["loss"] > 0 for event in events(result.run_dir, "step"))


def test_held_out_images_are_left_out_of_the_count(train_photos: Make, photos: Path, events: Make) -> None:
    (broken,) = spoil(photos / "val/cat/03.png")
    result = train_photos("run", {"data.max_broken": 1, "evaluate.every": "3 steps"})
    assert {event["samples"] for event in events(result.run_dir, "evaluation")} == {2 * PER_CLASS - 1}
    (incident,) = events(result.run_dir, "incident")
    assert (incident["path"], incident["split"]) == (broken, "validation")


def test_a_broken_held_out_image_stops_the_run_too(train_photos: Make, photos: Path) -> None:
    (broken,) = spoil(photos / "val/cat/03.png")
    with pytest.raises(DataError, match=f"'{broken}' could not be read"):
        train_photos("run", {"evaluate.every": "3 steps"})


@pytest.mark.parametrize("most", [0, 1])
def test_a_name_without_a_utf_8_form_is_told_as_others_are(
    most: int, train_photos: Make, photos: Path, runs: Path, events: Make
) -> None:
    broken = os.fsdecode(os.fsencode(photos / "train/dog") + b"/caf\xe9.png")
    os.rename(photos / "train/dog/05.png", broken)
    spoil(Path(broken))
    if most:
        result = train_photos("run", {"data.max_broken": most, "telemetry.trackers": ["csv"]})
        assert result.status == "completed"
        assert "caf\\udce9.png" in (runs / "run" / "csv" / "incident.csv").read_text(encoding="utf-8")
    else:
        with pytest.raises(DataError, match=r"caf\udce9.png' could not be read"):
            train_photos("run", {"data.max_broken": most})
    (incident,) = events(runs / "run", "incident")
    assert incident["path"] == broken


def test_held_out_images_are_not_opened_where_nothing_is_evaluated(
    train_photos: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither decoded into memory nor given loader processes, which would begin beside the threads of a run."""
    opened: list[int] = []
    backend = ImagePipeline._backend

    def noting(self: ImagePipeline, *given: Any, training: bool) -> Any:
        opened.append(training)
        return backend(self, *given, training=training)

    monkeypatch.setattr(ImagePipeline, "_backend", noting)
    train_photos("run", {"data.backend": "pytorch", "data.workers": 1})
    assert opened
    assert all(opened)


def test_other_images_of_the_same_names_and_sizes_are_refused_at_a_resume(
    train_photos: Make, photos: Path, runs: Path
) -> None:
    one, other = photos / "train/cat/03.png", photos / "train/dog/07.png"
    size = max(one.stat().st_size, other.stat().st_size)
    for file in (one, other):
        os.truncate(file, size)  # what follows a PNG's end is not read
    whole = train_photos("whole", {})
    train_photos("run", {"train.duration": "5 steps"})
    contents = one.read_bytes(), other.read_bytes()
    for changed in (contents[::-1], (contents[0], contents[0]), (bytes(size), contents[1])):
        one.write_bytes(changed[0])
        other.write_bytes(changed[1])
        with pytest.raises(RunDirectoryError, match=r"images of the run in .* have changed .*train/dog/07\.png"):
            train_photos("run", {"data.max_broken": 1})
    with pytest.raises(DataError, match=r"images that cannot be opened: 1 \('train/cat/03\.png'"):
        train_photos("run", {})
    with pytest.raises(RunDirectoryError, match=r"data\.on_bad was refuse and is now skip"):
        train_photos("run", {"data.on_bad": "skip"})
    one.write_bytes(contents[0])
    other.write_bytes(contents[1])
    # Very large data sets have no digest of their content: names and sizes are compared.
    plan = json.loads((runs / "run" / "plan.json").read_text())
    del plan["data"]["content_digest"]
    (runs / "run" / "plan.json").write_text(json.dumps(plan))
    assert train_photos("run", {}).summary.weights_sha256 == whole.summary.weights_sha256


def test_what_cannot_be_opened_is_found_before_a_run_directory_is_made(
    train_photos: Make, photos: Path, runs: Path
) -> None:
    (photos / "val/dog/03.png").write_bytes(b"")
    (photos / "train/cat/film.mp4").touch()
    with pytest.raises(DataError, match=r"(?s)2 files or folders.*film\.mp4.*val/dog/03\.png"):
        train_photos("run", {})
    assert not (runs / "run").exists()


def test_skipped_they_are_in_the_records_and_the_same_over_a_resume(
    train_photos: Make, photos: Path, runs: Path, course: Make
) -> None:
    """Those found before are no samples; one that is found when it is read is left out of its batches."""
    (photos / "train/cat/film.mp4").touch()
    for name in ("train/cat/00.png", "val/dog/03.png"):
        (photos / name).write_bytes(b"words")
    (inside,) = spoil(photos / "train/dog/05.png")
    overrides = {"data.on_bad": "skip", "evaluate.every": "3 steps"}
    whole = train_photos("whole", overrides)
    plan = json.loads((runs / "whole" / "plan.json").read_text())
    assert {key: plan["data"][key] for key in plan["data"] if key.endswith("_left_out")} == {
        "other_files_left_out": 1,
        "broken_images_left_out": 2,
    }
    assert sum("left out" in each for each in plan["left_out"]) == 2
    assert (plan["train_samples"], plan["evaluation_samples"]) == (2 * PER_CLASS - 1, 2 * PER_CLASS - 1)
    incidents = [event["path"] for event in course(runs / "whole") if event["event"] == "incident"]
    assert incidents == [inside]
    assert whole.summary.ledger.broken == 3
    audit = audit_run(whole.run_dir)
    assert audit.passed
    assert audit.left_out == {"other_files": 1, "broken_images": 2}

    train_photos("pieces", {**overrides, "train.duration": "4 steps"})
    assert train_photos("pieces", overrides).summary.weights_sha256 == whole.summary.weights_sha256
    (photos / "train/cat/00.png").write_bytes((photos / "train/cat/01.png").read_bytes())
    with pytest.raises(RunDirectoryError, match="train_samples=23, but here it would be 24"):
        train_photos("pieces", {**overrides, "train.duration": "12 steps"})


def test_a_run_that_met_a_broken_image_goes_on_without_it(train_photos: Make, photos: Path, runs: Path) -> None:
    """Found when it was read: the same data, so the same run."""
    train_photos("run", {"train.duration": "3 steps"})
    spoil(photos / "train/dog/05.png")
    plan = json.loads((runs / "run" / "plan.json").read_text())
    del plan["data"]["content_digest"]  # as of a set that is too large for it
    (runs / "run" / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(DataError, match=r"data\.max_broken=1 continues without them"):
        train_photos("run", {})
    assert train_photos("run", {"data.max_broken": 1}).status == "completed"


def test_held_out_images_that_are_all_broken_give_no_score(tiny_recipe: Path, photos: Path, runs: Path) -> None:
    overrides = {"data.dataset": "image_folder", "data.path": str(photos), "train.duration": "1 steps"}
    paceline.train(tiny_recipe, overrides=overrides, run_dir=runs / "run", quiet=True)
    spoil(*(photos / "val").rglob("*.png"))
    request = EvaluationRequest(target=runs / "run", overrides={"data.max_broken": 2 * PER_CLASS})
    with pytest.raises(DataError, match=f"none of the {2 * PER_CLASS} samples could be read"):
        evaluate_target(request)
