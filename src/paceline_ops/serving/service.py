"""Request handling: images are decoded in threads and predicted in batches, within limits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector
from starlette.exceptions import HTTPException
from starlette.requests import Request

from paceline.data.image.decode import (
    HEIF_ENDINGS,
    NEEDS_HEIF,
    BrokenImageError,
    exceeds_limit,
    guess_format,
    image_header,
    unsupported_kind,
)
from paceline.data.image.pillow_pixels import UNSUPPORTED
from paceline.errors import DataError, NotFiniteError, RecipeError
from paceline.host.machine import available_cores
from paceline.prediction.predictor import Answer, Predictor, Prepared, Prompt, Reply

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "WEBP", *(("HEIF",) if HEIF_ENDINGS else ()))
"""Upload formats; HEIF with pillow-heif. Pillow reads more, but others are risky from untrusted clients: a TIFF's
tiles, for example, may be a thousand times larger than its declared size."""

_TIFF = (b"II*\0", b"MM\0*")
_DECODED_BYTES = 2**30
# Maximum bytes per pixel during decoding, including copies in other modes.
_PIXEL_BYTES = 16


Result = TypeVar("Result")

_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)


class Metrics:
    """Counters since the service started, and the process's memory and time.

    Args:
        model: Name of the served model.
        digest: SHA-256 of its weights.
    """

    def __init__(self, model: str, digest: str) -> None:
        self.registry = CollectorRegistry()
        Info("paceline_model", "The model that is served.", registry=self.registry).info(
            {"model": model, "weights_sha256": digest}
        )
        ProcessCollector(registry=self.registry)
        self.requests = Counter(
            "paceline_requests", "Requests by route and status.", ("route", "status"), registry=self.registry
        )
        self.images = Counter("paceline_images", "Images or texts by outcome.", ("outcome",), registry=self.registry)
        self.queue = Gauge(
            "paceline_queue_images", "Images or texts that are read, or wait for the network.", registry=self.registry
        )
        self.seconds = Histogram(
            "paceline_request_seconds", "Seconds from a request's head to its answer.", registry=self.registry
        )
        self.batches = Histogram(
            "paceline_batch_images", "Images or texts in each batch.", buckets=_BATCH_SIZES, registry=self.registry
        )


@dataclass(frozen=True, kw_only=True)
class ServiceLimits:
    """The service's limits.

    Attributes:
        request_bytes: Maximum size of one request's body, with or without a declared length; eight times that for all
            requests together.
        images: Maximum number of images or texts in one request.
        pixels: Maximum number of pixels in one image, checked before decoding.
        request_seconds: Maximum time from a request's header to its response, including the upload.
        queue_images: Maximum number of images or texts in decoding or waiting for the network; beyond it, clients must
            retry.
        batch_images: Maximum batch size.
        batch_wait_seconds: Maximum time that the first image of a batch waits for others.
    """

    request_bytes: int = 32 * 2**20
    images: int = 16
    pixels: int = 50_000_000
    request_seconds: float = 30.0
    queue_images: int = 256
    batch_images: int = 32
    batch_wait_seconds: float = 0.005


def busy(sentence: str) -> HTTPException:
    """Return the error response that makes a client retry."""
    return HTTPException(503, f"{sentence}; try again in a second", {"Retry-After": "1"})


async def while_connected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of an awaitable; cancel it and raise HTTPException if the client disconnects."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done() and leaving.result()["type"] == "http.disconnect":
            raise HTTPException(400, "the client disconnected before the response")
        return await working
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


class Service:
    """Predicts images or texts.

    Args:
        predictor: The predictor.
        limits: Request limits.
        metrics: Counters.
    """

    def __init__(self, predictor: Predictor, limits: ServiceLimits, metrics: Metrics) -> None:
        self.predictor = predictor
        self.limits = limits
        self.metrics = metrics
        self._queued = 0
        self._free_bytes = max(_DECODED_BYTES, _PIXEL_BYTES * limits.pixels)
        self._freed = asyncio.Condition()
        self._decoders = ThreadPoolExecutor(available_cores(), thread_name_prefix="decoder")
        self._network = ThreadPoolExecutor(1, thread_name_prefix="network")
        self._most = min(limits.batch_images, predictor.largest_batch or limits.batch_images)
        # Images waiting for the network, each with its maximum number of labels and the future of its prediction.
        self._waiting: asyncio.Queue[tuple[Prepared, int, asyncio.Future[Answer]]] = asyncio.Queue()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the service within this context."""
        with self._network:
            task = asyncio.create_task(self._answer_all())
            try:
                yield
            finally:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        self._decoders.shutdown(cancel_futures=True)

    @contextmanager
    def _in_queue(self, count: int) -> Iterator[None]:
        """Count images or texts as waiting; refuse those beyond the limit."""
        if self._queued + count > self.limits.queue_images:
            raise busy(f"{self._queued} {self.predictor.unit} are already waiting")
        self._queued += count
        self.metrics.queue.set(self._queued)
        try:
            yield
        finally:
            self._queued -= count
            self.metrics.queue.set(self._queued)

    async def answers(self, images: Sequence[bytes], top_k: int) -> list[Answer]:
        """Return one prediction per image or text, in order; each may have more labels than requested.

        Raises:
            HTTPException: If too many images are waiting, none can be read, or an output is not finite.
        """
        with self._in_queue(len(images)):
            # Waits for all, also if one fails: no image may keep running without its place in the queue.
            outcomes = await asyncio.gather(*(self._answer(each, top_k) for each in images), return_exceptions=True)
        answers: list[Answer] = []
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
            answers.append(outcome)
        reasons = [answer.error for answer in answers if answer.error is not None]
        self.metrics.images.labels("unreadable").inc(len(reasons))
        self.metrics.images.labels("answered").inc(len(images) - len(reasons))
        if len(reasons) == len(images):
            raise HTTPException(422, f"none of the {self.predictor.unit} can be read: {'; '.join(reasons[:3])}")
        return answers

    async def reply(self, prompt: Prompt) -> Reply:
        """Answer one prompt of a language model.

        Raises:
            HTTPException: If it cannot be answered, or too many wait.
        """
        with self._in_queue(1):
            reply = await self._ask(self.predictor.reply, prompt)
        self.metrics.images.labels("answered").inc()
        return reply

    async def pieces(self, prompt: Prompt) -> AsyncGenerator[str, None]:
        """Yield the text that follows a prompt, while it is written; requests take turns, a token each.

        Raises:
            HTTPException: If it cannot be answered, or too many wait.
        """
        with self._in_queue(1):
            written = self.predictor.pieces(prompt)
            try:
                while (piece := await self._ask(next, written, None)) is not None:
                    yield piece
                self.metrics.images.labels("answered").inc()
            finally:
                # In the network's thread, which may be writing for it still.
                with suppress(RuntimeError):  # the service has stopped
                    self._network.submit(getattr(written, "close", lambda: None))

    async def _ask(self, function: Callable[..., Result], *values: object) -> Result:
        """Call a function in the network's thread."""
        try:
            result = await asyncio.get_running_loop().run_in_executor(self._network, function, *values)
        except (DataError, RecipeError) as error:
            self.metrics.images.labels("unreadable").inc()
            raise HTTPException(422, str(error)) from None
        except NotFiniteError as error:
            raise HTTPException(500, str(error)) from None
        return result

    async def _answer(self, content: bytes, top_k: int) -> Answer:
        """Decode an image when enough memory is free, and predict it."""
        loop = asyncio.get_running_loop()
        try:
            reserved = len(content)
            if self.predictor.unit == "images":
                pixels = await loop.run_in_executor(self._decoders, check_picture, content, self.limits.pixels)
                reserved = _PIXEL_BYTES * pixels
            async with self._freed:
                await self._freed.wait_for(lambda: self._free_bytes >= reserved)
                self._free_bytes -= reserved
            try:
                prepared = await loop.run_in_executor(self._decoders, self.predictor.prepare, content)
                kept = getattr(prepared, "nbytes", reserved)
                if kept < reserved:
                    await self._free(reserved - kept)
                    reserved = kept
                future: asyncio.Future[Answer] = loop.create_future()
                self._waiting.put_nowait((prepared, top_k, future))
                answer = await future
            finally:
                await self._free(reserved)
        except BrokenImageError as error:
            return self.predictor.unreadable(Path(), error.reason)
        if answer.error is not None:
            raise HTTPException(500, answer.error)
        return answer

    async def _free(self, count: int) -> None:
        self._free_bytes += count
        async with self._freed:
            self._freed.notify_all()

    async def _answer_all(self) -> None:
        """In the network's thread, batch all waiting images and those that arrive within the first one's wait."""
        loop = asyncio.get_running_loop()
        while True:
            batch = [await self._waiting.get()]
            with suppress(TimeoutError):
                async with asyncio.timeout(self.limits.batch_wait_seconds):
                    while len(batch) < self._most:
                        batch.append(await self._waiting.get())
            while len(batch) < self._most and not self._waiting.empty():
                batch.append(self._waiting.get_nowait())
            # A request that timed out has cancelled its images.
            batch = [each for each in batch if not each[2].done()]
            if not batch:
                continue
            self.metrics.batches.observe(len(batch))
            images, max_top_k = [image for image, _, _ in batch], max(top_k for _, top_k, _ in batch)
            try:
                answers = await loop.run_in_executor(self._network, self.predictor.answer, images, max_top_k)
            except Exception as error:  # noqa: BLE001  # each request reports it, and the next batch may be answered
                for _, _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, _, future), answer in zip(batch, answers, strict=True):
                if not future.done():
                    future.set_result(answer)


def check_picture(content: bytes, limit: int) -> int:
    """Return an upload's number of pixels, from its header.

    Raises:
        BrokenImageError: If it has too many pixels, or an unsupported format.
    """
    head = image_header(content, FORMATS)
    if head is None:
        raise BrokenImageError("", _why_not_read(content, limit))
    (height, width), _ = head
    if height * width > limit:
        raise BrokenImageError("", f"{width}x{height} pixels; at most {limit:,} are decoded")
    return height * width


def _why_not_read(content: bytes, limit: int) -> str:
    """Return why the header of an upload cannot be read."""
    if kind := unsupported_kind(content):
        return f"{kind} {UNSUPPORTED}"
    if exceeds_limit(content, FORMATS):
        return f"too large: at most {limit:,} pixels are decoded"
    accepted = ", ".join(FORMATS)
    if kind := guess_format(content[:64]) or ("a TIFF image" if content.startswith(_TIFF) else ""):
        return kind if kind == NEEDS_HEIF else f"{kind}, which is not accepted; send one of {accepted}"
    return f"not an image in any of {accepted}, or damaged at its beginning" if content else "the file is empty"
