"""Peak memory is in bytes and sees what was allocated."""

from __future__ import annotations

import subprocess
import sys

from paceline.telemetry.clock import peak_memory_bytes, peak_resident_bytes

PROGRAM = """
from paceline.telemetry.clock import peak_resident_bytes
before = peak_resident_bytes()
block = bytearray(200 << 20)
block[::4096] = b"x" * len(block[::4096])
del block
print(peak_resident_bytes() - before)
"""


def test_a_block_of_200_mib_is_seen_after_it_is_gone() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60)
    assert 190 << 20 < int(done.stdout) < 230 << 20


def test_on_a_cpu_the_peak_is_resident_memory() -> None:
    before = peak_resident_bytes()
    peak = peak_memory_bytes("cpu")
    assert peak is not None
    assert before <= peak <= peak_resident_bytes()
    assert peak > 1 << 20


def test_a_device_that_keeps_no_peak_is_not_given_the_host_s() -> None:
    assert peak_memory_bytes("mps") is None
