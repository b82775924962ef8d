"""Runs are looked at and not touched; BatchNorm is handled both ways; processes share the points and change none."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from paceline.errors import CheckpointError, PacelineError, RecipeError
from paceline.host.world import World
from paceline.metrics.accumulator import Metric
from paceline.pages.page import Chart
from paceline.plugins.references import trusting_code
from paceline.records.run_directory import encode_json
from paceline.trainer.evaluate_target import EvaluationRequest, evaluate_target
from paceline_advisor.commands import Landscape
from paceline_advisor.landscape.loss_surface import open_run, read_trajectory
from paceline_advisor.landscape.study import comparison, explore

Trained = Callable[..., Path]


def inspected(*runs: Path, overrides: tuple[str, ...] = (), **requested: Any) -> Any:
    measures = set(requested.get("measure", ("curve", "surface", "line")))
    few = {"points": 3} if measures & {"curve", "line"} else {}
    few |= {"grid": 3} if measures & {"surface", "trajectory"} else {}
    words = (*map(str, runs), *overrides)
    return explore(Landscape(runs=words, **{"samples": 300, **few, **requested}), lambda _: None)


def files_in(folder: Path) -> dict[str, tuple[str, int]]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(p): (sha256(p.read_bytes()).hexdigest(), p.stat().st_mtime_ns) for p in files}


def test_a_whole_look_leaves_the_run_as_it_was(trained: Trained) -> None:
    run = trained("a")
    before, threads = files_in(run), torch.get_float32_matmul_precision()
    report = inspected(run)
    assert files_in(run) == before
    assert torch.get_float32_matmul_precision() == threads
    (found,) = report.runs
    assert found.steps == 40
    assert found.curve.values["loss"][1] == pytest.approx(found.surface.values["loss"][1][1], rel=1e-6)
    assert found.trajectory.steps == (10, 20, 30, 40)
    assert found.trajectory.coordinates[-1] == (0, 0)
    assert 0.5 < sum(found.trajectory.explained) <= 1 + 1e-9
    assert [each.epsilon for each in found.sharpness] == [1e-3, 5e-4]
    assert found.sharpness[0].percent > found.sharpness[1].percent > 0
    assert found.curvature.value > 0
    titles = [each.title for each in report.__paceline__().blocks if isinstance(each, Chart)]
    assert [title.split(",")[0] for title in titles][-3:] == [
        "Loss around the weights",
        "Loss around the weights",
        "The run's path",
    ]


def test_batch_and_rate_are_those_of_the_plan(trained: Trained) -> None:
    scaled = {"optimizer.lr": 0.01, "optimizer.lr_scaling": "linear", "optimizer.lr_reference_batch": 719}
    run = trained("cut", **{"batch.global_size": 4096, "train.duration": "1 steps", "evaluate.every": "off"} | scaled)
    (found,) = inspected(run, measure=("curve",), samples=20).runs
    assert (found.batch_size, found.peak_lr) == (1438, pytest.approx(0.02))


def test_results_are_those_of_evaluate(trained: Trained) -> None:
    run = trained("a")
    report = inspected(run, samples=None, measure=("curve",))
    expected = evaluate_target(EvaluationRequest(target=run)).metrics
    assert report.runs[0].results["validation"] == pytest.approx(dict(expected), rel=1e-5)
    assert report.samples == {"train": 1438, "validation": 359}
    assert report.runs[0].gap == pytest.approx(
        report.runs[0].results["train"]["top1_accuracy"] - expected["top1_accuracy"], rel=1e-5
    )


# --------------------------------------------------------------------------------------------- BatchNorm
def test_recomputed_statistics_are_those_of_the_batches_and_leave_no_trace(trained: Trained) -> None:
    subject = open_run(trained("a"), Landscape(runs=("a",), samples=300), World()).subject
    weights, statistics = subject.current_weights(), subject.statistics()
    stored = subject.measure(weights, "train", batch_norm="stored")
    recomputed = subject.measure(weights, "train", batch_norm="recomputed")
    assert stored["loss"] != pytest.approx(recomputed["loss"], rel=1e-3)
    # The scale of a convolution before a norm means nothing, unless its old statistics are kept.
    scaled = weights.clone()
    begin = 0
    for name, shape in subject.shapes.items():
        if name.endswith("conv.weight"):
            scaled[begin : begin + shape.numel()] *= 3
        begin += shape.numel()
    assert subject.measure(scaled, "train", batch_norm="recomputed")["loss"] == pytest.approx(
        recomputed["loss"], rel=1e-3
    )
    assert subject.measure(scaled, "train", batch_norm="stored")["loss"] > 1.5 * stored["loss"]
    assert torch.equal(subject.statistics(), statistics)
    assert subject.measure(weights, "train", batch_norm="stored") == stored


@pytest.mark.parametrize("batch_norm", ["recomputed", "stored"])
def test_slopes_and_curvature_are_of_the_same_loss(trained: Trained, batch_norm: Any) -> None:
    """Held against differences of the loss itself, along a direction."""
    subject = open_run(trained("a"), Landscape(runs=("a",), samples=300, batch_norm=batch_norm), World()).subject
    subject.network.double()
    # Batches and loss too: differences say something only where few activations change sides between the points.
    subject._samples = {
        split: tuple(replace(batch, inputs=batch.inputs.double()) for batch in batches)
        for split, batches in subject._samples.items()
    }
    subject.task = SimpleNamespace(
        metrics=(Metric(name="loss"),),
        collectors=tuple,
        score=lambda model, batch: {"loss": F.cross_entropy(model(batch.inputs), batch.targets, reduction="none")},
    )
    weights = subject.current_weights()
    loss, slope = subject.loss_and_gradient(weights, "train")
    assert loss == pytest.approx(subject.measure(weights, "train")["loss"], rel=1e-9)
    direction, little = slope / slope.norm(), 1e-7
    curvature = subject.curvature(weights, "train")(direction)
    (before, first), (after, second) = (
        subject.loss_and_gradient(weights + side * little * direction, "train") for side in (-1, 1)
    )
    assert (after - before) / (2 * little) == pytest.approx(float(slope @ direction), rel=1e-5)
    difference = (second - first) / (2 * little)
    assert float((difference - curvature).norm() / curvature.norm()) < 0.01


def test_a_network_of_ones_own_without_batch_norm(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flat_network.py").write_text(
        "from torch import nn\ndef make(num_classes): return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    run = trained("plain", model__name="flat_network:make", model__options={})
    with pytest.raises(RecipeError, match="--trust-code"):
        inspected(run, measure=("curve",))
    with trusting_code():
        assert inspected(run, measure=("curve",)).batch_norm == "none"
    with trusting_code(), pytest.raises(PacelineError, match="--batch-norm stored has no effect"):
        inspected(run, measure=("curve",), batch_norm="stored")


# ------------------------------------------------------------------------------------------------ two runs
def test_two_runs_side_by_side_and_the_line_between_them(trained: Trained) -> None:
    runs = (trained("a"), trained("b", seed=7, batch__global_size=256))
    report = inspected(*runs, measure=("line",), points=5)
    curve = report.line.curves["validation"]
    assert curve.positions == (-0.5, 0.0, 0.5, 1.0, 1.5)
    # Both ends are the runs themselves, each with its own weights.
    for run, share in zip(runs, (0.0, 1.0), strict=True):
        subject = open_run(run, Landscape(runs=(str(run),), samples=300), World()).subject
        expected = subject.measure(subject.current_weights(), "validation")["loss"]
        assert curve.values["loss"][curve.positions.index(share)] == pytest.approx(expected, rel=1e-6)
    assert report.line.barrier["train"] > 0
    heading, rows = comparison(report)
    assert [row[1] for row in rows] == [64, 256]
    assert len(heading) == len(rows[0])


def test_stored_statistics_go_along_the_line_too(trained: Trained) -> None:
    runs = (trained("a"), trained("b", seed=7, batch__global_size=256))
    report = inspected(*runs, measure=("line",), points=5, batch_norm="stored")
    curve = report.line.curves["validation"]
    for run, found in zip(report.runs, (curve.values["loss"][1], curve.values["loss"][3]), strict=True):
        assert found == pytest.approx(run.results["validation"]["loss"], rel=1e-6)


# -------------------------------------------------------------------------------------------- what is refused
def test_what_cannot_be_had_is_said_in_one_sentence(trained: Trained, tmp_path: Path) -> None:
    run = trained("a")
    few = trained("few", checkpoint__keep=1, checkpoint__keep_best=False)
    other = trained("other", model__options={"width": 8, "stages": 1, "depth": 1})
    with pytest.raises(CheckpointError, match=r"has 1 whole checkpoint.*a trajectory needs 3"):
        inspected(few, measure=("trajectory",))
    assert any("no trajectory" in note for note in inspected(few, points=3).notes)
    with pytest.raises(PacelineError, match="give two"):
        inspected(run, measure=("line",))
    with pytest.raises(PacelineError, match=r"there is no line .* is 4x1x3x3 in one and 8x1x3x3 in the other"):
        inspected(run, other, measure=("line",))
    with pytest.raises(PacelineError, match="--grid has no effect on --measure curve"):
        inspected(run, measure=("curve",), grid=5)
    with pytest.raises(PacelineError, match="--epsilon has no effect on --measure curve"):
        inspected(run, measure=("curve",), epsilon=(0.1,))
    with pytest.raises(PacelineError, match=r"--subspace 1000000 is more than the [\d,]+ dimensions"):
        inspected(run, measure=("sharpness",), subspace=1_000_000)
    with pytest.raises(CheckpointError, match="there is no run directory"):
        inspected(tmp_path / "nowhere")


def test_a_damaged_checkpoint_is_left_out_of_the_way(trained: Trained) -> None:
    run = trained("damaged")
    opened = open_run(run, Landscape(runs=(str(run),), samples=300), World())
    assert read_trajectory(opened)[0] == [10, 20, 30, 40]
    file = run / "checkpoints" / "step-00000020" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    assert read_trajectory(opened)[0] == [10, 30, 40]


def test_points_that_are_no_numbers_are_told_and_left_out_of_charts(trained: Trained) -> None:
    report = inspected(trained("a"), measure=("curve", "surface"), reach=1e30, batch_norm="stored")
    (found,) = report.runs
    assert [math.isfinite(each) for each in found.curve.values["loss"]] == [False, True, False]
    assert any("not finite at 10 of 12 points" in note for note in report.notes)
    shown = next(
        each for each in report.__paceline__().blocks if isinstance(each, Chart) and "Loss around" in each.title
    )
    assert [[each is None for each in row] for row in shown.traces[0]["z"]] == [
        [True, True, True],
        [True, False, True],
        [True, True, True],
    ]
    json.loads(encode_json(report.to_json()))


def test_two_processes_find_what_one_does(
    trained: Trained, on_two_ranks: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    run = trained("a")
    program = (
        "import sys, json\nfrom pathlib import Path\nfrom paceline.records.run_directory import encode_json\n"
        "from paceline_advisor.commands import Landscape\n"
        "from paceline_advisor.landscape.study import explore\n"
        "r = explore(Landscape(runs=(sys.argv[1], 'parallel.threads=1'), samples=300, points=4, grid=3, products=3, "
        "tolerance=0.5), print)\n"
        "print(encode_json(r.to_json()))\n"
    )
    first, second = on_two_ranks(["-c", program, str(run)], tmp_path)
    words = (str(run), "parallel.threads=1")
    requested = Landscape(runs=words, samples=300, points=4, grid=3, products=3, tolerance=0.5)
    alone = explore(requested, lambda _: None)
    assert first == second == json.loads(json.dumps(alone.to_json(), default=str))
