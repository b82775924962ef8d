"""One process with several logical ranks: what is added up, what starts anew for each, and what must not move."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from paceline.distributed.collectives import Collectives
from paceline.distributed.exact import ExactDataParallel
from paceline.distributed.strategy import ControlFlags, MicroBatch
from paceline.host.world import World

SIZES = [5, 5, 4, 4]  # a ragged step of 18 samples in four logical ranks


class Net(nn.Module):
    """BatchNorm, a buffer that never changes, weights of two data types, and one tensor with other strides."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(4)
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        self.head = nn.Linear(4, 2)
        self.register_buffer("table", torch.tensor([0.1, 1 / 3]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.norm(self.conv(x)).relu().mean((2, 3)) * self.scale.float()
        return self.head(features) + self.table


def images() -> list[torch.Tensor]:
    drawn = torch.randn(sum(SIZES), 3, 6, 6, generator=torch.Generator().manual_seed(1))
    return list(drawn.split(SIZES))


def loss_of(network: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(network(x), torch.arange(len(x)) % 2)


def take_step(
    strategy: ExactDataParallel, network: nn.Module, ask: Callable[[], ControlFlags] = ControlFlags
) -> torch.Tensor:
    total = sum(SIZES)
    for rank, x in enumerate(images()):
        with strategy.micro_batch(MicroBatch(rank, total, len(x), is_last=rank == 3, logical_ranks=4)):
            share = loss_of(network, x) * (len(x) / total)
            strategy.with_vote(share, ask, is_last=rank == 3).backward()
    return strategy.combine()


@pytest.fixture
def pair() -> tuple[Net, ExactDataParallel]:
    network = Net()
    return network, ExactDataParallel(network, network, Collectives(World()))


def test_gradients_and_losses_are_those_of_plain_accumulation(pair: tuple[Net, ExactDataParallel]) -> None:
    network, strategy = pair
    plain, losses = Net(), 0.0
    for _ in range(2):  # the second step reuses the first one's memory
        losses, samples = take_step(strategy, network).tolist()
    expected = 0.0
    for x in images():
        loss = loss_of(plain, x)
        (loss * (len(x) / sum(SIZES))).backward()
        expected += loss.item() * len(x)
    assert samples == sum(SIZES)
    assert losses == pytest.approx(expected, rel=1e-6)
    for (name, mine), theirs in zip(network.named_parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        assert mine.grad.dtype == theirs.dtype
        assert mine.grad.stride() == mine.stride(), name
        tolerance = 1e-2 if mine.dtype == torch.bfloat16 else 1e-6
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=tolerance, atol=tolerance)


def test_statistics_take_the_mean_over_logical_ranks_once_per_step(pair: tuple[Net, ExactDataParallel]) -> None:
    network, strategy = pair
    take_step(strategy, network)
    means = []
    for x in images():
        single = Net()
        single(x)
        means.append(single.norm.running_mean * (len(x) / sum(SIZES)))
    torch.testing.assert_close(network.norm.running_mean, torch.stack(means).sum(0), rtol=1e-6, atol=1e-7)
    assert network.norm.num_batches_tracked.item() == 1
    take_step(strategy, network)
    assert network.norm.num_batches_tracked.item() == 2


def test_a_buffer_that_nothing_changes_keeps_its_bits(pair: tuple[Net, ExactDataParallel]) -> None:
    network, strategy = pair
    before = network.table.clone()
    for _ in range(5):
        take_step(strategy, network)
    assert torch.equal(network.table, before)


def test_every_logical_rank_starts_from_the_steps_own_buffers(pair: tuple[Net, ExactDataParallel]) -> None:
    network, strategy = pair
    seen = []
    for rank, x in enumerate(images()):
        with strategy.micro_batch(MicroBatch(rank, sum(SIZES), len(x), is_last=rank == 3, logical_ranks=4)):
            seen.append(network.norm.running_mean.clone())
            loss_of(network, x).backward()
    strategy.combine()
    assert all(torch.equal(each, seen[0]) for each in seen)


def test_a_micro_batch_without_samples_counts_for_nothing(pair: tuple[Net, ExactDataParallel]) -> None:
    """Three samples for four logical ranks: the fourth forwards one of them, in vain."""
    network, strategy = pair
    (x, *_), gradients = images(), []
    for phantom in (False, True):
        for rank in range(4 if phantom else 3):
            with strategy.micro_batch(MicroBatch(rank, 3, 1 if rank < 3 else 0, logical_ranks=4)):
                share = loss_of(network, x[rank : rank + 1] if rank < 3 else x[:1]) / 3
                strategy.with_vote(share, ControlFlags, is_last=True).backward()
        losses, samples = strategy.combine().tolist()
        assert samples == 3
        gradients.append([losses, *(each.grad.clone() for each in network.parameters())])
        network.load_state_dict(Net().state_dict())
    assert gradients[0][0] == gradients[1][0]
    assert all(torch.equal(a, b) for a, b in zip(gradients[0][1:], gradients[1][1:], strict=True))


def test_a_parameter_that_was_frozen_since_has_no_gradient(pair: tuple[Net, ExactDataParallel]) -> None:
    """An optimizer would let it decay."""
    network, strategy = pair
    frozen = next(network.parameters()).requires_grad_(False)
    take_step(strategy, network)
    assert frozen.grad is None
    assert all(each.grad is not None for each in network.parameters() if each.requires_grad)


def test_the_vote_is_heard_once_the_step_is_combined(pair: tuple[Net, ExactDataParallel]) -> None:
    network, strategy = pair
    assert strategy.agreed(ControlFlags()) == ControlFlags()
    for flags in (ControlFlags(), ControlFlags(stop=True), ControlFlags(save=True), ControlFlags()):
        take_step(strategy, network, lambda flags=flags: flags)
        assert strategy.agreed(ControlFlags()) == flags


def test_a_wish_that_comes_up_in_the_backward_pass_is_heard_in_the_same_step(
    pair: tuple[Net, ExactDataParallel],
) -> None:
    network, strategy = pair
    sequence = [ControlFlags()]
    for flags in (ControlFlags(), ControlFlags(stop=True), ControlFlags()):
        hook = next(network.parameters()).register_hook(lambda _, flags=flags: sequence.append(flags))
        take_step(strategy, network, lambda: sequence[-1])
        hook.remove()
        assert strategy.agreed(ControlFlags()) == flags


def test_memory_is_bounded_by_the_logarithm_of_the_logical_ranks() -> None:
    network = Net()
    strategy = ExactDataParallel(network, network, Collectives(World()))
    x = images()[0]
    for _ in range(2):
        for rank in range(64):
            with strategy.micro_batch(MicroBatch(rank, 64 * 5, 5, is_last=rank == 63, logical_ranks=64)):
                (loss_of(network, x) / 64).backward()
        strategy.combine()
    assert len(strategy._free) + 1 <= 8  # log2(64) partial sums, one at work, one to hand on


class Awkward(Net):
    """Also a mask of infinities, a buffer that is replaced, and a number that depends on the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
        self.register_buffer("centre", torch.zeros(2))
        self.register_buffer("bright", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer = super().forward(x)
        self.centre = 0.5 * self.centre + answer.detach().mean(0)
        self.bright = self.bright + (x > 0).sum()
        return answer + self.mask.exp()


def test_buffers_that_cannot_be_averaged_end_as_the_first_logical_rank_leaves_them() -> None:
    network, first = Awkward(), Awkward()
    strategy = ExactDataParallel(network, network, Collectives(World()))
    for _ in range(2):
        take_step(strategy, network)
        first(images()[0])
        assert network.bright == first.bright
    assert torch.equal(network.mask, torch.tensor([0.0, -torch.inf]))


def test_a_buffer_that_is_replaced_is_averaged_and_stays_the_same_tensor() -> None:
    network = Awkward()
    buffer = network.centre
    take_step(ExactDataParallel(network, network, Collectives(World())), network)
    assert network.centre is buffer
    parts = []
    for x in images():
        single = Awkward()
        single(x)
        parts.append(single.centre * (len(x) / sum(SIZES)))
    torch.testing.assert_close(network.centre, torch.stack(parts).sum(0), rtol=1e-6, atol=1e-7)


def test_a_micro_batch_whose_images_were_all_broken_has_no_loss(pair: tuple[Net, ExactDataParallel]) -> None:
    """Its mean over nothing is no number, and must not become the step's."""
    network, strategy = pair
    x, *_ = images()
    for rank in range(4):
        weight = 0 if rank == 1 else len(x)
        with strategy.micro_batch(MicroBatch(rank, 20, weight, is_last=rank == 3, logical_ranks=4)):
            share = loss_of(network, x) * (float("nan") if rank == 1 else weight / 20)
            strategy.with_vote(share, ControlFlags, is_last=rank == 3)
    losses, samples = strategy.combine().tolist()
    assert samples == 15
    assert losses > 0


def test_a_mark_on_any_logical_rank_is_the_steps(pair: tuple[Net, ExactDataParallel]) -> None:
    network, strategy = pair
    (x, *_), heard = images(), []
    for marked in (None, 0, 3, None):
        for rank in range(4):
            with strategy.micro_batch(MicroBatch(rank, 20, 5, is_last=rank == 3, logical_ranks=4)):
                mark = torch.tensor(float(rank == marked))
                loss = strategy.with_vote(loss_of(network, x), ControlFlags, is_last=rank == 3, nonfinite=mark)
                loss.backward()
        strategy.combine()
        heard.append(strategy.nonfinite().item() > 0)
        assert not strategy.agreed(ControlFlags()).stop
    assert heard == [False, True, True, False]
