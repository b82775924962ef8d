"""Checkpoints of Transformers on the hub, in the person of a stand-in server: what is read, from where, and when."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import output_of
from golden_sentences import raises
from hub_server import HubServer
from tiny_text import reviews, tokenizer_folder, write_lines

import paceline
from paceline.checkpoint.weights import read_weights
from paceline.cli.export import Export
from paceline.cli.predict import Predict
from paceline.cli.train import Train
from paceline.errors import PacelineError
from paceline.inference.export import ExportRequest, export
from paceline.recipe.model import ModelSection
from paceline.trainer.evaluate_target import EvaluationRequest, evaluate_target
from paceline_advisor.commands import Estimate
from paceline_text.models import build_language_model, build_text_classifier
from paceline_text.tokenizer import open_tokenizer

transformers = pytest.importorskip("transformers", reason="pip install 'paceline[transformers]'")

NAME = "transformers:me/bert"
RECIPE = """
task: text_classification
model: {name: "%s", pretrained: true}
data: {dataset: text_table, path: %s, validation_fraction: 0.3, text: {context: 24, rows: single, tokenizer: me/bert}}
batch: {global_size: 8}
optimizer: {name: adamw, lr: 0.01}
schedule: {name: constant}
train: {duration: 8 steps, precision: fp32}
evaluate: {every: 8 steps, batch_size: 4}
checkpoint: {every: 4 steps}
parallel: {device: cpu, threads: 1}
telemetry: {log_every: 2 steps, trackers: [], report: off}
"""
TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
SIZES = {"vocabulary": 24, "context": 24}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `save_pretrained` writes of a BERT and its tokenizer."""
    made = tokenizer_folder(tmp_path_factory.mktemp("published") / "bert", classifies=True)
    torch.manual_seed(5)
    config = transformers.BertConfig(vocab_size=24, max_position_embeddings=24, my_own=1, **TINY, **{"my-key": 1})
    transformers.BertForMaskedLM(config).save_pretrained(made)
    return made


@pytest.fixture
def published(hub: HubServer, folder: Path) -> HubServer:
    """The hub with that folder as the repository me/bert."""
    hub.files["models/me/bert"] = {each.name: each.read_bytes() for each in folder.iterdir()}
    hub.files["models/me/bert"]["pytorch_model.bin"] = b"never opened"
    return hub


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE % (NAME, write_lines(tmp_path / "reviews.jsonl", reviews(60))))
    return path


def classifier(name: str = NAME, **more: Any) -> torch.nn.Module:
    return build_text_classifier(ModelSection(name=name, **more), **SIZES, classes=3, pad=0)


def weights_read(hub: HubServer) -> bool:
    return any("safetensors" in each and "resolve" in each for each in hub.requests)


def change(hub: HubServer, **keys: Any) -> None:
    """A new commit with other keys in config.json."""
    files = hub.files["models/me/bert"]
    hub.files["models/me/bert"] = files | {"config.json": json.dumps(json.loads(files["config.json"]) | keys).encode()}


def test_weights_are_read_when_they_are_asked_for(published: HubServer, folder: Path) -> None:
    classifier()
    build_language_model(ModelSection(name=NAME), **SIZES, is_masked=True)
    assert not weights_read(published)
    loaded = build_language_model(ModelSection(name=NAME, pretrained=True), **SIZES, is_masked=True).state_dict()
    held = read_weights(folder / "model.safetensors").state
    assert all(torch.equal(loaded[name], tensor) for name, tensor in held.items())
    own = open_tokenizer("me/bert")
    assert not any(".bin" in each for each in published.requests)
    published.close()
    published.requests.clear()
    tags = build_text_classifier(ModelSection(name=NAME, pretrained=True), **SIZES, classes=3, pad=0, per_token=True)
    shared = {name for name in tags.state_dict() if name.startswith("bert.")}
    assert len(shared) > 10
    assert all(torch.equal(tags.state_dict()[name], held[name]) for name in shared)
    assert open_tokenizer("me/bert").to_tree() == own.to_tree() == open_tokenizer(str(folder)).to_tree()
    assert own.has_chat_template is False
    assert not published.requests, "what is in the cache is not asked for again"


@pytest.mark.parametrize("is_cached", [False, True])
def test_a_large_model_s_files_are_all_read(hub: HubServer, tmp_path: Path, is_cached: bool) -> None:
    """Also where the cache lacks one of them."""
    config = transformers.GPT2Config(vocab_size=24, n_positions=24, n_embd=16, n_layer=2, n_head=2)
    network = transformers.GPT2LMHeadModel(config)
    network.save_pretrained(tmp_path / "gpt", max_shard_size="10KB")
    hub.files["models/me/gpt"] = {each.name: each.read_bytes() for each in (tmp_path / "gpt").iterdir()}
    assert sum("-of-" in each for each in hub.files["models/me/gpt"]) > 1
    if is_cached:
        repository, commit = tmp_path / "hub-cache" / "models--me--gpt", hub.commit("models/me/gpt")
        shutil.copytree(tmp_path / "gpt", repository / "snapshots" / commit)
        min((repository / "snapshots" / commit).glob("*-of-*")).unlink()
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(commit)
    loaded = build_language_model(ModelSection(name="transformers:me/gpt", pretrained=True), **SIZES).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in network.state_dict().items())


def test_a_cache_that_other_programs_filled(hub: HubServer, folder: Path, tmp_path: Path) -> None:
    """They keep no list of a repository's files."""
    repository = tmp_path / "hub-cache" / "models--me--bert"
    shutil.copytree(folder, repository / "snapshots" / "c0ffee")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("c0ffee")
    hub.close()
    assert classifier(pretrained=True).config_keys["_commit_hash"] == "c0ffee"
    assert open_tokenizer("me/bert").pad == 0
    (repository / "snapshots" / "c0ffee" / "model.safetensors").unlink()
    assert classifier().config_keys["my_own"] == 1
    with pytest.raises(PacelineError, match="the hub cannot be reached, and the cache has no complete copy"):
        classifier(pretrained=True)


def test_a_folder_wins(published: HubServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder, "me/bert")
    assert classifier(pretrained=True).config_keys["my_own"] == 1
    assert open_tokenizer("me/bert").pad == 0
    assert not published.requests


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gpt3", r"'gpt3' is not a text classifier in Transformers\.( Did you mean [^/]*)?$"),
        ("bert-base-uncased", "A checkpoint on the Hugging Face hub is transformers:OWNER/bert-base-uncased"),
        (
            "me/none",
            r"there is no folder me/none here, and cannot read hf://me/none \(there is none of this name.*HF_TOKEN",
        ),
        (
            "me/gated",
            r"cannot read hf://me/gated \(there is none of this name, or it is .* gated, and HF_TOKEN in the env",
        ),
        ("me/pickled", "has no model.safetensors, and pickles are not read"),
        ("me/bert@v2", "cannot read hf://me/bert@v2"),
        ("./me/bert", "config.json cannot be read"),
    ],
)
def test_mistakes_are_named(published: HubServer, name: str, said: str) -> None:
    files = published.files["models/me/bert"]
    published.files["models/me/gated"] = files
    published.gated.add("models/me/gated")
    published.files["models/me/pickled"] = {key: files[key] for key in ("config.json", "pytorch_model.bin")}
    with pytest.raises(PacelineError, match=said) as caught:
        classifier(f"transformers:{name}", pretrained=True)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_that_is_nowhere(hub: HubServer) -> None:
    with pytest.raises(
        PacelineError, match=r"data.text.tokenizer=me/none: there is no folder me/none here, and cannot"
    ):
        open_tokenizer("me/none")
    hub.requests.clear()
    with raises(PacelineError, key="data.text.tokenizer", value="words/tokenizer.json"):
        open_tokenizer("words/tokenizer.json")
    assert not hub.requests


def test_plans_and_estimates_read_no_weights(published: HubServer, recipe: Path) -> None:
    assert "training samples" in output_of(Train, recipe, "--plan-only")
    output_of(Estimate, recipe)
    assert any("config.json" in each for each in published.requests)
    assert not weights_read(published)


def test_without_a_network_a_command_ends_with_a_sentence(recipe: Path, tmp_path: Path) -> None:
    server = HubServer()
    server.close()
    places = {"HF_ENDPOINT": server.endpoint, "HF_HUB_CACHE": str(tmp_path / "empty"), "HF_HUB_OFFLINE": "0"}
    words = ["train", str(recipe), "data.text.tokenizer=bytes", "--run-dir", str(tmp_path / "run")]
    ended = subprocess.run(
        [sys.executable, "-m", "paceline", *words], env=os.environ | places, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    last = ended.stderr.strip().splitlines()[-1]
    for part in ("no folder me/bert here", "hf download me/bert", "HF_ENDPOINT", f"the cache is {tmp_path / 'empty'}"):
        assert part in last


def test_an_option_that_the_network_has_not_is_refused_with_a_repository_too(
    published: HubServer, recipe: Path
) -> None:
    with raises(PacelineError, key="model.options"):
        paceline.train(recipe, overrides={"model.options": {"hiden_act": "relu"}}, quiet=True)


def test_a_run_needs_the_hub_once(published: HubServer, folder: Path, recipe: Path, tmp_path: Path) -> None:
    """The same run as from the folder; its weights and its records hold all that later commands need."""
    asked = {"data.text.tokenizer": str(folder)}
    run = tmp_path / "run"
    begun = paceline.train(recipe, overrides={**asked, "train.until": "4 steps"}, run_dir=run, quiet=True)
    assert begun.status == "stopped"
    kept = json.loads((run / "plan.json").read_text())["network_config"]
    assert (kept["_model_type"], kept["my_own"]) == ("bert", 1)
    assert kept["_commit_hash"] == published.commit("models/me/bert")
    change(published, hidden_act="relu")
    shutil.rmtree(tmp_path / "hub-cache")
    published.requests.clear()
    resumed = paceline.train(recipe, overrides=asked, run_dir=run, quiet=True)
    assert json.loads((run / "plan.json").read_text())["network_config"] == kept
    overrides = {**asked, "model.name": f"transformers:{folder}"}
    whole = paceline.train(recipe, overrides=overrides, run_dir=tmp_path / "whole", quiet=True)
    assert resumed.summary.weights_sha256 == whole.summary.weights_sha256
    for target in (run, *run.glob("checkpoints/*8/model.safetensors")):
        assert evaluate_target(EvaluationRequest(target=target)).metrics["loss"] == resumed.metrics["loss"]
        said = [output_of(Predict, each, "--prompt", "cat sat") for each in (target, tmp_path / "whole")]
        assert said[0] == said[1]
    export(ExportRequest(target=run, output=tmp_path / "hub", form="transformers"))
    written = json.loads((tmp_path / "hub" / "config.json").read_text())
    assert (written["hidden_act"], written["my_own"]) == ("gelu", 1)
    assert "_commit_hash" not in written
    listed = output_of(Export, run, "--format", "transformers", "--push", "me/mine")
    assert {each.name for each in (tmp_path / "hub").iterdir()} <= {line.split(": ")[0] for line in listed.splitlines()}
    output_of(Train, recipe, *(f"{key}={value}" for key, value in asked.items()), "--run-dir", run, "--plan-only")
    assert not published.requests


def test_weights_are_not_scored_with_another_tokenizer(published: HubServer, recipe: Path, tmp_path: Path) -> None:
    run = paceline.train(recipe, run_dir=tmp_path / "run", quiet=True)
    assert evaluate_target(EvaluationRequest(target=run.run_dir)).metrics["loss"] == run.metrics["loss"]
    files = published.files["models/me/bert"]
    other = files["tokenizer.json"].replace(b'"cat"', b'"was"').replace(b'"dog"', b'"cat"').replace(b'"was"', b'"dog"')
    published.files["models/me/bert"] = files | {"tokenizer.json": other}
    shutil.rmtree(tmp_path / "hub-cache")
    with raises(PacelineError, key="data.text.tokenizer", value="me/bert"):
        evaluate_target(EvaluationRequest(target=run.run_dir))
    with raises(PacelineError, key="digest"):
        paceline.train(recipe, overrides={"train.duration": "9 steps"}, run_dir=run.run_dir, quiet=True)


@pytest.mark.needs("peft")
def test_adapters_name_the_revision_that_they_belong_to(published: HubServer, recipe: Path, tmp_path: Path) -> None:
    commit = published.commit("models/me/bert")
    overrides = {"model.adapters": {"rank": 2}, "model.name": f"{NAME}@{commit}"}
    run = paceline.train(recipe, overrides=overrides, run_dir=tmp_path / "run", quiet=True)
    export(ExportRequest(target=run.run_dir, output=tmp_path / "peft", form="peft"))
    said = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert (said["base_model_name_or_path"], said["revision"]) == ("me/bert", commit)


def test_a_copy_of_a_run_is_not_resumed_with_another_config(published: HubServer, recipe: Path, tmp_path: Path) -> None:
    """On a host that has neither the run's directory nor its cache, the hub is asked again."""
    asked = {"checkpoint.mirror": f"file://{tmp_path}/copy"}
    paceline.train(recipe, overrides={**asked, "train.until": "4 steps"}, run_dir=tmp_path / "run", quiet=True)
    before = published.files["models/me/bert"]
    change(published, hidden_act="relu", layer_norm_eps=1e-3)
    for name in ("run", "hub-cache"):
        shutil.rmtree(tmp_path / name)
    with pytest.raises(
        PacelineError, match=r"another config.json of model.name=.*: hidden_act, layer_norm_eps changed"
    ):
        paceline.train(recipe, overrides=asked, run_dir=tmp_path / "run", quiet=True)
    published.files["models/me/bert"] = before | {"README.md": b"Words."}
    shutil.rmtree(tmp_path / "hub-cache")
    assert paceline.train(recipe, overrides=asked, run_dir=tmp_path / "run", quiet=True).status == "completed"
