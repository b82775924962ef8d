"""A copy at an address is gone on from when it is whole and this run's, and nothing there is lost by a mistake."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from golden_sentences import raises
from run_directories import fingerprint

from paceline.checkpoint import mirror
from paceline.checkpoint.durable import FileFacts
from paceline.checkpoint.mirror import CommitListing, list_commits
from paceline.checkpoint.store import ResumePoint
from paceline.distributed.collectives import Collectives
from paceline.errors import CheckpointError, LaunchError, RunDirectoryError, StorageError, VersionError
from paceline.host.world import World
from paceline.recipe.load import load_recipe
from paceline.reports.audit import audit_run
from paceline.storage.remote import Remote
from paceline.trainer import mirroring
from paceline.trainer.run_dir_checks import ResumeDecision
from paceline.trainer.train import Options, train_recipe

pytest.importorskip("fsspec", reason="the extra http (fsspec) is not installed")

Make = Callable[..., Any]
SAVES = {"checkpoint.every": "2 steps", "checkpoint.keep": 3, "evaluate.every": "off"}


@pytest.fixture
def address(runs: Path) -> str:
    return f"file://{runs}/copy"


@pytest.fixture
def mirrored(train_tiny: Make, address: str) -> Make:
    """Trains as ``train_tiny`` does, with copies at the address."""

    def train(name: str, overrides: Any = None, **more: Any) -> Any:
        return train_tiny(name, {**SAVES, "checkpoint.mirror": address, **(overrides or {})}, **more)

    return train


def steps_at(address: str) -> list[int]:
    return [each.step for each in list_commits(Remote(address)).commits]


def incidents(events: Make, run_dir: Path) -> list[str]:
    return [f"{each['incident']}: {each['message']}" for each in events(run_dir, "incident")]


class OneOfTwo(Collectives):
    """The first of two processes, of which the other waits for nothing else."""

    def __init__(self) -> None:
        super().__init__(World(rank=0, world_size=2))
        self.seconds: list[float] = []
        self.parts = threading.Semaphore(0)

    def on_rank_zero(self, action: Callable[[], Any]) -> Any:
        begun = time.perf_counter()
        try:
            return action()
        finally:
            self.seconds.append(time.perf_counter() - begun)
            self.parts.release()


def test_what_takes_longer_than_processes_wait_is_waited_for_in_parts() -> None:
    """Reading a checkpoint of 100 GB takes longer than parallel.timeout, after which a collective fails."""
    recipe = load_recipe("digits", ["parallel.timeout=1 seconds"]).recipe
    collectives = OneOfTwo()

    def read() -> str:
        """Take as long as four collectives, which end while this is under way."""
        assert all(collectives.parts.acquire(timeout=30) for _ in range(4))
        return "whole"

    assert mirroring.on_first_without_timeout(collectives, recipe, read, name="read") == "whole"
    assert min(collectives.seconds[:4]) < 1  # a busy machine may hold up one of them, but not all


def test_an_error_of_what_takes_long_reaches_the_caller() -> None:
    def read() -> str:
        raise CheckpointError("torn")

    recipe = load_recipe("digits").recipe
    for collectives in (OneOfTwo(), Collectives(World())):
        with pytest.raises(CheckpointError, match="torn"):
            mirroring.on_first_without_timeout(collectives, recipe, read, name="read")


def test_a_mistaken_resume_deletes_no_copy(mirrored: Make, address: str, runs: Path) -> None:
    mirrored("run")
    before = steps_at(address)
    shutil.rmtree(runs / "run")
    for resume in ("run/checkpoints/step-00000001", "other/checkpoints/step-00000001"):
        with pytest.raises(RunDirectoryError, match="there is no run in"):
            mirrored("run", resume=str(runs / resume))
        assert steps_at(address) == before
    # Another recipe is refused with the checkpoint here, and deletes nothing either.
    mirrored("run")
    with raises(RunDirectoryError, path="run"):
        mirrored("run", {"seed": 9}, resume=str(runs / "run/checkpoints/step-00000008"))
    assert steps_at(address)[0] == before[0]


def test_a_checkpoint_that_was_asked_for_comes_from_the_copy(
    mirrored: Make, address: str, runs: Path, events: Make
) -> None:
    first = mirrored("run")
    back_to = steps_at(address)[1]
    shutil.rmtree(runs / "run")
    again = mirrored("run", resume=str(runs / f"run/checkpoints/step-{back_to:08d}"))
    assert [each["step"] for each in events(again.run_dir, "resume")] == [back_to]
    assert again.summary.weights_sha256 == first.summary.weights_sha256
    assert steps_at(address)[0] == 8


@pytest.mark.parametrize("gone", ["run", "run/checkpoints"])
def test_the_copy_is_of_the_same_run(mirrored: Make, runs: Path, events: Make, gone: str) -> None:
    whole = mirrored("whole", {"checkpoint.mirror": None})
    identity = (mirrored("run", {"train.until": "6 steps"}).run_dir / "run.json").read_text()
    shutil.rmtree(runs / gone)
    again = mirrored("run")
    assert [each["step"] for each in events(again.run_dir, "resume")] == [6]
    assert again.summary.weights_sha256 == whole.summary.weights_sha256
    assert (again.run_dir / "run.json").read_text() == identity
    assert incidents(events, again.run_dir) == []
    assert audit_run(again.run_dir).passed


@pytest.mark.parametrize("initial", ["nowhere.safetensors", None])
def test_what_is_damaged_is_no_reason_to_begin_anew_over_it(
    mirrored: Make, address: str, runs: Path, initial: str | None
) -> None:
    mirrored("run")
    shutil.rmtree(runs / "run")
    for commit in (runs / "copy/commits").iterdir():
        commit.write_bytes(commit.read_bytes()[:100])
    before = sorted(path for path in (runs / "copy").rglob("*") if path.is_file())
    recipe = load_recipe("digits", {"checkpoint.mirror": address, "model.initialize_from": initial}).recipe
    assert not mirroring.will_resume(recipe, runs / "run", World(world_size=1, local_world_size=1))
    with pytest.raises(StorageError, match=r"all commits at .* are damaged"):
        mirrored("run")
    assert sorted(path for path in (runs / "copy").rglob("*") if path.is_file()) == before
    assert not (runs / "run").exists()


def test_without_initial_weights_nothing_is_begun() -> None:
    begins = ResumeDecision(choice=ResumePoint(None, 0))
    recipe = load_recipe("digits", {"model.initialize_from": "x.safetensors"}).recipe
    with pytest.raises(CheckpointError, match="initial weights were not loaded"):
        mirroring.check_resumed(True, recipe, begins)
    mirroring.check_resumed(False, recipe, begins)
    mirroring.check_resumed(True, load_recipe("digits", {}).recipe, begins)


def test_a_host_that_comes_back_late_deletes_no_later_copy(
    mirrored: Make, address: str, runs: Path, events: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirrored("run", {"train.until": "4 steps"})
    shutil.copytree(runs / "run", runs / "late")
    mirrored("run")
    there, asked = steps_at(address), list[Remote]()

    def away_at_first(remote: Remote) -> CommitListing:
        asked.append(remote)
        if len(asked) == 1:
            raise StorageError("cannot list: away")
        return list_commits(remote)

    monkeypatch.setattr(mirroring, "list_commits", away_at_first)
    late = mirrored("late")
    assert late.summary.step == 8
    assert steps_at(address) == there
    assert any("holds a copy of step 8" in each for each in incidents(events, late.run_dir))


def test_checkpoints_on_a_disk_that_is_away_are_not_replaced_by_the_copy(mirrored: Make, runs: Path) -> None:
    mirrored("run", {"train.until": "4 steps"})
    (runs / "run/checkpoints").rename(runs / "disk")
    (runs / "run/checkpoints").symlink_to(runs / "mounted-there")
    files = [path for path in sorted((runs / "run").rglob("*")) if path.is_file() and path.name != ".lock"]
    before = [path.read_bytes() for path in files]
    with raises(RunDirectoryError, path="run/checkpoints"):
        mirrored("run")
    assert [path.read_bytes() for path in files] == before


def test_another_recipe_is_refused_before_anything_is_fetched(mirrored: Make, address: str, runs: Path) -> None:
    mirrored("run")
    with pytest.raises(RunDirectoryError, match=r"copy of a run of another recipe: seed was .* at another address"):
        mirrored("other", {"seed": 9})
    assert not (runs / "other").exists()


def test_of_several_processes_only_the_first_needs_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(remote: Remote) -> CommitListing:
        raise StorageError("no route")

    monkeypatch.setattr(mirroring, "list_commits", unreachable)
    plain = load_recipe("digits", {"checkpoint.mirror": "file:///nowhere/x"}).recipe
    initial = load_recipe("digits", {"checkpoint.mirror": "file:///x", "model.initialize_from": "x"}).recipe
    two = World(world_size=2, local_world_size=2)
    assert not mirroring.will_resume(plain, None, two)
    # Told by the first one, when all have joined: nobody waits for one that has gone.
    assert not mirroring.will_resume(initial, None, two)
    with pytest.raises(StorageError):
        mirroring.will_resume(plain, None, World(world_size=1, local_world_size=1))

    class Disagreeing(Collectives):
        def gather(self, value: Any) -> list[Any]:
            return [value, not value]

    with pytest.raises(LaunchError, match=r"others \(rank 1\)"):
        mirroring.check_all_resume(True, initial, Disagreeing(two))
    mirroring.check_all_resume(True, plain, Disagreeing(two))


def test_what_lacks_of_a_complete_run_is_sent_or_told(
    mirrored: Make,
    address: str,
    runs: Path,
    tiny_recipe: Path,
    tiny_task: Make,
    monkeypatch: pytest.MonkeyPatch,
    listening: Any,
) -> None:
    monkeypatch.setattr(mirroring, "REQUEST_PATIENCE_SECONDS", 0.3)

    mirrored("run")
    shutil.rmtree(runs / "copy")
    assert mirrored("run").was_complete
    assert steps_at(address) == [8]
    shutil.rmtree(runs / "copy")
    (runs / "copy").touch()  # no folder can be made there
    recipe = load_recipe(tiny_recipe, {**SAVES, "checkpoint.mirror": address})
    train_recipe(recipe, Options(run_dir=runs / "run", display=listening, task=tiny_task()))
    assert any(text.startswith("the newest checkpoint of this run is not at") for text in listening.heard), (
        listening.heard
    )


def test_a_newer_checkpoint_at_the_address_is_refused_before_anything_is_fetched(
    mirrored: Make, address: str, runs: Path
) -> None:
    mirrored("run", {"train.until": "6 steps"})
    commit = max((runs / "copy/commits").iterdir())
    content = json.loads(commit.read_text())
    name = content["files"]["manifest.json"]["name"]
    manifest = {**json.loads((runs / "copy" / name).read_text()), "format_version": 99, "digest": "of another kind"}
    (runs / "copy" / name).write_text(json.dumps(manifest))
    content["files"]["manifest.json"] |= FileFacts.of(json.dumps(manifest).encode()).to_json()
    del content["digest"]
    commit.write_text(json.dumps({**content, "digest": mirror._digest(content)}))
    shutil.rmtree(runs / "run/checkpoints/step-00000006")
    before = fingerprint(runs)
    for run in ("run", "new"):
        with pytest.raises(VersionError) as caught:
            mirrored(run)
        assert (caught.value.path, caught.value.value) == (f"{address}/{name}", 99)
        assert fingerprint(runs) == before


def test_a_copy_of_a_newer_format_is_not_touched(mirrored: Make, address: str, runs: Path) -> None:
    mirrored("run", {"train.until": "6 steps"})
    commit = max((runs / "copy/commits").iterdir())
    commit.write_text(json.dumps({**json.loads(commit.read_text()), "format_version": 3, "digest": "of another kind"}))
    shutil.rmtree(runs / "run/checkpoints/step-00000006")
    before = fingerprint(runs)
    for name in ("run", "new"):
        with pytest.raises(VersionError, match=rf"{commit.name}' has the format version 3"):
            mirrored(name)
        assert fingerprint(runs) == before
