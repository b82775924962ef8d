"""`paceline verify`, `rewind` and `fork`: honest runs are equal, each tampered one is named."""

from __future__ import annotations

import copy
import csv
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fork_server
import numpy as np
import pytest
import torch
from calls import Call, in_a_process
from PIL import Image
from run_directories import fingerprint, saved_steps

import paceline
from paceline.checkpoint.format import read_header
from paceline.checkpoint.manifest import read_components, read_manifest
from paceline.checkpoint.store import CheckpointStore
from paceline.recipe.load import load_recipe, recipe_digest, to_tree, to_yaml
from paceline.records.ledger import LedgerWriter, PositionEntry, ledger_path, read_ledger
from paceline.records.run_directory import RunDirectory
from paceline.reports.audit import used_samples
from paceline.trainer import loop
from paceline_advisor.replay.points import Point, copy_as_of, link_tree

STEPS = {
    "checkpoint.every": "4 steps",
    "checkpoint.keep": 9,
    "telemetry.log_every": "1 steps",
    "train.duration": "12 steps",
    "train.ema": 0.9,
    "optimizer.momentum": 0.9,
    "optimizer.weight_decay": 0.01,
    "data.validation_fraction": 0.2,
}


@pytest.fixture(scope="module")
def honest(tiny_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of twelve steps with a checkpoint every four; tests change copies of it."""
    path = tmp_path_factory.mktemp("honest") / "run"
    paceline.train(tiny_recipe, overrides=STEPS, run_dir=path, quiet=True)
    return path


@pytest.fixture
def run(honest: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(honest, tmp_path / "run"))


@pytest.fixture
def trained(tiny_recipe: Path, tmp_path: Path) -> Callable[..., Path]:
    """``trained(name, {...})``: another run with these overrides."""

    def train(name: str, overrides: Mapping[str, Any], **options: Any) -> Path:
        paceline.train(tiny_recipe, overrides=STEPS | overrides, run_dir=tmp_path / name, quiet=True, **options)
        return tmp_path / name

    return train


def verified(call: Call, run: Path, code: int, *options: object) -> Any:
    """The report of `paceline verify`, which must end with this code and change nothing."""
    before = fingerprint(run)
    document = call("verify", run, "--json", *(options or ("--all",))).ended(code).document
    assert fingerprint(run) == before
    assert document["verdict"] == {0: "equal", 1: "different", 3: "unknown"}[code]
    return document


def save_again(
    folder: Path, step: int, change: Callable[[dict[str, Any]], object] = dict, *, recipe: Any = None, **facts: Any
) -> None:
    """Write a checkpoint once more with another state, recipe or facts, so that every digest fits."""
    path = folder / "checkpoints" / f"step-{step:08d}"
    manifest, states = read_manifest(path), read_components(path)
    header = dict(read_header(path / "model.safetensors")[1])
    facts = {**manifest.facts, **facts}
    if recipe is not None:
        header["recipe"] = json.dumps(to_tree(recipe))
        facts["recipe_sha256"] = recipe_digest(recipe)
    change(states)
    header = {key: each for key, each in header.items() if key not in {*facts, "component", "step", "format"}}
    CheckpointStore(folder / "checkpoints").save(step, states, facts, replace=True, file_metadata=header)


def claim(run: Path, *overrides: str) -> None:
    """Have recipe.yaml and every checkpoint say that the run had another recipe."""
    recipe = load_recipe(run, overrides).recipe
    (run / "recipe.yaml").write_text(to_yaml(recipe))
    for step in saved_steps(run):
        save_again(run, step, recipe=recipe)


def events_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]


def edit_events(run: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    events = events_of(run)
    for each in events:
        edit(each)
    (run / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in events))


def rewrite_ledger(run: Path, order: Callable[[list[Any]], list[Any]]) -> None:
    """Write a ledger of one process once more, with other positions for its steps."""
    path = ledger_path(run / "ledger", 0)
    entries = list(read_ledger(path))
    assert all(isinstance(each, PositionEntry) for each in entries)
    ids = [each.ids for each in used_samples(run, 0)]
    path.unlink()
    with LedgerWriter(path) as ledger:
        for entry, each in zip(entries, order(ids), strict=True):
            ledger.append(step=entry.step, epoch=entry.epoch, ids=each, first=entry.first)


def nudge(tensor: torch.Tensor, at: int) -> None:
    """Change one number of a tensor by one unit in the last place."""
    flat = tensor.reshape(-1)
    flat[at] = torch.nextafter(flat[at], torch.tensor(torch.inf))


# ------------------------------------------------------------------------------------------------ honest runs


@pytest.mark.thorough
def test_an_honest_run_is_equal(paceline_here: Call, run: Path) -> None:
    document = verified(paceline_here, run, 0, "--step", "4:8")
    assert document["segments"] == [{"from": 4, "to": 8, "equal": True}]
    assert document["first_difference"] is None


@pytest.mark.thorough
def test_every_stretch_and_what_a_draw_proves(paceline_here: Call, run: Path) -> None:
    document = verified(paceline_here, run, 0)
    assert [(each["from"], each["to"]) for each in document["segments"]] == [(0, 4), (4, 8), (8, 12)]
    assert document["confidence"] == "all 3 stretches between checkpoints follow from recipe, data and seed"
    document = verified(paceline_here, run, 0, "--segments", 1, "--seed", 5)
    assert len(document["segments"]) == 2
    assert document["segments"][-1] == {"from": 8, "to": 12, "equal": True}
    assert document["confidence"].endswith("would pass with probability 0.50 (2 drawn for 95 %)")
    assert "every bit was compared" in paceline_here("verify", run, "--step", "0:1").ended(0).out


@pytest.mark.thorough
@pytest.mark.parametrize(
    "overrides",
    [
        {"batch.micro_size": 4},
        {"optimizer.name": "adamw", "optimizer.momentum": None, "model.options.dropout": 0.3},
        {"train.ema": None, "checkpoint.keep": 1},
        {"evaluate.every": None, "telemetry.noise_scale": "2 steps", "batch.micro_size": 8},
        pytest.param(
            {"model.adapters.rank": 2, "train.ema": None, "optimizer.name": "adamw", "optimizer.momentum": None},
            marks=pytest.mark.real_processes,  # forked from a warm server, such a launch does not end
        ),
        {"evaluate.patience": 1, "evaluate.every": "2 steps", "optimizer.lr": 1e-6},
    ],
    ids=["accumulation", "adamw", "pruned", "noise", "lora", "patience"],
)
def test_kinds_of_honest_runs(paceline_here: Call, trained: Callable[..., Path], overrides: dict[str, Any]) -> None:
    verified(paceline_here, trained("other", overrides), 0)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["mirror", "sharded"])
def test_a_run_with_a_mirror_and_a_sharded_one(
    paceline_here: Call, tiny_recipe: Path, tmp_path: Path, kind: str
) -> None:
    words = [f"{key}={'off' if each is None else each}" for key, each in STEPS.items()]
    mirrored = (f"checkpoint.mirror={(tmp_path / 'copy').as_uri()}",)
    words += mirrored if kind == "mirror" else ("parallel.strategy=fsdp", "train.ema=off", "--processes", "2")
    paceline_here("train", tiny_recipe, *words, "--run-dir", "run").ended(0)
    before = fingerprint(tmp_path / "copy") if kind == "mirror" else None
    verified(paceline_here, Path("run"), 0, "--step", "2:8")
    assert before == (fingerprint(tmp_path / "copy") if kind == "mirror" else None)
    edit_events(
        Path("run"),
        lambda each: each.update(loss=each["loss"] / 2) if each["event"] == "step" and each["step"] == 6 else 0,
    )
    found = verified(paceline_here, Path("run"), 1, "--step", "5:8")["first_difference"]
    assert (found["to"], found["step"], found["tensor"]) == (8, 6, "loss")


@pytest.mark.thorough
def test_a_run_that_was_stopped_made_longer_and_pruned(paceline_here: Call, trained: Callable[..., Path]) -> None:
    trained("other", {"train.duration": "7 steps", "schedule.name": "cosine"})
    trained("other", {"train.until": "9 steps", "schedule.name": "cosine"})
    path = trained("other", {"schedule.name": "cosine"})
    assert saved_steps(path) == [4, 7, 8, 9, 12]
    verified(paceline_here, path, 0)
    for step in (4, 7, 8):
        shutil.rmtree(path / "checkpoints" / f"step-{step:08d}")
    assert [each["from"] for each in verified(paceline_here, path, 0)["segments"]] == [0, 9]


@pytest.mark.thorough
@pytest.mark.parametrize("exact", [False, True])
def test_other_numbers_of_processes(paceline_here: Call, tiny_recipe: Path, exact: bool) -> None:
    words = [f"{key}={'off' if each is None else each}" for key, each in STEPS.items()]
    words += [f"parallel.exact={str(exact).lower()}", *["parallel.logical_ranks=2"] * exact]
    part = ("train", tiny_recipe, *words, "--run-dir", "run")
    paceline_here(*part, "--processes", 2, "--until", "6 steps").ended(75)
    paceline_here(*part, "--processes", 1).ended(0)
    shutil.rmtree("run/checkpoints/step-00000006")
    verified(paceline_here, Path("run"), 0)


# ------------------------------------------------------------------------------------------------ tampered runs


def weight(run: Path) -> None:
    save_again(run, 8, lambda states: nudge(states["model"]["classifier.weight"], 7))


def moment(run: Path) -> None:
    save_again(run, 8, lambda states: nudge(states["optimizer"]["state"][0]["momentum_buffer"], 2))


def average(run: Path) -> None:
    save_again(run, 8, lambda states: nudge(states["ema"]["classifier.bias"], 1))


def running_mean(run: Path) -> None:
    name = "stem.norm.running_mean"
    save_again(run, 8, lambda states: nudge(states["model"][name], 0))


def order_of_an_epoch(run: Path) -> None:
    rewrite_ledger(run, lambda ids: [*ids[:5], ids[6], ids[5], *ids[7:]])


def half_of_the_ledger(run: Path) -> None:
    path = ledger_path(run / "ledger", 0)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def loss_log(run: Path) -> None:
    edit_events(
        run, lambda each: each.update(loss=each["loss"] / 2) if each["event"] == "step" and each["step"] == 6 else 0
    )


def score(run: Path) -> None:
    edit_events(
        run, lambda each: each.update(top1_accuracy=99.0) if each["event"] == "evaluation" and each["step"] == 8 else 0
    )


def outcome(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    summary["metrics"]["top1_accuracy"] = 99.0
    (run / "summary.json").write_text(json.dumps(summary))


def best(run: Path) -> None:
    path = run / "checkpoints" / "best.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"value": 99.0}))


def recipe_text(run: Path) -> None:
    path = run / "recipe.yaml"
    path.write_text(path.read_text().replace("lr: 0.05", "lr: 0.06"))


def seed(run: Path) -> None:
    claim(run, "seed=5")


def rate(run: Path) -> None:
    claim(run, "optimizer.lr=0.06")


TAMPERED: dict[str, tuple[Callable[[Path], None], dict[str, Any]]] = {
    "weight": (weight, {"from": 4, "to": 8, "step": 8, "tensor": "classifier.weight", "index": [0, 7], "ulps": 1}),
    "moment": (moment, {"from": 4, "to": 8, "step": 8, "component": "optimizer", "ulps": 1}),
    "average": (
        average,
        {"from": 4, "to": 8, "step": 8, "component": "ema", "tensor": "classifier.bias", "index": [1]},
    ),
    "buffer": (running_mean, {"to": 8, "step": 8, "component": "model", "tensor": "stem.norm.running_mean"}),
    "order": (order_of_an_epoch, {"from": 4, "to": 8, "step": 6, "component": "ledger"}),
    "ledger": (half_of_the_ledger, {"from": 4, "to": 8, "step": 7, "component": "ledger"}),
    "loss": (loss_log, {"from": 4, "to": 8, "step": 6, "component": "records", "tensor": "loss"}),
    "score": (score, {"from": 4, "to": 8, "step": 8, "component": "records", "tensor": "top1_accuracy"}),
    "outcome": (outcome, {"step": 12, "component": "summary", "tensor": "metrics.top1_accuracy"}),
    "best": (best, {"step": 12, "component": "best"}),
    "recipe": (recipe_text, {"component": "recipe", "tensor": "optimizer.lr"}),
    "seed": (seed, {"from": 0, "to": 4, "step": 1}),
    "rate": (rate, {"from": 0, "to": 4, "step": 1, "component": "model"}),
}


@pytest.mark.parametrize(
    "name",
    [each if each == "recipe" else pytest.param(each, marks=pytest.mark.thorough) for each in TAMPERED],
)
def test_what_is_tampered_with_is_named(paceline_here: Call, run: Path, name: str) -> None:
    tamper, expected = TAMPERED[name]
    tamper(run)
    found = verified(paceline_here, run, 1)["first_difference"]
    assert {key: found[key] for key in expected} == expected, found
    assert found["cause"]


@pytest.mark.thorough
def test_it_goes_back_to_the_first_unequal_stretch(paceline_here: Call, run: Path) -> None:
    weight(run)
    assert verified(paceline_here, run, 1, "--step", "8:12")["first_difference"]["to"] == 8


@pytest.mark.thorough
def test_a_twins_checkpoint(paceline_here: Call, run: Path, trained: Callable[..., Path]) -> None:
    twin = trained("twin", {"seed": 1})
    own = read_manifest(run / "checkpoints" / "step-00000008").facts["run"]
    shutil.rmtree(run / "checkpoints" / "step-00000008")
    shutil.copytree(twin / "checkpoints" / "step-00000008", run / "checkpoints" / "step-00000008")
    found = verified(paceline_here, run, 1)
    assert {"checkpoint", "recipe"} == {each["component"] for each in found["differences"]}
    save_again(run, 8, recipe=load_recipe(run).recipe, run=own)
    found = verified(paceline_here, run, 1)["first_difference"]
    assert (found["from"], found["to"], found["component"]) == (4, 8, "model")


@pytest.mark.thorough
def test_a_longer_warm_up_than_claimed(paceline_here: Call, trained: Callable[..., Path]) -> None:
    path = trained("other", {"schedule.warmup": "3 steps"})
    claim(path, "schedule.warmup=2 steps")
    found = verified(paceline_here, path, 1)["first_difference"]
    assert (found["step"], found["from"]) == (1, 0)
    assert " lr=" in found["cause"]


@pytest.mark.thorough
def test_a_skipped_step(paceline_here: Call, trained: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    train_step = loop.train_step

    def without_the_sixth(run: Any, batches: Any) -> bool:
        before = copy.deepcopy(run.network.state_dict())
        stepped = train_step(run, batches)
        if run.progress.position == 5:
            run.network.load_state_dict(before)
        return stepped

    monkeypatch.setattr(loop, "train_step", without_the_sixth)
    path = trained("other", {})
    monkeypatch.undo()
    found = verified(paceline_here, path, 1)["first_difference"]
    assert (found["from"], found["step"], found["component"]) == (4, 7, "model")


@contextmanager
def _pictures(folder: Path) -> Iterator[Path]:
    table, draws = folder / "table.csv", np.random.default_rng(1)
    rows = []
    for number in range(48):
        Image.fromarray(draws.integers(0, 255, (8, 8), dtype=np.uint8)).save(folder / f"{number}.png")
        rows.append((f"{number}.png", "ab"[number % 2]))
    with table.open("w", newline="") as file:
        csv.writer(file).writerows([("path", "label"), *rows])
    yield table


@pytest.mark.thorough
@pytest.mark.parametrize("change", ["label", "picture"])
def test_data_that_changed(paceline_here: Call, trained: Callable[..., Path], tmp_path: Path, change: str) -> None:
    (tmp_path / "data").mkdir()
    with _pictures(tmp_path / "data") as table:
        path = trained("other", {"data.dataset": "csv", "data.path": str(table), "train.duration": "8 steps"})
        verified(paceline_here, path, 0)
        if change == "label":
            table.write_text(table.read_text().replace("3.png,b", "3.png,a", 1))
        else:
            picture = np.array(Image.open(tmp_path / "data" / "3.png"))
            Image.fromarray(picture[::-1].copy()).save(tmp_path / "data" / "3.png")
        found = verified(paceline_here, path, 1)["first_difference"]
        assert found["component"] == "data", found
        assert ("table.csv" if change == "label" else "3.png") in found["cause"]


# ------------------------------------------------------------------------------------------------ cannot tell


@pytest.mark.thorough
def test_another_machine_leaves_a_tolerance(paceline_here: Call, run: Path) -> None:
    environment = json.loads((run / "environment.json").read_text())
    environment["cpu"]["model"] = "another"
    (run / "environment.json").write_text(json.dumps(environment))
    assert "processor was another" in verified(paceline_here, run, 0, "--step", "4:8")["promise"]
    weight(run)
    document = verified(paceline_here, run, 0, "--step", "4:8")
    assert "within a tolerance" in document["promise"]
    least, largest = document["tolerance"]
    assert 1e-5 <= least <= largest <= 0.1
    assert f"would be found is {least:.1e}" in document["promise"]
    edit_events(
        run, lambda each: each.update(lr=1.01 * each["lr"]) if (each["event"], each["step"]) == ("step", 6) else 0
    )
    assert verified(paceline_here, run, 3, "--step", "4:8")["first_difference"]["tensor"] == "lr"
    save_again(run, 8, lambda states: states["model"]["classifier.weight"].mul_(1 + 2 * largest))
    document = verified(paceline_here, run, 3, "--step", "4:8")
    assert "processor was another" in document["reason"]
    assert document["first_difference"]["tensor"] == "classifier.weight"
    verified(paceline_here, run, 1, "--step", "4:8", "--tolerance", 1e-6)


@pytest.mark.thorough
def test_other_vector_instructions_leave_a_measured_tolerance(
    paceline_here: Call, tiny_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("this processor has no wider vectors than AVX2")
    words = [f"{key}={'off' if each is None else each}" for key, each in STEPS.items()]
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    in_a_process("train", tiny_recipe, *words, "model.options.width=16", "--run-dir", "run", cwd=tmp_path).ended(0)
    monkeypatch.delenv("ATEN_CPU_CAPABILITY")
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    document = verified(paceline_here, Path("run"), 0, "--step", "0:4")
    assert "vector instructions was AVX2" in document["promise"]
    assert document["tolerance"], document


def test_what_does_not_fit_is_named_where_nothing_can_be_computed(paceline_here: Call, run: Path) -> None:
    (run / "recipe.yaml").write_text("task: own_loop\nseed: 0\n")
    document = paceline_here("verify", run, "--json").ended(1).document
    assert document["first_difference"]["component"] == "recipe"
    assert document["confidence"].startswith("nothing was computed again: ")
    assert "paceline.Loop" in document["confidence"]
    paceline_here("verify", "nothing").refused("there is no run directory")


@pytest.mark.thorough
def test_a_task_given_in_python(paceline_here: Call, tiny_recipe: Path, tiny_task: Any) -> None:
    paceline.train(tiny_recipe, run_dir="run", task=tiny_task(), quiet=True)
    assert "given in Python" in paceline_here("verify", "run").ended(3).err


def test_options_that_exclude_each_other(paceline_here: Call, run: Path) -> None:
    paceline_here("verify", run, "--all", "--segments", 2).refused("--all has no effect")
    paceline_here("verify", run, "--step", "8:4").refused("not two steps")
    paceline_here("verify", run, "--step", "40:44").refused("the run has steps 0 to 12")


# ------------------------------------------------------------------------------------------------ go back


def outcome_of(run: Path) -> dict[str, Any]:
    summary = json.loads((run / "summary.json").read_text())
    return {key: summary[key] for key in ("step", "weights_sha256", "ema_sha256", "metrics", "ledger")}


def test_a_finished_run_goes_back_and_on(paceline_here: Call, run: Path) -> None:
    (run / "notes.txt").write_text("mine")
    before, ended = fingerprint(run), outcome_of(run)
    document = paceline_here("rewind", run, "--to", 4, "--json").ended(0).document
    assert fingerprint(Path(document["set_aside"])) == before
    assert saved_steps(run) == [4]
    assert not (run / "summary.json").exists()
    assert (run / "notes.txt").read_text() == "mine"
    assert all(event["step"] <= 4 for event in events_of(run))
    paceline_here("resume", run).ended(0)
    assert outcome_of(run) == ended
    paceline_here("audit", run).ended(0)
    paceline_here("rewind", run, "--to", 8).ended(0)
    assert sorted(each.name for each in (run / ".set-aside").iterdir()) == ["step-00000012", "step-00000012-2"]
    assert os.system(document["bring_back"]) == 0  # the line that a user would paste
    assert fingerprint(run) == before
    assert sorted(each.name for each in run.parent.iterdir()) == ["run", "run.rewound"]


def test_mistakes_in_going_back(paceline_here: Call, run: Path) -> None:
    before = fingerprint(run)
    paceline_here("rewind", run, "--to", 5).refused("no checkpoint of step 5", "4, 8, 12")
    paceline_here("fork", run, "--at", 4, "seed=3", "--run-dir", "new").refused("seed cannot change")
    paceline_here("fork", run, "--at", 4, "train.ema=off", "--run-dir", "new").refused("train.ema")
    paceline_here("fork", run, "--at", 4, "batch.global_size=8", "--run-dir", "new").refused("batch.global_size")
    paceline_here("fork", run, "--at", 4, "model.options.width=8", "--run-dir", "new").refused("does not fit")
    paceline_here("fork", run, "--at", 4, "--run-dir", run).refused("is not this fork")
    assert fingerprint(run) == before
    assert not Path("new").exists()


@pytest.mark.thorough
def test_a_fork_has_the_parents_order_and_its_own_keys(paceline_here: Call, run: Path) -> None:
    before, ended = fingerprint(run), outcome_of(run)
    paceline_here("fork", run, "--at", 4, "--run-dir", "same").ended(0)
    assert outcome_of(Path("same")) == ended
    other = ("fork", run, "--at", 4, "optimizer.lr=0.01", "optimizer.weight_decay=0.1", "--run-dir", "other")
    paceline_here(*other).ended(0)
    assert fingerprint(run) == before
    summary = json.loads(Path("other/summary.json").read_text())
    parent = json.loads((run / "run.json").read_text())["id"]
    assert summary["parent"] == {"run_id": parent, "step": 4}
    assert summary["weights_sha256"] != ended["weights_sha256"]
    rates = [each["lr"] for each in events_of(Path("other")) if each["event"] == "step"]
    assert rates == [0.05] * 4 + [0.01] * 8
    state = read_components(Path("other/checkpoints/step-00000012"))["optimizer"]
    assert state["param_groups"][0]["weight_decay"] == 0.1
    paceline_here("audit", "other").ended(0)
    assert "nothing to do" in paceline_here(*other).ended(0).out
    assert "missing_records" not in Path("other/events.jsonl").read_text()


@pytest.mark.thorough
def test_a_fork_is_verified_from_its_parents_step(paceline_here: Call, run: Path) -> None:
    paceline_here("fork", run, "--at", 4, "optimizer.lr=0.01", "--run-dir", "other").ended(0)
    assert [each["from"] for each in verified(paceline_here, Path("other"), 0)["segments"]] == [4, 8]


@pytest.mark.thorough
def test_a_kill_leaves_the_run_before_or_after(honest: Path, tmp_path: Path) -> None:
    """Twenty kills, each at another system call that changes the directory."""
    program = """
import os, signal, sys
from paceline.cli.main import run
left = int(sys.argv[1])
def hook(event, arguments):
    global left
    if event in ("os.rename", "os.link", "os.mkdir", "os.remove", "os.rmdir", "ctypes.dlsym"):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)
sys.exit(run(["rewind", sys.argv[2], "--to", "4"]))
"""
    run = tmp_path / "run"
    before, seen = fingerprint(honest), set()
    for number in range(1, 400, 20):
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(honest, run)
        words = [sys.executable, "-c", program, str(number), str(run)]
        done = fork_server.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        is_after = (run / ".set-aside").exists()
        seen.add((done.returncode, is_after))
        kept = run / ".set-aside" / "step-00000012" if is_after else run
        assert fingerprint(kept) == before, number
        assert saved_steps(run) == ([4] if is_after else [4, 8, 12])
    assert (-signal.SIGKILL, False) in seen
    assert (-signal.SIGKILL, True) in seen


def test_a_fork_has_all_that_the_parents_order_is_made_from(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.root.mkdir()
    for path in (run.recipe, run.sample_lengths, run.sample_classes, run.shard_sizes):
        path.write_text(path.name)
    made = copy_as_of(run, Point(), tmp_path / "made", steps=(), place=link_tree)
    names = {"recipe.yaml", "sample_lengths.npy", "sample_classes.npy", "shard_sizes.npy"}
    assert {path.name for path in made.root.iterdir() if path.is_file()} == names
