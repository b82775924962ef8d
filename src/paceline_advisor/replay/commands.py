"""The command that trains a fork, which prints as it trains."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from annotated_types import Ge

from paceline.cli.train import Resume
from paceline.command import Overrides, Shape, command
from paceline_advisor import frozen
from paceline_advisor.commands import OptionalCount


@command("fork", group="Train", place=3)
@frozen
class Fork:
    """Train a new run from a checkpoint of RUN, with KEY=VALUE changed.

    The order of samples is the same, so that the difference between both runs is the keys'. RUN is not changed. The
    same command, or `paceline resume NEW`, resumes the new run.

    Examples:
      paceline fork runs/photos --at 2000 optimizer.lr=0.05 --run-dir runs/slower
    """

    run: Annotated[Path, Shape(recipe=True)]
    overrides: Overrides = ()
    at: Annotated[int, Ge(1), Shape(metavar="STEP", required=True), "Step of the checkpoint."]
    run_dir: Annotated[Path, Shape(metavar="NEW", required=True), "Directory of the new run."]
    processes: Annotated[OptionalCount, "Start N ranks on this machine (default: as RUN had)."] = None

    def stream(self, *, as_json: bool) -> int:
        """Make the new run, unless it is there already, and train it."""
        from paceline_advisor.replay.rewind import fork

        target = self.run_dir.absolute()
        fork(self.run, target, self.at, self.overrides)
        return Resume(run=target, processes=self.processes).stream(as_json=as_json)
