"""How do time and memory grow with samples, files, ranks and steps?

Each row is measured at three sizes, in a separate process with limited memory, and a power of the size is fitted
to its seconds: 0 is constant, 1 proportional. Memory is the peak less what the process had before it began, and less
one copy of a checkpoint's state; another process creates the files that a row needs.

    python benchmarks/growth.py [--only ROW …] [--sizes N …] [--memory GIB] [--small]

``--small`` leaves out the largest size of each row but those of order, ledger and plan; ``--sizes`` replaces the sizes,
with one row. With any of these, result files are not written.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
Facts = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """What is measured at each of three sizes; ``prepare`` makes what it needs in a folder.

    ``loads`` are modules that are imported before, so that they do not count; ``state_bytes`` of each unit of the size
    do not count either.
    """

    what: str
    sizes: tuple[int, int, int]
    measure: Callable[[int, Path], Facts]
    prepare: Callable[[int, Path], object] | None = None
    loads: tuple[str, ...] = ("paceline.reports.audit",)
    state_bytes: int = 0


def order(samples: int, _: Path) -> Facts:
    """Cut 100 steps of 4,096 samples out of an epoch's middle, as a resumed run does."""
    from paceline.data.order import StepGeometry
    from paceline.host.world import World

    steps = StepGeometry(seed=0, samples=samples, global_batch_size=4096, logical_ranks=8)
    first = steps.epochs.first_step(1) // 2
    begun = time.perf_counter()
    steps.slices(first, World())
    first_step, begun = time.perf_counter() - begun, time.perf_counter()
    for step in range(first, first + 100):
        steps.slices(step, World(rank=0, world_size=8))
    return {"seconds": (time.perf_counter() - begun) / 100, "first_step_seconds": first_step}


def ledger(batch: int, folder: Path) -> Facts:
    """Append 1,000 steps of ``samples`` samples, in micro-batches of 64."""
    from paceline.data.order import StepGeometry
    from paceline.host.world import World
    from paceline.records.ledger import LedgerWriter, ledger_path

    steps = StepGeometry(seed=0, samples=10**7, global_batch_size=batch, logical_ranks=batch // 64)
    parts = [steps.slices(step, World()) for step in range(10)]
    begun = time.perf_counter()
    with LedgerWriter(ledger_path(folder, 0)) as writer:
        for step in range(1000):
            for part in parts[step % 10]:
                writer.append(step=step + 1, epoch=0, ids=part.ids, first=part.first)
    seconds = (time.perf_counter() - begun) / 1000
    return {"seconds": seconds, "bytes_per_step": ledger_path(folder, 0).stat().st_size / 1000}


_AUDITED_BATCH = 1024


def make_audited(samples: int, folder: Path) -> None:
    """Make a run of one epoch of ``samples`` samples: a short run's records, edited, and a long run's ledger."""
    import paceline
    from paceline.data.order import StepGeometry
    from paceline.host.world import World
    from paceline.records.ledger import LedgerWriter, ledger_path

    run = folder / "run"
    paceline.train("digits", overrides={"train.duration": "1 steps", "evaluate.every": "off"}, run_dir=run, quiet=True)
    geometry = StepGeometry(seed=0, samples=samples, global_batch_size=_AUDITED_BATCH, logical_ranks=1)
    steps = geometry.epochs.first_step(1)
    for name, changes in (
        ("plan.json", {"train_samples": samples, "global_batch_size": _AUDITED_BATCH, "data": {"order": "keyed"}}),
        ("summary.json", {"step": steps, "samples": samples}),
    ):
        path = run / name
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    kept = [each | {"step": steps, "position": steps} for each in events if each["event"] in ("step", "finish")]
    (run / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in [events[0], *kept]))
    path = ledger_path(run / "ledger", 0)
    path.unlink()
    with LedgerWriter(path) as writer:
        for step in range(steps):
            (part,) = geometry.slices(step, World())
            writer.append(step=step + 1, epoch=0, ids=part.ids, first=part.first)


def audit(samples: int, folder: Path) -> Facts:
    """Audit that run."""
    from paceline.reports.audit import audit_run

    begun = time.perf_counter()
    found = audit_run(folder / "run")
    seconds = time.perf_counter() - begun
    if not found.passed or found.epochs[0].used != samples:
        raise SystemExit(f"the audit did not pass: {found.objections}")
    return {"seconds": seconds, "ledger_bytes": sum(each.stat().st_size for each in (folder / "run/ledger").iterdir())}


def make_tree(files: int, folder: Path) -> None:
    """Write small images in as many class folders as ImageNet has."""
    import folder_listing

    folder_listing.make_tree(folder / "images", files, min(1000, files // 10))
    time.sleep(4)  # folders that changed just now are not remembered


def listing(_: int, folder: Path) -> Facts:
    """List the folder anew, and open it once more from the cached listing."""
    import folder_listing

    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    seconds, _ = folder_listing.seconds(folder / "images")
    again, how = folder_listing.seconds(folder / "images")
    return {"seconds": seconds, "cached_seconds": again, "is_cached": "from a cached listing" in how}


def plan(ranks: int, _: Path) -> Facts:
    """Plan a run on the given number of ranks, and cut its first steps for one rank."""
    from paceline.data.order import StepGeometry
    from paceline.host.world import World
    from paceline.plan import DataFacts, MachineFacts, make
    from paceline.recipe.load import load_recipe

    batch = {"batch.global_size": 8 * 4096, "train.duration": "90 epochs"}
    recipe = load_recipe("digits", batch).recipe
    world = World(rank=ranks - 1, world_size=ranks, local_world_size=min(8, ranks), local_rank=(ranks - 1) % 8)
    data = DataFacts(train_samples=1_281_167, evaluation_samples=50_000)
    machine = MachineFacts(device="cuda", device_name="NVIDIA H100", fast_bf16=True, cores=16)
    begun = time.perf_counter()
    made = make(recipe, world=world, data=data, machine=machine)
    seconds, begun = time.perf_counter() - begun, time.perf_counter()
    steps = StepGeometry(
        seed=0, samples=made.train_samples, global_batch_size=made.global_batch_size, logical_ranks=made.logical_ranks
    )
    steps.slices(0, world)
    begun = time.perf_counter()
    for step in range(1, 21):
        steps.slices(step, world)
    return {"seconds": seconds, "slice_seconds": (time.perf_counter() - begun) / 20}


def make_records(count: int, folder: Path) -> None:
    """Make a run with the given number of step records."""
    import report as report_cost

    import paceline

    often = {"train.duration": "2 epochs", "telemetry.log_every": "1 steps"}
    paceline.train("digits", overrides=often, run_dir=folder / "run", quiet=True)
    report_cost.repeated(folder / "run", count)


def report(_: int, folder: Path) -> Facts:
    """Read the records and write the report."""
    from paceline.records.reader import read_events
    from paceline.reports.html.page import write_report

    begun = time.perf_counter()
    count = sum(1 for _ in read_events(folder / "run" / "events.jsonl"))
    reading, begun = time.perf_counter() - begun, time.perf_counter()
    path = write_report([folder / "run"]).path
    seconds = time.perf_counter() - begun
    return {"seconds": seconds, "reading_seconds": reading, "records": count, "page_bytes": path.stat().st_size}


def evaluation(samples: int, _: Path) -> Facts:
    """Collect sums of batches of 256, and all scores for the area under the curve."""
    import torch

    from paceline.metrics.accumulator import Accumulator, Metric
    from paceline.metrics.multilabel import RankedScores

    sums = Accumulator((Metric(name="loss"), Metric(name="top1_accuracy", scale=100.0)), torch.device("cpu"))
    scores = RankedScores()
    generator = torch.Generator().manual_seed(0)
    begun = time.perf_counter()
    for first in range(0, samples, 256):
        size = min(256, samples - first)
        logit = torch.randn(size, generator=generator)
        label = (logit > 0).to(torch.uint8)
        sums.add({"loss": logit, "top1_accuracy": label})
        scores.add({"logit": logit, "label": label}, np.arange(first, first + size))
    count, _ = sums.results(sums.rows())
    assert count == samples
    return {"seconds": time.perf_counter() - begun, **scores.results([scores.part()])}


def make_images(files: int, folder: Path) -> None:
    """Write small JPEGs, all different, in two class folders."""
    from PIL import Image

    generator = np.random.default_rng(0)
    for number in range(files):
        path = folder / "images" / f"class-{number % 2}" / f"{number:07}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(path, quality=80)


def check_data(files: int, folder: Path) -> Facts:
    """Check them with one reading process."""
    from paceline_data.inspect.check import check_data as check

    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    begun = time.perf_counter()
    found = check(str(folder / "images"), workers=1).to_json()
    return {"seconds": time.perf_counter() - begun, "findings": len(found["findings"]), "files": files}


def save(size: int, folder: Path) -> Facts:
    """Save tensors of 10 MB, a third of them as a model and the others as an optimizer's state."""
    import torch

    from paceline.checkpoint.store import CheckpointStore

    tensors = [(f"{number}", torch.full((2_500_000,), float(number))) for number in range(size // 10**7)]
    third = len(tensors) // 3
    begun = time.perf_counter()
    CheckpointStore(folder).save(1, {"model": dict(tensors[:third]), "optimizer": dict(tensors[third:])}, {})
    return {"seconds": time.perf_counter() - begun}


def load(_: int, folder: Path) -> Facts:
    """Verify them and load them, as a resumed run does."""
    from paceline.checkpoint.manifest import read_components
    from paceline.checkpoint.store import CheckpointStore, choose_resume_point

    begun = time.perf_counter()
    path = choose_resume_point(CheckpointStore(folder)).path
    assert path is not None
    verified = time.perf_counter()
    states = read_components(path)
    seconds = time.perf_counter() - begun
    assert all(int(each[0]) == int(name) for state in states.values() for name, each in state.items())
    return {"seconds": seconds, "verify_seconds": verified - begun}


GIGABYTES = (10**9, 4 * 10**9, 8 * 10**9)
ROWS = {
    "order": Row("order of N samples, a step of 4,096", (10**6, 10**8, 10**10), order),
    "ledger": Row("ledger, a step of N samples", (256, 4096, 65_536), ledger),
    "audit": Row("audit of N samples", (10**6, 10**8, 10**9), audit, make_audited),
    "listing": Row("listing N files", (10**4, 10**5, 10**6), listing, make_tree, ("folder_listing",)),
    "plan": Row(
        "plan for N ranks", (1, 64, 4096), plan, loads=("paceline.data.order", "paceline.plan", "paceline.recipe.load")
    ),
    "report": Row(
        "report of N step records", (10**4, 10**5, 10**6), report, make_records, ("paceline.reports.html.page",)
    ),
    "evaluation": Row(
        "evaluation of N samples", (10**5, 10**6, 10**7), evaluation, loads=("paceline.metrics.multilabel",)
    ),
    "check-data": Row(
        "check of N small files", (10**4, 10**5, 10**6), check_data, make_images, ("paceline_data.inspect.check",)
    ),
    "save": Row("saving N bytes", GIGABYTES, save, loads=("paceline.checkpoint.store",), state_bytes=1),
    "load": Row("loading N bytes", GIGABYTES, load, save, ("paceline.checkpoint.store",), state_bytes=1),
}


def child(row: str, size: int, folder: Path, step: str, gibibytes: float) -> None:
    """Do one step of a row in this process, and print what it took as JSON."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    chosen = ROWS[row]
    if step == "prepare":
        assert chosen.prepare is not None
        chosen.prepare(size, folder)
        return
    for name in chosen.loads:
        importlib.import_module(name)
    state_bytes = size * chosen.state_bytes
    limit = int(gibibytes * 2**30) + state_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    before = _resident("VmRSS")
    facts = chosen.measure(size, folder)
    print(json.dumps({"size": size, **facts, "peak_bytes": _resident("VmHWM") - before - state_bytes}))


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def measured(row: str, sizes: Sequence[int], gibibytes: float) -> Iterator[Facts]:
    """Measure a row at each size, each in a separate process."""
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            for step in ["prepare"] * (ROWS[row].prepare is not None) + ["measure"]:
                words = [sys.executable, __file__, "--child", row, str(size), folder, step, str(gibibytes)]
                done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False, cwd=ROOT)
                if done.returncode != 0:
                    raise SystemExit(f"{row} at {size:,}: {step} ended with exit code {done.returncode}")
        facts: Facts = json.loads(done.stdout.splitlines()[-1])
        print(row, facts, flush=True)
        yield facts


def exponent(found: Sequence[Facts]) -> float | None:
    """Fit seconds = a * size ** exponent by least squares of the logarithms."""
    if len(found) < 2:
        return None
    points = np.array([(math.log(each["size"]), math.log(each["seconds"])) for each in found])
    return float(np.polyfit(points[:, 0], points[:, 1], 1)[0])


def main() -> None:
    """Measure, print and write the result."""
    from hardware import write_result  # here, since it loads torch, which a measured process may do without

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW")
    parser.add_argument("--sizes", nargs="+", type=int, metavar="N")
    parser.add_argument("--memory", type=float, default=3.0, metavar="GIB", help="of one process")
    parser.add_argument("--small", action="store_true")
    asked = parser.parse_args()
    if asked.sizes and len(asked.only) != 1:
        parser.error("--sizes belongs to one row: name it with --only")
    result: dict[str, Facts] = {}
    lines = ["| what grows | N | seconds | peak memory | exponent |", "|---|---|---|---|---|"]
    for row in asked.only:
        sizes = asked.sizes or ROWS[row].sizes[: 2 if asked.small and row not in ("order", "plan", "ledger") else 3]
        found = list(measured(row, sizes, asked.memory))
        fitted = exponent(found)
        result[row] = {"what": ROWS[row].what, "sizes": found, "exponent": fitted}
        for index, each in enumerate(found):
            power = f"{fitted:.2f}" if fitted is not None and index == len(found) - 1 else ""
            extra = f", {each['bytes_per_step']:,.0f} bytes a step" if "bytes_per_step" in each else ""
            size, peak = f"{each['size']:,}{extra}", each["peak_bytes"] / 1e6
            lines.append(f"| {ROWS[row].what} | {size} | {each['seconds']:.3g} | {peak:,.0f} MB | {power} |")
    print("\n".join(lines))
    if len(asked.only) == len(ROWS) and not asked.small:
        print(write_result("growth", {"rows": result, "memory_limit_gib": asked.memory}, lines))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        _row, _size, _folder, _step, _gibibytes = sys.argv[2:]
        child(_row, int(_size), Path(_folder), _step, float(_gibibytes))
    else:
        main()
