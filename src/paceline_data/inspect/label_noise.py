"""Estimate which labels are wrong, from predictions of networks that were not trained on these samples.

The model: a label is right with probability 1 - rate, and otherwise any other class (symmetric noise, whose matrix
corrects the predictions forward: Patrini et al., "Making Deep Neural Networks Robust to Label Noise", CVPR 2017). A
temperature calibrates the predictions (Guo et al., "On Calibration of Modern Neural Networks", ICML 2017). Both are
fitted by maximum likelihood, as if a few more labels were known to be right: to predictions by chance, many wrong
labels would be as likely as flat predictions. Where all samples are equally easy, flat predictions explain wrong labels
as well as a rate does; so the sharpest predictions in the interval of 95 % are taken. Bayes' rule then gives the
probability that a label is wrong, and how many of the wrong ones that finds. As in Northcutt et al., "Confident
Learning" (JAIR 2021), no network may have learned a label that it judges.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
Labels = NDArray[np.int64]

LEAST_PROBABILITY = 0.8  # of a label that is called wrong: the fit prefers sharp predictions
_MOST_FITTED = 20_000  # evenly spread
_SHARPNESS = np.exp(np.linspace(-3, 3, 49))  # 1 / temperature
_INTERVAL = 1.92  # drop of the log-likelihood: half of chi-squared's 95 % quantile for one parameter
_KNOWN = 12  # labels that count as right without being seen
_LEAST_RATE = 0.01  # at least, for its share to be said
_RATES = np.concatenate([[0.0, 0.001, 0.002, 0.005], np.arange(1, 61) / 100])


@dataclass(frozen=True)
class LabelNoise:
    """What is known of some labels.

    Attributes:
        rate: Estimated share of wrong labels.
        wrong: Probability that each label is wrong, [samples].
        likely: The most probable other class of each sample, [samples].
        probability: Calibrated probability of that class, [samples].
        findable: Share of the labels that would be called wrong if they were, as the model expects.
    """

    rate: float
    wrong: Numbers
    likely: Labels
    probability: Numbers
    findable: float


def estimate_noise(scores: NDArray[np.float32], labels: Labels) -> LabelNoise:
    """Estimate the share of wrong labels, and each label's probability of being wrong.

    Args:
        scores: Logits of networks that were not trained on these samples, [samples, classes], at least two classes.
        labels: The given labels, [samples].
    """
    count, classes = scores.shape
    rows = np.arange(count)
    fitted = np.unique(np.linspace(0, count - 1, min(count, _MOST_FITTED)).round().astype(np.int64))
    likelihoods = [
        _likelihoods(_probabilities(scores[fitted], sharpness)[np.arange(len(fitted)), labels[fitted]], classes)
        for sharpness in _SHARPNESS
    ]
    best = np.max(likelihoods, axis=1)  # at each sharpness
    at = int(np.flatnonzero(best >= best.max() - _INTERVAL).max())
    rate = float(_RATES[np.argmax(likelihoods[at])])
    probabilities = _probabilities(scores, _SHARPNESS[at])
    moved = (1 - probabilities) / (classes - 1)  # probability of each class as the wrong label
    is_called_wrong = _wrong(probabilities, max(rate, _LEAST_RATE)) >= LEAST_PROBABILITY
    others = probabilities.copy()
    others[rows, labels] = -1
    likely = others.argmax(axis=1)
    return LabelNoise(
        rate=rate,
        wrong=_wrong(probabilities, rate)[rows, labels],
        likely=likely,
        probability=probabilities[rows, likely],
        findable=float((moved * is_called_wrong).sum(axis=1).mean()),
    )


def _wrong(probabilities: Numbers, rate: float) -> Numbers:
    """Return the probability that each class is wrong if it is the label, [samples, classes]."""
    as_wrong = rate * (1 - probabilities) / (probabilities.shape[1] - 1)
    return np.asarray(as_wrong / np.maximum(as_wrong + (1 - rate) * probabilities, 1e-300))


def _probabilities(scores: NDArray[np.float32], sharpness: float) -> Numbers:
    sharpened = sharpness * scores.astype(np.float64)
    powers = np.exp(sharpened - sharpened.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True))


def _likelihoods(given: Numbers, classes: int) -> Numbers:
    """Return the log-likelihood of the given labels at each rate of wrong ones, [rates]."""
    likelihood = (1 - _RATES) * given[:, None] + _RATES * (1 - given[:, None]) / (classes - 1)
    return np.asarray(np.log(np.maximum(likelihood, 1e-300)).sum(axis=0) + _KNOWN * np.log(1 - _RATES))


def folds_of(groups: Labels, labels: Labels, folds: int, uniform: Numbers) -> Labels:
    """Return each sample's fold, int64 [samples]: of each class as many in each, and all copies of a sample in one.

    Args:
        groups: The first sample that each is a copy of, possibly itself, [samples].
        labels: Classes, [samples].
        folds: Number of folds.
        uniform: A random number of each sample, which depends on its id and the seed alone, [samples].
    """
    firsts = np.flatnonzero(groups == np.arange(len(groups)))
    order = firsts[np.lexsort((uniform[firsts], labels[firsts]))]
    fold = np.zeros(len(groups), dtype=np.int64)
    fold[order] = np.arange(len(order)) % folds
    return fold[groups]
