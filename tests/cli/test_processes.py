"""How many ranks a command starts where nobody says: a function of the recipe and of the GPUs there are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest
from calls import Call

from paceline.cli.options import Processes, choose_processes, is_launched_rank, usable_gpus
from paceline.recipe.load import load_recipe


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Call:
    """``gpus(cuda=4)``: that many devices are here."""
    import torch

    def have(cuda: int = 0, xpu: int = 0) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
        monkeypatch.setattr(torch.xpu, "device_count", lambda: xpu)

    return have


@pytest.mark.parametrize(
    ("requested", "present", "count"),
    [
        ("auto", (4, 2), 4),
        ("auto", (0, 2), 2),
        ("auto", (0, 0), 0),
        ("cuda", (4, 2), 4),
        ("xpu", (4, 2), 2),
        ("cpu", (4, 2), 0),
        ("mps", (4, 2), 0),
    ],
)
def test_gpus_of_the_kind_that_is_asked_for_count(gpus: Any, requested: str, present: Any, count: int) -> None:
    gpus(*present)
    assert usable_gpus(requested) == count


@pytest.mark.parametrize(("present", "count"), [(0, 1), (1, 1), (2, 2), (8, 8)])
def test_a_rank_per_gpu_is_started_or_what_is_asked_for(gpus: Any, present: int, count: int) -> None:
    gpus(present)
    assert choose_processes(None, load_recipe("digits").recipe) == Processes(count)
    assert choose_processes(3, load_recipe("digits").recipe) == Processes(3)


def test_gpus_that_cannot_share_the_batch_are_left_out_and_this_is_told(gpus: Any) -> None:
    gpus(6)
    six = choose_processes(None, load_recipe("digits").recipe)
    assert six.count == 4
    assert six.notice == "4 of 6 GPUs are used: more cannot share batch.global_size=64 evenly"
    gpus(8)
    notice = choose_processes(None, load_recipe("digits", ["batch.micro_size=32"]).recipe).notice
    assert notice is not None
    assert notice.startswith("2 of 8 GPUs are used")
    assert "batch.global_size=64 in micro-batches of 32" in notice


def test_one_gpu_is_enough_for_a_strategy_of_one(gpus: Any) -> None:
    gpus(8)
    assert choose_processes(None, load_recipe("digits", ["parallel.strategy=single"]).recipe) == Processes(1)


def test_a_rank_starts_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    assert not is_launched_rank(4)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert is_launched_rank(None)
    with pytest.raises(click.UsageError, match="--processes starts its own ranks"):
        is_launched_rank(2)


@pytest.mark.parametrize(
    "processes", [None, pytest.param(1, marks=pytest.mark.thorough), pytest.param(2, marks=pytest.mark.thorough)]
)
def test_the_plan_is_that_of_the_run(
    paceline_here: Call, tiny: tuple[str, ...], tmp_path: Any, processes: int | None
) -> None:
    command = ["train", "digits", *tiny, "train.duration=1 steps"]
    command += [] if processes is None else ["--processes", str(processes)]
    planned = paceline_here(*command, "--plan-only", "--json").document["plan"]
    paceline_here(*command, "--run-dir", "run").ended(0)
    trained = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert planned | {"parameters": trained["parameters"]} == trained


def test_a_rank_among_several_shows_the_plan_of_their_world_once(
    paceline_here: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank, shown in (("0", "2 (ddp)"), ("1", "")):
        for name, value in (("RANK", rank), ("WORLD_SIZE", "2"), ("LOCAL_RANK", rank)):
            monkeypatch.setenv(name, value)
        done = paceline_here("train", "digits", "--plan-only").ended(0)
        assert shown in done.out
        assert bool(done.out) == bool(shown)


@pytest.mark.parametrize("count", [1, 2])
def test_modules_of_the_current_directory_come_after_the_libraries(
    paceline: Call, tmp_path: Path, tiny: tuple[str, ...], count: int
) -> None:
    """A `random.py` there is nobody's module, and a factory of another name is found, in one process and in ranks."""
    for name in ("random", "yaml", "numpy", "click", "typing"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the file in the current directory was run')\n")
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n\n\ndef net(num_classes, in_channels):\n"
        "    return nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * in_channels, num_classes))\n"
    )
    overrides = [each for each in tiny if not each.startswith("model")]
    words = ("train", "digits", "model.name=mine:net", *overrides, "--run-dir", "run", "--processes", count)
    paceline(*words, interpreter=("-P",)).ended(0)
