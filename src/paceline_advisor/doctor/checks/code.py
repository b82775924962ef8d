"""Checks of the user's code: host-device synchronisation, and how samples are loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from paceline_advisor import named
from paceline_advisor.doctor.behaviour import Loader
from paceline_advisor.doctor.checked_run import CheckedRun, CheckResult, Found, check
from paceline_advisor.doctor.findings import CONVNETS, CUDA_MODES, OWN, TUNING, CodeLine


@check(advice="remove it from the training code")
def debugging(subject: CheckedRun) -> Iterator[CheckResult]:
    """Debugging aids that are enabled in training."""
    for kind, place in subject.calls.debugging.items():
        aid = _AIDS[kind]
        where = f", set at {place}" if place is not None and kind == "anomaly" else ""
        yield CheckResult(**{**aid, "evidence": f"{aid['evidence']}{where}"}, places=() if place is None else (place,))


_AIDS: dict[str, dict[str, Any]] = {
    "anomaly": {
        "name": "anomaly_mode",
        "evidence": "autograd's anomaly detection is on",
        "why": "Every operation keeps its Python stack, and every gradient is checked for NaN, which makes the host "
        "wait.",
        "expected": "1.5 to 10 times as fast",
        "speedup": (2.0, 5.0),
    },
    "profiler": {
        "name": "profiler_on",
        "evidence": "a torch profiler is on in every step",
        "why": "Every operation is recorded. Paceline profiles a few steps if telemetry.profile asks for them.",
        "expected": "1.1 to 2 times as fast",
        "speedup": (1.1, 2.0),
    },
}


@check(
    why="The host waits until the device has computed it, and prepares nothing meanwhile.",
    advice="keep it a tensor: sum it up on the device, let `score` report it, mask with torch.where, and read it where "
    "a log record is due",
    expected="1.05 to 2 times as fast on a GPU, most for small networks",
    speedup=(1.05, 2.0),
)
def synchronisation(subject: CheckedRun) -> Found:
    """Values that the host reads from the device in each step."""
    on_cpu = (" On a CPU it costs little; on a GPU each one empties its queue.", (1.0, 1.02))
    return _counted(subject, "the host reads a value from the device", subject.calls.reads, *on_cpu)


@check(
    why="It must be copied to the device, which makes the host wait.",
    advice="create it where it is used: torch.zeros(n, device=x.device), torch.zeros_like(x), or once, as a buffer "
    "(register_buffer)",
    expected="1.02 to 1.5 times as fast on a GPU",
    speedup=(1.02, 1.5),
)
def host_tensors(subject: CheckedRun) -> Found:
    """Tensors created on the host in each step."""
    on_cpu = (" On a CPU it costs nothing; the same code on a GPU copies, or stops.", (1.0, 1.01))
    return _counted(subject, "a tensor is created on the host", subject.calls.made, *on_cpu)


def _counted(
    subject: CheckedRun,
    action: str,
    counts: Counter[tuple[str, int, str]],
    why_on_cpu: str,
    on_cpu: tuple[float, float],
) -> Found:
    """Return how often calls were observed and where, the most frequent first; on a CPU only as a notice."""
    if not counts:
        return None
    places = tuple(CodeLine(file, line, kind, count) for (file, line, kind), count in counts.most_common())
    total = sum(counts.values())
    times = {1: "once", 2: "twice"}.get(total, f"{total} times")
    found = CheckResult(
        f"{times} in a micro-batch {action}: {named([str(place) for place in places], 3)}", places=places
    )
    return found if subject.target.is_gpu else found.updated(severity="notice", more_why=why_on_cpu, speedup=on_cpu)


_SLOW_VARIABLES = {
    "CUDA_LAUNCH_BLOCKING": ("1", "the host waits for every kernel"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("1", "every tensor asks the driver for memory, which waits for the device"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "every collective is checked by a second one"),
}


@check(source=CUDA_MODES, expected="1.1 to 3 times as fast", speedup=(1.1, 3.0))
def debug_environment(subject: CheckedRun) -> Iterator[CheckResult]:
    """Environment variables for debugging."""
    for name, (slow, why) in _SLOW_VARIABLES.items():
        value = subject.environment.get(name, "")
        if value.upper() == slow and subject.target.is_gpu:
            yield CheckResult(f"{name}={value} is set", why=f"With it, {why}.", advice=f"unset {name}")


@check(
    why="Something turns gradients on (torch.enable_grad): every activation is kept without need.",
    advice="remove torch.enable_grad from `score` and of the network's evaluation",
    expected="evaluation up to 1.5 times as fast, in a fraction of the memory",
    speedup=(1.0, 1.1),
)
def gradient_in_evaluation(subject: CheckedRun) -> Found:
    """Scores that keep an autograd graph."""
    if not subject.calls.has_gradient_in_evaluation:
        return None
    return CheckResult("what `score` returns has a gradient, although the trainer disables gradients")


@check(
    why="Each step waits while its process reads, decodes and augments the images.",
    advice="num_workers of one or more",
    expected="as much as the time that steps wait for data, up to all of it",
    speedup=(1.0, 3.0),
)
def no_workers(subject: CheckedRun) -> Found:
    """Samples are read by the training process, although other cores are free."""
    data, alone = subject.plan.data, [each for each in subject.loaders if each.workers == 0]
    reads_itself = data.get("backend") == "pytorch" and data.get("workers") == 0
    if subject.target.machine.cores < 2 or not (alone or reads_itself):
        return None
    setting = "data.workers=0" if reads_itself else "num_workers=0 in your own DataLoader"
    found = CheckResult(f"{setting}, and {subject.target.cores}", places=tuple(each.place for each in alone))
    return found.updated(advice="data.workers=auto", overrides={"data.workers": "auto"}) if reads_itself else found


@check(
    why="A copy from pageable memory goes through a driver buffer, and the host waits for it.",
    source=f"{TUNING}; {CONVNETS}",
    advice="pin_memory=True, and .to(device, non_blocking=True)",
    expected="the copy of a batch, about twice as fast and during the computation",
    speedup=(1.0, 1.2),
)
def unpinned(subject: CheckedRun) -> Found:
    """Batches of your own loader are copied to the GPU from pageable memory."""
    found = [each for each in subject.loaders if not each.pinned]
    return _of_loaders("pin_memory=False", found) if subject.target.is_gpu else None


@check(
    why="At the start of each epoch the processes start again, and the run waits for the first batches.",
    source=CONVNETS,
    advice="persistent_workers=True",
    expected="for each epoch about 2 s where processes are spawned (macOS), under 0.1 s where forked (Linux)",
    speedup=(1.0, 1.1),
)
def no_persistent_workers(subject: CheckedRun) -> Found:
    """Your own loader's processes are restarted in each epoch."""
    found = [each for each in subject.loaders if each.workers > 0 and not each.persistent]
    count = found[0].workers if found else 0
    return _of_loaders("persistent_workers=False", found, f", {count} process{'es' * (count > 1)}")


@check(
    severity="spoils",
    why="Samples that do not fill a batch are skipped in that epoch, but each sample should be used once.",
    source=OWN,
    advice="drop_last=False: Paceline trains on an epoch's rest in a smaller step, on all processes",
    keeps="training",
    expected="each sample once per epoch",
)
def drop_last(subject: CheckedRun) -> Found:
    """Your own loader drops samples."""
    return _of_loaders("drop_last=True", [each for each in subject.loaders if each.drops_last])


def _of_loaders(setting: str, loaders: list[Loader], more: str = "") -> Found:
    if not loaders:
        return None
    which = "your own DataLoader" if len(loaders) == 1 else f"{len(loaders)} of your own DataLoaders"
    return CheckResult(f"{setting} in {which}{more}", places=tuple(each.place for each in loaders))
