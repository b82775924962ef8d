"""How do libraries load without the interpreter searching them for garbage?

``import torch`` makes objects by the hundred thousand, and none of them is garbage. Python counts what is made and
goes through all of it again and again, which was about a fifth of the time until a first step.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """No search for garbage within, where large libraries are imported; it may be nested."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if not gc.get_freeze_count():
                # Out of the youngest generation, in which the next search would begin with all that was loaded, into
                # the oldest; not left frozen, since what the caller had made before may be garbage one day.
                gc.freeze()
                gc.unfreeze()
            gc.enable()
