"""Tasks whose batches are nested, ragged, weighted and no images: the same loop and the same tools."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from measured_memory import measured_peak

import paceline
from paceline.cli.main import run as run_command_line
from paceline.data.batch import Batch, joined_along_samples, rows_of, select_rows, tensors_in
from paceline.data.order import StepGeometry
from paceline.data.pipeline import Placement
from paceline.errors import PacelineError
from paceline.host.world import World
from paceline.models.compiled import shape_of
from paceline.pages.page import Chart, Tiles
from paceline.plugins.references import trusting_code
from paceline.recipe.load import load_recipe
from paceline.reports.html.page import outcome
from paceline.reports.html.runs import read_runs
from paceline.reports.html.training import training
from paceline.tasks.task import build_task
from paceline.trainer.fake_batch import batch_maker, evaluation_batch_maker, one_batch
from paceline.trainer.train import plan_only
from paceline_advisor.commands import Landscape, NoiseScale, Prove
from paceline_advisor.landscape.loss_surface import open_run
from paceline_advisor.memory.batch_trial import TrialConfig, TrialTask
from paceline_advisor.memory.estimate import estimate_memory
from paceline_advisor.prove.recorder import content_of, same_content
from paceline_advisor.prove.study import prove
from paceline_advisor.scaling.network import describe
from paceline_advisor.tuning.noise_scale import measure_noise
from paceline_ops.watch.screen import WatchedRun, row

CPU = Placement(device=torch.device("cpu"))
NAMES = ("Sequences", "Boxes")


@pytest.fixture(autouse=True)
def nested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of the tasks, and a recipe file for each in the working directory."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parents[2]}:{Path(__file__).parents[3] / 'src'}")
    module = importlib.import_module("nested_tasks")
    for name, recipe in module.RECIPES.items():
        (tmp_path / f"{name}.yaml").write_text(json.dumps(recipe))
    monkeypatch.chdir(tmp_path)
    yield module
    sys.modules.pop("nested_tasks", None)


def train(name: str, run: str, **overrides: Any) -> Any:
    changed = {key.replace("__", "."): value for key, value in overrides.items()}
    return paceline.train(f"{name}.yaml", overrides={"telemetry.report": False, **changed}, run_dir=run, quiet=True)


def command(*words: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run_command_line(list(words))
    return code, out.getvalue(), err.getvalue()


def opened(name: str) -> tuple[Any, Any]:
    return build_task(load_recipe(f"{name}.yaml").recipe), plan_only(load_recipe(f"{name}.yaml"))


def test_samples_of_nested_batches_are_taken_and_put_together() -> None:
    batch = {"tokens": torch.arange(6).view(3, 2), "pair": ([torch.ones(1), torch.ones(2), torch.ones(3)], 7)}
    assert rows_of(batch) == rows_of(batch["pair"]) == 3
    assert rows_of([torch.zeros(9, 4)]) == 1
    part = select_rows(batch, [2, 0, 2], size=3)
    assert part["tokens"].tolist() == [[4, 5], [0, 1], [4, 5]]
    assert [len(each) for each in part["pair"][0]] == [3, 1, 3]
    assert part["pair"][1] == 7
    whole = joined_along_samples([select_rows(batch, [0], size=3), select_rows(batch, [1, 2], size=3)])
    assert all(map(torch.equal, tensors_in(whole), tensors_in(batch)))
    assert select_rows(torch.arange(2), [0], size=3).tolist() == [0, 1]  # it belongs to no sample


def test_the_same_sample_is_known_again_however_it_was_padded() -> None:
    def content(*tokens: int) -> str:
        return content_of([torch.tensor([tokens])])

    assert same_content(content(3, 5, 0, 0), content(3, 5))
    assert same_content(content(3, 5, 0, 0), content(3, 5, 0))
    assert same_content(content(3, 0), content(3, 0, 0))
    assert not same_content(content(3, 5, 0, 0), content(3, 6))
    assert not same_content(content(3, 5, 0, 0), content(3, 6, 0))
    assert not same_content(content(3, 5), content(3, 7))
    assert not same_content(content(3, 5, 0), content(3, 5, 1))
    assert len(content_of([torch.zeros(1, 100_000)])) < 100  # and quickly so: one row for each sample of a sound
    pictures = [torch.rand(1, 3, 4, 4, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
    assert not same_content(*(content_of([each, torch.ones(1)]) for each in pictures))


@pytest.mark.parametrize("count", [1, 2, 5])
def test_made_up_batches_look_like_those_that_are_read(count: int) -> None:
    task, plan = opened("Sequences")
    task.data_facts(World())
    made = batch_maker(task, plan, CPU)(count)
    longest = int(task.sample_weights().max())
    assert made.inputs["tokens"].shape == made.targets["next"].shape == (count, longest)
    assert (made.inputs["mask"].dtype, made.targets["lengths"].shape) == (torch.bool, (count,))
    task, plan = opened("Boxes")
    task.data_facts(World())
    for make in (batch_maker, evaluation_batch_maker):
        made = make(task, plan, CPU)(count)
        assert len(made.inputs) == len(made.targets) == count
        assert all(each.ndim == 3 and each.shape[0] == 3 for each in made.inputs)
        assert all(each["boxes"].shape == (1, 4) for each in made.targets)


def test_the_samples_that_count_for_most_are_those_of_a_made_up_batch() -> None:
    (part,) = one_batch(0, 2, np.array([3, 9, 1, 8])).slices(0, World())
    assert (part.ids.tolist(), part.step_weight) == ([1, 3], 2)


@pytest.mark.parametrize("name", NAMES)
def test_a_run_goes_on_where_it_was_stopped(name: str) -> None:
    whole = train(name, "whole", train__duration="20 steps", checkpoint__every="7 steps")
    part = train(name, "part", train__duration="20 steps", train__until="9 steps", checkpoint__every="7 steps")
    assert (part.status, part.summary.step) == ("stopped", 9)
    again = train(name, "part", train__duration="20 steps", checkpoint__every="7 steps")
    assert again.summary.weights_sha256 == whole.summary.weights_sha256
    assert again.metrics["last"] == whole.metrics["last"]


@pytest.mark.parametrize("name", NAMES)
def test_two_processes_train_and_score_like_one(name: str) -> None:
    alone = train(name, "one", parallel__exact=True, train__duration="10 steps")
    asked = ("parallel.exact=true", "train.duration=10 steps", "--run-dir", "two", "--processes", "2")
    code, _, err = command("train", f"{name}.yaml", *asked)
    assert code == 0, err
    found = json.loads(Path("two/summary.json").read_text())
    assert found["weights_sha256"] == alone.summary.weights_sha256
    assert found["metrics"]["loss"] == alone.metrics["loss"]
    assert command("audit", "two")[0] == 0


@pytest.mark.parametrize("name", NAMES)
def test_memory_is_estimated_from_its_own_batches(name: str) -> None:
    loaded = load_recipe(f"{name}.yaml")
    found = estimate_memory(loaded)
    assert (found.fits, found.largest, found.needed) == (None, None, None), "the process was not measured"
    assert bool([each for each in found.notices if "one by one" in each]) == (name == "Boxes")
    if name == "Sequences":  # of the other, samples are as large as they happen to be
        single = dataclasses.replace(loaded.recipe, batch=dataclasses.replace(loaded.recipe.batch, micro_size=8))
        measured = measured_peak(single, 8, torch.device("cpu"))
        alone = estimate_memory(dataclasses.replace(loaded, recipe=single))
        assert alone.peak.parts["step"] == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("name", NAMES)
def test_a_trial_of_a_batch_size_repeats_its_samples(name: str) -> None:
    task, _ = opened(name)
    trial = TrialTask(task, TrialConfig(task="", samples=40, evaluation_samples=6, memory=None))
    trial.data_facts(World())
    pipeline = trial.open_pipeline(CPU)
    geometry = StepGeometry(seed=0, samples=40, global_batch_size=20, logical_ranks=1)
    batches: list[Batch] = list(pipeline.train_batches(geometry, 0, 2, World()))
    assert [rows_of(batch.inputs) for batch in batches] == [rows_of(batch.targets) for batch in batches] == [20, 20]
    assert trial.headline == task.headline
    network = trial.build_model().eval()
    scores = trial.score(network, next(iter(pipeline.evaluation_batches(6, World()))))
    (collector,) = trial.collectors()
    collector.add(scores, np.arange(6))
    assert trial.headline in {metric.name for metric in trial.metrics}


@pytest.mark.parametrize("name", NAMES)
def test_they_prove_what_they_are(name: str) -> None:
    report = prove(Prove(recipe=f"{name}.yaml", processes=1), lambda _: None)
    verdicts = {check.name: check.verdict for check in report.checks}
    assert report.passed, report
    assert {verdicts[each] for each in ("samples", "gradient", "accumulation", "tail", "metric")} == {"passed"}


def test_a_loss_that_is_no_mean_over_tokens_is_found(nested: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = nested.Sequences.loss

    def by_sample(self: Any, model: Any, batch: Batch) -> torch.Tensor:
        loss: torch.Tensor = honest(self, model, batch)
        return loss * batch.weight / (2 * len(batch.ids))

    monkeypatch.setattr(nested.Sequences, "loss", by_sample)
    report = prove(Prove(recipe="Sequences.yaml", processes=1), lambda _: None)
    assert next(each for each in report.checks if each.name == "accumulation").verdict == "failed"


def test_a_landscape_is_that_of_the_loss_over_tokens() -> None:
    result = train("Sequences", "run", train__duration="5 steps", evaluate__batch_size=256)
    with trusting_code():
        subject = open_run(Path("run"), Landscape(runs=("run",)), World()).subject
    found = subject.measure(subject.current_weights(), "validation")
    assert found == pytest.approx({name: result.metrics[name] for name in found}, rel=1e-5)
    assert {*found} == {"loss", "accuracy", "median_loss"}
    origin = subject.current_weights()
    loss, slope = subject.loss_and_gradient(origin, "validation")
    assert loss == pytest.approx(found["loss"], rel=1e-5)
    step = 1e-3 * slope / slope.norm()
    there, here = (subject.loss_and_gradient(origin + sign * step, "validation")[0] for sign in (1, -1))
    assert (there - here) / 2e-3 == pytest.approx(float(slope.norm()), rel=0.05)


def test_noise_is_told_in_tokens() -> None:
    report = measure_noise(NoiseScale(target="Sequences.yaml", steps=5), print)
    weights = opened("Sequences")[0].sample_weights()
    assert report.unit == "tokens"
    assert report.batch_weight == pytest.approx(8 * weights.mean())
    assert report.to_json()["unit"] == "tokens"


@pytest.mark.parametrize("name", NAMES)
def test_arithmetic_is_counted_on_its_own_batches(name: str) -> None:
    subject = describe(load_recipe(f"{name}.yaml").recipe)
    assert subject.flops_per_sample is not None
    assert not subject.notices
    assert sum(gradient.size_bytes for gradient in subject.network.gradients) == 4 * subject.numbers.trained


def test_people_are_told_its_own_headline() -> None:
    train("Sequences", "run", train__duration="10 steps", evaluate__every="5 steps")
    plan = json.loads(Path("run/plan.json").read_text())
    told = {key: plan[key] for key in ("headline", "sample_name", "weight_unit")}
    assert told == {"headline": "accuracy", "sample_name": "samples", "weight_unit": "tokens"}
    watched = WatchedRun(Path("run"))
    watched.look()
    assert watched.metrics == ["loss", "accuracy", "median_loss"]
    assert row(watched)[5].startswith("accuracy ")
    (run,) = read_runs([Path("run")])
    (tiles,) = (block for block in outcome([run]) if isinstance(block, Tiles))
    assert {"best accuracy", "last accuracy"} <= {*[tile.label for tile in tiles.tiles]}
    titles = [block.title for block in training([run]) if isinstance(block, Chart)]
    assert {"Accuracy", "Median loss"} <= {*titles}


@pytest.mark.parametrize("name", NAMES)
def test_what_has_no_meaning_for_it_is_refused_by_name(name: str) -> None:
    train(name, "run", train__duration="2 steps")
    for words, said in (
        (("predict", "run", f"{name}.yaml", "--trust-code"), "no class names"),
        (("bench", f"{name}.yaml", "--inference"), "measures image networks"),
        (("check-data", f"{name}.yaml"), "of its own"),
        (("evaluate", "run", "--trust-code", "--sizes", "8,9", "--on", "validation"), "--sizes has no effect"),
    ):
        code, _, err = command(*words)
        assert code == 2, words
        assert said in err
        assert "Traceback" not in err


@pytest.mark.parametrize("name", NAMES)
def test_predictions_of_each_sample_are_written(name: str) -> None:
    train(name, "run", train__duration="2 steps")
    code, _, err = command("evaluate", "run", "--trust-code", "--predictions", "found.csv")
    assert (code, len(Path("found.csv").read_text().splitlines())) == (0, 19), err


def test_lists_are_not_compiled_for() -> None:
    assert shape_of((torch.zeros(4, 7),), {}) == shape_of(({"tokens": torch.zeros(4, 7)},), {}) == (4, 7)
    assert shape_of(([torch.zeros(3, 8, 9)],), {}) == ()


def test_a_landscape_needs_a_mean_loss_first(nested: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    train("Boxes", "run", train__duration="2 steps")
    monkeypatch.setattr(nested.Boxes, "metrics", nested.Boxes.metrics[::-1])
    with pytest.raises(PacelineError, match="median_error, is not a mean"), trusting_code():
        open_run(Path("run"), Landscape(runs=("run",)), World())
