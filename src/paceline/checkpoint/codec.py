"""How does a nested state become JSON beside named tensors, and come back exactly?

Plain JSON values stand for themselves, so that a person can read the structure. Everything JSON cannot say
is an object with one key that begins with ``$``: tuples, dictionaries with keys that are not plain strings,
floats that are not finite (with their exact bits), very large integers, and tensors, which are named and
stored elsewhere. Only these types exist: nothing read back can run code.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.errors import CheckpointError

_RESERVED_NAME = "__metadata__"  # the one key a safetensors header keeps for itself
_LARGEST_PLAIN_BITS = 64  # longer integers travel as hexadecimal: JSON readers limit decimal digits
_SUPPORTED = "dict, list, tuple, str, int, float, bool, None and torch.Tensor"


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor is without its values: dtype name (``bfloat16``) and shape."""

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor | Part) -> TensorSpec:
        """Describe a tensor on any device; of a part, the whole tensor."""
        values = tensor.tensor if isinstance(tensor, Part) else tensor
        return cls(str(values.dtype).removeprefix("torch."), tuple(tensor.shape))

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True)
class Part:
    """This process's part of a tensor that is spread over processes.

    Attributes:
        tensor: Its values; empty if another process has the same part and writes it.
        shape: Of the whole tensor.
        offsets: Where the part begins in it, in each dimension.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]


def encode(state: Any, *, where: str = "state") -> tuple[Any, dict[str, Tensor | Part]]:
    """Split a state into a JSON-able structure and contiguous CPU tensors.

    The keys of a flat dictionary of tensors are the tensor names, unchanged. Tensors that are already
    contiguous on the CPU are not copied: write them before the state changes.

    Args:
        state: Nested dict, list, tuple, str, int, float, bool, None, tensors and parts of them.
        where: First word of the path in an error, usually the component's name.

    Raises:
        CheckpointError: If an object inside is of another type; the message has its path and type.
    """
    structure, tensors = _walk(state, where)
    return structure, {name: map_tensors(tensor, _on_host) for name, tensor in tensors.items()}


def inventory(state: Any, *, where: str = "state") -> dict[str, TensorSpec]:
    """List the tensors of a state under their stored names, without copying any of them."""
    return {name: TensorSpec.of(tensor) for name, tensor in _walk(state, where)[1].items()}


def map_tensors(state: Any, change: Callable[[Tensor], Any]) -> Any:
    """Rebuild the containers of a state with every tensor replaced by ``change(tensor)``."""
    if isinstance(state, Tensor):
        return change(state)
    if isinstance(state, Part):
        return replace(state, tensor=change(state.tensor))
    if isinstance(state, Mapping):
        return {key: map_tensors(value, change) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(map_tensors(value, change) for value in state)
    return state


def decode(structure: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Rebuild the state that :func:`encode` took apart.

    Raises:
        CheckpointError: If the structure names a tensor that is absent, or is not of this format.
    """
    try:
        return _decode(structure, tensors)
    except (KeyError, ValueError, TypeError, struct.error, RecursionError) as error:
        raise CheckpointError(f"the structure of a component is not valid: {error!r}") from error


def _walk(state: Any, where: str) -> tuple[Any, dict[str, Tensor | Part]]:
    encoder = _Encoder(where)
    try:
        structure = encoder.encode(state, ())
    except RecursionError:
        raise CheckpointError(
            f"{where} cannot be saved: it is nested too deeply or contains itself; give a flat state."
        ) from None
    return structure, encoder.tensors


class _Encoder:
    def __init__(self, where: str) -> None:
        self.where = where
        self.tensors: dict[str, Tensor | Part] = {}

    def encode(self, value: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(value, (Tensor, Part)):
            return {"$tensor": self._add(value, path)}
        if isinstance(value, dict):
            return self._encode_dict(value, path)
        # The exact type: a subclass (numpy.float64, an enum, a named tuple) would come back as another.
        kind = type(value)
        if kind is list or kind is tuple:
            items = [self.encode(item, (*path, index)) for index, item in enumerate(value)]
            return items if kind is list else {"$tuple": items}
        if kind is float and not math.isfinite(value):
            return {"$float": struct.pack(">d", value).hex()}
        if kind is int and value.bit_length() > _LARGEST_PLAIN_BITS:
            return {"$int": hex(value)}
        if value is None or kind in (str, bool, int, float):
            return value
        raise self._unsupported(value, path)

    def _encode_dict(self, value: dict[Any, Any], path: tuple[Any, ...]) -> Any:
        for key in value:
            if type(key) not in (str, int):
                raise self._unsupported(key, path, what="the key")
        encoded = [(key, self.encode(item, (*path, key))) for key, item in value.items()]
        if all(type(key) is str and not key.startswith("$") for key in value):
            return dict(encoded)
        return {"$dict": [[self.encode(key, path), item] for key, item in encoded]}

    def _add(self, tensor: Tensor | Part, path: tuple[Any, ...]) -> str:
        plain = (tensor.tensor if isinstance(tensor, Part) else tensor).detach()
        if type(plain) is not Tensor or not _is_dense(plain):
            what = "the tensor (only a dense, whole tensor with values can be saved)"
            raise self._unsupported(tensor, path, what=what)
        name = self._free_name(".".join(str(key) for key in path) if path else "tensor")
        self.tensors[name] = replace(tensor, tensor=plain) if isinstance(tensor, Part) else plain
        return name

    def _free_name(self, wanted: str) -> str:
        # 'a.b' may be one key or two; a lone surrogate cannot be written as UTF-8.
        base = wanted.encode("utf-8", "backslashreplace").decode("utf-8")
        name, count = base, 1
        while name in self.tensors or name == _RESERVED_NAME:
            count += 1
            name = f"{base}#{count}"
        return name

    def _unsupported(self, value: Any, path: tuple[Any, ...], *, what: str = "the value") -> CheckpointError:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        place = ".".join((self.where, *(str(key) for key in path)))
        return CheckpointError(
            f"{place} cannot be saved: {what} is of type {kind}, but a state holds only {_SUPPORTED}; "
            "convert it in state_dict()."
        )


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta


def _on_host(tensor: Tensor) -> Tensor:
    on_host = tensor.detach().cpu().resolve_conj().resolve_neg()
    return on_host if on_host.is_contiguous() else _laid_out(on_host)


def _laid_out(tensor: Tensor) -> Tensor:
    # Not by torch: in the thread that writes, it would begin threads beside those that compute, and as long as there
    # are more of these than cores, OpenMP lets none of them wait actively: every operation of every step is held up.
    same_width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
    numbers = np.ascontiguousarray(tensor.view(same_width[tensor.dtype.itemsize]).numpy())
    return torch.from_numpy(numbers).view(tensor.dtype)


def _decode(node: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(node, list):
        return [_decode(item, tensors) for item in node]
    if not isinstance(node, dict):
        return node
    mark = next((key for key in node if key.startswith("$")), None)
    if mark is None:
        return {key: _decode(item, tensors) for key, item in node.items()}
    if len(node) != 1:
        raise ValueError(f"an object with the mark {mark!r} holds other keys too")
    return _decode_marked(mark, node[mark], tensors)


def _decode_marked(mark: str, content: Any, tensors: Mapping[str, Tensor]) -> Any:
    match mark:
        case "$tensor":
            return tensors[content]
        case "$tuple":
            return tuple(_decode(item, tensors) for item in content)
        case "$dict":
            return dict(_pairs(content, tensors))
        case "$float":
            return struct.unpack(">d", bytes.fromhex(content))[0]
        case "$int":
            return int(content, 16)
    raise ValueError(f"unknown mark {mark!r}")


def _pairs(content: Any, tensors: Mapping[str, Tensor]) -> Iterator[tuple[Any, Any]]:
    for key, item in content:
        yield _decode(key, tensors), _decode(item, tensors)
