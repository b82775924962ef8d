"""Parts of tensors: cut anyhow, written by anybody, they make the whole again, or are refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_sentences import raises
from hypothesis import given
from hypothesis import strategies as st

from paceline.checkpoint.format import (
    Chunk,
    Part,
    TensorSpec,
    assemble,
    check_cover,
    encode,
    inventory,
    map_tensors,
    read_chunks,
    read_header,
    read_tensor_file,
    write_parts,
)
from paceline.checkpoint.manifest import read_components, read_manifest, verify
from paceline.checkpoint.store import CheckpointStore, ShardedSave
from paceline.checkpoint.weights import read_weights
from paceline.errors import CheckpointError

WHOLE = {
    "matrix": torch.arange(35.0).reshape(7, 5),
    "half": torch.arange(6, dtype=torch.bfloat16),
    "counter": torch.tensor(7),  # whole on every process
    "stored as bytes": torch.ones(3, dtype=torch.complex128),
    "number as bytes": torch.tensor(1j, dtype=torch.complex128),
}
FACTS = {"version": "1", "recipe_sha256": "0", "world_size": 3, "position": 4, "samples": 9, "precision": "fp32"}


def cut(tensor: torch.Tensor, rank: int, world_size: int) -> Part:
    """A process's rows, as torch.chunk gives them out: the last ones may have none."""
    rows = -(-len(tensor) // world_size)
    start = min(rank * rows, len(tensor))
    return Part(tensor[start : start + rows], tuple(tensor.shape), (start, *(0,) * (tensor.ndim - 1)))


def state(rank: int, world_size: int) -> dict[str, Any]:
    return {key: each if each.ndim == 0 else cut(each, rank, world_size) for key, each in WHOLE.items()}


def save(
    root: Path, *, world_size: int, step: int = 4, change: Callable[[int, dict[str, Any]], None] | None = None
) -> Path:
    """Let threads be the processes."""
    store = CheckpointStore(root)
    staging_dir = store.make_staging_dir(step)
    failed: list[BaseException] = []

    def share(rank: int) -> None:
        parts = state(rank, world_size)
        if change is not None:
            change(rank, parts)
        components = {"model": parts, "progress": {"step": step}}
        sharded = ShardedSave(staging_dir, rank, world_size, patience_seconds=60)
        try:
            if rank == 0:
                store.save(step, components, FACTS, file_metadata={"recipe": "{}"}, sharded=sharded)
            else:
                store.write_shard(step, components, FACTS, file_metadata={"recipe": "{}"}, sharded=sharded)
        except CheckpointError as error:
            failed.append(error)

    threads = [threading.Thread(target=share, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise next((each for each in failed if "rank" in str(each)), failed[0])
    return store.path(step)


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(each, second[key]) and each.dtype == second[key].dtype for key, each in first.items()
    )


@pytest.mark.parametrize("world_size", [1, 2, 3, 9])
def test_parts_make_the_whole(tmp_path: Path, world_size: int) -> None:
    path = save(tmp_path, world_size=world_size)
    manifest = verify(path)
    assert manifest.components["model"].tensors == {key: TensorSpec.of(each) for key, each in WHOLE.items()}
    assert same(read_components(path)["model"], WHOLE)
    assert read_components(path)["progress"] == {"step": 4}
    assert same(read_weights(path).state, WHOLE)
    # Nothing but the checkpoint is left, and in it nothing but its files.
    assert [each.name for each in tmp_path.iterdir()] == ["step-00000004"]
    listed = {name for entry in manifest.components.values() for name in entry.files} | {"manifest.json"}
    assert {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()} == listed


@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=3), writers=st.integers(1, 8), readers=st.integers(1, 8))
def test_any_number_reads_what_any_number_wrote(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], writers: int, readers: int
) -> None:
    folder = tmp_path_factory.mktemp("parts")
    whole = torch.arange(float(torch.tensor(sizes).prod())).reshape(sizes)
    specs = {"x": TensorSpec.of(whole)}
    files: list[Path] = []
    for rank in range(writers):
        files += [
            folder / name for name in write_parts(folder, "model", {"x": cut(whole, rank, writers)}, {}, rank=rank)
        ]
    check_cover(specs, [read_header(file) for file in files])
    assert torch.equal(assemble(specs, map(read_tensor_file, files))["x"], whole)
    for rank in range(readers):
        mine = cut(whole, rank, readers)
        chunk = Chunk(mine.offsets, tuple(mine.tensor.shape))
        assert torch.equal(read_chunks(files, specs, lambda *_, chunk=chunk: chunk)["x"], mine.tensor)
    assert torch.equal(read_chunks(files, specs, lambda *_: None)["x"], whole)


def test_parts_are_read_from_a_whole_file(tmp_path: Path) -> None:
    CheckpointStore(tmp_path).save(4, {"model": WHOLE}, FACTS)
    path = CheckpointStore(tmp_path).path(4)
    chunks = {"matrix": Chunk((5, 0), (2, 5)), "half": Chunk((6,), (0,))}
    found = read_components(path, chunks={"model": lambda key, _: chunks.get(key)})["model"]
    assert torch.equal(found["matrix"], WHOLE["matrix"][5:])
    assert found["half"].shape == (0,)
    assert found["counter"] == 7


def test_a_part_that_is_lost_is_missed(tmp_path: Path) -> None:
    path = save(tmp_path, world_size=3)
    entry = read_manifest(path).components["model"]
    headers = [read_header(path / name) for name in entry.tensor_files]
    with pytest.raises(ValueError, match=r"'matrix' has 35 numbers, but its parts have 20|'half' has 6 numbers"):
        check_cover(entry.tensors, headers[1:])
    (path / "model" / "part-00002.safetensors").unlink()
    with raises(CheckpointError, path="step-00000004"):
        verify(path)


def test_a_part_beyond_the_whole_is_refused(tmp_path: Path) -> None:
    def shift(rank: int, parts: dict[str, Any]) -> None:
        if rank == 1:
            part = parts["matrix"]
            parts["matrix"] = Part(part.tensor, part.shape, (6, 0))

    with raises(CheckpointError, path="step-00000004"):
        verify(save(tmp_path, world_size=3, change=shift))


def test_two_parts_in_one_place_are_refused(tmp_path: Path) -> None:
    def shift(rank: int, parts: dict[str, Any]) -> None:
        if rank == 1:
            part = parts["matrix"]
            parts["matrix"] = Part(part.tensor, part.shape, (0, 0))

    path = save(tmp_path, world_size=3, change=shift)
    with raises(CheckpointError, path="step-00000004"):
        verify(path)
    with raises(CheckpointError, path="step-00000004"):
        read_components(path, ("model",))


@pytest.mark.parametrize(
    "header", ["[1]", '{"matrix": 3}', '{"matrix": {}}', "{", '{"matrix": {"saved_offsets": ["a"]}}']
)
def test_a_header_that_says_nothing_is_refused(header: str) -> None:
    specs = {"matrix": TensorSpec("float32", (7, 5))}
    with pytest.raises(ValueError, match=r"its header (does not say where|begins .* where a tensor cannot)"):
        check_cover(specs, [(specs, {"DCP_SHARDING_INFO": header})])


def test_a_dtype_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown dtype 'nn'"):
        assemble({"x": TensorSpec("nn", (1,))}, [])


def test_who_waits_in_vain_can_be_told(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    sharded = ShardedSave(store.make_staging_dir(4), 0, 2, patience_seconds=60)
    sharded.cancelled.set()
    with pytest.raises(CheckpointError, match="has not written its part of the checkpoint, and the run has failed"):
        store.save(4, {"model": state(0, 2)}, FACTS, sharded=sharded)


def test_who_cannot_write_is_named(tmp_path: Path) -> None:
    def obstruct(rank: int, _: dict[str, Any]) -> None:
        if rank == 2:  # a file where its folder would be
            (next(tmp_path.glob(".saving-*")) / "model" / "part-00002.safetensors").mkdir(parents=True)

    save(tmp_path, world_size=3, step=1)
    with pytest.raises(CheckpointError, match="rank 2 could not write its part of the checkpoint: File exists"):
        save(tmp_path, world_size=3, step=2, change=obstruct)
    assert CheckpointStore(tmp_path).steps() == [1]
    assert not list(tmp_path.glob(".saving-*"))


def test_who_does_not_write_is_named(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    sharded = ShardedSave(store.make_staging_dir(4), 0, 2, patience_seconds=0.1)
    with pytest.raises(CheckpointError, match="rank 1 has not written its part of the checkpoint in"):
        store.save(4, {"model": state(0, 2)}, FACTS, sharded=sharded)
    assert store.steps() == []


def test_a_part_stands_for_its_whole_in_an_inventory() -> None:
    parts = {"a": [cut(torch.zeros(7, 5), 1, 3)], "b": 1.0}
    structure, tensors = encode(parts)
    assert json.dumps(structure) == '{"a": [{"$tensor": "a.0"}], "b": 1.0}'
    assert isinstance(tensors["a.0"], Part)
    assert inventory(parts) == {"a.0": TensorSpec("float32", (7, 5))}
    doubled = map_tensors(parts, lambda tensor: tensor + 1)
    assert doubled["a"][0].tensor.eq(1).all()
    assert doubled["a"][0].offsets == (3, 0)
