"""What a process may use of its machine."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from paceline.machine import available_cores, cpu_name, memory_bytes
from paceline.records.environment import cpu_facts


def test_the_machine_is_described() -> None:
    assert 1 <= available_cores() <= (os.cpu_count() or 1)
    assert cpu_name()
    memory = memory_bytes()
    assert memory is None or memory > 1 << 28


def test_everyone_counts_alike() -> None:
    facts = cpu_facts()
    assert (facts["model"], facts["usable_cores"]) == (cpu_name(), available_cores())


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds no process to cores")
def test_only_the_cores_this_process_is_bound_to_count() -> None:
    bind = "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"
    program = f"import os; from paceline.machine import available_cores; {bind}; print(available_cores())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "1\n"
