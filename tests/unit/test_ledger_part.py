"""The ledger for other loops: what each step used, across kills and ranks, and what the audit says of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from golden_sentences import check_sentence, raises

from paceline.errors import CheckpointError, DataError, PacelineError, RunDirectoryError
from paceline.ledger import Ledger
from paceline.order import BatchOrder
from paceline.reports.audit import audit_run


def alone(folder: Path, samples: int = 12, **more: Any) -> Ledger:
    return Ledger(folder, samples, **{"rank": 0, "world_size": 1, **more})


def train(folder: Path, steps: range, *, world_size: int = 1, samples: int = 11) -> list[Ledger]:
    """Use the samples of some steps on every rank."""
    ledgers = []
    for rank in range(world_size):
        order = BatchOrder(samples, 4, seed=1, rank=rank, world_size=world_size)
        order.step = steps.start
        ledgers.append(ledger := Ledger(folder, samples, rank=rank, world_size=world_size))
        ledger.load_state_dict({"step": steps.start})
        while order.step < steps.stop:
            for ids in order:
                order.step += 1
                ledger.add(order.step, ids)
                if order.step == steps.stop:
                    break
    return ledgers


@pytest.mark.everyday
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_audit_passes_where_each_sample_was_used_once(tmp_path: Path, world_size: int) -> None:
    # Of 11 samples, the last batch of an epoch has 3, fewer than four ranks: one of them is padded.
    train(tmp_path, range(9), world_size=world_size)
    audit = audit_run(tmp_path)
    assert audit.passed, audit.objections
    assert (audit.steps, [each.used for each in audit.epochs]) == (9, [11, 11, 11])
    assert "in the recipe's order" not in audit.__paceline__().blocks[-1]  # type: ignore[operator]


@pytest.mark.everyday
def test_audit_counts_repeated_and_missing_samples(tmp_path: Path) -> None:
    ledger = alone(tmp_path)
    for step, ids in enumerate(([0, 1, 2, 3], [0, 1, 4, 5], [6, 7, 8, 9], [0, 1, 2, 3]), start=1):
        ledger.add(step, torch.tensor(ids))
    audit = audit_run(tmp_path)
    assert [(each.duplicates, each.missing, each.is_over) for each in audit.epochs] == [(2, 2, True), (0, 8, False)]
    assert list(audit.objections) == [
        "epoch 1: 2 use(s) of a sample beyond its first.",
        "epoch 1: 2 sample(s) were never used.",
    ]


def test_two_ranks_that_read_the_same_samples_are_found(tmp_path: Path) -> None:
    for rank in range(2):
        ledger = Ledger(tmp_path, 8, rank=rank, world_size=2)
        for step in range(4):
            ledger.add(step + 1, np.arange(2 * step, 2 * step + 2))
    assert sum(each.duplicates for each in audit_run(tmp_path).epochs) == 8


@pytest.mark.everyday
@pytest.mark.parametrize("world_size", [1, 2])
def test_steps_that_are_repeated_after_a_kill_count_once(tmp_path: Path, world_size: int) -> None:
    for ledger in train(tmp_path, range(7), world_size=2):
        ledger.state_dict()
    train(tmp_path, range(5, 9), world_size=world_size)  # also with a rank less, whose later records go
    audit = audit_run(tmp_path)
    assert (audit.passed, audit.steps) == (True, 9)


def test_a_start_that_was_killed_before_its_first_checkpoint_is_repeated(tmp_path: Path) -> None:
    killed = alone(tmp_path)
    killed.add(1, [1, 2])
    killed.state_dict()  # of a checkpoint that was not finished
    ledger = alone(tmp_path)
    ledger.add(1, [3, 4])
    assert [each.used for each in audit_run(tmp_path).epochs] == [2]


def test_a_second_start_without_the_checkpoint_is_refused(tmp_path: Path) -> None:
    ledger = alone(tmp_path / "ledger")
    ledger.add(1, [1, 2])
    assert ledger.state_dict() == ledger.state_dict() == {"step": 1}  # so the first checkpoint was whole
    with pytest.raises(RunDirectoryError) as caught:
        alone(tmp_path / "ledger").add(1, [3, 4])
    check_sentence(caught.value)
    alone(tmp_path / "ledger").add(2, [3, 4])


def test_missing_steps_are_named(tmp_path: Path) -> None:
    alone(tmp_path).add(4, [1, 2])
    assert audit_run(tmp_path).objections == ("steps 1 to 3 are not in the ledger.",)


def test_dropped_samples_are_not_missing(tmp_path: Path) -> None:
    ledger = alone(tmp_path, 11, dropped=3)
    order = BatchOrder(11, 4, seed=1, rank=0, world_size=1, drop_last=True)
    for _ in range(2):
        for ids in order:
            order.step += 1
            ledger.add(order.step, ids)
    audit = audit_run(tmp_path)
    assert (audit.passed, [each.used for each in audit.epochs]) == (True, [8, 8])


def test_torn_end_is_cut_and_damage_is_named(tmp_path: Path) -> None:
    train(tmp_path, range(3))
    file = tmp_path / "rank-00000.ids"
    file.write_bytes(file.read_bytes()[:-3])
    train(tmp_path, range(2, 3))
    assert audit_run(tmp_path).passed
    content = bytearray(file.read_bytes())
    content[40] ^= 1
    file.write_bytes(content)
    with pytest.raises(RunDirectoryError, match="damaged"):
        audit_run(tmp_path)


def test_damaged_facts_are_named(tmp_path: Path) -> None:
    alone(tmp_path).add(1, [1])
    (tmp_path / "ledger.json").write_text('{"format_version": 1}')
    with pytest.raises(RunDirectoryError) as caught:
        audit_run(tmp_path)
    check_sentence(caught.value)


@pytest.mark.parametrize(
    ("use", "error", "fields"),
    [
        (lambda ledger: ledger.add(1, [0, 12]), DataError, {"key": "ids", "value": 12}),
        (lambda ledger: ledger.add(1, [-1]), DataError, {"key": "ids", "value": -1}),
        (lambda ledger: ledger.add(1, ["a"]), DataError, {"key": "ids"}),
        (lambda ledger: ledger.add(1, [[1], [2, 3]]), DataError, {"key": "ids"}),
        (lambda ledger: ledger.add(1, torch.zeros(2)), DataError, {"key": "ids"}),
        (lambda ledger: ledger.add(1, torch.zeros(2, 1, dtype=torch.int64)), DataError, {"key": "ids"}),
        (lambda ledger: ledger.add(0, [1]), DataError, {"key": "step", "value": 0}),
        (lambda ledger: ledger.add("1", [1]), DataError, {"key": "step", "value": "1"}),
        (lambda ledger: (ledger.add(5, [1]), ledger.add(4, [2])), DataError, {"key": "step", "value": 4}),
        (lambda ledger: ledger.load_state_dict({}), CheckpointError, {"value": None}),
        (lambda ledger: ledger.load_state_dict({"step": -1}), CheckpointError, {"value": -1}),
        (lambda ledger: alone(ledger._folder, 13), RunDirectoryError, {"path": "ledger"}),
        (lambda ledger: alone(ledger._folder, 12, dropped=12), DataError, {"key": "dropped", "value": 12}),
        (lambda ledger: alone(ledger._folder, "12"), DataError, {"key": "samples", "value": "12"}),
        (lambda ledger: alone(5), RunDirectoryError, {"key": "folder", "value": 5}),
    ],
)
def test_wrong_use_is_refused(
    tmp_path: Path, use: Callable[[Ledger], object], error: type[PacelineError], fields: dict[str, Any]
) -> None:
    ledger = alone(tmp_path / "ledger")
    with raises(error, **fields):
        use(ledger)


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError) as caught:
        alone(tmp_path / "file")
    check_sentence(caught.value)
