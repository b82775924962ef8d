"""Data sets whose samples are not the same when they are read again are named, with the sample, before a run."""

from __future__ import annotations

import datetime as dt
import hashlib
import os
import random
import time
from dataclasses import dataclass
from datetime import datetime as Moment  # under another name, as people import it
from pathlib import Path
from time import monotonic
from typing import Any, BinaryIO

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, get_worker_info

from paceline.data.objects.elsewhere import has_fixed_hashes
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


MOMENT = Moment(2026, 1, 1)  # of any zone
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


class Augmented(Twenty):
    """Keeps what it drew for the epoch in which it is read first."""

    def __init__(self) -> None:
        self.kept: dict[int, Any] = {}

    def __getitem__(self, i: int) -> Any:
        if i not in self.kept:
            self.kept[i] = i + torch.rand(2)
        return self.kept[i]


class Seconds(Twenty):
    def __getitem__(self, i: int) -> int:
        return int(time.time()) // 3600


class Monotonic(Twenty):
    def __getitem__(self, i: int) -> float:
        return monotonic() // 3600


class Day(Twenty):
    def __getitem__(self, i: int) -> str:
        return f"{dt.date.today()}"


class Hour(Twenty):
    def __getitem__(self, i: int) -> str:
        return Moment.now().strftime("%d %H") if isinstance(MOMENT, Moment) else ""


class Address(Twenty):
    def __getitem__(self, i: int) -> int:
        return id(self) % 2**30


class HashOfTuple(Twenty):
    def __getitem__(self, i: int) -> Any:
        return {"text": [hash(("name", i)) % 1000]}


class HashOfFrozenSet(Twenty):
    def __getitem__(self, i: int) -> Any:
        return hash(frozenset([f"name {i}"]))


class OrderOfComprehension(Twenty):
    """Its method has variables from outside: ``super`` and its class."""

    def __getitem__(self, i: int) -> int:
        super().__len__()
        return list({word.lower() for word in ["Cat", "Dog", "Cow", "Hen"]}).index("cat")


class OrderOfDisplay(Twenty):
    def __init__(self) -> None:
        self.transform = first_word

    def __getitem__(self, i: int) -> str:
        return self.transform("cat", "dog", "cow", "hen")


def first_word(*words: str) -> str:
    return next(iter({*words}))


class OrderOfUnion(Twenty):
    def __getitem__(self, i: int) -> list[str]:
        return list(set("abcd") | set("ef"))


class OrderOfConstant(Twenty):
    def __getitem__(self, i: int) -> str:
        return next(word for word in {"cat", "dog", "cow", "hen"})  # noqa: PLC0208  # the mistake under test


class OrderOfFrozen(Twenty):
    def __getitem__(self, i: int) -> list[str]:
        return list(frozenset("abcd") - frozenset("d"))


class OrderInside(Twenty):
    def __init__(self) -> None:
        self.words = {"animals": [{"cat", "dog", "cow", "hen"}]}

    def __getitem__(self, i: int) -> str:
        return next(iter(self.words["animals"][0]))


class Formatted(Twenty):
    def __getitem__(self, i: int) -> str:
        return time.strftime("%d %H")


class FromClock(Twenty):
    def __getitem__(self, i: int) -> float:
        return time.clock_gettime(time.CLOCK_REALTIME) // 3600


class ParentId(Twenty):
    def __getitem__(self, i: int) -> int:
        return os.getppid()


@dataclass(frozen=True)
class Key:
    name: str
    number: int


class Careful(Twenty):
    """Pure: what differs from process to process has no effect."""

    def __init__(self) -> None:
        self.rows = {Key(f"row {i}", i): i / 7 for i in range(20)}
        self.seen: dict[int, float] = {}
        self.codes = {5, 300, 17}

    def __getitem__(self, i: int) -> Any:
        begun = time.perf_counter()
        row = self.rows.get(Key(f"row {i}", i), -1.0)
        self.seen[id(self)] = time.perf_counter() - begun
        words = {word.lower() for word in ("Cat", "Dog")} | {"cow"}
        assert isinstance(words, set)
        assert isinstance(frozenset(words), frozenset)
        assert {frozenset(["a"]): i}[frozenset(["a"])] == i
        assert time.strftime("%d", time.localtime(0)) == time.strftime("%d", time.localtime(0))
        return row, sorted(words), "cat" in {*words}, list(set(self.codes)), isinstance(MOMENT, Moment)


class CachedBefore(Twenty):
    """Pure: it caches samples before their random transforms."""

    def __init__(self) -> None:
        self.kept: dict[int, Any] = {}

    def __getitem__(self, i: int) -> Any:
        if i not in self.kept:
            self.kept[i] = torch.arange(3.0) + i
        return self.kept[i] + torch.rand(3)


class Seeded(Twenty):
    """Pure: a generator for each sample, and a picture."""

    def __getitem__(self, i: int) -> Any:
        draws = np.random.default_rng(i)
        own = torch.Generator().manual_seed(i)
        return draws.random(2), torch.rand(2, generator=own), Image.new("L", (4, 4), i)


def reading(data: Any, seed: int = 1) -> Reading:
    samples = take_apart(data, "train_set")
    return read_again(KeyedReader(samples, seed=seed, training=True, divide=lambda batch: (batch, ())))


def test_a_digest_does_not_depend_on_the_time_that_reading_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = reading(Varied())
    monkeypatch.setattr("paceline.data.objects.purity._BUDGET_SECONDS", 0)
    slow = reading(Varied())
    assert slow.digest == fast.digest
    assert slow.contents == fast.contents


@pytest.mark.parametrize("kind", [Varied, WithSets, Cached, Careful, CachedBefore, Seeded])
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
        (Augmented, "train_set[0] keeps the random draws of its first read"),
        *((kind, "depends on the clock") for kind in (Seconds, Monotonic, Day, Hour, Formatted, FromClock)),
        (ParentId, "depends on the process that reads it"),
        (Address, "depends on id()"),
        *((kind, "depends on hash()") for kind in (HashOfTuple, HashOfFrozenSet)),
        *((kind, "the order of a set") for kind in (OrderOfComprehension, OrderOfDisplay, OrderOfUnion)),
        *((kind, "the order of a set") for kind in (OrderOfConstant, OrderOfFrozen, OrderInside)),
    ],
)
def test_what_is_not_pure_is_named_with_its_sample(kind: type[Twenty], cause: str) -> None:
    found = reading(kind())
    assert cause in found.difference
    assert found.difference.startswith("train_set[")
    assert found.digest == ""


@pytest.mark.parametrize("kind", [HashSeed, OrderOfSet, OrderOfFrozen])
def test_hashes_that_every_process_shares_are_not_named(kind: type[Twenty], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.data.objects.elsewhere._FIXED_HASHES", True)
    assert reading(kind()).difference == ""


@pytest.mark.parametrize(
    ("environment", "is_fixed"),
    [(b"A=1\0PYTHONHASHSEED=42\0", True), (b"PYTHONHASHSEED=0", True), (b"PYTHONHASHSEED=random", False), (b"", False)],
)
def test_the_seed_of_hashes_is_that_of_the_start(environment: bytes, is_fixed: bool) -> None:
    assert has_fixed_hashes(environment) == is_fixed


def test_an_open_file_reads_on_where_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(range(200)))
    with path.open("rb") as file:
        assert "position of an open file" in reading(OpenFile(file)).difference


class Seeks(Twenty):
    """Looks for each sample in the file that it has opened."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file

    def __getitem__(self, i: int) -> bytes:
        self.file.seek(10 * i)
        return self.file.read(2)


class OpensAgain(Seeks):
    """Pure: a process that did not open the file does so."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self.owner = os.getpid()

    def __getitem__(self, i: int) -> bytes:
        if os.getpid() != self.owner:
            self.owner, self.file = os.getpid(), open(self.file.name, "rb")  # noqa: SIM115  # kept open
        return super().__getitem__(i)


class OpensLate(Seeks):
    """Pure: each process opens the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __getitem__(self, i: int) -> bytes:
        if not hasattr(self, "file"):
            self.file = self.path.open("rb")
        return super().__getitem__(i)


def test_a_shared_position_is_named_and_set_back(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(range(200)))
    with path.open("rb") as file:
        file.seek(3)
        found = reading(Seeks(file))
        assert file.read(1) == b"\3"
        assert reading(OpensAgain(file)).shared == ""
    assert (found.difference, [*found.contents]) == ("", ["0", "10", "19"])
    assert found.shared.startswith(f"train_set[0] is read from the open file '{path}', whose position loader processes")
    assert reading(OpensLate(path)).shared == ""


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
