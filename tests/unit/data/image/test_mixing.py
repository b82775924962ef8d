"""Mixing is a function of (seed, step), gives what torchvision gives, and a loss that is the mixture of two."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats

from paceline.data.batch import Batch
from paceline.data.image.transforms import Mixing, Mixture
from paceline.data.slices import SampleSlice
from paceline.recipe.data import Mix

v2 = pytest.importorskip("torchvision.transforms.v2")

CLASSES = 5


def batch(step: int = 0, epoch: int = 0, count: int = 6, logical_rank: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(0)
    ids = np.arange(count, dtype=np.int64)
    piece = SampleSlice(step=step, epoch=epoch, logical_rank=logical_rank, ids=ids, step_weight=count)
    images = torch.randn(count, 3, 20, 30, generator=generator)
    return Batch(images, torch.arange(count) % CLASSES, ids, piece)


def drawn(mixing: Mixing, step: int) -> Mixture:
    mixture = mixing.draw(step, 20, 30)
    assert mixture is not None
    return mixture


@pytest.mark.parametrize("mix", [Mix(mixup=0.4), Mix(cutmix=1.0)], ids=["mixup", "cutmix"])
def test_it_is_what_torchvision_does(mix: Mix) -> None:
    mixing = Mixing(mix, CLASSES, seed=1)
    for step in range(20):
        mixture, plain = drawn(mixing, step), batch(step)
        found = mixing(batch(step))
        if mixture.box is None:
            theirs: Any = v2.MixUp(num_classes=CLASSES)
            params: dict[str, Any] = {"lam": mixture.share}
        else:
            theirs = v2.CutMix(num_classes=CLASSES)
            top, bottom, left, right = mixture.box
            params = {"box": (left, top, right, bottom), "lam_adjusted": mixture.share}
        params |= {"labels": plain.targets, "batch_size": 6}
        torch.testing.assert_close(found.inputs, theirs.transform(plain.inputs, params))
        torch.testing.assert_close(found.targets, theirs.transform(plain.targets, params))


def test_a_cut_has_the_area_that_was_drawn() -> None:
    mixing = Mixing(Mix(cutmix=1.0), CLASSES, seed=2)
    shares = []
    for step in range(2000):
        mixture = drawn(mixing, step)
        assert mixture.box is not None
        top, bottom, left, right = mixture.box
        assert 0 <= top <= bottom <= 20
        assert 0 <= left <= right <= 30
        assert mixture.share == pytest.approx(1 - (bottom - top) * (right - left) / 600)
        shares.append(mixture.share)
    # Clipped at the edges, parts are smaller than the uniform law that alpha 1 is.
    assert 0.5 < np.mean(shares) < 0.75


@pytest.mark.parametrize("alpha", [0.2, 1.0, 3.0])
def test_weights_are_beta_distributed(alpha: float) -> None:
    mixing = Mixing(Mix(mixup=alpha), CLASSES, seed=3)
    shares = [drawn(mixing, step).share for step in range(3000)]
    assert stats.kstest(shares, stats.beta(alpha, alpha).cdf).pvalue > 1e-4


def test_the_kinds_and_the_steps_are_as_often_as_asked() -> None:
    mixing = Mixing(Mix(mixup=1.0, cutmix=1.0, switch=0.3, probability=0.6), CLASSES, seed=4)
    found = [mixing.draw(step, 20, 30) for step in range(4000)]
    mixed = [each for each in found if each is not None]
    assert stats.binomtest(len(mixed), 4000, 0.6).pvalue > 1e-6
    assert stats.binomtest(sum(each.box is not None for each in mixed), len(mixed), 0.3).pvalue > 1e-6


def test_all_micro_batches_of_a_step_are_mixed_alike_and_steps_are_not() -> None:
    mixing = Mixing(Mix(mixup=1.0), CLASSES, seed=5)
    one, other = mixing(batch(7, logical_rank=0)), mixing(batch(7, logical_rank=3))
    assert torch.equal(one.inputs, other.inputs)
    assert not torch.equal(one.inputs, mixing(batch(8)).inputs)
    assert not torch.equal(one.inputs, Mixing(Mix(mixup=1.0), CLASSES, seed=6)(batch(7)).inputs)


def test_it_ends_after_its_epochs() -> None:
    mixing = Mixing(Mix(mixup=1.0, epochs=2), CLASSES, seed=0)
    assert mixing(batch(epoch=1)).targets.is_floating_point()
    assert mixing(batch(epoch=2)).targets.dtype == torch.int64


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_of_a_mixture_is_the_mixture_of_losses(smoothing: float) -> None:
    mixing = Mixing(Mix(mixup=0.8, cutmix=0.8), CLASSES, seed=7)
    for step in range(8):
        share, targets = drawn(mixing, step).share, batch().targets
        logits = torch.randn(6, CLASSES, dtype=torch.float64)
        of_mixture = F.cross_entropy(logits, mixing(batch(step)).targets.double(), label_smoothing=smoothing)
        apart = [F.cross_entropy(logits, each, label_smoothing=smoothing) for each in (targets, targets.roll(1))]
        assert of_mixture.item() == pytest.approx((share * apart[0] + (1 - share) * apart[1]).item(), rel=1e-6)


def test_a_batch_of_one_stays_as_it_is() -> None:
    mixed = Mixing(Mix(mixup=1.0), CLASSES, seed=0)(batch(count=1))
    torch.testing.assert_close(mixed.inputs, batch(count=1).inputs)
    torch.testing.assert_close(mixed.targets, torch.eye(CLASSES)[:1])


def test_the_batch_it_was_given_is_not_written_to() -> None:
    for mix in (Mix(mixup=1.0), Mix(cutmix=1.0)):
        given = batch()
        Mixing(mix, CLASSES, seed=0)(given)
        assert torch.equal(given.inputs, batch().inputs)
        assert torch.equal(given.targets, batch().targets)


def test_repeats_of_an_image_are_no_partners_for_one_another() -> None:
    """As the order has them: three views of each image side by side."""
    classes = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2])
    given = replace(batch(count=9), targets=classes)
    mixed = Mixing(Mix(mixup=1.0), CLASSES, seed=0, repeats=3)(given)
    share = drawn(Mixing(Mix(mixup=1.0), CLASSES, seed=0), 0).share
    expected = share * torch.eye(CLASSES)[classes] + (1 - share) * torch.eye(CLASSES)[classes.roll(3)]
    torch.testing.assert_close(mixed.targets, expected)
    torch.testing.assert_close(mixed.inputs, share * given.inputs + (1 - share) * given.inputs.roll(3, 0))
