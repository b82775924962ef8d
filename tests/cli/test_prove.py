"""`paceline prove` as a user calls it: a table or one document, and an exit code that says how it came out."""

from __future__ import annotations

from pathlib import Path

import pytest
from calls import Call

SUMS = """
import paceline


class Sums(paceline.ImageClassification):
    def loss(self, model, batch):
        return super().loss(model, batch) * len(batch.ids)
"""
FRAGILE = """
import paceline


class Fragile(paceline.ImageClassification):
    def loss(self, model, batch):
        print("from the task")
        if batch.slice.step == 4:
            raise ValueError("no [bold] here")
        return super().loss(model, batch)
"""
NAMES = (
    *("order", "samples", "parameters", "gradient", "accumulation", "tail", "processes"),
    *("learning-rate", "moving-average", "training-mode", "dropout", "buffers", "metric", "run"),
)


@pytest.fixture
def alone(tiny: tuple[str, ...]) -> tuple[str, ...]:
    """A proof of one process."""
    return ("prove", "digits", *tiny, "--processes", "1")


def test_a_proof_is_a_table_with_a_line_for_each_check(
    paceline_here: Call, alone: tuple[str, ...], tmp_path: Path
) -> None:
    done = paceline_here(*alone).ended(0)
    shown = [line.split()[0] for line in done.out.splitlines() if line.startswith(" ") and line[1:2].isalpha()]
    assert tuple(shown) == ("check", *NAMES)
    assert "12 passed, 0 failed, 2 not applicable: 6 steps of 16 samples in 4 micro-batches, 1 process" in done.out
    assert "training with one batch a step" in done.err
    assert list(tmp_path.iterdir()) == []


def test_a_proof_that_fails_gives_advice_and_exit_code_1(
    paceline_here: Call, alone: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "sums.py").write_text(SUMS)
    done = paceline_here(*alone, "task=sums:Sums").ended(1)
    assert "\naccumulation: A task's loss is the mean over its micro-batch's samples" in done.out
    assert "0.25 times the expected gradient" in " ".join(done.out.split())
    assert "10 passed, 2 failed" in done.out


def test_a_run_that_fails_is_shown_with_what_it_said(
    paceline_here: Call, alone: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "fragile.py").write_text(FRAGILE)
    done = paceline_here(*alone, "task=fragile:Fragile").ended(1)
    assert "one-batch: ValueError: no [bold] here" in " ".join(done.out.split())
    assert "from the task" not in done.out
    assert "from the task" in done.err


def test_a_proof_speaks_json(paceline_here: Call, alone: tuple[str, ...]) -> None:
    document = paceline_here(*alone, "--json").document
    assert document["passed"] is True
    assert document["numbers"] == "float64"
    assert (document["processes"], document["samples"], document["evaluation_samples"]) == (1, 41, 37)
    assert tuple(check["name"] for check in document["checks"]) == NAMES
    for check in document["checks"]:
        assert check.keys() == {"name", "compared", "verdict", "difference", "limit", "found", "advice"}
        if check["verdict"] == "passed":
            assert 0 <= check["difference"] <= check["limit"]
