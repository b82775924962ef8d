"""A plan is applied as a whole or not at all, moved back by its script, and lost by no kill and no second reviewer."""

from __future__ import annotations

import contextlib
import errno
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest
from golden_sentences import raises

from paceline.errors import DataError, VersionError
from paceline_data.reviewing.apply import Applied, apply_plan, check_class_name, is_inside
from paceline_data.reviewing.plan import ChangedError, Decision, ReviewPlan, content_digest

FILES = ("cat/1.jpg", "cat/2.jpg", "cat/3.jpg", "dog/1.jpg", "dog/2.jpg")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two classes of files; what a plan moves need not be an image."""
    for name in FILES:
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path / "photos"


@pytest.fixture
def plan(tmp_path: Path) -> ReviewPlan:
    return ReviewPlan(tmp_path / "photos-review" / "plan.jsonl")


def contents(root: Path) -> dict[str, str]:
    return {str(path.relative_to(root)): path.read_text() for path in sorted(root.rglob("*")) if path.is_file()}


def decide(plan: ReviewPlan, photos: Path, file: str, action: Any, to: str | None = None) -> Decision:
    plan.refresh()
    decision = Decision(file, action, content_digest(photos / file), to)
    plan.record(decision, plan.decisions.get(file))
    return decision


def undo(applied: Applied) -> None:
    subprocess.run(["sh", str(applied.undo)], check=True)


def test_files_are_moved_and_moved_back(photos: Path, plan: ReviewPlan) -> None:
    before = contents(photos)
    for file, action, to in (
        ("cat/1.jpg", "move", "dog"),  # whose name is taken there
        ("cat/2.jpg", "aside", None),
        ("cat/3.jpg", "keep", None),
        ("dog/1.jpg", "aside", None),
        ("dog/1.jpg", "undecided", None),
    ):
        decide(plan, photos, file, action, to)
    assert contents(photos) == before
    applied = apply_plan(ReviewPlan(plan.path), photos)
    assert len(applied.moved) == 2
    left = contents(photos)
    (new,) = left.keys() - before.keys()
    assert new.startswith("dog/1-")
    assert left[new] == "cat/1.jpg"
    assert left["dog/1.jpg"] == "dog/1.jpg"
    assert (plan.path.parent / "aside/cat/2.jpg").read_text() == "cat/2.jpg"
    assert not plan.path.exists()
    assert json.loads(applied.plan.read_text().splitlines()[1])["to"] == "dog"
    undo(applied)
    assert contents(photos) == before


def test_moves_of_two_plans_are_undone_from_the_last(photos: Path, plan: ReviewPlan) -> None:
    before = contents(photos)
    decide(plan, photos, "cat/3.jpg", "move", "dog")
    apply_plan(plan, photos)
    decide(plan, photos, "dog/3.jpg", "aside")
    undo(apply_plan(plan, photos))
    assert contents(photos) == before


def test_an_emptied_class_goes_and_comes_back(photos: Path, plan: ReviewPlan) -> None:
    for file in ("dog/1.jpg", "dog/2.jpg"):
        decide(plan, photos, file, "move", "cat")
    applied = apply_plan(plan, photos)
    assert [each.name for each in photos.iterdir()] == ["cat"]
    undo(applied)
    assert set(contents(photos)) == set(FILES)


def test_splits_keep_their_files(tmp_path: Path, plan: ReviewPlan) -> None:
    root = tmp_path / "photos"
    for name in ("train/cat/1.jpg", "train/dog/1.jpg", "val/cat/2.jpg"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    decide(plan, root, "val/cat/2.jpg", "move", "dog")
    apply_plan(plan, root)
    assert (root / "val/dog/2.jpg").read_text() == "val/cat/2.jpg"


def _changed(photos: Path, plan: ReviewPlan) -> None:
    (photos / "cat/2.jpg").write_text("other")


def _gone(photos: Path, plan: ReviewPlan) -> None:
    (photos / "cat/2.jpg").unlink()


def _linked(photos: Path, plan: ReviewPlan) -> None:
    (photos / "dog/link.jpg").symlink_to("../cat/2.jpg")


def _behind_a_link(photos: Path, plan: ReviewPlan) -> None:
    (photos / "cat").rename(photos.parent / "elsewhere")
    (photos / "cat").symlink_to("../elsewhere")


def _pipe(photos: Path, plan: ReviewPlan) -> None:
    (photos / "cat/2.jpg").unlink()
    os.mkfifo(photos / "cat/2.jpg")


def _taken(photos: Path, plan: ReviewPlan) -> None:
    digest = content_digest(photos / "cat/1.jpg")[:12]
    (photos / "dog" / f"1-{digest}.jpg").write_text("there")


@pytest.mark.parametrize("change", [_changed, _gone, _linked, _behind_a_link, _pipe, _taken])
def test_nothing_is_moved_if_one_file_cannot_be(change: Callable[..., None], photos: Path, plan: ReviewPlan) -> None:
    decide(plan, photos, "cat/1.jpg", "move", "dog")
    decide(plan, photos, "cat/2.jpg", "aside")
    change(photos, plan)
    after = sorted(photos.rglob("*"))
    with raises(DataError, path=plan.path):
        apply_plan(plan, photos)
    assert sorted(photos.rglob("*")) == after
    assert plan.path.exists()
    assert not (plan.path.parent / "aside").exists()


@pytest.mark.parametrize(
    "file", ["../outside.jpg", "/etc/passwd", "cat/../../outside.jpg", "cat//1.jpg", "out/outside.jpg", "cat", ""]
)
def test_a_plan_reaches_no_other_file(file: str, photos: Path, plan: ReviewPlan) -> None:
    (photos.parent / "outside.jpg").write_text("outside")
    (photos / "out").symlink_to("..")
    assert file == "cat" or not is_inside(photos, file)
    with plan.locked() as lines:
        line = {"file": file, "action": "aside", "digest": content_digest(photos.parent / "outside.jpg")}
        lines.write(json.dumps(line).encode() + b"\n")
    with pytest.raises(DataError, match="nothing was moved"):
        apply_plan(plan, photos)
    assert (photos.parent / "outside.jpg").exists()
    assert not (plan.path.parent / "aside").exists()


@pytest.mark.parametrize("file", ["loose.jpg", "cat/in/1.jpg"])
def test_a_file_in_an_odd_place_goes_aside_or_to_a_class(file: str, photos: Path, plan: ReviewPlan) -> None:
    (photos / file).parent.mkdir(exist_ok=True)
    (photos / file).write_text("odd")
    before = contents(photos)
    decide(plan, photos, file, "aside")
    applied = apply_plan(plan, photos)
    assert (plan.path.parent / "aside" / file).read_text() == "odd"
    undo(applied)
    decide(plan, photos, file, "move", "dog")
    applied = apply_plan(plan, photos)
    assert "odd" in {path.read_text() for path in (photos / "dog").iterdir()}
    undo(applied)
    assert contents(photos) == before


def test_a_new_class_is_made_and_goes_with_the_undo_script(photos: Path, plan: ReviewPlan) -> None:
    digest = content_digest(photos / "cat/1.jpg")
    plan.record(Decision("cat/1.jpg", "move", digest, "kitten", new=True), None)
    applied = apply_plan(ReviewPlan(plan.path), photos)
    assert (photos / "kitten/1.jpg").read_text() == "cat/1.jpg"
    undo(applied)
    assert sorted(each.name for each in photos.iterdir()) == ["cat", "dog"]


def test_a_plan_that_fails_leaves_no_new_class(photos: Path, plan: ReviewPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    (photos / "bird").mkdir()  # empty, and not made by the plan
    for file, name in (("cat/1.jpg", "kitten"), ("cat/2.jpg", "bird"), ("cat/3.jpg", "puppy")):
        plan.record(Decision(file, "move", content_digest(photos / file), name, new=True), None)
    before, rename = sorted(photos.rglob("*")), os.rename

    def full(source: Path, target: Path) -> None:
        if target.parent.name == "puppy":
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        rename(source, target)

    monkeypatch.setattr(os, "rename", full)
    with pytest.raises(DataError, match="the others were moved back"):
        apply_plan(plan, photos)
    assert sorted(photos.rglob("*")) == before


@pytest.mark.parametrize("name", [" ", ".hidden", "a/b", "..", "train", "test", "line\nbreak", "n" * 256])
def test_what_cannot_be_a_class_is_refused(name: str, photos: Path, plan: ReviewPlan) -> None:
    with pytest.raises(DataError, match="cannot be a class"):
        check_class_name(name)
    plan.record(Decision("cat/1.jpg", "move", content_digest(photos / "cat/1.jpg"), name, new=True), None)
    with pytest.raises(DataError, match="cannot be a class"):
        apply_plan(plan, photos)


def test_a_class_that_does_not_exist_is_named(photos: Path, plan: ReviewPlan) -> None:
    decide(plan, photos, "cat/1.jpg", "move", "dogs")
    with pytest.raises(DataError, match=r"there is no class 'dogs' to move to\. Did you mean 'dog'"):
        apply_plan(plan, photos)


# Kills and other reviewers


def in_a_process(work: Callable[..., object], *arguments: object) -> BaseProcess:
    process = multiprocessing.get_context("fork").Process(target=work, args=arguments)
    process.start()
    return process


def apply_killed(plan: Path, photos: Path, moves: int) -> None:
    """Apply a plan, and kill this process before the move after these."""
    rename = os.rename

    def counted(source: Path, target: Path) -> None:
        nonlocal moves
        if moves == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        moves -= 1
        rename(source, target)

    os.rename = counted  # type: ignore[assignment]  # the process ends here
    apply_plan(ReviewPlan(plan), photos)


@pytest.mark.parametrize("undone", [True, False])
@pytest.mark.parametrize("moves", [0, 1, 2, 3])  # three files, and then the plan gets its other name
def test_killed_in_between_it_is_completed_or_undone(moves: int, undone: bool, photos: Path, plan: ReviewPlan) -> None:
    before = contents(photos)
    plan.record(Decision("cat/1.jpg", "move", content_digest(photos / "cat/1.jpg"), "kitten", new=True), None)
    decide(plan, photos, "cat/2.jpg", "aside")
    decide(plan, photos, "dog/2.jpg", "move", "cat")
    killed = in_a_process(apply_killed, plan.path, photos, moves)
    killed.join(60)
    assert killed.exitcode == -signal.SIGKILL
    everywhere = [*contents(photos).values(), *contents(plan.path.parent).values()]
    assert set(before.values()) <= set(everywhere)
    script = plan.path.parent / "undo.sh"
    if undone:
        subprocess.run(["sh", str(script)], check=True)
        assert contents(photos) == before
        assert sorted(each.name for each in photos.iterdir()) == ["cat", "dog"]
    applied = apply_plan(plan, photos)
    assert (len(applied.moved), applied.earlier) == ((3, 0) if undone else (3 - moves, moves))
    assert set(contents(photos).values()) == {*before.values()} - {"cat/2.jpg"}
    undo(applied)
    assert contents(photos) == before


def test_the_second_reviewer_is_told(photos: Path, plan: ReviewPlan) -> None:
    other = ReviewPlan(plan.path)
    first = decide(plan, photos, "cat/1.jpg", "move", "dog")
    second = Decision("cat/1.jpg", "keep", first.digest)
    with raises(ChangedError):
        other.record(second, None)
    assert other.decisions == {"cat/1.jpg": first}
    other.record(second, first)
    plan.refresh()
    assert plan.decisions == {"cat/1.jpg": second}
    assert plan.changed == ["cat/1.jpg", "cat/1.jpg"]


def decide_many(path: Path, barrier: Barrier) -> None:
    """Decide about each file if nobody has, and exit with the number of these."""
    plan, decided = ReviewPlan(path), 0
    for number in range(50):
        barrier.wait(60)
        with contextlib.suppress(ChangedError):
            plan.record(Decision(f"cat/{number}.jpg", "keep", "0"), None)
            decided += 1
    sys.exit(decided)


def test_of_two_processes_one_decides(plan: ReviewPlan) -> None:
    barrier = multiprocessing.get_context("fork").Barrier(2)
    writers = [in_a_process(decide_many, plan.path, barrier) for _ in range(2)]
    for each in writers:
        each.join(60)
    assert sum(each.exitcode or 0 for each in writers) == 50
    plan.refresh()
    assert len(plan.decisions) == len(plan.changed) == 50


def test_a_line_that_was_being_written_is_dropped(photos: Path, plan: ReviewPlan) -> None:
    decide(plan, photos, "cat/1.jpg", "keep")
    with plan.path.open("ab") as file:
        file.write(b'{"file": "cat/2.jpg", "act')
    decide(plan, photos, "cat/3.jpg", "keep")
    other = ReviewPlan(plan.path)
    other.refresh()
    assert set(other.decisions) == {"cat/1.jpg", "cat/3.jpg"}


def test_a_first_line_that_was_being_written_is_completed(photos: Path, plan: ReviewPlan) -> None:
    plan.path.parent.mkdir()
    plan.path.write_bytes(b'{"paceline_rev')
    decide(plan, photos, "cat/1.jpg", "keep")
    other = ReviewPlan(plan.path)
    other.refresh()
    assert set(other.decisions) == {"cat/1.jpg"}


def test_a_last_line_without_an_end_counts(photos: Path, plan: ReviewPlan) -> None:
    decide(plan, photos, "cat/1.jpg", "aside")
    plan.path.write_bytes(plan.path.read_bytes().rstrip(b"\n"))
    assert len(apply_plan(plan, photos).moved) == 1


def test_a_plan_that_was_applied_meanwhile_begins_anew(photos: Path, plan: ReviewPlan) -> None:
    decide(plan, photos, "cat/1.jpg", "aside")
    apply_plan(ReviewPlan(plan.path), photos)
    decide(plan, photos, "cat/2.jpg", "keep")
    assert set(plan.decisions) == {"cat/2.jpg"}
    assert plan.changed == ["cat/1.jpg", "cat/1.jpg", "cat/2.jpg"]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("words\n", DataError),
        ("words", DataError),
        ('{"words": 1}', DataError),
        ('{"paceline_review": 2}\n', VersionError),
        ('{"paceline_review": 1}\n{"file": "cat/1.jpg", "action": "delete", "digest": "0"}\n', DataError),
        ('{"paceline_review": 1}\n{"file": "cat/1.jpg", "action": "move", "digest": "0"}\n', DataError),
        ('{"paceline_review": 1}\n[]\n', DataError),
    ],
)
def test_another_file_is_refused_as_it_is(text: str, kind: type[DataError], photos: Path, plan: ReviewPlan) -> None:
    plan.path.parent.mkdir()
    plan.path.write_text(text)
    with raises(kind):
        apply_plan(plan, photos)
    assert plan.path.read_text() == text
