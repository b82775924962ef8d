"""JSON from files that others wrote."""

from __future__ import annotations

import json
from typing import Any


def load_json(text: str | bytes, **options: Any) -> Any:
    """Parse one JSON document, as ``json.loads`` does with these options.

    Raises:
        ValueError: If it is no JSON, is not UTF-8, or is nested so deeply that Python's own parser gives up.
    """
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
