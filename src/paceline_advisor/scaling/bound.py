"""What does one device not do better than? The answer is that of ``paceline roofline``: its arithmetic and its memory.

A fake step is counted at the largest share. A smaller one is held to its part of that, which is less than it takes,
since weights are read all the same: so it stays a bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from paceline.devices import Device
from paceline.models.ceilings import ceilings_of
from paceline.recipe.schema import Recipe
from paceline.trainer.fake_step import fake_step, machine_with
from paceline_advisor.formulas.parallel_step import OneDevice
from paceline_advisor.roofline.study import count_step
from paceline_advisor.scaling.room import of_one_process
from paceline_advisor.scaling.shares import Share


def least_steps(recipe: Recipe, shares: Mapping[int, Share], device: Device) -> dict[int, OneDevice]:
    """The least time of each number of devices' part, in which every operator waits for arithmetic or for memory.

    Where the recipe compiles, only operators with products count: what others move may be saved by fusing them.

    Args:
        recipe: What is trained; its data may be elsewhere.
        shares: The part of each number of devices.
        device: The device.

    Raises:
        PacelineError: If the network cannot do without numbers, or the recipe cannot be planned there.
    """
    largest = max(shares.values(), key=lambda each: each.micro_batch)
    with fake_step(of_one_process(recipe, replace(largest, passes=1)), machine=machine_with(device)) as step:
        found = count_step(step)
        ceilings = ceilings_of(step.plan, device, found)
    works = [each for each in found.works if each.product or each.flops or not recipe.model.compile]
    update = sum(ceilings.seconds(each) for each in works if each.phase == "optimizer")
    passing = sum(map(ceilings.seconds, works)) - update
    return {
        size: OneDevice(
            # FSDP shares out the update, and a step of several passes has one.
            seconds=passing * share.micro_batch / largest.micro_batch + update / (share.passes * size),
            samples=share.micro_batch,
            is_bound=True,
        )
        for size, share in shares.items()
    }
