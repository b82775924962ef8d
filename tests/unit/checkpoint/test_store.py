"""Checkpoints are written, kept, replaced, deleted, and chosen to resume from."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from golden_sentences import raises
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from paceline.checkpoint.manifest import read_components, read_manifest, verify
from paceline.checkpoint.store import (
    Best,
    CheckpointStore,
    DamagedCheckpoint,
    ResumePoint,
    choose_resume_point,
    step_of,
)
from paceline.checkpoint.weights import read_weights
from paceline.errors import CheckpointError, UnreadableError


def store_with(directory: Path, *steps: int) -> CheckpointStore:
    store = CheckpointStore(directory / "checkpoints")
    for step in steps:
        store.save(step, {"model": {"w": torch.full((3,), float(step))}, "counters": {"step": step}}, {})
    return store


def spoil(path: Path) -> None:
    file = path / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_checkpoint_has_the_promised_files_and_returns_what_was_saved(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(memory_format=torch.channels_last)
    counters = {"step": 120, "best": float("-inf"), "by_rank": {0: (1, 2)}, "none": None}
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    saved = store.save(120, {"model": model.state_dict(), "counters": counters}, {"world_size": 2})
    assert saved == store.directory / "step-00000120"
    assert names(saved) == ["counters.json", "manifest.json", "model.json", "model.safetensors"]
    assert names(store.directory) == ["step-00000120"]
    assert store.newest_complete() == (saved, [])
    assert read_components(saved, ("counters",))["counters"] == counters
    model_state = read_components(saved)["model"]
    assert all(torch.equal(model_state[key], value) for key, value in model.state_dict().items())


def test_a_model_file_alone_can_be_opened_by_anyone_and_explains_itself(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    store = CheckpointStore(tmp_path)
    facts = {"world_size": 2, "recipe_digest": "abc", "loss": float("inf"), "format": "mine"}
    metadata = {"recipe": '{"model": {"name": "x"}}'}
    saved = store.save(7, {"model": model.state_dict(), "ema": model.state_dict()}, facts, file_metadata=metadata)
    for name in ("model", "ema"):
        file = saved / f"{name}.safetensors"
        assert load_file(file).keys() == model.state_dict().keys()
        nn.Linear(2, 3).load_state_dict(load_file(file), strict=True)
        with safe_open(file, framework="pt") as opened:
            header = opened.metadata()
        assert header["format"] == "pt"
        assert header["recipe"] == metadata["recipe"]
        assert (header["world_size"], header["recipe_digest"]) == ("2", "abc")
        assert (header["component"], header["step"]) == (name, "7")
    manifest = read_manifest(saved)
    assert dict(manifest.facts) == facts
    assert str(manifest.components["model"].tensors["weight"]) == "float32 [3, 2]"


def test_tied_and_overlapping_tensors_are_saved_with_their_values(tmp_path: Path) -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False)})
    model["head"].weight = model["embedding"].weight
    base = torch.arange(6.0)
    state = {**model.state_dict(), "left": base[:4], "right": base[2:]}
    saved = CheckpointStore(tmp_path).save(1, {"model": state}, {})
    returned = read_components(saved, ("model",))["model"]
    assert all(torch.equal(returned[key], state[key]) for key in state)
    returned["left"].zero_()
    assert returned["right"].tolist() == [2.0, 3.0, 4.0, 5.0]


def test_an_existing_step_is_refused_unless_it_is_to_be_replaced(tmp_path: Path) -> None:
    store = store_with(tmp_path, 5)
    with pytest.raises(CheckpointError, match="step-00000005 exists already"):
        store.save(5, {"model": {}}, {})
    store.save(5, {"counters": {"new": True}}, {}, replace=True)
    assert read_components(store.path(5)) == {"counters": {"new": True}}
    assert names(store.directory) == ["step-00000005"]


@pytest.mark.parametrize("also_new", [False, True])
def test_a_replacement_cut_short_leaves_one_whole_checkpoint(tmp_path: Path, also_new: bool) -> None:
    store = store_with(tmp_path, 5)
    old = store.directory / "step-00000005.replaced"
    shutil.copytree(store.path(5), old)
    if not also_new:
        shutil.rmtree(store.directory / "step-00000005")
    expected = store.directory / ("step-00000005" if also_new else "step-00000005.replaced")
    assert store.steps() == [5]
    assert store.newest_complete() == (expected, [])
    assert verify(expected).step == 5
    store.save(6, {"counters": {}}, {})
    assert old.exists() is not also_new
    store.save(5, {"counters": {"new": True}}, {}, replace=True)
    assert names(store.directory) == ["step-00000005", "step-00000006"]


@pytest.mark.parametrize("name", ["manifest", "../model", "a/b", "", ".hidden", "1st", "a.b"])
def test_a_component_name_that_is_no_file_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="is not a valid component name"):
        CheckpointStore(tmp_path).save(1, {name: {}}, {})
    assert names(tmp_path) == []


def test_what_cannot_be_saved_is_found_before_anything_is_written(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    with pytest.raises(CheckpointError, match=r"model\.w cannot be saved"):
        store.save(1, {"model": {"w": object()}}, {})
    with pytest.raises(CheckpointError, match=r"facts\.digest cannot be saved"):
        store.save(1, {"model": {}}, {"digest": b"bytes"})
    with pytest.raises(CheckpointError, match="facts of a checkpoint hold a tensor"):
        store.save(1, {"model": {}}, {"loss": torch.tensor(1.0)})
    with pytest.raises(CheckpointError, match="0 or more"):
        store.save(-1, {"model": {}}, {})
    assert not store.directory.exists()


def test_only_directories_with_the_exact_name_are_checkpoints(tmp_path: Path) -> None:
    store = store_with(tmp_path, 3, 20)
    for name in ("step-7", "step-000000000007", ".saving-step-00000009-00000000", "step-00000008.damaged", "x"):
        (store.directory / name).mkdir()
    (store.directory / "step-00000009").write_text("a file")
    assert store.steps() == [3, 20]
    assert [step_of(Path(name)) for name in ("step-00000120", "step-123456789", "step-7")] == [120, 123456789, None]
    assert CheckpointStore(tmp_path / "absent").steps() == []
    assert CheckpointStore(tmp_path / "absent").newest_complete() == (None, [])


def test_damaged_ones_are_reported_newest_first_and_skipped(tmp_path: Path) -> None:
    store = store_with(tmp_path, 1, 2, 3, 4)
    spoil(store.path(4))
    (store.path(3) / "manifest.json").unlink()
    path, damaged = store.newest_complete()
    assert path == store.path(2)
    assert [one.step for one in damaged] == [4, 3]
    assert "model.safetensors" in damaged[0].reason
    assert "digest" in damaged[0].reason
    assert "manifest.json is missing" in damaged[1].reason


def test_a_directory_under_another_steps_name_is_damaged(tmp_path: Path) -> None:
    store = store_with(tmp_path, 1, 2)
    store.path(2).rename(store.directory / "step-00000009")
    path, damaged = store.newest_complete()
    assert path == store.path(1)
    assert "was saved at step 2" in damaged[0].reason


def test_set_aside_frees_the_name_and_keeps_the_files(tmp_path: Path) -> None:
    store = store_with(tmp_path, 1)
    for expected in ("step-00000002.damaged", "step-00000002.damaged-2", "step-00000002.damaged-3"):
        store.save(2, {"model": {"w": torch.ones(2)}}, {})
        spoil(store.path(2))
        aside = store.set_aside(store.newest_complete()[1][0])
        assert aside.name == expected
        assert (aside / "model.safetensors").exists()
        assert store.steps() == [1]
    assert store.prune(keep=1) == []
    outside = DamagedCheckpoint(tmp_path / "step-00000001", 1, "")
    with raises(CheckpointError, path="step-00000001"):
        store.set_aside(outside)


def test_prune_keeps_the_newest_and_the_protected(tmp_path: Path) -> None:
    store = store_with(tmp_path, 1, 2, 3, 4, 5)
    assert store.prune(keep=2, protect={2, 99}) == [1, 3]
    assert store.steps() == [2, 4, 5]
    assert store.prune(keep=2, protect={2}) == []
    assert store.prune(keep=1) == [2, 4]
    assert names(store.directory) == ["step-00000005"]
    with pytest.raises(CheckpointError, match="keep=0"):
        store.prune(keep=0)


def test_prune_never_lets_a_torn_checkpoint_push_out_a_whole_one(tmp_path: Path) -> None:
    store = store_with(tmp_path, 1, 2, 3)
    (store.path(3) / "manifest.json").write_text("{}")
    (store.path(2) / "model.safetensors").write_bytes(b"")
    assert store.prune(keep=1) == []
    assert store.newest_complete()[0] == store.path(1)
    store.save(4, {"model": {}}, {})
    assert store.prune(keep=1) == [1, 2, 3]


def test_prune_deletes_both_names_of_a_step(tmp_path: Path) -> None:
    store = store_with(tmp_path, 1, 2)
    shutil.copytree(store.path(1), store.directory / "step-00000001.replaced")
    assert store.prune(keep=1) == [1]
    assert names(store.directory) == ["step-00000002"]


def test_a_run_that_goes_back_discards_the_later_steps(tmp_path: Path) -> None:
    store = store_with(tmp_path, 1, 2, 3, 4)
    assert store.discard_after(2) == [3, 4]
    assert store.steps() == [1, 2]
    assert store.discard_after(2) == []


def test_the_next_save_removes_what_a_killed_one_left_and_nothing_else(tmp_path: Path) -> None:
    store = store_with(tmp_path, 1)
    own = [".saving-step-00000002-0123abcd", ".deleting-step-00000001-0123abcd"]
    others = [".saving-step-2-0123abcd", ".saving", ".nfs0001", ".saving-step-00000002-0123abcd.txt", "notes.replaced"]
    for name in (*own, *others, "notes"):
        (store.directory / name).mkdir()
        (store.directory / name / "file").write_text("x")
    os.mkfifo(store.directory / ".deleting-step-00000001-4567cdef")
    store.save(2, {"model": {}}, {})
    assert names(store.directory) == sorted([*others, "notes", "step-00000001", "step-00000002"])


def test_a_component_the_checkpoint_lacks_is_named_with_the_nearest(tmp_path: Path) -> None:
    store = store_with(tmp_path, 1)
    with raises(CheckpointError, path="checkpoints/step-00000001"):
        read_components(store.path(1), ("modle",))["modle"]
    assert read_components(store.path(1), ["counters"]) == {"counters": {"step": 1}}


def test_best_names_a_step_and_is_replaced_whole(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    assert store.read_best() is None
    store.write_best(Best(10, "top1_accuracy", 71.5))
    assert store.read_best() == Best(10, "top1_accuracy", 71.5, "model")
    (store.directory / ".saving-best-0123abcd").write_text("left by a kill")
    store.write_best(Best(20, "loss", float("inf"), weights="ema"))
    assert store.read_best() == Best(20, "loss", float("inf"), "ema")
    assert names(store.directory) == ["best.json"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"step": 1}', "null", "\x80", "[" * 100_000])
def test_a_damaged_best_file_is_an_error_that_names_it(tmp_path: Path, text: str) -> None:
    (tmp_path / "best.json").write_text(text)
    with raises(CheckpointError, path="best.json"):
        CheckpointStore(tmp_path).read_best()


def test_best_with_entries_of_other_types_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "best.json").write_text(json.dumps({"step": "1", "metric": "loss", "value": 1.0}))
    with raises(CheckpointError, path="best.json"):
        CheckpointStore(tmp_path).read_best()


def link_elsewhere(store: CheckpointStore, *steps: int) -> Path:
    """Move checkpoints to another disk, and leave links."""
    disk = store.directory.parent / "disk"
    disk.mkdir(exist_ok=True)
    for step in steps:
        path = store.path(step)
        shutil.move(path, disk / path.name)
        path.symlink_to(disk / path.name)
    return disk


def test_links_are_followed_when_read_and_unlinked_when_deleted(tmp_path: Path) -> None:
    store = store_with(tmp_path, 1, 2, 3, 4)
    disk = link_elsewhere(store, 1, 2, 3, 4)
    assert store.newest_complete() == (store.path(4), [])
    assert float(read_weights(store.directory).state["w"][0]) == 4
    assert store.prune(keep=3) == [1]
    assert store.discard_after(3) == [4]
    store.save(3, {"model": {"w": torch.ones(3)}}, {}, replace=True)
    assert not store.path(3).is_symlink()
    spoil(store.path(2))
    store.set_aside(DamagedCheckpoint(store.path(2), 2, ""))
    assert names(store.directory) == ["step-00000002.damaged", "step-00000003"]
    assert names(disk) == [f"step-0000000{step}" for step in (1, 2, 3, 4)]


def test_a_link_to_a_disk_that_is_not_mounted_is_not_damaged(tmp_path: Path) -> None:
    store = store_with(tmp_path, 1, 2, 3, 4)
    disk = link_elsewhere(store, 1, 3, 4).rename(tmp_path / "unmounted")
    for attempt in (store.newest_complete, lambda: read_weights(store.directory)):
        with raises(UnreadableError, path="checkpoints/step-00000004"):
            attempt()
    assert store.steps() == [1, 2, 3, 4]
    assert store.prune(keep=1) == [1]
    assert store.discard_after(3) == [4]
    store.save(3, {"model": {"w": torch.ones(3)}}, {}, replace=True)
    assert names(store.directory) == ["step-00000002", "step-00000003"]
    assert names(disk) == ["step-00000001", "step-00000003", "step-00000004"]


def test_a_file_behind_a_link_that_leads_nowhere_is_not_damaged(tmp_path: Path) -> None:
    store = store_with(tmp_path, 1, 2)
    file = store.path(2) / "model.safetensors"
    file.unlink()
    file.symlink_to(tmp_path / "disk" / "model.safetensors")
    with raises(UnreadableError, path="checkpoints/step-00000002/model.safetensors"):
        store.newest_complete()


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    for step in (10, 20, 30):
        store.save(step, {"model": {"w": torch.ones(3)}}, {})
    return store


def test_the_newest_whole_one_is_chosen_and_the_damaged_are_named(store: CheckpointStore) -> None:
    assert choose_resume_point(store) == ResumePoint(store.path(30), 30)
    (store.path(30) / "model.safetensors").unlink()
    choice = choose_resume_point(store)
    assert (choice.path, choice.step) == (store.path(20), 20)
    assert [one.step for one in choice.damaged] == [30]
    assert store.steps() == [10, 20, 30]


def test_without_checkpoints_a_run_begins_and_with_only_damaged_ones_it_is_told(store: CheckpointStore) -> None:
    nothing = choose_resume_point(CheckpointStore(store.directory / "absent"))
    assert nothing == ResumePoint(None, 0)
    for step in store.steps():
        (store.path(step) / "manifest.json").write_text("")
    choice = choose_resume_point(store)
    assert choice.path is None
    assert choice.damaged
    assert [one.step for one in choice.damaged] == [30, 20, 10]


def test_the_one_asked_for_is_taken_or_refused_never_replaced(store: CheckpointStore) -> None:
    assert choose_resume_point(store, requested=store.path(10)) == ResumePoint(store.path(10), 10)
    (store.path(10) / "model.json").unlink()
    with raises(CheckpointError, path="run/checkpoints/step-00000010"):
        choose_resume_point(store, requested=store.path(10))
