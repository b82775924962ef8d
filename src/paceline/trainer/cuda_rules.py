"""What does a CUDA device do otherwise than a CPU, as far as it decides which tensors a step holds?

Fake tensors live on the CPU, since torch lets no others through a backward pass where there is no GPU. Three of its
rules are not a GPU's: autocast leaves functions in 16 bits that a GPU computes in 32, dropout keeps a number for each
element where a GPU keeps a byte, and attention with dropout is written out where a GPU has a kernel for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_HALVES = (torch.float16, torch.bfloat16)

# Computed in fp32 under CUDA's autocast, and not under the CPU's (torch's documentation of torch.amp, "CUDA Ops that
# can autocast to float32").
_IN_FP32 = frozenset(
    {
        *("layer_norm", "group_norm", "norm", "normalize", "renorm", "cosine_similarity", "cdist", "dist"),
        *("softmax", "log_softmax", "softmin", "softplus", "sum", "prod", "cumsum", "cumprod"),
        *("exp", "expm1", "log", "log10", "log1p", "log2", "pow", "__pow__", "__rpow__", "reciprocal", "rsqrt"),
        *("acos", "asin", "cosh", "sinh", "tan", "erfinv", "__rdiv__", "__rtruediv__"),
        *("cross_entropy", "nll_loss", "kl_div", "l1_loss", "mse_loss", "smooth_l1_loss", "soft_margin_loss"),
        *("binary_cross_entropy_with_logits", "cosine_embedding_loss", "margin_ranking_loss", "multi_margin_loss"),
    }
)


class CudaRules(TorchFunctionMode):
    """Calls functions on CPU tensors as a CUDA device would."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function, with its arguments cast, or another in its place."""
        given = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "dropout":
            return _dropout(func, args, given)
        if name == "scaled_dot_product_attention":
            # The fused kernels of a GPU drop out inside: nothing is kept for it but a seed.
            args, given = args[:4], given | {"dropout_p": 0.0, **_causal(args)}
        if name in _IN_FP32 and torch.is_autocast_enabled("cpu") and given.get("dtype") is None:
            args, given = tuple(map(_float, args)), {key: _float(value) for key, value in given.items()}
        return func(*args, **given)


def _causal(args: tuple[Any, ...]) -> dict[str, Any]:
    return {"is_causal": args[5]} if len(args) > 5 else {}


def _dropout(func: Callable[..., Any], args: tuple[Any, ...], given: dict[str, Any]) -> Any:
    # torch.dropout(input, p, train), and nn.functional's dropout(input, p=0.5, training=True, inplace=False)
    names = ("input", "p", "training", "inplace")
    asked = {"p": 0.5, "training": True, "inplace": False} | dict(zip(names, args, strict=False)) | given
    training = asked.get("train", asked["training"])
    if not training or asked["inplace"] or not 0 < asked["p"] < 1:
        return func(*args, **given)
    return torch.native_dropout(asked["input"], asked["p"], train=True)[0]


def _float(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _HALVES else value
