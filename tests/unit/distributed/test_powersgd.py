"""Gradients as products of thin matrices: what is kept, what is lost and made up for, and what is remembered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from paceline.distributed.collectives import Collectives
from paceline.distributed.powersgd import PowerSgd
from paceline.world import World


@dataclass
class Bucket:
    """What DDP hands over, in one process."""

    pairs: list[tuple[nn.Parameter, torch.Tensor]]

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter, _ in self.pairs]

    def gradients(self) -> list[torch.Tensor]:
        return [gradient for _, gradient in self.pairs]

    def buffer(self) -> torch.Tensor:
        return self.pairs[0][1]


NETWORK = nn.Sequential(nn.Conv2d(8, 16, 3), nn.Linear(32, 48)).to(memory_format=torch.channels_last)
FILTER, MATRIX, BIAS = NETWORK[0].weight, NETWORK[1].weight, NETWORK[1].bias


def compression(rank: int = 2, world: World | None = None) -> PowerSgd:
    made = PowerSgd(NETWORK, Collectives(world or World()), rank=rank, start_step=0)
    made.begin_step()
    return made


def sent(made: PowerSgd, parameter: Any, gradient: torch.Tensor) -> torch.Tensor:
    """What becomes of a gradient."""
    copy = gradient.clone(memory_format=torch.preserve_format)
    made.hook(Bucket([(parameter, copy)]))
    return copy


def test_a_gradient_of_low_rank_arrives_whole() -> None:
    gradient = torch.randn(48, 2) @ torch.randn(2, 32)
    torch.testing.assert_close(sent(compression(rank=2), MATRIX, gradient), gradient, rtol=1e-4, atol=1e-4)


def test_vectors_and_small_matrices_arrive_as_they_are() -> None:
    gradient = torch.randn(48)
    assert torch.equal(sent(compression(), BIAS, gradient), gradient)
    wide = torch.randn(48, 32)
    assert torch.equal(sent(compression(rank=16), MATRIX, wide), wide)


@pytest.mark.parametrize(("parameter", "shape"), [(MATRIX, (48, 32)), (FILTER, (16, 8, 3, 3))])
def test_what_is_lost_is_made_up_for(parameter: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Over many steps of one gradient, the sum of what arrives is that of what was sent, but for one step's loss."""
    made, gradient = compression(), torch.randn(shape)
    if len(shape) == 4:
        gradient = gradient.contiguous(memory_format=torch.channels_last)
    arrived = torch.stack([sent(made, parameter, gradient) for _ in range(60)])
    assert not torch.allclose(arrived[0], gradient, rtol=0.1)
    off = (arrived.mean(dim=0) - gradient).norm() / gradient.norm()
    assert off < 0.5
    lost = torch.cat([each.reshape(-1) for each in made._errors.values()])
    total = arrived.double().sum(dim=0).reshape(-1) + lost.double()
    torch.testing.assert_close(total, 60 * gradient.double().reshape(-1), rtol=1e-3, atol=1e-3)


def test_a_restored_one_goes_on_to_the_bit() -> None:
    torch.manual_seed(0)
    gradients = [torch.randn(48, 32) for _ in range(6)]
    whole, part = compression(), compression()
    expected = [sent(whole, MATRIX, each) for each in gradients]
    for each in gradients[:3]:
        sent(part, MATRIX, each)
    part.gather()
    resumed = compression()
    resumed.load_state_dict(part.state_dict())
    assert all(torch.equal(sent(resumed, MATRIX, g), e) for g, e in zip(gradients[3:], expected[3:], strict=True))


def test_a_changed_world_keeps_the_mean_of_what_was_lost() -> None:
    """Gradients are means over the processes, and so is what is added to them."""
    errors = {str(rank): {"1.weight": torch.full((48, 32), float(rank))} for rank in range(4)}
    made = compression(world=World(world_size=2, rank=1, local_rank=1, local_world_size=2))
    made.load_state_dict({"steps": 9, "factors": {}, "errors": errors})
    assert torch.equal(made._errors["1.weight"], torch.full((48, 32), (0.0 + 1 + 2 + 3) / 4))


def test_another_rank_begins_with_new_factors() -> None:
    made = compression(rank=2)
    sent(made, MATRIX, torch.randn(48, 32))
    other = compression(rank=3)
    other.load_state_dict(made.state_dict())
    sent(other, MATRIX, torch.randn(48, 32))
    assert other._factors["1.weight"].shape == (32, 3)


def test_a_rehearsal_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.distributed import powersgd

    monkeypatch.setattr(powersgd.default_hooks, "allreduce_hook", lambda *_: None)
    made = PowerSgd(NETWORK, Collectives(World()), rank=2, start_step=0)
    sent(made, MATRIX, torch.randn(48, 32))
    assert made.state_dict() == {"steps": 0, "factors": {}, "errors": {}}
