"""Batch scripts as text: what is in them, that a shell can read them, and what is refused."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import LaunchError
from paceline_ops.jobs.slurm import (
    Job,
    JobResources,
    check_time,
    folder_name,
    job_script,
    split_sweep,
    submit,
    time_limit_seconds,
)

SINGLE = Job(
    name="digits",
    shape=JobResources(nodes=2, tasks_per_node=4),
    python="/opt/python",
    arguments=["train", "digits", "optimizer={lr: 0.1}"],
    runs=[["--run-dir", "/runs/my run"]],
    is_array=False,
    folder=Path("/runs/my run"),
    directory=Path("/home/me"),
)


def options(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")]


def test_a_job_can_come_again_adds_to_its_output_and_is_told_in_time() -> None:
    assert options(job_script(SINGLE)) == [
        "--job-name=digits",
        "--nodes=2",
        "--ntasks-per-node=4",
        "--chdir=/home/me",
        '--output="/runs/my run/slurm-%j.out"',
        "--open-mode=append",
        "--signal=B:USR1@120",
        "--requeue",
    ]


def test_what_is_asked_for_is_in_the_options() -> None:
    shape = JobResources(
        nodes=1,
        tasks_per_node=8,
        gpus_per_task=1,
        cpus_per_task=12,
        time="1-00",
        partition="gpu",
        account="vision",
        signal_before=300,
        more=("--mem=64G", "--comment=two words"),
    )
    script = job_script(replace(SINGLE, shape=shape))
    assert {
        "--cpus-per-task=12",
        "--gpus-per-node=8",
        "--time=1-00",
        "--partition=gpu",
        "--account=vision",
        "--signal=B:USR1@300",
        "--mem=64G",
        '"--comment=two words"',
    } <= set(options(script))
    assert "srun --kill-on-bad-exit=0 --wait=60 --cpus-per-task=12 /opt/python -P -m paceline train digits" in script
    assert 'export OMP_NUM_THREADS="${OMP_NUM_THREADS:-12}"' in script


def test_what_every_node_needs_is_said() -> None:
    said, options = job_script(SINGLE).split("#SBATCH", 1)
    assert "working directory (--chdir) and the interpreter (--python): /opt/python\n" in said
    assert "--chdir=/home/me" in options


@pytest.mark.parametrize(
    ("more", "is_warned"),
    [({}, True), ({"cpus_per_task": 4}, False), ({"more": ("-c4",)}, False), ({"more": ("--mem=1G",)}, True)],
)
def test_gpus_without_cores_are_warned_of(more: dict[str, Any], is_warned: bool) -> None:
    shape = JobResources(nodes=1, tasks_per_node=2, gpus_per_task=1, **more)
    assert ("# Without --cpus-per-task" in job_script(replace(SINGLE, shape=shape))) == is_warned
    assert not JobResources(nodes=1, tasks_per_node=2).cores_warning


@pytest.mark.parametrize("is_array", [False, True])
@pytest.mark.parametrize("setup", ["", "module load cuda; source 'my env/bin/activate'"])
def test_a_shell_can_read_it(is_array: bool, setup: str) -> None:
    script = job_script(replace(SINGLE, is_array=is_array, runs=[["a b", "--run-dir", "/runs/it's"]], setup=setup))
    checked = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
    assert setup in script


def run_with_stand_ins(
    script: str, folder: Path, srun: str, scontrol: str = "exit 0"
) -> subprocess.CompletedProcess[str]:
    """Run a script with programs of ours in the place of srun and scontrol."""
    for name, body in (("srun", srun), ("scontrol", scontrol)):
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    environment |= {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1"} if "#SBATCH --array" in script else {}
    return subprocess.run(
        ["bash"], input=script, text=True, capture_output=True, check=False, env=environment, timeout=60
    )


@pytest.mark.parametrize("code", [0, 1, 2, 75])
def test_the_exit_code_is_that_of_the_run(tmp_path: Path, code: int) -> None:
    done = run_with_stand_ins(job_script(SINGLE), tmp_path, f"exit {code}")
    assert done.returncode == code
    assert "requeueing" not in done.stdout


REQUEUE = 'case "$1" in show) echo "JobState=RUNNING PreemptTime=None" ;; *) echo "did $*" ;; esac'
# Tells its parent, the script, as Slurm would; ends when it is told in turn.
TOLD = 'trap "exit {code}" USR1; kill -{signal} $PPID; for _ in $(seq 600); do sleep 0.1; done; exit 99'


@pytest.mark.parametrize("code", [75, 138, 143])
def test_a_job_that_was_asked_to_make_room_goes_back_into_the_queue(tmp_path: Path, code: int) -> None:
    done = run_with_stand_ins(job_script(SINGLE), tmp_path, TOLD.format(signal="USR1", code=code), REQUEUE)
    assert done.returncode == 0, done.stdout
    assert "did requeue 7" in done.stdout
    assert "resume from the newest checkpoint in /runs/my run\n" in done.stdout


@pytest.mark.parametrize(("signal", "code"), [("USR1", 0), ("USR1", 1), ("USR1", 2), ("TERM", 75), ("TERM", 0)])
def test_a_job_that_ended_otherwise_or_was_to_end_for_good_does_not(tmp_path: Path, signal: str, code: int) -> None:
    done = run_with_stand_ins(job_script(SINGLE), tmp_path, TOLD.format(signal=signal, code=code), REQUEUE)
    assert done.returncode == code
    assert "did requeue" not in done.stdout
    assert ("newest checkpoint in /runs/my run: sbatch /runs/my\\ run/slurm-job.sh" in done.stdout) == (code == 75)


def test_a_job_that_cannot_go_back_says_how_to_go_on(tmp_path: Path) -> None:
    refused = REQUEUE.replace('echo "did $*"', "exit 1")
    done = run_with_stand_ins(job_script(SINGLE), tmp_path, TOLD.format(signal="USR1", code=75), refused)
    assert done.returncode == 75
    assert "newest checkpoint in /runs/my run: sbatch /runs/my\\ run/slurm-job.sh" in done.stdout


def test_of_an_array_only_the_job_that_was_asked_goes_back_into_the_queue(tmp_path: Path) -> None:
    # Number 7 alone would be the whole array.
    script = job_script(replace(SINGLE, is_array=True, runs=[["--run-dir", "a"], ["--run-dir", "b"]]))
    done = run_with_stand_ins(script, tmp_path, TOLD.format(signal="USR1", code=75), REQUEUE)
    assert "did requeue 7_1\n" in done.stdout


def test_an_array_says_how_one_of_its_runs_goes_on(tmp_path: Path) -> None:
    runs = [[f"seed={seed}", "--run-dir", f"/runs/seed={seed}"] for seed in (3, 4)]
    script = job_script(replace(SINGLE, is_array=True, runs=runs))
    done = run_with_stand_ins(script, tmp_path, TOLD.format(signal="TERM", code=75), REQUEUE)
    assert "newest checkpoint in /runs/seed=4: sbatch --array=1 /runs/my\\ run/slurm-job.sh" in done.stdout


def signalled_early(signal: str) -> str:
    """A script that gets a signal when there is srun but no number of it yet."""
    script = job_script(SINGLE)
    early = script.replace("    srun_pid=$!\n", f"    kill -{signal} $$\n    sleep 1\n    srun_pid=$!\n")
    assert early != script
    return early


@pytest.mark.parametrize(("signal", "continues"), [("USR1", True), ("TERM", False)])
def test_a_signal_before_the_tasks_have_a_number_is_passed_on(tmp_path: Path, signal: str, continues: bool) -> None:
    script = TOLD.format(signal="0", code=75)
    done = run_with_stand_ins(signalled_early(signal), tmp_path, script, REQUEUE)
    assert done.returncode == (0 if continues else 75)
    assert ("did requeue 7" in done.stdout) == continues


ENDING = REQUEUE.replace("RUNNING", "COMPLETING")


@pytest.mark.parametrize("is_early", [False, True])
def test_a_job_that_slurm_ends_does_not_tell_its_tasks_a_second_time(tmp_path: Path, is_early: bool) -> None:
    script = signalled_early("TERM") if is_early else job_script(SINGLE)
    signal = "0" if is_early else "TERM"
    told = f'trap "exit 99" USR1; kill -{signal} $PPID; sleep 3 & wait; exit 75'
    assert run_with_stand_ins(script, tmp_path, told, ENDING).returncode == 75


def test_tasks_are_told_once(tmp_path: Path) -> None:
    counting = 'trap "echo told" USR1; for each in USR1 USR1 TERM USR1; do kill -$each $PPID; sleep 0.3; done; exit 75'
    assert run_with_stand_ins(job_script(SINGLE), tmp_path, counting, REQUEUE).stdout.count("told\n") == 1


def test_a_job_that_is_cancelled_while_it_makes_room_ends_for_good(tmp_path: Path) -> None:
    both = 'trap "" USR1; for each in USR1 TERM; do kill -$each $PPID; sleep 0.5; done; exit 75'
    done = run_with_stand_ins(job_script(SINGLE), tmp_path, both, REQUEUE)
    assert (done.returncode, "did requeue" in done.stdout) == (75, False)


def test_a_job_that_was_preempted_without_a_signal_to_it_goes_back_into_the_queue(tmp_path: Path) -> None:
    preempted = REQUEUE.replace("PreemptTime=None", "PreemptTime=2026-11-21T05:46:03")
    assert "did requeue 7" in run_with_stand_ins(job_script(SINGLE), tmp_path, "exit 75", preempted).stdout


def test_a_setup_that_fails_ends_the_job(tmp_path: Path) -> None:
    done = run_with_stand_ins(job_script(replace(SINGLE, setup="false")), tmp_path, "echo started")
    assert (done.returncode, done.stdout) == (1, "")


def test_each_index_of_an_array_has_its_own_arguments(tmp_path: Path) -> None:
    runs = [[f"seed={seed}", "--run-dir", f"/runs/a b/seed={seed}"] for seed in (3, 4)]
    script = job_script(replace(SINGLE, is_array=True, runs=runs))
    assert "--array=0-1" in options(script)
    assert '--output="/runs/my run/slurm-%A_%a.out"' in options(script)
    output = run_with_stand_ins(script, tmp_path, 'printf "%s\\n" "${@: -3}"').stdout
    assert output.splitlines() == ["seed=4", "--run-dir", "/runs/a b/seed=4"]


@pytest.mark.parametrize("text", ['a "quoted" name', "two\nlines"])
def test_what_sbatch_could_not_read_is_refused(text: str) -> None:
    with pytest.raises(LaunchError, match="which sbatch cannot read there"):
        job_script(replace(SINGLE, name=text))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("90:30", 5430),
        ("1:30:30", 5430),
        ("2-1", 176400),
        ("0-1:30", 5400),
        ("0-0:0:7", 7),
        ("INFINITE", None),
    ],
)
def test_time_limits_are_read_as_slurm_reads_them(text: str, seconds: int | None) -> None:
    assert time_limit_seconds(text) == seconds


def test_a_time_limit_that_leaves_no_time_is_refused() -> None:
    check_time(JobResources(nodes=1, tasks_per_node=1, time="3:01"))
    with pytest.raises(LaunchError, match="--time 3 is 180 s, but the run is asked to stop 120 s before its end"):
        check_time(JobResources(nodes=1, tasks_per_node=1, time="3"))
    with pytest.raises(LaunchError, match="--time soon is not a Slurm time limit"):
        check_time(JobResources(nodes=1, tasks_per_node=1, time="soon"))


def test_commas_within_a_value_stay_there() -> None:
    assert split_sweep("optimizer.lr=0.1,0.2") == ("optimizer.lr", ("0.1", "0.2"))
    assert split_sweep("optimizer={name: sgd, lr: 1},{name: adamw, lr: 2}")[1] == (
        "{name: sgd, lr: 1}",
        "{name: adamw, lr: 2}",
    )
    assert split_sweep('data.path="a,b",c')[1] == ('"a,b"', "c")


@pytest.mark.parametrize("text", ["optimizer.lr", "=1", "optimizer.lr=", "optimizer.lr=1,,2", "optimizer.lr=1,1"])
def test_a_sweep_without_values_or_with_one_twice_is_refused(text: str) -> None:
    with pytest.raises(LaunchError, match="--array"):
        split_sweep(text)


def test_a_directory_has_the_name_of_its_override() -> None:
    assert folder_name("optimizer.lr=1e-3") == "optimizer.lr=1e-3"
    assert folder_name("data.path=/a b/c") == "data.path=_a_b_c"


def test_without_slurm_the_script_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match=r"sbatch is not installed here; submit /runs/slurm-job\.sh where Slurm is"):
        submit(Path("/runs/slurm-job.sh"))
