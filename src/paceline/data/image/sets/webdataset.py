"""WebDataset tars: members with the same name up to its first dot are one sample.

``000123.jpg`` with ``000123.cls`` (the label as a number, or a class name), or with ``000123.json`` that has the key
``label`` or ``cls``. Images are read in place from the tars by random access: the run's order is not the tars'. Member
positions are read once from the members' headers, and cached. A compressed tar does not support random access and is
rejected.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np

from paceline.data.image.dataset import DatasetRequest, StoredImages, file_splits
from paceline.data.image.mapped import ByteRanges, MappedBytes, MappedFile, MappedSource, mapped_files
from paceline.data.image.sets import FILES, IMAGENET
from paceline.data.image.source import EXTENSIONS, NameArray
from paceline.data.image.tar_index import TarIndex, index_tar
from paceline.data.labels import as_label, number_classes
from paceline.data.splits import TRAIN, held_out_among, split_of
from paceline.data.tables import files_ending_in
from paceline.errors import DataError, data_error
from paceline.parsing.files import SkippedItems, has_extension, is_ignored_member
from paceline.parsing.plain_text import load_json
from paceline.plugins.dataset_registry import Place, dataset

_LABELS = ("label", "cls")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_DOTTED = "images with a dot in their names, where the name of a WebDataset sample ends (rename them)"
_OTHER = "members that are neither an image nor a label of one"


_PACKED = frozenset({".gz", ".tgz", ".bz2", ".xz", ".zst"})


def _holds_tars(place: Place) -> bool:
    """Whether it is a tar, or holds some; compressed ones are refused when it is opened."""
    return not place.is_folder or ".tar" in place.endings or (bool(place.endings) and place.endings <= _PACKED)


@dataset(
    "webdataset",
    endings=(".tar",),
    sniff=_holds_tars,
    keys=FILES,
    size=IMAGENET,
)
def open_webdataset(request: DatasetRequest) -> StoredImages:
    """Index WebDataset tars, and probe the headers of a few images.

    ``data.path`` is a tar, a pattern (``train-{000..146}.tar``, ``*.tar``), or a folder of tars. In a folder, tars with
    ``train``, ``val``, ``validation`` or ``test`` as a word in their name belong to that split.

    Raises:
        DataError: If there are no such tars, or one is damaged, or a sample has no label.
    """
    left_out = SkippedItems()
    train_tars, held_out_tars, held_out = _splits(request.path, left_out)
    digest = hashlib.sha256()
    parts = [_read(tars, left_out, digest) for tars in (train_tars, held_out_tars) if tars]
    said = [each for _, _, each in parts]
    classes, labels = number_classes(said, str(request.path), one_class=request.data.score_all)
    return file_splits(
        request,
        [MappedSource(content, each, 3, names) for (content, names, _), each in zip(parts, labels, strict=True)],
        held_out,
        classes=classes,
        digest=digest.hexdigest(),
        left_out=left_out.summaries(),
    )


def expand(pattern: str) -> list[str]:
    """Expand ``{000..010}`` and ``{a,b}`` in a pattern, in order."""
    pieces = re.split(r"\{([^{}]*)\}", pattern)
    choices = []
    for index, piece in enumerate(pieces):
        if index % 2 == 0:
            choices.append([piece])
        elif (match := _RANGE.fullmatch(piece)) is not None:
            choices.append([str(number).zfill(len(match[1])) for number in range(int(match[1]), int(match[2]) + 1)])
        else:
            choices.append(piece.split(","))
    return ["".join(chosen) for chosen in product(*choices)]


def _splits(root: Path, left_out: SkippedItems) -> tuple[list[Path], list[Path], str]:
    """Return the training tars, the held-out ones, and a description of the split."""
    if not root.is_dir():
        return _tars(str(root)), [], ""
    tars = files_ending_in("tar", root, left_out)
    if not tars:
        raise data_error(
            root,
            "contains no .tar files: correct the path, or decompress them, because images are read in place from tars.",
        )
    by_split: dict[str, list[Path]] = {}
    for tar in tars:
        by_split.setdefault(split_of(tar.relative_to(root)) or "", []).append(tar)
    if set(by_split) == {""}:
        return tars, [], ""
    if TRAIN not in by_split or "" in by_split:
        reason = f"{by_split[''][0].name!r} says neither train nor val nor test" if "" in by_split else "none is train"
        raise data_error(
            root,
            f"has tars of several splits, but {reason}: rename the tars (train-000.tar, val-000.tar), or give a "
            "pattern of those to train on.",
        )
    held_out = held_out_among(by_split)
    unread = [name for name in by_split if name not in (TRAIN, held_out)]
    told = f"the {held_out} tars{f'; those of {unread[0]} are not read' if unread else ''}" if held_out else ""
    return by_split[TRAIN], by_split.get(held_out or "", []), told


def _tars(pattern: str) -> list[Path]:
    found: list[Path] = []
    # A name may contain brackets or braces itself.
    for written in [pattern] if os.path.exists(pattern) else expand(pattern):
        matches = [written] if os.path.exists(written) else sorted(glob.glob(written))
        if not matches:
            raise DataError(f"{pattern!r} names {written!r}, which does not exist: correct the path.")
        found += map(Path, matches)
    if len({os.path.realpath(each) for each in found}) < len(found) or not found:
        raise DataError(f"{pattern!r} names {'a tar twice' if found else 'no tar'}: correct the pattern.")
    return found


def _read(
    tars: Sequence[Path], left_out: SkippedItems, digest: hashlib._Hash
) -> tuple[MappedBytes, NameArray, list[int | str]]:
    """Return the images' positions, names and labels as written."""
    files = mapped_files(tars)
    names: list[str] = []
    labels: list[int | str] = []
    rows: list[tuple[int, int, int]] = []
    for number, file in enumerate(files):
        index = index_tar(file)  # one at a time: the members of thousands of tars take much memory
        samples = _samples(file, index, left_out)
        names += [index.names.text(image) for image, _ in samples]
        labels += [_label(index, members, f"{index.names.text(image)} in {file.path}") for image, members in samples]
        rows += [(number, int(index.begin[image]), int(index.length[image])) for image, _ in samples]
    if not rows:
        unread = " ".join(f"{each}." for each in left_out.summaries())
        raise DataError(
            f"{str(tars[0])!r}{' and the others hold' if len(tars) > 1 else ' holds'} no images: expected members "
            f"like 000001.jpg and 000001.cls (images end in {', '.join(EXTENSIONS)}). {unread}".rstrip()
        )
    table = np.array(rows, dtype=np.int64)
    ranges = ByteRanges(file=table[:, 0].copy(), begin=table[:, 1].copy(), length=table[:, 2].copy())
    found = NameArray.of(names)
    for sample, label in enumerate(labels):
        digest.update(f"{found.text(sample)}\0{ranges.length[sample]}\0{label}\n".encode())
    digest.update(b"\0")
    return MappedBytes(files, ranges), found, labels


def _samples(file: MappedFile, index: TarIndex, left_out: SkippedItems) -> list[tuple[int, dict[str, int]]]:
    """Yield each image's member index, and the member indices of its sample by extension."""
    groups: dict[str, dict[str, int]] = {}
    for member in range(len(index.names)):
        path = index.names.text(member).removeprefix("./")
        folder, _, name = path.rpartition("/")
        stem, _, suffix = name.partition(".")
        if not stem or is_ignored_member(path):
            continue
        members = groups.setdefault(f"{folder}/{stem}", {})
        if suffix.lower() in members:
            first_name, second_name = index.names.text(members[suffix.lower()]), index.names.text(member)
            first_dot = "which are one sample's (its name ends at the first dot, whatever the case)"
            both = (
                f"{first_name!r} twice"
                if first_name == second_name
                else f"both {first_name!r} and {second_name!r}, {first_dot}"
            )
            raise data_error(file.path, f"holds {both}, so the sample is ambiguous: give each sample its own name.")
        members[suffix.lower()] = member
    result = []
    for key, members in groups.items():
        images = [suffix for suffix in members if suffix in EXTENSIONS]
        if len(images) > 1:
            raise DataError(f"{file.path!r}: {key.removeprefix('/')!r} has {len(images)} images, but one is expected.")
        result += [(members[suffix], members) for suffix in images]
        used = (*images, "cls" if "cls" in members else "json") if images else ()
        for suffix, member in members.items():
            if suffix not in used:
                reason = _DOTTED if has_extension(suffix, EXTENSIONS) else _OTHER
                left_out.add(reason, index.names.text(member))
    for number in range(len(index.special)):
        if not is_ignored_member(index.special.text(number).removeprefix("./")):
            left_out.add("links and special files in tars", index.special.text(number))
    return result


def _label(index: TarIndex, members: dict[str, int], name: str) -> int | str:
    if "cls" in members:
        try:
            return as_label(index.labels[members["cls"]].decode("utf-8-sig").strip(), name)
        except UnicodeDecodeError:
            raise DataError(f"{name!r}: its .cls is not in UTF-8; write it again in that encoding.") from None
    if "json" in members:
        try:
            tree = load_json(index.labels[members["json"]])
        except ValueError as error:
            raise DataError(f"{name!r}: its .json cannot be read ({error}).") from error
        values = [tree[key] for key in _LABELS if key in tree] if isinstance(tree, dict) else []
        if values:
            return as_label(values[0], name)
    raise DataError(
        f"{name!r} has no label: expected a member with the same name and .cls, or .json with the key "
        f"{' or '.join(map(repr, _LABELS))}. An archive of class folders must be unpacked."
    )
