"""What the processes of one run told, read from their files."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Ids = tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class Read:
    """A sample that the training data set returned.

    Attributes:
        id: Its id.
        rank: The rank.
        pid: The process, of a rank or of its loader.
        digest: Of what was returned.
        draws: By generator, digests of its state before and after; only of those that changed.
        t: When, in nanoseconds of the machine's monotonic clock.
    """

    id: Any
    rank: int
    pid: int
    digest: str
    draws: dict[str, str]
    t: int


@dataclass(kw_only=True)
class Trace:
    """The samples and numbers of one run.

    Attributes:
        samples: Size of the training data set; None if it is iterable.
        used: Batches that each rank reported as trained on, in order.
        reads: Samples that each rank's own process read, in order, one per batch.
        has_workers: Whether loader processes read samples.
        saves: For each checkpoint that appeared, how many batches rank 0 had used and samples it had read.
        save_times: When rank 0 last wrote before each was saved; others may read on before it sees the checkpoint.
        held_out: Size of the evaluation data set; likewise.
        scored: How often each sample was counted by evaluations.
        scored_reads: How often each sample was read for evaluations.
        values: Reported numbers, by name and step.
        training_reads: All samples read for training, in the order of time.
    """

    samples: int | None = None
    used: dict[int, list[Ids]] = field(default_factory=lambda: defaultdict(list))
    reads: dict[int, list[Ids]] = field(default_factory=lambda: defaultdict(list))
    has_workers: bool = False
    saves: list[dict[str, int]] = field(default_factory=list)
    save_times: list[int] = field(default_factory=list)
    held_out: int | None = None
    scored: Counter[Any] = field(default_factory=Counter)
    scored_reads: Counter[Any] = field(default_factory=Counter)
    values: dict[str, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    training_reads: list[Read] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """What counts as trained on: ``used`` batches if the program reports them, else ``read`` samples."""
        return "used" if self.used else "read"

    @property
    def units(self) -> dict[int, list[Ids]]:
        """Batches used, or samples read, of each rank in order."""
        return self.used or self.reads


def stopped_process(folder: Path) -> int | None:
    """Return the process that has reached the place where it had to stop; None before."""
    files = (file for file in folder.glob("0-*.jsonl") if b'"e": "stop"' in file.read_bytes())
    return next((int(file.stem.split("-")[1]) for file in files), None)


def read_trace(folder: Path) -> Trace:
    """Read the files of a run; a line that a kill cut short is left out."""
    trace = Trace()
    for file in sorted(folder.glob("*.jsonl")):
        rank, pid = map(int, file.stem.split("-"))
        counts = {"used": 0, "read": 0, "t": 0}
        for line in file.read_text(encoding="utf-8").splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            _add(trace, entry, rank, pid, counts)
            counts["t"] = entry["t"]
    trace.training_reads.sort(key=lambda read: read.t)
    return trace


def _add(trace: Trace, entry: dict[str, Any], rank: int, pid: int, counts: dict[str, int]) -> None:
    kind, is_training = entry["e"], entry.get("role") == "train"
    if kind == "data":
        setattr(trace, "samples" if is_training else "held_out", entry["samples"])
    elif kind == "value" and rank == 0:
        trace.values[entry["name"]][entry["step"]] = entry["number"]
    elif kind == "saved" and rank == 0:
        trace.saves.append(dict(counts))
        trace.save_times.append(counts["t"])
    elif kind == "used":
        counts["used"] += is_training
        if is_training:
            trace.used[rank].append(tuple(entry["ids"]))
        else:
            trace.scored.update(entry["ids"])
    elif kind == "read" and not is_training:
        trace.scored_reads.update(entry["ids"])
    elif kind == "read":
        (name,) = entry["ids"]
        trace.training_reads.append(
            Read(id=name, rank=rank, pid=pid, digest=entry["digest"], draws=entry["draws"], t=entry["t"])
        )
        trace.has_workers |= entry["worker"]
        if not entry["worker"]:
            counts["read"] += 1
            trace.reads[rank].append((name,))
