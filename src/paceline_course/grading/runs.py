"""Records of graded runs, the values they should have computed, and findings of criteria."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from paceline.parsing.plain_text import load_json
from paceline_course.assignment import TRAINING_SAMPLES, build_model, training_set, validation_set

Vector = NDArray[np.float32]


@dataclass(frozen=True)
class Step:
    """One optimizer step of one rank, recorded just before the update.

    Attributes:
        samples: Samples used since the previous step: -1 for an unknown row, -2 - v for sample v of the validation set.
        learning_rate: Learning rate of the optimizer's first group.
        weights: All weights before the step, flat.
        gradients: All gradients, flat.
        seconds: Time of the step, on a clock that all ranks share.
        optimizer: Name and settings of the optimizer, such as ``SGD(momentum=0.9)``.
    """

    samples: tuple[int, ...]
    learning_rate: float
    weights: Vector
    gradients: Vector
    seconds: float = 0.0
    optimizer: str = ""


@dataclass(frozen=True)
class Validation:
    """A forward pass of one rank on validation samples.

    Attributes:
        step: Number of optimizer steps before it.
        samples: Indices in the validation set.
        training: Whether the network was in training mode.
        statistics: Means and variances of BatchNorm, flat.
    """

    step: int
    samples: tuple[int, ...]
    training: bool
    statistics: Vector


@dataclass(frozen=True)
class End:
    """How the program ended on one rank, unless it was killed.

    Attributes:
        code: Exit code.
        message: Message of the exception that ended it; empty if none did.
        has_process_group: Whether the process group still existed.
        weights: The network's weights, flat; None if no network was built.
    """

    code: int
    message: str
    has_process_group: bool
    weights: Vector | None


@dataclass(frozen=True)
class Rank:
    """The record of one rank."""

    steps: tuple[Step, ...] = ()
    validations: tuple[Validation, ...] = ()
    end: End | None = None
    written: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()

    @property
    def final_weights(self) -> Vector | None:
        """The network's weights at the end, flat; None if the rank was killed or built no network."""
        return None if self.end is None else self.end.weights


@dataclass(frozen=True)
class ProgramRun:
    """The record of one run.

    Attributes:
        ranks: The ranks, in order.
        epochs: Requested number of epochs.
        batch: Requested global batch size.
        exit_codes: Exit code of each rank; negative after a signal.
        ended_for: Limit for which it was ended; empty if it ended by itself.
        log: Records of its log, one for each epoch.
        weights: Saved weights, by name.
        last_line: The last line of its output.
    """

    ranks: tuple[Rank, ...]
    epochs: int
    batch: int
    exit_codes: tuple[int, ...] = ()
    ended_for: str = ""
    log: tuple[Mapping[str, Any], ...] = ()
    weights: Mapping[str, Vector] = field(default_factory=dict)
    last_line: str = ""

    @property
    def processes(self) -> int:
        """World size."""
        return len(self.ranks)

    @property
    def is_complete(self) -> bool:
        """Whether all ranks ended by themselves, without an exception, after the same number of steps, at least one."""
        counts = {len(rank.steps) for rank in self.ranks}
        has_ended = all(rank.end is not None for rank in self.ranks) and not self.ended_for
        has_raised = any(rank.end.message for rank in self.ranks if rank.end is not None)
        return has_ended and not has_raised and len(counts) == 1 and 0 not in counts

    @property
    def steps(self) -> int:
        """Number of steps that every rank made."""
        return min(len(rank.steps) for rank in self.ranks)

    @property
    def steps_in_epoch(self) -> int:
        """Steps per epoch: the steps made divided by the epochs if that is whole, else the expected number."""
        whole, over = divmod(self.steps, self.epochs)
        return -(-TRAINING_SAMPLES // self.batch) if over or not whole else whole

    def epoch_steps(self, epoch: int) -> range:
        """Return the steps of an epoch, both counted from 0; the last epoch has all remaining steps."""
        begin = min(epoch * self.steps_in_epoch, self.steps)
        is_last = epoch == self.epochs - 1
        return range(begin, self.steps if is_last else min(begin + self.steps_in_epoch, self.steps))


def read_run(folder: Path, output: Path, *, epochs: int, batch: int, **outcome: Any) -> ProgramRun:
    """Read the recorded events in a folder, and the files in the program's output directory."""
    exit_codes = tuple(outcome["exit_codes"])
    return ProgramRun(
        ranks=tuple(_read_rank(folder, rank) for rank in range(len(exit_codes))),
        epochs=epochs,
        batch=batch,
        exit_codes=exit_codes,
        ended_for=outcome["ended_for"],
        log=_read_log(output / "log.jsonl"),
        weights=_read_weights(output / "weights.safetensors"),
        last_line=_last_line(output.parent / "output.txt"),
    )


def _read_rank(folder: Path, rank: int) -> Rank:
    events = _events(folder / f"rank-{rank}.jsonl")
    path = folder / f"rank-{rank}.bin"
    content = path.read_bytes() if path.exists() else b""

    def vector(place: list[int]) -> Vector:
        return np.frombuffer(content, np.float32, count=place[1] // 4, offset=place[0])

    def of(kind: str) -> list[dict[str, Any]]:
        return [event for event in events if event["event"] == kind]

    steps = [
        Step(
            samples=tuple(e["samples"]),
            learning_rate=e["learning_rate"],
            weights=vector(e["weights"]),
            gradients=vector(e["gradients"]),
            seconds=e["seconds"],
            optimizer=e["optimizer"],
        )
        for e in of("step")
    ]
    validations = [
        Validation(e["step"], tuple(e["samples"]), e["training"], vector(e["statistics"])) for e in of("validate")
    ]
    ends = [
        End(e["code"], e["message"], e["has_process_group"], vector(e["weights"]) if e["weights"] else None)
        for e in of("end")
    ]
    return Rank(
        steps=tuple(steps),
        validations=tuple(validations),
        end=ends[-1] if ends else None,
        written=tuple(dict.fromkeys(e["path"] for e in of("wrote"))),
        refused=tuple(dict.fromkeys(e["path"] for e in of("refused"))),
    )


def _events(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text().splitlines() if path.exists() else []
    # The last line may be incomplete if the run was killed.
    return [load_json(line) for line in lines if line.endswith("}")]


def _read_log(path: Path) -> tuple[Mapping[str, Any], ...]:
    try:
        records = [load_json(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError):
        return ()
    return tuple(record for record in records if isinstance(record, dict))


def _read_weights(path: Path) -> Mapping[str, Vector]:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        return {name: np.asarray(value) for name, value in load_file(path).items()}
    except (OSError, SafetensorError, KeyError, TypeError):
        return {}


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").split("\n") if path.exists() else []
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")


class NotObservedError(Exception):
    """A criterion cannot be checked; the message says why, as the part of a sentence after a colon."""


@dataclass(frozen=True)
class CriterionResult:
    """Result of one criterion.

    Attributes:
        reason: Why points are lost; empty if none are.
        note: Information for the student that costs no points.
        seen: The values on which the decision is based.
    """

    reason: str = ""
    note: str = ""
    seen: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Runs:
    """The runs of one grading, without those that were skipped.

    Attributes:
        by_name: ``one``, ``two``, ``three`` (numbers of processes), ``batchnorm``, ``killed``, ``resumed`` (killed
            while saving), ``again``, ``pace-before`` and ``pace-after`` (the bare loop).
    """

    by_name: Mapping[str, ProgramRun]

    def get(self, name: str) -> ProgramRun | None:
        """Return a run, complete or not; None if it was skipped."""
        return self.by_name.get(name)

    def complete(self, *names: str) -> dict[str, ProgramRun]:
        """Return those of the named runs that are complete."""
        found = {name: self.by_name[name] for name in names if name in self.by_name}
        return {name: run for name, run in found.items() if run.is_complete}


P = ParamSpec("P")


def on_several(
    check: Callable[Concatenate[ProgramRun, P], CriterionResult],
) -> Callable[Concatenate[Runs, P], CriterionResult]:
    """Apply a check to the runs with 2 and 3 processes, and return the first finding with a reason."""

    @functools.wraps(check)
    def found(runs: Runs, /, *args: P.args, **kwargs: P.kwargs) -> CriterionResult:
        complete = runs.complete("two", "three")
        if not complete:
            return CriterionResult("This could not be checked: no run with 2 or 3 processes finished training.")
        findings = [check(run, *args, **kwargs) for run in complete.values()]
        return next((finding for finding in findings if finding.reason), findings[0])

    return found


def listing(values: Sequence[Any], most: int = 4) -> str:
    """Format values for a sentence: ``3, 5, 8, 9, … (12 in all)``."""
    text = ", ".join(str(value) for value in values[:most])
    return text if len(values) <= most else f"{text}, … ({len(values)} in all)"


def with_processes(run: ProgramRun) -> str:
    """Return ``with 1 process``, ``with 2 processes`` and so on."""
    return f"with {run.processes} process{'' if run.processes == 1 else 'es'}"


Shares = Sequence[tuple[Vector, Sequence[int]]]


def mean_loss_and_gradient(shares: Shares) -> tuple[float, Vector]:
    """Return the mean loss over all samples of a global batch, and its gradient, for the network ``plain``.

    Args:
        shares: For each rank, its weights (flat) and its samples of the training set.

    Raises:
        ValueError: If there are no samples.
        NotObservedError: If the weights are those of another network.
    """
    count = sum(len(samples) for _, samples in shares)
    if count == 0:
        raise ValueError("a global batch without samples has no mean")
    images, labels = training_set().tensors
    network = _network(len(shares[0][0]))
    total_loss, total_gradient = 0.0, np.zeros(len(shares[0][0]), dtype=np.float64)
    for weights, samples in shares:
        network.zero_grad()
        vector_to_parameters(torch.from_numpy(weights.copy()), network.parameters())
        index = torch.tensor(list(samples), dtype=torch.long)
        loss = cross_entropy(network(images[index]), labels[index], reduction="sum")
        torch.autograd.backward(loss)
        total_loss += loss.item()
        total_gradient += parameters_to_vector([w.grad for w in network.parameters() if w.grad is not None]).numpy()
    return total_loss / count, (total_gradient / count).astype(np.float32)


def step_shares(run: ProgramRun, step: int) -> list[tuple[Vector, list[int]]]:
    """Return the weights and the training samples of each rank at a step."""
    return [
        (rank.steps[step].weights, [sample for sample in rank.steps[step].samples if sample >= 0]) for rank in run.ranks
    ]


def accuracy_of_vector(weights: Vector) -> float:
    """Return the validation accuracy, in percent, of the network ``plain`` with these weights."""
    network = _network(len(weights))
    vector_to_parameters(torch.from_numpy(weights.copy()), network.parameters())
    return _accuracy(network)


def accuracy_of_state(state: Mapping[str, Vector]) -> float | None:
    """Return the validation accuracy, in percent, of saved weights; None if they fit neither network."""
    network = build_model("batchnorm" if any("running_mean" in name for name in state) else "plain")
    try:
        network.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in state.items()})
    except RuntimeError:
        return None
    return _accuracy(network)


def flat_state(state: Mapping[str, Vector]) -> Vector | None:
    """Return saved weights as one vector, in the order of the network's parameters; None if they do not fit it."""
    network = build_model("batchnorm" if any("running_mean" in name for name in state) else "plain")
    names = [name for name, _ in network.named_parameters()]
    if any(name not in state for name in names):
        return None
    return np.concatenate([np.asarray(state[name], dtype=np.float32).reshape(-1) for name in names])


def _network(weights: int) -> nn.Module:
    network = build_model("plain")
    expected = sum(parameter.numel() for parameter in network.parameters())
    if expected != weights:
        raise NotObservedError(f"the trained network has {weights} weights; the assignment's has {expected}")
    return network


@torch.no_grad()
def _accuracy(network: nn.Module) -> float:
    images, labels = validation_set().tensors
    network.eval()
    return 100 * float((network(images).argmax(dim=1) == labels).double().mean())
