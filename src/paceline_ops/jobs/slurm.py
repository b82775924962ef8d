"""Generate a Slurm batch script that trains a run, stops it in time and requeues it.

This generates the text and submits it; nothing else runs here. The script relies on observed behaviour of Slurm
(docs/decisions/0008):

- near the time limit, or preempted if the cluster is configured so, the *script* gets the signal of ``--signal=B:``;
- preempted otherwise, the *tasks* get SIGTERM and the script gets nothing, but the job has a PreemptTime;
- cancelled, both get SIGTERM, and the job is already COMPLETING;
- srun passes SIGUSR1 on to its tasks, kills them on SIGTERM, and exits with the highest of their exit codes.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template

from paceline.errors import LaunchError

_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<clock>\d+(?::\d+){0,2})")
# Slurm checks its clock once a minute, so its signal may come this much too early.
_EARLY_SIGNAL_SECONDS = 60


@dataclass(frozen=True, kw_only=True)
class JobResources:
    """Resources that a job requests.

    Attributes:
        gpus_per_task: 0 or 1, since a task trains on one device.
        cpus_per_task: None leaves it to the cluster.
        time: In Slurm's format, such as ``04:00:00`` or ``1-12``; None leaves it to the partition.
        signal_before: Seconds before the time limit at which the run is asked to stop.
        more: Raw options for sbatch, such as ``--mem=64G``.
    """

    nodes: int
    tasks_per_node: int
    gpus_per_task: int = 0
    cpus_per_task: int | None = None
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    signal_before: int = 120
    more: tuple[str, ...] = ()

    @property
    def tasks(self) -> int:
        """Total number of tasks: the world size."""
        return self.nodes * self.tasks_per_node

    @property
    def cores_warning(self) -> str:
        """A warning about GPUs without cores to feed them; otherwise empty."""
        is_given = self.cpus_per_task is not None or any(each.startswith(("-c", "--cpus-")) for each in self.more)
        if not self.gpus_per_task or is_given:
            return ""
        return "Without --cpus-per-task many clusters give each GPU's process one core, which cannot feed it with data."


@dataclass(frozen=True, kw_only=True)
class Job:
    """One batch job, or one array of them.

    Attributes:
        name: Name shown in the queue.
        shape: The requested resources.
        python: The interpreter of the tasks.
        arguments: Arguments of ``paceline``, without those that differ within an array.
        runs: Additional arguments for each index of the array; a single job has one entry.
        is_array: Whether it is an array, possibly of one.
        folder: Absolute path for the script and the job's output.
        directory: Absolute path of the job's working directory.
        setup: A shell command to run first, or empty.
    """

    name: str
    shape: JobResources
    python: str
    arguments: Sequence[str]
    runs: Sequence[Sequence[str]]
    is_array: bool
    folder: Path
    directory: Path
    setup: str = ""


def time_limit_seconds(text: str) -> float | None:
    """Read a time limit as sbatch does; None for an unlimited one.

    Raises:
        LaunchError: If it is not a time limit.
    """
    if text.upper() in ("INFINITE", "UNLIMITED", "-1"):
        return None
    match = _TIME.fullmatch(text)
    if match is None:
        raise LaunchError(
            f"--time {text} is not a Slurm time limit; write minutes, HOURS:MINUTES:SECONDS, DAYS-HOURS or "
            "DAYS-HOURS:MINUTES."
        )
    numbers = [int(number) for number in match["clock"].split(":")]
    if match["days"] is not None:
        hours, minutes, seconds = [*numbers, 0, 0][:3]
    else:
        # 90 is minutes, 90:30 minutes and seconds, 1:30:30 hours, minutes and seconds.
        hours, minutes, seconds = {1: [0, *numbers, 0], 2: [0, *numbers], 3: numbers}[len(numbers)]
    return ((int(match["days"] or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def check_time(shape: JobResources) -> None:
    """Refuse a time limit that leaves no time to train: the job would be requeued forever.

    Raises:
        LaunchError: If it does.
    """
    seconds = None if shape.time is None else time_limit_seconds(shape.time)
    if seconds is not None and seconds <= shape.signal_before + _EARLY_SIGNAL_SECONDS:
        raise LaunchError(
            f"--time {shape.time} is {seconds:.0f} s, but the run is asked to stop {shape.signal_before} s before its "
            f"end (--signal-before), and Slurm may be {_EARLY_SIGNAL_SECONDS} s early; give it more time, or a shorter "
            "--signal-before."
        )


def split_sweep(text: str) -> tuple[str, tuple[str, ...]]:
    """Read ``KEY=V1,V2,...``; commas within brackets or quotes belong to a value.

    Raises:
        LaunchError: If the format is wrong, or a value is repeated.
    """
    key, equals, rest = text.partition("=")
    values = tuple(value.strip() for value in _at_commas(rest))
    if not equals or not key.strip() or not all(values):
        raise LaunchError(f"--array {text} is not KEY=VALUE,VALUE,...; for example --array optimizer.lr=0.1,0.2,0.4")
    repeated = {value for value in values if values.count(value) > 1}
    if repeated:
        raise LaunchError(
            f"--array {text}: {sorted(repeated)[0]} is given twice, and each value has one run; keep one."
        )
    return key.strip(), values


def _at_commas(text: str) -> list[str]:
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        depth += (character in "[{(") - (character in ")}]")
        if character == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def folder_name(override: str) -> str:
    """Return the name of a run's directory within a sweep: its override, reduced to characters valid in file names."""
    return re.sub(r"[^\w.,=+@-]+", "_", override)


def job_script(job: Job) -> str:
    """Return the batch script.

    Raises:
        LaunchError: If a value contains a line break.
    """
    shape, cpus = job.shape, job.shape.cpus_per_task
    output = str(job.folder).replace("%", "%%") + ("/slurm-%A_%a.out" if job.is_array else "/slurm-%j.out")
    pairs: dict[str, object | None] = {
        "job-name": job.name,
        "nodes": shape.nodes,
        "ntasks-per-node": shape.tasks_per_node,
        "cpus-per-task": cpus,
        # Not per task: a task that also sees the other tasks' devices can access them directly.
        "gpus-per-node": shape.gpus_per_task * shape.tasks_per_node or None,
        "time": shape.time,
        "partition": shape.partition,
        "account": shape.account,
        "chdir": job.directory,
        "output": output,
        "open-mode": "append",
        "signal": f"B:USR1@{shape.signal_before}",
        "array": f"0-{len(job.runs) - 1}" if job.is_array else None,
    }
    options = [f"--{name}={_quoted(name, value)}" for name, value in pairs.items() if value is not None]
    options += ["--requeue", *(_quoted("sbatch", option) for option in shape.more)]
    runs = f"run=({shlex.join(job.runs[0])})"
    if job.is_array:
        cases = "\n".join(f"    {index}) run=({shlex.join(run)}) ;;" for index, run in enumerate(job.runs))
        runs = f'case "$SLURM_ARRAY_TASK_ID" in\n{cases}\nesac'
    # A task that has stopped must not kill the one that still writes the checkpoint, whatever the cluster's default:
    # --kill-on-bad-exit=0. A task that waits for tasks that are gone is ended by --wait. Since Slurm 22.05 srun no
    # longer inherits the number of cores from the job.
    srun = ["srun", "--kill-on-bad-exit=0", "--wait=60", *([] if cpus is None else [f"--cpus-per-task={cpus}"])]
    return _SCRIPT.substitute(
        options="\n".join(f"#SBATCH {option}" for option in options),
        script=shlex.quote(str(job.folder / "slurm-job.sh")),
        python=job.python,
        cores=f"# {warning}\n" if (warning := shape.cores_warning) else "",
        setup=f"{{\n{job.setup}\n}} || exit 1" if job.setup.strip() else "",
        threads="" if cpus is None else f'export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-{cpus}}}"\n',
        runs=runs,
        task=shlex.join([*srun, job.python, "-P", "-m", "paceline", *job.arguments]),
    )


def submit(script: Path) -> str:
    """Submit a script to Slurm; returns the job id.

    Raises:
        LaunchError: If Slurm is not installed here, or rejects the script.
    """
    try:
        result = subprocess.run(["sbatch", "--parsable", str(script)], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise LaunchError(
            f"sbatch is not installed here; submit {script} where Slurm is, or view it with --dry-run."
        ) from None
    if result.returncode:
        raise LaunchError(f"Slurm refuses {script}: {' '.join(result.stderr.split())}")
    return result.stdout.strip().partition(";")[0]  # JOB;CLUSTER if there are several clusters


def _quoted(name: str, value: object) -> str:
    """Quote a value for an #SBATCH line, where only double quotes can protect a space."""
    text = str(value)
    if re.search(r'["\\\n\r]', text):
        raise LaunchError(f"{name} {text!r} has a quote, a backslash or a newline, which sbatch cannot read there.")
    return f'"{text}"' if re.search(r"[\s#]", text) else text


# Variables of the script are written $$name, and template fields $name.
_SCRIPT = Template(r"""#!/bin/bash
# Written by `paceline launch slurm`. To resume a run that has ended, submit it again: sbatch $script
# Every node must have the working directory (--chdir) and the interpreter (--python): $python
$options
$cores
stop_requested='' # set by SIGUSR1 (time limit near, or preempted): stop with a checkpoint, and requeue the job
cancelled=''      # set by SIGTERM: stop with a checkpoint, and end the job
signal_seen=''    # set by both: a signal interrupts `wait`
tasks_notified='' # tasks get one signal only: a second one ends them at once, without a checkpoint
srun_pid=''

# In an array SLURM_JOB_ID is not enough: that of its last job stands for the whole array.
job=$$SLURM_JOB_ID
[ -n "$$SLURM_ARRAY_TASK_ID" ] && job=$${SLURM_ARRAY_JOB_ID}_$$SLURM_ARRAY_TASK_ID
job_state() { scontrol show job "$$job" 2>/dev/null; }

# srun passes SIGUSR1 on to the tasks; on SIGTERM it would kill them.
notify_tasks() {
    if [ -z "$$srun_pid" ] || [ -n "$$tasks_notified" ]; then return; fi
    tasks_notified=yes
    # After scancel the job is no longer RUNNING, and Slurm has sent SIGTERM to the tasks itself.
    if [ -z "$$cancelled" ] || job_state | grep -q 'JobState=RUNNING'; then kill -USR1 "$$srun_pid" 2>/dev/null; fi
}
trap 'signal_seen=yes stop_requested=yes; echo "slurm-job: asked to stop and resume later (SIGUSR1)"; notify_tasks' USR1
trap 'signal_seen=yes cancelled=yes; echo "slurm-job: asked to end for good (SIGTERM)"; notify_tasks' TERM

$setup
$threads$runs
run_dir="$${run[-1]}"
array_option="$${SLURM_ARRAY_TASK_ID:+--array=$$SLURM_ARRAY_TASK_ID }"

exit_code=75
if [ -z "$$stop_requested$$cancelled" ]; then
    $task "$${run[@]}" &
    srun_pid=$$!
    # A signal may have arrived before srun_pid was known.
    if [ -n "$$stop_requested$$cancelled" ]; then notify_tasks; fi
    # After a signal, `wait` returns early with another exit code than srun's: wait again.
    signal_seen=yes
    while [ -n "$$signal_seen" ]; do
        signal_seen=''
        wait "$$srun_pid"
        exit_code=$$?
    done
fi

# 75: stopped with a checkpoint. Above 128: ended by a signal while the program was loading.
if [ "$$exit_code" -eq 75 ] || [ "$$exit_code" -gt 128 ]; then
    # Some clusters preempt without SIGUSR1; PreemptTime then shows it.
    if [ -z "$$cancelled" ] && { [ -n "$$stop_requested" ] || job_state | grep -q 'PreemptTime=[0-9]'; }; then
        echo "slurm-job: requeueing, to resume from the newest checkpoint in $$run_dir"
        trap '' TERM # sent by the requeue
        scontrol requeue "$$job" && exit 0
    fi
    printf 'slurm-job: not complete; to resume from the newest checkpoint in %s: sbatch %s%q\n' \
        "$$run_dir" "$$array_option" $script
fi
exit "$$exit_code"
""")
