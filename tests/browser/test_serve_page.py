"""The service's page in a real browser: an image is chosen by keyboard, and shown with what is said of it."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calls import SOURCES, Call, in_a_process
from PIL import Image

for _library in ("fastapi", "prometheus_client", "uvicorn", "python_multipart"):
    pytest.importorskip(_library, reason=f"{_library} is not installed: pip install 'paceline[serve]'")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TINY = ("model.options={width: 4, stages: 1}", "data.augment=null")
QUIET = (
    "train.duration=4 steps",
    "evaluate.every=off",
    "telemetry.trackers=[]",
    "telemetry.report=false",
    "parallel.device=cpu",
    "parallel.threads=1",
)


@contextmanager
def served(folder: Path, recipe: str, *options: str) -> Iterator[str]:
    """Where a service of a tiny run answers."""
    in_a_process("train", recipe, *options, *QUIET, "--run-dir", "a-run", cwd=folder).ended(0)
    serve = [sys.executable, "-m", "paceline", "serve", "a-run", "--port", "0", "--json", "--max-images", "3"]
    environment = {**os.environ, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        serve, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as service:
        assert service.stdout is not None
        try:
            yield json.loads(service.stdout.readline())["url"]
        finally:
            service.terminate()
        assert service.wait(60) == 0


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(tmp_path_factory.mktemp("page"), "digits", *TINY) as url:
        yield url


def picture(seed: int) -> bytes:
    content = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (48, 64, 3), dtype=np.uint8)).save(content, "PNG")
    return content.getvalue()


@pytest.fixture
def opened(show: Call, url: str) -> Iterator[Call]:
    """``opened(scheme=…, width=…)`` opens the page; in the end nothing was complained of, or asked of others."""
    pages: list[Any] = []

    def open_page(**how: Any) -> Any:
        pages.append(show(url, drawn=False, **how))
        return pages[-1].page

    yield open_page
    for each in pages:
        assert each.messages == []
        assert [one for one in each.requests if not one.startswith((url, "blob:", "data:"))] == []


def files(*contents: tuple[str, bytes]) -> list[dict[str, Any]]:
    return [{"name": name, "mimeType": "image/png", "buffer": content} for name, content in contents]


def choose(page: Any, *names: str) -> None:
    page.set_input_files("#files", files(*((name, picture(number)) for number, name in enumerate(names))))


def chooser_by_key(page: Any) -> Any:
    """The file chooser that the space bar opens.

    A browser lets a page open one only within seconds of a person's key, and on a loaded machine these may be over
    between the key's going down and the answer to its coming up: so it is pressed again, as a person would.
    """
    opened: list[Any] = []
    page.on("filechooser", lambda chooser: opened.extend([chooser]))  # Playwright takes no method of a built-in type.
    for turn in range(300):
        if turn % 60 == 0:
            page.keyboard.press("Space")
        page.wait_for_timeout(250)
        if opened:
            return opened[0]
    pytest.fail("Five presses of the space bar, 15 seconds apart, opened no file chooser.")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pictures_and_bars(opened: Call, scheme: str) -> None:
    page = opened(scheme=scheme)
    choose(page, "cat & <b>dog.png", "x.png")
    page.wait_for_selector("#answers > li:nth-child(2) [role=meter]")
    assert page.text_content("#status") == "2 images answered."
    assert page.text_content("#answers h2") == "cat & <b>dog.png"
    page.wait_for_function("document.querySelector('#answers img').naturalWidth > 0")  # which loads beside its bars
    assert page.evaluate("document.querySelector('#answers img').naturalWidth") == 64
    values = page.eval_on_selector_all(
        "#answers > li:first-child [role=meter]", "all => all.map(each => +each.ariaValueNow)"
    )
    assert len(values) == 10
    assert values == sorted(values, reverse=True)
    assert sum(values) == pytest.approx(1, abs=1e-3)
    shown = page.eval_on_selector("body", "each => getComputedStyle(each).backgroundColor")
    assert (sum(map(int, shown[4:-1].split(","))) > 3 * 128) == (scheme == "light")
    if folder := os.environ.get("PACELINE_SCREENSHOTS"):
        page.screenshot(path=f"{folder}/serve-{scheme}.png", full_page=True)


def test_by_keyboard(opened: Call) -> None:
    page = opened()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "files"
    outline = page.eval_on_selector("#drop", "each => getComputedStyle(each).outlineStyle")
    assert outline == "solid"
    chooser_by_key(page).set_files(files(("x.png", picture(0))))
    page.wait_for_selector("#answers [role=meter]")
    page.keyboard.press("Tab")
    page.keyboard.type("2")
    page.keyboard.press("Tab")  # 102 labels, of 10 classes
    page.wait_for_selector("#status:has-text('1 image answered')")


def test_what_cannot_be_answered_is_said(opened: Call) -> None:
    page = opened(width=400)
    choose(page, "1.png", "2.png", "3.png", "4.png")
    page.wait_for_selector("#status.bad")
    assert page.text_content("#status") == "4 images; at most 3 are answered at once."
    page.set_input_files("#files", files(("x.png", picture(0)), ("broken.png", b"no image")))
    page.wait_for_selector("#answers .bad")
    assert "not an image" in page.text_content("#answers .bad")
    assert page.text_content("#status") == "1 image answered, 1 unreadable."
    # On a narrow screen nothing sticks out.
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    if folder := os.environ.get("PACELINE_SCREENSHOTS"):
        page.screenshot(path=f"{folder}/serve-narrow.png", full_page=True)


@pytest.mark.parametrize("recipe", ["gpt-small-docs", "docs-topics"])
def test_texts(show: Call, tmp_path: Path, recipe: str) -> None:
    with served(tmp_path, recipe) as url:
        opened = show(url, drawn=False, width=400)
        page = opened.page
        for key in ("Tab", "<b>def</b> ", "Control+Enter"):
            page.keyboard.type(key) if " " in key else page.keyboard.press(key)
        page.wait_for_selector("#status:has-text('answered')")
        assert page.text_content("#answers h2") == "<b>def</b> "
        shown = ".written" if recipe == "gpt-small-docs" else "[role=meter]"
        assert page.is_visible(f"#answers {shown}")
        assert page.is_visible("#tokens") == (recipe == "gpt-small-docs") != page.is_visible("#top-k")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert opened.messages == []
        assert [one for one in opened.requests if not one.startswith((url, "data:"))] == []
        if folder := os.environ.get("PACELINE_SCREENSHOTS"):
            page.screenshot(path=f"{folder}/serve-{recipe}.png", full_page=True)
