"""Where is Plotly's script, and how does it lie in a page: packed, to a third of its size?

The package's Python is never imported: it takes long, and figures are plain dictionaries.
"""

from __future__ import annotations

import base64
import gzip
import importlib.util
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

from paceline.errors import PacelineError

_SCRIPT = Path("package_data") / "plotly.min.js"


@dataclass(frozen=True)
class PackedScript:
    """A script as it lies in a page.

    Attributes:
        text: gzip, in base64.
        digest: SHA-256 of the script unpacked, in base64, as a browser's content policy takes it.
    """

    text: str
    digest: str


@cache
def plotly_script() -> PackedScript:
    """Plotly's script, packed; takes a quarter of a second, once per process.

    Raises:
        PacelineError: If Plotly is not installed.
    """
    # Looks for the package without importing it.
    found = importlib.util.find_spec("plotly")
    folders = [Path(each) for each in (found.submodule_search_locations or ())] if found else []
    files = [folder / _SCRIPT for folder in folders if (folder / _SCRIPT).is_file()]
    if not files:
        raise PacelineError("there is no Plotly to draw charts with; install it: pip install plotly")
    script = files[0].read_bytes()
    # Without a time in it the same script gives the same page.
    packed = gzip.compress(script, compresslevel=6, mtime=0)
    return PackedScript(base64.b64encode(packed).decode("ascii"), script_digest(script))


def script_digest(script: bytes) -> str:
    """What a content policy knows a script by."""
    return base64.b64encode(sha256(script).digest()).decode("ascii")
