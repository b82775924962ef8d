"""What goes wrong on one rank ends all of them soon, with that rank's reason first and said once."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from calls import Call
from own_networks import OWN, network_that

pytestmark = pytest.mark.world_size(2)

SECONDS_TO_END = 90

# Fails on the rank and in the way that the environment names, in the tenth forward pass: one is the rehearsal, two
# are a step, so it is in the fifth step, after the checkpoint of the fourth and before an evaluation.
FRAIL = network_that("""
now = self.passes == 10 and "FAIL_ON" in os.environ
if now and os.environ["RANK"] != os.environ["FAIL_ON"] and os.environ["FAIL_HOW"] == "leave the other":
    time.sleep(120)
if now and os.environ["RANK"] == os.environ["FAIL_ON"]:
    match os.environ["FAIL_HOW"]:
        case "raise":
            raise ZeroDivisionError("the tenth is too many")
        case "exit" | "leave the other":
            os._exit(3)
        case "nan":
            x = x * float("nan")
""")
FRAIL_MODEL = ("model.name=frail:Net", *OWN, "train.precision=fp32")
TRAIN = ("train", "recipe.yaml", "--processes", "2", *FRAIL_MODEL, "train.duration=12 steps", "--run-dir")


@pytest.fixture
def frail(studio: Path, start: Call) -> Call:
    """Train with a failure, which must come soon, and return how it ended."""
    (studio / "frail.py").write_text(FRAIL)

    def trainer(run_dir: Path, rank: int, how: str, *overrides: str) -> Any:
        launched = start(*TRAIN, run_dir, *overrides, where=studio, variables={"FAIL_ON": str(rank), "FAIL_HOW": how})
        # From here on the step is a matter of milliseconds: what is measured is the end.
        launched.wait_for((run_dir / "events.jsonl").exists)
        begun = time.monotonic()
        done = launched.wait(SECONDS_TO_END)
        print(f"ended after {time.monotonic() - begun:.1f} s\n{done.err}")
        launched.seconds_until_alone(5)
        assert launched.leftovers() == []
        return done

    return trainer


@pytest.mark.slow
def test_an_exception_on_one_rank(studio: Path, frail: Call, run: Call, run_here: Call, summary: Call) -> None:
    run_dir = studio / "raise"
    done = frail(run_dir, 1, "raise").ended(1)
    lines = done.err.splitlines()
    assert lines[0] == "paceline: rank 1 failed first:"
    assert lines[1].startswith("Traceback")
    assert done.err.count("Traceback") == 1
    assert "ZeroDivisionError: the tenth is too many" in done.err
    assert 'frail.py", line' in done.err
    assert summary(run_dir)["status"] == "failed"
    # The fault repaired, the same command goes on from the checkpoint before it.
    assert "resumed from step-00000004" in run(*TRAIN, run_dir, where=studio).ended(0).out
    assert run_here("audit", run_dir).code == 0


@pytest.mark.everyday
def test_a_rank_that_ends_without_a_word(studio: Path, frail: Call) -> None:
    done = frail(studio / "exit", 1, "exit")
    assert done.code not in (0, 2, 75)
    assert "rank 1" in done.err.splitlines()[0]
    assert "3" in done.err.splitlines()[0]


@pytest.mark.thorough
@pytest.mark.slow
def test_a_rank_that_cannot_notice_is_ended(studio: Path, frail: Call) -> None:
    """Not in a collective but in code of its own, the other rank does not learn that it is alone."""
    done = frail(studio / "leave", 1, "leave the other", "data.backend=pytorch", "data.workers=1").ended(1)
    assert done.err.splitlines() == ["paceline: rank 1 ended with exit code 3 and no message"]


def test_a_loss_that_is_no_number(studio: Path, frail: Call, summary: Call) -> None:
    run_dir = studio / "nan"
    done = frail(run_dir, 1, "nan").ended(1)
    assert done.err.startswith("paceline: the training loss became nan on rank 1 at step 5; lower optimizer.lr")
    assert done.err.count("\n") == 1
    assert summary(run_dir)["status"] == "failed"
    # No checkpoint may hold what the failed step made of the weights, the best of a first evaluation or not.
    assert [path.name for path in (run_dir / "checkpoints").glob("step-*")] == ["step-00000004"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (("batch.global_size=15", "batch.micro_size=auto"), "batch.global_size=15 over 2 processes"),
        (("optimizer.learning_rate=1",), "optimizer.learning_rate"),
        pytest.param(("data.path=nowhere",), "nowhere", marks=pytest.mark.thorough),
    ],
)
def test_a_mistake_is_told_once(studio: Path, run: Call, changes: tuple[str, ...], named: str, tmp_path: Path) -> None:
    done = run("train", "recipe.yaml", *changes, "--processes", "2", "--run-dir", tmp_path / "run", where=studio)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("paceline: ")
    assert done.err.count("\n") == 1, done.err
    assert named in done.err
    assert not list(tmp_path.rglob("step-*"))


def test_a_broken_image_is_told_once(studio: Path, run: Call, run_here: Call, tmp_path: Path) -> None:
    broken = studio / "photos" / "train" / "green" / "007.png"
    whole = broken.read_bytes()
    try:
        broken.write_bytes(whole[:200].ljust(len(whole), b"?"))
        command = ("train", "recipe.yaml", "--processes", "2", "--run-dir", tmp_path / "run")
        refused = run(*command, "train.duration=1 epochs", where=studio)
        allowed = run(*command, "train.duration=2 epochs", "data.max_broken=1", where=studio)
    finally:
        broken.write_bytes(whole)
    assert (refused.code, refused.err.count("\n"), refused.err.count("007.png")) == (2, 4, 1), refused.err
    assert "data.on_bad=skip" in refused.err
    assert allowed.code == 0, allowed.err
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    # Other work on the machine may add an incident of a slow rank.
    broken_images = [event["path"] for event in events if event.get("incident") == "broken_sample"]
    assert [path.endswith("007.png") for path in broken_images] == [True]
    audit = run_here("audit", tmp_path / "run", "--json").document
    assert (audit["passed"], audit["broken"], audit["missing"]) == (True, 2, 0)


def test_two_broken_images_end_both_ranks_at_an_evaluation(studio: Path, run: Call, tmp_path: Path) -> None:
    """Rank 1 has read the first of them since the last record, and rank 0 does not know of it yet."""
    photos = shutil.copytree(studio / "photos", tmp_path / "photos")
    for path in (photos / "train/red/028.png", photos / "val/green/001.png"):
        content = path.read_bytes()
        path.write_bytes(content[:48] + bytes(12) + content[60:])  # found only when it is read
    changes = ("data.path=photos", "data.max_broken=1", "telemetry.log_every=5 steps", "evaluate.every=4 steps")
    done = run("train", studio / "recipe.yaml", *changes, "--processes", "2", "--run-dir", "run", where=tmp_path)
    assert (done.code, done.err.count("\n"), "2 broken sample(s) so far" in done.err) == (2, 1, True), done.err


@pytest.mark.world_size(1)
def test_a_long_temporary_directory(studio: Path, run: Call, tmp_path: Path) -> None:
    """Clusters name it at length, and a socket's path may have 107 characters: it works, or is refused in words."""
    long = tmp_path / ("t" * 90)
    long.mkdir()
    command = ("train", "recipe.yaml", "train.duration=6 steps", "--run-dir", tmp_path / "run")
    done = run(*command, where=studio, timeout=250, variables={"TMPDIR": str(long)})
    assert done.code == 0 or (done.code == 2 and "TMPDIR" in done.err and done.err.count("\n") == 1)
