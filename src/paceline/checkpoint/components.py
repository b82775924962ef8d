"""What belongs into a checkpoint, and does a saved state fit the live objects?

A component is anything with ``state_dict`` and ``load_state_dict``: a model, an optimizer, a counter. The
registry takes a copy of all of them at one moment, and puts all of them back, or none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from paceline.checkpoint import codec
from paceline.checkpoint.codec import TensorSpec
from paceline.checkpoint.manifest import check_component_names
from paceline.checkpoint.optimizer_state import (
    OptimizerComponent,
    check_optimizer_state,
    load_optimizer_state,
)
from paceline.checkpoint.parts import Chunk, ChunkOf
from paceline.checkpoint.snapshot import HostCopies
from paceline.checkpoint.store import State
from paceline.errors import CheckpointError, did_you_mean

__all__ = [
    "Component",
    "WRAPPERS",
    "OptimizerComponent",
    "Registry",
    "SelfChecking",
    "check_inventory",
    "check_optimizer_state",
    "fitted",
    "load_optimizer_state",
    "without_prefix",
]

# What DistributedDataParallel, torch.compile and other trainers' classes put before every name.
WRAPPERS = ("module.", "_orig_mod.", "model.")


class Component(Protocol):
    """Something whose state is saved and restored; ``torch.nn.Module`` is one as it stands."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state: nested containers of plain values and tensors."""
        ...

    def load_state_dict(self, state: dict[str, Any], /) -> Any:
        """Take over a state that :meth:`state_dict` returned."""
        ...


@runtime_checkable
class SelfChecking(Protocol):
    """A component that checks a saved state itself, because its live one may be empty (a fresh optimizer)."""

    def check_state_dict(self, state: State, /) -> None:
        """Raise :class:`CheckpointError` if the state does not fit; change nothing."""
        ...


@runtime_checkable
class Spread(Protocol):
    """A component of whose tensors each process holds a part, and is given only that."""

    def chunk_of(self, key: str, spec: TensorSpec, /) -> Chunk | None:
        """What this process holds of a stored tensor; None if it is all of it."""
        ...


class Registry:
    """Named components in the order they were added."""

    def __init__(self) -> None:
        self._components: dict[str, Component] = {}
        self._copies = HostCopies()

    def add(self, name: str, component: Component) -> None:
        """Add a component under a new name.

        Raises:
            CheckpointError: If the name is taken, or cannot be a file name.
        """
        check_component_names([name])
        if name in self._components:
            raise CheckpointError(f"the component {name!r} is registered twice; give each its own name.")
        self._components[name] = component

    def snapshot(self) -> dict[str, State]:
        """Copy every state to host memory, so that training may go on while the copy is written.

        The copy waits for the device: this is the pause that a save costs. The next snapshot overwrites it.
        """
        states = {name: self._copies.take(name, component.state_dict()) for name, component in self._components.items()}
        self._copies.settle()
        return states

    def chunks(self) -> dict[str, ChunkOf]:
        """What this process holds of the tensors of components that are spread over processes, by component."""
        spread = {name: each for name, each in self._components.items() if isinstance(each, Spread)}
        return {name: each.chunk_of for name, each in spread.items()}

    def restore(self, states: Mapping[str, State]) -> None:
        """Give every component its state; all are checked before the first is changed.

        Raises:
            CheckpointError: If a component is missing or extra, or a state does not fit; names both.
        """
        self._check_names(states)
        for name, component in self._components.items():
            with _naming(name):
                if isinstance(component, SelfChecking):
                    component.check_state_dict(states[name])
                else:
                    check_inventory(component.state_dict(), states[name], where=f"component {name!r}")
        for name, component in self._components.items():
            with _naming(name):
                component.load_state_dict(dict(states[name]))

    def _check_names(self, states: Mapping[str, State]) -> None:
        missing = [name for name in self._components if name not in states]
        extra = [name for name in states if name not in self._components]
        if not missing and not extra:
            return
        parts = [f"it lacks {name!r}.{did_you_mean(name, extra)}" for name in missing]
        parts += [f"it holds {name!r}, which this run does not use." for name in extra]
        raise CheckpointError(
            f"The checkpoint does not fit this run: {' '.join(parts)} Use the recipe it was saved with, "
            "or start a new run from its weights with initialize_from."
        )


def check_inventory(live: State, saved: State, *, where: str) -> None:
    """Compare names, dtypes and shapes of the tensors; a live state without tensors is not compared.

    Raises:
        CheckpointError: Naming the component, the key, what was found and what was expected.
    """
    expected, found = codec.inventory(dict(live), where=where), codec.inventory(dict(saved), where=where)
    if not expected or expected == found:
        return
    differing = [key for key in (*expected, *found) if expected.get(key) != found.get(key)]
    key = differing[0]
    more = f" ({len(set(differing)) - 1} more keys differ.)" if len(set(differing)) > 1 else ""
    raise CheckpointError(
        f"{where}: {key!r} is {_described(found.get(key))} in the checkpoint, "
        f"but the live object has {_described(expected.get(key))}. Nothing is cast or skipped on load: "
        f"use the recipe it was saved with.{more}"
    )


def without_prefix(live: State, saved: State) -> tuple[dict[str, Any], str]:
    """Weights without the prefixes of wrappers that stand before every name, and these prefixes.

    They are left out only if no name is the network's with them.
    """
    prefix = ""
    while not any(name.removeprefix(prefix) in live for name in saved):
        wrapper = next((each for each in WRAPPERS if all(name.startswith(prefix + each) for name in saved)), None)
        if not saved or wrapper is None:
            return dict(saved), ""
        prefix += wrapper
    return {name.removeprefix(prefix): tensor for name, tensor in saved.items()}, prefix


def fitted(live: State, saved: State) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Weights under the names and in the types of a network's, and what was changed for that.

    Half precision is widened to float32, which is exact.
    """
    state, prefix = without_prefix(live, saved)
    notices = [f"all names begin with '{prefix}', which was left out"] if prefix else []
    for name, tensor in state.items():
        wanted = live.get(name)
        is_half = isinstance(tensor, Tensor) and tensor.dtype in (torch.float16, torch.bfloat16)
        if is_half and isinstance(wanted, Tensor) and wanted.dtype == torch.float32:
            state[name] = tensor.float()
            notices.append(f"{str(tensor.dtype).removeprefix('torch.')} was cast to float32")
    return state, tuple(dict.fromkeys(notices))


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Say which component an error is about: a state that was damaged or made by hand can fail anywhere."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"component {name!r} does not accept its saved state: {error!r}") from error


def _described(spec: TensorSpec | None) -> str:
    return "absent" if spec is None else str(spec)
