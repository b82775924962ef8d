"""Text classification in the real loop: its figures are what plain arithmetic says; its weights are all it needs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from calls import output_of
from golden_sentences import raises
from tiny_text import reviews, tokenizer_folder, write_lines

from paceline.checkpoint.weights import read_weights
from paceline.cli.predict import Predict
from paceline.errors import ModelError, PacelineError
from paceline.host.world import World
from paceline.inference.export import ExportRequest, export
from paceline.inference.predict import load_predictor, open_predictor
from paceline.metrics.confusion import scores_by_class
from paceline.models.adapters import trained_layers
from paceline.models.transfer import adapt
from paceline.recipe.load import load_recipe
from paceline.recipe.model import Adapters, ModelSection
from paceline.trainer.evaluate_target import EvaluationRequest, evaluate_target
from paceline.trainer.train import plan_only
from paceline_text.models import build_text_classifier
from paceline_text.text_classification import TextClassification

Make = Callable[..., Any]

RECIPE = """
task: text_classification
model: {name: bert, options: {depth: 1, width: 16, heads: 2}}
data: {dataset: text_table, path: %s, validation_fraction: 0.3, text: {context: 24, rows: single}}
batch: {global_size: 8}
optimizer: {name: adamw, lr: 0.01}
schedule: {name: constant}
train: {duration: 24 steps, precision: fp32}
evaluate: {every: 24 steps, batch_size: 4}
checkpoint: {every: 12 steps}
parallel: {device: cpu, threads: 1}
telemetry: {log_every: 2 steps, trackers: [], report: off}
"""
predict = partial(output_of, Predict)
TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("reviews")
    path = root / "recipe.yaml"
    path.write_text(RECIPE % write_lines(root / "reviews.jsonl", reviews(90)))
    return path


def task_of(recipe: Path, overrides: dict[str, Any] | None = None) -> TextClassification:
    task = TextClassification(load_recipe(recipe, overrides or {}).recipe)
    task.data_facts(World())
    return task


def test_other_texts_may_be_of_one_class(train: Make, tmp_path: Path) -> None:
    run_dir = train("run").run_dir
    others = write_lines(tmp_path / "others.jsonl", [row for row in reviews(30) if row["label"] == "other"])
    found = evaluate_target(EvaluationRequest(target=run_dir, overrides={"data.path": str(others)}))
    assert (found.samples, found.counts["top1_correct"]) == (15, 15)
    assert "1 of the 2 classes of the weights are not in the data: animal" in found.left_out
    assert [(each["class"], each["count"]) for each in scores_by_class(found.confusion or {})] == [("other", 15)]


@pytest.mark.needs("torchmetrics")
def test_loss_and_accuracy_are_means_over_the_held_out_texts(train: Make, recipe: Path) -> None:
    f1 = {"name": "torchmetrics.classification:MulticlassF1Score", "num_classes": 2, "average": "micro"}
    result, task = train("run", {"evaluate.metrics": {"f1": f1}}), task_of(recipe)
    network = task.build_model()
    network.load_state_dict(read_weights(result.run_dir).state)
    corpus, labels = task.dataset.validation, torch.from_numpy(task.dataset.labels[1])
    texts = [torch.from_numpy(corpus.read(n, 0, int(size)))[None] for n, size in enumerate(corpus.lengths)]
    with torch.no_grad():
        logits = torch.cat([network.eval()(each, torch.ones_like(each)) for each in texts])
    assert result.metrics["loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-5)
    right = logits.argmax(dim=1) == labels
    assert result.metrics["top1_accuracy"] == pytest.approx(100 * right.double().mean().item())
    assert result.metrics["f1"] == pytest.approx(right.double().mean().item())
    assert result.metrics["top1_accuracy"] > 70  # 24 steps; processors round differently
    assert (result.run_dir / "evaluation" / "confusion.json").is_file()
    examples = json.loads((result.run_dir / "evaluation" / "examples.json").read_text())
    assert "row" in examples["examples"][0]["name"]


def test_correcting_twice_for_rare_classes_is_told(recipe: Path) -> None:
    both = {"train.class_weights": "balanced", "data.sampling": "balanced"}
    for overrides in ({"train.class_weights": "balanced"}, {"data.sampling": "balanced"}, both):
        notes = plan_only(load_recipe(recipe, overrides)).left_out
        assert any("both favour rare classes" in note for note in notes) == (overrides == both)


def test_weights_alone_label_prompts_and_lines(train: Make, tmp_path: Path) -> None:
    run_dir = train("run").run_dir
    assert predict(run_dir, "--prompt", "cat sat on the mat").startswith("animal ")
    (tmp_path / "new.txt").write_text("cat sat\ndog ran under so\n")
    lines = predict(run_dir, tmp_path / "new.txt", "--top-k", "1").splitlines()
    assert [line.partition("  ")[0] for line in lines] == [f"{tmp_path / 'new.txt'}:{n}" for n in (1, 2)]
    assert [line.split()[1] for line in lines] == ["animal", "other"]
    write_lines(tmp_path / "new.jsonl", [{"text": "cat sat"}, {"text": "dog"}])
    predict(run_dir, tmp_path / "new.jsonl", "--output", tmp_path / "found.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    assert [row["labels"][0] for row in rows] == ["animal", "other"]
    (lone,) = (run_dir / "checkpoints").glob("*24/model.safetensors")
    export(ExportRequest(target=run_dir, output=tmp_path / "a.safetensors"))
    for path in (lone, tmp_path / "a.safetensors"):
        assert predict(path, "--prompt", "cat sat") == predict(run_dir, "--prompt", "cat sat")
    with raises(PacelineError, path="step-00000024/model.safetensors"):
        load_predictor(run_dir)


def test_a_batch_changes_no_text_s_answer(train: Make) -> None:
    labeller = open_predictor(train("run").run_dir, device=torch.device("cpu"))
    texts = [labeller.prepare(row["text"].encode()) for row in reviews(12)]
    for text, answer in zip(texts, labeller.answer(texts, 2), strict=True):
        assert labeller.answer([text], 2)[0].probabilities == pytest.approx(answer.probabilities, abs=1e-6)


def test_a_classifier_begins_from_a_language_model(train: Make, recipe: Path, tmp_path: Path) -> None:
    """The house's own: the output layer is new, the rest is the language model's."""
    import paceline

    masked = {"task": "language_modeling", "data.dataset": "docs", "data.path": None, "data.text.objective": "masked"}
    kept = {"train.duration": "2 steps", "evaluate.every": "off", "optimizer.lr": 1e-30}
    source = paceline.train(recipe, overrides={**masked, **kept}, run_dir=tmp_path / "bert", quiet=True)
    begun = {"model.initialize_from": str(source.run_dir), "model.initialize_partly": True}
    result = train("run", {**begun, **kept, "checkpoint.every": "2 steps"})
    before, after = read_weights(source.run_dir).state, read_weights(result.run_dir).state
    assert torch.equal(before["blocks.0.attention.qkv.weight"], after["blocks.0.attention.qkv.weight"])
    assert after["head.weight"].shape == (2, 16)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `save_pretrained` writes of a BERT that learned hidden words."""
    transformers = pytest.importorskip("transformers", reason="pip install 'paceline[transformers]'")
    folder = tokenizer_folder(tmp_path_factory.mktemp("hub") / "bert", classifies=True)
    torch.manual_seed(5)
    config = transformers.BertConfig(vocab_size=24, max_position_embeddings=24, **TINY)
    transformers.BertForMaskedLM(config).save_pretrained(folder)
    return folder


def test_a_folder_s_weights_are_loaded_and_its_classifier_is_new(checkpoint: Path) -> None:
    model = ModelSection(name=f"transformers:{checkpoint}", pretrained=True)
    torch.manual_seed(1)
    network = build_text_classifier(model, vocabulary=24, context=24, classes=3, pad=0)
    held = read_weights(checkpoint / "model.safetensors").state
    own = network.state_dict()
    shared = {name for name in own if name.startswith("bert.") and "pooler" not in name}
    assert len(shared) > 10
    assert all(torch.equal(own[name], held[name]) for name in shared)
    assert own["classifier.weight"].shape == (3, 16)
    torch.manual_seed(1)
    again = build_text_classifier(model, vocabulary=24, context=24, classes=3, pad=0)
    assert torch.equal(again.state_dict()["classifier.weight"], own["classifier.weight"])
    for wrong in (
        ModelSection(name=model.name, pretrained=True, options={"num_hidden_layers": 2}),
        ModelSection(name="transformers:bert", pretrained=True),
    ):
        with raises(ModelError, key="model.pretrained", value=True):
            build_text_classifier(wrong, vocabulary=24, context=24, classes=3, pad=0)


@pytest.mark.parametrize("tokens", [21, 25])
def test_a_checkpoint_is_refused_with_a_tokenizer_that_is_not_its_own(checkpoint: Path, tokens: int) -> None:
    model = ModelSection(name=f"transformers:{checkpoint}", pretrained=True)
    said = f"a vocabulary of 24 tokens (vocab_size), and the tokenizer has {tokens}; use the one of these weights: "
    with pytest.raises(ModelError, match=re.escape(f"{said}data.text.tokenizer={checkpoint}")):
        build_text_classifier(model, vocabulary=tokens, context=24, classes=3, pad=0)
    if tokens > 24:
        with raises(ModelError, key="model.name"):
            build_text_classifier(replace(model, pretrained=False), vocabulary=tokens, context=24, classes=3, pad=0)


def test_a_checkpoint_is_fine_tuned_and_exported(train: Make, checkpoint: Path, tmp_path: Path) -> None:
    asked = {"model.name": f"transformers:{checkpoint}", "model.options": {}, "model.pretrained": True}
    result = train("run", {**asked, "data.text.tokenizer": str(checkpoint)})
    export(ExportRequest(target=result.run_dir, output=tmp_path / "hub", form="transformers"))
    assert {each.name for each in (tmp_path / "hub").iterdir()} == {
        *("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    }
    data = load_recipe(result.run_dir).recipe.data.path  # an export does not say where the data are
    again = evaluate_target(EvaluationRequest(target=tmp_path / "hub", overrides=(f"data.path={data}",)))
    assert again.metrics["loss"] == pytest.approx(result.metrics["loss"], rel=1e-6)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert", "gpt2", "llama", "modernbert"])
def test_architectures_classify_a_text_as_alone_however_it_is_padded(kind: str, per_token: bool) -> None:
    pytest.importorskip("transformers", reason="pip install 'paceline[transformers]'")
    options: dict[str, Any] = dict(TINY)
    if kind in ("gpt2", "distilbert"):
        options.pop("intermediate_size")
    if kind == "distilbert":
        options = {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 24}
    torch.manual_seed(0)
    model = ModelSection(name=f"transformers:{kind}", options=options)
    sizes = {"vocabulary": 29, "context": 12, "classes": 3, "pad": 28}
    network = build_text_classifier(model, **sizes, per_token=per_token).double().eval()
    tokens, mask = torch.randint(27, (2, 12)), torch.ones(2, 12, dtype=torch.int64)
    tokens[0, 5:], mask[0, 5:] = 28, 0
    together = network(tokens, mask)
    assert together.shape == ((2, 12, 3) if per_token else (2, 3))
    alone = network(tokens[:1, :5], mask[:1, :5])
    assert ((together[:1, :5] if per_token else together[:1]) - alone).abs().max() < 1e-8


@pytest.mark.needs("peft")
@pytest.mark.parametrize(
    ("kind", "heads"),
    [
        ("bert", ["bert.pooler.dense", "classifier"]),
        ("roberta", ["classifier.dense", "classifier.out_proj"]),
        ("gpt2", ["score"]),
    ],
)
def test_all_new_layers_are_trained_beside_adapters(kind: str, heads: list[str]) -> None:
    pytest.importorskip("transformers", reason="pip install 'paceline[transformers]'")
    options = {key: value for key, value in TINY.items() if kind != "gpt2" or key != "intermediate_size"}
    model = ModelSection(name=f"transformers:{kind}", options=options, adapters=Adapters(rank=2))
    network = build_text_classifier(model, vocabulary=29, context=12, classes=3, pad=28)
    adapt(network, model)
    trained = {name for name, each in network.named_parameters() if each.requires_grad}
    assert {name.rpartition(".")[0] for name in trained if "lora_" not in name} == set(heads)
    assert trained_layers(network) == heads


@pytest.mark.needs("peft")
def test_a_classifier_s_adapters_are_exported_with_it(train: Make, checkpoint: Path, tmp_path: Path) -> None:
    asked = {"model.name": f"transformers:{checkpoint}", "model.options": {}, "model.pretrained": True}
    asked |= {"data.text.tokenizer": str(checkpoint), "model.adapters": {"rank": 2}}
    run_dir = train("run", asked).run_dir
    for form in ("peft", "transformers"):
        written = export(ExportRequest(target=run_dir, output=tmp_path / form, form=form))
        assert written.largest_difference is not None
        assert written.largest_difference < 1e-5
    said = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert (said["task_type"], said["r"]) == ("SEQ_CLS", 2)
    assert sorted(said["modules_to_save"]) == ["bert.pooler.dense", "classifier"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"data.image_size": 32}, r"data.image_size=32' has no effect: .* reads one text per sample"),
        ({"data.text.rows": "packed"}, "data.text.rows=packed' has no effect"),
        ({"data.text.objective": "masked"}, "data.text.objective=masked' has no effect"),
        ({"train.loss": "mse"}, "train.loss=mse gave a result of shape"),
        ({"model.name": "resnet18", "model.options": {}}, "unknown text classifier 'resnet18'"),
        ({"model.name": "transformers:vit", "model.options": {}}, "'vit' is not a text classifier in Transformers"),
    ],
)
def test_what_has_no_effect_or_does_not_exist_is_refused(recipe: Path, overrides: dict[str, Any], said: str) -> None:
    loaded = load_recipe(recipe, overrides)
    with pytest.raises(PacelineError, match=said):
        loaded.checked(plan_only(loaded).unused)
