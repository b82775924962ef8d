"""What a world of one does: the collectives are the identity, and one process has nothing to agree on."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from paceline.distributed.collectives import Collectives, join, leave
from paceline.distributed.device import (
    available_devices,
    check_communication,
    choose_device,
    describe_machine,
    reserve_deterministic_workspace,
)
from paceline.distributed.environment import LaunchEnvironment, read_launch
from paceline.distributed.strategy import ControlFlags, MicroBatch, SingleProcess
from paceline.errors import DataError, LaunchError, RecipeError
from paceline.host.world import World
from paceline.recipe.load import load_recipe
from paceline.trainer.train import plan_only

CPU = torch.device("cpu")


def test_collectives_are_the_identity() -> None:
    alone = Collectives(World())
    tensor = torch.tensor([1.0, 2.0])
    assert alone.reduce_sum(tensor) is tensor
    assert alone.broadcast([1]) == [1]
    assert alone.gather("x") == ["x"]
    assert alone.on_rank_zero(lambda: 3) == 3
    alone.broadcast_tensors([tensor])
    alone.barrier()


def test_an_error_on_the_first_rank_is_that_error() -> None:
    def fail() -> None:
        raise DataError("no such data")

    with pytest.raises(DataError, match="no such data"):
        Collectives(World()).on_rank_zero(fail)


def test_no_process_group_is_formed_alone() -> None:
    assert join(read_launch({}), CPU).world == World()
    assert not torch.distributed.is_initialized()
    leave()


def test_one_process_votes_for_itself() -> None:
    network = nn.Linear(2, 2)
    strategy = SingleProcess(network, network)
    assert strategy.model is network
    loss = torch.ones(())
    with strategy.micro_batch(MicroBatch(0, 8, 4, is_last=False)):
        assert strategy.with_vote(loss, ControlFlags, is_last=True) is loss
    # Asked during the backward pass, it need not wait for another step.
    for flags in (ControlFlags(), ControlFlags(stop=True), ControlFlags(save=True)):
        assert strategy.agreed(flags) == flags
    strategy.sync_buffers([network])


def test_the_processor_is_always_there() -> None:
    assert available_devices()["cpu"] == "available"
    assert choose_device("cpu", World()) == CPU
    facts = describe_machine(CPU)
    assert facts.device == "cpu"
    assert facts.device_name
    assert facts.cores >= 1
    assert facts.reasons["fast_bf16"]


@pytest.mark.parametrize("before", [None, ":16:8"])
def test_a_workspace_for_exact_sums_is_reserved_unless_there_is_one(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", before or "")
    if before is None:
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    reserve_deterministic_workspace()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == (before or ":4096:8")


@pytest.mark.parametrize("kind", ["cuda", "mps", "xpu"])
def test_a_device_that_is_not_there_is_refused_with_the_reason(kind: str) -> None:
    reason = available_devices()[kind]
    if "available" in reason or "device(s)" in reason:
        pytest.skip(f"this machine has {kind}")
    with pytest.raises(RecipeError) as caught:
        choose_device(kind, World())
    assert str(caught.value) == f"parallel.device={kind}: {reason}; use parallel.device=auto or one of: cpu."


def test_metal_and_intel_gpus_choose_themselves_and_say_that_they_are_not_tested(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert choose_device("auto", World()) == torch.device("mps")
    assert choose_device("auto", World(world_size=2, local_world_size=2)) == CPU
    assert available_devices()["mps"] == "available (not tested)"
    assert describe_machine(torch.device("mps")).device_name == "Metal (not tested)"
    for name, answer in (
        ("is_available", True),
        ("device_count", 1),
        ("set_device", None),
        ("get_device_name", "Intel Arc"),
        ("get_device_properties", SimpleNamespace(total_memory=2**34)),
    ):
        monkeypatch.setattr(torch.xpu, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(torch, "get_device_module", lambda _: torch.xpu)
    chosen = choose_device("auto", World())
    assert chosen == torch.device("xpu", 0)
    assert available_devices()["xpu"] == "available (not tested)"
    assert describe_machine(chosen).device_name == "Intel Arc (not tested)"


def test_a_back_end_of_this_torch_is_taken_and_others_are_refused_with_what_is_here() -> None:
    for backend in ("auto", "gloo"):
        check_communication(backend, CPU)
    for backend in ("nccl", "xccl"):
        with pytest.raises(RecipeError, match=rf"parallel.backend={backend}: .* on this machine has gloo.* for cpu"):
            check_communication(backend, CPU)


@pytest.mark.parametrize(("requested", "formed"), [("auto", "gloo"), ("ucc", "ucc")])
def test_the_group_is_formed_with_the_back_end(requested: str, formed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(backend: str, **_: object) -> None:
        raise ValueError(f"it would be {backend}")

    monkeypatch.setattr(torch.distributed, "init_process_group", refuse)
    launch = LaunchEnvironment(World(world_size=2, local_world_size=2), "file:///nowhere", "paceline")
    with pytest.raises(LaunchError, match=f"it would be {formed}"):
        join(launch, CPU, backend=requested)


def test_one_process_has_no_back_end(tiny_recipe: Path) -> None:
    requested = load_recipe(tiny_recipe, ["parallel.backend=gloo"])
    assert plan_only(requested).unused["parallel.backend"] == "one process does not communicate"
