"""Run every lab from top to bottom as shipped; its slides must open offline."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline_course.course import Lab, all_labs
from paceline_course.execution import Executed, execute
from paceline_course.slides import slides_of, to_html

pytestmark = [pytest.mark.needs("jupytext", "nbclient"), pytest.mark.thorough, pytest.mark.timeout(1900)]
MARP = shutil.which("marp")
_BROWSER_MILLISECONDS = 120_000
_SECONDS = 1800  # a busy machine can be five times slower than a quiet one


@pytest.fixture(scope="module", params=all_labs(), ids=lambda lab: lab.number)
def run(request: pytest.FixtureRequest) -> tuple[Lab, Executed]:
    """A lab and its executed notebook; each lab runs once for all tests of this file."""
    lab = request.param
    return lab, execute(lab.notebook, lab, seconds=_SECONDS)


def test_lab_runs_from_top_to_bottom(run: tuple[Lab, Executed]) -> None:
    lab, executed = run
    print(
        f"lab {lab.number}: {executed.processor_seconds:.0f} s of the processor, {executed.wall_seconds:.0f} s in all"
    )
    assert executed.error == ""
    verdicts = [text_of(executed.notebook.cells[exercise.check]) for exercise in lab.exercises]
    assert [line for line in verdicts if "not yet" not in line] == []


def test_slides_have_figures(run: tuple[Lab, Executed]) -> None:
    lab, executed = run
    text = slides_of(executed.notebook, lab.title)
    assert text.count("\n---\n") == 1 + lab.slides - 1
    assert "data:image/png" in text, "no slide has a figure"
    assert "Traceback" not in text


def text_of(cell: Any) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, offline."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = next((found for name in ("chromium", "chromium-browser") if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip("there is no Chromium here (on Debian: apt-get install chromium)")
    with sync_api.sync_playwright() as driver:
        flags = ["--no-sandbox", "--disable-gpu"]
        launched = driver.chromium.launch(executable_path=program, args=flags, timeout=_BROWSER_MILLISECONDS)
        yield launched
        launched.close()


@pytest.mark.skipif(MARP is None, reason="there is no Marp CLI here (npm install --global @marp-team/marp-cli)")
def test_slides_open_offline(run: tuple[Lab, Executed], browser: Any, tmp_path: Path) -> None:
    lab, executed = run
    page = tmp_path / "slides.html"
    page.write_text(to_html(slides_of(executed.notebook, lab.title), str(MARP)), encoding="utf-8")
    context = browser.new_context(viewport={"width": 1280, "height": 720}, offline=True)
    context.set_default_timeout(_BROWSER_MILLISECONDS)
    opened = context.new_page()
    requests: list[str] = []
    opened.on("request", lambda request: requests.append(request.url))
    opened.goto(page.as_uri())
    assert [address for address in requests if not address.startswith(("file:", "data:", "blob:"))] == []
    drawn = opened.evaluate("[...document.images].map(each => each.complete && each.naturalWidth > 0)")
    assert drawn
    assert all(drawn)
    # No content overflows its slide.
    outside = opened.evaluate(
        """[...document.querySelectorAll("section")].filter(each => each.scrollHeight > each.clientHeight + 2)
            .map(each => each.textContent.slice(0, 40))"""
    )
    assert outside == []
    context.close()
