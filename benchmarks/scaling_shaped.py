"""What 2 and 4 processes take over links of known rates, beside what is predicted. Linux, root, on a quiet machine.

python benchmarks/scaling_shaped.py [MEGABITS ...]
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from pathlib import Path
from typing import Any

from hardware import write_result

_module = importlib.util.spec_from_file_location(
    "paceline_shaped", Path(__file__).parents[1] / "tests/distributed/shaped.py"
)
assert _module is not None
assert _module.loader is not None
shaped = importlib.util.module_from_spec(_module)
sys.modules[_module.name] = shaped
_module.loader.exec_module(shaped)

SIZES = (2, 4)
MEGABITS = (100.0, 400.0, 1600.0)


def main() -> None:
    """Compare at each rate, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("megabits", type=float, nargs="*", default=MEGABITS, help="rates of the links, in Mbit/s")
    rates = parser.parse_args().megabits
    if (reason := shaped.why_not()) is not None:
        sys.exit(f"no link can be shaped here: {reason}")
    found: list[dict[str, Any]] = []
    lines = ["| Mbit/s | processes | predicted s | measured s | error | limit |", "|---|---|---|---|---|---|"]
    with tempfile.TemporaryDirectory(prefix="paceline-shaped-") as folder:
        for rate in rates:
            own = Path(folder) / f"{rate:g}"
            own.mkdir()
            for each in shaped.compare(SIZES, rate, own, steps=30, rounds=5):
                seconds = each.prediction.seconds
                found.append(
                    {
                        "megabits": rate,
                        "processes": each.processes,
                        "predicted_seconds": seconds,
                        "measured_seconds": each.measured_seconds,
                        "error": each.error,
                        "parts": each.prediction.parts,
                    }
                )
                lines.append(
                    f"| {rate:g} | {each.processes} | {seconds:.3f} | {each.measured_seconds:.3f} | "
                    f"{each.error:+.1%} | {each.prediction.limit} |"
                )
                print(lines[-1], flush=True)
    print(write_result("scaling-shaped", {"rows": found}, lines))


if __name__ == "__main__":
    main()
