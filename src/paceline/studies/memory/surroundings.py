"""What takes memory on a device beside the tensors of a step: its next batch, libraries, the driver?"""

from __future__ import annotations

from dataclasses import replace

from paceline.formulas.caching_allocator import MIB
from paceline.recipe.plan import MachineFacts, Plan
from paceline.studies.memory.trace import StepTrace
from paceline.studies.memory.variants import with_more
from paceline.telemetry.allocations import Allocation
from paceline.telemetry.memory import private_bytes

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


def outside(device_type: str, processes: int) -> int:
    """Bytes of a device's memory that are not tensors'.

    On a CPU what this process takes now, with torch loaded and nothing trained; elsewhere an allowance.
    """
    if device_type == "cpu":
        return private_bytes()
    return CONTEXT + (COMMUNICATION if processes > 1 else 0)


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


def with_input(step: StepTrace, plan: Plan, *, is_mixed: bool) -> StepTrace:
    """A step beside which the next batch is copied to the device, normalised and mixed (``data/prefetch.py``)."""
    batch = [each for each in step.allocations if each.cause == "batch"]
    if plan.device not in ("cuda", "xpu") or not batch:
        return step
    ahead = with_more(step, batch)
    # The batch before is still there when the next one is asked for; its images come as bytes, and mixing takes a copy.
    images = batch[0]
    passing = (images, replace(images, size=images.size // _BYTES_PER_NUMBER), *([images] * is_mixed))
    count = len(ahead.allocations)
    numbers = range(count, count + len(passing))
    events = (*numbers, *(~number for number in numbers), *ahead.events)
    return replace(ahead, allocations=(*ahead.allocations, *passing), events=events)


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
