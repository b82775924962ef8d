"""How near does the memory estimate come to the peak that a public lecture printed for a training on its own GPU?"""

from __future__ import annotations

import json
import subprocess
import sys

from hardware import write_result

PRINTED = 96_306_688  # Data C182 at Berkeley, lecture 19: batch 64, on a GeForce RTX 3080 Ti
DEVICE = "rtx3090"  # the nearest that Paceline knows, of the same generation


def main() -> int:
    """Estimate it for the nearest GPU in the table."""
    command = [sys.executable, "-m", "paceline", "estimate", "cifar10_lecture", "--device", DEVICE, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    foretold = json.loads(done.stdout)["peak"]["allocated_bytes"]
    error = foretold / PRINTED - 1
    line = (
        f"Foretold for {DEVICE}: {foretold / 1e6:.1f} MB; printed in the lecture: {PRINTED / 1e6:.1f} MB; {error:+.1%}."
    )
    write_result(
        "lecture-peak", {"runs": 1, "foretold_bytes": foretold, "printed_bytes": PRINTED, "error": error}, [line]
    )
    sys.stdout.write(f"{line}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
