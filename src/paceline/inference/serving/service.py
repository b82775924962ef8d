"""How is one request answered: read, taken apart, decoded, asked about, within its limits?"""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from PIL import Image
from starlette.requests import Request

from paceline.data.image.decode import BrokenImageError, image_header
from paceline.inference.answers import Answer, ImagePredictor, Prepared
from paceline.inference.serving.batching import Batcher
from paceline.inference.serving.limits import Limits, RefusedError
from paceline.inference.serving.metrics import Metrics
from paceline.inference.serving.room import Room
from paceline.inference.serving.uploads import Desk, Upload, disconnected, uploads_of
from paceline.machine import available_cores

Result = TypeVar("Result")

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "WEBP")
"""What uploads may be. Pillow reads more, but nobody needs to be able to ask for all of it from afar; a TIFF's tiles,
of which its size says nothing, are the likes of what one would be asked for."""


class Service:
    """What lies behind the address.

    Args:
        predictor: Answers.
        limits: Where to stop.
        metrics: Told of what happens.
    """

    def __init__(self, predictor: ImagePredictor, limits: Limits, metrics: Metrics) -> None:
        self.predictor = predictor
        self.limits = limits
        self.metrics = metrics
        self.is_stopping = False
        self._desk = Desk(limits)
        self._batcher = Batcher(predictor, limits, metrics)
        self._room = Room(limits.decoded_bytes)
        self._decoders = ThreadPoolExecutor(available_cores(), thread_name_prefix="decoder")

    def begin_to_stop(self) -> None:
        """Say from now on that nobody new is let in."""
        self.is_stopping = True

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Answers are given within."""
        self._batcher.start()
        try:
            yield
        finally:
            self.is_stopping = True
            await self._batcher.stop()
            self._decoders.shutdown(cancel_futures=True)

    async def answered(self, request: Request, top_k: int) -> list[tuple[Upload, Answer]]:
        """Answer for every image of a request, in its order.

        Args:
            request: With a body as :func:`~paceline.inference.serving.uploads.uploads_of` takes apart.
            top_k: Most labels of each.

        Raises:
            RefusedError: If it breaks a limit, is malformed, none of its images can be read, or its client goes away.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.limits.request_seconds
        content_type = request.headers.get("content-type", "")
        is_uploaded = False
        try:
            async with asyncio.timeout_at(deadline), self._desk.body(request) as body:
                is_uploaded = True
                uploads = await loop.run_in_executor(self._decoders, uploads_of, content_type, body, self.limits)
                body.clear()
                return await _while_wanted(request, self._answer_for(uploads, top_k))
        except TimeoutError:
            most = f"{self.limits.request_seconds:g} seconds"
            if is_uploaded:
                raise RefusedError(503, "overdue", f"there was no answer within {most}; come back later") from None
            raise RefusedError(408, "slow_upload", f"the request was not whole within {most}") from None

    async def _answer_for(self, uploads: Sequence[Upload], top_k: int) -> list[tuple[Upload, Answer]]:
        with self._queued(len(uploads)):
            asked = (self._told(upload.content, top_k) for upload in uploads)
            # All are waited for, also if one of them fails: none is to go on without its place in the queue.
            outcomes = await asyncio.gather(*asked, return_exceptions=True)
        answers: list[Answer] = []
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
            answers.append(outcome)
        told = list(zip(uploads, answers, strict=True))
        unreadable = sum(answer.error is not None for answer in answers)
        self.metrics.images(answered=len(uploads) - unreadable, unreadable=unreadable)
        if unreadable == len(uploads):
            reasons = "; ".join(f"{upload.name[:50] or 'an image'}: {answer.error}" for upload, answer in told[:3])
            raise RefusedError(422, "unreadable", f"none of the images can be read: {reasons}")
        return told

    async def _told(self, content: bytes, top_k: int) -> Answer:
        """The answer for one image, which is decoded when there is room for it."""
        decoding: Future[Prepared] | None = None
        try:
            pixels = await asyncio.wrap_future(self._decoders.submit(check_picture, content, self.limits.pixels))
            place = await self._room.take(self.limits.decoding_bytes(pixels))
            try:
                decoding = self._decoders.submit(self.predictor.prepare, content)
                prepared = await asyncio.wrap_future(decoding)
                place.shrink(prepared.nbytes)
                (answer,) = await self._batcher.answers([prepared], top_k)
                if answer.error is not None:
                    raise RefusedError(500, "not_finite", answer.error)
            finally:
                place.leave(decoding)
        except BrokenImageError as error:
            return self.predictor.unreadable(Path(), error.reason)
        return answer

    @contextmanager
    def _queued(self, images: int) -> Iterator[None]:
        metrics = self.metrics
        if metrics.queue_images + images > self.limits.queue_images:
            raise RefusedError(503, "queue_full", f"{metrics.queue_images} images wait already; come back in a second")
        metrics.queue_images += images
        try:
            yield
        finally:
            metrics.queue_images -= images


async def _while_wanted(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of work, which is cancelled if the client goes away; RefusedError then."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done() and leaving.result()["type"] == "http.disconnect":
            raise disconnected()
        return await working
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


def check_picture(content: bytes, most: int) -> int:
    """Refuse what is in no format for uploads, or would be too large decoded, by its head.

    Returns:
        How many pixels it has.

    Raises:
        BrokenImageError: Saying so.
    """
    head = image_header(content, FORMATS)
    if head is None and _is_too_large(content):
        raise BrokenImageError("", f"too many pixels by far; at most {most:,} are decoded")
    if head is None:
        raise BrokenImageError("", f"not an image in any of these formats: {', '.join(FORMATS)}")
    (height, width), _ = head
    if height * width > most:
        raise BrokenImageError("", f"{width}x{height} pixels; at most {most:,} are decoded")
    return height * width


def _is_too_large(content: bytes) -> bool:
    """Whether Pillow opens no picture that large."""
    try:
        Image.open(io.BytesIO(content), formats=FORMATS).close()
    except Image.DecompressionBombError:
        return True
    except (OSError, SyntaxError, ValueError):
        return False
    return False
