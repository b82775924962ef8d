"""`paceline launch`: mistakes are found before anything is queued, and what is printed is what would be done."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from calls import Call


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program in the place of sbatch that keeps what it is given, and says what Slurm would."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "sbatch").write_text(f'#!/bin/sh\necho "$@" > {folder}/arguments\necho "41;cluster"\n')
    (folder / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder / "arguments"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["optimizer.rl=1", "--run-dir", "r"], "optimizer.rl"),
        (
            ["batch.global_size=6", "--run-dir", "r", "--nodes", "2", "--tasks-per-node", "2"],
            "over 4 processes gives 1.5",
        ),
        (["--run-dir", "r", "--time", "3"], "--time 3 is 180 s"),
        (["--run-dir", "r", "--array", "optimizer.lr"], "--array optimizer.lr is not KEY=VALUE"),
        (["--run-dir", "r", "--array", "optimizer.lr=0.1,fast"], "found 'fast'"),
        (["--run-dir", "r", "--array", "data.path=a/b,a_b"], "two values would have the same directory"),
        (["--run-dir", "r", "parallel.device=cuda"], "parallel.device=cuda needs a GPU for each process"),
        (["model.name=resnet5O", "--run-dir", "r"], "Did you mean 'resnet50'"),
        (["model.options.widht=3", "--run-dir", "r"], "widht"),
        ([], "Missing option '--run-dir'"),
    ],
)
def test_a_mistake_is_found_before_anything_is_queued(
    paceline_here: Call, tmp_path: Path, sbatch: Path, words: list[str], message: str
) -> None:
    paceline_here("launch", "slurm", "digits", *words).refused(message)
    assert not sbatch.exists()
    assert not (tmp_path / "r").exists()


def test_a_script_is_kept_with_the_run_and_submitted(paceline_here: Call, tmp_path: Path, sbatch: Path) -> None:
    words = ("launch", "slurm", "digits", "--run-dir", "runs/a", "--nodes", "2")
    printed = paceline_here(*words, "--dry-run")
    assert (printed.code, sbatch.exists(), (tmp_path / "runs").exists()) == (0, False, False)
    done = paceline_here(*words)
    script = tmp_path / "runs" / "a" / "slurm-job.sh"
    assert done.out == f"Submitted job 41: {script} (runs {sys.executable} in {tmp_path}, on every node)\n"
    assert sbatch.read_text() == f"--parsable {script}\n"
    assert script.read_text() == printed.out
    assert f"#SBATCH --chdir={tmp_path}\n" in printed.out
    assert f"{sys.executable} -P -m paceline train digits" in printed.out


def test_json_says_where_each_run_will_be(paceline_here: Call, tmp_path: Path, sbatch: Path) -> None:
    reported = paceline_here("launch", "slurm", "digits", "--run-dir", "s", "--array", "seed=1,2", "--json").document
    assert reported["job_id"] == "41"
    assert reported["run_dirs"] == [str(tmp_path / "s" / f"seed={seed}") for seed in (1, 2)]
    assert Path(reported["script"]).read_text() == reported["text"]


def test_a_recipe_for_gpus_can_be_queued_where_there_are_none(paceline_here: Call) -> None:
    words = ("digits", "parallel.device=cuda", "--run-dir=~no-such-user/r", "--gpus-per-task=1", "--tasks-per-node=4")
    done = paceline_here("launch", "slurm", *words, "--dry-run").ended(0)
    assert "#SBATCH --gpus-per-node=4\n" in done.out
    assert "note: Without --cpus-per-task many clusters give each GPU's process one core" in done.err


def test_a_run_begins_beside_its_script(paceline: Call, tmp_path: Path, tiny: tuple[str, ...]) -> None:
    (tmp_path / "r").mkdir()
    for name in ("slurm-job.sh", "slurm-41.out"):
        (tmp_path / "r" / name).write_text("")
    assert paceline("train", "digits", *tiny, "--run-dir", "r").code == 0


def test_the_command_of_several_hosts(paceline_here: Call) -> None:
    words = ("--run-dir", "r", "--nodes", "2", "--processes-per-node", "4", "--rdzv-endpoint", "host1:29500")
    done = paceline_here("launch", "torchrun", "digits", *words, "--python", "python", "--dry-run")
    assert done.out == (
        "python -P -m torch.distributed.run --nnodes=2 --nproc-per-node=4 --max-restarts=3 --rdzv-backend=c10d "
        "--rdzv-endpoint=host1:29500 -m paceline train digits --run-dir r\n"
    )


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_torchrun_trains_on_this_host(paceline: Call, tmp_path: Path, tiny: tuple[str, ...]) -> None:
    paceline("launch", "torchrun", "digits", *tiny, "--run-dir", "r", "--processes-per-node", "2", timeout=280).ended(0)
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert (summary["status"], summary["world_size"]) == ("completed", 2)


KUBERNETES = ("launch", "kubernetes", "digits", "--image", "registry/p:1", "--volume-claim", "disk", "--dry-run")


def test_a_job_of_several_pods(paceline_here: Call) -> None:
    words = ("--run-dir", "/runs/a", "--nodes", "2", "--gpus-per-node", "4", "--processes-per-node", "4")
    service, job = yaml.safe_load_all(paceline_here(*KUBERNETES, *words, "--cpus-per-node", "16").out)
    assert service["spec"]["clusterIP"] == "None"
    assert job["spec"]["completionMode"] == "Indexed"
    assert (job["spec"]["completions"], job["spec"]["parallelism"]) == (2, 2)
    pod = job["spec"]["template"]["spec"]
    assert (pod["restartPolicy"], pod["subdomain"]) == ("Never", service["metadata"]["name"])
    assert pod["terminationGracePeriodSeconds"] == 300
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"cpu": "16", "nvidia.com/gpu": 4}
    assert "--rdzv-endpoint=digits-0.digits:29500" in container["command"]
    wrapped = container["command"].index("python")
    for index, is_host in enumerate((1, 0)):
        reported = subprocess.run(
            [*container["command"][:wrapped], "env"],
            env={"PATH": os.defpath, "JOB_COMPLETION_INDEX": str(index)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert f"PET_RDZV_CONF=is_host={is_host},read_timeout=600\n" in reported.stdout
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/runs", "/dev/shm"}
    claim, memory = pod["volumes"]
    assert claim["persistentVolumeClaim"]["claimName"] == "disk"
    assert memory["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}


@pytest.mark.slow
@pytest.mark.world_size(2)
@pytest.mark.parametrize("kind", ["Job", "PyTorchJob"])
def test_what_the_pods_do_trains_together(
    paceline_here: Call, tmp_path: Path, tiny: tuple[str, ...], kind: str
) -> None:
    """The commands of two pods as two processes here, with the address of this machine in the place of the first's."""
    words = (*tiny, "--run-dir", tmp_path / "r", "--mount", tmp_path, "--nodes", "2", "--kind", kind)
    *_, job = yaml.safe_load_all(paceline_here(*KUBERNETES, *words).out)
    if kind == "Job":
        pods = [(job["spec"]["template"]["spec"], {"JOB_COMPLETION_INDEX": str(index)}) for index in range(2)]
    else:
        pods = [(spec["template"]["spec"], {}) for spec in job["spec"]["pytorchReplicaSpecs"].values()]
    # Below those that a socket gets which asks for any: it is bound only once torchrun has loaded.
    port = random.SystemRandom().randrange(20_000, 32_000)
    substituted = {"python": sys.executable}
    # A name that every pod takes for its own: only what each is told says which of them keeps the store.
    here = re.compile(r"(?<=--rdzv-endpoint=).*")
    ours = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src"), "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [here.sub(f"localhost:{port}", substituted.get(word, word)) for word in container["command"]],
            cwd=tmp_path,
            env=ours | reported | {each["name"]: each["value"] for each in container.get("env", [])},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for spec, reported in reversed(pods)
        for container in spec["containers"]
    ]
    try:
        message = [each.communicate(timeout=240)[0] for each in started]
    finally:
        for each in started:
            each.terminate()  # which torchrun passes on
            each.wait()
    assert [each.returncode for each in started] == [0, 0], message
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert (summary["status"], summary["world_size"]) == ("completed", 2)


def test_a_job_of_one_pod_needs_no_torchrun(paceline_here: Call) -> None:
    (job,) = yaml.safe_load_all(paceline_here(*KUBERNETES, "--run-dir", "/runs/a", "--processes-per-node", "2").out)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["command"] == [
        "python", "-P", "-m", "paceline", "train", "digits", "--run-dir", "/runs/a", "--processes", "2",
    ]  # fmt: skip
    # A mistake would come again, so it ends the job.
    assert {"containerName": "train", "operator": "In", "values": [2]} in [
        rule.get("onExitCodes") for rule in job["spec"]["podFailurePolicy"]["rules"]
    ]


@pytest.mark.parametrize(("nodes", "roles"), [(1, {"Master": 1}), (3, {"Master": 1, "Worker": 2})])
def test_a_pytorch_job(paceline_here: Call, nodes: int, roles: dict[str, int]) -> None:
    words = ("--run-dir", "/runs/a", "--nodes", nodes, "--kind", "PyTorchJob", "batch.global_size=48")
    (job,) = yaml.safe_load_all(paceline_here(*KUBERNETES, *words).out)
    specs = job["spec"]["pytorchReplicaSpecs"]
    assert {role: spec["replicas"] for role, spec in specs.items()} == roles
    for spec in specs.values():
        (container,) = spec["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"
        meeting = "--standalone" if nodes == 1 else "--rdzv-endpoint=digits-master-0:29500"
        is_host = int(spec is specs["Master"])
        reported = [] if nodes == 1 else [{"name": "PET_RDZV_CONF", "value": f"is_host={is_host},read_timeout=600"}]
        assert container.get("env", []) == reported
        assert meeting in container["command"]
