"""Published rates on eight GPUs, from one GPU's, the cluster's datasheet, and constants fitted to many families.

NVIDIA DeepLearningExamples, commit 729963dd47e7c8bd462ad10bfac7a7b0b604e6dd, PyTorch/Classification/ConvNets:
"Training performance" in the READMEs of resnet50v1.5 (lines 596-612), resnext101-32x4d (570-586) and
se-resnext101-32x4d (572-588); samples of a GPU's step from configs.yml. On A100 fp32 is TF32.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import cache
from pathlib import Path

import pytest

from paceline.recipe.load import load_recipe
from paceline_advisor.formulas.parallel_step import CALIBRATION, HOST_SECONDS
from paceline_advisor.scaling.commands import Scale
from paceline_advisor.scaling.network import ScaledRun, describe
from paceline_advisor.scaling.study import LOOPS, Scaling, ScalingRow

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
RESULT = json.loads(sorted(RESULTS.glob("scaling-published_*.json"))[-1].read_text())
ROWS = [
    ("resnet50", "dgx-a100", "fp32", 256, 938, 7248),
    ("resnet50", "dgx-a100", "fp16", 256, 2470, 16621),
    ("resnet50", "dgx-1", "fp32", 112, 367, 2855),
    ("resnet50", "dgx-1", "fp16", 256, 1200, 8322),
    ("resnet50", "dgx-1-32gb", "fp32", 112, 356, 2766),
    ("resnet50", "dgx-1-32gb", "fp16", 256, 1156, 8056),
    ("resnext101_32x4d", "dgx-a100", "fp32", 128, 456, 3471),
    ("resnext101_32x4d", "dgx-a100", "fp16", 128, 1211, 7925),
    ("resnext101_32x4d", "dgx-1", "fp32", 64, 147, 1133),
    ("resnext101_32x4d", "dgx-1", "fp16", 128, 587, 4065),
    ("resnext101_32x4d", "dgx-1-32gb", "fp32", 64, 144, 1108),
    ("resnext101_32x4d", "dgx-1-32gb", "fp16", 128, 565, 3863),
    ("seresnext101_32x4d", "dgx-a100", "fp32", 128, 395, 2991),
    ("seresnext101_32x4d", "dgx-a100", "fp16", 128, 855, 5779),
    ("seresnext101_32x4d", "dgx-1", "fp32", 64, 132, 1004),
    ("seresnext101_32x4d", "dgx-1", "fp16", 112, 443, 2971),
    ("seresnext101_32x4d", "dgx-1-32gb", "fp32", 64, 130, 992),
    ("seresnext101_32x4d", "dgx-1-32gb", "fp16", 112, 427, 2925),
]


@cache
def _subject(recipe: str) -> ScaledRun:
    return describe(load_recipe(recipe).recipe)


def _predicted(
    recipe: str, cluster: str, precision: str, batch: int, one: float, decoding: float | None = None
) -> ScalingRow:
    requested = Scale(
        recipe=recipe,
        overrides=(f"train.precision={precision}",),
        world_sizes=(8,),
        cluster=cluster,
        strategy="ddp",
        batch_per_gpu=batch,
        throughput=one,
        loop="nvidia-convnets",
        cpu_ms_per_sample=decoding,
    )
    (row,) = Scaling(load_recipe(recipe, requested.overrides), requested, print, _subject(recipe)).report().rows
    return row


def test_eight_gpus_are_predicted_from_one() -> None:
    errors = [_predicted(*row[:5]).prediction.rate / row[5] - 1 for row in ROWS]
    assert sum(map(abs, errors)) / len(errors) <= 0.055
    assert max(map(abs, errors)) <= 0.125


def test_the_published_rates_lie_within_the_range() -> None:
    inside = []
    for row in ROWS:
        found = _predicted(*row[:5]).prediction
        inside.append(found.samples / found.high_seconds <= row[5] <= found.samples / found.low_seconds)
    assert sum(inside) >= 16


def test_the_constants_are_those_of_the_fit_to_all_families() -> None:
    fitted = RESULT["fitted"]["calibration"]
    assert asdict(CALIBRATION) == {name: pytest.approx(value, rel=0.02) for name, value in fitted.items()}


def test_families_left_out_of_the_fit_are_predicted_as_well_as_is_said() -> None:
    every = RESULT["all"]
    assert every["rows"] == len([row for row in RESULT["each"] if row["family"] != RESULT["refused"]])
    assert 0.85 <= every["share_in_range"] <= 0.95
    assert 0.85 <= RESULT["families_in_range"] <= 0.95
    assert abs(every["mean_signed_error"]) <= 0.03


def test_measured_constants_stay_as_measured() -> None:
    assert LOOPS["nvidia-convnets"].seconds_per_sample == 2.65e-3  # benchmarks/results/input-pipeline-folder, Pillow
    assert pytest.approx(22e-6) == HOST_SECONDS  # 10 and three launches, benchmarks/results/ddp-host


def test_what_limits_a_row_is_named() -> None:
    # If a core takes 5.5 ms for an image, mixed precision needs more images than 40 cores decode; fp32 does not.
    found = _predicted(*ROWS[3][:5], decoding=5.5).prediction
    assert found.limit == "data"
    assert _predicted(*ROWS[2][:5], decoding=5.5).prediction.parts["data"] == 0


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_slower_networks_scale_worse(strategy: str) -> None:
    rates = []
    for cluster in ("dgx-a100", "ethernet-100g", "ethernet-10g"):
        requested = Scale(
            recipe="resnet50",
            world_sizes=(32,),
            cluster=cluster,
            strategy=strategy,  # type: ignore[arg-type]  # one of the two words
            batch_per_gpu=64,
            throughput=1000,
        )
        (row,) = Scaling(load_recipe("resnet50"), requested, print, _subject("resnet50")).report().rows
        rates.append(row.prediction.efficiency)
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < 0.6 * rates[0]
