"""What the processes of a run under proof record, and the verdict of a check."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from paceline.checkpoint.weights import read_weights
from paceline.data.batch import Batch, select_rows
from paceline.recipe.schema import Recipe

Verdict = Literal["passed", "failed", "not applicable"]


@dataclass(frozen=True, kw_only=True)
class Check:
    """A comparison and its result.

    Attributes:
        name: Its subject.
        compared: What is compared with what.
        verdict: ``passed``, ``failed`` or ``not applicable``.
        difference: The measured value: a relative difference, or a count; None if nothing was measured.
        limit: The largest difference that passes.
        found: Where and how it differs, or why the check does not apply; otherwise empty.
        advice: What to check if it failed; empty otherwise, once it has run.
    """

    name: str
    compared: str
    verdict: Verdict = "failed"
    difference: float | None = None
    limit: float | None = None
    found: str = ""
    advice: str = ""

    def about(self, compared: str) -> Check:
        """Return the check with a description of the comparison that depends on the evidence."""
        return replace(self, compared=compared)

    def measured(self, difference: float, limit: float = 0, *, found: str = "") -> Check:
        """Return the check with the measured value; it passes if this does not exceed the limit."""
        check = replace(self, difference=float(difference), limit=limit, found=found)
        return replace(check, verdict="passed", advice="") if difference <= limit else check

    def failed(self, found: str) -> Check:
        """Return the check as failed without a measured value, because there is nothing to compare."""
        return replace(self, found=found)

    def not_applicable(self, reason: str) -> Check:
        """Return the check as not applicable, with the reason."""
        return replace(self, verdict="not applicable", found=reason, advice="")


def nan_as_infinite(difference: float) -> float:
    """Return the difference, or infinity for NaN, so that it compares as the largest."""
    return math.inf if math.isnan(difference) else difference


def named(names: list[str], most: int = 4) -> str:
    """List the first of some names."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


CONFIG_VARIABLE = "PACELINE_PROVE"


@dataclass(frozen=True, kw_only=True)
class RecorderConfig:
    """Settings of a recorder.

    Attributes:
        task: The task that the user's recipe names.
        folder: Where notes are written.
        samples: Training samples to use.
        evaluation_samples: Held-out samples to use.
        kept_steps: Steps, from 0, whose weights and gradients are stored.
        double: Whether the network computes in float64.
    """

    task: str
    folder: str
    samples: int
    evaluation_samples: int
    kept_steps: tuple[int, ...]
    double: bool


@dataclass(kw_only=True)
class MicroBatchNote:
    """One forward and backward pass.

    Attributes:
        step: Its step, from 0.
        logical_rank: Its logical rank.
        ids: Its samples, without those that could not be read.
        contents: Digests of each sample's input and target, for :func:`same_content`.
        phantom: Whether the pass is only there to keep processes in step, and does not count.
        generator: A digest of the state of torch's generator before the loss.
        evaluating: Modules that were in evaluation mode when the network was called.
        broken: Ids of samples that could not be read.
    """

    step: int
    logical_rank: int
    ids: list[int]
    contents: list[str]
    phantom: bool
    generator: str
    evaluating: list[str]
    broken: list[int]


@dataclass(kw_only=True)
class StepNote:
    """One step of the optimizer.

    Attributes:
        rates: Learning rate of each group, and the group's own factor.
        gradient: A digest of the gradient that the optimizer got.
        without_gradient: Trainable parameters without a gradient.
    """

    rates: list[tuple[float, float]]
    gradient: str
    without_gradient: list[str]


@dataclass(kw_only=True)
class ScoreNote:
    """A scoring of a set of weights on this process.

    Attributes:
        position: Optimizer steps taken before.
        weights: ``model`` or ``ema``.
        buffers: A digest of the network's buffers.
        training: Whether the network was in training mode.
        ids: The scored samples.
    """

    position: int
    weights: str
    buffers: str
    training: bool
    ids: list[int] = field(default_factory=list)


@dataclass(kw_only=True)
class Notes:
    """What one process observed of a run; ``final_buffers`` is a digest of the buffers at the end."""

    micro_batches: list[MicroBatchNote] = field(default_factory=list)
    steps: list[StepNote] = field(default_factory=list)
    scores: list[ScoreNote] = field(default_factory=list)
    final_buffers: str = ""

    @classmethod
    def read(cls, path: Path) -> Notes:
        """Read what :meth:`Recorder.finish` wrote."""
        return TypeAdapter(cls).validate_json(path.read_bytes())


@dataclass(frozen=True, kw_only=True)
class ObservedRun:
    """A finished run.

    Attributes:
        name: Its name in messages.
        recipe: Its recipe.
        folder: Folder of its notes, which contains its run directory.
        processes: Number of processes.
        trouble: Why it did not finish; empty if it did.
        batches: The training batches of a run in this process, by step and logical rank.
    """

    name: str
    recipe: Recipe
    folder: Path
    processes: int = 1
    trouble: str = ""
    batches: Mapping[tuple[int, int], Batch] = field(default_factory=dict)

    @property
    def run_dir(self) -> Path:
        """The run directory."""
        return self.folder / "run"

    @cached_property
    def ranks(self) -> list[Notes]:
        """The notes of every process that wrote some, in order."""
        paths = (self.folder / f"rank-{rank}.json" for rank in range(self.processes))
        return [Notes.read(path) for path in paths if path.exists()]

    @cached_property
    def micro_batches(self) -> list[MicroBatchNote]:
        """All batches used for training, over all processes, in the order of steps and logical ranks."""
        found = [each for notes in self.ranks for each in notes.micro_batches if not each.phantom]
        return sorted(found, key=lambda each: (each.step, each.logical_rank))

    def completed(self, step: int) -> bool:
        """Whether a step, from 0, was completed: the run has ended, or is in a later step."""
        return not self.trouble or any(note.step > step for note in self.micro_batches)

    def step(self, number: int) -> tuple[dict[str, Tensor], dict[str, Tensor | None]] | None:
        """Return a step's weights and buffers before it, and the gradients that the optimizer got; None if not kept."""
        path = self.folder / f"step-{number}.pt"
        if not path.exists():
            return None
        state = torch.load(path, weights_only=True)
        return state["weights"], state["gradients"]

    def average(self) -> dict[str, Tensor] | None:
        """Return the moving average as computed by the recorder; None if it computed none."""
        path = self.folder / "average.pt"
        found: dict[str, Tensor] | None = torch.load(path, weights_only=True) if path.exists() else None
        return found

    def saved(self, weights: str) -> dict[str, Tensor]:
        """Return the run's last checkpoint of ``model`` or ``ema``."""
        return dict(read_weights(self.run_dir, weights).state)


def tensors_of(network: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name, including buffers that are not saved."""
    return {**dict(network.named_parameters()), **dict(network.named_buffers())}


def copies_of(network: nn.Module) -> dict[str, Tensor]:
    """Return copies of a network's parameters and buffers, by name."""
    return {name: each.detach().clone() for name, each in tensors_of(network).items()}


def rows_of(batch: Batch, rows: Sequence[int]) -> Batch:
    """Return some of a batch's samples, optionally in another order."""
    inputs, targets = (select_rows(each, rows, size=len(batch.ids)) for each in (batch.inputs, batch.targets))
    return replace(batch, inputs=inputs, targets=targets, ids=batch.ids[list(rows)])


def content_of(tensors: Iterable[Tensor]) -> str:
    """Return digests of a sample's tensors, each [1, ...], for :func:`same_content`: with and without their padding.

    A sample that is shorter than others in its batch is padded to a length that depends on them.
    """
    return ";".join(_content(each[0] if each.ndim > 1 else each) for each in tensors)


def _content(row: Tensor) -> str:
    """Return three digests: of a row; of the row without its trailing equal values; of the latter and that value."""
    unpadded, padding = row, None
    if row.ndim and row.numel():
        padding = row[-1].reshape(-1)[0]
        differ = (row != padding).reshape(len(row), -1).any(dim=1).nonzero()
        unpadded = row[: int(differ[-1]) + 1 if len(differ) else 0]
    kind = f"{row.dtype}{tuple(row.shape[1:])}"
    parts = [(kind, row), (kind, unpadded), (f"{kind}{None if padding is None else padding.item()!r}", unpadded)]
    return ",".join(hashlib.sha256(f"{label} {digest_of([each])}".encode()).hexdigest()[:16] for label, each in parts)


def same_content(a: str, b: str) -> bool:
    """Whether two samples have the same contents apart from padding."""
    parts = [(first.split(","), second.split(",")) for first, second in zip(a.split(";"), b.split(";"), strict=False)]
    return a.count(";") == b.count(";") and all(
        first[0] in second[:2] or second[0] in first[:2] or first[2:] == second[2:] for first, second in parts
    )


def digest_of(tensors: Iterable[Tensor]) -> str:
    """Return a hash of the bytes of tensors."""
    total = hashlib.sha256()
    for each in tensors:
        total.update(each.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()
