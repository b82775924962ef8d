"""Roofline of a training step: its lower time bound on a device, layer by layer."""

from __future__ import annotations

from dataclasses import replace

import torch

from paceline.command import Log
from paceline.devices import Device, find_device, recognise
from paceline.errors import RecipeError
from paceline.models.ceilings import ceilings_of
from paceline.models.flops import StepWork, WorkCounter
from paceline.recipe.load import load_recipe
from paceline.trainer.fake_batch import with_stand_in_data
from paceline.trainer.fake_step import FakeStep, fake_step, machine_with
from paceline_advisor.commands import Roofline
from paceline_advisor.roofline.bounds import LayerBound, layer_bounds
from paceline_advisor.roofline.report import LowIntensity, RooflineReport
from paceline_advisor.roofline.shapes import shape_findings
from paceline_advisor.roofline.this_cpu import this_cpu

# Grouped so far that a group's product is no wider than that, a convolution reads about as much as it computes.
_DEPTHWISE_WIDTH = 4


def choose(name: str | None) -> Device:
    """The device of this name, ``cpu`` for the one that this runs on; without a name, the one that is here.

    Raises:
        RecipeError: If it is not known.
    """
    if name is not None:
        return this_cpu() if name.lower() == "cpu" else find_device(name)
    if torch.cuda.is_available():
        here = torch.cuda.get_device_name()
        found = recognise(here)
        if found is None:
            raise RecipeError(
                f"device: '{here}' is not in the table of devices; name one that is like it: --device NAME."
            )
        return found
    return this_cpu()


def roofline(asked: Roofline, log: Log = lambda _: None) -> RooflineReport:
    """Compare a step of a recipe, on fake tensors, with what a device can do.

    Raises:
        PacelineError: If the recipe cannot be planned there, or the network cannot run on fake tensors.
    """
    loaded = load_recipe(asked.recipe, asked.overrides)  # first: a CPU is measured for seconds
    chosen = choose(asked.device)
    recipe, assumed = with_stand_in_data(loaded.recipe)
    if chosen.name == "cpu":
        recipe = replace(recipe, parallel=replace(recipe.parallel, device="cpu"))
    machine = None if chosen.name == "cpu" else machine_with(chosen)
    with fake_step(recipe, machine=machine) as step:
        found, plan = count_step(step), step.plan
        kinds = {name: type(module).__name__ for name, module in step.network.named_modules()}
    ceilings = ceilings_of(plan, chosen, found)
    layers = layer_bounds(found, kinds, ceilings)
    return RooflineReport(
        recipe=asked.recipe,
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
        top=asked.top,
    )


def count_step(step: FakeStep) -> StepWork:
    """What one micro-batch's forward and backward pass and an update do."""
    step.settle()
    with WorkCounter(step.network) as counter:
        step.backward(step.forward())
        with counter.phase("optimizer"):
            step.update()
    return counter.found


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
