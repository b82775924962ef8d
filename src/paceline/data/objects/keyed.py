"""Read samples of your own with every generator keyed by (seed, epoch, sample), in whichever process reads them.

Random transforms of Python, NumPy, torch (torchvision) and albumentations then draw the same numbers with any number of
loader processes and ranks, and after any resume.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import numpy as np
import torch

from paceline.data.batch import Batch, Nested
from paceline.data.loaders.pytorch import ReadFailure
from paceline.data.objects.parts import parts_of
from paceline.data.objects.samples import Columns, Samples
from paceline.data.random_draws import derive_seed
from paceline.data.slices import SampleIds, SampleSlice
from paceline.errors import PacelineError

# First number mixed into the seeds, so that training, evaluation and collating draw apart from one another.
_DOMAINS = {"training": 0x747261696E, "held out": 0x68656C64, "collate": 0x636F6C6C}
Domain = Literal["training", "held out", "collate"]
Divide = Callable[[Any], tuple[Nested, Nested]]
"""Divides a batch, as ``collate`` made it, into inputs and targets."""


def seed_generators(*key: int, domain: Domain) -> None:
    """Seed the global generators of Python, NumPy and torch (on the CPU).

    Args:
        key: Numbers that say what is drawn, such as (seed, epoch, sample).
        domain: What the numbers are drawn for.
    """
    _seed(derive_seed(_DOMAINS[domain], *key))


def _seed(seed: int, others: tuple[Any, ...] = ()) -> None:
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002  # the generator that other people's transforms use
    torch.default_generator.manual_seed(seed)
    for each in others:
        each.set_random_seed(seed & 0xFFFFFFFF)


@contextmanager
def kept_generators() -> Iterator[None]:
    """Restore the global generators of Python, NumPy and torch (on the CPU) afterwards."""
    states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()  # noqa: NPY002  # as above
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002  # as above
        torch.default_generator.set_state(states[2])


def albumentations_in(data: Any) -> tuple[Any, ...]:
    """Return the albumentations pipelines that a data set uses: they have generators of their own."""
    found = [each for each in parts_of(data) if type(each).__module__.partition(".")[0] == "albumentations"]
    return tuple(each for each in found if type(each).__name__ == "Compose" and hasattr(each, "set_random_seed"))


class KeyedReader:
    """Reads a micro-batch sample by sample; stateless, so that any process can read any micro-batch.

    Args:
        samples: The samples.
        seed: The run's seed.
        training: Whether they are trained on: their draws then differ from epoch to epoch.
        divide: Divides a batch into inputs and targets; by default all are inputs.
        note: Called with each sample's number before it is read.
        restores: Whether to restore the global generators after reading.
    """

    is_divisible = False
    """Whether a micro-batch may be read in parts: what ``collate`` makes cannot be joined."""

    def __init__(
        self,
        samples: Samples,
        *,
        seed: int,
        training: bool,
        divide: Divide = lambda batch: (batch, ()),
        note: Callable[[int], None] | None = None,
        restores: bool = True,
    ) -> None:
        self.samples, self._seed, self._divide, self._note = samples, seed, divide, note
        self._restores = restores
        self._domain: Domain = "training" if training else "held out"
        self._others = () if samples.columns is not None else albumentations_in(samples.data)

    def __getitem__(self, piece: SampleSlice) -> Batch | ReadFailure:
        sample = -1
        try:
            if self.samples.columns is not None:
                made = _rows(self.samples.columns, torch.tensor(piece.ids))
            else:
                with kept_generators() if self._restores else nullcontext():
                    read = []
                    seeds = self._seeds(piece.epoch, piece.variation_keys)
                    for sample, seed in zip(piece.ids.tolist(), seeds, strict=True):
                        read.append(self.read(sample, piece.epoch, seed))
                    sample = -1
                    turn = (piece.epoch, piece.step, piece.logical_rank)
                    seed_generators(self._seed, *turn, domain="collate")
                    made = self.samples.collate(read)
            inputs, targets = self._divide(made)
        except Exception as error:  # noqa: BLE001  # raised by the training process, which knows what to stop
            return _failure(self.samples, sample, piece, error)
        return Batch(inputs, targets, piece.ids, piece)

    def read(self, sample: int, epoch: int, seed: int | None = None) -> Any:
        """Read one sample, with the generators seeded for it.

        Args:
            sample: Its number.
            epoch: The epoch, which has no effect on held-out samples.
            seed: Its seed, by default that of the sample in this epoch.
        """
        if self._note is not None:
            self._note(sample)
        _seed(self._seeds(epoch, np.array([sample]))[0] if seed is None else seed, self._others)
        return self.samples.read(sample)

    def _seeds(self, epoch: int, keys: SampleIds) -> Any:
        turn = epoch if self._domain == "training" else 0
        words: Any = keys.astype(np.uint64)  # the arithmetic of derive_seed is modulo 2**64, as that of such an array
        seeds: Any = derive_seed(_DOMAINS[self._domain], self._seed, turn, words)
        return seeds.tolist()


def _rows(columns: Columns, ids: torch.Tensor) -> Any:
    if isinstance(columns, dict):
        return {name: each[ids] for name, each in columns.items()}
    return [each[ids] for each in columns]


def _failure(samples: Samples, sample: int, piece: SampleSlice, error: Exception) -> ReadFailure:
    """Return the sentence for an error in your data set or collate function, with its traceback."""
    if isinstance(error, PacelineError):
        return ReadFailure(str(error).removesuffix("."))
    said = f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(".")
    if sample >= 0:
        return ReadFailure(f"reading {samples.path(sample)} failed: {said}", traceback.format_exc())
    ids = ", ".join(map(str, piece.ids[:4])) + ", …" * (len(piece.ids) > 4)
    hint = ""
    if "equal size" in str(error):
        hint = "; your samples differ in shape: give collate=, a function from a list of samples to a batch"
    return ReadFailure(f"making a batch of {samples.role} samples {ids} failed: {said}{hint}", traceback.format_exc())
