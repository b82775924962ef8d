"""Each page as its readers need it: light or dark, wide or narrow, by mouse or by keyboard alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from calls import Call, in_a_process
from PIL import Image
from serving import Serving

for _library in ("fastapi", "prometheus_client", "uvicorn", "python_multipart"):
    pytest.importorskip(_library, reason=f"{_library} is not installed: pip install 'paceline[serve]'")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

QUIET = (
    "train.duration=4 steps",
    "evaluate.every=2 steps",
    "telemetry.log_every=1 steps",
    "telemetry.trackers=[]",
    "parallel.device=cpu",
    "parallel.threads=1",
)
DIGITS = ("digits", "model.options={width: 4, stages: 1}", "data.augment=null")
TEXTS = ("model.options={width: 16, depth: 1, heads: 1}", "data.text.context=64")
SHAPES = (
    "data.detection.generated={samples: 10, evaluation_samples: 5, smallest_side: 32, largest_side: 48, objects: 2}"
)
RUNS = {
    "digits": DIGITS,
    "other": (*DIGITS, "optimizer.lr=0.05"),
    "texts": ("gpt-small-docs", *TEXTS),
    "topics": ("docs-topics", *TEXTS),
    "numbers": ("discs",),
    "pixels": ("shapes-segmentation", SHAPES, "model.options={width: 2, stages: 1}", "batch.global_size=4"),
    "boxes": ("shapes-maskrcnn", SHAPES, "batch.global_size=4"),
}
OWN = """
import paceline, torch
pairs = [(each, each[:1]) for each in torch.randn(32, 3)]
paceline.fit(torch.nn.Linear(3, 1), pairs, pairs[:8], loss=torch.nn.MSELoss(), epochs=2, run_dir="own")
"""
SERVED = ("digits", "texts", "topics", "pixels", "boxes")
FILES = (*(f"{run}/report.html" for run in (*RUNS, "own")), "both.html", "record.html", "difference/diff.html")
READER = Path(__file__).with_name("reader.js").read_text(encoding="utf-8")
# The element with the focus, and whether its outline, or that of the label around it, is seen.
FOCUS = """() => {
    const each = document.activeElement;
    if (each === document.body || each.dataset.visited) return null;
    each.dataset.visited = "yes";
    const seen = [each, each.closest("label")].some(at => at && getComputedStyle(at).outlineStyle !== "none");
    return [each.outerHTML.slice(0, 90), seen];
}"""
UNREACHED = """() => [...document.querySelectorAll("a[href], button, input, select, textarea, summary")]
    .filter(each => each.getClientRects().length && !each.disabled && !each.dataset.visited)
    .map(each => each.outerHTML.slice(0, 90))"""


@pytest.fixture(scope="module")
def folder(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short runs and the pages about them, and a folder of photos of which two are the same."""
    folder = tmp_path_factory.mktemp("pages")
    for name, options in RUNS.items():
        in_a_process("train", *options, *QUIET, "--run-dir", name, cwd=folder).ended(0)
    subprocess.run([sys.executable, "-c", OWN], cwd=folder, check=True, capture_output=True)
    in_a_process("report", "digits", "other", "--output", "both.html", cwd=folder).ended(0)
    in_a_process("record", "digits", "--output", "record.html", cwd=folder).ended(0)
    in_a_process("diff", "digits", "other", "--output", "difference", cwd=folder).ended(1)
    for name in ("cat/1", "cat/2", "dog/1", "dog/2"):
        path = folder / "photos" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.radial_gradient("L").crop((0, 0, 60 + len(list(path.parent.iterdir())), 50)).save(path)
    return folder


@contextmanager
def _at(page: str, folder: Path) -> Iterator[str]:
    if page in FILES:
        yield (folder / page).resolve().as_uri()
        return
    command, target = page.split()
    service = Serving(folder / target, folder, command=command)
    try:
        yield service.said["url"]
    finally:
        assert service.stop() == 0


def _ask(page: Any, folder: Path) -> None:
    """Let a service answer, if the page is of one that does."""
    if page.query_selector("#files"):
        page.set_input_files("#files", [folder / "photos/cat/1.png", folder / "record.html"])
    elif page.query_selector("#text"):
        page.fill("#text", "def breakpoint")
        page.keyboard.press("Control+Enter")
    else:
        return
    page.wait_for_selector("#status:has-text('answered')")
    page.evaluate("scrollTo(0, 0); document.activeElement.blur()")


@pytest.mark.parametrize("name", [*FILES, *(f"serve {run}" for run in SERVED), "review photos"])
def test_it_can_be_read_and_used_by_keyboard(folder: Path, show: Call, name: str) -> None:
    with _at(name, folder) as address:
        for scheme, width in (("light", 1280), ("dark", 390)):
            opened = show(address, drawn=False, scheme=scheme, width=width)
            page = opened.page
            drawn = {"#figures": "html[data-drawn]", "#pictures": "#pictures img"}
            for wait in [drawn[part] for part in drawn if page.query_selector(part)]:
                page.wait_for_selector(wait, state="attached")
            _ask(page, folder)
            assert page.evaluate(READER) == []
            visited = []
            page.evaluate("document.body.tabIndex = -1; document.body.focus()")
            for _ in range(200):
                page.keyboard.press("Tab")
                if (focused := page.evaluate(FOCUS)) is None:
                    break
                visited.append(focused)
            assert [element for element, seen in visited if not seen] == []
            assert page.evaluate(UNREACHED) == []
            assert 2 < len(visited) < 200
            assert opened.messages == []
