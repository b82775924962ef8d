"""The review page in a real browser: images are kept, moved and set aside by keyboard, and names run nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calls import SOURCES, Call
from PIL import Image

from paceline_data.reviewing.plan import ReviewPlan

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Pictures in two classes, each twice, under names that a page could run."""
    for number, name in enumerate(("cat/1", f"cat/{HOSTILE}", "dog/3", f"{HOSTILE.upper()}/4")):
        pixels = np.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=np.uint8)
        picture = Image.fromarray(pixels).resize((96, 64), Image.Resampling.NEAREST)
        other = "cat" if name.startswith("dog") else "dog"
        for path in (tmp_path / "photos" / f"{name}.png", tmp_path / "photos" / other / f"copy{number}.png"):
            path.parent.mkdir(parents=True, exist_ok=True)
            picture.save(path)
    (tmp_path / "photos" / "cat" / "words.png").write_text("words")
    return tmp_path / "photos"


@pytest.fixture
def url(photos: Path) -> Iterator[str]:
    review = [sys.executable, "-m", "paceline", "review", str(photos), "data.validation_fraction=0", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(review, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as served:
        assert served.stdout is not None
        assert served.stderr is not None
        yield json.loads(served.stdout.readline())["url"]
        served.terminate()
        assert served.wait(60) == 0, served.stderr.read()


@pytest.fixture
def opened(show: Call, url: str) -> Iterator[Call]:
    """``opened(scheme=…, width=…)`` opens the page; in the end no name ran, and nothing was asked of others."""
    pages: list[Any] = []

    def open_page(**how: Any) -> Any:
        pages.append(show(url, drawn=False, **how))
        pages[-1].page.wait_for_selector("#pictures img")
        return pages[-1].page

    yield open_page
    for each in pages:
        assert [message for message in each.messages if "409" not in message and "415" not in message] == []
        assert [one for one in each.requests if not one.startswith((url, "blob:", "data:"))] == []


def progress(page: Any, text: str) -> None:
    page.wait_for_function("text => document.getElementById('progress').textContent === text", arg=text)


def test_images_are_decided_and_moved_by_keyboard(opened: Call, photos: Path) -> None:
    before = {path.relative_to(photos): path.read_bytes() for path in photos.rglob("*.png")}
    page = opened()
    progress(page, "1 of 5, 0 decided")
    first = page.text_content("#pictures button[aria-pressed=true] .muted")
    assert len(page.query_selector_all("#pictures img")) == 2
    page.keyboard.press("a")
    progress(page, "2 of 5, 1 decided")
    page.keyboard.press("o")
    second = page.text_content("#pictures button[aria-pressed=true] .muted")
    page.keyboard.press("m")
    page.keyboard.type("img")
    page.keyboard.press("Enter")
    progress(page, "3 of 5, 2 decided")
    page.keyboard.press("k")
    progress(page, "4 of 5, 3 decided")
    page.keyboard.press("ArrowLeft")
    progress(page, "3 of 5, 3 decided")
    page.keyboard.press("u")
    progress(page, "3 of 5, 2 decided")
    assert {path.relative_to(photos): path.read_bytes() for path in photos.rglob("*.png")} == before
    page.focus("#review")
    page.keyboard.press("Enter")
    page.wait_for_selector("#confirm[open]")
    assert page.text_content("#effect") == "1 to move to another class, 1 to set aside."
    assert page.evaluate("document.activeElement.id") == "apply"
    page.keyboard.press("Enter")
    page.wait_for_selector("#why:has-text('applied')")
    assert "moved 2 files" in page.text_content("#status")
    assert "Next: paceline train" in page.text_content("#status")
    assert not (photos / first).exists()
    assert (photos.parent / "photos-review" / "aside" / first).read_bytes() == before[Path(first)]
    assert (photos / HOSTILE.upper() / Path(second).name).read_bytes() == before[Path(second)]


def test_two_reviewers_see_each_other(opened: Call, photos: Path) -> None:
    one, other = opened(), opened()
    one.keyboard.press("a")
    progress(one, "2 of 5, 1 decided")
    other.wait_for_selector("#pictures .decision:has-text('set aside')")  # asked for every few seconds
    other.keyboard.press("k")
    progress(other, "2 of 5, 1 decided")
    plan = ReviewPlan(photos.parent / "photos-review" / "plan.jsonl")
    plan.refresh()
    assert [each.action for each in plan.decisions.values()] == ["keep"]


def test_a_new_class_is_typed_and_a_broken_file_is_set_aside(opened: Call, photos: Path) -> None:
    page = opened()
    page.keyboard.press("m")
    page.keyboard.type("new cat")
    page.keyboard.press("Enter")
    progress(page, "2 of 5, 1 decided")
    page.select_option("#kinds", label="not an image (1)")
    page.wait_for_selector("#pictures .none:has-text('Cannot be shown')")
    page.focus("#why")
    page.keyboard.press("s")
    progress(page, "1 of 1, 1 decided")
    assert page.text_content("#summary") == "1 to move, 1 to set aside, 0 kept"
    plan = ReviewPlan(photos.parent / "photos-review" / "plan.jsonl")
    plan.refresh()
    assert [(each.action, each.to, each.new) for each in plan.decisions.values()] == [
        ("move", "new cat", True),
        ("aside", None, False),
    ]


@pytest.mark.parametrize(("scheme", "width"), [("light", 390), ("dark", 1280)])
def test_it_fits_and_follows_the_scheme(scheme: str, width: int, opened: Call) -> None:
    page = opened(scheme=scheme, width=width)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    shown = page.eval_on_selector("body", "each => getComputedStyle(each).backgroundColor")
    assert (sum(map(int, shown[4:-1].split(","))) > 3 * 128) == (scheme == "light")
    if folder := os.environ.get("PACELINE_SCREENSHOTS"):
        page.screenshot(path=f"{folder}/review-{scheme}-{width}.png", full_page=True)
