"""`paceline watch`: a run's progress and curves in the terminal, from its directory."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge

from paceline.cli.output import echo, open_console, print_json
from paceline.command import Shape, command

if TYPE_CHECKING:
    from paceline_ops.watch.screen import WatchedRun


@command("watch", group="Train", place=4)
@dataclass(frozen=True, kw_only=True)
class Watch:
    """Watch runs in the terminal while they train.

    It shows progress, the time left, curves, phases of a step, evaluations and incidents of each run directory RUN. It
    only reads, on any host that shares the directory, and ends when the runs do. On a terminal, one run
    fills the screen and several are a table; elsewhere, one line per record. With --json, their current state.

    Examples:
      paceline watch runs/mine
      paceline watch runs/*
      paceline watch runs/mine --json
    """

    runs: Annotated[tuple[Path, ...], Shape(metavar="RUN...", argument=True)]
    interval: Annotated[float, Ge(0.1), Shape(metavar="SECONDS"), "Refresh interval."] = 1.0

    def stream(self, *, as_json: bool) -> int:
        """Show the runs until they end."""
        from paceline_ops.watch.screen import WatchedRun, exit_line

        watched = [WatchedRun(run) for run in self.runs]
        if as_json:
            for run in watched:
                run.look()
            print_json({"runs": [run.to_json() for run in watched]})
            return 0
        try:
            self._follow(watched)
        except KeyboardInterrupt:
            return 0  # the usual way to leave; the runs continue
        for run in watched:
            echo(exit_line(run))
        return 0

    def _follow(self, watched: list[WatchedRun]) -> None:
        """Draw the runs on a terminal, else print a line for each record, until all have ended."""
        from rich.live import Live

        from paceline_ops.watch.screen import line_of, screen, table

        console = open_console(markup=False)
        is_screen = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        live = Live(console=console, auto_refresh=False, vertical_overflow="crop")
        with live if is_screen else contextlib.nullcontext():
            while True:
                for run in watched:
                    for event in run.look():
                        if not is_screen and (line := line_of(event, run)) is not None:
                            echo(f"{run.name}  {line}" if len(watched) > 1 else line)
                if is_screen:
                    live.update(table(watched) if len(watched) > 1 else screen(watched[0], console), refresh=True)
                if all(run.is_over for run in watched):
                    return
                time.sleep(self.interval)
