"""A run directory with lost or cut files resumes from one of its checkpoints, or is refused unchanged."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from run_directories import fingerprint

import paceline
from paceline.errors import PacelineError
from paceline.host.world import World
from paceline.recipe.load import load_recipe
from paceline.records.run_directory import RunDirectory
from paceline.trainer.run_dir_checks import ResumeRequest, open_directory
from paceline.trainer.subject import Subject

Make = Callable[..., Any]
UNTIL = {"train.duration": "12 steps", "checkpoint.keep": 3, "telemetry.log_every": "1 steps"}
# By name: the parts of a directory that can be lost together; one that ends with a slash is a folder.
PARTS = (
    *("run.json", "events.jsonl", "ledger/", "summary.json", "plan.json", "recipe.yaml", "environment.json"),
    *("checkpoints/step-00000004/", "checkpoints/step-00000008/", "checkpoints/step-00000010/"),
    *("checkpoints/best.json", "evaluation/"),
)
TELLING = {*PARTS} - {"plan.json", "recipe.yaml", "environment.json"}


@pytest.fixture(scope="module")
def stopped(train_shared: Make) -> Path:
    """A run that was stopped after ten of twelve steps."""
    run_dir: Path = train_shared({**UNTIL, "train.until": "10 steps"}).run_dir
    return run_dir


@pytest.fixture(scope="module")
def request_to_resume(tiny_recipe: Path, tiny_task: Make) -> ResumeRequest:
    recipe = load_recipe(tiny_recipe, UNTIL).recipe
    prepared = Subject.open(recipe, World(), "network", task=tiny_task()(recipe))
    prepared.close()
    facts = {"torch": torch.__version__}
    return ResumeRequest(
        recipe=prepared.recipe, plan=prepared.plan, resume="auto", device_facts=facts, geometry=prepared.geometry
    )


def spoil(source: Path, run: Path, losses: dict[str, int | None]) -> Path:
    shutil.copytree(source, run)
    for name, kept in losses.items():
        files = (
            sorted(each for each in (run / name).rglob("*") if each.is_file()) if name.endswith("/") else [run / name]
        )
        if kept is None:
            shutil.rmtree(run / name) if name.endswith("/") else files[0].unlink()
        else:
            cut = files[kept % len(files)]
            os.truncate(cut, kept % max(cut.stat().st_size, 1))
    return run


def is_start(after: Path, before: bytes) -> bool:
    return before.startswith(after.read_bytes()) if after.exists() else not before


@settings(max_examples=40, deadline=None, phases=[Phase.reuse, Phase.generate])  # a smaller example takes long to find
@given(losses=st.dictionaries(st.sampled_from(PARTS), st.none() | st.none() | st.integers(0, 10**6)))
@pytest.mark.everyday
def test_nothing_begins_again_over_records(
    stopped: Path, request_to_resume: ResumeRequest, losses: dict[str, int | None]
) -> None:
    with tempfile.TemporaryDirectory(dir=stopped.parent) as folder:
        run = spoil(stopped, Path(folder) / "run", losses)
        before = fingerprint(run)
        growing = {name: (run / name).read_bytes() for name in before if name.endswith((".jsonl", ".ids"))}
        try:
            decision = open_directory(RunDirectory(run), request_to_resume)
        except PacelineError:
            assert fingerprint(run) == before
            return
        if decision.choice.path is None:  # a new run, in a directory in which nothing told of steps
            assert {name for name, kept in losses.items() if kept is None} >= TELLING
            return
        step = decision.choice.path.name
        after = fingerprint(run)
        own = {name: digest for name, digest in fingerprint(stopped).items() if name.startswith(f"checkpoints/{step}/")}
        assert own.items() <= after.items()
        assert not {f"checkpoints/{name}/" for name in ("step-00000008", "step-00000010") if name > step} - {*losses}
        for name, content in growing.items():
            assert is_start(run / name, content)
        kept = {*after.values()} | {before[name] for name in growing}
        rewritten = ("summary.json", "plan.json", "recipe.yaml", "environment.json", "run.json", "evaluation/")
        assert {digest for name, digest in before.items() if not name.startswith(rewritten)} <= kept


@pytest.mark.parametrize(
    "losses",
    [
        {"run.json": None, "events.jsonl": 700, "checkpoints/step-00000010/": 40},
        {"ledger/": 50, "summary.json": 10, "checkpoints/best.json": 5, "environment.json": 0},
        {"run.json": 9, "events.jsonl": None, "ledger/": None, "checkpoints/step-00000010/": None},
    ],
)
@pytest.mark.thorough
def test_what_resumes_ends_with_the_same_weights(
    stopped: Path, train_shared: Make, runs: Path, tiny_recipe: Path, tiny_task: Make, losses: dict[str, int | None]
) -> None:
    whole = train_shared(UNTIL).summary.weights_sha256
    resumed = paceline.train(
        tiny_recipe, overrides=UNTIL, run_dir=spoil(stopped, runs / "run", losses), task=tiny_task(), quiet=True
    )
    assert resumed.summary.weights_sha256 == whole
    assert resumed.summary.resumes == 1
