"""Take what was given as data apart: a data set, columns of tensors, or a DataLoader."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from paceline.data.shard_order import ShardSizes
from paceline.errors import DataError

Collate = Callable[[list[Any]], Any]
"""Makes a batch of a list of samples."""
Columns = list[torch.Tensor] | dict[str, torch.Tensor]
"""All samples, by column: tensors [samples, ...]."""


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Samples that are numbered from 0.

    Attributes:
        role: The argument that they were given as, for messages.
        data: Gives a sample by its number; not called if there are ``columns``.
        count: Number of samples.
        columns: All samples by column, if they are held in memory.
        shards: The files that they are read from a few at a time, if they are.
        collate: Makes a batch of a list of samples.
        batch_size: Batch size of the DataLoader that was given, if any.
        workers: Likewise, its loader processes.
        left_out: A sentence for each setting of the DataLoader that a run does not follow, and each part of the data
            that it does not use.
    """

    role: str
    data: Any
    count: int
    columns: Columns | None = None
    shards: ShardSizes | None = None
    collate: Collate = default_collate
    batch_size: int | None = None
    workers: int | None = None
    left_out: tuple[str, ...] = ()

    def __len__(self) -> int:
        return self.count

    def read(self, sample: int) -> Any:
        """Return a sample."""
        return self.data[sample]

    def path(self, sample: int) -> str:
        """Return a sample's name in messages."""
        return f"{self.role}[{sample}]"


def take_apart(data: Any, role: str, collate: Collate | None = None) -> Samples:
    """Return the samples of anything with ``len()`` and ``[i]``, of tensors or arrays, or of a DataLoader.

    Args:
        data: A map-style data set; a tuple or dict of tensors, arrays or pandas columns, one row for each sample; or a
            DataLoader, whose sampler is replaced.
        role: The argument that it was given as, for messages.
        collate: Makes a batch of a list of samples; by default the DataLoader's function, or torch's.

    Raises:
        DataError: If samples cannot be asked for by number, or there are none.
    """
    if isinstance(data, DataLoader):
        return _of_loader(data, role, collate)
    if isinstance(data, str | Path):
        raise _refused(role, f"is the path '{data}'", "for files call paceline.train(recipe), or give a data set")
    if isinstance(data, IterableDataset) or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        kind = "an IterableDataset" if isinstance(data, IterableDataset) else f"a {type(data).__name__}"
        raise _refused(
            role,
            f"is {kind}, whose samples have no numbers, so that a resumed run could not find its place",
            "give one with len() and [i]: list(data) if it fits into memory, or paceline.shards.Shards for files",
        )
    columns = _columns(data, role)
    try:
        count = len(data)
    except Exception as error:  # whatever the program's own method raises
        raise _refused(role, f"has a len() that fails ({error})", "return the number of samples") from error
    given = Samples(
        role=role,
        data=data,
        count=count,
        shards=(shards := _shards(data, count, role)),
        collate=collate or default_collate,
        left_out=() if shards is None else tuple(getattr(data, "left_out", ())),
    )
    if columns is not None:
        # A given function gets samples, as from a data set.
        keeps = collate is None
        each = [*columns.values()] if isinstance(columns, dict) else columns
        rows = TensorDataset(*each)
        given = replace(given, data=rows, count=len(each[0]), columns=columns if keeps else None)
    if given.count < 1:
        raise _refused(role, "is empty", "give at least one sample")
    return given


def _shards(data: Any, count: int, role: str) -> ShardSizes | None:
    """Return the files of a data set that names them."""
    shards = getattr(data, "shard_sizes", None)
    if not isinstance(shards, ShardSizes):
        return None
    if count != shards.ends[-1]:
        found = f"has {count:,} samples, and shard_sizes says {shards.ends[-1]:,}"
        raise _refused(role, found, "give both the same, or leave shard_sizes out")
    return shards


def _refused(role: str, found: str, fix: str) -> DataError:
    return DataError(f"{role} {found}; {fix}.", key=role)


def _columns(data: Any, role: str) -> Columns | None:
    """Return whole columns, if samples were given as such.

    Raises:
        DataError: If they differ in length, or one is not made of numbers.
    """
    if type(data) is TensorDataset:
        return list(data.tensors)
    if isinstance(data, torch.Tensor | np.ndarray):
        return [_tensor(data, role)]
    if type(data).__module__.startswith("pandas."):
        raise _refused(role, f"is a pandas {type(data).__name__}", "give a tuple of columns, (inputs, targets)")
    found: Columns
    if isinstance(data, Mapping):
        first = next(iter(data), "")
        if not all(map(_is_column, data.values())):
            parts = f"is a {type(data).__name__} with {', '.join(map(repr, list(data)[:5]))}"
            raise _refused(role, parts, f"give one of its parts, such as data[{first!r}]")
        found = {str(name): _tensor(each, role) for name, each in data.items()}
    elif isinstance(data, tuple) and data and all(map(_is_column, data)):
        found = [_tensor(each, role) for each in data]
    else:
        _refuse_list_of_columns(data, role)
        return None
    lengths = list(map(len, found.values() if isinstance(found, dict) else found))
    if len({*lengths}) > 1:
        raise _refused(role, f"has columns of {', '.join(map(str, lengths))} rows", "give one row for each sample")
    return found if lengths else None


def _refuse_list_of_columns(data: Any, role: str) -> None:
    """Refuse [inputs, targets], which looks like a list of two samples."""
    if isinstance(data, list) and 1 < len(data) <= 3 and all(map(_is_column, data)):
        lengths = {*map(len, data)}
        if len(lengths) == 1 and lengths.pop() > len(data):
            found = f"is a list of {len(data)} tensors or arrays"
            raise _refused(role, found, "give a tuple of them, since a list holds samples")


def _is_column(value: Any) -> bool:
    is_table = type(value).__module__.startswith("pandas.")
    return is_table or (isinstance(value, torch.Tensor | np.ndarray) and value.ndim > 0)


def _tensor(column: Any, role: str) -> torch.Tensor:
    if isinstance(column, torch.Tensor):
        return column
    array = np.asarray(column)
    try:
        return torch.from_numpy(np.ascontiguousarray(array))
    except TypeError:
        raise _refused(role, f"has a column of {array.dtype}", "give numbers") from None


def _of_loader(loader: DataLoader[Any], role: str, collate: Collate | None) -> Samples:
    """Return a DataLoader's data set with its batch size, function and loader processes; the order is the run's.

    Raises:
        DataError: If it decides itself which samples it draws.
    """
    batches = loader.batch_sampler
    if isinstance(loader.dataset, IterableDataset):
        return take_apart(loader.dataset, role, collate)
    own = None
    if batches is None:
        own = "no batch size"
    elif type(batches) is not BatchSampler:
        own = f"the batch sampler {type(batches).__name__}"
    elif type(sampler := batches.sampler) not in (SequentialSampler, RandomSampler) or (
        isinstance(sampler, RandomSampler) and sampler.replacement
    ):
        own = f"the sampler {type(sampler).__name__}"
    if own is not None:
        raise _refused(
            role,
            f"is a DataLoader with {own}, but the run decides what is drawn, by seed and epoch",
            "give its data set, and batch_size; for uneven classes weigh the loss",
        )
    found = take_apart(
        loader.dataset, role, collate or (None if loader.collate_fn is default_collate else loader.collate_fn)
    )
    left_out = {
        "its samples are shuffled, also if the DataLoader does not": role == "train_set"
        and type(getattr(batches, "sampler", None)) is SequentialSampler,
        "an epoch's smaller last batch is used too": loader.drop_last,
        "the generators are seeded for each sample, and nothing else when a worker starts": loader.worker_init_fn,
    }
    return replace(
        found,
        batch_size=getattr(batches, "batch_size", None),
        workers=loader.num_workers,
        left_out=(*found.left_out, *(f"{role}: {sentence}" for sentence, is_set in left_out.items() if is_set)),
    )
