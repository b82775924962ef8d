"""The optimizers' methods as they are: the same rule to the bit, and no compiler that is loaded for nothing."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from paceline.optim.classes import eager
from torch.optim.optimizer import register_optimizer_step_post_hook

KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.9}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
}


def steps(optimizer: torch.optim.Optimizer, weights: list[torch.Tensor], begin: int, end: int) -> None:
    for step in range(begin, end):
        optimizer.zero_grad()
        torch.stack([(each * (step + 1)).sin().sum() for each in weights]).sum().backward()
        optimizer.step()


def drawn() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(size, generator=generator, requires_grad=True) for size in ((4, 3), (3,))]


@pytest.mark.parametrize("name", KINDS)
def test_the_rule_and_the_state_are_the_same(name: str) -> None:
    kind, options = KINDS[name]
    plain, ours, again = drawn(), drawn(), drawn()
    theirs, mine = kind(plain, **options), eager(kind)(ours, **options)
    assert (type(mine).__name__, isinstance(mine, kind)) == (kind.__name__, True)
    steps(theirs, plain, 0, 4)
    steps(mine, ours, 0, 4)
    assert all(torch.equal(*both) for both in zip(plain, ours, strict=True))
    # The state of the one is the state of the other.
    resumed = eager(kind)(again, **options)
    resumed.load_state_dict(copy.deepcopy(theirs.state_dict()))
    with torch.no_grad():
        for to, of in zip(again, plain, strict=True):
            to.copy_(of)
    steps(theirs, plain, 4, 7)
    steps(resumed, again, 4, 7)
    assert all(torch.equal(*both) for both in zip(plain, again, strict=True))


def test_sparse_gradients_have_the_same_rule_too() -> None:
    plain, ours = (torch.nn.Parameter(drawn()[0].detach()) for _ in range(2))
    theirs, mine = torch.optim.SparseAdam([plain], lr=0.1), eager(torch.optim.SparseAdam)([ours], lr=0.1)
    for rows in torch.tensor([[0, 2], [1, 2], [2, 2]]):
        for optimizer, table in (theirs, plain), (mine, ours):
            optimizer.zero_grad()
            torch.nn.functional.embedding(rows, table, sparse=True).sin().sum().backward()
            assert table.grad is not None
            assert table.grad.is_sparse
            optimizer.step()
    assert not torch.equal(ours, drawn()[0])
    assert torch.equal(plain, ours)


def test_hooks_are_called_once_and_a_closure_has_gradients() -> None:
    weights, called = drawn(), []
    optimizer = eager(torch.optim.SGD)(weights, lr=0.1)
    hook = register_optimizer_step_post_hook(lambda *_: called.append("all"))
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))

    def closure() -> float:
        loss = weights[0].square().sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) > 0
    hook.remove()
    assert called == ["before", "all"]
    assert torch.is_grad_enabled()


def test_who_has_such_a_method_of_its_own_keeps_it() -> None:
    class Own(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:
            super().zero_grad(set_to_none=False)

    assert eager(Own) is Own
    assert eager(torch.optim.SGD) is eager(torch.optim.SGD)


@pytest.mark.parametrize(
    ("name", "network"),
    [(each, "small_resnet") for each in ("sgd", "adamw", "rmsprop", "adafactor", "muon, rest: sgd")]
    + [("sgd", "torchvision:resnet18")],
)
def test_a_training_loads_no_compiler(tmp_path: Path, tiny_recipe: Path, name: str, network: str) -> None:
    """Trained, saved, stopped, gone on with and evaluated."""
    program = (
        "import sys\n"
        "from paceline.cli.main import run\n"
        "for until in ('4 steps', 'off'):\n"
        "    assert run(['train', *sys.argv[1:], f'train.until={until}']) in (0, 75)\n"
        "assert run(['evaluate', sys.argv[-1]]) == 0\n"
        "assert 'torch' in sys.modules\n"
        "print(*(name for name in ('torch._dynamo', 'sympy', 'torch.distributed.tensor') if name in sys.modules))\n"
    )
    words = [str(tiny_recipe), f"optimizer={{name: {name}, lr: 0.01}}", f"model={{name: {network}}}"]
    words += ["--run-dir", str(tmp_path / "run")]
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == ""
