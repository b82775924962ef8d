"""Is more done between the steps than they can bear: records, evaluations, checkpoints?"""

from __future__ import annotations

from collections.abc import Iterator

from paceline_advisor.doctor.findings import Advice, Finding
from paceline_advisor.doctor.sources import OWN, TUNING
from paceline_advisor.doctor.subject import Subject

_FEW_STEPS = 4
_SHORT_RUN = 20
_USUAL = "10 steps"
_BACKWARD = 3.0  # a step's time in forward passes: backward takes two


def log_every_step(subject: Subject) -> Iterator[Finding]:
    """A record for every step, or nearly."""
    plan = subject.plan
    few = _FEW_STEPS if subject.target.is_gpu else 1
    if plan.log_every_steps > few or plan.total_steps < _SHORT_RUN:
        return
    waits = "the host waits for the device to read the loss, and " if subject.target.is_gpu else ""
    yield Finding(
        name="log_every_step",
        severity="slows",
        evidence=f"telemetry.log_every={subject.recipe.telemetry.log_every}: a record after every "
        f"{'step' if plan.log_every_steps == 1 else f'{plan.log_every_steps} steps'} of {plan.total_steps}",
        why=f"For each record {waits}a line and the trackers' files are written.",
        source=f"{TUNING} (avoid synchronisation)",
        advice=Advice(words=f'telemetry.log_every="{_USUAL}"', overrides={"telemetry.log_every": _USUAL}),
        expected="1.02 to 1.3 times as fast, most for short steps",
        speedup=(1.02, 1.3),
    )


def evaluation_often(subject: Subject) -> Iterator[Finding]:
    """More time in evaluation than in training."""
    plan = subject.plan
    if plan.evaluate_every_steps is None or plan.evaluation_samples == 0 or plan.total_steps < _SHORT_RUN:
        return
    trained = plan.evaluate_every_steps * plan.global_batch_size * _BACKWARD
    share = plan.evaluation_samples / (plan.evaluation_samples + trained)
    if share < 0.5:
        return
    yield Finding(
        name="evaluation_often",
        severity="slows",
        evidence=f"evaluate.every={subject.recipe.evaluate.every} scores {plan.evaluation_samples} samples after each "
        f"{plan.evaluate_every_steps} steps: about {share:.0%} of the forward and backward work",
        why="A forward pass is a third of a training step's work.",
        source=OWN,
        # What is the best, and when patience is at its end, is found at evaluations.
        advice=Advice(
            words='evaluate.every="1 epoch", or less often', overrides={"evaluate.every": "1 epoch"}, keeps="training"
        ),
        expected=f"up to {1 / (1 - share):.1f} times as fast",
        speedup=(1.0, 1 / (1 - share)),
    )
