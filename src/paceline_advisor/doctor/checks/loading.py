"""Do batches come as fast as they could: loader processes, pinned memory, what stays between epochs?"""

from __future__ import annotations

from collections.abc import Iterator

from paceline_advisor.doctor.findings import Advice, Finding
from paceline_advisor.doctor.loaders import Loader
from paceline_advisor.doctor.sources import CONVNETS, OWN, TUNING
from paceline_advisor.doctor.subject import Subject


def no_workers(subject: Subject) -> Iterator[Finding]:
    """Samples are read by the process that trains, although other cores could."""
    cores = subject.target.machine.cores
    data = subject.plan.data
    alone = [each for each in subject.loaders if each.workers == 0]
    reads_itself = data.get("backend") == "pytorch" and data.get("workers") == 0
    if cores < 2 or not (alone or reads_itself):
        return
    overrides = {"data.workers": "auto"} if reads_itself else {}
    said = "data.workers=0" if reads_itself else "num_workers=0 in a DataLoader of your own"
    yield Finding(
        name="no_workers",
        severity="slows",
        evidence=f"{said}, and {subject.target.cores}",
        why="Each step waits while its own process reads, decodes and varies the images.",
        source=TUNING,
        advice=Advice(words="data.workers=auto" if reads_itself else "num_workers of one or more", overrides=overrides),
        expected="as much as the time that steps wait for data, up to all of it",
        speedup=(1.0, 3.0),
        places=tuple(each.place for each in alone),
    )


def too_many_workers(subject: Subject) -> Iterator[Finding]:
    """More loader processes than cores."""
    cores, asked = subject.target.machine.cores, subject.recipe.data.workers
    used = subject.plan.data.get("workers")
    if asked == "auto" or subject.plan.data.get("backend") != "pytorch" or not isinstance(used, int):
        return
    if used <= max(2, cores):
        return
    yield Finding(
        name="too_many_workers",
        severity="slows",
        evidence=f"data.workers={used} loader processes for each rank, and {subject.target.cores}",
        why="Processes that share a core do not read faster together, and each holds batches in memory.",
        source=TUNING,
        advice=Advice(words="data.workers=auto", overrides={"data.workers": "auto"}),
        expected="little on a GPU; on a CPU, the time they take from training",
        speedup=(1.0, 1.1),
    )


def unpinned(subject: Subject) -> Iterator[Finding]:
    """Batches of a loader of one's own are copied to the GPU from pageable memory."""
    found = [each for each in subject.loaders if not each.pinned]
    if not found or not subject.target.is_gpu:
        return
    yield Finding(
        name="unpinned",
        severity="slows",
        evidence=f"pin_memory=False in {_loaders(found)}",
        why="A copy from pageable memory goes through a buffer of the driver's, and the host waits for it.",
        source=f"{TUNING}; {CONVNETS}",
        advice=Advice(words="pin_memory=True, and .to(device, non_blocking=True)"),
        expected="the copy of a batch, about twice as fast and beside the computation",
        speedup=(1.0, 1.2),
        places=tuple(each.place for each in found),
    )


def no_persistent_workers(subject: Subject) -> Iterator[Finding]:
    """Loader processes of one's own are started anew in each epoch."""
    found = [each for each in subject.loaders if each.workers > 0 and not each.persistent]
    if not found:
        return
    yield Finding(
        name="no_persistent_workers",
        severity="slows",
        evidence=f"persistent_workers=False in {_loaders(found)}, "
        f"{found[0].workers} process{'es' * (found[0].workers > 1)}",
        why="At the beginning of each epoch the processes start again, and the first batches are waited for.",
        source=CONVNETS,
        advice=Advice(words="persistent_workers=True"),
        expected="for each epoch about 2 s where processes are spawned (macOS), under 0.1 s where forked (Linux)",
        speedup=(1.0, 1.1),
        places=tuple(each.place for each in found),
    )


def drop_last(subject: Subject) -> Iterator[Finding]:
    """A loader of one's own leaves samples out."""
    found = [each for each in subject.loaders if each.drops_last]
    if not found:
        return
    yield Finding(
        name="drop_last",
        severity="spoils",
        evidence=f"drop_last=True in {_loaders(found)}",
        why="What does not fill a batch is not trained on in that epoch; but each sample counts once.",
        source=OWN,
        advice=Advice(
            words="drop_last=False: Paceline takes an epoch's rest as a smaller step, on all processes alike",
            keeps="training",
        ),
        expected="each sample once per epoch",
        places=tuple(each.place for each in found),
    )


def _loaders(found: list[Loader]) -> str:
    return "a DataLoader of your own" if len(found) == 1 else f"{len(found)} DataLoaders of your own"
