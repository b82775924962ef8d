"""Tensors that a program allocates and frees, in order, with their purpose.

They are tracked operation by operation, by the storages of the returned tensors, fake or real. Memory that a kernel
uses internally is not visible, and must be known.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
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
