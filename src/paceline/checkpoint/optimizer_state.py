"""How does an optimizer get back exactly the state it had?

``Optimizer.load_state_dict`` casts floating-point state to the dtype of its parameter without a word: float32
moments over bfloat16 parameters lose half their bits. Here every saved tensor keeps its dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.errors import CheckpointError

# How the update is executed, not what it computes: these stay as the live optimizer has them.
_EXECUTION_OPTIONS = frozenset({"foreach", "fused", "capturable", "differentiable"})
_NOT_COMPARED = _EXECUTION_OPTIONS | {"params", "param_names", "initial_lr"}
# State that has its parameter's shape in every optimizer that uses the name.
_PARAMETER_SHAPED = frozenset({"momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"})


class OptimizerComponent:
    """An optimizer as a component of a checkpoint."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's own state dictionary."""
        return self.optimizer.state_dict()

    def check_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Raise :class:`CheckpointError` if the state is not of such an optimizer."""
        check_optimizer_state(self.optimizer, state)

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Take over a saved state, bit for bit."""
        load_optimizer_state(self.optimizer, state)


def load_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Restore an optimizer: its options, and its per-parameter state with the saved dtypes.

    Tensors go where the optimizer wants them (moments beside their parameter, with the parameter's memory
    format); the options that say only how the update is executed (``fused``, ``foreach``, ...) stay as they
    are.

    Raises:
        CheckpointError: If the state has other groups, parameters, options or shapes; then nothing changed.
    """
    check_optimizer_state(optimizer, state)
    groups = [
        _merged_options(saved, live) for saved, live in zip(state["param_groups"], optimizer.param_groups, strict=True)
    ]
    optimizer.load_state_dict({**state, "param_groups": groups})
    parameters = _parameters(optimizer, groups)
    for index, saved in state["state"].items():
        if index in parameters:
            live = optimizer.state[parameters[index]]
            optimizer.state[parameters[index]] = _with_saved_bits(saved, live, parameters[index])


def check_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Compare a saved state with an optimizer that may not have made a step yet.

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
            f"but the live optimizer has {len(live_groups)}. Use the recipe it was saved with."
        )
    for index, (saved, live) in enumerate(zip(saved_groups, live_groups, strict=True)):
        _check_group(index, saved, live)
    parameters = _parameters(optimizer, saved_groups)
    for key, values in state["state"].items():
        _check_parameter_state(key, values, parameters)


def _merged_options(saved: Mapping[str, Any], live: Mapping[str, Any]) -> dict[str, Any]:
    defaults = {key: value for key, value in live.items() if key not in ("params", "param_names")}
    kept = {key: live[key] for key in _EXECUTION_OPTIONS if key in live}
    return {**defaults, **saved, **kept}


def _check_group(index: int, saved: Mapping[str, Any], live: Mapping[str, Any]) -> None:
    if len(saved["params"]) != len(live["params"]):
        raise CheckpointError(
            f"optimizer: parameter group {index} has {len(saved['params'])} parameters in the checkpoint, "
            f"but {len(live['params'])} in the live optimizer. Use the recipe it was saved with."
        )
    unknown = sorted(saved.keys() - live.keys() - _NOT_COMPARED)
    absent = sorted(live.keys() - saved.keys() - _NOT_COMPARED)
    # A newer PyTorch may know one more option: its default stands. Differing both ways is another optimizer.
    if unknown and absent:
        raise CheckpointError(
            f"optimizer: parameter group {index} was saved by another optimizer: it has {', '.join(unknown)} "
            f"and lacks {', '.join(absent)}. Use the recipe it was saved with."
        )


def _check_parameter_state(key: Any, values: Any, parameters: Mapping[Any, Tensor]) -> None:
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
                f"optimizer: {name!r} of parameter {key} has the shape {list(value.shape)} in the "
                f"checkpoint, but the live parameter has {expected}. Use the recipe it was saved with."
            )


def _parameters(optimizer: Optimizer, saved_groups: list[dict[str, Any]]) -> dict[Any, Tensor]:
    return {
        index: parameter
        for saved, live in zip(saved_groups, optimizer.param_groups, strict=True)
        for index, parameter in zip(saved["params"], live["params"], strict=True)
    }


def _with_saved_bits(saved: Any, loaded: Any, parameter: Tensor) -> Any:
    """Take the structure and devices that the optimizer chose, with the values and dtypes that were saved."""
    if isinstance(saved, Tensor) and isinstance(loaded, Tensor):
        return _placed(saved, loaded.device, parameter)
    if isinstance(saved, Mapping) and isinstance(loaded, Mapping):
        return {key: _with_saved_bits(saved.get(key, value), value, parameter) for key, value in loaded.items()}
    if isinstance(saved, (list, tuple)) and isinstance(loaded, (list, tuple)):
        return type(saved)(_with_saved_bits(*pair, parameter) for pair in zip(saved, loaded, strict=True))
    return loaded


def _placed(saved: Tensor, device: torch.device, parameter: Tensor) -> Tensor:
    with torch.no_grad():
        if saved.shape != parameter.shape:
            return saved.detach().to(device, copy=True)
        # Moments in another memory format than their parameter would take the optimizer's slow path.
        like = torch.empty_like(parameter, dtype=saved.dtype, device=device, requires_grad=False)
        return like.copy_(saved)
