"""The audit finds every sample that was not delivered as the order says, whether ids or positions were recorded."""

from __future__ import annotations

import contextlib
import json
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from paceline.data.batch import Batch, select_rows
from paceline.data.order import StepGeometry
from paceline.errors import RunDirectoryError
from paceline.host.world import World
from paceline.records.ledger import Entry, LedgerEntry, LedgerWriter, PositionEntry, ledger_path, read_ledger
from paceline.reports.audit import audit_run, used_samples

Make = Callable[..., Any]
Batches = list[Batch]

COMMON = {"batch.micro_size": 8, "evaluate.every": "off"}  # two micro-batches a step, four steps an epoch of 52


class Wrong:
    """A pipeline that delivers an epoch's batches otherwise than it was asked to."""

    def __init__(self, pipeline: Any, spoil: Callable[[Batches], Batches]) -> None:
        self._pipeline, self._spoil = pipeline, spoil

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipeline, name)

    def train_batches(self, geometry: StepGeometry, first: int, last: int, world: World) -> Iterator[Batch]:
        yield from self._spoil([*self._pipeline.train_batches(geometry, first, last, world)])


def with_ids(batch: Batch, ids: np.ndarray) -> Batch:
    rows = [index for index, sample in enumerate(batch.ids.tolist()) if sample in ids]
    size = len(batch.ids)
    inputs, targets = (select_rows(each, rows, size=size) for each in (batch.inputs, batch.targets))
    return replace(batch, inputs=inputs, targets=targets, ids=batch.ids[rows])


def relabelled(batch: Batch, as_of: Batch) -> Batch:
    """The samples of one micro-batch delivered as another."""
    return replace(batch, slice=as_of.slice)


DELIVERED: dict[str, tuple[Callable[[Batches], Batches], tuple[str, ...]]] = {
    "a micro-batch's samples twice, another's never": (
        lambda given: [*given[:3], relabelled(given[2], given[3]), *given[4:]],
        ("epoch 1: 8 use(s) of a sample beyond its first", "epoch 1: 8 sample(s) were never used", "step 2 lacks"),
    ),
    "a micro-batch of another step again": (
        lambda given: [
            *given[:3],
            replace(given[0], slice=replace(given[3].slice, first=0, ids=given[0].ids)),
            *given[4:],
        ],
        ("8 use(s) of a sample beyond", "8 sample(s) were never used", "step 2 used positions 0 to 7 of epoch 1 out"),
    ),
    "a sample less": (
        lambda given: [*given[:4], with_ids(given[4], given[4].ids[1:]), *given[5:]],
        ("epoch 1: 1 sample(s) were never used", "step 3 lacks sample"),
    ),
    "two micro-batches of different steps exchanged": (
        lambda given: [given[0], relabelled(given[2], given[1]), relabelled(given[1], given[2]), *given[3:]],
        ("step 1 lacks sample", "step 2 lacks sample"),
    ),
    "the first micro-batch of a step left out": (
        lambda given: [*given[:2], *given[3:]],
        ("epoch 1: 8 sample(s) were never used", "step 2 lacks sample"),
    ),
    "positions that claim other samples": (
        lambda given: [
            replace(given[0], ids=given[2].ids, slice=replace(given[0].slice, ids=given[2].ids)),
            *given[1:],
        ],
        ("step 1 used positions 0 to 15 of epoch 1 with other samples than the order's",),
    ),
}


@pytest.mark.parametrize("name", DELIVERED)
def test_what_was_delivered_wrongly_is_found(train_tiny: Make, tiny_task: Make, name: str) -> None:
    spoil, wanted = DELIVERED[name]

    def task(recipe: Any) -> Any:
        made = tiny_task()(recipe)
        opened = made.open_pipeline
        made.open_pipeline = lambda placement: Wrong(opened(placement), spoil)
        return made

    result = train_tiny("run", COMMON, task=task)
    found = audit_run(result.run_dir)
    told = " ".join(found.objections)
    assert not found.passed
    assert all(each in told for each in wanted), told
    counts = result.summary.ledger
    assert (counts.duplicates > 0) == ("beyond" in told)
    assert (counts.missing > 0) == ("never used" in told)


def test_an_honest_run_records_one_position_a_step(train_tiny: Make) -> None:
    result = train_tiny("run", COMMON)
    entries = [*read_ledger(ledger_path(result.run_dir / "ledger", 0))]
    assert [type(entry) for entry in entries] == [PositionEntry] * 8
    assert [entry.samples for entry in entries] == [16, 16, 16, 4] * 2
    assert [entry.ids.size for entry in used_samples(result.run_dir, 0)] == [16, 16, 16, 4] * 2
    assert audit_run(result.run_dir).passed


def first_replaced(entries: list[Entry], **changes: Any) -> list[Entry]:
    return [replace(entries[0], **changes), *entries[1:]]


RECORDED: dict[str, tuple[Callable[[list[Entry]], list[Entry]], str]] = {
    "a record twice": (lambda given: [*given[:2], *given[1:]], "16 use(s) of a sample beyond its first"),
    "a record less": (lambda given: [*given[:2], *given[3:]], "16 sample(s) were never used"),
    "the last record less": (lambda given: given[:-1], "4 sample(s) were never used"),
    "a position later": (lambda given: first_replaced(given, first=1), "step 1 used positions 1 to 16"),
    "a sample less": (lambda given: first_replaced(given, samples=15), "1 sample(s) were never used"),
    "another digest": (lambda given: first_replaced(given, digest=bytes(8)), "the digest does not match"),
    "another epoch": (lambda given: [*given[:3], replace(given[3], epoch=1), *given[4:]], "never used"),
    "two steps exchanged": (
        lambda given: [replace(given[1], step=1), replace(given[0], step=2), *given[2:]],
        "step 1 used positions 16 to 31 of epoch 1 out of order",
    ),
    "a step more": (lambda given: [*given, replace(given[-1], step=9)], "continues after step 8"),
    "no such position": (lambda given: first_replaced(given, first=48), "holds sample 63, but the training set has 52"),
    "ids in place of a position": (lambda given: given, ""),
    "other ids in place of a position": (lambda given: given, "beyond its first"),
}


@pytest.fixture(scope="module")
def honest(train_shared: Make) -> Path:
    run_dir: Path = train_shared(COMMON).run_dir
    return run_dir


def write(path: Path, entries: list[Entry]) -> None:
    """Write records as they are, whatever they claim."""
    path.write_bytes(b"")
    with contextlib.closing(LedgerWriter(path)) as writer:
        for each in entries:
            if isinstance(each, LedgerEntry):
                writer.append(step=each.step, epoch=each.epoch, ids=each.ids, broken=each.broken)
                writer.flush()
                continue
            header = struct.pack("<4sB3xIQII", b"PLED", 0, each.epoch, each.step, each.samples, 0)
            body = header + struct.pack("<Q8s", each.first, each.digest)
            writer.write(body + struct.pack("<I", zlib.crc32(body)))


@pytest.mark.parametrize("name", RECORDED)
def test_a_record_that_was_changed_is_found(honest: Path, tmp_path: Path, name: str) -> None:
    change, wanted = RECORDED[name]
    run_dir = tmp_path / "run"
    shutil.copytree(honest, run_dir)
    path = ledger_path(run_dir / "ledger", 0)
    entries = [*read_ledger(path)]
    if "ids" in name:
        first = next(used_samples(run_dir, 0))
        entries[0] = replace(first, ids=first.ids.copy())
        entries[0].ids[0] = first.ids[1] if "other" in name else first.ids[0]
    write(path, change(entries))
    found = audit_run(run_dir)
    assert found.passed == (not wanted)
    assert wanted in " ".join(found.objections)


def test_samples_are_not_named_unless_their_digest_matches(honest: Path, tmp_path: Path) -> None:
    shutil.copytree(honest, tmp_path / "run")
    path = ledger_path(tmp_path / "run" / "ledger", 0)
    write(path, first_replaced([*read_ledger(path)], digest=bytes(8)))
    with pytest.raises(RunDirectoryError, match=r"step 1 in .* the digest does not match"):
        next(used_samples(tmp_path / "run", 0))


@pytest.mark.parametrize(
    ("name", "change", "wanted"),
    [
        ("plan.json", {"global_batch_size": 0}, r"plan.json is damaged \(ZeroDivisionError"),
        ("plan.json", {"train_samples": 0}, r"plan.json is damaged \(ZeroDivisionError"),
        ("recipe.yaml", {"seed": 2**64}, r"plan.json is damaged \(OverflowError"),
    ],
)
def test_a_plan_that_gives_no_order(
    honest: Path, tmp_path: Path, name: str, change: dict[str, int], wanted: str
) -> None:
    shutil.copytree(honest, tmp_path / "run")
    file = tmp_path / "run" / name
    file.write_text(json.dumps(yaml.safe_load(file.read_text()) | change))
    with pytest.raises(RunDirectoryError, match=wanted):
        audit_run(tmp_path / "run")


def test_another_seed_than_the_runs_is_found(honest: Path, tmp_path: Path) -> None:
    shutil.copytree(honest, tmp_path / "run")
    recipe = tmp_path / "run" / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("seed: 0", "seed: 1"))
    found = audit_run(tmp_path / "run")
    assert len([each for each in found.objections if "the digest does not match" in each]) == 5
    assert "3 more step(s)" in found.objections[-1]
    assert json.loads(json.dumps(found.to_json()))["passed"] is False


@pytest.mark.parametrize("claim", [{"samples": 10**18, "step": 10**18}, {"samples": -5}])
@pytest.mark.parametrize("last", [{}, {"step": 2**63}, {"step": 2**63, "epoch": 2**32 - 1}])
def test_a_claimed_count_is_not_looped_over(
    honest: Path, tmp_path: Path, claim: dict[str, int], last: dict[str, int]
) -> None:
    run = shutil.copytree(honest, tmp_path / "run")
    summary, ledger = run / "summary.json", ledger_path(run / "ledger", 0)
    summary.write_text(json.dumps(json.loads(summary.read_text()) | claim))
    *entries, end = read_ledger(ledger)
    write(ledger, [*entries, replace(end, **last)])
    told = audit_run(run)
    assert any("ledger" in each for each in told.objections)
    assert len(told.objections) < 10
    assert len(told.epochs) < 10
    assert len(json.dumps(told.to_json())) < 10_000


def test_a_step_of_a_billion_samples_is_refused(honest: Path, tmp_path: Path) -> None:
    run = shutil.copytree(honest, tmp_path / "run")
    plan = json.loads((run / "plan.json").read_text())
    (run / "plan.json").write_text(json.dumps(plan | dict.fromkeys(("train_samples", "global_batch_size"), 10**9)))
    with pytest.raises(RunDirectoryError, match="steps of 1000000000 samples"):
        audit_run(run)
