"""A proof with real processes: it passes what is right, and finds what only several processes get wrong."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from calls import Call

pytestmark = pytest.mark.slow

DIGITS = ("digits", "model.options={width: 4, stages: 1, dropout: 0.1}", "parallel.threads=1")

# Imported by every process that asks for the task, and by the proof itself.
PLANTED = """
import dataclasses
import torch.distributed
import paceline
import paceline.data.image.pipeline as pipeline
import paceline.trainer.step as step
from paceline.distributed.data_parallel import DataParallel

def size():
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


# Each process keeps BatchNorm statistics of its own.
DataParallel.sync_buffers = lambda self, modules: None

# Every process scores as many batches, the last one twice.
slices = pipeline.evaluation_slices


def padded(samples, batch_size, world, *shapes):
    parts = list(slices(samples, batch_size, world, *shapes))
    most = -(-(-(-samples // batch_size)) // world.world_size)
    return iter(parts + parts[-1:] * (most - len(parts)))


pipeline.evaluation_slices = padded

# The rate is scaled by the number of processes.
settings = step.apply_settings


def scaled(optimizer, wanted):
    settings(optimizer, dataclasses.replace(wanted, learning_rate=wanted.learning_rate * size()))


step.apply_settings = scaled


class Shared(paceline.ImageClassification):
    # The loss is divided by the number of processes, which the trainer has done.
    def loss(self, model, batch):
        return super().loss(model, batch) / size()
"""


def _checks(done: Any) -> dict[str, dict[str, Any]]:
    assert done.out, done.err
    return {check["name"]: check for check in done.document["checks"]}


@pytest.mark.everyday
@pytest.mark.world_size(2)
def test_two_processes_of_a_network_with_batchnorm_and_dropout(run: Call, tmp_path: Path) -> None:
    done = run("prove", *DIGITS, "--json")
    checks = _checks(done)
    assert done.code == 0, done.out
    assert {name for name, check in checks.items() if check["verdict"] != "passed"} == set()
    assert checks["processes"]["difference"] <= checks["processes"]["limit"] < 1e-9
    # Nothing is written where the user is, but for what the test itself keeps of the output.
    assert {path.suffix for path in tmp_path.iterdir()} == {".out", ".err"}


@pytest.mark.world_size(2)
def test_what_only_several_processes_get_wrong(run: Call, tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text(PLANTED)
    done = run("prove", *DIGITS, "task=planted:Shared", "--json")
    checks = _checks(done)
    assert done.code == 1
    found = {name for name, check in checks.items() if check["verdict"] == "failed"}
    assert found == {"buffers", "learning-rate", "metric", "processes", "tail"}
    assert "0.5 times the expected gradient" in checks["processes"]["found"]
    assert "2-processes, step 1: 0.1 instead of 0.05" in checks["learning-rate"]["found"]
    assert "2-processes, model: +8 samples were counted" in checks["metric"]["found"]
    assert "they differ after step 3" in checks["buffers"]["found"]


@pytest.mark.world_size(2)
def test_exact_processes(run: Call) -> None:
    done = run("prove", *DIGITS, "parallel.exact=true", "--processes", "2", "--json", timeout=200).ended(0)
    assert _checks(done)["processes"]["verdict"] == "passed"


@pytest.mark.thorough
@pytest.mark.world_size(2)
def test_processes_that_fail_are_told(run: Call, tmp_path: Path) -> None:
    (tmp_path / "alone.py").write_text(
        "import os\n"
        "import paceline\n"
        "class Alone(paceline.ImageClassification):\n"
        "    def loss(self, model, batch):\n"
        "        assert os.environ.get('RANK', '0') == '0', 'only for one'\n"
        "        return super().loss(model, batch)\n"
    )
    checks = _checks(run("prove", *DIGITS, "task=alone:Alone", "--json").ended(1))
    assert "only for one" in checks["processes"]["found"]
    assert checks["processes"]["verdict"] == checks["run"]["verdict"] == "failed"
    assert checks["gradient"]["verdict"] == "passed"


@pytest.mark.thorough
@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("place", "number"),
    [("*/one-batch/run", signal.SIGTERM), ("*/2-processes", signal.SIGHUP)],
)
def test_a_proof_that_is_ended_leaves_nothing(start: Call, place: str, number: signal.Signals) -> None:
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip(f"{number.name} is ignored here, as under nohup, and stays ignored")
    launched = start("prove", *DIGITS)
    launched.wait_for(lambda: list(launched.temporary.glob(f"paceline-prove-{place}")))
    os.kill(launched.process.pid, number)
    assert launched.wait(60).code != 0
    launched.seconds_until_alone()
    assert launched.leftovers() == []
