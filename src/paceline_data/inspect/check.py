"""Check an image set for anything that would break or spoil a run; reads everything, changes nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline.data.image.dataset import strata
from paceline.data.image.source import ArraySource, JoinedSource, encoded_source, leaf_sources
from paceline.errors import PacelineError, RecipeError
from paceline.host.machine import available_cores
from paceline.storage.addresses import is_address
from paceline_data.inspect.findings import (
    DataFinding,
    class_figures,
    cost_figures,
    find_all,
    pixel_figures,
    size_figures,
    whole,
)
from paceline_data.inspect.gather import Progress, gather, open_subject
from paceline_data.inspect.look import SEVERITIES, Viewer
from paceline_data.inspect.quarantine import Quarantine, check_place, move_away


@dataclass(frozen=True, kw_only=True)
class DataReport:
    """The result of a check.

    Attributes:
        source: What the user specified.
        dataset: Its name in recipes.
        root: Its path, if it has one.
        splits: By split: number of ``samples``, of ``checked`` ones, and of ``broken`` ones among these.
        validation: Origin of the held-out images.
        findings: All findings, worst first.
        learned: Targets of an image: one of ``classes``, any number of ``labels``, or ``numbers``.
        classes: Statistics of the classes or labels.
        sizes: Statistics of heights, widths and bytes.
        pixels: Statistics of brightness.
        cost: Statistics of decoding; empty for images in memory.
        workers: Number of reading processes.
        seconds: Duration.
        is_folder: Whether it is a folder of class folders on this machine.
        quarantine: Quarantined files, if requested.
        unusable: Why the remaining data cannot be trained on; empty if it can, or if nothing was moved.
    """

    source: str
    dataset: str
    root: str | None
    splits: dict[str, dict[str, int]]
    validation: str
    findings: tuple[DataFinding, ...]
    learned: str
    classes: dict[str, Any]
    sizes: dict[str, Any]
    pixels: dict[str, Any]
    cost: dict[str, Any]
    workers: int
    seconds: float
    is_folder: bool = False
    quarantine: Quarantine | None = None
    unusable: str = ""

    @property
    def moved(self) -> frozenset[str]:
        """Names of the findings whose files were all moved away."""
        return frozenset() if self.quarantine is None else self.quarantine.kinds

    @property
    def passed(self) -> bool:
        """Whether the remaining data would neither break nor spoil a run."""
        return not self.unusable and not any(
            each.kind.severity in ("breaks", "spoils") and each.kind.name not in self.moved for each in self.findings
        )

    @property
    def count(self) -> dict[str, int]:
        """Number of findings by severity."""
        return {
            severity: sum(each.count for each in self.findings if each.kind.severity == severity)
            for severity in SEVERITIES
        }

    def to_json(self) -> dict[str, Any]:
        """Return the report as one JSON object."""
        return {
            "source": self.source,
            "dataset": self.dataset,
            "path": self.root,
            "passed": self.passed,
            "found": self.count,
            "splits": self.splits,
            "validation": self.validation,
            "findings": [
                {
                    "kind": each.kind.name,
                    "severity": each.kind.severity,
                    "count": each.count,
                    "means": each.kind.means,
                    "advice": each.kind.advice,
                    "entries": list(map(asdict, each.entries)),
                }
                for each in self.findings
            ],
            "classes": self.classes,
            "sizes": self.sizes,
            "pixels": self.pixels,
            "cost": self.cost,
            "workers": self.workers,
            "seconds": self.seconds,
            **({} if (aside := self.quarantine) is None else {"moved": aside.moved, "not_moved": aside.kept}),
            **({"unusable": self.unusable} if self.unusable else {}),
        }


def check_data(
    source: str,
    overrides: Sequence[str] = (),
    *,
    workers: int | None = None,
    limit: int | None = None,
    quarantine: Path | None = None,
    progress: Progress = lambda _what, _done, _total: None,
) -> DataReport:
    """Check images for anything that would break or spoil a run.

    Args:
        source: A folder, an archive, the address of one, a recipe's name or file.
        overrides: Changes to the recipe's data section.
        workers: Number of reading processes; None for one per core.
        limit: Number of images to check, evenly spread; None for all.
        quarantine: Folder to which run-breaking files are moved; None to move nothing.
        progress: Called with the progress.

    Raises:
        PacelineError: If there is nothing to check.
    """
    begin = time.perf_counter()
    subject = None if quarantine is not None and is_address(source) else open_subject(source, overrides)
    if quarantine is not None and (subject is None or subject.root is None or not subject.is_folder):
        raise RecipeError(
            f"--quarantine moves files out of a folder of class folders here, which {source!r} is not; leave it out."
        )
    assert subject is not None
    if quarantine is not None and subject.root is not None:
        check_place(subject.root, quarantine)
    # Images without exactly one class are checked as if they had one.
    samples = JoinedSource(subject.splits, np.concatenate([strata(each.labels) for each in subject.splits.values()]))
    workers = workers or available_cores()
    dataset = subject.dataset
    viewers = [
        Viewer(dataset.image_size, dataset.channels, encoded_source(each) is not None)
        for each in subject.splits.values()
    ]
    gathered = gather(samples, viewers, limit=limit, workers=workers, progress=progress)
    findings = find_all(subject, gathered, workers=workers, progress=progress)
    read = whole(gathered)
    is_whole = np.zeros(len(gathered.numbers), dtype=bool)
    is_whole[read] = True
    split_of = samples.part_numbers[gathered.numbers]
    moved, unusable = None, ""
    if quarantine is not None and subject.root is not None:
        moved = move_away(findings, subject.root, quarantine)
        if moved.moved:  # a class may vanish with its last image
            try:
                unusable = next(open_subject(source, overrides).problems.sentences(), "")
            except PacelineError as error:
                unusable = str(error)
    leaves = [leaf for leaf, _ in leaf_sources(samples, np.arange(0))]
    is_in_memory = all(isinstance(each, ArraySource) or hasattr(each, "pixels") for each in leaves)
    return DataReport(
        source=source,
        dataset=subject.dataset.name,
        root=None if subject.root is None else str(subject.root),
        splits={
            name: {
                "samples": len(each),
                "checked": int((split_of == split).sum()),
                "broken": int((~is_whole[split_of == split]).sum()),
            }
            for split, (name, each) in enumerate(subject.splits.items())
        },
        validation=subject.dataset.reasons.get("validation", ""),
        findings=findings,
        learned=subject.learned,
        classes=class_figures(subject),
        sizes=size_figures(gathered, read),
        pixels=pixel_figures(subject, gathered, read),
        cost={} if is_in_memory else cost_figures(gathered, read),
        workers=workers,
        is_folder=subject.is_folder,
        quarantine=moved,
        unusable=unusable,
        seconds=time.perf_counter() - begin,
    )
