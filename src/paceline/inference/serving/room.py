"""How many decoded pictures are in memory at once? As many as there is room for, whoever sent them."""

from __future__ import annotations

import asyncio
from collections import deque
from concurrent.futures import Future
from typing import Any


class Room:
    """Room for so many bytes. Whoever finds it full waits for its turn; only the event loop's thread uses it.

    Args:
        size: Bytes.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._held = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def held(self) -> int:
        """Bytes that are taken."""
        return self._held

    async def take(self, count: int) -> Place:
        """Wait for so many bytes, at most all there are, and take them."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((count, turn))
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back(count)
            self._admit()
            raise
        return Place(self, count)

    def give_back(self, count: int) -> None:
        """So many bytes are free again."""
        self._held -= count
        self._admit()

    def _admit(self) -> None:
        while self._waiting:
            count, turn = self._waiting[0]
            if not turn.done():
                if self._held + count > self._size:
                    return
                self._held += count
                turn.set_result(None)
            self._waiting.popleft()


class Place:
    """What one picture takes of the room; to be left in the end."""

    def __init__(self, room: Room, size: int) -> None:
        self._room = room
        self._size = size

    def shrink(self, count: int) -> None:
        """It needs so many bytes only from now on."""
        if count < self._size:
            self._size, before = count, self._size
            self._room.give_back(before - count)

    def leave(self, work: Future[Any] | None = None) -> None:
        """Give it back; if a thread still works at the picture, which cannot be broken off, when that is done."""
        if work is None or work.done() or work.cancel():
            self.shrink(0)
            return
        loop = asyncio.get_running_loop()
        work.add_done_callback(lambda _: loop.call_soon_threadsafe(self.shrink, 0))
