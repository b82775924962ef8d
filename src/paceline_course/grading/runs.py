"""What did the ranks of a run do? Read from what was written down about them, and what they wrote themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.plain_json import load_json
from paceline_course.assignment import TRAINING_SAMPLES

Vector = NDArray[np.float32]


@dataclass(frozen=True)
class Step:
    """One optimizer step of one rank, as it was about to be made.

    Attributes:
        samples: Trained on since the step before; -1 for a row that is in no set, -2 - v for sample v of the validation
            set.
        learning_rate: Of the optimizer's first group.
        weights: All weights before the step, flat.
        gradients: All gradients, flat.
        seconds: When, on a clock that all ranks share.
        optimizer: Its name and settings, as one would write them.
    """

    samples: tuple[int, ...]
    learning_rate: float
    weights: Vector
    gradients: Vector
    seconds: float = 0.0
    optimizer: str = ""


@dataclass(frozen=True)
class Validation:
    """Samples of the validation set that went through the network of one rank.

    Attributes:
        step: Steps made before.
        samples: Numbers in the validation set.
        training: Whether the network was in training mode.
        statistics: Means and variances of BatchNorm, flat.
        unknown: Rows that were in no set.
    """

    step: int
    samples: tuple[int, ...]
    training: bool
    statistics: Vector
    unknown: int = 0


@dataclass(frozen=True)
class End:
    """How the program ended on one rank, unless it was killed.

    Attributes:
        code: Its exit code.
        message: Of the exception that ended it; empty if none did.
        has_process_group: Whether there still was a process group.
        weights: What the network held, flat; None if none was built.
    """

    code: int
    message: str
    has_process_group: bool
    weights: Vector | None


@dataclass(frozen=True)
class Rank:
    """All that one rank did."""

    steps: tuple[Step, ...] = ()
    validations: tuple[Validation, ...] = ()
    end: End | None = None
    written: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()


@dataclass(frozen=True)
class Run:
    """All that is known of one run.

    Attributes:
        ranks: In order.
        epochs: Asked for.
        batch: Samples of a step, over all ranks, asked for.
        exit_codes: Of each rank; negative for a signal.
        ended_for: Why it had to be ended; empty if it ended by itself.
        log: What it wrote, a record for each epoch.
        weights: What it saved, by name.
        last_words: The last line of its output.
    """

    ranks: tuple[Rank, ...]
    epochs: int
    batch: int
    exit_codes: tuple[int, ...] = ()
    ended_for: str = ""
    log: tuple[Mapping[str, Any], ...] = ()
    weights: Mapping[str, Vector] = field(default_factory=dict)
    last_words: str = ""

    @property
    def processes(self) -> int:
        """World size."""
        return len(self.ranks)

    @property
    def is_complete(self) -> bool:
        """Whether all ranks ended by themselves, with whatever exit code, after equally many steps, at least one."""
        counts = {len(rank.steps) for rank in self.ranks}
        has_ended = all(rank.end is not None for rank in self.ranks) and not self.ended_for
        has_raised = any(rank.end.message for rank in self.ranks if rank.end is not None)
        return has_ended and not has_raised and len(counts) == 1 and 0 not in counts

    @property
    def steps(self) -> int:
        """Steps that every rank made."""
        return min(len(rank.steps) for rank in self.ranks)

    @property
    def steps_in_epoch(self) -> int:
        """Steps of one epoch: as many as it takes, unless the epochs that were made are equally long."""
        whole, over = divmod(self.steps, self.epochs)
        return -(-TRAINING_SAMPLES // self.batch) if over or not whole else whole

    def epoch_steps(self, epoch: int) -> range:
        """Return the steps of an epoch, both from 0; the last takes what is over, and there may be none."""
        begin = min(epoch * self.steps_in_epoch, self.steps)
        is_last = epoch == self.epochs - 1
        return range(begin, self.steps if is_last else min(begin + self.steps_in_epoch, self.steps))


def read_run(folder: Path, output: Path, *, epochs: int, batch: int, **outcome: Any) -> Run:
    """Read what was noted in a folder and what a program wrote in its output directory."""
    exit_codes = tuple(outcome["exit_codes"])
    return Run(
        ranks=tuple(_read_rank(folder, rank) for rank in range(len(exit_codes))),
        epochs=epochs,
        batch=batch,
        exit_codes=exit_codes,
        ended_for=outcome["ended_for"],
        log=_read_log(output / "log.jsonl"),
        weights=_read_weights(output / "weights.safetensors"),
        last_words=_last_line(output.parent / "output.txt"),
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
        Validation(e["step"], tuple(e["samples"]), e["training"], vector(e["statistics"]), e["unknown"])
        for e in of("validate")
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
    # The last one may be half written, where a run was killed.
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
