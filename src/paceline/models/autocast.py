"""A network whose forward pass alone runs under autocast: what is computed with its answer is computed as written."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


class Autocast:
    """Calls a network under autocast and returns its answer in float32; attributes are the network's.

    Args:
        network: The network.
        autocast: Makes the context of a forward pass.
    """

    def __init__(self, network: Callable[..., Any], autocast: Callable[[], AbstractContextManager[Any]]) -> None:
        self._network = network
        self._autocast = autocast

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Call the network."""
        with self._autocast():
            answer = self._network(*args, **options)
        return in_float32(answer)

    def __getattr__(self, name: str) -> Any:
        if name == "_network" or name.startswith("__"):  # while it is being copied, it has no network yet
            raise AttributeError(name)
        return getattr(self._network, name)

    def applied_to(self, network: Callable[..., Any]) -> Autocast:
        """Return another network that computes as this one."""
        return Autocast(network, self._autocast)


def in_float32(answer: Any) -> Any:
    """Convert 16-bit floating-point tensors to float32, also in tuples, lists, dicts and dataclasses."""
    return tree_map(_converted, answer)


def _converted(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.float() if leaf.dtype in (torch.bfloat16, torch.float16) else leaf
    if is_dataclass(leaf) and not isinstance(leaf, type):
        converted = copy.copy(leaf)
        for each in fields(leaf):
            object.__setattr__(converted, each.name, in_float32(getattr(leaf, each.name)))  # it may be frozen
        return converted
    return leaf
