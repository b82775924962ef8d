"""Subsets of a data set: classes, some of the training images, and held-out images.

The same mechanism serves every kind of data set. The selection depends on the images' names and labels alone, and is
part of the data's digest. A split file records the names of held-out images, so that no image changes sides when others
are added. It is text: a header line, then one line per image: ``train`` or ``validation``, a tab and the name. The
first run writes it; later runs reject it if the digest in its first line does not match.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.data.image.dataset import (
    ImageDataset,
    describe_split,
    hold_out,
    strata,
    stratified_order,
    stratified_split,
)
from paceline.data.image.source import Hashes, Ids, SampleSource, SubsetSource, hashed_names, sample_names
from paceline.errors import DataError, RecipeError, data_error, did_you_mean, setting_error
from paceline.parsing.files import refuse_special_inputs
from paceline.parsing.plain_text import load_json, one_form
from paceline.recipe.data import Data

_HEAD = "paceline split 1"


def _saved_split(
    path: Path, names: Sequence[bytes], hashes: Hashes, initial: NDArray[np.bool_], fraction: float
) -> tuple[NDArray[np.bool_], str, str]:
    """Read a split file, or create it from the drawn split if it does not exist; return the held-out samples.

    Only one of several processes writes it. The hash of its name alone decides whether an image missing in the file is
    held out, so that it never changes sides either.

    Returns:
        The held-out mask, a description of the split, and the digest of the file's lines.

    Raises:
        DataError: If it can be neither read nor written, is damaged, belongs to another data set, or has no remaining
            images on one side.
        RecipeError: If it was written for another fraction.
    """
    is_new = not os.path.exists(path)
    if is_new:
        _write(path, names, initial, fraction)
    sides, written_for, sha256 = _read(path)
    if written_for != fraction:
        raise RecipeError(
            f"data.validation_fraction={fraction}, but the split file {str(path)!r} was written with {written_for}: "
            f"set data.validation_fraction={written_for}, or name another file in data.saved_split."
        )
    saved_sides = [sides.get(name) for name in names]
    new = np.array([each is None for each in saved_sides], dtype=bool)
    if len(names) and new.all():
        raise DataError(
            f"the split file {str(path)!r} lists none of the {len(names):,} images, such as "
            f"{names[0].decode()!r}: it belongs to another data set; name a new file in data.saved_split, which will "
            "be written."
        )
    held_out = np.array([bool(each) for each in saved_sides], dtype=bool)
    held_out[new] = hashes[new] < np.uint64(min(fraction * 2.0**64, 2.0**64 - 2048))
    for side, is_empty in (("training", held_out.all()), ("held-out", any(sides.values()) and not held_out.any())):
        if is_empty:
            raise DataError(
                f"none of the remaining images is a {side} one in the split file {str(path)!r} (data.saved_split): "
                "restore the images, or name a new file, which will be written."
            )
    removed = len(sides) - int((~new).sum())
    note = "keeps it from now on, written now" if is_new else "keeps it"
    parts = [f"as {str(path)!r} {note}: {int(held_out.sum()):,} of {len(names):,} images are held out"]
    parts += [f"{int(new.sum()):,} that it does not list are placed by their names"] if new.any() else []
    parts += [f"{removed:,} that it lists are gone"] if removed else []
    return held_out, "; ".join(parts), sha256


def _read(path: Path) -> tuple[dict[bytes, bool], float, str]:
    """Return the held-out flag of each image in a split file, the fraction, and the digest of its lines."""
    refuse_special_inputs(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"the split file {str(path)!r} cannot be read: {error.strerror}.") from None
    first, _, body = content.partition(b"\n")
    try:
        head = load_json(first)
        fraction, expected = float(head["fraction"]), str(head["sha256"])
        is_ours = head["file"] == _HEAD
    except (ValueError, LookupError, TypeError):
        is_ours = False
    if not is_ours:
        raise data_error(path, "is not a Paceline split file: name another file in data.saved_split.")
    actual = hashlib.sha256(body).hexdigest()
    if actual != expected:
        raise DataError(
            f"the split file {str(path)!r} has been changed since it was written (its lines' digest is "
            f"{actual[:12]}…, but its first line has {expected[:12]}…): restore it, or name another file in "
            "data.saved_split."
        )
    sides = (line.partition(b"\t") for line in body.splitlines())
    return {_unescaped(name): side == b"validation" for side, _, name in sides}, fraction, expected


def _write(path: Path, names: Sequence[bytes], held_out: NDArray[np.bool_], fraction: float) -> None:
    pairs = zip(held_out.tolist(), names, strict=True)
    escaped = (
        (side, name.replace(b"\\", b"\\\\").replace(b"\n", b"\\n").replace(b"\r", b"\\r")) for side, name in pairs
    )
    lines = b"".join(b"%s\t%s\n" % (b"validation" if held else b"train", name) for held, name in escaped)
    head = {
        "file": _HEAD,
        "fraction": fraction,
        "images": len(names),
        "held_out": int(held_out.sum()),
        "sha256": hashlib.sha256(lines).hexdigest(),
    }
    try:
        if not path.parent.is_dir():
            # A typo in the path would create a folder with a new split.
            raise DataError(
                f"there is no folder {str(path.parent)!r} for the split file (data.saved_split): create it, or correct "
                "the path."
            )
        # Not tempfile, whose files only the owner can read: all readers of the data need this one.
        partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        try:
            with open(partial, "xb") as file:
                file.write(json.dumps(head).encode() + b"\n" + lines)
                file.flush()
                os.fsync(file.fileno())
            with suppress(FileExistsError):  # another process was faster; its file is used
                os.link(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(
            f"the split file {str(path)!r} cannot be written ({error.strerror}): name one in a writable folder "
            "(data.saved_split)."
        ) from None


def _unescaped(name: bytes) -> bytes:
    if b"\\" not in name:
        return name
    parts = (part.replace(b"\\n", b"\n").replace(b"\\r", b"\r") for part in name.split(b"\\\\"))
    return b"\\".join(parts)


# Arbitrary and fixed: another salt gives another draw.
_VALIDATION, _HOLDOUT, _SUBSET = b"validation", b"holdout", b"subset"
_NAMED = 6
# Text that YAML parses, or may parse, as an integer.
_LIKE_A_NUMBER = re.compile(r"\s*[-+]?(0[xX][0-9a-fA-F_]+|0[bB][01_]+|0[oO][0-7_]+|[0-9][0-9_:.]*)\s*")


def select(data: Data, dataset: ImageDataset) -> ImageDataset:
    """Select the requested part of an opened data set.

    The order matters: the held-out images must not depend on the selected classes and number of images.

    Raises:
        RecipeError: If nothing, or no image of a class, would be left.
        DataError: If the file that keeps the split cannot be used.
    """
    dataset = _resplit(data, dataset)
    if data.holdout_fraction > 0:
        whole = dataset.train
        hashes = hashed_names(sample_names(whole), _HOLDOUT) if data.split_by == "name" else None
        ids, held_out = hold_out(whole.labels, data.holdout_fraction, hashes)
        if len(held_out) == 0:
            raise setting_error(
                "data.holdout_fraction",
                data.holdout_fraction,
                "holds nothing out: no class has two training images; leave it out.",
            )
        dataset = replace(dataset, train=SubsetSource(whole, ids), holdout=SubsetSource(whole, held_out))
    if data.only_classes is not None:
        if dataset.train.labels.ndim > 1:
            raise RecipeError("data.only_classes has no effect where images do not have one class each; leave it out.")
        dataset = _with_classes(data.only_classes, dataset)
    if data.subset is not None:
        train = stratified_subset(dataset.train, data.subset)
        description = f"{len(train):,} of {len(dataset.train):,} training images, of each class alike, always the same"
        dataset = replace(
            dataset,
            train=train,
            digest=digest_of(dataset.digest, "subset", train.ids),
            selection={**dataset.selection, "subset": len(train)},
            reasons={**dataset.reasons, "subset": description},
        )
    return dataset


def part_of(source: SampleSource, ids: Ids, labels: Ids | None = None) -> SubsetSource:
    """Return a subset of a source, with other classes if ``labels`` is given; subsets of subsets are flattened."""
    labels = source.labels[ids] if labels is None else labels
    if isinstance(source, SubsetSource):
        return SubsetSource(source.base, source.ids[ids], labels)
    return SubsetSource(source, ids, labels)


def relabelled(dataset: ImageDataset, labels: Callable[[Ids], NDArray[Any]]) -> ImageDataset:
    """Return the same images with a split's labels mapped by ``labels``."""

    def part(source: SampleSource) -> SubsetSource:
        return part_of(source, np.arange(len(source)), labels(source.labels))

    holdout = None if dataset.holdout is None else part(dataset.holdout)
    return replace(dataset, train=part(dataset.train), validation=part(dataset.validation), holdout=holdout)


def choose_classes(requested: Sequence[int | str], classes: Sequence[str], key: str = "data.only_classes") -> list[int]:
    """Return the indices of the classes requested by name or number, in the data's order.

    A number means the class of that name, if there is one, or else the class at that index, from 0. If names look like
    numbers, such as 01, it is never an index: otherwise 01 would select the second class.

    Raises:
        RecipeError: If a class is unknown or named twice, or there is only one.
    """
    numbers = {name: number for number, name in enumerate(classes)}
    numeric = next((name for name in classes if _LIKE_A_NUMBER.fullmatch(name)), None)
    chosen: list[int] = []
    spelled = one_form(map(str, requested), classes)
    for each in requested:
        number = numbers.get(spelled[str(each)], each)
        if numeric is not None and isinstance(each, int) and str(each) not in numbers:
            raise RecipeError(
                f"{key} names the number {each}, but classes have names like {numeric!r}, and none is called "
                f"{str(each)!r}: "
                f"write names in quotes, ['{numeric}', …]."
            )
        if not isinstance(number, int) or number >= len(classes):
            known = ", ".join(classes[:_NAMED]) + (", …" if len(classes) > _NAMED else "")
            raise RecipeError(
                f"{key} names {each!r}, but the data has the {len(classes)} classes {known}: give names of them, or "
                f"their numbers from 0.{did_you_mean(each, classes) if isinstance(each, str) else ''}"
            )
        if number in chosen:
            raise RecipeError(f"{key} names the class {classes[number]!r} twice: name it once.")
        chosen.append(number)
    if len(chosen) < 2:
        raise RecipeError(
            f"{key} names {'one class' if chosen else 'no class'}, but a classifier needs at least two: name more."
        )
    return sorted(chosen)


def stratified_subset(source: SampleSource, part: int | str, key: str = "data.subset") -> SubsetSource:
    """Return a number or share of the images, stratified by class, in source order.

    Raises:
        RecipeError: If there are fewer images, or a class would be left empty.
    """
    total = len(source)
    count = round(total * float(part[:-1]) / 100) if isinstance(part, str) else part
    nonempty = len(np.unique(strata(source.labels)))
    if count > total:
        raise RecipeError(f"{key}={part}, but there are {total:,} images: ask for fewer, or for all with off.")
    if count < nonempty:
        raise setting_error(
            key,
            part,
            f"is {count:,} of {total:,} images, which leaves some of the {nonempty:,} classes empty: take at least "
            f"{nonempty:,}.",
        )
    order = stratified_order(source.labels, hashed_names(sample_names(source), _SUBSET))
    return part_of(source, np.sort(order[:count]))


def digest_of(base: str, *parts: object) -> str:
    """Return the digest of a subset of a data set."""
    hashed = [hashlib.sha256(each.tobytes()).hexdigest() if isinstance(each, np.ndarray) else each for each in parts]
    return hashlib.sha256(json.dumps([base, *hashed]).encode()).hexdigest()


def _resplit(data: Data, dataset: ImageDataset) -> ImageDataset:
    """Redo the split if the recipe uses more than the default split by order."""
    if not dataset.is_split_off:
        why = dataset.reasons.get("validation_fraction", "the data has its own split")
        return replace(dataset, reasons={**dataset.reasons, "split_by": why, "saved_split": why})
    if data.split_by == "order" and data.saved_split is None:
        return dataset
    assert isinstance(dataset.train, SubsetSource)  # a split-off data set consists of two parts of one source
    source, fraction = dataset.train.base, data.validation_fraction
    names = sample_names(source)
    hashes = hashed_names(names, _VALIDATION)
    ids = stratified_split(source.labels, fraction, hashes=hashes if data.split_by == "name" else None)
    description = describe_split(fraction) + (
        ", drawn by the images' names (data.split_by)" if data.split_by == "name" else ""
    )
    facts: dict[str, object] = {}
    if data.saved_split is not None:
        held_out = np.zeros(len(source), dtype=bool)
        held_out[ids[1]] = True
        held_out, description, sha256 = _saved_split(Path(data.saved_split), names, hashes, held_out, fraction)
        ids = np.flatnonzero(~held_out), np.flatnonzero(held_out)
        facts = {"split_file_sha256": sha256}
    return replace(
        dataset,
        train=part_of(source, ids[0]),
        validation=part_of(source, ids[1]),
        digest=digest_of(dataset.digest, "held out", ids[1]),
        selection={**dataset.selection, **facts},
        reasons={**dataset.reasons, "validation": description},
    )


def take_classes(
    requested: Sequence[int | str],
    classes: Sequence[str],
    splits: Mapping[str, SampleSource],
    key: str = "data.only_classes",
) -> tuple[tuple[str, ...], dict[str, SubsetSource]]:
    """Select the images of some classes in every split; return the class names and the subsets.

    Args:
        requested: Names or numbers of the classes.
        classes: All classes of the data.
        splits: The images by display name of the split, training images first.
        key: The recipe key, for the message.

    Raises:
        RecipeError: If a class does not exist, or a non-empty split or a training class would become empty.
    """
    chosen = choose_classes(requested, classes, key)
    names = tuple(classes[number] for number in chosen)
    numbers = np.full(len(classes), -1, dtype=np.int64)
    numbers[chosen] = np.arange(len(chosen))
    parts = {}
    for name, source in splits.items():
        labels = numbers[source.labels]
        ids = np.flatnonzero(labels >= 0)
        parts[name] = part_of(source, ids, labels[ids])
        if len(ids) == 0 < len(source):
            raise setting_error(
                key,
                list(requested),
                f"leaves no {name} images: none is of these classes; take others.",
            )
    if empty := sorted(set(range(len(chosen))) - set(next(iter(parts.values())).labels.tolist())):
        raise RecipeError(f"{key} names {names[empty[0]]!r}, which has no training image: leave it out.")
    return names, parts


def _with_classes(requested: Sequence[int | str], dataset: ImageDataset) -> ImageDataset:
    splits = {"training": dataset.train, "held-out": dataset.validation}
    if dataset.holdout is not None:
        splits["holdout"] = dataset.holdout
    names, parts = take_classes(requested, dataset.classes, splits)
    train = parts["training"]
    description = f"{len(names):,} of {len(dataset.classes):,} classes: {', '.join(names[:_NAMED])}"
    return replace(
        dataset,
        train=train,
        validation=parts["held-out"],
        holdout=parts.get("holdout"),
        classes=names,
        digest=digest_of(dataset.digest, "only classes", names, train.ids),
        selection={**dataset.selection, "only_classes": list(names)},
        reasons={**dataset.reasons, "only_classes": description + (", …" if len(names) > _NAMED else "")},
    )


def keep_known_classes(dataset: ImageDataset, known_classes: Sequence[str]) -> ImageDataset:
    """Return the same images with the class numbers of the weights, which include all classes of the data set."""
    places = {name: place for place, name in enumerate(known_classes)}
    spelled = one_form(dataset.classes, known_classes).values()
    numbers = np.array([places[name] for name in spelled])
    present = set(spelled)
    missing = [name for name in known_classes if name not in present]
    named = ", ".join(missing[:_NAMED]) + (", …" if len(missing) > _NAMED else "")
    note = f"{len(missing)} of the {len(known_classes)} classes of the weights have no images: {named}"

    def known_labels(labels: NDArray[Any]) -> NDArray[Any]:
        if labels.ndim == 1:
            return np.asarray(numbers[labels])
        columns: NDArray[Any] = np.zeros((len(labels), len(known_classes)), dtype=labels.dtype)
        columns[:, numbers] = labels
        return columns

    result = relabelled(dataset, known_labels)
    return replace(result, classes=tuple(known_classes), left_out=(*dataset.left_out, *([note] if missing else [])))
