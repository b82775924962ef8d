"""The world is a detail: any number of processes, however started, sees the same batches and measures the same."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calls import Call
from paceline.reports.audit import used_samples
from PIL import Image

# Without BatchNorm, which sees only a rank's own samples, and so small that one sample is a batch.
PLAIN = """
from torch import nn

def plain(num_classes, in_channels):
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(in_channels * 144, num_classes))
"""
PLAIN_MODEL = ("model.name=plain:plain", "model.options=null", "data.workers=0", "train.precision=fp32")


@pytest.fixture
def train(studio: Path, run: Call, run_here: Call, summary: Call) -> Call:
    """Train in the studio to the end, alone in this process or in several others; returns what summary.json says."""
    (studio / "plain.py").write_text(PLAIN)

    def trainer(run_dir: Path, *arguments: object, processes: int) -> dict[str, Any]:
        command = ("train", "recipe.yaml", *arguments, "--run-dir", run_dir)
        done = run_here(*command) if processes == 1 else run(*command, "--processes", processes, where=studio)
        assert done.code == 0, done.err
        found: dict[str, Any] = summary(run_dir)
        assert found["status"] == "completed"
        return found

    return trainer


def batches(run_dir: Path) -> dict[int, list[int]]:
    """Samples of each step over all ranks, sorted."""
    used: dict[int, list[int]] = {}
    for rank in range(len([*(run_dir / "ledger").glob("rank-*.ids")])):
        for entry in used_samples(run_dir, rank):
            used.setdefault(entry.step, []).extend(entry.ids.tolist())
    return {step: sorted(ids) for step, ids in sorted(used.items())}


def losses(run_dir: Path) -> list[float]:
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return [event["loss"] for event in events if event["event"] in ("step", "evaluation")]


@pytest.mark.world_size(3)
@pytest.mark.slow
@pytest.mark.parametrize("several", [3, pytest.param(2, marks=pytest.mark.thorough)])
@pytest.mark.everyday
def test_evaluation_is_exact_in_any_world(
    studio: Path, undisturbed: Path, run: Call, run_here: Call, several: int
) -> None:
    """33 samples in five batches over 1, 2 and 3 processes: the same numbers, each sample once."""
    answers, predictions = [], []
    for processes in (1, several):
        file = studio / f"predictions-{processes}.jsonl"
        command = ("evaluate", undisturbed, "--json", "--predictions", file)
        done = run_here(*command) if processes == 1 else run(*command, "--processes", processes, where=studio)
        assert (done.code, done.err) == (0, "")
        answers.append(done.document)
        predictions.append([json.loads(line) for line in file.read_text().splitlines()])
    assert [line["id"] for line in predictions[0]] == list(range(33))
    assert predictions[0] == predictions[1]
    exact = ("samples", "top1_accuracy", "top1_correct", "path", "weights", "broken")
    assert [{key: answer[key] for key in exact} for answer in answers] == [{key: answers[0][key] for key in exact}] * 2
    assert answers[0]["samples"] == 33
    assert answers[0]["top1_correct"] == sum(line["prediction"] == line["target"] for line in predictions[0])
    assert [answer["loss"] for answer in answers] == pytest.approx([answers[0]["loss"]] * 2, rel=1e-9)


@pytest.mark.world_size(2)
@pytest.mark.everyday
def test_two_processes_score_the_network_that_they_save(undisturbed: Path, run_here: Call) -> None:
    """Each rank has other BatchNorm statistics: those of the first are scored, since they are saved."""
    recorded = (undisturbed / "events.jsonl").read_text().splitlines()
    scores = {each["weights"]: each for each in map(json.loads, recorded) if each["event"] == "evaluation"}
    for weights in ("model", "ema"):
        answer = run_here("evaluate", undisturbed, "--weights", weights, "--json").ended(0).document
        assert answer["top1_accuracy"] == scores[weights]["top1_accuracy"]
        assert answer["loss"] == pytest.approx(scores[weights]["loss"], rel=1e-9)


@pytest.mark.world_size(3)
@pytest.mark.parametrize("processes", [1, 3])
def test_fewer_samples_than_processes(
    studio: Path, tmp_path: Path, undisturbed: Path, run: Call, run_here: Call, processes: int
) -> None:
    """Three samples in two batches: the third process has nothing to score, and nobody waits for it.

    A metric of a library, which sees all scores at once, gives the same figure.
    """
    for split in ("train", "val"):
        for level, name in enumerate(("blue", "green", "red")):
            (tmp_path / "few" / split / name).mkdir(parents=True)
            pixels = np.full((12, 12, 3), 60 * level, dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "few" / split / name / "0.png")
    named = "evaluate.metrics.micro={name: 'torchmetrics.classification:MulticlassAccuracy', num_classes: 3}"
    few = (f"data.path={tmp_path / 'few'}", "evaluate.batch_size=2", named)
    command = ("evaluate", undisturbed, *few, "evaluate.metrics.micro.average=micro", "--json")
    done = run_here(*command) if processes == 1 else run(*command, "--processes", processes, where=studio)
    assert done.code == 0, done.err
    answer = done.document
    assert answer["samples"] == 3
    assert answer["top1_accuracy"] == pytest.approx(100 * answer["top1_correct"] / 3)
    assert answer["micro"] == pytest.approx(answer["top1_correct"] / 3)


@pytest.mark.world_size(3)
@pytest.mark.slow
def test_images_of_many_shapes_and_views_are_exact_in_any_world(
    studio: Path, tmp_path: Path, undisturbed: Path, run: Call, run_here: Call
) -> None:
    """Two sizes, three shapes each, every image and its mirror, over 1 and 3 processes: the same numbers."""
    for split in ("train", "val"):
        for level, name in enumerate(("blue", "green", "red")):
            (tmp_path / "oblong" / split / name).mkdir(parents=True)
            for number, (height, width) in enumerate([(12, 12), (12, 20), (20, 12), (12, 19)]):
                pixels = np.random.default_rng([level, number]).integers(0, 256, (height, width, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / "oblong" / split / name / f"{number}.png")
    shown = (f"data.path={tmp_path / 'oblong'}", "data.evaluation_shape=rectangular", "data.evaluation_multiple=4")
    command = ("evaluate", undisturbed, *shown, "evaluate.augment=flip", "--sizes", "12,16", "--on", "validation")
    answers = []
    for processes in (1, 3):
        arguments = (*command, "--json")
        done = run_here(*arguments) if processes == 1 else run(*arguments, "--processes", processes, where=studio)
        assert done.code == 0, done.err
        answers.append(done.document)
        for row in answers[-1]["sizes"]:
            assert row.pop("seconds") > 0 < row.pop("samples_per_second")
    assert answers[0]["samples"] == 12
    assert answers[1] == answers[0]


@pytest.mark.world_size(2)
@pytest.mark.slow
@pytest.mark.everyday
def test_two_processes_train_as_one_does(studio: Path, train: Call, audited: Call) -> None:
    """The same slots of the same batches with the same dropout: equal but for the order of sums.

    90 samples in batches of 88: every other step has two, both the first rank's, and the second rank has none. Nothing
    is clipped: that would hide a gradient that is too long.
    """
    alone, both = studio / "as-one", studio / "as-two"
    changes = (*PLAIN_MODEL, "batch.global_size=88", "train.duration=6 epochs", "schedule.warmup=1 steps")
    changes += ("optimizer.clip_norm=off",)
    train(alone, *changes, processes=1)
    train(both, *changes, processes=2)
    assert [len(ids) for ids in batches(both).values()] == [88, 2] * 6
    assert batches(alone) == batches(both)
    assert losses(both) == pytest.approx(losses(alone), rel=1e-5)
    for run_dir in (alone, both):
        document = audited(run_dir)
        assert (document["epochs_complete"], document["duplicates"], document["missing"]) == (6, 0, 0)


@pytest.mark.world_size(2)
@pytest.mark.slow
def test_going_on_in_another_world(studio: Path, train: Call, audited: Call) -> None:
    """Two processes, then one, then two: each sample of each epoch still once."""
    run_dir = studio / "worlds"
    for steps, processes in ((9, 2), (20, 1), (30, 2)):
        outcome = train(run_dir, "data.workers=0", f"train.duration={steps} steps", processes=processes)
        assert (outcome["step"], outcome["world_size"]) == (steps, processes)
        document = audited(run_dir)
        assert (document["steps"], document["duplicates"], document["missing"]) == (steps, 0, 0)
    assert outcome["resumes"] == 2
    assert outcome["ledger"] == {"epochs_complete": 5, "duplicates": 0, "missing": 0, "broken": 0}


@pytest.mark.world_size(2)
@pytest.mark.slow
def test_slurm_starts_what_our_launcher_starts(studio: Path, start: Call, same_outcome: Call) -> None:
    """Two tasks as srun starts them, each with its variables; no launcher, no torchrun."""
    port = random.SystemRandom().randrange(20_000, 32_000)  # below those that a socket gets which asks for any
    run_dir = studio / "slurm"
    tasks = [
        start(
            "train", "recipe.yaml", "--run-dir", run_dir, where=studio,
            variables={
                **SLURM, "SLURM_NTASKS": "2", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank),
                "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NNODES": "1", "SLURM_SRUN_COMM_HOST": "10.0.0.1",
                "SLURM_NODEID": "0", "MASTER_PORT": str(port),
            },
        )
        for rank in range(2)
    ]  # fmt: skip
    ends = [task.wait(120) for task in tasks]
    assert [end.code for end in ends] == [0, 0], ends[0].err + ends[1].err
    assert "Completed after 60 steps" in ends[0].out
    assert ends[1].out == ""
    same_outcome(run_dir)
    assert json.loads((run_dir / "environment.json").read_text())["launched_by"] == "slurm"


SLURM = {
    "SLURM_JOB_ID": "30001",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "11",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_NNODES": "3",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
    "SLURM_STEP_NODELIST": "node[003-005]",
}


@pytest.mark.world_size(2)
def test_compressed_gradients_are_nearly_the_same(studio: Path, train: Call) -> None:
    command = (*PLAIN_MODEL, "train.duration=12 steps", "checkpoint.every=off")
    plain = train(studio / "plain", *command, processes=2)
    for dtype in ("bf16", "fp16"):
        asked = f"parallel.gradient_compression={dtype}"
        compressed = train(studio / f"compressed-{dtype}", *command, asked, processes=2)
        assert plain["weights_sha256"] != compressed["weights_sha256"]
        assert compressed["metrics"]["loss"] == pytest.approx(plain["metrics"]["loss"], rel=0.02)
