"""The speed runs' network: it begins from the training images by a pure function, and near the identity."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from paceline.checkpoint.weights import read_weights
from paceline.errors import ModelError
from paceline.models.build import build_model
from paceline.models.speed_net import SpeedNet, Whitening, speed_net, whitening_filters
from paceline.recipe.model import ModelSection


def pictures(count: int = 64, side: int = 12, channels: int = 3) -> torch.Tensor:
    """Images whose neighbouring pixels are alike, with a mean that is not 0."""
    generator = torch.Generator().manual_seed(3)
    rough = torch.randn(count, channels, side + 4, side + 4, generator=generator)
    return functional.avg_pool2d(rough, 5, stride=1) * 4 + 0.3


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("patch", [2, 3])
def test_filters_come_with_their_negatives(channels: int, patch: int) -> None:
    images, size = pictures(channels=channels), channels * patch**2
    layer = Whitening(channels, patch)
    layer.begin_from(images)
    assert layer.weight.shape == (2 * size, channels, patch, patch)
    assert torch.equal(layer.weight[:size], whitening_filters(images, patch))
    assert torch.equal(layer.weight[size:], -layer.weight[:size])


def test_filters_are_the_eigenvectors_over_the_root_of_eigenvalue_and_eps() -> None:
    """Jordan 2024, written out patch by patch."""
    images = pictures(count=8, side=6)
    rows = [image[:, y : y + 2, x : x + 2].flatten().double() for image in images for y in range(5) for x in range(5)]
    patches = torch.stack(rows)
    values, vectors = torch.linalg.eigh(patches.T @ patches / len(patches))
    filters = whitening_filters(images, 2).flatten(1).double()
    for mine, value, vector in zip(filters, values.flip(0), vectors.T.flip(0), strict=True):
        theirs = vector / (value + 5e-4).sqrt()
        assert min((mine - theirs).abs().max(), (mine + theirs).abs().max()) < 1e-4
        assert mine[mine.abs().argmax()] > 0


def test_the_signs_do_not_depend_on_the_linear_algebra(monkeypatch: pytest.MonkeyPatch) -> None:
    images, usual = pictures(), torch.linalg.eigh
    expected = whitening_filters(images, 2)
    monkeypatch.setattr(torch.linalg, "eigh", lambda matrix: (usual(matrix)[0], -usual(matrix)[1]))
    assert torch.equal(whitening_filters(images, 2), expected)


def test_images_without_patches_or_numbers_are_refused() -> None:
    assert whitening_filters(torch.ones(4, 3, 8, 8), 2).isfinite().all()  # all alike they will do
    with pytest.raises(ModelError, match="finds no patches for its initialisation in 4 images of 1 x 1"):
        whitening_filters(torch.zeros(4, 3, 1, 1), 2)
    with pytest.raises(ModelError, match="not finite"):
        whitening_filters(torch.full((4, 3, 8, 8), torch.nan), 2)


def test_convolutions_begin_by_handing_inputs_through() -> None:
    torch.manual_seed(0)
    for block in speed_net(10, 3, widths=(32, 48)).blocks:
        for conv in block.convs:
            x = torch.randn(2, conv.in_channels, 5, 5)
            torch.testing.assert_close(conv(x)[:, : conv.in_channels], x[:, : conv.out_channels])


@pytest.mark.parametrize("side", [8, 20, 31, 32])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_it_takes_small_images_of_any_size(side: int, depth: int) -> None:
    network = speed_net(7, 1, widths=(8, 12, 16), depth=depth)
    assert network(torch.randn(2, 1, side, side)).shape == (2, 7)


def test_a_third_convolution_is_added_to_the_first() -> None:
    (block,) = speed_net(10, 3, widths=(32,), depth=3).eval().blocks
    block.norms[2].weight.data.zero_()
    x = torch.randn(2, 24, 8, 8)
    first = functional.gelu(block.norms[0](functional.max_pool2d(block.convs[0](x), 2)))
    torch.testing.assert_close(block(x), functional.gelu(first))


def test_the_first_answers_are_small() -> None:
    torch.manual_seed(0)
    plain, scaled = speed_net(10, 3), speed_net(10, 3, logit_scale=1 / 9)
    assert isinstance(plain, SpeedNet)
    assert plain.logit_scale == 1 / 256
    assert plain.head.weight.std().item() == pytest.approx(1)
    assert scaled.head.weight.abs().max() <= 1 / 16
    assert plain(torch.randn(4, 3, 32, 32)).abs().max() < 1


WRONG = [("widths", []), ("widths", [0, 4]), ("widths", 64), ("depth", 4), ("patch", 5), ("activation", "silu")]


@pytest.mark.parametrize(("option", "value"), WRONG)
def test_options_out_of_range_are_refused(option: str, value: Any) -> None:
    with pytest.raises(ModelError, match=f"model.options.{option}=.*speed_net needs"):
        build_model(ModelSection(name="speed_net", options={option: value}), num_classes=10, in_channels=3)


OF_DIGITS = {
    "model": {"name": "speed_net", "options": {"widths": [8, 8]}, "frozen": ["whitening.weight"]},
    "checkpoint": {"every": "1 steps", "keep": 10},
    "train.duration": "4 steps",
}


def first_filters(run: Any) -> torch.Tensor:
    return read_weights(run.run_dir / "checkpoints" / "step-00000001", "model").state["whitening.weight"]


def test_a_run_begins_from_its_images_whatever_its_seed_and_goes_on_with_the_same(tmp_path: Any) -> None:
    import paceline
    from paceline.data.image.datasets import open_dataset
    from paceline.recipe.data import Data

    def train(name: str, **overrides: Any) -> Any:
        asked = {**OF_DIGITS, **overrides}
        return paceline.train("digits", overrides=asked, run_dir=tmp_path / name, quiet=True)

    found = open_dataset(Data(dataset="digits"))
    images = torch.stack([torch.from_numpy(found.train.read(each).copy()) for each in range(len(found.train))])
    normalised = (images.permute(0, 3, 1, 2).float() / 255 - found.mean[0]) / found.std[0]
    expected = whitening_filters(normalised, 2)  # fewer digits are there than are taken
    whole = train("whole")
    torch.testing.assert_close(first_filters(whole)[:4], expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(first_filters(train("other", seed=5)), first_filters(whole))
    train("pieces", **{"train.until": "2 steps"})
    pieces = train("pieces")
    assert pieces.summary.resumes == 1
    assert pieces.summary.weights_sha256 == whole.summary.weights_sha256
    last = read_weights(whole.run_dir / "checkpoints" / "step-00000004", "model").state
    assert torch.equal(last["whitening.weight"], first_filters(whole))
    assert not torch.equal(last["whitening.bias"], torch.zeros(8))


def test_weights_that_are_scored_need_no_images(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    import paceline
    from paceline.inference.predict import load_predictor

    run = paceline.train("digits", overrides=OF_DIGITS, run_dir=tmp_path / "run", quiet=True)

    def never(*_: Any) -> None:
        raise AssertionError("the training images were asked for")

    monkeypatch.setattr(Whitening, "begin_from", never)
    assert load_predictor(run.run_dir) is not None
