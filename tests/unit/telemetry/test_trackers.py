"""TensorBoard's files hold each scalar once, under its name, after kills and resumes too."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from paceline.errors import RecipeError
from paceline.records.events import EvaluationEvent, IncidentEvent, StepEvent
from paceline.telemetry.trackers import TensorBoardTracker, check_trackers


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {
        tag: [(one.step, round(one.value, 5)) for one in accumulator.Scalars(tag)]
        for tag in accumulator.Tags()["scalars"]
    }


def step_event(step: int, loss: float) -> dict[str, object]:
    event = StepEvent(step=step, epoch=1, samples=step, loss=loss, lr=0.5, timings={"step_seconds": 0.25})
    return event.to_json()


def test_scalars_carry_the_names_of_the_records(tmp_path: Path) -> None:
    tracker = TensorBoardTracker(tmp_path / "tensorboard")
    evaluation = EvaluationEvent(
        step=10, epoch=1, split="validation", weights="ema", samples=7, seconds=0.5, metrics={"top1_accuracy": 97.5}
    )
    incident = IncidentEvent(step=10, incident="broken_sample", message="…")
    tracker.write([step_event(10, 1.5), evaluation.to_json(), incident.to_json()])
    tracker.close("completed")
    assert scalars(tmp_path / "tensorboard") == {
        "train/loss": [(10, 1.5)],
        "train/lr": [(10, 0.5)],
        "train/step_seconds": [(10, 0.25)],
        "evaluation/ema/seconds": [(10, 0.5)],
        "evaluation/ema/top1_accuracy": [(10, 97.5)],
    }


@pytest.mark.parametrize("start_step", [0, 20, 40])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_resumed_run_has_each_step_once(tmp_path: Path, start_step: int, lost: int) -> None:
    """Also one that was killed before its last records were written."""
    steps = [10, 20, 30, 40]
    first = TensorBoardTracker(tmp_path)
    first.write([step_event(step, 1.0) for step in steps[: len(steps) - lost]])
    # Killed here: it is never closed. A process takes longer to start; files are read in the order of their seconds.
    time.sleep(1.01 - time.time() % 1)
    second = TensorBoardTracker(tmp_path, start_step=start_step)
    earlier = [step_event(step, 1.0) for step in steps if step <= start_step]
    second.write([*earlier, step_event(start_step + 10, 2.0), step_event(start_step + 20, 2.0)])
    second.close("completed")
    losses = scalars(tmp_path)["train/loss"]
    assert losses == [(each["step"], 1.0) for each in earlier] + [(start_step + 10, 2.0), (start_step + 20, 2.0)]
    first.close("")


def test_files_of_versions_without_a_note(tmp_path: Path) -> None:
    first = TensorBoardTracker(tmp_path)
    first.write([step_event(step, 1.0) for step in (10, 20, 30)])
    first.close("")
    (tmp_path / "paceline.json").unlink()
    time.sleep(1.01 - time.time() % 1)
    second = TensorBoardTracker(tmp_path, start_step=20)
    second.write([step_event(step, 2.0) for step in (10, 20, 30)])
    second.close("completed")
    assert scalars(tmp_path)["train/loss"] == [(10, 1.0), (20, 2.0), (30, 2.0)]


def test_no_file_and_no_library_before_the_first_record(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from paceline.telemetry.trackers import TrackerFacts, build_trackers\n"
        "trackers = build_trackers(['tensorboard'], Path(sys.argv[1]), TrackerFacts())\n"
        "assert trackers[0].write({'event': 'start', 'step': 0}) == ''\n"
        "assert trackers[0].close(60) == ''\n"
        "assert not {'torch', 'tensorboard'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=60)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_tracker_is_told_with_what_there_is() -> None:
    with pytest.raises(
        RecipeError, match=r"'tensorbord'.*available are: csv, mlflow, tensorboard, wandb. Did you mean 'tensorboard'\?"
    ):
        check_trackers(["tensorbord"])


def test_without_tensorboard_only_who_asks_for_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    check_trackers(["tensorboard"], are_asked_for=False)
    with pytest.raises(RecipeError, match=r"pip install 'paceline\[vision\]'"):
        check_trackers(["tensorboard"])


def test_one_that_is_not_installed_is_told_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RecipeError, match=r"'wandb', which is not installed: run pip install 'paceline\[wandb\]'"):
        check_trackers(["wandb"])


@pytest.mark.needs("mlflow", "sqlalchemy", "alembic")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the libraries
def test_a_database_that_was_never_whole_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.telemetry.mlflow_tracker import MlflowTracker

    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as database:
        database.execute("create table spans (name text)")
    tracker = MlflowTracker(tmp_path, "name", {"seed": 0}, {})
    tracker.write([step_event(10, 1.5)])
    tracker.close("stopped")
    MlflowTracker(tmp_path, "name", {"seed": 0}, {})
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as database:
        assert ("train/loss",) in database.execute("select distinct key from metrics").fetchall()
