"""A real browser without a window, and pages opened in it, with everything noted that a page should not do."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--no-first-run", "--disable-quic",
)  # fmt: skip
_PATIENCE_MS = 90_000


class OpenedPage:
    """A page in the browser.

    Attributes:
        page: Playwright's.
        requests: Addresses that it asked for.
        messages: Whatever it wrote to the console, and errors that nobody caught.
    """

    def __init__(self, page: Any) -> None:
        self.page = page
        self.requests: list[str] = []
        self.messages: list[str] = []
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("console", lambda message: self.messages.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.messages.append(str(error)))
        page.on("dialog", lambda dialog: self.messages.append(f"dialog: {dialog.message}") or dialog.dismiss())

    def figure(self, title: str) -> dict[str, Any]:
        """What Plotly has drawn in the chart of that title: its data, read from the page."""
        found = self.page.evaluate(
            """title => {
                const chart = [...document.querySelectorAll("figure.chart")].find(
                    each => each.querySelector("figcaption").textContent.trim().endsWith(" " + title));
                const plot = chart.querySelector(".plot");
                const plain = array => array === undefined ? [] : Array.from(array);
                return plot.data.map(trace => ({name: trace.name, x: plain(trace.x), y: plain(trace.y)}));
            }""",
            title,
        )
        return {trace["name"]: list(zip(trace["x"], trace["y"], strict=True)) for trace in found}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium; its tests are skipped, and say so, where there is none.

    It is gone after each file, since tests of others count the children of this process.
    """
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = next((found for name in _NAMES if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip("there is no Chromium here (on Debian: apt-get install chromium)")
    with sync_api.sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=program, args=list(_FLAGS), timeout=_PATIENCE_MS)
        yield launched
        launched.close()


@pytest.fixture
def show(browser: Any) -> Iterator[Callable[..., OpenedPage]]:
    """``show(path, width=…, scheme=…, before=…)`` opens a page, or a URL, and waits until its charts are drawn."""
    contexts = []

    def open_page(
        path: Path | str, *, width: int = 1280, scheme: str = "light", before: str = "", drawn: bool = True
    ) -> OpenedPage:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        context.set_default_timeout(_PATIENCE_MS)
        opened = OpenedPage(context.new_page())
        if before:
            opened.page.add_init_script(before)
        opened.page.goto(path if isinstance(path, str) else path.resolve().as_uri())
        if drawn:
            opened.page.wait_for_selector("html[data-drawn]", state="attached")
        return opened

    yield open_page
    for context in contexts:
        context.close()
