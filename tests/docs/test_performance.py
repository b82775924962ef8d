"""The page of figures beside other trainers says what its result files say, losses first of all."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"


@pytest.fixture
def publish(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(PEERS)
    import publish

    yield publish
    sys.modules.pop("publish", None)


def of(*values: float) -> dict[str, float]:
    ordered = sorted(values)
    return {"median": ordered[len(ordered) // 2], "minimum": ordered[0], "maximum": ordered[-1], "runs": len(ordered)}


FACTS = {
    "cpu": "a processor", "cores": 2, "torch": "2.14.1", "python": "3.11.7", "date": "2026-11-23",
    "device": "cpu", "command": "compare.py loop-64", "revision": "abc1234", "load_average_before": 0.1,
}  # fmt: skip
STEP = ("step_milliseconds", "milliseconds a step", False)
IMAGES = ("images_per_second", "images/s", True)
PAUSE = ("pause_milliseconds", "milliseconds that a save costs", False)
TITLES = {"raw": "PyTorch, by hand", "timm": "timm 1.0.31", "lightning": "Lightning 2.6.6", "paceline": "Paceline"}
TITLES["paceline-packed"] = "Paceline, packed"


def result(title: str, figure: tuple[str, str, bool], measured: dict[str, Any], **failed: str) -> dict[str, Any]:
    key, said, is_more_better = figure
    contenders = {name: {"title": TITLES[name], "values": of(*values)} for name, values in measured.items()}
    return {
        "title": title,
        "facts": FACTS,
        "failed": failed,
        "rounds": {name: [{key: value} for value in values] for name, values in measured.items()},
        "figures": {key: {"title": said, "more_is_better": is_more_better, "contenders": contenders}},
    }


LOOP = {"raw": (57, 61, 65.1), "timm": (26.7, 27.45, 29.45), "paceline": (30, 30.5, 31)}
DDP = {"raw": (980, 990, 995), "lightning": (400, 500, 500), "paceline": (1000, 1000, 1000)}
RESULTS: dict[str, Any] = {
    "loop-64": result("loop overhead: a small network", STEP, LOOP),
    "ddp-2": result("two processes", IMAGES, DDP, timm="timm ended with exit code 1:\nand more"),
}


def test_times_and_rates_become_costs_in_one_direction(publish: Any) -> None:
    steps, images = publish.rows(RESULTS)
    assert steps.costs["raw"] == pytest.approx((2, 1.9, 2.1))
    assert images.costs["lightning"] == pytest.approx((2, 2, 2.5)), "half the images a second is twice the time"


def test_the_page_names_who_is_ahead_and_who_failed(publish: Any) -> None:
    table, _, rest = publish.page(RESULTS).partition("## Where another is ahead")
    ahead, _, figures = rest.partition("## In figures")
    assert "| small network, batch 64: milliseconds a step | 2.00 | **0.90** | — |" in table
    assert "time for the same images | 1.01 | failed | 2.00 |" in table
    assert "milliseconds a step**: timm 1.0.31 0.90 (0.89 to 0.95), in 3 of 3." in ahead
    assert "images" not in ahead, "who takes more is not ahead"
    assert "timm failed at ddp-2: timm ended with exit code 1:" in figures
    assert "| | Paceline | PyTorch, by hand | timm 1.0.31 | Lightning 2.6.6 |" in figures
    assert "| small network, batch 64: milliseconds a step | 30.5 | 61 | 27.4 | — |" in figures


def test_in_how_many_rounds_somebody_was_ahead_is_said(publish: Any) -> None:
    results = copy.deepcopy(RESULTS)
    rounds = results["loop-64"]["rounds"]["timm"]
    rounds[1]["step_milliseconds"] = 30.8
    text = publish.page(results)
    assert "timm 1.0.31 0.95 (0.89 to 1.01), in 2 of 3." in text
    assert "| ***0.95*** |" in text, "less, but not in each round"
    rounds[0]["step_milliseconds"] = 30.2
    text = publish.page(results)
    assert "\nNobody.\n" in text, "more in two of three rounds"
    assert "| *1.01* |" in text


def test_a_figure_that_was_nothing_in_a_round_has_no_ratio(publish: Any) -> None:
    results = {**RESULTS, "checkpoint": result("checkpoints", PAUSE, LOOP)}
    assert len(publish.rows(results)) == 3
    assert "milliseconds that a save costs**: timm 1.0.31 0.90 (0.89 to 0.95), in 3 of 3" in publish.page(results)
    results["checkpoint"]["rounds"]["raw"][0]["pause_milliseconds"] = 0
    assert len(publish.rows(results)) == 2
    told = "milliseconds that a save costs**: timm 1.0.31 27 (27 to 29), in 3 of 3. Paceline 30 (30 to 31)."
    assert told in publish.page(results)


@pytest.mark.parametrize(
    ("theirs", "ours", "said"),
    [
        # Theirs are less than ours by 564, and more by 155 and 148: the middle one of the medians says otherwise.
        ((272, 829, 631), (836, 674, 483), "Nobody."),
        ((10, 12, 11), (-5, -6, -4), "Nobody."),
        ((-20, -22, -21), (-5, -6, -4), "timm 1.0.31 -21 (-22 to -20), in 3 of 3. Paceline -5 (-6 to -4)."),
        ((-9, 3, -2), (0, 0, 0), "timm 1.0.31 -2 (-9 to 3), in 2 of 3. Paceline 0 (0 to 0)."),
    ],
)
def test_what_may_be_about_nothing_is_compared_round_by_round(publish: Any, theirs: Any, ours: Any, said: str) -> None:
    (line,) = publish.ahead({"checkpoint": result("checkpoints", PAUSE, {"timm": theirs, "paceline": ours})})
    assert said in line


def test_it_writes_and_checks(publish: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "newest", lambda: RESULTS)
    monkeypatch.setattr(publish, "ROOT", tmp_path)
    page = tmp_path / "performance.md"
    monkeypatch.setattr(publish, "PAGE", page)
    monkeypatch.setattr(sys, "argv", ["publish.py"])
    publish.main()
    monkeypatch.setattr(sys, "argv", ["publish.py", "--check"])
    publish.main()
    page.write_text(page.read_text().replace("**0.90**", "1.00"))
    with pytest.raises(SystemExit, match=r"performance\.md is not what the result files say"):
        publish.main()


def test_what_a_gpu_measured_has_a_section_and_a_machine_of_its_own(publish: Any) -> None:
    assert "Nothing here was measured on a GPU" in publish.page(RESULTS)
    facts = {**FACTS, "device": "NVIDIA H200", "cores": 16, "torch": "2.11.0", "python": "3.12.3"}
    fast = (1100, 1200, 1200)
    measured = result("ResNet-50 on a GPU", IMAGES, {**DDP, "raw": fast, "paceline-packed": fast})
    resident = {**measured, "facts": facts}
    cpu, _, gpu = publish.page({**RESULTS, "gpu-resident": resident}).partition("## On a GPU")
    assert "Nothing here was measured on a GPU" not in cpu
    assert "ResNet-50" not in cpu, "two machines are not in one table"
    assert "Measured on NVIDIA H200 with 16 cores, PyTorch 2.11.0" in gpu
    assert "| ResNet-50 on a GPU: time for the same images | **0.83** | 2.00 | **0.83** |" in gpu
    assert "PyTorch, by hand 0.83 (0.83 to 0.91)" in gpu
    assert "Paceline, packed 0.83" not in gpu, "another way of ours is nobody else"
    folder = {**resident, "facts": {**facts, "device": "NVIDIA H100"}}
    with pytest.raises(SystemExit, match="the result files differ in device"):
        publish.page({**RESULTS, "gpu-resident": resident, "gpu-folder": folder})


def test_the_newest_file_of_a_month_counts(publish: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "RESULTS", tmp_path)
    for name, date in (("aaa", "2026-11-24"), ("zzz", "2026-11-23")):
        told = {**RESULTS["loop-64"], "facts": {**FACTS, "cpu": name, "date": date}}
        (tmp_path / f"peers-loop-64_{name}_2026-11.json").write_text(json.dumps(told))
    assert publish.newest()["loop-64"]["facts"]["cpu"] == "aaa"
