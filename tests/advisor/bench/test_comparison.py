"""The gate fails slower results and passes others; on made-up results, whose truth is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.errors import RunDirectoryError
from paceline_advisor.bench.comparison import compare

REPEATS = 300


def result(path: Path, rows: dict[int, Any], *, cpu: str = "one", kind: str = "throughput") -> Path:
    """A result with seconds per sample by batch size."""
    message = {
        "device": "cpu",
        "precision": "fp32",
        "backend": "memory",
        "part": "together",
        "times": [],
        "trouble": None,
    }
    documents = [
        {**message, "batch_size": size, "trouble" if isinstance(times, str) else "times": times}
        for size, times in rows.items()
    ]
    document = {"format": 1, "kind": kind, "rows": documents, "environment": {"cpu": {"model": cpu}}}
    path.write_text(json.dumps(document))
    return path


def launches(generator: np.random.Generator, slower: float = 1.0, *, count: int, between: float) -> list[list[float]]:
    """Rounds of several launches, which differ from one another too."""
    means = slower * np.exp(generator.normal(0, between, (count, 1)))
    return (1e-3 * means * np.exp(generator.normal(0, 0.02, (count, 5)))).tolist()


def alarms(folder: Path, slower: float, *, rows: int, count: int, between: float, tolerance: float = 0.0) -> float:
    generator, found = np.random.default_rng(rows + count), 0
    for _ in range(REPEATS):
        a, b = (
            {size: launches(generator, factor, count=count, between=between) for size in range(rows)}
            for factor in (1.0, slower)
        )
        found += compare(result(folder / "a", a), result(folder / "b", b), tolerance=tolerance).regressed
    return found / REPEATS


@pytest.mark.parametrize(("rows", "count", "between"), [(1, 1, 0.0), (6, 1, 0.0), (1, 4, 0.03), (6, 4, 0.03)])
def test_equal_things_pass(tmp_path: Path, rows: int, count: int, between: float) -> None:
    # 5 % with three standard errors of so many repeats; launches that differ make no false alarm.
    assert alarms(tmp_path, 1.0, rows=rows, count=count, between=between) <= 0.05 + 3 * (0.05 * 0.95 / REPEATS) ** 0.5


def test_what_is_slower_by_less_than_the_tolerance_passes(tmp_path: Path) -> None:
    assert alarms(tmp_path, 1.05, rows=2, count=4, between=0.02, tolerance=0.05) <= 0.09


def test_what_is_slower_does_not_pass(tmp_path: Path) -> None:
    assert alarms(tmp_path, 1.10, rows=3, count=1, between=0.0) > 0.9
    assert alarms(tmp_path, 1.20, rows=3, count=6, between=0.02, tolerance=0.05) > 0.9


def test_verdicts(tmp_path: Path) -> None:
    steady = [[1.00, 1.01, 1.02, 1.01, 1.00]]
    a = result(tmp_path / "a", {1: steady, 2: steady, 4: steady, 8: [[1.0, 2.0, 3.0]], 16: steady, 32: steady})
    slow, fast = [[1.5 * x for x in steady[0]]], [[0.5 * x for x in steady[0]]]
    rows = {1: steady, 2: slow, 4: fast, 8: [[1.0, 3.0, 2.0]], 16: "out of memory"}
    found = compare(a, result(tmp_path / "b", rows, cpu="other"))
    verdicts = ["no slower", "slower", "faster", "not enough evidence", "not comparable", "not comparable"]
    assert [line.verdict for line in found.lines] == verdicts
    assert "batch_size=2" in found.lines[1].name
    assert found.lines[1].slower is not None
    assert found.lines[1].slower.middle == pytest.approx(1.5)
    assert "out of memory" in found.lines[4].note
    assert "A only" in found.lines[5].note
    assert (found.regressed, bool(found.undecided)) == (True, True)
    assert found.differences == {"cpu.model": ("one", "other")}
    assert "single launch" in found.notes[0]
    json.dumps(found.to_json())


def test_two_runs_are_compared_by_their_step_records(tmp_path: Path) -> None:
    def run(name: str, rate: float) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "recipe.yaml").write_text("task: image_classification\n")
        noise = np.random.default_rng(len(name)).normal(1, 0.02, 40)
        rates = [None, *(rate * each for each in noise[1:])]
        message = {"event": "step", "time": 0.0}
        lines = [{**message, "step": at, "throughput_samples_per_second": each} for at, each in enumerate(rates)]
        (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return folder

    before, same, slow = run("before", 1000), run("same!!!", 1000), run("slow", 850)
    assert not compare(before, same).regressed
    found = compare(before, slow)
    assert found.regressed
    assert found.lines[0].slower is not None
    assert found.lines[0].slower.count == 10
    (slow / "recipe.yaml").write_text("task: image_classification\nmodel: {name: resnet50}\n")
    found = compare(before, slow)
    assert found.differences == {"recipe.model.name": (None, "resnet50")}
    assert "not of the same recipe: recipe.model.name differ" in found.notes[-1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "holds no benchmark result"),
        ("{", "cannot be read"),
        ("{}", "not a benchmark result"),
        ('{"kind": "latency"}', "not a benchmark result"),
    ],
)
def test_what_is_no_result_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    good = result(tmp_path / "good", {1: [[1.0, 1.0]]})
    if content is not None:
        (tmp_path / "bad").write_text(content)
    with pytest.raises(RunDirectoryError, match=message):
        compare(good, tmp_path / "bad")


def test_what_has_nothing_in_common_is_refused(tmp_path: Path) -> None:
    a, b = result(tmp_path / "a", {1: [[1.0, 1.0]]}), result(tmp_path / "b", {2: [[1.0, 1.0]]})
    with pytest.raises(RunDirectoryError, match="no measurement in common"):
        compare(a, b)
    with pytest.raises(RunDirectoryError, match="same kind"):
        compare(a, result(tmp_path / "c", {}, kind="time_to_target"))
