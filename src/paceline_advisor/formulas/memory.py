"""Memory of a network's training state: weights, gradients, optimizer state, sharded or not."""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline_advisor.memory.allocator import rounded


def zero_bytes(
    parameters: float,
    stage: int,
    devices: int = 1,
    parameter_bytes: float = 2,
    gradient_bytes: float = 2,
    optimizer_bytes: float = 12,
) -> float:
    """Bytes per device of weights, gradients and optimizer state under ZeRO.

    Args:
        parameters: Number of parameters.
        stage: 0 none is shared out; 1 the optimizer state; 2 gradients too; 3 weights too (FSDP's full sharding).
        devices: Over how many they are shared out.
        parameter_bytes: Bytes of a weight that the passes use.
        gradient_bytes: Bytes of a gradient.
        optimizer_bytes: Bytes of optimizer state for a parameter; Adam in mixed precision has an fp32 copy of the
            weight and two fp32 moments.

    Raises:
        ValueError: If there is no such stage.

    Source:
        Rajbhandari et al., ZeRO, arXiv:1910.02054, section 5, figure 1 and table 1.
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage={stage}: ZeRO has the stages 0, 1, 2 and 3")
    kinds = (optimizer_bytes, gradient_bytes, parameter_bytes)
    return parameters * sum(each / devices if index < stage else each for index, each in enumerate(kinds))


def zero_largest_parameters(memory_bytes: float, stage: int, devices: int = 1, optimizer_bytes: float = 12) -> float:
    """Parameters whose training state just fills a device's memory, activations left out.

    Source:
        Rajbhandari et al., ZeRO, arXiv:1910.02054, table 2.
    """
    return memory_bytes / zero_bytes(1, stage, devices, optimizer_bytes=optimizer_bytes)


def zero_communication(parameters: float, stage: int) -> float:
    """Numbers that a device sends in a step: twice the parameters, three times if weights are shared out too.

    Source:
        Rajbhandari et al., ZeRO, arXiv:1910.02054, section 7.
    """
    return (3 if stage == 3 else 2) * parameters


def adam_mixed_precision_bytes(parameters: float) -> float:
    """Bytes of weights, gradients and Adam's state in mixed precision: 16 for each parameter.

    Source:
        Rajbhandari et al., ZeRO, arXiv:1910.02054, section 3.1.
    """
    return zero_bytes(parameters, stage=0)


def training_state_bytes(parameters: float, states: int, bytes_per_element: float = 4, *, ema: bool = False) -> float:
    """Bytes of weights, gradients, ``states`` optimizer states (SGD 0, momentum 1, Adam 2) and a moving average.

    Source:
        Kingma and Ba, Adam, arXiv:1412.6980, algorithm 1, for the two moments; counting for the rest.
    """
    return parameters * bytes_per_element * (2 + states + ema)


def allocated_bytes(tensor_bytes: Sequence[float]) -> int:
    """Bytes that torch's CUDA allocator counts for tensors of these sizes: each is rounded up to 512.

    Source:
        PyTorch, c10/cuda/CUDACachingAllocator.cpp (kMinBlockSize).
    """
    return sum(rounded(math.ceil(each)) for each in tensor_bytes)


def checkpointing_layers(layers: int) -> int:
    """Segments of equal layers for which keeping only their borders takes least: the root of their number.

    Source:
        Chen et al., Training deep nets with sublinear memory cost, arXiv:1604.06174, section 4.
    """
    return max(1, round(math.sqrt(layers)))
