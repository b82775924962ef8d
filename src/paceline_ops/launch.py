"""`paceline launch`: runs whose processes a scheduler starts, planned before they are queued."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from paceline.cli.output import echo, print_json
from paceline.command import Log, Overrides, RecipeName, Shape, command
from paceline.errors import LaunchError
from paceline.pages.shown import Document, Result, Shown
from paceline.recipe.load import LoadedRecipe, load_recipe
from paceline_ops.jobs.kubernetes import Workload, check, indexed_job, job_name, pytorch_job
from paceline_ops.jobs.slurm import Job, check_time, folder_name, job_script, split_sweep, submit
from paceline_ops.jobs.slurm import JobResources as JobShape
from paceline_ops.jobs.torchrun import torchrun_command

JobName = Annotated[str | None, Shape(metavar="NAME"), "Job name (default: the recipe's name)."]
Python = Annotated[str | None, Shape(metavar="PATH"), "Python interpreter (default: the one running this command)."]
DryRun = Annotated[bool, "Only print what would be done."]


@dataclass(frozen=True, kw_only=True)
class _Job:
    recipe: RecipeName
    overrides: Overrides = ()
    run_dir: Annotated[Path, Shape(required=True), "Run directory, on a file system that all nodes share."]
    nodes: Annotated[int, Ge(1), "Number of nodes: hosts, or pods."] = 1

    def checked(
        self, log: Log, processes: int, gpus_each: int | None = None, extra: Sequence[str] = ()
    ) -> LoadedRecipe:
        """Load and plan the recipe for the processes it will have.

        Args:
            log: Receives the notices.
            processes: The world size.
            gpus_each: Requested GPUs; None for those of the host.
            extra: Additional overrides.

        Raises:
            PacelineError: For a mistake that would end the job as soon as it starts.
        """
        from paceline.distributed.device import is_available
        from paceline.trainer.train import plan_only

        loaded = load_recipe(self.recipe, (*self.overrides, *extra))
        local, device = loaded, loaded.recipe.parallel.device
        if device in ("cuda", "xpu") and gpus_each == 0:
            raise LaunchError(f"parallel.device={device} needs a GPU for each process, but none is requested.")
        if device in ("cuda", "xpu") and not is_available(device):  # the job will have them
            parallel = replace(loaded.recipe.parallel, device="auto")
            local = replace(loaded, recipe=replace(loaded.recipe, parallel=parallel))
        checked = loaded.checked(plan_only(local, world_size=processes, on_other_machine=True).unused)
        for notice in checked.notices:
            log(f"note: {notice}")
        return checked


@command("slurm")
@dataclass(frozen=True, kw_only=True)
class Slurm(_Job):
    """Write a batch script that trains RECIPE, and submit it.

    The job stops before its time limit, is requeued, and resumes. The script is RUN_DIR/slurm-job.sh; submit it again
    to resume the run.

    Examples:
      paceline launch slurm digits --run-dir runs/digits --tasks-per-node 2 --time 00:30:00 --dry-run
      paceline launch slurm resnet50 data.path=/data/imagenet --run-dir /shared/runs/r50 \\
          --nodes 2 --tasks-per-node 8 --gpus-per-task 1 --cpus-per-task 12 --time 1-00 --partition gpu
      paceline launch slurm digits --run-dir runs/rates --array optimizer.lr=0.05,0.1,0.2
    """

    tasks_per_node: Annotated[int, Ge(1), Shape(metavar="M"), "Processes per node."] = 1
    gpus_per_task: Annotated[int, Ge(0), Le(1), Shape(metavar="G"), "One GPU per process, or none."] = 0
    cpus_per_task: Annotated[int | None, Ge(1), Shape(metavar="C"), "Cores per process."] = None
    time: Annotated[str | None, Shape(metavar="T"), "Time limit, as Slurm writes it: 04:00:00, 1-12."] = None
    partition: Annotated[str | None, Shape(metavar="P"), "Where to queue."] = None
    account: Annotated[str | None, Shape(metavar="A"), "Who pays."] = None
    job_name: JobName = None
    setup: Annotated[str, Shape(metavar="COMMAND"), 'Command to run first, such as "module load cuda".'] = ""
    signal_before: Annotated[
        int,
        Ge(1),
        Shape(metavar="SECONDS"),
        "How long before the time limit to stop; a step, an evaluation and a save must fit in.",
    ] = 120
    array: Annotated[
        str | None, Shape(metavar="KEY=V1,V2,..."), "A run for each value, in RUN_DIR/KEY=VALUE: an array job."
    ] = None
    more: Annotated[
        tuple[str, ...],
        Shape(name="--sbatch", metavar="OPTION", repeatable=True),
        "Any sbatch option, such as --mem=64G.",
    ] = ()
    python: Python = None
    dry_run: DryRun = False

    def run(self, log: Log) -> Result:
        """Write the script, and submit it."""
        shape = JobShape(**{each.name: getattr(self, each.name) for each in fields(JobShape)})
        check_time(shape)
        folder = self.run_dir.absolute()
        runs: list[tuple[tuple[str, ...], Path]] = [((), folder)]  # the override and the directory of each run
        if self.array is not None:
            key, values = split_sweep(self.array)
            runs = [((each,), folder / folder_name(each)) for each in (f"{key}={value}" for value in values)]
        if len({directory for _, directory in runs}) < len(runs):
            raise LaunchError(
                f"--array {self.array}: two values would have the same directory; submit them one by one."
            )
        loaded = [self.checked(log, shape.tasks, shape.gpus_per_task, override) for override, _ in runs]
        if shape.cores_warning:
            log(f"note: {shape.cores_warning}")
        job_python, directory = self.python or sys.executable, Path.cwd()
        script = job_script(
            Job(
                name=self.job_name or loaded[0].name,
                shape=shape,
                python=job_python,
                arguments=["train", self.recipe, *self.overrides],
                runs=[[*override, "--run-dir", str(directory)] for override, directory in runs],
                is_array=self.array is not None,
                folder=folder,
                directory=directory,
                setup=self.setup,
            )
        )
        path, job_id = folder / "slurm-job.sh", None
        if not self.dry_run:
            from paceline.records.run_directory import write_text

            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise LaunchError(f"--run-dir {folder} cannot be created: {error.strerror}; choose another.") from error
            write_text(path, script)
            job_id = submit(path)
        directories = [str(directory) for _, directory in runs]
        document = {"script": str(path), "text": script, "job_id": job_id, "run_dirs": directories}
        said = f"Submitted job {job_id}: {path} (runs {job_python} in {directory}, on every node)"
        said = script.removesuffix("\n") if job_id is None else said
        return Document(document=document, shown=Shown(blocks=[said]))


@command("torchrun")
@dataclass(frozen=True, kw_only=True)
class Torchrun(_Job):
    """Start this host's processes of RECIPE with torchrun.

    Give the same command on every host. This process becomes torchrun, whose exit code is 1 even after a requested
    stop: read `status` in summary.json.

    Examples:
      paceline launch torchrun digits --run-dir runs/two --processes-per-node 2
      paceline launch torchrun resnet50 data.path=/data/imagenet --run-dir /shared/runs/r50 \\
          --nodes 2 --processes-per-node 8 --rdzv-endpoint host1:29500
    """

    processes_per_node: Annotated[int, Ge(1), Shape(metavar="M"), "Processes per node."] = 1
    rdzv_endpoint: Annotated[
        str | None, Shape(metavar="HOST:PORT"), "Rendezvous address for several hosts; the same on every host."
    ] = None
    max_restarts: Annotated[int, Ge(0), Shape(metavar="K"), "After a failure."] = 3
    python: Python = None
    dry_run: DryRun = False

    def stream(self, *, as_json: bool) -> int:
        """Print the command, and replace this process with it."""
        words = torchrun_command(
            self.python or sys.executable,
            ["train", self.recipe, *self.overrides, "--run-dir", str(self.run_dir)],
            nodes=self.nodes,
            processes_per_node=self.processes_per_node,
            endpoint=self.rdzv_endpoint,
            restarts=self.max_restarts,
        )
        self.checked(lambda line: echo(line, err=True), self.nodes * self.processes_per_node)
        if as_json:
            print_json({"command": words})
        elif self.dry_run:
            echo(shlex.join(words))
        if not self.dry_run:
            sys.stdout.flush()
            os.execvp(words[0], words)
        return 0


@command("kubernetes")
@dataclass(frozen=True, kw_only=True)
class Kubernetes(_Job):
    """Print a manifest that trains RECIPE, for `kubectl apply -f -`.

    The recipe is planned here, so it and its data must be available here as in the pods.

    Examples:
      paceline launch kubernetes digits --run-dir /runs/digits --image registry/paceline:0.1 \\
          --volume-claim runs --nodes 2 --dry-run | kubectl apply -f -
    """

    image: Annotated[str, Shape(required=True, metavar="IMAGE"), "Container image with Python, torch and Paceline."]
    claim: Annotated[str, Shape(required=True, name="--volume-claim", metavar="NAME"), "Volume that all pods share."]
    mount: Annotated[str, Shape(metavar="PATH"), "Mount path in the pods; the run directory is below it."] = "/runs"
    processes_per_node: Annotated[int, Ge(1), Shape(metavar="M"), "Processes per pod."] = 1
    gpus_per_node: Annotated[int, Ge(0), Shape(metavar="G"), "GPUs per pod."] = 0
    cpus_per_node: Annotated[int | None, Ge(1), Shape(metavar="C"), "Cores per pod."] = None
    shared_memory: Annotated[str, Shape(metavar="SIZE"), "Size of /dev/shm."] = "8Gi"
    grace_seconds: Annotated[
        int,
        Ge(1),
        Shape(name="--grace", metavar="SECONDS"),
        "Time between the stop request and the kill; a step, an evaluation and a save must fit in.",
    ] = 300
    job_name: JobName = None
    kind: Annotated[Literal["Job", "PyTorchJob"], "Which object."] = "Job"
    dry_run: Annotated[bool, Shape(required=True), "Print the manifest; nothing else is possible yet."]

    def run(self, log: Log) -> Result:
        """Return the manifest."""
        loaded = self.checked(log, self.nodes * self.processes_per_node, self.gpus_per_node)
        derived: dict[str, Any] = {
            "name": self.job_name or job_name(loaded.name),
            "arguments": ["train", self.recipe, *self.overrides, "--run-dir", str(self.run_dir)],
            "run_dir": PurePosixPath(self.run_dir),
            "mount": PurePosixPath(self.mount),
        }
        options = {each.name: getattr(self, each.name) for each in fields(Workload) if each.name not in derived}
        workload = Workload(**derived, **options)
        check(workload)
        text = indexed_job(workload) if self.kind == "Job" else pytorch_job(workload)
        return Document(document={"manifest": text}, shown=Shown(blocks=[text.removesuffix("\n")]))


@command("launch", commands=(Slurm, Torchrun, Kubernetes), group="Train", place=5)
class Launch:
    """Write and submit a job for Slurm, torchrun or Kubernetes.

    The recipe is planned for that number of processes first: mistakes are found before the job is queued.
    """
