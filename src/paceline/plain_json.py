"""Parse JSON from untrusted files."""

from __future__ import annotations

import json
from typing import Any


def load_json(text: str | bytes | bytearray, **options: Any) -> Any:
    """Parse one JSON document, as ``json.loads`` does with these options.

    Raises:
        ValueError: If it is not JSON, not UTF-8, or nested too deeply for Python's parser.
    """
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
