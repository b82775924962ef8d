"""Proof that a recipe, with the user's task, network and data, trains as it specifies."""

from __future__ import annotations

import contextlib
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path

import rich.table
import torch
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.text import Text

from paceline.command import Log
from paceline.distributed.device import describe_machine
from paceline.errors import RecipeError, TrainingError
from paceline.host.processes import can_find_descendants
from paceline.host.world import World
from paceline.pages.shown import Shown
from paceline.plan import Plan
from paceline.recipe.load import LoadedRecipe
from paceline.trainer.subject import Subject
from paceline_advisor import Json, frozen, named, picked
from paceline_advisor.commands import Prove
from paceline_advisor.launches import check_alone
from paceline_advisor.prove.checks import CHECKS
from paceline_advisor.prove.evidence import Evidence, NumericsProbe, PlainLoop, probe_numerics
from paceline_advisor.prove.recorder import Check, ObservedRun
from paceline_advisor.prove.runs import STEPS, Runner, Sizes, portable, shortened, unproved_settings, unused

_MOST_SCORED = 500


@frozen
class ProveReport:
    """Result of a proof of a recipe.

    Attributes:
        recipe: The argument of ``paceline prove``.
        overrides: Its overrides.
        processes: Processes of the distributed run.
        numbers: Precision of the network, in words.
        steps: Steps of each run.
        global_batch: Samples of a full step.
        micro_batches: Micro-batches of a step, in the runs that split it.
        samples: Training samples used.
        evaluation_samples: Held-out samples used.
        seconds: Duration.
        checks: The results.
    """

    recipe: str
    overrides: tuple[str, ...]
    processes: int
    numbers: str
    steps: int
    global_batch: int
    micro_batches: int
    samples: int
    evaluation_samples: int
    seconds: float
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return all(check.verdict != "failed" for check in self.checks)

    def to_json(self) -> Json:
        """The report as one JSON object."""
        return {"passed": self.passed, **asdict(self)}

    def __paceline__(self) -> Shown:
        """Show each check with its verdict, and advice for those that failed."""
        table = rich.table.Table(box=SIMPLE_HEAD, pad_edge=False)
        for name in ("check", "verdict"):
            table.add_column(name, no_wrap=True)
        for name in ("difference", "limit"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("what was compared")
        colours = {"passed": "green", "failed": "bold red", "not applicable": "dim"}
        advice = []
        for check in self.checks:
            numbers = ["" if value is None else f"{value:.2g}" for value in (check.difference, check.limit)]
            details = "\n".join(filter(None, (check.compared, check.found)))
            if check.verdict == "not applicable":
                details = check.found
            table.add_row(check.name, f"[{colours[check.verdict]}]{check.verdict}[/]", *numbers, escape(details))
            if check.verdict == "failed":
                advice.append(Text.from_markup(f"[bold]{check.name}[/bold]: {escape(check.advice)}"))
        count = {kind: sum(check.verdict == kind for check in self.checks) for kind in ("passed", "failed")}
        not_applicable = len(self.checks) - sum(count.values())
        total = (
            f"{count['passed']} passed, {count['failed']} failed, {not_applicable} not applicable: {self.steps} steps "
            f"of {self.global_batch} samples in {self.micro_batches} micro-batches, {self.processes} "
            f"process{'es' if self.processes > 1 else ''}, {self.numbers}, {self.seconds:.0f} s."
        )
        return Shown(title=f"Proof of {self.recipe}", blocks=[table, *advice, total], ok=self.passed or "")


def prove(options: Prove, log: Log) -> ProveReport:
    """Run a recipe for a few steps in several ways, and compare them with each other and with plain PyTorch.

    Args:
        options: The command's options.
        log: Receives progress lines.

    Raises:
        PacelineError: If the recipe is invalid, or has too little data.
        TrainingError: If a run in this process takes no step.
    """
    check_alone("a proof")
    start_time = time.perf_counter()
    loaded = options.load()
    if left_out := unproved_settings(loaded.recipe):
        log(f"not covered by this proof: {', '.join(left_out)}")
    plans, sizes = _plan(loaded, options.processes)
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        folder = tempfile.TemporaryDirectory(prefix="paceline-prove-", ignore_cleanup_errors=True)
        runner = Runner(recipe=loaded.recipe, sizes=sizes, scratch=Path(stack.enter_context(folder)), double=True)
        log("looking at the network")
        try:
            probe = probe_numerics(runner)
        except RecipeError as error:
            if sizes.tail >= 2 * sizes.micro_batches:  # each micro-batch has several samples
                raise
            raise RecipeError(
                f"with so few training samples, a micro-batch of the proof would have only one, and {error} Give "
                f"more data, or fewer --processes."
            ) from None
        runner = replace(runner, double=probe.double)
        checks = _judge(runner, probe, plans, log)
    return ProveReport(
        **picked(options, "recipe", "overrides", "processes"),
        numbers=probe.numbers,
        steps=STEPS,
        **picked(sizes, "global_batch", "micro_batches", "samples", "evaluation_samples"),
        seconds=time.perf_counter() - start_time,
        checks=checks,
    )


def _plan(loaded: LoadedRecipe, processes: int) -> tuple[dict[int, Plan], Sizes]:
    """Return the recipe's plans, by number of processes, and the sizes of its short runs."""
    recipe = portable(loaded.recipe)
    subject = Subject.open(recipe, World(), "plan", machine=describe_machine(torch.device("cpu")))
    plans = {1: subject.plan}
    if processes > 1:
        # A batch that these processes cannot share is not an error here: the short runs use another.
        with contextlib.suppress(RecipeError):
            plans[processes] = subject.plan_for(World(world_size=processes, local_world_size=processes))
    loaded.checked(unused(plans.values()))
    held_out = plans[1].evaluation_samples if plans[1].evaluate_every_steps is not None else 0
    # The end of a custom pipeline's data cannot be changed, so all of it is scored, if that is not too much.
    score_all = not subject.task.can_shorten and held_out <= _MOST_SCORED
    samples = plans[1].train_samples // recipe.data.augment.repeats
    return plans, Sizes.of(samples, held_out, processes, all_held_out=score_all)


def _judge(runner: Runner, probe: NumericsProbe, plans: dict[int, Plan], log: Log) -> tuple[Check, ...]:
    sizes, alter = runner.sizes, probe.alter
    log("training with one batch a step")
    one_batch = runner.here("one-batch", micro_batch=sizes.global_batch, alter=alter)
    log(f"training with {sizes.micro_batches} micro-batches a step")
    micro_batched = runner.here("micro-batches", micro_batch=sizes.micro_batch, alter=alter)
    unchanged = micro_batched
    if not probe.is_deterministic:
        log("training with the unchanged network")
        unchanged = runner.here("as-asked", micro_batch=sizes.micro_batch)
    for run in (one_batch, micro_batched, unchanged):
        if not run.ranks[0].steps:
            raise TrainingError(f"the run of {STEPS} steps ({run.name}) did not take one: {run.trouble}")
    distributed, why_alone = _several(runner, unchanged, log)
    log("comparing")
    with contextlib.ExitStack() as stack:
        micro_batched_recipe = shortened(runner.recipe, sizes, micro_batch=sizes.micro_batch)
        one_batch_recipe = shortened(runner.recipe, sizes, micro_batch=sizes.global_batch)
        plain = stack.enter_context(contextlib.closing(PlainLoop(micro_batched_recipe, runner.config("plain"))))
        plain_one_batch = stack.enter_context(
            contextlib.closing(PlainLoop(one_batch_recipe, runner.config("plain-whole"), alter))
        )
        evidence = Evidence(
            recipe=runner.recipe,
            plans=plans,
            sizes=sizes,
            probe=probe,
            one_batch=one_batch,
            micro_batched=micro_batched,
            unchanged=unchanged,
            distributed=distributed,
            why_alone=why_alone,
            plain_one_batch=plain_one_batch,
            plain=plain,
        )
        return tuple(check(evidence) for check in CHECKS)


def _several(runner: Runner, unchanged: ObservedRun, log: Log) -> tuple[ObservedRun | None, str]:
    """Return the distributed run, or why it is not possible."""
    count = runner.sizes.processes
    if count == 1:
        return None, "--processes 1"
    no_gradient = sorted({name for step in unchanged.ranks[0].steps for name in step.without_gradient})
    if no_gradient:
        return None, f"several processes refuse parameters without a gradient: {named(no_gradient)}"
    if not can_find_descendants():
        return None, "finding a run's processes needs /proc, which only Linux has"
    log(f"training in {count} processes")
    return runner.in_processes(f"{count}-processes"), ""
