"""Roofline of a training step: its lower time bound on a device, layer by layer."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from paceline.command import Log
from paceline.data.disk_cache import remember
from paceline.devices import Device, find_device, recognise
from paceline.errors import RecipeError
from paceline.machine import available_cores, cache_folder, cpu_name, memory_bytes
from paceline.models.ceilings import ceilings_of
from paceline.models.flops import StepWork, WorkCounter
from paceline.plain_json import load_json
from paceline.recipe.load import load_recipe
from paceline.trainer.fake_batch import with_placeholder_data
from paceline.trainer.fake_step import FakeStep, fake_step, machine_with
from paceline_advisor.commands import Roofline
from paceline_advisor.roofline.report import LayerBound, LowIntensity, RooflineReport, layer_bounds, shape_findings

_SIZE = 1536
_COPIED_BYTES = 256 * 2**20
_SECONDS = 0.35
_FEWEST = 3
_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def this_cpu() -> Device:
    """Return this CPU as a device with peaks measured in a second or two; cached if possible.

    A 1,536 x 1,536 matrix product measures its compute and a copy of 256 MiB its memory. Both are what programs
    achieve, slightly below the vendor's specifications.
    """
    cores = available_cores()
    same = (cpu_name(), cores, torch.get_num_threads(), torch.__version__)
    path = cache_folder() / "roofline" / f"{hashlib.sha256(repr(same).encode()).hexdigest()[:16]}.json"
    found = _recall(path)
    if found is None:
        flops = {}
        # A separate generator: random states do not change.
        numbers = torch.randn(2, _SIZE, _SIZE, generator=torch.Generator().manual_seed(0))
        for name, dtype in _TYPES.items():
            left, right = numbers.to(dtype)
            multiply = partial(torch.mm, left, right, out=torch.empty(_SIZE, _SIZE, dtype=dtype))
            flops[name] = 2 * _SIZE**3 / _least_seconds(multiply)
        source, target = torch.ones(2, _COPIED_BYTES // 4)  # the cache is not writable
        found = {
            "flops_per_second": flops,
            "bytes_per_second": 2 * _COPIED_BYTES / _least_seconds(partial(target.copy_, source)),
            "measured": time.strftime("%Y-%m-%d"),
        }
        remember(path, json.dumps(found).encode())
    how = "a matrix product of 1,536 squared, a copy of 256 MiB" + (f"; kept in {path}" if path.is_file() else "")
    return Device(
        name="cpu",
        title=f"{cpu_name()} ({cores} core{'s' * (cores > 1)})",
        memory_bytes=memory_bytes() or 0,
        bytes_per_second=found["bytes_per_second"],
        flops_per_second=MappingProxyType(found["flops_per_second"]),
        multiprocessors=cores,
        reported_as="",
        source=f"measured here on {found['measured']}: {how}",
    )


def _least_seconds(run: Callable[[], Any]) -> float:
    """Return the best of several runs; other load on the machine only adds time."""
    run()
    times: list[float] = []
    deadline = time.perf_counter() + _SECONDS
    while len(times) < _FEWEST or time.perf_counter() < deadline:
        start_time = time.perf_counter()
        run()
        times.append(time.perf_counter() - start_time)
    return min(times)


def _recall(path: Path) -> dict[str, Any] | None:
    try:
        stored = load_json(path.read_bytes())
        rates = {name: float(stored["flops_per_second"][name]) for name in _TYPES}
        cached = {"bytes_per_second": float(stored["bytes_per_second"]), "measured": str(stored["measured"])}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return {**cached, "flops_per_second": rates}


# With so many groups that a group's product is no wider than this, a convolution reads about as much as it computes.
_DEPTHWISE_WIDTH = 4


def choose(name: str | None) -> Device:
    """Return the device of this name, with ``cpu`` for this machine's CPU; without a name, the local device.

    Raises:
        RecipeError: If it is unknown.
    """
    if name is not None:
        return this_cpu() if name.lower() == "cpu" else find_device(name)
    if torch.cuda.is_available():
        here = torch.cuda.get_device_name()
        found = recognise(here)
        if found is None:
            raise RecipeError(f"device: '{here}' is not in the table of devices; name a similar one: --device NAME.")
        return found
    return this_cpu()


def roofline(options: Roofline, log: Log = lambda _: None) -> RooflineReport:
    """Compare a step of a recipe, on fake tensors, with the limits of a device.

    Raises:
        PacelineError: If the recipe cannot be planned there, or the network cannot run on fake tensors.
    """
    loaded = load_recipe(options.recipe, options.overrides)  # first: measuring a CPU takes seconds
    chosen = choose(options.device)
    recipe, assumed = with_placeholder_data(loaded.recipe)
    if chosen.name == "cpu":
        recipe = replace(recipe, parallel=replace(recipe.parallel, device="cpu"))
    machine = None if chosen.name == "cpu" else machine_with(chosen)
    with fake_step(recipe, machine=machine) as step:
        found, plan = count_step(step), step.plan
        kinds = {name: type(module).__name__ for name, module in step.network.named_modules()}
    ceilings = ceilings_of(plan, chosen, found)
    layers = layer_bounds(found, kinds, ceilings)
    return RooflineReport(
        recipe=options.recipe,
        model=recipe.model.name,
        device=chosen,
        precision=ceilings.precision,
        micro_batch=plan.micro_batch_size,
        micro_batches=plan.accumulation_steps,
        found=found,
        layers=layers,
        shapes=tuple(shape_findings(found, chosen, ceilings.precision_of)),
        low_intensity=_low_intensity(found, layers),
        least_seconds=sum(each.seconds for each in layers),
        products_seconds=sum(ceilings.seconds(each) for each in found.works if each.product or each.flops),
        arithmetic_seconds=sum(map(ceilings.arithmetic_seconds, found.model_works)),
        notices=() if assumed is None else (assumed,),
        top=options.top,
    )


def count_step(step: FakeStep) -> StepWork:
    """Return the operators of one micro-batch's forward and backward pass, and of an update."""
    step.init_optimizer_state()
    with WorkCounter(step.network) as counter:
        step.backward(step.forward())
        with counter.phase("optimizer"):
            step.update()
    return counter.work


def _low_intensity(found: StepWork, layers: tuple[LayerBound, ...]) -> LowIntensity | None:
    narrow = [
        each
        for each in found.works
        if each.phase == "forward" and (product := each.product) is not None and product.kind == "convolution"
        if product.count > 1 and product.n <= _DEPTHWISE_WIDTH
    ]
    names = {each.layer for each in narrow}
    if not narrow:
        return None
    of_them = [each for each in layers if each.layer in names]
    return LowIntensity(
        layers=tuple(dict.fromkeys(each.layer for each in narrow)),
        intensity=sum(each.flops for each in narrow) / sum(each.bytes_moved for each in narrow),
        flops_share=sum(each.flops for each in of_them) / max(1, found.flops()),
        seconds_share=sum(each.share for each in of_them),
    )
