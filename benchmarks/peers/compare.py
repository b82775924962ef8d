"""How fast is Paceline beside its peers, on the same network, images, batch, precision and threads?

Every contender is a program of its own in an environment of its own (environments.py) and does the same training
(workloads.py), in fresh processes that take turns: A B C … A B C …, in an order that is drawn anew in each round. What
is compared are the ratios within a round, so that a machine whose speed drifts slows all alike.

    .venv/bin/python benchmarks/peers/compare.py loop-64 [--rounds 7]
    .venv/bin/python benchmarks/peers/compare.py loop-64 --peers raw lightning    # beside Paceline these only: prints
    .venv/bin/python benchmarks/peers/compare.py all        # on a machine with a GPU: those for GPUs

The environments are made at the first call, and take several GB: two torches are among them. With all of its contenders
a workload writes a result file, of which publish.py makes the page; with some of them, or with ``--dry-run``, it only
prints. ``--here`` runs all contenders in the environment that runs this: for a machine that can fetch nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import torch
from environments import PEERS, cache, installed, python_of
from given import RESUMED_STEPS, Spec, as_json
from hardware import facts, spread, write_result
from publish import US, times_ours
from workloads import WORKLOADS, Figure, Workload

LIMIT_SECONDS = 900
_PHOTOGRAPHS = ("china", "flower")


def train(name: str, python: Path, spec: Spec, folder: Path) -> dict[str, Any]:
    """One training of one contender, in processes of its own.

    Raises:
        RuntimeError: If it fails or writes nothing; with the end of what it said.
    """
    out = folder / "seen.json"
    out.unlink(missing_ok=True)
    (folder / "spec.json").write_text(as_json(spec))
    peer = PEERS[name]
    command = [str(python), str(HERE / f"run_{peer.program or name}.py"), str(folder / "spec.json"), str(out)]
    if spec.processes > 1 and peer.launcher:
        start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={spec.processes}"]
        command = [str(python), *start, *command[1:]]
    sources = str(HERE.parents[1] / "src")
    paths = [str(HERE), sources, *([os.environ.get("PYTHONPATH", "")] if python == Path(sys.executable) else [])]
    own = {"OMP_NUM_THREADS": str(spec.threads), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    variables = {**os.environ, **own, **peer.variables}
    variables.pop("PYTHONDONTWRITEBYTECODE", None)  # each finds its sources compiled, as those that are installed do
    started = time.time()
    with (folder / "said.txt").open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=variables, cwd=folder, start_new_session=True
        )
        try:
            code = process.wait(LIMIT_SECONDS)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
    if code or not out.exists():
        last = "\n".join((folder / "said.txt").read_text(errors="replace").splitlines()[-12:])
        raise RuntimeError(f"{name} ended with exit code {code}:\n{last}")
    seen = json.loads(out.read_text())
    steps_requested = RESUMED_STEPS if spec.resume else spec.total
    if len(seen["steps"]) < steps_requested:
        raise RuntimeError(f"{name} has noted {len(seen['steps'])} steps, and {steps_requested} were asked for")
    return {"started": started, **seen}


def figures_of(name: str, python: Path, workload: Workload, folder: Path) -> dict[str, float]:
    """All figures of one contender in one round."""
    seen = train(name, python, workload.spec, folder)
    found = {key: figure.of(workload.spec, seen) for key, figure in workload.figures.items()}
    if workload.resumed is not None:
        spec = dataclasses.replace(workload.spec, resume=True, saves=0)
        seen = train(name, python, spec, folder)
        found |= {f"resumed_{key}": figure.of(spec, seen) for key, figure in workload.resumed.items()}
    return found


def _patiently(name: str, python: Path, workload: Workload, failed: dict[str, str]) -> dict[str, float] | None:
    """Figures of a contender that may fail once by chance; who fails twice is out, and ``failed`` gets the reason."""
    for _ in range(2):
        with tempfile.TemporaryDirectory(prefix=f"peers-{name}-") as scratch:
            spec = dataclasses.replace(workload.spec, scratch=scratch)
            try:
                return figures_of(name, python, dataclasses.replace(workload, spec=spec), Path(scratch))
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                reason = str(error)
                print(f"{name}: {reason}", file=sys.stderr)
    failed[name] = reason
    return None


def compare(
    workload: Workload, pythons: Mapping[str, Path], rounds: int, folder: str
) -> tuple[dict[str, Any], dict[str, str]]:
    """Figures of each contender round by round, and why some have none."""
    names = list(pythons)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    failed: dict[str, str] = {}
    draw = random.Random(0)
    # The first fills file caches. On a GPU, whose minutes are dear, the steps before the timed ones suffice.
    for number in range(int(workload.spec.device == "cuda"), rounds + 1):
        spec = dataclasses.replace(workload.spec, folder=folder)
        if number == 0:
            spec = dataclasses.replace(spec, steps=max(spec.steps // 8, 8 * max(spec.saves, 1)))
        for name in draw.sample(names, len(names)):
            if name in failed:
                continue
            print(f"{_round_in_words(number, rounds)}: {name} …", file=sys.stderr)
            figures = _patiently(name, pythons[name], dataclasses.replace(workload, spec=spec), failed)
            if number and figures is not None:
                found[name].append(figures)
                print(number, name, {key: round(value, 3) for key, value in figures.items()}, flush=True)
    return {name: each for name, each in found.items() if each and name not in failed}, failed


def _round_in_words(number: int, rounds: int) -> str:
    return f"round {number} of {rounds}" if number else "a short round first, not counted"


def all_figures(workload: Workload) -> Mapping[str, Figure]:
    """Those of the training and of its resumption."""
    return {
        **workload.figures,
        **{f"resumed_{key}": figure for key, figure in (workload.resumed or {}).items()},
    }


def summary(workload: Workload, found: Mapping[str, list[dict[str, float]]]) -> dict[str, Any]:
    """By figure and contender: its spread, and that of its ratio to ours in the same round."""
    result: dict[str, Any] = {}
    for key, figure in all_figures(workload).items():
        ratios = times_ours(found, key)
        rows = {
            name: {
                "title": PEERS[name].label,
                "values": spread([each[key] for each in rounds]),
                "times_ours": spread(ratios[name]) if ratios else None,
            }
            for name, rounds in found.items()
        }
        result[key] = {"title": figure.title, "more_is_better": figure.more_is_better, "contenders": rows}
    return result


def table(title: str, figures: Mapping[str, Any]) -> list[str]:
    """For people: best first."""
    lines = []
    for figure in figures.values():
        lines += [
            f"## {title}: {figure['title']}",
            "",
            "| | median | least | most | times Paceline's |",
            "|---|---|---|---|---|",
        ]
        rows = sorted(
            figure["contenders"].values(), key=lambda row: row["values"]["median"], reverse=figure["more_is_better"]
        )
        for row in rows:
            values, ratio = row["values"], row["times_ours"]
            beside = f"{ratio['median']:.3f} ({ratio['minimum']:.2f} to {ratio['maximum']:.2f})" if ratio else ""
            numbers = " | ".join(f"{values[each]:.4g}" for each in ("median", "minimum", "maximum"))
            lines.append(f"| {row['title']} | {numbers} | {beside} |")
        lines.append("")
    return lines


def photographs(per_class: int) -> str:
    """JPEG files of two classes for the workloads that read them: crops of scikit-learn's two photographs.

    Enough of them that no contender reaches the end of an epoch. Made once, next to the environments.
    """
    folder = cache() / f"photographs-2x{per_class}"
    if not (folder / "made").exists():
        for split, count in (("train", per_class), ("val", 20)):
            for kind in _PHOTOGRAPHS:
                (folder / "files" / split / kind).mkdir(parents=True, exist_ok=True)
            with ProcessPoolExecutor() as processes:
                for _ in processes.map(_crop, range(count), repeat(folder / "files" / split), chunksize=50):
                    pass
        (folder / "made").touch()
    return str(folder / "files")


def _crop(number: int, folder: Path) -> None:
    from PIL import Image
    from sklearn.datasets import load_sample_image

    for kind in _PHOTOGRAPHS:
        draw, photo = random.Random(f"{folder.name} {kind} {number}"), Image.fromarray(load_sample_image(f"{kind}.jpg"))
        width, height = draw.randint(400, photo.width), draw.randint(300, photo.height)
        left, top = draw.randint(0, photo.width - width), draw.randint(0, photo.height - height)
        part = photo.crop((left, top, left + width, top + height))
        part.save(folder / kind / f"{number:05}.jpg", quality=92)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """What is to be measured: ``workloads``, in this order; what cannot be is refused."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    every = "\n".join(f"  {key:14}{workload.title}" for key, workload in WORKLOADS.items())
    names = "\n".join(f"  {name:17}{peer.label}" for name, peer in PEERS.items())
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\nworkloads:\n{every}\n\ncontenders:\n{names}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("workload", choices=[*WORKLOADS, "all"], metavar="WORKLOAD", help="one of the above, or `all`")
    parser.add_argument("--rounds", type=int, default=7, help="that count, after one that does not (default: 7)")
    parser.add_argument(
        "--peers", nargs="+", choices=list(PEERS), metavar="NAME", help="contenders; by default all that it is for"
    )
    parser.add_argument("--here", action="store_true", help="all in the environment that runs this")
    parser.add_argument("--dry-run", action="store_true", help="print, write no result files")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds is {options.rounds}: give 1 or more")
    fitting = [key for key, workload in WORKLOADS.items() if workload.spec.device == device]
    options.workloads = fitting if options.workload == "all" else [options.workload]
    for key in options.workloads:
        workload = WORKLOADS[key]
        if workload.spec.device == "cuda" and device == "cpu":
            parser.error(f"{key} needs a GPU, and PyTorch sees none here: choose from {', '.join(fitting)}")
        if strangers := set(options.peers or ()) - set(workload.contenders):
            parser.error(
                f"{key} is not for {', '.join(sorted(strangers))}: choose from {', '.join(workload.contenders)}"
            )
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the result files."""
    options = parse_options(arguments)
    without_us = []
    for key in options.workloads:
        workload = WORKLOADS[key]
        spec = workload.spec
        names = [*dict.fromkeys([*(options.peers or workload.contenders), US])]
        pythons = {name: Path(sys.executable) if options.here else python_of(name) for name in names}
        known, packages = facts(), {name: installed(python) for name, python in pythons.items()}
        folder = photographs(12_000 if spec.device == "cuda" else 4_000) if spec.data == "folder" else ""
        found, failed = compare(workload, pythons, options.rounds, folder)
        if US in failed:
            without_us.append(f"{key}: Paceline itself failed, so that there is nothing to compare: {failed[US]}")
            continue
        figures = summary(workload, found)
        lines = table(workload.title, figures)
        print("\n".join(lines))
        if len(names) < len(workload.contenders):
            print(f"Nothing was written: that takes all contenders, {', '.join(workload.contenders)}.", file=sys.stderr)
        elif not options.dry_run:
            result = {"title": workload.title, "spec": dataclasses.asdict(workload.spec), "figures": figures}
            result |= {"failed": failed, "rounds": found}
            result["installed"] = packages
            print(write_result(f"peers-{key}", result, lines, known))
    if without_us:
        sys.exit("\n".join(without_us))


if __name__ == "__main__":
    # So that the contender at work, which has a session of its own, is ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    main()
