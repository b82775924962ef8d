"""Checks of a run: learning rate and schedule, memory, time between steps, records, several processes."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from functools import partial

from paceline.parsing.units import format_bytes
from paceline_advisor import Json, named
from paceline_advisor.doctor.checked_run import CheckedRun, CheckResult, Found, check
from paceline_advisor.doctor.findings import CONVNETS, DDP, GOYAL, KRIZHEVSKY, OWN, TUNING, Severity

_LARGE_BATCH = 1024
_LARGEST_LINEAR = 8192
_REFERENCE_BATCH, _REFERENCE_RATE = 256, 0.1
_FEW = 4
spoils = partial(check, severity="spoils", keeps="training")

# ------------------------------------------------------------------------------------------ memory


@check(
    severity="breaks",
    why="The first step runs out of memory.",
    source=OWN,
    advice="paceline estimate says what saves memory",
    keeps="training",
    expected="the run completes its first step",
)
def does_not_fit(subject: CheckedRun) -> Found:
    """A micro-batch that needs more memory than the device has."""
    shortage = subject.shortage
    if shortage is None:
        return None
    limit = f"{shortage.largest:,} do" if shortage.divisor else "not even one does"
    result = CheckResult(
        f"a micro-batch of {subject.plan.micro_batch_size:,} samples does not fit into "
        f"{format_bytes(shortage.memory)}, {limit}",
        predicted=not subject.target.is_here,
    )
    if not shortage.divisor:
        return result
    return result.updated(
        advice=f"batch.micro_size={shortage.divisor}, which {shortage.consequence}; paceline estimate says what else "
        "saves memory",
        overrides={"batch.micro_size": shortage.divisor},
        keeps="training" if shortage.normalises else "rounding",
    )


# ------------------------------------------------------------------------------------------ several processes


@check(
    source=f"{DDP}; {TUNING}",
    expected="several processes can train, without a search in every step",
    speedup=(1.0, 1.1),
)
def unused_parameters(subject: CheckedRun) -> Found:
    """Trainable parameters that are not used in the loss."""
    unused, parameters = subject.anatomy.unused, subject.anatomy.parameters
    if not unused:
        return None
    setting = subject.recipe.parallel.unused_parameters
    # Modules all of whose parameters are unused.
    others = [name for name in parameters if name not in unused]
    modules = dict.fromkeys(name.rpartition(".")[0] for name in unused)
    frozen = [
        f"{module}.*" for module in modules if module and not any(name.startswith(f"{module}.") for name in others)
    ]
    patterns = frozen if len(frozen) <= 8 else []
    consequence = (
        "DDP looks for them in every step" if setting == "allow" else "a run of several processes refuses to start"
    )
    return CheckResult(
        f"{len(unused)} of {len(parameters)} parameters have no gradient after a backward pass: {named(list(unused))}",
        severity="slows" if setting == "allow" else "breaks",
        why=f"DDP waits for every parameter's gradient; with parallel.unused_parameters={setting}, {consequence}. "
        "They occupy memory in any case.",
        advice="use them, remove them, or freeze them: model.frozen" + (f"={patterns}" if patterns else ""),
        overrides={"model.frozen": [*subject.recipe.model.frozen, *patterns]} if patterns else {},
        layers=unused,
    )


@check(
    why="DDP then walks the graph after each forward pass (find_unused_parameters), and cannot arrange its buckets by "
    "the order in which gradients come.",
    source=f"{DDP}; {TUNING}",
    advice="parallel.unused_parameters=refuse",
    overrides={"parallel.unused_parameters": "refuse"},
    expected="1.0 to 1.1 times as fast with several processes",
    speedup=(1.0, 1.1),
)
def unused_parameter_search(subject: CheckedRun) -> Found:
    """A search for unused parameters where all are used."""
    anatomy, model = subject.anatomy, subject.recipe.model
    if subject.recipe.parallel.unused_parameters != "allow" or not anatomy.parameters or anatomy.unused:
        return None
    if model.unfreeze or model.freeze_after:
        return None
    return CheckResult("parallel.unused_parameters=allow, and every parameter had a gradient")


@check(
    why="One process drives all devices, and copies weights and gradients in each step.",
    advice="remove it; one process per GPU (--processes) trains with DistributedDataParallel",
    expected="1.2 to 2 times as fast on several GPUs",
    speedup=(1.2, 2.0),
)
def data_parallel(subject: CheckedRun) -> Found:
    """A network that distributes itself over devices in one process."""
    found = subject.anatomy.parallel
    names = named([name or "the network itself" for name in found])
    return CheckResult(f"torch.nn.DataParallel in the network: {names}", layers=found) if found else None


# ------------------------------------------------------------------------------------------ between steps

_FEW_STEPS = 4
_SHORT_RUN = 20
_STEP = 3.0  # a training step's work in forward passes: its backward pass is worth two


@check(
    why="For each record a line and the trackers' files are written.",
    source=f"{TUNING} (avoid synchronisation)",
    advice='telemetry.log_every="10 steps"',
    overrides={"telemetry.log_every": "10 steps"},
    expected="1.02 to 1.3 times as fast, most for short steps",
    speedup=(1.02, 1.3),
)
def log_every_step(subject: CheckedRun) -> Found:
    """A record for every step, or for every few steps on a GPU."""
    plan, is_gpu = subject.plan, subject.target.is_gpu
    if plan.log_every_steps > (_FEW_STEPS if is_gpu else 1) or plan.total_steps < _SHORT_RUN:
        return None
    which = "step" if plan.log_every_steps == 1 else f"{plan.log_every_steps} steps"
    found = CheckResult(
        f"telemetry.log_every={subject.recipe.telemetry.log_every}: a record after every {which} of {plan.total_steps}"
    )
    waits = "For each record the host waits for the device to read the loss, and a line and the trackers' files are "
    return found.updated(why=f"{waits}written.") if is_gpu else found


@check(
    why="A forward pass is a third of a training step's work.",
    source=OWN,
    advice='evaluate.every="1 epoch", or less often',
    overrides={"evaluate.every": "1 epoch"},
    keeps="training",  # the best checkpoint, and early stopping, are determined at evaluations
)
def evaluation_often(subject: CheckedRun) -> Found:
    """Evaluation with at least as much work as training."""
    plan, every = subject.plan, subject.plan.evaluate_every_steps
    if every is None or plan.evaluation_samples == 0 or plan.total_steps < _SHORT_RUN:
        return None
    share = plan.evaluation_samples / (plan.evaluation_samples + every * plan.global_batch_size * _STEP)
    if share < 0.5:
        return None
    return CheckResult(
        f"evaluate.every={subject.recipe.evaluate.every} scores {plan.evaluation_samples} samples after each {every} "
        f"steps: about {share:.0%} of the forward and backward work",
        expected=f"up to {1 / (1 - share):.1f} times as fast",
        speedup=(1.0, 1 / (1 - share)),
    )


# ------------------------------------------------------------------------------------------ what the steps learn


@spoils(
    why="A large batch has a large learning rate, and first steps at the peak rate from random weights can do lasting "
    "harm.",
    source=f"{GOYAL}; {CONVNETS} (5 to 10 epochs)",
    advice='schedule.warmup="5 epochs"',
    overrides={"schedule.warmup": "5 epochs"},
    expected="no time; accuracy as with a small batch",
)
def no_warmup(subject: CheckedRun) -> Found:
    """A large batch whose first step already uses the full learning rate."""
    largest = min(subject.plan.train_samples, max(phase.global_batch_size for phase in subject.plan.batch_phases))
    if largest < _LARGE_BATCH or subject.plan.warmup_steps > 0 or not _restarts(subject):
        return None
    return CheckResult(f"batch.global_size={largest} and schedule.warmup={subject.recipe.schedule.warmup}")


def _restarts(subject: CheckedRun) -> bool:
    return not subject.recipe.model.pretrained and subject.recipe.model.initialize_from is None


@spoils(
    why="A batch k times as large takes k times the rate with SGD and sqrt(k) times with adaptive methods, both up to "
    "a limit.",
    source=f"{GOYAL}; {KRIZHEVSKY}",
    expected="no time; fewer epochs to the same accuracy",
)
def learning_rate_rule(subject: CheckedRun) -> Found:
    """A learning rate that does not match the batch."""
    optimizer, plan = subject.recipe.optimizer, subject.plan
    batch = min(plan.global_batch_size, plan.train_samples)
    if optimizer.lr_scaling == "linear" and optimizer.rule.is_adaptive:
        return CheckResult(
            f"optimizer.lr_scaling=linear with {optimizer.name}",
            advice="optimizer.lr_scaling=sqrt: adaptive steps do not shrink with the gradient noise",
        )
    if optimizer.lr_scaling == "linear" and batch > _LARGEST_LINEAR:
        return CheckResult(
            f"optimizer.lr_scaling=linear with batch.global_size={batch}",
            advice=f"a smaller rate than the rule's: it held up to {_LARGEST_LINEAR} (ResNet-50), or "
            "optimizer.name=lars",
        )
    # A large batch with a small batch's learning rate, from random weights, with plain SGD.
    scaled_rate = _REFERENCE_RATE * batch / _REFERENCE_BATCH
    is_plain_sgd = (
        optimizer.name == "sgd" and optimizer.lr_scaling == "none" and batch >= _LARGE_BATCH and _restarts(subject)
    )
    if not is_plain_sgd or optimizer.lr >= scaled_rate / 4:
        return None
    return CheckResult(
        f"optimizer.lr={optimizer.lr:g} with batch.global_size={batch}",
        advice=f"{scaled_rate:g} by the linear rule (0.1 for 256), or find it with a range test; "
        "optimizer.lr_scaling=linear with optimizer.lr_reference_batch sets it for every batch",
    )


@check(
    severity="notice",
    why="Each sample is used once per epoch, so leftover samples get their own step, and BatchNorm normalises by only "
    "a few of them.",
    source=f"{OWN}; other trainers drop them (drop_last=True: {CONVNETS})",
    advice="a batch.global_size that leaves more samples over, or none",
    keeps="training",
    expected="one step fewer per epoch",
    speedup=(1.0, 1.02),
)
def ragged_tail(subject: CheckedRun) -> Found:
    """An epoch's last step with very few samples in each micro-batch."""
    plan = subject.plan
    for phase in plan.epochs.finished_phases(plan.total_steps) if subject.anatomy.parameters else ():
        tail = plan.epochs.last_step_samples(phase)
        if 0 < tail // phase.logical_ranks < _FEW < plan.micro_batch_size:
            return CheckResult(
                f"an epoch's last step has {tail} of {phase.global_batch_size} samples, in {phase.logical_ranks} "
                "micro-batches"
            )
    return None


@spoils(
    why="A scale that is too small loses gradients, and one that grows too often skips steps.",
    source=CONVNETS,
    expected="no time; fewer steps skipped",
)
def loss_scale(subject: CheckedRun) -> Found:
    """fp16 where bf16 needs no loss scale, or a scale that cannot hold the gradients."""
    scaler = subject.recipe.train.grad_scaler
    if subject.plan.precision != "fp16":
        return None
    if scaler.growth_interval < 100:
        return CheckResult(
            f"train.grad_scaler.growth_interval={scaler.growth_interval} with train.precision=fp16",
            advice="2000, torch's default: each excessive growth costs a step",
            overrides={"train.grad_scaler.growth_interval": 2000},
        )
    if scaler.init_scale < 2**7:
        return CheckResult(
            f"train.grad_scaler.init_scale={scaler.init_scale:g} with train.precision=fp16",
            advice="65536, torch's default: gradients below 6e-8 over the scale are lost",
            overrides={"train.grad_scaler.init_scale": 65536.0},
        )
    return None


# ------------------------------------------------------------------------------------------ what a run has recorded

_WAITS = 0.1
_SKIPPED = 0.01


@spoils(source=OWN, expected="a run that learns, or learns more")
def learning(subject: CheckedRun) -> Iterable[CheckResult]:
    """What keeps the run from learning, by its records."""
    judged = subject.learning
    for found in judged.findings:
        why = f"{judged.outcome}: {found.cause}." if judged.outcome else f"{found.cause[:1].upper()}{found.cause[1:]}."
        # A run that has learned nothing comes before one that is slow.
        severity: Severity = "breaks" if judged.outcome else "spoils"
        yield CheckResult(found.evidence, name=found.name, severity=severity, why=why, advice=found.fix)
    if judged.outcome and not judged.findings:
        why, advice = "The records do not show why.", "look at the first batch and the mistakes in the report"
        yield CheckResult(judged.outcome, name="not_learning", severity="breaks", why=why, advice=advice)


@spoils(
    why="Too large a step raises the loss, which makes the next step larger still.",
    source=GOYAL,
    advice="a lower optimizer.lr (paceline find-lr), a longer schedule.warmup, or optimizer.clip_norm",
    expected="a loss that falls",
)
def diverged(subject: CheckedRun) -> Found:
    """Losses, weights or metrics that were not finite, or a loss that diverged."""
    return _incidents(subject, "nonfinite", "diverged")


@check(why="The device is idle while it waits.", advice="data.workers=auto or more")
def data_wait(subject: CheckedRun) -> Found:
    """Steps that waited for their batch."""
    found = [event["data_wait_fraction"] for event in _of(subject, "step") if event.get("data_wait_fraction")]
    if not found or (typical := statistics.median(found)) < _WAITS:
        return None
    most = 1 / (1 - typical)
    waits = CheckResult(
        f"half of the records spend {typical:.0%} or more of the step waiting for data",
        expected=f"up to {most:.2f} times as fast, as measured in the run",
        speedup=(1.0, most),
    )
    if "data.backend" in subject.plan.unused:
        return waits
    return waits.updated(
        advice="data.workers=auto, packed data (paceline pack), or data.backend=dali; paceline check-data says what "
        "makes decoding slow"
    )


@spoils(
    why="Gradients overflow in fp16 faster than the scale can follow.",
    source=CONVNETS,
    advice="train.precision=bf16 where the device has it, or a lower optimizer.lr, or optimizer.clip_norm",
    expected="no step lost",
)
def scaler_health(subject: CheckedRun) -> Found:
    """More than 1 % of the steps skipped by fp16, or a final loss scale below 1."""
    steps = _of(subject, "step")
    scales = [event["grad_scale"] for event in steps if event.get("grad_scale")]
    last = steps[-1] if steps else {}
    skipped = last.get("position", last.get("step", 0)) - last.get("step", 0)
    share, scale = skipped / max(1, last.get("position", 1)), scales[-1] if scales else 1
    if subject.plan.precision != "fp16" or not (scale < 1 or share > _SKIPPED):
        return None
    return CheckResult(f"{skipped} steps were skipped ({share:.1%}), and the loss scale ended at {scale:g}")


@check(
    why="All processes wait for the slowest in each step: work must be spread evenly.",
    source=f"{TUNING} (load balance)",
    advice="look at that host; samples of like size in a batch; parallel.affinity=socket",
    expected="as fast as the median rank",
    speedup=(1.0, 1.5),
)
def slow_rank(subject: CheckedRun) -> Found:
    """A process that the others waited for."""
    return _incidents(subject, "slow_rank")


@check(
    why="Compiling takes longer than many steps.",
    source=OWN,
    advice="constant sizes (and no changing Python numbers), or model.compile=false",
    expected="the seconds in the records",
    speedup=(1.0, 1.2),
)
def recompilation(subject: CheckedRun) -> Found:
    """Graphs that were compiled again in the run."""
    return _incidents(subject, "recompile", "slow_compile")


def _of(subject: CheckedRun, kind: str) -> list[Json]:
    return [event for event in subject.run if event["event"] == kind]


def _incidents(subject: CheckedRun, *kinds: str) -> Found:
    """Return how often a run reported incidents of these kinds, and the last message; None if never."""
    found = [event for event in _of(subject, "incident") if str(event.get("incident")).startswith(kinds)]
    times = f"{len(found)} time{'s' * (len(found) > 1)}"
    return CheckResult(f"{times}; the last: {found[-1].get('message', '')}") if found else None
