"""Classes of unequal size: how often samples of each class are drawn, and their weight in the loss."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from paceline.data.random_draws import derive_seed
from paceline.data.slices import SampleIds
from paceline.errors import RecipeError, did_you_mean
from paceline.parsing.plain_text import one_form, quoted

SampleClasses = NDArray[np.int64]
"""The class of each training sample, [samples]."""
_NAMED = 6
_PURPOSE = 0x64726177  # "draw": a separate stream from the permutation's
_BALANCED_ORDER = 0x7475726E  # "turn"


@dataclass(frozen=True, eq=False, kw_only=True)
class ClassDraws:
    """Sampling with replacement by class, or by data set in a mixture.

    Attributes:
        classes: The class of each sample, or its data set in a mixture, int64 [samples].
        weights: Relative sampling frequency of a sample of each class.
        counts: Samples of each data set per epoch; empty for sampling by class.
    """

    classes: SampleClasses
    weights: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()

    @property
    def sha256(self) -> str:
        """Digest of the samples' classes."""
        return hashlib.sha256(self.classes.astype("<i8").tobytes()).hexdigest()


@lru_cache(maxsize=2)
def sampled_order(seed: int, epoch: int, draws: ClassDraws, repeats: int = 1) -> SampleIds:
    """Draw as many samples as there are, with replacement; return the draws' keys, int64 [samples], read-only.

    The key of a draw is ``id + samples * (earlier draws of the id in this epoch)``: no two draws of an epoch have the
    same key.

    Args:
        seed: The run's seed.
        epoch: The epoch.
        draws: The samples' classes (each sample once), and the weights.
        repeats: How often each draw is repeated in a row, with the ids of the same image (see ``epoch_order``).
    """
    different = len(draws.classes)
    positions = _sample_mixture(seed, epoch, draws) if draws.counts else _sample_by_class(seed, epoch, draws)
    sorted_places = np.argsort(positions, kind="stable")
    ids = positions[sorted_places]
    earlier = np.empty_like(positions)
    earlier[sorted_places] = np.arange(different) - np.searchsorted(ids, ids)
    first = positions + different * repeats * earlier
    keys: SampleIds = (first[:, None] + different * np.arange(repeats)).reshape(-1)
    keys.flags.writeable = False
    return keys


def _sample_by_class(seed: int, epoch: int, draws: ClassDraws) -> SampleIds:
    """Draw samples by class weight, in random order.

    Every class has its share of the epoch and every sample its share of the draws, exact to within one: a random start
    decides about fractional shares (systematic sampling).
    """
    different = len(draws.classes)
    random_words = np.random.Philox(key=[derive_seed(seed, _PURPOSE), epoch]).random_raw(2 * different + 1)
    by_class = np.lexsort((random_words[:different], draws.classes))
    ends = np.cumsum(np.array(draws.weights)[draws.classes[by_class]])
    start = float(random_words[-1] >> np.uint64(11)) * 2.0**-53
    marks = (np.arange(different) + start) * (ends[-1] / different)
    samples = by_class[np.minimum(np.searchsorted(ends, marks, side="right"), different - 1)]
    shuffled: SampleIds = samples[np.argsort(random_words[different : 2 * different], kind="stable")]
    return shuffled


def _sample_mixture(seed: int, epoch: int, draws: ClassDraws) -> SampleIds:
    """Draw an epoch's share of each data set, with the sets evenly interleaved.

    Each set is traversed in a sequence of fresh permutations that continues across epochs: no sample repeats before all
    of its set have been used. The j-th of n draws of a set is placed at (j + 1/2) / n of the epoch.
    """
    samples, positions = [], []
    for number, count in enumerate(draws.counts):
        members = np.flatnonzero(draws.classes == number)
        used, size = epoch * count, len(members)
        passes = range(used // size, -(-(used + count) // size))
        seed_of_set = derive_seed(seed, _BALANCED_ORDER, number)
        words = (np.random.Philox(key=[seed_of_set, each]).random_raw(size) for each in passes)
        sequence = np.concatenate([members[np.argsort(each, kind="stable")] for each in words])
        samples.append(sequence[used % size :][:count])
        positions.append((np.arange(count) + 0.5) / count)
    mixed: SampleIds = np.concatenate(samples)[np.argsort(np.concatenate(positions), kind="stable")]
    return mixed


def counts_by_ratio(ratios: Mapping[str, float], sets: SampleClasses) -> tuple[int, ...]:
    """Return the samples of each data set per epoch, by largest remainders; the total equals the number of samples.

    Args:
        ratios: Ratio of each set, by name.
        sets: Index of each training sample's set.

    Raises:
        RecipeError: If a set has no training samples, or no share of an epoch.
    """
    sizes, total = np.bincount(sets, minlength=len(ratios)), sum(map(Fraction, ratios.values()))
    exact = [Fraction(ratio) * len(sets) / total for ratio in ratios.values()]
    counts = [math.floor(each) for each in exact]
    by_remainder = sorted(range(len(exact)), key=lambda each: counts[each] - exact[each])
    for each in by_remainder[: len(sets) - sum(counts)]:
        counts[each] += 1
    for (name, ratio), size, count in zip(ratios.items(), sizes.tolist(), counts, strict=True):
        if size == 0:
            raise RecipeError(f"data.mixture names {name!r}, which has no training images left; leave it out.")
        if count == 0:
            raise RecipeError(
                f"data.mixture gives {name!r} the ratio {ratio:g}, which is less than one of the {len(sets):,} samples "
                "of an epoch; give it more, or leave it out."
            )
    return tuple(counts)


def weights_by_class(
    key: str, requested: str | Mapping[str, float], labels: SampleClasses, names: Sequence[str]
) -> tuple[float, ...]:
    """Return the weight of each class.

    ``balanced`` is n / (classes * n_c), as in scikit-learn: each class then has the same total weight. Classes without
    samples, or not named in a mapping, have weight 1.

    Args:
        key: The recipe key, for the message.
        requested: ``balanced``, or weights by class name.
        labels: The class of each training sample.
        names: The classes' names.

    Raises:
        RecipeError: If the mapping names an unknown class.
    """
    if isinstance(requested, str):
        counts = np.bincount(labels, minlength=len(names))
        even = len(labels) / np.count_nonzero(counts)
        return tuple(np.where(counts > 0, even / np.maximum(counts, 1), 1.0).tolist())
    spelled = one_form(requested, names)
    first: dict[str, str] = {}
    for name in requested:
        if (other := first.setdefault(spelled[name], name)) != name:
            both = f"{quoted(other)} and {quoted(name)}"
            raise RecipeError(f"{key} names {both}, one class in two Unicode forms: keep one.")
        if spelled[name] not in names:
            names_text = ", ".join(names[:_NAMED]) + (", …" if len(names) > _NAMED else "")
            hint = did_you_mean(name, names)
            raise RecipeError(f"{key} names {name!r}, but the data has the {len(names)} classes {names_text}.{hint}")
    weights = {spelled[name]: weight for name, weight in requested.items()}
    return tuple(float(weights.get(name, 1.0)) for name in names)


def describe_weights(weights: Sequence[float], labels: SampleClasses, names: Sequence[str]) -> str:
    """Describe the smallest and the largest weight of the classes that have samples."""
    counts = np.bincount(labels, minlength=len(names))
    nonempty = np.flatnonzero(counts).tolist()
    ends = (choose(nonempty, key=lambda each: weights[each]) for choose in (min, max))
    return " to ".join(f"{weights[each]:.3g} for {names[each]!r} ({counts[each]:,} samples)" for each in ends)
