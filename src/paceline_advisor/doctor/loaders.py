"""Which DataLoaders does the user's code make, and with what?"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

from torch.utils.data import DataLoader

from paceline_advisor.doctor.calls import place_of
from paceline_advisor.doctor.findings import Place


@dataclass(frozen=True, kw_only=True)
class Loader:
    """A DataLoader that code of the user's own has made.

    Attributes:
        place: Where.
        workers: Its processes.
        pinned: Whether its batches come in page-locked memory.
        persistent: Whether its processes stay from one epoch to the next.
        drops_last: Whether it leaves out what does not fill a batch.
    """

    place: Place
    workers: int
    pinned: bool
    persistent: bool
    drops_last: bool


@contextmanager
def watching_loaders() -> Iterator[list[Loader]]:
    """Note every DataLoader that is made inside, but Paceline's own."""
    found: list[Loader] = []
    made = DataLoader.__init__

    @wraps(made)
    def noting(self: DataLoader[Any], *args: Any, **options: Any) -> None:
        made(self, *args, **options)
        place = place_of(sys._getframe(1))  # noqa: SLF001  # the caller's, which no other function of Python gives
        if place is not None:
            found.append(
                Loader(
                    place=Place(place.file, place.line, "DataLoader"),
                    workers=self.num_workers,
                    pinned=self.pin_memory,
                    persistent=self.persistent_workers,
                    drops_last=self.drop_last,
                )
            )

    DataLoader.__init__ = noting  # type: ignore[method-assign]  # put back below
    try:
        yield found
    finally:
        DataLoader.__init__ = made  # type: ignore[method-assign]  # as it was
