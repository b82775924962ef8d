"""The state of a run: named components, snapshots in host memory, and exact restoration.

A component is anything with ``state_dict`` and ``load_state_dict``: a model, an optimizer, a counter. The registry
copies all of them at one moment, and restores all of them, or none.

``Optimizer.load_state_dict`` silently casts floating-point state to the dtype of its parameter: float32 moments over
bfloat16 parameters lose half their bits. Here every saved tensor keeps its dtype.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.checkpoint.format import Chunk, ChunkOf, TensorSpec, inventory, map_tensors
from paceline.checkpoint.manifest import check_component_names
from paceline.errors import CheckpointError, did_you_mean
from paceline.host.machine import available_cores

State = Mapping[str, Any]

WRAPPERS = ("module.", "_orig_mod.", "model.")
"""Prefixes that DistributedDataParallel, torch.compile and other trainers add to every name."""

_MAX_THREADS = 4  # more threads do not increase memory throughput
# Options for how the update is executed: the live optimizer's values are kept.
_EXECUTION_OPTIONS = frozenset({"foreach", "fused", "capturable", "differentiable"})
_NOT_COMPARED = _EXECUTION_OPTIONS | {"params", "param_names", "initial_lr"}
# State that has its parameter's shape in every optimizer that uses the name.
_PARAMETER_SHAPED = frozenset({"momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"})
_ADVICE = "Use the recipe it was saved with."


class Component(Protocol):
    """An object whose state is saved and restored, such as a ``torch.nn.Module``."""

    def state_dict(self) -> State:
        """Return the state: nested containers of plain values and tensors."""
        ...

    def load_state_dict(self, state: dict[str, Any], /) -> Any:
        """Load a state that :meth:`state_dict` returned."""
        ...


def has_state(target: Any) -> bool:
    """Whether an object has a state to be saved; a class has none."""
    return not isinstance(target, type) and hasattr(target, "state_dict") and hasattr(target, "load_state_dict")


def bare_module(target: Any) -> Any:
    """Return the module within ``DistributedDataParallel`` and ``torch.compile``, which change its tensors' names."""
    while isinstance(target, nn.Module):
        is_replica = isinstance(target, nn.parallel.DistributedDataParallel)
        inner = target.module if is_replica else getattr(target, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            break
        target = inner
    return target


@runtime_checkable
class SelfChecking(Protocol):
    """A component that validates a saved state itself, because its live state may be empty (a fresh optimizer)."""

    def check_state_dict(self, state: State, /) -> None:
        """Raise :class:`CheckpointError` if the state does not fit, without changing anything."""
        ...


@runtime_checkable
class Sharded(Protocol):
    """A component of which each process holds and reads only a part of the tensors."""

    def chunk_of(self, key: str, spec: TensorSpec, /) -> Chunk | None:
        """Return the box of a stored tensor that this process holds; None for all of it."""
        ...


class Registry:
    """Named components in the order they were added; ``advice`` tells how to make one fit that does not."""

    def __init__(
        self, advice: str = f"{_ADVICE[:-1]}, or start a new run from its weights with initialize_from."
    ) -> None:
        self._components: dict[str, Component] = {}
        self._copies = HostCopies()
        self._advice = advice

    def add(self, name: str, component: Component) -> None:
        """Add a component under a new name.

        Raises: CheckpointError: If the name is in use, or cannot be a file name.
        """
        check_component_names([name])
        if name in self._components:
            raise CheckpointError(f"the component {name!r} is registered twice; give each its own name.")
        self._components[name] = component

    def snapshot(self) -> dict[str, State]:
        """Copy every state to host memory, so that training can continue while the copy is written.

        The copy waits for the device: this is the pause of a save. The next snapshot overwrites the copy.
        """
        states = {name: self._copies.take(name, component.state_dict()) for name, component in self._components.items()}
        self._copies.finish()
        return states

    def chunks(self) -> dict[str, ChunkOf]:
        """Return, by component, the parts of sharded components' tensors that this process holds."""
        return {name: each.chunk_of for name, each in self._components.items() if isinstance(each, Sharded)}

    def restore(self, states: Mapping[str, State]) -> None:
        """Restore every component; all states are checked before the first component is changed.

        Raises:
            CheckpointError: If a component is missing or extra, or a state does not fit; names both.
        """
        missing = [name for name in self._components if name not in states]
        extra = [name for name in states if name not in self._components]
        if missing or extra:
            parts = [f"it lacks {name!r}.{did_you_mean(name, extra)}" for name in missing]
            parts += [f"it holds {name!r}, which this run does not use." for name in extra]
            raise CheckpointError(f"The checkpoint does not fit this run: {' '.join(parts)} {self._advice}")
        for name, component in self._components.items():
            with _naming(name, self._advice):
                if isinstance(component, SelfChecking):
                    component.check_state_dict(states[name])
                else:
                    check_inventory(component.state_dict(), states[name], f"component {name!r}", self._advice)
        for name, component in self._components.items():
            with _naming(name, self._advice):
                component.load_state_dict(dict(states[name]))


@contextmanager
def _naming(name: str, advice: str) -> Iterator[None]:
    """Add the component's name and advice to an error: a damaged or hand-made state can fail anywhere."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"component {name!r} does not accept its saved state: {error!r}. {advice}") from error


def check_inventory(live: State, saved: State, where: str, advice: str = _ADVICE) -> None:
    """Compare names, dtypes and shapes of the tensors; a live state without tensors is not compared.

    Raises:
        CheckpointError: Naming the component, the key, what was found and what was expected.
    """
    expected, found = inventory(dict(live), where=where), inventory(dict(saved), where=where)
    if not expected or expected == found:
        return
    differing = [key for key in dict.fromkeys((*expected, *found)) if expected.get(key) != found.get(key)]
    more = f" ({len(differing) - 1} more keys differ.)" if len(differing) > 1 else ""
    if (extra := next((key for key in differing if key not in expected), differing[0])) != differing[0]:
        more = f" The checkpoint also holds {extra!r}, {found[extra]}.{more}"
    raise CheckpointError(
        f"{where}: {differing[0]!r} is {found.get(differing[0], 'absent')} in the checkpoint, but "
        f"{expected.get(differing[0], 'absent')} in the live object. Nothing is cast or skipped on load. {advice}{more}"
    )


def strip_wrapper_prefix(live: State, saved: State) -> tuple[dict[str, Any], str]:
    """Return weights without the prefix that a wrapper or a larger network added to their names, and the prefix.

    It is removed only if no name matches the network's own with it, and most of the network's names match without it.
    """
    prefixes = Counter(
        prefix
        for name in saved
        for prefix in (name[: at + 1] for at, character in enumerate(name) if character == ".")
        if name.removeprefix(prefix) in live
    )
    prefix = max(prefixes, key=lambda each: prefixes[each], default="")
    if 2 * prefixes[prefix] <= len(live) or any(name in live for name in saved):
        return dict(saved), ""
    return {name.removeprefix(prefix): tensor for name, tensor in saved.items()}, prefix


def adapt_weights(live: State, saved: State) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return weights with a network's names and dtypes, and notices about the changes.

    Half precision is widened to float32, which is exact; float64 is rounded to it.
    """
    state, prefix = strip_wrapper_prefix(live, saved)
    notices = [f"the names' prefix '{prefix}' was left out"] if prefix else []
    for name, tensor in state.items():
        expected = live.get(name)
        is_cast = isinstance(tensor, Tensor) and tensor.dtype in (torch.float16, torch.bfloat16, torch.float64)
        if is_cast and isinstance(expected, Tensor) and expected.dtype == torch.float32:
            state[name] = tensor.float()
            notices.append(f"{str(tensor.dtype).removeprefix('torch.')} was cast to float32")
    return state, tuple(dict.fromkeys(notices))


class HostCopies:
    """Host memory for one snapshot at a time; the next overwrites it.

    New memory costs a page fault for every few thousand bytes, which takes longer than the copy itself. One copy of the
    state is therefore kept from the first save to the end of the run.
    """

    def __init__(self) -> None:
        # For each tensor: its dtype, shape and strides, and the copy.
        self._copies: dict[tuple[str, int], tuple[Any, Tensor]] = {}
        self._pending: list[tuple[Any, Any]] = []  # pairs of bytes to copy on the CPU: destination and source
        self._devices: set[torch.device] = set()
        self._max_threads = min(available_cores(), _MAX_THREADS)

    def take(self, name: str, state: Any) -> Any:
        """Rebuild a component's state with every tensor in host memory, once :meth:`finish` has returned."""
        number = itertools.count()
        return map_tensors(state, lambda tensor: self._copy((name, next(number)), tensor.detach()))

    def finish(self) -> None:
        """Copy CPU tensors, and wait until the copies from other devices have arrived.

        The CPU copies are divided among Python threads, since memory copies release the interpreter's lock. torch would
        split each copy and wait for its slowest thread, hundreds of times: that takes many times as long on a busy
        machine.
        """
        shares: list[list[tuple[Any, Any]]] = [[] for _ in range(self._max_threads)]
        sizes = [0] * len(shares)
        for pair in sorted(self._pending, key=lambda pair: -pair[0].nbytes):
            smallest = sizes.index(min(sizes))
            shares[smallest].append(pair)
            sizes[smallest] += pair[0].nbytes
        with ThreadPoolExecutor(len(shares)) as threads:
            for future in [threads.submit(_copy_all, share) for share in shares]:
                future.result()
        self._pending.clear()
        for device in self._devices:
            torch.get_device_module(device).synchronize(device)
        self._devices.clear()

    def _copy(self, key: tuple[str, int], live: Tensor) -> Tensor:
        if live.layout != torch.strided or live.is_meta:
            return live  # cannot be written to a file: refused by name on writing
        live = live.resolve_conj().resolve_neg()
        layout = live.dtype, live.shape, live.stride()
        copied_layout, copy = self._copies.get(key, (None, live))
        if copied_layout != layout:
            # Page-locked for CUDA, so that the device copies asynchronously, and all tensors at once.
            copy = torch.empty_like(live, device="cpu", pin_memory=live.is_cuda)
            self._copies[key] = layout, copy
        is_dense = live.is_contiguous() or (live.dim() == 4 and live.is_contiguous(memory_format=torch.channels_last))
        if live.device.type == "cpu" and live.stride() == copy.stride() and is_dense:
            self._pending.append((_bytes_of(copy), _bytes_of(live)))
            return copy
        with torch.no_grad():
            copy.copy_(live, non_blocking=live.is_cuda)
        if live.is_cuda:
            self._devices.add(live.device)
        return copy


def _copy_all(pairs: list[tuple[Any, Any]]) -> None:
    for copy, live in pairs:
        np.copyto(copy, live)


def _bytes_of(tensor: Tensor) -> Any:
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()


class OptimizerComponent:
    """An optimizer as a checkpoint component; ``advice`` tells what to do about a state that does not fit."""

    advice = _ADVICE

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state dictionary."""
        return self.optimizer.state_dict()

    def check_state_dict(self, state: State, /) -> None:
        """Raise :class:`CheckpointError` if the state does not belong to such an optimizer."""
        check_optimizer_state(self.optimizer, state, self.advice)

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Load a saved state, bit for bit."""
        load_optimizer_state(self.optimizer, state)


def load_optimizer_state(optimizer: Optimizer, state: State) -> None:
    """Restore an optimizer: its options, and its per-parameter state with the saved dtypes.

    Tensors are placed where the optimizer expects them (moments to their parameter's device, in the parameter's memory
    format). Options for how the update is executed (``foreach``, ``capturable``, ...) keep their live values; ``fused``
    is only kept on a CPU if it was saved.

    Raises:
        CheckpointError: If the state has other groups, parameters, options or shapes; nothing is changed then.
    """
    check_optimizer_state(optimizer, state)
    groups = []
    for saved, group in zip(state["param_groups"], optimizer.param_groups, strict=True):
        defaults = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        live = {key: group[key] for key in _EXECUTION_OPTIONS if key in group}
        if live.get("fused") and all(each.device.type == "cpu" for each in group["params"]):
            live["fused"] = saved.get("fused")  # it rounds differently
        groups.append({**defaults, **saved, **live})
    optimizer.load_state_dict({**state, "param_groups": groups})
    parameters = _parameters(optimizer, groups)
    for index, values in state["state"].items():
        if index in parameters:
            parameter = parameters[index]
            optimizer.state[parameter] = _with_saved_dtypes(values, optimizer.state[parameter], parameter)


def check_optimizer_state(optimizer: Optimizer, state: State, advice: str = _ADVICE) -> None:
    """Compare a saved state with an optimizer that may not have taken a step yet.

    Raises:
        CheckpointError: Naming the group or parameter, what was found and what was expected.
    """
    if not {"state", "param_groups"} <= state.keys():
        raise CheckpointError(
            f"optimizer: the saved state holds {sorted(map(str, state))}, expected 'state' and 'param_groups'."
        )
    saved_groups, live_groups = state["param_groups"], optimizer.param_groups
    if len(saved_groups) != len(live_groups):
        raise CheckpointError(
            f"optimizer: the checkpoint has {len(saved_groups)} parameter groups, "
            f"but the live optimizer has {len(live_groups)}. {advice}"
        )
    for index, (saved, live) in enumerate(zip(saved_groups, live_groups, strict=True)):
        if len(saved["params"]) != len(live["params"]):
            raise CheckpointError(
                f"optimizer: parameter group {index} has {len(saved['params'])} parameters in the checkpoint, "
                f"but {len(live['params'])} in the live optimizer. {advice}"
            )
        unknown = sorted(saved.keys() - live.keys() - _NOT_COMPARED)
        absent = sorted(live.keys() - saved.keys() - _NOT_COMPARED)
        # A newer PyTorch may have one more option: its default is kept. If both sides have extra options, it is another
        # optimizer.
        if unknown and absent:
            raise CheckpointError(
                f"optimizer: parameter group {index} was saved by another optimizer: it has {', '.join(unknown)} "
                f"and lacks {', '.join(absent)}. {advice}"
            )
    parameters = _parameters(optimizer, saved_groups)
    for key, values in state["state"].items():
        _check_parameter_state(key, values, parameters, advice)


def _check_parameter_state(key: Any, values: Any, parameters: Mapping[Any, Tensor], advice: str) -> None:
    if isinstance(key, int) and key not in parameters:
        raise CheckpointError(
            f"optimizer: the checkpoint has state for parameter {key}, which is in none of its groups."
        )
    if key not in parameters or not isinstance(values, Mapping):
        return
    expected = list(parameters[key].shape)
    for name in _PARAMETER_SHAPED & values.keys():
        value = values[name]
        if isinstance(value, Tensor) and list(value.shape) != expected:
            raise CheckpointError(
                f"optimizer: {name!r} of parameter {key} has the shape {list(value.shape)} in the checkpoint, "
                f"but the live parameter has {expected}. {advice}"
            )


def _parameters(optimizer: Optimizer, saved_groups: list[dict[str, Any]]) -> dict[Any, Tensor]:
    return {
        index: parameter
        for saved, live in zip(saved_groups, optimizer.param_groups, strict=True)
        for index, parameter in zip(saved["params"], live["params"], strict=True)
    }


def _with_saved_dtypes(saved: Any, loaded: Any, parameter: Tensor) -> Any:
    """Return the optimizer's structure and devices with the saved values and dtypes."""
    if isinstance(saved, Tensor) and isinstance(loaded, Tensor):
        if saved.shape != parameter.shape:
            return saved.detach().to(loaded.device, copy=True)
        # Moments in a memory format other than their parameter's would take the optimizer's slow path.
        restored = torch.empty_like(parameter, dtype=saved.dtype, device=loaded.device, requires_grad=False)
        with torch.no_grad():
            return restored.copy_(saved)
    if isinstance(saved, Mapping) and isinstance(loaded, Mapping):
        return {key: _with_saved_dtypes(saved.get(key, value), value, parameter) for key, value in loaded.items()}
    if isinstance(saved, (list, tuple)) and isinstance(loaded, (list, tuple)):
        return type(saved)(_with_saved_dtypes(*pair, parameter) for pair in zip(saved, loaded, strict=True))
    return loaded
