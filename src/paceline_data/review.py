"""`paceline review`: look through doubtful images on a page, decide, and apply the plan."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Le

from paceline.cli.output import echo, program
from paceline.cli.streams import make_optional
from paceline.command import Overrides, Shape, command
from paceline.errors import RecipeError
from paceline.parsing.files import free_name
from paceline.parsing.plain_text import one_line
from paceline.parsing.units import counted

if TYPE_CHECKING:
    from paceline_data.reviewing.apply import Applied
    from paceline_data.reviewing.plan import ReviewPlan


@command("review", group="Data", place=1)
@dataclass(frozen=True, kw_only=True)
class Review:
    """Look through doubtful images on a page, and move or set aside files.

    SOURCE is a folder of class folders, or a run that was trained on one. The page shows images that are in two classes
    or two splits, copies, images that look damaged, and with a run likely wrong labels and the run's mistakes. Keys
    keep an image, move it to a class, or set it aside.

    The page is for this machine alone: open the address that is printed. Decisions are written to a plan at once, and
    several pages and processes may write to one. Nothing is moved before the plan is applied, on the page or with
    --apply. Files that are set aside go next to the plan. Nothing is deleted or overwritten; sh DIR/undo.sh moves
    everything back. If it is killed, the same command moves the rest.

    Examples:
      paceline review photos
      paceline review runs/photos --folds 5
      paceline review photos --apply photos-review/plan.jsonl
    """

    source: Annotated[str, Shape(metavar="FOLDER|RUN", recipe=True)]
    overrides: Overrides = ()
    apply: Annotated[Path | None, Shape(metavar="PLAN", path="local"), "Apply a plan, without the page."] = None
    plan: Annotated[
        Path | None,
        Shape(metavar="FILE", path="local", without=("apply",)),
        "ReviewPlan to write to, in a folder next to the data (default: FOLDER-review/plan.jsonl).",
    ] = None
    folds: Annotated[
        int | None,
        Ge(2),
        Shape(metavar="K", without=("apply",)),
        "With a run: also check the labels of its training samples, by training K times without a part of them.",
    ] = None
    port: Annotated[int, Ge(0), Le(65535), Shape(without=("apply",)), "0: any free port."] = 0

    def stream(self, *, as_json: bool) -> int:
        """Apply a plan, or serve the page until it is stopped."""
        from paceline_data.inspect.quarantine import check_place
        from paceline_data.reviewing.apply import apply_plan
        from paceline_data.reviewing.find import open_folder
        from paceline_data.reviewing.plan import ReviewPlan

        root = open_folder(self.source, self.overrides)
        if self.apply is not None:
            applied = apply_plan(ReviewPlan(self.apply), root)
            document = {"moved": applied.moved, "moved_earlier": applied.earlier, "plan": str(applied.plan)}
            _print(document | {"undo": _undo(applied)}, self._after(applied), as_json=as_json)
            return 0
        if self.folds is not None and not self._is_run:
            raise RecipeError(
                f"--folds={self.folds} checks the labels of a run's data, and {self.source!r} is not a run directory; "
                "train first, then name the run.",
                key="--folds",
                value=self.folds,
            )
        path = root.resolve().with_name(f"{root.resolve().name}-review") / "plan.jsonl"
        plan = ReviewPlan(self.plan or path)
        check_place(root, plan.path.parent, "--plan")
        with plan.locked():  # it can be written
            pass
        make_optional(sys.stdout)
        self._serve(plan, as_json=as_json)
        return 0

    def _serve(self, plan: ReviewPlan, *, as_json: bool) -> None:
        from paceline_data.check_data import progress_bar
        from paceline_data.reviewing.find import find_doubts, in_a_child
        from paceline_data.reviewing.server import ReviewServer

        def find() -> Any:
            with progress_bar() as progress:
                return find_doubts(
                    self.source,
                    self.overrides,
                    folds=self.folds,
                    folder=plan.path.parent,
                    progress=progress,
                    log=lambda line: echo(line, err=True),
                )

        def on_applied(applied: Applied) -> list[str]:
            lines = self._after(applied)
            echo("\n".join(lines), err=as_json)
            return lines

        found = in_a_child(find)
        with ReviewServer(found, plan, self.port, on_applied) as server, _until_stopped():
            apply = f"{program()} review {self._typed} --apply {shlex.quote(str(plan.path))}"
            lines = [*found.notes, f"{counted(len(found.doubts), 'doubt')} in {found.root}, at {server.url}"]
            lines += ["(Ctrl-C stops it; nothing is moved before you apply the plan)", f"Apply: {apply}"]
            _print({"url": server.url, "plan": str(plan.path), "doubts": len(found.doubts)}, lines, as_json=as_json)
            server.serve_forever()
        with server.busy:  # a plan that is being applied
            pass

    @property
    def _is_run(self) -> bool:
        return (Path(self.source).expanduser() / "plan.json").is_file()

    @property
    def _typed(self) -> str:
        """The data as typed: an override may name another folder."""
        return shlex.join((self.source, *self.overrides))

    def _after(self, applied: Applied) -> list[str]:
        """Return what was done, and what to do next."""
        earlier = f", and {applied.earlier:,} before it was interrupted" * bool(applied.earlier)
        run = free_name(Path(self.source).expanduser()) if self._is_run else None
        train = f"{self._typed} --run-dir {shlex.quote(str(run))}" if run else self._typed
        return [
            f"moved {counted(len(applied.moved), 'file')}{earlier}; the plan is now {one_line(str(applied.plan))}",
            f"Undo: {one_line(_undo(applied))}",
            f"Next: {one_line(f'{program()} train {train}')}",
        ]


def _undo(applied: Applied) -> str:
    return f"sh {shlex.quote(str(applied.undo))}"


def _print(document: dict[str, Any], lines: list[str], *, as_json: bool) -> None:
    echo(json.dumps(document) if as_json else "\n".join(map(one_line, lines)))


@contextmanager
def _until_stopped() -> Iterator[None]:
    """End the block on SIGINT or SIGTERM."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        return
    finally:
        signal.signal(signal.SIGTERM, previous)
