"""What differs between operating systems: a rehearsal of one without fork, flock and POSIX signals."""

import subprocess
import sys
from pathlib import Path

from PIL import Image

from paceline.host.system import lacking

SCRIPT = Path(__file__).parents[1] / "without_posix.py"


def without_posix(folder: Path, *commands: str) -> list[tuple[int, str]]:
    """Return each command's exit code and output, run one after the other in one process."""
    command = [sys.executable, "-B", SCRIPT, *commands]  # with an option, the tests' server does not fork it
    output = subprocess.run(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert "Traceback" not in output.stdout, output.stdout
    parts = output.stdout.split("exit code ")
    outputs = [parts[0], *(part.partition("\n")[2] for part in parts[1:])]
    return [(int(part.partition("\n")[0]), output) for part, output in zip(parts[1:], outputs, strict=False)]


def test_commands_work_without_fork_flock_and_posix_signals(tmp_path: Path) -> None:
    Image.new("L", (8, 8), 90).save(tmp_path / "new.png")
    trained, evaluated, predicted, answered, reported, exported, described, checked = without_posix(
        tmp_path,
        'train digits "train.duration=3 steps" data.workers=0 --run-dir run',
        "evaluate run",
        "predict run new.png",
        "predict run new.png --output answers.csv",
        "report run",
        "export run --format safetensors --output weights.safetensors",
        "env",
        "check-data .",
    )
    for code, output in (trained, evaluated, predicted, answered, reported, exported, described):
        assert code == 0, output
    assert "Completed after 3 steps" in trained[1]
    assert (tmp_path / "weights.safetensors").stat().st_size > 100_000
    assert "stopping by SIGUSR1" in described[1]
    assert checked[0] == 2
    assert "reads files in forked processes, which this system (linux) lacks: use Linux, macOS or WSL." in checked[1]


def test_nothing_is_lacking_here() -> None:
    assert lacking() == {}
