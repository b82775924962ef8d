"""`paceline diff`: equal runs are equal, and each planted cause is named with its exact step."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from calls import Call, in_a_process
from PIL import Image
from run_directories import fingerprint

import paceline
from paceline.checkpoint.manifest import read_components, read_manifest
from paceline.checkpoint.store import CheckpointStore
from paceline_advisor.replay import diff

# Records are rarer than steps, so that no record names the step.
STEPS = {
    "checkpoint.every": "4 steps",
    "checkpoint.keep": 9,
    "telemetry.log_every": "4 steps",
    "train.duration": "12 steps",
    "train.ema": 0.9,
    "optimizer.momentum": 0.9,
    "optimizer.weight_decay": 0.01,
    "data.validation_fraction": 0.2,
}
Train = Callable[..., Path]


@pytest.fixture(scope="module")
def first(tiny_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that the others are compared with."""
    path = tmp_path_factory.mktemp("first") / "first"
    paceline.train(tiny_recipe, overrides=STEPS, run_dir=path, quiet=True)
    return path


@pytest.fixture
def trained(tiny_recipe: Path, tmp_path: Path) -> Train:
    """``trained({...}, name)``: another run with these overrides."""

    def train(overrides: Mapping[str, Any], name: str = "second", **options: Any) -> Path:
        paceline.train(tiny_recipe, overrides=STEPS | overrides, run_dir=tmp_path / name, quiet=True, **options)
        return tmp_path / name

    return train


def compared(call: Call, first: Path, second: Path, code: int, *options: str) -> Any:
    """The report of `paceline diff`, which must end with this code and change neither run."""
    before = fingerprint(first), fingerprint(second)
    document = call("diff", first, second, "--json", *options).ended(code).document
    assert (fingerprint(first), fingerprint(second)) == before
    assert document["equal"] == {0: True, 1: False, 3: None}[code]
    return document


def check(document: Any, step: int, phase: str, kind: str, key: str) -> None:
    """Check that a report names a step, the part of it, and the first cause."""
    assert document["first_different_step"] == step, document
    assert document["last_equal_step"] == step - 1, document
    assert document["where"]["phase"] == phase, document
    cause = document["causes"][0]
    assert (cause["kind"], cause["key"]) == (kind, key), document
    assert cause["evidence"], document


# ------------------------------------------------------------------------------------------------ keys of the recipe

KEYS: dict[str, tuple[dict[str, Any], int, str, str]] = {
    "rate": ({"optimizer.lr": 0.06}, 1, "update", "optimizer.lr"),
    "decay": ({"optimizer.weight_decay": 0.02}, 1, "update", "optimizer.weight_decay"),
    "momentum": ({"optimizer.momentum": 0.8}, 2, "update", "optimizer.momentum"),
    "warm-up": ({"schedule.warmup": "3 steps"}, 1, "update", "schedule.warmup"),
    "schedule": ({"schedule.name": "cosine"}, 2, "update", "schedule.name"),
    "clipping": ({"optimizer.clip_norm": 0.1}, 1, "update", "optimizer.clip_norm"),
    "optimizer": ({"optimizer.name": "adamw", "optimizer.momentum": None}, 1, "update", "optimizer.name"),
    "average": ({"train.ema": 0.3}, 4, "update", "train.ema"),
    "smoothing": ({"train.label_smoothing": 0.1}, 1, "forward", "train.label_smoothing"),
    "dropout": ({"model.options.dropout": 0.3}, 1, "forward", "model.options.dropout"),
    "width": ({"model.options.width": 8}, 1, "forward", "model.options.width"),
    "precision": ({"train.precision": "bf16"}, 1, "forward", "train.precision"),
    "accumulation": ({"batch.micro_size": 4}, 1, "update", "batch.micro_size"),
    "batch": ({"batch.global_size": 8}, 1, "data", "batch.global_size"),
    "seed": ({"seed": 1}, 1, "data", "seed"),
    "flip": ({"data.augment.flip": 0.5}, 1, "data", "data.augment.flip"),
    "mixing": ({"data.mix.mixup": 0.2}, 1, "data", "data.mix.mixup"),
    "sampling": ({"data.sampling": "balanced"}, 1, "data", "data.sampling"),
}
EVERYDAY = "momentum"


@pytest.mark.parametrize(
    "name", [each if each == EVERYDAY else pytest.param(each, marks=pytest.mark.thorough) for each in KEYS]
)
def test_a_key_of_the_recipe(paceline_here: Call, first: Path, trained: Train, name: str) -> None:
    overrides, step, phase, key = KEYS[name]
    harmless = {"telemetry.log_every": "3 steps", "data.workers": 0, "evaluate.every": "6 steps"}
    document = compared(paceline_here, first, trained({**overrides, **harmless}), 1)
    check(document, step, phase, "recipe", key)


@pytest.mark.thorough
@pytest.mark.parametrize("few", [0, 32])
def test_a_late_difference_is_found_at_its_step(
    paceline_here: Call, trained: Train, monkeypatch: pytest.MonkeyPatch, few: int
) -> None:
    """Without a checkpoint or a record in between; also where a second pass notes only that step in detail."""
    monkeypatch.setattr(diff, "_FEW_STEPS", few)
    rare = {
        "schedule.name": "step",
        "checkpoint.every": None,
        "telemetry.log_every": "12 steps",
        "evaluate.every": None,
    }
    runs = [trained({**rare, "schedule.milestones": [f"{step} steps"]}, f"falls-{step}") for step in (6, 8)]
    document = compared(paceline_here, *runs, 1)
    check(document, 7, "update", "recipe", "schedule.milestones")
    assert document["where"]["tensor"] == "weight"
    assert "lr of parameter group 0 is 0.005" in document["causes"][0]["evidence"]


@pytest.mark.thorough
def test_a_fork_parts_at_its_first_own_step(paceline_here: Call, first: Path) -> None:
    paceline_here("fork", first, "--at", 4, "optimizer.lr=0.06", "--run-dir", "fork").ended(0)
    document = compared(paceline_here, first, Path("fork"), 1)
    check(document, 5, "update", "recipe", "optimizer.lr")
    assert document["last_equal_checkpoint"] == 4


# ------------------------------------------------------------------------------------------------ data


def pictures(folder: Path) -> Path:
    """A table of 48 pictures with two labels."""
    folder.mkdir()
    table, draws = folder / "table.csv", np.random.default_rng(1)
    rows = []
    for number in range(48):
        Image.fromarray(draws.integers(0, 255, (8, 8), dtype=np.uint8)).save(folder / f"{number}.png")
        rows.append((f"{number}.png", "ab"[number % 2]))
    with table.open("w", newline="") as file:
        csv.writer(file).writerows([("path", "label"), *rows])
    return table


def of_table(table: Path) -> dict[str, Any]:
    return {"data.dataset": "csv", "data.path": str(table), "train.duration": "8 steps", "train.ema": None}


def mirror(path: Path) -> None:
    Image.fromarray(np.array(Image.open(path))[::-1].copy()).save(path)


def change_label(folder: Path) -> None:
    table = folder / "table.csv"
    table.write_text(table.read_text().replace("3.png,b", "3.png,a", 1))


def losses(run: Path) -> list[float]:
    events = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return [each["loss"] for each in events if each["event"] == "step"]


DATA: dict[str, tuple[Callable[[Path], object], str]] = {
    "label": (change_label, "table.csv"),
    "content": (lambda folder: mirror(folder / "3.png"), "3.png"),
    "missing": (
        lambda folder: (folder / "table.csv").write_text(
            (folder / "table.csv").read_text().replace("3.png,b\n", "", 1)
        ),
        "table.csv",
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("in_place", [False, True])
def test_data_that_changed(paceline_here: Call, trained: Train, tmp_path: Path, name: str, in_place: bool) -> None:
    change, file = DATA[name]
    tables = [pictures(tmp_path / "one"), pictures(tmp_path / "other")]
    if in_place:
        tables[1] = tables[0]
    often = {"telemetry.log_every": "1 steps"}  # one of the runs may be impossible to compute again
    first = trained({**of_table(tables[0]), **often}, "first")
    change(tables[1].parent)
    second = trained({**of_table(tables[1]), **often})
    document = compared(paceline_here, first, second, 1)
    pairs = zip(losses(first), losses(second), strict=True)
    assert document["first_different_step"] == next(step for step, (one, other) in enumerate(pairs, 1) if one != other)
    assert document["exact"], document
    assert bool(document["not_computed_again"]) == in_place, document
    assert (document["causes"][0]["kind"], document["causes"][0]["key"]) == ("data", file), document
    assert document["where"]["phase"] == "data", document
    assert in_place or name == "missing" or "3.png" in str(document["compared"])


# ------------------------------------------------------------------------------------------------ code and chance

NETWORK = """
import os, torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 16), nn.Linear(16, 10)
    def forward(self, images):
        return self.last({noise}(self.first(images.flatten(1)[:, :64])).tanh())

class Noise(nn.Module):
    def forward(self, values):
        return values + int.from_bytes(os.urandom(2), "big") / 2**24

class NoisyNet(Net):
    def __init__(self):
        super().__init__()
        self.noise = Noise()

def net(*arguments, **options):
    return {kind}()
"""


def by_command(tmp_path: Path, recipe: Path, name: str, *words: str, **variables: str) -> Path:
    """Train as a command, which imports what lies in the folder."""
    overrides = [f"{key}={'off' if each is None else each}" for key, each in STEPS.items()]
    in_a_process("train", recipe, *overrides, *words, "--run-dir", name, cwd=tmp_path, **variables).ended(0)
    return tmp_path / name


@pytest.mark.thorough
def test_code_that_changed(paceline_here: Call, tiny_recipe: Path, tmp_path: Path) -> None:
    words = ("model.name=mine:net", "model.options={}", "telemetry.log_every=1 steps")
    (tmp_path / "mine.py").write_text(NETWORK.format(noise="", kind="Net"))
    first = by_command(tmp_path, tiny_recipe, "first", *words)
    (tmp_path / "mine.py").write_text(NETWORK.format(noise="2 * ", kind="Net"))
    second = by_command(tmp_path, tiny_recipe, "second", *words)
    document = compared(paceline_here, first, second, 1)
    assert "--trust-code" in document["not_computed_again"]
    document = compared(paceline_here, first, second, 1, "--trust-code")
    assert (document["first_different_step"], document["exact"]) == (1, True)
    assert document["causes"][0]["kind"] == "code"
    assert document["causes"][0]["key"] == "source of mine"


@pytest.mark.thorough
def test_an_operator_that_is_not_deterministic(paceline_here: Call, tiny_recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(NETWORK.format(noise="self.noise", kind="NoisyNet"))
    words = ("model.name=mine:net", "model.options={}", "telemetry.log_every=1 steps")
    runs = [by_command(tmp_path, tiny_recipe, name, *words) for name in ("first", "second")]
    document = compared(paceline_here, *runs, 1, "--trust-code")
    assert (document["first_different_step"], document["exact"]) == (1, True)
    assert document["where"] == {"phase": "forward", "module": "noise", "tensor": "output"}
    assert (document["causes"][0]["kind"], document["causes"][0]["key"]) == ("nondeterminism", "noise")


# ------------------------------------------------------------------------------------------------ environment


@pytest.mark.thorough
def test_other_vector_instructions(
    paceline_here: Call, tiny_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("this processor has no wider vectors than AVX2")
    first = by_command(tmp_path, tiny_recipe, "first")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    second = by_command(tmp_path, tiny_recipe, "second")
    monkeypatch.delenv("ATEN_CPU_CAPABILITY")
    document = compared(paceline_here, first, second, 1)
    assert document["exact"], document
    assert document["where"]["phase"] in ("forward", "backward", "update"), document
    assert (document["causes"][0]["kind"], document["causes"][0]["key"]) == ("environment", "vector instructions")


@pytest.mark.thorough
def test_other_numbers_of_processes_that_are_not_exact(paceline_here: Call, first: Path, tmp_path: Path) -> None:
    paceline_here("train", first / "recipe.yaml", "--run-dir", "second", "--processes", 2).ended(0)
    document = compared(paceline_here, first, tmp_path / "second", 1)
    check(document, 1, "update", "environment", "processes")


def edit(path: Path, change: Callable[[Any], object]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def save_again(run: Path, step: int, change: Callable[[dict[str, Any]], object]) -> None:
    """Write a checkpoint once more with another state, so that every digest fits."""
    path = run / "checkpoints" / f"step-{step:08d}"
    states = read_components(path)
    change(states)
    CheckpointStore(run / "checkpoints").save(step, states, dict(read_manifest(path).facts), replace=True)


def double(states: dict[str, Any]) -> None:
    states["model"]["classifier.weight"].mul_(2)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["torch", "processor", "numpy"])
def test_a_library_or_a_processor(paceline_here: Call, first: Path, tmp_path: Path, name: str) -> None:
    """The later checkpoints are changed too, as another version would have."""
    second = Path(shutil.copytree(first, tmp_path / "second"))

    def change(environment: Any) -> None:
        where = {"torch": environment, "processor": environment["cpu"], "numpy": environment["versions"]}[name]
        where["model" if name == "processor" else name] = "another"

    edit(second / "environment.json", change)
    for step in (8, 12):
        save_again(second, step, double)
    document = compared(paceline_here, first, second, 1)
    assert (document["last_equal_step"], document["first_different_step"]) == (4, 8)
    assert (document["causes"][0]["kind"], document["causes"][0]["key"]) == ("environment", name)


@pytest.mark.thorough
def test_a_checkpoint_that_was_tampered_with(paceline_here: Call, first: Path, tmp_path: Path) -> None:
    second = Path(shutil.copytree(first, tmp_path / "second"))
    save_again(second, 8, double)
    document = compared(paceline_here, first, second, 1)
    assert (document["last_equal_step"], document["first_different_step"]) == (4, 8)
    assert (document["causes"][0]["kind"], document["causes"][0]["key"]) == ("weights", "second")
    assert "classifier.weight" in document["causes"][0]["evidence"]


def test_a_score_that_was_changed(paceline_here: Call, first: Path, tmp_path: Path) -> None:
    second, lines = Path(shutil.copytree(first, tmp_path / "second")), []
    for event in map(json.loads, (second / "events.jsonl").read_text().splitlines()):
        changed = event["event"] == "evaluation" and event["step"] == 8
        lines.append(json.dumps({**event, "top1_accuracy": 99.0} if changed else event))
    (second / "events.jsonl").write_text("\n".join(lines) + "\n")
    document = compared(paceline_here, first, second, 1)
    assert document["where"] == {"phase": "evaluation", "module": "", "tensor": "top1_accuracy"}
    assert document["first_different_step"] == 8
    assert document["causes"][0]["kind"] == "records"


# ------------------------------------------------------------------------------------------------ equal runs


def test_a_copy_is_equal(paceline_here: Call, first: Path, tmp_path: Path) -> None:
    second = Path(shutil.copytree(first, tmp_path / "second"))
    document = compared(paceline_here, first, second, 0)
    assert document["last_equal_step"] == 12
    assert document["causes"] == []
    assert "equal: all that both runs recorded" in paceline_here("diff", first, second).ended(0).out


def test_what_cannot_be_compared_cannot_be_told(paceline_here: Call, first: Path, tmp_path: Path) -> None:
    second = Path(shutil.copytree(first, tmp_path / "second"))
    shutil.rmtree(second / "checkpoints")
    shutil.rmtree(second / "ledger")
    (second / "events.jsonl").unlink()
    assert "share nothing" in paceline_here("diff", first, second).ended(3).err
    paceline_here("diff", first, "nothing").refused("there is no run directory")


EQUAL: dict[str, dict[str, Any]] = {
    "again": {},
    "log_every": {"telemetry.log_every": "1 steps"},
    "checkpoints": {"checkpoint.every": "3 steps", "checkpoint.keep": 2},
    "evaluations": {"evaluate.every": "2 steps", "evaluate.keep_examples": 0},
    "workers": {"data.workers": 2},
    "prefetch": {"data.workers": 1, "data.prefetch": 4},
    "shorter": {"train.duration": "8 steps"},
    "longer": {"train.duration": "16 steps"},
    "kept": {"checkpoint.keep": 1},
    "report": {"telemetry.report": True},
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", EQUAL)
def test_runs_that_differ_in_what_changes_nothing(paceline_here: Call, first: Path, trained: Train, name: str) -> None:
    document = compared(paceline_here, first, trained(EQUAL[name]), 0)
    assert document["last_equal_step"] == (8 if name == "shorter" else 12)


RECIPES: dict[str, dict[str, Any]] = {
    "accumulation": {"batch.micro_size": 4},
    "adamw and dropout": {"optimizer.name": "adamw", "optimizer.momentum": None, "model.options.dropout": 0.3},
    "mixing": {"data.mix.mixup": 0.2, "data.augment.flip": 0.5},
    "sampling": {"data.sampling": "balanced"},
    "cosine": {"schedule.name": "cosine", "train.ema": None},
    "noise": {"batch.micro_size": 8, "telemetry.noise_scale": "2 steps"},
    "bf16": {"train.precision": "bf16"},
    "clipped": {"optimizer.clip_norm": 0.1, "train.label_smoothing": 0.1},
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", RECIPES)
def test_each_kind_of_run_is_equal_after_a_stop(paceline_here: Call, trained: Train, name: str) -> None:
    first = trained(RECIPES[name], "first")
    trained({**RECIPES[name], "train.until": "6 steps"})
    compared(paceline_here, first, trained({**RECIPES[name], "telemetry.log_every": "3 steps"}), 0)


@pytest.mark.thorough
def test_stopped_and_resumed_is_equal(paceline_here: Call, first: Path, trained: Train) -> None:
    for until in ("3 steps", "6 steps", None):
        second = trained({"train.until": until})
    compared(paceline_here, first, second, 0)
    shutil.rmtree(second / "checkpoints" / "step-00000012")
    (second / "summary.json").unlink()
    compared(paceline_here, first, trained({}), 0)


@pytest.mark.thorough
def test_an_exact_run_on_other_numbers_of_processes_is_equal(paceline_here: Call, tiny_recipe: Path) -> None:
    words = [f"{key}={'off' if each is None else each}" for key, each in STEPS.items()]
    words += ["parallel.exact=true", "parallel.logical_ranks=2"]
    paceline_here("train", tiny_recipe, *words, "--run-dir", "first").ended(0)
    part = ("train", tiny_recipe, *words, "--run-dir", "second")
    paceline_here(*part, "--processes", 2, "--until", "6 steps").ended(75)
    paceline_here(*part, "--processes", 1).ended(0)
    compared(paceline_here, Path("first"), Path("second"), 0)


@pytest.mark.thorough
def test_a_fork_without_changes_and_a_moved_folder_are_equal(
    paceline_here: Call, first: Path, trained: Train, tmp_path: Path
) -> None:
    paceline_here("fork", first, "--at", 4, "--run-dir", "fork").ended(0)
    compared(paceline_here, first, Path("fork"), 0)
    one, other = (trained(of_table(pictures(tmp_path / name)), f"run-{name}") for name in ("a", "b"))
    compared(paceline_here, one, other, 0)
