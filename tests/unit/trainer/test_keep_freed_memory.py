"""Is memory that a step freed there for the next, without another page fetched from the system?"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from paceline.trainer.process_settings import keep_freed_memory

_GNU = (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc") if sys.platform == "linux" else False
_FAULTS = """
import resource, torch
from paceline.trainer.process_settings import keep_freed_memory
torch.set_num_threads(1)

def faults_of_filling():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        torch.ones(16 * 2**20)  # 64 MiB: more than the library keeps by itself
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

with keep_freed_memory(torch.device("cpu")) as kept:
    with keep_freed_memory(torch.device("cpu")):  # a run that a run begins
        faults_of_filling()  # until there is a place that fits
    during = faults_of_filling()
print(kept, during, faults_of_filling())
"""


def in_a_process(**variables: str) -> tuple[bool, int, int]:
    """Whether memory was kept, page faults while it was and after; in a process whose memory nobody else uses."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", _FAULTS], capture_output=True, text=True, check=True, env={**environment, **variables}
    )
    kept, during, after = done.stdout.split()
    return kept == "True", int(during), int(after)


@pytest.mark.skipif(not _GNU, reason="another C library than GNU's keeps memory as it likes")
def test_freed_memory_is_used_again_without_fetching_pages_and_only_until_the_end() -> None:
    kept, during, after = in_a_process()
    assert kept
    assert 4 * during < after  # pages may be large, so that their number says nothing by itself


def test_what_the_environment_says_of_memory_stands() -> None:
    with keep_freed_memory(torch.device("cpu"), {"MALLOC_TRIM_THRESHOLD_": "1000000"}) as kept:
        assert not kept
    with keep_freed_memory(torch.device("cpu"), {"LD_PRELOAD": "/usr/lib/libjemalloc.so"}) as kept:
        assert not kept


def test_nothing_is_done_for_other_devices() -> None:
    with keep_freed_memory(torch.device("meta")) as kept:
        assert not kept
