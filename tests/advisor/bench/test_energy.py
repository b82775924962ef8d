"""Is energy read where there is a counter, and is it said why not where there is none?"""

from __future__ import annotations

from pathlib import Path

import torch

from paceline_advisor.bench.energy import EnergyCounter

CPU = torch.device("cpu")


def package(folder: Path, name: str, microjoules: int) -> Path:
    zone = folder / name
    zone.mkdir(parents=True)
    (zone / "max_energy_range_uj").write_text("10000000")
    (zone / "energy_uj").write_text(str(microjoules))
    return zone / "energy_uj"


def test_packages_are_added_up_and_their_parts_are_not(tmp_path: Path) -> None:
    first = package(tmp_path, "intel-rapl:0", 1_000_000)
    second = package(tmp_path, "intel-rapl:1", 2_000_000)
    package(tmp_path, "intel-rapl:0:0", 500_000)
    counter = EnergyCounter(CPU, rapl=tmp_path)
    assert counter.unavailable_reason == ""
    before = counter.joules()
    first.write_text("4000000")
    second.write_text("2500000")
    assert (before, counter.joules()) == (3.0, 6.5)


def test_a_counter_that_begins_again_goes_on(tmp_path: Path) -> None:
    register = package(tmp_path, "intel-rapl:0", 9_000_000)
    counter = EnergyCounter(CPU, rapl=tmp_path)
    before = counter.joules()
    register.write_text("1000000")
    assert before is not None
    assert counter.joules() == before + 2.0


def test_without_a_counter_there_is_a_reason(tmp_path: Path) -> None:
    none = EnergyCounter(CPU, rapl=tmp_path)
    assert (none.joules(), none.of) == (None, "")
    assert "RAPL" in none.unavailable_reason
    (tmp_path / "intel-rapl:0").mkdir()
    closed = EnergyCounter(CPU, rapl=tmp_path)
    assert closed.joules() is None
    assert "root" in closed.unavailable_reason
    assert "xpu" in EnergyCounter(torch.device("xpu"), rapl=tmp_path).unavailable_reason
