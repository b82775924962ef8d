"""The ledger of a loop that is not Paceline's: the files of all ranks, and ``ledger.json`` with the number of samples.

The loop names no epochs: an epoch ends with the step that completes its number of samples.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.errors import RunDirectoryError, VersionError
from paceline.parsing.plain_text import load_json
from paceline.records.ledger import EpochCount, LedgerEntry, LedgerStream
from paceline.records.run_directory import file_error, refuse_special_file, write_json

_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class OwnLedger:
    """Content of ``ledger.json``.

    Attributes:
        samples: Samples of the data set.
        dropped: Samples that each epoch leaves out.
        is_saved: Whether a checkpoint with the ledger was ever whole; from then on it never starts over by itself.
    """

    samples: int
    dropped: int = 0
    is_saved: bool = False

    def write(self, folder: Path) -> None:
        """Write the file durably.

        Raises:
            RunDirectoryError: If the disk fails.
        """
        write_json(_file(folder), {"format_version": _VERSION, **asdict(self)})


def read_own_ledger(folder: Path) -> OwnLedger | None:
    """Read a folder's ``ledger.json``; None if there is none.

    Raises:
        RunDirectoryError: If it cannot be read, or is damaged.
        VersionError: If another version of Paceline wrote it.
    """
    path = _file(folder)
    try:
        refuse_special_file(path)
        content = load_json(path.read_bytes())
        if content["format_version"] != _VERSION:
            raise VersionError.of(path, content["format_version"])
        found = OwnLedger(**{name: content[name] for name in ("samples", "dropped", "is_saved")})
        if type(found.samples) is not int or type(found.dropped) is not int:
            raise TypeError("its numbers are not whole")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise file_error("read", path, error) from error
    except (ValueError, KeyError, TypeError) as error:
        raise RunDirectoryError(f"'{path}' is damaged ({error}): restore it from a copy.") from error
    return found


def count_own_epochs(folder: Path, facts: OwnLedger) -> tuple[int, tuple[EpochCount, ...], list[str]]:
    """Return the last step, each epoch's counts, and a sentence for each gap between steps.

    Raises:
        RunDirectoryError: If a file is damaged, or holds samples that the data set does not have.
    """
    stream, step = LedgerStream(folder), 0
    epochs: list[EpochCount] = []
    gaps: list[str] = []
    parts: list[NDArray[np.int64]] = []
    used, expected = 0, facts.samples - facts.dropped
    while stream.head is not None:
        if stream.head.step > step + 1:
            gaps.append(f"steps {step + 1} to {stream.head.step - 1} are not in the ledger.")
        step = stream.head.step
        records = [each.ids for each in stream.take(step=step) if isinstance(each, LedgerEntry)]
        ids = np.concatenate([np.empty(0, dtype=np.int64), *records])
        if ids.size and (largest := int(ids.max())) >= facts.samples:
            raise RunDirectoryError(
                f"The ledger '{folder}' holds sample {largest}, but its data set has {facts.samples} samples: the "
                "files are of two trainings; start in another folder."
            )
        if used + ids.size >= expected and (distinct := np.unique(ids)).size < len(records):
            ids = distinct  # an epoch's last batch had fewer samples than there are ranks, and these repeated some
        parts.append(ids)
        used += ids.size
        if used >= expected:
            epochs.append(_counted(len(epochs), parts, expected))
            parts, used = [], 0
    if parts:
        epochs.append(_counted(len(epochs), parts, expected))
    return step, tuple(epochs), gaps


def _counted(epoch: int, parts: list[NDArray[np.int64]], expected: int) -> EpochCount:
    used = sum(each.size for each in parts)
    distinct = np.unique(np.concatenate(parts)).size
    return EpochCount(
        epoch=epoch,
        last=epoch,
        used=used,
        broken=0,
        duplicates=used - distinct,
        missing=max(0, expected - distinct),
        is_over=used >= expected,
    )


def _file(folder: Path) -> Path:
    return folder / "ledger.json"
