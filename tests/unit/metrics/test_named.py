"""Metrics that a recipe names see every held-out sample once, in order, and are torchmetrics' own figures."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics.classification as theirs
from PIL import Image

import paceline
from paceline.cli.main import run as run_command_line
from paceline.errors import RecipeError
from paceline.host.world import World
from paceline.metrics.named import NamedMetrics
from paceline.plugins.references import trusting_code
from paceline.recipe.load import load_recipe
from paceline.recipe.schema import named_code
from paceline.tasks.image_classification import ImageClassification
from paceline.trainer.evaluate_target import EvaluationRequest, evaluate_target
from paceline_text.text_classification import TextClassification

Make = Callable[..., Any]
F1 = {"name": "torchmetrics.classification:MulticlassF1Score", "num_classes": 10, "average": "macro"}

NAMED = {"evaluate.metrics": {"f1": F1}}


def order_of(weight: float = 1.0) -> Callable[[torch.Tensor, torch.Tensor], float]:
    """A metric that tells in which order the samples came."""
    return lambda scores, _: weight * float((scores[:, 0] * torch.arange(len(scores))).sum())


def no_number() -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    return lambda scores, _: scores


class Distance:
    higher_is_better = False

    def __call__(self, scores: torch.Tensor, targets: torch.Tensor) -> float:
        return float((scores.argmax(1) - targets).abs().float().mean())


@pytest.mark.parametrize("source", ["images", "texts"])
def test_classes_without_held_out_samples_are_told_before_the_first_step(tmp_path: Path, source: str) -> None:
    if source == "images":
        (tmp_path / "val/c").mkdir(parents=True)
        for split, names in (("train", "abc"), ("val", "abb")):
            for number, name in enumerate(names):
                (tmp_path / split / name).mkdir(parents=True, exist_ok=True)
                Image.new("RGB", (8, 8)).save(tmp_path / split / name / f"{number}.png")
        task: Any = ImageClassification(load_recipe("image_folder", {"data.path": str(tmp_path)} | NAMED).recipe)
    else:
        rows = [f"{split},a text of {name} {split},{name}" for split in ("train", "val") for name in "abc"]
        (tmp_path / "t.csv").write_text("\n".join(["split,text,label", *rows[:5]]))
        keys = {"data.dataset": "text_table", "data.path": str(tmp_path / "t.csv")} | NAMED
        task = TextClassification(load_recipe("docs-topics", keys).recipe)
    told = "f1 may be undefined or 0, since 1 of 3 classes have no held-out sample: 'c'"
    assert told in task.data_facts(World()).left_out


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_it_is_the_same_however_samples_are_shared_out(ranks: int) -> None:
    generator = torch.Generator().manual_seed(0)
    scores, targets = torch.randn(31, 10, generator=generator), torch.randint(0, 10, (31,), generator=generator)
    parts = []
    for rank in range(ranks):
        mine = NamedMetrics({"f1": F1, "order": {"name": f"{__name__}:order_of", "weight": 2.0}})
        for batch in reversed(np.array_split(np.arange(rank, 31, ranks), 3)):
            mine.add({"logit": scores[batch], "label": targets[batch]}, batch)
        parts.append(mine.part())
    found = mine.results([*reversed(parts), None])
    wanted = theirs.MulticlassF1Score(num_classes=10, average="macro")(scores, targets)
    assert found == {"f1": float(wanted), "order": 2 * float((scores[:, 0] * torch.arange(31)).sum())}


def replace_metrics(recipe: Path, name: str) -> Any:
    return load_recipe(recipe, {"evaluate.metrics": {"one": {"name": name}}}).recipe


def test_without_a_sample_there_is_no_number() -> None:
    assert math.isnan(NamedMetrics({"f1": F1}).results([None])["f1"])


def test_a_run_records_it_and_can_choose_its_best_by_it(tiny_recipe: Path, runs: Path, events: Make) -> None:
    named = {"f1": F1, "distance": {"name": f"{__name__}:Distance"}}
    asked = {"evaluate.metrics": named, "evaluate.metric": "distance", "evaluate.every": "2 steps"}
    run = paceline.train(tiny_recipe, overrides=asked, run_dir=runs / "run", quiet=True)
    records = events(run.run_dir, "evaluation")
    assert all(0 <= each["f1"] <= 1 for each in records)
    assert run.metrics["best"]["value"] == min(each["distance"] for each in records)
    with pytest.raises(RecipeError, match=r"names code to import, evaluate.metrics=.*:Distance"):
        evaluate_target(EvaluationRequest(target=run.run_dir))
    with trusting_code():
        again = evaluate_target(EvaluationRequest(target=run.run_dir)).metrics
    assert again["f1"] == records[-1]["f1"]


def test_torchmetrics_metrics_are_shown_at_the_end_and_need_no_trust(
    tiny_recipe: Path, runs: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, named in (("theirs", {"f1": F1}), ("own", {"f1": F1, "distance": {"name": f"{__name__}:Distance"}})):
        asked = f"evaluate.metrics={json.dumps(named)}"
        assert run_command_line(["train", str(tiny_recipe), asked, "--run-dir", str(runs / name)]) == 0
        told = capfd.readouterr().out
        assert re.search(r"(?im)^ *f1 .*held-out samples", told)
        assert (f"evaluate {runs / name} --trust-code" in told) == (name == "own")
        assert run_command_line(["evaluate", str(runs / name)]) == (RecipeError.exit_code if name == "own" else 0)
        capfd.readouterr()
    code = named_code(replace_metrics(tiny_recipe, "torchmetrics.image:FrechetInceptionDistance"))
    assert code == ["torchmetrics.image:FrechetInceptionDistance"]


@pytest.mark.parametrize(
    ("recipe", "metrics", "said"),
    [
        ("digits", {"f1": {"num_classes": 10}}, "must name a factory"),
        ("digits", {"f1": {"name": "torchmetrics.classification:MulticlassF1Score", "clases": 10}}, "does not take"),
        ("digits", {"loss": F1}, "has the name 'loss'"),
        ("digits", {"samples": F1}, "has the name 'samples'"),
        ("shapes-segmentation", {"f1": F1}, "needs logits"),
    ],
)
def test_what_cannot_be_is_refused_before_training(recipe: str, metrics: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=said):
        paceline.train(recipe, overrides={"evaluate.metrics": metrics}, run_dir=tmp_path / "run", quiet=True)


def test_labels_and_clicks_have_them_too(tmp_path: Path) -> None:
    small: dict[str, Any] = {"train.duration": "4 steps", "telemetry.trackers": [], "telemetry.report": False}
    library = "torchmetrics.classification:"
    several = {
        name: {"name": f"{library}Multilabel{name}", "num_labels": 3}
        for name in ("HammingDistance", "AveragePrecision")
    }
    one = {name: {"name": f"{library}Binary{name}"} for name in ("CohenKappa", "AveragePrecision")}
    for recipe, metrics in (("figures", several), ("dlrm-synthetic", one)):
        run = tmp_path / recipe
        paceline.train(recipe, overrides={**small, "evaluate.metrics": metrics}, run_dir=run, quiet=True)
        assert math.isfinite(json.loads((run / "summary.json").read_text())["metrics"][next(iter(metrics))])


@pytest.mark.parametrize("name", ["payload", "payload:a.b", "transformers:pipeline", 3, None])
def test_nothing_but_a_factory_of_a_module_is_imported(name: Any, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "payload.py").write_text("raise SystemExit('ran')\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match="must name a factory"):
        NamedMetrics({"x": {"name": name}})


def test_what_fails_or_lacks_scores_is_found_before_the_first_step(train_tiny: Make, events: Make, runs: Path) -> None:
    for made, said in (("IndexError: out", "out_of_range"), ("gave no number", "no_number")):
        with pytest.raises(RecipeError, match=made):
            train_tiny(said, {"evaluate.metrics": {"odd": {"name": f"{__name__}:{said}"}}})
        assert not events(runs / said, "step")
    with pytest.raises(RecipeError, match=r"needs label and logit from the task's score\(\), which gives only loss"):
        NamedMetrics({"f1": F1}).add({"loss": torch.zeros(2)}, np.arange(2))


def out_of_range() -> Callable[[torch.Tensor, torch.Tensor], float]:
    def metric(*_: Any) -> float:
        raise IndexError("out")

    return metric
