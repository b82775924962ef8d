"""How long was each training sample? Kept where steps are balanced by that, so that the order can be checked later."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.errors import RunDirectoryError
from paceline.records.run_directory import refuse_odd_record, write_bytes


def write_lengths(path: Path, tokens: NDArray[np.int64]) -> None:
    """Write a NumPy file, in the smallest numbers that hold the longest.

    Raises:
        RunDirectoryError: If the disk refuses.
    """
    content = io.BytesIO()
    np.save(content, tokens.astype(np.min_scalar_type(int(tokens.max(initial=0)))), allow_pickle=False)
    write_bytes(path, content.getvalue())


def read_lengths(path: Path) -> NDArray[np.int64]:
    """Read them back, int64 [samples].

    Raises:
        RunDirectoryError: If the file is missing or damaged.
    """
    refuse_odd_record(path)
    try:
        found = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise RunDirectoryError(f"the samples' lengths cannot be read from '{path}': {error}.") from error
    if not isinstance(found, np.ndarray) or found.ndim != 1 or found.dtype.kind not in "iu":
        raise RunDirectoryError(f"'{path}' holds no lengths of samples: one row of whole numbers.")
    return found.astype(np.int64)
