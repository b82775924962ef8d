"""Run everything that waits for a GPU, in order of worth, within a number of minutes.

Each part is a separate command with its own time limit, so that one that fails or hangs does not affect the others.
Its output goes to ``OUT/PART.log``, and the result files that it writes in ``benchmarks/results`` are copied to OUT. A
part whose log says that it is done, or failed, is not run again: a suite that was interrupted continues there.

    python benchmarks/gpu_suite.py OUT [--minutes 10] [--only PART …] [--cifar10 PATH] [--record PROGRAM] [--tiny]

``--tiny`` rehearses what can be rehearsed without a GPU.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DONE = "\n== done in "
# Tests of time run alone: pytest-benchmark, where it is installed, warns of workers, and warnings are errors.
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark", "--timeout=240")
TIMED = tuple(f"tests/gpu/test_cuda_{name}.py" for name in ("forecast", "clock", "attribution", "bench"))


def parts(options: argparse.Namespace) -> dict[str, tuple[float, tuple[str, ...]]]:
    """The most seconds of each part, and what Python runs for it."""
    tiny = ("--tiny", "--blocks", "2") if options.tiny else ()
    small = ("--only", "small_resnet", "--dry-run") if options.tiny else ()
    where = ("--dry-run",) if options.tiny else ("--device", "cuda")
    runs = ("digits", "a small GPT", "a small BERT", "ResNet-18, 96 pixels", "ResNet-50, 224 pixels, bf16")
    peers = ("benchmarks/peers/compare.py", "--here", "--rounds")
    few = ("1", "loop-4", "--peers", "raw", "timm") if options.tiny else ()
    forecast = ("--only", "digits", "--dry-run") if options.tiny else ("--only", *runs)
    found: dict[str, tuple[float, tuple[str, ...]]] = {
        "tests-of-time": (90, (*PYTEST, *TIMED)),
        "tests": (
            240,
            (*PYTEST, "-vv", "tests/gpu", *(f"--ignore={each}" for each in TIMED), "-m", "not slow", "-n", "12"),
        ),
        "peers": (150, (*peers, *(few or ("1", "gpu-resident")))),
        "jpegs": (180, (*peers, *(few or ("1", "gpu-folder")))),
        "forecast": (120, ("benchmarks/forecast.py", *forecast)),
        "throughput": (120, ("benchmarks/gpu_throughput.py", *tiny)),
        "compiled": (150, ("benchmarks/gpu_throughput.py", "resnet50", "gpt-124m", "--compile", *tiny)),
        "speedrun": (150, ()),
        "memory": (200, ("benchmarks/estimate.py", *small)),
        "resume": (120, ("benchmarks/resume.py", "--trials", "4", "--steps", "120", *where)),
        "slow-tests": (240, (*PYTEST, "tests/gpu", "-m", "slow", "-n", "3")),
    }
    if options.cifar10:
        record = ("--record", str(options.record)) if options.record else ()
        seeds = ("--seeds", "0", "1", "2")
        speedrun = ("benchmarks/cifar10_speedrun.py", "cifar10-speedrun", f"data.path={options.cifar10}")
        found["speedrun"] = (320 if record else 150, (*speedrun, "--target", "94", *seeds, *record))
    return {name: each for name, each in found.items() if each[1]}


def run(name: str, limit: float, command_words: Sequence[str], out: Path) -> str:
    """Run a part; how it ended."""
    log, started = out / f"{name}.log", time.monotonic()
    variables = {**os.environ, "PYTHONUNBUFFERED": "1"}
    variables["PYTHONPATH"] = f"{ROOT / 'src'}{os.pathsep}{variables.get('PYTHONPATH', '')}"
    with log.open("w") as file:
        command = ["timeout", "--kill-after=5", f"{limit:.0f}", sys.executable, *command_words]
        code = subprocess.run(
            command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env=variables, check=False
        ).returncode
        seconds = time.monotonic() - started
        if code not in (124, 137):  # a part that its limit ended or killed is run again
            file.write(f"{DONE}{seconds:.0f} s, exit code {code}\n")
    return f"{name}: exit code {code} after {seconds:.0f} s"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the parts that are not done yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="a folder for logs and results")
    parser.add_argument("--minutes", type=float, default=10.0, help="begin no part after them, and end the last there")
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="these parts; a wrong name lists all")
    parser.add_argument("--cifar10", type=Path, metavar="PATH", help="CIFAR-10's images, for the speed run")
    parser.add_argument("--record", type=Path, metavar="PROGRAM", help="the public record's own program beside it")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal without a GPU")
    options = parser.parse_args(arguments)
    if unknown := set(options.only).difference(parts(options)):
        parser.error(f"no part is called {', '.join(unknown)}; there are {', '.join(parts(options))}")
    if options.record and not options.cifar10:
        parser.error("--record needs --cifar10: it is compared with the speed run")
    options.out.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + 60 * options.minutes
    for name, (limit, command_words) in parts(options).items():
        log = options.out / f"{name}.log"
        if (options.only and name not in options.only) or (log.is_file() and DONE in log.read_text()):
            continue
        left = ends - time.monotonic()
        if left < 10:
            print(f"{name}: no time is left for it")
            continue
        started = time.time()
        print(run(name, min(limit, left), command_words, options.out), flush=True)
        print("  " + "\n  ".join(log.read_text(errors="replace").splitlines()[-12:]), flush=True)
        for file in RESULTS.glob("*"):
            if file.stat().st_mtime >= started:
                shutil.copy(file, options.out)


if __name__ == "__main__":
    main()
