"""`paceline launch`: a run where others start the processes, planned before it is queued."""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.options import LocalPath, json_option, overrides_argument, recipe_argument
from paceline.cli.output import echo, print_json
from paceline.distributed.jobs.kubernetes import Workload, check, indexed_job, job_name, pytorch_job
from paceline.distributed.jobs.slurm import Job, Shape, check_time, folder_name, job_script, split_sweep, submit
from paceline.distributed.jobs.torchrun import torchrun_command
from paceline.errors import LaunchError
from paceline.recipe.load import LoadedRecipe, load_recipe

if TYPE_CHECKING:
    from paceline.recipe.schema import Recipe

_AT_LEAST_ONE = click.IntRange(min=1)
_run_dir_option: Callable[[Any], Any] = click.option(
    "--run-dir",
    required=True,
    type=LocalPath(),
    help="Run directory, on a file system that all nodes share.",
)
_dry_run_option: Callable[[Any], Any] = click.option(
    "--dry-run", is_flag=True, help="Print what would be done, and do nothing."
)
_python_option: Callable[[Any], Any] = click.option(
    "--python", metavar="PATH", help="Python that trains (default: the one that runs this command)."
)


@click.group("launch")
def command() -> None:
    """Start a run where others start its processes.

    The recipe is read and planned for that number of processes first: a mistake is found before the job is queued.
    """


@command.command("slurm", short_help="Write a batch script and submit it.")
@recipe_argument
@overrides_argument
@_run_dir_option
@click.option("--nodes", type=_AT_LEAST_ONE, default=1, show_default=True, metavar="N", help="Number of nodes.")
@click.option(
    "--tasks-per-node", type=_AT_LEAST_ONE, default=1, show_default=True, metavar="M", help="Processes on each."
)
@click.option(
    "--gpus-per-task", type=click.IntRange(0, 1), default=0, show_default=True, metavar="G", help="A GPU each, or none."
)
@click.option("--cpus-per-task", type=_AT_LEAST_ONE, metavar="C", help="Cores of each process.")
@click.option("--time", metavar="T", help="Time limit, as Slurm writes it: 04:00:00, 1-12.")
@click.option("--partition", metavar="P", help="Where to queue.")
@click.option("--account", metavar="A", help="Who pays.")
@click.option("--job-name", metavar="NAME", help="What the queue shows (default: the recipe's name).")
@click.option("--setup", default="", metavar="COMMAND", help='What goes before, such as "module load cuda".')
@click.option(
    "--signal-before",
    type=_AT_LEAST_ONE,
    default=120,
    show_default=True,
    metavar="SECONDS",
    help="When to stop before the time limit; a step, an evaluation and a save must fit in.",
)
@click.option("--array", metavar="KEY=V1,V2,...", help="A run for each value, in RUN_DIR/KEY=VALUE: an array job.")
@click.option("--sbatch", "more", multiple=True, metavar="OPTION", help="Any option of sbatch, such as --mem=64G.")
@_python_option
@_dry_run_option
@json_option
def slurm(recipe: str, overrides: tuple[str, ...], run_dir: Path, dry_run: bool, as_json: bool, **asked: Any) -> int:
    """Train RECIPE as a batch job that stops before its time limit, goes back into the queue, and goes on.

    The script is RUN_DIR/slurm-job.sh. Submitted again, it goes on with the run.

    \b
    Examples:
      paceline launch slurm digits --run-dir runs/digits --tasks-per-node 2 --time 00:30:00 --dry-run
      paceline launch slurm resnet50 data.path=/data/imagenet --run-dir /shared/runs/r50 \\
          --nodes 2 --tasks-per-node 8 --gpus-per-task 1 --cpus-per-task 12 --time 1-00 --partition gpu
      paceline launch slurm digits --run-dir runs/rates --array optimizer.lr=0.05,0.1,0.2
    """
    array, name, setup, python = (asked.pop(key) for key in ("array", "job_name", "setup", "python"))
    shape = Shape(**asked)
    check_time(shape)
    folder = run_dir.expanduser().absolute()
    runs = _runs(array, folder)
    loaded = [_check(recipe, (*overrides, *override), shape.tasks, shape.gpus_per_task) for override, _ in runs]
    script = job_script(
        Job(
            name=name or loaded[0].name,
            shape=shape,
            python=python or sys.executable,
            arguments=["train", recipe, *overrides],
            runs=[[*override, "--run-dir", str(directory)] for override, directory in runs],
            is_array=array is not None,
            folder=folder,
            directory=Path.cwd(),
            setup=setup,
        )
    )
    job_id = None if dry_run else _submit(folder, script)
    if as_json:
        facts = {"script": str(folder / "slurm-job.sh"), "text": script, "job_id": job_id}
        print_json({**facts, "run_dirs": [str(directory) for _, directory in runs]})
    elif job_id is None:
        echo(script, nl=False)
    else:
        echo(f"Submitted job {job_id}: {folder / 'slurm-job.sh'}")
    return 0


def _runs(array: str | None, folder: Path) -> list[tuple[tuple[str, ...], Path]]:
    """Each run's own override and directory."""
    if array is None:
        return [((), folder)]
    key, values = split_sweep(array)
    settings = [f"{key}={value}" for value in values]
    runs: list[tuple[tuple[str, ...], Path]] = [((each,), folder / folder_name(each)) for each in settings]
    if len({directory for _, directory in runs}) < len(runs):
        raise LaunchError(f"--array {array}: two values would have the same directory; start them one by one.")
    return runs


def _submit(folder: Path, script: str) -> str:
    from paceline.records.run_directory import write_text

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"--run-dir {folder} cannot be made: {error.strerror}; choose another.") from error
    path = folder / "slurm-job.sh"
    write_text(path, script)
    return submit(path)


def _check(recipe: str, overrides: Sequence[str], processes: int, gpus_each: int | None = None) -> LoadedRecipe:
    """Load and plan a recipe for the processes it will have.

    Args:
        recipe: Name or path.
        overrides: ``KEY=VALUE``.
        processes: The world size.
        gpus_each: GPUs that are asked for; None if they are those of the host.

    Raises:
        PacelineError: For a mistake that would end the job as soon as it begins.
    """
    from paceline.trainer.train import plan_only

    loaded = load_recipe(recipe, overrides)
    device = loaded.recipe.parallel.device
    if device in ("cuda", "xpu") and gpus_each == 0:
        raise LaunchError(f"parallel.device={device} needs a GPU for each process, but none is asked for.")
    here = dataclasses.replace(loaded, recipe=_as_planned_here(loaded.recipe))
    plan = plan_only(here, world_size=processes, elsewhere=True)
    checked = loaded.checked(plan.unused)
    for notice in checked.notices:
        echo(f"note: {notice}", err=True)
    return checked


def _as_planned_here(recipe: Recipe) -> Recipe:
    """The recipe for this machine, which may lack the devices that the job will have."""
    from paceline.distributed.device import is_available

    if recipe.parallel.device not in ("cuda", "xpu") or is_available(recipe.parallel.device):
        return recipe
    return dataclasses.replace(recipe, parallel=dataclasses.replace(recipe.parallel, device="auto"))


@command.command("torchrun", short_help="Start this host's processes with torchrun.")
@recipe_argument
@overrides_argument
@_run_dir_option
@click.option("--nodes", type=_AT_LEAST_ONE, default=1, show_default=True, metavar="N", help="Number of hosts.")
@click.option(
    "--processes-per-node", type=_AT_LEAST_ONE, default=1, show_default=True, metavar="M", help="Processes on each."
)
@click.option("--rdzv-endpoint", metavar="HOST:PORT", help="Where several hosts meet; the same on every host.")
@click.option(
    "--max-restarts", type=click.IntRange(min=0), default=3, show_default=True, metavar="K", help="After a failure."
)
@_python_option
@_dry_run_option
@json_option
def torchrun(
    recipe: str,
    overrides: tuple[str, ...],
    run_dir: Path,
    python: str | None,
    dry_run: bool,
    as_json: bool,
    **asked: Any,
) -> int:
    """Train RECIPE with torchrun: give the same command on every host.

    This process becomes torchrun, whose exit code is 1 also after a stop that was asked for: read `status` in
    summary.json.

    \b
    Examples:
      paceline launch torchrun digits --run-dir runs/two --processes-per-node 2
      paceline launch torchrun resnet50 data.path=/data/imagenet --run-dir /shared/runs/r50 \\
          --nodes 2 --processes-per-node 8 --rdzv-endpoint host1:29500
    """
    nodes, each = asked["nodes"], asked["processes_per_node"]
    arguments = ["train", recipe, *overrides, "--run-dir", str(run_dir)]
    words = torchrun_command(
        python or sys.executable,
        arguments,
        nodes=nodes,
        processes_per_node=each,
        endpoint=asked["rdzv_endpoint"],
        restarts=asked["max_restarts"],
    )
    _check(recipe, overrides, nodes * each)
    if as_json:
        print_json({"command": words})
    elif dry_run:
        echo(shlex.join(words))
    if not dry_run:
        sys.stdout.flush()
        os.execvp(words[0], words)
    return 0


@command.command("kubernetes", short_help="Print a manifest.")
@recipe_argument
@overrides_argument
@_run_dir_option
@click.option("--image", required=True, metavar="IMAGE", help="Container image with Python, torch and Paceline.")
@click.option("--volume-claim", "claim", required=True, metavar="NAME", help="Volume that all pods share.")
@click.option(
    "--mount", default="/runs", show_default=True, metavar="PATH", help="Where pods see it; the run directory is below."
)
@click.option("--nodes", type=_AT_LEAST_ONE, default=1, show_default=True, metavar="N", help="Number of pods.")
@click.option(
    "--processes-per-node", type=_AT_LEAST_ONE, default=1, show_default=True, metavar="M", help="Processes in each."
)
@click.option(
    "--gpus-per-node", type=click.IntRange(min=0), default=0, show_default=True, metavar="G", help="GPUs of each."
)
@click.option("--cpus-per-node", type=_AT_LEAST_ONE, metavar="C", help="Cores of each.")
@click.option("--shared-memory", default="8Gi", show_default=True, metavar="SIZE", help="Size of /dev/shm.")
@click.option(
    "--grace",
    "grace_seconds",
    type=_AT_LEAST_ONE,
    default=300,
    show_default=True,
    metavar="SECONDS",
    help="From the request to stop to the kill; a step, an evaluation and a save must fit in.",
)
@click.option("--job-name", metavar="NAME", help="Name of the job (default: the recipe's name).")
@click.option(
    "--kind", type=click.Choice(["Job", "PyTorchJob"]), default="Job", show_default=True, help="Which object."
)
@click.option("--dry-run", is_flag=True, required=True, help="Print the manifest; nothing else is possible yet.")
@json_option
def kubernetes(recipe: str, overrides: tuple[str, ...], run_dir: Path, as_json: bool, **asked: Any) -> int:
    """Print a manifest that trains RECIPE, for `kubectl apply -f -`.

    The recipe is planned here, so it and its data must be here as they are in the pods.

    \b
    Example:
      paceline launch kubernetes digits --run-dir /runs/digits --image registry/paceline:0.1 \\
          --volume-claim runs --nodes 2 --dry-run | kubectl apply -f -
    """
    kind, name, mount = asked.pop("kind"), asked.pop("job_name"), PurePosixPath(asked.pop("mount"))
    del asked["dry_run"]
    arguments = ["train", recipe, *overrides, "--run-dir", str(run_dir)]
    loaded = _check(recipe, overrides, asked["nodes"] * asked["processes_per_node"], asked["gpus_per_node"])
    workload = Workload(
        name=name or job_name(loaded.name),
        arguments=arguments,
        run_dir=PurePosixPath(run_dir),
        mount=mount,
        **asked,
    )
    check(workload)
    text = indexed_job(workload) if kind == "Job" else pytorch_job(workload)
    if as_json:
        print_json({"manifest": text})
    else:
        echo(text, nl=False)
    return 0
