"""Checkpoint components for a model and an optimizer whose tensors are sharded over processes.

Their state has a :class:`Part` for each distributed tensor of torch. It can be restored from a checkpoint of any number
of processes, sharded or not: each process reads the part that it holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from paceline.checkpoint.format import Chunk, Part, TensorSpec, map_tensors
from paceline.checkpoint.state import check_optimizer_state, load_optimizer_state
from paceline.errors import CheckpointError


class ShardedModel:
    """A module with distributed parameters as a checkpoint component."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def state_dict(self) -> dict[str, Any]:
        """Return parts for distributed tensors, and other tensors unchanged."""
        return {key: as_part(tensor) for key, tensor in self._module.state_dict().items()}

    def chunk_of(self, key: str, spec: TensorSpec) -> Chunk | None:
        """Return the part of a stored tensor that this process holds.

        Raises:
            CheckpointError: If the module's tensor of this name has another shape.
        """
        live = self._module.state_dict().get(key)
        if live is None:
            return None  # check_state_dict reports it, with all others
        if TensorSpec.of(live) != spec:
            raise CheckpointError(
                f"{key!r} is {spec} in the checkpoint, but {TensorSpec.of(live)} in the live object. Nothing is cast "
                "or skipped on load: use the recipe it was saved with."
            )
        return chunk_of(live)

    def check_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Raise :class:`CheckpointError` if names are missing or extra."""
        live = self._module.state_dict()
        mismatched = [*(key for key in live if key not in state), *(key for key in state if key not in live)]
        if mismatched:
            where = "absent in the checkpoint" if mismatched[0] in live else "not in the live object"
            raise CheckpointError(
                f"{mismatched[0]!r} is {where} ({len(mismatched)} such names); use the recipe it was saved with."
            )

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Load this process's parts, and the unsharded tensors."""
        for key, live in self._module.state_dict().items():
            local = live.to_local() if isinstance(live, DTensor) else live
            local.copy_(state[key])


class ShardedOptimizer:
    """An optimizer of distributed parameters as a checkpoint component."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state dictionary, with parts for distributed tensors."""
        state: dict[str, Any] = map_tensors(self._optimizer.state_dict(), as_part)
        return state

    def chunk_of(self, key: str, spec: TensorSpec) -> Chunk | None:
        """Return this process's part of a stored tensor: the parameter's part, if the shapes agree."""
        _, index, *_ = key.split(".")
        parameter = self._parameters().get(int(index)) if index.isdigit() else None
        if not isinstance(parameter, DTensor) or tuple(parameter.shape) != spec.shape:
            return None
        return chunk_of(parameter)

    def check_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Raise :class:`CheckpointError` if the state does not belong to such an optimizer."""
        check_optimizer_state(self._optimizer, self._distributed(state))

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Load a saved state, bit for bit."""
        load_optimizer_state(self._optimizer, self._distributed(state))

    def _parameters(self) -> dict[int, Tensor]:
        return dict(enumerate(each for group in self._optimizer.param_groups for each in group["params"]))

    def _distributed(self, state: Mapping[str, Any]) -> dict[str, Any]:
        parameters = self._parameters()
        entries = {
            index: {name: _shard_like(value, parameters.get(index)) for name, value in entry.items()}
            for index, entry in state.get("state", {}).items()
        }
        return {**state, "state": entries}


def as_part(tensor: Tensor) -> Tensor | Part:
    """Return this process's part of a distributed tensor, or any other tensor unchanged.

    If several processes hold the same part, only the first has values to write.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    chunk = chunk_of(tensor)
    local: Tensor = tensor.to_local().detach()
    if chunk is None:
        return local
    coordinate = tensor.device_mesh.get_coordinate() or ()
    is_copy = any(index and each.is_replicate() for index, each in zip(coordinate, tensor.placements, strict=True))
    return Part(local[:0] if is_copy else local, tuple(tensor.shape), chunk.offsets)


def chunk_of(tensor: Tensor) -> Chunk | None:
    """Return the box of a tensor that this process holds; None if it holds all of it."""
    if not isinstance(tensor, DTensor) or all(each.is_replicate() for each in tensor.placements):
        return None
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]  # untyped in torch
    return Chunk(tuple(chunk.offsets), tuple(chunk.sizes))


def _shard_like(value: Any, parameter: Tensor | None) -> Any:
    """Convert a part that was read to a tensor sharded like its parameter."""
    if not isinstance(parameter, DTensor) or not isinstance(value, Tensor):
        return value
    local: Tensor = parameter.to_local()
    if value.shape != local.shape or isinstance(value, DTensor):
        return value
    return DTensor.from_local(
        value.to(parameter.device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
