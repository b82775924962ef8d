"""`paceline review` as a user calls it: a plan applied without the page, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from calls import Call

from paceline_data.reviewing.plan import Decision, ReviewPlan, content_digest


@pytest.fixture
def plan(write_images: Call, tmp_path: Path) -> ReviewPlan:
    for name in ("cat", "dog"):
        write_images(tmp_path / "my photos" / name, count=3)
    plan = ReviewPlan(tmp_path / "my photos-review" / "plan.jsonl")
    digest = content_digest(tmp_path / "my photos" / "cat" / "0.png")
    plan.record(Decision("cat/0.png", "move", digest, "dog"), None)
    return plan


def test_a_plan_is_applied_without_the_page(paceline_here: Call, plan: ReviewPlan) -> None:
    done = paceline_here("review", "my photos", "--apply", plan.path).ended(0)
    moved, undo, following = done.out.splitlines()
    assert moved.startswith("moved 1 file; the plan is now ")
    assert undo.startswith("Undo: sh '")
    assert following == "Next: paceline train 'my photos'"
    paceline_here("review", "my photos", "--apply", plan.path).refused("does not exist, so there is nothing to apply")


def test_what_comes_next_has_the_same_data(paceline_here: Call, plan: ReviewPlan) -> None:
    done = paceline_here("review", "my photos", "data.channels=1", "--apply", plan.path).ended(0)
    assert done.out.splitlines()[-1] == "Next: paceline train 'my photos' data.channels=1"


def test_what_was_moved_is_one_document(paceline_here: Call, plan: ReviewPlan) -> None:
    done = paceline_here("review", "my photos", "--apply", plan.path, "--json").ended(0)
    assert [[Path(name).parent.name for name in each] for each in done.document["moved"]] == [["cat", "dog"]]
    assert done.document["moved_earlier"] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("digits",), "review moves files between class folders, and 'digits' is not a folder of them"),
        (("my photos", "--folds", "5"), "'my photos' is not a run directory"),
        (("my photos", "--apply", "p", "--port", "1"), "--port"),
        (("my photos", "--plan", "my photos/plan.jsonl"), "must not contain each other"),
    ],
)
def test_what_has_no_effect_is_refused(
    words: tuple[str, ...], message: str, paceline_here: Call, plan: ReviewPlan, tmp_path: Path
) -> None:
    before = sorted(tmp_path.rglob("*"))
    paceline_here("review", *words).refused(message)
    assert sorted(tmp_path.rglob("*")) == before
