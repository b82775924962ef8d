"""`paceline bench` as a user calls it: small benches of digits, and mistakes that cost one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from calls import Call

from paceline.data.image.feed_rates import FeedRates, remember
from paceline.recipe.load import load_recipe

SHORT = ("--rounds", "2", "--seconds", "0.05")
SLOW = """
import time
import paceline


class Slow(paceline.ImageClassification):
    def loss(self, model, batch):
        time.sleep(0.1)
        return super().loss(model, batch)
"""


def test_a_table_with_reasons_and_files(paceline_here: Call, tiny: tuple[str, ...], tmp_path: Path) -> None:
    done = paceline_here(
        *("bench", "digits", *tiny, "--devices", "cpu,cuda", "--parts", "together", *SHORT, "--output", "out")
    ).ended(0)
    rows = [line.split() for line in done.out.splitlines() if "memory" in line and "batch" not in line]
    assert float(rows[0][5].replace(",", "")) > 0
    assert "no CUDA" in done.out
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        *("benchmark.html", "benchmark.json", "benchmark.md"),
    ]
    document = json.loads((tmp_path / "out/benchmark.json").read_text())
    assert [row["trouble"] is None for row in document["rows"]] == [True, False]
    assert document["rows"][0]["samples_per_second"]["count"] == 2
    assert document["rows"][0]["peak_memory_bytes"] > 2**26
    assert document["environment"]["cpu"]["model"]
    assert "95 % interval" in (tmp_path / "out/benchmark.md").read_text()
    assert "Throughput by batch size" in (tmp_path / "out/benchmark.html").read_text()


def test_what_became_slower_is_found(paceline_here: Call, tiny: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    bench = ("bench", "digits", *tiny, "--parts", "compute", "--rounds", "4", "--seconds", "0.2", "--json", "--output")
    for name, task in (("before", ()), ("after", ("task=slow:Slow",))):
        done = paceline_here(*bench, name, *task).ended(0)
        assert done.document["kind"] == "throughput"
    done = paceline_here("bench", "compare", "before", "after", "--json")
    found = done.document
    assert (done.code, found["regressed"]) == (1, True)
    assert found["lines"][0]["verdict"] == "slower"
    done = paceline_here("bench", "compare", "after", "before").ended(0)
    assert "faster" in done.out
    assert "single launch" in done.out


def test_what_comes_to_the_same_run_is_measured_once(paceline_here: Call, tiny: tuple[str, ...]) -> None:
    done = paceline_here("bench", "digits", *tiny, "--backends", "auto,memory", "--parts", "data", *SHORT, "--json")
    assert done.code == 0, done
    document = done.document
    (row,) = document["rows"]
    assert (row["backend"], row["same"]) == ("memory", ["cpu fp32 memory batch 128 data"])
    assert any(note.startswith("measured once, because they give the same run here: ") for note in document["notes"])
    assert "1 to 1 of 1 combinations" in done.err


def test_loader_processes_are_those_of_a_run(paceline_here: Call, write_images: Call, tmp_path: Path) -> None:
    for name in ("train/cat", "train/dog", "val/cat", "val/dog"):
        write_images(tmp_path / "photos" / name, 8)
    (tmp_path / "photos.yaml").write_text(
        "model: {name: small_resnet, options: {width: 4, stages: 1}}\n"
        "data: {dataset: image_folder, path: photos, image_size: 8, augment: {crop: random_resized}}\n"
        "batch: {global_size: 8}\nparallel: {device: cpu}\ntrain: {precision: fp32, duration: 9 epochs}\n"
    )
    bench = ("bench", "photos.yaml", "--parts", "data", *SHORT)
    reported = paceline_here(*bench).ended(0)
    assert "data.workers=auto: " in reported.out
    assert "would first measure" in reported.out
    # What a run has measured and remembered is what is used.
    remember(load_recipe(tmp_path / "photos.yaml").recipe, FeedRates({0: 1.0, 2: 10.0}, alone=20.0))
    document = paceline_here(*bench, "--json").document
    (row,) = document["rows"]
    assert (row["workers"], row["workers_measured"]) == (2, True)
    assert any("data.workers=auto: 2 (measured here" in note for note in document["notes"])
    assert not any("would first measure" in note for note in document["notes"])


def test_nothing_to_measure_is_exit_code_1(paceline_here: Call, tiny: tuple[str, ...]) -> None:
    done = paceline_here("bench", "digits", *tiny, "--devices", "cuda", "--parts", "compute", *SHORT).ended(1)
    assert "no CUDA" in done.out


def test_latencies(paceline_here: Call, tiny: tuple[str, ...], tmp_path: Path) -> None:
    paceline_here("train", "digits", *tiny, "--run-dir", "run").ended(0)
    for target in (("run", "--weights", "model"), ("digits", *tiny)):
        done = paceline_here("bench", *target, "--inference", "--batch-sizes", "1,4", "--seconds", "0.1", "--json")
        assert done.code == 0, done
        rows = done.document["rows"]
        assert [(row["scenario"], row["batch_size"]) for row in rows[:4]] == [
            *(("batch", 1), ("batch", 4), ("single stream", 1), ("multi stream", 8)),
        ]
        assert rows[4]["scenario"] == "offline"
        for row in rows[:4]:
            reported = row["latency_seconds"]
            assert 0 < reported["p50"] <= reported["p90"] <= reported["p95"] <= reported["p99"]
            # The one is a mean over parts, of which the last, shorter one is left out: near, also where some are slow.
            assert row["samples_per_second"]["middle"] == pytest.approx(row["batch_size"] / reported["mean"], rel=0.5)


def test_time_to_a_target(paceline_here: Call, tiny: tuple[str, ...], tmp_path: Path) -> None:
    requested = ("train.duration=40 steps", "evaluate.every=10 steps", "checkpoint.every=off")
    bench = ("bench", "digits", *tiny, *requested, "--price-per-hour", "3.6", "--json")
    done = paceline_here(*bench, "--runs", "2", "--to", "top1_accuracy=20", "--output", "out").ended(0)
    row = done.document["rows"][0]
    assert row["reached"] == 2
    assert [each["seed"] for each in row["each"]] == [0, 1]
    for each in row["each"]:
        assert 0 < each["train_seconds"] < each["wall_seconds"]
    assert row["cost"]["middle"] == pytest.approx(row["median_wall_seconds"]["middle"] / 1000)
    assert "top1_accuracy 20" in (tmp_path / "out" / "benchmark.md").read_text()

    done = paceline_here(*bench, "--runs", "1", "--to", "top1_accuracy=99.99")
    row = done.document["rows"][0]
    assert (row["reached"], row["median_seconds"]["middle"]) == (0, None)
    assert "1 of 1 missed the target" in row["trouble"]
