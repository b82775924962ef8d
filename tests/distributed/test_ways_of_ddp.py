"""Two processes train one recipe in several ways, one after the other: compiled, with a static graph, compressed."""

from __future__ import annotations

from typing import Any

import pytest
from calls import Call

pytestmark = [pytest.mark.world_size(2), pytest.mark.slow, pytest.mark.thorough]

# Everything that DDP could do otherwise: accumulation, BatchNorm, dropout, an epoch's last step that is smaller.
PROGRAM = """
import json, os, sys
import torch
import torch._dynamo
import paceline
from pathlib import Path
from torch import nn
from paceline.errors import PacelineError

# A group of the caller's own, which all trainings use and none takes down.
torch.distributed.init_process_group(
    "gloo", init_method=os.environ["PACELINE_RENDEZVOUS"], rank=int(os.environ["RANK"]), world_size=2
)
PLAIN = {
    "model.options": {"width": 4, "stages": 1, "dropout": 0.2}, "model.channels_last": True,
    "batch.global_size": 512, "batch.micro_size": 128, "optimizer.lr": 0.05, "schedule.name": "constant",
    "schedule.warmup": None, "train.duration": "8 steps", "train.precision": "fp32", "train.ema": 0.9,
    "evaluate.every": "4 steps", "checkpoint.every": "3 steps", "parallel.device": "cpu", "parallel.threads": 1,
    "telemetry.log_every": "1 steps", "telemetry.trackers": [],
}
SPARE = {"model.name": "spare:Spare", "model.options": None}
COMPILED = {"model.compile": True, "model.compile_backend": "aot_eager"}
STATIC = {"parallel.static_graph": True}
ALLOWED = {"parallel.unused_parameters": "allow"}

def train(name, *changes):
    overrides = {key: value for each in (PLAIN, *changes) for key, value in each.items()}
    torch.compiler.reset()
    try:
        result = paceline.train("digits", overrides=overrides, run_dir=name, quiet=True)
    except PacelineError as error:
        return {"error": str(error)}
    events = [json.loads(line) for line in (Path(name) / "events.jsonl").read_text().splitlines()]
    return {
        "sha": result.summary.weights_sha256,
        "loss": result.metrics["loss"],
        "resumes": result.summary.resumes,
        "incidents": [each["incident"] for each in events if each["event"] == "incident"],
        "measured": [each["what"] for each in events if each["event"] == "measurement" and each["what"] != "forecast"],
    }

answer = {
    "plain": train("plain"),
    "compiled": train("compiled", COMPILED),
    "static": train("static", STATIC),
    "static and compiled": train("static-compiled", STATIC, COMPILED),
    "unused": train("unused", SPARE),
    "unused, allowed": train("allowed", SPARE, ALLOWED),
    "unused, static": train("allowed-static", SPARE, ALLOWED, STATIC),
    "body": train("body", SPARE, {"model.options": {"spare": False}}),
}
import gc, os
gc.collect()
torch.distributed.destroy_process_group()
print(json.dumps(answer), flush=True)
os._exit(0)  # threads of a group that something still holds would abort the interpreter's own end
"""
SPARE = """
from torch import nn

class Spare(nn.Module):
    def __init__(self, num_classes, spare=True):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))
        if spare:
            self.spare = nn.Linear(4, 4)

    def forward(self, x):
        return self.body(x)
"""


@pytest.fixture(scope="module")
def told(on_two_ranks: Call, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the first of the two has to say, by the name of the way; both must say the same."""
    directory = tmp_path_factory.mktemp("ways")
    (directory / "spare.py").write_text(SPARE)
    answers = on_two_ranks(["-W", "error::UserWarning", "-c", PROGRAM], directory, seconds=240)
    for way, answer in answers[0].items():
        assert answers[1][way].get("sha") == answer.get("sha"), way
        assert answers[1][way].get("error") == answer.get("error"), way
    return answers[0]


@pytest.fixture
def ways(told: dict[str, Any]) -> Call:
    """What came of a way that must have succeeded."""

    def way(name: str) -> dict[str, Any]:
        assert "error" not in told[name], told[name]
        found: dict[str, Any] = told[name]
        return found

    return way


def test_a_compiled_run_is_the_same_run(ways: Call) -> None:
    """Cut at DDP's buckets, and traced without inductor: the same operations, and so the same bits."""
    plain, compiled = ways("plain"), ways("compiled")
    assert compiled["loss"] == pytest.approx(plain["loss"], rel=1e-5)
    assert compiled["measured"] == ["compile"]
    assert "recompile" not in compiled["incidents"]


@pytest.mark.parametrize("way", ["static", "static and compiled"])
def test_a_static_graph_changes_nothing(ways: Call, way: str) -> None:
    assert ways(way)["loss"] == pytest.approx(ways("plain")["loss"], rel=1e-5)


def test_unused_parameters_are_named_by_both(told: dict[str, Any]) -> None:
    assert "2 parameter(s) did not contribute to the loss: spare.weight, spare.bias;" in told["unused"]["error"]


@pytest.mark.parametrize("way", ["unused, allowed", "unused, static"])
def test_allowed_unused_parameters_change_nothing_else(ways: Call, way: str) -> None:
    assert ways(way)["loss"] == pytest.approx(ways("body")["loss"], rel=1e-6)
