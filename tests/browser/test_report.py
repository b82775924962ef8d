"""A report in a real browser: it asks for nothing, complains of nothing, and shows what events.jsonl says."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calls import Call, in_a_process
from PIL import Image

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

HOSTILE = '</script><img src=x onerror="window.harmed=1"><script>window.harmed=1</script>'
TINY = (
    "model.options={width: 4, stages: 1}",
    "data.augment=null",
    "train.duration=60 steps",
    "train.ema=0.9",
    "evaluate.every=15 steps",
    "checkpoint.every=30 steps",
    "telemetry.log_every=4 steps",
    "telemetry.trackers=[]",
    "parallel.device=cpu",
    "parallel.threads=1",
)


@pytest.fixture(scope="module")
def folder(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that was stopped and resumed, another, and predictions of classes with hostile names."""
    folder = tmp_path_factory.mktemp("reports")
    train = ("train", "digits", *TINY, "--run-dir")
    in_a_process(*train, "resumed", "--until", "30 steps", cwd=folder).ended(75)
    in_a_process(*train, "resumed", cwd=folder).ended(0)
    in_a_process(*train, "other", "optimizer.lr=0.05", cwd=folder).ended(0)
    for run in ("resumed", "other"):  # so little waiting that the ticks lie closer than whole percents
        events = folder / run / "events.jsonl"
        events.write_text(re.sub(r'("data_wait_fraction": ?)[\d.e-]+', r"\g<1>0.013", events.read_text()))
    kept = folder / "resumed" / "evaluation"
    kept.mkdir(exist_ok=True)
    names = [HOSTILE, *(f"a class with quite a long name, number {at}" for at in range(1, 10))]
    matrix = [[30 if at == to else (at * to) % 3 for to in range(10)] for at in range(10)]
    head = {"classes": names, "weights": "ema", "step": 60}
    bins = [{"samples": at, "right": at // 2, "probability": 0.1 * at + 0.05 if at else None} for at in range(10)]
    (kept / "confusion.json").write_text(json.dumps({**head, "matrix": matrix, "reliability": bins}))
    picture = io.BytesIO()
    Image.new("RGB", (8, 8), (90, 120, 30)).save(picture, "PNG")
    data = "data:image/png;base64," + base64.b64encode(picture.getvalue()).decode()
    shown = [{"image": data, "label": 0, "predicted": at % 3, "probability": 0.5, "sample": at} for at in range(12)]
    (kept / "examples.json").write_text(json.dumps({**head, "examples": shown}))
    in_a_process("report", "resumed", cwd=folder).ended(0)
    in_a_process("report", "resumed", "other", "--output", "both.html", cwd=folder).ended(0)
    return folder


def events(run: Path, kind: str, **expected: str) -> list[dict[str, Any]]:
    reported = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [each for each in reported if each["event"] == kind and expected.items() <= each.items()]


def points(found: list[dict[str, Any]], key: str) -> list[tuple[int, float | None]]:
    return [(each["step"], each[key]) for each in found]


def test_nothing_is_asked_for_and_nothing_goes_wrong(folder: Path, show: Call) -> None:
    for name in ("resumed/report.html", "both.html"):
        opened = show(folder / name)
        opened.page.mouse.wheel(0, 100_000)
        opened.page.hover(".plot")
        assert opened.requests == [(folder / name).resolve().as_uri()]
        assert opened.messages == []
        # Even a script that got in could not ask for anything.
        refused = opened.page.evaluate("fetch('https://example.invalid/').then(() => 'asked', () => 'refused')")
        assert refused == "refused"
        assert len(opened.requests) == 1


def test_charts_show_what_the_records_say(folder: Path, show: Call) -> None:
    opened = show(folder / "resumed" / "report.html")
    steps = events(folder / "resumed", "step")
    assert len(steps) == 15
    assert opened.figure("Learning rate")["learning rate"] == points(steps, "lr")
    loss, accuracy = opened.figure("Loss"), opened.figure("Top-1 accuracy")
    assert loss["training"] == points(steps, "loss")
    for weights in ("model", "ema"):
        found = events(folder / "resumed", "evaluation", weights=weights)
        assert len(found) == 4
        assert loss[f"held-out, {weights}"] == points(found, "loss")
        assert accuracy[f"held-out, {weights}"] == points(found, "top1_accuracy")
    assert len(opened.figure("The run over time")["launch"]) == 2
    marks = opened.page.evaluate(
        "[...document.querySelectorAll('.plot')].map(plot => (plot.layout.shapes || []).map(each => each.x0))"
    )
    assert [30] in marks


def test_runs_are_overlaid(folder: Path, show: Call) -> None:
    opened = show(folder / "both.html")
    found = opened.figure("Throughput")
    for run in ("resumed", "other"):
        assert found[run] == points(events(folder / run, "step"), "throughput_samples_per_second")
    rates = opened.page.locator("tr", has=opened.page.locator("th", has_text="optimizer.lr")).first
    assert re.search(r"0\.05", rates.inner_text())
    assert rates.locator("mark").inner_text() == "0.05"


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", ["resumed/report.html", "both.html"])
def test_nothing_is_cut_off_or_lies_upon_another(folder: Path, show: Call, name: str, width: int) -> None:
    page = show(folder / name, width=width).page
    assert page.evaluate("document.documentElement.scrollWidth") == width
    cut = page.evaluate(
        """() => [...document.querySelectorAll("h1, h2, p, dt, dd, figcaption, summary, li > a, th, td")]
            .filter(each => each.getClientRects().length && getComputedStyle(each).position !== "absolute")
            .filter(each => each.scrollWidth > each.clientWidth + 1 && each.clientWidth > 0
                && !["inline", "table-cell"].includes(getComputedStyle(each).display))
            .map(each => each.outerHTML.slice(0, 100))"""
    )
    assert cut == []
    boxes = page.evaluate(
        """() => [...document.querySelectorAll("figure.chart")].map(each => each.getBoundingClientRect())
            .map(({left, right, top, bottom}) => [left, right, top, bottom])"""
    )
    assert len(boxes) >= 9
    for at, (remaining, right, top, bottom) in enumerate(boxes):
        assert 0 <= remaining < right <= width
        for other in boxes[at + 1 :]:
            assert right <= other[0] or other[1] <= remaining or bottom <= other[2] or other[3] <= top
    outside = page.evaluate(
        """() => [...document.querySelectorAll(".plot")].flatMap(plot => {
            const box = plot.getBoundingClientRect();
            return [...plot.querySelectorAll("svg text")].map(text => [text, text.getBoundingClientRect()])
                .filter(([text, at]) => at.width && (at.left < box.left - 2 || at.right > box.right + 2
                    || at.top < box.top - 2 || at.bottom > box.bottom + 2))
                .map(([text]) => plot.id + ": " + text.textContent);
        })"""
    )
    assert outside == []


@pytest.mark.everyday
def test_every_chart_is_drawn(folder: Path, show: Call) -> None:
    for plot in show(folder / "resumed" / "report.html").page.locator(".plot").all():
        pixels = np.asarray(Image.open(io.BytesIO(plot.screenshot())).convert("RGB"))
        colours = np.unique(pixels.reshape(-1, 3), axis=0)
        coloured = [colour for colour in colours if int(colour.max()) - int(colour.min()) > 60]
        # Axes and their words are grey.
        assert coloured or len(colours) > 100, plot.get_attribute("aria-label")


@pytest.mark.parametrize("name", ["resumed/report.html", "both.html"])
def test_no_two_ticks_of_an_axis_say_the_same(folder: Path, show: Call, name: str) -> None:
    axes = show(folder / name).page.evaluate(
        """() => [...document.querySelectorAll(".plot")].flatMap(plot => [".xtick", ".ytick"].map(
            axis => [...plot.querySelectorAll(axis + " text")].map(each => each.textContent)))"""
    )
    assert sum(len(each) > 2 for each in axes) > 15
    assert [each for each in axes if len(set(each)) < len(each)] == []


def luminance(colour: str) -> float:
    channels = [int(each) / 255 for each in re.findall(r"\d+", colour)[:3]]
    linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


COLOURS = """() => {
    const of = (selector, what) => getComputedStyle(document.querySelector(selector))[what];
    return {page: of("body", "backgroundColor"), card: of(".chart", "backgroundColor"), text: of("body", "color"),
            note: of(".description", "color"), link: of("summary", "color"), tick: of(".plot .xtick text", "fill"),
            lines: [...document.querySelectorAll(".plot .js-line")].map(each => getComputedStyle(each).stroke)};
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read_in_light_and_dark(folder: Path, show: Call, scheme: str) -> None:
    page = show(folder / "resumed" / "report.html", scheme=scheme).page
    for pressed in (scheme == "dark", scheme != "dark"):
        colours = page.evaluate(COLOURS)
        assert (luminance(colours["page"]) < 0.1) == pressed
        for text in ("text", "note", "link", "tick"):
            assert contrast(colours[text], colours["card"]) >= 4.5, text
            assert contrast(colours[text], colours["page"]) >= 4.5, text
        assert colours["lines"]
        assert all(contrast(line, colours["card"]) >= 3 for line in colours["lines"])
        assert page.inner_text("#theme") == ("Light theme" if pressed else "Dark theme")
        page.click("#theme")
        page.wait_for_function(
            f"getComputedStyle(document.querySelector('.plot .xtick text')).fill != '{colours['tick']}'"
        )
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert luminance(page.evaluate(COLOURS)["page"]) > 0.8


def test_it_can_be_used_by_keyboard_and_heard(folder: Path, show: Call) -> None:
    page = show(folder / "resumed" / "report.html").page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    page.wait_for_function("document.activeElement.id == 'content'")
    page.focus("#theme")
    page.keyboard.press("Space")
    assert page.inner_text("#theme") == "Light theme"
    page.focus("figure.chart summary")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
    page.keyboard.press("Enter")
    assert page.locator("figure.chart details[open] table").first.is_visible()
    # A table that scrolls can be reached.
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.getAttribute('role')") == "region"
    assert page.get_attribute("html", "lang") == "en"
    assert page.locator("main").count() == page.locator("h1").count() == page.locator("header").count() == 1
    for plot in page.locator(".plot").all():
        assert len(str(plot.get_attribute("aria-label"))) > 4
    assert page.locator("h2").all_inner_texts() == page.locator("nav a").all_inner_texts()


def test_a_name_does_nothing(folder: Path, show: Call) -> None:
    opened = show(folder / "resumed" / "report.html")
    assert opened.page.evaluate("window.harmed") is None
    assert opened.page.locator("img:not(.gallery img)").count() == 0
    galleries = opened.page.locator(".gallery").all()  # wrong and right answers, the first batch
    assert [each.locator("img").count() for each in galleries] == [8, 4, 12]
    assert opened.page.locator("td, th", has_text=HOSTILE).count() > 0
    assert opened.page.locator(".plot a").count() == 0


def test_an_old_browser_is_told_where_the_figures_are(folder: Path, show: Call) -> None:
    opened = show(folder / "resumed" / "report.html", before="delete window.DecompressionStream", drawn=False)
    opened.page.wait_for_selector("#trouble:not([hidden])")
    assert "too old" in opened.page.inner_text("#trouble")
    opened.page.click("figure.chart summary >> nth=0")
    assert opened.page.locator("figure.chart table").first.locator("tr").count() == 1 + 10  # classes
