"""Variation by torchvision is keyed by (seed, epoch, sample), leaves no trace, and is torchvision's own."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from timm.data import auto_augment

from paceline.data.image.transforms import Variation, has_variation
from paceline.data.random_draws import derive_seed
from paceline.recipe.data import Augment, Jitter

v2 = pytest.importorskip("torchvision.transforms.v2")

MEAN, FILL = (0.2, 0.4, 0.6), [51, 102, 153]
BILINEAR = v2.InterpolationMode.BILINEAR
ASKED: dict[str, tuple[Augment, Any]] = {
    "randaugment": (
        Augment(policy="randaugment", operations=3, magnitude=14),
        v2.RandAugment(3, 14, interpolation=BILINEAR, fill=FILL),
    ),
    "trivialaugment": (Augment(policy="trivialaugment"), v2.TrivialAugmentWide(interpolation=BILINEAR, fill=FILL)),
    "autoaugment": (
        Augment(policy="autoaugment", policy_dataset="cifar10"),
        v2.AutoAugment(v2.AutoAugmentPolicy.CIFAR10, interpolation=BILINEAR, fill=FILL),
    ),
    "augmix": (Augment(policy="augmix", severity=5), v2.AugMix(5, interpolation=BILINEAR, fill=FILL)),
    "jitter": (
        Augment(jitter=Jitter(brightness=0.4, contrast=0.3, saturation=0.2, hue=0.1, probability=0.8)),
        v2.RandomApply([v2.ColorJitter(0.4, 0.3, 0.2, 0.1)], 0.8),
    ),
    "grayscale": (Augment(grayscale=0.5), v2.RandomGrayscale(0.5)),
    "blur": (Augment(blur=0.5), v2.RandomApply([v2.GaussianBlur(9, (0.1, 2.0))], 0.5)),
    "vertical flip": (Augment(vertical_flip=0.5), v2.RandomVerticalFlip(0.5)),
    "erase": (
        Augment(erase=0.6, erase_scale=(0.1, 0.2), erase_ratio=(0.5, 2.0)),
        v2.RandomErasing(0.6, (0.1, 0.2), (0.5, 2.0), FILL),
    ),
}
TIMMS: dict[str, tuple[Augment, Any]] = {
    config: (
        Augment(policy="timm", policy_options={"config": config}),
        partial(make, config, {"img_mean": tuple(FILL)}),
    )
    for config, make in {
        "rand-m9-mstd0.5-inc1-p0.3": auto_augment.rand_augment_transform,
        "original-mstd0.5": auto_augment.auto_augment_transform,
        "3a": auto_augment.auto_augment_transform,
    }.items()
}
# What is erased by timm, and whether so many colors of so many pixels are what was asked for.
ERASED: dict[str, tuple[Augment, Any]] = {
    "noise": (Augment(erase=0.7, erase_with="noise"), lambda colors, pixels: colors > 0.9 * pixels),
    "color": (Augment(erase=0.7, erase_with="color"), lambda colors, _: colors == 1),
    "colors": (Augment(erase=0.7, erase_with="color", erase_count=3), lambda colors, _: 1 <= colors <= 3),
    "means": (Augment(erase=0.7, erase_count=3), lambda colors, _: colors == 1),
}
IDS = np.arange(40, dtype=np.int64)


def pictures(count: int = 40, channels: int = 3) -> torch.Tensor:
    coarse = torch.rand(count, channels, 5, 5, generator=torch.Generator().manual_seed(0))
    return (torch.nn.functional.interpolate(coarse, size=(32, 32), mode="bicubic").clamp(0, 1) * 255).to(torch.uint8)


@pytest.mark.parametrize("name", ASKED)
def test_it_is_torchvisions_own(name: str) -> None:
    augment, theirs = ASKED[name]
    found = Variation(augment, MEAN, seed=3)(pictures(), IDS, epoch=2)
    changed = 0
    for sample, (image, plain) in enumerate(zip(found, pictures(), strict=True)):
        torch.manual_seed(derive_seed(3, 0x56415259, 2, sample))
        assert torch.equal(image, theirs(plain))
        changed += not torch.equal(image, plain)
    assert changed >= 10


@pytest.mark.parametrize("name", TIMMS)
def test_it_is_timms_own(name: str) -> None:
    augment, make = TIMMS[name]
    vary = make()
    found = Variation(augment, MEAN, seed=3)(pictures(), IDS, epoch=2)
    for sample, (image, plain) in enumerate(zip(found, pictures(), strict=True)):
        seed = derive_seed(3, 0x56415259, 2, sample)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002  # which timm draws from
        assert torch.equal(image, v2.functional.pil_to_tensor(vary(v2.functional.to_pil_image(plain))))
    assert (found != pictures()).flatten(1).any(dim=1).sum() >= 10


@pytest.mark.parametrize("name", [*ASKED, *TIMMS, *ERASED])
def test_draws_depend_on_seed_epoch_and_sample_alone(name: str) -> None:
    augment = (ASKED | TIMMS | ERASED)[name][0]
    variation = Variation(augment, MEAN, seed=3)
    together = variation(pictures(), IDS, 1)
    torch.manual_seed(11)
    some = np.array([17, 4, 30], dtype=np.int64)
    assert torch.equal(variation(pictures()[some], some, 1), together[some])
    assert not torch.equal(variation(pictures(), IDS, 2), together)
    assert not torch.equal(Variation(augment, MEAN, seed=4)(pictures(), IDS, 1), together)


@pytest.mark.parametrize("name", ["randaugment", "rand-m9-mstd0.5-inc1-p0.3", "noise"])
def test_it_leaves_all_generators_where_they_were(name: str) -> None:
    def drawn() -> Any:
        return torch.rand(3).tolist(), random.random(), np.random.rand()  # noqa: NPY002  # the global one is meant

    def seed() -> None:
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)  # noqa: NPY002  # the global generator of user code

    seed()
    expected = drawn()
    seed()
    Variation((ASKED | TIMMS | ERASED)[name][0], MEAN, seed=3)(pictures(), IDS, 0)
    assert drawn() == expected


def test_grey_images_are_varied_too() -> None:
    for augment, _ in (ASKED | TIMMS | ERASED).values():
        assert Variation(augment, (0.5,), seed=0)(pictures(channels=1), IDS, 0).shape == (40, 1, 32, 32)


def test_nothing_is_done_unless_asked() -> None:
    images = pictures()
    assert Variation(Augment(), MEAN, seed=0)(images, IDS, 0) is images
    assert not has_variation(Augment(flip=0.5, crop="pad"))
    assert all(has_variation(augment) for augment, _ in ASKED.values())


def test_rectangles_are_erased_to_the_mean_as_often_as_asked() -> None:
    ids = np.arange(2000, dtype=np.int64)
    images = torch.full((2000, 3, 16, 16), 255, dtype=torch.uint8)
    erased = Variation(Augment(erase=0.3), MEAN, seed=0)(images, ids, 0)
    hit = (erased != 255).any(dim=1)
    assert stats.binomtest(int(hit.flatten(1).any(dim=1).sum()), 2000, 0.3).pvalue > 1e-6
    assert {tuple(pixel) for pixel in erased.permute(0, 2, 3, 1)[hit].tolist()} == {tuple(FILL)}
    share = hit.flatten(1).float().mean(dim=1)
    assert share[share > 0].min() > 0.005
    assert share.max() < 0.4


@pytest.mark.parametrize("name", ERASED)
def test_rectangles_become_what_is_asked(name: str) -> None:
    augment, kinds = ERASED[name]
    images = torch.full((40, 3, 64, 64), 7, dtype=torch.uint8)
    varied = Variation(augment, MEAN, seed=0)(images, IDS, 0)
    hit = (varied != 7).any(dim=1)
    assert int(hit.flatten(1).any(dim=1).sum()) > 10
    for image, where in zip(varied, hit, strict=True):
        colors = {tuple(pixel) for pixel in image.permute(1, 2, 0)[where].tolist()}
        assert not colors or kinds(len(colors), int(where.sum()))


def test_operations_are_equally_likely() -> None:
    """One operation of RandAugment on a flat image: those that move nothing leave it flat."""
    ids = np.arange(3000, dtype=np.int64)
    images = torch.zeros(3000, 3, 8, 8, dtype=torch.uint8)
    images[:, :, :4] = 90
    varied = Variation(Augment(policy="randaugment", operations=1, magnitude=15), MEAN, seed=0)(images.clone(), ids, 0)
    kinds = {image.numpy().tobytes() for image in varied}
    assert 8 <= len(kinds) <= 28  # fourteen operations, most of them with two signs
    untouched = sum(torch.equal(one, other) for one, other in zip(varied, images, strict=True))
    assert stats.binomtest(untouched, 3000, untouched / 3000).pvalue == 1
    assert 3000 / 14 * 0.7 < untouched < 3000 * 5 / 14
