"""Which checkpoint is chosen, and what is said when none can be?"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.checkpoint.restore import Choice, choose
from paceline.checkpoint.store import CheckpointStore
from paceline.errors import CheckpointError


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    for step in (10, 20, 30):
        store.save(step, {"model": {"w": torch.ones(3)}}, {})
    return store


def test_the_newest_whole_one_is_chosen_and_the_damaged_are_named(store: CheckpointStore) -> None:
    assert choose(store) == Choice(store.path(30), 30)
    (store.path(30) / "model.safetensors").unlink()
    choice = choose(store)
    assert (choice.path, choice.step) == (store.path(20), 20)
    assert [one.step for one in choice.damaged] == [30]
    assert not choice.lost_everything
    assert store.steps() == [10, 20, 30]


def test_without_checkpoints_a_run_begins_and_with_only_damaged_ones_it_is_told(
    store: CheckpointStore,
) -> None:
    nothing = choose(CheckpointStore(store.directory / "absent"))
    assert nothing == Choice(None, 0)
    assert not nothing.lost_everything
    for step in store.steps():
        (store.path(step) / "manifest.json").write_text("")
    choice = choose(store)
    assert choice.lost_everything
    assert [one.step for one in choice.damaged] == [30, 20, 10]


def test_the_one_asked_for_is_taken_or_refused_never_replaced(store: CheckpointStore) -> None:
    assert choose(store, wanted=store.path(10)) == Choice(store.path(10), 10)
    (store.path(10) / "model.json").unlink()
    with pytest.raises(CheckpointError, match=r"step-00000010 is not .*: model\.json is missing"):
        choose(store, wanted=store.path(10))
