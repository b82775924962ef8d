"""A copy of every kind of tensor, into the same memory as the last one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.checkpoint.snapshot import HostCopies


def snapshot(copies: HostCopies, state: dict[str, Any]) -> dict[str, Any]:
    taken = copies.take("model", state)
    copies.settle()
    return taken


TENSORS = {
    "plain": torch.randn(3, 4),
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "transposed": torch.randn(3, 4).t(),
    "every second": torch.randn(8)[::2],
    "broadcast": torch.randn(1, 4).expand(3, 4),
    "scalar": torch.tensor(3),
    "empty": torch.empty(0, 3),
    "bf16": torch.randn(5).to(torch.bfloat16),
    "bool": torch.tensor([True, False]),
    "one of many strides": torch.randn(6)[2:3].as_strided((1, 1), (5, 7)),
}


@pytest.mark.parametrize("name", TENSORS)
def test_values_and_layout_are_kept_and_nothing_is_shared(name: str) -> None:
    live = TENSORS[name].clone(memory_format=torch.preserve_format) if name != "broadcast" else TENSORS[name]
    copies = HostCopies()
    taken = snapshot(copies, {"a": live})["a"]
    assert taken.dtype == live.dtype
    assert torch.equal(taken, live)
    if name == "channels last":
        assert taken.stride() == live.stride()
    if live.numel() and name != "broadcast":
        live.fill_(7)
        assert not torch.equal(taken, live)


def test_the_same_memory_is_used_again_while_shapes_stay() -> None:
    copies, state = HostCopies(), {"a": torch.zeros(4), "b": [torch.ones(2, 2)]}
    first = snapshot(copies, state)
    state["a"] += 1
    second = snapshot(copies, state)
    assert first["a"].data_ptr() == second["a"].data_ptr()
    assert torch.equal(second["a"], torch.ones(4))
    third = snapshot(copies, {"a": torch.zeros(5), "b": state["b"]})
    assert third["a"].shape == (5,)
    assert third["b"][0].data_ptr() == second["b"][0].data_ptr()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_tensors_that_no_file_holds_are_left_to_be_refused_by_name() -> None:
    copies = HostCopies()
    state = {"sparse": torch.eye(3).to_sparse_csr(), "conjugate": torch.tensor([1 + 2j]).conj()}
    taken = copies.take("state", {**state, "meta": torch.empty(3, device="meta")})
    copies.settle()
    assert taken["sparse"].layout == torch.sparse_csr
    assert taken["meta"].is_meta
    assert taken["conjugate"].tolist() == [1 - 2j]
    assert not taken["conjugate"].is_conj()


def test_a_parameter_leaves_its_gradient_behind() -> None:
    taken = snapshot(HostCopies(), {"a": torch.nn.Parameter(torch.ones(2))})["a"]
    assert not taken.requires_grad
