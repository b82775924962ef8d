"""SIGKILL at any moment, the same command again, and nobody can tell: bit for bit, record for record.

A chain is one run that is killed again and again, each time another way, and then let to its end. Each kill finds
the run where the undisturbed one was: what the resume before it has added is compared, not the end alone.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from calls import Call
from own_networks import DIES, OWN, network_that
from paceline.reports.audit import used_samples

from paceline.records.ledger import LedgerEntry, LedgerWriter

pytestmark = pytest.mark.world_size(2)

TRAIN = ("train", "recipe.yaml", "--processes", "2")
KILLS = ("step", "step", "save", "launch", "rank 0", "rank 1")


def newest(run_dir: Path) -> int:
    """The step of the newest checkpoint that is whole; 0 if there is none."""
    names = [each.name for each in (run_dir / "checkpoints").glob("step-????????")]
    return max((int(name.removeprefix("step-")) for name in names), default=0)


def wait_for_the_moment(
    kind: str, launched: Any, reached: Callable[[], int], draw: random.Random, run_dir: Path
) -> str:
    """Wait until it is time for a kind of kill, some steps further than the run has been; returns what it was."""
    if kind == "launch":
        delay = draw.uniform(0.5, 4)
        time.sleep(delay)
        return f"{delay:.3f} s after the launch"
    saved = newest(run_dir)
    step = min(reached() + draw.randint(4, 6), 57)
    launched.wait_for(lambda: reached() >= step)
    if kind == "save":
        launched.wait_for(lambda: any((run_dir / "checkpoints").glob(".saving-*")))
        return f"in a save after the record of step {step}"
    launched.wait_for(lambda: newest(run_dir) > saved)  # which is written in the background, after its record
    delay = draw.uniform(0, 0.1)
    time.sleep(delay)
    return f"{delay:.3f} s after the record of step {step}"


def kill_one(launched: Any, victim: int) -> None:
    """One rank is killed: the launch ends soon, says whom it lost first, and leaves nothing."""
    os.kill(launched.ranks()[victim], signal.SIGKILL)
    begun = time.monotonic()
    done = launched.wait(60)
    assert time.monotonic() - begun < 30
    assert done.code == 1, done.err
    first = done.err.splitlines()[0]
    assert f"rank {victim}" in first, done.err
    assert "SIGKILL" in first, done.err
    launched.seconds_until_alone()
    assert launched.leftovers() == []


@pytest.mark.slow
@pytest.mark.real_processes
def test_killed_again_and_again(
    studio: Path,
    start: Call,
    run: Call,
    steps_recorded: Call,
    same_so_far: Call,
    same_outcome: Call,
    summary: Call,
    audited: Call,
) -> None:
    run_dir = studio / "chain"
    command = (*TRAIN, "--run-dir", run_dir)
    draw = random.Random(1)
    saved = 0
    for kind in draw.sample(KILLS, len(KILLS)):
        launched = start(*command, where=studio)
        moment = wait_for_the_moment(kind, launched, lambda: max(steps_recorded(run_dir), 0), draw, run_dir)
        if kind.startswith("rank"):
            kill_one(launched, int(kind[-1]))
        else:
            launched.kill()
        before, saved = saved, same_so_far(run_dir)
        print(f"{kind}: killed {moment}; newest checkpoint: step {saved}")
        assert saved > before or kind in ("launch", "save")  # there was a new checkpoint to compare
    run(*command, where=studio).ended(0)
    same_outcome(run_dir)
    # Saved with the steps: of a resume that saved none, as may be after "launch" and "save", nothing is left.
    assert len(KILLS) - 2 <= summary(run_dir)["resumes"] <= len(KILLS)
    audited(run_dir)


DEADLY_MODEL = ("model.name=deadly:Net", *OWN)


@pytest.mark.world_size(1)
@pytest.mark.everyday
def test_killed_in_every_part_of_a_window(studio: Path, run: Call, run_here: Call, same_end: Call) -> None:
    """Four micro-batches a step, six steps an epoch: forwards 25 to 28 are step 7, the second epoch's first."""
    (studio / "deadly.py").write_text(network_that(DIES))
    shortened = ("train.duration=9 steps", "checkpoint.every=2 steps", "evaluate.every=4 steps")
    command = ("train", "recipe.yaml", *DEADLY_MODEL, *shortened, "--run-dir")
    whole, run_dir = studio / "window-whole", studio / "window-killed"
    assert run_here(*command, whole).code == 0
    # The first leaves nothing to go on from; at the second the save of the sixth step may still be under way.
    for forward, saved in ((1, {0}), (26, {4, 6})):
        killed = run(*command, run_dir, where=studio, variables={"DIE_AT": str(forward)})
        assert killed.code == -signal.SIGKILL
        found = (run_dir / "checkpoints").glob("step-????????")
        assert max((int(path.name.removeprefix("step-")) for path in found), default=0) in saved
    assert run_here(*command, run_dir).code == 0
    same_end(run_dir, whole)


@pytest.mark.world_size(1)
@pytest.mark.everyday
def test_skipped_steps_are_recorded_once(
    studio: Path, run: Call, run_here: Call, summary: Call, same_end: Call
) -> None:
    """fp16 steps that overflow use up samples but do not count: killed among them, nothing is told twice."""
    (studio / "deadly.py").write_text(network_that(DIES))
    half = ("train.precision=fp16", "train.grad_scaler.init_scale=16777216.0", "telemetry.log_every=1 steps")
    shortened = ("train.duration=16 steps", "checkpoint.every=4 steps", "batch.micro_size=16")
    command = ("train", "recipe.yaml", *DEADLY_MODEL, *half, *shortened, "--run-dir")
    whole, run_dir = studio / "half-whole", studio / "half-killed"
    assert run_here(*command, whole).code == 0
    skipped = 16 - summary(whole)["step"]
    assert skipped >= 7  # the kill at the seventh batch is among them
    assert run(*command, run_dir, where=studio, variables={"DIE_AT": "7"}).code == -signal.SIGKILL
    assert run_here(*command, run_dir).code == 0
    same_end(run_dir, whole)


@pytest.mark.slow
@pytest.mark.world_size(3)
def test_three_ranks_sum_in_the_same_order_after_a_resume(studio: Path, run: Call, summary: Call) -> None:
    """With three ranks or more a sum depends on the order of its terms, and that on how gradients are packed."""
    changes = ("batch.global_size=24", "batch.micro_size=8", "train.duration=24 steps", "data.workers=0")
    command = ("train", "recipe.yaml", *changes, "checkpoint.keep=9", "--processes", "3", "--run-dir")
    whole, run_dir = studio / "three-whole", studio / "three-resumed"
    assert run(*command, whole, where=studio).code == 0
    shutil.copytree(whole, run_dir)
    done = run(*command, run_dir, "--resume", run_dir / "checkpoints" / "step-00000008", where=studio)
    assert (done.code, "resumed from step-00000008" in done.out) == (0, True), done.err
    assert summary(run_dir)["weights_sha256"] == summary(whole)["weights_sha256"]


Entries = list[LedgerEntry]


def with_first_id(entries: Entries, first: Callable[[int], int]) -> Entries:
    """One of the records with another first sample."""
    ids = entries[4].ids.copy()
    ids[0] = first(int(ids[0]))
    return [*entries[:4], replace(entries[4], ids=ids), *entries[5:]]


def swapped(entries: Entries) -> Entries:
    """The samples of the second and third step of an epoch in each other's place."""
    other = {2: 3, 3: 2}
    return sorted((replace(each, step=other.get(each.step, each.step)) for each in entries), key=lambda each: each.step)


FORGERIES: dict[str, tuple[Callable[[Entries], Entries], str]] = {
    "a record twice": (lambda entries: [*entries[:5], entries[4], *entries[5:]], "beyond its first"),
    "a record less": (lambda entries: [*entries[:4], *entries[5:]], "never used"),
    "the first record less": (lambda entries: entries[1:], "never used"),
    "the last record less": (lambda entries: entries[:-1], "never used"),
    "another sample": (lambda entries: with_first_id(entries, lambda sample: sample ^ 1), "out of order"),
    "no such sample": (lambda entries: with_first_id(entries, lambda sample: sample + 90), "has 90 samples"),
    "two steps swapped": (swapped, "out of order"),
    "a step more": (lambda entries: [*entries, replace(entries[-1], step=61)], "after step 60"),
    "a checksum that is wrong": (lambda entries: entries, "damaged"),
    "nothing at all": (lambda entries: [], "never used"),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_doctored_ledger_is_found_out(undisturbed: Path, tmp_path: Path, run_here: Call, name: str) -> None:
    forge, objection = FORGERIES[name]
    copy = tmp_path / "copy"
    shutil.copytree(undisturbed, copy, ignore=shutil.ignore_patterns("checkpoints"))
    path = copy / "ledger" / "rank-00001.ids"
    entries = list(used_samples(copy, 1))
    assert len(entries) == 60  # one record a step, of two micro-batches
    path.write_bytes(b"")
    with closing(LedgerWriter(path)) as writer:
        for each in forge(entries):
            writer.append(step=each.step, epoch=each.epoch, ids=each.ids)
    if objection == "damaged":
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    told, as_json = run_here("audit", copy), run_here("audit", copy, "--json")
    assert (told.code, as_json.code, told.err, as_json.err) == (1, 1, "", "")
    assert objection in told.out
    assert "Passed" not in told.out
    document = as_json.document
    assert document["passed"] is False
    assert any(objection in each for each in document["objections"])


def test_an_honest_ledger_passes(undisturbed: Path, run: Call) -> None:
    done = run("audit", undisturbed, "--json")
    assert (done.code, done.err) == (0, "")
    document = done.document
    assert document["passed"] is True
    assert (document["epochs_complete"], document["duplicates"], document["missing"]) == (10, 0, 0)
