"""Convert images of any size to the model's input: crops, flips, resizing, torchvision's operations, mixup and CutMix.

Flips, shifts and crops are drawn by (seed, epoch, sample). Every back-end uses these draws, so a sample is augmented
the same way in any batch, worker or rank. The columns of a sample's row of uniform numbers are fixed:

    0        flip
    1, 2     vertical and horizontal shift
    3        unused
    4 … 43   ten attempts at a random resized crop: area, aspect ratio, top, left

Resizing is bilinear or bicubic with antialiasing on uint8, by torch: within one grey level of Pillow's, at a fifth of
its time. Training and evaluation differ only in the region of the image that they keep.

torchvision draws from torch's global generator. It is seeded by (seed, epoch, sample) before each image, so that the
draws depend on nothing else, and restored afterwards, so that nothing else depends on them. Mixup and CutMix draw their
weight and box by (seed, step) alone, the same for all micro-batches of a step. A sample's partner is the previous one
in its micro-batch, skipping its repeats.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import interpolate

from paceline.data.batch import Batch
from paceline.data.image.decode import Box
from paceline.data.image.source import BrokenImageError, Image, SampleSource
from paceline.data.random_draws import derive_seed, uniforms
from paceline.data.slices import SampleIds
from paceline.errors import DataError, PacelineError, RecipeError
from paceline.plugins.registry import load
from paceline.recipe.data import Augment, Mix, Progressive

Shape = tuple[int, int]
"""Height and width, in pixels."""

_LARGEST_GROWN = 2**24  # pixels; a picture of 224 pixels may be up to 256 times as long as wide
_FILTER_PIXELS = 3  # on each side of an enlarged region; a bicubic filter has radius 2
_MOST_KEPT = 4  # relative to the memory of the result


@dataclass(frozen=True, kw_only=True)
class View:
    """Preprocessing of one split's images.

    Attributes:
        image_size: Height and width of the model's input, in pixels.
        channels: 1 or 3.
        evaluation_crop: Centre crop size as a share of the resized side, in (0, 1].
        augment: Training augmentation; None for evaluation.
        seed: The run's seed, which keys the augmentation.
        mean: Mean of each channel, in [0, 1]: the fill value outside an image.
        interpolation: Resizing filter, ``bilinear`` or ``bicubic``.
        progressive: Progressive resizing over epochs.
    """

    image_size: int
    channels: int
    evaluation_crop: float = 0.875
    augment: Augment | None = None
    seed: int = 0
    mean: tuple[float, ...] = (0.5,)
    interpolation: str = "bilinear"
    progressive: Progressive = field(default_factory=Progressive)

    def size_at(self, epoch: int) -> int:
        """Return the height and width of an epoch's images."""
        grows = self.progressive.start_size is not None
        return self.progressive.size_at(epoch, self.image_size) if grows else self.image_size

    def read_size_at(self, epoch: int) -> int:
        """Return the height and width at which an epoch's images are read, at least ``size_at``.

        A random crop is resized once, to the model's input. Other images are read at full size, shifted and flipped,
        and then downscaled, by every back-end: so a shift of 2 pixels is the same share of an image in all epochs.
        """
        cropped = self.augment is not None and self.augment.crop == "random_resized"
        return self.size_at(epoch) if cropped else self.image_size

    def __post_init__(self) -> None:
        augment = self.augment
        if augment is None or augment.crop != "pad" or augment.padding_mode != "reflect":
            return
        if augment.padding >= self.image_size:
            raise RecipeError(
                f"data.augment.padding is {augment.padding}, but an image of {self.image_size} pixels can be "
                f"mirrored at its edge by at most {self.image_size - 1}: lower the padding, or use "
                "data.augment.padding_mode=zero."
            )


def evaluation_image(
    image: Image, size: int | Shape, evaluation_crop: float, interpolation: str = "bilinear", *, always: bool = False
) -> torch.Tensor:
    """Resize until the image just covers ``size / evaluation_crop``, and crop the centre; uint8 [C, height, width].

    An image that already has this size is unchanged, unless ``always`` is set. Training without a random resized crop
    starts from the same picture. If the resized image would be too large, only the region around the crop is resized.

    Args:
        image: uint8 [H, W, C].
        size: Side of a square, or height and width, of the result in pixels.
        evaluation_crop: Centre crop size as a share of the resized side, in (0, 1].
        interpolation: ``bilinear`` or ``bicubic``.
        always: Whether to resize and crop an image that already has this size.
    """
    shape = (size, size) if isinstance(size, int) else size
    height, width = image.shape[:2]
    if (height, width) == shape and not (always and evaluation_crop < 1):
        return _channels_first(np.array(image))
    scaled, corner = evaluation_geometry((height, width), shape, evaluation_crop, always=always)
    if is_too_large((height, width), scaled):
        image, scaled, corner = _around_crop(image, scaled, corner, shape)
    resized = _resize(image, *scaled, interpolation)
    top, left = corner
    kept = resized[:, top : top + shape[0], left : left + shape[1]]
    # A view of a small region would keep the whole picture in memory until its batch is complete.
    is_small = _MOST_KEPT * shape[0] * shape[1] < scaled[0] * scaled[1]
    return kept.permute(1, 2, 0).contiguous().permute(2, 0, 1) if is_small else kept


def is_too_large(size: Shape, scaled: Shape) -> bool:
    """Whether resizing the whole image would take much more memory than the image: for extreme aspect ratios."""
    return scaled[0] * scaled[1] > max(_LARGEST_GROWN, size[0] * size[1])


def _around_crop(image: Image, scaled: Shape, corner: Shape, shape: Shape) -> tuple[Image, Shape, Shape]:
    """Cut an image before enlarging to its crop plus the pixels that the filter needs around it.

    Returns:
        The region, its resized size, and the crop's offset in it. Edges move by at most half a pixel.
    """
    parts, sizes, corners = [], [], []
    for own, resized, begin, kept in zip(image.shape[:2], scaled, corner, shape, strict=True):
        first = max(0, begin * own // resized - _FILTER_PIXELS)
        last = min(own, -(-(begin + kept) * own // resized) + _FILTER_PIXELS)
        parts.append(slice(first, last))
        sizes.append(round((last - first) * resized / own))
        corners.append(round(begin - first * resized / own))
    return image[parts[0], parts[1]], (sizes[0], sizes[1]), (corners[0], corners[1])


def evaluation_geometry(
    size: Shape, shape: Shape, evaluation_crop: float, *, always: bool = False
) -> tuple[Shape, tuple[int, int]]:
    """Return the resized size of an evaluation image, and the offset of its centre crop (top, left).

    Args:
        size: Height and width of the image.
        shape: Height and width of the result.
        evaluation_crop: Centre crop size as a share of the resized side, in (0, 1].
        always: Whether to resize and crop an image that already has this size.
    """
    if size == shape and not always:
        return size, (0, 0)
    height, width = size
    covered = (round(shape[0] / evaluation_crop), round(shape[1] / evaluation_crop))
    scaled = (max(covered[0], covered[1] * height // width), max(covered[1], covered[0] * width // height))
    top, left = (round((have - wanted) / 2) for have, wanted in zip(scaled, shape, strict=True))
    return scaled, (top, left)


def resized_part(part: Image, image_size: int, interpolation: str = "bilinear") -> torch.Tensor:
    """Resize a region of an image, uint8 [H, W, C], to the model's square input; uint8 [C, S, S]."""
    return _resize(part, image_size, image_size, interpolation)


def _channels_first(image: Image) -> torch.Tensor:
    return _usable(image).permute(2, 0, 1)


def _usable(image: Image) -> torch.Tensor:
    # Pillow's arrays are read-only and torch accepts only writable memory, so copy the used region.
    return torch.from_numpy(image if image.flags.writeable and image.flags.c_contiguous else np.array(image))


def _resize(image: Image, height: int, width: int, interpolation: str) -> torch.Tensor:
    if image.shape[:2] == (height, width):
        return _channels_first(image)
    # As a batch of one with channels-last strides; otherwise torch assumes separate channels and moves every pixel
    # twice.
    pixels = _usable(image)[None].permute(0, 3, 1, 2)
    return interpolate(pixels, size=(height, width), mode=interpolation, antialias=True)[0]


# Separates these draws from others keyed by the same kind of numbers.
_PURPOSE = 0x5641_5259
_TORCHVISION_POLICIES = ("none", "randaugment", "trivialaugment", "autoaugment", "augmix")
# In steps of 255, averaged over channels.
_IMAGENET_STD = 57.6


class Variation:
    """Augments uint8 images [C, H, W] one by one, in the order of torchvision's reference recipes.

    Uncovered and erased areas are filled with the data's mean, which is zero after normalisation (to within half a grey
    level).
    """

    def __init__(self, augment: Augment, mean: Sequence[float], seed: int) -> None:
        """Prepare the recipe's transforms.

        Args:
            augment: The recipe's `data.augment` section.
            mean: Mean of each channel, in [0, 1].
            seed: The run's seed.
        """
        self._seed = seed
        self._transforms = _transforms(augment, [round(255 * each) for each in mean])
        # timm's operations and custom code use other generators than torch's.
        self._draws_elsewhere = bool(self._transforms) and (
            augment.policy not in _TORCHVISION_POLICIES or _is_erased_by_timm(augment)
        )

    def __call__(self, images: Tensor, ids: SampleIds, epoch: int) -> Tensor:
        """Augment a batch, uint8 [N, C, H, W], in place; row *n* is sample ``ids[n]``."""
        if not self._transforms:
            return images
        with restore_generators():
            for row, sample in enumerate(ids.tolist()):
                seed = derive_seed(self._seed, _PURPOSE, epoch, sample)
                torch.default_generator.manual_seed(seed)
                if self._draws_elsewhere:
                    random.seed(seed)
                    np.random.seed(seed % 2**32)  # noqa: NPY002  # user code draws from the global generator
                image = images[row]
                for transform in self._transforms:
                    image = transform(image)
                images[row] = image
        return images


@contextmanager
def restore_generators() -> Iterator[None]:
    """Restore the states of torch's, Python's and NumPy's global generators on exit."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002  # user code draws from the global generator
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])  # noqa: NPY002  # the global generator of user code


def has_variation(augment: Augment) -> bool:
    """Whether a recipe uses any of these augmentations."""
    return bool(variations(augment))


def variations(augment: Augment) -> list[str]:
    """Return the keys of `data.augment` that enable any of these, in order of application."""
    return [name for name, (is_asked, _) in _operations(augment, []).items() if is_asked]


def _operations(augment: Augment, fill: list[int]) -> dict[str, tuple[bool, Callable[[Any], Any]]]:
    """Return whether each operation is enabled, and its constructor from torchvision, in order."""
    jitter = augment.jitter
    colours = (jitter.brightness, jitter.contrast, jitter.saturation, jitter.hue)
    return {
        "vertical_flip": (augment.vertical_flip > 0, lambda v2: v2.RandomVerticalFlip(augment.vertical_flip)),
        "policy": (augment.policy != "none", lambda v2: _policy(v2, augment, fill)),
        "jitter": (any(colours), lambda v2: v2.RandomApply([v2.ColorJitter(*colours)], jitter.probability)),
        "grayscale": (augment.grayscale > 0, lambda v2: v2.RandomGrayscale(augment.grayscale)),
        "blur": (
            augment.blur > 0,
            lambda v2: v2.RandomApply([v2.GaussianBlur(kernel_size=9, sigma=(0.1, 2.0))], augment.blur),
        ),
        "erase": (augment.erase > 0, lambda v2: _erasing(v2, augment, fill)),
    }


def _transforms(augment: Augment, fill: list[int]) -> list[Callable[[Tensor], Tensor]]:
    makers = [make for is_asked, make in _operations(augment, fill).values() if is_asked]
    if not makers:
        return []
    from torchvision.transforms import v2

    return [make(v2) for make in makers]


def _policy(v2: Any, augment: Augment, fill: list[int]) -> Any:
    options: dict[str, Any] = {"interpolation": v2.InterpolationMode.BILINEAR, "fill": fill}
    match augment.policy:
        case "randaugment":
            return v2.RandAugment(augment.operations, augment.magnitude, **options)
        case "trivialaugment":
            return v2.TrivialAugmentWide(**options)
        case "autoaugment":
            name = {"imagenet": "IMAGENET", "cifar10": "CIFAR10", "svhn": "SVHN"}[augment.policy_dataset]
            return v2.AutoAugment(v2.AutoAugmentPolicy[name], **options)
        case "augmix":
            return v2.AugMix(augment.severity, **options)
    return _own_policy(augment, fill)


def timm_policy(config: str, mean: Sequence[int]) -> Callable[[Tensor], Tensor]:
    """Return timm's augmentation for a configuration string, as in its train.py, with the mean as fill value."""
    from timm.data.auto_augment import augment_and_mix_transform, auto_augment_transform, rand_augment_transform
    from torchvision.transforms.v2 import functional

    if not isinstance(config, str):
        raise TypeError(f"config is {config!r}, not text")
    options: dict[str, Any] = {"img_mean": tuple(mean) * (3 // len(mean))}
    if config.startswith("rand"):
        vary = rand_augment_transform(config, options)
    elif config.startswith("augmix"):
        vary = augment_and_mix_transform(config, options | {"translate_pct": 0.3})
    else:
        vary = auto_augment_transform(config, options)

    def varied(image: Tensor) -> Tensor:
        # timm fills with a colour, which Pillow does not accept for grey images.
        found: Tensor = functional.pil_to_tensor(vary(functional.to_pil_image(image.expand(3, -1, -1))))
        return found[: len(image)]

    return varied


def _is_erased_by_timm(augment: Augment) -> bool:
    return augment.erase > 0 and (augment.erase_with, augment.erase_count) != ("mean", 1)


def _erasing(v2: Any, augment: Augment, fill: list[int]) -> Callable[[Tensor], Tensor]:
    if not _is_erased_by_timm(augment):
        erasing: Callable[[Tensor], Tensor] = v2.RandomErasing(
            augment.erase, augment.erase_scale, augment.erase_ratio, fill
        )
        return erasing
    from timm.data.random_erasing import RandomErasing

    # timm has no annotations here.
    erase: Callable[[Tensor], Tensor] = RandomErasing(  # type: ignore[no-untyped-call]
        augment.erase,
        *augment.erase_scale,
        *augment.erase_ratio,
        mode={"mean": "const", "color": "rand", "noise": "pixel"}[augment.erase_with],
        max_count=augment.erase_count,
        device="cpu",
    )
    mean = torch.tensor(fill)[:, None, None]

    def erased(image: Tensor) -> Tensor:  # timm erases normalised images
        pixels = erase((image - mean) / _IMAGENET_STD) * _IMAGENET_STD + mean
        return pixels.round().clamp(0, 255).to(torch.uint8)

    return erased


def _own_policy(augment: Augment, fill: list[int]) -> Callable[[Tensor], Tensor]:
    """Build an augmentation of the user or of another package, and test it on a black image."""
    name = f"data.augment.policy={augment.policy}"
    make = load("augmentations", augment.policy, RecipeError)
    try:
        vary = make(**augment.policy_options, **({"mean": fill} if augment.policy == "timm" else {}))
    except (AssertionError, TypeError, ValueError) as error:
        fix = "Name a factory that takes them and returns a function of an image."
        if augment.policy == "timm":
            fix = "Give what timm's --aa takes: data.augment.policy_options={config: rand-m9-mstd0.5-inc1}."
        raise RecipeError(
            f"data.augment.policy_options {augment.policy_options} do not fit {name}: {error}. {fix}"
        ) from error

    def checked(image: Tensor) -> Tensor:
        varied: Any = vary(image)
        if not isinstance(varied, Tensor) or (varied.shape, varied.dtype) != (image.shape, image.dtype):
            is_tensor = isinstance(varied, Tensor)
            description = f"{varied.dtype} {list(varied.shape)}" if is_tensor else type(varied).__name__
            raise RecipeError(
                f"{name} gave {description} for an image, torch.uint8 {list(image.shape)}: return a tensor of the same "
                "type and shape."
            )
        return varied

    try:
        with restore_generators():
            checked(torch.zeros((len(fill), 32, 32), dtype=torch.uint8))
    except PacelineError:
        raise
    except Exception as error:
        raise RecipeError(f"{name} failed on a black image ({type(error).__name__}: {error}): correct it.") from error
    return checked


# Separates these draws from others keyed by the same kind of numbers.
_MIXING_PURPOSE = 0x4D49_58


@dataclass(frozen=True)
class Mixture:
    """Mixing parameters of a step's samples.

    Attributes:
        share: Weight of the sample; its partner has the remainder.
        box: Box taken from the partner, (top, bottom, left, right) in pixels; None to blend whole images.
    """

    share: float
    box: tuple[int, int, int, int] | None = None


class Mixing:
    """Mixes normalised batches on their device; targets become probabilities [N, classes], or are mixed too."""

    def __init__(self, mix: Mix, classes: int, seed: int, *, repeats: int = 1) -> None:
        """Mix as specified in a recipe's `data.mix`.

        Args:
            mix: The recipe's section.
            classes: Number of classes.
            seed: The run's seed.
            repeats: Number of consecutive samples of the same image, which are not mixed with each other.
        """
        self._mix = mix
        self._distance = repeats
        self._classes = classes
        self._seed = seed

    @property
    def is_active(self) -> bool:
        """Whether any step is mixed."""
        return (self._mix.mixup > 0 or self._mix.cutmix > 0) and self._mix.probability > 0

    def __call__(self, batch: Batch) -> Batch:
        """Mix a batch; return it unchanged if its step or epoch is not mixed."""
        if self._mix.epochs is not None and batch.slice.epoch >= self._mix.epochs:
            return batch
        mixture = self.draw(batch.slice.step, batch.inputs.shape[-2], batch.inputs.shape[-1])
        if mixture is None:
            return batch
        targets = F.one_hot(batch.targets, self._classes) if batch.targets.ndim == 1 else batch.targets
        targets = targets.to(batch.inputs.dtype, copy=True)
        partners = targets.roll(self._distance, 0)
        return replace(
            batch,
            inputs=_mixed(batch.inputs, batch.inputs.roll(self._distance, 0), mixture),
            targets=targets.mul_(mixture.share).add_(partners, alpha=1 - mixture.share),
        )

    def draw(self, step: int, height: int, width: int) -> Mixture | None:
        """Return a step's mixing parameters for an image size; None if it is not mixed."""
        from scipy.special import betaincinv

        mix = self._mix
        happens, kind, share, down, across = uniforms(
            derive_seed(self._seed, _MIXING_PURPOSE), 0, np.array([step], dtype=np.int64), 5
        )[0].tolist()
        if happens >= mix.probability:
            return None
        cuts = mix.cutmix > 0 and (mix.mixup == 0 or kind < mix.switch)
        alpha = mix.cutmix if cuts else mix.mixup
        own = float(betaincinv(alpha, alpha, share))  # a sample from Beta(alpha, alpha)
        return _cut(own, height, width, down, across) if cuts else Mixture(own)


def _cut(share: float, height: int, width: int, down: float, across: float) -> Mixture:
    """Return a box of area ``1 - share`` around a random pixel; clipping increases the returned share."""
    middle, centre = int(down * height), int(across * width)
    reach = 0.5 * math.sqrt(1 - share)
    tall, wide = int(reach * height), int(reach * width)
    top, bottom = max(middle - tall, 0), min(middle + tall, height)
    left, right = max(centre - wide, 0), min(centre + wide, width)
    return Mixture(1 - (bottom - top) * (right - left) / (height * width), (top, bottom, left, right))


def _mixed(images: Tensor, partners: Tensor, mixture: Mixture) -> Tensor:
    """Mix images with their partners; may overwrite the partners."""
    if mixture.box is None:
        return partners.mul_(1 - mixture.share).add_(images, alpha=mixture.share)
    top, bottom, left, right = mixture.box
    mixed = images.clone(memory_format=torch.preserve_format)
    mixed[..., top:bottom, left:right] = partners[..., top:bottom, left:right]
    return mixed


def first_images(source: SampleSource, view: View, count: int) -> torch.Tensor:
    """Return images spread evenly over a split, in evaluation preprocessing: the same in every process and on resume.

    Sets are often ordered by class, so the images are evenly spaced. Broken ones are left out.

    Args:
        source: The split.
        view: The preprocessing.
        count: Maximum number of images.

    Returns:
        uint8 [n, C, S, S].

    Raises:
        DataError: If none of them can be read.
    """
    ids = np.unique(np.linspace(0, len(source) - 1, min(count, len(source))).round().astype(np.int64))
    groups = []
    for sample in ids.tolist():
        with suppress(BrokenImageError):  # reported and counted when training reads it
            image = source.read(sample)
            groups.append(evaluation_image(image, view.image_size, view.evaluation_crop, view.interpolation))
    if not groups:
        raise DataError(f"none of {len(ids)} training images from which to initialise the network could be read.")
    return torch.stack(groups)


Ids = NDArray[np.int64]

ATTEMPTS = 10
_FLIP = 0
_SHIFTS = slice(1, 3)
_FIRST_ATTEMPT = 4
_PER_ATTEMPT = 4


@dataclass(frozen=True)
class Draws:
    """Random draws for some samples; rows follow the requested ids.

    Attributes:
        flip: Whether to mirror left and right, bool [N].
        offsets: Top and left corner of the crop within the padded image, in [0, 2·padding], int64 [N, 2];
            None unless the crop is ``pad``.
        attempts: Uniform numbers of the random resized crop, float64 [N, 10, 4]; None for other crops.
    """

    flip: NDArray[np.bool_]
    offsets: Ids | None
    attempts: NDArray[np.float64] | None

    def select(self, chosen: NDArray[np.bool_] | slice) -> Draws:
        """Return the draws for the rows in a slice or boolean mask ``chosen``."""
        return Draws(
            self.flip[chosen],
            None if self.offsets is None else self.offsets[chosen],
            None if self.attempts is None else self.attempts[chosen],
        )


def draw(augment: Augment, seed: int, epoch: int, ids: Ids) -> Draws:
    """Draw each sample's augmentation: a pure function of (seed, epoch, id), whatever else is in ``ids``."""
    resized = augment.crop == "random_resized"
    columns = _FIRST_ATTEMPT + (ATTEMPTS * _PER_ATTEMPT if resized else 0)
    numbers = uniforms(seed, epoch, ids, columns)
    attempts = numbers[:, _FIRST_ATTEMPT:].reshape(len(ids), ATTEMPTS, _PER_ATTEMPT) if resized else None
    offsets = pad_offsets(numbers[:, _SHIFTS], augment.padding) if augment.crop == "pad" else None
    if augment.alternate_flip:
        flip = (uniforms(seed, 0, ids, 1)[:, _FLIP] < augment.flip) ^ (epoch % 2 == 1)
    else:
        flip = numbers[:, _FLIP] < augment.flip
    return Draws(flip, offsets, attempts)


def pad_offsets(numbers: NDArray[np.float64], padding: int) -> Ids:
    """Convert uniform numbers to equally likely crop corners 0 … 2·padding in the padded image."""
    return (numbers * (2 * padding + 1)).astype(np.int64)


def random_resized_box(
    numbers: NDArray[np.float64],
    size: tuple[int, int],
    scale: tuple[float, float],
    ratio: tuple[float, float],
) -> Box:
    """Choose a random region of an image (Szegedy et al., "Going deeper with convolutions", 2014).

    The distribution is that of torchvision's RandomResizedCrop: area uniform within ``scale``, aspect ratio log-uniform
    within ``ratio``. After ten attempts that do not fit, the largest central region with an allowed ratio is used.

    Args:
        numbers: Uniform numbers of the sample's attempts, in [0, 1), float64 [10, 4].
        size: Height and width of the image.
        scale: Smallest and largest area, as a share of the image's.
        ratio: Smallest and largest width over height.
    """
    height, width = size
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for area_draw, ratio_draw, top_draw, left_draw in numbers.tolist():
        area = height * width * (scale[0] + (scale[1] - scale[0]) * area_draw)
        aspect = math.exp(low + (high - low) * ratio_draw)
        part_width = round(math.sqrt(area * aspect))
        part_height = round(math.sqrt(area / aspect))
        if 0 < part_width <= width and 0 < part_height <= height:
            top = int(top_draw * (height - part_height + 1))
            return Box(top, int(left_draw * (width - part_width + 1)), part_height, part_width)
    return _central_box(height, width, ratio)


def shrinkage(box: Box, target: int) -> int:
    """Return the factor (1, 2, 4 or 8) by which to decode smaller for a box that is resized to ``target`` pixels.

    The largest factor that leaves the box at least twice the target's size, so that resizing still determines the
    result.
    """
    return next((each for each in (8, 4, 2) if min(box.height, box.width) >= 2 * each * target), 1)


def snapped(box: Box, step: int) -> Box:
    """Round each edge of the box to the nearest multiple of the step; the end of a partial last step counts too."""
    top, left = round(box.top / step), round(box.left / step)
    bottom, right = round((box.top + box.height) / step), round((box.left + box.width) / step)
    return Box(top * step, left * step, (bottom - top) * step, (right - left) * step)


def _central_box(height: int, width: int, ratio: tuple[float, float]) -> Box:
    part_height, part_width = height, width
    if width / height < ratio[0]:
        part_height = max(1, min(height, round(width / ratio[0])))
    elif width / height > ratio[1]:
        part_width = max(1, min(width, round(height * ratio[1])))
    return Box((height - part_height) // 2, (width - part_width) // 2, part_height, part_width)
