"""Runs that take turns, as real processes: are their times told apart, and do they leave nothing behind?"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.recipe.load import load_recipe, shipped_recipes, to_yaml
from paceline.recipe.schema import Recipe

TASKS = '''
import os, signal, time
import torch
from paceline.tasks.image_classification import ImageClassification

class Slow(ImageClassification):
    """Each step takes 50 ms more, many times what a busy machine makes of a step; add --one-gpu-batch this network."""
    def loss(self, model, batch):
        time.sleep(0.05)
        return super().loss(model, batch)

class Starved(ImageClassification):
    """Each batch comes 50 ms late."""
    def open_pipeline(self, placement):
        pipeline = super().open_pipeline(placement)
        stream = pipeline.train_batches
        def late(*order):
            for batch in stream(*order):
                time.sleep(0.05)
                yield batch
        pipeline.train_batches = late
        return pipeline

class Greedy(ImageClassification):
    """Wants more memory than there is, at the ninth step."""
    def loss(self, model, batch):
        if batch.slice.step == 9:
            torch.empty(1 << 60)
        return super().loss(model, batch)

class Dying(ImageClassification):
    def loss(self, model, batch):
        if batch.slice.step == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)
'''


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder to stand in, with tasks of one's own."""
    folder, before = tmp_path_factory.mktemp("tasks"), Path.cwd()
    (folder / "burst_tasks.py").write_text(TASKS)
    os.chdir(folder)
    yield folder
    os.chdir(before)


def recipe(path: Path, task: str = "") -> Recipe:
    return load_recipe(path, {"task": f"burst_tasks:{task}"} if task else {}).recipe


@pytest.fixture(scope="module")
def measured(tiny_recipe: Path, tasks: Path) -> dict[str, Any]:
    """Some variants in one go."""
    from paceline_advisor.bench.interleaved import Variant, run_interleaved

    variants = {
        "plain": recipe(tiny_recipe),
        "slow": recipe(tiny_recipe, "Slow"),
        "starved": recipe(tiny_recipe, "Starved"),
        "starved, computing": Variant(recipe=recipe(tiny_recipe, "Starved"), part="compute"),
        "starved, data": Variant(recipe=recipe(tiny_recipe, "Starved"), part="data"),
        "grown": load_recipe(tiny_recipe, {"batch.global_size": 240, "batch.growth.1": 360}).recipe,
    }
    return run_interleaved(variants, rounds=4, block_seconds=0.2)


def test_what_takes_longer_is_told_apart(measured: dict[str, Any]) -> None:
    plain, slow = measured["plain"], measured["slow"]
    assert [plain.trouble, slow.trouble] == ["", ""]
    assert len(plain.rounds) == len(slow.rounds) == 4
    assert slow.slower_than(plain).middle > 1.5
    # The fifty milliseconds are in the forward pass of every round, and nowhere else. A busy machine adds to both, and
    # holds up now and then what lies between two readings of the clock: so the middle round, and wide limits.
    assert all(each.phases["forward"] >= 0.05 for each in slow.rounds)
    assert statistics.median(each.phases["backward"] for each in slow.rounds) < 0.05
    accounted = [sum(each.phases.values()) / each.step_seconds for each in slow.rounds]
    assert statistics.median(accounted) == pytest.approx(1, abs=0.1)
    assert plain.warm_up_seconds >= 0.2
    assert plain.warm_up_steps > 3
    assert plain.peak_memory_bytes > 2**26


def test_a_batch_that_grows_is_measured_at_its_first_size(measured: dict[str, Any]) -> None:
    grown = measured["grown"]
    # In the micro-batches that both sizes have.
    assert (grown.trouble, grown.facts["micro_batch_size"]) == ("", 120)
    assert all(each.samples <= 240 * each.steps for each in grown.rounds)


@pytest.mark.thorough
def test_parts_are_measured_by_themselves(measured: dict[str, Any]) -> None:
    starved, computing, data = (measured[f"starved{part}"] for part in ("", ", computing", ", data"))
    assert [starved.trouble, computing.trouble, data.trouble] == ["", "", ""]
    assert all(each.phases["data_wait"] >= 0.05 for each in (*starved.rounds, *data.rounds))
    # The same batches again: nothing is late. A median, as a busy machine may hold up any one of them.
    assert statistics.median(each.phases["data_wait"] for each in computing.rounds) < 0.025
    assert computing.phases["forward"] > 0
    assert data.data_wait_fraction > 0.5
    assert data.phases["forward"] == 0
    assert min(data.step_seconds) >= 0.05
    assert statistics.median(computing.step_seconds) < statistics.median(starved.step_seconds)
    # Samples are counted where the epoch's last step is smaller, and where there is no epoch.
    assert all(each.samples <= 16 * each.steps for each in starved.rounds)
    assert all(each.samples == 16 * each.steps for each in computing.rounds)


def test_who_fails_is_reported_and_the_others_go_on(tiny_recipe: Path, tasks: Path) -> None:
    from paceline_advisor.bench.interleaved import run_interleaved

    variants = {name: recipe(tiny_recipe, task) for name, task in (("a", ""), ("b", "Greedy"), ("c", "Dying"))}
    variants["d"] = load_recipe(tiny_recipe, {"model.name": "no_such_network"}).recipe
    message: list[str] = []
    found = run_interleaved(variants, rounds=2, block_seconds=0.1, log=message.append)
    assert (found["a"].trouble, len(found["a"].rounds)) == ("", 2)
    assert found["b"].out_of_memory
    assert "allocate memory" in found["b"].trouble
    assert found["b"].alone
    assert "SIGKILL" in found["c"].trouble
    assert "no_such_network" in found["d"].trouble
    assert not found["d"].out_of_memory
    assert any("once more alone" in line for line in message)


def test_several_processes_make_one_variant(tiny_recipe: Path, tasks: Path) -> None:
    from paceline_advisor.bench.interleaved import run_interleaved

    found = run_interleaved({"two": recipe(tiny_recipe)}, rounds=2, block_seconds=0.1, processes=2)["two"]
    assert found.trouble == ""
    assert found.facts["micro_batch_size"] == 8
    assert all(each.samples <= 16 * each.steps for each in found.rounds)


@pytest.mark.parametrize("name", shipped_recipes())
def test_what_is_measured_is_the_recipe_without_an_end(name: str, tmp_path: Path) -> None:
    from paceline_advisor.bench.interleaved import recipe_for_timing

    recipe = load_recipe(name).recipe
    endless = recipe_for_timing(recipe)
    (tmp_path / "endless.yaml").write_text(to_yaml(endless))
    assert load_recipe(tmp_path / "endless.yaml").recipe == endless
    assert (endless.model, endless.data, endless.batch, endless.optimizer) == (
        *(recipe.model, recipe.data, recipe.batch, recipe.optimizer),
    )
    assert endless.telemetry.log_every == recipe.telemetry.log_every


def test_a_steady_drift_favours_nobody() -> None:
    from paceline_advisor.bench.interleaved import in_order

    slots = [name for number in range(4) for name in in_order(["a", "b", "c"], number)]
    assert {name: sum(slot for slot, each in enumerate(slots) if each == name) for name in "abc"} == dict.fromkeys(
        "abc", sum(range(12)) / 3
    )


PROGRAM = """
import sys
from paceline.recipe.load import load_recipe, shipped_recipes, to_yaml
from paceline_advisor.bench.interleaved import run_interleaved
recipe = load_recipe(sys.argv[1], {"data.backend": "pytorch", "data.workers": 1}).recipe
print("begun", flush=True)
variants = dict.fromkeys(sys.argv[2], recipe)
run_interleaved(variants, rounds=1000, block_seconds=0.2, log=lambda line: print(line, flush=True))
"""


def of_folder(folder: Path) -> set[int]:
    """Processes whose temporary files lie in a folder."""
    mark, found = str(folder).encode(), set()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes():
                found.add(int(entry.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize(("number", "names"), [(signal.SIGKILL, "ab"), (signal.SIGINT, "a")])
def test_nothing_is_left_behind(tiny_recipe: Path, runs: Path, number: signal.Signals, names: str) -> None:
    folder = runs / "t"  # sockets of loader processes lie below it, and the path of one has at most 108 bytes
    folder.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tiny_recipe), names],
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        while not process.stdout.readline().startswith("round 2"):
            assert process.poll() is None
        # The runs, each with a loader process, and what helps these.
        assert len(of_folder(folder)) >= 1 + 2 * len(names)
        process.send_signal(number)
        process.communicate(timeout=60)
        deadline = time.monotonic() + 60
        while (of_folder(folder) or list(folder.iterdir())) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert of_folder(folder) == set()
        assert list(folder.iterdir()) == []
    finally:
        process.kill()
        process.communicate()
        for pid in of_folder(folder):
            os.kill(pid, signal.SIGKILL)
