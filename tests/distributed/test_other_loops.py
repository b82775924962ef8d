"""The parts for other loops on two ranks: one checkpoint and one score for both, and errors on both alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SOURCES = Path(__file__).parents[2] / "src"
LIMIT_SECONDS = 800  # less than pytest's own
PROGRAM = """
import json, sys, warnings
from pathlib import Path
import torch
from paceline.checkpoints import Checkpoints
from paceline.errors import PacelineError
from paceline.ledger import Ledger
from paceline.order import BatchOrder
from paceline.scores import ExactMean, collect

folder, rank = Path(sys.argv[1]), int(sys.argv[2])
torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
said = {}

def attempt(name, action):
    try:
        said[name] = action()
    except PacelineError as error:
        said[name] = f"{type(error).__name__}: {error}"

order = BatchOrder(7, 4, seed=1)
said["rank"] = [order.rank, order.world_size]
mean, scored = ExactMean(), []
for ids in order:
    order.step += 1
    mean.add(torch.tensor(ids) ** 2 / 10, torch.tensor(ids))
    scored += ids
mean.add(torch.tensor([1.0]), torch.tensor([3]))  # a padded sample, of which the first rank's value counts
said["mean"], said["samples"] = mean.result(), mean.samples
mine = torch.tensor(scored[: 4 - 4 * rank], dtype=torch.int64)  # nothing on one rank
(said["collected"],) = (each.tolist() for each in collect(mine, mine[:, None] * 2))
attempt("shapes", lambda: collect(torch.tensor([rank]), torch.zeros(1, 1 + rank)))
attempt("bad id", lambda: collect(torch.tensor([-rank]), torch.zeros(1)))

checkpoints = Checkpoints(folder / "checkpoints", keep=9)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
attempt("none", lambda: checkpoints.load(model=model, order=order))
attempt("step", lambda: checkpoints.save(3 + rank, model=model, order=order))
attempt("parts", lambda: checkpoints.save(3, model=model, **{f"of_rank_{rank}": 1}))
attempt("content", lambda: checkpoints.save(3, value=object() if rank else 1))
attempt("saved", lambda: checkpoints.save(2, model=model, order=order))
checkpoints.wait()
torch.distributed.barrier()
if rank == 0:
    (folder / "checkpoints" / "step-00000003").mkdir()
torch.distributed.barrier()
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    attempt("load", lambda: checkpoints.load(model=model, order=order))
said["warnings"] = len(told)
attempt("absent", lambda: checkpoints.load(model=model, order=order, more=1))
(folder / f"said-{rank}").write_text(json.dumps(said))
torch.distributed.destroy_process_group()
"""


def start(folder: Path, rank: int, program: str = PROGRAM, **variables: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1", **variables}
    return subprocess.Popen(
        [sys.executable, "-c", program, str(folder), str(rank)], env=environment, stderr=subprocess.PIPE, text=True
    )


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank has seen."""
    folder = tmp_path_factory.mktemp("ranks")
    processes = [start(folder, rank) for rank in range(2)]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=LIMIT_SECONDS)
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [json.loads((folder / f"said-{rank}").read_text()) for rank in range(2)]


@pytest.mark.everyday
@pytest.mark.world_size(2)
def test_both_ranks_have_the_same_scores(said: list[dict[str, Any]]) -> None:
    squares = [each**2 / 10 for each in range(7)]
    for each in said:
        assert each["samples"] == 7
        assert each["mean"] == pytest.approx(sum(squares) / 7, rel=1e-6)
        assert each["collected"] == sorted(each["collected"])
        assert len(each["collected"]) == 4
        assert each["shapes"] == (
            "DataError: Ranks gave values of the shapes [[1]] and [[2]] per sample: pad them to one shape."
        )
        assert each["bad id"] == "DataError: Sample -1 is negative: give the samples' positions in the data set."
    assert said[0]["mean"] == said[1]["mean"]
    assert said[0]["collected"] == said[1]["collected"]


@pytest.mark.everyday
@pytest.mark.world_size(2)
def test_both_ranks_load_the_same_checkpoint(said: list[dict[str, Any]]) -> None:
    assert [each["rank"] for each in said] == [[0, 2], [1, 2]]
    assert [(each["none"], each["saved"], each["load"]) for each in said] == [(None, None, 2)] * 2
    assert [each["warnings"] for each in said] == [1, 0]  # of a damaged one, where it is found


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("step", "Rank 0 saves step 3 and rank 1 step 4: call save() after the same step on every rank."),
        ("parts", "Rank 0 saves model, of_rank_0 and rank 1 model, of_rank_1: give the same parts on every rank."),
        ("content", "'value' is an object, which has no state_dict and load_state_dict: give an object with both, or"),
        ("absent", "holds no part 'more'; it holds model, order: load what was saved."),
    ],
)
@pytest.mark.world_size(2)
def test_errors_are_raised_on_both_ranks(said: list[dict[str, Any]], name: str, sentence: str) -> None:
    assert said[0][name] == said[1][name]
    assert said[0][name].startswith("CheckpointError: ")
    assert sentence in said[0][name]


def test_ranks_without_a_process_group_are_refused(tmp_path: Path) -> None:
    program = "import sys; from paceline.checkpoints import Checkpoints; Checkpoints(sys.argv[1]).save(1, value=1)"
    process = start(tmp_path, 0, program, RANK="1", WORLD_SIZE="2")
    _, errors = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 1
    assert "this is rank 1 of 2, which have not formed a process group" in errors
