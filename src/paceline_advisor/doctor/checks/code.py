"""Checks of the user's code: what makes the device wait, and how samples are loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from paceline_advisor.doctor.behaviour import Loader
from paceline_advisor.doctor.findings import CONVNETS, CUDA_MODES, OWN, TUNING, Advice, Finding, Place
from paceline_advisor.doctor.subject import Subject, named

_MANY_IN_A_ROW = 4
_SLOW_VARIABLES = {
    "CUDA_LAUNCH_BLOCKING": ("1", "the host waits for every kernel"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("1", "every tensor asks the driver for memory, which waits for the device"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "every collective is checked by another one"),
}
_AIDS = {
    "anomaly": (
        "anomaly_mode",
        "autograd's anomaly detection is on",
        "Every operation keeps its Python stack, and every gradient is searched for NaN, for which the host waits.",
        "1.5 to 10 times as fast",
        (2.0, 5.0),
    ),
    "profiler": (
        "profiler_on",
        "a profiler of torch's is on in every step",
        "Every operation is recorded. Paceline profiles a few steps where telemetry.profile asks for them.",
        "1.1 to 2 times as fast",
        (1.1, 2.0),
    ),
    "gradcheck": (
        "gradcheck_on",
        "torch.autograd.gradcheck is called in the step",
        "It computes a gradient for each input number by itself: a test, not a part of training.",
        "many times as fast",
        (5.0, 100.0),
    ),
}


def synchronisation(subject: Subject) -> Iterator[Finding]:
    """Values of the device that the host asks for in each step."""
    reads = subject.behaviour.calls.reads
    if not reads:
        return
    here = "" if subject.target.is_gpu else " On a CPU it costs little; on a GPU each one empties its queue."
    yield Finding(
        name="synchronisation",
        severity="slows" if subject.target.is_gpu else "notice",
        evidence=f"{_times(reads)} in a micro-batch the host asks for a value of the device: {_first(reads)}",
        why=f"The host waits until the device has computed it, and meanwhile prepares nothing.{here}",
        source=TUNING,
        advice=Advice(
            words="keep it a tensor: sum it up on the device, let `score` report it, mask with torch.where, and read "
            "it where a log record is due"
        ),
        expected="1.05 to 2 times as fast on a GPU, most for small networks",
        speedup=(1.05, 2.0) if subject.target.is_gpu else (1.0, 1.02),
        places=_places(reads),
    )


def host_tensors(subject: Subject) -> Iterator[Finding]:
    """Tensors that are made on the host in each step."""
    made = subject.behaviour.calls.made
    if not made:
        return
    here = "" if subject.target.is_gpu else " On a CPU it costs nothing; the same code on a GPU copies, or stops."
    yield Finding(
        name="host_tensors",
        severity="slows" if subject.target.is_gpu else "notice",
        evidence=f"{_times(made)} in a micro-batch a tensor is made on the host: {_first(made)}",
        why=f"It must be copied to the device, for which the host waits.{here}",
        source=TUNING,
        advice=Advice(
            words="make it where it is used: torch.zeros(n, device=x.device), torch.zeros_like(x), or once, "
            "as a buffer (register_buffer)"
        ),
        expected="1.02 to 1.5 times as fast on a GPU",
        speedup=(1.02, 1.5) if subject.target.is_gpu else (1.0, 1.01),
        places=_places(made),
    )


def debugging(subject: Subject) -> Iterator[Finding]:
    """Debugging aids that were left on."""
    for kind, place in subject.behaviour.calls.debugging.items():
        name, evidence, why, expected, speedup = _AIDS[kind]
        yield Finding(
            name=name,
            severity="slows",
            evidence=evidence + (f", set at {place}" if place is not None and kind == "anomaly" else ""),
            why=why,
            source=TUNING,
            advice=Advice(words="take it out of what is trained with"),
            expected=expected,
            speedup=speedup,
            places=() if place is None else (place,),
        )


def debug_environment(subject: Subject) -> Iterator[Finding]:
    """Environment variables for debugging."""
    for name, (slow, why) in _SLOW_VARIABLES.items():
        if subject.environment.get(name, "").upper() != slow or not subject.target.is_gpu:
            continue
        yield Finding(
            name="debug_environment",
            severity="slows",
            evidence=f"{name}={subject.environment[name]} is set",
            why=f"With it, {why}.",
            source=CUDA_MODES,
            advice=Advice(words=f"unset {name}"),
            expected="1.1 to 3 times as fast",
            speedup=(1.1, 3.0),
        )


def pointwise(subject: Subject) -> Iterator[Finding]:
    """Rows of operations on single numbers, each of which goes through memory."""
    if not subject.target.is_gpu or subject.recipe.model.compile:
        return
    compiles = "model.compile" not in subject.plan.unused
    rows = {key: length for key, length in subject.behaviour.calls.pointwise.items() if length >= _MANY_IN_A_ROW}
    if not rows:
        return
    places = [
        Place(file, line, f"{length} operations in a row, {function}")
        for (file, line, function), length in rows.items()
    ]
    yield Finding(
        name="unfused_pointwise",
        severity="slows",
        evidence=f"{named([str(place) for place in places], 2)}",
        why="Each operation reads and writes the whole tensor; fused, they do so once.",
        source=TUNING,
        advice=Advice(
            words=f"{'model.compile=true, or ' * compiles}one of torch's own functions (F.gelu and its like)",
            overrides={"model.compile": True} if compiles else {},
            keeps="rounding",
        ),
        expected="these operations 2 to 4 times as fast",
        speedup=(1.02, 1.5),
        places=tuple(places),
    )


def gradient_in_evaluation(subject: Subject) -> Iterator[Finding]:
    """Scores that keep a graph."""
    if not subject.behaviour.has_gradient_in_evaluation:
        return
    yield Finding(
        name="gradient_in_evaluation",
        severity="slows",
        evidence="what `score` returns has a gradient, although the trainer calls it without",
        why="Something turns gradients on (torch.enable_grad): every activation is kept, for nothing.",
        source=TUNING,
        advice=Advice(words="take torch.enable_grad out of `score` and of the network's evaluation"),
        expected="evaluation up to 1.5 times as fast, in a fraction of the memory",
        speedup=(1.0, 1.1),
    )


def _times(counted: Counter[tuple[str, int, str]]) -> str:
    total = sum(counted.values())
    return "once" if total == 1 else "twice" if total == 2 else f"{total} times"


def _first(counted: Counter[tuple[str, int, str]]) -> str:
    return named([str(place) for place in _places(counted)], 3)


def _places(counted: Counter[tuple[str, int, str]]) -> tuple[Place, ...]:
    return tuple(Place(file, line, what, count) for (file, line, what), count in counted.most_common())


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
