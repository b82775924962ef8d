"""A proof finds nothing where nothing is wrong, and what it cannot compare it says."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import paceline
from paceline.data.batch import Batch
from paceline.errors import LaunchError, RecipeError, TrainingError
from paceline.host.world import World
from paceline.models.small_resnet import small_resnet
from paceline.recipe.load import load_recipe
from paceline.tasks.task import Task, build_task
from paceline_advisor.commands import Prove
from paceline_advisor.prove.evidence import difference
from paceline_advisor.prove.recorder import REFERENCE, RecorderConfig, RecordingTask
from paceline_advisor.prove.runs import Sizes, shortened, unproved_settings
from paceline_advisor.prove.study import prove

Proof, Failed = Callable[..., Any], Callable[..., set[str]]
EXAMPLES = Path(__file__).parents[2] / "examples"

ADAMW = "{name: adamw, lr: 0.01, clip_norm: 0.01, groups: {'head.*': {lr_factor: 0.1}}}"
CORRECT: dict[str, dict[str, Any]] = {
    "accumulated, with a moving average": {"batch.micro_size": 4, "train.label_smoothing": 0.1},
    "adamw with groups, clipped by norm": {"optimizer": ADAMW},
    "frozen, clipped by value": {"model.frozen": "['hidden.*']", "optimizer.clip_value": 0.001},
    "a rule for the rate, a peak after a warm-up": {
        "optimizer.lr_scaling": "linear",
        "optimizer.lr_reference_batch": 64,
        "schedule": "{name: one_cycle, warmup: 3 steps}",
    },
    "mixed": {"data.mix.mixup": 0.4, "data.mix.cutmix": 1.0},
    "varied, many yes-or-no questions": {"data.augment": "{crop: pad, flip: 0.5, repeats: 2}", "train.loss": "bce"},
    "exact": {"parallel.exact": True},
    "not evaluated": {"evaluate.every": "off"},
    # For other machines, or with more than a short run has a use for.
    "views": {"evaluate.augment": "flip"},
    "frozen for a while": {"model.frozen": "['hidden.*']", "model.unfreeze": "{'*': 1 epochs}"},
    "growing, with a rule": {
        "batch.growth": "{1: 32}",
        "schedule.warmup": "1 epochs",
        "optimizer.lr_scaling": "linear",
        "optimizer.lr_reference_batch": 16,
    },
    "replicas, half precision on the way": {"parallel.strategy": "ddp", "parallel.gradient_compression": "bf16"},
    "spread": {"parallel.strategy": "fsdp", "parallel.shard_size": 2, "parallel.gather_dtype": "bf16"},
    "cores of its own": {"parallel.affinity": "single_unique"},
    "fp8 and other products": {"train.precision": "fp8", "train.float32_matmul": "medium"},
    "fp16, scaled": {"train.precision": "fp16", "train.grad_scaler.init_scale": 128},
    "marked for another tool": {"telemetry.profile": "{tool: nsys, steps: 2, after: 2 steps}"},
    "recorded graphs": {"model.compile": True, "model.compile_mode": "reduce-overhead"},
}


EVERYDAY = {"accumulated, with a moving average", "frozen, clipped by value", "exact", "not evaluated"}
EVERYDAY |= {"growing, with a rule", "replicas, half precision on the way", "fp16, scaled", "recorded graphs"}


@pytest.mark.parametrize(
    "case", [case if case in EVERYDAY else pytest.param(case, marks=pytest.mark.thorough) for case in CORRECT]
)
@pytest.mark.everyday
def test_nothing_is_found_where_nothing_is_wrong(case: str, proof: Proof, failed: Failed) -> None:
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    checks = proof(overrides=CORRECT[case])
    assert failed(checks) == set(), [check for check in checks.values() if check.verdict == "failed"]
    assert checks["gradient"].verdict == "passed"
    assert cores is None or os.sched_getaffinity(0) == cores
    assert checks["accumulation"].limit == (1e-5 if "yes-or-no" in case else 1e-12)
    assert checks["dropout"].verdict == "passed"
    assert checks["metric"].verdict == ("not applicable" if case == "not evaluated" else "passed")


def test_a_network_with_batchnorm_is_compared_at_rest(proof: Proof, failed: Failed) -> None:
    checks = proof(make_network=lambda: small_resnet(3, 1, width=4, stages=1, zero_init_residual=False, dropout=0.1))
    assert failed(checks) == set()
    assert "(dropout off, BatchNorm frozen)" in checks["accumulation"].compared
    assert checks["accumulation"].limit < 1e-9


def test_a_probability_beside_the_layer_that_has_it_is_no_mistake(
    proof: Proof, failed: Failed, perceptron: Any
) -> None:
    def noting() -> nn.Module:
        made: nn.Module = perceptron()
        made.dropout_rate = 0.2  # type: ignore[assignment]
        return made

    checks = proof(make_network=noting)
    assert failed(checks) == set()
    assert checks["dropout"].verdict == "passed"


def test_attention_that_drops_by_a_number_of_its_own_is_no_mistake(proof: Proof, failed: Failed) -> None:
    class Attentive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)
            self.head = nn.Linear(64, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = x.squeeze(1)
            answer: torch.Tensor = self.head(self.attention(rows, rows, rows, need_weights=False)[0].flatten(1))
            return answer

    checks = proof(make_network=Attentive)
    assert failed(checks) == set()
    assert checks["dropout"].verdict == "passed"
    assert "(dropout off)" in checks["accumulation"].compared


def test_norms_that_are_kept_in_evaluation_mode_are_no_mistake(proof: Proof, failed: Failed) -> None:
    def network() -> nn.Module:
        made = small_resnet(3, 1, width=4, stages=1)
        made.get_submodule("stem.norm").eval()
        return made

    checks = proof(make_network=network)
    assert failed(checks) == set()
    assert checks["training-mode"].found == "in evaluation mode throughout: stem.norm"


def test_a_network_that_takes_no_float64_is_proved_in_float32(
    proof: Proof, failed: Failed, perceptron: type[nn.Module]
) -> None:
    class Single(perceptron):  # type: ignore[misc,valid-type]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.float())

    checks = proof(make_network=Single)
    assert failed(checks) == set()
    assert 1e-5 <= checks["accumulation"].limit <= 1e-4
    assert checks["accumulation"].difference > 0


def remembered(network: Any, x: torch.Tensor) -> torch.Tensor:
    if network.training:
        with torch.no_grad():
            network.mean += 0.1 * (x.flatten(1).mean(0) - network.mean)
    return x.flatten(1) - network.mean


# What a network does first that one batch does as another than its parts.
FIRST: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "draws random numbers": lambda network, x: x + 0.1 * torch.randn_like(x) * network.training,
    "earlier micro-batches": remembered,
    "depends on the others": lambda network, x: x - x.mean(0) if network.training else x,
}


@pytest.mark.parametrize("why", FIRST)
def test_what_cannot_be_compared_with_its_parts_is_not(
    why: str, proof: Proof, failed: Failed, perceptron: type[nn.Module]
) -> None:
    class Own(perceptron):  # type: ignore[misc,valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            answer: torch.Tensor = super().forward(FIRST[why](self, x))
            return answer

    checks = proof(make_network=Own)
    assert failed(checks) == set()
    assert why in checks["accumulation"].found
    assert checks["gradient"].verdict == checks["tail"].verdict == "passed"


def test_samples_that_cannot_be_read_are_no_mistake(
    proof: Proof, failed: Failed, perceptron: type[nn.Module], tmp_path: Path
) -> None:
    draws = np.random.default_rng(0)
    for number in range(72):
        file = tmp_path / "photos" / ("train", "val")[number % 2] / "abc"[number % 3] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draws.integers(0, 256, (8, 8), dtype=np.uint8)).save(file)
        if number in (0, 4, 9, 13, 24):
            file.write_bytes(b"no image")

    class Photos(paceline.ImageClassification):
        def build_model(self) -> nn.Module:
            return perceptron()

    data = {"data.dataset": "image_folder", "data.path": tmp_path / "photos", "data.max_broken": 9}
    assert failed(proof(task=Photos, overrides=data)) == set()
    assert failed(proof(task=Photos, overrides={**data, "data.backend": "pytorch"})) == set()


@pytest.mark.parametrize(("name", "task"), [("own_task", "BrierScore"), ("own_dataset_and_model", None)])
def test_the_examples_are_proved(
    name: str, task: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failed: Failed
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    module = importlib.import_module(name)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(module.RECIPE)
    overrides = () if task is None else (f"task={name}:{task}",)
    report = prove(Prove(recipe=str(recipe), overrides=overrides, processes=1), lambda _: None)
    assert failed({check.name: check for check in report.checks}) == set()
    assert report.passed


@pytest.mark.parametrize("processes", [1, 2, 3, 4])
@pytest.mark.parametrize("samples", [41, 1000, 12, 60])
def test_an_epoch_is_whole_steps_and_a_ragged_tail(processes: int, samples: int) -> None:
    parts = 2 * processes if processes > 1 else 4
    if samples < 3 * parts - 1:
        with pytest.raises(RecipeError, match=f"there are {samples} training samples, but {parts} micro-batches"):
            Sizes.of(samples, 359, processes)
        return
    sizes = Sizes.of(samples, 359, processes)
    assert sizes.samples <= samples
    assert 0 < sizes.tail < sizes.global_batch
    assert sizes.tail % parts != 0
    assert sizes.micro_batches % processes == 0
    assert sizes.evaluation_samples % sizes.evaluation_batch != 0
    batches = -(-sizes.evaluation_samples // sizes.evaluation_batch)
    assert batches > processes
    assert processes == 1 or batches % processes != 0


@pytest.mark.parametrize("held_out", range(12))
def test_few_held_out_samples_are_scored_too(held_out: int) -> None:
    sizes = Sizes.of(100, held_out, 2)
    assert sizes.evaluation_samples == held_out
    assert sizes.evaluation_batch >= 2


def test_a_rank_of_a_launch_cannot_prove(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match="a proof starts its own processes"):
        prove(Prove(recipe="digits"), lambda _: None)


def test_a_run_that_takes_no_step_is_an_error(proof: Proof) -> None:
    with pytest.raises(TrainingError, match="did not take one: the training loss became nan"):
        proof(on_loss=lambda _, loss: loss * float("nan"))


def test_an_override_without_effect_is_refused(proof: Proof) -> None:
    with pytest.raises(RecipeError, match=r"parallel\.bucket_cap_mb"):
        proof(overrides={"parallel.bucket_cap_mb": 7})


@pytest.mark.parametrize(("found", "expected", "relative"), [(1.0, 2.0, 0.5), (float("nan"), 2.0, float("inf"))])
def test_a_gradient_that_is_no_number_differs_most(found: float, expected: float, relative: float) -> None:
    ours = {"a": torch.tensor([found]), "b": torch.tensor([1.0]), "c": None}
    theirs = {"a": torch.tensor([expected]), "b": torch.tensor([1.0]), "c": torch.zeros(1)}
    gap = difference(ours, theirs)
    assert (gap.relative, gap.where) == (relative, "a")


DOCUMENTS = """
task: language_modeling
model: {name: gpt, options: {depth: 1, width: 16, heads: 2}}
data: {dataset: text_folder, path: PATH, validation_fraction: 0.2, text: {context: 32, rows: single, pad_multiple: 2}}
batch: {global_size: 4}
optimizer: {name: adamw, lr: 0.01}
train: {duration: 8 steps}
parallel: {device: cpu, threads: 1}
telemetry: {trackers: [], report: off}
"""


@pytest.mark.parametrize("balance", [True, False])
def test_what_is_rehearsed_is_not_taken_for_training(
    balance: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of samples of unequal length, the largest micro-batch goes through before the first step, whichever step's."""
    (tmp_path / "books").mkdir()
    for number in range(70):
        (tmp_path / "books" / f"{number}.txt").write_text("ab" * (1 + number * 7 % 13))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(DOCUMENTS.replace("PATH", str(tmp_path / "books")))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    requested = Prove(recipe=str(recipe), overrides=(f"batch.balance={str(balance).lower()}",), processes=1)
    checks = {check.name: check for check in prove(requested, lambda _: None).checks}
    assert [check for check in checks.values() if check.verdict == "failed"] == []
    assert {checks[name].verdict for name in ("order", "samples", "gradient", "tail")} == {"passed"}


def test_of_a_detector_s_pictures_some_are_taken_from_all_over(tmp_path: Path) -> None:
    task = build_task(load_recipe("shapes-maskrcnn").recipe)
    orders = RecorderConfig(
        task=REFERENCE, folder=str(tmp_path), samples=5, evaluation_samples=3, double=True, kept_steps=()
    )
    complete = task.dataset
    facts = RecordingTask(task, orders).data_facts(World())
    assert (facts.train_samples, facts.evaluation_samples) == (5, 3)
    few = task.dataset
    assert (len(few.train), len(few.validation)) == (5, 3)
    for ours, its in ((0, 0), (1, 499), (4, 1999)):
        assert few.train.path(ours) == complete.train.path(its)
        assert (few.train.read(ours) == complete.train.read(its)).all()
        assert (few.train.sizes[ours] == complete.train.sizes[its]).all()
        boxes = (each.objects(number, masks=False).boxes for each, number in ((few.train, ours), (complete.train, its)))
        assert np.array_equal(*boxes)


# What is for other machines, or of no use to a short run, is left out, and reported


def test_adapters_that_drop_are_no_mistake(proof: Proof, failed: Failed) -> None:
    pytest.importorskip("peft")
    checks = proof(overrides={"model.adapters.rank": 2, "model.adapters.dropout": 0.2})
    assert failed(checks) == set(), [check for check in checks.values() if check.verdict == "failed"]


class Doubled:
    """Stands in the network's place, and is not one."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = 2 * self.model(inputs)
        return answer


def test_what_a_task_evaluates_in_the_networks_place_is_proved(proof: Any, failed: Any, tiny_task: Any) -> None:
    requested: list[str] = []

    def score(model: Any, batch: Batch, _: Any) -> None:
        requested.append(type(model).__name__)

    def make(recipe: Any) -> Any:
        task = tiny_task(on_score=score)(recipe)
        task.__class__ = type("Own", (type(task),), {"evaluated": lambda _, model: Doubled(model)})
        return task

    assert failed(proof(task=make)) == set()
    assert set(requested) == {"Doubled"}


def test_a_task_that_knows_no_views_is_refused_by_its_own_name(proof: Any, tiny_task: Any) -> None:
    def make(recipe: Any) -> Any:
        task = tiny_task()(recipe)
        task.__class__ = type("Plain", (type(task),), {"evaluated": Task.evaluated})
        return task

    with pytest.raises(RecipeError, match=r"evaluate\.augment=flip has no effect with the task .*:Plain"):
        proof(task=make, overrides={"evaluate.augment": "flip"})


def test_recorder_forwards_every_task_method() -> None:
    hooks = {name for name, each in vars(Task).items() if callable(each)} - {"__init__"}
    assert hooks <= set(vars(RecordingTask))


def test_adapters_drop_nothing_in_short_runs(tiny_recipe: Path) -> None:
    overrides = ("model.adapters.rank=2", "model.adapters.dropout=0.2", "parallel.strategy=ddp", "optimizer.lr=0.1")
    recipe = load_recipe(tiny_recipe, overrides).recipe
    adapters = shortened(recipe, Sizes.of(52, 21, 1), micro_batch=4).model.adapters
    assert (adapters.rank, adapters.dropout) == (2, 0.0)
    assert set(unproved_settings(recipe)) == {"model.adapters.dropout=0.2", "parallel.strategy=ddp"}
