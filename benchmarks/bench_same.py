"""How often does `bench compare` take a recipe for slower than itself?

Results of one recipe are measured one after the other, each by several launches, exactly as `paceline bench --output`
does; then every pair of neighbours is compared, with no tolerance. All of them are equal: each alarm is false.

    python benchmarks/bench_same.py [--results 20] [--launches 3] [--rounds 3] [--seconds 0.3]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from hardware import write_result

from paceline.metrics.intervals import share_interval
from paceline_advisor import as_json
from paceline_advisor.bench.comparison import compare
from paceline_advisor.bench.report import BenchReport, measure_grid
from paceline_advisor.commands import Bench

RECIPE = "digits"


def measure(folder: Path, options: argparse.Namespace) -> None:
    """One result."""
    command = Bench(
        recipe=RECIPE,
        overrides=("parallel.threads=1",),
        parts=("together",),
        rounds=options.rounds,
        launches=options.launches,
        seconds=options.seconds,
    )
    loaded, rows = measure_grid(command, lambda _: None)
    BenchReport(kind="throughput", name=loaded.name, recipe=loaded.recipe, settings={}, rows=rows, notes=()).write(
        folder
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, compare and write the result files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=int, default=20)
    parser.add_argument("--launches", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--dry-run", action="store_true", help="print, write no result files")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        folders = [Path(scratch) / str(index) for index in range(options.results)]
        for folder in folders:
            measure(folder, options)
            print(f"measured {folder.name}", flush=True)
        # Pairs that share no result: each is evidence of its own.
        pairs = list(pairwise(folders))[::2]
        found = {tolerance: [compare(a, b, tolerance=tolerance) for a, b in pairs] for tolerance in (0.0, 0.05)}
        rates = [
            json.loads((folder / "benchmark.json").read_text())["rows"][0]["samples_per_second"]["middle"]
            for folder in folders
        ]
    alarms = {tolerance: sum(each.regressed for each in these) for tolerance, these in found.items()}
    shares = {tolerance: share_interval(count, len(pairs)) for tolerance, count in alarms.items()}
    lines = [
        f"Tolerance {100 * tolerance:g} %: {alarms[tolerance]} false alarms in {len(pairs)} comparisons of "
        f"{RECIPE} with itself, {options.launches} launches each (95 % interval of their share: "
        f"{100 * share.low:.0f} to {100 * share.high:.0f} %)."
        for tolerance, share in shares.items()
    ]
    lines.append(f"The results' throughputs lie between {min(rates):,.0f} and {max(rates):,.0f} images a second.")
    print("\n".join(lines))
    if not options.dry_run:
        result = {
            "pairs": len(pairs),
            "alarms": {str(tolerance): count for tolerance, count in alarms.items()},
            "throughputs": rates,
            "slower": [as_json(each.lines[0]) for each in found[0.0]],
        }
        print(write_result("bench-same", result, lines))


if __name__ == "__main__":
    main()
