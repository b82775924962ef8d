"""What DALI cannot do is refused by name; without it, the reason and the command that installs it are shown."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from paceline.data.image.datasets import ImageDataset, open_dataset
from paceline.data.image.pipeline import available_backends, choose_backend, choose_workers, open_backend
from paceline.errors import RecipeError
from paceline.host.world import World
from paceline.recipe.data import Augment, Data, Jitter
from paceline_ops.dali.choice import import_problem


def files(tmp_path: Path) -> ImageDataset:
    """Two classes of two images each, as files."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(2):
            Image.new("RGB", (8, 8)).save(tmp_path / name / f"{number}.jpg")
    return open_dataset(Data(path=str(tmp_path), validation_fraction=0.5))


@pytest.mark.parametrize(
    ("augment", "named"),
    [
        (Augment(policy="randaugment"), "data.augment.policy"),
        (Augment(jitter=Jitter(hue=0.1), erase=0.5), "data.augment.jitter, data.augment.erase"),
        (Augment(vertical_flip=0.5), "data.augment.vertical_flip"),
        (Augment(grayscale=0.5, blur=0.1), "data.augment.grayscale, data.augment.blur"),
    ],
)
def test_what_dali_lacks_is_refused_by_name(augment: Augment, named: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=rf"asks for {named}: use data\.backend=pytorch, or leave that out\.$"):
        choose_backend(Data(backend="dali", path="…", augment=augment), files(tmp_path))


def test_dali_wants_files() -> None:
    with pytest.raises(RecipeError, match=r"data\.dataset=cifar10 has none: use another data\.backend"):
        choose_backend(Data(dataset="cifar10", backend="dali"), open_dataset(Data(dataset="digits")))
    with pytest.raises(RecipeError, match=r"use data\.backend=synthetic"):
        choose_backend(Data(dataset="synthetic", backend="dali"), open_dataset(Data(dataset="digits")))


def test_without_dali_the_reason_and_the_command_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    monkeypatch.delitem(sys.modules, "nvidia.dali.fn", raising=False)
    told = r"cannot be used here \(.*nvidia\.dali.*\): run pip install .*dali.*pytorch\.$"
    with pytest.raises(RecipeError, match=told):
        choose_backend(Data(backend="dali", path="…"), files(tmp_path))
    assert "pip install" in available_backends()["dali"]


@pytest.mark.skipif(bool(import_problem()), reason=f"needs DALI: {import_problem()}")
def test_dali_reads_files_in_threads(tmp_path: Path) -> None:
    dataset = files(tmp_path)
    data = Data(backend="dali", path="…", workers=3)
    assert choose_backend(data, dataset) == ("dali", "as the recipe says")
    assert available_backends()["dali"] == "available"
    assert choose_workers(data, "dali", World()) == (3, "as the recipe says")
    assert choose_workers(Data(backend="dali"), "dali", World())[0] >= 1
    with pytest.raises(RecipeError, match=r"data\.workers=0, but the dali back-end decodes in its own threads"):
        choose_workers(Data(backend="dali", workers=0), "dali", World())
    if not torch.cuda.is_available():
        with pytest.raises(RecipeError, match=r"data\.decode_on=gpu, but no CUDA device is visible"):
            choose_backend(Data(backend="dali", decode_on="gpu"), dataset)
    shifted = Data(backend="dali", decode_on="gpu", augment=Augment(crop="pad"))
    with pytest.raises(RecipeError, match=r"crop=pad shifts images on the CPU: use data\.decode_on=cpu"):
        choose_backend(shifted, dataset)
    with pytest.raises(RecipeError, match=r"data\.decode_on=gpu, but the model is on the cpu"):
        open_backend("dali", Data(backend="dali", decode_on="gpu"), dataset, "train", seed=0, workers=1)
