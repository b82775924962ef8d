"""Is the plot a picture of its figures?"""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET

from paceline.studies.bench.plot import line_plot

SVG = "{http://www.w3.org/2000/svg}"


def test_points_lie_where_their_figures_say() -> None:
    lines = {"a & b": [(100.0, 90.0, 110.0), (200.0, 150.0, 250.0)], "c": [None, (50.0, -math.inf, math.inf)]}
    root = ET.fromstring(line_plot("title <1>", "samples/s", ["batch 1", "batch 2"], lines))
    texts = [each.text for each in root.iter(f"{SVG}text")]
    assert "title <1> (samples/s)" in texts
    assert {"a & b", "c", "batch 1", "batch 2"} <= set(texts)
    heights = [float(each.attrib["cy"]) for each in root.iter(f"{SVG}circle")]
    zero, ticks = None, {}
    for each in root.iter(f"{SVG}text"):
        if re.fullmatch(r"[\d,.]+", each.text or ""):
            ticks[float(str(each.text).replace(",", ""))] = float(each.attrib["y"]) - 4
    zero, top = ticks[0.0], max(ticks)
    per_unit = (zero - ticks[top]) / top
    assert [round((zero - height) / per_unit) for height in heights] == [100, 200, 50]
    # A figure without an interval has no whisker.
    whiskers = [each for each in root.iter(f"{SVG}line") if each.attrib["x1"] == each.attrib["x2"]]
    assert len(whiskers) == 2


def test_nothing_is_drawn_of_nothing() -> None:
    assert ET.fromstring(line_plot("none", "", [], {})) is not None
