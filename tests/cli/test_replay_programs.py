"""`paceline verify` and `diff` of runs of a program: `paceline.fit`, `paceline.Loop` and tasks given in Python."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fork_server
import pytest
import torch
from calls import SOURCES, Call
from run_directories import fingerprint

from paceline.checkpoint.manifest import read_components, read_manifest
from paceline.checkpoint.store import CheckpointStore

# The network is in a module next to the program; what comes after training must not be reached by a replay.
PARTS = """
from torch import nn

def network():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 1))
"""
PROGRAM = """
import sys
import torch
import torch.nn.functional as F
import paceline
from torch.utils.data import TensorDataset
from parts import network

KEYS = {{"checkpoint.keep": 9, "telemetry.log_every": "1 steps", "telemetry.report": False, "telemetry.trackers": []}}
RATE = 0.01

{function}

if __name__ == "__main__":
    torch.manual_seed(0)
    points = torch.randn(96, 4)
    train(sys.argv[1], points, points.sum(1, keepdim=True))
    open(sys.argv[1] + ".after", "x").close()
"""
LOOP = """
def train(run, inputs, targets):
    data = TensorDataset(inputs, targets)
    loop = paceline.Loop(run, data, batch_size=16, epochs=2, checkpoint_every="4 steps", overrides=KEYS)
    model = loop.prepare(network())
    optimizer = loop.keep(torch.optim.AdamW(model.parameters(), RATE))
    for step, (inputs, targets) in loop:
        loss = F.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loop.log(loss=loss)
        if loop.due("1 epoch"):
            with loop.evaluation(data) as scores:
                for inputs, targets in scores:
                    scores.add(error=(model(inputs) - targets).abs())
"""
FIT = """
def train(run, inputs, targets):
    keys = KEYS | {"checkpoint.every": "4 steps"}
    data, count = (inputs, targets), int(sys.argv[2]) if sys.argv[2:] else 1
    paceline.fit(network(), data, data, loss=lambda outputs, targets: F.mse_loss(outputs, targets), lr=RATE, epochs=2,
                 batch_size=16, run_dir=run, overrides=keys, processes=count, quiet=True)
"""
TASK = """
class Mine(paceline.ImageClassification):
    pass

def train(run, *_):
    keys = KEYS | {"checkpoint.every": "4 steps", "train.duration": "12 steps", "model.options.width": 4,
                   "model.options.stages": 1, "batch.global_size": 16}
    paceline.train("digits", overrides=keys, run_dir=run, task=Mine, quiet=True)
"""
FACES = {"loop": LOOP, "fit": FIT, "task": TASK}
Train = Callable[..., Path]


@pytest.fixture
def trained(tmp_path: Path) -> Train:
    """``trained("loop", "run")``: the run of a program, which may be edited first."""

    def train(face: str, name: str, *words: object, edit: Callable[[str], str] = str) -> Path:
        (tmp_path / "parts.py").write_text(PARTS)
        (tmp_path / f"{face}.py").write_text(edit(PROGRAM.format(function=FACES[face])))
        command = [sys.executable, f"{face}.py", name, *map(str, words)]
        environment = {**os.environ, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"}
        fork_server.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True)
        return tmp_path / name

    return train


def verified(call: Call, run: Path, code: int, *options: object) -> Any:
    before = fingerprint(run)
    document = call("verify", run, "--json", "--trust-code", *options).ended(code).document
    assert fingerprint(run) == before
    return document


def nudge(run: Path, step: int, name: str) -> None:
    """Change one weight of a checkpoint by one unit in the last place, so that every digest fits."""
    path = run / "checkpoints" / f"step-{step:08d}"
    states, facts = read_components(path), dict(read_manifest(path).facts)
    flat = states["model"][name].reshape(-1)
    flat[3] = torch.nextafter(flat[3], torch.tensor(torch.inf))
    CheckpointStore(run / "checkpoints").save(step, states, facts, replace=True)


@pytest.mark.thorough
@pytest.mark.parametrize("face", FACES)
def test_a_tampered_weight_is_named_with_its_stretch(paceline_here: Call, trained: Train, face: str) -> None:
    run = trained(face, "run")
    verified(paceline_here, run, 0, "--step", "4:8")
    name = "classifier.weight" if face == "task" else "0.weight"
    nudge(run, 8, name)
    found = verified(paceline_here, run, 1, "--step", "4:8")["first_difference"]
    assert (found["to"], found["tensor"], found["ulps"]) == (8, name, 1), found
    assert sorted(each.name for each in run.parent.glob("*.after")) == ["run.after"]


@pytest.mark.thorough
@pytest.mark.parametrize("face", FACES)
def test_every_stretch_follows_from_its_program(paceline_here: Call, trained: Train, face: str) -> None:
    document = verified(paceline_here, trained(face, "run"), 0, "--all")
    assert (document["segments"][0]["from"], document["segments"][-1]["to"]) == (0, 12)


@pytest.mark.thorough
def test_fit_in_two_processes(paceline_here: Call, trained: Train) -> None:
    verified(paceline_here, trained("fit", "run", 2), 0, "--step", "4:8")


def test_what_cannot_be_run_again_cannot_be_told(paceline_here: Call, trained: Train, tmp_path: Path) -> None:
    run, program = trained("loop", "run"), tmp_path / "loop.py"
    assert "add --trust-code" in paceline_here("verify", run).ended(3).err
    text = program.read_text()
    for path in (program, tmp_path / "parts.py"):
        text = path.read_text()
        path.write_text(text + "# changed\n")
        assert f"has changed since it trained the run: {path}" in verified(paceline_here, run, 3)["reason"]
        path.write_text(text)
    facts = json.loads((run / "environment.json").read_text())
    (run / "environment.json").write_text(json.dumps(facts | {"command": f"sh -c 'touch {tmp_path}/made'"}))
    assert "does not start the recorded program" in verified(paceline_here, run, 3)["reason"]
    assert not (tmp_path / "made").exists()
    (run / "environment.json").write_text(json.dumps(facts | {"program": None}))
    assert "not by a program whose file" in verified(paceline_here, run, 3)["reason"]
    identity = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(identity | {"id": "0" * 32}))
    assert "is of another run" in verified(paceline_here, run, 1)["first_difference"]["cause"]


@pytest.mark.parametrize("face", ["loop", pytest.param("fit", marks=pytest.mark.thorough)])
def test_a_program_that_trains_another_run_first_is_not_repeated(
    paceline_here: Call, trained: Train, face: str
) -> None:
    """Nor where the other run is gone, which would be taken for this one."""

    def twice(text: str) -> str:
        return text.replace(
            "    train(sys.argv[1]", '    train("before", points, points.sum(1, keepdim=True))\n    train(sys.argv[1]'
        )

    run = trained(face, "run", edit=twice)
    before = fingerprint(run.with_name("before"))
    assert "trains another run first" in verified(paceline_here, run, 3, "--step", "0:4")["reason"]
    assert fingerprint(run.with_name("before")) == before
    shutil.rmtree(run.with_name("before"))
    assert "trains another run first" in verified(paceline_here, run, 3, "--step", "0:4")["reason"]


@pytest.mark.thorough
def test_a_program_that_trains_nothing_proves_nothing(paceline_here: Call, trained: Train) -> None:
    skip = "    import os\n    if os.path.exists(sys.argv[1]):\n        sys.exit()\n    train("
    run = trained("loop", "run", edit=lambda text: text.replace("    train(", skip))
    for stretch in ("0:4", "4:8"):
        document = verified(paceline_here, run, 3, "--step", stretch)
        assert "its program ended without training" in document["reason"]
        assert document["promise"] == ""
    facts = json.loads((run / "environment.json").read_text())
    (run / "environment.json").write_text(json.dumps(facts | {"command": "/no/python loop.py run"}))
    assert "cannot be started" in verified(paceline_here, run, 3, "--step", "0:4")["reason"]


@pytest.mark.parametrize(
    "face", ["loop", *(pytest.param(each, marks=pytest.mark.thorough) for each in ("fit", "task"))]
)
def test_a_changed_line_is_the_cause(paceline_here: Call, trained: Train, face: str) -> None:
    """The first run's program is no longer there: only records are compared; then both are, in their own folders."""
    if face == "task":

        def edit(text: str) -> str:
            return text.replace(
                "    pass", "    def loss(self, model, batch):\n        return 2 * super().loss(model, batch)"
            )
    else:

        def edit(text: str) -> str:
            return (
                text.replace("0.01", "0.02") if face == "loop" else text.replace("F.mse_loss(out", "2 * F.mse_loss(out")
            )

    first, second = trained(face, "first"), trained(face, "second", edit=edit)
    document = paceline_here("diff", first, second, "--json", "--trust-code").ended(1).document
    assert "the program has changed" in document["not_computed_again"]
    assert document["causes"][0]["kind"] == "code"
    assert document["causes"][0]["key"] == f"source of {face}.py", document["causes"]
    assert document["first_different_step"] == 1


@pytest.mark.thorough
def test_a_late_difference_of_loops_is_found_in_its_step(paceline_here: Call, trained: Train, tmp_path: Path) -> None:
    first = trained("loop", "first", edit=lambda text: text.replace('"1 steps"', '"6 steps"'))
    Path(tmp_path / "loop.py").rename(tmp_path / "first.py")
    facts = json.loads((first / "environment.json").read_text())
    facts = json.loads(json.dumps(facts).replace("loop.py", "first.py"))
    (first / "environment.json").write_text(json.dumps(facts))
    late = "        loss = (1 + (step == 6)) * F.mse_loss("
    second = trained(
        "loop",
        "second",
        edit=lambda text: text.replace('"1 steps"', '"6 steps"').replace("        loss = F.mse_loss(", late),
    )
    document = paceline_here("diff", first, second, "--json", "--trust-code").ended(1).document
    assert (document["first_different_step"], document["exact"]) == (6, True), document
    assert document["where"] == {"phase": "backward", "module": "3", "tensor": "gradient of the output"}, document
    assert document["causes"][0]["kind"] == "code", document
