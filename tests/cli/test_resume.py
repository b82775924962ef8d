"""`paceline resume`: the recorded recipe, processes and directory; and no second run by accident."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from calls import Call

NO_EVALUATION = ("evaluate.every=off", "train.ema=off", "optimizer.momentum=0.9")


def digest(run: Path) -> str:
    return str(json.loads((run / "summary.json").read_text())["weights_sha256"])


def test_a_run_of_two_processes_goes_on_with_two(paceline: Call, tiny: Any, tmp_path: Path) -> None:
    requested = ("train", "digits", *tiny, *NO_EVALUATION, "--processes=2", "--run-dir")
    assert paceline(*requested, "whole").code == 0
    part = paceline(*requested, "part", "--until", "2 steps").ended(75)
    assert "resume part\n" in part.out
    (tmp_path / "elsewhere").mkdir()
    for until, code in (("4 steps", 75), ("null", 0)):  # it stays known after the first
        done = paceline("resume", "../part", f"train.until={until}", "--json", cwd=tmp_path / "elsewhere")
        assert done.code == code, done.err
        environment = json.loads((tmp_path / "part" / "environment.json").read_text())
        assert "--processes 2" in environment["command"]
        assert environment["directory"] == str(tmp_path)
        assert done.document["world_size"] == 2
    assert digest(tmp_path / "part") == digest(tmp_path / "whole")
    assert "nothing to do" in paceline("resume", "part").out


def test_what_a_script_recorded_or_nobody_goes_on_too(paceline_here: Call, tiny: Any) -> None:
    assert paceline_here("train", "digits", *tiny, "train.until=2 steps", "--run-dir", "run").code == 75
    script = json.dumps({"command": "job.py --processes 2 --max-restarts 1", "directory": "/gone"})
    Path("run/environment.json").write_text(script)
    assert paceline_here("resume", "run", "train.until=4 steps", "--json").ended(75).document["world_size"] == 1
    recorded = json.dumps({"command": "python -m paceline train digits --run-dir run", "directory": "/gone"})
    Path("run/environment.json").unlink()
    paceline_here("resume", "run", "train.until=5 steps").ended(75)
    Path("run/environment.json").write_text(recorded)
    assert paceline_here("resume", "run").code == 0
    Path("run/environment.json").write_text(recorded)
    plan = json.loads(Path("run/plan.json").read_text())
    Path("run/plan.json").write_text(json.dumps(plan | {"world_size": 4096}))
    paceline_here("resume", "run").refused("4096 processes")


def test_no_second_run_by_accident(paceline_here: Call, finished: Path) -> None:
    shutil.copytree(finished, "run")
    paceline_here("train", "run", "parallel.device=cpu").refused("paceline resume run")
    assert not Path("runs").exists()
    started = paceline_here("train", "run", "train.until=1 step", "--run-dir", "another").ended(75)
    assert "new run in another" in started.out
    assert "new run" not in paceline_here("train", "run", "train.until=2 steps", "--run-dir", "another").out


def test_code_that_a_run_names_needs_trust(paceline_here: Call, tiny: Any) -> None:
    body = "return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))"
    Path("net_of_mine.py").write_text(f"from torch import nn\ndef make(num_classes, in_channels): {body}\n")
    own = ("model.name=net_of_mine:make", "model.options={}", "model.options=null", "train.until=2 steps")
    part = paceline_here("train", "digits", *tiny, *own, "--run-dir", "run").ended(75)
    assert "--trust-code" in part.out
    paceline_here("resume", "run", "train.until=null").refused("--trust-code")
    assert paceline_here("resume", "run", "train.until=null", "--trust-code").code == 0
