"""Batches across requests: images wait a few milliseconds for one another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

from paceline.inference.answers import Answer, ImagePredictor, Prepared
from paceline.inference.serving.metrics import Metrics


class _Waiting(NamedTuple):
    image: Prepared
    top_k: int
    answer: asyncio.Future[Answer]


class Batcher:
    """Gives the network, in a thread of its own, whatever waits.

    Args:
        predictor: Answers.
        most: Images in a batch.
        wait_seconds: How long the first image of a batch waits for others.
        metrics: Counts batches.
    """

    def __init__(self, predictor: ImagePredictor, most: int, wait_seconds: float, metrics: Metrics) -> None:
        self._predictor = predictor
        self._most = min(most, predictor.largest_batch or most)
        self._wait_seconds = wait_seconds
        self._metrics = metrics
        self._queue: asyncio.Queue[_Waiting] = asyncio.Queue()

    async def answer(self, image: Prepared, top_k: int) -> Answer:
        """Return the answer for an image, which may have more labels than asked for."""
        waiting = _Waiting(image, top_k, asyncio.get_running_loop().create_future())
        self._queue.put_nowait(waiting)
        return await waiting.answer

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

    async def _answer_all(self, network: ThreadPoolExecutor) -> None:
        loop = asyncio.get_running_loop()
        while True:
            # A request that is overdue has cancelled its images.
            batch = [each for each in await self._batch() if not each.answer.done()]
            if not batch:
                continue
            self._metrics.batches.observe(len(batch))
            images, top_k = [each.image for each in batch], max(each.top_k for each in batch)
            try:
                answers = await loop.run_in_executor(network, self._predictor.answer, images, top_k)
            except Exception as error:  # noqa: BLE001  # each request reports it, and the next batch may be answered
                for each in batch:
                    if not each.answer.done():
                        each.answer.set_exception(error)
                continue
            for each, answer in zip(batch, answers, strict=True):
                if not each.answer.done():
                    each.answer.set_result(answer)

    async def _batch(self) -> list[_Waiting]:
        """Return what waits, or comes within the time that the first one waits."""
        batch = [await self._queue.get()]
        with suppress(TimeoutError):
            async with asyncio.timeout(self._wait_seconds):
                while len(batch) < self._most:
                    batch.append(await self._queue.get())
        while len(batch) < self._most and not self._queue.empty():
            batch.append(self._queue.get_nowait())
        return batch
