"""What tests declare a fixture as that they call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Call = Callable[..., Any]
