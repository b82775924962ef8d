"""`paceline landscape` as it is called: its table, its JSON, its page, its processes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

from calls import Call

QUICK = (
    "--samples", "64", "--points", "3", "--grid", "3", "--iterations", "2", "--products", "3", "--tolerance", "0.5",
)  # fmt: skip


def test_a_look_at_a_run(paceline_here: Call, finished: Path, tmp_path: Path) -> None:
    done = paceline_here("landscape", finished, *QUICK, "--output", "seen").ended(0)
    assert "sharpness 0.001 (%)" in done.out
    assert "top eigenvalue" in done.out
    written = json.loads((tmp_path / "seen" / "landscape.json").read_text())
    shown = paceline_here("landscape", finished, *QUICK, "--json").document
    assert shown == written
    assert shown["runs"][0]["surface"]["values"]["loss"]
    assert "Loss around the weights, rotatable" in (tmp_path / "seen" / "landscape.html").read_text()
