"""The recipe's `telemetry.profile` section: which steps are looked at closely, and with what."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic.dataclasses import dataclass

from paceline.errors import RecipeError
from paceline.recipe.fields import STRICT, Applies, Length, Needs, Off, PositiveInt, Switch
from paceline.units import Duration

if TYPE_CHECKING:
    from paceline.recipe.rates import Lengths


_PROFILED = Needs(("telemetry.profile.steps",), "nothing is profiled (telemetry.profile.steps)")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Profile:
    """Some steps of a run, operator by operator. The weights are the same with it and without."""

    steps: Annotated[PositiveInt | None, Off] = None
    """How many steps to profile, or `off`."""
    after: Annotated[Length, _PROFILED] = Duration(20, "steps")
    """How far into the run they begin; the step before the first warms the profiler up."""
    tool: Annotated[Literal["torch", "nsys"], _PROFILED] = "torch"
    """`torch` writes a trace and a table of operators into the run directory; `nsys` marks the steps and their phases
    for NVIDIA's Nsight Systems, which is to run the command."""
    ranks: Annotated[Literal["first", "all"], _PROFILED] = "first"
    """Which processes are profiled."""
    memory: Annotated[Switch, Applies("tool", ("torch",)), _PROFILED] = False
    """Also record what each operator allocates."""


def plan_profile(profile: Profile, lengths: Lengths, total: int, device: str) -> tuple[int, int] | None:
    """The global batches, from 0, that are profiled: the first, and the one after the last; None if none is.

    Raises:
        RecipeError: If the run has no such steps, or the tool does not know the device.
    """
    if profile.steps is None:
        return None
    if profile.tool == "nsys" and device != "cuda":
        raise RecipeError(
            f"telemetry.profile.tool=nsys marks steps for NVIDIA's Nsight Systems, and this run is on {device}; use "
            "telemetry.profile.tool=torch."
        )
    first = lengths.steps(profile.after, total)
    if first < 1:
        raise RecipeError(
            f"telemetry.profile.after='{profile.after}' leaves the profiler no step to warm up in; give at least "
            "'1 step'."
        )
    if first + profile.steps > total:
        raise RecipeError(
            f"telemetry.profile asks for steps {first + 1} to {first + profile.steps}, beyond the run's {total}; lower "
            "telemetry.profile.after or telemetry.profile.steps."
        )
    return first, first + profile.steps
