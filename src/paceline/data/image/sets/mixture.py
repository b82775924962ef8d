"""Mixtures: several image folders and tables as one data set, sampled by ratio in each epoch."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np

from paceline.data.image.dataset import DatasetRequest, Probe, Problems, StoredImages
from paceline.data.image.sets import TABLE
from paceline.data.image.source import ImageFiles, JoinedSource, SampleSource, SubsetSource
from paceline.errors import DataError, RecipeError, did_you_mean, setting_error
from paceline.parsing.files import visible_entries
from paceline.plugins.dataset_registry import dataset, dataset_at, entries, find_dataset


@dataset("mixture", keys=(*TABLE, "split_column", "mixture"))
def open_mixture(request: DatasetRequest) -> StoredImages:
    """Open each set in ``data.mixture`` and join their splits. Classes with the same name are merged.

    Raises:
        DataError: If a set is missing, or cannot be read.
        RecipeError: If there is only one set, or only one class in total.
    """
    ratios = request.data.mixture
    if request.several_labels:
        raise setting_error("data.dataset", "mixture", "joins images of one class each: use task=image_classification.")
    if len(ratios) < 2:
        problem = f"names {next(iter(ratios))!r} only" if ratios else "names no set"
        raise RecipeError(
            f"data.dataset=mixture, and data.mixture {problem}: give two sets or more with their ratios, for example "
            "data.mixture={photos: 3, more: 1}; for one set, give data.dataset=image_folder and its path."
        )
    parts = {name: _open(request, name) for name in ratios}
    opened = list(parts.values())
    kinds = {each.classes for each in opened}
    classes = kinds.pop() if len(kinds) == 1 else tuple(sorted({name for each in kinds for name in each}))
    if len(classes) < 2:
        raise RecipeError(
            f"the sets of data.mixture have one class in all, {classes[0]!r}, but a classifier needs at least two: add "
            "a set with another."
        )
    places = {name: place for place, name in enumerate(classes)}
    channels = request.channels or max(each.channels for each in opened)  # grey images are converted to colour

    def joined(sources: Sequence[SampleSource]) -> JoinedSource:
        for each in sources:
            cast(ImageFiles, each.base if isinstance(each, SubsetSource) else each).channels = channels
        numbers = [np.array([places[name] for name in each.classes], dtype=np.int64) for each in opened]
        labels = [number[each.labels] for number, each in zip(numbers, sources, strict=True)]
        return JoinedSource(dict(zip(parts, sources, strict=True)), np.concatenate(labels))

    train: SampleSource = joined([each.train for each in opened])
    validation: SampleSource = joined([each.validation for each in opened])
    is_split_off = all(each.is_split_off for each in opened)
    if is_split_off:
        # Parts of one source, so that `data.split_by` and `data.saved_split` can redo the split.
        pairs = [(cast(SubsetSource, each.train), cast(SubsetSource, each.validation)) for each in opened]
        source = joined([first.base for first, _ in pairs])
        train, validation = (
            SubsetSource(
                source, np.concatenate([offset + each.ids for offset, each in zip(source.starts, split, strict=True)])
            )
            for split in zip(*pairs, strict=True)
        )
    sizes = {each.probe.size for each in opened}
    facts = [(name, ratio / sum(ratios.values()), parts[name].digest) for name, ratio in ratios.items()]
    return StoredImages(
        train=train,
        validation=validation,
        classes=classes,
        digest=hashlib.sha256(json.dumps(facts).encode()).hexdigest(),
        split=opened[0].split if is_split_off else "",
        is_split_off=is_split_off,
        channels=channels,
        probe=Probe(
            count=sum(each.probe.count for each in opened),
            size=sizes.pop() if len(sizes) == 1 else None,
            greyscale=all(each.probe.greyscale for each in opened),
        ),
        listing="; ".join(
            f"{name}: {each.listing}" + ("" if is_split_off else f"; held out: {each.split}")
            for name, each in parts.items()
        ),
        left_out=tuple(f"{name}: {sentence}" for name, each in parts.items() for sentence in each.left_out),
        left_out_counts=sum((Counter(each.left_out_counts) for each in opened), Counter()),
    )


def _open(request: DatasetRequest, name: str) -> StoredImages:
    path = request.path / name
    entry = find_dataset("image_folder") if path.is_dir() else dataset_at(path)
    if entry is None or not path.exists() or not (path.is_dir() or entry.uses("label_column")):
        endings = (ending for each in entries("images") if each.uses("label_column") for ending in each.endings)
        raise DataError(
            f"data.mixture names {name!r}, but {str(request.path)!r} (data.path) has no folder of class folders and no "
            f"table ({', '.join(endings)}) of that name: correct it."
            + did_you_mean(name, [each.name for each in visible_entries(request.path)] if request.path.is_dir() else ())
        )
    problems = request.problems if request.tolerant else Problems()
    problems.allows_one_class = True  # others may have more
    data = replace(request.data, dataset=entry.name, path=str(path), mixture={})
    opened = entry.open(replace(request, data=data, problems=problems))
    assert isinstance(opened, StoredImages)
    return opened
