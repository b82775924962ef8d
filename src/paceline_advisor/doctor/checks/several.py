"""What would hold several processes up: parameters without a gradient, the search for them, their order?"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from paceline_advisor.doctor.findings import Advice, Finding
from paceline_advisor.doctor.sources import CONVNETS, DDP, TUNING
from paceline_advisor.doctor.subject import Subject, named

_DISORDER = 0.2


def unused_parameters(subject: Subject) -> Iterator[Finding]:
    """Parameters that are to be trained and take no part in the loss."""
    unused, all_of_them = subject.anatomy.unused, subject.anatomy.parameters
    if not unused:
        return
    allowed = subject.recipe.parallel.unused_parameters == "allow"
    frozen = [f"{name}.*" for name in _modules(subject, unused)]
    patterns = frozen if len(frozen) <= 8 else []
    then = "DDP looks for them in every step" if allowed else "several processes refuse to begin"
    yield Finding(
        name="unused_parameters",
        severity="slows" if allowed else "breaks",
        evidence=f"{len(unused)} of {len(all_of_them)} parameters have no gradient after a backward pass: "
        f"{named(list(unused))}",
        why=f"DDP waits for every parameter's gradient; with parallel.unused_parameters="
        f"{subject.recipe.parallel.unused_parameters}, {then}. Memory is held for them in any case.",
        source=f"{DDP}; {TUNING}",
        advice=Advice(
            words="use them, remove them, or freeze them: model.frozen" + (f"={patterns}" if patterns else ""),
            overrides={"model.frozen": [*subject.recipe.model.frozen, *patterns]} if patterns else {},
        ),
        expected="several processes can train, without a search in every step",
        speedup=(1.0, 1.1),
        layers=unused,
    )


def unused_parameter_search(subject: Subject) -> Iterator[Finding]:
    """A search for parameters without a gradient where there is none."""
    seen = subject.anatomy
    if subject.recipe.parallel.unused_parameters != "allow" or not seen.parameters or seen.unused:
        return
    if subject.recipe.model.unfreeze or subject.recipe.model.freeze_after:
        return
    yield Finding(
        name="unused_parameter_search",
        severity="slows",
        evidence="parallel.unused_parameters=allow, and every parameter had a gradient",
        why="DDP then walks the graph after each forward pass (find_unused_parameters), and cannot arrange its buckets "
        "by the order in which gradients come.",
        source=f"{DDP}; {TUNING}",
        advice=Advice(words="parallel.unused_parameters=refuse", overrides={"parallel.unused_parameters": "refuse"}),
        expected="1.0 to 1.1 times as fast with several processes",
        speedup=(1.0, 1.1),
    )


def construction_order(subject: Subject) -> Iterator[Finding]:
    """Layers that are made in another order than they are used in, where that decides the buckets."""
    if subject.recipe.parallel.unused_parameters != "allow":
        return  # DDP arranges its buckets anew after the first step
    made = list(dict.fromkeys(name.rpartition(".")[0] for name in subject.anatomy.parameters))
    used = [name for name in subject.anatomy.order if name in made]
    disorder = _inversions([made.index(name) for name in used])
    if disorder < _DISORDER:
        return
    yield Finding(
        name="construction_order",
        severity="slows",
        evidence=f"{disorder:.0%} of the pairs of layers are made in another order than they are used in: made first "
        f"{named(made, 2)}, used first {named(used, 2)}",
        why="With a search for unused parameters, buckets follow the order of construction, and each waits for the "
        "last gradient in it.",
        source=TUNING,
        advice=Advice(words="make layers in the order in which forward uses them", keeps="training"),
        expected="more of the reduction beside the backward pass, with several processes",
        speedup=(1.0, 1.1),
        layers=tuple(used),
    )


def data_parallel(subject: Subject) -> Iterator[Finding]:
    """A network that spreads itself over devices in one process."""
    found = subject.anatomy.parallel
    if not found:
        return
    yield Finding(
        name="data_parallel",
        severity="slows",
        evidence=f"torch.nn.DataParallel in the network: {named([name or 'the network itself' for name in found])}",
        why="One process drives all devices, and copies weights and gradients in each step.",
        source=TUNING,
        advice=Advice(words="take it out; one process per GPU (--processes) trains with DistributedDataParallel"),
        expected="1.2 to 2 times as fast on several GPUs",
        speedup=(1.2, 2.0),
        layers=found,
    )


def affinity(subject: Subject) -> Iterator[Finding]:
    """Processes that wander between the sockets of a machine with GPUs."""
    wanders = subject.recipe.parallel.affinity == "none" and subject.sockets > 1
    if not wanders or not subject.target.is_gpu or not subject.target.is_here:
        return
    yield Finding(
        name="affinity",
        severity="notice",
        evidence=f"parallel.affinity=none, and this machine has {subject.sockets} NUMA nodes",
        why="A process on another socket than its GPU reaches both memories over the link between the sockets.",
        source=CONVNETS,
        advice=Advice(words="parallel.affinity=socket", overrides={"parallel.affinity": "socket"}),
        expected="1.0 to 1.15 times as fast",
        speedup=(1.0, 1.15),
    )


def _modules(subject: Subject, unused: tuple[str, ...]) -> list[str]:
    """The modules all of whose parameters are unused."""
    homes = dict.fromkeys(name.rpartition(".")[0] for name in unused)
    others = [name for name in subject.anatomy.parameters if name not in unused]
    return [home for home in homes if home and not any(name.startswith(f"{home}.") for name in others)]


def _inversions(order: list[int]) -> float:
    """The share of pairs that stand the wrong way round."""
    seen: list[int] = []
    wrong = 0
    for value in order:
        place = bisect_left(seen, value)
        wrong += len(seen) - place
        seen.insert(place, value)
    pairs = len(order) * (len(order) - 1) // 2
    return wrong / pairs if pairs else 0.0
