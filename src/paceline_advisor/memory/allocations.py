"""Tensors that a program allocates and frees, in order, with their purpose; and the memory inside of kernels.

They are tracked operation by operation, by the storages of the returned tensors, fake or real. Temporary memory that
operations use internally is not visible, and must be known.

CPU: oneDNN chooses the kernel of a convolution, and with it the copies in other layouts, by processor and version. So
each convolution is run on zeros, a few samples at a time, while torch's allocator is observed. Other operations follow
torch's own rules, which do not depend on the processor.

GPU: attention's backward pass sums in fp32 (Dao 2023, FlashAttention-2, section 3.2). cuDNN uses a faster convolution
kernel only if the kernel's memory is free. Therefore only the memory of the kernel that always works is set aside; it
copies images that are not channels-last. This memory decides what fits, but does not count as allocated.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch._C import _autograd
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Locate = Callable[[], tuple[str, str]]
"""Tells the phase of the step and the module at work."""

KernelMemory = Callable[[str, tuple[Any, ...], Any], tuple[int, str]]
"""Tells how many bytes an operation takes inside, and for what, by its name, arguments and answer."""

NO_MEMORY = (0, "")

COPIES = "weight copies"
"""What is cast from weights: autocast's copies in 16 bits."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """One storage.

    Attributes:
        size: Bytes.
        cause: Its purpose.
        phase: Phase of the step in which it was allocated; empty for earlier storages.
        layer: The module that was running.
        operation: The operation that returned it.
    """

    size: int
    cause: str
    phase: str = ""
    layer: str = ""
    operation: str = ""


class AllocationTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch
    """Records each storage that operations allocate, and when it is freed.

    Args:
        locate: Returns the current position; called at each operation.
        kernel_memory: Known internal memory of kernels.

    Attributes:
        allocations: All storages, in the order in which they appeared.
        events: Their numbers, in order of events: ``n`` for an allocation, ``~n`` when it is freed.
    """

    def __init__(self, locate: Locate, kernel_memory: KernelMemory = lambda *_: NO_MEMORY) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch
        self.allocations: list[Allocation] = []
        self.events: list[int] = []
        self._locate, self._kernel_memory = locate, kernel_memory
        self._numbers: dict[int, int] = {}
        self._references: dict[int, weakref.ref[Any]] = {}

    def hold(self, tensors: Iterable[Tensor | None], cause: str) -> None:
        """Record existing tensors."""
        for tensor in tensors:
            if tensor is not None:
                self._record(tensor, lambda size: Allocation(size, cause))

    def call(self, tensors: Iterable[Tensor | None], cause: str) -> None:
        """Set the purpose of some storages afterwards."""
        for tensor in tensors:
            number = None if tensor is None else self.number_of(tensor)
            if number is not None:
                self.allocations[number] = replace(self.allocations[number], cause=cause)

    def number_of(self, tensor: Tensor) -> int | None:
        """Return a tensor's storage; None if it was not seen."""
        return self._numbers.get(_key(tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run an operation, and record the tensors it returns."""
        options = kwargs or {}
        phase, layer = self._locate()
        self._record_all(args, lambda size: Allocation(size, "other"))
        result = func(*args, **options)
        operation = func.__name__

        def describe_output(size: int) -> Allocation:
            return Allocation(size, self._cause_of(operation, phase, args), phase, layer, operation)

        self._record_all(result, describe_output)
        size, cause = self._kernel_memory(operation, args, result)
        if size:
            number = len(self.allocations)
            self.allocations.append(Allocation(size, cause, phase, layer, operation))
            self.events += (number, ~number)
        return result

    def _record_all(self, values: Any, describe: Callable[[int], Allocation]) -> None:
        leaves = (values,) if isinstance(values, Tensor) else tree_leaves(values)
        for each in leaves:
            if isinstance(each, Tensor) and each.layout == torch.strided:
                self._record(each, describe)

    def _cause_of(self, operation: str, phase: str, args: tuple[Any, ...]) -> str:
        number = self.number_of(args[0]) if operation.startswith("_to_copy") else None
        if number is not None and self.allocations[number].cause in ("weights", "average"):
            return COPIES
        return "activations" if phase in ("forward", "evaluation") else "temporary"

    def _record(self, tensor: Tensor, describe: Callable[[int], Allocation]) -> None:
        storage, key = tensor.untyped_storage(), _key(tensor)
        if key in self._numbers:
            return
        number = len(self.allocations)
        self.allocations.append(describe(storage.nbytes()))
        self.events.append(number)
        self._numbers[key] = number

        def on_freed(_: Any) -> None:
            self.events.append(~number)
            del self._numbers[key], self._references[key]

        self._references[key] = weakref.ref(storage, on_freed)


def _key(tensor: Tensor) -> int:
    """Return the key of a tensor's storage: its C++ address, since the Python object may differ each time."""
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001  # what torch's StorageWeakRef goes by


def cpu_workspace(operation: str, args: tuple[Any, ...], answer: Any) -> tuple[int, str]:
    """Return the bytes that an operation uses in addition to inputs and outputs, and their purpose; 0 if unknown."""
    return _taken(operation, args, answer), "workspace"


def _taken(operation: str, args: tuple[Any, ...], answer: Any) -> int:
    name = operation.split(".", maxsplit=1)[0]
    if not args or not isinstance(args[0], Tensor) or args[0].device.type != "cpu":
        return 0
    first = args[0]
    match name:
        case "convolution" | "convolution_backward":
            return _measured(name, args)
        case "native_batch_norm_backward":
            if _is_channels_last(first) == _is_channels_last(args[1]):
                return _size(first)
            return 2 * _size(first) * (first.dtype in _HALVES and _is_channels_last(args[1]))
    return _copies(name, args, answer)


def _copies(name: str, args: tuple[Any, ...], answer: Any) -> int:
    """Return the bytes of copies in another layout or type, which some kernels make of their arguments."""
    first = args[0]
    match name:
        case "upsample_bilinear2d_backward" if not first.is_contiguous() and not _is_channels_last(first):
            return _size(first) + _size(answer)
        case "upsample_bilinear2d" if first.is_contiguous() and not _is_channels_last(first):
            return _size(first) + _size(answer)
        case "_log_softmax" | "_softmax" if not first.is_contiguous():
            return _size(first)
        case "_adaptive_avg_pool2d_backward" if _is_channels_last(args[1]):
            return _size(args[1])
        case "sum" | "mul" | "add" | "sub" | "div":
            return max(_cast(each, answer) for each in args[:2])
    return 0


def _is_channels_last(tensor: Tensor) -> bool:
    return tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last)


def _cast(value: Any, answer: Any) -> int:
    """Return the bytes of a copy that an operation makes of an argument of another type."""
    if not isinstance(value, Tensor) or not isinstance(answer, Tensor) or value.dtype == answer.dtype or not value.ndim:
        return 0
    return value.numel() * answer.element_size()


# Operations of a measured convolution, about; larger ones are measured with fewer samples.
_MEASURED_WORK = 2**29
# Operations that take as long as reading and writing a number.
_WORK_PER_NUMBER = 32
_Line = tuple[int, int, int]
_lines: dict[tuple[Any, ...], _Line] = {}


def _measured(name: str, args: tuple[Any, ...]) -> int:
    """Return the bytes that a convolution uses inside, linear in the samples: measured with two numbers of them."""
    batched = 2 if name == "convolution_backward" else 1
    samples, images = int(args[0].shape[0]), args[batched - 1]
    signature = (
        (tuple(each.shape[position < batched :]), each.stride(), each.dtype) if isinstance(each, Tensor) else str(each)
        for position, each in enumerate(args)
    )
    key = (name, torch.get_num_threads(), *signature)
    if key not in _lines:
        work = max(args[batched].numel(), _WORK_PER_NUMBER * images.shape[1]) * math.prod(images.shape[2:])
        # Threads share the samples, and each has its own sums: fewer samples would show fewer sums.
        count = min(samples, max(torch.get_num_threads(), _MEASURED_WORK // work))
        taken, doubled = (_taken_in_a_run(name, args, batched, each) for each in (count, 2 * count))
        _lines[key] = count, taken, max(0, doubled - taken) // count
    count, taken, growth = _lines[key]
    return max(0, taken + (samples - count) * growth)


def _taken_in_a_run(name: str, args: tuple[Any, ...], batched: int, samples: int) -> int:
    """Run an operation on zeros, and return the bytes in use inside it at its peak, without its answer."""
    config = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())  # noqa: FBT003  # torch takes them by position: only memory
    with torch._C._DisableTorchDispatch(), torch.no_grad():  # noqa: SLF001  # no public way out of fake tensors
        real = [
            _zeros(each, samples if position < batched else None) if isinstance(each, Tensor) else each
            for position, each in enumerate(args)
        ]
        # The public profiler takes seconds to start, and writes to standard error.
        _autograd._enable_profiler_legacy(config)  # noqa: SLF001  # see above
        try:
            answer = getattr(torch.ops.aten, name)(*real)
        finally:
            records: Any = _autograd._disable_profiler_legacy()  # noqa: SLF001  # see above; Any: its annotation is wrong
    del answer  # kept until here: what is freed with it is not used inside
    changes: list[int] = [
        each.cpu_memory_usage() for thread in records for each in thread if each.kind() == "memory_alloc"
    ]
    return max(accumulate(changes, initial=0)) - sum(changes)


def _zeros(tensor: Tensor, samples: int | None) -> Tensor:
    """Return zeros with a tensor's strides, for a number of samples."""
    shape = tensor.shape if samples is None else (samples, *tensor.shape[1:])
    extent = 1 + sum((count - 1) * stride for count, stride in zip(shape, tensor.stride(), strict=True))
    return torch.zeros(max(0, extent), dtype=tensor.dtype).as_strided(shape, tensor.stride())


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


ROOM = "room for kernels"
"""Purpose of memory that a kernel may use, but does not need."""

_HALVES = (torch.float16, torch.bfloat16)
_FLASH_BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward.default"
# Rows and columns of the kernel's tiles.
_ROWS, _COLUMNS = 128, 32
# Tensor cores process channels in groups of this size.
_CHANNELS = 8
_FP32_BYTES = 4


def gpu_workspace(operation: str, args: tuple[Any, ...], answer: Any) -> tuple[int, str]:
    """Return the bytes that an operation uses in addition to inputs and outputs, and their purpose; 0 if unknown."""
    if operation == _FLASH_BACKWARD:
        return _attention_backward(args[1]), "workspace"
    if operation == "convolution.default":
        return _convolution(args[0], args[1], answer), ROOM
    if operation == "convolution_backward.default":
        output, images, weight = args[:3]
        return _convolution(images, weight, output), ROOM
    return NO_MEMORY


def _attention_backward(query: Tensor) -> int:
    """Return the bytes of the queries' gradient in fp32, if the result has 16 bits, and of one number per row."""
    batch, heads, rows, columns = query.shape
    rows = -(-rows // _ROWS) * _ROWS
    columns = -(-columns // _COLUMNS) * _COLUMNS if query.dtype in _HALVES else 0
    return batch * heads * rows * (columns + 1) * _FP32_BYTES


def _convolution(images: Tensor, weight: Tensor, output: Tensor) -> int:
    filters = 2 * _FP32_BYTES * weight.numel()
    if images.ndim == 4 and images.is_contiguous(memory_format=torch.channels_last):
        channels = images.shape[1]
        is_padded = channels % _CHANNELS != 0 and images.dtype in _HALVES
        return filters + (_size(images) * -(-channels // _CHANNELS) * _CHANNELS // channels if is_padded else 0)
    return filters + _size(images) + _size(output)
