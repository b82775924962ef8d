"""A language model is the same one whether each of two processes holds all of it or a part, or there is but one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import Call

from paceline.checkpoint.manifest import read_components
from paceline.checkpoint.store import CheckpointStore

pytestmark = pytest.mark.slow

# Each process tells of its network which parameters are still without content when a block is filled.
TELLING = """
from paceline.distributed.sharding import WeightInitializer

def filled(self, name, fill=WeightInitializer.__call__):
    before = [each.is_meta for each in self._networks[0].parameters()]
    fill(self, name)
    os.write(1, f"filled {name!r} {sum(before)}\\n".encode())  # in one piece: two write at once

WeightInitializer.__call__ = filled
"""
# Each process tells of the weights whose 16-bit copies its backward pass makes again, instead of keeping them.
RECASTING = """
from paceline.models import precision

def packed(tensor, pack=precision._packed):
    found = pack(tensor)
    if isinstance(found[1], tuple):
        os.write(1, f"recast {tuple(found[0].shape)}\\n".encode())
    return found

precision._packed = packed
"""
RECIPE: dict[str, Any] = {
    "task": "language_modeling",
    "seed": 4,
    "model": {"name": "gpt", "options": {"depth": 2, "width": 32, "heads": 2, "positions": "learned", "bias": True}},
    "data": {"dataset": "text_folder", "path": "text", "text": {"context": 16}},
    "batch": {"global_size": 8, "micro_size": 4},
    "optimizer": {"name": "adamw", "lr": 0.003, "weight_decay": 0.1},
    "schedule": {"warmup": "2 steps"},
    "train": {"duration": "6 steps", "precision": "fp32", "ema": 0.9},
    "evaluate": {"every": "6 steps"},
    "parallel": {"device": "cpu", "threads": 1},
    "telemetry": {"log_every": "1 steps", "trackers": [], "report": False},
}
FSDP = {"parallel.strategy": "fsdp"}
# The gradient's norm is above that at each step.
CLIPPED = {"optimizer.clip_norm": 0.05}
GPT2 = {"model.name": "transformers:gpt2", "model.options": {"n_layer": 2, "n_embd": 32, "n_head": 2}}
RECOMPUTED = {"model.activation_checkpointing": "full"}


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("language")
    for split, count in (("train", 9), ("val", 3)):
        (root / "text" / split).mkdir(parents=True)
        for number in range(count):
            words = " ".join(str(number * each % 97) for each in range(60))
            (root / "text" / split / f"{number}.txt").write_text(words)
    (root / "text.yaml").write_text(json.dumps(RECIPE))
    return root


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    path = CheckpointStore(run_dir / "checkpoints").path(6)
    return {f"{of}.{key}": each for of in ("model", "ema") for key, each in read_components(path, (of,))[of].items()}


def difference(first: Path, second: Path) -> float:
    mine, theirs = weights(first), weights(second)
    assert mine.keys() == theirs.keys()
    return max((each - theirs[name]).abs().max().item() for name, each in mine.items())


def steps(run_dir: Path) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return [each for each in events if each["event"] == "step"]


@pytest.mark.world_size(2)
def test_sharding_changes_nothing(
    ground: Path, train_together: Call, run_here: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: dict[str, dict[str, Any]] = {
        "ddp": {},
        "fsdp": FSDP | RECOMPUTED,
        "ddp-clipped": CLIPPED,
        "fsdp-clipped": FSDP | CLIPPED,
        "ddp-gpt2": GPT2 | {"model.options": {**GPT2["model.options"], "attn_pdrop": 0.0}},
        "fsdp-gpt2": GPT2 | {"model.options": {**GPT2["model.options"], "attn_pdrop": 0.0}} | FSDP | RECOMPUTED,
    }
    said = "".join(each.out for each in train_together("text.yaml", runs, where=ground, preparation=TELLING))
    # Nobody held all of it: each block was filled while the blocks after it, and only they, were there already.
    left = {tuple(line.split()[1:]) for line in said.splitlines() if line.startswith("filled ")}
    assert {("'blocks.1'", "23"), ("'blocks.0'", "13"), ("''", "3")} <= left, said
    assert {("'transformer.h.1'", "28"), ("'transformer.h.0'", "16"), ("''", "4")} <= left, said
    monkeypatch.chdir(ground)
    for name, overrides in (("alone", {}), ("alone-clipped", CLIPPED)):
        changes = [f"{key}={value}" for key, value in overrides.items()]
        assert run_here("train", "text.yaml", *changes, "--run-dir", name).code == 0
    # Two addends have one sum: the same bits, and so the same first weights.
    assert difference(ground / "ddp", ground / "fsdp") == 0
    assert difference(ground / "ddp-gpt2", ground / "fsdp-gpt2") == 0
    # A norm is added up in another order where each process has a part of it.
    assert difference(ground / "ddp-clipped", ground / "fsdp-clipped") < 1e-6
    assert difference(ground / "ddp", ground / "alone") < 1e-6
    assert difference(ground / "ddp-clipped", ground / "alone-clipped") < 1e-6
    for ending in ("", "-clipped"):
        for one, two, three in zip(
            *(steps(ground / f"{each}{ending}") for each in ("alone", "ddp", "fsdp")), strict=True
        ):
            assert one["loss"] == pytest.approx(two["loss"], rel=1e-6)
            assert three["loss"] == pytest.approx(two["loss"], rel=1e-6)
            if ending:
                assert two["grad_norm"] > 0.05
                assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=1e-5)
                assert three["grad_norm"] == pytest.approx(two["grad_norm"], rel=1e-5)


@pytest.mark.world_size(2)
@pytest.mark.everyday
def test_in_bf16_no_copy_of_the_network_is_kept_and_no_bit_changes(ground: Path, train_together: Call) -> None:
    bf16 = {"train.precision": "bf16", "train.duration": "3 steps", "evaluate.every": "3 steps"}
    runs = {"ddp-bf16": bf16, "fsdp-bf16": bf16 | FSDP}
    told = "".join(each.out for each in train_together("text.yaml", runs, where=ground, preparation=RECASTING))
    shapes = {line.removeprefix("recast ") for line in told.splitlines() if line.startswith("recast ")}
    # Attention's and the feed-forward part's; a copy of each block's would be one of the network.
    assert shapes >= {"(96, 32)", "(32, 32)", "(128, 32)", "(32, 128)"}, told
    summaries = [json.loads((ground / name / "summary.json").read_text()) for name in runs]
    assert summaries[0]["weights_sha256"] == summaries[1]["weights_sha256"]
