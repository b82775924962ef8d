"""How far is the estimated memory of a training step from a real step's?

For each network, micro-batch, precision and optimizer of `memory_cases.py`, the way of `paceline estimate` (a step on
tensors without numbers) is held against two real steps, of which the second is measured: on a GPU by
`torch.cuda.max_memory_allocated`, on a CPU by what torch's allocator reports block by block to its profiler, and so
with what kernels take inside. Memory does not depend on what else the machine does: one run of each.

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
from memory_cases import ON_CPU, Case, on_gpu

from paceline.distributed.device import describe_machine
from paceline.studies.memory.measured import measured_peak
from paceline.studies.memory.replay import peak_of
from paceline.studies.memory.surroundings import with_libraries
from paceline.studies.memory.trace import trace_step
from paceline.trainer.fake_run import fake_run
from paceline.units import format_bytes


def compared(case: Case, device: torch.device) -> dict[str, Any]:
    """Estimate a step, and do it."""
    recipe, machine = case.recipe(), describe_machine(device)
    begun = time.perf_counter()
    with fake_run(recipe, micro_batch=case.batch, machine=machine) as step:
        trace = with_libraries(trace_step(step), machine)
    peak = peak_of(trace, caching=device.type == "cuda")
    seconds = time.perf_counter() - begun
    measured = measured_peak(recipe, case.batch, device)
    return {
        "case": case.name,
        "estimated_bytes": peak.allocated,
        "measured_bytes": measured,
        "error": peak.allocated / measured - 1,
        "phase": peak.phase,
        "estimate_seconds": seconds,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare all cases and write the result files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--dry-run", action="store_true", help="print, write no result files")
    options = parser.parse_args(arguments)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    cases = tuple(on_gpu()) if device.type == "cuda" else ON_CPU
    rows, lines = [], ["| step | estimated | measured | error |", "|---|---|---|---|"]
    for case in cases:
        if options.only not in case.name:
            continue
        row = compared(case, device)
        rows.append(row)
        sizes = (format_bytes(row[key]) for key in ("estimated_bytes", "measured_bytes"))
        lines.append(f"| {row['case']} | {' | '.join(sizes)} | {100 * row['error']:+.2f} % |")
        print(lines[-1], flush=True)
    errors = [abs(row["error"]) for row in rows]
    worst = (
        f"{len(rows)} steps: median error {100 * statistics.median(errors):.2f} %, largest {100 * max(errors):.2f} %"
    )
    print(worst)
    if not options.dry_run:
        print(write_result("estimate-memory", {"steps": rows, "largest_error": max(errors)}, [worst, "", *lines]))


if __name__ == "__main__":
    main()
