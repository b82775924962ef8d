"""What a run directory allows: begin, go on, rest, or be refused with the reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_sentences import raises
from run_directories import fingerprint
from torch import nn

import paceline
from paceline.checkpoint.manifest import read_manifest
from paceline.checkpoint.store import CheckpointStore
from paceline.errors import CheckpointError, RunDirectoryError
from paceline.recipe.load import load_recipe
from paceline.records.reader import read_recipe, read_summary
from paceline.records.run_directory import RunDirectory
from paceline.trainer import train
from paceline.trainer.run_lock import RunLock
from paceline.trainer.train import Options, train_recipe

Make = Callable[..., Any]


def cut_off_in(step: int) -> Callable[..., None]:
    def on_loss(batch: Any, _: torch.Tensor) -> None:
        if batch.slice.step == step - 1:
            raise InterruptedError("cut off")

    return on_loss


def checkpoints(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir() if path.is_dir())


# ------------------------------------------------------------------------------------- completed, extended


def test_a_completed_run_is_left_alone(train_tiny: Make) -> None:
    first = train_tiny("run")
    before = fingerprint(first.run_dir)
    again = train_tiny("run")
    assert again.was_complete
    assert (again.status, again.summary) == ("completed", read_summary(RunDirectory(first.run_dir)))
    assert fingerprint(first.run_dir) == before


def test_another_torch_is_told(train_tiny: Make, tiny_recipe: Path, tiny_task: Make, listening: Any) -> None:
    run_dir = train_tiny("run", {"train.duration": "4 steps"}).run_dir
    environment = json.loads((run_dir / "environment.json").read_text())
    (run_dir / "environment.json").write_text(json.dumps({**environment, "torch": "2.0.0"}))
    longer = load_recipe(tiny_recipe, {"train.duration": "6 steps"})
    train_recipe(longer, Options(run_dir=run_dir, display=listening, task=tiny_task()))
    assert any(text.startswith(f"torch: 2.0.0 before, {torch.__version__} now") for text in listening.heard)


@pytest.mark.parametrize("steps", [1, 7, 8])
def test_asked_for_less_it_is_complete_too(steps: int, train_tiny: Make) -> None:
    train_tiny("run")
    assert train_tiny("run", {"train.duration": f"{steps} steps"}).was_complete


def test_asked_for_more_it_goes_on(train_tiny: Make, course: Make) -> None:
    whole = train_tiny("whole", {"train.duration": "12 steps"})
    train_tiny("pieces")
    pieces = train_tiny("pieces", {"train.duration": "12 steps"})
    assert (pieces.was_complete, pieces.summary.step, pieces.summary.resumes) == (False, 12, 1)
    assert pieces.summary.weights_sha256 == whole.summary.weights_sha256
    assert course(pieces.run_dir) == course(whole.run_dir)
    assert train_tiny("pieces", {"train.duration": "12 steps"}).was_complete


def test_extended_and_cut_off_it_is_not_complete(train_tiny: Make) -> None:
    longer = {"train.duration": "12 steps", "checkpoint.every": "2 steps"}
    train_tiny("run")
    with pytest.raises(InterruptedError):
        train_tiny("run", longer, on_loss=cut_off_in(11))
    assert train_tiny("run", longer).summary.step == 12


def test_while_it_trains_there_is_no_outcome(train_tiny: Make, tiny_task: Make, runs: Path) -> None:
    """A killed process writes no summary, so that an older one would speak for it."""
    seen: list[bool] = []
    train_tiny("run")
    summary = runs / "run" / "summary.json"
    task = tiny_task(on_loss=lambda *_: seen.append(summary.exists()))
    train_tiny("run", {"train.duration": "9 steps"}, task=task)
    train_tiny("run", {"train.duration": "9 steps"}, task=task, resume=str(runs / "run/checkpoints/step-00000004"))
    assert len(seen) == 1 + 5
    assert not any(seen)
    assert summary.exists()


def test_a_failed_run_says_so_and_goes_on(train_tiny: Make, runs: Path) -> None:
    with pytest.raises(InterruptedError):
        train_tiny("run", on_loss=cut_off_in(6))
    summary = read_summary(RunDirectory(runs / "run"))
    assert (summary.status, summary.step) == ("failed", 5)
    assert train_tiny("run").summary.step == 8


# ------------------------------------------------------------------------------------- another run's directory


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"optimizer.lr": 0.1}, "optimizer.lr was 0.05 and is now 0.1"),
        ({"optimizer.name": "adamw"}, "optimizer.name was sgd and is now adamw"),
        ({"train.ema": 0.9}, "train.ema was off and is now 0.9"),
        ({"train.precision": "bf16"}, "precision=fp32, but here it would be bf16"),
        ({"model.channels_last": True}, "channels_last=False, but here it would be True"),
    ],
)
def test_another_recipe_is_refused(overrides: dict[str, Any], said: str, train_tiny: Make, runs: Path) -> None:
    train_tiny("run", {"train.duration": "1 steps"})
    before = fingerprint(runs / "run")
    with pytest.raises(RunDirectoryError) as caught:
        train_tiny("run", {"train.duration": "2 steps", **overrides})
    assert said in str(caught.value)
    assert str(runs / "run") in str(caught.value)
    assert fingerprint(runs / "run") == before


def test_what_changes_no_step_may_change(train_tiny: Make, runs: Path) -> None:
    whole = train_tiny("whole")
    train_tiny("run", {"train.duration": "3 steps"})
    free = {
        "evaluate.every": "2 steps",
        "evaluate.metric": "loss",
        "checkpoint.every": "off",
        "checkpoint.keep": 5,
        "telemetry.log_every": "1 steps",
        "data.workers": 0,
        "data.max_broken": 7,
        "parallel.threads": 1,
    }
    assert train_tiny("run", free).summary.weights_sha256 == whole.summary.weights_sha256
    assert read_recipe(RunDirectory(runs / "run"))["checkpoint"]["keep"] == 5


def test_other_data_is_refused(train_tiny: Make) -> None:
    train_tiny("run", {"train.duration": "1 steps"})
    with raises(RunDirectoryError, key="data.path", value=53):
        train_tiny("run", train_images=53)
    with raises(RunDirectoryError, key="digest"):
        train_tiny("run", evaluation_images=22)


def test_another_cut_into_micro_batches_is_told(
    train_tiny: Make, tiny_recipe: Path, tiny_task: Any, runs: Path, listening: Any
) -> None:
    train_tiny("run", {"train.duration": "1 steps"})
    loaded = load_recipe(tiny_recipe, {"batch.micro_size": 4, "train.duration": "2 steps"})
    train_recipe(loaded, Options(run_dir=runs / "run", display=listening, task=tiny_task()))
    assert listening.heard == [
        "micro-batches per step: 1 before, 4 now: the same samples, but not the same bits",
        "length: 1 steps before, 2 steps now: the learning rate follows the new length",
    ]


def test_a_full_folder_is_refused(train_tiny: Make, runs: Path) -> None:
    (runs / "run").mkdir()
    (runs / "run" / "thesis.txt").write_text("mine")
    with raises(RunDirectoryError, path="run"):
        train_tiny("run")
    assert [path.name for path in (runs / "run").iterdir() if path.name != ".lock"] == ["thesis.txt"]


def test_a_mistake_found_before_the_first_step_can_be_mended(train_tiny: Make, tiny_task: Make) -> None:
    """The same directory, another recipe: nothing was trained that could be mixed up."""
    with pytest.raises(paceline.PacelineError, match="unknown model"):
        train_tiny("run", {"model.name": "small_resnt", "model.options": None})
    task = tiny_task(
        make_network=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.BatchNorm1d(3)), train_images=49
    )
    with pytest.raises(paceline.PacelineError, match=r"choose another batch\.global_size"):
        train_tiny("run", task=task)
    assert train_tiny("run", {"batch.global_size": 10}, task=task).status == "completed"


# ---------------------------------------------------------------------------------------------- resume


def test_never(train_tiny: Make) -> None:
    assert train_tiny("run", resume="never").status == "completed"
    with raises(RunDirectoryError, path="run"):
        train_tiny("run", resume="never")


def test_a_checkpoint_of_another_run_is_refused(train_tiny: Make, runs: Path) -> None:
    other = train_tiny("other")
    train_tiny("run", {"train.duration": "2 steps"})
    for wanted in (other.run_dir / "checkpoints/step-00000004", runs / "run", runs / "run/checkpoints/x"):
        with pytest.raises(RunDirectoryError, match="is not a checkpoint of the run in"):
            train_tiny("run", resume=str(wanted))


def test_a_checkpoint_that_is_not_there_is_refused(train_tiny: Make, runs: Path) -> None:
    train_tiny("run", {"train.duration": "2 steps"})
    with raises(CheckpointError, path="checkpoints/step-00000001"):
        train_tiny("run", resume=str(runs / "run/checkpoints/step-00000001"))
    assert train_tiny("run", {"train.duration": "2 steps"}).was_complete


def test_there_is_nothing_to_go_on_with(train_tiny: Make, runs: Path) -> None:
    with pytest.raises(RunDirectoryError, match=r"there is no run in '.*/run' to resume\.$"):
        train_tiny("run", resume=str(runs / "run/checkpoints/step-00000001"))


def test_the_run_of_a_checkpoint_is_meant(train_tiny: Make, runs: Path) -> None:
    train_tiny("run", {"train.duration": "2 steps"})
    with pytest.raises(RunDirectoryError, match=f"Did you mean the run in {runs / 'run'}\\?"):
        train_tiny("other", resume=str(runs / "run/checkpoints/step-00000002"))


# ------------------------------------------------------------------------------------------ damage


def damage(checkpoint: Path) -> None:
    weights = checkpoint / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)


def put_pipe(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    os.mkfifo(checkpoint / "model.safetensors")


@pytest.mark.parametrize("damage", [damage, put_pipe])
@pytest.mark.everyday
def test_a_damaged_newest_checkpoint_is_set_aside(
    train_tiny: Make, events: Make, course: Make, damage: Callable[[Path], None]
) -> None:
    whole = train_tiny("whole", {"train.duration": "12 steps"})
    run = train_tiny("run").run_dir
    damage(run / "checkpoints" / "step-00000008")
    result = train_tiny("run", {"train.duration": "12 steps"})
    assert result.summary.weights_sha256 == whole.summary.weights_sha256
    (incident,) = events(run, "incident")
    assert (incident["incident"], incident["step"]) == ("damaged_checkpoint", 4)
    assert incident["message"].startswith("checkpoint step-00000008 is damaged and was set aside: ")
    assert [event["checkpoint"] for event in events(run, "resume")] == ["step-00000004"]
    assert "step-00000008.damaged" in checkpoints(run)
    assert [each for each in course(run) if each["event"] != "incident"] == course(whole.run_dir)


def test_with_no_whole_checkpoint_nothing_is_begun_again(train_tiny: Make) -> None:
    run = train_tiny("run").run_dir
    for name in checkpoints(run):
        damage(run / "checkpoints" / name)
    before = fingerprint(run)
    with pytest.raises(CheckpointError, match="To start again, use another run directory"):
        train_tiny("run", {"train.duration": "12 steps"})
    assert fingerprint(run) == before


def test_a_damaged_checkpoint_asked_for_is_never_replaced_by_another(train_tiny: Make) -> None:
    run = train_tiny("run").run_dir
    damage(run / "checkpoints" / "step-00000004")
    with pytest.raises(CheckpointError, match="step-00000004"):
        train_tiny("run", resume=str(run / "checkpoints" / "step-00000004"))
    assert train_tiny("run").was_complete


# ------------------------------------------------------------------------------------------ the lock


def test_a_checkpoint_that_does_not_know_its_position_is_refused(train_tiny: Make) -> None:
    result = train_tiny("run", {"train.until": "4 steps"})
    path = CheckpointStore(result.run_dir / "checkpoints").path(4)
    manifest = read_manifest(path)
    for facts in ({"position": "x"}, {"samples": None}):
        (path / "manifest.json").write_bytes(replace(manifest, facts={**manifest.facts, **facts}).to_bytes())
        with pytest.raises(CheckpointError, match=rf"{path} says '{next(iter(facts))}' is .*, expected a whole number"):
            train_tiny("run")


def test_two_runs_do_not_share_a_directory(train_tiny: Make) -> None:
    def intrude(batch: Any, _: torch.Tensor) -> None:
        if batch.slice.step == 3:
            with pytest.raises(RunDirectoryError, match=f"another process is training.*{os.getpid()}") as caught:
                train_tiny("run")
            refused.append(caught.value)

    refused: list[RunDirectoryError] = []
    result = train_tiny("run", on_loss=intrude)
    assert len(refused) == 1
    assert result.status == "completed"


def test_the_lock_is_released_after_a_failure(train_tiny: Make, runs: Path) -> None:
    with pytest.raises(InterruptedError):
        train_tiny("run", on_loss=cut_off_in(2))
    lock = RunLock(RunDirectory(runs / "run"))
    with pytest.raises(RunDirectoryError):
        RunLock(RunDirectory(runs / "run"))
    lock.release()
    RunLock(RunDirectory(runs / "run")).release()


def test_a_killed_process_may_take_a_moment_to_disappear(tmp_path: Path) -> None:
    """The same command right after ``kill -9`` resumes: loader processes hold the lock until they notice."""
    script = (
        "import os, signal, sys, time; from pathlib import Path\n"
        "from paceline.records.run_directory import RunDirectory\n"
        "from paceline.trainer.run_lock import RunLock\n"
        "lock = RunLock(RunDirectory(Path(sys.argv[1])))\n"
        "if os.fork() == 0: print('held', flush=True); time.sleep(1.5); os._exit(0)\n"
        "time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        holder.kill()
        holder.wait()
        RunLock(RunDirectory(tmp_path)).release()


def test_a_save_that_outlasts_a_failed_run_keeps_the_directory(
    train_tiny: Make, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that takes long does not keep back the error; but nobody else writes there until it is done."""
    goes_on = threading.Event()
    fsync = os.fsync

    def slow(descriptor: int) -> None:
        assert threading.current_thread() is threading.main_thread() or goes_on.wait(60)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    monkeypatch.setattr(train, "_PATIENCE_SECONDS", 0.1)
    try:
        with pytest.raises(InterruptedError):
            train_tiny("run", {"checkpoint.every": "2 steps"}, on_loss=cut_off_in(3))
        with pytest.raises(RunDirectoryError, match="another process is training in"):
            RunLock(RunDirectory(runs / "run"))
    finally:
        goes_on.set()
    deadline = time.monotonic() + 60
    while not (is_free := _can_lock(runs / "run")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert is_free
    assert checkpoints(runs / "run") == ["step-00000002"]


def _can_lock(run: Path) -> bool:
    try:
        RunLock(RunDirectory(run)).release()
    except RunDirectoryError:
        return False
    return True


# ------------------------------------------------------------------------------------------ new runs


def test_without_a_directory_a_new_one_is_made(tiny_recipe: Path, tiny_task: Any, runs: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(runs)
    overrides = {"train.duration": "1 steps"}
    made = [paceline.train(tiny_recipe, overrides=overrides, task=tiny_task(), quiet=True).run_dir for _ in range(2)]
    assert len(set(made)) == 2
    assert all(path.parent == Path("runs") and path.name.startswith("tiny-") for path in made)
    assert {"recipe.yaml", "plan.json", "environment.json", "events.jsonl", "summary.json"} <= set(os.listdir(made[0]))


def test_the_stored_recipe_repeats_the_run(train_tiny: Make, tiny_task: Any, runs: Path) -> None:
    first = train_tiny("first", {"train.ema": 0.9, "optimizer.name": "adamw"})
    again = paceline.train(first.run_dir / "recipe.yaml", run_dir=runs / "again", task=tiny_task(), quiet=True)
    assert again.summary.weights_sha256 == first.summary.weights_sha256
    assert again.summary.ema_sha256 == first.summary.ema_sha256


def test_the_seed_is_the_run(train_tiny: Make) -> None:
    digests = {train_tiny(f"{seed}", {"seed": seed}).summary.weights_sha256 for seed in (0, 1, 2**63 - 1)}
    assert len(digests) == 3


# --------------------------------------------------------------------------------------- initialize_from


def test_a_new_run_starts_from_a_runs_weights(train_tiny: Make, weights: Make) -> None:
    first = train_tiny("first", {"train.ema": 0.5})
    for source, which in (
        (first.run_dir, "ema"),
        (first.run_dir / "checkpoints/step-00000008/model.safetensors", "model"),
    ):
        start = {"model.initialize_from": str(source), "optimizer.lr": 1e-30, "train.duration": "1 steps"}
        loaded, expected = weights(train_tiny(f"second-{which}", start)), weights(first, which)
        for key, value in expected.items():
            if "running" not in key and "num_batches" not in key:
                torch.testing.assert_close(loaded[key], value, rtol=0, atol=1e-12, msg=key)


def test_weights_of_another_network_are_refused_by_name(train_tiny: Make) -> None:
    first = train_tiny("first", {"train.duration": "1 steps"})
    with pytest.raises(CheckpointError, match=r"model.initialize_from: '[\w.]+' is .* but .* in the live object"):
        train_tiny("second", {"model.initialize_from": str(first.run_dir), "model.options.width": 8})
