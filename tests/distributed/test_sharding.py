"""Weights that are spread over processes are the same weights, and so are their checkpoints."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import Call

from paceline.checkpoint.manifest import read_components, read_manifest, verify
from paceline.checkpoint.store import CheckpointStore
from paceline.errors import CheckpointError

pytestmark = pytest.mark.slow

MODELS = """
import os
import torch
from torch import nn

class Double(nn.Module):
    def __init__(self, classes, channels):
        super().__init__()
        self.blocks = nn.Sequential(
            nn.Sequential(nn.Flatten(), nn.Linear(channels * 144, 13), nn.Tanh()),
            nn.Sequential(nn.Linear(13, 6), nn.LayerNorm(6)),
        )
        self.classifier = nn.Linear(6, classes)
        self.double()

    def forward(self, x):
        return self.classifier(self.blocks(x.double()))

def double(num_classes, in_channels):
    return Double(num_classes, in_channels)

class Spoiled(Double):
    # Its fourth answer in training, the third step's after the rehearsal, is no number.
    calls = 0

    def forward(self, x):
        self.calls += self.training
        return super().forward(x) * (float("nan") if self.training and self.calls == 4 else 1)

def spoiled(num_classes, in_channels):
    return Spoiled(num_classes, in_channels)

def drawn_by_each(num_classes, in_channels):
    torch.manual_seed(int(os.environ["RANK"]))
    return Double(num_classes, in_channels)

def drawn_alike(num_classes, in_channels):
    torch.manual_seed(0)
    return Double(num_classes, in_channels)
"""
FSDP = {"parallel.strategy": "fsdp"}
# A micro-batch for each process: two addends have one sum, and so ddp and fsdp one result.
SHORT = {"train.duration": "14 steps", "batch.micro_size": 8, "train.precision": "fp32", "checkpoint.keep": 9}
DOUBLE = SHORT | {
    "model.name": "models:double",
    "model.options": None,
    "data.workers": 0,
    "data.augment.crop": "none",
    "train.precision": "fp32",
}
# Of 90 samples an epoch's last step has 10 for sixteen micro-batches, or 2 for eight: the second of two processes has
# fewer of them than the first, or none.
FEWER = {"batch.global_size": 80, "batch.micro_size": "auto", "parallel.logical_ranks": 16}
NONE = {"batch.global_size": 88, "batch.micro_size": "auto", "parallel.logical_ranks": 8}
RAGGED: dict[str, dict[str, Any]] = {"sgd": NONE, "adamw": FEWER}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer.nesterov": True},
    "adamw": {"optimizer.name": "adamw", "optimizer.lr": 0.01},
    "rmsprop": {"optimizer.name": "rmsprop", "optimizer.lr": 0.003, "optimizer.eps": 0.01},
    "lamb": {"optimizer.name": "lamb", "optimizer.lr": 0.01},
    "lars": {"optimizer.name": "lars"},
    "lion": {"optimizer.name": "lion", "optimizer.lr": 0.001},
    "clamped": {"optimizer.clip_norm": "off", "optimizer.clip_value": 0.01},
}


@pytest.fixture(scope="module")
def ground(studio: Path) -> Path:
    (studio / "models.py").write_text(MODELS)
    return studio


@pytest.fixture
def together(ground: Path, train_together: Call) -> Call:
    """Train several runs, one after another, by the same processes."""
    return partial(train_together, "recipe.yaml", where=ground)


@pytest.fixture
def alone(ground: Path, run_here: Call) -> Call:
    """Train a run in this process."""

    def trainer(name: str, overrides: dict[str, Any]) -> None:
        changes = [f"{key}={'null' if value is None else value}" for key, value in overrides.items()]
        done = run_here("train", "recipe.yaml", *changes, "--run-dir", name)
        assert done.code in (0, 75), done.err

    return trainer


def state(run_dir: Path, step: int = 14) -> dict[str, Any]:
    path = CheckpointStore(run_dir / "checkpoints").path(step)
    return {name: read_components(path, (name,))[name] for name in ("model", "ema", "optimizer")}


def tensors(tree: Any, path: str = "") -> dict[str, torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return {path: tree}
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list | tuple) else ()
    return {name: each for key, value in items for name, each in tensors(value, f"{path}.{key}").items()}


def difference(first: Any, second: Any) -> float:
    """The largest between two states with the same tensors."""
    mine, theirs = tensors(first), tensors(second)
    assert mine.keys() == theirs.keys()
    assert {name: each.shape for name, each in mine.items()} == {name: each.shape for name, each in theirs.items()}
    return max((each.double() - theirs[name].double()).abs().max().item() for name, each in mine.items())


def metrics(run_dir: Path) -> Any:
    return json.loads((run_dir / "summary.json").read_text())["metrics"]


def is_in_parts(path: Path) -> bool:
    return len(read_manifest(path).components["model"].tensor_files) > 1


@pytest.mark.world_size(2)
@pytest.mark.everyday
def test_sharding_changes_no_bit(ground: Path, together: Call) -> None:
    # BatchNorm, dropout, a moving average, clipping and augmentation.
    together({"short-ddp": SHORT, "short-fsdp": SHORT | FSDP})
    assert difference(state(ground / "short-fsdp"), state(ground / "short-ddp")) == 0
    assert metrics(ground / "short-fsdp") == metrics(ground / "short-ddp")
    saved = [CheckpointStore(ground / name / "checkpoints").path(14) for name in ("short-ddp", "short-fsdp")]
    assert [is_in_parts(path) for path in saved] == [False, True]


@pytest.mark.world_size(2)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # what no_dist asks for
def test_going_on_with_other_sharding_changes_no_bit(ground: Path, together: Call) -> None:
    # BatchNorm, dropout, a moving average, clipping and augmentation: two processes, with and without sharding; and
    # from the middle on in another way than before.
    half, until = {"train.until": "6 steps"}, {"train.until": "off"}
    together(
        {
            "whole-ddp": SHORT,
            "whole-fsdp": SHORT | FSDP,
            "kept": SHORT | FSDP | {"parallel.reshard_after_forward": False},
            "from-fsdp": SHORT | FSDP | half,
            "from-ddp": SHORT | half,
        }
    )
    assert difference(state(ground / "from-fsdp", 6), state(ground / "from-ddp", 6)) == 0
    stopped = CheckpointStore(ground / "from-fsdp" / "checkpoints").path(6)
    assert is_in_parts(stopped)
    shutil.copytree(ground / "from-fsdp", ground / "again-fsdp")
    together({"from-fsdp": SHORT | until, "from-ddp": SHORT | FSDP | until, "again-fsdp": SHORT | FSDP | until})
    for name in ("whole-fsdp", "kept", "from-fsdp", "from-ddp", "again-fsdp"):
        assert difference(state(ground / name), state(ground / "whole-ddp")) == 0, name
        assert metrics(ground / name) == metrics(ground / "whole-ddp"), name
        assert is_in_parts(CheckpointStore(ground / name / "checkpoints").path(14)) == (name != "from-fsdp")
    # torch's own reader opens a folder of parts, and finds the same.
    assert difference(read_by_torch(stopped / "model", stopped), read_components(stopped, ("model",))["model"]) == 0


def read_by_torch(folder: Path, checkpoint: Path) -> dict[str, torch.Tensor]:
    from torch.distributed import checkpoint as dcp

    listed = read_manifest(checkpoint).components["model"].tensors
    found = {key: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for key, spec in listed.items()}
    dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
    return found


@pytest.mark.world_size(2)
def test_sharded_micro_batches_are_one_big_batch(ground: Path, together: Call, alone: Call) -> None:
    runs: dict[str, dict[str, Any]] = {}
    for name, changes in OPTIMIZERS.items():
        whole = DOUBLE | changes
        alone(f"{name}-alone", whole | {"batch.micro_size": 16})
        runs |= {
            f"{name}-parts": whole | FSDP | {"batch.micro_size": 2},
            f"{name}-half": whole | FSDP | {"train.until": "6 steps"},
        }
    # Whatever the optimizer is, the shares of a step are as uneven.
    for name, ragged in RAGGED.items():
        whole = DOUBLE | OPTIMIZERS[name] | ragged
        alone(f"{name}-ragged-alone", whole | {"parallel.logical_ranks": 1})
        runs[f"{name}-ragged"] = whole | FSDP
    runs["sgd-ddp"] = DOUBLE | OPTIMIZERS["sgd"] | {"batch.micro_size": 2}
    together(runs)
    assert difference(state(ground / "sgd-ddp"), state(ground / "sgd-alone")) <= 1e-12
    for name, changes in OPTIMIZERS.items():
        # What is spread opens where nothing is.
        alone(f"{name}-half", DOUBLE | changes | {"batch.micro_size": 16})
        references = {"parts": "alone", "half": "alone"} | ({"ragged": "ragged-alone"} if name in RAGGED else {})
        for run, reference in references.items():
            mine, theirs = ground / f"{name}-{run}", ground / f"{name}-{reference}"
            assert difference(state(mine), state(theirs)) <= 1e-12, (name, run)
            for weights in ("model", "ema"):
                found, expected = metrics(mine)["last"][weights], metrics(theirs)["last"][weights]
                assert found == pytest.approx(expected, rel=1e-9), (name, run)


@pytest.mark.world_size(2)
def test_votes_count_for_their_own_step(ground: Path, together: Call) -> None:
    # A loss that is no number, and saves by the clock; views, with more batches for one process than for the other.
    votes = DOUBLE | {"train.nonfinite": "skip", "checkpoint.every": "1 hours", "evaluate.every": "off"}
    votes |= {"checkpoint.keep_best": False, "model.name": "models:spoiled"}
    kept = FSDP | {"parallel.reshard_after_forward": False}
    views = DOUBLE | {"evaluate.augment": "flip", "evaluate.batch_size": 16, "train.deterministic": True}
    runs = {
        "ddp": votes,
        "fsdp": votes | FSDP,
        "fsdp-kept": votes | kept,
        "views-ddp": views,
        "views-fsdp": views | kept,
    }
    # Networks that are another on each process begin as the first one's; a short way to float64's one result.
    each, alike = ({"model.name": f"models:drawn_{how}"} for how in ("by_each", "alike"))
    exact = {"parallel.exact": True, "parallel.logical_ranks": 2}
    runs |= {"alike": DOUBLE | alike, "each-ddp": DOUBLE | each, "each-fsdp": DOUBLE | each | FSDP}
    runs |= {"each-exact": DOUBLE | each | exact}
    together({f"votes-{name}": changes for name, changes in runs.items()})
    for name in ("ddp", "fsdp", "exact"):
        assert difference(state(ground / f"votes-each-{name}"), state(ground / "votes-alike")) <= 1e-12, name
    for name in ("ddp", "fsdp", "fsdp-kept"):
        events = [json.loads(line) for line in (ground / f"votes-{name}" / "events.jsonl").read_text().splitlines()]
        told = [each["incident"] for each in events if each["event"] == "incident"]
        # Other work on the machine makes a rank slow indeed.
        assert [each for each in told if each != "slow_rank"] == ["nonfinite_loss"], name
        assert [each["step"] for each in events if each["event"] == "checkpoint"] == [13], name
        assert difference(state(ground / f"votes-{name}", 13), state(ground / "votes-ddp", 13)) <= 1e-12
    mine, theirs = (metrics(ground / f"votes-views-{name}")["last"] for name in ("fsdp", "ddp"))
    for weights in ("model", "ema"):
        assert mine[weights] == pytest.approx(theirs[weights], rel=1e-9)


@pytest.mark.world_size(4)
def test_copies_in_groups(ground: Path, together: Call, alone: Call) -> None:
    # Hybrid: two groups of two; more processes than validation batches and than a last step's samples, too.
    alone("hybrid-alone", DOUBLE | {"batch.micro_size": 16})
    groups = DOUBLE | FSDP | {"parallel.shard_size": 2, "batch.micro_size": 4, "evaluate.batch_size": 16}
    together({"hybrid": groups, "hybrid-half": groups | {"train.until": "6 steps"}}, processes=4)
    path = CheckpointStore(ground / "hybrid-half" / "checkpoints").path(6)
    files = read_manifest(path).components["model"].tensor_files
    assert files == ["model/part-00000.safetensors", "model/part-00001.safetensors"]  # the second group writes nothing
    together({"hybrid-half": DOUBLE | FSDP})
    for name in ("hybrid", "hybrid-half"):
        assert difference(state(ground / name), state(ground / "hybrid-alone")) <= 1e-12
        assert metrics(ground / name)["last"]["model"] == pytest.approx(
            metrics(ground / "hybrid-alone")["last"]["model"], rel=1e-9
        )


@pytest.mark.world_size(2)
def test_a_damaged_part_is_found(ground: Path, together: Call) -> None:
    together({"damaged": DOUBLE | FSDP | {"train.until": "8 steps"}})
    store = CheckpointStore(ground / "damaged" / "checkpoints")
    part = store.path(8) / "ema" / "part-00001.safetensors"
    content = bytearray(part.read_bytes())
    content[-3] ^= 1
    part.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"ema/part-00001.safetensors: its digest is"):
        verify(store.path(8))
    with pytest.raises(CheckpointError, match=r"ema/part-00001.safetensors: its digest is"):
        read_components(store.path(8), ("ema",))
    together({"damaged": DOUBLE | FSDP, "undamaged": DOUBLE | FSDP})
    assert difference(state(ground / "damaged"), state(ground / "undamaged")) == 0
    assert (ground / "damaged" / "checkpoints" / "step-00000008.damaged").is_dir()


@pytest.mark.world_size(2)
def test_killed_while_parts_are_written(
    ground: Path, start: Call, run: Call, run_here: Call, steps_recorded: Call
) -> None:
    longer = {"train.duration": "40 steps", "checkpoint.every": "2 steps"}
    changes = [f"{key}={value}" for key, value in (SHORT | FSDP | longer).items()]
    command = ("train", "recipe.yaml", *changes, "--processes", 2)
    whole, killed = ground / "killed-never", ground / "killed-often"
    assert run(*command, "--run-dir", whole, where=ground).code == 0
    for number in range(2):
        launched = start(*command, "--run-dir", killed, where=ground)
        reached = steps_recorded(killed)
        launched.wait_for(lambda reached=reached: steps_recorded(killed) > reached + 3)
        # In the midst of a save: one process's part is there, and no manifest yet.
        part = f".saving-*/*/part-0000{number}.safetensors"
        launched.wait_for(lambda part=part: any((killed / "checkpoints").glob(part)))
        launched.kill()
    run(*command, "--run-dir", killed, where=ground).ended(0)
    assert difference(state(killed, 40), state(whole, 40)) == 0
    assert metrics(killed) == metrics(whole)
    assert run_here("audit", killed).code == 0
