"""Which samples does train.py of timm show a network, and how does it vary them? The `data` section of a recipe."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from paceline.recipe.imports.draft import Draft

if TYPE_CHECKING:
    from paceline.recipe.imports.timm import InputSettings

_DATASETS = {"": "image_folder", "image_folder": "image_folder", "folder": "image_folder", "cifar10": "cifar10"}
_INTERPOLATIONS = ("bilinear", "bicubic")
_HELD_OUT = ("validation", "val", "test")
# Strengths of RandAugment: to 10 in timm, and to 30 in torchvision's, which is ours.
_STRENGTH = 3
_ERASED_AREA, _ERASED_RATIO = [0.02, 1 / 3], [0.3, 10 / 3]


def repeats_of(draft: Draft) -> int:
    """Views of each sample in an epoch here; there are so many times fewer samples in one of train.py's."""
    return max(1, int(draft["aug_repeats"]))


def epochs(draft: Draft, count: float) -> str:
    """So many epochs of train.py's as a recipe says them."""
    number = count / repeats_of(draft)
    return f"{number:.10g} epoch{'s' * (number != 1)}"


def put_data(draft: Draft, settings: InputSettings) -> None:
    """The whole section."""
    _put_source(draft)
    _put_size(draft, settings)
    _put_normalisation(draft, settings)
    interpolation = _put_interpolation(draft, settings)
    crop = draft["crop_pct"] or settings.crop
    draft.put(
        "data.evaluation_crop", crop, "crop_pct", note="" if draft["crop_pct"] else "of the network's own settings"
    )
    if draft["no_aug"]:
        _put_no_variation(draft, crop)
    else:
        _put_crop(draft, interpolation)
        _put_variation(draft)
    _put_repeats(draft)
    _put_mixing(draft)
    _put_loss(draft)
    _put_validation(draft)


def _put_source(draft: Draft) -> None:
    kind, _, name = str(draft["dataset"] or "").partition("/")
    path_key = "data_dir" if draft["data_dir"] else "data"
    path: str | None = draft[path_key]
    if kind.startswith("hfds"):
        draft.put("data.dataset", "huggingface", "dataset")
        draft.nearly("dataset", "it must be on this machine, as `save_to_disk` wrote it or as parquet: data.path")
        path = path or name
        if draft["target_key"]:
            draft.put("data.label_column", draft["target_key"], "target_key")
    elif kind == "wds":
        draft.put("data.dataset", "webdataset", "dataset")
    else:
        ours = _DATASETS.get((name if kind == "torch" else kind).lower())
        if ours is None:
            draft.refuse("dataset", "data.dataset is image_folder, cifar10, webdataset or huggingface, or one of yours")
        draft.put("data.dataset", ours or "image_folder", *(["dataset"] if ours and draft["dataset"] else []))
    draft.idle("target_key", "said for Hugging Face's datasets")
    if path:
        draft.put("data.path", path, path_key)
        draft.idle("data", "--data-dir says it")
    else:
        draft.notices.append("it is not said where the images are: add data.path")


def _put_size(draft: Draft, settings: InputSettings) -> None:
    channels, key = 3, "in_chans"
    if draft["input_size"]:
        size = draft["input_size"]
        if len(size) != 3 or size[1] != size[2]:
            draft.refuse("input_size", "images here are square: channels, and twice the same number")
        else:
            channels, key = size[0], "input_size"
            draft.put("data.image_size", size[1], "input_size")
        draft.idle("img_size", "--input-size says it")
    elif draft["img_size"]:
        draft.put("data.image_size", draft["img_size"], "img_size")
    else:
        draft.put("data.image_size", settings.image_size, "img_size", note="of the network's own settings")
    if key == "in_chans" and draft["in_chans"]:
        channels = draft["in_chans"]
    elif key == "input_size":
        draft.idle("in_chans", "--input-size says it")
    if channels not in (1, 3):
        draft.refuse(key, "images have 1 or 3 channels here")
        return
    mode = draft["input_img_mode"]
    if mode and mode != {1: "L", 3: "RGB"}[channels]:
        draft.refuse("input_img_mode", f"images of {channels} channels are read as {'RGB' if channels == 3 else 'L'}")
    draft.put("data.channels", channels, key, *(["input_img_mode"] if mode else []))


def _put_normalisation(draft: Draft, settings: InputSettings) -> None:
    for key, own in (("mean", settings.mean), ("std", settings.std)):
        said = draft[key]
        if said:
            draft.put(f"data.{key}", list(said) * (3 if len(said) == 1 else 1), key)
        else:
            draft.put(f"data.{key}", list(own), note="of the network's own settings")


def _put_interpolation(draft: Draft, settings: InputSettings) -> str:
    name = draft["interpolation"] or settings.interpolation
    note = "" if draft["interpolation"] else "of the network's own settings"
    if name not in _INTERPOLATIONS:
        if draft["interpolation"]:
            draft.refuse("interpolation", "images are resized bilinear or bicubic here")
        draft.nearly("interpolation", f"bicubic in place of {name}")
        name = "bicubic"
    draft.put("data.interpolation", name, "interpolation", note=note)
    return str(name)


def _put_no_variation(draft: Draft, crop: float) -> None:
    draft.put("data.augment.crop", "none", "no_aug")
    draft.put("data.augment.flip", 0.0, "no_aug")
    if crop != 1:
        draft.nearly(
            "no_aug", f"training images are cut as those of evaluation, to {crop:g} of their side; there, not cut"
        )
    for key in ("train_crop_mode", "scale", "ratio", "hflip", "vflip", "color_jitter", "color_jitter_prob", "aa"):
        draft.idle(key, "--no-aug turns it off")
    for key in ("grayscale_prob", "gaussian_blur_prob", "train_interpolation", "reprob", "remode"):
        draft.idle(key, "--no-aug turns it off")


def _put_crop(draft: Draft, interpolation: str) -> None:
    if draft["train_crop_mode"] not in (None, "", "rrc"):
        draft.refuse(
            "train_crop_mode", "training images are random resized crops, rrc, or shifted: data.augment.crop=pad"
        )
    draft.put("data.augment.crop", "random_resized", "train_crop_mode")
    for key in ("scale", "ratio"):
        draft.put(f"data.augment.{key}", list(draft[key]), key)
    draft.put("data.augment.flip", draft["hflip"], "hflip")
    if draft["vflip"]:
        draft.put("data.augment.vertical_flip", draft["vflip"], "vflip")
    training = draft["train_interpolation"] or interpolation
    if training == interpolation:
        draft.put("data.interpolation", interpolation, "interpolation", "train_interpolation")
    elif training in (*_INTERPOLATIONS, "random"):
        how = "drawn for each image" if training == "random" else training
        draft.nearly("train_interpolation", f"training images are resized {interpolation} too; there, {how}")
        draft.idle("train_interpolation", "data.interpolation is one for training and evaluation")
    else:
        draft.refuse("train_interpolation", "images are resized bilinear or bicubic here")


def _put_variation(draft: Draft) -> None:
    policy = draft["aa"]
    if policy:
        _put_policy(draft, str(policy))
        for key in ("color_jitter", "color_jitter_prob"):
            draft.idle(key, "train.py leaves colours to --aa")
    else:
        _put_jitter(draft)
    if draft["grayscale_prob"]:
        draft.put("data.augment.grayscale", draft["grayscale_prob"], "grayscale_prob")
    if draft["gaussian_blur_prob"]:
        draft.put("data.augment.blur", draft["gaussian_blur_prob"], "gaussian_blur_prob")
    if not draft["reprob"]:
        draft.idle("reprob", "0 is off")
        for key in ("remode", "recount", "resplit"):
            draft.idle(key, "nothing is erased (--reprob)")
        return
    draft.put("data.augment.erase", draft["reprob"], "reprob")
    draft.put("data.augment.erase_scale", _ERASED_AREA, note="as timm erases")
    draft.put("data.augment.erase_ratio", _ERASED_RATIO, note="as timm erases")
    if draft["remode"] != "const":
        draft.nearly("remode", "what is erased becomes the mean, and no noise")
    draft.put("data.augment.erase", draft["reprob"], "reprob", "remode")


def _put_jitter(draft: Draft) -> None:
    strengths = list(draft["color_jitter"] or [])
    strengths = strengths * 3 if len(strengths) == 1 else strengths
    if not any(strengths):
        draft.idle("color_jitter", "its strength is 0")
        draft.idle("color_jitter_prob", "nothing is varied (--color-jitter)")
        return
    if len(strengths) not in (3, 4):
        draft.refuse("color_jitter", "it is one strength, or those of brightness, contrast, saturation and hue")
        return
    for name, strength in zip(("brightness", "contrast", "saturation", "hue"), strengths, strict=False):
        draft.put(f"data.augment.jitter.{name}", strength, "color_jitter")
    if draft["color_jitter_prob"] is not None:
        draft.put("data.augment.jitter.probability", draft["color_jitter_prob"], "color_jitter_prob")


def _put_policy(draft: Draft, policy: str) -> None:
    kind, *parts = policy.split("-")
    matches = [re.match(r"([a-z]+)(.*)", part) for part in parts]
    said: dict[str, str] = {match[1]: match[2] for match in matches if match}
    if kind == "rand" and not any(key.startswith("t") or key == "w" for key in said):
        _put_randaugment(draft, said)
    elif kind in ("original", "originalr", "v0", "v0r") and not parts:
        draft.put("data.augment.policy", "autoaugment", "aa")
        draft.put("data.augment.learned_on", "imagenet", "aa")
        if kind != "original":
            draft.nearly("aa", "the policy as published for ImageNet, which is `original`")
    elif kind == "augmix" and said.keys() <= {"m", "mstd"}:
        draft.put("data.augment.policy", "augmix", "aa")
        draft.put("data.augment.severity", min(max(int(_number(said.get("m"), 3)), 1), 10), "aa")
        draft.nearly("aa", "AugMix as torchvision has it: its operations' strengths are drawn otherwise")
    else:
        draft.refuse("aa", "it is rand-m…, original, v0 or augmix-m… without sets, widths or depths of their own")


def _put_randaugment(draft: Draft, said: dict[str, str]) -> None:
    strength = min(_number(said.get("m"), 10), _number(said.get("mmax"), 10))
    draft.put("data.augment.policy", "randaugment", "aa")
    draft.put("data.augment.operations", max(1, int(_number(said.get("n"), 2))), "aa")
    draft.put(
        "data.augment.magnitude", min(30, round(_STRENGTH * strength)), "aa", note=f"{strength:g} of 10, in 30ths"
    )
    chance = f"a chance of {_number(said.get('p'), 0.5):g}"
    spread = f" and a strength spread by {said['mstd']}" if "mstd" in said else ""
    draft.nearly("aa", f"torchvision's operations, each always applied; timm's have {chance}{spread}")


def _number(text: str | None, otherwise: float) -> float:
    try:
        number = float(text) if text else otherwise
    except ValueError:
        return otherwise
    return number if math.isfinite(number) else otherwise


def _put_repeats(draft: Draft) -> None:
    repeats: Any = draft["aug_repeats"]
    if repeats and repeats != int(repeats):
        draft.refuse("aug_repeats", "data.augment.repeats is a whole number")
    if repeats_of(draft) > 1:
        how = "an epoch here has so many views of all samples: lengths in epochs are divided by it"
        draft.put("data.augment.repeats", repeats_of(draft), "aug_repeats", note=how)
    else:
        draft.idle("aug_repeats", "one view is none more")


def is_mixed(draft: Draft) -> bool:
    """Whether samples are mixed at all."""
    return bool(draft["mixup"] > 0 or draft["cutmix"] > 0)


def _put_mixing(draft: Draft) -> None:
    keys = ("mixup_prob", "mixup_switch_prob", "mixup_mode", "mixup_off_epoch")
    if not is_mixed(draft):
        for key in (*keys, "mixup", "cutmix"):
            draft.idle(key, "nothing is mixed (--mixup, --cutmix)")
        return
    for key in ("mixup", "cutmix"):
        if draft[key]:
            draft.put(f"data.mix.{key}", draft[key], key)
        draft.idle(key, "0 is off")
    draft.put("data.mix.probability", draft["mixup_prob"], "mixup_prob")
    if draft["mixup"] and draft["cutmix"]:
        draft.put("data.mix.switch", draft["mixup_switch_prob"], "mixup_switch_prob")
    draft.idle("mixup_switch_prob", "there is one kind of mixing")
    if draft["mixup_mode"] != "batch":
        draft.refuse("mixup_mode", "data.mix draws once for a step: batch")
    draft.idle("mixup_mode", "data.mix draws once for a step")
    _put_end_of_mixing(draft)


def _put_end_of_mixing(draft: Draft) -> None:
    last, repeats = draft["mixup_off_epoch"], repeats_of(draft)
    if last and last % repeats:
        draft.refuse("mixup_off_epoch", f"data.mix.epochs is whole, and an epoch here is {repeats} of train.py's")
    elif last and last < draft["epochs"]:
        draft.put("data.mix.epochs", last // repeats, "mixup_off_epoch")
    draft.idle("mixup_off_epoch", "all epochs are mixed")


def _put_loss(draft: Draft) -> None:
    # train.py looks at --bce-loss only where targets are mixed or smoothed.
    if draft["bce_loss"] and (is_mixed(draft) or draft["smoothing"]):
        draft.put("train.loss", "bce", "bce_loss")
        if draft["bce_target_thresh"] is not None:
            draft.put("train.target_threshold", draft["bce_target_thresh"], "bce_target_thresh")
    else:
        draft.put("train.loss", "cross_entropy", "bce_loss")
        draft.idle("bce_target_thresh", "the loss is cross-entropy")
    draft.put("train.label_smoothing", draft["smoothing"], "smoothing")


def _put_validation(draft: Draft) -> None:
    if draft["train_split"] != "train":
        draft.refuse("train_split", "training images are in PATH/train, or in PATH")
    draft.idle("train_split", "training images are in PATH/train, or in PATH")
    split, every = draft["val_split"], epochs(draft, draft["val_interval"])
    if not split:
        draft.put("evaluate.every", "off", "val_split")
    elif split not in _HELD_OUT:
        draft.refuse("val_split", f"held-out images are in PATH/val or PATH/test; it is {', '.join(_HELD_OUT)}")
    else:
        if split == "validation" and draft.is_given("val_split"):
            draft.nearly("val_split", "a folder PATH/validation must be called PATH/val here")
        draft.put("evaluate.every", every, "val_interval")
    draft.put("checkpoint.every", every, "val_interval")
    draft.idle("val_split", "held-out images are in PATH/val or PATH/test")
