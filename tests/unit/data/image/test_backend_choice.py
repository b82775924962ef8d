"""The back-end is chosen by size and augmentation, with a reason; what it cannot do is refused by name."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from golden_sentences import raises
from PIL import Image

from paceline.data.image import pipeline as backend_choice
from paceline.data.image.datasets import ImageDataset, open_dataset
from paceline.data.image.image_store import StoreShape
from paceline.data.image.pipeline import choose_backend, choose_workers, open_backend
from paceline.data.image.source import SampleSource, SubsetSource, repeated
from paceline.data.image.transforms import View
from paceline.data.loaders.memory import MemoryBackend, SyntheticBackend
from paceline.data.loaders.pytorch import PytorchBackend
from paceline.data.slices import SampleSlice
from paceline.errors import RecipeError
from paceline.host.world import World
from paceline.recipe.data import Augment, Data, Progressive

RESIZED = Augment(crop="random_resized")


def cifar_like(count: int, size: int = 32) -> ImageDataset:
    """Describe many images without holding any."""
    digits = open_dataset(Data(dataset="digits", channels=3))
    many: SampleSource = SubsetSource(digits.train, np.zeros(count, dtype=np.int64))
    return replace(digits, name="cifar10", train=many, image_size=size, native_size=(size, size))


def test_small_images_go_to_memory() -> None:
    assert choose_backend(Data(dataset="cifar10"), cifar_like(60_000 - 359)) == (
        "memory",
        "60,000 images of 32x32x3 take 176 MiB",
    )


def test_random_resized_needs_files() -> None:
    name, reason = choose_backend(Data(dataset="cifar10", augment=RESIZED), cifar_like(100))
    assert name == "pytorch"
    assert "random_resized" in reason


def test_what_is_done_image_by_image_is_done_in_workers() -> None:
    for augment in (Augment(policy="randaugment"), Augment(erase=0.1)):
        name, reason = choose_backend(Data(dataset="cifar10", augment=augment), cifar_like(100))
        assert name == "pytorch"
        assert "single images" in reason


def test_noise_does_not_grow() -> None:
    growing = Progressive(start_size=16, end=3)
    assert choose_backend(Data(dataset="cifar10", progressive=growing), cifar_like(100))[0] == "memory"
    for backend in ("auto", "synthetic"):
        with raises(RecipeError, key="data.progressive.start_size", value=16):
            choose_backend(Data(dataset="synthetic", backend=backend, progressive=growing), cifar_like(100))


def test_too_many_images_are_read_in_workers() -> None:
    name, reason = choose_backend(Data(dataset="cifar10"), cifar_like(400_000))
    assert name == "pytorch"
    assert reason.endswith("more than 1.0 GiB")


@pytest.mark.parametrize("native", [None, (375, 500), (65, 65)])
def test_photographs_are_read_in_workers(native: tuple[int, int] | None) -> None:
    name, reason = choose_backend(Data(), replace(cifar_like(100), native_size=native))
    assert (name, reason) == ("pytorch", "images are not all of one size up to 64 pixels")


def test_the_recipes_choice_stands() -> None:
    assert choose_backend(Data(dataset="digits", backend="pytorch"), cifar_like(10)) == (
        "pytorch",
        "as the recipe says",
    )
    assert choose_backend(Data(dataset="digits", backend="synthetic"), cifar_like(10))[0] == "synthetic"


def test_synthetic() -> None:
    data = Data(dataset="synthetic", samples=10, classes=2, image_size=8)
    dataset = open_dataset(data)
    assert choose_backend(data, dataset)[0] == "synthetic"
    for backend in ("memory", "pytorch"):
        with pytest.raises(RecipeError, match=r"use data\.backend=synthetic"):
            choose_backend(replace(data, backend=backend), dataset)


def test_the_impossible_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"use data\.backend=pytorch, or data\.augment\.crop=pad"):
        choose_backend(Data(dataset="digits", backend="memory", augment=RESIZED), cifar_like(10))
    with pytest.raises(RecipeError, match="this machine has"):
        choose_backend(Data(dataset="digits", backend="memory"), cifar_like(10**6, size=4096))


def test_what_all_processes_hold_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its border and its mirror images, before any of it is taken."""
    varied = Augment(crop="pad", padding=4, flip=0.5)
    dataset = cifar_like(60_000 - 359)
    held = 2 * (60_000 - 359) * 40 * 40 * 3 + 120 + 359 * 32 * 32 * 3 + 96
    asked = Data(dataset="cifar10", backend="memory", augment=varied)
    monkeypatch.setattr(backend_choice, "memory_bytes", lambda: 4 * held)
    assert choose_backend(asked, dataset, 4)[0] == "memory"
    assert choose_backend(replace(asked, backend="auto"), dataset, 4)[0] == "memory"
    monkeypatch.setattr(backend_choice, "memory_bytes", lambda: 4 * held - 1)
    with pytest.raises(RecipeError) as refused:
        choose_backend(asked, dataset, 4)
    reason = "60,000 images of 32x32x3 take 176 MiB, 547 MiB in memory in each of 4 processes, and this machine has"
    assert str(refused.value) == f"data.backend is memory, but {reason} 2.1 GiB: use data.backend=pytorch."
    assert choose_backend(replace(asked, backend="auto"), dataset, 4) == ("pytorch", f"{reason} 2.1 GiB")


def test_a_gpu_holds_what_is_an_eighth_of_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = cifar_like(100)
    shape = StoreShape.of(Augment(flip=0.5), count=100, channels=3, size=32)
    assert shape.bytes == 2 * 100 * 3072 + 96
    gpu = torch.device("cuda")
    for total, augment, fits in (
        (8 * shape.bytes, Augment(flip=0.5), True),
        (8 * shape.bytes - 1, Augment(flip=0.5), False),
        (8 * shape.bytes, Augment(flip=0.5, erase=0.1), False),
    ):
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda _, total=total: SimpleNamespace(total_memory=total)
        )
        for repeats in (1, 3):
            source = repeated(dataset.train, repeats)
            shown = View(image_size=32, channels=3, augment=augment)
            assert backend_choice._fits_on_device(source, shown, gpu) is fits


def test_workers() -> None:
    assert choose_workers(Data(), "memory", World())[0] == 0
    assert choose_workers(Data(workers=3), "pytorch", World()) == (3, "as the recipe says")
    count, reason = choose_workers(Data(), "pytorch", World(local_world_size=1000, world_size=1000))
    assert count == 1
    assert "1000 processes" in reason
    assert 1 <= choose_workers(Data(), "pytorch", World())[0] <= 16


def test_only_training_images_are_varied(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(4):
            pixels = np.random.default_rng(number).integers(0, 256, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / name / f"{number}.png")
    data = Data(path=str(tmp_path), validation_fraction=0.5, augment=Augment(flip=1.0))
    dataset = open_dataset(data)
    piece = SampleSlice(step=0, epoch=0, logical_rank=0, ids=np.arange(4), step_weight=4)
    types = {"memory": MemoryBackend, "pytorch": PytorchBackend, "synthetic": SyntheticBackend}
    for name, kind in types.items():
        for split, source in (("train", dataset.train), ("validation", dataset.validation)):
            backend = open_backend(name, data, dataset, split, seed=0)
            assert isinstance(backend, kind)
            (batch,) = backend.batches([piece])
            backend.close()
            assert batch.targets.tolist() == source.labels.tolist()
            if name == "synthetic":
                continue
            for row in range(4):
                image = batch.inputs[row].permute(1, 2, 0).numpy()
                stored = source.read(row)
                assert np.array_equal(image, stored[:, ::-1] if split == "train" else stored)


class CountingThreads:
    """1,024 images of one colour, each read only when as many threads as expected are reading."""

    def __init__(self, threads: int) -> None:
        self.labels = np.zeros(1024, dtype=np.int64)
        self.readers: set[int] = set()
        self._together = threading.Barrier(threads, timeout=20)

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, sample: int) -> np.ndarray:
        if threading.get_ident() not in self.readers:
            self.readers.add(threading.get_ident())
            self._together.wait()
        return np.zeros((4, 4, 3), dtype=np.uint8)

    def path(self, sample: int) -> str:
        return str(sample)


@pytest.fixture
def torch_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 3])
def test_images_are_decoded_by_as_many_threads_as_this_process_has_cores(threads: int, torch_threads: None) -> None:
    torch.set_num_threads(threads)
    source = CountingThreads(threads)
    dataset = replace(cifar_like(10), train=source, image_size=4)
    open_backend("memory", Data(dataset="cifar10"), dataset, "train", seed=0).close()
    assert len(source.readers) == threads
