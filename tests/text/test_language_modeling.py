"""Language modelling in the real loop: metrics equal plain arithmetic; impossible settings are refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from golden_sentences import raises
from tiny_text import write_lines

import paceline
from paceline.checkpoint.format import write_tensor_file
from paceline.checkpoint.weights import read_weights
from paceline.data.order import StepGeometry
from paceline.data.pipeline import Placement
from paceline.errors import PacelineError
from paceline.host.world import World
from paceline.inference.predict import open_predictor
from paceline.prediction.predictor import Prompt
from paceline.recipe.load import load_recipe
from paceline.reports.audit import audit_run
from paceline.tasks.trained import open_exportable
from paceline.trainer.evaluate_target import EvaluationRequest, evaluate_target
from paceline.trainer.train import plan_only
from paceline_text.answers import Sampling, TextPredictor
from paceline_text.corpus import IGNORED_TARGET
from paceline_text.language_modeling import LanguageModeling
from paceline_text.models import build_language_model
from paceline_text.pipeline import EVALUATION_SEED, Masking, chunked_rows

Make = Callable[..., Any]

RECIPE = """
task: language_modeling
model: {name: gpt, options: {depth: 1, width: 16, heads: 2}}
data: {dataset: text_folder, path: %s, validation_fraction: 0.4, text: {context: 16}}
batch: {global_size: 4}
optimizer: {name: adamw, lr: 0.01}
schedule: {name: constant}
train: {duration: 8 steps, precision: fp32}
evaluate: {every: 4 steps, batch_size: 4}
checkpoint: {every: 4 steps}
parallel: {device: cpu, threads: 1}
telemetry: {log_every: 2 steps, trackers: [], report: off}
"""
MASKED = {"data.text.objective": "masked", "model.name": "bert"}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("text")
    (root / "books").mkdir()
    for number in range(9):
        (root / "books" / f"{number}.txt").write_text(f"the {number}th book – says größer. " * (number % 4 + 1))
    path = root / "recipe.yaml"
    path.write_text(RECIPE % (root / "books"))
    return path


def task_of(recipe: Path, overrides: Mapping[str, Any] | None = None) -> LanguageModeling:
    task = LanguageModeling(load_recipe(recipe, overrides or {}).recipe)
    task.data_facts(World())
    return task


def stream(corpus: Any) -> torch.Tensor:
    return torch.cat([torch.from_numpy(corpus.read(i, 0, int(n))) for i, n in enumerate(corpus.lengths)])


def network_of(task: LanguageModeling, run_dir: Path) -> torch.nn.Module:
    network = build_language_model(task.recipe.model, vocabulary=259, context=16)
    network.load_state_dict(read_weights(run_dir).state)
    return network.eval().requires_grad_(False)


def test_bits_per_byte_are_those_of_the_held_out_text(train: Make, recipe: Path) -> None:
    """Recounted from the text itself, row by row."""
    result, task = train("a"), task_of(recipe)
    network, ids = network_of(task, result.run_dir), stream(task.dataset.validation)
    nats = sum(
        F.cross_entropy(
            network(ids[None, at : at + 16][:, : len(ids) - 1 - at])[0], ids[at + 1 : at + 17], reduction="sum"
        )
        for at in range(0, len(ids) - 1, 16)
    ).item()
    held_bytes = int((ids[1:] < 256).sum())
    assert result.metrics["loss"] == pytest.approx(nats / (len(ids) - 1), rel=1e-6)
    assert result.metrics["bits_per_byte"] == pytest.approx(nats / math.log(2) / held_bytes, rel=1e-6)
    assert result.metrics["perplexity"] == pytest.approx(math.exp(nats / (len(ids) - 1)), rel=1e-6)
    written = torch.cat([network(ids[None, at : at + 16])[0].argmax(dim=1) for at in range(0, len(ids) - 1, 16)])
    right = (written[: len(ids) - 1] == ids[1:]).float().mean().item()
    assert result.metrics["token_accuracy"] == pytest.approx(100 * right)
    assert result.metrics["bits_per_byte"] < 7.5  # 8 is what it begins with
    assert audit_run(result.run_dir).passed


def test_answers_to_two_held_out_prompts_are_shown(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": f"{number} and {number} ", "answer": "yes"} for number in range(40)]
    data = {"data.dataset": "chat", "data.path": str(write_lines(tmp_path / "pairs.jsonl", rows))}
    short = {"data.text.rows": "single", "train.duration": "30 steps", "evaluate.every": "15 steps"}
    done = paceline.train(recipe, overrides={**data, **short, "telemetry.report": True}, run_dir=tmp_path / "run")
    shown = json.loads((done.run_dir / "evaluation" / "figures.json").read_text())["examples"]
    predictor = open_predictor(done.run_dir, device=torch.device("cpu"))
    for each in shown:
        given = predictor.reply(Prompt(text=each["caption"], temperature=0, tokens=32)).document["text"]
        assert each["text"] == given.removeprefix(each["caption"]) or each["text"] == "(empty answer)"
    assert len(shown) == 2
    assert capsys.readouterr().out.count(f"  {shown[0]['caption']!r} → ") == 2  # evaluations
    assert "written" in (done.run_dir / "report.html").read_text()


def test_what_each_row_costs_is_written(train: Make, tmp_path: Path) -> None:
    """The sums over a predictions file are the metrics."""
    done = train("run", {"train.duration": "2 steps"})
    path = tmp_path / "rows.jsonl"
    report = evaluate_target(EvaluationRequest(target=done.run_dir, predictions=path))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    nats, bytes_ = sum(line["loss"] for line in lines), sum(line["bytes"] for line in lines)
    assert len(lines) == report.samples
    assert report.metrics["bits_per_byte"] == pytest.approx(nats / bytes_ / math.log(2))


def test_all_of_another_text_is_scored(train: Make, tmp_path: Path) -> None:
    run_dir = train("run", {"train.duration": "2 steps"}).run_dir
    for name, names in (("plain", "abcde"), ("split/train", "x"), ("split/val", "ab")):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        for letter in names:
            (folder / f"{letter}.txt").write_text(f"{letter} " * 9)
    for folder, tokens, part in (
        ("plain", 5 * 19, "all, also any"),
        ("split", 2 * 19, "the folder has its own split: val"),
    ):
        answers = tmp_path / f"{folder}.jsonl"
        overrides = {"data.path": str(tmp_path / folder)}
        found = evaluate_target(EvaluationRequest(target=run_dir, overrides=overrides, predictions=answers))
        rows = [json.loads(line) for line in answers.read_text().splitlines()]
        assert sum(row["tokens"] for row in rows) == tokens - 1
        assert any(f"{found.samples} samples are scored: {part}" in note for note in found.left_out)


def test_masked_accuracy_is_of_masks_that_no_run_changes(train: Make, recipe: Path) -> None:
    result, task = train("m", MASKED | {"seed": 5}), task_of(recipe, MASKED)
    network, ids = network_of(task, result.run_dir), stream(task.dataset.validation).numpy()
    masking = Masking(seed=EVALUATION_SEED, fraction=0.15, mask=257, vocabulary=259, context=16)
    right = count = nats = 0
    for row in range(len(task.evaluation_rows)):
        tokens = ids[row * 16 : row * 16 + int(task.evaluation_rows.tokens[row])]
        seen, asked = map(torch.from_numpy, masking(tokens, epoch=0, sample=row))
        places = asked != IGNORED_TARGET
        logits = network(seen[None])[0]
        right += int((logits.argmax(dim=1) == asked)[places].sum())
        nats += F.cross_entropy(logits, asked, reduction="sum").item()
        count += int(places.sum())
    assert result.metrics["masked_accuracy"] == pytest.approx(100 * right / count)
    assert result.metrics["loss"] == pytest.approx(nats / count, rel=1e-6)
    assert "bits_per_byte" not in result.metrics


@pytest.mark.parametrize("rows", ["chunked", "single"])
@pytest.mark.parametrize("overrides", [{}, MASKED])
def test_a_sample_weighs_what_is_asked_of_it(recipe: Path, rows: str, overrides: dict[str, Any]) -> None:
    """Known before a token is read, and true of what is read, in every epoch."""
    task = task_of(recipe, overrides | {"data.text.rows": rows})
    weights = task.sample_weights()
    pipeline = task.open_pipeline(Placement(device=torch.device("cpu")))
    geometry = StepGeometry(seed=0, samples=len(weights), global_batch_size=4, logical_ranks=2, weights=weights)
    seen = 0
    for batch in pipeline.train_batches(geometry, 0, 2 * math.ceil(len(weights) / 4), World()):
        assert (batch.targets != IGNORED_TARGET).sum(dim=1).tolist() == weights[batch.ids].tolist()
        seen += len(batch.ids)
    assert seen == 2 * len(weights)
    assert pipeline.sample_name(0, training=True) == f"{task.dataset.train.name(0)}[0:16]"


@pytest.mark.everyday
def test_going_on_after_a_stop_gives_the_same_bits(train: Make) -> None:
    """Those of tokens that are hidden, too: tests/unit/tasks/test_every_task.py has the other objective."""
    asked = MASKED | {"model.options.dropout": 0.1}
    whole = train("whole", asked)
    train("half", asked | {"train.until": "3 steps"})
    rest = train("half", asked)
    assert rest.summary.weights_sha256 == whole.summary.weights_sha256
    assert rest.metrics == whole.metrics


def test_what_has_no_effect_on_text_is_refused_or_told(recipe: Path) -> None:
    loaded = load_recipe(recipe, {"data.image_size": 32})
    with raises(PacelineError, key="data.image_size", rule="with effect"):
        loaded.checked(plan_only(loaded).unused)
    loaded = load_recipe(recipe, {"batch.balance": True})
    with raises(PacelineError, key="batch.balance", rule="with effect"):
        loaded.checked(plan_only(loaded).unused)
    loaded = load_recipe(recipe, {"batch.balance": True, "data.text.rows": "single"})
    loaded.checked(plan_only(loaded).unused)
    with raises(PacelineError, rule="with effect"):
        load_recipe(recipe, {"data.text.mask_fraction": 0.2})
    with raises(PacelineError, rule="with effect"):
        load_recipe("digits", {"data.text.context": 20})


def test_the_plan_says_of_what_has_no_effect_that_it_is_not_used(recipe: Path) -> None:
    """A reason alone reads as if a value had been chosen."""
    for loaded in (load_recipe(recipe), load_recipe("dlrm-synthetic")):
        plan = plan_only(loaded)
        assert not plan.channels_last
        assert {"data.image_size", "data.evaluation_shape", "model.channels_last"} <= set(plan.reasons)
        for key in filter(plan.reasons.__contains__, plan.unused):
            assert key == "schedule.warmup_from" or plan.reasons[key].startswith("not used: "), key
    assert plan.reasons["data.path"] == "not used: generated samples are not in a file"


@pytest.mark.parametrize(
    ("overrides", "name"), [({"model.name": "bert"}, "bert"), ({"data.text.objective": "masked"}, "gpt")]
)
def test_a_network_that_cannot_do_what_is_asked_is_told(recipe: Path, overrides: dict[str, Any], name: str) -> None:
    with raises(PacelineError, key="model.name", value=name):
        task_of(recipe, overrides).build_model()


def opened(path: Path) -> TextPredictor:
    predictor = open_predictor(path, device=torch.device("cpu"))
    assert isinstance(predictor, TextPredictor)
    return predictor


def test_what_it_writes_follows_from_seed_and_prompt(train: Make, tmp_path: Path) -> None:
    run_dir = train("gpt").run_dir
    predictor = opened(run_dir)

    def written(**asked: Any) -> list[int]:
        return list(predictor.write("the ", Sampling(tokens=40, **asked)))

    assert written(seed=1) == written(seed=1) != written(seed=2)
    assert written(seed=1, temperature=0) == written(seed=2, temperature=0) == written(seed=3, top_k=1)
    (lone,) = (run_dir / "checkpoints").glob("*8/model.safetensors")
    assert list(opened(lone).write("the ", Sampling(tokens=40, seed=1))) == written(seed=1)
    with pytest.raises(PacelineError, match="does not fill in masked tokens"):
        predictor.fill("th[MASK]")


def test_it_fills_in_what_is_hidden(train: Make) -> None:
    predictor = opened(train("bert", MASKED).run_dir)
    filled = predictor.fill("th<mask> b[MASK]k", top_k=2)
    assert len(filled.guesses) == 2
    assert len(filled.guesses[0].texts) == 2
    assert filled.guesses[0].probabilities[0] >= filled.guesses[0].probabilities[1]
    with pytest.raises(PacelineError, match="the prompt has no mask"):
        predictor.fill("the")
    with pytest.raises(PacelineError, match="the prompt has 21 tokens, but the model takes at most 16"):
        predictor.fill("[MASK]" + 20 * "a")
    with pytest.raises(PacelineError, match="fills in masked tokens and does not generate text"):
        list(predictor.write("the", Sampling()))


@pytest.mark.parametrize(
    ("rows", "told"), [("chunked", ()), ("single", ("documents without text: 1 left out ('b.txt')",))]
)
def test_documents_without_text_are_in_no_row_and_reported(
    recipe: Path, tmp_path: Path, rows: str, told: tuple[str, ...]
) -> None:
    for name, text in (("a", "some"), ("b", ""), ("c", "more")):
        (tmp_path / f"{name}.txt").write_text(text)
    overrides = {"data.path": str(tmp_path), "data.validation_fraction": 0, "data.text.rows": rows}
    assert LanguageModeling(load_recipe(recipe, overrides).recipe).data_facts(World()).left_out == told


def test_chunks_of_the_plan_are_the_corpus_s(recipe: Path) -> None:
    task = task_of(recipe)
    table = chunked_rows(task.dataset.train.lengths, 16)
    plan = plan_only(load_recipe(recipe))
    assert (plan.train_samples, plan.data["tokens"]) == (len(table), int(table.tokens.sum()))
    assert plan.data["digest"] == task.dataset.digest


def test_runs_and_weights_that_record_a_former_home_of_the_task(train: Make, tmp_path: Path) -> None:
    now, before = "paceline_text.language_modeling:", "paceline.tasks.language_modeling:"
    whole, cut = train("whole"), train("cut", {"train.until": "4 steps"})
    plan = cut.run_dir / "plan.json"
    assert now in plan.read_text()
    plan.write_text(plan.read_text().replace(now, before))
    assert train("cut").summary.weights_sha256 == whole.summary.weights_sha256

    saved = read_weights(whole.run_dir)
    weights = tmp_path / "weights.safetensors"
    write_tensor_file(weights, saved.state, {**saved.metadata, "data": saved.metadata["data"].replace(now, before)})
    moved = read_weights(weights)
    assert moved.description("data")["task"] == f"{before}LanguageModeling"
    prompt, cpu = Prompt(text="the", tokens=9), torch.device("cpu")
    replies = [open_predictor(each, device=cpu).reply(prompt) for each in (whole.run_dir, weights)]
    assert replies[0] == replies[1]
    scores = [evaluate_target(EvaluationRequest(target=each)).metrics for each in (whole.run_dir, weights)]
    assert scores[0] == scores[1]
    assert len(open_exportable(moved, trust_code=False, target="onnx").inputs) == 1
