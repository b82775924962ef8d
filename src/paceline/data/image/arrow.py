"""Where is pyarrow? It reads Hugging Face's files and parquet, and is an extra."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType
from typing import Any

from paceline.errors import DataError


def require_pyarrow() -> ModuleType:
    """Return the library, which is an extra.

    Raises:
        DataError: If it is not installed.
    """
    try:
        import pyarrow as pa
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(
            "Packing, parquet tables and datasets of Hugging Face's need pyarrow, which "
            f"cannot be imported ({error}): run `pip install 'paceline[pack]'`."
        ) from error
    found: ModuleType = pa
    return found


def mapped(path: str | Path) -> Any:
    """A file for pyarrow to read, mapped into memory; unlike for pyarrow's own openers its name may be any bytes."""
    return require_pyarrow().memory_map(os.fsencode(path))
