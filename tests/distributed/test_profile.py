"""Several processes profile the same steps, each for itself, and train as they would have."""

from __future__ import annotations

import json
from pathlib import Path

from calls import Call

RECIPE = """
model: {name: small_resnet, options: {width: 4, stages: 1, depth: 1}}
data: {dataset: digits}
batch: {global_size: 32}
optimizer: {lr: 0.05}
schedule: {name: constant}
train: {duration: 6 steps, precision: fp32}
evaluate: {every: off}
checkpoint: {every: off}
parallel: {device: cpu, threads: 1}
telemetry: {log_every: 1 steps, trackers: [], report: off}
"""


def test_all_ranks_or_the_first_write_their_own(tmp_path: Path, train_in_ranks: Call) -> None:
    asked = {"telemetry.profile.steps": 2, "telemetry.profile.after": "2 steps"}
    runs = [("plain", {}), ("first", asked), ("all", {**asked, "telemetry.profile.ranks": "all"})]
    done = train_in_ranks(tmp_path, RECIPE, 2, *runs)
    assert done["first"] == done["all"] == done["plain"]
    written = {name: sorted(path.name for path in (tmp_path / name).glob("profile/*/*")) for name, _ in runs}
    first = ["operators-rank0.md", "trace-rank0.json.gz"]
    both = [first[0], "operators-rank1.md", first[1], "trace-rank1.json.gz"]
    assert written == {"plain": [], "first": first, "all": both}
    lines = (tmp_path / "all" / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines].count("profile") == 1
