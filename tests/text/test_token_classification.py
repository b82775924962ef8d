"""Token classification in the real loop: alignment, figures, entities as by seqeval, prediction, and bad tables."""

from __future__ import annotations

import csv
import json
import random
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from calls import output_of
from golden_sentences import raises
from PIL import Image
from tiny_text import tagged, tokenizer_folder, write_lines

from paceline.checkpoint.weights import read_weights
from paceline.cli.evaluate import Evaluate
from paceline.cli.main import run as run_command_line
from paceline.cli.predict import Predict
from paceline.data.order import StepGeometry
from paceline.data.pipeline import Placement
from paceline.errors import DataError, PacelineError
from paceline.host.world import World
from paceline.inference.export import ExportRequest, export
from paceline.inference.predict import open_predictor
from paceline.recipe.data import Data, TextSection
from paceline.recipe.load import load_recipe
from paceline.reports.audit import audit_run
from paceline.trainer.evaluate_target import EvaluationReport, EvaluationRequest, evaluate_target
from paceline.trainer.train import plan_only
from paceline_advisor.memory.estimate import estimate_memory
from paceline_text.answers import TextLabeller
from paceline_text.entities import EntityScores
from paceline_text.sets.labelled import open_labelled
from paceline_text.token_classification import TokenClassification, entity_counts, entity_names, entity_types
from paceline_text.tokenizer import ByteTokenizer, open_tokenizer

Make = Callable[..., Any]

RECIPE = """
task: token_classification
model: {name: bert, options: {depth: 1, width: 16, heads: 2}}
data: {dataset: text_table, path: %s, validation_fraction: 0.3, text: {context: 48, rows: single}}
batch: {global_size: 8}
optimizer: {name: adamw, lr: 0.01}
schedule: {name: constant}
train: {duration: 40 steps, precision: fp32}
evaluate: {every: 20 steps, batch_size: 4}
checkpoint: {every: 20 steps}
parallel: {device: cpu, threads: 1}
telemetry: {log_every: 2 steps, trackers: []}
"""
KEYS = ("precision", "recall", "f1")
predict, evaluate = partial(output_of, Predict), partial(output_of, Evaluate)
TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tagged")
    path = root / "recipe.yaml"
    path.write_text(RECIPE % write_lines(root / "tagged.jsonl", tagged(90)))
    return path


def task_of(recipe: Path, overrides: dict[str, Any] | None = None) -> TokenClassification:
    task = TokenClassification(load_recipe(recipe, overrides or {}).recipe)
    task.data_facts(World())
    return task


# True and predicted tags; precision, recall and F1 of seqeval 1.2.2 in percent, mode=None.
BY_HAND = [
    ("B-PER I-PER O B-LOC", "B-PER I-PER O B-LOC", 100),
    ("B-PER I-PER O B-LOC", "B-PER O O B-LOC", 50),
    ("B-PER I-PER O", "I-PER I-PER O", 100),
    ("B-PER B-PER O", "B-PER I-PER O", 0),
    ("B-PER I-PER I-LOC", "B-PER I-PER I-PER", 0),
    ("O I-PER I-LOC I-LOC", "O I-PER I-LOC I-LOC", 100),
    ("O O O", "O B-LOC O", 0),
    ("B-LOC O O", "O O O", 0),
    ("B-PER I-PER", "B-LOC I-LOC", 0),
    ("B-PER I-PER B-PER I-PER", "B-PER I-PER I-PER I-PER", 0),
    ("B-LOC", "I-LOC", 100),
    ("B I I O B", "B I O O I", 50),
]
DRAWN = [69.33333333333334, 73.00613496932515, 68.65671641791045, 77.94561933534744, 64.90066225165563]
DRAWN += [73.37278106508876]


def f1(true: list[list[str]], found: list[list[str]]) -> float:
    """As the task computes it: padded, with tokens that no word begins at among the others."""
    classes = sorted({tag for row in (*true, *found) for tag in row})
    width = 2 * max(map(len, true)) + 3
    wanted, given = torch.full((len(true), width), -100), torch.zeros(len(true), width, dtype=torch.int64)
    for row, (tags, others) in enumerate(zip(true, found, strict=True)):
        wanted[row, 1 : 2 * len(tags) + 1 : 2] = torch.tensor([classes.index(tag) for tag in tags])
        given[row, 1 : 2 * len(tags) + 1 : 2] = torch.tensor([classes.index(tag) for tag in others])
    types = entity_types(classes)
    assert types is not None
    scores = EntityScores(entity_names(classes))
    scores.add(entity_counts(given, wanted, types), np.arange(len(true)))
    return scores.results([scores.part()])["entity_f1"]


@pytest.mark.parametrize(("true", "found", "expected"), BY_HAND)
def test_entities_are_those_of_seqeval(true: str, found: str, expected: float) -> None:
    assert f1([true.split()], [found.split()]) == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(len(DRAWN)))
def test_entities_in_drawn_tags_are_those_of_seqeval(seed: int) -> None:
    tags, draws = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"], random.Random(seed)
    true = [[draws.choice(tags) for _ in range(draws.randrange(1, 12))] for _ in range(40)]
    found = [[tag if draws.random() < 0.7 else draws.choice(tags) for tag in row] for row in true]
    assert f1(true, found) == pytest.approx(DRAWN[seed])


@pytest.mark.parametrize(
    ("tags", "expected"),
    [(["NOUN", "VERB"], False), (["O", "O"], False), (["O", "B-X", "E-X"], False), (["B-X-Y", "I-X-Y", "O"], True)],
)
def test_entities_need_iob2_tags(tags: list[str], expected: bool) -> None:
    assert (entity_types(tags) is not None) == expected


def test_a_word_s_first_token_has_its_label(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="pip install 'paceline[transformers]'")
    words = ["the", "cat-", "sat", "", "on\u200b", "dog"]
    for classifies in (False, True):
        folder = tokenizer_folder(tmp_path / str(classifies), classifies=classifies)
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        for most in (20, 6):
            ids, starts = open_tokenizer(str(folder)).encode_words(words, most)
            assert len(ids) <= most
            begun = [number for number in starts.tolist() if number >= 0]
            assert begun == [0, 1, 2, 4, 5][: len(begun)]
            for place, number in enumerate(starts.tolist()):
                if number >= 0:  # the token begins the word, perhaps with the space before it
                    assert words[number].startswith(theirs.decode([ids[place]]).strip()) or ids[place] == 1
    ids, starts = ByteTokenizer().encode_words(["Ada", "é", "b"], 20)
    assert starts.tolist() == [-1, 0, -1, -1, -1, 1, -1, -1, 2, -1]


def test_loss_accuracy_and_entities_are_of_all_held_out_words(train: Make, recipe: Path) -> None:
    result, task = train("run"), task_of(recipe)
    network = task.build_model()
    network.load_state_dict(read_weights(result.run_dir).state)
    corpus, labels = task.dataset.validation, torch.from_numpy(task.dataset.labels[1])
    texts = [torch.from_numpy(corpus.read(n, 0, int(size)))[None] for n, size in enumerate(corpus.lengths)]
    with torch.no_grad():
        logits = torch.cat([network.eval()(each, torch.ones_like(each))[0] for each in texts])
    is_word = labels >= 0
    assert is_word.sum() < len(labels)
    assert result.metrics["loss"] == pytest.approx(F.cross_entropy(logits[is_word], labels[is_word]).item(), rel=1e-5)
    right = (logits.argmax(dim=1) == labels)[is_word]
    assert result.metrics["token_accuracy"] == pytest.approx(100 * right.double().mean().item())
    assert result.metrics["entity_f1"] > 60
    assert audit_run(result.run_dir).passed
    assert (result.run_dir / "report.html").is_file()


def test_held_out_texts_without_entities_have_no_f1(train: Make, tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl", tagged(30))
    write_lines(tmp_path / "validation.jsonl", [{"tokens": ["so", "it", "was"], "tags": ["O", "O", "O"]}] * 4)
    result = train("run", {"data.path": str(tmp_path)})
    assert result.summary.status == "completed"
    assert "token_accuracy" in result.metrics
    assert "entity_f1" not in result.metrics


def test_a_run_goes_on_where_it_was_cut_off(train: Make) -> None:
    whole = train("whole", {"model.options.dropout": 0.1})
    train("cut", {"model.options.dropout": 0.1, "train.until": "20 steps"})
    resumed = train("cut", {"model.options.dropout": 0.1})
    assert resumed.summary.weights_sha256 == whole.summary.weights_sha256
    assert resumed.metrics == whole.metrics


def test_micro_batches_hold_texts_of_similar_length(recipe: Path) -> None:
    task = task_of(recipe)
    lengths, pipeline = task.sample_lengths(), task.open_pipeline(Placement(device=torch.device("cpu")))
    sizes = {"samples": len(lengths.tokens), "global_batch_size": 16, "logical_ranks": 4}
    waste, weights = {True: 0, False: 0}, task.sample_weights()
    for balanced in waste:
        geometry = StepGeometry(seed=0, lengths=lengths, balanced=balanced, **sizes)
        for batch in pipeline.train_batches(geometry, 0, geometry.epochs.first_step(1), World()):
            waste[balanced] += int((batch.inputs["mask"] == 0).sum())
            assert (batch.targets >= 0).sum(dim=1).tolist() == weights[batch.ids].tolist()
            assert not ((batch.targets >= 0) & (batch.inputs["mask"] == 0)).any()
    assert waste[True] < 0.6 * waste[False]


def test_weights_alone_tag_prompts_and_lines(train: Make, tmp_path: Path) -> None:
    run_dir = train("run").run_dir
    said = predict(run_dir, "--prompt", "the cat sat")
    assert [each.rpartition("/")[0] for each in said.split()] == ["the", "cat", "sat"]
    row = json.loads(predict(run_dir, "--prompt", "on cat under", "--json"))
    assert row["labels"] == [each.rpartition("/")[2] for each in predict(run_dir, "--prompt", "on cat under").split()]
    for entity in row["entities"]:
        assert entity["text"] == " ".join(row["words"][entity["begin"] : entity["end"]])
        assert row["labels"][entity["begin"]].endswith(entity["type"])
    assert row["entities"]
    (tmp_path / "new.txt").write_text("the cat sat\n" + 20 * "very " + "\n\non a mat\n")
    assert run_command_line(["predict", str(run_dir), str(tmp_path / "new.txt")]) == 1
    lines = predict(run_dir, tmp_path / "new.txt").splitlines()
    assert "unreadable" in lines[1]
    assert "of its 20 words are beyond the network's 48 tokens" in lines[1]
    assert "it is empty" in lines[2]
    assert len(lines[3].split()) == 4
    write_lines(tmp_path / "new.jsonl", [{"tokens": ["the", "cat", "sat"]}, {"text": "dog"}])
    for ending in ("jsonl", "csv", "parquet"):
        predict(run_dir, tmp_path / "new.jsonl", "--output", tmp_path / f"found.{ending}")
    rows = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    assert [each["words"] for each in rows] == [["the", "cat", "sat"], ["dog"]]
    table = pq.read_table(tmp_path / "found.parquet").to_pylist()
    assert [(each["words"], each["labels"]) for each in table] == [(each["words"], each["labels"]) for each in rows]
    with (tmp_path / "found.csv").open(newline="") as file:
        cells = [(each["word"], each["label"]) for each in csv.DictReader(file)]
    assert cells == [pair for each in rows for pair in zip(each["words"], each["labels"], strict=True)]
    assert "one tag for each word" in predict(run_dir, "--prompt", "a", "--top-k", "2", code=2)


def test_words_of_json_lines_are_not_split_and_wrong_sources_are_named(
    train: Make, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_dir, path = train("run").run_dir, tmp_path / "new.jsonl"
    write_lines(path, [{"tokens": ["cat sat", "dog"]}])
    assert json.loads(predict(run_dir, path, "--json"))[0]["words"] == ["cat sat", "dog"]
    write_lines(path, [{"text": "dog.", "tokens": ["dog", "."]}])
    assert json.loads(predict(run_dir, path, "--json"))[0]["words"] == ["dog", "."]

    def refused(source: Path, said: str, fix: str = ".* with the key tokens or text") -> None:
        assert run_command_line(["predict", str(run_dir), str(source)]) == DataError.exit_code
        error = capfd.readouterr().err
        assert re.search(said + fix, error), error

    for wrong in ({"words": ["a"]}, {"tokens": [1]}, {"text": None}):
        write_lines(path, [{"text": "dog"}, wrong])
        refused(path, "line 2 of '.*new.jsonl' has no text")
    path.write_text("nonsense")
    refused(path, "line 1 of '.*new.jsonl' cannot be read as text")
    path.write_text('{"tokens": ["a\\ud800"]}')
    refused(path, "cannot be read as text .*surrogates not allowed")
    refused(tmp_path / "gone.txt", "'.*gone.txt' does not exist", "; give .* files of lines")
    Image.new("L", (9, 9)).save(tmp_path / "spot.png")
    refused(tmp_path / "spot.png", "paceline: '.*spot.png' cannot be read as text .it has NUL bytes.; give .txt")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [(20 * "very ", "the prompt cannot be read: .* of its 20 words are beyond"), (" ", "it is empty")],
)
def test_a_prompt_that_cannot_be_read_ends_with_one_sentence(
    train: Make, capfd: pytest.CaptureFixture[str], prompt: str, message: str
) -> None:
    assert run_command_line(["predict", str(train("run").run_dir), "--prompt", prompt]) == DataError.exit_code
    error = capfd.readouterr().err
    assert re.search(message, error)
    assert "Traceback" not in error


def test_no_tag_is_given_where_the_output_is_not_finite(
    train: Make, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = train("run").run_dir
    monkeypatch.setattr(TextLabeller, "_scores", lambda _, texts: torch.full((1, len(texts[0]), 4), torch.nan))
    assert run_command_line(["predict", str(run_dir), "--prompt", "the cat", "--json"]) == 1
    assert "not a finite number" in capfd.readouterr().err


def test_a_batch_changes_no_text_s_tags(train: Make) -> None:
    tagger = open_predictor(train("run").run_dir, device=torch.device("cpu"))
    texts = [tagger.prepare(" ".join(row["tokens"]).encode()) for row in tagged(12) if len(row["tokens"]) < 9]
    for text, answer in zip(texts, tagger.answer(texts, 1), strict=True):
        alone = tagger.answer([text], 1)[0]
        assert alone.labels == answer.labels
        assert alone.probabilities == pytest.approx(answer.probabilities, abs=1e-5)


def test_predictions_and_memory_and_exports(train: Make, recipe: Path, tmp_path: Path) -> None:
    run_dir = train("run").run_dir
    again = evaluate_target(EvaluationRequest(target=run_dir, predictions=tmp_path / "p.jsonl"))
    again_classes = task_of(recipe).dataset.classes
    rows = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    pairs = [pair for row in rows for pair in zip(row["prediction"], row["target"], strict=True)]
    right = sum(one == other for one, other in pairs)
    source = {f"row {at + 1} of 'tagged.jsonl'": row for at, row in enumerate(tagged(90))}
    for row in rows:
        written = source[row["sample"]]
        count = len(row["words"])
        assert 0 < count == len(row["prediction_class"])
        assert (row["words"], row["target_class"]) == (written["tokens"][:count], written["tags"][:count])
        assert [again_classes[each] for each in row["prediction"]] == row["prediction_class"]
    assert again.metrics["token_accuracy"] == pytest.approx(100 * right / len(pairs))
    found = estimate_memory(load_recipe(recipe, {}), device="cpu")
    assert found.peak.allocated > 0
    assert found.needed is None, "the process was not measured"
    written = export(ExportRequest(target=run_dir, output=tmp_path / "a.pt2", form="torch-export"))
    assert written.largest_difference is not None
    assert written.largest_difference < 1e-4


def score(run_dir: Path, path: Path, answers: Path | None = None, **keys: Any) -> EvaluationReport:
    overrides = {"data.path": str(path), **keys}
    return evaluate_target(EvaluationRequest(target=run_dir, overrides=overrides, predictions=answers))


def test_all_rows_of_other_data_are_scored_and_its_tags_may_be_some_of_the_weights(train: Make, tmp_path: Path) -> None:
    run_dir = train("run").run_dir
    other = [row for row in tagged(140)[90:] if "B-PLACE" not in row["tags"]]
    assert 10 < len(other) < 50
    found = score(run_dir, write_lines(tmp_path / "other.jsonl", other), tmp_path / "found.jsonl")
    assert found.samples == len(other)
    assert f"{len(other)} samples are scored: all, also any that the run was trained on" in found.left_out
    assert any("of the 4 classes of the weights are not in the data: B-PLACE" in note for note in found.left_out)
    # Numbered as the weights' tags, they are scored as together with the missing ones.
    score(run_dir, write_lines(tmp_path / "whole.jsonl", [*other, *tagged(90)]), tmp_path / "whole_found.jsonl")
    one, many = ((tmp_path / name).read_text() for name in ("found.jsonl", "whole_found.jsonl"))
    assert many.replace("whole.jsonl", "other.jsonl").startswith(one)
    outside = score(run_dir, write_lines(tmp_path / "one.jsonl", [{"tokens": ["so", "it"], "tags": ["O", "O"]}]))
    assert (outside.samples, "entity_f1" in outside.metrics) == (1, False)
    part = score(run_dir, tmp_path / "other.jsonl", **{"data.validation_fraction": 0.3})
    assert 0 < part.samples < len(other)
    unknown = write_lines(tmp_path / "unknown.jsonl", [*other, {"tokens": ["Ada"], "tags": ["B-PER"]}])
    with pytest.raises(DataError, match=r"the 4 tags B-ANIMAL.* the 3 tags .*; correct B-PER, or leave out"):
        score(run_dir, unknown)


def test_a_split_for_scoring_needs_no_training_rows_beside_it(train: Make, tmp_path: Path) -> None:
    run_dir, rows = train("run").run_dir, tagged(140)[90:]
    expected = score(run_dir, write_lines(tmp_path / "rows.jsonl", rows)).metrics
    write_lines(tmp_path / "column.jsonl", [{**row, "split": "test"} for row in rows])
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "test-00000-of-00001.parquet")
    (tmp_path / "folder").mkdir()
    write_lines(tmp_path / "folder" / "test.jsonl", rows[:20])
    write_lines(tmp_path / "folder" / "validation.jsonl", rows)
    for name, part in [
        ("column.jsonl", "the rows of test"),
        ("test-00000-of-00001.parquet", "the split test"),
        ("folder", "the split validation; test is not read"),
    ]:
        found = score(run_dir, tmp_path / name)
        assert (found.samples, found.metrics) == (50, expected)
        assert f"50 samples are scored: {part}" in found.left_out


def test_the_run_s_own_data_keeps_its_split_elsewhere(train: Make, recipe: Path, tmp_path: Path) -> None:
    result = train("run")
    (tmp_path / "tagged.jsonl").write_text((recipe.parent / "tagged.jsonl").read_text())
    moved = score(result.run_dir, tmp_path / "tagged.jsonl")
    assert 0 < moved.samples < 40
    assert moved.metrics["loss"] == pytest.approx(result.metrics["loss"])
    assert f"{moved.samples} samples are scored: the held-out part" in moved.left_out
    every = score(result.run_dir, tmp_path / "tagged.jsonl", **{"data.validation_fraction": 1})
    assert every.samples == 90
    with raises(PacelineError, key="data.path"):
        train("none", {"data.validation_fraction": 1})


def test_each_type_s_entities_are_scored(train: Make, tmp_path: Path) -> None:
    """Counted here from the tags that a predictions file names."""
    run_dir = train("run", {"train.duration": "6 steps"}).run_dir
    answers = tmp_path / "answers.jsonl"
    told = json.loads(evaluate(run_dir, "--per-class", "--predictions", answers, "--json"))
    rows = [json.loads(line) for line in answers.read_text().splitlines()]

    def entities(tags: list[str]) -> set[tuple[str, int, int]]:
        found, begin = set(), 0
        for at, (before, tag) in enumerate(zip(["O", *tags], [*tags, "O"], strict=True)):
            if before != "O" and (tag[0] != "I" or tag[2:] != before[2:]):
                found.add((before[2:], begin, at))
            if tag[0] == "B" or (tag[0] == "I" and (before == "O" or before[2:] != tag[2:])):
                begin = at
        return found

    found, true = (
        [(at, *each) for at, row in enumerate(rows) for each in entities(row[key])]
        for key in ("prediction_class", "target_class")
    )
    assert 0 < len({*found} & {*true}) < len(true)
    whole = {"class": None, "count": len(true), **{key: told[f"entity_{key}"] for key in KEYS}}
    for scores in [*told["per_class"], whole]:
        one, other = ({each for each in some if scores["class"] in (None, each[1])} for some in (found, true))
        right = len(one & other)
        assert scores["count"] == len(other)
        expected = (right / max(len(one), 1), right / len(other), 2 * right / (len(one) + len(other)))
        assert [scores[key] for key in KEYS] == pytest.approx([100 * each for each in expected])
    assert {each["class"] for each in told["per_class"]} == {"ANIMAL", "PLACE"}
    assert re.search(r"class +entities +precision +recall +F1", evaluate(run_dir, "--per-class"))


def test_entities_add_up_over_any_number_of_processes() -> None:
    counts = torch.from_numpy(np.random.default_rng(1).integers(0, 9, (12, 3, 3)))
    expected: tuple[Any, Any] | None = None
    for ranks in (1, 2, 3):
        parts = []
        for rank in range(ranks):
            scores = EntityScores(["A", "B", "C"])
            for at in range(rank, 12, ranks):
                scores.add({"entities": counts[at : at + 1]}, np.array([at]))
            parts.append(scores.part())
        found = (scores.results(parts), scores.details(parts))
        expected = expected or found
        assert found == expected


@pytest.mark.parametrize("is_numbered", [False, True])
def test_tags_that_are_no_entities_are_told(train: Make, tmp_path: Path, is_numbered: bool) -> None:
    rows: list[dict[str, Any]] = tagged(40)
    rows[2]["tags"][0] = "PER"
    if is_numbered:
        rows = [{**row, "tags": [int(tag != "O") for tag in row["tags"]]} for row in rows]
    run_dir = train("run", {"data.path": str(write_lines(tmp_path / "odd.jsonl", rows))}).run_dir
    (note,) = json.loads((run_dir / "plan.json").read_text())["left_out"]
    told = r"tag '[01]' in row \d+" if is_numbered else "tag 'PER' in row 3"
    assert re.fullmatch(f"entity_f1 is not reported: {told} of 'odd.jsonl' is not O, B-X or I-X", note)
    assert f"note: {note}" in evaluate(run_dir)


@pytest.mark.needs("peft", "transformers")
def test_a_checkpoint_is_fine_tuned_with_adapters_and_exported(train: Make, tmp_path: Path) -> None:
    import transformers

    folder = tokenizer_folder(tmp_path / "bert", classifies=True)
    config = transformers.BertConfig(vocab_size=24, max_position_embeddings=48, **TINY)
    torch.manual_seed(1)
    transformers.BertForMaskedLM(config).save_pretrained(folder)
    asked = {"model.name": f"transformers:{folder}", "model.options": {}, "model.pretrained": True}
    asked |= {"data.text.tokenizer": str(folder), "model.adapters": {"rank": 2}}
    result = train("adapted", asked)
    assert result.metrics["entity_f1"] > 35
    for form in ("peft", "transformers"):
        written = export(ExportRequest(target=result.run_dir, output=tmp_path / form, form=form))
        assert written.largest_difference is not None
        assert written.largest_difference < 1e-5
    said = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert (said["task_type"], said["modules_to_save"]) == ("TOKEN_CLS", ["classifier"])
    data = load_recipe(result.run_dir).recipe.data.path  # an export does not say where the data are
    again = evaluate_target(EvaluationRequest(target=tmp_path / "transformers", overrides=(f"data.path={data}",)))
    assert again.metrics["entity_f1"] == pytest.approx(result.metrics["entity_f1"])


def opened(path: Path, **keys: Any) -> Any:
    return open_labelled(Data(dataset="text_table", path=str(path), **keys), per_word=True)


def test_rows_are_the_same_in_every_kind_of_file(tmp_path: Path) -> None:
    rows = tagged(20)
    jsonl = opened(write_lines(tmp_path / "a.jsonl", rows))
    assert jsonl.classes == ("B-ANIMAL", "B-PLACE", "I-ANIMAL", "O")
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    with (tmp_path / "a.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["tokens", "tags"])
        writer.writeheader()
        writer.writerows({key: json.dumps(cell) for key, cell in row.items()} for row in rows)
    numbered = [{**row, "tags": [jsonl.classes.index(tag) for tag in row["tags"]]} for row in rows]
    write_lines(tmp_path / "b.jsonl", numbered)
    feature = {"feature": {"names": list(jsonl.classes), "_type": "ClassLabel"}, "_type": "Sequence"}
    metadata = {"huggingface": json.dumps({"info": {"features": {"tags": feature}}})}
    pq.write_table(pa.Table.from_pylist(numbered).replace_schema_metadata(metadata), tmp_path / "b.parquet")
    tags = [tag for row in rows for tag in row["tags"]]
    for name in ("a.jsonl", "a.parquet", "a.csv", "b.jsonl", "b.parquet"):
        found = opened(tmp_path / name, validation_fraction=0.0)
        assert len(found.labels[0]) == len(found.train.tokens)
        assert [jsonl.classes[label] for label in found.labels[0] if label >= 0] == tags
        assert found.classes == (("0", "1", "2", "3") if name == "b.jsonl" else jsonl.classes)


def test_a_rare_tag_may_be_held_out_and_long_texts_are_reported(tmp_path: Path) -> None:
    rows = [
        {"tokens": ["a", "b"], "tags": ["O", "B-X"]},
        {"tokens": [], "tags": []},
        *[{"tokens": ["c"], "tags": ["O"]}],
    ]
    folder = tmp_path / "both"
    folder.mkdir()
    write_lines(folder / "train.jsonl", rows)
    write_lines(folder / "validation.jsonl", [{"tokens": ["cc", "dddddd", "e"], "tags": ["I-X", "B-X", "O"]}])
    found = opened(folder, text=TextSection(context=5))
    assert found.classes == ("B-X", "I-X", "O")
    assert found.labels[0].tolist() == [-100, 2, -100, 0, -100, -100, 2, -100]
    assert found.labels[1].tolist() == [-100, 1, -100, -100, -100]
    assert any("rows without text: 1 left out" in each for each in found.left_out)
    cut = "ends of texts beyond data.text.context: 1 left out (\"row 1 of 'validation.jsonl'\" (2 of 3 words))"
    assert cut in found.left_out
    path = write_lines(tmp_path / "a.jsonl", [{"tokens": ["cat", "", "dog", "sat", ""], "tags": [*"ABAAA"]}])
    words = tokenizer_folder(tmp_path / "words", classifies=True)
    found = opened(path, text=TextSection(tokenizer=str(words), context=4), validation_fraction=0.0)
    assert found.left_out == (
        "words without a token: 2 left out (\"word 2 of row 1 of 'a.jsonl'\", \"word 5 of row 1 of 'a.jsonl'\")",
        "ends of texts beyond data.text.context: 1 left out (\"row 1 of 'a.jsonl'\" (1 of 5 words))",
    )


@pytest.mark.parametrize(
    ("rows", "keys", "said"),
    [
        ([{"tokens": ["a", "b"], "tags": ["O"]}], {}, "row 1 of 'a.jsonl' has 2 words and 1 tags: give each word one"),
        ([{"tokens": ["a"], "tags": "O"}], {}, r"row 1 .* needs a list of words .*found \['a'\] and 'O': in CSV,"),
        ([{"tokens": "a " * 99, "tags": "O " * 99}], {}, r"found 'a a a .*\.\.\..* a ' and 'O .*\.\.\..* O ': in CSV"),
        ([{"tokens": ["a"], "tags": None}], {}, r"found \['a'\] and None: give both"),
        ([{"tokens": [1], "tags": ["O"]}], {}, "needs a list of words and a list of tags"),
        ([{"tokens": '["\\ud800"]', "tags": '["O"]'}], {}, r"has the word '\\ud800', which is not valid text"),
        ([{"tokens": ["a"], "ner_tags": ["O"]}], {}, "no column for .*=tags, .* set data.label_column=ner_tags"),
        ([{"words": ["a"], "ner": ["O"]}], {}, "=tags, .* set data.text.column=COLUMN data.label_column=COLUMN"),
        ([{"tokens": ["a"], "tags": ["O"]}], {"label_column": "tag"}, "=tag, .* set data.label_column=tags"),
        ([{"token": ["a"], "tags": ["O"]}], {}, "=tokens, but token, tags: set data.text.column=token"),
        ([{"tokens": ["a"], "tags": ["O"]}, {"tokens": ["a"], "tags": [None]}], {}, "row 2 of 'a.jsonl' has no label"),
        ([{"tokens": ["a"], "tags": ["O"]}], {}, "one class, 'O'"),
        ([{"tokens": [], "tags": []}], {}, "has no text to learn from; rows without text: 1 left out"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, rows: list[dict[str, Any]], keys: dict[str, str], said: str) -> None:
    with pytest.raises(DataError, match=said):
        opened(write_lines(tmp_path / "a.jsonl", rows), validation_fraction=0.0, **keys)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"data.image_size": 32}, r"data.image_size=32' has no effect"),
        ({"train.loss": "focal"}, "train.loss=focal' has no effect: the loss is the cross-entropy of each word's tag"),
        ({"model.name": "resnet18", "model.options": {}}, "unknown token classifier 'resnet18'"),
        ({"model.name": "transformers:vit", "model.options": {}}, "'vit' is not a token classifier in Transformers"),
        (
            {"data.dataset": "docs", "data.path": None},
            "'docs', a data set of texts and of labelled texts, not of tagged texts",
        ),
    ],
)
def test_what_has_no_effect_or_does_not_exist_is_refused(recipe: Path, overrides: dict[str, Any], said: str) -> None:
    loaded = load_recipe(recipe, overrides)
    with pytest.raises(PacelineError, match=said):
        loaded.checked(plan_only(loaded).unused)
