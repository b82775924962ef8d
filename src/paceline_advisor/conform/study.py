"""The command: runs a described program undisturbed, kills and resumes it, and reports what was lost."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import rich.table
from rich.box import SIMPLE_HEAD
from rich.markup import escape

from paceline.command import Log
from paceline.errors import PacelineError
from paceline.pages.page import Table
from paceline.pages.shown import Shown
from paceline_advisor import Json, frozen
from paceline_advisor.commands import Conform
from paceline_advisor.conform.checks import ConformCheck, NotAskedError, ProgramEvidence, ask
from paceline_advisor.conform.description import DescriptionError, read_description
from paceline_advisor.conform.runs import Kill, Program, ProgramError, torn_file
from paceline_advisor.launches import check_can_watch

_VERSIONS = """
import importlib.metadata as metadata, json, platform, sys
found = {"python": platform.python_version()}
for name in sys.argv[1:]:
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        found[name] = None
print(json.dumps(found))
"""


class NothingAskedError(PacelineError):
    """No question could be asked."""

    exit_code = 3


@frozen
class ConformReport:
    """The answers of a program.

    Attributes:
        program: The argument of ``paceline conform``.
        versions: Versions of Python and the described packages; None for one that is not installed.
        seconds: Duration.
        checks: The answers.
    """

    program: str
    versions: dict[str, str | None]
    seconds: float
    checks: tuple[ConformCheck, ...]

    def count(self, verdict: str) -> int:
        """Return how many checks ended so."""
        return sum(check.verdict == verdict for check in self.checks)

    def to_json(self) -> Json:
        """The report as one JSON object."""
        return {**vars(self), "checks": [check.to_json() for check in self.checks]}

    def __paceline__(self) -> Shown:
        """Show each check with its evidence, and how to repeat those that failed."""
        table = rich.table.Table(box=SIMPLE_HEAD, pad_edge=False)
        for name in ("check", "processes", "verdict"):
            table.add_column(name, no_wrap=True)
        table.add_column("evidence")
        colours = {"passed": "green", "failed": "bold red", "not_applicable": "dim"}
        for check in self.checks:
            word = f"[{colours[check.verdict]}]{check.verdict.replace('_', ' ')}[/]"
            table.add_row(check.name, str(check.processes), word, escape(check.evidence))
        rows = [(check.name, check.processes, check.verdict, check.evidence) for check in self.checks]
        versions = ", ".join(f"{name} {version or 'not installed'}" for name, version in self.versions.items())
        total = (
            f"{self.count('passed')} passed, {self.count('failed')} failed, {self.count('not_applicable')} not "
            f"applicable, {self.seconds:.0f} s. {versions}."
        )
        repeats = [f"To repeat {check.name}: {check.repeat}" for check in self.checks if check.repeat]
        ok: bool | str | PacelineError = not self.count("failed") or ""
        if self.count("not_applicable") == len(self.checks):
            ok = NothingAskedError(f"no question could be asked of '{self.program}'; the table says why.")
        page = Table(columns=("check", "processes", "verdict", "evidence"), rows=rows)
        return Shown(title=f"Conformance of {self.program}", blocks=[table, *repeats, total], on_page=[page], ok=ok)


def conform(options: Conform, log: Log) -> ConformReport:
    """Run a program undisturbed, kill and resume it, and compare.

    Args:
        options: The command's options.
        log: Receives progress lines.

    Raises:
        PacelineError: If the description is wrong, or the program fails undisturbed.
    """
    check_can_watch("conform")
    begun = time.perf_counter()
    description, here = read_description(options.program)
    counts = options.processes or ((1, 2) if description.takes_processes else (1,))
    if counts != (1,) and not description.takes_processes:
        raise DescriptionError(
            f"--processes {','.join(map(str, counts))}, but the start command has no {{processes}}; add it, or leave "
            "out --processes."
        )
    python = (options.python or Path(sys.executable)).absolute()
    with tempfile.TemporaryDirectory(prefix="paceline-conform-", ignore_cleanup_errors=True) as scratch:
        program = Program(description=description, here=here, python=python, scratch=Path(scratch))
        versions = _versions(python, description.packages)
        checks: list[ConformCheck] = []
        for count in sorted({*counts}):
            checks += ask(_evidence(program, count, log))
    return ConformReport(
        program=str(options.program), versions=versions, seconds=time.perf_counter() - begun, checks=tuple(checks)
    )


def _versions(python: Path, packages: tuple[str, ...]) -> dict[str, str | None]:
    try:
        found = subprocess.run([python, "-c", _VERSIONS, *packages], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        raise DescriptionError(f"--python {python} cannot be started; give an interpreter.") from None
    versions: dict[str, str | None] = json.loads(found.stdout)
    return versions


def _evidence(program: Program, processes: int, log: Log) -> ProgramEvidence:
    """Run the program with ``processes`` processes, undisturbed and killed."""
    whole = []
    for name in ("first", "second"):
        log(f"{processes} process{'es' if processes > 1 else ''}: {name} undisturbed run")
        run = program.run(f"{processes}-{name}", processes)
        if run.code:
            raise ProgramError(f"the program fails undisturbed (exit code {run.code}): {run.message}")
        whole.append(run)
    evidence = ProgramEvidence(
        description=program.description,
        processes=processes,
        first=whole[0],
        second=whole[1],
        kills=(),
        weights=program.weights,
    )
    try:
        moments = list(_moments(program, evidence))
    except NotAskedError:
        return evidence
    kills = []
    for name, moment, stop in moments:
        log(f"{processes} process{'es' if processes > 1 else ''}: killed {moment}, then resumed")
        before = program.run(f"{processes}-{name}", processes, stop=stop)
        steps = program.checkpoint_steps(before)
        torn = torn_file(before, stop["tear"]) if "tear" in stop else None
        resumed = program.run(f"{processes}-{name}-resumed", processes, resumes=before)
        kills.append(
            Kill(moment=moment, before=before, resumed=resumed, steps=steps, torn=torn, is_torn="tear" in stop)
        )
    return replace(evidence, kills=tuple(kills))


def _moments(program: Program, evidence: ProgramEvidence) -> Iterator[tuple[str, str, Json]]:
    """Yield where to kill the program: name, moment in words, and what stops it."""
    epochs, trace = evidence.epochs, evidence.first.trace
    kind, size, total = trace.kind, epochs.per_epoch, epochs.total
    saves = sorted({save[kind] for save in trace.saves if 0 < save[kind] < total})
    if not saves:
        return
    unit = "batch" if kind == "used" else "sample"
    chosen: dict[int, str] = {}
    for begin, name in ((0, "first-epoch"), (size, "later-epoch")):
        later = [save for save in saves if save >= begin]
        inside = [save for save in later if save % size]
        if later:
            chosen.setdefault((inside or later)[0], name)
    for save, name in chosen.items():
        after = next((each for each in saves if each > save), total)
        at = min(save + max(1, (after - save) // 2), total - 1)
        yield name, f"after {unit} {at} of {total}", {"kind": kind, "at": at}
    if limit := program.checkpoint_bytes(evidence.first) // 2:
        at = saves[min(1, len(saves) - 1)]
        yield "save", "within a save", {"kind": kind, "at": at, "tear": limit}
