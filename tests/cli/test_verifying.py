"""`verify.every`: a step is computed again in training, and a silent fault ends the run."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.calls import Call, in_a_process

import paceline

# A fault as a bad chip has it: once, in one process, without a trace.
FAULTY = """
import os

import torch

import paceline

done = set()


class Faulty(paceline.ImageClassification):
    def loss(self, model, batch):
        loss = super().loss(model, batch)
        where = (batch.slice.step, int(os.environ.get("RANK", "0")))
        # Not in the trial steps before the run, which save nothing; a save ends before the next begins.
        has_begun = os.path.exists("run/checkpoints/step-00000004")
        if FAULT == "loss" and where == (STEP, RANK) and has_begun and not done:
            done.add(where)
            loss = loss * (1 + 2 ** -20)
        if FAULT == "chip" and where == (STEP, RANK) and has_begun:
            loss = loss * (1 + 2 ** -20)
        if FAULT == "always":
            loss = loss * (1 + torch.rand((), generator=noise) * 2 ** -10)
        return loss


noise = torch.Generator()
noise.seed()
FAULT, STEP, RANK = os.environ.get("FAULT", ""), int(os.environ.get("STEP", "8")), int(os.environ.get("AT", "0"))
"""
KEYS = (
    *("train.duration=20 steps", "checkpoint.every=4 steps", "verify.every=10 steps", "evaluate.every=off"),
    *("model.options.width=4", "model.options.stages=1", "batch.global_size=32", "train.ema=0.9"),
    *("data.augment.crop=pad", "telemetry.report=false", "telemetry.trackers=[]"),
)
# The check after step 10 loads the checkpoint of step 8.
FIRST = 8


@pytest.fixture
def paceline_command(folder: Path) -> Call:
    """A command as a process, in the test's folder."""
    return partial(in_a_process, cwd=folder)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "faulty.py").write_text(FAULTY)
    return tmp_path


def weights(run: str) -> tuple[Any, ...]:
    summary = json.loads(Path(run, "summary.json").read_text())
    return summary["status"], summary["weights_sha256"], summary["ema_sha256"], summary["samples"]


def incidents(run: str) -> list[str]:
    lines = Path(run, "events.jsonl").read_text().splitlines()
    return [each["message"] for each in map(json.loads, lines) if each.get("incident") == "verify"]


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("batch.micro_size=8", "optimizer.name=adamw", "optimizer.lr=0.01"),
        ("data.workers=2", "data.backend=pytorch"),
        ("train.precision=bf16",),
    ],
    ids=["plain", "accumulation and AdamW", "loader processes", "bf16"],
)
def test_checks_change_no_bit(paceline_command: Call, folder: Path, more: tuple[str, ...]) -> None:
    paceline_command("train", "digits", *KEYS, *more, "verify.every=off", "--run-dir", "plain").ended(0)
    paceline_command("train", "digits", *KEYS, *more, "--run-dir", "checked").ended(0)
    assert weights("plain") == weights("checked")
    assert incidents("checked") == []
    paceline_command("audit", "checked").ended(0)


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.thorough
def test_checks_change_no_bit_of_several_processes(
    paceline_command: Call, folder: Path, processes: int, exact: bool
) -> None:
    # An evaluation after the very step that is checked gives all processes the first one's statistics.
    keys = (*KEYS, "batch.global_size=48", "batch.micro_size=8", "evaluate.every=3 steps", f"parallel.exact={exact}")
    many = ("--processes", processes)
    paceline_command("train", "digits", *keys, "verify.every=off", *many, "--run-dir", "plain").ended(0)
    paceline_command("train", "digits", *keys, *many, "--run-dir", "checked").ended(0)
    assert weights("plain") == weights("checked")
    assert incidents("checked") == []


@pytest.mark.parametrize("more", [(), ("optimizer.name=adamw", "optimizer.lr=0.01")], ids=["SGD", "AdamW"])
def test_a_silent_fault_ends_the_run_with_the_last_good_checkpoint(
    paceline_command: Call, folder: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    call = ("train", "digits", "task=faulty:Faulty", *KEYS, *more, "--run-dir", "run")
    monkeypatch.setenv("FAULT", "loss")
    ended = paceline_command(*call).ended(1)
    assert "step 9, computed again from step-00000008, differs on rank 0" in ended.err
    assert "in model.stem.conv.weight" in ended.err
    assert "memory or processor may be faulty" in ended.err
    assert "The last good checkpoint is" in ended.err
    assert sorted(each.name for each in Path("run/checkpoints").iterdir() if each.name.startswith("step"))[-1] == (
        f"step-{FIRST:08d}"
    )
    monkeypatch.setenv("FAULT", "")
    paceline_command(*call).ended(0)
    paceline_command(*call[:-1], "whole").ended(0)
    assert weights("run") == weights("whole")


@pytest.mark.thorough
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("fault", ["loss", "chip"])
@pytest.mark.parametrize("processes", [2, 3])
def test_a_fault_of_one_process_is_found_by_another(
    paceline_command: Call, folder: Path, monkeypatch: pytest.MonkeyPatch, rank: int, fault: str, processes: int
) -> None:
    """A chip that always computes the same wrong number is found only where another one computes its part."""
    monkeypatch.setenv("FAULT", fault)
    monkeypatch.setenv("AT", str(rank))
    exact = ("parallel.exact=true", "batch.global_size=48", "batch.micro_size=8") if processes == 3 else ()
    call = ("train", "digits", "task=faulty:Faulty", *KEYS, *exact, "--processes", processes, "--run-dir", "run")
    assert "step 9, computed again from step-00000008, differs on rank" in paceline_command(*call).ended(1).err


def test_what_differs_from_time_to_time_is_no_fault(
    paceline_command: Call, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULT", "always")
    paceline_command("train", "digits", "task=faulty:Faulty", *KEYS, "--run-dir", "run").ended(0)
    (message, *_) = incidents("run")
    assert "an operation is not deterministic here" in message


def test_a_damaged_checkpoint_is_told_and_the_run_goes_on(paceline_here: Call, folder: Path) -> None:
    class Damages:
        def on_step_end(self, step: int) -> None:
            if step != FIRST + 1:
                return
            weights = Path(f"run/checkpoints/step-{FIRST:08d}/model.safetensors")
            while not weights.exists():  # a thread writes it
                time.sleep(0.01)
            content = weights.read_bytes()
            weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))

    result = paceline.train("digits", overrides=[*KEYS], run_dir="run", callbacks=[Damages()], quiet=True)
    assert result.summary.status == "completed"
    assert len(incidents("run")) == 1


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("checkpoint.every=off",), "checkpoint.every=off saves none"),
        (("parallel.strategy=fsdp", "--processes", "2"), "whole replicas"),
        (("verify.every=soon",), "verify.every"),
    ],
)
def test_where_it_cannot_work_it_is_refused(
    paceline_here: Call, folder: Path, more: tuple[str, ...], words: str
) -> None:
    paceline_here("train", "digits", *KEYS, *more, "--plan-only").refused(words)
