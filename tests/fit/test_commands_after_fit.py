"""A run of `paceline.fit` after its process is gone: killed and called again, and commands that open it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

SCRIPT = textwrap.dedent(
    """
    import sys
    import torch.nn.functional as F
    import torch
    import paceline
    import parts

    result = paceline.fit(
        parts.Net,
        parts.samples,
        parts.held_out,
        loss=F.cross_entropy,
        metrics={"accuracy": parts.right},
        optimizer=torch.optim.AdamW,
        epochs=4,
        batch_size=30,
        run_dir=sys.argv[1],
        workers=int(sys.argv[2]),
        overrides={"parallel.threads": 1, "telemetry.report": False, "checkpoint.every": "2 steps"},
    )
    print(result.metrics["accuracy"])
    """
)
PARTS = textwrap.dedent(
    """
    import random
    import torch
    from torch import nn
    from torch.utils.data import Dataset

    class Blobs(Dataset):
        def __init__(self, first, last):
            self.ids = range(first, last)

        def __len__(self):
            return len(self.ids)

        def __getitem__(self, i):
            label = self.ids[i] % 3
            return torch.randn(4) + label * random.random(), label

    def samples():
        return Blobs(0, 150)

    def held_out():
        return Blobs(150, 190)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 3))

        def forward(self, x):
            return self.layers(x)

    def right(outputs, targets):
        return outputs.argmax(dim=1) == targets
    """
)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "program.py").write_text(SCRIPT)
    (tmp_path / "parts.py").write_text(PARTS)
    return tmp_path


def started(program: Path, run: str, workers: int) -> subprocess.Popen[str]:
    command = [sys.executable, "program.py", run, str(workers)]
    return subprocess.Popen(command, cwd=program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> str:
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    return output


def summary(program: Path, run: str) -> dict[str, object]:
    found: dict[str, object] = json.loads((program / run / "summary.json").read_text())
    return found


@pytest.mark.everyday
def test_killed_and_called_again_it_ends_with_the_same_bits(program: Path) -> None:
    finish(started(program, "whole", 0))
    killed = started(program, "killed", 2)
    saved = program / "killed" / "checkpoints"
    while killed.poll() is None and not any(saved.glob("step-*")):
        time.sleep(0.002)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    finish(started(program, "killed", 2))
    whole, resumed = summary(program, "whole"), summary(program, "killed")
    assert resumed["resumes"] == 1
    assert resumed["weights_sha256"] == whole["weights_sha256"]


def paceline(program: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline", *words]
    return subprocess.run(command, cwd=program, capture_output=True, text=True, check=False)


def test_commands_open_what_has_a_name(program: Path) -> None:
    finish(started(program, "run", 0))
    metrics = summary(program, "run")["metrics"]
    assert isinstance(metrics, dict)
    scored = paceline(program, "evaluate", "run", "--trust-code", "--json")
    assert json.loads(scored.stdout)["accuracy"] == pytest.approx(metrics["accuracy"])
    untrusted = paceline(program, "evaluate", "run")
    assert untrusted.returncode == 2
    assert "--trust-code" in untrusted.stderr
    assert "Passed" in paceline(program, "audit", "run").stdout
    exported = paceline(program, "export", "run", "--format", "safetensors", "--output", "model.safetensors")
    assert exported.returncode == 0
    exported = paceline(program, "export", "run", "--format", "torch-export", "--output", "model.pt2", "--trust-code")
    assert "matches the network" in exported.stdout
    refused = paceline(program, "predict", "run", "parts.py", "--trust-code")
    assert "call predict(data) of paceline.fit's result" in refused.stderr


def test_what_has_no_name_is_named(program: Path) -> None:
    local = SCRIPT.replace("parts.Net,", "type('Local', (parts.Net,), {}),").replace("epochs=4", "epochs=1")
    (program / "program.py").write_text(local)
    finish(started(program, "run", 0))
    refused = paceline(program, "evaluate", "run", "--trust-code")
    assert refused.returncode == 2
    assert "this run's model is Local of __main__" in refused.stderr
    assert "call paceline.fit again" in refused.stderr


OWN_PARTS = """
class Deep(parts.Net):
    def forward(self, x):
        return 2 * super().forward(x)

class Notes:
    def on_evaluation(self, step, results):
        print(f"evaluated after step {step}")

"""


def test_what_a_script_defines_is_carried_into_processes(program: Path) -> None:
    carried = SCRIPT.replace("result =", OWN_PARTS + "result =").replace("parts.Net,", "Deep,")
    carried = carried.replace("epochs=4", "epochs=1, callbacks=[Notes()], processes=int(sys.argv[2])")
    carried = carried.replace("workers=int(sys.argv[2])", "seed=5")
    exact = '"parallel.exact": True, "parallel.logical_ranks": 2, "parallel.threads": 1'
    (program / "program.py").write_text(carried.replace('"parallel.threads": 1', exact))
    outputs = [finish(started(program, f"run{processes}", processes)) for processes in (1, 2)]
    assert all(output.count("evaluated after step 5") == 1 for output in outputs)
    first, second = (summary(program, f"run{processes}") for processes in (1, 2))
    assert second["world_size"] == 2
    assert first["weights_sha256"] == second["weights_sha256"]
