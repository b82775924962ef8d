"""Choose the modules that gather their weights together under sharding."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from paceline.distributed.collectives import Collectives
from paceline.errors import ModelError
from paceline.recipe.running import Parallel

_MAX_LISTED = 4
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def modules_to_shard(network: nn.Module, parallel: Parallel) -> dict[str, nn.Module]:
    """Return the modules that gather their weights separately, by name, inner ones first.

    Without patterns these are the blocks that a network consists of (a transformer's layers, a residual network's
    blocks and stages): items of ``nn.ModuleList`` and ``nn.Sequential`` that have submodules.

    Raises:
        ModelError: If a pattern does not match a callable module with parameters.
    """
    modules = {name: module for name, module in network.named_modules() if name and _gathers(module)}
    if parallel.shard_modules:
        chosen = _matching(modules, parallel.shard_modules)
    else:
        chosen = {name for name, module in modules.items() if _is_block(network, name, module)}
    return {name: modules[name] for name in reversed(modules) if name in chosen}


def check_sharded(network: nn.Module, parallel: Parallel) -> None:
    """Check that a network's weights can be sharded as the recipe asks.

    Raises:
        ModelError: If they cannot be.
    """
    _check_shared(network, modules_to_shard(network, parallel))
    scalars = [name for name, parameter in network.named_parameters() if parameter.ndim == 0]
    if scalars:
        raise ModelError(
            f"parallel.strategy=fsdp cannot shard {scalars[0]}, which is a single number; make it a tensor of shape "
            "[1], or use parallel.strategy=ddp."
        )
    dtypes = sorted({str(parameter.dtype) for parameter in network.parameters()})
    if len(dtypes) > 1:
        raise ModelError(
            f"parallel.strategy=fsdp gathers parameters of one dtype, and the network has {' and '.join(dtypes)}; "
            "give them one, or use parallel.strategy=ddp."
        )
    norms = [name for name, module in network.named_modules() if isinstance(module, _NormBase)]
    if parallel.gather_dtype == "bf16" and norms:
        raise ModelError(
            f"parallel.gather_dtype=bf16: the network has BatchNorm ({', '.join(norms[:_MAX_LISTED])}"
            f"{', …' * (len(norms) > _MAX_LISTED)}), which needs its parameters in fp32; gather fp32, or use a network "
            "with LayerNorm."
        )


def _check_shared(network: nn.Module, sharded: dict[str, nn.Module]) -> None:
    """Check that all users of a parameter are inside the module that gathers it."""
    owners: dict[int, set[str]] = {}
    names: dict[int, str] = {}
    for path, module in network.named_modules():
        enclosing = (path if path in sharded else "", *(each for each in sharded if path.startswith(f"{each}.")))
        owner = max(enclosing, key=len)
        for name, parameter in module.named_parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(owner)
            names.setdefault(id(parameter), f"{path}.{name}" if path else name)
    for key, users in owners.items():
        if len(users) > 1:
            user_names = " and ".join(sorted(each or "the rest of the network" for each in users))
            raise ModelError(
                f"parallel.strategy=fsdp: {names[key]} is used by {user_names}, which gather their weights separately; "
                "name modules with parallel.shard_modules so that one holds all that use it, or use "
                "parallel.strategy=ddp."
            )


def sharding_options(parallel: Parallel, mesh: Any) -> dict[str, Any]:
    """Return the arguments of torch's ``fully_shard`` for a network that is trained."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    param_dtype = None if parallel.gather_dtype == "fp32" else _DTYPES[parallel.gather_dtype]
    compression = parallel.gradient_compression
    # Unless given a dtype, FSDP reduces gradients in the dtype in which it gathers the weights.
    reduce_dtype = _DTYPES[compression] if compression != "none" else None if param_dtype is None else torch.float32
    return {
        "mesh": mesh,
        "reshard_after_forward": parallel.reshard_after_forward,
        "mp_policy": MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype),
    }


def _matching(modules: dict[str, nn.Module], patterns: tuple[str, ...]) -> set[str]:
    chosen: set[str] = set()
    for pattern in patterns:
        matched = fnmatch.filter(modules, pattern)
        if not matched:
            raise ModelError(
                f"parallel.shard_modules: no module that is called and has parameters has a name that matches "
                f"'{pattern}'. The first ones are {', '.join(list(modules)[:_MAX_LISTED])}; a pattern may have * and ?."
            )
        chosen.update(matched)
    return chosen


def _is_block(network: nn.Module, name: str, module: nn.Module) -> bool:
    parent = network.get_submodule(name.rpartition(".")[0])
    return isinstance(parent, (nn.ModuleList, nn.Sequential)) and any(True for _ in module.children())


def _gathers(module: nn.Module) -> bool:
    """Whether the module has parameters and is called: a list of modules is not."""
    return next(module.parameters(), None) is not None and not isinstance(module, (nn.ModuleList, nn.ModuleDict))


ValueOf = Callable[[str], Tensor]
"""The first values of a parameter, a buffer or another tensor of a network, by its name, on the CPU."""


class WeightInitializer:
    """Sets the initial values of a network without values, and of its average.

    Args:
        value_of: The initial values; None for a network that has values, which is then unchanged.
        network: The network.
        average: The average of its weights, which starts with the same values.
        collectives: The processes; all use the first one's values.
        device: Their device.
    """

    def __init__(
        self,
        value_of: ValueOf | None,
        network: nn.Module,
        average: nn.Module | None,
        collectives: Collectives,
        device: torch.device,
    ) -> None:
        self._value_of = value_of
        self._networks = (network,) if average is None else (network, average)
        self._collectives, self._device = collectives, device

    def __call__(self, name: str) -> None:
        """Fill the module of this name, except for parts that are filled and sharded already; a collective."""
        if self._value_of is None:
            return
        network, *others = (each.get_submodule(name) for each in self._networks)
        for path, owners in _uninitialized(network):
            value = self._value_of(f"{name}.{path}" if name else path).to(self._device)
            # Custom code may have drawn different values on another process.
            self._collectives.broadcast_tensors([value])
            for module in (network, *others):
                _assign(module, owners, value if module is network else value.clone())


def _uninitialized(module: nn.Module) -> Iterator[tuple[str, list[str]]]:
    """Yield each tensor without values, with its first name and all of its names; shared tensors have several."""
    names: dict[int, list[str]] = {}
    for path, each in module.named_modules():
        # Shared tensors by each of their names, and plain attributes, which torch does not list.
        tensors = (
            *each.named_parameters(recurse=False, remove_duplicate=False),
            *each.named_buffers(recurse=False, remove_duplicate=False),
            *vars(each).items(),
        )
        for name, tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.is_meta:
                names.setdefault(id(tensor), []).append(f"{path}.{name}" if path else name)
    yield from [(paths[0], paths) for paths in names.values()]


def _assign(module: nn.Module, names: list[str], value: Tensor) -> None:
    tensor: Any = None
    for name in names:
        path, _, last = name.rpartition(".")
        owner = module.get_submodule(path)
        old = getattr(owner, last)
        if tensor is None:
            tensor = value
            if isinstance(old, nn.Parameter):
                tensor = nn.Parameter(value, requires_grad=old.requires_grad)
                for key, attribute in vars(old).items():
                    setattr(tensor, key, attribute)
        setattr(owner, last, tensor)
