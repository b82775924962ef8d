"""The ledger proves what was trained on: it survives kills, finds damage, and counts every sample."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from paceline.errors import RunDirectoryError
from paceline.records.ledger import (
    LedgerEntry,
    LedgerWriter,
    PositionEntry,
    count_epochs,
    digest_of,
    ledger_files,
    ledger_path,
    read_ledger,
    truncate_ledgers,
)
from paceline.records.reader import LedgerFacts

Record = tuple[int, int, list[int], list[int]]
Ids = NDArray[np.int64]

ids = st.lists(st.integers(0, 2**40), max_size=6)


def write(path: Path, records: list[Record]) -> None:
    writer = LedgerWriter(path)
    for step, epoch, used, broken in records:
        writer.append(step=step, epoch=epoch, ids=used, broken=broken)
    writer.close()
    writer.close()


def read(path: Path) -> list[Record]:
    entries = [*read_ledger(path)]
    return [
        (one.step, one.epoch, one.ids.tolist(), one.broken.tolist()) for one in entries if isinstance(one, LedgerEntry)
    ]


def order(epoch: int, begin: int, end: int, samples: int = 95) -> Ids:
    """The samples at positions of an epoch's order."""
    return np.random.default_rng(epoch).permutation(samples)[begin:end]


def write_run(
    directory: Path, *, epochs: int, samples: int, world_size: int, batch: int = 10, positions: bool = False
) -> None:
    """Write the ledger of a run in which every sample is used once per epoch."""
    writers = [LedgerWriter(ledger_path(directory, rank)) for rank in range(world_size)]
    step = 0
    for epoch in range(epochs):
        for start in range(0, samples, batch):
            step += 1
            first = start
            for rank, part in enumerate(np.array_split(order(epoch, start, start + batch, samples), world_size)):
                writers[rank].append(step=step, epoch=epoch, ids=part, first=first if positions else None)
                first += len(part)
    for writer in writers:
        writer.close()


@settings(max_examples=50, deadline=None)
@given(records=st.lists(st.tuples(st.integers(1, 2**40), st.integers(0, 2**31), ids, ids), max_size=8))
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, records: list[Record]) -> None:
    path = tmp_path_factory.mktemp("ledger") / "rank-00000.ids"
    write(path, records)
    assert read(path) == [record for record in records if record[2] or record[3]]


def test_torn_anywhere_the_whole_records_are_read(tmp_path: Path) -> None:
    path = ledger_path(tmp_path, 0)
    records: list[Record] = [(1, 0, [5, 2**33], []), (2, 0, [7, 8, 9], [1]), (3, 1, [0], [])]
    ends = []
    for count in (1, 2, 3):
        path.unlink(missing_ok=True)
        write(path, records[:count])
        ends.append(path.stat().st_size)
    whole = path.read_bytes()
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        assert read(path) == records[: sum(end <= size for end in ends)]
    path.write_bytes(whole[: ends[1]] + bytes(1000))  # what a power cut can leave: length without content
    assert read(path) == records[:2]


def test_records_are_shorter_and_longer_than_the_blocks_that_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records: list[Record] = [(step, 0, list(range(step**2)), []) for step in range(1, 12)]
    path = ledger_path(tmp_path, 0)
    write(path, records)
    for size in (1, 30, 300):
        monkeypatch.setattr("paceline.records.ledger._BLOCK_BYTES", size)
        assert read(path) == records
    entries = read_ledger(path)
    next(entries)
    os.truncate(path, 0)
    assert not list(entries)[20:]


def test_more_ranks_took_part_than_files_may_be_open(tmp_path: Path) -> None:
    write_run(tmp_path, epochs=1, samples=95, world_size=40)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 10, limits[1]))
    try:
        assert count_epochs(tmp_path, 95).facts.epochs_complete == 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_folder_that_cannot_be_read_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "ledger").touch()
    with pytest.raises(RunDirectoryError, match="Cannot read the folder"):
        ledger_files(tmp_path / "ledger")


def test_every_flipped_bit_before_the_last_record_is_found(tmp_path: Path) -> None:
    path = ledger_path(tmp_path, 0)
    write(path, [(1, 0, [5, 6], [])])
    first = path.stat().st_size
    write(path, [(2, 0, [7], [])])
    whole = bytearray(path.read_bytes())
    for bit in range(first * 8):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with pytest.raises(RunDirectoryError, match=r"rank-00000.ids' is damaged at byte 0: a checksum"):
            read(path)
        with pytest.raises(RunDirectoryError, match="damaged at byte 0"):
            truncate_ledgers(tmp_path, 1)


@pytest.mark.parametrize("positions", [False, True])
def test_truncation_cuts_every_rank_at_the_step(tmp_path: Path, positions: bool) -> None:
    write_run(tmp_path, epochs=3, samples=95, world_size=3, positions=positions)
    whole = [path.read_bytes() for path in ledger_files(tmp_path)]
    with ledger_path(tmp_path, 1).open("ab") as file:
        file.write(b"PLED\4\0")
    assert truncate_ledgers(tmp_path, 30) == 3 * 95
    assert [path.read_bytes() for path in ledger_files(tmp_path)] == whole
    assert truncate_ledgers(tmp_path, 14) == 95 + 4 * 10
    for path in ledger_files(tmp_path):
        assert {entry.step for entry in read_ledger(path)} == set(range(1, 15))
    assert truncate_ledgers(tmp_path, 0) == 0
    assert [path.stat().st_size for path in ledger_files(tmp_path)] == [0, 0, 0]
    assert truncate_ledgers(tmp_path / "absent", 0) == 0


def test_a_killed_writer_leaves_whole_records(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from paceline.records.ledger import LedgerWriter, ledger_path\n"
        "writer = LedgerWriter(ledger_path(Path(sys.argv[1]), 0))\n"
        "for step in range(1, 10**9):\n"
        "    writer.append(step=step, epoch=0, ids=range(step, step + step % 700 + 1))\n"
        "    if step % 200 == 0:\n"
        "        writer.flush(durable=True)\n"
        "        print(step, flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        flushed = max(int(writer.stdout.readline()) for _ in range(10))
        os.kill(writer.pid, signal.SIGKILL)
    records = read(ledger_path(tmp_path, 0))
    assert [step for step, *_ in records] == list(range(1, len(records) + 1))
    assert len(records) >= flushed
    truncate_ledgers(tmp_path, flushed)
    write(ledger_path(tmp_path, 0), [(flushed + 1, 0, [1], [])])
    assert len(read(ledger_path(tmp_path, 0))) == flushed + 1


def test_appending_costs_little(tmp_path: Path) -> None:
    writer = LedgerWriter(ledger_path(tmp_path, 0))
    batch = np.arange(256)
    spans = []
    for step in range(2000):
        start = time.perf_counter()
        writer.append(step=step, epoch=0, ids=batch)
        spans.append(time.perf_counter() - start)
    writer.close()
    assert float(np.median(spans)) < 100e-6


@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_a_clean_run_is_counted_complete(tmp_path: Path, world_size: int, positions: bool) -> None:
    write_run(tmp_path, epochs=3, samples=95, world_size=world_size, positions=positions)
    summary = count_epochs(tmp_path, 95)
    assert summary.facts == LedgerFacts(epochs_complete=3, duplicates=0, missing=0, broken=0)
    assert [one.used for one in summary.epochs] == [95, 95, 95]
    assert summary.to_json()["epochs"][2]["is_complete"]


@pytest.mark.parametrize("positions", [(False, False), (True, True), (False, True), (True, False)])
def test_a_change_of_world_size_is_counted_over_all_ranks(tmp_path: Path, positions: tuple[bool, bool]) -> None:
    """Also where a version that recorded ids is resumed by one that records positions, or the reverse."""
    write_run(tmp_path, epochs=2, samples=95, world_size=4, positions=positions[0])
    truncate_ledgers(tmp_path, 13)
    writer = LedgerWriter(ledger_path(tmp_path, 0))  # goes on alone, from step 14
    for step in range(14, 21):
        first = (step - 11) * 10
        writer.append(step=step, epoch=1, ids=order(1, first, first + 10), first=first if positions[1] else None)
    writer.close()
    assert count_epochs(tmp_path, 95, order=order).facts == LedgerFacts(epochs_complete=2, duplicates=0, missing=0)


@pytest.mark.parametrize("positions", [False, True])
def test_an_epoch_that_goes_on_misses_nothing_yet(tmp_path: Path, positions: bool) -> None:
    write_run(tmp_path, epochs=2, samples=95, world_size=2, positions=positions)
    truncate_ledgers(tmp_path, 14)
    summary = count_epochs(tmp_path, 95)
    assert summary.facts == LedgerFacts(epochs_complete=1, duplicates=0, missing=0)
    assert (summary.epochs[1].missing, summary.epochs[1].is_over) == (55, False)
    assert count_epochs(tmp_path, 95, epochs_over=2).facts.missing == 55
    assert count_epochs(tmp_path, 95, epochs_over=3).facts.missing == 150
    assert count_epochs(tmp_path / "absent", 95).facts == LedgerFacts(epochs_complete=0, duplicates=0, missing=0)


def test_duplicates_missing_and_broken_samples_are_told_apart(tmp_path: Path) -> None:
    write(ledger_path(tmp_path, 0), [(1, 0, [0, 1, 2, 2], []), (2, 1, [0, 1], [2])])
    write(ledger_path(tmp_path, 1), [(1, 0, [2], []), (2, 1, [3, 4], [])])
    summary = count_epochs(tmp_path, 5)
    assert summary.facts == LedgerFacts(epochs_complete=1, duplicates=2, missing=2, broken=1)
    assert [one.is_complete for one in summary.epochs] == [False, True]
    assert [(one.used, one.broken) for one in summary.epochs] == [(5, 0), (4, 1)]


def test_the_rest_of_an_unfinished_epoch_is_not_looked_up(tmp_path: Path) -> None:
    """In a very large epoch that would delay the stop of a run by minutes."""
    with contextlib.closing(LedgerWriter(ledger_path(tmp_path, 0))) as writer:
        for step, first in enumerate((0, 10, 20), 1):
            ids, is_broken = order(0, first, first + 10), step == 2
            writer.append(step=step, epoch=0, ids=ids[is_broken:], broken=ids[:is_broken], first=first)
    asked = []

    def recorded(epoch: int, begin: int, end: int) -> Ids:
        asked.append((begin, end))
        return order(epoch, begin, end)

    (found,) = count_epochs(tmp_path, 95, order=recorded).epochs
    assert (found.used, found.broken, found.duplicates, found.missing) == (29, 1, 0, 65)
    assert asked == [(10, 20)]


@settings(max_examples=200, deadline=None)
@given(
    records=st.lists(
        st.tuples(st.integers(0, 11), st.integers(1, 12), st.sampled_from(["position", "ids", "broken"])), max_size=12
    ),
    others=st.lists(st.integers(0, 11), max_size=4),
    draws=st.booleans(),
)
def test_any_mix_of_positions_and_ids_is_counted_as_ids_are(
    tmp_path_factory: pytest.TempPathFactory, records: list[tuple[int, int, str]], others: list[int], draws: bool
) -> None:
    whole = np.array([3, 3, 0, 11, 5, 3, 5, 7, 7, 7, 1, 2] if draws else [4, 2, 9, 0, 11, 5, 3, 7, 1, 8, 10, 6])
    directory = tmp_path_factory.mktemp("ledger")
    writers = [LedgerWriter(ledger_path(directory, rank)) for rank in range(2)]
    used, broken = [*others], 0
    writers[0].append(step=1, epoch=0, ids=others)
    for number, (first, size, kind) in enumerate(records, 1):
        ids = whole[first : first + size]
        used += ids.tolist()
        broken += len(ids) if kind == "broken" else 0
        given = {"ids": [], "broken": ids} if kind == "broken" else {"ids": ids}
        writers[number % 2].append(step=number, epoch=0, first=first if kind == "position" else None, **given)
    for writer in writers:
        writer.close()
    summary = count_epochs(directory, 12, epochs_over=1, order=lambda _, begin, end: whole[begin:end], is_drawn=draws)
    (found,) = summary.epochs
    expected, counts = np.bincount(whole, minlength=12), np.bincount(np.array(used, dtype=int), minlength=12)
    surplus, lack = np.maximum(counts - expected, 0).sum(), np.maximum(expected - counts, 0).sum()
    assert (found.used, found.broken) == (len(used) - broken, broken)
    if not draws or any(kind != "position" for *_, kind in records) or others:
        assert (found.duplicates, found.missing) == (surplus, lack)
    else:  # of draws by position alone, each draw counts
        assert found.duplicates - found.missing == surplus - lack
        assert found.missing >= lack


def test_micro_batches_of_a_step_are_one_record(tmp_path: Path) -> None:
    path = ledger_path(tmp_path, 0)
    with contextlib.closing(LedgerWriter(path)) as writer:
        for step, first in ((1, 0), (1, 8), (1, 16), (2, 24), (2, 40)):  # of the second step, one is missing
            writer.append(step=step, epoch=0, ids=order(0, first, first + 8), first=first)
        writer.append(step=2, epoch=0, ids=[1, 2], broken=[3], first=48)
        writer.append(step=2, epoch=0, ids=[], first=51)
        writer.append(step=3, epoch=0, ids=order(0, 51, 60), first=51)
        writer.flush()
        assert truncate_ledgers(tmp_path, 9) == 24 + 16 + 3 + 9
        writer.append(step=3, epoch=0, ids=order(0, 60, 61), first=60)
    *head, broken, tail, last = read_ledger(path)
    assert head == [
        PositionEntry(1, 0, 0, 24, digest_of(order(0, 0, 24))),
        PositionEntry(2, 0, 24, 8, digest_of(order(0, 24, 32))),
        PositionEntry(2, 0, 40, 8, digest_of(order(0, 40, 48))),
    ]
    assert isinstance(broken, LedgerEntry)
    assert (broken.ids.tolist(), broken.broken.tolist()) == ([1, 2], [3])
    assert (tail.samples, last.samples) == (9, 1)


def test_the_digest_is_of_the_ids_that_were_used(tmp_path: Path) -> None:
    path = ledger_path(tmp_path, 0)
    with contextlib.closing(LedgerWriter(path)) as writer:
        writer.append(step=1, epoch=0, ids=[4, 6], first=0)
    (entry,) = read_ledger(path)
    assert isinstance(entry, PositionEntry)
    assert entry.digest == digest_of(np.array([4, 6])) != digest_of(np.array([6, 4]))


def test_the_format_is_fixed_for_good(tmp_path: Path) -> None:
    """Later versions must read these bytes."""
    path = ledger_path(tmp_path, 0)
    with contextlib.closing(LedgerWriter(path)) as writer:
        writer.append(step=7, epoch=2, ids=[4, 6], broken=[5])
        writer.append(step=8, epoch=2, ids=[2**33, 1, 0], first=2**34)
    assert path.read_bytes().hex() == (
        "504c4544040000000200000007000000000000000200000001000000040000000600000005000000d1981f8c504c4544"
        "0000000002000000080000000000000003000000000000000000000004000000e7dec52c8b767234451d341b"
    )


def test_bytes_grow_with_steps_and_not_with_samples(tmp_path: Path) -> None:
    sizes = []
    for batch in (64, 4096):
        path = ledger_path(tmp_path / str(batch), 0)
        path.parent.mkdir()
        with contextlib.closing(LedgerWriter(path)) as writer:
            for step in range(10):
                for first in range(0, batch, 32):
                    writer.append(step=step, epoch=0, ids=np.arange(32), first=step * batch + first)
        sizes.append(path.stat().st_size)
    assert sizes == [480, 480]


def test_a_ledger_of_other_data_or_of_two_runs_is_refused(tmp_path: Path) -> None:
    write(ledger_path(tmp_path, 0), [(1, 1, [0, 5], [])])
    with pytest.raises(RunDirectoryError, match=r"holds sample 5, but the training set has 5 samples"):
        count_epochs(tmp_path, 5)
    with contextlib.closing(LedgerWriter(ledger_path(tmp_path, 1))) as writer:
        writer.append(step=1, epoch=1, ids=[3, 4], first=6)
    with pytest.raises(RunDirectoryError, match=r"holds sample 7, but the training set has 7 samples"):
        count_epochs(tmp_path, 7, order=order)
    write(ledger_path(tmp_path, 0), [(1, 0, [0], [])])
    with pytest.raises(RunDirectoryError, match=r"returns to epoch 0 at step 1, after epoch 1"):
        count_epochs(tmp_path, 8, order=order)


def test_negative_ids_are_refused(tmp_path: Path) -> None:
    writer = LedgerWriter(ledger_path(tmp_path, 0))
    writer.append(step=1, epoch=0, ids=[-1])
    with pytest.raises(ValueError, match="found -1"):
        writer.close()


def test_a_file_with_several_names_is_copied_before_it_is_changed(tmp_path: Path) -> None:
    original, copy = tmp_path / "original", tmp_path / "copy"
    write(ledger_path(original, 0), [(1, 0, [1], []), (2, 0, [2], [])])
    whole = ledger_path(original, 0).read_bytes()
    for change in (lambda: truncate_ledgers(copy, 1), lambda: write(ledger_path(copy, 0), [(3, 0, [3], [])])):
        copy.mkdir(exist_ok=True)
        ledger_path(copy, 0).unlink(missing_ok=True)
        ledger_path(copy, 0).hardlink_to(ledger_path(original, 0))
        change()
        assert ledger_path(original, 0).read_bytes() == whole
        assert ledger_path(copy, 0).read_bytes() != whole
