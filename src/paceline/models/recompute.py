"""Recompute activations in the backward pass.

A network is split into its repeated blocks. Each stores only its input and recomputes the rest in the backward pass
(Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016). Selective recomputation also stores the results of
matrix products and convolutions and recomputes only cheap operations: norms, activations, dropout.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from paceline.errors import ModelError
from paceline.models.factories import mix_in

Recompute = Literal["full", "selective"]

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class _Recomputed(nn.Module):
    """Mixed into a block's class: parameters, names and copies stay unchanged; only the forward pass differs."""

    _recompute: Recompute = "full"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the block, storing only the requested activations if gradients are needed."""
        if not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        # A list of earlier outputs, as in DenseNet's layers, may have grown before recomputation.
        args = tuple(list(each) if type(each) is list else each for each in args)
        norms = [each for each in self.modules() if isinstance(each, _BatchNorm) and each.track_running_stats]
        if norms:
            contexts = partial(_contexts_with_norms, self._recompute, norms)
            return checkpoint(super().forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)
        # Written out, since the compiler must see both cases statically.
        if self._recompute == "selective":
            return checkpoint(super().forward, *args, use_reentrant=False, context_fn=_selective, **kwargs)
        return checkpoint(super().forward, *args, use_reentrant=False, **kwargs)


def recompute_blocks(network: nn.Module, how: Recompute, *, compiled: bool = False) -> list[str]:
    """Make a network's blocks recompute their activations; return the blocks' names.

    Raises:
        ModelError: If it has no blocks, or some do not support it.
    """
    paths = blocks_of(network)
    if not paths:
        raise ModelError(
            f"model.activation_checkpointing={how}: the network has no repeated blocks (modules of several layers in a "
            "Sequential, ModuleList or ModuleDict) that could be computed again; leave it out."
        )
    blocks = [network.get_submodule(path) for path in paths]
    for path, block in zip(paths, blocks, strict=True):
        _check(block, path, how, compiled=compiled)
        # In-place activations could overwrite a stored result.
        for module in block.modules() if how == "selective" else ():
            if getattr(module, "inplace", False) is True:
                module.inplace = False  # type: ignore[assignment]  # a flag, not a module
    mix_in(blocks, _Recomputed, _recompute=how)
    return paths


def blocks_of(network: nn.Module) -> list[str]:
    """Return the block names: those that a timm network defines, or else the outermost ones in containers."""
    matcher = getattr(network, "group_matcher", None)
    if callable(matcher):
        patterns = matcher(coarse=False).get("blocks", ())
        patterns_given = [patterns] if isinstance(patterns, str) else [each[0] for each in patterns or ()]
        numbered = [each for each in patterns_given if r"\d" in each]
        named = [
            path
            for path, module in network.named_modules()
            if _is_block(module) and any(re.fullmatch(each.removeprefix("^"), path) for each in numbered)
        ]
        if named:
            return _outermost(named)
    blocks = (
        f"{path}.{child}" if path else child
        for path, module in network.named_modules()
        if isinstance(module, _CONTAINERS)
        for child, block in module.named_children()
        if _is_block(block)
    )
    return _outermost(sorted(blocks, key=lambda each: each.count(".")))


def _is_block(module: nn.Module) -> bool:
    own = [each for each in module.modules() if any(True for _ in each.parameters(recurse=False))]
    return not isinstance(module, _CONTAINERS) and len(own) > 1


def _outermost(paths: list[str]) -> list[str]:
    outermost: list[str] = []
    for path in paths:
        if not any(path.startswith(f"{each}.") for each in outermost):
            outermost.append(path)
    return outermost


def _check(block: nn.Module, path: str, how: Recompute, *, compiled: bool) -> None:
    norms = [each for each in block.modules() if isinstance(each, _NormBase) and each.track_running_stats]
    message = f"model.activation_checkpointing={how}: {path} has {type(norms[0]).__name__ if norms else ''}, "
    if any(not isinstance(each, _BatchNorm) for each in norms):
        raise ModelError(f"{message}whose running statistics would count each batch twice; leave it out.")
    if norms and compiled:
        raise ModelError(
            f"{message}whose running statistics a compiled block would update twice; set model.compile=false, or leave "
            "it out: a compiled network already stores fewer activations."
        )


def _selective() -> Any:
    return create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]  # torch


def _contexts_with_norms(
    how: Recompute, norms: list[_BatchNorm]
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    first, again = _selective() if how == "selective" else (nullcontext(), nullcontext())
    return first, _without_statistics(norms, again)


@contextmanager
def _without_statistics(norms: list[_BatchNorm], inside: AbstractContextManager[Any]) -> Iterator[None]:
    """Make BatchNorm write to copies of its running statistics, which already include this batch."""
    kept = [(norm, dict(norm.named_buffers(recurse=False))) for norm in norms]
    for norm, buffers in kept:
        for name, buffer in buffers.items():
            setattr(norm, name, buffer.clone())
    try:
        with inside:
            yield
    finally:
        for norm, buffers in kept:
            for name, buffer in buffers.items():
                setattr(norm, name, buffer)


@cache
def _kept_operations() -> frozenset[Any]:
    aten = torch.ops.aten
    names = (
        *("mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_mm"),
        *("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"),
        *("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu"),
    )
    return frozenset(getattr(aten, name).default for name in names if hasattr(aten, name))


def _policy(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    keeps = operation in _kept_operations() and not _draws(operation, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


def _draws(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a module draws random numbers: if not redrawn, later draws would differ."""
    for index, argument in enumerate(operation._schema.arguments):  # noqa: SLF001  # there is no other way to ask
        if argument.name == "dropout_p":
            given = args[index] if index < len(args) else kwargs.get("dropout_p", 0.0)
            return float(given) > 0
    return False
