"""What takes memory on a device beside the tensors of a step: its next batch, libraries, the driver?"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import cache

from paceline.recipe.data import Mix
from paceline.recipe.plan import MachineFacts, Plan
from paceline.telemetry.allocations import Allocation
from paceline.telemetry.memory import private_bytes
from paceline_advisor.formulas.caching_allocator import MIB
from paceline_advisor.memory.trace import EVALUATION, FIRST, REHEARSAL, STEP, StepTrace
from paceline_advisor.memory.variants import around_parts, before_parts, with_more

_MATRIX_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear")
# PyTorch's cuBLAS workspace for each thread that multiplies matrices: aten/src/ATen/cuda/CublasHandlePool.cpp.
_WORKSPACE = (2 * 4096 + 8 * 16) * 1024
_WORKSPACE_HOPPER = 32 * MIB
_WORKSPACE_MI300 = 128 * MIB
# What a process takes before its first tensor: the driver's context and the kernels that it loads. An allowance; it
# has not been measured here.
CONTEXT = 600 * MIB
# NCCL's buffers and its own context, for more than one process. An allowance too.
COMMUNICATION = 600 * MIB
_BYTES_PER_NUMBER = 4
# A process with torch loaded and nothing trained has less than this. One with more has data of its own, which a run in
# a process of its own would not have.
_USUAL = 512 * MIB
_ASK = "import paceline.trainer.train; from paceline.telemetry.memory import private_bytes; print(private_bytes())"


def outside(device_type: str, processes: int) -> int:
    """Bytes of a device's memory that are not tensors'.

    On a CPU what a process takes with torch loaded and nothing trained; elsewhere an allowance.
    """
    if device_type == "cpu":
        taken = private_bytes()
        return taken if taken <= _USUAL else min(taken, _of_a_new_process())
    return CONTEXT + (COMMUNICATION if processes > 1 else 0)


@cache
def _of_a_new_process() -> int:
    asked = subprocess.run([sys.executable, "-P", "-c", _ASK], capture_output=True, text=True, check=False)
    return int(asked.stdout) if asked.returncode == 0 else _USUAL


def with_libraries(step: StepTrace, machine: MachineFacts) -> StepTrace:
    """A step with the workspace of cuBLAS: one for the thread of the forward pass, one for the backward pass's."""
    if machine.device != "cuda":
        return step
    used = {each.phase for each in step.allocations if each.operation.split(".")[0] in _MATRIX_PRODUCTS}
    each = _workspace(machine.device_name)
    return with_more(step, [Allocation(each, "workspace", operation="cublas") for _ in used & {"forward", "backward"}])


def _workspace(device_name: str) -> int:
    if any(name in device_name for name in ("H100", "H200", "B200", "GH200", "GB200")):
        return _WORKSPACE_HOPPER
    return _WORKSPACE_MI300 if "MI300" in device_name else _WORKSPACE


def with_input(step: StepTrace, plan: Plan, mix: Mix) -> StepTrace:
    """A run beside whose steps the next batch is copied to the device, normalised and mixed (``data/pipeline.py``)."""
    if plan.device not in ("cuda", "xpu"):
        return step
    batch = [each for each in step.allocations if each.cause == "batch" and not each.phase]
    scored = [each for each in step.allocations if each.cause == "batch" and each.phase == EVALUATION]
    # Both of training's stay while there is an evaluation.
    step = with_more(step, batch)
    if batch:
        step = before_parts(step, _passing(batch, mix), REHEARSAL, FIRST, STEP)
    if scored:
        step = around_parts(before_parts(step, _passing(scored, Mix()), EVALUATION), scored, EVALUATION)
    return step


def _passing(batch: list[Allocation], mix: Mix) -> list[Allocation]:
    """What there is for a moment while a batch is made: the one before the last, bytes of images, and mixing's copies.

    Mixup takes a copy of all images and CutMix two; targets are integers of 8 bytes before they are numbers.
    """
    images, targets = batch[0], batch[1:]
    passing = [*batch, replace(images, size=images.size // _BYTES_PER_NUMBER)]
    if mix.mixup > 0 or mix.cutmix > 0:
        passing += [images] * (2 if mix.cutmix > 0 else 1)
        passing += [each for one in targets for each in (replace(one, size=2 * one.size), one)]
    return passing


def with_data_set(step: StepTrace, plan: Plan, share: float) -> StepTrace:
    """A step on a device that holds the images, where they are small and few enough.

    Args:
        step: The step.
        plan: Its run's.
        share: Of a device's memory, what one split's images may take there.
    """
    if plan.device != "cuda" or plan.data.get("backend") != "memory" or plan.device_memory_bytes is None:
        return step
    each = int(plan.data["channels"]) * int(plan.data["image_size"]) ** 2
    sizes = [count * each for count in (plan.train_samples, plan.evaluation_samples) if count]
    held = [size for size in sizes if size <= share * plan.device_memory_bytes]
    return with_more(step, [Allocation(size, "data set") for size in held])
