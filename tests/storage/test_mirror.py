"""A copy of a checkpoint is chosen only when all of it is there; what was broken off or damaged never is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.checkpoint.manifest import read_components
from paceline.checkpoint.mirror import (
    Commit,
    CommitListing,
    Mirror,
    MirrorConflictError,
    fetch_newest,
    list_commits,
)
from paceline.checkpoint.publish import LocalCheckpoint
from paceline.checkpoint.store import Best, CheckpointStore
from paceline.errors import CheckpointError, StorageError
from paceline.storage.remote import Remote, Retries


class Home:
    """A run directory with a few checkpoints and growing records."""

    def __init__(self, root: Path) -> None:
        self.root, self.store = root, CheckpointStore(root / "checkpoints")
        (root / "ledger").mkdir(parents=True)
        (root / "recipe.yaml").write_text("seed: 1\n")

    def save(self, step: int, *, best: Best | None = None) -> LocalCheckpoint:
        with (self.root / "events.jsonl").open("a") as events:
            events.write(f'{{"event": "checkpoint", "step": {step}}}\n')
        with (self.root / "ledger/rank-00000.ids").open("ab") as ledger:
            ledger.write(bytes([step]) * 100)
        components = {"model": {"weight": torch.full((3, 4), float(step))}, "progress": {"step": step}}
        saved = self.store.save(step, components, {"position": step}, replace=True)
        sizes = {name: (self.root / name).stat().st_size for name in ("events.jsonl", "ledger/rank-00000.ids")}
        return LocalCheckpoint(step=step, path=saved, growing=sizes, small=("recipe.yaml",), best=best)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


@pytest.fixture
def address(request: pytest.FixtureRequest) -> str:
    return f"s3://bucket/{request.node.name}"


def mirror_at(address: str) -> Mirror:
    remote = Remote(address, Retries(patience_seconds=1.0))
    return Mirror(remote, "a run", list_commits(remote))


def fetched(address: str, root: Path, beyond: int = -1) -> Commit | None:
    remote = Remote(address)
    return fetch_newest(remote, list_commits(remote).commits, root, after_step=beyond, log=lambda _: None)


def weight_in(root: Path) -> float:
    path, _ = CheckpointStore(root / "checkpoints").newest_complete()
    assert path is not None
    return float(read_components(path)["model"]["weight"][0, 0])


def test_there_and_back(s3: Any, home: Home, address: str, tmp_path: Path) -> None:
    mirror = mirror_at(address)
    for step in (1, 2, 3):
        mirror.send(home.save(step, best=Best(2, "loss", 0.5)), home.root)
        mirror.prune(keep=1)
    commit = fetched(address, tmp_path / "away")
    assert commit is not None
    assert commit.step == 3
    away = tmp_path / "away"
    assert weight_in(away) == 3.0
    for name in ("events.jsonl", "ledger/rank-00000.ids", "recipe.yaml"):
        assert (away / name).read_bytes() == (home.root / name).read_bytes()
    # The newest and the best, as here; nothing else is left there.
    store = CheckpointStore(away / "checkpoints")
    assert (store.steps(), store.read_best()) == ([2, 3], Best(2, "loss", 0.5))
    assert {each.step for each in list_commits(Remote(address)).commits} == {2, 3}
    assert {name.split("/")[1][:13] for name in Remote(address).list_files("checkpoints")} == {
        "step-00000002",
        "step-00000003",
    }


@pytest.mark.parametrize("part", ["model.safetensors", "manifest.json", "recipe.yaml", "commits/"])
def test_what_was_broken_off_is_never_chosen(s3: Any, home: Home, address: str, tmp_path: Path, part: str) -> None:
    address = f"s3://bucket/broken-off-{part.strip('/')}"
    mirror_at(address).send(home.save(1), home.root)
    (home.root / "recipe.yaml").write_text("seed: 2\n")
    second = home.save(2)
    s3.share, s3.only, s3.fates = 1.0, f"PUT .*{part}", ("dropped", "refused")
    with pytest.raises(StorageError):
        mirror_at(address).send(second, home.root)
    assert fetched(address, tmp_path / "away").step == 1  # type: ignore[union-attr]
    assert weight_in(tmp_path / "away") == 1.0
    s3.share = 0.0
    mirror_at(address).send(second, home.root)
    assert fetched(address, tmp_path / "later").step == 2  # type: ignore[union-attr]
    assert weight_in(tmp_path / "later") == 2.0


@pytest.mark.parametrize("damage", ["shorter", "flipped", "missing", "commit"])
def test_what_is_damaged_is_never_chosen(
    s3: Any, put: Callable[[str, bytes], None], home: Home, address: str, tmp_path: Path, damage: str
) -> None:
    address = f"s3://bucket/damage-{damage}"
    mirror = mirror_at(address)
    for step in (1, 2):
        mirror.send(home.save(step), home.root)
    remote = Remote(address)
    name = list_commits(remote).commits[0].files["model.safetensors"].name
    content = remote.read(name)
    if damage == "shorter":
        remote.write(name, content[:-1])
    elif damage == "flipped":
        remote.write(name, content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "missing":
        remote.delete([name])
    else:
        commit = next(each for each in remote.list_files("commits") if each.startswith("commits/00000002"))
        remote.write(commit, remote.read(commit)[:-20])
    assert fetched(address, tmp_path / "away").step == 1  # type: ignore[union-attr]
    assert weight_in(tmp_path / "away") == 1.0
    # The next launch sends it again.
    mirror_at(address).send(home.save(3), home.root)
    assert fetched(address, tmp_path / "later").step == 3  # type: ignore[union-attr]


def test_two_launches_do_not_write_over_one_another(s3: Any, home: Home, address: str) -> None:
    first, second = mirror_at(address), mirror_at(address)
    first.send(home.save(1), home.root)
    with pytest.raises(MirrorConflictError):
        second.send(home.save(2), home.root)
    first.send(home.save(3), home.root)
    assert [each.step for each in list_commits(Remote(address)).commits] == [3, 1]


def test_a_run_that_goes_back_is_not_overtaken_by_its_past(s3: Any, home: Home, address: str, tmp_path: Path) -> None:
    mirror = mirror_at(address)
    for step in (1, 2, 3):
        mirror.send(home.save(step), home.root)
    back = mirror_at(address)
    back.send(home.save(1), home.root)
    assert fetched(address, tmp_path / "away").step == 1  # type: ignore[union-attr]
    back.prune(keep=3)
    assert {each.step for each in list_commits(Remote(address)).commits} == {1}


def test_a_checkpoint_that_went_is_given_up(s3: Any, home: Home, address: str) -> None:
    mirror, first = mirror_at(address), home.save(1)
    home.save(2)
    home.store.prune(keep=1)
    with pytest.raises(CheckpointError):
        mirror.send(first, home.root)
    rotten = home.save(3)
    weights = rotten.path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match="has changed since it was saved, and was not copied"):
        mirror.send(rotten, home.root)
    assert list_commits(Remote(address)).commits == ()


def test_a_long_row_of_pieces_becomes_one(s3: Any, home: Home, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.checkpoint.mirror._MAX_SMALL_PIECES", 3)
    mirror = mirror_at(address)
    for step in range(1, 8):
        mirror.send(home.save(step), home.root)
        mirror.prune(keep=1)
    commit = list_commits(Remote(address)).commits[0]
    assert 1 <= len(commit.records["events.jsonl"]) <= 4
    assert (
        sum(piece.facts.size_bytes for piece in commit.records["events.jsonl"])
        == (home.root / "events.jsonl").stat().st_size
    )


def test_two_launches_that_commit_at_once_delete_nothing_of_one_another(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = Remote(f"file://{tmp_path}/copy")
    other = Home(tmp_path / "other")
    (other.root / "recipe.yaml").write_text("seed: 2\n")
    both = [(Mirror(remote, "a run", CommitListing()), each) for each in (home, other)]
    with monkeypatch.context() as patch:
        # Both look, then both write.
        patch.setattr("paceline.checkpoint.mirror._commit_names", lambda _: [])
        for step, (mirror, each) in enumerate(both):
            mirror.send(each.save(10 + step), each.root)
    before = sorted(remote.list_files())
    for mirror, _ in both:
        with pytest.raises(MirrorConflictError):
            mirror.prune(keep=1)
    assert sorted(remote.list_files()) == before
    assert len({each.sequence for each in list_commits(remote).commits}) == 1
    assert fetched(str(remote.address), tmp_path / "away") is not None
    # The next launch knows both.
    later = Mirror(remote, "a run", list_commits(remote))
    later.send(home.save(20), home.root)
    later.prune(keep=2)
    assert [each.step for each in list_commits(remote).commits] == [20, 11]


def test_what_somebody_took_for_litter_is_sent_again(home: Home, tmp_path: Path) -> None:
    remote = Remote(f"file://{tmp_path}/copy")
    mirror, first, second = Mirror(remote, "a run", CommitListing()), home.save(1), home.save(2)
    mirror.send(first, home.root)
    mirror.send(second, home.root)
    newest = list_commits(remote).commits[0]
    remote.delete([newest.files["model.safetensors"].name, newest.records["events.jsonl"][-1].name])
    with pytest.raises(StorageError, match="is missing, but a commit lists it"):
        mirror.prune(keep=1)
    assert fetched(str(remote.address), tmp_path / "older").step == 1  # type: ignore[union-attr]
    mirror.send(second, home.root)
    mirror.prune(keep=1)
    assert fetched(str(remote.address), tmp_path / "away").step == 2  # type: ignore[union-attr]


def test_full_pieces_of_a_long_record_are_never_sent_again(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.checkpoint.mirror._MAX_SMALL_PIECES", 2)
    monkeypatch.setattr("paceline.checkpoint.mirror._PIECE_BYTES", 256)
    remote = Remote(f"file://{tmp_path}/copy")
    mirror, name, seen = Mirror(remote, "a run", CommitListing()), "ledger/rank-00000.ids", list[str]()
    for step in range(1, 15):
        mirror.send(home.save(step), home.root)
        row = list_commits(remote).commits[0].records[name]
        full = [piece.name for piece in row if piece.facts.size_bytes == 256]
        assert full[: len(seen)] == seen
        assert len(row) - len(full) <= 4
        seen = full
    assert len(seen) >= 3
    fetched(str(remote.address), tmp_path / "away")
    assert (tmp_path / "away" / name).read_bytes() == (home.root / name).read_bytes()
