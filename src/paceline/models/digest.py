"""Are these the same weights? One SHA-256 over a state dict that anyone can recompute."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch


def weights_sha256(state: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over the entries in sorted key order: the key's UTF-8 bytes, then the tensor's bytes.

    Tensors are taken contiguous, on the CPU, little-endian, in their own dtype. Those that are spread over processes
    are brought together one at a time: then this is a collective.
    """
    digest = hashlib.sha256()
    for key in sorted(state):
        digest.update(key.encode())
        tensor = state[key].detach()
        tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        tensor = tensor.cpu().contiguous()
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
