"""Run one training step of a recipe on fake tensors: without memory, data or a device.

The recipe's task, network, loss, optimizer and weight average are built as in a run, but from fake tensors, which have
shapes but no values. A step on them runs every operation of a real step and takes milliseconds per hundred operations.
Observe it with a dispatch mode to learn its memory, arithmetic or layers::

    with fake_step(recipe, micro_batch=64) as step, FlopCounterMode() as counted:
        step.backward(step.forward())
        step.update()
"""

from __future__ import annotations

import contextlib
import traceback
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.data.batch import Batch
from paceline.data.pipeline import Placement
from paceline.errors import ModelError, PacelineError
from paceline.host.devices import Device
from paceline.host.world import World
from paceline.models.flops import next_node_number
from paceline.models.precision import Precision
from paceline.optim.build import Clipping, ExponentialMovingAverage
from paceline.optim.classes import has_sparse_gradients, use_dense_gradients
from paceline.plan import MachineFacts, Plan
from paceline.plugins.references import is_ours
from paceline.recipe.schema import Recipe
from paceline.tasks.task import BatchMaker, Task, task_name
from paceline.trainer.evaluate import evaluation_mode
from paceline.trainer.fake_batch import batch_maker, evaluation_batch_maker
from paceline.trainer.process_settings import restore_random_states
from paceline.trainer.subject import Subject

_HALVES = (torch.float16, torch.bfloat16)

# Computed in fp32 under CUDA's autocast, but not under the CPU's (torch's documentation of torch.amp, "CUDA Ops that
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
    """Runs functions on CPU tensors with the rules of a CUDA device.

    Fake tensors live on the CPU, since without a GPU torch supports no other device in a backward pass. Three CPU rules
    differ from a GPU's: autocast leaves functions in 16 bits that a GPU computes in 32, dropout saves a number per
    element where a GPU saves a byte, and attention with dropout is decomposed where a GPU has a kernel.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function with its arguments cast, or call a replacement."""
        options = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "dropout":
            # torch.dropout(input, p, train), and nn.functional's dropout(input, p=0.5, training=True, inplace=False)
            names = ("input", "p", "training", "inplace")
            arguments = {"p": 0.5, "training": True, "inplace": False} | dict(zip(names, args, strict=False)) | options
            if arguments.get("train", arguments["training"]) and not arguments["inplace"] and 0 < arguments["p"] < 1:
                return torch.native_dropout(arguments["input"], arguments["p"], train=True)[0]
        if name == "scaled_dot_product_attention":
            # The fused kernels of a GPU apply dropout internally: only a seed is saved.
            args, options = args[:4], options | {"dropout_p": 0.0} | ({"is_causal": args[5]} if len(args) > 5 else {})
        if name in _IN_FP32 and torch.is_autocast_enabled("cpu") and options.get("dtype") is None:
            args, options = tuple(map(_float, args)), {key: _float(value) for key, value in options.items()}
        return func(*args, **options)


def _float(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _HALVES else value


class _LocalBatchNorm(_BatchNorm):
    """SyncBatchNorm on one process: like the real one, except that it exchanges no per-channel statistics."""

    def _check_input_dim(self, _: Tensor) -> None:
        """Accept any shape: the network chose this module for its inputs."""


def replace_sync_batch_norm(network: nn.Module) -> None:
    """Let SyncBatchNorm, which requires a GPU, run without one."""
    synced: list[nn.Module] = [each for each in network.modules() if isinstance(each, nn.SyncBatchNorm)]
    for module in synced:
        module.__class__ = _LocalBatchNorm


class Faker:
    """Converts tensors to fake ones, one for each: shared tensors stay shared.

    A network is built on ``meta`` first: many constructors read a value from a tensor, which a fake one refuses.

    Args:
        mode: The fake-tensor mode that owns them.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._made: dict[int, tuple[Tensor, Tensor]] = {}

    def network(self, network: nn.Module) -> None:
        """Replace each parameter, buffer, and tensor attribute by a fake tensor."""
        for module in network.modules():
            for attributes in (module._parameters, module._buffers, vars(module)):  # noqa: SLF001  # `setattr` accepts only real parameters
                attributes |= {name: self.tensor(each) for name, each in attributes.items() if isinstance(each, Tensor)}
            for name, attributes in vars(module).items():
                if isinstance(attributes, list) and attributes and all(isinstance(each, Tensor) for each in attributes):
                    vars(module)[name] = [self.tensor(each) for each in attributes]

    def tensor(self, tensor: Tensor) -> Tensor:
        """Return the fake tensor: same shape, strides and dtype; a parameter for a parameter."""
        if isinstance(tensor, FakeTensor):
            return tensor
        # Keep the original too: otherwise another tensor could reuse its id.
        if id(tensor) not in self._made:
            self._made[id(tensor)] = (tensor, self._make(tensor))
        return self._made[id(tensor)][1]

    def _make(self, tensor: Tensor) -> Tensor:
        with self._mode:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        if not isinstance(tensor, nn.Parameter):
            return fake.requires_grad_(tensor.requires_grad)
        parameter = nn.Parameter(fake, requires_grad=tensor.requires_grad)
        for name, value in vars(tensor).items():
            setattr(parameter, name, value)
        return parameter


class ForwardLayers:
    """Tracks which module of a network is running, with hooks that are not removed.

    Autograd numbers the nodes of the backward pass in the order of the forward pass. The module that was running when a
    number was assigned is the one whose gradient the node computes.

    Args:
        network: The network whose modules are tracked.
    """

    def __init__(self, network: nn.Module) -> None:
        self._running: list[str] = []
        # For each module, the first sequence number at which it was running.
        self._numbers, self._names = [0], [""]
        self._owners: dict[int, str] = {}
        for name, module in network.named_modules():
            self._owners |= {id(each): name for each in module.parameters(recurse=False)}
            if name:
                module.register_forward_pre_hook(lambda *_, name=name: self._enter(name))
                module.register_forward_hook(lambda *_: self._leave())

    @property
    def current(self) -> str:
        """The innermost module in its forward pass; empty if there is none."""
        return self._running[-1] if self._running else ""

    def current_in_backward(self) -> str:
        """The module whose gradient is being computed; during a recomputed forward pass, the module running."""
        node: Any = torch._C._current_autograd_node()  # noqa: SLF001  # torch.utils.checkpoint asks so
        if node is None or self._running:
            return self.current
        if type(node).__name__ == "AccumulateGrad":
            return self._owners.get(id(node.variable), "")
        position = bisect_right(self._numbers, node._sequence_nr())  # noqa: SLF001  # no public way; torch.fx uses it too
        return self._names[position - 1]

    def clear(self) -> None:
        """Clear the current module."""
        self._running.clear()
        self._note()

    def _enter(self, name: str) -> None:
        self._running.append(name)
        self._note()

    def _leave(self) -> None:
        if self._running:
            self._running.pop()
        self._note()

    def _note(self) -> None:
        number = next_node_number()
        if self._numbers[-1] == number:
            self._names[-1] = self.current
        else:
            self._numbers.append(number)
            self._names.append(self.current)


@dataclass(kw_only=True)
class FakeStep:
    """Everything a step needs, as fake tensors; a step is ``backward(forward())`` followed by ``update()``.

    Attributes:
        recipe: The recipe.
        plan: Its plan on the requested machine.
        network: The bare network.
        ema: The average of its weights, if the recipe has one.
        optimizer: Its optimizer, with the options used on the requested device.
        batch: One micro-batch.
        make_scored: Makes batches for :meth:`evaluate`; None if there is nothing to score.
        fakes: The assumed detections, for a detector.
        phase: Where the step is: ``forward``, ``backward``, ``update``, ``evaluation``, or empty.
    """

    recipe: Recipe
    plan: Plan
    task: Task
    network: nn.Module
    ema: ExponentialMovingAverage | None
    optimizer: torch.optim.Optimizer
    batch: Batch
    make_batch: BatchMaker
    make_scored: BatchMaker | None = None
    fakes: contextlib.AbstractContextManager[Any] | None = None
    phase: str = ""
    _precision: Precision = field(init=False)
    _clipping: Clipping = field(init=False)
    _layers: ForwardLayers = field(init=False)

    def __post_init__(self) -> None:
        scaler = self.recipe.train.grad_scaler
        # Its scaler is not used: it would read a value from the device, and its state is negligible.
        is_sharded = self.plan.strategy == "fsdp"
        self._precision = Precision(self.plan.precision, torch.device("cpu"), scaler, is_sharded=is_sharded)
        self._clipping = Clipping(self.network, self.recipe.optimizer)
        self._layers = ForwardLayers(self.network)

    @property
    def layer(self) -> str:
        """Name of the module that is running, or whose gradient is being computed; empty if there is none."""
        return self._layers.current_in_backward() if self.phase == "backward" else self._layers.current

    @property
    def micro_batch(self) -> int:
        """Number of samples in :attr:`batch`."""
        return len(self.batch.ids)

    def set_micro_batch(self, micro_batch: int) -> None:
        """Set the next step's micro-batch size."""
        self.batch = self.make_batch(micro_batch)

    def init_optimizer_state(self) -> None:
        """Do what only the first step does: let the optimizer create its state."""
        for parameter in self.network.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
        self.update()

    def forward(self) -> Tensor:
        """Return the loss of the batch, computed as in training."""
        with self._enter_phase("forward"), self._precision.keeping_casts():
            return self.task.loss(self._precision.applied_to(self.network), self.batch)

    def backward(self, loss: Tensor) -> None:
        """Compute gradients of all parameters and add them to existing ones."""
        with self._enter_phase("backward"):
            loss.backward()  # type: ignore[no-untyped-call]  # torch

    def update(self) -> None:
        """Clip the gradients, step, free the gradients, and update the average."""
        with self._enter_phase("update"), _OptimizerStepMode(self.plan.device):
            self._clipping(measure=True)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            if self.ema is not None:
                self.ema.update(0)

    @property
    def is_sample_by_sample(self) -> bool:
        """Whether the network is known to process its samples one by one."""
        return self.fakes is not None

    @property
    def evaluation_batch_size(self) -> int:
        """Number of samples in an evaluation batch; 0 if there is none."""
        return 0 if self.make_scored is None else min(self.plan.evaluation_batch_size, self.plan.evaluation_samples)

    def evaluate(self, observe: Callable[[Batch], None] = lambda _: None, samples: int | None = None) -> None:
        """Score one batch with each set of weights, as an evaluation does with all batches.

        Args:
            observe: Called with the batch.
            samples: Samples of the batch; the plan's number by default.
        """
        if self.make_scored is None:
            return
        networks = [self.network, *([] if self.ema is None else [self.ema.module])]
        with evaluation_mode(networks), self._enter_phase("evaluation"), torch.no_grad():
            batch = self.make_scored(samples or self.evaluation_batch_size)
            observe(batch)
            for network in networks:
                with self._precision.keeping_casts():
                    self.task.score(self.task.evaluated(self._precision.applied_to(network)), batch)

    @contextlib.contextmanager
    def _enter_phase(self, phase: str) -> Iterator[None]:
        self.phase = phase
        self._layers.clear()
        try:
            with contextlib.ExitStack() as rules:
                if self.plan.device == "cuda" and phase != "update":
                    rules.enter_context(CudaRules())
                if self.fakes is not None and phase != "update":
                    rules.enter_context(self.fakes)
                yield
        except PacelineError:
            raise
        except Exception as error:  # whatever a custom network or loss raises
            text, at = " ".join(str(error).split())[:200], f" in {self.layer}" if self.layer else ""
            builds_own = not is_ours(type(self.task).build_model.__module__)
            what = f"task={task_name(self.task)}" if builds_own else f"model.name={self.recipe.model.name}"
            raise ModelError(
                f"{what} cannot be run without values: {type(error).__name__}{at}{_line_of(error)} ({text}). Its "
                "computation depends on values, or uses an operator without a shapes-only form; measure it instead "
                "with `paceline find-batch`."
            ) from error
        finally:
            self.phase = ""
            self._layers.clear()


def _line_of(error: Exception) -> str:
    """Return the innermost line that raised it outside of torch and this package, for a message."""
    known = (str(Path(__file__).parents[1]), *torch.__path__)
    lines = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(known)]
    return f" at {Path(lines[-1].filename).name}:{lines[-1].lineno}" if lines else ""


class _OptimizerStepMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # not annotated in torch
    """Handles what fake tensors cannot do in an optimizer: fused steps, and reading its own values.

    Args:
        device: The type of the run's device.
    """

    def __init__(self, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # not annotated in torch
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default):  # noqa: SLF001  # the operator's name
            return 1.0 if args[0].is_floating_point() else 1
        if func.__name__.startswith("_fused_"):
            # It writes to its arguments. On a CPU it first copies each gradient in another layout, one after another.
            for gradient in args[1] if self._device == "cpu" else ():
                if not gradient.is_contiguous():
                    torch.empty_like(gradient)
            return None
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def fake_step(
    recipe: Recipe,
    task: Task | None = None,
    *,
    micro_batch: int | None = None,
    processes: int = 1,
    machine: MachineFacts | None = None,
    scores: bool = False,
) -> Iterator[FakeStep]:
    """Build one process's step of a run on fake tensors; inside, operations on them are fake.

    Nothing is allocated for weights, activations or state, nothing is computed, and neither random states nor settings
    of torch change. Data are opened as far as the plan requires, and are not read; without ``data.path`` see
    :func:`~paceline.trainer.fake_batch.with_placeholder_data`.

    Args:
        recipe: The recipe.
        task: Its task; by default the one that the recipe names.
        micro_batch: Samples of the batch; by default the plan's.
        processes: Processes of the planned run, all on one machine.
        machine: The machine to assume (see :func:`machine_with`); by default this one.
        scores: Whether to prepare :meth:`FakeStep.evaluate`, if the recipe evaluates.

    Raises:
        PacelineError: For mistakes that a plan finds, and for a network that needs real values.
    """
    world = World(world_size=processes, local_world_size=processes)
    with restore_random_states("cpu"):
        subject = Subject.open(recipe, world, "shapes", task=task, machine=machine)
        task, plan, shapes = subject.task, subject.plan, subject.shapes
        if has_sparse_gradients(shapes):
            if recipe.optimizer.tables == "sparse_adam":
                raise ModelError(
                    "optimizer.tables=sparse_adam takes only sparse gradients, whose size depends on values; estimate "
                    "with model.options={sparse: false} and optimizer.tables=same, which take more."
                )
            use_dense_gradients(shapes)  # the number of rows of a sparse tensor depends on real values
        if plan.device != "cpu":
            replace_sync_batch_norm(shapes)
        placement = Placement(device=torch.device("cpu"), channels_last=plan.channels_last)
        task.prepare_training(placement)
        make_batch = batch_maker(task, plan, placement)
        make_scored = evaluation_batch_maker(task, plan, placement) if scores and plan.evaluates else None
        average = None if recipe.train.ema is None else ExponentialMovingAverage(shapes, recipe.train.ema)
        mode = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        faker = Faker(mode)
        faker.network(shapes)
        if average is not None:
            faker.network(average.module)
        fakes = task.on_fake_tensors([shapes] if average is None else [shapes, average.module])
        with mode:
            optimizer = task.build_optimizer(shapes, recipe.optimizer, torch.device(plan.device))
            for group in optimizer.param_groups if plan.device == "cuda" else ():
                # On a GPU torch updates all parameters of a group at once where it can; on the CPU, one by one.
                if "foreach" in group and group["foreach"] is None and not group.get("fused"):
                    group["foreach"] = True
            yield FakeStep(
                recipe=recipe,
                plan=plan,
                task=task,
                network=shapes,
                ema=average,
                optimizer=optimizer,
                batch=make_batch(micro_batch or plan.micro_batch_size),
                make_batch=make_batch,
                make_scored=make_scored,
                fakes=fakes,
            )


def machine_with(device: Device, *, processes: int = 1) -> MachineFacts:
    """Return the facts of a machine that has this accelerator for each process."""
    no_units = {
        name: f"{device.title} has no {name} matrix units" for name in ("fp8", "tf32") if device.peak(name) is None
    }
    has_bf16 = device.peak("bf16") is not None
    return MachineFacts(
        device="cuda",
        device_name=device.title,
        fast_bf16=has_bf16,
        cores=max(8, processes),
        memory_bytes=device.memory_bytes,
        lacks=no_units | ({} if has_bf16 else {"bf16_products": f"{device.title} has no bf16 matrix units"}),
        reasons={"fast_bf16": f"{device.title} {'has' if has_bf16 else 'has no'} bf16 matrix units"},
    )
