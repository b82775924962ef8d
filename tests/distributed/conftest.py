"""Real launches of the command line: started, watched, signalled, killed as a family, and cleaned up after."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fork_server
import numpy as np
import pytest
from calls import Done
from PIL import Image
from safetensors.numpy import load_file

from paceline.cli.main import run as run_command_line
from paceline.records.reader import strip_timings

sys.path.append(str(Path(__file__).parent))  # for hosts.py, networks.py and shaped.py
from own_networks import OWN, network_that

SOURCES = Path(__file__).parents[2] / "src"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
MARK = "PACELINE_TEST_FAMILY"

# Small, but with everything that could lose its place: loader processes, augmentation, dropout, BatchNorm, bf16,
# a moving average, accumulation, a ragged last step, warm-up, clipping, and a record, a save and an evaluation
# that fall on different steps.
RECIPE: dict[str, Any] = {
    "seed": 3,
    "model": {"name": "small_resnet", "options": {"width": 4, "stages": 1, "dropout": 0.2}},
    "data": {
        "dataset": "image_folder",
        "path": "photos",
        "backend": "pytorch",
        "workers": 2,
        "augment": {"crop": "pad", "padding": 2, "flip": 0.5},
    },
    "batch": {"global_size": 16, "micro_size": 4},
    "optimizer": {"lr": 0.02, "weight_decay": 0.0005, "clip_norm": 1.0},
    "schedule": {"warmup": "5 steps"},
    "train": {"duration": "60 steps", "precision": "bf16", "ema": 0.9, "label_smoothing": 0.1},
    "evaluate": {"every": "5 steps", "batch_size": 8},
    "checkpoint": {"every": "4 steps"},
    "parallel": {"device": "cpu", "threads": 1},
    "telemetry": {"log_every": "3 steps", "trackers": []},
}
TRAIN_SAMPLES = 90  # five steps of 16 an epoch, and a last one of 10
VALIDATION_SAMPLES = 33


class Launched:
    """A launch with all its descendants, whichever session or parent they have by now."""

    def __init__(self, command: list[str], directory: Path, environment: dict[str, str], *, real: bool = False) -> None:
        self._mark = uuid.uuid4().hex
        # Not in pytest's directory: a socket's path may have 107 characters.
        self.temporary = Path(tempfile.mkdtemp(prefix="paceline-test-"))
        self._logs = (directory / f"{self._mark}.out", directory / f"{self._mark}.err")
        self._seen: set[int] = set()
        with self._logs[0].open("wb") as out, self._logs[1].open("wb") as err:
            # Files, not pipes: a killed launch's orphans would hold a pipe open and its reader waiting.
            self.process = (subprocess.Popen if real else fork_server.Popen)(
                command,
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
                env={"TMPDIR": str(self.temporary), **environment, MARK: self._mark},
            )

    def family(self) -> set[int]:
        """Processes of this launch that are alive: they carry its mark in their environment."""
        wanted = f"{MARK}={self._mark}".encode()
        found = set()
        for entry in Path("/proc").iterdir():
            try:
                # Read whole: that of a process just forked, or ended, is empty.
                if entry.name.isdigit() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.add(int(entry.name))
            except (OSError, PermissionError):
                continue
        self._seen |= found
        return found

    def ranks(self) -> list[int]:
        """Process ids of the ranks, in order; empty until all are started."""
        found: dict[int, int] = {}
        for pid in sorted(self.family()):
            variables = environment_of(pid)
            # A rank's own children inherit its number: the rank is the one whose parent has none.
            if "RANK" in variables and "RANK" not in environment_of(parent_of(pid)):
                found[int(variables["RANK"])] = pid
        size = next((int(environment_of(pid).get("WORLD_SIZE", 0)) for pid in found.values()), 0)
        return [found[rank] for rank in sorted(found)] if found and len(found) == size else []

    def workers(self) -> list[int]:
        """Process ids of ranks and of what they started, whether or not all ranks are there."""
        return [pid for pid in self.family() if "RANK" in environment_of(pid)]

    def kill(self) -> None:
        """SIGKILL everyone, as a node that loses power does."""
        while family := self.family():
            for pid in family:
                _send(pid, signal.SIGKILL)
            time.sleep(0.01)
        self.process.wait()

    def clean(self) -> None:
        """End what is left and remove what it left."""
        self.kill()
        shutil.rmtree(self.temporary, ignore_errors=True)

    def wait(self, timeout: float = 400) -> Done:
        """Wait for the end of the launch itself."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._tell_where_it_hangs()
            raise AssertionError(f"did not end within {timeout} s:\n{self.log()}") from None
        out, err = (path.read_text(encoding="utf-8", errors="replace") for path in self._logs)
        return Done(code, out, err)

    def wait_for(self, condition: Callable[[], object], timeout: float = 400) -> None:
        """Wait until something is so; the launch must not end before."""
        deadline = time.monotonic() + timeout
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"ended, or {timeout} s went by, before it was so:\n{self.log()}")
            time.sleep(0.005)

    def _tell_where_it_hangs(self) -> None:
        """Let every process print the stacks of its threads (PYTHONFAULTHANDLER is set), then end it."""
        for pid in sorted(self.family()):
            name = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            with self._logs[1].open("a") as err:
                err.write(f"\nprocess {pid}, child of {parent_of(pid)}: {name}\n")
            _send(pid, signal.SIGABRT)
            time.sleep(0.5)
        self.kill()

    def log(self) -> str:
        """What it has printed so far."""
        return "".join(path.read_text(encoding="utf-8", errors="replace")[-20_000:] for path in self._logs)

    def seconds_until_alone(self, limit: float = 15) -> float:
        """Wait until no process of it is left; they are ended, and an error, after ``limit`` seconds."""
        begun = time.monotonic()
        while family := self.family():
            if time.monotonic() - begun > limit:
                left = [(pid, Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")) for pid in family]
                self.kill()
                raise AssertionError(f"still there after {limit} s: {left}")
            time.sleep(0.05)
        return time.monotonic() - begun

    def leftovers(self) -> list[str]:
        """Files in shared memory that carry a process id of it, and its temporary files."""
        shared = [
            name
            for name in os.listdir("/dev/shm")
            if any(str(pid) in name.replace(".", "_").split("_") for pid in self._seen)
        ]
        # Folders of torch's own, for kernels it may compile and for torchrun's logs, are not ours to remove.
        return shared + [
            path.name
            for path in self.temporary.iterdir()
            if not path.name.startswith(("torchinductor_", "torchelastic_"))
        ]


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def environment_of(pid: int) -> dict[str, str]:
    """The environment a process was started with; empty if it is gone."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def parent_of(pid: int) -> int:
    """The parent's process id; 0 if the process is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _environment() -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "TORCHELASTIC_"))}
    for name in ("TMPDIR", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        inherited.pop(name, None)
    return inherited | {
        "PYTHONPATH": str(SOURCES),
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
    }


def pytest_runtest_setup() -> None:
    """Skip what is here where there is no /proc, in which the processes of a launch are found."""
    if not Path("/proc/self/environ").exists():
        pytest.skip("finds processes in /proc")


@pytest.fixture(autouse=True)
def _not_inside_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs in this process must not think it was started by Slurm or torchrun."""
    kept = _environment()
    for name in set(os.environ) - set(kept) - {"TMPDIR"}:
        monkeypatch.delenv(name)


@pytest.fixture
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    """Start ``paceline ARGUMENTS`` in a directory, under torchrun with that many ranks, or such options, if asked.

    The command and its ranks are forked from a warm server, unless the test is marked ``real_processes``.

    ``before`` are words that a command begins with, to run somewhere else; ``program`` is one of Python to run instead.
    """
    launched: list[Launched] = []
    real = request.node.get_closest_marker("real_processes") is not None

    def starter(
        *arguments: object,
        where: Path = tmp_path,
        torchrun: int | tuple[str, ...] = 0,
        variables: dict[str, str] | None = None,
        before: tuple[str, ...] = (),
        program: str | None = None,
    ) -> Launched:
        options = torchrun if isinstance(torchrun, tuple) else ("--standalone", f"--nproc-per-node={torchrun}")
        head = [*TORCHRUN, *options] if torchrun else [sys.executable]
        tail = [*(["-m", "paceline"] if program is None else ["-c", program]), *map(str, arguments)]
        command = [*before, *head, *tail]
        launched.append(Launched(command, where, _environment() | (variables or {}), real=real))
        return launched[-1]

    yield starter
    for each in launched:
        each.clean()


@pytest.fixture
def run(start: Callable[..., Launched]) -> Callable[..., Done]:
    """Start, and wait for the end; nothing of it may be left."""

    def runner(*arguments: object, timeout: float = 400, **options: Any) -> Done:
        launched = start(*arguments, **options)
        done = launched.wait(timeout)
        launched.seconds_until_alone()
        assert launched.leftovers() == []
        return done

    return runner


# One start of several processes for many runs: a list of names with what each changes.
TOGETHER = """
import datetime, gc, json, os, sys
import torch
import paceline

recipe, preparation, runs = sys.argv[1:]
world = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
meeting, limit = os.environ["PACELINE_RENDEZVOUS"], datetime.timedelta(seconds=110)
exec(preparation)
torch.distributed.init_process_group("gloo", init_method=meeting, timeout=limit, **world)
for name, overrides in json.loads(runs).items():
    paceline.train(recipe, overrides=overrides, run_dir=name)
gc.collect()
torch.distributed.destroy_process_group()
"""


@pytest.fixture
def train_together(start: Callable[..., Launched], tmp_path: Path) -> Callable[..., list[Done]]:
    """``train_together("recipe.yaml", {"run": {"optimizer.lr": 1}}, where=folder)``: runs, one after another.

    ``processes`` train them all; ``preparation`` is Python that each executes before.
    """

    def trainer(
        recipe: str, runs: dict[str, Any], *, where: Path, processes: int = 2, preparation: str = ""
    ) -> list[Done]:
        world = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes), "GLOO_SOCKET_IFNAME": "lo"}
        world["PACELINE_RENDEZVOUS"] = f"file://{tmp_path}/{uuid.uuid4()}"
        words, ranks = (recipe, preparation, json.dumps(runs)), []
        for rank in range(processes):
            place = world | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(start(*words, program=TOGETHER, where=where, variables=place))
        done = [each.wait() for each in ranks]
        assert [each.code for each in done] == [0] * processes, [each.err for each in done]
        return done

    return trainer


@pytest.fixture
def run_here(
    studio: Path, monkeypatch: pytest.MonkeyPatch, forked_commands: None, capfd: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., Done]]:
    """Run ``paceline ARGUMENTS`` in this process, in the studio: for one rank whose death is not the point.

    Torch's import, which is paid once here, is nearly all that such a run costs.
    """
    import torch

    monkeypatch.chdir(studio)
    monkeypatch.setattr(sys, "path", [*sys.path])
    modules, threads = set(sys.modules), torch.get_num_threads()

    def runner(*arguments: object) -> Done:
        capfd.readouterr()
        return Done(run_command_line([str(each) for each in arguments]), *capfd.readouterr())

    yield runner
    torch.set_num_threads(threads)
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(studio)):
            del sys.modules[name]


def write_photos(root: Path) -> None:
    """Three classes of noisy 12x12 images, each a little bluer, greener or redder than noise."""
    generator = np.random.default_rng(0)
    for split, count in (("train", TRAIN_SAMPLES // 3), ("val", VALIDATION_SAMPLES // 3)):
        for channel, name in enumerate(("red", "green", "blue")):
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = generator.integers(0, 226, (12, 12, 3), dtype=np.uint8)
                pixels[..., channel] += 30
                Image.fromarray(pixels).save(folder / f"{number:03d}.png")


@pytest.fixture(scope="session")
def studio(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a recipe and the images it names; runs go into directories of their own in it."""
    root = tmp_path_factory.mktemp("studio")
    write_photos(root / "photos")
    (root / "recipe.yaml").write_text(json.dumps(RECIPE))
    return root


@pytest.fixture(scope="session")
def undisturbed(studio: Path) -> Path:
    """The run directory of the recipe trained by two processes from beginning to end without a stop.

    It keeps all its checkpoints, so that a run can be compared with it half-way.
    """
    train = ("train", "recipe.yaml", "checkpoint.keep=99", "--processes", "2", "--run-dir", "undisturbed")
    launched = Launched([sys.executable, "-m", "paceline", *train], studio, _environment())
    done = launched.wait(200)
    launched.clean()
    done.ended(0)
    return studio / "undisturbed"


def _records(run_dir: Path, *kinds: str) -> list[dict[str, Any]]:
    # A kill may have left a part of a last line.
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().split("\n")[:-1]]
    return [strip_timings(event) for event in events if event["event"] in kinds]


@pytest.fixture
def records() -> Callable[..., list[dict[str, Any]]]:
    """The events of some kinds, without what a clock decided."""
    return _records


@pytest.fixture
def summary() -> Callable[[Path], dict[str, Any]]:
    """What summary.json of a run directory says."""
    return lambda run_dir: json.loads((run_dir / "summary.json").read_text())


@pytest.fixture
def steps_recorded() -> Callable[[Path], int]:
    """The last step that a run directory has a record of, while the run goes on."""

    def last_step(run_dir: Path) -> int:
        try:
            lines = (run_dir / "events.jsonl").read_bytes().split(b"\n")[:-1]
        except FileNotFoundError:
            return -1
        return max((json.loads(line)["step"] for line in lines), default=-1)

    return last_step


@pytest.fixture
def patient(studio: Path, tmp_path: Path) -> tuple[object, ...]:
    """What to train, in ``tmp_path``: exact, and slow until a file ``fast`` lies there."""
    # As fast as it can be once a file `fast` lies there; slow enough before it for processes to come and go.
    (tmp_path / "patient.py").write_text(network_that("if not Path('fast').exists():\n    time.sleep(0.25)"))
    model = ("model.name=patient:Net", *OWN, "telemetry.log_every=1 steps")
    return ("train", studio / "recipe.yaml", f"data.path={studio / 'photos'}", "parallel.exact=true", *model)


@pytest.fixture
def training_world() -> Callable[[Path], int]:
    """The number of processes that a run has made a step with since it was last started; 0 if there was none."""

    def world(run_dir: Path) -> int:
        try:
            lines = (run_dir / "events.jsonl").read_bytes().split(b"\n")[:-1]
        except FileNotFoundError:
            return 0
        size = trained = 0
        for event in map(json.loads, lines):
            if event["event"] == "start":
                size, trained = event["world_size"], 0
            elif event["event"] == "step":
                trained = size
        return trained

    return world


@pytest.fixture
def same_end(records: Callable[..., Any], summary: Callable[[Path], Any]) -> Callable[[Path, Path], None]:
    """Assert that a run ended as another did, bit for bit and record for record."""

    def compare(run_dir: Path, other: Path) -> None:
        mine, theirs = summary(run_dir), summary(other)
        for key in ("status", "step", "epoch", "samples", "weights_sha256", "ema_sha256", "metrics", "ledger"):
            assert mine[key] == theirs[key], key
        assert records(run_dir, "step", "evaluation") == records(other, "step", "evaluation")

    return compare


@pytest.fixture
def same_outcome(undisturbed: Path, same_end: Callable[[Path, Path], None]) -> Callable[[Path], None]:
    """Assert that a run ended as the undisturbed one did."""
    return lambda run_dir: same_end(run_dir, undisturbed)


@pytest.fixture
def audited(run_here: Callable[..., Done]) -> Callable[[Path], dict[str, Any]]:
    """Audit a run directory, which must pass; returns the document."""

    def audit(run_dir: Path) -> dict[str, Any]:
        document: dict[str, Any] = run_here("audit", run_dir, "--json").ended(0).document
        assert document["passed"], document
        return document

    return audit


def newest_checkpoint(run_dir: Path) -> int:
    """The step that a run directory would be resumed from; 0 if there is none."""
    found = [int(path.name.removeprefix("step-")) for path in (run_dir / "checkpoints").glob("step-????????")]
    return max(found, default=0)


def _state_in(checkpoint: Path) -> dict[str, Any]:
    """Everything in a checkpoint that a run goes on from: each tensor's bits, and each document but for the clock."""
    found: dict[str, Any] = {}
    for path in checkpoint.iterdir():
        if path.suffix == ".safetensors":
            found[path.name] = {key: (str(v.dtype), v.shape, v.tobytes()) for key, v in load_file(path).items()}
        elif path.name not in ("manifest.json", "clock.json"):
            document = json.loads(path.read_text())
            found[path.name] = {k: v for k, v in document.items() if k not in ("resumes", "earlier_seconds")}
    return found


@pytest.fixture
def same_so_far(undisturbed: Path, records: Callable[..., Any]) -> Callable[[Path], int]:
    """Assert that an unfinished run is where the undisturbed one was; returns the step of its newest checkpoint."""

    def compare(run_dir: Path) -> int:
        if not (run_dir / "events.jsonl").exists():
            return 0
        mine = records(run_dir, "step", "evaluation")
        assert mine == records(undisturbed, "step", "evaluation")[: len(mine)]
        step = newest_checkpoint(run_dir)
        name = f"step-{step:08d}"
        # A run that was asked to stop has a checkpoint where the undisturbed one may have none.
        if (undisturbed / "checkpoints" / name).exists():
            mine, theirs = (_state_in(each / "checkpoints" / name) for each in (run_dir, undisturbed))
            assert mine.keys() >= {"model.safetensors", "ema.safetensors", "optimizer.safetensors", "progress.json"}
            assert mine == theirs
        return step

    return compare


# Each rank trains several runs, one after the other, for which the processes meet anew.
_RUNS_IN_A_ROW = """
import json, os, sys
import paceline

folder, runs, answer = sys.argv[1], json.loads(sys.argv[2]), {}
for number, (name, overrides) in enumerate(runs):
    os.environ["PACELINE_RENDEZVOUS"] = f"file://{folder}/meet-{number}"
    done = paceline.train(f"{folder}/recipe.yaml", overrides=overrides, run_dir=f"{folder}/{name}", quiet=True)
    answer[name] = [done.summary.weights_sha256, done.summary.ema_sha256, done.summary.step]
print(json.dumps(answer))
"""


@pytest.fixture
def train_in_ranks(on_two_ranks: Callable[..., list[dict[str, Any]]]) -> Callable[..., dict[str, list[Any]]]:
    """``train_in_ranks(folder, recipe, 2, ("a", {...}), ("a", {}))``: several runs without starting anew for each.

    Returns each run's weights, average and step, which all ranks agree on; of a name given twice, the last.
    """

    def train(folder: Path, recipe: str, ranks: int, *runs: tuple[str, dict[str, Any]]) -> dict[str, list[Any]]:
        (folder / "recipe.yaml").write_text(recipe)
        answers = on_two_ranks(["-c", _RUNS_IN_A_ROW, str(folder), json.dumps(runs)], folder, ranks=ranks)
        assert all(answer == answers[0] for answer in answers)
        return answers[0]

    return train
