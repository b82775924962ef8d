"""What is proposed is planned before it is written: alone, beside the others, and for more processes than one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.recipe.load import load_recipe
from paceline_advisor.doctor.findings import Advice, Finding
from paceline_advisor.doctor.study import Plans, measure, write_improved

Examined = Callable[..., Any]


def finding(name: str, overrides: Mapping[str, Any]) -> Finding:
    given = dict.fromkeys(("evidence", "why", "source", "expected"), "said")
    return Finding(name=name, severity="slows", advice=Advice(words="do it", overrides=overrides), **given)


def test_what_the_strategy_refuses_is_said_and_left_out(examined: Examined, tmp_path: Path) -> None:
    diagnosis = examined({"telemetry.log_every": "1 step", "parallel.strategy": "fsdp"}, device="a100")
    compiled = finding("uncompiled", {"model.compile": True})
    diagnosis = replace(diagnosis, findings=(*diagnosis.findings, compiled))
    made = write_improved(tmp_path / "better.yaml", diagnosis, measured=False)
    assert [each.name for each in made.met] == ["log_every_step"]
    assert "model.compile=true does not work with parallel.strategy=fsdp" in made.left_out["uncompiled"]
    better = load_recipe(tmp_path / "better.yaml").recipe
    assert (better.model.compile, str(better.telemetry.log_every)) == (False, "10 steps")


def test_what_several_processes_would_refuse_is_left_out_of_a_recipe_for_one(examined: Examined, clean: Any) -> None:
    # Planned for one process, which needs no strategy, it would go: the recipe is for more than this machine.
    diagnosis = examined({"parallel.exact": "true", "parallel.logical_ranks": 4}, device="a100")
    assert diagnosis.processes == 1
    assert "parallel.exact" in Plans(diagnosis).refusal({"parallel.strategy": "ddp"})
    assert "single with 2 processes" in Plans(clean).refusal({"parallel.strategy": "single"})


def test_changes_that_go_alone_but_not_together(clean: Any, tmp_path: Path) -> None:
    compiled = {"model.compile": True}
    thawed = {"model.frozen": ["stages.*"], "model.unfreeze": {"stages.*": "1 epoch"}}
    plans = Plans(clean)
    assert [plans.refusal(each) for each in (compiled, thawed)] == ["", ""]
    often, rarely = ({"telemetry.log_every": f"{steps} steps"} for steps in (20, 30))
    for one, other, message in (
        (compiled, thawed, "model.compile=true"),
        (often, rarely, "telemetry.log_every is already changed to 20 steps"),  # two changes of one key
    ):
        path = tmp_path / f"{len(message)}.yaml"
        diagnosis = replace(clean, findings=(finding("one", one), finding("other", other)))
        made = write_improved(path, diagnosis, measured=False)
        assert [each.name for each in made.met] == ["one"]
        assert message in made.left_out["other"]
        assert load_recipe(path).recipe.model.compile == (one is compiled)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [({"model.frozen": ["no_such.*"]}, "no_such"), ({"train.precision": "fp12"}, "fp12"), ({"data.workers": 2}, "")],
)
def test_a_change_that_names_nothing_or_does_nothing(clean: Any, tmp_path: Path, overrides: Any, message: str) -> None:
    diagnosis = replace(clean, findings=(finding("idle", overrides),))
    made = write_improved(tmp_path / "better.yaml", diagnosis, measured=False)
    assert made.met == ()
    assert message in made.left_out["idle"]
    assert not (tmp_path / "better.yaml").exists()
    # Nor is it measured: nothing else is left to be.
    reported: list[str] = []
    assert measure(diagnosis, reported.append) is diagnosis
    assert reported == [f"idle: not measured: {made.left_out['idle']}"]


def test_a_recipe_for_several_processes_is_examined_as_one(examined: Examined) -> None:
    # On this one each of them has half of the cores, which is no fault.
    for strategy, device in (("fsdp", "a100"), ("ddp", "cpu")):
        diagnosis = examined({"parallel.strategy": strategy}, device=device)
        assert (diagnosis.processes, diagnosis.findings) == (2, ()), device
