"""`paceline check-data`: find images that would break or spoil a run."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge

from paceline.cli.output import program
from paceline.command import Log, Output, Overrides, Shape, command
from paceline.errors import DataError, RecipeError
from paceline.pages.page import Block, Gallery, Picture, Table
from paceline.pages.shown import Document, Result, Shown
from paceline.parsing.files import free_name
from paceline.parsing.plain_text import one_line
from paceline.parsing.units import counted
from paceline.storage.addresses import is_address

if TYPE_CHECKING:
    from rich.text import Text

    from paceline_data.inspect.check import DataReport
    from paceline_data.inspect.findings import DataFinding, FindingEntry
    from paceline_data.inspect.gather import Progress
    from paceline_data.inspect.quarantine import Quarantine
    from paceline_data.inspect.wrong_labels import WrongLabel, WrongLabels

_NAMED = 5
_NAMED_OF_OTHERS = 2  # findings that neither break nor spoil a run
_ROWS, _ROWS_BESIDE_NAMES = 18, 3  # of a terminal of 24 and 80 columns, for the bad findings; of each of them
_BAR = 30
_COLOURS = {"breaks": "bold red", "spoils": "magenta", "costs": "yellow", "notice": "cyan"}


@command("check-data", group="Data", place=0)
@dataclass(frozen=True, kw_only=True)
class CheckData:
    """Find images that would break or spoil a run, and likely wrong labels.

    SOURCE is a folder of images or an archive, or the address of one (s3://…); a recipe by name or file, whose data
    section is checked; or a run.

    Every image is read as in a run. The report lists possible mistakes (notice), images that are slow to read (costs),
    images in two splits or two classes (spoils) and images that a run cannot read (breaks), with file names and advice.
    KEY=VALUE changes the data section, for example data.validation_fraction=0.1.

    With a run, labels of its held-out images or texts that its network contradicts are listed too, the most likely
    wrong ones first, unless it predicts too few to judge them. --folds 5 also checks its training samples: it trains
    the recipe five times, each time without a fifth of them.

    Nothing in SOURCE is changed, unless --quarantine moves what breaks a run, and held-out copies of training images
    (without val/ and test/: all copies but one), out of it. Of a file and a link to it, the link is moved; what lies
    behind a linked folder is not. Nothing is deleted: sh DIR/undo.sh moves everything back.

    Exit code 1 if anything breaks or spoils a run, 0 if not; 2 if nothing can be checked. Likely wrong labels do not
    count.

    Examples:
      paceline check-data photos
      paceline check-data photos --limit 2000
      paceline check-data photos --quarantine photos-broken
      paceline check-data resnet50 data.path=imagenet --json
      paceline check-data runs/photos --folds 5 --output labels
    """

    source: Annotated[str, Shape(metavar="SOURCE|RUN", recipe=True)]
    overrides: Overrides = ()
    workers: Annotated[int | None, Ge(1), "Number of reading processes (default: one per core)."] = None
    limit: Annotated[int | None, Ge(1), "Check only N images, spread over the data set."] = None
    quarantine: Annotated[
        Path | None,
        Shape(metavar="DIR"),
        "Move what breaks a run, and held-out copies of training images, to DIR, next to the data.",
    ] = None

    folds: Annotated[
        int | None,
        Ge(2),
        Shape(metavar="K"),
        "With a run: also check the labels of its training samples, by training K times without a part of them.",
    ] = None
    duration: Annotated[
        str | None,
        Shape(metavar="DURATION", only="folds"),
        'Duration of each fold\'s training, such as "3 epochs" (default: as the run).',
    ] = None
    output: Output = None
    verbose: Annotated[bool, "Show more names, and a histogram of decoding times."] = False

    def run(self, log: Log) -> Result:
        """Check the data."""
        from paceline.recipe.load import load_recipe
        from paceline_data.inspect.check import check_data
        from paceline_data.inspect.gather import has_images

        path = Path(self.source).expanduser()
        is_run = (path / "plan.json").is_file()
        if self.folds is not None and not is_run:
            raise RecipeError(
                f"--folds={self.folds} checks the labels of a run's data, and {self.source!r} is not a run directory; "
                "train first, then name the run.",
                key="--folds",
                value=self.folds,
            )
        report, labels = None, None
        of_images = not is_run or has_images(load_recipe(self.source, self.overrides).recipe)
        if is_run:
            self._refuse_unused(of_images)
        if of_images:
            with progress_bar() as progress:
                report = check_data(
                    self.source,
                    self.overrides,
                    workers=self.workers,
                    limit=self.limit,
                    quarantine=self.quarantine,
                    progress=progress,
                )
        if is_run:
            from paceline_data.inspect.wrong_labels import find_wrong_labels

            labels = find_wrong_labels(
                path, self.overrides, folds=self.folds, duration=self.duration, output=self.output, log=log
            )
            if report is None and not labels.is_supported:
                raise DataError(f"nothing of the run {self.source!r} can be checked: {labels.not_checked}.")
        passed = report is None or report.passed
        document = {"source": self.source, "passed": True} if report is None else report.to_json()
        shown = Shown(
            title="" if self.output is None else "Data check",
            subtitle=self.source,
            blocks=[*_lines(report, labels, verbose=self.verbose, following=self._next(report, labels))],
            on_page=[] if labels is None else [*_sheet(labels)],
            ok=passed or "",
        )
        return Document(document=document | ({} if labels is None else {"labels": labels.to_json()}), shown=shown)

    def _next(self, report: DataReport | None, labels: WrongLabels | None) -> str:
        """Return the command that fits what was found; empty if there is none."""
        if report is None:
            return ""
        typed, paceline = shlex.join((self.source, *self.overrides)), program()
        is_reviewed = report.is_folder and report.learned == "classes"
        if report.passed and labels is None:
            return "" if is_address(self.source) else f"{paceline} train {typed}"
        if report.passed:
            return f"{paceline} review {typed}" if labels and labels.found and is_reviewed else ""
        bad = [each.kind for each in report.findings if each.kind.severity in ("breaks", "spoils")]
        left = [each for each in bad if each.name not in report.moved]
        can_move = any(each.name == "leak" or (each.severity == "breaks" and each.name != "layout") for each in left)
        if can_move and report.is_folder and report.root and report.quarantine is None:
            root = Path(report.root).absolute()
            aside = free_name(root.with_name(f"{root.name}-aside"))
            shown = aside.relative_to(Path.cwd()) if aside.is_relative_to(Path.cwd()) else aside
            of_data = typed if labels is None else shlex.quote(report.root)  # a run is refused with --quarantine
            return f"{paceline} check-data {of_data} --quarantine {shlex.quote(str(shown))}"
        if is_reviewed and any(each.severity == "spoils" for each in left):
            return f"{paceline} review {typed}"
        return f"mend what is listed above, then {paceline} check-data {typed}"

    def _refuse_unused(self, of_images: bool) -> None:
        """Refuse options that do nothing with a run."""
        if self.quarantine is not None and of_images:
            raise RecipeError(
                f"--quarantine={self.quarantine} moves files, and the labels of a run are checked on the data that it "
                "learned; name their folder instead of the run.",
                key="--quarantine",
                value=self.quarantine,
            )
        options = {"--workers": self.workers, "--limit": self.limit, "--quarantine": self.quarantine}
        unused = {name: value for name, value in options.items() if value is not None and not of_images}
        for name, value in [*unused.items()][:1]:
            raise RecipeError(
                f"no effect: {', '.join(unused)}; the data of {self.source!r} are not images, so only their labels are "
                f"checked. Leave {'it' if len(unused) == 1 else 'them'} out.",
                key=name,
                value=value,
            )


@contextlib.contextmanager
def progress_bar() -> Iterator[Progress]:
    """Return a progress bar on a terminal; nothing if standard error is a file."""
    if not sys.stderr.isatty():
        yield lambda _task, _done, _total: None
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    # Drawn without a library: processes are forked meanwhile, which must not inherit a thread.
    bars = Progress(
        *Progress.get_default_columns()[:2],
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        auto_refresh=False,
    )
    bars_by_task: dict[str, Any] = {}

    def show(task: str, done: int, total: int) -> None:
        if task not in bars_by_task:
            bars_by_task[task] = bars.add_task(task, total=total)
        bars.update(bars_by_task[task], completed=done, total=total, refresh=True)

    with bars:
        yield show


_SINGULAR = {"classes": "class", "labels": "label", "numbers": "number"}


def _lines(
    report: DataReport | None, labels: WrongLabels | None, *, verbose: bool, following: str
) -> Iterator[str | Text]:
    """Report what was checked, then what was found, the worst last, and whether the data can be trained on."""
    from rich.text import Text

    if report is not None:
        yield from _of_data(report, verbose=verbose)
    if labels is not None:
        yield from _of_labels(labels, report)
    elif report is not None and report.learned == "classes":
        yield "labels    wrong ones are not looked for without a run: train, then `paceline check-data RUN`"
    if report is not None:
        yield from _findings(report, verbose=verbose)
    wrong = [] if labels is None or not labels.found else [counted(len(labels.found), "likely wrong label")]
    if report is None:
        was_checked = labels is not None and labels.checked
        yield (
            Text.from_markup("[green]passed[/]").append(f": {', '.join(wrong) or 'nothing found'}.")
            if was_checked
            else Text.from_markup("[yellow]nothing was checked.[/]")
        )
        return
    said = {severity: f"{count:,} {severity}" for severity, count in report.count.items() if count}
    if report.count["notice"] > 1:
        said["notice"] += "s"
    summary = ", ".join([*said.values(), *wrong]) or "nothing found"
    for severity in ("breaks", "spoils"):
        kinds = {each.kind.name for each in report.findings if each.kind.severity == severity}
        if kinds <= report.moved:
            summary = summary.replace(f" {severity}", f" {severity}, moved away")
    verdict = "[green]passed[/]" if report.passed else "[bold red]failed[/]"
    processes = counted(report.workers, "process")
    yield Text.from_markup(verdict).append(f": {summary}; {report.seconds:.1f} s with {processes}.")
    if following:
        yield one_line(f"Next: {following}")


def _of_data(report: DataReport, *, verbose: bool) -> Iterator[str]:
    """Report what was checked, and its statistics."""
    splits = ", ".join(f"{each['samples']:,} {name}" for name, each in report.splits.items())
    count, noun = report.classes["count"], report.learned
    noun = _SINGULAR[noun] if count == 1 else noun
    yield f"{one_line(report.source)}: {report.dataset}, {count} {noun}, {splits}"
    checked, samples = (sum(each[key] for each in report.splits.values()) for key in ("checked", "samples"))
    if checked < samples:
        yield f"looked at {checked:,} of {samples:,} images; duplicates among the others are not found"
    yield from _figures(report)
    if report.cost:
        yield from _cost(report, verbose=verbose)


def _findings(report: DataReport, *, verbose: bool) -> Iterator[str | Text]:
    """Report what was found, the worst last, with so few names that the worst and the verdict fit on a screen."""
    bad = [each for each in report.findings if each.kind.severity in ("breaks", "spoils")]
    others = [each for each in report.findings if each not in bad]
    for finding in reversed(others):
        yield from _finding(finding, report, _NAMED if verbose else _NAMED_OF_OTHERS, counts_more=verbose)
    left_out = sum(max(each.count - _NAMED_OF_OTHERS, 0) for each in others)
    if left_out and not verbose:
        yield f"        {left_out:,} more names are left out; --verbose shows more"
    most = _NAMED if verbose else min(_NAMED, max(1, _ROWS // max(1, len(bad)) - _ROWS_BESIDE_NAMES))
    bad.reverse()
    for finding in sorted(bad, key=lambda each: each.kind.name not in report.moved):
        yield from _finding(finding, report, most, counts_more=True)
    if report.quarantine is not None:
        yield from _moved(report.quarantine, report)


def _finding(finding: DataFinding, report: DataReport, most: int, *, counts_more: bool) -> Iterator[str | Text]:
    from rich.text import Text

    kind, is_moved = finding.kind, finding.kind.name in report.moved
    name = f"{finding.count:,} {kind.name.replace('_', ' ')}"
    heading = f"[{_COLOURS[kind.severity]}]{kind.severity:<6}[/]  [bold]{name}[/]"
    advice = "moved away" if is_moved else kind.advice
    yield Text.from_markup(heading).append(f": {kind.means}; {advice}")
    if not is_moved:
        yield from (f"        {_line(entry, report.root)}" for entry in finding.entries[:most])
        if counts_more and finding.count > most:
            yield f"        … and {finding.count - most:,} more (--json names them)"


def _of_labels(labels: WrongLabels, report: DataReport | None) -> Iterator[str | Text]:
    """Report likely wrong labels, and which were checked."""
    from rich.text import Text

    root = None if report is None else report.root
    if labels.found:
        heading = f"[{_COLOURS['notice']}]notice[/]  [bold]{counted(len(labels.found), 'likely wrong label')}[/]"
        has_folders = report is not None and report.dataset == "image_folder"
        how = "`paceline review` (or --output DIR)" if has_folders else "--output DIR"
        yield Text.from_markup(heading).append(f": the network contradicts them; look at them with {how}")
        for each in labels.found[:_NAMED]:
            where = f"{each.split} {each.id}, {_relative(each.sample, root)}"
            yield f"        {where}: {_change(each)}"
        if len(labels.found) > _NAMED:
            yield f"        … and {len(labels.found) - _NAMED:,} more (--json names them)"
    for split, count in labels.checked.items():
        agreement, findable = (100 * each[split] for each in (labels.agreement, labels.findable))
        yield (
            f"labels    {count:,} of {split} checked: the network predicts {agreement:.1f} %, and would find about "
            f"{findable:.0f} % of wrong ones"
        )
    if labels.not_checked:
        yield one_line(f"labels    not checked: {labels.not_checked}")


def _change(each: WrongLabel) -> str:
    return one_line(f"{each.given} → {each.suggested} ({100 * each.score:.0f} %)")


def _sheet(labels: WrongLabels) -> Iterator[Block]:
    """Show the likely wrong labels as pictures, and all in a table."""
    if not labels.found:
        return
    pictures = [
        Picture(data=data, caption=_change(each), alternative=f"{each.split} {each.id}: {one_line(each.sample)}")
        for each in labels.found
        if (data := labels.pictures.get((each.split, each.id)))
    ]
    if pictures:
        caption = "Likely wrong labels: given → suggested (probability that the given one is wrong)"
        yield Gallery(pictures=pictures, caption=caption)
    yield Table(
        columns=("sample", "split", "id", "given", "suggested", "probably wrong"),
        rows=[
            (one_line(each.sample), each.split, each.id, each.given, each.suggested, f"{100 * each.score:.1f} %")
            for each in labels.found
        ],
        caption=f"All {counted(len(labels.found), 'likely wrong label')}",
        folded=bool(pictures),
    )


def _moved(quarantine: Quarantine, report: DataReport) -> Iterator[str]:
    undo = f"; `{quarantine.undo}` moves them back" if quarantine.moved else ""
    yield one_line(f"moved     {counted(len(quarantine.moved), 'item')} to {one_line(str(quarantine.folder))}{undo}")
    for path, reason in quarantine.kept[:_NAMED]:
        yield f"not moved {_relative(path, report.root)}: {one_line(reason)}"
    if (more := len(quarantine.kept) - _NAMED) > 0:
        yield f"not moved {more:,} more (--json names them)"
    if report.unusable:
        yield one_line(f"but what is left cannot be trained on: {report.unusable}")


def _line(entry: FindingEntry, root: str | None) -> str:
    parts = [_relative(entry.name, root)]
    if entry.detail:
        parts.append(f"({_relative(entry.detail, root)})")
    if entry.other is not None:
        parts.append(f"= {_relative(entry.other, root)}")
    return " ".join(parts)


def _relative(text: str, root: str | None) -> str:
    return one_line(text.removeprefix(root.rstrip(os.sep) + os.sep) if root is not None else text)


def _figures(report: DataReport) -> Iterator[str]:
    classes = report.classes
    if classes["samples"]:
        images = f"{classes['smallest_train']:,} to {classes['largest_train']:,} training images each"
        yield f"{report.learned:<9} {images}"
    for name in ("width", "height") if report.sizes else ():
        each = report.sizes[name]
        text = f"{each['minimum']:.0f} to {each['maximum']:.0f} pixels, half of them up to {each['median']:.0f}"
        yield f"{name:<9} {text}"
    if report.pixels:
        for name in ("mean", "std"):
            measured, of_run = (
                " ".join(f"{value:.3f}" for value in report.pixels[key]) for key in (name, f"run_{name}")
            )
            yield f"{name:<9} {measured} of the training images; a run uses {of_run}"


def _cost(report: DataReport, *, verbose: bool) -> Iterator[str]:
    cost = report.cost
    speed = f"{cost['images_per_second_per_core']:,.0f}"
    each = f"{cost['cpu_ms_per_image']['mean']:.2f} ms of CPU time per image"
    yield f"decoding  {each}: one core decodes {speed} images/s{'' if verbose else ' (--verbose: histogram)'}"
    if not verbose:
        return
    yield f"          a network that takes M images/s needs M / {speed} workers, and more for resizing and augmentation"
    largest = max(bar["images"] for bar in cost["histogram"])
    for bar in cost["histogram"]:
        if bar["images"]:
            end = f"{bar['to_ms']:g}" if bar["to_ms"] is not None else "…"
            bars = "█" * max(1, round(_BAR * bar["images"] / largest))
            range_ms = f"{bar['from_ms']:g}–{end} ms"
            yield f"        {range_ms:>10}  {bars} {bar['images']:,}"
    for slow in cost["slowest"][:1]:
        path, size = _relative(slow["path"], report.root), f"{slow['width']}x{slow['height']}"
        yield f"        slowest: {path}, {slow['cpu_ms']:.1f} ms, {size}"
