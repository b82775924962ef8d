"""Are the bounds of a step those of its device, and is what stands out pointed out?"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.errors import RecipeError
from paceline.host.devices import find_device
from paceline.host.machine import cache_folder
from paceline.models.ceilings import Ceilings
from paceline.models.flops import Product, StepWork, Work
from paceline.pages.page import Chart, Table
from paceline.pages.shown import write_result
from paceline.recipe.load import load_recipe
from paceline_advisor.commands import Roofline
from paceline_advisor.memory.largest import MemoryShortage
from paceline_advisor.roofline.study import _fitting, choose, layer_bounds, roofline, shape_findings, this_cpu

A100 = find_device("a100")


def work(layer: str, flops: int, moved: int, **more: Any) -> Work:
    given = {"phase": "forward", "operator": "mm", "dtype": "bfloat16", "product": None, **more}
    return Work(layer=layer, calls=1, flops=flops, bytes_read=moved, bytes_written=0, is_counted=True, **given)


def test_the_longer_of_both_holds_a_layer_back() -> None:
    ceilings = Ceilings(A100, "none")
    found = StepWork((work("a", 312 * 10**9, 10**6), work("b", 10**6, 2039 * 10**6, phase="dgrad")))
    first, second = layer_bounds(found, {"a": "Linear"}, ceilings)
    assert (first.bound, first.kind, first.seconds) == ("compute", "Linear", pytest.approx(1e-3))
    assert (second.bound, second.phase, second.seconds) == ("memory", "dgrad", pytest.approx(1e-3))
    assert first.ridge == pytest.approx(312e12 / 2039e9)
    assert first.share == second.share == pytest.approx(0.5)


def test_each_precision_has_its_peak() -> None:
    convolution = Product(1, 1, 1, 1, "convolution", 9)
    fp32, conv = work("a", 10**12, 0, dtype="float32"), work("b", 10**12, 0, dtype="float32", product=convolution)
    by_default, everywhere, v100 = (
        Ceilings(A100, "convolutions"),
        Ceilings(A100, "all"),
        Ceilings(find_device("v100"), "all"),
    )
    assert [by_default.precision_of(each) for each in (fp32, conv)] == ["fp32", "tf32"]
    assert everywhere.precision_of(fp32) == "tf32"
    assert v100.precision_of(fp32) == "fp32"
    with pytest.raises(RecipeError, match="no units for bf16"):
        v100.seconds(work("a", 1, 1))
    in_fp8 = Ceilings(find_device("h100"), "none", "fp8", frozenset({"a"}))
    linear = Product(8, 8, 8)
    assert in_fp8.precision_of(work("a", 1, 1, product=linear)) == "fp8"
    assert in_fp8.precision_of(work("b", 1, 1, product=linear)) == "bf16"
    assert by_default.peak("fp64") == A100.flops_per_second["fp32"] / 2


def test_odd_sizes_are_named_with_what_to_change() -> None:
    odd = work("head", 2 * 256 * 1001 * 768, 10, product=Product(256, 1001, 768))
    (found,) = shape_findings(StepWork((odd,)), A100, lambda _: "bf16")
    assert {each.name: (each.aligned, each.advice) for each in found.dimensions} == {
        "samples": (True, ""),
        "inputs": (True, ""),
        "outputs": (False, "8 should divide it: 1000 or 1008"),
    }
    images = work("stem", 10, 10, product=Product(10**6, 64, 3 * 49, 1, "convolution", 49))
    (found,) = shape_findings(StepWork((images,)), A100, lambda _: "bf16")
    assert "4 channels" in found.dimensions[0].advice
    depthwise = work("dw", 10, 10, product=Product(10**6, 1, 9, 64, "convolution", 9))
    (found,) = shape_findings(StepWork((depthwise,)), A100, lambda _: "bf16")
    assert (found.tiling, found.dimensions, found.seconds_lost) == (None, (), 0.0)


def test_a_residual_network_on_an_a100() -> None:
    report = roofline(
        Roofline(recipe="synthetic", overrides=("model.name=resnet18", "batch.global_size=64"), device="a100")
    )
    assert report.precision == "bf16"
    assert report.ridge == pytest.approx(312e12 / 2039e9)
    by_name = {(each.layer, each.phase): each for each in report.layers}
    assert by_name["bn1", "forward"].bound == "memory"
    assert by_name["layer4.1.conv2", "forward"].kind == "Conv2d"
    assert sum(each.share for each in report.layers) == pytest.approx(1)
    assert report.arithmetic_seconds < report.products_seconds < report.least_seconds
    assert 0 < report.best_mfu < report.best_fused_mfu < 1
    assert report.found.uncounted == ()
    assert report.low_intensity is None
    # 1.814 GMAC for an image; three passes but for the first layer's gradient of the image.
    first = by_name["conv1", "forward"].flops
    assert report.found.model_flops == 3 * report.found.flops("forward") - first
    assert report.found.flops("forward") / 64 / 2 == pytest.approx(1.814e9, rel=0.005)
    document = report.to_json()
    assert json.loads(json.dumps(document))["phases"].keys() == {"forward", "loss", "dgrad", "wgrad", "optimizer"}


@pytest.mark.parametrize(("matmul", "precision"), [("auto", "fp32"), ("high", "tf32")])
def test_an_fp32_transformer_is_held_against_what_it_is_multiplied_in(matmul: str, precision: str) -> None:
    changes = ["model.name=vit_tiny_patch16_224", "batch.global_size=4", "train.precision=fp32"]
    report = roofline(
        Roofline(
            recipe="synthetic",
            overrides=(*changes, "data.image_size=224", f"train.float32_matmul={matmul}"),
            device="a100",
        )
    )
    assert report.precision == precision
    peak = {"fp32": 19.5e12, "tf32": 156e12}
    patches = sum(each.flops for each in report.layers if each.layer == "patch_embed.proj")
    # The patches are a convolution, which torch computes in TF32 either way.
    rest = report.found.model_flops - patches
    assert report.arithmetic_seconds == pytest.approx(patches / 156e12 + rest / peak[precision])


@pytest.mark.parametrize(
    ("normalises", "effect"),
    [(True, "normalises over smaller batches"), (False, "gives the same step by accumulation")],
)
def test_a_smaller_micro_batch_gives_the_same_step_only_without_batchnorm(normalises: bool, effect: str) -> None:
    shortage = MemoryShortage(memory=2**30, largest=5, divisor=4, normalises=normalises)
    recipe, sentence = _fitting(load_recipe("digits").recipe, shortage)
    assert recipe.batch.micro_size == 4
    assert sentence.endswith(f"batch.micro_size=4, which {effect}")


def test_depthwise_convolutions_are_pointed_out() -> None:
    report = roofline(
        Roofline(recipe="synthetic", overrides=("model.name=mobilenetv2_100", "batch.global_size=32"), device="h100")
    )
    low = report.low_intensity
    assert low is not None
    assert len(low.layers) == 17
    assert low.intensity < 4.5
    assert low.seconds_share > 2 * low.flops_share
    assert any(line.startswith("17 depthwise") for line in report.remarks())


@pytest.mark.parametrize("recipe", ["resnet50_a3", "efficientnet_b0", "resnet50_goyal"])
def test_the_operators_of_shipped_recipes_are_known(recipe: str) -> None:
    changes = [
        "model.name=resnet10t",
        "model.options={}",
        "batch={global_size: 4, micro_size: 4}",
        "data.image_size=32",
    ]
    assert roofline(Roofline(recipe=recipe, overrides=tuple(changes), device="h100")).found.uncounted == ()


def test_the_precision_that_a_device_lacks_is_not_assumed() -> None:
    report = roofline(
        Roofline(recipe="synthetic", overrides=("model.name=resnet18", "batch.global_size=8"), device="t4")
    )
    assert report.precision in ("fp32", "fp16")


def test_unknown_devices_are_answered_with_the_known_ones() -> None:
    with pytest.raises(RecipeError, match="a100-80gb"):
        roofline(Roofline(recipe="synthetic", device="a1000"))


def test_this_cpu_is_measured_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("paceline_advisor.roofline.study._SECONDS", 0.01)
    monkeypatch.setattr("paceline_advisor.roofline.study._SIZE", 128)
    monkeypatch.setattr("paceline_advisor.roofline.study._COPIED_BYTES", 2**20)
    state = torch.get_rng_state()
    first = this_cpu()
    assert torch.equal(state, torch.get_rng_state())
    (kept,) = (cache_folder() / "roofline").iterdir()
    assert first.bytes_per_second > 0
    assert str(kept) in first.source
    assert this_cpu().flops_per_second == first.flops_per_second
    kept.write_text("torn")
    assert this_cpu().bytes_per_second > 0
    shutil.rmtree(kept.parent)
    kept.parent.touch()  # where nothing can be kept, nothing is said to be
    assert "kept" not in this_cpu().source
    assert choose("CPU").name == "cpu"


def test_the_page_has_every_layer_under_the_roof(tmp_path: Path) -> None:
    report = roofline(Roofline(recipe="digits", device="a100"), print)
    assert replace(report, layers=(), shapes=()).__paceline__().on_page  # the roof alone
    (chart,) = report.__paceline__().on_page
    assert isinstance(chart, Chart)
    phases_table = next(each for each in report.__paceline__().blocks if isinstance(each, Table))
    forward = next(row for row in phases_table.rows if row[0] == "forward")
    assert [re.sub(r"[\d.]+", "", cell) for cell in forward[1:]] == [" MFLOP", " MB", " µs", "%"]
    assert all(len(re.findall(r"\d", cell)) == 3 for cell in forward[1:4])
    roof, *phases = chart.traces
    at = dict(zip(roof["x"], roof["y"], strict=True))
    assert at[report.ridge] == max(at.values())
    rate, peak = report.device.bytes_per_second / 1e12, max(at.values())
    points = [(x, y) for each in phases for x, y in zip(each["x"], each["y"], strict=True)]
    assert len(points) > 10
    assert all(y <= min(x * rate, peak) * (1 + 1e-6) for x, y in points)
    assert "Layers under the roof" in write_result(tmp_path, "roofline", report)[1].read_text()
