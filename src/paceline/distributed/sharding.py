"""Which modules of a network gather their weights together, when each process holds a part of them?"""

from __future__ import annotations

import fnmatch
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from paceline.errors import ModelError
from paceline.recipe.running import Parallel

_NAMED = 4
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def modules_to_shard(network: nn.Module, parallel: Parallel) -> dict[str, nn.Module]:
    """The modules that gather their weights one at a time, by name, inner ones first.

    Without patterns these are the blocks that a network is a list or a sequence of (a transformer's layers, a residual
    net's blocks and its stages): items of ``nn.ModuleList`` and ``nn.Sequential`` that have modules of their own.

    Raises:
        ModelError: If a pattern matches no module with parameters that can be called.
    """
    named = {name: module for name, module in network.named_modules() if name and _gathers(module)}
    if parallel.shard_modules:
        chosen = _matching(named, parallel.shard_modules)
    else:
        chosen = {name for name, module in named.items() if _is_block(network, name, module)}
    return {name: named[name] for name in reversed(named) if name in chosen}


def check_sharded(network: nn.Module, parallel: Parallel) -> None:
    """See whether a network's weights can be spread as the recipe asks.

    Raises:
        ModelError: If they cannot.
    """
    _check_shared(network, modules_to_shard(network, parallel))
    scalars = [name for name, parameter in network.named_parameters() if parameter.ndim == 0]
    if scalars:
        raise ModelError(
            f"parallel.strategy=fsdp cannot spread {scalars[0]}, which is a single number; make it a tensor of the "
            "shape [1], or use parallel.strategy=ddp."
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
            f"parallel.gather_dtype=bf16: the network has BatchNorm ({', '.join(norms[:_NAMED])}"
            f"{', …' * (len(norms) > _NAMED)}), which needs its parameters in fp32; gather fp32, or use a network with "
            "LayerNorm."
        )


def _check_shared(network: nn.Module, sharded: dict[str, nn.Module]) -> None:
    """A parameter is gathered by one module, so whoever else uses it must be inside."""
    owners: dict[int, set[str]] = {}
    names: dict[int, str] = {}
    for path, module in network.named_modules():
        inside = (path if path in sharded else "", *(each for each in sharded if path.startswith(f"{each}.")))
        owner = max(inside, key=len)
        for name, parameter in module.named_parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(owner)
            names.setdefault(id(parameter), f"{path}.{name}" if path else name)
    for key, found in owners.items():
        if len(found) > 1:
            apart = " and ".join(sorted(each or "the rest of the network" for each in found))
            raise ModelError(
                f"parallel.strategy=fsdp: {names[key]} is used by {apart}, which gather their weights apart; "
                "name modules with parallel.shard_modules so that one holds all that use it, or use "
                "parallel.strategy=ddp."
            )


def sharding_options(parallel: Parallel, mesh: Any) -> dict[str, Any]:
    """Arguments of torch's ``fully_shard`` for a network that is trained."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    gathered = None if parallel.gather_dtype == "fp32" else _DTYPES[parallel.gather_dtype]
    sent = parallel.gradient_compression
    # Without a dtype of its own the gradient would be added up in the one the weights are gathered in.
    added = _DTYPES[sent] if sent != "none" else None if gathered is None else torch.float32
    return {
        "mesh": mesh,
        "reshard_after_forward": parallel.reshard_after_forward,
        "mp_policy": MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=added),
    }


def _matching(named: dict[str, nn.Module], patterns: tuple[str, ...]) -> set[str]:
    chosen: set[str] = set()
    for pattern in patterns:
        matched = fnmatch.filter(named, pattern)
        if not matched:
            raise ModelError(
                f"parallel.shard_modules: no module that is called and has parameters has a name that matches "
                f"'{pattern}'. The first ones are {', '.join(list(named)[:_NAMED])}; a pattern may have * and ?."
            )
        chosen.update(matched)
    return chosen


def _is_block(network: nn.Module, name: str, module: nn.Module) -> bool:
    parent = network.get_submodule(name.rpartition(".")[0])
    return isinstance(parent, (nn.ModuleList, nn.Sequential)) and any(True for _ in module.children())


def _gathers(module: nn.Module) -> bool:
    """Whether it has parameters, and is called: a list of modules is not."""
    return next(module.parameters(), None) is not None and not isinstance(module, (nn.ModuleList, nn.ModuleDict))
