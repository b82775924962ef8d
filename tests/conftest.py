"""Tiny recipes, tasks and run directories: the real trainer with a real network in a fraction of a second.

Nothing here loads torch before a test asks for it, because half of the tests do without.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Neither the tests nor the benchmarks are packages.
sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "benchmarks")]
import fork_server
from hub_server import HubServer

# A busy machine is no reason to fail: what is too slow is found by its own tests.
settings.register_profile("paceline", deadline=None)
settings.load_profile("paceline")

SOURCES = Path(__file__).parents[1] / "src"

TINY = """
model: {name: small_resnet, channels_last: false, options: {width: 4, stages: 1, depth: 1}}
data: {dataset: digits}
batch: {global_size: 16}
optimizer: {lr: 0.05}
schedule: {name: constant}
train: {duration: 8 steps, precision: fp32}
evaluate: {every: 4 steps}
checkpoint: {every: 4 steps, keep: 2}
parallel: {device: cpu, threads: 1}
telemetry: {log_every: 2 steps, trackers: [], report: off}
"""

_ABOUT_THE_LAUNCH = {"start", "resume", "checkpoint", "stop", "finish", "observation"}
_TIMED = {"flops", "forecast"}


# Begun in this order, and then the rest; one worker of pytest-xdist runs all of a file.
_LONGEST_FIRST = ("labs", "distributed", "slurm", "cli", "docs")
_SHOWN = 15
# What a test function may take in the everyday run, in seconds of the processor: as many of its cases as fit into it
# are run, and the others are thorough. The file has what a case of a dearer one takes; WRITE_COSTS=1 measures anew.
_SHARE = 0.5
_COSTS = Path(__file__).with_name("costs.txt")
# What the thorough tests of changed code may take, in the same seconds.
_SHARE_OF_A_CHANGE = 120.0
_MAX_REASONS = 9  # for skipping tests, the most frequent first
_COUNTED = pytest.StashKey[float]()


def pytest_collection_finish() -> None:
    """What all tests import is not searched for garbage again and again while they run."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Nor is what the tests of a file have imported: an estimate of memory, as others do, collects garbage itself."""
    yield
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def _folder(nodeid: str) -> str:
    return nodeid.split("/")[1]  # tests/FOLDER/…


def pytest_configure() -> None:
    """Take SIGINT as a terminal's programs do: a shell's background jobs, and their children, ignore it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if "PYTEST_XDIST_WORKER" not in os.environ:
        # What runs remember between them is not for the tests to find, nor the tests' for the user's runs.
        os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="paceline-cache-")


def pytest_unconfigure() -> None:
    """Remove what was remembered."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        shutil.rmtree(os.environ["XDG_CACHE_HOME"], ignore_errors=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is dear as thorough, leave out what is and whose turn it is not, and begin with what takes longest."""
    costs, spent = _costs(), defaultdict[str, float](float)
    for item in (each for each in items if not each.get_closest_marker("thorough")):
        spent[_function(item.nodeid)] += costs.get(_function(item.nodeid), 0)
        if spent[_function(item.nodeid)] > _SHARE and not item.get_closest_marker("everyday"):
            item.add_marker("thorough")
    quarter, changed = os.environ.get("THOROUGH_QUARTER"), os.environ.get("THOROUGH_FILES")
    if quarter is not None or changed is not None:
        thorough = [item for item in items if item.get_closest_marker("thorough")]
        if changed is None:
            turn = {item for item in thorough if _quarter(item) == int(quarter or 0)}
        else:
            turn = set(_within_share(thorough, changed.split(), costs))
        left_out = {item for item in thorough if item not in turn}
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
    ranks = {name: rank for rank, name in enumerate(_LONGEST_FIRST)}
    items.sort(key=lambda item: ranks.get(_folder(item.nodeid), len(ranks)))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a package that is not here."""
    for mark in item.iter_markers("needs"):
        if missing := [name for name in mark.args if find_spec(name) is None]:
            pytest.skip(f"needs {', '.join(missing)}")


def _function(nodeid: str) -> str:
    return nodeid.partition("[")[0]


def _costs() -> dict[str, float]:
    lines = (line.partition("  ") for line in _COSTS.read_text().splitlines())
    return {function: float(seconds) for seconds, _, function in lines}


def _quarter(item: pytest.Item) -> int:
    """Which of the four a thorough test belongs to: all cases of one function to the same."""
    return zlib.crc32(_function(item.nodeid).encode()) % 4


def _within_share(items: list[pytest.Item], files: list[str], costs: Mapping[str, float]) -> Iterator[pytest.Item]:
    """Yield the tests of some files, the first files first, until their share is used up."""
    ranks, spent = {name: rank for rank, name in enumerate(files)}, 0.0
    mine = [item for item in items if item.nodeid.partition("::")[0] in ranks]
    for item in sorted(mine, key=lambda item: ranks[item.nodeid.partition("::")[0]]):
        cost = costs.get(_function(item.nodeid), _SHARE / 2)
        if spent + cost <= _SHARE_OF_A_CHANGE:
            spent += cost
            yield item


def _processor_seconds() -> float:
    """Of this process and of those that it, and they, have waited for: not of orphans."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Begin to count."""
    item.stash[_COUNTED] = _processor_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Note what set-up, test and clearing up took."""
    report: Any = yield
    now = _processor_seconds()
    spent, item.stash[_COUNTED] = now - item.stash[_COUNTED], now
    report.user_properties.append(("processor_seconds", spent))
    return report


def _tell_skipped(reporter: Any, root: Path) -> None:
    """Count what was skipped, by reason, and keep the list of what lacks a package for `scripts/test --skipped`."""
    reasons = {each.nodeid: each.longrepr[2].removeprefix("Skipped: ") for each in reporter.stats.get("skipped", ())}
    (root / ".pytest_cache").mkdir(exist_ok=True)
    lacking = sorted(nodeid for nodeid, reason in reasons.items() if reason.startswith("needs "))
    (root / ".pytest_cache" / "skipped").write_text("\n".join(lacking))
    if not reasons:
        return
    reporter.section("skipped")
    told = Counter(reasons.values()).most_common()
    for reason, count in told[:_MAX_REASONS]:
        reporter.write_line(f"{count:5}  {reason.splitlines()[0][:100]}")
    if rest := told[_MAX_REASONS:]:
        reporter.write_line(f"{sum(count for _, count in rest):5}  for {len(rest)} other reasons: -rs lists them")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say what was skipped, and where the time went, if it was much.

    The time is the processor's, which other work on the machine does not change.
    """
    _tell_skipped(terminalreporter, config.rootpath)
    tests: Counter[str] = Counter()
    folders: Counter[str] = Counter()
    marked = set()
    for report in (each for kind in terminalreporter.stats.values() for each in kind):
        for name, seconds in getattr(report, "user_properties", ()):
            if name == "processor_seconds" and report.outcome != "skipped":
                tests[report.nodeid] += seconds
                folders[_folder(report.nodeid)] += seconds
                marked |= {report.nodeid} if "thorough" in report.keywords else set()
    if os.environ.get("WRITE_COSTS"):
        by_function: dict[str, list[float]] = {}
        for nodeid, seconds in tests.items():
            by_function.setdefault(_function(nodeid), []).append(seconds)
        measured = {name: sum(each) / len(each) for name, each in by_function.items() if sum(each) > _SHARE / 2}
        kept = {name: cost for name, cost in _costs().items() if name not in by_function}
        lines = [f"{cost:.2f}  {name}" for name, cost in sorted({**kept, **measured}.items())]
        _COSTS.write_text("\n".join(lines) + "\n")
    if sum(tests.values()) < 200:
        return
    terminalreporter.section("seconds of the processor")
    each = ", ".join(f"{folder} {seconds:.0f}" for folder, seconds in folders.most_common())
    terminalreporter.write_line(f"{sum(tests.values()):.0f} in all: {each}")
    for nodeid, seconds in tests.most_common(_SHOWN):
        terminalreporter.write_line(f"{seconds:6.1f}  {nodeid}{'  (thorough)' * (nodeid in marked)}")


@cache
def _tiny_class() -> Any:
    """Image classification on a few made-up images, 8x8 grey, whose brightness tells the class."""
    from functools import cached_property

    import numpy as np
    import torch

    from paceline.data.batch import Batch
    from paceline.data.image.datasets import ImageDataset
    from paceline.data.image.source import ArraySource
    from paceline.tasks.image_classification import ImageClassification

    def images(count: int, classes: int, seed: int) -> ArraySource:
        labels = np.arange(count) % classes
        noise = np.random.default_rng(seed).integers(0, 120, (count, 8, 8, 1))
        bright = (labels * 130 // classes)[:, None, None, None]
        return ArraySource((noise + bright).astype(np.uint8), labels.astype(np.int64), "tiny")

    class TinyTask(ImageClassification):
        train_images, evaluation_images, classes = 52, 21, 3
        make_network: Callable[[], torch.nn.Module] | None = None
        on_loss: Callable[[Batch, torch.Tensor], torch.Tensor | None] | None = None
        on_score: Callable[[Any, Batch, dict[str, torch.Tensor]], dict[str, torch.Tensor] | None] | None = None

        @cached_property
        def dataset(self) -> ImageDataset:
            return ImageDataset(
                name="tiny",
                train=images(self.train_images, self.classes, 1),
                validation=images(self.evaluation_images, self.classes, 2),
                classes=tuple(str(label) for label in range(self.classes)),
                channels=1,
                image_size=8,
                native_size=(8, 8),
                digest=f"tiny {self.train_images} {self.evaluation_images} {self.classes}",
                mean=(0.4,),
                std=(0.25,),
            )

        def build_model(self) -> torch.nn.Module:
            return super().build_model() if self.make_network is None else self.make_network()

        def loss(self, model: Any, batch: Batch) -> torch.Tensor:
            loss = super().loss(model, batch)
            # A loss without a gradient is a trial of the model, before training begins.
            changed = self.on_loss(batch, loss) if self.on_loss is not None and loss.requires_grad else None
            return loss if changed is None else changed

        def score(self, model: Any, batch: Batch) -> dict[str, torch.Tensor]:
            values = super().score(model, batch)
            changed = None if self.on_score is None else self.on_score(model, batch, values)
            return values if changed is None else changed

    return TinyTask


def _tiny_task(**changes: Any) -> Callable[[Any], Any]:
    """Make a task maker for ``paceline.train``; ``changes`` replace attributes of the class above."""

    def make(recipe: Any) -> Any:
        task = _tiny_class()(recipe)
        for name, value in changes.items():
            assert hasattr(task, name), name
            setattr(task, name, value)
        return task

    return make


def _facts(event: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what a clock says: the only values in which two runs of the same thing may differ."""
    return {
        key: value
        for key, value in event.items()
        if key not in ("time", "seconds", "data_wait_fraction", "mfu")
        and not key.endswith("_seconds")
        and not key.startswith("throughput")
    }


def _events(run_dir: Path, *kinds: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return [event for event in found if event["event"] in kinds] if kinds else found


def _on_two_ranks(
    words: Sequence[str], directory: Path, *, seconds: float = 280, ranks: int = 2
) -> list[dict[str, Any]]:
    started = [
        fork_server.Popen(
            [sys.executable, *words],
            cwd=directory,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={
                "PATH": os.environ["PATH"],
                "PYTHONPATH": f"{SOURCES}:{directory}",
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "PACELINE_RENDEZVOUS": f"file://{directory}/meet",
            },
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [process.communicate(timeout=seconds) for process in started]
    finally:
        for process in started:
            process.kill()
            process.communicate()  # else a pipe that is left open is told in place of why
    assert [process.returncode for process in started] == [0] * ranks, outputs
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]


@pytest.fixture
def forked_commands(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the commands that a test, or what it calls, starts forked from a warm server (tests/fork_server.py)."""
    if request.node.get_closest_marker("real_processes") is None:
        monkeypatch.setattr(subprocess, "Popen", fork_server.Popen)


@pytest.fixture(scope="session")
def on_two_ranks() -> Callable[..., list[dict[str, Any]]]:
    """``on_two_ranks(["-c", program], directory)``: the last line that each of two processes prints, as JSON.

    They meet through a file in the directory, from which they can also import.
    """
    return _on_two_ranks


@pytest.fixture(scope="session")
def tiny_task() -> Callable[..., Callable[[Any], Any]]:
    """``tiny_task(train_images=52, on_loss=...)``: something to give to ``paceline.train(task=...)``."""
    return _tiny_task


@pytest.fixture(scope="session")
def tiny_recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe file of eight steps on the CPU."""
    path = tmp_path_factory.mktemp("recipes") / "tiny.yaml"
    path.write_text(TINY)
    return path


@contextmanager
def _folder_for_runs() -> Iterator[Path]:
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None, prefix="runs-") as folder:
        yield Path(folder)


@pytest.fixture
def runs() -> Iterator[Path]:
    """A folder for run directories; in memory where there is such a place, as a tiny run is mostly fsync."""
    with _folder_for_runs() as folder:
        yield folder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A hub without repositories, and an empty cache."""
    from huggingface_hub import constants

    server = HubServer()
    template = server.endpoint + constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    yield server
    server.close()


@contextmanager
def _training(tiny_recipe: Path, runs: Path) -> Iterator[Callable[..., Any]]:
    import torch

    import paceline

    def train(
        name: str, overrides: Mapping[str, Any] | None = None, *, task: Any = None, resume: str = "auto", **changes: Any
    ) -> Any:
        return paceline.train(
            tiny_recipe,
            overrides=overrides or {},
            run_dir=runs / name,
            resume=resume,
            task=_tiny_task(**changes) if task is None else task,
            quiet=True,
        )

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # what the recipe asks for, so that a plain loop beside it has the same bits
    yield train
    torch.set_num_threads(threads)


@pytest.fixture
def train_tiny(tiny_recipe: Path, runs: Path) -> Iterator[Callable[..., Any]]:
    """``train_tiny("a", {"optimizer.lr": 1.0}, on_loss=...)`` trains a tiny task in ``runs/a``: the result.

    Its further arguments are those of ``tiny_task``, unless it is given a ``task``.
    """
    with _training(tiny_recipe, runs) as train:
        yield train


@pytest.fixture(scope="module")
def train_shared(tiny_recipe: Path) -> Iterator[Callable[..., Any]]:
    """``train_shared({"optimizer.lr": 1.0})`` is trained once for all tests of a file, which only look at it."""
    trained: dict[str, Any] = {}
    with _folder_for_runs() as folder, _training(tiny_recipe, folder) as train:

        def once(overrides: Mapping[str, Any]) -> Any:
            key = json.dumps(dict(overrides), sort_keys=True, default=repr)
            if key not in trained:
                trained[key] = train(f"run-{len(trained)}", overrides)
            return trained[key]

        yield once


@pytest.fixture
def events() -> Callable[..., list[dict[str, Any]]]:
    """``events(run_dir, "step")``: the events of a run, of some kinds only if asked."""
    return _events


@pytest.fixture
def course() -> Callable[[Path], list[dict[str, Any]]]:
    """``course(run_dir)``: everything a run did, without the clock's words and without where it was interrupted."""
    return lambda run_dir: [
        _facts(e) for e in _events(run_dir) if e["event"] not in _ABOUT_THE_LAUNCH and e.get("what") not in _TIMED
    ]


@pytest.fixture
def weights() -> Callable[..., dict[str, Any]]:
    """``weights(result)``: the tensors of a run's newest checkpoint; ``weights(result, "ema")`` the average's."""
    from paceline.checkpoint.weights import read_weights

    return lambda result, which="model": read_weights(result.run_dir, which).state
