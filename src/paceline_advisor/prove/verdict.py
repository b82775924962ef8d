"""What does one check say?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["passed", "failed", "not applicable"]


@dataclass(frozen=True, kw_only=True)
class Check:
    """One comparison, and how it came out.

    Attributes:
        name: What it is about.
        compared: What was held against what.
        verdict: ``passed``, ``failed`` or ``not applicable``.
        difference: What was measured: a relative difference, or how many of something; None if nothing was.
        limit: The largest difference that passes.
        found: Where it differs and how, or why the check does not apply; empty if there is nothing to say.
        advice: What to look at if it failed; empty otherwise.
    """

    name: str
    compared: str
    verdict: Verdict
    difference: float | None = None
    limit: float | None = None
    found: str = ""
    advice: str = ""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A check that was not made yet.

    Attributes:
        name: What it is about.
        compared: What is to be held against what.
        advice: What to look at if it fails.
    """

    name: str
    compared: str
    advice: str

    def measured(self, difference: float, limit: float = 0, *, found: str = "", compared: str = "") -> Check:
        """The check with what was measured."""
        passed = difference <= limit
        return Check(
            name=self.name,
            compared=compared or self.compared,
            verdict="passed" if passed else "failed",
            difference=float(difference),
            limit=limit,
            found=found,
            advice="" if passed else self.advice,
        )

    def failed(self, found: str) -> Check:
        """The check where there is nothing to measure, because what was to be compared is not there."""
        return Check(name=self.name, compared=self.compared, verdict="failed", found=found, advice=self.advice)

    def not_applicable(self, reason: str) -> Check:
        """The check where it has nothing to say."""
        return Check(name=self.name, compared=self.compared, verdict="not applicable", found=reason)


def sure(difference: float) -> float:
    """A difference that can be compared with others: one that is no number is the largest."""
    return math.inf if math.isnan(difference) else difference


def named(names: list[str], most: int = 4) -> str:
    """The first of some names."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
