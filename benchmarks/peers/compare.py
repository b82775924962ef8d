"""How fast is Paceline beside its peers, on the same network, images, batch, precision and threads?

Every contender is a program of its own in an environment of its own (environments.py) and does the same training
(workloads.py), in fresh processes that take turns: A B C … A B C …, in an order that is drawn anew in each round. What
is compared are the ratios within a round, so that a machine whose speed drifts slows all alike.

    python benchmarks/peers/compare.py loop-64 [--rounds 7] [--peers raw lightning paceline]
    python benchmarks/peers/compare.py all
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
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from environments import PEERS, cache, python_of
from given import RESUMED_STEPS, Spec, as_json
from hardware import facts, spread, write_result
from workloads import WORKLOADS, Figure, Workload

US, LIMIT_SECONDS = "paceline", 900


def train(name: str, spec: Spec, folder: Path) -> dict[str, Any]:
    """One training of one contender, in processes of its own.

    Raises:
        RuntimeError: If it fails or writes nothing; with the end of what it said.
    """
    out = folder / "seen.json"
    out.unlink(missing_ok=True)
    (folder / "spec.json").write_text(as_json(spec))
    peer, python = PEERS[name], str(python_of(name))
    command = [python, str(HERE / f"run_{peer.program or name}.py"), str(folder / "spec.json"), str(out)]
    if spec.processes > 1 and peer.launcher:
        start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={spec.processes}"]
        command = [python, *start, *command[1:]]
    sources = str(HERE.parents[1] / "src")
    own = {"OMP_NUM_THREADS": str(spec.threads), "PYTHONPATH": f"{HERE}{os.pathsep}{sources}"}
    variables = {**os.environ, **own, **peer.variables}
    variables.pop("PYTHONDONTWRITEBYTECODE", None)  # each finds its sources compiled, as those that are installed do
    begun = time.time()
    with (folder / "said.txt").open("w") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, env=variables, cwd=folder, start_new_session=True)
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
    asked = RESUMED_STEPS if spec.resume else spec.total
    if len(seen["steps"]) < asked:
        raise RuntimeError(f"{name} has noted {len(seen['steps'])} steps, and {asked} were asked for")
    return {"started": begun, **seen}


def figures_of(name: str, workload: Workload, folder: Path) -> dict[str, float]:
    """All figures of one contender in one round."""
    seen = train(name, workload.spec, folder)
    found = {key: figure.of(workload.spec, seen) for key, figure in workload.figures.items()}
    if workload.resumed is not None:
        spec = dataclasses.replace(workload.spec, resume=True, saves=0)
        seen = train(name, spec, folder)
        found |= {f"resumed_{key}": figure.of(spec, seen) for key, figure in workload.resumed.items()}
    return found


def _patiently(name: str, workload: Workload, failed: dict[str, str]) -> dict[str, float] | None:
    """Figures of a contender that may fail once by chance; who fails twice is out, and ``failed`` gets the reason."""
    for _ in range(2):
        with tempfile.TemporaryDirectory(prefix=f"peers-{name}-") as scratch:
            spec = dataclasses.replace(workload.spec, scratch=scratch)
            try:
                return figures_of(name, dataclasses.replace(workload, spec=spec), Path(scratch))
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                reason = str(error)
                print(f"{name}: {reason}", file=sys.stderr)
    failed[name] = reason
    return None


def compare(
    workload: Workload, names: Sequence[str], rounds: int, folder: str
) -> tuple[dict[str, Any], dict[str, str]]:
    """Figures of each contender round by round, and why some have none."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    failed: dict[str, str] = {}
    draw = random.Random(0)
    for number in range(rounds + 1):  # the first fills file caches and shows who fails
        spec = dataclasses.replace(workload.spec, folder=folder)
        if number == 0:
            spec = dataclasses.replace(spec, steps=max(spec.steps // 8, 8 * max(spec.saves, 1)))
        for name in draw.sample(names, len(names)):
            if name in failed:
                continue
            figures = _patiently(name, dataclasses.replace(workload, spec=spec), failed)
            if number and figures is not None:
                found[name].append(figures)
                print(number, name, {key: round(value, 3) for key, value in figures.items()}, flush=True)
    return {name: each for name, each in found.items() if each and name not in failed}, failed


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
        ours = [each[key] for each in found[US]] if US in found and figure.is_ratio else []
        rows = {}
        for name, rounds in found.items():
            values = [each[key] for each in rounds]
            ratios = [value / own for value, own in zip(values, ours, strict=False)]
            rows[name] = {
                "title": PEERS[name].label,
                "values": spread(values),
                "times_ours": spread(ratios) if ratios else None,
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


def photographs() -> str:
    """JPEG files of two classes for the workloads that read them: crops of scikit-learn's two photographs.

    Twice 4,000: no contender comes to the end of an epoch. Made once, kept beside the environments.
    """
    from PIL import Image
    from sklearn.datasets import load_sample_images

    folder = cache() / "photographs-4000"
    if (folder / "made").exists():
        return str(folder / "files")
    draw = random.Random(0)
    for kind, pixels in zip(("china", "flower"), load_sample_images().images, strict=True):
        photo = Image.fromarray(pixels)
        for split, count in (("train", 4000), ("val", 20)):
            place = folder / "files" / split / kind
            place.mkdir(parents=True, exist_ok=True)
            for number in range(count):
                width = draw.randint(400, photo.width)
                height = draw.randint(300, photo.height)
                left, top = draw.randint(0, photo.width - width), draw.randint(0, photo.height - height)
                part = photo.crop((left, top, left + width, top + height))
                part.save(place / f"{number:04}.jpg", quality=92)
    (folder / "made").touch()
    return str(folder / "files")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the result files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=[*WORKLOADS, "all"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--dry-run", action="store_true", help="print, write no result files")
    options = parser.parse_args(arguments)
    for name in options.peers:
        python_of(name)
    for key in WORKLOADS if options.workload == "all" else [options.workload]:
        workload = WORKLOADS[key]
        known, folder = facts(), photographs() if workload.spec.data == "folder" else ""
        found, failed = compare(workload, options.peers, options.rounds, folder)
        figures = summary(workload, found)
        lines = table(workload.title, figures)
        print("\n".join(lines))
        if not options.dry_run:
            result = {"title": workload.title, "spec": dataclasses.asdict(workload.spec), "figures": figures}
            result |= {"failed": failed, "rounds": found}
            print(write_result(f"peers-{key}", result, lines, known))


if __name__ == "__main__":
    main()
