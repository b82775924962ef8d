"""Is a page whole, does it load nothing, and does nothing in it run that was only a name?"""

from __future__ import annotations

import base64
import gzip
import html.parser
import json
import math
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.errors import RunDirectoryError
from paceline.pages import page as pages
from paceline.pages.charts import figures_table
from paceline.pages.page import Block, Chart, Gallery, Marked, Page, Picture, Section, Table, Text, Tile, Tiles

HOSTILE = "</script><img src=x onerror=alert(1)>\u2028`\"'&"
PIXEL = "data:image/png;base64,iVBORw0KGgo="


class Elements(html.parser.HTMLParser):
    """The elements of a page, each with its attributes and the text right inside it."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.feed(document)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs), []))

    def handle_endtag(self, tag: str) -> None:
        self.found.append((f"/{tag}", {}, []))

    def handle_data(self, data: str) -> None:
        if self.found:
            self.found[-1][2].append(data)

    def of(self, tag: str) -> list[tuple[dict[str, str | None], str]]:
        return [(attributes, "".join(text)) for name, attributes, text in self.found if name == tag]


def document(tmp_path: Path, *blocks: Block, title: str = "a page") -> str:
    page = Page(title=title, subtitle="", sections=(Section(title="one", blocks=blocks),))
    return pages.write_page(tmp_path / "page.html", page).read_text(encoding="utf-8")


def figures(text: str) -> dict[str, Any]:
    found = next(inside for attributes, inside in Elements(text).of("script") if attributes.get("id") == "figures")
    used = json.loads(found)
    assert isinstance(used, dict)
    return used


def line(**trace: Any) -> Chart:
    return Chart(title="a line", traces=[{"x": [1, 2], "y": [3.0, 4.0], **trace}])


def test_figures_are_what_was_given(tmp_path: Path) -> None:
    y = [0.1 + 0.2, 1e-300, math.nan, math.inf, 5]
    found = figures(document(tmp_path, line(x=np.arange(5), y=y, name="a"), line(y=np.float32([1.5, 2.5]))))
    assert found["chart-1"]["data"][0]["x"] == [0, 1, 2, 3, 4]
    assert found["chart-1"]["data"][0]["y"] == [0.1 + 0.2, 1e-300, None, None, 5]
    assert found["chart-2"]["data"][0]["y"] == [1.5, 2.5]


def test_every_script_is_one_that_the_policy_knows(tmp_path: Path) -> None:
    elements = Elements(document(tmp_path, line()))
    policy = next(str(each["content"]) for each, _ in elements.of("meta") if "http-equiv" in each)
    assert "default-src 'none'" in policy
    assert "unsafe-inline" not in policy.split("script-src")[1].split(";")[0]
    scripts = [inside.encode() for attributes, inside in elements.of("script") if "type" not in attributes]
    packed = next(inside for attributes, inside in elements.of("script") if attributes.get("id") == "plotly")
    scripts.append(gzip.decompress(base64.b64decode(packed)))
    assert b"plotly.js" in scripts[-1][:100]
    assert len(scripts) == 2
    for script in scripts:
        assert base64.b64encode(sha256(script).digest()).decode() in policy


def test_the_script_that_draws_weighs_what_is_said(tmp_path: Path) -> None:
    text, packed = document(tmp_path, line()), pages.plotly_script()[0]
    assert len(gzip.decompress(base64.b64decode(packed))) / 1e6 == pytest.approx(4.8, rel=0.1)
    assert len(packed) / 1e6 == pytest.approx(2.0, rel=0.1)
    assert len(packed) < len(text) < len(packed) + 100_000
    assert len(document(tmp_path, Text("a page without charts"))) < 30_000


def test_nothing_that_a_run_is_called_becomes_an_element(tmp_path: Path) -> None:
    blocks: tuple[Block, ...] = (
        Text(HOSTILE, kind="bad"),
        Tiles((Tile(HOSTILE, HOSTILE, HOSTILE),)),
        Table(columns=("a", HOSTILE), rows=((HOSTILE, Marked(HOSTILE)),), caption=HOSTILE, folded=True),
        Gallery(pictures=(Picture(data=HOSTILE, caption=HOSTILE, alternative=HOSTILE),), caption=HOSTILE),
        Gallery(pictures=(Picture(data=f"{PIXEL}{HOSTILE}", caption="", alternative="a picture"),), caption=""),
        Chart(title=HOSTILE, description=HOSTILE, traces=[{"x": [HOSTILE], "y": [1], "name": HOSTILE}]),
    )
    text = document(tmp_path, *blocks, title=HOSTILE)
    elements = Elements(text)
    assert not elements.of("img")
    assert len(elements.of("script")) == 3
    assert not any(key.startswith("on") for _, attributes, _ in elements.found for key in attributes)
    assert "\u2028" not in next(inside for each, inside in elements.of("script") if each.get("id") == "figures")
    # Plotly makes links and more of angle brackets in its texts.
    assert "<" not in json.dumps(figures(text))


def test_only_pictures_are_shown_as_pictures(tmp_path: Path) -> None:
    cat = Picture(data=PIXEL, caption="a cat", alternative="a cat")
    text = document(tmp_path, Gallery(pictures=(cat,), caption=""))
    (image, _), *others = Elements(text).of("img")
    assert (image["src"], image["alt"], others) == (PIXEL, "a cat", [])


def test_a_table_stands_behind_each_chart(tmp_path: Path) -> None:
    traces = [{"x": [2, 1], "y": [20.0, 10.0], "name": "a"}, {"x": [1, 3], "y": [11.0, 31.0], "name": "b"}]
    table = figures_table(Chart(title="two", traces=traces, layout={"xaxis": {"title": "step"}}))
    assert list(table.columns) == ["step", "a", "b"]
    assert [list(row) for row in table.rows] == [[1, 10.0, 11.0], [2, 20.0, None], [3, None, 31.0]]
    many = figures_table(Chart(title="many", traces=[{"x": list(range(5000)), "y": list(range(5000))}]))
    assert len(many.rows) == 200
    assert (many.rows[0][0], many.rows[-1][0]) == (0, 4999)
    assert "200 of 5,000" in many.caption
    grid = figures_table(Chart(title="grid", traces=[{"type": "heatmap", "z": [[1, 2], [3, 4]], "x": ["p", "q"]}]))
    assert [list(row) for row in grid.rows] == [["0", 1, 2], ["1", 3, 4]]
    assert list(grid.columns) == ["", "p", "q"]
    bars = {"type": "bar", "y": ["x", "y"], "x": [1, 2], "orientation": "h", "name": "share"}
    assert [list(row) for row in figures_table(Chart(title="bars", traces=[bars])).rows] == [["x", 1], ["y", 2]]


def test_series_differ_in_more_than_colour(tmp_path: Path) -> None:
    found = figures(document(tmp_path, Chart(title="three", traces=[{"y": [1]}, {"y": [2]}, {"y": [3]}])))
    lines = found["chart-1"]["layout"]["template"]["data"]["scatter"]
    assert len({each["line"]["dash"] for each in lines}) >= 3


def test_a_folder_that_refuses_is_told_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match="Cannot make the folder"):
        pages.write_page(tmp_path / "file" / "page.html", Page(title="", subtitle="", sections=()))
    target = tmp_path / "folder"
    target.mkdir()
    with pytest.raises(RunDirectoryError, match="is a folder"):
        pages.write_page(target, Page(title="", subtitle="", sections=()))
    assert not list(tmp_path.glob(".*.tmp"))


def test_the_same_page_gives_the_same_file(tmp_path: Path) -> None:
    assert document(tmp_path, line()) == document(tmp_path, line())


def test_a_name_that_is_no_unicode_is_no_trouble(tmp_path: Path) -> None:
    assert "a\\udcffb" in document(tmp_path, Text("a\udcffb"), line(name="a\udcffb"))


def test_controls_and_marks_of_direction_are_written_out(tmp_path: Path) -> None:
    name = "a\x1b[2J\u202eb"
    table = Table(columns=(name,), rows=[(name,)], caption=name)
    found = document(tmp_path, Text(name), table, Tiles(tiles=[Tile(label=name, value=name, note=name)]))
    assert not {"\x1b", "\u202e"} & set(found)
    assert "a\\x1b[2J\\u202eb" in found
