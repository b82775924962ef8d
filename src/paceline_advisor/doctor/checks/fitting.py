"""Does the device have room for a step?"""

from __future__ import annotations

from collections.abc import Iterator

from paceline.units import format_bytes
from paceline_advisor.doctor.findings import Advice, Finding
from paceline_advisor.doctor.sources import OWN
from paceline_advisor.doctor.subject import Subject


def does_not_fit(subject: Subject) -> Iterator[Finding]:
    """A micro-batch whose step needs more memory than the device has."""
    lack = subject.lack
    if lack is None:
        return
    now, has = subject.plan.micro_batch_size, format_bytes(lack.memory)
    if lack.divisor:
        advice = Advice(
            words=f"batch.micro_size={lack.divisor}, which accumulation makes the same step of; paceline estimate says "
            "what else saves memory",
            overrides={"batch.micro_size": lack.divisor},
            keeps="training" if lack.normalises else "rounding",
        )
        most = f"about {lack.largest:,} do"
    else:
        advice = Advice(words="paceline estimate says what saves memory", keeps="training")
        most = "not even one does"
    yield Finding(
        name="does_not_fit",
        severity="breaks",
        evidence=f"a micro-batch of {now:,} samples does not fit into {has}, {most}",
        why="The first step ends for want of memory.",
        source=OWN,
        advice=advice,
        expected="the run gets beyond its first step",
        predicted=not subject.target.is_here,
    )
