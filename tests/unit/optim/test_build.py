"""Which parameters decay, and that the optimizers are torch's own to the bit."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import timm
import torch
from timm.optim import RMSpropTF, list_optimizers, param_groups_layer_decay, param_groups_weight_decay
from torch import nn

from paceline.errors import ModelError, RecipeError
from paceline.optim.build import Clipping, apply_settings, build_optimizer
from paceline.optim.parameter_groups import describe_groups, parameter_groups, treatments
from paceline.optimizers import LIBRARY_OPTIMIZERS, RULES
from paceline.plan.rates import OptimizerSettings
from paceline.recipe.load import stored_recipe
from paceline.recipe.training import Optimizer

CPU = torch.device("cpu")


def section(**options: Any) -> Optimizer:
    return stored_recipe({}, "plain", {f"optimizer.{key}": value for key, value in options.items()}).optimizer


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 3))


def names_of(model: nn.Module, parameters: list[nn.Parameter]) -> set[str]:
    return {name for name, each in model.named_parameters() if any(each is one for one in parameters)}


def rates_of(model: nn.Module, groups: list[dict[str, Any]], factor: str = "lr_factor") -> dict[str, Any]:
    return {
        name: (group[factor], group["weight_decay"]) for group in groups for name in names_of(model, group["params"])
    }


class Tokens(nn.Module):
    """Says itself what should not decay, as timm's transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.ones(1, 4, 3))
        self.blocks = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        self.head = nn.Linear(3, 2)

    def no_weight_decay(self) -> set[str]:
        return {"position", "blocks.1.*"}


def test_what_a_network_inside_another_exempts_does_not_decay() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Tokens())
    decayed, _ = parameter_groups(model, section(weight_decay=0.1))
    assert names_of(model, decayed["params"]) == {"0.weight", "1.blocks.0.weight", "1.head.weight"}
    (group,) = parameter_groups(model, section(weight_decay=0.1, decay_norm_and_bias=True))
    assert len(group["params"]) == 9


def test_a_published_transformer_decays_what_its_own_library_would() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=3)
    theirs = param_groups_weight_decay(model, 0.1, no_weight_decay_list=model.no_weight_decay())
    expected = {group["weight_decay"]: names_of(model, group["params"]) for group in theirs}
    ours = parameter_groups(model, section(weight_decay=0.1))
    assert {group["weight_decay"]: names_of(model, group["params"]) for group in ours} == expected
    assert "pos_embed" in expected[0.0]


def test_groups_that_would_be_empty_are_left_out() -> None:
    (group,) = parameter_groups(net(), section(weight_decay=0.1, decay_norm_and_bias=True))
    assert (group["weight_decay"], len(group["params"])) == (0.1, 6)
    assert [len(group["params"]) for group in parameter_groups(net(), section())] == [6]
    assert len(parameter_groups(nn.BatchNorm1d(3), section(weight_decay=0.1))) == 1


def test_shared_parameters_come_once_and_frozen_ones_not_at_all() -> None:
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    assert sum(len(group["params"]) for group in parameter_groups(tied, section(weight_decay=0.1))) == 3
    tied[0].bias.requires_grad_(requires_grad=False)
    assert sum(len(group["params"]) for group in parameter_groups(tied, section(weight_decay=0.1))) == 2


PLAIN: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"momentum": 0.9}),
    "sgd without momentum": (torch.optim.SGD, {"momentum": 0}),
    "nesterov": (torch.optim.SGD, {"momentum": 0.8, "nesterov": True, "weight_decay": 0.01}),
    "adamw": (torch.optim.AdamW, {"betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.05, "fused": True}),
    "adamw without decay": (torch.optim.AdamW, {"fused": True}),
    "rmsprop": (torch.optim.RMSprop, {"alpha": 0.95, "eps": 1e-3, "momentum": 0.8, "weight_decay": 0.1}),
    "adafactor": (torch.optim.Adafactor, {"weight_decay": 0.1}),
    "rmsprop as in tensorflow": (RMSpropTF, {"alpha": 0.95, "eps": 1e-3, "momentum": 0.8, "weight_decay": 0.1}),
}


@pytest.mark.parametrize("name", PLAIN)
def test_it_is_torchs_own_to_the_bit(name: str) -> None:
    kind, options = PLAIN[name]
    ours, plain = net(), net()
    set_by_us = {key: value for key, value in options.items() if key != "fused"}
    more = {"decay_norm_and_bias": True} if "weight_decay" in options else {}
    more |= {"eps_inside_sqrt": True} if kind is RMSpropTF else {}
    optimizers = (
        build_optimizer(ours, section(name=kind.__name__.lower().removesuffix("tf"), **set_by_us, **more), CPU),
        kind(plain.parameters(), lr=0.1, **{"weight_decay": 0.0, **options}),
    )
    generator = torch.Generator().manual_seed(1)
    for step in range(20):
        for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
            mine.grad = torch.randn(mine.shape, generator=generator)
            theirs.grad = mine.grad.clone()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / (step + 1)
            optimizer.step()
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_threads_change_no_bit_of_fused_adamw() -> None:
    results, before = [], torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        generator = torch.Generator().manual_seed(0)
        model = nn.Linear(1001, 301)
        with torch.no_grad():
            for each in model.parameters():
                each.copy_(torch.randn(each.shape, generator=generator))
        optimizer = build_optimizer(model, section(name="adamw", weight_decay=0.1), CPU)
        assert optimizer.defaults["fused"]
        for _ in range(3):
            for each in model.parameters():
                each.grad = torch.randn(each.shape, generator=generator)
            optimizer.step()
        results.append([*model.parameters()])
    torch.set_num_threads(before)
    assert all(torch.equal(*pair) for other in results[1:] for pair in zip(results[0], other, strict=True))


def test_adamw_is_not_fused_where_torch_cannot() -> None:
    asked = build_optimizer(net(), section(name="adamw", options={"foreach": True}), CPU)
    is_complex = build_optimizer(nn.Linear(2, 2, dtype=torch.complex64), section(name="adamw"), CPU)
    assert not asked.defaults["fused"]
    assert not is_complex.defaults["fused"]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 200) -> list[torch.Tensor]:
    """The weights after steps along the same gradients."""
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        for each in model.parameters():
            each.grad = torch.randn(each.shape, generator=generator) * (1 + each.detach().abs())
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (1 + step / 50)
        optimizer.step()
    return [each.detach() for each in model.parameters()]


def written_out(name: str, steps: int = 200) -> list[torch.Tensor]:
    """The rules as their papers write them, in float64, on the same gradients."""
    model, generator = net(), torch.Generator().manual_seed(1)
    weights = [each.detach().double() for each in model.parameters()]
    first = [torch.zeros_like(each) for each in weights]
    second = [torch.zeros_like(each) for each in weights]
    for step in range(steps):
        lr = 0.01 / (1 + step / 50)
        for w, m, v in zip(weights, first, second, strict=True):
            g = torch.randn(w.shape, generator=generator).double() * (1 + w.abs())
            match name:
                case "lion":  # Chen et al. 2023, algorithm 2
                    w.mul_(1 - lr * 0.1)
                    w.sub_(lr * torch.sign(0.9 * m + 0.1 * g))
                    m.mul_(0.99).add_(0.01 * g)
                case "lamb":  # You et al. 2019, algorithm 2
                    m.mul_(0.9).add_(0.1 * g)
                    v.mul_(0.999).add_(0.001 * g * g)
                    r = (m / (1 - 0.9 ** (step + 1))) / ((v / (1 - 0.999 ** (step + 1))).sqrt() + 1e-6) + 0.1 * w
                    w.sub_(lr * (w.norm() / r.norm() if w.norm() > 0 and r.norm() > 0 else 1.0) * r)
                case "lars":  # You et al. 2017, algorithm 1, with the rate outside the momentum
                    ratio = 0.001 * w.norm() / (g.norm() + 0.1 * w.norm() + 1e-8) if w.norm() > 0 else 1.0
                    m.mul_(0.9).add_((g + 0.1 * w) * ratio)
                    w.sub_(lr * m)
    return weights


@pytest.mark.parametrize("name", ["lion", "lamb", "lars"])
def test_rules_that_torch_lacks_are_as_published(name: str) -> None:
    model = net()
    asked = section(name=name, weight_decay=0.1, decay_norm_and_bias=True, lr=0.01)
    found = train(model, build_optimizer(model, asked, CPU))
    for mine, theirs in zip(found, written_out(name), strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("eps", [0.0, 0.5])
def test_lars_divides_by_its_norms_and_eps(eps: float) -> None:
    model = net()
    optimizer = build_optimizer(model, section(name="lars", eps=eps, weight_decay=0.1, lr=0.1), CPU)
    matrices = [each for each in model.parameters() if each.ndim > 1]
    for each in model.parameters():
        each.grad = 0.01 * each.detach()
    before = [each.detach().norm() for each in matrices]
    optimizer.step()
    # Along the weights alone: what decays becomes shorter by its rate, its gradient and the trust ratio.
    for each, norm in zip(matrices, before, strict=True):
        shorter = 0.1 * 0.11 * norm * 0.001 * norm / (0.11 * norm + eps)
        torch.testing.assert_close(each.detach().norm(), norm - shorter, rtol=1e-6, atol=0)
    optimizer.zero_grad()
    for each in model.parameters():
        each.grad = torch.zeros_like(each)
    optimizer.step()
    assert all(bool(torch.isfinite(each).all()) for each in model.parameters())


def test_muon_moves_matrices_by_orthogonal_steps_and_the_rest_by_adamw() -> None:
    ours, plain = net(), net()
    optimizer = build_optimizer(ours, section(name="muon", momentum=0.95, lr=0.01), CPU)
    adamw = torch.optim.AdamW(plain.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
    generator = torch.Generator().manual_seed(1)
    before = ours[3].weight.detach().clone()
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        mine.grad = torch.randn(mine.shape, generator=generator)
        theirs.grad = mine.grad.clone()
    optimizer.step()
    adamw.step()
    torch.testing.assert_close(ours[1].weight, plain[1].weight)
    singular = torch.linalg.svdvals(before - ours[3].weight)
    assert singular.max() / singular.min() < 1.6  # Newton-Schulz brings them near to one another, not together


def test_options_reach_the_class_and_wrong_ones_are_named() -> None:
    assert build_optimizer(net(), section(name="adamw", options={"amsgrad": True}), CPU).defaults["amsgrad"]
    with pytest.raises(RecipeError, match=r"optimizer.options .'amsgard'. do not fit|amsgard"):
        build_optimizer(net(), section(name="adamw", options={"amsgard": True}), CPU)
    with pytest.raises(RecipeError, match="those are keys of this section"):
        section(name="adamw", options={"betas": [0.1, 0.2]})


def test_patterns_give_groups_of_their_own() -> None:
    model = net()
    asked = section(weight_decay=0.1, groups={"3.*": {"lr_factor": 10}, "*.bias": {"weight_decay": 0.3}})
    rates = rates_of(model, parameter_groups(model, asked))
    assert (rates["0.weight"], rates["0.bias"], rates["1.weight"]) == ((1, 0.1), (1, 0.3), (1, 0.0))
    assert rates["1.bias"] == (1, 0.3)
    assert (rates["3.weight"], rates["3.bias"]) == ((10, 0.1), (10, 0.0))  # the first pattern that matches
    told = {(each.parameters, each.lr_factor, each.weight_decay): each for each in describe_groups(model, asked)}
    assert (told["3.*", 10, 0.1].tensors, told["3.*", 10, 0.1].numbers) == (1, 4 * 36 * 3)
    optimizer = build_optimizer(model, asked, CPU)
    apply_settings(optimizer, OptimizerSettings(learning_rate=0.5, weight_decay=0.2))
    moved = {(group["lr"], group["weight_decay"]) for group in optimizer.param_groups}
    assert moved == {(0.5, 0.2), (5.0, 0.2), (5.0, 0.0), (0.5, 0.3), (0.5, 0.0)}


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    with pytest.raises(ModelError, match=r"no trainable parameter's name matches 'fc.\*'.*3\.weight, 3\.bias"):
        parameter_groups(net(), section(groups={"fc.*": {"lr_factor": 10}}))


def test_the_classifier_is_a_group_whatever_its_name() -> None:
    asked = section(groups={"classifier": {"lr_factor": 10}})
    assert {each.source for each in treatments(net(), asked).values() if each.lr_factor == 10} == {"classifier (3)"}
    network = nn.Sequential(OrderedDict(classifier=nn.Conv2d(1, 1, 1), last=nn.Linear(1, 1)))
    named = section(groups={"classifier.*": {"lr_factor": 10}, "classifier": {"lr_factor": 2}})
    assert [each.lr_factor for each in treatments(network, named).values()] == [10, 10, 2, 2]
    with pytest.raises(ModelError, match="matches 'classifier'"):
        parameter_groups(nn.Conv2d(1, 1, 1), asked)


def test_layers_further_from_the_output_learn_more_slowly() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=3, num_classes=3)
    exempt = model.no_weight_decay()
    theirs = param_groups_layer_decay(model, 0.1, no_weight_decay_list=exempt, layer_decay=0.65)
    wanted = rates_of(model, theirs, factor="lr_scale")
    ours = rates_of(model, parameter_groups(model, section(weight_decay=0.1, layer_decay=0.65)))
    assert ours.keys() == wanted.keys()
    assert all(ours[name] == pytest.approx(wanted[name]) for name in ours)
    with pytest.raises(ModelError, match=r"use optimizer\.groups"):
        parameter_groups(net(), section(layer_decay=0.65))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    for each in model.parameters():
        each.grad = torch.randn(each.shape, generator=generator) * 3
    return [each.grad.clone() for each in model.parameters() if each.grad is not None]


def test_clipping() -> None:
    for options, clip in (
        ({}, lambda p: None),
        ({"clip_norm": 1.5}, lambda p: nn.utils.clip_grad_norm_(p, 1.5)),
        ({"clip_value": 0.5}, lambda p: nn.utils.clip_grad_value_(p, 0.5)),
    ):
        ours, plain = net(), net()
        before = gradients(ours)
        gradients(plain)
        clip(list(plain.parameters()))
        norm = Clipping(ours, section(**options))(measure=True)
        for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine.grad, theirs.grad)
        torch.testing.assert_close(norm, torch.cat([each.flatten() for each in before]).norm())


@pytest.mark.parametrize(
    ("name", "head"), [("resnet10t", ("fc.",)), ("deit_tiny_distilled_patch16_224", ("head.", "head_dist."))]
)
def test_adaptive_clipping_spares_the_classifier(name: str, head: tuple[str, ...]) -> None:
    model = timm.create_model(name, num_classes=3)
    before = gradients(model)
    Clipping(model, section(clip_adaptive=0.02))(measure=False)
    for (parameter, each), old in zip(model.named_parameters(), before, strict=True):
        if parameter.startswith(head):
            assert torch.equal(each.grad, old)
            continue
        over = tuple(range(1, each.ndim)) or (0,)
        weight, gradient = (torch.linalg.vector_norm(values, dim=over) for values in (each.detach(), old))
        limit = 0.02 * weight.clamp(min=1e-3)
        scale = torch.where(gradient < limit, torch.ones_like(gradient), limit / gradient)
        torch.testing.assert_close(each.grad, old * scale.reshape(-1, *([1] * (each.ndim - 1))))


@pytest.mark.filterwarnings("ignore:.*opt_einsum:UserWarning")
@pytest.mark.parametrize(
    "name",
    # Which compiles its step, once on each machine.
    [
        pytest.param(each, marks=pytest.mark.thorough) if each in ("kron", "kronc") else each
        for each in LIBRARY_OPTIMIZERS
    ],
)
def test_every_optimizer_of_torch_and_timm_makes_a_step_by_its_name(name: str) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    before = model[0].weight.detach().clone()
    optimizer = build_optimizer(model, section(name=name, lr=0.1, weight_decay=0.01), CPU)
    model(torch.ones(8, 4)).square().mean().backward()
    apply_settings(optimizer, OptimizerSettings(learning_rate=0.1))
    optimizer.step()
    assert model[0].weight.isfinite().all()
    # The first step of ADOPT begins its second moments only.
    assert torch.equal(model[0].weight, before) == ("adopt" in name)


def test_no_optimizer_of_the_libraries_is_left_out() -> None:
    own = {"adahessian"} | {name for name in list_optimizers() if name.startswith(("fused", "bnb"))}
    assert set(list_optimizers()) - own == {*RULES, *LIBRARY_OPTIMIZERS} - {"asgd", "rprop"}
    of_torch = {name.lower() for name, kind in vars(torch.optim).items() if isinstance(kind, type)}
    assert of_torch - {"optimizer", "lbfgs", "sparseadam"} <= {*RULES, *LIBRARY_OPTIMIZERS}
    options = {"momentum": 0.5, "nesterov": False}
    group = build_optimizer(net(), section(name="SGDW", options=options), CPU).param_groups[0]
    assert {key: group[key] for key in options} == options


@pytest.mark.parametrize(("name", "why"), [("LBFGS", "computes the loss several times"), ("SparseAdam", "sparse grad")])
def test_what_a_step_cannot_give_is_refused_under_any_name(name: str, why: str) -> None:
    with pytest.raises(RecipeError, match=f"optimizer.name=torch.optim:{name} is not supported: it .*{why}"):
        build_optimizer(net(), section(name=f"torch.optim:{name}"), CPU)
