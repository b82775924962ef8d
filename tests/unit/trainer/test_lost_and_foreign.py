"""A run directory that is not as the run left it: parts lost, moved, damaged, or of another run."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from paceline.reports.audit import audit_run
from run_directories import fingerprint, saved_steps

from paceline.checkpoint.manifest import read_manifest
from paceline.checkpoint.weights import read_weights
from paceline.errors import CheckpointError, PacelineError, RunDirectoryError, TrainingError
from paceline.records.reader import read_identity
from paceline.records.run_directory import RunDirectory, write_identity

Make = Callable[..., Any]
LONGER = {"train.duration": "12 steps"}


@pytest.fixture
def whole(train_tiny: Make) -> str:
    """The weights of a run that nothing was done to."""
    sha256: str = train_tiny("whole", LONGER).summary.weights_sha256
    return sha256


def incidents(run: Path) -> list[dict[str, Any]]:
    lines = (json.loads(line) for line in (run / "events.jsonl").read_text().splitlines())
    return [event for event in lines if event["event"] == "incident"]


# --------------------------------------------------------------------------------------- checkpoints that are gone


def link_to_nothing(folder: Path) -> None:
    folder.symlink_to(folder.parent.parent / "not-mounted")


@pytest.mark.parametrize("has_identity", [True, False])
@pytest.mark.parametrize(
    "leave", [lambda _: None, Path.mkdir, link_to_nothing], ids=["removed", "emptied", "unmounted"]
)
@pytest.mark.everyday
def test_without_its_checkpoints_nothing_is_begun_again(
    train_tiny: Make, runs: Path, whole: str, leave: Callable[[Path], None], has_identity: bool
) -> None:
    run = train_tiny("run").run_dir
    if not has_identity:
        (run / "run.json").unlink()
    checkpoints, disk = run / "checkpoints", runs / "disk"
    checkpoints.rename(disk)
    leave(checkpoints)
    before = fingerprint(run)
    for changes, resume in ((LONGER, "auto"), (LONGER, "never"), ({}, "auto")):
        with pytest.raises((CheckpointError, RunDirectoryError), match="checkpoints"):
            train_tiny("run", changes, resume=resume)
    assert fingerprint(run) == before
    if checkpoints.is_symlink():
        checkpoints.unlink()
    elif checkpoints.exists():
        checkpoints.rmdir()
    disk.rename(checkpoints)
    assert train_tiny("run", LONGER).summary.weights_sha256 == whole
    assert audit_run(run).passed


EVERYTHING = ("run.json", "events.jsonl", "ledger", "summary.json", "checkpoints/best.json", "evaluation")


@pytest.mark.parametrize("left", EVERYTHING)
@pytest.mark.everyday
def test_any_record_tells_of_a_run(train_tiny: Make, left: str) -> None:
    run = train_tiny("run").run_dir
    for path in [*(run / "checkpoints").glob("step-*"), *(run / name for name in EVERYTHING if name != left)]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for is_recipe_there in (True, False):
        before = fingerprint(run)
        with pytest.raises((CheckpointError, RunDirectoryError), match=f"records.*({left}|best|rank-00000|confusion)"):
            train_tiny("run", LONGER)
        assert fingerprint(run) == before
        if is_recipe_there:
            (run / "recipe.yaml").unlink()


def refuse_renames(monkeypatch: pytest.MonkeyPatch) -> None:
    rename = os.rename

    def refuse(source: Any, target: Any) -> None:
        if ".saving-" in str(source):
            raise OSError(28, "No space left on device")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)


def test_what_failed_in_its_first_save_begins_again(
    train_tiny: Make, runs: Path, whole: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        refuse_renames(patched)
        with pytest.raises(TrainingError, match="No space left"):
            train_tiny("run", {"checkpoint.every": "4 steps", **LONGER})
    assert (runs / "run/events.jsonl").read_text().count('"event": "checkpoint"') == 1
    assert train_tiny("run", LONGER).summary.weights_sha256 == whole
    assert audit_run(runs / "run").passed


def test_a_kill_between_a_checkpoint_and_its_note_does_no_harm(train_tiny: Make, whole: str) -> None:
    run = train_tiny("run").run_dir
    document = json.loads((run / "run.json").read_text())
    assert document["has_checkpoint"] is True
    (run / "run.json").write_text(json.dumps({**document, "has_checkpoint": False}))
    assert train_tiny("run", LONGER).summary.weights_sha256 == whole
    assert json.loads((run / "run.json").read_text()) == document


@pytest.mark.parametrize("name", ["run.json", "plan.json", "environment.json", "recipe.yaml", "checkpoints", "ledger"])
def test_a_first_start_that_failed_can_be_repeated(
    train_tiny: Make, runs: Path, whole: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(call: Callable[..., Any], target: Any, *rest: Any) -> Any:
        if Path(rest[0] if rest and isinstance(rest[0], Path) else target).name == name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return call(target, *rest)

    with monkeypatch.context() as patched:
        for call in ("replace", "mkdir"):
            patched.setattr(os, call, partial(refuse, getattr(os, call)))
        with pytest.raises(RunDirectoryError, match="No space left"):
            train_tiny("run", LONGER)
    assert train_tiny("run", LONGER).summary.weights_sha256 == whole


# ------------------------------------------------------------------------------------------- moved in mid-run


def move_all(run: Path) -> None:
    run.rename(run.with_name("moved"))


def replace_all(run: Path) -> None:
    move_all(run)
    (run / "checkpoints").mkdir(parents=True)


def move_checkpoints(run: Path) -> None:
    (run / "checkpoints").rename(run.with_name("disk"))


def wait_for_the_first_save(run: Path) -> None:
    while not json.loads((run / "run.json").read_text())["has_checkpoint"]:
        time.sleep(0.01)


def test_a_run_whose_records_are_removed_ends(train_tiny: Make, runs: Path, whole: str) -> None:
    def on_loss(batch: Any, _: Any) -> None:
        if batch.slice.step == 6:
            wait_for_the_first_save(runs / "run")
            (runs / "run/events.jsonl").unlink()

    with pytest.raises(TrainingError, match=r"events\.jsonl' was moved, removed"):
        train_tiny("run", {"checkpoint.every": "4 steps", **LONGER}, on_loss=on_loss)
    assert train_tiny("run", LONGER).summary.weights_sha256 == whole
    assert [each["incident"] for each in incidents(runs / "run")] == ["missing_records"]


@pytest.mark.parametrize("strike", [move_all, replace_all, move_checkpoints])
@pytest.mark.everyday
def test_a_run_that_is_moved_ends_and_stays_in_one_place(
    train_tiny: Make, runs: Path, whole: str, strike: Callable[[Path], None]
) -> None:
    def on_loss(batch: Any, _: Any) -> None:
        if batch.slice.step == 6:
            wait_for_the_first_save(runs / "run")
            strike(runs / "run")

    with pytest.raises(TrainingError, match=r"run.*was moved, removed or unmounted"):
        train_tiny("run", {"checkpoint.every": "4 steps", **LONGER}, on_loss=on_loss)
    left = {path.name for path in (runs / "run").rglob("*")} if (runs / "run").exists() else set()
    if strike is move_checkpoints:
        assert "checkpoints" not in left
        (runs / "disk").rename(runs / "run/checkpoints")
    else:
        assert left <= {"checkpoints"}
        shutil.rmtree(runs / "run", ignore_errors=True)
        (runs / "moved").rename(runs / "run")
    assert saved_steps(runs / "run") == [4]
    assert train_tiny("run", LONGER).summary.weights_sha256 == whole
    assert audit_run(runs / "run").passed


def test_a_directory_that_has_gone_does_not_hide_why_a_run_failed(train_tiny: Make, runs: Path) -> None:
    def on_loss(*_: Any) -> None:
        shutil.rmtree(runs / "run")
        raise InterruptedError("the real error")

    with pytest.raises(InterruptedError, match="the real error"):
        train_tiny("run", on_loss=on_loss)
    assert not (runs / "run").exists()


# ------------------------------------------------------------------------------------------ of another run


@pytest.mark.parametrize("has_identity", [True, False])
@pytest.mark.everyday
def test_a_checkpoint_of_another_run_is_set_aside(train_tiny: Make, whole: str, has_identity: bool) -> None:
    other = train_tiny("other", {"seed": 5, "optimizer.lr": 0.2, **LONGER}).run_dir
    run = train_tiny("run").run_dir
    if not has_identity:
        (run / "run.json").unlink()
    foreign = run / "checkpoints/step-00000012"
    shutil.copytree(other / "checkpoints/step-00000012", foreign)
    with pytest.raises(CheckpointError, match="another run"):
        train_tiny("run", LONGER, resume=str(foreign))
    assert train_tiny("run", {"train.duration": "13 steps", "train.until": "12 steps"}).summary.resumes == 1
    assert (run / "checkpoints/step-00000012.foreign").is_dir()
    (incident,) = incidents(run)
    assert (incident["incident"], incident["step"]) == ("foreign_checkpoint", 8)
    assert "step-00000012" in incident["message"]


def test_the_same_recipe_in_another_run_is_another_run(train_tiny: Make, whole: str, runs: Path) -> None:
    run = train_tiny("run").run_dir
    shutil.copytree(runs / "whole/checkpoints/step-00000012", run / "checkpoints/step-00000012")
    assert train_tiny("run", LONGER).summary.weights_sha256 == whole
    assert (run / "checkpoints/step-00000012.foreign").is_dir()


def test_with_nothing_but_checkpoints_of_another_run_it_is_refused(train_tiny: Make) -> None:
    other, run = (train_tiny(name, {"seed": seed}).run_dir for seed, name in enumerate(("other", "run")))
    shutil.rmtree(run / "checkpoints")
    shutil.copytree(other / "checkpoints", run / "checkpoints")
    before = fingerprint(run)
    with pytest.raises(CheckpointError, match="step-00000008 is a checkpoint of another run"):
        train_tiny("run", {"seed": 1, **LONGER})
    assert fingerprint(run) == before


def test_without_its_identity_the_checkpoints_vote(train_tiny: Make, runs: Path, whole: str) -> None:
    run = train_tiny("run").run_dir
    shutil.copytree(runs / "whole/checkpoints/step-00000012", run / "checkpoints/step-00000012")
    (run / "run.json").unlink()
    shutil.copytree(run, runs / "tied")
    for name in ("checkpoints/step-00000004", "events.jsonl", "summary.json"):
        path = runs / "tied" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    before = fingerprint(runs / "tied")
    with pytest.raises(RunDirectoryError, match="its checkpoints and records belong to different runs"):
        train_tiny("tied", LONGER)
    assert fingerprint(runs / "tied") == before
    assert train_tiny("run", LONGER).summary.weights_sha256 == whole
    assert (run / "checkpoints/step-00000012.foreign").is_dir()


def test_the_only_checkpoint_does_not_decide_alone(train_tiny: Make, runs: Path, whole: str) -> None:
    """Without run.json, the events and the outcome know whose run it is."""
    run = train_tiny("run").run_dir
    (run / "run.json").unlink()
    shutil.rmtree(run / "checkpoints")
    shutil.copytree(runs / "whole/checkpoints/step-00000012", run / "checkpoints/step-00000012")
    for outcome in (run / "summary.json", run / "no-outcome"):
        before = fingerprint(run)
        with pytest.raises((CheckpointError, RunDirectoryError), match=r"another run|belong to different runs"):
            train_tiny("run", LONGER)
        with pytest.raises(CheckpointError, match="another run"):
            read_weights(run)
        assert fingerprint(run) == before
        outcome.unlink(missing_ok=True)


def test_a_copy_goes_on(train_tiny: Make, runs: Path, whole: str) -> None:
    run = train_tiny("run").run_dir
    shutil.copytree(run, runs / "copy")
    assert train_tiny("copy", LONGER).summary.weights_sha256 == whole
    assert incidents(runs / "copy") == []
    identity = read_identity(RunDirectory(runs / "copy"))
    assert identity is not None
    assert identity.has_checkpoint
    assert read_manifest(runs / "copy/checkpoints/step-00000012").facts["run"] == identity.id


# ------------------------------------------------------------------------------------------- lost records


def cut_in_half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("name", ["events.jsonl", "ledger/rank-00000.ids"])
@pytest.mark.parametrize("spoil", [Path.unlink, lambda path: path.write_bytes(b""), cut_in_half])
@pytest.mark.everyday
def test_lost_records_are_told_and_objected_to(
    train_tiny: Make, whole: str, name: str, spoil: Callable[[Path], None]
) -> None:
    run = train_tiny("run", {"telemetry.log_every": "1 steps"}).run_dir
    spoil(run / name)
    assert not audit_run(run).passed
    assert train_tiny("run", LONGER).summary.weights_sha256 == whole
    (incident,) = incidents(run)
    assert (incident["incident"], incident["step"]) == ("missing_records", 8)
    assert ("events.jsonl" if name == "events.jsonl" else "ledger") in incident["message"]
    assert not audit_run(run).passed


def double(path: Path) -> None:
    path.write_bytes(2 * path.read_bytes())


def repeat_each(path: Path) -> None:
    content, size = path.read_bytes(), path.stat().st_size // 8  # one record for each of the eight steps
    path.write_bytes(b"".join(2 * content[at : at + size] for at in range(0, len(content), size)))


def test_a_doubled_ledger_is_cut_to_its_first_half(train_tiny: Make, whole: str) -> None:
    run = train_tiny("run").run_dir
    double(run / "ledger/rank-00000.ids")
    assert train_tiny("run", LONGER).summary.weights_sha256 == whole
    assert audit_run(run).passed


def test_a_ledger_that_holds_each_record_twice_is_told(train_tiny: Make, whole: str) -> None:
    run = train_tiny("run").run_dir
    repeat_each(run / "ledger/rank-00000.ids")
    assert train_tiny("run", LONGER).summary.weights_sha256 == whole
    assert "holds 208 samples, and 104 were used" in incidents(run)[0]["message"]
    assert not audit_run(run).passed


@pytest.mark.parametrize("images", [52, 500])
def test_the_ledger_of_another_run_is_set_aside(train_tiny: Make, tiny_task: Make, whole: str, images: int) -> None:
    other = train_tiny("other", {"seed": 5}, task=tiny_task(train_images=images)).run_dir
    run = train_tiny("run").run_dir
    shutil.copy(other / "ledger/rank-00000.ids", run / "ledger")
    assert train_tiny("run", LONGER).summary.weights_sha256 == whole
    assert (run / "ledger/rank-00000.ids.foreign").read_bytes() == (other / "ledger/rank-00000.ids").read_bytes()
    assert [each["incident"] for each in incidents(run)] == ["foreign_ledger", "missing_records"]
    assert not audit_run(run).passed


@pytest.mark.parametrize("name", ["events.jsonl", "summary.json"])
def test_records_of_another_run_are_told_and_objected_to(train_tiny: Make, runs: Path, whole: str, name: str) -> None:
    run = train_tiny("run", {**LONGER, "train.until": "8 steps"}).run_dir
    shutil.copy(runs / "whole" / name, run)
    assert any(f"{name} is of another run" in each for each in audit_run(run).objections)
    finished = train_tiny("run", LONGER)
    assert (finished.was_complete, finished.summary.weights_sha256) == (False, whole)
    assert any(f"{name} is of another run" in each["message"] for each in incidents(run))
    assert audit_run(run).passed == (name == "summary.json")


def is_step(line: bytes) -> bool:
    return b'"event": "step"' in line


SPOILT: dict[str, tuple[Callable[[list[bytes]], list[bytes]], str]] = {
    "twice": (lambda lines: [each for each in lines for _ in range(2)], "holds step records twice or out of order"),
    "in disorder": (
        lambda lines: sorted(lines, key=lambda line: -is_step(line) * lines.index(line)),
        "holds step records twice or out of order",
    ),
    "without its first half": (lambda lines: lines[len(lines) // 2 :], "lacks step records after step 0"),
    "without any step": (
        lambda lines: [each for each in lines if not is_step(each)],
        "lacks step records after step 0",
    ),
    "without the second step": (
        lambda lines: [each for each in lines if not (is_step(each) and b'"step": 4,' in each)],
        "lacks step records after step 2",
    ),
}


@pytest.mark.parametrize("how", SPOILT)
def test_spoilt_events_are_told_and_objected_to(train_tiny: Make, whole: str, how: str) -> None:
    run = train_tiny("run").run_dir
    spoil, problem = SPOILT[how]
    lines = (run / "events.jsonl").read_bytes().splitlines(keepends=True)
    (run / "events.jsonl").write_bytes(b"".join(spoil(lines)))
    assert any(problem in each for each in audit_run(run).objections)
    assert train_tiny("run", {**LONGER, "telemetry.log_every": "3 steps"}).summary.weights_sha256 == whole
    assert {each["incident"] for each in incidents(run)} == {"missing_records"}
    assert any(problem in each for each in audit_run(run).objections)


def test_no_record_is_missed_that_was_not_due(train_tiny: Make, whole: str) -> None:
    for until, every in (("3", "3"), ("7", "2"), ("12", "5")):
        log = {**LONGER, "train.until": f"{until} steps", "telemetry.log_every": f"{every} steps"}
        run = train_tiny("run", log).run_dir
    assert (incidents(run), audit_run(run).objections) == ([], ())


# ----------------------------------------------------------------------------------------- damaged files

DAMAGE = {
    "empty": lambda path: path.write_text(""),
    "not JSON": lambda path: path.write_text("{"),
    "another type": lambda path: path.write_text("[1]"),
    "without its keys": lambda path: path.write_text('{"details": 1, "id": 1}'),
    "a directory": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.everyday
def test_damaged_outputs_are_set_aside(train_tiny: Make, whole: str, how: str) -> None:
    run = train_tiny("run").run_dir
    # Those of which no key is needed can lack none.
    keyless = [] if how == "without its keys" else ["environment.json", "checkpoints/best.json"]
    names = ["summary.json", "run.json", *keyless]
    for name in names:
        DAMAGE[how](run / name)
    assert train_tiny("run", LONGER).summary.weights_sha256 == whole
    assert sorted(each["message"].split()[0] for each in incidents(run)) == sorted(Path(each).name for each in names)
    assert all((run / f"{name}.damaged").exists() for name in names)
    assert all(isinstance(json.loads((run / name).read_text()), dict) for name in names)
    assert audit_run(run).passed


def rewrite_manifest(run: Path) -> None:
    file = run / "checkpoints/step-00000008/manifest.json"
    manifest = json.loads(file.read_text()) | {"format_version": 3, "digest": "of another kind"}
    file.write_text(json.dumps(manifest))


def rewrite_ledger(run: Path) -> None:
    (run / "ledger/rank-00001.ids").write_bytes(b"PLED\x02" + bytes(60))


NEWER: dict[str, Callable[[Path], object]] = {
    "manifest.json": rewrite_manifest,
    "ledger": rewrite_ledger,
    **{
        name: lambda run, name=name: (run / name).write_text('{"format_version": 2}')  # type: ignore[misc]
        for name in ("run.json", "summary.json", "plan.json", "environment.json", "checkpoints/best.json")
    },
}


@pytest.mark.parametrize("name", NEWER)
@pytest.mark.everyday
def test_a_newer_format_is_refused_and_not_touched(train_tiny: Make, name: str) -> None:
    run = train_tiny("run").run_dir
    NEWER[name](run)
    before = fingerprint(run)
    with pytest.raises(PacelineError, match=f"{Path(name).name}.*version"):
        train_tiny("run", LONGER)
    assert fingerprint(run) == before


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"strategy": "single", "data": []}', None])
def test_a_damaged_plan_is_one_sentence(train_tiny: Make, content: str | None) -> None:
    run = train_tiny("run").run_dir
    (run / "plan.json").unlink()
    if content is None:
        (run / "plan.json").mkdir()
    else:
        (run / "plan.json").write_text(content)
    for use in (lambda: train_tiny("run", LONGER), lambda: audit_run(run)):
        with pytest.raises(RunDirectoryError, match=r"plan\.json"):
            use()


def test_a_lock_that_is_a_directory_is_one_sentence(train_tiny: Make, runs: Path) -> None:
    (runs / "run/.lock").mkdir(parents=True)
    with pytest.raises(RunDirectoryError, match=r"\.lock"):
        train_tiny("run")


def test_a_lock_that_is_a_link_leads_nowhere(train_tiny: Make, runs: Path) -> None:
    (runs / "run").mkdir()
    (runs / "notes.txt").write_text("mine")
    (runs / "run/.lock").symlink_to(runs / "notes.txt")
    with pytest.raises(RunDirectoryError, match=r"\.lock"):
        train_tiny("run")
    assert (runs / "notes.txt").read_text() == "mine"


def test_a_disk_that_does_not_answer_ends_no_run_at_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object, **_: object) -> os.stat_result:
        raise OSError(errno.ESTALE, "Stale file handle")

    for name in ("checkpoints", "ledger"):
        (tmp_path / name).mkdir()
    with RunDirectory(tmp_path).hold_open() as directory:
        with monkeypatch.context() as broken:
            broken.setattr("paceline.records.run_directory.os.stat", refuse)
            directory.check_in_place(before_saving=False)
            with pytest.raises(RunDirectoryError, match="Stale file handle"):
                directory.check_in_place()
        (tmp_path / "ledger").rmdir()
        with pytest.raises(RunDirectoryError, match="was moved"):
            directory.check_in_place(before_saving=False)


def test_a_recipe_removed_during_the_run_is_written_again(
    train_tiny: Make, runs: Path, monkeypatch: pytest.MonkeyPatch, whole: str
) -> None:
    kept: list[str] = []

    def remove_once(directory: RunDirectory, identity: Any) -> None:
        if not kept:
            kept.append(directory.recipe.read_text())
            directory.recipe.unlink()
        write_identity(directory, identity)

    monkeypatch.setattr("paceline.checkpoint.publish.write_identity", remove_once)
    train_tiny("run")
    assert (runs / "run/recipe.yaml").read_text() == kept[0]
    assert train_tiny("run", LONGER).summary.weights_sha256 == whole


# ------------------------------------------------------------------------------------------- hard-linked copies


def test_resuming_a_hard_linked_copy_leaves_the_original_alone(train_tiny: Make, runs: Path, whole: str) -> None:
    original = train_tiny("original").run_dir
    shutil.copytree(original, runs / "copy", copy_function=os.link)
    before = fingerprint(original)
    assert train_tiny("copy", LONGER).summary.weights_sha256 == whole
    assert fingerprint(original) == before
    assert audit_run(runs / "copy").passed
    assert audit_run(original).passed
