"""The doctor: run every check of a recipe that needs no training run, and order the findings."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.text import Text

from paceline.distributed.affinity import read_topology
from paceline.errors import PacelineError
from paceline.pages.shown import Shown
from paceline.plan import MachineFacts, Plan
from paceline.recipe.load import LoadedRecipe, load_recipe, shipped_recipes
from paceline.recipe.named_code import named_code
from paceline.recipe.schema import Recipe
from paceline.records.reader import read_for_report
from paceline.records.run_directory import RunDirectory
from paceline.references import load_reference
from paceline.tasks.task import build_task
from paceline.trainer.fake_batch import with_placeholder_data
from paceline.trainer.fake_step import fake_step
from paceline.trainer.preparation import plan_run
from paceline.world import World
from paceline_advisor.commands import Doctor
from paceline_advisor.doctor.anatomy import Anatomy, observe_network
from paceline_advisor.doctor.behaviour import Calls, behave, preserved_state, watching_loaders
from paceline_advisor.doctor.checks import code, compute, training  # noqa: F401  # which declare the checks
from paceline_advisor.doctor.findings import Finding, ranked
from paceline_advisor.doctor.subject import CHECKS, Subject, Target, choose_target, memory_shortage

_COLOURS = {"breaks": "bold red", "slows": "yellow", "spoils": "magenta", "notice": "cyan"}
_KEPT = {"same": "", "rounding": " [rounds differently]", "training": " [changes the training]"}
_MOST_PLACES = 5


@dataclass(frozen=True, kw_only=True)
class Improved:
    """The outcome of writing an improved recipe.

    Attributes:
        path: The requested file; None if no file was requested.
        met: The findings whose change was applied; if there are none, nothing was written.
        left_out: Reasons by finding, for findings whose change was not applied.
        lines: Changes of the recipe: ``- key=before`` and ``+ key=now``.
        why_not: Why nothing was written; otherwise empty.
    """

    path: Path | None = None
    met: tuple[Finding, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    lines: tuple[str, ...] = ()
    why_not: str = ""

    def describe(self) -> Iterator[str]:
        """Yield the outcome as lines of text."""
        if self.path is None:
            return
        yield from (f"not changed: {name}: {why}" for name, why in self.left_out.items())
        if not self.met:
            yield f"{self.path} was not written: {self.why_not}"
            return
        yield f"{self.path}: the recipe with {', '.join(each.name for each in self.met)} changed:"
        yield from (f"  {line}" for line in self.lines)


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Result of the doctor.

    Attributes:
        recipe: The recipe as given on the command line.
        overrides: The overrides as given on the command line.
        device: The device it was checked for.
        is_here: Whether that device is in this machine.
        precision: Precision of the run.
        global_batch: Samples of a step.
        processes: Number of processes that share it.
        findings: The findings, worst first.
        checks: Number of checks.
        check_seconds: Time taken by the checks only.
        seconds: Total time.
        unseen: Reasons by subject, for what could not be checked.
        loaded: The loaded recipe.
        machine: The device's facts for a plan.
        improved: The outcome of writing the improved recipe.
    """

    recipe: str
    overrides: tuple[str, ...]
    device: str
    is_here: bool
    precision: str
    global_batch: int
    processes: int
    findings: tuple[Finding, ...]
    checks: int
    check_seconds: float
    seconds: float
    unseen: dict[str, str]
    loaded: LoadedRecipe = field(repr=False)
    machine: MachineFacts = field(repr=False)
    improved: Improved = field(default_factory=Improved, repr=False)

    @property
    def is_healthy(self) -> bool:
        """Whether each finding may be intended, or its change had no measured gain."""
        return not any(finding.counts for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """The diagnosis as one JSON object."""
        tree = asdict(replace(self, loaded=LoadedRecipe(Recipe(), "")))
        del tree["loaded"], tree["machine"], tree["improved"]
        improved = self.improved
        applied = {
            "applied": [each.name for each in improved.met],
            "left_out": improved.left_out,
            "changes": improved.lines,
        }
        return {"healthy": self.is_healthy, **tree, **applied}

    def __paceline__(self) -> Shown:
        """Show each finding with its evidence, reason, change and gain."""
        count = sum(finding.counts for finding in self.findings)
        others = len(self.findings) - count
        total = f"{count} finding{'s' * (count > 1)}" if count else "no bottleneck found"
        total += f", {others} informational or without gain" if others else ""
        total += (
            f": {self.checks} checks in {1e3 * self.check_seconds:.0f} ms, {self.seconds:.1f} s including preparation."
        )
        return Shown(
            title=f"{self.recipe} on {self.device}{'' if self.is_here else ' (not here: predictions)'}",
            subtitle=f"{self.precision}, {self.global_batch} samples a step"
            f"{f' on {self.processes} processes' if self.processes > 1 else ''}",
            blocks=[
                *(Text.from_markup(line) for finding in self.findings for line in _shown(finding)),
                *(f"not checked: {what}: {why}" for what, why in self.unseen.items()),
                total,
                *self.improved.describe(),
            ],
            ok=self.is_healthy or "",
        )


def _shown(finding: Finding) -> Iterator[str]:
    """Yield the lines of a finding, in rich's markup."""
    name = f"[{_COLOURS[finding.severity]}]{finding.severity:<6}[/]  [bold]{finding.name}[/]"
    yield f"{name}: {escape(finding.evidence)}"
    # Evidence already names the first places.
    for place in [each for each in finding.places[:_MOST_PLACES] if str(each) not in finding.evidence]:
        yield escape(f"        at {place}")
    yield escape(f"        {finding.why} ({finding.source})")
    yield escape(f"        change: {finding.advice.words}{_KEPT[finding.advice.keeps]}")
    if finding.gain is None:
        # Findings about sizes already say that they are predictions.
        label = "" if finding.expected.startswith("predicted: ") else "expected, not measured: "
        yield escape(f"        {label}{finding.expected}")
    else:
        label = "measured: " if finding.gain.is_certain else ""  # no gain already says that it was measured
        yield escape(f"        {label}{finding.gain}; expected: {finding.expected}")


def examine(options: Doctor, log: Callable[[str], None]) -> Diagnosis:
    """Run every check in :data:`~paceline_advisor.doctor.subject.CHECKS`.

    Nothing is trained or written, and the state of this process is unchanged afterwards.

    Args:
        options: The command's options.
        log: Receives progress lines.

    Raises:
        PacelineError: If the recipe cannot be planned for that device.
    """
    start_time = time.perf_counter()
    loaded = load_recipe(options.recipe, options.overrides)
    recipe, assumed = with_placeholder_data(loaded.recipe)
    unseen = {} if assumed is None else {"data": assumed}
    # By default, the fewest processes that the recipe's strategy is for.
    count = options.processes or (2 if recipe.parallel.strategy in ("ddp", "fsdp") else 1)
    world = World(world_size=count, local_world_size=count)
    target = choose_target(options.device, recipe, processes=world.world_size)
    with preserved_state(), watching_loaders() as loaders:
        # Before a network is built on fake tensors: torch confuses process settings that are changed inside.
        for name in named_code(recipe):
            with contextlib.suppress(PacelineError):  # reported where it is needed
                load_reference(name, PacelineError)
        plan, anatomy, why = _anatomy(recipe, target, world, log)
        shortage = memory_shortage(recipe, target, world) if anatomy is not None else None
        log("looking at the code")
        observed, calls, trouble = _behaviour(recipe, plan)
        environment = dict(os.environ)  # with settings changed by custom code
    if anatomy is None and observed is None:
        unseen["network"] = why
    if trouble:
        unseen["code"] = trouble
    is_linux, events = hasattr(os, "sched_getaffinity"), RunDirectory(Path(options.recipe)).events
    is_run = options.recipe not in shipped_recipes()  # such a name means the recipe, whatever is here
    subject = Subject(
        recipe=loaded.recipe,
        plan=plan,
        target=target,
        anatomy=anatomy or observed or Anatomy(),
        calls=calls,
        loaders=tuple(dict.fromkeys(loaders)),
        environment=environment,
        sockets=len(read_topology(frozenset(os.sched_getaffinity(0))).nodes) if is_linux else 1,
        run=tuple(read_for_report(events)[0]) if is_run and events.exists() else (),
        shortage=shortage,
    )
    looked = time.perf_counter()
    findings = ranked(finding for check in CHECKS for finding in check(subject))
    end_time = time.perf_counter()
    return Diagnosis(
        recipe=options.recipe,
        overrides=options.overrides,
        device=target.machine.device_name,
        is_here=target.is_here,
        precision=plan.precision,
        global_batch=plan.step_sizes[0],
        processes=world.world_size,
        findings=findings,
        checks=len(CHECKS),
        check_seconds=end_time - looked,
        seconds=end_time - start_time,
        unseen=unseen,
        loaded=loaded,
        machine=target.machine,
    )


def _anatomy(
    recipe: Recipe, target: Target, world: World, log: Callable[[str], None]
) -> tuple[Plan, Anatomy | None, str]:
    """Return the plan, and the network as observed on fake tensors, or why it could not be observed so."""
    plan: Plan | None = None
    try:
        with fake_step(recipe, machine=target.machine, processes=world.world_size) as step:
            plan = step.plan
            log("looking at the network")  # not before the recipe and its data have been validated
            return plan, observe_network(step.network, step.batch, lambda: step.backward(step.forward())), ""
    except PacelineError as error:
        if plan is None:
            # A mistake in the recipe is raised again here.
            plan = plan_run(recipe, build_task(recipe), target.machine, world)
        return plan, None, str(error)


def _behaviour(recipe: Recipe, plan: Plan) -> tuple[Anatomy | None, Calls, str]:
    try:
        return *behave(recipe, channels_last=plan.channels_last), ""
    except PacelineError as error:
        return None, Calls(), str(error)
    except Exception as error:  # noqa: BLE001  # the user's code may raise anything; the other checks still apply
        return None, Calls(), f"a micro-batch of a few samples failed ({type(error).__name__}: {error})"
