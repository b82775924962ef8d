"""Autocast, loss scaling, and how fp32 matrix products are rounded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paceline.errors import TrainingError
from paceline.models.precision import Autocast
from paceline.recipe.training import GradScaler

# Below this scale every gradient that fp16 can hold is lost: the overflow is in the forward pass, and nothing is
# learned.
_USELESS_SCALE = 2.0**-24

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


class Precision:
    """Autocast and loss scaling behind a few methods, so that the training step needs no branches for them.

    Weights, optimizer state and the moving average stay fp32. fp16 scales the loss; a step whose gradients overflow is
    skipped, and reading that flag is the only host-device synchronisation of an fp16 step.

    Args:
        name: ``fp32``, ``bf16``, ``fp16`` or ``fp8``.
        device: The network's device.
        scaler: Loss scaling, for fp16.
        is_sharded: Whether the weights are sharded. Their 16-bit copies are then freed after each use: together they
            would be a copy of the whole network on each process.
    """

    def __init__(self, name: str, device: torch.device, scaler: GradScaler, *, is_sharded: bool = False) -> None:
        self.name = name
        self._is_sharded = is_sharded
        self._device_type = device.type
        self._dtype = _AUTOCAST.get(name)
        self.scaler = torch.amp.GradScaler(device.type, **asdict(scaler)) if name == "fp16" else None

    def applied_to(self, model: Callable[..., Any]) -> Callable[..., Any]:
        """Return a network as tasks call it: its forward pass under autocast, its answer in float32."""
        if self._dtype is None:
            return model
        autocast = partial(torch.autocast, self._device_type, dtype=self._dtype)
        return Autocast(model, partial(_without_copies, autocast) if self._is_sharded else autocast)

    def keeping_casts(self) -> AbstractContextManager[Any]:
        """Context around forward passes with the same weights: each weight is cast once, not in every pass.

        Nothing else inside is cast.

        Autocast clears this cache when its outermost context ends, even if that context casts nothing.
        """
        return nullcontext() if self._dtype is None else torch.autocast(self._device_type, enabled=False)

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward pass of the (scaled) loss."""
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]  # torch

    def unscaled(self, norm: torch.Tensor) -> torch.Tensor:
        """Return the true norm of a gradient of this step, before :meth:`unscale` has scaled gradients back."""
        # The scaler times one is the scale, on its device: nothing waits for it.
        return norm if self.scaler is None else norm / self.scaler.scale(torch.ones_like(norm))

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Scale gradients back to their true size, before they are measured or clipped."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Take the optimizer step; False if it was skipped because gradients overflowed.

        Raises:
            TrainingError: If steps were skipped until no scale is left to try.
        """
        if self.scaler is None:
            optimizer.step()
            return True
        # A fused SGD would skip by itself, but if it skips its first step, its momentum stays uninitialized memory.
        optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]  # noqa: SLF001  # GradScaler asks it
        steps_taken: list[bool] = []
        hook = optimizer.register_step_post_hook(lambda *_: steps_taken.append(True))
        self.scaler.step(optimizer)
        hook.remove()
        self.scaler.update()
        if not steps_taken and (scale := self.scaler.get_scale()) < _USELESS_SCALE:
            raise TrainingError(
                f"the gradients overflow at every loss scale, which has fallen to {scale:.2g}; lower optimizer.lr, "
                "or use train.precision=bf16 or fp32."
            )
        return bool(steps_taken)

    @property
    def scale(self) -> float:
        """The current loss scale; 1 without scaling."""
        return 1.0 if self.scaler is None else self.scaler.get_scale()


@contextmanager
def _without_copies(autocast: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Let the backward pass cast weights again, to the same bits, instead of keeping their 16-bit copies for it."""
    with autocast(), torch.autograd.graph.saved_tensors_hooks(_packed, _unpacked):
        yield


def _packed(tensor: Tensor) -> tuple[Tensor, Any]:
    """Return a saved tensor and its version; for a weight's copy the weight, and how to make the copy."""
    base = tensor._base if tensor._is_view() else tensor  # noqa: SLF001  # no public way
    cast = None if base is None else base.grad_fn
    weight = None if cast is None or cast.name() != "ToCopyBackward0" else cast.next_functions[0][0]
    if (weight := getattr(weight, "variable", None)) is None:
        return tensor, tensor._version  # noqa: SLF001  # no public way
    return weight, (tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())


def _unpacked(packed: tuple[Tensor, Any]) -> Tensor:
    tensor, how = packed
    if isinstance(how, tuple):
        dtype, *layout = how
        return tensor.detach().to(dtype).as_strided(*layout)
    if tensor._version != how:  # noqa: SLF001  # torch does not compare them under hooks
        raise RuntimeError("a tensor needed for the backward pass has been modified by an inplace operation")
    return tensor


def set_float32_matmul(name: str) -> None:
    """Set the fp32 matrix multiplication precision of this process; ``default`` changes nothing."""
    if name == "default":
        return
    torch.set_float32_matmul_precision(name)
    torch.backends.cudnn.allow_tf32 = name != "highest"
