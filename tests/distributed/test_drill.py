"""The drill: it survives its whole fault matrix, and it notices when a run does not."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from calls import Call
from own_networks import network_that

SOURCES = Path(__file__).parents[2] / "src"
pytestmark = pytest.mark.slow

DIGITS = (
    "digits",
    "model.options={width: 4, stages: 1, dropout: 0.1}",
    "parallel.device=cpu",
    "parallel.threads=1",
)
# One of each kind: `flipped-bit` and `lost-file` go the way of `torn-checkpoint`, a signal that of another.
_OF_SEVERAL = "nothing,kill-rank-0,kill-launcher,SIGTERM-rank,hung-rank,stopped-rank,fewer-processes,more-processes"
_OF_ONE = (
    "kill-all,kill-in-save,SIGINT-group,disk-full,file-limit,read-only,moved-directory,torn-checkpoint,"
    "lost-manifest,no-checkpoints,only-ledger,newer-format,older-weights,foreign-checkpoint,cut-events,events-gap,"
    "torn-events,torn-ledger,clock-jump"
)
# What depends on the machine or on the moment; everything else must be tried.
_MAY_BE_SKIPPED = {
    "disk-full": "nothing can be mounted",
    "read-only": "nothing can be mounted",
    "kill-in-save": "no kill hit a save",
}


def _trials(done: Any) -> dict[str, dict[str, Any]]:
    assert done.out, done.err
    document = done.document
    return {trial["fault"]: trial for trial in document["trials"]}


@pytest.mark.timeout(1800)
@pytest.mark.world_size(2)
@pytest.mark.parametrize(("processes", "only"), [(1, _OF_ONE), (2, _OF_SEVERAL)])
def test_every_kind_of_fault_is_survived(run: Call, tmp_path: Path, processes: int, only: str) -> None:
    asked = ("--processes", processes, "--steps", "80", "--only", only, "--json")
    trials = _trials(run("drill", *DIGITS, *asked, timeout=1700).ended(0))
    assert sorted(trials) == sorted(only.split(","))
    for name, trial in trials.items():
        if trial["result"] == "skipped":
            assert _MAY_BE_SKIPPED[name] in trial["reason"], trial
            continue
        assert (trial["result"], trial["lost"]) == ("pass", []), trial
        if trial["exit_code"]:
            assert trial["seconds_to_recover"] > 0, trial
        if name.startswith("SIG"):
            assert (trial["exit_code"], trial["steps_again"]) == (75, 0), trial
    if processes > 1:
        assert trials["stopped-rank"]["exit_code"] == 1
        assert "for rank 1 on" in trials["stopped-rank"]["message"]
    assert list(tmp_path.glob("paceline*")) == []  # nothing is written where the user is


@pytest.mark.world_size(1)
@pytest.mark.timeout(600)
def test_images_and_loader_processes(run: Call, studio: Path) -> None:
    before = {path: path.read_bytes() for path in (studio / "photos").rglob("*.png")}
    only = "kill-worker,half-images,broken-images"
    done = run("drill", "recipe.yaml", "--only", only, "--json", where=studio, timeout=500)
    trials = _trials(done)
    assert {name: trial["result"] for name, trial in trials.items()} == dict.fromkeys(only.split(","), "pass"), done.out
    assert "red" in trials["broken-images"]["message"]  # the class whose images were spoilt, by path
    assert {path: path.read_bytes() for path in (studio / "photos").rglob("*.png")} == before


def _plant(package: Path, module: str, line: str, instead: str) -> None:
    """A copy of the package with one line of one module changed."""
    shutil.copytree(SOURCES / "paceline", package / "paceline", ignore=shutil.ignore_patterns("__pycache__"))
    source = package / "paceline" / module
    text = source.read_text()
    assert text.count(line) == 1
    source.write_text(text.replace(line, instead))


@pytest.mark.world_size(1)
@pytest.mark.timeout(400)
def test_a_run_that_forgets_its_optimizer_fails(run: Call, tmp_path: Path) -> None:
    _plant(
        tmp_path / "planted",
        "trainer/saving.py",
        "        run.components.restore(read_components(choice.path, chunks=run.components.chunks()))\n",
        "        kept = {name: part for name, part in run.components.snapshot().items() if name == 'optimizer'}\n"
        "        run.components.restore({**read_components(choice.path, chunks=run.components.chunks()), **kept})\n",
    )
    variables = {"PYTHONPATH": str(tmp_path / "planted")}
    done = run("drill", *DIGITS, "--only", "nothing,kill-all", "--json", variables=variables, timeout=350).ended(1)
    trials = _trials(done)
    assert trials["nothing"]["result"] == "pass"
    assert trials["kill-all"]["result"] == "FAIL"
    assert "weights_sha256" in trials["kill-all"]["lost"]


@pytest.mark.world_size(1)
@pytest.mark.timeout(400)
def test_a_run_that_does_not_repeat_itself_is_not_compared(run: Call, tmp_path: Path) -> None:
    (tmp_path / "moody.py").write_text(network_that("x = x * (1 + os.urandom(1)[0] / 256)", pixels=64))
    model = ("digits", "model.name=moody:Net", "model.options=null", "parallel.device=cpu", "parallel.threads=1")
    done = run("drill", *model, "--only", "nothing,kill-all", "--json", timeout=350).ended(1)
    trials = _trials(done)
    assert trials["nothing"]["result"] == "FAIL"
    assert trials["kill-all"]["result"] == "skipped"
    assert "is not repeatable" in trials["kill-all"]["reason"]


@pytest.mark.thorough
@pytest.mark.world_size(1)
def test_a_drill_that_is_ended_leaves_nothing(start: Call) -> None:
    launched = start("drill", *DIGITS)
    launched.wait_for(lambda: list(launched.temporary.glob("paceline-drill-*/undisturbed/events.jsonl")))
    os.kill(launched.process.pid, signal.SIGTERM)
    assert launched.wait(60).code != 0
    launched.seconds_until_alone()
    assert launched.leftovers() == []
