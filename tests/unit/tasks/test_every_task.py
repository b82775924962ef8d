"""What holds for every task: none that is added can be forgotten here, since the table must name them all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.plugins.registry import built_in
from paceline.recipe.load import load_recipe
from paceline.reports.audit import audit_run
from paceline.tasks.task import build_task
from paceline.trainer.evaluate_target import EvaluationRequest, evaluate_target
from paceline_advisor.memory.estimate import estimate_memory

_SHORT = {
    "train.duration": "4 steps",
    "evaluate.every": "4 steps",
    "checkpoint.every": "2 steps",
    "telemetry.log_every": "1 steps",
    "telemetry.trackers": [],
    "parallel.device": "cpu",
    "parallel.threads": 1,
    "train.precision": "fp32",
}
_TINY_GPT = {"depth": 1, "width": 32, "heads": 2}
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "image_classification": ("digits", {"batch.global_size": 32}),
    "image_regression": ("discs", {"data.samples": 128, "batch.global_size": 16, "model.options": {"channels": 2}}),
    "image_multilabel": ("figures", {"data.samples": 128, "batch.global_size": 16, "model.options": {"channels": 2}}),
    "language_modeling": (
        "gpt-small-docs",
        {"model.options": _TINY_GPT, "data.text.context": 32, "batch.global_size": 4, "evaluate.batch_size": 64},
    ),
    "text_classification": (
        "docs-topics",
        {"model.options": _TINY_GPT, "data.text.context": 32, "batch.global_size": 4, "evaluate.batch_size": 64},
    ),
    "recommendation": ("dlrm-synthetic", {"data.samples": 2000, "batch.global_size": 64}),
    "detection": (
        "shapes-maskrcnn",
        {
            "model.options": {"width": 8, "levels": 2, "channels": 8, "box_detections_per_img": 5},
            "data.detection.generated": {
                "samples": 16,
                "evaluation_samples": 4,
                "smallest_side": 32,
                "largest_side": 48,
                "objects": 2,
            },
            "batch.global_size": 4,
            "evaluate.batch_size": 2,
        },
    ),
    "segmentation": (
        "shapes-segmentation",
        {
            "model.options": {"width": 2, "stages": 1},
            "data.image_size": 16,
            "data.detection.generated": {"samples": 16, "evaluation_samples": 4},
            "batch.global_size": 4,
            "evaluate.batch_size": 2,
        },
    ),
}
# What is image classification with another network beside it; and what has no recipe, and says the same in
# test_token_classification.py. Objects and loops of one's own have tests of their own, in tests/fit and tests/loops.
VARIANTS = {"distillation", "token_classification", "fit", "own_loop"}


def test_the_table_names_every_task() -> None:
    assert {*TINY, *VARIANTS} == set(built_in("tasks"))
    for task, (name, _) in TINY.items():
        assert load_recipe(name).recipe.task == task


@pytest.mark.parametrize("task", TINY)
@pytest.mark.everyday
def test_a_run_of_it_goes_on_where_it_was_cut_off_and_is_audited_reported_and_evaluated(task: str, runs: Path) -> None:
    name, changes = TINY[task]
    overrides = {**_SHORT, **changes}
    whole = paceline.train(name, overrides=overrides, run_dir=runs / "whole", quiet=True)
    cut = {**overrides, "train.until": "2 steps"}
    paceline.train(name, overrides=cut, run_dir=runs / "cut", quiet=True)
    done = paceline.train(name, overrides=overrides, run_dir=runs / "cut", quiet=True)
    assert done.summary.weights_sha256 == whole.summary.weights_sha256
    assert audit_run(whole.run_dir).passed
    assert (whole.run_dir / "report.html").is_file()
    again = evaluate_target(EvaluationRequest(target=whole.run_dir))
    headline = build_task(load_recipe(name, overrides).recipe).headline
    assert again.metrics[headline] in whole.summary.metrics.values()


@pytest.mark.parametrize(
    "task",
    [
        # What tests/advisor/memory says of images, and what takes long.
        pytest.param(each, marks=pytest.mark.thorough if each in ("detection", "image_classification") else ())
        for each in TINY
    ],
)
def test_its_memory_is_estimated(task: str) -> None:
    name, changes = TINY[task]
    found = estimate_memory(load_recipe(name, {**_SHORT, **changes}), device="cpu")
    assert found.peak.allocated > 0
    assert found.needed is None, "the process was not measured"
    assert {"first step", "step", "evaluation"} <= set(found.peak.parts)
