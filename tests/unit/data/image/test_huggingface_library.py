"""What the real `datasets` library writes is read as it reads it itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from paceline.data.image.datasets import ImageDataset, open_dataset
from paceline.data.image.source import SampleSource
from paceline.errors import DataError
from paceline.plugins.dataset_registry import detect_dataset
from paceline.recipe.data import Data

hub = pytest.importorskip("datasets", reason="needs datasets")

LABELS = ["cat", "dog", "owl"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("files")
    for number in range(12):
        pixels = np.random.default_rng(number).integers(0, 256, (9, 10 + number % 2, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(root / f"{number:02}.png")
    return sorted(str(path) for path in root.iterdir())


@pytest.fixture(scope="module")
def whole(files: list[str]) -> Any:
    features = hub.Features({"id": hub.Value("int64"), "image": hub.Image(), "label": hub.ClassLabel(names=LABELS)})
    columns = {"id": list(range(12)), "image": files, "label": [number % 3 for number in range(12)]}
    return hub.Dataset.from_dict(columns, features=features)


def opened(path: Path, kind: str = "huggingface", **keys: Any) -> ImageDataset:
    return open_dataset(Data(dataset=kind, path=str(path), **keys))


def same(source: SampleSource, theirs: Any) -> bool:
    pixels = [np.asarray(row["image"].convert("RGB")) for row in theirs]
    images = all(np.array_equal(source.read(sample), each) for sample, each in enumerate(pixels))
    return images and source.labels.tolist() == theirs["label"][:] and len(source) == len(theirs)


def test_save_to_disk(tmp_path: Path, whole: Any) -> None:
    """In several files, and of a set that was shuffled, filtered and cut before."""
    chosen = whole.shuffle(seed=1).filter(lambda row: row["id"] != 5).select(range(9))
    chosen.save_to_disk(tmp_path / "a", num_shards=2)
    found = opened(tmp_path / "a", validation_fraction=0)
    assert found.classes == tuple(LABELS)
    assert same(found.train, hub.load_from_disk(str(tmp_path / "a")))
    part = opened(tmp_path / "a", subset=4, only_classes=("owl", "cat"), validation_fraction=0, split_by="name")
    assert (part.classes, len(part.train)) == (("cat", "owl"), 4)


def test_splits(tmp_path: Path, whole: Any) -> None:
    splits = whole.train_test_split(test_size=0.25, seed=0)
    splits.save_to_disk(tmp_path / "b")
    found = opened(tmp_path / "b")
    assert same(found.train, splits["train"])
    assert same(found.validation, splits["test"])
    assert found.reasons["validation"] == "the split test"


@pytest.mark.parametrize("kind", ["huggingface", "parquet"])
def test_parquet_as_on_the_hub(tmp_path: Path, whole: Any, kind: str, files: list[str]) -> None:
    splits = whole.train_test_split(test_size=0.25, seed=0)
    (tmp_path / "data").mkdir()
    for name, each in splits.items():
        for index in range(2):
            # As push_to_hub does it: the images go into the table.
            shard = each.shard(2, index, contiguous=True).map(
                lambda row: {"image": {"bytes": Path(files[row["id"]]).read_bytes(), "path": f"{row['id']}.png"}},
                features=each.features,
            )
            shard.to_parquet(tmp_path / "data" / f"{name}-{index:05}-of-00002.parquet", batch_size=3)
    assert detect_dataset(str(tmp_path)) == "huggingface"
    found = opened(tmp_path, kind)
    assert (found.classes, found.train.path(0).split(" in ")[0]) == (tuple(LABELS), f"{splits['train'][0]['id']}.png")
    assert same(found.train, splits["train"])
    assert same(found.validation, splits["test"])


def test_a_name_on_the_hub_is_no_folder(tmp_path: Path) -> None:
    with pytest.raises(
        DataError,
        match=r"data\.path=hf://datasets/cats/dogs, if it is stored as parquet; another is saved with "
        r"`datasets.load_dataset\('cats/dogs'\).save_to_disk\('FOLDER'\)` in Python",
    ):
        opened(tmp_path / "cats" / "dogs")


def test_columns_are_named(tmp_path: Path, whole: Any, files: list[str]) -> None:
    features = hub.Features({**whole.features, "thumbnail": hub.Image()})
    columns = {"id": list(range(12)), "image": files[::-1], "label": whole["label"][:], "thumbnail": files}
    hub.Dataset.from_dict(columns, features=features).save_to_disk(tmp_path / "c")
    with pytest.raises(DataError, match=r"has 2 columns of images.*data.image_column"):
        opened(tmp_path / "c")
    assert same(opened(tmp_path / "c", image_column="thumbnail", validation_fraction=0).train, whole)
    with pytest.raises(DataError, match=r"has no column 'thumb' \(data.image_column\).* Did you mean 'thumbnail'"):
        opened(tmp_path / "c", image_column="thumb")
