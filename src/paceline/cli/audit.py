"""`paceline audit`: the proof that each sample was used exactly once per epoch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from paceline.command import Log, Shape, command
from paceline.pages.shown import Result


@command("audit")
@dataclass(frozen=True, kw_only=True)
class Audit:
    """Prove that a run used each sample exactly once per epoch.

    The ledger in the run directory RUN records what every process trained on. Exit code 1 and one sentence per
    objection if a sample was repeated, left out, or used out of order.
    """

    run_dir: Annotated[Path, Shape(metavar="RUN")]

    def run(self, _: Log) -> Result:
        """Audit the run."""
        from paceline.report.audit import audit_run

        return audit_run(self.run_dir)
