"""Data sets whose samples are not the same when they are read again are named, with the sample, before a run."""

from __future__ import annotations

import hashlib
import os
import random
import time
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, get_worker_info

from paceline.data.objects.keyed import KeyedReader
from paceline.data.objects.purity import Reading, read_again
from paceline.data.objects.samples import take_apart


class Twenty(Dataset[Any]):
    def __len__(self) -> int:
        return 20


class Varied(Twenty):
    """Pure: what it draws comes from the generators that are seeded for each sample."""

    def __getitem__(self, i: int) -> Any:
        return torch.rand(3) + np.random.rand() + random.random(), i  # noqa: NPY002  # as people write it


class WithSets(Twenty):
    """Pure: the order of its set has no effect."""

    def __init__(self) -> None:
        self.names = {"cat", "dog", "cow"}

    def __getitem__(self, i: int) -> Any:
        return sorted(set(self.names))[i % 3], "cat" in self.names, hash(i)


class Cached(Twenty):
    """Pure, although it changes: what it keeps is what it would read."""

    def __init__(self) -> None:
        self.kept: dict[int, float] = {}

    def __getitem__(self, i: int) -> float:
        return self.kept.setdefault(i, i / 7)


class OwnGenerator(Twenty):
    def __init__(self) -> None:
        self.draws = np.random.default_rng(0)

    def __getitem__(self, i: int) -> Any:
        return self.draws.random(3)


_DRAWS = random.Random(1)


class GlobalGenerator(Twenty):
    def __getitem__(self, i: int) -> float:
        return _DRAWS.random()


class FreshGenerator(Twenty):
    def __getitem__(self, i: int) -> Any:
        return np.random.default_rng().random(2)


class Clock(Twenty):
    def __getitem__(self, i: int) -> float:
        return time.time()


class Counter(Twenty):
    count = 0

    def __getitem__(self, i: int) -> int:
        self.count += 1
        return self.count


class SharedList(Twenty):
    def __init__(self) -> None:
        self.seen: list[int] = []

    def __getitem__(self, i: int) -> int:
        self.seen.append(i)
        return len(self.seen)


class OrderOfDict(Twenty):
    def __init__(self) -> None:
        self.seen: dict[int, None] = {}

    def __getitem__(self, i: int) -> int:
        self.seen[i] = None
        return list(self.seen).index(i)


class Worker(Twenty):
    def __getitem__(self, i: int) -> int:
        info = get_worker_info()
        return 0 if info is None else info.id


class ProcessId(Twenty):
    def __getitem__(self, i: int) -> int:
        return os.getpid()


class OpenFile(Twenty):
    def __init__(self, file: BinaryIO) -> None:
        self.file = file

    def __getitem__(self, i: int) -> bytes:
        return self.file.read(2)


class HashSeed(Twenty):
    def __getitem__(self, i: int) -> int:
        return hash(f"name {i}") % 1000


class OrderOfSet(Twenty):
    def __init__(self) -> None:
        self.names = {"cat", "dog", "cow", "hen"}

    def __getitem__(self, i: int) -> int:
        return list(self.names).index("cat")


def reading(data: Any, seed: int = 1) -> Reading:
    samples = take_apart(data, "train_set")
    return read_again(KeyedReader(samples, seed=seed, training=True, divide=lambda batch: (batch, ())))


def test_a_digest_does_not_depend_on_the_time_that_reading_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = reading(Varied())
    monkeypatch.setattr("paceline.data.objects.purity._BUDGET_SECONDS", 0)
    slow = reading(Varied())
    assert slow.digest == fast.digest
    assert slow.contents == fast.contents


@pytest.mark.parametrize("kind", [Varied, WithSets, Cached])
def test_a_pure_data_set_has_a_digest_and_no_difference(kind: type[Twenty]) -> None:
    first, again = reading(kind()), reading(kind())
    assert first.difference == ""
    assert first.digest == again.digest != ""


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        (OwnGenerator, "OwnGenerator.draws is a separate generator"),
        (GlobalGenerator, "a Random is a separate generator"),
        (FreshGenerator, "default_rng"),
        (Clock, "it reads the clock (time)"),
        (Counter, "such as a counter or a list"),
        (SharedList, "such as a counter or a list"),
        (OrderOfDict, "depends on the samples that were read before it"),
        (Worker, "depends on the process that reads it"),
        (ProcessId, "depends on the process that reads it"),
        (HashSeed, "depends on hash()"),
        (OrderOfSet, "depends on the order of a set"),
    ],
)
def test_what_is_not_pure_is_named_with_its_sample(kind: type[Twenty], cause: str) -> None:
    found = reading(kind())
    assert cause in found.difference
    assert found.difference.startswith("train_set[")
    assert found.digest == ""


def test_an_open_file_reads_on_where_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(range(200)))
    with path.open("rb") as file:
        assert "position of an open file" in reading(OpenFile(file)).difference


def test_reading_changes_nothing_here() -> None:
    data, before = Counter(), random.getstate()
    assert reading(data).difference
    assert data.count == 0
    assert random.getstate() == before


def test_columns_are_told_apart_by_their_content() -> None:
    x = torch.arange(200.0)
    one, other = reading((x, x)), reading((x, x + 1))
    assert one.digest != other.digest
    assert len(bytes.fromhex(one.digest)) == hashlib.sha256().digest_size


class Ends(Twenty):
    def __getitem__(self, i: int) -> int:
        os._exit(3)


def test_a_process_that_ends_while_it_reads_tells_nothing() -> None:
    assert reading(Ends()) == Reading()
