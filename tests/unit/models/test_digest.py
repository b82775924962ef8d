"""Anyone can recompute the digest of a set of weights with nothing but the written rule."""

from __future__ import annotations

import hashlib
import struct

import torch

from paceline.checkpoint.weights import weights_sha256


def by_the_rule(entries: dict[str, bytes]) -> str:
    return hashlib.sha256(b"".join(key.encode() + entries[key] for key in sorted(entries))).hexdigest()


def test_the_rule() -> None:
    entries = {
        "b.weight": (torch.tensor([[1.0, -2.5], [3.0, 0.0]]), struct.pack("<4f", 1.0, -2.5, 3.0, 0.0)),
        "a.steps": (torch.tensor(7), struct.pack("<q", 7)),
        "ünïcode": (torch.tensor([1.5], dtype=torch.float64), struct.pack("<d", 1.5)),
        "half": (torch.tensor([1.0, 2.0], dtype=torch.bfloat16), struct.pack("<2H", 0x3F80, 0x4000)),
        "empty": (torch.empty(0), b""),
        "flag": (torch.tensor([True, False]), b"\x01\x00"),
    }
    state, expected = ({key: each[place] for key, each in entries.items()} for place in (0, 1))
    assert weights_sha256(state) == by_the_rule(expected)
    assert weights_sha256(dict(reversed(state.items()))) == by_the_rule(expected)


def test_memory_layout_is_invisible() -> None:
    weight = torch.randn(4, 3, 5, 5)
    other = weight.to(memory_format=torch.channels_last)
    assert weights_sha256({"w": weight}) == weights_sha256({"w": other})
    square = torch.randn(4, 6)
    assert weights_sha256({"w": square.t().contiguous().t()}) == weights_sha256({"w": square})
