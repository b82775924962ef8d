"""What may be given as data, and how it is read: by number, with the generators seeded for each sample."""

from __future__ import annotations

import random
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from paceline.data.batch import Batch
from paceline.data.loaders.pytorch import ReadFailure
from paceline.data.objects.keyed import KeyedReader, seed_generators
from paceline.data.objects.samples import Samples, take_apart
from paceline.data.slices import first_samples
from paceline.errors import DataError

X, Y = torch.arange(30.0).reshape(10, 3), torch.arange(10)


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, i: int) -> Any:
        return X[i], Y[i]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(5))


def read(samples: Samples) -> Any:
    reader = KeyedReader(samples, seed=0, training=True, divide=lambda batch: (batch, ()))
    found = reader[first_samples(4)]
    assert isinstance(found, Batch)
    return found.inputs


@pytest.mark.parametrize(
    "data",
    [
        Rows(),
        (X, Y),
        (X.numpy(), Y.numpy()),
        TensorDataset(X, Y),
        DataLoader(Rows(), batch_size=4, shuffle=True),
        DataLoader(Rows(), batch_sampler=BatchSampler(SequentialSampler(Rows()), 4, drop_last=False)),
        [(X[i], Y[i]) for i in range(10)],
    ],
    ids=["data set", "tensors", "arrays", "TensorDataset", "DataLoader", "batch sampler", "list"],
)
def test_all_give_the_same_batches(data: Any) -> None:
    samples = take_apart(data, "train_set")
    assert len(samples) == 10
    inputs, targets = read(samples)
    assert torch.equal(inputs, X[:4])
    assert torch.equal(targets, Y[:4])


def test_columns_by_name() -> None:
    batch = read(take_apart({"pixels": X, "labels": Y}, "train_set"))
    assert list(batch) == ["pixels", "labels"]
    assert torch.equal(batch["labels"], Y[:4])


def test_a_function_of_one_s_own_gets_samples_also_of_columns() -> None:
    samples = take_apart((X, Y), "train_set", collate=lambda rows: [len(rows), rows[0][1]])
    assert read(samples) == [4, torch.tensor(0)]


def test_a_data_loader_keeps_its_batch_size_and_workers() -> None:
    samples = take_apart(DataLoader(Rows(), batch_size=4, num_workers=2), "train_set")
    assert (samples.batch_size, samples.workers) == (4, 2)


Pair = namedtuple("Pair", "x y")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (Stream(), "IterableDataset"),
        (DataLoader(Stream()), "IterableDataset"),
        ((each for each in range(3)), "generator"),
        (None, "NoneType"),
        ("photos", "path"),
        ((X[:0], Y[:0]), "empty"),
        ((X, Y[:5]), "10, 5 rows"),
        ([X, Y], "a list of 2 tensors"),
        ({"train": Rows(), "test": Rows()}, "data['train']"),
        (DataLoader(Rows(), sampler=WeightedRandomSampler([1.0] * 10, 10)), "WeightedRandomSampler"),
        (DataLoader(Rows(), sampler=RandomSampler(Rows(), replacement=True)), "RandomSampler"),
        (DataLoader(Rows(), batch_size=None), "no batch size"),
        ((np.array(["a", "b"]), np.array([1, 2])), "column of"),
    ],
)
def test_other_data_are_refused_with_the_way_on(data: Any, words: str) -> None:
    with pytest.raises(DataError, match="train_set") as caught:
        take_apart(data, "train_set")
    assert words in str(caught.value)
    assert caught.value.key == "train_set"


class Drawn(Rows):
    def __getitem__(self, i: int) -> Any:
        return torch.rand(1).item(), float(np.random.rand()), random.random()  # noqa: NPY002  # as people write it


def drawn(sample: int, epoch: int, *, training: bool = True, after: int | None = None) -> Any:
    samples = take_apart(Drawn(), "train_set")
    reader = KeyedReader(samples, seed=3, training=training, divide=lambda batch: (batch, ()))
    if after is not None:
        reader.read(after, epoch)
    return reader.read(sample, epoch)


def test_draws_depend_on_the_sample_and_the_epoch_alone() -> None:
    assert drawn(4, 1) == drawn(4, 1, after=7)
    assert len({drawn(4, 1), drawn(5, 1), drawn(4, 2)}) == 3
    assert all(len({*each}) == 3 for each in zip(drawn(4, 1), drawn(5, 1), drawn(4, 2), strict=True))


def test_held_out_samples_are_the_same_in_every_epoch() -> None:
    assert drawn(4, 1, training=False) == drawn(4, 2, training=False) != drawn(4, 1)


def test_the_generators_go_on_as_if_nothing_had_been_read() -> None:
    reader = KeyedReader(take_apart(Drawn(), "train_set"), seed=3, training=True, divide=lambda batch: (batch, ()))
    seed_generators(1, domain="training")
    expected = Drawn()[0]
    seed_generators(1, domain="training")
    reader[first_samples(4)]
    assert Drawn()[0] == expected


def test_a_sample_is_the_same_alone_and_in_a_batch() -> None:
    for restores in (True, False):
        samples = take_apart(Drawn(), "train_set", list)
        reader = KeyedReader(samples, seed=3, training=True, divide=lambda batch: (batch, ()), restores=restores)
        batch = reader[first_samples(4)]
        assert isinstance(batch, Batch)
        assert batch.inputs == [drawn(sample, 0) for sample in range(4)]


class Faulty(Rows):
    def __getitem__(self, i: int) -> Any:
        if i == 2:
            raise KeyError("gone")
        return super().__getitem__(i)


def test_an_error_names_its_sample() -> None:
    samples = take_apart(Faulty(), "held_out")
    reader = KeyedReader(samples, seed=0, training=False, divide=lambda batch: (batch, ()))
    failure = reader[first_samples(4)]
    assert isinstance(failure, ReadFailure)
    assert failure.message == "reading held_out[2] failed: KeyError: 'gone'"
    assert "in __getitem__" in failure.trace
