"""What a call of ``paceline.train`` leaves behind in the caller's process: nothing."""

from __future__ import annotations

import functools
import importlib
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from paceline.errors import RecipeError, RunDirectoryError, TrainingError
from paceline.host.system import STOP_SIGNALS

Make = Callable[..., Any]


def settings() -> dict[str, Any]:
    return {
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "benchmark": torch.backends.cudnn.benchmark,
        "products": (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32),
        "handlers": [signal.getsignal(number) for number in STOP_SIGNALS],
    }


@pytest.fixture
def of_ones_own() -> Iterator[dict[str, Any]]:
    """Settings that no run would choose; undone in the end."""
    threads, handlers = torch.get_num_threads(), [signal.getsignal(number) for number in STOP_SIGNALS]
    torch.set_num_threads(3)
    torch.set_float32_matmul_precision("high")
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: None)
    yield settings()
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(mode=False)
    torch.set_float32_matmul_precision("highest")
    for number, handler in zip(STOP_SIGNALS, handlers, strict=True):
        signal.signal(number, handler)


def test_settings_of_the_process_are_the_caller_s_again(
    of_ones_own: dict[str, Any], tiny_recipe: Path, tmp_path: Path, tiny_task: Make
) -> None:
    seen: list[dict[str, Any]] = []
    paceline.train(
        tiny_recipe,
        overrides={"train.duration": "1 steps", "train.deterministic": True, "train.float32_matmul": "highest"},
        run_dir=tmp_path,
        task=tiny_task(on_loss=lambda *_: seen.append(settings())),
        quiet=True,
    )
    assert (seen[0]["threads"], seen[0]["deterministic"]) == (1, True)
    assert seen[0]["products"] == ("highest", False)
    assert seen[0]["handlers"] != of_ones_own["handlers"]
    assert settings() == of_ones_own


def test_they_are_also_after_a_failure(
    of_ones_own: dict[str, Any], tiny_recipe: Path, tmp_path: Path, tiny_task: Make
) -> None:
    def fail(*_: Any) -> None:
        raise TrainingError("no more")

    with pytest.raises(TrainingError, match="no more"):
        paceline.train(tiny_recipe, run_dir=tmp_path, task=tiny_task(on_loss=fail), quiet=True)
    assert settings() == of_ones_own


def test_the_history_is_the_records(train_tiny: Make) -> None:
    result = train_tiny("run", {"train.ema": 0.9})
    scored, steps = result.history(), result.history("step")
    assert [(each["step"], each["weights"]) for each in scored] == [(4, "model"), (4, "ema"), (8, "model"), (8, "ema")]
    assert scored[-1]["top1_accuracy"] == result.metrics["last"]["ema"]["top1_accuracy"]
    assert [each["step"] for each in steps] == [2, 4, 6, 8]
    assert not [key for key in scored[0] if key.startswith("input_")]
    page = result._repr_html_()
    assert page.count("<tr>") == 1 + len(scored) / 2  # each epoch once
    assert [line.count(",") for line in re.findall('points="([^"]*)"', page)] == [2, 4, 2]  # top-1; loss of both
    assert ">top-1 accuracy, %<" in page


def test_a_wrong_key_has_a_short_traceback() -> None:
    with pytest.raises(RecipeError, match=r"unknown key 'lr'") as caught:
        paceline.train("digits", overrides={"lr": 0.1})
    assert len(caught.traceback) == 2  # the call above, and what it calls


def test_a_task_needs_no_recipe(tmp_path: Path, tiny_task: Make) -> None:
    overrides = {"model": {"name": "small_resnet", "options": {"width": 4, "stages": 1, "depth": 1}}}
    overrides |= {"train.duration": "2 steps", "batch.global_size": 16, "parallel.device": "cpu"}
    result = paceline.train(task=tiny_task(), overrides=overrides, run_dir=tmp_path / "run", quiet=True)
    assert result.status == "completed"
    assert (tmp_path / "run" / "recipe.yaml").is_file()
    with pytest.raises(RecipeError, match="neither a recipe nor a task"):
        paceline.train()


def test_a_run_directory_alone_goes_on_with_its_run(tmp_path: Path) -> None:
    overrides = {"model.options": {"width": 4, "stages": 1, "depth": 1}, "train.duration": "2 steps"}
    overrides |= {"parallel.device": "cpu", "parallel.threads": 1, "telemetry.trackers": []}
    first = paceline.train("digits", overrides=overrides, run_dir=tmp_path / "run", quiet=True)
    result = paceline.train(run_dir=str(first.run_dir), overrides={"train.duration": "3 steps"}, quiet=True)
    assert (first.summary.step, result.summary.step, result.run_dir) == (2, 3, first.run_dir)
    with pytest.raises(RunDirectoryError, match=r"there is no run directory .*; give that of a run to continue, or"):
        paceline.train(run_dir=tmp_path / "none")
    for resume in ("never", str(tmp_path)):
        with pytest.raises(RunDirectoryError) as error:
            paceline.train(run_dir=first.run_dir, resume=resume, quiet=True)
        assert "--" not in str(error.value)  # these are of the command


OWN = """
from paceline import ImageClassification

class Doubled(ImageClassification):
    def loss(self, model, batch):
        return 2 * super().loss(model, batch)
"""


def test_several_processes_from_python(
    tiny_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "doubled_task.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    task = importlib.import_module("doubled_task").Doubled
    asked = {"overrides": {"train.duration": "3 steps"}, "task": task, "processes": 2}
    result = paceline.train(tiny_recipe, run_dir=tmp_path / "run", **asked)
    assert (result.status, result.summary.world_size, result.summary.step) == ("completed", 2, 3)
    assert "3 steps of 16" in capfd.readouterr().out
    other = paceline.train(tiny_recipe, run_dir=tmp_path / "other", **asked | {"task": functools.partial(task)})
    assert other.summary.weights_sha256 == result.summary.weights_sha256
    with (
        pytest.raises(RecipeError, match="other processes cannot get what was given"),
        (tmp_path / "file").open("w") as file,
    ):
        paceline.train(tiny_recipe, run_dir=tmp_path / "none", **asked | {"task": functools.partial(task, file)})
    with pytest.raises(RecipeError, match=r"parallel\.logical_ranks"):
        paceline.train(
            tiny_recipe,
            run_dir=tmp_path / "wrong",
            **asked | {"overrides": {"parallel.exact": True, "parallel.logical_ranks": 3}},
        )


def test_a_run_in_the_folder_of_its_data_names_that_folder(
    tmp_path: Path, make_photos: Callable[..., Path], tiny_recipe: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(make_photos(tmp_path / "photos", train=4, val=4, side=8))
    data = {"data.dataset": "image_folder", "data.path": ".", "data.workers": 0, "data.image_size": 8}
    short = {"train.duration": "1 steps", "batch.global_size": 4}
    paceline.train(tiny_recipe, overrides={**data, **short}, run_dir=tmp_path / "run")
    assert " on photos in " in capsys.readouterr().out
