"""`paceline scale` and `paceline plan` as a user calls them."""

from __future__ import annotations

from pathlib import Path

import pytest
from calls import Call

from paceline_advisor.scaling.study import shown_hours

SMALL = ("digits", "model.options={width: 4, stages: 1}")
GIVEN = ("--throughput", "1000", "--cluster", "dgx-a100")


def test_a_table_with_the_clusters_name_and_what_was_assumed(paceline_here: Call) -> None:
    done = paceline_here("scale", *SMALL, *GIVEN, "--world-sizes", "1,8,2", "--price-per-gpu-hour", "2").ended(0)
    assert "NVIDIA DGX A100" in done.out
    rows = [line.split() for line in done.out.splitlines() if line.split()[1:2] in (["single"], ["ddp"], ["fsdp"])]
    assert [(row[0], row[1]) for row in rows] == [("1", "single"), ("2", "ddp"), ("8", "ddp")]
    assert "note: FSDP is left out, since a replica's state takes" in done.out
    assert "\nPredicted\n" in done.out
    assert "The range held 90 % of the published rates" in done.out


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (("--parameters", "4e9", "--batch-per-gpu", "32"), ["ddp", "fsdp"]),  # 45 of 79 GiB
        ((*SMALL, "--strategy", "fsdp"), ["fsdp"]),
        ((*SMALL, "parallel.strategy=fsdp"), ["ddp", "fsdp"]),
        (SMALL, ["ddp"]),
    ],
)
def test_fsdp_is_shown_where_it_matters(words: tuple[str, ...], shown: list[str], paceline_here: Call) -> None:
    asked = ("scale", *words, *GIVEN, "--world-sizes", "8")
    lines = [line.split() for line in paceline_here(*asked).ended(0).out.splitlines()]
    assert [line[1] for line in lines if line[:1] == ["8"] and line[1] != "GPUs"] == shown
    rows = paceline_here(*asked, "--json").document["rows"]
    assert {row["strategy"] for row in rows} == {"ddp", "fsdp"} - ({"ddp"} if "--strategy" in words else set())


def test_one_document(paceline_here: Call) -> None:
    done = paceline_here("scale", *SMALL, *GIVEN, "--world-sizes", "1,4", "--strategy", "ddp", "--json")
    assert done.code == 0, done.err
    document = done.document
    one, four = document["rows"]
    assert (one["devices"], four["devices"]) == (1, 4)
    assert one["samples_per_second"] == pytest.approx(1000)
    assert one["efficiency"] == pytest.approx(1)
    assert four["samples_per_second_low"] <= four["samples_per_second"] <= four["samples_per_second_high"]
    assert sum(four["parts_seconds"].values()) == pytest.approx(four["step_seconds"])
    assert document["basis"] == "1,000 samples/s in steps of 64"
    assert document["rows"][0]["cost"] is None


def test_a_published_row_by_the_command(paceline_here: Call) -> None:
    words = ("--cluster", "dgx-a100", "--throughput", "2470", "--batch-per-gpu", "256", "--loop", "nvidia-convnets")
    done = paceline_here("scale", "resnet50", *words, "--world-sizes", "8", "--strategy", "ddp", "--json").ended(0)
    (row,) = done.document["rows"]
    # NVIDIA DeepLearningExamples, resnet50v1.5/README.md: 16,621 images/s.
    assert row["samples_per_second"] == pytest.approx(16621, rel=0.12)
    # 90 epochs of ImageNet, 115.3 million images.
    assert row["hours"] == pytest.approx(90 * 1_281_167 / row["samples_per_second"] / 3600)


def test_without_a_figure_the_roofline_bounds_it_and_that_is_said(paceline_here: Call) -> None:
    words = ("batch.global_size=4096",)
    done = paceline_here("scale", "resnet50", *words, "--cluster", "dgx-h100", "--world-sizes", "1,2", "--json")
    assert done.code == 0, done.err
    document = done.document
    assert document["is_bound"]
    assert "dense bf16 peak" in document["basis"]
    one, *several = document["rows"]
    reported = paceline_here("roofline", "resnet50", *words, "--device", "h100", "--json").document
    assert one["samples_per_second"] == pytest.approx(reported["most_samples_per_second"], rel=1e-3)
    for row in several:
        assert row["samples_per_second_high"] <= one["samples_per_second"] * row["devices"] * (1 + 1e-6)
    shown = paceline_here("scale", *SMALL, "--cluster", "dgx-h100", "--world-sizes", "8")
    assert "upper bounds for one GPU" in shown.out


def test_a_cluster_of_ones_own(paceline_here: Call, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "gpus_per_node: 2\nwithin: {gigabytes_per_second: 20, latency_microseconds: 10}\n"
        "network: {gigabytes_per_second: 0.01, latency_microseconds: 100}\nprice_per_gpu_hour: 3\n"
    )
    words = ("--cluster", "mine.yaml", "--throughput", "5000", "--strategy", "ddp")
    done = paceline_here("scale", *SMALL, *words, "--world-sizes", "1,2,8", "--json").ended(0)
    rates = {row["devices"]: row for row in done.document["rows"]}
    assert rates[8]["limit"] == "communication"
    assert rates[8]["efficiency"] < rates[2]["efficiency"]
    # A node of two is rented as a whole.
    assert [rates[size]["paid_devices"] for size in (1, 2, 8)] == [2, 2, 8]
    assert all(row["cost"] == pytest.approx(3 * row["paid_devices"] * row["hours"]) for row in rates.values())


def test_a_table_of_batches_by_the_command(paceline_here: Call, tmp_path: Path) -> None:
    (tmp_path / "runs.csv").write_text("batch,steps\n64,1000\n128,600\n256,400\n512,300\n")
    document = paceline_here("scale", "--batches", "runs.csv", "--at", "1024", "--json").ended(0).document
    assert document["critical_batch"]["middle"] == pytest.approx(256, rel=1e-3)
    assert document["predicted"] == [{"batch": 1024, "steps": pytest.approx(250, rel=1e-3)}]
    refused = paceline_here("scale", "digits", "--batches", "runs.csv").ended(2)
    assert "found RECIPE and --batches to predict from; give one of" in refused.err
    refused = paceline_here("scale", *SMALL, *GIVEN, "--gpus-measured", "1:5").ended(2)
    assert "found '1:5', but a measured rate is a number of GPUs, 2 or more" in refused.err


PLAN = ("plan", *SMALL, "--cluster", "dgx-a100", "--throughput", "1", "--one-gpu-batch", "64", "--most-gpus", "16")


def test_a_plan_for_a_deadline(paceline_here: Call) -> None:
    asked = (*PLAN, "--deadline", "2h", "--cpu-ms-per-sample", "0", "--json")
    assert paceline_here(*asked, "--shared-node").ended(0).document["chosen"]["devices"] == 4
    plan = paceline_here(*asked).ended(0).document
    assert plan["chosen"]["devices"] == 8  # a whole node costs the same
    assert plan["chosen"]["hours_at_worst"] <= 2
    assert plan["chosen"]["learning_rate"] == plan["recipe_learning_rate"] == 0.2
    shown = paceline_here(*PLAN, "--deadline", "120m")
    assert "Predicted: the rest." in shown.out
    assert "learning rate" in shown.out


def test_times_and_counts_are_for_people(paceline_here: Call) -> None:
    assert [shown_hours(each) for each in (0.00128, 0.09, 0.5333, 30, 1234.5)] == [
        "4.6 s",
        "5 min 24 s",
        "32 min 00 s",
        "30 h 00 min",
        "1,234 h",
    ]
    quick = ("batch.global_size=1024", "--cluster", "dgx-a100", "--throughput", "1e6", "--one-gpu-batch", "64")
    for command in (("scale", "--world-sizes", "2"), ("plan", "--most-gpus", "2", "--deadline", "1h")):
        done = paceline_here(command[0], *SMALL, *quick, *command[1:])
        line = next(line for line in done.out.splitlines() if line.split()[1:2] == ["ddp"])
        assert line.split()[2] == "1,024"
        assert " s " in line, line


def test_a_bound_ends_with_one(paceline_here: Call) -> None:
    done = paceline_here("plan", *SMALL, "--cluster", "dgx-a100", "--most-gpus", "2", "--deadline", "8h").ended(1)
    assert "No choice from a bound" in done.out
    reported = paceline_here("plan", *SMALL, "--cluster", "dgx-a100", "--most-gpus", "2", "--deadline", "8h", "--json")
    document = reported.document
    assert (document["chosen"], document["is_bound"]) == (None, True)
    assert document["nearest"]["fits"]


def test_what_cannot_be_ends_with_one(paceline_here: Call) -> None:
    done = paceline_here(*PLAN, "--deadline", "1 seconds").ended(1)
    assert "No configuration meets the target at worst; the closest" in done.out


@pytest.mark.world_size(2)
def test_predicted_beside_measured_here(paceline: Call) -> None:
    words = ("--world-sizes", "1,2", "--strategy", "ddp", "--measure", "--rounds", "2", "--json")
    document = paceline("scale", "digits", "parallel.device=cpu", *words, timeout=300).ended(0).document
    one, two = document["rows"]
    # One process is what the prediction begins with.
    assert one["measured_samples_per_second"] is None
    assert two["measured_samples_per_second"]["middle"] > 0
    # How near it comes is for benchmarks/scaling.py, on a machine of its own; here, that the two are held together.
    measured = two["measured_samples_per_second"]["middle"]
    assert two["error"] == pytest.approx(two["samples_per_second"] / measured - 1)
    assert "measured here" in document["basis"]
