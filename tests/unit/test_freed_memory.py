"""What one step frees is there for the next: seen in the pages that the system has to bring anew."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.libc_ver()[0] != "glibc", reason="it is glibc that is told"
)

# Two pieces of 48 MiB, as large activations are, taken and given back twenty times.
PROGRAM = """
import resource
import numpy as np
from paceline.freed_memory import keep_freed_memory
print(keep_freed_memory())
def step():
    one, other = np.empty(48 << 20, np.uint8), np.empty(48 << 20, np.uint8)
    one[::4096] = other[::4096] = 1
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(**environment: str) -> tuple[str, int]:
    told = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=told | environment, capture_output=True, text=True, check=True, timeout=60)
    kept, count = done.stdout.split()
    return kept, int(count)


def test_pages_are_brought_once() -> None:
    kept, count = faults()
    assert kept == "True"
    # Without it, each of the 20 rounds brings 96 MiB anew: 491,520 pages of 4 KiB.
    assert count < 1000


@pytest.mark.parametrize(
    "environment", [{"MALLOC_TRIM_THRESHOLD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}]
)
def test_what_the_user_has_set_stays(environment: dict[str, str]) -> None:
    kept, count = faults(**environment)
    assert kept == "False"
    assert count > 1000
