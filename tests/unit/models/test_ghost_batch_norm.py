"""Groups of a micro-batch are normalised as micro-batches of their own would be, and nothing else changes."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from paceline.errors import ModelError, RecipeError
from paceline.models.transfer import groups_of, normalise_in_groups
from paceline.plan.batching import with_valid_ghost_size
from paceline.recipe.model import ModelSection


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.BatchNorm1d(64))


def images(count: int) -> torch.Tensor:
    return torch.randn(count, 2, 6, 6, generator=torch.Generator().manual_seed(count))


def grouped(samples: int, make: Callable[[], nn.Module] = network) -> nn.Module:
    changed = make()
    normalise_in_groups(changed, samples, name="mine")
    return changed


@pytest.mark.parametrize("channels_last", [False, True])
def test_groups_are_what_micro_batches_of_that_size_are(channels_last: bool) -> None:
    plain, ghosts, given = network(), grouped(4), images(12)
    if channels_last:
        given = given.contiguous(memory_format=torch.channels_last)
    wanted = torch.cat([plain(part) for part in given.split(4)])
    found = ghosts(given)
    torch.testing.assert_close(found, wanted)
    wanted.square().mean().backward()
    found.square().mean().backward()
    for mine, theirs in zip(ghosts.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    # The running statistics too: the paper's weights are those of one update for each group.
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(ghosts.get_buffer(name), buffer)


def test_evaluation_and_names_are_as_before() -> None:
    plain, ghosts, given = network(), grouped(4), images(12)
    assert list(ghosts.state_dict()) == list(plain.state_dict())
    ghosts.load_state_dict(plain.state_dict())
    assert torch.equal(ghosts.eval()(given), plain.eval()(given))
    assert all(isinstance(mine, type(theirs)) for mine, theirs in zip(ghosts.modules(), plain.modules(), strict=True))


def test_a_norm_with_an_activation_of_its_own() -> None:
    from timm.layers.norm_act import BatchNormAct2d

    torch.manual_seed(0)
    plain, given = BatchNormAct2d(2), images(8)
    ghosts = copy.deepcopy(plain)
    normalise_in_groups(ghosts, 4, name="norm")
    torch.testing.assert_close(ghosts(given), torch.cat([plain(part) for part in given.split(4)]))
    assert ghosts(given).min() == 0  # its activation is done too


@pytest.mark.parametrize(
    ("samples", "group", "wanted"),
    [(64, 16, 4), (29, 16, 2), (17, 16, 2), (16, 16, 1), (3, 2, 1), (5, 2, 2), (1, 8, 1)],
)
def test_an_epochs_last_micro_batch_is_cut_into_nearly_equal_groups(samples: int, group: int, wanted: int) -> None:
    assert groups_of(samples, group) == wanted


def test_it_is_computed_in_bf16_and_compiled() -> None:
    ghosts, given = grouped(4), images(12)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ghosts(given).isfinite().all()
    wanted = copy.deepcopy(ghosts)(given)
    torch.testing.assert_close(torch.compile(ghosts, backend="eager", fullgraph=True)(given), wanted)


def test_networks_that_cannot_are_refused() -> None:
    with pytest.raises(ModelError, match=r"ghost_batch_norm=4 has no effect: model.name=mine has no BatchNorm"):
        grouped(4, lambda: nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(ModelError, match=r"has SyncBatchNorm \(1\)"):
        grouped(4, lambda: nn.SyncBatchNorm.convert_sync_batchnorm(network()))


# ------------------------------------------------------------------------------------------------------- in a run
def test_a_run_with_large_batches_is_one_that_accumulates_small_ones(train_tiny: Any, weights: Any) -> None:
    """Everything but BatchNorm sees a batch at once, and must come to the same weights."""
    task_sees = {"batch.global_size": 26, "train.ema": 0.9, "optimizer.lr": 0.01}
    large = train_tiny("large", {**task_sees, "model.ghost_batch_norm": 13})
    small = train_tiny("small", {**task_sees, "batch.micro_size": 13})
    plain = train_tiny("plain", task_sees)
    for which in ("model", "ema"):
        mine, theirs, other = (weights(each, which) for each in (large, small, plain))
        assert mine.keys() == theirs.keys()
        for name, tensor in mine.items():
            torch.testing.assert_close(tensor, theirs[name], rtol=1e-3, atol=1e-4)
        assert any(not torch.allclose(tensor.float(), other[name].float(), atol=1e-3) for name, tensor in mine.items())


def test_an_exact_run_groups_within_its_logical_ranks(train_tiny: Callable[..., Any]) -> None:
    exact = {"parallel.exact": True, "parallel.logical_ranks": 2, "batch.global_size": 16}
    with_ghosts = train_tiny("a", {**exact, "model.ghost_batch_norm": 4})
    again = train_tiny("b", {**exact, "model.ghost_batch_norm": 4})
    without = train_tiny("c", exact)
    assert with_ghosts.summary.weights_sha256 == again.summary.weights_sha256 != without.summary.weights_sha256


@pytest.mark.parametrize(
    ("asked", "micro", "wanted"),
    [(8, 16, 8), (8, 4, 2), (8, 8, 4), (32, 12, 6), (8, 7, None), (4, 2, None), (4, 1, None)],
)
def test_a_trial_of_another_size_has_groups_that_fit(asked: int, micro: int, wanted: int | None) -> None:
    assert with_valid_ghost_size(ModelSection(ghost_batch_norm=asked), micro).ghost_batch_norm == wanted
    assert with_valid_ghost_size(ModelSection(), micro) == ModelSection()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"model.ghost_batch_norm": 5}, "does not divide the micro-batches of 16 samples that 1 process has"),
        ({"model.ghost_batch_norm": 16}, "no micro-batch has more than 16 samples"),
        ({"model.ghost_batch_norm": 4, "model.name": "lecture_net", "model.options": {}}, "has no BatchNorm"),
    ],
)
def test_what_has_no_meaning_is_refused(train_tiny: Callable[..., Any], overrides: dict[str, Any], said: str) -> None:
    with pytest.raises((ModelError, RecipeError), match=re.escape(said)):
        train_tiny("refused", overrides)
