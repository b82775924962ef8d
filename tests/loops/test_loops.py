"""Loops as people write them, killed at random steps: the weights are those of an undisturbed run."""

from __future__ import annotations

import difflib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fork_server
import pytest

from paceline.reports.audit import audit_run

PROGRAMS = Path(__file__).parent / "programs"
SOURCES = Path(__file__).parents[2] / "src"
NAMES = ("gan", "two_sets", "contrastive", "ddp_by_hand", "accelerated", "shards")
SECONDS = 280


def environment(folder: Path, rank: int, ranks: int) -> dict[str, str]:
    alone = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(SOURCES),
        "OMP_NUM_THREADS": "1",
    }
    world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    # Each start meets in a file of its own.
    meet = folder / f"meet-{len(list(folder.glob('meet-*')))}"
    return (
        alone
        | {"PACELINE_RENDEZVOUS": f"file://{meet}", "GLOO_SOCKET_IFNAME": "lo"}
        | {name: str(value) for name, value in world.items()}
    )


@contextmanager
def started(name: str, folder: Path, ranks: int = 1) -> Iterator[list[subprocess.Popen[str]]]:
    """The ranks of a program; what is left of them is killed in the end."""
    folder.mkdir(exist_ok=True)
    settings = [environment(folder, rank, ranks) for rank in range(ranks)]
    (folder / settings[0]["PACELINE_RENDEZVOUS"].removeprefix("file://")).touch()
    with (folder / "errors").open("a") as errors:
        processes = [
            fork_server.Popen(
                [sys.executable, str(PROGRAMS / f"{name}.py")],
                cwd=folder,
                text=True,
                stdout=subprocess.DEVNULL if rank else subprocess.PIPE,
                stderr=errors,
                env=own,
            )
            for rank, own in enumerate(settings)
        ]
        try:
            yield processes
        finally:
            for process in processes:
                process.kill()
                process.communicate()


def steps_of(process: subprocess.Popen[str]) -> Iterator[int]:
    """The steps that a program says it has taken, as it says so."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step "):
            yield int(line.split()[1])


def finish(name: str, folder: Path, ranks: int = 1) -> dict[str, Any]:
    """Run a program to its end, and return its summary."""
    with started(name, folder, ranks) as processes:
        for process in processes:
            process.communicate(timeout=SECONDS)
        codes = [process.returncode for process in processes]
    assert codes == [0] * ranks, (folder / "errors").read_text()
    summary: dict[str, Any] = json.loads((folder / "run" / "summary.json").read_text())
    return summary


def interrupt(name: str, folder: Path, step: int, ranks: int, number: signal.Signals = signal.SIGKILL) -> list[int]:
    """Run a program up to a step, and send a signal to one of its ranks; a launcher then kills the others."""
    with started(name, folder, ranks) as processes:
        for taken in steps_of(processes[0]):
            if taken >= step:
                break
        victim = processes[step % ranks]
        victim.send_signal(number)
        if number != signal.SIGKILL:
            return [process.wait(timeout=SECONDS) for process in processes]
    return []


def killed_at_a_step(folder: Path, rank: int) -> Path:
    """Write a program of which one rank kills itself at the step KILLED_AT."""
    kills = f'loop.rank == {rank} and str(step) == os.environ["KILLED_AT"] and os.kill(os.getpid(), 9)'
    program = (
        (PROGRAMS / "accelerated.py")
        .read_text()
        .replace("    if loop.rank == 0:", f"    {kills}\n    if loop.rank == 0:")
    )
    path = folder / "mine.py"
    path.write_text(f"import os\n{program}")
    return path


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    done: dict[tuple[str, int], dict[str, Any]] = {}

    def summary(name: str, ranks: int) -> dict[str, Any]:
        if (name, ranks) not in done:
            folder = tmp_path_factory.mktemp(f"{name}-{ranks}")
            done[name, ranks] = finish(name, folder, ranks)
        return done[name, ranks]

    return summary


def check_equal(folder: Path, summary: dict[str, Any], expected: dict[str, Any]) -> None:
    assert summary["status"] == "completed"
    assert summary["weights_sha256"] == expected["weights_sha256"]
    assert summary["metrics"] == expected["metrics"]
    assert audit_run(folder / "run").passed


def check_kills(name: str, ranks: int, kills: int, undisturbed: Any, runs: Path) -> None:
    expected, draws = undisturbed(name, ranks), random.Random(f"{name} {ranks}")
    # From step 7 on there is a checkpoint: the second save, after step 6, waits for the first.
    for step in sorted(draws.sample(range(9, expected["step"]), kills)):
        interrupt(name, runs / "a", step, ranks)
    summary = finish(name, runs / "a", ranks)
    assert summary["resumes"] > 0
    check_equal(runs / "a", summary, expected)


@pytest.mark.everyday
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_loop_ends_with_the_same_bits(ranks: int, undisturbed: Any, runs: Path) -> None:
    check_kills("ddp_by_hand", ranks, 1, undisturbed, runs)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "ranks"),
    [*((name, 1) for name in NAMES), ("gan", 2), ("ddp_by_hand", 2), ("accelerated", 3), ("shards", 2)],
)
def test_killed_again_and_again_a_loop_ends_with_the_same_bits(
    name: str, ranks: int, undisturbed: Any, runs: Path
) -> None:
    check_kills(name, ranks, 2, undisturbed, runs)


@pytest.mark.thorough
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_no_kill_changes_anything(ranks: int, undisturbed: Any, runs: Path) -> None:
    # Each program once; with THOROUGH=1, four times.
    kills = (4 if os.environ.get("THOROUGH") == "1" else 1) * len(NAMES)
    draws, names = random.Random(ranks), [NAMES[index % len(NAMES)] for index in range(kills)]
    resumes = 0
    for number, name in enumerate(names):
        expected, folder = undisturbed(name, ranks), runs / str(number)
        interrupt(name, folder, draws.randrange(1, expected["step"]), ranks)
        summary = finish(name, folder, ranks)
        check_equal(folder, summary, expected)
        resumes += summary["resumes"]
        shutil.rmtree(folder)
    assert resumes >= kills // 4 * 2  # the others were killed before their first checkpoint


@pytest.mark.everyday
def test_a_signal_to_one_rank_stops_all_with_a_checkpoint(undisturbed: Any, runs: Path) -> None:
    check_signal("ddp_by_hand", 2, signal.SIGTERM, undisturbed, runs)


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "ranks", "number"), [("gan", 1, signal.SIGINT), ("accelerated", 3, signal.SIGTERM)])
def test_signals_stop_loops_of_other_kinds(
    name: str, ranks: int, number: signal.Signals, undisturbed: Any, runs: Path
) -> None:
    check_signal(name, ranks, number, undisturbed, runs)


def check_signal(name: str, ranks: int, number: signal.Signals, undisturbed: Any, runs: Path) -> None:
    assert interrupt(name, runs / "a", 8, ranks, number) == [75] * ranks
    stopped = json.loads((runs / "a" / "run" / "summary.json").read_text())
    assert stopped["status"] == "stopped"
    assert (runs / "a" / "run" / "checkpoints" / f"step-{stopped['step']:08d}").is_dir()
    summary = finish(name, runs / "a", ranks)
    assert summary["resumes"] == 1
    check_equal(runs / "a", summary, undisturbed(name, ranks))


def test_resume_runs_the_recorded_program_only_if_it_is_trusted(undisturbed: Any, runs: Path) -> None:
    own = {name: value for name, value in environment(runs, 0, 1).items() if name in ("PATH", "PYTHONPATH")}
    own |= {"OMP_NUM_THREADS": "1"}

    def call(*words: str, cwd: Path = runs) -> Any:
        return fork_server.run(
            [sys.executable, *words], env=own, text=True, capture_output=True, timeout=SECONDS, cwd=cwd
        )

    program = (PROGRAMS / "ddp_by_hand.py").read_text()
    stops = "    step == 7 and os.kill(os.getpid(), 15)\n"
    (runs / "mine.py").write_text("import os\n" + program.replace("    if loop.rank", f"{stops}    if loop.rank"))
    assert call("mine.py").returncode == 75
    refused = call("-m", "paceline", "resume", str(runs / "run"))
    assert refused.returncode == 2
    assert f"cd {runs} && " in refused.stderr
    assert "mine.py" in refused.stderr
    resumed = call("-m", "paceline", "resume", str(runs / "run"), "--trust-code", "--json")
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads(resumed.stdout)["weights_sha256"] == undisturbed("ddp_by_hand", 1)["weights_sha256"]


@pytest.mark.parametrize("name", NAMES)
def test_at_most_ten_lines_differ_from_the_loop_without(name: str) -> None:
    plain, ours = (
        [line.strip() for line in (PROGRAMS / f"{each}.py").read_text().splitlines() if line.strip()]
        for each in (f"{name}_plain", name)
    )
    blocks = difflib.SequenceMatcher(a=plain, b=ours, autojunk=False).get_matching_blocks()
    assert 0 < len(ours) - sum(block.size for block in blocks) <= 10


@pytest.mark.thorough
@pytest.mark.needs("accelerate")
def test_killed_under_the_launcher_of_accelerate_a_loop_ends_with_the_same_bits(undisturbed: Any, runs: Path) -> None:
    # With --cpu it starts several processes only through mpirun; with --multi_gpu it starts them without a GPU too.
    words = ["accelerate", "launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
    words += ["--mixed_precision", "no", "--dynamo_backend", "no", str(killed_at_a_step(runs, rank=1))]
    own = {name: value for name, value in environment(runs, 0, 2).items() if name in ("PATH", "PYTHONPATH")}

    def launch(step: str) -> subprocess.CompletedProcess[str]:
        settings = {**own, "HF_HOME": str(runs), "OMP_NUM_THREADS": "1", "KILLED_AT": step}
        return subprocess.run(
            words, cwd=runs, env=settings, capture_output=True, text=True, check=False, timeout=SECONDS
        )

    assert launch("14").returncode != 0
    done = launch("never")
    assert done.returncode == 0, done.stderr
    summary = json.loads((runs / "run" / "summary.json").read_text())
    assert (summary["world_size"], summary["resumes"]) == (2, 1)
    check_equal(runs, summary, undisturbed("accelerated", 2))


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun")
def test_killed_under_mpirun_a_loop_ends_with_the_same_bits(undisturbed: Any, runs: Path) -> None:
    words = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", "-x", "KILLED_AT"]
    words += [sys.executable, str(killed_at_a_step(runs, rank=1))]
    own = {name: value for name, value in environment(runs, 0, 2).items() if name in ("PATH", "PYTHONPATH")}

    def launch(step: str) -> subprocess.CompletedProcess[str]:
        settings = {**own, "OMP_NUM_THREADS": "1", "KILLED_AT": step}
        return subprocess.run(
            words, cwd=runs, env=settings, capture_output=True, text=True, check=False, timeout=SECONDS
        )

    assert launch("14").returncode != 0
    done = launch("never")
    assert done.returncode == 0, done.stderr
    summary = json.loads((runs / "run" / "summary.json").read_text())
    assert (summary["world_size"], summary["resumes"]) == (2, 1)
    check_equal(runs, summary, undisturbed("accelerated", 2))
