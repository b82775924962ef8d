"""Request handling: images are decoded in threads and predicted in batches, within limits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector
from starlette.exceptions import HTTPException

from paceline.data.image.decode import BrokenImageError, image_header
from paceline.inference.answers import Answer, ImagePredictor, Prepared
from paceline.machine import available_cores

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "WEBP")
"""What uploads may be. Pillow reads more, but nobody needs all of it from afar: a TIFF's tiles, for example, may be
a thousand times larger than its size says."""

_DECODED_BYTES = 2**30
# Most that a pixel takes while it is decoded, copies in other modes included.
_PIXEL_BYTES = 16


_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)


class Metrics:
    """Counts since the service started, and the process's memory and time.

    Args:
        model: What is served.
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
        self.images = Counter("paceline_images", "Images by outcome.", ("outcome",), registry=self.registry)
        self.queue = Gauge(
            "paceline_queue_images", "Images that are decoded, or wait for the network.", registry=self.registry
        )
        self.seconds = Histogram(
            "paceline_request_seconds", "Seconds from a request's head to its answer.", registry=self.registry
        )
        self.batches = Histogram(
            "paceline_batch_images", "Images in each batch.", buckets=_BATCH_SIZES, registry=self.registry
        )


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Where the service stops.

    Attributes:
        request_bytes: Of one request's body, whether or not it declares its length; of all together, eight times that.
        images: Of one request.
        pixels: Of one image, before it is decoded.
        request_seconds: From a request's head to its answer, the upload included.
        queue_images: Images that are decoded or wait for the network; beyond it, requests are told to retry.
        batch_images: Answered at once.
        batch_wait_seconds: How long the first image of a batch waits for others.
    """

    request_bytes: int = 32 * 2**20
    images: int = 16
    pixels: int = 50_000_000
    request_seconds: float = 30.0
    queue_images: int = 256
    batch_images: int = 32
    batch_wait_seconds: float = 0.005


def busy(sentence: str) -> HTTPException:
    """Return the refusal that tells a client to retry."""
    return HTTPException(503, f"{sentence}; try again in a second", {"Retry-After": "1"})


class Service:
    """Answers images.

    Args:
        predictor: The network.
        limits: Where to stop.
        metrics: Counts.
    """

    def __init__(self, predictor: ImagePredictor, limits: Limits, metrics: Metrics) -> None:
        self.predictor = predictor
        self.limits = limits
        self.metrics = metrics
        self._queued = 0
        self._free_bytes = max(_DECODED_BYTES, _PIXEL_BYTES * limits.pixels)
        self._freed = asyncio.Condition()
        self._decoders = ThreadPoolExecutor(available_cores(), thread_name_prefix="decoder")
        self._most = min(limits.batch_images, predictor.largest_batch or limits.batch_images)
        # Images that wait for the network, each with its most labels and with its answer to come.
        self._waiting: asyncio.Queue[tuple[Prepared, int, asyncio.Future[Answer]]] = asyncio.Queue()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Answer within this context."""
        with ThreadPoolExecutor(1, thread_name_prefix="network") as network:
            task = asyncio.create_task(self._answer_all(network))
            try:
                yield
            finally:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        self._decoders.shutdown(cancel_futures=True)

    async def answers(self, images: Sequence[bytes], top_k: int) -> list[Answer]:
        """Return one answer for each image, in order; each may have more labels than requested.

        Raises:
            HTTPException: If too many images wait, none can be read, or an answer is not finite.
        """
        if self._queued + len(images) > self.limits.queue_images:
            raise busy(f"{self._queued} images are already waiting")
        self._queued += len(images)
        self.metrics.queue.set(self._queued)
        try:
            # All are waited for, also if one fails: none continues without its place in the queue.
            outcomes = await asyncio.gather(*(self._answer(each, top_k) for each in images), return_exceptions=True)
        finally:
            self._queued -= len(images)
            self.metrics.queue.set(self._queued)
        answers: list[Answer] = []
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
            answers.append(outcome)
        reasons = [answer.error for answer in answers if answer.error is not None]
        self.metrics.images.labels("unreadable").inc(len(reasons))
        self.metrics.images.labels("answered").inc(len(images) - len(reasons))
        if len(reasons) == len(images):
            raise HTTPException(422, f"none of the images can be read: {'; '.join(reasons[:3])}")
        return answers

    async def _answer(self, content: bytes, top_k: int) -> Answer:
        """Decode an image when there is memory for it, and answer it."""
        loop = asyncio.get_running_loop()
        try:
            pixels = await loop.run_in_executor(self._decoders, check_picture, content, self.limits.pixels)
            held = _PIXEL_BYTES * pixels
            async with self._freed:
                await self._freed.wait_for(lambda: self._free_bytes >= held)
                self._free_bytes -= held
            try:
                prepared = await loop.run_in_executor(self._decoders, self.predictor.prepare, content)
                if prepared.nbytes < held:
                    await self._free(held - prepared.nbytes)
                    held = prepared.nbytes
                future: asyncio.Future[Answer] = loop.create_future()
                self._waiting.put_nowait((prepared, top_k, future))
                answer = await future
            finally:
                await self._free(held)
        except BrokenImageError as error:
            return self.predictor.unreadable(Path(), error.reason)
        if answer.error is not None:
            raise HTTPException(500, answer.error)
        return answer

    async def _free(self, count: int) -> None:
        self._free_bytes += count
        async with self._freed:
            self._freed.notify_all()

    async def _answer_all(self, network: ThreadPoolExecutor) -> None:
        """Give the network, in its own thread, whatever waits, or comes within the time that the first one waits."""
        loop = asyncio.get_running_loop()
        while True:
            batch = [await self._waiting.get()]
            with suppress(TimeoutError):
                async with asyncio.timeout(self.limits.batch_wait_seconds):
                    while len(batch) < self._most:
                        batch.append(await self._waiting.get())
            while len(batch) < self._most and not self._waiting.empty():
                batch.append(self._waiting.get_nowait())
            # A request that is overdue has cancelled its images.
            batch = [each for each in batch if not each[2].done()]
            if not batch:
                continue
            self.metrics.batches.observe(len(batch))
            images, most = [image for image, _, _ in batch], max(top_k for _, top_k, _ in batch)
            try:
                answers = await loop.run_in_executor(network, self.predictor.answer, images, most)
            except Exception as error:  # noqa: BLE001  # each request reports it, and the next batch may be answered
                for _, _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, _, future), answer in zip(batch, answers, strict=True):
                if not future.done():
                    future.set_result(answer)


def check_picture(content: bytes, most: int) -> int:
    """Return how many pixels an upload has, by its head.

    Raises:
        BrokenImageError: If it has too many, or is in no format for uploads.
    """
    head = image_header(content, FORMATS)
    if head is None:
        raise BrokenImageError("", f"not an image of at most {most:,} pixels in any of {', '.join(FORMATS)}")
    (height, width), _ = head
    if height * width > most:
        raise BrokenImageError("", f"{width}x{height} pixels; at most {most:,} are decoded")
    return height * width
