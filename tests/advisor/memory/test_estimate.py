"""Estimates against real steps, against one another, and against figures that are printed elsewhere."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from measured_memory import measured_peaks
from memory_cases import ON_CPU, Case

from paceline.distributed.device import describe_machine
from paceline.host.devices import find_device
from paceline.recipe.load import load_recipe
from paceline.trainer.fake_batch import with_placeholder_data
from paceline.trainer.fake_step import fake_step, machine_with
from paceline_advisor.memory.estimate import MemoryEstimate, estimate_memory
from paceline_advisor.memory.job import SimulatedRun, peak_of
from paceline_advisor.memory.trace import FIRST, STEP, trace_step, trace_steps
from paceline_advisor.memory.variants import accumulated

CPU = torch.device("cpu")
H100 = machine_with(find_device("h100"))
# Few samples, so that the optimizer's first step is the peak.
FUSED = Case(model="small_resnet", size=8, batch=2, optimizer="adamw")
QUICK = {FUSED.name, "small_resnet 32px, 64 samples, fp32, sgd", "small_resnet 32px, 64 samples, bf16, adamw"}
# Network, precision and optimizer of each are in other steps; benchmarks/estimate.py does them all.
MORE_OF_THE_SAME = {
    "resnet18 64px, 16 samples, fp32, sgd, momentum=0.9",
    "resnet18 64px, 16 samples, fp32, rmsprop",
    "resnet50 64px, 8 samples, fp32, adamw",
    "resnet50 96px, 16 samples, bf16, sgd, momentum=0.9",
    "vit_tiny_patch16_224 224px, 8 samples, fp32, adamw",
    "vit_tiny_patch16_224 224px, 8 samples, bf16, adamw",
}


@cache
def requested(name: str, device: str | None = "h100", processes: int = 1, **overrides: Any) -> MemoryEstimate:
    dotted = {key.replace("__", "."): value for key, value in overrides.items()}
    # Few layers: an estimate does a step of them for each device and size.
    small = {"model.options": {"width": 32, "stages": 1, "depth": 1}} if name == "digits" else {}
    return estimate_memory(load_recipe(name, {**small, **dotted}), device, processes)


def test_there_are_enough_steps() -> None:
    assert len(ON_CPU) >= 12
    assert {case.precision for case in ON_CPU} == {"fp32", "bf16"}
    assert {case.name for case in ON_CPU} > MORE_OF_THE_SAME


@pytest.mark.parametrize(
    "case",
    [
        case if case.name in QUICK else pytest.param(case, marks=pytest.mark.thorough)
        for case in (FUSED, *ON_CPU)
        if case.name not in MORE_OF_THE_SAME
    ],
    ids=lambda case: case.name,
)
def test_the_estimate_is_within_1_per_cent_of_what_torch_allocates(case: Case) -> None:
    recipe = case.recipe()
    with fake_step(recipe, micro_batch=case.batch, machine=describe_machine(CPU)) as step:
        expected = peak_of(trace_step(step), caching=False)
    measured = measured_peaks(recipe, case.batch, CPU)
    for part in (FIRST, STEP):
        assert expected.parts[part] == pytest.approx(measured[part], rel=0.01), part


def test_the_four_causes_of_a_small_network_are_what_they_must_be() -> None:
    found = requested("digits", "cpu", train__precision="fp32", optimizer__name="adamw", optimizer__nesterov=None)
    numbers = found.plan.parameters
    assert numbers is not None
    causes = found.peak.causes
    assert causes["weights"] == 4 * numbers
    assert causes["optimizer"] == pytest.approx(2 * 4 * numbers, rel=0.01)  # and a count of steps for each tensor
    assert causes["average"] == pytest.approx(4 * numbers, rel=0.05)  # and the norms' statistics
    assert found.peak.allocated == sum(causes.values())


def test_a_step_that_adds_gradients_up_is_as_if_they_had_been_there() -> None:
    with fake_step(load_recipe("digits").recipe, machine=H100) as step:
        plain = trace_step(step)
        for parameter in step.network.parameters():
            parameter.grad = torch.empty_like(parameter)
        # What has a gradient already adds to it in place.
        really = trace_step(step)
    added = peak_of(accumulated(plain), caching=True)
    # There they count as what was there when first met; the bytes are the same.
    assert added.parts[FIRST] == pytest.approx(peak_of(really, caching=True).parts[FIRST], rel=0.01)


def test_sizes_between_two_are_what_a_step_of_that_size_does() -> None:
    with fake_step(with_placeholder_data(load_recipe("cifar10_fast").recipe)[0], machine=H100) as step:
        steps = trace_steps(step)
        assert steps.is_linear
        assert steps(100).allocations == steps.again(100).allocations


def test_the_largest_micro_batch_fits_and_one_more_does_not() -> None:
    recipe = load_recipe("synthetic", {"model.name": "small_resnet", "data.image_size": 32, "batch.global_size": 64})
    with fake_step(recipe.recipe, machine=H100) as step:
        job = SimulatedRun(step, trace_steps(step), H100, shards=8)
    for memory in (800 * 2**20, 3 * 2**30):
        most = job.largest(memory)
        assert most > 0
        assert job.fits(most, memory)
        assert not job.fits(most + 1, memory)


def test_more_samples_need_more_and_16_bits_less() -> None:
    complete = requested("digits", batch__global_size=1024, train__precision="fp32")
    assert [each.needed for each in complete.sizes] == sorted(each.needed for each in complete.sizes)
    halves = requested("digits", batch__global_size=1024, train__precision="bf16")
    assert halves.peak.causes["activations"] < 0.7 * complete.peak.causes["activations"]
    assert halves.peak.causes["weight copies"] > 0
    saving = next(each for each in complete.savings if each.change == "train.precision=bf16")
    assert saving.needed == pytest.approx(halves.least, rel=0.005)  # looked for with another memory in mind, or none


@pytest.mark.thorough
def test_sizes_that_a_network_refuses_are_left_out() -> None:
    """Its last maps have one pixel each, and BatchNorm does not train on a single value per channel."""
    changes = {"data.detection.short_sides": "off", "batch.global_size": 4, "model.options": {}}
    recipe = load_recipe("shapes-maskrcnn", changes | {"model.name": "torchvision:ssdlite320_mobilenet_v3_large"})
    assert [each.micro_batch for each in estimate_memory(recipe, "cpu").sizes] == [2, 4]


def test_what_is_needed_at_least_is_what_fits() -> None:
    """One more MiB or less of a device decides, and not what the allocator would take if it could."""
    recipe = load_recipe("synthetic", {"model.name": "small_resnet", "data.image_size": 32, "batch.global_size": 64})
    with fake_step(recipe.recipe, machine=H100) as step:
        job = SimulatedRun(step, trace_steps(step), H100, shards=8)
    used = job.needed(64)
    least = job.least(64)
    assert job.peak(64).allocated + job.outside <= least <= used
    assert job.fits(64, least)
    assert not job.fits(64, least - used // 512 - 1)
    # A device's own memory is tried, so that what is needed is above it where it does not fit, and nowhere else.
    for memory in range(least - 8 * 2**20, used, 2 * 2**20):
        assert (job.least(64, memory) <= memory) == job.fits(64, memory)


def test_one_device_has_one_largest_micro_batch() -> None:
    found = requested("synthetic", "t4", model__name="small_resnet", data__image_size=32, train__precision="fp32")
    (here,) = [each for each in found.devices if each.device == "t4"]
    assert found.largest is not None
    assert 0 < found.largest < 2**20
    assert here.largest == found.largest


def test_several_processes_hold_buckets_and_with_fsdp_parts() -> None:
    alone, several = requested("digits"), requested("digits", processes=4)
    assert several.plan.strategy == "ddp"
    assert several.peak.causes["gradients"] == 4 * (several.plan.parameters or 0)
    spread = requested("digits", processes=4, parallel__strategy="fsdp")
    assert not [each for each in spread.savings if "fsdp" in each.change], "it is already"
    assert spread.peak.causes["weights"] == pytest.approx(alone.peak.causes["weights"] / 4, rel=0.01)
    assert spread.peak.causes["gathered weights"] > 0


def test_the_verdict_follows_from_what_fits() -> None:
    assert requested("digits", processes=4).verdict.strategy == "ddp"


def test_a_device_that_lacks_the_precision_is_said_to() -> None:
    found = requested("digits", train__precision="bf16")
    sizes = {each.device: each.largest for each in found.devices}
    assert sizes["v100-16gb"] is None
    assert sizes["h100"]


@pytest.mark.everyday
def test_what_is_assumed_of_data_is_said() -> None:
    found = requested("cifar10_fast")
    assert found.notices[0].startswith("data.path is not set: as for CIFAR-10, 10 classes")
