"""Is memory bounded by the pictures that are in it, and not by how many somebody sends?"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.inference.labelling import Prediction
from paceline.inference.serving.limits import Limits, RefusedError
from paceline.inference.serving.metrics import Metrics
from paceline.inference.serving.room import Room

_WHY = "not installed: pip install 'paceline[serve]'"
requests = pytest.importorskip("starlette.requests", reason=_WHY)
pytest.importorskip("python_multipart", reason=_WHY)
service_of = pytest.importorskip("paceline.inference.serving.service", reason=_WHY)

SIDE = 4000
LARGE = Limits().decoding_bytes(SIDE * SIDE)


class LargePictures:
    """Keeps pictures as large as they are, as a detector does, and counts them; answers when it is told to."""

    classes = ("thing",)
    usual_top_k = 1
    largest_batch: int | None = 1
    finds_boxes = False
    digest = "0" * 64

    def __init__(self) -> None:
        self.prepared = 0
        self.answered = 0
        self.most = 0
        self.goes_on = threading.Event()
        self._lock = threading.Lock()

    def prepare(self, content: bytes) -> NDArray[np.uint8]:
        with self._lock:
            self.prepared += 1
            self.most = max(self.most, self.prepared - self.answered)
        return np.empty(LARGE, dtype=np.uint8)  # never touched, so never in memory

    def answer(self, prepared: Sequence[NDArray[np.uint8]], top_k: int) -> list[Prediction]:
        assert self.goes_on.wait(60)
        with self._lock:
            self.answered += len(prepared)
        return [Prediction(Path(), ("thing",), (1.0,)) for _ in prepared]

    def unreadable(self, path: Path, reason: str) -> Prediction:
        return Prediction(path, error=reason)


def request(images: int, leaving: asyncio.Event | None = None) -> Any:
    """A request of so many PPM files, of which there are the heads; its client may leave."""
    part = b'--x\r\nContent-Disposition: form-data; name="images"\r\n\r\n' + f"P6 {SIDE} {SIDE} 255 ".encode() + b"\r\n"
    body = part * images + b"--x--\r\n"

    received = 0

    async def receive() -> dict[str, object]:
        nonlocal received
        received += 1
        if received > 1 and leaving is not None:
            await leaving.wait()
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": body, "more_body": False}

    kind = (b"content-type", b"multipart/form-data; boundary=x")
    return requests.Request({"type": "http", "method": "POST", "headers": [kind]}, receive)


def test_pictures_wait_until_there_is_room_and_all_are_answered() -> None:
    predictor, limits = LargePictures(), Limits()
    room = limits.decoded_bytes // LARGE
    assert 2 <= room < 8

    async def ask() -> list[int]:
        service = service_of.Service(predictor, limits, Metrics("large", predictor.digest))
        async with service.running():
            asked = [asyncio.create_task(service.answered(request(8), 1)) for _ in range(2)]
            while predictor.prepared < room:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)  # for more of them, were they let in
            predictor.goes_on.set()
            return [len(each) for each in await asyncio.gather(*asked)]

    assert asyncio.run(ask()) == [8, 8]
    assert predictor.most == room
    assert predictor.prepared == predictor.answered == 16


def test_requests_that_are_overdue_leave_their_room() -> None:
    predictor, limits = LargePictures(), Limits(request_seconds=0.3)

    async def ask() -> int:
        service = service_of.Service(predictor, limits, Metrics("large", predictor.digest))
        async with service.running():
            for _ in range(2):
                with pytest.raises(RefusedError, match="there was no answer within"):
                    await service.answered(request(8), 1)
            service.limits = Limits()  # the room is what counts now, not the time
            predictor.goes_on.set()
            return len(await service.answered(request(2), 1))

    assert asyncio.run(ask()) == 2


def test_work_for_a_client_that_left_is_stopped() -> None:
    predictor, limits = LargePictures(), Limits()
    room = limits.decoded_bytes // LARGE

    async def ask() -> int:
        service, leaving = service_of.Service(predictor, limits, Metrics("large", predictor.digest)), asyncio.Event()
        async with service.running():
            asked = asyncio.create_task(service.answered(request(8, leaving), 1))
            while predictor.prepared < room:
                await asyncio.sleep(0.01)
            leaving.set()
            with pytest.raises(RefusedError, match="went away"):
                await asked
            predictor.goes_on.set()
            return len(await service.answered(request(2), 1))

    assert asyncio.run(asyncio.wait_for(ask(), 60)) == 2
    assert predictor.prepared == room + 2


def test_room_is_had_in_turn_and_given_back_when_the_work_is_done() -> None:
    async def visit() -> None:
        room = Room(10)
        first = await room.take(6)
        large, small = asyncio.create_task(room.take(8)), asyncio.create_task(room.take(2))
        await asyncio.sleep(0)
        assert room.held == 6
        assert not small.done()  # there is room for it, and it is not its turn
        large.cancel()
        assert (await small, room.held)[1] == 8
        going_on = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            work = pool.submit(going_on.wait, 60)
            while not work.running():
                await asyncio.sleep(0.01)
            first.leave(work)
            assert room.held == 8
            going_on.set()
            while room.held != 2:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(visit(), 60))
