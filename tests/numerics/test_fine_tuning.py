"""Fine-tuning gives the losses of Transformers, of its Trainer and of peft on the same batches, step by step."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tiny_text import chats, reviews, tagged, tokenizer_folder, write_lines

import paceline
from paceline.checkpoint.weights import read_weights
from paceline.data.batch import Batch
from paceline.errors import DataError
from paceline.inference.export import ExportRequest, export
from paceline.inference.predict import open_predictor
from paceline.trainer.evaluate_target import EvaluationRequest, evaluate_target
from paceline_text.answers import Sampling, TextPredictor
from paceline_text.language_modeling import LanguageModeling
from paceline_text.text_classification import TextClassification
from paceline_text.token_classification import TokenClassification

transformers = pytest.importorskip("transformers", reason="pip install 'paceline[transformers]'")

# Of peft, about its own use of Transformers.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")]
STEPS, WITHIN, LR = 50, 1e-5, 2e-3
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
BERT = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
COMMON: dict[str, Any] = {
    "seed": 3,
    "batch": {"global_size": 8, "micro_size": 2},
    "optimizer": {"name": "adamw", "lr": LR, "weight_decay": 0.0},
    "schedule": {"name": "constant"},
    "train": {"duration": f"{STEPS} steps", "precision": "fp32"},
    "evaluate": {"every": "off"},
    "checkpoint": {"every": f"{STEPS} steps"},
    "parallel": {"device": "cpu", "threads": 1},
    "telemetry": {"log_every": "1 steps", "trackers": [], "report": False},
}


class Seen:
    """What a task's steps saw: sample numbers, the loss over the global batch, and the first weights.

    A step that was tried before training counts once: its parts are kept by their place.
    """

    def __init__(self) -> None:
        self.parts: dict[tuple[int, int], tuple[list[int], float]] = {}
        self.first: dict[str, torch.Tensor] = {}

    def watched(self, loss_of: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """The task's method `loss`, watched."""

        def loss(task: Any, model: Any, batch: Batch) -> torch.Tensor:
            found = loss_of(task, model, batch)
            if torch.is_grad_enabled():
                self.add(model, batch, found)
            return found

        return loss

    def add(self, model: Any, batch: Batch, loss: torch.Tensor) -> None:
        if not self.first:
            self.first = copy.deepcopy(model.state_dict())
        share = float(loss.detach()) * batch.weight / batch.slice.step_weight
        self.parts[batch.slice.step, batch.slice.logical_rank] = (batch.ids.tolist(), share)

    @property
    def ids(self) -> list[int]:
        """The samples of all steps, in order."""
        return [sample for place in sorted(self.parts) for sample in self.parts[place][0]]

    @property
    def losses(self) -> list[float]:
        """The loss of each step."""
        return [sum(share for (at, _), (_, share) in self.parts.items() if at == step) for step in range(STEPS)]


def trained(kind: type[Any], recipe: dict[str, Any], folder: Path) -> tuple[Seen, Any]:
    seen, path = Seen(), folder / "recipe.yaml"
    path.write_text(json.dumps({**COMMON, **recipe}))
    with mock.patch.object(kind, "loss", seen.watched(kind.loss)):
        result = paceline.train(path, run_dir=folder / "run", quiet=True)
    assert len(seen.ids) == 8 * STEPS
    return seen, result


def plain_loop(network: Any, batches: list[Callable[[], dict[str, torch.Tensor]]]) -> list[float]:
    """The loop of a textbook, with the loss that the library's network returns."""
    optimizer = torch.optim.AdamW((each for each in network.parameters() if each.requires_grad), lr=LR, weight_decay=0)
    losses = []
    for make in batches:
        loss = network.train()(**make()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def by_trainer(network: Any, samples: list[dict[str, Any]], collate: Any, folder: Path, accumulate: int) -> list[float]:
    """Losses of Hugging Face's Trainer, which takes the samples in their order."""
    pytest.importorskip("accelerate", reason="Trainer needs it: pip install accelerate")

    class InOrder(transformers.Trainer):  # type: ignore[misc,name-defined]  # no types
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(samples)

    asked = transformers.TrainingArguments(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=8 // accumulate,
        gradient_accumulation_steps=accumulate,
        max_steps=STEPS,
        learning_rate=LR,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
    )
    trainer = InOrder(model=network, args=asked, train_dataset=samples, data_collator=collate)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def furthest(ours: list[float], theirs: list[float]) -> float:
    return max(abs(one - other) for one, other in zip(ours, theirs, strict=True))


@pytest.fixture(scope="module")
def classified(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("classified")
    rows, words = reviews(64), tokenizer_folder(folder / "words", classifies=True)
    text = {"tokenizer": str(words), "context": 8, "rows": "single"}
    data = {"dataset": "text_table", "path": str(write_lines(folder / "train.jsonl", rows)), "text": text}
    recipe = {
        "task": "text_classification",
        "model": {"name": "transformers:bert", "options": BERT},
        "data": data | {"validation_fraction": 0.0},
    }
    seen, result = trained(TextClassification, recipe, folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(words)

    def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
        texts = [each["text"] for each in samples]
        given = tokenizer(texts, truncation=True, max_length=8, padding=True, return_tensors="pt")
        labels = torch.tensor([("animal", "other").index(each["label"]) for each in samples])
        return {"input_ids": given["input_ids"], "attention_mask": given["attention_mask"], "labels": labels}

    config = transformers.BertConfig(vocab_size=24, max_position_embeddings=9, num_labels=2, **BERT)
    network = transformers.BertForSequenceClassification(config)
    network.load_state_dict(seen.first)
    samples = [rows[sample] for sample in seen.ids]
    return seen, network, samples, collate, result, folder


def test_a_text_classifier_learns_as_in_a_plain_loop_and_by_trainer(classified: Any, tmp_path: Path) -> None:
    seen, network, samples, collate, _, _ = classified
    batches = [lambda step=step: collate(samples[8 * step : 8 * step + 8]) for step in range(STEPS)]
    assert furthest(seen.losses, plain_loop(copy.deepcopy(network), batches)) <= WITHIN
    assert seen.losses[0] - seen.losses[STEPS - 1] > 0.1
    assert furthest(seen.losses, by_trainer(copy.deepcopy(network), samples, collate, tmp_path, accumulate=1)) <= WITHIN


def test_a_text_classifier_is_exported_for_transformers(classified: Any) -> None:
    _, _, samples, _, result, folder = classified
    written = export(ExportRequest(target=result.run_dir, output=folder / "hub", form="transformers"))
    assert written.largest_difference is not None
    assert written.largest_difference < 1e-5
    pipe = transformers.pipeline("text-classification", model=str(folder / "hub"), tokenizer=str(folder / "hub"))
    assert {each["label"] for each in pipe([row["text"] for row in samples[:8]], truncation=True)} <= {
        "animal",
        "other",
    }


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """As `classified`, of words; the tokenizer cuts some into several tokens."""
    folder = tmp_path_factory.mktemp("marked")
    rows = [{**row, "tokens": [word + "-" * (word == "cat") for word in row["tokens"]]} for row in tagged(64)]
    words = tokenizer_folder(folder / "words", classifies=True)
    text = {"tokenizer": str(words), "context": 8, "rows": "single"}
    data = {"dataset": "text_table", "path": str(write_lines(folder / "train.jsonl", rows)), "text": text}
    model = {"name": "transformers:bert", "options": BERT}
    recipe = {"task": "token_classification", "model": model, "data": data | {"validation_fraction": 0.0}}
    seen, result = trained(TokenClassification, recipe, folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(words)
    names = sorted({tag for row in rows for tag in row["tags"]})

    def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
        asked = {"truncation": True, "max_length": 8, "padding": True, "return_tensors": "pt"}
        given = tokenizer([each["tokens"] for each in samples], is_split_into_words=True, **asked)
        labels = torch.full_like(given["input_ids"], -100)
        for row, each in enumerate(samples):
            numbers = given.word_ids(row)
            for place, (before, word) in enumerate(zip([None, *numbers], numbers, strict=False)):
                if word not in (None, before):
                    labels[row, place] = names.index(each["tags"][word])
        return {"input_ids": given["input_ids"], "attention_mask": given["attention_mask"], "labels": labels}

    config = transformers.BertConfig(vocab_size=24, max_position_embeddings=9, num_labels=len(names), **BERT)
    network = transformers.BertForTokenClassification(config)
    network.load_state_dict(seen.first)
    return seen, network, [rows[sample] for sample in seen.ids], collate, result, folder


def test_a_token_classifier_learns_as_in_a_plain_loop_and_by_trainer(marked: Any, tmp_path: Path) -> None:
    seen, network, samples, collate, _, _ = marked
    batches = [lambda step=step: collate(samples[8 * step : 8 * step + 8]) for step in range(STEPS)]
    assert furthest(seen.losses, plain_loop(copy.deepcopy(network), batches)) <= WITHIN
    assert seen.losses[0] - seen.losses[STEPS - 1] > 0.1
    # Not accumulated: Trainer would add up the means of parts, however many words each has.
    assert furthest(seen.losses, by_trainer(network, samples, collate, tmp_path, accumulate=1)) <= WITHIN


def test_a_token_classifier_is_exported_for_transformers(marked: Any) -> None:
    _, _, samples, _, result, folder = marked
    written = export(ExportRequest(target=result.run_dir, output=folder / "hub", form="transformers"))
    assert written.largest_difference is not None
    assert written.largest_difference < 1e-5
    pipe = transformers.pipeline("token-classification", model=str(folder / "hub"), tokenizer=str(folder / "hub"))
    named = {tag for row in samples for tag in row["tags"]}
    assert {each["entity"] for row in samples[:8] for each in pipe(" ".join(row["tokens"]))} <= named


@pytest.fixture(scope="module")
def talk(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Rows, a tokenizer, and a recipe to learn from them with GPT-2, whose output layer is tied."""
    folder = tmp_path_factory.mktemp("talk")
    rows, tokenizer = chats(64), tokenizer_folder(folder / "tokenizer")
    recipe = {
        "task": "language_modeling",
        "model": {"name": "transformers:gpt2", "options": GPT2},
        "data": {
            "dataset": "chat",
            "path": str(write_lines(folder / "train.jsonl", rows)),
            "validation_fraction": 0.0,
            "text": {"tokenizer": str(tokenizer), "context": 96, "rows": "single"},
        },
    }
    theirs = transformers.AutoTokenizer.from_pretrained(tokenizer)

    def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
        given = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        found = [theirs.apply_chat_template(each["messages"], **given) for each in samples]
        width = max(len(each["input_ids"]) for each in found)
        ids = torch.full((len(found), width), theirs.pad_token_id)
        labels = torch.full_like(ids, -100)
        for row, each in enumerate(found):
            tokens, asked = torch.tensor(each["input_ids"]), torch.tensor(each["assistant_masks"]).bool()
            ids[row, : len(tokens)] = tokens
            labels[row, : len(tokens)][asked] = tokens[asked]
        return {"input_ids": ids, "labels": labels}

    config = transformers.GPT2Config(
        vocab_size=len(theirs), n_positions=96, bos_token_id=None, eos_token_id=None, pad_token_id=None, **GPT2
    )
    return folder, rows, recipe, collate, lambda: transformers.GPT2LMHeadModel(config)


def test_answers_are_learned_as_in_a_plain_loop_and_by_trainer(talk: Any, tmp_path: Path) -> None:
    _, rows, recipe, collate, make = talk
    seen, _ = trained(LanguageModeling, recipe, tmp_path)
    network = make()
    network.load_state_dict(seen.first)
    samples = [rows[sample] for sample in seen.ids]
    batches = [lambda step=step: collate(samples[8 * step : 8 * step + 8]) for step in range(STEPS)]
    assert furthest(seen.losses, plain_loop(copy.deepcopy(network), batches)) <= WITHIN
    assert seen.losses[0] - seen.losses[STEPS - 1] > 1
    # In two parts of unequal weight: Trainer divides by the tokens of both, too.
    assert furthest(seen.losses, by_trainer(network, samples, collate, tmp_path, accumulate=2)) <= WITHIN


def test_an_answer_ends_with_its_turn_whatever_token_ends_a_document(talk: Any, tmp_path: Path) -> None:
    """The token that a chat template writes after a turn may be another; only the first answer is wanted."""
    _, rows, recipe, _, _ = talk
    tokenizer = tokenizer_folder(tmp_path / "tokenizer")
    config = json.loads((tokenizer / "tokenizer_config.json").read_text())
    (tokenizer / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": "<|pad|>"}))
    text = {**recipe["data"]["text"], "tokenizer": str(tokenizer)}
    file = tmp_path / "chat.yaml"
    file.write_text(json.dumps({**recipe, "data": {**recipe["data"], "text": text}}))
    overrides = {"train.duration": "200 steps", "batch.global_size": 32, "optimizer.lr": 0.02, "evaluate.every": "off"}
    result = paceline.train(file, overrides=overrides, run_dir=tmp_path / "run", quiet=True)
    predictor = open_predictor(result.run_dir, device=torch.device("cpu"))
    assert isinstance(predictor, TextPredictor)
    question = rows[0]["messages"][0]["content"]
    answer = list(predictor.write(question, Sampling(tokens=60, temperature=0.0)))
    assert 0 < len(answer) < 30
    export(ExportRequest(target=result.run_dir, output=tmp_path / "hub", form="transformers"))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hub")
    network = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hub")
    asked = theirs.apply_chat_template(rows[0]["messages"][:1], add_generation_prompt=True, return_tensors="pt")
    found = network.generate(asked["input_ids"], max_new_tokens=60, do_sample=False)[0, asked["input_ids"].shape[1] :]
    assert found[:-1].tolist() == answer
    assert found[-1] == theirs.convert_tokens_to_ids("<|im_end|>")
    template = tokenizer / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|im_start|>", "<|im_start|> "))
    with pytest.raises(DataError, match="or its chat template has changed"):
        evaluate_target(EvaluationRequest(target=result.run_dir, overrides={"data.validation_fraction": 0.3}))


@pytest.mark.needs("peft")
def test_adapters_learn_and_are_exported_as_peft_s_own(talk: Any, tmp_path: Path) -> None:
    import peft

    _, rows, recipe, collate, make = talk
    adapters = {"rank": 4, "alpha": 8, "targets": ["*c_attn", "*c_proj", "*c_fc"]}
    model = {**recipe["model"], "adapters": adapters}
    seen, result = trained(LanguageModeling, {**recipe, "model": model}, tmp_path)
    base = make()
    base.load_state_dict(
        {name.replace(".base_layer.", "."): each for name, each in seen.first.items() if ".lora_" not in name}
    )
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True, task_type="CAUSAL_LM"
    )
    network = peft.get_peft_model(copy.deepcopy(base), config)
    matrices = {f"base_model.model.{name}": each for name, each in seen.first.items() if ".default.weight" in name}
    assert not network.load_state_dict(matrices, strict=False).unexpected_keys
    assert {name for name, each in network.named_parameters() if each.requires_grad} == set(matrices)
    samples = [rows[sample] for sample in seen.ids]
    batches = [lambda step=step: collate(samples[8 * step : 8 * step + 8]) for step in range(STEPS)]
    assert furthest(seen.losses, plain_loop(network, batches)) <= WITHIN
    assert seen.losses[0] - seen.losses[STEPS - 1] > 0.05

    export(ExportRequest(target=result.run_dir, output=tmp_path / "adapters", form="peft"))
    export(ExportRequest(target=result.run_dir, output=tmp_path / "merged", form="transformers"))
    tokens = collate(samples[:4])["input_ids"]
    with torch.no_grad():
        expected = network.eval()(input_ids=tokens).logits
        with_theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapters").eval()(input_ids=tokens).logits
        merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()(input_ids=tokens).logits
    torch.testing.assert_close(with_theirs, expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(merged, expected, rtol=0, atol=1e-4)
    assert all("lora_" not in name for name in read_weights(tmp_path / "merged").state)
