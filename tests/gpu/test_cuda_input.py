"""Input on a GPU: images held there, batches made and mixed on a side stream, and nobody waits for them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from paceline.data.batch import Batch, Normalize, Placement, pinned, to_device
from paceline.data.image.datasets import ImageDataset, open_dataset
from paceline.data.image.pipeline import open_backend
from paceline.data.image.transforms import Mixing
from paceline.data.loaders.memory import MemoryBackend
from paceline.data.order import StepGeometry
from paceline.host.world import World
from paceline.recipe.data import Augment, Data, Mix

pytestmark = pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
VARIED = Augment(crop="pad", padding=1, padding_mode="reflect", flip=0.5)
MIX = Mix(mixup=0.4, cutmix=1.0)


@pytest.fixture(scope="module")
def digits() -> ImageDataset:
    return open_dataset(Data(dataset="digits"))


def stream(
    digits: ImageDataset, device: str, *, augment: Augment = VARIED, backend: str = "memory", mix: Mix = MIX
) -> Iterator[Batch]:
    """Two epochs of training batches on a device."""
    placement = Placement(device=torch.device(device), channels_last=True)
    data = Data(dataset="digits", augment=augment, mix=mix)
    opened = open_backend(backend, data, digits, "train", seed=3, placement=placement, workers=0)
    geometry = StepGeometry(seed=3, samples=len(digits.train), global_batch_size=64, logical_ranks=1)
    steps = 2 * geometry.epochs.phases[0].steps_per_epoch
    raw = opened.batches(geometry.stream(0, steps, World()))
    mixing = Mixing(mix, len(digits.classes), seed=3)
    finish = mixing if mixing.is_active else None
    return to_device(raw, Normalize(digits.mean, digits.std, placement), placement, finish)


@pytest.mark.parametrize("backend", ["memory", "pytorch"])
def test_batches_equal_the_cpu_s(digits: ImageDataset, backend: str) -> None:
    ours, reference = stream(digits, "cuda", backend=backend), stream(digits, "cpu")
    for mine, other in zip(ours, reference, strict=True):
        assert np.array_equal(mine.ids, other.ids)
        torch.testing.assert_close(mine.inputs.cpu(), other.inputs, rtol=0, atol=1e-6)
        torch.testing.assert_close(mine.targets.cpu(), other.targets, rtol=0, atol=1e-6)


@pytest.mark.parametrize("channels_last", [True, False])
def test_bytes_are_the_cpu_s_to_the_bit(digits: ImageDataset, channels_last: bool) -> None:
    geometry = StepGeometry(seed=1, samples=len(digits.train), global_batch_size=100, logical_ranks=1)

    def batches(device: str) -> Iterator[Batch]:
        placement = Placement(device=torch.device(device), channels_last=channels_last)
        data = Data(dataset="digits", augment=VARIED)
        opened = open_backend("memory", data, digits, "train", seed=1, placement=placement)
        return opened.batches(geometry.stream(0, 30, World()))

    for mine, other in zip(batches("cuda"), batches("cpu"), strict=True):
        assert mine.inputs.device.type == "cuda"  # held there, not copied from the host
        assert torch.equal(mine.inputs.cpu(), other.inputs)
        assert mine.targets.tolist() == other.targets.tolist()


def test_batches_are_right_while_the_device_lags_behind(digits: ImageDataset) -> None:
    """The host runs far ahead: a batch must neither be used before it is made nor be overwritten while it is used."""
    busy = torch.randn(2048, 2048, device="cuda")
    sums = []
    for batch in stream(digits, "cuda"):
        for _ in range(20):
            busy = busy @ busy
            busy /= busy.norm()
        sums.append((batch.inputs.double().sum(), batch.targets.double().sum()))
    expected = [(batch.inputs.double().sum(), batch.targets.double().sum()) for batch in stream(digits, "cpu")]
    for mine, other in zip(sums, expected, strict=True):
        assert torch.allclose(torch.stack(mine).cpu(), torch.stack(other), rtol=1e-5, atol=1e-2)


def test_no_batch_waits_for_the_device(digits: ImageDataset) -> None:
    batches = stream(digits, "cuda")
    for _ in range(3):
        next(batches)  # the first of a shape brings its factors to the device
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in zip(range(20), batches, strict=False):
            pass
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_what_does_not_fit_is_held_in_page_locked_memory(digits: ImageDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.data.image.pipeline.LARGEST_SHARE_OF_DEVICE", 0.0)
    placement = Placement(device=torch.device("cuda"), channels_last=True)
    opened = open_backend(
        "memory", Data(dataset="digits", augment=VARIED), digits, "train", seed=3, placement=placement
    )
    assert isinstance(opened, MemoryBackend)
    geometry = StepGeometry(seed=3, samples=len(digits.train), global_batch_size=64, logical_ranks=1)
    batch = pinned(next(opened.batches(geometry.stream(0, 1, World()))), placement.device)
    assert batch.inputs.is_pinned()
    reference = next(stream(digits, "cpu", mix=Mix()))
    normalize = Normalize(digits.mean, digits.std, placement)
    torch.testing.assert_close(normalize(batch.inputs.cuda()).cpu(), reference.inputs, rtol=0, atol=1e-6)
