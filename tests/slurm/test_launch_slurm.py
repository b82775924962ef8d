"""Under a real Slurm of two nodes: jobs that are preempted, cancelled or fail, and sweeps."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "src"
_module = importlib.util.spec_from_file_location("paceline_test_cluster", HERE / "cluster.py")
assert _module is not None
assert _module.loader is not None
cluster = importlib.util.module_from_spec(_module)
sys.modules[_module.name] = cluster
_module.loader.exec_module(cluster)

MISSING = cluster.missing_programs()
pytestmark = [
    pytest.mark.slurm,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(MISSING), reason=f"not here: {', '.join(MISSING)} (tests/slurm/setup installs them)"),
]

RECIPE = (
    "model.options={width: 4, stages: 1, dropout: 0.1}",
    "data.augment=null",
    "batch.global_size=64",
    "optimizer={name: sgd, lr: 0.05}",
    "schedule.warmup=0 steps",
    "train.ema=0.9",
    "evaluate.every=1000 steps",
    "checkpoint.every=1000 steps",
    "telemetry.log_every=1 steps",
    "telemetry.trackers=[]",
    "parallel.exact=true",
    "parallel.device=cpu",
)
# Long enough to be disturbed on a fast machine, short enough to be waited for on a slow one.
LONG, SHORT = ("train.duration=240 steps",), ("train.duration=4 steps",)
ENDLESS = ("train.duration=1000000 steps",)
_WAIT_SECONDS = 240.0


def until(condition: Callable[[], Any], what: Callable[[], str]) -> Any:
    deadline = time.monotonic() + _WAIT_SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline, what()
        time.sleep(0.1)
    return found


class Slurm:
    """A cluster, and runs in it."""

    def __init__(self, running: Any, folder: Path) -> None:
        self.running, self.folder = running, folder

    def paceline(self, *arguments: str) -> str:
        return self.command(sys.executable, "-m", "paceline", *arguments)

    def command(self, *words: str) -> str:
        done = subprocess.run(
            words, cwd=self.folder, env=self.environment(), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def environment(self) -> dict[str, str]:
        """Ours, without what says that we are one of several, and with the loopback interface for gloo."""
        mine = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "SBATCH_"))}
        ours = {"PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        return mine | ours | self.running.environment

    def submit(self, run_dir: str, *more: str) -> str:
        told = json.loads(self.paceline("launch", "slurm", "digits", *RECIPE, *more, "--run-dir", run_dir, "--json"))
        return str(told["job_id"])

    def job(self, job_id: str) -> dict[str, str]:
        text = self.running.call("scontrol", "--oneliner", "show", "job", job_id)
        return dict(word.partition("=")[::2] for word in text.split())

    def said(self, run_dir: str) -> str:
        return "\n".join(path.read_text() for path in sorted((self.folder / run_dir).glob("slurm-*.out")))

    def wait_for_step(self, run_dir: str, step: int) -> None:
        path = self.folder / run_dir / "events.jsonl"

        def there() -> bool:
            return path.is_file() and path.read_text().count('"event": "step"') >= step

        until(there, lambda: f"no step {step}: {self.said(run_dir)}")

    def wait_for_end(self, job_id: str, run_dir: str) -> dict[str, str]:
        ends = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")

        def ended() -> dict[str, str] | None:
            job = self.job(job_id)
            return job if job["JobState"] in ends and "EndTime" in job else None

        found: dict[str, str] = until(ended, lambda: f"{self.job(job_id)}\n{self.said(run_dir)}")
        return found

    def wait_for_empty_queue(self) -> None:
        until(lambda: not self.running.call("squeue", "-h").strip(), lambda: self.running.call("squeue"))

    def summary(self, run_dir: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / run_dir / "summary.json").read_text())
        return found


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A cluster that sends a preempted job the signal it asked for."""
    with cluster.cluster() as running:
        yield Slurm(running, tmp_path_factory.mktemp("with spaces"))


@pytest.fixture(scope="module")
def undisturbed(slurm: Slurm) -> dict[str, Any]:
    """The summary of the same run in one process, without Slurm."""
    slurm.paceline("train", "digits", *RECIPE, *LONG, "--run-dir", "undisturbed")
    return slurm.summary("undisturbed")


def assert_went_on_to_the_same_end(slurm: Slurm, job_id: str, run_dir: str, undisturbed: dict[str, Any]) -> None:
    job = slurm.wait_for_end(job_id, run_dir)
    said = slurm.said(run_dir)
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "1"), said
    assert "requeueing" in said
    assert "resumed from step-" in said
    assert "asked to end for good" not in said
    mine = slurm.summary(run_dir)
    assert (mine["status"], mine["world_size"], mine["resumes"]) == ("completed", 2, 1)
    assert mine["weights_sha256"] == undisturbed["weights_sha256"]
    assert mine["ledger"] == undisturbed["ledger"]


@pytest.mark.thorough
def test_a_preempted_job_goes_on_to_the_undisturbed_weights(slurm: Slurm, undisturbed: dict[str, Any]) -> None:
    job_id = slurm.submit("preempted", *LONG, "--nodes", "2")
    slurm.wait_for_step("preempted", 5)
    slurm.running.call("srun", "--partition=high", "--nodes=2", "--ntasks=2", "true")
    assert_went_on_to_the_same_end(slurm, job_id, "preempted", undisturbed)


@pytest.mark.thorough
def test_the_signal_before_the_time_limit_has_a_job_go_on_later(slurm: Slurm, undisturbed: dict[str, Any]) -> None:
    job_id = slurm.submit("in parts", *LONG, "--nodes", "2")
    slurm.wait_for_step("in parts", 5)
    # As Slurm sends it: to the script alone. Twice is once.
    for _ in range(2):
        slurm.running.call("scancel", "--signal=USR1", "--batch", job_id)
    assert_went_on_to_the_same_end(slurm, job_id, "in parts", undisturbed)


@pytest.mark.thorough
def test_a_time_limit_that_comes_near_has_a_job_go_on_later(slurm: Slurm) -> None:
    # Slurm counts in minutes and may signal one too early, so that this takes one or two.
    job_id = slurm.submit("limited", *ENDLESS, "--nodes", "2", "--time", "2", "--signal-before", "50")
    until(lambda: "resumed from step-" in slurm.said("limited"), lambda: f"{slurm.job(job_id)} {slurm.said('limited')}")
    said = slurm.said("limited")
    assert slurm.job(job_id)["Restarts"] == "1"
    assert "stopped: SIGUSR1" in said
    assert said.index("stopped: SIGUSR1") < said.index("requeueing") < said.index("resumed from step-")
    slurm.running.call("scancel", job_id)
    assert slurm.wait_for_end(job_id, "limited")["JobState"] == "CANCELLED"
    slurm.wait_for_empty_queue()


@pytest.mark.thorough
def test_a_task_that_waits_for_one_that_is_gone_does_not_keep_a_job(slurm: Slurm) -> None:
    # In the place of Python: one task is ended by the signal, as if still loading; the other waits for it for ever.
    program = slurm.folder / "program"
    program.write_text(
        "#!/bin/bash\n"
        "[ -e restarted ] && exit 0\n"
        "[ $SLURM_PROCID = 1 ] && trap 'touch restarted' USR1\n"
        "touch up-$SLURM_PROCID\n"
        "while true; do sleep 0.2; done\n"
    )
    program.chmod(0o755)
    job_id = slurm.submit("uneven", *SHORT, "--nodes", "2", "--python", str(program))
    until(lambda: all((slurm.folder / f"up-{rank}").exists() for rank in range(2)), lambda: slurm.said("uneven"))
    slurm.running.call("scancel", "--signal=USR1", "--batch", job_id)
    job = slurm.wait_for_end(job_id, "uneven")
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "1"), slurm.said("uneven")


@pytest.mark.thorough
def test_a_cancelled_job_ends_for_good_with_a_whole_checkpoint(slurm: Slurm, undisturbed: dict[str, Any]) -> None:
    job_id = slurm.submit("cancelled", *LONG, "--nodes", "2")
    slurm.wait_for_step("cancelled", 5)
    slurm.running.call("scancel", job_id)
    job = slurm.wait_for_end(job_id, "cancelled")
    slurm.wait_for_empty_queue()
    assert (job["JobState"], job["Restarts"]) == ("CANCELLED", "0")
    said = slurm.said("cancelled")
    assert "asked to end for good" in said
    assert "requeueing" not in said
    summary = slurm.summary("cancelled")
    assert summary["status"] == "stopped", said
    assert (slurm.folder / "cancelled" / "checkpoints" / f"step-{summary['step']:08d}" / "manifest.json").is_file()
    slurm.paceline("audit", "cancelled")
    # What it says last is how to go on.
    (command,) = re.findall(rf"newest checkpoint in {re.escape(str(slurm.folder / 'cancelled'))}: (sbatch .+)", said)
    job_id = slurm.command(*shlex.split(command)).split()[-1]
    assert slurm.wait_for_end(job_id, "cancelled")["JobState"] == "COMPLETED", slurm.said("cancelled")
    summary = slurm.summary("cancelled")
    assert (summary["status"], summary["resumes"]) == ("completed", 1)
    assert summary["weights_sha256"] == undisturbed["weights_sha256"]


def test_a_term_to_the_script_alone_reaches_the_run(slurm: Slurm) -> None:
    job_id = slurm.submit("told", *LONG, "--nodes", "2")
    slurm.wait_for_step("told", 5)
    slurm.running.call("scancel", "--signal=TERM", "--batch", job_id)
    job = slurm.wait_for_end(job_id, "told")
    assert (job["JobState"], job["Restarts"], job["ExitCode"]) == ("FAILED", "0", "75:0"), slurm.said("told")
    assert slurm.summary("told")["status"] == "stopped"


@pytest.mark.thorough
def test_a_mistake_that_only_the_job_finds_ends_it(slurm: Slurm) -> None:
    job_id = slurm.submit("other", *SHORT)
    assert slurm.wait_for_end(job_id, "other")["JobState"] == "COMPLETED", slurm.said("other")
    job_id = slurm.submit("other", *SHORT, "seed=5")
    job = slurm.wait_for_end(job_id, "other")
    assert (job["JobState"], job["Restarts"], job["ExitCode"]) == ("FAILED", "0", "2:0")
    assert "holds a run of another recipe: seed was" in slurm.said("other")


@pytest.mark.thorough
def test_what_is_submitted_is_what_a_dry_run_prints(slurm: Slurm) -> None:
    command = ("launch", "slurm", "digits", *RECIPE, *SHORT, "--run-dir", "printed", "--nodes", "2")
    printed = slurm.paceline(*command, "--dry-run")
    assert not (slurm.folder / "printed").exists()
    told = slurm.paceline(*command)
    script = slurm.folder / "printed" / "slurm-job.sh"
    assert told.strip().partition(" (runs ")[0].endswith(str(script))
    assert script.read_text() == printed
    job_id = told.split()[2].rstrip(":")
    assert slurm.running.call("scontrol", "write", "batch_script", job_id, "-").strip() == printed.strip()
    assert slurm.wait_for_end(job_id, "printed")["JobState"] == "COMPLETED", slurm.said("printed")


@pytest.mark.thorough
def test_a_sweep_has_a_run_for_each_value(slurm: Slurm) -> None:
    job_id = slurm.submit("sweep", *SHORT, "--array", "optimizer.lr=0.1,0.3")
    slurm.wait_for_empty_queue()
    assert sorted(path.name for path in (slurm.folder / "sweep").glob("slurm-*.out")) == [
        f"slurm-{job_id}_{index}.out" for index in range(2)
    ]
    digests = {slurm.summary(f"sweep/optimizer.lr={rate}")["weights_sha256"] for rate in ("0.1", "0.3")}
    assert len(digests) == 2


@pytest.mark.thorough
def test_one_run_of_a_sweep_goes_on_later_and_the_others_stay(slurm: Slurm, undisturbed: dict[str, Any]) -> None:
    job_id = slurm.submit("partly", *LONG, "--array", "optimizer.lr=0.2,0.05")
    slurm.wait_for_step("partly/optimizer.lr=0.05", 5)
    slurm.running.call("scancel", "--signal=USR1", "--batch", f"{job_id}_1")
    slurm.wait_for_empty_queue()
    summaries = [slurm.summary(f"partly/optimizer.lr={rate}") for rate in ("0.2", "0.05")]
    said = slurm.said("partly")
    assert [(each["status"], each["resumes"]) for each in summaries] == [("completed", 0), ("completed", 1)], said
    assert summaries[1]["weights_sha256"] == undisturbed["weights_sha256"]


def test_a_job_that_slurm_refuses_is_told_in_one_sentence(slurm: Slurm) -> None:
    with pytest.raises(AssertionError, match=r"Slurm refuses .*slurm-job\.sh: .*invalid partition"):
        slurm.submit("refused", *SHORT, "--partition", "none")


@pytest.mark.thorough
def test_a_job_that_is_preempted_by_sigterm_goes_on_too(tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    with cluster.cluster(send_user_signal=False) as running:
        slurm = Slurm(running, tmp_path)
        job_id = slurm.submit("preempted", *LONG, "--nodes", "2")
        slurm.wait_for_step("preempted", 5)
        running.call("srun", "--partition=high", "--nodes=2", "--ntasks=2", "true")
        assert_went_on_to_the_same_end(slurm, job_id, "preempted", undisturbed)


@pytest.mark.thorough
def test_a_loop_killed_under_srun_ends_with_the_same_bits(slurm: Slurm) -> None:
    source = (HERE.parent / "loops" / "programs" / "accelerated.py").read_text()
    kills = 'loop.rank == 1 and str(step) == os.environ["KILLED_AT"] and os.kill(os.getpid(), 9)'
    program = source.replace("    if loop.rank == 0:", f"    {kills}\n    if loop.rank == 0:")
    summaries = []
    for name, steps in (("whole", ["never"]), ("killed", ["14", "never"])):
        folder = slurm.folder / name
        folder.mkdir()
        (folder / "mine.py").write_text(f"import os\n{program}")
        for step in steps:
            done = subprocess.run(
                ["srun", "--nodes=2", "--ntasks=2", "--kill-on-bad-exit=1", sys.executable, "mine.py"],
                cwd=folder,
                env={**slurm.environment(), "KILLED_AT": step},
                capture_output=True,
                text=True,
                check=False,
                timeout=_WAIT_SECONDS,
            )
            assert (done.returncode == 0) == (step == "never"), done.stderr
        summaries.append(slurm.summary(f"{name}/run"))
    whole, killed = summaries
    assert (killed["status"], killed["world_size"], killed["resumes"]) == ("completed", 2, 1)
    assert (killed["weights_sha256"], killed["ledger"]) == (whole["weights_sha256"], whole["ledger"])
