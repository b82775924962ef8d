"""Data parallelism as the step calls it, in a process group of one: gradients, the vote, and the network's names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.distributed.collectives import Collectives
from paceline.distributed.data_parallel import DataParallel, has_training_buffers
from paceline.distributed.strategy import VOTE_LAG, ControlFlags, FlagReader, MicroBatch, SingleProcess
from paceline.host.world import World
from paceline.recipe.running import Parallel

CPU = torch.device("cpu")


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Collectives]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield Collectives(World())
    torch.distributed.destroy_process_group()


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def test_gradients_of_accumulated_micro_batches_are_the_plain_ones(group: Collectives) -> None:
    ours, plain = net(), net()
    strategy = DataParallel(ours, ours, group, CPU, parallel=Parallel(bucket_cap_mb=1))
    batches = torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        ours.zero_grad(set_to_none=True)
        plain.zero_grad(set_to_none=True)
        for index, batch in enumerate(batches):
            last = index == 2
            with strategy.micro_batch(MicroBatch(index, 18, 6, is_last=last)):
                loss = strategy.model(batch).square().mean() / 3
                strategy.with_vote(loss, ControlFlags, is_last=last).backward()
            (plain(batch).square().mean() / 3).backward()
        for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-6, atol=1e-7)


def test_the_vote_is_heard_at_once_and_forgotten_when_withdrawn(group: Collectives) -> None:
    network = net()
    strategy = DataParallel(network, network, group, CPU, parallel=Parallel())
    batch = torch.randn(6, 4)
    assert not strategy.agreed(ControlFlags()).stop
    for flags in (
        ControlFlags(),
        ControlFlags(stop=True),
        ControlFlags(save=True),
        ControlFlags(),
        ControlFlags(stop=True, save=True),
    ):
        loss = strategy.model(batch).square().mean()
        strategy.with_vote(loss, lambda flags=flags: flags, is_last=True).backward()
        assert strategy.agreed(ControlFlags()) == flags


def test_a_wish_that_comes_up_in_the_backward_pass_is_heard_in_the_same_step(group: Collectives) -> None:
    network, sequence = net(), [ControlFlags()]
    strategy = DataParallel(network, network, group, CPU, parallel=Parallel())
    first = next(network.parameters())
    for flags in (ControlFlags(), ControlFlags(stop=True), ControlFlags()):
        # The last gradient of the network itself.
        hook = first.register_hook(lambda _, flags=flags: sequence.append(flags))
        loss = strategy.model(torch.randn(6, 4)).square().mean()
        strategy.with_vote(loss, lambda: sequence[-1], is_last=True).backward()
        hook.remove()
        assert strategy.agreed(ControlFlags()) == flags


def test_a_network_may_be_called_in_between_without_a_gradient(group: Collectives) -> None:
    """A teacher's part, or a trial: only the passes that the loss comes of carry the votes."""
    network, batch = net(), torch.randn(6, 4)
    strategy = DataParallel(network, network, group, CPU, parallel=Parallel())
    for _ in range(2):
        loss = strategy.model(batch).square().mean() + strategy.model(-batch).square().mean()
        with torch.no_grad():
            strategy.model(batch)
        strategy.with_vote(loss, lambda: ControlFlags(save=True), is_last=True).backward()
        assert strategy.agreed(ControlFlags()) == ControlFlags(save=True)


def test_the_vote_leaves_the_loss_and_the_network_alone(group: Collectives) -> None:
    network = net()
    names, tensors = set(network.state_dict()), [parameter.clone() for parameter in network.parameters()]
    strategy = DataParallel(network, network, group, CPU, parallel=Parallel())
    loss = strategy.model(torch.randn(6, 4)).square().mean()
    assert strategy.with_vote(loss, lambda: ControlFlags(stop=True), is_last=True).item() == loss.item()
    assert strategy.with_vote(loss, lambda: ControlFlags(stop=True), is_last=False) is loss
    assert set(network.state_dict()) == names
    assert all(torch.equal(a, b) for a, b in zip(tensors, network.parameters(), strict=True))
    strategy.sync_buffers([network])


class Copied:
    """An event of a device that is done when it is waited for, not before."""

    def __init__(self, host: torch.Tensor) -> None:
        self.host, self.shown = host, host.clone()

    def record(self) -> None:
        self.shown = self.host.clone()
        self.host.fill_(torch.nan)

    def synchronize(self) -> None:
        self.host.copy_(self.shown)


def test_a_late_vote_is_read_after_the_same_number_of_steps_from_a_ring_of_slots() -> None:
    made: list[Copied] = []

    def slot() -> tuple[torch.Tensor, Copied]:
        made.append(Copied(torch.zeros(2)))
        return made[-1].host, made[-1]

    votes = FlagReader(CPU, count=2, make_slot=slot)
    stops = [False, True, False, False, True, True, False, False, False]
    sequence = list(zip(stops, reversed(stops), strict=True))
    heard = []
    assert votes.agreed() == (False, False)
    for flags in sequence:
        votes.push(torch.tensor(flags).float())
        heard.append(votes.agreed())
    assert heard == [(False, False)] * VOTE_LAG + sequence[:-VOTE_LAG]
    assert len(made) == VOTE_LAG + 1


class Codebook(nn.Module):
    """A buffer that training moves and reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.zeros(3))


@pytest.mark.parametrize(
    ("network", "expected"),
    [
        (nn.Linear(2, 2), False),
        (net(), False),
        (nn.Sequential(nn.InstanceNorm2d(3, track_running_stats=True), nn.BatchNorm2d(3)), False),
        (Codebook(), True),
        (nn.Sequential(nn.BatchNorm1d(3), Codebook()), True),
        (nn.utils.spectral_norm(nn.Linear(2, 2)), True),
    ],
    ids=["none", "batch norm", "norms", "own", "own beside a norm", "spectral norm"],
)
def test_statistics_of_norms_are_no_training_buffers_and_all_others_are(network: nn.Module, expected: bool) -> None:
    assert has_training_buffers(network) is expected


@pytest.mark.parametrize("kind", ["alone", "ddp"])
def test_a_mark_on_any_micro_batch_is_the_steps_and_is_forgotten_after_it(group: Collectives, kind: str) -> None:
    network = net()
    strategy = (
        SingleProcess(network, network)
        if kind == "alone"
        else DataParallel(network, network, group, CPU, parallel=Parallel())
    )
    batch, heard = torch.randn(6, 4), []
    for marked in (None, 0, 1, None):
        for index in range(2):
            last = index == 1
            with strategy.micro_batch(MicroBatch(index, 12, 6, is_last=last)):
                loss = strategy.model(batch).square().mean() * (float("nan") if index == marked else 1)
                mark = torch.tensor(float(index == marked))
                strategy.with_vote(loss, ControlFlags, is_last=last, nonfinite=mark).backward()
        strategy.combine()
        heard.append(strategy.nonfinite().item() > 0)
        assert not strategy.agreed(ControlFlags()).stop
    assert heard == [False, True, True, False]
