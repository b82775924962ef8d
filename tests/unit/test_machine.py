"""What a process may use of its machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.host import machine
from paceline.host.machine import available_cores, busy_message, cpu_name, cpu_quota, memory_bytes, memory_limit
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
    program = f"import os; from paceline.host.machine import available_cores; {bind}; print(available_cores())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "1\n"


def groups(root: Path, files: dict[str, str], own: str) -> tuple[Path, Path]:
    """A tree of control groups, as Linux shows it, and what a process reads of its own place there."""
    for name, content in files.items():
        path = root / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")
    (root / "own").write_text(own)
    return root / "cgroup", root / "own"


@pytest.mark.parametrize(
    ("files", "own", "quota"),
    [
        ({"cpu.max": "max 100000"}, "0::/\n", None),
        ({"cpu.max": "250000 100000"}, "0::/\n", 2.5),
        ({"a/cpu.max": "400000 100000", "a/b/cpu.max": "max 100000"}, "0::/a/b\n", 4.0),
        ({"a/cpu.max": "100000 100000", "a/b/cpu.max": "400000 100000"}, "0::/a/b\n", 1.0),
        ({"cpu.max": "50000 100000"}, "0::/the/hosts/own\n", 0.5),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, "3:cpu:/\n0::/\n", None),
        (
            {"cpu,cpuacct/d/cpu.cfs_quota_us": "150000", "cpu,cpuacct/d/cpu.cfs_period_us": "50000"},
            "4:cpu,cpuacct:/d\n3:memory:/d\n",
            3.0,
        ),
        ({}, "0::/\n", None),
    ],
)
def test_a_containers_quota_of_cores(tmp_path: Path, files: dict[str, str], own: str, quota: float | None) -> None:
    assert cpu_quota(*groups(tmp_path, files, own)) == quota


@pytest.mark.parametrize(
    ("files", "own", "limit"),
    [
        ({"memory.max": "max"}, "0::/\n", None),
        ({"memory.max": "2147483648"}, "0::/\n", 2**31),
        ({"a/memory.max": "1000", "a/b/memory.max": "5000"}, "0::/a/b\n", 1000),
        ({"memory/x/memory.limit_in_bytes": "4096"}, "9:memory:/x\n0::/\n", 4096),
        ({}, "", None),
    ],
)
def test_a_containers_memory(tmp_path: Path, files: dict[str, str], own: str, limit: int | None) -> None:
    assert memory_limit(*groups(tmp_path, files, own)) == limit


def test_what_is_not_linux_has_no_groups(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path, tmp_path / "none") is None
    assert memory_limit(tmp_path, tmp_path / "none") is None


@pytest.mark.parametrize(("quota", "cores"), [(None, 3), (2.5, 2), (0.5, 1), (8.0, 3)])
def test_a_quota_lowers_the_cores(monkeypatch: pytest.MonkeyPatch, quota: float | None, cores: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
    monkeypatch.setattr(machine, "cpu_quota", lambda: quota)
    assert available_cores() == cores


def test_a_busy_machine_is_told() -> None:
    assert busy_message(0.0) == ""
    assert busy_message(float(available_cores())) == ""
    assert "a load of 99999.0 on" in busy_message(99999.0)
