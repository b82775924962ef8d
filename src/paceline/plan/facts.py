"""Inputs of a plan apart from its recipe: facts of the data, the task, the machine and the network."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """Facts of the data for the plan.

    Attributes:
        train_samples: Samples in one training epoch.
        evaluation_samples: Samples held out for evaluation; 0 if there are none.
        description: Further facts for the reader, by name (classes, image size, back-end, ...).
        reasons: Why `auto` was resolved as it was, and why a key without `auto` is not used, by dotted key.
        unused: Dotted keys that the task does not use, with the reason (see :func:`~paceline.recipe.unused.all_but`).
        left_out: Data that exists but is not used, one sentence per kind.
    """

    train_samples: int
    evaluation_samples: int
    description: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    unused: dict[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TaskFacts:
    """Facts of the task for the plan, once it knows its data.

    Attributes:
        higher_is_better: For each metric, whether higher is better.
        headline: The main metric.
        sample_name: What samples are called (``images``).
        weight_unit: What weights them in a step's mean loss (``tokens``).
        class_weights: Weight of each class in the loss (``train.class_weights``); empty: all the same.
        sampling: How often a sample of each class is drawn, relative to one of another (``data.sampling``); empty: each
            is used once an epoch.
        mixture: How many samples of each data set an epoch has (``data.mixture``); empty: there is one set.
        classes_sha256: Digest of the classes or sets by which samples are drawn; None if they are not.
        lengths_sha256: Digest of the sample lengths by which steps are balanced (``batch.balance``); None if they are
            not.
    """

    higher_is_better: dict[str, bool] = field(default_factory=dict)
    headline: str = "loss"
    sample_name: str = "samples"
    weight_unit: str = "samples"
    lengths_sha256: str | None = None
    class_weights: tuple[float, ...] = ()
    sampling: tuple[float, ...] = ()
    mixture: tuple[int, ...] = ()
    classes_sha256: str | None = None


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """Facts of the machine for the plan, the same on every rank.

    Attributes:
        device: Device type of the model: cpu, cuda, mps or xpu.
        device_name: The device's own name.
        fast_bf16: Whether bf16 matrix products are faster than fp32 ones here.
        cores: CPU cores of this machine that the run may use.
        threads: Threads per process set by the environment (OMP_NUM_THREADS), if any.
        memory_bytes: Memory of one process's device, with a CPU's memory divided among its processes; None if unknown.
        lacks: Unsupported features, with the reason: ``fp8``, ``tf32``, ``bf16_products``.
        assigned_cores: Physical cores that ``parallel.affinity`` assigns to this process, if set.
        reasons: Reasons, by dotted key or by ``fast_bf16``.
    """

    device: str
    device_name: str
    fast_bf16: bool
    cores: int
    threads: int | None = None
    memory_bytes: int | None = None
    lacks: dict[str, str] = field(default_factory=dict)
    assigned_cores: int | None = None
    reasons: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ParameterNumbers:
    """Number of a network's parameters: all, and those that are trained."""

    every: int
    trained: int


@dataclass(frozen=True, kw_only=True)
class ParameterGroupFacts:
    """Parameters that the optimizer treats alike.

    Attributes:
        parameters: A pattern of the recipe, or a description.
        tensors: Number of tensors.
        numbers: Number of values in them.
        lr_factor: Factor on the schedule's learning rate.
        weight_decay: Their weight decay.
        first_step: The first step that trains them, from 1.
        last_step: The last step that trains them; None for the run's last step.
    """

    parameters: str
    tensors: int
    numbers: int
    lr_factor: float
    weight_decay: float
    first_step: int = 1
    last_step: int | None = None


@dataclass(frozen=True, kw_only=True)
class NetworkFacts:
    """Facts of the network for the plan.

    Attributes:
        parameters: Number of its parameters.
        groups: Its parameters as the optimizer treats them.
        fp8_layers: Names of the layers that compute in fp8.
        is_depthwise: Whether CPUs compute it faster in fp32: a large share of its products are depthwise convolutions,
            and it has BatchNorm.
        config: What the configuration of a network of Transformers was made from.
    """

    parameters: ParameterNumbers
    groups: tuple[ParameterGroupFacts, ...] = ()
    fp8_layers: tuple[str, ...] = ()
    is_depthwise: bool = False
    config: dict[str, Any] | None = None
