"""A training step on fake tensors: every shipped recipe, one's own parts, and nothing left behind."""

from __future__ import annotations

import random
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import paceline
from paceline.errors import ModelError
from paceline.host.devices import find_device
from paceline.recipe.load import load_recipe, shipped_recipes
from paceline.trainer.fake_batch import with_placeholder_data
from paceline.trainer.fake_step import fake_step, machine_with

QUICK = ("digits", "cifar10_fast")
H100 = machine_with(find_device("h100"))
_ONCE_UNLESS_THOROUGH = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.thorough) for name in shipped_recipes()
]


def one_step(step: Any) -> None:
    step.backward(step.forward())
    assert all(each.grad is not None for each in step.network.parameters() if each.requires_grad)
    step.update()
    assert all(each.grad is None for each in step.network.parameters())


@pytest.fixture
def own_code(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """``own_code(net=Network)``: a recipe whose network is in a user's module ``mine``."""

    def define(asked: Any = None, **names: Any) -> Any:
        module = types.ModuleType("mine")
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, "mine", module)
        return load_recipe("digits", {"model": None, "model.name": "mine:net"} if asked is None else asked).recipe

    return define


@pytest.mark.parametrize("name", _ONCE_UNLESS_THOROUGH)
def test_every_shipped_recipe_makes_a_step(name: str) -> None:
    recipe, _ = with_placeholder_data(load_recipe(name).recipe)
    with fake_step(recipe, machine=H100) as step:
        one_step(step)
        assert step.plan.device == "cuda"
        assert step.plan.precision == (recipe.train.precision if recipe.train.precision != "auto" else "bf16")
        assert (step.ema is None) == (recipe.train.ema is None)


def test_a_step_that_no_machine_could_hold_takes_nothing() -> None:
    """65,536 images of 224 pixels through a ViT are some terabytes."""
    overrides = {"model.name": "vit_tiny_patch16_224", "batch.global_size": 65536, "data.samples": 65536}
    with fake_step(load_recipe("synthetic", overrides).recipe, machine=H100) as step:
        one_step(step)
        assert step.batch.inputs.shape == (65536, 3, 224, 224)


def test_nothing_is_left_behind() -> None:
    def state() -> tuple[Any, ...]:
        return (
            torch.random.get_rng_state().tolist(),
            random.getstate(),
            np.random.get_state()[1].tolist(),  # noqa: NPY002  # the state that old code shares
            torch.get_default_device(),
            torch.is_autocast_enabled("cpu"),
            torch.get_num_threads(),
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
            torch._C._len_torch_dispatch_stack(),
            torch._C._len_torch_function_stack(),
        )

    before = state()
    with fake_step(load_recipe("digits").recipe, machine=H100) as step:
        one_step(step)
    assert state() == before
    assert not isinstance(torch.ones(2), torch._subclasses.fake_tensor.FakeTensor)


def test_the_step_says_where_it_is() -> None:
    seen: list[tuple[str, str]] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "convolution" in func.__name__:
                seen.append((step.phase, step.layer))
            return func(*args, **(kwargs or {}))

    with fake_step(load_recipe("digits").recipe) as step, Watch():
        one_step(step)
        convolutions = [name for name, module in step.network.named_modules() if isinstance(module, nn.Conv2d)]
    forward = [layer for phase, layer in seen if phase == "forward"]
    backward = [layer for phase, layer in seen if phase == "backward"]
    assert sorted(forward) == sorted(backward) == sorted(convolutions)
    assert forward[0] == backward[-1]
    assert (step.phase, step.layer) == ("", "")


def test_a_backward_operation_is_of_the_layer_that_was_at_work(own_code: Any) -> None:
    """Also amid a module made of others, and for what works in place."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.ReLU6(inplace=True)
            self.scale = nn.Parameter(torch.ones(16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.act(x.softmax(1) * self.scale)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.block, self.last = nn.Linear(64, 16), Block(), nn.Linear(16, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.block(self.first(x.flatten(1))))

    seen: dict[str, str] = {}

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            if step.phase == "backward":
                seen.setdefault(func.overloadpacket.__name__, step.layer)
            return func(*args, **(kwargs or {}))

    with fake_step(own_code(net=Net)) as step, Watch():
        one_step(step)
    assert seen["nll_loss_backward"] == ""
    assert seen["mm"] == "last"
    assert seen["hardtanh_backward"] == "block.act"
    assert seen["_softmax_backward_data"] == "block"


def test_a_micro_batch_of_any_size_can_be_shown() -> None:
    with fake_step(load_recipe("digits").recipe, micro_batch=7) as step:
        assert step.micro_batch == 7
        step.set_micro_batch(3)
        one_step(step)
        assert step.batch.inputs.shape == (3, 1, 8, 8)
        assert step.plan.micro_batch_size == 64


OPTIMIZERS = ("sgd", "adamw", "rmsprop", "adafactor", "lamb", "lars", "lion", "muon")


@pytest.mark.parametrize(
    ("optimizer", "device"), [*((each, "cuda") for each in OPTIMIZERS), ("sgd", "cpu"), ("adamw", "cpu")]
)
def test_every_optimizer_makes_its_step(optimizer: str, device: str) -> None:
    recipe = load_recipe("digits", {"optimizer": None, "optimizer.name": optimizer, "optimizer.lr": 0.1}).recipe
    with fake_step(recipe, machine=H100 if device == "cuda" else None) as step:
        one_step(step)
        assert step.optimizer.state
        one_step(step)


@pytest.mark.parametrize("how", ["full", "selective"])
def test_activations_can_be_computed_again(how: str) -> None:
    with fake_step(load_recipe("digits", {"model.activation_checkpointing": how}).recipe) as step:
        one_step(step)


def test_mixed_targets_are_probabilities() -> None:
    with fake_step(load_recipe("digits", {"data.mix.mixup": 0.2}).recipe) as step:
        assert step.batch.targets.dtype == torch.float32
        assert step.batch.targets.shape == (64, 10)
        one_step(step)


def test_a_gpu_s_autocast_normalises_layers_in_fp32_and_a_cpu_s_does_not(own_code: Any) -> None:
    dtypes: list[torch.dtype] = []

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.drop = nn.Linear(64, 16), nn.LayerNorm(16), nn.Dropout(0.1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.norm(self.first(x.flatten(1)))
            dtypes.append(x.dtype)
            return self.drop(x)

    recipe = own_code({"model": None, "model.name": "mine:net", "train.precision": "bf16"}, net=Normed)
    for machine in (H100, None):
        with fake_step(recipe, machine=machine) as step:
            one_step(step)
    assert dtypes == [torch.float32, torch.bfloat16]


class _Counting(nn.Module):
    """Its forward pass reads a number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x.flatten(1))
        return y * (2.0 if y.abs().max().item() > 1 else 1.0)


class _Drawn(nn.Linear):
    """Its constructor reads a number, which it must have drawn."""

    def __init__(self) -> None:
        super().__init__(64, 10)
        self.scale = float(self.weight.abs().max())
        self.shift = torch.full((10,), self.scale)  # neither parameter nor buffer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.flatten(1)) * self.scale + self.shift


def test_a_network_that_needs_its_numbers_is_refused_in_one_sentence(own_code: Any) -> None:
    recipe = own_code(net=_Counting)
    wanted = r"mine:net cannot be run without values: Data.*find-batch"
    with fake_step(recipe) as step, pytest.raises(ModelError, match=wanted):
        step.forward()


class _ReadingTask(paceline.ImageClassification):
    """Its own network, and a loss that reads a number."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        return model(batch.inputs).sum() * float(batch.targets.max())


def test_a_task_that_needs_its_numbers_is_named_with_the_line(own_code: Any) -> None:
    recipe = own_code({"model": None, "task": "mine:task"}, task=_ReadingTask)
    line = _ReadingTask.loss.__code__.co_firstlineno + 1
    wanted = rf"^task=.*:_ReadingTask cannot be run.*test_fake_step\.py:{line} .*find-batch"
    with fake_step(recipe) as step, pytest.raises(ModelError, match=wanted):
        step.forward()


def test_a_constructor_may_read_its_numbers(own_code: Any) -> None:
    with fake_step(own_code(net=_Drawn)) as step:
        one_step(step)


def test_shared_parameters_stay_shared(own_code: Any) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.out = nn.Linear(64, 64), nn.Linear(64, 64)
            self.out.weight = self.into.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.into(x.flatten(1)))

    with fake_step(own_code(net=Tied)) as step:
        assert step.network.out.weight is step.network.into.weight
        one_step(step)


class OwnLoss(paceline.ImageClassification):
    """A task of one's own: another loss, and batches that it makes itself."""

    def open_pipeline(self, placement: Any) -> Any:
        return super().open_pipeline(placement)

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        return model(batch.inputs).logsumexp(1).mean() - batch.targets.float().mean()


def test_a_task_of_one_s_own_shows_what_its_pipeline_gives(own_code: Any) -> None:
    with fake_step(own_code({"task": "mine:OwnLoss"}, OwnLoss=OwnLoss), micro_batch=48) as step:
        assert step.batch.inputs.shape == (48, 1, 8, 8)
        assert step.batch.inputs.dtype == torch.float32
        assert len(step.batch.ids) == 48
        one_step(step)


def test_data_are_assumed_only_where_their_place_is_unknown(tmp_path: Path) -> None:
    recipe, said = with_placeholder_data(load_recipe("resnet50").recipe)
    assert recipe.data.dataset == "synthetic"
    assert said == "data.path is not set: as for ImageNet, 1,000 classes and images of 224 pixels are assumed"
    asked = load_recipe("resnet50", {"data.path": str(tmp_path)}).recipe
    assert with_placeholder_data(asked) == (asked, None)
    digits = load_recipe("digits").recipe
    assert with_placeholder_data(digits) == (digits, None)
    numbers = load_recipe("discs", {"data.dataset": "csv", "data.target_columns": ["age"]}).recipe
    assert with_placeholder_data(numbers) == (numbers, None)
