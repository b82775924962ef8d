"""Which steps of this run are profiled on this process, and who is told?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.records.events import IncidentEvent, ProfileEvent
from paceline.telemetry.clock import StepClock
from paceline.telemetry.profile import Assignment, NsightTool, Profiled, ProfilingClock, TorchTool

if TYPE_CHECKING:
    from paceline.trainer.run import Run


def with_profile(run: Run) -> StepClock:
    """The run's clock, with a profile around it if one is asked for on this process."""
    asked, steps = run.recipe.telemetry.profile, run.plan.profile_steps
    if steps is None or (asked.ranks == "first" and not run.world.is_first):
        return run.clock
    tool = NsightTool() if asked.tool == "nsys" else TorchTool(run.device.type, run.world.rank, memory=asked.memory)
    assignment = Assignment(
        first=steps[0],
        end=steps[1],
        position=lambda: run.progress.position,
        folder=run.directory.profile,
        report=lambda profiled: _report(run, profiled),
    )
    return ProfilingClock(run.clock, tool, assignment)


def _report(run: Run, profiled: Profiled) -> None:
    which = f"steps {profiled.first} to {profiled.last}"
    if profiled.problem is not None:
        message = f"{which} were not profiled: {profiled.problem}."
        run.recorder.write(IncidentEvent(**run.progress.here, incident="profile", message=message))
        run.display.message(message)
        return
    tool = run.recipe.telemetry.profile.tool
    folder = None if tool == "nsys" else run.directory.profile(profiled.first - 1)
    place = None if folder is None else str(folder.relative_to(run.directory.root))
    run.recorder.write(
        ProfileEvent(**run.progress.here, first_step=profiled.first, last_step=profiled.last, tool=tool, folder=place)
    )
    run.display.message(f"{which} were profiled: {'see the report of nsys' if folder is None else f'see {folder}'}")
