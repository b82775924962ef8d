"""What of a run is in an estimate beside one step: the first one, evaluation, compression, own parts, the verdict."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from measured_memory import measured_peaks
from torch import Tensor, nn

from paceline.data.batch import Batch
from paceline.distributed.device import describe_machine
from paceline.host.devices import find_device
from paceline.recipe.load import load_recipe
from paceline.recipe.schema import Recipe
from paceline.tasks.image_classification import ImageClassification
from paceline.tasks.task import Model
from paceline.telemetry.clock import private_bytes
from paceline.trainer.fake_step import fake_step, machine_with
from paceline_advisor.memory.estimate import MemoryEstimate, estimate_memory
from paceline_advisor.memory.job import SimulatedRun, fits, peak_of
from paceline_advisor.memory.trace import EVALUATION, FIRST, STEP, trace_step, trace_steps, without_collection
from paceline_advisor.memory.variants import outside, sharding_of

MIB = 2**20
CPU = torch.device("cpu")
H100 = machine_with(find_device("h100"))
NETWORK = {"model": None, "model.name": "mine:net", "train.precision": "fp32"}
# Few layers: an estimate does a step of them for each device and size.
SMALL = {"model.options": {"width": 32, "stages": 1, "depth": 1}}


def recipe(name: str = "digits", **overrides: Any) -> Recipe:
    return load_recipe(name, {key.replace("__", "."): value for key, value in overrides.items()}).recipe


def requested(device: str | None = "h100", processes: int = 1, **overrides: Any) -> MemoryEstimate:
    dotted = {key.replace("__", "."): value for key, value in overrides.items()}
    small = {} if "model" in dotted else SMALL
    return estimate_memory(load_recipe("digits", {**small, **dotted}), device, processes)


@pytest.fixture
def own_network(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``own_network(network, task)``: what a user's module ``mine`` has."""

    def define(net: Any, task: Any = None) -> None:
        module = types.ModuleType("mine")
        vars(module).update(net=net, task=task)
        monkeypatch.setitem(sys.modules, "mine", module)

    return define


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_first_step_later_ones_and_evaluation_are_what_torch_allocates(precision: str) -> None:
    """A batch of 300 is scored beside one of 32 that is trained on: evaluation is the highest point here."""
    tried = recipe(
        batch__global_size=32, evaluate__batch_size=300, train__precision=precision, model__options={"width": 32}
    )
    with without_collection(), fake_step(tried, machine=describe_machine(CPU), scores=True) as step:
        found = peak_of(trace_step(step), caching=False)
    measured = measured_peaks(tried, 32, CPU)
    assert list(measured) == [FIRST, STEP, EVALUATION]
    for part, size in measured.items():
        assert found.parts[part] == pytest.approx(size, rel=0.03), part
    assert measured[FIRST] < measured[STEP] < measured[EVALUATION] == pytest.approx(found.allocated, rel=0.03)


def test_an_evaluation_that_does_not_fit_is_a_run_that_does_not() -> None:
    tried = recipe(batch__global_size=16, evaluate__batch_size=359, model__options={"width": 64})
    with without_collection(), fake_step(tried, machine=H100, scores=True) as step:
        job = SimulatedRun(step, trace_steps(step), H100, shards=1)
    with without_collection(), fake_step(tried, machine=H100) as step:
        unscored = SimulatedRun(step, trace_steps(step), H100, shards=1)
    peak = job.peak(16)
    assert peak.phase == EVALUATION
    assert peak.allocated == peak.parts[EVALUATION] > unscored.peak(16).allocated
    between = (job.needed(16) + unscored.needed(16)) // 2
    assert unscored.fits(16, between)
    assert not job.fits(16, unscored.needed(16))


def test_an_average_is_scored_too() -> None:
    complete = requested(evaluate__batch_size=359, batch__global_size=16, train__ema=0.99)
    assert complete.peak.phase == EVALUATION
    assert complete.peak.causes["average"] > 0
    assert complete.to_json()["evaluation_batch"] == 359
    assert requested(evaluate__every="off").to_json()["evaluation_batch"] is None


class _Reads(ImageClassification):
    """A task that reads a number where it scores."""

    def score(self, model: Model, batch: Batch) -> dict[str, Tensor]:
        values = super().score(model, batch)
        return values if values["loss"].sum().item() > 0 else {}


def test_a_score_that_needs_its_numbers_is_left_out_and_said_to_be(own_network: Any) -> None:
    own_network(None, _Reads)
    found = requested(task="mine:task")
    assert EVALUATION not in found.peak.parts
    assert any(each.startswith("evaluation is not in the estimate: ") for each in found.notices)
    assert found.peak.allocated == requested(evaluate__every="off").peak.allocated


class _Squares(nn.Module):
    """Compares each sample with every other: what it keeps grows with the square of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x.flatten(1))
        return y + (y @ y.T).tanh().sum(dim=1, keepdim=True)


def test_the_largest_micro_batch_is_one_whose_step_was_done_and_fits(own_network: Any) -> None:
    """From two small steps it would be far too large."""
    own_network(_Squares)
    found = requested("t4", batch__global_size=256, evaluate__every="off", **_dunder(NETWORK))
    assert found.largest
    assert found.verified is not None
    assert found.verified > 2  # the first one that was tried
    t4 = machine_with(find_device("t4"))
    assert t4.memory_bytes is not None
    with (
        without_collection(),
        fake_step(load_recipe("digits", {**NETWORK, "evaluate.every": "off"}).recipe, machine=t4) as step,
    ):
        steps = trace_steps(step)
        done = peak_of(steps.again(found.largest), caching=True)
        more = peak_of(steps.again(found.largest * 9 // 8), caching=True)
    room = t4.memory_bytes - outside("cuda", 1)
    assert done.reserved is not None
    assert done.allocated <= room
    assert fits(steps.again(found.largest), room, caching=True)
    assert more.allocated > room


def _dunder(overrides: dict[str, Any]) -> dict[str, Any]:
    return {key.replace(".", "__"): value for key, value in overrides.items()}


class _Synced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(1, 8, 3), nn.SyncBatchNorm(8), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.norm(self.first(x)).mean(dim=(2, 3)))
        return y


def test_a_network_with_batchnorm_over_all_processes_is_estimated(own_network: Any) -> None:
    own_network(_Synced)
    found = requested(processes=4, **_dunder(NETWORK))
    assert found.plan.strategy == "ddp"
    assert found.peak.causes["activations"] > 0


def test_a_micro_batch_of_one_is_worked_out_from_larger_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's BatchNorm refuses one number for each channel, as the last layers here have."""
    tried = recipe(batch__global_size=2, batch__micro_size=1)
    sizes: list[int] = []
    with without_collection(), fake_step(tried, machine=H100) as step:
        show = step.set_micro_batch

        def seen(size: int) -> None:
            sizes.append(size)
            show(size)

        monkeypatch.setattr(step, "set_micro_batch", seen)
        trace_steps(step)
    assert sizes == [2, 4]


@pytest.mark.thorough
def test_compression_holds_16_bits_of_the_buckets_until_the_update() -> None:
    def estimated(how: str) -> int:
        tried = recipe(
            "synthetic",
            model__name="resnet18",
            data__image_size=64,
            batch__global_size=64,
            parallel__gradient_compression=how,
        )
        machine = machine_with(find_device("h100"), processes=2)
        with without_collection(), fake_step(tried, processes=2, machine=machine) as step:
            return SimulatedRun(step, trace_steps(step), machine, shards=2).peak(32).allocated

    assert estimated("none") < estimated("bf16") < estimated("none") + 25 * MIB


def test_fsdp_holds_the_parts_that_a_part_lies_in() -> None:
    """While a block computes, what is in no block is whole too, and only rows are shared out."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 64, bias=False)
            self.blocks = nn.Sequential(nn.Sequential(nn.Linear(8, 32, bias=False)))
            self.last = nn.Linear(10, 3, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return x

    found = sharding_of(Net(), recipe().parallel, 2)
    root, block = 4 * (8 * 64 + 30), 4 * 8 * 32
    assert found.gathered == root + block + 2 * max(root, block)
    assert found.gradients == root + block + max(root, block)
    assert found.share(4 * 30) == 4 * 20  # three rows on two processes: two on the first
    assert found.share(100) == 50


@pytest.mark.parametrize(
    ("processes", "overrides"),
    [(4, {}), (8, {"optimizer__name": "adamw", "optimizer__nesterov": None}), (4, {"train__ema": "off"})],
)
def test_the_verdict_is_what_the_plan_of_a_run_says(processes: int, overrides: dict[str, Any]) -> None:
    found = requested(processes=processes, **overrides)
    assert found.verdict.strategy == found.plan.strategy
    planned = found.plan.reasons["parallel.strategy"].removeprefix(f"{processes} processes; ")
    assert found.verdict.reason.startswith(planned)


def test_a_network_that_is_spread_is_so_in_the_plan_and_in_the_verdict(own_network: Any) -> None:
    """1.2 billion numbers of weights, as many of gradients and of momentum: 15 GB, more than 0.7 of a T4."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.out = nn.Linear(64, 2**24, bias=False), nn.Linear(2**24, 10)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.out(self.layer(x.flatten(1)))
            return y

    own_network(Wide)
    found = requested("t4", processes=4, batch__global_size=64, train__ema="off", **_dunder(NETWORK))
    assert (found.plan.strategy, found.verdict.strategy) == ("fsdp", "fsdp")
    assert found.verdict.reason.startswith(found.plan.reasons["parallel.strategy"])
    assert "more than 70% of the 14.6 GiB that a process has" in found.verdict.reason
    assert found.fits is bool(found.largest)


def test_the_allocator_s_variable_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "roundup_power2_divisions:1,max_split_size_mb:20,backend:cudaMallocAsync")
    found = requested()
    assert found.allocator.max_split == 20 * MIB
    assert any("backend:cudaMallocAsync is another allocator" in each for each in found.notices)


def test_what_does_not_fit_is_never_said_to_leave_room() -> None:
    """Two signs of one thing: less than there is needed fits, and what does not fit is more than there is."""
    found = requested("t4", batch__global_size=16384, model__options={"width": 128})
    assert found.memory is not None
    assert {each.fits for each in found.sizes} == {True, False}
    for each in found.sizes:
        assert each.fits or each.needed > found.memory


def test_a_large_process_is_not_taken_for_what_a_run_needs() -> None:
    """As much data as a notebook may hold: a run, which is a process of its own, would not have it."""
    ballast = bytearray(b"x") * (700 * MIB)
    assert private_bytes() > 700 * MIB
    assert outside("cpu", 1) < private_bytes() - 300 * MIB
    del ballast
