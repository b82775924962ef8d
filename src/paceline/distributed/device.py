"""Choose the device of this process, and describe what it supports."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import torch

from paceline.distributed.device import CoreAssignment
from paceline.errors import RecipeError
from paceline.machine import available_cores, cpu_name, memory_bytes
from paceline.plan import MachineFacts
from paceline.world import World


def available_devices() -> dict[str, str]:
    """Device types, with the reason why each is or is not available."""
    cuda = (
        f"{torch.cuda.device_count()} device(s)" if torch.cuda.is_available() else "no CUDA or ROCm device is visible"
    )
    xpu = "available" if torch.xpu.is_available() else "no Intel GPU is visible"
    mps = "available" if torch.backends.mps.is_available() else "this is not a Mac with Metal"
    return {"cpu": "available", "cuda": cuda, "mps": mps, "xpu": xpu}


def is_available(device_type: str) -> bool:
    """Whether torch can use this type of device now."""
    checks: dict[str, Callable[[], bool]] = {
        "cpu": lambda: True,
        "cuda": torch.cuda.is_available,
        "mps": torch.backends.mps.is_available,
        "xpu": torch.xpu.is_available,
    }
    return device_type in checks and checks[device_type]()


def choose_device(requested: str, world: World) -> torch.device:
    """Resolve ``parallel.device`` for this process; GPUs are assigned by local rank.

    Raises:
        RecipeError: If the requested device is not available.
    """
    # Metal has no collectives: several processes on a Mac train on its CPU.
    choices = ("cuda", "xpu", "mps", "cpu") if world.world_size == 1 else ("cuda", "xpu", "cpu")
    if requested == "mps" and world.world_size > 1:
        raise RecipeError("parallel.device=mps works with one process only; use one, or parallel.device=cpu.")
    kind = requested if requested != "auto" else next(k for k in choices if is_available(k))
    if not is_available(kind):
        raise RecipeError(
            f"parallel.device={kind}: {available_devices()[kind]}; use parallel.device=auto or one of: "
            f"{', '.join(k for k in ('cpu', 'cuda', 'mps', 'xpu') if is_available(k))}."
        )
    if kind in ("cuda", "xpu"):
        module = getattr(torch, kind)
        index = device_index(world, module.device_count(), bound_by_slurm="SLURM_STEP_ID" in os.environ)
        module.set_device(index)
        return torch.device(kind, index)
    return torch.device(kind)


def device_index(world: World, visible: int, *, bound_by_slurm: bool) -> int:
    """Return the index of this process's device: its local rank, or the only device that Slurm shows the task.

    Raises:
        RecipeError: If there are fewer devices than processes on this machine.
    """
    if bound_by_slurm and visible == 1:
        return 0
    if world.local_rank >= visible:
        raise RecipeError(
            f"process {world.local_rank} on this machine has no device for itself: there are {visible}; start at most "
            "that many processes, or use parallel.device=cpu."
        )
    return world.local_rank


# Devices whose tensors each back-end of torch.distributed exchanges.
_BACKENDS = {"gloo": ("cpu", "cuda"), "nccl": ("cuda",), "ucc": ("cpu", "cuda"), "xccl": ("xpu",)}


def check_communication(requested: str, device: torch.device) -> None:
    """Check that ``parallel.backend`` is available for this device.

    Raises:
        RecipeError: If it is not; names those that are.
    """
    if requested == "auto":
        return
    available = [
        name
        for name, devices in _BACKENDS.items()
        if device.type in devices and torch.distributed.is_backend_available(name)
    ]
    if requested not in available:
        raise RecipeError(
            f"parallel.backend={requested}: torch {torch.__version__} on this machine has {' and '.join(available)} "
            f"for {device.type}; use one of them, or parallel.backend=auto."
        )


def reserve_deterministic_workspace() -> None:
    """Make cuBLAS deterministic; this works only before the process first uses a CUDA device.

    A workspace setting of the user's is kept.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def describe_machine(
    device: torch.device, assignment: CoreAssignment | None = None, *, processes: int = 1
) -> MachineFacts:
    """Return the device facts the plan needs; the same on every rank of a uniform cluster, except for ``assignment``.

    Args:
        device: This process's device.
        assignment: The cores reserved for this process, if any.
        processes: Number of processes on this machine, which share its host memory.
    """
    fast_bf16, reason = _fast_bf16(device)
    threads = os.environ.get("OMP_NUM_THREADS", "")
    reasons = (
        {"fast_bf16": reason} if assignment is None else {"fast_bf16": reason, "parallel.affinity": assignment.reason}
    )
    return MachineFacts(
        device=device.type,
        device_name=_device_name(device),
        fast_bf16=fast_bf16,
        cores=available_cores(),
        threads=int(threads) if threads.isdigit() and int(threads) > 0 else None,
        assigned_cores=None if assignment is None else assignment.threads,
        memory_bytes=_memory_bytes(device, processes),
        lacks=_lacks(device, no_bf16_reason="" if fast_bf16 else reason),
        reasons=reasons,
    )


def _memory_bytes(device: torch.device, processes: int) -> int | None:
    if device.type == "cpu":
        total = memory_bytes()
        return None if total is None else total // processes
    if device.type in ("cuda", "xpu"):
        return int(torch.get_device_module(device).get_device_properties(device).total_memory)
    return None


def _lacks(device: torch.device, *, no_bf16_reason: str) -> dict[str, str]:
    """Return what this device cannot do, with the reasons."""
    lacks = {"bf16_products": no_bf16_reason} if no_bf16_reason else {}
    if device.type != "cuda":
        lacks["fp8"] = f"it needs a CUDA device of compute capability 8.9 or more, and this run is on {device.type}"
        if device.type != "xpu":
            lacks["tf32"] = f"{device.type} has no TF32 products"
        return lacks
    major, minor = torch.cuda.get_device_capability(device)
    capability = f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}"
    if (major, minor) < (8, 0):
        lacks["tf32"] = f"{capability}, and TF32 products come with 8.0"
    if (major, minor) < (8, 9):
        lacks["fp8"] = f"{capability}, and fp8 products come with 8.9"
    elif importlib.util.find_spec("torchao") is None:
        lacks["fp8"] = "the package torchao is not installed (pip install 'paceline[fp8]')"
    return lacks


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return str(torch.xpu.get_device_name(device)) if device.type == "xpu" else cpu_name()


def _fast_bf16(device: torch.device) -> tuple[bool, str]:
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
        return fast, f"{torch.cuda.get_device_name(device)} {'has' if fast else 'has no'} bf16 matrix units"
    if device.type == "xpu":
        return True, "Intel GPUs have bf16 matrix units"
    if device.type == "cpu":
        cpuinfo = Path("/proc/cpuinfo")
        lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
        flags = next((line for line in lines if line.startswith("flags")), "")
        if names := sorted({"amx_bf16", "avx512_bf16"}.intersection(flags.split())):
            return True, f"the processor has bf16 products ({names[0]})"
        return False, "the processor has no bf16 products"
    return False, f"bf16 on {device.type} has not been measured"
