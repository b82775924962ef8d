"""Peak memory is in bytes and sees what was allocated."""

from __future__ import annotations

import subprocess
import sys

from paceline.telemetry.memory import peak_memory

PROGRAM = """
from paceline.telemetry.memory import peak_resident_bytes
before = peak_resident_bytes()
block = bytearray(200 << 20)
block[::4096] = b"x" * len(block[::4096])
del block
print(peak_resident_bytes() - before)
"""


def test_a_block_of_200_mib_is_seen_after_it_is_gone() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60)
    assert 190 << 20 < int(done.stdout) < 230 << 20


def test_on_a_cpu_both_peaks_are_resident_memory() -> None:
    peak = peak_memory("cpu")
    assert peak.allocated_bytes == peak.reserved_bytes > 1 << 20
    assert list(peak.to_json()) == ["peak_memory_allocated_bytes", "peak_memory_reserved_bytes"]
