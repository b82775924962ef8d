"""The recipe's `data` section: which samples, how they are read, and how they are augmented."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    model_validator,
)
from pydantic_core import PydanticKnownError

from paceline.errors import DataError
from paceline.plugins.dataset_registry import DatasetNames
from paceline.plugins.registry import installed
from paceline.recipe.fields import (
    Applies,
    Auto,
    Belongs,
    ByClass,
    FiniteFloat,
    Fraction,
    LocalPath,
    Names,
    Needs,
    NonNegativeFloat,
    NonNegativeInt,
    Off,
    OpenFraction,
    Options,
    Pixels,
    PositiveFloat,
    PositiveInt,
    Switch,
    parse_integer,
    section,
)


def ascending(value: tuple[float, float]) -> tuple[float, float]:
    """Refuse a range whose first number is larger than its second."""
    if value[0] > value[1]:
        raise ValueError(f"found {list(value)}, but it must be a range, the smaller number first")
    return value


def check_unique(value: tuple[str, ...]) -> tuple[str, ...]:
    """Refuse a column that is named twice."""
    if len(set(value)) < len(value):
        raise ValueError(f"found {list(value)}, but each column may be named only once")
    return value


def check_part(value: int | str) -> int | str:
    """Parse a number of images, or a fraction such as ``10%``.

    Raises:
        ValueError: If it is neither.
    """
    is_share = isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?%", value) and 0 < float(value[:-1]) <= 100
    if not is_share and not (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        raise ValueError(f"found {value!r}, but it must be a number of images, a share such as 10%, or off")
    return value


def check_values(value: tuple[int, ...]) -> tuple[int, ...]:
    """Refuse a pixel value that is named twice."""
    if len(set(value)) < len(value):
        raise ValueError(f"found {list(value)}, but each value may be named only once")
    return value


_MaskValues = Annotated[
    tuple[Annotated[NonNegativeInt, Field(le=255)], ...],
    Field(min_length=2, max_length=254),
    AfterValidator(check_values),
]
Part = Annotated[int | str, BeforeValidator(lambda value: check_part(parse_integer(value)))]
"""A number of images, or a percentage of them."""
_Workers = Annotated[NonNegativeInt, Field(le=1024)]
# 0x1F is the name of a class, not its number.
_ClassNumber = Annotated[int, Field(ge=0, strict=True)]
_Columns = Annotated[
    tuple[str, ...],
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    AfterValidator(check_unique),
]
# Sorted: samples are numbered by set, and their order must not depend on the order of the keys.
_Ratios = Annotated[dict[str, PositiveFloat], AfterValidator(lambda ratios: dict(sorted(ratios.items())))]
Range = Annotated[tuple[PositiveFloat, PositiveFloat], AfterValidator(ascending)]


def _one_column(value: object) -> object:
    if isinstance(value, list):
        raise ValueError(
            f"found {value}, but a text is one column: join the columns in the table, with a space between"
        )
    return value


def _used(key: str) -> Applies:
    """Mark a key with the data sets that list it where they are registered (``paceline.plugins.dataset_registry``)."""
    return Applies("dataset", DatasetNames(key))


SPLIT_OFF = DatasetNames("validation_fraction")

_MIXED = Needs(("data.mix.mixup", "data.mix.cutmix"), "nothing is mixed (data.mix.mixup, data.mix.cutmix)")
_MIXUP = Needs(("data.mix.mixup",), "there is one kind of mixing")
_CUTMIX = Needs(("data.mix.cutmix",), "there is one kind of mixing")
_ERASED = Needs(("data.augment.erase",), "nothing is erased (data.augment.erase)")
_GROWING = Needs(("data.progressive.start_size",), "images do not grow (data.progressive.start_size)")
_MIXING_ENDS = Needs(("epochs after mixing",), "the run has {epochs} epochs: all are mixed")
_GROWTH_BEGINS = Needs(("epochs of growing images",), "the run has {epochs} epochs: images keep their initial size")
_WITH_LOADERS = Needs(
    ("a back-end with loader processes",),
    "the {backend} back-end, chosen here, has no loader processes (data.backend=pytorch has)",
)
_LOADED = Needs(("loader processes",), "there are no loader processes (see data.workers)")
_STRENGTHS = ("brightness", "contrast", "saturation", "hue")
_JITTERED = Needs(tuple(f"data.augment.jitter.{each}" for each in _STRENGTHS), "there is no jitter")
_WITH_TARGETS = _used("target_columns")
_NUMBERS = Needs(("numbers to learn",), "only image_regression learns numbers")
# In smaller pictures, objects cannot be told apart.
_SMALLEST = 32
_MOST_ROWS = 10**10


@section
class Jitter:
    """Colour jitter: each strength is the largest relative change."""

    brightness: NonNegativeFloat = 0.0
    """Range of the factor on all pixels: from 1 - this to 1 + this."""
    contrast: NonNegativeFloat = 0.0
    """Factor on the distance from the mean grey."""
    saturation: NonNegativeFloat = 0.0
    """Factor on the distance from each pixel's grey."""
    hue: Annotated[Fraction, Field(le=0.5)] = 0.0
    """Hue shift, as a share of the colour circle."""
    probability: Annotated[Fraction, _JITTERED] = 1.0
    """Share of the images that are varied."""


@section
class Mix:
    """How training samples are mixed with each other; the draws are keyed by (seed, step)."""

    mixup: NonNegativeFloat = 0.0
    """Alpha of mixup (Zhang et al. 2017): two images are averaged with weights drawn from Beta(alpha, alpha); 0:
    off."""
    cutmix: NonNegativeFloat = 0.0
    """Alpha of CutMix (Yun et al. 2019): a patch of one image, its area drawn likewise, comes from another; 0: off."""
    switch: Annotated[Fraction, _MIXED, _MIXUP, _CUTMIX] = 0.5
    """Share of the mixed steps that use CutMix, if both are on."""
    probability: Annotated[Fraction, _MIXED] = 1.0
    """Share of steps with mixing."""
    epochs: Annotated[PositiveInt | None, Off, _MIXED, _MIXING_ENDS] = None
    """Mix only in this many first epochs; `off`: in all."""


@section
class Augment:
    """How a training image is varied. Every draw is keyed by (seed, epoch, sample), never by worker or rank."""

    crop: Literal["none", "pad", "random_resized"] = "none"
    """`pad`: shift by up to `padding` pixels; `random_resized`: a random part, resized (Szegedy et al. 2014)."""
    padding: Annotated[Pixels, Applies("crop", ("pad",))] = 4
    """Largest shift in pixels along each axis."""
    padding_mode: Annotated[Literal["zero", "reflect"], Applies("crop", ("pad",))] = "zero"
    """Fill for the uncovered area: black, or the image mirrored at its edge."""
    scale: Annotated[Range, Applies("crop", ("random_resized",))] = (0.08, 1.0)
    """Range of the cropped part's area, as a share of the image."""
    ratio: Annotated[Range, Applies("crop", ("random_resized",))] = (3 / 4, 4 / 3)
    """Range of the cropped part's aspect ratio, width over height."""
    shrink_on_load: Annotated[Switch, Applies("crop", ("random_resized",))] = True
    """A JPEG whose crop is at least 4, 8 or 16 times as large as the model's input is decoded at a half, a
    quarter or an eighth of its size; `false`: always in full."""
    flip: Fraction = 0.0
    """Probability of a horizontal flip."""
    alternate_flip: Switch = False
    """Draw the flip only in the first epoch, then mirror each image in every other epoch, so that two epochs always
    show both (Jordan 2024, arXiv:2404.00498); needs `flip` 0.5."""
    vertical_flip: Fraction = 0.0
    """Probability of a vertical flip."""
    policy: Annotated[str, Names("augmentations")] = "none"
    """`randaugment` (Cubuk et al. 2019), `trivialaugment` (Müller and Hutter 2021), `autoaugment` (Cubuk et al. 2018)
    or `augmix` (Hendrycks et al. 2019), as torchvision has them; `timm`, as timm does, by its own configuration string
    in `policy_options.config` (`rand-m9-mstd0.5-inc1`); a name that an installed package registers, or
    `package.module:factory` of your own."""
    policy_options: Annotated[Options, Applies("policy", ("timm", "package.module:factory")), Belongs("policy")] = (
        Field(default_factory=dict)
    )
    """Keyword arguments of the factory."""
    operations: Annotated[PositiveInt, Field(le=100), Applies("policy", ("randaugment",))] = 2
    """Operations on each image, one after the other."""
    magnitude: Annotated[NonNegativeInt, Field(le=30), Applies("policy", ("randaugment",))] = 9
    """Their strength, from 0 to 30."""
    policy_dataset: Annotated[Literal["imagenet", "cifar10", "svhn"], Applies("policy", ("autoaugment",))] = "imagenet"
    """Dataset on which the policy was learned."""
    severity: Annotated[PositiveInt, Field(le=10), Applies("policy", ("augmix",))] = 3
    """Strength of its operations, from 1 to 10."""
    jitter: Jitter = Jitter()
    """How colours are varied."""
    grayscale: Fraction = 0.0
    """Probability of losing all colour."""
    blur: Fraction = 0.0
    """Probability of a Gaussian blur, of up to 2 pixels."""
    erase: Fraction = 0.0
    """Probability that a rectangle is erased (Zhong et al. 2017)."""
    erase_with: Annotated[Literal["mean", "color", "noise"], _ERASED] = "mean"
    """What it becomes: the mean color, a random one, or noise, both as wide as ImageNet's pixels vary."""
    erase_count: Annotated[PositiveInt, Field(le=100), _ERASED] = 1
    """Most rectangles of an image; together they are as large as one."""
    erase_scale: Annotated[Range, _ERASED] = (0.02, 0.33)
    """Range of its area, as a share of the image."""
    erase_ratio: Annotated[Range, _ERASED] = (0.3, 3.3)
    """Range of its aspect ratio, width over height."""
    repeats: Annotated[PositiveInt, Field(le=1000)] = 1
    """Views of each sample in a batch, each varied anew (Hoffer et al. 2019); an epoch is this many times as long."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.alternate_flip and self.flip != 0.5:
            raise ValueError(
                f"found alternate_flip=true with flip={self.flip:g}, but alternating mirrors each image in every other "
                "epoch; set flip to 0.5, or leave alternate_flip out"
            )
        return self


@section
class Progressive:
    """Training images that grow from epoch to epoch (Howard 2018): early epochs cost less."""

    start_size: Annotated[Pixels | None, Off] = None
    """Initial height and width, smaller than `image_size`, or `off`."""
    begin: Annotated[NonNegativeInt, Field(le=100_000), _GROWING] = 0
    """Epochs at that size before images grow."""
    end: Annotated[PositiveInt, Field(le=100_000), _GROWING, _GROWTH_BEGINS] = 1
    """First epoch, counted from 0, with images of `image_size`."""
    multiple: Annotated[PositiveInt, _GROWING] = 32
    """Intermediate sizes are rounded to multiples of this."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.end <= self.begin:
            raise ValueError(f"found begin={self.begin} and end={self.end}, but images grow from begin to a later end")
        return self

    def size_at(self, epoch: int, image_size: int) -> int:
        """Height and width of an epoch's training images."""
        if self.start_size is None or epoch >= self.end:
            return image_size
        fraction = max(epoch - self.begin, 0) / (self.end - self.begin)
        size = self.start_size + (image_size - self.start_size) * fraction
        rounded = round(size / self.multiple) * self.multiple
        return min(max(rounded, self.start_size), image_size)


@section
class TextSection:
    """How text becomes samples."""

    objective: Literal["causal", "masked"] = "causal"
    """What to predict: `causal`, the next token (Radford et al. 2019); or `masked`, hidden tokens (Devlin et al.
    2018)."""
    context: Annotated[PositiveInt, Field(ge=2, le=10**7)] = 256
    """Maximum tokens per sample: the model's context length. Text to classify, and chats, are cut to it."""
    tokenizer: LocalPath = "bytes"
    """`bytes`: each UTF-8 byte of the text is a token; or a JSON file with a tokenizer; a Hugging Face tokenizer.json,
    a folder with one, or `OWNER/NAME` on the Hugging Face hub (extra `transformers`)."""
    column: Annotated[str, BeforeValidator(_one_column)] = "text"
    """Text column of a `huggingface_text` dataset, in which each row is a document, or of a `text_table`. For
    `token_classification` the column with lists of words, by default `tokens`."""
    rows: Literal["chunked", "packed", "single"] = "chunked"
    """`chunked`: documents are concatenated and cut every `context` tokens. `packed`: whole documents are combined to
    fill `context` tokens without attending to each other; longer ones are cut (Krell et al. 2021). `single`: each
    sample is one document, or a part of a longer one."""
    pad_multiple: Annotated[PositiveInt, Field(le=10**6), Applies("rows", ("single",))] = 8
    """A micro-batch is padded to its longest sample, rounded up to a multiple of this, so that fewer shapes occur."""
    mask_fraction: Annotated[OpenFraction, Field(gt=0), Applies("objective", ("masked",))] = 0.15
    """Share of a sample's tokens to predict, at least one."""


@section
class GeneratedBoxes:
    """The data set `shapes`: discs, rectangles and triangles on a pattern, each drawn from its number alone."""

    samples: Annotated[PositiveInt, Field(le=10**8)] = 2000
    """Training pictures."""
    evaluation_samples: Annotated[PositiveInt, Field(le=10**8)] = 200
    """Held-out pictures."""
    smallest_side: Annotated[Pixels, Field(ge=_SMALLEST)] = 64
    """Minimum height and width of a picture in pixels."""
    largest_side: Annotated[Pixels, Field(ge=_SMALLEST)] = 96
    """Maximum height and width."""
    objects: Annotated[PositiveInt, Field(le=1000)] = 4
    """Maximum objects in a picture; the minimum is one."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.smallest_side > self.largest_side:
            raise ValueError(
                f"found smallest_side={self.smallest_side} and largest_side={self.largest_side}, but the first must "
                "not be larger"
            )
        return self


@section
class Boxes:
    """How pictures with boxes around their objects are read and shown."""

    short_sides: Annotated[Annotated[tuple[Pixels, ...], Field(min_length=1)] | None, Off] = (800,)
    """Pixels of a picture's shorter side, its aspect ratio kept. Of several, training draws one for each picture, by
    (seed, epoch, sample), and evaluation takes the largest. `off`: pictures stay as large as they are."""
    long_side: Pixels = 1333
    """Maximum pixels of the longer side; if that is too little, the shorter one is below `short_sides`."""
    flip: Fraction = 0.5
    """Probability of a horizontal flip in training."""
    like_shapes: Switch = True
    """Sort each step's samples by aspect ratio before they are cut into micro-batches, which reduces padding. Each step
    still sees the same samples."""
    keep_empty: Switch = False
    """Train on pictures without a box, too; evaluation always has them."""
    masks: Auto | Switch = "auto"
    """Read the objects' masks; `auto`: if the model's name says it predicts masks."""
    generated: GeneratedBoxes = GeneratedBoxes()
    """What `data.dataset=shapes` generates."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.short_sides is not None and max(self.short_sides) > self.long_side:
            raise ValueError(
                f"found short_sides={list(self.short_sides)} and long_side={self.long_side}, but the longer side must "
                "not be the smaller one"
            )
        return self


@section
class Clicks:
    """Click samples: numbers, categories and a click label."""

    max_rows: Annotated[PositiveInt, Field(ge=2, le=_MOST_ROWS)] = 100_000
    """Maximum rows of an embedding table. If a feature has more values, several share a row."""
    tables: Auto | tuple[Annotated[PositiveInt, Field(ge=2, le=_MOST_ROWS)], ...] = "auto"
    """Rows of each categorical feature's table. `auto` with `criteo`: eight times the feature's values in the training
    split, at least 1,024 and at most `max_rows`; with `synthetic_clicks`: from 10 to `max_rows`, each larger by the
    same factor."""
    cache: Auto | LocalPath = "auto"
    """Folder for the binary copy of `criteo` text, made once; `auto` is `.paceline` next to the data, or the user's
    cache if that is not writable."""
    dense_features: Annotated[PositiveInt, Field(le=10_000)] = 13
    """Numbers per sample of `synthetic_clicks`; a line of Criteo's format has 13."""
    categories: Annotated[PositiveInt, Field(le=10_000)] = 26
    """Categorical features per sample of `synthetic_clicks`; a line of Criteo's format has 26."""
    zipf: NonNegativeFloat = 1.05
    """How long the tail of `synthetic_clicks` is: the frequency of a feature's k-th most frequent value is proportional
    to 1 / k to this power."""
    rank: Annotated[PositiveInt, Field(le=10_000)] = 4
    """Numbers in the hidden vector of each value of `synthetic_clicks`, whose products determine the clicks."""
    evaluation_samples: Annotated[PositiveInt, Field(le=10**8)] = 20_000
    """Held-out samples of `synthetic_clicks`."""


_BACKENDS = Names("backends", ("auto", "memory", "pytorch", "synthetic"))


def _check_backend(value: str) -> str:
    *names, last = dict.fromkeys((*_BACKENDS.values, *installed("backends")))
    if value not in (*names, last):
        raise PydanticKnownError("literal_error", {"expected": f"{', '.join(map(repr, names))} or {last!r}"})
    return value


@section
class Data:
    """Which samples a run sees."""

    dataset: Annotated[str, Names("datasets")] = "image_folder"
    """`digits`, `discs` and `figures` (drawn), `image_folder`, `csv` (a table of paths and labels), `parquet` (tables
    of images), `huggingface`, `webdataset`, `packed` (what `paceline pack` wrote), `mixture` (of folders and tables),
    the archives `cifar10`, `cifar100`, `mnist`, `fashion_mnist`, `torchvision:NAME`, or `synthetic`; of text `docs`
    (Python's documentation), `text_folder`, `tokens` (what `paceline pack --text` wrote), `huggingface_text` (what
    `save_to_disk` wrote, or parquet), `text_table` (CSV, JSON lines, parquet or what `save_to_disk` wrote: texts with
    labels) or `chat` (the same, with columns `prompt` and `answer`, or `messages`); of clicks `criteo` (lines of
    numbers and categories) or `synthetic_clicks`; for detection `coco`, `yolo`, `voc`, `labelme`, `label_studio`,
    `cvat` (what these tools export) or `shapes`, which are drawn; for segmentation these or `masks` (a label map for
    each image); or `package.module:factory`."""
    path: Annotated[LocalPath | None, Off, _used("path")] = None
    """Path of the data; an image folder is PATH/{train,val or test}/CLASS/*, or PATH/CLASS/*; tars may be a pattern,
    `PATH/train-{000..146}.tar`; a text folder is PATH/{train,val}/*.txt, or PATH/*.txt; of a `mixture`, the folder with
    its sets. Or an address: `s3://BUCKET/PATH`, `hf://datasets/OWNER/NAME`."""
    annotations: Annotated[LocalPath | None, Off, _used("annotations")] = None
    """The annotation file of all images, if it is not where the data set looks for it in `path`."""
    mask_values: Annotated[_MaskValues | None, Off, _used("mask_values")] = None
    """Values of the pixels of masks, by class: `[0, 255]`, for example. `off`: class indices, and 255 is ignored."""
    mixture: Annotated[_Ratios, _used("mixture")] = Field(default_factory=dict)
    """The sets of a `mixture` and their ratios: `{photos: 3, more.csv: 1}` takes three samples of `photos` for each of
    `more.csv`. A set is a folder of class folders or a table of images in `path`. Classes of the same name are one
    class. An epoch has as many samples as all sets; a set is used up before one of its samples repeats."""
    image_column: Annotated[Auto | str, _used("image_column")] = "auto"
    """Column of a table with the images, or their paths; `auto`: one with a usual name."""
    label_column: Annotated[Auto | str, _used("label_column")] = "auto"
    """Column of a table with the labels; `auto`: the only suitable one, or one called `label`, for example. With
    `image_multilabel`, a cell holds any number of names, separated by `;`; with `token_classification`, a list of
    tags, and `auto` is `tags`."""
    target_columns: Annotated[_Columns, _WITH_TARGETS] = ()
    """For `image_regression`: columns of a table with the numbers to learn, such as `[age, height]`. For
    `image_multilabel`: columns with 0 or 1, one for each class, instead of `label_column`."""
    split_column: Annotated[Auto | str | None, Off, _used("split_column")] = "auto"
    """Column of a table with `train`, `val` or `test` for each sample; `auto`: one called `split`, for example, if any;
    `off`: none."""
    download: Annotated[Switch, _used("download")] = False
    """Download an archive, or a `torchvision:NAME`, into `path` if it is not there yet."""
    options: Annotated[Options, _used("options")] = Field(default_factory=dict)
    """Further arguments for a `torchvision:NAME`, such as `{split: letters}` for EMNIST."""
    only_classes: Annotated[tuple[_ClassNumber | str, ...] | None, Off, _used("only_classes")] = None
    """Use only these classes, by name or number; `off`: all."""
    subset: Annotated[Part | None, Off, _used("subset")] = None
    """Train on this number (`1000`) or share (`10%`) of the images, stratified by class; always the same ones, and a
    larger subset contains each smaller one. The held-out images stay; `off`: on all."""
    sampling: Literal["uniform"] | ByClass = "uniform"
    """How an epoch's samples are drawn. `uniform`: each once. Otherwise as many samples with replacement: by a
    mapping of class names to weights, 1 for other classes, the relative frequency of drawing a sample of the class;
    or `balanced`, which draws all classes equally often. Each draw is varied anew."""
    backend: Annotated[str, _BACKENDS, AfterValidator(_check_backend)] = "auto"
    """Who reads the samples: `memory` holds small sets as tensors, `pytorch` decodes files in workers, `dali` decodes
    JPEG files in threads or on the GPU (extra `dali`)."""
    workers: Annotated[Auto | _Workers, Applies("backend", ("auto", "pytorch", "dali")), _WITH_LOADERS] = "auto"
    """Loader processes per rank, for the `pytorch` back-end; 0 reads in the training process. `auto` measures once
    which number feeds the model best, for runs of 200,000 images or more; else it is a rank's share of the cores but
    one. For `dali`, its threads, at least 1."""
    prefetch: Annotated[
        PositiveInt, Field(le=1024), Applies("backend", ("auto", "pytorch", "dali")), _WITH_LOADERS, _LOADED
    ] = 2
    """Batches each worker keeps ready; for `dali`, batches prepared ahead."""
    decode_on: Annotated[Literal["auto", "cpu", "gpu"], Applies("backend", ("dali",))] = "auto"
    """Where `dali` decodes and resizes; `auto` is the model's device, and with `crop=pad` the CPU."""
    image_size: Auto | Pixels = "auto"
    """Height and width of the model's input in pixels."""
    evaluation_size: Auto | Pixels = "auto"
    """Height and width for evaluation and prediction; `auto` is `image_size`, a third more is often better (Touvron et
    al. 2019)."""
    evaluation_shape: Literal["square", "rectangular"] = "square"
    """`rectangular`: images keep their aspect ratio in evaluation and prediction, up to 2 to 1, and less of them is
    cropped (Howard 2018); `evaluation_size` is then the shorter side."""
    evaluation_multiple: Annotated[Pixels, Applies("evaluation_shape", ("rectangular",))] = 32
    """The longer side is `evaluation_size` plus the nearest multiple of this many pixels."""
    channels: Auto | Literal[1, 3] = "auto"
    """1 greyscale, 3 colour; `auto` is 3 unless the dataset is greyscale."""
    validation_fraction: Annotated[Fraction, _used("validation_fraction")] = 0.2
    """Share of each class, or of text of the documents, held out for evaluation, if the data has no split. Rows of text
    are drawn by file name and row number: renaming the file changes the split. `paceline evaluate` takes 1 too: all."""
    split_by: Annotated[Literal["order", "name"], _used("split_by")] = "order"
    """What decides which images are held out if the data has no split: the image's position in its class, or its name,
    so that adding or removing an image moves at most one other."""
    saved_split: Annotated[LocalPath | None, Off, _used("saved_split")] = None
    """A file that stores the split: written by the first run and used by all later ones; or `off`."""
    holdout_fraction: OpenFraction = 0.0
    """Share of each class of the training images, at least one, used neither for training nor for evaluation. Use it to
    choose settings after training, such as the evaluation size (`paceline evaluate RUN --sizes`)."""
    evaluation_crop: Annotated[PositiveFloat, Field(le=1)] = 0.875
    """Share of the resized image's side that the evaluation centre crop keeps."""
    on_bad: Literal["refuse", "skip"] = "refuse"
    """Files that a run cannot use: `refuse` lists them all and stops; `skip` leaves them out, reports them at the start
    and keeps their number in the plan. A sample that cannot be read later is skipped too, with an incident, up to 1 %
    of them."""
    max_broken: Annotated[NonNegativeInt, Applies("on_bad", ("refuse",))] = 0
    """Unreadable samples to skip, each logged as an incident, before the run stops."""
    mean: Auto | tuple[FiniteFloat, ...] = "auto"
    """Per-channel mean to subtract from pixels in [0, 1]."""
    std: Auto | tuple[PositiveFloat, ...] = "auto"
    """Per-channel standard deviation to divide pixels by."""
    target_mean: Annotated[Auto | tuple[FiniteFloat, ...], _WITH_TARGETS, _NUMBERS] = "auto"
    """Value to subtract from each target column of `image_regression`; `auto`: its mean over the training
    images."""
    target_std: Annotated[Auto | tuple[PositiveFloat, ...], _WITH_TARGETS, _NUMBERS] = "auto"
    """Value to divide them by afterwards; `auto`: their standard deviation over the training images."""
    samples: Annotated[PositiveInt, Field(le=10**8), _used("samples")] = 4096
    """Training samples of a `synthetic` dataset."""
    classes: Annotated[PositiveInt, Field(le=10**6), _used("classes")] = 1000
    """Classes of the `synthetic` dataset."""
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    """How images are resized; always antialiased."""
    augment: Augment = Augment()
    """How training images are varied."""
    progressive: Progressive = Progressive()
    """How training images grow."""
    mix: Mix = Mix()
    """How training samples are mixed."""
    text: Annotated[TextSection, _used("text")] = TextSection()
    """How text becomes the samples of a language model."""
    recommendation: Annotated[Clicks, _used("recommendation")] = Clicks()
    """Numbers and categories of clicked and unclicked samples."""
    detection: Annotated[Boxes, _used("detection")] = Boxes()
    """How pictures with boxes are read and prepared."""

    def needed_path(self, what: str = "set it to where the data is") -> Path:
        """Return the path of a data set that needs one; ``what`` says what belongs there.

        Raises:
            DataError: If the recipe does not give it.
        """
        if self.path is None:
            raise DataError(f"data.dataset={self.dataset} needs data.path: {what}.", key="data.path")
        return Path(self.path).expanduser()

    @property
    def score_all(self) -> bool:
        """Return whether `paceline evaluate` scores all samples of data without a split."""
        return self.validation_fraction == 1

    @property
    def broken_limit(self) -> int:
        """Return how many samples found unreadable before the first step are left out."""
        return sys.maxsize if self.on_bad == "skip" else self.max_broken

    def unread_limit(self, samples: int) -> int:
        """Return how many unreadable samples are left out after the start; with `skip`, more mean a failing disk."""
        return max(10, samples // 100) if self.on_bad == "skip" else self.max_broken
