"""What a task logs from its loss: a mean over samples, the same however they are cut, and in the records."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from paceline.data.batch import Batch

Make = Callable[..., Any]

SHARES = {
    "batch.global_size": 16,
    "train.duration": "12 steps",
    "telemetry.log_every": "3 steps",
    "checkpoint.every": "5 steps",
}


@pytest.fixture
def logging_task(tiny_task: Make) -> Make:
    """A task that logs the mean of its samples' ids, and now and then another number."""

    def make(recipe: Any) -> Any:
        made: Any = tiny_task()(recipe)

        def log(batch: Batch, _: torch.Tensor) -> None:
            made.log("mean_id", float(batch.ids.mean()))
            if 7 in batch.ids:
                made.log("sevens", torch.ones(()))

        made.on_loss = log
        return made

    return make


def records(found: list[dict[str, Any]]) -> Iterator[tuple[int, float, float | None]]:
    for each in found:
        yield each["step"], pytest.approx(each["mean_id"], rel=1e-5), each.get("sevens")


def test_the_mean_is_over_samples_however_they_are_cut(train_tiny: Make, logging_task: Any, events: Make) -> None:
    whole = train_tiny("whole", SHARES, task=logging_task)
    cut = train_tiny("cut", SHARES | {"batch.micro_size": 4}, task=logging_task)
    first = list(records(events(whole.run_dir, "step")))
    assert first == list(records(events(cut.run_dir, "step")))
    assert {sevens for _, _, sevens in first} == {1.0, None}
    per_epoch = sum(each["mean_id"] for each in events(whole.run_dir, "step")) / 4
    assert 15 < per_epoch < 36


def test_a_resume_changes_no_record(train_tiny: Make, logging_task: Any, events: Make) -> None:
    whole = train_tiny("whole", SHARES, task=logging_task)
    train_tiny("resumed", SHARES | {"train.until": "5 steps"}, task=logging_task)
    resumed = train_tiny("resumed", SHARES, task=logging_task)
    kept = [each for each in events(resumed.run_dir, "step") if each["step"] != 5]
    assert [(each["step"], each["mean_id"]) for each in kept] == [
        (each["step"], each["mean_id"]) for each in events(whole.run_dir, "step")
    ]
    assert resumed.summary.weights_sha256 == whole.summary.weights_sha256


@pytest.mark.parametrize("name", ["loss", "step_seconds", "slowest_rank", "throughput_samples_per_second", "two words"])
def test_names_of_records_are_refused(tiny_task: Make, name: str) -> None:
    task = tiny_task()(paceline.load_recipe("digits").recipe)
    with pytest.raises(ValueError, match="choose another"):
        task.log(name, 1.0)


def test_nothing_is_logged_in_evaluation(tiny_task: Make) -> None:
    task = tiny_task()(paceline.load_recipe("digits").recipe)
    with torch.no_grad():
        task.log("mine", 1.0)
    assert task.pop_logged_values() == {}
    task.log("mine", torch.ones((), requires_grad=True) * 2)
    assert task.pop_logged_values() == {"mine": torch.tensor(2.0)}
    assert task.pop_logged_values() == {}


OWN = """
import paceline

class Logging(paceline.ImageClassification):
    def loss(self, model, batch):
        self.log("mean_id", float(batch.ids.mean()))
        if batch.slice.logical_rank:
            self.log("second_rank", 2.0)
        return super().loss(model, batch)
"""


def test_ranks_are_averaged_by_their_samples(
    tiny_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: Make
) -> None:
    (tmp_path / "logging_task.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    means = []
    for processes in (1, 2):
        run = tmp_path / f"run-{processes}"
        overrides = {"task": "logging_task:Logging", "train.duration": "4 steps"}
        monkeypatch.syspath_prepend(str(tmp_path))
        paceline.train(tiny_recipe, overrides=overrides, run_dir=run, processes=processes, quiet=True)
        found = events(run, "step")
        means.append([each["mean_id"] for each in found])
        assert [each.get("second_rank") for each in found] == [2.0 if processes == 2 else None] * 2
    assert means[0] == pytest.approx(means[1], rel=1e-5)
