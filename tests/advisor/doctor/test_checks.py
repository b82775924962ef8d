"""The other checks: each is told of a run that has what it looks for, and says nothing of one that has not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from planted_networks import CELLS, RELAID

from paceline.host.world import World
from paceline.recipe.load import load_recipe
from paceline.records.run_directory import RunDirectory
from paceline.trainer.subject import Subject
from paceline_advisor.commands import Doctor
from paceline_advisor.doctor.anatomy import Anatomy
from paceline_advisor.doctor.behaviour import Calls
from paceline_advisor.doctor.checked_run import CheckedRun, choose_target
from paceline_advisor.doctor.checks import training
from paceline_advisor.doctor.study import examine

Examined = Callable[..., Any]

WITH_GRADIENT = """
import torch

import paceline


class Task(paceline.ImageClassification):
    def score(self, model, batch):
        with torch.enable_grad():
            return super().score(model, batch)
"""
NET = {"model.name": "mine:Net", "model.options": "{}"}


def named(diagnosis: Any) -> dict[str, Any]:
    assert diagnosis.unseen == {}
    return {each.name: each for each in diagnosis.findings}


# What is looked for, and what has it; several in one recipe where none hides another.
RECIPES: dict[str, dict[str, dict[str, Any]]] = {
    "t4": {"slow_precision": {"train.precision": "bf16"}},
    "cpu": {"unfused_optimizer": {"optimizer.options": "{foreach: false}"}, "threads": {"parallel.threads": 1}},
    "a100": {
        "autotune_off": {"train.deterministic": "true"},
        "unused_parameter_search": {"parallel.unused_parameters": "allow"},
        "ragged_tail": {"data.samples": 8193},
        "evaluation_often": {"evaluate.every": "1 step"},
    },
    "a100, large batches": {
        "no_warmup": {"batch.global_size": 1024, "optimizer.lr": 0.4},
        "loss_scale": {"train.precision": "fp16", "train.grad_scaler.growth_interval": 10},
    },
    "a100, larger batches": {"learning_rate_rule": {"batch.global_size": 2048, "schedule.warmup": "1 epoch"}},
}


@pytest.mark.parametrize("where", RECIPES)
def test_a_recipe_that_has_it(examined: Examined, where: str) -> None:
    overrides = {key: value for each in RECIPES[where].values() for key, value in each.items()}
    found = named(examined(overrides, device=where.partition(",")[0]))
    assert RECIPES[where].keys() <= found.keys(), list(found)
    for finding in found.values():
        assert all((finding.evidence, finding.why, finding.source, finding.advice.words, finding.expected))


@pytest.mark.parametrize(
    ("name", "code", "requested"),
    [
        ("recurrent_cells", CELLS, NET),
        ("layout_lost", RELAID, NET),
        ("gradient_in_evaluation", WITH_GRADIENT, {"task": "mine:Task"}),
    ],
)
def test_code_that_has_it(examined: Examined, name: str, code: str, requested: dict[str, Any]) -> None:
    found = named(examined(requested, code=code, device="a100"))
    assert name in found, list(found)


def test_environment_variables_for_debugging(examined: Examined, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert list(named(examined(device="a100"))) == ["debug_environment"]
    assert named(examined(device="cpu")) == {}


def test_without_data_images_of_the_usual_size_stand_in(examined: Examined) -> None:
    files = {"data": "{dataset: image_folder, image_size: 224}", "model": "{name: resnet18}", "model.options": "{}"}
    diagnosis = examined(files, device="a100")
    assert "ImageNet" in diagnosis.unseen["data"]
    assert diagnosis.findings == ()


def test_the_worst_comes_first(examined: Examined) -> None:
    requested = {"train.precision": "fp32", "telemetry.log_every": "1 step", "model.channels_last": "false"}
    found = examined(requested, device="a100").findings
    assert [each.name for each in found] == ["precision", "channels_last", "log_every_step"]


def test_what_is_known_of_machines_and_runs_that_are_not_here() -> None:
    subject = _subject()
    waits = [{"event": "step", "step": 10, "position": 10, "data_wait_fraction": 0.4, "grad_scale": 0.5}]
    reported = [{"event": "incident", "incident": each, "message": "m"} for each in ("slow_rank", "recompile")]
    cases: dict[Any, Any] = {
        training.data_wait: replace(subject, run=tuple(waits)),
        training.slow_rank: replace(subject, run=tuple(reported)),
        training.recompilation: replace(subject, run=tuple(reported)),
        training.scaler_health: replace(subject, run=tuple(waits), plan=replace(subject.plan, precision="fp16")),
        training.diverged: replace(subject, run=({"event": "incident", "incident": "nonfinite_metric"},)),
        training.data_parallel: replace(subject, anatomy=Anatomy(parallel=("",))),
    }
    for check, sick in cases.items():
        assert list(check(subject)) == []
        (found,) = check(sick)
        assert found.name == check.__name__
    assert "40%" in training.data_wait(cases[training.data_wait])[0].evidence


def _subject() -> CheckedRun:
    recipe = load_recipe("digits").recipe
    target = choose_target("a100", recipe)
    plan = Subject.open(recipe, World(), "plan", machine=target.machine).plan
    return CheckedRun(recipe=recipe, plan=plan, target=target, anatomy=Anatomy(), calls=Calls())


def test_a_step_that_does_not_fit_breaks(examined: Examined) -> None:
    requested = {"data.image_size": 112, "batch.global_size": 8192, "schedule.warmup": "1 epoch"}
    found = examined(requested, device="a100", room=True).findings[0]
    assert (found.name, found.severity) == ("does_not_fit", "breaks")
    # The proposed size is one that does fit, and that makes the same step.
    proposed = found.advice.overrides["batch.micro_size"]
    assert 8192 % proposed == 0
    smaller = examined(requested | {"batch.micro_size": proposed}, device="a100", room=True)
    assert "does_not_fit" not in [each.name for each in smaller.findings]


def test_a_shipped_name_means_the_recipe_and_not_a_run_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunDirectory(tmp_path / "digits")
    run.root.mkdir()
    run.recipe.write_text("base: digits\n")
    run.events.write_text('{"event": "incident", "incident": "slow_rank", "message": "m", "step": 1, "time": 1}\n')
    shipped, here = (
        [each.name for each in examine(Doctor(recipe=recipe, device="cpu"), lambda _: None).findings]
        for recipe in ("digits", "./digits")
    )
    assert "slow_rank" in here
    assert "slow_rank" not in shipped
