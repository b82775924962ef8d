"""What a recipe's own choices make of the prediction."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import RecipeError, TrainingError
from paceline.pages.page import Chart, Table
from paceline.pages.shown import write_result
from paceline.recipe.load import load_recipe
from paceline_advisor.measured_rate import MeasuredRate
from paceline_advisor.scaling.commands import Scale
from paceline_advisor.scaling.study import ScaleReport, Scaling, ScalingRow, scale

SMALL = "model.options={width: 4, stages: 1}"


def _report(recipe: str, *overrides: str, cluster: str = "dgx-a100", **figure: Any) -> ScaleReport:
    requested = Scale(recipe=recipe, overrides=overrides, world_sizes=(8,), cluster=cluster, strategy="ddp", **figure)
    return Scaling(load_recipe(recipe, overrides), requested, print).report()


def _launched(*overrides: str) -> ScalingRow:
    # A GPU's share is an eighth of what was measured, and ends at what its host can launch.
    (row,) = _report("digits", SMALL, *overrides, throughput=1_000_000, one_gpu_batch=64).rows
    return row


def test_a_compiled_step_ends_later_at_what_its_host_can_launch() -> None:
    eager = _launched()
    assert eager.prediction.limit == "launching"
    fused, graphs = (
        _launched("model.compile=true"),
        _launched("model.compile=true", "model.compile_mode=reduce-overhead"),
    )
    seconds = [each.prediction.parts["launching"] for each in (graphs, fused, eager)]
    assert seconds == sorted(seconds)
    assert seconds[0] < seconds[1] / 2 < seconds[2] / 3
    # What a back-end does that nobody knows is not counted on.
    unknown = _launched("model.compile=true", "model.compile_backend=aot_eager")
    assert unknown.prediction.parts["launching"] == seconds[2]


@pytest.mark.parametrize(
    ("matmul", "peaks"), [("auto", "tf32 peak of 156"), ("highest", "fp32 peak of 20"), ("high", "tf32 peak of 156")]
)
def test_a_bound_is_that_of_the_numbers_it_computes_in(matmul: str, peaks: str) -> None:
    message = _report("resnet50", "train.precision=fp32", f"train.float32_matmul={matmul}").basis
    assert f"its dense {peaks}" in message
    # The classifier is a matrix product, which torch by itself leaves in fp32.
    assert ("and fp32 peak of 20" in message) == (matmul == "auto")


def test_a_batch_is_at_most_the_data() -> None:
    report = _report("digits", SMALL, "batch.global_size=4096", throughput=1000, one_gpu_batch=64)
    assert [row["global_batch"] for row in report.to_json()["rows"]] == [1438]


def test_a_precision_that_a_device_lacks_bounds_nothing() -> None:
    with pytest.raises(RecipeError, match="no units for bf16"):
        _report("digits", SMALL, "train.precision=bf16", cluster="dgx-1")


def test_a_detector_is_predicted_without_what_it_refuses() -> None:
    loaded = load_recipe("shapes-maskrcnn")
    requested = Scale(recipe="shapes-maskrcnn", world_sizes=(1, 8), cluster="dgx-a100", throughput=100, one_gpu_batch=8)
    scaling = Scaling(loaded, requested, print)
    report = scaling.report()
    assert [row.strategy for row in report.rows] == ["single", "ddp"]
    assert any("FSDP does not work with task=detection" in each for each in report.notices)
    with pytest.raises(RecipeError, match="--strategy fsdp does not work with task=detection"):
        Scaling(loaded, replace(requested, strategy="fsdp"), print, subject=scaling.subject)


def test_what_is_measured_is_the_strategy_asked_for() -> None:
    # DDP would train it.
    overrides = (SMALL, "parallel.device=cpu", "parallel.unused_parameters=allow")
    requested = Scale(
        recipe="digits",
        overrides=overrides,
        world_sizes=(2,),
        strategy="fsdp",
        throughput=1000,
        one_gpu_batch=64,
        measure=True,
        rounds=1,
    )
    with pytest.raises(TrainingError, match=r"2 processes could not be measured: .* parallel\.strategy=fsdp"):
        Scaling(load_recipe("digits", overrides), requested, print).report()


def test_the_page_has_each_strategy_beside_an_even_share(tmp_path: Path) -> None:
    requested = Scale(
        recipe="digits",
        overrides=(SMALL,),
        world_sizes=(1, 2, 8),
        cluster="dgx-a100",
        throughput=1000,
        one_gpu_batch=64,
    )
    sharded = load_recipe("digits", (SMALL, "parallel.strategy=fsdp"))  # otherwise left out: a replica fits easily
    report = Scaling(sharded, requested, print).report()
    (chart,) = report.__paceline__().on_page
    assert isinstance(chart, Chart)
    traces = {each["name"]: each for each in chart.traces}
    assert list(traces) == ["ddp", "fsdp", "linear"]
    assert all(list(each["x"]) == [1, 2, 8] for each in traces.values())
    assert traces["linear"]["y"] == pytest.approx([1000, 2000, 8000])
    rates = {row.strategy: row.prediction.rate for row in report.rows if row.prediction.devices == 8}
    assert {name: traces[name]["y"][-1] for name in ("ddp", "fsdp")} == rates
    assert "samples/s" in write_result(tmp_path, "scale", report)[1].read_text()


def test_a_measured_rate_of_several_gpus_scales_the_others() -> None:
    def rows(**given: Any) -> dict[int, ScalingRow]:
        requested = Scale(
            recipe="digits", world_sizes=(2, 8), cluster="dgx-a100", strategy="ddp", batch_per_gpu=64, **given
        )
        report = Scaling(load_recipe("digits", (SMALL,)), replace(requested, overrides=(SMALL,)), print).report()
        return {row.prediction.devices: row for row in report.rows}

    alone = rows(throughput=5000)
    measured = MeasuredRate(gpus=4, rate=0.7 * 4 * 5000)
    found = rows(throughput=5000, gpus_measured=measured)
    assert found[4].prediction.rate == pytest.approx(measured.rate)
    assert found[4].error == pytest.approx(0)
    assert found[8].prediction.efficiency < 0.75 < alone[8].prediction.efficiency
    assert found[8].measured is None


@pytest.mark.parametrize(("rate", "is_noted"), [(4000, True), (6000, False)])
def test_several_gpus_slower_than_one_are_noted(rate: float, is_noted: bool) -> None:
    measured = MeasuredRate(gpus=4, rate=rate)
    report = _report("digits", SMALL, throughput=5000, one_gpu_batch=64, gpus_measured=measured)
    assert any("slower than one" in notice for notice in report.notices) == is_noted


def test_the_reason_for_a_low_efficiency_is_a_sentence() -> None:
    why = _report("digits", SMALL, throughput=5000, one_gpu_batch=64).why_inefficient()
    assert why.startswith("8 GPUs with ddp reach")
    assert "launching its kernels costs" in why
    assert why.endswith("give each GPU more samples.")


def test_processes_on_a_processor_are_not_called_gpus() -> None:
    report = _report("digits", SMALL, throughput=5000, one_gpu_batch=64)
    cpus = replace(report, is_bound=True, cluster=replace(report.cluster, title="a server", shares_cores=True))
    assert "each process's share is so small" in cpus.why_inefficient()
    assert "bounds for one process and" in str(cpus.__paceline__())
    assert "GPU" not in str(cpus.__paceline__()).replace("--gpus", "")


def test_columns_without_values_are_left_out() -> None:
    report = _report("digits", SMALL, throughput=5000, one_gpu_batch=64)
    (table,) = (each for each in report.__paceline__().blocks if isinstance(each, Table))
    assert "cost" not in table.columns
    assert "time" in table.columns


def test_a_network_that_is_not_at_hand() -> None:
    requested = Scale(
        parameters=335e6, world_sizes=(1, 8), cluster="dgx-a100", throughput=110.5, batch_per_gpu=32, strategy="ddp"
    )
    report = scale(requested, print)
    assert isinstance(report, ScaleReport)
    assert report.parameters == 335_000_000
    eight = report.rows[-1]
    # NVIDIA DeepLearningExamples, PyTorch/LanguageModeling/BERT: SQuAD, mixed precision, 846.7 sequences/s.
    assert eight.prediction.ends[0] <= 846.7 <= eight.prediction.ends[1]
    assert (eight.hours, eight.cost) == (None, None)
    with pytest.raises(RecipeError, match="--parameters also needs --cluster, one GPU's --throughput"):
        Scale(parameters=1e6, batch_per_gpu=4)
    with pytest.raises(RecipeError, match="found RECIPE and --parameters to predict from"):
        Scale(recipe="digits", parameters=1e6)
    with pytest.raises(RecipeError, match="found nothing to predict from"):
        Scale()
