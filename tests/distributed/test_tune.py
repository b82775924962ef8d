"""A search that is killed goes on with the run that was under way."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from calls import Call

pytestmark = pytest.mark.needs("optuna")


def test_killed_it_goes_on_with_the_run_that_was_under_way(
    start: Call, run: Call, summary: Call, tmp_path: Path
) -> None:
    (tmp_path / "search.yaml").write_text("optimizer.lr: {low: 0.001, high: 0.1, log: true}\n")
    short = ("train.duration=8 epochs", "evaluate.every=2 epochs", "checkpoint.every=20 steps")
    words = ("tune", "digits", *short, "--search", "search.yaml", "--output", "out", "--trials")
    launched = start(*words, "2")
    launched.wait_for(lambda: list(tmp_path.glob("out/trial-001/checkpoints/step-*")))
    launched.process.send_signal(signal.SIGKILL)
    launched.wait(60)
    launched.seconds_until_alone()
    before = summary(tmp_path / "out" / "trial-000")
    trials = run(*words, "3", "--json", timeout=200).ended(0).document["trials"]
    assert [(each["run"], each["state"]) for each in trials] == [(f"trial-00{n}", "complete") for n in range(3)]
    assert summary(tmp_path / "out" / "trial-000") == before
    assert [summary(tmp_path / "out" / each["run"])["resumes"] for each in trials] == [0, 1, 0]
    assert len({each["values"]["optimizer.lr"] for each in trials}) == 3
