"""A file of any size reaches the device in pieces, so that a slow disk is seen to get on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from blake3 import blake3

from paceline.checkpoint import durable


def test_what_is_written_grows_with_what_the_device_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "_FLUSH_BYTES", 1000)
    monkeypatch.setattr(durable, "PIECE_BYTES", 500)
    sizes, real = [], os.fsync

    def fsync(descriptor: int) -> None:
        sizes.append(os.fstat(descriptor).st_size)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    content = os.urandom(5300)
    facts = durable.write_file(tmp_path / "file", [content[:300], memoryview(content)[300:4600], content[4600:]])
    assert (tmp_path / "file").read_bytes() == content
    assert facts == durable.FileFacts(5300, blake3(content).hexdigest())
    assert sizes[-1] == 5300
    assert max(after - before for before, after in zip([0, *sizes], sizes, strict=False)) < 2000


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="only Linux counts a process's writes")
def test_the_system_is_given_a_mebibyte_at_a_time(tmp_path: Path) -> None:
    """Larger calls took twice as much of the processor (docs/decisions/0005)."""

    def calls() -> int:
        counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(counts["syscw"])

    content = os.urandom(5 * 2**20)
    before = calls()
    facts = durable.write_file(tmp_path / "file", [content[:7], memoryview(content)[7:]])
    assert calls() - before >= 5
    assert (tmp_path / "file").read_bytes() == content
    assert facts.digest == blake3(content).hexdigest()
