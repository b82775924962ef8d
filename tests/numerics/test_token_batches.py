"""Documents of unequal length, however they are put together and shared out: the same gradients as one by one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from calls import Call

import paceline
from paceline.checkpoint.weights import read_weights
from paceline.data.batch import Batch
from paceline.data.order import StepGeometry, epoch_order
from paceline.host.world import World
from paceline.reports.audit import audit_run
from paceline_text.language_modeling import LanguageModeling

RECIPE = """
seed: 3
task: language_modeling
model: {name: gpt, options: {depth: 1, width: 16, heads: 2}}
data: {dataset: text_folder, path: PATH, text: {context: 32}}
batch: {global_size: 16}
optimizer: {name: sgd, lr: 0.5, momentum: 0.0, weight_decay: 0.0, clip_norm: off}
schedule: {name: constant}
train: {duration: 8 steps, precision: fp32}
evaluate: {every: off}
checkpoint: {every: off}
parallel: {device: cpu, threads: 1}
telemetry: {log_every: 1 steps, trackers: [], report: off}
"""
Seen = Callable[[Batch], None]


def task(*, seen: Seen = lambda _: None, double: bool = True) -> Callable[[Any], LanguageModeling]:
    class Watched(LanguageModeling):
        def build_model(self) -> Any:
            network = super().build_model()
            return network.double() if double else network

        def loss(self, model: Any, batch: Batch) -> torch.Tensor:
            seen(batch)
            return super().loss(model, batch)

    return Watched


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe with a folder of documents, of 5 to 150 letters."""
    root = tmp_path_factory.mktemp("texts")
    drawn = np.random.default_rng(0)
    for split, count in (("train", 60), ("val", 4)):
        (root / split).mkdir()
        for number, size in enumerate(np.clip(drawn.lognormal(3, 1, count), 5, 150).astype(int)):
            text = "".join(map(chr, drawn.integers(97, 123, size)))
            (root / split / f"{number:02}.txt").write_text(text)
    path = root / "recipe.yaml"
    path.write_text(RECIPE.replace("PATH", str(root)))
    return path


@pytest.fixture
def train(recipe: Path, runs: Path) -> Iterator[Call]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # what the recipe asks for, and the plain loop beside it

    def start(name: str, overrides: dict[str, Any], *, asked: Any = None) -> Any:
        return paceline.train(
            recipe, overrides=overrides, run_dir=runs / name, task=task() if asked is None else asked, quiet=True
        )

    yield start
    torch.set_num_threads(threads)


def weights(result: Any) -> dict[str, torch.Tensor]:
    return read_weights(result.run_dir, "model").state


def events(result: Any) -> list[dict[str, Any]]:
    lines = (result.run_dir / "events.jsonl").read_text().splitlines()
    return [event for line in lines if (event := json.loads(line))["event"] == "step"]


def furthest(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert mine.keys() == theirs.keys()
    return max((mine[name].double() - theirs[name].double()).abs().max().item() for name in mine)


def one_by_one(recipe: Path, rows: str, steps: int) -> dict[str, torch.Tensor]:
    """A plain loop: each piece of a document by itself, without padding or masks; one mean over the step's tokens."""
    from paceline.recipe.load import load_recipe

    asked = task()(load_recipe(str(recipe), [f"data.text.rows={rows}"]).recipe)
    facts = asked.data_facts(World())
    table, corpus = asked.train_rows, asked.dataset.train
    shape = StepGeometry(
        seed=3, samples=facts.train_samples, global_batch_size=16, logical_ranks=1, lengths=asked.sample_lengths()
    )
    torch.manual_seed(3)
    network = asked.build_model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.5)
    for step in range(steps):
        (part,) = shape.slices(step, World())
        total, count = torch.zeros((), dtype=torch.float64), 0
        for document, begin, end in (piece for row in part.ids for piece in table.pieces(int(row))):
            read = torch.from_numpy(corpus.read(document, begin, min(end + 1, int(corpus.lengths[document]))))
            known, following = read[: end - begin], read[1:]
            if len(following):
                logits = network(known[None])[0, : len(following)]
                total = total + F.cross_entropy(logits, following, reduction="sum")
                count += len(following)
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
    return network.state_dict()


@pytest.mark.parametrize("rows", ["single", "packed"])
def test_any_number_of_micro_batches_is_one_document_after_the_other(rows: str, recipe: Path, train: Call) -> None:
    expected = one_by_one(recipe, rows, 6)  # the fifth is the tail
    losses, overrides = [], {"data.text.rows": rows, "train.duration": "6 steps"}
    for micro in (16, 4, 1):
        result = train(f"micro-{micro}", {**overrides, "batch.micro_size": micro})
        assert furthest(weights(result), expected) <= 1e-10
        losses.append([event["loss"] for event in events(result)])
        assert audit_run(result.run_dir).passed
    assert losses[0] == pytest.approx(losses[1], rel=1e-10)
    assert losses[0] == pytest.approx(losses[2], rel=1e-10)


def test_records_say_what_was_computed(train: Call) -> None:
    computed: dict[int, list[int]] = {}
    shown: list[Batch] = []

    def note(batch: Batch) -> None:
        shown.append(batch)
        if len(shown) > 1:  # the first is the rehearsal's
            computed.setdefault(batch.slice.step, []).append(batch.inputs["tokens"].numel())

    overrides = {"data.text.rows": "single", "batch.micro_size": 4}
    result = train("run", overrides, asked=task(seen=note, double=False))
    lengths = np.load(result.run_dir / "sample_lengths.npy")
    ledger = {
        step: sum(int(lengths[batch.ids].sum()) for batch in shown[1:] if batch.slice.step == step) for step in range(8)
    }
    for step, event in enumerate(events(result)):
        assert event["padding_fraction"] == pytest.approx(1 - ledger[step] / sum(computed[step]))
        assert event["token_imbalance"] == 1
        assert 0 <= event["padding_fraction"] < 0.5
    rated = events(result)[3:]  # without warm-up
    for event in rated:
        assert event["throughput_tokens_per_second"] == pytest.approx(
            ledger[event["position"] - 1] / event["step_seconds"]
        )
    assert result.summary.throughput_tokens_per_second == pytest.approx(
        sum(ledger[step] for step in range(3, 8)) / sum(event["step_seconds"] for event in rated)
    )


def test_the_largest_micro_batch_comes_first_and_leaves_no_trace(train: Call) -> None:
    shown: list[Batch] = []
    overrides = {
        "data.text.rows": "single",
        "data.text.context": 64,
        "data.text.pad_multiple": 1,
        "batch.micro_size": 4,
        "model.options": {"depth": 1, "width": 16, "heads": 2, "dropout": 0.5},
    }
    result = train("run", overrides, asked=task(seen=shown.append, double=False))
    sizes = [batch.inputs["tokens"].numel() for batch in shown]
    assert sizes[0] == max(sizes)
    assert sizes[0] > sizes[1], "it is not the first step's first"

    def refused(batch: Batch) -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        train("too-large", overrides, asked=task(seen=refused, double=False))
    assert not list((result.run_dir.parent / "too-large" / "checkpoints").iterdir())
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("paceline.trainer.warmup.claim_memory", lambda run: None)
        plain = train("plain", overrides, asked=task(double=False))
    assert plain.summary.weights_sha256 == result.summary.weights_sha256


@pytest.mark.parametrize("balance", [True, False])
def test_a_batch_that_does_not_fit_fails_before_the_first_step(
    train: Call, runs: Path, tmp_path: Path, balance: bool
) -> None:
    longest = epoch_order(3, 0, 250)[240]
    for split, count in (("train", 250), ("val", 4)):
        (tmp_path / split).mkdir()
        for number in range(count):
            (tmp_path / split / f"{number:03}.txt").write_text("x" * (60 if number == longest else 5))

    def limited(batch: Batch) -> None:
        if batch.inputs["tokens"].shape[1] > 32:
            raise torch.OutOfMemoryError(f"step {batch.slice.step}")

    overrides = {"data.path": str(tmp_path), "data.text.rows": "single", "data.text.context": 64}
    overrides |= {"batch.balance": balance, "batch.global_size": 1, "train.duration": "1 epoch"}
    with pytest.raises(torch.OutOfMemoryError, match="step 240"):
        train("run", overrides, asked=task(seen=limited, double=False))
    assert '"event":"step"' not in (runs / "run" / "events.jsonl").read_text().replace(" ", "")


@pytest.mark.parametrize("rows", ["single", "packed"])
def test_a_run_that_was_cut_off_goes_on_with_the_same_bits(rows: str, train: Call) -> None:
    class PowerCutError(Exception):
        pass

    def cut(batch: Batch) -> None:
        if batch.slice.step == 4 and batch.slice.is_last:
            raise PowerCutError

    overrides = {"data.text.rows": rows, "batch.micro_size": 4, "checkpoint.every": "3 steps"}
    whole = train("whole", overrides, asked=task(double=False))
    with pytest.raises(PowerCutError):
        train("cut", overrides, asked=task(seen=cut, double=False))
    resumed = train("cut", overrides, asked=task(double=False))
    assert resumed.summary.resumes == 1
    assert resumed.summary.weights_sha256 == whole.summary.weights_sha256
    assert [event["loss"] for event in events(resumed)] == [event["loss"] for event in events(whole)]
    assert audit_run(resumed.run_dir).passed


def test_an_audit_needs_the_lengths_for_the_order_alone(train: Call) -> None:
    result = train("run", {"data.text.rows": "single"}, asked=task(double=False))
    path = result.run_dir / "sample_lengths.npy"
    lengths = np.load(path)
    assert audit_run(result.run_dir).passed
    np.save(path, lengths[::-1])
    changed = audit_run(result.run_dir)
    assert ["does not match the lengths" in each for each in changed.objections] == [True]
    path.write_bytes(b"")
    assert ["cannot be read" in each for each in audit_run(result.run_dir).objections] == [True]
    path.unlink()
    missing = audit_run(result.run_dir)
    assert ["cannot be read" in each for each in missing.objections] == [True]
    assert missing.epochs, "what was counted without them stays counted"
    plan = json.loads((result.run_dir / "plan.json").read_text())
    (result.run_dir / "plan.json").write_text(json.dumps({**plan, "lengths_sha256": None}))
    assert any("out of order" in each for each in audit_run(result.run_dir).objections), "the order is another"


def test_with_balance_off_samples_come_as_they_are_drawn(train: Call) -> None:
    overrides = {"data.text.rows": "single", "batch.balance": False, "batch.micro_size": 4}
    sizes: list[int] = []
    result = train("run", overrides, asked=task(seen=lambda batch: sizes.append(len(batch.ids)), double=False))
    assert not (result.run_dir / "sample_lengths.npy").exists()
    assert audit_run(result.run_dir).passed
    assert set(sizes[1:5]) == {4}
    assert events(result)[0]["padding_fraction"] > 0.2
