"""`paceline find-lr` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from calls import Call

from paceline.recipe.load import load_recipe

QUICK = ("--lowest", "1e-4", "--highest", "3", "--steps", "80", "--seeds", "1")


def test_a_range_test_is_told_and_applied(paceline_here: Call, tiny: tuple[str, ...], tmp_path: Path) -> None:
    done = paceline_here("find-lr", "digits", *tiny, *QUICK, "--apply", "better.yaml", "--output", "lr").ended(0)
    assert done.out.startswith("Range test of digits on ")
    for message in ("optimizer.lr=0.1", "valley", "steepest", "minimum", "slide", "written: lr/find-lr.html"):
        assert message in done.out
    assert "step 80 of 80" in done.err
    document = json.loads((tmp_path / "lr" / "find-lr.json").read_text())
    applied = load_recipe(tmp_path / "better.yaml").recipe.optimizer.lr
    assert applied == pytest.approx(document["suggestions"]["median"]["lr"], rel=0.01)
    assert f"better.yaml: the recipe with optimizer.lr={applied:g}" in done.out


def test_another_suggestion_is_one_document(paceline_here: Call, tiny: tuple[str, ...], tmp_path: Path) -> None:
    words = ("--suggestion", "steepest", "--apply", "better.yaml", "--json")
    found = paceline_here("find-lr", "digits", *tiny, *QUICK, *words).ended(0).document
    assert found["recipe"] == "digits"
    assert len(found["lrs"]) == len(found["losses"]) == len(found["smoothed"]) == found["stop"]["steps"]
    assert found["settings"]["steps"] == 80
    applied = load_recipe(tmp_path / "better.yaml").recipe.optimizer.lr
    assert applied == pytest.approx(found["suggestions"]["steepest"]["lr"], rel=0.01)


def test_no_suggestion_is_exit_code_1_and_no_file(paceline_here: Call, tiny: tuple[str, ...], tmp_path: Path) -> None:
    nothing = ("--lowest", "1e-12", "--highest", "1e-10", "--steps", "40", "--seeds", "1")
    done = paceline_here("find-lr", "digits", *tiny, *nothing, "--apply", "better.yaml").ended(1)
    assert "does not fall by more than its noise" in done.out
    assert "better.yaml was not written: there is no suggestion by" in done.out
    assert not (tmp_path / "better.yaml").exists()


def test_a_trained_run_can_be_tested_from_its_weights(paceline_here: Call, finished: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    words = (*QUICK[:4], "--steps", "20", "--seeds", "1", "--json")
    trained = paceline_here("find-lr", finished, f"model.initialize_from={finished}", *words).document
    assert trained["losses"][0] != paceline_here("find-lr", finished, *words).document["losses"][0]
    assert {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()} == before
