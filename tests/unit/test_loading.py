"""Libraries load without a search for garbage and without torch's compiler, and everything else is as ever."""

from __future__ import annotations

import gc
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.plugins.loading import loading


@pytest.fixture(autouse=True)
def collector() -> Any:
    assert gc.isenabled()
    gc.unfreeze()  # what tests/conftest.py freezes
    yield
    gc.enable()
    gc.freeze()


def test_there_is_no_search_within_and_there_is_again_after_it() -> None:
    with loading():
        assert not gc.isenabled()
        with loading():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_an_error_leaves_it_as_it_was_and_who_had_switched_it_off_finds_it_off() -> None:
    with pytest.raises(ImportError), loading():
        raise ImportError("no such library")
    assert gc.isenabled()
    gc.disable()
    with loading():
        pass
    assert not gc.isenabled()


def test_what_was_loaded_is_among_the_old_and_can_still_be_garbage() -> None:
    class Loaded:
        def __init__(self) -> None:
            self.itself = self

    with loading():
        made = Loaded()
        many = [[each] for each in range(20_000)]
    del many
    assert any(each is made for each in gc.get_objects(generation=2))
    assert gc.get_freeze_count() == 0
    del made
    gc.collect()
    assert not any(type(each) is Loaded for each in gc.get_objects())


def test_a_little_is_searched_next_as_ever() -> None:
    gc.collect()
    with loading():
        made = [Path()]
    assert any(each is made for each in gc.get_objects(generation=0))


def test_a_process_forked_within_is_searched_and_keeps_what_it_was_given_shared() -> None:
    reading, writing = os.pipe()
    with loading():
        child = os.fork()
        if not child:
            os.write(writing, json.dumps([gc.isenabled(), gc.get_freeze_count() > 0]).encode())
            os._exit(0)
        assert not gc.isenabled()
    os.close(writing)
    with os.fdopen(reading) as answer:
        assert json.load(answer) == [True, True]
    os.waitpid(child, 0)


def test_a_process_forked_elsewhere_is_left_alone() -> None:
    gc.disable()
    child = os.fork()
    if not child:
        os._exit(3 if gc.isenabled() else 4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4


def test_a_public_name_is_looked_up_once() -> None:
    assert paceline.train is vars(paceline)["train"]


def test_what_a_caller_froze_stays_frozen() -> None:
    gc.freeze()
    with loading():
        many = [[each] for each in range(20_000)]
    assert many
    assert gc.get_freeze_count() > 0


CODE = """
import gc
import torch

searched = {}

class Net(torch.nn.Linear):
    def forward(self, images):
        searched["stepped"] = gc.isenabled()
        return super().forward(images.flatten(1))

def net(num_classes, in_channels):
    searched["built"] = gc.isenabled()
    return Net(64, num_classes)
"""


def test_a_run_is_opened_so_and_trains_as_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "garbage_watched.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    changes: dict[str, Any] = {
        "model": {"name": "garbage_watched:net"}, "data.augment": None, "train.duration": "2 steps",
        "batch.global_size": 8, "evaluate.every": "off", "checkpoint.every": "off", "telemetry.trackers": [],
        "telemetry.report": False, "parallel.device": "cpu",
    }  # fmt: skip
    paceline.train("digits", overrides=changes, run_dir=tmp_path / "run", quiet=True)
    assert importlib.import_module("garbage_watched").searched == {"built": False, "stepped": True}
    assert gc.isenabled()


COMPILER_PROGRAMS = {
    # When this no longer holds, the placeholder for the compiler can go.
    "torchvision loads it": """
import torchvision.ops
assert "torch._dynamo" in sys.modules
""",
    "not within": """
with without_compiler():
    import torchvision.ops
assert not {"torch._dynamo", "torch._dynamo.utils"} & set(sys.modules)
pooled = torchvision.ops.roi_align(torch.ones(1, 1, 8, 8), [torch.tensor([[0.0, 0.0, 4.0, 4.0]])], 2)
assert pooled.tolist() == [[[[1.0, 1.0], [1.0, 1.0]]]]
assert torchvision.ops.roi_align.__globals__["is_compile_supported"]("cpu") is True
assert sys.modules["torch._dynamo.utils"].counters is not None
""",
    "who needs it has it": """
with without_compiler():
    import torch._dynamo.utils as utils
    from torch._dynamo.utils import counters
    assert utils.counters is counters
assert sys.modules["torch._dynamo.utils"] is torch._dynamo.utils is utils
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item() == 2
assert counters["frames"]["ok"] == 1
""",
    "it stays": """
import torch._dynamo.utils as before
with without_compiler():
    assert sys.modules["torch._dynamo.utils"] is before
assert sys.modules["torch._dynamo.utils"] is before
""",
}


@pytest.mark.parametrize("program", COMPILER_PROGRAMS.values(), ids=COMPILER_PROGRAMS)
def test_torchvision_is_loaded_without_the_compiler(program: str) -> None:
    imports = "import sys\nimport torch\nfrom paceline.plugins.loading import without_compiler\n"
    subprocess.run([sys.executable, "-c", imports + program], check=True)
