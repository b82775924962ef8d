"""`paceline train` and `paceline resume`: start a run, or resume it with its recorded recipe and processes."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
from annotated_types import Ge

from paceline.cli.options import (
    Processes,
    ProcessRange,
    choose_processes,
    is_first_process,
    is_launched_rank,
    launch,
    rank_count,
)
from paceline.cli.output import echo, print_json, print_pairs, print_table, program, store_exit_code
from paceline.cli.streams import make_optional
from paceline.command import Overrides, RecipeName, Shape, command
from paceline.errors import PacelineError, RunDirectoryError, StoppedError
from paceline.host.machine import available_cores
from paceline.host.processes import ProcessGroup, received_signals
from paceline.host.system import STOP_SIGNALS
from paceline.host.world import COMMAND_VARIABLE
from paceline.parsing.units import counted, format_bytes, format_count, format_metric, format_seconds, metric_title
from paceline.plugins.loading import loading
from paceline.plugins.references import is_code_trusted, is_reference, trusting_code
from paceline.recipe.load import OWN_LOOP, PATH_KEYS, LoadedRecipe, is_data, load_recipe, shipped_recipes, to_tree
from paceline.recipe.schema import named_code
from paceline.records.reader import beyond_until, read_environment, read_plan, read_recipe, read_summary
from paceline.records.run_directory import RunDirectory, existing_run

if TYPE_CHECKING:
    from paceline.distributed.local_launch import Restarts
    from paceline.plan import Occasion, Plan
    from paceline.recipe.schema import Recipe
    from paceline.recipe.training import Course
    from paceline.trainer.result import TrainResult

_MOST_SHOWN = 5
# A plan does not build larger networks to measure their steps.
_MEASURED_PARAMETERS = 100_000_000
_CLIPS = {
    "clip_norm": "gradient's norm",
    "clip_value": "gradient's largest number",
    "clip_adaptive": "norm of a unit's gradient relative to its weights'",
}


ChangingProcesses = Annotated[
    int | ProcessRange | None,
    Shape(metavar="N|MIN:MAX", parse=rank_count),
    "Start N ranks on this machine (default: one per GPU, 1 on a CPU; GPUs that cannot share the global batch evenly "
    "are left out). MIN:MAX starts MAX and continues with fewer after a failure (see --max-restarts). Leave it out "
    "under torchrun or Slurm.",
]
MaxRestarts = Annotated[
    int,
    Ge(0),
    Shape(metavar="K"),
    "If a rank dies, start all again from the newest checkpoint, at most K times; needs --run-dir.",
]
Until = Annotated[
    str | None,
    Shape(metavar="DURATION"),
    "Stop there early, with a checkpoint and exit code 75: the same as train.until.",
]


@command("train")
@dataclass(frozen=True, kw_only=True)
class Train:
    """Train RECIPE: your images, a shipped name (see `paceline recipes`), a YAML file, or a run directory to repeat.

    For images (a folder of class folders, a table of paths and labels, or what `paceline pack` takes), Paceline chooses
    a recipe by their number and the machine, and prints why.

    Overrides are dotted: optimizer.lr=0.1 data.workers=4 train.duration="3 epochs". The same command in the same
    --run-dir resumes the run, as does `paceline resume RUN`; exit code 75 means it was stopped on request and can be
    resumed. For a run directory as RECIPE, name another --run-dir: that is a new run.

    Examples:
      paceline train photos/
      paceline train digits
      paceline train cifar10 data.path=~/cifar10 --run-dir runs/cifar
      paceline train image_folder data.path=photos train.duration="30 epochs" --processes 2
    """

    recipe: RecipeName
    overrides: Overrides = ()
    run_dir: Annotated[Path | None, "Run directory (default: a new one under runs/)."] = None
    processes: ChangingProcesses = None
    max_restarts: MaxRestarts = 0
    resume: Annotated[
        str,
        Shape(metavar="auto|never|CHECKPOINT", path="local"),
        "Resume from the newest whole checkpoint, refuse to, or go back to one of the run's checkpoints.",
    ] = "auto"
    until: Until = None
    plan_only: Annotated[bool, "Print every derived value without training."] = False

    def stream(self, *, as_json: bool) -> int:
        """Train, or print the plan."""
        recipe, run_dir = self.recipe, self.run_dir
        overrides = self.overrides if self.until is None else (*self.overrides, f"train.until={self.until}")
        if not self.plan_only:
            make_optional(sys.stdout)
        is_run = recipe not in shipped_recipes() and os.path.isfile(
            os.path.join(os.path.expanduser(recipe), "plan.json")
        )
        if is_run and not self.plan_only and run_dir is None:
            raise click.UsageError(
                f"'{recipe}' is a run: resume it with `paceline resume {shlex.quote(recipe)}`, or start a new run of "
                f"its recipe with `paceline train {shlex.quote(recipe)} --run-dir DIR`."
            )
        # Training a recipe runs the code it names; only planning it reads it as other commands do.
        with contextlib.nullcontext() if self.plan_only else trusting_code():
            if is_data(recipe):
                with loading():
                    from paceline.trainer.first_recipe import recipe_for_data
                recipe, overrides = recipe_for_data(recipe, overrides, run_dir, partial(echo, err=as_json))
            loaded = load_recipe(recipe, overrides)
        if self.plan_only:
            _show_plan(loaded, self.processes, run_dir, as_json=as_json)
            return 0
        if not is_launched_rank(self.processes, self.max_restarts):
            chosen = choose_processes(self.processes, loaded.recipe)
            if chosen.notice:
                echo(f"note: {chosen.notice}", err=as_json)
            if is_run and run_dir is not None and not RunDirectory(run_dir).exists():
                echo(f"This is a new run in {run_dir}, with the recipe of {recipe}.", err=as_json)
            arguments = ["train", recipe, *overrides]
            options = ([] if run_dir is None else ["--run-dir", str(run_dir)]) + ["--json"] * as_json
            restarts = self._restarts(chosen, [*arguments, *options])
            launched = launch(chosen, [*arguments, "--resume", self.resume, *options], restarts)
            if launched is not None:
                return launched
        return _train_here(loaded, run_dir, self.resume, as_json)

    def _restarts(self, chosen: Processes, arguments: list[str]) -> Restarts | None:
        """Return what to do if a rank dies; None for nothing."""
        limit = self.max_restarts
        if isinstance(self.processes, ProcessRange) and not limit:
            raise click.UsageError(
                f"--processes {self.processes.lowest}:{self.processes.highest} is for ranks that are started again "
                "after a failure; add --max-restarts, or give one number."
            )
        if not limit:
            return None
        if self.run_dir is None:
            raise click.UsageError(
                f"--max-restarts {limit} resumes from the run's checkpoints, so it requires --run-dir; name a "
                "directory with it."
            )
        if self.resume != "auto":
            raise click.UsageError(
                f"--resume {self.resume} is for one start, and --max-restarts {limit} may start the ranks again; run "
                "it without --max-restarts first, and from then on without --resume."
            )
        from paceline.distributed.local_launch import Restarts

        return Restarts(limit=limit, sizes=(chosen.count, *chosen.fewer), run_dir=self.run_dir, arguments=arguments)


def _train_here(loaded: LoadedRecipe, run_dir: Path | None, resume: str, as_json: bool) -> int:
    with loading():
        from paceline.reports.html.page import report_at_the_end
        from paceline.telemetry.display import choose_display
        from paceline.trainer.carried import read_carried
        from paceline.trainer.expected_memory import FORECAST_ONLY
        from paceline.trainer.subject import Options
        from paceline.trainer.train import forecast_only, train_recipe

    carried = read_carried()
    options = Options(
        run_dir=run_dir,
        resume=resume,
        display=choose_display(sys.stderr if as_json else sys.stdout),
        task=carried.task,
        callbacks=replace(carried.callbacks, prints=is_first_process()),
        report=report_at_the_end,
    )
    if FORECAST_ONLY in os.environ:
        forecast_only(loaded, options)
        return 0
    result = train_recipe(loaded, options)
    code = store_exit_code(StoppedError.exit_code if result.status == "stopped" else 0)
    if is_first_process():
        if as_json:
            print_json({"run_dir": str(result.run_dir), **result.summary.to_json()})
        else:
            _show_result(result, loaded.recipe)
    return code


def _show_result(result: TrainResult, recipe: Recipe) -> None:
    summary, run_dir = result.summary, result.run_dir
    typed = shlex.quote(str(run_dir))
    if result.was_complete:
        echo(f"The run in {run_dir} is complete ({format_count(summary.step)} steps): nothing to do.")
        longer = f'train.duration="{max(2 * summary.epoch, 1)} epochs"'
        echo(f"To train it longer, give a longer train.duration, for example {longer}.")
    echo()
    echo(f"{summary.status.capitalize()} after {format_count(summary.step)} steps, epoch {summary.epoch}")
    plan, trust = {}, " --trust-code" * bool(named_code(recipe))
    with contextlib.suppress(PacelineError):
        plan = read_plan(RunDirectory(run_dir))
    figures = _figures(result, plan, recipe.evaluate.metrics)
    if recipe.checkpoint.every is None:
        figures["checkpoint"] = f"of step {summary.step}, saved as the run ended (checkpoint.every=off)"
    print_pairs(figures)
    echo()
    if warning := result.learning or summary.details.get("warning"):
        echo(f"paceline: warning: {warning}", err=True)
    if summary.status == "stopped":
        echo(f"To resume: {program()} resume {typed}{trust}")
        return
    echo("Next:")
    if example := _example(recipe, plan):
        echo(f"  {program()} predict {typed} {example}{trust}")
    if plan.get("evaluation_samples") != 0 and all(map(is_reference, recipe.objects.values())):
        echo(f"  {program()} evaluate {typed}{trust}")
    target = "--format safetensors --output model.safetensors"
    if recipe.model.name.startswith("transformers:"):
        adapted = recipe.model.adapters.rank is not None
        target = "--format peft --output adapter" if adapted else "--format transformers --output model"
    echo(f"  {program()} export {typed} {target}{trust}")
    echo(f"  {program()} audit {typed}")
    if (run_dir / "report.html").is_file():
        echo(f"  open {run_dir / 'report.html'} in a browser")


def _example(recipe: Recipe, plan: Mapping[str, Any]) -> str:
    """Return what `paceline predict` could be given, as typed; empty if unknown."""
    if recipe.task in ("detection", "segmentation"):
        return "photo.jpg --draw drawn"
    if plan.get("weight_unit") not in ("texts", "tokens", "words"):
        return "photo.jpg" if plan.get("sample_name") == "images" else ""
    is_masked = plan["weight_unit"] == "tokens" and recipe.data.text.objective == "masked"
    return f'--prompt "{"a [MASK] text" if is_masked else "a text"}"'


def _figures(result: TrainResult, plan: Mapping[str, Any], named: Iterable[str]) -> dict[str, Any]:
    summary, metrics, report = result.summary, result.summary.metrics, result.run_dir / "report.html"
    figures: dict[str, Any] = {}
    for name in dict.fromkeys((plan.get("headline", "top1_accuracy"), *named)):
        if name != "loss" and metrics.get(name) is not None:
            figure = format_metric(name, metrics[name])
            figures[metric_title(name)] = f"{figure} ({metrics['weights']} weights, held-out samples)"
    if "loss" in metrics:
        figures["held-out loss"] = f"{format_metric('loss', metrics['loss'])} ({metrics['weights']} weights)"
    if rate := summary.throughput_samples_per_second:
        figures["throughput"] = f"{format_count(rate)} {plan.get('sample_name', 'samples')}/s"
    if rate := summary.throughput_tokens_per_second:
        figures["tokens"] = f"{format_count(rate)}/s, without padding"
    if summary.data_wait_fraction is not None:
        figures["waiting for data"] = f"{100 * summary.data_wait_fraction:.1f} %"
    train_time, total_time = format_seconds(summary.train_seconds), format_seconds(summary.total_seconds)
    figures["time"] = f"{train_time} of training, {total_time} in all"
    if summary.peak_memory_bytes is not None:
        figures["peak memory"] = format_bytes(summary.peak_memory_bytes)
    return figures | {"run directory": result.run_dir} | ({"report": report} if report.is_file() else {})


def _show_plan(
    loaded: LoadedRecipe, processes: int | ProcessRange | None, run_dir: Path | None, *, as_json: bool
) -> None:
    from paceline.trainer.expected_memory import forecast_apart
    from paceline.trainer.subject import resumed_recipe
    from paceline.trainer.train import plan_only

    # Among several ranks the plan is for their world, unless another one is requested.
    in_world = processes is None and is_launched_rank(None)
    chosen = None if in_world else choose_processes(processes, loaded.recipe)
    plan = plan_only(loaded, world_size=None if chosen is None else chosen.count, run_dir=run_dir)
    notices = [*loaded.checked(plan.unused).notices, *plan.left_out]
    if chosen is not None and chosen.notice:
        notices.append(chosen.notice)
    if not is_first_process():
        return
    expected = None
    if chosen is not None and (plan.parameters or 0) <= _MEASURED_PARAMETERS:
        with contextlib.suppress(PacelineError):  # the plan does not need it: data, or memory of the device
            log = partial(echo, err=True) if sys.stderr.isatty() else lambda _: None
            expected = forecast_apart(resumed_recipe(loaded.recipe, run_dir), chosen.count, log)
    if as_json:
        figures = {} if expected is None else {key: expected[key] for key in expected if key.startswith("expected_")}
        print_json({"plan": plan.to_tree(), **figures, "recipe": to_tree(loaded.recipe), "notices": notices})
        return
    echo(f"Plan of {loaded.name}")
    expected_line = {} if expected is None else {"expected": expected["message"].removeprefix("expected: ")}
    print_pairs(expected_line | _plan_lines(plan) | {"optimizer": _optimizer_line(loaded.recipe)})
    echo("\nLearning rate")
    rows = [(format_count(p.step), f"{p.learning_rate:.6g}", p.phase) for p in plan.learning_rates]
    print_table(("step", "rate", "phase"), rows)
    echo("\nParameters")
    columns = ("which", "tensors", "numbers", "rate factor", "weight decay", "from step", "to step")
    groups = (
        (
            group.parameters,
            format_count(group.tensors),
            format_count(group.numbers),
            f"{group.lr_factor:g}",
            f"{group.weight_decay:g}",
            format_count(group.first_step),
            "the end" if group.last_step is None else format_count(group.last_step),
        )
        for group in plan.parameter_groups
    )
    count = 7 if plan.freeze_after_steps else 6 if plan.unfreeze_steps else 5
    print_table(columns[:count], (group[:count] for group in groups))
    # What the recipe sets without an effect is among plan.unused; nobody asks why the rest is not used.
    if reasons := {key: why for key, why in plan.reasons.items() if not why.startswith("not used: ")}:
        echo("\nWhy")
        print_pairs(reasons)
    for notice in notices:
        echo(f"note: {notice}")


def _plan_lines(plan: Plan) -> dict[str, str]:
    def every(occasion: Occasion, steps: int | None) -> str:
        if moments := plan.moments.get(occasion, ()):
            first = ", ".join(map(format_count, moments[:_MOST_SHOWN]))
            return f"after step {first}{', …' * (len(moments) > _MOST_SHOWN)} ({len(moments)} in all)"
        return "off" if steps is None else "every step" if steps == 1 else f"every {format_count(steps)} steps"

    def batch(size: int, micro_batches: int) -> str:
        parts = (plan.world_size, "process"), (micro_batches, "micro-batch"), (plan.micro_batch_size, "sample")
        return f"{format_count(size)} = {' x '.join(counted(count, noun) for count, noun in parts)}"

    evaluation = every("evaluate", plan.evaluate_every_steps)
    if plan.evaluate_every_steps is not None:
        evaluation += f", in batches of {plan.evaluation_batch_size}"
    if plan.evaluation_samples == 0:
        evaluation = "none: no samples are held out"
    checkpoint = every("checkpoint", plan.checkpoint_every_steps)
    if plan.checkpoint_every_seconds is not None:
        checkpoint = f"every {format_seconds(plan.checkpoint_every_seconds)}"
    elif "checkpoint.every" in plan.reasons:
        checkpoint = "auto: by the clock"
    elif plan.checkpoint_every_steps is None:
        checkpoint = "off: only at the end, on a stop request and for the best evaluation (checkpoint.keep_best)"
    global_batch = batch(plan.global_batch_size, plan.accumulation_steps)
    if plan.step_sizes[0] < plan.global_batch_size:
        global_batch = f"{format_count(plan.step_sizes[0])}: all training samples, instead of {global_batch}"
    before_first, last = plan.profile_steps or (0, 0)
    lines: dict[str, str | None] = {
        "task": str(plan.data.get("task")),
        "processes": f"{plan.world_size} ({plan.strategy}), {counted(plan.threads_per_process, 'thread')} each",
        "device": f"{plan.device} ({plan.device_name})",
        "precision": _precision_line(plan),
        "compiled": _compiled_line(plan),
        "training samples": format_count(plan.train_samples),
        "evaluation samples": format_count(plan.evaluation_samples),
        **{f"data {key}": str(value) for key, value in plan.data.items() if key != "task"},
        "global batch": global_batch,
        **{
            f"from epoch {each.first_epoch + 1}": "global batch "
            f"{batch(each.global_batch_size, each.logical_ranks // plan.world_size)}, "
            f"{counted(each.steps_per_epoch, 'step')} per epoch"
            for each in plan.batch_phases[1:]
        },
        "logical ranks": format_count(plan.logical_ranks),
        "steps per epoch": format_count(plan.steps_per_epoch),
        "steps": f"{format_count(plan.total_steps)} = {plan.total_epochs:.4g} epoch{'s' * (plan.total_epochs != 1)}",
        "until": f"after step {format_count(plan.until_step)} (train.until)" if plan.until_step is not None else None,
        "last step of an epoch": counted(plan.last_step_samples, "sample"),
        "warm-up": counted(plan.warmup_steps, "step"),
        "evaluation": evaluation,
        "checkpoint": checkpoint,
        "step record": every("log", plan.log_every_steps),
        "noise scale": every("noise_scale", each) if (each := plan.noise_scale_every_steps) else None,
        "verification": every("verify", each) if (each := plan.verify_every_steps) else None,
        "profile": f"steps {format_count(before_first + 1)} to {format_count(last)}" if plan.profile_steps else None,
    }
    return {name: line for name, line in lines.items() if line}


def _optimizer_line(recipe: Recipe) -> str:
    optimizer, schedule = recipe.optimizer, recipe.schedule

    def scheduled(value: float, course: Course) -> str:
        return f"{value:g}" if course.name == "constant" else f"{value:g} to {course.end:g} ({course.name})"

    parts: list[str] = [optimizer.name]
    if optimizer.has("momentum"):
        parts.append(f"momentum {scheduled(optimizer.momentum, schedule.momentum)}")
    if optimizer.has("betas"):
        first, second = optimizer.moment_decay
        first_beta = f"{first:g}" if optimizer.has("momentum") else scheduled(first, schedule.momentum)
        parts.append(f"betas {first_beta}, {second:g}")
    if optimizer.uses_sgd_for_rest:
        parts.append(f"all but filters by sgd with momentum {optimizer.rest_momentum:g}")
    parts.append(f"weight decay {scheduled(optimizer.weight_decay, schedule.weight_decay)}")
    for name, description in _CLIPS.items():
        if (limit := getattr(optimizer, name)) is not None:
            parts.append(f"{description} at most {limit:g}")
    return ", ".join(parts)


def _precision_line(plan: Plan) -> str:
    parts = [plan.precision]
    if plan.fp8_layers:
        parts.append(f"{counted(len(plan.fp8_layers), 'linear layer')} in fp8")
    if plan.float32_matmul != "default":
        parts.append(f"fp32 products {plan.float32_matmul}")
    return ", ".join([*parts, *["channels last"] * plan.channels_last])


def _compiled_line(plan: Plan) -> str:
    if plan.compile == "off":
        return "no"
    train_sizes, evaluation_sizes = (
        " and ".join(map(str, sizes)) or "none" for sizes in (plan.compiled_train_sizes, plan.compiled_evaluation_sizes)
    )
    return f"{plan.compile}: training batches of {train_sizes}, evaluation batches of {evaluation_sizes}"


@command("resume")
@dataclass(frozen=True, kw_only=True)
class Resume:
    """Resume RUN with its recipe, in its directory and with its number of processes.

    KEY=VALUE changes settings that may change during a run, such as train.duration. A complete run only says so. A
    train.until that the run has reached is dropped. Under torchrun or Slurm, their processes are used.

    Examples:
      paceline resume runs/photos
      paceline resume runs/photos train.duration="40 epochs"
    """

    run: Annotated[Path, Shape(recipe=True)]
    overrides: Overrides = ()
    processes: ChangingProcesses = None
    max_restarts: MaxRestarts = 0
    until: Until = None

    def stream(self, *, as_json: bool) -> int:
        """Continue training in the run's directory."""
        directory = existing_run(self.run.absolute())
        if read_recipe(directory).get("task") == OWN_LOOP:
            return self._run_program(directory, as_json)
        with self.continued() as train:
            return train.stream(as_json=as_json)

    @contextlib.contextmanager
    def continued(self) -> Iterator[Train]:
        """Context in the folder that the run was started in; gives the command that continues it."""
        directory, processes = existing_run(self.run.absolute()), self.processes
        overrides = (*beyond_until(directory), *self.overrides)
        max_restarts = self.max_restarts
        loaded = load_recipe(directory.root, overrides)  # code that it names is imported only with --trust-code
        # Relative paths are resolved here, wherever the run was started.
        overrides += tuple(each for each in loaded.overrides if each.partition("=")[0] in PATH_KEYS)
        environment: dict[str, Any] = {}
        with contextlib.suppress(RunDirectoryError):  # a damaged one is set aside when the run starts
            environment = read_environment(directory)
        arguments = ["paceline", "train", str(directory.root), "--run-dir", str(directory.root)]
        if not is_launched_rank(processes, max_restarts):
            command_line = str(environment.get("command", ""))
            # Options of a script that called paceline.train have other meanings.
            recorded = command_line.split() if " train " in command_line else []
            if processes is None:
                processes = _recorded_processes(directory, recorded)
            text = _option(recorded, "--max-restarts")
            max_restarts = max_restarts or (int(text) if text.isdecimal() else 0)
            count = f"{processes.lowest}:{processes.highest}" if isinstance(processes, ProcessRange) else str(processes)
            arguments += ["--processes", count, *(["--max-restarts", str(max_restarts)] if max_restarts else [])]
        train = Train(
            recipe=str(directory.root),
            overrides=overrides,
            run_dir=directory.root,
            processes=processes,
            max_restarts=max_restarts,
            until=self.until,
        )
        folder = Path(str(environment.get("directory", "")))
        os.environ[COMMAND_VARIABLE] = shlex.join(arguments)
        try:
            with contextlib.chdir(folder) if folder.is_absolute() and folder.is_dir() else contextlib.nullcontext():
                yield train
        finally:
            del os.environ[COMMAND_VARIABLE]

    def _run_program(self, directory: RunDirectory, as_json: bool) -> int:
        """Run the program again whose own loop trains this run (paceline.Loop).

        Raises:
            click.UsageError: If the program may not be run, or an option is given that only it could follow.
        """
        environment = read_environment(directory)
        command_line, folder = str(environment.get("command", "")), str(environment.get("directory", ""))
        typed = f"cd {shlex.quote(folder)} && {command_line}"
        if self.overrides or self.processes or self.max_restarts or self.until:
            raise click.UsageError(f"a program of yours trains '{directory.root}': give it the options, in {typed}")
        starts_one_rank = environment.get("launched_by") in ("mpirun", "slurm")
        if not is_code_trusted() or starts_one_rank:
            way = "" if starts_one_rank else ", or add --trust-code to run that here"
            raise click.UsageError(f"a program of yours trains '{directory.root}': run it again, as in {typed}{way}.")
        codes = (0, StoppedError.exit_code)
        with received_signals(STOP_SIGNALS) as signals, ProcessGroup(success_codes=codes, signals=signals) as group:
            output = sys.stderr if as_json else None
            child = group.start(shlex.split(command_line), cwd=folder, stdout=output)
            group.wait()
        if as_json and directory.summary.is_file():
            print_json({"run_dir": str(directory.root), **read_summary(directory).to_json()})
        return store_exit_code(child.code or 0)


def _recorded_processes(directory: RunDirectory, recorded: list[str]) -> int | ProcessRange:
    """Return the number of processes of the recorded command; by default the number that the run had.

    Raises:
        click.UsageError: If this machine has fewer cores.
    """
    with contextlib.suppress(ValueError):
        return rank_count(_option(recorded, "--processes"))
    size = int(read_plan(directory).get("world_size", 1))
    if size > available_cores():
        raise click.UsageError(
            f"the run was trained with {size} processes, and this machine has {available_cores()} cores; start them "
            "with torchrun or Slurm as before, or give --processes."
        )
    return size


def _option(words: list[str], name: str) -> str:
    """Return the value of an option among words; empty without it."""
    for word, following in pairwise([*words, ""]):
        if word == name or word.startswith(f"{name}="):
            return following if word == name else word.partition("=")[2]
    return ""
