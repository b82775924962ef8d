"""Find what a forward pass or a loss changes and no checkpoint holds, before a run."""

from __future__ import annotations

import copy
import random
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.data.batch import Batch
from paceline.data.objects.keyed import kept_generators, seed_generators
from paceline.data.objects.parts import in_libraries, is_of_library, names_in_module, parts_of
from paceline.data.objects.purity import bytes_of
from paceline.tasks.given_objects import VALUES, fingerprint

_REGISTERS = vars(nn.Module()).keys()
_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
_OF_MODEL = " changes in each forward pass, and is in no checkpoint: make it a buffer (register_buffer, persistent)"
_OF_LOSS = " changes with each call of the loss, and is in no checkpoint: make it part of the model"
_Marks = dict[str, tuple[str, bool]]


def copied(given: Any) -> Any:
    """Return a copy of a loss; itself if it cannot be copied."""
    try:
        return copy.deepcopy(given)
    except Exception:  # noqa: BLE001  # its parts may refuse in any way
        return given


def unsaved(
    network: nn.Module, loss: Any, loss_of: Callable[[nn.Module, Any, Batch], Tensor], batches: tuple[Batch, Batch]
) -> list[str]:
    """Return a sentence for each value that training changes and a resume would lose; what was given is not changed.

    A value that changes again on the same batch is such. So is one that changed once, if a copy that has only what a
    checkpoint holds gives another loss then: it was no cache.

    Args:
        network: The network.
        loss: The loss.
        loss_of: Computes the loss of a batch, with a network and a loss; its errors are raised.
        batches: Two different batches.
    """
    used = copy.deepcopy(network).train(), copied(loss)

    def passed(given: tuple[nn.Module, Any], batch: Batch, seed: int = 0) -> bytes:
        with kept_generators(), torch.no_grad():
            seed_generators(seed, domain="training")
            return bytes_of(loss_of(*given, batch))

    before = _marks(*used)
    passed(used, batches[0])
    first = _marks(*used)
    if first == before:
        return []
    passed(used, batches[0])
    second = _marks(*used)
    if changed := [name for name in second if second[name] != first.get(name) and second[name][1]]:
        return changed
    fresh = copy.deepcopy(network).train(), copied(loss)
    try:
        fresh[0].load_state_dict(used[0].state_dict())
    except RuntimeError:  # its sizes have changed: that is not for this check
        return []
    seeds = range(4)  # dropout may hide the difference
    if all(passed(used, batches[1], seed) == passed(fresh, batches[1], seed) for seed in seeds):
        return []
    return [name for name in first if first[name] != before.get(name)][:1]


def _marks(network: nn.Module, loss: Any) -> _Marks:
    """Return marks of all values that no checkpoint holds, by sentence, and whether each is plain: not a container."""
    names = {id(each): f"model.{name}" if name else "model" for name, each in network.named_modules()}
    others = [each for each in parts_of(network) if not isinstance(each, nn.Module)]
    found = _Marks()
    for part in (*network.modules(), *others):
        called = names.get(id(part), _called(part))
        found |= {f"{called}.{name}{_OF_MODEL}": mark for name, mark in _held(part, is_saved=True)}
    for part in parts_of(loss):
        if id(part) not in names:
            found |= {f"{_called(part)}.{name}{_OF_LOSS}": mark for name, mark in _held(part, is_saved=False)}
    return found


def _called(part: Any) -> str:
    return str(part.__qualname__ if isinstance(part, types.FunctionType) else type(part).__name__)


def _held(part: Any, *, is_saved: bool) -> Iterator[tuple[str, tuple[str, bool]]]:
    """Yield the values of a user's object that its ``state_dict`` lacks, each with a mark."""
    own: dict[str, Any] = {}
    if isinstance(part, types.FunctionType):
        if not is_of_library(part.__code__):
            cells = zip(part.__code__.co_freevars, part.__closure__ or (), strict=False)
            own = {**vars(part), **dict(names_in_module(part))}
            own |= {name: cell.cell_contents for name, cell in cells if cell != types.CellType()}
    elif isinstance(part, nn.Module):
        own = {name: each for name, each in vars(part).items() if name not in _REGISTERS}
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            own = {}
        lost = part._non_persistent_buffers_set if is_saved else part._buffers  # noqa: SLF001  # they have no public name
        own |= {name: each for name, each in part.named_buffers(recurse=False) if name in lost}
    elif hasattr(part, "__dict__") and not isinstance(part, type) and not in_libraries(type(part)):
        own = vars(part)
    for name, value in own.items():
        if isinstance(value, _GENERATORS):
            yield name, (_state(value), True)
        elif isinstance(value, (*VALUES, list, dict, set, deque)):
            is_plain = isinstance(value, (*VALUES, deque))
            yield name, (fingerprint(list(value) if isinstance(value, deque) else value), is_plain)


def _state(generator: Any) -> str:
    if isinstance(generator, np.random.Generator):
        return str(generator.bit_generator.state)
    return str(generator.getstate() if isinstance(generator, random.Random) else generator.get_state().tolist())
