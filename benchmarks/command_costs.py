"""How much processor time do Paceline's own studies take? The commands of CASES, each as a user gives it."""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile

from hardware import spread, write_result

CASES = {
    "prove gpt-small-docs": ["prove", "gpt-small-docs"],
    "prove dlrm-synthetic": ["prove", "dlrm-synthetic"],
    "prove shapes-maskrcnn": ["prove", "shapes-maskrcnn"],
    "doctor retinanet": ["doctor", "retinanet_resnet50_fpn_coco", "--device", "h100"],
    "doctor maskrcnn": ["doctor", "maskrcnn_resnet50_fpn_coco", "--device", "h100"],
}


def processor_seconds(arguments: list[str]) -> float:
    """Processor time of a command and of all processes that it starts, on one thread each."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "paceline", *arguments]
        done = subprocess.run(
            command, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
        )
    if done.returncode not in (0, 1):
        raise SystemExit(f"{' '.join(arguments)}: {done.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    """Time them, in turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES))
    given = parser.parse_args()
    times: dict[str, list[float]] = {name: [] for name in given.only}
    for _ in range(given.runs):
        for name, each in times.items():
            each.append(processor_seconds(CASES[name]))
    found = {name: spread(each) for name, each in times.items()}
    lines = [
        f"{name}: {each['median']:.0f} s of processor time ({each['minimum']:.0f} to {each['maximum']:.0f}, "
        f"n = {each['runs']})."
        for name, each in found.items()
    ]
    write_result("command-costs", {"processor_seconds": found}, lines)
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
