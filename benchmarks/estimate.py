"""How far is the estimated memory of a training step from a real step's?

For each network, micro-batch, precision and optimizer of `memory_cases.py`, the way of `paceline estimate` (on tensors
without numbers) is held against two real steps, of which the first makes the optimizer's state, and an evaluation: on a
GPU by `torch.cuda.max_memory_allocated`, on a CPU by what torch's allocator reports block by block to its profiler, and
so with what kernels take inside. Memory does not depend on what else the machine does: one run of each.

    python benchmarks/estimate.py [--only PART-OF-NAME] [--dry-run]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from hardware import write_result
from measured_memory import measured_peaks
from memory_cases import MORE_ON_CPU, ON_CPU, Case, on_gpu

from paceline.distributed.device import describe_machine
from paceline.parsing.units import format_bytes
from paceline.trainer.fake_step import fake_step
from paceline_advisor.memory.job import peak_of
from paceline_advisor.memory.trace import EVALUATION, FIRST, STEP, trace_step, without_collection
from paceline_advisor.memory.variants import with_libraries


def compared(case: Case, device: torch.device) -> list[dict[str, Any]]:
    """Estimate a run's first step, a later one and its evaluation, and do them."""
    recipe, machine = case.recipe(), describe_machine(device)
    started = time.perf_counter()
    with without_collection(), fake_step(recipe, micro_batch=case.batch, machine=machine, scores=True) as step:
        trace = with_libraries(trace_step(step), machine)
    peak = peak_of(trace, caching=device.type == "cuda")
    seconds = time.perf_counter() - started
    return [
        {
            "case": case.name,
            "part": part,
            "estimated_bytes": peak.parts[part],
            "measured_bytes": measured,
            "error": peak.parts[part] / measured - 1,
            "estimate_seconds": seconds,
        }
        for part, measured in measured_peaks(recipe, case.batch, device).items()
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare all cases and write the result files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--dry-run", action="store_true", help="print, write no result files")
    options = parser.parse_args(arguments)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    cases = tuple(on_gpu()) if device.type == "cuda" else (*ON_CPU, *MORE_ON_CPU)
    rows: list[dict[str, Any]] = []
    lines = ["| step | part | estimated | measured | error |", "|---|---|---|---|---|"]
    for case in cases:
        if options.only not in case.name:
            continue
        for row in compared(case, device):
            rows.append(row)
            sizes = (format_bytes(row[key]) for key in ("estimated_bytes", "measured_bytes"))
            lines.append(f"| {row['case']} | {row['part']} | {' | '.join(sizes)} | {100 * row['error']:+.2f} % |")
            print(lines[-1], flush=True)
    worst_lines = [_worst(rows, part) for part in (STEP, FIRST, EVALUATION)]
    print(*worst_lines, sep="\n")
    if not options.dry_run:
        print(
            write_result(f"estimate-memory{_without_wide_vectors(device)}", {"parts": rows}, [*worst_lines, "", *lines])
        )


def _without_wide_vectors(device: torch.device) -> str:
    """A result of its own: kernels for narrower vectors take other memory, and processors of both kinds share names."""
    vectors = torch.backends.cpu.get_cpu_capability()
    return "" if device.type == "cuda" or "AVX512" in vectors else f"-{vectors.lower()}"


def _worst(rows: Sequence[dict[str, Any]], part: str) -> str:
    errors = [abs(row["error"]) for row in rows if row["part"] == part]
    if not errors:
        return f"- {part}: none"
    median, largest = 100 * statistics.median(errors), 100 * max(errors)
    return f"- {part}, of {len(errors)} cases: median error {median:.2f} %, largest {largest:.2f} %"


if __name__ == "__main__":
    main()
