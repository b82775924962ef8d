"""`paceline.train`: several processes refuse, report and return what one does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.errors import RecipeError


@pytest.mark.parametrize("processes", [1, 2])
def test_two_processes_refuse_report_and_return_what_one_does(
    processes: int, tiny_recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, place = tmp_path / "own.yaml", dict[str, Any](run_dir=tmp_path / "run", processes=processes)
    recipe.write_text(tiny_recipe.read_text().replace("optimizer: {", "optimizer: {momentum: 0.5, "))
    with pytest.raises(RecipeError, match=r"override 'data.prefetch=3' has no effect"):
        paceline.train(recipe, overrides={"data.prefetch": 3}, **place, quiet=True)
    overrides = {"train.duration": "2 steps", "optimizer.name": "adamw"}
    assert [paceline.train(recipe, overrides=overrides, **place).was_complete for _ in range(2)] == [False, True]
    assert "optimizer.momentum=0.5 of the recipe is not used" in capsys.readouterr().out


def test_mistakes_are_refused(tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RecipeError, match="names up to 255 bytes"):
        paceline.train(run_dir="x" * 300)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RecipeError, match="one of several"):
        paceline.train(tiny_recipe, processes=2)
