"""A compiled run: nothing is compiled that was not planned, and what is computed is what the network computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_sentences import raises
from torch import nn
from torch._dynamo import register_backend
from torch._dynamo.utils import counters

from paceline.errors import ModelError, RecipeError
from paceline.models.compiled import CompiledNetwork, CompileLog
from paceline.recipe.model import ModelSection

Make = Callable[..., Any]

# Traced as for inductor, and then run as it was written: seconds instead of minutes.
EAGER = {"model.compile": True, "model.compile_backend": "eager"}
AOT = {"model.compile": True, "model.compile_backend": "aot_eager"}
# 52 samples in steps of 16: three of four epochs' steps are full, and the last one has four; 21 are evaluated in
# batches of 8, the last one of five.
ALL = {"train.ema": 0.9, "evaluate.batch_size": 8, "telemetry.log_every": "1 steps", "train.duration": "9 steps"}


@pytest.fixture(autouse=True)
def _forget_what_was_compiled() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def compiled_graphs() -> int:
    return counters["stats"]["unique_graphs"]


def recompiled(incidents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that tell of it; that these tiny networks are not faster for being compiled is none."""
    return [each for each in incidents if each["incident"] == "recompile"]


@contextmanager
def watching_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[bool, int]]]:
    """Note (gradients computed, samples) of each call of what was compiled."""
    from paceline.models.compiled import CompiledNetwork

    called: list[tuple[bool, int]] = []
    plain = CompiledNetwork.forward

    def forward(self: Any, x: torch.Tensor) -> Any:
        if self.compiles(tuple(x.shape)):
            called.append((torch.is_grad_enabled(), len(x)))
        return plain(self, x)

    monkeypatch.setattr(CompiledNetwork, "forward", forward)
    yield called


def test_every_planned_size_is_compiled_once_and_nothing_else(
    train_tiny: Make, events: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    with watching_calls(monkeypatch) as called:
        result = train_tiny("compiled", {**ALL, **EAGER, "evaluate.every": "2 steps"})
    assert result.status == "completed"
    # Training at 16 and at 4, and evaluation at 8 and at 5 for each of two sets of weights.
    assert compiled_graphs() == 6
    assert set(called) == {(True, 16), (True, 4), (False, 8), (False, 5)}
    assert recompiled(events(result.run_dir, "incident")) == []


def test_rare_sizes_run_uncompiled(train_tiny: Make) -> None:
    result = train_tiny(
        "compiled",
        {**ALL, **EAGER, "train.duration": "1 epochs"},
        train_images=16 * 25 + 5,
        evaluation_images=8 * 25 + 3,
    )
    assert result.status == "completed"
    assert compiled_graphs() == 3  # training at 16, evaluation at 8 for two sets of weights


def test_images_that_grow_are_compiled_size_by_size(train_tiny: Make, events: Make) -> None:
    growing = {"data.progressive.start_size": 4, "data.progressive.multiple": 2, "data.progressive.end": 2}
    result = train_tiny(
        "compiled", {**ALL, **EAGER, **growing, "train.duration": "5 epochs", "evaluate.every": "1 epochs"}
    )
    # Sizes of 4, 6 and 8 pixels, each at 16 and at 4 samples.
    assert compiled_graphs() == 6 + 4
    assert recompiled(events(result.run_dir, "incident")) == []


class Restless(nn.Module):
    """Its forward pass depends on a number that changes in each, as a counter of one's own may."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.body(x) * (1 + self.calls * 1e-6)


def test_what_is_compiled_anew_is_told_with_the_reason(train_tiny: Make, events: Make) -> None:
    result = train_tiny("compiled", {**ALL, **EAGER, "train.duration": "3 steps"}, make_network=Restless)
    told = recompiled(events(result.run_dir, "incident"))
    assert told
    assert "calls" in told[0]["message"]
    assert told[0]["rank"] == 0


# The third, bf16, is fp16 without a scale.
@pytest.mark.parametrize("precision", ["fp32", pytest.param("fp16", marks=pytest.mark.thorough)])
def test_the_self_test_leaves_no_trace(train_tiny: Make, precision: str) -> None:
    """What is compiled by the `eager` back-end computes the very same: so must the run, for all its trials."""
    sensitive = {**ALL, "model.options.dropout": 0.3, "data.augment.flip": 0.5, "train.precision": precision}
    plain = train_tiny("plain", sensitive)
    compiled = train_tiny("compiled", {**sensitive, **EAGER})
    assert compiled.summary.weights_sha256 == plain.summary.weights_sha256
    assert compiled.summary.ema_sha256 == plain.summary.ema_sha256
    assert compiled.metrics == plain.metrics


def test_gradients_of_micro_batches_add_up_as_uncompiled_and_the_self_test_tells_error_and_speed(
    train_tiny: Make, events: Make, weights: Make
) -> None:
    plain = train_tiny("plain", {**ALL, "batch.micro_size": 4})
    compiled = train_tiny("compiled", {**ALL, **AOT, "batch.micro_size": 4})
    torch.testing.assert_close(dict(weights(compiled)), dict(weights(plain)), rtol=1e-3, atol=1e-5)
    measured, *_ = events(compiled.run_dir, "measurement")
    assert measured["what"] == "compile"
    assert measured["gradient_error"] < 1e-5
    assert measured["speedup"] > 0
    assert measured["seconds"] > 0
    assert "times as fast" in measured["message"]


Fault = Callable[[list[torch.Tensor]], None]


def faulty(name: str, spoil: Fault) -> str:
    """A back-end whose backward passes go wrong."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def backward(graph: torch.fx.GraphModule, _: Any) -> Make:
        def run(*args: Any) -> list[Any]:
            found = list(graph.forward(*args))
            spoil([each for each in found if each is not None])
            return found

        return make_boxed_func(run)

    register_backend(
        aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward), bw_compiler=backward), name=name
    )
    return name


def _a_tenth_too_large(gradients: list[torch.Tensor]) -> None:
    gradients[0].mul_(1.1)


def _lost(gradients: list[torch.Tensor]) -> None:
    min(gradients, key=torch.numel).zero_()


def _no_number(gradients: list[torch.Tensor]) -> None:
    gradients[-1].fill_(float("nan"))


WRONG = [faulty(f"paceline{each.__name__}", each) for each in (_a_tenth_too_large, _lost, _no_number)]


@pytest.mark.parametrize(("backend", "precision"), [*((each, "fp32") for each in WRONG), (WRONG[0], "bf16")])
def test_a_compiler_that_computes_something_else_is_found_before_the_first_step(
    train_tiny: Make, runs: Path, backend: str, precision: str
) -> None:
    wrong = {"model.compile": True, "model.compile_backend": backend, "train.precision": precision}
    with pytest.raises(ModelError, match=r"gradient of \S+ is wrong: .* set model.compile=false"):
        train_tiny("wrong", {**ALL, **wrong})
    assert not list((runs / "wrong" / "checkpoints").glob("step-*"))


@register_backend(name="paceline_broken")
def _broken(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Make:
    raise RuntimeError("no compiler of C++ is installed")


def test_a_network_that_cannot_be_compiled_is_named(train_tiny: Make) -> None:
    with pytest.raises(ModelError, match=r"paceline_broken cannot compile small_resnet \(.*no compiler of C\+\+"):
        train_tiny("broken", {**ALL, "model.compile": True, "model.compile_backend": "paceline_broken"})


def test_an_unknown_back_end_is_named(train_tiny: Make) -> None:
    with pytest.raises(ModelError, match=r"compile_backend=inductr is unknown .*inductor"):
        train_tiny("unknown", {**ALL, "model.compile": True, "model.compile_backend": "inductr"})


@pytest.mark.parametrize(
    "first", [{}, pytest.param(EAGER, marks=pytest.mark.thorough)], ids=["compiled later", "compiled at first"]
)
@pytest.mark.everyday
def test_a_run_may_go_on_compiled_or_not(train_tiny: Make, train_shared: Make, first: dict[str, Any]) -> None:
    later = {} if first else EAGER
    whole = train_shared(ALL)
    train_tiny("parts", {**ALL, **first, "train.until": "4 steps"})
    ended = train_tiny("parts", {**ALL, **later})
    assert ended.summary.resumes == 1
    assert ended.summary.weights_sha256 == whole.summary.weights_sha256


def test_a_resumed_run_meets_the_same_graphs(train_tiny: Make, train_shared: Make, events: Make) -> None:
    """Also where its first step is an epoch's small one, which would otherwise be the one that graphs are made for."""
    whole = train_shared({**ALL, **EAGER})
    train_tiny("parts", {**ALL, **EAGER, "train.until": "3 steps"})
    torch.compiler.reset()
    counters.clear()
    ended = train_tiny("parts", {**ALL, **EAGER})
    assert compiled_graphs() == 6
    assert ended.summary.weights_sha256 == whole.summary.weights_sha256
    assert recompiled(events(ended.run_dir, "incident")) == []


def test_an_exact_run_may_be_compiled(train_tiny: Make) -> None:
    exact = {**ALL, "parallel.exact": True, "parallel.logical_ranks": 4}
    plain, compiled = train_tiny("plain", exact), train_tiny("compiled", {**exact, **EAGER})
    assert compiled.summary.weights_sha256 == plain.summary.weights_sha256


@pytest.mark.timeout(600)
def test_inductor_computes_what_the_network_does(
    train_tiny: Make, tiny_task: Make, events: Make, weights: Make
) -> None:
    """Dropout included: both draw the same."""
    # Each size takes a compiler of C++ its seconds: one to train with, and one to evaluate.
    task = tiny_task(train_images=48, evaluation_images=16)
    asked = {**ALL, "model.options.dropout": 0.3, "train.ema": "off", "train.duration": "6 steps"}
    plain = train_tiny("plain", asked, task=task)
    compiled = train_tiny("compiled", {**asked, "model.compile": True}, task=task)
    torch.testing.assert_close(dict(weights(compiled)), dict(weights(plain)), rtol=1e-3, atol=1e-4)
    assert recompiled(events(compiled.run_dir, "incident")) == []
    measured, *_ = events(compiled.run_dir, "measurement")
    assert measured["gradient_error"] < 1e-4
    torch.compiler.reset()
    train_tiny("parts", {**asked, "model.compile": True, "train.until": "3 steps"}, task=task)
    torch.compiler.reset()
    ended = train_tiny("parts", {**asked, "model.compile": True}, task=task)
    assert ended.summary.weights_sha256 == compiled.summary.weights_sha256


def test_a_mode_of_inductor_needs_inductor(train_tiny: Make) -> None:
    with raises(RecipeError, key="model.compile_mode", value="max-autotune-no-cudagraphs"):
        train_tiny("mode", {**EAGER, "model.compile_mode": "max-autotune-no-cudagraphs"})


class OneLoss(nn.Module):
    """Returns its loss in the same memory each time, as the replays of a CUDA graph do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("memory", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.memory.copy_(x.sum())


def test_the_next_call_does_not_overwrite_a_loss() -> None:
    model = ModelSection(compile=True, compile_backend="eager")
    network = CompiledNetwork(OneLoss(), model, train_sizes=[2], evaluation_sizes=[], log=CompileLog())
    losses = [network(torch.full((2,), value)) for value in (1.0, 2.0, 3.0)]
    assert [each.item() for each in losses] == [2.0, 4.0, 6.0]
