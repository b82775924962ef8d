"""Twelve mistakes, each planted alone, and the command as a user calls it: which finding comes first?"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from calls import Call

TESTS = Path(__file__).parents[1]
GUIDE = TESTS.parent / "docs" / "guide" / "doctor.md"


def _load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"paceline_test_{name}", TESTS / "advisor/doctor" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


plants, clean = _load("test_planted"), _load("conftest")


def own_loader(**changes: Any) -> str:
    options = {"num_workers": 1, "pin_memory": True, "persistent_workers": True, **changes}
    return str(clean.OWN_LOADER.replace("{options}", repr(options)))


TASK, NET = plants.TASK, plants.NET
# What is planted in the code, what in the recipe, and what the doctor calls it.
FAULTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "`item()` in every step": (plants.ITEM, TASK, "synchronisation"),
    "no loader processes": (own_loader(num_workers=0, persistent_workers=False), TASK, "no_workers"),
    "batches from pageable memory": (own_loader(pin_memory=False), TASK, "unpinned"),
    "images as NCHW": ("", {"model.channels_last": "false"}, "channels_last"),
    "fp32": ("", {"train.precision": "fp32"}, "precision"),
    "biases before BatchNorm": (plants.network(bias=True), NET, "bias_before_batchnorm"),
    "odd widths": ("", {"model.options": "{width: 61, stages: 2}"}, "dimension_alignment"),
    "anomaly mode": (plants.ANOMALY, TASK, "anomaly_mode"),
    "tensors made on the host": (plants.ON_THE_HOST, TASK, "host_tensors"),
    "unused parameters": (plants.network(extra=plants.UNUSED), NET, "unused_parameters"),
    "a record for every step": ("", {"telemetry.log_every": "1 step"}, "log_every_step"),
    "loader processes that do not persist": (own_loader(persistent_workers=False), TASK, "no_persistent_workers"),
}
# What costs a GPU something, and a CPU nothing or not in any case.
GPU_ONLY = {"batches from pageable memory", "fp32", "odd widths"}


@pytest.fixture
def ranks(paceline_here: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """``ranks("a100")``: of each fault, at which place its finding stands; 0 if it is not among them."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (tmp_path / "clean.yaml").write_text(clean.CLEAN)
    imported: list[str] = []

    def examine(device: str, code: str, overrides: dict[str, Any]) -> list[Any]:
        name = f"planted_{device}_{len(imported)}"
        imported.append(name)
        (tmp_path / f"{name}.py").write_text(code)
        words = [f"{key}={str(value).replace('mine:', f'{name}:')}" for key, value in overrides.items()]
        done = paceline_here("doctor", "clean.yaml", *words, "--device", device, "--json")
        document = json.loads(done.out)
        assert document["unseen"] == {}, document["unseen"]
        assert done.code == (0 if document["healthy"] else 1)
        found: list[Any] = document["findings"]
        assert all(each["evidence"] and each["source"] for each in found)
        return found

    def rank(device: str) -> dict[str, int]:
        assert examine(device, "", {}) == []  # nothing in the clean recipe, nor in clean code
        assert examine(device, plants.network(), NET) == []
        assert examine(device, own_loader(), TASK) == []
        found = {}
        for fault, (code, overrides, name) in FAULTS.items():
            names = [each["name"] for each in examine(device, code, overrides)]
            found[fault] = names.index(name) + 1 if name in names else 0
        return found

    yield rank
    for name in imported:
        sys.modules.pop(name, None)


def told(column: int) -> dict[str, int]:
    """The table of the guide: of each fault, the rank in a column; 0 for a dash."""
    rows = re.findall(r"^\| (.+?) \| `(\w+)` \| (\S+) \| (\S+) \|$", GUIDE.read_text(), re.MULTILINE)
    found = {row[0]: row for row in rows if row[0] in FAULTS}
    assert {fault: found[fault][1] for fault in FAULTS} == {fault: name for fault, (*_, name) in FAULTS.items()}
    return {fault: 0 if row[column] == "–" else int(row[column]) for fault, row in found.items()}


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
def test_each_is_named_first_for_a_gpu_and_the_guide_says_so(ranks: Call) -> None:
    found = ranks("a100")
    assert sum(rank == 1 for rank in found.values()) >= 11, found
    assert found == told(2)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
def test_on_a_cpu_those_are_named_that_cost_something_there(ranks: Call) -> None:
    found = {fault: rank for fault, rank in ranks("cpu").items() if fault not in GPU_ONLY}
    assert set(found.values()) == {1}
    assert found == {fault: rank for fault, rank in told(3).items() if fault not in GPU_ONLY}
